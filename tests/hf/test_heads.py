"""Output embeddings of every kind compute the loss for a few tokens at a time: sharded ones, LoRA's, and others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")

import seqpar
import seqpar.hf
from seqpar.hf.losses.logits import MissingLogits

from ..pool import Pool, on_ranks
from .test_compose import all_ranks, shard_fully
from .test_loss import some_loss
from .workers import VOCAB, Result, Rows, check_gradients, check_loss, gradients, make_batch, tiny

pytestmark = pytest.mark.slow
CHUNK = 5


class Scaled(nn.Linear):
    """A class of its own, as quantized layers are."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def with_lora(model: Any, target: str = "all-linear", saved: bool = False) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(7)
    targets = ["q_proj"] if saved else ["q_proj", "lm_head"]
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, modules_to_save=["lm_head"] if saved else []
    )
    return peft.get_peft_model(model, config).double()


def scaled(model: Any) -> Any:
    head = Scaled(32, VOCAB, bias=False).double()
    head.load_state_dict(model.lm_head.state_dict())
    model.lm_head = head
    return model


Change = Callable[[Any], Any]
PLAIN: dict[str, Change] = {
    "linear": lambda model: model,
    "lora": with_lora,
    "saved": partial(with_lora, saved=True),
    "class": scaled,
}


def fully(model: Any, *units: str, **options: Any) -> Any:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    modules = [inner.get_submodule(name) for name in units]
    if modules:
        fully_shard(modules if len(modules) > 1 else modules[0], mesh=all_ranks(), **options)
    shard_fully(inner)
    return model


def in_fsdp1(model: Any) -> Any:
    model.lm_head = FullyShardedDataParallel(model.lm_head, use_orig_params=True, device_id=torch.device("cpu"))
    return model


def in_ddp(model: Any) -> Any:
    model.lm_head = DistributedDataParallel(model.lm_head)
    return model


WRAPPERS: dict[str, Change] = {
    "none": lambda model: model,
    "root": fully,
    "head": lambda model: fully(model, "lm_head"),
    "norm and head": lambda model: fully(model, "model.norm", "lm_head"),
    "low precision of outputs": lambda model: fully(
        model, "lm_head", mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16)
    ),
    "fsdp1": in_fsdp1,
    "ddp": in_ddp,
}


def made(head: str) -> Any:
    return PLAIN[head](tiny("gemma2", tie_word_embeddings=False).double()).train()


@cache
def one_device(head: str) -> tuple[Result, Result]:
    """A loss and its gradients, and a function of the log-probabilities and its gradients."""
    results = []
    batch = make_batch("plain")
    for by_token in (False, True):
        model = made(head)
        if by_token:
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].log_softmax(-1)
            labels = batch["labels"][:, 1:]
            found = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(labels == -100, 0)
            loss = some_loss(found)
        else:
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        results.append(Result(loss.item(), gradients(model)))
    return results[0], results[1]


@on_ranks
def check_head(group: ProcessGroup, head: str, wrapper: str, first: bool, expected: tuple[Result, Result]) -> None:
    """``first``: ``parallelize`` is called before the head is changed and wrapped."""
    batch = make_batch("plain")
    if first:
        model = seqpar.hf.parallelize(tiny("gemma2", tie_word_embeddings=False).double(), group=group, loss_chunk=CHUNK)
        model = WRAPPERS[wrapper](PLAIN[head](model).train())
    else:
        model = seqpar.hf.parallelize(WRAPPERS[wrapper](made(head)), group=group, loss_chunk=CHUNK)
    for by_token, one in enumerate(expected):
        model.zero_grad()
        with Rows() as rows:
            if by_token:
                loss = some_loss(seqpar.hf.token_log_probs(model, batch))
            else:
                output = model(**batch)
                loss = output.loss
                assert isinstance(output.logits, MissingLogits)
            loss.backward()
        assert rows.most == CHUNK, rows.most
        check_loss(loss.item(), one.loss)
        if wrapper in ("none", "ddp"):
            seqpar.sync_gradients(model, group=group)
        if wrapper != "fsdp1":  # which gives no access to the gradients; see ``test_compose.test_fsdp1``
            check_gradients(gradients(model), one)


CASES = [
    *(("linear", wrapper, True) for wrapper in WRAPPERS),
    *(("linear", wrapper, False) for wrapper in ("root", "head", "norm and head")),
    *((head, wrapper, head == "saved") for head in ("lora", "saved", "class") for wrapper in ("none", "root", "head")),
    ("lora", "none", True),
    ("saved", "none", False),
]


@pytest.mark.thorough(first=[False])
@pytest.mark.thorough(head=["saved", "class"])
@pytest.mark.thorough(wrapper=["root"])
@pytest.mark.thorough(head=["lora"], wrapper=["head"])
@pytest.mark.thorough(head=["linear"], wrapper=["norm and head", "low precision of outputs", "fsdp1"])
@pytest.mark.parametrize(("head", "wrapper", "first"), CASES)
def test_loss_in_chunks(two: Pool, head: str, wrapper: str, first: bool) -> None:
    two.run(2, check_head, head, wrapper, first, one_device(head))


@on_ranks
def hooked(group: ProcessGroup) -> None:
    model = seqpar.hf.parallelize(tiny("llama"), group=group, loss_chunk=CHUNK)
    seen = []
    model.lm_head.register_forward_hook(lambda head, args, output: seen.append(output.shape))
    output = model(**make_batch("plain"))
    assert isinstance(output.logits, MissingLogits)
    assert seen == [(2, seqpar.Sharding(45, "zigzag", group=group).lengths[group.rank()], VOCAB)]
    full = seqpar.hf.parallelize(seqpar.hf.restore(model), group=group, outputs="full")
    assert full(**make_batch("plain")).logits.shape == (2, 45, VOCAB)


def test_logits_that_only_a_hook_needs_are_not_all_gathered(two: Pool) -> None:
    two.run(2, hooked)


def test_a_forward_of_the_class_of_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 1.5 * F.linear(x, self.weight, self.bias))
    loss = model(**make_batch("plain"), use_cache=False).loss
    ours = seqpar.hf.parallelize(model, strategy="local", loss_chunk=CHUNK)(**make_batch("plain")).loss
    check_loss(ours.item(), loss.item())
