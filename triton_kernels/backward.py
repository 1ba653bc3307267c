"""The launches of the backward's kernels: their tensors, their configurations, and new or given buffers.

``backward_kernels.py`` explains the kernels.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from . import tune
from .backward_kernels import backward_kernel, dq_kernel
from .configs import Config, choose, for_split, processors
from .launch import (
    Launch,
    Repeated,
    describable,
    descriptors,
    dies,
    if_tail,
    layout_key,
    precision,
    strides,
    unit_stride,
    widths,
)
from .preprocess import bounds_and_ranges, statistics
from .tiles import Constants, IntervalsLike, ScoreLike, score_arguments, score_constants, score_values


class Operands(NamedTuple):
    """The tensors of a backward on which no configuration depends: see :func:`attention_backward`."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    statistics: Tensor  # from preprocess.statistics
    intervals: IntervalsLike
    dq: Tensor
    dk: Tensor
    dv: Tensor


def _arguments(
    operands: Operands, score: ScoreLike, config: Config, tma: bool, allow_tf32: bool | None, hip: bool | None
) -> dict[str, Any]:
    """Arguments that both kernels take."""
    dout, q, k, v, statistics, intervals, dq, dk, dv = operands
    heads = q.shape[2]
    constants = Constants(
        **widths(q, v),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        GROUP=heads // k.shape[2],
        PRECISION=precision(q.dtype, allow_tf32, hip),
        TMA=tma,
        DIES=dies(hip),
        **score_constants(score),
    )
    return {
        **strides(q=q, k=k, v=v, d=dout, dq=dq, dk=dk, dv=dv),
        **score_arguments(score, heads),
        "softmax_scale": score.softmax_scale,
        "Q_POSITIONS": intervals.q_positions,
        "K_POSITIONS": intervals.k_positions,
        "heads": heads,
        "q_len": q.shape[1],
        "q_padded": statistics.shape[1],
        "k_len": k.shape[1],
        "C": constants,
    }


def keys_launch(
    operands: Operands,
    score: ScoreLike,
    bounds: Tensor,
    ranges: Tensor,
    config: Config,
    *,
    with_dq: bool = False,
    new: bool = False,
    split: int = 1,
    allow_tf32: bool | None = None,
    hip: bool | None = None,
) -> Launch:
    """The launch of ``backward_kernel``.

    Args:
        operands, score: the tensors, all of them allocated, and how scores are computed.
        bounds: from ``preprocess.padded_bounds``.
        ranges: from ``preprocess.query_ranges``, for tiles of ``config.block_n``.
        config: tile sizes.
        with_dq: add to ``dq`` too, in an order that changes from run to run.
        new: whether ``dk`` and ``dv`` are uninitialised.
        split: how many programs share the query heads of a KV head.
        allow_tf32: of float32 inputs; None follows ``torch.get_float32_matmul_precision``.
        hip: whether the GPU is one of ROCm's; None asks PyTorch.
    """
    dout, q, k, v, statistics, _, dq, dk, dv = operands
    batch, k_len, kv_heads, _ = k.shape
    tiles = triton.cdiv(k_len, config.block_n)
    tiled = {"Q": (q, config.block_m), "DOUT": (dout, config.block_m)}
    if with_dq:
        tiled["DQ"] = dq, config.block_m
    streamed, tma = descriptors(config, tiled, {"STATISTICS": (statistics, config.block_m)})
    arguments = {
        **_arguments(operands, score, config, tma, allow_tf32, hip),
        "DQ": None,
        **streamed,
        "BOUNDS": bounds,
        "K": k,
        "V": v,
        "DK": dk,
        "DV": dv,
        "RANGES": ranges,
        "row_sets": bounds.shape[0] // 2,
        "tiles": tiles,
        "WITH_DQ": with_dq,
        "NEW": new,
        "SPLIT": split,
    }
    return Launch(backward_kernel, batch * kv_heads * split * tiles, arguments, config)


