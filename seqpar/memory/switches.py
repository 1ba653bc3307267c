"""``Memory``, which says how the layers of a model are computed so that they need less memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from torch import nn

from ..base.checks import check_bool, check_choice, check_int, check_module
from .head_groups import group_heads
from .layers import Chain, checkpoint_layer
from .tiles import tile_mlp
from .weights import is_replaced, restore_forward

Checkpoint = Literal["none", "attention", "full"]
Model = TypeVar("Model", bound=nn.Module)

_MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe")
_ATTENTION_NAMES = ("self_attn", "attention", "attn", "self_attention")


@dataclass(frozen=True)
class Memory:
    """How the layers of a model are computed so that they need less memory. Outputs and gradients stay exact.

    Give it to ``seqpar.hf.parallelize`` or ``seqpar.hf.ParallelismConfig``, or call ``apply`` before you wrap a model
    in DDP or FSDP. Use ``fully_shard`` for whole layers, so that weights are all-gathered once a layer and pass.

    Attributes:
        tiled_mlp: compute each MLP for at most so many tokens at a time, and recompute each tile in backward. A mixture
            of experts is tiled too. 0: all tokens at once. 32,768 is large enough for efficient kernels.
        head_groups: compute each attention layer, with its projections, for so many groups of heads one after another,
            and recompute each group in backward. It divides the number of KV heads. This is UPipe (Untied Ulysses,
            arXiv 2602.21196).
        checkpoint: what backward recomputes: nothing ("none"), each layer but its attention ("attention"), or each
            layer ("full"). The layer's input is kept, and with "attention" also the output and the log-sum-exp of
            ``seqpar.attention`` (see ``seqpar.keep_attention``).
        offload: copy what ``checkpoint`` keeps to pinned host memory until backward, on a CUDA stream of its own.
            Tensors on the CPU are in host memory already, and are not copied. Each copy takes a power of two of bytes.

    Examples:
        >>> Memory(tiled_mlp=32_768, checkpoint="attention", offload=True)
        Memory(tiled_mlp=32768, head_groups=1, checkpoint='attention', offload=True)
    """

    tiled_mlp: int = 0
    head_groups: int = 1
    checkpoint: Checkpoint = "none"
    offload: bool = False

    def __post_init__(self) -> None:
        check_int("tiled_mlp", self.tiled_mlp, 0)
        check_int("head_groups", self.head_groups, 1)
        check_choice("checkpoint", self.checkpoint, get_args(Checkpoint))
        check_bool("offload", self.offload)
        if self.offload and self.checkpoint == "none":
            raise ValueError(
                "offload=True: without checkpointing a layer keeps more than can be copied while it is computed; set "
                "checkpoint='attention' or 'full'"
            )

    def apply(self, model: Model, layers: Iterable[nn.Module] | None = None) -> Model:
        """Change how ``model`` computes its layers, in place. ``seqpar.memory.restore`` undoes it.

        Names, weights and outputs do not change. Call it after LoRA adapters are added, and before DDP, FSDP or
        torch.compile.

        Args:
            model: the model. It is returned.
            layers: its layers. By default the elements of every ``nn.ModuleList`` that have an attention layer (a child
                named self_attn, attention, attn or self_attention).

        Raises:
            TypeError: ``model`` is not a module.
            ValueError: no layers are found, a layer has no MLP or no attention that can be computed in this way, or the
                model was changed already.
        """
        check_module("model", model)
        if any(is_replaced(m) for m in model.modules()):
            raise ValueError("model: its memory is managed already; call seqpar.memory.restore(model) first")
        found = list(layers_of(model) if layers is None else layers)
        if not found:
            raise ValueError(
                f"model: {type(model).__name__} has no nn.ModuleList of layers with an attention layer; pass layers="
            )
        chain = Chain()
        try:
            for layer in found:
                if self.tiled_mlp:
                    tile_mlp(_child(layer, "tiled_mlp", _MLP_NAMES), self.tiled_mlp)
                if self.head_groups > 1:
                    group_heads(_child(layer, "head_groups", _ATTENTION_NAMES), self.head_groups)
                if self.checkpoint != "none":
                    checkpoint_layer(layer, self.checkpoint == "attention", self.offload, chain)
        except BaseException:
            restore(model)
            raise
        return model


def restore(model: Model) -> Model:
    """Undo ``Memory.apply``, in place."""
    for module in model.modules():
        restore_forward(module)
    return model


def layers_of(model: nn.Module) -> Iterable[nn.Module]:
    """The elements of every ``nn.ModuleList`` that have an attention layer."""
    for modules in model.modules():
        if isinstance(modules, nn.ModuleList):
            yield from (m for m in modules if any(hasattr(m, name) for name in _ATTENTION_NAMES))


def _child(layer: nn.Module, switch: str, names: tuple[str, ...]) -> nn.Module:
    child = next((child for name in names if isinstance(child := getattr(layer, name, None), nn.Module)), None)
    if child is None:
        raise ValueError(f"{switch}: {type(layer).__name__} has no child named {', '.join(names)}")
    return child
