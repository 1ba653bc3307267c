"""Megatron's tensor parallelism with sequence parallelism: attention and MLP on sequence-sharded activations.

Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", 2022. Weights are sharded over the ``tp`` group, and so are the tokens of the activations outside the layers.
The tokens are all-gathered before the column-parallel GEMM and reduce-scattered after the row-parallel GEMM, which
overlaps with the GEMMs (``strategies/tensor_sequence.py``).

Shapes: b batch, s tokens of this rank, t tokens of all tensor-parallel ranks, h query heads of this rank, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

from ..base.checks import check_choice, check_hidden, check_int, no_compile
from ..comm.collectives import all_reduce
from ..comm.handshake import all_gather_header, check_same
from ..comm.waiting import operation
from ..layers.attention import NORM_EPS, AttentionLayer
from ..placement.heads import Heads
from ..placement.placement import ParallelContext
from ..placement.strategies import STRATEGIES, check_options, resolve
from ..ranks.mesh import context_group, rank_in, size_of
from ..sharding.arguments import check_sharding
from ..sharding.sharding import Sharding
from ..sharding.spec import AttentionSpec
from ..strategies.autograd import with_gradient
from ..strategies.sequence_chunks import OVERLAPS, Overlap
from ..strategies.tensor_operators import ChunkOptions, ShardedTokens, gather_and_project, project_and_scatter
from .sharded_weights import ReplicatedNorm, ShardedLinear, ShardedWeights, WeightPart


class MegatronAttention(ShardedWeights, AttentionLayer):
    """Attention with its heads sharded over ``tp``; outside the layer, the tokens are sharded over ``tp``.

    The parameters are DTensors over ``tp``. Each rank holds the rows of ``q_proj``, ``k_proj`` and ``v_proj`` that
    belong to its heads, and the columns of ``o_proj`` that read them. Heads need not divide by the ranks: if the KV
    heads do not, each rank holds all of ``k_proj`` and ``v_proj``; if the query heads do not, all projections. A rank
    computes with its own heads in any case. The bias of ``o_proj`` is added once, after the reduce-scatter.

    On a mesh with ring or ulysses dimensions, the sequence is sharded over ring x ulysses x tp (tp fastest), as
    ``seqpar.shard(x, mesh=mesh, layout=layout, strategy="tp_sp")`` does.

    Args:
        overlap: how communication and GEMMs overlap: "auto", "ring" or "none".
        context: the strategy of attention over the ring and ulysses dimensions: "ring", "ulysses", "hybrid" or
            "context_parallel"; by default it follows from the sizes of the two dimensions.
        options: the options of that strategy, and the arguments of ``ParallelAttention``. With
            ``deterministic="invariant"``, the number of tensor-parallel ranks must divide the KV heads, and attention
            has the same bits on any number of other ranks.
    """

    strategy = "tp_sp"
    q_proj: ShardedLinear
    k_proj: ShardedLinear
    v_proj: ShardedLinear
    o_proj: ShardedLinear

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        overlap: Overlap = "auto",
        context: str | None = None,
        **options: Any,
    ) -> None:
        check_choice("overlap", overlap, OVERLAPS)
        if context is not None:
            check_choice("context", context, [name for name in STRATEGIES if name not in ("local", "auto")])
            if mesh is None or mesh.ndim == 1:
                raise ValueError(f"context={context!r}: it needs a mesh with ring or ulysses beside tp; see init_mesh")
        one_rank = _default_context(mesh) == "local"
        self.context = context or _default_context(mesh)
        self.overlap: Overlap = overlap
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim, mesh=mesh, group=group, **options)
        if one_rank and mesh is not None and context is not None:
            resolve(context, None, context_group(mesh), self.strategy_options)  # raises if the options do not fit
        strategy, heads = "local" if one_rank else self.context, self._heads
        if self.spec.deterministic == "invariant" and self.num_kv_heads % self._tensor_ranks:
            raise ValueError(
                f"deterministic='invariant': expected KV heads that divide by the {self._tensor_ranks} tp ranks, but "
                f"there are {self.num_kv_heads}; take fewer tp ranks, or pass deterministic=True"
            )
        self.spec = self.spec.having(strategy=strategy, tensor_parallel=True, first_head=heads.queries.start)
        ranks = Sharding(0, mesh=mesh, group=group, strategy="tp_sp")
        ranks.place(self.spec, self._parallel_context)  # raises here, not at the first forward

    def _build(self, bias: bool, out_bias: bool, qk_norm: bool, sinks: bool, factory_kwargs: dict[str, Any]) -> None:
        ranks, d, hidden = self._parallel_context, self.head_dim, self.hidden_size
        self._tensor_ranks = size_of(ranks.tensor)
        by_rank = Heads.of_model(self.num_heads, self.num_kv_heads).split(self._tensor_ranks)
        own = self._heads = by_rank[rank_in(ranks.tensor)]

        def split(dim: int, heads: int, local_heads: range, rows: int = d) -> int | WeightPart:
            """How a weight with ``rows`` rows of each of ``heads`` is distributed along ``dim``."""
            if heads % self._tensor_ranks == 0:
                return dim
            return WeightPart(dim, local_heads.start * rows, len(local_heads) * rows)

        of_queries, of_keys = split(0, self.num_heads, own.queries), split(0, self.num_kv_heads, own.kv)
        linear = partial(ShardedLinear, ranks=ranks, factory_kwargs=factory_kwargs)
        self.q_proj = linear(hidden, self.num_heads * d, bias, split=of_queries)
        self.k_proj = linear(hidden, self.num_kv_heads * d, bias, split=of_keys)
        self.v_proj = linear(hidden, self.num_kv_heads * d, bias, split=of_keys)
        self.o_proj = linear(self.num_heads * d, hidden, out_bias, split=split(1, self.num_heads, own.queries))
        self.sinks = nn.Parameter(torch.empty(self.num_heads, **factory_kwargs)) if sinks else None
        self.distribute(ranks, sinks=split(0, self.num_heads, own.queries, 1))
        norm = partial(ReplicatedNorm, d, ranks, eps=NORM_EPS, **factory_kwargs)
        self.q_norm, self.k_norm = (norm() if qk_norm else None for _ in range(2))

    def _check_options(self, options: dict[str, Any]) -> None:
        allowed = STRATEGIES[self.context].options
        check_options(f"tp_sp with context {self.context!r}", options, allowed, type(self), AttentionLayer)

    def _gathered_tokens(self, x: Tensor, sharding: Sharding, spec: AttentionSpec) -> ShardedTokens | None:
        if self._tensor_ranks == 1:
            return None
        return ShardedTokens(x.shape[1], sharding, self._parallel_context, ChunkOptions(self.overlap, spec))

    def _project(self, x: Tensor, tokens: ShardedTokens | None) -> list[Tensor]:
        return column_linear(x, (self.q_proj, self.k_proj, self.v_proj), tokens)

    def _output(self, out: Tensor, tokens: ShardedTokens | None) -> Tensor:
        if tokens is None and self._tensor_ranks > 1:  # new tokens of a generation, which every rank has
            with operation("MegatronAttention"):
                y = all_reduce(F.linear(out, self.o_proj.local_weight("weight")), self._parallel_context.tensor)
            return y if self.o_proj.bias is None else y.add(self.o_proj.local_weight("bias"))
        return row_linear(out, self.o_proj, tokens)

    def extra_repr(self) -> str:
        return super().extra_repr() + f", context={self.context!r}, overlap={self.overlap!r}"


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class MegatronMLP(nn.Module):
    """The MLP of a tensor- and sequence-parallel block.

    "swiglu" computes ``down_proj(silu(gate_proj(x)) * up_proj(x))``, as Llama does; "gelu" and "gelu_tanh" compute
    ``down_proj(gelu(up_proj(x)))``. Each rank holds a slice of the intermediate dimension, which need not divide by the
    ranks.

    Args:
        hidden_size: width of the hidden states.
        intermediate_size: width between the projections.
        activation: "swiglu", "gelu" or "gelu_tanh".
        mesh: the weights and the tokens are sharded over its tp dimension.
        group: the ranks they are sharded over, instead of a mesh. With neither, the default group.
        bias: whether all projections have biases. The bias of ``down_proj`` is replicated, and added once, after the
            reduce-scatter.
        overlap: how communication and GEMMs overlap: "auto", "ring" or "none".
        device: the device of the weights.
        dtype: the dtype of the weights.
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
        overlap: Overlap = "auto",
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
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self._tensor_ranks = size_of(self._parallel_context.tensor)
        linear = partial(ShardedLinear, bias=bias, ranks=self._parallel_context, factory_kwargs=factory_kwargs)
        self.gate_proj = linear(hidden_size, intermediate_size, split=0) if activation == "swiglu" else None
        self.up_proj = linear(hidden_size, intermediate_size, split=0)
        self.down_proj = linear(intermediate_size, hidden_size, split=1)

    def forward(self, x_local: Tensor, sharding: Sharding | None = None) -> Tensor:
        """``x_local [batch, seq, hidden]``, this rank's tokens, to ``y_local`` of the same shape.

        Args:
            x_local: this rank's tokens.
            sharding: the ``Sharding`` of the tokens, made with ``strategy="tp_sp"``. Without it, the ranks exchange
                their lengths in a handshake, which is a graph break under ``torch.compile``.
        """

        def header() -> HiddenHeader:
            check_hidden(x_local, self.hidden_size, self.up_proj)
            return HiddenHeader.of(x_local)

        return with_sharding(partial(self._compute, x_local), sharding, header, self._parallel_context)

    def _compute(self, x_local: Tensor, sharding: Sharding, lengths: tuple[int, ...] | None) -> Tensor:
        x_local, tokens = x_local if lengths else with_gradient(x_local), None
        if self._tensor_ranks > 1:
            options = ChunkOptions(self.overlap, lengths=lengths)
            tokens = ShardedTokens(x_local.shape[1], sharding, self._parallel_context, options)
        if self.gate_proj is None:
            (up,) = column_linear(x_local, (self.up_proj,), tokens)
            hidden = _ACTIVATIONS[self.activation](up)
        else:
            gate, up = column_linear(x_local, (self.gate_proj, self.up_proj), tokens)
            hidden = _ACTIVATIONS[self.activation](gate) * up
        return row_linear(hidden, self.down_proj, tokens)


