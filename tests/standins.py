"""Fake kernels of libraries that need a GPU. They have the signatures of the real kernels and run PyTorch on the CPU.

A fake kernel checks the requirements of the real one (shapes, dtypes, strides, alignment, ranges). It computes the same
results for the same bands, which are aligned to the bottom right corner, or with cuDNN to the top left corner. It
treats queries without keys like the real kernel. With ``like_a_kernel`` it also rounds the probabilities and their
gradients before they are multiplied, as the real kernel does. Otherwise it rounds only the results.

``tools/signatures.py`` has recorded the real signatures of several versions in ``signatures.json``.
"""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from seqpar.kernels import BACKENDS, block_lists, cudnn, flash, library

LIBRARIES = ("flash", "cudnn", "cudnn_varlen", "cudnn_flex", "flash_attn", "flash_attn_3", "flash_attn_4")


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
        in FlashAttention-4's ``interface.py``, the documentation of cuDNN, and ``is_supported_head_dims`` in
        ``validation.py`` of cuDNN's kernels for intervals.
        """
        d, e = q.shape[-1], v.shape[-1]
        assert k.shape[-1] == d
        most = 256 if self.capability[0] == 9 else 128
        known = {
            "flash": d == e <= 256,
            "flash_attn": d == e <= 256,
            "flash_attn_3": d == e <= 256 or (128 < d <= 192 and 96 < e <= 128),
            "flash_attn_4": max(d, e) <= most or (d, e) in ((192, 128), (256, 256)),
            "cudnn_flex": max(d, e) <= 128 or (d, e) in ((192, 128), (256, 256)),
            "cudnn": max(d, e) <= (256 if self.capability == (9, 0) else 128) or (d, e) == (192, 128),
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

# By module and version, oldest first: the parameters of private functions, or for torch the schemas of operators.
SIGNATURES: dict[str, dict[str, dict[str, str]]] = json.loads((Path(__file__).parent / "signatures.json").read_text())
Arguments = dict[str, Any]


def with_parameters(parameters: str) -> Callable[..., Arguments]:
    """A function with these parameters that returns its arguments by name."""
    made: Callable[..., Arguments] = eval(f"lambda {' '.join(parameters.split())}: locals()")
    return made


def _module(name: str, version: str | None, body: Callable[[str, Arguments], Any]) -> ModuleType:
    """A package, by default its newest version, whose functions call ``body`` with their name and arguments by name."""
    made = ModuleType(name)

    def add(function: str, bind: Callable[..., Arguments]) -> None:
        @functools.wraps(bind)  # inspect.signature sees the parameters of ``bind``
        def call(*args: Any, **kwargs: Any) -> Any:
            return body(function, bind(*args, **kwargs))

        inside, _, last = function.rpartition(".")  # "execution.f" is ``f`` of the module ``execution`` in it
        if inside and not hasattr(made, inside):
            setattr(made, inside, ModuleType(f"{name}.{inside}"))
        setattr(getattr(made, inside) if inside else made, last, call)

    versions = SIGNATURES[name]
    for function, parameters in versions[version or list(versions)[-1]].items():
        add(function, with_parameters(parameters))
    return made


def _write(o: Arguments, values: tuple[Tensor, ...]) -> Tensor:
    """Write dq, dk and dv into the tensors that the call has for them."""
    for target, value in zip((o["dq"], o["dk"], o["dv"]), values, strict=True):
        assert target is not None and target.shape == value.shape and target.dtype == value.dtype
        assert target.is_contiguous()
        target.copy_(value)
    return torch.empty(0)


def _flash_2(kernels: Kernels, version: str | None) -> ModuleType:
    def body(function: str, o: Arguments) -> Any:
        packed, backward = "varlen" in function, "backward" in function
        kernels.calls[("packed" if packed else "dense") + (" backward" if backward else "")] += 1
        kernels.check_dims("flash_attn", o["q"], o["k"], o["v"])
        assert o["dropout_p"] == 0.0 and o["alibi_slopes"] is None
        cu = (o["cu_seqlens_q"], o["cu_seqlens_k"]) if packed else (None, None)
        longest = (o["max_seqlen_q"], o["max_seqlen_k"]) if packed else (o["q"].shape[1], o["k"].shape[1])
        band = as_in_flash_2(*longest, o["causal"], o["window_size_left"], o["window_size_right"])
        assert not (o["causal"] and o["window_size_left"] >= 0)
        names = ("q", "k", "v", "dout", "out", "softmax_lse") if backward else ("q", "k", "v")
        found = kernels.run(
            tuple(o[name] for name in names), cu, longest, band, o["softmax_scale"], o["softcap"], empty=True,
            no_keys=torch.inf,
        )  # fmt: skip
        if backward:
            kernels.calls["deterministic"] += o["deterministic"]
            return _write(o, found)
        assert not o["return_softmax"]
        return (*found, torch.empty(0), torch.empty(2, dtype=torch.int64))

    return _module("flash_attn.flash_attn_interface", version, body)


def _flash_3(kernels: Kernels, version: str | None) -> ModuleType:
    def body(function: str, o: Arguments) -> Any:
        backward = "backward" in function
        kernels.calls["backward" if backward else "forward"] += 1
        kernels.check_dims("flash_attn_3", o["q"], o["k"], o["v"])
        cu, longest = (o["cu_seqlens_q"], o["cu_seqlens_k"]), (o["max_seqlen_q"], o["max_seqlen_k"])
        sizes = longest if cu[0] is not None else (o["q"].shape[1], o["k"].shape[1])
        left, right = o["window_size"] if "window_size" in o else (o["window_size_left"], o["window_size_right"])
        left, right = -1 if left >= sizes[1] - 1 else left, -1 if right >= sizes[0] - 1 else right
        band = (left, 0) if o["is_causal" if "is_causal" in o else "causal"] else (left, right)
        names = ("q", "k", "v", "dout", "out", "softmax_lse") if backward else ("q", "k", "v")
        found = kernels.run(
            tuple(o[name] for name in names), cu, longest, band, o["softmax_scale"], o["softcap"], empty=False,
            no_keys=-torch.inf,
        )  # fmt: skip
        if backward:
            kernels.calls["deterministic"] += o["deterministic"]
            return _write(o, found)
        assert o["num_splits"] == 1
        return (*found, torch.empty(0), torch.empty(0))

    return _module("flash_attn_interface", version, body)


def _flash_4(kernels: Kernels, version: str | None) -> ModuleType:
    def body(function: str, o: Arguments) -> Any:
        backward = function == "_flash_attn_bwd"
        kernels.calls["backward" if backward else "forward"] += 1
        kernels.check_dims("flash_attn_4", o["q"], o["k"], o["v"])
        left, right = (
            -1 if o[f"window_size_{side}"] is None else o[f"window_size_{side}"] for side in ("left", "right")
        )
        mask = None
        if o["mask_mod"] is not None:
            kernels.calls["masked"] += 1
            assert not o["causal"] and (left, right) == (-1, -1) and not o.get("deterministic")
            mask = from_blocks(o["q"], o["k"], o["mask_mod"], o["aux_tensors"], o["block_sparse_tensors"], backward)
        names = ("q", "k", "v", "dout", "out", "lse") if backward else ("q", "k", "v")
        found = kernels.run(
            tuple(o[name] for name in names), (o["cu_seqlens_q"], o["cu_seqlens_k"]),
            (o["max_seqlen_q"], o["max_seqlen_k"]), (-1, 0) if o["causal"] else (left, right), o["softmax_scale"],
            o["softcap"] or 0.0, empty=False, no_keys=-torch.inf, mask=mask,
        )  # fmt: skip
        if backward:
            kernels.calls["deterministic"] += o["deterministic"]
            return found
        assert o["return_lse"] and o["num_splits"] == 1
        return (*found, None, None)

    return _module("flash_attn.cute.interface", version, body)


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
        assert count.shape[1:] == (1, outer) and index.shape[1:-1] == (1, outer) and 1 <= index.shape[-1] <= inner
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


def interval_mask(
    parts: int, batch: int, head: int, query: Tensor, key: Tensor, seqlen_info: Any, aux: list[Tensor]
) -> Tensor:
    """The same function as ``block_lists._interval_mask``, in PyTorch instead of FlashAttention-4's language."""
    assert len(aux) == 2 * parts
    inside = [(key >= lo[batch, query]) & (key < hi[batch, query]) for lo, hi in zip(aux[::2], aux[1::2], strict=True)]
    return torch.stack(inside).any(0)


