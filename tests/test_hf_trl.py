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
from .pool import OwnPool, on_ranks, start

pytestmark = pytest.mark.slow
Log = list[dict[str, float]]
# What differs between two runs of the same.
_TIMES = ("runtime", "per_second", "step_time", "flos")


@pytest.fixture(scope="module")
def processes() -> Iterator[OwnPool]:
    """The Trainers' processes are all of the default group, whose size the tests change."""
    own = OwnPool(4)
    yield own
    own.pool.close()


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


def log_of(kind: str, model_kind: str, folder: str, config: Any) -> Log:
    """What the trainer logs in three steps of two micro-batches, and in an evaluation."""
    import trl

    arguments: dict[str, Any] = {}

    name = {"dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO", "rloo": "RLOO"}[kind]
    model, given = tiny(model_kind), {}
    if kind == "reward":
        torch.manual_seed(0)
        changed = transformers.AutoConfig.for_model(**{**model.config.to_dict(), "num_labels": 1})
        model = transformers.AutoModelForSequenceClassification.from_config(changed)
    if kind in ("grpo", "rloo"):  # the reference model is loaded from this path too
        model = os.path.join(folder, model_kind)
        arguments |= {"num_generations": 2, "max_completion_length": 12}
        given["reward_funcs"] = reward
    if kind == "grpo":  # samples are trained on twice, so that their old log-probabilities are computed
        given["rollout_func"] = rollout
        arguments |= {"beta": 0.1, "num_iterations": 2, "top_entropy_quantile": 0.8}
    if kind in ("dpo", "kto"):
        given["ref_model"] = tiny(model_kind, seed=1)
    data = dataset(kind)
    trainer = getattr(trl, f"{name}Trainer")(
        model=model,
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
            parallelism_config=config,
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


# By number of processes: the trainer, the model, the ranks of a sequence.
CASES = {
    2: [("grpo", "llama", 2), ("rloo", "llama", 2), ("dpo", "mistral", 2), ("kto", "llama", 2), ("reward", "llama", 2)],
    4: [("grpo", "mistral", 4), ("dpo", "llama", 2)],
}


@on_ranks
def logs(group: ProcessGroup, port: int, cases: list[tuple[str, str, int]], folder: str) -> list[list[Log]]:
    """Of each case: without and with sequence parallelism."""
    world = start(port, f"{len(cases)} cases", group.rank(), group.size(), timeout_s=60.0)
    found = []
    for kind, model_kind, cp_size in cases:
        found.append([])
        for config in (None, seqpar.hf.ParallelismConfig(cp_size)):
            with torchrun(world):
                found[-1].append(log_of(kind, model_kind, folder, config))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_trainers(processes: OwnPool, tmp_path: Path, world: int) -> None:
    for kind in ("llama", "mistral"):
        tiny(kind).save_pretrained(tmp_path / kind)
    by_rank = processes.pool.run(world, logs, processes.port, CASES[world], str(tmp_path), deadline_s=240.0)
    for found in by_rank:
        for (kind, *_), (plain, ours) in zip(CASES[world], found, strict=True):
            assert len(plain) == len(ours) > 4 and "loss" in plain[0], kind
            for expected, entry in zip(plain, ours, strict=True):
                assert entry == pytest.approx(expected, abs=1e-4, rel=1e-4, nan_ok=True), kind
