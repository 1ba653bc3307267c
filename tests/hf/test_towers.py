"""Towers whose images are divided over the ranks (``split_towers``): loss and gradients are one device's."""

from __future__ import annotations

import copy
import gc
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")

import transformers
from transformers.modeling_layers import GradientCheckpointingLayer

import seqpar
import seqpar.hf
from seqpar.hf.calls.towers import assign
from seqpar.hf.inspection.tower_trial import find_towers
from seqpar.patching.replaced import replaced
from seqpar.patching.substitutes import tensors_of

from ..live_bytes import LiveBytes
from ..pool import Pool, on_ranks
from . import test_multimodal, workers
from .test_multimodal import IMAGE, VIDEO
from .workers import Result, check_step, trained

pytestmark = pytest.mark.slow
LENGTH = 70
_INPUTS = ("pixel_values", "pixel_values_videos", "input_features")
Grid = tuple[int, int, int]  # of patches: frames, height, width; 2 x 2 are a token of Qwen3-VL
# By name: images, and videos. In the models other than Qwen3-VL, each image is a row of the same size.
IMAGES: dict[str, tuple[list[Grid], list[Grid]]] = {
    "some": ([(1, 4, 4), (1, 2, 6), (1, 6, 4), (1, 2, 2), (1, 4, 2)], []),
    "video": ([(1, 4, 4)], [(3, 4, 2)]),
    "one": ([(1, 4, 4)], []),
    "none": ([], []),
}


def tiny(kind: str, trains: bool = True) -> Any:
    others = {"llava": _llava, "voxtral": _voxtral}
    model = copy.deepcopy(others[kind]()) if kind in others else test_multimodal.tiny(kind)
    if not trains:
        for tower in _towers(model):
            tower.requires_grad_(False)
    return model


def _towers(model: nn.Module) -> list[nn.Module]:
    return [m for name, m in model.named_modules() if name.endswith(("vision_tower", "visual", "audio_tower"))]


@cache
def _llava() -> Any:
    small: Any = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 3}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**small, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(**{**small, "hidden_size": 32, "num_attention_heads": 4}, vocab_size=66),
        image_token_index=IMAGE,
    )
    return _with_weights(transformers.LlavaForConditionalGeneration, config)


@cache
def _voxtral() -> Any:
    small: Any = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.VoxtralConfig(
        audio_config={**small, "intermediate_size": 64, "num_mel_bins": 6, "max_source_positions": 16},
        text_config={
            **small, "model_type": "llama", "hidden_size": 32, "intermediate_size": 24, "vocab_size": 66,
            "num_key_value_heads": 2, "head_dim": 16,
        },
        audio_token_id=IMAGE,
    )  # fmt: skip
    return _with_weights(transformers.VoxtralForConditionalGeneration, config)


def _with_weights(cls: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.25) if p.dim() > 1 else p.add_(torch.randn_like(p), alpha=0.1)
            # Layers after the one whose features are used have no gradient.
            p.requires_grad_(not name.endswith("k_proj.bias") and "encoder.layers.2" not in name)
    return model.train()


def make_batch(kind: str, how: str, repeat: int = 1) -> dict[str, Any]:
    """Two rows of text with images and videos, of which a token of another kind comes after each image or frame."""
    g = torch.Generator().manual_seed(0)
    images, videos = (grids * repeat for grids in IMAGES[how])
    length = LENGTH * repeat
    ids = torch.randint(3, IMAGE, (2, length), generator=g)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -100)
    types, row, at = torch.zeros_like(ids), 0, 3
    for token, grids in ((IMAGE, images), (VIDEO, videos)):
        for frames, height, width in grids:
            for _ in range(frames):
                tokens = height * width // 4 if kind == "qwen3_vl" else 4
                if at + tokens >= length:
                    row, at = row + 1, 5
                ids[row, at : at + tokens] = token if kind == "qwen3_vl" else IMAGE
                types[row, at : at + tokens] = 1 + (token == VIDEO)
                at += tokens + 1
    labels[types > 0] = -100
    batch: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if kind in ("gemma3", "qwen3_vl"):
        batch["token_type_ids" if kind == "gemma3" else "mm_token_type_ids"] = types
    if kind == "qwen3_vl":
        for name, which, grids in (("pixel_values", "image", images), ("pixel_values_videos", "video", videos)):
            if grids:
                batch[name] = torch.randn(sum(t * h * w for t, h, w in grids), 12, generator=g)
                batch[f"{which}_grid_thw"] = torch.tensor(grids)
    elif kind == "voxtral":
        batch["input_features"] = torch.randn(len(images), 6, 32, generator=g)
    elif images:
        size = 16 if kind == "gemma3" else 8
        batch["pixel_values"] = torch.randn(len(images), 3, size, size, generator=g)
    return batch


