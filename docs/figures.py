"""Draw the figures of the README and of this site: ``python docs/figures.py`` writes ``docs/assets/*.svg``.

seqpar computes everything that the figures show: which rank holds a token, which keys a query sees, and which rows are
sent. Every figure has a white background, so that it looks the same on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from torch import Tensor

from seqpar import Mask
from seqpar.placement.layout import LAYOUTS, LayoutName, shard_positions

ASSETS = Path(__file__).parent / "assets"

TOKENS, RANKS = 16, 4
# One colour for each rank. They can be told apart with every common kind of colour vision.
COLOURS = ("#2f6fb3", "#e29a12", "#1c9b75", "#c2568f")
INK, GREY, LIGHT, LINE = "#24292f", "#5f6872", "#eceff2", "#c9d1d9"
OWN = "#9aa4ae"  # keys that the query's own rank holds
FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Helvetica, Arial, sans-serif\""


class Drawing:
    """SVG elements, with an origin that ``at`` moves."""

    def __init__(self) -> None:
        self.elements: list[str] = []
        self.x = self.y = 0.0

    def at(self, x: float, y: float, draw: Callable[[Drawing], None]) -> None:
        """Draw a panel whose top left corner is at ``(x, y)``."""
        self.x, self.y = self.x + x, self.y + y
        draw(self)
        self.x, self.y = self.x - x, self.y - y

    def box(self, x: float, y: float, w: float, h: float, fill: str, stroke: str = "none", r: float = 0) -> None:
        self.elements.append(
            f'<rect x="{self.x + x:g}" y="{self.y + y:g}" width="{w:g}" height="{h:g}" rx="{r:g}" '
            f'fill="{fill}" stroke="{stroke}"/>'
        )

    def matrix(self, x: float, y: float, cell: float, fills: Sequence[Sequence[str]]) -> None:
        """Square cells under a white grid. Neighbouring cells of a row with one colour are drawn as one box."""
        rows, columns = len(fills), len(fills[0])
        for row, colours in enumerate(fills):
            start = 0
            for colour, run in groupby(colours):
                length = len(list(run))
                self.box(x + start * cell, y + row * cell, length * cell, cell, colour)
                start += length
        x, y = x + self.x, y + self.y
        across = "".join(f"M{x:g},{y + row * cell:g} h{columns * cell:g} " for row in range(1, rows))
        down = "".join(f"M{x + column * cell:g},{y:g} v{rows * cell:g} " for column in range(1, columns))
        self.elements.append(f'<path d="{across}{down}" stroke="#ffffff"/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 12,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.elements.append(
            f'<text x="{self.x + x:g}" y="{self.y + y:g}" font-size="{size:g}" fill="{fill}" '
            f'text-anchor="{anchor}"{weight}>{words}</text>'
        )

    def arrow(self, x0: float, y0: float, x1: float, y1: float, colour: str, width: float = 1.8) -> None:
        """A curve that is horizontal at both ends, with an arrowhead at its end."""
        x0, x1, y0, y1 = x0 + self.x, x1 + self.x, y0 + self.y, y1 + self.y
        forward = 1 if x1 > x0 else -1
        tip, bend = x1 - 5 * forward, (x1 - x0) / 2
        path = f"M{x0:g},{y0:g} C{x0 + bend:g},{y0:g} {tip - bend:g},{y1:g} {tip:g},{y1:g}"
        self.elements.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>')
        self.elements.append(f'<path d="M{x1:g},{y1:g} l{-8 * forward},-4 v8 z" fill="{colour}"/>')

    def save(self, path: Path, width: float, height: float, title: str) -> None:
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" {FONT}>',
            f"<title>{title}</title>",
            f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#ffffff"/>',
            *self.elements,
            "</svg>",
        ]
        path.write_text("\n".join(lines) + "\n")


def positions(rank: int, layout: LayoutName) -> list[int]:
    """The tokens that a rank holds."""
    return shard_positions(TOKENS, RANKS, rank, layout).tolist()


def owners(layout: LayoutName) -> list[int]:
    """The rank that holds each token."""
    rank_of = {token: rank for rank in range(RANKS) for token in positions(rank, layout)}
    return [rank_of[token] for token in range(TOKENS)]


def sent(visible: Tensor, layout: LayoutName, owner: int, receiver: int) -> list[int]:
    """The tokens of ``owner`` whose keys and values ``receiver`` needs, because one of its queries sees them."""
    needed = visible[positions(receiver, layout)].any(0)
    return [token for token in positions(owner, layout) if needed[token]]


# A cell is one token; 13 pixels hold a two-digit number.
CELL = 13.0


def token(d: Drawing, x: float, y: float, number: int, rank: int, hollow: bool = False) -> None:
    """One token in its rank's colour; with ``hollow``, in white, because it is not sent."""
    d.box(x + 0.5, y + 0.5, CELL - 1, CELL - 1, "#ffffff" if hollow else COLOURS[rank], LINE if hollow else "none", 2)
    d.text(x + CELL / 2, y + CELL - 3.7, str(number), 8, LINE if hollow else "#ffffff", "middle")


