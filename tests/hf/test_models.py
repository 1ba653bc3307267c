"""The loss and gradients of every model are one device's, with every strategy and packed and padded batches."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.module import register_module_forward_hook

pytest.importorskip("transformers")

import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast

import seqpar
import seqpar.hf
from seqpar.hf.inspection.trial import run_trial
from seqpar.hf.losses.logits import LazyLogits, MissingLogits
from seqpar.hf.mechanisms.key_values import has_latent_kv
from seqpar.hf.state import NAME

from ..pool import Pool, on_ranks
from .workers import (
    BATCHES,
    CONFIGS,
    MECHANISMS,
    PARALLELIZE,
    VOCAB,
    Case,
    Result,
    check,
    check_cases,
    check_loss,
    check_step,
    expected_of,
    gradients,
    make_batch,
    one_device,
    one_device_of,
    rounding_of,
    tiny,
    trained,
)

pytestmark = pytest.mark.slow
# The ring with every batch and model; every strategy with one model for each mechanism, and the batches in turn. On 4
# ranks, those whose messages differ from 2 ranks in more than their number, and the ring with one model.
RING: list[Case] = [
    *((kind, "ring-zigzag", how) for kind, how in product(MECHANISMS, BATCHES)),
    *((kind, "ring-zigzag", how) for kind in sorted({*CONFIGS} - {*MECHANISMS}) for how in ("left", "packed")),
]
STRATEGIES: dict[int, list[Case]] = {2: [], 4: []}
for i, kind in enumerate(MECHANISMS):
    for j, strategy in enumerate(PARALLELIZE):
        on_four = strategy in ("ulysses-contiguous", "hybrid-zigzag") or (kind, strategy) == ("llama", "ring-zigzag")
        if on_four or strategy != "ring-zigzag":
            STRATEGIES[4 if on_four else 2].append((kind, strategy, BATCHES[(i + j) % 4]))
CASES = [(2, kind, [case for case in RING + STRATEGIES[2] if case[0] == kind]) for kind in CONFIGS]
CASES += [(4, kind, [case for case in STRATEGIES[4] if case[0] == kind]) for kind in MECHANISMS]


@pytest.mark.thorough(world=[2], kind=["gemma2", "modernbert", "bert", "qwen3"])
@pytest.mark.thorough(world=[4], kind=["modernbert", "gpt_oss", "deepseek_v3", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize(("world", "kind", "cases"), CASES, ids=[f"{kind} on {world}" for world, kind, _ in CASES])
def test_loss_and_gradients(pool: Pool, world: int, kind: str, cases: list[Case]) -> None:
    pool.run(world, check_cases, expected_of(cases))


@on_ranks
def with_few_labels(group: ProcessGroup, batch: dict[str, Tensor], expected: Result) -> None:
    for chunk in (None, 2):
        model = seqpar.hf.parallelize(tiny("llama"), group=group, layout="contiguous", loss_chunk=chunk)
        check_step(group, model, seqpar.hf.shard_batch(batch, group=group, layout="contiguous"), expected)


def test_loss_without_labels_on_some_ranks(pool: Pool) -> None:
    """Only the first 6 tokens have labels, so that most ranks have none."""
    batch = make_batch("plain")
    batch["labels"][:, 6:] = -100
    pool.run(4, with_few_labels, batch, one_device("llama", batch))


@on_ranks
def with_padding_labels(group: ProcessGroup, batch: dict[str, Tensor], expected: Result) -> None:
    model = seqpar.hf.parallelize(tiny("llama"), group=group)
    check_step(group, model, seqpar.hf.shard_batch(batch, group=group), expected)


def test_loss_of_labels_next_to_padding(pool: Pool) -> None:
    """The last padding token predicts the first token, and its loss counts, as with transformers' SDPA."""
    batch = make_batch("left")
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    pool.run(2, with_padding_labels, batch, one_device("llama", batch, "sdpa"))


