"""Whether it pays to store a prompt once for all of its answers (``share_prompts``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..base.checks import check_int
from ..masks.mask import Mask
from ..placement.layout import Layout, TokenLayout
from ..schedule.plan import AttentionPlan
from .pairs import computed_pairs

Costs = tuple[int, int]  # of one row in which the answers share the prompt, and of a row for each answer


@dataclass(frozen=True)
class PromptSharing:
    """What a prompt and its answers cost, shared and not: two numbers each.

    Attributes:
        tokens: of all rows. The memory of activations, and the time of everything but attention, grow with them.
        pairs: pairs of a query and a key in the tiles that attention computes, on the rank with the most.
        rows_received: tokens of other ranks whose k and v a rank receives in the forward of a ring, at most.
    """

    tokens: Costs
    pairs: Costs
    rows_received: Costs

    @property
    def pays(self) -> bool:
        """Whether sharing costs less of something, and more of nothing."""
        costs = self.tokens, self.pairs, self.rows_received
        return all(shared <= apart for shared, apart in costs) and any(shared < apart for shared, apart in costs)

    def __str__(self) -> str:
        verdict = "pays" if self.pays else "does not pay"
        parts = [f"tokens {self.tokens[0]:,} instead of {self.tokens[1]:,}"]
        for name, (shared, apart) in (("pairs in attention's tiles", self.pairs), ("k and v sent", self.rows_received)):
            parts += [f"{shared / apart:.0%} of the {name}"] if apart else []
        return f"share_prompts {verdict}: {', '.join(parts)}"


def tree_of(prompt: int, answers: Sequence[int]) -> Mask:
    """The mask of a shared prompt. Each answer begins with a copy of the prompt's last token, which predicts it."""
    return Mask.tree([-1, *[0] * len(answers)], [prompt - 1, *(1 + answer for answer in answers)])


def prompt_sharing(
    prompt: int, answers: Sequence[int], *, ranks: int = 1, layout: Layout = "zigzag", tile: int = 128
) -> PromptSharing:
    """Compare one row in which answers share a prompt with one row for each answer. Exact, from lengths alone.

    The answers count as if they began with different tokens. Where several begin alike, sharing costs less.

    Args:
        prompt: tokens of the prompt.
        answers: tokens of each answer.
        ranks: the ranks of the ring that each row is sharded over.
        layout: which tokens each rank holds.
        tile: queries and keys of a tile of the attention kernel.

    Raises:
        TypeError: a length is not an int.
        ValueError: a length is below 1, there are no answers, or a row has fewer tokens than there are ranks.
    """
    for name, value in (("prompt", prompt), *(("answers", answer) for answer in answers), ("ranks", ranks)):
        check_int(name, value, 1)
    if not answers or prompt + min(answers) < ranks:
        raise ValueError(
            f"answers={[*answers]}: expected at least one, and rows of prompt and answer of at least {ranks} tokens, "
            "one for each rank"
        )
    shared = [(tree_of(prompt, answers), prompt - 1 + len(answers) + sum(answers), 1)]
    apart = [(Mask.causal(), prompt + answer, count) for answer, count in Counter(answers).items()]
    costs = [_costs(rows, ranks, layout, tile) for rows in (shared, apart)]
    tokens, pairs, received = zip(*costs, strict=True)
    return PromptSharing(tokens, pairs, received)


def _costs(rows: Iterable[tuple[Mask, int, int]], ranks: int, layout: Layout, tile: int) -> tuple[int, int, int]:
    """Tokens, and on the rank with the most: pairs and received tokens, of rows (mask, tokens, number of such rows)."""
    tokens, pairs, received = 0, [0] * ranks, [0] * ranks
    for mask, seq_len, count in rows:
        placed = TokenLayout(seq_len, layout, ring=ranks)
        shards = [placed.ring_positions(rank) for rank in range(ranks)]
        tokens += count * seq_len
        for rank, queries in enumerate(shards):
            pairs[rank] += count * sum(computed_pairs(mask, seq_len, queries, shards, tile))
            received[rank] += count * AttentionPlan(mask, placed, rank).rows_received
    return tokens, max(pairs), max(received)
