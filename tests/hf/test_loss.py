"""Losses: the user's own, log-probabilities, and the fused loss are one device's, or an error says why not."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import cache, partial, wraps
from itertools import groupby
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
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput

import seqpar
import seqpar.hf
from seqpar.hf.losses.logits import fused_cross_entropy

from ..live_bytes import LiveBytes
from ..observe import message_of
from ..pool import Pool, on_ranks
from ..reference import assert_close
from .workers import (
    VOCAB,
    Result,
    check,
    check_gradients,
    check_loss,
    gradients,
    make_batch,
    one_device_of,
    parallel,
    rounding_of,
    tiny,
    trained,
)

pytestmark = pytest.mark.slow
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


def squared(output: Any) -> None:
    """A function of the parent's loss alone."""
    if output.loss is not None:
        output["loss"] = 2 * output.loss**2


def term(output: Any) -> Tensor:
    result: Tensor = 1e-2 * output.logits.logsumexp(-1).square().mean()
    return result


def added(output: Any) -> None:
    output["loss"] = output.loss + term(output)


def added_in_place(output: Any) -> None:
    output.loss += term(output)


def scaled(output: Any) -> None:
    output.loss *= 2.5
    output["loss"] = (1.5 - output.loss).neg().to(torch.float64) / 3


def weighted(output: Any) -> None:
    """By a number that depends on the tokens of this rank, and has no gradient."""
    output["loss"] = output.loss * output.logits.detach().square().mean()


def subclass(base: Any, change: Callable[[Any], None] = lambda output: None, ignored: int | None = None) -> Any:
    """A class that passes its arguments on, changes the output, and ignores some labels."""

    class PassesOn(base):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
            if ignored is not None:
                labels[labels == ignored] = -100
            output = super().forward(input_ids=input_ids, labels=labels, position_ids=position_ids, **kwargs)
            change(output)
            return output

    return PassesOn


class OwnForCausalLM(Llama):  # type: ignore[misc,valid-type]
    """A loss of its own from the parent's logits."""

    def forward(self, input_ids: Any = None, labels: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        output["loss"] = 10 * F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
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
    "passes on": lambda: made(subclass(Llama)),
    "passes on experts": lambda: made(subclass(Qwen3Moe), "qwen3_moe"),
    "squares": lambda: made(subclass(Llama, squared)),
    "scales": lambda: made(subclass(Llama, scaled)),
    "scales experts": lambda: made(subclass(Qwen3Moe, scaled), "qwen3_moe"),
    "weights": lambda: made(subclass(Llama, weighted)),
    "own": lambda: made(OwnForCausalLM),
    "adds": lambda: made(subclass(Llama, added)),
    "adds in place": lambda: made(subclass(Llama, added_in_place)),
    "adds experts": lambda: made(subclass(Qwen3Moe, added_in_place), "qwen3_moe"),
    "predicts two": lambda: made(PredictsTwo),
    "masks": lambda: made(subclass(Llama, ignored=5)),
    "replaced": lambda: with_forward(replaced),
}
BATCHES: dict[str, dict[str, Any]] = {
    "": {},
    "no labels": {"labels": torch.full((2, 45), -100)},
    "divisor": {"num_items_in_batch": torch.tensor(50)},
    "divisor 0": {"labels": torch.full((2, 45), -100), "num_items_in_batch": torch.tensor(0)},
}


@cache
def one_device(name: str, batch: str) -> Result:
    return trained(MODELS[name](), make_batch("plain") | BATCHES[batch], use_cache=False)


Case = tuple[str, str, str]  # the model, the batch, and how the model is called


def model_of(case: tuple[Case, Result]) -> tuple[str, str]:
    """Cases with the same result may be calls of the same model."""
    (name, _, how), _ = case
    return name, how if how in ("after", "ddp", "per_rank") else ""


@on_ranks
def check_losses(group: ProcessGroup, cases: list[tuple[Case, Result]]) -> None:
    for (name, kept), calls in groupby(cases, model_of):
        if kept == "after":  # the loss function is set after the model is parallelized
            model = seqpar.hf.parallelize(tiny("llama"), group=group)
            model.loss_function = smoothed
        else:
            batches: Any = "per_rank" if kept == "per_rank" else "shared"
            model = seqpar.hf.parallelize(MODELS[name](), group=group, batches=batches)
        outer: Any = DistributedDataParallel(model, process_group=group) if kept == "ddp" else model
        for case, expected in calls:
            check_call(group, model, outer, case, expected)
        assert set(seqpar.hf.restore(model).state_dict()) == set(MODELS[name]().state_dict())


