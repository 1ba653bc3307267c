"""Tiny transformers models and batches, and the functions that the Hugging Face tests run on the ranks."""

from __future__ import annotations

import gc
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import seqpar
import seqpar.hf
from seqpar.layout import Layout

from ..pool import on_ranks
from ..strategy_cases import STRATEGIES

VOCAB = 62
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ALTERNATE = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}


def _config(kind: str) -> Any:
    t = transformers
    if kind == "llama":
        return t.LlamaConfig(**_SMALL)
    if kind == "qwen3":
        return t.Qwen3Config(**_SMALL)
    if kind == "mistral":
        return t.MistralConfig(**_SMALL, sliding_window=9)
    if kind == "gemma2":
        return t.Gemma2Config(**_SMALL, **_ALTERNATE, attn_logit_softcapping=3.0, final_logit_softcapping=2.0)
    if kind == "gemma3":
        return t.Gemma3TextConfig(**_SMALL, **_ALTERNATE)
    if kind == "gpt_oss":
        return t.GptOssConfig(**_SMALL, **_ALTERNATE, num_local_experts=4, num_experts_per_tok=2)
    if kind == "qwen3_moe":
        return t.Qwen3MoeConfig(
            **_SMALL,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            output_router_logits=True,
            router_aux_loss_coef=0.1,
        )
    if kind == "modernbert":
        small = {k: v for k, v in _SMALL.items() if k not in ("num_key_value_heads", "head_dim")}
        return t.ModernBertConfig(
            **small, local_attention=8, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2
        )
    if kind == "llama4":  # the first layer attends in chunks of 7 tokens
        return t.Llama4TextConfig(
            **_SMALL,
            intermediate_size_mlp=48,
            num_local_experts=2,
            attention_chunk_size=7,
            layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 0],
        )
    if kind == "deepseek_v3":  # 8 latent and 4 rotated channels, instead of 4 heads with 10 channels of k and 5 of v
        small = {k: v for k, v in _SMALL.items() if k not in ("num_key_value_heads", "head_dim")}
        return t.DeepseekV3Config(
            **small,
            num_key_value_heads=4,
            q_lora_rank=12,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=6,
            v_head_dim=5,
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            n_shared_experts=1,
            first_k_dense_replace=1,
        )
    if kind == "gpt2":
        return t.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
    if kind in ("bert", "bert_tokens"):
        small = {k: v for k, v in _SMALL.items() if k not in ("num_key_value_heads", "head_dim")}
        return t.BertConfig(**small, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=VOCAB)
    raise ValueError(kind)


MODELS = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3_moe", "modernbert")
IN_PLACE = ("modernbert", "bert", "bert_tokens")  # models that predict each token itself: their labels are not shifted
# Arguments of ``parallelize`` by name: strategies that differ in what they send, and every layout.
PARALLELIZE: dict[str, dict[str, Any]] = {
    "ring-zigzag": {**STRATEGIES["ring"], "layout": "zigzag"},
    "ulysses-contiguous": {**STRATEGIES["ulysses"], "layout": "contiguous"},
    "hybrid-zigzag": {**STRATEGIES["hybrid"], "ulysses_size": 2, "layout": "zigzag"},
    "all_gather-striped": {**STRATEGIES["all_gather"], "layout": "striped"},
}
AUTO: dict[str, Any] = {"strategy": "auto", "layout": "zigzag"}


@cache
def freeze_imports(kind: str) -> None:
    """Exclude the objects made by imports from garbage collection, once for each kind of model.

    The first forward of each parallelized model searches all objects for wrappers. With the objects made by imports,
    this search would take most of a test's time.
    """
    gc.collect()
    gc.freeze()


def tiny(kind: str, attention: str = "eager", seed: int = 0, auto: Any = None, **changes: Any) -> Any:
    """A model with random weights, which are larger than usual so that no parameter has a gradient near zero.

    Args:
        kind: the architecture.
        attention: the attention implementation.
        seed: the seed of the weights.
        auto: the Auto class that makes the model; by default the one for a language model.
        changes: attributes of the config to set.
    """
    config = _config(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    auto_model: Any = auto or transformers.AutoModelForCausalLM
    if auto is None and kind in IN_PLACE:
        tokens = kind == "bert_tokens"
        auto_model = transformers.AutoModelForTokenClassification if tokens else transformers.AutoModelForMaskedLM
    model = auto_model.from_config(config, attn_implementation=attention)
    freeze_imports(kind)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0, 0.25)
            elif "sinks" in name:
                p.normal_(0, 1)
            elif name.endswith("key.bias"):
                p.requires_grad_(False)  # it adds the same number to all scores of a query: its gradient is 0
    return model.train()


