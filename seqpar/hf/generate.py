"""Generation with a sharded cache: the prompt is sharded over the ranks, and every key stays on the rank that made it.

``model.generate`` runs on every rank with the same full prompt. Its first forward is sharded as in training. Each later
forward computes the new tokens on every rank, and one rank keeps their keys: position modulo ranks. Every rank attends
with the new queries to its own keys, and one all-gather a layer collects the partial results, which are then merged
(Tree Attention, Shyam et al., 2024).

Shapes: b batch, new tokens of a forward, cached tokens of this rank, h heads, n kv heads, g query heads a kv head, d
head_dim.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..comm.collectives import all_gather_single
from ..comm.handshake import Fingerprint, all_gather_header
from ..comm.trace import count_sent
from ..kernels import select
from ..kernels.base import Carry, Score, empty_carry, finish, merge_
from ..keys import KeyIntervals
from ..layout import shard_positions
from ..mask import Mask
from ..sharding import unshard
from .batch import BatchShard, batch_mask, token_ranges
from .shared_keys import storing_layer
from .state import DecodeShard, Patch, Prefill

_GATHERED_BYTES = 256 << 20  # of the partial results that one all-gather collects


def prepare_forward(model: nn.Module, patch: Patch, kwargs: dict[str, Any], merging: bool) -> Prefill:
    """Replace the arguments of a forward on full tokens, the same on every rank, by this rank's, in place.

    With ``merging``, images are merged into the prompt first: its tokens are left whole for the model, whose text model
    shards what it is given.

    Raises:
        ValueError: the call has labels; the prompt has padding on the right; the ranks bring different tokens; or
            images come after the prompt.
        RuntimeError: another rank raised on its arguments.
    """
    cache = kwargs.get("past_key_values")
    if kwargs.get("labels") is not None:
        raise ValueError("past_key_values: with labels the model trains, and does not fill a cache; leave it out")
    config = cast(Any, model.config).get_text_config()
    if cache is None:
        cache = kwargs["past_key_values"] = DynamicCache(config=config)
    shard_cache(cache, config.num_hidden_layers)
    tokens = kwargs["inputs_embeds"] if kwargs.get("input_ids") is None else kwargs["input_ids"]
    past, new = cache.get_seq_length(), tokens.shape[1]
    total = past + new
    attention_mask = kwargs.pop("attention_mask", None)
    if isinstance(attention_mask, dict):  # made by generate, one for each type of layer; no_mask makes them None
        attention_mask = None
    _check_same_tokens(tokens, attention_mask, past, patch)
    position_ids = kwargs.get("position_ids")
    if position_ids is None:
        position_ids = torch.arange(past, total, device=tokens.device)[None]
    if past == 0 and new >= patch.ranks:
        return _prepare_prefill(cache, patch, kwargs, position_ids, attention_mask, total, merging)
    if merging and any(
        name.startswith(("pixel_values", "input_features")) for name, x in kwargs.items() if x is not None
    ):
        raise ValueError(
            "pixel_values: images come with a prompt shorter than the number of ranks, or after the cache is filled; "
            "give generate all images with the first prompt"
        )
    positions = torch.arange(past, total)
    select_new = (positions % patch.ranks == patch.rank).nonzero().flatten()  # of the new tokens, those kept here
    _expect(cache, positions[select_new], select_new, total)
    kwargs["position_ids"] = position_ids
    kwargs["seqpar"] = DecodeShard(cache, past, _left_padding(attention_mask))
    return Prefill(sharded=False)


class _TokensHeader(NamedTuple):
    """The number of tokens in the cache, and the new tokens."""

    past: int
    tokens: Fingerprint


def _check_same_tokens(tokens: Tensor, attention_mask: Tensor | None, past: int, patch: Patch) -> None:
    """Compare the ranks' tokens. Different tokens would lead to wrong results, or to ranks that wait forever."""

    def header() -> _TokensHeader:
        # Only a prompt brings padding: each later forward adds one token.
        if attention_mask is not None and (past == 0 or tokens.shape[1] > 1):
            is_token = attention_mask != 0
            if attention_mask.dim() == 2 and bool((is_token[:, :-1] & ~is_token[:, 1:]).any()):
                raise ValueError("attention_mask: it has padding after tokens; put a prompt's padding on the left")
        data = tokens.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _TokensHeader(past, Fingerprint(zlib.crc32(data)))

    if len(set(all_gather_header(header, patch.group))) > 1:
        raise ValueError(
            "input_ids: the ranks of the sequence group bring different ones; give all ranks the same prompt, and "
            "seed them alike (torch.manual_seed) before sampling"
        )