def check_call(group: ProcessGroup, model: Any, outer: Any, case: Case, expected: Result) -> None:
    _, batch, how = case
    given = make_batch("plain") | BATCHES[batch]
    model.zero_grad()
    if how == "evaluated":
        with torch.inference_mode():
            check_loss(model(**given).loss.item(), expected.loss, *case)
        return
    if how == "shard_batch":
        given = seqpar.hf.shard_batch(given, group=group)
    if how in ("outside", "outside, shifted"):  # as in DeepSpeed's loops
        labels = given.pop("labels")
        shifted = {"labels": None, "shift_labels": F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()}
        labels = {"labels": labels} if how == "outside" else shifted
        loss = model.loss_function(logits=outer(**given).logits, vocab_size=VOCAB, **labels)
    else:
        loss = outer(**given).loss
    loss.backward()
    if how != "ddp":
        seqpar.sync_gradients(model, group=group)
    ours, grads = gradients(model), expected.gradients
    check_loss(loss.item(), expected.loss, *case)
    if batch.startswith("no labels") or batch == "divisor 0":
        assert not any(x.any() for x in (*ours.values(), *grads.values())), case
    else:
        check_gradients(ours, expected, *case)


RIGHT: list[Case] = [
    *((name, "", "") for name in ("function", "module", "penalty", "passes on", "passes on experts", "squares")),
    *(("function", "divisor", how) for how in ("", "after", "ddp", "per_rank", "shard_batch")),
    *(("module", "", how) for how in ("ddp", "per_rank")),
    *(("plain", batch, "") for batch in ("no labels", "divisor 0")),
    ("plain", "no labels", "ddp"),
    *((name, "", how) for name in ("scales", "scales experts") for how in ("", "evaluated")),
    *((name, "", "evaluated") for name in ("passes on experts", "plain", "squares")),
    *(("plain", "", how) for how in ("outside", "outside, shifted")),
    ("function", "", "outside"),
]
RIGHT.sort(key=lambda case: (case[0], case[2]))  # calls of the same model in a row


@pytest.mark.thorough(world=[1])
@pytest.mark.parametrize("world", [1, 2])
def test_losses_of_the_user(pool: Pool, world: int) -> None:
    cases = [(case, one_device(*case[:2])) for case in RIGHT if world > 1 or case[2] != "ddp"]
    pool.run(world, check_losses, cases)


OWN = "returned a loss of its own, or added a term.* model.loss_function = f .*model\\(\\*\\*batch\\) without labels"
CHANGED = "loss function with other labels than it was given"
REFUSED = {
    **{(name, how): OWN for name in ("own", "adds", "adds in place", "weights") for how in ("", "evaluated")},
    **{("adds experts", how): OWN for how in ("", "evaluated")},
    ("replaced", ""): OWN,
    ("replaced", "after"): OWN,
    ("predicts two", ""): CHANGED,
    ("masks", ""): CHANGED,
    ("function", "shift_labels"): "gets the unshifted labels; call the model with .*without shift_labels",
}


@on_ranks
def check_refused(group: ProcessGroup) -> None:
    for (name, how), words in REFUSED.items():
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
        with torch.inference_mode(how == "evaluated"), pytest.raises(ValueError, match=words):
            model(**batch)
    local = seqpar.hf.shard_batch(make_batch("plain"), group=group)
    labels, model = local.pop("labels"), seqpar.hf.parallelize(tiny("llama"), group=group)
    with pytest.raises(ValueError, match="Outside of a forward of the model, pass the logits as"):
        model.loss_function(logits=model(**local).logits, labels=labels, vocab_size=VOCAB)


def test_refused_losses(pool: Pool) -> None:
    pool.run(2, check_refused)


