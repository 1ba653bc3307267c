"""Tiny transformers models and batches, and the functions that the Hugging Face tests run on the ranks.

The parent process trains a model on one device once, and sends the loss and the gradients to the ranks (``Result``),
which compare their own with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
import seqpar.hf

from ..pool import on_ranks
from ..reference import assert_error, nudge
from ..strategy_cases import STRATEGIES

_MAKES_LOGITS = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten._log_softmax)
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
_WITHOUT_GROUPS = {k: v for k, v in _SMALL.items() if k not in ("num_key_value_heads", "head_dim")}
_ALTERNATE = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# By name: the config's class and arguments.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SMALL),
    "qwen3": ("Qwen3", _SMALL),
    "mistral": ("Mistral", {**_SMALL, "sliding_window": 9}),
    "gemma2": (
        "Gemma2", {**_SMALL, **_ALTERNATE, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
    ),
    "gemma3": ("Gemma3Text", {**_SMALL, **_ALTERNATE}),
    "gpt_oss": ("GptOss", {**_SMALL, **_ALTERNATE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**_SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "output_router_logits": True, "router_aux_loss_coef": 0.1},
    ),
    "modernbert": (
        "ModernBert",
        {**_WITHOUT_GROUPS, "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1,
         "sep_token_id": 2},
    ),
    "llama4": (  # the first layer attends in chunks of 7 tokens
        "Llama4Text",
        {**_SMALL, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 7,
         "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    ),
    "deepseek_v3": (  # 8 latent and 4 rotated channels, instead of 4 heads with 10 channels of k and 5 of v
        "DeepseekV3",
        {**_WITHOUT_GROUPS, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
         "qk_nope_head_dim": 6, "v_head_dim": 5, "moe_intermediate_size": 16, "n_routed_experts": 4,
         "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "gpt2": (
        "GPT2",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
         "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "bert": ("Bert", {**_WITHOUT_GROUPS, **_NO_DROPOUT, "num_labels": VOCAB}),
    "bert_tokens": ("Bert", {**_WITHOUT_GROUPS, **_NO_DROPOUT, "num_labels": VOCAB}),
}  # fmt: skip
# Of models that are not tried like the others, because transformers lets packed documents see one another in them.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": (  # the delta rule in the first layer
        "Qwen3_5Text",
        {**_SMALL, "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
         "linear_value_head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    ),
}  # fmt: skip
# One model for each mechanism: a plain decoder, window and softcap, sinks, latents, a router, an encoder with a window.
MECHANISMS = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe", "modernbert")
IN_PLACE = ("modernbert", "bert", "bert_tokens")  # models that predict each token itself: their labels are not shifted
BATCHES = ("plain", "packed", "left", "right")
# Arguments of ``parallelize`` by name: strategies that differ in what they send, and every layout.
PARALLELIZE: dict[str, dict[str, Any]] = {
    "ring-zigzag": {**STRATEGIES["ring"], "layout": "zigzag"},
    "ulysses-contiguous": {**STRATEGIES["ulysses"], "layout": "contiguous"},
    "hybrid-zigzag": {**STRATEGIES["hybrid"], "ulysses_size": 2, "layout": "zigzag"},
    "all_gather-striped": {**STRATEGIES["all_gather"], "layout": "striped"},
    "auto": {"strategy": "auto", "layout": "zigzag"},
}


class Rows(TorchDispatchMode):
    """Records how many rows of logits the largest tensor of logits has."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _MAKES_LOGITS and result.shape[-1] == VOCAB:
            self.most = max(self.most, result.numel() // VOCAB)
        return result


class Result(NamedTuple):
    """The loss of a training step, and the gradients by the names of the parameters.

    ``rounding`` is the rounding of the gradients on one device: how much they change with the last unit of the weights,
    as ``worst`` measures it.
    """

    loss: float
    gradients: dict[str, Tensor]
    rounding: float = 0.0


def tiny(kind: str, attention: str = "eager", seed: int = 0, auto: Any = None, **changes: Any) -> Any:
    """A model with random weights, which are larger than usual so that no parameter has a gradient near zero.

    Args:
        kind: the architecture.
        attention: the attention implementation.
        seed: the seed of the weights.
        auto: the Auto class that makes the model; by default the one for a language model.
        changes: attributes of the config to set.
    """
    name, arguments = {**CONFIGS, **HYBRIDS}[kind]
    config = getattr(transformers, f"{name}Config")(**arguments)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    auto_model: Any = auto or transformers.AutoModelForCausalLM
    if auto is None and kind in IN_PLACE:
        tokens = kind == "bert_tokens"
        auto_model = transformers.AutoModelForTokenClassification if tokens else transformers.AutoModelForMaskedLM
    model = auto_model.from_config(config, attn_implementation=attention)
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
    """Copies of the parameters' full gradients, by the name that the parameter has without wrappers."""
    return {
        name.replace("module.", "").replace("_orig_mod.", ""): (
            p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        ).clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest error of all gradients, relative to the largest value of the same gradient."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    largest = max(float(g.abs().max()) for g in theirs.values())
    return max(
        float((ours[name] - g).abs().max() / max(float(g.abs().max()), 1e-5 * largest)) for name, g in theirs.items()
    )


def rounded(model: Any, step: Callable[[], float]) -> Result:
    """The result of a step on one device, and its rounding.

    Args:
        model: the model, which has the gradients of the step afterwards.
        step: computes the gradients and returns the loss. It is called a second time with weights that are changed by
            one unit in the last place.
    """
    before = torch.get_rng_state()
    result = Result(step(), gradients(model))
    after, kept = torch.get_rng_state(), [(p, p.detach().clone(), p.grad) for p in model.parameters()]
    torch.set_rng_state(before)
    model.zero_grad()
    nudge(p for p in model.parameters() if p.is_floating_point())
    step()
    again = gradients(model)
    torch.set_rng_state(after)
    for p, weight, grad in kept:
        p.data.copy_(weight)
        p.grad = grad
    return result._replace(rounding=worst(again, result.gradients))


def trained(model: Any, batch: dict[str, Any], **arguments: Any) -> Result:
    """The result of a step on one device, with its rounding."""

    def step() -> float:
        loss = model(**batch, **arguments).loss
        loss.backward()
        return float(loss)

    return rounded(model, step)


def check_loss(ours: float, theirs: float, *what: Any) -> None:
    """Compare a loss with one device's, which is NaN if no label counts."""
    if math.isnan(theirs):
        assert math.isnan(ours), (ours, *what)
        return
    assert_error(abs(ours - theirs), 0.0, " ".join(["loss", *map(str, what)]), size=max(1.0, abs(theirs)))


def check_gradients(ours: dict[str, Tensor], theirs: Result, *what: Any) -> None:
    """Compare gradients with one device's."""
    assert_error(worst(ours, theirs.gradients), theirs.rounding, " ".join(["gradients", *map(str, what)]))


def check(ours: Result, theirs: Result, *what: Any) -> None:
    """Compare a step with one device's. ``what`` describes it if it differs."""
    check_loss(ours.loss, theirs.loss, *what)
    check_gradients(ours.gradients, theirs, *what)


def check_step(
    group: ProcessGroup | None, model: Any, batch: dict[str, Any], expected: Result, *what: Any, mesh: Any = None,
    sync: bool = True,
) -> None:  # fmt: skip
    """Train a parallelized model, or a wrapper around it, for a step, and compare it with one device.

    Without ``sync``, a wrapper sums the gradients.
    """
    loss = model(**batch).loss
    loss.backward()
    if sync:
        seqpar.sync_gradients(model, group=group, mesh=mesh)
    check(Result(loss.item(), gradients(model)), expected, *what)


def one_device(kind: str, batch: dict[str, Any], attention: str = "eager") -> Result:
    """The result of the model on one device, without ``parallelize``, on the full batch.

    transformers detects packed documents only with ``use_cache=False``, and never in gpt-oss and in bidirectional
    models. These models compute the documents one after another here.
    """
    model = tiny(kind, attention)
    if "position_ids" not in batch or kind not in ("gpt_oss", "gpt2", *IN_PLACE):
        return trained(model, batch, **({} if kind in IN_PLACE else {"use_cache": False}))
    shift = int(kind not in IN_PLACE)
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["input_ids"].shape[1]]
    items = int((batch["labels"][:, shift:] != -100).sum())

    def step() -> float:
        total = torch.zeros(())
        for a, b in pairwise(starts):
            logits = model(input_ids=batch["input_ids"][:, a:b]).logits[0]
            labels = batch["labels"][0, a:b]
            labels = F.pad(labels, (0, 1), value=-100)[1:] if shift else labels
            total = total + F.cross_entropy(logits.float(), labels, reduction="sum") / items
        total.backward()
        return float(total)

    return rounded(model, step)


@cache
def one_device_of(kind: str, how: str) -> Result:
    """``one_device`` of ``make_batch(how)``, computed once. Tests call it in the parent process."""
    return one_device(kind, make_batch(how))


def mean_of(kind: str, batches: list[dict[str, Tensor]]) -> tuple[list[float], Result]:
    """The one-device loss of each batch, and the mean loss with its gradients."""
    return weighted_mean_of(kind, batches, [1.0] * len(batches))


def weighted_mean_of(
    kind: str, batches: list[dict[str, Tensor]], weights: Sequence[float]
) -> tuple[list[float], Result]:
    each = [one_device(kind, batch) for batch in batches]
    losses, shares = [x.loss for x in each], [weight / sum(weights) for weight in weights]

    def mean(values: Iterable[Any]) -> Any:
        return sum(share * x for share, x in zip(shares, values, strict=True))

    means = {name: mean(x.gradients[name] for x in each) for name in each[0].gradients}
    return losses, Result(mean(losses), means, max(x.rounding for x in each))


def mean_over_labels(kind: str, batches: list[dict[str, Tensor]]) -> Result:
    """The loss over all labels of the batches, as on one device, with its gradients."""
    counted = [float((batch["labels"][:, int(kind not in IN_PLACE) :] != -100).sum()) for batch in batches]
    return weighted_mean_of(kind, batches, counted)[1]


def rounding_of(kind: str) -> float:
    """The rounding of the gradients of a model on one device (see ``Result``), where a test has another loss."""
    return one_device_of(kind, "plain").rounding


Case = tuple[str, str, str]  # the model, the arguments of ``parallelize`` and the batch


def expected_of(cases: list[Case]) -> list[tuple[Case, Result]]:
    return [(case, one_device_of(case[0], case[2])) for case in cases]


@on_ranks
def check_cases(group: ProcessGroup, cases: list[tuple[Case, Result]], sharded: bool = True) -> None:
    """Compare training steps with one device. The batch is ``sharded`` before the call of the model, or in it.

    Cases in a row that differ in their batch only are steps of the same model.
    """
    before: tuple[str, str] | None = None
    model: Any = None
    for (kind, strategy, how), expected in cases:
        arguments, batch = PARALLELIZE[strategy], make_batch(how)
        if (kind, strategy) != before:
            before, model = (kind, strategy), seqpar.hf.parallelize(tiny(kind), group=group, **arguments)
        model.zero_grad()
        given = {name: x.clone() for name, x in batch.items()}
        if sharded:
            given = seqpar.hf.shard_batch(batch, group=group, layout=arguments["layout"])
        check_step(group, model, given, expected, kind, strategy, how)
        assert sharded or all(torch.equal(given[name], x) for name, x in batch.items())


def parallel(group: ProcessGroup, kind: str = "llama", **options: Any) -> Any:
    return seqpar.hf.parallelize(tiny(kind), group=group, **options)


def shard_function(group: ProcessGroup, **changes: Any) -> Any:
    """A function with which a training loop shards a batch: ``shard_batch``, with changes of its results."""

    def shard(batch: Any) -> dict[str, Any]:
        local = seqpar.hf.shard_batch(batch, group=group)
        for name, change in changes.items():
            local[name] = change(local[name])
        return local

    return shard


def report_on(
    model: Any, batch: Any = "plain", sync: Any = None, shard: Any = None, ignore: Any = None
) -> seqpar.hf.VerificationReport:
    batch = make_batch(batch) if isinstance(batch, str) else batch
    return seqpar.hf.verify(model, batch, False, sync=sync, shard=shard, ignore=ignore)
