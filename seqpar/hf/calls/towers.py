"""Vision and audio towers whose items, such as images, are divided over the ranks of a sequence.

Each rank runs a tower on some of the items, and the outputs are all-gathered in order. Every rank may use all outputs,
so the backward of the all-gather is a reduce-scatter: a rank's tower gets the gradients of its own items, summed over
the ranks. A rank's gradient of the tower's weights is then a part of the same sum over the ranks as without the
division.

A rank without an item runs the smallest one and drops its output. Its gradients are 0. So all ranks call the modules
and the hooks in the tower equally often, as FSDP and DDP need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...base.checks import no_compile
from ...placement.layout import Assigned
from ..inspection.support import parameters_of
from ..inspection.tower_trial import Items
from ..state import Patch, forwards

# Arguments that models pass on to towers from their own call, and that do not change what a tower computes.
_OF_THE_CALL = (
    *("return_dict", "output_hidden_states", "output_attentions", "output_router_logits"),
    *("use_cache", "num_items_in_batch"),
)


def _cut(items: Items, arguments: dict[str, Any], tower: nn.Module) -> tuple[list[int], Callable[[Sequence[int]], Any]]:
    """The rows of each item, and a function that returns the arguments for some items.

    Raises:
        ValueError: an argument has another number of rows, or it is not known whether it has a value for each item.
    """
    for name, x in arguments.items():
        if x is not None and name not in (*items.rows, items.grid, *_OF_THE_CALL):
            raise ValueError(
                f"{name}: with split_towers=True {type(tower).__name__} gets a part of the images or sounds on each "
                f"rank, and it is not known which part of {name} belongs to them; leave {name} or split_towers out"
            )
    given = {name: x for name in items.rows if isinstance(x := arguments.get(name), Tensor)}
    first = next(iter(given.values()))
    grid = None if items.grid is None else arguments[items.grid]
    if grid is not None and items.frames:
        one = torch.cat([torch.ones_like(grid[:, :1]), grid[:, 1:]], 1)
        grid = one.repeat_interleave(grid[:, 0], 0)
    sizes = [1] * len(first) if grid is None else grid.prod(-1).tolist()
    for name, x in given.items():
        if len(x) != sum(sizes):
            raise ValueError(f"{name}: it has {len(x)} rows, but the other arguments are of {sum(sizes)}")
    ends = list(accumulate(sizes, initial=0))

    def part(some: Sequence[int]) -> dict[str, Any]:
        local = {name: torch.cat([x[ends[i] : ends[i + 1]] for i in some]) for name, x in given.items()}
        if grid is not None:
            local[cast(str, items.grid)] = grid[list(some)]
        return {**arguments, **local}

    return sizes, part


def assign(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The items of each rank, in order: the largest items first, each to the rank with the fewest rows so far."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    rows = [0] * ranks
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        rank = rows.index(min(rows))
        parts[rank].append(item)
        rows[rank] += sizes[item]
    return [sorted(part) for part in parts]


def split_tower(patch: Patch, items: Items) -> Callable[..., Any]:
    """What ``replace_forward`` runs instead of the forward of a tower."""

    @no_compile
    def run(tower: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        now = forwards.now
        if now is None or now.patch is not patch or now.positions is None or patch.ranks == 1:
            return forward(*args, **kwargs)  # the ranks do not call it together, or there is one
        arguments = {**dict(zip(parameters_of(tower), args, strict=False)), **kwargs}
        sizes, part = _cut(items, arguments, tower)
        if not sizes:
            return forward(*args, **kwargs)
        parts = assign(sizes, patch.ranks)
        mine = parts[patch.rank] or [sizes.index(min(sizes))]
        rows = sum(sizes[item] for item in mine)

        def gather(x: Any) -> Any:
            if x is None:
                return None
            merged = rows // len(x) if isinstance(x, Tensor) and x.dim() and len(x) else 0
            if merged not in items.merged or merged * len(x) != rows:
                raise ValueError(
                    f"split_towers=True: {type(tower).__name__} returned {_shown(x)} for {rows} rows, whose first "
                    "dimension does not have the images or sounds in order; leave split_towers out"
                )
            ends = list(accumulate((size // merged for size in sizes), initial=0))
            ranges = [range(*pair) for pair in pairwise(ends)]
            layout = Assigned(tuple(tuple(ranges[item] for item in part) for part in parts))
            return patch.new_sharding(layout.seq_len, layout).unshard(x if parts[patch.rank] else x[:0], 0)

        return tree_map(gather, forward(**part(mine)))

    return run


def _shown(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
