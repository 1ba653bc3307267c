"""Pools whose default group has 2 or 4 ranks: wrappers without a group, and Trainers, use all processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """Pools by their number of ranks."""
    made = {ranks: Pool(ranks) for ranks in (2, 4)}
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture(scope="module", autouse=True)
def _few_groups_in_pools(pools: dict[int, Pool]) -> Iterator[None]:
    yield
    for pool in pools.values():
        pool.close_if_many_groups()


@pytest.fixture
def two(pools: dict[int, Pool]) -> Pool:
    return pools[2]


@pytest.fixture
def four(pools: dict[int, Pool]) -> Pool:
    return pools[4]
