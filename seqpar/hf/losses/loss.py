"""The loss of a sharded sequence, and the loss of its routers.

A loss has its one-device value on every rank. The mean of the ranks' gradients is the one-device gradient.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from ...base.checks import no_compile
from ...comm.collectives import all_gather, run, sum_shards
from ...layers.loss import AllReduced, SummedGradients, exact_sum
from ...patching.replaced import replaced_in
from ...ranks.mesh import size_of
from ..batch import IGNORE_INDEX, BatchShard
from ..inspection.support import default_loss
from ..state import Forward, Patch, forwards
from .logits import LazyLogits, label_log_probs, summed_cross_entropy

OfSum = Callable[[Tensor], Tensor]  # what is computed of a sum over the ranks

WHOLE = "_seqpar_whole"  # an attribute of logits of all tokens, in the outputs of a model
_ROUTER_LOSS = "load_balancing_loss_func"
_FUSED_ROUTER = "transformers.models.mixtral.modeling_mixtral"  # TRL calls the router loss of this file for all models


class TokenLoss:
    """The loss function of a parallelized model: cross-entropy over the tokens of the full sequence.

    Unlike transformers' loss functions it does not shift the labels, because ``shard_batch`` has shifted them. A
    ``user_loss``, set by ``model.loss_function = ...``, is called instead on every rank, with the logits and the
    unshifted labels of the full sequence.

    Outside of a forward, logits of all tokens that the model has returned are given to transformers' own function, or
    to ``user_loss``.
    """

    def __init__(self, patch: Patch, model: nn.Module, user_loss: Callable[..., Tensor] | None = None) -> None:
        self.patch = patch
        self.model = model
        self.user_loss = user_loss

    @no_compile
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        default = default_loss(self.model)
        named = {**dict(zip(("logits", "labels"), args, strict=False)), **kwargs}
        if forwards.now is None and kwargs.get("seqpar") is None and hasattr(named.get("logits"), WHOLE):
            return (self.user_loss or default)(*args, **kwargs)
        if self.user_loss is None or self.user_loss is default:
            named = inspect.signature(default).bind_partial(*args).arguments
            return self._cross_entropy(**named, **kwargs)
        return self._call_user_loss(self.user_loss, *args, **kwargs)

    def _call_user_loss(
        self, user_loss: Callable[..., Tensor], *args: Any, seqpar: BatchShard | None = None, **kwargs: Any
    ) -> Tensor:
        """``user_loss`` of the logits and labels of the full sequence.

        Each of P ranks computes the loss L and adds L / P to the sum over the ranks.
        """
        forward = forwards.now
        shard = seqpar or (None if forward is None else forward.batch_shard)
        if shard is None or shard.in_place is None:
            raise ValueError(
                f"model.loss_function={user_loss}: a loss function of your own gets the unshifted labels; call the "
                "model with the full batch and 'labels', without shift_labels and without share_prompts"
            )
        named = {**dict(zip(("logits", "labels"), args, strict=False)), **kwargs}
        logits = named["logits"]
        logits = logits.materialize() if isinstance(logits, LazyLogits) else logits
        if logits.dim() != 3:
            raise ValueError(
                f"logits: shape {tuple(logits.shape)}; expected [batch, seq, vocabulary] for loss_function"
            )
        full = {
            "logits": all_gather_tokens(logits, shard.positions, self.patch),
            "labels": all_gather_tokens(shard.in_place[0].to(logits.device), shard.positions, self.patch),
        }
        positional = [full.pop(name) for name, _ in zip(tuple(full), args, strict=False)]
        loss = user_loss(*positional, *args[2:], **{**kwargs, **full})
        return reduce_over_ranks(loss / self.patch.ranks, self.patch, self.model)

    def _cross_entropy(
        self,
        logits: Tensor | LazyLogits,  # [..., vocabulary], of this rank's tokens
        labels: Tensor,  # int64 [...], shifted
        *,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        seqpar: BatchShard | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The cross-entropy summed over all ranks' tokens, divided by ``num_items_in_batch``: float32, on every rank.

        Without ``num_items_in_batch``, it is the mean over all labels that count, also over the labels of replicas
        along dp. Outside of the model's forward, as in a pipeline, ``seqpar`` must be given.
        """
        if ignore_index != IGNORE_INDEX:
            raise ValueError(
                f"ignore_index={ignore_index}: the labels that do not count are {IGNORE_INDEX} here, because they were "
                f"counted before; pass labels.masked_fill(labels == {ignore_index}, {IGNORE_INDEX}) instead"
            )
        if (forward := forwards.now) is not None and forward.targets is not None:
            # The caller asked for log-probabilities instead of a loss.
            return torch.zeros((), dtype=torch.float32, device=labels.device)
        labels = labels if shift_labels is None else shift_labels
        shard = seqpar or (None if forward is None else forward.batch_shard)
        if shard is None or (shard.num_items is None and num_items_in_batch is None):
            raise ValueError(
                "labels: they were not sharded by seqpar.hf.shard_batch; give it the full batch with 'labels'. Outside "
                "of a forward of the model, pass the logits as model(**batch) returns them for a full batch without "
                "labels, or seqpar as shard_batch returned it"
            )
        if forward is not None and forward.local_labels is not None:
            _check_labels(labels, forward.local_labels, forward)
        full_tokens = labels.numel() // max(labels.shape[-1], 1) * shard.seq_len
        few_count = shard.num_items is None or shard.num_items < full_tokens / 2
        in_rows, labels = labels, labels.reshape(-1)  # [tokens]
        if shard.weights is not None:
            log_probs = label_log_probs(logits, in_rows, self.patch.settings.loss_chunk)
            total = exact_sum(-(log_probs * shard.weights.to(log_probs.device)))  # [parts]
        elif isinstance(logits, LazyLogits) and logits.full is None:
            total = summed_cross_entropy(logits, labels, self.patch.settings.loss_chunk, few_count)
        else:
            flat = logits.reshape(len(labels), -1).float()  # [tokens, vocabulary]
            total = exact_sum(F.cross_entropy(flat, labels, ignore_index=IGNORE_INDEX, reduction="none"))
        patch, items = self.patch, shard.num_items if num_items_in_batch is None else num_items_in_batch
        by_replica = num_items_in_batch is None and patch.settings.batches != "per_rank"
        if not by_replica or size_of(patch.loss_ranks) == patch.ranks:
            return _note(_sum_over_ranks(total, patch, lambda parts: _divide(parts.sum(), items).float()), self.model)
        # The ranks of a sequence count the same labels, and the replicas along dp others.
        assert shard.num_items is not None
        sums = torch.cat([total, total.new_tensor([shard.num_items / patch.ranks])])
        mean = _sum_over(sums, patch.loss_ranks, patch, lambda sums: _divide(sums[:-1].sum(), sums[-1]).float())
        return _note(mean, self.model)