def _prepare_prefill(
    cache: Any,
    patch: Patch,
    kwargs: dict[str, Any],
    position_ids: Tensor,
    attention_mask: Tensor | None,
    total: int,
    merging: bool,
) -> Prefill:
    positions = [shard_positions(total, patch.ranks, rank, patch.layout) for rank in range(patch.ranks)]
    mine = positions[patch.rank]
    kwargs["position_ids"] = position_ids
    if not merging:
        for name in ("input_ids", "inputs_embeds"):
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name].index_select(1, mine.to(kwargs[name].device))
        kwargs["position_ids"] = position_ids.index_select(-1, mine.to(position_ids.device))
    ranges = None if attention_mask is None else token_ranges(attention_mask)
    mask = batch_mask(None, ranges, total)
    kwargs["seqpar"] = BatchShard(total, int(position_ids.max()), patch.ranks, patch.layout, mask)
    _expect(cache, mine, None, total)
    keep = kwargs.pop("logits_to_keep", 0)
    if isinstance(keep, Tensor):
        raise ValueError("logits_to_keep: it is a tensor of indices; while the prompt is sharded, give a number")
    if keep == 1:  # each rank's last token: one of them is the prompt's. A number would let Gemma 4 drop the others
        kwargs["logits_to_keep"] = torch.tensor([len(mine) - 1])
    last_rank = next(rank for rank, p in enumerate(positions) if int(p[-1]) == total - 1)
    return Prefill(sharded=True, logits_to_keep=keep, last_rank=last_rank, cut=mine if merging else None)


def _left_padding(attention_mask: Tensor | None) -> Mask:
    if attention_mask is None or attention_mask.dim() != 2:
        return Mask.full()
    starts = (attention_mask != 0).int().argmax(1).tolist()
    if not any(starts):
        return Mask.full()
    return Mask.padding(starts[:1] if len(set(starts)) == 1 else starts)


def finish_forward(output: Any, prefill: Prefill, patch: Patch) -> Any:
    """All-gather the output of a sharded prompt; of the last token's logits alone, broadcast them."""
    if not prefill.sharded or patch.group is None or patch.ranks == 1:
        return output
    if isinstance(output, tuple):
        raise ValueError("return_dict=False: a sharded prompt's output is all-gathered by name; leave return_dict out")
    for name in ("logits", "last_hidden_state"):
        x = getattr(output, name, None)
        if not isinstance(x, Tensor):
            continue
        if prefill.logits_to_keep == 1 and name == "logits":
            x = x[:, -1:].contiguous()
            dist.broadcast(x, group=patch.group, group_src=prefill.last_rank)
        else:
            x = unshard(x, 1, group=patch.group, layout=patch.layout)
            x = x[:, -prefill.logits_to_keep :] if prefill.logits_to_keep else x
        setattr(output, name, x)
        output[name] = x
    return output


