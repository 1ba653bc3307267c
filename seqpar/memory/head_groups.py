"""Attention for some heads at a time, with the projections before and after it (Untied Ulysses, arXiv 2602.21196)."""

from __future__ import annotations

import re
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ..base.checks import no_compile
from ..patching.forwards import replace_forward
from ..strategies.attend import only_heads
from .layers import contexts_of_part
from .weights import CACHE_ARGUMENTS, OWNER, OriginalForward, SummedWeights
from .zero import is_partitioned

# By the names of an attention layer's parameters: the dimension that has heads, or None.
_RULES: tuple[tuple[str, int | None], ...] = (
    (r"[qkv]_proj\.(base_layer\.)?(weight|bias)", 0),
    (r"[qkv]_proj\.lora_B\.\w+\.weight", 0),
    (r"[qkv]_proj\.lora_A\.\w+\.weight", None),
    (r"o_proj\.(base_layer\.)?weight", 1),
    (r"o_proj\.lora_A\.\w+\.weight", 1),
    (r"o_proj\.lora_B\.\w+\.weight", None),
    (r"o_proj\.(base_layer\.)?bias", None),
    (r"sinks", 0),
    (r"[qk]_norm\.weight", None),
)
_OUTPUT_BIAS = re.compile(r"o_proj\.(base_layer\.)?bias")


def group_heads(module: nn.Module, groups: int) -> None:
    """Compute ``module`` for ``1/groups`` of its heads at a time, and recompute each group in backward. In place.

    Only one group's q, k, v and attention output exist at a time. The groups' outputs are summed in float32. Without
    gradients, as during generation, all heads are computed at once.

    Args:
        module: an attention layer with the linear layers q_proj, k_proj, v_proj and o_proj, whose forward takes the
            number of heads from their outputs and calls attention of seqpar once. It may have LoRA weights, sinks, and
            norms of q and k over head_dim.
        groups: divides the number of KV heads.

    Raises:
        ValueError: the layer is not of this kind. Its forward raises if a group's q has other heads.
    """
    dimensions = _check(module, groups)
    head_dim = cast(int, module.head_dim)
    heads = cast(nn.Linear, module.o_proj).in_features // head_dim // groups

    @no_compile  # torch.compile does not trace replaced weights
    def run(self: nn.Module, forward: OriginalForward, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self.training and getattr(self, "attention_dropout", None):
            raise ValueError("head_groups: all groups would drop the same weights of attention; set its dropout to 0")
        _check_not_partitioned(self)
        for name in CACHE_ARGUMENTS:
            if kwargs.get(name) is not None:
                kwargs[name] = None  # a cache must not be written by every group
        x, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        weights = SummedWeights(self)

        def group_forward(group: int, x: Tensor) -> tuple[Any, ...]:
            def cut(name: str, p: Tensor) -> Tensor:
                dimension = dimensions[name]
                if dimension is None:
                    return torch.zeros_like(p) if group and _OUTPUT_BIAS.fullmatch(name) else p  # it is added once
                return p.chunk(groups, dimension)[group]

            with only_heads(heads, head_dim) as calls:
                y = weights.call(forward, x, *args, cut=cut, **kwargs)
            if len(calls) != 1:
                raise ValueError(
                    f"head_groups: {type(self).__name__} calls attention of seqpar {len(calls)} times outside "
                    "torch.compile; it must do so once, so that its number of heads is known. Leave head_groups out"
                )
            return y if isinstance(y, tuple) else (y,)

        total: Tensor | None = None
        for group in range(groups):
            y, *others = checkpoint(group_forward, group, x, use_reentrant=False, context_fn=contexts_of_part)
            total = y.to(torch.promote_types(y.dtype, torch.float32)) if total is None else total.add_(y)
        assert total is not None
        if any(other is not None for other in others):
            raise ValueError(f"head_groups: {type(self).__name__} returns more than its output; leave head_groups out")
        return (total.to(y.dtype), *others) if others else total.to(y.dtype)

    replace_forward(module, OWNER, run)


def _check(module: nn.Module, groups: int) -> dict[str, int | None]:
    """Raise unless the layer can be computed by groups. For each parameter: the dimension that is cut."""
    name = type(module).__name__
    _check_not_partitioned(module)
    if not all(hasattr(module, f"{x}_proj") for x in "qkvo"):
        raise ValueError(f"head_groups: {name} has no q_proj, k_proj, v_proj and o_proj; leave head_groups out")
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(head_dim, int):
        raise ValueError(f"head_groups: {name} has no head_dim; leave head_groups out")
    dimensions: dict[str, int | None] = {}
    for parameter, p in module.named_parameters():
        rules = [dimension for pattern, dimension in _RULES if re.fullmatch(pattern, parameter)]
        over_all_heads = "norm" in parameter and p.shape != (head_dim,)
        if not rules or isinstance(p, DTensor) or over_all_heads:
            raise ValueError(
                f"head_groups: {name} has the parameter {parameter} of shape {tuple(p.shape)}, and it is not known "
                "which part of it belongs to a head; leave head_groups out"
            )
        dimensions[parameter] = rules[0]
    kv_heads = cast(nn.Linear, module.k_proj).out_features // head_dim
    if kv_heads % groups:
        raise ValueError(f"head_groups={groups}: it must divide the {kv_heads} KV heads of {name}")
    return dimensions


def _check_not_partitioned(module: nn.Module) -> None:
    if any(is_partitioned(p) for p in module.parameters()):
        raise ValueError(
            f"head_groups: DeepSpeed's ZeRO-3 has partitioned the weights of {type(module).__name__}, and gathers each "
            "projection as a whole; use ZeRO 1 or 2, or fully_shard, or leave head_groups out"
        )
