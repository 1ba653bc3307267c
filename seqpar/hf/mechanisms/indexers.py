"""Latent attention whose layers attend to a few keys, which an indexer chooses for each token (DeepSeek V3.2, GLM-5).

In transformers the indexer is a module of the attention layer. It gives each earlier token a score, and returns the
indices of the ``topk`` tokens with the highest ones. In a parallelized model the keys of the indexer, one head, are
all-gathered. The unmodified module then runs on a few of this rank's rows at a time, with the keys of all tokens of the
row's document, so that it chooses as on one device. Its indices count the tokens of the full sequence. Layers without
an indexer of their own reuse the indices of an earlier layer.

The attention function all-gathers latents and rotated keys, and takes the chosen ones of a few rows at a time. Backward
computes these rows again, and reduce-scatters the gradients of latents and rotated keys in float32. Bytes sent per
layer and rank of P ranks with s rows each: ``(P - 1) s (index_head_dim + kv_lora_rank + qk_rope_head_dim) e`` in
forward, without index_head_dim in layers that reuse indices, and ``(P - 1) s (kv_lora_rank + qk_rope_head_dim) 4`` in
backward.

Shapes: b batch, s tokens of this rank, t tokens of the sequence, c rows at a time, k chosen keys, h heads, d head_dim,
e v_head_dim, r kv_lora_rank, w kv_lora_rank + qk_rope_head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import unwrap
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map

from ...base.cache import cached_tensors, upload
from ...base.checks import no_compile
from ...comm.collectives import sum_shards
from ...comm.waiting import operation
from ...masks.mask import LayerMask, Mask, layer_mask
from ...memory.weights import CACHE_ARGUMENTS
from ...patching.forwards import replace_forward
from ...patching.running import Running
from ...placement.layout import TokenLayout
from ...sharding.sharding import Sharding
from ...sharding.shards import local_shard
from ..batch import BatchShard, PlacedShard
from ..state import OWNER, Patch, Settings
from .key_values import has_expansion, plain_weight

_ELEMENTS = 1 << 25  # of the largest tensor that is computed at a time
MaskOf = Callable[[nn.Module, BatchShard], Mask]  # the mask of a layer


def has_indexer(layer: nn.Module) -> bool:
    return isinstance(getattr(layer, "indexer", None), nn.Module) and has_expansion(layer)


@dataclass(frozen=True, eq=False)
class IndexedMask:
    """What a layer with an indexer gets as its attention mask, and the indexer too. In the trial run it is empty."""

    shard: PlacedShard | None = None
    mask: Mask | None = None  # of the layer

    def __getitem__(self, index: Any) -> IndexedMask:
        return self


class _KeysFoundError(Exception):
    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


@dataclass(frozen=True)
class _Cache:
    """An indexer's cache, which already holds the ``keys [1, t, d]`` of all tokens; None ends the indexer's forward."""

    keys: Tensor | None

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        if self.keys is None:
            raise _KeysFoundError(keys)
        return self.keys


def run_indexer(
    indexer: nn.Module, call: Any, row: int, tokens: slice, keys: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """The indices ``[1, c, k]`` for some tokens of a batch row, or without ``keys`` their keys ``[1, c, d]``.

    ``call``: the arguments for all rows, float ``[b or 1, s, channels]`` or int ``[..., b or 1, s]``.
    """

    def part(x: Any) -> Any:
        if isinstance(x, IndexedMask):
            return mask
        if not isinstance(x, Tensor):
            return x
        of_batch, of_tokens = (-3, -2) if x.is_floating_point() else (-2, -1)
        if x.dim() >= -of_batch and x.shape[of_batch] > 1:
            x = x.narrow(of_batch, row, 1)
        return x.narrow(of_tokens, tokens.start, tokens.stop - tokens.start)

    args, kwargs = tree_map(part, call)
    names = unwrap(type(indexer).forward).__code__.co_varnames
    (cache,) = (name for name in CACHE_ARGUMENTS if name in names)
    try:
        return type(indexer).forward(indexer, *args, **{**kwargs, cache: _Cache(keys)})  # type: ignore[no-any-return]
    except _KeysFoundError as found:
        return found.keys


def hidden_states_of(call: Any) -> Tensor:
    """The hidden states, ``[b, s, channels]``."""
    return next(x for x in tree_leaves(call) if isinstance(x, Tensor))


def replace_indexers(layers: list[nn.Module], patch: Patch, mask_of: MaskOf) -> None:
    """Let the indexers of ``layers`` choose among the keys of all ranks."""
    for layer in filter(has_indexer, layers):
        name = f"layer {getattr(layer, 'layer_idx', '?')} ({type(layer).__name__})"
        indexer = cast(nn.Module, layer.indexer)
        if "forward" in vars(indexer):
            raise ValueError(f"{name}: the forward of its indexer was replaced; parallelize the model before that")
        patch.undo.callback(replace_forward(indexer, OWNER, _choose))
        patch.undo.callback(layer.register_forward_pre_hook(_before(patch, mask_of), with_kwargs=True).remove)
        patch.has_indexers = True


def _before(patch: Patch, mask_of: MaskOf) -> Callable[..., Any]:
    @no_compile
    def before(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        shard = kwargs.get("seqpar")
        if not isinstance(shard, BatchShard):
            return None
        placed = shard if isinstance(shard, PlacedShard) else patch.place(shard)
        return args, {**kwargs, "attention_mask": IndexedMask(placed, mask_of(layer, placed))}

    return before


indexers: Running[nn.Module] = Running()  # whose ``torch.topk`` is no choice of experts


@no_compile
def _choose(indexer: nn.Module, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The forward of an indexer: int32 ``[b, s, k]``, indices of the full sequence, and -1 in rows with fewer keys."""
    given = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, IndexedMask)), None)
    with indexers(indexer):
        if given is None:
            return forward(*args, **kwargs)
        assert given.shard is not None and given.mask is not None
        with torch.no_grad():
            return _choose_globally(indexer, (args, kwargs), given.shard.mask, given.mask, given.shard.sharding)


