"""TRL's preference and RL trainers have the same losses, rewards and metrics with sharded sequences as without."""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import ProcessGroup

pytest.importorskip("transformers")
pytest.importorskip("trl")

import transformers

import seqpar.hf
from seqpar.hf.prompts import TokenTree

from ..pool import OwnPool, on_ranks, start
from ..reference import assert_error
from .test_accelerate import check_values, rounding_of_steps, settings, tokenizer, torchrun
from .workers import VOCAB, tiny

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FUSED = hasattr(import_module("trl.trainer.utils"), "add_fused_lm_head")
needs_fused = pytest.mark.skipif(not FUSED, reason="before TRL 1.15, GRPO and RLOO ask the model for logits")
Log = list[dict[str, float]]
# What differs between two runs of the same.
_TIMES = ("runtime", "per_second", "step_time", "flos")


def texts(count: int, low: int, high: int, seed: int) -> list[str]:
    g = random.Random(seed)
    return [" ".join(f"t{g.randrange(3, VOCAB)}" for _ in range(g.randrange(low, high))) for _ in range(count)]


def dataset(kind: str) -> Any:
    from datasets import Dataset

    prompts = texts(24, 3, 9, 0)
    columns: dict[str, list[Any]] = {"prompt": prompts}
    if kind in ("dpo", "reward"):
        columns |= {"chosen": texts(24, 4, 20, 1), "rejected": texts(24, 4, 20, 2)}
    if kind == "kto":
        columns |= {"completion": texts(24, 4, 20, 1), "label": [i % 3 != 0 for i in range(24)]}
    if kind == "reward":
        columns = {name: columns[name] for name in ("chosen", "rejected")}
    return Dataset.from_dict(columns)


def completions_of(trainer: Any, encoded: list[list[int]]) -> list[list[int]]:
    """Completions that are not sampled: they depend on the prompt, the step and the row among the rows of all ranks."""
    completions = []
    for i, ids in enumerate(encoded, trainer.accelerator.process_index * len(encoded)):
        g = random.Random(f"{ids} {i} {trainer.state.global_step}")
        completions.append([g.randrange(3, VOCAB) for _ in range(g.randrange(4, 13))] + [2])
    return completions


def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    encoded = [tokenizer()(prompt)["input_ids"] for prompt in prompts]
    completions = completions_of(trainer, encoded)
    return {
        "prompt_ids": encoded,
        "completion_ids": completions,
        "logprobs": [[0.0] * len(ids) for ids in completions],
    }


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [sum(word in ("t5", "t7", "t11", "t30", "t31", "t32") for word in x.split()) / 4 for x in completions]


def log_of(kind: str, model_kind: str, folder: str, config: Any, **arguments: Any) -> Log:
    """The log of two steps of two micro-batches and of an evaluation. "dpo lora" trains adapters."""
    return run_of(kind, model_kind, folder, config, **arguments)[0]


def run_of(
    kind: str, model_kind: str, folder: str, config: Any, **arguments: Any
) -> tuple[Log, dict[str, torch.Tensor]]:
    """The log and the trained weights."""
    import trl

    kind, *options = kind.split()
    name = {"dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO", "rloo": "RLOO"}[kind]
    model: Any = tiny(model_kind)
    given: dict[str, Any] = {}
    if kind == "reward":
        torch.manual_seed(0)
        changed = transformers.AutoConfig.for_model(**{**model.config.to_dict(), "num_labels": 1})
        model = transformers.AutoModelForSequenceClassification.from_config(changed)
    if kind in ("grpo", "rloo"):  # the reference model is loaded from this path too
        model = os.path.join(folder, model_kind)
        arguments = {"num_generations": 2, "max_completion_length": 12, **arguments}
        given["reward_funcs"] = reward
    if kind == "grpo":  # samples are trained on twice, so that their old log-probabilities are computed
        given["rollout_func"] = rollout
        arguments = {"beta": 0.1, "num_iterations": 2, "top_entropy_quantile": 0.8, **arguments}
    if "lora" in options:  # their reference is the model without adapters
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    elif kind in ("dpo", "kto"):
        given["ref_model"] = tiny(model_kind, seed=1)
    data = dataset(kind)
    trainer = getattr(trl, f"{name}Trainer")(
        model=model,
        args=getattr(trl, f"{name}Config")(
            **settings(
                folder,
                2,
                **{
                    "learning_rate": 1e-3,
                    "per_device_train_batch_size": 4,
                    "per_device_eval_batch_size": 4,
                    "gradient_accumulation_steps": 2,
                    "bf16": False,
                    "parallelism_config": config,
                    **arguments,
                },
            )
        ),
        train_dataset=data,
        eval_dataset=data.select(range(12)),
        processing_class=tokenizer(),
        **given,
    )
    trainer.train()
    if trainer.state.max_steps == 2:
        trainer.evaluate()
    log = [
        {name: value for name, value in entry.items() if not any(time in name for time in _TIMES)}
        for entry in trainer.state.log_history
    ]
    return log, {name: p.detach() for name, p in trainer.accelerator.unwrap_model(trainer.model).named_parameters()}


