"""Sequence-parallel attention beside PyTorch's attention in one process, on the same cores and the same sequence.

``--nproc`` ranks share this machine's cores. Rank 0 alone, with all of the cores, runs PyTorch's
``scaled_dot_product_attention`` over the whole sequence. Both run forward and backward, in turns within the same
minutes, so that a machine that slows down slows both. A strategy's ratio is the median, over the rounds, of its time
divided by SDPA's time in the same round. It is 1 if communication costs nothing and the work is balanced. CPU seconds
(of all threads and ranks) are the cost where other programs use the cores too.

    python benchmarks/strategies.py                                # 8,192 tokens, 8 heads of 64, causal, two ranks
    python benchmarks/strategies.py --mask window:1024 --strategy ring:contiguous --strategy ulysses
    torchrun --nproc-per-node 2 benchmarks/strategies.py           # the same as the first

Prints a table and appends a row for each strategy to a CSV file, with machine, versions and commit.

Shapes: ``b`` batch, ``s`` tokens (of the whole sequence, or of a rank), ``h`` heads, ``n`` key/value heads, ``d``
head_dim. Units: seconds of wall time, bytes of payload sent.
"""

from __future__ import annotations

import csv
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import seqpar
from seqpar import Mask
from seqpar.cli.doctor import cpu_name
from seqpar.cli.launch import CommandError, exit_with, follow_launcher, launch, threads_per_rank, under_launcher
from seqpar.strategies import STRATEGIES

RESULTS = Path(__file__).parent / "results" / "strategies.csv"
STEP_DEADLINE_S = 300  # for one run of one strategy
DEADLINE_S = 4 * 3600  # for everything
SDPA, LOCAL = "sdpa", "local"
ONE_PROCESS = (SDPA, LOCAL)  # what rank 0 runs alone, with all of the cores
DEFAULT = ("ring:zigzag", "ulysses:contiguous", "all_gather:zigzag", "ring:striped", "ring:contiguous")


@dataclass(frozen=True)
class Shape:
    """The attention that is measured."""

    seq_len: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: str
    dtype: str

    def tensors(self) -> list[Tensor]:
        """q ``[b, s, h, d]``, k and v ``[b, s, n, d]``, dout ``[b, s, h, d]`` of the whole sequence, on every rank."""
        generator = torch.Generator().manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, self.seq_len, n, self.head_dim) for n in heads]
        return [torch.randn(shape, generator=generator).to(getattr(torch, self.dtype)) for shape in shapes]

    def make_mask(self) -> Mask:
        """The mask: causal, full, window:N (the last N tokens) or documents:N (causal documents of N tokens)."""
        name, _, size = self.mask.partition(":")
        if name == "window":
            return Mask.causal() & Mask.sliding_window(int(size) - 1)
        if name == "documents":
            return Mask.documents([*range(0, self.seq_len, int(size)), self.seq_len])
        if self.mask not in ("causal", "full"):
            raise typer.BadParameter(f"{self.mask!r}: causal, full, window:N or documents:N", param_hint="--mask")
        return Mask.causal() if self.mask == "causal" else Mask.full()

    @property
    def operations(self) -> float:
        """Floating-point operations of a forward and a backward: 2 and 5 matrix products over the visible pairs."""
        positions = torch.arange(self.seq_len)
        lo, hi = self.make_mask().intervals(positions)
        pairs = int((hi.clamp_max(self.seq_len) - lo).sum())
        return 7 * 2.0 * pairs * self.batch * self.heads * self.head_dim


@dataclass(frozen=True)
class Run:
    """One forward and backward.

    Attributes:
        seconds: wall time; of several ranks, the slowest one's.
        cpu_seconds: CPU time of all threads and ranks.
        sent_forward: bytes sent; of several ranks, the most that one of them sends.
        sent_backward: likewise in backward.
        checksum: the sum of the squares of the output and the gradients, over all ranks.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    sent_forward: int = 0
    sent_backward: int = 0
    checksum: float = 0.0


Round = dict[str, Run]
T = TypeVar("T")


def sdpa(shape: Shape) -> Callable[[], Run]:
    """PyTorch's attention over the whole sequence."""
    q, k, v, dout = (x.transpose(1, 2).contiguous().requires_grad_() for x in shape.tensors())  # [b, h or n, s, d]
    plain = shape.mask in ("causal", "full")
    dense = None if plain else shape.make_mask().dense(shape.seq_len)

    def once() -> Run:
        start = time.perf_counter(), time.process_time()
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=dense, is_causal=shape.mask == "causal", enable_gqa=shape.heads != shape.kv_heads
        )
        out.backward(dout)
        return _finish(start, out, q, k, v)

    return once


