"""Calls of attention that the conformance tests do not make: groups, gradients, strides, wrong layouts and autocast."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Mask
from seqpar.kernels.cpu import CpuBackend

from ..pool import Pool, on_ranks
from ..problems import RULES
from ..reference import (
    assert_close,
    combined_mask,
    dense_attention,
    fitted,
    nudge,
    rank_positions,
    rows_of,
    visible_pairs,
)
from ..strategy_cases import STRATEGIES


def attention(*args: Any, **kwargs: Any) -> Any:
    """``seqpar.attention`` without its return type, which depends on the arguments."""
    return seqpar.attention(*args, **kwargs)


@on_ranks
def attend_without_group(group: ProcessGroup) -> Tensor:
    """A call with neither group nor mesh, which is for the default group."""
    x = torch.randn(1, 32, 2, 4, generator=torch.Generator().manual_seed(3))
    x_local = seqpar.shard(x, layout="zigzag")
    out = attention(x_local, x_local, x_local, strategy="ring", layout="zigzag")
    return seqpar.unshard(out, layout="zigzag")


def test_the_default_group(pool: Pool) -> None:
    x = torch.randn(1, 32, 2, 4, generator=torch.Generator().manual_seed(3))
    expected = attention(x, x, x, strategy="local")
    for out in pool.run(pool.ranks, attend_without_group):
        assert_close(out, expected)


@on_ranks
def gradient_of_even_ranks(group: ProcessGroup, strategy: str) -> Tensor:
    """The loss is the sum of ``lse`` on the even ranks. The odd ranks have no gradient but take part in backward."""
    x = torch.randn(1, 24, 4, 4, generator=torch.Generator().manual_seed(4)).requires_grad_()
    q, k, v = (seqpar.shard(x, group=group, layout="contiguous") for _ in range(3))
    out, lse = attention(q, k, v, group=group, return_lse=True, **STRATEGIES[strategy], layout="contiguous")
    loss = lse.sum() if group.rank() % 2 == 0 else out.sum() * 0
    loss.backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_on_some_ranks_only(pool: Pool, strategy: str) -> None:
    x = torch.randn(1, 24, 4, 4, generator=torch.Generator().manual_seed(4)).requires_grad_()
    _, lse = attention(x, x, x, strategy="local", return_lse=True)
    even = torch.cat([rank_positions(24, 4, rank, "contiguous") for rank in (0, 2)])
    lse[:, :, even].sum().backward()
    by_rank = pool.run(4, gradient_of_even_ranks, strategy)  # of each rank's tokens
    assert_close(torch.stack(by_rank).sum(0), x.grad)


@on_ranks
def strided_inputs(group: ProcessGroup, strategy: str) -> None:
    """Inputs that are not contiguous give the same results as contiguous ones, and nothing writes to them."""
    generator = torch.Generator().manual_seed(5)
    fused = torch.randn(2, 4, 12, 3 * 8, generator=generator).requires_grad_()  # [b, h, s, 3 d]: a fused projection
    before = fused.detach().clone()
    q, k, v = fused.transpose(1, 2).chunk(3, dim=-1)
    out = attention(q, k, v, group=group, layout="striped", **STRATEGIES[strategy])
    dout = torch.ones_like(out)
    out.backward(dout)
    contiguous = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    expected = attention(*contiguous, group=group, layout="striped", **STRATEGIES[strategy])
    expected.backward(dout)
    assert fused.grad is not None
    gradients = torch.cat([x.grad for x in contiguous if x.grad is not None], dim=-1).transpose(1, 2)
    assert torch.equal(out, expected)
    assert torch.equal(fused.grad, gradients)
    assert torch.equal(fused.detach(), before)
    assert bool((dout == 1).all())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strided_inputs(pool: Pool, strategy: str) -> None:
    pool.run(3, strided_inputs, strategy)


@on_ranks
def attend_with_wrong_layout(group: ProcessGroup) -> None:
    """Shards of one layout, and a call that names another."""
    x_local = seqpar.shard(torch.zeros(1, 22, 2, 4), group=group, layout="contiguous")
    seqpar.ring_attention(x_local, x_local, x_local, group=group, layout="zigzag")


def test_lengths_of_another_layout_raise(pool: Pool) -> None:
    """A wrong layout is noticed where the lengths of the shards differ from the layout's."""
    with pytest.raises(AssertionError, match=r"length: the ranks hold \[6, 6, 5, 5\]"):
        pool.run(4, attend_with_wrong_layout)


