"""Decoding with a sharded key/value cache: each rank caches the keys and values of some of the tokens.

The prompt is computed like a training sequence: each rank computes its tokens, and caches their keys and values. Later,
every rank computes all new tokens, but only rank ``position % ranks`` caches the keys and values of the new token at
``position``. In each attention layer, every rank attends with the new queries to the keys in its own cache. One
all-gather exchanges the partial results ``acc, lse`` of all ranks, and every rank merges them in float32 (Tree
Attention, Shyam et al., 2024).

Shapes: b batch, new tokens of a call, cached tokens of this rank, h query heads, n KV heads, g query heads per KV head,
d head_dim of q and k, e head_dim of v.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .base.checks import check_head_vector, check_inputs, no_compile
from .comm.collectives import start_all_gather
from .comm.p2p import call, link_of, new_message
from .comm.waiting import operation
from .functional import attention
from .kernels import BackendChoice
from .kernels.base import Carry, Score, finish
from .masks.mask import Mask
from .placement.heads import Heads, kv_index
from .ranks.mesh import rank_in, size_of
from .schedule.rows import KeyIntervals
from .sharding.same_rows import compare, compares_now
from .sharding.sharding import Sharding
from .sharding.spec import AttentionSpec, attention_spec
from .strategies.autograd import without_autocast
from .strategies.local import Kernel, Seen

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .kernels import BackendName
    from .placement.strategies import StrategyName, StrategyOptions

_CAUSAL = Mask.causal()
# What the layers of one forward share: key intervals by mask, choices of a backend by kind of call, positions of keys.
Shared = dict[Hashable, Any]
_GATHERED_BYTES = 256 << 20  # an upper limit for the result of one all-gather in ``attend_to_cached``


class KeyValueCache:
    """The keys and values of a generation. Each rank caches some of the tokens, and one cache serves all layers.

    The first call of a layer with the cache computes the prompt, of which each rank passes its tokens. Later calls
    compute new tokens, which every rank passes in full. Ranks that sample must therefore draw the same tokens: set the
    same seed on all of them. With the environment variable ``SEQPAR_CHECK=N`` they compare the new tokens in every N-th
    call.

    A rank caches 1/P of the tokens, so P ranks hold prompts P times as long. For every new token and layer a rank sends
    ``(P - 1) * batch * heads * (head_dim + 1) * 4`` bytes, whatever the length.

    Args:
        sharding: how the tokens of the prompt are sharded.

    Raises:
        TypeError: ``sharding`` is not a Sharding.
    """

    def __init__(self, sharding: Sharding) -> None:
        if not isinstance(sharding, Sharding):
            raise TypeError(f"sharding={sharding!r}: expected the seqpar.Sharding of the prompt's tokens")
        self.sharding = sharding
        self._layers: dict[Hashable, _CachedKeys] = {}
        self._start, self._positions = -1, torch.empty(0, dtype=torch.int64, device="cpu")  # of the current new tokens
        self._shared: Shared = {}

    @property
    def length(self) -> int:
        """The number of tokens of the full sequence so far: the position of the next new token."""
        return max((cached.length for cached in self._layers.values()), default=0)

    def holds(self, layer: Hashable) -> bool:
        """Whether ``layer`` has computed the prompt."""
        return layer in self._layers

    def new_positions(self, layer: Hashable, count: int) -> Tensor:
        """Global positions of the next ``count`` tokens of ``layer``, int64 ``[count]`` on the host, for all layers the
        same tensor."""
        start = self._layers[layer].length
        if (start, count) != (self._start, len(self._positions)):
            self._start, self._shared = start, {}
            self._positions = torch.arange(start, start + count, device="cpu")
        return self._positions

    def attention(
        self,
        layer: Hashable,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask = _CAUSAL,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        backend: BackendName = "auto",
        strategy: StrategyName = "ring",
        **strategy_options: Unpack[StrategyOptions],
    ) -> Tensor:
        """``seqpar.attention`` in a layer of your own, with this cache. The layers of seqpar take ``cache=`` instead.

        Args:
            layer: what the layer is called, such as its index.
            q: ``[batch, seq, heads, head_dim]``, in the first call this rank's tokens of the prompt, and later the new
                tokens, the same on every rank.
            k: ``[batch, seq, kv_heads, head_dim]``, of the same tokens, after rotary embeddings.
            v: ``[batch, seq, kv_heads, v_head_dim]``, of the same tokens.
            mask: which keys each query sees, in positions of the full sequence, which grows.
            softmax_scale: a factor on the scores, ``head_dim ** -0.5`` by default.
            softcap: the bound of the scores; 0 is none.
            sinks: ``[heads]``, one more logit per head in the denominator of the softmax; or None.
            alibi_slopes: ``[heads]`` or ``[batch, heads]``, as in ``seqpar.attention``; or None.
            backend: "auto" or a backend's name.
            strategy: of the prompt, as in ``seqpar.attention``.
            strategy_options: of the prompt.

        Returns:
            ``[batch, seq, heads, v_head_dim]`` in q's dtype, without gradients.

        Raises:
            ValueError: gradients are enabled, or a wrong argument of ``seqpar.attention``.
        """
        self.check_no_grad()
        if not self.holds(layer):
            fixed: dict[str, Any] = {"sharding": self.sharding, "softmax_scale": softmax_scale, "softcap": softcap}
            options: dict[str, Any] = {"backend": backend, "strategy": strategy, **strategy_options}
            out: Tensor = attention(q, k, v, mask=mask, sinks=sinks, alibi_slopes=alibi_slopes, **fixed, **options)
            self.fill(layer, k, v, self.sharding.positions())
            return out
        check_inputs(q, k, v, None)
        check_head_vector("sinks", sinks, q, batched=False)
        check_head_vector("alibi_slopes", alibi_slopes, q, batched=True)
        self.check_new(q)
        spec = attention_spec(strategy, strategy_options, softmax_scale, softcap, backend=backend)
        return self.attend(layer, q, k, v, sinks, alibi_slopes, spec, mask, self.sharding.sequence_group)

    def check_no_grad(self) -> None:
        """Raise a ValueError if gradients are enabled."""
        if torch.is_grad_enabled():
            raise ValueError("cache: generation has no gradients; call the model inside torch.no_grad()")

    def check_new(self, x: Tensor) -> None:
        """Compare the new tokens ``x [b, new, ...]`` of the ranks, if SEQPAR_CHECK asks for it in this call."""
        if not x.shape[1]:
            raise ValueError(
                "cache: a call after the prompt has 0 new tokens; pass at least one, or leave the call out"
            )
        if compares_now(group := self.sharding.sequence_group):
            advice = "give all ranks the same new tokens, and set the same seed on them before sampling"
            compare(x, lambda: None, group, advice, self.sharding.checksum)

    def fill(self, layer: Hashable, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Store the keys ``k [b, cached, n, d]`` and values ``v [b, cached, n, e]`` of this rank's prompt tokens, at
        global ``positions``, int64 ``[cached]``."""
        if any(x.length > self.sharding.seq_len for x in self._layers.values()):
            raise ValueError(
                f"cache: {layer!r} has its first call after another layer had two, whose second call was taken for new "
                "tokens; call each layer once a pass (a layer that is used at several depths cannot be cached)"
            )
        self._layers[layer] = _CachedKeys(k, v, positions, self.sharding.seq_len)

    @no_compile
    @torch.no_grad()
    def attend(
        self,
        layer: Hashable,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        alibi_slopes: Tensor | None,
        spec: AttentionSpec,
        mask: Mask,
        group: ProcessGroup | None,
    ) -> Tensor:
        """Attention of new tokens, which it adds to the cache: ``[b, new, h, e]``, the same bits on all ranks.

        ``q [b, new, h, d]``, ``k [b, new, n, d]`` and ``v [b, new, n, e]`` are the same on every rank of ``group``, the
        ranks that share the cached tokens.
        """
        if spec.deterministic == "invariant":
            raise ValueError(
                "deterministic='invariant' with a cache: the ranks' results are merged, in an order that depends on "
                "their number; pass deterministic=True"
            )
        cached, new = self._layers[layer], q.shape[1]
        if (k.shape[0], *k.shape[2:], k.dtype) != (cached.k.shape[0], *cached.k.shape[2:], cached.k.dtype):
            raise ValueError(
                f"cache: its keys are {tuple(cached.k.shape)} in {cached.k.dtype}, but the keys of the new tokens are "
                f"{tuple(k.shape)} in {k.dtype}; use the batch and the autocast of the prompt"
            )
        mask.check_length(cached.length + new)
        all_heads = spec.model_heads(q.shape, k.shape)
        mask.check_heads(*all_heads)
        positions, start = self.new_positions(layer, new), cached.length
        cached.append(k, v, positions, group, self._shared)
        scale = q.shape[3] ** -0.5 if spec.softmax_scale is None else spec.softmax_scale
        heads, keys = spec.heads(q.shape, k.shape), (cached.k, cached.v, cached.positions)
        slopes = spec.slopes(heads, q.device) if alibi_slopes is None else alibi_slopes.float()
        score = Score(scale, spec.softcap, slopes, sinks)
        with without_autocast(q):  # the kernels' own float32 must stay float32
            options = score, group, spec.backend, self._shared, all_heads[0]
            return attend_to_cached(q, keys, start, mask, heads, *options)


