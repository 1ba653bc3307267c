"""From recorded seconds to the rows of the table, the CSV and the JSON file.

Units: seconds, bytes, operations a second of all ranks together.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from ..trainer.report import human_bytes
from .cases import Case
from .timeline import Timeline

FORWARD, BOTH = "forward", "forward + backward"
PASSES = (FORWARD, BOTH)


@dataclass
class Sample:
    """What was recorded of one attempt. The lists have one entry for each round, and rounds are the same for all.

    Attributes:
        name, kind, layout, backend: as in ``Attempt``.
        seconds: of each pass; of several ranks, the slowest one's. A peer without a backward has no second list.
        silent: the same without messages; empty where they cannot be left out.
        cpu: CPU seconds of all threads and ranks.
        warmup_s: the first run, which opens connections and compiles kernels, and its check.
        bytes_sent: of forward and backward; of several ranks, the most that one of them sends.
        bytes_between_hosts: likewise, those of them that go to another host.
        peak_memory: bytes above the inputs; of several ranks, the largest.
        error: the largest relative error of the output and the gradients.
        chosen: the strategy that "auto" took.
    """

    name: str
    kind: str
    layout: str = ""
    backend: str = ""
    seconds: dict[str, list[float]] = field(default_factory=lambda: {FORWARD: [], BOTH: []})
    silent: dict[str, list[float]] = field(default_factory=lambda: {FORWARD: [], BOTH: []})
    cpu: list[float] = field(default_factory=list)
    warmup_s: float = 0.0
    bytes_sent: int = 0
    bytes_between_hosts: int = 0
    peak_memory: int = 0
    error: float = 0.0
    chosen: str = ""


@dataclass
class CaseResult:
    """One case: what ran, what could not and why, and the last step of each rank by attempt.

    Attributes:
        divisor: by how much the ideal on one process is divided: the ranks on CUDA, where each has a device of its own;
            the hosts on a CPU, where one process had all cores of its host.
        busy_share: the share of the cores that other programs took during the rounds.
    """

    case: Case
    samples: list[Sample]
    refused: dict[str, str]
    divisor: int
    busy_share: float = 0.0
    timelines: dict[str, list[Timeline]] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One line of the table; ``None`` is what was not measured."""

    preset: str
    mask: str
    seq_len: int
    ranks: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    what: str
    kind: str
    layout: str
    backend: str
    run: str  # one of PASSES
    rounds: int
    median_s: float
    fastest_s: float
    slowest_s: float
    cpu_s: float | None
    share_of_ideal: float
    tokens_per_s: float
    tflops: float
    exposed_s: float | None
    bytes_sent: int | None
    bytes_between_hosts: int | None
    peak_memory: int | None
    warmup_s: float
    error: float
    chosen: str


def rows_of(result: CaseResult) -> list[Row]:
    """Every attempt with a row for each pass; the best ideal of each pass first, the others after the strategies."""
    rows = []
    for run in PASSES:
        measured = [s for s in result.samples if s.seconds[run]]
        ideals = [s for s in measured if s.kind == "ideal"]
        if not ideals:
            continue
        best = min(ideals, key=lambda s: statistics.median(s.seconds[run]))
        order = {"seqpar": 1, "peer": 2, "ideal": 3}
        for sample in sorted(measured, key=lambda s: 0 if s is best else order[s.kind]):
            rows.append(_row(result, sample, run, best))
    return rows


def _row(result: CaseResult, sample: Sample, run: str, ideal: Sample) -> Row:
    case, seconds = result.case, sample.seconds[run]
    alone = sample.kind == "ideal"
    divisor = 1 if alone else result.divisor
    median = statistics.median(seconds)
    pairs = zip(ideal.seconds[run], seconds, strict=True)
    exposed = [s - t for s, t in zip(seconds, sample.silent[run], strict=False)]
    settings = asdict(case)
    settings.pop("seed")
    operations = case.operations(backward=False) + (case.operations(backward=True) if run == BOTH else 0.0)
    both = run == BOTH or not sample.seconds[BOTH]  # bytes and memory are those of the whole run
    return Row(
        **(settings | {"ranks": 1 if alone else case.ranks}),
        what=sample.name,
        kind=sample.kind,
        layout=sample.layout,
        backend=sample.backend,
        run=run,
        rounds=len(seconds),
        median_s=median,
        fastest_s=min(seconds),
        slowest_s=max(seconds),
        cpu_s=statistics.median(sample.cpu) if both else None,
        share_of_ideal=statistics.median(i / divisor / s for i, s in pairs),
        tokens_per_s=case.batch * case.seq_len / median,
        tflops=operations / median / 1e12,
        exposed_s=max(0.0, statistics.median(exposed)) if exposed else None,
        bytes_sent=sample.bytes_sent if both and not alone else None,
        bytes_between_hosts=sample.bytes_between_hosts if both and not alone else None,
        peak_memory=sample.peak_memory if both else None,
        warmup_s=sample.warmup_s,
        error=sample.error,
        chosen=sample.chosen,
    )


def table_of(result: CaseResult, run: str) -> Table:
    """The table of one case and pass."""
    case = result.case
    rounds = max((len(s.seconds[run]) for s in result.samples), default=0)
    width = str(case.head_dim) if case.head_dim == case.v_head_dim else f"{case.head_dim} (v {case.v_head_dim})"
    table = Table(
        title=f"[bold]{run}[/], {case.preset}: {case.seq_len:,} tokens, {case.ranks} rank(s), {case.heads} heads "
        f"({case.kv_heads} KV) of {width}, mask {case.mask}, {case.dtype}\nmedian of {rounds} rounds; other programs "
        f"took {result.busy_share:.0%} of the cores",
        title_justify="left",
    )
    table.add_column("")
    for heading in (
        "seconds", "range", "share of\nthe ideal", "tokens/s", "TFLOP/s", "exposed\nmessages", "sent by\na rank",
        "to other\nhosts", "peak\nmemory",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    rows = [row for row in rows_of(result) if row.run == run]
    for i, row in enumerate(rows):
        ideal = row.kind == "ideal"
        table.add_row(
            f"{row.what}, one process" if ideal else f"{row.what}: {row.chosen}" if row.chosen else row.what,
            f"{row.median_s:.4f}",
            f"{row.fastest_s:.4f} to {row.slowest_s:.4f}",
            f"{row.share_of_ideal:.2f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.tflops:.3f}" if row.tflops < 10 else f"{row.tflops:,.0f}",
            "" if row.exposed_s is None else f"{row.exposed_s * 1e3:.1f} ms",
            "" if row.bytes_sent is None else human_bytes(row.bytes_sent),
            "" if row.bytes_between_hosts is None else human_bytes(row.bytes_between_hosts),
            "" if row.peak_memory is None else human_bytes(row.peak_memory),
            end_section=i + 1 < len(rows) and row.kind != rows[i + 1].kind,
        )
    return table


def to_json(results: Sequence[CaseResult], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything, also each round's seconds."""
    return {
        "machine": facts,
        "rows": [asdict(row) for result in results for row in rows_of(result)],
        "cases": [asdict(result) for result in results],
    }
