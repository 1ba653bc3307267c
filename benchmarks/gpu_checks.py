"""The checks of ``gpu.py``: every backend on one GPU against the float64 reference of the tests.

A backend is named as in ``seqpar.attention``; "triton deterministic" has other kernels in its backward.

Shapes: b batch, q queries, k keys, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_report import Rows
from torch import Tensor

import seqpar
from seqpar.kernels import BACKENDS, ONLY_BY_NAME
from seqpar.kernels.base import Backend, Grads, OutputGrad, Score, row_delta
from seqpar.kernels.library import LibraryBackend
from seqpar.kernels.triton import TritonBackend
from seqpar.masks.mask import Mask
from seqpar.schedule.rows import KeyIntervals
from seqpar.strategies.gemm import add_weight_gradient, matmul_float32
from tests.reference import Rule, Rules, combined_mask, dense_gradients, visible_pairs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")
BATCH, HEADS, KV_HEADS = (1, 2, 1) if INTERPRETED else (2, 4, 2)
LIMIT = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}  # largest relative error by norm


def describe(rows: Rows, smoke: bool) -> None:
    """The GPU, the versions, and the backends that can run: "triton" and libraries, in the interpreter "reference".

    Beside them the backends that "auto" does not take."""
    if DEVICE.type != "cuda" and not smoke:
        raise RuntimeError("no GPU here; without one only python benchmarks/gpu.py --smoke runs")
    if (why := BACKENDS["triton"].unavailable()) is not None:
        raise RuntimeError(f"triton: {why}")
    import triton

    gpu = torch.cuda.get_device_name() if DEVICE.type == "cuda" else None
    able = [name for name, backend in BACKENDS.items() if backend.unavailable() is None]
    found = [name for name in able if isinstance(BACKENDS[name], LibraryBackend) and name not in ONLY_BY_NAME]
    rows.add(
        "environment", "environment", gpu=gpu, torch=torch.__version__, triton=triton.__version__,
        python=platform.python_version(), cudnn=torch.backends.cudnn.version() if gpu else None,
        backends=["triton", "reference"] if smoke else ["triton", *found],
        only_by_name=[] if smoke else [name for name in able if name in ONLY_BY_NAME],
        unavailable={} if smoke else {n: b.unavailable() for n, b in BACKENDS.items() if b.unavailable()},
    )  # fmt: skip


def backend_of(name: str) -> Backend:
    return TritonBackend(deterministic=True) if name == "triton deterministic" else BACKENDS[name]


def calls_by_backend(backend: Backend, calls: int, run: Callable[[], object]) -> dict[str, int]:
    """Run ``run``, which calls ``backend`` ``calls`` times. Returns how many calls each backend really computed."""
    with seqpar.trace() as traced:
        run()
    fallbacks = Counter(traced.backends)
    return dict(Counter({backend.name: calls - sum(fallbacks.values())}) + fallbacks)  # without zeros


def key_intervals(mask: Mask, queries: Tensor, keys: Tensor) -> KeyIntervals:
    """Which keys each query sees, for queries and keys at these global positions."""
    lo, hi = (torch.searchsorted(keys, x.reshape(-1, len(queries)).contiguous()).int() for x in mask.intervals(queries))
    return KeyIntervals(lo, torch.maximum(lo, hi), queries.int(), keys.int()).to(DEVICE)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


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
    output = OutputGrad(dout, out, lse, row_delta(out, dout, None) if backend.reads_delta else None)
    for step, keys in enumerate(parts):
        at, intervals = keys.to(DEVICE), key_intervals(mask, positions, keys)
        step_k, step_v = take(k, at), take(v, at)
        grads = [torch.full(x.shape, torch.nan, dtype=torch.float32, device=DEVICE) for x in (step_k, step_v)]
        targets = Grads(dq, grads[0], grads[1], new_dq=step == 0, new_dkv=True)
        backend.backward(q, step_k, step_v, output, intervals, score, targets)
        dk[:, at], dv[:, at] = grads
    return [out, dq, dk, dv]


def poison() -> None:
    """Fill free memory with NaNs, so that a kernel that reads uninitialised memory returns NaNs."""
    if DEVICE.type != "cuda":
        return
    torch.cuda.empty_cache()
    large = torch.full((1 << 26,), torch.nan, device=DEVICE)
    # PyTorch allocates small tensors in a separate pool.
    small = [torch.full((1 << 17,), torch.nan, device=DEVICE) for _ in range(64)]
    del large, small


def add_check(
    rows: Rows, what: str, backend: Backend, calls: int, dtype: torch.dtype, run: Callable[[], dict[str, float]]
) -> None:
    """Add a row with the errors that ``run`` returns, and the backends that computed its ``calls`` calls."""
    errors = dict[str, float]()

    def collect() -> dict[str, int]:
        poison()
        return calls_by_backend(backend, calls, lambda: errors.update(run()))

    if (ran := rows.attempt(what, collect)) is not None:
        rows.add("check", what, errors=errors, ran=ran, passed=all(error < LIMIT[dtype] for error in errors.values()))


def supports(rows: Rows, what: str, backend: Backend, q: Tensor, k: Tensor, score: Score) -> bool:
    """Whether the backend supports a call. If it does not, a row says why."""
    if what in rows.skip:
        return False
    why = backend.unsupported(q, k, score, lse_gradient=False)
    if why is not None:
        rows.add("skipped", what, why=why)
    return why is None


def errors_of(results: Sequence[Tensor], dense: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors by norm. NaN counts as an error: it is not below any limit."""
    pairs = zip(("out", "dq", "dk", "dv"), results, strict=False)  # of a forward, out alone
    return {name: float((x.double() - dense[name]).norm() / dense[name].norm()) for name, x in pairs}