def check_cache(cache: object, sharding: Sharding | None, dropout_p: float) -> None:
    """Raise unless attention may be called with ``cache``, and with these arguments beside it."""
    if not isinstance(cache, KeyValueCache):
        raise TypeError(f"cache={type(cache).__name__}: expected a seqpar.KeyValueCache")
    if sharding not in (None, cache.sharding):
        raise ValueError(f"sharding: {sharding!r}, but the cache was made with {cache.sharding!r}; pass cache.sharding")
    if dropout_p:
        raise ValueError(f"dropout_p={dropout_p}: generation drops nothing; call model.eval()")


class _CachedKeys:
    """The cached keys of one layer: ``k [b, cached, n, d]``, ``v [b, cached, n, e]`` and their global positions."""

    def __init__(self, k: Tensor, v: Tensor, positions: Tensor, length: int) -> None:
        self.k, self.v, self.positions, self.length = k.contiguous(), v.contiguous(), positions, length
        self._buffers = GrowingBuffer(1), GrowingBuffer(1), GrowingBuffer(0)

    def append(self, k: Tensor, v: Tensor, positions: Tensor, group: ProcessGroup | None, shared: Shared) -> None:
        self.length += len(positions)
        if (ranks := size_of(group)) > 1:
            first = (rank_in(group) - int(positions[0])) % ranks  # of the new tokens that this rank caches
            k, v, positions = k[:, first::ranks], v[:, first::ranks], positions[first::ranks]
        of_keys, of_values, of_positions = self._buffers
        self.k, self.v = of_keys.append(self.k, k), of_values.append(self.v, v)
        key, old = ("positions", id(self.positions)), self.positions
        if key not in shared:
            shared[key] = old, of_positions.append(old, positions)  # with the old ones, so that their id stays taken
        self.positions = shared[key][1]


