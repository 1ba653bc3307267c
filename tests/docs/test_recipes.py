"""The code of docs/recipes.md as printed: two ranks compute what one process does. A recipe is skipped if its framework
is not installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ..reference import assert_close
from .test_docs import ROOT, _blocks

pytestmark = pytest.mark.slow
# By the beginning of a title: the module that the recipe needs, and what is added to print a result that must be equal
# on one rank and on two. The other recipes compare themselves with one device.
_NORM = "sum(p.square().sum() for p in {}).sqrt().item()"
_PRINT = "print(' '.join(map(str, ('RESULT', {}))) + '\\n', end='')"  # in one piece: the ranks share the output
RECIPES = {
    "Lightning": (
        "lightning",
        _PRINT.format(f"trainer.callback_metrics['loss'].item(), {_NORM.format('module.parameters()')}"),
    ),
    "torchtitan": ("torchtitan.models.llama3", ""),
    "megatron-core": (
        "megatron.core",
        "refused = False\n"
        "try:  # a tensor may hold documents, and the layer's mask would be causal\n"
        "    model(local['tokens'], local['position_ids'], torch.ones(1, 1, 1, 1).bool())\n"
        "except ValueError as error:\n"
        "    refused = 'attention_mask' in str(error)\n"
        "assert refused\n"
        "loss = losses.sum() / ids.numel()\n"
        "loss.backward()\n"
        "gradients = [p.grad for p in model.parameters()]\n"
        "for x in (loss.data, *gradients):\n"
        "    torch.distributed.all_reduce(x)\n" + _PRINT.format(f"loss.item(), {_NORM.format('gradients')}"),
    ),
    "litgpt": ("litgpt", ""),
    "x-transformers": ("x_transformers", ""),
    "Vision Transformers": ("timm", ""),
}
# megatron-core asks for the current GPU and for pinned memory even with use_cpu_initialization.
_CPU = """
import torch
make = torch.tensor
torch.tensor = lambda *args, pin_memory=False, **options: make(*args, **options)
torch.cuda.current_device = lambda: "cpu"
torch.Tensor.cuda = lambda x, *_, **__: x
"""


def _sections() -> dict[str, str]:
    """The code of each section, by title. The code before the first title has the title ""."""
    lines = (ROOT / "docs" / "recipes.md").read_text().splitlines()
    code = {"": ""}
    for line, source in _blocks("docs/recipes.md"):
        title = next((x[3:] for x in reversed(lines[:line]) if x.startswith("## ")), "")
        code[title] = code.get(title, "") + source
    return code


def _run(command: list[str], source: str, folder: Path) -> list[str]:
    """The results that the ranks print."""
    script = folder / "recipe.py"
    script.write_text(source)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "120", "RAY_DEDUP_LOGS": "0"}
    run = subprocess.run(
        [*command, str(script)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    return re.findall(r"RESULT (.*)", run.stdout)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_one_process(recipe: str, tmp_path: Path) -> None:
    module, result = RECIPES[recipe]
    pytest.importorskip(module)
    code = _sections()
    (printed,) = (source for title, source in code.items() if title.startswith(recipe))
    source = (_CPU if "megatron" in module else "") + code[""] + printed + result
    results = []
    for ranks in (1, 2) if result else (2,):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        lines = _run(command, source, tmp_path)
        assert len(lines) == (ranks if result else 0)
        results += [[float(x) for x in line.split()] for line in lines]
    for x in results:
        assert_close(x, results[0])


def test_torchtitan_refuses_what_it_would_not_see() -> None:
    """Layers and masks that the adapter does not replace would see the tokens of one rank only."""
    models = pytest.importorskip("torchtitan.models.llama3")
    glimmer = pytest.importorskip("torchtitan.models.muse_glimmer").muse_glimmer_configs
    from seqpar.adapters import torchtitan

    def refused(model: Any, reason: str) -> None:
        before = {name: type(x) for name, x in model.named_modules()}
        with pytest.raises(ValueError, match=reason):
            torchtitan.parallelize(model, None)
        assert before == {name: type(x) for name, x in model.named_modules()}

    flex = r"attention.inner_attention=FlexAttention: .*attn_backend"
    for config in (models.llama3_configs["debugmodel"], glimmer["debugmodel"]):
        refused(config(attn_backend="flex").build(), flex)
    model = models.llama3_configs["debugmodel"](attn_backend="varlen").build()
    first = next(iter(model.layers.values()))
    attention, first.attention = first.attention, nn.Conv1d(1, 1, 3)
    refused(model, r"layers.0 .*no inner_attention")
    first.attention, model.mtp_layers = attention, nn.ModuleList([attention])
    refused(model, r"mtp_layers .*no inner_attention")


def test_ray_train(tmp_path: Path) -> None:
    """Two workers train as the recipe's function alone does in one process."""
    pytest.importorskip("ray.train.torch")
    code = _sections()
    (printed,) = (source for title, source in code.items() if title.startswith("Ray"))
    shown = _PRINT.format(f"mesh.size(), step, loss.item(), {_NORM.format('model.parameters()')}")
    assert "print(step, loss.item())" in printed
    printed = printed.replace("print(step, loss.item())", shown) + "train()\n"
    lines = _run([sys.executable], code[""] + printed, tmp_path)
    results = [[float(x) for x in line.split()] for line in lines]
    single = {x[1]: x[2:] for x in results if x[0] == 1}
    workers = [x[1:] for x in results if x[0] == 2]
    assert len(single) == 3
    assert len(workers) == 6
    for step, *x in workers:
        assert_close(x, single[step])
