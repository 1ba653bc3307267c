"""The same bits for any number of ranks: every gradient is computed whole, by one rank, in one order of sums.

``deterministic="invariant"`` replaces the algorithm of every strategy by this one. Documents are divided into tiles of
a fixed size (``schedule/document_tiles.py``). A rank gathers what its own tiles need, and computes them whole:

    forward     keys and values that its queries see            -> out, lse of its queries
    backward    keys and values that its queries see            -> dq of its queries
                queries, dout, lse and delta that see its keys  -> dk, dv of its keys

Nothing is summed over the ranks, except for the gradient of sinks. A row of a result is a sum over tiles of its own
document, in their order, so it does not depend on the number of ranks, on the layout, or on other documents.

Elements sent per rank of P, forward, full mask, N tokens: (P-1)/P * N * n * (d + e). Backward sends K/V again, and
(P-1)/P * N * h * (d + e) of q and dout, with 2 h more in float32. A step has seven products instead of five.

Shapes: b batch, s tokens of this rank, m rows of tiles, h query heads, n KV heads, d head_dim of q and k, e head_dim of
v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.cache import cached_tensors, upload
from ..comm.p2p import links_of
from ..kernels.base import OutputGrad, sink_gradient
from ..kernels.document_tiles import OutputTiles, TileKernels, tile_kernels
from ..masks.mask import Mask
from ..placement.layout import CPU
from ..schedule.document_tiles import DocumentTiles, rows_among, rows_of, tiles_of
from ..schedule.rows import KeyIntervals
from ..sharding.spec import REPLICATED, AttentionSpec
from .algorithm import Algorithm, AttentionGradients, Shapes
from .call import AttentionCall
from .row_exchange import RowPlan, fetch_rows


class Invariant(Algorithm):
    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        own, out, lse = _RankTiles.of(call, q), q, q
        k_tiles, v_tiles = _fetch(own.keys, call, k, v)
        if call.record is not None:
            call.record("forward", "input", q=q, k=k_tiles, v=v_tiles)
        with _noted(call):
            out, lse = _kernels(call, q, k, v).forward(own.take(q), k_tiles, v_tiles, own.seen, call.score)
            out, lse = own.put(out), own.put(lse.mT).mT.contiguous()
        return out, lse, [q, k, v, out, lse]

    def backward(
        self, call: AttentionCall, saved: Sequence[Tensor], dout: Tensor, dlse: Tensor | None, shapes: Shapes
    ) -> AttentionGradients:
        q, k, v, out, lse = saved
        own, dq, dk, dv, delta = _RankTiles.of(call, q), q, k, v, torch.zeros_like(lse)
        with _noted(call):
            of_lse = None if dlse is None else own.take(dlse.mT).mT.contiguous()
            delta = own.put(_kernels(call, q, k, v).delta(own.take(out), own.take(dout), of_lse).mT).mT
        k_tiles, v_tiles = _fetch(own.keys, call, k, v)
        q_tiles, dout_tiles = _fetch(own.queries, call, q, dout)
        of_others = [x.mT.contiguous() for x in _fetch(own.queries, call, lse.mT, delta.mT)]
        if call.record is not None:
            call.record("backward", "input", k=k_tiles, v=v_tiles, q=q_tiles, dout=dout_tiles, lse=of_others[0])
        with _noted(call):
            kernels = _kernels(call, q, k, v)
            output = OutputTiles(own.take(dout), *(own.take(x.mT).mT.contiguous() for x in (lse, delta)))
            dq = own.put(kernels.query_gradients(own.take(q), k_tiles, v_tiles, output, own.seen, call.score))
            output = OutputTiles(dout_tiles, *of_others)
            found = kernels.key_gradients(q_tiles, own.take(k), own.take(v), output, own.seeing, call.score)
            dk, dv = map(own.put, found)
        dsinks = None if call.score.sinks is None else sink_gradient(call.score, OutputGrad(dout, out, lse, delta))
        return dq, dk, dv, dsinks


def check_invariant(spec: AttentionSpec, mask: Mask, alibi_slopes: Tensor | None, latent_weight: Tensor | None) -> None:
    """Raise a ValueError if the call's bits would depend on the number of ranks, or on what is beside a document."""
    reasons = {
        "dropout_p: what is dropped depends on the positions in the sequence": spec.dropout_p > 0,
        "latent_weight: expand the keys and values before the call": latent_weight is not None,
        "alibi_slopes of each batch row: pass [heads]": alibi_slopes is not None and alibi_slopes.dim() == 2,
        "strategy='tp_sp': its projections sum over the ranks": spec.tensor_parallel,
        "gather='activations': the gradients of its hidden states are sums over the ranks": spec.strategy == REPLICATED,
        f"mask={mask!r:.100}: call attention once for each group of heads": bool(mask.head_groups),
        f"mask={mask!r:.100}: its queries see several intervals of keys": mask.branches,
    }
    for reason, found in reasons.items():
        if found:
            raise ValueError(f"deterministic='invariant' cannot be combined with {reason}; pass deterministic=True")


