"""Fake kernels of libraries that need a GPU. They have the signatures of the real kernels and run PyTorch on the CPU.

A fake kernel checks the requirements of the real one (shapes, dtypes, strides, alignment, ranges). It computes the same
results for the same bands, which are aligned to the bottom right corner, or with cuDNN to the top left corner. It
treats queries without keys like the real kernel. With ``like_a_kernel`` it also rounds the probabilities and their
gradients before they are multiplied, as the real kernel does. Otherwise it rounds only the results.

The signatures are those of flash_attn_interface.py in flash-attn 2.8.3 and in its folder hopper, of
flash_attn/cute/interface.py in flash-attn-4 4.0.0b36, and of native_functions.yaml in PyTorch 2.13.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from seqpar.kernels import BACKENDS, block_lists, cudnn, flash, library

LIBRARIES = ("flash", "cudnn", "flash_attn", "flash_attn_3", "flash_attn_4")


class BlockSparseTensorsTorch(NamedTuple):
    """A copy of the class in flash_attn.cute.block_sparsity."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_block_idx_offsets: Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


@dataclass
class Kernels:
    """The arithmetic and the checks that all fake kernels share.

    Attributes:
        like_a_kernel: whether to round intermediate results as the real kernels do.
        capability: the compute capability of the simulated GPU.
        calls: how often each function was called.
    """

    like_a_kernel: bool = False
    capability: tuple[int, int] = (9, 0)
    calls: Counter[str] = field(default_factory=Counter)

    # Arithmetic

    def _rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype) if self.like_a_kernel else x

    def _scores(self, q: Tensor, k: Tensor, seen: Tensor, scale: float, cap: float) -> tuple[Tensor, Tensor]:
        """The scores of ``q [q, h, d]`` and ``k [k, n, d]``, and their derivatives by q.k, each ``[h, q, k]``."""
        group = q.shape[1] // k.shape[1]
        precision = torch.float32 if self.like_a_kernel else torch.float64
        s = torch.einsum("qhd,khd->hqk", q.to(precision), k.to(precision).repeat_interleave(group, 1)) * scale
        derivative = torch.full_like(s, scale)
        if cap:
            s = torch.tanh(s / cap)
            derivative = scale * (1 - s * s)
            s = cap * s
        return s.masked_fill(~seen, -torch.inf), derivative

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, cap: float) -> tuple[Tensor, Tensor]:
        """``out [q, h, d]`` and ``lse [h, q]`` of one sequence. ``seen`` is bool ``[q, k]``."""
        s, _ = self._scores(q, k, seen, scale, cap)
        largest = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:2], 1), -torch.inf)
        largest = largest.masked_fill(largest == -torch.inf, 0.0)
        p = torch.exp(s - largest)
        total = p.sum(-1)  # [h, q]
        values = v.to(s.dtype).repeat_interleave(q.shape[1] // v.shape[1], 1)
        out = torch.einsum("hqk,khd->hqd", self._rounded(p, q.dtype), values) / total.clamp(min=1e-30)[..., None]
        return out.transpose(0, 1).to(q.dtype), (total.log() + largest[..., 0]).float()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Tensor, scale: float,
        cap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """``dq, dk, dv`` of one sequence, shaped like ``q, k, v``."""
        s, derivative = self._scores(q, k, seen, scale, cap)
        group = q.shape[1] // k.shape[1]
        real_dout, real_out, real_q, real_k, real_v = (x.to(s.dtype) for x in (dout, out, q, k, v))
        real_k, real_v = (x.repeat_interleave(group, 1) for x in (real_k, real_v))
        p = torch.exp(s - lse[..., None].to(s.dtype)).nan_to_num(0.0)
        dp = torch.einsum("qhd,khd->hqk", real_dout, real_v)
        delta = (real_dout * real_out).sum(-1).T  # [h, q]
        ds = self._rounded(p * (dp - delta[..., None]) * derivative, q.dtype)
        dq = torch.einsum("hqk,khd->qhd", ds, real_k)
        dk = torch.einsum("hqk,qhd->khd", ds, real_q)
        dv = torch.einsum("hqk,qhd->khd", self._rounded(p, q.dtype), real_dout)
        if self.like_a_kernel and group > 1:  # flash-attn rounds the gradients of each query head before it adds them
            dk, dv = (x.to(q.dtype).to(s.dtype) for x in (dk, dv))
        dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    # Shared by the fake kernels

    def check_dims(self, library: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Check that a library accepts the head_dims, in forward and in backward.

        Sources: ``flash_api.cpp`` of flash-attn 2, of PyTorch's copy and of FlashAttention-3, ``_validate_head_dims``
        in FlashAttention-4's ``interface.py``, and the documentation of cuDNN.
        """
        d, e = q.shape[-1], v.shape[-1]
        assert k.shape[-1] == d
        most = 256 if self.capability[0] == 9 else 128
        known = {
            "flash": d == e <= 256,
            "flash_attn": d == e <= 256,
            "flash_attn_3": d == e <= 256 or (128 < d <= 192 and 96 < e <= 128),
            "flash_attn_4": max(d, e) <= most or (d, e) in ((192, 128), (256, 256)),
            "cudnn": max(d, e) <= 128 or (d, e) == (192, 128),
        }
        assert known[library], f"{library}: head_dim {d} of q and k, {e} of v"

    def run(
        self, tensors: tuple[Tensor, ...], cu: tuple[Tensor | None, Tensor | None], longest: tuple[Any, Any],
        band: tuple[int, int], scale: float, cap: float, *, empty: bool, no_keys: float, top_left: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The forward of all sequences of a call, or their backward.

        Args:
            tensors: ``q, k, v`` for forward, or ``q, k, v, dout, out, lse`` for backward. ``lse`` is ``[b, h, q]``, or
                ``[h, t]`` in a packed call. The others are ``[b, s, h, d]``, or ``[t, h, d]`` in a packed call.
            cu: the boundaries of the sequences of q and of k in a packed call; otherwise None.
            longest: the lengths of the longest sequences of q and of k in a packed call.
            band: the number of keys to the left and to the right that a query sees; -1 is unlimited.
            scale: the factor of the scores.
            cap: the softcap; 0 for none.
            empty: whether sequences without queries or without keys are allowed.
            no_keys: the lse of queries without keys.
            top_left: whether the band is aligned to the top left corner.
            mask: bool ``[b, q, k]``, used instead of the band.
        """
        q, k, v, *rest = tensors
        check_tensors(q, k, v, *rest[:2])
        if cu[0] is None or cu[1] is None:
            assert cu == (None, None)
            assert q.dim() == k.dim() == 4 and len(q) == len(k) == len(v)
            if rest:
                check_statistics(rest[2], (q.shape[0], q.shape[2], q.shape[1]))
            parts = [[x[i] for x in tensors] for i in range(len(q))]
        else:
            assert q.dim() == k.dim() == 3
            if longest[0] == 1 and q.shape[1] > k.shape[1] and band == (-1, -1) and empty:
                assert len(q) == len(cu[0]) - 1, "flash-attn 2 moves heads to the queries of each sequence"
            bounds = [check_boundaries(x, len(y), m, empty) for x, y, m in zip(cu, (q, k), longest, strict=True)]
            if rest:
                check_statistics(rest[2], (q.shape[1], q.shape[0]))
            parts = []
            for (q0, q1), (k0, k1) in zip(*(pairwise(b) for b in bounds), strict=True):
                part = [q[q0:q1], k[k0:k1], v[k0:k1]]
                if rest:
                    part += [*(x[q0:q1] for x in rest[:2]), rest[2][:, q0:q1]]
                parts.append(part)
        done: list[tuple[Tensor, ...]] = []
        for i, (part_q, part_k, part_v, *part_rest) in enumerate(parts):
            seen = mask[i] if mask is not None else band_mask(len(part_q), len(part_k), *band, top_left)
            if part_rest:
                dout, out, lse = part_rest
                done.append(self.backward(dout, part_q, part_k, part_v, out, lse, seen, scale, cap))
            else:
                out, lse = self.forward(part_q, part_k, part_v, seen, scale, cap)
                assert empty or mask is not None or bool(seen.any(-1).all()), "queries without keys"
                done.append((out, lse.masked_fill(~seen.any(-1), no_keys)))
        results = list(zip(*done, strict=True))
        if cu[0] is None:
            return tuple(torch.stack(x) for x in results)
        return tuple(torch.cat(x, 1 if not rest and n == 1 else 0) for n, x in enumerate(results))


def check_tensors(*tensors: Tensor) -> None:
    """Check dtypes, shapes, strides and alignment of ``q, k, v`` and, in backward, ``dout, out``."""
    q, k, v = tensors[:3]
    assert q.dtype in (torch.float16, torch.bfloat16) and {x.dtype for x in tensors} == {q.dtype}
    assert q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    assert q.shape[-2] % k.shape[-2] == 0 and k.shape[:-1] == v.shape[:-1]
    assert all(x.shape == (*q.shape[:-1], v.shape[-1]) for x in tensors[3:])
    assert k.numel() and q.numel()
    for x in tensors:
        assert x.stride(-1) == 1, x.stride()
        assert all(s % 8 == 0 for s in x.stride()[:-1]) and x.data_ptr() % 16 == 0, "16 byte loads"
        assert not x.requires_grad or not torch.is_grad_enabled()


def check_statistics(lse: Tensor, shape: tuple[int, ...]) -> None:
    assert lse.dtype == torch.float32 and lse.shape == shape and lse.is_contiguous()


def check_boundaries(cu: Tensor, rows: int, longest: int, empty: bool) -> list[int]:
    """Check the boundaries of packed sequences, and return them as a list."""
    assert cu.dtype == torch.int32 and cu.dim() == 1 and cu.is_contiguous()
    bounds: list[int] = cu.tolist()
    lengths = [b - a for a, b in pairwise(bounds)]
    assert bounds[0] == 0 and bounds[-1] == rows and min(lengths) >= (0 if empty else 1), bounds
    assert type(longest) is int and longest >= max(lengths)
    return bounds


def band_mask(q_len: int, k_len: int, left: int, right: int, top_left: bool = False) -> Tensor:
    """Whether each query sees each key of a band: bool ``[q_len, k_len]``."""
    p = torch.arange(q_len)[:, None] + (0 if top_left else k_len - q_len)
    j = torch.arange(k_len)
    seen = torch.ones(q_len, k_len, dtype=torch.bool)
    if left >= 0:
        seen &= j >= p - left
    if right >= 0:
        seen &= j <= p + right
    return seen


def as_in_flash_2(q_len: int, k_len: int, causal: bool, left: int, right: int) -> tuple[int, int]:
    """The ``(left, right)`` that flash_api.cpp of flash-attn 2 computes from its arguments."""
    left, right = (-1 if x >= k_len else x for x in (left, right))
    if causal:
        right = 0
    if left >= 0 and right < 0:
        right = k_len
    return left, right


# The fake kernels of each library


def _flash_2(kernels: Kernels) -> ModuleType:
    def run(name: str, tensors: tuple[Tensor, ...], cu: Any, longest: Any, o: dict[str, Any]) -> tuple[Tensor, ...]:
        kernels.calls[name] += 1
        kernels.check_dims("flash_attn", *tensors[:3])
        assert o["dropout_p"] == 0.0 and o["alibi_slopes"] is None
        sizes = (tensors[0].shape[1], tensors[1].shape[1]) if cu[0] is None else longest
        band = as_in_flash_2(sizes[0], sizes[1], o["causal"], o["window_size_left"], o["window_size_right"])
        assert not (o["causal"] and o["window_size_left"] >= 0)
        return kernels.run(tensors, cu, longest, band, o["softmax_scale"], o["softcap"], empty=True, no_keys=torch.inf)

    def _flash_attn_forward(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
        window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert not return_softmax
        out, lse = run("dense", (q, k, v), (None, None), (0, 0), locals())
        return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_varlen_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
        window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        return_softmax: bool = False, block_table: Tensor | None = None, leftpad_k: Tensor | None = None,
        seqused_k: Tensor | None = None, zero_tensors: bool = False, num_splits: int = 0,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        out, lse = run("packed", (q, k, v), cu, longest, locals())
        return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
        dk: Tensor | None, dv: Tensor | None, dropout_p: float, softmax_scale: float, causal: bool,
        window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
        deterministic: bool, rng_state: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        kernels.calls["deterministic"] += deterministic
        grads = run("dense backward", (q, k, v, dout, out, softmax_lse), (None, None), (0, 0), locals())
        _write((dq, dk, dv), grads)
        return torch.empty(0)

    def _flash_attn_varlen_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
        dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
        window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
        rng_state: Tensor | None = None, zero_tensors: bool = False,
    ) -> Tensor:  # fmt: skip
        kernels.calls["deterministic"] += deterministic
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        _write((dq, dk, dv), run("packed backward", (q, k, v, dout, out, softmax_lse), cu, longest, locals()))
        return torch.empty(0)

    return _module("flash_attn.flash_attn_interface", locals())


def _flash_3(kernels: Kernels) -> ModuleType:
    def run(name: str, tensors: tuple[Tensor, ...], o: dict[str, Any], causal: bool) -> tuple[Tensor, ...]:
        kernels.calls[name] += 1
        kernels.check_dims("flash_attn_3", *tensors[:3])
        cu = o["cu_seqlens_q"], o["cu_seqlens_k"]
        longest = o["max_seqlen_q"], o["max_seqlen_k"]
        sizes = (tensors[0].shape[1], tensors[1].shape[1]) if cu[0] is None else longest
        left, right = o["window_size_left"], o["window_size_right"]
        left, right = -1 if left >= sizes[1] - 1 else left, -1 if right >= sizes[0] - 1 else right
        band = (left, 0) if causal else (left, right)
        return kernels.run(
            tensors, cu, longest, band, o["softmax_scale"], o["softcap"], empty=False, no_keys=-torch.inf
        )

    def _flash_attn_forward(
        q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
        qv: Tensor | None = None, out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None, seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
        page_table: Tensor | None = None, kv_batch_idx: Tensor | None = None, leftpad_k: Tensor | None = None,
        rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, seqlens_rotary: Tensor | None = None,
        q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
        softmax_scale: float | None = None, causal: bool = False, window_size_left: int = -1,
        window_size_right: int = -1, attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None, num_splits: int = 1, pack_gqa: bool | None = None,
        sm_margin: int = 0,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert num_splits == 1
        out, lse = run("forward", (q, k, v), locals(), causal)
        return out, lse, torch.empty(0), torch.empty(0)

    def _flash_attn_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, sequed_q: Tensor | None = None,
        sequed_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
        dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
        softmax_scale: float | None = None, is_causal: bool = False, window_size_left: int = -1,
        window_size_right: int = -1, softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0,
    ) -> Tensor:  # fmt: skip
        kernels.calls["deterministic"] += deterministic
        _write((dq, dk, dv), run("backward", (q, k, v, dout, out, softmax_lse), locals(), is_causal))
        return torch.empty(0)

    return _module("flash_attn_interface", locals())


def _flash_4(kernels: Kernels) -> ModuleType:
    def run(name: str, tensors: tuple[Tensor, ...], o: dict[str, Any]) -> tuple[Tensor, ...]:
        kernels.calls[name] += 1
        kernels.check_dims("flash_attn_4", *tensors[:3])
        left, right = (
            -1 if o[f"window_size_{side}"] is None else o[f"window_size_{side}"] for side in ("left", "right")
        )
        mask = None
        if o["mask_mod"] is not None:
            kernels.calls["masked"] += 1
            assert not o["causal"] and (left, right) == (-1, -1) and not o.get("deterministic")
            backward = len(tensors) > 3
            mask = from_blocks(
                tensors[0], tensors[1], o["mask_mod"], o["aux_tensors"], o["block_sparse_tensors"], backward
            )
        band = (-1, 0) if o["causal"] else (left, right)
        return kernels.run(
            tensors, (o["cu_seqlens_q"], o["cu_seqlens_k"]), (o["max_seqlen_q"], o["max_seqlen_k"]), band,
            o["softmax_scale"], o["softcap"] or 0.0, empty=False, no_keys=-torch.inf, mask=mask,
        )  # fmt: skip

    def _flash_attn_fwd(
        q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, min_seqlen_k: int | None = None,
        page_table: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
        softcap: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
        learnable_sink: Tensor | None = None, tile_mn: Any = None, mma_pv_is_rs: bool | None = None,
        intra_wg_overlap: bool | None = None, num_threads: int = 384, num_splits: int = 1,
        pack_gqa: bool | None = None, _arch: int | None = None, score_mod: Any = None, mask_mod: Any = None,
        block_sparse_tensors: Any = None, return_lse: bool = False, out: Tensor | None = None,
        lse: Tensor | None = None, aux_tensors: Any = None, aux_scalars: Any = None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        assert return_lse and num_splits == 1
        found = run("forward", (q, k, v), locals())
        return (*found, None, None)

    def _flash_attn_bwd(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float | None = None,
        causal: bool = False, softcap: float = 0.0, window_size_left: int | None = None,
        window_size_right: int | None = None, m_block_size: int = 64, n_block_size: int = 128,
        num_threads: int = 256, pack_gqa: bool = False, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, deterministic: bool = False,
        dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None, score_mod: Any = None,
        score_mod_bwd: Any = None, mask_mod: Any = None, aux_tensors: Any = None, aux_scalars: Any = None,
        block_sparse_tensors: Any = None, dlse: Tensor | None = None, learnable_sink: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        kernels.calls["deterministic"] += deterministic
        return run("backward", (q, k, v, dout, out, lse), locals())

    return _module("flash_attn.cute.interface", locals())


def from_blocks(q: Tensor, k: Tensor, mask_mod: Any, aux: list[Tensor], sparse: Any, backward: bool) -> Tensor:
    """Whether each query sees each key in a kernel that reads lists of blocks: bool ``[b, q, k]``.

    Fails if a block is listed twice.
    """
    batch, q_len, k_len = len(q), q.shape[1], k.shape[1]
    q_block, k_block = sparse.block_size
    rows, columns = -(-q_len // q_block), -(-k_len // k_block)
    seen = torch.zeros(batch, rows * q_block, columns * k_block, dtype=torch.bool)
    for x in aux:
        assert x.dtype == torch.int32 and x.is_contiguous() and x.shape == (batch, rows * q_block)
    kinds = (sparse.mask_block_cnt, sparse.mask_block_idx, True), (sparse.full_block_cnt, sparse.full_block_idx, False)
    for count, index, masked in kinds:
        outer, inner = (columns, rows) if backward else (rows, columns)
        assert count.dtype == index.dtype == torch.int32
        assert count.shape[1:] == (1, outer) and index.shape[1:] == (1, outer, inner)
        assert len(count) == len(index) and len(count) in (1, batch)
        for b in range(batch):
            for i in range(outer):
                at = b if len(count) > 1 else 0
                for other in index[at, 0, i, : count[at, 0, i]].tolist():
                    r, c = (other, i) if backward else (i, other)
                    q_at, k_at = slice(r * q_block, (r + 1) * q_block), slice(c * k_block, (c + 1) * k_block)
                    assert not seen[b, q_at, k_at].any()
                    if not masked:
                        assert k_at.stop <= k_len
                        seen[b, q_at, k_at] = True
                    else:
                        query, key = torch.arange(q_at.start, q_at.stop), torch.arange(k_at.start, k_at.stop)
                        seen[b, q_at, k_at] = mask_mod(b, 0, query[:, None], key[None], None, aux)
    return seen[:, :q_len, :k_len]


def interval_mask(batch: int, head: int, query: Tensor, key: Tensor, seqlen_info: Any, aux: list[Tensor]) -> Tensor:
    """The same function as ``block_lists._interval_mask``, in PyTorch instead of FlashAttention-4's language."""
    return (key >= aux[0][batch, query]) & (key < aux[1][batch, query])


def _torch_flash(kernels: Kernels) -> tuple[Any, Any]:
    def run(
        name: str, tensors: tuple[Tensor, ...], cu: Any, longest: tuple[int, int], causal: bool, o: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        kernels.calls[name if cu[0] is None else f"packed {name}"] += 1
        kernels.check_dims("flash", *tensors[:3])
        left, right = (
            -1 if o[f"window_size_{side}"] is None else o[f"window_size_{side}"] for side in ("left", "right")
        )
        band = as_in_flash_2(*longest, causal, left, right)
        assert not (causal and left >= 0)
        if cu[0] is None:
            assert longest == (tensors[0].shape[1], tensors[1].shape[1])
        return kernels.run(tensors, cu, longest, band, o["scale"], 0.0, empty=True, no_keys=torch.inf)

    def forward(
        query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
        max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
        window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert dropout_p == 0.0 and not return_debug_mask
        cu = cum_seq_q, cum_seq_k
        out, lse = run("forward", (query, key, value), cu, (max_q, max_k), is_causal, locals())
        return out, lse, torch.empty(2), torch.empty(0), torch.empty(0)

    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
        rng_state: Tensor, unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert dropout_p == 0.0
        tensors = query, key, value, grad_out, out, logsumexp
        return run("backward", tensors, (cum_seq_q, cum_seq_k), (max_q, max_k), is_causal, locals())

    return forward, backward


def _cudnn(kernels: Kernels, lse_dims: int) -> tuple[Any, Any]:
    def run(name: str, tensors: tuple[Tensor, ...], causal: bool, scale: float | None) -> tuple[Tensor, ...]:
        kernels.calls[name] += 1
        kernels.check_dims("cudnn", *tensors[:3])
        q, k, v, *rest = tensors
        batch, heads, q_len, _ = q.shape
        assert k.shape[2] > 1 and (not causal or q_len == k.shape[2])
        assert scale is not None
        last_first = [x.transpose(1, 2) for x in (q, k, v, *rest[:2])]
        assert all(x.stride(2) == x.shape[3] for x in last_first), "heads beside each other"
        if rest:
            assert rest[2].shape == (batch, heads, q_len, 1)[:lse_dims]
            last_first.append(rest[2].reshape(batch, heads, q_len))
        band = (-1, 0) if causal else (-1, -1)
        done = kernels.run(
            tuple(last_first), (None, None), (0, 0), band, scale, 0.0, empty=False, no_keys=torch.nan, top_left=True
        )
        if rest:
            return tuple(x.transpose(1, 2) for x in done)
        out, lse = done
        return out.transpose(1, 2), lse[..., None] if lse_dims == 4 else lse

    def forward(
        query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
        dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert compute_log_sumexp and attn_bias is None and not dropout_p and not return_debug_mask
        done = run("forward", (query, key, value), is_causal, scale)
        return (*done, None, None, query.shape[2], key.shape[2], torch.empty(()), torch.empty(()), None)

    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        philox_seed: Tensor, philox_offset: Tensor, attn_bias: Tensor | None, cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert attn_bias is None and cum_seq_q is None and cum_seq_k is None and not dropout_p
        assert (max_q, max_k) == (query.shape[2], key.shape[2])
        return run("backward", (query, key, value, grad_out, out, logsumexp), is_causal, scale)

    return forward, backward


def _write(targets: tuple[Tensor | None, ...], values: tuple[Tensor, ...]) -> None:
    for target, value in zip(targets, values, strict=True):
        assert target is not None and target.shape == value.shape and target.dtype == value.dtype
        assert target.is_contiguous()
        target.copy_(value)


def _module(name: str, functions: dict[str, Any]) -> ModuleType:
    made = ModuleType(name)
    for function, value in functions.items():
        if function.startswith("_flash_attn"):
            setattr(made, function, value)
    return made


@contextmanager
def stand_ins(
    like_a_kernel: bool = False, capability: tuple[int, int] = (9, 0), lse_dims: int = 4
) -> Iterator[Kernels]:
    """In the block, all libraries seem to be installed, and their backends run fake kernels on CPU tensors.

    Args:
        like_a_kernel: whether the fake kernels round intermediate results as the real kernels do.
        capability: the compute capability of the simulated GPU.
        lse_dims: the number of dimensions of the lse that cuDNN returns, which depends on the version of PyTorch.
    """
    kernels = Kernels(like_a_kernel, capability)
    modules = {module.__name__: module for module in (_flash_2(kernels), _flash_3(kernels), _flash_4(kernels))}
    modules |= {name: ModuleType(name) for name in ("flash_attn", "flash_attn.cute")}
    sparse: Any = ModuleType("flash_attn.cute.block_sparsity")
    sparse.BlockSparseTensorsTorch = BlockSparseTensorsTorch
    flash_forward, flash_backward = _torch_flash(kernels)
    cudnn_forward, cudnn_backward = _cudnn(kernels, lse_dims)
    flash._load.cache_clear()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, {**modules, sparse.__name__: sparse}))
        for target, name, value in (
            (flash, "_no_cuda", lambda: None),
            (flash, "_forward", flash_forward),
            (flash, "_backward", flash_backward),
            (cudnn, "_forward", cudnn_forward),
            (cudnn, "_backward", cudnn_backward),
            (cudnn.CudnnBackend, "unavailable", lambda self: None),
            (cudnn.CudnnBackend, "_lse_dims", 4),
            (library.LibraryBackend, "device_type", "cpu"),
            (library, "_capability", lambda device: capability),
            (block_lists, "_interval_mask", lambda: interval_mask),
            (torch.cuda, "get_device_capability", lambda device=None: capability),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        try:
            yield kernels
        finally:
            flash._load.cache_clear()


def backend_names() -> list[str]:
    """The names of the package's backends that run kernels of libraries."""
    return [name for name, backend in BACKENDS.items() if isinstance(backend, library.LibraryBackend)]