def make_batch(how: str, length: int = 45, rows: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """A full batch in which some labels are -100.

    Args:
        how: "packed" for one row of several documents, "left" or "right" for padding there, otherwise plain.
        length: the number of tokens of a row.
        rows: the number of rows.
        seed: the seed of the tokens.
    """
    g = torch.Generator().manual_seed(seed)
    rows = 1 if how == "packed" else rows
    ids = torch.randint(3, VOCAB, (rows, length), generator=g)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -100)
    batch = {"input_ids": ids, "labels": labels}
    if how == "packed":
        boundaries = [0, 11, 12, 31, length]
        batch["position_ids"] = torch.cat([torch.arange(b - a) for a, b in pairwise(boundaries)])[None]
        labels[:, boundaries[:-1]] = -100
    if how in ("left", "right"):
        mask = torch.ones_like(ids)
        for row in range(rows):
            pad = 5 + 9 * row
            where = slice(0, pad + 1) if how == "left" else slice(length - pad, length)
            labels[row, where] = -100
            mask[row, slice(0, pad) if how == "left" else where] = 0
        batch["attention_mask"] = mask
        batch["input_ids"] = ids * mask
    return batch


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters' gradients by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest error of all gradients, relative to the largest value of the same gradient."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    largest = max(float(g.abs().max()) for g in theirs.values())
    return max(
        float((ours[name] - g).abs().max() / max(float(g.abs().max()), 1e-5 * largest)) for name, g in theirs.items()
    )


def one_device(kind: str, batch: dict[str, Any], attention: str = "eager") -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of the model on one device, without ``parallelize``, on the full batch.

    transformers detects packed documents only with ``use_cache=False``, and never in gpt-oss and in bidirectional
    models. These models compute the documents one after another here.
    """
    model = tiny(kind, attention)
    shift = int(kind not in IN_PLACE)
    total = torch.zeros(())
    if "position_ids" in batch and kind in ("gpt_oss", "gpt2", *IN_PLACE):
        starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["input_ids"].shape[1]]
        items = int((batch["labels"][:, shift:] != -100).sum())
        for a, b in pairwise(starts):
            alone = {name: batch[name][:, a:b] for name in ("input_ids", "labels")}
            logits = model(input_ids=alone["input_ids"]).logits[0]
            labels = F.pad(alone["labels"][0], (0, 1), value=-100)[1:] if shift else alone["labels"][0]
            total = total + F.cross_entropy(logits.float(), labels, reduction="sum") / items
    else:
        total = model(**batch, **({} if kind in IN_PLACE else {"use_cache": False})).loss
    total.backward()
    return total.item(), gradients(model)


@cache
def one_device_of(kind: str, how: str) -> tuple[float, dict[str, Tensor]]:
    """``one_device`` of ``make_batch(how)``, computed once in each process."""
    return one_device(kind, make_batch(how))


def compare(group: ProcessGroup, kind: str, strategy: str, how: str, **options: Any) -> tuple[float, float]:
    """The errors of the loss and of the gradients relative to one device."""
    batch = make_batch(how)
    expected, grads = one_device_of(kind, how)
    arguments = AUTO if strategy == "auto" else PARALLELIZE[strategy]
    model = seqpar.hf.parallelize(tiny(kind), group=group, **arguments, **options)
    local = seqpar.hf.shard_batch(batch, group=group, layout=arguments["layout"])
    loss = model(**local).loss
    loss.backward()
    seqpar.sync_gradients(model, group=group)
    return abs(loss.item() - expected), worst(gradients(model), grads)


@on_ranks
def table(group: ProcessGroup, cases: list[tuple[str, str, str]]) -> list[tuple[float, float]]:
    """The results of ``compare`` for many cases."""
    return [compare(group, *case) for case in cases]


def generate(group: ProcessGroup, kind: str, layout: Layout, prompt: dict[str, Tensor], **options: Any) -> Tensor:
    """The tokens that a parallelized model generates greedily."""
    model = tiny(kind).eval()
    seqpar.hf.parallelize(model, group=group, layout=layout)
    return model.generate(**prompt, do_sample=False, **options)
