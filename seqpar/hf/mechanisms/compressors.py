"""Attention to a window of tokens and to compressed keys (DeepSeek V4).

In transformers the compressor is a module of the attention layer. It pools each window of ``compress_rate`` tokens,
with the window before it or without, to one row, which is key and value of all heads. A token sees the rows of the
windows that end before it; or an indexer, with compressed keys of its own, chooses a few of these for it.

In a parallelized model a rank computes the windows that end in its tokens. It fetches the projected rows of their other
tokens, and the unmodified compressor pools them: it gets them from a cache that stands in for its own. The compressed
rows of all ranks are then all-gathered, ``1 / compress_rate`` as many as tokens. The window of tokens is attended to as
in any other layer. Attention to the compressed rows is computed for a few tokens at a time and merged with it by their
log-sum-exps. Bytes sent per layer and rank of P ranks with m windows each: the rows of windows across borders, and
``(P - 1) m (head_dim + index_head_dim) e``; in backward the gradients of the former in float32, and ``(P - 1) m
head_dim 4``.

Shapes: b batch, s tokens of this rank, h heads, d head_dim, m windows of this rank, k chosen rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...base.checks import no_compile
from ...memory.weights import CACHE_ARGUMENTS
from ...mixers import fetch, link_of
from ...patching.forwards import replace_forward
from ...patching.running import Running
from ...sharding.sharding import Sharding
from ...strategies.row_exchange import JoinBackward, window_layout, window_plan
from ..batch import BatchShard, PlacedShard
from ..state import OWNER, Patch
from . import indexers
from .indexers import IndexedAttention


def has_compressor(layer: nn.Module) -> bool:
    compressor = getattr(layer, "compressor", None)
    return isinstance(compressor, nn.Module) and isinstance(getattr(compressor, "compress_rate", None), int)


def indexer_of(compressor: nn.Module) -> nn.Module | None:
    indexer = getattr(compressor, "indexer", None)
    return indexer if isinstance(indexer, nn.Module) else None


@dataclass(eq=False)
class Compressed:
    """What a layer with a compressor gets as its attention mask, and what its compressor writes to it."""

    shard: PlacedShard
    rows: Tensor | None = None  # [b, m, d]; None in sequences that are shorter than a window
    windows: Sharding | None = None
    indices: Tensor | None = None  # [b, s, k] of the chosen windows, -1 for none; None: every token sees all before it
    before: Tensor | None = None  # int64 [b or 1, s]: how many windows end before each token


_running: Running[Compressed] = Running()


def replace_compressors(layers: list[nn.Module], patch: Patch) -> None:
    """Let the compressors of ``layers`` compress the tokens of all ranks."""
    for layer in filter(has_compressor, layers):
        compressor = cast(nn.Module, layer.compressor)
        runs: list[tuple[nn.Module, Any]] = [(layer, partial(_attend, patch)), (compressor, _compress)]
        if (indexer := indexer_of(compressor)) is not None:
            runs.append((indexer, _choose))
        for module, run in runs:
            if "forward" in vars(module):
                raise ValueError(
                    f"layer {getattr(layer, 'layer_idx', '?')} ({type(layer).__name__}): the forward of its "
                    f"{type(module).__name__} was replaced; parallelize the model before that"
                )
            patch.undo.callback(replace_forward(module, OWNER, run))
            patch.has_indexers = True
        patch.has_compressors = True


@no_compile
def _attend(patch: Patch, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    shard = kwargs.get("seqpar")
    if not isinstance(shard, BatchShard):
        return forward(*args, **kwargs)
    given = Compressed(shard if isinstance(shard, PlacedShard) else patch.place(shard))
    with _running(given):
        return forward(*args, **{**kwargs, "attention_mask": given})


@no_compile
def _compress(compressor: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The forward of a compressor, which gives its layer no rows. The attention function gets them."""
    if (given := _running.now) is None:
        return forward(*args, **kwargs)  # type: ignore[no-any-return]
    call, sharding = Call(compressor, args, kwargs), given.shard.sharding
    if windows := sharding.seq_len // call.size:
        given.windows = windows_of(sharding, call.size)
        given.before = ((call.positions + 1) // call.size).clamp(max=windows)
        given.rows = call.compress(sharding)
        if (indexer := indexer_of(compressor)) is not None:
            given.indices = indexer(*args, **kwargs)
    return call.no_rows(), None


@no_compile
def _choose(indexer: nn.Module, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The forward of an indexer: int64 ``[b, s, k]``, windows of the full sequence, and -1 for none."""
    with indexers.indexers(indexer):
        if (given := _running.now) is None or given.windows is None:
            return forward(*args, **kwargs)
        with torch.no_grad():
            call = Call(indexer, args, kwargs)
            return call.choose(given.windows.unshard(call.compress(given.shard.sharding)))


def windows_of(sharding: Sharding, size: int) -> Sharding:
    """Which windows of ``size`` tokens each rank has."""
    ranks: Any = {name: getattr(sharding, name) for name in ("mesh", "group", "strategy")}
    return Sharding(sharding.seq_len // size, window_layout(sharding.tokens, size), **ranks)


class _RowsFoundError(Exception):
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


class _WindowCache:
    """The cache of a compressor or an indexer, and its layer.

    ``take`` makes windows from projected tokens, ``[b, s, ...]`` to ``[b, windows * size, ...]``, and returns how much
    later they begin than windows one after another. The forward ends with their compressed rows. With ``rows``, the
    compressed rows of all tokens, there are no new windows.
    """

    def __init__(self, take: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], rows: Tensor | None) -> None:
        self.take, self.rows = take, rows

    @property
    def layers(self) -> _WindowCache:
        return self

    def __getitem__(self, layer: int) -> _WindowCache:
        return self

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor | int]:
        return self.take(kv, gate) if self.rows is None else (kv[:, :0], gate[:, :0], 0)

    def update_overlap_state(self, *args: Any) -> tuple[None, None]:
        return None, None

    def update_compressor_states(self, name: str, rows: Tensor) -> Tensor:
        if self.rows is None:
            raise _RowsFoundError(rows)
        return self.rows


class Call:
    """A call of a compressor or an indexer, with ``hidden [b, s, channels]`` and ``positions [b or 1, s]``."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.module, self.size = module, cast(int, module.compress_rate)
        self.arguments = dict(signature(partial(type(module).forward, module)).bind(*args, **kwargs).arguments)
        self.cache = next(name for name in CACHE_ARGUMENTS if name in self.arguments)
        self.hidden, self.positions = self.arguments["hidden_states"], self.arguments["position_ids"]

    def row_windows(self, kv: Tensor) -> int:
        """Of how many windows a row is. A token has a part in ``kv`` for each of them."""
        return kv.shape[2] // cast(int, self.module.head_dim)

    def no_rows(self) -> Tensor:
        rows: Tensor = self.hidden.new_zeros(len(self.hidden), 1, 0, cast(int, self.module.head_dim))
        return rows

    def run(self, take: Any = None, rows: Tensor | None = None, tokens: slice = slice(None)) -> Any:
        """What the module's forward returns for some of the tokens, or the compressed rows with which it ends."""
        cut = {name: x[:, tokens] if isinstance(x, Tensor) else x for name, x in self.arguments.items()}
        try:
            return type(self.module).forward(self.module, **{**cut, self.cache: _WindowCache(take, rows)})
        except _RowsFoundError as found:
            return found.rows

    def compress(self, sharding: Sharding) -> Tensor:
        """The compressed rows of this rank's windows, ``[b, m, channels]``."""
        placement, link = link_of(sharding, self.hidden)
        fetched, own = self.hidden, self.hidden

        def take(kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            nonlocal fetched, own
            batch, width = len(kv), kv.shape[2]
            before = self.row_windows(kv) - 1
            plan = window_plan(placement.tokens, placement.rank, batch, self.size, before, kv.device)
            fetched = fetch(torch.cat([kv, gate], 2).flatten(0, 1), plan.rows, link, "windows")
            later = (plan.windows - torch.arange(len(plan.windows), device=kv.device)) * self.size
            own = plan.own
            return *fetched.view(batch, len(plan.windows) * self.size, 2 * width).split(width, 2), later

        rows = self.run(take)
        found: Tensor = JoinBackward.apply(rows.index_select(1, own), fetched)
        return found

    def choose(self, rows: Tensor) -> Tensor:
        """The windows that an indexer with the compressed ``rows`` of all tokens chooses, int64 ``[b, s, k]``."""
        batch, length = self.hidden.shape[:2]
        size = max(1, indexers._ELEMENTS // (batch * rows.shape[1] * getattr(self.module, "num_heads", 64)))
        parts = [self.run(rows=rows, tokens=slice(at, at + size)) for at in range(0, max(length, 1), size)]
        return torch.cat(parts, 1)


def merge_compressed(q: Tensor, out: Tensor, lse: Tensor, given: Compressed, scale: float) -> Tensor:
    """``out [b, s, h, d]``, attention of ``q [b, s, h, d]`` to tokens, with attention to compressed rows.

    ``lse [b, h, s]`` is of ``out``.
    """
    if given.rows is None or given.windows is None or given.before is None:
        return out
    hi = given.before.expand(len(q), -1)
    seen = None, None, given.indices, torch.zeros_like(hi), hi
    more, more_lse = IndexedAttention.apply(
        q, given.rows.to(q.dtype), *seen, scale, given.windows.tokens, given.windows
    )
    lse = lse.transpose(1, 2)  # [b, s, h]
    total = torch.logaddexp(lse, more_lse)
    parts = (x * (of_x - total).exp()[..., None] for x, of_x in ((out, lse), (more, more_lse)))
    return sum(parts).to(out.dtype)  # type: ignore[union-attr]
