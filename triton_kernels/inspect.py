"""``python -m seqpar.triton_kernels.inspect``: compile the table of configurations for GPUs that are not here.

Prints registers, spills, shared memory and matrix instructions of every kernel, and exits with 1 where one spills
(but for ``SPILLS``), passes the shared memory of its GPU or misses the matrix unit. ``--json`` writes one object for each kernel instead.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

# Chosen knowingly: scores are scaled and shifted by one fused multiply-add.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
from torch import Tensor

from .backward import backward_launches
from .compiled import Resources, compile_for, resources
from .configs import Config, table, table_config
from .forward import forward_launch
from .launch import Launch
from .merge import merge_launch
from .preprocess import delta_launch
from .rotary import rotary_launch

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi_slopes": True},
    "dropout": {"dropout_p": 0.1},
    "carry": {"carry": True},
    "carry, last": {"carry": True, "last": True},
    "sinks": {"sinks": True},
}
# Bytes that CUDA's compiler may put into local memory, by (kernel, head_dim, dtype); everything else has none.
SPILLS = {
    # Three tf32 products keep both halves of their operands: no tile of 256 columns fits the registers.
    ("forward", 256, torch.float32): 64,
    ("dq", 256, torch.float32): 256,
    ("dkdv", 256, torch.float32): 384,
    # No spill but a table: an accurate sine reduces angles of any size.
    ("rotary", 128, torch.bfloat16): 32,
}
_BATCH, _SEQ, _HEADS, _KV_HEADS = 2, 8192, 16, 4


@dataclass(frozen=True)
class Case:
    """One kernel as it would be compiled for one call."""

    target: str
    kernel: str
    head_dim: int
    dtype: torch.dtype
    feature: str
    launch: Launch

    @property
    def needs_matrix(self) -> bool:
        return self.kernel in ("forward", "dkdv", "dq")


def table_cases(targets: list[str]) -> Iterator[Case]:
    """Every configuration of the table, with the plain kernel, on every target that uses it."""
    for architecture, kernel, head_dim, dtype in table():
        for target in targets:
            uses = {architecture, *(("sm_86", "sm_120") if architecture == "sm_80" else ())}
            if dtype == torch.float32 and architecture == "sm_80":
                uses |= {"sm_90", "sm_100"}
            if target in uses:
                config = table_config(architecture, kernel, head_dim, dtype)
                hip = architecture.startswith("gfx")
                yield Case(
                    target, kernel, head_dim, dtype, "plain", attention(kernel, head_dim, dtype, config, hip=hip)
                )


def feature_cases(targets: list[str]) -> Iterator[Case]:
    """Every feature at head_dim 64 and 128 in half precision."""
    for target in targets:
        architecture = {"sm_86": "sm_80", "sm_120": "sm_80"}.get(target, target)
        for feature, options in FEATURES.items():
            for kernel in ("forward", "dkdv", "dq"):
                if feature == "plain" or (kernel != "forward" and (options.keys() & {"carry", "sinks"})):
                    continue
                for head_dim in (64, 128):
                    heavy = bool(options.keys() & {"softcap", "alibi_slopes", "dropout_p"})
                    config = table_config(architecture, kernel, head_dim, torch.bfloat16, heavy)
                    launch = attention(kernel, head_dim, torch.bfloat16, config, **options)
                    yield Case(target, kernel, head_dim, torch.bfloat16, feature, launch)


def small_cases(targets: list[str]) -> Iterator[Case]:
    """The kernels without products."""
    for target in targets:
        for name, launch in elementwise_kernels().items():
            yield Case(target, name, 128, torch.bfloat16, "plain", launch)


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention(
    kernel: str, head_dim: int, dtype: torch.dtype, config: Config, *, carry: bool = False, last: bool | None = None,
    sinks: bool = False, alibi_slopes: bool = False, hip: bool = False, **score: Any,
) -> Launch:  # fmt: skip
    """The launch of an attention kernel on tensors that exist in name only."""
    last = not carry if last is None else last
    q = _empty(_BATCH, _SEQ, _HEADS, head_dim, dtype=dtype)
    k = _empty(_BATCH, _SEQ, _KV_HEADS, head_dim, dtype=dtype)
    lse = _empty(_BATCH, _HEADS, _SEQ)
    bounds, positions = _empty(1, _SEQ, dtype=torch.int32), _empty(_SEQ, dtype=torch.int32)
    common: dict[str, Any] = {
        "softmax_scale": 0.1, "alibi_slopes": _empty(_HEADS) if alibi_slopes else None, "hip": hip, **score,
    }  # fmt: skip
    if kernel == "forward":
        acc = _empty(*q.shape) if carry else None
        return forward_launch(
            q, k, k, bounds, bounds, positions, positions, acc=acc, lse_in=lse if carry else None,
            out=q if last else _empty(*q.shape), lse=lse, sinks=_empty(_HEADS) if sinks else None, last=last,
            config=config, **common,
        )  # fmt: skip
    launches = backward_launches(
        q, q, k, k, lse, lse, bounds, bounds, positions, positions, _empty(*q.shape), _empty(*k.shape),
        _empty(*k.shape), dkdv_config=config, dq_config=config, **common,
    )  # fmt: skip
    return launches[1 if kernel == "dkdv" else 2]


def elementwise_kernels() -> dict[str, Launch]:
    """Launches of the kernels without products, by name."""
    x, lse = _empty(_BATCH, _SEQ, _HEADS, 128, dtype=torch.bfloat16), _empty(_BATCH, _HEADS, _SEQ)
    config = Config(64, 64)
    bounds, positions = _empty(1, _SEQ, dtype=torch.int32), _empty(_SEQ, dtype=torch.int32)
    buffer = _empty(*x.shape)
    backward = backward_launches(
        x, x, x, x, lse, lse, bounds, bounds, positions, positions, buffer, buffer, buffer, softmax_scale=0.1,
        dkdv_config=config, dq_config=config,
    )  # fmt: skip
    return {
        "statistics": backward[0],
        "delta": delta_launch(x, x, lse, lse),
        "merge": merge_launch(buffer, lse, x, lse),
        "rotary": rotary_launch(x, x, positions=positions, frequencies=_empty(64)),
        "rotary, tables": rotary_launch(x, x, cos=_empty(1, _SEQ, 64), sin=_empty(1, _SEQ, 64)),
    }


def verdict(case: Case, found: Resources) -> str:
    """ "" for a kernel as it should be, else what is wrong with it."""
    allowed = SPILLS.get((case.kernel, case.head_dim, case.dtype), 0) if not case.target.startswith("gfx") else 0
    wrong = [] if found.spilled_bytes <= allowed else [f"spills {found.spilled_bytes} bytes"]
    if not found.fits_shared(case.target):
        wrong.append(f"{found.shared_bytes} bytes of shared memory")
    if case.needs_matrix and not found.matrix:
        wrong.append("no matrix instructions")
    return ", ".join(wrong)


def inspect(cases: Iterator[Case]) -> Iterator[dict[str, Any]]:
    """Compile the cases; one row for each."""
    for case in cases:
        config = case.launch.config
        row = {
            "target": case.target, "kernel": case.kernel, "head_dim": case.head_dim,
            "dtype": str(case.dtype).removeprefix("torch."), "feature": case.feature, "config": asdict(config),
        }  # fmt: skip
        found = resources(compile_for(case.launch, case.target), case.target)
        yield {**row, **asdict(found), "wrong": verdict(case, found)}


def _print(row: dict[str, Any]) -> None:
    config = row["config"]
    tile = f"{config['block_m']}x{config['block_n']}"
    options = f"{config['num_warps']}w {config['num_stages']}s{' tma' if config['tma'] else ''}"
    print(
        f"{row['target']:7} {row['kernel']:15} {row['head_dim']:>4} {row['dtype']:9} {row['feature']:12} {tile:>8} "
        f"{options:9} {row['registers']:>5} {row['spilled_bytes']:>7} {row['shared_bytes']:>8} {row['matrix']:8} "
        f"{row['wrong']}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m seqpar.triton_kernels.inspect", description=__doc__)
    parser.add_argument("--target", action="append", metavar="ARCH", help="sm_80, sm_86, sm_90, sm_100, sm_120, gfx942")
    parser.add_argument("--what", default="table", choices=("table", "features", "small", "all"))
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args(argv)
    targets = arguments.target or ["sm_80", "sm_90", "sm_100", "gfx942"]
    chosen = {"table": table_cases, "features": feature_cases, "small": small_cases}
    if not arguments.json:
        print(
            "target  kernel       head_dim dtype     feature          tile options   regs spilled   shared matrix   "
            "wrong"
        )
    wrong = 0
    for name, cases in chosen.items():
        if arguments.what in (name, "all"):
            for row in inspect(cases(targets)):
                wrong += bool(row["wrong"])
                print(json.dumps(row), flush=True) if arguments.json else _print(row)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