@cache
def one_device(kind: str, how: str, trains: bool = True) -> Result:
    return trained(tiny(kind, trains), make_batch(kind, how))


Case = tuple[str, str, bool]  # the model, the images, and whether the tower is trained


@on_ranks
def check_cases(group: ProcessGroup, cases: list[tuple[Case, Result]], how: str = "") -> None:
    """``how``: in DDP, with FSDP2 of the tower's layers, or with activation checkpointing."""
    for (kind, images, trains), expected in cases:
        model = tiny(kind, trains)
        if how == "checkpoints":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        seqpar.hf.parallelize(model, group=group, split_towers=True)
        rows = counted_rows(model)
        outer = DistributedDataParallel(model, process_group=group) if how == "ddp" else model
        if how == "fsdp":
            (tower,) = _towers(model)
            mesh = DeviceMesh.from_group(group, "cpu")
            for module in (*(m for m in tower.modules() if isinstance(m, GradientCheckpointingLayer)), tower, model):
                fully_shard(module, mesh=mesh)
        batch = make_batch(kind, images)
        check_step(group, outer, batch, expected, kind, images, trains, sync=how not in ("ddp", "fsdp"))
        assert how == "checkpoints" or rows == _expected_rows(kind, images, group), (kind, images)
        if how:
            continue
        seqpar.hf.restore(model)
        rows.clear()
        model(**batch)
        assert rows == [len(batch[name]) for name in _INPUTS if name in batch]


def counted_rows(model: nn.Module) -> list[int]:
    """How many rows each call of the tower has computed, in a list that grows."""
    rows: list[int] = []
    (tower,) = _towers(model)
    embeds = next(m for m in tower.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d))
    embeds.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    return rows


def _expected_rows(kind: str, how: str, group: ProcessGroup) -> list[int]:
    """How many rows of images, and of videos, this rank computes: a smallest item if it has none."""
    expected = []
    for grids in filter(None, IMAGES[how]):
        sizes = [h * w if kind == "qwen3_vl" else 1 for t, h, w in grids for _ in range(t)]
        mine = assign(sizes, group.size())[group.rank()]
        expected.append(sum(sizes[item] for item in mine) or min(sizes))
    return expected


CASES: dict[int, list[Case]] = {
    2: [
        *((kind, "some", True) for kind in ("gemma3", "qwen3_vl", "llava", "voxtral")),
        *(("qwen3_vl", how, True) for how in ("video", "one", "none")),
        *((kind, "some", False) for kind in ("gemma3", "qwen3_vl")),
        ("gemma3", "one", True),
        ("gemma3", "one", False),
    ],
    4: [("gemma3", "some", True), ("qwen3_vl", "video", True), ("llava", "one", True)],
}


def _with_results(cases: list[Case]) -> list[tuple[Case, Result]]:
    return [(case, one_device(*case)) for case in cases]


@pytest.mark.thorough(world=[4])
@pytest.mark.parametrize("world", CASES)
def test_loss_and_gradients(pool: Pool, world: int) -> None:
    pool.run(world, check_cases, _with_results(CASES[world]))


