"""Parallelized diffusers models compute one process's output, gradients of weights and gradients of inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from seqpar import Mask, sync_gradients

from ..cases import Batch
from ..pool import Pool, on_ranks
from ..reference import assert_error
from .models import FLOAT32, MASKED, MODELS, ONE_STREAM, UNPADDED, Case, available, make, without_casts

diffusers = pytest.importorskip("diffusers")
from seqpar.diffusers import Across, Plan, call, gather, parallelize, patch, restore  # noqa: E402
from seqpar.diffusers.plans import PLANS, plan_of  # noqa: E402


def output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """All numbers of the output."""
    return torch.cat([x.flatten() for x in tree_leaves(model(**inputs, return_dict=False))])


def run(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of a loss of it, by name."""
    model.zero_grad()
    leaves = {str(i): x for i, x in enumerate(tree_leaves(inputs)) if isinstance(x, Tensor) and x.requires_grad}
    for x in leaves.values():
        x.grad = None
    out = output(model, inputs)
    generator = torch.Generator().manual_seed(7)
    (out * torch.randn(out.shape, dtype=out.dtype, generator=generator)).sum().backward()
    return out.detach(), {name: x.grad for name, x in leaves.items() if x.grad is not None}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of all differences over the norm of all expected values."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    norm = sum(float(x.double().square().sum()) for x in expected.values()) ** 0.5
    return sum(float((found[k].double() - x.double()).square().sum()) for k, x in expected.items()) ** 0.5 / norm


@contextmanager
def broken(what: str | None) -> Iterator[None]:
    """Break the package in the block."""
    with pytest.MonkeyPatch.context() as patches:
        if what == "local attention":
            patches.setattr(call, "sdpa", lambda q, k, v, *args, **kwargs: F.scaled_dot_product_attention(q, k, v))
        elif what == "no mask":
            patches.setattr(call.ModelCall, "mask", lambda _, streams, masked: (Mask.full(), streams))
        elif what == "streams in another order":

            def reverse(model: nn.Module) -> Plan:
                plan = plan_of(model)
                joint = {name: s for name, s in plan.attention.items() if not isinstance(s, Across)}
                return replace(plan, attention={**plan.attention, **{name: s[::-1] for name, s in joint.items()}})

            patches.setattr(patch, "plan_of", reverse)
        elif what == "this rank's keys":

            def alone(model: nn.Module) -> Plan:
                plan = plan_of(model)
                attention = {name: () if isinstance(s, Across) else s for name, s in plan.attention.items()}
                return replace(plan, attention=attention)

            patches.setattr(patch, "plan_of", alone)
        yield


@on_ranks
def compare(group: ProcessGroup, case: Case, seed: int, options: dict[str, Any]) -> dict[str, float]:
    with without_casts():
        return errors_of(group, case, seed, options)


def errors_of(group: ProcessGroup, case: Case, seed: int, options: dict[str, Any]) -> dict[str, float]:
    model, inputs = make(case, seed)
    if "reentrant" in options:
        model.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=options["reentrant"]))
    out, input_grads = run(model, inputs)
    grads = weights(model)
    with broken(options.get("broken")):
        parallelize(model, group=group, strategy=case.strategy)
        sharded, sharded_input_grads = run(model, inputs)
    sync_gradients(model, group=group)
    found = {
        "output": distance({"": sharded}, {"": out}),
        "weights": distance(weights(model), grads),
        "inputs": distance(sharded_input_grads, input_grads),
    }
    if options.get("restored", True):
        restore(model)
        again, _ = run(model, inputs)
        assert torch.equal(again, out), "restore"
        assert all(torch.equal(x, grads[name]) for name, x in weights(model).items()), "restore"
    return found


def verify(case: Case, results: list[dict[str, float]], casts: bool = False) -> None:
    dtype = torch.float32 if casts or case.model in FLOAT32 else torch.float64
    for rank, found in enumerate(results):
        for name, error in found.items():
            assert_error(error, 0.0, f"{name} of rank {rank}", dtype=dtype)


def cases(model: str, world: int) -> list[Case]:
    """Each text and both strategies, on 4 ranks a hybrid. Text and strategy are combined in turn with the models."""
    ragged, strategies = model in MASKED, ["ulysses", "ring"]
    if [*MODELS].index(model) % 2:
        strategies.reverse()
    one, other = strategies
    if world == 4:
        return [Case(model, "hybrid", ragged=ragged)]
    if world == 2:
        return [Case(model, one, ragged=ragged), Case(model, other, text=4, ragged=ragged, heads=4)]
    return [Case(model, one, text=1), *([Case(model, other, ragged=True)] if ragged else [])]


def check(batch: Batch, world: int, some: list[Case], **options: Any) -> None:
    batch.check(world, compare, some, verify, int(torch.randint(2**31, ())), options)


QUICK = ("flux", "wan", "hunyuan", "qwen", "z_image")


