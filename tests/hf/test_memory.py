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
from ..reference import assert_close

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
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MAMBA: dict[str, Any] = {
    "num_mem_blocks": 2,
    "n_mamba_heads": 4,
    "mamba_headdim": 16,
    "mamba_ngroups": 1,
    "chunk_size": 8,
}
ALL = Memory(tiled_mlp=5, head_groups=2, checkpoint="attention", offload=True)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, output_router_logits=True)
        return transformers.Qwen3MoeForCausalLM(config)
    if name == "gpt_oss":  # sinks, biases, and an MLP that returns two tensors
        config = transformers.GptOssConfig(**SIZES, num_local_experts=4, sliding_window=8)
        return transformers.GptOssForCausalLM(config)
    if name == "albert":  # the layers are one module
        config = transformers.AlbertConfig(**SIZES, embedding_size=16, **NO_DROPOUT)
        return transformers.AlbertForMaskedLM(config)
    if name == "zamba2":  # two blocks of attention and MLP, each in two layers
        blocks = ["linear_attention", "hybrid"] * 4
        config = transformers.Zamba2Config(**{**SIZES, "num_hidden_layers": 8}, layers_block_type=blocks, **MAMBA)
        return transformers.Zamba2ForCausalLM(config)
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
        assert_close(b, a)
    seqpar.hf.restore(model)
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.thorough(name=["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("name", ["qwen3", "lora", "qwen3_moe", "gpt_oss"])
def test_parallelize(pool: Pool, name: str) -> None:
    pool.run(2, compare, name, ALL)


@pytest.mark.parametrize("name", ["albert", "zamba2"])
def test_layers_that_share_modules(pool: Pool, name: str) -> None:
    pool.run(2, compare, name, Memory(tiled_mlp=5, checkpoint="attention"))


class Shared(nn.Module):
    """Layers that are one module, an MLP that is in two layers, and a model that has two names."""

    def __init__(self) -> None:
        super().__init__()
        model: Any = model_of("qwen3")
        self.model, layers = model, model.model.layers
        layers.extend([copy.deepcopy(layers[1]), layers[0]])
        layers[2].mlp = layers[1].mlp
        self.policy = nn.ModuleList([model])

    def forward(self, **batch: Any) -> Any:
        return self.policy[0](**batch, use_cache=False)


def test_what_is_shared_is_replaced_once() -> None:
    torch.manual_seed(1)
    plain, ids = Shared(), torch.randint(0, 64, (2, 21))
    model = copy.deepcopy(plain)
    expected = loss_and_gradients(plain, {"input_ids": ids, "labels": ids})
    seqpar.hf.parallelize(model, memory=ALL)
    for each in (model, copy.deepcopy(model)):
        each.zero_grad()
        for a, b in zip(expected, loss_and_gradients(each, {"input_ids": ids, "labels": ids}), strict=True):
            assert_close(b, a)
    seqpar.hf.restore(model)
    assert not any("forward" in vars(m) or m._forward_pre_hooks for m in model.modules())


def test_modules_with_other_names() -> None:
    """The error of ``parallelize`` leads to a call that works, before or after ``parallelize``."""
    torch.manual_seed(0)
    plain: Any = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **NO_DROPOUT))
    ids, memory = torch.randint(0, 64, (2, 21)), Memory(tiled_mlp=5)
    model = copy.deepcopy(plain)
    words = r"mlps: BertLayer has no child named mlp, .*, but attention, intermediate, output; .*apply\(model, mlps=\["
    with pytest.raises(ValueError, match=words):
        seqpar.hf.parallelize(model, memory=memory)
    assert not any(name.startswith("_seqpar") or name == "forward" for m in model.modules() for name in vars(m))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    expected = loss_and_gradients(plain, {"input_ids": ids, "labels": ids})
    for first in ("memory", "parallelize"):
        model.zero_grad()
        for step in ("memory", "parallelize") if first == "memory" else ("parallelize", "memory"):
            if step == "memory":
                memory.apply(model, mlps=[layer.intermediate for layer in model.bert.encoder.layer])
            else:
                seqpar.hf.parallelize(model)
        for a, b in zip(expected, loss_and_gradients(model, {"input_ids": ids, "labels": ids}), strict=True):
            assert_close(b, a)
        seqpar.memory.restore(seqpar.hf.restore(model))
        assert not any("forward" in vars(m) for m in model.modules())


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
