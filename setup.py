"""List the packages: the folder ``triton_kernels/`` is installed as ``seqpar.triton_kernels``.

A distribution named ``triton_kernels`` exists on PyPI, and transformers probes for it. Installing our folder under that
top-level name would shadow it. Everything else about the package is in ``pyproject.toml``.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["seqpar", "seqpar.*"]), "seqpar.triton_kernels"],
    package_dir={"seqpar.triton_kernels": "triton_kernels"},
)
