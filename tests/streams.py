"""A model of CUDA's streams, events and memory, which shows without a GPU what would be a race on a GPU.

Each kernel, copy and transfer is a node. A node runs after the earlier nodes of its stream. If the stream has waited
for an event of another stream, the node also runs after the nodes that the other stream had when the event was
recorded. Each node has a vector clock with the number of nodes of each stream that it runs after.

Tensors are fake CUDA tensors. The model allocates their memory like PyTorch's caching allocator: memory belongs to the
stream on which its tensor was made, and when the host frees the tensor, a new tensor on this stream may get the memory.
The model always reuses memory if it can, which is the worst case.

If two nodes use the same memory, and one of them writes it, they must be ordered. Otherwise the model raises an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqpar.comm import collectives, streams

Clock = dict[str, int]  # for each stream, the number of its nodes that are ordered before a node or an event


class RaceError(AssertionError):
    """Two nodes use the same memory and are not ordered."""


@dataclass(frozen=True, eq=False)
class Node:
    """A kernel, copy or transfer on a stream.

    Attributes:
        name: what it does.
        stream: the name of the stream.
        number: its index among the nodes of the stream.
        before: the nodes that are ordered before it.
    """

    name: str
    stream: str
    number: int
    before: Clock

    def is_after(self, other: Node) -> bool:
        """Whether ``other`` has always ended when this node starts."""
        return self.before.get(other.stream, 0) > other.number


@dataclass(eq=False)
class Event:
    """An event. ``clock`` is the clock of its stream when the event was recorded."""

    clock: Clock = field(default_factory=dict)


@dataclass(eq=False)
class Stream:
    """A queue of nodes."""

    name: str
    clock: Clock = field(default_factory=dict)

    @property
    def cuda_stream(self) -> int:
        """A number that identifies the stream, named as in ``torch.cuda.Stream``."""
        return id(self)

    def record_event(self) -> Event:
        return Event(dict(self.clock))

    def synchronize(self) -> None:
        """Does nothing: it makes the host wait, but orders no nodes."""

    def wait_event(self, event: Event) -> None:
        for name, count in event.clock.items():
            self.clock[name] = max(self.clock.get(name, 0), count)


@dataclass(eq=False)
class Memory:
    """A block of memory, which belongs to one tensor at a time.

    Attributes:
        stream: the name of the stream on which the memory was allocated.
        nbytes: its size in bytes.
        written: the last node that wrote it.
        read: the nodes that have read it since then.
    """

    stream: str
    nbytes: int
    written: Node | None = None
    read: list[Node] = field(default_factory=list)


class Work:
    """A transfer. As in torch, it keeps references to its tensors until a stream waits for it."""

    def __init__(self, simulator: Simulator, event: Event, tensors: Sequence[Tensor]) -> None:
        self._simulator, self._event, self._tensors = simulator, event, tensors

    def wait(self) -> None:
        self._simulator.current.wait_event(self._event)
        self._tensors = ()


_MAKES_EMPTY = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}


class Simulator(TorchDispatchMode):
    """Records the operations inside ``with simulated()`` as nodes, and checks their order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = Stream("kernels")
        self.current = self.kernels
        self.nodes: list[Node] = []
        self.allocated: Counter[str] = Counter()  # by stream, the bytes of its blocks, in use or free
        self._transfer_streams: dict[dist.ProcessGroup, Stream] = {}
        self._memory: dict[int, tuple[StorageWeakRef, Memory]] = {}  # by storage
        self._free: list[Memory] = []

    def named(self, name: str) -> list[Node]:
        """The nodes with this name, in the order in which the host launched them."""
        return [node for node in self.nodes if node.name == name]

    def run(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], on: Stream | None = None) -> Node:
        """Launch a node that reads and writes tensors on a stream, by default on the current one."""
        stream = on or self.current
        node = Node(name, stream.name, stream.clock.get(stream.name, 0), dict(stream.clock))
        stream.clock[stream.name] = node.number + 1
        self.nodes.append(node)
        for x in reads:
            if x.numel():
                memory = self.memory_of(x)
                self._check_order(node, "reads", memory.written, "written")
                memory.read.append(node)
        for x in writes:
            if x.numel():
                memory = self.memory_of(x)
                self._check_order(node, "writes", memory.written, "written")
                for reader in memory.read:
                    self._check_order(node, "writes", reader, "read")
                memory.written, memory.read = node, []
        return node

    def transfer(
        self, name: str, group: dist.ProcessGroup, sends: Sequence[Tensor], receives: Sequence[Tensor]
    ) -> Work:
        """Post a transfer on the stream of ``group``. It starts after all nodes of the current stream."""
        stream = self._transfer_streams.setdefault(group, Stream(f"transfers {len(self._transfer_streams)}"))
        stream.wait_event(self.current.record_event())
        self.run(name, sends, receives, stream)
        return Work(self, stream.record_event(), [*sends, *receives])

    def memory_of(self, x: Tensor) -> Memory:
        """The memory of a tensor. The memory of a new tensor is allocated on the current stream."""
        storage = x.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference.cdata not in self._memory:
            self._memory[reference.cdata] = reference, self._allocate(storage.nbytes())
        return self._memory[reference.cdata][1]

    def _allocate(self, nbytes: int) -> Memory:
        for key, (reference, memory) in list(self._memory.items()):
            if reference.expired():
                del self._memory[key]
                self._free.append(memory)
        for memory in reversed(self._free):
            if memory.stream == self.current.name and memory.nbytes >= nbytes:
                self._free.remove(memory)
                return memory
        self.allocated[self.current.name] += nbytes
        return Memory(self.current.name, nbytes)

    @staticmethod
    def _check_order(node: Node, does: str, other: Node | None, done: str) -> None:
        if other not in (None, node) and not node.is_after(other):
            raise RaceError(
                f"{node.name!r} on {node.stream!r} {does} memory that is {done} by {other.name!r} on {other.stream!r}, "
                "and is not ordered after it"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = (
            [x for x in tree_leaves(y) if isinstance(x, Tensor) and x.device.type == "cuda"]
            for y in ((args, kwargs), result)
        )
        writes = [
            x
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for x in tree_leaves(value)
            if isinstance(x, Tensor) and x.device.type == "cuda"
        ]
        writes += [x for name, x in (kwargs or {}).items() if name == "out" and isinstance(x, Tensor)]
        known = {x.untyped_storage()._cdata for x in inputs}
        new = [x for x in outputs if x.untyped_storage()._cdata not in known]
        for x in new:
            self.memory_of(x)
        name = func._schema.name.removeprefix("aten::")
        to_host = name == "copy_" and bool(inputs)  # the host's memory is not modelled, but the copy reads the device's
        if name not in _MAKES_EMPTY and (writes or new or to_host):
            self.run(func._schema.name, inputs, [*writes, *new])
        return result

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@contextmanager
def simulated() -> Iterator[Simulator]:
    """In the block, torch.cuda and torch.distributed use the streams, events and transfers of the simulator.

    It must be entered inside ``fake_cuda``.
    """
    simulator = Simulator()

    def on_gpu(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The collective ``real(output, input)``, simulated for tensors on the GPU."""

        def collective(output: Tensor, x: Tensor, *args: Any, group: Any = None, **options: Any) -> Any:
            if x.device.type != "cuda":
                return real(output, x, *args, group=group, **options)
            work = simulator.transfer(name, group, [x], [output])
            return work if options.get("async_op") else work.wait()

        return collective

    def batch(operations: list[dist.P2POp]) -> list[Work]:
        sends = [op.tensor for op in operations if op.op is dist.isend]
        receives = [op.tensor for op in operations if op.op is dist.irecv]
        group = operations[0].group
        assert group is not None
        return [simulator.transfer("messages", group, sends, receives)]

    cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (9, 0),
        "current_stream": lambda *_: simulator.current,
        "stream": simulator.stream,
        "Stream": lambda *_, priority: Stream("messages"),
    }
    patches = [
        mock.patch.multiple(torch.cuda, **cuda),
        # torch 2.11 makes a real tensor for the first fake one, if a GPU is available.
        mock.patch("torch._subclasses.fake_tensor.init_gpu_context"),
        mock.patch.object(dist, "batch_isend_irecv", batch),
        mock.patch.object(collectives, "all_to_all_single", on_gpu(collectives.all_to_all_single, "all-to-all")),
        mock.patch.object(collectives, "all_gather_single", on_gpu(collectives.all_gather_single, "all-gather")),
        mock.patch.object(
            collectives, "reduce_scatter_single", on_gpu(collectives.reduce_scatter_single, "reduce-scatter")
        ),
    ]
    streams._stream_of.cache_clear()
    for patch in patches:
        patch.start()
    try:
        with simulator:
            yield simulator
    finally:
        for patch in patches:
            patch.stop()
        streams._stream_of.cache_clear()