@pytest.mark.thorough(how=["ddp", "checkpoints"])
@pytest.mark.parametrize("how", ["ddp", "fsdp", "checkpoints"])
def test_fewer_images_than_ranks(pool: Pool, how: str) -> None:
    """All ranks run the modules of the tower, and join its collectives in forward and in backward."""
    cases = [("qwen3_vl", "one", True), ("gemma3", "one", how != "checkpoints")]
    pool.run(2, check_cases, _with_results(cases), how)


@on_ranks
def measured(group: ProcessGroup, kind: str, split: bool, repeat: int) -> tuple[int, int, int]:
    """The bytes that the call of the tower leaves, of these the bytes of its outputs, and the bytes that it sends."""
    model = seqpar.hf.parallelize(tiny(kind), group=group, split_towers=split)
    found: list[int] = []
    (tower,) = _towers(model)

    def now(_: nn.Module, args: Any, output: Any = ()) -> None:
        outputs = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors_of(output)}
        found.extend((live.now(), sum(outputs.values()), trace.bytes_sent))

    model(**make_batch(kind, "some", repeat))  # what a process makes once is not counted
    gc.collect()
    gc.disable()  # a collection in the middle would free what an earlier test has left
    tower.register_forward_pre_hook(now)
    tower.register_forward_hook(now)
    try:
        with LiveBytes() as live, seqpar.trace() as trace:
            model(**make_batch(kind, "some", repeat))
    finally:
        gc.enable()
    before, after = found[:3], found[3:]
    return after[0] - before[0], after[1], after[2] - before[2]


@pytest.mark.thorough(kind=["gemma3"])
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_memory_and_bytes(pool: Pool, kind: str) -> None:
    """A rank keeps the activations of its own images, and sends their outputs once."""
    more = {}
    for split in (False, True):
        short, long = (pool.run(2, measured, kind, split, repeat)[0] for repeat in (2, 4))
        more[split] = [b - a for a, b in zip(short, long, strict=True)]  # without what does not depend on the images
    (whole, outputs, nothing), (half, gathered, sent) = more[False], more[True]
    pixels = 64 * 12 if kind == "qwen3_vl" else 5 * 3 * 16 * 16  # of one rank, in its part of the batch
    assert nothing == 0 and gathered == outputs and sent == outputs // 2
    assert half <= whole // 2 + gathered + 4 * pixels


@on_ranks
def others(group: ProcessGroup, kind: str) -> tuple[Any, ...]:
    """Generation, a call of the tower outside of a forward on one rank alone, and calls with more arguments."""
    model, batch = seqpar.hf.parallelize(tiny(kind), group=group, split_towers=True).eval(), make_batch(kind, "one")
    batch.pop("labels")
    tokens = model.generate(**batch, max_new_tokens=6, do_sample=False).tolist()
    if group.rank() == 0:
        images = {name: x for name, x in batch.items() if name in ("pixel_values", "image_grid_thw")}
        assert model.get_image_features(**images).last_hidden_state is not None
    if kind == "qwen3_vl":
        with pytest.raises(ValueError, match=r"^cu_seqlens: with split_towers=True Qwen3VLVisionModel gets a part"):
            model(**batch, image_cu_seqlens=torch.tensor([0, 16], dtype=torch.int32))
        (tower,) = _towers(model)
        with replaced(tower.merger, forward=lambda x: x.view(1, -1, 32)):
            words = r"Qwen3VLVisionModel returned a tensor of shape \(1, 8, 32\) for 16 rows"
            with pytest.raises(ValueError, match=words):
                model(**batch)
    output = model(**batch, num_items_in_batch=torch.tensor(40), use_cache=False, output_hidden_states=True)
    assert output.image_hidden_states is not None if kind == "llava" else output.hidden_states is not None
    return tokens


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
def test_generation(pool: Pool, kind: str) -> None:
    batch = make_batch(kind, "one")
    batch.pop("labels")
    expected = tiny(kind).eval().generate(**batch, max_new_tokens=6, do_sample=False).tolist()
    assert pool.run(2, others, kind) == [expected] * 2


def test_verify(pool: Pool) -> None:
    pool.run(2, verified)


