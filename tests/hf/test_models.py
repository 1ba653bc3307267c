"""The loss and gradients of every model are those of one device, with every strategy and packed and padded batches."""

from __future__ import annotations

import copy
import operator
import pickle
import subprocess
import sys
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

pytest.importorskip("transformers")

import transformers

import seqpar
import seqpar.hf
from seqpar.hf.loss import MissingLogits
from seqpar.hf.masks import no_mask
from seqpar.hf.state import NAME
from seqpar.hf.trial import run_trial

from ..pool import Pool, on_ranks
from .workers import MODELS, PARALLELIZE, VOCAB, gradients, make_batch, one_device, table, tiny, worst

pytestmark = pytest.mark.slow
LOSS, GRADIENT = 2e-5, 1e-3
BATCHES = ("plain", "packed", "left", "right")


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_gradients(pool: Pool, kind: str, world: int) -> None:
    """Every strategy with every kind of batch."""
    chosen = [(kind, strategy, how) for strategy, how in product(PARALLELIZE, BATCHES)]
    for errors in pool.run(world, table, chosen):
        for case, (loss, gradient) in zip(chosen, errors, strict=True):
            assert loss < LOSS and gradient < GRADIENT, (case, loss, gradient)


def test_a_model_whose_strategy_is_chosen(pool: Pool) -> None:
    """The strategy is chosen for each layer: gemma3 has layers with a window and layers without."""
    chosen = [("gemma3", "auto", how) for how in BATCHES]
    for errors in pool.run(4, table, chosen):
        for case, (loss, gradient) in zip(chosen, errors, strict=True):
            assert loss < LOSS and gradient < GRADIENT, (case, loss, gradient)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "bert_tokens", "llama4"])
def test_heads_and_chunks(pool: Pool, kind: str) -> None:
    """A language model without a loss type, heads with their own losses, and chunks that start at the first token."""
    chosen = [(kind, "ring-zigzag", how) for how in ("left", "packed")] + [(kind, "ulysses-contiguous", "plain")]
    for errors in pool.run(2, table, chosen):
        for case, (loss, gradient) in zip(chosen, errors, strict=True):
            assert loss < LOSS and gradient < GRADIENT, (case, loss, gradient)


def test_outputs_as_a_tuple() -> None:
    batch = make_batch("plain")
    for kind in ("llama", "bert"):
        expected = tiny(kind)(**batch).loss
        model = seqpar.hf.parallelize(tiny(kind), strategy="local")
        (loss,) = model(**seqpar.hf.shard_batch(batch), return_dict=False)
        assert abs(loss.item() - expected.item()) < LOSS


@on_ranks
def with_padding_labels(group: ProcessGroup) -> tuple[float, float]:
    """The last padding token predicts the first token, and its loss counts, as with transformers' SDPA."""
    batch = make_batch("left")
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    expected, grads = one_device("llama", batch, "sdpa")
    model = seqpar.hf.parallelize(tiny("llama"), group=group)
    loss = model(**seqpar.hf.shard_batch(batch, group=group)).loss
    loss.backward()
    seqpar.sync_gradients(model, group=group)
    return abs(loss.item() - expected), worst(gradients(model), grads)


def test_labels_next_to_padding(pool: Pool) -> None:
    for loss, gradient in pool.run(2, with_padding_labels):
        assert loss < LOSS and gradient < GRADIENT


@on_ranks
def with_few_labels(group: ProcessGroup, labelled: int) -> list[tuple[float, float]]:
    """Only the first tokens have labels, so that most ranks have none."""
    batch = make_batch("plain")
    batch["labels"][:, labelled:] = -100
    expected, grads = one_device("llama", batch)
    errors = []
    for chunk in (None, 2):
        model = seqpar.hf.parallelize(tiny("llama"), group=group, layout="contiguous", loss_chunk=chunk)
        loss = model(**seqpar.hf.shard_batch(batch, group=group, layout="contiguous")).loss
        loss.backward()
        seqpar.sync_gradients(model, group=group)
        errors.append((abs(loss.item() - expected), worst(gradients(model), grads)))
    return errors


