"""Which cuDNN this process has loaded, and which libraries of the system may take the place of the ones from pip."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import torch

from ..kernels.cudnn import loaded_cudnn

_PACKAGES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class Cudnn:
    """The cuDNN of this process.

    Attributes:
        loaded: the version that PyTorch has loaded, such as "9.19.0", or why there is none.
        files: the files of cuDNN that are mapped into this process; none where the system does not say.
        installed: by package of pip, the version of cuDNN that it has installed.
        shadows: by file in a folder of ``LD_LIBRARY_PATH``, the package of pip that has a library of the same name.
        problems: what to do if another cuDNN than pip's is loaded, or other libraries may be.
    """

    loaded: str
    files: list[str]
    installed: dict[str, str]
    shadows: dict[str, str]
    problems: list[str]

    def __str__(self) -> str:
        installed = ", ".join(f"{package} {number}" for package, number in self.installed.items())
        return f"{self.loaded}; from pip: {installed or 'none'}"


def cudnn() -> Cudnn:
    """What this process has loaded and what is installed."""
    found = loaded_cudnn() if torch.version.cuda is not None else None
    loaded = version_text(found) if isinstance(found, int) else found or "none"
    files, installed = _mapped(), _installed()
    shadows = _shadows(os.environ.get("LD_LIBRARY_PATH", ""))
    problems = [
        f"LD_LIBRARY_PATH: {file} may be loaded instead of the library of {package}; take its folder out"
        for file, package in shadows.items()
    ]
    package = f"nvidia-cudnn-cu{(torch.version.cuda or '').split('.')[0]}"
    wanted = installed.get(package, "")
    if isinstance(found, str):
        problems.append(f"cuDNN: {found}")
    elif found is not None and wanted and wanted.split(".")[:3] != loaded.split("."):
        where = f" from {files[0]}" if files else ""
        problems.append(
            f"cuDNN {loaded} is loaded{where}, and {package} {wanted} is installed: attention may run on other kernels "
            "than the ones that this PyTorch was tested with; unset LD_LIBRARY_PATH, or install the version that the "
            "metadata of torch requires"
        )
    return Cudnn(loaded, files, installed, shadows, problems)


def version_text(number: int) -> str:
    """Such as "9.19.0" for 91900, or "8.9.2" for 8902."""
    thousand = 10000 if number >= 90000 else 1000
    return f"{number // thousand}.{number % thousand // 100}.{number % 100}"


def _mapped() -> list[str]:
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:  # not Linux
        return []
    paths = dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines if "/libcudnn" in line)
    return sorted(paths, key=lambda path: (len(Path(path).name), path))  # libcudnn.so before its parts


def _installed() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _shadows(search_path: str) -> dict[str, str]:
    folders = [Path(folder) for folder in search_path.split(":") if folder and Path(folder).is_dir()]
    if not folders:
        return {}
    ours: dict[str, tuple[str, Path]] = {}  # by name of a library: the package and its file
    for distribution in distributions():
        package = distribution.metadata["Name"] or ""
        if package.startswith("nvidia-"):
            for file in distribution.files or ():
                if ".so" in file.suffixes:
                    ours[file.name] = package, Path(str(distribution.locate_file(file)))
    found = {}
    for path in (path for folder in folders for path in sorted(folder.iterdir()) if path.name in ours):
        package, own = ours[path.name]
        if path.resolve() != own.resolve():
            found[str(path)] = package
    return found