@dataclass
class MaskPlan:
    """What the fake ``create_mask_plan`` of cuDNN returns."""

    shapes: tuple[torch.Size, ...]  # of q, k and v
    mask: Tensor  # bool [b, q, k]
    has_backward: bool


def _cudnn_flex(kernels: Kernels, version: str | None) -> ModuleType:
    """Checks as in ``validation.py`` and ``q2k_classify.py`` of cudnn.flex_attention."""

    def plan(o: Arguments) -> MaskPlan:
        q, k, v, ends = o["q"], o["k"], o["v"], o["mask_func"]
        assert kernels.capability in ((9, 0), (10, 0), (10, 3))
        assert not any(o[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "pack_gqa"))
        kernels.check_dims("cudnn_flex", q, k, v)
        check_tensors(q, k, v)
        batch, q_len, k_len = len(q), q.shape[1], k.shape[1]
        assert ends.dtype == torch.int32 and ends.is_contiguous() and ends.shape[0] == 1 and ends.shape[1] % 2
        assert ends.shape[2] == batch * q_len
        assert ends.min() >= 0 and ends.max() <= k_len and bool((ends.diff(dim=1) >= 0).all())
        first, *rest = ends[0].view(-1, batch, q_len, 1).unbind()
        keys = torch.arange(k_len)
        mask = keys < first
        for lo, hi in zip(rest[::2], rest[1::2], strict=True):
            mask = mask | ((lo <= keys) & (keys < hi))
        return MaskPlan((q.shape, k.shape, v.shape), mask, o["build_backward"])

    def body(function: str, o: Arguments) -> Any:
        name = function.split("_")[-1]
        kernels.calls[name] += 1
        if name == "plan":
            return plan(o)
        made, backward = o["mask_plan"], name == "backward"
        names = ("q", "k", "v", "do", "o", "lse") if backward else ("q", "k", "v")
        tensors = tuple(o[f"{x}_tensor"] for x in names)
        assert isinstance(made, MaskPlan) and made.shapes == tuple(x.shape for x in tensors[:3])
        kernels.check_dims("cudnn_flex", *tensors[:3])
        found = kernels.run(
            tensors, (None, None), (0, 0), (-1, -1), o["softmax_scale"], 0.0, empty=False, no_keys=-torch.inf,
            mask=made.mask,
        )  # fmt: skip
        if backward:
            kernels.calls["deterministic"] += o["deterministic"]
            assert made.has_backward and o["dlse_tensor"] is None
            return found
        assert o["return_lse"] and not o["return_max_logit"]
        return (*found, None)

    return _module("cudnn.flex_attention", version, body)


