"""Generation by transformers with a sharded key/value cache (see ``decoding.py``).

``model.generate`` runs on every rank with the same full prompt. The first forward, the prefill, is a call with a full
batch: each rank computes its tokens of the prompt, and caches their keys and values. Each later forward is a decoding
step.

In an encoder-decoder model every forward of the decoder is a decoding step. Each rank has some of the encoder's states,
and a cross-attention caches their keys and values. It attends to the keys of all ranks as the other layers do.

Shapes: b batch, new tokens of a forward, cached tokens of this rank, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from ...base.checks import no_compile
from ...comm.handshake import Fingerprint, all_gather_header, propagate_errors
from ...decoding import GrowingBuffer, attend_to_cached
from ...kernels.base import Score
from ...masks.mask import Mask, layer_mask
from ...placement.heads import Heads
from ...sharding.spec import AttentionSpec
from ..batch import batch_checksum
from ..inspection.support import cache_of, parameters_of, recomputes, text_model
from ..mechanisms.encoders import has_encoder
from ..mechanisms.key_values import storing_layer
from ..state import DecodeShard, FullCall, Patch
from .full_batch import shard_call

_ONLY_DYNAMIC = (
    "cache: its layers are of type {}, but only a dynamic cache can be sharded; leave cache_implementation out, or "
    "pass DynamicCache()"
)
_MEDIA_ARGUMENTS = ("pixel_values", "input_features")  # how the names of image, video and audio arguments begin


def shard_generation(
    model: nn.Module, kwargs: dict[str, Any], has_images: bool
) -> tuple[dict[str, Any], FullCall | None]:
    """Prepare a forward of ``generate``, as ``shard_call`` does. ``kwargs`` hold all new tokens on every rank.

    In a decoding step the result holds all new tokens too, and a ``DecodeShard``, but no ``FullCall``.
    """
    patch = cast(Patch, model._seqpar)
    cache = cache_of(kwargs)
    if kwargs.get("labels") is not None:
        raise ValueError(
            "cache: with labels the model trains, and does not fill a cache; leave it out (peft's prefix "
            "tuning passes one: use LoRA or prompt tuning)"
        )
    if recomputes(model):
        raise ValueError(
            "use_cache: with activation checkpointing in train mode transformers fills no cache; call model.eval() or "
            "model.activation_checkpointing_disable() before you generate"
        )
    config = cast(Any, text_model(cast(Any, model)).config).get_text_config(decoder=True)
    encodes = has_encoder(model)
    if cache is None:
        cache = DynamicCache(config=config)
        if encodes:
            cache = EncoderDecoderCache(cache, DynamicCache())
        kwargs["cache" if "cache" in parameters_of(model) else "past_key_values"] = cache
    if encodes:
        cache = _own_cache(cache)
    _shard_cache(cache, config.num_hidden_layers)
    ids, embeds, mask = (f"decoder_{x}" if encodes else x for x in ("input_ids", "inputs_embeds", "attention_mask"))
    tokens = kwargs[embeds] if kwargs.get(ids) is None else kwargs[ids]
    past, new = cache.get_seq_length(), tokens.shape[1]
    total = past + new
    attention_mask = kwargs.pop(mask, None)
    if isinstance(attention_mask, dict):  # generate made one mask per layer type; ``no_mask`` makes each of them None
        attention_mask = None
    _check_same_tokens(tokens, attention_mask, past, patch, [] if past else tree_leaves(kwargs))
    padding = _left_padding(attention_mask)
    if not encodes and kwargs.get("position_ids") is None:
        kwargs["position_ids"] = torch.arange(past, total, device=tokens.device)[None]
    if past == 0 and new >= patch.ranks and not encodes:
        prompt = {**kwargs, "attention_mask": attention_mask}
        local, full_call = shard_call(model, prompt, has_images, seed=0, fills_cache=True)
        # With a cache, position_ids that restart start no document.
        local["seqpar"] = local["seqpar"].having(mask=padding)
        _expect(cache, full_call.tokens[patch.rank], slice(None), total)
        return local, replace(full_call, fills_cache=True)
    if has_images and any(name.startswith(_MEDIA_ARGUMENTS) for name, x in kwargs.items() if x is not None):
        raise ValueError(
            "pixel_values: images were passed with a prompt shorter than the number of ranks, or after the cache was "
            "filled; pass all images to generate together with the first prompt"
        )
    positions = torch.arange(past, total, device="cpu")
    cached_here = slice((patch.rank - past) % patch.ranks, None, patch.ranks)
    _expect(cache, positions[cached_here], cached_here, total)
    kwargs["seqpar"] = DecodeShard(cache, past, padding)
    return kwargs, None


def generate_alike(model: nn.Module, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``model.generate``. If it raises on one rank, or ends there before it ends on another, all ranks raise."""
    group = cast(Patch, model._seqpar).sequence_group
    with propagate_errors(group):
        output = generate(*args, **kwargs)
        _check_ended(all_gather_header(lambda: _TokensHeader(_ENDED, Fingerprint(0), Fingerprint(0)), group))
    return output


