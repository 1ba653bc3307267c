"""Write the section on scale of ``docs/planning.md``, and its two charts: ``python docs/scale.py`` (``make scale``).

Every number in it is a prediction of ``seqpar.plan`` for one sequence on all GPUs. The script takes a few minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from itertools import product
from pathlib import Path
from textwrap import fill
from typing import Any

import seqpar
from seqpar.placement.balanced import balanced_layout
from seqpar.planner import HARDWARE, MODELS, Choice, Plan
from seqpar.planner.mixes import mask_of
from seqpar.planner.setting import Setting
from seqpar.planner.step import step

DOCS = Path(__file__).parent
START, END = "<!-- written by docs/scale.py -->", "<!-- end of what docs/scale.py writes -->"
MODEL, GPU = "llama3-8b", HARDWARE["h100"]
GPUS = (8, 32, 256, 1024)
PACKED_GPUS = 4096  # in the table of packed documents, too
LENGTHS = tuple(k << 10 for k in (32, 128, 512, 1024, 4096, 16384))
MASKS = {"causal": "one document, causal", "mix:magi": "packed documents"}
STRATEGIES = ("ring", "context_parallel", "ulysses", "hybrid", "tp_sp")
# They can be told apart with every common kind of colour vision, and are dark enough for white letters.
COLOURS = dict(zip(STRATEGIES, ("#2f6fb3", "#b3701a", "#1c7d5f", "#a8437a", "#5f6872"), strict=True))
# Model, tokens, GPUs and their name, and what runs of such models use that is not modelled.
CASES = (
    ("llama3-8b", 1 << 20, 64, "h100", ""),
    ("llama3-8b", 32 << 10, 8, "h100", ""),
    ("llama3-70b", 128 << 10, 64, "h100", ""),
    (
        "llama3-405b",
        128 << 10,
        1024,
        "h100",
        "pipeline parallelism 16, with tp 8 and cp 16 on 16,384 GPUs (Llama 3, table 4)",
    ),
    ("DeepSeek-V3", 128 << 10, 1024, "h200", "expert parallelism"),
    ("qwen3-30b-a3b", 256 << 10, 32, "h200", "expert parallelism"),
    ("Gemma 3 27B", 128 << 10, 64, "b200", ""),
    ("llama3-70b", 4 << 20, 256, "b200", ""),
    ("llama3-8b", 32 << 10, 1024, "h100", ""),
    ("llama3-8b", 512 << 10, 32, "mi300x", ""),
    ("llama3-8b", 1 << 20, 8, "h100", ""),
)
CONFIGS: dict[str, dict[str, Any]] = {  # the entries of config.json that matter
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 129280, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    "Gemma 3 27B": {
        "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504, "vocab_size": 262208,
        "sliding_window": 1024,
    },
}  # fmt: skip
HIDDEN = 0.05  # if a GPU waits for a smaller share of a step, its transfers count as hidden


@dataclass(frozen=True)
class Option:
    """The planner's best choice for one strategy."""

    strategy: str
    degrees: str  # the sizes of ring, ulysses and tp, such as "16·8·1"
    mfu: float  # model FLOP/s of the visible pairs / peak FLOP/s, as expected
    mfu_range: tuple[float, float]  # between which it is expected
    waits: float  # the share of a step in which a GPU waits for transfers
    tokens_per_s: float  # of all GPUs together
    fits: bool  # into memory


@dataclass(frozen=True)
class Cell:
    """The predictions for one mask, number of GPUs and length: the best of all, and the best of each strategy."""

    best: Option
    by_strategy: dict[str, Option]
    over_zigzag: float = 1.0  # tokens/s of the best option / tokens/s of the same split with zigzag shards


Grid = dict[tuple[str, int, int], Cell]


def option_of(choice: Choice) -> Option:
    d = choice.degrees
    return Option(
        choice.strategy,
        f"{d['ring']}·{d['ulysses']}·{d['tp']}",
        choice.mfu,
        (choice.mfu * choice.seconds / choice.high_s, choice.mfu * choice.seconds / choice.low_s),
        choice.exposed_s / choice.seconds,
        choice.tokens_per_s,
        choice.possible,
    )


def predict(where: tuple[str, int, int]) -> Cell:
    """One cell: one sequence on all GPUs, without data parallelism."""
    mask, gpus, tokens = where
    plan = seqpar.plan(MODEL, tokens, gpus, GPU, mask_of(mask, tokens), replicas=1)
    by_strategy: dict[str, Option] = {}
    for choice in plan.choices:
        by_strategy.setdefault(choice.strategy, option_of(choice))
    return Cell(option_of(plan.choices[0]), by_strategy, over_zigzag(plan, plan.choices[0]))


