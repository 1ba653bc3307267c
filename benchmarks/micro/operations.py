"""What two ranks do together, over and over: collectives, sharding, and calls whose messages take no time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import seqpar
from seqpar.comm.collectives import all_gather_single
from seqpar.comm.p2p import exchange, without_messages

BYTES = 1 << 20
SEQ_LEN, HEADS, HEAD_DIM = 2048, 8, 64
TIMEOUT = timedelta(seconds=30)
TOKENS = 16  # so few that there is nothing to compute

Operation = Callable[[], Any]


def partner(port: int, pipe: Any) -> None:
    """Rank 1: runs the operations that rank 0 names, as often as it says."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=TIMEOUT)
    while (message := pipe.recv()) is not None:
        name, count = message
        operation = OPERATIONS[name]()
        for _ in range(count):
            operation()
        pipe.send("done")
    dist.destroy_process_group()


def _exchange() -> Operation:
    sent, received = torch.zeros(BYTES, dtype=torch.uint8), torch.empty(BYTES, dtype=torch.uint8)
    peer = 1 - dist.get_rank()
    return lambda: exchange([(peer, sent)], [(peer, received)], dist.group.WORLD).wait()


def _all_gather() -> Operation:
    own, gathered = torch.zeros(BYTES, dtype=torch.uint8), torch.empty(2 * BYTES, dtype=torch.uint8)
    return lambda: all_gather_single(gathered, own)


def _all_to_all() -> Operation:
    sent, received = torch.zeros(BYTES, dtype=torch.uint8), torch.empty(BYTES, dtype=torch.uint8)
    return lambda: dist.all_to_all_single(received, sent)


def _unshard() -> Operation:
    sharding = seqpar.Sharding(SEQ_LEN, "zigzag", group=dist.group.WORLD)
    x = torch.zeros(1, sharding.seq_local, HEADS * HEAD_DIM)
    return lambda: sharding.unshard(x)


def _host_time(strategy: Any, backward: bool) -> Operation:
    sharding = seqpar.Sharding(TOKENS, "zigzag", group=dist.group.WORLD)
    q, k, v = (torch.zeros(1, sharding.seq_local, HEADS, HEAD_DIM, requires_grad=backward) for _ in range(3))
    dout = torch.zeros_like(q)
    mask = seqpar.Mask.causal()

    def run() -> None:
        with without_messages():
            out = seqpar.attention(q, k, v, mask=mask, sharding=sharding, strategy=strategy)
            if backward:
                out.backward(dout)

    return run


OPERATIONS: dict[str, Callable[[], Operation]] = {
    "exchange": _exchange,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "unshard": _unshard,
    **{
        f"{strategy}, {'forward + backward' if backward else 'forward'}": partial(_host_time, strategy, backward)
        for strategy in ("ring", "ulysses", "context_parallel")
        for backward in (False, True)
    },
}