class _GrowingBuffer:
    """Spare capacity behind cached rows, along one dimension, so that appending a token does not copy all of them."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.buffer: Tensor | None = None

    @torch.no_grad()
    def append(self, cached: Tensor, new: Tensor) -> Tensor:
        """``cached`` followed by ``new``, as a view of the buffer."""
        buffer, start, length, added = self.buffer, self._start_of(cached), cached.shape[self.dim], new.shape[self.dim]
        if buffer is None or start is None or start + length + added > buffer.shape[self.dim]:
            shape = list(cached.shape)
            shape[self.dim] = length + added + max(64, length // 8)
            buffer = self.buffer = cached.new_empty(shape)
            buffer.narrow(self.dim, 0, length).copy_(cached)
            start = 0
        buffer.narrow(self.dim, start + length, added).copy_(new)
        return buffer.narrow(self.dim, start, length + added)

    def _start_of(self, cached: Tensor) -> int | None:
        """The index of the buffer's row that ``cached`` starts at; None if ``cached`` is not a view of the buffer.

        It is not after a beam search has reordered it, for example.
        """
        buffer, dim = self.buffer, self.dim
        if buffer is None or cached.shape[:dim] != buffer.shape[:dim] or cached.stride() != buffer.stride():
            return None
        if buffer.is_inference() and not torch.is_inference_mode_enabled():  # writing to it would raise
            return None
        if cached.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
            return None
        return cached.storage_offset() // buffer.stride(dim)


class ShardedCacheLayer(DynamicLayer):
    """This rank's part of one layer's cache. Lengths and positions that transformers asks for are the full sequence's.

    Attributes:
        keys: ``[b, n, cached, d]``.
        values: ``[b, n, cached, v_head_dim]``.
        positions: int64 ``[cached]``, their global positions, increasing.
        attended: the positions of the keys that the last update returned.
        total: tokens of the full sequence so far.
        window: the sliding window, outside which keys are dropped; None keeps all.
        record_past: keep keys outside the window too, because a crop may need them again.
    """

    keys: Any
    values: Any
    is_initialized: bool

    def __init__(self, window: int | None, record_past: bool = False) -> None:
        super().__init__()
        self.window = window
        self.record_past = record_past
        self.total = 0
        self.positions = self.attended = torch.empty(0, dtype=torch.int64)
        self._incoming: tuple[Tensor, Tensor | None, int] | None = None
        self._make_buffers()

    def _make_buffers(self) -> None:
        self._key_buffer, self._value_buffer, self._position_buffer = (_GrowingBuffer(dim) for dim in (2, 2, 0))

    def expect(self, positions: Tensor, select_new: Tensor | None, total: int) -> None:
        """Say what the next ``update`` brings.

        Args:
            positions: the global positions of the new tokens that this rank keeps.
            select_new: their indices among the new tokens; None: all of them.
            total: tokens of the full sequence after the update.
        """
        self._incoming = positions, select_new, total

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append this rank's part of the new tokens; return all keys and values it has for this forward."""
        if self._incoming is None:
            raise ValueError("past_key_values: only the forward of its parallelized model can fill this cache")
        positions, select_new, total = self._incoming
        self._incoming = None
        if select_new is not None:
            index = select_new.to(key_states.device)
            key_states, value_states = (x.index_select(2, index) for x in (key_states, value_states))
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys, self.values, self.positions = key_states, value_states, positions
            self.is_initialized = True
        else:
            self.keys = self._key_buffer.append(self.keys, key_states)
            self.values = self._value_buffer.append(self.values, value_states)
            self.positions = self._position_buffer.append(self.positions, positions)
        self.total = total
        keys, values, self.attended = self.keys, self.values, self.positions
        if not self.record_past:
            self._drop_outside_window()
        return keys, values

    def _drop_outside_window(self) -> None:
        """Drop the keys that no later query sees."""
        if self.window is not None and (drop := int((self.positions <= self.total - self.window).sum())):
            self.keys, self.values = (x[:, :, drop:] for x in (self.keys, self.values))
            self.positions = self.positions[drop:]

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
        self._make_buffers()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens (rejected candidates of assisted generation)."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop: expected a negative number, of tokens to remove at the end, got {tokens_to_remove}"
            )
        if self.window is not None and tokens_to_remove and self.total > self.window and not self.record_past:
            raise ValueError(
                "crop: this sliding-window layer has dropped keys that it would need again; call "
                "cache.activate_past_recording() before filling the cache"
            )
        self.total += tokens_to_remove
        kept = int((self.positions < self.total).sum())
        self.positions = self.positions[:kept]
        if self.is_initialized:
            self.keys, self.values = self.keys[:, :, :kept], self.values[:, :, :kept]
            self._drop_outside_window()


def shard_cache(cache: Any, layers: int) -> None:
    """Replace the layers of ``cache``, which must be empty and dynamic, by sharded ones.

    Raises:
        TypeError: it is not a transformers Cache.
        ValueError: it is another kind of cache, or not empty.
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"past_key_values={type(cache).__name__}: expected a transformers Cache")
    stored = [layer for layer in cache.layers if not _is_shared(layer)]
    if stored and all(isinstance(layer, ShardedCacheLayer) for layer in stored):
        return
    other = [layer for layer in stored if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)]
    if other:
        raise ValueError(
            f"past_key_values: it has layers of type {type(other[0]).__name__}, but a sharded cache must grow; leave "
            "cache_implementation out, or pass DynamicCache()"
        )
    if cache.get_seq_length() > 0:
        raise ValueError("past_key_values: it was filled before the model was parallelized; start with an empty cache")
    cache.layers = [
        layer
        if _is_shared(layer)
        else ShardedCacheLayer(getattr(layer, "sliding_window", None), getattr(layer, "record_past", False))
        for layer in cache.layers or [None] * layers
    ]


def _is_shared(layer: Any) -> bool:
    """Whether it holds no keys, because its attention reads those of another layer's cache."""
    return type(layer).__name__ == "DummyLayer"


