"""Attention by groups of heads, checkpointing and offloading compute what the layers do without them."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
from seqpar.memory import Memory, offload, restore
from seqpar.memory.head_groups import group_heads

from ..fake_cuda import fake_cuda
from ..pool import Pool, on_ranks
from ..reference import assert_close
from ..streams import RaceError, Simulator, simulated
from .host_copies import HostCopies
from .modules import Attention, Model, gradients

SIZES: dict[str, Any] = {"hidden": 16, "heads": 8, "kv_heads": 4, "width": 24}
MEMORY = {
    "heads": Memory(head_groups=2),
    "attention": Memory(checkpoint="attention"),
    "full": Memory(checkpoint="full"),
    "heads, attention": Memory(head_groups=4, checkpoint="attention"),
    "heads, full": Memory(head_groups=2, checkpoint="full"),
    "all": Memory(tiled_mlp=5, head_groups=2, checkpoint="attention", offload=True),
    "all, full": Memory(tiled_mlp=5, head_groups=2, checkpoint="full", offload=True),
}
# How often the forward of attention runs, over the number of calls without switches, for each group of heads.
CALLS = {"heads": 2, "attention": 1, "full": 2, "heads, attention": 1, "heads, full": 3, "all": 1, "all, full": 3}


class Calls(TorchDispatchMode):
    """Counts the calls of attention, by their number of heads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heads: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.seqpar.attention.default:
            self.heads.append(args[0].shape[2])
        return func(*args, **(kwargs or {}))


