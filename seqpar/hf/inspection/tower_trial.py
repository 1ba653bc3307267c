"""Finds out by a trial run whether a tower computes each of its items, such as images, by itself.

The tower runs on items of different sizes together, with other neighbours, and each by itself, in evaluation and in
training mode. The outputs of an item must be the same. As in the trial run of the model, small numbers on the CPU
replace the weights, and of the layers of a kind the first one runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from ...patching.replaced import replaced
from ...patching.substitutes import own_token
from .cheap import TokenwiseFunctions, configs, run_one_of_each_kind, substitutes
from .support import TOWERS
from .trial import replaced_interface

_GRID = "grid_thw"
_ANY_VOCABULARY = 1 << 62
_TOLERANCE = 1e-4  # the largest change of a value, relative to the largest value, that counts as rounding error
Item = dict[str, Tensor]  # the arguments of a tower for one item


@dataclass(frozen=True)
class Items:
    """Where the items are in the arguments of a tower, and in its outputs, whose first dimension has them in order.

    Attributes:
        rows: the arguments that have the items along their first dimension: a row, or ``grid`` says how many rows.
        grid: the argument ``[images, 3]`` with the numbers of patches of each image: frames, height and width. None if
            each row is an item.
        frames: whether each frame of an image is an item, because the tower computes it by itself.
        merged: how many rows of an argument have a row in an output: in each output that the trial run has seen.
    """

    rows: tuple[str, ...]
    grid: str | None = None
    frames: bool = False
    merged: frozenset[int] = frozenset({1})


def find_towers(root: PreTrainedModel) -> list[tuple[PreTrainedModel, Items]]:
    """The towers in ``root``: the outermost models whose config is of the class of a vision_config or audio_config.

    Raises:
        ValueError: there is none, or one cannot be divided.
    """
    configs = [m.config for m in root.modules() if isinstance(m, PreTrainedModel)]
    kinds = {type(x) for config in configs for name in TOWERS if (x := getattr(config, name, None)) is not None}
    found: dict[str, PreTrainedModel] = {}
    for name, module in root.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if not is_inside and isinstance(module, PreTrainedModel) and type(module.config) in kinds:
            found[name] = module
    if not found:
        raise ValueError(f"split_towers=True: {type(root).__name__} has no vision or audio tower; leave it out")
    return [(tower, _find_items(tower, name)) for name, tower in found.items()]


def _find_items(tower: PreTrainedModel, name: str) -> Items:
    """Where the items of ``tower``, called ``name``, are in its arguments. ``tower`` is unchanged afterwards.

    Raises:
        ValueError: it does not compute each item by itself, or draws random numbers, or could not run.
    """
    try:
        return _find(tower)
    except Exception as error:
        reason = str(error) if isinstance(error, _NotItemwiseError) else f"its trial run failed: {error!r}"
        raise ValueError(
            f"split_towers=True: the tower {name!r} ({type(tower).__name__}) cannot be divided: {reason}; leave "
            "split_towers out, and every rank runs the tower on all images or sounds"
        ) from error


class _NotItemwiseError(Exception):
    pass


@torch.no_grad()
def _find(tower: PreTrainedModel) -> Items:
    items, examples = _examples(tower)
    with ExitStack() as stack:
        stack.enter_context(substitutes(tower, []))
        for config in configs(tower):
            stack.enter_context(replaced(config, _attn_implementation_internal="sdpa"))
        for module in tower.modules():
            module._buffers.update({name: x.clone() for name, x in module._buffers.items() if x is not None})
        stack.enter_context(replaced_interface(lambda *_: _attend))
        stack.enter_context(torch.random.fork_rng([]))
        # With so few tokens, several threads would be slower than one.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        # The items of a grid are so small that all layers can run.
        tables = run_one_of_each_kind(tower)[1] if items.grid is None else []
        stack.enter_context(TokenwiseFunctions(_ANY_VOCABULARY, 0))

        parameters = inspect.signature(tower.forward).parameters.values()
        takes_more = any(p.kind is p.VAR_KEYWORD or p.name == "output_hidden_states" for p in parameters)
        also = {"output_hidden_states": True} if takes_more else {}

        def run(*of: Item) -> list[Tensor]:
            for results in tables:
                results.clear()
            joined = {name: torch.cat([item[name] for item in of]) for name in of[0]}
            output = tower(**joined, **also)
            leaves = [x for x in tree_leaves(output) if x is not None]
            if not leaves or not all(isinstance(x, Tensor) and x.dim() for x in leaves):
                raise _NotItemwiseError("it returns something else than tensors with the items in order")
            return leaves

        a, b, c = examples
        for training in (False, True):
            for module in tower.modules():
                module.training = training
            mode = "in training mode " if training else ""
            state = torch.get_rng_state()
            alone = {id(x): run(x) for x in examples}
            if not torch.equal(state, torch.get_rng_state()):
                raise _NotItemwiseError(f"{mode}it draws random numbers, which would differ between the ranks")
            for pair in ((a, b), (b, c)):
                if why := _differ(run(*pair), [alone[id(x)] for x in pair], [_size(x) for x in pair]):
                    raise _NotItemwiseError(f"{mode}{why}")
            if items.grid is not None and (items.frames or not training):
                frames = _frames(b)
                found = not _differ(alone[id(b)], [run(x) for x in frames], [_size(x) for x in frames])
                items = replace(items, frames=found)
            merged = frozenset(_size(x) // len(y) for x in examples for y in alone[id(x)])
            items = replace(items, merged=merged)
    return items


def _attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    """A cheap attention function for transformers: a token gets the mean of the values that it sees."""
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    if mask is None:
        mean = v.mean(2, keepdim=True)
    else:
        scores = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask
        mean = scores.softmax(-1).nan_to_num() @ v
    return (own_token(q, k, v) + mean).transpose(1, 2).contiguous(), None


def _examples(tower: PreTrainedModel) -> tuple[Items, tuple[Item, Item, Item]]:
    """Three items. Of a tower with a grid, they have different sizes and several frames; otherwise each is a row."""
    config, parameters = tower.config, inspect.signature(tower.forward).parameters
    numbers = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers, dtype=torch.float32, device="cpu")

    first = next(iter(parameters))
    if _GRID in parameters:
        merged = getattr(config, "spatial_merge_size", 1)
        channels = _first(config, "in_channels", "in_chans", "num_channels")
        width = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
        grids = [[t, h * merged, w * merged] for t, h, w in ((1, 2, 6), (2, 4, 2), (3, 6, 2))]
        patches = [{first: random(t * h * w, width), _GRID: torch.tensor([[t, h, w]])} for t, h, w in grids]
        return Items((first,), _GRID, frames=True), (patches[0], patches[1], patches[2])
    if first == "pixel_values":
        size = config.image_size
        shape = (_first(config, "num_channels", "in_channels"), *((size, size) if isinstance(size, int) else size))
    elif first == "input_features":
        shape = (config.num_mel_bins, 2 * config.max_source_positions)
    else:
        raise _NotItemwiseError(f"it is not known what its argument {first} holds")
    rows: tuple[str, ...] = (first,)
    examples: list[Item] = [{first: random(1, *shape)} for _ in range(3)]
    masks: dict[str, tuple[int, ...]] = {}
    if first == "input_features":
        masks["attention_mask"] = 1, 1, config.max_source_positions, config.max_source_positions
    elif "patch_attention_mask" in parameters:
        masks["patch_attention_mask"] = 1, *(n // config.patch_size for n in shape[1:])
    for name in masks.keys() & parameters.keys():
        rows += (name,)
        for i, example in enumerate(examples):
            example[name] = torch.ones(masks[name], dtype=torch.bool, device="cpu")
            example[name][..., masks[name][-1] - i :] = False  # padding
    return Items(rows), (examples[0], examples[1], examples[2])


def _first(config: Any, *names: str) -> int:
    return next(int(n) for name in names if (n := getattr(config, name, None)) is not None)


def _size(item: Item) -> int:
    return len(next(iter(item.values())))


def _frames(item: Item) -> list[Item]:
    """The frames of an image with a grid, each as an image."""
    (first, patches), (_, grid) = item.items()
    frames = int(grid[0, 0])
    one = torch.cat([torch.ones_like(grid[:, :1]), grid[:, 1:]], 1)
    return [{first: x, _GRID: one} for x in patches.chunk(frames)]


def _differ(together: list[Tensor], alone: Sequence[list[Tensor]], sizes: Sequence[int]) -> str:
    """How the outputs for items together differ from the outputs for each by itself. Empty if they do not."""
    for x, *parts in zip(together, *alone, strict=True):
        if any(len(part) * sum(sizes) != len(x) * size for part, size in zip(parts, sizes, strict=True)):
            shapes = [tuple(part.shape) for part in parts]
            return f"the first dimension of its outputs does not have the items: {tuple(x.shape)} of {shapes}"
        expected = torch.cat(parts)
        if expected.shape != x.shape or not expected.isfinite().all():
            return f"its outputs of one item have another shape, or are not finite: {tuple(x.shape)}"
        change, largest = (float(y.abs().max()) for y in (x.float() - expected.float(), expected.float()))
        if change > _TOLERANCE * max(largest, 1e-6):
            return f"its output for an item changes by {change / largest:.1e} with the items beside it"
    return ""
