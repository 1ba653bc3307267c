"""Check the attention backends on one GPU, then measure them. One command, under 8 minutes:

    python benchmarks/gpu.py                 # checks, then measures; writes benchmarks/results/gpu-<name>.json and .md
    TRITON_INTERPRET=1 python benchmarks/gpu.py --smoke      # the same code on tiny shapes without a GPU, no figures

Checks compare the Triton kernels, and the backends on libraries that are installed, with the oracle of the tests in
float64. Measurements are medians of interleaved rounds of:

* these kernels, the backends on libraries, ``scaled_dot_product_attention`` with the cuDNN and the flash backend, and
  FlexAttention;
* one rank's steps of an 8-way zigzag ring, run one after another on this one GPU without communication, beside an
  eighth of the full causal attention;
* attention with a carry, beside the same attention without one;
* the kernels that only move bytes, beside PyTorch's operators.

Shapes: b batch, q queries, k keys, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
# The oracle is in tests/, which is not installed. At the end of the path: it must not hide an installed package.
sys.path.append(str(Path(__file__).parents[1]))

from seqpar.kernels import BACKENDS
from seqpar.kernels.base import Backend, OutputGrad, Score
from seqpar.kernels.library import LibraryBackend
from seqpar.kernels.triton import TritonBackend
from seqpar.keys import KeyIntervals
from seqpar.layout import shard_positions
from seqpar.mask import Mask
from seqpar.triton_kernels import apply_rotary, attention_backward, attention_forward, delta, merge_
from tests.reference import Rule, Rules, combined_mask, dense_gradients, visible_pairs

RESULTS = Path(__file__).parent / "results"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")
Thunk = Callable[[], object]
CAUSAL, FULL = Mask.causal(), Mask.full()


@dataclass
class Report:
    """Results so far, and the time after which no measurement starts.

    Attributes:
        deadline: on the clock of ``time.monotonic``.
        environment: GPU and versions.
        checks: errors against float64.
        speed: TFLOP/s beside other implementations.
        ring: steps of a ring beside their share of the full attention.
        carry: cost of the carry.
        elementwise: kernels that only move bytes.
        skipped: what was not measured, and why.
    """

    deadline: float
    environment: dict[str, Any]
    checks: list[dict[str, Any]] = field(default_factory=list)
    speed: list[dict[str, Any]] = field(default_factory=list)
    ring: list[dict[str, Any]] = field(default_factory=list)
    carry: list[dict[str, Any]] = field(default_factory=list)
    elementwise: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def in_time(self, what: str) -> bool:
        """Whether ``what`` may still start; if not, it is noted as skipped."""
        if time.monotonic() < self.deadline:
            return True
        self.skipped.append(what)
        return False


def key_intervals(mask: Mask, queries: Tensor, keys: Tensor) -> KeyIntervals:
    """Which keys each query sees, for queries and keys at these global positions."""
    lo, hi = (torch.searchsorted(keys, x.reshape(-1, len(queries)).contiguous()).int() for x in mask.intervals(queries))
    return KeyIntervals(lo, torch.maximum(lo, hi), queries.int(), keys.int()).to(DEVICE)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


def libraries(smoke: bool) -> list[Backend]:
    """The backends on libraries that can run here; without a GPU the reference stands for them."""
    if smoke:
        return [BACKENDS["reference"]]
    return [b for b in BACKENDS.values() if isinstance(b, LibraryBackend) and b.unavailable() is None]


def run_steps(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, steps: int, score: Score
) -> list[Tensor]:
    """out, dq, dk, dv of a backend, with the keys in ``steps`` steps. What it is to write to holds NaNs before."""
    positions = torch.arange(q.shape[1])
    parts = [torch.arange(step, k.shape[1], steps) for step in range(steps)]
    if isinstance(backend, LibraryBackend):  # of every third key its kernels know no mask
        parts = list(torch.arange(k.shape[1]).tensor_split(steps))
    carry = None
    for step, keys in enumerate(parts):
        at, intervals = keys.to(DEVICE), key_intervals(mask, positions, keys)
        carry = backend.forward(q, k[:, at], v[:, at], intervals, score, carry, step == steps - 1)
    assert carry is not None
    out, lse = carry
    dq, dk, dv = (torch.full_like(x, torch.nan, dtype=torch.float32) for x in (q, k, v))
    output = OutputGrad(dout, out, lse, delta(out, dout))
    for step, keys in enumerate(parts):
        at, intervals = keys.to(DEVICE), key_intervals(mask, positions, keys)
        grads = [torch.full_like(x[:, at], torch.nan, dtype=torch.float32) for x in (k, v)]
        backend.backward(
            q, k[:, at], v[:, at], output, intervals, score, dq, grads[0], grads[1], new_dq=step == 0, new_dkv=True
        )
        dk[:, at], dv[:, at] = grads
    return [out, dq, dk, dv]


def check(report: Report, smoke: bool) -> None:
    """Every backend against float64 on fresh random inputs: relative error by norm."""
    length = 40 if smoke else 513
    rules: dict[str, Rules] = {
        "causal": (Rule("causal"),),
        "full": (Rule("full"),),
        "window": (Rule("sliding_window", (length // 4, 0)),),
        "documents": (Rule("documents", ((0, length // 3, length // 2, length - 3), True)),),
    }
    dtypes = [torch.float16, torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]
    limit = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
    # Fewer head_dims for the rarer dtypes: compiling is most of the time here.
    head_dims = {torch.bfloat16: [40, 64, 128, 256], torch.float16: [64, 128], torch.float32: [64]}
    pair = [] if smoke else [TritonBackend(deterministic=True)]  # its backward is another kernel
    backends = [BACKENDS["triton"], *pair, *libraries(smoke)]
    for dtype in dtypes:
        for head_dim in [32] if smoke else head_dims[dtype]:
            for name in list(rules)[: 2 if smoke else None]:
                for steps, softcap in ((1, 0.0), (3, 0.0), *([(1, 5.0)] if head_dim in (32, 128) else [])):
                    q, dout = (normal(2, length, 4, head_dim, dtype=dtype) for _ in range(2))
                    k, v = (normal(2, length, 2, head_dim, dtype=dtype) for _ in range(2))
                    score = Score(head_dim**-0.5, softcap)
                    visible = visible_pairs(rules[name], length).to(DEVICE)
                    dense = dense_gradients(q, k, v, visible, dout, softmax_scale=score.softmax_scale, softcap=softcap)
                    for backend in backends:
                        if backend.unsupported(q, k, score, lse_gradient=False) is not None:
                            continue
                        errors, failure = dict[str, float](), ""
                        try:
                            found = run_steps(backend, q, k, v, dout, combined_mask(rules[name]), steps, score)
                            for which, x in zip(("out", "dq", "dk", "dv"), found, strict=True):
                                errors[which] = float((x.double() - dense[which]).norm() / dense[which].norm())
                        except Exception as error:  # of one backend: the others are measured all the same
                            failure = f"{type(error).__name__}: {str(error)[:200]}"
                        row = {
                            "backend": backend.name + (" deterministic" if backend in pair else ""),
                            "dtype": _name(dtype),
                            "head_dim": head_dim,
                            "mask": name,
                            "steps": steps,
                            "softcap": softcap,
                            "errors": errors,
                            "failure": failure,
                            "passed": not failure and all(error < limit[dtype] for error in errors.values()),
                        }
                        report.checks.append(row)
                        if not row["passed"]:
                            print(f"WRONG: {row}", flush=True)
    failed = sum(not row["passed"] for row in report.checks)
    print(f"checks: {len(report.checks) - failed} passed, {failed} failed", flush=True)


def interleaved(thunks: dict[str, Thunk], rounds: int) -> dict[str, float]:
    """Median milliseconds of each. Every round runs all of them, so that clocks and heat affect all alike."""
    times: dict[str, list[float]] = {name: [] for name in thunks}
    for attempt in range(rounds + 2):
        for name, thunk in thunks.items():
            if DEVICE.type == "cuda":
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                thunk()
                stop.record()
                stop.synchronize()
                elapsed = start.elapsed_time(stop)
            else:
                began = time.perf_counter()
                thunk()
                elapsed = (time.perf_counter() - began) * 1e3
            if attempt >= 2:
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


@dataclass
class Case:
    """One attention call of these kernels, forward and backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: Mask

    def __post_init__(self) -> None:
        positions = torch.arange(self.q.shape[1])
        self.intervals = key_intervals(self.mask, positions, positions)
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
        backend.backward(*inputs, *self.gradients, new_dq=True, new_dkv=True)

    def peers(self) -> Iterator[tuple[str, Callable[[], Tensor], list[Tensor]]]:
        """Other implementations: name, forward, the tensors to differentiate by."""
        q, k, v = inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (self.q, self.k, self.v)]
        causal, grouped = self.mask is not FULL, q.shape[1] != k.shape[1]

        def sdpa(backend: SDPBackend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        yield "cudnn", partial(sdpa, SDPBackend.CUDNN_ATTENTION), inputs
        yield "flash", partial(sdpa, SDPBackend.FLASH_ATTENTION), inputs
        if q.shape[2] != 16384:
            return  # torch.compile takes long for every new shape
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        length = q.shape[2]
        block_mask = None
        if causal:
            block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=str(DEVICE))
        yield "flex", partial(compiled, q, k, v, block_mask=block_mask, enable_gqa=grouped), inputs


