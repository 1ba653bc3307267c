"""``parallelize`` and ``restore``: transformers models whose attention goes through its ``AttentionInterface``.

Nothing of a model's code changes. Its modules get a config (a copy) that names this attention, hooks see what comes
in and goes out of the model and of its output embedding, and the loss function is replaced by a token-weighted one.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from ..checks import check_choice, check_int
from ..kernels import BACKENDS
from ..layout import LAYOUTS
from ..mesh import rank_in, size_of
from ..strategies import resolve
from . import logits, rope, router
from .attend import attention_forward, no_mask
from .forward import after_forward, before_forward
from .loss import GRADIENTS, TokenLoss
from .refuse import attention_layers, check_model

NAME = "seqpar"
AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, no_mask)

Model = TypeVar("Model", bound=nn.Module)


@dataclass(eq=False)
class Patch:
    """How one model is parallelized, and what it takes to undo it. Its modules hold it as ``_seqpar``."""

    mesh: DeviceMesh | None
    given_group: ProcessGroup | None
    strategy: str
    layout: str
    backend: str
    options: dict[str, Any]
    group: ProcessGroup | None  # over which the sequence is sharded
    gradients: str
    loss_chunk: int | None
    handles: list[RemovableHandle] = field(default_factory=list)
    marked: list[nn.Module] = field(default_factory=list)
    configs: list[tuple[nn.Module, str, PreTrainedConfig]] = field(default_factory=list)
    copies: list[tuple[PreTrainedConfig, PreTrainedConfig, dict[str, Any]]] = field(default_factory=list)
    losses: list[tuple[nn.Module, Any]] = field(default_factory=list)

    @property
    def loss(self) -> TokenLoss:
        return TokenLoss(self)

    @property
    def ranks(self) -> int:
        return size_of(self.group)

    @property
    def rank(self) -> int:
        return rank_in(self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        return self  # a copy of the model works on the same groups, which cannot be copied

    def __getstate__(self) -> Any:
        raise TypeError(
            "model: it is parallelized, and process groups cannot be pickled; save its state_dict (save_pretrained "
            "does), or call seqpar.hf.restore(model) first"
        )


def parallelize(
    model: Model,
    mesh: DeviceMesh | None = None,
    strategy: str = "ring",
    layout: str = "zigzag",
    *,
    group: ProcessGroup | None = None,
    backend: str = "auto",
    gradients: str = "auto",
    loss_chunk: int | None = None,
    **options: Any,
) -> Model:
    """Let ``model`` attend over a sequence that is sharded over ranks. Changes it in place and returns it.

    Feed it what ``shard_batch`` gives: ``model(**local).loss`` is the one-device loss on every rank, and its backward
    this rank's share of the gradient (``seqpar.sync_gradients`` sums the shares). ``model.generate(input_ids)`` takes
    the whole prompt on every rank.

    Args:
        model: a transformers decoder or encoder, or a peft model around one, whose attention goes through
            ``AttentionInterface``. Each layer keeps its causality, sliding window, softcap, sinks, scale and dropout.
        mesh, group: the ranks the sequence is sharded over: a mesh as of ``seqpar.init_mesh``, or a ProcessGroup.
            With neither, the default group.
        strategy, layout, backend, options: as in ``seqpar.attention``.
        gradients: "share": backward gives this rank's share. "mean": the share times the number of sequence ranks,
            for wrappers that average over them. "auto": "mean" while the model runs inside DistributedDataParallel or
            ``fully_shard`` over a mesh with all of the sequence's ranks, else "share".
        loss_chunk: tokens whose logits exist at a time in the loss; by default as many as fit in 128 MiB.

    Raises:
        TypeError: not such a model, or an option of the wrong type. ValueError: a model that cannot be patched, with
            the layer named; a wrong name; a model that is parallelized already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: a transformers model is needed")
    check_choice("layout", layout, LAYOUTS)
    check_choice("backend", backend, ("auto", *BACKENDS))
    check_choice("gradients", gradients, GRADIENTS)
    if loss_chunk is not None:
        check_int("loss_chunk", loss_chunk, 1)
    sequence = resolve(strategy, mesh, group, options).sequence
    if any(hasattr(m, "_seqpar") for m in model.modules()):
        raise ValueError("model: it is parallelized already; call seqpar.hf.restore(model) first")
    tops = _outermost(model)
    if not tops:
        raise TypeError(f"model={type(model).__name__}: it holds no transformers model (PreTrainedModel)")
    layers = attention_layers(model)
    for top in tops:
        check_model(top, layers)
    patch = Patch(mesh, group, strategy, layout, backend, options, sequence, gradients, loss_chunk)
    _swap_configs(model, patch)
    for module in (*tops, *layers.values()):
        _mark(module, patch)
    for top in tops:
        _hook(top, patch)
    return model


