"""``Memory``, which says how the layers of a model are computed so that they need less memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from torch import nn

from ..base.checks import check_bool, check_choice, check_int, check_module
from ..patching.forwards import is_replaced, restore_forward
from .head_groups import group_heads
from .layers import Chain, checkpoint_layer
from .tiles import tile_mlp
from .weights import OWNER

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

    def apply(
        self,
        model: Model,
        layers: Iterable[nn.Module] | None = None,
        *,
        mlps: Iterable[nn.Module] | None = None,
        attentions: Iterable[nn.Module] | None = None,
    ) -> Model:
        """Change how ``model`` computes its layers, in place. ``seqpar.memory.restore`` undoes it.

        Names, weights and outputs do not change. A module that several layers share is changed once. Call it after LoRA
        adapters are added, and before DDP, FSDP or torch.compile.

        Args:
            model: the model. It is returned.
            layers: its layers. By default the elements of every ``nn.ModuleList`` that have an attention layer (a child
                named self_attn, attention, attn or self_attention), or the modules in them that have one.
            mlps: the modules that ``tiled_mlp`` tiles. Each token's result must depend on this token alone. By default
                the child of each layer that is named mlp, feed_forward, ffn, block_sparse_moe or moe.
            attentions: the attention layers that ``head_groups`` computes by groups of heads. By default the child of
                each layer that has one of the names above.

        Raises:
            TypeError: ``model``, or one of the other modules, is not a module.
            ValueError: no module with these names is found, a module is not in ``model``, an attention layer cannot be
                computed by groups of heads, or the model was changed already.
        """
        check_module("model", model)
        inside = set(model.modules())
        if any(is_replaced(m, OWNER) for m in inside):
            raise ValueError("model: its memory is managed already; call seqpar.memory.restore(model) first")
        layers = None if layers is None else list(layers)

        def chosen(
            argument: str, given: Iterable[nn.Module] | None, names: tuple[str, ...] = ()
        ) -> Iterable[nn.Module]:
            if given is None:
                given = layers_of(model) if layers is None else layers
                given = [_child(layer, argument, names) for layer in given] if names else given
            found = dict.fromkeys(given)
            if not found:
                raise ValueError(
                    f"{argument}: {type(model).__name__} has no nn.ModuleList of layers with a child named "
                    f"{', '.join(_ATTENTION_NAMES)}; pass the modules themselves: Memory(...).apply(model, "
                    f"{argument}=[...])"
                )
            for module in found:
                if not isinstance(module, nn.Module):
                    raise TypeError(f"{argument}: expected modules, got {type(module).__name__}")
                if module not in inside:
                    raise ValueError(f"{argument}: this {type(module).__name__} is not in the {type(model).__name__}")
            return found

        chain = Chain()
        try:
            for module in chosen("mlps", mlps, _MLP_NAMES) if self.tiled_mlp else ():
                tile_mlp(module, self.tiled_mlp)
            for module in chosen("attentions", attentions, _ATTENTION_NAMES) if self.head_groups > 1 else ():
                group_heads(module, self.head_groups)
            for module in chosen("layers", layers) if self.checkpoint != "none" else ():
                checkpoint_layer(module, self.checkpoint == "attention", self.offload, chain)
        except BaseException:
            restore(model)
            raise
        return model


def restore(model: Model) -> Model:
    """Undo ``Memory.apply``, in place.

    Raises:
        ValueError: something has replaced the forward of a changed module since.
    """
    restore_forward(OWNER, *model.modules())
    return model


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The elements of every ``nn.ModuleList`` that have an attention layer, or the modules in them that have one."""
    for modules in model.modules():
        for element in modules if isinstance(modules, nn.ModuleList) else ():
            yield from _with_attention(element)


def _with_attention(module: nn.Module) -> Iterator[nn.Module]:
    if any(isinstance(getattr(module, name, None), nn.Module) for name in _ATTENTION_NAMES):
        yield module
    elif not isinstance(module, nn.ModuleList):
        for child in module.children():
            yield from _with_attention(child)


def _child(layer: nn.Module, argument: str, names: tuple[str, ...]) -> nn.Module:
    child = next((child for name in names if isinstance(child := getattr(layer, name, None), nn.Module)), None)
    if child is None:
        children = ", ".join(name for name, _ in layer.named_children()) or "no children"
        raise ValueError(
            f"{argument}: {type(layer).__name__} has no child named {', '.join(names)}, but {children}; pass the "
            f"modules themselves: Memory(...).apply(model, {argument}=[...])"
        )
    return child
