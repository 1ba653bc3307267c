"""The tokens, the visible pairs and the received K/V of each rank, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from ..base.checks import check_int
from ..masks.mask import Mask
from ..placement.balanced import pairs_of_ranks
from ..placement.layout import Layout, TokenLayout, shard_ranges
from ..schedule.plan import AttentionPlan

TOKEN_BYTES = 4096  # of k and v together: 8 heads of 128 in bfloat16


def check_masks(mask: object) -> None:
    """Raise unless ``mask`` is a mask, or at least one mask with its number of layers."""
    for each in mask if isinstance(mask, Mapping) else (mask,):
        if not isinstance(each, Mask):
            raise TypeError(
                f"mask={type(each).__name__}: expected a seqpar.Mask, such as Mask.documents([0, 5, 8]), or masks with "
                "numbers of layers, such as {mask: 1, mask & Mask.sliding_window(4095): 3}"
            )
    if isinstance(mask, Mapping):
        if not mask:
            raise ValueError("mask={}: expected at least one mask with its number of layers")
        for each, layers in mask.items():
            check_int(f"mask[{each!r}]", layers, 1)


def report(
    seq_len: int, layout: Layout, ranks: int, ulysses: int, mask: Mask | Mapping[Mask, int], token_bytes: int
) -> str:
    """What each rank holds, computes and receives in attention with ``mask``.

    Args:
        seq_len: tokens of the full sequence.
        layout: which tokens each rank holds.
        ranks: the number of ranks.
        ulysses: how many consecutive ranks have an all-to-all or tensor parallelism between them. They compute with
            the same tokens, each with its share of the heads.
        mask: which keys each query sees, or the masks of a model's layers, each with the number of its layers.
        token_bytes: bytes of k and v of one token.
    """
    check_masks(mask)
    check_int("token_bytes", token_bytes, 0)
    tokens = TokenLayout(seq_len, layout, ranks // ulysses, ulysses)
    shards = [shard_ranges(seq_len, ranks, rank, layout) for rank in range(ranks)]
    pairs, rows = [0.0] * ranks, [0.0] * ranks
    for each, layers in ({mask: 1} if isinstance(mask, Mask) else mask).items():
        each.check_length(seq_len)
        groups = each.head_groups or (each,)
        by_rank = [x / len(groups) for x in pairs_of_ranks(each, seq_len, shards)]  # the mean over groups of heads
        for ring_rank in range(tokens.ring):
            first = ring_rank * ulysses
            received = sum(AttentionPlan(x, tokens, ring_rank).rows_received for x in groups) / len(groups)
            for rank in range(first, first + ulysses):
                pairs[rank] += layers * sum(by_rank[first : first + ulysses]) / ulysses
                rows[rank] += layers * received / ulysses
    held, mean = [sum(map(len, ranges)) for ranges in shards], sum(pairs) / ranks or 1.0
    lines = [f"{'rank':>5} {'tokens':>11} {'visible pairs':>20} {'of the mean':>11} {'received MB':>12}"]
    for rank in range(ranks):
        received_mb = rows[rank] * token_bytes / 1e6
        lines.append(
            f"{rank:>5} {held[rank]:>11,} {pairs[rank]:>20,.0f} {pairs[rank] / mean:>11.2f} {received_mb:>12,.1f}"
        )
    return "\n".join(
        [*lines, f"received: k and v of other ranks in the forward of a ring, {token_bytes:,} bytes a token"]
    )
