"""Optional autotuning, with ``SEQPAR_TRITON_AUTOTUNE=1``. Without it nothing here runs or reads from disk.

The first call of each shape class times every candidate on scratch outputs. The fastest is kept in memory and in
``triton_tuning.json`` of ``$SEQPAR_CACHE_DIR`` (default ``~/.cache/seqpar``). Two lengths are in the same class if they
have the same number of bits.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from .configs import Config, candidates
from .launch import Launch

_best: dict[str, Config] = {}


def wanted(x: Tensor) -> bool:
    """Whether to tune calls with ``x``: the environment asks for it, and ``x`` is on a GPU."""
    return os.environ.get("SEQPAR_TRITON_AUTOTUNE", "0") == "1" and x.is_cuda


def cache_file() -> Path:
    """The file that keeps results between processes."""
    folder = os.environ.get("SEQPAR_CACHE_DIR") or str(Path.home() / ".cache" / "seqpar")
    return Path(folder) / "triton_tuning.json"


def tuned(
    kernel: str,
    q: Tensor,
    k: Tensor,
    flags: str,
    make: Callable[[Config], Launch],
    time: Callable[[Launch], float] | None = None,
) -> Config:
    """The fastest configuration for a call like this one.

    Args:
        kernel: "forward", "dkdv" or "dq".
        q: queries of the call; device, dtype and shape count.
        k: keys of the call; the shape counts.
        flags: the features in use, which change the kernel.
        make: returns the launch with a configuration, on outputs that may be overwritten any number of times.
        time: returns the milliseconds that a launch takes; None measures on the GPU.

    Raises:
        RuntimeError: no candidate runs.
    """
    key = _key(kernel, q, k, flags)
    allowed = candidates(kernel, q.device, q.shape[-1], q.dtype)
    if not _best:
        _best.update(_load())
    # A file may come from another version or be damaged. A tile that is not a candidate can read past its inputs.
    if _best.get(key) not in allowed:
        times: dict[Config, float] = {}
        for config in allowed:
            try:
                times[config] = (time or _milliseconds)(make(config))
            except (OutOfResources, CompilationError):
                continue  # does not fit this GPU or this version of Triton
        if not times:
            raise RuntimeError(f"no configuration of {kernel} runs for {key}; unset SEQPAR_TRITON_AUTOTUNE")
        _best[key] = min(times, key=lambda config: times[config])
        _save()
    return _best[key]


def _milliseconds(launch: Launch) -> float:
    return float(triton.testing.do_bench(launch, warmup=10, rep=50, return_mode="median"))


def _key(kernel: str, q: Tensor, k: Tensor, flags: str) -> str:
    device = torch.cuda.get_device_name(q.device) if q.is_cuda else str(q.device)
    lengths = f"q2^{q.shape[1].bit_length()} k2^{k.shape[1].bit_length()}"
    heads = f"{q.shape[0] * q.shape[2]}/{q.shape[2] // k.shape[2]}"
    return f"{device} triton{triton.__version__} {kernel} {q.dtype} d{q.shape[-1]} h{heads} {lengths} {flags}".strip()


def _load() -> dict[str, Config]:
    try:
        stored: dict[str, dict[str, Any]] = json.loads(cache_file().read_text())
        return {key: Config(**fields) for key, fields in stored.items()}
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError):  # RuntimeError: no home directory
        return {}  # no cache, or one that cannot be read: tune again


def _save() -> None:
    # Other processes tune too, on other hosts with the same home: keep their results, and replace the file at once so
    # that none reads half of it. Containers on two hosts may share host name and process number.
    merged = {**_load(), **_best}
    # A full or read-only disk must not stop one rank's kernel while the other ranks wait for it.
    with contextlib.suppress(OSError, RuntimeError):
        path = cache_file()
        scratch = path.with_suffix(f".{uuid.uuid4().hex}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            scratch.write_text(json.dumps({key: asdict(config) for key, config in merged.items()}, indent=1))
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)  # what a full disk left
