"""``strategy="auto"``: selects the strategy of an attention call.

Every rank computes the choice by itself from values that are the same on all ranks: the costs (``costs.py``), the mask,
the shapes and the hosts of the ranks. So the ranks need no message to choose the same strategy. Choices are cached.

A training run on packed documents has a new mask in every step, and the simulation of a mask takes longer than its
plan. Masks under which a query sees about the same number of keys therefore share one simulation, that of documents of
equal length. How evenly the layout divides the work over the ranks is still computed from each mask itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping
from dataclasses import replace
from functools import lru_cache
from math import log2
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from ..comm.trace import count_choice
from ..layout import Layout, SequenceSharding
from ..mask import Mask, layer_mask
from ..mesh import ParallelContext, global_ranks, ranks_by_host, ranks_per_host
from ..rendezvous import group_timeout, store_all_gather
from ..runs import Runs
from ..sharding import Sharding
from ..strategies import StrategyName, StrategyOptions, compared_options
from ..strategies.operators import AttentionOptions, choice, placement
from .costs import Costs, MaskKind, attention_shape, costs_of
from .hardware import Hardware
from .layer import attention_seconds
from .setting import Setting

_MOST_CACHED = 1024  # choices of a group
_IMBALANCE_STEP = 0.05  # the imbalance of a mask is rounded to a multiple of this, so that similar masks share a choice
# In an all-gather every rank holds the K/V of all ranks. It is left out if these need more than this share of memory.
_GATHERED_SHARE = 1 / 16


class AttentionShape(NamedTuple):
    """The shapes of an attention call on which the choice depends.

    Attributes:
        batch: sequences.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: the mean of the head_dim of q and k and the head_dim of v.
        dtype: the dtype of q, k and v.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class Candidate(NamedTuple):
    """A strategy that can compute an attention call.

    Attributes:
        strategy: the name of the strategy.
        ulysses: the number of ranks in each all-to-all; 1 without all-to-alls.
    """

    strategy: StrategyName
    ulysses: int

    @property
    def options(self) -> StrategyOptions:
        """The options of the strategy for ``seqpar.attention`` on a ProcessGroup."""
        return {"ulysses_size": self.ulysses} if self.strategy == "hybrid" else compared_options(self.strategy)


# The choices of each group, and the simulated seconds that they are based on.
_choices: MutableMapping[ProcessGroup, dict[Hashable, Candidate]] = WeakKeyDictionary()
_simulated: MutableMapping[ProcessGroup, dict[Hashable, float]] = WeakKeyDictionary()
# The groups that have made their first call without gradients, which is collective.
_without_gradients: WeakSet[ProcessGroup] = WeakSet()


def choose_strategy(
    mask: Mask,
    seq_len: int,
    layout: Layout,
    shape: AttentionShape,
    group: ProcessGroup,
    device: torch.device,
    backward: bool = True,
) -> Candidate:
    """The strategy that is expected to be the fastest of those that fit into memory.

    All ranks of ``group`` call this with the same arguments. The first call is collective (see ``costs_of``). So is the
    first call with ``backward=False``: if only some ranks ran without gradients, the ranks would choose different
    strategies and wait for each other's messages forever. Instead, the ranks without gradients raise an error that
    names the ranks that did not make this call.

    Args:
        mask: which keys each query sees.
        seq_len: tokens of the full sequence.
        layout: how the tokens are sharded.
        shape: the sizes of q and k.
        group: the ranks that the sequence is sharded over.
        device: the device of q.
        backward: whether a backward may follow. If so, the choice is the fastest for forward and backward together,
            otherwise the fastest for the forward alone.
    """
    chosen = _choices.setdefault(group, {})
    if not (backward or group in _without_gradients):
        purpose = "strategy 'auto' without gradients (torch.no_grad() on all ranks, or on none)"
        store_all_gather(purpose, global_ranks(group), "", group_timeout(group))
        _without_gradients.add(group)
    summary = mask_summary(mask, seq_len, layout, group.size())
    key = summary, seq_len, layout, shape, device.type, backward
    if key not in chosen:
        if len(chosen) >= _MOST_CACHED:
            chosen.clear()
        hosts = ranks_by_host(group)
        per_host = ranks_per_host(hosts) if len(hosts) > 1 else group.size()
        if len(hosts) > 1 and per_host == group.size():  # hosts of one rank, or of different numbers of ranks
            per_host = 1
        costs = costs_of(group, device)
        costs = replace(costs, hardware=replace(costs.hardware, gpus_per_host=per_host))
        known = _simulated.setdefault(group, {})
        if len(known) >= _MOST_CACHED:
            known.clear()
        seconds = predict(summary, seq_len, layout, shape, group.size(), costs, known, backward)
        chosen[key] = min(seconds, key=seconds.__getitem__)
    count_choice(chosen[key].strategy)
    return chosen[key]


