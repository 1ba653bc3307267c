"""Starts the default process group of ``init_mesh``, from torchrun's environment or for one process alone."""

from __future__ import annotations

import atexit
import math
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from ..base.checks import check_int
from .rendezvous import fresh_prefix

# What starts processes without torchrun's variables: the number of processes, then this one's rank, and its rank on its
# host. Inside an allocation of SLURM, SLURM_NTASKS is set in every shell; in a step of srun, SLURM_STEP_NUM_TASKS too.
_LAUNCHERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK"),
)


def started_ranks() -> int:
    """The number of ranks that have been started, from torchrun's environment; 1 outside of it.

    Raises:
        ValueError: this is one of several processes, and does not know of the others.
    """
    world = _world_size()
    if world is not None:
        if world > 1 and "RANK" not in os.environ:
            raise ValueError(f"WORLD_SIZE={world}: RANK is not set; set both, or start the ranks with torchrun")
        return world
    if (launched := _launched()) is not None:
        count, (size, rank, local_rank) = launched
        raise ValueError(
            f"init_mesh: {size}={count}, so {count} processes were started or are to be started, but WORLD_SIZE is "
            "not set, and each would work by itself as a single rank; start one torchrun on each host, or set in "
            f"every process RANK (={rank}), WORLD_SIZE (={size}), LOCAL_RANK (={local_rank}), MASTER_ADDR and "
            "MASTER_PORT; to run a single process on purpose, set WORLD_SIZE=1"
        )
    return 1


def check_alone() -> None:
    """Raise a ValueError if this is one of several processes: without a process group it would work by itself."""
    count, size = _world_size(), "WORLD_SIZE"
    if count is None and (launched := _launched()) is not None:
        count, (size, *_) = launched
    if count is not None and count > 1:
        raise ValueError(
            f"{size}={count}, so {count} processes were started, but no process group is running in this one, and it "
            "would work by itself as a single rank; call seqpar.init_mesh (or torch.distributed.init_process_group) "
            "first, and destroy_process_group last. In a process that a rank has started, such as a worker of a "
            "DataLoader, use the Sharding or the collate function that the rank made, or Sharding.balanced(..., "
            "ranks=, rank=). To work as a single rank on purpose, pass strategy='local' or set WORLD_SIZE=1"
        )


def _world_size() -> int | None:
    """torchrun's number of processes."""
    world = os.environ.get("WORLD_SIZE")
    if world is not None and (not world.isdecimal() or int(world) < 1):
        raise ValueError(f"WORLD_SIZE={world!r}: expected the number of ranks, at least 1; set it, or remove it")
    return None if world is None else int(world)


def _launched() -> tuple[int, tuple[str, str, str]] | None:
    """The number of processes that another launcher has started, and its row of ``_LAUNCHERS``; None if it is one."""
    for names in _LAUNCHERS:
        count = os.environ.get(names[0], "")
        if count.isdecimal() and int(count) > 1:
            return int(count), names
        if count.isdecimal() and names[0] == "SLURM_STEP_NUM_TASKS":
            break  # a step of one process, in an allocation of any size
    return None


# With this variable, NCCL runs the kernels of several communicators in the order in which the host launched them. It
# reads the variable once, at the first launch.
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
# How long an operation may wait for other ranks, by default. torch's own default is 10 minutes for NCCL alone, and 30
# for other backends, such as gloo and NCCL together.
TIMEOUT = timedelta(minutes=10)
# Up to this many ranks, a process group on GPUs has gloo beside NCCL. gloo connects all pairs of ranks.
_MOST_GLOO_RANKS = 256


def start_process_group(
    device_type: str,
    world: int,
    backend: str | None,
    timeout: timedelta | None,
    device_id: torch.device | int | None,
) -> None:
    """Start the default process group from torchrun's environment, or for this process alone."""
    if backend is None:
        nccl = "cpu:gloo,cuda:nccl" if world <= _MOST_GLOO_RANKS else "nccl"
        backend = nccl if device_type == "cuda" else "gloo"
    if not isinstance(backend, str):
        raise TypeError(f"backend={backend!r}: expected a str, such as 'nccl', 'gloo' or 'cpu:gloo,cuda:nccl'")
    options: dict[str, Any] = {"timeout": timeout or TIMEOUT}
    if device_type == "cuda":
        device = _own_device(device_id)
        torch.cuda.set_device(device)
        if "nccl" in backend:
            options["device_id"] = device
            os.environ.setdefault(LAUNCH_ORDER, "1")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if world > 1 and get_worker_info() is not None:
            raise RuntimeError(
                "init_mesh: this process is a worker of a DataLoader, which has the environment of a rank but is none; "
                "call init_mesh in the rank. A worker cuts with the Sharding or the collate function that the rank "
                "made, or with Sharding.balanced(..., ranks=, rank=)"
            )
        rank, store = int(os.environ["RANK"]), _job_store(options["timeout"])
        prefix = fresh_prefix(store, rank, world, options["timeout"])
        dist.init_process_group(
            backend, store=dist.PrefixStore(f"seqpar/{prefix}", store), rank=rank, world_size=world, **options
        )
    else:  # one process, without a port
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    # gloo's threads must not outlive the interpreter. A group that the caller started is left to the caller.
    atexit.register(_end_process_group)


def _job_store(timeout: timedelta) -> dist.Store:
    """The store of torchrun's environment. It may have entries of ranks that have ended (see ``fresh_prefix``)."""
    store: dist.Store
    store, _, _ = next(dist.distributed_c10d.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return store


def _own_device(device_id: torch.device | int | None) -> torch.device:
    """The GPU of this rank. No two ranks may have the same one: NCCL raises an error for them."""
    count = torch.cuda.device_count()
    if device_id is None:
        if count == 1:
            return torch.device("cuda", 0)  # also if the launcher lets each rank see its own GPU only
        if (local_rank := os.environ.get("LOCAL_RANK")) is not None:
            device_id = int(local_rank)
        elif "WORLD_SIZE" not in os.environ:
            device_id = torch.cuda.current_device()
        else:
            raise ValueError(
                f"device_id: this process sees {count} GPUs and LOCAL_RANK is not set; pass device_id=, the index of "
                "this rank's GPU, or start the ranks with torchrun"
            )
    if isinstance(device_id, str):
        device_id = torch.device(device_id)
    if isinstance(device_id, torch.device):
        if device_id.type != "cuda" or device_id.index is None:
            raise ValueError(f"device_id={device_id}: expected a CUDA device with an index, such as cuda:0")
        device_id = device_id.index
    check_int("device_id", device_id)
    if not 0 <= device_id < count:
        raise ValueError(
            f"device_id={device_id} (by default LOCAL_RANK): this process sees {count} GPUs; start at most one rank "
            "per GPU"
        )
    return torch.device("cuda", device_id)


_LONGEST_S = 2**31  # 68 years, less than PyTorch's and the operating system's limits


def check_timeout(timeout: timedelta | float | None) -> timedelta | None:
    """``timeout`` as a timedelta."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, timedelta | int | float):
        raise TypeError(f"timeout={timeout!r}: expected seconds or a datetime.timedelta")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"timeout={timeout}: expected a positive number of seconds")
    if seconds > _LONGEST_S:
        raise ValueError(f"timeout={timeout}: expected at most {_LONGEST_S} seconds")
    return timedelta(seconds=seconds)


def _end_process_group() -> None:
    """End the process groups at exit. After an error, without waiting for messages that were not sent or received."""
    if not dist.is_initialized():
        return
    if hasattr(sys, "last_value"):  # the error that ends the interpreter
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
