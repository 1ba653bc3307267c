"""Measures cases in rounds. In a round each attempt runs once, so that a slower machine slows all attempts alike.

All ranks of a case make and run its attempts together. If an attempt fails on one rank, no rank runs it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ..comm.communicator import without_messages
from ..comm.trace import Trace, count_sent, trace
from ..functional import attention
from ..kernels import BACKENDS
from ..mesh import Ranks, ranks_by_host
from ..planner.costs import device_name
from ..sharding import Sharding
from .bench_cases import BenchConfig, Case, Contender, Peer, RefusalError, Setting, make_peer, sdpa
from .launch import cores
from .tables import human_bytes, number_table


def busy_seconds() -> float:
    """CPU seconds that all processes of this machine have used; 0 if the operating system does not report them."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq = map(int, stat.read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def machine_facts(device: torch.device) -> dict[str, Any]:
    """The columns of the CSV file that are the same in all rows."""
    from ... import __version__

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": device_name(device),
        "cores": cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seqpar": __version__,
    }


def _commit() -> str:
    """The commit of this checkout; empty for an installed package."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent,
        )
    except OSError:  # no git
        return ""
    return described.stdout.strip()


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


# The largest allowed relative error of an output or a gradient, in the 2-norm. One device has less than a tenth of it.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
QUANTITIES = ("out", "dq", "dk", "dv")
_LONGEST_SQUARE = 16384  # tokens; a longer mask would be too large as a square matrix


@dataclass(frozen=True)
class Times:
    """The times of one run, in seconds.

    Attributes:
        forward: of the forward.
        both: of forward and backward.
        cpu: CPU time of all threads of this process.
    """

    forward: float
    both: float
    cpu: float


@dataclass
class Attempt:
    """One way to compute a case, on this rank.

    Attributes:
        name: the name in tables and charts.
        kind: "ideal", "seqpar" or "peer".
        attention: returns out ``[b, s, h, e]`` of q, k and v.
        inputs: q ``[b, s, h, d]``, k ``[b, s, n, d]``, v ``[b, s, n, e]`` and dout ``[b, s, h, e]``: the tokens of this
            rank. q, k and v require gradients.
        positions: the global positions of these tokens, int64 ``[s]``.
        layout: the layout of the sequence; "" if there is none.
        backend: the attention backend; "" if another package chooses it.
        no_backward: why there is no backward; None if there is one.
        silent: the same attention without messages; None if messages cannot be left out.
        block: returns the context in which forward and backward run.
    """

    name: str
    kind: str
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    inputs: list[Tensor]
    positions: Tensor
    layout: str = ""
    backend: str = ""
    no_backward: str | None = None
    silent: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    block: Callable[[], AbstractContextManager[Any]] = nullcontext

    def run(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None) -> tuple[Times, list[Tensor]]:
        """Run the forward, and the backward if there is one.

        Args:
            attend: the function to run; by default ``attention``.

        Returns:
            The times; and out, followed by dq, dk and dv if there is a backward.
        """
        q, k, v, dout = self.inputs
        device = q.device
        marks = [_mark(device)]
        cpu = time.process_time()
        with self.block(), torch.set_grad_enabled(self.no_backward is None):
            out = (attend or self.attention)(q, k, v)
            marks.append(_mark(device))
            if self.no_backward is None:
                out.backward(dout)
        marks.append(_mark(device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times = Times(_between(marks[0], marks[1]), _between(marks[0], marks[2]), time.process_time() - cpu)
        results = [out.detach()]
        if self.no_backward is None:
            for x in (q, k, v):
                assert x.grad is not None
                results.append(x.grad)
                x.grad = None
        return times, results

    def errors(self, expected: Sequence[Tensor]) -> list[tuple[float, float]]:
        """For out and each gradient, the squared error of this rank's rows and the squared norm of the expected rows.

        This is the first run, which connects the ranks and compiles the kernels. It is not timed.

        Args:
            expected: out, dq, dk and dv of the full sequence.
        """
        _, results = self.run()
        pairs = []
        for result, full in zip(results, expected, strict=False):
            right = full.index_select(1, self.positions.to(full.device)).to(torch.float64)
            wrong = result.to(right.device, torch.float64) - right
            pairs.append((float(wrong.square().sum()), float(right.square().sum())))
        return pairs

    def observe(self, ranks: Ranks | None) -> tuple[Trace, int]:
        """Run once, without measuring the time.

        Args:
            ranks: the ranks of the attempt, among which the messages of other packages are counted.

        Returns:
            The bytes that the run sends, and the peak of its memory in bytes above the inputs.
        """
        counter = CountsMessages(ranks) if self.kind == "peer" and ranks is not None else nullcontext()
        _return_freed_memory()
        memory = PeakMemory(self.inputs[0].device)
        with trace() as sent, counter:
            self.run()
        return sent, memory.bytes()


def _return_freed_memory() -> None:
    """Let the C library return freed memory to the operating system.

    Otherwise a run would reuse memory that an earlier one has freed, and need less new memory than it would alone.
    """
    gc.collect()
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


class PeakMemory:
    """The peak of this process's memory since the object was made, in bytes above the memory at that time.

    On CUDA it is the memory of tensors on the device, as torch counts it. On a CPU torch does not count memory, and it
    is the resident memory of the process: on Linux ``VmHWM``, which is reset here, elsewhere ``ru_maxrss``, the peak
    since the process started.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._baseline = torch.cuda.memory_allocated(device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): set the peak to the current resident memory
        self._baseline = _resident_peak()

    def bytes(self) -> int:
        """The peak so far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._baseline
        return max(0, _resident_peak() - self._baseline)


def _resident_peak() -> int:
    """The peak of resident memory in bytes."""
    with suppress(OSError):  # not Linux
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10  # KiB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10  # macOS counts bytes, others KiB


def _mark(device: torch.device) -> Any:
    """This moment in the stream of the device, for ``_between``."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    """Seconds between two marks."""
    seconds: float = end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
    return seconds


class CountsMessages(TorchDispatchMode):
    """Within its block, the bytes that torch.distributed's operators send are added to the open traces."""

    # Operators that send the whole input to each rank, and those that send an equal part of it to each rank.
    _TO_EACH = ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_")
    _DIVIDED = ("alltoall_base_", "alltoall_", "_reduce_scatter_base_", "reduce_scatter_", "dim_zero_all_to_all")

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranks = ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        size = self._ranks.size()
        if name == "send":
            count_sent(sum(x.nbytes for x in args[0]), self._ranks, args[2])
        elif name in self._TO_EACH and size > 1:
            count_sent(_bytes_of(args[1]) * (size - 1), self._ranks, messages=size - 1)
        elif name in self._DIVIDED and size > 1:
            nbytes = _bytes_of(args[0] if name == "dim_zero_all_to_all" else args[1])
            count_sent(nbytes * (size - 1) // size, self._ranks, messages=size - 1)
        return func(*args, **(kwargs or {}))


def _bytes_of(x: Any) -> int:
    return x.nbytes if isinstance(x, Tensor) else sum(_bytes_of(y) for y in x)


def local_inputs(setting: Setting, positions: Tensor | None) -> list[Tensor]:
    """q, k, v and dout at some positions of the sequence (None: at all). q, k and v require gradients."""
    full = setting.case.tensors(setting.device)
    rows = full if positions is None else [x.index_select(1, positions.to(x.device)) for x in full]
    return [x.contiguous().requires_grad_(i < 3) for i, x in enumerate(rows)]


def one_process(setting: Setting) -> Iterator[tuple[str, Callable[[], Attempt]]]:
    """The attentions of the full sequence on one process, the fastest of which is the ideal.

    These are PyTorch's attention, and seqpar's with every backend that this machine can run.

    Yields:
        The name of an attempt, and a function that makes it.
    """
    positions = torch.arange(setting.case.seq_len)

    def with_sdpa() -> Attempt:
        return Attempt("SDPA", "ideal", sdpa(setting), local_inputs(setting, None), positions)

    yield "SDPA", with_sdpa
    for name, backend in BACKENDS.items():
        if name == "reference" or backend.unavailable() is not None:
            continue

        def with_backend(name: Any = name) -> Attempt:
            mask = setting.mask

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                out: Tensor = attention(q, k, v, strategy="local", mask=mask, backend=name)
                return out

            inputs = local_inputs(setting, None)
            with trace() as ran, torch.no_grad():
                attend(*inputs[:3])
            if name not in ran.backends:
                raise RefusalError(f"{name} does not support this call")
            return Attempt(f"local {name}", "ideal", attend, inputs, positions, backend=name)

        yield f"local {name}", with_backend


def strategy_attempt(setting: Setting, contender: Contender) -> Attempt:
    """Attention by a strategy of seqpar."""
    case, mask = setting.case, setting.mask
    sharding = Sharding(case.seq_len, contender.layout, group=setting.group)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, mask=mask, sharding=sharding, **contender.options)
        return out

    positions = setting.positions(contender.layout)
    return Attempt(
        contender.name,
        "seqpar",
        attend,
        local_inputs(setting, positions),
        positions,
        layout=contender.layout,
        backend=contender.backend,
        silent=attend if setting.group.size() > 1 else None,
    )