# By number of processes: the trainer, the model, the ranks of a sequence.
CASES = [
    (2, [("dpo", "mistral", 2)]),
    (2, [("kto", "llama", 2), ("rloo", "llama", 2), ("reward", "llama", 2), ("grpo", "mistral", 2)]),
    (2, [("rloo shared", "llama", 2), ("dpo shared", "mistral", 2), ("reward shared", "llama", 1)]),
    (4, [("dpo lora", "gemma3", 2), ("grpo", "qwen3_5", 2), ("grpo shared", "qwen3_moe", 2)]),
]


@on_ranks
def logs(group: ProcessGroup, port: int, cases: list[tuple[str, str, int]], folder: str) -> list[list[Log]]:
    """The logs of each case without and with sequence parallelism."""
    world = start(port, f"{cases}", group.rank(), group.size(), timeout_s=60.0)
    found: list[list[Log]] = []
    for kind, model_kind, cp_size in cases:
        found.append([])
        for config in (None, seqpar.hf.ParallelismConfig(cp_size, share_prompts="shared" in kind)):
            with torchrun(world):
                found[-1].append(log_of(kind, model_kind, folder, config))
    return found


@pytest.mark.thorough(cases=[cases for _, cases in CASES[1:]])
@pytest.mark.parametrize(("world", "cases"), CASES)
def test_trainers(own: OwnPool, tmp_path: Path, world: int, cases: list[tuple[str, str, int]]) -> None:
    for kind in ("llama", "mistral", "qwen3_5", "qwen3_moe"):
        tiny(kind).save_pretrained(tmp_path / kind)
    cases = [case for case in cases if FUSED or case[0] not in ("grpo shared", "rloo shared")]
    by_rank = own.pool.run(world, logs, own.port, cases, str(tmp_path))
    for found in by_rank:
        for (kind, model_kind, _), (plain, ours) in zip(cases, found, strict=True):
            assert len(plain) == len(ours) > 3 and "loss" in plain[0], kind
            for expected, entry in zip(plain, ours, strict=True):
                assert entry.keys() == expected.keys()
                rounding = rounding_of_steps(model_kind, 1e-3, len(plain))
                check_values([*entry.values()], [expected[name] for name in entry], rounding, kind)


# Three steps of which each has eight completions, of all ranks together.
_STEPS = {"max_steps": 3, "gradient_accumulation_steps": 1, "num_iterations": 1, "top_entropy_quantile": 1.0}


