"""What ``seqpar.diffusers`` refuses, and how it is undone. One rank runs the same code as several."""

from __future__ import annotations

import copy
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from ..observe import message_of
from ..pool import OwnPool, Pool, on_ranks, start
from ..reference import assert_close
from .models import Case, available, make

diffusers = pytest.importorskip("diffusers")
from seqpar.diffusers import Cut, Plan, gather, parallelize, restore  # noqa: E402
from seqpar.diffusers.plans import PLANS  # noqa: E402

WAN = PLANS["WanTransformer3DModel"]


def call(model: Any, inputs: dict[str, Any]) -> Tensor:
    out: Tensor = model(**inputs, return_dict=False)[0]
    return out


def test_models_without_a_plan_are_refused_with_what_their_blocks_take() -> None:
    class Block(nn.Module):
        def forward(self, hidden: Tensor, angles: Tensor) -> Tensor:
            return hidden * angles

    model = nn.Module()
    model.layers = nn.ModuleList([Block()])
    message = message_of(lambda: parallelize(model))
    assert "first block layers.0 takes ('hidden', 'angles')" in message and "plan=" in message


def test_a_changed_forward_needs_a_plan() -> None:
    class Changed(diffusers.WanTransformer3DModel):  # type: ignore[misc, name-defined]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model, inputs = make(Case("wan"), 0)
    model.__class__ = Changed
    assert "another forward" in message_of(lambda: parallelize(model))
    own = Plan({**WAN.cuts, "": {}}, WAN.attention)
    expected = call(model, inputs)
    assert_close(call(parallelize(model, plan=own), inputs), expected)
    restore(model)
    wrapped = torch.compile(model, backend="eager")
    assert torch.allclose(call(parallelize(wrapped, plan=own), inputs), expected)
    restore(wrapped)
    model.__class__ = diffusers.WanTransformer3DModel
    model.forward = partial(model.forward)  # the same
    restore(parallelize(model))
    model.forward = partial(Changed.forward, model)
    message = message_of(lambda: parallelize(model))
    assert "another forward" in message and "Changed.forward" in message
    del model.forward
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(diffusers.WanTransformer3DModel, "forward", Changed.forward)
        assert "Changed.forward" in message_of(lambda: parallelize(model))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan({"blocks.0": {"hidden": Cut("image")}}, WAN.attention), "takes no hidden, but hidden_states"),
        (Plan(WAN.cuts, WAN.attention, output="out"), "output='out' names no module"),
        (Plan(WAN.cuts, WAN.attention, output="proj_out.-1"), "output='proj_out.-1' names no module"),
        (Plan({**WAN.cuts, "block.0": {}}, WAN.attention), "'block.0' names no module of WanTransformer3DModel, which"),
        (Plan(WAN.cuts, {**WAN.attention, "blocks.attn1": ()}), "'blocks.attn1' names no module"),
        (Plan(WAN.cuts, WAN.attention, padding=("blocks.0", "mask"), padded_stream="image"), "takes no mask, but"),
    ],
)
def test_plans_are_compared_with_the_model(plan: Plan, message: str) -> None:
    model, _ = make(Case("wan"), 0)
    assert message in message_of(lambda: parallelize(model, plan=plan))
    assert "forward" not in vars(model) and not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(WAN.cuts, {"blocks.*.attn1": ("image",)}), "outside of the attention modules of the plan"),
        (
            Plan(
                {**WAN.cuts, "blocks.0": {}, "blocks.*": {"encoder_hidden_states": Cut("image", dims=4)}}, WAN.attention
            ),
            "no argument with them has been cut",
        ),
        (Plan({**WAN.cuts, "": {"timestep": Cut("image", dim=0)}}, WAN.attention), "but there are 2 image tokens"),
    ],
)
def test_plans_that_forget_something_are_noticed(plan: Plan, message: str) -> None:
    model, inputs = make(Case("wan"), 0)
    parallelize(model, plan=plan)
    assert message in message_of(lambda: call(model, inputs))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention": {"blocks.*.attn1": "image"}}, "attention['blocks.*.attn1']='image': expected a tuple"),
        ({"attention": {"blocks.*.attn1": ("image", "text")}}, "no argument is cut for the stream 'text', only for"),
        ({"output_stream": "video"}, "no argument is cut for the stream 'video'"),
        ({"cuts": {"": {"timestep": "image"}}}, "cuts['']['timestep']='image': expected a Cut"),
        ({"padding": ("", "mask"), "padded_stream": "image"}, "its module has no cuts; modules with cuts: ['blocks.0"),
    ],
)
def test_plans_that_contradict_themselves_are_refused(arguments: dict[str, Any], message: str) -> None:
    usual = {"cuts": {"blocks.0": {"hidden_states": Cut("image")}}, "attention": WAN.attention}
    assert message in message_of(lambda: Plan(**{**usual, **arguments}))


