"""All-gather x GEMM and GEMM x reduce-scatter: their results, their copies and their work in repeated calls."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
from seqpar.base import cache
from seqpar.placement.placement import ParallelContext
from seqpar.sharding.spec import AttentionSpec
from seqpar.strategies import sequence_chunks
from seqpar.strategies.gemm import add_weight_gradient, matmul_float32
from seqpar.strategies.sequence_chunks import SequenceChunks, rows_in_rank_order
from seqpar.strategies.tensor_operators import ChunkOptions, ShardedTokens, gather_and_project, project_and_scatter

from ..fake_cuda import fake_cuda
from ..live_bytes import LiveBytes
from ..pool import Pool, on_ranks
from ..reference import assert_error
from ..strategy_cases import LAYOUTS, layout_of


def in_rank_order(group: ProcessGroup, lengths: list[int], overlap: str) -> ShardedTokens:
    """Tokens of which each rank of ``group`` holds ``lengths``."""
    sharding, options = seqpar.Sharding(sum(lengths), group=group), ChunkOptions(overlap, lengths=tuple(lengths))
    return ShardedTokens(lengths[group.rank()], sharding, ParallelContext(None, group), options)


@on_ranks
def sum_of_small_numbers(group: ProcessGroup, overlap: str) -> tuple[Tensor, int]:
    """256 of the first rank and 1 of every other: the sum that each rank keeps, and the bytes it sends."""
    tokens = in_rank_order(group, [2, 1, 0, 3], overlap)
    x = torch.full((1, 6, 1), 256.0 if group.rank() == 0 else 1.0).bfloat16()
    with seqpar.trace() as trace:
        y = project_and_scatter(x, torch.ones(1, 1).bfloat16(), tokens)
    return y, trace.bytes_sent


@pytest.mark.parametrize("overlap", ["ring", "none"])
def test_half_precision_is_added_in_float32(pool: Pool, overlap: str) -> None:
    """256 + 1 is 256 in bfloat16, and so is every further sum; 259 rounds to 260."""
    for rank, (y, sent) in enumerate(pool.run(4, sum_of_small_numbers, overlap)):
        assert y.shape == (1, [2, 1, 0, 3][rank], 1) and (y == 260).all()
        assert sent == 2 * (6 - y.numel())  # two bytes for each element that another rank keeps


class ReadBacks(TorchDispatchMode):
    """Counts the operators that hand a tensor's value to the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "seqpar":  # look inside
            with self:
                return func.function(*args, **(kwargs or {}))
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.count += 1
        return func(*args, **(kwargs or {}))


@on_ranks
def call_twice(group: ProcessGroup, layout: str, overlap: str) -> tuple[list[int], int]:
    """How often the rows were cut after each of two calls, and the read-backs of the second."""
    cache._without_owner.clear()
    sharding = seqpar.Sharding(50, layout_of(layout, 50, group.size()), group=group, strategy="tp_sp")
    options = ChunkOptions(overlap, AttentionSpec("local", tensor_parallel=True))
    tokens = ShardedTokens(sharding.seq_local, sharding, ParallelContext(None, group), options)
    cut = mock.Mock(wraps=sequence_chunks._cut)
    calls, read_backs = [], 0
    with mock.patch.object(sequence_chunks, "_cut", cut):
        for _ in range(2):
            with ReadBacks() as counted:
                x = torch.randn(1, sharding.seq_local, 8, requires_grad=True)
                weight = torch.randn(8, 8, requires_grad=True)
                (full,) = gather_and_project(x, [weight], tokens)
                project_and_scatter(full, weight, tokens).sum().backward()
            calls.append(cut.call_count)
            read_backs = counted.count
    return calls, read_backs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("overlap", ["ring", "none"])
def test_rows_are_cut_and_copied_once(pool: Pool, layout: str, overlap: str) -> None:
    assert pool.run(4, call_twice, layout, overlap) == [([1, 1], 0)] * 4


