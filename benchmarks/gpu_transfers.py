"""The check of ``gpu.py`` for messages: a ring of 8 ranks on one GPU, one rank after another, with copies as messages.

The loops, the stream of transfers and the memory of messages are the package's. Only ``PeerToPeer._exchange`` is
replaced: a third stream waits, as NCCL's does, for the stream that posts a message, idles for a random time, and copies
the rows from where their owner holds them. Kernels idle for random times too. A kernel that reads a message too early,
or a message whose memory is used too early, gives wrong numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from gpu_checks import DEVICE, INTERPRETED, LIMIT, backend_of, errors_of, normal, supports, synchronize
from gpu_report import Rows
from torch import Tensor

from seqpar.comm.p2p import Links
from seqpar.comm.waiting import Pending
from seqpar.kernels.base import Score
from seqpar.masks.mask import Mask
from seqpar.placement.heads import Heads
from seqpar.placement.layout import TokenLayout
from seqpar.placement.placement import Placement
from seqpar.schedule.plan import AttentionPlan
from seqpar.schedule.program import ByPeer, Hop
from seqpar.sharding.spec import AttentionSpec
from seqpar.strategies.call import AttentionCall, Run
from seqpar.strategies.ring import ring_backward, ring_forward
from seqpar.strategies.transport import Message, PeerToPeer, _views
from tests.reference import Rule, dense_gradients, visible_pairs

RANKS, ROUNDS = 8, 4
_MOST_CYCLES = 1 << 20  # half a millisecond


def idle() -> None:
    if DEVICE.type == "cuda":
        torch.cuda._sleep(random.randrange(_MOST_CYCLES))


class Copied:
    """A message on its way. ``wait`` lets the current stream wait, and idle."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self, *_: Any) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        idle()


class Copies(PeerToPeer):
    """Messages that are copies inside this GPU.

    Args:
        plan: of the rank that is computed now.
        kv: for each rank, its k and v.
        gradients: for each rank, the sums of received dk and dv, to which sent gradients are added.
        stream: where the copies run; None on the CPU.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        kv: Sequence[Sequence[Tensor]],
        gradients: Sequence[Sequence[Tensor]],
        stream: torch.cuda.Stream | None,
    ) -> None:
        super().__init__(plan, Links())
        self._kv, self._gradients, self._stream = kv, gradients, stream
        self._alone = 0  # how many messages have held dk alone, or dv alone: an all-gather sends one after the other

    def _exchange(
        self, hop: Hop, outgoing: dict[int, Message], receipt: ByPeer, like: Any, link: Any
    ) -> tuple[dict[int, Message], Pending]:
        incoming = {peer: Message(like, rows, longest=self._plan.longest) for peer, rows in receipt.rows.items()}
        buffers = [message.flat for message in (*outgoing.values(), *incoming.values())]
        if self._stream is None:
            self._copy(hop, outgoing, incoming, receipt)
            return incoming, Pending([Copied(None)], buffers)
        self._stream.wait_stream(torch.cuda.current_stream())  # which posts the messages
        with torch.cuda.stream(self._stream):
            idle()
            self._copy(hop, outgoing, incoming, receipt)
        return incoming, Pending([Copied(self._stream.record_event())], buffers)

    def _copy(self, hop: Hop, outgoing: Any, incoming: dict[int, Message], receipt: ByPeer) -> None:
        if receipt is hop.received:
            for transfer, views in zip(hop.receives, _views(receipt, incoming), strict=True):
                transfer.owner_rows.copy_to(views, self._kv[transfer.owner])
            return
        parts = slice(0, 2)
        if all(len(message.tensors) == 1 for message in (*outgoing.values(), *incoming.values())):
            parts = slice(self._alone % 2, self._alone % 2 + 1)
            self._alone += 1
        for peer, message in outgoing.items():  # the gradients of this rank's part for the owners of keys
            (transfer,) = (x for x in hop.receives if x.peer == peer)
            transfer.owner_rows.add_to(self._gradients[transfer.owner][parts], message.tensors)
        for message in incoming.values():
            message.flat.zero_()  # the other ranks add theirs when they are computed


def check_transfers(rows: Rows, smoke: bool, name: str, gather: bool) -> None:
    """Forward and backward of a ring, or of an all-gather, against the float64 reference."""
    backend, what = backend_of(name), f"{name}, messages of {'an all-gather' if gather else 'a ring'} on streams"
    length, heads, kv_heads, dim = (64, 2, 1, 32) if smoke else (4096, 8, 2, 128)
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    q, dout = (normal(1, length, heads, dim, dtype=dtype) for _ in range(2))
    k, v = (normal(1, length, kv_heads, dim, dtype=dtype) for _ in range(2))
    score, mask, tokens = Score(dim**-0.5), Mask.causal(), TokenLayout(length, "zigzag", ring=RANKS)
    if not supports(rows, what, backend, q, k, score):
        return
    visible = visible_pairs((Rule("causal"),), length).to(DEVICE)
    dense = dense_gradients(q, k, v, visible, dout, softmax_scale=score.softmax_scale)
    at = [tokens.ring_positions(rank).tensor(DEVICE) for rank in range(RANKS)]
    kv = [(k[:, x].contiguous(), v[:, x].contiguous()) for x in at]
    stream = torch.cuda.Stream() if DEVICE.type == "cuda" else None
    found, of_heads = Placement(tokens=tokens, chunks=1), Heads.of_model(heads, kv_heads)

    def run() -> dict[str, float]:
        gradients = [[torch.zeros_like(x, dtype=torch.float32) for x in pair] for pair in kv]
        results = [torch.empty_like(x, dtype=torch.float32) for x in (q, q, k, v)]  # out, dq, dk, dv
        for rank in range(RANKS):
            plan = AttentionPlan(mask, tokens, rank, gather)
            call = AttentionCall(found, plan, AttentionSpec(backend=name.split()[0]), of_heads, score)
            rank_q, rank_dout = (x[:, at[rank]].contiguous() for x in (q, dout))

            def new_run(call: AttentionCall = call, rank: int = rank, rank_q: Tensor = rank_q) -> Run:
                made = Run(call, of_heads, rank_q, *kv[rank])
                made.transport = Copies(call.plan, kv, gradients, stream)
                return made

            out, lse = ring_forward(new_run(), rank_q, *kv[rank])
            dq, dk, dv, _ = ring_backward(new_run(), rank_dout, None, rank_q, *kv[rank], out, lse)
            results[0][:, at[rank]], results[1][:, at[rank]] = out.float(), dq
            for total, x in zip(gradients[rank], (dk, dv), strict=True):
                total += x
        synchronize()
        for rank, (dk, dv) in enumerate(gradients):
            results[2][:, at[rank]], results[3][:, at[rank]] = dk, dv
        return errors_of(results, dense)

    for attempt in range(1 if smoke else ROUNDS):
        if (errors := rows.attempt(f"{what}, round {attempt}", run)) is not None:
            passed = all(error < LIMIT[dtype] for error in errors.values())
            rows.add("check", f"{what}, round {attempt}", errors=errors, ran={}, passed=passed)