def rank_names(d: Drawing, x: float, y: float, step: float) -> None:
    for rank in range(RANKS):
        d.text(x, y + rank * step, f"rank {rank}", 11, COLOURS[rank], "end", bold=True)


def layout_panel(layout: LayoutName) -> Callable[[Drawing], None]:
    """The tokens of one layout, the causal mask coloured by the rank that computes each row, and the work per rank."""

    def draw(d: Drawing) -> None:
        rank_of = owners(layout)
        visible = Mask.causal().dense(TOKENS)
        left, top = 54.0, 44.0
        side = TOKENS * CELL
        d.text(left + side / 2, 14, layout, 15, INK, "middle", bold=True)
        for number in range(TOKENS):
            token(d, left + number * CELL, top - 20, number, rank_of[number])
        d.text(left - 6, top - 10, "keys", 10, GREY, "end")
        d.text(left - 6, top + side / 2 + 3, "queries", 10, GREY, "end")
        d.matrix(
            left, top, CELL, [[COLOURS[rank_of[q]] if seen else LIGHT for seen in visible[q]] for q in range(TOKENS)]
        )
        bars = top + side + 24
        d.text(left, bars - 7, "work (visible query-key pairs)", 10, GREY)
        work = [int(visible[positions(rank, layout)].sum()) for rank in range(RANKS)]
        for rank, pairs in enumerate(work):
            y = bars + rank * 15
            d.box(left, y, pairs / 58 * (side - 22), 11, COLOURS[rank], r=2)
            d.text(left + pairs / 58 * (side - 22) + 5, y + 9.5, str(pairs), 10, INK)
        rank_names(d, left - 6, bars + 9.5, 15)

    return draw


LAYOUT_WIDTH, LAYOUT_HEIGHT = 272.0, 345.0


def ring_panel(layout: LayoutName) -> Callable[[Drawing], None]:
    """The keys and values with which each rank computes at each step, and the ranks that send them."""

    def draw(d: Drawing) -> None:
        visible = Mask.causal().dense(TOKENS)
        width, gap, height, top, left = 4 * CELL, 46.0, 34.0, 52.0, 54.0
        d.text(0, 14, f"ring, {layout}, causal mask", 15, INK, bold=True)
        d.text(0, 31, "the K, V each rank attends to, sent by their owner; hollow: not needed, not sent", 10.5, GREY)
        for step in range(RANKS):
            x = left + step * (width + gap)
            d.text(x + width / 2, top, f"step {step}" if step else "step 0: own", 10.5, INK, "middle")
            for receiver in range(RANKS):
                owner = (receiver - step) % RANKS
                y = top + 10 + receiver * height
                needed = sent(visible, layout, owner, receiver)
                for i, number in enumerate(positions(owner, layout)):
                    token(d, x + i * CELL, y, number, owner, number not in needed)
                if step and needed:
                    from_y = top + 10 + owner * height + CELL / 2
                    d.arrow(x - gap + 5, from_y, x - 4, y + CELL / 2, COLOURS[owner])
        rank_names(d, left - 8, top + 10 + CELL - 3, height)

    return draw


RING_WIDTH, RING_HEIGHT = 54 + 4 * 4 * CELL + 3 * 46.0, 192.0


def block_grid(d: Drawing, x: float, y: float, colour: Callable[[int, int], str], above: str, beside: str) -> None:
    """4 x 4 blocks, tokens down and heads (or features) across."""
    size = 26.0
    d.text(x + 2 * size, y - 6, above, 10, GREY, "middle")
    for row in range(RANKS):
        for column in range(RANKS):
            d.box(x + column * size, y + row * size, size - 1.5, size - 1.5, colour(row, column), r=3)
    d.elements.append(
        f'<text transform="translate({d.x + x - 7:g},{d.y + y + 2 * size:g}) rotate(-90)" font-size="10" '
        f'fill="{GREY}" text-anchor="middle">{beside}</text>'
    )


def ulysses_panel(d: Drawing) -> None:
    """Sequence shards are exchanged for head shards and back."""
    d.text(0, 14, "Ulysses", 15, INK, bold=True)
    d.text(0, 31, "two all-to-alls around ordinary attention", 10.5, GREY)
    top = 74.0
    block_grid(d, 16, top, lambda row, column: COLOURS[row], "heads", "tokens")
    block_grid(d, 222, top, lambda row, column: COLOURS[column], "heads", "tokens")
    d.arrow(128, top + 38, 204, top + 38, INK)
    d.text(165, top + 31, "q, k, v", 10.5, INK, "middle")
    d.arrow(204, top + 66, 128, top + 66, INK)
    d.text(165, top + 81, "out", 10.5, INK, "middle")
    d.text(68, top + 122, "each rank: its tokens", 10, GREY, "middle")
    d.text(274, top + 122, "each rank: its heads", 10, GREY, "middle")


ULYSSES_WIDTH = 330.0


