"""The documentation is correct: its Python runs as written, its links exist, and its figures are up to date.

The ``python`` blocks of a page run one after another in one namespace. In a ``diff`` block, the lines with ``+`` or a
space are run.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

import seqpar

from ..pool import OwnPool, Pool, on_ranks
from ..reference import assert_error

ROOT = Path(__file__).parents[2]
PAGES = sorted(str(page.relative_to(ROOT)) for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
# Ranks that a page runs on, by default 4. With 0 it runs in a process of its own, because it starts what a process has
# once (accelerate's state, a Trainer).
RANKS = {
    "README.md": 0,
    "docs/huggingface.md": 0,
    "docs/hf-outputs.md": 0,
    "docs/migrating.md": 0,
    "docs/planning.md": 1,
    "docs/megatron.md": 8,
}
_BLOCK = re.compile(r"^```(python|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
_WIDTH = 95  # columns that the site shows beside its side bars, and GitHub without a scroll bar


def _blocks(page: str) -> list[tuple[int, str]]:
    """The Python of a page, as (lines before it, source)."""
    text = (ROOT / page).read_text()
    return [
        (text.count("\n", 0, match.start()) + 1, _side(match[2], "+") if match[1] == "diff" else match[2])
        for match in _BLOCK.finditer(text)
    ]


def _side(diff: str, sign: str) -> str:
    """The source before ("-") or after ("+") the change. Lines of the other side are empty, so that numbers stay."""
    return "".join(line[1:] if line[0] in (sign, " ") else "\n" for line in diff.splitlines(keepends=True))


def _recipe() -> dict[str, Any]:
    """The names that the recipes for Hugging Face models use: a model and what belongs to it."""
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments, default_data_collator

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.arange(64)
    dataset: Any = [{"input_ids": tokens, "labels": tokens}] * 2
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batch": {"input_ids": tokens[None], "labels": tokens[None]},
        "input_ids": tokens[None],
        "dataset": dataset,
        "loader": DataLoader(dataset, collate_fn=default_data_collator),
        "training_arguments": TrainingArguments(
            "output", max_steps=1, report_to="none", save_strategy="no", use_cpu=True
        ),
        "accelerator": Accelerator(cpu=True),
        "LoraConfig": LoraConfig,
        "get_peft_model": get_peft_model,
    }


def _begins_recipe(source: str) -> bool:
    return "parallelize(model" in source or "ParallelismConfig(" in source


def run_page(page: str) -> None:
    """Run a page's blocks. A traceback shows the line of the page."""
    namespace: dict[str, Any] = {"__name__": "page"}
    try:
        for line, source in _blocks(page):
            if _begins_recipe(source):  # with its own model
                namespace.update(_recipe())
            exec(compile("\n" * line + source, ROOT / page, "exec"), namespace)
    finally:
        torch.set_default_device(None)


@on_ranks
def _run_page_worker(group: ProcessGroup, page: str) -> None:
    run_page(page)


def _run_page_in(folder: Path, page: str) -> None:
    os.chdir(folder)
    run_page(page)


@pytest.mark.slow
@pytest.mark.thorough(
    page=["docs/megatron.md", "docs/migrating.md", "docs/numerics.md", "docs/planning.md", "docs/strategies.md"]
)
@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page) and page != "docs/recipes.md"])
def test_a_page_runs(pool: Pool, own: OwnPool, page: str, tmp_path: Path) -> None:
    if any(_begins_recipe(source) for _, source in _blocks(page)):
        pytest.importorskip("accelerate")
    if page == "docs/diffusers.md":
        pytest.importorskip("diffusers")
    if ranks := RANKS.get(page, 4):
        (pool if ranks == 8 else own.pool).run(ranks, _run_page_worker, page)
        return
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as process:
        process.submit(_run_page_in, tmp_path, page).result(120)


@on_ranks
def _errors_of_kept_functions(group: ProcessGroup) -> tuple[float, float, list[bool]]:
    """The errors of attention after the function on docs/migrating.md, with its own layout and with "zigzag".

    Also, for a mesh of 2 x 2 ranks: whether the tokens that yunchang's functions give this rank are the named layouts'.
    """
    source = next(x for _, x in _blocks("docs/migrating.md") if "def extract_local" in x)
    page: dict[str, Any] = {"__name__": "page"}
    try:
        exec(compile(source, "docs/migrating.md", "exec"), page)
    finally:
        torch.set_default_device(None)
    mask = page["Mask"].documents(page["cu_seqlens"])
    scores = torch.einsum("qhd,khd->hqk", page["row"][0], page["row"][1]) / 4
    weights = scores.masked_fill(~mask.dense(128), -torch.inf).softmax(-1)
    whole = torch.einsum("hqk,khd->qhd", weights, page["row"][2])
    expected = page["extract_local"](whole, page["rank"])[None]
    zigzag = seqpar.Sharding(128, "zigzag", mesh=page["mesh"])
    wrong = seqpar.ring_attention(page["q"], page["k"], page["v"], mask=mask, sharding=zigzag)
    mesh, positions = seqpar.init_mesh(ring=2, ulysses=2), torch.arange(128)
    ring, ulysses = divmod(group.rank(), 2)
    chunks = positions.chunk(4)
    theirs = {
        "contiguous": chunks[group.rank()],
        "zigzag": torch.cat([chunks[ring], chunks[3 - ring]]).chunk(2)[ulysses],
        "striped": positions.reshape(64, 2).t().flatten().chunk(4)[group.rank()],
    }
    shardings = {layout: seqpar.Sharding(128, layout, mesh=mesh) for layout in theirs}
    same = [shardings[layout].positions().tolist() == held.tolist() for layout, held in theirs.items()]
    return float((page["out"] - expected).abs().max()), float((wrong - expected).abs().max()), same