@on_ranks
def accumulated(group: ProcessGroup, kind: str) -> None:
    batches = [make_batch("plain", 45, seed=1), make_batch("packed", 45, seed=2)]
    batches[0]["labels"][:, 10:] = -100
    items = torch.tensor(sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches))
    reference, model = tiny(kind), seqpar.hf.parallelize(tiny(kind), group=group)
    losses = [0.0, 0.0]
    for batch in batches:
        local = seqpar.hf.shard_batch(batch, group=group)
        for i, loss in enumerate(
            (
                model(**local, num_items_in_batch=items).loss,
                reference(**batch, num_items_in_batch=items, use_cache=False).loss,
            )
        ):
            loss.backward()
            losses[i] += loss.item()
    seqpar.sync_gradients(model, group=group)
    check(Result(losses[0], gradients(model)), Result(losses[1], gradients(reference), rounding_of(kind)))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_gradient_accumulation(pool: Pool, kind: str) -> None:
    """Two accumulated batches with different numbers of labels, and ``num_items_in_batch`` for both together."""
    pool.run(2, accumulated, kind)


@on_ranks
def dropped(group: ProcessGroup) -> list[float]:
    """The loss of a sharded batch with attention dropout, twice, and without; then of three calls; and in eval mode."""
    model, batch = tiny("llama", attention_dropout=0.3), make_batch("plain")
    local = dict(seqpar.hf.shard_batch(batch, group=group, check=False))
    seqpar.hf.parallelize(model, group=group)
    losses = [model(**local).loss.item() for _ in range(2)]
    torch.manual_seed(5 if group.rank() == 0 else 6)
    before = torch.get_rng_state()
    losses += [model(**batch).loss.item() for _ in range(3)]
    seqpar.hf.shard_batch(batch, group=group)
    # Otherwise the next random numbers of a training loop, such as the order of rows, would depend on dropout.
    assert torch.equal(before, torch.get_rng_state())
    return [*losses, model.eval()(**local).loss.item()]


def test_dropout_of_attention_weights(pool: Pool) -> None:
    one, two, four = (pool.run(world, dropped)[0] for world in (1, 2, 4))
    assert two[0] == two[1]  # the batch's seed decides
    assert abs(two[0] - two[-1]) > 1e-3
    assert len({round(loss, 3) for loss in two[2:5]}) == 3  # each call drops other weights
    for losses in zip(one, two, four, strict=True):
        for loss in losses[1:]:
            check_loss(loss, losses[0])


@on_ranks
def with_rope_of_length(group: ProcessGroup, scaling: dict[str, Any]) -> None:
    changes: dict[str, Any] = {"rope_parameters": scaling, "max_position_embeddings": 16}
    batch = make_batch("packed")
    reference, model = tiny("llama", **changes), tiny("llama", **changes)
    expected = trained(reference, batch, use_cache=False)
    assert abs(tiny("llama")(**batch, use_cache=False).loss.item() - expected.loss) > 1e-4  # the scaling matters
    seqpar.hf.parallelize(model, group=group, layout="contiguous")
    check_step(group, model, seqpar.hf.shard_batch(batch, group=group, layout="contiguous"), expected)
    ids = batch["input_ids"]
    assert torch.equal(*(m.eval().generate(ids, max_new_tokens=8, do_sample=False) for m in (model, reference)))


ROPE = {"dynamic": {}, "longrope": {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}}


@pytest.mark.parametrize("rope_type", ROPE)
def test_rope_that_depends_on_the_length(pool: Pool, rope_type: str) -> None:
    """The frequencies depend on the largest position, which only one rank holds."""
    scaling = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 10000.0, **ROPE[rope_type]}
    if rope_type == "longrope":
        scaling["original_max_position_embeddings"] = 16
    pool.run(2, with_rope_of_length, scaling)


@on_ranks
def under_autocast(group: ProcessGroup, kind: str, exact: Result) -> tuple[float, float]:
    """Errors of one device's gradients and of ours under bfloat16 autocast, relative to float32."""
    batch, errors = make_batch("plain"), []
    for model in (tiny(kind, "sdpa" if kind == "llama" else "eager"), seqpar.hf.parallelize(tiny(kind), group=group)):
        is_ours = hasattr(model, "_seqpar")
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**(seqpar.hf.shard_batch(batch, group=group) if is_ours else batch)).loss
        loss.backward()
        if is_ours:
            seqpar.sync_gradients(model, group=group)
        square = sum(float((g - exact.gradients[n]).square().sum()) for n, g in gradients(model).items())
        errors.append(square**0.5)
        assert abs(loss.item() - exact.loss) < 0.05
    return errors[0], errors[1]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_autocast(pool: Pool, kind: str) -> None:
    for theirs, ours in pool.run(2, under_autocast, kind, one_device_of(kind, "plain")):
        assert ours < 1.2 * theirs


