"""Does communication overlap with computation? The time of a layer over slow links, divided by its time over fast ones.

The layer is a TP-SP block (attention and SwiGLU) or, with ``--strategy``, attention under another strategy.

Each host is simulated by a network namespace, and a switch connects the namespaces. Creating them needs root and
iproute2. Each host runs ``--per-host`` ranks with one thread each. The ranks measure a step in turns on fast links and
on slow links, on which ``tc tbf`` limits the rate at which each host sends. The limit is set so that the messages of a
step, sent one after another without computation, take ``--share`` of the time of a step on the fast links. The share is
measured, not computed. The ratio slow / fast is reported for each kind of overlap, as the median of the rounds. Without
overlap it is about 1 + share. With perfect overlap it is 1.

Units: seconds of wall time, bytes of payload that one rank sends to other hosts, and bits a second for the links.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import seqpar
from seqpar.cli.launch import under_launcher
from seqpar.comm import collectives
from seqpar.layers import AttentionLayer
from seqpar.strategies import head_exchange

DEADLINE_S = 900
PORT = 29577
SWITCH, INTERFACE = "seqpar-switch", "spar0"
# TCP settings of a host on a slow link. With small send buffers, data in one direction delays the acknowledgements of
# the other by a few milliseconds at most. A link that was idle starts at full speed.
SETTINGS = (
    "net.ipv4.tcp_wmem=4096 262144 262144",
    "net.ipv4.tcp_rmem=4096 16777216 33554432",
    "net.ipv4.tcp_slow_start_after_idle=0",
)
# The kinds of overlap of each strategy; for context_parallel, the tensors that it gathers. The first is the default.
VARIANTS = {
    "tp_sp": ("ring", "none"),
    "ulysses": ("parts", "none"),
    "ring": ("ring",),
    "context_parallel": ("kv", "activations"),
}
MESH = {"tp_sp": "tp", "ulysses": "ulysses", "ring": "ring", "context_parallel": "ring"}
SHAPE = (
    "strategy", "hidden", "seq_len", "heads", "kv_heads", "intermediate", "hosts", "per_host", "share", "rate",
    "rounds",
)  # fmt: skip
Work = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="tp_sp", choices=tuple(VARIANTS))
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, help="by default as many as query heads")
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each host")
    parser.add_argument("--one-level", action="store_true", help="as if all ranks shared one host")
    parser.add_argument("--share", type=float, default=0.6, help="transfer alone, as a share of the fast step")
    parser.add_argument("--rate", type=int, help="bits a second of the slow links, instead of --share")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="JSON file (default: in benchmarks/results)")
    arguments = parser.parse_args()
    if under_launcher():
        worker(arguments)
        return
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        sys.exit("error: to make hosts on this machine, slow_link needs root and iproute2 (ip, tc)")
    measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """Run torchrun on each host, and report what rank 0 writes."""
    per_host = arguments.per_host
    with hosts(arguments.hosts), tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        options = [f"--{k.replace('_', '-')}={v}" for k in SHAPE if (v := getattr(arguments, k)) is not None]
        script = [__file__, *options, *["--one-level"] * arguments.one_level, f"--out={out}"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={arguments.hosts}"]
        torchrun += [f"--nproc-per-node={per_host}", f"--master-addr={address(0)}", f"--master-port={PORT}"]
        with contextlib.ExitStack() as running:
            processes = []
            for host, name in enumerate(map(host_name, range(arguments.hosts))):
                environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
                environment["SEQPAR_HOST"] = "all" if arguments.one_level else name
                command = ["ip", "netns", "exec", name, *torchrun, f"--node-rank={host}", *script]
                processes.append(running.enter_context(subprocess.Popen(command, env=os.environ | environment)))
                running.callback(processes[-1].terminate)
            if any(process.wait(DEADLINE_S) for process in processes):
                sys.exit("error: a host failed; see above")
        result = json.loads(out.read_text())
    for overlap, ratios in result["ratios"].items():
        shown = [round(ratio, 2) for ratio in ratios]
        print(f"overlap={overlap:5s} slow / fast: {statistics.median(ratios):.2f} (median of {shown})")
    print(
        f"links of {result['rate_bit_s'] / 1e6:.0f} Mbit/s, {result['bytes_between_hosts'] / 1e6:.1f} MB sent to other "
        f"hosts a step, transfer alone {result['share_measured']:.2f} of {result['fast_s']:.3f} s"
    )
    name = f"slow_link_{arguments.strategy}_{arguments.hosts}x{per_host}{'_one_level' * arguments.one_level}.json"
    path = arguments.out or Path(__file__).parent / "results" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = {key: getattr(arguments, key) for key in (*SHAPE, "one_level")}
    path.write_text(json.dumps({**shape, **result}, indent=1) + "\n")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


def host_name(host: int) -> str:
    """The namespace of a host."""
    return f"seqpar-host{host}"


def address(host: int) -> str:
    return f"10.199.0.{host + 1}"


@contextlib.contextmanager
def hosts(number: int) -> Iterator[None]:
    """One namespace for each host, each connected by a veth pair to a bridge in another namespace."""
    names = [SWITCH, *map(host_name, range(number))]
    remove(names)
    try:
        run("ip", "netns", "add", SWITCH)
        run("ip", "-n", SWITCH, "link", "add", "bridge0", "type", "bridge")
        run("ip", "-n", SWITCH, "link", "set", "bridge0", "up")
        for host, name in enumerate(names[1:]):
            run("ip", "netns", "add", name)
            ends = ["ip", "link", "add", INTERFACE, "netns", name, "type", "veth"]
            run(*ends, "peer", "name", f"port{host}", "netns", SWITCH)
            run("ip", "-n", SWITCH, "link", "set", f"port{host}", "master", "bridge0", "up")
            run("ip", "-n", name, "address", "add", f"{address(host)}/24", "dev", INTERFACE)
            run("ip", "-n", name, "link", "set", INTERFACE, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            for setting in SETTINGS:
                run("ip", "netns", "exec", name, "sysctl", "-w", setting)
        yield
    finally:
        remove(names)


def remove(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=30)


def limit(rate: int | None) -> None:
    """Limit the rate at which this rank's host sends to ``rate`` bits per second; None removes the limit."""
    dist.barrier()
    if os.environ["LOCAL_RANK"] == "0":
        delete = ["tc", "qdisc", "del", "dev", INTERFACE, "root"]
        subprocess.run(delete, check=False, capture_output=True, timeout=30)
        if rate is not None:
            run("tc", "qdisc", "add", "dev", INTERFACE, "root", *f"tbf rate {rate}bit burst 1mb latency 200ms".split())
    dist.barrier()


