"""``memory=`` of ``parallelize`` and ``ParallelismConfig``: the model's loss and gradients stay the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

pytest.importorskip("transformers")

import transformers
from peft import LoraConfig, get_peft_model

import seqpar.hf
from seqpar import Memory

from ..pool import Pool, on_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2}
ALL = Memory(tiled_mlp=5, head_groups=2, checkpoint="attention", offload=True)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, output_router_logits=True)
        return transformers.Qwen3MoeForCausalLM(config)
    if name == "gpt_oss":  # sinks, biases, and an MLP that returns two tensors
        config = transformers.GptOssConfig(**SIZES, num_local_experts=4, sliding_window=8)
        return transformers.GptOssForCausalLM(config)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
    if name == "lora":
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
        for p in model.parameters():
            if p.requires_grad:
                torch.nn.init.normal_(p, std=0.1)
    return model


def loss_and_gradients(model: nn.Module, batch: dict[str, Tensor], group: ProcessGroup | None = None) -> list[Tensor]:
    loss = model(**batch).loss
    loss.backward()
    if group is not None:
        seqpar.sync_gradients(model, group=group)
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@on_ranks
def compare(group: ProcessGroup, name: str, memory: Memory) -> None:
    plain = model_of(name).train()
    model = copy.deepcopy(plain)
    seqpar.hf.parallelize(model, group=group, memory=memory)
    ids = torch.randint(0, 64, (2, 21))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][1, 17:] = 0
    batch["labels"] = ids.masked_fill(batch["attention_mask"] == 0, -100)
    expected, actual = loss_and_gradients(plain, batch), loss_and_gradients(model, batch, group)
    for a, b in zip(expected, actual, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    seqpar.hf.restore(model)
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("name", ["qwen3", "lora", "qwen3_moe", "gpt_oss"])
def test_parallelize(pool: Pool, name: str) -> None:
    pool.run(2, compare, name, ALL)


def test_gradient_checkpointing_is_not_done_twice() -> None:
    model = model_of("qwen3").train()
    seqpar.memory.Memory(checkpoint="full").apply(model)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    with pytest.raises(ValueError, match="memory: Qwen3DecoderLayer has gradient checkpointing switched on"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))


def test_parallelism_config() -> None:
    config = seqpar.hf.ParallelismConfig(memory=ALL)
    assert "tiled_mlp=5" in config.to_json()["memory"]
    with pytest.raises(TypeError, match=r"memory='full': expected a seqpar\.Memory"):
        seqpar.hf.ParallelismConfig(memory="full")
