"""nn.Modules on top of the attention function."""

from .attention import (
    AttentionLayer,
    ContextParallelAttention,
    HybridAttention,
    LocalAttention,
    RingAttention,
    UlyssesAttention,
)
from .gradients import sync_gradients
from .rotary import RotaryEmbedding

__all__ = [
    "AttentionLayer",
    "ContextParallelAttention",
    "HybridAttention",
    "LocalAttention",
    "RingAttention",
    "RotaryEmbedding",
    "UlyssesAttention",
    "sync_gradients",
]
