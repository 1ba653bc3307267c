"""PyTorch's default dtype changes neither the loss nor the gradients of a parallelized model in float32."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from torch.distributed import ProcessGroup

import seqpar
import seqpar.hf
from seqpar.hf.losses.loss import _router_sums

from ..core.test_device_context import default
from ..pool import Pool, on_ranks
from .families import make_batch, tiny
from .test_mixers import Case, check_errors, gradients, one_process_of

# Routers, the delta rule, Mamba-2, an indexer.
MODELS = ("qwen3_5_moe", "nemotron_h", "deepseek_v32")


@on_ranks
def errors(
    group: ProcessGroup, case: Case, dtype: torch.dtype, expected: tuple[float, torch.Tensor]
) -> tuple[float, float]:
    model = tiny(case.family)
    with default(dtype):
        seqpar.hf.parallelize(model, group=group, strategy=case.strategy, layout=case.layout)
        loss = model(**make_batch(case.batch, True, model), output_router_logits=True).loss
        loss.backward()
        seqpar.sync_gradients(model, group=group)
    found = gradients(model)
    return abs(loss.item() - expected[0]) / expected[0], float((found - expected[1]).norm() / expected[1].norm())


def one_process_under(case: Case, dtype: torch.dtype) -> tuple[float, torch.Tensor]:
    model = tiny(case.family)
    with default(dtype):
        loss = model(**make_batch(case.batch, True, model), output_router_logits=True, use_cache=False).loss
        loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_a_step(pool: Pool, name: str, dtype: torch.dtype) -> None:
    case = Case(name, "left")
    for found in pool.run(2, errors, case, dtype, one_process_under(case, dtype)):
        check_errors(*found, one_process_of(name, "left").rounding)


def test_the_tokens_of_each_expert_are_counted_in_float32() -> None:
    gates = (torch.randn(5000, 4).to(torch.bfloat16),)
    with default(torch.bfloat16):
        counts, probability, tokens = _router_sums(gates, 4, 2, None)
    assert int(counts.sum()) == 10_000 and int(tokens) == 5000
    assert counts.dtype == probability.dtype == tokens.dtype == torch.float32