def strategy(shape: Shape, spec: str) -> Callable[[], Run]:
    """This rank's shard under a strategy and layout such as ``ring:zigzag``; the whole sequence for ``local``."""
    name, _, layout = spec.partition(":")
    # Any other name is a way of context_parallel to communicate.
    options: dict[str, Any] = (
        {"strategy": name} if name in STRATEGIES else {"strategy": "context_parallel", "comm": name}
    )
    layout = layout or "contiguous"
    mask = shape.make_mask()
    q, k, v, dout = (
        (x if name == LOCAL else seqpar.shard(x, layout=layout)).contiguous().requires_grad_() for x in shape.tensors()
    )  # [b, s, h or n, d]

    def once() -> Run:
        if name != LOCAL:
            dist.barrier()
        start = time.perf_counter(), time.process_time()
        with seqpar.trace() as forward:
            out: Any = seqpar.attention(q, k, v, mask=mask, layout=layout, seq_len=shape.seq_len, **options)
        with seqpar.trace() as backward:
            out.backward(dout)
        return replace(_finish(start, out, q, k, v), sent_forward=forward.bytes_sent, sent_backward=backward.bytes_sent)

    return once


def _finish(start: tuple[float, float], out: Tensor, *leaves: Tensor) -> Run:
    seconds, cpu_seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    checksum = float(out.detach().double().square().sum())
    for leaf in leaves:
        assert leaf.grad is not None
        checksum += float(leaf.grad.double().square().sum())
        leaf.grad = None
    return Run(seconds, cpu_seconds, checksum=checksum)


class Runner:
    """Runs attention by name. All ranks make one, and call its methods together."""

    def __init__(self, shape: Shape, threads: int) -> None:
        self._shape = shape
        self._threads = threads  # of each rank
        self._ready: dict[str, Callable[[], Run]] = {}

    def run(self, name: str) -> Run:
        """One forward and backward, of all ranks together."""
        alone = name in ONE_PROCESS
        # Rank 0 takes the cores of the other ranks, which wait in the all-gather below.
        torch.set_num_threads(self._threads * (dist.get_world_size() if alone else 1))
        mine = Run() if alone and dist.get_rank() != 0 else self._run_here(name)
        runs = _all_gather(mine)
        return Run(
            max(run.seconds for run in runs),
            sum(run.cpu_seconds for run in runs),
            max(run.sent_forward for run in runs),
            max(run.sent_backward for run in runs),
            sum(run.checksum for run in runs),
        )

    def _run_here(self, name: str) -> Run:
        if name not in self._ready:
            self._ready[name] = sdpa(self._shape) if name == SDPA else strategy(self._shape, name)
            self._ready[name]()  # not counted: it opens connections and allocates memory
        return self._ready[name]()


def _all_gather(value: T) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@dataclass(frozen=True)
class Clock:
    """The time, and the CPU seconds spent so far by all processes of the machine and by the ranks."""

    wall: float
    machine: float
    ranks: float

    @staticmethod
    def now() -> Clock:
        """The same on all ranks, which call it together."""
        clocks = _all_gather(Clock(time.perf_counter(), busy_seconds(), time.process_time()))
        return replace(clocks[0], ranks=sum(clock.ranks for clock in clocks))

    def others_share_since(self, start: Clock) -> float:
        """The share of this machine's cores that processes other than the ranks have used since ``start``."""
        others = (self.machine - start.machine) - (self.ranks - start.ranks)
        return max(0.0, others) / (self.wall - start.wall) / (os.cpu_count() or 1)


def busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used; 0 where the system does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq = map(int, stat.read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measure(
    shape: Shape, specs: Sequence[str], threads: int, repeats: int, quiet: float, most: int
) -> tuple[list[Round], float]:
    """Rounds, in each of which everything runs once. Each round starts with another name. All ranks call it together.

    A round in which other processes took more than ``quiet`` of the cores is repeated, up to ``most`` rounds in all.

    Returns:
        The ``repeats`` rounds that other processes disturbed least, and the largest share of the cores that other
        processes took in one of them.
    """
    names = [SDPA, LOCAL, *specs]
    rounds: list[tuple[float, Round]] = []
    runner = Runner(shape, threads)
    for number in range(-1, most):  # the first round is not counted
        turn = number % len(names)
        runs: Round = {}
        start = Clock.now()
        for name in names[turn:] + names[:turn]:
            time.sleep(0.05)  # until the threads of the run before have stopped spinning
            runs[name] = runner.run(name)
        share = Clock.now().others_share_since(start)
        _check(runs)
        if number >= 0:
            rounds.append((share, {name: runs[name] for name in names}))
        if sum(share <= quiet for share, _ in rounds) == repeats:
            break
    rounds = sorted(rounds, key=lambda r: r[0])[:repeats]
    return [runs for _, runs in rounds], rounds[-1][0]


def _check(runs: Round) -> None:
    expected = runs[SDPA].checksum
    for name, run in runs.items():
        if abs(run.checksum / expected - 1) > 1e-2:
            raise CommandError(f"{name}: the results differ from SDPA's (checksum {run.checksum}, expected {expected})")


def summary(rounds: list[Round], shape: Shape) -> list[dict[str, Any]]:
    """A row for each name."""
    rows = []
    for name in rounds[0]:
        runs = [r[name] for r in rounds]
        seconds = sorted(run.seconds for run in runs)
        ratios = [r[name].seconds / r[SDPA].seconds for r in rounds]
        median = statistics.median(seconds)
        rows.append(
            {
                "what": name,
                "median_s": round(median, 4),
                "fastest_s": round(seconds[0], 4),
                "slowest_s": round(seconds[-1], 4),
                "cpu_s": round(statistics.median(run.cpu_seconds for run in runs), 4),
                "ratio_to_sdpa": round(statistics.median(ratios), 4),
                "gflops": round(shape.operations / median / 1e9, 1),
                "sent_forward_bytes": runs[0].sent_forward,
                "sent_backward_bytes": runs[0].sent_backward,
            }
        )
    return rows


def machine(nproc: int, threads: int, rounds: int, others: float) -> dict[str, Any]:
    """The columns that are the same in all rows: where and how they were measured."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "processor": cpu_name(),
        "cores": nproc * threads,
        "nproc": nproc,
        "threads_per_rank": threads,
        "rounds": rounds,
        "others_share": round(others, 3),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seqpar": seqpar.__version__,
    }


def show(rows: list[dict[str, Any]], shape: Shape, facts: dict[str, Any]) -> None:
    title = (
        f"{shape.seq_len:,} tokens, {shape.heads} heads ({shape.kv_heads} kv) of {shape.head_dim}, {shape.mask}, "
        f"{shape.dtype}, forward + backward\n{facts['nproc']} ranks x {facts['threads_per_rank']} thread(s) against "
        f"1 process x {facts['cores']}, median of {facts['rounds']} rounds in which other processes took at most "
        f"{facts['others_share']:.0%} of the cores"
    )
    table = Table("", "seconds", "range", "CPU s", "GFLOP/s", "MB sent fwd + bwd", "time / SDPA", title=title)
    for row in rows:
        sent = f"{row['sent_forward_bytes'] / 1e6:.1f} + {row['sent_backward_bytes'] / 1e6:.1f}"
        table.add_row(
            {SDPA: "SDPA, one process", LOCAL: "seqpar local, one process"}.get(row["what"], row["what"]),
            f"{row['median_s']:.3f}",
            f"{row['fastest_s']:.3f} to {row['slowest_s']:.3f}",
            f"{row['cpu_s']:.2f}",
            f"{row['gflops']:.0f}",
            "" if row["what"] in ONE_PROCESS else sent,
            f"{row['ratio_to_sdpa']:.3f}",
        )
    Console(width=120).print(table)


def report(rounds: list[Round], shape: Shape, facts: dict[str, Any], out: Path) -> None:
    """Print the table, and append its rows to the CSV file."""
    rows = summary(rounds, shape)
    show(rows, shape, facts)
    out.parent.mkdir(parents=True, exist_ok=True)
    new = not out.exists()
    with out.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*facts, *asdict(shape), *rows[0]])
        if new:
            writer.writeheader()
        writer.writerows({**facts, **asdict(shape), **row} for row in rows)
    print(f"{len(rows)} rows added to {out}")


def main(
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="strategy:layout, repeatable. Strategies: ring, ulysses, hybrid, and context_parallel's "
            "all_gather, p2p, a2a, a2a+p2p.",
            show_default=", ".join(DEFAULT),
        ),
    ] = None,
    seq_len: int = 8192,
    batch: int = 1,
    heads: int = 8,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads.", show_default="as heads")] = None,
    head_dim: int = 64,
    mask: Annotated[str, typer.Option(help="causal, full, window:N or documents:N.")] = "causal",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    nproc: Annotated[int, typer.Option(help="Ranks.")] = 2,
    repeats: Annotated[int, typer.Option(help="Rounds.")] = 15,
    quiet: Annotated[float, typer.Option(help="Share of the cores that other processes may take in a round.")] = 0.03,
    most: Annotated[int, typer.Option(help="Rounds in all, if other processes disturb some.")] = 45,
    out: Annotated[Path, typer.Option(help="CSV file to which rows are added.")] = RESULTS,
) -> None:
    """Compare strategies with PyTorch's attention in one process, on the same cores."""
    shape = Shape(seq_len, batch, heads, kv_heads or heads, head_dim, mask, dtype)
    shape.make_mask()  # raises if the mask is none
    try:
        if not under_launcher():
            launch([__file__, *sys.argv[1:]], nproc, DEADLINE_S)
            return
        follow_launcher()
        dist.init_process_group("gloo", timeout=timedelta(seconds=STEP_DEADLINE_S))
        nproc = dist.get_world_size()
        threads = threads_per_rank(nproc)
        rounds, others = measure(shape, strategy or DEFAULT, threads, repeats, quiet, max(most, repeats))
        if dist.get_rank() == 0:
            report(rounds, shape, machine(nproc, threads, len(rounds), others), out)
        dist.destroy_process_group()
    except CommandError as error:
        exit_with(error)


if __name__ == "__main__":
    typer.run(main)