def test_models_compute_one_process_s_results(batch: Batch) -> None:
    check(batch, 2, [case for model in QUICK for case in cases(model, 2)])


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("world", [2, 3])
def test_every_model_computes_one_process_s_results(batch: Batch, world: int) -> None:
    models = [model for model in MODELS if available(model) and (world == 3 or model not in QUICK)]
    check(batch, world, [case for model in models for case in cases(model, world)], restored=world == 3)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_ring_across_all_to_alls(batch: Batch) -> None:
    check(batch, 4, [case for model in ("flux", "wan", "sd35", "hunyuan15") for case in cases(model, 4)])


@pytest.mark.slow
@pytest.mark.thorough
def test_gradient_checkpointing(batch: Batch) -> None:
    models = (
        "flux2",
        "chroma",
        "wan",
        "hunyuan",
        "z_image_edit",
        "minimax",
        "ltx23",
        "cosmos",
        "qwen",
        "sd35",
        "cogvideox",
        "ltx",
    )
    check(batch, 2, [Case(model, ragged=model in MASKED) for model in models], reentrant=False, restored=False)
    check(batch, 2, [Case(model, ragged=model in MASKED) for model in models[-3:]], reentrant=True)


def test_every_class_has_a_model() -> None:
    assert {MODELS[name](Case(name))[0] for name in MODELS} == {*PLANS}


BREAKS = ("local attention", "this rank's keys", "no mask", "streams in another order")


@pytest.mark.slow
@pytest.mark.thorough(models=[tuple(MODELS)])
@pytest.mark.parametrize("what", BREAKS)
@pytest.mark.parametrize("models", [("flux", "wan", "hunyuan15", "qwen"), tuple(MODELS)], ids=["some", "all"])
def test_a_break_is_noticed(batch: Batch, models: tuple[str, ...], what: str) -> None:
    def differs(case: Case, results: list[dict[str, float]]) -> None:
        assert all(min(found["output"], found["weights"]) > 5e-4 for found in results), results

    # A mask and an order matter if there is padding: ragged text, or fewer text tokens than there are ranks. The joint
    # mask of HunyuanImage, whose two texts have enough tokens, does not fit another order: that is an error.
    ragged = MASKED if what == "no mask" else ("hunyuan15",)
    apart = {"no mask": UNPADDED, "streams in another order": (*UNPADDED, *ONE_STREAM, "hunyuan_image")}
    padded = [Case(m, ragged=m in ragged, text=5 if m in ragged else 1) for m in models if m not in apart.get(what, ())]
    some = padded if what in apart else [Case(model) for model in models]
    some = [Case("ltx2"), Case("ltx23")] if what == "this rank's keys" else some
    some = [case for case in some if available(case.model)]
    batch.check(2, compare, some, differs, 1, {"broken": what, "restored": False})


@on_ranks
def train_wrapped(group: ProcessGroup, case: Case, wrapper: str) -> float:
    model, inputs = make(case, 3)
    frozen = [p for name, p in model.named_parameters() if "norm" in name]
    for p in frozen:
        p.requires_grad_(False)
    run(model, inputs)
    grads = weights(model)
    wrapped = model
    if wrapper == "ddp":
        parallelize(model, group=group)
        wrapped = DistributedDataParallel(model, process_group=group, find_unused_parameters=case.model == "qwen")
    elif wrapper == "fully_shard":
        mesh = DeviceMesh.from_group(group, "cpu")
        for blocks in model.children():
            for block in blocks if isinstance(blocks, nn.ModuleList) else ():
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        parallelize(model, group=group)
    run(wrapped, inputs)
    found = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in weights(model).items()}
    zero = {name: torch.zeros_like(x) for name, x in found.items() if name not in grads}  # that DDP has made
    return distance(found, {**grads, **zero})


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fully_shard"])
def test_wrappers_average_the_gradients(batch: Batch, wrapper: str) -> None:
    def equal(case: Case, results: list[float]) -> None:
        assert_error(max(results), 0.0)

    batch.check(
        2, train_wrapped, [Case(model, ragged=model in MASKED) for model in ("flux", "wan", "qwen")], equal, wrapper
    )


