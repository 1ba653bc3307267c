"""The code that a plan prints runs as it is printed, with the losses of one device."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace
from itertools import repeat
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

import seqpar
from seqpar.cli.launch import launch
from seqpar.planner.code import code
from seqpar.planner.memory import Switches
from seqpar.planner.step import Choice

TOKENS, BATCH, RANKS = 96, 1, 4
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": False,
}  # fmt: skip
ONE_HOST = {"base": "h100", "attention": {"cpu": [1e12, 1e12]}, "gpus_per_host": RANKS}


def small_plan(**options: Any) -> seqpar.Plan:
    return seqpar.plan({"model_type": "qwen3", **SIZES}, TOKENS, RANKS, ONE_HOST, global_batch=4, **options)


def variants() -> dict[str, Choice]:
    """A choice of every strategy, way to recompute and way to shard weights."""
    found: dict[str, Choice] = {}
    for choice in small_plan(recompute="none").choices:
        if choice.degrees["dp"] < RANKS and choice.possible:
            found.setdefault(f"{choice.strategy} {choice.context}", choice)
    how = ("none", "keep_attention", "full")
    for i, (name, choice) in enumerate(list(found.items())):
        weights = ("fsdp", "zero2", "zero1", "hsdp")[i % 4 if choice.degrees["tp"] == 1 else 0]
        found[name] = replace(choice, switches=Switches(how[i % 3]), weights=weights)
        if choice.degrees["tp"] == 1:
            saving = Switches(how[1 + i % 2], True, tiled_mlp=True, head_groups=2 if choice.context == "ring" else 1)
        else:
            saving = Switches(how[1 + i % 2], True)
        found[f"{name} saving"] = replace(choice, switches=saving, weights="fsdp")
    return found


def printed(plan: seqpar.Plan, choice: Choice) -> str:
    return code(choice, plan.model, plan.hardware, plan.seq_len, plan.batch, plan.kernel, plan.mask)


def transformer() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


def batch_of(is_shifted: bool) -> dict[str, torch.Tensor]:
    """The same batch in every part of a step and on every rank. transformers shifts the labels itself."""
    ids = torch.randint(0, 61, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:] if is_shifted else ids[:, :-1]}


def norm(parameters: Iterable[torch.nn.Parameter]) -> float:
    """The norm of all gradients, of the shards of all ranks together."""
    grads = [p.grad for p in parameters if p.grad is not None]
    whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in grads]
    return float(torch.stack([x.float().norm() for x in whole]).norm())


class Recorded(torch.optim.AdamW):
    """AdamW that takes no step, and records the norm of the gradients."""

    norms: ClassVar[list[float]] = []

    def step(self, closure: Any = None) -> Any:
        self.norms.append(norm(p for group in self.param_groups for p in group["params"]))


def run_printed(texts: dict[str, str]) -> dict[str, tuple[float, float]]:
    """Run each text on this rank: the loss of the step, and the norm of the gradients."""
    found = {}
    for name, text in texts.items():
        uses_hf = "seqpar.hf" in text
        names: dict[str, Any] = {"batches": repeat(batch_of(not uses_hf))}
        if uses_hf:
            names["model"] = transformer()
        torch.manual_seed(0)
        with mock.patch("torch.optim.AdamW", Recorded):
            exec(compile(text, name, "exec"), names)
        found[name] = float(names["loss"].detach()) * names["accumulation"], Recorded.norms.pop()
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.slow
def test_printed_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqpar.planner.code.TILE_TOKENS", 8)
    plan = small_plan()
    texts = {name: printed(plan, choice) for name, choice in variants().items()}
    assert len(texts) >= 12, texts
    for words in ("tiled_mlp=8", "head_groups=2", "offload=True).apply(model"):
        assert any(words in text for text in texts.values()), words
    results = launch(run_printed, RANKS, texts, deadline_s=300)
    model = transformer()
    loss = model(**batch_of(False)).loss
    loss.backward()
    tensor_parallel = next(x for name, x in results[0].items() if "tp_sp" in name)
    expected = {True: (loss.item(), norm(model.parameters())), False: tensor_parallel}
    for result in results:
        for name, found in result.items():
            # Under tensor parallelism a rank's loss is its share: only the gradients are compared, with one another.
            first = int("tp_sp" in name)
            assert found[first:] == pytest.approx(expected["tp_sp" not in name][first:], rel=0.02), (name, results[0])


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
