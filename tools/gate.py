"""``python tools/gate.py``: compile every configuration of the kernels, for GPUs that this machine does not have.

Prints registers, spills, shared memory, matrix instructions, products of tiles, tiles that go through registers into a
product, and how many blocks fit a processor. Exits with 1 if a kernel spills more than ``SPILLS`` allows, exceeds the
memory of its GPU, does not use its newest matrix instructions, has a descriptor that CUDA rejects, or on sm_90 waits
for a product at once, by Triton's choice or by ptxas's (its messages C7500 to C7599). It also counts what an iteration
of each inner loop waits for, and exits with 1 if that is not what ``loops.txt`` says. ``--record`` writes this file.
``--json`` prints one object per kernel instead of the table. ``--what all`` on all targets takes about ten minutes on
one core. PyTorch and Triton must be installed; seqpar need not be.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.compiled import TARGETS, Resources, compile_for, resources, tma_errors
from triton_kernels.backward import Operands, dq_launch, keys_launch
from triton_kernels.configs import Config, entry, for_split, table, table_config
from triton_kernels.forward import forward_launch
from triton_kernels.hopper_forward import hopper_launch
from triton_kernels.launch import Launch
from triton_kernels.merge import merge_launch
from triton_kernels.preprocess import delta_launch, statistics_launch
from triton_kernels.rotary import rotary_launch

# ``Resources.loops`` of the table's entries, by Triton version, target, kernel, head_dims and dtype.
LOOPS = Path(__file__).with_name("loops.txt")
_VERSION = ".".join(triton.__version__.split(".")[:2])
_NEW = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 9)
# Bytes that CUDA's compiler may spill to local memory, by (kernel, largest head_dim, dtype); 0 for everything else.
SPILLS = {
    # tf32x3 keeps a high and a low half of each operand: no tile of 256 columns fits the registers.
    ("forward", 256, torch.float32): 64,
    ("dq", 256, torch.float32): 256,
    ("dkdv", 256, torch.float32): 400,
    ("dq", 128, torch.float32): 48,  # sm_120; every other tile that was tried spills there or on other GPUs
    ("dq", 64, torch.float32): 8,  # sm_86
    ("dkdv", 512, torch.bfloat16): 8,  # sm_120
    # None of it in the inner loops: see ``verdict``.
    **{("hopper", d, dtype): n for d, n in ((64, 56), (128, 192)) for dtype in (torch.bfloat16, torch.float16)},
    **({} if _NEW else {("dkdv", 256, torch.bfloat16): 32}),  # by the compilers of Triton 3.6 to 3.8
}
# The same with features of the scores, by (target, kernel, head_dim, feature).
FEATURE_SPILLS: dict[tuple[str, str, int, str], int] = {
    # Addresses of the accumulator's rows, which are read before the loops and written after them, and wait in between.
    ("sm_90", "forward", 576, "carry"): 104,
    ("sm_90", "forward", 576, "carry, last"): 16,
    ("sm_100", "forward", 576, "carry"): 56,
    ("sm_80", "backward", 64, "split"): 8,
    **(
        {}
        if _NEW
        else {
            ("sm_80", "dkdv", 128, "dropout"): 16,
            ("sm_90", "forward", 128, "dropout"): 448,  # 32 keys would fit, but softcap and ALiBi do with 64
            ("sm_100", "forward", 128, "dropout"): 128,
            ("sm_100", "forward", 64, "softcap"): 16,
            ("sm_100", "dq", 64, "softcap"): 8,
            ("sm_120", "forward", 64, "dropout"): 16,
        }
    ),
}
UNALIGNED_SPILLS = 256
# At head_dim 128 in half precision: the matrix instructions by target, and the products of tiles by kernel. The kernel
# "backward" has five products in one loop. The pair has four in one loop, and three in each of two loops.
NEWEST_MATRIX = {"sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma", "gfx950": "mfma"}
# Each of Hopper's two consumers starts one before its loops, two in each of two loops, and one after them.
PRODUCTS = {"backward": 5, "dkdv": 4, "dq": 6, "hopper": 12}
_SAME_TABLE = {"sm_86": ("sm_120",), "gfx942": ("gfx950",)}  # targets that use another's configurations
_BATCH, _SEQ, _HEADS, _KV_HEADS = 2, 8192, 16, 4


@dataclass(frozen=True)
class MetaIntervals:
    """Intervals of every query as tensors on the meta device, which have no data."""

    lo: Tensor = field(default_factory=lambda: _empty(1, _SEQ, dtype=torch.int32))
    hi: Tensor = field(default_factory=lambda: _empty(1, _SEQ, dtype=torch.int32))
    q_positions: Tensor = field(default_factory=lambda: _empty(_SEQ, dtype=torch.int32))
    k_positions: Tensor = field(default_factory=lambda: _empty(_SEQ, dtype=torch.int32))


@dataclass(frozen=True)
class MetaScore:
    """How scores are computed, with tensors on the meta device."""

    softmax_scale: float = 0.1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    head_offset: int = 0


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# What changes the code of the kernels: how scores are computed, and the forward's carry and last step.
SCORES = {
    "softcap": MetaScore(softcap=30.0),
    "alibi": MetaScore(alibi_slopes=_empty(_HEADS)),
    "dropout": MetaScore(dropout_p=0.1),
}
FORWARD_FEATURES: dict[str, dict[str, Any]] = {
    "carry": {"carry": True, "last": False},
    "carry, last": {"carry": True},
    "sinks": {"score": MetaScore(sinks=_empty(_HEADS))},
}


@dataclass(frozen=True)
class Case:
    """One kernel as it would be compiled for one call."""

    target: str
    kernel: str
    head_dim: int
    dtype: torch.dtype
    feature: str
    launch: Launch
    aligned: bool = True
    v_head_dim: int | None = None

    @property
    def needs_matrix(self) -> bool:
        """Whether the kernel computes products of tiles."""
        return self.kernel in ("forward", "hopper", "backward", "dkdv", "dq")


def table_cases(targets: list[str]) -> Iterator[Case]:
    """Every configuration in the table, with the plain kernel, on every target that uses it."""
    for architecture, kernel, (head_dim, v_head_dim), dtype in table():
        for target in targets:
            uses = {architecture, *_SAME_TABLE.get(architecture, ())}
            if dtype == torch.float32 and architecture == "sm_80":
                uses |= {"sm_86", "sm_90", "sm_100", "sm_120"}
            if target in uses:
                config = table_config(architecture, kernel, head_dim, dtype, v_head_dim=v_head_dim)
                hip = architecture.startswith("gfx")
                launch = attention(kernel, head_dim, dtype, config, v_head_dim=v_head_dim, hip=hip)
                yield Case(target, kernel, head_dim, dtype, "plain", launch, v_head_dim=v_head_dim)


def feature_cases(targets: list[str]) -> Iterator[Case]:
    """Every feature at head_dim 64 and 128 in half precision; the forward's carry and last step also at 576 and 512.

    The plain Hopper kernel is compiled for bfloat16, its features for float16."""
    dtype = torch.bfloat16
    for target in targets:
        architecture = next((name for name, others in _SAME_TABLE.items() if target in others), target)
        for feature, score in SCORES.items():
            for kernel in ("forward", "backward", "dkdv", "dq"):
                for head_dim in (64, 128):
                    config = entry(architecture, kernel, head_dim, dtype, heavy=True)
                    if config is None:
                        continue
                    yield Case(
                        target,
                        kernel,
                        head_dim,
                        dtype,
                        feature,
                        attention(kernel, head_dim, dtype, config, score=score),
                    )
        if architecture.startswith("sm"):
            for head_dim in (64, 128):
                config = for_split(table_config(architecture, "backward", head_dim, dtype))
                launch = attention("backward", head_dim, dtype, config, split=4)
                yield Case(target, "backward", head_dim, dtype, "split", launch)
                for kernel in ("backward", "dkdv", "dq"):
                    config = table_config(architecture, kernel, head_dim, dtype)
                    launch = attention(kernel, head_dim, dtype, config, new=True)
                    yield Case(target, kernel, head_dim, dtype, "stored", launch)
        for feature, options in FORWARD_FEATURES.items():
            for head_dim, v_head_dim in ((64, 64), (128, 128), (576, 512)):
                config = table_config(architecture, "forward", head_dim, dtype, v_head_dim=v_head_dim)
                launch = attention("forward", head_dim, dtype, config, v_head_dim=v_head_dim, **options)
                yield Case(target, "forward", head_dim, dtype, feature, launch, v_head_dim=v_head_dim)
            for head_dim in (64, 128) if target == "sm_90" else ():
                config = table_config(architecture, "hopper", head_dim, torch.float16)
                launch = attention("hopper", head_dim, torch.float16, config, **options)
                yield Case(target, "hopper", head_dim, torch.float16, feature, launch)


def unaligned_cases(targets: list[str]) -> Iterator[Case]:
    """Tensors of unknown alignment, such as slices and odd strides. They are read by pointers, two bytes at a time."""
    dtype = torch.bfloat16
    for target in targets:
        hip = target.startswith("gfx")
        for kernel in ("forward", "backward", "dkdv", "dq"):
            for head_dim in (64, 128):
                config = entry("gfx942" if hip else "sm_86", kernel, head_dim, dtype)  # as ``choose`` does
                if config is not None:
                    launch = attention(kernel, head_dim, dtype, config, hip=hip)
                    yield Case(target, kernel, head_dim, dtype, "unaligned", launch, aligned=False)


def small_cases(targets: list[str]) -> Iterator[Case]:
    """The kernels without products."""
    for target in targets:
        for name, launch in elementwise_launches().items():
            yield Case(target, name, 128, torch.bfloat16, "plain", launch)


def attention(
    kernel: str,
    head_dim: int,
    dtype: torch.dtype,
    config: Config,
    *,
    v_head_dim: int | None = None,
    score: MetaScore | None = None,
    carry: bool = False,
    last: bool = True,
    split: int = 1,
    new: bool = False,
    hip: bool = False,
) -> Launch:
    """The launch of an attention kernel (of ``configs.py``) on tensors of the meta device.

    ``new``: the gradients of one program are stored in ``dtype``, instead of added to float32.
    """
    intervals, score = MetaIntervals(), score or MetaScore()
    q = _empty(_BATCH, _SEQ, _HEADS, head_dim, dtype=dtype)
    k = _empty(_BATCH, _SEQ, _KV_HEADS, head_dim, dtype=dtype)
    v = _empty(_BATCH, _SEQ, _KV_HEADS, v_head_dim or head_dim, dtype=dtype)
    dout = _empty(_BATCH, _SEQ, _HEADS, v_head_dim or head_dim, dtype=dtype)
    lse = _empty(_BATCH, _HEADS, _SEQ)
    if kernel in ("forward", "hopper"):
        acc, lse_in = (_empty(*dout.shape), lse) if carry else (None, None)
        out = dout if last else _empty(*dout.shape)
        make = partial(
            hopper_launch if kernel == "hopper" else forward_launch, q, k, v, intervals, score, config=config
        )
        return make(acc=acc, lse_in=lse_in, out=out, lse=lse, last=last, hip=hip)
    dq, dk, dv = (_empty(*x.shape, dtype=dtype if new else torch.float32) for x in (q, k, v))
    if kernel == "backward":
        dq = _empty(*q.shape)
    operands = Operands(dout, q, k, v, _empty(2 * _BATCH * _HEADS, _SEQ), intervals, dq, dk, dv)
    if kernel == "dq":
        return dq_launch(operands, score, config, new=new, hip=hip)
    bounds, ranges = _empty(2, _SEQ, dtype=torch.int32), _empty(2, 1, 2 * _SEQ // config.block_n, dtype=torch.int32)
    with_dq = kernel == "backward"
    return keys_launch(operands, score, bounds, ranges, config, with_dq=with_dq, new=new, split=split, hip=hip)


def elementwise_launches() -> dict[str, Launch]:
    """Launches of the kernels without products, by name."""
    x, acc = _empty(_BATCH, _SEQ, _HEADS, 128, dtype=torch.bfloat16), _empty(_BATCH, _SEQ, _HEADS, 128)
    lse, table = _empty(_BATCH, _HEADS, _SEQ), _empty(1, _SEQ, 64)
    return {
        "statistics": statistics_launch(lse, lse, _empty(2 * _BATCH * _HEADS, _SEQ)),
        "delta": delta_launch(x, x, lse, lse),
        "merge": merge_launch(acc, lse, x, lse),
        "rotary": rotary_launch(x, x, table, table),
    }


def loops_key(case: Case) -> str:
    dtype = str(case.dtype).removeprefix("torch.")
    return f"{_VERSION} {case.target} {case.kernel} {case.head_dim} {case.v_head_dim or case.head_dim} {dtype}"


def loops_text(measured: Resources) -> str:
    return " ".join("/".join(map(str, loop)) for loop in measured.loops)


@lru_cache(maxsize=1)
def recorded_loops() -> dict[str, str]:
    """The lines of ``loops.txt``: the loops by ``loops_key``."""
    lines = [line.split("  ") for line in LOOPS.read_text().splitlines() if not line.startswith("#")]
    return {line[0]: line[1] for line in lines}


def record(rows: dict[str, str]) -> None:
    """Write these lines to ``loops.txt``, and keep the others."""
    lines = [f"{key}  {loops}" for key, loops in sorted((recorded_loops() | rows).items())]
    LOOPS.write_text(
        "# Written by gate.py --record: waits/barriers/spills of each inner loop.\n" + "\n".join(lines) + "\n"
    )


def verdict(case: Case, measured: Resources, descriptors: list[dict[str, Any]] | None = None) -> str:
    """A description of what is wrong with a compiled kernel; "" if nothing is."""
    allowed = (
        SPILLS.get((case.kernel, max(case.head_dim, case.v_head_dim or 0), case.dtype), 0)
        if not case.target.startswith("gfx")
        else 0
    )
    allowed = max(allowed, FEATURE_SPILLS.get((case.target, case.kernel, case.head_dim, case.feature), 0))
    if not case.aligned:  # addresses of single numbers take many registers, and such calls are rare
        allowed = UNALIGNED_SPILLS
    wrong = [] if measured.spilled_bytes <= allowed else [f"spills {measured.spilled_bytes} bytes"]
    if not measured.fits(case.target):
        wrong.append(
            f"{measured.shared_bytes} bytes of shared memory, {measured.tensor_columns} columns of tensor memory"
        )
    if case.needs_matrix and not measured.matrix:
        wrong.append("no matrix instructions")
    if case.head_dim == 128 and case.dtype == torch.bfloat16 and case.feature == "plain" and case.needs_matrix:
        newest, products = NEWEST_MATRIX.get(case.target), PRODUCTS.get(case.kernel)
        if newest and measured.matrix != newest:
            wrong.append(f"{measured.matrix} instead of {newest}")
        if case.target == "sm_90" and products and measured.products != products:
            wrong.append(f"{measured.products} products instead of {products}")
    if case.kernel == "hopper" and (len(measured.loops) != 4 or any(spills for _, _, spills in measured.loops[1::2])):
        wrong.append("spills in the inner loops")  # each consumer has a loop of masked tiles and one of inner tiles
    if measured.synchronous:
        wrong.append(f"{measured.synchronous} products are waited for at once")
    # At head_dim 256 half of the warps' registers hold the accumulators, and Triton reloads one factor.
    if measured.reloaded and case.head_dim <= 128 and case.aligned:
        wrong.append(f"{measured.reloaded} tiles go through registers")
    known = recorded_loops().get(loops_key(case)) if case.feature == "plain" else None
    if known not in (None, loops_text(measured)):
        wrong.append(f"loops {loops_text(measured)} instead of {known}")
    # With dropout, the order of products in which dkdv's do not wait for one another would spill (``_accumulate``).
    if measured.serialized and (case.kernel, case.feature) != ("dkdv", "dropout"):
        wrong.append(f"ptxas {measured.serialized}: products wait for one another")
    wrong += tma_errors(case.launch, descriptors)
    return ", ".join(wrong)


def inspect(cases: Iterator[Case]) -> Iterator[dict[str, Any]]:
    """Compile the cases and yield one row for each."""
    for case in cases:
        config = case.launch.config
        compiled = compile_for(case.launch, case.target, aligned=case.aligned)
        measured = resources(compiled, case.target)
        yield {
            "target": case.target,
            "kernel": case.kernel,
            "head_dim": case.head_dim,
            "v_head_dim": case.v_head_dim or case.head_dim,
            "dtype": str(case.dtype).removeprefix("torch."),
            "feature": case.feature,
            "config": asdict(config),
            **asdict(measured),
            "key": loops_key(case),
            "wrong": verdict(case, measured, getattr(compiled.metadata, "tensordesc_meta", None)),
        }


def _print(row: dict[str, Any]) -> None:
    config = row["config"]
    tile = f"{config['block_m']}x{config['block_n']}"
    options = f"{config['num_warps']}w {config['num_stages']}s{' tma' if config['tma'] else ''}"
    print(
        f"{row['target']:7} {row['kernel']:15} {row['head_dim']:>4} {row['v_head_dim']:>4} "
        f"{row['dtype']:9} {row['feature']:12} {tile:>8} "
        f"{options:9} {row['registers']:>5} {row['spilled_bytes']:>7} {row['shared_bytes']:>8} {row['matrix']:8} "
        f"{row['products']:>8} {row['reloaded']:>8} {row['occupancy']:>9} {row['wrong']}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", metavar="ARCH", help=", ".join(TARGETS))
    parser.add_argument("--what", default="table", choices=("table", "features", "unaligned", "small", "all"))
    parser.add_argument(
        "--head-dim",
        action="append",
        type=int,
        help="of q and k: 64, 128, 192 (beside 128 of v), 256, 512, 576 (beside 512 of v; default: all)",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: both")
    parser.add_argument(
        "--record", action="store_true", help="write loops.txt; only for the plain kernels of the table"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args(argv)
    targets = arguments.target or list(TARGETS)
    chosen = {"table": table_cases, "features": feature_cases, "unaligned": unaligned_cases, "small": small_cases}
    if not arguments.json:
        print(
            "target  kernel      head_dim: q, v dtype     feature          tile options   regs spilled   shared "
            "matrix   products reloaded occupancy wrong"
        )
    wrong, loops = 0, dict[str, str]()
    for name, cases in chosen.items():
        if arguments.what in (name, "all"):
            wanted = (
                case
                for case in cases(targets)
                if (not arguments.head_dim or case.head_dim in arguments.head_dim)
                and (arguments.dtype is None or str(case.dtype) == f"torch.{arguments.dtype}")
            )
            for row in inspect(wanted):
                wrong += bool(row["wrong"])
                if row["loops"] and row["feature"] == "plain":
                    loops[row["key"]] = " ".join("/".join(map(str, loop)) for loop in row["loops"])
                print(json.dumps(row), flush=True) if arguments.json else _print(row)
    if arguments.record:
        record(loops)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