def check_contact(
    rows: Rows,
    smoke: bool,
    kernel: str,
    name: str,
    dtype_name: str,
    head_dim: int,
    batch: int,
    heads: int,
    kv_heads: int,
) -> None:
    """One kernel by itself, causal: "forward", "carry" (three steps), or "backward" from the reference's out and lse.

    Its tensors are laid out as in the measurements, which therefore need not compile it again.
    """
    backend, dtype, length = backend_of(name), getattr(torch, dtype_name), 64 if smoke else 2048
    q, dout = (normal(batch, length, heads, head_dim, dtype=dtype) for _ in range(2))
    k, v = (normal(batch, length, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    score, mask, positions = Score(head_dim**-0.5), Mask.causal(), torch.arange(length)
    what = f"{kernel} of {name}, {dtype_name}, head_dim {head_dim}, heads {heads}/{kv_heads}"
    if not supports(rows, what, backend, q, k, score):
        return
    dense = dense_gradients(q, k, v, visible_pairs((Rule("causal"),), length).to(DEVICE), dout,
                            softmax_scale=score.softmax_scale)  # fmt: skip
    steps = positions.tensor_split(1 if kernel == "forward" else 4)

    def run() -> dict[str, float]:
        if kernel != "backward":
            carry = None
            for keys in steps:
                at, seen, last = keys.to(DEVICE), key_intervals(mask, positions, keys), keys is steps[-1]
                carry = backend.forward(q, k[:, at], v[:, at], seen, score, carry, last)
            assert carry is not None
            return errors_of([carry[0]], dense)
        out = dense["out"].to(dtype)
        row_sums = row_delta(out, dout, None) if backend.reads_delta else None
        output = OutputGrad(dout, out, dense["lse"].float().contiguous(), row_sums)
        dq, dk, dv = (torch.full(x.shape, torch.nan, dtype=torch.float32, device=DEVICE) for x in (q, k, v))
        for keys in steps:
            at_step = slice(int(keys[0]), int(keys[-1]) + 1)
            step_k, step_v, step_dk, step_dv = (x[:, at_step] for x in (k, v, dk, dv))
            targets = Grads(dq, step_dk, step_dv, new_dq=keys is steps[0], new_dkv=True)
            backend.backward(q, step_k, step_v, output, key_intervals(mask, positions, keys), score, targets)
        return errors_of([out, dq, dk, dv], dense)

    add_check(rows, what, backend, len(steps), dtype, run)


def check_values(rows: Rows, smoke: bool, name: str, dtype_name: str, head_dim: int) -> None:
    """A backend under several masks, in one step and in three, on fresh random inputs."""
    backend, dtype, length = backend_of(name), getattr(torch, dtype_name), 40 if smoke else 513
    rules: dict[str, Rules] = {
        "causal": (Rule("causal"),),
        "full": (Rule("full"),),
        "window": (Rule("sliding_window", (length // 4, 0)),),
        "documents": (Rule("documents", ((0, length // 3, length // 2, length - 3), True)),),
    }
    for of_mask in list(rules)[: 1 if smoke and name == "triton" else None]:
        visible, mask = visible_pairs(rules[of_mask], length).to(DEVICE), combined_mask(rules[of_mask])
        for steps, softcap in ((1, 0.0), (3, 0.0), *([(1, 5.0)] if head_dim in (32, 128) else [])):
            q, dout = (normal(BATCH, length, HEADS, head_dim, dtype=dtype) for _ in range(2))
            k, v = (normal(BATCH, length, KV_HEADS, head_dim, dtype=dtype) for _ in range(2))
            score = Score(head_dim**-0.5, softcap)
            what = f"{name}, {dtype_name}, head_dim {head_dim}, {of_mask}, {steps} steps, softcap {softcap}"
            if supports(rows, what, backend, q, k, score):
                options = {"softmax_scale": score.softmax_scale, "softcap": softcap}
                dense = dense_gradients(q, k, v, visible, dout, **options)
                add_check(rows, what, backend, 2 * steps, dtype,
                          lambda: errors_of(run_steps(backend, q, k, v, dout, mask, steps, score), dense))  # fmt: skip


def check_strides(rows: Rows, smoke: bool, name: str) -> None:
    """Keys and values that are parts of a larger tensor full of NaNs: strided, and from an odd row on."""
    backend = backend_of(name)
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
    for of_keys, (k, v) in views.items():
        for x in (k, v):
            x.copy_(normal(*x.shape, dtype=dtype))
        what = f"{name}, keys {of_keys}"
        if supports(rows, what, backend, q, k, score):
            dense = dense_gradients(q, k.clone(), v.clone(), visible, dout, softmax_scale=score.softmax_scale)
            add_check(rows, what, backend, 2, dtype,
                      lambda: errors_of(run_steps(backend, q, k, v, dout, mask, 1, score), dense))  # fmt: skip


def check_large(rows: Rows, smoke: bool, name: str) -> None:
    """Tensors of more than 2^31 elements. Under a window, the last rows depend on the last rows only."""
    backend, what = backend_of(name), f"{name}, more than 2^31 elements"
    heads, head_dim, window = (2, 32, 8) if smoke else (64, 128, 128)
    length = 64 if smoke else 2**31 // (heads * head_dim) + 512
    dtype = torch.float32 if smoke else torch.bfloat16
    # Bytes of an element: inputs and output in bfloat16, and five float32 tensors. A library also returns gradients in
    # bfloat16, and flash accumulates dq in float32.
    per_element = 5 * 2 + 5 * 4 + (3 * 2 + 4 if isinstance(backend, LibraryBackend) else 0)
    needed = 0 if smoke else length * heads * head_dim * per_element
    if not smoke and needed > (free := torch.cuda.mem_get_info()[0]):
        rows.add("skipped", what, why=f"{needed >> 30} GiB of GPU memory, and {free >> 30} are free")
        return
    mask, score = Mask.sliding_window(window, 0), Score(head_dim**-0.5)
    few = [normal(1, 2 * window, heads, head_dim, dtype=dtype) for _ in range(4)]
    if not supports(rows, what, backend, few[0], few[1], score):
        return
    ran = calls_by_backend(backend, 2, lambda: run_steps(backend, few[0], few[1], few[2], few[3], mask, 1, score))
    if backend.name not in ran:
        rows.add("skipped", what, why=f"computed by {', '.join(ran)}, which has a row of its own")
        return
    q, k, v, dout = (torch.empty(1, length, heads, head_dim, device=DEVICE, dtype=dtype).normal_() for _ in range(4))
    late = slice(length - 2 * window, length)  # the queries of these rows see keys of the last 3 windows only
    near = slice(length - 3 * window - 1, length)
    visible = visible_pairs((Rule("sliding_window", (window, 0)),), near.stop - near.start).to(DEVICE)

    def run() -> dict[str, float]:
        results = run_steps(backend, q, k, v, dout, mask, 1, score)
        errors: dict[str, float] = {}
        for head in sorted({0, heads - 1}):
            near_q, near_k, near_v, near_dout = (x[:, near, head : head + 1] for x in (q, k, v, dout))
            dense = dense_gradients(near_q, near_k, near_v, visible, near_dout, softmax_scale=score.softmax_scale)
            dense = {key: x[:, -2 * window :] for key, x in dense.items() if key in ("out", "dq", "dk", "dv")}
            last = [x[:, late, head : head + 1] for x in results]
            for key, error in errors_of(last, dense).items():
                errors[key] = max(errors.get(key, 0.0), error)
        return errors

    add_check(rows, what, backend, 2, dtype, run)


def check_streams(rows: Rows, smoke: bool, name: str) -> None:
    """Two calls on two streams at once, several times. They must not use the same scratch memory at the same time."""
    backend, what, times = backend_of(name), f"{name}, two streams", 1 if smoke else 4
    length, head_dim, dtype = (40, 32, torch.float32) if smoke else (1025, 128, torch.bfloat16)
    score, mask = Score(head_dim**-0.5), combined_mask((Rule("causal"),))
    visible = visible_pairs((Rule("causal"),), length).to(DEVICE)

    def random() -> Tensor:
        return normal(BATCH, length, HEADS, head_dim, dtype=dtype)

    inputs = [(random(), random(), random(), random()) for _ in range(2)]
    dense = [dense_gradients(q, k, v, visible, x, softmax_scale=score.softmax_scale) for q, k, v, x in inputs]
    streams = [torch.cuda.Stream() if DEVICE.type == "cuda" else None for _ in inputs]

    def run() -> dict[str, float]:
        results: list[tuple[int, list[Tensor]]] = []
        synchronize()
        for _ in range(times):
            for i, stream in enumerate(streams):
                with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                    q, k, v, dout = inputs[i]
                    results.append((i, run_steps(backend, q, k, v, dout, mask, 1, score)))
        synchronize()
        errors = [errors_of(grads, dense[i]) for i, grads in results]
        return {key: max(x[key] for x in errors) for key in errors[0]}

    if supports(rows, what, backend, inputs[0][0], inputs[0][1], score):
        add_check(rows, what, backend, 4 * times, dtype, run)


def check_graph(rows: Rows, smoke: bool, name: str) -> None:
    """``seqpar.attention`` on one rank, captured in a CUDA graph and replayed with other values. On a CPU twice."""
    backend, what = backend_of(name), f"{name}, CUDA graph"
    length, head_dim, dtype = (40, 32, torch.float32) if smoke else (1025, 128, torch.bfloat16)
    mask, score = seqpar.Mask.causal(), Score(head_dim**-0.5)
    visible = visible_pairs((Rule("causal"),), length).to(DEVICE)
    q, dout = (normal(BATCH, length, HEADS, head_dim, dtype=dtype) for _ in range(2))
    k, v = (normal(BATCH, length, KV_HEADS, head_dim, dtype=dtype) for _ in range(2))
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def step() -> list[Tensor]:
        out = seqpar.attention(
            *inputs, mask=mask, strategy="local", backend=backend.name, deterministic=name == "triton deterministic"
        )
        return [out, *torch.autograd.grad(out, inputs, dout)]

    def run() -> dict[str, float]:
        if DEVICE.type == "cuda":
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()
            with torch.cuda.graph(graph, stream=stream):
                results = step()
        else:
            step()
        with torch.no_grad():
            for x in (*inputs, dout):
                x.copy_(normal(*x.shape, dtype=dtype))
        if DEVICE.type == "cuda":
            graph.replay()
            synchronize()
        else:
            results = step()
        dense = dense_gradients(q.detach(), k.detach(), v.detach(), visible, dout, softmax_scale=score.softmax_scale)
        return errors_of([x.detach() for x in results], dense)

    if supports(rows, what, backend, q, k, score):
        add_check(rows, what, backend, 4, dtype, run)


def check_ranks(rows: Rows, smoke: bool, only: str) -> None:
    """The checks of ``cluster_smoke.py`` whose names contain ``only``, with ranks that share this GPU."""
    script, ranks = Path(__file__).with_name("cluster_smoke.py"), 2 if smoke else 4
    with tempfile.TemporaryDirectory() as folder:
        options = ["--out", folder, "--only", only, "--small", "--masks", "40", "--timeout", "15", "--deadline", "220"]
        command = [sys.executable, str(script), "--one-gpu", str(ranks), *options]
        subprocess.run([*command, "--device", DEVICE.type], check=False, timeout=235)
        report = Path(folder) / "cluster-smoke.json"
        if not report.exists():
            raise RuntimeError(f"{' '.join(command)}: no check has ended")
        for row in json.loads(report.read_text())["checks"]:
            what = f"{row['name']}, {ranks} ranks on one GPU: {row['what']} ({row['seconds']:.1f} s)"
            if row["ok"] is None:
                rows.add("skipped", what, why=row["what"])
            else:
                rows.add("ranks", what, passed=row["ok"], errors={})


def check_gemms(rows: Rows, smoke: bool) -> None:
    """The GEMMs of tp_sp that return float32, and add to it, from half precision. On a CPU, float32 ones."""
    what, (tokens, wide, narrow) = "GEMMs that return float32", (8, 6, 4) if smoke else (4096, 3072, 1024)
    dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16

    def run() -> dict[str, float]:
        x, weight, dout = (
            normal(*shape, dtype=dtype) for shape in ((2, tokens, narrow), (wide, narrow), (2, tokens, wide))
        )
        start = normal(wide, narrow, dtype=torch.float32)
        dweight = start.clone()
        add_weight_gradient(dweight, dout, x)
        exact = {
            "dx": dout.double() @ weight.double(),
            "dweight": start.double() + dout.double().flatten(0, 1).T @ x.double().flatten(0, 1),
        }
        found = {"dx": matmul_float32(dout, weight), "dweight": dweight}
        return {name: float((found[name].double() - y).norm() / y.norm()) for name, y in exact.items()}

    if (errors := rows.attempt(what, run)) is not None:
        passed = all(error < LIMIT[torch.float32] for error in errors.values())
        rows.add("check", what, errors=errors, ran={}, passed=passed)


def check_invariant(rows: Rows, smoke: bool) -> None:
    """``deterministic="invariant"``: the share of elements whose bits differ between one rank and several, replayed."""
    what, length = "the same bits on any number of ranks", 150 if smoke else 4099
    dtype = torch.float32 if smoke else torch.bfloat16
    where: list[dict[str, Any]] = [{"ranks": 2, "layout": "zigzag", "strategy": "ring"}]
    if not smoke:
        where += [{"ranks": 8, "layout": "striped", "strategy": "ulysses"}, {"ranks": 3, "layout": "contiguous"}]
    mask = seqpar.Mask.documents([0, length // 3, length])
    shapes = (HEADS, 64), (KV_HEADS, 64), (KV_HEADS, 64)
    inputs = [normal(BATCH, length, *shape, dtype=dtype).requires_grad_() for shape in shapes]
    dout = normal(BATCH, length, HEADS, 64, dtype=dtype)

    def results(attend: Any, **options: Any) -> list[Tensor]:
        out = attend(*inputs, mask=mask, backend="triton", deterministic="invariant", **options)
        return [out, *torch.autograd.grad(out, inputs, dout)]

    def run() -> dict[str, float]:
        alone = results(seqpar.attention, strategy="local")
        found = [results(seqpar.replay, **ranks) for ranks in where]
        differ = [[float((x != y).double().mean()) for x, y in zip(each, alone, strict=True)] for each in found]
        return {name: max(each[i] for each in differ) for i, name in enumerate(("out", "dq", "dk", "dv"))}

    if (errors := rows.attempt(what, run)) is not None:
        rows.add("check", what, errors=errors, ran={}, passed=not any(errors.values()))
    check_exact_products(rows, smoke)


def check_exact_products(rows: Rows, smoke: bool) -> None:
    """``invariant_layers``: the share of a linear layer's elements whose bits differ between this device and a CPU."""
    what = "the bits of a CPU in linear layers"
    tokens, width = (70, 24) if smoke else (1000, 1024)
    linear, x = torch.nn.Linear(width, width), normal(tokens, width, dtype=torch.float32).cpu()

    def results(device: Any) -> list[Tensor]:
        layer, rows_ = copy.deepcopy(linear).to(device), x.to(device).requires_grad_()
        with seqpar.invariant_layers(layer):
            out = layer(rows_)
            return [y.cpu() for y in (out, *torch.autograd.grad(out, (rows_, *layer.parameters()), out.detach()))]

    def run() -> dict[str, float]:
        pairs = zip(("out", "dx", "dweight", "dbias"), results(DEVICE), results("cpu"), strict=True)
        return {name: float((a != b).double().mean()) for name, a, b in pairs}

    if (errors := rows.attempt(what, run)) is not None:
        rows.add("check", what, errors=errors, ran={}, passed=not any(errors.values()))


def two_shapes(rows: Rows) -> None:
    """The calls that run under compute-sanitizer: forward and backward with lengths that no tile divides."""
    for length, head_dim in ((129, 64), (200, 128)):
        q, dout = (normal(1, length, 4, head_dim, dtype=torch.bfloat16) for _ in range(2))
        k, v = (normal(1, length, 2, head_dim, dtype=torch.bfloat16) for _ in range(2))
        run_steps(BACKENDS["triton"], q, k, v, dout, Mask.causal(), 2, Score(head_dim**-0.5))
    synchronize()
    rows.add("sanitizer", "two shapes under compute-sanitizer")


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