def _expect(cache: Any, positions: Tensor, select_new: Tensor | None, total: int) -> None:
    for layer in cache.layers:
        if isinstance(layer, ShardedCacheLayer):
            layer.expect(positions, select_new, total)


@torch.no_grad()
def decode(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: DecodeShard,
    patch: Patch,
    mask: Mask,
    score: Score,
    name: str,
) -> Tensor:
    """Attention of new tokens over the cached keys of all ranks. Without gradients.

    Args:
        module: the attention layer.
        q: ``[b, new, h, d]``, the same on every rank.
        k: ``[b, cached, n, d]``, this rank's part of the layer's cache.
        v: ``[b, cached, n, v_head_dim]``, likewise.
        shard: the forward's.
        patch: the model's.
        mask: the layer's.
        score: how scores are computed, with the layer's sinks.
        name: the layer's, for errors.

    Returns:
        ``[b, new, h, v_head_dim]`` in q's dtype, the same bits on every rank.
    """
    positions = shard.cache.layers[storing_layer(module)].attended
    if k.shape[1] != len(positions):
        raise ValueError(f"{name}: its keys come from another layer's cache; such sharing is not supported")
    # As many of the new tokens at a time as have _GATHERED_BYTES of partial results on all ranks together.
    new = q.shape[1]
    span = max(1, _GATHERED_BYTES // (patch.ranks * q.shape[0] * q.shape[2] * (v.shape[3] + 1) * 4))
    outs = []
    for start in range(0, new, span):
        stop = min(start + span, new)
        queries = range(shard.start + start, shard.start + stop)
        intervals = _key_intervals(mask, shard, positions, queries, q.shape[2] // k.shape[2], q.device)
        part = None if intervals is None else _attend(q[:, start:stop], k, v, intervals, score, patch.backend)
        merged = _merge_over_ranks(*(part or empty_carry(q[:, start:stop], v.shape[3])), patch)
        outs.append(finish(merged, score, q.dtype)[0])
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def _key_intervals(
    mask: Mask, shard: DecodeShard, positions: Tensor, queries: range, q_per_kv: int, device: torch.device
) -> KeyIntervals | None:
    """Which of the keys at ``positions [cached]`` the new queries see, each query ``q_per_kv`` times in a row.

    None: this rank caches none that a query sees.
    """
    # Every layer caches a suffix of the same positions, so that their number determines them.
    key = mask, queries, q_per_kv, len(positions), device
    if key not in shard.intervals:
        rows = torch.arange(queries.start, queries.stop).repeat_interleave(q_per_kv)
        lo, hi = (torch.searchsorted(positions, torch.atleast_2d(x)).int() for x in mask.intervals(rows))
        unused = rows.int()  # positions matter to ALiBi and dropout only
        seen = bool((lo < hi).any())
        shard.intervals[key] = KeyIntervals(lo, hi, unused, unused).to(device) if seen else None
    return shard.intervals[key]


def _attend(q: Tensor, k: Tensor, v: Tensor, intervals: KeyIntervals, score: Score, backend: str) -> Carry:
    """This rank's partial result: float32 ``acc [b, new, h, v_head_dim]`` and ``lse [b, h, new]``."""
    # The query heads of a kv head become consecutive queries, so that each key is read once for all of them.
    g = q.shape[2] // k.shape[2]
    q = rearrange(q, "b s (n g) d -> b (s g) n d", g=g)
    acc, lse = select(backend, q, k, score, v_head_dim=v.shape[3]).forward(q, k, v, intervals, score, None, False)
    return rearrange(acc, "b (s g) n d -> b s (n g) d", g=g), rearrange(lse, "b n (s g) -> b (n g) s", g=g)


def _merge_over_ranks(acc: Tensor, lse: Tensor, patch: Patch) -> Carry:
    """All-gather the partial results and merge them, in the order of the ranks on every rank."""
    if patch.group is None or patch.ranks == 1:
        return acc, lse
    packed = torch.cat([acc.flatten(), lse.flatten()])
    gathered = packed.new_empty(patch.ranks, len(packed))
    all_gather_single(gathered.view(-1), packed, group=patch.group)
    count_sent(packed.nbytes * (patch.ranks - 1), patch.group, messages=patch.ranks - 1)
    parts = [(x[: acc.numel()].view(acc.shape), x[acc.numel() :].view(lse.shape)) for x in gathered]
    merged_acc, merged_lse = parts[0]
    for part_acc, part_lse in parts[1:]:
        merge_(merged_acc, merged_lse, part_acc, part_lse)
    return merged_acc, merged_lse
