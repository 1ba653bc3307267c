"""The Triton kernels on one GPU: right first, then fast. One command, under 8 minutes:

    python benchmarks/gpu.py                 # checks, then measures; writes benchmarks/results/gpu-<name>.json and .md
    TRITON_INTERPRET=1 python benchmarks/gpu.py --smoke      # the same code on tiny shapes without a GPU, no figures

Measured side by side in one run, interleaved, medians: these kernels, ``scaled_dot_product_attention`` with the cuDNN
and the flash backend, and FlexAttention. Then what a ring costs: the hops of each rank of an 8-way zigzag ring one
after another on this one GPU (no communication) against an eighth of the whole causal attention, and the carry against
the same work without one.
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

from seqpar.layout import shard_positions
from seqpar.mask import Mask
from seqpar.triton_kernels import backward, delta, forward, merge_, rotary, rotary_from_tables

RESULTS = Path(__file__).parent / "results"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")
Thunk = Callable[[], object]
CAUSAL, FULL = Mask.causal(), Mask.full()


@dataclass
class Report:
    """What came out, and until when to go on."""

    deadline: float
    environment: dict[str, Any]
    checks: list[dict[str, Any]] = field(default_factory=list)
    speed: list[dict[str, Any]] = field(default_factory=list)
    ring: list[dict[str, Any]] = field(default_factory=list)
    carry: list[dict[str, Any]] = field(default_factory=list)
    small: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def in_time(self, what: str) -> bool:
        if time.monotonic() < self.deadline:
            return True
        self.skipped.append(what)
        return False


def intervals(mask: Mask, queries: Tensor, keys: Tensor) -> dict[str, Tensor]:
    """The rows' arguments for queries and keys at these global positions."""
    lo, hi = (torch.searchsorted(keys, x.reshape(-1, len(queries)).contiguous()).int() for x in mask.intervals(queries))
    rows = {"lo": lo, "hi": torch.maximum(lo, hi), "q_positions": queries.int(), "k_positions": keys.int()}
    return {name: x.to(DEVICE) for name, x in rows.items()}


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


# --------------------------------------------------------------------------------------------------- checks


def dense(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, scale: float, softcap: float) -> list[Tensor]:
    """out, dq, dk, dv in float64."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    s = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, 2)) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~mask.dense(q.shape[1]).to(DEVICE), -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1).nan_to_num(0), v.repeat_interleave(group, 2))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def run_hops(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, hops: int, **score: float) -> list[Tensor]:
    """out, dq, dk, dv by the kernels, the keys coming in ``hops`` hops."""
    positions = torch.arange(q.shape[1])
    parts = [torch.arange(h, k.shape[1], hops) for h in range(hops)]
    carry = None
    for h, keys in enumerate(parts):
        at = keys.to(DEVICE)
        rows = intervals(mask, positions, keys)
        carry = forward(q, k[:, at], v[:, at], **rows, carry=carry, last=h == hops - 1, **score)
    assert carry is not None
    out, lse = carry
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    row_delta = delta(out, dout)
    for keys in parts:
        at = keys.to(DEVICE)
        some = [torch.zeros_like(x[:, at], dtype=torch.float32) for x in (k, v)]
        rows = intervals(mask, positions, keys)
        backward(dout, q, k[:, at], v[:, at], lse, row_delta, **rows, dq=dq, dk=some[0], dv=some[1], **score)
        dk[:, at] += some[0]
        dv[:, at] += some[1]
    return [out, dq, dk, dv]


def check(report: Report, smoke: bool) -> None:
    """Every kernel against float64 on fresh random inputs: relative error by norm."""
    length = 40 if smoke else 513
    masks = {"causal": Mask.causal(), "full": Mask.full(), "window": Mask.sliding_window(length // 4, 0),
             "documents": Mask.documents([0, length // 3, length // 2, length - 3])}  # fmt: skip
    dtypes = [torch.float16, torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]
    limit = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
    # Fewer head_dims for the rarer dtypes: compiling is most of the time here.
    head_dims = {torch.bfloat16: [40, 64, 128, 256], torch.float16: [64, 128], torch.float32: [64]}
    for dtype in dtypes:
        for head_dim in [32] if smoke else head_dims[dtype]:
            for name, mask in list(masks.items())[: 2 if smoke else None]:
                for hops, softcap in ((1, 0.0), (3, 0.0), *([(1, 5.0)] if head_dim in (32, 128) else [])):
                    q, dout = (normal(2, length, 4, head_dim, dtype=dtype) for _ in range(2))
                    k, v = (normal(2, length, 2, head_dim, dtype=dtype) for _ in range(2))
                    scale = head_dim**-0.5
                    found = run_hops(q, k, v, dout, mask, hops, softmax_scale=scale, softcap=softcap)
                    expected = dense(q, k, v, dout, mask, scale, softcap)
                    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
                    row = {"dtype": _name(dtype), "head_dim": head_dim, "mask": name, "hops": hops, "softcap": softcap,
                           "errors": dict(zip(("out", "dq", "dk", "dv"), errors, strict=True)),
                           "passed": all(e < limit[dtype] for e in errors)}  # fmt: skip
                    report.checks.append(row)
                    if not row["passed"]:
                        print(f"WRONG: {row}", flush=True)
    failed = sum(not row["passed"] for row in report.checks)
    print(f"checks: {len(report.checks) - failed} passed, {failed} failed", flush=True)


# --------------------------------------------------------------------------------------------------- timing


def interleaved(thunks: dict[str, Thunk], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, one round after another so that clocks and heat fall on all alike."""
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
        everything = torch.arange(self.q.shape[1])
        self.rows: dict[str, Any] = intervals(self.mask, everything, everything)
        self.scale = self.q.shape[3] ** -0.5
        self.out, self.lse = self.forward()
        self.gradients = [torch.zeros_like(x, dtype=torch.float32) for x in (self.q, self.k, self.v)]

    def forward(self, **how: Any) -> tuple[Tensor, Tensor]:
        return forward(self.q, self.k, self.v, **self.rows, softmax_scale=self.scale, **how)

    def backward(self) -> None:
        inputs = (self.dout, self.q, self.k, self.v, self.lse, delta(self.out, self.dout))
        dq, dk, dv = self.gradients
        backward(*inputs, **self.rows, dq=dq, dk=dk, dv=dv, softmax_scale=self.scale)

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
            return  # torch.compile takes its time for every shape
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        length = q.shape[2]
        block_mask = None
        if causal:
            block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=str(DEVICE))
        yield "flex", partial(compiled, q, k, v, block_mask=block_mask, enable_gqa=grouped), inputs