@pytest.mark.slow
def test_a_kept_sharding_function_needs_its_own_layout(own: OwnPool) -> None:
    results = own.pool.run(4, _errors_of_kept_functions)
    for right, wrong, _ in results:
        assert_error(right, 0.0, dtype=torch.float64)
        assert wrong > 0.1
    assert [all(same) for same in zip(*(same for _, _, same in results), strict=True)] == [True, False, False]


@pytest.mark.slow
@pytest.mark.thorough
def test_the_quickstart_runs_under_torchrun_without_a_warning() -> None:
    # The ranks are forks of torchrun's process, so that torch is imported once.
    options = ["--standalone", "--nproc-per-node", "2", "--run-path", "--start-method=fork"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *options]
    # Over gloo, for which attention makes process groups of its own. torchrun warns if it chooses the threads itself.
    environment = {**os.environ, "SEQPAR_SHARED_MEMORY": "0", "OMP_NUM_THREADS": "1"}
    command = [*launcher, "examples/quickstart.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and not re.search("(?i)warn|deprecat", done.stderr), done.stderr
    out = done.stdout
    # The ranks share one standard output: a line break may come late.
    lines = re.findall(r"rank (\d): 512 of 1024 tokens, largest difference (\d\.\de[+-]\d\d)", out)
    assert sorted(rank for rank, _ in lines) == ["0", "1"], out
    for _, error in lines:
        assert_error(float(error), 0.0)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_quickstart_is_the_example(page: str) -> None:
    _, example = (ROOT / "examples" / "quickstart.py").read_text().split('"""\n', 1)
    assert _blocks(page)[0][1].strip() == example.strip()


@pytest.mark.parametrize("page", PAGES)
def test_the_side_before_a_change_is_python(page: str) -> None:
    for language, source in _BLOCK.findall((ROOT / page).read_text()):
        if language == "diff":
            ast.parse(_side(source, "-"))


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_to_files_resolve(page: str) -> None:
    folder = (ROOT / page).parent
    missing = [link for link in _LINK.findall((ROOT / page).read_text()) if not (folder / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_code_fits_the_page(page: str) -> None:
    blocks = re.findall(r"^```\w+\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    wide = [line for block in blocks for line in block.splitlines() if len(line) > _WIDTH]
    assert not wide


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mask", "section", "gpus", "tokens"),
    [("causal", "wins", 8, 128 << 10), ("causal", "wins", 256, 1 << 20), ("mix:magi", "packed", 32, 512 << 10)],
)
def test_scale_is_the_planners(mask: str, section: str, gpus: int, tokens: int) -> None:
    """A few of the cells that ``make scale`` writes."""
    scale = runpy.run_path(str(ROOT / "docs" / "scale.py"))
    parts = (ROOT / "docs" / "planning.md").read_text().split("\n### ")
    (part,) = (x for x in parts if section in x.splitlines()[0])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines() if line.startswith("|")]
    column = rows[0].index(f"{gpus:,} GPUs")
    (written,) = (row[column] for row in rows if row[0] == scale["words"](tokens))
    cell = scale["predict"]((mask, gpus, tokens))
    best = cell.best
    if mask == "causal":
        assert written == f"{best.strategy} {best.degrees}, {scale['mfu_range'](best)}"
    else:
        one = scale["predict"](("causal", gpus, tokens)).best
        ratio = best.tokens_per_s / one.tokens_per_s
        assert written == f"{best.strategy} {best.degrees}, {ratio:.1f} x; {cell.over_zigzag:.2f}"


@pytest.mark.thorough
def test_settings_of_the_docs_are_the_planners() -> None:
    """The rows of ``CASES`` in docs/scale.py that take little time."""
    scale = runpy.run_path(str(ROOT / "docs" / "scale.py"))
    page = (ROOT / "docs" / "planning.md").read_text().splitlines()
    rows = scale["cases"]([x for x in scale["CASES"] if x[2] <= 32 or x[0] == "DeepSeek-V3"]).splitlines()
    assert len(rows) == 2 + 5 and set(rows) <= set(page)


@pytest.mark.slow
def test_figures_are_up_to_date(tmp_path: Path) -> None:
    """``python docs/figures.py`` would change nothing."""
    figures = runpy.run_path(str(ROOT / "docs" / "figures.py"))
    figures["main"](tmp_path)
    for figure in tmp_path.iterdir():
        assert figure.read_text() == (ROOT / "docs" / "assets" / figure.name).read_text(), figure.name
    assert {figure.name for figure in tmp_path.iterdir()} == {f.name for f in (ROOT / "docs" / "assets").glob("*.svg")}
