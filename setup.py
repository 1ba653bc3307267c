"""Package list: the folder ``triton_kernels/`` is installed as ``seqpar.triton_kernels``.

Another distribution already owns the top-level import name ``triton_kernels``, so it must not be installed as that.
Everything else stands in ``pyproject.toml``.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["seqpar", "seqpar.*"]), "seqpar.triton_kernels"],
    package_dir={"seqpar.triton_kernels": "triton_kernels"},
)
