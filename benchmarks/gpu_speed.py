"""The measurements of ``gpu.py``. They are medians of interleaved rounds, in each of which every call runs once.

The GPU's time does not include the host's time: an idle kernel keeps the GPU busy while the host launches the kernels
that are measured. The host's time, and the time of the first call with its compilation, are reported separately. A
GPU's clock falls during a training step, so some calls are also measured back to back for half a second.

Shapes: b batch, q queries, k keys, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_checks import DEVICE, INTERPRETED, LIMIT, backend_of, calls_by_backend, key_intervals, normal, synchronize
from gpu_report import Rows
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import seqpar
from seqpar.kernels import BackendChoice
from seqpar.kernels.base import Backend, Carry, Grads, OutputGrad, Score, row_delta
from seqpar.masks.mask import Mask
from seqpar.placement.layout import shard_positions, split_range
from seqpar.schedule.rows import KeyIntervals
from seqpar.triton_kernels import apply_rotary, attention_backward, attention_forward, delta, merge_
from seqpar.triton_kernels.configs import parse_cell, table_config

Thunk = Callable[[], object]
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16


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
    unmeasured = 1 if DEVICE.type == "cuda" else 0
    for attempt in range(unmeasured + rounds):
        for name, thunk in thunks.items():
            timing = timed(name, thunk)
            if attempt >= unmeasured:
                times[name].append(timing)
    return {
        name: Timing(
            statistics.median(x.ms for x in timings),
            statistics.median(x.host_us for x in timings),
            all(x.queued for x in timings),
        )
        for name, timings in times.items()
    }


def sustained_ms(thunk: Thunk, ms: float) -> float:
    """The milliseconds of one call among calls back to back for half a second, if a single one takes ``ms``."""
    if DEVICE.type != "cuda":
        return ms
    calls = max(2, min(2000, int(500 / ms)))
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (start, stop):
        for _ in range(calls):  # before the first event the clock falls, between the two the time is taken
            thunk()
        event.record()
    stop.synchronize()
    return start.elapsed_time(stop) / calls


def working(rows: Rows, thunks: dict[str, Thunk]) -> tuple[dict[str, Thunk], dict[str, float]]:
    """The thunks whose first call works, and the seconds of the first calls."""
    seconds = {name: rows.first_call(name, thunk) for name, thunk in thunks.items()}
    known = {name: s for name, s in seconds.items() if s is not None}
    return {name: thunks[name] for name in known}, known


@dataclass
class Work:
    """Attention of some queries over the keys of one or more steps, called as the package calls its backends."""

    q: Tensor
    dout: Tensor
    steps: list[tuple[Tensor, Tensor, KeyIntervals]]
    out: Tensor
    lse: Tensor

    @property
    def score(self) -> Score:
        return Score(self.q.shape[3] ** -0.5)

    def forward(self, backend: Backend) -> Carry | None:
        carry = None
        for step, (k, v, intervals) in enumerate(self.steps):
            last = step == len(self.steps) - 1
            carry = backend.forward(self.q, k, v, intervals, self.score, carry, last)
        return carry

    def backward(self, backend: Backend) -> list[Tensor]:
        """dq, and dk and dv of the last step."""
        row_sums = row_delta(self.out, self.dout, None) if backend.reads_delta else None
        output = OutputGrad(self.dout, self.out, self.lse, row_sums)
        dq = torch.empty_like(self.q, dtype=torch.float32)
        for step, (k, v, intervals) in enumerate(self.steps):
            dk, dv = (torch.empty_like(x, dtype=torch.float32) for x in (k, v))
            grads = Grads(dq, dk, dv, new_dq=step == 0, new_dkv=True)
            backend.backward(self.q, k, v, output, intervals, self.score, grads)
        return [dq, dk, dv]

    def of_rank(self, strategy: str, ranks: int, rank: int, mask: Mask) -> Work:
        """The part of one rank: "ring" and "all-gather" in the zigzag layout, or "ulysses"."""
        ((k, v, intervals),) = self.steps
        if strategy == "ulysses":
            heads, kv_heads = (split_range(x.shape[2], ranks, rank) for x in (self.q, k))
            q, dout, out = (x[:, :, heads.start : heads.stop].contiguous() for x in (self.q, self.dout, self.out))
            k, v = (x[:, :, kv_heads.start : kv_heads.stop].contiguous() for x in (k, v))
            return Work(q, dout, [(k, v, intervals)], out, self.lse[:, heads.start : heads.stop].contiguous())
        length = self.q.shape[1]
        by_rank = [shard_positions(length, ranks, (rank - i) % ranks, "zigzag") for i in range(ranks)]
        own = by_rank[0]
        if strategy == "all-gather":
            by_rank = [own, torch.cat(by_rank[1:]).sort().values]
        at = own.to(DEVICE)
        steps = [(k[:, x.to(DEVICE)], v[:, x.to(DEVICE)], key_intervals(mask, own, x)) for x in by_rank]
        return Work(self.q[:, at], self.dout[:, at], steps, self.out[:, at], self.lse[:, :, at].contiguous())


def random_work(
    rows: Rows,
    backends: list[str],
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mask: Mask,
    keys: int | None = None,
) -> Work:
    """Attention of ``length`` queries, and as many keys unless ``keys`` says how many.

    ``out`` and ``lse`` are from the first of the backends whose forward works.
    """
    q, dout = (normal(batch, length, heads, head_dim, dtype=DTYPE) for _ in range(2))
    k, v = (normal(batch, keys or length, kv_heads, head_dim, dtype=DTYPE) for _ in range(2))
    intervals = key_intervals(mask, torch.arange(length), torch.arange(keys or length))
    work = Work(q, dout, [(k, v, intervals)], q, q)
    for name in backends:
        result = rows.attempt(f"out and lse of {name}", partial(work.forward, backend_of(name)))
        if result is not None:
            return replace(work, out=result[0], lse=result[1])
    raise RuntimeError("no backend computes out and lse")


def supporting(rows: Rows, backends: list[str], work: Work, label: str) -> dict[str, Backend]:
    """The backends that support a call, by name. For the others a row says why not."""
    found = {}
    for name in backends:
        backend = backend_of(name)
        if (why := backend.unsupported(work.q, work.steps[0][0], work.score, lse_gradient=False)) is None:
            found[name] = backend
        else:
            rows.add("skipped", f"{name}, {label}", why=why)
    return found


Call = tuple[Callable[[], Tensor], list[Tensor]]  # a forward that autograd records, and its inputs


def calls(work: Work, causal: bool) -> dict[str, Call]:
    """``seqpar.attention`` as users call it, on the backend that "auto" selects, and PyTorch's own kernels."""
    keys, values, _ = work.steps[0]
    inputs = [x.detach().requires_grad_() for x in (work.q, keys, values)]
    first = [x.transpose(1, 2).detach().requires_grad_() for x in (work.q, keys, values)]  # heads first

    def attention() -> Tensor:
        mask = Mask.causal() if causal else Mask.full()
        return seqpar.attention(*inputs, mask=mask, strategy="local").transpose(1, 2)

    def sdpa(backend: SDPBackend) -> Tensor:
        q, k, v = first
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    found: dict[str, Call] = {"attention()": (attention, inputs)}
    if DEVICE.type == "cuda":
        found["SDPA cudnn"] = partial(sdpa, SDPBackend.CUDNN_ATTENTION), first
        found["SDPA flash"] = partial(sdpa, SDPBackend.FLASH_ATTENTION), first
    return found


