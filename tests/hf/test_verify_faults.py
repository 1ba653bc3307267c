"""``verify`` finds each of several planted faults, and reports where it is and the probable cause."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")

from transformers.modeling_outputs import CausalLMOutputWithPast

import seqpar
import seqpar.hf
from seqpar.hf import VerificationReport
from seqpar.hf import batch as hf_batch
from seqpar.hf.calls import attention as hf_attention
from seqpar.hf.losses import loss as hf_loss
from seqpar.hf.losses.loss import TokenLoss
from seqpar.hf.state import forwards
from seqpar.masks.mask import Mask
from seqpar.strategies.attend import attend

from ..pool import Pool, on_ranks
from .test_multimodal import make_batch as with_images
from .test_multimodal import tiny as tiny_wrapper
from .workers import make_batch, parallel, report_on, shard_function, tiny

pytestmark = pytest.mark.slow
LAYER = "model.layers.{}.self_attn"


class Stale(torch.autograd.Function):
    """Attention whose backward uses the keys of the next token."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.call = call
        return call(q, k, v)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            out = ctx.call(q, k.roll(1, 1), v)
        return (*torch.autograd.grad(out, (q, k, v), gradient), None)


def stale_attention(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> Any:
    return (Stale.apply(q, k, v, lambda *x: attend(*x, *arguments, **options)[0]),)


def replaced(name: str, value: Any, model: Any, batch: Any = "plain") -> VerificationReport:
    """The report while the attention of ``seqpar.hf`` uses ``value`` as its function ``name``."""
    with mock.patch.object(hf_attention, name, value):
        return report_on(model, batch)


def hooked(model: Any, name: str, hook: Any, batch: Any = "plain") -> VerificationReport:
    """The report on a model in which a module has a hook before its forward."""
    model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    return report_on(model, batch)


def changed_output(model: Any, name: str, change: Any) -> VerificationReport:
    """The report on a model in which the output of a module is changed."""
    model.get_submodule(name).register_forward_hook(lambda module, args, output: change(output))
    return report_on(model)


def sum_of_all(model: Any, group: ProcessGroup) -> None:
    """Sum the gradients of all parameters over the ranks, whatever they are."""
    for p in model.parameters():
        if p.grad is not None:
            torch.distributed.all_reduce(p.grad, group=group)


def shifted_labels(group: ProcessGroup) -> VerificationReport:
    shift = shard_function(group, labels=lambda x: F.pad(x, (0, 1), value=-100)[:, 1:])
    return report_on(parallel(group), shard=shift)


def labels_shifted_twice(group: ProcessGroup) -> VerificationReport:
    def twice(batch: Any) -> dict[str, Any]:
        labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        return seqpar.hf.shard_batch({**batch, "labels": labels}, group=group)

    return report_on(parallel(group), shard=twice)


def wrong_layout(group: ProcessGroup) -> VerificationReport:
    def contiguous(batch: Any) -> dict[str, Any]:
        local = seqpar.hf.shard_batch(batch, group=group, layout="contiguous")
        local["seqpar"].tokens = replace(local["seqpar"].tokens, layout="zigzag")
        return local

    return report_on(parallel(group), make_batch("plain", 48), shard=contiguous)


def one_document(group: ProcessGroup) -> VerificationReport:
    def drop(shard: Any) -> Any:
        shard.mask = Mask.full()
        return shard

    return report_on(parallel(group), "packed", shard=shard_function(group, seqpar=drop))


def ignored_in_ddp(group: ProcessGroup) -> VerificationReport:
    model = parallel(group)
    model._ddp_params_and_buffers_to_ignore = ["model.layers.1.mlp.up_proj.weight"]
    return report_on(DistributedDataParallel(model, process_group=group), ignore=[])


def wrong_rotation(group: ProcessGroup) -> VerificationReport:
    def count(module: Any, args: Any, kwargs: Any) -> Any:
        ids = kwargs["position_ids"]
        return args, {**kwargs, "position_ids": ids - ids.amin() if forwards.now else ids}

    return hooked(parallel(group), "model.rotary_emb", count)


def unpatched_layer(group: ProcessGroup) -> VerificationReport:
    model = parallel(group)
    layer = model.model.layers[1].self_attn
    layer.config = copy.deepcopy(layer.config)
    layer.config._attn_implementation = "eager"
    return report_on(model)


def other_implementation(group: ProcessGroup) -> VerificationReport:
    model = parallel(group)
    model.set_attn_implementation("sdpa")
    return report_on(model)


def other_layer(group: ProcessGroup) -> VerificationReport:
    model = parallel(group)
    if group.rank() == 1:
        model.model.layers[0].self_attn.scaling = 1.0
    return report_on(model)


def other_weights(group: ProcessGroup) -> VerificationReport:
    model = parallel(group)
    with torch.no_grad():
        model.model.norm.weight.mul_(1 + 0.01 * group.rank())
    return report_on(model)


def rotated_latents(group: ProcessGroup) -> VerificationReport:
    def rotated(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> Any:
        return attend(q, k, v.roll(1, 1), *arguments, **options)  # v: the rotated keys

    return replaced("attend", rotated, parallel(group, "deepseek_v3"))


def merging(group: ProcessGroup, kind: str) -> Any:
    return seqpar.hf.parallelize(tiny_wrapper(kind), group=group)


def in_text_model(group: ProcessGroup, **changes: Any) -> VerificationReport:
    """The report on a model with images whose text model receives other arguments."""

    def change(module: Any, args: Any, kwargs: Any) -> Any:
        changed = {name: f(kwargs[name]) for name, f in changes.items()}
        return None if forwards.now is None else (args, {**kwargs, **changed})  # None: one device

    return hooked(merging(group, "qwen3_vl"), "model.language_model", change, with_images("qwen3_vl", "images"))


def tower_not_summed(group: ProcessGroup) -> VerificationReport:
    def sync(model: Any) -> None:
        seqpar.sync_gradients(model.model.language_model, group=group)

    return report_on(merging(group, "gemma3"), with_images("gemma3", "images"), sync=sync)


def loss_of_its_own(group: ProcessGroup) -> VerificationReport:
    """On one device, the model's loss is another one than the loss of this package."""
    model = tiny("llama")
    loss = model.loss_function

    class Forgetful(TokenLoss):
        user_loss = property(lambda self: None if forwards.now else lambda *x, **kwargs: 3 * loss(*x, **kwargs))

        def __init__(self, patch: Any, model: Any, user_loss: Any = None) -> None:
            self.patch, self.model = patch, model

    with mock.patch.object(hf_loss, "TokenLoss", Forgetful):
        return report_on(seqpar.hf.parallelize(model, group=group))


def replaced_forward(group: ProcessGroup) -> VerificationReport:
    """As Liger-Kernel's: the forward shifts the labels and computes the loss of this rank's tokens itself."""

    def forward(self: Any, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids, position_ids=position_ids, **kwargs).last_hidden_state)
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    model = parallel(group)
    model.forward = MethodType(forward, model)
    return report_on(model)


def additional_term(group: ProcessGroup) -> VerificationReport:
    """A term that each rank computes from its own tokens is added to the loss."""
    model = parallel(group)
    hidden: list[Tensor] = []
    model.model.norm.register_forward_hook(lambda module, args, output: hidden.append(output))

    def add(module: Any, args: Any, output: Any) -> Any:
        term = hidden.pop()[..., 0].square().mean()
        return output if output.loss is None else type(output)(**{**output, "loss": output.loss + term})

    model.register_forward_hook(add)
    return report_on(model)


def no_gradient(group: ProcessGroup) -> VerificationReport:
    """No label counts: on one device the gradients are zeros."""
    batch = make_batch("plain")
    batch["labels"] = torch.full_like(batch["labels"], -100)

    def sync(model: Any) -> None:
        for p in model.parameters():
            p.grad = torch.full_like(p, torch.nan)

    return report_on(parallel(group), batch, sync=sync)


def jumps_as_documents(group: ProcessGroup) -> VerificationReport:
    """Position ids that jump by more than 1 do not start a document."""

    def documents(ids: Tensor, ranges: Any) -> Any:
        return [(0, *((row.diff() != 1).nonzero().flatten() + 1).tolist(), len(row)) for row in ids]

    batch = make_batch("plain")
    batch["position_ids"] = (torch.arange(45) + 3 * (torch.arange(45) > 20)).expand(2, -1)
    with mock.patch.object(hf_batch, "documents_from_positions", documents):
        return report_on(parallel(group), batch)


class ValueHead(nn.Module):
    """A model and a head, whose loss is computed from the model's whole outputs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.lm, self.head = model, nn.Linear(32, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.lm(input_ids=input_ids, output_hidden_states=True).hidden_states[-1]
        value: Tensor = self.head(hidden)[..., 0]
        return (value - (labels > 30).float()).square().mean()


def value_head(group: ProcessGroup) -> VerificationReport:
    return report_on(ValueHead(parallel(group)), sync=lambda model: sum_of_all(model, group))


LAYER_OF_TEXT = "model.language_model.layers.{}.self_attn"
UP_PROJ = "module.model.layers.1.mlp.up_proj.weight"
# For each fault: a function that returns the report on a model with this fault, the kind, the layer and the quantity of
# the first difference, and words of the report.
Fault = tuple[Callable[[ProcessGroup], VerificationReport], tuple[str, str, str], str]
FAULTS: dict[str, Fault] = {
    "shifted labels": (shifted_labels, ("input", "", "labels"), "they are"),
    "labels shifted twice": (labels_shifted_twice, ("input", "", "labels"), "shifted twice"),
    "wrong layout": (
        wrong_layout, ("input", "", "input_ids"), "layout 'contiguous', but the model has layout='zigzag'"
    ),
    "ignored window": (
        lambda group: replaced("window_and_chunk", lambda *x: (None, None), parallel(group, "gemma2")),
        ("forward", LAYER.format(0), "attention"), "the attention without its sliding window of 7",
    ),
    "tokens see the future": (
        lambda group: replaced("layer_mask_of", lambda *x: (False, None, None), parallel(group)),
        ("forward", LAYER.format(0), "attention"), "the attention without causality",
    ),
    "dropped document boundary": (
        one_document, ("forward", LAYER.format(0), "attention"), "without the documents' boundaries"
    ),
    "jumps in positions as documents": (
        jumps_as_documents, ("forward", LAYER.format(0), "attention"), "its queries, keys and values are correct"
    ),
    "gradient that is not averaged": (
        lambda group: report_on(parallel(group), sync=lambda model: None),
        ("gradient", "", "model.embed_tokens.weight"), "gradients were not averaged",
    ),
    "gradient that is not averaged in ddp": (ignored_in_ddp, ("gradient", "", UP_PROJ), "were not averaged"),
    "summed again in ddp": (
        lambda group: report_on(
            DistributedDataParallel(parallel(group), process_group=group), sync=lambda model: sum_of_all(model, group)
        ),
        ("gradient", "", "module.model.embed_tokens.weight"), "multiplied by the number of ranks",
    ),
    "head outside the model summed": (
        value_head, ("gradient", "", "lm.model.embed_tokens.weight"), "multiplied by the number of ranks"
    ),
    "no label and no gradient": (no_gradient, ("gradient", "", "model.embed_tokens.weight"), "gradients of"),
    "wrong positions": (
        lambda group: report_on(
            parallel(group),
            shard=shard_function(group, position_ids=lambda x: torch.arange(x.shape[1]).expand(x.shape)),
        ),
        ("input", "", "position_ids"), "they count this rank's tokens",
    ),
    "wrong rotation": (
        wrong_rotation, ("forward", LAYER.format(0), "query"), "the positions in its rotary embedding"
    ),
    "unpatched layer": (unpatched_layer, ("layer", LAYER.format(1), "attention"), "('eager') is not parallelized"),
    "other implementation": (other_implementation, ("", "", ""), "sdpa"),
    "loss of its own": (loss_of_its_own, ("loss", "", "loss"), "on one device"),
    "replaced forward": (replaced_forward, ("", "", ""), ""),
    "additional term": (additional_term, ("loss", "", "loss"), "on one device"),
    "adapter that counts from the end": (
        lambda group: changed_output(
            parallel(group), "model.layers.0.mlp", lambda x: F.pad(x[:, :-3], (0, 0, 0, 3))
        ),
        ("forward", LAYER.format(1), "input"), "mixes or changes tokens",
    ),
    "noise scaled by the length": (
        lambda group: changed_output(
            parallel(group), "model.embed_tokens", lambda x: x + torch.sin(9 * x) / x.shape[1] ** 0.5
        ),
        ("forward", LAYER.format(0), "input"), "mixes or changes tokens",
    ),
    "gradients divided by P": (
        lambda group: report_on(
            DistributedDataParallel(parallel(group, gradients="sum"), process_group=group)
        ),
        ("gradient", "", "module.model.embed_tokens.weight"), "divided by the number of ranks",
    ),
    "gradients times P": (
        lambda group: report_on(parallel(group), sync=lambda model: sum_of_all(model, group)),
        ("gradient", "", "model.embed_tokens.weight"), "multiplied by the number of ranks",
    ),
    "stale keys in backward": (
        lambda group: replaced("attend", stale_attention, parallel(group)),
        ("backward", LAYER.format(1), "gradient of value"), "used different keys",
    ),
    "stale latents in backward": (
        lambda group: replaced("attend", stale_attention, parallel(group, "deepseek_v3")),
        ("backward", LAYER.format(1), "gradient of query"), "used different keys",
    ),
    "wrong rotation of latents' keys": (
        rotated_latents, ("forward", LAYER.format(0), "attention"), "its queries, keys and values are correct"
    ),
    "another strategy": (
        lambda group: report_on(parallel(group, strategy="ring" if group.rank() == 0 else "ulysses")),
        ("path", "", "path"), "strategy='ulysses'",
    ),
    "another layer": (other_layer, ("path", "", "path"), "('scaling', 1.0)"),
    "images without their blocks": (
        lambda group: replaced(
            "_mask_of_call", lambda *x: None, merging(group, "gemma3"), with_images("gemma3", "images")
        ),
        ("forward", LAYER_OF_TEXT.format(0), "attention"), "without the blocks of its images",
    ),
    "wrong positions of images": (
        lambda group: in_text_model(group, position_ids=lambda x: x[:1].expand(3, -1, -1)),
        ("input", "", "position_ids"), "they are not the values of this rank's tokens",
    ),
    "other visual embeddings": (
        lambda group: in_text_model(group, deepstack_visual_embeds=lambda embeds: [2 * x for x in embeds]),
        ("forward", LAYER_OF_TEXT.format(1), "input"), "mixes or changes",
    ),
    "gradient that is not averaged of the tower": (
        tower_not_summed, ("gradient", "", "model.vision_tower.embeddings.patch_embedding.weight"), "were not averaged"
    ),
    "other weights": (other_weights, ("weights", "", "model.norm.weight"), "different weights"),
}  # fmt: skip


@on_ranks
def report_of(group: ProcessGroup, fault: str) -> tuple[bool, list[tuple[str, str, str]], str]:
    report = FAULTS[fault][0](group)
    return report.ok, [(d.kind, d.layer, d.quantity) for d in report.differences], str(report)


@pytest.mark.thorough(fault=[*FAULTS][1::2])
@pytest.mark.thorough(
    fault=[
        "stale keys in backward",
        "stale latents in backward",
        "images without their blocks",
        "wrong positions of images",
        "other visual embeddings",
    ]
)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault(two: Pool, fault: str) -> None:
    _, place, words = FAULTS[fault]
    by_rank = two.run(2, report_of, fault)
    ok, places, said = by_rank[0]
    assert not ok and (places[0] == place or not any(place)), said  # no place: it depends on the fault's guards
    assert words in said
    assert by_rank[1] == by_rank[0]  # the same report on every rank
