"""Context parallelism with the option names of TransformerEngine, and with all-gathered hidden states (FastSeq).

Shapes: b batch, s tokens of this rank, t tokens of all ranks, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.checks import check_choice
from ..base.sharded import is_dtensor
from ..decoding import KeyValueCache
from ..masks.mask import Mask
from ..sharding.sharding import Sharding
from ..sharding.spec import REPLICATED, AttentionSpec
from ..strategies import operators
from ..strategies.autograd import to_autocast_dtype, with_gradient
from ..strategies.gathered_activations import GATHERS, Gather, GatheredAttention
from ..strategies.operators import seen_by_dispatch_mode
from ..strategies.seed import draw_seed
from ..strategies.tensor_operators import (
    ChunkOptions,
    ShardedTokens,
    all_gather_positions,
    chunks_of,
    gather_and_project,
)
from .attention import AttentionLayer, normalized
from .rotary import rotate


class ContextParallelAttention(AttentionLayer):
    """Context parallelism with the option names of TransformerEngine.

    Args:
        gather: with "all_gather", what the ranks receive.

            * "kv" (default): the keys and values that their queries see, ``2 * num_kv_heads * head_dim`` numbers per
              token.
            * "activations": all ranks' hidden states, ``hidden_size`` numbers per token (FastSeq). That is half of "kv"
              if ``num_kv_heads * head_dim`` equals ``hidden_size``. Every rank projects them to keys and values as they
              arrive, and again in backward. ``k_proj`` and ``v_proj`` must be plain ``nn.Linear`` and ``k_norm`` a
              plain ``nn.RMSNorm``, not modules that replace them, such as LoRA's.
        options: the arguments of ``ParallelAttention``, and

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

    def _without_cache(self, spec: AttentionSpec) -> AttentionSpec:
        return spec if self.gather == "kv" else spec.having(strategy=REPLICATED)

    def _check_input(self, x: Tensor, mask: Mask, positions: Tensor | None, sharding: Sharding | None = None) -> None:
        super()._check_input(x, mask, positions, sharding)
        if self.gather == "kv":
            return
        for name, plain in (("k_proj", nn.Linear), ("v_proj", nn.Linear), ("k_norm", nn.RMSNorm)):
            module = getattr(self, name)
            if module is not None and (type(module) is not plain or is_dtensor(module.weight)):
                raise TypeError(
                    f"{name}={type(module).__name__}: gather='activations' computes keys and values from the weights "
                    f"of a plain nn.{plain.__name__}, and would leave out what this module does besides; use "
                    "gather='kv'"
                )

    def _compute(
        self,
        x: Tensor,
        mask: Mask,
        sharding: Sharding,
        positions: Tensor | None,
        joins_backward: bool = True,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        if self.gather == "kv" or cache is not None:
            return super()._compute(x, mask, sharding, positions, joins_backward, cache)
        self._check_input(x, mask, positions, sharding)
        ranks, q_spec = self._parallel_context, self._call_spec(mask, sharding)
        spec = self._without_cache(q_spec)
        length = self._rotary_length(x, positions, sharding)
        tokens = ShardedTokens(x.shape[1], sharding, ranks, ChunkOptions("ring", spec))
        k_positions = positions
        if positions is not None and self.rope is not None:
            k_positions = all_gather_positions(positions, *tokens[1:])

        def rotated(y: Tensor, spec: AttentionSpec, positions: Tensor | None) -> Tensor:
            """``y [b, s, h, d]`` rotated by ``positions``; by default, where attention with ``spec`` has its tokens."""
            if self.rope is None:
                return y
            positions = operators.global_positions(y, sharding, ranks, spec) if positions is None else positions
            dtype = torch.promote_types(y.dtype, torch.float32)
            return rotate(y, *self.rope.cos_sin(positions, dtype, y.device, length))

        def queries() -> Tensor:
            q = normalized(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), self.q_norm)
            return rotated(q, q_spec, positions)

        norm_weight = None if self.k_norm is None else self.k_norm.weight
        names = {"k_bias": self.k_proj.bias, "v_bias": self.v_proj.bias, "norm": norm_weight}
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
            return rotated(k, spec, k_positions), v

        weights = [self.k_proj.weight, self.v_proj.weight]
        if torch.compiler.is_compiling() or seen_by_dispatch_mode():  # which see the projections and attention
            k, v = finish(*gather_and_project(x, weights, tokens), *parameters.values())
            return self._output(self._attend(queries(), k, v, mask, sharding, spec, joins_backward), None)
        hidden, *weights = to_autocast_dtype(x, *weights)
        hidden = (with_gradient(hidden) if joins_backward else hidden).contiguous()
        chunks = chunks_of(*tokens, x.device)
        with chunks.call("all_gather_linear", hidden):
            x_chunks = chunks.receive_chunks(hidden.detach())
        q = queries()
        seed = None
        if spec.dropout_p:
            seed, spec = draw_seed(), spec.having(draws_seed=True)
        constants = x_chunks, chunks, finish, (spec, mask, sharding, ranks)
        out = GatheredAttention.apply(q, hidden, *weights, self.sinks, seed, *constants, *parameters.values())
        return self._output(out.flatten(2), None)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.gather == "kv" else f", gather={self.gather!r}")
