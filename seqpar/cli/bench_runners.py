"""The attentions that ``seqpar bench`` compares: on one process (the ideal), by seqpar's strategies, by other packages.

Each is a ``Runner``: the inputs of this rank, and a function that computes attention of them. All ranks of a case make,
check and run a runner together.

The adapter of another package is a module of ``benchmarks/peers/``, which is installed as ``seqpar.peers``. It has a
``NAME`` and a function ``make(setting) -> Peer``, which raises ``RefusalError`` with the reason if the package cannot
run here.

Shapes: ``b`` batch, ``s`` tokens of this rank, ``h`` heads, ``n`` KV heads, ``d`` head_dim of q and k, ``e`` head_dim
of v.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from ..base.checks import check_choice
from ..comm.p2p import without_messages
from ..comm.trace import count_sent, trace
from ..functional import attention
from ..masks.mask import Mask
from ..mixers import by_heads
from ..placement.layout import LayoutName, shard_positions
from ..ranks.mesh import Ranks, ranks_by_host
from ..sharding.sharding import Sharding
from .bench_cases import BenchCase, BenchStrategy
from .bench_mixer import linear_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [b, s, h, d], k [b, s, n, d], v [b, s, n, e] -> [b, s, h, e]
_MAX_DENSE_TOKENS = 16384  # a longer mask would be too large as a square matrix


class RefusalError(Exception):
    """A package cannot run here; the message says why."""


@dataclass(frozen=True)
class BenchSetting:
    """What a runner has to compute, and on which ranks. The ``need_`` methods raise a ``RefusalError``."""

    case: BenchCase
    group: ProcessGroup  # the ranks that the sequence is sharded over
    alone: ProcessGroup  # this rank only
    world: int  # the number of ranks of the default group
    device: torch.device

    @property
    def mask(self) -> Mask:
        return self.case.make_mask()

    def positions(self, layout: LayoutName = "contiguous") -> Tensor:
        """Global positions of this rank's tokens, int64 ``[s]``."""
        return shard_positions(self.case.seq_len, self.group.size(), self.group.rank(), layout)

    def boundaries(self) -> list[int] | None:
        """The cu_seqlens of causal packed documents; None for another mask. A causal mask is one document."""
        if self.case.causal:
            return [0, self.case.seq_len]
        return list(self.mask.starts[0]) if self.case.mask.startswith(("documents:", "mix:")) else None

    def need_cuda(self) -> None:
        if self.device.type != "cuda":
            raise RefusalError("its kernels need CUDA")

    def need_half(self) -> None:
        if self.case.dtype == "float32":
            raise RefusalError(f"no {self.case.dtype}: bfloat16 and float16 only")

    def need_equal_head_dims(self) -> None:
        if self.case.head_dim != self.case.v_head_dim:
            raise RefusalError(
                f"no head_dim of v ({self.case.v_head_dim}) other than of q and k ({self.case.head_dim})"
            )

    def need_causal_or_full(self) -> bool:
        """Whether the mask is causal."""
        if self.case.causal is None:
            raise RefusalError(f"no mask {self.case.mask}: causal and full only")
        return self.case.causal

    def need_divisible(self, parts: int) -> None:
        if self.case.seq_len % parts:
            raise RefusalError(f"{self.case.seq_len:,} tokens do not divide by {parts}")

    def need_heads(self, ranks: int) -> None:
        """All-to-alls of whole heads need the same number of heads on every rank."""
        if self.case.heads % ranks or self.case.kv_heads % ranks:
            raise RefusalError(
                f"{self.case.heads} heads and {self.case.kv_heads} KV heads do not divide by {ranks} ranks"
            )


@dataclass(frozen=True)
class Peer:
    """The attention of another package, ready to be called."""

    attention: Attend  # q [b, s, h, d], k [b, s, n, d], v [b, s, n, e] of this rank
    positions: Tensor  # int64 [s], global positions of this rank's tokens, in the order that the package expects
    no_backward: str | None = None  # why there is no backward
    any_group: bool = False  # whether all messages are sent in setting.group, so that they can be left out
    block: Callable[[], AbstractContextManager[Any]] = nullcontext  # the context of forward and backward


def adapters(names: Sequence[str] | None) -> dict[str, Any]:
    """The adapter modules of these file names, or all."""
    try:
        available: tuple[str, ...] = import_module("seqpar.peers").PEERS
    except ImportError:  # this installation has no adapters
        available = ()
    for name in names or ():
        check_choice("peer", name, available)
    return {name: import_module(f"seqpar.peers.{name}") for name in (available if names is None else names)}


def make_peer(module: Any, setting: BenchSetting) -> Peer:
    """The attention of the package whose adapter is ``module``. RefusalError: it cannot compute this setting here."""
    try:
        peer: Peer = module.make(setting)
    except ImportError as error:
        missing = (error.name or str(error)).partition(".")[0]
        raise RefusalError(f"{missing} is not installed") from error
    return peer