def test_gradients_of_several_intervals_are_rounded_once() -> None:
    """In a single step the kernel may round gradients to the dtype of q, unless those of more intervals are added."""
    q = torch.randn(1, 40, 2, 8, requires_grad=True)
    backward, seen = CpuBackend.backward, list[tuple[bool, bool, bool]]()

    def noted(self: CpuBackend, *args: Any) -> None:
        seen.append((args[-1].new_dq, args[-1].new_dkv, args[-1].final))
        backward(self, *args)

    expected = {
        Mask.causal(): [(True, True, True)],
        Mask.block_diffusion(20, 4): [(True, True, False), (False, False, False)],
    }
    with mock.patch.object(CpuBackend, "backward", noted):
        for mask, flags in expected.items():
            seen.clear()
            attention(q, q, q, strategy="local", mask=mask, backend="cpu").sum().backward()
            assert [(bool(a), bool(b), c) for a, b, c in seen] == flags


def shifted_blocks(q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
    """LongLoRA's attention by its definition, one query at a time: ``[b, s, h, d]``, with as many KV heads.

    The second half of the heads has blocks that begin half a block later.
    """
    out = torch.zeros_like(q)
    for head, i in product(range(q.shape[2]), range(q.shape[1])):
        shift = 0 if head < q.shape[2] // 2 else size - size // 2
        first = max(0, (i + shift) // size * size - shift)
        keys = slice(first, i + 1)
        weights = torch.einsum("bd,bjd->bj", q[:, i, head], k[:, keys, head]) / q.shape[3] ** 0.5
        out[:, i, head] = torch.einsum("bj,bjd->bd", weights.softmax(-1), v[:, keys, head])
    return out


@on_ranks
def attend_with_shifted_blocks(group: ProcessGroup, strategy: str, layout: str, seed: int) -> tuple[Tensor, ...]:
    n = 8
    mask = Mask.by_heads([Mask.chunked(n), Mask.chunked(n, starts=[n // 2])])
    generator = torch.Generator().manual_seed(seed)
    sharding = seqpar.Sharding(45, layout, group=group)
    shards = (sharding.shard(torch.randn(1, 45, 4, 8, generator=generator, dtype=torch.float64)) for _ in range(4))
    q, k, v, dout = (x.requires_grad_() for x in shards)
    out = attention(q, k, v, mask=mask, sharding=sharding, **STRATEGIES[strategy])
    gradients = torch.autograd.grad(out, (q, k, v), dout.detach())
    return tuple(sharding.unshard(x.detach()) for x in (out, *gradients))


@pytest.mark.parametrize(("strategy", "layout"), [("ring", "contiguous"), ("ulysses", "striped")])
def test_shifted_sparse_attention(pool: Pool, strategy: str, layout: str) -> None:
    seed = int(torch.randint(1 << 30, ()))
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(1, 45, 4, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = shifted_blocks(q, k, v, 8)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    for found in pool.run(4, attend_with_shifted_blocks, strategy, layout, seed):
        assert_close(found, expected)


@on_ranks
def refuse_groups_of_heads(group: ProcessGroup) -> int:
    """Every call that cannot have a mask for each group of heads raises an error; returns the bytes that were sent."""
    sharding = seqpar.Sharding(12, "zigzag", group=group)
    mask = Mask.by_heads([Mask.causal(), Mask.sliding_window(3)])

    def heads(q_heads: int, kv_heads: int, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (sharding.shard(torch.randn(1, 12, n, dim)) for n in (q_heads, kv_heads, kv_heads))
        return q.requires_grad_(), k, v

    def layer(strategy: str, **sizes: int) -> Any:
        return seqpar.ParallelAttention(strategy, 24, **sizes, head_dim=8, group=group)

    latents = sharding.shard(torch.randn(1, 12, 1, 6)), sharding.shard(torch.randn(1, 12, 1, 2))
    x, (q, k, v) = sharding.shard(torch.randn(1, 12, 24)), heads(4, 4)
    grouped = nn.ModuleDict({"self_attn": layer("ring", num_heads=4, num_kv_heads=4)})
    seqpar.Memory(head_groups=2).apply(nn.ModuleDict({"layers": nn.ModuleList([grouped])}))
    rows = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    attend_here = {"mask": mask, "sharding": sharding}
    refused: dict[str, tuple[Any, str]] = {}
    for name, options in STRATEGIES.items():
        refused[f"heads {name}"] = lambda o=options: attention(*heads(5, 5), **attend_here, **o), "5 query heads"
        refused[f"KV {name}"] = lambda o=options: attention(*heads(6, 3), **attend_here, **o), "3 KV heads"
    where = {"group": group, "layout": "zigzag"}
    refused |= {
        "handshake": (lambda: attention(*heads(6, 3), mask=mask, **where), "3 KV heads"),
        "latents": (
            lambda: attention(q, *latents, latent_weight=torch.zeros(4, 11, 6), **attend_here),
            "latents count",
        ),
        "dropout": (lambda: attention(*heads(5, 5), dropout_p=0.5, dropout_seed=1, **attend_here), "5 query heads"),
        "layer": (lambda: layer("ulysses", num_heads=3)(x, **attend_here), "3 query heads"),
        "head_groups": (lambda: grouped["self_attn"](x, **attend_here), "leave head_groups out"),
        "replay": (lambda: seqpar.replay(*heads(5, 5), ranks=3, mask=mask), "5 query heads"),
        "mixers": (
            lambda: seqpar.mixers.halo(lambda y: y[:, 2:], x, 2, **attend_here),
            "a mask for each of 2 groups of heads",
        ),
        "shift": (lambda: seqpar.shift(x, 1, **attend_here), "a mask for each of 2 groups of heads"),
        "sdpa": (lambda: seqpar.sdpa(*(y[:, :3] for y in rows), **attend_here), "3 query heads"),
        "chunks": (lambda: Mask.chunked(3, starts=mask.starts), "a mask for each of 2 groups of heads"),
    }
    with seqpar.trace() as trace:
        for call, words in refused.values():
            with pytest.raises(ValueError, match=words):
                call()
    return trace.bytes_sent


def test_groups_of_heads_that_cannot_be(pool: Pool) -> None:
    assert pool.run(2, refuse_groups_of_heads) == [0, 0]


# One mask for each strategy.
SHARED_RULES = [fitted(rules, 40) for rules in RULES if rows_of(rules) == 1]
LAYERS = list(zip(STRATEGIES.values(), SHARED_RULES, strict=False))


@on_ranks
def layers_in_a_row(group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Many calls of different strategies in one graph, with their backwards in the reverse order."""
    x = torch.randn(1, 40, 4, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    x_local = seqpar.shard(x, group=group, layout="zigzag").requires_grad_()
    h, loss = x_local, torch.zeros((), dtype=torch.float64)
    for strategy, rules in LAYERS:
        out = attention(h, h, h, group=group, layout="zigzag", mask=combined_mask(rules), **strategy)
        loss = loss + out.square().sum()
        h = (h + out) / 2
    loss.backward()
    assert x_local.grad is not None
    return x_local.grad, h.detach()


def layers_on_one_device(nudged: bool = False) -> tuple[Tensor, Tensor]:
    x = torch.randn(1, 40, 4, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    h, loss = x.requires_grad_(), torch.zeros((), dtype=torch.float64)
    for _, rules in LAYERS:
        if nudged:
            nudge([h.data])  # the rounding of each layer
        out, _ = dense_attention(h, h, h, visible_pairs(rules, 40))
        loss = loss + out.square().sum()
        h = (h + out) / 2
    loss.backward()
    assert x.grad is not None
    return x.grad, h.detach()


def test_gradients_through_many_strategies(pool: Pool) -> None:
    exact, rounded = layers_on_one_device(), layers_on_one_device(nudged=True)
    for rank, found in enumerate(pool.run(4, layers_in_a_row)):
        mine = rank_positions(40, 4, rank, "zigzag")
        for x, expected, alike in zip(found, exact, rounded, strict=True):
            assert_close(x, expected[:, mine], torch.float64, rounded=alike[:, mine])


@on_ranks
def under_autocast(group: ProcessGroup, dtype: torch.dtype) -> None:
    """Attention casts as PyTorch's own attention does, and its gradients have the dtypes of the inputs."""
    torch.manual_seed(4)
    for inputs in ([torch.float32] * 3, [torch.float32, torch.float32, dtype], [torch.float64] * 3):
        full = [torch.randn(2, 24, 4, 8).to(d).requires_grad_() for d in inputs]
        q, k, v = (x.detach() for x in full)
        exact, _ = dense_attention(q, k, v, torch.ones(24, 24, dtype=torch.bool))
        shards = [seqpar.shard(x.detach(), group=group, layout="contiguous").requires_grad_() for x in full]
        with torch.autocast("cpu", dtype):
            expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in full))
            out = seqpar.ring_attention(*shards, group=group, mask=seqpar.Mask.full(), layout="contiguous")
        assert out.dtype == expected.dtype
        assert_close(out.detach(), seqpar.shard(exact, group=group, layout="contiguous"), out.dtype, f"{inputs}")
        out.sum().backward()
        assert [x.grad.dtype for x in shards if x.grad is not None] == inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(pool: Pool, dtype: torch.dtype) -> None:
    pool.run(2, under_autocast, dtype)
