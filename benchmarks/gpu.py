"""Check the attention backends on one GPU, then measure them. One command, under 8 minutes:

    python benchmarks/gpu.py                 # checks, then measures; writes benchmarks/results/gpu-<name>.json and .md
    TRITON_INTERPRET=1 python benchmarks/gpu.py --smoke      # the same code on tiny shapes without a GPU, no figures

The checks compare the Triton kernels, and the backends of the libraries that are installed, with the float64 reference
of the tests. They use fresh inputs in memory full of NaNs, strided and offset keys, tensors of more than 2^31 elements,
two streams at once, and compute-sanitizer if it is installed. The measurements are medians of interleaved rounds of:

* the Triton kernels, the backends of libraries, the backend that "auto" selects, ``scaled_dot_product_attention`` with
  the cuDNN and the flash backend, FlexAttention, and FlashAttention 4 if it is installed;
* the computation of one of 8 ranks in a zigzag ring, an all-gather and Ulysses, step after step on this one GPU without
  communication, compared with an eighth of the full causal attention;
* attention with a carry, compared with the same attention without one, at the shapes of a ring's steps;
* the kernels that only move bytes, compared with PyTorch's operators.

The GPU's time does not include the host's time: an idle kernel keeps the GPU busy while the host launches the kernels
that are measured. The host's time is reported separately.

The most important rows are measured first. A row that would not end in time is listed as left out. The results are
written after every row.

Shapes: b batch, q queries, k keys, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
# The files in this folder and ``tests`` are not installed. Last in the path, they hide no installed package.
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from gpu_checks import (
    DEVICE,
    INTERPRETED,
    check_large,
    check_memory_accesses,
    check_streams,
    check_strides,
    check_values,
    key_intervals,
    libraries,
    normal,
    two_shapes,
)
from gpu_report import Report, Task, dtype_name, markdown, run_in_time

import seqpar
from seqpar.kernels import select
from seqpar.kernels.base import Backend, Grads, OutputGrad, Score
from seqpar.layout import shard_positions, split_range
from seqpar.mask import Mask
from seqpar.schedule.rows import KeyIntervals
from seqpar.triton_kernels import apply_rotary, attention_backward, attention_forward, delta, merge_

RESULTS = Path(__file__).parent / "results"
Thunk = Callable[[], object]
CAUSAL, FULL = Mask.causal(), Mask.full()


class Timing(NamedTuple):
    """The time of one call.

    Attributes:
        ms: the GPU's milliseconds.
        host_us: the host's microseconds.
        queued: whether the host had launched all kernels of the call before the GPU started the first one.
    """

    ms: float
    host_us: float
    queued: bool


_LEAST_CYCLES, _MOST_CYCLES = 1 << 21, 1 << 28  # cycles of the idle kernel: 1 ms to 140 ms
_cycles: dict[str, int] = {}  # cycles of the idle kernel, by the name of the call that is timed


def timed(name: str, thunk: Thunk) -> Timing:
    """Time one call on the GPU. All its kernels are queued before the first one starts.

    An idle kernel runs first, while the host launches the call's kernels. If the idle kernel ends before the host is
    done, the GPU waits for the host. In this case the call is timed again after a longer idle kernel.
    """
    if DEVICE.type != "cuda":
        began = time.perf_counter()
        thunk()
        elapsed = time.perf_counter() - began
        return Timing(elapsed * 1e3, elapsed * 1e6, True)
    while True:
        cycles = _cycles.setdefault(name, _LEAST_CYCLES)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        start.record()
        began = time.perf_counter()
        thunk()
        host_us = (time.perf_counter() - began) * 1e6
        stop.record()
        queued = not start.query()
        stop.synchronize()
        if queued or cycles >= _MOST_CYCLES:
            return Timing(start.elapsed_time(stop), host_us, queued)
        _cycles[name] = 2 * cycles


def interleaved(thunks: dict[str, Thunk], rounds: int) -> dict[str, Timing]:
    """The median times by name. Every round runs all thunks, so that clock rates and heat affect all alike."""
    times: dict[str, list[Timing]] = {name: [] for name in thunks}
    _cycles.clear()
    warm_ups = 2 if DEVICE.type == "cuda" else 0
    for attempt in range(warm_ups + rounds):
        for name, thunk in thunks.items():
            timing = timed(name, thunk)
            if attempt >= warm_ups:
                times[name].append(timing)
    return {
        name: Timing(
            statistics.median(x.ms for x in timings),
            statistics.median(x.host_us for x in timings),
            all(x.queued for x in timings),
        )
        for name, timings in times.items()
    }


@dataclass
class Case:
    """One attention call of the Triton kernels, forward and backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: Mask

    def __post_init__(self) -> None:
        queries, keys = (torch.arange(x.shape[1]) for x in (self.q, self.k))
        self.intervals = key_intervals(self.mask, queries, keys)
        self.score = Score(self.q.shape[3] ** -0.5)
        self.out, self.lse = self.forward()
        self.gradients = [torch.zeros_like(x, dtype=torch.float32) for x in (self.q, self.k, self.v)]

    def forward(self, **options: Any) -> tuple[Tensor, Tensor]:
        return attention_forward(self.q, self.k, self.v, self.intervals, self.score, **options)

    def backward(self) -> None:
        inputs = (self.dout, self.q, self.k, self.v, self.lse, delta(self.out, self.dout))
        attention_backward(*inputs, self.intervals, self.score, *self.gradients)

    def backend_forward(self, backend: Backend) -> object:
        return backend.forward(self.q, self.k, self.v, self.intervals, self.score, None, True)

    def backend_backward(self, backend: Backend) -> None:
        output = OutputGrad(self.dout, self.out, self.lse, None)
        if backend.reads_delta:
            output = output._replace(delta=delta(self.out, self.dout))
        inputs = self.q, self.k, self.v, output, self.intervals, self.score
        dq, dk, dv = self.gradients
        backend.backward(*inputs, Grads(dq, dk, dv, new_dq=True, new_dkv=True))

    def call(self) -> Iterator[tuple[str, Callable[[], Tensor], list[Tensor]]]:
        """``seqpar.attention`` as users call it, on the backend that "auto" selects; returns what ``peers`` returns."""
        q, k, v = inputs = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]

        def run() -> Tensor:
            return seqpar.attention(q, k, v, mask=self.mask, strategy="local").transpose(1, 2)

        yield "attention()", run, inputs

    def peers(self) -> Iterator[tuple[str, Callable[[], Tensor], list[Tensor]]]:
        """Other implementations: name, forward, the tensors to differentiate by."""
        q, k, v = inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (self.q, self.k, self.v)]
        causal, grouped = self.mask is not FULL, q.shape[1] != k.shape[1]

        def sdpa(backend: SDPBackend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        yield "cudnn", partial(sdpa, SDPBackend.CUDNN_ATTENTION), inputs
        yield "flash", partial(sdpa, SDPBackend.FLASH_ATTENTION), inputs
        yield from self._flash_attn_4(causal)
        if q.shape[2] != 16384:
            return  # torch.compile takes long for every new shape
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        length = q.shape[2]
        block_mask = None
        if causal:
            block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=str(DEVICE))
        yield "flex", partial(compiled, q, k, v, block_mask=block_mask, enable_gqa=grouped), inputs

    def _flash_attn_4(self, causal: bool) -> Iterator[tuple[str, Callable[[], Tensor], list[Tensor]]]:
        """FlashAttention 4 by itself, where it is installed."""
        try:
            attention = importlib.import_module("flash_attn.cute.interface").flash_attn_func
        except ImportError:
            return
        q, k, v = inputs = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]

        def run() -> Tensor:
            result = attention(q, k, v, causal=causal)
            out: Tensor = result[0] if isinstance(result, tuple) else result
            return out.transpose(1, 2)

        yield "flash_attn 4", run, inputs


