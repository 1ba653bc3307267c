"""Megatron's tensor parallelism with sequence parallelism: attention and MLP on sequence-sharded activations.

Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", 2022. Weights are sharded over the ``tp`` group, activations outside the layers over its tokens: an
all-gather before the column-parallel GEMM, a reduce-scatter after the row-parallel one, both behind the GEMMs.
Per rank of ``P``, forward: ``2 * (P - 1) / P * tokens * hidden`` elements sent; backward the same, and one more
all-gather of the input, which is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

from ..checks import check_choice, check_hidden, check_int, check_options, no_compile
from ..comm.collectives import all_gather
from ..comm.handshake import all_gather_header, check_same
from ..kernels.base import Score
from ..layout import split_range
from ..mask import Mask
from ..mesh import AttentionGroups, ParallelContext, rank_in, sequence_group, size_of
from ..schedule import SequenceSharding, head_range, kv_head_range
from ..strategies import STRATEGIES, resolve, strategy_options
from ..strategies.autograd import Call, SequenceParallelAttention
from ..strategies.tensor_sequence import (
    OVERLAPS,
    SequenceChunks,
    all_gather_linear,
    linear_reduce_scatter,
    resolve_overlap,
)
from .attention import AttentionLayer
from .sharded_weights import WeightShard, make_spans, register_weight_shards, with_reduced_gradient


class MegatronAttention(AttentionLayer):
    """Attention with heads sharded over ``tp`` and tokens sharded over ``tp`` outside it.

    Each rank holds the rows of ``q_proj``, ``k_proj``, ``v_proj`` of its heads and the columns of ``o_proj`` that read
    them; heads need not divide by the ranks, and ranks beyond the key/value heads hold copies whose gradients are
    summed in backward. ``o_proj``'s bias is whole, and added once, after the reduce-scatter. The state dict has the
    whole weights' names and shapes, so that it loads under every strategy and number of ranks.

    On a mesh, ``context`` attends over the ring and ulysses dimensions: the sequence is then sharded over ring x
    ulysses x tp (tp fastest), as ``seqpar.shard(x, mesh=mesh, layout=layout, strategy="tp_sp")`` does. Every rank of
    ``tp`` must compute the same loss. See ``AttentionLayer`` for the other arguments.

    Args:
        overlap: "auto", "ring", "symm_mem" or "none": how communication hides behind the GEMMs.
        context: the strategy across the mesh's other dimensions: "ring", "ulysses", "hybrid" or "context_parallel";
            by default the one that its ring and ulysses sizes ask for. Its options may follow.
    """

    strategy = "tp_sp"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        overlap: str = "auto",
        context: str | None = None,
        **options: Any,
    ) -> None:
        check_choice("overlap", overlap, OVERLAPS)
        if context is not None:
            check_choice("context", context, [name for name in STRATEGIES if name != "local"])
            if mesh is None or mesh.ndim == 1:
                raise ValueError(f"context={context!r}: it needs a mesh with ring or ulysses beside tp; see init_mesh")
        self.context = context or _default_context(mesh)
        self.overlap = overlap
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim, mesh=mesh, group=group, **options)
        self._context_groups()  # raises here, not at the first forward

    def _build(self, bias: bool, out_bias: bool, sinks: bool, kind: dict[str, Any]) -> None:
        tp, heads, kv_heads = self._tp, self.num_heads, self.num_kv_heads
        q_spans = make_spans(tp, partial(head_range, heads, size_of(tp)), self.head_dim)
        kv_spans = make_spans(tp, partial(kv_head_range, heads, kv_heads, size_of(tp)), self.head_dim)
        q_shard = WeightShard(tp, 0, q_spans, heads * self.head_dim)
        kv_shard = WeightShard(tp, 0, kv_spans, kv_heads * self.head_dim)
        o_shard = WeightShard(tp, 1, q_spans, heads * self.head_dim)
        self.q_proj = column_parallel(self.hidden_size, q_shard, bias, kind)
        self.k_proj = column_parallel(self.hidden_size, kv_shard, bias, kind)
        self.v_proj = column_parallel(self.hidden_size, kv_shard, bias, kind)
        self.o_proj = row_parallel(self.hidden_size, o_shard, out_bias, kind)
        start, stop = self._local_heads().start, self._local_heads().stop
        self.sinks = nn.Parameter(torch.empty(stop - start, **kind)) if sinks else None
        sink_spans = make_spans(tp, partial(head_range, heads, size_of(tp)))
        register_weight_shards(self, {"sinks": WeightShard(tp, 0, sink_spans, heads)})

    @property
    def _tp(self) -> ProcessGroup | None:
        return self._parallel_context.tensor

    def _local_heads(self) -> range:
        return head_range(self.num_heads, size_of(self._tp), rank_in(self._tp))

    def _check_options(self, options: dict[str, Any]) -> None:
        check_options(f"tp_sp with context {self.context!r}", options, strategy_options(self.context))

    def _context_groups(self) -> AttentionGroups:
        """The groups of attention itself, between the gather and the scatter."""
        if self.context == "local" or self.mesh is None:
            return AttentionGroups()
        return resolve(self.context, self.mesh, None, self.strategy_options)

    def _sequence_group(self) -> ProcessGroup | None:
        return sequence_group(self.mesh, self.group, "tp_sp")

    def _shards(self, seq_len: int, groups: AttentionGroups) -> SequenceSharding:
        return SequenceSharding(seq_len, self.layout, groups.ring_size, groups.ulysses_size, size_of(self._tp))

    def _pieces(self, seq_len: int, device: torch.device) -> SequenceChunks | None:
        """How the tokens this rank attends with are pieced together from those of the tp group."""
        if self._tp is None or self._tp.size() == 1:
            return None
        groups = self._context_groups()
        rows = self._shards(seq_len, groups).tensor_rows(rank_in(groups.sequence))
        return make_chunks(self._tp, rows, self.overlap, device)

    def _project(self, x: Tensor, seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = column_linear(x, projections, self._pieces(seq_len, x.device))
        return q, k, v

    def _rotary_positions(self, positions: Tensor | None, seq_len: int) -> Tensor:
        groups = self._context_groups()
        shards = self._shards(seq_len, groups)
        if positions is None:
            return shards.rank_positions(rank_in(groups.sequence))
        rows = shards.tensor_rows(rank_in(groups.sequence))
        gathered = all_gather(positions, [len(r) for r in rows], positions.dim() - 1, self._tp)
        order = torch.cat(rows).argsort().to(positions.device)
        return gathered.index_select(positions.dim() - 1, order)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, seq_len: int, dropout_p: float, seed: int) -> Tensor:
        groups = self._context_groups()
        heads = self._local_heads()
        group_size = self.num_heads // self.num_kv_heads
        index = [h // group_size - heads.start // group_size for h in heads]
        kv_heads = k.shape[2]
        if index and index != [i // max(len(index) // kv_heads, 1) for i in range(len(index))]:
            # Ranks whose heads do not form equal groups read a copy for each head.
            which = torch.tensor(index, device=k.device)
            k, v = k.index_select(2, which), v.index_select(2, which)
        call = Call(
            groups=groups,
            shards=self._shards(seq_len, groups),
            mask=mask,
            score=Score(
                softmax_scale=self.head_dim**-0.5,
                softcap=self.softcap,
                sinks=None if self.sinks is None else self.sinks.detach(),
                dropout_p=dropout_p,
                dropout_seed=seed,
                head_offset=heads.start,
            ),
            backend=self.backend,
            heads=q.shape[2],
            kv_heads=k.shape[2],
            return_lse=False,
        )
        out: Tensor = SequenceParallelAttention.apply(q, k, v, self.sinks, call)[0]
        return out

    def _output(self, out: Tensor, seq_len: int) -> Tensor:
        return row_linear(out, self.o_proj, self._pieces(seq_len, out.device))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class MegatronMLP(nn.Module):
    """The MLP of a tensor- and sequence-parallel block: ``x_local [batch, seq, hidden]`` to the same.

    "swiglu": ``down_proj(silu(gate_proj(x)) * up_proj(x))``, as Llama; "gelu" and "gelu_tanh":
    ``down_proj(gelu(up_proj(x)))``. Each rank holds a part of the intermediate width, which need not divide.

    Args:
        hidden_size, intermediate_size: widths.
        activation: "swiglu", "gelu" or "gelu_tanh".
        mesh, group: the ranks the weights and tokens are sharded over, as for ``MegatronAttention``.
        bias: biases in all projections; that of ``down_proj`` is whole and added once, after the reduce-scatter.
        overlap: as for ``MegatronAttention``.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "swiglu",
        *,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        bias: bool = False,
        overlap: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("hidden_size", hidden_size, 1)
        check_int("intermediate_size", intermediate_size, 1)
        check_choice("activation", activation, _ACTIVATIONS)
        check_choice("overlap", overlap, OVERLAPS)
        self.activation, self.overlap, self.hidden_size = activation, overlap, hidden_size
        self._parallel_context = ParallelContext(mesh, group)
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        tp = self._parallel_context.tensor
        spans = make_spans(tp, partial(split_range, intermediate_size, size_of(tp)))
        column, row = (WeightShard(tp, dim, spans, intermediate_size) for dim in (0, 1))
        self.gate_proj = column_parallel(hidden_size, column, bias, kind) if activation == "swiglu" else None
        self.up_proj = column_parallel(hidden_size, column, bias, kind)
        self.down_proj = row_parallel(hidden_size, row, bias, kind)

    @no_compile
    def forward(self, x_local: Tensor) -> Tensor:
        """``[batch, seq, hidden]`` to the same, for this rank's tokens."""
        pieces = gathered_chunks(x_local, self._parallel_context.tensor, self.overlap, self.hidden_size, self.up_proj)
        if self.gate_proj is None:
            (up,) = column_linear(x_local, (self.up_proj,), pieces)
            hidden = _ACTIVATIONS[self.activation](up)
        else:
            gate, up = column_linear(x_local, (self.gate_proj, self.up_proj), pieces)
            hidden = _ACTIVATIONS[self.activation](gate) * up
        return row_linear(hidden, self.down_proj, pieces)


