"""Context parallelism with the option names of TransformerEngine, and with all-gathered hidden states (FastSeq).

Shapes: b batch, s tokens of this rank, t tokens of all ranks, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checks import check_choice, check_hidden
from ..layout import Layout, SequenceSharding
from ..mask import Mask
from ..mesh import AttentionGroups, ParallelContext, rank_in, ranks_by_host
from ..schedule.plan import attention_plan
from ..sharding import Sharding
from ..strategies import Comm
from ..strategies.autograd import to_autocast_dtype, with_gradient
from ..strategies.gathered_activations import (
    GATHERS,
    FinishKeys,
    Gather,
    GatheredActivations,
    GatheredAttention,
    StartInBackward,
    prefers_activations,
)
from ..strategies.operators import (
    AttentionOptions,
    make_call,
    placement,
    positions_op,
    seen_by_dispatch_mode,
    with_replicated_keys,
)
from ..strategies.sequence_chunks import SequenceChunks
from ..strategies.tensor_operators import (
    ChunkOptions,
    TracedChunks,
    all_gather_positions_op,
    traced_all_gather_linear,
)
from ..strategies.tensor_sequence import all_gather_linear
from .attention import AttentionLayer, LayerCall
from .rotary import rotate


class ContextParallelAttention(AttentionLayer):
    """Context parallelism with the option names of TransformerEngine. See ``AttentionLayer`` for the other arguments.

    Args:
        comm: "all_gather" (all keys and values at once), "p2p" (the ring), "a2a" (Ulysses) or "a2a+p2p" (the hybrid).
            By default "all_gather" if all ranks share a host or ``chunks`` or ``gather`` is given, otherwise "p2p".
        chunks: with "all_gather", in how many chunks of heads keys and values are received. More chunks need less
            memory. By default the size of keys and values decides.
        ulysses_size: with "a2a+p2p" on a plain group, the size of the all-to-all's subgroups.
        gather: with "all_gather", what the ranks receive.

            * "kv" (default): the keys and values that their queries see, ``2 * num_kv_heads * head_dim`` numbers per
              token.
            * "activations": all ranks' hidden states, ``hidden_size`` numbers per token (FastSeq). That is half of "kv"
              if ``num_kv_heads * head_dim`` equals ``hidden_size``. Every rank projects them to keys and values as they
              arrive, and again in backward. ``k_proj`` and ``v_proj`` must be plain ``nn.Linear`` and ``k_norm`` a
              plain ``nn.RMSNorm``, not modules that replace them, such as LoRA's.
            * "auto": in each call the one that takes less time, estimated from bytes and operations (see
              ``docs/strategies.md``), and "kv" if "activations" cannot run. If the mesh was not made by ``init_mesh``,
              the ranks exchange their hosts in the first call. Compiled by ``torch.compile``, every rank needs at
              least 2 tokens.
        options: the arguments of ``AttentionLayer``.
    """

    strategy = "context_parallel"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        comm: Comm | None = None,
        chunks: int | None = None,
        ulysses_size: int | None = None,
        gather: Gather = "kv",
        **options: Any,
    ) -> None:
        check_choice("gather", gather, GATHERS)
        if gather != "kv":
            if comm not in (None, "all_gather"):
                raise ValueError(f"gather={gather!r}: an option of comm='all_gather'; leave it out with comm={comm!r}")
            comm = "all_gather"
        if gather == "activations" and chunks is not None:
            raise ValueError(
                f"chunks={chunks}: with gather='activations' nothing is sent by heads; leave chunks out, or use "
                "gather='kv'"
            )
        self.gather: Gather = gather
        own = {"comm": comm, "chunks": chunks, "ulysses_size": ulysses_size}
        options.update((name, value) for name, value in own.items() if value is not None)
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim, **options)

    def _constants(self, groups: AttentionGroups, layout: Layout, dropout_p: float) -> tuple[Any, ...]:
        return (*super()._constants(groups, layout, dropout_p), self.gather)

    def _groups(self, sharding: Sharding | None = None) -> AttentionGroups:
        groups = super()._groups(sharding)
        return with_replicated_keys(groups) if self.gather == "activations" else groups

    def _check_input(self, x: Tensor, mask: Mask, positions: Tensor | None, seq_len: int | None) -> None:
        super()._check_input(x, mask, positions, seq_len)
        if self.gather == "activations" and (reason := self._keys_are_opaque()) is not None:
            raise TypeError(reason)

    def _keys_are_opaque(self) -> str | None:
        """Why keys and values cannot be computed from the weights of their projections, or None."""
        for name, plain in (("k_proj", nn.Linear), ("v_proj", nn.Linear), ("k_norm", nn.RMSNorm)):
            module = getattr(self, name)
            if module is None:
                continue
            if type(module) is not plain or isinstance(module.weight, DTensor):
                return (
                    f"{name}={type(module).__name__}: gather='activations' computes keys and values from the weights "
                    f"of a plain nn.{plain.__name__}, and would leave out what this module does besides; use "
                    "gather='kv'"
                )
        return None

    def _sends_activations(self, call: LayerCall, x: Tensor) -> bool:
        """Whether the ranks send hidden states in this call. The same on every rank."""
        if self.gather == "kv" or call.groups.ring_size == 1:
            return False
        if self.gather == "activations":
            return True
        if self._keys_are_opaque() is not None:
            return False
        (hidden,) = to_autocast_dtype(x)
        return _activations_are_faster(hidden, self._kv_width, call.mask, call.groups, call.sequence)

    @property
    def _kv_width(self) -> int:
        """The number of elements of a token's keys, and of its values."""
        return self.num_kv_heads * self.head_dim

    def _compute(self, x: Tensor, call: LayerCall) -> Tensor:
        if not self._sends_activations(call, x):
            return super()._compute(x, call)
        hidden, k_weight, v_weight = to_autocast_dtype(x, self.k_proj.weight, self.v_proj.weight)
        groups, sequence, rank = with_replicated_keys(call.groups), call.sequence, rank_in(call.groups.sequence)
        chunks = SequenceChunks.of_context(groups.sequence, sequence, x.device)
        if call.joins_backward:
            hidden = with_gradient(hidden)
        of_queries, of_keys = call.positions, call.positions
        if self.rope is not None:
            if call.positions is None:
                of_queries = sequence.rank_positions(rank, x.device)
                of_keys = sequence.together().rank_positions(0, x.device)
            else:
                of_keys = chunks.all_gather_positions(call.positions)
        finish, parameters = self._finish_keys(hidden.dtype, x.device, of_keys, call.rotary_length)
        call, options = call._replace(groups=groups), self._options(call.dropout_p, replicated=True)
        hidden = hidden.contiguous()
        if seen_by_dispatch_mode():  # the mode must see the projections and attention as separate operators
            k, v = finish(*all_gather_linear(hidden, [k_weight, v_weight], chunks), *parameters)
            q = self._queries(x, of_queries, call.rotary_length)
            return self._output(self._attend(q, k, v, call, options).flatten(2), None)
        gathered = GatheredActivations(chunks, finish)
        gathered.start(hidden.detach())
        q = self._queries(x, of_queries, call.rotary_length)
        attention_call = make_call(
            self.head_dim, self._heads, self.sinks, None, call.seed, call.mask, groups, sequence, options
        )
        out = GatheredAttention.apply(q, hidden, k_weight, v_weight, self.sinks, gathered, attention_call, *parameters)
        y: Tensor = StartInBackward.apply(self._output(out.flatten(2), None), hidden.detach(), gathered)
        return y

    def _traced(self, x: Tensor, mask: Mask, sharding: Any, positions: Tensor | None) -> Tensor:
        reason = None if self.gather == "kv" else self._keys_are_opaque()
        if self.gather == "kv" or (self.gather == "auto" and reason is not None):
            return super()._traced(x, mask, sharding, positions)
        check_hidden(x, self.hidden_size, self.q_proj)
        if reason is not None:
            raise TypeError(reason)
        ranks, options, chosen = self._parallel_context, self._traced_options(replicated=True), None
        if self.gather == "auto":
            (hidden,) = to_autocast_dtype(x)
            chosen = gathers_activations_op(hidden, self._kv_width, mask, sharding, ranks, self._options(0.0))
        length = self._traced_length(x, positions, sharding)
        chunks = TracedChunks(x.shape[1], sharding, ranks, ChunkOptions("ring", options))
        of_queries, of_keys = positions, positions
        if self.rope is not None and positions is not None:  # before the projections, as eager code sends them
            of_keys = all_gather_positions_op(positions, chosen, sharding, ranks, chunks.options)
        k, v = traced_all_gather_linear(x, [self.k_proj.weight, self.v_proj.weight], chunks, chosen)
        if self.rope is not None and positions is None:
            of_queries = positions_op(x, None, sharding, ranks, self._options(0.0))
            of_keys = positions_op(k, chosen, sharding, ranks, options)
        finish, parameters = self._finish_keys(k.dtype, x.device, of_keys, length)
        k, v = finish(k, v, *parameters)
        q = self._queries(x, of_queries, length)
        return self._output(self._traced_attention(q, k, v, mask, sharding, options, chosen).flatten(2), None)

    def _queries(self, x: Tensor, positions: Tensor | None, length: int | Tensor | None) -> Tensor:
        """The queries ``[b, s, h, d]`` of this rank's tokens ``x [b, s, hidden]``."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None:
            q = self.q_norm(q.to(self.q_norm.weight.dtype)).to(q.dtype)
        table = self._rotary_table(positions, q.dtype, q.device, length)
        return q if table is None else rotate(q, *table)

    def _rotary_table(
        self, positions: Tensor | None, dtype: torch.dtype, device: torch.device, length: int | Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Cosine and sine at ``positions [s]`` or ``[b, s]`` for tensors of ``dtype``; None without rotation."""
        if self.rope is None:
            return None
        assert positions is not None
        return self.rope.cos_sin(positions, torch.promote_types(dtype, torch.float32), device, length)

    def _finish_keys(
        self, dtype: torch.dtype, device: torch.device, positions: Tensor | None, length: int | Tensor | None
    ) -> tuple[FinishKeys, list[Tensor]]:
        """A function that turns projections without biases into keys and values at ``positions [t]`` or ``[b, t]``, and
        the parameters to pass to it."""
        norm, d = self.k_norm, self.head_dim
        table = self._rotary_table(positions, dtype, device, length)
        parameters: list[Tensor] = [p for p in (self.k_proj.bias, self.v_proj.bias) if p is not None]
        if norm is not None:
            parameters.append(norm.weight)

        def finish(k: Tensor, v: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
            given = iter(parameters)
            if self.k_proj.bias is not None:
                k = k + next(given).to(k.dtype)
            if self.v_proj.bias is not None:
                v = v + next(given).to(v.dtype)
            k, v = k.unflatten(-1, (-1, d)), v.unflatten(-1, (-1, d))
            if norm is not None:
                weight = next(given)
                k = F.rms_norm(k.to(weight.dtype), (d,), weight, norm.eps).to(v.dtype)
            return (k if table is None else rotate(k, *table)), v

        return finish, parameters

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.gather == "kv" else f", gather={self.gather!r}")


