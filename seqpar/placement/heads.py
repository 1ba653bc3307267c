"""Which query heads and KV heads a rank attends with: pure arithmetic, like ``layout`` for tokens.

In grouped-query attention, query head ``h`` of the model reads KV head ``h // q_per_kv``. Query heads are divided over
ranks without regard to these groups. The query heads of two ranks may therefore read the same KV head, and on one rank
some KV heads may be read by fewer query heads than others:

    10 query heads, 5 KV heads, 4 ranks       q_per_kv = 2

    rank            0           1           2       3
    query heads     0 1 2       3 4 5       6 7     8 9
    KV heads        0 0 1       1 2 2       3 3     4 4       rank 0 and rank 1 share KV head 1
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from .layout import split_range


@dataclass(frozen=True)
class Heads:
    """Consecutive query heads, and the KV heads that they read.

    Attributes:
        queries: the query heads, by their indices in the model.
        q_per_kv: how many query heads of the model read one KV head.
    """

    queries: range
    q_per_kv: int = 1

    @staticmethod
    def of_model(heads: int, kv_heads: int) -> Heads:
        """All heads of a model."""
        return Heads(range(heads), heads // kv_heads)

    @cached_property
    def kv(self) -> range:
        """The KV heads that the query heads read, by their indices in the model."""
        if not self.queries:
            return range(0)
        return range(self.queries[0] // self.q_per_kv, self.queries[-1] // self.q_per_kv + 1)

    def split(self, ranks: int) -> tuple[Heads, ...]:
        """The heads of each of ``ranks``: the first ``len(queries) % ranks`` ranks hold one query head more."""
        return tuple(self[split_range(len(self.queries), ranks, rank)] for rank in range(ranks))

    def __getitem__(self, of: range) -> Heads:
        """The query heads ``of``, counted from the first, with the KV heads that they read."""
        return Heads(self.queries[of.start : of.stop], self.q_per_kv)

    def groups(self, size: int) -> list[tuple[int, Heads]]:
        """The heads in groups of ``size`` query heads of the model, with the number of each group in the model."""
        first, stop = self.queries.start, self.queries.stop
        edges = [(i, max(i * size, first) - first, min(i * size + size, stop) - first) for i in range(-(-stop // size))]
        return [(i, self[range(start, end)]) for i, start, end in edges if start < end]

    def chunks(self, count: int) -> tuple[Heads, ...]:
        """The heads in ``count`` chunks of whole KV heads; fewer if there are fewer KV heads, and one chunk if the KV
        heads are read by different numbers of query heads."""
        if count < 2 or len(self.kv) < 2 or kv_index(self) is not None:
            return (self,)
        count, q_per_kv = min(count, len(self.kv)), len(self.queries) // len(self.kv)
        cuts = [split_range(len(self.kv), count, i) for i in range(count)]  # of the KV heads
        return tuple(self[range(cut.start * q_per_kv, cut.stop * q_per_kv)] for cut in cuts)

    def split_in_two(self) -> tuple[Heads, ...]:
        """The heads in two parts, of whole KV heads or of query heads of one KV head; one part for a single head."""
        if len(self.queries) < 2:
            return (self,)
        groups = len(self.kv) if len(self.kv) > 1 else len(self.queries)
        cut = (groups + 1) // 2 * (len(self.queries) // groups)
        return self[range(cut)], self[range(cut, len(self.queries))]

    def q_range(self, within: Heads) -> range:
        """The indices of the query heads in dimension ``h`` of a tensor that holds the query heads of ``within``."""
        return _shift(self.queries, within.queries)

    def kv_range(self, within: Heads) -> range:
        """The indices of the KV heads in dimension ``n`` of a tensor that holds the KV heads of ``within``."""
        return _shift(self.kv, within.kv)


@lru_cache(maxsize=512)
def kv_index(heads: Heads) -> tuple[int, ...] | None:
    """The KV head that each query head reads, counted from the first KV head.

    None if all KV heads are read by the same number of query heads. Attention kernels know that mapping.
    """
    index = [head // heads.q_per_kv - heads.kv.start for head in heads.queries]
    group = len(index) // max(1, len(heads.kv))
    even = index == [i // max(1, group) for i in range(len(index))] and len(index) == group * len(heads.kv)
    return None if even else tuple(index)


def _shift(heads: range, tensor_heads: range) -> range:
    return range(heads.start - tensor_heads.start, heads.stop - tensor_heads.start) if heads else range(0)