def test_another_attention_backend_is_noticed() -> None:
    class Processor:
        _attention_backend = "own"

        def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return hidden_states, kwargs["encoder_hidden_states"]

    model, inputs = make(Case("hunyuan"), 0)
    parallelize(model)
    model.transformer_blocks[1].attn.processor = Processor()
    message = message_of(lambda: call(model, inputs))
    assert "transformer_blocks.1.attn: 0 calls" in message and "Processor" in message and "'own'" in message


def test_cross_attention_to_this_rank_s_tokens_is_refused() -> None:
    model, inputs = make(Case("wan"), 0)
    parallelize(model, plan=Plan(WAN.cuts, {**WAN.attention, "blocks.*.attn1": ()}))
    assert "blocks.0.attn1: without encoder_hidden_states" in message_of(lambda: call(model, inputs))


def test_another_operator_is_noticed() -> None:
    class Processor:
        def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            q = hidden_states.unflatten(2, (attn.heads, -1)).transpose(1, 2)
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0].transpose(1, 2).flatten(2)

    model, inputs = make(Case("wan"), 0)
    parallelize(model)
    model.blocks[1].attn1.processor = Processor()
    message = message_of(lambda: call(model, inputs))
    assert "_scaled_dot_product_flash_attention_for_cpu" in message and "set_attention_backend('native')" in message


def test_caches_and_diffusers_own_parallelism_are_refused() -> None:
    model, inputs = make(Case("flux"), 0)
    parallelize(model)
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.2))
    assert "disable_cache()" in message_of(lambda: call(model, inputs))
    model.disable_cache()
    call(model, inputs)
    model._parallel_config = object()
    assert "enable_parallelism" in message_of(lambda: call(model, inputs))