def over_zigzag(plan: Plan, choice: Choice) -> float:
    if choice.layout != "balanced":
        return 1.0
    ring, ulysses, tensor = (choice.degrees[name] for name in ("ring", "ulysses", "tp"))
    together = ulysses * tensor
    made = balanced_layout(plan.mask, plan.seq_len, ring * together, together, GPU.gpus_per_host)
    seconds = []
    for layout in (made, "zigzag"):
        setting = Setting(
            GPU, plan.mask, plan.seq_len, model=MODELS[MODEL], ring=ring, ulysses=ulysses, tensor=tensor, layout=layout,
            gather=choice.comm == "all_gather", weights=choice.weights, accumulation=choice.accumulation,
        )  # fmt: skip
        seconds.append(step(setting, choice.switches).seconds)
    return seconds[1] / seconds[0]


def predict_all() -> Grid:
    cells = list(product(MASKS, [*GPUS, PACKED_GPUS], LENGTHS))
    cells.sort(key=lambda x: -x[1])  # the slowest first
    with ProcessPoolExecutor() as pool:
        return dict(zip(cells, pool.map(predict, cells), strict=True))


# Words


def words(tokens: int) -> str:
    return f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens >> 10}K"


def mfu_range(option: Option) -> str:
    low, high = option.mfu_range
    return f"{100 * low:.0f} to {100 * high:.0f} %"


def percent(x: float) -> str:
    return f"{x:.0%}".replace("%", " %")


