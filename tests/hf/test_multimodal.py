"""Models that merge images into their text: loss, gradients, outputs and generation are one device's."""

from __future__ import annotations

import copy
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")

import transformers

import seqpar
import seqpar.hf

from ..pool import Pool, on_ranks
from ..reference import assert_close, nudge
from .workers import PARALLELIZE, Result, check_loss, check_step, trained

pytestmark = pytest.mark.slow
VOCAB, IMAGE, VIDEO, LENGTH = 66, 64, 65, 45
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 7}
GRID = (1, 4, 4)  # patches of an image of Qwen3-VL, which merges 2 x 2 into a token


def _config(kind: str) -> Any:
    t = transformers
    if kind == "gemma3":
        vision = {**_VISION, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4, "vision_use_head": False}
        return t.Gemma3Config(
            text_config={**_TEXT, **_SLIDING}, vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE
        )
    if kind == "qwen3_vl":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
        vision = {
            "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "depth": 3, "patch_size": 2,
            "temporal_patch_size": 1, "spatial_merge_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 2],
        }  # fmt: skip
        return t.Qwen3VLConfig(
            text_config={**_TEXT, "rope_parameters": rope},
            vision_config=vision,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
        )
    assert kind == "gemma4"
    # Of six layers, the last two reuse the keys of the third and the fourth.
    text = {
        **_TEXT,
        "num_hidden_layers": 6,
        "layer_types": [f"{x}_attention" for x in ("sliding", "full", "sliding", "full", "sliding", "full")],
        "sliding_window": 7,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 4,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "use_bidirectional_attention": "vision",
        "final_logit_softcapping": 3.0,
    }
    vision = {
        **_VISION, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 2,
        "pooling_kernel_size": 2, "position_embedding_size": 16,
    }  # fmt: skip
    return t.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, image_token_id=IMAGE, video_token_id=VIDEO
    )


KINDS = ("gemma3", "qwen3_vl", "gemma4")


def tiny(kind: str, seed: int = 0) -> Any:
    return copy.deepcopy(_made(kind, seed))