@on_ranks
def verified(group: ProcessGroup) -> None:
    model = seqpar.hf.parallelize(tiny("qwen3_vl"), group=group, split_towers=True)
    assert seqpar.hf.verify(model, make_batch("qwen3_vl", "video"), raise_on_error=True).ok


class Planted(nn.Module):
    """Changes the hidden states of a tower, ``[images, patches, channels]`` or ``[patches, channels]``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "mixes":
            return x + 0.01 * x.mean(0, keepdim=True)
        if self.how == "mixes in training":
            return x + self.training * x.roll(1, 0)
        if self.how == "counts":
            return x + torch.arange(len(x)).view(-1, *[1] * (x.dim() - 1)) * 0.01
        if self.how == "drops":
            return torch.nn.functional.dropout(x, 0.1, self.training)
        if self.how == "flattens":
            return x.flatten(0, 1)[None] if x.dim() == 3 else x[None]
        if self.how == "fails":
            raise RuntimeError("planted")
        return self.norm(x.flatten(0, -2)).view_as(x)  # running statistics in evaluation mode


PLANTED = {
    "mixes": r"its output for an item changes by .* with the items beside it",
    "mixes in training": r"in training mode its output for an item changes",
    "batch norm": r"in training mode its output for an item changes",
    "counts": r"its output for an item changes",
    "drops": r"in training mode it draws random numbers",
    "flattens": r"the first dimension of its outputs does not have the items",
    "fails": r"its trial run failed: RuntimeError\('planted'\)",
}


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_refused_towers(kind: str) -> None:
    for how, words in PLANTED.items():
        model = tiny(kind)
        (tower,) = _towers(model)
        if kind == "gemma3":
            tower.post_layernorm = nn.Sequential(tower.post_layernorm, Planted(how))
        else:
            tower.patch_embed = nn.Sequential(tower.patch_embed, Planted(how))
        before = {name: x.clone() for name, x in model.state_dict().items()}
        if how == "flattens" and kind == "qwen3_vl":
            words = "its trial run failed"
        with pytest.raises(ValueError, match=f"^split_towers=True: the tower .*{tower.__class__.__name__}.*{words}"):
            seqpar.hf.parallelize(model, split_towers=True)
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items()), how
        seqpar.hf.parallelize(model)  # without the switch it is parallelized


def test_frames_that_see_one_another_are_not_divided() -> None:
    """A tower that mixes the frames of an image divides whole images."""
    model = tiny("qwen3_vl")
    (tower,) = _towers(model)
    ((_, items),) = find_towers(model)
    assert items.frames
    forward = type(tower).forward

    def mixing(hidden_states: torch.Tensor, grid_thw: torch.Tensor, **kwargs: Any) -> Any:
        sizes = grid_thw.prod(-1).tolist()
        parts = [x + 0.1 * x.mean(0) for x in hidden_states.split(sizes)]
        return forward(tower, torch.cat(parts), grid_thw, **kwargs)

    vars(tower)["forward"] = mixing
    ((_, items),) = find_towers(model)
    assert not items.frames


def test_refused_settings() -> None:
    with pytest.raises(ValueError, match=r"^split_towers=True: with batches='per_rank' a batch has no images"):
        seqpar.hf.parallelize(tiny("gemma3"), split_towers=True, batches="per_rank")
    with pytest.raises(ValueError, match=r"^split_towers=True: LlamaForCausalLM has no vision or audio tower"):
        seqpar.hf.parallelize(workers.tiny("llama"), split_towers=True)
    with pytest.raises(ValueError, match=r"trial run failed.*every rank runs the tower on all images"):
        seqpar.hf.parallelize(tiny("gemma4"), split_towers=True)


def test_assign() -> None:
    """The largest items first, each to the rank with the fewest rows; the items of a rank in order."""
    assert assign([4, 9, 4, 1, 5], 2) == [[1, 2], [0, 3, 4]]
    assert assign([3], 3) == [[0], [], []]
    assert assign([], 2) == [[], []]
