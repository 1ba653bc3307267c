"""Sequence-parallel attention against one process: the same cores, the same sequence, side by side.

``--nproc`` ranks share this machine's cores; one process with all of the cores runs PyTorch's own
``scaled_dot_product_attention`` over the whole sequence. Both do forward and backward, in turns within the same
minutes, so that a machine that slows down slows both. A ratio of 1 is what communication that costs nothing would
give; the ratio of a strategy is the median over the rounds of its time over that of SDPA in the same round. CPU
seconds, of all threads and ranks, say what a strategy costs where other work takes turns on the cores.

    python benchmarks/strategies.py                                # 8,192 tokens, 8 heads of 64, causal, two ranks
    python benchmarks/strategies.py --mask window:1024 --strategy ring:contiguous --strategy ulysses

Prints a table and appends a row for each strategy to a CSV file, with machine, versions and commit.
"""

from __future__ import annotations

import csv
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import seqpar
from seqpar import Mask

RESULTS = Path(__file__).parent / "results" / "strategies.csv"
DEADLINE_S = 300
SDPA, LOCAL = "sdpa", "local"
DEFAULT = ("ring:zigzag", "ulysses:contiguous", "all_gather:zigzag", "ring:striped", "ring:contiguous")


@dataclass(frozen=True)
class Shape:
    """What is computed."""

    seq_len: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: str
    dtype: str

    def tensors(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, of the whole sequence: the same in every process."""
        made = torch.Generator().manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, self.seq_len, n, self.head_dim) for n in heads]
        return [torch.randn(shape, generator=made).to(getattr(torch, self.dtype)) for shape in shapes]

    def visible(self) -> Mask:
        """causal, full, window:N (the last N tokens) or documents:N (causal documents of N tokens)."""
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
        """Of a forward and a backward: 2 and 5 matrix products over the visible pairs."""
        positions = torch.arange(self.seq_len)
        lo, hi = self.visible().intervals(positions)
        pairs = int((hi.clamp_max(self.seq_len) - lo).sum())
        return 7 * 2.0 * pairs * self.batch * self.heads * self.head_dim


@dataclass(frozen=True)
class Run:
    """One forward and backward on one rank."""

    seconds: float
    cpu_seconds: float = 0.0  # of all its threads
    sent_forward: int = 0
    sent_backward: int = 0
    checksum: float = 0.0
    process_cpu: float = 0.0  # CPU seconds of its process so far, whatever for


Round = dict[str, Run]


# ------------------------------------------------------------------------------------------------ in the processes


def sdpa(shape: Shape) -> Callable[[], Run]:
    """PyTorch's attention over the whole sequence."""
    q, k, v, dout = (x.transpose(1, 2).contiguous().requires_grad_() for x in shape.tensors())
    plain = shape.mask in ("causal", "full")
    dense = None if plain else shape.visible().dense(shape.seq_len)

    def once() -> Run:
        start = time.perf_counter(), time.process_time()
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=dense, is_causal=shape.mask == "causal", enable_gqa=shape.heads != shape.kv_heads
        )
        out.backward(dout)
        return _done(start, out, q, k, v)

    return once


def strategy(shape: Shape, spec: str) -> Callable[[], Run]:
    """This rank's part under a strategy and layout, ``ring:zigzag`` for example; or the whole, for ``local``."""
    name, _, layout = spec.partition(":")
    named = name in ("local", "ring", "ulysses", "hybrid")
    options: dict[str, Any] = {"strategy": name} if named else {"strategy": "context_parallel", "comm": name}
    layout = layout or "contiguous"
    mask = shape.visible()
    q, k, v, dout = (
        (x if name == LOCAL else seqpar.shard(x, layout=layout)).contiguous().requires_grad_() for x in shape.tensors()
    )

    def once() -> Run:
        if name != LOCAL:
            dist.barrier()
        start = time.perf_counter(), time.process_time()
        with seqpar.trace() as forward:
            out: Any = seqpar.attention(q, k, v, mask=mask, layout=layout, seq_len=shape.seq_len, **options)
        with seqpar.trace() as backward:
            out.backward(dout)
        return replace(_done(start, out, q, k, v), sent_forward=forward.bytes_sent, sent_backward=backward.bytes_sent)

    return once


def _done(start: tuple[float, float], out: Tensor, *leaves: Tensor) -> Run:
    seconds, cpu_seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    checksum = float(out.detach().double().square().sum())
    for leaf in leaves:
        assert leaf.grad is not None
        checksum += float(leaf.grad.double().square().sum())
        leaf.grad = None
    return Run(seconds, cpu_seconds, checksum=checksum)


def work(pipe: Connection, shape: Shape, threads: int, rank: int, ranks: int, port: int) -> None:
    """The life of a process: get the name of what to run, run it once, send back how it went."""
    torch.set_num_threads(threads)
    try:
        if ranks > 1:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        ready: dict[str, Callable[[], Run]] = {}
        while (what := pipe.recv()) is not None:
            if what not in ready:
                ready[what] = sdpa(shape) if what == SDPA else strategy(shape, what)
                ready[what]()  # connections, caches, memory
            pipe.send(replace(ready[what](), process_cpu=time.process_time()))
    except EOFError:
        return
    except Exception:
        pipe.send(traceback.format_exc())


# ------------------------------------------------------------------------------------------------ in the parent


