"""The example scripts, and the changes of them in the guide: two ranks have the losses of one process."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import runpy
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run
from torch.distributed import ProcessGroup

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import DistributedType
from accelerate.state import AcceleratorState, PartialState
from transformers import Trainer, TrainingArguments, default_data_collator

import seqpar.hf

from ..hf.test_accelerate import logged, settings, torchrun
from ..hf.test_multimodal import make_batch, tiny
from ..pool import Pool, on_ranks
from ..reference import assert_close

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TEXT = str(ROOT / "LICENSE")
GUIDE = (ROOT / "docs" / "huggingface.md").read_text()
# By script, or by the section of docs/huggingface.md that changes one: the packages it needs beside transformers and
# accelerate, and its arguments.
EXAMPLES: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "finetune.py": ((), ["--length", "257", "--accumulate", "2"]),
    "fsdp2.py": ((), ["--length", "257"]),
    "Packed documents": ((), []),
    "TRL's SFTTrainer": (("trl", "datasets"), ["--length", "256"]),
    "LoRA": (("peft",), ["--length", "257"]),
}
ELSEWHERE = {
    "__init__.py",
    "block_diffusion.py",  # tests/core/test_segments.py
    "bytelm.py",  # test_demo.py
    "draft.py",  # tests/core/test_shift.py
    "own_loop.py",  # tests/docs/test_own_loop.py
    "grpo.py",  # tests/hf/test_trl.py
    "qk_clip.py",  # tests/strategies/test_max_logit.py
    "video.py",  # tests/diffusers/test_example.py
    "quickstart.py",  # test_docs.py
}


def script_of(name: str, folder: Path) -> Path:
    """The example ``name``, or the example that the section ``name`` of the guide changes, written to ``folder``."""
    if name.endswith(".py"):
        return ROOT / "examples" / name
    section = GUIDE.split(f"\n### {name}\n", 1)[1]
    match = re.search(r'^```diff title="([^"]*)"\n(.*?)^```$', section, re.MULTILINE | re.DOTALL)
    assert match is not None
    source = (ROOT / match[1]).read_text()
    for hunk in match[2].split("@@\n"):
        before, after = ("".join(x[1:] for x in hunk.splitlines(True) if x[0] in side) for side in ("- ", "+ "))
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    script = folder / Path(match[1]).name
    script.write_text(source)
    return script


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    workers = Pool(2)
    yield workers
    workers.close()


def losses(script: Path, arguments: list[str]) -> list[float]:
    found: list[float] = runpy.run_path(str(script))["main"](arguments)
    return found


@on_ranks
def losses_of_ranks(group: ProcessGroup, script: Path, arguments: list[str]) -> list[float]:
    with torchrun(group):
        if script.name == "fsdp2.py":
            PartialState(cpu=True)  # accelerate uses FSDP2 on accelerators only; the processes have none
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        found = losses(script, arguments)
        assert (AcceleratorState().distributed_type == DistributedType.FSDP) == (script.name == "fsdp2.py")
        return found


@pytest.mark.thorough
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(two: Pool, tmp_path: Path, name: str) -> None:
    packages, arguments = EXAMPLES[name]
    for package in packages:
        pytest.importorskip(package)
    arguments = ["--text", TEXT, "--steps", "2", *arguments]
    script = script_of(name, tmp_path)
    if "--output" in script.read_text():
        arguments += ["--output", str(tmp_path)]
    with torchrun(None):
        alone = losses(script, arguments)
    assert len(alone) == 2 and min(alone) > 0
    for together in two.run(2, losses_of_ranks, script, arguments):
        assert_close(together, alone)


def losses_with_images(folder: str) -> list[float]:
    """The losses of a Trainer on batches with images; every rank runs the vision tower."""
    batch = make_batch("gemma3", "images")
    pixels = batch.pop("pixel_values").unflatten(0, (2, 2))  # [rows, images, 3, 16, 16]
    rows = [{**{name: x[i] for name, x in batch.items()}, "pixel_values": pixels[i]} for i in (0, 1, 1, 0)]

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = default_data_collator(rows)
        return {**batch, "pixel_values": batch["pixel_values"].flatten(0, 1)}

    arguments = TrainingArguments(
        parallelism_config=seqpar.hf.ParallelismConfig(cp_size=-1),
        per_device_train_batch_size=2,
        remove_unused_columns=False,
        **settings(folder, 2),
    )
    trainer = Trainer(tiny("gemma3"), arguments, train_dataset=rows, data_collator=collate)
    trainer.train()
    return logged(trainer)


@on_ranks
def losses_with_images_of_ranks(group: ProcessGroup, folder: str) -> list[float]:
    with torchrun(group):
        return losses_with_images(folder)


@pytest.mark.thorough
def test_a_trainer_with_images(two: Pool, tmp_path: Path) -> None:
    with torchrun(None):
        alone = losses_with_images(str(tmp_path))
    assert len(alone) == 2 and min(alone) > 0
    for together in two.run(2, losses_with_images_of_ranks, str(tmp_path)):
        assert_close(together, alone)


def run_host(out: Path, arguments: list[str]) -> None:
    """``torchrun`` with these arguments. The standard output of the ranks goes to ``out``."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    with out.open("w") as file:
        os.dup2(file.fileno(), 1)
    torch.distributed.run.main(arguments)


@pytest.mark.thorough
def test_two_hosts(tmp_path: Path) -> None:
    """One torchrun for each host, as the guide describes it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = script_of("Several hosts", tmp_path)
    arguments = ["--text", TEXT, "--length", "257", "--steps", "2", "--output", str(tmp_path)]
    context, hosts = multiprocessing.get_context("forkserver"), []
    for host in range(2):
        command = ["--nnodes=2", f"--node-rank={host}", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
        command += [f"--master-port={port}", "--run-path", "--start-method=fork"]  # the ranks import nothing again
        command += [str(script), *arguments]
        hosts.append(context.Process(target=run_host, args=(tmp_path / f"host{host}", command)))
        hosts[-1].start()
    try:
        with torchrun(None):
            alone = losses(script, arguments)
        for process in hosts:
            process.join(180)
    finally:
        for process in hosts:
            process.kill()
    output = (tmp_path / "host0").read_text()
    assert [process.exitcode for process in hosts] == [0, 0], output
    (line,) = [line for line in output.splitlines() if line.startswith('{"losses"')]
    assert_close(json.loads(line)["losses"], alone)


def test_every_example_is_short_and_tested() -> None:
    files = {file.name: file for file in (ROOT / "examples").glob("*.py")}
    assert files.keys() == {name for name in EXAMPLES if name.endswith(".py")} | ELSEWHERE
    lengths = {name: len(file.read_text().splitlines()) for name, file in files.items()}
    most = {"block_diffusion.py": 100, "bytelm.py": 250, "own_loop.py": 120}
    assert all(length <= most.get(name, 80) for name, length in lengths.items()), lengths
