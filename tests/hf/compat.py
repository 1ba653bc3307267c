"""``make compat``: runs all tests of ``seqpar.hf`` with the oldest and newest versions of its dependencies.

Each set of versions has an environment of its own in .compat/. The results are written to a table in
docs/huggingface.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "huggingface.md"
BEGIN, END = "<!-- make compat -->", "<!-- /make compat -->"
PACKAGES = ("transformers", "accelerate", "peft", "trl", "torch")
TESTS = ("--numprocesses", "2", "--dist", "loadfile", "tests/hf")
TORCH = os.environ.get("TORCH", "torch==2.13.0")
CPU_INDEX = os.environ.get("CPU_INDEX", "https://download.pytorch.org/whl/cpu")
NEEDED = ("datasets", "hypothesis", "pytest", "pytest-xdist", "torchdata", "triton")
SETS = {
    "oldest": ("transformers==5.23.0", "accelerate==1.12.0", "peft==0.18.0", "trl==1.9.0"),
    "newest": ("transformers", "accelerate", "peft", "trl"),
}


def python_of(name: str, versions: tuple[str, ...]) -> Path:
    """The Python interpreter of the environment with these versions. The environment is created if necessary."""
    folder = ROOT / ".compat" / re.sub(r"\W+", "-", name)
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    # As in the Makefile, torch is installed first: the CPU build if its index can be reached.
    subprocess.run([*pip, "--retries", "0", "--timeout", "15", "--index-url", CPU_INDEX, TORCH], check=False)
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, "--editable", ".", *NEEDED, *versions], cwd=ROOT, check=True)
    return python


def row(name: str, versions: tuple[str, ...]) -> tuple[str, bool]:
    """A row of the table, and whether all tests passed."""
    python = python_of(name, versions)
    folder = python.parent.parent
    found = next(folder.glob("lib/python*/site-packages"))
    installed = {d.metadata["Name"].lower(): d.version for d in distributions(path=[str(found)])}
    command = [str(python), "-m", "pytest", "--quiet", "--no-header", *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = done.stdout.strip().splitlines()[-1]
    print(f"{name}: {last}", file=sys.stderr)
    if done.returncode:
        print(done.stdout[-5000:], file=sys.stderr)
    counts = ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|error)", last))
    cells = [name, *(installed.get(package, "-") for package in PACKAGES), counts]
    return f"| {' | '.join(cells)} |", done.returncode == 0


def main() -> int:
    rows = [row(name, versions) for name, versions in SETS.items()]
    header = ["versions", *("TRL" if package == "trl" else package for package in PACKAGES), "tests"]
    table = [f"| {' | '.join(header)} |", "|" + "---|" * len(header), *(line for line, _ in rows)]
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(before + "\n".join([BEGIN, "", *table, "", END]) + after)
    return 0 if all(passed for _, passed in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
