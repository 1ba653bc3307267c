"""Fixtures and settings that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from .pool import Pool

# Examples are the same from run to run, so that a red test stays red; a machine with other work to do is no failure.
settings.register_profile("seqpar", deadline=None, derandomize=True, max_examples=50, database=None)
settings.load_profile("seqpar")

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight worker processes, started at the first ``pool.run``."""
    workers = Pool()
    yield workers
    workers.close()
