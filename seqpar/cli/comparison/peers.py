"""Peers: other packages whose attention is compared with seqpar's. What an adapter is given, and what it returns.

An adapter is a module of ``benchmarks/peers/``, which is installed as ``seqpar.peers``. It has a ``NAME`` and a
function ``make(setting) -> Peer``, which raises ``RefusalError`` with the reason if the package cannot run here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention

from ...checks import check_choice
from ...layout import Layout, shard_positions
from ...mask import Mask
from .cases import DTYPES, Case

_LONGEST_DENSE = 16384  # tokens; a longer mask would be too large as a square matrix


class RefusalError(Exception):
    """A package cannot run here; the message says why."""


@dataclass(frozen=True)
class Setting:
    """What an attempt has to compute, and on which ranks.

    Attributes:
        case: the lengths, the heads, the mask and the dtype.
        group: the ranks that the sequence is sharded over.
        alone: a group with this rank only.
        world: the number of ranks of the default group.
        device: the device of this rank.
    """

    case: Case
    group: ProcessGroup
    alone: ProcessGroup
    world: int
    device: torch.device

    @property
    def mask(self) -> Mask:
        return self.case.make_mask()

    def positions(self, layout: Layout = "contiguous") -> Tensor:
        """Global positions of this rank's tokens, int64 ``[s]``."""
        return shard_positions(self.case.seq_len, self.group.size(), self.group.rank(), layout)

    def boundaries(self) -> list[int] | None:
        """The cu_seqlens of causal packed documents; None for another mask. A causal mask is one document."""
        kind = self.case.mask.partition(":")[0]
        if kind not in ("causal", "documents", "mix"):
            return None
        return [0, self.case.seq_len] if kind == "causal" else list(self.mask.starts[0])

    # Requirements that several packages share. Each raises a RefusalError if the case does not meet it.

    def need_cuda(self) -> None:
        if self.device.type != "cuda":
            raise RefusalError("its kernels need CUDA")

    def need_half(self) -> None:
        if DTYPES[self.case.dtype] not in (torch.bfloat16, torch.float16):
            raise RefusalError(f"no {self.case.dtype}: bfloat16 and float16 only")

    def need_equal_head_dims(self) -> None:
        if self.case.head_dim != self.case.v_head_dim:
            raise RefusalError(
                f"no head_dim of v ({self.case.v_head_dim}) other than of q and k ({self.case.head_dim})"
            )

    def need_causal_or_full(self) -> bool:
        """Whether the mask is causal; any mask but causal and full is refused."""
        if self.case.causal is None:
            raise RefusalError(f"no mask {self.case.mask}: causal and full only")
        return self.case.causal

    def need_divisible(self, parts: int) -> None:
        if self.case.seq_len % parts:
            raise RefusalError(f"{self.case.seq_len:,} tokens do not divide by {parts}")

    def need_heads(self, ranks: int) -> None:
        """All-to-alls of whole heads need the same number of heads on every rank."""
        if self.case.heads % ranks or self.case.kv_heads % ranks:
            raise RefusalError(
                f"{self.case.heads} heads and {self.case.kv_heads} KV heads do not divide by {ranks} ranks"
            )


@dataclass(frozen=True)
class Peer:
    """The attention of another package, ready to be called.

    Attributes:
        attention: returns out ``[b, s, h, e]`` of this rank's q ``[b, s, h, d]``, k ``[b, s, n, d]`` and v ``[b, s, n,
            e]``.
        positions: global positions of this rank's tokens, int64 ``[s]``, in the order that the package expects.
        no_backward: why the package has no backward; None if it has one.
        any_group: whether all messages are sent in ``setting.group``, so that they can be left out.
        block: returns the context in which forward and backward run.
    """

    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    positions: Tensor
    no_backward: str | None = None
    any_group: bool = False
    block: Callable[[], AbstractContextManager[Any]] = nullcontext


def adapters(names: Sequence[str] | None) -> dict[str, Any]:
    """The modules of some adapters, by their file names.

    Args:
        names: the file names; None for all adapters.

    Raises:
        ValueError: there is no adapter of this name.
    """
    try:
        known: tuple[str, ...] = import_module("seqpar.peers").PEERS
    except ImportError:  # this installation has no adapters
        known = ()
    for name in names or ():
        check_choice("peer", name, known)
    return {name: import_module(f"seqpar.peers.{name}") for name in (known if names is None else names)}


def make_peer(module: Any, setting: Setting) -> Peer:
    """The attention of the package whose adapter is ``module``.

    Raises:
        RefusalError: the package is not installed, or cannot compute this setting here.
    """
    try:
        peer: Peer = module.make(setting)
    except ImportError as error:
        missing = (error.name or str(error)).partition(".")[0]
        raise RefusalError(f"{missing} is not installed") from error
    return peer


def sdpa(setting: Setting, rows: Tensor | None = None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """PyTorch's attention of some or all queries over all keys.

    Args:
        setting: the case and the device.
        rows: global positions of the queries; None for all in order.

    Returns:
        A function of q, k and v, tensors ``[b, s, h, d]``, that returns out.

    Raises:
        RefusalError: the mask would be too large as a square matrix.
    """
    case = setting.case
    dense = None
    if case.causal is None or (case.causal and rows is not None):
        if case.seq_len > _LONGEST_DENSE:
            raise RefusalError(f"needs the mask as a matrix of {case.seq_len:,} x {case.seq_len:,}, which is too large")
        dense = setting.mask.dense(case.seq_len).to(setting.device)
        dense = dense if rows is None else dense.index_select(-2, rows.to(setting.device))
        dense = dense[:, None] if dense.ndim == 3 else dense
    is_causal = bool(case.causal) and dense is None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(q, k, v, attn_mask=dense, is_causal=is_causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return attention