def computing(loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """A BERT whose forward, as if it were of transformers, computes ``loss`` itself."""

    def forward(self: Any, input_ids: Any = None, labels: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        logits = self.cls(self.bert(input_ids, position_ids=position_ids, **kwargs).last_hidden_state)
        found = None if labels is None else loss(logits, labels)  # and not self.loss_function(...)
        return MaskedLMOutput(loss=found, logits=logits)

    code = {**globals(), "__name__": "transformers.models.bert.modeling_bert"}
    of_transformers = types.FunctionType(forward.__code__, code, "forward", forward.__defaults__, forward.__closure__)
    cls: Any = type("Mine", (transformers.BertForMaskedLM,), {"forward": of_transformers})
    model = made(cls, "bert")
    for layer in model.bert.encoder.layer:
        layer.attention.self.key.bias.requires_grad_(False)  # as in ``tiny``
    return model


def mean(logits: Tensor, labels: Tensor, shift: int = 0, **options: Any) -> Tensor:
    logits = logits[:, : logits.shape[1] - shift]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, shift:].flatten(), **options)


IN_FORWARD: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "mean": (mean, True),
    "shifted": (partial(mean, shift=1), True),
    "smoothed": (partial(mean, label_smoothing=0.1), False),
    "weighted": (partial(mean, weight=torch.arange(VOCAB) / VOCAB), False),
    "another label that does not count": (partial(mean, ignore_index=0), False),
    "sum": (partial(mean, reduction="sum"), False),
    "two tokens further": (partial(mean, shift=2), False),
    "twice": (lambda logits, labels: mean(logits, labels) + mean(logits, labels), False),
    "multiple": (lambda logits, labels: 2 * mean(logits, labels), False),
    "other logits": (lambda logits, labels: mean(logits / 2, labels), False),
    "other labels": (lambda logits, labels: mean(logits, labels.masked_fill(labels % 2 == 0, -100)), False),
    "another function": (lambda logits, labels: logits.log_softmax(-1).mean(), False),
}


@pytest.mark.parametrize("what", IN_FORWARD)
def test_losses_in_forwards_of_transformers(what: str) -> None:
    """A cross-entropy without options is computed from all tokens. Any other loss is refused."""
    loss, right = IN_FORWARD[what]
    batch, model = make_batch("plain"), computing(loss)
    if not right:
        with pytest.raises(ValueError, match=r"Mine: its loss is its own"):
            seqpar.hf.parallelize(model, strategy="local")
        return
    expected = trained(model, batch)
    model.zero_grad()
    ours = trained(seqpar.hf.parallelize(model, strategy="local"), batch)
    check(ours, expected)


@pytest.mark.parametrize("later", [False, True])
def test_a_decorated_forward_of_transformers(later: bool) -> None:
    """The decorator would not see the loss, which is computed after the forward."""
    model = computing(mean)

    @wraps(model.forward)
    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = type(self).undecorated(self, *args, **kwargs)
        if output.loss is not None:
            output.loss = 2 * output.loss
        return output

    if later:
        seqpar.hf.parallelize(model, strategy="local")
    type(model).undecorated, type(model).forward = type(model).forward, doubled
    with pytest.raises(ValueError, match="the forward of Mine returned a loss of its own"):
        (model if later else seqpar.hf.parallelize(model, strategy="local"))(**make_batch("plain"))


def test_use_of_missing_logits_raises() -> None:
    model = seqpar.hf.parallelize(tiny("llama"), strategy="local")
    logits = model(**make_batch("plain")).logits
    assert repr(logits) == "MissingLogits()" and not logits.requires_grad
    uses = (lambda: logits.shape, lambda: logits[0], lambda: logits.argmax(-1), lambda: logits + 1, logits.cpu)
    for use in (*uses, lambda: logits.detach().float(), lambda: logits.clone().tolist()):
        with pytest.raises(ValueError, match=r"outputs='full' to seqpar.hf.parallelize or .*ParallelismConfig"):
            use()


@on_ranks
def noise(group: ProcessGroup, alpha: float) -> float:
    """The magnitude of NEFTune's noise on this rank."""
    activate_neftune = pytest.importorskip("transformers.integrations.neftune").activate_neftune
    model = seqpar.hf.parallelize(tiny("llama"), group=group)
    activate_neftune(model, alpha)
    embedding, found = model.get_input_embeddings(), []

    def compare(module: Any, args: Any, output: Tensor) -> None:
        found.append(float((output - F.embedding(args[0], module.weight)).abs().max()))

    embedding.register_forward_hook(compare)
    for _ in range(20):
        model(**make_batch("plain"))
    assert embedding.neftune_noise_alpha == alpha
    return max(found)


