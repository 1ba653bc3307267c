"""The rates of GPUs and links: ``hardware.json``, with a source for each number, and hardware that users describe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from ..base.checks import check_bool, check_choice

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
        attention: the rates of attention by kernel; None for a kernel that has not been measured. The first kernel with
            rates is the default.
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
    attention: Mapping[str, AttentionRate | None]
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

    @property
    def usable_host_memory(self) -> float:
        """The bytes of host memory per GPU for offloaded activations: 70 %. The system needs the rest."""
        return 0.7 * self.host_memory

    def rate(self, kernel: str | None) -> AttentionRate:
        """The rates of an attention kernel; of the first one that has been measured for None.

        Raises:
            ValueError: ``attention`` has no such kernel, or it has not been measured.
        """
        name = self.kernel_name(kernel)
        rate = self.attention[name]
        if rate is None:
            raise ValueError(
                f"kernel={name!r} has not been measured on {self.name}; measure it there with seqpar plan --measure, "
                f"or give its rates: hardware={{'base': {self.name!r}, 'attention': {{{name!r}: [forward, backward]}}}}"
            )
        return rate

    def kernel_name(self, kernel: str | None) -> str:
        """The name of the kernel: for None, of the first one that has been measured."""
        measured = [name for name, rate in self.attention.items() if rate is not None]
        kernel = kernel or next(iter([*measured, *self.attention]))
        check_choice("kernel", kernel, self.attention)
        return kernel


def hardware_of(value: str | Path | Mapping[str, Any] | Hardware) -> Hardware:
    """The ``Hardware`` that a user has named or described.

    Args:
        value: a name of ``HARDWARE``, the path of a YAML or JSON file, a mapping, or a ``Hardware``, which is returned
            as it is. A file or a mapping holds fields of ``Hardware``. With an entry ``base``, a name of ``HARDWARE``,
            the other fields come from there.

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
    try:
        check_choice("hardware", name, HARDWARE)
    except ValueError as error:
        raise ValueError(
            f"{error}, or pass a YAML or JSON file with the rates of your GPUs, such as 'base: h100' and "
            "'memory_bytes: 96e9'; seqpar plan --measure takes the rates of this machine"
        ) from None
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


def _of_mapping(value: Mapping[str, Any], known: Mapping[str, Hardware] | None = None) -> Hardware:
    """The hardware with the fields in ``value``, after checking them. ``known`` has the allowed bases."""
    known = HARDWARE if known is None else known
    values = dict(value)
    base = values.pop("base", None)
    required = {f.name: f.default is MISSING for f in fields(Hardware)}
    for name, x in values.items():
        check_choice("hardware field", name, required)
        if name == "attention":
            values[name] = _rates(x)
        elif name == "device":
            check_choice("hardware: device", x, ("cuda", "cpu"))
        else:
            values[name] = str(x) if name == "name" else _number(f"hardware: {name}", x, name)
    if base is not None:
        check_choice("hardware: base", base, known)
        return replace(known[base], **values)
    if missing := [name for name, is_required in required.items() if is_required and name not in values]:
        raise ValueError(f"hardware: {', '.join(missing)} missing; give them, or name a base: {', '.join(known)}")
    return Hardware(**values)


def _rates(value: Any) -> dict[str, AttentionRate | None]:
    """The rates of attention kernels by name: ``[forward, backward]``, ``[forward, backward, carries]`` or None."""
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"hardware: attention={value!r}: expected a kernel and its rates, such as {_EXAMPLE_RATES}")
    found: dict[str, AttentionRate | None] = {}
    for kernel, rate in value.items():
        if rate is not None and not isinstance(rate, AttentionRate):
            name = f"hardware: attention: {kernel}"
            if not isinstance(rate, list | tuple) or len(rate) not in (2, 3):
                raise ValueError(f"{name}={rate!r}: expected FLOP/s forward and backward, such as {_EXAMPLE_RATES}")
            forward, backward, carries = (*rate, False)[:3]
            check_bool(f"{name}: the third value, whether it carries,", carries)
            rate = AttentionRate(_number(name, forward), _number(name, backward), carries)
        found[str(kernel)] = rate
    return found


def _number(name: str, value: Any, field: str = "") -> Any:
    """``value`` as a number, after checking it. It may be a string, because YAML reads 48e9 as one."""
    whole, may_be_zero = field in ("gpus_per_host", "tile"), field in ("latency", "kernel", "reserved_bytes")
    expected = "a whole number" if whole else "a number"
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r}: expected {expected}") from error
    if not isfinite(number) or number < 0 or (number == 0 and not may_be_zero):
        raise ValueError(f"{name}={value!r}: expected a positive number")
    if whole and number != int(number):
        raise ValueError(f"{name}={value!r}: expected {expected}")
    return int(number) if whole else number


def _table() -> dict[str, Hardware]:
    """The GPUs of ``hardware.json``, whose entries are ``[value, source]``."""
    table: dict[str, Hardware] = {}
    for name, row in json.loads(Path(__file__).with_suffix(".json").read_text())["gpus"].items():
        attention = {kernel: entry[0] for kernel, entry in row.pop("attention").items()}
        values = {field: entry if field == "base" else entry[0] for field, entry in row.items()}
        table[name] = _of_mapping({"name": name, "attention": attention, **values}, table)
    return table


HARDWARE = _table()
