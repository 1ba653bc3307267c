"""Mixers and attention to chosen keys of one layer on one rank as a timeline.

A mixer sends what ``seqpar.mixers`` sends: the all-to-alls of ``by_heads`` run here with tensors without data, and the
plans of ``halo`` and ``by_states`` say which rows are sent. An indexer sends what
``seqpar/hf/mechanisms/indexers.py`` sends.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..masks.mask import Mask
from ..mixers import Exchange, ToHeads, ToSequence
from ..placement.heads import Heads, kv_index
from ..placement.layout import TokenLayout
from ..placement.placement import Placement
from ..strategies.auto import sends_halo, sends_states
from ..strategies.row_exchange import halo_plan, state_plan
from .messages import RankPlace, RecordedHeadExchange, SimulatedRanks
from .mixer import Mixer
from .setting import ELEMENT_BYTES, FLOAT32_BYTES
from .simulate import Timeline

_META = torch.device("meta")
_Rows = tuple[tuple[int, ...], tuple[int, ...]]  # that a rank sends to each rank, and receives from it


class MixerTimeline:
    """Records a mixer, without its projections, of one rank.

    Args:
        place: the rank.
        mixer: the sizes.
        tokens: this rank's, of one batch row.
    """

    def __init__(self, place: RankPlace, mixer: Mixer, tokens: int) -> None:
        self._place, self._mixer, self._tokens = place.among_all, mixer, tokens
        self._setting = s = self._place.setting
        ranks: Any = SimulatedRanks(s.ulysses, self._place.ulysses)
        alone: Any = SimulatedRanks(1, 0)
        self._placement = Placement(None, alone, ranks, tokens=s.tokens)
        per_host, token = min(s.ulysses, s.hardware.gpus_per_host), ELEMENT_BYTES * mixer.moved
        self._state_bytes = FLOAT32_BYTES * mixer.heads * mixer.state
        self._by_states = bool(mixer.state) and sends_states(s.tokens, per_host, mixer.heads, token, self._state_bytes)

    def forward(self, timeline: Timeline) -> None:
        """Record the convolution, the recurrence and the product of the result with its gate."""
        m = self._mixer
        self._convolution(timeline, False)
        self._memory_bound(timeline, "convolution", 2 * m.channels)
        self._recurrence(timeline, 1, False)
        self._memory_bound(timeline, "gate", 3 * m.heads * m.result)

    def backward(self, timeline: Timeline) -> None:
        """Record the backward of these. The recurrence is computed again in it."""
        m = self._mixer
        self._memory_bound(timeline, "gate", 5 * m.heads * m.result)
        self._recurrence(timeline, 3, True)
        self._memory_bound(timeline, "convolution", 4 * m.channels)
        self._convolution(timeline, True)

    def _convolution(self, timeline: Timeline, backward: bool) -> None:
        """Record the messages of the convolution. It sends channels where ``seqpar.hf`` does."""
        m = self._mixer
        if not sends_halo(self._setting.tokens, m.width - 1):
            channels = replace(m, heads=m.channels, groups=1, of_head=1, of_group=0, result=1)
            self._by_heads(timeline, channels, 0, backward)
        else:
            self._halo(timeline, backward)

    def _recurrence(self, timeline: Timeline, times: int, backward: bool) -> None:
        """Record ``times`` the recurrence. With states, two passes over this rank's tokens come before the messages."""
        if not self._by_states:
            self._by_heads(timeline, self._mixer, times, backward)
            return
        s, m, place = self._setting, self._mixer, self._place
        one_pass = self._seconds(m.heads, m.groups, self._tokens)
        before, after = (1, 2) if backward else (2, 1)
        timeline.compute("recurrence", before * times * one_pass)
        rows = _state_rows(s.tokens, place.ulysses, s.mask, s.batch)
        self._exchange(timeline, "states", rows, self._state_bytes, backward)
        timeline.compute("recurrence", after * times * one_pass)

    def _seconds(self, heads: int, groups: int, tokens: int) -> float:
        """Seconds of the recurrence of some heads in forward: its matrix products, or reading and writing."""
        s, m = self._setting, self._mixer
        nbytes = ELEMENT_BYTES * (heads * (m.of_head + m.result) + groups * m.of_group)
        each = max(heads * m.flops / s.hardware.gemm_flops, nbytes / s.hardware.memory_bandwidth)
        return each * s.batch * tokens

    def _by_heads(self, timeline: Timeline, m: Mixer, times: int, backward: bool = False) -> None:
        """Record an all-to-all to heads, ``times`` the recurrence of the heads of one rank, and the way back."""
        if not m.heads:
            return
        s, length = self._setting, self._setting.seq_len
        # Of the rank with the most heads, for which all others wait.
        seconds = self._seconds(-(-m.heads // s.ulysses), -(-m.groups // s.ulysses), length)

        def compute() -> None:
            timeline.compute("recurrence", times * seconds + s.hardware.kernel * (times > 0))

        if s.ulysses == 1:
            compute()
            return
        heads = Heads.of_model(m.heads, m.groups)
        exchange = Exchange(RecordedHeadExchange(self._placement, heads, 1, timeline=timeline, place=self._place))
        own, shared = exchange.chunk.heads.queries, kv_index(exchange.chunk.heads) or exchange.chunk.heads.kv

        def tensors(tokens: int, *shapes: tuple[int, int]) -> list[Tensor]:
            """``[b, tokens, h, d]`` for each shape ``(h, d)`` with elements."""
            return [torch.empty(s.batch, tokens, *x, dtype=s.dtype, device=_META) for x in shapes if x[1]]

        ctx = SimpleNamespace(heads=exchange, count=1)
        if not backward:
            ToHeads.forward(ctx, exchange, 1, *tensors(self._tokens, (m.heads, m.of_head), (m.groups, m.of_group)))
            compute()
            ToSequence.forward(ctx, exchange, *tensors(length, (len(own), m.result)))
            return
        ToSequence.backward(
            SimpleNamespace(heads=exchange, count=len(own)), *tensors(self._tokens, (m.heads, m.result))
        )
        compute()
        ToHeads.backward(ctx, *tensors(length, (len(own), m.of_head), (len(shared), m.of_group)))

    def _halo(self, timeline: Timeline, backward: bool) -> None:
        """Record the rows before this rank's runs of tokens, or in backward their gradients, which are float32."""
        s, m = self._setting, self._mixer
        if s.ulysses == 1:
            return
        rows = _halo_rows(s.tokens, self._place.ulysses, s.mask, s.batch, m.width - 1)
        row_bytes = m.channels * (FLOAT32_BYTES if backward else s.dtype.itemsize)
        self._exchange(timeline, "rows before", rows, row_bytes, backward)

    def _exchange(self, timeline: Timeline, name: str, rows: _Rows, row_bytes: int, backward: bool) -> None:
        """Record an all-to-all of rows that are sent and received; of their gradients in the other direction."""
        sent, received = (
            [(self._place.level_to(ulysses=peer), float(row_bytes * n)) for peer, n in enumerate(x) if n]
            for x in (reversed(rows) if backward else rows)
        )
        timeline.wait(self._place.start(timeline, name, "all-to-all of mixers", sent, received))

    def _memory_bound(self, timeline: Timeline, name: str, elements: int) -> None:
        s = self._setting
        nbytes = ELEMENT_BYTES * elements * self._tokens * s.batch
        timeline.compute(name, nbytes / s.hardware.memory_bandwidth)


@lru_cache(maxsize=256)
def _halo_rows(tokens: TokenLayout, rank: int, mask: Mask, batch: int, width: int) -> _Rows:
    rows = halo_plan(tokens, rank, mask, batch, width, torch.device("cpu")).rows
    return rows.sends, rows.receives


@lru_cache(maxsize=256)
def _state_rows(tokens: TokenLayout, rank: int, mask: Mask, batch: int) -> _Rows:
    rows = state_plan(tokens, rank, mask, batch, torch.device("cpu")).rows
    return rows.sends, rows.receives


class IndexedTimeline:
    """Records attention to the keys that an indexer chooses, of one rank, without its projections.

    The indexer's scores are float32 numbers of each head, query and key of the document, which are written and read six
    times. Attention multiplies latents, and its scores for the chosen keys take 44 bytes of reads and writes a head.

    Args:
        place: the rank.
    """

    def __init__(self, place: RankPlace) -> None:
        self._place, self._tokens = place.among_all, place.setting.most_tokens

    def record(self, timeline: Timeline, backward: bool = False) -> None:
        """Record the forward, or the backward, which computes attention again. An indexer is not trained."""
        s, m = self._place.setting, self._place.setting.model
        if backward:
            timeline.compute("gradients of chosen keys", 3 * self._seconds())
            timeline.wait(self._gather(timeline, "sums of gradients", m.sent_kv * FLOAT32_BYTES))
            return
        if s.kind.indexer:
            timeline.compute("to the indexer", 2.0 * self._tokens * m.index_parameters / s.hardware.gemm_flops)
            timeline.wait(self._gather(timeline, "keys of the indexer", m.index_dim * s.dtype.itemsize))
            pairs = s.batch * _pairs_in_documents(s.mask, s.seq_len) / s.sequence_ranks * m.index_heads
            nbytes = 6 * FLOAT32_BYTES * pairs
            flops = 2.0 * m.index_dim * pairs
            timeline.compute("scores", max(flops / s.hardware.gemm_flops, nbytes / s.hardware.memory_bandwidth))
        timeline.wait(self._gather(timeline, "latents", m.sent_kv * s.dtype.itemsize))
        timeline.compute("attend to chosen keys", self._seconds())

    def _seconds(self) -> float:
        s, m = self._place.setting, self._place.setting.model
        keys = min(m.index_keys, s.seq_len)
        flops = 2.0 * (keys * m.heads * (m.sent_kv + m.kv_rank) + m.expanding_parameters)
        nbytes = keys * (4 * ELEMENT_BYTES * m.sent_kv + 44 * m.heads)
        return self._tokens * max(flops / s.hardware.gemm_flops, nbytes / s.hardware.memory_bandwidth)

    def _gather(self, timeline: Timeline, name: str, nbytes: int) -> int | None:
        """Record an all-gather of ``nbytes`` of each token, or the reduce-scatter of as many."""
        place, size = self._place, float(self._tokens * nbytes)
        ranks = place.setting.ulysses
        messages = [(place.level_to(ulysses=i), size) for i in range(ranks) if i != place.ulysses]
        hops = len(messages)
        return place.start(timeline, name, "indexer", messages, messages, place.setting.hardware.all_gather, hops)


def _pairs_in_documents(mask: Mask, seq_len: int) -> float:
    """Pairs of two tokens of the same document, the mean over the batch rows with documents of their own."""
    rows = [[*(x for x in row if x < seq_len), seq_len] for row in mask.starts]
    return sum((b - a) ** 2 for row in rows for a, b in pairwise(row)) / len(rows)
