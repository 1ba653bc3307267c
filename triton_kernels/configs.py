"""Tile sizes by architecture, kernel, dtype and head_dim.

Every configuration in the table compiles without spilling registers and fits the shared memory of its GPUs, except
float32 at head_dim 256: tf32x3 keeps a high and a low half of each operand, which spills at every tile size. ``dq`` in
float32 spills up to 48 bytes on sm_86 and sm_120, because every tile size that was tried spills on some GPU. At head_dim
512 and above, the forward with a carry spills up to 104 bytes outside its loops on sm_90 and sm_100. There, the tiles of
the backward are too small for Hopper's asynchronous products, because ``dk`` and ``dv`` of 64 keys alone would fill the
registers. ``python tools/gate.py`` prints the resources of each configuration. A call uses the
configuration that these rules select:

* The head_dims of q and k and of v are rounded up to 64, 128, 256, or 512 for both, to 256 and 128, or to 576 and 512
  (multi-head latent attention over the compressed keys: 512 and 64 columns in two tiles).
* Compute capability 8.0 uses ``sm_80``, 9.0 ``sm_90``, 10.x ``sm_100``. Every other CUDA GPU uses ``sm_86``, which stays
  within the 99 KB of shared memory that desktop cards (Ampere, Ada, Blackwell) have; so does a call whose tensors TMA
  cannot read. Every ROCm GPU uses ``gfx942``, which stays within 64 KB.
* float32 on CUDA uses the same small tiles on every architecture, because it computes three tf32 products for each
  product (see ``launch.precision``).

With ``SEQPAR_TRITON_AUTOTUNE=1``, :func:`candidates` are measured instead, and the fastest is stored (``tune.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch


@dataclass(frozen=True)
class Config:
    """One way to compile a kernel.

    Attributes:
        block_m: queries in a tile.
        block_n: keys in a tile (0 where a kernel has none).
        num_warps: warps of one program.
        num_stages: depth of the pipeline that loads tiles ahead of the loop.
        tma: read the tiles of the inner loop by TMA, Hopper's bulk copy engine, where their layout allows it.
        instruction: rows of a matrix instruction on ROCm, 16 or 32; 0 leaves it to Triton.
        registers: of a thread, at most; 0 leaves it to Triton.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2
    tma: bool = False
    instruction: int = 0
    registers: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Triton's compile options."""
        # Scores are scaled and shifted in one fused multiply-add, whatever Triton's default.
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
        more = {"matrix_instr_nonkdim": self.instruction, "maxnreg": self.registers}
        return options | {name: value for name, value in more.items() if value}


