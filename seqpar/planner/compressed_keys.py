"""``CompressedKeys``: attention to a window of tokens and to compressed keys, and ``Streams``: several residual streams
(DeepSeek V4).

The window is attended to as in ``SelfAttention``. Besides, ``CompressedKeys`` sends what
``seqpar/hf/mechanisms/compressors.py`` sends. The scores of an indexer are float32 numbers of each head, query and
compressed key, which are written and read eight times. The scores of attention to compressed keys take 44 bytes of
reads and writes for each head, query and key.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import lru_cache

import torch

from ..masks.mask import Mask
from ..placement.layout import TokenLayout, shard_length
from ..strategies.row_exchange import window_layout, window_plan
from .attention import SelfAttention
from .chosen_keys import CHUNK_BYTES, gather_rows
from .mixer import Rows, exchange_rows
from .part import LayerPart, PartRow
from .rank import RankTimeline
from .split import ELEMENT_BYTES, FLOAT32_BYTES, Split


@dataclass(frozen=True)
class CompressedKeys(SelfAttention):
    """Attention to a window of tokens and to rows that are key and value at once, each pooled from some tokens.

    Attributes:
        weights_out: weights of the projections of the output.
        size: tokens of which each has a row; 0 for a layer that attends to its window alone.
        overlaps: whether a row also pools the tokens of the row before.
        keys: how many rows an indexer chooses for each query; 0 if it sees all rows before it.
        index_heads: heads of the indexer.
        index_dim: the head_dim of the indexer.
    """

    _: KW_ONLY
    weights_out: int
    size: int = 0
    overlaps: bool = False
    keys: int = 0
    index_heads: int = 0
    index_dim: int = 0

    @property
    def _pooled(self) -> int:
        """Numbers of a token that its rows pool, for each element of a row: a key and its gate in each row."""
        return 2 * (1 + self.overlaps) if self.size else 0

    @property
    def row(self) -> PartRow:
        projected = self.hidden * self._pooled
        return PartRow(
            before=self.q_rank * (self.hidden + self.d) + self.head_dim * (self.hidden * self.kv_heads + projected),
            after=self.weights_out,
            unused=self.index_heads * (self.q_rank * self.index_dim + self.hidden) + self.index_dim * projected,
            moved=2 * (2 * self.d + self.head_dim),  # rotates q, k and the output
            moved_backward=2 * (2 * self.d + self.head_dim),
            tensor_parallel=False,
            takes_memory=False,
            is_forecast=False,
        )

    def sees(self, mask: Mask, seq_len: int) -> Mask:
        if self.size and max(map(len, mask.starts)) > 1:
            raise ValueError(
                f"mask={mask}: the model compresses {self.size} tokens to a key, also across packed documents, which "
                "seqpar.hf refuses; plan with Mask.causal()"
            )
        return super().sees(mask, seq_len)

    def more_pairs(self, seq_len: int) -> int:
        """Query i sees the ``(i + 1) // size`` rows before it, and up to ``keys`` of them."""
        rows = self._rows(seq_len)
        return rows * (seq_len + 1) - self.size * rows * (rows + 1) // 2

    def _rows(self, seq_len: int) -> int:
        """How many rows a query multiplies at most."""
        rows = seq_len // self.size if self.size else 0
        return min(self.keys or rows, rows)

    def kept(self, split: Split, pieces: int = 1) -> float:
        """Besides q, k, v and the output: q before its norm, also in float32, the rotated output, and norms in float32.
        With rows, also what they are pooled from, attention to them and its weights, indices, and all ranks' rows."""
        normed = (FLOAT32_BYTES + 2 * ELEMENT_BYTES) * self.d + 2 * FLOAT32_BYTES * (self.q_rank + self.head_dim)
        nbytes = super().kept(split) + split.most_tokens * normed
        if self.size:
            pooled = (ELEMENT_BYTES + FLOAT32_BYTES) * self._pooled * self.head_dim
            rows = ELEMENT_BYTES * split.sequence_ranks * self.head_dim / self.size
            merged = ELEMENT_BYTES * 2 * self.d + 3 * FLOAT32_BYTES * self.heads + 8 * self.keys
            nbytes += split.most_tokens * (pooled + rows + merged)
        return nbytes

    def working(self, split: Split, pieces: int = 1) -> float:
        if not self.size:
            return super().working(split)
        rows = split.most_tokens * split.sequence_ranks * self.head_dim * (ELEMENT_BYTES + FLOAT32_BYTES) / self.size
        return super().working(split) + rows + CHUNK_BYTES

    def record(self, rank: RankTimeline, backward: bool = False) -> None:
        """Record attention to the window and to the rows, which backward computes again. An indexer is not trained."""
        if not self.size or not self._rows(rank.split.seq_len):
            super().record(rank, backward)
            return
        if backward:
            self._attend_to_rows(rank, 3)
            self._gather(rank, "sums of gradients", self.head_dim * FLOAT32_BYTES)
            self._fetch(rank, self.head_dim * FLOAT32_BYTES, backward=True)
            super().record(rank, backward)
            return
        s = rank.split
        self._fetch(rank, self.head_dim * s.dtype.itemsize)
        if self.keys:
            rank.compute("to the indexer", 2.0 * rank.tokens * self.row.unused)
            self._fetch(rank, self.index_dim * s.dtype.itemsize)
            self._gather(rank, "keys of the indexer", self.index_dim * s.dtype.itemsize)
            pairs = rank.tokens * (s.seq_len // self.size) * self.index_heads
            rank.compute("scores", 2.0 * self.index_dim * pairs, 8 * FLOAT32_BYTES * pairs)
        super().record(rank)
        self._gather(rank, "compressed keys", self.head_dim * s.dtype.itemsize)
        self._attend_to_rows(rank, 1)

    def _attend_to_rows(self, rank: RankTimeline, times: int) -> None:
        pairs = rank.tokens * self._rows(rank.split.seq_len)
        chosen = 4 * ELEMENT_BYTES * self.head_dim if self.keys else 0
        rank.compute("compressed keys", times * 4.0 * pairs * self.d, times * pairs * (44 * self.heads + chosen))

    def _fetch(self, rank: RankTimeline, element_bytes: int, backward: bool = False) -> None:
        """Record the rows' tokens that other ranks hold; ``element_bytes`` of each of the numbers that are pooled."""
        whole = rank.among_all
        rows = _window_rows(whole.split.tokens, whole.ulysses, whole.split.batch, self.size, int(self.overlaps))
        exchange_rows(whole, "tokens of compressed keys", rows, self._pooled * element_bytes, backward)

    def _gather(self, rank: RankTimeline, name: str, row_bytes: int) -> None:
        tokens, ranks = rank.among_all.split.tokens, rank.split.sequence_ranks
        layout, count = window_layout(tokens, self.size), rank.split.seq_len // self.size
        most = max(shard_length(count, ranks, peer, layout) for peer in range(ranks))
        gather_rows(rank, name, rank.split.batch * most * row_bytes)


@lru_cache(maxsize=256)
def _window_rows(tokens: TokenLayout, rank: int, batch: int, size: int, before: int) -> Rows:
    rows = window_plan(tokens, rank, batch, size, before, torch.device("cpu")).rows
    return rows.sends, rows.receives


@dataclass(frozen=True)
class Streams(LayerPart):
    """Hyper-connections: attention and the MLP read a weighted sum of several residual streams, and add to each.

    They are computed in float32.

    Attributes:
        streams: how many residual streams there are.
        weights: weights that a token is multiplied by, from its streams to their weights in the sums.
        mixed: products of a token in which its streams are mixed with one another.
    """

    streams: int
    weights: int
    mixed: int = 0

    @property
    def row(self) -> PartRow:
        """Twice a layer, float32 streams are normalised, multiplied and summed, and streams are mixed and added to."""
        moved = 2 * 22 * self.streams * self.hidden
        supported = dict.fromkeys(("tensor_parallel", "takes_memory", "is_forecast"), False)
        return PartRow(self.weights, 0, flops=2.0 * self.mixed, moved=moved, moved_backward=2 * moved, **supported)

    def kept(self, split: Split, pieces: int = 1) -> float:
        """Twice a layer: the streams, in float32 also before and after their norm; and what is added to them."""
        elements = self.streams * self.hidden * (ELEMENT_BYTES + 2 * FLOAT32_BYTES) + self.hidden * ELEMENT_BYTES
        return float(2 * split.most_tokens * elements)