def _divide(total: Tensor, num_items: Any) -> Tensor:
    """``total / num_items``. If no label counts, it is NaN and all gradients are 0, as on one device."""
    if not isinstance(num_items, Tensor) and num_items != 0:
        quotient: Tensor = total / num_items
        return quotient
    divisor = num_items.to(total.device) if isinstance(num_items, Tensor) else total.new_zeros(())
    # The gradient of a division by 0 would multiply the gradients, which are 0, by infinity.
    return torch.where(divisor == 0, total.detach() / divisor, total / torch.where(divisor == 0, 1, divisor))


def replace_loss_function(module: Any, patch: Patch, model: nn.Module) -> None:
    """Replace the loss function of ``module``, which is ``model`` or a transformers model in it, by a ``TokenLoss``.

    The ``TokenLoss`` hides a loss function that is registered as a submodule and keeps its parameters.
    """
    user_loss = getattr(module, "_loss_function", None)
    if not isinstance(user_loss, TokenLoss):
        vars(module)["_loss_function"] = TokenLoss(patch, model, user_loss)


def restore_loss_function(module: nn.Module) -> TokenLoss | None:
    """Undo ``replace_loss_function``. Returns the ``TokenLoss``, or None if the user has replaced it."""
    ours = vars(module).get("_loss_function")
    if not isinstance(ours, TokenLoss):
        return None
    del vars(module)["_loss_function"]
    if ours.user_loss is not None and "_loss_function" not in module._modules:
        vars(module)["_loss_function"] = ours.user_loss
    return ours


def _check_labels(labels: Tensor, original: Tensor, forward: Forward) -> None:
    changed = version_of(original) != forward.labels_version
    if not changed and labels is not original:
        changed = labels.shape != original.shape or not torch.equal(labels.to(original.device), original)
    if changed:
        raise ValueError(
            f"labels: the forward of {type(forward.model).__name__} calls its loss function with other labels than it "
            "was given (shifted, or some of them masked), but it holds the labels of one rank's tokens only, which are "
            "shifted already; change the labels before you call the model, or call it without labels and compute the "
            "loss from model(**batch).logits"
        )


