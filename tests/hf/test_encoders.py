"""Encoder-decoder models: the sequences of the decoder and of a text encoder are sharded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

pytest.importorskip("transformers")

import transformers

import seqpar
import seqpar.hf

from ..pool import Pool, on_ranks
from ..reference import assert_close
from . import workers
from .families import Family
from .families import tiny as families_tiny
from .test_generate import CACHE
from .workers import PARALLELIZE, Result, Rows, check_gradients, check_loss, gradients, rounded

pytestmark = pytest.mark.slow

VOCAB, LENGTH = 62, 37
_SIZES = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2, "dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}  # fmt: skip
_SOUND = {"num_mel_bins": 8, "max_source_positions": 21, "max_target_positions": 64, "begin_suppress_tokens": None}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bart": ("BartForConditionalGeneration", {**_SIZES, "max_position_embeddings": 64}),
    "Whisper": ("WhisperForConditionalGeneration", {**_SIZES, **_SOUND}),
}


def tiny(kind: str, attention: str = "sdpa", **changes: Any) -> Any:
    name, arguments = CONFIGS[kind]
    config = getattr(transformers, f"{kind}Config")(**{**arguments, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, name)._from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0, 0.25)
            elif name.endswith("k_proj.bias"):
                p.requires_grad_(False)  # it adds the same number to all scores of a query: its gradient is 0
    return model.train()


def make_batch(kind: str, how: str) -> dict[str, Tensor]:
    """A batch with padding in the encoder's and in the decoder's tokens, or without ("plain")."""
    g = torch.Generator().manual_seed(1)
    batch: dict[str, Tensor] = {}
    if kind == "Whisper":
        batch["input_features"] = torch.randn(2, 8, 42, generator=g)
    else:
        batch["input_ids"] = torch.randint(3, VOCAB, (2, 23), generator=g)
        if how != "plain":
            batch["attention_mask"] = (torch.arange(23) < torch.tensor([[15], [23]])).long()
    labels = torch.randint(3, VOCAB, (2, LENGTH), generator=g)
    batch["labels"] = labels.masked_fill(torch.rand(labels.shape, generator=g) < 0.2, -100)
    if how != "plain":
        pad, index = torch.tensor([[6], [11]]), torch.arange(LENGTH)
        valid = index < LENGTH - pad if how == "right" else index >= pad
        batch["decoder_attention_mask"] = valid.long()
        # what a padding token sees differs between attention implementations
        batch["labels"] = batch["labels"].masked_fill(~valid, -100)
    return batch


def one_device(kind: str, how: str) -> tuple[Result, Tensor]:
    """The result of a step without ``parallelize``, and the logits."""
    model, batch = tiny(kind), make_batch(kind, how)

    def step() -> float:
        loss = model(**batch).loss
        loss.backward()
        return float(loss)

    result = rounded(model, step)
    with torch.no_grad():
        return result, tiny(kind)(**batch).logits


def note_length(lengths: list[int], layer: Any, args: Any, output: Tensor) -> None:
    lengths.append(output.shape[1])


Case = tuple[str, str, str, dict[str, Any]]  # the model, the batch, the arguments of ``parallelize``, and more


@on_ranks
def check_cases(group: ProcessGroup, cases: list[tuple[Case, tuple[Result, Tensor]]]) -> None:
    for (kind, how, strategy, more), (expected, logits) in cases:
        batch, arguments = make_batch(kind, how), PARALLELIZE[strategy]
        model, what = tiny(kind, more.get("attention", "sdpa")), (kind, how, strategy, *more)
        if "checkpointing" in more:
            model.gradient_checkpointing_enable()
        seqpar.hf.parallelize(model, group=group, loss_chunk=10, **arguments)
        if "in the loader" in more:
            tokens = {"decoder_input_ids": model._seqpar_from_labels(batch["labels"])}
            given = seqpar.hf.shard_batch({**batch, **tokens}, group=group, layout=arguments["layout"])
        else:
            given = {name: x.clone() for name, x in batch.items()}
        # Under Rows, SDPA saves other tensors than in the recomputation.
        lengths: list[int] = []
        note = partial(note_length, lengths)
        layer = model.get_encoder().layers[0].fc1.register_forward_hook(note)
        with nullcontext(Rows()) if "checkpointing" in more else Rows() as rows:
            loss = model(**given).loss
        layer.remove()
        assert lengths[0] in ((21,) if kind == "Whisper" else (23 // group.size(), 23 // group.size() + 1)), lengths
        assert rows.most <= 10, what  # the logits of all tokens are never in memory at once
        loss.backward()
        seqpar.sync_gradients(model, group=group)
        check_loss(float(loss), expected.loss, *what)
        check_gradients(gradients(model), expected, *what)
        if "logits" in more:
            batch["decoder_input_ids"] = model._seqpar_from_labels(batch.pop("labels"))
            with torch.no_grad():
                output = model(**batch, output_hidden_states=True)
            valid = batch.get("decoder_attention_mask", torch.ones(2, LENGTH)) == 1
            assert_close(output.logits[valid], logits[valid], what=f"{what} logits")
            assert output.decoder_hidden_states[-1].shape[1] == LENGTH
            assert_close(output.encoder_last_hidden_state, output.encoder_hidden_states[-1])
        seqpar.hf.restore(model)
        assert not any(name.startswith("_seqpar") for m in model.modules() for name in vars(m))
        check_loss(float(model(**make_batch(kind, how)).loss), expected.loss, *what, "restored")


@pytest.mark.thorough(world=[1, 4])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_loss_and_gradients(pool: Pool, world: int) -> None:
    more: dict[str, Any] = {
        "right": {"in the loader": True},
        "left": {"checkpointing": True},
        "plain": {"logits": True},
    }
    cases: list[Case] = [(kind, how, "ring-zigzag", more[how]) for kind in CONFIGS for how in more]
    if world == 2:
        cases += [("Bart", "right", "all_gather-striped", {"attention": "eager", "logits": True})]
    if world == 4:
        cases = [(kind, how, "hybrid-zigzag", m) for kind, how, _, m in cases]
    pool.run(world, check_cases, [(case, one_device(*case[:2])) for case in cases])


@on_ranks
def drawn(group: ProcessGroup, kind: str) -> tuple[Tensor, ...]:
    """The encoder's first and last states, the decoder's first states, of this rank, and the numbers drawn next."""
    random = {"dropout": 0.5, **({"apply_spec_augment": True, "mask_time_length": 3} if kind == "Whisper" else {})}
    model = seqpar.hf.parallelize(tiny(kind, **random), group=group, outputs="local", layout="contiguous")
    batch = make_batch(kind, "plain")
    batch["labels"] = batch["labels"][:, :36] * 0 + 7  # each token has the same embedding
    if kind == "Bart":
        batch["input_ids"] = batch["input_ids"][:, :22]
    embeddings = model.get_decoder().embed_positions.weight
    embeddings.data.zero_()
    torch.manual_seed(group.rank())
    np.random.seed(group.rank())
    output = model(**batch, output_hidden_states=True)
    states = output.encoder_hidden_states[0], output.encoder_last_hidden_state
    return *states, output.decoder_hidden_states[0][:, 1:], torch.from_numpy(np.random.rand(2))


@pytest.mark.parametrize("kind", CONFIGS)
def test_ranks_draw_alike_in_the_encoder(pool: Pool, kind: str) -> None:
    """Dropout and masked features are the same on all ranks in a whole encoder, and others where tokens are sharded."""
    (first, states, hidden, after), (_, states_1, hidden_1, after_1) = pool.run(2, drawn, kind)
    assert torch.equal(states, states_1) and (
        kind == "Whisper" or not torch.equal(first[:, :11] == 0, first[:, 11:] == 0)
    )
    assert not torch.equal(hidden == 0, hidden_1 == 0) and not torch.equal(after, after_1)
    np.random.seed(0)
    assert torch.equal(after, torch.from_numpy(np.random.rand(2)))


def test_pad_tokens_of_a_decoder_that_looks_for_them() -> None:
    """T5Gemma takes pad tokens for padding if it gets no mask of the decoder's tokens."""
    family = Family("text-text", "", "T5GemmaForConditionalGeneration")
    batch, (model, ours) = make_batch("Bart", "right"), (families_tiny(family) for _ in range(2))
    valid = batch["decoder_attention_mask"]
    batch["decoder_input_ids"] = batch["labels"].abs().masked_fill(valid == 0, model.config.decoder.pad_token_id)
    seqpar.hf.parallelize(ours, strategy="local")
    check_loss(ours(**batch).loss.item(), model(**batch).loss.item())
    del batch["decoder_attention_mask"]
    with pytest.raises(ValueError, match="the decoder takes pad tokens for padding"):
        ours(**batch)