@on_ranks
def together(group: ProcessGroup, port: int, folder: str) -> Log:
    world = start(port, f"together on {group.size()}", group.rank(), group.size(), timeout_s=60.0)
    with torchrun(world):
        config = seqpar.hf.ParallelismConfig(-1)
        return log_of("grpo", "mistral", folder, config, per_device_train_batch_size=8 // world.size(), **_STEPS)


@pytest.mark.thorough
def test_grpo_on_four_ranks(own: OwnPool, tmp_path: Path) -> None:
    """The losses equal the losses of one process without this package, which makes all completions of a step."""
    tiny("mistral").save_pretrained(tmp_path / "mistral")
    with torchrun(None):
        expected = log_of("grpo", "mistral", str(tmp_path), None, per_device_train_batch_size=8, **_STEPS)
    for ours in own.pool.run(4, together, own.port, str(tmp_path)):
        for name in ("loss", "grad_norm", "reward", "kl", "entropy"):
            values = [[entry[name] for entry in log if name in entry] for log in (ours, expected)]
            assert len(values[0]) == 3
            check_values(*values, rounding_of_steps("mistral", 1e-3), name)


Trained = tuple[Log, dict[str, torch.Tensor]]


def trained_alike(kind: str, world: int, folder: str, config: Any) -> Trained:
    """Three steps of eight completions, the same for any number of processes, and the weights after them."""
    import trl

    once = _STEPS if kind == "grpo" else {name: _STEPS[name] for name in ("max_steps", "gradient_accumulation_steps")}
    steps = {**once, "num_generations": 4, "optim": "sgd", "learning_rate": 0.1}
    given = mock.patch.object(
        trl.RLOOTrainer, "_generate_single_turn", lambda self, ids, *args: completions_of(self, ids)
    )
    with given:
        return run_of(kind, "mistral", folder, config, per_device_train_batch_size=8 // world, **steps)


@on_ranks
def with_shared_prompts(group: ProcessGroup, port: int, kinds: list[str], folder: str) -> list[tuple[Trained, int]]:
    world = start(port, f"shared {kinds} on {group.size()}", group.rank(), group.size(), timeout_s=60.0)
    found = []
    with torchrun(world), mock.patch.object(TokenTree, "of", wraps=TokenTree.of) as made:
        for kind in kinds:
            made.reset_mock()
            trained = trained_alike(kind, group.size(), folder, seqpar.hf.ParallelismConfig(-1, share_prompts=True))
            found.append((trained, made.call_count))
    return found


@needs_fused
@pytest.mark.thorough(world=[1, 4])
@pytest.mark.parametrize(("world", "kinds"), [(2, ["grpo", "rloo"]), (1, ["grpo"]), (4, ["rloo"])])
def test_shared_prompts(own: OwnPool, tmp_path: Path, world: int, kinds: list[str]) -> None:
    """Log and weights are those of one process without this package."""
    tiny("mistral").save_pretrained(tmp_path / "mistral")
    with torchrun(None):
        expected = [trained_alike(kind, 1, str(tmp_path), None) for kind in kinds]
    rounding, start = rounding_of_steps("mistral", 1e-3), dict(tiny("mistral").named_parameters())
    for by_kind in own.pool.run(world, with_shared_prompts, own.port, kinds, str(tmp_path)):
        for kind, (plain, theirs), ((log, weights), made) in zip(kinds, expected, by_kind, strict=True):
            assert made >= 3 and len(plain) == len(log) == 4
            for ours, entry in zip(log, plain, strict=True):
                assert ours.keys() == entry.keys()
                check_values([*ours.values()], [entry[name] for name in ours], rounding, kind)
            moved = sum(float((theirs[name] - p).norm() ** 2) for name, p in start.items()) ** 0.5
            apart = sum(float((theirs[name] - p).norm() ** 2) for name, p in weights.items()) ** 0.5
            assert moved > 0.01
            assert_error(apart / moved, rounding, f"{kind} weights")


@on_ranks
def example(group: ProcessGroup, port: int, cp_size: int, folder: str) -> dict[str, list[float]]:
    """The output of the example, run as ``torchrun`` runs it."""
    world = start(port, f"example {cp_size}", group.rank(), group.size(), timeout_s=60.0)
    options = ["--text", str(ROOT / "LICENSE"), "--cp-size", str(cp_size), "--steps", "2", "--output", folder]
    with torchrun(world), mock.patch.object(sys, "argv", ["grpo.py", *options]), redirect_stdout(StringIO()) as printed:
        runpy.run_path(str(ROOT / "examples" / "grpo.py"), run_name="__main__")
    lines = [json.loads(line) for line in printed.getvalue().splitlines() if line.startswith('{"reward"')]
    assert len(lines) == (group.rank() == 0)
    steps: dict[str, list[float]] = lines[0] if lines else {}
    return steps


@needs_fused
@pytest.mark.thorough
def test_example(own: OwnPool, tmp_path: Path) -> None:
    assert len((ROOT / "examples" / "grpo.py").read_text().splitlines()) <= 80
    plain, together = (own.pool.run(2, example, own.port, cp_size, str(tmp_path))[0] for cp_size in (1, 2))
    for name, values in plain.items():  # rounding of the weights changes which tokens are sampled after the first step
        assert len(values) == len(together[name]) == 2 and values[0] > 0
        check_values(together[name][:1], values[:1], rounding_of_steps("llama", 1e-3), name)