def version_of(x: Tensor) -> int:
    """How often ``x`` was changed in place. Tensors of ``torch.inference_mode`` do not count that."""
    return 0 if x.is_inference() else x._version


class ReducedLoss(Tensor):
    """A loss that was reduced over the ranks, in the forward that computes it: the loss of ``TokenLoss``, the router's.

    Whatever is computed from such losses, numbers and the model's buffers is a ``ReducedLoss`` too, with and without
    gradients.
    """

    changed = False  # whether a function has changed it in place with another tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        if not isinstance(result, Tensor):
            return result
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        buffers = {id(x) for x in forward.model.buffers()} if (forward := forwards.now) is not None else set()
        reduced = all(is_reduced(x) or id(x) in buffers for x in tensors)
        if isinstance(result, ReducedLoss):
            result.changed |= not reduced
            return result
        return result.as_subclass(ReducedLoss) if reduced else result


# Dynamo then calls the function above, instead of tracing it.
torch._dynamo.config.nontraceable_tensor_subclasses.add(ReducedLoss)


def is_reduced(x: Any) -> bool:
    return isinstance(x, ReducedLoss) and not x.changed


def plain(x: Any) -> Any:
    """``x``, without its class if it is a ``ReducedLoss``."""
    return x.as_subclass(Tensor) if isinstance(x, ReducedLoss) else x


def check_loss(loss: Any, forward: Forward) -> None:
    """Raise an error if ``loss``, which the model's forward has returned, was not reduced over the ranks."""
    if is_reduced(loss):
        return
    name = type(forward.model).__name__
    raise ValueError(
        f"loss: the forward of {name} returned a loss of its own, or added a term to the loss of self.loss_function, "
        "or multiplied it by a tensor that is no buffer. It computes them from the tokens of one rank, so that neither "
        "the loss nor the gradients are one device's. Set model.loss_function = f instead: f(logits, labels, "
        f"vocab_size, **kwargs) gets the full logits and the unshifted labels. Or let {name} return no loss, and "
        "compute it from the outputs of model(**batch) without labels, which are full on every rank"
    )


def reduce_over_ranks(local_loss: Tensor, patch: Patch, model: nn.Module) -> Tensor:
    """The sum of ``local_loss`` over the ranks of the sequence."""
    return _note(_sum_over_ranks(local_loss, patch), model)


def _sum_over_ranks(local_loss: Tensor, patch: Patch, then: OfSum = lambda x: x) -> Tensor:
    # With batches="per_rank", the all-to-all of the outputs sums the parts of the loss.
    if patch.settings.batches == "per_rank":
        return then(local_loss)
    return _sum_over(local_loss, patch.sequence_group, patch, then)


def _sum_over(x: Tensor, group: ProcessGroup | None, patch: Patch, then: OfSum) -> Tensor:
    """``then`` of the sum of the ranks' ``x``. Backward sums the gradients of the result."""
    if size_of(group) == 1:
        return then(x)
    divisor = size_of(group) if patch.settings.gradients == "sum" else 1
    result: Tensor = SummedGradients.apply(then(AllReduced.apply(x, group)), group, divisor)
    return result


def _note(loss: Tensor, model: nn.Module) -> Tensor:
    """``loss``, of which ``check_loss`` knows that it was reduced, if a forward of ``model`` is running."""
    forward = forwards.now
    return loss.as_subclass(ReducedLoss) if forward is not None and forward.model is model else loss


def all_gather_tokens(x: Tensor, places: tuple[Tensor, ...], patch: Patch) -> Tensor:
    """``x [batch, seq_local, ...]`` of all ranks, as ``[batch, seq, ...]``, in which rank r's tokens are ``places[r]``.

    Backward reduce-scatters the gradient, because every rank computes from the result.
    """
    if patch.ranks == 1:
        return x
    assert patch.sequence_group is not None
    full: Tensor = _AllGatherTokens.apply(x, places, patch.rank, patch.sequence_group)
    return full


