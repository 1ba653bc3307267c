"""A key/value cache that stays sharded: each rank keeps its part of the prompt and every so many-th new token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer


class ShardedLayer(DynamicLayer):
    """This rank's keys and values of one layer, ``[batch, kv_heads, kept, head_dim]``, with their global positions.

    Length and positions that transformers asks for are those of the whole sequence.
    """

    keys: Any
    values: Any
    is_initialized: bool

    def __init__(self, window: int | None, record_past: bool = False) -> None:
        super().__init__()
        self.window = window
        self.record_past = record_past  # keep what a crop may need again
        self.total = 0  # tokens seen, by all ranks
        self.positions = torch.empty(0, dtype=torch.int64)  # of what is kept here, increasing
        self.coming: tuple[Tensor, Tensor | None, int] | None = None

    def expect(self, positions: Tensor, select: Tensor | None, total: int) -> None:
        """The next update brings tokens of which this rank keeps ``select`` (None: all), at ``positions``; after it the
        sequence has ``total``."""
        self.coming = positions, select, total

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep this rank's part of the new tokens; returns all it has for the attention at hand."""
        if self.coming is None:
            raise ValueError("past_key_values: this cache is filled by the parallelized model's own forward only")
        positions, select, total = self.coming
        self.coming = None
        if select is not None:
            index = select.to(key_states.device)
            key_states, value_states = (x.index_select(2, index) for x in (key_states, value_states))
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys, self.values = key_states, value_states
            self.is_initialized = True
        else:
            self.keys = torch.cat([self.keys, key_states], dim=2)
            self.values = torch.cat([self.values, value_states], dim=2)
        self.positions = torch.cat([self.positions, positions])
        self.total = total
        keys, values, self.seen = self.keys, self.values, self.positions
        if not self.record_past:
            self._let_go()
        return keys, values

    def _let_go(self) -> None:
        """Of what no later query sees."""
        if self.window is not None and (gone := int((self.positions <= self.total - self.window).sum())):
            self.keys, self.values = (x[:, :, gone:].clone() for x in (self.keys, self.values))
            self.positions = self.positions[gone:]

    def activate_past_recording(self) -> None:
        self.record_past = True

    def get_seq_length(self) -> int:
        return self.total

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.total + query_length, 0

    def get_query_offset(self) -> int:
        return self.total

    def reset(self) -> None:
        self.keys, self.values, self.is_initialized = None, None, False
        self.total, self.positions = 0, torch.empty(0, dtype=torch.int64)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens (rejected candidates of assisted generation)."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop: {tokens_to_remove} given; a negative number removes so many of the last tokens")
        if self.window is not None and tokens_to_remove and self.total > self.window and not self.record_past:
            raise ValueError(
                "crop: a sliding-window layer has let go of the keys it would need again; call "
                "cache.activate_past_recording() before filling it"
            )
        self.total += tokens_to_remove
        kept = int((self.positions < self.total).sum())
        self.positions = self.positions[:kept]
        if self.is_initialized:
            self.keys, self.values = self.keys[:, :, :kept], self.values[:, :, :kept]
            self._let_go()


def shard_cache(cache: Any, layers: int) -> None:
    """Let ``cache``, which must be empty and dynamic, keep sharded layers from now on.

    Raises:
        TypeError, ValueError: another kind of cache, or one that has been filled.
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"past_key_values={type(cache).__name__}: a transformers Cache is needed")
    if cache.layers and all(isinstance(layer, ShardedLayer) for layer in cache.layers):
        return
    odd = [layer for layer in cache.layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)]
    if odd:
        raise ValueError(
            f"past_key_values: layers of type {type(odd[0]).__name__}; a sharded cache grows: leave "
            "cache_implementation out, or pass DynamicCache()"
        )
    if cache.get_seq_length() > 0:
        raise ValueError("past_key_values: filled before the model was parallelized; start from an empty cache")
    cache.layers = [
        ShardedLayer(getattr(layer, "sliding_window", None), getattr(layer, "record_past", False))
        for layer in cache.layers or [None] * layers
    ]
