"""The rates of GPUs and links: a table of five GPUs with the source of each number, and hardware that users describe.

The comments below name their sources as follows:

* sheet: the vendors' data sheets, as collected in stas00/ml-engineering (compute/accelerator, network). Rates without
  sparsity.
* MAMF: the fastest bfloat16 matrix product that ml-engineering's mamf-finder has measured.
* FA2: Dao-AILab/flash-attention, assets/flash2_{a100,h100}_fwd_bwd_benchmark.png: head_dim 128, causal, 16k tokens.
* FA3: the same repository, assets/flash3_fp16_fwd.png (arXiv 2407.08608, figure 5): head_dim 128, causal, 16k tokens.
* cuDNN: NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training, cuDNN 9.19 on H200: Llama 3.1, causal, 32k tokens.
* NCCL slide: NVIDIA GTC25 S72583, nccl-tests all-to-all, bus bandwidth.

Rates of attention count visible pairs of a query and a key only: 4 FLOPs per pair and element of head_dim in forward,
10 in backward. Where only the rate r of forward and backward together was published, the backward rate b follows from
it and the forward rate f by ``1 / r = (1 / f + 2.5 / b) / 3.5``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from ..checks import check_bool, check_choice

GIB = 1 << 30
_EXAMPLE_RATES = "{flash3: [616e12, 561e12]}"


@dataclass(frozen=True)
class AttentionRate:
    """FLOP/s of an attention kernel on long sequences with head_dim 128, bfloat16.

    Attributes:
        forward: FLOP/s of the forward.
        backward: FLOP/s of the backward.
        carries: whether the kernel of a ring's step continues the online softmax of the previous step in float32.
            Otherwise a separate kernel merges the results of two steps.
    """

    forward: float
    backward: float
    carries: bool = False


@dataclass(frozen=True)
class Hardware:
    """One GPU, its host and its network. Every bandwidth is in bytes/s, of one GPU in one direction.

    Attributes:
        name: the name of the GPU, for tables.
        peak_flops: FLOP/s of dense bfloat16 products on the data sheet, the denominator of MFU.
        gemm_flops: FLOP/s that a large bfloat16 matrix product reaches.
        attention: the rates of attention by kernel. The first kernel is the default.
        memory_bytes: bytes of device memory.
        memory_bandwidth: bytes/s of device memory, reads and writes together.
        p2p: bytes/s of point-to-point messages to several ranks of the same host together.
        peer: bytes/s of point-to-point messages to one rank of the same host.
        all_to_all: bytes/s that a rank sends to ranks of the same host in an all-to-all.
        all_gather: bytes/s that a rank sends to ranks of the same host in an all-gather.
        network: bytes/s to ranks of other hosts.
        host_link: bytes/s between device memory and host memory.
        host_memory: bytes of host memory per GPU.
        latency: seconds that a transfer takes in addition to its bytes divided by the bandwidth.
        kernel: seconds that an attention kernel takes in addition to its FLOPs divided by its rate.
        tile: an attention kernel computes tiles of this many queries and as many keys.
        gpus_per_host: GPUs of a host, which share its fast links.
        reserved_bytes: bytes of device memory that CUDA, NCCL and the allocator take.
        device: "cuda" or "cpu".
    """

    name: str
    peak_flops: float
    gemm_flops: float
    attention: Mapping[str, AttentionRate]
    memory_bytes: float
    memory_bandwidth: float
    p2p: float
    peer: float
    all_to_all: float
    all_gather: float
    network: float
    host_link: float
    host_memory: float
    latency: float
    kernel: float
    tile: int = 128
    gpus_per_host: int = 8
    reserved_bytes: float = 4 * GIB
    device: str = "cuda"

    def rate(self, kernel: str | None) -> AttentionRate:
        """The rates of an attention kernel; of the first one for None.

        Raises:
            ValueError: ``attention`` has no such kernel.
        """
        kernel = kernel or next(iter(self.attention))
        check_choice("kernel", kernel, self.attention)
        return self.attention[kernel]


# Hosts with one 400 Gb/s network card per GPU: 46 to 48 of 50 GB/s (nccl-tests #290; 48 on the NCCL slide at 32 GPUs).
_NDR = 48e9
# nccl-tests: 15.2 us for 8 bytes on 8 H200; 15.6 to 20.5 us for 1 KiB on 8 B200 (ml-engineering, network). For the
# other GPUs ml-engineering has no figure; the same latency is assumed.
_LATENCY = 20e-6
# cuDNN on H200, causal: 0.142 ms for 2,048 tokens, of which 0.100 ms follow from the rate at 32k tokens.
_KERNEL = 40e-6
# PCIe 5 x16, measured on H200: 55.4 of 63 GB/s, 88 % (ml-engineering). PCIe 4 x16: 88 % of 31.
_PCIE5, _PCIE4 = 55e9, 27e9
# Hosts of 8 GPUs have 1.9 TB (ALST, arXiv 2506.13996). According to the same paper CUDA takes about 1 GiB and NCCL
# several GiB of each GPU's memory, hence the default of ``reserved_bytes``.
_HOST_MEMORY = 1.9e12 / 8

_H100 = Hardware(
    "h100",
    peak_flops=989e12,  # sheet
    gemm_flops=794.5e12,  # MAMF
    attention={
        # Forward: FA3. Backward: 561 at 8k tokens, pytorch-labs/tritonbench #1256.
        "flash3": AttentionRate(616e12, 561e12),
        # Forward: cuDNN 9.1 in the FA3 chart. Backward: cuDNN 9.19 on H200, which has the same multiprocessors.
        "cudnn": AttentionRate(539e12, 581e12),
        # Forward 335 (FA3 chart); forward and backward together 328 (FA2).
        "flash2": AttentionRate(335e12, 325e12),
    },
    memory_bytes=80e9,  # sheet
    memory_bandwidth=3.35e12,  # sheet
    p2p=376e9,  # p2pBandwidthLatencyTest, of 450 (ml-engineering)
    peer=376e9,
    all_to_all=320e9,  # NCCL slide
    all_gather=361e9,  # nccl-tests on H200, which has the same links (ml-engineering)
    network=_NDR,
    host_link=_PCIE5,
    host_memory=_HOST_MEMORY,
    latency=_LATENCY,
    kernel=_KERNEL,
)

HARDWARE: dict[str, Hardware] = {
    "a100": Hardware(
        "a100",
        peak_flops=312e12,  # sheet, SXM 80 GB
        gemm_flops=271.2e12,  # MAMF
        # Forward 205 (ring-flash-attention on one GPU, 8k tokens); forward and backward together 189 (FA2).
        attention={"flash2": AttentionRate(205e12, 183e12)},
        memory_bytes=80e9,  # sheet
        memory_bandwidth=2.0e12,  # sheet
        p2p=274e9,  # p2pBandwidthLatencyTest, of 300 (ml-engineering)
        peer=274e9,
        all_to_all=210e9,  # NCCL slide
        all_gather=235e9,  # all-reduce bus bandwidth at 16 GiB (ml-engineering)
        network=24e9,  # 200 Gb/s a GPU: NCCL slide, 32 GPUs
        host_link=_PCIE4,
        host_memory=_HOST_MEMORY,
        latency=_LATENCY,
        kernel=_KERNEL,
    ),
    "h100": _H100,
    "h200": replace(
        _H100,
        name="h200",
        attention={"cudnn": AttentionRate(688e12, 581e12), **_H100.attention, },
        memory_bytes=141e9,  # sheet
        memory_bandwidth=4.8e12,  # sheet
        p2p=396e9,  # nvbandwidth (ml-engineering)
        peer=396e9,
    ),
    "b200": Hardware(
        "b200",
        peak_flops=2250e12,  # sheet
        gemm_flops=1745e12,  # MAMF
        # Dao-AILab/flash-attention #2280: B200, head_dim 128, 8k, causal.
        attention={"flash4": AttentionRate(1418e12, 1209e12)},
        memory_bytes=180e9,  # sheet, usable
        memory_bandwidth=8.0e12,  # sheet
        p2p=659e9,  # batch_isend_irecv on 8 B200, 16 GiB (ml-engineering)
        peer=659e9,
        all_to_all=660e9,  # the same, all-to-all
        all_gather=668e9,  # the same, all-gather
        network=_NDR,
        host_link=_PCIE5,
        host_memory=_HOST_MEMORY,
        latency=_LATENCY,
        kernel=_KERNEL,
    ),
    "mi300x": Hardware(
        "mi300x",
        peak_flops=1307e12,  # sheet
        gemm_flops=668.4e12,  # MAMF
        # Forward: the only absolute figure found is AITER's 273 (from 1.008 ms) at head_dim 256, 4k tokens, causal.
        # Backward: in the ratio of AITER on MI355X at 16k tokens, 1109 / 1247 (HazyResearch/HipKittens).
        attention={"aiter": AttentionRate(273e12, 243e12)},
        memory_bytes=192e9,  # sheet
        memory_bandwidth=5.3e12,  # sheet
        p2p=313e9,  # RCCL all-reduce bus bandwidth on 8 GPUs (ml-engineering), of 448 of all links
        peer=48e9,  # what RCCL counts as usable of one 64 GB/s link (ROCm/rccl #1210)
        all_to_all=313e9,  # no published figure was found: the same as p2p
        all_gather=313e9,  # no published figure was found: the same as p2p
        network=_NDR,
        host_link=_PCIE5,
        host_memory=_HOST_MEMORY,
        latency=_LATENCY,
        kernel=_KERNEL,
    ),
}  # fmt: skip


def hardware_of(value: str | Path | Mapping[str, Any] | Hardware) -> Hardware:
    """The ``Hardware`` that a user has named or described.

    Args:
        value: a name of ``HARDWARE``, the path of a YAML or JSON file, a mapping, or a ``Hardware``, which is returned
            as it is. A file or a mapping holds fields of ``Hardware``. With an entry ``base``, a name of ``HARDWARE``,
            the other fields are those of the base.

    Raises:
        TypeError: ``value`` has another type.
        ValueError: the name, the file or a field does not exist, or a value is not allowed.
    """
    if isinstance(value, Hardware):
        return value
    if isinstance(value, Mapping):
        return _of_mapping(value)
    if not isinstance(value, str | Path):
        raise TypeError(f"hardware={value!r}: expected a name, the path of a YAML or JSON file, a dict or a Hardware")
    if isinstance(value, Path) or value.endswith((".yaml", ".yml", ".json")):
        return _of_mapping({"name": Path(value).stem, **read_mapping("hardware", Path(value))})
    name = value.lower()
    check_choice("hardware", name, HARDWARE)
    return HARDWARE[name]


def read_mapping(argument: str, path: Path) -> dict[str, Any]:
    """The mapping that a JSON or YAML file holds.

    Args:
        argument: the argument that named the file, for error messages.
        path: the file.

    Raises:
        ValueError: the file cannot be read or parsed, or does not hold a mapping.
    """
    try:
        text = path.read_text()
        if path.suffix == ".json":
            value = json.loads(text)
        else:
            import yaml

            value = yaml.safe_load(text)
    except ImportError as error:
        raise ValueError(f"{argument}={path}: reading YAML needs PyYAML; install pyyaml, or write JSON") from error
    except OSError as error:
        raise ValueError(f"{argument}={path}: {error.strerror or error}") from error
    except Exception as error:  # the errors of json and of yaml
        raise ValueError(f"{argument}={path}: cannot be parsed: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{argument}={path}: expected a mapping of names to values")
    return value


def _of_mapping(value: Mapping[str, Any]) -> Hardware:
    """The hardware with the fields in ``value``, after checking them."""
    values = dict(value)
    base = values.pop("base", None)
    names = [f.name for f in fields(Hardware)]
    for name in values:
        check_choice("hardware field", name, names)
    if "attention" in values:
        values["attention"] = _rates(values["attention"])
    if "name" in values:
        values["name"] = str(values["name"])
    if "device" in values:
        check_choice("hardware: device", values["device"], ("cuda", "cpu"))
    for name in values.keys() - {"name", "attention", "device"}:
        values[name] = _number(
            f"hardware: {name}",
            values[name],
            may_be_zero=name in ("latency", "kernel", "reserved_bytes"),
            whole=name in ("gpus_per_host", "tile"),
        )
    if base is not None:
        return replace(hardware_of(base), **values)
    optional = {"tile", "gpus_per_host", "reserved_bytes", "device"}
    if missing := [name for name in names if name not in values and name not in optional]:
        raise ValueError(f"hardware: {', '.join(missing)} missing; give them, or name a base: {', '.join(HARDWARE)}")
    return Hardware(**values)


def _rates(value: Any) -> dict[str, AttentionRate]:
    """The rates of attention kernels, from ``[forward, backward]`` or ``[forward, backward, carries]`` by kernel."""
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"hardware: attention={value!r}: expected a kernel and its rates, such as {_EXAMPLE_RATES}")
    found = {}
    for kernel, rate in value.items():
        if not isinstance(rate, AttentionRate):
            name = f"hardware: attention: {kernel}"
            if not isinstance(rate, list | tuple) or len(rate) not in (2, 3):
                raise ValueError(f"{name}={rate!r}: expected FLOP/s forward and backward, such as {_EXAMPLE_RATES}")
            carries = rate[2] if len(rate) == 3 else False
            check_bool(f"{name}: the third value, whether it carries,", carries)
            rate = AttentionRate(_number(name, rate[0]), _number(name, rate[1]), carries)
        found[str(kernel)] = rate
    return found


def _number(name: str, value: Any, may_be_zero: bool = False, whole: bool = False) -> Any:
    """``value`` as a number, after checking it. It may be a string, because YAML reads 48e9 as one."""
    kind = "a whole number" if whole else "a number"
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r}: expected {kind}") from error
    if not isfinite(number) or number < 0 or (number == 0 and not may_be_zero):
        raise ValueError(f"{name}={value!r}: expected a positive number")
    if whole and number != int(number):
        raise ValueError(f"{name}={value!r}: expected {kind}")
    return int(number) if whole else number