@dataclass(frozen=True, eq=False)
class _RankTiles:
    """The tiles that have tokens of this rank, and what they need.

    Attributes:
        index: the tokens of these tiles, int64 ``[m]``, as indices into this rank's tokens ``[b * s]``; one past them
            for a row of zeros.
        rows: the row of each token of this rank among them, int64 ``[b, s]``.
        keys: fetches the tiles of keys that they see.
        queries: fetches the tiles of queries that see them.
        seen: the keys that their queries see, in the fetched tiles.
        seeing: their keys that the fetched queries see.
    """

    index: Tensor
    rows: Tensor
    keys: RowPlan
    queries: RowPlan
    seen: KeyIntervals
    seeing: KeyIntervals

    @property
    def nbytes(self) -> int:
        parts = self.index, self.rows, self.keys, self.queries, self.seen, self.seeing
        return sum(x.nbytes for x in parts)

    @staticmethod
    def of(call: AttentionCall, q: Tensor) -> _RankTiles:
        """The tiles of a call with ``q [b, s, h, d]``. Cached."""
        plan, placement, batch = call.plan, call.placement, q.shape[0]
        key = "document tiles", id(plan), placement.rank, batch
        return cached_tensors(key, q.device, lambda: _rank_tiles(call, batch, q.device), plan)

    def take(self, x: Tensor) -> Tensor:
        """The tiles of ``x [b, s, ...]``: ``[1, m, ...]``. Rows without a token of this rank are zeros."""
        rows = x.flatten(0, 1)
        return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])]).index_select(0, self.index)[None]

    def put(self, x: Tensor) -> Tensor:
        """This rank's tokens ``[b, s, ...]`` of ``x [1, m, ...]``."""
        return x[0].index_select(0, self.rows.flatten()).view(*self.rows.shape, *x.shape[2:])


def _rank_tiles(call: AttentionCall, batch: int, device: torch.device) -> _RankTiles:
    tokens, rank, documents = call.placement.tokens, call.placement.rank, call.documents
    assert documents is not None
    tiles = DocumentTiles.of(call.plan.runs, documents, tokens.seq_len, batch)
    # By rank, in the order of the sequence: row i is token i of the rank.
    held = [tiles.rows[:, tokens.tensor_positions(peer)[0].tensor(CPU)].flatten() for peer in range(tokens.ranks)]
    own, every = held[rank], tiles.rows.flatten()
    own_tiles, owner = tiles_of(own), torch.empty_like(tiles.lo)
    for peer, rows in enumerate(held):
        owner[rows] = peer

    def fetched(needed: Callable[[Tensor, Tensor], Tensor]) -> tuple[RowPlan, Tensor]:
        """The plan for the rows that ``needed(tiles of a rank, rows)`` says, and their tiles."""
        sent = [needed(tiles_of(rows), own).nonzero().flatten() for rows in held]
        sent[rank] = sent[rank][:0]
        rows = every[needed(own_tiles, every)]
        remote = rows[owner[rows] != rank]
        remote = remote[owner[remote].argsort(stable=True)]
        index = torch.full_like(tiles.lo, len(own) + len(remote))  # zeros
        index[own] = torch.where(needed(own_tiles, own), torch.arange(len(own), device=CPU), index[own])
        index[remote] = torch.arange(len(remote), device=CPU) + len(own)
        receives = owner[remote].bincount(minlength=len(held)).tolist()
        of_tiles = tiles_of(rows)
        plan = RowPlan(tuple(map(len, sent)), tuple(receives), torch.cat(sent), index[rows_of(of_tiles)])
        return plan.on(device), of_tiles

    def intervals(query_tiles: Tensor, key_tiles: Tensor) -> KeyIntervals:
        at, among = rows_of(query_tiles), rows_of(key_tiles)
        lo, hi = (rows_among(x[at], key_tiles).int()[None] for x in (tiles.lo, tiles.hi))
        return KeyIntervals(lo, hi, at.int(), among.int()).to(device)

    (keys, key_tiles), (queries, query_tiles) = fetched(tiles.seen_by), fetched(tiles.seeing)
    index = torch.full_like(tiles.lo, len(own))
    index[own] = torch.arange(len(own), device=CPU)
    return _RankTiles(
        index=upload(index[rows_of(own_tiles)], device),
        rows=upload(rows_among(own, own_tiles).view(batch, call.placement.length), device),
        keys=keys,
        queries=queries,
        seen=intervals(own_tiles, key_tiles),
        seeing=intervals(query_tiles, own_tiles),
    )


def _fetch(plan: RowPlan, call: AttentionCall, *xs: Tensor) -> list[Tensor]:
    """Tiles ``[1, m, ...]`` of tensors ``[b, s, ...]`` of all ranks."""
    rows = [x.flatten(0, 1).flatten(1) for x in xs]
    fetched = fetch_rows(torch.cat(rows, 1), plan, links_of(call.placement, xs[0].device).ulysses)
    parts = fetched.split([x.shape[1] for x in rows], 1)
    return [part.reshape(1, -1, *x.shape[2:]) for part, x in zip(parts, xs, strict=True)]


def _kernels(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> TileKernels:
    return tile_kernels(call.spec.backend, q, k, v.shape[3], call.score)


@contextmanager
def _noted(call: AttentionCall) -> Iterator[None]:
    """In the block, an error of a kernel is noted and raised at the end of the call, after all messages."""
    try:
        yield
    except Exception as error:
        call.errors.append(error)
