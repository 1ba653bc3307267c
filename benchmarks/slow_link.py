"""Does communication hide behind computation? The time of a layer on two hosts with a slow link, over a fast link's.

The layer is a TP-SP block (attention and SwiGLU) or, with ``--strategy``, attention under another strategy.

Two network namespaces joined by a veth pair stand for two hosts; making them takes root and iproute2. Each runs one
rank with one thread, first on the bare link, then behind a ``tc tbf`` limit. The limit is set so that the messages of a
step alone, sent one after another without computation, take ``--share`` of the time of a step on the fast link. The
share is measured, not computed. The ratio slow / fast is reported for each way of overlapping, as the median of runs
taken in turns. Without overlap it is about 1 + share. With perfect overlap it is 1.

Units: seconds of wall time, bytes of payload sent by one rank, and bits a second for the link.
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
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import seqpar
from seqpar.cli.launch import CommandError, exit_with, follow_launcher, launch, under_launcher
from seqpar.strategies import ulysses

DEADLINE_S = 300
PORT = 29577
# TCP settings of a host on a slow link. With small send buffers, data in one direction delays the acknowledgements of
# the other by a few milliseconds at most. A link that was idle starts at full speed.
SETTINGS = (
    "net.ipv4.tcp_wmem=4096 262144 262144",
    "net.ipv4.tcp_rmem=4096 16777216 33554432",
    "net.ipv4.tcp_slow_start_after_idle=0",
)
# The ways in which each strategy can overlap; the first is its default.
VARIANTS = {"tp_sp": ("ring", "none"), "ulysses": ("parts", "none"), "ring": ("ring",), "context_parallel": ("ring",)}


class Host(NamedTuple):
    """A network namespace with one end of the link."""

    namespace: str
    interface: str
    address: str


HOSTS = (Host("seqpar-a", "spar0", "10.199.0.1"), Host("seqpar-b", "spar1", "10.199.0.2"))  # by rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="tp_sp", choices=tuple(VARIANTS))
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--share", type=float, default=0.6, help="transfer alone, as a share of the fast step")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON file (default: in benchmarks/results)")
    # For the ranks that ``step`` starts.
    parser.add_argument("--overlap", help=argparse.SUPPRESS)
    parser.add_argument("--transfer-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if under_launcher():
        worker(arguments)
        return
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        sys.exit("error: to make two hosts on this machine, slow_link needs root and iproute2 (ip, tc)")
    try:
        measure(arguments)
    except CommandError as error:
        exit_with(error)


def measure(arguments: argparse.Namespace) -> None:
    variants = VARIANTS[arguments.strategy]
    with two_hosts():
        fast = step(arguments, variants[0])
        transfer_s = arguments.share * fast["seconds"]
        rate = int(8 * fast["bytes_sent"] / transfer_s)
        for _ in range(3):  # adjust the rate until the messages alone take the share that was asked for
            limit(rate)
            alone = step(arguments, variants[0], transfer_only=True)["seconds"]
            print(f"link {rate / 1e6:.0f} Mbit/s: transfer alone takes {alone / fast['seconds']:.2f} of the step")
            if abs(alone / transfer_s - 1) < 0.03:
                break
            rate = int(rate * alone / transfer_s)
        results: list[dict[str, float | str]] = []
        # In turns, so that a machine that slows down slows all of them.
        for _ in range(3):
            for overlap in variants:
                limit(None)
                fast_s = step(arguments, overlap)["seconds"]
                limit(rate)
                slow_s = step(arguments, overlap)["seconds"]
                results.append({"overlap": overlap, "fast_s": fast_s, "slow_s": slow_s})
    report(arguments, results, rate, int(fast["bytes_sent"]), alone / fast["seconds"])


def report(
    arguments: argparse.Namespace, results: list[dict[str, float | str]], rate: int, sent: int, share: float
) -> None:
    summary = {}
    for overlap in VARIANTS[arguments.strategy]:
        ratios = [float(r["slow_s"]) / float(r["fast_s"]) for r in results if r["overlap"] == overlap]
        summary[overlap] = statistics.median(ratios)
        print(f"overlap={overlap:5s} slow / fast: {summary[overlap]:.2f} (median of {[round(r, 2) for r in ratios]})")
    print(f"link {rate / 1e6:.0f} Mbit/s, {sent / 1e6:.1f} MB sent a step, transfer alone {share:.2f} of the step")
    shape = {k: v for k, v in vars(arguments).items() if k not in ("out", "overlap", "transfer_only")}
    out = arguments.out or Path(__file__).parent / "results" / f"slow_link_{arguments.strategy}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps(
            {
                **shape,
                "rate_bit_s": rate,
                "bytes_sent": sent,
                "share_measured": share,
                "ratio": summary,
                "runs": results,
            },
            indent=1,
        )
        + "\n"
    )


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    """Two namespaces joined by a veth pair."""
    remove()
    try:
        for host in HOSTS:
            run("ip", "netns", "add", host.namespace)
        a, b = HOSTS
        ends = ["ip", "link", "add", a.interface, "netns", a.namespace, "type", "veth"]
        run(*ends, "peer", "name", b.interface, "netns", b.namespace)
        for name, interface, address in HOSTS:
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", interface)
            run("ip", "-n", name, "link", "set", interface, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            for setting in SETTINGS:
                run("ip", "netns", "exec", name, "sysctl", "-w", setting)
        yield
    finally:
        remove()


def remove() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host.namespace], check=False, capture_output=True, timeout=30)


def limit(rate: int | None) -> None:
    """Limit what each host may send to ``rate`` bits a second; None removes the limit."""
    for name, interface, _ in HOSTS:
        subprocess.run(
            ["tc", "-n", name, "qdisc", "del", "dev", interface, "root"], check=False, capture_output=True, timeout=30
        )
        if rate is not None:
            shape = f"tbf rate {rate}bit burst 1mb latency 200ms".split()
            run("tc", "-n", name, "qdisc", "add", "dev", interface, "root", *shape)


def step(arguments: argparse.Namespace, overlap: str, transfer_only: bool = False) -> dict[str, float]:
    """Median seconds of a forward and backward of the layer (or of its messages alone), and the bytes it sends."""
    options = [
        f"--{key.replace('_', '-')}={getattr(arguments, key)}"
        for key in ("strategy", "hidden", "seq_len", "heads", "intermediate", "repeats")
    ]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        command = [__file__, *options, f"--overlap={overlap}", f"--out={out}"]
        launch(
            [*command, "--transfer-only"] if transfer_only else command,
            len(HOSTS),
            DEADLINE_S,
            prefix=lambda rank: ["ip", "netns", "exec", HOSTS[rank].namespace],
            environment=lambda rank: {
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": HOSTS[0].address,
                "MASTER_PORT": str(PORT),
                "TORCHELASTIC_USE_AGENT_STORE": "False",  # the launcher's store is in neither namespace
                "GLOO_SOCKET_IFNAME": HOSTS[rank].interface,
                "OMP_NUM_THREADS": "1",
            },
        )
        result: dict[str, float] = json.loads(out.read_text())
    return result


def worker(arguments: argparse.Namespace) -> None:
    """One of the two ranks that ``step`` starts. Rank 0 writes the result to ``--out``."""
    follow_launcher()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden, overlap = arguments.hidden, arguments.overlap
    x = torch.randn(1, arguments.seq_len // 2, hidden, requires_grad=True)  # [batch, seq, hidden]
    layers: list[nn.Module]
    if arguments.strategy == "tp_sp":
        mesh = seqpar.init_mesh(tp=2, device_type="cpu")
        layers = [
            seqpar.ParallelAttention("tp_sp", hidden, arguments.heads, mesh=mesh, overlap=overlap),
            seqpar.MegatronMLP(hidden, arguments.intermediate, mesh=mesh, overlap=overlap),
        ]
    else:
        sizes = {"ulysses": 2} if arguments.strategy == "ulysses" else {"ring": 2}
        mesh = seqpar.init_mesh(**sizes, device_type="cpu")
        if overlap == "none":
            ulysses.MAX_CHUNKS = 1  # all heads in one all-to-all: nothing to overlap
        layers = [seqpar.ParallelAttention(arguments.strategy, hidden, arguments.heads, mesh=mesh)]
    norms = [nn.RMSNorm(hidden, eps=1e-6) for _ in layers]

    def once() -> None:
        y = x
        for norm, layer in zip(norms, layers, strict=True):
            y = y + layer(norm(y))
        y.square().mean().backward()

    once()
    with seqpar.trace() as trace:
        once()
    if arguments.transfer_only:
        send_buffer, recv_buffer = x.detach(), torch.empty_like(x)
        peer, messages = 1 - dist.get_rank(), trace.bytes_sent // (send_buffer.element_size() * x.numel())

        def once() -> None:
            for _ in range(messages):
                send, receive = (dist.P2POp(dist.isend, send_buffer, peer), dist.P2POp(dist.irecv, recv_buffer, peer))
                for work in dist.batch_isend_irecv([send, receive]):
                    work.wait()

    times = []
    for _ in range(arguments.repeats):
        dist.barrier()
        start = time.perf_counter()
        once()
        dist.barrier()
        times.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        result = {"seconds": statistics.median(times), "bytes_sent": trace.bytes_sent}
        arguments.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
