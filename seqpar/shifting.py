"""Neighbours by global position: the row of the next token, whichever rank holds it.

Labels of the next token, multi-token prediction and draft models read the row some positions later. On a shard,
``torch.roll`` is wrong at every border between ranks, and at the end of every document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from .base.checks import check_int, no_compile
from .masks.mask import Mask, check_rows
from .mixers import fetch, link_of
from .sharding.sharding import Sharding
from .sharding.shards import check_dim
from .strategies.row_exchange import shift_plan

_ONE_DOCUMENT = Mask.full()


@overload
def shift(
    x_local: Tensor,
    by: int = 1,
    *,
    sharding: Sharding,
    mask: Mask | None = None,
    fill: float = 0,
    dim: int = 1,
) -> Tensor: ...


@overload
def shift(
    x_local: Tensor,
    by: Sequence[int],
    *,
    sharding: Sharding,
    mask: Mask | None = None,
    fill: float = 0,
    dim: int = 1,
) -> tuple[Tensor, ...]: ...


@no_compile
def shift(
    x_local: Tensor,
    by: int | Sequence[int] = 1,
    *,
    sharding: Sharding,
    mask: Mask | None = None,
    fill: float = 0,
    dim: int = 1,
) -> Tensor | tuple[Tensor, ...]:
    """For each token of this rank at position p, the row at position ``p + by`` of the sequence.

    ``shift(sharding.shard(x), by)`` is the shard of ``x`` shifted on one device: ``x[:, by:]``, then ``by`` rows of
    ``fill``. Gradients are shifted back. All ranks of the sharding must call it, and run its backward.

    Args:
        x_local: ``[b, s, ...]`` with the tokens along ``dim``; any dtype. Under a ``mask`` of several batch rows,
            dimension 0 is the batch.
        by: how many positions later; negative for earlier rows. Several steps are one exchange.
        sharding: which tokens each rank holds.
        mask: rows of another document are replaced by ``fill``; None: the sequence is one document. Of a mask, only the
            documents count: padding at the end of a batch row belongs to its last document under ``Mask.padding``, and
            is a document of its own under ``Mask.documents(padding=True)``.
        fill: past the end of the sequence or of the document. ``-100`` for labels.
        dim: the dimension of the sequence.

    Returns:
        A tensor like ``x_local``, or a tuple of them, one for each step of ``by``.

    Raises:
        TypeError: an argument has another type.
        ValueError: ``x_local`` does not fit the sharding or the mask, ``by`` is empty, or its dtype cannot hold
            ``fill``.

    Bytes sent per rank, w bytes of a row: w for each row that another rank needs: at most ``max(by)`` for each run of
    consecutive tokens and batch row. Under "striped" every token is a run. Backward sends float32.

    Example:
        >>> labels = seqpar.shift(ids_local, sharding=sharding, mask=mask, fill=-100)
        >>> first, second = seqpar.shift(hidden, (1, 2), sharding=sharding, mask=mask)
    """
    if not isinstance(sharding, Sharding):
        raise TypeError(f"sharding={sharding!r}: expected a seqpar.Sharding, as Sharding(seq_len, layout) makes one")
    if mask is not None and not isinstance(mask, Mask):
        raise TypeError(f"mask={type(mask).__name__}: expected a seqpar.Mask, such as Mask.documents(cu_seqlens)")
    steps = tuple(by) if isinstance(by, Sequence) else (by,)
    if not steps:
        raise ValueError(f"by={by!r}: expected an int, or at least one")
    for step in steps:
        check_int("by", step)
    axis = check_dim("x_local", x_local, dim)
    sharding.check_local(x_local.shape[axis])
    tokens_first = x_local.unsqueeze(0) if axis == 0 else x_local.movedim(axis, 1)  # [b, s, ...]
    if mask is not None:
        check_rows(mask, "x_local", tokens_first)
        mask.check_length(sharding.seq_len)
    batch, length, *others = tokens_first.shape
    rows = tokens_first.reshape(batch * length, tokens_first.shape[2:].numel())
    if not (rows.is_floating_point() or rows.is_complex()):
        least, most = (0, 1) if rows.dtype == torch.bool else (torch.iinfo(rows.dtype).min, torch.iinfo(rows.dtype).max)
        if int(fill) != fill or not least <= fill <= most:
            raise ValueError(f"fill={fill}: {rows.dtype} holds integers from {least} to {most}")
    no_row = rows.new_full((1, rows.shape[1]), fill)
    placement, link = link_of(sharding, x_local)
    furthest = tuple(max(-sharding.seq_len, min(step, sharding.seq_len)) for step in steps)
    plan = shift_plan(placement.tokens, placement.rank, mask or _ONE_DOCUMENT, batch, furthest, x_local.device)
    if rows.is_floating_point() and rows.element_size() > 1:
        fetched = fetch(rows, plan, link, "shift", no_row)
    elif rows.is_complex():
        parts, no_parts = (torch.view_as_real(x).flatten(1) for x in (rows, no_row))
        fetched = torch.view_as_complex(fetch(parts, plan, link, "shift", no_parts).unflatten(1, (-1, 2)))
    else:
        fetched = fetch(rows.contiguous().view(torch.uint8), plan, link, "shift", no_row.view(torch.uint8))
        fetched = fetched.view(rows.dtype)
    by_step = fetched.view(len(steps), batch, length, *others).unbind(0)
    results = tuple(x.squeeze(0) if axis == 0 else x.movedim(1, axis) for x in by_step)
    return results if isinstance(by, Sequence) else results[0]
