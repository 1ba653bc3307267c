"""Dropout: the seed and the global positions alone determine which weights are dropped, with the given probability."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Mask
from seqpar.kernels.dropout import philox

from .. import reference
from ..pool import Pool, on_ranks
from ..reference import assert_close


def attention(*args: Any, **kwargs: Any) -> Tensor:
    out = seqpar.attention(*args, mask=Mask.full(), **kwargs)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize(
    ("counter", "key", "word"),
    [  # Random123's known answers (tests/kat_vectors, philox4x32 10)
        ((0, 0, 0, 0), (0, 0), 0x6627E8D5),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF, 0xFFFFFFFF), 0x408F276D),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 0xD16CFE09),
    ],
)
def test_philox(counter: tuple[int, int, int, int], key: tuple[int, int], word: int) -> None:
    """The package's generator and the oracle's give the published bits."""
    seed = key[1] << 32 | key[0]
    assert int(reference.philox(seed, counter)[0]) == word
    c0, c1, c2, c3 = (torch.tensor(c) for c in counter)
    assert int(philox(seed, c0, c1, c2, c3)) == word


@on_ranks
def attend_with_drawn_seeds(group: ProcessGroup) -> list[Tensor]:
    """Two calls without a dropout seed. Rank 0's generator draws the seeds for all ranks."""
    torch.manual_seed(100 + group.rank())
    x_local = seqpar.shard(torch.ones(1, 16, 2, 4), group=group, layout="contiguous")
    return [
        seqpar.unshard(
            attention(x_local, x_local, x_local, group=group, dropout_p=0.5, layout="contiguous"),
            group=group,
            layout="contiguous",
        )
        for _ in range(2)
    ]


def test_one_seed_is_drawn_for_all_ranks(pool: Pool) -> None:
    torch.manual_seed(100)
    x = torch.ones(1, 16, 2, 4)
    first, second = (attention(x, x, x, strategy="local", dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    for outs in pool.run(4, attend_with_drawn_seeds):
        assert_close(outs, [first, second])


def test_dropout_is_a_fair_coin() -> None:
    """The fraction of kept weights, the mean of the output over seeds, and the independence of neighbouring weights."""
    heads, seq_len, p = 2, 64, 0.25
    v = torch.eye(seq_len)[None, :, None].expand(1, seq_len, heads, seq_len).contiguous()
    q, k = (torch.zeros(1, seq_len, heads, seq_len) for _ in range(2))
    # [seed, query, head, key]: 1 / (seq_len * (1 - p)) where the weight is kept, 0 where it is dropped
    draws = torch.stack(
        [attention(q, k, v, strategy="local", dropout_p=p, dropout_seed=seed)[0] for seed in range(200)]
    )
    coins = draws > 0
    n = coins.numel()
    assert abs(float(coins.double().mean()) - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    assert abs(float(draws.double().mean()) * seq_len - 1) < 5 * (p / (1 - p) / n) ** 0.5
    centred = coins.double() - (1 - p)
    for dim in range(4):
        size = coins.shape[dim] - 1
        covariance = (centred.narrow(dim, 0, size) * centred.narrow(dim, 1, size)).mean()
        assert abs(float(covariance)) < 5 * p * (1 - p) / (n * 0.4) ** 0.5
