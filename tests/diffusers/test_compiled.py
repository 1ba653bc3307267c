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
from torch.utils.checkpoint import checkpoint

from seqpar import sync_gradients
from seqpar.patching.replaced import replaced
from seqpar.strategies import eager_operators

from ..cases import Batch
from ..observe import message_of
from ..pool import on_ranks
from ..reference import assert_close
from .models import BATCH, MASKED, Case, make
from .test_models import distance, run, verify, weights

pytest.importorskip("diffusers")
from seqpar.diffusers import Plan, gather, parallelize, restore
from seqpar.diffusers.plans import PLANS

LAYERS = 4  # of each kind; all of them share the graphs


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
    for i, model in enumerate(models):  # one run each, because compiling takes long and a run has a deadline
        cases = [Case(model, ["ulysses", "ring"][i % 2])]
        batch.check(world, compiled_errors, cases, partial(verify, casts=True), *options)


@pytest.mark.slow
@pytest.mark.thorough(models=[("flux", "sd35", "qwen"), ("wan", "sd3")])
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


def compiled(name: str, plan: Plan | None = None, fullgraph: bool = True) -> tuple[Any, dict[str, Any]]:
    torch._dynamo.reset()
    model, inputs = make(Case(name), 0)
    parallelize(model, plan=plan)
    for blocks in model.children():
        for block in blocks if isinstance(blocks, nn.ModuleList) else ():
            block.compile(backend="eager", fullgraph=fullgraph)
    return model, inputs


def call(model: Any, inputs: dict[str, Any]) -> Tensor:
    out: Tensor = model(**inputs, return_dict=False)[0]
    return out


@pytest.mark.thorough
def test_compiled_blocks_refuse_what_eager_ones_refuse() -> None:
    wan = PLANS["WanTransformer3DModel"]
    model, inputs = compiled("wan", Plan(wan.cuts, {**wan.attention, "blocks.*.attn1": ()}))
    assert "blocks.0.attn1: without encoder_hidden_states" in message_of(lambda: call(model, inputs))
    model, inputs = compiled("wan", Plan(wan.cuts, {"blocks.*.attn1": ("image",)}), fullgraph=False)
    assert "outside of the attention modules of the plan" in message_of(lambda: call(model, inputs))

    class Processor:
        def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return hidden_states

    for fullgraph, message in (
        (False, "blocks.1.attn1: 0 calls of F.scaled_dot_product_attention"),
        (True, "needs_one_sdpa_call"),
    ):
        model, inputs = compiled("wan", fullgraph=fullgraph)
        if not fullgraph:
            call(model, inputs)
        model.blocks[1].attn1.processor = Processor()
        assert message in message_of(lambda: call(model, inputs))  # noqa: B023


@pytest.mark.slow
@pytest.mark.thorough
def test_a_compiled_block_in_a_checkpoint_of_one_s_own_is_refused_in_backward() -> None:
    model, inputs = compiled("flux", fullgraph=False)
    block = model.single_transformer_blocks[1]
    run = block._compiled_call_impl
    block._compiled_call_impl = lambda *args, **kwargs: checkpoint(run, *args, use_reentrant=False, **kwargs)
    out = call(model, inputs)
    message = message_of(lambda: out.sum().backward())
    assert "single_transformer_blocks.1.attn" in message and "enable_gradient_checkpointing" in message


@pytest.mark.slow
@pytest.mark.thorough
def test_compiled_blocks_follow_the_model() -> None:
    """A hook with a graph break, another strategy, no strategy, a copy, and a class whose method is replaced."""
    model, inputs = compiled("sd35", fullgraph=False)
    features: list[Tensor] = []
    layer = model.transformer_blocks[0].attn.to_q
    layer.register_forward_hook(lambda module, args, output: features.append(gather(model, output)))
    expected = call(make(Case("sd35"), 0)[0], inputs)
    assert_close(call(model, inputs), expected)
    assert [x.shape[1] for x in features] == [15]
    model, inputs = compiled("sd35")
    assert_close(call(model, inputs), expected)
    for strategy in ("ulysses", "ring"):
        restore(model)
        assert_close(call(model, inputs), expected)
        assert_close(call(parallelize(model, strategy=strategy), inputs), expected)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.transformer_blocks[1].attn.to_q.weight.mul_(2)
    for block in twin.transformer_blocks:
        block.compile(backend="eager")
    assert not torch.allclose(call(twin, inputs), expected)
    assert_close(call(model, inputs), expected)
    cls = type(model.transformer_blocks[0].attn)
    original = cls.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        return 2 * out if isinstance(out, Tensor) else tuple(2 * x for x in out)

    with replaced(cls, forward=forward):
        doubled = call(make(Case("sd35"), 0)[0], inputs)
        assert_close(call(model, inputs), doubled)
    assert not torch.allclose(doubled, expected)
    assert_close(call(model, inputs), expected)
