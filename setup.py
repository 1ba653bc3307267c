"""List the packages that pyproject.toml cannot: folders at the top of the repository that are installed inside seqpar.

``triton_kernels/`` is installed as ``seqpar.triton_kernels``: a distribution named ``triton_kernels`` exists on PyPI,
and transformers probes for it. Installing our folder under that top-level name would shadow it. ``benchmarks/peers/``
is installed as ``seqpar.peers``, for ``seqpar bench``, and ``examples/`` as ``seqpar.examples``, for ``seqpar demo``.
Everything else about the package is in ``pyproject.toml``.
"""

from setuptools import find_packages, setup

FOLDERS = {
    "seqpar.triton_kernels": "triton_kernels",
    "seqpar.peers": "benchmarks/peers",
    "seqpar.examples": "examples",
}

setup(packages=[*find_packages(include=["seqpar", "seqpar.*"]), *FOLDERS], package_dir=FOLDERS)
