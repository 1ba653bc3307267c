"""A plan of one's own is refused if tokens see other tokens outside of attention, and is right otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import fully_shard

from ..observe import message_of
from ..pool import Pool, on_ranks
from .models import MASKED, MODELS, Case, available, class_of, make

pytest.importorskip("diffusers")
from seqpar.diffusers import Cut, Plan, parallelize

WIDTH, TOKENS = 8, 23
PLAN = Plan({"": {"hidden": Cut("image")}}, {"blocks.*.attn": ("image",)})


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Mix(nn.Module):
    """A layer that is told by its function."""

    def __init__(self, function: Callable[[Mix, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.zero = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        nn.init.zeros_(self.zero.weight)
        nn.init.zeros_(self.zero.bias)
        self.groups, self.batch, self.layer = nn.GroupNorm(2, WIDTH), nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH)
        self.gate, self.up, self.dropout = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Block(nn.Module):
    def __init__(self, function: Callable[[Mix, Tensor], Tensor]) -> None:
        super().__init__()
        self.attn, self.mix = Attention(), Mix(function)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mix(x)


class Model(nn.Module):
    def __init__(self, function: Callable[[Mix, Tensor], Tensor], between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(function) for _ in range(2))
        self.between, self.proj_out = between, nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = self.between(block(hidden))
        out: Tensor = self.proj_out(hidden)
        return out.roll(1, 1)  # of all tokens


def over_tokens(layer: str) -> Callable[[Mix, Tensor], Tensor]:
    return lambda mix, x: getattr(mix, layer)(x.transpose(1, 2)).transpose(1, 2)


def expert_choice(mix: Mix, x: Tensor) -> Tensor:
    """An expert takes the third of the tokens that it likes best."""
    best = mix.gate(x).softmax(-1)[..., 0].topk(x.shape[1] // 3, 1).indices[..., None].expand(-1, -1, WIDTH)
    return torch.zeros_like(x).scatter(1, best, mix.up(x).gather(1, best))


def token_choice(mix: Mix, x: Tensor) -> Tensor:
    """Each token takes the expert that it likes best."""
    choice = mix.gate(x).argmax(-1, keepdim=True)
    return torch.where(choice == 0, mix.up(x), -x)


def one_channel(mix: Mix, x: Tensor) -> Tensor:
    return torch.cat([x[..., :1].roll(1, 1), x[..., 1:]], -1)


MIXERS: dict[str, tuple[Callable[[Mix, Tensor], Tensor], str]] = {
    "depthwise convolution": (over_tokens("conv"), "blocks.0.mix.conv (Conv1d)"),
    "convolution whose weights are zero": (over_tokens("zero"), "blocks.0.mix.zero (Conv1d)"),
    "norm over tokens": (over_tokens("groups"), "blocks.0.mix.groups (GroupNorm)"),
    "norm over tokens and rows": (over_tokens("batch"), "blocks.0.mix.batch (BatchNorm1d)"),
    "expert choice": (expert_choice, "blocks.0.mix (Mix)"),
    "shift of a channel": (one_channel, "blocks.0.mix (Mix)"),
    "running sum": (lambda mix, x: x.cumsum(1), "blocks.0.mix (Mix)"),
    "mean": (lambda mix, x: x * mix.up(x.mean(1, keepdim=True)), "blocks.0.mix (Mix)"),
    "mean of pairs": (lambda mix, x: x.roll(1, 1).lerp(x, 0.5), "blocks.0.mix (Mix)"),
    "dilated convolution": (
        lambda mix, x: F.conv1d(x.mT, mix.zero.weight + 1, padding=2, dilation=2).mT,
        "blocks.0.mix (Mix)",
    ),
    "the last token sees the first": (
        lambda mix, x: torch.cat([x[:, :-1], x[:, -1:] + x[:, :1]], 1),
        "blocks.0.mix (Mix)",
    ),
    "Fourier transform": (lambda mix, x: torch.fft.fft(x, dim=1).real, "blocks.0.mix (Mix)"),
    "products by hand": (lambda mix, x: (x @ x.mT).softmax(-1) @ x, "blocks.0.mix (Mix)"),
}
TOKENWISE: dict[str, Callable[[Mix, Tensor], Tensor]] = {
    "norm of each token": lambda mix, x: mix.layer(x),
    "token choice": token_choice,
}


def made(function: Callable[[Mix, Tensor], Tensor], between: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    torch.manual_seed(1)
    model = Model(function, between).double()
    return model, torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)


@on_ranks
def check_mixers(group: ProcessGroup) -> None:
    for name, (function, where) in MIXERS.items():
        model, x = made(function)
        parallelize(model, group=group, plan=PLAN)
        for _ in range(2 if name == "mean" else 1):
            message = message_of(lambda: model(x))  # noqa: B023
            assert f"in {where} a token sees other tokens outside of attention" in message, (name, message)
    model, x = made(TOKENWISE["token choice"], lambda x: x.flip(1))
    parallelize(model, group=group, plan=PLAN)
    assert "in the model (Model) a token sees other tokens" in message_of(lambda: model(x))


@on_ranks
def check_tokenwise(group: ProcessGroup, sharded: bool) -> list[float]:
    errors = []
    for function, plan in zip(TOKENWISE.values(), (PLAN, replace(PLAN, output="blocks.-1")), strict=True):
        model, x = made(function)
        expected = model(x)
        if sharded:
            fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        parallelize(model, group=group, plan=plan)
        seen: list[Tensor] = []
        model.blocks[0].mix.register_forward_hook(lambda module, args, output: seen.append(output))  # noqa: B023
        state = torch.get_rng_state()
        out = model(x)
        assert torch.equal(torch.get_rng_state(), state) and len(seen) == 1
        errors.append(float((out - expected).norm() / expected.norm()))
        assert torch.equal(model(x), out) and len(seen) == 2
    return errors


@on_ranks
def check_dropout_and_failures(group: ProcessGroup) -> str:
    model, x = made(lambda mix, x: mix.dropout(mix.batch(x.flatten(0, 1)).view_as(x)))
    model.eval()
    model.blocks[0].mix.dropout.train()
    before = {name: b.clone() for name, b in model.named_buffers()}
    parallelize(model, group=group, plan=PLAN)
    model(x)
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    model, x = made(lambda mix, x: x * (1 / (x.shape[1] < 25)))
    parallelize(model, group=group, plan=PLAN)
    return message_of(lambda: model(x))


@pytest.mark.slow
def test_modules_that_mix_tokens_are_refused(pool: Pool) -> None:
    pool.run(2, check_mixers)


@pytest.mark.parametrize("sharded", [False, True])
def test_modules_that_mix_none_are_right(pool: Pool, sharded: bool) -> None:
    for errors in pool.run(2, check_tokenwise, sharded):
        assert max(errors) < 1e-14


def test_a_check_leaves_no_trace_and_says_why_it_failed(pool: Pool) -> None:
    for message in pool.run(2, check_dropout_and_failures):
        assert "could not be checked" in message and "ZeroDivisionError" in message


def test_one_rank_is_not_checked() -> None:
    model, x = made(MIXERS["depthwise convolution"][0])
    expected = model(x)
    torch.testing.assert_close(parallelize(model, plan=PLAN)(x), expected)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("half", [0, 1])
def test_the_package_s_plans_pass_the_check(half: int) -> None:
    for name in [*{class_of(name): name for name in MODELS}.values()][half::2]:  # one of each class
        if available(name):
            model, inputs = make(Case(name, ragged=name in MASKED), 0)
            parallelize(model)
            vars(model)["_seqpar_diffusers"].is_checked = False  # as if the plan were the caller's, on several ranks
            with torch.no_grad():
                model(**inputs)
            assert vars(model)["_seqpar_diffusers"].is_checked