@dataclass
class Rank:
    """The computation of one of several ranks for a case, without the communication.

    Attributes:
        case: the attention of all ranks together.
        ranks, rank: the number of ranks, and the number of this rank.
        strategy: "ring" and "all-gather" in the zigzag layout, or "ulysses".
    """

    case: Case
    ranks: int
    rank: int
    strategy: str

    def __post_init__(self) -> None:
        case = self.case
        self.q, self.dout, self.out, self.lse = case.q, case.dout, case.out, case.lse
        self.steps: list[tuple[Tensor, Tensor, KeyIntervals]] = []
        if self.strategy == "ulysses":
            heads, kv_heads = (split_range(x.shape[2], self.ranks, self.rank) for x in (case.q, case.k))
            self.q, self.dout, self.out = (
                x[:, :, heads.start : heads.stop].contiguous() for x in (case.q, case.dout, case.out)
            )
            self.lse = case.lse[:, heads.start : heads.stop].contiguous()
            k, v = (x[:, :, kv_heads.start : kv_heads.stop].contiguous() for x in (case.k, case.v))
            self.steps.append((k, v, case.intervals))
            return
        length = case.q.shape[1]
        by_rank = [
            shard_positions(length, self.ranks, (self.rank - i) % self.ranks, "zigzag") for i in range(self.ranks)
        ]
        own = by_rank[0]
        at = own.to(DEVICE)
        self.q, self.dout, self.out = case.q[:, at], case.dout[:, at], case.out[:, at]
        self.lse = case.lse[:, :, at].contiguous()
        if self.strategy == "all-gather":
            by_rank = [own, torch.cat(by_rank[1:]).sort().values]
        for keys in by_rank:
            at = keys.to(DEVICE)
            self.steps.append((case.k[:, at], case.v[:, at], key_intervals(case.mask, own, keys)))

    def forward(self) -> None:
        carry = None
        for step, (k, v, intervals) in enumerate(self.steps):
            last = step == len(self.steps) - 1
            carry = attention_forward(self.q, k, v, intervals, self.case.score, carry=carry, last=last)

    def backward(self) -> None:
        row_delta = delta(self.out, self.dout)
        dq = torch.zeros_like(self.q, dtype=torch.float32)
        for k, v, intervals in self.steps:
            dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
            attention_backward(self.dout, self.q, k, v, self.lse, row_delta, intervals, self.case.score, dq, dk, dv)