def peer_attempt(setting: Setting, module: Any, nothing: Any) -> Attempt:
    """Attention by another package.

    Args:
        setting: the case and the ranks.
        module: the adapter of the package (see ``peers.py``).
        nothing: a group of the same ranks whose messages take no time.

    Raises:
        RefusalError: the package cannot run here.
    """
    peer: Peer = make_peer(module, setting)
    silent = None
    if peer.any_group and setting.group.size() > 1:
        silent = make_peer(module, replace(setting, group=nothing)).attention
    return Attempt(
        module.NAME,
        "peer",
        peer.attention,
        local_inputs(setting, peer.positions),
        peer.positions,
        no_backward=peer.no_backward,
        silent=silent,
        block=peer.block,
    )


@contextmanager
def silence(attempt: Attempt) -> Iterator[Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """A block that yields the attempt's attention without messages. It may be called within the block only."""
    assert attempt.silent is not None
    with without_messages() if attempt.kind == "seqpar" else nullcontext():
        yield attempt.silent


def reference(setting: Setting) -> list[Tensor]:
    """out, dq, dk and dv of the full sequence, by PyTorch's attention in float32.

    PyTorch's attention needs the mask as a square matrix unless it is causal or full. For more than 16,384 tokens the
    matrix would be too large, and seqpar's attention on one process is the reference instead.
    """
    case = setting.case
    if case.causal is not None or case.seq_len <= _LONGEST_SQUARE:
        attend = sdpa(setting)
    else:
        mask = setting.mask

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, strategy="local", mask=mask)

    # The inputs are rounded to the dtype of the case, but the computation is in float32.
    precise = [x.detach().float().requires_grad_(i < 3) for i, x in enumerate(local_inputs(setting, None))]
    _, results = Attempt("reference", "ideal", attend, precise, torch.arange(case.seq_len)).run()
    return results


