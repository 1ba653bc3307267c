"""``strategy="auto"``: selects the strategy of an attention call.

Every rank computes the choice by itself from values that are the same on all ranks: the costs (``costs.py``), the mask,
the shapes and the hosts of the ranks. So nothing is sent, and all ranks choose the same. Choices are cached.

A training run on packed documents has a new mask in every step, and simulating each mask would take longer than
planning it. Masks under which a query sees about as many keys therefore share one simulation, with documents of equal
length. How evenly the layout divides the work still differs between them, and is computed from each mask itself.
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
from torch.distributed import ProcessGroup

from ..comm.trace import count_choice
from ..layout import Layout, SequenceSharding
from ..mask import Mask
from ..mesh import global_ranks, ranks_by_host, ranks_per_host
from ..rendezvous import group_timeout, meet
from ..runs import Runs
from ..strategies import StrategyName, StrategyOptions, compared_options
from .costs import Costs, MaskKind, attention_shape, costs_of
from .layer import attention_seconds
from .setting import Setting

_MOST = 1024  # remembered choices of a group
_STEP = 0.05  # masks whose shares of the slowest rank differ by less are alike
# An all-gather holds the keys and values of all ranks: it is left out where they take more than this share of memory.
_GATHERED_SHARE = 1 / 16


class AttentionShape(NamedTuple):
    """What a choice depends on besides mask, sharding and ranks.

    Attributes:
        batch, heads, kv_heads: the sizes of q and k.
        head_dim: the mean of the head_dim of q and k and that of v.
        dtype: the dtype of q, k and v.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class Candidate(NamedTuple):
    """A strategy that a call may take.

    Attributes:
        strategy: its name.
        ulysses: ranks of each all-to-all.
    """

    strategy: StrategyName
    ulysses: int

    @property
    def options(self) -> StrategyOptions:
        """The strategy's options, as ``seqpar.attention`` takes them on a plain group."""
        return {"ulysses_size": self.ulysses} if self.strategy == "hybrid" else compared_options(self.strategy)


# By group: the choices, and the simulated times on which they are based.
_choices: MutableMapping[ProcessGroup, dict[Hashable, Candidate]] = WeakKeyDictionary()
_simulated: MutableMapping[ProcessGroup, dict[Hashable, float]] = WeakKeyDictionary()
# The groups whose first call without gradients, which is collective, has been made.
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

    All ranks of ``group`` call this with the same arguments. The first call is collective, see ``costs_of``, and so is
    the first one without ``backward``: if only some ranks ran without gradients, the ranks would choose differently and
    wait for each other's messages. If some ranks never do, the others raise an error that names them.

    Args:
        mask, seq_len, layout, shape, group, device: the call.
        backward: whether a backward may follow. Then the choice is that for forward and backward together, otherwise
            that for forward alone.
    """
    chosen = _choices.setdefault(group, {})
    if not (backward or group in _without_gradients):
        purpose = "strategy 'auto' without gradients (torch.no_grad() on all ranks, or on none)"
        meet(purpose, global_ranks(group), "", group_timeout(group))
        _without_gradients.add(group)
    summary = mask_summary(mask, seq_len, layout, group.size())
    key = summary, seq_len, layout, shape, device.type, backward
    if key not in chosen:
        if len(chosen) >= _MOST:
            chosen.clear()
        hosts = ranks_by_host(group)
        per_host = ranks_per_host(hosts) if len(hosts) > 1 else group.size()
        if len(hosts) > 1 and per_host == group.size():  # hosts of one rank, or of different numbers of ranks
            per_host = 1
        costs = costs_of(group, device)
        costs = replace(costs, hardware=replace(costs.hardware, gpus_per_host=per_host))
        known = _simulated.setdefault(group, {})
        if len(known) >= _MOST:
            known.clear()
        seconds = predict(summary, seq_len, layout, shape, group.size(), costs, known, backward)
        chosen[key] = min(seconds, key=seconds.__getitem__)
    count_choice(chosen[key].strategy)
    return chosen[key]


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
    """The seconds of a forward, with ``backward`` and its backward, by strategy; of those that are as fast, the
    simplest first.

    ``known`` holds what was simulated with the same costs.
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
        share = summary.imbalance.get(ring)
        key = summary.mask, seq_len, layout, shape, candidate, share, backward
        if key not in known:
            if share is not None:
                setting = replace(setting, hardware=_slower(setting, share / setting.imbalance()))
            known[key] = attention_seconds(setting, backward)
        seconds[candidate] = costs.seconds(summary.kind, candidate.strategy, known[key], backward)
    return seconds