def SequenceParallelNorm(  # noqa: N802 (reads as the class whose instances it makes)
    hidden_size: int,
    kind: str = "rms",
    eps: float = 1e-6,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """A norm on sequence-sharded activations: ``nn.RMSNorm`` ("rms") or ``nn.LayerNorm`` ("layer").

    Its weights are whole on every rank and their gradients this rank's tokens' share, which ``seqpar.sync_gradients``
    sums over tp too, as for every weight outside the tensor-parallel layers.
    """
    check_choice("kind", kind, ("rms", "layer"))
    norm = nn.RMSNorm if kind == "rms" else nn.LayerNorm
    return norm(hidden_size, eps=eps, device=device, dtype=dtype)


def make_chunks(group: ProcessGroup, rows: tuple[Tensor, ...], overlap: str, device: torch.device) -> SequenceChunks:
    """The pieces of a sequence over ``group``, with its way of overlapping resolved."""
    lengths = {len(r) for r in rows}
    even = len(lengths) == 1 and torch.equal(torch.cat(rows), torch.arange(sum(len(r) for r in rows), device="cpu"))
    return SequenceChunks(group, rows, resolve_overlap(overlap, group, device, even))


class _HiddenHeader(NamedTuple):
    """A rank's hidden states."""

    length: int
    batch: int
    dtype: torch.dtype


def gathered_chunks(
    x: Tensor, group: ProcessGroup | None, overlap: str, hidden_size: int, linear: nn.Linear
) -> SequenceChunks | None:
    """Pieces in the order of the ranks, for what works on each token alone; the ranks tell each other their lengths.

    ``linear`` is the first projection they meet.
    """

    def header() -> _HiddenHeader:
        check_hidden(x, hidden_size, linear)
        return _HiddenHeader(x.shape[1], x.shape[0], x.dtype)

    headers = all_gather_header(header, group)
    if group is None or group.size() == 1:
        return None
    check_same(headers, "batch", "dtype")
    return make_chunks(group, rows_in_order([header.length for header in headers]), overlap, x.device)


def rows_in_order(lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """The rows of each rank's tokens, one rank after the other."""
    rows = torch.arange(sum(lengths), device="cpu")
    return rows.split(list(lengths))


def column_parallel(hidden_size: int, shard: WeightShard, bias: bool, kind: dict[str, Any]) -> nn.Linear:
    """This rank's rows of a column-parallel projection."""
    return cut_linear(nn.Linear(hidden_size, shard.full_size, bias=bias, **kind), {"weight": shard, "bias": shard})


def row_parallel(hidden_size: int, shard: WeightShard, bias: bool, kind: dict[str, Any]) -> nn.Linear:
    """This rank's columns of a row-parallel projection; its bias is whole."""
    return cut_linear(nn.Linear(shard.full_size, hidden_size, bias=bias, **kind), {"weight": shard})


def cut_linear(whole: nn.Linear, shards: dict[str, WeightShard]) -> nn.Linear:
    """Keep this rank's shards of a whole layer, so that one seed gives the same model for every number of ranks."""
    for name, shard in shards.items():
        weight = getattr(whole, name)
        if weight is not None and size_of(shard.group) > 1:
            setattr(whole, name, nn.Parameter(shard.to_local(weight.detach()).clone()))
    whole.out_features, whole.in_features = whole.weight.shape
    register_weight_shards(whole, shards)
    return whole


def column_linear(x: Tensor, linears: tuple[nn.Linear, ...], pieces: SequenceChunks | None) -> list[Tensor]:
    """Gather the sequence and project it, ``[batch, tokens, out_local]`` for each of ``linears``."""
    if pieces is None:
        return [F.linear(x, linear.weight, linear.bias) for linear in linears]
    outs = all_gather_linear(x, [with_reduced_gradient(linear, "weight") for linear in linears], pieces)
    return [
        y if linear.bias is None else y + with_reduced_gradient(linear, "bias")
        for y, linear in zip(outs, linears, strict=True)
    ]


def row_linear(x: Tensor, linear: nn.Linear, pieces: SequenceChunks | None) -> Tensor:
    """Project and sum over the ranks, each keeping its tokens, ``[batch, seq_local, out]``."""
    if pieces is None:
        y: Tensor = linear(x)
        return y
    y = linear_reduce_scatter(x, linear.weight, pieces)
    return y if linear.bias is None else y + linear.bias


def _default_context(mesh: DeviceMesh | None) -> str:
    """The strategy that a mesh's ring and ulysses sizes ask for."""
    names = mesh.mesh_dim_names or () if mesh is not None else ()
    ring, ulysses = (mesh is not None and name in names and mesh[name].size() > 1 for name in ("ring", "ulysses"))
    if ring and ulysses:
        return "hybrid"
    return "ring" if ring else "ulysses" if ulysses else "local"