def sdpa(setting: BenchSetting, rows: Tensor | None = None) -> Attend:
    """PyTorch's attention over all keys: of the queries at the positions ``rows``, or of all queries in order."""
    case = setting.case
    dense = None
    if case.causal is None or (case.causal and rows is not None):
        if case.seq_len > _MAX_DENSE_TOKENS:
            raise RefusalError(f"needs the mask as a matrix of {case.seq_len:,} x {case.seq_len:,}, which is too large")
        dense = setting.mask.dense(case.seq_len).to(setting.device)
        dense = dense if rows is None else dense.index_select(-2, rows.to(setting.device))
        dense = dense[:, None] if dense.ndim == 3 else dense
    is_causal = bool(case.causal) and dense is None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(q, k, v, attn_mask=dense, is_causal=is_causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return attention


class Times(NamedTuple):
    """The seconds of one run."""

    forward: float
    both: float
    cpu: float  # of all threads of this process


@dataclass
class Runner:
    """One way to compute a case, on this rank."""

    name: str
    attention: Attend
    inputs: list[Tensor]  # q, k, v and dout of this rank's tokens; q, k and v require gradients
    positions: Tensor  # int64 [s], global positions of these tokens
    layout: str = ""
    backend: str = ""
    no_backward: str | None = None  # why there is no backward
    silent: Attend | None = None  # the same attention without messages; None if messages cannot be left out
    block: Callable[[], AbstractContextManager[Any]] = nullcontext  # the context of forward and backward
    silence: Callable[[], AbstractContextManager[Any]] = nullcontext  # the context in which ``silent`` may be called

    def run(self, attend: Attend | None = None) -> tuple[Times, list[Tensor]]:
        """Run the forward, and the backward if there is one: the times, and out, dq, dk, dv or out alone."""
        q, k, v, dout = self.inputs
        marks, cpu = [_mark(q.device)], time.process_time()
        with self.block(), torch.set_grad_enabled(self.no_backward is None):
            out = (attend or self.attention)(q, k, v)
            marks.append(_mark(q.device))
            if self.no_backward is None:
                out.backward(dout)
        marks.append(_mark(q.device))
        if q.device.type == "cuda":
            torch.cuda.synchronize(q.device)
        times = Times(_between(*marks[:2]), _between(marks[0], marks[2]), time.process_time() - cpu)
        results = [out.detach()]
        if self.no_backward is None:
            for x in (q, k, v):
                assert x.grad is not None
                results.append(x.grad)
                x.grad = None
        return times, results

    def run_silently(self) -> Times:
        with self.silence():
            return self.run(self.silent)[0]

    def errors(self, expected: Sequence[Tensor]) -> list[tuple[float, float]]:
        """Of out and each gradient: the squared error of this rank's rows, and the squared norm of the expected rows.

        ``expected``: out, dq, dk, dv of the full sequence. This is the first run, which is not timed.
        """
        pairs = []
        for result, full in zip(self.run()[1], expected, strict=False):
            right = full.index_select(1, self.positions.to(full.device)).to(torch.float64)
            wrong = result.to(right.device, torch.float64) - right
            pairs.append((float(wrong.square().sum()), float(right.square().sum())))
        return pairs

    def count(self, peer_ranks: Ranks | None = None) -> tuple[int, int, int, str]:
        """Run once: bytes sent, bytes sent to other hosts, peak memory, and the strategy that "auto" chose.

        Messages of another package are counted among ``peer_ranks``.
        """
        _return_freed_memory()
        memory = PeakMemory(self.inputs[0].device)
        with trace() as sent, nullcontext() if peer_ranks is None else CountsMessages(peer_ranks):
            self.run()
        return sent.bytes_sent, sent.bytes_between_hosts, memory.bytes(), ", ".join(sent.chosen)


def local_inputs(setting: BenchSetting, positions: Tensor | None = None) -> list[Tensor]:
    """q, k, v and dout at some positions of the sequence, by default at all. q, k and v require gradients."""
    full = setting.case.tensors(setting.device)
    rows = full if positions is None else [x.index_select(1, positions.to(x.device)) for x in full]
    return [x.contiguous().requires_grad_(i < 3) for i, x in enumerate(rows)]


def _local_attention(setting: BenchSetting, backend: Any = "auto") -> Attend:
    return partial(attention, strategy="local", mask=setting.mask, backend=backend)


def sdpa_runner(setting: BenchSetting) -> Runner:
    return Runner("SDPA", sdpa(setting), local_inputs(setting), torch.arange(setting.case.seq_len))


def local_runner(setting: BenchSetting, backend: str) -> Runner:
    attend, inputs = _local_attention(setting, backend), local_inputs(setting)
    with trace() as ran, torch.no_grad():
        attend(*inputs[:3])
    if backend not in ran.backends:
        raise RefusalError(f"{backend} does not support this call")
    return Runner(f"local {backend}", attend, inputs, torch.arange(setting.case.seq_len), backend=backend)


def _mixer(setting: BenchSetting, sharding: Sharding) -> Attend:
    if setting.boundaries() is None:
        raise RefusalError(f"no mask {setting.case.mask}: causal and documents only")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = by_heads(linear_attention, q, (k, v), sharding=sharding, mask=setting.mask)
        return out

    return attend


def _local_mixer(setting: BenchSetting) -> Attend:
    return _mixer(setting, Sharding(setting.case.seq_len, "contiguous", strategy="local"))


def mixer_runner(setting: BenchSetting) -> Runner:
    return Runner("linear attention", _local_mixer(setting), local_inputs(setting), torch.arange(setting.case.seq_len))


def strategy_runner(setting: BenchSetting, strategy: BenchStrategy) -> Runner:
    mask, seq_len, layout = setting.mask, setting.case.seq_len, strategy.layout
    if layout == "balanced":
        per_host = max(map(len, ranks_by_host(setting.group)))
        sharding = Sharding.balanced(mask, seq_len, group=setting.group, ranks_per_host=per_host)
    else:
        sharding = Sharding(seq_len, layout, group=setting.group)
    if setting.case.mixer:
        attend = _mixer(setting, sharding)
    else:
        attend = partial(attention, mask=mask, sharding=sharding, **strategy.options)
    positions, silent = sharding.positions(), attend if setting.group.size() > 1 else None
    names = layout, strategy.backend
    inputs = local_inputs(setting, positions)
    return Runner(strategy.name, attend, inputs, positions, *names, silent=silent, silence=without_messages)


def peer_runner(setting: BenchSetting, module: Any, fake_group: Any) -> Runner:
    """Attention by another package. In ``fake_group``, which has the same ranks, messages take no time."""
    peer = make_peer(module, setting)
    silent = None
    if peer.any_group and setting.group.size() > 1:
        silent = make_peer(module, replace(setting, group=fake_group)).attention
    inputs, why = local_inputs(setting, peer.positions), peer.no_backward
    return Runner(module.NAME, peer.attention, inputs, peer.positions, no_backward=why, silent=silent, block=peer.block)


def reference(setting: BenchSetting) -> list[Tensor]:
    """out, dq, dk and dv of the full sequence in float32, from inputs that are rounded to the dtype of the case.

    By PyTorch's attention, or by seqpar's on one process where the mask would be too large as a square matrix; of
    linear attention, on one process.
    """
    case = setting.case
    dense = case.causal is not None or case.seq_len <= _MAX_DENSE_TOKENS
    attend = sdpa(setting) if dense else _local_attention(setting)
    if case.mixer:
        attend = _local_mixer(setting)
    inputs = [x.detach().float().requires_grad_(i < 3) for i, x in enumerate(local_inputs(setting))]
    return Runner("reference", attend, inputs, torch.arange(case.seq_len)).run()[1]


def _mark(device: torch.device) -> Any:
    """This moment in the stream of the device, for ``_between``."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    seconds: float = end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
    return seconds


class CountsMessages(TorchDispatchMode):
    """Within its block, the bytes that torch.distributed's operators send are added to the open traces."""

    # Operators that send the full input to each rank, and operators that send an equal part of it to each rank.
    _TO_EACH = ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_")
    _DIVIDED = ("alltoall_base_", "alltoall_", "_reduce_scatter_base_", "reduce_scatter_", "dim_zero_all_to_all")

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranks = ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, size = func.overloadpacket.__name__, self._ranks.size()
        if name == "send":
            count_sent(_nbytes(args[0]), self._ranks, args[2])
        elif name in self._TO_EACH and size > 1:
            count_sent(_nbytes(args[1]) * (size - 1), self._ranks, messages=size - 1)
        elif name in self._DIVIDED and size > 1:
            nbytes = _nbytes(args[0] if name == "dim_zero_all_to_all" else args[1])
            count_sent(nbytes * (size - 1) // size, self._ranks, messages=size - 1)
        return func(*args, **(kwargs or {}))


def _nbytes(x: Any) -> int:
    return x.nbytes if isinstance(x, Tensor) else sum(map(_nbytes, x))


def _return_freed_memory() -> None:
    """Let the C library return freed memory, which a run would otherwise reuse and so need less than it would alone."""
    gc.collect()
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


class PeakMemory:
    """The peak of memory in bytes above the memory when the object was made.

    On CUDA the memory of tensors on the device. On a CPU, where torch does not count, the resident memory of the
    process: on Linux ``VmHWM``, which is reset here, elsewhere ``ru_maxrss``, the peak since the process started.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # proc(5): set the peak to the current resident memory
        self._start = self._peak()

    def bytes(self) -> int:
        return max(0, self._peak() - self._start)

    def _peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        with suppress(OSError):  # not Linux
            return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10  # KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10  # macOS counts bytes, others KiB