def _activations_are_faster(
    hidden: Tensor, kv_width: int, mask: Mask, groups: AttentionGroups, sequence: SequenceSharding
) -> bool:
    """Whether to send hidden states like ``hidden [b, s, hidden]``, and not keys and values of ``kv_width`` each."""
    ranks, per_host, seq_len = groups.ring_size, groups.per_host, sequence.seq_len
    of_kv = attention_plan(mask, sequence, groups.ring_rank, True, per_host).received_rows
    of_activations = (per_host - 1) * seq_len, (ranks - per_host) * seq_len
    assert groups.sequence is not None
    several_hosts = len(ranks_by_host(groups.sequence)) > 1
    if per_host == ranks and several_hosts:  # hosts of one rank, or of different numbers of ranks
        of_kv, of_activations = (0, sum(of_kv)), (0, sum(of_activations))
    return prefers_activations(of_kv, of_activations, hidden.shape[2], kv_width, hidden.dtype)


@torch.library.custom_op("seqpar::gathers_activations", mutates_args=())
def gathers_activations_op(
    hidden: Tensor, kv_width: int, mask: Mask, sharding: Sharding, ranks: ParallelContext, options: AttentionOptions
) -> Tensor:
    """``_activations_are_faster`` as an operator: int64 ``[]`` on the host, for ``AttentionOptions.with_choice``."""
    mask.check_length(sharding.seq_len)
    groups, sequence = placement(sharding, ranks, options)
    faster = groups.ring_size > 1 and _activations_are_faster(hidden, kv_width, mask, groups, sequence)
    return torch.tensor(int(faster), device="cpu")


@gathers_activations_op.register_fake
def _(
    hidden: Tensor, kv_width: int, mask: Mask, sharding: Sharding, ranks: ParallelContext, options: AttentionOptions
) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")
