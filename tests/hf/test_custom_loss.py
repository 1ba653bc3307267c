"""Losses other than transformers' own: they are one device's, or an error says why not."""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")

import transformers
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

import seqpar
import seqpar.hf

from ..pool import Pool, on_ranks
from .workers import VOCAB, gradients, make_batch, tiny, worst

pytestmark = pytest.mark.slow
LOSS, GRADIENT = 2e-5, 1e-3
Llama, Qwen3Moe = transformers.LlamaForCausalLM, transformers.Qwen3MoeForCausalLM


def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, scale: float = 3.0, **kwargs: Any) -> Tensor:
    """A loss that is neither a sum over tokens nor a function of the cross-entropy."""
    labels = labels[:, 1:].flatten()
    losses = F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels, reduction="none", label_smoothing=0.1)
    count = kwargs.get("num_items_in_batch")
    mean = losses.sum() / ((labels != -100).sum() if count is None else count)
    return mean + (scale * losses).logsumexp(0) + 1e-2 * logits.logsumexp(-1).square().mean()


class Smoothed(nn.Module):
    """The same loss with a parameter, which becomes a parameter of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        return smoothed(logits * self.scale, labels, vocab_size, **kwargs) + self.scale.square()


def penalized(model: Any) -> Callable[..., Tensor]:
    """Cross-entropy and an L2 penalty."""
    weight = model.get_input_embeddings().weight
    return lambda logits, labels, vocab_size, **kwargs: (
        ForCausalLMLoss(logits, labels, vocab_size) + weight.square().mean()
    )


class PassesOn(Llama):  # type: ignore[misc,valid-type]
    def forward(self, input_ids: Any = None, labels: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, labels=labels, position_ids=position_ids, **kwargs)


class PassesOnExperts(Qwen3Moe):  # type: ignore[misc,valid-type]
    def forward(self, input_ids: Any = None, labels: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, labels=labels, position_ids=position_ids, **kwargs)


class Squares(PassesOn):
    """A function of the parent's loss alone."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if output.loss is not None:
            output["loss"] = 2 * output.loss**2
        return output


class OwnForCausalLM(Llama):  # type: ignore[misc,valid-type]
    """A loss of its own from the parent's logits."""

    def forward(self, input_ids: Any = None, labels: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        output["loss"] = 10 * F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return output


class AddsTerm(PassesOn):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output["loss"] = output.loss + 1e-2 * output.logits.logsumexp(-1).square().mean()
        return output


class AddsTermInPlace(PassesOn):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss += 1e-2 * output.logits.logsumexp(-1).square().mean()
        return output


class AddsExpertsTerm(PassesOnExperts):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss += 1e-2 * output.logits.logsumexp(-1).square().mean()
        return output


class PredictsTwo(Llama):  # type: ignore[misc,valid-type]
    """A second output embedding, which predicts the token after the next one."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.second = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Any = None, labels: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, **kwargs).last_hidden_state
        loss = self.loss_function(self.lm_head(hidden), labels, self.vocab_size, **kwargs)
        later = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return CausalLMOutputWithPast(loss=loss + self.loss_function(self.second(hidden), later, self.vocab_size))


class Masks(PassesOn):
    """Ignores some labels."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["labels"][kwargs["labels"] == 5] = -100
        return super().forward(*args, **kwargs)


def replaced(self: Any, input_ids: Any = None, labels: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
    """A forward for an instance, as Liger-Kernel sets it, with the loss of the tokens that it gets."""
    hidden = self.model(input_ids=input_ids, position_ids=position_ids, **kwargs).last_hidden_state
    return CausalLMOutputWithPast(loss=ForCausalLMLoss(hidden @ self.lm_head.weight.T, labels, VOCAB))


def made(cls: Any, kind: str = "llama") -> Any:
    plain = tiny(kind)
    torch.manual_seed(1)
    model = cls(plain.config)
    model.load_state_dict(plain.state_dict(), strict=False)
    return model.train()


def with_forward(forward: Any) -> Any:
    model = tiny("llama")
    model.forward = types.MethodType(forward, model)
    return model


def with_loss(function: Any, of_model: bool = False) -> Any:
    model = tiny("llama")
    # transformers ignores a module that is set as ``loss_function``: ``nn.Module`` registers it under this name.
    model._loss_function = function(model) if of_model else copy.deepcopy(function)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "plain": lambda: tiny("llama"),
    "function": lambda: with_loss(smoothed),
    "module": lambda: with_loss(Smoothed()),
    "penalty": lambda: with_loss(penalized, True),
    "passes on": lambda: made(PassesOn),
    "passes on experts": lambda: made(PassesOnExperts, "qwen3_moe"),
    "squares": lambda: made(Squares),
    "own": lambda: made(OwnForCausalLM),
    "adds": lambda: made(AddsTerm),
    "adds in place": lambda: made(AddsTermInPlace),
    "adds experts": lambda: made(AddsExpertsTerm, "qwen3_moe"),
    "predicts two": lambda: made(PredictsTwo),
    "masks": lambda: made(Masks),
    "replaced": lambda: with_forward(replaced),
}
BATCHES: dict[str, dict[str, Any]] = {
    "": {},
    "no labels": {"labels": torch.full((2, 45), -100)},
    "divisor": {"num_items_in_batch": torch.tensor(50)},
    "divisor 0": {"labels": torch.full((2, 45), -100), "num_items_in_batch": torch.tensor(0)},
}


@cache
def one_device(name: str, batch: str) -> tuple[float, dict[str, Tensor]]:
    model = MODELS[name]()
    loss = model(**make_batch("plain") | BATCHES[batch], use_cache=False).loss
    loss.backward()
    return loss.item(), gradients(model)


def run(group: ProcessGroup, name: str, batch: str, how: str) -> tuple[float, float]:
    """Errors of the loss and the gradients, relative to one device."""
    given = make_batch("plain") | BATCHES[batch]
    if how == "after":  # the loss function is set after the model is parallelized
        model = seqpar.hf.parallelize(tiny("llama"), group=group)
        model.loss_function = smoothed
    else:
        own: Any = {"batches": "per_rank"} if how == "own" else {}
        model = seqpar.hf.parallelize(MODELS[name](), group=group, **own)
    outer: Any = DistributedDataParallel(model, process_group=group) if how == "ddp" else model
    if how == "shard_batch":
        given = seqpar.hf.shard_batch(given, group=group)
    loss = outer(**given).loss
    loss.backward()
    if how != "ddp":
        seqpar.sync_gradients(model, group=group)
    expected, grads = one_device(name, batch)
    grads = {key: group.size() * x if how == "own" else x for key, x in grads.items()}
    close = torch.isclose(
        loss.detach(), torch.tensor(expected), rtol=0, atol=LOSS * max(1, abs(expected)), equal_nan=True
    )
    assert set(seqpar.hf.restore(model).state_dict()) == set(MODELS[name]().state_dict())
    ours = gradients(model)
    if batch.startswith("no labels") or batch == "divisor 0":
        return 0.0 if close else 1.0, float(sum(x.abs().sum() for x in (*ours.values(), *grads.values())))
    return 0.0 if close else abs(loss.item() - expected), worst(ours, grads)


@on_ranks
def table(group: ProcessGroup, cases: list[tuple[str, str, str]]) -> list[tuple[float, float]]:
    return [run(group, *case) for case in cases]


RIGHT = [
    *((name, "", "") for name in ("function", "module", "penalty", "passes on", "passes on experts", "squares")),
    *(("function", "divisor", how) for how in ("", "after", "ddp", "own", "shard_batch")),
    *(("module", "", how) for how in ("ddp", "own")),
    *(("plain", batch, "") for batch in ("no labels", "divisor 0")),
    ("plain", "no labels", "ddp"),
]


@pytest.mark.parametrize("world", [1, 2])
def test_losses_are_those_of_one_device(pool: Pool, world: int) -> None:
    cases = [case for case in RIGHT if world > 1 or case[2] != "ddp"]
    for results in pool.run(world, table, cases):
        wrong = [(case, x) for case, x in zip(cases, results, strict=True) if not (x[0] < LOSS and x[1] < GRADIENT)]
        assert not wrong


def message_of(group: ProcessGroup, name: str, how: str) -> str:
    model = MODELS[name]()
    if how == "after":
        model, forward = tiny("llama"), model.forward.__func__
        seqpar.hf.parallelize(model, group=group)
        model.forward = types.MethodType(forward, model)
    else:
        seqpar.hf.parallelize(model, group=group)
    batch = make_batch("plain")
    if how == "shift_labels":
        batch["shift_labels"] = F.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:]
    try:
        with torch.inference_mode(how == "evaluated"):
            model(**batch)
    except ValueError as error:
        return str(error)
    return "no error"