@cache
def _made(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    auto: Any = transformers.AutoModelForImageTextToText if kind == "qwen3_vl" else transformers.AutoModelForCausalLM
    model = auto.from_config(_config(kind), attn_implementation="eager")
    assert "ForConditionalGeneration" in type(model).__name__
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("k_proj.bias"):
                p.requires_grad_(False)  # it shifts all scores of a query alike: its gradient is rounding error
            p.normal_(0, 0.25) if p.dim() > 1 else p.add_(torch.randn_like(p), alpha=0.1)
            if kind == "gemma4" and "q_norm" in name:
                p.mul_(0.5)  # it does not scale scores otherwise, and sharp ones have gradients that rounding changes
    return model.train()


def make_batch(kind: str, how: str) -> dict[str, Any]:
    """A batch of text, of packed text, or of 2 rows with 4 images, optionally padded on one side."""
    g = torch.Generator().manual_seed(0)
    rows = 1 if how == "packed" else 2
    ids = torch.randint(3, IMAGE, (rows, LENGTH), generator=g)
    batch: dict[str, Any] = {"input_ids": ids}
    labels = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -100)
    if how == "packed":
        boundaries = [0, 11, 12, 31, LENGTH]
        batch["position_ids"] = torch.cat([torch.arange(b - a) for a, b in pairwise(boundaries)])[None]
        labels[:, boundaries[:-1]] = -100
    if how in ("images", "left", "right"):
        types = torch.zeros_like(ids)
        for row, start in ((0, 14), (0, 19), (1, 16), (1, 32)):
            types[row, start : start + 4] = 1
        ids[types == 1] = IMAGE
        labels[types == 1] = -100
        batch["token_type_ids" if kind == "gemma3" else "mm_token_type_ids"] = types
        if kind == "gemma3":
            batch["pixel_values"] = torch.randn(4, 3, 16, 16, generator=g)
        elif kind == "qwen3_vl":
            batch["pixel_values"] = torch.randn(4 * 16, 12, generator=g)
            batch["image_grid_thw"] = torch.tensor([GRID] * 4)
        else:
            batch["pixel_values"] = torch.rand(4, 16, 12, generator=g)
            at = torch.arange(16)
            batch["image_position_ids"] = torch.stack([at % 4, at // 4], -1).expand(4, -1, -1).contiguous()
    if how in ("left", "right"):
        mask = torch.ones_like(ids)
        for row in range(rows):
            where = slice(0, 5 + 6 * row) if how == "left" else slice(LENGTH - 3 - 6 * row, LENGTH)
            mask[row, where] = 0
            labels[row, where] = -100
            labels[row, 11 if how == "left" and row else 5] = -100
        batch["attention_mask"] = mask
        batch["input_ids"] = ids * mask
    return {**batch, "labels": labels}


def _whole_sequence(kind: str) -> dict[str, Any]:
    """With a cache, which is the default, transformers does not separate packed documents."""
    return {} if kind == "qwen3_vl" else {"use_cache": False}


@cache
def one_device(kind: str, how: str) -> Result:
    model = tiny(kind)
    if kind == "qwen3_vl":
        model.config.text_config.use_cache = False
    return trained(model, make_batch(kind, how), **_whole_sequence(kind))


Case = tuple[str, str, str]  # the model, the batch and the arguments of ``parallelize``


@on_ranks
def check_cases(group: ProcessGroup, cases: list[tuple[Case, Result]], how: str = "") -> None:
    """``how``: in DDP, or with activation checkpointing. Gemma 4's layers share keys across checkpoints."""
    before: Any = None
    for (kind, batch, strategy), expected in cases:
        if (kind, strategy) != before:  # other batches are steps of the same model
            before, model = (kind, strategy), tiny(kind)
            if how == "checkpoints":
                model.gradient_checkpointing_enable({"use_reentrant": False})
            seqpar.hf.parallelize(model, group=group, **PARALLELIZE[strategy])
            outer = DistributedDataParallel(model, process_group=group) if how == "ddp" else model
        outer.zero_grad()
        check_step(group, outer, make_batch(kind, batch), expected, kind, batch, strategy, sync=how != "ddp")


# Gemma 3 with every batch and strategy; the others with images, and Gemma 4 where its layers share keys.
BATCHES = ("text", "packed", "images", "left", "right")
CASES: dict[int, list[Case]] = {
    1: [("gemma3", "left", "ring-zigzag")],
    2: [
        *(("gemma3", batch, "ring-zigzag") for batch in BATCHES),
        *((kind, batch, "ring-zigzag") for kind in ("qwen3_vl", "gemma4") for batch in ("packed", "left")),
    ],
    4: [
        *(("gemma3", "images", strategy) for strategy in PARALLELIZE),
        ("qwen3_vl", "images", "ulysses-contiguous"),
        ("gemma4", "images", "all_gather-striped"),
    ],
}


@pytest.mark.thorough(world=[4])
@pytest.mark.parametrize("world", CASES)
def test_loss_and_gradients(pool: Pool, world: int) -> None:
    pool.run(world, check_cases, [(case, one_device(*case[:2])) for case in CASES[world]])


def test_gradients_of_the_tower_in_ddp(pool: Pool) -> None:
    cases = [((kind, "images", "ring-zigzag"), one_device(kind, "images")) for kind in ("qwen3_vl", "gemma3")]
    pool.run(2, check_cases, cases, "ddp")


def test_activation_checkpointing(pool: Pool) -> None:
    cases = [("qwen3_vl", "images", "ring-zigzag"), ("gemma4", "images", "all_gather-striped")]
    pool.run(2, check_cases, [(case, one_device(*case[:2])) for case in cases], "checkpoints")


@on_ranks
def asked(group: ProcessGroup, kind: str) -> None:
    """Compare all logits, of the last, and of some, with and without labels, and hidden states."""
    batch = make_batch(kind, "images")
    nudged = tiny(kind)
    nudge(nudged.parameters())
    expected, rounded = (one(**batch, output_hidden_states=True) for one in (tiny(kind), nudged))
    model = seqpar.hf.parallelize(tiny(kind), group=group)
    labels = batch.pop("labels")
    output = model(**batch, output_hidden_states=True)
    assert_close(output.hidden_states, expected.hidden_states, rounded=rounded.hidden_states)
    some = torch.tensor([7, -2, 30])
    pairs = [
        (output.logits, slice(None)),
        (model(**batch, logits_to_keep=5).logits, slice(-5, None)),
        (model(**batch, logits_to_keep=some).logits, some),
    ]
    seqpar.hf.restore(model)
    seqpar.hf.parallelize(model, group=group, outputs="full")
    pairs.append((model(**batch, labels=labels).logits, slice(None)))
    seqpar.hf.restore(model)
    pairs.append((model(**batch, labels=labels).logits, slice(None)))
    for ours, at in pairs:
        assert_close(ours, expected.logits[:, at], rounded=rounded.logits[:, at])


@pytest.mark.thorough(kind=["gemma4"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs(pool: Pool, kind: str) -> None:
    pool.run(2, asked, kind)


@on_ranks
def generated(group: ProcessGroup, kind: str, how: str) -> list[list[int]]:
    model = seqpar.hf.parallelize(tiny(kind).eval(), group=group)
    return model.generate(**prompt(kind, how), max_new_tokens=12, do_sample=False).tolist()


def prompt(kind: str, how: str) -> dict[str, Any]:
    batch = make_batch(kind, how)
    batch.pop("labels")
    return batch


@pytest.mark.thorough(kind=["gemma4"])
@pytest.mark.parametrize(
    ("kind", "how"), [("gemma3", "images"), ("qwen3_vl", "left"), ("gemma4", "images"), ("gemma4", "text")]
)
def test_generation(pool: Pool, kind: str, how: str) -> None:
    expected = tiny(kind).eval().generate(**prompt(kind, how), max_new_tokens=12, do_sample=False).tolist()
    assert pool.run(2, generated, kind, how) == [expected, expected]


def gemma4_text(layers: int, shared: int = 0) -> Any:
    changes = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers, "num_kv_shared_layers": shared}
    config = transformers.Gemma4TextConfig(**{**_TEXT, **changes}, vocab_size_per_layer_input=VOCAB)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


@on_ranks
def sent(group: ProcessGroup, layers: int, shared: int) -> list[int]:
    """The bytes sent in forward and in backward."""
    model = seqpar.hf.parallelize(gemma4_text(layers, shared), group=group, strategy="context_parallel")
    ids = torch.arange(2 * 48).view(2, 48) % 60 + 3
    with seqpar.trace() as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with seqpar.trace() as backward:
        loss.backward()
    return [forward.bytes_sent, backward.bytes_sent]


def test_shared_keys_are_received_once(pool: Pool) -> None:
    two, three, shared = (pool.run(2, sent, *layers) for layers in ((2, 0), (3, 0), (4, 2)))
    # The other rank gets k and v of 2 rows of 24 tokens, 2 heads of 512, in float32.
    gathered = 2 * 2 * 24 * 2 * 512 * 4
    for rank in range(2):
        for direction in (0, 1):
            one_layer = three[rank][direction] - two[rank][direction]
            # The first layer's own; then the second layer's for the third and the fourth too.
            assert shared[rank][direction] == two[rank][direction] - one_layer + gathered


REFUSED = (
    "must merge images into all tokens before the tokens are sharded; call it with the full batch",
    "^cu_seq_lens_q: with images and document boundaries, give position_ids",
    "^batch: the ranks of the sequence group passed different batches",
)


@on_ranks
def sharded_before(group: ProcessGroup, kind: str, loss: float) -> None:
    """Batches that cannot be used raise. A batch of text that ``shard_batch`` has sharded does not."""
    model = seqpar.hf.parallelize(tiny(kind), group=group)
    local = seqpar.hf.shard_batch(make_batch(kind, "packed"), group=group)
    check_loss(model(**local).loss.item(), loss)
    images = make_batch(kind, "images")
    batches = (
        seqpar.hf.shard_batch(images, group=group),
        {**images, "cu_seq_lens_q": torch.tensor([0, 20, LENGTH])},
        {**images, "pixel_values": images["pixel_values"] + group.rank()},
    )
    for batch, words in zip(batches, REFUSED, strict=True):
        with pytest.raises(ValueError, match=words):
            model(**batch)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_types(pool: Pool, kind: str) -> None:
    pool.run(2, sharded_before, kind, one_device(kind, "packed").loss)


def test_towers_keep_their_attention(tmp_path: Path) -> None:
    """``from_pretrained`` sets one implementation for all parts; parallelize and restore change only the text's."""
    tiny("gemma3").save_pretrained(tmp_path)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path, attn_implementation="seqpar").train()
    seqpar.hf.parallelize(model)
    assert model.model.vision_tower.config._attn_implementation == "sdpa"
    batch = make_batch("gemma3", "images")
    check_loss(model(**batch).loss.item(), one_device("gemma3", "images").loss)
    model = seqpar.hf.restore(seqpar.hf.parallelize(tiny("gemma3")))
    assert model(**batch).loss.item() == one_device("gemma3", "images").loss


@on_ranks
def drawn_in_tower(group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """The states of the vision tower, in which attention has dropout, and the numbers that are drawn next."""
    model, states = tiny("gemma3"), list[Tensor]()
    for module in model.get_encoder("image").modules():
        if hasattr(module, "dropout") and hasattr(module, "q_proj"):
            module.dropout = 0.5
    seqpar.hf.parallelize(model, group=group)
    model.get_encoder("image").register_forward_hook(lambda m, x, output: states.append(output.last_hidden_state))
    torch.manual_seed(group.rank())
    model(**make_batch("gemma3", "images"))
    return states[0].detach(), torch.rand(3)


def test_ranks_draw_alike_in_towers(pool: Pool) -> None:
    (states, after), (states_1, after_1) = pool.run(2, drawn_in_tower)
    torch.manual_seed(0)
    assert torch.equal(states, states_1) and torch.equal(after, torch.rand(3)) and not torch.equal(after, after_1)