def test_noise_has_the_magnitude_of_one_device(pool: Pool) -> None:
    assert pool.run(2, noise, 3.0) == [pytest.approx(3.0 / (45 * 32) ** 0.5, rel=1e-2)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("items", [37, 1_000_003])
def test_gradients_are_scaled_in_float32(dtype: torch.dtype, items: int) -> None:
    """If the factor 1 / items were rounded to bfloat16, all gradients would have its rounding error."""
    torch.manual_seed(0)
    hidden = torch.randn(200, 32).to(dtype).requires_grad_()
    head = nn.Linear(32, 501, dtype=dtype)
    labels = torch.randint(501, (200,))
    (fused_cross_entropy(hidden, head, labels) / items).backward()

    exact = [x.detach().double().requires_grad_() for x in (hidden, head.weight, head.bias)]
    loss = F.cross_entropy(F.linear(*exact), labels, reduction="sum") / items
    expected = torch.autograd.grad(loss, exact)
    for x, reference in zip((hidden, head.weight, head.bias), expected, strict=True):
        assert x.grad is not None
        # The least-squares factor between the two: roundings of single elements average out.
        factor = (x.grad.double() * reference).sum() / reference.square().sum()
        assert abs(factor - 1) < (1e-3 if dtype == torch.bfloat16 else 1e-6)  # 1.8e-3 with the factor in bfloat16


def some_loss(log_probs: Tensor, seed: int = 0) -> Tensor:
    """A loss in which the log-probability of each token has a different weight."""
    return (log_probs * torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(seed))).mean()