@on_ranks
def messages(group: ProcessGroup, cases: list[tuple[str, str]]) -> list[str]:
    return [message_of(group, *case) for case in cases]


def test_other_losses_are_refused(pool: Pool) -> None:
    own = (
        "returned a loss of its own, or added a term.* model.loss_function = f .*model\\(\\*\\*batch\\) without labels"
    )
    cases = {
        ("own", ""): own,
        ("own", "evaluated"): own,
        ("adds", ""): own,
        ("adds", "evaluated"): own,
        ("adds in place", ""): own,
        ("adds in place", "evaluated"): own,
        ("adds experts", ""): own,
        ("replaced", ""): own,
        ("replaced", "after"): own,
        ("predicts two", ""): "loss function with other labels than it was given",
        ("masks", ""): "loss function with other labels than it was given",
        ("function", "shift_labels"): "gets the unshifted labels; call the model with .*without shift_labels",
    }
    for found in pool.run(2, messages, list(cases)):
        for (case, expected), message in zip(cases.items(), found, strict=True):
            assert re.search(expected, message), (case, message)


def test_logits_that_were_not_computed_say_so() -> None:
    model = seqpar.hf.parallelize(tiny("llama"), strategy="local")
    logits = model(**make_batch("plain")).logits
    assert repr(logits) == "MissingLogits()" and not logits.requires_grad
    for use in (lambda: logits.shape, lambda: logits[0], lambda: logits.argmax(-1), lambda: logits + 1, logits.detach):
        with pytest.raises(ValueError, match=r"outputs='full' to seqpar.hf.parallelize or .*ParallelismConfig"):
            use()


@on_ranks
def noise(group: ProcessGroup, alpha: float) -> float:
    """The magnitude of NEFTune's noise on this rank."""
    activate_neftune = pytest.importorskip("transformers.integrations.neftune").activate_neftune
    model = seqpar.hf.parallelize(tiny("llama"), group=group)
    activate_neftune(model, alpha)
    embedding, added = model.get_input_embeddings(), []

    def compare(module: Any, args: Any, output: Tensor) -> None:
        added.append(float((output - F.embedding(args[0], module.weight)).abs().max()))

    embedding.register_forward_hook(compare)
    for _ in range(20):
        model(**make_batch("plain"))
    assert embedding.neftune_noise_alpha == alpha
    return max(added)


def test_noise_has_the_magnitude_of_one_device(pool: Pool) -> None:
    expected = 3.0 / (45 * 32) ** 0.5
    for found in pool.run(2, noise, 3.0):
        assert found == pytest.approx(expected, rel=1e-2)