@on_ranks
def joined_bytes(group: ProcessGroup, overlap: str) -> tuple[int, int]:
    """The largest tensor that backward of two projections joins, and the gradients of their outputs together."""
    ranks, width = group.size(), 16
    tokens = in_rank_order(group, [64] * ranks, overlap)
    x = torch.randn(1, 64, 4, requires_grad=True)
    outs = gather_and_project(x, [torch.randn(width, 4, requires_grad=True) for _ in range(2)], tokens)
    with LiveBytes() as counted:
        torch.autograd.backward(outs, [torch.randn_like(y) for y in outs])
    return counted.largest["aten.cat"], 2 * outs[0].nbytes


@pytest.mark.parametrize("overlap", ["ring", "none"])
def test_backward_does_not_join_whole_activations(pool: Pool, overlap: str) -> None:
    """At most the activations of one rank's tokens."""
    for joined, whole in pool.run(4, joined_bytes, overlap):
        assert joined <= whole // 4


@on_ranks
def gradients_of_two_projections(group: ProcessGroup, overlap: str, frozen: bool) -> list[Tensor | None]:
    """The gradients of this rank's x and of its two weights in bfloat16, and one device's in float64."""
    torch.manual_seed(2)
    ranks = group.size()
    x, dout = torch.randn(1, 24, 16).bfloat16(), torch.randn(2, 1, 24, 8 * ranks).bfloat16()
    weights = torch.randn(2, 8 * ranks, 16).bfloat16()
    exact_x, exact_weights = x.double().requires_grad_(), weights.double().requires_grad_()
    torch.autograd.backward([F.linear(exact_x, w) for w in exact_weights], list(dout.double()))
    at = slice(8 * group.rank(), 8 * (group.rank() + 1))
    mine = [w[at].clone().requires_grad_(not (frozen and i == 0)) for i, w in enumerate(weights)]
    x_local = seqpar.shard(x, group=group, layout="contiguous").requires_grad_()
    tokens = in_rank_order(group, [x_local.shape[1]] * ranks, overlap)
    torch.autograd.backward(gather_and_project(x_local, mine, tokens), list(dout[..., at]))
    assert exact_x.grad is not None and exact_weights.grad is not None
    exact = [seqpar.shard(exact_x.grad, group=group, layout="contiguous"), *exact_weights.grad[:, at]]
    return [x_local.grad, *(w.grad for w in mine), *exact]


@pytest.mark.parametrize("overlap", ["ring", "none"])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_joined_projections(pool: Pool, overlap: str, frozen: bool) -> None:
    for found in pool.run(4, gradients_of_two_projections, overlap, frozen):
        assert (found[1] is None) == frozen
        for got, want in zip(found[:3], found[3:], strict=True):
            if got is not None and want is not None:
                assert_error(float((got.double() - want).norm() / want.norm()), 0.0, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("width", "device", "overlap", "messages"),
    [(16384, "meta", "ring", 2), (8192, "meta", "ring", 1), (4096, "meta", "none", 1), (1, "cpu", "ring", 2)],
)
def test_messages_of_a_gpu_are_not_small(width: int, device: str, overlap: str, messages: int) -> None:
    """8 ranks with 1,000 to 1,024 tokens in bfloat16, on a device that is no CPU, and on a CPU."""
    chunks = SequenceChunks(None, rows_in_rank_order((*range(1000, 1007), 1024)), "auto")
    for tokens in (1000, 1024):  # short and long ranks agree
        x = torch.empty(1, tokens, width, dtype=torch.bfloat16, device=device)
        assert chunks.overlap_for(x, width) == overlap
        assert {len(pieces) for pieces in chunks.pieces(x, width)} == {messages}


SHAPES = ((2, 8, 16), (4, 16), (2, 8, 4))  # x [b, t, in], weight [out, in], dout [b, t, out]


class Gemms(TorchDispatchMode):
    """Records the dtypes that GEMMs return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "mm" in func._schema.name:
            self.dtypes.append(result.dtype)
        return result


def test_gemms_on_a_gpu_return_float32() -> None:
    """Partial sums in bfloat16 are not rounded before they are added."""
    with fake_cuda(), Gemms() as gemms:
        x, weight, dout = (torch.empty(*shape, device="cuda", dtype=torch.bfloat16) for shape in SHAPES)
        assert matmul_float32(dout, weight).shape == x.shape
        add_weight_gradient(torch.zeros_like(weight, dtype=torch.float32), dout, x)
    assert gemms.dtypes == [torch.float32] * 2