def test_ranks_without_labels(pool: Pool) -> None:
    for errors in pool.run(4, with_few_labels, 6):
        for loss, gradient in errors:
            assert loss < LOSS and gradient < GRADIENT


@on_ranks
def accumulated(group: ProcessGroup, kind: str) -> tuple[float, float]:
    """Two accumulated batches with different numbers of labels, and ``num_items_in_batch`` for both together."""
    batches = [make_batch("plain", 45, seed=1), make_batch("packed", 45, seed=2)]
    batches[0]["labels"][:, 10:] = -100
    items = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    reference = tiny(kind)
    model = seqpar.hf.parallelize(tiny(kind), group=group)
    expected = total = 0.0
    for batch in batches:
        loss = reference(**batch, num_items_in_batch=torch.tensor(items), use_cache=False).loss
        loss.backward()
        expected += loss.item()
        local = seqpar.hf.shard_batch(batch, group=group)
        ours = model(**local, num_items_in_batch=torch.tensor(items)).loss
        ours.backward()
        total += ours.item()
    seqpar.sync_gradients(model, group=group)
    return abs(total - expected), worst(gradients(model), gradients(reference))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_gradient_accumulation(pool: Pool, kind: str) -> None:
    for loss, gradient in pool.run(2, accumulated, kind):
        assert loss < LOSS and gradient < GRADIENT


@on_ranks
def dropped(group: ProcessGroup) -> tuple[list[float], list[float]]:
    """The loss with attention dropout, computed twice, and the loss without dropout."""
    model = tiny("llama", attention_dropout=0.3)
    batch = make_batch("plain")
    alone = dict(seqpar.hf.shard_batch(batch, group=group, check=False))
    seqpar.hf.parallelize(model, group=group)
    ours = [model(**alone).loss.item() for _ in range(2)]
    seqpar.hf.restore(model)
    model.eval()
    seqpar.hf.parallelize(model, group=group)
    return ours, [model(**alone).loss.item()]


def test_dropout_of_attention_weights(pool: Pool) -> None:
    two, four = pool.run(2, dropped)[0], pool.run(4, dropped)[0]
    assert two[0][0] == two[0][1]  # the batch's seed decides
    assert abs(two[0][0] - two[1][0]) > 1e-3
    assert abs(two[0][0] - four[0][0]) < LOSS  # not the number of ranks


@on_ranks
def with_rope_of_length(group: ProcessGroup, scaling: dict[str, Any]) -> tuple[float, float, bool]:
    """The frequencies depend on the largest position, which only one rank holds."""
    changes: dict[str, Any] = {"rope_parameters": scaling, "max_position_embeddings": 16}
    batch = make_batch("packed")
    reference, model = tiny("llama", **changes), tiny("llama", **changes)
    plain = tiny("llama")(**batch, use_cache=False).loss
    expected = reference(**batch, use_cache=False).loss
    expected.backward()
    seqpar.hf.parallelize(model, group=group, layout="contiguous")
    loss = model(**seqpar.hf.shard_batch(batch, group=group, layout="contiguous")).loss
    loss.backward()
    seqpar.sync_gradients(model, group=group)
    assert abs(plain.item() - expected.item()) > 1e-4  # the scaling matters
    ids = batch["input_ids"]
    tokens = [m.eval().generate(ids, max_new_tokens=8, do_sample=False) for m in (model, reference)]
    same = torch.equal(*tokens)
    return abs(loss.item() - expected.item()), worst(gradients(model), gradients(reference)), same


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 16,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
        },
    ],
    ids=["dynamic", "longrope"],
)
def test_rope_that_follows_the_length(pool: Pool, scaling: dict[str, Any]) -> None:
    for loss, gradient, same in pool.run(2, with_rope_of_length, scaling):
        assert loss < LOSS and gradient < GRADIENT and same


