"""Imports seqpar from this checkout, whether or not it is installed."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import seqpar  # noqa: E402

seqpar.__path__.append(str(ROOT))  # where seqpar.triton_kernels is in a checkout, see setup.py
