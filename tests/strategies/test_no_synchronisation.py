"""No layer makes the host wait for the GPU. Fake CUDA tensors, which have no values to read, show this without a GPU.

Reading a value of a fake tensor (``.item()``, ``bool()``, ``nonzero``) raises an error. Copies from the host to the
device are counted. There are none after the first use of a mask and a sharding. Process groups are fake too, so that
they may have any size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
from seqpar import kernels
from seqpar.base import cache
from seqpar.comm import waiting
from seqpar.placement.layout import LAYOUTS
from seqpar.schedule.rows import KeyIntervals
from seqpar.strategies import call as strategy_call
from seqpar.strategies import gathered_activations, operators, tensor_operators

from ..fake_cuda import fake_cuda
from ..strategy_cases import LAYER_STRATEGIES

HIDDEN, HEAD_DIM = 64, 4
# Row of ``LAYER_STRATEGIES`` -> sizes of the mesh's dimensions dp, ring, ulysses, tp, at 8 and at 1,024 ranks.
MESHES = {
    "ring": {8: (1, 8, 1, 1), 1024: (1, 1024, 1, 1)},
    "all_gather": {8: (1, 8, 1, 1), 1024: (1, 1024, 1, 1)},
    "activations": {8: (1, 8, 1, 1), 1024: (16, 64, 1, 1)},
    "ulysses": {8: (1, 1, 8, 1), 1024: (64, 1, 16, 1)},
    "hybrid": {8: (1, 4, 2, 1), 1024: (1, 128, 8, 1)},
    "tp_sp": {8: (1, 1, 1, 8), 1024: (128, 1, 1, 8)},
}
# Query heads and KV heads. Of 28 and 14, rank 5 of 8 holds three query heads, which read 1 and 2 times a KV head.
EVEN_HEADS, UNEVEN_HEADS = (16, 8), (28, 14)
CASES = [
    *((strategy, 8, UNEVEN_HEADS if strategy in ("ulysses", "tp_sp") else EVEN_HEADS) for strategy in MESHES),
    *((strategy, 1024, EVEN_HEADS) for strategy in MESHES),
]


class HostToDevice(TorchDispatchMode):
    """Lists the operators that copy a tensor of the host to the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Numbers are passed as tensors of the host without dimensions; kernels take them as arguments.
        from_host = any(isinstance(x, Tensor) and x.device.type == "cpu" and x.dim() for x in args)
        if from_host and isinstance(result, Tensor) and result.device.type == "cuda":
            self.copies.append(str(func))
        return result


class NoKernel:
    """A backend that computes nothing and checks where the intervals are."""

    name, deterministic, reads_delta = "none", True, True

    def unavailable(self) -> None:
        return None

    def unsupported(self, *args: Any, **options: Any) -> None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, intervals: Any, *args: Any) -> tuple[Tensor, Tensor]:
        assert intervals.lo.device == intervals.hi.device == q.device
        return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> None:
        args[-1].make(q, k, v)


def run_both_ways(function: type[torch.autograd.Function]) -> Any:
    """An ``apply`` that runs forward, and then backward on a gradient for each result.

    PyTorch's autograd cannot record tensors of a device that the machine lacks.
    """

    def apply(*args: Any) -> Any:
        context: Any = SimpleNamespace(
            set_materialize_grads=lambda on: None,
            mark_non_differentiable=lambda *tensors: None,
            needs_input_grad=[True] * len(args),
        )
        context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
        outputs: Any = function.forward(context, *args)
        many = outputs if isinstance(outputs, tuple) else (outputs,)
        function.backward(context, *(torch.empty_like(x) for x in many))
        return outputs

    return apply


def look_inside(operator: Any) -> Callable[..., Any]:
    """A function that does what an operator does with real tensors. An operator of fake tensors returns empty ones."""
    in_forward = False
    function = getattr(operator.autograd, "__self__", None)  # the autograd.Function, whose ``apply`` is replaced

    def call(*args: Any) -> Any:
        nonlocal in_forward
        if operator.autograd is None or in_forward:
            return operator.function(*args)
        in_forward = True
        try:
            return (operator.autograd if function is None else function.apply)(*args)
        finally:
            in_forward = False

    return call


