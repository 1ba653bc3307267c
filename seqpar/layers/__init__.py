"""Attention layers and rotary embeddings as nn.Modules, the loss, and the gradients of weights."""

from .attention import AttentionLayer
from .clipping import clip_grad_norm_
from .context_parallel import ContextParallelAttention
from .gradients import average_in_backward, sync_gradients
from .loss import token_loss
from .named import AutoAttention, HybridAttention, LocalAttention, RingAttention, UlyssesAttention
from .rotary import RotaryEmbedding

__all__ = [
    "AttentionLayer",
    "AutoAttention",
    "ContextParallelAttention",
    "HybridAttention",
    "LocalAttention",
    "RingAttention",
    "RotaryEmbedding",
    "UlyssesAttention",
    "average_in_backward",
    "clip_grad_norm_",
    "sync_gradients",
    "token_loss",
]
