"""The same bits for any number of ranks: every gradient is computed whole, by one rank, in one order of sums.

``deterministic="invariant"`` replaces the algorithm of every strategy by this one. Documents are divided into tiles of
a fixed size (``schedule/document_tiles.py``). A rank gathers what its own tiles need, and computes them whole:

    forward     keys and values that its queries see            -> out, lse of its queries
    backward    keys and values that its queries see            -> dq of its queries
                queries, dout, lse and delta that see its keys  -> dk, dv of its keys

Nothing is summed over the ranks, except for the gradient of sinks. A row of a result is a sum over tiles of its own
document, in their order, so it does not depend on the number of ranks, on the layout, or on other documents. The heads
are computed in parts, and while one part is computed, the messages of the next one are sent.

Elements sent per rank of P, forward, full mask, N tokens: (P-1)/P * N * n * (d + e). Backward sends K/V again, and
(P-1)/P * N * h * (d + e) of q and dout, with 2 h more in float32. A step has seven products instead of five.

Shapes: b batch, s tokens of this rank, m rows of tiles, h query heads, n KV heads, d head_dim of q and k, e head_dim of
v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.cache import cached_tensors, upload
from ..comm.p2p import links_of
from ..kernels.base import OutputGrad, Score, accumulator, sink_gradient
from ..kernels.document_tiles import OutputTiles, TileKernels, tile_kernels
from ..masks.runs import Runs
from ..placement.layout import CPU, TokenLayout
from ..schedule.document_tiles import DocumentTiles, TileGroup, rows_among, rows_of, tiles_of
from ..schedule.plan import AttentionPlan, PlanByHeads
from ..sharding.spec import REPLICATED, AttentionSpec
from .algorithm import Algorithm, AttentionGradients, Shapes
from .call import AttentionCall
from .row_exchange import RowPlan, start_fetch

_PARTS = 2  # of the heads: the messages of one are sent while the other is computed


class Invariant(Algorithm):
    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=accumulator(q.dtype))
        kernels, parts = self.kernels(call, q, k, v), self._head_tiles(call, q)
        starts = [partial(self.start, own.keys, call, (k[:, :, of_kv], v[:, :, of_kv])) for _, of_kv, _, own in parts]
        for (heads, _, score, own), (k_tiles, v_tiles) in zip(parts, _ahead(starts), strict=True):
            q_tiles = own.take(q[:, :, heads])
            if call.record is not None:
                call.record("forward", "input", q=q_tiles, k=k_tiles, v=v_tiles)
            with _noted(call):
                found = [
                    kernels.forward(q_tiles[:, rows], k_tiles[:, keys], v_tiles[:, keys], seen, score)
                    for rows, keys, seen in own.seen
                ]
                out[:, :, heads] = own.put([x for x, _ in found])
                lse[:, heads] = own.put([x.mT for _, x in found]).mT
        return out, lse, [q, k, v, out, lse]

    def backward(
        self, call: AttentionCall, saved: Sequence[Tensor], dout: Tensor, dlse: Tensor | None, shapes: Shapes
    ) -> AttentionGradients:
        q, k, v, out, lse = saved
        dq, dk, dv, delta = map(torch.empty_like, (q, k, v, lse))
        kernels, parts = self.kernels(call, q, k, v), self._head_tiles(call, q)
        starts: list[Callable[[], Callable[[], list[Tensor]]]] = []
        for heads, of_kv, _, own in parts:
            with _noted(call):
                of_lse = None if dlse is None else own.take(dlse[:, heads].mT).mT.contiguous()
                found = kernels.delta(own.take(out[:, :, heads]), own.take(dout[:, :, heads]), of_lse)
                delta[:, heads] = own.put([found.mT]).mT
            keys = k[:, :, of_kv], v[:, :, of_kv]
            queries = (q[:, :, heads], dout[:, :, heads]), (lse[:, heads].mT, delta[:, heads].mT)
            starts += partial(self.start, own.keys, call, keys), partial(self.start, own.queries, call, *queries)
        arrived = _ahead(starts)
        for heads, of_kv, score, own in parts:
            k_tiles, v_tiles = next(arrived)
            if call.record is not None:
                call.record("backward", "input", k=k_tiles, v=v_tiles)
            with _noted(call):
                q_tiles = own.take(q[:, :, heads])
                output = OutputTiles(own.take(dout[:, :, heads]), *(own.take(x[:, heads].mT).mT for x in (lse, delta)))
                gradients = (
                    kernels.query_gradients(
                        q_tiles[:, rows], k_tiles[:, keys], v_tiles[:, keys], output.of(rows), seen, score
                    )
                    for rows, keys, seen in own.seen
                )
                dq[:, :, heads] = own.put([*gradients])
            q_tiles, dout_tiles, *statistics = next(arrived)
            if call.record is not None:
                call.record("backward", "input", q=q_tiles, dout=dout_tiles, lse=statistics[0])
            with _noted(call):
                k_tiles, v_tiles = own.take(k[:, :, of_kv]), own.take(v[:, :, of_kv])
                output = OutputTiles(dout_tiles, *(x.mT for x in statistics))
                pairs = [
                    kernels.key_gradients(
                        q_tiles[:, rows], k_tiles[:, keys], v_tiles[:, keys], output.of(rows), seen, score
                    )
                    for rows, keys, seen in own.seeing
                ]
                dk[:, :, of_kv], dv[:, :, of_kv] = (own.put([*x]) for x in zip(*pairs, strict=True))
        dsinks = None if call.score.sinks is None else sink_gradient(call.score, OutputGrad(dout, out, lse, delta))
        return dq, dk, dv, dsinks

    def _head_tiles(self, call: AttentionCall, q: Tensor) -> list[_HeadTiles]:
        """The heads of ``q [b, s, h, d]``, in the parts in which they are sent and computed, one after another.

        They are the same on any number of ranks: the groups of heads with masks of their own, or two halves of KV
        heads.
        """
        plan, found = call.plan, []
        by_mask = call.heads.groups(plan.size) if isinstance(plan, PlanByHeads) else [(0, call.heads)]
        for i, group in by_mask:
            tiles = self.tiles(call, i, q)
            for part in group.chunks(1 if isinstance(plan, PlanByHeads) else _PARTS):
                heads, kv_heads = part.q_range(within=call.heads), part.kv_range(within=call.heads)
                score = call.score.heads(heads.start, heads.stop)
                found.append(
                    _HeadTiles(slice(heads.start, heads.stop), slice(kv_heads.start, kv_heads.stop), score, tiles)
                )
        return found

    def tiles(self, call: AttentionCall, group: int, q: Tensor) -> RankTiles:
        """The tiles of a group of heads with a mask of its own."""
        plan = call.plan.plans[group] if isinstance(call.plan, PlanByHeads) else call.plan
        return RankTiles.of(call, plan, call.cuts[group], q.shape[0], q.device)

    def kernels(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> TileKernels:
        """What computes the tiles."""
        return tile_kernels(call.spec.backend, q, k, v.shape[3], call.score)

    def start(self, plan: RowPlan, call: AttentionCall, *messages: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start to fetch tiles ``[1, m, ...]`` of tensors ``[b, s, ...]`` of all ranks.

        The tensors of a message have one dtype. The function that is returned waits for the tiles.
        """
        link = links_of(call.placement, messages[0][0].device).ulysses
        rows = [[x.flatten(0, 1).flatten(1) for x in message] for message in messages]
        waits = [start_fetch(torch.cat(message, 1), plan, link) for message in rows]

        def wait() -> list[Tensor]:
            found = []
            for message, of_rows, fetched in zip(messages, rows, waits, strict=True):
                parts = fetched().split([x.shape[1] for x in of_rows], 1)
                found += [part.reshape(1, -1, *x.shape[2:]) for part, x in zip(parts, message, strict=True)]
            return found

        return wait