def test_hooks_that_need_all_tokens_are_refused() -> None:
    hooks = diffusers.hooks
    time = {"current_timestep_callback": lambda: 500}
    ranges = {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": (0, 1000)}

    class Own(hooks.ModelHook):  # type: ignore[misc, name-defined]
        _is_stateful = True

        def reset_state(self, module: nn.Module) -> nn.Module:
            return module

    def blur(model: Any, config: Any) -> None:
        hooks.smoothed_energy_guidance_utils._apply_smoothed_energy_guidance_hook(model, config, 1.0, "blur")

    def keep(model: Any, config: Any) -> None:
        hooks.HookRegistry.check_if_exists_or_initialize(model.blocks[1]).register_hook(config, "own")

    for apply, config in (
        (hooks.apply_first_block_cache, hooks.FirstBlockCacheConfig(0.1)),
        (hooks.apply_mag_cache, hooks.MagCacheConfig(num_inference_steps=4, mag_ratios=torch.ones(4))),
        (hooks.apply_pyramid_attention_broadcast, hooks.PyramidAttentionBroadcastConfig(**ranges, **time)),
        (hooks.apply_faster_cache, hooks.FasterCacheConfig(**time)),
        (hooks.apply_taylorseer_cache, hooks.TaylorSeerCacheConfig(cache_identifiers=["blocks.*attn1"])),
        (blur, hooks.smoothed_energy_guidance_utils.SmoothedEnergyGuidanceConfig([0])),
        (keep, Own()),
    ):
        for parallelized_first in (True, False):
            model, inputs = make(Case("wan"), 0)
            expected = call(model, inputs)
            if parallelized_first:
                parallelize(model)
            apply(model, config)
            if not parallelized_first:
                parallelize(model)
            removed = 0
            while "remove_hook" in (message := message_of(partial(call, model, inputs))):
                assert "of which a rank has only some" in message
                name = message.split("remove_hook('")[1].removesuffix("')")
                hooks.HookRegistry.check_if_exists_or_initialize(model).remove_hook(name)
                removed += 1
            assert removed and torch.equal(call(model, inputs), expected), message


def test_masks_that_are_no_padding_at_the_end_are_refused() -> None:
    model, inputs = make(Case("qwen"), 0)
    parallelize(model)
    inputs["encoder_hidden_states_mask"][1, 0] = False
    assert "put each row's padding at its end" in message_of(lambda: call(model, inputs))
    model, inputs = make(Case("chroma", ragged=True), 0)
    parallelize(model)
    floats = {**inputs, "attention_mask": inputs["attention_mask"].double()}
    message = message_of(lambda: call(model, floats))
    assert "expected a bool tensor" in message and "attention_mask.bool()" in message
    inputs["attention_mask"][0, -1] = False
    assert "only text may be padded" in message_of(lambda: call(model, inputs))


def test_masks_that_are_added_to_the_scores_are_refused() -> None:
    model, inputs = make(Case("cogview4"), 0)
    parallelize(model)
    assert "attn_mask" in message_of(lambda: call(model, {**inputs, "attention_mask": Case("cogview4").real.long()}))


@on_ranks
def call_with_other_frames(group: ProcessGroup) -> list[str]:
    def message(name: str, **more: Any) -> str:
        model, inputs = make(Case(name), 0)
        inputs |= more
        call(model, inputs)  # on one process it is no error
        parallelize(model, group=group)
        return message_of(lambda: call(model, inputs))

    found = [
        message("flux2", kv_cache_mode="extract", num_ref_tokens=3),
        message("skyreels", timestep=torch.rand(2, 3).double(), enable_diffusion_forcing=True),
    ]
    if available("flux3"):
        image, positions = torch.randn(2, 13, 6).double(), torch.ones(13, 4)
        found.append(message("flux3", image_cond_hidden_states=image, image_cond_ids=positions))
    return found


def test_reference_images_and_diffusion_forcing_are_refused(pool: Pool) -> None:
    for messages in pool.run(2, call_with_other_frames):
        assert all("Error" in message for message in messages), messages


def test_checkpoints_of_one_s_own_are_refused_in_backward() -> None:
    model, inputs = make(Case("wan"), 0)
    parallelize(model)
    block = model.blocks[1]
    forward = block.forward
    block.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)
    out = call(model, inputs)
    assert "enable_gradient_checkpointing" in message_of(lambda: out.sum().backward())


def test_what_replaced_a_forward_is_named() -> None:
    model, inputs = make(Case("wan"), 0)
    expected = call(model, inputs)
    parallelize(model)
    block = {"hidden_states": torch.randn(2, 9, 36).double(), "encoder_hidden_states": None, "temb": None}
    message = message_of(lambda: model.blocks[0](**block, rotary_emb=None))
    assert "outside of a call of the parallelized model; call the model" in message
    for module in (model, model.blocks[1].attn1):
        ours = module.forward
        module.forward = partial(type(module).forward, module)
        message = message_of(lambda: call(model, inputs))
        assert "was replaced by" in message and f"{type(module).__name__}.forward" in message
        assert "was replaced by" in message_of(lambda: restore(model))
        module.forward = ours
        assert torch.equal(call(model, inputs), expected)


def test_gather_refuses_what_is_no_share() -> None:
    model, inputs = make(Case("wan"), 0)
    x = torch.zeros(2, 45, 3)
    assert "it is not parallelized" in message_of(lambda: gather(model, x))
    parallelize(model)
    assert "outside of a call" in message_of(lambda: gather(model, x))

    def told(name: str, *args: Any) -> str:
        handle = model.get_submodule(name).register_forward_hook(lambda *_: gather(model, *args))
        try:
            return message_of(lambda: call(model, inputs))
        finally:
            handle.remove()

    assert "have not been cut yet" in told("patch_embedding", x)
    assert "no 'text', only image" in told("blocks.0", x, "text")
    assert "44 tokens along dim 1, but this rank holds [45] tokens of ('image',)" in told("blocks.0", x[:, 1:])


