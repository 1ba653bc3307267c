"""``verify`` finds no difference in correct models. It finds each of several planted faults and reports where it is."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
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

import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast

import seqpar
import seqpar.hf
from seqpar.hf import VerificationError, VerificationReport
from seqpar.hf import attention as hf_attention
from seqpar.hf import batch as hf_batch
from seqpar.hf import loss as hf_loss
from seqpar.hf import masks as hf_masks
from seqpar.hf.loss import TokenLoss
from seqpar.hf.state import current_forward, patch_of
from seqpar.hf.verification import run
from seqpar.hf.verification.monitoring import foreign_code
from seqpar.hf.verification.recording import PinnedExperts
from seqpar.mask import Mask

from ..pool import Pool, on_ranks
from .test_multimodal import make_batch as with_images
from .test_multimodal import tiny as tiny_wrapper
from .workers import BATCHES, MECHANISMS, gradients, make_batch, tiny

pytestmark = pytest.mark.slow
LAYER = "model.layers.{}.self_attn"
RING: dict[str, Any] = {}
ULYSSES: dict[str, Any] = {"strategy": "ulysses", "layout": "contiguous"}
# By number of ranks and arguments of ``parallelize``: models and batches.
HEALTHY: list[tuple[int, dict[str, Any], list[tuple[str, str]]]] = [
    (1, RING, [("llama", "packed"), ("gpt_oss", "left")]),
    (2, RING, [*(("llama", how) for how in BATCHES), *zip(MECHANISMS[1:], BATCHES[1:] * 2, strict=False)]),
    (4, RING, [("llama4", "left"), ("gpt2", "packed"), ("gemma3", "right"), ("mistral", "packed")]),
    (4, ULYSSES, [("llama", "packed"), ("gpt_oss", "left"), ("deepseek_v3", "packed")]),
]


@on_ranks
def healthy(group: ProcessGroup, cases: list[tuple[str, str]], arguments: dict[str, Any]) -> None:
    for kind, how in cases:
        model = seqpar.hf.parallelize(tiny(kind), group=group, **arguments)
        assert seqpar.hf.verify(model, make_batch(how)).layers == 2, (kind, how)


@pytest.mark.parametrize(("world", "arguments", "cases"), HEALTHY, ids=["1", "ring on 2", "ring on 4", "ulysses on 4"])
def test_healthy_models(pool: Pool, world: int, arguments: dict[str, Any], cases: list[tuple[str, str]]) -> None:
    pool.run(world, healthy, cases, arguments)


@on_ranks
def healthy_in_wrappers(group: ProcessGroup) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    def with_ddp(model: Any) -> Any:
        return DistributedDataParallel(model, process_group=group)

    def with_fsdp2(model: Any) -> Any:
        mesh = init_device_mesh("cpu", (group.size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def with_fsdp1(model: Any) -> Any:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)

    for wrap in (with_ddp, with_fsdp2, with_fsdp1):
        seqpar.hf.verify(wrap(seqpar.hf.parallelize(tiny("gpt_oss"), group=group)), make_batch("packed"))


@on_ranks
def healthy_others(group: ProcessGroup) -> None:
    """Models with images, models without a prediction per token, and ranks that have batches of their own."""
    text = make_batch("right")
    text.pop("labels")
    rows = torch.arange(len(text["input_ids"]))
    cases: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (tiny_wrapper("gemma3"), with_images("gemma3", "images"), {}),
        (tiny_wrapper("qwen3_vl"), with_images("qwen3_vl", "left"), {}),
        (tiny_wrapper("gemma4"), with_images("gemma4", "images"), {"strategy": "context_parallel"}),
        (tiny("llama", auto=transformers.AutoModelForSequenceClassification), text, {}),
        (tiny("llama", auto=transformers.AutoModelForSequenceClassification), {**text, "labels": rows}, {}),
        (tiny("gemma2", auto=transformers.AutoModel), text, {}),
        (tiny("mistral"), make_batch("left"), {"batches": "per_rank"}),
    ]
    for model, batch, arguments in cases:
        seqpar.hf.parallelize(model, group=group, **arguments)
        assert seqpar.hf.verify(model, batch).layers >= 2
    assert patch_of(model).batches == "per_rank" and "_call_impl" in vars(model)


def test_healthy_others(pool: Pool) -> None:
    pool.run(2, healthy_others)


def test_healthy_models_in_wrappers(two: Pool) -> None:
    two.run(2, healthy_in_wrappers)


def parallel(group: ProcessGroup, kind: str = "llama", **options: Any) -> Any:
    return seqpar.hf.parallelize(tiny(kind), group=group, **options)


def cut(group: ProcessGroup, **changes: Any) -> Any:
    """A function with which a training loop shards a batch: ``shard_batch`` with a fault."""

    def shard(batch: Any) -> dict[str, Any]:
        local = seqpar.hf.shard_batch(batch, group=group)
        for name, change in changes.items():
            local[name] = change(local[name])
        return local

    return shard


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


def stale_attention(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
    return Stale.apply(q, k, v, lambda *x: seqpar.attention(*x, **kwargs))


def report_on(model: Any, batch: Any = "plain", sync: Any = None, shard: Any = None) -> VerificationReport:
    batch = make_batch(batch) if isinstance(batch, str) else batch
    return seqpar.hf.verify(model, batch, False, sync=sync, shard=shard)


def replaced(name: str, value: Any, model: Any, batch: Any = "plain") -> VerificationReport:
    """The report while the attention of ``seqpar.hf`` uses ``value`` as its function ``name``."""
    with mock.patch.object(hf_attention if hasattr(hf_attention, name) else hf_masks, name, value):
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
    shift = cut(group, labels=lambda x: F.pad(x, (0, 1), value=-100)[:, 1:])
    return report_on(parallel(group), shard=shift)


def labels_shifted_twice(group: ProcessGroup) -> VerificationReport:
    def twice(batch: Any) -> dict[str, Any]:
        labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        return seqpar.hf.shard_batch({**batch, "labels": labels}, group=group)

    return report_on(parallel(group), shard=twice)


def wrong_layout(group: ProcessGroup) -> VerificationReport:
    def contiguous(batch: Any) -> dict[str, Any]:
        local = seqpar.hf.shard_batch(batch, group=group, layout="contiguous")
        local["seqpar"].layout = "zigzag"
        return local

    return report_on(parallel(group), make_batch("plain", 48), shard=contiguous)


def one_document(group: ProcessGroup) -> VerificationReport:
    def drop(shard: Any) -> Any:
        shard.mask = Mask.full()
        return shard

    return report_on(parallel(group), "packed", shard=cut(group, seqpar=drop))


def ignored_in_ddp(group: ProcessGroup) -> VerificationReport:
    model = parallel(group)
    model._ddp_params_and_buffers_to_ignore = ["model.layers.1.mlp.up_proj.weight"]
    return report_on(DistributedDataParallel(model, process_group=group))


def wrong_rotation(group: ProcessGroup) -> VerificationReport:
    def count(module: Any, args: Any, kwargs: Any) -> Any:
        ids = kwargs["position_ids"]
        return args, {**kwargs, "position_ids": ids - ids.amin() if current_forward() else ids}

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
    attention = seqpar.attention

    def rotated(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
        return attention(q, k, v.roll(1, 1), **kwargs)  # v: the rotated keys

    return replaced("attention", rotated, parallel(group, "deepseek_v3"))


def merging(group: ProcessGroup, kind: str) -> Any:
    return seqpar.hf.parallelize(tiny_wrapper(kind), group=group)


def in_text_model(group: ProcessGroup, **changes: Any) -> VerificationReport:
    """The report on a model with images whose text model receives other arguments."""

    def change(module: Any, args: Any, kwargs: Any) -> Any:
        changed = {name: f(kwargs[name]) for name, f in changes.items()}
        return None if current_forward() is None else (args, {**kwargs, **changed})  # None: one device

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
        user_loss = property(lambda self: None if current_forward() else lambda *x, **kwargs: 3 * loss(*x, **kwargs))

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
    "unsummed gradient": (
        lambda group: report_on(parallel(group), sync=lambda model: None),
        ("gradient", "", "model.embed_tokens.weight"), "partial gradients were not summed",
    ),
    "unsummed gradient in ddp": (ignored_in_ddp, ("gradient", "", UP_PROJ), "were not summed"),
    "summed again in ddp": (
        lambda group: report_on(
            DistributedDataParallel(parallel(group), process_group=group), sync=lambda model: sum_of_all(model, group)
        ),
        ("gradient", "", "module.model.embed_tokens.weight"), "multiplied by the number of ranks",
    ),
    "head outside the model summed": (
        value_head, ("gradient", "", "head.weight"), "multiplied by the number of ranks"
    ),
    "no label and no gradient": (no_gradient, ("gradient", "", "model.embed_tokens.weight"), "gradients of"),
    "wrong positions": (
        lambda group: report_on(
            parallel(group),
            shard=cut(group, position_ids=lambda x: torch.arange(x.shape[1]).expand(x.shape)),
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
            DistributedDataParallel(parallel(group, gradients="partial"), process_group=group)
        ),
        ("gradient", "", "module.model.embed_tokens.weight"), "divided by the number of ranks",
    ),
    "gradients times P": (
        lambda group: report_on(parallel(group, gradients="mean")),
        ("gradient", "", "model.embed_tokens.weight"), "multiplied by the number of ranks",
    ),
    "stale keys in backward": (
        lambda group: replaced("attention", stale_attention, parallel(group)),
        ("backward", LAYER.format(1), "gradient of value"), "used different keys",
    ),
    "stale latents in backward": (
        lambda group: replaced("attention", stale_attention, parallel(group, "deepseek_v3")),
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
    "unsummed gradient of the tower": (
        tower_not_summed, ("gradient", "", "model.vision_tower.embeddings.patch_embedding.weight"), "were not summed"
    ),
    "other weights": (other_weights, ("weights", "", "model.norm.weight"), "different weights"),
}  # fmt: skip


@on_ranks
def report_of(group: ProcessGroup, fault: str) -> tuple[bool, list[tuple[str, str, str]], str]:
    report = FAULTS[fault][0](group)
    return report.ok, [(d.kind, d.layer, d.quantity) for d in report.differences], str(report)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault(two: Pool, fault: str) -> None:
    _, place, words = FAULTS[fault]
    by_rank = two.run(2, report_of, fault)
    ok, places, said = by_rank[0]
    assert not ok and (places[0] == place or not any(place)), said  # no place: it depends on the fault's guards
    assert words in said
    assert by_rank[1] == by_rank[0]  # the same report on every rank


@on_ranks
def around_model(group: ProcessGroup) -> tuple[list[bool], str]:
    """Reports on modules that contain the model: with a loss of whole outputs, with the model's loss, with neither."""

    class Around(nn.Module):
        def __init__(self, outputs: Callable[[Any, Tensor], Any]) -> None:
            super().__init__()
            self.lm, self.outputs = parallel(group, "mistral"), outputs

        def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Any:
            return self.outputs(partial(self.lm, input_ids, attention_mask), labels)

    modules = [
        Around(lambda lm, labels: (lm().logits[..., 0] - labels / 50).square().mean()),
        Around(lambda lm, labels: {"loss": 3 * lm(labels=labels).loss}),
        Around(lambda lm, labels: lm().logits.relu()),
    ]
    # The loss of the first module counts padding too, whose outputs depend on the attention implementation.
    ok = [report_on(module, how).ok for module, how in zip(modules, ("plain", "left", "left"), strict=True)]
    return ok, str(report_on(Around(lambda lm, labels: [lm().logits.mean().item()])))


