"""Kills, stops or breaks one of four ranks in every phase of a training step, and shows what the other ranks say.

    python tools/deaths.py [--setup NAME ...] [--phase NAME ...] [--fault NAME ...] [--victim RANK ...] [--late]

Each case is one run of four processes on this machine. A surviving rank should end soon, with an error that names the
operation and the victim, and no rank that has ended because of it. In the phase "checkpoint" the messages are
PyTorch's own (torch.distributed.checkpoint), and so is their text. The whole table takes about 40 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any

import torch
import torch._dynamo  # with the modules that attention's first call needs: once, not in each rank
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import seqpar
from seqpar.strategies.call import Run

RANKS, TIMEOUT_S = 4, 5.0
# How long after the fault a rank may take: the timeout, the grace periods of two ranks after one another, and a margin.
DEADLINE_S = TIMEOUT_S + 15.0
LATE_S = 0.5
HIDDEN, SEQ_LEN = 32, 64
# The sizes of the mesh, and the arguments of the layer.
SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ring": ({"ring": 4}, {"strategy": "ring"}),
    "ulysses": ({"ulysses": 4}, {"strategy": "ulysses"}),
    "all_gather": ({"ring": 4}, {"strategy": "context_parallel", "comm": "all_gather"}),
    "hybrid": ({"ring": 2, "ulysses": 2}, {"strategy": "hybrid"}),
    "dp x ring": ({"dp": 2, "ring": 2}, {"strategy": "ring"}),
    "ring x tp": ({"ring": 2, "tp": 2}, {"strategy": "tp_sp"}),
}
PHASES = ("handshake", "forward", "backward", "sync_gradients", "token_loss", "unshard", "checkpoint")
FAULTS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raises": lambda: (_ for _ in ()).throw(ZeroDivisionError("planted")),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        setup: a row of ``SETUPS``.
        phase: one of ``PHASES``.
        fault: a row of ``FAULTS``.
        victim: the rank that it happens to.
        shared_memory: whether messages of attention go through shared memory; otherwise through gloo.
        own_store: whether the launcher hosts the store, as torchrun does; otherwise rank 0.
        late: whether the rank after the victim begins the phase when the other ranks have ended.
    """

    setup: str
    phase: str
    fault: str = "killed"
    victim: int = 2
    shared_memory: bool = False
    own_store: bool = True
    late: bool = False

    def __str__(self) -> str:
        store = "launcher" if self.own_store else "rank 0"
        transport = "shared memory" if self.shared_memory else "gloo"
        what = f"rank {self.victim} {self.fault} in {self.phase}" + ", the next rank is late" * self.late
        return f"{self.setup}, {transport}, store of {store}: {what}"


@dataclass(frozen=True)
class Outcome:
    """What a surviving rank did.

    Attributes:
        rank: the rank.
        message: its error; "" if it hung or ended without an error.
        seconds: how long after the fault it ended.
    """

    rank: int
    message: str
    seconds: float

    def names(self, victim: int) -> bool:
        """Whether the error names the victim and no other rank."""
        named = re.search(r"rank\(s\) \[(\d+)\] of the job", self.message)
        if named is None:
            return victim == 0 and "the process that hosts it has ended or hangs, which is rank 0" in self.message
        return int(named[1]) == victim


def step(case: Case, mesh: Any, layer: torch.nn.Module, folder: str, at: Callable[[str], None]) -> None:
    """A training step. ``at(phase)`` is called at the beginning of each phase."""
    sharding = seqpar.Sharding(SEQ_LEN, "zigzag", mesh=mesh, strategy="tp_sp" if "tp" in case.setup else None)
    x = torch.randn(1, sharding.seq_local, HIDDEN)
    layer.zero_grad()
    at("handshake")
    layer(x)  # of a layer with a layout, without a sharding
    at("forward")
    y = layer(x, sharding=sharding)
    at("backward")
    y.square().sum().backward()
    at("sync_gradients")
    seqpar.sync_gradients(layer, mesh=mesh)
    at("token_loss")
    seqpar.token_loss(torch.randn(1, x.shape[1]), torch.zeros(1, x.shape[1], dtype=torch.int64), sharding=sharding)
    at("unshard")
    sharding.unshard(x)
    at("checkpoint")
    dcp.save({"layer": layer.state_dict()}, checkpoint_id=folder)


