"""The factory of attention layers: a strategy's name gives its layer."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import DeviceMesh, ProcessGroup

from ..checks import check_choice
from .attention import (
    AttentionLayer,
    ContextParallelAttention,
    HybridAttention,
    LocalAttention,
    RingAttention,
    UlyssesAttention,
)
from .rotary import RotaryEmbedding
from .tensor_parallel import MegatronAttention

# A strategy's layer joins by standing here.
LAYERS: dict[str, type[AttentionLayer]] = {
    layer.strategy: layer
    for layer in (
        LocalAttention,
        RingAttention,
        UlyssesAttention,
        ContextParallelAttention,
        HybridAttention,
        MegatronAttention,
    )
}


def ParallelAttention(  # noqa: N802 (reads as the class whose instances it makes)
    strategy: str,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    layout: str = "contiguous",
    bias: bool = False,
    out_bias: bool | None = None,
    qk_norm: bool = False,
    rope: RotaryEmbedding | None = None,
    softcap: float = 0.0,
    sinks: bool = False,
    dropout_p: float = 0.0,
    backend: str = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **strategy_options: Any,
) -> AttentionLayer:
    """An attention layer over a sequence sharded by ``strategy``.

    ``layer(x_local [batch, seq, hidden], mask=seqpar.Mask.causal())`` gives ``y_local`` of the same shape.

    Args:
        strategy: "local", "ring", "ulysses", "context_parallel", "hybrid" or "tp_sp".
        others: see ``AttentionLayer``; ``strategy_options`` are those of the strategy's own class.

    Returns:
        One of LocalAttention, RingAttention, UlyssesAttention, ContextParallelAttention, HybridAttention,
        MegatronAttention.

    Raises:
        ValueError: an unknown strategy (with the nearest name), or arguments that do not fit. TypeError: arguments
            of another type, or an option the strategy does not have.
    """
    check_choice("strategy", strategy, LAYERS)
    return LAYERS[strategy](
        hidden_size,
        num_heads,
        num_kv_heads,
        head_dim,
        mesh=mesh,
        group=group,
        layout=layout,
        bias=bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        rope=rope,
        softcap=softcap,
        sinks=sinks,
        dropout_p=dropout_p,
        backend=backend,
        device=device,
        dtype=dtype,
        **strategy_options,
    )