def _operator(operator: Any, version: str | None, body: Callable[[Arguments], Any]) -> Callable[..., Any]:
    """A function with the parameters of an operator of PyTorch that calls ``body`` with the arguments by name.

    It has the parameters of a recorded ``version``, by default of the installed PyTorch.
    """
    schema = operator._schema
    if version is not None:
        schema = torch._C.parse_schema(SIGNATURES["torch"][version][schema.name.removeprefix("aten::")])
    parameters = schema.arguments

    def call(*args: Any, **kwargs: Any) -> Any:
        positional = [x.name for x in parameters if not x.kwarg_only][: len(args)]
        defaults = {x.name: x.default_value for x in parameters if x.has_default_value()}
        o = defaults | dict(zip(positional, args, strict=True)) | kwargs
        assert o.keys() == {x.name for x in parameters}, o.keys()
        return body(o)

    vars(call)["_schema"] = schema
    return call


def _torch_flash(kernels: Kernels, version: str | None) -> tuple[Any, Any]:
    def run(o: Arguments) -> tuple[Tensor, ...]:
        backward = "grad_out" in o
        q, k, v = o["query"], o["key"], o["value"]
        cu, longest = (o["cum_seq_q"], o["cum_seq_k"]), (o["max_q"], o["max_k"])
        kernels.calls[("" if cu[0] is None else "packed ") + ("backward" if backward else "forward")] += 1
        kernels.check_dims("flash", q, k, v)
        left, right = (
            -1 if o[f"window_size_{side}"] is None else o[f"window_size_{side}"] for side in ("left", "right")
        )
        assert not (o["is_causal"] and left >= 0) and o["dropout_p"] == 0.0 and not o.get("return_debug_mask")
        if cu[0] is None:
            assert longest == (q.shape[1], k.shape[1])
        band = as_in_flash_2(*longest, o["is_causal"], left, right)
        tensors = (q, k, v, o["grad_out"], o["out"], o["logsumexp"]) if backward else (q, k, v)
        found = kernels.run(tensors, cu, longest, band, o["scale"], 0.0, empty=True, no_keys=torch.inf)
        return found if backward else (*found, torch.empty(2), torch.empty(0), torch.empty(0))

    return _operator(flash._forward, version, run), _operator(flash._backward, version, run)