def check_invariant(spec: AttentionSpec, alibi_slopes: Tensor | None, latent_weight: Tensor | None) -> None:
    """Raise a ValueError if the call's bits would depend on the number of ranks, or on what is beside a document."""
    reasons = {
        "dropout_p: what is dropped depends on the positions in the sequence": spec.dropout_p > 0,
        "latent_weight: expand the keys and values before the call": latent_weight is not None,
        "alibi_slopes of each batch row: pass [heads]": alibi_slopes is not None and alibi_slopes.dim() == 2,
        "gather='activations': the gradients of its hidden states are sums over the ranks": spec.strategy == REPLICATED,
    }
    for reason, found in reasons.items():
        if found:
            raise ValueError(f"deterministic='invariant' cannot be combined with {reason}; pass deterministic=True")


class _HeadTiles(NamedTuple):
    """Some heads, and the tiles of their mask."""

    heads: slice
    kv_heads: slice
    score: Score
    tiles: RankTiles


@dataclass(frozen=True, eq=False)
class RankTiles:
    """The tiles that have tokens of this rank, and what they need.

    Attributes:
        index: the tokens of these tiles, int64 ``[m]``, as indices into this rank's tokens ``[b * s]``; one past them
            for a row of zeros.
        rows: the row of each token of this rank among them, int64 ``[b, s]``.
        keys: fetches the tiles of keys that they see.
        queries: fetches the tiles of queries that see them.
        seen: which of the fetched keys their queries see.
        seeing: which of their keys the fetched queries see.
    """

    index: Tensor
    rows: Tensor
    keys: RowPlan
    queries: RowPlan
    seen: tuple[TileGroup, ...]
    seeing: tuple[TileGroup, ...]

    @property
    def nbytes(self) -> int:
        of_groups = sum(group.nbytes for group in (*self.seen, *self.seeing))
        return of_groups + sum(x.nbytes for x in (self.index, self.rows, self.keys, self.queries))

    @staticmethod
    def of(
        call: AttentionCall, plan: AttentionPlan, cuts: Sequence[Sequence[int]], batch: int, device: torch.device
    ) -> RankTiles:
        """The tiles of the heads with a plan, for ``batch`` batch rows. Cached."""
        placement = call.placement
        key = "document tiles", id(plan), placement.rank, batch
        return cached_tensors(
            key, device, lambda: rank_tiles(placement.tokens, placement.rank, plan.parts, cuts, batch, device), plan
        )

    def take(self, x: Tensor) -> Tensor:
        """The tiles of ``x [b, s, ...]``: ``[1, m, ...]``. Rows without a token of this rank are zeros."""
        rows = x.flatten(0, 1)
        return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])]).index_select(0, self.index)[None]

    def put(self, groups: Sequence[Tensor]) -> Tensor:
        """This rank's tokens ``[b, s, ...]`` of the rows ``[1, m, ...]`` of all groups of documents."""
        x = groups[0] if len(groups) == 1 else torch.cat([*groups], 1)
        return x[0].index_select(0, self.rows.flatten()).view(*self.rows.shape, *x.shape[2:])


