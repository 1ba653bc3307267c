"""``return_max_logit``: the largest score of each head, and training that clips it."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from examples import qk_clip
from seqpar import Sharding

from ..pool import OwnPool, Pool, on_ranks, start
from ..problems import BATCH_RULES, HEAD_RULES, RULES
from ..reference import assert_close, combined_mask, fitted, groups_of, rules_id, visible_pairs

BATCH, HEADS, HEAD_DIM = 2, 4, 8
STRATEGIES = "ring", "ulysses", "context_parallel", "auto"
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"softcap": 2.0},
    {"alibi_slopes": torch.linspace(0.1, 0.8, HEADS)},
    {"return_lse": True},
)


def random_seed() -> int:
    return int(torch.randint(1 << 30, ()))


def scores(q: Tensor, k: Tensor, softcap: float = 0.0, alibi_slopes: Tensor | None = None, **_: Any) -> Tensor:
    """``[b, h, s, s]`` of one device."""
    s = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(HEADS // k.shape[2], 2)) * HEAD_DIM**-0.5
    s = softcap * torch.tanh(s / softcap) if softcap else s
    at = torch.arange(q.shape[1])
    return s if alibi_slopes is None else s - alibi_slopes.double()[:, None, None] * (at[:, None] - at).abs()


@on_ranks
def check_every_mask(group: ProcessGroup, seed: int) -> None:
    torch.manual_seed(seed)
    choices = zip(cycle(STRATEGIES), cycle(("zigzag", "striped", "contiguous")), cycle(FEATURES), strict=False)
    by_heads = [rules for rules in HEAD_RULES if groups_of(rules) == 2]
    for given_rules, (strategy, layout, features) in zip((*BATCH_RULES, *RULES, *by_heads), choices, strict=False):
        seq_len = 22 if given_rules[0].name != "full" else max(1, group.size() - 1)  # a rank without tokens
        rules = fitted(given_rules, seq_len)
        mask, sharding = combined_mask(rules), Sharding(seq_len, layout, group=group)
        for dtype in (torch.float64, torch.bfloat16):
            q, k = torch.randn(BATCH, seq_len, HEADS, HEAD_DIM), torch.randn(BATCH, seq_len, 2, HEAD_DIM)
            q, k = q.to(dtype), k.to(dtype)
            hidden = ~visible_pairs(rules, seq_len)
            hidden = hidden[:, None] if hidden.dim() == 3 else hidden.repeat_interleave(HEADS // 2, 1)
            expected = scores(q.double(), k.double(), **features).masked_fill(hidden, -torch.inf).amax((0, 2, 3))
            given = [sharding.shard(x).requires_grad_() for x in (q, k, k)]
            out, *lse, found = seqpar.attention(
                *given, mask=mask, sharding=sharding, strategy=strategy, return_max_logit=True, **features
            )
            assert len(lse) == ("return_lse" in features) and not found.requires_grad
            assert found.dtype == (dtype if dtype == torch.float64 else torch.float32)
            assert_close(found, expected.to(found.dtype), what=f"{rules_id(rules)} {strategy} {layout} {features}")
            out.sum().backward()


@pytest.mark.thorough(world=[4])
@pytest.mark.parametrize("world", [1, 3, 4])
def test_every_mask(pool: Pool, world: int) -> None:
    pool.run(world, check_every_mask, random_seed())


@on_ranks
def check_latents_and_compiled_code(group: ProcessGroup, seed: int) -> None:
    torch.manual_seed(seed)
    sharding = Sharding(16, "zigzag", group=group)
    q, latent, rope = torch.randn(1, 16, HEADS, 8), torch.randn(1, 16, 1, 6), torch.randn(1, 16, 1, 2)
    weight = torch.randn(HEADS, 6 + 5, 6)
    k = torch.cat([torch.einsum("hnw,bsw->bshn", weight[:, :6], latent[:, :, 0]), rope.expand(-1, -1, HEADS, -1)], -1)
    causal = torch.ones(16, 16, dtype=torch.bool).tril()
    expected = scores(q.double(), k.double()).masked_fill(~causal, -torch.inf).amax((0, 2, 3)).float()
    local = [sharding.shard(x) for x in (q, latent, rope)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = seqpar.hybrid_attention(
            q, k, v, sharding=sharding, latent_weight=weight, return_max_logit=True, ulysses_size=2
        )[1]
        return found

    assert_close(call(*local), expected)
    assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(*local), expected)


def test_latents_and_compiled_code(pool: Pool) -> None:
    pool.run(4, check_latents_and_compiled_code, random_seed())


@on_ranks
def clipped(group: ProcessGroup, port: int, run: str) -> list[list[float]]:
    start(port, run, group.rank(), group.size())
    return qk_clip.train(seqpar.init_mesh(ring=-1, device_type="cpu"), steps=4)


def test_clipped_training_is_one_process_s(own: OwnPool) -> None:
    one, *others = (own.pool.run(world, clipped, own.port, f"clip {world}") for world in (1, 2, 4))
    for by_rank in others:
        assert all(history == by_rank[0] for history in by_rank)
        assert_close(by_rank[0], one[0])
