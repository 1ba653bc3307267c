"""``ChosenKeys``: attention to the keys that an indexer chooses (DeepSeek V3.2, GLM-5).

It sends what ``seqpar/hf/mechanisms/indexers.py`` sends. The indexer's scores are float32 numbers of each head, query
and key of the document, which are written and read six times. Attention multiplies latents, and its scores for the
chosen keys take 44 bytes of reads and writes a head.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

from ..masks.mask import Mask
from .attention import SelfAttention
from .part import PartRow
from .rank import RankTimeline
from .split import ELEMENT_BYTES, FLOAT32_BYTES, Split

# Computed at a time, 2^25 elements: the latents, their gradients, and these in float32.
CHUNK_BYTES = (2 + 2 + 4) * (1 << 25)


@dataclass(frozen=True)
class ChosenKeys(SelfAttention):
    """Latent attention to the keys that an indexer chooses.

    Attributes:
        keys: how many keys the indexer chooses for each query.
        index_heads: heads of the layer's own indexer; 0 for a layer that uses what the layer before it chose.
        index_dim: the head_dim of the indexer, and the elements of its key.
    """

    _: KW_ONLY
    keys: int
    index_heads: int = 0
    index_dim: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.kv_rank:
            raise ValueError("model: kv_rank=0: expected latent attention, as indexers are modelled for it only")

    @property
    def index_weights(self) -> int:
        """Number of weights of the indexer: to its queries, to its key, and to the weights of its heads."""
        return self.index_heads * (self.q_rank * self.index_dim + self.hidden) + self.hidden * self.index_dim

    @property
    def row(self) -> PartRow:
        return super().row._replace(unused=self.index_weights, is_forecast=False)

    def sees(self, mask: Mask, seq_len: int) -> Mask:
        """As many keys as a window would have."""
        return mask if self.keys >= seq_len else mask & Mask.sliding_window(self.keys - 1, self.keys - 1)

    def kept(self, split: Split, pieces: int = 1) -> float:
        """The latents of all ranks instead of this rank's, and the indices instead of the log-sum-exp."""
        more = ELEMENT_BYTES * (split.sequence_ranks - 1) * self.sent_kv + FLOAT32_BYTES * (self.keys - self.heads)
        return super().kept(split) + split.most_tokens * more

    def checkpointed(self, split: Split) -> list[float]:
        return []  # what an indexer chose is computed again

    def working(self, split: Split, pieces: int = 1) -> float:
        """dq and dout; all latents, their gradients in float32, and what is computed at a time."""
        latents = split.sequence_ranks * self.sent_kv * (ELEMENT_BYTES + FLOAT32_BYTES)
        return split.most_tokens * (ELEMENT_BYTES * (self.d + self.d_out) + latents) + CHUNK_BYTES

    def record(self, rank: RankTimeline, backward: bool = False) -> None:
        """Record the forward, or the backward, which computes attention again. An indexer is not trained."""
        s = rank.split
        tokens, keys = s.most_tokens, min(self.keys, s.seq_len)
        flops = 2.0 * tokens * (keys * self.heads * (self.sent_kv + self.kv_rank) + self.row.between)
        nbytes = tokens * keys * (4 * ELEMENT_BYTES * self.sent_kv + 44 * self.heads)
        if backward:
            rank.compute("gradients of chosen keys", 3 * flops, 3 * nbytes)
            gather_rows(rank, "sums of gradients", tokens * self.sent_kv * FLOAT32_BYTES)
            return
        if self.index_heads:
            rank.compute("to the indexer", 2.0 * tokens * self.index_weights)
            gather_rows(rank, "keys of the indexer", tokens * self.index_dim * s.dtype.itemsize)
            pairs = s.batch * _pairs_in_documents(s.mask, s.seq_len) / s.sequence_ranks * self.index_heads
            rank.compute("scores", 2.0 * self.index_dim * pairs, 6 * FLOAT32_BYTES * pairs)
        gather_rows(rank, "latents", tokens * self.sent_kv * s.dtype.itemsize)
        rank.compute("attend to chosen keys", flops, nbytes)


def gather_rows(rank: RankTimeline, name: str, nbytes: int) -> None:
    """Record an all-gather of each rank's ``nbytes``, or the reduce-scatter of as many, and wait for it."""
    bandwidth = rank.split.hardware.all_gather
    rank.timeline.wait(rank.among_all.gather(name, "indexer", "ulysses", nbytes, bandwidth))


def _pairs_in_documents(mask: Mask, seq_len: int) -> float:
    """Pairs of two tokens of the same document, the mean over the batch rows with documents of their own."""
    rows = [[*(x for x in row if x < seq_len), seq_len] for row in mask.starts]
    return sum((b - a) ** 2 for row in rows for a, b in pairwise(row)) / len(rows)