def _check_ended(headers: Sequence[_TokensHeader]) -> None:
    ended = [rank for rank, header in enumerate(headers) if header.past == _ENDED]
    if ended and len(ended) < len(headers):
        raise ValueError(
            f"generate: rank(s) {ended} of the sequence group have ended, and others go on; give all ranks the same "
            "options, and leave out criteria that depend on a rank, such as max_time"
        )


_ENDED = -1


class _TokensHeader(NamedTuple):
    past: int  # the number of tokens in the cache; _ENDED after the last forward
    tokens: Fingerprint  # of the new tokens
    others: Fingerprint  # of the other tensors of the first forward


def _check_same_tokens(
    tokens: Tensor, attention_mask: Tensor | None, past: int, patch: Patch, arguments: list[Any]
) -> None:
    """Compare the ranks' new tokens, and the tensors in ``arguments``, such as images or an encoder's states."""

    def header() -> _TokensHeader:
        # A forward that adds a single token to the cache adds no padding, so its mask need not be copied to the host.
        if attention_mask is not None and (past == 0 or tokens.shape[1] > 1):
            is_token = attention_mask != 0
            if attention_mask.dim() == 2 and bool((is_token[:, :-1] & ~is_token[:, 1:]).any()):
                raise ValueError("attention_mask: it has padding after tokens; put a prompt's padding on the left")
        others = batch_checksum({str(i): x for i, x in enumerate(arguments)})
        return _TokensHeader(past, Fingerprint(batch_checksum({"tokens": tokens})), Fingerprint(others))

    headers = all_gather_header(header, patch.sequence_group)
    _check_ended(headers)
    if len({header[:2] for header in headers}) == 1 and len(set(headers)) > 1:
        raise ValueError(
            "generate: the ranks of the sequence group have the same tokens, but other images, sounds or states of the "
            "encoder; give all ranks the same inputs, and call model.eval(), so that an encoder computes the same on "
            "all of them (also torch.backends.cudnn.benchmark = False)"
        )
    if len(set(headers)) > 1:
        raise ValueError(
            "input_ids: the ranks of the sequence group passed different tokens; give all ranks the same prompt, and "
            "set the same seed on all of them (torch.manual_seed) before sampling"
        )


def _left_padding(attention_mask: Tensor | None) -> Mask:
    """Hides the padding at the start of each row of ``attention_mask [b, total]``."""
    if attention_mask is None or attention_mask.dim() != 2:
        return Mask.full()
    starts = (attention_mask != 0).int().argmax(1).tolist()
    if not any(starts):
        return Mask.full()
    return Mask.padding(starts[:1] if len(set(starts)) == 1 else starts)


