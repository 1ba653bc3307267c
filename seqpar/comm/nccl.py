"""How NCCL is configured for attention's communicators.

Several communicators of one rank run at the same time: attention's, and the communicators of FSDP or DDP. Each is a
kernel that waits on the GPU for other ranks. Two things keep such kernels from waiting for one another forever:

* All ranks start them in the same order. seqpar and PyTorch launch them in the same order on every rank, and NCCL keeps
  this order on the GPU if ``NCCL_LAUNCH_ORDER_IMPLICIT=1``. ``init_mesh`` sets this variable.
* They fit on the GPU together. Each CTA (thread block) of a communicator takes one SM. So attention's communicators
  have at most ``MAX_CTAS`` each, which also leaves SMs to the kernels that compute meanwhile.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..base.settings import number
from ..ranks.mesh import Ranks, global_ranks, parent_group, rank_in, size_of
from ..ranks.startup import LAUNCH_ORDER, TIMEOUT

Purpose = Literal["messages", "handshake"]
# By purpose: the most CTAs of a communicator. At most three communicators for messages run at once (Ulysses, the ring
# inside a host and between hosts): with a handshake 49 CTAs. With 32 more for FSDP they fit on the 108 SMs of an A100.
MAX_CTAS: Mapping[Purpose, int] = {"messages": 16, "handshake": 1}
# The first version that can keep the launch order of several communicators.
_OLDEST = (2, 26)
# NCCL's settings of a communicator, as far as torch has them.
_SETTINGS = (
    "blocking",
    "cga_cluster_size",
    "min_ctas",
    "max_ctas",
    "split_share",
    "traffic_class",
    "collnet_enable",
    "cta_policy",
    "nvls_ctas",
    "net_name",
)
_UNSET = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT


def nccl_backend(
    store: dist.Store, ranks: Ranks, device: torch.device, purpose: Purpose, name: str, timeout: timedelta
) -> Any:
    """An NCCL backend with the settings of the caller's group, on a stream of high priority."""
    _warn_of_problems()
    options: Any = c10d.ProcessGroupNCCL.Options()
    caller = getattr(parent_group(ranks)._get_backend(device), "options", None)
    for setting in _SETTINGS:
        if (value := getattr(getattr(caller, "config", None), setting, None)) is not None:
            setattr(options.config, setting, value)
    for setting, value in _ctas(options.config, purpose).items():
        setattr(options.config, setting, value)
    options.is_high_priority_stream = True
    options._timeout = timeout
    options.global_ranks_in_group = list(global_ranks(ranks))
    options.group_name = name
    return c10d.ProcessGroupNCCL(store, rank_in(ranks), size_of(ranks), options)


def _ctas(config: Any, purpose: Purpose) -> dict[str, int]:
    """The environment's minimum and maximum of CTAs; a default maximum where the caller's group has none."""
    ctas = {} if purpose == "handshake" else variables()
    lowest = ctas.get("min_ctas", getattr(config, "min_ctas", _UNSET))
    if getattr(config, "max_ctas", _UNSET) == _UNSET or purpose == "handshake":
        ctas = {"max_ctas": max(MAX_CTAS[purpose], lowest), **ctas}
    return ctas


def variables() -> dict[str, int]:
    """The number of SMs that SEQPAR_NCCL_MIN_CTAS and SEQPAR_NCCL_MAX_CTAS set."""
    ctas = {}
    for name in ("min_ctas", "max_ctas"):
        variable = f"SEQPAR_NCCL_{name.upper()}"
        if (value := number(variable)) is not None:
            ctas[name] = value
    return ctas


def nccl_version() -> tuple[int, ...] | None:
    """The version of NCCL; None in a build of torch without it."""
    return tuple(torch.cuda.nccl.version()) if dist.is_nccl_available() else None


def nccl_problems(version: tuple[int, ...] | None, environment: Mapping[str, str]) -> list[str]:
    """Why several communicators may wait for one another forever. Nothing without NCCL."""
    if version is None:
        return []
    if version < _OLDEST:
        return [
            f"NCCL {'.'.join(map(str, version))} is older than {'.'.join(map(str, _OLDEST))} and cannot keep the "
            "launch order of several communicators, which may then wait for one another; upgrade torch"
        ]
    if environment.get(LAUNCH_ORDER) != "1":
        return [
            f"{LAUNCH_ORDER} is not 1, so communicators of attention and of FSDP or DDP may wait for one another; set "
            "it before torch.distributed starts, or start it with seqpar.init_mesh, which sets it"
        ]
    return []


@cache
def _warn_of_problems() -> None:
    if dist.get_rank() == 0:
        for problem in nccl_problems(nccl_version(), os.environ):
            warnings.warn(problem, RuntimeWarning, stacklevel=2)


def nccl_report() -> dict[str, str]:
    """What matters for attention's communicators on GPUs, by name."""
    version, ctas = nccl_version(), {"max_ctas": MAX_CTAS["messages"], **variables()}
    others = ("NCCL_", "TORCH_NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS")
    return {
        "version": ".".join(map(str, version)) if version else "none in this build of torch",
        LAUNCH_ORDER: "not set; init_mesh sets it to 1",
        "timeout": f"{TIMEOUT.total_seconds() / 60:.0f} minutes, or init_mesh(timeout=)",
        "CTAs of a communicator for messages": f"at most {ctas['max_ctas']}, at least {ctas.get('min_ctas', 1)}",
        "communicators for messages at once": "up to 3: all-to-all, ring inside a host, ring between hosts",
        "CTAs of the handshakes' communicator": f"at most {MAX_CTAS['handshake']}",
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith(others)},
    }
