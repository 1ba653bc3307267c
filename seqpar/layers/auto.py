"""The attention layer that selects a strategy in each call."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..planner.auto import AttentionShape, choose_strategy
from ..schedule.plan import MaskPlanner
from ..sharding import Sharding
from ..strategies import resolve
from ..strategies.operators import AttentionOptions, constants
from .attention import AttentionLayer, LayerCall


class AutoAttention(AttentionLayer):
    """Selects in each call the strategy that is expected to be the fastest, see ``seqpar.attention``. No options.

    See ``AttentionLayer`` for the arguments.
    """

    strategy = "auto"

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: LayerCall, options: AttentionOptions) -> Tensor:
        sequence, group = call.sequence, call.groups.sequence
        if group is not None and group.size() > 1:
            (batch, _, heads, head_dim), kv_heads = q.shape, k.shape[2]
            shape = AttentionShape(batch, heads, kv_heads, (head_dim + v.shape[3]) // 2, q.dtype)
            chosen = choose_strategy(
                call.mask, sequence.seq_len, sequence.layout, shape, group, q.device, call.joins_backward
            )
            ranks = self._ranks(call.sharding)
            groups = resolve(chosen.strategy, ranks.mesh, ranks.group, chosen.options)
            sequence = replace(sequence, ring=groups.ring_size, ulysses=groups.ulysses_size)
            call = call._replace(groups=groups, sequence=sequence)
            options = replace(options, strategy=chosen.strategy, strategy_options=constants(chosen.options))
        return super()._attend(q, k, v, call, options)

    def mask_planner(self, sharding: Sharding) -> MaskPlanner:
        raise ValueError("strategy='auto': it depends on the shapes of q, k and v too; name the strategy to plan for")