def run_without_autograd(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """``gathered_activations.differentiable`` with gradients of any values."""
    return *function(*inputs), lambda *of_results: [torch.empty_like(x) for x in inputs]


@contextmanager
def without_a_gpu(world: int) -> Iterator[None]:
    """A fake process group of ``world`` ranks, of which this process is one in the middle, and no kernels."""
    modules = gathered_activations, operators, tensor_operators
    functions = [
        x for m in modules for x in vars(m).values() if isinstance(x, type) and issubclass(x, torch.autograd.Function)
    ]
    dist.init_process_group("fake", store=FakeStore(), rank=world // 2 + 1, world_size=world)
    backends = {"reference": NoKernel()}
    with mock.patch.dict(kernels.BACKENDS, backends, clear=True), mock.patch.object(nn.init, "kaiming_uniform_"):
        try:
            # Under a dispatch mode attention is one operator. Here its inside is to be seen.
            mock.patch.object(operators, "_get_current_dispatch_mode", return_value=None).start()
            mock.patch.object(gathered_activations, "differentiable", run_without_autograd).start()
            for module in (operators, tensor_operators):
                for name, value in list(vars(module).items()):
                    if isinstance(value, torch._ops.OpOverload):
                        mock.patch.object(module, name, look_inside(value)).start()
            for function in functions:
                mock.patch.object(function, "apply", run_both_ways(function)).start()
            yield
        finally:
            mock.patch.stopall()
            dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.thorough(strategy=["activations", "ulysses", "tp_sp"])
@pytest.mark.thorough(strategy=["all_gather", "hybrid"], world=[1024])
@pytest.mark.parametrize(("strategy", "world", "heads"), CASES)
def test_no_read_back_and_no_copy(
    strategy: str, world: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    copies = {}
    with without_a_gpu(world):
        dp, ring, ulysses, tp = MESHES[strategy][world]
        mesh = seqpar.init_mesh(dp, ring, ulysses, tp, device_type="cpu")
        seq_len = ring * ulysses * tp * 16 + 3
        options = LAYER_STRATEGIES[strategy]
        name = options["strategy"]
        causal, documents = seqpar.Mask.causal(), seqpar.Mask.documents([*range(0, seq_len, 50), seq_len])
        by_heads = seqpar.Mask.by_heads([documents, causal])
        runs = list(zip(LAYOUTS, cycle((causal, documents, by_heads)), strict=False))
        # A fake operator takes 0.3 ms, and a step of 1,024 ranks has tens of thousands.
        runs = runs if world == 8 else runs[1:2]
        with fake_cuda(), torch.no_grad():
            layer = seqpar.ParallelAttention(
                hidden_size=HIDDEN, num_heads=heads[0], num_kv_heads=heads[1], head_dim=HEAD_DIM, mesh=mesh,
                qk_norm=False, device="cuda", dtype=torch.bfloat16, rope=seqpar.RotaryEmbedding(HEAD_DIM), **options,
            )  # fmt: skip
            for layout, mask in runs:
                sharding = seqpar.Sharding(seq_len, layout, mesh=mesh, strategy=name)
                x = torch.empty(1, sharding.seq_local, HIDDEN, device="cuda", dtype=torch.bfloat16)
                layer(x, mask=mask, sharding=sharding)
                with HostToDevice() as second:  # as the next layer, or the next step
                    layer(x, mask=mask, sharding=sharding)
                copies[layout] = second.copies
    assert not any(copies.values()), copies


def test_a_read_back_raises() -> None:
    """What the tests above rely on."""
    with fake_cuda(), pytest.raises(Exception, match=r"item|_local_scalar_dense|nonzero"):
        int(torch.empty(3, device="cuda").sum())
    with fake_cuda(), HostToDevice() as seen:
        torch.empty(3, device="cuda").copy_(torch.empty(3))
    assert seen.copies


def test_what_a_cuda_graph_may_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later call on one rank, whose tables stay alive; not the first call, no dropout, and no messages."""
    capturing = False
    monkeypatch.setattr(cache, "is_captured", lambda: capturing)
    for module in (waiting, strategy_call):
        monkeypatch.setattr(module, "is_captured", lambda: capturing)
    monkeypatch.setattr(cache, "_captured", [])
    with ExitStack() as stack:
        stack.enter_context(without_a_gpu(8))
        sharding = seqpar.Sharding(64, mesh=seqpar.init_mesh(dp=8, device_type="cpu"))
        stack.enter_context(fake_cuda())
        stack.enter_context(torch.no_grad())
        q = torch.empty(1, 64, 4, 8, device="cuda", dtype=torch.bfloat16)
        masks = [seqpar.Mask.documents([0, 10, 64])]

        def run(**options: Any) -> None:
            seqpar.attention(q, q, q, **{"mask": masks[0], "sharding": sharding, "strategy": "local"} | options)

        capturing = True
        with pytest.raises(RuntimeError, match="cannot capture the first attention call"):
            run()
        capturing = False
        run()
        capturing = True
        with HostToDevice() as again:
            run()
        assert not again.copies
        parts = [x for value in cache._captured if isinstance(value, tuple) for x in value]
        tables = [weakref.ref(x.lo) for x in parts if isinstance(x, KeyIntervals)]
        del parts
        masks[0] = seqpar.Mask.causal()
        cache._tensors.clear()
        cache._without_owner.clear()
        assert tables and all(table() is not None for table in tables)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: capturing)
    capturing = False
    with without_a_gpu(8):
        mesh = seqpar.init_mesh(ring=8, device_type="cpu")
        q, sharding = torch.empty(1, 64, 4, 8), seqpar.Sharding(512, "zigzag", mesh=mesh)
        capturing = True
        with pytest.raises(RuntimeError, match=r"dropout_p=0.1.*every replay"):
            seqpar.attention(q, q, q, strategy="local", dropout_p=0.1)
        with pytest.raises(RuntimeError, match=r"forward over 8 ranks: a CUDA graph cannot capture it"):
            seqpar.attention(q, q, q, sharding=sharding, strategy="ring")
