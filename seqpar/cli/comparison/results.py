"""The recorded times of all attempts, and the rows of the table, of the CSV file and of the JSON file made from them.

Units: seconds and bytes. Tokens and operations per second are those of all ranks together.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from ..tables import human_bytes, number_table
from .cases import Case

FORWARD, BOTH = "forward", "forward + backward"
PASSES = (FORWARD, BOTH)


@dataclass
class Sample:
    """The measurements of one attempt. Each list has one entry per round, and all attempts run in the same rounds.

    Attributes:
        name, kind, layout, backend: those of the ``Attempt``.
        seconds: seconds of the slowest rank by pass, see ``PASSES``. Without a backward, the second list is empty.
        silent: the same without messages. The lists are empty if messages cannot be left out.
        cpu: CPU seconds of forward and backward, summed over all threads and ranks.
        warmup_s: seconds of the first run, which connects the ranks and compiles the kernels, and of its check.
        bytes_sent: bytes sent in forward and backward, by the rank that sends the most.
        bytes_between_hosts: the part of these bytes that is sent to other hosts, by the rank that sends the most there.
        peak_memory: peak of memory above the inputs, on the rank with the largest.
        error: the largest relative error of the output and the gradients.
        chosen: the strategy that "auto" has chosen; "" otherwise.
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
    """The results of one case.

    Attributes:
        case: the case.
        samples: the measurements of each attempt that ran.
        refused: the reason of each attempt that did not run, by its name.
        divisor: the ideal time is that of one process divided by this number. On CUDA it is the number of ranks, since
            each has its own device. On a CPU it is the number of hosts, since one process had all cores of its host.
        busy_share: the share of the cores that other programs used during the rounds.
    """

    case: Case
    samples: list[Sample]
    refused: dict[str, str]
    divisor: int
    busy_share: float = 0.0


@dataclass(frozen=True)
class Row(Case):
    """One line of the table: the columns of its case, and what was measured. A value that was not measured is None."""

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
    """One row for each attempt and pass: the ideal, then seqpar's strategies, other packages, and slower ideals."""
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
    """The row of one attempt and pass. ``ideal`` is the fastest attention on one process."""
    case, seconds = result.case, sample.seconds[run]
    alone = sample.kind == "ideal"
    divisor = 1 if alone else result.divisor
    median = statistics.median(seconds)
    pairs = zip(ideal.seconds[run], seconds, strict=True)
    exposed = [s - t for s, t in zip(seconds, sample.silent[run], strict=False)]
    operations = case.operations(backward=False) + (case.operations(backward=True) if run == BOTH else 0.0)
    both = run == BOTH or not sample.seconds[BOTH]  # bytes and memory were measured for forward and backward together
    return Row(
        **(asdict(case) | {"ranks": 1 if alone else case.ranks}),
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
    """The table of one case and of one of ``PASSES``."""
    case = result.case
    rounds = max((len(s.seconds[run]) for s in result.samples), default=0)
    width = str(case.head_dim) if case.head_dim == case.v_head_dim else f"{case.head_dim} (v {case.v_head_dim})"
    table = number_table(
        "", "seconds", "range", "share of\nthe ideal", "tokens/s", "TFLOP/s", "exposed\nmessages", "sent by\na rank",
        "to other\nhosts", "peak\nmemory",
        title=f"[bold]{run}[/], {case.preset}: {case.seq_len:,} tokens, {case.ranks} rank(s), {case.heads} heads "
        f"({case.kv_heads} KV) of {width}, mask {case.mask}, {case.dtype}\nmedian of {rounds} rounds; other programs "
        f"took {result.busy_share:.0%} of the cores",
        title_justify="left",
    )  # fmt: skip
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
    """The content of the JSON file: all rows, and the seconds of every round."""
    return {
        "machine": facts,
        "rows": [asdict(row) for result in results for row in rows_of(result)],
        "cases": [asdict(result) for result in results],
    }