class _AllGatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: tuple[Tensor, ...], rank: int, group: ProcessGroup) -> Tensor:
        ctx.places, ctx.group = places, group
        holders = [r for r, p in enumerate(places) if len(p)]
        if len(holders) == 1:  # the logits of the last token
            source = holders[0]
            shape = len(x), len(places[source]), *x.shape[2:]
            full = x.clone(memory_format=torch.contiguous_format) if rank == source else x.new_empty(shape)
            run(dist.broadcast, full, group=group, group_src=source)
            return full
        gathered = all_gather(x, [len(p) for p in places], 1, group)  # [batch, seq, ...], by rank
        return gathered.index_select(1, torch.cat(places).argsort().to(x.device))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        shards = [grad.index_select(1, p.to(grad.device)) for p in ctx.places]
        return sum_shards(shards, 1, ctx.group), None, None, None


# transformers' ``load_balancing_loss_func``, the loss of the routers in mixture-of-experts models, multiplies two means
# over tokens, which must be taken over the tokens of all ranks. Each model file has the function as a global name. The
# name is bound to a replacement, which calls the original function except during a forward on a sharded sequence.
def replace_router_loss(model: nn.Module, undo: ExitStack) -> None:
    """Replace the router loss in the Python modules that define the classes of ``model``, until ``undo`` is closed."""
    names = {cls.__module__ for cls in type(model).__mro__}
    names.add(inspect.unwrap(cast(Any, model).forward).__module__)  # Liger replaces the forward of the instance
    if hasattr(cast(Any, model.config).get_text_config(), "router_aux_loss_coef"):
        names.add(import_module(_FUSED_ROUTER).__name__)
    for name in names:
        if hasattr(module := sys.modules.get(name), _ROUTER_LOSS):
            undo.enter_context(replaced_in(module, _ROUTER_LOSS, _sharded_router_loss))


def _sharded_router_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_balancing_loss(
        gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Tensor | None = None
    ) -> Any:
        forward = forwards.now
        shard = None if forward is None else forward.batch_shard
        if forward is None or shard is None or not isinstance(gate_logits, tuple) or num_experts is None:
            return original(gate_logits, num_experts, top_k, attention_mask)
        counts, probability, tokens = _router_sums(gate_logits, num_experts, top_k, shard.valid)
        patch = forward.patch
        sums = torch.cat([counts, tokens])  # [num_experts + 1]
        if patch.sequence_group is not None and patch.ranks > 1:
            run(dist.all_reduce, sums, group=patch.sequence_group)
        counts, tokens = sums[:-1], sums[-1]  # now summed over all ranks
        # The loss is linear in the probabilities. The part of it with this rank's probabilities therefore has this
        # rank's partial gradient, and the parts of all ranks sum to the loss.
        local_loss = (counts / tokens * (probability / tokens)).sum() * num_experts
        return _note(_sum_over_ranks(local_loss, patch), forward.model)

    return load_balancing_loss


def join_tiles(router_logits: tuple[Tensor, ...], tokens: int) -> tuple[Tensor, ...]:
    """The logits ``[tokens, experts]`` of each layer, from the logits of each layer's tiles (``Memory.tiled_mlp``)."""
    if all(len(x) == tokens for x in router_logits):
        return router_logits
    joined = torch.cat([x.to(router_logits[0].device) for x in router_logits])
    return tuple(torch.split(joined, tokens))


def _router_sums(
    gate_logits: tuple[Tensor, ...],  # of each layer or tile, [tokens, num_experts]
    num_experts: int,
    top_k: int,
    valid: Tensor | None,  # bool [batch, seq_local], False for padding, which does not count
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over this rank's tokens and all layers, in float32.

    How often each expert is chosen, [num_experts]; each expert's probabilities, [num_experts]; the tokens, [1].
    """
    device = gate_logits[0].device
    counts, probability = (torch.zeros(num_experts, dtype=torch.float32, device=device) for _ in range(2))
    tokens = torch.zeros(1, dtype=torch.float32, device=device)
    for gate in gate_logits if valid is None else join_tiles(gate_logits, valid.numel()):
        p = torch.softmax(gate.to(device), dim=-1)  # [tokens, num_experts]
        weight = torch.ones(len(p), device=device, dtype=torch.float32)
        if valid is not None:
            weight = valid.reshape(-1).to(weight)
        experts = p.detach().topk(top_k, dim=-1).indices  # [tokens, top_k]
        counts = counts.index_add(0, experts.reshape(-1), weight.repeat_interleave(top_k))
        probability = probability + (p.float() * weight[:, None]).sum(0)
        tokens = tokens + weight.sum()
    return counts, probability, tokens