def test_modules_around_the_model(pool: Pool) -> None:
    for ok, unsupported in pool.run(2, around_model):
        assert all(ok)
        assert "model=Around: its output has no loss" in unsupported


@on_ranks
def with_half_precision(group: ProcessGroup) -> tuple[bool, bool]:
    """Whether the reports are right, with and without pinned experts, on a model whose routing rounding changes."""
    ok = []
    for pinned in (PinnedExperts, lambda pins, **arguments: PinnedExperts(False, **arguments)):
        model = seqpar.hf.parallelize(tiny("qwen3_moe", seed=3).to(torch.bfloat16), group=group)
        with mock.patch.object(run, "PinnedExperts", pinned):
            batch = make_batch("plain", length=120, seed=3)
            ok.append(seqpar.hf.verify(model, batch, False, tolerance=0.15).ok)
    return ok[0], ok[1]


def test_experts_are_pinned(pool: Pool) -> None:
    assert pool.run(2, with_half_precision) == [(True, False)] * 2


@on_ranks
def in_another_collective(group: ProcessGroup) -> str:
    """Rank 1 leaves out the messages of the second layer, for which rank 0 waits."""
    model = parallel(group)

    def without_exchange(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        calls.append(1)
        if group.rank() == 1 and len(calls) == 2:
            return q.clone()
        return seqpar.attention(q, k, v, **kwargs)

    calls: list[int] = []
    with mock.patch.object(hf_attention, "attention", without_exchange), pytest.raises(VerificationError) as caught:
        seqpar.hf.verify(model, make_batch("plain"), deadline_s=3.0)
    return str(caught.value)


def test_report_of_a_missing_rank() -> None:
    pool = Pool(2)
    try:
        for said in pool.run(2, in_another_collective, deadline_s=40):
            assert "path: run" in said, said
    finally:
        pool.close()


@on_ranks
def state_before_and_after(group: ProcessGroup, kind: str) -> list[str]:
    model = parallel(group, kind)
    model.train()
    model.model.layers[0].eval()
    local = seqpar.hf.shard_batch(make_batch("plain"), group=group)
    model(**local).loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.add_(1.0)

    def state() -> dict[str, Any]:
        hooks = {n: [*m._forward_hooks, *m._forward_pre_hooks] for n, m in model.named_modules()}
        return {
            "gradients": gradients(model),
            "identity": [id(p.grad) for p in model.parameters()],
            "random": torch.get_rng_state(),
            "modes": [m.training for m in model.modules()],
            "buffers": {n: b.clone() for n, b in model.named_buffers()},
            "hooks": hooks,
            "config": model.config.to_dict(),
            "loss": model(**local).loss.detach(),
            "expansions": [vars(m).get("expand_kv") for m in model.modules()],
            "calls": patch_of(model).calls,
        }

    before = state()
    seqpar.hf.verify(model, make_batch("packed"))
    after = state()
    return [name for name, x in before.items() if not _same(x, after[name])]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return bool(a == b)


@on_ranks
def in_loops(group: ProcessGroup) -> None:
    """Reports on a loop that shards batches itself, without labels, and on a model that returns this rank's outputs."""
    model = parallel(group)
    assert seqpar.hf.verify(model, make_batch("left"), shard=cut(group)).ok
    batch = make_batch("left")
    del batch["labels"]
    assert seqpar.hf.verify(model, batch, shard=cut(group)).ok
    assert seqpar.hf.verify(model, {**batch, "use_cache": True}).ok
    assert seqpar.hf.verify(parallel(group, outputs="local"), batch).ok


def test_ways_to_shard(pool: Pool) -> None:
    pool.run(2, in_loops)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3"])
def test_verify_changes_nothing(pool: Pool, kind: str) -> None:
    for changed in pool.run(2, state_before_and_after, kind):
        assert not changed


@on_ranks
def while_training(group: ProcessGroup, fault: bool) -> tuple[int, str]:
    with mock.patch.dict(os.environ, {"SEQPAR_VERIFY": "2", "SEQPAR_VERIFY_TOKENS": "24"}):
        model = parallel(group, "mistral")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    from seqpar.hf.verification import monitoring

    reports: list[VerificationReport] = []

    def count(*args: Any, **kwargs: Any) -> VerificationReport:
        reports.append(seqpar.hf.verify(*args, **kwargs))
        return reports[-1]

    try:
        with mock.patch.object(monitoring, "verify", count):
            for step in range(4):
                local = seqpar.hf.shard_batch(make_batch("left" if step else "packed"), group=group)
                model(**local).loss.backward()
                if not fault or step < 2:
                    seqpar.sync_gradients(model, group=group)
                optimizer.step()
                optimizer.zero_grad()
    except VerificationError as error:
        return len(reports), str(error)
    finally:
        seqpar.hf.restore(model)
    assert all(report.seq_len == 24 for report in reports)
    return len(reports), ""


def test_every_n_steps(pool: Pool) -> None:
    assert pool.run(2, while_training, False) == [(2, "")] * 2
    for checked, said in pool.run(2, while_training, True):
        assert checked == 1 and "were not summed" in said


class OwnForCausalLM(transformers.MistralForCausalLM):  # type: ignore[misc]
    """A class that is not of transformers."""


@on_ranks
def by_itself(group: ProcessGroup, setting: str, own: bool, fault: bool) -> tuple[list[str], str]:
    """What is logged in two steps of training, and the error."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("seqpar")
    logger.addHandler(handler)
    model = tiny("mistral")
    if own:
        model.__class__ = OwnForCausalLM
    with ExitStack() as stack:
        stack.callback(logger.removeHandler, handler)
        stack.enter_context(mock.patch.dict(os.environ, {"SEQPAR_VERIFY": setting}))
        seqpar.hf.parallelize(model, group=group)
        stack.callback(seqpar.hf.restore, model)
        if fault:
            stack.enter_context(mock.patch.object(hf_masks, "window_and_chunk", return_value=(None, None)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        try:
            for _ in range(2):
                model(**make_batch("left", length=160)).loss.backward()
                seqpar.sync_gradients(model, group=group)
                optimizer.step()
                optimizer.zero_grad()
        except VerificationError as error:
            return said, str(error)
    return said, ""


def test_own_code_is_verified_once(pool: Pool) -> None:
    rank0, rank1 = pool.run(2, by_itself, "", own=True, fault=False)
    assert len(rank0[0]) == 1 and rank0[1] == "" and rank1 == ([], "")
    assert "OwnForCausalLM" in rank0[0][0] and "on 128 tokens" in rank0[0][0] and "SEQPAR_VERIFY=0" in rank0[0][0]
    for said, error in pool.run(2, by_itself, "", own=True, fault=True):
        assert not said and "model.layers.0.self_attn" in error and "without its sliding window" in error
    for setting, own in (("0", True), ("", False)):
        assert pool.run(2, by_itself, setting, own=own, fault=True) == [([], "")] * 2


def test_code_of_known_libraries() -> None:
    patch = patch_of(seqpar.hf.parallelize(tiny("llama"), strategy="local"))
    model = tiny("llama")
    assert foreign_code(model, patch) == ""
    model.model.layers[1].mlp.forward = lambda x: x
    assert "model.layers.1.mlp (LlamaMLP)" in foreign_code(model, patch)
    vars(patch.loss_functions[0])["_loss_function"].user_loss = lambda *args, **kwargs: None
    assert "the loss_function of LlamaForCausalLM" in foreign_code(model, patch)


def test_refused_environment() -> None:
    with mock.patch.dict(os.environ, {"SEQPAR_VERIFY": "often"}), pytest.raises(ValueError, match="SEQPAR_VERIFY="):
        seqpar.hf.parallelize(tiny("llama"), strategy="local")