def from_logits(kind: str, batch: dict[str, Tensor], model: Any = None, entropy: bool = False) -> Tensor:
    labels = batch["labels"][:, 1:]
    unlabelled = {name: x for name, x in batch.items() if name != "labels"}
    scores = (model or tiny(kind))(**unlabelled, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    found: Tensor = scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    if entropy:
        found = -(scores.exp() * scores).sum(-1)
    return found.masked_fill(labels == -100, 0)


@on_ranks
def log_probs(group: ProcessGroup, kind: str, how: str, batches: Any, wrapper: str) -> None:
    per_rank = batches == "per_rank"
    plain, model = tiny(kind), seqpar.hf.parallelize(tiny(kind), group=group, batches=batches, loss_chunk=5)
    by_rank = [make_batch(how, 45 + 7 * i, seed=i) for i in range(group.size() if per_rank else 1)]
    expected = [from_logits(kind, batch, plain) for batch in by_rank]
    torch.stack([some_loss(x, i) for i, x in enumerate(expected)]).mean().backward()
    at = group.rank() if per_rank else 0
    outer: Any = DistributedDataParallel(model, process_group=group) if wrapper == "ddp" else model
    ours = seqpar.hf.token_log_probs(outer, by_rank[at])
    some_loss(ours, at).backward()
    if wrapper == "none":
        seqpar.sync_gradients(model, group=group)
    assert_close(ours, expected[at])
    check_gradients(gradients(model), Result(0.0, gradients(plain), rounding_of(kind)))
    with torch.no_grad():
        again, entropies = seqpar.hf.token_log_probs(outer, by_rank[at], entropy=True)
        assert torch.equal(again, ours)
        assert_close(entropies, from_logits(kind, by_rank[at], plain, entropy=True))


@pytest.mark.parametrize(
    ("kind", "how", "world", "batches", "wrapper"),
    [
        ("gemma2", "packed", 4, "shared", "none"),
        ("qwen3_moe", "plain", 2, "shared", "ddp"),
        ("mistral", "right", 2, "per_rank", "none"),
        ("gpt2", "plain", 1, "shared", "none"),
    ],
)
def test_log_probs_and_their_gradients(pool: Pool, kind: str, how: str, world: int, batches: str, wrapper: str) -> None:
    pool.run(world, log_probs, kind, how, batches, wrapper)


@on_ranks
def other_log_probs(group: ProcessGroup) -> None:
    """Without labels, with shifted labels, of a batch from ``shard_batch``, and with ``outputs="local"``.

    Without labels, padding and the first token of each document get no label, however the documents are given.
    """
    batch, model = make_batch("packed"), seqpar.hf.parallelize(tiny("llama"), group=group)
    unlabelled = {name: x for name, x in batch.items() if name != "labels"}
    every = batch["input_ids"].masked_fill(batch["position_ids"] == 0, -100)
    full = F.pad(from_logits("llama", batch), (0, 1))
    local = seqpar.Sharding(45, "zigzag", group=group).shard(full)
    targets = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    alone = from_logits("llama", {**unlabelled, "labels": every})
    later, boundaries = batch["position_ids"] + 3, torch.tensor([0, 11, 12, 31, 45])
    left = {name: x for name, x in make_batch("left").items() if name != "labels"}
    first = left["attention_mask"].diff(prepend=torch.zeros(2, 1)) != 0
    padded = from_logits(
        "llama",
        {**left, "labels": left["input_ids"].masked_fill(first, -100).masked_fill(left["attention_mask"] == 0, -100)},
    )
    pairs = [
        (unlabelled, alone),
        ({"input_ids": batch["input_ids"], "cu_seq_lens": boundaries}, alone),
        (
            {**unlabelled, "position_ids": later},
            from_logits("llama", {**batch, "position_ids": later, "labels": every}),
        ),
        (left, padded),
        ({**unlabelled, "shift_labels": targets}, full),
        (seqpar.hf.shard_batch(batch, group=group), local),
    ]
    for given, expected in pairs:
        assert_close(seqpar.hf.token_log_probs(model, given), expected)
    sharing = seqpar.hf.parallelize(tiny("llama"), group=group, share_prompts=True)
    assert_close(seqpar.hf.token_log_probs(sharing, left), padded)
    missing = message_of(lambda: seqpar.hf.token_log_probs(sharing, {} if group.rank() else batch))
    assert missing.startswith("ValueError: batch" if group.rank() else "RuntimeError: rank(s) [1] of the group raised")
    model.lm_head.register_forward_hook(lambda *args: None)  # so that it computes all logits at once
    both = torch.stack(seqpar.hf.token_log_probs(model, batch, entropy=True))
    assert_close(both, torch.stack([from_logits("llama", batch, entropy=x) for x in (False, True)]))
    seqpar.hf.parallelize(seqpar.hf.restore(model), group=group, outputs="local")
    assert_close(seqpar.hf.token_log_probs(model, batch), local)
    with pytest.raises(ValueError, match="does not predict the next token"):
        seqpar.hf.token_log_probs(seqpar.hf.parallelize(tiny("bert"), group=group), unlabelled)


def test_log_probs_of_other_batches(pool: Pool) -> None:
    pool.run(2, other_log_probs)


def test_log_probs_hold_few_logits() -> None:
    """The logits of 512 tokens and 8,192 words would take 16 MiB, and so would their gradients."""
    model = seqpar.hf.parallelize(tiny("llama", vocab_size=8192, max_position_embeddings=512), loss_chunk=16)
    with LiveBytes() as live:
        seqpar.hf.token_log_probs(model, make_batch("plain", 512, 1)).sum().backward()
    assert live.peak < 14 << 20, live.peak


@on_ranks
def step_in_exact_sums(group: ProcessGroup, kind: str, how: str) -> Result:
    layout = "zigzag" if group.size() == 2 else "contiguous"
    model = parallel(group, kind, deterministic="invariant", layout=layout, loss_chunk=4, gradients="sum")
    with seqpar.invariant_layers(model, group=group, reduce="sum"):
        loss = model(**make_batch(how)).loss
        loss.backward()
    return Result(loss.item(), gradients(model))


@pytest.mark.thorough(kind=["qwen3", "gemma2", "gpt2", "bert"])
@pytest.mark.parametrize(
    ("kind", "how"), [("llama", "packed"), ("qwen3", "left"), ("gemma2", "plain"), ("gpt2", "right"), ("bert", "plain")]
)
def test_a_step_has_the_same_bits_on_any_number_of_ranks(pool: Pool, kind: str, how: str) -> None:
    """The ranks have other numbers of labels, and so of chunks of logits."""
    (first,) = pool.run(1, step_in_exact_sums, kind, how)
    check(first, one_device_of(kind, how))
    for ranks in (2, 3):
        for result in pool.run(ranks, step_in_exact_sums, kind, how):
            assert result.loss == first.loss
            unequal = [name for name, g in result.gradients.items() if not torch.equal(g, first.gradients[name])]
            assert not unequal, (ranks, unequal)