def random_case(
    batch: int, length: int, heads: int, kv_heads: int, head_dim: int, mask: Mask, keys: int | None = None
) -> Case:
    """A case of ``length`` queries, and as many keys unless ``keys`` says how many."""
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    q, dout = (normal(batch, length, heads, head_dim, dtype=dtype) for _ in range(2))
    k, v = (normal(batch, keys or length, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    return Case(q, k, v, dout, mask)


def measure_speed(
    report: Report, smoke: bool, length: int, head_dim: int, heads: int, kv_heads: int, mask: Mask
) -> None:
    """TFLOP/s forward and backward: 4 (10) x pairs x head_dim x heads, as in the FlashAttention papers."""
    causal, batch = mask is CAUSAL, 1 if smoke else max(1, 16384 // length)
    label = f"{length} tokens, head_dim {head_dim}, heads {heads}/{kv_heads}, causal={causal}"
    case = random_case(batch, length, heads, kv_heads, head_dim, mask)
    go: dict[str, Thunk] = {"seqpar": case.forward}
    back: dict[str, Thunk] = {"seqpar": case.backward}
    grad = case.dout.transpose(1, 2)
    for backend in libraries(smoke):
        if (why := backend.unsupported(case.q, case.k, case.score, lse_gradient=False)) is not None:
            report.skipped.append(f"backend {backend.name}, {label}: {why}")
            continue
        go[f"backend {backend.name}"] = partial(case.backend_forward, backend)
        back[f"backend {backend.name}"] = partial(case.backend_backward, backend)
    auto = select("auto", case.q, case.k, case.score, carry=False)
    for name, run, inputs in (*case.call(), *(() if smoke else case.peers())):
        try:
            result = run()
            torch.autograd.grad(result, inputs, grad, retain_graph=True)
        except Exception as error:  # a peer that does not support this shape here
            report.skipped.append(f"{name}, {label}: {str(error).splitlines()[0][:120]}")
            continue
        go[name] = run
        back[name] = partial(torch.autograd.grad, result, inputs, grad, retain_graph=True)
    pairs = length * (length + 1) // 2 if causal else length * length
    flops = pairs * head_dim * heads * batch
    row: dict[str, Any] = {"tokens": length, "batch": batch, "head_dim": head_dim, "heads": heads,
                           "kv_heads": kv_heads, "causal": causal, "auto": auto.name}  # fmt: skip
    for direction, thunks, factor in (("forward", go, 4), ("backward", back, 10)):
        with torch.no_grad() if direction == "forward" else contextlib.nullcontext():
            times = interleaved(thunks, 1 if smoke else 12 if length <= 16384 else 5)
        row[direction] = {name: factor * flops / t.ms / 1e9 for name, t in times.items()}
        row[f"{direction}_host_us"] = {name: t.host_us for name, t in times.items()}
        row[f"{direction}_not_queued"] = [name for name, t in times.items() if not t.queued]
    report.speed.append(row)
    print(label, {d: {n: round(x) for n, x in row[d].items()} for d in ("forward", "backward")}, flush=True)


def measure_ranks(report: Report, smoke: bool, strategy: str, length: int) -> None:
    """The time of one rank's computation, compared with the time of the full attention divided by the ranks."""
    ranks, heads, kv_heads, head_dim = (2, 2, 2, 32) if smoke else (8, 32, 8, 128)
    case = random_case(1, length, heads, kv_heads, head_dim, CAUSAL)
    work: dict[str, Case | Rank] = {"full": case}
    sample = {0} if strategy == "ulysses" else {0, ranks // 2, ranks - 1}
    work |= {f"rank {r}": Rank(case, ranks, r, strategy) for r in sorted(sample)}
    row: dict[str, Any] = {"strategy": strategy, "tokens": length, "ranks": ranks, "heads": heads, "kv_heads": kv_heads}
    for direction in ("forward", "backward"):
        thunks: dict[str, Thunk] = {name: getattr(x, direction) for name, x in work.items()}
        times = interleaved(thunks, 1 if smoke else 5)
        full = times.pop("full").ms
        row[direction] = {
            "full_ms": full,
            "rank_ms": {name: t.ms for name, t in times.items()},
            "rank_host_us": {name: t.host_us for name, t in times.items()},
            "share_of_ideal": {name: full / ranks / t.ms for name, t in times.items()},
        }
    report.ranks.append(row)
    print(strategy, length, {d: row[d]["share_of_ideal"] for d in ("forward", "backward")}, flush=True)


def measure_carry(report: Report, smoke: bool, queries: int, keys: int) -> None:
    """The same queries and keys without a carry, with a carry as input, with a carry as output, and with both.

    Half the queries and all keys, or all queries and half the keys, are the steps of a causal zigzag ring.
    """
    heads, kv_heads, head_dim = (2, 1, 32) if smoke else (32, 8, 128)
    case = random_case(1, queries, heads, kv_heads, head_dim, FULL, keys)
    carry = case.forward(last=False)
    thunks: dict[str, Thunk] = {
        "none": case.forward,
        "out": partial(case.forward, last=False),
        "in and out": partial(case.forward, last=False, carry=carry),
        "in, last": partial(case.forward, carry=carry),
    }
    times = {name: t.ms for name, t in interleaved(thunks, 1 if smoke else 20).items()}
    cost = {name: ms / times["none"] - 1 for name, ms in times.items()}
    report.carry.append({"queries": queries, "keys": keys, "ms": times, "cost": cost})
    print("carry", queries, keys, {name: f"{100 * c:.1f} %" for name, c in cost.items()}, flush=True)


def measure_elementwise(report: Report, smoke: bool) -> None:
    """Kernels that only move bytes, compared with PyTorch's operators, in GB/s of the bytes that must be moved."""
    length, heads, head_dim = (64, 2, 32) if smoke else (32768, 32, 128)
    x = normal(1, length, heads, head_dim, dtype=torch.float16 if INTERPRETED else torch.bfloat16)
    acc, lse = x.float(), torch.zeros(1, heads, length, device=DEVICE)
    positions = torch.arange(length, device=DEVICE)
    frequencies = 1.0 / 10000 ** (torch.arange(0, head_dim, 2, device=DEVICE).float() / head_dim)
    angles = (positions[:, None] * frequencies)[None, :, None]
    cos, sin = angles.cos(), angles.sin()

    def rotary_in_pytorch() -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def merge_in_pytorch() -> None:
        weight = torch.sigmoid(lse - lse).transpose(1, 2).unsqueeze(-1)
        acc.lerp_(x.float(), weight)
        torch.logaddexp(lse, lse)

    thunks: dict[str, Thunk] = {
        "rotary": partial(apply_rotary, x, cos, sin),
        "rotary, PyTorch": rotary_in_pytorch,
        "merge": partial(merge_, acc, lse, x, lse.clone()),
        "merge, PyTorch": merge_in_pytorch,
        "delta": partial(delta, x, x),
        "delta, PyTorch": lambda: (x.float() * x.float()).sum(-1).transpose(1, 2).contiguous(),
        "copy": x.clone,
    }
    least = {"rotary": 4, "merge": 10, "delta": 4, "copy": 4}  # bytes per element that must be moved
    times = interleaved(thunks, 1 if smoke else 50)
    report.elementwise += [
        {"kernel": n, "ms": t.ms, "host_us": t.host_us, "gb_per_s": least[n.split(",")[0]] * x.numel() / t.ms / 1e6}
        for n, t in times.items()
    ]


def environment() -> dict[str, Any]:
    import triton

    gpu = torch.cuda.get_device_name() if DEVICE.type == "cuda" else None
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version(),
            "cudnn": torch.backends.cudnn.version() if gpu else None, "interpreted": INTERPRETED}  # fmt: skip


def tasks(smoke: bool) -> list[Task]:
    """All checks and measurements, the most important first. The first task's seconds include compilation."""

    def task(name: str, seconds: float, function: Callable[..., None], *arguments: Any) -> Task:
        return Task(name, seconds, lambda report: function(report, *arguments))

    # Fewer head_dims for the rarer dtypes: compiling is most of the time here.
    head_dims = {torch.bfloat16: [128, 64, 40, 256], torch.float16: [128, 64], torch.float32: [64]}
    if smoke:
        head_dims = {torch.float16: [32]}
    values = [
        task(f"checks, {dtype_name(dtype)}, head_dim {d}", 10, check_values, smoke, dtype, d)
        for dtype, dims in head_dims.items()
        for d in dims
    ]
    shapes = [(64, 2, 1)] if smoke else [(128, 16, 16), (128, 32, 8), (64, 32, 32)]
    speed = []
    for length in [64] if smoke else [16384, 32768, 8192, 4096, 65536, 2048]:
        for head_dim, heads, kv_heads in shapes:
            for mask in (CAUSAL, FULL):
                if mask is FULL and length == 65536:
                    continue
                name = f"{length} tokens, head_dim {head_dim}, heads {heads}/{kv_heads}, causal={mask is CAUSAL}"
                seconds = 4 + (length / 16384) ** 2 * (1 if mask is CAUSAL else 2)
                speed.append(task(name, seconds, measure_speed, smoke, length, head_dim, heads, kv_heads, mask))
    ranks = [
        task(f"{strategy} at {length} tokens", 12 * (length / 65536) ** 2, measure_ranks, smoke, strategy, length)
        for length in ([64] if smoke else [65536, 131072])
        for strategy in ("ring", "all-gather", "ulysses")
    ]
    steps = [(64, 32), (32, 64)] if smoke else [(8192, 4096), (4096, 8192), (16384, 8192), (8192, 16384)]
    carry = [task(f"carry, {q} queries, {k} keys", 3, measure_carry, smoke, q, k) for q, k in steps]
    return [
        values[0],
        task("checks, strides", 8, check_strides, smoke),
        task("checks, two streams", 5, check_streams, smoke),
        *speed[:2],
        *ranks[:1],
        *carry[:2],
        *([] if smoke else [task("compute-sanitizer", 60, check_memory_accesses)]),
        task("checks, more than 2^31 elements", 15, check_large, smoke),
        *values[1:],
        *ranks[1:3],
        *speed[2:8],
        task("kernels that move bytes", 4, measure_elementwise, smoke),
        *carry[2:],
        *speed[8:],
        *ranks[3:],
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, nothing written: does it run?")
    parser.add_argument("--seconds", type=float, default=450.0, help="leave out what would end later")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON and Markdown")
    parser.add_argument("--two-shapes", action="store_true", help=argparse.SUPPRESS)  # for compute-sanitizer
    arguments = parser.parse_args(argv)
    if DEVICE.type != "cuda" and not (arguments.smoke and INTERPRETED):
        parser.error("no GPU here; without one only TRITON_INTERPRET=1 python benchmarks/gpu.py --smoke runs")
    if arguments.two_shapes:
        return two_shapes()
    report = Report(environment())

    def save(report: Report) -> None:
        if not arguments.smoke:
            report.write(arguments.out)

    run_in_time(tasks(arguments.smoke), report, arguments.seconds, save)
    failed = sum(not row["passed"] for row in report.checks)
    print(f"checks: {len(report.checks) - failed} passed, {failed} failed", flush=True)
    text = markdown(report)
    if arguments.smoke:
        print("smoke: every part ran; interpreted figures mean nothing and are not kept")
        failed += len(report.skipped)
        print(*report.skipped, sep="\n")
    else:
        print(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