class Team:
    """Processes that take turns with other teams; only one team works at a time."""

    def __init__(self, shape: Shape, ranks: int, threads: int, stack: ExitStack) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes = []
        self.cpu = 0.0  # CPU seconds that its processes have used, as of their last run
        os.environ["OMP_NUM_THREADS"] = str(threads)  # the processes inherit it
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if platform.system() == "Linux" else "lo0")
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=work, args=(theirs, shape, threads, rank, ranks, self._store.port), daemon=True
            )
            process.start()
            theirs.close()
            stack.callback(process.kill)
            self._pipes.append(ours)

    def run(self, what: str) -> Run:
        """The slowest rank's time; the most bytes that a rank sends; all of the CPU time and of the checksum."""
        for pipe in self._pipes:
            pipe.send(what)
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(DEADLINE_S):
                raise SystemExit(f"{what}: rank {rank} did not answer in {DEADLINE_S} s")
            answer = pipe.recv()
            if isinstance(answer, str):
                raise SystemExit(f"{what}: rank {rank} failed:\n{answer}")
            answers.append(answer)
        self.cpu = sum(a.process_cpu for a in answers)
        return Run(
            max(a.seconds for a in answers),
            sum(a.cpu_seconds for a in answers),
            max(a.sent_forward for a in answers),
            max(a.sent_backward for a in answers),
            sum(a.checksum for a in answers),
        )


def busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used; 0 where that is not known."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq = map(int, stat.read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measure(
    shape: Shape, specs: Sequence[str], nproc: int, threads: int, repeats: int, quiet: float, most: int
) -> tuple[list[Round], float]:
    """Rounds, in each of which everything runs once; each starts elsewhere.

    A round in which other processes took more than ``quiet`` of the cores is repeated, up to ``most`` rounds in all.

    Returns:
        The ``repeats`` rounds that others disturbed least, and the largest share that others took in one of them.
    """
    everything = [SDPA, LOCAL, *specs]
    rounds: list[tuple[float, Round]] = []
    with ExitStack() as stack:
        one = Team(shape, 1, threads * nproc, stack)
        several = Team(shape, nproc, threads, stack)
        for number in range(-1, most):  # the first round is not counted
            turn = number % len(everything)
            done: Round = {}
            ours, all_of_it, start = one.cpu + several.cpu + time.process_time(), busy_seconds(), time.perf_counter()
            for what in everything[turn:] + everything[:turn]:
                time.sleep(0.05)  # let the other team's threads stop spinning
                done[what] = (one if what in (SDPA, LOCAL) else several).run(what)
            ours = one.cpu + several.cpu + time.process_time() - ours
            others = busy_seconds() - all_of_it - ours
            share = max(0.0, others) / (time.perf_counter() - start) / (os.cpu_count() or 1)
            _check(done)
            if number >= 0:
                rounds.append((share, {what: done[what] for what in everything}))
            if sum(share <= quiet for share, _ in rounds) == repeats:
                break
    rounds = sorted(rounds, key=lambda r: r[0])[:repeats]
    return [done for _, done in rounds], rounds[-1][0]


def _check(done: Round) -> None:
    expected = done[SDPA].checksum
    for what, run in done.items():
        if abs(run.checksum / expected - 1) > 1e-2:
            raise SystemExit(f"{what}: its results are not SDPA's ({run.checksum} instead of {expected})")


def summary(rounds: list[Round], shape: Shape) -> list[dict[str, Any]]:
    """A row for each of what ran."""
    rows = []
    for what in rounds[0]:
        done = [r[what] for r in rounds]
        seconds = sorted(run.seconds for run in done)
        ratios = [r[what].seconds / r[SDPA].seconds for r in rounds]
        median = statistics.median(seconds)
        rows.append(
            {
                "what": what,
                "median_s": round(median, 4),
                "fastest_s": round(seconds[0], 4),
                "slowest_s": round(seconds[-1], 4),
                "cpu_s": round(statistics.median(run.cpu_seconds for run in done), 4),
                "ratio_to_sdpa": round(statistics.median(ratios), 4),
                "gflops": round(shape.operations / median / 1e9, 1),
                "sent_forward_bytes": done[0].sent_forward,
                "sent_backward_bytes": done[0].sent_backward,
            }
        )
    return rows


def machine(nproc: int, threads: int, rounds: int, others: float) -> dict[str, Any]:
    """What a row has to say for someone else to judge it."""
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
        "processor": _processor(),
        "cores": nproc * threads,
        "nproc": nproc,
        "threads_per_rank": threads,
        "rounds": rounds,
        "others_share": round(others, 3),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seqpar": seqpar.__version__,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


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
            "" if row["what"] in (SDPA, LOCAL) else sent,
            f"{row['ratio_to_sdpa']:.3f}",
        )
    Console(width=120).print(table)


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
    quiet: Annotated[float, typer.Option(help="Share of the cores that others may take in a round.")] = 0.03,
    most: Annotated[int, typer.Option(help="Rounds in all, where others disturb them.")] = 45,
    out: Annotated[Path, typer.Option(help="CSV file that rows are appended to.")] = RESULTS,
) -> None:
    """Compare strategies with one process running PyTorch's attention, on the same cores."""
    shape = Shape(seq_len, batch, heads, kv_heads or heads, head_dim, mask, dtype)
    shape.visible()
    threads = max(
        1, (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) // nproc
    )
    rounds, others = measure(shape, strategy or DEFAULT, nproc, threads, repeats, quiet, max(most, repeats))
    facts = machine(nproc, threads, len(rounds), others)
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


if __name__ == "__main__":
    typer.run(main)