def local_model(kind: str = "llama") -> Any:
    return seqpar.hf.parallelize(tiny(kind), strategy="local")


def loss_of(model: Any, batch: str = "plain") -> float:
    loss: float = model(**seqpar.hf.shard_batch(make_batch(batch))).loss.item()
    return loss


def test_loss_computes_no_logits() -> None:
    model = local_model("gemma2")
    local = seqpar.hf.shard_batch(make_batch("plain"))
    with mock.patch.object(LazyLogits, "materialize", side_effect=AssertionError):
        output = model(**local)
    assert isinstance(output.logits, MissingLogits)
    check_loss(output.loss.item(), one_device_of("gemma2", "plain").loss)
    del local["labels"]
    assert model(**local).logits.shape == (2, 45, VOCAB)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "bert"])
def test_loss_as_a_tuple(kind: str) -> None:
    (loss,) = local_model(kind)(**seqpar.hf.shard_batch(make_batch("plain")), return_dict=False)
    check_loss(loss.item(), one_device_of(kind, "plain").loss)


def test_loss_of_materialized_logits() -> None:
    """A head that is not a plain linear layer computes all logits at once, and the loss is the same."""
    model = tiny("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    model.get_output_embeddings = lambda: model.lm_head
    seqpar.hf.parallelize(model, strategy="local")
    check_loss(loss_of(model), one_device_of("llama", "plain").loss)


class Doubled(Tensor):
    """A weight whose products are twice as large, as a quantized weight decides itself how it multiplies."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.linear:
            return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            return 2 * F.linear(*args, **(kwargs or {}))


def with_weight(head: nn.Linear) -> None:
    head.weight = nn.Parameter(head.weight.detach().as_subclass(Doubled))


def with_forward(head: Any) -> None:
    head.forward = lambda x: F.linear(3 * x, head.weight)


def in_place(head: nn.Module, args: Any, output: Tensor) -> None:
    output[..., 7] = -5.0
    output.mul_(0.5)


HEADS: dict[str, Callable[[Any], Any]] = {
    "hook": lambda head: head.register_forward_hook(lambda head, args, output: 0.5 * output.float()),
    "hook in place": lambda head: head.register_forward_hook(in_place),
    "hook with keywords": lambda head: head.register_forward_hook(
        lambda head, args, kwargs, output: output / 3, with_kwargs=True
    ),
    "hook before": lambda head: head.register_forward_pre_hook(lambda head, args: (2 * args[0],)),
    "hook of gradients": lambda head: head.register_full_backward_hook(lambda head, d_in, d_out: (3 * d_in[0],)),
    "hook before gradients": lambda head: head.register_full_backward_pre_hook(lambda head, d_out: (3 * d_out[0],)),
    "forward": with_forward,
    "weight": with_weight,
}


@pytest.mark.parametrize("how", HEADS)
def test_nothing_in_the_head_is_skipped(how: str) -> None:
    """Also if it was changed after ``parallelize``."""
    batch, model = make_batch("plain"), tiny("llama")
    HEADS[how](model.lm_head)
    expected = trained(model, batch)
    before, after = tiny("llama"), local_model("llama")
    HEADS[how](before.lm_head)
    HEADS[how](after.lm_head)
    for model in (seqpar.hf.parallelize(before, strategy="local"), after):
        check_step(None, model, batch, expected, how, sync=False)


def test_no_hook_of_a_score_is_skipped() -> None:
    def classifier() -> Any:
        return tiny("llama", auto=transformers.AutoModelForSequenceClassification, num_labels=3)

    batch = {"input_ids": make_batch("plain")["input_ids"], "labels": torch.tensor([2, 0])}
    model, before, after = classifier(), classifier(), seqpar.hf.parallelize(classifier(), strategy="local")
    for x in (model, before, after):
        x.score.register_forward_hook(lambda head, args, output: output / 3)
    expected = trained(model, batch)
    for x in (seqpar.hf.parallelize(before, strategy="local"), after):
        check_step(None, x, batch, expected, sync=False)


def test_no_global_hook_is_skipped() -> None:
    def halve(module: nn.Module, args: Any, output: Any) -> Any:
        return output / 2 if isinstance(module, nn.Linear) and module.out_features == VOCAB else None

    batch, model = make_batch("plain"), local_model("llama")
    handle = register_module_forward_hook(halve)
    try:
        check_step(None, model, batch, trained(tiny("llama"), batch), sync=False)
    finally:
        handle.remove()


def test_logits_that_the_model_changes_in_place() -> None:
    """The model's own forward may do so, between its output embedding and its loss."""
    reserved = Tensor([1.0 if i == 7 else 0.0 for i in range(VOCAB)]).bool()

    class Masked(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
            logits = self.lm_head(self.model(input_ids=input_ids, position_ids=position_ids, **kwargs)[0])
            logits.masked_fill_(reserved, -9.0)
            logits[..., 9] = -5.0
            return CausalLMOutputWithPast(loss=self.loss_function(logits / 2, labels, VOCAB, **kwargs))

    batch, model, ours = make_batch("plain"), tiny("llama"), tiny("llama")
    model.__class__ = ours.__class__ = Masked
    check_step(None, seqpar.hf.parallelize(ours, strategy="local"), batch, trained(model, batch), sync=False)


@pytest.mark.parametrize("kind", MECHANISMS)
def test_restore_undoes_parallelize(kind: str) -> None:
    batch = make_batch("plain")
    model = tiny(kind)
    config, before = model.config, copy.deepcopy(model.config.__dict__)
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    expected = tiny(kind)(**batch).loss
    seqpar.hf.parallelize(model, strategy="local")
    assert any(has_latent_kv(m) for m in model.modules()) == (kind == "deepseek_v3")
    assert model.config is not config and model.config._attn_implementation == NAME
    assert config._attn_implementation == "eager"
    model.config.use_cache = False
    assert seqpar.hf.restore(model) is model
    assert model.config is config and model.config.use_cache is False
    config.use_cache = before.get("use_cache", config.use_cache)
    assert config.__dict__.keys() - before.keys() <= {"use_cache"}
    assert attributes == {name: set(vars(m)) for name, m in model.named_modules()}
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert torch.equal(model(**batch).loss, expected)
    with pytest.raises(ValueError, match="not parallelized"):
        seqpar.hf.restore(model)


def test_restore_of_the_router_loss() -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as code

    original = code.load_balancing_loss_func
    first, second = local_model("qwen3_moe"), local_model("qwen3_moe")
    assert code.load_balancing_loss_func is not original
    seqpar.hf.restore(first)
    assert code.load_balancing_loss_func is not original
    seqpar.hf.restore(second)
    assert code.load_balancing_loss_func is original


def test_parallelize_leaves_models_of_the_same_config_alone() -> None:
    batch, first = make_batch("plain"), tiny("mistral")
    second = transformers.MistralForCausalLM(first.config)
    second.load_state_dict(first.state_dict())
    expected = second(**batch).loss
    seqpar.hf.parallelize(first, strategy="local")
    assert torch.equal(second(**batch).loss, expected)


def test_copy_is_parallelized() -> None:
    model = copy.deepcopy(local_model())
    with torch.no_grad():
        model.lm_head.weight.mul_(0)
    check_loss(loss_of(model), float(torch.tensor(float(VOCAB)).log()))
    with pytest.raises(ValueError, match="copy of a parallelized model"):
        seqpar.hf.restore(model)


def test_layers_without_an_index() -> None:
    model = tiny("bert")
    for layer in model.bert.encoder.layer:
        layer.attention.self.layer_idx = None
    seqpar.hf.parallelize(model, strategy="local")
    check_loss(loss_of(model), one_device_of("bert", "plain").loss)


def test_pickle_is_refused() -> None:
    with pytest.raises(TypeError, match=r"restore\(model\) first"):
        pickle.dumps(local_model())


def test_saved_config_does_not_name_the_attention(tmp_path: Any) -> None:
    local_model().save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("kind", CONFIGS)
def test_trial_run_changes_nothing(kind: str) -> None:
    """The trial run works for all of these models, on the meta device too, and finds all attention layers."""
    model = tiny(kind)

    def state() -> list[Any]:
        return [(name, vars(m).keys(), [*m._forward_hooks]) for name, m in model.named_modules()]

    before, parameters, random = state(), [*model.parameters()], torch.get_rng_state()
    trial = run_trial(model)
    assert (trial.mixer, trial.pooler, trial.error, len(trial.attention_modules)) == (
        None,
        None,
        None,
        2,
    )
    assert all(map(operator.is_, model.parameters(), parameters))
    assert before == state() and torch.equal(random, torch.get_rng_state())
    trial = run_trial(model.to("meta"))
    assert (trial.mixer, trial.error, len(trial.attention_modules)) == (None, None, 2)


@pytest.mark.parametrize(("kind", "kinds"), [("llama", 1), ("gemma2", 2), ("qwen3_moe", 1)])
def test_trial_run_skips_duplicate_layers(kind: str, kinds: int) -> None:
    """Rows that differ, twice; the last row with and without positions, with more tokens, with labels; or a failed run,
    twice."""
    changes = {"layer_types": ["sliding_attention", "full_attention"] * 3} if kind == "gemma2" else {}
    model = tiny(kind, num_hidden_layers=6, **changes)
    with mock.patch.object(type(model.model.layers[0]), "forward", autospec=True) as forward:
        forward.side_effect = lambda layer, hidden_states, **kwargs: hidden_states
        trial = run_trial(model)
    assert forward.call_count == kinds * (2 if trial.error else 6)
    assert {id(m) for m in run_trial(model).attention_modules} == {id(layer.self_attn) for layer in model.model.layers}


# Latent attention: the ranks send latents.
WIDTH, ROPE_WIDTH, LAYERS = 8, 4, 2


class NotPlain(nn.Linear):
    """A projection that is not a plain linear layer, as with LoRA."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@on_ranks
def latent_bytes(group: ProcessGroup, expected: float) -> None:
    batch = make_batch("plain", 48)

    def sent(model: Any) -> int:
        seqpar.hf.parallelize(model, group=group, strategy="context_parallel", layout="zigzag")
        with torch.no_grad(), seqpar.trace() as trace:
            loss = model(**seqpar.hf.shard_batch(batch, group=group, layout="zigzag")).loss
        check_loss(loss.item(), expected)
        return trace.bytes_sent

    rows = (group.size() - 1) / group.size() * 2 * 48  # of other ranks
    latents = sent(tiny("deepseek_v3"))
    # The causal mask needs fewer rows than all; an all-gather of every rank's rows does not.
    assert latents <= LAYERS * rows * (WIDTH + ROPE_WIDTH) * 4 * 1.05
    # Without a plain linear layer, keys and values are sent, 15 numbers of each of 4 heads.
    model = tiny("deepseek_v3")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = NotPlain
    assert sent(model) > 4 * latents


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_of_latent_attention(pool: Pool, world: int) -> None:
    pool.run(world, latent_bytes, one_device("deepseek_v3", make_batch("plain", 48)).loss)


@on_ranks
def with_invariant_bits(group: ProcessGroup, expected: dict[str, Result]) -> None:
    """With windows and sinks, and with latents, which each rank expands before it sends them."""
    options: dict[str, Any] = {"group": group, "layout": "zigzag", "deterministic": "invariant"}
    for kind, result in expected.items():
        for strategy in ("ring", "context_parallel"):
            model = seqpar.hf.parallelize(tiny(kind), strategy=strategy, **options)
            check_step(group, model, seqpar.hf.shard_batch(make_batch("packed"), group=group, layout="zigzag"), result)


def test_invariant_bits(pool: Pool) -> None:
    pool.run(
        2, with_invariant_bits, {kind: one_device(kind, make_batch("packed")) for kind in ("gpt_oss", "deepseek_v3")}
    )
