"""Calls of attention that the conformance tests do not make: groups, gradients, strides, wrong layouts and autocast."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
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
