"""Check seqpar on 2 to 16 GPUs, from a checkout, in about 5 minutes. seqpar need not be installed.

    torchrun --nproc-per-node 8 benchmarks/cluster_smoke.py --out DIR              # one host
    torchrun --nnodes 2 --nproc-per-node 8 ... benchmarks/cluster_smoke.py --out DIR   # DIR on a shared file system
    torchrun --nproc-per-node 2 benchmarks/cluster_smoke.py --small --masks 20 --out DIR      # gloo
    python benchmarks/cluster_smoke.py --one-gpu 4 --small --masks 40 --out DIR    # 4 ranks on one GPU, over NCCL

It writes DIR/cluster-smoke.json and .txt, which you can attach to a bug report, and fails if a check fails:

* every strategy under every layout, forward and backward under packed documents, against float64;
* many random sparse masks in a row, and the memory that PyTorch has reserved, which must stay the same;
* a step in which the host does not wait for the GPU (``torch.cuda.set_sync_debug_mode("error")``);
* a balanced layout of packed documents, against float64;
* a transformers Llama against one process: loss, gradients, and the tokens that it generates;
* how much of attention's time on the GPU passes while messages are sent, from PyTorch's profiler;
* training under FSDP2 against one process, and a run that is resumed from a checkpoint, bit by bit;
* a rank that raises an error, and a rank that is killed, while the other ranks wait for its message: when they end.

With ``--one-gpu``, NCCL takes each rank for a host of its own, and sends the messages through the loopback interface.
The ranks take turns on the GPU, so their values, their order and their overlap are real, and their speed is not.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parent))

import checkout  # noqa: F401, isort: skip
import seqpar
from seqpar.comm.nccl import nccl_report
from seqpar.comm.p2p import exchange
from seqpar.placement.layout import LAYOUTS
from seqpar.ranks.mesh import ranks_by_host

# CUDA reads it when it starts: matrix products with the same result in every run, for the resumed run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

STRATEGIES: dict[str, dict[str, Any]] = {name: {"strategy": name} for name in ("ring", "ulysses", "hybrid")}
for comm in ("p2p", "all_gather", "a2a", "a2a+p2p"):
    STRATEGIES[f"context_parallel, {comm}"] = {"strategy": "context_parallel", "comm": comm}
LAYERS: dict[str, dict[str, Any]] = {
    "activations": {"strategy": "context_parallel", "gather": "activations"},
    "tp_sp": {"strategy": "tp_sp"},
}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of relative errors in the 2-norm
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 16, 4, 64, 256
_EXIT_S, _OTHERS_S = 15.0, 60.0  # when a rank that raises has ended, and the others after their timeout


class Row(NamedTuple):
    """A check of the report. ``ok`` is None for a check that this machine cannot make."""

    name: str
    ok: bool | None
    what: str
    seconds: float

    def __str__(self) -> str:
        verdict = {True: "ok", False: "FAILED", None: "left out"}[self.ok]
        return f"{verdict:8} {self.name}: {self.what} ({self.seconds:.1f} s)"


class Job:
    """The ranks, and what all checks need."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, Path(args.out)
        seqpar.init_mesh(ring=-1, device_type=args.device, timeout=300)
        assert dist.group.WORLD is not None
        self.group, self.rank, self.ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
        self.device = torch.device(args.device)
        self.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        self.tokens = (16 if args.small else 256) * self.ranks + 5
        torch.manual_seed(0)  # q, k, v and dout [b, s, h, d] of the full sequence, the same on every rank
        heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
        self.full = [torch.randn(1, self.tokens, h, HEAD_DIM).to(self.device, self.dtype) for h in heads]

    def mask(self, seed: int) -> seqpar.Mask:
        """Random documents, with a sliding window in every third mask: many pairs of ranks exchange nothing."""
        generator = torch.Generator().manual_seed(seed)
        count = int(torch.randint(1, 4 * self.ranks, (), generator=generator))
        ends = torch.randint(1, self.tokens, (count,), generator=generator).unique().tolist()
        mask = seqpar.Mask.documents([0, *ends, self.tokens])
        return mask & seqpar.Mask.sliding_window(self.tokens // 3) if seed % 3 == 0 else mask

    def step(self, mask: seqpar.Mask, sharding: seqpar.Sharding, options: dict[str, Any]) -> list[Tensor]:
        """This rank's ``out, dq, dk, dv``."""
        q, k, v, dout = (sharding.shard(x) for x in self.full)
        out = seqpar.attention(*(x.requires_grad_() for x in (q, k, v)), mask=mask, sharding=sharding, **options)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    def one_device(self, mask: seqpar.Mask) -> list[Tensor]:
        """``out, dq, dk, dv`` of the full sequence in float64, with a dense mask."""
        q, k, v, dout = (x.double().requires_grad_(i < 3) for i, x in enumerate(self.full))
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * HEAD_DIM**-0.5
        weights = scores.masked_fill(~mask.dense(self.tokens).to(self.device), float("-inf")).softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", weights, values)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def squares(results: list[Tensor], expected: list[Tensor], sharding: seqpar.Sharding) -> Tensor:
    """For each result, this rank's squared error and squared norm: ``[results, 2]``, without waiting for the GPU."""
    pairs = [(x.double(), sharding.shard(y)) for x, y in zip(results, expected, strict=True)]
    return torch.stack([torch.stack([(x - y).square().sum(), y.square().sum()]) for x, y in pairs])


def compared(job: Job, errors: list[Tensor]) -> str:
    """The largest relative error over all ranks."""
    total = torch.cat(errors).to(job.device)
    dist.all_reduce(total, group=job.group)
    return within(float((total[:, 0] / total[:, 1].clamp_min(1e-300)).sqrt().max()), TOLERANCES[job.dtype])


def within(error: float, limit: float) -> str:
    if not error <= limit:
        raise AssertionError(f"relative error {error:.1e}, allowed {limit:.0e}")
    return f"relative error {error:.1e}"


def check_attention(job: Job, options: dict[str, Any]) -> str:
    """Every layout under three masks."""
    errors = []
    for layout, seed in product(LAYOUTS, range(3)):
        sharding, mask = seqpar.Sharding(job.tokens, layout, group=job.group), job.mask(seed)
        errors.append(squares(job.step(mask, sharding, options), job.one_device(mask), sharding))
    return compared(job, errors)


def check_layer(job: Job, options: dict[str, Any]) -> str:
    """A layer that shards weights or gathers hidden states, under every layout, against the layer on one device."""
    errors, sizes = [], {"hidden_size": HIDDEN, "num_heads": HEADS, "num_kv_heads": KV_HEADS}
    placed: dict[str, Any] = {"device": job.device, "dtype": job.dtype}
    for layout in LAYOUTS:
        torch.manual_seed(0)
        one = seqpar.ParallelAttention("local", **sizes).to(job.dtype).double()
        mask, (x, dy) = job.mask(0), torch.randn(2, 1, job.tokens, HIDDEN).to(job.dtype).double()
        y = one(x.requires_grad_(), mask=mask, seq_len=job.tokens)
        expected = [y.detach(), *torch.autograd.grad(y, x, dy)]
        sharding = seqpar.Sharding(job.tokens, layout, group=job.group, strategy=options["strategy"])
        many = seqpar.ParallelAttention(**options, **sizes, **placed, group=job.group)
        many.load_state_dict({name: value.to(**placed) for name, value in one.state_dict().items()})
        x_local, dy_local = (sharding.shard(t.detach()).to(**placed) for t in (x, dy))
        out = many(x_local.requires_grad_(), mask=mask, sharding=sharding)
        results = [out.detach(), *torch.autograd.grad(out, x_local, dy_local)]
        errors.append(squares([r.cpu() for r in results], expected, sharding))
    return compared(job, errors)


def check_balanced(job: Job) -> str:
    """The layout of packed documents, whose ranks hold unequal pieces of the sequence."""
    mask = job.mask(1)
    sharding = seqpar.Sharding.balanced(mask, job.tokens, group=job.group)
    return compared(job, [squares(job.step(mask, sharding, STRATEGIES["ring"]), job.one_device(mask), sharding)])


def check_transformers(job: Job) -> str | None:
    """A Llama under three strategies against the same model on one device, in float32."""
    if find_spec("transformers") is None:
        return None
    from transformers import LlamaConfig, LlamaForCausalLM

    import seqpar.hf

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    ids = torch.randint(128, (2, job.tokens)).to(job.device)
    weights = LlamaForCausalLM(config).state_dict()

    def model() -> Any:
        made = LlamaForCausalLM(config)
        made.load_state_dict(weights)
        return made.to(job.device)

    def gradients(of: Any) -> tuple[float, list[Tensor]]:
        loss = of(input_ids=ids, labels=ids).loss
        loss.backward()
        if of is not alone:
            seqpar.sync_gradients(of, group=job.group)
        return loss.item(), [p.grad.double() for p in of.parameters()]

    alone = model()
    loss, expected = gradients(alone)
    error = 0.0
    for strategy in ("ring", "ulysses", "context_parallel"):
        sharded = seqpar.hf.parallelize(model(), group=job.group, strategy=strategy)
        sharded_loss, found = gradients(sharded)
        pairs = list(zip(found, expected, strict=True))
        squared = [sum(float(x.square().sum()) for x in of) for of in ([a - b for a, b in pairs], expected)]
        error = max(error, abs(sharded_loss / loss - 1), (squared[0] / squared[1]) ** 0.5)
    prompt = ids[:, : job.tokens // 2]
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 12, "do_sample": False}
    new = [x.generate(prompt, **options) for x in (alone, sharded)]
    if not torch.equal(*new):
        raise AssertionError(f"generated tokens differ: {new[1].tolist()} instead of {new[0].tolist()}")
    return within(error, 1e-4) + ", and the same generated tokens"


def check_overlap(job: Job) -> str | None:
    """How long kernels ran, and for how much of it a kernel of NCCL ran too."""
    if job.device.type != "cuda":
        return None
    mask, found = seqpar.Mask.causal(), []
    for strategy in ("ring", "ulysses"):
        tokens = (1024 if job.args.small else 16384) * job.ranks
        sharding = seqpar.Sharding(tokens, "zigzag", group=job.group)
        shape, kind = (1, sharding.seq_local, HEADS, HEAD_DIM), {"device": job.device, "dtype": job.dtype}
        q, k, v = (torch.randn(shape, **kind, requires_grad=True) for _ in range(3))  # [b, s, h, d]

        step = partial(forward_backward, (q, k, v), mask=mask, sharding=sharding, strategy=strategy)
        step()
        torch.cuda.synchronize()
        dist.barrier(group=job.group)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            step()
            torch.cuda.synchronize()
        spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}  # by whether it is a kernel of NCCL
        for event in profiled.events():
            if event.device_type == torch.autograd.DeviceType.CUDA and "mem" not in event.name.lower():
                spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
        both, ms = overlapped(spans[False], spans[True]), sum(end - start for start, end in spans[False])
        found.append(
            f"{strategy}: {both / 1e3:.1f} of {ms / 1e3:.1f} ms of kernels during {len(spans[True])} of NCCL's"
        )
    return "; ".join(found)