@on_ranks
def under_autocast(group: ProcessGroup, kind: str) -> tuple[float, float]:
    """Errors of one device's gradients and of ours under bfloat16 autocast, relative to those in float32."""
    batch = make_batch("plain")
    exact, grads = one_device(kind, batch)
    errors = []
    for model in (tiny(kind, "sdpa" if kind == "llama" else "eager"), seqpar.hf.parallelize(tiny(kind), group=group)):
        ours = hasattr(model, "_seqpar")
        given = seqpar.hf.shard_batch(batch, group=group) if ours else batch
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**given).loss
        loss.backward()
        if ours:
            seqpar.sync_gradients(model, group=group)
        square = sum(float((g - grads[n]).square().sum()) for n, g in gradients(model).items())
        errors.append(square**0.5)
        assert abs(loss.item() - exact) < 0.05
    return errors[0], errors[1]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_autocast(pool: Pool, kind: str) -> None:
    for theirs, ours in pool.run(2, under_autocast, kind):
        assert ours < 1.2 * theirs


def test_a_loss_computes_no_logits() -> None:
    batch = make_batch("plain")
    model = seqpar.hf.parallelize(tiny("gemma2"), strategy="local")
    local = seqpar.hf.shard_batch(batch)
    widest = 0

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal widest
        widest = max(widest, output.numel())

    # Prepended, so that it sees the output of the output embedding itself.
    model.lm_head.register_forward_hook(watch, prepend=True)
    output = model(**local)
    assert widest == 0 and isinstance(output.logits, MissingLogits)
    assert abs(output.loss.item() - tiny("gemma2")(**batch).loss.item()) < LOSS
    del local["labels"]
    assert model(**local).logits.shape == (2, 45, VOCAB)
    as_tuple = model(**seqpar.hf.shard_batch(batch), return_dict=False)
    assert as_tuple[0].dim() == 0