_FEWEST_ROUNDS = 3
_TIMEOUT = timedelta(hours=4)  # ranks that a case does not use wait for its end
_PAUSE_S = 0.02  # until the threads of the previous run have stopped spinning

T = TypeVar("T")
Show = Callable[[str], None]


@dataclass(frozen=True)
class Groups:
    """Groups of the first ``n`` ranks.

    Attributes:
        group: the group that attention communicates in.
        control: a gloo group, in which the ranks coordinate the measurement.
        nothing: a group of the same ranks whose messages take no time.
        alone: a group with this rank only.
    """

    group: ProcessGroup
    control: ProcessGroup
    nothing: ProcessGroup
    alone: ProcessGroup

    @staticmethod
    def make(sizes: Sequence[int]) -> dict[int, Groups]:
        """The groups of the first ``n`` ranks, for each n in ``sizes``. All ranks call this together."""
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend "fake")

        world: Any = dist.group.WORLD
        alone = [dist.new_group([rank]) for rank in range(world.size())][world.rank()]
        made = {}
        for n in sizes:
            ranks = list(range(n))
            made[n] = Groups(
                world if n == world.size() else dist.new_group(ranks),
                dist.new_group(ranks, backend="gloo", timeout=_TIMEOUT),
                dist.new_group(ranks, backend="fake"),
                alone,
            )
        return made

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        values: list[Any] = [None] * self.control.size()
        dist.all_gather_object(values, value, group=self.control)
        return values

    def together(self, make: Callable[[], T]) -> tuple[T | None, str | None]:
        """Call ``make`` on all ranks.

        Returns:
            What ``make`` returned on this rank, and None; if it raised an error on any rank, None and the error.
        """
        value, reason = None, None
        try:
            value = make()
        except RefusalError as error:
            reason = str(error)
        except Exception as error:
            first = (str(error).strip() or repr(error)).splitlines()[0]
            reason = f"{type(error).__name__}: {first[:200]}"
        reasons = [r for r in self.gather(reason) if r is not None]
        return (None, reasons[0]) if reasons else (value, None)