def forward_backward(inputs: tuple[Tensor, ...], **options: Any) -> None:
    torch.autograd.grad(seqpar.attention(*inputs, **options).sum(), inputs)


def overlapped(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """For how long ``spans`` and ``others`` are both on. The spans of each list do not overlap."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in spans for b in others)


def check_many_masks(job: Job) -> str:
    """Many masks without waiting for the GPU in between, under a ring and with messages between all pairs of ranks.
    Every tenth is compared."""
    errors, reserved, count = [], [], job.args.masks
    for seed in range(count):
        sharding, mask = seqpar.Sharding(job.tokens, "zigzag", group=job.group), job.mask(seed)
        results = job.step(mask, sharding, STRATEGIES["ring" if seed % 2 else "context_parallel, p2p"])
        if seed % 10 < 2:
            errors.append(squares(results, job.one_device(mask), sharding))
        reserved.append(torch.cuda.memory_reserved() if job.device.type == "cuda" else 0)
    text, warm, last = compared(job, errors), reserved[count * 3 // 5], reserved[-1]
    if last > 1.01 * warm:
        raise AssertionError(f"reserved memory grew from {warm:,} to {last:,} bytes in the last {count * 2 // 5} masks")
    return f"{count} masks, {text}, {last / 2**20:.0f} MiB reserved"


def check_synchronisation(job: Job) -> str | None:
    """The second step under a mask does not wait for the GPU."""
    if job.device.type != "cuda":
        return None
    sharding, mask = seqpar.Sharding(job.tokens, "zigzag", group=job.group), job.mask(1)
    for name, options in STRATEGIES.items():
        for mode in ("default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                job.step(mask, sharding, options)
            except RuntimeError as error:
                raise AssertionError(f"{name}: {error}") from error
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return f"{len(STRATEGIES)} strategies"


class Model(nn.Module):
    """A small language model of bytes. On one process if there is no group."""

    def __init__(self, job: Job, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        strategy = "ring" if group is not None else "local"
        self.tokens, self.head = nn.Embedding(256, HIDDEN), nn.Linear(HIDDEN, 256)
        layers = (seqpar.ParallelAttention(strategy, HIDDEN, HEADS, KV_HEADS, group=group) for _ in range(2))
        self.layers = nn.ModuleList(layers)
        self.to(job.device)

    def forward(self, ids: Tensor, **options: Any) -> Tensor:
        x = self.tokens(ids)  # [b, s, hidden]
        for layer in self.layers:
            x = x + layer(x, **options)
        logits: Tensor = self.head(x)
        return logits


def train(job: Job, steps: range, sharded: bool, folder: Path | None = None) -> list[float]:
    """Losses of AdamW steps. Resumes from ``folder`` if it exists, else saves there."""
    sharding = seqpar.Sharding(job.tokens, "zigzag", group=job.group)
    model: nn.Module = Model(job, job.group if sharded else None)
    if sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    resumes = folder is not None and folder.exists()
    dist.barrier()
    if resumes:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    losses = []
    for number in steps:
        ids = torch.randint(256, (1, job.tokens + 1), generator=torch.Generator().manual_seed(number))
        rows = (sharding.shard(x) for x in (ids[:, :-1], ids[:, 1:])) if sharded else (ids[:, :-1], ids[:, 1:])
        x, labels = (row.to(job.device) for row in rows)
        where: dict[str, Any] = {"sharding": sharding} if sharded else {"seq_len": job.tokens}
        logits = model(x, mask=job.mask(number), **where)
        each = F.cross_entropy(logits[0], labels[0], reduction="none")
        loss = seqpar.token_loss(each[None], labels) if sharded else each.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if folder is not None and not resumes:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    return losses


def check_fsdp(job: Job) -> str:
    sharded, alone = (train(job, range(4), each) for each in (True, False))
    return within(max(abs(a / b - 1) for a, b in zip(sharded, alone, strict=True)), 1e-3)


def check_resume(job: Job) -> str:
    folder = job.out / "cluster-smoke-checkpoint"
    if job.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    torch.use_deterministic_algorithms(True)
    try:
        whole = train(job, range(6), True)
        train(job, range(3), True, folder)
        resumed = train(job, range(3, 6), True, folder)
    finally:
        torch.use_deterministic_algorithms(False)
    if whole[3:] != resumed:
        raise AssertionError(f"losses {resumed} after the resume, {whole[3:]} without")
    dist.barrier()
    if job.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return f"losses {', '.join(f'{loss:.6f}' for loss in resumed)}, bit by bit"


def check_exit(job: Job, how: str) -> str:
    """Start a second job of the same ranks, whose last rank ends while the others wait for its message."""
    with socket.socket() as probe:  # a free port of rank 0's host
        probe.bind(("", 0))
        port: list[Any] = [probe.getsockname()[1]]
    dist.broadcast_object_list(port, group=job.group)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    # After its watchdog has found an error, PyTorch waits for four times as long, by default a minute in all.
    fast = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
    environment |= {"MASTER_PORT": str(port[0]), "SEQPAR_SHARED_MEMORY": "0"} | fast
    timeout, device = job.args.timeout, job.args.device
    command = [sys.executable, __file__, "--victim", how, "--timeout", str(timeout), "--device", device]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    connected = process.stdout.readline()
    dist.barrier()
    start, errors = time.monotonic(), ""
    try:
        _, errors = process.communicate(timeout=timeout + _OTHERS_S)
    except subprocess.TimeoutExpired:
        process.kill()
    ends: list[Any] = [None] * job.ranks
    dist.all_gather_object(ends, (time.monotonic() - start, process.returncode), group=job.group)
    last, others = ends[-1][0], max(seconds for seconds, _ in ends[:-1])
    if not connected or not all(code for _, code in ends) or last > _EXIT_S or others > timeout + _OTHERS_S:
        raise AssertionError(f"seconds and exit codes by rank: {ends}; {errors[-300:]}")
    return f"the rank after {last:.1f} s, the others after at most {others:.1f} s (timeout {timeout:.0f} s)"


def victim(args: argparse.Namespace) -> None:
    """A rank of ``check_exit``'s job."""
    seqpar.init_mesh(ring=-1, device_type=args.device, timeout=args.timeout)
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    x, y = (torch.ones(8, device=args.device) for _ in range(2))
    exchange([((rank + 1) % ranks, x)], [((rank - 1) % ranks, y)], group).wait()
    print("connected", flush=True)
    pending = exchange([], [(0 if rank == ranks - 1 else ranks - 1, y)], group)  # nobody sends this
    if rank == ranks - 1 and args.victim == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == ranks - 1:
        raise ValueError("an error, while a message has not arrived")
    pending.wait()
    y.cpu()


def checks(job: Job) -> Iterator[tuple[str, Callable[[], str | None]]]:
    for name, options in STRATEGIES.items():
        yield name, partial(check_attention, job, options)
    for name, options in LAYERS.items():
        yield name, partial(check_layer, job, options)
    yield "balanced layout", partial(check_balanced, job)
    yield "transformers and one process", partial(check_transformers, job)
    yield "messages beside kernels", partial(check_overlap, job)
    yield "random masks in a row", partial(check_many_masks, job)
    yield "no waiting for the GPU", partial(check_synchronisation, job)
    yield "FSDP2 and one process", partial(check_fsdp, job)
    yield "resume from a checkpoint", partial(check_resume, job)
    yield "a rank raises an error", partial(check_exit, job, "raises")
    yield "a rank is killed", partial(check_exit, job, "killed")


def run(job: Job) -> bool:
    """Make all checks. After a check that only some ranks passed, the ranks no longer agree: it is the last."""
    rows: list[Row] = []
    for name, check in checks(job):
        if job.args.only not in name:
            continue
        start, error, what = time.monotonic(), "", None
        try:
            what = check()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            traceback.print_exc()
        by_rank: list[Any] = [None] * job.ranks
        dist.all_gather_object(by_rank, error, group=job.group)
        failed = {rank: text for rank, text in enumerate(by_rank) if text}
        text = f"rank(s) {[*failed]}: {next(iter(failed.values()))}" if failed else what or "needs CUDA or transformers"
        rows.append(Row(name, not failed if failed or what else None, text, round(time.monotonic() - start, 2)))
        if job.rank == 0:
            print(rows[-1], flush=True)
            write(job, rows)
        if 0 < len(failed) < job.ranks:
            break
    return all(row.ok is not False for row in rows)


def write(job: Job, rows: list[Row]) -> None:
    gpu = torch.cuda.get_device_name() if job.device.type == "cuda" else platform.machine()
    about = {
        "seqpar": seqpar.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{job.ranks} ranks on {len(ranks_by_host(job.group))} host(s), {gpu}",
        "nccl": nccl_report(),
    }
    job.out.mkdir(parents=True, exist_ok=True)
    report = {**about, "checks": [row._asdict() for row in rows]}
    (job.out / "cluster-smoke.json").write_text(json.dumps(report, indent=2))
    lines = [*(f"{name}: {value}" for name, value in about.items()), "", *map(str, rows), ""]
    (job.out / "cluster-smoke.txt").write_text("\n".join(lines))


def on_one_gpu(args: argparse.Namespace, argv: list[str]) -> int:
    """Start the ranks of ``--one-gpu`` and wait for them. Returns the largest of their exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(args.one_gpu)}
    common |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0"}
    ranks = []
    for rank in range(args.one_gpu):
        own = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": f"rank{rank}"}
        ranks.append(subprocess.Popen([sys.executable, __file__, *argv], env=os.environ | common | own))
    try:
        return max(abs(process.wait(args.deadline + 10)) for process in ranks)
    finally:
        for process in ranks:
            process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=".", help="folder of the report, on a file system that all hosts share")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="cuda with NCCL by default; cpu with gloo")
    parser.add_argument("--one-gpu", type=int, metavar="N", help="start N ranks that share one GPU")
    parser.add_argument("--small", action="store_true", help="short sequences")
    parser.add_argument("--masks", type=int, default=500, help="random masks in a row")
    parser.add_argument("--only", default="", help="the checks whose names contain this text")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds that ranks wait for a rank that has ended")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds after which the script ends anyway")
    parser.add_argument("--victim", choices=["raises", "killed"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_gpu:
        at = next(i for i, x in enumerate(sys.argv) if x.startswith("--one-gpu"))
        return on_one_gpu(args, sys.argv[1:at] + sys.argv[at + (1 if "=" in sys.argv[at] else 2) :])
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    faulthandler.dump_traceback_later(args.deadline, exit=True)
    if args.victim:
        victim(args)
        return 0
    return 0 if run(Job(args)) else 1


if __name__ == "__main__":
    sys.exit(main())
