"""A block of a parallelized model compiles as one graph, and computes one process's output and gradients."""

from __future__ import annotations

import copy
import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from seqpar import sync_gradients
from seqpar.strategies import eager_operators

from ..cases import Batch
from ..pool import on_ranks
from .models import BATCH, MASKED, Case, make
from .test_models import distance, run, verify, weights

pytest.importorskip("diffusers")
from seqpar.diffusers import parallelize

LAYERS = 5  # of each kind; all of them share the graphs


def deeper(model: Any) -> Any:
    """The model with more blocks of each kind."""
    for blocks in model.children():
        if isinstance(blocks, nn.ModuleList):
            while len(blocks) < LAYERS:
                blocks.insert(1, copy.deepcopy(blocks[0]))
    return model


def inputs_of(case: Case, wide: bool) -> dict[str, Any]:
    """Inputs of another resolution if ``wide``."""
    inputs: dict[str, Any] = make(case, 1)[1]
    if wide:
        x = inputs["hidden_states"]
        shape = {"qwen": (BATCH, 28, 6), "flux": x.shape}.get(case.model, (*x.shape[:-2], 8, 14))
        inputs["hidden_states"] = torch.randn(shape, dtype=x.dtype).requires_grad_()
        if "img_shapes" in inputs:
            inputs["img_shapes"] = [[(1, 4, 7)]] * BATCH
    return inputs


@on_ranks
def compiled_errors(
    group: ProcessGroup, case: Case, backend: str, checkpoints: bool, everywhere: bool
) -> dict[str, float]:
    """Errors over calls with other resolutions, texts and masks, of which only the first two may compile something.

    Unless the blocks are compiled ``everywhere``, the other ranks run them eagerly, and so send the same messages.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = 0

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    ragged = case.model in MASKED
    calls = [
        inputs_of(Case(case.model, text=text, image=image, ragged=ragged and text > 5), image > 20)
        for text, image in ((5, 13), (9, 22), (7, 13), (8, 23))
    ]
    model = deeper(make(case, 0)[0])
    expected = [(*run(model, inputs), weights(model)) for inputs in calls]
    if checkpoints:
        model.enable_gradient_checkpointing()
    parallelize(model, group=group, strategy=case.strategy)
    kinds = {type(block) for blocks in model.children() if isinstance(blocks, nn.ModuleList) for block in blocks}
    if everywhere or group.rank() == group.size() - 1:
        if getattr(model, "_repeated_blocks", None):
            model.compile_repeated_blocks(backend=counted, fullgraph=True)
        else:
            for block in model.transformer_blocks:
                block.compile(backend=counted, fullgraph=True)
    numbers, errors = [], {"output": 0.0, "weights": 0.0, "inputs": 0.0}
    for inputs, (out, input_grads, grads) in zip(calls, expected, strict=True):
        found, found_input_grads = run(model, inputs)
        sync_gradients(model, group=group)
        errors["output"] = max(errors["output"], distance({"": found}, {"": out}))
        # Compiled code returns zeros for weights without an effect, such as the last block's for the text.
        zero = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        errors["weights"] = max(errors["weights"], distance({**zero, **weights(model)}, {**zero, **grads}))
        errors["inputs"] = max(errors["inputs"], distance(found_input_grads, input_grads))
        numbers.append(graphs)
    assert not torch._dynamo.utils.counters["graph_break"]
    # The inputs of the first block may be without gradients, or laid out in another way, or the first row of a batch.
    assert numbers[0] <= 2 * len(kinds) and numbers[1] <= 2 * numbers[0] + 1, (case, numbers)
    assert numbers[1:] == numbers[1:2] * 3, (case, numbers)
    gc.collect()
    assert not eager_operators._graphs  # what forward has kept for backward is gone
    return errors


def check(batch: Batch, world: int, models: tuple[str, ...], *options: Any) -> None:
    strategies = ["ulysses", "ring"]
    cases = [Case(model, strategies[i % 2]) for i, model in enumerate(models)]
    batch.check(world, compiled_errors, cases, partial(verify, casts=True), *options)


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "models", "backend", "checkpoints", "everywhere"),
    [
        (2, ("wan",), "eager", True, False),
        (1, ("flux", "sd35", "qwen"), "aot_eager", False, True),
        (2, ("flux", "sd35", "qwen"), "aot_eager", False, False),
        (3, ("flux", "sd35", "qwen"), "eager", True, True),
        (4, ("wan", "sd3"), "aot_eager", False, True),
    ],
)
def test_a_block_is_one_graph(
    batch: Batch, world: int, models: tuple[str, ...], backend: str, checkpoints: bool, everywhere: bool
) -> None:
    check(batch, world, models, backend, checkpoints, everywhere)