def dq_launch(
    operands: Operands,
    score: ScoreLike,
    config: Config,
    *,
    new: bool = False,
    allow_tf32: bool | None = None,
    hip: bool | None = None,
) -> Launch:
    """The launch of ``dq_kernel``. ``new``: whether ``dq`` is uninitialised."""
    dout, q, k, v, statistics, intervals, dq, _, _ = operands
    batch, q_len, heads, _ = q.shape
    tiles = triton.cdiv(q_len, config.block_m)
    streamed, tma = descriptors(config, {"K": (k, config.block_n), "V": (v, config.block_n)})
    arguments = {
        **_arguments(operands, score, config, tma, allow_tf32, hip),
        **streamed,
        "Q": q,
        "DOUT": dout,
        "STATISTICS": statistics,
        "DQ": dq,
        "LO": intervals.lo.contiguous(),
        "HI": intervals.hi.contiguous(),
        "stride_rows": 0 if intervals.lo.shape[0] == 1 else q_len,
        "tiles": tiles,
        "NEW": new,
    }
    return Launch(dq_kernel, batch * heads * tiles, arguments, config)


_keys_launches = Repeated(
    "Q", "Q_TAIL", "K", "V", "DOUT", "DQ", "DK", "DV", "STATISTICS", "BOUNDS", "RANGES", "Q_POSITIONS", "K_POSITIONS",
    "ALIBI_SLOPES", "seed",
)  # fmt: skip
_dq_launches = Repeated(
    "Q", "K", "K_TAIL", "V", "DOUT", "DQ", "STATISTICS", "LO", "HI", "Q_POSITIONS", "K_POSITIONS", "ALIBI_SLOPES",
    "seed",
)  # fmt: skip


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    intervals: IntervalsLike,
    score: ScoreLike,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    new_dq: bool = False,
    new_dkv: bool = False,
    deterministic: bool = False,
    allow_tf32: bool | None = None,
    config: Config | None = None,
    dq_config: Config | None = None,
) -> None:
    """Add the gradients of :func:`~.forward.attention_forward` over these keys to ``dq, dk, dv``.

    The caller computes the gradient of the sinks from ``lse`` and ``delta``.

    Args:
        dout: ``[batch, q_len, heads, v_head_dim]`` in the dtype of ``q``.
        q, k, v, intervals, score, allow_tf32: the forward's.
        lse: float32 ``[batch, heads, q_len]``, the final log-sum-exp: over all keys, sinks included.
        delta: float32 ``[batch, heads, q_len]``, from :func:`~.preprocess.delta`.
        dq, dk, dv: float32, shapes of ``q``, ``k`` and ``v``; added to in place. New ones may have other dtypes.
        new_dq, new_dkv: whether ``dq``, and ``dk`` and ``dv``, are uninitialised, so that the gradients are written.
            Sums are rounded once, and are computed in float32 tensors if several programs add to an element.
        deterministic: whether the gradients must have the same bits in every run.
        config: tile sizes of ``backward_kernel``; None takes them from the table.
        dq_config: tile sizes of ``dq_kernel``, which runs if deterministic; None takes them from the table.

    Raises:
        ValueError: a ``softmax_scale`` that is not positive.
    """
    gradients = (dq, new_dq), (dk, new_dkv), (dv, new_dkv)
    if q.numel() == 0 or k.numel() == 0:
        for x, new in gradients:
            if new:
                x.zero_()
        return
    dense = [_sums(dq) if not deterministic else unit_stride(dq), unit_stride(dk), unit_stride(dv)]
    dout, q, k, v = (unit_stride(x) for x in (dout, q, k, v))
    operands = Operands(dout, q, k, v, statistics(lse, delta), intervals, *dense)
    mask = tune.mask_class(intervals) if tune.wanted(q) else None
    asked = deterministic, allow_tf32, config, dq_config, mask
    features = score.softcap > 0, score.alibi_slopes is None, score.dropout_p > 0
    key = layout_key(q.get_device(), (asked, features), (q, k, v, dout, dense[0]))
    choice = _choices.get(key)
    if choice is None:
        if len(_choices) >= 4096:
            _choices.clear()
        choice = _choices[key] = _choose(operands, score, *asked)
    keys_config, other_config, split = choice
    with_dq = other_config is None
    if split > 1:
        dense[1:] = map(_sums, dense[1:])
        operands = operands._replace(dk=dense[1], dv=dense[2])
    # If several programs add to an element, it must be 0 first.
    zeroed = [*(dense[:1] if with_dq and new_dq else []), *(dense[1:] if split > 1 and new_dkv else [])]
    for x in zeroed:
        x.zero_()
    store_dkv = new_dkv and split == 1

    bounds, ranges = bounds_and_ranges(intervals.lo, intervals.hi, k.shape[1], keys_config.block_n)
    values = score_values(score), precision(q.dtype, allow_tf32)
    positions = intervals.q_positions, intervals.k_positions, score.alibi_slopes, score.dropout_seed
    _keys_launches(
        (q, if_tail(q), k, v, dout, dense[0] if with_dq else None, *dense[1:], operands.statistics, bounds, ranges, *positions),
        (values, keys_config, with_dq, store_dkv, split),
        lambda: keys_launch(
            operands, score, bounds, ranges, keys_config, with_dq=with_dq, new=store_dkv, split=split,
            allow_tf32=allow_tf32,
        ),
    )  # fmt: skip
    if other_config is not None:
        _dq_launches(
            (q, k, if_tail(k), v, dout, dense[0], operands.statistics, intervals.lo, intervals.hi, *positions),
            (values, other_config, new_dq),
            lambda: dq_launch(operands, score, other_config, new=new_dq, allow_tf32=allow_tf32),
        )  # fmt: skip
    for (given, _), used in zip(gradients, dense, strict=True):
        if used is not given:
            given.copy_(used)