def restore(model: Model) -> Model:
    """Undo ``parallelize``: the model computes what it did before. Changes it in place and returns it.

    What was set in its config meanwhile stays.

    Raises:
        ValueError: the model is not parallelized.
    """
    patch = patch_of(model)
    if not any(m is marked for m in model.modules() for marked in patch.marked):
        raise ValueError("model: this is a copy of a parallelized model; restore the original before copying it")
    for handle in patch.handles:
        handle.remove()
    for module, before in patch.losses:
        router.withdraw(module)
        if before is None:
            del module._loss_function
        else:
            module._loss_function = before
    for original, ours, at_first in patch.copies:
        for name, value in vars(ours).items():
            if name != "_attn_implementation_internal" and (name not in at_first or at_first[name] is not value):
                setattr(original, name, value)
    for module, name, original in patch.configs:
        setattr(module, name, original)
    for module in patch.marked:
        del module._seqpar
    return model


def patch_of(model: nn.Module) -> Patch:
    """The patch of a parallelized model, or of one around it (peft, DDP).

    Raises:
        ValueError: none of its modules is parallelized.
    """
    for module in model.modules():
        patch = getattr(module, "_seqpar", None)
        if isinstance(patch, Patch):
            return patch
    raise ValueError(
        f"model={type(model).__name__}: it is not parallelized; call seqpar.hf.parallelize(model, ...) first"
    )


def _outermost(model: nn.Module) -> list[PreTrainedModel]:
    """The transformers models that are in no other one."""
    if isinstance(model, PreTrainedModel):
        return [model]
    return [found for child in model.children() for found in _outermost(child)]


def _mark(module: nn.Module, patch: Patch) -> None:
    module._seqpar = patch  # type: ignore[assignment]
    patch.marked.append(module)


def _swap_configs(model: nn.Module, patch: Patch) -> None:
    """Copies of the configs that name this attention: another model may have been made from the same config."""
    held = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PreTrainedConfig)
    ]
    memo: dict[int, Any] = {}
    swapped: dict[int, PreTrainedConfig] = {}
    for module, name, original in held:
        if id(original) not in swapped:
            ours = swapped[id(original)] = copy.deepcopy(original, memo)
            ours._attn_implementation = NAME
            # Values are compared by identity later; those that deepcopy kept are the same objects here.
            patch.copies.append((original, ours, dict(vars(ours))))
        patch.configs.append((module, name, original))
        setattr(module, name, swapped[id(original)])


def _hook(top: PreTrainedModel, patch: Patch) -> None:
    patch.handles.append(top.register_forward_pre_hook(before_forward, with_kwargs=True))
    patch.handles.append(top.register_forward_hook(after_forward, prepend=True, with_kwargs=True, always_call=True))
    for module in top.modules():
        if rope.follows_length(module):
            patch.handles.append(module.register_forward_pre_hook(rope.before_rope, with_kwargs=True))
            patch.handles.append(module.register_forward_hook(rope.after_rope, with_kwargs=True))
        if isinstance(module, PreTrainedModel):
            patch.losses.append((module, vars(module).get("_loss_function")))
            module.loss_function = patch.loss
            router.install(module)
    head = top.get_output_embeddings()
    if isinstance(head, nn.Module):
        patch.handles.append(head.register_forward_pre_hook(logits.before_head))
        patch.handles.append(head.register_forward_hook(logits.after_head))