_INTERPRETED = Config(64, 64)
_KERNELS = ("forward", "hopper", "backward", "dkdv", "dq")
# The largest head_dims, of q and k and of v, for each column of the table. A call uses the first column that fits both.
_COLUMNS = ((64, 64), (128, 128), (256, 128), (256, 256), (512, 512), (576, 512))
# The head_dims with which each column is compiled ahead of time. 192 and 128 are DeepSeek-V3's.
_COMPILED = ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512))
# By architecture, bytes of an element and kernel, a configuration for each column: block_m x block_n, w warps, s stages,
# t where TMA reads the tiles, i rows of a matrix instruction, r registers of a thread. "-": there is none.
_GRID = """
#                    64, 64        128, 128      256, 128      256, 256      512, 512      576, 512
sm_80   2  forward   128x64w8s3    128x32w8s3    128x64w8s2    64x32w8s2     32x32w8s2     32x32w8s2
sm_80   2  backward  32x128w8s2    64x64w8s2     -             -             -             -
sm_80   2  dkdv      32x128w8s2    64x64w8s2     32x64w8s2     32x32w8s2     16x32w8s1     32x16w8s2
sm_80   2  dq        128x64w8s2    64x64w8s2     64x32w8s2     64x16w8s2     32x16w8s1     32x32w8s2

sm_86   2  forward   128x64w8s3    128x32w8s3    128x32w8s2    64x32w8s2     32x16w8s1     32x16w8s1
sm_86   2  backward  32x128w8s2    32x64w8s2     -             -             -             -
sm_86   2  dkdv      32x128w8s2    32x64w8s2     32x64w8s2     32x32w8s2     16x16w8s1     16x16w8s1
sm_86   2  dq        128x64w8s2    64x64w8s2     64x32w8s2     64x16w8s2     16x16w8s2     16x16w8s2

sm_90   2  forward   128x64w4s3t   128x128w8s2t  128x64w8s2t   128x64w8s2t   64x32w8s2t    64x32w8s2t
# registers for three groups of four warps; the consumers then take most of the producer's
sm_90   2  hopper    128x128w4s4tr168  128x128w4s2tr168  -    -             -             -
sm_90   2  backward  128x128w8s2t  64x128w8s2t   32x64w8s2t    32x64w8s2t    -             -
sm_90   2  dkdv      128x128w8s2t  64x128w8s2t   64x64w8s2t    32x64w8s2t    32x32w8s1     32x16w8s2t
sm_90   2  dq        128x64w8s2t   128x64w8s2t   64x64w8s2t    64x32w8s2t    32x32w8s2t    32x32w8s2t

sm_100  2  forward   128x64w4s3t   128x128w8s2t  128x64w8s2t   128x32w8s2t   64x32w8s2t    64x32w8s2t
# 256 and 128: spills under Triton 3.6, or needs more columns than tensor memory has
sm_100  2  backward  64x128w8s2t   64x128w8s1t   -             32x64w8s1t    -             -
sm_100  2  dkdv      64x128w8s1t   64x128w8s1t   32x64w8s1     64x64w8s1t    32x32w8s1     32x16w8s2t
sm_100  2  dq        128x64w4s2t   128x64w8s2t   64x64w8s1t    64x64w8s1t    32x32w8s1t    32x32w8s1t

gfx942  2  forward   128x64w4s1    128x64w4s1    64x32w4s1     64x32w4s1     32x16w4s1     32x16w4s1
# with rows of 16, two programs at head_dim 128 fit a processor's registers at a time
gfx942  2  dkdv      64x64w4s1i16  32x64w4s1i16  16x64w4s1i16  16x32w4s1i16  16x16w4s1i16  16x32w4s1i16
gfx942  2  dq        128x64w8s1    128x32w8s1    64x16w4s1     64x16w4s1     16x16w4s1     32x16w4s1

sm_80   4  forward   32x64w8s1     16x64w8s1     16x16w8s1     16x16w8s1     -             -
sm_80   4  dkdv      32x32w4s1     16x16w8s1     32x16w8s1     32x16w8s1     -             -
sm_80   4  dq        16x32w4s1     16x32w8s1     16x16w8s1     16x16w8s1     -             -

gfx942  4  forward   64x32w4s1     64x32w4s1     32x32w4s1     32x32w4s1     -             -
gfx942  4  dkdv      32x32w4s1     16x32w4s1     16x16w4s1     16x16w4s1     -             -
gfx942  4  dq        32x32w4s1     32x32w4s1     16x16w4s1     16x16w4s1     -             -
"""


def _parse(grid: str) -> dict[tuple[str, int], dict[str, list[Config | None]]]:
    """(architecture, bytes of an element) -> kernel -> the configuration of each column."""
    table: dict[tuple[str, int], dict[str, list[Config | None]]] = {}
    for line in grid.splitlines():
        if line and not line.startswith("#"):
            architecture, size, kernel, *cells = line.split()
            table.setdefault((architecture, int(size)), {})[kernel] = [parse_cell(cell) for cell in cells]
    return table


def parse_cell(cell: str) -> Config | None:
    """The configuration of a cell of the table."""
    if cell == "-":
        return None
    found = re.fullmatch(r"(\d+)x(\d+)w(\d+)s(\d+)(t?)(?:i(\d+))?(?:r(\d+))?", cell)
    assert found is not None, cell
    m, n, warps, stages, tma, instruction, registers = found.groups()
    return Config(int(m), int(n), int(warps), int(stages), bool(tma), int(instruction or 0), int(registers or 0))


_TABLE = _parse(_GRID)


