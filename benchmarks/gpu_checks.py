"""The checks of ``gpu.py``: every backend on one GPU against the float64 reference of the tests.

Shapes: b batch, q queries, k keys, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_report import Report, dtype_name
from torch import Tensor

from seqpar.kernels import BACKENDS
from seqpar.kernels.base import Backend, Grads, OutputGrad, Score
from seqpar.kernels.library import LibraryBackend
from seqpar.kernels.triton import TritonBackend
from seqpar.mask import Mask
from seqpar.schedule.rows import KeyIntervals
from seqpar.triton_kernels import delta
from tests.reference import Rule, Rules, combined_mask, dense_gradients, visible_pairs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")
BATCH, HEADS, KV_HEADS = (1, 2, 1) if INTERPRETED else (2, 4, 2)


def key_intervals(mask: Mask, queries: Tensor, keys: Tensor) -> KeyIntervals:
    """Which keys each query sees, for queries and keys at these global positions."""
    lo, hi = (torch.searchsorted(keys, x.reshape(-1, len(queries)).contiguous()).int() for x in mask.intervals(queries))
    return KeyIntervals(lo, torch.maximum(lo, hi), queries.int(), keys.int()).to(DEVICE)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


def libraries(smoke: bool) -> list[Backend]:
    """The backends of libraries that can run here. Without a GPU, the reference backend takes their place."""
    if smoke:
        return [BACKENDS["reference"]]
    return [b for b in BACKENDS.values() if isinstance(b, LibraryBackend) and b.unavailable() is None]


def run_steps(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, steps: int, score: Score
) -> list[Tensor]:
    """out, dq, dk, dv of a backend, with the keys in ``steps`` steps. New gradient buffers are filled with NaNs."""
    positions = torch.arange(q.shape[1])

    def take(x: Tensor, at: Tensor) -> Tensor:
        return x if steps == 1 else x[:, at]  # in one step, x keeps its strides

    parts = [torch.arange(step, k.shape[1], steps) for step in range(steps)]
    if isinstance(backend, LibraryBackend):  # the kernels of libraries have no mask for every third key
        parts = list(torch.arange(k.shape[1]).tensor_split(steps))
    carry = None
    for step, keys in enumerate(parts):
        at, intervals = keys.to(DEVICE), key_intervals(mask, positions, keys)
        carry = backend.forward(q, take(k, at), take(v, at), intervals, score, carry, step == steps - 1)
    assert carry is not None
    out, lse = carry
    dq, dk, dv = (torch.full(x.shape, torch.nan, dtype=torch.float32, device=DEVICE) for x in (q, k, v))
    output = OutputGrad(dout, out, lse, delta(out, dout))
    for step, keys in enumerate(parts):
        at, intervals = keys.to(DEVICE), key_intervals(mask, positions, keys)
        step_k, step_v = take(k, at), take(v, at)
        grads = [torch.full(x.shape, torch.nan, dtype=torch.float32, device=DEVICE) for x in (step_k, step_v)]
        targets = Grads(dq, grads[0], grads[1], new_dq=step == 0, new_dkv=True)
        backend.backward(q, step_k, step_v, output, intervals, score, targets)
        dk[:, at], dv[:, at] = grads
    return [out, dq, dk, dv]


LIMIT = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}  # largest relative error by norm


def all_backends(smoke: bool) -> dict[str, Backend]:
    """The backends that are checked, by name."""
    backends: dict[str, Backend] = {"triton": BACKENDS["triton"]}
    if not smoke:
        backends["triton deterministic"] = TritonBackend(deterministic=True)  # with other kernels in backward
    return backends | {backend.name: backend for backend in libraries(smoke)}


def poison() -> None:
    """Fill free memory with NaNs, so that a kernel that reads uninitialised memory returns NaNs."""
    if DEVICE.type != "cuda":
        return
    torch.cuda.empty_cache()
    large = torch.full((1 << 26,), torch.nan, device=DEVICE)
    # PyTorch allocates small tensors in a separate pool.
    small = [torch.full((1 << 17,), torch.nan, device=DEVICE) for _ in range(64)]
    del large, small


def add_check(report: Report, what: dict[str, Any], run: Callable[[], dict[str, float]], dtype: torch.dtype) -> None:
    """Add a row with the errors that ``run`` returns."""
    errors, failure = dict[str, float](), ""
    try:
        errors = run()
    except torch.OutOfMemoryError:
        report.skipped.append(f"{what}: not enough GPU memory")
        return
    except Exception as error:  # one backend failed; the others are checked nevertheless
        failure = f"{type(error).__name__}: {str(error)[:200]}"
    passed = not failure and all(error < LIMIT[dtype] for error in errors.values())
    report.checks.append({**what, "dtype": dtype_name(dtype), "errors": errors, "failure": failure, "passed": passed})
    if not passed:
        print(f"WRONG: {report.checks[-1]}", flush=True)


def errors_of(results: Sequence[Tensor], dense: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors by norm. NaN counts as an error: it is not below any limit."""
    pairs = zip(("out", "dq", "dk", "dv"), results, strict=True)
    return {name: float((x.double() - dense[name]).norm() / dense[name].norm()) for name, x in pairs}


