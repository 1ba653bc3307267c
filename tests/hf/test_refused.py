"""What is not supported raises an error that says why and what to change; what is supported raises none."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial, wraps
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention.flex_attention import create_block_mask

pytest.importorskip("transformers")

import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    and_masks,
    create_causal_mask,
    create_sliding_window_causal_mask,
    eager_mask,
    packed_sequence_mask_function,
    sdpa_mask,
)

import seqpar
import seqpar.hf
from seqpar.hf.batch import BatchCut, shard_for_rank
from seqpar.hf.calls.attention import no_mask
from seqpar.ranks.rendezvous import missing_message

from ..pool import Pool, on_ranks
from ..reference import assert_close
from .workers import VOCAB, Result, check_loss, check_step, make_batch, one_device_of, tiny, trained

pytestmark = pytest.mark.slow


def parallel(model: Any = None, **options: Any) -> Any:
    return seqpar.hf.parallelize(tiny("llama") if model is None else model, strategy="local", **options)


def with_module(path: str, module: nn.Module) -> Any:
    """A parallelized Llama, in which a module was replaced or added before."""
    model = tiny("llama")
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
    return parallel(model)


class SlowAttention(nn.Module):
    """Attention that does not use transformers' interface."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return hidden_states.cumsum(1), None


def small(name: str, config: str, **arguments: Any) -> Any:
    """A parallelized model of a class of transformers."""
    config_class = getattr(transformers, f"{config}Config")
    return parallel(getattr(transformers, name)(config_class(vocab_size=VOCAB, **arguments)))


def with_layerdrop(probability: float, after: float | None = None) -> Any:
    model = tiny("llama").train()
    model.model.layerdrop = probability
    parallel(model)
    if after is not None:
        model.model.layerdrop = after
        call(model)
    return model


def with_loss(arguments: Callable[[Tensor], tuple[Any, ...]], **options: Any) -> Any:
    """The output of a model whose forward calls ``loss_function`` with further ``arguments(labels)``."""

    class CallsLoss(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
            output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
            output["loss"] = self.loss_function(output.logits, labels, VOCAB, *arguments(labels), **options)
            return output

    model = tiny("llama")
    model.__class__ = CallsLoss
    return call(parallel(model))


def test_the_arguments_of_the_loss_function() -> None:
    loss, divided = with_loss(lambda labels: ()).loss.item(), with_loss(lambda labels: (7,)).loss.item()
    labels = make_batch("plain")["labels"]
    assert divided == pytest.approx(loss * int((labels[:, 1:] != -100).sum()) / 7)


def with_linear_layers() -> Any:
    model = tiny("llama")
    model.config.layer_types = ["full_attention", "linear_attention"]
    return parallel(model)


MOBILEBERT: dict[str, Any] = {
    "hidden_size": 16, "embedding_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intra_bottleneck_size": 16,
}  # fmt: skip
OPT: dict[str, Any] = {
    "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
CLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


def adapted(method: str, before: bool = True) -> Any:
    peft, task = pytest.importorskip("peft"), {"task_type": "CAUSAL_LM"}
    config = {
        "activated LoRA": lambda: peft.LoraConfig(**task, alora_invocation_tokens=[5, 6]),
        "prefix tuning": lambda: peft.PrefixTuningConfig(**task, num_virtual_tokens=3),
        "adaption prompt": lambda: peft.AdaptionPromptConfig(**task, adapter_len=3, adapter_layers=1),
        "CPT": lambda: peft.CPTConfig(**task, cpt_token_ids=[3, 4], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 4]),
    }[method]()
    model = tiny("llama")
    return parallel(peft.get_peft_model(model, config)) if before else peft.get_peft_model(parallel(model), config)


class Float8Linear(nn.Linear):
    """As torchao's: it rounds input and weight to float8 after dividing them by one scale, or by one for each row."""

    rows = False

    def forward(self, input: Tensor) -> Tensor:
        def rounded(x: Tensor) -> Tensor:
            largest = x.abs().amax(-1, keepdim=True) if self.rows else x.abs().max()
            scale = largest.clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
            return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale

        return F.linear(rounded(input), rounded(self.weight), self.bias)


def in_float8(recipe: str) -> Any:
    model = tiny("llama")
    for layer in model.model.layers:
        for module in layer.modules():
            if type(module) is nn.Linear:
                module.__class__ = Float8Linear
                vars(module)["rows"] = recipe == "rowwise"
    return model


def test_float8_with_a_scale_per_row() -> None:
    """As a linear layer of any kind that computes each token by itself."""
    ids = torch.arange(3, 27)[None]
    with torch.no_grad():
        ours, theirs = (m(input_ids=ids).logits for m in (parallel(in_float8("rowwise")), in_float8("rowwise")))
    torch.testing.assert_close(ours, theirs)


def generated(model: Any, padded: bool = False, **options: Any) -> None:
    ids, mask = make_batch("plain")["input_ids"][:, :9], torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = int(not padded)
    parallel(model).generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0, **options)


