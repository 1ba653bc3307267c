"""The costs of attention on this machine: measured once, stored in a file, and the same on every rank.

The first call of ``costs_of`` is collective over the ranks of a group. Rank 0 looks for a file with the costs of such
hosts and devices. If there is none, all ranks measure together, which takes some seconds. Rank 0 sends its costs to the
other ranks through the store, so all ranks use the same.

The file is in the folder that the environment variable ``SEQPAR_CACHE`` names, by default ``~/.cache/seqpar``. With
``SEQPAR_MEASURE=0`` nothing is measured: without a file the rates of the table of GPUs are used.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

from ..comm.collectives import start_all_gather, start_all_to_all
from ..comm.p2p import exchange
from ..comm.trace import untraced
from ..heads import Heads
from ..layout import Layout, SequenceSharding
from ..mask import Mask
from ..mesh import global_ranks, ranks_by_host
from ..rendezvous import group_timeout, is_simulated, store_all_gather
from ..strategies import compared_options, resolve
from ..strategies.operators import AttentionOptions, attend
from .hardware import HARDWARE, AttentionRate, Hardware, hardware_of
from .layer import attention_seconds
from .model import ModelShape
from .setting import Setting

_VERSION = 5  # of the format of the file
_OVERHEAD_FIELDS = "overheads", "forward_overheads"  # the fields of ``Costs`` that hold overheads
_DEFAULTS, _MEASURE = "defaults", "measure"  # what rank 0 sends if it has no costs: what all ranks do instead
_ROUNDS = 3
MaskKind = Literal["causal", "window", "documents"]  # kernels have different overheads for these kinds of masks
_LAYOUT: Layout = "zigzag"  # of the measured sequences: every rank has the same work, under every strategy

# Rates of one CPU core, for the case that nothing may be measured. They are right in order of magnitude only.
_CPU = replace(
    HARDWARE["h100"],
    name="cpu",
    peak_flops=60e9,
    gemm_flops=60e9,
    attention={"cpu": AttentionRate(45e9, 40e9)},
    memory_bytes=4e9,
    memory_bandwidth=8e9,
    p2p=1.5e9,
    peer=1.5e9,
    all_to_all=1.5e9,
    all_gather=1.5e9,
    network=1.0e9,
    latency=100e-6,
    kernel=50e-6,
    reserved_bytes=0.0,
    device="cpu",
)


@dataclass(frozen=True)
class Overhead:
    """Corrects the simulated seconds of a strategy: it is expected to take ``fixed + factor * simulated`` seconds."""

    fixed: float = 0.0
    factor: float = 1.0


# The overheads by kind of mask and strategy: ``overheads[kind][strategy]``.
Overheads = Mapping[str, Mapping[str, Overhead]]


@dataclass(frozen=True)
class Costs:
    """The costs of attention among the ranks of a group.

    Attributes:
        hardware: rates of kernels and links.
        overheads: the overheads of forward and backward together. A strategy without an entry has no overhead.
        forward_overheads: the overheads of the forward alone.
        measured: whether ``hardware`` was measured. Otherwise it is from a table.
    """

    hardware: Hardware
    overheads: Overheads = field(default_factory=dict)
    forward_overheads: Overheads = field(default_factory=dict)
    measured: bool = False

    def seconds(self, kind: MaskKind, strategy: str, simulated: float, backward: bool = True) -> float:
        """The expected seconds of attention.

        Args:
            kind: the kind of mask.
            strategy: the strategy of attention.
            simulated: the simulated seconds of the same passes.
            backward: whether the seconds are those of forward and backward together, or of the forward alone.
        """
        overheads = self.overheads if backward else self.forward_overheads
        overhead = overheads.get(kind, {}).get(strategy, Overhead())
        return overhead.fixed + overhead.factor * simulated

    def to_json(self) -> str:
        """The costs as the text of a file."""
        hardware = asdict(self.hardware) | {
            "attention": {name: [r.forward, r.backward, r.carries] for name, r in self.hardware.attention.items()}
        }
        overheads = {
            field: {
                kind: {strategy: asdict(overhead) for strategy, overhead in by_strategy.items()}
                for kind, by_strategy in getattr(self, field).items()
            }
            for field in _OVERHEAD_FIELDS
        }
        return json.dumps({"version": _VERSION, "hardware": hardware, **overheads})

    @staticmethod
    def from_json(text: str) -> Costs:
        """The costs of a text that ``to_json`` has returned. They count as measured.

        Raises:
            ValueError: the text holds something else, or another version of the format.
        """
        try:
            value = json.loads(text)
            if value["version"] != _VERSION:
                raise ValueError(f"version {value['version']}, expected {_VERSION}")
            overheads = {
                field: {
                    kind: {strategy: Overhead(**overhead) for strategy, overhead in by_strategy.items()}
                    for kind, by_strategy in value[field].items()
                }
                for field in _OVERHEAD_FIELDS
            }
            return Costs(hardware_of(value["hardware"]), **overheads, measured=True)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"costs: {error!r}") from error


# The costs of each group by the type of its devices.
_known: MutableMapping[ProcessGroup, dict[str, Costs]] = WeakKeyDictionary()


def costs_of(group: ProcessGroup, device: torch.device) -> Costs:
    """The costs of attention among the ranks of ``group`` on devices of the type of ``device``; the same on all ranks.

    All ranks of the group must make the first call together. Later calls do not communicate.
    """
    found = _known.setdefault(group, {})
    if device.type not in found:
        found[device.type] = _agree(group, device)
    return found[device.type]


def _agree(group: ProcessGroup, device: torch.device) -> Costs:
    """The costs that rank 0 has in a file, or those that all ranks measure or take from the table. Collective."""
    if is_simulated():
        return default_costs(device)
    ranks, first, timeout = global_ranks(group), group.rank() == 0, group_timeout(group)
    file = cost_file(device, ranks_by_host(group))
    answer = _read(file) or _mode(device) if first else ""
    answer = store_all_gather("the costs of strategy 'auto'", ranks, answer, timeout)[0]
    if answer == _MEASURE:
        return measure(group, device, file)
    return default_costs(device) if answer == _DEFAULTS else Costs.from_json(answer)


def measure(group: ProcessGroup, device: torch.device, file: Path | None = None) -> Costs:
    """Measure the costs of attention among the ranks of ``group``, all of which call this together.

    Args:
        group: the ranks.
        device: the device of this rank.
        file: the file that rank 0 writes the costs to. If it cannot be written, nothing is written.

    Returns:
        The costs that rank 0 has measured, on every rank. ``costs_of`` returns them from now on.
    """
    first = group.rank() == 0
    with _undisturbed():
        text = _Measurement(group, device).costs().to_json()
    purpose = "the measured costs of strategy 'auto'"
    text = store_all_gather(purpose, global_ranks(group), text if first else "", group_timeout(group))[0]
    if first and file is not None:
        _write(file, text)
    found = Costs.from_json(text)
    _known.setdefault(group, {})[device.type] = found
    return found


def default_costs(device: torch.device) -> Costs:
    """Costs from the table of GPUs. A GPU that is not in the table counts as an H100."""
    if device.type == "cpu":
        return Costs(_CPU)
    name = torch.cuda.get_device_name(device).lower() if torch.cuda.is_available() else ""
    return Costs(next((gpu for key, gpu in HARDWARE.items() if key in name), HARDWARE["h100"]))


def _mode(device: torch.device) -> str:
    """What the ranks do without a file: ``_MEASURE``, or ``_DEFAULTS`` if nothing may be measured.

    While a CUDA graph is captured, nothing can be measured.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return _DEFAULTS if capturing or os.environ.get("SEQPAR_MEASURE") == "0" else _MEASURE


