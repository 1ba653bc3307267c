"""softmax_scale, alibi_slopes and deterministic of ``parallelize``: loss, gradients and tokens are one device's."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

pytest.importorskip("transformers")

import seqpar
import seqpar.hf
from seqpar.kernels.cpu import CpuBackend
from seqpar.memory import Memory

from ..pool import Pool, on_ranks
from .workers import PARALLELIZE, Result, check_step, make_batch, parallel, tiny, trained

pytestmark = pytest.mark.slow
SLOPES = [0.5, 0.02, 0.3, 1.0]
KINDS = {"llama": "packed", "gpt_oss": "plain", "deepseek_v3": "left"}  # a batch for each


@contextmanager
def with_slopes(kind: str) -> Iterator[None]:
    """In the block, transformers' eager attention of ``kind`` subtracts ``SLOPES`` times the distance."""
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    original = module.eager_attention_forward

    def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        keys = torch.arange(k.shape[2])
        distance = (keys[-q.shape[2] :, None] - keys).abs()
        bias = -torch.tensor(SLOPES)[:, None, None] * distance  # [h, q, k]
        return original(layer, q, k, v, mask + bias, *args, **kwargs)

    with mock.patch.object(module, "eager_attention_forward", attend):
        yield


def without_scaling(model: Any) -> Any:
    """``model``, whose layers pass no scaling to the attention function."""
    for layer in model.model.layers:
        layer.self_attn.scaling = None
    return model


@on_ranks
def trained_with_slopes(group: ProcessGroup, expected: dict[str, Result], arguments: dict[str, Any]) -> None:
    for kind, result in expected.items():
        model = parallel(group, kind, alibi_slopes=torch.tensor(SLOPES), deterministic=True, **arguments)
        check_step(group, model, make_batch(KINDS[kind]), result, kind)
        assert seqpar.hf.verify(model, make_batch(KINDS[kind])).layers == 2


@pytest.mark.thorough(world=[3, 4])
@pytest.mark.parametrize(
    ("world", "name"), [(1, "ring-zigzag"), (2, "ring-zigzag"), (3, "ulysses-contiguous"), (4, "all_gather-striped")]
)
def test_training_with_slopes(pool: Pool, world: int, name: str) -> None:
    expected = {}
    for kind, how in KINDS.items():
        with with_slopes(kind):
            expected[kind] = trained(tiny(kind), make_batch(how), use_cache=False)
    pool.run(world, trained_with_slopes, expected, PARALLELIZE[name])


@on_ranks
def compiled_with_slopes(group: ProcessGroup, expected: Result) -> None:
    torch._dynamo.reset()
    model = parallel(group, alibi_slopes=SLOPES)
    for layer in model.model.layers if group.rank() == 1 else []:  # rank 0 sends the same in eager code
        layer.compile(backend="aot_eager", fullgraph=True)
    check_step(group, model, make_batch("plain"), expected)


@pytest.mark.thorough
def test_compiled_layers_with_slopes(pool: Pool) -> None:
    with with_slopes("llama"):
        expected = trained(tiny("llama"), make_batch("plain"))
    pool.run(2, compiled_with_slopes, expected)


@on_ranks
def generated_with_slopes(group: ProcessGroup, ids: Tensor) -> Tensor:
    model = parallel(group, alibi_slopes=SLOPES).eval()
    tokens: Tensor = model.generate(ids, do_sample=False, max_new_tokens=10, eos_token_id=None)
    return tokens


def test_generation_with_slopes(pool: Pool) -> None:
    ids = make_batch("plain", 23)["input_ids"]
    with with_slopes("llama"):
        expected = tiny("llama").eval().generate(ids, do_sample=False, max_new_tokens=10, eos_token_id=None)
    for tokens in pool.run(3, generated_with_slopes, ids):
        assert torch.equal(tokens, expected)


def test_deterministic_leaves_out_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "deterministic", False)
    for deterministic, backend in ((False, "cpu"), (True, "reference")):
        with seqpar.trace() as t:
            seqpar.hf.parallelize(tiny("llama"), deterministic=deterministic)(**make_batch("plain"))
        assert set(t.backends) == {backend}


@on_ranks
def trained_with_scale(group: ProcessGroup, expected: Result) -> None:
    own = seqpar.hf.parallelize(tiny("llama"), group=group, softmax_scale=8**-0.5)  # as the model's own
    check_step(group, own, make_batch("plain"), expected)
    model = seqpar.hf.parallelize(without_scaling(tiny("llama")), group=group, softmax_scale=8**-0.5)
    check_step(group, model, make_batch("plain"), expected)
    assert seqpar.hf.verify(model, make_batch("plain")).layers == 2


def test_a_scale_for_layers_that_pass_none(pool: Pool) -> None:
    pool.run(2, trained_with_scale, trained(tiny("llama"), make_batch("plain")))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"softmax_scale": 0.5}, r"softmax_scale=0.5: layer 'model.layers.0.self_attn' itself passes scaling=0.35"),
        ({"softmax_scale": "0.5"}, "softmax_scale='0.5': expected a number"),
        ({"deterministic": 1}, "deterministic=1: expected True, False or 'invariant'"),
        ({"alibi_slopes": torch.zeros(2, 4)}, r"alibi_slopes: shape \(2, 4\), "),
        ({"alibi_slopes": SLOPES[:3]}, "alibi_slopes: 3 slopes, but attention has 4 query heads"),
        ({"alibi_slopes": SLOPES, "memory": Memory(head_groups=2)}, "4 slopes, but .* 2 query heads; .*head_groups"),
        (
            {"alibi_slopes": SLOPES, "batches": "per_rank"},
            "batches='per_rank' each rank generates with the model's own",
        ),
    ],
)
def test_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        seqpar.hf.parallelize(tiny("llama"), **arguments)(**make_batch("plain"))


def test_a_scaling_that_changes_later_is_refused() -> None:
    model = seqpar.hf.parallelize(without_scaling(tiny("llama")), softmax_scale=0.5)
    model.model.layers[1].self_attn.scaling = 0.25
    with pytest.raises(ValueError, match=r"softmax_scale=0.5: layer 1 \(LlamaAttention\) itself passes scaling=0.25"):
        model(**make_batch("plain"))