def hook(model: Any) -> Any:
    """What a pipeline with ``enable_model_cpu_offload`` does after each call."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    remove_hook_from_module(model, recurse=True)
    return add_hook_to_module(model, ModelHook())


def wrap_checkpoints(model: Any) -> Any:
    apply_activation_checkpointing(model, check_fn=lambda module: type(module) is type(model.blocks[1]))
    return model


def add_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["to_q"], init_lora_weights=False))


def enable_checkpoints(model: Any) -> Any:
    model.enable_gradient_checkpointing()
    return model


def skip(model: Any, **options: Any) -> Any:
    diffusers.hooks.apply_layer_skip(model, diffusers.LayerSkipConfig([0], **options))
    return model


def register(model: Any) -> Any:
    for module in (model, model.blocks[0].attn1):
        registry = diffusers.hooks.HookRegistry.check_if_exists_or_initialize(module)
        registry.register_hook(diffusers.hooks.ModelHook(), "mine")
    return model


def remove(model: Any) -> Any:
    diffusers.hooks.HookRegistry.check_if_exists_or_initialize(model).remove_hook("mine")
    return model


@dataclass(frozen=True)
class Surroundings:
    """What other packages do with a model ``before`` and ``after`` it is parallelized, and to ``call`` it."""

    model: str = "wan"
    before: Callable[[Any], Any] = lambda model: model
    after: Callable[[Any], Any] = lambda model: model
    call: Callable[[Any], Any] = lambda model: model
    inputs: dict[str, Any] = field(default_factory=dict)


NO_SCORES = partial(skip, skip_attention=False, skip_attention_scores=True, skip_ff=False)
SURROUNDINGS = {
    "the first block is left out": Surroundings("sd35", enable_checkpoints, inputs={"skip_layers": [0]}),
    "a hook leaves the first block out before": Surroundings(before=skip),
    "a hook leaves the first block out after": Surroundings(after=skip),
    "attention without scores before": Surroundings("cogview4", NO_SCORES),
    "attention without scores after": Surroundings("cogview4", after=NO_SCORES),
    "a copy with checkpoints": Surroundings("flux", enable_checkpoints, call=copy.deepcopy),
    "a copy with hooks": Surroundings(before=hook, call=copy.deepcopy),
    "hooks of accelerate before": Surroundings(before=hook, after=hook),
    "hooks of accelerate after": Surroundings(after=lambda model: hook(hook(model))),
    "hooks of diffusers before": Surroundings(before=register, after=remove),
    "checkpoint wrappers before": Surroundings(before=wrap_checkpoints),
    "checkpoint wrappers after": Surroundings(after=wrap_checkpoints),
    "adapters of peft": Surroundings(before=add_lora),
    "a wrapper of torch.compile": Surroundings(before=partial(torch.compile, backend="eager")),
}


@on_ranks
def compare_in(group: ProcessGroup, name: str) -> dict[str, float]:
    around = SURROUNDINGS[name]

    def made() -> tuple[Any, dict[str, Any]]:
        model, inputs = make(Case(around.model), 5)
        return around.before(model), {**inputs, **around.inputs}

    def results(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        model = around.call(model)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.1)  # a copy has its own weights
        out, input_grads = run(model, inputs)
        sync_gradients(model, group=group)
        return out, {**input_grads, **weights(model)}

    plain, inputs = made()
    out, gradients = results(around.after(plain), inputs)
    model, inputs = made()
    parallelize(model, group=group)
    output(model, inputs)
    sharded, sharded_gradients = results(around.after(model), inputs)
    restore(model)
    return {
        "output": distance({"": sharded}, {"": out}),
        "gradients": distance(sharded_gradients, gradients),
        "restored": distance({"": output(model, inputs)}, {"": output(plain, inputs)}),
    }


@pytest.mark.slow
@pytest.mark.thorough(
    name=[
        "a hook leaves the first block out after",
        "attention without scores after",
        "a copy with hooks",
        "hooks of accelerate after",
        "checkpoint wrappers after",
        "a wrapper of torch.compile",
    ]
)
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_other_packages_do_with_a_model(pool: Pool, name: str) -> None:
    for found in pool.run(2, compare_in, name):
        assert all(error < 3e-7 for error in found.values()), (name, found)


# A module inside of each model, its streams, and their dimension.
TAPPED = {
    "wan": ("blocks.0", "image", 1),
    "flux": ("single_transformer_blocks.0.proj_out", ("text", "image"), 1),
    "sd35": ("transformer_blocks.0.attn.to_q", "image", -2),
    "ltx2": ("transformer_blocks.1.audio_ff", "audio", 1),
    "z_image": ("layers.0", "tokens", 1),
}


@on_ranks
def compare_features(group: ProcessGroup, model_name: str, checkpoints: bool) -> dict[str, float]:
    """A loss of the output and of what a forward hook sees, on one process and parallelized."""
    name, streams, dim = TAPPED[model_name]
    model, inputs = make(Case(model_name, text=2), 5)
    if checkpoints:
        model.enable_gradient_checkpointing()
    seen: list[Tensor] = []
    parallel = False

    def see(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(gather(model, output, streams, dim=dim) if parallel else output)

    handle = model.get_submodule(name).register_forward_hook(see)

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        seen.clear()
        model.zero_grad()
        out = output(model, inputs)
        (out.square().mean() + seen[0].pow(3).mean()).backward()
        return seen[0].detach(), weights(model)

    features, grads = step()
    parallelize(model, group=group)
    parallel = True
    sharded, _ = step()
    sync_gradients(model, group=group)
    parallel = False
    assert sharded.shape == features.shape
    handle.remove()
    return {"features": distance({"": sharded}, {"": features}), "weights": distance(weights(model), grads)}


@pytest.mark.parametrize(("world", "names"), [(2, ["flux", "sd35"]), (3, [*TAPPED])], ids=["2", "3"])
def test_gathered_features_have_the_gradients_of_one_process(pool: Pool, world: int, names: list[str]) -> None:
    for name in names:
        for found in pool.run(world, compare_features, name, name in ("flux", "wan")):
            assert all(error < 3e-7 for error in found.values()), (name, found)