def table(head: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    lines = [f"| {head} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows]
    return "\n".join(lines)


def winners(grid: Grid, mask: str) -> str:
    def cell(gpus: int, tokens: int) -> str:
        best = grid[mask, gpus, tokens].best
        return f"{best.strategy} {best.degrees}, {mfu_range(best)}" if best.fits else "does not fit"

    return table(
        "tokens", [f"{gpus:,} GPUs" for gpus in GPUS], [(words(n), [cell(g, n) for g in GPUS]) for n in LENGTHS]
    )


def by_strategy(grid: Grid, tokens: int, value: Callable[[Option], str]) -> str:
    def cell(name: str, gpus: int) -> str:
        option = grid["causal", gpus, tokens].by_strategy.get(name)
        return "none" if option is None else value(option) if option.fits else "does not fit"

    rows = [(f"`{name}`", [cell(name, g) for g in GPUS]) for name in STRATEGIES]
    return table(f"{words(tokens)} tokens", [f"{gpus:,} GPUs" for gpus in GPUS], rows)


def shortest_hidden(grid: Grid, gpus: int, name: str) -> str:
    """The shortest length from which on computation hides the transfers."""
    shortest = None
    for tokens in reversed(LENGTHS):
        option = grid["causal", gpus, tokens].by_strategy.get(name)
        if option is None or not option.fits:
            continue
        if option.waits >= HIDDEN:
            break
        shortest = tokens
    return "none" if shortest is None else words(shortest)


def hidden_from(grid: Grid) -> str:
    rows = [(f"`{name}`", [shortest_hidden(grid, g, name) for g in GPUS]) for name in STRATEGIES]
    return table("", [f"{gpus:,} GPUs" for gpus in GPUS], rows)


def packed(grid: Grid) -> str:
    def cell(gpus: int, tokens: int) -> str:
        one, many = (grid[mask, gpus, tokens].best for mask in MASKS)
        if not (one.fits and many.fits):
            return "does not fit"
        text = f"{many.strategy} {many.degrees}, {many.tokens_per_s / one.tokens_per_s:.1f} x"
        gain = grid["mix:magi", gpus, tokens].over_zigzag
        return text if gain == 1 else f"{text}; {gain:.2f}"

    gpus = [*GPUS, PACKED_GPUS]
    return table("tokens", [f"{n:,} GPUs" for n in gpus], [(words(n), [cell(g, n) for g in gpus]) for n in LENGTHS])


def count(grid: Grid, mask: str) -> str:
    """In how many cells each strategy is the best, such as "`hybrid` 14, `ring` 3, of 17 cells that fit"."""
    best = [grid[mask, gpus, tokens].best for gpus in GPUS for tokens in LENGTHS]
    best = [option for option in best if option.fits]
    numbers = sorted(((sum(b.strategy == s for b in best), s) for s in STRATEGIES), reverse=True)
    return ", ".join(f"`{name}` {n}" for n, name in numbers if n) + f", of {len(best)} cells that fit"


def spread(grid: Grid, gpus: int, tokens: int) -> str:
    """1 - tokens/s of the slowest strategy / tokens/s of the fastest one."""
    rates = [x.tokens_per_s for x in grid["causal", gpus, tokens].by_strategy.values() if x.fits]
    return f"{1 - min(rates) / max(rates):.1%}".replace("%", " %")


def case_row(model: str, tokens: int, gpus: int, gpu: str, besides: str) -> tuple[str, Sequence[str]]:
    """The first choice for one of ``CASES``, or why there is none."""
    name = f"{model}, {words(tokens)}, {gpus:,} x {gpu}"
    try:
        plan = seqpar.plan(CONFIGS.get(model, model), tokens, gpus, gpu)
    except ValueError as error:
        reason = "256 experts a layer" if "experts" in str(error) else "its kernels have no published rate"
        return name, [f"refused: {reason}", "", "", "", besides]
    best = plan.best
    degrees = "x".join(str(best.degrees[x]) for x in ("dp", "ring", "ulysses", "tp"))
    free = 1 - best.memory_bytes / plan.hardware.memory_bytes
    cells = [f"{best.strategy} {degrees}", str(best.switches), mfu_range(option_of(best)), percent(free), besides]
    return name, cells


def cases(rows: Sequence[tuple[str, int, int, str, str]] = CASES) -> str:
    columns = ["first row, dp x ring x ulysses x tp", "memory switches", "MFU", "free memory", "not modelled"]
    return table("", columns, [case_row(*row) for row in rows])


CASES_TEXT = """The recommended row for some models, with the default global batch. Pipeline and expert parallelism are
        not modelled; the last column names them where runs of such models use them. MI300X needs `--measure`, or
        rates of a kernel. With 1M tokens on 8 GPUs, the fastest row without offloading recomputes everything and is
        26 % slower."""


def wrapped(*blocks: str) -> str:
    """The blocks of Markdown, with wrapped paragraphs."""
    whole = [b if b.startswith(("|", "#", "!")) else fill(" ".join(b.split()), 120) for b in blocks]
    return "\n\n".join(whole) + "\n"


def section(grid: Grid) -> str:
    model, heads = MODELS[MODEL], MODELS[MODEL].attention
    longest, most = LENGTHS[-1], GPUS[-1]
    ring, hybrid = (grid["causal", most, 1 << 20].by_strategy[name] for name in ("ring", "hybrid"))
    enough_heads = max(gpus for gpus in GPUS if gpus <= heads.heads)
    return wrapped(
        f"""Predictions for {model.name} ({heads.heads} heads, {heads.kv_heads} KV heads) on {GPUS[0]} to {most:,} H100
        GPUs, with {words(LENGTHS[0])} to {words(longest)} tokens. One sequence is sharded over all GPUs, and so are the
        weights. What is saved for backward is offloaded to the host where nothing else fits. Each host has 8 GPUs, with
        a network of 400 Gbit/s per GPU. `make scale` writes this section again.""",
        "### Eleven settings",
        CASES_TEXT,
        cases(),
        "### Where each strategy wins",
        "![The best strategy by GPUs and tokens](assets/scale_best.png)",
        """Each cell has the strategy, the ranks (ring · ulysses · tp) and the range of the MFU of the first choice of
        the plan, under a causal mask. Cells that need a switch that the package lacks count as "does not fit":""",
        winners(grid, "causal"),
        f"""Best cells: {count(grid, "causal")}. With enough tokens per GPU, all strategies are about equally fast: with
        1M tokens on {GPUS[1]} GPUs, the slowest strategy is {spread(grid, GPUS[1], 1 << 20)} behind the best. With few
        tokens per GPU, gathering the weights decides the time of a step: shard the weights over fewer GPUs, or divide
        the GPUs among several replicas.""",
        "### Where heads run out",
        f"""An all-to-all over more ranks than heads leaves ranks idle, so `ulysses` by itself is a choice on up to
        {enough_heads} GPUs. Tensor parallelism over several hosts waits for the network in every layer, so `tp_sp` is
        considered over up to 8 ranks, with a ring or all-to-alls on more GPUs. The ranks and the range of the MFU of
        each strategy's best choice:""",
        by_strategy(grid, 1 << 20, lambda x: f"{x.degrees}, {mfu_range(x)}"),
        f"""On {most:,} GPUs, the hybrid {hybrid.degrees} is expected to reach an MFU of {percent(hybrid.mfu)}, and
        the ring {percent(ring.mfu)}. The ring waits for transfers during {percent(ring.waits)} of a step, but it runs
        {most:,} attention kernels per layer, each over {(1 << 20) // most:,} queries and as many keys, and each kernel
        takes {GPU.kernel * 1e6:.0f} µs in addition to its operations.""",
        "### Where links saturate",
        "![MFU, and the share of a step that GPUs wait, by strategy](assets/scale_waits.png)",
        f"""Transfers grow linearly with the number of tokens, and the computation grows with its square. The shortest
        length of the grid from which on GPUs wait for less than {percent(HIDDEN)} of a step ("none": no such length
        fits into memory; for a long ring the table says little, because its small kernels take longer than its
        transfers):""",
        hidden_from(grid),
        "### What packed documents change",
        """Packed documents with the lengths of MagiAttention's benchmark: most have 200 to 2,000 tokens, and the
        longest 196,608. Each cell has the best choice, and its tokens/s over the tokens/s of one causal document. Where
        its layout is balanced, a second number is its tokens/s over the tokens/s with zigzag shards:""",
        packed(grid),
        f"""Best cells: {count(grid, "mix:magi")}. Packed documents have fewer visible pairs than one document, and
        everything else in a step is the same. MFU counts only visible pairs, so it is lower where the weights or the
        links limit the speed.""",
    )


# Charts


def draw(grid: Grid, folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for axes, (mask, title) in zip(panels, MASKS.items(), strict=True):
        _map(axes, grid, mask, title)
    handles = [_box(0, 0, 1, 1, COLOURS[name]) for name in STRATEGIES]
    figure.legend(handles, STRATEGIES, loc="outside lower center", ncols=len(STRATEGIES), frameon=False)
    _save(figure, folder / "scale_best.png")
    figure, panels = pyplot.subplots(2, len(GPUS), figsize=(13, 6), sharey=True, sharex=True, layout="constrained")
    for row, (word, value) in zip(panels, (("MFU", mfu_of), ("waits, share of a step", waits_of)), strict=True):
        for axes, gpus in zip(row, GPUS, strict=True):
            _lines(axes, grid, gpus, value)
        row[0].set_ylabel(word)
    for axes, gpus in zip(panels[0], GPUS, strict=True):
        axes.set_title(f"{gpus:,} GPUs, causal", fontsize=10)
    for axes in panels[1]:
        axes.set_xlabel("tokens")
    figure.legend(handles, STRATEGIES, loc="outside lower center", ncols=len(STRATEGIES), frameon=False)
    _save(figure, folder / "scale_waits.png")


def _map(axes: Any, grid: Grid, mask: str, title: str) -> None:
    for x, gpus in enumerate(GPUS):
        for y, tokens in enumerate(LENGTHS):
            best = grid[mask, gpus, tokens].best
            colour = COLOURS[best.strategy] if best.fits else "#ffffff"
            axes.add_patch(_box(x - 0.48, y - 0.46, 0.96, 0.92, colour))
            text = f"{best.degrees}\n{percent(best.mfu)}" if best.fits else "does\nnot fit"
            axes.text(x, y, text, ha="center", va="center", fontsize=8.5, color="white" if best.fits else "#5f6872")
    axes.set_xlim(-0.55, len(GPUS) - 0.45)
    axes.set_ylim(-0.55, len(LENGTHS) - 0.45)
    axes.set_xticks(range(len(GPUS)), [f"{gpus:,}" for gpus in GPUS])
    axes.set_yticks(range(len(LENGTHS)), [words(n) for n in LENGTHS])
    axes.set_xlabel("GPUs")
    axes.set_ylabel("tokens")
    axes.set_title(f"{title}: ring · ulysses · tp, and MFU", fontsize=10)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _box(x: float, y: float, width: float, height: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=colour, edgecolor="#c9d1d9", linewidth=0.5)


def mfu_of(option: Option) -> float:
    return option.mfu


def waits_of(option: Option) -> float:
    return option.waits


def _lines(axes: Any, grid: Grid, gpus: int, value: Callable[[Option], float]) -> None:
    for name in STRATEGIES:
        options = [(n, grid["causal", gpus, n].by_strategy.get(name)) for n in LENGTHS]
        points = [(n, value(x)) for n, x in options if x is not None and x.fits]
        if points:
            axes.plot(*zip(*points, strict=True), color=COLOURS[name], marker="o", markersize=4, linewidth=1.5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(LENGTHS, [words(n) if n != 512 << 10 else "" for n in LENGTHS], fontsize=8)
    axes.minorticks_off()
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"], fontsize=8)
    axes.grid(alpha=0.3)


def _save(figure: Any, path: Path) -> None:
    """Save in 64 colours, which takes a third of the bytes."""
    from PIL import Image

    buffer = BytesIO()
    figure.savefig(buffer, dpi=110)
    Image.open(buffer).convert("RGB").quantize(64).save(path, optimize=True)


def main() -> None:
    grid = predict_all()
    page = DOCS / "planning.md"
    before, end = page.read_text().split(START)[0], page.read_text().split(END)[1]
    page.write_text(f"{before}{START}\n\n{section(grid)}\n{END}{end}")
    draw(grid, DOCS / "assets")


if __name__ == "__main__":
    main()