class HiddenHeader(NamedTuple):
    """A rank's hidden states."""

    length: int
    batch: int
    dtype: torch.dtype
    requires_gradient: bool

    @staticmethod
    def of(x: Tensor) -> HiddenHeader:
        """The header of ``x [b, s, hidden]``."""
        return HiddenHeader(x.shape[1], x.shape[0], x.dtype, x.requires_grad and torch.is_grad_enabled())


def with_sharding(
    compute: Callable[[Sharding, tuple[int, ...] | None], Tensor],
    sharding: Sharding | None,
    make_header: Callable[[], Any],
    ranks: ParallelContext,
) -> Tensor:
    """``compute(sharding, lengths)``. Without a sharding, the ranks make one in a handshake.

    For modules in which tokens do not interact: their order is the order of the ranks, and any lengths will do.

    Args:
        compute: takes the sharding, and the number of tokens of each rank, or None if the sharding says it. Where it is
            None, no rank knows whether the others' inputs require gradients, so ``compute`` calls ``with_gradient``.
        sharding: the caller's.
        make_header: checks this rank's input. The header's ``length`` is the rank's number of tokens, and its other
            fields must be the same on every rank.
        ranks: the ranks of the module.
    """
    if not isinstance(sharding, Sharding):
        return _agree_and_compute(compute, sharding, make_header, ranks)
    make_header()
    return compute(sharding, None)


