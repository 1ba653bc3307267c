"""seqpar: long-context, sequence-parallel attention for PyTorch."""

from typing import TYPE_CHECKING

from . import mixers
from .comm.trace import Trace, trace
from .decoding import KeyValueCache
from .factory import ParallelAttention
from .functional import (
    attention,
    context_parallel_attention,
    hybrid_attention,
    mask_planner,
    replay,
    ring_attention,
    ulysses_attention,
)
from .kernels import backends
from .layers import (
    AttentionLayer,
    AutoAttention,
    ContextParallelAttention,
    HybridAttention,
    LocalAttention,
    RingAttention,
    RotaryEmbedding,
    UlyssesAttention,
    average_in_backward,
    clip_grad_norm_,
    sync_gradients,
    token_loss,
)
from .masks.mask import Mask
from .masks.rules import tree_positions
from .placement.layout import Assigned
from .ranks.mesh import init_mesh
from .scaled_dot_product import replace_sdpa, sdpa, varlen_attn
from .sharding.functions import positions, shard, unshard
from .sharding.sharding import Sharding
from .shifting import shift
from .strategies.checkpointing import keep_attention
from .verification import ReplayReport, VerificationError, replay_report, verify

if TYPE_CHECKING:
    from .layers.exact import invariant_layers
    from .megatron import (
        MegatronAttention,
        MegatronMLP,
        VocabParallelEmbedding,
        VocabParallelHead,
        vocab_parallel_cross_entropy,
    )
    from .memory import Memory, tiled_loss
    from .planner import Hardware, ModelShape, Plan, plan

__version__ = "0.1.0"

# Rooms that are opened at first use, and the names in them.
_ROOMS = {
    "layers.exact": ("invariant_layers",),
    "megatron": (
        "MegatronAttention",
        "MegatronMLP",
        "VocabParallelEmbedding",
        "VocabParallelHead",
        "vocab_parallel_cross_entropy",
    ),
    "memory": ("Memory", "tiled_loss"),
    "planner": ("Hardware", "ModelShape", "Plan", "plan"),
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in ("diffusers", "hf"):  # hf imports transformers
        return import_module(f".{name}", __name__)
    for room, names in _ROOMS.items():
        if name in names:
            module = import_module(f".{room}", __name__)
            globals().update({each: getattr(module, each) for each in names})
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Assigned",
    "AttentionLayer",
    "AutoAttention",
    "ContextParallelAttention",
    "Hardware",
    "HybridAttention",
    "KeyValueCache",
    "LocalAttention",
    "Mask",
    "MegatronAttention",
    "MegatronMLP",
    "Memory",
    "ModelShape",
    "ParallelAttention",
    "Plan",
    "ReplayReport",
    "RingAttention",
    "RotaryEmbedding",
    "Sharding",
    "Trace",
    "UlyssesAttention",
    "VerificationError",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "attention",
    "average_in_backward",
    "backends",
    "clip_grad_norm_",
    "context_parallel_attention",
    "hybrid_attention",
    "init_mesh",
    "invariant_layers",
    "keep_attention",
    "mask_planner",
    "mixers",
    "plan",
    "positions",
    "replace_sdpa",
    "replay",
    "replay_report",
    "ring_attention",
    "sdpa",
    "shard",
    "shift",
    "sync_gradients",
    "tiled_loss",
    "token_loss",
    "trace",
    "tree_positions",
    "ulysses_attention",
    "unshard",
    "varlen_attn",
    "verify",
    "vocab_parallel_cross_entropy",
]
