"""The backend, timeout and GPU with which ``init_mesh`` starts the process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import seqpar
from seqpar.ranks import startup
from seqpar.ranks.mesh import ranks_by_host

from ..observe import message_of

TIMEOUT = timedelta(minutes=10)


class StartedError(Exception):
    """Raised in place of starting a process group."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``init_mesh`` passes to ``init_process_group`` and ``set_device``, on a host of 8 GPUs."""
    noted: dict[str, Any] = {}

    def init_process_group(backend: str, **options: Any) -> None:
        if options["world_size"] > 1:
            where = [options.pop(name) for name in ("store", "rank", "world_size")]
            assert isinstance(where[0], dist.PrefixStore) and where[1:] == [0, int(os.environ["WORLD_SIZE"])]
        noted.update(options, backend=backend)
        raise StartedError

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(startup, "_job_store", lambda timeout: dist.HashStore())
    monkeypatch.setattr(startup, "fresh_prefix", lambda *arguments: "new")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: noted.update(set_device=device))
    launchers = [name for names in startup._LAUNCHERS for name in names]
    assert {name for name, _ in LAUNCHERS.values()} == {"WORLD_SIZE", *(size for size, *_ in startup._LAUNCHERS)}
    monkeypatch.setenv(startup.LAUNCH_ORDER, "")  # so that it is restored
    monkeypatch.delenv(startup.LAUNCH_ORDER)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *launchers):
        monkeypatch.delenv(name, raising=False)
    return noted


def under_torchrun(monkeypatch: pytest.MonkeyPatch, world: int, local_rank: int | None = 3) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))


def init(**arguments: Any) -> None:
    with pytest.raises(StartedError):
        seqpar.init_mesh(ring=-1, **arguments)


@pytest.mark.parametrize(("world", "backend"), [(8, "cpu:gloo,cuda:nccl"), (256, "cpu:gloo,cuda:nccl"), (257, "nccl")])
def test_the_default_on_gpus(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, world: int, backend: str
) -> None:
    under_torchrun(monkeypatch, world)
    init(device_type="cuda")
    device = torch.device("cuda", 3)
    assert started == {"backend": backend, "timeout": TIMEOUT, "device_id": device, "set_device": device}
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"