def rank_tiles(
    tokens: TokenLayout,
    rank: int,
    parts: Sequence[Sequence[Runs]],
    cuts: Sequence[Sequence[int]],
    batch: int,
    device: torch.device,
) -> RankTiles:
    tiles = DocumentTiles.of(parts, cuts, tokens.seq_len, batch)
    # By rank, in the order of the sequence: row i is token i of the rank.
    held = [tiles.rows[:, tokens.tensor_positions(peer)[0].tensor(CPU)].flatten() for peer in range(tokens.ranks)]
    own, every = held[rank], tiles.rows.flatten()
    own_tiles, owner = tiles_of(own), torch.empty_like(tiles.lo[0])
    for peer, rows in enumerate(held):
        owner[rows] = peer

    def fetched(needed: Callable[[Tensor, Tensor], Tensor]) -> tuple[RowPlan, Tensor]:
        """The plan for the rows that ``needed(tiles of a rank, rows)`` says, and their tiles."""
        sent = [needed(tiles_of(rows), own).nonzero().flatten() for rows in held]
        sent[rank] = sent[rank][:0]
        rows = every[needed(own_tiles, every)]
        remote = rows[owner[rows] != rank]
        remote = remote[owner[remote].argsort(stable=True)]
        index = torch.full_like(owner, len(own) + len(remote))  # zeros
        index[own] = torch.where(needed(own_tiles, own), torch.arange(len(own), device=CPU), index[own])
        index[remote] = torch.arange(len(remote), device=CPU) + len(own)
        receives = owner[remote].bincount(minlength=len(held)).tolist()
        of_tiles = tiles_of(rows)
        plan = RowPlan(tuple(map(len, sent)), tuple(receives), torch.cat(sent), index[rows_of(of_tiles)])
        return plan.on(device), of_tiles

    (keys, key_tiles), (queries, query_tiles) = fetched(tiles.seen_by), fetched(tiles.seeing)
    index = torch.full_like(owner, len(own))
    index[own] = torch.arange(len(own), device=CPU)
    return RankTiles(
        index=upload(index[rows_of(own_tiles)], device),
        rows=upload(rows_among(own, own_tiles).view(batch, len(tokens.tensor_positions(rank)[0])), device),
        keys=keys,
        queries=queries,
        seen=tuple(group.to(device) for group in tiles.intervals(own_tiles, key_tiles)),
        seeing=tuple(group.to(device) for group in tiles.intervals(query_tiles, own_tiles)),
    )


def _ahead(starts: Iterable[Callable[[], Callable[[], list[Tensor]]]]) -> Iterator[list[Tensor]]:
    """What has been fetched, in order. Before it is computed with, the next fetch has been started."""
    waits: list[Callable[[], list[Tensor]]] = []
    for start in starts:
        waits.append(start())
        if len(waits) > 1:
            yield waits.pop(0)()
    for wait in waits:
        yield wait()


@contextmanager
def _noted(call: AttentionCall) -> Iterator[None]:
    """In the block, an error of a kernel is noted and raised at the end of the call, after all messages."""
    try:
        yield
    except Exception as error:
        if call.errors is None:
            raise
        call.errors.append(error)
