"""``ParallelismConfig``: an unmodified loop with accelerate has the losses of one process."""

from __future__ import annotations

import inspect
import os
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate
import accelerate.commands.launch
import transformers
from accelerate.state import PartialState

import seqpar.hf

from ..pool import Pool, on_ranks
from .trainers import LOSS, Run, Stream, alone, parallel, sequences, torchrun
from .workers import make_batch, tiny

pytestmark = pytest.mark.slow


def with_loop(config: Any, folder: str, kind: str, batch: int, data: str, fsdp: bool = False) -> Run:
    """The losses of a training loop as in accelerate's documentation."""
    plugin = None
    if fsdp and config is not None:
        PartialState(cpu=True)
        # accelerate uses FSDP on accelerators only; the processes have none.
        PartialState._shared_state["distributed_type"] = accelerate.DistributedType.MULTI_GPU
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False, auto_wrap_policy="transformer_based_wrap"
        )
    accelerator = accelerate.Accelerator(cpu=plugin is None, parallelism_config=config, fsdp_plugin=plugin)
    assert accelerator.is_fsdp2 == (plugin is not None)
    torch.manual_seed(3)
    model = tiny(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = sequences(20, masked=1)  # so that the mean over replicas is the mean over labels
    dataset: Any = Stream(rows) if data == "stream" else rows
    loader = DataLoader(dataset, batch_size=batch, shuffle=data == "shuffled")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _, local in zip(range(5), loader, strict=False):
        loss = model(**local).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {}


@pytest.mark.parametrize(("cp_size", "data", "fsdp"), [(4, "shuffled", False), (2, "stream", False), (2, "rows", True)])
def test_accelerate_loop(pools: dict[int, Pool], cp_size: int, data: str, fsdp: bool) -> None:
    """Under DDP, and FSDP2 over all four ranks, there with all switches of ``Memory``."""
    dp = 4 // cp_size
    config: dict[str, Any] = {"cp_size": cp_size}
    if fsdp:
        config["memory"] = seqpar.Memory(tiled_mlp=5, head_groups=2, checkpoint="attention", offload=True)
    expected, _ = alone(with_loop, "", "mistral", 4, data)
    runs = pools[4].run(4, parallel, with_loop, config, "", "mistral", 4 // dp, data, fsdp)
    losses = torch.tensor([run[0] for run in runs]).unflatten(0, (dp, cp_size))  # [dp, cp, steps]
    assert torch.equal(losses, losses[:, :1].expand_as(losses))
    assert losses.mean((0, 1)).tolist() == pytest.approx(expected, abs=LOSS)


@on_ranks
def verified(group: ProcessGroup) -> str:
    """The report of ``verify`` on a model that accelerate has prepared. Each sequence has a batch of its own."""
    with torchrun(group):
        accelerator = accelerate.Accelerator(cpu=True, parallelism_config=seqpar.hf.ParallelismConfig(cp_size=2))
        model = accelerator.prepare(tiny("gpt_oss"))
        return str(seqpar.hf.verify(model, make_batch("packed", seed=group.rank() // 2), raise_on_error=False))


@pytest.mark.parametrize("world", [2, 4])
def test_verify(pools: dict[int, Pool], world: int) -> None:
    for said in pools[world].run(world, verified):
        assert "equal to one device: 45 tokens on 2 rank(s)" in said, said


SCRIPT = """
import torch.distributed as dist

import seqpar.hf
from tests.hf.test_accelerate import with_loop

losses, _ = with_loop(seqpar.hf.ParallelismConfig(), "", "mistral", 4, "rows")
assert dist.get_world_size() == 2
if dist.get_rank() == 0:
    print("losses", *losses)
"""
YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 1
num_processes: 2
parallelism_config:
  parallelism_config_cp_size: 2
"""


def accelerate_launch(out: Path, arguments: list[str]) -> None:
    """``accelerate launch``, with ``out`` as the standard output of the ranks."""
    # The ranks are forks of this process, which import nothing again.
    os.environ.update(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1", PET_RUN_PATH="1", PET_START_METHOD="fork")
    with out.open("w") as file:
        os.dup2(file.fileno(), 1)
    sys.argv[1:] = arguments
    accelerate.commands.launch.main()


def test_accelerate_launch(tmp_path: Path) -> None:
    """The number of ranks comes from the YAML file."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "two.yaml").write_text(YAML)
    arguments = ["--config_file", str(tmp_path / "two.yaml"), "--main_process_port", "0", str(tmp_path / "script.py")]
    launcher = get_context("forkserver").Process(target=accelerate_launch, args=(tmp_path / "out", arguments))
    launcher.start()
    try:
        expected, _ = alone(with_loop, "", "mistral", 4, "rows")
        launcher.join(120)
    finally:
        launcher.kill()
    assert launcher.exitcode == 0
    (line,) = [line for line in (tmp_path / "out").read_text().splitlines() if line.startswith("losses")]
    assert [float(x) for x in line.split()[1:]] == pytest.approx(expected, abs=LOSS)


@on_ranks
def refused(group: ProcessGroup, config: dict[str, Any], arguments: dict[str, Any]) -> str:
    with torchrun(group):
        try:
            accelerator = accelerate.Accelerator(
                cpu=True, parallelism_config=seqpar.hf.ParallelismConfig(**config), **arguments
            )
            accelerator.prepare(DataLoader(sequences(4), batch_size=2))
            accelerator.prepare(seqpar.hf.parallelize(tiny("llama"), group=group))
        except ValueError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({"cp_size": 4}, {}, "expected a product equal to the number of processes, 2"),
        ({"cp_size": 2, "dp_shard_size": 2}, {}, "expected a product equal to the number of processes, 2"),
        ({"cp_size": 1}, {}, "the ParallelismConfig has cp_size=1 and batches="),
        (
            {"cp_size": 2},
            {"dataloader_config": accelerate.utils.DataLoaderConfiguration(dispatch_batches=True)},
            "dispatch_batches=True",
        ),
    ],
)
def test_refused_configs(
    pools: dict[int, Pool], config: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    for error in pools[2].run(2, refused, config, arguments):
        assert message in error


def test_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    config = seqpar.hf.ParallelismConfig(2, strategy="hybrid", ulysses_size=2)
    assert isinstance(config, accelerate.ParallelismConfig)
    assert config.cp_size == 2 and not config.cp_enabled
    assert "cp_size=2" in repr(config) and "strategy='hybrid'" in repr(config)
    arguments = transformers.TrainingArguments(output_dir="unused", use_cpu=True, parallelism_config=config)
    assert '"ulysses_size": 2' in arguments.to_json_string()
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "8")
    assert seqpar.hf.ParallelismConfig().cp_size == 8
    for wrong, message in (
        ({"cp_size": 0}, "cp_size=0: expected at least 1"),
        ({"layout": "zigzack"}, "layout='zigzack'"),
        ({"outputs": "all"}, "outputs='all'"),
        ({"strategy": "rong"}, "strategy='rong'"),
    ):
        with pytest.raises(ValueError, match=message):
            seqpar.hf.ParallelismConfig(**wrong)


def test_what_it_relies_on() -> None:
    """Undocumented names in accelerate and transformers, which ``hf/accelerate.py`` lists."""
    start = inspect.getsource(accelerate.Accelerator.__init__)
    assert 0 < start.index("parallelism_config.get_device_mesh(") < start.index("._validate_accelerator(self)")
    prepare = inspect.getsource(accelerate.Accelerator._prepare_one)
    assert "self.prepare_model(" in prepare and "self.prepare_data_loader(" in prepare
    assert "self.gather(" in inspect.getsource(accelerate.Accelerator.gather_for_metrics)
    assert "parallelism_config.tp_enabled" in inspect.getsource(accelerate.Accelerator.prepare)
    assert accelerate.ParallelismConfig(dp_shard_size=2).fsdp_dim_names == ["dp_shard_cp"]
    for size in ("tp", "cp"):
        source = inspect.getsource(getattr(transformers.Trainer, f"get_{size}_size"))
        assert f"pc.{size}_size" in source or "pc." not in source