def tp_sp_panel(d: Drawing) -> None:
    """Activations are sharded over heads or features between the GEMMs, and over tokens elsewhere."""
    d.text(0, 14, "Megatron TP-SP", 15, INK, bold=True)
    d.text(0, 31, "weights are sharded over heads (or features), activations outside over tokens", 10.5, GREY)
    top = 74.0
    grids = (
        (16, lambda row, column: COLOURS[row], "hidden", "x: its tokens"),
        (262, lambda row, column: COLOURS[column], "heads", "q, k, v: its heads"),
        (508, lambda row, column: COLOURS[row], "hidden", "y: its tokens"),
    )
    for x, colour, above, below in grids:
        block_grid(d, x, top, colour, above, "tokens")
        d.text(x + 52, top + 122, below, 10, GREY, "middle")
    for x, first, second in ((128, "all-gather, then", "GEMM (q, k, v)"), (374, "GEMM (o), then", "reduce-scatter")):
        d.arrow(x, top + 52, x + 114, top + 52, INK)
        d.text(x + 55, top + 44, first, 10.5, INK, "middle")
        d.text(x + 55, top + 68, second, 10.5, INK, "middle")


MASKS = (
    ("full()", Mask.full()),
    ("causal()", Mask.causal()),
    ("sliding_window(3)", Mask.sliding_window(3)),
    ("documents([0, 5, 7, 16])", Mask.documents([0, 5, 7, 16])),
    ("prefix_lm(6)", Mask.prefix_lm(6)),
    ("chunked(4)", Mask.chunked(4)),
    ("documents(..) &amp; sliding_window(3)", Mask.documents([0, 5, 7, 16]) & Mask.sliding_window(3)),
    ("documents(.., causal=False)", Mask.documents([0, 5, 7, 16], causal=False)),
)


def mask_panel(name: str, mask: Mask) -> Callable[[Drawing], None]:
    """One mask in the contiguous layout, and the number of rows of K and V that the ranks send under it."""

    def draw(d: Drawing) -> None:
        visible = mask.dense(TOKENS)
        rank_of = owners("contiguous")
        cell = 11.0
        d.text(TOKENS * cell / 2, 12, name, 11, INK, "middle", bold=True)

        def fill(query: int, key: int) -> str:
            if not visible[query, key]:
                return LIGHT
            return OWN if rank_of[query] == rank_of[key] else COLOURS[rank_of[key]]

        d.matrix(0, 20, cell, [[fill(query, key) for key in range(TOKENS)] for query in range(TOKENS)])
        rows = sum(
            len(sent(visible, "contiguous", owner, receiver))
            for owner in range(RANKS)
            for receiver in range(RANKS)
            if owner != receiver
        )
        d.text(TOKENS * cell / 2, 20 + TOKENS * cell + 15, f"rows of K, V sent: {rows} of 48", 10, GREY, "middle")

    return draw


def main(folder: Path = ASSETS) -> None:
    """Write every figure."""
    folder.mkdir(exist_ok=True)

    layouts = Drawing()
    for i, layout in enumerate(LAYOUTS):
        layouts.at(20 + i * (LAYOUT_WIDTH + 18), 14, layout_panel(layout))
    layouts.save(
        folder / "layouts.svg", 890, LAYOUT_HEIGHT + 22, "16 tokens on 4 ranks in three layouts, with the work per rank"
    )

    overview = Drawing()
    for i, layout in enumerate(LAYOUTS):
        overview.at(20 + i * (LAYOUT_WIDTH + 18), 14, layout_panel(layout))
    overview.at(24, LAYOUT_HEIGHT + 44, ring_panel("zigzag"))
    overview.at(536, LAYOUT_HEIGHT + 44, ulysses_panel)
    overview.save(
        folder / "overview.svg",
        890,
        LAYOUT_HEIGHT + 250,
        "Who holds which tokens, and who sends what: ring and Ulysses",
    )

    ring = Drawing()
    for i, layout in enumerate(LAYOUTS[:2]):
        ring.at(24, 14 + i * (RING_HEIGHT + 26), ring_panel(layout))
    ring.save(
        folder / "ring.svg",
        RING_WIDTH + 130,
        2 * RING_HEIGHT + 52,
        "Keys and values that each rank attends to, step by step",
    )

    ulysses = Drawing()
    ulysses.at(24, 14, ulysses_panel)
    ulysses.save(
        folder / "ulysses.svg", ULYSSES_WIDTH + 48, 222, "Ulysses: sequence shards become head shards and back"
    )

    tp_sp = Drawing()
    tp_sp.at(24, 14, tp_sp_panel)
    tp_sp.save(
        folder / "tp_sp.svg",
        664,
        222,
        "Megatron TP-SP: all-gather before q, k, v, reduce-scatter after the output projection",
    )

    masks = Drawing()
    for i, (name, mask) in enumerate(MASKS):
        masks.at(28 + i % 4 * 212, 14 + i // 4 * 232, mask_panel(name, mask))
    masks.save(
        folder / "masks.svg",
        872,
        14 + 2 * 232,
        "Masks of 16 tokens on 4 ranks, coloured by the rank that holds the key",
    )


if __name__ == "__main__":
    main()