@torch.library.custom_op("seqpar::choose_strategy", mutates_args=())
def choose_strategy_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    sharding: Sharding,
    ranks: ParallelContext,
    options: AttentionOptions,
    backward: bool,
) -> Tensor:
    """``choose_strategy`` as an operator, which returns the ``choice`` for ``attention_op``.

    Args:
        q, k, v, mask, sharding, ranks, options: of the call, as for ``attention_op``.
        backward: as for ``choose_strategy``.
    """
    group = placement(sharding, ranks, options)[0].sequence
    if group is None or group.size() == 1:
        return choice("ring", {})
    if options.layer_mask is not None:
        mask = layer_mask(mask, *options.layer_mask)
    mask.check_length(sharding.seq_len)
    shape = AttentionShape(q.shape[0], q.shape[2], k.shape[2], (q.shape[3] + v.shape[3]) // 2, q.dtype)
    chosen = choose_strategy(mask, sharding.seq_len, sharding.layout, shape, group, q.device, backward)
    return choice(chosen.strategy, chosen.options)


@choose_strategy_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    sharding: Sharding,
    ranks: ParallelContext,
    options: AttentionOptions,
    backward: bool,
) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device="cpu")


def traced_choice(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, sharding: Sharding, ranks: ParallelContext, options: AttentionOptions
) -> Tensor | None:
    """The choice of a call while torch.compile traces it, made when the compiled code runs; None for a named strategy.

    Whether gradients are on is a constant of compiled code.
    """
    if options.strategy != "auto":
        return None
    chosen: Tensor = choose_strategy_op(q, k, v, mask, sharding, ranks, options, torch.is_grad_enabled())
    return chosen


def predict(
    summary: MaskSummary,
    seq_len: int,
    layout: Layout,
    shape: AttentionShape,
    ranks: int,
    costs: Costs,
    known: dict[Hashable, float] | None = None,
    backward: bool = True,
) -> dict[Candidate, float]:
    """The expected seconds of each strategy that fits into memory, simpler strategies first.

    Args:
        summary: the properties of the mask.
        seq_len: tokens of the full sequence.
        layout: how the tokens are sharded.
        shape: the sizes of q and k.
        ranks: the number of ranks.
        costs: the costs of attention among these ranks.
        known: the simulated seconds of earlier calls with the same costs, which this call reads and adds to. By default
            nothing is known.
        backward: whether the seconds are those of forward and backward together, or of the forward alone.
    """
    known = {} if known is None else known
    seconds = {}
    for candidate in candidates(ranks, shape.heads):
        ring = ranks // candidate.ulysses
        setting = Setting(
            attention_shape(shape.heads, shape.kv_heads, shape.head_dim),
            costs.hardware,
            summary.mask,
            seq_len,
            shape.batch,
            ring=ring,
            ulysses=candidate.ulysses,
            layout=layout,
            gather=candidate.strategy == "context_parallel",
            dtype=shape.dtype,
        )
        if setting.gather and _gathered_bytes(setting, backward) > _GATHERED_SHARE * costs.hardware.memory_bytes:
            continue
        imbalance = summary.imbalance.get(ring)
        key = summary.mask, seq_len, layout, shape, candidate, imbalance, backward
        if key not in known:
            if imbalance is not None:
                # The simulated mask has another imbalance than the real one: kernels take accordingly longer.
                setting = replace(setting, hardware=_slower_kernels(setting, imbalance / setting.imbalance()))
            known[key] = attention_seconds(setting, backward)
        seconds[candidate] = costs.seconds(summary.kind, candidate.strategy, known[key], backward)
    return seconds


def candidates(ranks: int, heads: int) -> Iterator[Candidate]:
    """The strategies to choose from, simpler ones first. An all-to-all has at most as many ranks as there are heads:
    more ranks would be idle."""
    yield Candidate("ring", 1)
    yield Candidate("context_parallel", 1)
    if ranks <= heads:
        yield Candidate("ulysses", ranks)
    for ulysses in range(2, min(ranks - 1, heads) + 1):
        if ranks % ulysses == 0:
            yield Candidate("hybrid", ulysses)


def _gathered_bytes(setting: Setting, backward: bool) -> float:
    """Bytes of the K/V of the other ranks, and with ``backward`` also of their gradients in float32."""
    m, share_of_others = setting.model, (setting.ring - 1) / setting.ring
    return (
        share_of_others
        * setting.batch
        * setting.seq_len
        * 2
        * m.d_kv
        * (setting.dtype.itemsize + (4 if backward else 0))
    )