def check_values(report: Report, smoke: bool, dtype: torch.dtype, head_dim: int) -> None:
    """Every backend against float64 on fresh random inputs."""
    length = 40 if smoke else 513
    rules: dict[str, Rules] = {
        "causal": (Rule("causal"),),
        "full": (Rule("full"),),
        "window": (Rule("sliding_window", (length // 4, 0)),),
        "documents": (Rule("documents", ((0, length // 3, length // 2, length - 3), True)),),
    }
    for name in list(rules)[: 1 if smoke else None]:
        visible, mask = visible_pairs(rules[name], length).to(DEVICE), combined_mask(rules[name])
        for steps, softcap in ((1, 0.0), (3, 0.0), *([(1, 5.0)] if head_dim in (32, 128) else [])):
            q, dout = (normal(BATCH, length, HEADS, head_dim, dtype=dtype) for _ in range(2))
            k, v = (normal(BATCH, length, KV_HEADS, head_dim, dtype=dtype) for _ in range(2))
            score = Score(head_dim**-0.5, softcap)
            dense = dense_gradients(q, k, v, visible, dout, softmax_scale=score.softmax_scale, softcap=softcap)
            for label, backend in all_backends(smoke).items():
                if backend.unsupported(q, k, score, lse_gradient=False) is not None:
                    continue

                def run(backend: Backend = backend) -> dict[str, float]:
                    poison()
                    return errors_of(run_steps(backend, q, k, v, dout, mask, steps, score), dense)

                what = {"backend": label, "head_dim": head_dim, "mask": name, "steps": steps, "softcap": softcap}
                add_check(report, what, run, dtype)


def check_strides(report: Report, smoke: bool) -> None:
    """Keys and values that are parts of a larger tensor full of NaNs: strided, and from an odd row on."""
    length, head_dim, dtype = (40, 32, torch.float32) if smoke else (513, 128, torch.bfloat16)
    q, dout = (normal(BATCH, length, HEADS, head_dim, dtype=dtype) for _ in range(2))
    packed = torch.full((BATCH, length + 2, 3, KV_HEADS, head_dim), torch.nan, device=DEVICE, dtype=dtype)
    shifted = torch.full((BATCH, KV_HEADS, length + 2, head_dim + 8), torch.nan, device=DEVICE, dtype=dtype)
    aside = torch.full((BATCH, KV_HEADS, length + 2, head_dim + 8), torch.nan, device=DEVICE, dtype=dtype)
    views = {
        "strided": (packed[:, 1:-1, 0], packed[:, 1:-1, 2]),  # the tokens of k are 3 * KV_HEADS heads apart
        "heads first, offset": tuple(x[:, :, 1:-1, 8:].transpose(1, 2) for x in (shifted, aside)),
    }
    score, mask = Score(head_dim**-0.5), combined_mask((Rule("causal"),))
    visible = visible_pairs((Rule("causal"),), length).to(DEVICE)
    for name, (k, v) in views.items():
        for x in (k, v):
            x.copy_(normal(*x.shape, dtype=dtype))
        k_values, v_values = k.clone(), v.clone()
        dense = dense_gradients(q, k_values, v_values, visible, dout, softmax_scale=score.softmax_scale)
        for label, backend in all_backends(smoke).items():
            if backend.unsupported(q, k, score, lse_gradient=False) is not None:
                continue

            def run(backend: Backend = backend, k: Tensor = k, v: Tensor = v) -> dict[str, float]:
                poison()
                return errors_of(run_steps(backend, q, k, v, dout, mask, 1, score), dense)

            add_check(report, {"backend": label, "head_dim": head_dim, "mask": "causal", "keys": name}, run, dtype)


def check_large(report: Report, smoke: bool) -> None:
    """Tensors of more than 2^31 elements. Under a window, the last rows depend on the last rows only."""
    heads, head_dim, window = (2, 32, 8) if smoke else (64, 128, 128)
    length = 64 if smoke else 2**31 // (heads * head_dim) + 512
    dtype = torch.float32 if smoke else torch.bfloat16
    needed = 0 if smoke else length * heads * head_dim * (5 * 2 + 5 * 4)
    if not smoke and needed > (free := torch.cuda.mem_get_info()[0]):
        report.skipped.append(f"more than 2^31 elements: {needed >> 30} GiB of GPU memory, and {free >> 30} are free")
        return
    mask, score = Mask.sliding_window(window, 0), Score(head_dim**-0.5)
    q, k, v, dout = (torch.empty(1, length, heads, head_dim, device=DEVICE, dtype=dtype).normal_() for _ in range(4))
    rows = slice(length - 2 * window, length)  # the queries of these rows see keys of the last 3 windows only
    near = slice(length - 3 * window - 1, length)
    visible = visible_pairs((Rule("sliding_window", (window, 0)),), near.stop - near.start).to(DEVICE)
    for label, backend in all_backends(smoke).items():
        if backend.unsupported(q, k, score, lse_gradient=False) is not None:
            continue

        def run(backend: Backend = backend) -> dict[str, float]:
            results = run_steps(backend, q, k, v, dout, mask, 1, score)
            errors: dict[str, float] = {}
            for head in sorted({0, heads - 1}):
                near_q, near_k, near_v, near_dout = (x[:, near, head : head + 1] for x in (q, k, v, dout))
                dense = dense_gradients(near_q, near_k, near_v, visible, near_dout, softmax_scale=score.softmax_scale)
                dense = {name: x[:, -2 * window :] for name, x in dense.items() if name in ("out", "dq", "dk", "dv")}
                last = [x[:, rows, head : head + 1] for x in results]
                for name, error in errors_of(last, dense).items():
                    errors[name] = max(errors.get(name, 0.0), error)
            return errors

        what = {"backend": label, "head_dim": head_dim, "mask": "window", "elements": q.numel()}
        add_check(report, what, run, dtype)


def check_streams(report: Report, smoke: bool) -> None:
    """Two calls on two streams at once, several times. They must not use the same scratch memory at the same time."""
    length, head_dim, dtype = (40, 32, torch.float32) if smoke else (1025, 128, torch.bfloat16)
    score, mask = Score(head_dim**-0.5), combined_mask((Rule("causal"),))
    visible = visible_pairs((Rule("causal"),), length).to(DEVICE)

    def random() -> Tensor:
        return normal(BATCH, length, HEADS, head_dim, dtype=dtype)

    inputs = [(random(), random(), random(), random()) for _ in range(2)]
    dense = [dense_gradients(q, k, v, visible, x, softmax_scale=score.softmax_scale) for q, k, v, x in inputs]
    streams = [torch.cuda.Stream() if DEVICE.type == "cuda" else None for _ in inputs]
    for label, backend in all_backends(smoke).items():
        if backend.unsupported(inputs[0][0], inputs[0][1], score, lse_gradient=False) is not None:
            continue

        def run(backend: Backend = backend) -> dict[str, float]:
            results: list[tuple[int, list[Tensor]]] = []
            synchronize()
            for _ in range(1 if smoke else 4):
                for i, stream in enumerate(streams):
                    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                        q, k, v, dout = inputs[i]
                        results.append((i, run_steps(backend, q, k, v, dout, mask, 1, score)))
            synchronize()
            errors = [errors_of(grads, dense[i]) for i, grads in results]
            return {name: max(x[name] for x in errors) for name in errors[0]}

        add_check(report, {"backend": label, "head_dim": head_dim, "mask": "causal", "streams": 2}, run, dtype)


def check_memory_accesses(report: Report) -> None:
    """Two shapes under compute-sanitizer in a separate process, if compute-sanitizer is installed."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        report.skipped.append("compute-sanitizer: not installed")
        return
    command = [
        tool,
        "--tool",
        "memcheck",
        "--error-exitcode",
        "9",
        sys.executable,
        str(Path(__file__).with_name("gpu.py")),
        "--two-shapes",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    except subprocess.TimeoutExpired:
        report.skipped.append("compute-sanitizer: not done after 90 s")
        return
    failure = "" if done.returncode == 0 else (done.stdout + done.stderr)[-400:]
    report.checks.append({"backend": "triton", "tool": "compute-sanitizer memcheck", "errors": {}, "failure": failure,
                          "passed": not failure})  # fmt: skip
    if failure:
        print(f"WRONG: {report.checks[-1]}", flush=True)


def two_shapes() -> int:
    """The calls that run under compute-sanitizer: forward and backward with lengths that no tile divides."""
    for length, head_dim in ((129, 64), (200, 128)):
        dtype = torch.float16 if INTERPRETED else torch.bfloat16
        q, dout = (normal(1, length, 4, head_dim, dtype=dtype) for _ in range(2))
        k, v = (normal(1, length, 2, head_dim, dtype=dtype) for _ in range(2))
        mask = combined_mask((Rule("causal"),))
        run_steps(BACKENDS["triton"], q, k, v, dout, mask, 2, Score(head_dim**-0.5))
    synchronize()
    return 0


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