def test_special_tokens_of_a_text_config() -> None:
    """The config of Florence-2 has no pad_token_id. A VisionEncoderDecoderModel needs one only if it gets labels."""
    model, ours = (families_tiny(Family("image-text", "", "Florence2ForConditionalGeneration")) for _ in range(2))
    labels = torch.arange(10, 10 + 2 * LENGTH).view(2, LENGTH)
    labels[0, -4:] = -100
    seqpar.hf.parallelize(ours, strategy="local")
    for start in (5, 6):
        for each in (model, ours):
            each.config.text_config.decoder_start_token_id, each.config.text_config.pad_token_id = start, 7
        check_loss(
            ours(input_ids=TOKENS, labels=labels).loss.item(), model(input_ids=TOKENS, labels=labels).loss.item()
        )
    seqpar.hf.parallelize(families_tiny(Family("image-text", "", "VisionEncoderDecoderModel")), strategy="local")


def prompt(kind: str, how: str) -> dict[str, Tensor]:
    batch = make_batch(kind, how)
    return {name: batch[name] for name in ("input_ids", "input_features", "attention_mask") if name in batch}


def for_generation(kind: str) -> Any:
    return (tiny(kind) if kind in CONFIGS else families_tiny(Family("text-text", "", kind))).eval()


SPECIAL = {"decoder_start_token_id": 3, "bos_token_id": 3, "pad_token_id": 0}
GENERATED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("right", {}),
    ("plain", {"do_sample": True}),
    ("right", {"num_beams": 3, "num_return_sequences": 2}),
    ("plain", {"decoder_input_ids": torch.arange(3, 21).view(2, 9)}),  # a prompt
)


