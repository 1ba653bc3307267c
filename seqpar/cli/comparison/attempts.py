"""The attentions that are compared in a case: on one process (the ideal), by seqpar's strategies, by other packages.

Each of these is an ``Attempt``: the inputs of this rank, and a function that computes attention of them. All ranks of
the case make, check and run an attempt together.

Shapes: ``b`` batch, ``s`` tokens of this rank, ``h`` heads, ``n`` KV heads, ``d`` head_dim of q and k, ``e`` head_dim
of v.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...comm.p2p import without_messages
from ...comm.trace import Trace, count_sent, trace
from ...functional import attention
from ...kernels import BACKENDS
from ...mesh import Ranks
from ...sharding import Sharding
from .cases import Contender
from .peers import Peer, RefusalError, Setting, make_peer, sdpa

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
