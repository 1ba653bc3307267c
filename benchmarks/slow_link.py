"""Does communication hide behind computation? A layer on two hosts whose link is slow, and on a fast one.

The layer is a TP-SP block (attention and SwiGLU) or, with ``--strategy``, attention in another way.

Makes two network namespaces joined by a veth pair (two hosts on one machine; root and iproute2 are needed), runs one
rank in each with one thread, first on the bare link, then with a ``tc tbf`` limit under which the step's messages, sent
one after another without any computation, take ``--share`` of the step's time (measured, not computed). Reports the
ratio of the two times for each way of overlapping, measured in turns, median of many. Without overlap the ratio would
be about 1 + share; with perfect overlap 1.
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
import time
from collections.abc import Iterator
from pathlib import Path

HOSTS = (("seqpar-a", "spar0", "10.199.0.1"), ("seqpar-b", "spar1", "10.199.0.2"))
DEADLINE_S = 300
# What a host on such a link would have: data of one direction does not hold up the other's acknowledgements for longer
# than a few milliseconds, and a link that was idle starts at full speed.
SETTINGS = (
    "net.ipv4.tcp_wmem=4096 262144 262144",
    "net.ipv4.tcp_rmem=4096 16777216 33554432",
    "net.ipv4.tcp_slow_start_after_idle=0",
)


# How each strategy can communicate: what is measured, the first one being what it does by itself.
VARIANTS = {"tp_sp": ("ring", "none"), "ulysses": ("parts", "none"), "ring": ("ring",), "context_parallel": ("ring",)}


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
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments)
        return
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        sys.exit("slow_link: root and iproute2 (ip, tc) are needed to make two hosts on this machine")
    with two_hosts():
        fast = step(arguments, VARIANTS[arguments.strategy][0])
        transfer_s = arguments.share * fast["seconds"]
        rate = int(8 * fast["bytes_sent"] / transfer_s)
        for _ in range(3):  # until what is measured is what was asked for
            limit(rate)
            alone = step(arguments, VARIANTS[arguments.strategy][0], transfer_only=True)["seconds"]
            print(f"link {rate / 1e6:.0f} Mbit/s: transfer alone takes {alone / fast['seconds']:.2f} of the step")
            if abs(alone / transfer_s - 1) < 0.03:
                break
            rate = int(rate * alone / transfer_s)
        results: list[dict[str, float | str]] = []
        # In turns, so that a machine that slows down slows both.
        for _ in range(3):
            for overlap in VARIANTS[arguments.strategy]:
                limit(None)
                quick = step(arguments, overlap)
                limit(rate)
                results.append(
                    {"overlap": overlap, "fast_s": quick["seconds"], "slow_s": step(arguments, overlap)["seconds"]}
                )
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
    shape = {k: v for k, v in vars(arguments).items() if k not in ("out", "worker")}
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
    """Two namespaces on one cable."""
    remove()
    try:
        for name, _, _ in HOSTS:
            run("ip", "netns", "add", name)
        (a, cable_a, _), (b, cable_b, _) = HOSTS
        run("ip", "link", "add", cable_a, "netns", a, "type", "veth", "peer", "name", cable_b, "netns", b)
        for name, cable, address in HOSTS:
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", cable)
            run("ip", "-n", name, "link", "set", cable, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            for setting in SETTINGS:
                run("ip", "netns", "exec", name, "sysctl", "-w", setting)
        yield
    finally:
        remove()


def remove() -> None:
    for name, _, _ in HOSTS:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=30)


def limit(rate: int | None) -> None:
    """Limit what each host may send, in bits a second."""
    for name, cable, _ in HOSTS:
        subprocess.run(
            ["tc", "-n", name, "qdisc", "del", "dev", cable, "root"], check=False, capture_output=True, timeout=30
        )
        if rate is not None:
            shape = f"tbf rate {rate}bit burst 1mb latency 200ms".split()
            run("tc", "-n", name, "qdisc", "add", "dev", cable, "root", *shape)


def step(arguments: argparse.Namespace, overlap: str, transfer_only: bool = False) -> dict[str, float]:
    """Median seconds of a forward and backward of the block (or of its messages alone), and the bytes it sends."""
    processes = []
    for rank, (name, cable, _) in enumerate(HOSTS):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": HOSTS[0][2],
            "MASTER_PORT": "29577", "GLOO_SOCKET_IFNAME": cable, "OMP_NUM_THREADS": "1",
            "BENCHMARK_OVERLAP": overlap, "BENCHMARK_TRANSFER_ONLY": str(int(transfer_only)),
        }  # fmt: skip
        shape = [
            f"--{key.replace('_', '-')}={getattr(arguments, key)}"
            for key in ("strategy", "hidden", "seq_len", "heads", "intermediate", "repeats")
        ]
        command = ["ip", "netns", "exec", name, sys.executable, __file__, f"--worker={rank}", *shape]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        sys.exit(f"slow_link: a rank failed: {[process.returncode for process in processes]}")
    answer: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return answer


def worker(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import seqpar
    from seqpar.strategies import ulysses as ulysses_module

    torch.set_num_threads(1)
    torch.manual_seed(0)
    overlap = os.environ["BENCHMARK_OVERLAP"]
    hidden = arguments.hidden
    x = torch.randn(1, arguments.seq_len // 2, hidden, requires_grad=True)
    layers: list[torch.nn.Module]
    if arguments.strategy == "tp_sp":
        mesh = seqpar.init_mesh(tp=2, device_type="cpu")
        layers = [
            seqpar.ParallelAttention("tp_sp", hidden, arguments.heads, mesh=mesh, overlap=overlap),
            seqpar.MegatronMLP(hidden, arguments.intermediate, mesh=mesh, overlap=overlap),
        ]
    else:
        ulysses = 2 if arguments.strategy == "ulysses" else 1
        mesh = seqpar.init_mesh(ring=2 // ulysses, ulysses=ulysses, device_type="cpu")
        if overlap == "none":
            ulysses_module.MAX_CHUNKS = 1
        layers = [seqpar.ParallelAttention(arguments.strategy, hidden, arguments.heads, mesh=mesh)]
    norms = [torch.nn.RMSNorm(hidden, eps=1e-6) for _ in layers]

    def once() -> None:
        y = x
        for norm, layer in zip(norms, layers, strict=True):
            y = y + layer(norm(y))
        y.square().mean().backward()

    once()
    with seqpar.trace() as counted:
        once()
    if os.environ["BENCHMARK_TRANSFER_ONLY"] == "1":
        sent, room = x.detach(), torch.empty_like(x)
        peer, messages = 1 - arguments.worker, counted.bytes_sent // (4 * x.numel())

        def once() -> None:
            for _ in range(messages):
                both = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, room, peer)]
                for work in dist.batch_isend_irecv(both):
                    work.wait()

    times = []
    for _ in range(arguments.repeats):
        dist.barrier()
        start = time.perf_counter()
        once()
        dist.barrier()
        times.append(time.perf_counter() - start)
    print(json.dumps({"seconds": statistics.median(times), "bytes_sent": counted.bytes_sent}), flush=True)


if __name__ == "__main__":
    main()