def test_parallelize_twice_and_restore() -> None:
    model, inputs = make(Case("sd35"), 0)
    before = set(vars(model)), call(model, inputs)
    assert "it is not parallelized" in message_of(lambda: restore(model))
    pipeline = SimpleNamespace(components={"transformer": model, "vae": nn.Linear(2, 2), "transformer_2": model})
    assert parallelize(pipeline) is pipeline
    assert "parallelized already" in message_of(lambda: parallelize(model))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.proj_out.weight.zero_()
        twin.proj_out.bias.fill_(2)
    assert bool((call(twin, inputs) == 2).all())  # its own weights
    assert "a copy" in message_of(lambda: restore(twin))
    assert "as a copy; restore the model, then copy it" in message_of(lambda: parallelize(twin))
    replaced, model.forward = model.forward, lambda: None
    assert "was replaced" in message_of(lambda: restore(model))
    model.forward = replaced
    restore(pipeline)
    assert set(vars(model)) == before[0] and torch.equal(call(model, inputs), before[1])


def test_what_is_no_model_is_refused() -> None:
    assert "expected a diffusers transformer" in message_of(lambda: parallelize(3))
    unet = SimpleNamespace(components={"unet": nn.Linear(2, 2)})
    assert "no transformer, only unet" in message_of(lambda: parallelize(unet))
    model, _ = make(Case("wan"), 0)
    assert "strategy" in message_of(lambda: parallelize(model, strategy="rings"))
    assert "comm" in message_of(lambda: parallelize(model, comm="p2p"))


@on_ranks
def fail_in_a_block(group: ProcessGroup, port: int) -> str:
    group = start(port, "diffusers", group.rank(), 2, 300.0)
    model, inputs = make(Case("wan"), 0)
    parallelize(model, group=group)

    def fail(*_: Any) -> None:
        raise RuntimeError("the user's")

    if group.rank() == 1:
        model.blocks[1].register_forward_pre_hook(fail)
    return message_of(lambda: call(model, inputs))


def test_an_error_of_one_rank_ends_the_call_on_all(own: OwnPool) -> None:
    """Not after the timeout, which is longer than any test."""
    other, failed = own.pool.run(2, fail_in_a_block, own.port)
    assert "the user's" in failed and re.search(r"rank\(s\) \[1\] of the job", other), other


@on_ranks
def call_with_few_tokens(group: ProcessGroup) -> str:
    model, inputs = make(Case("flux"), 0)
    parallelize(model, group=group)
    few = {**inputs, "hidden_states": inputs["hidden_states"][:, :1], "img_ids": inputs["img_ids"][:1]}
    return message_of(lambda: call(model, few))


def test_images_with_fewer_tokens_than_ranks_are_refused(pool: Pool) -> None:
    assert all("1 image tokens over 2 ranks" in message for message in pool.run(2, call_with_few_tokens))


@on_ranks
def call_with_other_times(group: ProcessGroup) -> str:
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("SEQPAR_CHECK", "1")
        model, inputs = make(Case("wan"), 0)
        parallelize(model, group=group)
        call(model, inputs)
        return message_of(lambda: call(model, {**inputs, "timestep": inputs["timestep"] + group.rank()}))


def test_inputs_that_differ_between_ranks_are_noticed_on_demand(pool: Pool) -> None:
    for message in pool.run(2, call_with_other_times):
        assert "rank(s) [1]" in message and "depends on the dp rank" in message


@on_ranks
def tensor_parallel_over_the_sequence(group: ProcessGroup) -> None:
    mesh, plan = DeviceMesh.from_group(group, "cpu"), {"proj_out": ColwiseParallel(output_layouts=Replicate())}
    words = "which share a sequence, so tensor parallelism would add"
    model, inputs = make(Case("wan"), 0)
    parallelize_module(model, mesh, plan)
    assert words in message_of(lambda: parallelize(model, group=group))
    later, inputs = make(Case("wan"), 0)
    parallelize(later, group=group)
    parallelize_module(later, mesh, plan)
    assert words in message_of(lambda: call(later, inputs))


def test_tensor_parallelism_over_the_sequence(pool: Pool) -> None:
    pool.run(2, tensor_parallel_over_the_sequence)
