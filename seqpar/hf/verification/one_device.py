"""The states of a model and its process groups in which ``verify`` runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    eager_mask,
    packed_sequence_mask_function,
)

from ...comm.communicator import existing_communicators
from ...rendezvous import group_timeout
from ..latent import disable_latent_kv, enable_latent_kv, has_latent_kv
from ..loss import restore_loss_function
from ..state import Patch
from ..support import parameters_of

_FIND_DOCUMENTS = "find_packed_sequence_indices"


@contextmanager
def one_device(
    model: nn.Module, root: PreTrainedModel, patch: Patch, prepare: Callable[[dict[str, Any]], dict[str, Any]],
    documents: Tensor | None,
) -> Iterator[None]:  # fmt: skip
    """In the block, ``model`` runs as without ``parallelize``, with transformers' eager attention and masks.

    Args:
        model: ``root``, or a module that contains it.
        root: a parallelized model.
        patch: the model's ``Patch``.
        prepare: makes the arguments of the forward of ``root`` from the arguments of the call.
        documents: int ``[batch, seq]``, the index of each token's document, or None: only some models of transformers
            look for documents in ``position_ids``.
    """

    def before_forward(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return (), prepare({**dict(zip(parameters_of(root), args, strict=False)), **kwargs})

    with ExitStack() as stack:
        stack.enter_context(_without_hooks(patch.handles))
        stack.callback(root.register_forward_pre_hook(before_forward, with_kwargs=True).remove)
        for layer in filter(has_latent_kv, patch.modules):
            disable_latent_kv(layer)
            stack.callback(enable_latent_kv, layer)
        for module in patch.loss_functions:
            if (ours := restore_loss_function(module)) is not None:
                stack.callback(vars(module).__setitem__, "_loss_function", ours)
        # Where the layers' ``is_causal`` differs from the model's mask, SDPA and eager attention differ too.
        implementation = "sdpa" if patch.disputed and patch.implementation == "sdpa" else "eager"
        configs = {
            id(x): x for module in model.modules() for x in vars(module).values() if isinstance(x, PreTrainedConfig)
        }
        for config in configs.values():
            before = config._attn_implementation_internal
            stack.callback(setattr, config, "_attn_implementation_internal", before)
            config._attn_implementation_internal = implementation
        # transformers would find documents in ``position_ids`` in a way of its own.
        stack.callback(setattr, masking_utils, _FIND_DOCUMENTS, getattr(masking_utils, _FIND_DOCUMENTS))
        setattr(masking_utils, _FIND_DOCUMENTS, lambda position_ids: documents)
        if documents is not None:
            # An entry of this instance takes precedence over the entry of the class.
            ALL_MASK_ATTENTION_FUNCTIONS[implementation] = partial(_mask_of_documents, documents)
            stack.callback(ALL_MASK_ATTENTION_FUNCTIONS.__delitem__, implementation)
        yield


def _mask_of_documents(
    documents: Tensor, *args: Any, mask_function: Callable[..., Any] = causal_mask_function, **kwargs: Any
) -> Tensor:
    """transformers' eager mask, in which a token sees no token of another document."""
    kwargs["allow_is_bidirectional_skip"] = False
    same_document = packed_sequence_mask_function(documents.to(kwargs.get("device", "cpu")))
    mask: Tensor = eager_mask(*args, mask_function=and_masks(mask_function, same_document), **kwargs)
    return mask


@contextmanager
def _without_hooks(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """In the block, modules do not have the hooks of ``handles``. Afterwards they have them in the former order."""
    before = []
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            before.append((hooks, list(hooks.items())))
            del hooks[handle.id]
    try:
        yield
    finally:
        for hooks, items in reversed(before):
            hooks.clear()
            hooks.update(items)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """In the block, ``model`` is in evaluation mode and not compiled.

    Afterwards its gradients, buffers and modes, and the random number generators, are restored.
    """
    gradients = [(p, p.grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(m, name, b, None if b is None else b.detach().clone()) for m in model.modules()
               for name, b in m._buffers.items()]  # fmt: skip
    # Rotary embeddings of the type "dynamic" store the length of the longest sequence so far.
    lengths = [(m, vars(m)["max_seq_len_cached"]) for m in model.modules() if "max_seq_len_cached" in vars(m)]
    compiled = any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in model.modules())
    on_cuda = any(p.is_cuda for p in model.parameters())
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([torch.cuda.current_device()] if on_cuda else []))
            if compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            model.eval()
            yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        for module, mode in modes:
            module.training = mode
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                with torch.no_grad():
                    buffer.copy_(value)
        for module, length in lengths:
            module.max_seq_len_cached = length


@contextmanager
def deadline(group: ProcessGroup | None, seconds: float) -> Iterator[None]:
    """In the block, the timeout of collectives and messages between ranks is ``seconds``."""
    if group is None or dist.group.WORLD is None:
        yield
        return
    limit = timedelta(seconds=seconds)
    groups = list({id(g): g for g in (dist.group.WORLD, group, *existing_communicators())}.values())
    timeouts = {id(g): group_timeout(g) for g in groups}
    for g in groups:
        _set_timeout(g, limit)
    try:
        yield
    finally:
        # A communicator that was created inside the block gets the timeout of ``group``.
        for g in (*groups, *existing_communicators()):
            _set_timeout(g, timeouts.get(id(g), timeouts[id(group)]))


def _set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        if hasattr(backend, "_set_default_timeout"):
            backend._set_default_timeout(timeout)
        if hasattr(backend, "options") and hasattr(backend.options, "_timeout"):
            backend.options._timeout = timeout