def _cudnn(kernels: Kernels, version: str | None, lse_dims: int) -> tuple[Any, Any]:
    graphs: dict[Any, Any] = {}  # of the backward, as in PyTorch: by the layouts of q, k and v

    def strides(x: Tensor) -> list[int]:
        return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]

    def run(o: Arguments) -> tuple[Any, ...]:
        backward = "grad_out" in o
        kernels.calls["backward" if backward else "forward"] += 1
        q, k, v, causal = o["query"], o["key"], o["value"], o["is_causal"]
        kernels.check_dims("cudnn", q, k, v)
        batch, heads, q_len, _ = q.shape
        assert k.shape[2] > 1 and (not causal or q_len == k.shape[2])
        assert o["scale"] is not None and o["attn_bias"] is None and not o["dropout_p"]
        tensors = [x.transpose(1, 2) for x in ((q, k, v, o["grad_out"], o["out"]) if backward else (q, k, v))]
        assert all(x.stride(2) == x.shape[3] for x in tensors), "heads beside each other"
        if backward:
            assert o["cum_seq_q"] is None and o["cum_seq_k"] is None
            assert (o["max_q"], o["max_k"]) == (q_len, k.shape[2])
            assert o["logsumexp"].shape == (batch, heads, q_len, 1)[:lse_dims]
            layouts = *((x.shape, tuple(strides(x))) for x in (q, k, v)), causal, o["scale"]
            compiled = graphs.setdefault(layouts, [strides(x) for x in (o["out"], o["grad_out"])])
            assert compiled == [strides(x) for x in (o["out"], o["grad_out"])], "the graph of another call would run"
            tensors.append(o["logsumexp"].reshape(batch, heads, q_len))
        band = (-1, 0) if causal else (-1, -1)
        found = kernels.run(
            tuple(tensors), (None, None), (0, 0), band, o["scale"], 0.0, empty=False, no_keys=torch.nan, top_left=True
        )
        if backward:
            return tuple(x.transpose(1, 2) for x in found)
        assert o["compute_log_sumexp"] and not o["return_debug_mask"]
        out, lse = found
        lse = lse[..., None] if lse_dims == 4 else lse
        return out.transpose(1, 2), lse, None, None, q_len, k.shape[2], torch.empty(()), torch.empty(()), None

    return _operator(cudnn._forward, version, run), _operator(cudnn._backward, version, run)