class ShardedCacheLayer(DynamicLayer):
    """This rank's part of one layer's cache. Its lengths and offsets count the tokens of the full sequence.

    Keys that have left the sliding ``window`` are dropped, unless ``record_past`` keeps them for a crop.
    """

    keys: Any  # [b, n, cached, d]
    values: Any  # [b, n, cached, v_head_dim]
    is_initialized: bool

    def __init__(self, window: int | None, record_past: bool = False) -> None:
        super().__init__()
        self.window = window
        self.record_past = record_past
        self.total = 0  # the number of tokens of the full sequence so far
        # The global positions of ``keys``, increasing; and of the keys that the last ``update`` returned, before it
        # dropped keys outside the window.
        self.positions = self.attended = torch.empty(0, dtype=torch.int64, device="cpu")
        self._incoming: tuple[Tensor, slice, int] | None = None
        self._make_buffers()

    def _make_buffers(self) -> None:
        self._key_buffer, self._value_buffer, self._position_buffer = (GrowingBuffer(dim) for dim in (2, 2, 0))

    def expect(self, positions: Tensor, select_new: slice, total: int, joined: dict[int, Tensor]) -> None:
        """Set which tokens the next ``update`` appends, after which the full sequence has ``total`` tokens.

        ``positions`` are the tokens' global positions, int64. ``select_new`` are their indices among the tokens that
        ``update`` gets. Layers that share their positions also share the positions that follow, which ``joined`` holds.
        """
        if len(self.positions):
            if id(self.positions) not in joined:
                joined[id(self.positions)] = self._position_buffer.append(self.positions, positions)
            positions = joined[id(self.positions)]
        self._incoming = positions, select_new, total

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new tokens that ``expect`` announced, and return the cached keys and values at ``attended``.

        ``key_states`` are [b, n, new, d], ``value_states`` [b, n, new, v_head_dim].
        """
        if self._incoming is None:
            raise ValueError("cache: only the forward of its parallelized model can fill this cache")
        positions, select_new, total = self._incoming
        self._incoming = None
        key_states, value_states = key_states[:, :, select_new], value_states[:, :, select_new]
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys, self.values = key_states, value_states
            self.is_initialized = True
        else:
            with torch.no_grad():
                self.keys = self._key_buffer.append(self.keys, key_states)
                self.values = self._value_buffer.append(self.values, value_states)
        self.total, self.positions = total, positions
        keys, values, self.attended = self.keys, self.values, self.positions
        if not self.record_past:
            self._drop_outside_window()
        return keys, values

    def _drop_outside_window(self) -> None:
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
        self.total, self.positions = 0, torch.empty(0, dtype=torch.int64, device="cpu")
        self._make_buffers()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of the full sequence, as transformers does."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop: got {tokens_to_remove}; expected zero or the negative of the number of tokens to remove"
            )
        if self.window is not None and tokens_to_remove and self.total > self.window and not self.record_past:
            raise ValueError(
                "crop: this sliding-window layer has dropped keys that would be visible again; call "
                "cache.activate_past_recording() before filling the cache"
            )
        self.total += tokens_to_remove
        length = int((self.positions < self.total).sum())
        self.positions = self.positions[:length].clone()  # layers may share the tensor behind it
        if self.is_initialized:
            self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]
            self._drop_outside_window()


def _shard_cache(cache: Any, layers: int) -> None:
    """Replace the ``layers`` layers of an empty dynamic cache by ``ShardedCacheLayer``, unless that was done before."""
    if not isinstance(cache, Cache):
        raise TypeError(f"cache={type(cache).__name__}: expected a transformers Cache")
    stored = [layer for layer in cache.layers if not _is_shared(layer)]
    if stored and all(isinstance(layer, ShardedCacheLayer) for layer in stored):
        return
    other = [layer for layer in stored if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)]
    if other:
        raise ValueError(_ONLY_DYNAMIC.format(type(other[0]).__name__))
    if cache.get_seq_length() > 0:
        raise ValueError("cache: it was filled before the model was parallelized; start with an empty cache")
    cache.layers = [
        layer
        if _is_shared(layer)
        else ShardedCacheLayer(getattr(layer, "sliding_window", None), getattr(layer, "record_past", False))
        for layer in cache.layers or [None] * layers
    ]


def _own_cache(cache: Any) -> Any:
    """The part of the ``cache`` of an encoder-decoder model that holds the keys of its decoder's own tokens."""
    if not isinstance(cache, EncoderDecoderCache):
        raise TypeError(
            f"cache={type(cache).__name__}: expected a transformers EncoderDecoderCache, because the model has an "
            "encoder; leave it out, or pass EncoderDecoderCache(DynamicCache(), DynamicCache())"
        )
    for layer in cache.cross_attention_cache.layers:
        if type(layer) is not DynamicLayer:
            raise ValueError(_ONLY_DYNAMIC.format(type(layer).__name__))
    return cache.self_attention_cache


def _is_shared(layer: Any) -> bool:
    """Whether the cache layer holds no keys, because its attention layer reads another layer's keys."""
    return isinstance(layer, DummyLayer)


def _expect(cache: Any, positions: Tensor, select_new: slice, total: int) -> None:
    joined: dict[int, Tensor] = {}
    for layer in cache.layers:
        if isinstance(layer, ShardedCacheLayer):
            layer.expect(positions, select_new, total, joined)


@no_compile
@torch.no_grad()
def decode(
    module: nn.Module,
    q: Tensor,  # [b, new, h, d], the same on every rank
    k: Tensor,  # [b, cached, n, d], of this rank
    v: Tensor,  # [b, cached, n, v_head_dim], of this rank
    sinks: Tensor | None,  # [h]
    shard: DecodeShard,
    patch: Patch,
    spec: AttentionSpec,
    name: str,
    across: bool = False,
) -> Tensor:
    """Attention of the new tokens over the cached keys of all ranks: [b, new, h, v_head_dim], without gradients.

    The keys are of earlier tokens and the new ones, or ``across`` of the encoder's states.
    """
    if spec.dropout_p:
        raise ValueError(
            f"{name}: attention dropout is {spec.dropout_p}, but generation drops nothing; use model.eval()"
        )
    assert spec.softmax_scale is not None and spec.layer_mask is not None
    if across:
        assert shard.states is not None
        mask, positions = shard.states
    else:
        mask, positions = shard.mask, shard.cache.layers[storing_layer(module)].attended
    if k.shape[1] != len(positions):
        raise ValueError(f"{name}: its keys come from another layer's cache; such sharing is not supported")
    heads = Heads.of_model(q.shape[2], k.shape[2])
    score = Score(spec.softmax_scale, spec.softcap, spec.slopes(heads, q.device), sinks)
    cached, mask = (k, v, positions), layer_mask(mask, *spec.layer_mask)
    return attend_to_cached(
        q, cached, shard.start, mask, heads, score, patch.sequence_group, spec.backend, shard.shared
    )