def generate(model: Any, kind: str) -> list[Tensor]:
    """What the model generates, and the logits of new tokens that are given together, after a token that was cached."""
    found, fixed = [], {"max_new_tokens": 6, "eos_token_id": None, "do_sample": False, **SPECIAL}
    for how, options in GENERATED:
        torch.manual_seed(3)
        found.append(model.generate(**prompt(kind, how), **{**fixed, **options}))
    tokens, given = torch.randint(3, VOCAB, (2, 5), generator=torch.Generator().manual_seed(0)), prompt(kind, "right")
    with torch.no_grad():
        first = model(**given, decoder_input_ids=tokens[:, :1], use_cache=True)
        cache = first.get("cache", first.get("past_key_values"))
        more = model(**given, decoder_input_ids=tokens[:, 1:], **{CACHE: cache}, use_cache=True)
    keys = [layer.keys.shape[2] for layer in cache.cross_attention_cache.layers]
    return [*found, torch.cat([first.logits, more.logits], 1), torch.tensor(keys)]


@on_ranks
def check_generation(group: ProcessGroup, kind: str, expected: list[Tensor]) -> None:
    *tokens, logits, keys = generate(seqpar.hf.parallelize(for_generation(kind), group=group), kind)
    for ours, theirs, case in zip(tokens, expected, GENERATED, strict=False):
        assert torch.equal(ours, theirs), (kind, case)
    assert_close(logits, expected[-2])
    assert keys.tolist() == [len(range(group.rank(), n, group.size())) for n in expected[-1].tolist()]


@pytest.mark.thorough(kind=["T5GemmaForConditionalGeneration", "EncoderDecoderModel", "MarianMTModel"])
@pytest.mark.parametrize("kind", [*CONFIGS, "T5GemmaForConditionalGeneration", "EncoderDecoderModel", "MarianMTModel"])
def test_generation(pool: Pool, kind: str) -> None:
    """Greedy, sampled, with beams and from a prompt; each rank has the keys of some of the encoder's states."""
    expected = generate(for_generation(kind), kind)
    assert len(set(expected[1].flatten().tolist())) > 3
    for world in (1, 3) if kind == "Bart" else (3,):
        pool.run(world, check_generation, kind, expected)


@on_ranks
def refused_generation(group: ProcessGroup) -> None:
    model, given = seqpar.hf.parallelize(tiny("Whisper").eval(), group=group), prompt("Whisper", "plain")
    with pytest.raises(ValueError, match="the same tokens, but other images, sounds or states of the encoder"):
        model.generate(input_features=given["input_features"] + group.rank(), max_new_tokens=3)
    with pytest.raises(TypeError, match="cache=DynamicCache: expected a transformers EncoderDecoderCache"):
        model(**given, decoder_input_ids=TOKENS[:, :1], **{CACHE: transformers.DynamicCache()})
    static = (transformers.StaticCache(model.config, max_cache_len=9) for _ in range(2))
    with pytest.raises(ValueError, match="layers are of type StaticLayer, but only a dynamic"):
        model(**given, decoder_input_ids=TOKENS[:, :1], **{CACHE: transformers.EncoderDecoderCache(*static)})
    for module in model.modules():
        module.dropout = 0.1 if hasattr(module, "is_decoder") else 0.0
    with pytest.raises(ValueError, match=r"attention dropout is 0.1, but generation drops nothing; use model.eval()"):
        model.train()(**given, decoder_input_ids=TOKENS[:, :1], use_cache=True)


