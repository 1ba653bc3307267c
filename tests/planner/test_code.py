"""The code that a plan prints runs as it is printed, with the losses of one device."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import seqpar
from seqpar import Mask
from seqpar.cli.launch import launch
from seqpar.planner.mixer import Mixer
from seqpar.planner.shape import Layer
from seqpar.planner.split import Switches
from seqpar.planner.step import Choice

from ..reference import MARGINS, assert_error
from ..settings import H100
from .sizes import DOCUMENTS, SHAPE, TOKENS

RANKS = 4
ONE_HOST = {"base": "h100", "attention": {"cpu": [1e12, 1e12], "invariant": [1e12, 1e12]}, "gpus_per_host": RANKS}
# By strategy, and the strategy beside tensor parallelism: how weights are sharded; what is recomputed, whether
# activations are offloaded, the loss chunked, the MLP tiled, and in how many groups heads are computed.
VARIANTS: dict[str, tuple[Any, ...]] = {
    "local local": ("fsdp", "none"),
    "ulysses ulysses": ("hsdp", "none"),
    "ring ring": ("zero2", "keep_attention", True, True, True, 2),
    "context_parallel context_parallel": ("zero1", "full", True, True, True),
    "hybrid hybrid": ("fsdp", "keep_attention", False, True, True),
    "tp_sp local": ("fsdp", "keep_attention", True),
    "tp_sp ulysses": ("fsdp", "full", True),
    "tp_sp ring": ("fsdp", "none"),
}
MIXER = Layer(1, (Mixer(64, "short convolution", 64, 3, 64, 64, 64),))


def small_plan(**options: Any) -> seqpar.Plan:
    return seqpar.plan(SHAPE, TOKENS, RANKS, ONE_HOST, global_batch=4, **options)


def variants() -> dict[str, Choice]:
    """A choice of every strategy, and among them every way to recompute, to save memory and to shard weights."""
    found: dict[str, Choice] = {}
    for choice in small_plan(recompute="none").choices:
        if choice.possible and (choice.degrees["dp"] < RANKS or choice.context == "local"):
            found.setdefault(f"{choice.strategy} {choice.context}", choice)
    for name, (weights, *switches) in VARIANTS.items():
        found[name] = replace(found[name], switches=Switches(*switches), weights=weights)
    assert found.keys() == VARIANTS.keys()
    return found


@pytest.mark.slow
@pytest.mark.thorough
def test_printed_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is printed, with the gradients of one device, whose loss compares each token with the one before it."""
    pytest.importorskip("transformers")
    from .run_code import run_on_one_device, run_printed

    monkeypatch.setattr("seqpar.planner.code.TILE_TOKENS", 8)
    plan = small_plan()
    choices = variants()
    texts = {name: plan.code(choice) for name, choice in choices.items()}
    packed = replace(plan, mask=Mask.documents(DOCUMENTS))
    for name, layout in (("ring ring", "balanced"), ("tp_sp ring", "balanced"), ("tp_sp local", "contiguous")):
        choice: Any = replace(choices[name], layout=layout)
        texts[f"{name}, packed"] = packed.code(choice)
    full = choices["context_parallel context_parallel"]
    texts["mixer"] = replace(plan, model=replace(SHAPE, layers=(*SHAPE.layers, MIXER))).code(full)
    invariant = small_plan(deterministic="invariant", replicas=1)
    texts |= {f"invariant {x.strategy}": invariant.code(x) for x in invariant.choices if x.possible}
    not_causal = replace(plan, model=replace(SHAPE, causal=False), mask=Mask.full())
    texts["masked"] = not_causal.code(choices["ulysses ulysses"])
    for words in ("tiled_mlp=8", "head_groups=2", "offload=True).apply(model", "activation_checkpointing_enable()"):
        assert any(words in text for text in texts.values()), words
    results = launch(run_printed, RANKS, texts, deadline_s=600)
    ((expected, nudged),) = launch(run_on_one_device, 1, texts, deadline_s=600)

    def check(norm: float, name: str) -> None:
        error, rounding = (abs(x - expected[name]) / expected[name] for x in (norm, nudged[name]))
        assert_error(error, rounding, name, dtype=torch.bfloat16)

    with pytest.raises(AssertionError):  # the mask counts
        check(expected["tp_sp local, packed"], "tp_sp local")
    MARGINS.take()  # of a comparison that is to fail
    for found in results:
        for name in texts:
            check(found[name], name)