@dataclass
class Ring:
    """What one rank of a ring computes for a case, step by step, without the communication."""

    case: Case
    ranks: int
    rank: int

    def __post_init__(self) -> None:
        own = shard_positions(self.case.q.shape[1], self.ranks, self.rank, "zigzag")
        at = own.to(DEVICE)
        self.q, self.dout, self.out = self.case.q[:, at], self.case.dout[:, at], self.case.out[:, at]
        self.lse = self.case.lse[:, :, at].contiguous()
        self.steps: list[tuple[Tensor, Tensor, KeyIntervals]] = []
        for step in range(self.ranks):
            keys = shard_positions(self.case.k.shape[1], self.ranks, (self.rank - step) % self.ranks, "zigzag")
            at = keys.to(DEVICE)
            self.steps.append((self.case.k[:, at], self.case.v[:, at], key_intervals(self.case.mask, own, keys)))

    def forward(self) -> None:
        carry = None
        for step, (k, v, intervals) in enumerate(self.steps):
            last = step == self.ranks - 1
            carry = attention_forward(self.q, k, v, intervals, self.case.score, carry=carry, last=last)

    def backward(self) -> None:
        row_delta = delta(self.out, self.dout)
        dq = torch.zeros_like(self.q, dtype=torch.float32)
        for k, v, intervals in self.steps:
            dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
            attention_backward(self.dout, self.q, k, v, self.lse, row_delta, intervals, self.case.score, dq, dk, dv)


