"""Messages and kernels on a GPU are ordered if they share memory, and can run at the same time if they do not."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import seqpar
from seqpar import kernels
from seqpar.comm import streams, waiting
from seqpar.kernels.base import Grads
from seqpar.strategies import call as calls
from seqpar.strategies import head_exchange, operators, transport

from ..fake_cuda import fake_cuda
from ..streams import Event, RaceError, Simulator, simulated

WORLD, RANK = 8, 5


class Kernels:
    """A backend whose kernels only say what they read and write."""

    name, deterministic, reads_delta = "simulated", True, False

    def __init__(self, simulator: Simulator) -> None:
        self._run = simulator.run

    def unavailable(self) -> None:
        return None

    def unsupported(self, *args: Any, **options: Any) -> None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, intervals: Any, score: Any, carry: Any, last: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        self._run("attend", [q, k, v, *(carry or ())], [out, lse])
        return out, lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, output: Any, intervals: Any, score: Any, grads: Grads) -> None:
        self._run("gradients", [q, k, v, *(x for x in output if x is not None)], grads.make(q, k, v))


@contextmanager
def one_rank(per_host: int) -> Iterator[Simulator]:
    """One rank of a fake process group, hosts of ``per_host`` ranks, fake CUDA tensors and a simulator."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    try:
        with (
            mock.patch.dict("os.environ", LOCAL_WORLD_SIZE=str(per_host)),
            mock.patch.dict(calls._MIN_CHUNK_BYTES, cuda=1),
            mock.patch.dict(head_exchange.MIN_CHUNK_WORK, cuda=1),
            fake_cuda(),
            torch.no_grad(),
            simulated() as simulator,
            mock.patch.dict(kernels.BACKENDS, {"simulated": Kernels(simulator)}, clear=True),
        ):
            yield simulator
    finally:
        dist.destroy_process_group()


