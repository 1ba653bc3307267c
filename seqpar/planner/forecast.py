"""The expected time of a run: the simulation with the share of each published rate that real runs have reached.

``calibration.json`` has these shares. ``docs/forecast.py`` fits them to half of the published times, and the tests
compare the other half with the ranges that they give.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from .hardware import Hardware
from .setting import Setting
from .split import Switches
from .step import Choice, StepCost, step

LONG, SHORT, HOSTS, PACKED = "long", "short", "several hosts", "packed"
KINDS = {
    LONG: "attention has at least three quarters of the computation",
    SHORT: "shorter sequences on one host",
    HOSTS: "shorter sequences on several hosts",
    PACKED: "packed documents or a window",
}
_LONG_SHARE = 0.75
_ERROR = 0.05  # choices whose throughput differs by less are equal; more for short sequences and for several hosts


@dataclass(frozen=True)
class Calibration:
    """Shares of published rates that real runs have reached.

    Attributes:
        gemm: of the fastest matrix product.
        attention: of the attention kernel by itself.
        packed: of ``attention``, for packed documents.
        memory: of the bandwidth of device memory.
        network: of the bandwidth between hosts.
        ranges: by kind of run, the published time over the expected time of the calibrating runs: the lowest and the
            highest.
    """

    gemm: float = 1.0
    attention: float = 1.0
    packed: float = 1.0
    memory: float = 1.0
    network: float = 1.0
    ranges: Mapping[str, tuple[float, float]] | None = None

    def hardware(self, setting: Setting) -> Hardware:
        """The hardware of a setting at the expected rates."""
        h, share = setting.hardware, self.attention * (self.packed if setting.mask.is_local else 1.0)
        rates = {
            name: rate and replace(rate, forward=rate.forward * share, backward=rate.backward * share)
            for name, rate in h.attention.items()
        }
        return replace(
            h,
            attention=rates,
            gemm_flops=h.gemm_flops * self.gemm,
            memory_bandwidth=h.memory_bandwidth * self.memory,
            network=h.network * self.network,
        )

    def range(self, setting: Setting) -> tuple[float, float]:
        """The factors of the expected time between which a step is expected to take."""
        low, high = (self.ranges or {}).get(kind_of(setting), (1.0, 1.0))
        is_compared = all(part.row.is_forecast for _, part in setting.model.parts)
        return (low, high) if is_compared else (low / 1.25, high * 1.25)


def floor_seconds(setting: Setting) -> tuple[float, float]:
    """Seconds of a step's matrix products, mixers included, and of its attention at the published rates."""
    s, m = setting, setting.model
    sequences = s.batch * s.replicas * s.accumulation / s.ranks
    rate = s.hardware.rate(s.kernel)
    flops = m.attention_flops(s.pairs) * sequences
    gemm = 3.0 * m.token_flops * s.seq_len * sequences / s.hardware.gemm_flops
    backward = 3.5 if s.is_invariant else 2.5  # times the FLOPs of the forward
    return gemm, flops / rate.forward + backward * flops / rate.backward


def kind_of(setting: Setting) -> str:
    """The kind of a run, a key of ``KINDS``."""
    if setting.mask.is_local:
        return PACKED
    gemm, attention = floor_seconds(setting)
    if attention >= _LONG_SHARE * (gemm + attention):
        return LONG
    return SHORT if setting.ranks <= setting.hardware.gpus_per_host else HOSTS


@lru_cache(maxsize=1)
def calibration() -> Calibration:
    """The shares in ``calibration.json``."""
    values = json.loads(Path(__file__).with_name("calibration.json").read_text())
    ranges = {kind: (low, high) for kind, (low, high) in values.pop("ranges").items()}
    return Calibration(**values["shares"], ranges=ranges)


def expected_cost(setting: Setting) -> StepCost:
    """What a step costs at the expected rates."""
    return StepCost(replace(setting, hardware=calibration().hardware(setting)))


def forecast(setting: Setting, switches: Switches, cost: StepCost) -> Choice:
    """The step of a setting with its expected time, its floor and the range.

    Args:
        setting: the run.
        switches: what is recomputed, offloaded or computed some tokens at a time.
        cost: the ``expected_cost`` of the setting.
    """
    choice, floor = step(cost.setting, switches, cost), sum(floor_seconds(setting))
    low, high = calibration().range(setting)
    hard = (kind_of(setting) != LONG) + (setting.hosts > 1)
    return replace(
        choice,
        error=_ERROR * (1 + hard),
        floor_s=floor,
        low_s=max(floor, low * choice.seconds),
        high_s=max(floor, high * choice.seconds),
    )
