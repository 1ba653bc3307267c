"""Megatron's tensor and sequence parallelism: attention, MLP, embedding and output head with sharded weights."""

from .tensor_parallel import MegatronAttention, MegatronMLP
from .vocab_parallel import VocabParallelEmbedding, VocabParallelHead, vocab_parallel_cross_entropy

__all__ = [
    "MegatronAttention",
    "MegatronMLP",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "vocab_parallel_cross_entropy",
]