def test_refused_generation(pool: Pool) -> None:
    pool.run(2, refused_generation)


def parallel(kind: str = "Bart", how: str = "plain", drop: str = "", **arguments: Any) -> Any:
    """The output of a parallelized model on one rank."""
    batch = make_batch(kind, how)
    batch.pop(drop, None)
    return seqpar.hf.parallelize(tiny(kind), strategy="local")(**{**batch, **arguments})


def with_settings(**settings: Any) -> Any:
    return seqpar.hf.parallelize(tiny("Bart"), **{"strategy": "local", **settings})


class OtherShift(transformers.BartForConditionalGeneration):  # type: ignore[misc]
    def forward(self, labels: Any = None, decoder_input_ids: Any = None, **kwargs: Any) -> Any:
        if decoder_input_ids is None:
            decoder_input_ids = labels.roll(2, 1)
        return super().forward(labels=labels, decoder_input_ids=decoder_input_ids, **kwargs)


def shifted_otherwise() -> Any:
    model = tiny("Bart")
    model.__class__ = OtherShift
    return seqpar.hf.parallelize(model, strategy="local")(**make_batch("Bart", "plain"))


def hidden_decoder() -> Any:
    model = tiny("Bart").model
    model.hidden, model.decoder = model.decoder, None
    del model.decoder
    return seqpar.hf.parallelize(model)


def with_noise() -> Any:
    model = with_settings()
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    return model(**make_batch("Bart", "plain"))


def without_decoder_tokens() -> Any:
    return with_settings()(**seqpar.hf.shard_batch({"input_ids": TOKENS}))


TOKENS = torch.full((2, LENGTH), 5)
POSITIONS = torch.cat([torch.arange(20), torch.arange(LENGTH - 20)]).expand(2, -1)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "an encoder alone": (
        lambda: seqpar.hf.parallelize(tiny("Bart").get_encoder()), "BartEncoder: its forward takes no position_ids"
    ),
    "a decoder of another name": (hidden_decoder, "it has no decoder that takes encoder_hidden_states"),
    "batches": (lambda: with_settings(batches="per_rank"), "batches='per_rank': it is not supported for Bart"),
    "scale": (lambda: with_settings(softmax_scale=1.0), "softmax_scale=1.0: it is not supported for Bart"),
    "bits": (lambda: with_settings(deterministic="invariant"), "its states are summed over the ranks"),
    "slopes": (lambda: with_settings(alibi_slopes=[1.0] * 4), "alibi_slopes=.* it is not supported for Bart"),
    "towers": (lambda: with_settings(split_towers=True), "split_towers=True: it is not supported for Bart"),
    "memory": (lambda: with_settings(memory=seqpar.Memory(8)), "activation_checkpointing_enable"),
    "packed": (
        lambda: parallel(decoder_input_ids=TOKENS, decoder_position_ids=POSITIONS), "a row has several documents"
    ),
    "boundaries": (
        lambda: parallel(decoder_input_ids=TOKENS, cu_seq_lens=torch.tensor([0, 20, LENGTH])), "cu_seq_lens: rows of an"
    ),
    "shared prompts": (
        lambda: with_settings(share_prompts=True)(**make_batch("Bart", "plain")), "it has an encoder, whose inp"
    ),
    "no labels": (lambda: parallel(drop="labels"), "neither labels nor decoder_input_ids, so that Bart"),
    "another shift": (shifted_otherwise, "labels without decoder_input_ids, so that OtherShift"),
    "sharded encoder": (without_decoder_tokens, "sharded the tokens of the encoder; give it decoder_input_ids"),
    "a tuple": (lambda: parallel(return_dict=False), "encoder-decoder model are all-gathered by name"),
    "dense mask": (
        lambda: parallel(attention_mask=torch.ones(2, 1, 23, 23, dtype=torch.bool)),
        r"attention_mask: shape \(2, 1, 23, 23\); expected ones and",
    ),
    "noise": (with_noise, "neftune_noise_alpha=5.0: encoders and decoders may share"),
    "no encoder": (
        lambda: seqpar.hf.parallelize(workers.tiny("llama"), strategy="local")(decoder_input_ids=TOKENS),
        "LlamaForCausalLM has no encoder",
    ),
    "verify": (lambda: seqpar.hf.verify(with_settings(), make_batch("Bart", "plain")), r"use seqpar.verify\(model, st"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    run, words = REFUSED[what]
    with pytest.raises(ValueError, match=words):
        run()