def flex(work: Work, causal: bool) -> dict[str, Call]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    keys, values, _ = work.steps[0]
    q, k, v = inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (work.q, keys, values)]
    length, compiled = work.q.shape[1], torch.compile(flex_attention, dynamic=False)
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=str(DEVICE))
    return {"FlexAttention": (partial(compiled, q, k, v, block_mask=mask), inputs)}


def check_agreement(rows: Rows, label: str, results: dict[str, Any]) -> None:
    """Compare the results of each call, a tensor or a list of tensors, with the first call's results, by norm."""
    first: list[Tensor] = []
    for name, result in results.items():
        found = [x for x in (result if isinstance(result, list | tuple) else [result]) if x.dim() == 4]
        first = first or found
        # PyTorch's own kernels have the heads before the tokens.
        found = [x if x.shape == y.shape else x.transpose(1, 2) for x, y in zip(found, first, strict=True)]
        errors = {
            str(i): float((x.float() - y.float()).norm() / y.float().norm())
            for i, (x, y) in enumerate(zip(found, first, strict=True))
        }
        passed = all(error < LIMIT[DTYPE] for error in errors.values())
        rows.add("check", f"{name}, beside the first, {label}", errors=errors, ran={}, passed=passed)


def measure_ceiling(rows: Rows, smoke: bool) -> None:
    """What the GPU can do: a large matrix product and a copy, single and back to back, with its clock and power."""
    size = 64 if smoke else 8192
    x, y = (normal(size, size, dtype=DTYPE) for _ in range(2))
    out = torch.empty_like(x)
    thunks: dict[str, Thunk] = {"matrix product": lambda: torch.mm(x, y, out=out), "copy": lambda: out.copy_(x)}
    amount = {"matrix product": (2 * size**3 / 1e9, "TFLOP/s"), "copy": (2 * x.nbytes / 1e6, "GB/s")}
    times = interleaved(working(rows, thunks)[0], 1 if smoke else 20)
    for name, t in times.items():
        steady, (work, unit) = sustained_ms(thunks[name], t.ms), amount[name]
        for how, ms in (("single", t.ms), ("back to back", steady)):
            rows.add("ceiling", f"{name}, {how}", figure=work / ms, unit=unit, gpu=gpu_state())


