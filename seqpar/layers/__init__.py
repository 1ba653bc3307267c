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
from .tensor_parallel import MegatronAttention, MegatronMLP, SequenceParallelNorm
from .vocab_parallel import VocabParallelEmbedding, VocabParallelHead, vocab_parallel_cross_entropy

__all__ = [
    "AttentionLayer",
    "ContextParallelAttention",
    "HybridAttention",
    "LocalAttention",
    "MegatronAttention",
    "MegatronMLP",
    "RingAttention",
    "RotaryEmbedding",
    "SequenceParallelNorm",
    "UlyssesAttention",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "sync_gradients",
    "vocab_parallel_cross_entropy",
]