@dataclass
class Ring:
    """What one rank of a ring computes for a case, hop by hop, without the communication."""

    case: Case
    ranks: int
    rank: int

    def __post_init__(self) -> None:
        own = shard_positions(self.case.q.shape[1], self.ranks, self.rank, "zigzag")
        at = own.to(DEVICE)
        self.q, self.dout, self.out = self.case.q[:, at], self.case.dout[:, at], self.case.out[:, at]
        self.lse = self.case.lse[:, :, at].contiguous()
        self.hops: list[tuple[Tensor, Tensor, dict[str, Any]]] = []
        for h in range(self.ranks):
            keys = shard_positions(self.case.k.shape[1], self.ranks, (self.rank - h) % self.ranks, "zigzag")
            at = keys.to(DEVICE)
            self.hops.append((self.case.k[:, at], self.case.v[:, at], intervals(self.case.mask, own, keys)))

    def forward(self) -> None:
        carry = None
        for h, (k, v, rows) in enumerate(self.hops):
            last = h == self.ranks - 1
            carry = forward(self.q, k, v, **rows, carry=carry, last=last, softmax_scale=self.case.scale)

    def backward(self) -> None:
        row_delta = delta(self.out, self.dout)
        dq = torch.zeros_like(self.q, dtype=torch.float32)
        for k, v, rows in self.hops:
            dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
            inputs = (self.dout, self.q, k, v, self.lse, row_delta)
            backward(*inputs, **rows, dq=dq, dk=dk, dv=dv, softmax_scale=self.case.scale)


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
    """Per-rank compute of a zigzag ring, emulated: one rank's hops in turn on one GPU, against whole / ranks."""
    ranks, heads, kv_heads, head_dim = (2, 2, 1, 32) if smoke else (8, 32, 8, 128)
    for length in [64] if smoke else [65536, 131072]:
        if not report.in_time(f"ring of {length} tokens"):
            continue
        case = random_case(1, length, heads, kv_heads, head_dim, CAUSAL)
        work: dict[str, Case | Ring] = {"whole": case}
        work |= {f"rank {r}": Ring(case, ranks, r) for r in sorted({0, ranks // 2, ranks - 1})}
        row: dict[str, Any] = {"tokens": length, "ranks": ranks, "heads": heads, "kv_heads": kv_heads}
        for direction in ("forward", "backward"):
            thunks: dict[str, Thunk] = {name: getattr(x, direction) for name, x in work.items()}
            times = interleaved(thunks, 1 if smoke else 5)
            whole = times.pop("whole")
            share = {name: whole / ranks / ms for name, ms in times.items()}
            row[direction] = {"whole_ms": whole, "rank_ms": times, "share_of_ideal": share}
        report.ring.append(row)
        print("ring", length, {d: row[d]["share_of_ideal"] for d in ("forward", "backward")}, flush=True)


def measure_carry(report: Report, smoke: bool) -> None:
    """The same queries and keys with a carry in, a float32 carry out, and neither."""
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


def measure_small(report: Report, smoke: bool) -> None:
    """Kernels that only move bytes, and what PyTorch's operators take, in GB/s of the bytes that must move."""
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
        share = torch.sigmoid(lse - lse).transpose(1, 2).unsqueeze(-1)
        acc.lerp_(x.float(), share)
        torch.logaddexp(lse, lse)

    thunks: dict[str, Thunk] = {
        "rotary": partial(rotary, x, positions, frequencies),
        "rotary, tables": partial(rotary_from_tables, x, cos, sin),
        "rotary, PyTorch": rotary_in_pytorch,
        "merge": partial(merge_, acc, lse, x, lse.clone()),
        "merge, PyTorch": merge_in_pytorch,
        "delta": partial(delta, x, x),
        "delta, PyTorch": lambda: (x.float() * x.float()).sum(-1).transpose(1, 2).contiguous(),
        "copy": x.clone,
    }
    least = {"rotary": 4, "merge": 10, "delta": 4, "copy": 4}  # bytes by element that must move
    times = interleaved(thunks, 1 if smoke else 50)
    report.small += [
        {"kernel": n, "ms": ms, "gb_per_s": least[n.split(",")[0]] * x.numel() / ms / 1e6} for n, ms in times.items()
    ]


# --------------------------------------------------------------------------------------------------- report


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def environment() -> dict[str, Any]:
    import triton

    gpu = torch.cuda.get_device_name() if DEVICE.type == "cuda" else None
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version(),
            "cudnn": torch.backends.cudnn.version() if gpu else None, "interpreted": INTERPRETED}  # fmt: skip


def markdown(report: Report) -> str:
    """The figures as tables. Goals, on an H200 at head_dim 128, causal, 16k tokens and more: forward at least 0.75 and
    backward 0.65 of cuDNN; a carry costs less than 3 %."""
    env = report.environment
    failed = [row for row in report.checks if not row["passed"]]
    lines = [f"# {env['gpu']}", "", f"torch {env['torch']}, triton {env['triton']}, cuDNN {env['cudnn']}.", "",
             f"Checks against float64: {len(report.checks) - len(failed)} passed, {len(failed)} failed.",
             ""]  # fmt: skip
    names = ["seqpar", "cudnn", "flash", "flex"]
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
        "## Zigzag ring, one rank's hops in turn on one GPU, no communication",
        "",
        "| tokens | ranks | direction | whole / ranks, ms | rank | ms | share of ideal |",
        "|" + " --- |" * 7,
    ]
    for row in report.ring:
        for direction in ("forward", "backward"):
            for rank, ms in row[direction]["rank_ms"].items():
                ideal, share = row[direction]["whole_ms"] / row["ranks"], row[direction]["share_of_ideal"][rank]
                lines.append(f"| {row['tokens']} | {row['ranks']} | {direction} | {ideal:.2f} | {rank} | {ms:.2f} | "
                             f"{share:.3f} |")  # fmt: skip
    lines += ["", "## Cost of the carry", "", "| tokens | out | in and out | in, last |", "| --- | --- | --- | --- |"]
    for row in report.carry:
        cost = [f"{100 * row['cost'][n]:.1f} %" for n in ("out", "in and out", "in, last")]
        lines.append(f"| {row['tokens']} | {' | '.join(cost)} |")
    lines += ["", "## Kernels that move bytes", "", "| kernel | ms | GB/s |", "| --- | --- | --- |"]
    lines += [f"| {row['kernel']} | {row['ms']:.3f} | {row['gb_per_s']:.0f} |" for row in report.small]
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
    for measure in (measure_carry, measure_ring, measure_small, measure_speed):
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
