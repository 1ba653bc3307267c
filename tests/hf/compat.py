"""``make compat``: runs all tests of ``seqpar.hf`` and ``seqpar.diffusers`` with the oldest and newest dependencies.

Each set of versions has an environment of its own in .compat/. The results are written to tables in
docs/hf-refused.md and docs/diffusers.md. The names of test folders, such as tests/diffusers, run only these.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- make compat -->", "<!-- /make compat -->"
TORCH = os.environ.get("TORCH", "torch==2.13.0")
CPU_INDEX = os.environ.get("CPU_INDEX", "https://download.pytorch.org/whl/cpu")
NEEDED = ("datasets", "hypothesis", "pytest", "pytest-xdist", "torchdata", "triton")


class Suite(NamedTuple):
    """A folder of tests: the page with its table, the packages whose versions the table has, and sets of versions."""

    page: str
    packages: tuple[str, ...]
    sets: dict[str, tuple[str, ...]]


SUITES = {
    "tests/hf": Suite(
        "docs/hf-refused.md",
        ("transformers", "accelerate", "peft", "trl", "torch"),
        {
            "oldest": ("transformers==5.23.0", "accelerate==1.12.0", "peft==0.18.0", "trl==1.9.0"),
            "newest": ("transformers", "accelerate", "peft", "trl"),
        },
    ),
    "tests/diffusers": Suite(
        "docs/diffusers.md",
        ("diffusers", "peft", "torch"),
        {"oldest diffusers": ("diffusers==0.40.0", "peft==0.18.0"), "newest diffusers": ("diffusers", "peft")},
    ),
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


def row(tests: str, name: str) -> tuple[str, bool]:
    """A row of the table, and whether all tests passed."""
    suite = SUITES[tests]
    python = python_of(name, suite.sets[name])
    folder = python.parent.parent
    found = next(folder.glob("lib/python*/site-packages"))
    installed = {d.metadata["Name"].lower(): d.version for d in distributions(path=[str(found)])}
    command = [
        str(python),
        "-m",
        "pytest",
        "--quiet",
        "--no-header",
        "--numprocesses",
        "2",
        "--dist",
        "loadfile",
        tests,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = done.stdout.strip().splitlines()[-1]
    print(f"{name}: {last}", file=sys.stderr)
    if done.returncode:
        print(done.stdout[-5000:], file=sys.stderr)
    counts = ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|error)", last))
    cells = [name.split()[0], *(installed.get(package, "-") for package in suite.packages), counts]
    return f"| {' | '.join(cells)} |", done.returncode == 0


def main() -> int:
    passed = True
    for tests in sys.argv[1:] or SUITES:
        suite = SUITES[tests]
        rows = [row(tests, name) for name in suite.sets]
        header = ["versions", *("TRL" if package == "trl" else package for package in suite.packages), "tests"]
        table = [f"| {' | '.join(header)} |", "|" + "---|" * len(header), *(line for line, _ in rows)]
        page = ROOT / suite.page
        before, rest = page.read_text().split(BEGIN)
        page.write_text(before + "\n".join([BEGIN, "", *table, "", END]) + rest.split(END)[1])
        passed &= all(ok for _, ok in rows)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