def rank_main(case: Case, rank: int, folder: str, ports: int, began: int) -> None:
    """A rank: a whole step, then one in which the victim has its fault.

    ``ports`` and ``began`` are pipes from which it reads the port of the store, and to which it writes the time of the
    fault.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=os.read(ports, 5).decode(), SEQPAR_SHARED_MEMORY=str(int(case.shared_memory)))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(case.own_store)
    torch.set_num_threads(1)
    sizes, arguments = SETUPS[case.setup]
    mesh = seqpar.init_mesh(**sizes, device_type="cpu", timeout=TIMEOUT_S)
    layer = seqpar.ParallelAttention(hidden_size=HIDDEN, num_heads=4, mesh=mesh, layout="zigzag", **arguments)
    step(case, mesh, layer, folder, lambda phase: None)

    def fault() -> None:
        os.write(began, json.dumps(time.monotonic()).encode())
        FAULTS[case.fault]()

    def at(phase: str) -> None:
        if case.late and phase == case.phase and rank == (case.victim + 1) % RANKS:
            time.sleep(LATE_S)
        if rank != case.victim or phase != case.phase:
            return
        if phase in ("forward", "backward"):  # in the middle: messages have been sent and others are waited for
            name = "attend" if phase == "forward" else "backward"
            setattr(Run, name, lambda *_: fault())
        else:
            fault()

    step(case, mesh, layer, folder, at)


def run(case: Case) -> list[Outcome]:
    """What the ranks that survive do."""
    # Rank 0 may not get the port of its store, which has just been closed.
    tries = (_run(case) for _ in range(3))
    return next((outcomes for outcomes in tries if outcomes), [Outcome(-1, "the fault was not reached", 0.0)])


def _run(case: Case) -> list[Outcome]:
    """What the ranks that survive do. An empty list if the fault was not reached."""
    ports, began, *ends = [os.pipe() for _ in range(RANKS + 2)]
    with tempfile.TemporaryDirectory() as folder:
        # The ranks are forked before the store starts threads.
        body = [partial(rank_main, case, rank, folder, ports[0], began[1]) for rank in range(RANKS)]
        processes = [_fork(body[rank], ends[rank][1]) for rank in range(RANKS)]
        try:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = f"{store.port:5}"
            if not case.own_store:
                del store
            os.write(ports[1], (port * RANKS).encode())
            return list(_outcomes(case, began[0], [end for end, _ in ends]))
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            for pipe in (*ports, *began, *chain.from_iterable(ends)):
                os.close(pipe)


def _fork(body: Callable[[], None], pipe: int) -> int:
    """Run ``body`` in a new process, which writes the error that it raises to ``pipe`` when it ends."""
    if process := os.fork():
        return process
    message = ""
    try:
        if not os.environ.get("SEQPAR_DEATHS_SHOW"):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        body()
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
    os.write(pipe, json.dumps([message, time.monotonic()]).encode())
    os._exit(1)


def _outcomes(case: Case, began: int, ends: list[int]) -> Iterator[Outcome]:
    """The outcome of each rank but the victim, from the pipe of the fault and the pipes of the ranks."""
    survivors = {ends[rank]: rank for rank in range(RANKS) if rank != case.victim}
    if not select.select([began], [], [], 30.0)[0]:
        return
    fault = json.loads(os.read(began, 100))
    while survivors:
        ready, _, _ = select.select(list(survivors), [], [], max(fault + DEADLINE_S - time.monotonic(), 0.0))
        if not ready:
            yield from (Outcome(rank, "", DEADLINE_S) for rank in survivors.values())
            return
        for pipe in ready:
            message, ended = json.loads(os.read(pipe, 1 << 16))
            yield Outcome(survivors.pop(pipe), message, ended - fault)


def show(cases: Sequence[Case], at_once: int = 4) -> bool:
    """Run the cases and print what the ranks say. Returns whether all ranks name the victim and no other rank."""
    total = named = hangs = 0
    with multiprocessing.get_context("fork").Pool(at_once) as workers:
        for case, outcomes in zip(cases, workers.imap(run, cases), strict=True):
            good = sum(outcome.names(case.victim) for outcome in outcomes)
            hung = sum(not outcome.message for outcome in outcomes)
            total, named, hangs = total + len(outcomes), named + good, hangs + hung
            last = max(outcome.seconds for outcome in outcomes)
            print(f"{case}: {good} of {len(outcomes)} name it, {hung} hung, {last:.1f} s", flush=True)
            for outcome in outcomes:
                if not outcome.names(case.victim):
                    print(f"    rank {outcome.rank}, {outcome.seconds:.1f} s: {outcome.message[:200]}", flush=True)
    print(f"{named} of {total} ranks that survived name the victim and no other rank; {hangs} hung")
    return named == total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", nargs="+", choices=SETUPS, default=[*SETUPS])
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=[*PHASES])
    parser.add_argument("--fault", nargs="+", choices=FAULTS, default=[*FAULTS])
    parser.add_argument("--victim", nargs="+", type=int, choices=range(RANKS), default=[0, 2])
    parser.add_argument("--at-once", type=int, default=4, help="how many cases run at the same time")
    parser.add_argument("--late", action="store_true", help="the rank after the victim is late")
    args = parser.parse_args()
    table = product(args.setup, args.phase, args.fault, args.victim, (False, True), (True, False), [args.late])
    sys.exit(not show([Case(*x) for x in table], args.at_once))


if __name__ == "__main__":
    main()
