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
from ..layout import Layout
from ..mask import Mask
from ..placement import Placement
from ..spec import AttentionSpec
from ..strategies.autograd import to_autocast_dtype, with_gradient
from ..strategies.gathered_activations import (
    GATHERS,
    FinishKeys,
    Gather,
    GatheredAttention,
    start_gather,
)
from ..strategies.operators import (
    global_positions,
    make_call,
    seen_by_dispatch_mode,
)
from ..strategies.sequence_chunks import SequenceChunks
from ..strategies.tensor_operators import ChunkOptions, ShardedTokens, all_gather_positions, gather_and_project
from .attention import AttentionLayer, LayerCall
from .rotary import rotate


class ContextParallelAttention(AttentionLayer):
    """Context parallelism with the option names of TransformerEngine. See ``AttentionLayer`` for the other arguments.

    Args:
        gather: with "all_gather", what the ranks receive.

            * "kv" (default): the keys and values that their queries see, ``2 * num_kv_heads * head_dim`` numbers per
              token.
            * "activations": all ranks' hidden states, ``hidden_size`` numbers per token (FastSeq). That is half of "kv"
              if ``num_kv_heads * head_dim`` equals ``hidden_size``. Every rank projects them to keys and values as they
              arrive, and again in backward. ``k_proj`` and ``v_proj`` must be plain ``nn.Linear`` and ``k_norm`` a
              plain ``nn.RMSNorm``, not modules that replace them, such as LoRA's.
        options: the arguments of ``AttentionLayer``, and

            * comm: "all_gather" (all keys and values at once), "p2p" (the ring), "a2a" (Ulysses) or "a2a+p2p" (the
              hybrid). By default "all_gather" if all ranks share a host or ``chunks`` or ``gather`` is given, otherwise
              "p2p".
            * chunks: with "all_gather", in how many chunks of heads keys and values are received. More chunks need less
              memory. By default the size of keys and values decides.
            * ulysses_size: with "a2a+p2p" on a plain group, the size of the all-to-all's subgroups.
    """

    strategy = "context_parallel"

    def __init__(self, *args: Any, gather: Gather = "kv", **options: Any) -> None:
        check_choice("gather", gather, GATHERS)
        options = {name: value for name, value in options.items() if value is not None}
        if gather == "activations":
            comm, chunks = options.setdefault("comm", "all_gather"), options.get("chunks")
            if comm != "all_gather":
                raise ValueError(f"gather={gather!r}: an option of comm='all_gather'; leave it out with comm={comm!r}")
            if chunks is not None:
                raise ValueError(
                    f"chunks={chunks}: with gather='activations' nothing is sent by heads; leave chunks out, or use "
                    "gather='kv'"
                )
        self.gather: Gather = gather
        super().__init__(*args, **options)

    def _constants(self, placement: Placement, layout: Layout, dropout_p: float) -> tuple[Any, ...]:
        return (*super()._constants(placement, layout, dropout_p), self.gather)

    def _spec(self, dropout_p: float, draws_seed: bool = False) -> AttentionSpec:
        return super()._spec(dropout_p, draws_seed).having(replicated=self.gather == "activations")

    def _check_input(self, x: Tensor, mask: Mask, positions: Tensor | None, seq_len: int | None) -> None:
        super()._check_input(x, mask, positions, seq_len)
        self._check_projections()

    def _check_projections(self) -> None:
        """Raise if keys and values cannot be computed from the weights of their projections."""
        if self.gather == "kv":
            return
        for name, plain in (("k_proj", nn.Linear), ("v_proj", nn.Linear), ("k_norm", nn.RMSNorm)):
            module = getattr(self, name)
            if module is not None and (type(module) is not plain or isinstance(module.weight, DTensor)):
                raise TypeError(
                    f"{name}={type(module).__name__}: gather='activations' computes keys and values from the weights "
                    f"of a plain nn.{plain.__name__}, and would leave out what this module does besides; use "
                    "gather='kv'"
                )

    def _compute(self, x: Tensor, call: LayerCall) -> Tensor:
        tokens = call.placement.tokens
        if self.gather == "kv" or tokens.ring == 1:
            return super()._compute(x, call)
        hidden, k_weight, v_weight = to_autocast_dtype(x, self.k_proj.weight, self.v_proj.weight)
        chunks = SequenceChunks.of_context(call.placement.sequence, tokens, x.device)
        hidden = (with_gradient(hidden) if call.joins_backward else hidden).contiguous()
        q_positions, k_positions = call.positions, call.positions
        if self.rope is not None:
            if call.positions is None:
                q_positions = tokens.rank_positions(call.placement.rank, x.device)
                k_positions = tokens.together().rank_positions(0, x.device)
            else:
                k_positions = chunks.all_gather(torch.atleast_2d(call.positions))
        finish, parameters = self._finish_keys(hidden.dtype, x.device, k_positions, call.rotary_length)
        if seen_by_dispatch_mode():  # the mode must see the projections and attention as separate operators
            options = ChunkOptions("ring", call.spec)
            where = ShardedTokens(x.shape[1], call.sharding, self._parallel_context, options)
            k, v = finish(*gather_and_project(hidden, [k_weight, v_weight], where), *parameters)
            out = self._attend(self._queries(x, q_positions, call.rotary_length), k, v, call)
        else:
            arriving = start_gather(hidden.detach(), chunks)
            q = self._queries(x, q_positions, call.rotary_length)
            attention_call = make_call(
                self.head_dim, self._heads, self.sinks, None, call.seed, call.mask, call.placement, call.spec
            )
            tensors = q, hidden, k_weight, v_weight, self.sinks
            out = GatheredAttention.apply(*tensors, arriving, chunks, finish, attention_call, *parameters)
        return self._output(out.flatten(2), None)

    def _traced(self, x: Tensor, mask: Mask, sharding: Any, positions: Tensor | None) -> Tensor:
        if self.gather == "kv":
            return super()._traced(x, mask, sharding, positions)
        check_hidden(x, self.hidden_size, self.q_proj)
        self._check_projections()
        ranks, spec = self._parallel_context, self._traced_spec()
        length = self._traced_length(x, positions, sharding)
        chunks = ShardedTokens(x.shape[1], sharding, ranks, ChunkOptions("ring", spec))
        q_positions, k_positions = positions, positions
        if self.rope is not None and positions is not None:  # before the projections, as eager code sends them
            k_positions = all_gather_positions(positions, *chunks[1:])
        k, v = gather_and_project(x, [self.k_proj.weight, self.v_proj.weight], chunks)
        if self.rope is not None and positions is None:
            q_positions = global_positions(x, sharding, ranks, spec.having(replicated=False))
            k_positions = global_positions(k, sharding, ranks, spec)
        finish, parameters = self._finish_keys(k.dtype, x.device, k_positions, length)
        k, v = finish(k, v, *parameters)
        q = self._queries(x, q_positions, length)
        return self._output(self._traced_attention(q, k, v, mask, sharding, spec).flatten(2), None)

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
        table = self._rotary_table(positions, dtype, device, length)
        names = {"k_bias": self.k_proj.bias, "v_bias": self.v_proj.bias}
        if self.k_norm is not None:
            names["norm"] = self.k_norm.weight
        parameters = {name: p for name, p in names.items() if p is not None}

        def finish(k: Tensor, v: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
            by_name = dict(zip(parameters, values, strict=True))
            k, v = (
                (x + by_name[bias].to(x.dtype) if bias in by_name else x).unflatten(-1, (-1, self.head_dim))
                for x, bias in ((k, "k_bias"), (v, "v_bias"))
            )
            if self.k_norm is not None:
                weight = by_name["norm"]
                k = F.rms_norm(k.to(weight.dtype), (self.head_dim,), weight, self.k_norm.eps).to(v.dtype)
            return (k if table is None else rotate(k, *table)), v

        return finish, list(parameters.values())

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.gather == "kv" else f", gather={self.gather!r}")