def _choose_globally(indexer: nn.Module, call: Any, documents: Mask, mask: Mask, sharding: Sharding) -> Tensor:
    positions, hidden = sharding.positions(), hidden_states_of(call)
    batch, device = hidden.shape[0], hidden.device
    lo, hi = _intervals(mask, sharding, batch, device)
    # [b, t, d]
    keys = sharding.unshard(torch.cat([run_indexer(indexer, call, i, slice(0, len(positions))) for i in range(batch)]))
    size = max(1, _ELEMENTS // (sharding.seq_len * getattr(indexer, "n_heads", 64)))
    chosen: list[list[Tensor]] = [[] for _ in range(batch)]  # [c, k] each
    for i, of_row in enumerate(chosen):
        for start, stop, tokens in _by_document(documents, i, positions, sharding.seq_len, size):
            index = torch.arange(start, stop, device=device)
            visible = (index >= lo[i, tokens, None]) & (index < hi[i, tokens, None])  # [c, keys of the document]
            of_row.append(run_indexer(indexer, call, i, tokens, keys[i : i + 1, start:stop], visible[None])[0] + start)
    width = max(x.shape[1] for of_row in chosen for x in of_row)
    return torch.stack([torch.cat([F.pad(x, (0, width - x.shape[1]), value=-1) for x in y]) for y in chosen])


def _intervals(mask: Mask, sharding: Sharding, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first and one past the last key of each of this rank's tokens, int64 ``[b, s]`` each."""

    def make() -> tuple[Tensor, Tensor]:
        lo, hi = (upload(torch.atleast_2d(x), device).expand(batch, -1) for x in mask.intervals(sharding.positions()))
        return lo, hi

    owner = mask if mask.rules else None
    return cached_tensors(("chosen keys", id(owner), sharding, batch), device, make, owner)


def _by_document(mask: Mask, row: int, positions: Tensor, seq_len: int, size: int) -> Iterator[tuple[int, int, slice]]:
    """Start and stop of the documents of a batch row, with up to ``size`` of this rank's tokens in them at a time.

    A row without packed documents is one, with its padding, because the order of equal scores depends on their number.
    """
    starts = mask.starts[row % len(mask.starts)] if mask.is_local else (0,)
    edges = torch.tensor([*(x for x in starts if x < seq_len), seq_len], device="cpu")
    for (start, stop), (first, last) in zip(
        edges.unfold(0, 2, 1).tolist(), torch.searchsorted(positions, edges).unfold(0, 2, 1).tolist(), strict=True
    ):
        for at in range(first, last, size):
            yield start, stop, slice(at, min(at + size, last))


def check_unset(layer: nn.Module, options: dict[str, Any], settings: Settings) -> None:
    """Raise a ValueError if ``layer``, which attends to chosen or compressed keys, has an option that it ignores."""
    name = f"layer {getattr(layer, 'layer_idx', '?')} ({type(layer).__name__})"
    for option, value in {
        **options,
        **{key: getattr(settings, key) for key in ("alibi_slopes", "deterministic")},
    }.items():
        if value:
            raise ValueError(
                f"{option}={value}: {name} attends to chosen or compressed keys, which does not support {option}; "
                "leave it out, or set it to 0"
            )


@no_compile
def attend_to_chosen(
    layer: nn.Module,
    q: Tensor,  # [b, h, s, d]
    latents: Tensor,  # [b, 1, s, r]
    rotated: Tensor,  # [b, 1, s, w - r]
    indices: Tensor,  # [b, s, k], of the full sequence; -1 for none
    sinks: Tensor | None,  # [h]
    mask: tuple[Mask, LayerMask],
    shard: Any,  # a PlacedShard, because generation is refused
    scale: float,
) -> Tensor:
    """Attention of each token to the keys that were chosen for it: ``[b, s, h, e]``."""
    name = f"layer {getattr(layer, 'layer_idx', '?')} ({type(layer).__name__})"
    weight, sharding = plain_weight(layer, q.shape[1], latents), shard.sharding
    if weight is None:
        raise ValueError(
            f"{name}: it attends to chosen keys, whose latents are expanded by the weight of kv_b_proj, which must be "
            "a linear layer without bias, adapter or quantization, not sharded; leave kv_b_proj out of LoRA's "
            "target_modules"
        )
    lo, hi = _intervals(layer_mask(mask[0], *mask[1]), sharding, len(q), q.device)
    kv = torch.cat([latents, rotated], -1)[:, 0]  # [b, s, w]
    out: Tensor = IndexedAttention.apply(
        q.transpose(1, 2), kv, weight.to(q.dtype), sinks, indices, lo, hi, scale, shard.tokens, sharding
    )[0]
    return out


def _attend_rows(
    q: Tensor,  # [b, c, h, d]
    kv: Tensor,  # [b, c, k, w]
    weight: Tensor | None,  # [h, d - (w - r) + e, r]; None: keys and values are kv
    sinks: Tensor | None,  # [h]
    visible: Tensor,  # bool [b, c, h or 1, k]
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    """The outputs ``[b, c, h, e]``, and without a weight their lse ``[b, c, h]``."""
    rank, query = kv.shape[3], q
    if weight is not None:
        rank = weight.shape[2]
        nope = q.shape[3] - (kv.shape[3] - rank)
        of_keys, of_values = weight.split([nope, weight.shape[1] - nope], 1)
        query = torch.cat([torch.einsum("bchd,hdr->bchr", q[..., :nope], of_keys), q[..., nope:]], -1)  # [b, c, h, w]
    scores: Tensor = _Scores.apply(query.flatten(0, 1), kv.flatten(0, 1)).unflatten(0, kv.shape[:2])  # [b, c, h, k]
    scores = scores * scale
    hidden = ~visible
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    probabilities = scores.softmax(-1)[..., : kv.shape[2]].masked_fill(hidden, 0.0)  # 0 in a row that sees nothing
    out = probabilities.to(kv.dtype) @ kv[..., :rank]  # [b, c, h, r]
    if weight is None:
        return out, scores.logsumexp(-1)
    return torch.einsum("bchr,her->bche", out, of_values), None


class _Scores(torch.autograd.Function):
    """``query [n, h, w] @ keys [n, k, w].mT``, in float32 for inputs in half precision."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor) -> Tensor:
        ctx.save_for_backward(query, keys)
        dtype = torch.promote_types(query.dtype, torch.float32)
        if query.is_cuda and query.dtype != dtype:
            return torch.bmm(query, keys.mT, out_dtype=dtype)
        return query.to(dtype) @ keys.mT.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        query, keys = ctx.saved_tensors
        grad = grad.to(query.dtype)  # as attention kernels do for their second product
        return grad @ keys, grad.mT @ query


class IndexedAttention(torch.autograd.Function):
    """Attention to some of all ranks' rows ``kv``: ``[b, s, h, e]``, and without a weight its lse ``[b, s, h]``.

    A query sees the rows from ``lo`` to ``hi`` among those with its ``indices``, or all of these without indices.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, weight: Tensor | None, sinks: Tensor | None, indices: Tensor | None,
        lo: Tensor, hi: Tensor, scale: float, tokens: TokenLayout, sharding: Sharding,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        full = sharding.unshard(kv)  # [b, t, w]
        ctx.save_for_backward(q, full, weight, sinks, indices, lo, hi)
        ctx.constants = scale, tokens, sharding.sequence_group
        outs, lses = [], []
        for at, rows, visible in _chunks(q, full, indices, lo, hi):
            query, shape = _of_rows(q[:, at], rows), q[:, at].shape[:3]
            out, lse = _attend_rows(query, full.flatten(0, 1)[rows], weight, sinks, visible, scale)
            outs.append(out.reshape(*shape, out.shape[3]))
            lses += [] if lse is None else [lse.reshape(shape)]
        return torch.cat(outs, 1), torch.cat(lses, 1) if lses else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, full, weight, sinks, indices, lo, hi = ctx.saved_tensors
        scale, tokens, group = ctx.constants
        dq = torch.empty_like(q)
        # Many rows choose the same key.
        sums = [
            None if x is None else x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
            for x in (full, weight, sinks)
        ]
        d_full = sums[0]
        assert d_full is not None
        for at, rows, visible in _chunks(q, full, indices, lo, hi):
            parts = [_of_rows(q[:, at], rows), full.flatten(0, 1)[rows], weight, sinks]
            parts = [None if x is None else x.detach().requires_grad_() for x in parts]
            with torch.enable_grad():
                out, lse = _attend_rows(parts[0], parts[1], parts[2], parts[3], visible, scale)
            outs, grads = [out], [grad[:, at].reshape(out.shape)]
            if lse is not None and grad_lse is not None:
                outs, grads = [*outs, lse], [*grads, grad_lse[:, at].reshape(lse.shape)]
            found = iter(torch.autograd.grad(outs, [x for x in parts if x is not None], grads))
            dq[:, at] = next(found).reshape(dq[:, at].shape)
            d_full.view(-1, full.shape[2]).index_add_(0, rows.flatten(), next(found).flatten(0, 2).to(d_full.dtype))
            for total in sums[1:]:
                if total is not None:
                    total += next(found)
        d_kv = d_full
        if group is not None and ctx.needs_input_grad[1]:
            with operation("the backward of attention to chosen keys"):
                d_kv = sum_shards([local_shard(d_full, 1, tokens, rank) for rank in range(tokens.ranks)], 1, group)
        others = [None if x is None else x.to(like.dtype) for x, like in zip(sums[1:], (weight, sinks), strict=True)]
        return dq, d_kv.to(full.dtype), *others, *[None] * 6


def _of_rows(q: Tensor, rows: Tensor) -> Tensor:
    """The queries ``[b, c, h, d]`` for ``rows [b, c or 1, k]``, which queries may have in common."""
    return q if q.shape[:2] == rows.shape[:2] else q.flatten(1, 2)[:, None]


def _chunks(
    q: Tensor, full: Tensor, indices: Tensor | None, lo: Tensor, hi: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """A few of this rank's tokens at a time: the rows of ``full [b * t, w]`` that were chosen for them, ``[b, c, k]``,
    and which of these they see, ``[b, c, 1, k]``. Without ``indices`` all rows, ``[b, 1, k]`` and ``[b, 1, c * h, k]``.
    """
    batch, length, heads = q.shape[:3]
    row = (torch.arange(batch, device=q.device) * full.shape[1])[:, None, None]
    every = torch.arange(full.shape[1], device=q.device)[None, None] if indices is None else None
    elements = heads * full.shape[1] if indices is None else indices.shape[2] * (full.shape[2] + heads)
    size = max(1, _ELEMENTS // (batch * elements))
    for start in range(0, max(length, 1), size):
        at = slice(start, start + size)
        index = indices[:, at].long() if every is None and indices is not None else every
        assert index is not None
        visible = ((index >= lo[:, at, None]) & (index < hi[:, at, None]))[:, :, None]
        if every is not None:
            visible = visible.expand(-1, -1, heads, -1).flatten(1, 2)[:, None]
        yield at, index.clamp(min=0) + row, visible
