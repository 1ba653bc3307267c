"""The attention function: check, agree with the other ranks, run."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from .checks import (
    check_choice,
    check_dropout,
    check_head_vector,
    check_int,
    check_number,
    check_qkv,
    has_length,
    no_compile,
)
from .comm.handshake import Fingerprint, all_gather_header, check_same, fingerprint, propagate_errors
from .kernels import BACKENDS
from .kernels.base import Score
from .layout import LAYOUTS, check_length, check_lengths
from .mask import Mask
from .mesh import AttentionGroups, rank_in, sequence_group, size_of
from .schedule import SequenceSharding
from .strategies import resolve
from .strategies.autograd import Call, SequenceParallelAttention


class _AttentionHeader(NamedTuple):
    """A rank's input of ``attention``."""

    length: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    mask_or_options: Fingerprint
    dropout_seed: int


@no_compile
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    strategy: str = "ring",
    mask: Mask = Mask.causal(),  # noqa: B008 (an immutable value)
    group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    layout: str = "contiguous",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    backend: str = "auto",
    return_lse: bool = False,
    seq_len: int | None = None,
    dropout_seed: int | None = None,
    **strategy_options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over one sequence whose tokens are sharded over a group of ranks.

    The result on each rank is its tokens' part of what one device would compute over the whole sequence, up to
    rounding, for every strategy, layout and mask; so are the gradients of ``q, k, v``. Differentiable once.

    Args:
        q: ``[batch, seq, heads, head_dim]``, this rank's tokens. float32, bfloat16, float16 or float64.
        k, v: ``[batch, seq, kv_heads, head_dim]``, of the same tokens; ``heads`` is a multiple of ``kv_heads``.
        strategy: "local", "ring", "ulysses", "context_parallel" or "hybrid".
        mask: which keys each query sees, in global positions.
        group, mesh: the ranks the sequence is sharded over: a ProcessGroup, or a mesh as of ``init_mesh``. With
            neither, the default group.
        layout: how the tokens are sharded, as given to ``shard``: "contiguous", "zigzag" or "striped".
        softmax_scale: of the scores; by default ``head_dim ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 is none (Gemma 2).
        sinks: ``[heads]``, one more logit for each head in the softmax's denominator (gpt-oss). Its gradient is this
            rank's share: sum it over the sequence group.
        alibi_slopes: ``[heads]`` or ``[batch, heads]``, not differentiated; scores lose ``slope * |i - j|`` with
            global positions (Press et al., 2021).
        dropout_p: probability of dropping an attention weight. What is dropped depends only on the seed, the batch
            row, the head and the two global positions: not on the strategy or the number of ranks.
        deterministic: ask for bitwise reproducible gradients. All present backends are.
        backend: "auto" or one of ``seqpar.backends()``. One that lacks a feature asked for leaves the call to the
            next that has it; ``seqpar.trace`` shows which ran.
        return_lse: also return the log-sum-exp of the scores, sinks included.
        seq_len: the whole sequence's length. With it the call starts without a control exchange between the ranks;
            they must then agree by themselves.
        dropout_seed: the same on all ranks; by default rank 0 draws one from torch's CPU generator.
        strategy_options: context_parallel: ``comm`` ("all_gather", "p2p", "a2a", "a2a+p2p"); hybrid and "a2a+p2p" on
            a plain group: ``ulysses_size``.

    Returns:
        ``out [batch, seq, heads, head_dim]`` in q's dtype; with ``return_lse`` also ``lse [batch, heads, seq]``,
        float32 (float64 for float64). A query that sees no key has 0 and -inf.

    Raises:
        TypeError, ValueError: bad input, before any payload is sent. RuntimeError: another rank's input was bad.
    """
    drawn = bool(dropout_p) and dropout_seed is None
    asking = drawn or not has_length(seq_len)
    alone = strategy == "local" and mesh is None and group is None
    everyone = None if alone else sequence_group(mesh, group)
    with propagate_errors(everyone if asking else None):
        groups = _check_call(strategy, mask, group, mesh, layout, backend, strategy_options)
        dropout_p = check_dropout(dropout_p)
        softcap = check_number("softcap", softcap)
        if softcap < 0:
            raise ValueError(f"softcap={softcap}: a positive cap is needed, or 0 for none")
        if softmax_scale is not None:
            softmax_scale = check_number("softmax_scale", softmax_scale)
        if seq_len is not None:
            check_int("seq_len", seq_len, 0)
        if dropout_seed is not None:
            check_int("dropout_seed", dropout_seed, 0)
            if dropout_seed >= 2**63:
                raise ValueError(f"dropout_seed={dropout_seed}: a seed in [0, 2**63) is needed")
        check_qkv(q, k, v)
        check_head_vector("sinks", sinks, q, batched=False)
        check_head_vector("alibi_slopes", alibi_slopes, q, batched=True)
        if mask.batch not in (1, q.shape[0]):
            raise ValueError(f"mask: made for {mask.batch} batch rows, but q has {q.shape[0]}")
        how = f"{strategy} {groups.ring_size} {groups.ulysses_size} {groups.gather} {layout}"
        mask_or_options = fingerprint(mask, how, softmax_scale, softcap, dropout_p, return_lse)
    seed: int = int(torch.randint(2**62, (), device="cpu").item()) if drawn else dropout_seed or 0
    if asking:
        batch, length, heads, head_dim = q.shape
        header = _AttentionHeader(length, batch, heads, k.shape[2], head_dim, q.dtype, mask_or_options, seed)
        headers = all_gather_header(lambda: header, everyone)
        check_same(headers, "batch", "heads", "kv_heads", "head_dim", "dtype", "mask_or_options")
        if not drawn:
            check_same(headers, "dropout_seed")
        seq_len = check_lengths([header.length for header in headers], layout, seq_len)
        seed = headers[0].dropout_seed
    else:
        assert seq_len is not None
        check_length(q.shape[1], seq_len, size_of(everyone), rank_in(everyone), layout)
    call = Call(
        groups=groups,
        shards=SequenceSharding(seq_len, layout, groups.ring_size, groups.ulysses_size),
        mask=mask,
        score=Score(
            softmax_scale=softmax_scale if softmax_scale is not None else q.shape[3] ** -0.5,
            softcap=softcap,
            alibi_slopes=None if alibi_slopes is None else alibi_slopes.detach().float(),
            sinks=None if sinks is None else sinks.detach(),
            dropout_p=dropout_p,
            dropout_seed=seed,
        ),
        backend=backend,
        heads=q.shape[2],
        kv_heads=k.shape[2],
        return_lse=return_lse,
    )
    out, lse = SequenceParallelAttention.apply(q, k, v, sinks, call)
    return (out, lse) if return_lse else out


def ring_attention(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` with ``strategy="ring"``: keys and values travel, hop by hop."""
    return attention(q, k, v, strategy="ring", **kwargs)


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` with ``strategy="ulysses"``: all-to-all between sequence shards and head shards."""
    return attention(q, k, v, strategy="ulysses", **kwargs)


def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, *, comm: str = "all_gather", **kwargs: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` with ``strategy="context_parallel"``: ``comm`` says how keys and values get here."""
    return attention(q, k, v, strategy="context_parallel", comm=comm, **kwargs)


def hybrid_attention(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` with ``strategy="hybrid"``: all-to-all in subgroups, ring across them."""
    return attention(q, k, v, strategy="hybrid", **kwargs)


def _check_call(
    strategy: str,
    mask: Mask,
    group: ProcessGroup | None,
    mesh: DeviceMesh | None,
    layout: str,
    backend: str,
    options: dict[str, Any],
) -> AttentionGroups:
    """Check what must be alike on all ranks, and find the groups."""
    if not isinstance(mask, Mask):
        raise TypeError(f"mask={type(mask).__name__}: a seqpar.Mask is needed, such as seqpar.Mask.causal()")
    check_choice("layout", layout, LAYOUTS)
    check_choice("backend", backend, ("auto", *BACKENDS))
    if backend != "auto" and (why := BACKENDS[backend].unavailable()) is not None:
        raise ValueError(f"backend={backend!r} cannot run here: {why}; use backend='auto'")
    return resolve(strategy, mesh, group, options)