def attend(
    simulator: Simulator,
    layers: int = 2,
    mask: str | seqpar.Mask = "full",
    tokens: int = 16 * WORLD,
    layout: str = "zigzag",
    restored: bool = False,
    **options: Any,
) -> None:
    """Forward and backward of some layers; ``restored`` makes the saved tensors anew before backward."""
    options = {"group": dist.group.WORLD, "backend": "simulated", **options}
    masks = {
        "full": seqpar.Mask.full(),
        "causal": seqpar.Mask.causal(),
        "documents": seqpar.Mask.documents([0, 50, 60, tokens]),
        "by heads": seqpar.Mask.by_heads([seqpar.Mask.full(), seqpar.Mask.sliding_window(40, 9)]),
    }
    sharding = seqpar.Sharding(tokens, layout, **{k: x for k, x in options.items() if k in ("mesh", "group")})
    contexts: list[Any] = []

    def forward(*args: Any) -> Any:
        """Autograd's part: PyTorch's own cannot record tensors of a device that the machine lacks."""
        context: Any = SimpleNamespace(
            set_materialize_grads=lambda on: None, mark_non_differentiable=lambda *tensors: None
        )
        context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
        contexts.append(context)
        return operators._DifferentiableAttention.forward(context, *args)

    with (
        mock.patch.object(operators, "attention_in_eager", forward),
        mock.patch("seqpar.strategies.operators._get_current_dispatch_mode", return_value=None),
    ):
        for _ in range(layers):
            q, k, v = (torch.empty(1, tokens // WORLD, n, 4, device="cuda", dtype=torch.bfloat16) for n in (64, 32, 32))
            simulator.run("projections", [], [q, k, v])
            out = seqpar.attention(
                q, k, v, mask=masks[mask] if isinstance(mask, str) else mask, sharding=sharding, **options
            )
            del q, k, v
            simulator.run("after attention", [out], [torch.empty_like(out)])
        while contexts:
            dout = torch.empty_like(out)
            simulator.run("before backward", [], [dout])
            context = contexts.pop()
            if restored:
                context.saved_tensors = tuple(None if x is None else x.clone() for x in context.saved_tensors)
            gradients = operators._DifferentiableAttention.backward(context, dout, None)
            del context
            simulator.run("weight gradients", [x for x in gradients if x is not None], [torch.empty_like(out)])


STRATEGIES: dict[str, dict[str, Any]] = {
    "ring": {"strategy": "ring"},
    "all_gather": {"strategy": "context_parallel", "comm": "all_gather"},
    "chunks": {"strategy": "context_parallel", "chunks": 4},
    "ulysses": {"strategy": "ulysses"},
    "hybrid": {"strategy": "hybrid", "ulysses_size": 2},
}


CASES = [
    ("ring", "full", 8), ("ring", "causal", 4), ("ring", "documents", 2), ("all_gather", "full", 8),
    ("all_gather", "documents", 8), ("chunks", "full", 2), ("chunks", "causal", 2), ("ulysses", "causal", 8),
    ("hybrid", "causal", 8), ("ring", "by heads", 4), ("all_gather", "by heads", 8), ("chunks", "by heads", 2),
    ("hybrid", "by heads", 8),
]  # fmt: skip


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_new_masks_need_no_new_memory(strategy: str) -> None:
    """Windows of 33 to 64 tokens, shards of 64: the messages of each window use the memory of the messages before."""
    allocated = []
    with one_rank(WORLD) as simulator:
        for window in range(33, 65, 3):
            mask = seqpar.Mask.causal(window=window)
            attend(simulator, layers=1, mask=mask, tokens=64 * WORLD, layout="contiguous", **STRATEGIES[strategy])
            allocated.append(simulator.allocated["messages"])
    assert allocated[0] and len(set(allocated[1:])) == 1, allocated


def test_an_all_gather_has_the_keys_of_two_chunks() -> None:
    """Of eight chunks, forward and backward: the messages of a chunk use the memory of the chunk two before."""
    with one_rank(WORLD) as simulator:
        attend(simulator, layers=1, mask="documents", strategy="context_parallel", chunks=8)
        chunk = 2 * 16 * WORLD * 4 * 4 * 2  # bytes of k and v [tokens, 4 of 32 heads, head_dim 4] in bfloat16
        assert simulator.allocated["messages"] == 2 * chunk


@pytest.mark.slow
@pytest.mark.thorough(strategy=["all_gather", "chunks", "hybrid"])
@pytest.mark.parametrize(("strategy", "mask", "per_host"), CASES)
def test_memory_is_used_in_order(strategy: str, mask: str, per_host: int) -> None:
    with one_rank(per_host) as simulator:
        attend(simulator, mask=mask, **STRATEGIES[strategy])
        assert simulator.named("attend") and simulator.named("gradients")


def test_transfers_wait_for_nothing_but_their_keys() -> None:
    """A ring of 8: what each transfer is ordered after, in forward and in backward."""
    with one_rank(WORLD) as simulator:
        attend(simulator, layers=1, strategy="ring")
        kernels, transfers = simulator.named("attend"), simulator.named("messages")
        (after,), (before_backward,) = simulator.named("after attention"), simulator.named("before backward")
        backward = [node for node in simulator.nodes if node.name == "gradients"]
        forward_transfers = [t for t in transfers if simulator.nodes.index(t) < simulator.nodes.index(after)]
        assert len(kernels) == len(forward_transfers) + 1 == WORLD
        for i, transfer in enumerate(forward_transfers, start=1):
            assert kernels[i].is_after(transfer)  # which reads what it brings
            assert not any(kernel.is_after(transfer) for kernel in kernels[:i])  # the others run meanwhile
            # From the fifth on, the memory of the step four before is used again. No later kernel is waited for.
            assert [transfer.is_after(kernel) for kernel in kernels] == [i > 4 and j <= i - 4 for j in range(WORLD)]
        early = transfers[len(forward_transfers) : len(forward_transfers) + 3]
        for transfer in early:  # backward sends the keys of forward
            assert not transfer.is_after(before_backward) and not transfer.is_after(after)
            assert not backward[0].is_after(transfer)


def test_chunks_of_ulysses_wait_for_no_kernel_behind_them() -> None:
    """Four chunks, forward: q, k and v of all chunks arrive while the output of others is sent back."""
    with one_rank(WORLD) as simulator:
        attend(simulator, layers=1, strategy="ulysses")
        kernels, exchanges = simulator.named("attend"), simulator.named("all-to-all")
        assert len(kernels) == 4
        incoming = [max(i for i, x in enumerate(exchanges) if kernel.is_after(x)) for kernel in kernels]
        assert incoming == [0, 1, 2, 4]  # then 3, 5, 6 and 7 are the outputs
        for number, index in enumerate(incoming):
            after = [exchanges[index].is_after(kernel) for kernel in kernels]
            assert after == [i <= number - 3 for i in range(4)]


def test_ulysses_holds_the_messages_of_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four chunks, in forward and in backward: what was sent two chunks ago is waited for, and freed."""
    held, most = list[Any](), 0
    send, wait = head_exchange.HeadExchange.to_sequence, head_exchange.Incoming.wait

    def counted_send(*args: Any) -> Any:
        nonlocal most
        held.append(send(*args))
        most = max(most, len(held))
        return held[-1]

    def counted_wait(self: head_exchange.Incoming) -> Tensor:
        held[:] = [x for x in held if x is not self]
        return wait(self)

    monkeypatch.setattr(head_exchange.HeadExchange, "to_sequence", counted_send)
    monkeypatch.setattr(head_exchange.Incoming, "wait", counted_wait)
    with one_rank(WORLD) as simulator:
        attend(simulator, layers=1, strategy="ulysses")
        assert len(simulator.named("gradients")) == 4
    assert not held and most <= 2 * 3  # of dq, and of dk and dv


def test_kernels_do_not_wait_for_other_hosts() -> None:
    """The transfers inside a host wait for the rows of other hosts; the kernels launched before those do not."""
    with one_rank(4) as simulator:
        attend(simulator, layers=1, strategy="ring")
        kernels, fetches = simulator.named("attend"), [x for x in simulator.nodes if x.stream == "transfers 0"]
        assert not kernels[1].is_after(fetches[0]) and kernels[2].is_after(fetches[0])
    with one_rank(2) as simulator:
        attend(simulator, layers=1, **STRATEGIES["chunks"])
        kernels, fetches = simulator.named("attend"), [x for x in simulator.nodes if x.stream == "transfers 0"]
        for chunk in range(4):
            kernel = kernels[1 + chunk]
            assert kernel.is_after(fetches[chunk]) and not kernel.is_after(fetches[chunk + 1])


def test_restored_tensors_are_sent_when_they_are_there() -> None:
    """Checkpoints and offloading give backward other tensors than forward had."""
    with one_rank(WORLD) as simulator:
        attend(simulator, layers=1, restored=True, strategy="ring")
        gradients, before_backward = simulator.named("gradients"), simulator.named("before backward")
        first = next(x for x in simulator.named("messages") if x.is_after(before_backward[0]))
        assert not gradients[0].is_after(first)


@pytest.mark.thorough(strategy=["ulysses"])
@pytest.mark.parametrize("where", ["forward", "backward", "packing"])
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_memory_is_used_in_order_after_an_error(strategy: str, where: str) -> None:
    """The third kernel, or the third message, raises; the caller catches the error and calls again."""
    owner, name = (transport.Message, "__init__") if where == "packing" else (Kernels, where)
    real, calls_left = getattr(owner, name), 3

    def raises(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls_left
        calls_left -= 1
        if not calls_left:
            raise MemoryError
        return real(*args, **kwargs)

    with one_rank(WORLD) as simulator, mock.patch.object(owner, name, raises):
        with pytest.raises(MemoryError) if strategy == "ring" or where != "packing" else nullcontext():
            attend(simulator, strategy=strategy)
        sent = len(simulator.named("messages"))
        gc.collect()
        attend(simulator, strategy=strategy)
        assert strategy == "ulysses" or len(simulator.named("messages")) > sent


def no_wait_for_transfers(self: waiting.Pending) -> None:
    if self._posted_from is not None:
        self._posted_from.hold(self._buffers)


def no_wait_for_readers(self: streams.TransferStream) -> None:
    self._held.clear()


def nothing_held(self: streams.TransferStream, tensors: Any) -> None:
    pass


def ready_at_once(self: streams.ReadyEvents, *tensors: Tensor) -> Any:
    return Event()


def ready_in_forward(self: streams.ReadyEvents, *tensors: Tensor) -> Any:
    if not self._events:
        self._events[()] = [], torch.cuda.current_stream().record_event()
    return self._events[()][1]


def no_position(self: streams.TransferStream) -> None:
    return None


BROKEN: dict[str, tuple[type, str, Callable[..., Any], str]] = {
    "kernels do not wait for transfers": (waiting.Pending, "wait", no_wait_for_transfers, "reads memory"),
    "memory is used again too early": (streams.TransferStream, "release", no_wait_for_readers, "writes memory"),
    "received messages are not held": (streams.TransferStream, "hold", nothing_held, "writes memory"),
    "transfers do not wait for k and v": (streams.ReadyEvents, "event", ready_at_once, "reads memory"),
    "restored tensors count as forward's": (streams.ReadyEvents, "event", ready_in_forward, "reads memory"),
    "a message to this rank is not waited for": (streams.TransferStream, "position", no_position, "reads memory"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_missing_wait_is_a_race(broken: str) -> None:
    """What the tests above rely on."""
    owner, name, replacement, message = BROKEN[broken]
    with (
        mock.patch.object(owner, name, replacement),
        one_rank(2 if name == "position" else WORLD) as simulator,
        pytest.raises(RaceError, match=message),
    ):
        attend(simulator, restored=replacement is ready_in_forward, strategy="ring")