def _cudnn_varlen(kernels: Kernels, version: str) -> tuple[Any, Any]:
    """Checks as in ``_cudnn_rejection_reasons`` of torch.nn.attention.varlen."""

    def run(o: Arguments) -> tuple[Any, ...]:
        backward = "grad_out" in o
        kernels.calls["packed backward" if backward else "packed"] += 1
        q, k, v, causal = o["query"], o["key"], o["value"], o["is_causal"]
        assert max(q.shape[-1], v.shape[-1]) <= 128 and kernels.capability[0] in (9, 10)
        assert o["scale"] > 0 and o["attn_bias"] is None and not o["dropout_p"]
        cu = o["cum_seq_q"], o["cum_seq_k"]
        assert not causal or torch.equal(*cu), "aligned to the top left corner"
        tensors = (q, k, v, o["grad_out"], o["out"], o["logsumexp"]) if backward else (q, k, v)
        found = kernels.run(
            tensors, cu, (o["max_q"], o["max_k"]), (-1, 0) if causal else (-1, -1), o["scale"], 0.0, empty=False,
            no_keys=torch.nan, top_left=True,
        )  # fmt: skip
        if backward:
            return found
        assert o["compute_log_sumexp"] and not o["return_debug_mask"] and o["seqused_k"] is o["block_table"] is None
        return (*found, *cu, o["max_q"], o["max_k"], torch.empty(()), torch.empty(()), None)

    return _operator(cudnn._packed_forward, version, run), _operator(cudnn._packed_backward, version, run)


@contextmanager
def fake_modules(modules: Mapping[str, Any]) -> Iterator[None]:
    """In the block, an import of these names finds these modules. What the block imports besides stays imported.

    ``mock.patch.dict(sys.modules)`` would forget it, and some modules of PyTorch cannot be imported twice.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield


@contextmanager
def stand_ins(
    like_a_kernel: bool = False, capability: tuple[int, int] = (9, 0), lse_dims: int = 4, **versions: str
) -> Iterator[Kernels]:
    """In the block, all libraries seem to be installed, and their backends run fake kernels on CPU tensors.

    Args:
        like_a_kernel: whether the fake kernels round intermediate results as the real kernels do.
        capability: the compute capability of the simulated GPU.
        lse_dims: the number of dimensions of the lse that cuDNN returns, which depends on the version of PyTorch.
        versions: by backend, the recorded version of its signatures; by default the newest, or the installed PyTorch.
    """
    kernels = Kernels(like_a_kernel, capability)
    packages = {
        "flash_attn": _flash_2, "flash_attn_3": _flash_3, "flash_attn_4": _flash_4, "cudnn_flex": _cudnn_flex,
    }  # fmt: skip
    made = [make(kernels, versions.get(name)) for name, make in packages.items()]
    modules = {module.__name__: module for module in made}
    modules |= {name: ModuleType(name) for name in ("flash_attn", "flash_attn.cute", "cudnn")}
    vars(modules["cudnn"])["__version__"] = "1.32.0"
    sparse: Any = ModuleType("flash_attn.cute.block_sparsity")
    sparse.BlockSparseTensorsTorch = BlockSparseTensorsTorch
    flash_forward, flash_backward = _torch_flash(kernels, versions.get("flash"))
    cudnn_forward, cudnn_backward = _cudnn(kernels, versions.get("cudnn"), lse_dims)
    packed_forward, packed_backward = _cudnn_varlen(
        kernels, versions.get("cudnn_varlen", list(SIGNATURES["torch"])[-1])
    )
    flash._load.cache_clear()
    with ExitStack() as stack:
        stack.enter_context(fake_modules({**modules, sparse.__name__: sparse}))
        for target, name, value in (
            (flash, "_no_cuda", lambda: None),
            (flash, "_forward", flash_forward),
            (flash, "_backward", flash_backward),
            (cudnn, "_forward", cudnn_forward),
            (cudnn, "_backward", cudnn_backward),
            (cudnn, "_packed_forward", packed_forward),
            (cudnn, "_packed_backward", packed_backward),
            (cudnn.CudnnBackend, "unavailable", lambda self: None),
            (cudnn.CudnnBackend, "_lse_dims", 4),
            (library.LibraryBackend, "device_type", "cpu"),
            (library, "_capability", lambda device: capability),
            (block_lists, "_interval_mask", lambda parts: functools.partial(interval_mask, parts)),
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
