"""The model of the tests of printed code."""

from __future__ import annotations

from ..settings import decoder

TOKENS = 96
DOCUMENTS = (0, 60, 70, TOKENS)  # boundaries of packed documents
SHAPE = decoder("small", 2, 64, 8, 4, 8, 128, 512)