def random_case(batch: int, length: int, heads: int, kv_heads: int, head_dim: int, mask: Mask) -> Case:
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    q, dout = (normal(batch, length, heads, head_dim, dtype=dtype) for _ in range(2))
    k, v = (normal(batch, length, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    return Case(q, k, v, dout, mask)


def measure_speed(report: Report, smoke: bool) -> None:
    """TFLOP/s forward and backward: 4 (10) x pairs x head_dim x heads, as in the FlashAttention papers."""
    shapes = [(64, 2, 1)] if smoke else [(128, 16, 16), (128, 32, 8), (64, 32, 32)]
    for length in [64] if smoke else [16384, 4096, 65536, 2048, 8192, 32768]:
        for head_dim, heads, kv_heads in shapes:
            for mask in (CAUSAL, FULL):
                causal = mask is CAUSAL
                label = f"{length} tokens, head_dim {head_dim}, heads {heads}/{kv_heads}, causal={causal}"
                if (length == 65536 and not causal) or not report.in_time(label):
                    continue
                batch = 1 if smoke else max(1, 16384 // length)
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
                for name, run, inputs in () if smoke else case.peers():
                    try:
                        result = run()
                        torch.autograd.grad(result, inputs, grad, retain_graph=True)
                    except Exception as error:  # a peer that cannot do this shape here
                        report.skipped.append(f"{name}, {label}: {str(error).splitlines()[0][:120]}")
                        continue
                    go[name] = run
                    back[name] = partial(torch.autograd.grad, result, inputs, grad, retain_graph=True)
                pairs = length * (length + 1) // 2 if causal else length * length
                flops = pairs * head_dim * heads * batch
                row: dict[str, Any] = {"tokens": length, "batch": batch, "head_dim": head_dim, "heads": heads,
                                       "kv_heads": kv_heads, "causal": causal}  # fmt: skip
                for direction, thunks, factor in (("forward", go, 4), ("backward", back, 10)):
                    with torch.no_grad() if direction == "forward" else contextlib.nullcontext():
                        times = interleaved(thunks, 1 if smoke else 12 if length <= 16384 else 5)
                    row[direction] = {name: factor * flops / ms / 1e9 for name, ms in times.items()}
                report.speed.append(row)
                print(label, {d: {n: round(x) for n, x in row[d].items()} for d in ("forward", "backward")}, flush=True)


def measure_ring(report: Report, smoke: bool) -> None:
    """One rank's steps of a zigzag ring, one after another on one GPU, beside full attention / ranks."""
    ranks, heads, kv_heads, head_dim = (2, 2, 1, 32) if smoke else (8, 32, 8, 128)
    for length in [64] if smoke else [65536, 131072]:
        if not report.in_time(f"ring of {length} tokens"):
            continue
        case = random_case(1, length, heads, kv_heads, head_dim, CAUSAL)
        work: dict[str, Case | Ring] = {"full": case}
        work |= {f"rank {r}": Ring(case, ranks, r) for r in sorted({0, ranks // 2, ranks - 1})}
        row: dict[str, Any] = {"tokens": length, "ranks": ranks, "heads": heads, "kv_heads": kv_heads}
        for direction in ("forward", "backward"):
            thunks: dict[str, Thunk] = {name: getattr(x, direction) for name, x in work.items()}
            times = interleaved(thunks, 1 if smoke else 5)
            full = times.pop("full")
            share = {name: full / ranks / ms for name, ms in times.items()}
            row[direction] = {"full_ms": full, "rank_ms": times, "share_of_ideal": share}
        report.ring.append(row)
        print("ring", length, {d: row[d]["share_of_ideal"] for d in ("forward", "backward")}, flush=True)


def measure_carry(report: Report, smoke: bool) -> None:
    """The same queries and keys without a carry, with one going in, one coming out, and both."""
    for length in [64] if smoke else [8192, 16384]:
        if not report.in_time(f"carry at {length} tokens"):
            continue
        case = random_case(1, length, *((2, 1, 32) if smoke else (32, 8, 128)), FULL)
        carry = case.forward(last=False)
        thunks: dict[str, Thunk] = {
            "none": case.forward,
            "out": partial(case.forward, last=False),
            "in and out": partial(case.forward, last=False, carry=carry),
            "in, last": partial(case.forward, carry=carry),
        }
        times = interleaved(thunks, 1 if smoke else 20)
        cost = {name: ms / times["none"] - 1 for name, ms in times.items()}
        report.carry.append({"tokens": length, "ms": times, "cost": cost})
        print("carry", length, {name: f"{100 * c:.1f} %" for name, c in cost.items()}, flush=True)


def measure_elementwise(report: Report, smoke: bool) -> None:
    """Kernels that only move bytes, beside PyTorch's operators, in GB/s of the bytes that must move."""
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
    least = {"rotary": 4, "merge": 10, "delta": 4, "copy": 4}  # bytes per element that must move
    times = interleaved(thunks, 1 if smoke else 50)
    report.elementwise += [
        {"kernel": n, "ms": ms, "gb_per_s": least[n.split(",")[0]] * x.numel() / ms / 1e6} for n, ms in times.items()
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def environment() -> dict[str, Any]:
    import triton

    gpu = torch.cuda.get_device_name() if DEVICE.type == "cuda" else None
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version(),
            "cudnn": torch.backends.cudnn.version() if gpu else None, "interpreted": INTERPRETED}  # fmt: skip


def markdown(report: Report) -> str:
    """The figures as tables.

    Goals on an H200 at head_dim 128, causal, 16k tokens and more: forward at least 0.75 and backward at least 0.65 of
    cuDNN's speed; a carry costs less than 3 %.
    """
    env = report.environment
    failed = [row for row in report.checks if not row["passed"]]
    lines = [f"# {env['gpu']}", "", f"torch {env['torch']}, triton {env['triton']}, cuDNN {env['cudnn']}.", "",
             f"Checks against float64: {len(report.checks) - len(failed)} passed, {len(failed)} failed.",
             ""]  # fmt: skip
    names = list(dict.fromkeys(name for row in report.speed for name in row["forward"]))
    for direction in ("forward", "backward"):
        lines += [f"## TFLOP/s {direction}, bfloat16", "",
                  "| tokens | batch | head_dim | heads | mask | " + " | ".join(names) + " | of cuDNN |",
                  "|" + " --- |" * (len(names) + 6)]  # fmt: skip
        for row in sorted(report.speed, key=lambda r: (r["head_dim"], r["heads"] != r["kv_heads"], r["tokens"])):
            found = row[direction]
            cells = [f"{found[n]:.0f}" if n in found else "" for n in names]
            share = f"{found['seqpar'] / found['cudnn']:.2f}" if "cudnn" in found else ""
            lines.append(
                f"| {row['tokens']} | {row['batch']} | {row['head_dim']} | {row['heads']}/{row['kv_heads']} | "
                f"{'causal' if row['causal'] else 'full'} | {' | '.join(cells)} | {share} |"
            )
        lines.append("")
    lines += [
        "## Zigzag ring, one rank's steps one after another on one GPU, no communication",
        "",
        "| tokens | ranks | direction | full / ranks, ms | rank | ms | share of ideal |",
        "|" + " --- |" * 7,
    ]
    for row in report.ring:
        for direction in ("forward", "backward"):
            for rank, ms in row[direction]["rank_ms"].items():
                ideal, share = row[direction]["full_ms"] / row["ranks"], row[direction]["share_of_ideal"][rank]
                lines.append(f"| {row['tokens']} | {row['ranks']} | {direction} | {ideal:.2f} | {rank} | {ms:.2f} | "
                             f"{share:.3f} |")  # fmt: skip
    lines += ["", "## Cost of the carry", "", "| tokens | out | in and out | in, last |", "| --- | --- | --- | --- |"]
    for row in report.carry:
        cost = [f"{100 * row['cost'][n]:.1f} %" for n in ("out", "in and out", "in, last")]
        lines.append(f"| {row['tokens']} | {' | '.join(cost)} |")
    lines += ["", "## Kernels that move bytes", "", "| kernel | ms | GB/s |", "| --- | --- | --- |"]
    lines += [f"| {row['kernel']} | {row['ms']:.3f} | {row['gb_per_s']:.0f} |" for row in report.elementwise]
    if report.skipped:
        lines += ["", "## Left out", "", *(f"* {what}" for what in report.skipped)]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, nothing written: does it run?")
    parser.add_argument("--seconds", type=float, default=420.0, help="start no measurement after this long")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON and Markdown")
    arguments = parser.parse_args(argv)
    if DEVICE.type != "cuda" and not (arguments.smoke and INTERPRETED):
        parser.error("no GPU here; without one only TRITON_INTERPRET=1 python benchmarks/gpu.py --smoke runs")
    report = Report(time.monotonic() + arguments.seconds, environment())
    check(report, arguments.smoke)
    for measure in (measure_carry, measure_ring, measure_elementwise, measure_speed):
        measure(report, arguments.smoke)
    text = markdown(report)
    if arguments.smoke:
        print("smoke: every part ran; interpreted figures mean nothing and are not kept")
    else:
        arguments.out.mkdir(parents=True, exist_ok=True)
        stem = "gpu-" + str(report.environment["gpu"]).lower().replace(" ", "-")
        facts = {name: value for name, value in vars(report).items() if name != "deadline"}
        (arguments.out / f"{stem}.json").write_text(json.dumps(facts, indent=1))
        (arguments.out / f"{stem}.md").write_text(text)
        print(text)
    return 0 if all(row["passed"] for row in report.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