def candidates(ranks: int, heads: int) -> Iterator[Candidate]:
    """The strategies to choose from. In an all-to-all with more ranks than heads, ranks would be idle."""
    yield Candidate("ring", 1)
    yield Candidate("context_parallel", 1)
    if ranks <= heads:
        yield Candidate("ulysses", ranks)
    for ulysses in range(2, min(ranks - 1, heads) + 1):
        if ranks % ulysses == 0:
            yield Candidate("hybrid", ulysses)


def _gathered_bytes(setting: Setting, backward: bool) -> float:
    """Bytes of the keys and values of the other ranks, with ``backward`` and of their gradients in float32."""
    m, rest = setting.model, (setting.ring - 1) / setting.ring
    return rest * setting.batch * setting.seq_len * 2 * m.d_kv * (setting.dtype.itemsize + (4 if backward else 0))


def _slower(setting: Setting, factor: float) -> Any:
    """The hardware with kernels that take ``factor`` times as long."""
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
        kind: the kind of mask whose measured costs apply.
        mask: the mask that is simulated.
        imbalance: by the number of ranks in a ring, the visible pairs of the slowest one over the mean; empty if
            ``mask`` is the mask itself.
    """

    def __init__(self, kind: MaskKind, mask: Mask, imbalance: dict[int, float]) -> None:
        self.kind, self.mask, self.imbalance = kind, mask, imbalance
        self._key = mask, tuple(imbalance.items())

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, MaskSummary) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)


@lru_cache(maxsize=16)  # the masks of one step: a mask keeps its plans in memory
def mask_summary(mask: Mask, seq_len: int, layout: Layout, ranks: int) -> MaskSummary:
    """What a choice for ``ranks`` ranks depends on."""
    rows = [_bounded(runs, seq_len) for runs in mask.runs(seq_len)]
    keys = sum(int(pairs_before(runs, np.array([seq_len]))[0]) for runs in rows) / max(1, len(rows) * seq_len)
    if not seq_len or (mask.batch == 1 and mask.starts == ((0,),)):  # the same in every step
        return MaskSummary("causal" if keys > 0.4 * seq_len else "window", mask, {})
    causal = max(1.0, 2 * keys)  # tokens of causal documents, all of one length, in which a query sees as many keys
    length = min(seq_len, round(2 ** (round(2 * log2(causal)) / 2)))
    borders = [*range(0, seq_len, length), seq_len]
    imbalance = {}
    for ring in {ranks // c.ulysses for c in candidates(ranks, ranks)}:
        if ring > 1:
            share = _slowest_share(rows, SequenceSharding(seq_len, layout, ring))
            imbalance[ring] = 1 + _STEP * round((share - 1) / _STEP)
    return MaskSummary("causal" if length == seq_len else "documents", Mask.documents(borders), imbalance)


def _bounded(runs: Runs, seq_len: int) -> Runs:
    """The runs, with ends that begin within the sequence."""
    return replace(runs, hi=np.minimum(runs.hi, seq_len), hi_step=np.where(runs.hi > seq_len, 0, runs.hi_step))


def pairs_before(runs: Runs, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each position, the pairs of a query before it and a key that it sees. Increasing positions are not needed."""
    lengths = np.diff(runs.start, append=max(int(positions.max(initial=0)), int(runs.start[-1])))
    whole = np.append(0, np.cumsum(_pairs_of(runs, slice(None), lengths)))
    at = np.clip(np.searchsorted(runs.start, positions, side="right") - 1, 0, None)
    result: NDArray[np.int64] = whole[at] + _pairs_of(runs, at, np.maximum(0, positions - runs.start[at]))
    return result


def _pairs_of(runs: Runs, at: Any, count: NDArray[np.int64]) -> NDArray[np.int64]:
    """The pairs of the first ``count`` queries of the runs ``at``."""
    first, rise = (runs.hi - runs.lo)[at], (runs.hi_step - runs.lo_step)[at]
    result: NDArray[np.int64] = count * first + rise * (count * (count - 1) // 2)
    return result


def _slowest_share(rows: list[Runs], sharding: SequenceSharding) -> float:
    """The visible pairs of the rank with the most, over the mean. Striped ranks are taken to have the same."""
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
