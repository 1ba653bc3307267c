"""Optional autotuning, with ``SEQPAR_TRITON_AUTOTUNE=1``. Without it nothing here runs or reads from disk.

The first call of each class times every candidate on scratch outputs. The fastest is kept in memory and in
``triton_tuning.json`` of ``$SEQPAR_CACHE_DIR`` (default ``~/.cache/seqpar``). Two calls are in the same class if their
lengths have the same number of bits, their masks leave about the same share of the pairs, and everything else that
changes the kernel is the same.

All ranks of a job use the same tiles: the first rank that has measured a class publishes its choice in the store of
torch.distributed, and the others take it. No rank waits for another one, because another one may never make such a call.
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
import torch.distributed as dist
import triton
from torch import Tensor

from .configs import Config, candidates
from .launch import Launch
from .preprocess import remembered
from .tiles import IntervalsLike

_best: dict[str, Config] = {}


def wanted(x: Tensor) -> bool:
    """Whether to tune calls with ``x``: the environment asks for it, and ``x`` is on a GPU that records no CUDA graph."""
    if os.environ.get("SEQPAR_TRITON_AUTOTUNE", "").lower() not in ("1", "on", "yes", "true") or not x.is_cuda:
        return False
    return not torch.cuda.is_current_stream_capturing()


def mask_class(intervals: IntervalsLike) -> str:
    """How many of the keys the queries see, coarsely. Waits for the GPU once for each mask."""
    lo, hi = intervals.lo, intervals.hi
    k_len = max(len(intervals.k_positions), 1)
    share = remembered(
        lo, hi, ("share", k_len), lambda: ((hi - lo).sum(dtype=torch.float64) / (lo.numel() * k_len)).item()
    )
    return "full" if share > 0.95 else "half" if share > 0.25 else "sparse"


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
    *,
    v_head_dim: int | None = None,
    heavy: bool = False,
    tma: bool = True,
) -> Config:
    """The fastest configuration for a call like this one; the table's if none of the candidates runs.

    Args:
        kernel: "forward", "backward", "dkdv" or "dq".
        q: queries of the call; device, dtype and shape count.
        k: keys of the call; the shape counts.
        flags: what else changes the kernel or how long it takes: the features in use, and the mask's class.
        make: returns the launch with a configuration, on outputs that may be overwritten any number of times.
        time: returns the milliseconds that a launch takes; None measures on the GPU.
        v_head_dim, heavy, tma: of ``configs.choose``.
    """
    other_dim = f" v{v_head_dim}" if v_head_dim not in (None, q.shape[-1]) else ""
    key = _key(kernel, q, k, f"{flags} tma{tma}{other_dim}")
    allowed = candidates(kernel, q.device, q.shape[-1], q.dtype, v_head_dim=v_head_dim, heavy=heavy, tma=tma)
    if not _best:
        _best.update(_load())
    # A file may come from another version or be damaged. A tile that is not a candidate can read past its inputs.
    if _best.get(key) not in allowed:
        best = _published(key, None) or _fastest(allowed, make, time or _milliseconds)
        if best in allowed:
            _best[key] = best
            _save()
    # Also the choices of a file are published, because the ranks may have different files.
    agreed = _published(key, _best.get(key, allowed[0]))
    return agreed if agreed is not None and agreed in allowed else allowed[0]


def _fastest(allowed: list[Config], make: Callable[[Config], Launch], time: Callable[[Launch], float]) -> Config:
    times: dict[Config, float] = {}
    for config in allowed:
        try:
            times[config] = time(make(config))
        except torch.AcceleratorError:
            raise  # the GPU is in a state that no other candidate can leave
        except Exception:
            continue  # does not fit this GPU or this version of Triton, whose errors have no base class in common
    return min(times, key=lambda config: times[config], default=allowed[0])


def _milliseconds(launch: Launch) -> float:
    launch()  # compiles
    # Messages and the kernels of other streams would add to the time. Waiting for them is safe, because the messages
    # of other ranks for which they wait were posted before this call.
    torch.cuda.synchronize()
    return float(triton.testing.do_bench(launch, warmup=10, rep=50, return_mode="median"))


def _published(key: str, choice: Config | None) -> Config | None:
    """The choice that some rank of this job published first. Publishes ``choice`` if none did and it is given."""
    if (
        not dist.is_available()
        or not dist.is_initialized()
        or dist.get_world_size() == 1
        or dist.get_backend() == "fake"
    ):
        return choice
    try:
        store = dist.distributed_c10d._get_default_store()
        name = f"seqpar/tuning/{key}"
        if choice is not None:
            return Config(**json.loads(store.compare_set(name, "", json.dumps(asdict(choice)))))
        return Config(**json.loads(store.get(name))) if store.check([name]) else None
    except (RuntimeError, ValueError, TypeError):  # the store of a rank that has ended
        return choice


def _key(kernel: str, q: Tensor, k: Tensor, flags: str) -> str:
    device = torch.cuda.get_device_name(q.device) if q.is_cuda else str(q.device)
    lengths = f"q2^{q.shape[1].bit_length()} k2^{k.shape[1].bit_length()}"
    heads = f"{q.shape[0] * q.shape[2]}/{q.shape[2] // k.shape[2]}"
    return f"{device} triton{triton.__version__} {kernel} {q.dtype} d{q.shape[-1]} h{heads} {lengths} {flags}".strip()


def _load() -> dict[str, Config]:
    try:
        stored: dict[str, dict[str, Any]] = json.loads(cache_file().read_text())
        # 64.0 equals 64, and is no tile.
        kinds = {name: type(value) for name, value in asdict(Config(16, 16)).items()}
        return {
            key: Config(**fields)
            for key, fields in stored.items()
            if {name: type(value) for name, value in fields.items()} == kinds
        }
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
            scratch.unlink(missing_ok=True)  # an incomplete file after the disk was full
