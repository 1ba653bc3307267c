"""Attention layers, tensor-parallel layers and rotary embeddings as nn.Modules, and the gradients of their weights."""

from .attention import (
    AttentionLayer,
    AutoAttention,
    HybridAttention,
    LocalAttention,
    RingAttention,
    UlyssesAttention,
)
from .context_parallel import ContextParallelAttention
from .gradients import clip_grad_norm_, sync_gradients
from .loss import token_loss
from .rotary import RotaryEmbedding
from .tensor_parallel import MegatronAttention, MegatronMLP
from .vocab_parallel import VocabParallelEmbedding, VocabParallelHead, vocab_parallel_cross_entropy

__all__ = [
    "AttentionLayer",
    "AutoAttention",
    "ContextParallelAttention",
    "HybridAttention",
    "LocalAttention",
    "MegatronAttention",
    "MegatronMLP",
    "RingAttention",
    "RotaryEmbedding",
    "UlyssesAttention",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "clip_grad_norm_",
    "sync_gradients",
    "token_loss",
    "vocab_parallel_cross_entropy",
]