class GrowingBuffer:
    """Longer than the cached tensor along ``dim``, so that an append copies only the new tokens."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.buffer: Tensor | None = None

    def append(self, cached: Tensor, new: Tensor) -> Tensor:
        """``cached`` followed by ``new`` along ``dim``, as a view of the buffer. Call it without gradients."""
        length, added = cached.shape[self.dim], new.shape[self.dim]
        buffer, start = self.buffer, self._start_of(cached)
        if buffer is None or start is None or start + length + added > buffer.shape[self.dim]:
            shape = list(cached.shape)
            shape[self.dim] = length + added + max(64, length // 8)
            buffer = self.buffer = cached.new_empty(shape)
            buffer.narrow(self.dim, 0, length).copy_(cached)
            start = 0
        buffer.narrow(self.dim, start + length, added).copy_(new)
        return buffer.narrow(self.dim, start, length + added)

    def _start_of(self, cached: Tensor) -> int | None:
        """Where ``cached`` starts in the buffer. None if it is no view of it: beam search makes reordered copies."""
        buffer, dim = self.buffer, self.dim
        if buffer is None or cached.shape[:dim] != buffer.shape[:dim] or cached.stride() != buffer.stride():
            return None
        if buffer.is_inference() and not torch.is_inference_mode_enabled():  # writing to it would raise
            return None
        if cached.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
            return None
        return cached.storage_offset() // buffer.stride(dim)


def attend_to_cached(
    q: Tensor,
    cached: tuple[Tensor, Tensor, Tensor],
    start: int,
    mask: Mask,
    heads: Heads,
    score: Score,
    group: ProcessGroup | None,
    backend: str,
    shared: Shared,
    all_heads: int = 0,
) -> Tensor:
    """Attention of new tokens over the cached keys of all ranks. Call it without gradients, outside of compiled code.

    Args:
        q: ``[b, new, h, d]``, the same on every rank.
        cached: ``k [b, cached, n, d]``, ``v [b, cached, n, e]`` and their global positions, int64 ``[cached]``,
            increasing. They include the new tokens that this rank caches.
        start: the global position of the first new token.
        mask: which keys a query sees.
        heads: the heads of q, k and v.
        score: how scores are computed.
        group: the ranks that share the sequence.
        backend: "auto" or a backend's name.
        shared: what the layers of this forward have computed so far and share.
        all_heads: the query heads of the model, which ``Mask.by_heads`` divides into groups.

    Returns:
        ``[b, new, h, e]`` in q's dtype, the same bits on all ranks.
    """
    k, v, positions = cached
    new = q.shape[1]
    if not heads.queries:  # a tensor-parallel rank without heads
        return q.new_empty(*q.shape[:3], v.shape[3])
    # Split a long prompt, so that the float32 partial results of all ranks take at most _GATHERED_BYTES at a time.
    bytes_per_token = size_of(group) * q.shape[0] * q.shape[2] * (v.shape[3] + 1) * 4
    chunk = max(1, _GATHERED_BYTES // bytes_per_token)
    outs, errors, groups = list[Tensor](), list[Exception](), mask.head_groups
    by_mask = [(part, groups[i]) for i, part in heads.groups(all_heads // len(groups))] if groups else [(heads, mask)]
    masks = [(part, of_group) for group_heads, of_group in by_mask for part in _even_parts(group_heads)]
    for first in range(0, new, chunk):
        stop = min(first + chunk, new)
        queries = range(start + first, start + stop)
        parts: list[Carry] = []
        for part, of_mask in masks:
            q_part, k_part, v_part, of_part = q[:, first:stop], k, v, score
            if part is not heads:
                q_at, kv_at = part.q_range(within=heads), part.kv_range(within=heads)
                q_part, of_part = q_part[:, :, q_at.start : q_at.stop], score.heads(q_at.start, q_at.stop)
                k_part, v_part = (x[:, :, kv_at.start : kv_at.stop] for x in (k, v))
            # The g query heads of a KV head become g consecutive queries of one head, so that a kernel reads each key
            # once, unless each of them has a slope of its own.
            g = 1 if score.needs_positions else len(part.queries) // len(part.kv)
            seen = partial(_key_intervals, of_mask, positions, queries, g, q.device, score.needs_positions, shared)
            choice = _choice(backend, q_part, k_part, v_part, of_part, g, shared)
            parts.append(_attend(q_part, k_part, v_part, seen, of_part, choice, g, errors))
        acc, lse = parts[0]
        if len(parts) > 1:
            acc, lse = torch.cat([x for x, _ in parts], 2), torch.cat([x for _, x in parts], 1)
        if group is not None and group.size() > 1:
            acc, lse = _merge_over_ranks(acc, lse, group, shared, needs_lse=score.sinks is not None)
        outs.append(finish((acc, lse), score, q.dtype)[0])
    if errors:
        raise errors[0]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def _even_parts(heads: Heads) -> list[Heads]:
    """``heads`` in parts in which all KV heads are read by the same number of query heads."""
    if kv_index(heads) is None:
        return [heads]
    of_kv = ([q for q in heads.queries if q // heads.q_per_kv == kv] for kv in heads.kv)
    return [Heads(range(queries[0], queries[-1] + 1), heads.q_per_kv) for queries in of_kv]


def _key_intervals(
    mask: Mask,
    positions: Tensor,
    queries: range,
    repeats: int,
    device: torch.device,
    with_positions: bool,
    shared: Shared,
) -> Sequence[KeyIntervals]:
    """The intervals of the cached keys at ``positions`` [cached] that each query sees, each query ``repeats`` times.

    None if no query sees a key. They hold the keys' positions only ``with_positions``. Layers with equal masks share
    the result.
    """
    # Each layer caches a suffix of the same positions. The number of positions therefore determines them.
    key = mask, queries, repeats, len(positions), device, with_positions
    if key not in shared:
        rows = torch.arange(queries.start, queries.stop, device="cpu").repeat_interleave(repeats)
        k_positions = (positions if with_positions else rows).int()  # which nothing reads without
        found: list[KeyIntervals] = []
        for ends in mask.interval_sets(rows):
            lo, hi = (torch.searchsorted(positions, torch.atleast_2d(x)).int() for x in ends)
            if bool((lo < hi).any()):
                found.append(KeyIntervals(lo, hi, rows.int(), k_positions).to(device))
        shared[key] = found
    kept: Sequence[KeyIntervals] = shared[key]
    return kept


def _choice(backend: str, q: Tensor, k: Tensor, v: Tensor, score: Score, g: int, shared: Shared) -> BackendChoice:
    """The backends that may compute the call. Layers whose calls are of the same kind share it."""
    features = score.softmax_scale, score.softcap, score.alibi_slopes is None, score.sinks is None
    key = backend, q.shape, q.dtype, q.device, k.shape, v.shape, features, g
    if (choice := shared.get(key)) is None:
        choice = shared[key] = BackendChoice(backend, q)
    found: BackendChoice = choice
    return found


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Seen, score: Score, choice: BackendChoice, g: int, errors: list[Exception]
) -> Carry:
    (b, s, _, d), n, e = q.shape, k.shape[2], v.shape[3]
    if g > 1:
        q = q.reshape(b, s, n, g, d).transpose(2, 3).reshape(b, s * g, n, d)
    acc, lse = Kernel(choice, score, q, k, e, errors=errors).forward(q, k, v, seen)
    if g > 1:
        acc = acc.reshape(b, s, g, n, e).transpose(2, 3).reshape(b, s, n * g, e)
        lse = lse.reshape(b, n, s, g).transpose(2, 3).reshape(b, n * g, s)
    return acc, lse


@operation("attention of new tokens")
def _merge_over_ranks(acc: Tensor, lse: Tensor, group: ProcessGroup, shared: Shared, needs_lse: bool) -> Carry:
    """Merge the partial results of all ranks. The result is bitwise equal on all ranks.

    Its log-sum-exp is right only with ``needs_lse``.
    """
    numel = acc.numel() + lse.numel()
    with call(group, "attention of new tokens", numel, acc.itemsize):
        link = link_of(group, acc.device, shared)
        message = torch.cat([acc.flatten(), lse.flatten()], out=new_message(numel, acc, link))
        gathered, pending = start_all_gather(message, link)
        pending.wait()
    accs, lses = gathered[:, : acc.numel()].view(-1, *acc.shape), gathered[:, acc.numel() :].view(-1, *lse.shape)
    weights = lses.softmax(0).nan_to_num_(0.0)  # of the ranks [p, b, h, s]; nan: the query sees no key of any rank
    merged = accs.mul_(weights.transpose(2, 3).unsqueeze(-1)).sum(0)
    return merged, lses.logsumexp(0) if needs_lse else lse