# Copies to the host are made where something is offloaded.
@pytest.mark.parametrize(
    ("copies", "name"), [(copies, name) for name in MEMORY for copies in {False, MEMORY[name].offload}]
)
def test_outputs_and_gradients(name: str, copies: bool) -> None:
    memory = MEMORY[name]
    torch.manual_seed(0)
    plain, x = Model(**SIZES), torch.randn(2, 12, 16, dtype=torch.float64)
    model, host = copy.deepcopy(plain), HostCopies()
    memory.apply(model)
    expected = gradients(plain, x)
    calls = Calls()
    with calls, host() if copies else mock.MagicMock():
        actual = gradients(model, x)
    for a, b in zip(expected, actual, strict=True):
        assert_close(b, a, torch.float32)  # attention computes in float32
    assert calls.heads == [8 // memory.head_groups] * (3 * memory.head_groups * CALLS[name])
    if copies and memory.offload:
        # Of each layer the input and, with "attention", the output of each group. The last layer's stay on the device.
        kept = 1 + memory.head_groups * (2 if memory.checkpoint == "attention" else 0)
        assert (host.to_host, host.to_device) == (3 * kept, 2 * kept)
    restore(model)
    for a, b in zip(expected, gradients(model, x), strict=True):
        assert torch.equal(b, a)


@pytest.mark.parametrize("shared", ["layers", "mlp", "self_attn", "lists"])
def test_what_layers_share_is_changed_once(shared: str) -> None:
    torch.manual_seed(0)
    model, x = Model(**SIZES), torch.randn(2, 12, 16, dtype=torch.float64)
    if shared == "layers":
        model.layers = nn.ModuleList([model.layers[0], model.layers[1], model.layers[0]])
    elif shared == "lists":
        model.again = nn.ModuleList([model.layers])
        model.backwards = nn.ModuleList(reversed(model.layers))
    else:
        setattr(model.layers[2], shared, getattr(model.layers[0], shared))
    expected = gradients(model, x)
    for name in ("heads, full", "all", "all, full"):
        MEMORY[name].apply(model)
        for each in (model, copy.deepcopy(model)):
            for a, b in zip(expected, gradients(each, x), strict=True):
                assert_close(b, a, torch.float32)
        restore(model)
        assert not any("forward" in vars(m) for m in model.modules())


def test_modules_that_are_given() -> None:
    """Also one module as a layer and as an MLP, and an MLP inside of another one."""
    torch.manual_seed(0)
    plain, x = Model(**SIZES), torch.randn(2, 12, 16, dtype=torch.float64)
    mlps: list[Any] = [layer.mlp for layer in plain.layers]
    expected = gradients(plain, x)
    given: list[tuple[Memory, dict[str, Any]]] = [
        (Memory(tiled_mlp=5), {"mlps": iter(mlps)}),
        (Memory(tiled_mlp=5, checkpoint="full"), {"mlps": mlps, "layers": mlps}),
        (Memory(tiled_mlp=5), {"mlps": [*mlps, *(mlp.gate for mlp in mlps)]}),
        (Memory(head_groups=2), {"attentions": [layer.self_attn for layer in plain.layers]}),
    ]
    for memory, modules in given:
        memory.apply(plain, **modules)
        assert any("forward" in vars(m) for m in plain.modules())
        for each in (plain, copy.deepcopy(plain)):
            for a, b in zip(expected, gradients(each, x), strict=True):
                assert_close(b, a, torch.float32)
        restore(plain)
        assert not any("forward" in vars(m) for m in plain.modules())


def test_a_second_backward_of_the_graph() -> None:
    torch.manual_seed(0)
    model, x = Model(**SIZES), torch.randn(2, 12, 16, dtype=torch.float64, requires_grad=True)
    Memory(head_groups=2, checkpoint="attention", offload=True).apply(model)
    with HostCopies()():
        y = model(x).sum()
        first = torch.autograd.grad(y, x, retain_graph=True)
        second = torch.autograd.grad(y, x)
    assert torch.equal(*first, *second)


def test_without_gradients_nothing_is_kept() -> None:
    model, host = Model(**SIZES), HostCopies()
    Memory(head_groups=2, checkpoint="attention", offload=True).apply(model)
    with host(), torch.no_grad(), Calls() as calls:
        model(torch.randn(2, 12, 16, dtype=torch.float64))
    assert host.to_host == 0 and calls.heads == [8] * 3


@pytest.mark.slow
@pytest.mark.thorough(name=["heads", "heads, attention"])
@pytest.mark.parametrize("name", ["heads", "attention", "heads, attention", "all"])
def test_compiled(name: str) -> None:
    torch.manual_seed(0)
    plain, x = Model(1, **SIZES), torch.randn(2, 12, 16, dtype=torch.float64)
    model = copy.deepcopy(plain)
    MEMORY[name].apply(model)
    compiled = torch.compile(model, backend="aot_eager")
    for a, b in zip(gradients(plain, x), gradients(model, x, lambda x: compiled(x)), strict=True):
        assert_close(b, a, torch.float32)


@on_ranks
def on_several_ranks(group: ProcessGroup, strategy: str, memory: Memory) -> None:
    """Layers of seqpar over the ranks of a sequence."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = seqpar.ParallelAttention(
                strategy, 16, 8, 4, 2, group=group, layout="contiguous", dtype=torch.float64, bias=True
            )

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.self_attn(x)
            return y

    torch.manual_seed(0)
    plain = nn.ModuleList([Block(), Block()])
    model = copy.deepcopy(plain)
    memory.apply(nn.ModuleDict({"layers": model}))
    torch.manual_seed(group.rank())
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    found = []
    for blocks in (plain, model):
        tensors = gradients(blocks, x, lambda x, blocks=blocks: blocks[1](blocks[0](x)))
        found.append([t.to_local() if isinstance(t, DTensor) else t for t in tensors])
    for a, b in zip(*found, strict=True):
        assert_close(b, a, torch.float32)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("name", ["heads", "heads, attention", "all"])
def test_on_several_ranks(pool: Pool, strategy: str, name: str) -> None:
    memory = MEMORY[name]
    pool.run(2, on_several_ranks, strategy, Memory(0, memory.head_groups, memory.checkpoint, memory.offload))


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    class Fixed(Attention):  # with a number of heads that is not a group's: each head gets half of its channels
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (p(x).unflatten(-1, (n, -1)) for p, n in zip(self.projections(), (8, 4, 4), strict=True))
            y: Tensor = self.o_proj(seqpar.attention(q, k, v, strategy="local").flatten(2))
            return y

    class Torch(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (p(x).unflatten(-1, (-1, 2)).transpose(1, 2) for p in self.projections())
            y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
            return out

    class Normed(Attention):
        def __init__(self) -> None:
            super().__init__(16, 8, 4, torch.float64)
            self.q_norm = nn.RMSNorm(16)

    wrong: dict[str, tuple[nn.Module, int]] = {
        "head_groups: Linear has no q_proj": (nn.Linear(2, 2), 2),
        "head_groups=3: it must divide the 4 KV heads of Attention": (Attention(16, 8, 4, torch.float64), 3),
        r"head_groups: Normed has the parameter q_norm.weight of shape \(16,\)": (Normed(), 2),
    }
    for message, (module, groups) in wrong.items():
        with pytest.raises(ValueError, match=message):
            group_heads(module, groups)
    called: dict[str, nn.Module] = {
        "q: 8 heads of head_dim 1, but a group of heads has 4 of 2": Fixed(16, 8, 4, torch.float64),
        "head_groups: Torch calls attention of seqpar 0 times": Torch(16, 8, 4, torch.float64),
    }
    for message, module in called.items():
        group_heads(module, 2)
        with pytest.raises(ValueError, match=message):
            module(torch.randn(1, 6, 16, dtype=torch.float64))


def test_values_that_are_refused() -> None:
    model = Model(**SIZES)
    with pytest.raises(ValueError, match="offload=True: without checkpointing"):
        Memory(offload=True)
    with pytest.raises(ValueError, match="checkpoint='atention': did you mean 'attention'"):
        Memory(checkpoint="atention")
    with pytest.raises(ValueError, match=r"Linear has no nn\.ModuleList"):
        Memory(tiled_mlp=4).apply(nn.Linear(2, 2))
    wrong: dict[str, dict[str, Any]] = {
        r"mlps: Linear has no child named mlp, .*, but no children; .*apply\(model, mlps=\[": {
            "layers": [nn.Linear(2, 2)]
        },
        "mlps: this Linear is not in the Model": {"mlps": [nn.Linear(2, 2)]},
        "mlps: expected modules, got Parameter": {"mlps": model.parameters()},
    }
    for message, modules in wrong.items():
        with pytest.raises((TypeError, ValueError), match=message):
            Memory(tiled_mlp=4).apply(model, **modules)
    with pytest.raises(ValueError, match="head_groups=3"):
        Memory(tiled_mlp=4, head_groups=3).apply(model)
    Memory(tiled_mlp=4).apply(model)  # the failed call has left nothing behind
    with pytest.raises(ValueError, match="its memory is managed already"):
        Memory(tiled_mlp=4).apply(model)


def _forward_and_backward(simulator: Simulator, layers: int) -> None:
    """The kernels of some layers, each of which keeps two tensors, and the kernels of their backward."""
    kept: list[offload.Kept] = []
    for _ in range(layers):
        kept.append(offload.Kept(True, kept[-1] if kept else None))
        for _ in range(2):
            x = torch.empty(1024, 1024, device="cuda")
            simulator.run("forward", [], [x])
            kept[-1].put(x)
            del x
        kept[-1].end()
    for one in reversed(kept):
        for number in range(2):
            simulator.run("backward", [one.get(number)], [])
        del one
        kept.pop()


def test_copies_are_ordered_and_overlap_kernels() -> None:
    """Two layers' tensors are on the device, whatever the number of layers."""
    allocated = {}
    for layers in (4, 12):
        with fake_cuda(), simulated() as simulator:
            offload._copy_stream.cache_clear()
            _forward_and_backward(simulator, layers)
            allocated[layers] = simulator.allocated.total()
            forward, backward = simulator.named("forward"), simulator.named("backward")
            copies = simulator.named("aten::copy_")
        to_host, copies_back = copies[: 2 * layers], copies[2 * layers :]
        assert len(copies_back) == 2 * layers - 2  # the last layer's tensors have stayed on the device
        # A copy to the host waits for the kernel that made the tensor, and no kernel of the next layer waits for it.
        assert all(copied.is_after(forward[i]) for i, copied in enumerate(to_host))
        assert not any(forward[i + 2].is_after(copied) for i, copied in enumerate(to_host[:-2]))
        # The kernels of a layer's backward do not wait for the copies of the layer before.
        assert not any(backward[2 * i + 1].is_after(copies_back[2 * i]) for i in range(layers - 1))
        assert all(backward[2 * i + 2].is_after(copies_back[2 * i + 1]) for i in range(layers - 1))
    assert allocated[4] == allocated[12] <= 3 * 2 * 4 * 1024 * 1024


def test_the_model_of_streams_finds_a_missing_wait() -> None:
    offload._copy_stream.cache_clear()
    with fake_cuda(), simulated() as simulator, mock.patch.object(offload.Kept, "_wait"), pytest.raises(RaceError):
        _forward_and_backward(simulator, 4)