def _slower_kernels(setting: Setting, factor: float) -> Hardware:
    """The hardware of a setting with attention kernels that take ``factor`` times as long."""
    hardware = setting.hardware
    rates = {
        name: replace(rate, forward=rate.forward / factor, backward=rate.backward / factor)
        for name, rate in hardware.attention.items()
    }
    return replace(hardware, attention=rates)


# Masks


class MaskSummary:
    """The properties of a mask on which the choice depends.

    Attributes:
        kind: the kind of mask, whose measured overheads apply.
        mask: the mask that is simulated: the mask itself, or documents of equal length in its place.
        imbalance: for each possible number of ranks in a ring, the visible pairs of the slowest rank under the mask
            itself, divided by the mean over the ranks. Empty if ``mask`` is the mask itself.
    """

    def __init__(self, kind: MaskKind, mask: Mask, imbalance: dict[int, float]) -> None:
        self.kind, self.mask, self.imbalance = kind, mask, imbalance
        self._key = mask, tuple(imbalance.items())

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, MaskSummary) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)


@lru_cache(maxsize=16)  # enough for the masks of one step; more would keep the plans of old masks in memory
def mask_summary(mask: Mask, seq_len: int, layout: Layout, ranks: int) -> MaskSummary:
    """The properties of a mask on which the choice for ``ranks`` ranks depends."""
    rows = [_bounded(runs, seq_len) for runs in mask.runs(seq_len)]
    pairs = sum(int(pairs_before(runs, np.array([seq_len]))[0]) for runs in rows)
    keys = pairs / max(1, len(rows) * seq_len)  # that a query sees on average
    if not seq_len or (mask.batch == 1 and mask.starts == ((0,),)):  # one document: the mask is the same in every step
        return MaskSummary("causal" if keys > 0.4 * seq_len else "window", mask, {})
    # In causal documents of one length, a query sees half of a document on average. The length is rounded to a power
    # of the square root of 2, so that similar masks share a simulation.
    length = min(seq_len, round(2 ** (round(2 * log2(max(1.0, 2 * keys))) / 2)))
    borders = [*range(0, seq_len, length), seq_len]
    imbalance = {}
    for ring in {ranks // c.ulysses for c in candidates(ranks, ranks)}:
        if ring > 1:
            exact = _imbalance(rows, SequenceSharding(seq_len, layout, ring))
            imbalance[ring] = 1 + _IMBALANCE_STEP * round((exact - 1) / _IMBALANCE_STEP)
    return MaskSummary("causal" if length == seq_len else "documents", Mask.documents(borders), imbalance)


def _bounded(runs: Runs, seq_len: int) -> Runs:
    """The same runs without keys beyond the sequence."""
    return replace(runs, hi=np.minimum(runs.hi, seq_len), hi_step=np.where(runs.hi > seq_len, 0, runs.hi_step))


def pairs_before(runs: Runs, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each position, the number of visible pairs whose query is before it.

    Args:
        runs: the mask of one batch row.
        positions: int64 ``[n]``, in any order.

    Returns:
        int64 ``[n]``.
    """
    lengths = np.diff(runs.start, append=max(int(positions.max(initial=0)), int(runs.start[-1])))
    pairs_before_run = np.append(0, np.cumsum(_pairs_of(runs, slice(None), lengths)))
    run = np.clip(np.searchsorted(runs.start, positions, side="right") - 1, 0, None)
    pairs_in_run = _pairs_of(runs, run, np.maximum(0, positions - runs.start[run]))
    result: NDArray[np.int64] = pairs_before_run[run] + pairs_in_run
    return result


def _pairs_of(runs: Runs, index: Any, count: NDArray[np.int64]) -> NDArray[np.int64]:
    """The visible pairs of the first ``count`` queries in each of the runs at ``index``."""
    # The first query of a run sees ``keys`` keys, each later one ``more`` keys more than the one before.
    keys, more = (runs.hi - runs.lo)[index], (runs.hi_step - runs.lo_step)[index]
    result: NDArray[np.int64] = count * keys + more * (count * (count - 1) // 2)
    return result


def _imbalance(rows: list[Runs], sharding: SequenceSharding) -> float:
    """The visible pairs of the ring rank with the most pairs, divided by the mean over the ring ranks.

    Striped ranks are assumed to have the same number of pairs.
    """
    if sharding.layout == "striped":
        return 1.0
    starts, stops, owners = [], [], []
    for rank in range(sharding.ring):
        for stripe in sharding.ring_positions(rank).stripes:
            starts.append(stripe.start)
            stops.append(stripe.start + stripe.count)
            owners.append(rank)
    totals = np.zeros(sharding.ring, dtype=np.int64)
    for runs in rows:
        before = pairs_before(runs, np.array([*starts, *stops]))
        np.add.at(totals, np.array(owners), before[len(starts) :] - before[: len(starts)])
    return float(totals.max() * sharding.ring / max(1, totals.sum()))
