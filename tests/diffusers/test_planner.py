"""The planner's sizes of diffusers' models: as many weights and FLOPs as the classes have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import seqpar
from seqpar import Mask
from seqpar.planner.diffusion import CLASSES, TEXT_TOKENS
from seqpar.planner.model import MODELS, model_of
from seqpar.planner.shape import ModelShape

diffusers = pytest.importorskip("diffusers")


def shape_of(model: Any) -> ModelShape:
    return model_of({**model.config, "_class_name": type(model).__name__})  # as in its config.json


def on_meta(name: str, **config: Any) -> Any:
    with torch.device("meta"):
        return getattr(diffusers, name)(**config)


@pytest.mark.parametrize("name", CLASSES)
def test_weights_are_the_class_s(name: str) -> None:
    """With the class's default sizes."""
    model = on_meta(name)
    counted = sum(p.numel() for p in model.parameters())
    assert shape_of(model).parameters == pytest.approx(counted, rel=0.005)


def test_flops_are_the_class_s() -> None:
    """A forward of two blocks with Wan's and Flux's sizes, counted by PyTorch."""
    tokens, image = 3 * 20 * 30, 2000
    wan = on_meta("WanTransformer3DModel", num_layers=2)
    text = torch.empty(1, TEXT_TOKENS, 4096, device="meta")
    video = torch.empty(1, 16, 3, 40, 60, device="meta")
    with FlopCounterMode(display=False) as counter:
        wan(video, torch.empty(1, device="meta"), text)
    in_text = 2 * TEXT_TOKENS * (4096 * 5120 + 5120**2 + 2 * 2 * 5120**2)  # the text's embedding, keys and values
    planned = shape_of(wan).model_flops(tokens, tokens**2) / 3
    assert counter.get_total_flops() == pytest.approx(planned + in_text, rel=0.002)
    flux = on_meta("FluxTransformer2DModel", num_layers=1, num_single_layers=1)
    inputs = {
        "hidden_states": torch.empty(1, image, 64, device="meta"),
        "encoder_hidden_states": text,
        "pooled_projections": torch.empty(1, 768, device="meta"),
        "timestep": torch.empty(1, device="meta"),
        "img_ids": torch.empty(image, 3, device="meta"),
        "txt_ids": torch.empty(TEXT_TOKENS, 3, device="meta"),
    }
    with FlopCounterMode(display=False) as counter:
        flux(**inputs)
    joint = image + TEXT_TOKENS
    planned = shape_of(flux).model_flops(joint, joint**2) / 3
    in_text = 2 * TEXT_TOKENS * 4096 * 3072  # the text's embedding
    assert counter.get_total_flops() == pytest.approx(planned + in_text, rel=0.002)


def test_plans_shard_the_sequence_only() -> None:
    plan = seqpar.plan("wan2.1-14b", seq_len=75600, ranks=16)
    assert plan.mask == Mask.full() and plan.model == MODELS["wan2.1-14b"]
    assert all(choice.degrees["tp"] == 1 and choice.switches.recompute != "keep_attention" for choice in plan.choices)
    assert plan.best.strategy in ("ulysses", "hybrid")
    with pytest.raises(ValueError, match=r"examples/video\.py"):
        plan.code()
    with pytest.raises(ValueError, match="recompute='none' or 'full'"):
        seqpar.plan("wan2.1-14b", seq_len=75600, ranks=16, offload=True)
    with pytest.raises(ValueError, match=r"_class_name='UNet2DModel'.*Choose one of Wan"):
        model_of({"_class_name": "UNet2DModel"})
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
    with pytest.raises(ValueError, match="no ffn_dim"):
        model_of({"_class_name": "WanTransformer3DModel", **sizes})