# The file


def device_name(device: torch.device) -> str:
    """The device's name, such as "NVIDIA H200" or "AMD EPYC 9654 96-Core Processor"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cost_file(device: torch.device, hosts: Sequence[Sequence[int]]) -> Path:
    """The path of the file with the costs: one for each device, torch version and number of ranks on each host.

    Args:
        device: the device of this rank.
        hosts: the ranks on each host.
    """
    folder = os.environ.get("SEQPAR_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "seqpar"
    layout = "+".join(str(len(ranks)) for ranks in hosts)
    threads = f" {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    name = f"costs {device_name(device)}{threads} torch {torch.__version__} ranks {layout}"
    return Path(folder).expanduser() / (re.sub(r"[^A-Za-z0-9.+]+", "-", name)[:200] + ".json")


def _read(file: Path) -> str | None:
    """The text of the file; None if it does not exist or does not hold costs."""
    try:
        text = file.read_text()
        Costs.from_json(text)
    except (OSError, ValueError):
        return None
    return text


def _write(file: Path, text: str) -> None:
    """Replace the file, so that no other process reads half of it.

    If the folder cannot be written, there is no file, and the next run measures again.
    """
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
            temporary.write(text)
        Path(temporary.name).replace(file)


# Measuring


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A block without the caller's dispatch modes, inference mode, autocast and traces.

    They would change what is measured, or count the messages of the measurement as the caller's.
    """
    with ExitStack() as stack:
        for context in (
            _disable_current_modes(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
            untraced(),
        ):
            stack.enter_context(context)
        yield


class _Measurement:
    """Measures the kernels, links and strategies of a group. Every rank calls the same methods in the same order."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._ranks, self._hosts = group.size(), ranks_by_host(group)
        cuda = device.type == "cuda"
        self._dtype = torch.bfloat16 if cuda else torch.float32
        self._head_dim = 128 if cuda else 64
        self._heads = max(16 if cuda else 8, min(self._ranks, 64))
        self._message = (64 << 20) if cuda else (4 << 20)
        # The lengths of a short and a long sequence. On a CPU the ranks of a host share its cores, so the length does
        # not grow with the ranks. An all-gather of K/V, with float32 gradients, takes at most 2 GiB.
        tokens = 4096 * max(2, self._ranks) if cuda else 2048 * len(self._hosts)
        most = (2 << 30) // (2 * self._heads * self._head_dim * (self._dtype.itemsize + 4))
        long = max(min(tokens, most), 64 * self._ranks)
        self._lengths = long // 4, long

    def costs(self) -> Costs:
        """Measure the rates and each strategy, and fit the overheads of each strategy to both."""
        hardware = self._hardware()
        long = self._lengths[1]
        masks: list[tuple[MaskKind, int, Mask]] = [("causal", tokens, Mask.causal()) for tokens in self._lengths]
        masks.append(("window", long, Mask.sliding_window(long // 4)))
        masks.append(("documents", long, Mask.documents([*range(0, long, -(-long // 8)), long])))
        runs = {
            (name, i, backward): self._attention(name, tokens, mask, backward)
            for i, (_, tokens, mask) in enumerate(masks)
            for name in self._strategies()
            for backward in (False, True)
        }
        measured = dict.fromkeys(runs, inf)
        for _ in range(_ROUNDS):
            for key, run in runs.items():
                # Not measured: as in training, the previous call was the same one. In the first round, this call
                # connects the ranks and compiles the kernels.
                run()
                measured[key] = min(measured[key], self._seconds(run))  # other programs can only add to the time
        both: dict[str, dict[str, Overhead]] = {}
        forward: dict[str, dict[str, Overhead]] = {}
        for name, (backward, overheads) in product(self._strategies(), ((True, both), (False, forward))):
            settings = [self._setting(hardware, name, tokens, mask) for _, tokens, mask in masks]
            simulated = [attention_seconds(setting, backward) for setting in settings]
            causal = fit(simulated[:2], [measured[name, i, backward] for i in (0, 1)])
            overheads.setdefault("causal", {})[name] = causal
            for i, (kind, *_) in enumerate(masks[2:], start=2):
                factor = max(0.1, (measured[name, i, backward] - causal.fixed) / max(1e-12, simulated[i]))
                overheads.setdefault(kind, {})[name] = Overhead(causal.fixed, factor)
        return Costs(hardware, both, forward, True)

    # Strategies

    def _strategies(self) -> list[str]:
        """The strategies that are measured. A hybrid is measured with its default split only."""
        names = ["ring", "context_parallel", "ulysses", *(["hybrid"] if self._hybrid_ulysses() > 1 else [])]
        return names if self._ranks > 1 else []

    def _hybrid_ulysses(self) -> int:
        """The number of ranks in each all-to-all of a hybrid, by default."""
        return resolve("hybrid", None, self._group, {}).ulysses_size

    def _setting(self, hardware: Hardware, name: str, tokens: int, mask: Mask) -> Setting:
        """What the simulation of a strategy needs."""
        ulysses = {"ulysses": self._ranks, "hybrid": self._hybrid_ulysses()}.get(name, 1)
        return Setting(
            attention_shape(self._heads, self._heads, self._head_dim),
            hardware,
            mask,
            tokens,
            ring=self._ranks // ulysses,
            ulysses=ulysses,
            layout=_LAYOUT,
            gather=name == "context_parallel",
            dtype=self._dtype,
        )

    def _attention(self, name: str, tokens: int, mask: Mask, backward: bool) -> Callable[[], None]:
        """A function that runs the forward of attention, and with ``backward`` its backward.

        Under the strategy "local", every rank attends to all tokens. Otherwise the tokens are sharded over the group.
        """
        group = None if name == "local" else self._group
        groups = resolve(name, None, group, compared_options(name))
        sequence = SequenceSharding(tokens, _LAYOUT, groups.ring_size, groups.ulysses_size)
        rank = 0 if group is None else group.rank()
        held = len(sequence.rank_positions(rank))
        shape = (1, held, self._heads, self._head_dim)  # [b, s, h, d]
        q, k, v = (self._random(shape).requires_grad_(backward) for _ in range(3))
        dout = self._random(shape)

        def run() -> None:
            out, _ = attend(
                q,
                k,
                v,
                None,
                None,
                0,
                mask=mask,
                groups=groups,
                sequence=sequence,
                heads=Heads.of_model(self._heads, self._heads),
                options=AttentionOptions(strategy=name),
                sharding=None,
                mesh=None,
                group=group,
                joins_backward=backward,
            )
            if backward:
                out.backward(dout)

        return run

    def _random(self, shape: Sequence[int]) -> Tensor:
        """A random tensor, without a change of the state of the caller's generators."""
        generator = torch.Generator(self._device).manual_seed(0)
        return torch.randn(shape, generator=generator, device=self._device).to(self._dtype)

    # Rates

    def _hardware(self) -> Hardware:
        """The rates of this rank's device and of the group's links."""
        cuda = self._device.type == "cuda"
        tokens = 4096 if cuda else 1024
        # A call with few tokens takes as long as its fixed cost, which is subtracted from that of a long call.
        (small_forward, small), (forward, both) = (self._kernel(n) for n in (64, tokens))
        base = HARDWARE["h100"] if cuda else _CPU
        # The number of operations, as the simulation counts them, is its time at one operation per second.
        unit = replace(base, attention={"unit": AttentionRate(1.0, 1.0)}, kernel=0.0)
        shape = attention_shape(self._heads, self._heads, self._head_dim)
        setting = Setting(shape, unit, Mask.causal(), tokens, dtype=self._dtype)
        operations, all_operations = (attention_seconds(setting, backward) for backward in (False, True))
        rate = all_operations / max(1e-9, both - small)
        rates = AttentionRate(
            operations / max(1e-9, forward - small_forward),
            (all_operations - operations) / max(1e-9, both - small - (forward - small_forward)),
            carries=True,
        )
        copied = torch.zeros(self._message, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(copied)
        per_host = len(self._hosts[0]) if len({len(host) for host in self._hosts}) == 1 else 1
        links = self._links(per_host)
        memory = torch.cuda.get_device_properties(self._device).total_memory if cuda else _host_memory(per_host)
        return replace(
            base,
            name=device_name(self._device),
            peak_flops=rate,
            gemm_flops=rate,
            attention={"measured": rates},
            memory_bytes=float(memory),
            memory_bandwidth=2 * copied.nbytes / self._best(lambda: target.copy_(copied)),
            kernel=small / 2,
            gpus_per_host=per_host,
            device=self._device.type,
            p2p=links.p2p,
            peer=links.p2p,
            network=links.network,
            latency=links.latency,
            all_gather=links.all_gather,
            all_to_all=links.all_to_all,
        )

    def _kernel(self, tokens: int) -> tuple[float, float]:
        """Seconds of attention on one rank while all ranks compute: of the forward, and of forward and backward."""
        forward, both = (self._best(self._attention("local", tokens, Mask.causal(), x)) for x in (False, True))
        return forward, both

    def _links(self, per_host: int) -> Hardware:
        """Hardware with the bandwidths and the latency of this group's links while all ranks send.

        Args:
            per_host: ranks per host; 1 if the hosts have different numbers of ranks.
        """
        if self._ranks == 1:
            return _CPU
        size, rank = self._message, self._group.rank()
        first = rank // per_host * per_host
        neighbours = [first + (rank + x) % per_host for x in (1, -1)]  # on the same host
        far = [(rank + x * per_host) % self._ranks for x in (1, -1)]  # on the hosts next to this one
        within = neighbours if per_host > 1 else far
        latency = self._best(lambda: self._exchange(within, 8))
        p2p = size / self._best(lambda: self._exchange(within, size))
        network = size / self._best(lambda: self._exchange(far, size)) if len(self._hosts) > 1 else p2p
        message = size // self._ranks
        sent = message * (self._ranks - 1)  # to all other ranks, in both collectives
        all_gather = sent / self._best(lambda: self._all_gather(message))
        all_to_all = sent / self._best(lambda: self._all_to_all(message))
        return replace(_CPU, p2p=p2p, network=network, latency=latency, all_gather=all_gather, all_to_all=all_to_all)

    def _exchange(self, peers: Sequence[int], size: int) -> None:
        """Send ``size`` bytes to the first peer, and receive as many from the second."""
        target, source = peers
        sent, received = (torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(2))
        exchange([(target, sent)], [(source, received)], self._group).wait()

    def _all_gather(self, size: int) -> None:
        """All-gather ``size`` bytes of each rank."""
        start_all_gather(torch.zeros(size, dtype=torch.uint8, device=self._device), self._group)[1].wait()

    def _all_to_all(self, size: int) -> None:
        """Send ``size`` bytes to each rank."""
        sent = torch.zeros(self._ranks * size, dtype=torch.uint8, device=self._device)
        start_all_to_all(sent, [size] * self._ranks, [size] * self._ranks, self._group)[1].wait()

    # Time

    def _best(self, run: Callable[[], object]) -> float:
        """The seconds of the fastest of a few runs."""
        run()  # connects ranks, compiles kernels
        return min(self._seconds(run) for _ in range(_ROUNDS))

    def _seconds(self, run: Callable[[], object]) -> float:
        """The seconds of one run on the slowest rank; the same on every rank."""
        self._slowest(0.0)  # so that all ranks begin together
        start = time.perf_counter()
        run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._slowest(time.perf_counter() - start)

    def _slowest(self, seconds: float) -> float:
        """The largest value of all ranks, on every rank."""
        own = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        if self._ranks == 1:
            return seconds
        by_rank, pending = start_all_gather(own, self._group)
        pending.wait()
        return float(by_rank.max().item())


def fit(simulated: Sequence[float], measured: Sequence[float]) -> Overhead:
    """The overhead with which the simulated seconds of a short and of a long sequence become the measured ones.

    If that overhead were negative, only the long sequence is fitted, without a fixed part.

    Args:
        simulated: simulated seconds of the short and of the long sequence.
        measured: measured seconds of the same.
    """
    (simulated_short, simulated_long), (measured_short, measured_long) = simulated, measured
    factor = (measured_long - measured_short) / max(1e-12, simulated_long - simulated_short)
    fixed = measured_short - factor * simulated_short
    if factor <= 0 or fixed < 0:
        return Overhead(0.0, measured_long / max(1e-12, simulated_long))
    return Overhead(fixed, factor)


def attention_shape(heads: int, kv_heads: int, head_dim: int) -> ModelShape:
    """The shape of a model of one layer whose attention has the given heads. Its other sizes do not matter."""
    return ModelShape("attention", 1, heads * head_dim, heads, kv_heads, head_dim, 1, 1)


def _host_memory(ranks: int) -> float:
    """Bytes of host memory for each of the host's ``ranks`` ranks."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
