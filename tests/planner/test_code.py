"""The code that a plan prints runs as it is printed, with the losses of one device."""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

import seqpar
from seqpar import Mask
from seqpar.cli.launch import launch
from seqpar.planner.code import code
from seqpar.planner.memory import Switches
from seqpar.planner.step import Choice

from .sizes import DOCUMENTS, SIZES, TOKENS

RANKS = 4
ONE_HOST = {"base": "h100", "attention": {"cpu": [1e12, 1e12]}, "gpus_per_host": RANKS}
# By strategy, and the strategy beside tensor parallelism: how weights are sharded; what is recomputed, whether
# activations are offloaded, the loss chunked, the MLP tiled, and in how many groups heads are computed.
VARIANTS: dict[str, tuple[Any, ...]] = {
    "ulysses ulysses": ("hsdp", "none"),
    "ring ring": ("zero2", "keep_attention", True, True, True, 2),
    "context_parallel context_parallel": ("zero1", "full", True, True, True),
    "hybrid hybrid": ("fsdp", "keep_attention", False, True, True),
    "tp_sp local": ("fsdp", "keep_attention", True),
    "tp_sp ulysses": ("fsdp", "full", True),
    "tp_sp ring": ("fsdp", "none"),
}


def small_plan(**options: Any) -> seqpar.Plan:
    return seqpar.plan({"model_type": "qwen3", **SIZES}, TOKENS, RANKS, ONE_HOST, global_batch=2, **options)


def variants() -> dict[str, Choice]:
    """A choice of every strategy, and among them every way to recompute, to save memory and to shard weights."""
    found: dict[str, Choice] = {}
    for choice in small_plan(recompute="none").choices:
        if choice.degrees["dp"] < RANKS and choice.possible:
            found.setdefault(f"{choice.strategy} {choice.context}", choice)
    for name, (weights, *switches) in VARIANTS.items():
        found[name] = replace(found[name], switches=Switches(*switches), weights=weights)
    assert found.keys() == VARIANTS.keys()
    return found


def printed(plan: seqpar.Plan, choice: Choice) -> str:
    return code(choice, plan.model, plan.hardware, plan.seq_len, plan.batch, plan.kernel, plan.mask)


@pytest.mark.slow
def test_printed_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from .run_code import batch_of, norm, run_printed, transformer

    monkeypatch.setattr("seqpar.planner.code.TILE_TOKENS", 8)
    plan = small_plan()
    choices = variants()
    texts = {name: printed(plan, choice) for name, choice in choices.items()}
    packed = replace(plan, mask=Mask.documents(DOCUMENTS))
    for name, layout in (("ring ring", "balanced"), ("tp_sp ring", "balanced"), ("tp_sp local", "contiguous")):
        choice: Any = replace(choices[name], layout=layout)
        texts[f"{name}, packed"] = printed(packed, choice)
    for words in ("tiled_mlp=8", "head_groups=2", "offload=True).apply(model"):
        assert any(words in text for text in texts.values()), words
    results = launch(run_printed, RANKS, texts, deadline_s=300)
    alone, packed_alone = (results[0][name][1] for name in ("tp_sp local", "tp_sp local, packed"))
    assert packed_alone != pytest.approx(alone, rel=0.01)  # the mask counts
    for is_packed in (False, True):
        model = transformer()
        loss = model(**batch_of(False, is_packed), use_cache=False).loss  # with a cache, transformers ignores documents
        loss.backward()
        mine = [{name: x for name, x in result.items() if ("packed" in name) == is_packed} for result in results]
        tensor_parallel = next(x for name, x in mine[0].items() if "tp_sp" in name)
        expected = {True: (loss.item(), norm(model.parameters())), False: tensor_parallel}
        for name, found in chain.from_iterable(x.items() for x in mine):
            # Under tensor parallelism a rank's loss is its share: only the gradients are compared, with one another.
            first = int("tp_sp" in name)
            assert found[first:] == pytest.approx(expected["tp_sp" not in name][first:], rel=0.02), (name, mine[0])


def test_the_bench_command_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Its options are the bench's, for every strategy."""
    from seqpar.cli.bench_cases import BenchConfig, strategy_names

    plan = small_plan()
    for choice in plan.choices:
        if not choice.possible:
            continue
        command = printed(plan, choice).split("seqpar bench ")[1].replace("\\\n#", "")
        words = shlex.split(command)
        options = dict(zip(words[::2], words[1::2], strict=False))
        assert options["--strategy"] in strategy_names() and options["--seq-len"] == str(TOKENS)
        ranks = int(options.get("--nproc", "0"))
        config = BenchConfig(
            strategy=(options["--strategy"],), layout=(options["--layout"],), seq_len=(TOKENS,), mask=("causal",),
            heads=int(options["--heads"]), kv_heads=int(options["--kv-heads"]), head_dim=int(options["--head-dim"]),
        )  # fmt: skip
        if ranks > 1:
            config.check(ranks)


def test_a_choice_that_the_package_cannot_run_has_no_code() -> None:
    plan = seqpar.plan("llama3-8b", 1 << 21, 8, offload=False)
    lacking = replace(plan.choices[0], needs=("tiled_mlp",))
    with pytest.raises(ValueError, match="needs what the package lacks: tiled_mlp"):
        plan.code(lacking)
    with pytest.raises(ValueError, match="nothing fits"):
        plan.code()
