"""``Mixer``: linear attention, a state-space layer or a short convolution.

A mixer sends what ``seqpar.mixers`` sends: the all-to-alls of ``by_heads`` run here with tensors without data, and the
plans of ``halo`` and ``by_states`` say which rows are sent. ``mixer_sizes.py`` reads its sizes from a ``config.json``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
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
from .messages import RecordedHeadExchange, SimulatedRanks
from .part import LayerPart, PartRow
from .rank import RankTimeline
from .split import ELEMENT_BYTES, FLOAT32_BYTES, Split

_META = torch.device("meta")
Rows = tuple[tuple[int, ...], tuple[int, ...]]  # that a rank sends to each rank, and receives from it


@dataclass(frozen=True)
class Mixer(LayerPart):
    """A layer that mixes tokens without attention.

    Attributes:
        name: what it is.
        channels: channels of its causal convolution.
        width: tokens that a channel's kernel reads.
        weights_in: weights that a token is multiplied by before the recurrence, with the weights of the convolution.
        weights_out: weights of the projection after it.
        saved: elements of a token that autograd keeps, besides the input of the convolution and of the recurrence.
        heads: heads of the recurrence, which ranks divide; 0 without a recurrence.
        groups: heads that several of these read.
        of_head: elements of a token that each head reads, in units of two bytes.
        of_group: elements of a token that each group has.
        result: elements of a token that each head returns.
        flops: FLOPs of a token in one head of the recurrence, in forward.
        state: elements of what a run of tokens does to the state of a head, if ranks may send that instead of heads.
    """

    name: str
    channels: int
    width: int
    weights_in: int
    weights_out: int
    saved: int
    heads: int = 0
    groups: int = 1
    of_head: int = 0
    of_group: int = 0
    result: int = 0
    flops: float = 0.0
    state: int = 0

    @property
    def row(self) -> PartRow:
        flops = self.heads * self.flops
        supported = dict.fromkeys(("tensor_parallel", "takes_memory", "is_forecast"), False)
        return PartRow(self.weights_in, self.weights_out, flops=flops, **supported)

    @property
    def moved(self) -> int:
        """Elements of a token in the all-to-all to heads and back."""
        return self.heads * (self.of_head + self.result) + self.groups * self.of_group

    def _read(self, split: Split) -> int:
        """Elements per token that the recurrence reads. A rank has a head of each tensor at least."""
        if not self.heads:
            return 0
        ranks = split.sequence_ranks
        return max(self.heads, ranks) * self.of_head + max(self.groups, ranks) * self.of_group

    def kept(self, split: Split, pieces: int = 1) -> float:
        return float(split.most_tokens * ELEMENT_BYTES * (self.saved + self.channels + self._read(split)))

    def working(self, split: Split, pieces: int = 1) -> float:
        """The gradients of what it keeps and reads, and of its result; and the messages of these."""
        elements = self.channels + self._read(split) + self.heads * self.result
        return float(ELEMENT_BYTES * split.most_tokens * elements * (2 if split.sequence_ranks > 1 else 1))

    def record(self, rank: RankTimeline, backward: bool = False) -> None:
        """Record the convolution, the recurrence, which backward computes again, and the product of the result with its
        gate; or their backward."""
        rank = rank.among_all
        if not backward:
            self._convolution(rank, False)
            rank.memory_bound("convolution", 2 * self.channels)
            self._recurrence(rank, 1, False)
            rank.memory_bound("gate", 3 * self.heads * self.result)
        else:
            rank.memory_bound("gate", 5 * self.heads * self.result)
            self._recurrence(rank, 3, True)
            rank.memory_bound("convolution", 4 * self.channels)
            self._convolution(rank, True)

    def _convolution(self, rank: RankTimeline, backward: bool) -> None:
        """Record the messages of the convolution: channels where ``seqpar.hf`` sends them, else the rows before this
        rank's runs of tokens, or in backward their gradients, which are float32."""
        s = rank.split
        if not sends_halo(s.tokens, self.width - 1):
            channels = replace(self, heads=self.channels, groups=1, of_head=1, of_group=0, result=1)
            channels._by_heads(rank, 0, backward)
        elif s.ulysses > 1:
            rows = _halo_rows(s.tokens, rank.ulysses, s.mask, s.batch, self.width - 1)
            row_bytes = self.channels * (FLOAT32_BYTES if backward else s.dtype.itemsize)
            exchange_rows(rank, "rows before", rows, row_bytes, backward)

    def _recurrence(self, rank: RankTimeline, times: int, backward: bool) -> None:
        """Record ``times`` the recurrence. With states, two passes over this rank's tokens come before the messages."""
        s, state_bytes = rank.split, FLOAT32_BYTES * self.heads * self.state
        per_host, token_bytes = min(s.ulysses, s.hardware.gpus_per_host), ELEMENT_BYTES * self.moved
        if not (self.state and sends_states(s.tokens, per_host, self.heads, token_bytes, state_bytes)):
            self._by_heads(rank, times, backward)
            return
        one_pass = self._seconds(s, self.heads, self.groups, rank.tokens)
        before, after = (1, 2) if backward else (2, 1)
        rank.timeline.compute("recurrence", before * times * one_pass)
        exchange_rows(rank, "states", _state_rows(s.tokens, rank.ulysses, s.mask, s.batch), state_bytes, backward)
        rank.timeline.compute("recurrence", after * times * one_pass)

    def _seconds(self, split: Split, heads: int, groups: int, tokens: int) -> float:
        """Seconds of the recurrence of some heads in forward: its matrix products, or reading and writing."""
        nbytes = ELEMENT_BYTES * (heads * (self.of_head + self.result) + groups * self.of_group)
        hardware = split.hardware
        return max(heads * self.flops / hardware.gemm_flops, nbytes / hardware.memory_bandwidth) * tokens

    def _by_heads(self, rank: RankTimeline, times: int, backward: bool) -> None:
        """Record an all-to-all to heads, ``times`` the recurrence of the heads of one rank, and the way back."""
        if not self.heads:
            return
        s = rank.split
        # Of the rank with the most heads, for which all others wait.
        of_one_rank = -(-self.heads // s.ulysses), -(-self.groups // s.ulysses)
        seconds = self._seconds(s, *of_one_rank, s.seq_len * s.batch)

        def compute() -> None:
            rank.timeline.compute("recurrence", times * seconds + s.hardware.kernel * (times > 0))

        if s.ulysses == 1:
            compute()
            return
        ranks: Any = SimulatedRanks(s.ulysses, rank.ulysses)
        alone: Any = SimulatedRanks(1, 0)
        placement, heads = Placement(None, alone, ranks, tokens=s.tokens), Heads.of_model(self.heads, self.groups)
        exchange = Exchange(RecordedHeadExchange(placement, heads, 1, recorder=rank))
        own, shared = exchange.chunk.heads.queries, kv_index(exchange.chunk.heads) or exchange.chunk.heads.kv

        def tensors(tokens: int, *shapes: tuple[int, int]) -> list[Tensor]:
            """``[b, tokens, h, d]`` for each shape ``(h, d)`` with elements."""
            return [torch.empty(s.batch, tokens, *x, dtype=s.dtype, device=_META) for x in shapes if x[1]]

        ctx, tokens = SimpleNamespace(heads=exchange, count=1), rank.tokens // s.batch
        if not backward:
            read = tensors(tokens, (self.heads, self.of_head), (self.groups, self.of_group))
            ToHeads.forward(ctx, exchange, 1, *read)
            compute()
            ToSequence.forward(ctx, exchange, *tensors(s.seq_len, (len(own), self.result)))
            return
        grads = tensors(tokens, (self.heads, self.result))
        ToSequence.backward(SimpleNamespace(heads=exchange, count=len(own)), *grads)
        compute()
        ToHeads.backward(ctx, *tensors(s.seq_len, (len(own), self.of_head), (len(shared), self.of_group)))


def exchange_rows(rank: RankTimeline, name: str, rows: Rows, row_bytes: int, backward: bool) -> None:
    """Record an all-to-all of rows that are sent and received; of their gradients in the other direction."""
    sent, received = (
        [(peer, row_bytes * n) for peer, n in enumerate(x) if n] for x in (reversed(rows) if backward else rows)
    )
    rank.timeline.wait(rank.start(name, "all-to-all of mixers", "ulysses", sent, received))


@lru_cache(maxsize=256)
def _halo_rows(tokens: TokenLayout, rank: int, mask: Mask, batch: int, width: int) -> Rows:
    rows = halo_plan(tokens, rank, mask, batch, width, torch.device("cpu")).rows
    return rows.sends, rows.receives


@lru_cache(maxsize=256)
def _state_rows(tokens: TokenLayout, rank: int, mask: Mask, batch: int) -> Rows:
    rows = state_plan(tokens, rank, mask, batch, torch.device("cpu")).rows
    return rows.sends, rows.receives
