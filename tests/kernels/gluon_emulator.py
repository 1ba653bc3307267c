"""Runs the source of a Gluon kernel on the CPU: its arithmetic in PyTorch, its barriers as the hardware has them.

Each role of a warp-specialized kernel is a thread. One runs at a time, and before every operation on shared memory the
next one is drawn at random. A copy by TMA tears its slot at once and fills it later, when it is drawn. A product reads
its tiles until it is waited for. So a run fails, with a sentence that says why, if all roles wait for each other, if a
slot is rewritten while a product reads it, if a product reads a slot before the copy has arrived, or if a result is
used before its product has ended.

Scalars are tensors without dimensions, of 32 or 64 bits as on the GPU, and offsets overflow as they do there.
"""

from __future__ import annotations

import ast
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Barrier:
    """An mbarrier: a phase ends when all arrivals have come, and all bytes that they announced."""

    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phase = 0

    def arrive(self) -> None:
        assert self.left > 0, "more arrivals than a barrier expects"
        self.left -= 1
        self.end_phase()

    def end_phase(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = 1 - self.phase, self.count


class Slot:
    """A tile in shared memory."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.data = torch.full(shape, torch.nan, dtype=dtype)
        self.readers, self.full, self.arriving = 0, False, False


class View:
    """A tile in shared memory as a kernel names it."""

    def __init__(self, slot: Slot, data: Tensor) -> None:
        self.slot, self.data = slot, data

    def reshape(self, shape: Sequence[int]) -> View:
        return View(self.slot, self.data.view(shape))

    def permute(self, axes: Sequence[int]) -> View:
        return View(self.slot, self.data.permute(*axes))


class Array:
    """Barriers or tiles side by side in shared memory."""

    def __init__(self, items: list[Any], dtype: Any) -> None:
        self.items, self.dtype = items, dtype

    def index(self, i: Any) -> Any:
        return self.items[int(i)]


class Product:
    """A product that runs: its result does not exist yet."""

    def __init__(self, a: Tensor | View, b: View, acc: Tensor, use_acc: bool) -> None:
        assert isinstance(acc, Tensor), "an accumulator is used before its product has ended"
        self.operands, self.acc = (a, b), acc if use_acc else torch.zeros_like(acc)
        self.result: Tensor | None = None
        for x in self.views():
            assert x.slot.full, "a product reads a slot before its copy has arrived"
            x.slot.readers += 1

    def views(self) -> list[View]:
        return [x for x in self.operands if isinstance(x, View)]

    def end(self) -> None:
        a, b = (x.data if isinstance(x, View) else x for x in self.operands)
        assert isinstance(a, Tensor) and a.dtype == b.dtype, "the factors have two dtypes"
        self.result = self.acc + a.float() @ b.float()
        for x in self.views():
            x.slot.readers -= 1


class Pointer:
    """Pointers into a tensor's memory."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + (offset.long() if isinstance(offset, Tensor) else offset))

    def at(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        offsets = torch.as_tensor(self.offset)
        offsets, mask = torch.broadcast_tensors(offsets, torch.tensor(True) if mask is None else mask)
        inside = (offsets >= 0) & (offsets < len(self.memory))
        assert bool((inside | ~mask).all()), "an address outside of the tensor's memory"
        return offsets, mask


class Role:
    """A role of the kernel in a thread of its own."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.turn, self.done = threading.Semaphore(0), False
        self.passes: Callable[[], bool] = lambda: True
        self.products: list[Product] = []
        self.thread = threading.Thread(target=self.main, args=(run,), daemon=True)
        self.error: BaseException | None = None

    def main(self, run: Callable[[], object]) -> None:
        self.turn.acquire()
        try:
            run()
            assert not self.products, "a role ends before its products"
        except BaseException as error:
            self.error = error
        self.done = True
        Program.now.turn.release()


class Stop(BaseException):
    """Ends the other roles after an error in one."""


class Program:
    """One program of the grid: its roles, the copies under way, and the order in which products were started."""

    now: Program

    def __init__(self, index: int, chance: random.Random) -> None:
        self.index, self.chance = index, chance
        self.turn, self.stopped = threading.Semaphore(0), False
        self.roles: list[Role] = []
        self.running: Role
        self.copies: list[Callable[[], None]] = []
        self.started: list[tuple[int, bool]] = []  # of each product, the role, and whether it adds to an accumulator
        Program.now = self

    def specialize(self, roles: Sequence[tuple[Callable[..., object], tuple[Any, ...]]], *_: object) -> None:
        self.roles = [Role(partial(function, *arguments)) for function, arguments in roles]
        for role in self.roles:
            role.thread.start()
        # Some roles and the copies are slower than others, in every run other ones.
        weights = [self.chance.random() ** 2 + 0.02 for _ in range(len(self.roles) + 1)]
        try:
            while not all(role.done for role in self.roles):
                able = [i for i, role in enumerate(self.roles) if not role.done and role.passes()]
                able += [len(self.roles)] * bool(self.copies)
                assert able, "deadlock: every role waits"
                (chosen,) = self.chance.choices(able, [weights[i] for i in able])
                if chosen == len(self.roles):
                    self.copies.pop(self.chance.randrange(len(self.copies)))()
                    continue
                self.resume(self.roles[chosen])
            assert not self.copies, "the program ends before its copies"
        finally:
            self.stopped = True
            for role in self.roles:
                while not role.done:
                    self.resume(role, stop=True)

    def resume(self, role: Role, stop: bool = False) -> None:
        self.running = role
        role.turn.release()
        self.turn.acquire()
        if role.error is not None and not stop:
            raise role.error

    def pause(self, passes: Callable[[], bool] = lambda: True) -> None:
        """Let other roles run, until this one is drawn again and ``passes``."""
        role = self.running
        role.passes = passes
        self.turn.release()
        role.turn.acquire()
        if self.stopped:
            raise Stop


def _load(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
    offsets, inside = pointer.at(mask)
    found = pointer.memory[torch.where(inside, offsets, 0)]
    return found if mask is None else torch.where(inside, found, other)


def _store(pointer: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
    assert value.dtype == pointer.memory.dtype
    offsets, mask = pointer.at(mask)
    pointer.memory[offsets[mask]] = value[mask]


def _where(condition: Any, x: Any, y: Any) -> Any:
    return torch.where(torch.as_tensor(condition), x, y)


def _extreme(function: Callable[..., Tensor], x: Any, y: Any) -> Tensor:
    return function(*(torch.as_tensor(each) for each in (x, y)))


def _shared(dtype: torch.dtype, shape: Sequence[int], layout: object) -> Array:
    if dtype == torch.int64:
        return Array([Barrier() for _ in range(shape[0])], dtype)
    slots = [Slot(shape[1:], dtype) for _ in range(shape[0])]
    return Array([View(slot, slot.data) for slot in slots], dtype)


def _initialize(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.left = count


def _wait(barrier: Barrier, phase: Any) -> None:
    Program.now.pause(lambda: barrier.phase != int(phase))


def _arrive(barrier: Barrier, count: int) -> None:
    Program.now.pause()
    barrier.arrive()


def _expect(barrier: Barrier, bytes: int) -> None:
    Program.now.pause()
    barrier.bytes += bytes
    barrier.arrive()


class Descriptor:
    """A TMA descriptor: the whole tensor, and the box that one copy loads."""

    def __init__(self, made: Any) -> None:
        self.tensor = torch.as_strided(made.base, made.shape, made.strides)
        self.box, self.dtype, self.layout = made.block_shape, made.base.dtype, made.layout
        nbytes = made.base.element_size()
        for size in self.box:
            nbytes *= size
        self.block_type = SimpleNamespace(nbytes=nbytes)


def _copy(descriptor: Descriptor, start: Sequence[Any], barrier: Barrier, to: View) -> None:
    program, slot = Program.now, to.slot
    program.pause()
    assert slot.readers == 0, "a slot is rewritten while a product reads it"
    assert not slot.arriving, "two copies into one slot"
    slot.data.fill_(torch.nan)
    slot.full, slot.arriving = False, True

    def arrive() -> None:
        slot.data.zero_()  # what is outside of the tensor
        spans = [
            (max(0, int(at)), min(size, int(at) + box))
            for at, size, box in zip(start, descriptor.tensor.shape, descriptor.box, strict=True)
        ]
        if all(first < last for first, last in spans):
            place = tuple(slice(a - int(at), b - int(at)) for (a, b), at in zip(spans, start, strict=True))
            slot.data[place] = descriptor.tensor[tuple(slice(*span) for span in spans)]
        slot.full, slot.arriving = True, False
        barrier.bytes -= descriptor.block_type.nbytes
        barrier.end_phase()

    program.copies.append(arrive)


def _multiply(a: Tensor | View, b: View, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Product:
    program = Program.now
    program.pause()
    program.started.append((program.roles.index(program.running), use_acc))
    product = Product(a, b, acc, use_acc)
    program.running.products.append(product)
    return product


def _wait_products(running: int, deps: Sequence[Any]) -> Any:
    Program.now.pause()
    products = Program.now.running.products
    while len(products) > running:
        products.pop(0).end()
    results = tuple(x.result if isinstance(x, Product) else x for x in deps)
    assert not any(x is None for x in results), "a result is used before its product has ended"
    return results[0] if len(results) == 1 else results


def _nothing(*_: object, **__: object) -> None: ...


_LANGUAGE = SimpleNamespace(
    **{name: getattr(torch, name) for name in ("float32", "int32", "int64", "exp2", "log2")},
    where=_where,
    minimum=partial(_extreme, torch.minimum),
    maximum=partial(_extreme, torch.maximum),
    max=lambda x, axis: x.amax(axis),
    sum=lambda x, axis: x.sum(axis),
    cdiv=lambda x, y: (x + y - 1) // y,
    arange=lambda start, stop, layout: torch.arange(start, stop, dtype=torch.int32),
    full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
    zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    convert_layout=lambda x, layout: x,
    load=_load,
    store=_store,
    static_range=range,
    program_id=lambda axis: torch.tensor(Program.now.index, dtype=torch.int32),
    allocate_shared_memory=_shared,
    warp_specialize=lambda *arguments: Program.now.specialize(*arguments),
    **dict.fromkeys(("NVMMADistributedLayout", "SliceLayout", "DotOperandLayout"), _nothing),
)
_MEANINGS = {
    "gl": _LANGUAGE,
    "tl": _LANGUAGE,
    "mbarrier": SimpleNamespace(init=_initialize, wait=_wait, arrive=_arrive, expect=_expect, MBarrierLayout=_nothing),
    "async_load": _copy,
    "fence_async_shared": _nothing,
    "warpgroup_mma": _multiply,
    "warpgroup_mma_wait": _wait_products,
}


def functions(module: ModuleType, edits: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """The functions that a module compiles for the GPU, as functions of Python, after ``edits`` of their source."""
    text = Path(str(module.__file__)).read_text()
    for old, new in edits:
        assert old in text, f"not in the source: {old}"
        text = text.replace(old, new)
    tree = ast.parse(text)
    compiled = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.decorator_list]
    for function in compiled:
        function.decorator_list, function.returns = [], None
        for argument in function.args.args:
            argument.annotation = None
    known = {name: getattr(value, "value", value) for name, value in vars(module).items()}  # of a constexpr, the number
    known |= {name: _kernel_of_another_module(value) for name, value in known.items() if _is_compiled(value)}
    known |= _MEANINGS
    exec(compile(ast.Module(compiled, []), str(module.__file__), "exec"), known)
    return known


def _is_compiled(value: object) -> bool:
    return hasattr(value, "fn") and hasattr(value, "arg_names")


def _kernel_of_another_module(kernel: Any) -> Any:
    """A function that a Gluon module takes from a Triton module."""
    function = kernel.fn
    known = function.__globals__ | _MEANINGS
    return type(function)(function.__code__, known, function.__name__, function.__defaults__)


def run(launch: Any, known: dict[str, Any], seed: int = 0) -> list[Program]:
    """Run all programs of a launch. ``known`` are its functions, from :func:`functions`."""
    arguments = {}
    for name in launch.kernel.arg_names:
        value = launch.arguments[name]
        if hasattr(value, "block_shape"):
            value = Descriptor(value)
        elif isinstance(value, Tensor):
            length = value.untyped_storage().nbytes() // value.element_size() - value.storage_offset()
            value = Pointer(value.as_strided((length,), (1,), value.storage_offset()))
        elif isinstance(value, int):
            value = torch.tensor(value, dtype=torch.int32 if abs(value) < 2**31 else torch.int64)
        arguments[name] = value
    chance = random.Random(seed)
    programs = []
    for index in range(launch.grid):
        programs.append(Program(index, chance))
        known[launch.kernel.fn.__name__](**arguments)
    return programs
