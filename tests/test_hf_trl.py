"""TRL's preference and RL trainers on sharded sequences have their own losses, rewards and metrics."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

pytest.importorskip("transformers")
pytest.importorskip("trl")

import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState

import seqpar.hf

from .hf_workers import VOCAB, tiny
from .pool import Pool, on_ranks

pytestmark = pytest.mark.slow
Log = list[dict[str, float]]
# What differs between two runs of the same.
_TIMES = ("runtime", "per_second", "step_time", "flos")


@contextmanager
def torchrun(group: ProcessGroup) -> Iterator[None]:
    """The environment of ``torchrun``, and accelerate as in a new process."""
    before = dict(os.environ)
    rank, world = str(group.rank()), str(group.size())
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, ACCELERATE_USE_CPU="true", **address)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


@cache
def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t3"))
    words.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2")


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


def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Completions that depend on the prompt, the step and the rank, so that nothing is sampled."""
    encoded = [tokenizer()(prompt)["input_ids"] for prompt in prompts]
    completions = []
    for i, ids in enumerate(encoded):
        g = random.Random(f"{ids} {i} {trainer.state.global_step} {trainer.accelerator.process_index}")
        completions.append([g.randrange(3, VOCAB) for _ in range(g.randrange(4, 13))] + [2])
    return {
        "prompt_ids": encoded,
        "completion_ids": completions,
        "logprobs": [[0.0] * len(ids) for ids in completions],
    }


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [sum(word in ("t5", "t7", "t11", "t30", "t31", "t32") for word in x.split()) / 4 for x in completions]


def log_of(kind: str, model_kind: str, folder: str, parallel: dict[str, Any] | None, **arguments: Any) -> Log:
    """What the trainer logs in three steps of two micro-batches, and in an evaluation."""
    import trl

    rl = kind in ("grpo", "rloo")
    name = {"dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO", "rloo": "RLOO"}[kind]
    models = [tiny(model_kind, seed=seed) for seed in (0, 1)]
    if kind == "reward":
        config = models[0].config
        config.num_labels = 1
        torch.manual_seed(0)
        models = [transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")]
    if parallel is not None:
        for model in models:
            seqpar.hf.parallelize(model, batches="own", **parallel)
    if rl:
        arguments |= {"num_generations": 2, "max_completion_length": 12, "reward_funcs": reward, "beta": 0.0}
    given = {name: arguments.pop(name) for name in ("reward_funcs",) if name in arguments}
    if kind == "grpo":
        given["rollout_func"] = rollout
    if kind in ("dpo", "kto"):
        given["ref_model"] = models[1]
    data = dataset(kind)
    trainer = getattr(trl, f"{name}Trainer")(
        model=models[0],
        args=getattr(trl, f"{name}Config")(
            output_dir=folder,
            max_steps=3,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=data,
        eval_dataset=data.select(range(12)),
        processing_class=tokenizer(),
        **given,
    )
    trainer.train()
    trainer.evaluate()
    return [
        {name: value for name, value in entry.items() if not any(time in name for time in _TIMES)}
        for entry in trainer.state.log_history
    ]


CASES = {
    2: [("grpo", "llama"), ("rloo", "llama"), ("dpo", "mistral"), ("kto", "llama"), ("reward", "llama")],
    4: [("grpo", "mistral"), ("dpo", "llama")],
}


@on_ranks
def logs(group: ProcessGroup, cases: list[tuple[str, str]], folder: str) -> list[tuple[Log, Log]]:
    """Of each case: without and with sequence parallelism."""
    found = []
    for case in cases:
        pair = []
        for parallel in (None, {"group": group}):
            with torchrun(group):
                pair.append(log_of(*case, folder, parallel))
        found.append((pair[0], pair[1]))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_trainers(tmp_path: Path, world: int) -> None:
    pool = Pool(world, deadline_s=240.0, environment={"TRL_EXPERIMENTAL_SILENCE": "1"})
    try:
        by_rank = pool.run(world, logs, CASES[world], str(tmp_path))
    finally:
        pool.close()
    for found in by_rank:
        for (kind, _), (plain, ours) in zip(CASES[world], found, strict=True):
            assert len(plain) == len(ours) > 4 and "loss" in plain[0], kind
            for expected, entry in zip(plain, ours, strict=True):
                assert entry == pytest.approx(expected, abs=1e-4, rel=1e-4, nan_ok=True), kind