class CaseMeasurement:
    """Measures one case on this rank. All ranks of the case call each method together."""

    def __init__(self, case: Case, groups: Groups, device: torch.device, config: BenchConfig, show: Show) -> None:
        self.case, self.device, self._config, self._show = case, device, config, show
        self._groups = groups
        self._setting = Setting(case, groups.group, groups.alone, dist.get_world_size(), device)
        self._rank = groups.control.rank()
        self._hosts = ranks_by_host(groups.group)
        self._on_host = max(map(len, self._hosts))  # ranks that share the cores of a host
        self.result = CaseResult(case, [], {}, case.ranks if device.type == "cuda" else len(self._hosts))
        self._attempts: list[tuple[Attempt | None, Sample]] = []  # None: only rank 0 runs the attempt

    def prepare(self, peers: dict[str, Any]) -> None:
        """Make and check every attempt, and count its bytes and its memory.

        Args:
            peers: the adapters of other packages, by name.
        """
        self._show("reference")
        expected, reason = self._groups.together(self._reference)
        if expected is None:
            raise RuntimeError(f"{self.case}: the reference cannot be computed: {reason}")
        for name, make in one_process(self._setting):
            self._add(name, "ideal", make, expected)
        for contender in self._config.contenders(self.case.ranks):
            self._add(contender.name, "seqpar", partial(strategy_attempt, self._setting, contender), expected)
        for module in peers.values():
            make_one = partial(peer_attempt, self._setting, module, self._groups.nothing)
            self._add(module.NAME, "peer", make_one, expected)

    def _reference(self) -> list[Tensor]:
        """out, dq, dk and dv of the full sequence, which rank 0 computes with all cores and broadcasts."""
        self._use_threads(alone=self._rank == 0)
        case = self.case
        if self._rank == 0:
            results = [x.contiguous().cpu() for x in reference(self._setting)]
        else:
            shapes = [
                (case.batch, case.seq_len, heads, width)
                for heads, width in (
                    (case.heads, case.v_head_dim),
                    (case.heads, case.head_dim),
                    (case.kv_heads, case.head_dim),
                    (case.kv_heads, case.v_head_dim),
                )
            ]
            results = [torch.empty(shape) for shape in shapes]
        for x in results:
            dist.broadcast(x, 0, group=self._groups.control)
        return results

    def _add(self, name: str, kind: str, make: Callable[[], Attempt], expected: list[Tensor]) -> None:
        """Make an attempt, compare the results of its first run with ``expected``, and count its bytes and memory."""
        self._show(f"{name}: first run")
        alone = kind == "ideal"
        absent = alone and self._rank != 0
        self._use_threads(alone)
        start = time.perf_counter()
        attempt, reason = self._groups.together(lambda: None if absent else make())
        if reason is None:
            errors, reason = self._groups.together(lambda: [] if attempt is None else attempt.errors(expected))
        if reason is not None:
            self.result.refused[name] = reason
            return
        sample = Sample(name, kind, warmup_s=time.perf_counter() - start)
        found = _relative_errors([e for e in self._groups.gather(errors) if e])
        wrong = [quantity for quantity, error in found.items() if not error <= TOLERANCES[self.case.dtype]]
        if wrong:
            differ = ", ".join(f"{quantity} by {found[quantity]:.1e}" for quantity in wrong)
            why = f"WRONG: differs from the result of one device: {differ}"
            if kind != "peer" or "out" in wrong:
                self.result.refused[name] = why
                return
            assert attempt is not None
            attempt.no_backward = why  # the forward is right and is measured
        sample.error = max(error for quantity, error in found.items() if quantity not in wrong)
        if attempt is not None:
            sample.layout, sample.backend = attempt.layout, attempt.backend
            if attempt.no_backward is not None:
                self.result.refused[f"{name}, backward,"] = attempt.no_backward
        ranks = None if alone else self._groups.group
        observed, reason = self._groups.together(lambda: None if attempt is None else attempt.observe(ranks))
        if reason is not None:
            self.result.refused[name] = reason
            return
        mine = (0, 0, 0) if observed is None else (observed[0].bytes_sent, observed[0].bytes_between_hosts, observed[1])
        most = [max(column) for column in zip(*self._groups.gather(mine), strict=True)]
        sample.bytes_sent, sample.bytes_between_hosts, sample.peak_memory = most
        sample.chosen = "" if observed is None else ", ".join(observed[0].chosen)
        self._attempts.append((attempt, sample))
        self.result.samples.append(sample)

    def _use_threads(self, alone: bool) -> None:
        """Share the cores among the ranks of a host; an attempt that rank 0 runs alone has all of them."""
        torch.set_num_threads(max(1, cores() // (1 if alone else self._on_host)))

    def rounds(self, until: float) -> None:
        """Run at least three rounds, and more until rank 0's ``time.monotonic()`` would pass ``until``."""
        start, busy, cpu = time.perf_counter(), busy_seconds(), time.process_time()
        for number in range(self._config.rounds):
            turn = number % max(1, len(self._attempts))
            begun = time.monotonic()
            for attempt, sample in self._attempts[turn:] + self._attempts[:turn]:
                self._show(f"round {number + 1} of {self._config.rounds}: {sample.name}")
                self._once(attempt, sample)
            again = time.monotonic() + (time.monotonic() - begun) < until or number + 1 < _FEWEST_ROUNDS
            if not self._groups.gather(again)[0]:
                break
        by_rank = self._groups.gather(time.process_time() - cpu)
        spent = sum(by_rank[rank] for rank in self._hosts[0])
        others = (busy_seconds() - busy - spent) / (time.perf_counter() - start)
        self.result.busy_share = max(0.0, others / (os.cpu_count() or 1))

    def _once(self, attempt: Attempt | None, sample: Sample) -> None:
        """Run an attempt once with and once without messages, and append the times to ``sample``."""
        self._use_threads(sample.kind == "ideal")
        times = self._timed(attempt, silent=False)
        both = sample.kind != "peer" or attempt is None or attempt.no_backward is None
        sample.seconds[FORWARD].append(max(t.forward for t in times))
        sample.cpu.append(sum(t.cpu for t in times))
        if both:
            sample.seconds[BOTH].append(max(t.both for t in times))
        if attempt is not None and attempt.silent is not None:
            times = self._timed(attempt, silent=True)
            sample.silent[FORWARD].append(max(t.forward for t in times))
            if both:
                sample.silent[BOTH].append(max(t.both for t in times))

    def _timed(self, attempt: Attempt | None, silent: bool) -> list[Times]:
        """Run an attempt once, and return the times of the ranks that ran it."""
        time.sleep(_PAUSE_S)
        dist.barrier(self._groups.control)
        mine = None
        if attempt is not None:
            if silent:
                with silence(attempt) as attend:
                    mine, _ = attempt.run(attend)
            else:
                mine, _ = attempt.run()
        return [t for t in self._groups.gather(mine) if t is not None]

    def write_traces(self, folder: Path) -> None:
        """Write a Chrome trace of one step of every attempt on several ranks to ``folder``, on each rank."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        for attempt, sample in self._attempts:
            if sample.kind == "ideal" or attempt is None:
                continue
            self._show(f"{sample.name}: trace")
            self._use_threads(False)
            word = sample.name.replace(" ", "-").replace(",", "").replace("+", "and")
            dist.barrier(self._groups.control)
            with profile(activities=activities) as profiler:
                self._groups.together(attempt.run)
            file = folder / f"{self.case.preset}-{self.case.seq_len}-{word}-rank{self._rank}.json"
            profiler.export_chrome_trace(str(file))


def _relative_errors(by_rank: list[list[tuple[float, float]]]) -> dict[str, float]:
    """The relative error of each quantity over the rows of all ranks, in the 2-norm."""
    errors = {}
    for name, parts in zip(QUANTITIES, zip(*by_rank, strict=True), strict=False):
        error, norm = (sum(part[i] for part in parts) for i in range(2))
        errors[name] = float((error / max(norm, 1e-300)) ** 0.5)
    return errors


def measure(
    config: BenchConfig, cases: Sequence[Case], device: torch.device, peers: dict[str, Any], show: Show, out: Path
) -> list[CaseResult]:
    """Measure all cases, one after another. All ranks call this together; ranks that a case does not use wait.

    Args:
        config: the options.
        cases: the cases.
        device: the device of this rank.
        peers: the adapters of other packages, by name.
        show: shows a text to the user.
        out: the folder for Chrome traces.

    Returns:
        The results of the cases in which this rank took part. Rank 0 has all of them.
    """
    world = dist.get_world_size()
    groups = Groups.make(sorted({world, *(case.ranks for case in cases)}))
    results = []
    began = time.monotonic()
    weights = [_weight(case) for case in cases]
    for i, case in enumerate(cases):
        if dist.get_rank() < case.ranks:
            share = weights[i] / sum(weights[i:])
            until = time.monotonic() + max(0.0, began + config.budget - time.monotonic()) * share
            one = CaseMeasurement(case, groups[case.ranks], device, config, partial(_show_of, case, show))
            one.prepare(peers)
            one.rounds(until)
            if config.trace:
                one.write_traces(out)
            results.append(one.result)
            torch.cuda.empty_cache()
        groups[world].gather(None)
    return results


def _show_of(case: Case, show: Show, text: str) -> None:
    show(f"{case}: {text}")


def _weight(case: Case) -> float:
    """The expected time of a case relative to other cases.

    It is proportional to the visible pairs, plus a constant for everything else: the pairs of 1,000 causal tokens.
    """
    return case.visible_pairs() + 5e5
