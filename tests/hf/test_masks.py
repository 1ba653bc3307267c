"""The mask that a model asks transformers for decides what its tokens see: one device's loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

pytest.importorskip("transformers")

import transformers
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    or_masks,
    sliding_window_overlay,
)

import seqpar
import seqpar.hf
from seqpar import Mask
from seqpar.hf.calls import attention as hf_attention
from seqpar.hf.calls.attention import mask_of_function

from ..pool import Pool, on_ranks
from .workers import Result, check_loss, check_step, trained
from .workers import make_batch as make_text
from .workers import tiny as make_text_model

pytestmark = pytest.mark.slow
VOCAB, IMAGE, LENGTH, PREFIX = 66, 64, 45, 13
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 8,
    "patch_size": 4, "vision_use_head": False,
}  # fmt: skip


def tiny(kind: str, implementation: str) -> Any:
    t, both = transformers, {"use_bidirectional_attention": True}
    if kind.startswith("paligemma"):
        text = t.Gemma2Config(**_TEXT, **_SLIDING) if kind == "paligemma2" else t.GemmaConfig(**_TEXT)
        config = t.PaliGemmaConfig(
            text_config=text, vision_config=t.SiglipVisionConfig(**_VISION), image_token_index=IMAGE, projection_dim=32
        )
        make: Any = t.PaliGemmaForConditionalGeneration
    elif kind == "gemma":
        config, make = t.GemmaConfig(**_TEXT, **both), t.GemmaForCausalLM
    elif kind == "gemma2":
        config, make = t.Gemma2Config(**_TEXT, **_SLIDING, **both), t.Gemma2ForCausalLM
    else:
        config, make = t.Gemma3TextConfig(**_TEXT, **_SLIDING, **both), t.Gemma3ForCausalLM
    torch.manual_seed(0)
    model = make._from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.25) if p.dim() > 1 else p.add_(torch.randn_like(p), alpha=0.1)
            if name.endswith("k_proj.bias"):
                p.requires_grad_(False)  # it shifts all scores of a query alike: its gradient is rounding error
    return model.train()


def make_batch(how: str) -> dict[str, Tensor]:
    """Text as in ``workers.py``; or a prefix of 13 tokens that see one another, with an image or without.

    "suffix" is text whose token types say that no token is in the prefix.
    """
    if how in ("plain", "packed", "left", "right", "short"):
        return make_text("plain", 6) if how == "short" else make_text(how)
    batch = make_text("left" if how.endswith("left") else "right" if how.endswith("right") else "plain")
    ids, types = batch["input_ids"], torch.ones_like(batch["input_ids"])
    if how != "suffix":
        types[:, :PREFIX] = 0
        types[1, PREFIX:] = torch.arange(LENGTH - PREFIX) >= 4  # a longer prefix in row 1
        batch["labels"][types == 0] = -100
        types[(ids == 0)] = 0  # a tokenizer gives padding the type 0
    if how.startswith("image"):
        ids[:, 7:11] = IMAGE
        batch["pixel_values"] = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return {**batch, "token_type_ids": types}


@on_ranks
def compared(group: ProcessGroup, cases: list[tuple[tuple[str, str, str], Result]]) -> None:
    """Cases in a row that differ in their batch only are steps of the same model."""
    before: tuple[str, str] | None = None
    model: Any = None
    for (kind, implementation, how), expected in cases:
        batch = make_batch(how)
        if (kind, implementation) != before:
            before, model = (kind, implementation), seqpar.hf.parallelize(tiny(kind, implementation), group=group)
        model.zero_grad()
        check_step(group, model, batch, expected, kind, implementation, how)
        if implementation == "sdpa" and how in ("plain", "packed"):
            seqpar.hf.verify(model, batch)


def compare(pool: Pool, hows: dict[str, str]) -> None:
    """Compare models ("kind implementation") with one device on batches."""
    cases = [(*model.split(), how) for model, names in hows.items() for how in names.split(", ")]
    results = [trained(tiny(*case[:2]), make_batch(case[2]), use_cache=False) for case in cases]
    pool.run(2, compared, list(zip(cases, results, strict=True)))


def test_bidirectional_gemma(pool: Pool) -> None:
    """Layers that are not causal, in models that ask for a causal mask (Gemma, Gemma 2) and for a full one (Gemma 3).

    In transformers, eager attention takes the mask. SDPA takes the layer's word where it leaves the mask out.
    """
    hows = {
        "gemma eager": "plain, packed",
        "gemma sdpa": "plain, packed, left, short",
        "gemma2 eager": "left, short",
        "gemma3 eager": "packed",
        "gemma3 sdpa": "left",
    }
    compare(pool, hows)


def test_prefix_of_paligemma(pool: Pool) -> None:
    hows = {
        "paligemma eager": "plain, image left",
        "paligemma sdpa": "plain, prefix, prefix right, suffix",
        "paligemma2 eager": "prefix left, suffix, image",
    }
    compare(pool, hows)


@on_ranks
def generated(group: ProcessGroup, kind: str) -> tuple[list[list[int]], list[list[int]]]:
    prompt = make_batch("image left")
    prompt["token_type_ids"][:] = 0
    del prompt["labels"]
    models = tiny(kind, "eager").eval(), seqpar.hf.parallelize(tiny(kind, "eager").eval(), group=group)
    plain, ours = (m.generate(**prompt, max_new_tokens=8, do_sample=False).tolist() for m in models)
    return plain, ours


def test_generation_after_a_prefix(pool: Pool) -> None:
    for plain, ours in pool.run(2, generated, "paligemma2"):
        assert plain == ours


def test_blocks_of_a_mask_function() -> None:
    ids = torch.tensor([[-1, 0, 0, 0, -1, 1, 1], [0, 0, -1, -1, -1, -1, -1]])
    valid = torch.ones(2, 7, dtype=torch.bool)

    def block(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (ids[row, query] == ids[row, key]) & (ids[row, query] >= 0)

    blocks, near = [[(1, 4), (5, 7)], [(0, 2)]], sliding_window_overlay(2)
    causal = or_masks(causal_mask_function, block)
    assert mask_of_function(causal, valid, [None]) == Mask.causal(blocks)
    assert mask_of_function(causal_mask_function, valid, [None]).dense(7).equal(Mask.causal().dense(7))
    inside = mask_of_function(and_masks(causal, near), valid, [None, 2])
    assert inside == Mask.causal(blocks) & Mask.sliding_window(1, -1)
    assert mask_of_function(or_masks(and_masks(near, causal_mask_function), block), valid, [2]) == Mask.causal(
        blocks, 2
    )
    ids[0, 5:] = 0  # two images that see one another
    with pytest.raises(ValueError, match="is not causal with blocks of tokens"):
        mask_of_function(causal, valid, [None])
    valid[0, 5:] = False
    assert mask_of_function(causal, valid, [None]) == Mask.causal(blocks)


def test_another_attention_before_parallelize() -> None:
    model = seqpar.hf.restore(seqpar.hf.parallelize(make_text_model("llama"), strategy="local"))
    model.set_attn_implementation("sdpa")
    expected = model(**make_batch("plain")).loss.item()
    loss = seqpar.hf.parallelize(model, strategy="local")(**make_batch("plain")).loss.item()
    check_loss(loss, expected)


@pytest.mark.skipif(not hasattr(masking_utils, "remap_positions_for_packed_sequence"), reason="transformers 5.23")
def test_structure_of_a_shard_whose_positions_jump() -> None:
    """transformers takes such a shard for packed documents, on this rank only."""
    positions, tokens = torch.tensor([[0, 1, 6, 7]]), torch.full((1, 4), -1)
    causal, blocks = masking_utils.causal_mask_function, masking_utils.blockwise_overlay(tokens)
    same_document = masking_utils.packed_sequence_mask_function(positions // 6)
    for inside, outside, version in (
        ((causal, blocks), (), 5.23),
        ((causal,), (blocks,), 5.23),
        ((causal,), (blocks,), 5.24),
    ):
        remapped = masking_utils.remap_positions_for_packed_sequence(masking_utils.or_masks(*inside), positions)
        plain = masking_utils.or_masks(*outside, masking_utils.or_masks(*inside))
        if version == 5.23:
            asked = masking_utils.or_masks(*outside, masking_utils.and_masks(same_document, remapped))
        else:
            asked = masking_utils.and_masks(masking_utils.or_masks(*outside, remapped), same_document)
        assert hf_attention.structure(asked) == hf_attention.structure(plain)
        assert hf_attention._blocks(hf_attention._unpacked(asked), 1, 4, torch.device("cpu")) == [[]]
        tokens[0, :2] = 0  # an image of two tokens
        assert hf_attention._blocks(hf_attention._unpacked(asked), 1, 4, torch.device("cpu")) == [[(0, 2)]]
        tokens[:] = -1