@pytest.mark.slow
@pytest.mark.thorough
def test_torchrun_runs_a_printed_file(tmp_path: Path) -> None:
    """By the command in its first lines."""
    pytest.importorskip("transformers")
    text = seqpar.plan(SHAPE, TOKENS, 2, {**ONE_HOST, "gpus_per_host": 2}, replicas=1).code()
    (tmp_path / "train.py").write_text(text)
    command = text.split("\nimport")[0].split("\n# A step")[0].replace("\\\n#", "").removeprefix("# torchrun ")
    run = [sys.executable, "-m", "torch.distributed.run", *command.split()]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"(step [012]: \d\.\d{4}\n){3}", done.stdout)


def test_what_is_printed() -> None:
    """Lines of at most 100 columns; where hosts meet; a backend that was asked for; a row that transformers can run."""
    plan = seqpar.plan(
        replace(SHAPE, layers=(Layer(126, SHAPE.layers[0].parts),)),
        1 << 15,
        16,
        global_batch=16,
        recompute="none",
        offload=False,
    )
    texts = [plan.code(choice) for choice in plan.choices if choice.possible]
    assert {choice.context for choice in plan.choices if choice.possible} > {"ring", "ulysses", "hybrid"}
    assert all("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500" in text for text in texts)
    assert not any("backend=" in text or "--backend " in text for text in texts)
    tensor_parallel = next(choice for choice in plan.choices if choice.degrees["tp"] > 1)
    first = replace(plan, choices=(tensor_parallel, *plan.choices))
    assert "tp_sp" not in first.code() and "seqpar.hf.parallelize" in first.code() and "tp_sp" in first.code(first.best)
    assert "tp_sp" in replace(plan, choices=(tensor_parallel,)).code()
    texts += [replace(plan, kernel="flash2").code(), replace(plan, hardware=replace(H100, gpus_per_host=16)).code()]
    assert 'backend="flash_attn"' in texts[-2] and "--backend flash_attn " in texts[-2]
    assert "--nnodes" not in texts[-1] and "torchrun --standalone --nproc-per-node 16 train.py" in texts[-1]
    for mask in (Mask.sliding_window(4095, 0), Mask.documents(range(0, (1 << 15) + 1, 1024))):
        texts += [replace(plan, mask=mask).code(), replace(plan, mask=mask).code(tensor_parallel)]
    window, window_tp, many, many_tp = texts[-4:]
    assert "# Planned for Mask.sliding_window(4095" in window and "masks of its own layers" in window
    assert "mask = seqpar.Mask.sliding_window(4095" in window_tp and "mask=mask" in window_tp
    assert all("documents = [*range(0, seq_len, 1024), seq_len]" in text for text in (many, many_tp))
    assert max(len(line) for text in texts for line in text.splitlines()) <= 100
    for text in texts:
        compile(text, "printed", "exec")


def test_the_bench_command_is_one() -> None:
    """The command line takes it, for every strategy."""
    import typer

    from seqpar.cli.bench import bench
    from seqpar.cli.bench_cases import BenchConfig

    app = typer.Typer()
    app.command()(bench)
    plan = small_plan()
    for choice in plan.choices:
        if choice.possible:
            start, words = plan.code(choice).split("seqpar bench ")
            context = typer.main.get_command(app).make_context("bench", shlex.split(words.replace("\\\n#", "")))
            config = BenchConfig(**context.params)
            assert config.seq_len == [str(TOKENS)] and config.mask == ["causal"] and not config.peers
            config.check(choice.degrees["ring"] * choice.degrees["ulysses"])
            assert "-m" in start.split("#")[-1] or config.nproc == choice.degrees["ring"] * choice.degrees["ulysses"]


def test_a_choice_that_the_package_cannot_run_has_no_code() -> None:
    plan = seqpar.plan("llama3-8b", 1 << 21, 8, offload=False)
    lacking = replace(plan.choices[0], needs=("tiled_mlp",))
    with pytest.raises(ValueError, match="needs what the package lacks: tiled_mlp"):
        plan.code(lacking)
    with pytest.raises(ValueError, match="nothing fits"):
        plan.code()
