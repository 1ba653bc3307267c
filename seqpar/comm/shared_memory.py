"""Messages of CPU tensors between processes of one host through shared memory. It is available on Linux only.

gloo copies a message to a process of the same host into a socket and out of it. The threads that copy it use the same
CPU cores as attention. Here the sender writes the message into memory that the receiver has mapped too, and sends only
a notice of it, three numbers, through a pipe:

    sender      | write the message | send a notice |                 ...                | reuse the memory |
    receiver    |                       ...         | read the message | count it as read |

Each process writes its messages to an anonymous file of its own (``memfd_create``). The file is as long as any message
may be, but only the pages that have been written take memory. Linux deletes it when no process maps it any more.

A pipe holds 64 notices. A sender that is further ahead of a receiver waits; a call of attention sends far fewer.

Set the environment variable SEQPAR_SHARED_MEMORY to 0 to send the messages through gloo. If it is 0 on one rank of a
group, all ranks of the group do so.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import struct
import time
import uuid
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef

from ..base.settings import switch
from ..ranks.mesh import Ranks, global_ranks, host_name, parent_group, rank_in
from ..ranks.rendezvous import LONG_WAIT, group_timeout, is_simulated, own_entry, store_all_gather
from .communicator import PerWorld
from .trace import say_transport
from .waiting import MESSAGES, Message, PeerError, Pending, begin, failure

VARIABLE = "SEQPAR_SHARED_MEMORY"
_CPU = torch.device("cpu")
_SMALLEST_BLOCK = 1 << 16
# Free blocks keep their memory for later messages, up to so many bytes, or up to twice the bytes of the blocks in use.
_SPARE_BYTES = 64 << 20
_NOTICE = struct.Struct("=3q1000x")  # 64 of them fill a pipe
# The addresses that the files of all ranks take in each process, at most. No memory is reserved for them.
_ADDRESSES = 1 << 40

ReceiveMode = Literal["copy", "add", "alias"]


@dataclass
class _Block:
    """A part of this rank's file, for one tensor.

    It begins with an int64 for each rank: how many messages in this block the rank has read.
    """

    start: int
    nbytes: int
    storage: StorageWeakRef | None = None  # of the tensor
    sent: dict[int, int] = field(default_factory=dict)  # by rank: how many messages in this block were sent to it
    has_memory: bool = True


class Notice:
    """A notice that this rank receives from ``peer``, of a message for the receive buffer ``out``."""

    def __init__(self, transport: SharedMemoryTransport, peer: int, out: Tensor, mode: ReceiveMode) -> None:
        self._transport = transport
        self.peer, self.out, self.mode = peer, out, mode
        self.message: tuple[int, int, int] | None = None  # once it has arrived

    def wait(self) -> None:
        """Wait for the notice, and read the message."""
        self._transport.receive(self)


class SharedMemoryTransport:
    """Sends and receives messages between ranks of one host. Like a process group, it is used by one thread at a time.

    Args:
        rank: this rank.
        ranks: the global rank of each rank.
        files: the file of each rank, mapped.
        pipes: the descriptors of a pipe from each rank, and of a pipe to each rank.
        timeout: how long a wait may take.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        files: Sequence[mmap.mmap],
        pipes: tuple[Sequence[int], Sequence[int]],
        timeout: timedelta,
    ) -> None:
        self.ranks = ranks
        self._rank, self._timeout = rank, timeout
        self._incoming, self._outgoing = pipes
        weakref.finalize(self, _close, pipes)
        self._expected: list[deque[Notice]] = [deque() for _ in ranks]  # by peer: notices that have not arrived
        self._files, self._file = files, files[rank]
        self._words = [memoryview(file).cast("q") for file in files]
        self._header = -(-8 * len(files) // 64) * 64  # bytes of a block before its tensor
        self._address = torch.frombuffer(self._file, dtype=torch.uint8, count=1).data_ptr() + self._header
        self._blocks: dict[int, _Block] = {}  # by start
        self._of_size: dict[int, dict[int, _Block]] = {}  # by bytes, then by start
        self._end = _SMALLEST_BLOCK  # of the last block
        # Messages of other ranks in whose memory tensors of this rank are: their storages, and the message's word.
        self._aliases: list[tuple[StorageWeakRef, int, int]] = []

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor ``[numel]``, which is sent without a copy. Do not write to it afterwards."""
        if not numel:
            return torch.empty(0, dtype=dtype, device=_CPU)
        block = self._free_block(self._header + numel * dtype.itemsize)
        tensor = torch.frombuffer(self._file, dtype=dtype, count=numel, offset=block.start + self._header)
        block.storage = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def share(self, x: Tensor) -> Tensor:
        """``x``, contiguous and not empty, in shared memory: a copy, unless ``empty`` made it."""
        return x if self._block_of(x) is not None else self.empty(x.numel(), x.dtype).view(x.shape).copy_(x)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], mode: ReceiveMode) -> list[Notice]:
        """Send messages and start to receive others: pairs of a rank and a tensor, contiguous and not empty.

        Returns:
            The notices of the messages that this rank receives. Their ``wait`` copies or adds a message to its tensor
            or, with "alias", replaces the memory of the tensor by the memory of the message, which the sender does not
            reuse as long as a tensor of this rank is in it.
        """
        for peer, x in sends:
            self._send(peer, _NOTICE.pack(*self._message(peer, x)))
        notices = [Notice(self, peer, out, mode) for peer, out in receives]
        for notice in notices:
            self._expected[notice.peer].append(notice)
        return notices

    def receive(self, notice: Notice) -> None:
        """Wait for a notice. The notices of a rank arrive in the order in which they are expected."""
        expected = self._expected[notice.peer]
        while notice.message is None:
            self._wait(notice.peer, self._incoming, select.POLLIN)
            record = os.read(self._incoming[notice.peer], _NOTICE.size)
            if not record:
                raise PeerError(notice.peer, "the rank has ended")
            expected.popleft().message = _NOTICE.unpack(record)
        self._read(notice.peer, notice.out, notice.mode, *notice.message)

    def _send(self, peer: int, record: bytes) -> None:
        while True:
            try:
                os.write(self._outgoing[peer], record)
                return
            except BlockingIOError:
                self._wait(peer, self._outgoing, select.POLLOUT)
            except BrokenPipeError:
                raise PeerError(peer, "the rank has ended") from None

    def _wait(self, peer: int, pipes: Sequence[int], event: int) -> None:
        poll = select.poll()
        poll.register(pipes[peer], event)
        first, limit = min(LONG_WAIT, self._timeout).total_seconds(), self._timeout.total_seconds()
        if not poll.poll(first * 1000):
            own_entry.write(MESSAGES)
            if not poll.poll((limit - first) * 1000):
                raise PeerError(peer, f"timed out after {limit:.0f} s")

    def _read(self, peer: int, out: Tensor, mode: ReceiveMode, block: int, start: int, nbytes: int) -> None:
        """Read a message that has arrived: ``nbytes`` from ``start`` in a block of the file of ``peer``."""
        if nbytes != out.nbytes:
            raise ValueError(
                f"rank {self.ranks[peer]} has sent {nbytes:,} bytes, but this rank expects {out.nbytes:,}; make "
                "the same calls on all ranks"
            )
        file, word = self._files[peer], block // 8 + self._rank
        message = torch.frombuffer(file, dtype=out.dtype, count=out.numel(), offset=start).view(out.shape)
        if mode == "alias":
            storage = message.untyped_storage()
            out.set_(storage, message.storage_offset(), message.shape, message.stride())
            self._aliases.append((StorageWeakRef(storage), peer, word))
            return
        if mode == "add":
            out.add_(message)
        else:
            out.copy_(message)
        self._words[peer][word] += 1

    def _message(self, peer: int, x: Tensor) -> tuple[int, int, int]:
        """Where the message ``x`` to ``peer`` is: its block and its start in this rank's file, and its bytes."""
        x = self.share(x)
        block = self._block_of(x)
        assert block is not None
        block.sent[peer] = block.sent.get(peer, 0) + 1
        return block.start, x.data_ptr() - self._address + self._header, x.nbytes

    def _block_of(self, x: Tensor) -> _Block | None:
        return self._blocks.get(x.untyped_storage().data_ptr() - self._address)

    def _unread(self, block: _Block, peer: int) -> int:
        return block.sent.get(peer, 0) - self._words[self._rank][block.start // 8 + peer]

    def _is_free(self, block: _Block) -> bool:
        unused = block.storage is None or block.storage.expired()
        return unused and not any(self._unread(block, peer) for peer in block.sent)

    def _free_block(self, nbytes: int) -> _Block:
        """A free block of at least ``nbytes`` bytes."""
        size = max(_SMALLEST_BLOCK, 1 << (nbytes - 1).bit_length())
        self._release_aliases()
        of_size = self._of_size.setdefault(size, {})
        for block in of_size.values():  # the first free one, so that the last ones stay unused, and without memory
            if self._is_free(block):
                block.has_memory = True
                return block
        free = [block for block in self._blocks.values() if self._is_free(block)]
        spare = sum(block.nbytes for block in free if block.has_memory)
        used = sum(block.nbytes for block in self._blocks.values() if block.has_memory) - spare + size
        for block in free:
            if block.has_memory and spare > max(_SPARE_BYTES, 2 * used):
                self._file.madvise(mmap.MADV_REMOVE, block.start, block.nbytes)
                block.has_memory = False
                block.sent.clear()
                spare -= block.nbytes
        if self._end + size > len(self._file):
            raise RuntimeError(f"attention's messages take more than {len(self._file):,} bytes of shared memory")
        block = self._blocks[self._end] = of_size[self._end] = _Block(self._end, size)
        self._end += size
        return block

    def _release_aliases(self) -> None:
        """Count the messages as read that no tensor of this rank is in any more."""
        aliases, self._aliases = self._aliases, []
        for storage, peer, word in aliases:
            if storage.expired():
                self._words[peer][word] += 1
            else:
                self._aliases.append((storage, peer, word))


def share_messages(
    ranks: Ranks,
    memory: SharedMemoryTransport,
    sends: Sequence[Message],
    receives: Sequence[Message],
    mode: ReceiveMode,
    buffers: Sequence[Tensor],
) -> Pending:
    """Start ``memory.exchange``. ``buffers`` are what the messages hold until they have arrived."""
    begin()
    began = time.monotonic()
    try:
        works = memory.exchange(sends, receives, mode)
    except PeerError as error:
        raise failure(MESSAGES, ranks, error, began) from error
    return Pending(works, buffers, ranks, [peer for peer, _ in receives])


# By global ranks, and whether SEQPAR_SHARED_MEMORY is on.
_transports: PerWorld[tuple[tuple[int, ...], bool], SharedMemoryTransport | None] = PerWorld()


def shared_memory(ranks: Ranks, device: torch.device) -> SharedMemoryTransport | None:
    """The shared memory of ``ranks``. None if they exchange tensors on ``device`` through a process group: tensors on a
    GPU, over several hosts, with a backend other than gloo, or if SEQPAR_SHARED_MEMORY is 0.

    The first call with these ranks is collective: all of them must make it, in the same order among such calls.
    """
    if device.type != "cpu" or is_simulated():
        return None
    transports, wanted = _transports.cache(), switch(VARIABLE)
    key = global_ranks(ranks), wanted
    if key not in transports:
        transports[key] = _connect(ranks, wanted)
        say_transport(ranks, transports[key] is not None, wanted)
    return transports[key]


def _connect(ranks: Ranks, wanted: bool) -> SharedMemoryTransport | None:
    parent, members, rank = parent_group(ranks), global_ranks(ranks), rank_in(ranks)
    if type(parent) is not ProcessGroup or parent._get_backend(_CPU).name() != "gloo":
        return None
    purpose, timeout = "the first messages on a host", group_timeout(parent)
    with ExitStack() as until_open:
        file = _new_file(_ADDRESSES // len(members) // _SMALLEST_BLOCK * _SMALLEST_BLOCK) if wanted else None
        entry = None
        incoming, outgoing = list[int](), list[int]()
        if file is not None:
            descriptor, mapped = file
            mark = uuid.uuid4().hex
            mapped[: len(mark)] = mark.encode()
            until_open.callback(os.close, descriptor)
            for _ in members:
                read_end, write_end = os.pipe()
                incoming.append(read_end)
                outgoing.append(write_end)
                until_open.callback(os.close, write_end)
            entry = [host_name(), os.getpid(), mark, descriptor, outgoing]
        entries = [json.loads(text) for text in store_all_gather(purpose, members, json.dumps(entry), timeout)]
        same_host = all(entries) and len({host for host, *_ in entries}) == 1
        opened = [
            _open(process, mark, file, pipes[rank]) for _, process, mark, file, pipes in (entries if same_host else ())
        ]
        files = [x for x in opened if x]
        ready = len(files) == len(members)
        answers = store_all_gather(purpose, members, str(ready), timeout)
    pipes = incoming, [pipe for _, pipe in files]
    if all(answer == "True" for answer in answers):
        return SharedMemoryTransport(rank, members, [file for file, _ in files], pipes, timeout)
    _close(pipes)
    return None


def _close(pipes: Iterable[Iterable[int]]) -> None:
    for descriptor in chain.from_iterable(pipes):
        os.close(descriptor)


def _new_file(nbytes: int) -> tuple[int, mmap.mmap] | None:
    """An anonymous file, as its descriptor and mapped. None if the operating system or a container has none."""
    try:
        descriptor = os.memfd_create("seqpar", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        return None
    try:
        os.ftruncate(descriptor, nbytes)
        return descriptor, mmap.mmap(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        return None


def _open(process: int, mark: str, file: int, pipe: int) -> tuple[mmap.mmap, int] | None:
    """The file that begins with ``mark``, and the end of a pipe that is written to.

    None in another container, or for a process of another user.
    """
    try:
        with open(f"/proc/{process}/fd/{file}", "r+b", buffering=0) as f:
            mapped = mmap.mmap(f.fileno(), 0)
        if mapped[: len(mark)] != mark.encode():
            return None
        return mapped, os.open(f"/proc/{process}/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