def gpu_state() -> str:
    """The clock of the SMs, its limit, the power, its limit and the temperature now."""
    command = shutil.which("nvidia-smi")
    if command is None or DEVICE.type != "cuda":
        return ""
    query = "--query-gpu=clocks.sm,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    done = subprocess.run([command, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20)
    return done.stdout.strip().split("\n")[0]


def measure_speed(
    rows: Rows,
    smoke: bool,
    backends: list[str],
    length: int,
    head_dim: int,
    heads: int,
    kv_heads: int,
    causal: bool,
    sustain: bool,
    others: Callable[[Work], dict[str, Call]] | None = None,
) -> None:
    """TFLOP/s forward and backward: 4 (10) x pairs x head_dim x heads, as in the FlashAttention papers."""
    mask, batch = Mask.causal() if causal else Mask.full(), 1 if smoke else max(1, 16384 // length)
    label = f"{length} tokens, head_dim {head_dim}, heads {heads}/{kv_heads}, causal={causal}"
    work = random_work(rows, backends, batch, length, heads, kv_heads, head_dim, mask)
    ((k, _, _),) = work.steps
    go: dict[str, Thunk] = {}
    back: dict[str, Thunk] = {}
    found = supporting(rows, backends, work, label)
    for name, backend in found.items():
        if name != "hopper":  # whose backward is triton's
            back[name] = partial(work.backward, backend)
        if name != "triton deterministic":  # whose forward is the same
            go[name] = partial(work.forward, backend)
    grad = work.dout.transpose(1, 2)
    for name, (run, inputs) in (others(work) if others else calls(work, causal)).items():
        if (result := rows.attempt(f"{name}, recorded", run)) is not None:
            go[name], back[name] = run, partial(torch.autograd.grad, result, inputs, grad, retain_graph=True)
    pairs = length * (length + 1) // 2 if causal else length * length
    flops = pairs * head_dim * heads * batch
    row: dict[str, Any] = {
        "tokens": length, "batch": batch, "head_dim": head_dim, "heads": heads, "kv_heads": kv_heads, "causal": causal,
        "auto": BackendChoice("auto", work.q).backend(work.q, k, work.score).name,
    }  # fmt: skip
    for direction, thunks, factor in (("forward", go, 4), ("backward", back, 10)):
        with torch.no_grad() if direction == "forward" else contextlib.nullcontext():
            named = {f"{direction} of {name}": thunk for name, thunk in thunks.items()}
            ready, first_s = working(rows, named)
            check_agreement(rows, label, {name: thunk() for name, thunk in ready.items()})
            rounds = 1 if smoke else 12 if length <= 16384 else 5
            times = rows.attempt(f"rounds of {direction}", partial(interleaved, ready, rounds)) or {}
            steady = {n: sustained_ms(ready[n], t.ms) for n, t in times.items()} if sustain else {}
        short = len(direction) + 4
        row[direction] = {n[short:]: factor * flops / t.ms / 1e9 for n, t in times.items()}
        row[f"{direction}_ran"] = {
            name: calls_by_backend(found[name], 1, thunks[name]) for name in found if f"{direction} of {name}" in times
        }
        row[f"{direction}_sustained"] = {n[short:]: factor * flops / ms / 1e9 for n, ms in steady.items()}
        row[f"{direction}_host_us"] = {n[short:]: t.host_us for n, t in times.items()}
        row[f"{direction}_first_s"] = {n[short:]: s for n, s in first_s.items()}
        row[f"{direction}_not_queued"] = [n[short:] for n, t in times.items() if not t.queued]
    rows.add("speed", label, **row)


def measure_flex(rows: Rows, smoke: bool, causal: bool) -> None:
    """FlexAttention beside the Triton kernels."""
    shape = 16384, 128, 16, 16, causal, False
    measure_speed(rows, smoke, ["triton"], *shape, others=partial(flex, causal=causal))


def measure_hops(rows: Rows, smoke: bool, backends: list[str], strategy: str, length: int, head_dim: int) -> None:
    """The time of one rank's computation, compared with the full attention divided by the ranks, with every backend."""
    ranks, rank, mask = 2 if smoke else 8, 1, Mask.causal()
    heads, kv_heads = (2, 2) if smoke else (16, 8) if head_dim == 256 else (32, 8)
    full = random_work(rows, backends, 1, length, heads, kv_heads, head_dim, mask)
    part = full.of_rank(strategy, ranks, rank, mask)
    label = f"{strategy} at {length} tokens, head_dim {head_dim}"
    found = supporting(rows, backends, part, label)
    row: dict[str, Any] = {"strategy": strategy, "tokens": length, "ranks": ranks, "rank": rank, "heads": heads,
                           "kv_heads": kv_heads, "head_dim": head_dim, "ran": {}}  # fmt: skip
    for direction in ("forward", "backward"):
        thunks: dict[str, Thunk] = {}
        for name, backend in found.items():
            thunks[f"{direction} of {name}"] = partial(getattr(part, direction), backend)
            thunks[f"full {direction} of {name}"] = partial(getattr(full, direction), backend)
        ready, first_s = working(rows, thunks)
        times = rows.attempt(f"rounds of {direction}", partial(interleaved, ready, 1 if smoke else 5)) or {}
        of_rank = {name: times[key] for name in found if (key := f"{direction} of {name}") in times}
        whole = [t.ms for name, t in times.items() if name.startswith("full ")]
        for name in of_rank:
            run = thunks[f"{direction} of {name}"]
            row["ran"].setdefault(name, calls_by_backend(found[name], len(part.steps), run))
        row[direction] = {
            "ideal_ms": min(whole, default=float("nan")) / ranks,
            "full_ms": {name: t.ms for name, t in times.items() if name.startswith("full ")},
            "rank_ms": {name: t.ms for name, t in of_rank.items()},
            "sustained_ms": {n: sustained_ms(thunks[f"{direction} of {n}"], t.ms) for n, t in of_rank.items()},
            "rank_host_us": {name: t.host_us for name, t in of_rank.items()},
            "first_s": first_s,
        }
    rows.add("hops", label, **row)


def measure_carry(rows: Rows, smoke: bool, queries: int, keys: int, name: str = "triton") -> None:
    """The same queries and keys without a carry, with a carry as input, with a carry as output, and with both.

    Half the queries and all keys, or all queries and half the keys, are the steps of a causal zigzag ring.
    """
    heads, kv_heads, head_dim = (2, 1, 32) if smoke else (32, 8, 128)
    work = random_work(rows, [name], 1, queries, heads, kv_heads, head_dim, Mask.full(), keys)
    ((k, v, intervals),) = work.steps

    def forward(carry: tuple[Tensor, Tensor] | None = None, last: bool = True) -> tuple[Tensor, Tensor]:
        return backend_of(name).forward(work.q, k, v, intervals, work.score, carry, last)

    carry = forward(last=False)
    thunks: dict[str, Thunk] = {
        "none": forward,
        "out": partial(forward, last=False),
        "in and out": partial(forward, last=False, carry=carry),
        "in, last": partial(forward, carry=carry),
    }
    ready, first_s = working(rows, thunks)
    times = {name: t.ms for name, t in interleaved(ready, 1 if smoke else 20).items()}
    cost = {name: ms / times["none"] - 1 for name, ms in times.items()}
    what = f"carry of {name}, {queries} queries, {keys} keys"
    rows.add("carry", what, backend=name, queries=queries, keys=keys, ms=times, cost=cost, first_s=first_s)


# Tiles beside the table's that compile without spills: some leave room for two programs on a processor, which overlap
# each other, and others have a deeper pipeline.
_TILES = {
    ("forward", 128): ("128x64w8s3t", "128x64w8s2t", "64x64w4s3t", "64x64w4s2t", "64x128w4s2t"),
    ("backward", 128): ("64x128w8s3t", "64x64w4s2t", "64x64w4s1t", "64x64w8s2t"),
    ("forward", 64): ("64x64w4s3t", "64x128w4s2t", "64x128w4s3t", "128x64w4s4t", "128x128w8s2t"),
    ("backward", 64): ("64x128w8s2t", "64x128w8s3t", "64x64w4s2t", "64x64w4s1t", "128x128w8s1t"),
    ("dkdv", 128): ("64x64w4s2t", "64x64w4s1t"),
    ("dq", 128): ("64x64w4s2t", "64x64w4s1t"),
    ("forward", 256): ("64x32w4s2t", "128x32w8s3t"),
}


def measure_tiles(rows: Rows, smoke: bool, kernel: str, head_dim: int) -> None:
    """TFLOP/s of a Triton kernel with different tiles, the table's first. "dkdv" and "dq" are timed together."""
    length, heads = (64, 1) if smoke else (16384, 16)
    work = random_work(rows, ["triton"], 1, length, heads, heads, head_dim, Mask.causal())
    ((k, v, intervals),) = work.steps
    first = table_config("sm_90", kernel, head_dim, DTYPE)
    assert first is not None
    first = replace(first, tma=not INTERPRETED)
    configs = {"the table's": first, **({} if smoke else {cell: parse_cell(cell) for cell in _TILES[kernel, head_dim]})}
    row_sums, thunks = delta(work.out, work.dout), dict[str, Thunk]()
    for name, config in configs.items():
        if kernel == "forward":
            thunks[name] = partial(attention_forward, work.q, k, v, intervals, work.score, config=config)
            continue
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (work.q, k, v)]
        inputs = work.dout, work.q, k, v, work.lse, row_sums, intervals, work.score, *grads
        options: dict[str, Any] = {
            "dq_config" if kernel == "dq" else "config": config,
            "deterministic": kernel != "backward",
        }
        thunks[name] = partial(attention_backward, *inputs, new_dkv=True, **options)
    ready, first_s = working(rows, thunks)
    times = rows.attempt("rounds", partial(interleaved, ready, 1 if smoke else 12)) or {}
    synchronize()
    flops = length * (length + 1) // 2 * head_dim * heads * (4 if kernel == "forward" else 10)
    rates = {name: flops / t.ms / 1e9 for name, t in times.items()}
    what = f"tiles of {kernel}, head_dim {head_dim}"
    rows.add("tiles", what, kernel=kernel, head_dim=head_dim, rates=rates, first_s=first_s)


def measure_elementwise(rows: Rows, smoke: bool) -> None:
    """Kernels that only move bytes, compared with PyTorch's operators, in GB/s of the bytes that must be moved."""
    length, heads, head_dim = (64, 2, 32) if smoke else (32768, 32, 128)
    x = normal(1, length, heads, head_dim, dtype=DTYPE)
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
    for name, t in interleaved(working(rows, thunks)[0], 1 if smoke else 50).items():
        moved = least[name.split(",")[0]] * x.numel()
        rows.add("elementwise", name, ms=t.ms, host_us=t.host_us, gb_per_s=moved / t.ms / 1e6)