def worker(arguments: argparse.Namespace) -> None:
    """One of the ranks that ``measure`` starts. Rank 0 writes the result to ``--out``."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    variants = VARIANTS[arguments.strategy]
    mesh = seqpar.init_mesh(**{MESH[arguments.strategy]: arguments.hosts * arguments.per_host}, device_type="cpu")
    steps = {overlap: make_step(arguments, mesh, overlap) for overlap in variants}
    for step in steps.values():
        step()
    with seqpar.trace() as trace:
        steps[variants[0]]()
    sent = int(agreed(trace.bytes_sent if arguments.one_level else trace.bytes_between_hosts))
    alone = messages_alone(steps[variants[0]])
    fast_s = agreed(statistics.median(seconds(steps[variants[0]]) for _ in range(3)))
    wanted_s = arguments.share * fast_s
    rate = arguments.rate or int(8 * sent * arguments.per_host / wanted_s)
    for _ in range(
        1 if arguments.rate else 4
    ):  # adjust the rate until the messages alone take the share that was asked for
        limit(rate)
        alone_s = agreed(statistics.median(seconds(alone) for _ in range(3)))
        if arguments.rate or abs(alone_s / wanted_s - 1) < 0.03:
            break
        rate = int(rate * alone_s / wanted_s)
    ratios: dict[str, list[float]] = {overlap: [] for overlap in variants}
    for _ in range(arguments.rounds):  # in turns, so that a machine that slows down affects all of them alike
        for overlap, step in steps.items():
            limit(None)
            once_fast_s = seconds(step)
            limit(rate)
            ratios[overlap].append(seconds(step) / once_fast_s)
    limit(None)
    if dist.get_rank() == 0:
        result = {
            "rate_bit_s": rate, "bytes_between_hosts": sent, "fast_s": fast_s, "share_measured": alone_s / fast_s,
            "ratios": ratios,
        }  # fmt: skip
        arguments.out.write_text(json.dumps(result))


def make_step(arguments: argparse.Namespace, mesh: dist.DeviceMesh, overlap: str) -> Work:
    """Forward and backward of the layer."""
    strategy, hidden = arguments.strategy, arguments.hidden
    x = torch.randn(1, arguments.seq_len // mesh.size(), hidden, requires_grad=True)  # [batch, seq, hidden]
    heads = hidden, arguments.heads, arguments.kv_heads
    layers: list[nn.Module]
    if strategy == "tp_sp":
        layers = [
            seqpar.ParallelAttention("tp_sp", *heads, mesh=mesh, overlap=overlap),
            seqpar.MegatronMLP(hidden, arguments.intermediate, mesh=mesh, overlap=overlap),
        ]
    else:
        layout = "contiguous" if strategy == "ulysses" else "zigzag"
        options: dict[str, Any] = {}
        if strategy == "context_parallel":
            options = {"comm": "all_gather", "gather": overlap}
        layers = [seqpar.ParallelAttention(strategy, *heads, mesh=mesh, layout=layout, **options)]
    norms = [nn.RMSNorm(hidden, eps=1e-6) for _ in layers]
    chunks = 1 if strategy == "ulysses" and overlap == "none" else head_exchange.MAX_CHUNKS

    def step() -> None:
        head_exchange.MAX_CHUNKS = chunks  # with one chunk, all heads are in one all-to-all, and nothing overlaps
        y = x
        for norm, layer in zip(norms, layers, strict=True):
            y = y + (layer(norm(y), seq_len=arguments.seq_len) if isinstance(layer, AttentionLayer) else layer(norm(y)))
        y.square().mean().backward()

    return step


def messages_alone(step: Work) -> Work:
    """The messages of a step, sent again one after another, without the computation."""
    calls: list[Callable[[], Any]] = []
    real = (
        dist.isend,
        dist.irecv,
        dist.all_to_all_single,
        collectives.all_gather_single,
        collectives.reduce_scatter_single,
    )

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            call = partial(function, *args, **kwargs)
            if kwargs.get("tag") != 0:  # a rank's number of the call
                calls.append(call)
            return call()

        return record

    with (
        mock.patch.object(dist, "isend", recorded(real[0])),
        mock.patch.object(dist, "irecv", recorded(real[1])),
        mock.patch.object(dist, "all_to_all_single", recorded(real[2])),
        mock.patch.object(collectives, "all_gather_single", recorded(real[3])),
        mock.patch.object(collectives, "reduce_scatter_single", recorded(real[4])),
    ):
        step()

    def work() -> None:
        for call in calls:
            started = call()
            for request in started if isinstance(started, list) else [started]:
                if request is not None:
                    request.wait()

    return work


def seconds(work: Work) -> float:
    """The time until all ranks have done ``work``."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def agreed(value: float) -> float:
    """The value of rank 0, on every rank."""
    values = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(values, 0)
    return float(values)


if __name__ == "__main__":
    main()