def _sums(x: Tensor) -> Tensor:
    """A tensor to which several programs can add: ``x``, or one like it in float32."""
    return unit_stride(x) if x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)


class _Configs(NamedTuple):
    """How a backward is computed: tile sizes of both kernels (None if the first computes ``dq`` too), and the split."""

    keys: Config
    dq: Config | None
    split: int


_choices: dict[Hashable, _Configs] = {}  # by dtypes, shapes, strides, device and options


def _choose(
    operands: Operands,
    score: ScoreLike,
    deterministic: bool,
    allow_tf32: bool | None,
    config: Config | None,
    dq_config: Config | None,
    mask: str | None,
) -> _Configs:
    """The configuration of a call. ``mask`` is the class of the mask if the tile sizes are to be tuned, else None."""
    q, k, v_head_dim = operands.q, operands.k, operands.v.shape[-1]
    features = score_constants(score)
    heavy = any(features.values())
    streamed = {"backward": (q, operands.dout, operands.dq), "dkdv": (q, operands.dout), "dq": (k, operands.v)}
    tma = {kernel: all(describable(x) for x in tiled) for kernel, tiled in streamed.items()}

    def chosen(kernel: str) -> Config | None:
        return choose(kernel, q.device, q.shape[-1], q.dtype, v_head_dim=v_head_dim, heavy=heavy, tma=tma[kernel])

    one = None if deterministic else chosen("backward")
    if config is not None or dq_config is not None or mask is None:
        keys_config = config or one or chosen("dkdv")
        assert keys_config is not None
        if one is not None:
            split = _split(k, q.shape[2], keys_config.block_n)
            return _Configs(keys_config if config or split == 1 else for_split(keys_config), None, split)
        return _Configs(keys_config, dq_config or chosen("dq"), 1)
    names = ("backward",) if one else ("dkdv", "dq")
    # Candidates run many times, so they write to scratch gradients.
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (operands.dq, operands.dk, operands.dv))
    scratch = operands._replace(dq=dq, dk=dk, dv=dv)
    flags = f"{''.join(str(feature) for feature in features.values())} {mask}"

    def candidate(kernel: str, config: Config) -> Launch:
        if kernel == "dq":
            return dq_launch(scratch, score, config, allow_tf32=allow_tf32)
        split = _split(k, q.shape[2], config.block_n) if one else 1
        tables = bounds_and_ranges(operands.intervals.lo, operands.intervals.hi, k.shape[1], config.block_n)
        return keys_launch(scratch, score, *tables, config, with_dq=one is not None, split=split, allow_tf32=allow_tf32)

    best = [
        tune.tuned(name, q, k, flags, partial(candidate, name), v_head_dim=v_head_dim, heavy=heavy, tma=tma[name])
        for name in names
    ]
    return _Configs(best[0], None, _split(k, q.shape[2], best[0].block_n)) if one else _Configs(best[0], best[1], 1)


def _split(k: Tensor, heads: int, block: int) -> int:
    """How many programs share the query heads of a KV head, so that there are two for each processor of the GPU."""
    batch, k_len, kv_heads, _ = k.shape
    programs, group = batch * kv_heads * triton.cdiv(k_len, block), heads // kv_heads
    wanted = 2 * processors(k.device)
    return next((n for n in range(1, group) if group % n == 0 and n * programs >= wanted), group)