def checkpointed() -> Any:
    model = tiny("llama")
    model.gradient_checkpointing_enable()
    return model


class Wrapper(nn.Module):
    """A module around a model that returns the result of ``output``."""

    def __init__(self, output: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.output = parallel(), output

    def forward(self, **kwargs: Any) -> Any:
        return self.output(self.inner(**kwargs))


def decoder_alone(padded: bool) -> None:
    batch = make_batch("left" if padded else "plain")
    parallel().get_decoder()(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"))


def call(model: Any = None, **arguments: Any) -> Any:
    """A call with a full batch."""
    return (parallel() if model is None else model)(**{**make_batch("plain"), **arguments})


def call_sharded(layout: Any = "zigzag", **arguments: Any) -> Any:
    return parallel()(**seqpar.hf.shard_batch(make_batch("plain"), layout=layout), **arguments)


def call_without_items() -> Any:
    local = seqpar.hf.shard_batch(make_batch("plain"))
    local["seqpar"].num_items = None
    return parallel()(**local)


def llama4_of_length(length: int) -> Any:
    return parallel(tiny("llama4", floor_scale=45))(**seqpar.hf.shard_batch(make_batch("plain", length)))


def other_implementation() -> Any:
    model = parallel()
    model.set_attn_implementation("sdpa")
    return call(model)


def mask_of_padding() -> None:
    no_mask(2, 5, attention_mask=torch.ones(2, 5, dtype=torch.bool))
    no_mask(2, 5, attention_mask=torch.zeros(2, 5, dtype=torch.bool))


def scaled_attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
    output, weights = sdpa_attention_forward(module, q, k, v, *args, **kwargs)
    return 3 * output, weights


@wraps(sdpa_mask)
def no_first_token(*args: Any, **kwargs: Any) -> Any:
    kwargs["mask_function"] = and_masks(kwargs["mask_function"], lambda row, head, q, k: (k > 0) | (q == 0))
    return sdpa_mask(*args, **kwargs)


def with_functions(name: str, attention: Any = None, mask: Any = None) -> Any:
    """A parallelized model, after these functions were registered."""
    functions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    with (
        mock.patch.dict(functions, {} if attention is None else {name: attention}),
        mock.patch.dict(masks, {} if mask is None else {name: mask}),
    ):
        model = tiny("llama")
        model.set_attn_implementation(name)
        return parallel(model)


def with_default(function: Any) -> Any:
    """A parallelized model whose eager attention is ``function``."""
    with mock.patch("transformers.models.llama.modeling_llama.eager_attention_forward", function):
        return parallel()


ONES = torch.ones(2, 8, dtype=torch.long)


def shard(**batch: Any) -> Any:
    return seqpar.hf.shard_batch({"input_ids": ONES, **batch})


HOLES = torch.tensor([[1, 0, 1] + [1] * 5] * 2)
INSIDE = "'model.layers.0.self_attn.conv'"
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    # models
    "own attention": (
        lambda: with_module("model.layers.1.self_attn", SlowAttention()),
        r"'model.layers.1.self_attn' \(SlowAttention\) mixes tokens",
    ),
    "convolution": (
        lambda: with_module("model.layers.0.mlp.conv", nn.Conv1d(4, 4, 3)),
        r"'model.layers.0.mlp.conv' \(Conv1d\) mixes tokens",
    ),
    "convolution inside": (
        lambda: with_module("model.layers.0.self_attn.conv", nn.Conv1d(4, 4, 3)), INSIDE + r" \(Conv1d\) mixes tokens"
    ),
    "layerdrop, set later": (lambda: with_layerdrop(0.0, 0.1), r"a layer \(LlamaModel\) drops whole .* layerdrop=0.1"),
    "layerdrop": (
        lambda: with_layerdrop(0.1), r"layer 'model' \(LlamaModel\) drops whole layers .* set its layerdrop to 0"
    ),
    "linear layers": (with_linear_layers, "layer 1 is of type 'linear_attention'"),
    "pooled head": (
        lambda: parallel(transformers.GPT2ForSequenceClassification(tiny("gpt2", pad_token_id=0).config)),
        "its loss is ForSequenceClassification",
    ),
    "sentence pairs": (
        lambda: parallel(transformers.BertForNextSentencePrediction(tiny("bert").config)), "its loss is its own"
    ),
    "pooler": (
        lambda: parallel(transformers.BertModel(tiny("bert").config)),
        r"'pooler' \(BertPooler\) pools the tokens in its input, and a rank has only some of the tokens",
    ),
    "neighbours": (
        lambda: small("MobileBertForMaskedLM", "MobileBert", **MOBILEBERT),
        r"'mobilebert.embeddings' \(MobileBertEmbeddings\) mixes tokens",
    ),
    "positions": (
        lambda: small("OPTForCausalLM", "OPT", **OPT), "OPTForCausalLM: without position_ids it counts"
    ),
    "relative bias": (
        lambda: small("T5ForConditionalGeneration", "T5", d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2),
        r"SelfAttention' \(T5Attention\) adds a trained bias of the distance of two tokens to its scores",
    ),
    "state space": (
        lambda: small("MambaForCausalLM", "Mamba", hidden_size=16, num_hidden_layers=1, state_size=4),
        "takes no position_ids",
    ),
    "two towers": (
        lambda: parallel(transformers.CLIPModel(transformers.CLIPConfig(text_config=CLIP, vision_config=CLIP))),
        "CLIPModel: it has a vision_config, but does not merge images or sound into",
    ),
    # adapters
    "activated LoRA": (
        lambda: adapted("activated LoRA"), r"'default' is peft's activated LoRA .* use LoRA, prompt tun"
    ),
    "activated LoRA later": (
        lambda: call(adapted("activated LoRA", before=False)), r"'default' is peft's activated LoRA"
    ),
    "prefix tuning": (
        lambda: adapted("prefix tuning"), r"PREFIX_TUNING, which cannot be sharded: it hands every layer"
    ),
    "prefix tuning later": (
        lambda: call(adapted("prefix tuning", before=False)),
        r"cache: with labels .*peft's prefix tuning passes one: use LoRA or prompt tuning",
    ),
    "adaption prompt": (
        lambda: adapted("adaption prompt"), r"ADAPTION_PROMPT, which cannot be sharded: its layers attend"
    ),
    "CPT": (lambda: adapted("CPT"), r"CPT, which cannot be sharded: its loss is its own"),
    # arguments of parallelize and verify
    "strategy": (
        lambda: seqpar.hf.parallelize(tiny("llama"), strategy="rong"), "strategy='rong': did you mean 'ring'"
    ),
    "layout": (lambda: parallel(layout="zigzack"), "layout='zigzack'"),
    "gradients": (lambda: parallel(gradients="auto"), "gradients='auto'"),
    "outputs": (lambda: parallel(outputs="all"), "outputs='all'"),
    "batches": (lambda: parallel(batches="mine"), "batches='mine'"),
    "outputs and batches": (lambda: parallel(batches="per_rank", outputs="local"), "outputs='local'"),
    "no model": (lambda: parallel(nn.Linear(2, 2)), "Linear: it holds no transformers model"),
    "twice": (lambda: parallel(parallel()), "parallelized already"),
    "verify: not parallelized": (lambda: seqpar.hf.verify(tiny("llama"), make_batch("plain")), "not parallelized"),
    "verify: sharded": (
        lambda: seqpar.hf.verify(parallel(), seqpar.hf.shard_batch(make_batch("plain"))), "sharded already"
    ),
    "verify: no batch": (lambda: seqpar.hf.verify(parallel(), [1]), "expected a dict"),
    "verify: no loss": (
        lambda: seqpar.hf.verify(Wrapper(lambda output: {"score": 1.0}), make_batch("plain")),
        r"Wrapper: its output has no loss .* or give verify the transformers model inside it",
    ),
    # calls
    "cache with labels": (
        lambda: call(past_key_values=transformers.DynamicCache()), "cache: with labels"
    ),
    "some logits with labels": (lambda: call(logits_to_keep=1), "logits_to_keep=1: with labels"),
    "some logits with labels, sharded": (lambda: call_sharded(logits_to_keep=1), "logits_to_keep=1: with labels"),
    "another layout": (
        lambda: call_sharded("striped"), r"sharded with layout='striped'.* parallelized with layout='zigzag'"
    ),
    "dense mask": (
        lambda: call_sharded(attention_mask=torch.zeros(2, 1, 45, 45)), "dense score terms are not supported"
    ),
    "labels of others": (call_without_items, "they were not sharded by"),
    "generate in train mode": (
        lambda: generated(checkpointed()), r"call model.eval\(\) or model.activation_checkpointing_d"
    ),
    "static cache": (
        lambda: generated(tiny("llama").eval(), cache_implementation="static"),
        "only a dynamic cache can be sharded; leave cache_implementation out",
    ),
    "static cache, padded": (
        lambda: generated(tiny("llama").eval(), padded=True, cache_implementation="static"),
        "a static cache cannot be sharded; leave cache_implementation out",
    ),
    "the decoder": (
        lambda: decoder_alone(False),
        r"without the hooks of parallelize; call the model that was given to parallelize, as model\(...\)",
    ),
    "the decoder, padded": (lambda: decoder_alone(True), r"it has padding, but the forward ran without the hooks"),
    "another attention": (
        other_implementation, r"'sdpa': it was set after parallelize, .* call seqpar.hf.restore\(model\)"
    ),
    "one scale per tensor": (
        lambda: parallel(in_float8("tensorwise")),
        r"q_proj' \(Float8Linear\) scales all tokens .*recipe_name\('rowwise'\)",
    ),
    "own function": (
        lambda: with_functions("mine", scaled_attention, eager_mask), r"attn_implementation 'mine' is scaled_attention"
    ),
    "own function under a known name": (
        lambda: with_functions("sdpa", scaled_attention), r"attn_implementation 'sdpa' is scaled_attention, .* before"
    ),
    "own function for eager": (lambda: with_functions("eager", scaled_attention), "'eager' is scaled_attention"),
    "own eager function": (lambda: with_default(scaled_attention), "'eager' is scaled_attention"),
    "own mask": (
        lambda: with_functions("mine", sdpa_attention_forward, no_first_token),
        "the mask of its attn_implementation 'mine' is sdpa_mask",
    ),
    "own mask under a known name": (
        lambda: with_functions("sdpa", mask=no_first_token), "the mask of its attn_implementation 'sdpa'"
    ),
    "no mask": (lambda: with_functions("mine", sdpa_attention_forward), "implementation 'mine' is None, not one of"),
    "scaled queries": (
        lambda: llama4_of_length(45),
        r"a row of 45 tokens: layer 'model.layers.1.self_attn' \(Llama4TextAttention\) counts .* more than 44 tokens",
    ),
    "padding without a shard": (mask_of_padding, "attention_mask: it has padding"),
    "is_causal": (lambda: call(is_causal=False), "is_causal: some of .* leave it out here"),
    "a window of the call": (lambda: call_sharded(sliding_window=3), "sliding_window: some of"),
    "another label that does not count": (
        lambda: call(ignore_index=0), r"ignore_index=0: .* -100 here, .*; pass labels.masked_fill\(labels == 0, -100\)"
    ),
    "another label, in the forward": (lambda: with_loss(lambda x: (), ignore_index=0), "ignore_index=0: "),
    "another label, by its place": (lambda: with_loss(lambda x: (None, 0)), "ignore_index=0: "),
    "own labels": (lambda: with_loss(lambda x: (None, -100, x.roll(-1, 1))), "its loss function with other labels"),
    # batches
    "no tokens": (lambda: seqpar.hf.shard_batch({"labels": ONES}), r"'input_ids' \[batch, seq\]"),
    "short mask": (lambda: shard(attention_mask=ONES[:, :7]), r"shape \(2, 7\); expected \(2, 8\)"),
    "mask of scores": (lambda: shard(attention_mask=torch.ones(2, 1, 8, 8)), "no dense mask"),
    "mask of FlexAttention": (
        lambda: shard(attention_mask=create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, "cpu")),
        "attention_mask: BlockMask; expected ones and zeros",
    ),
    "mask of documents": (lambda: shard(attention_mask=2 * ONES), "values up to 2"),
    "mask with holes": (lambda: shard(attention_mask=HOLES), "row 0 has zeros between"),
    "short labels": (lambda: shard(labels=ONES[:, 1:]), r"labels: shape \(2, 7\)"),
    "many ids": (lambda: shard(position_ids=torch.ones(3, 2, 8)), "several ids per token"),
    "boundary": (lambda: shard(cu_seqlens=[0, 9]), "the last boundary is 9, but the rows have 8"),
    "boundaries": (lambda: shard(cu_seqlens=[[0, 4], [0, 3], [0, 2]]), "for 3 rows, but the batch has 2"),
    "sharded twice": (lambda: shard(seqpar=1), "sharded already"),
    "no batch": (lambda: seqpar.hf.shard_batch(ONES), "batch=Tensor: expected a dict"),
    "layout of a batch": (
        lambda: seqpar.hf.shard_batch({"input_ids": ONES}, layout="zig"),
        "layout='zig': did you mean 'zigzag'",
    ),
    "short rows": (
        lambda: shard_for_rank({"input_ids": ONES}, BatchCut(9, "zigzag"), 0),
        "rows of 8 tokens cannot be sharded over 9 ranks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    run, words = REFUSED[what]
    with pytest.raises((TypeError, ValueError), match=words):
        run()


def test_own_names_of_functions_of_transformers() -> None:
    """As for kernels of the hub: the name is new, the functions are not."""
    model = with_functions("mine", sdpa_attention_forward, sdpa_mask)
    check_loss(call(model).loss.item(), one_device_of("llama", "plain").loss)


def test_short_rows_of_llama4() -> None:
    llama4_of_length(44)


class CountsInLongRows(nn.Module):
    """Every token from number ``first`` on is doubled."""

    def __init__(self, module: nn.Module, first: int) -> None:
        super().__init__()
        self.module, self.first = module, first

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(x.shape[1], device=x.device)[:, None]
        result: Tensor = self.module(x) * torch.where(index < self.first, 1, 2)
        return result


@pytest.mark.parametrize("first", [40, 44, 45])
def test_layers_that_count_tokens_in_long_rows(first: int) -> None:
    """Rows of up to ``first`` tokens are those in which no token is doubled, so that these are right."""
    model = tiny("llama")
    model.model.layers[1].mlp = CountsInLongRows(model.model.layers[1].mlp, first)
    ours = parallel(copy.deepcopy(model))
    check_loss(ours(**make_batch("plain", first)).loss.item(), model(**make_batch("plain", first)).loss.item())
    words = rf"a row of {first + 1} tokens: layer 'model.layers.1.mlp' \(CountsInLongRows\) .* more than {first} tokens"
    with pytest.raises(ValueError, match=words):
        ours(**make_batch("plain", first + 1))


def test_masks_that_cannot_be_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that only the layers know of, and a mask that depends on an argument of the call."""
    code = "transformers.models.mistral.modeling_mistral.create_sliding_window_causal_mask"
    batch = make_batch("plain")
    same_document = packed_sequence_mask_function(torch.zeros_like(batch["input_ids"]))
    model = parallel(tiny("mistral"))
    monkeypatch.setattr(code, partial(create_sliding_window_causal_mask, and_mask_function=same_document))
    with pytest.raises(ValueError, match=r"a mask that depends on this call's arguments \(such as token_type_ids"):
        model(**batch)
    monkeypatch.setattr(code, create_causal_mask)
    words = r"layer 'model.layers.0.self_attn' attends causally with a window of 9, but none of the masks"
    with pytest.raises(ValueError, match=words):
        parallel(tiny("mistral"))


class Blend(nn.Module):
    """A layer that mixes the tokens of ``[batch, seq, hidden]``. No list contains its class name."""

    def __init__(self, mix: str) -> None:
        super().__init__()
        self.mix = mix
        self.inner = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.zeros(()))  # at first it changes nothing

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return x + self.scale * MIX[self.mix](self.inner(x))


MIX: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "cumulative": lambda y: y.cumsum(1),
    "shift": lambda y: F.pad(y, (0, 0, 1, 0))[:, :-1],
    "fft": lambda y: torch.fft.fft(y, dim=1).real,
    "unfold": lambda y: F.pad(y, (0, 0, 3, 0)).unfold(1, 4, 1).mean(-1),
    "mean": lambda y: y + y.mean(1, keepdim=True),
}


def with_blend(mix: str, where: str, device: str = "cpu") -> Any:
    model = tiny("llama").to(device)
    layer = model.model.layers[1]
    if where == "mlp":
        layer.mlp = Blend(mix)
    elif where == "before the keys":
        layer.self_attn.k_proj = nn.Sequential(Blend(mix), layer.self_attn.k_proj)
    else:
        blend = Blend(mix)  # not part of the model: its weights stay what they are
        nn.init.ones_(blend.scale)
        layer.self_attn.forward = lambda hidden_states, **kwargs: (blend(hidden_states), None)
    return model.to(device)


class Counted(nn.Module):
    """Scales each token of ``[batch, seq, hidden]`` by its index in the input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * torch.arange(1, x.shape[1] + 1).log1p()[:, None]


@pytest.mark.parametrize("where", ["self_attn.q_proj", "mlp", "input_layernorm"])
def test_refused_counter_of_tokens(where: str) -> None:
    model = tiny("llama")
    layer = model.model.layers[1]
    layer.set_submodule(where, Counted(layer.get_submodule(where)))
    words = rf"layer 'model.layers.1.{where}' \(Counted\) counts the tokens in its input: .* it from position_ids"
    with pytest.raises(ValueError, match=words):
        parallel(model)


class Measured(Counted):
    """Scales all tokens by the number of tokens in the input, as log-n attention does."""

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * math.log(x.shape[1])


@pytest.mark.parametrize("where", ["self_attn.q_proj", "mlp"])
def test_refused_length_of_the_input(where: str) -> None:
    model = tiny("llama")
    layer = model.model.layers[1]
    layer.set_submodule(where, Measured(layer.get_submodule(where)))
    with pytest.raises(
        ValueError, match=r"outputs depended on how many tokens follow, .* compute it from position_ids"
    ):
        parallel(model)


PLACES = {
    "mlp": r"'model.layers.1.mlp' \(Blend\)",
    "before the keys": r"'model.layers.1.self_attn.k_proj.0' \(Blend\)",
    "instead of attention": r"'model.layers.1.self_attn' \(LlamaAttention\)",
}
MIXERS = [*((mix, "mlp") for mix in MIX if mix != "none"), *(("cumulative", where) for where in [*PLACES][1:])]


@pytest.mark.parametrize(("mix", "where"), MIXERS)
def test_refused_mixer_with_an_unknown_name(mix: str, where: str) -> None:
    """The layer is found by its outputs, although its name is not known and its weights have no effect yet."""
    for device in ("cpu", "meta") if mix == "shift" else ("cpu",):
        with pytest.raises(ValueError, match=f"layer {PLACES[where]} mixes tokens: in a trial run"):
            parallel(with_blend(mix, where, device))
    parallel(with_blend("none", where if where != "instead of attention" else "mlp"))


def test_a_failed_trial_run_is_refused() -> None:
    model = tiny("llama")
    model.model.layers[0].mlp.forward = lambda x: x.view(1, 2, 3)
    with pytest.raises(ValueError, match=r"trial run .* failed in layer 'model.layers.0.mlp' .*: RuntimeErr"):
        parallel(model)


def test_a_name_tells_nothing() -> None:
    """Only what a module computes decides. This one has the name of a layer that mixes tokens, and an inner one too."""
    model, batch = tiny("llama"), make_batch("plain")
    expected = model(**batch).loss.item()
    for name, words in (("MambaMixer", "mlp"), ("SparseIndexer", "self_attn.o_proj"), ("Pooler", "input_layernorm")):
        module = model.model.layers[0].get_submodule(words)
        module.__class__ = type(name, (type(module),), {})
    check_loss(parallel(model)(**batch).loss.item(), expected)


class Packed(nn.Module):
    """A linear layer with integer weights that the trial run cannot multiply by, as quantized ones are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = float(linear.weight.abs().max()) / 127
        self.weight = nn.Parameter((linear.weight / self.scale).round().char().view(torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.unique().numel() > 2
        return F.linear(x, self.weight.view(torch.int8) * self.scale)


def test_quantized_layers() -> None:
    model, batch = tiny("llama"), make_batch("plain")
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.mlp.up_proj = Packed(layer.self_attn.q_proj), Packed(layer.mlp.up_proj)
    expected = trained(copy.deepcopy(model), batch)
    check_step(None, parallel(model), batch, expected, sync=False)


@pytest.mark.parametrize("kind", ["qwen3_moe", "llama"])
def test_trial_run_after_a_call(kind: str) -> None:
    """A call installs transformers' recorders of outputs. The trial run leaves them alone."""
    model, batch = tiny(kind), make_batch("plain")
    expected: Tensor = model(**batch, output_hidden_states=True).loss
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel(model)
    again = model(**batch, output_hidden_states=True)
    check_loss(again.loss.item(), expected.item())
    assert len(again.hidden_states) == 3
    seqpar.hf.restore(model)  # so that no other test finds its router loss


def test_verify_of_a_module_that_returns_a_loss() -> None:
    for output in (lambda output: output.loss, lambda output: output):
        assert seqpar.hf.verify(Wrapper(output), make_batch("plain")).ok


def test_message_names_the_ranks_that_did_not_arrive() -> None:
    words = "all ranks arrived, but it did not end, after 5.0 s; one of them called another collective"
    assert words in missing_message([], "handshake", 5)
    assert "rank(s) [1] of the job did not arrive" in missing_message([1], "handshake", 5)


class Forward(nn.Module):
    """Calls ``model.forward(...)`` instead of ``model(...)``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module = model

    def forward(self, **kwargs: Any) -> Any:
        return self.module.forward(**kwargs)


@on_ranks
def called_directly(group: ProcessGroup, batch: dict[str, Tensor], expected: Result) -> None:
    model = seqpar.hf.parallelize(tiny("llama"), group=group)
    check_step(group, Forward(model), batch, expected)
    twin, other = copy.deepcopy(model), tiny("llama", seed=3)
    twin.load_state_dict(other.state_dict())
    check_loss(twin.forward(**batch).loss.item(), other(**batch).loss.item())
    seqpar.hf.restore(model)
    assert "forward" not in vars(model)


def test_direct_calls_of_forward(pool: Pool) -> None:
    pool.run(2, called_directly, make_batch("left"), one_device_of("llama", "left"))


def gemma3n() -> Any:
    small: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_kv_shared_layers": 0, "sliding_window": 8,
        "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "laurel_rank": 8, "altup_num_inputs": 4,
        "layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.0] * 2,
    }  # fmt: skip
    torch.manual_seed(0)
    return transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**small, attn_implementation="eager")).train()


@on_ranks
def four_streams(group: ProcessGroup, batch: dict[str, Tensor], expected: Result, states: list[Tensor]) -> None:
    for batches in ("shared", "per_rank"):
        model = seqpar.hf.parallelize(gemma3n(), group=group, batches=batches)
        check_step(group, model, batch, expected, batches)
        output = model(**batch, output_hidden_states=True)
        for x, y in zip(output.hidden_states, states, strict=True):
            assert_close(x, y)


def test_streams_that_look_like_rows(pool: Pool) -> None:
    """Gemma 3n has four streams, as many as the trial run once had rows. Its hidden states start with them."""
    batch, model = make_batch("plain"), gemma3n()
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
    assert states[0].shape == (4, 2, 45, 32)
    pool.run(2, four_streams, batch, trained(model, batch), list(states))


@on_ranks
def jumped(group: ProcessGroup, cases: list[tuple[dict[str, Any], Result]], repeats: Tensor) -> None:
    for batch, expected in cases:
        model = seqpar.hf.parallelize(tiny("llama", "sdpa"), group=group)
        check_step(group, model, batch, expected)
    seqpar.hf.verify(model, batch)
    model.config.use_cache = False  # as a Trainer does
    words = r"token 1 has id 0 after id 0, which is no restart.*pass an attention_mask of o"
    with pytest.raises(ValueError, match=words):
        model(**make_batch("plain"), position_ids=repeats)


def test_jumps_and_repeats_keep_one_document(pool: Pool) -> None:
    """Position ids that jump and that repeat, with a cache, which is the default, and with a mask of ones."""
    jumps, repeats = torch.arange(45), torch.arange(45) // 3
    jumps[20:] += 40
    cases = []
    for ids, more in product((jumps, repeats), ({}, {"attention_mask": torch.ones(2, 45), "use_cache": False})):
        batch = {**make_batch("plain"), "position_ids": ids.expand(2, -1), **more}
        cases.append((batch, trained(tiny("llama", "sdpa"), batch)))
    pool.run(2, jumped, cases, repeats.expand(2, -1))