def test_loss_of_materialized_logits() -> None:
    """A head that is not a plain linear layer computes all logits at once, and the loss is the same."""
    batch = make_batch("plain")
    model = tiny("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    model.get_output_embeddings = lambda: model.lm_head
    seqpar.hf.parallelize(model, strategy="local")
    loss = model(**seqpar.hf.shard_batch(batch)).loss
    assert abs(loss.item() - tiny("llama")(**batch).loss.item()) < LOSS


@pytest.mark.parametrize("kind", MODELS)
def test_restore_undoes_all(kind: str) -> None:
    batch = make_batch("plain")
    model, twin = tiny(kind), tiny(kind)
    config, before = model.config, copy.deepcopy(model.config.__dict__)
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    expected = twin(**batch).loss
    seqpar.hf.parallelize(model, strategy="local")
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


def test_router_loss_function_is_put_back() -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as code

    original = code.load_balancing_loss_func
    first = seqpar.hf.parallelize(tiny("qwen3_moe"), strategy="local")
    second = seqpar.hf.parallelize(tiny("qwen3_moe"), strategy="local")
    assert code.load_balancing_loss_func is not original
    seqpar.hf.restore(first)
    assert code.load_balancing_loss_func is not original
    seqpar.hf.restore(second)
    assert code.load_balancing_loss_func is original


def test_models_of_one_config_are_told_apart() -> None:
    batch = make_batch("plain")
    first = tiny("mistral")
    second = transformers.MistralForCausalLM(first.config)
    second.load_state_dict(first.state_dict())
    expected = second(**batch).loss
    seqpar.hf.parallelize(first, strategy="local")
    assert torch.equal(second(**batch).loss, expected)


def test_a_copy_stays_parallelized() -> None:
    batch = make_batch("plain")
    model = copy.deepcopy(seqpar.hf.parallelize(tiny("llama"), strategy="local"))
    with torch.no_grad():
        model.lm_head.weight.mul_(0)
    loss = model(**seqpar.hf.shard_batch(batch)).loss
    assert abs(loss.item() - float(torch.tensor(float(VOCAB)).log())) < LOSS
    with pytest.raises(ValueError, match="copy of a parallelized model"):
        seqpar.hf.restore(model)


def test_layers_without_an_index() -> None:
    batch = make_batch("plain")
    model = tiny("bert")
    for layer in model.bert.encoder.layer:
        layer.attention.self.layer_idx = None
    expected = model(**batch).loss
    seqpar.hf.parallelize(model, strategy="local")
    assert abs(model(**seqpar.hf.shard_batch(batch)).loss.item() - expected.item()) < LOSS


@on_ranks
def pickled(group: ProcessGroup) -> str:
    with pytest.raises(TypeError) as caught:
        pickle.dumps(seqpar.hf.parallelize(tiny("llama"), group=group))
    return str(caught.value)


def test_pickling_is_refused(pool: Pool) -> None:
    assert all("restore(model) first" in words for words in pool.run(2, pickled))


def test_padding_without_a_shard_is_refused() -> None:
    mask = torch.ones(2, 5, dtype=torch.bool)
    assert no_mask(2, 5, attention_mask=mask) is None
    mask[0, 0] = False
    with pytest.raises(ValueError, match="attention_mask: it has padding"):
        no_mask(2, 5, attention_mask=mask)


def test_queries_scaled_by_place_are_refused() -> None:
    model = seqpar.hf.parallelize(tiny("llama4", floor_scale=45), strategy="local")
    with pytest.raises(ValueError, match=r"layer 1 .* attn_temperature_tuning"):
        model(**seqpar.hf.shard_batch(make_batch("plain", 45)))
    model(**seqpar.hf.shard_batch(make_batch("plain", 44)))


def test_saved_config_names_no_patch(tmp_path: Any) -> None:
    model = seqpar.hf.parallelize(tiny("llama"), strategy="local")
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()


class _Own(nn.Module):
    """A model whose attention does not use the interface."""

    def forward(self, x: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return x, None


class SlowAttention(_Own):
    pass


def refused(change: str) -> Any:
    model = tiny("llama")
    if change == "own attention":
        model.model.layers[1].self_attn = SlowAttention()
    elif change == "convolution":
        model.model.layers[0].mlp.conv = nn.Conv1d(4, 4, 3)
    elif change == "linear layers":
        model.config.layer_types = ["full_attention", "linear_attention"]
    elif change == "pooled head":
        return transformers.GPT2ForSequenceClassification(tiny("gpt2").config)
    elif change == "convolution inside":
        model.model.layers[0].self_attn.conv = nn.Conv1d(4, 4, 3)
    elif change == "sentence pairs":
        return transformers.BertForNextSentencePrediction(tiny("bert").config)
    elif change == "pooler":
        return transformers.BertModel(tiny("bert").config)
    elif change == "neighbours":
        return transformers.MobileBertForMaskedLM(
            transformers.MobileBertConfig(
                vocab_size=VOCAB, hidden_size=16, embedding_size=16, intermediate_size=16, num_hidden_layers=1,
                num_attention_heads=2, intra_bottleneck_size=16,
            )
        )  # fmt: skip
    elif change == "positions":
        return transformers.OPTForCausalLM(
            transformers.OPTConfig(
                vocab_size=VOCAB, hidden_size=16, word_embed_proj_dim=16, ffn_dim=16, num_hidden_layers=1,
                num_attention_heads=2,
            )
        )  # fmt: skip
    elif change == "two sequences":
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
        )
    elif change == "state space":
        return transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
        )
    return model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("own attention", r"'model.layers.1.self_attn' \(SlowAttention\) mixes tokens"),
        ("convolution", r"'model.layers.0.mlp.conv' \(Conv1d\) mixes tokens"),
        ("convolution inside", r"'model.layers.0.self_attn.conv' \(Conv1d\) mixes tokens"),
        ("sentence pairs", "its loss is its own"),
        ("pooler", r"'pooler' \(BertPooler\) pools the tokens in its input"),
        ("neighbours", r"'mobilebert.embeddings' \(MobileBertEmbeddings\) mixes tokens"),
        ("positions", r"'model.decoder' \(OPTDecoder\) counts the positions"),
        ("linear layers", "layer 1 is of type 'linear_attention'"),
        ("pooled head", "its loss is ForSequenceClassification"),
        ("two sequences", "encoder-decoder"),
        ("state space", r"\(MambaMixer\) mixes tokens"),
    ],
)
def test_refused_models(change: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        seqpar.hf.parallelize(refused(change), strategy="local")


class Blend(nn.Module):
    """A layer that mixes the tokens of ``[batch, seq, hidden]`` as ``how`` says. No list contains its class name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inner = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.zeros(()))  # at first it changes nothing

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        y = self.inner(x)
        if self.how == "cumulative":
            y = y.cumsum(1)
        elif self.how == "shift":
            y = F.pad(y, (0, 0, 1, 0))[:, :-1]
        elif self.how == "fft":
            y = torch.fft.fft(y, dim=1).real
        elif self.how == "unfold":
            y = F.pad(y, (0, 0, 3, 0)).unfold(1, 4, 1).mean(-1)
        elif self.how == "mean":
            y = y + y.mean(1, keepdim=True)
        return x + self.scale * y


def with_blend(how: str, where: str, device: str = "cpu") -> Any:
    model = tiny("llama").to(device)
    layer = model.model.layers[1]
    if where == "mlp":
        layer.mlp = Blend(how)
    elif where == "before the keys":
        layer.self_attn.k_proj = nn.Sequential(Blend(how), layer.self_attn.k_proj)
    elif where == "instead of attention":
        blend = Blend(how)  # not part of the model: its weights stay what they are
        nn.init.ones_(blend.scale)
        layer.self_attn.forward = lambda hidden_states, **kwargs: (blend(hidden_states), None)
    return model.to(device)


@pytest.mark.parametrize(
    ("how", "where", "name"),
    [
        ("cumulative", "mlp", r"'model.layers.1.mlp' \(Blend\)"),
        ("shift", "mlp", r"'model.layers.1.mlp' \(Blend\)"),
        ("fft", "mlp", r"'model.layers.1.mlp' \(Blend\)"),
        ("unfold", "mlp", r"'model.layers.1.mlp' \(Blend\)"),
        ("mean", "mlp", r"'model.layers.1.mlp' \(Blend\)"),
        ("cumulative", "before the keys", r"'model.layers.1.self_attn.k_proj.0' \(Blend\)"),
        ("cumulative", "instead of attention", r"'model.layers.1.self_attn' \(LlamaAttention\)"),
    ],
)
def test_a_mixer_with_an_unlisted_name_is_refused(how: str, where: str, name: str) -> None:
    """The layer is found by its outputs, although its name is not known and its weights have no effect yet."""
    with pytest.raises(ValueError, match=f"layer {name} mixes tokens: in a trial run"):
        seqpar.hf.parallelize(with_blend(how, where), strategy="local")
    seqpar.hf.parallelize(with_blend("none", where if where != "instead of attention" else "mlp"), strategy="local")


def test_a_mixer_is_found_without_weights() -> None:
    with pytest.raises(ValueError, match=r"'model.layers.1.mlp' \(Blend\) mixes tokens"):
        seqpar.hf.parallelize(with_blend("shift", "mlp", "meta"), strategy="local")


@pytest.mark.parametrize("kind", [*MODELS, "gpt2", "bert", "llama4"])
def test_the_trial_run_changes_nothing(kind: str) -> None:
    """The trial run works for all of these models, on the meta device too, and finds all attention layers."""
    model = tiny(kind)
    before = {name: (dict(vars(m)), [*m._forward_hooks], [*m.parameters()]) for name, m in model.named_modules()}
    random = torch.get_rng_state()
    trace = run_trial(model)
    assert (trace.mixes, trace.pools, trace.error, len(trace.attends)) == (None, None, None, 2)
    after = {name: (dict(vars(m)), [*m._forward_hooks], [*m.parameters()]) for name, m in model.named_modules()}
    assert all(map(operator.is_, model.parameters(), before[""][2]))
    assert [x[0].keys() for x in before.values()] == [x[0].keys() for x in after.values()]
    assert [x[1] for x in before.values()] == [x[1] for x in after.values()]
    assert torch.equal(random, torch.get_rng_state())
    trace = run_trial(model.to("meta"))
    assert (trace.mixes, trace.error, len(trace.attends)) == (None, None, 2)


@pytest.mark.parametrize(("kind", "run"), [("llama", 1), ("gemma2", 2), ("qwen3_moe", 1)])
def test_of_layers_that_are_alike_the_trial_runs_one(kind: str, run: int) -> None:
    changes = {"layer_types": ["sliding_attention", "full_attention"] * 3} if kind == "gemma2" else {}
    model = tiny(kind, num_hidden_layers=6, **changes)
    with mock.patch.object(type(model.model.layers[0]), "forward", autospec=True) as forward:
        forward.side_effect = lambda layer, hidden_states, **kwargs: hidden_states
        run_trial(model)
    assert forward.call_count == run
    trace = run_trial(model)
    assert {id(m) for m in trace.attends} == {id(layer.self_attn) for layer in model.model.layers}


def test_a_model_that_cannot_be_tried_warns() -> None:
    model = tiny("llama")
    model.model.layers[0].mlp.forward = lambda x: x.view(1, 2, 3)
    with pytest.warns(UserWarning, match=r"trial run on a few tokens failed .*seqpar\.hf\.verify"):
        seqpar.hf.parallelize(model, strategy="local")


def test_seqpar_itself_does_without_transformers() -> None:
    code = "import sys, seqpar; sys.exit('transformers' in sys.modules or 'accelerate' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_refused_calls() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="strategy='rong': did you mean 'ring'"):
        seqpar.hf.parallelize(model, strategy="rong")
    with pytest.raises(ValueError, match="layout='zigzack'"):
        seqpar.hf.parallelize(model, layout="zigzack")
    with pytest.raises(ValueError, match="gradients='sum'"):
        seqpar.hf.parallelize(model, gradients="sum")
    with pytest.raises(TypeError, match="Linear: it holds no transformers model"):
        seqpar.hf.parallelize(nn.Linear(2, 2))
    seqpar.hf.parallelize(model, strategy="local")
    with pytest.raises(ValueError, match="parallelized already"):
        seqpar.hf.parallelize(model, strategy="local")
    with pytest.raises(ValueError, match="outputs='all'"):
        seqpar.hf.parallelize(tiny("llama"), outputs="all")
    batch = make_batch("plain")
    with pytest.raises(ValueError, match="past_key_values: with labels"):
        model(**batch, past_key_values=transformers.DynamicCache())
    with pytest.raises(ValueError, match="logits_to_keep=1: with labels"):
        model(**batch, logits_to_keep=1)
    local = seqpar.hf.shard_batch(batch, layout="striped")
    with pytest.raises(ValueError, match=r"sharded with layout='striped'.* parallelized with layout='zigzag'"):
        model(**local)
    local = seqpar.hf.shard_batch(batch)
    dense = torch.zeros(2, 1, 45, 45)
    with pytest.raises(ValueError, match="dense score terms are not supported"):
        model(**local, attention_mask=dense)
    with pytest.raises(ValueError, match="logits_to_keep=1: with labels"):
        model(**local, logits_to_keep=1)
    labels = local.pop("labels")
    local["seqpar"].num_items = None
    with pytest.raises(ValueError, match="they were not sharded by"):
        model(**local, labels=labels)
