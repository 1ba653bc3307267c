"""The installed files, their requirements, the time of imports, and the documentation of every public name."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import seqpar
from seqpar.placement.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
SOURCES = (
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "seqpar",
    "triton_kernels",
    "benchmarks/peers",
    "examples",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources: building leaves folders behind."""
    copy, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    built = _run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, copy]
    )
    assert built.returncode == 0, built.stderr
    (path,) = out.glob("*.whl")
    return path


def _run(command: list[str | Path], **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **kwargs)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_wheel_installs_no_other_top_level_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"seqpar", f"seqpar-{seqpar.__version__}.dist-info"}


@pytest.mark.slow
@pytest.mark.thorough
def test_the_wheel_is_complete(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = (path for suffix in ("py", "json") for path in (ROOT / "seqpar").rglob(f"*.{suffix}"))
    expected = {str(path.relative_to(ROOT)) for path in files}
    expected |= {f"seqpar/{path.relative_to(ROOT)}" for path in (ROOT / "triton_kernels").rglob("*.py")}
    expected |= {f"seqpar/peers/{path.name}" for path in (ROOT / "benchmarks" / "peers").glob("*.py")}
    expected |= {f"seqpar/{path.relative_to(ROOT)}" for path in (ROOT / "examples").glob("*.py")}
    assert {name for name in names if name.startswith("seqpar/")} == expected | {"seqpar/py.typed"}
    metadata = zipfile.ZipFile(wheel).read(f"seqpar-{seqpar.__version__}.dist-info/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    entry = zipfile.ZipFile(wheel).read(f"seqpar-{seqpar.__version__}.dist-info/entry_points.txt").decode()
    assert "seqpar = seqpar.cli:main" in entry


@pytest.mark.slow
@pytest.mark.thorough
def test_the_wheel_works_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    """Unpacked away from the sources: the folders are inside the package, and `seqpar demo` runs."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = f"""
import sys, importlib.util
for name in ("triton_kernels", "peers", "examples.bytelm"):
    found = importlib.util.find_spec("seqpar." + name)
    assert found is not None and found.origin.startswith({str(tmp_path)!r}), found
for name in ("triton_kernels", "benchmarks", "tests", "examples"):
    assert importlib.util.find_spec(name) is None
from seqpar.cli import demo, main
demo._STRATEGIES = dict(ulysses=demo._STRATEGIES["ulysses"])
sys.argv = ["seqpar", "demo", "--nproc=2", "--steps=1", "--seq-len=16"]
main()
"""
    # With -S, Python does not run the .pth file that imports the sources of this checkout.
    path = os.pathsep.join([str(tmp_path / "site"), *(path for path in sys.path if "site-packages" in path)])
    done = _run([sys.executable, "-S", "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo" / "demo.csv").exists()


@pytest.mark.slow
def test_importing_is_light_and_finds_the_kernels() -> None:
    """What only some users have, or what is slow to import, is imported at its first use.

    The backend of the Triton kernels can be imported without Triton, and the command says what it needs.
    """
    commands = ["triton", "matplotlib", "rich", "typer"]
    heavy = [*commands, "transformers", "accelerate", "flash_attn", "pandas", "seqpar.megatron"]
    heavy += ["sympy", "torch.distributed.tensor", "torch.distributed.fsdp"]
    program = f"""
import sys, torch
before = set(sys.modules)
import seqpar
print([name for name in {heavy} if name in sys.modules and name not in before])
found = {{name: sys.modules.pop(name, None) for name in {commands}}}
sys.modules.update(dict.fromkeys(found))  # to import one of these raises ModuleNotFoundError
from seqpar.kernels.triton import TritonBackend
from seqpar.cli import main
try:
    main()
except SystemExit as end:
    print(end.code)
for name, module in found.items():
    sys.modules.pop(name)
    if module is not None:
        sys.modules[name] = module
import seqpar.triton_kernels
print(seqpar.triton_kernels.__file__)
"""
    done = _run([sys.executable, "-c", program], cwd="/")
    assert done.stdout.splitlines() == ["[]", "1", str(ROOT / "triton_kernels" / "__init__.py")], done
    needs = "the seqpar command needs matplotlib, rich, typer; install with: pip install 'seqpar[cli]'"
    assert done.stderr == f"error: {needs}\n"


def test_versions_agree() -> None:
    """The version is written in ``seqpar/__init__.py`` only. If this fails, install again: ``pip install -e .``."""
    assert importlib.metadata.version("seqpar") == seqpar.__version__
    assert not re.search(r"^version *= *\"", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"version: {seqpar.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert seqpar.__version__ in (ROOT / "CHANGELOG.md").read_text()


def _requirements(wheel: Path) -> dict[str, set[str]]:
    """The distributions that the wheel requires, by extra; ``""`` is without an extra."""
    metadata = zipfile.ZipFile(wheel).read(f"seqpar-{seqpar.__version__}.dist-info/METADATA").decode()
    requirements: dict[str, set[str]] = {}
    for name, condition in re.findall(r"^Requires-Dist: ([\w-]+)(.*)$", metadata, re.MULTILINE):
        extra = re.search(r"extra == .(\w+).", condition)
        requirements.setdefault(extra[1] if extra else "", set()).add(name)
    return requirements


@pytest.mark.slow
def test_the_package_requires_torch_einops_and_numpy_only(wheel: Path) -> None:
    assert _requirements(wheel)[""] == {"einops", "numpy", "torch"}


# Distributions that no import statement names, and the file that shows their use.
TOOLS = {
    "flash-attn": "seqpar/kernels/flash.py",
    "flash-attn-4": "seqpar/kernels/flash.py",
    "nvidia-cudnn-frontend": "seqpar/kernels/cudnn_flex.py",
    "mypy": "Makefile",
    "mkdocs-material": "mkdocs.yml",
    "mkdocstrings": "mkdocs.yml",
    "pre-commit": "CONTRIBUTING.md",
    "pytest-xdist": "Makefile",
    "ruff": "Makefile",
    "triton": "triton_kernels/forward.py",
}


@pytest.mark.slow
def test_every_dependency_is_used(wheel: Path) -> None:
    folders = ("seqpar", "triton_kernels", "tests", "benchmarks", "docs", "examples")
    files = [ROOT / "setup.py", *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    imports = r"^\s*(?:import|from) ([a-z_]+)"
    imported = {name for path in files for name in re.findall(imports, path.read_text(), re.MULTILINE)}
    for extra, names in _requirements(wheel).items():
        for name in names - {"seqpar"}:
            if name in TOOLS:
                tool = name.removeprefix("mkdocs-")
                assert tool in (ROOT / TOOLS[name]).read_text(), f"{name} of the extra {extra!r}"
            else:
                assert name.replace("-", "_") in imported, f"{name} of the extra {extra!r} is imported by nothing"


@pytest.mark.parametrize("name", seqpar.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert (getattr(seqpar, name).__doc__ or "").strip()


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "context_parallel", "hybrid"])
def test_functions_of_one_strategy_show_their_arguments(strategy: str) -> None:
    """The signature and the docstring have ``attention``'s arguments and the options of the strategy, and no others."""
    function = getattr(seqpar, f"{strategy}_attention")
    expected = inspect.signature(seqpar.attention).parameters.keys() - {"strategy", "strategy_options"}
    expected |= set(STRATEGIES[strategy].options)
    signature, docs = inspect.signature(function), function.__doc__
    assert signature.parameters.keys() == expected
    assert signature.return_annotation == inspect.signature(seqpar.attention).return_annotation
    assert set(re.findall(r"^    (\w+): ", docs.split("\nArgs:")[1].split("\nReturns:")[0], re.MULTILINE)) == expected
    assert f'strategy="{strategy}"' in docs.splitlines()[0]
    with pytest.raises(TypeError, match="multiple values"):
        function(*[torch.zeros(1, 2, 1, 4)] * 3, strategy="local")
