"""``Sharding.segments``: several streams, each sharded by itself and joined in order on every rank."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from examples import block_diffusion
from examples.block_diffusion import BATCH, CLEAN, HIDDEN, LAYERS
from seqpar import Mask, Sharding, attention
from seqpar.placement.layout import segments_layout

from ..cases import Batch
from ..pool import OwnPool, Pool, on_ranks, start
from ..reference import assert_close, rank_positions
from ..strategy_cases import DISTINCT, STRATEGIES

# Odd lengths, one token, none, and fewer tokens than ranks.
STREAMS = ((13, 20), (1, 16), (0, 7), (5, 11, 9), (2, 0, 1))
MASKS = {
    "full": lambda seq_len: Mask.full(),
    "causal": lambda seq_len: Mask.causal(),
    "padded": lambda seq_len: Mask.padding([0, 1], [seq_len, max(1, seq_len - 3)]),
}


class Case(NamedTuple):
    lengths: tuple[int, ...]
    strategy: str
    mask: str

    def __str__(self) -> str:
        return f"{self.lengths} {self.strategy} {self.mask}".replace(", ", "-")


def positions_of(lengths: tuple[int, ...], ranks: int, rank: int) -> list[int]:
    """By ``np.array_split`` of each stream."""
    streams = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    return [int(p) for stream in streams for p in np.array_split(stream, ranks)[rank]]


@on_ranks
def attend(group: ProcessGroup, case: Case, seed: int) -> dict[str, Tensor]:
    seq_len = sum(case.lengths)
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = (torch.randn(2, seq_len, 3, 8, dtype=torch.float64, generator=generator) for _ in range(4))
    sharding = Sharding.segments(case.lengths, group=group)
    assert sharding.positions().tolist() == positions_of(case.lengths, group.size(), group.rank())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = MASKS[case.mask](seq_len)
    local = attention(*(sharding.shard(x) for x in leaves), mask=mask, sharding=sharding, **STRATEGIES[case.strategy])
    out = sharding.unshard(local)
    (out * grad).sum().backward()
    found = {"out": out.detach()}
    for name, x in zip("qkv", leaves, strict=True):
        assert x.grad is not None
        found[f"d{name}"] = sharding.unshard(sharding.shard(x.grad)) / group.size()  # each rank had the whole loss
    return found


def expected(case: Case, seed: int) -> dict[str, Tensor]:
    seq_len = sum(case.lengths)
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = (torch.randn(2, seq_len, 3, 8, dtype=torch.float64, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    seen = MASKS[case.mask](seq_len).dense(seq_len).expand(2, seq_len, seq_len)[:, None]  # [b, 1, s, s]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    weights = torch.where(seen.any(-1, keepdim=True), weights, 0.0)
    out = torch.einsum("bhij,bjhd->bihd", weights, v)
    grads = torch.autograd.grad((out * grad).sum(), leaves)
    return {"out": out.detach(), "dq": grads[0].nan_to_num(0.0), "dk": grads[1].nan_to_num(0.0), "dv": grads[2]}


@pytest.mark.thorough(world=[2])
@pytest.mark.parametrize("world", [2, 3])
def test_attention_over_streams_is_one_device_s(batch: Batch, world: int) -> None:
    cases = [Case(*each) for each in product(STREAMS, DISTINCT, MASKS) if each[2] == "full" or each[0] in STREAMS[:2]]
    seed = int(torch.randint(2**31, ()))

    def verify(case: Case, results: list[dict[str, Tensor]]) -> None:
        for name, value in expected(case, seed).items():
            for rank, found in enumerate(results):
                assert_close(found[name], value, torch.float64, f"{name} on rank {rank}, seed {seed}")

    batch.check(world, attend, cases, verify, seed)


@on_ranks
def shard_streams(group: ProcessGroup, lengths: tuple[int, ...], layout: Any) -> list[list[int]]:
    sharding = Sharding.segments(lengths, layout=layout, group=group)
    x = torch.arange(sum(lengths))[None]
    parts = x[0].split(lengths)
    joined = [int(p) for part in parts for p in Sharding(len(part), layout, group=group).shard(part, 0)]
    assert sharding.shard(x)[0].tolist() == joined
    assert torch.equal(sharding.unshard(sharding.shard(x)), x)
    assert sharding == Sharding.segments(list(lengths), layout=layout, group=group)
    return [joined]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_rank_s_shard_is_its_shards_of_the_streams(pool: Pool, layout: str) -> None:
    for lengths in STREAMS:
        pool.run(3, shard_streams, lengths, layout)


def test_streams_are_found_once() -> None:
    assert segments_layout((7, 100), 4, "contiguous") is segments_layout((7, 100), 4, "contiguous")


@pytest.mark.parametrize(
    ("lengths", "more", "message"),
    [
        ([3, -1], {}, "lengths"),
        ([3, 2.0], {}, "lengths"),
        (5, {}, "lengths=5"),
        ([3], {"layout": "striped"}, "layout='striped'"),
    ],
)
def test_wrong_arguments_are_refused(lengths: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Sharding.segments(lengths, **more)


ROW_BYTES = BATCH * LAYERS * 2 * HIDDEN * 4  # of K and V in a forward


@on_ranks
def train_by_blocks(group: ProcessGroup, port: int) -> tuple[list[float], Tensor, int]:
    """The losses, the gradients of the last step and the bytes of a forward."""
    start(port, f"blocks {group.size()}", group.rank(), group.size())
    losses, model, sent = block_diffusion.train(seqpar.init_mesh(ring=-1, device_type="cpu"), steps=3)
    return losses, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), sent


def test_block_diffusion_has_the_losses_and_gradients_of_one_process(own: OwnPool) -> None:
    """And no noisy row is sent, because each rank has the same whole blocks of both halves."""
    ((losses, gradients, nothing),) = own.pool.run(1, train_by_blocks, own.port)
    assert not nothing
    size, seen = gradients.abs().max(), Mask.block_diffusion(CLEAN, block_diffusion.BLOCK).dense(2 * CLEAN)
    for world in (2, 4):
        in_half = (rank_positions(CLEAN, world, rank, "zigzag") for rank in range(world))
        held = [torch.cat([x, CLEAN + x]) for x in in_half]
        by_rank = own.pool.run(world, train_by_blocks, own.port)
        assert 8 * sum(sent for *_, sent in by_rank) == 3 * (world - 1) * 2 * CLEAN * ROW_BYTES
        for rank, (found, grads, sent) in enumerate(by_rank):
            assert_close(found, losses)
            assert_close(grads / size, gradients / size)
            wanted = [seen[held[other]].any(0)[held[rank]] for other in range(world) if other != rank]
            assert not any(x[held[rank] >= CLEAN].any() for x in wanted)
            assert sent == sum(int(x.sum()) for x in wanted) * ROW_BYTES