@no_compile
def _agree_and_compute(
    compute: Callable[[Sharding, tuple[int, ...] | None], Tensor],
    sharding: None,
    make_header: Callable[[], Any],
    ranks: ParallelContext,
) -> Tensor:
    check_sharding(sharding)
    headers = all_gather_header(make_header, ranks.tensor)
    check_same(headers, *(name for name in headers[0]._fields if name != "length"))
    lengths = tuple(header.length for header in headers)
    return compute(Sharding(sum(lengths), "contiguous", group=ranks.tensor), lengths)


def column_linear(x: Tensor, linears: tuple[ShardedLinear, ...], tokens: ShardedTokens | None) -> list[Tensor]:
    """All-gather the tokens and project them: ``x [b, s, in]`` to ``[b, t, out_local]`` for each of ``linears``.

    Without ``tokens``, x has all of them.
    """
    if tokens is None:
        return [F.linear(x, linear.local_weight("weight"), linear.local_weight("bias")) for linear in linears]
    outs = gather_and_project(x, [linear.local_weight("weight") for linear in linears], tokens)
    pairs = zip(outs, linears, strict=True)
    return [y if linear.bias is None else y + linear.local_weight("bias") for y, linear in pairs]


def row_linear(x: Tensor, linear: ShardedLinear, tokens: ShardedTokens | None) -> Tensor:
    """Project and reduce-scatter the tokens: ``x [b, t, in_local]`` to ``[b, s, out]``."""
    if tokens is None:
        local: Tensor = linear(x)
        return local
    y = project_and_scatter(x, linear.local_weight("weight"), tokens)
    return y if linear.bias is None else y.add(linear.local_weight("bias"))


def _default_context(mesh: DeviceMesh | None) -> str:
    names = mesh.mesh_dim_names or () if mesh is not None else ()
    ring, ulysses = (mesh is not None and name in names and mesh[name].size() > 1 for name in ("ring", "ulysses"))
    if ring and ulysses:
        return "hybrid"
    return "ring" if ring else "ulysses" if ulysses else "local"