def test_what_the_caller_asks_for(started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    under_torchrun(monkeypatch, 8)
    init(device_type="cuda", backend="nccl", timeout=90, device_id=6)
    device = torch.device("cuda", 6)
    assert started == {
        "backend": "nccl", "timeout": timedelta(seconds=90), "device_id": device, "set_device": device
    }  # fmt: skip
    started.clear()
    init(device_type="cpu", timeout=timedelta(minutes=2))
    assert started == {"backend": "gloo", "timeout": timedelta(minutes=2)}
    started.clear()
    init(device_type="cuda", backend="gloo", device_id="cuda:1")  # NCCL alone is bound to a device
    assert started == {"backend": "gloo", "timeout": TIMEOUT, "set_device": torch.device("cuda", 1)}


def test_the_only_gpu_that_a_process_sees(started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for local_rank in (None, 3):
        under_torchrun(monkeypatch, 8, local_rank)
        init(device_type="cuda")
        assert started["set_device"] == torch.device("cuda", 0)


def test_one_process_keeps_its_gpu(started: dict[str, Any]) -> None:
    init(device_type="cuda")
    assert started["set_device"] == torch.device("cuda", 5) and started["world_size"] == 1


def test_several_ranks_without_local_rank(started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    under_torchrun(monkeypatch, 8, None)
    with pytest.raises(ValueError, match=r"device_id: this process sees 8 GPUs and LOCAL_RANK is not set; pass"):
        seqpar.init_mesh(ring=-1, device_type="cuda")
    under_torchrun(monkeypatch, 16, 8)
    with pytest.raises(ValueError, match=r"device_id=8 \(by default LOCAL_RANK\): this process sees 8 GPUs"):
        seqpar.init_mesh(ring=-1, device_type="cuda")
    assert not started


@pytest.mark.parametrize("size", [names[0] for names in startup._LAUNCHERS])
def test_processes_that_do_not_know_one_another(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    """As srun and mpirun start them; torchrun's variables, or WORLD_SIZE=1, say what is meant."""
    monkeypatch.setenv(size, "8")
    for sizes in ({"ring": -1}, {"ring": 8}, {}):
        with pytest.raises(ValueError, match=rf"init_mesh: {size}=8, .*torchrun .*RANK \(=.*set WORLD_SIZE=1"):
            seqpar.init_mesh(**sizes, device_type="cpu")
    assert not started
    under_torchrun(monkeypatch, 8)
    init(device_type="cpu")
    assert "world_size" not in started
    monkeypatch.delenv("RANK")
    with pytest.raises(ValueError, match="WORLD_SIZE=8: RANK is not set"):
        seqpar.init_mesh(ring=-1, device_type="cpu")
    monkeypatch.setenv("WORLD_SIZE", "1")
    init(device_type="cpu")
    assert started["world_size"] == 1


def test_a_step_of_one_process(started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """``srun --ntasks 1``, such as an interactive shell, in an allocation of eight."""
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    init(device_type="cpu")
    assert started["world_size"] == 1


# What launchers set in the fourth of eight processes on one host, and the variable with the number of processes.
LAUNCHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "torchrun": ("WORLD_SIZE", {"RANK": 3, "WORLD_SIZE": 8, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 8}),
    "srun": ("SLURM_STEP_NUM_TASKS", {"SLURM_NTASKS": 8, "SLURM_STEP_NUM_TASKS": 8, "SLURM_PROCID": 3}),
    "sbatch": ("SLURM_NTASKS", {"SLURM_NTASKS": 8, "SLURM_PROCID": 0}),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", {"OMPI_COMM_WORLD_SIZE": 8, "OMPI_COMM_WORLD_RANK": 3}),
    "MPICH": ("PMI_SIZE", {"PMI_SIZE": 8, "PMI_RANK": 3, "MPI_LOCALRANKID": 3}),
    "MVAPICH": ("MV2_COMM_WORLD_SIZE", {"MV2_COMM_WORLD_SIZE": 8, "MV2_COMM_WORLD_RANK": 3}),
    "flux": ("FLUX_JOB_SIZE", {"FLUX_JOB_SIZE": 8, "FLUX_TASK_RANK": 3, "FLUX_TASK_LOCAL_ID": 3}),
    "jsrun": ("JSM_NAMESPACE_SIZE", {"JSM_NAMESPACE_SIZE": 8, "JSM_NAMESPACE_RANK": 3}),
}


def calls_without_a_group() -> dict[str, Callable[[], Any]]:
    """Calls that are given neither a mesh nor a group, and so take the default group."""
    x = torch.randn(1, 16, 4, 8)  # [b, s, h, d]
    losses, labels = torch.ones(1, 16), torch.ones(1, 16, dtype=torch.long)
    linear = nn.Linear(2, 2)

    def step() -> Tensor:
        loss: Tensor = linear(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    step()
    kinds = ("attention", "ring_attention", "ulysses_attention", "context_parallel_attention", "hybrid_attention")
    attention = {name: partial(getattr(seqpar, name), x, x, x) for name in kinds}
    layers = {
        name: lambda name=name: seqpar.ParallelAttention(name, 32, 4)(x.flatten(2))
        for name in ("ring", "ulysses", "context_parallel", "hybrid", "auto", "tp_sp")
    }
    mask = seqpar.Mask.documents([0, 5, 16])
    return {
        **attention,
        **layers,
        "of a known length": lambda: seqpar.attention(x, x, x, seq_len=16),
        "Sharding": lambda: seqpar.Sharding(16),
        "balanced": lambda: seqpar.Sharding.balanced(mask, 16),
        "segments": lambda: seqpar.Sharding.segments([10, 6]),
        "shard": lambda: seqpar.shard(x),
        "unshard": lambda: seqpar.unshard(x),
        "positions": lambda: seqpar.positions(16),
        "token_loss": lambda: seqpar.token_loss(losses, labels),
        "sync_gradients": lambda: seqpar.sync_gradients(linear),
        "average_in_backward": lambda: seqpar.average_in_backward(linear),
        "invariant_layers": lambda: seqpar.invariant_layers(linear),
        "clip_grad_norm_": lambda: seqpar.clip_grad_norm_(linear, 1.0),
        "verify": lambda: seqpar.verify(linear, step, step),
        "MegatronMLP": lambda: seqpar.MegatronMLP(32, 48),
        "VocabParallelEmbedding": lambda: seqpar.VocabParallelEmbedding(16, 32),
        "VocabParallelHead": lambda: seqpar.VocabParallelHead(32, 16),
        "KeyValueCache": lambda: seqpar.KeyValueCache(seqpar.Sharding(16)),
    }


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_no_process_of_several_works_alone(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    """If a process group is not running yet, or not any more."""
    variable, environment = LAUNCHERS[launcher]
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    calls = calls_without_a_group()
    for name, call in calls.items() if launcher == "torchrun" else [("Sharding", calls["Sharding"])]:
        message = message_of(call)
        assert message.startswith(f"ValueError: {variable}=8, so 8 processes were started"), (name, message)
    local = seqpar.Sharding(16, strategy="local")
    assert local.lengths == (16,) and torch.equal(local.unshard(local.shard(torch.ones(1, 16))), torch.ones(1, 16))
    x = torch.randn(1, 16, 4, 8)
    assert seqpar.attention(x, x, x, strategy="local").shape == x.shape
    assert seqpar.ParallelAttention("local", 32, 4)(x.flatten(2)).shape == x.flatten(2).shape
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert {name: message_of(call) for name, call in calls.items()} == dict.fromkeys(calls, "nothing")
    for wrong in ("two", "", "0"):
        monkeypatch.setenv("WORLD_SIZE", wrong)
        for call in (lambda: seqpar.Sharding(16), lambda: seqpar.init_mesh(device_type="cpu")):
            assert message_of(call).startswith(f"ValueError: WORLD_SIZE={wrong!r}: expected the number of ranks")


def test_a_worker_of_a_loader_starts_no_process_group(started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the environment of its rank, and would take the rank's place among the workers of the other ranks."""
    under_torchrun(monkeypatch, 8)
    monkeypatch.setattr(startup, "get_worker_info", lambda: "a worker")
    message = message_of(lambda: seqpar.init_mesh(ring=-1, device_type="cpu"))
    assert message.startswith("RuntimeError: init_mesh: this process is a worker of a DataLoader") and not started


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"device_type": "gpu"}, ValueError, r"device_type='gpu': expected 'cuda' or 'cpu'"),
    ({"device_type": 0}, TypeError, r"device_type=0: expected 'cuda' or 'cpu', got int"),
    ({"timeout": 0}, ValueError, r"timeout=0: expected a positive"),
    ({"timeout": float("nan")}, ValueError, r"timeout=nan"),
    ({"timeout": "90"}, TypeError, r"timeout='90': expected seconds or a datetime.timedelta"),
    ({"backend": 3}, TypeError, r"backend=3: expected a str"),
    ({"device_id": True}, TypeError, r"device_id=True: expected an int"),
    ({"device_id": torch.device("cpu")}, ValueError, r"device_id=cpu: expected a CUDA device"),
    ({"device_id": torch.device("cuda")}, ValueError, r"device_id=cuda: .*with an index"),
    ({"device_id": -1}, ValueError, r"device_id=-1"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_bad_arguments(
    started: dict[str, Any], arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        seqpar.init_mesh(**{"device_type": "cuda", **arguments})
    assert not started


def test_hosts_of_a_simulated_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process plays a rank of many: hosts have LOCAL_WORLD_SIZE ranks each."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=16)
    try:
        mesh = seqpar.init_mesh(dp=2, ring=-1, device_type="cpu")
        assert ranks_by_host(mesh.get_group("ring")) == (tuple(range(8)),)
        assert ranks_by_host(mesh.get_group("dp")) == ((0,), (1,))
    finally:
        dist.destroy_process_group()