def architecture(device: torch.device) -> str:
    """The architecture in the table whose configurations ``device`` uses; "interpreter" on a CPU."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip:
        return "gfx942"
    return _cuda_architecture(device)


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """About how many thread blocks of an attention kernel the GPU runs at a time; 1 on a CPU."""
    return 1 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=64)
def _cuda_architecture(device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    return {(8, 0): "sm_80", (9, 0): "sm_90"}.get(capability, "sm_100" if capability[0] == 10 else "sm_86")


@lru_cache(maxsize=1024)
def entry(
    architecture: str,
    kernel: str,
    head_dim: int,
    dtype: torch.dtype,
    heavy: bool = False,
    v_head_dim: int | None = None,
) -> Config | None:
    """As :func:`table_config`; None for "backward" if no tile of this kernel fits the registers, so that "dkdv" and
    "dq" are used instead."""
    size = dtype.itemsize
    if size == 4 and architecture.startswith("sm"):
        architecture = "sm_80"
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    most, v_most = most_head_dims(dtype)
    if head_dim > most or v_head_dim > v_most:
        raise ValueError(f"head_dim={head_dim}, {v_head_dim} of v: expected at most {most}, {v_most} of v, in {dtype}")
    column = next(i for i, (d, e) in enumerate(_COLUMNS) if head_dim <= d and v_head_dim <= e)
    kernels = _TABLE[architecture, size]
    config = kernels[kernel][column] if kernel in kernels else None
    if not heavy or config is None:
        return config
    if kernel == "backward" and config.block_n >= 4 * config.block_m:  # 16 queries of 128 keys spill on sm_120
        return replace(config, block_n=config.block_n // 2)
    if kernel in ("backward", "dkdv"):
        return replace(config, block_m=max(16, config.block_m // 2))
    warps = 8 if architecture.startswith("sm") else config.num_warps
    return replace(config, block_n=max(16, config.block_n // 2), num_warps=warps)


def most_head_dims(dtype: torch.dtype) -> tuple[int, int]:
    """The largest head_dims, of q and k and of v, that there are tiles for."""
    return (576, 512) if dtype.itemsize == 2 else (256, 256)


def table_config(
    architecture: str,
    kernel: str,
    head_dim: int,
    dtype: torch.dtype,
    heavy: bool = False,
    v_head_dim: int | None = None,
) -> Config:
    """The configuration in the table.

    Args:
        architecture: "sm_80", "sm_90", "sm_100" or "gfx942".
        kernel: "forward", "hopper", "backward", "dkdv" or "dq".
        head_dim: of q and k, up to :func:`most_head_dims`.
        dtype: of the inputs.
        heavy: whether scores need more registers than a scaled product does (softcap, ALiBi, dropout). The tile of the
            inner loop is then halved (of 32 queries of 128 keys in "backward", the keys), and CUDA uses 8 warps.
        v_head_dim: of v; by default ``head_dim``.

    Raises:
        ValueError: a head_dim is too large, or the table has no such entry.
    """
    config = entry(architecture, kernel, head_dim, dtype, heavy, v_head_dim)
    if config is None:
        raise ValueError(f"no configuration of {kernel} for {architecture}, head_dim={head_dim}, {dtype}")
    return config


def choose(
    kernel: str,
    device: torch.device,
    head_dim: int,
    dtype: torch.dtype,
    *,
    v_head_dim: int | None = None,
    heavy: bool = False,
    tma: bool = True,
) -> Config | None:
    """The configuration for a call on ``device``; None if :func:`entry` is None.

    Args:
        kernel, head_dim, dtype, v_head_dim, heavy: of :func:`table_config`.
        device: where the tensors are.
        tma: whether the tensors are laid out as TMA needs it. Tiles for TMA are too large to be read by pointers.
    """
    name = architecture(device)
    if name == "interpreter":  # as in the table, there is no such kernel above 512
        return None if kernel == "backward" and head_dim > 512 else _INTERPRETED
    config = entry(name, kernel, head_dim, dtype, heavy, v_head_dim)
    if config is None or tma or not config.tma:
        return config
    return entry("sm_86", kernel, head_dim, dtype, heavy, v_head_dim)


def for_split(config: Config) -> Config:
    """``config`` of "backward", adapted to programs that share the query heads of a KV head. They add ``dk`` and ``dv``
    with atomics. The addresses of the atomics need registers, and large tiles read by pointers leave too few."""
    return config if config.tma else replace(config, block_m=min(config.block_m, 32))


def table() -> Iterator[tuple[str, str, tuple[int, int], torch.dtype]]:
    """All entries, as (architecture, kernel, head_dims of q and k and of v, dtype), for ahead-of-time compilation."""
    for architecture, size in _TABLE:
        dtype = torch.bfloat16 if size == 2 else torch.float32
        for kernel in _KERNELS:
            for dims in _COMPILED:
                if size == 4 and (max(dims) > 256 or dims == (192, 128)):  # no tiles, and the tiles of 256
                    continue
                if entry(architecture, kernel, dims[0], dtype, v_head_dim=dims[1]) is not None:
                    yield architecture, kernel, dims, dtype


def candidates(
    kernel: str,
    device: torch.device,
    head_dim: int,
    dtype: torch.dtype,
    *,
    v_head_dim: int | None = None,
    heavy: bool = False,
    tma: bool = True,
) -> list[Config]:
    """The table's configuration and its neighbours, for autotuning. Some may not fit the GPU."""
    first = choose(kernel, device, head_dim, dtype, v_head_dim=v_head_dim, heavy=heavy, tma=tma)
    assert first is not None
    tried = [first]
    for block_m in sorted({first.block_m, max(16, first.block_m // 2), min(128, first.block_m * 2)}):
        for block_n in sorted({first.block_n, max(16, first.block_n // 2), min(128, first.block_n * 2)}):
            for num_warps in (4, 8):
                for num_stages in sorted({max(1, first.num_stages - 1), first.num_stages, first.num_stages + 1}):
                    config = replace(
                        first, block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages
                    )
                    if config not in tried:
                        tried.append(config)
    return tried
