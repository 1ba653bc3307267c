"""What is not supported raises an error that says why and what to change; what is supported raises none."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

pytest.importorskip("transformers")

import transformers

import seqpar
import seqpar.hf
from seqpar.rendezvous import missing_message

from ..pool import Pool, on_ranks
from .workers import VOCAB, gradients, make_batch, tiny, worst

pytestmark = pytest.mark.slow
LOSS, GRADIENT = 2e-5, 1e-3


def parallel(model: Any = None, **options: Any) -> Any:
    return seqpar.hf.parallelize(tiny("llama") if model is None else model, strategy="local", **options)


def adapted(method: str, before: bool = True) -> Any:
    import peft

    task = {"task_type": "CAUSAL_LM"}
    config = {
        "activated LoRA": lambda: peft.LoraConfig(**task, alora_invocation_tokens=[5, 6]),
        "prefix tuning": lambda: peft.PrefixTuningConfig(**task, num_virtual_tokens=3),
        "adaption prompt": lambda: peft.AdaptionPromptConfig(**task, adapter_len=3, adapter_layers=1),
        "CPT": lambda: peft.CPTConfig(**task, cpt_token_ids=[3, 4], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 4]),
    }[method]()
    model = tiny("llama")
    return parallel(peft.get_peft_model(model, config)) if before else peft.get_peft_model(parallel(model), config)


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


MESSAGES: dict[str, tuple[Callable[[], object], str]] = {
    "activated LoRA": (
        lambda: adapted("activated LoRA"),
        r"'default' is peft's activated LoRA .* use LoRA, prompt tun",
    ),
    "activated LoRA later": (
        lambda: adapted("activated LoRA", before=False)(**make_batch("plain")),
        r"'default' is peft's activated LoRA",
    ),
    "prefix tuning": (
        lambda: adapted("prefix tuning"),
        r"PREFIX_TUNING, which cannot be sharded: it hands every layer",
    ),
    "prefix tuning later": (
        lambda: adapted("prefix tuning", before=False)(**make_batch("plain")),
        r"past_key_values: with labels .*peft's prefix tuning passes one: use LoRA or prompt tuning",
    ),
    "adaption prompt": (
        lambda: adapted("adaption prompt"),
        r"ADAPTION_PROMPT, which cannot be sharded: its layers attend",
    ),
    "CPT": (lambda: adapted("CPT"), r"CPT, which cannot be sharded: its loss is its own"),
    "generate in train mode": (
        lambda: generated(checkpointed()),
        r"call model.eval\(\) or model.gradient_checkpointing_d",
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
    "verify": (
        lambda: seqpar.hf.verify(Wrapper(lambda output: {"score": 1.0}), make_batch("plain")),
        r"Wrapper: its output has no loss .* or give verify the transformers model inside it",
    ),
}


@pytest.mark.parametrize("what", MESSAGES)
def test_messages(what: str) -> None:
    run, words = MESSAGES[what]
    if what.split()[0] in ("activated", "prefix", "adaption", "CPT"):
        pytest.importorskip("peft")
    with pytest.raises(ValueError, match=words):
        run()


def test_verify_of_a_module_that_returns_a_loss() -> None:
    for output in (lambda output: output.loss, lambda output: output):
        assert seqpar.hf.verify(Wrapper(output), make_batch("plain")).ok


def test_a_message_names_no_ranks_if_all_arrived() -> None:
    words = missing_message([], "handshake", timedelta(seconds=5))
    assert (
        "all ranks of the group arrived, but it did not end within 5 s; one of them called another collective" in words
    )
    assert "rank(s) [1] of the group did not arrive" in missing_message([1], "handshake", timedelta(seconds=5))


@on_ranks
def called_directly(group: ProcessGroup) -> tuple[float, float, float]:
    """Errors of the loss and gradients of ``model.forward(...)``, and of its loss in a copy with other weights."""
    batch = make_batch("left")
    plain, model = tiny("llama"), seqpar.hf.parallelize(tiny("llama"), group=group)
    expected = plain.forward(**batch).loss
    expected.backward()
    loss = model.forward(**batch).loss
    loss.backward()
    seqpar.sync_gradients(model, group=group)
    twin, other = copy.deepcopy(model), tiny("llama", seed=3)
    twin.load_state_dict(other.state_dict())
    in_copy = abs(twin.forward(**batch).loss.item() - other(**batch).loss.item())
    seqpar.hf.restore(model)
    assert "forward" not in vars(model)
    return abs(loss.item() - expected.item()), worst(gradients(model), gradients(plain)), in_copy


def test_direct_calls_of_forward(pool: Pool) -> None:
    for loss, gradient, in_copy in pool.run(2, called_directly):
        assert loss < LOSS and gradient < GRADIENT and in_copy < LOSS


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
def four_streams(group: ProcessGroup) -> tuple[float, float]:
    batch = make_batch("plain")
    plain, model = gemma3n(), seqpar.hf.parallelize(gemma3n(), group=group)
    expected, loss = plain(**batch).loss, model(**batch).loss
    expected.backward()
    loss.backward()
    seqpar.sync_gradients(model, group=group)
    return abs(loss.item() - expected.item()), worst(gradients(model), gradients(plain))


def test_streams_that_look_like_rows(pool: Pool) -> None:
    """Gemma 3n has four streams, as many as the trial run has rows for other models."""
    for loss, gradient in pool.run(2, four_streams):
        assert loss < LOSS and gradient < GRADIENT, (loss, gradient)


@pytest.mark.parametrize("kind", ["qwen3_moe", "llama"])
def test_trial_run_after_a_call(kind: str) -> None:
    """A call installs transformers' recorders of outputs. The trial run leaves them alone."""
    model = tiny(kind)
    batch = make_batch("plain")
    expected: Tensor = model(**batch, output_hidden_states=True).loss
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel(model)
    again = model(**batch, output_hidden_states=True)
    assert abs(again.loss.item() - expected.item()) < LOSS and len(again.hidden_states) == 3
