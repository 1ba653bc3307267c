"""Router balancing losses of mixture-of-experts models, over the tokens of the whole sequence.

transformers' ``load_balancing_loss_func`` multiplies two averages over tokens, so the ranks' losses do not add up to
the whole one; the averages must be taken over all ranks first. Model code finds the function in its own module:
there a stand-in looks whether a sharded forward is under way, and calls the original when not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .batch import BatchShard
from .forward import current
from .loss import whole

_FUNCTION = "load_balancing_loss_func"
_originals: dict[str, Callable[..., Any]] = {}
_users: dict[str, set[int]] = {}


def install(model: nn.Module) -> None:
    """Put the stand-in in the model's code, where it has such a loss."""
    for kind in type(model).__mro__:
        code = sys.modules.get(kind.__module__)
        original = getattr(code, _FUNCTION, None)
        if original is None:
            continue
        name = kind.__module__
        if name not in _originals:
            _originals[name] = original
            setattr(code, _FUNCTION, _stand_in(original))
        _users.setdefault(name, set()).add(id(model))


def withdraw(model: nn.Module) -> None:
    """Put the original back when no parallelized model needs the stand-in any more."""
    for name, users in list(_users.items()):
        users.discard(id(model))
        if not users:
            setattr(sys.modules[name], _FUNCTION, _originals.pop(name))
            del _users[name]


def _stand_in(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_balancing_loss(
        gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Tensor | None = None
    ) -> Any:
        call = current()
        shard = call.shard if call is not None else None
        if (
            call is None
            or not isinstance(shard, BatchShard)
            or not isinstance(gate_logits, tuple)
            or num_experts is None
        ):
            return original(gate_logits, num_experts, top_k, attention_mask)
        chosen, probability, tokens = _sums(gate_logits, num_experts, top_k, shard.valid)
        patch = call.patch
        counts = torch.cat([chosen, tokens])
        if patch.group is not None and patch.ranks > 1:
            torch.distributed.all_reduce(counts, group=patch.group)
        chosen, rows = counts[:-1], counts[-1]
        # Linear in this rank's probabilities: its gradient is its share.
        return whole((chosen / rows * (probability / rows)).sum() * num_experts, patch)

    return load_balancing_loss


def _sums(
    gate_logits: tuple[Tensor, ...], experts: int, top_k: int, valid: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Over this rank's tokens and all layers: how often each expert was chosen ``[experts]``, its summed probability
    ``[experts]``, and the number of rows ``[1]``."""
    device = gate_logits[0].device
    chosen, probability = (torch.zeros(experts, device=device) for _ in range(2))
    tokens = torch.zeros(1, device=device)
    for gate in gate_logits:
        weights = torch.softmax(gate.to(device), dim=-1)
        weight = torch.ones(len(weights), device=device) if valid is None else valid.reshape(-1).to(device).float()
        picked = weights.detach().topk(top_k, dim=-1).indices
        chosen = chosen.index_add(0, picked.reshape(-1), weight.repeat_interleave(top_k))
        probability = probability + (weights.float() * weight[:, None]).sum(0)
        tokens = tokens + weight.sum()
    return chosen, probability, tokens
