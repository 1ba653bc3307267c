"""What is installed, what importing costs, and that the names the documentation promises are there."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import seqpar

ROOT = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "seqpar", "triton_kernels")


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


def _run(command: list[str | Path], **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **kwargs)  # type: ignore[call-overload]


@pytest.mark.slow
def test_the_wheel_installs_no_other_top_level_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"seqpar", f"seqpar-{seqpar.__version__}.dist-info"}


@pytest.mark.slow
def test_the_wheel_is_complete(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "seqpar").rglob("*.py")}
    expected |= {f"seqpar/{path.relative_to(ROOT)}" for path in (ROOT / "triton_kernels").rglob("*.py")}
    assert expected | {"seqpar/py.typed"} <= names
    metadata = zipfile.ZipFile(wheel).read(f"seqpar-{seqpar.__version__}.dist-info/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    entry = zipfile.ZipFile(wheel).read(f"seqpar-{seqpar.__version__}.dist-info/entry_points.txt").decode()
    assert "seqpar = seqpar.cli:main" in entry


@pytest.mark.slow
def test_the_wheel_works_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    """Unpacked, out of the sources' sight: the kernels are inside the package, and nothing is called triton_kernels."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = f"""
import sys, importlib.util
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
sys.path.insert(0, {str(tmp_path / "site")!r})
import seqpar
assert seqpar.__file__.startswith({str(tmp_path)!r}), seqpar.__file__
found = importlib.util.find_spec("seqpar.triton_kernels")
assert found is not None and found.origin.startswith({str(tmp_path)!r}), found
assert importlib.util.find_spec("triton_kernels") is None
assert importlib.util.find_spec("tests") is None
"""
    done = _run([sys.executable, "-c", program], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_development_install_has_the_kernels() -> None:
    done = _run([sys.executable, "-c", "import seqpar.triton_kernels as t; print(t.__file__)"], cwd="/")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "triton_kernels" / "__init__.py"


def test_importing_is_light() -> None:
    """Nothing that only some users have, or that is slow to import, is imported before it is used."""
    heavy = ["triton", "transformers", "flash_attn", "matplotlib", "pandas", "rich", "typer"]
    program = f"""
import sys, torch
before = set(sys.modules)
import seqpar
print([name for name in {heavy} if name in sys.modules and name not in before])
"""
    done = _run([sys.executable, "-c", program])
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_versions_agree() -> None:
    assert importlib.metadata.version("seqpar") == seqpar.__version__


@pytest.mark.parametrize("name", seqpar.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert (getattr(seqpar, name).__doc__ or "").strip()
