"""Messages of CPU tensors between processes of one host through shared memory. It is available on Linux only.

gloo copies a message to a process of the same host into a socket and out of it. The threads that copy it use the same
CPU cores as attention. Here the sender writes the message into memory that the receiver has mapped too, and sends only
a notice of it through a pipe: where the message is, and in which call it is sent (``ranks/calls.py``).

    sender      | write the message | send a notice |                 ...                | reuse the memory |
    receiver    |                       ...         | read the message | count it as read |

Each process writes its messages to an anonymous file of its own (``memfd_create``). The file grows by a segment when a
message has no room in it, and the other processes map a segment at the first message in it. Only the pages that have
been written take memory, and no page is part of a core dump. Linux deletes the file when no process maps it any more.

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
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Literal, NamedTuple
from weakref import WeakSet, finalize

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef

from ..base.settings import switch
from ..ranks.calls import MESSAGES_FAILED, Close, Tag, calls_of, check_tag, current, current_tag
from ..ranks.mesh import Ranks, global_ranks, host_name, parent_group, rank_in
from ..ranks.rendezvous import (
    LONG_WAIT,
    OutOfStepError,
    group_timeout,
    is_simulated,
    own_entry,
    store_all_gather,
    waits_in_vain,
)
from .trace import say_transport
from .waiting import PeerError, PeerTensor, Pending, failure, operation_name

VARIABLE = "SEQPAR_SHARED_MEMORY"
_CPU = torch.device("cpu")
_SMALLEST_BLOCK = 1 << 16
# Of a file. A later segment has at least as many bytes as all segments before it.
_FIRST_SEGMENT = 1 << 26
# Free blocks keep their memory for later messages, up to so many bytes, or up to twice the bytes of the blocks in use.
_SPARE_BYTES = 64 << 20
# A search for a free block goes on until it has found so many, for the next messages.
_FOUND_AT_ONCE = 4
_NOTICE = struct.Struct("=7q968x")  # a _MessagePlace and a tag; 64 notices fill a pipe
# In place of a _MessagePlace: the sender has waited for this rank for a while. If the ranks wait for each other in
# different calls, they notice it so.
_WAITS = [-1] * 5
# In place of the segment, before the rank that has left the call first: the sender has closed its connections.
_LEFT = -2

ReceiveMode = Literal["copy", "add", "alias"]


class _Segment:
    """A part of the file ``descriptor``, mapped."""

    def __init__(self, descriptor: int, start: int, nbytes: int) -> None:
        self.start, self.nbytes, self.used = start, nbytes, 0
        self.memory = mmap.mmap(descriptor, nbytes, offset=start)
        self.memory.madvise(mmap.MADV_DONTDUMP)
        self.words = memoryview(self.memory).cast("q")
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8, count=1).data_ptr()


class _File:
    """The file of a rank, and the segments of it that this process has mapped, by their start."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.segments: dict[int, _Segment] = {}

    def segment(self, start: int, nbytes: int) -> _Segment:
        if start not in self.segments:
            self.segments[start] = _Segment(self.descriptor, start, nbytes)
        return self.segments[start]


@dataclass(eq=False)
class _MemoryBlock:
    """A part of a segment of this rank's file, for one tensor.

    It begins with an int64 for each rank: how many messages in this block the rank has read.
    """

    segment: _Segment
    start: int  # in the segment
    nbytes: int
    sent: array[int]  # for each rank, how many messages in this block were sent to it
    storage: StorageWeakRef | None = None  # of the tensor
    has_memory: bool = True


class _MessagePlace(NamedTuple):
    """Where a message is in the file of its sender."""

    segment: int
    segment_bytes: int
    block: int  # in the segment
    start: int  # in the segment
    nbytes: int


class Notice:
    """A notice that this rank receives from ``peer``, of a message for the receive buffer ``out``."""

    def __init__(self, transport: SharedMemoryTransport, peer: int, out: Tensor, mode: ReceiveMode, tag: Tag) -> None:
        self._transport = transport
        self.peer, self.out, self.mode, self.tag = peer, out, mode, tag
        self.place: _MessagePlace | None = None  # once it has arrived

    def wait(self) -> None:
        """Wait for the notice, and read the message."""
        self._transport.receive(self)


class SharedMemoryTransport:
    """Sends and receives messages between ranks of one host. Like a process group, it is used by one thread at a time.

    Args:
        rank: this rank.
        ranks: the global rank of each rank.
        files: the file of each rank.
        pipes: the descriptors of a pipe from each rank, and of a pipe to each rank.
        descriptors: all descriptors, which the transport closes.
        timeout: how long a wait may take.

    Attributes:
        name: in a ``Trace``.
        reads_in_place: whether messages are read in the memory to which the sender has written them.
    """

    name = "shared memory"
    reads_in_place = True

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        files: Sequence[_File],
        pipes: tuple[Sequence[int], Sequence[int]],
        descriptors: list[int],
        timeout: timedelta,
    ) -> None:
        self.ranks = ranks
        self._rank, self._timeout = rank, timeout
        self._incoming, self._outgoing = pipes
        self.close = finalize(self, _close, descriptors)
        self._expected: list[deque[Notice]] = [deque() for _ in ranks]  # by peer: notices that have not arrived
        self._files = files
        self._header = -(-8 * len(files) // 64) * 64  # bytes of a block before its tensor
        self._blocks: dict[int, _MemoryBlock] = {}  # by the address of the tensor
        # By bytes: the blocks, and these of them that were found to be free.
        self._of_size: dict[int, tuple[list[_MemoryBlock], list[_MemoryBlock]]] = {}
        # Messages of other ranks in whose memory tensors of this rank are: the storage, the words and the word's index.
        self._aliases: list[tuple[StorageWeakRef, memoryview, int]] = []
        _transports.add(self)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor ``[numel]``, which is sent without a copy. Do not write to it afterwards."""
        if not numel:
            return torch.empty(0, dtype=dtype, device=_CPU)
        block = self._free_block(self._header + numel * dtype.itemsize)
        offset = block.start + self._header
        tensor = torch.frombuffer(block.segment.memory, dtype=dtype, count=numel, offset=offset)
        block.storage = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def share(self, x: Tensor) -> Tensor:
        """``x``, contiguous and not empty, in shared memory: a copy, unless ``empty`` made it."""
        return x if self._block_of(x) is not None else self.empty(x.numel(), x.dtype).view(x.shape).copy_(x)

    def exchange(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], mode: ReceiveMode) -> list[Notice]:
        """Send messages and start to receive others: pairs of a rank and a tensor, contiguous and not empty.

        Returns:
            The notices of the messages that this rank receives. Their ``wait`` copies or adds a message to its tensor
            or, with "alias", replaces the memory of the tensor by the memory of the message, which the sender does not
            reuse as long as a tensor of this rank is in it.
        """
        tag = current_tag()
        for peer, x in sends:
            self._send(peer, _NOTICE.pack(*self._place(peer, x), *tag))
        notices = [Notice(self, peer, out, mode, tag) for peer, out in receives]
        for notice in notices:
            self._expected[notice.peer].append(notice)
        return notices

    def receive(self, notice: Notice) -> None:
        """Wait for a notice. The notices of a rank arrive in the order in which they are expected.

        Raises:
            OutOfStepError: the message is one of another call.
        """
        peer, expected = notice.peer, self._expected[notice.peer]
        while notice.place is None:
            try:
                record = os.read(self._incoming[peer], _NOTICE.size)
            except BlockingIOError:
                self._wait(peer, self._incoming, select.POLLIN)
                continue
            if not record:
                raise PeerError(peer, "the rank has ended")
            *place, number, what = _NOTICE.unpack(record)
            if place[0] == _LEFT:
                if (calls := current.get()) is not None:
                    calls.left_by = place[1]
                raise OutOfStepError(f"rank(s) [{place[1]}] of the job left this call by an error; see its traceback")
            if place != _WAITS or number >= notice.tag[0]:
                check_tag(self.ranks[peer], (number, what), expected[0].tag)
            if place != _WAITS:
                expected.popleft().place = _MessagePlace(*place)
        self._read(peer, notice.out, notice.mode, notice.place)

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
        end, told = time.monotonic() + limit, False
        while not poll.poll(first * 1000):
            if not told:
                own_entry.write(operation_name())
                self._tell(peer, _WAITS)
                told = True
            if waits_in_vain.get()(operation_name()):
                raise PeerError(peer, "a rank has left the call")
            if time.monotonic() > end:
                raise PeerError(peer, f"timed out after {limit:.0f} s")

    def _tell(self, peer: int, what: Sequence[int]) -> None:
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._outgoing[peer], _NOTICE.pack(*what, *current_tag()))

    def end(self, left_by: int | None) -> None:
        """Close the pipes and the files (see ``calls.Close``)."""
        if left_by not in (None, MESSAGES_FAILED) and self.close.alive:
            for peer in range(len(self.ranks)):
                self._tell(peer, (_LEFT, left_by, 0, 0, 0))
        self.close()

    def _read(self, peer: int, out: Tensor, mode: ReceiveMode, place: _MessagePlace) -> None:
        """Read a message of ``peer`` that has arrived."""
        if place.nbytes != out.nbytes:
            raise ValueError(
                f"rank {self.ranks[peer]} has sent {place.nbytes:,} bytes, but this rank expects {out.nbytes:,}; make "
                "the same calls on all ranks"
            )
        segment, word = self._files[peer].segment(place.segment, place.segment_bytes), place.block // 8 + self._rank
        whole = torch.frombuffer(segment.memory, dtype=out.dtype, count=out.numel(), offset=place.start)
        message = whole.view(out.shape)
        if mode == "alias":
            storage = message.untyped_storage()
            out.set_(storage, message.storage_offset(), message.shape, message.stride())
            self._aliases.append((StorageWeakRef(storage), segment.words, word))
            return
        if mode == "add":
            out.add_(message)
        else:
            out.copy_(message)
        segment.words[word] += 1

    def _place(self, peer: int, x: Tensor) -> _MessagePlace:
        """Where the message ``x`` to ``peer`` is. Copies it to shared memory if it is not there."""
        if (block := self._block_of(x)) is None:
            x = self.empty(x.numel(), x.dtype).copy_(x.view(-1))
            block = self._block_of(x)
            assert block is not None
        block.sent[peer] += 1
        segment = block.segment
        return _MessagePlace(segment.start, segment.nbytes, block.start, x.data_ptr() - segment.address, x.nbytes)

    def _block_of(self, x: Tensor) -> _MemoryBlock | None:
        return self._blocks.get(x.untyped_storage().data_ptr())

    def _is_free(self, block: _MemoryBlock) -> bool:
        if block.storage is not None and not block.storage.expired():
            return False
        first = block.start // 8
        return block.segment.words[first : first + len(block.sent)] == block.sent

    def _free_block(self, nbytes: int) -> _MemoryBlock:
        """A free block of at least ``nbytes`` bytes."""
        size = max(_SMALLEST_BLOCK, 1 << (nbytes - 1).bit_length())
        self._release_aliases()
        of_size, found = self._of_size.setdefault(size, ([], []))
        if not found:  # the first free ones, so that the last ones stay unused, and without memory
            found += islice((block for block in of_size if self._is_free(block)), _FOUND_AT_ONCE)
            found.reverse()
        if found:
            block = found.pop()
            block.has_memory = True
            return block
        free = [block for block in self._blocks.values() if self._is_free(block)]
        spare = sum(block.nbytes for block in free if block.has_memory)
        used = sum(block.nbytes for block in self._blocks.values() if block.has_memory) - spare + size
        for block in free:
            if block.has_memory and spare > max(_SPARE_BYTES, 2 * used):
                block.segment.memory.madvise(mmap.MADV_REMOVE, block.start, block.nbytes)
                block.has_memory = False
                block.sent = self._none_sent()
                spare -= block.nbytes
        block = self._new_block(size)
        of_size.append(block)
        return block

    def _none_sent(self) -> array[int]:
        return array("q", bytes(8 * len(self._files)))

    def _new_block(self, size: int) -> _MemoryBlock:
        file = self._files[self._rank]
        segment = next(reversed(file.segments.values()))
        if segment.used + size > segment.nbytes:
            end = segment.start + segment.nbytes
            nbytes = max(end, 1 << (size - 1).bit_length())
            os.ftruncate(file.descriptor, end + nbytes)
            segment = file.segment(end, nbytes)
        block = _MemoryBlock(segment, segment.used, size, self._none_sent())
        self._blocks[segment.address + block.start + self._header] = block
        segment.used += size
        return block

    def _release_aliases(self) -> None:
        """Count the messages as read that no tensor of this rank is in any more."""
        aliases, self._aliases = self._aliases, []
        for storage, words, word in aliases:
            if storage.expired():
                words[word] += 1
            else:
                self._aliases.append((storage, words, word))


# The transports of this process. A child that is forked closes its copies of the descriptors: otherwise the other ranks
# would not notice that this rank has ended as long as the child lives.
_transports: WeakSet[SharedMemoryTransport] = WeakSet()


def _close_all() -> None:
    for transport in _transports:
        transport.close()


os.register_at_fork(after_in_child=_close_all)


def share_messages(
    ranks: Ranks,
    memory: SharedMemoryTransport,
    sends: Sequence[PeerTensor],
    receives: Sequence[PeerTensor],
    mode: ReceiveMode,
    buffers: Sequence[Tensor],
) -> Pending:
    """Start ``memory.exchange``. ``buffers`` are what the messages hold until they have arrived."""
    if own_entry.written:
        own_entry.remove()
    began = time.monotonic()
    try:
        works = memory.exchange(sends, receives, mode)
    except PeerError as error:
        raise failure(operation_name(), ranks, error, began) from error
    return Pending(works, buffers, ranks, [peer for peer, _ in receives])


def shared_memory(ranks: Ranks, device: torch.device) -> SharedMemoryTransport | None:
    """The shared memory of ``ranks``. None if they exchange tensors on ``device`` through a process group: tensors on a
    GPU, over several hosts, with a backend other than gloo, or if SEQPAR_SHARED_MEMORY is 0.

    The first call with these ranks is collective: all of them must make it, in the same order among such calls.
    """
    if device.type != "cpu" or is_simulated():
        return None
    wanted = switch(VARIABLE)

    def make() -> tuple[SharedMemoryTransport | None, Close]:
        transport = _connect(ranks, wanted)
        say_transport(ranks, transport is not None, wanted, device)
        return transport, (lambda _: None) if transport is None else transport.end

    transport: SharedMemoryTransport | None
    transport = calls_of(parent_group(ranks)).connect(("shared memory", global_ranks(ranks), wanted), make)
    return transport


def _connect(ranks: Ranks, wanted: bool) -> SharedMemoryTransport | None:
    parent, members, rank = parent_group(ranks), global_ranks(ranks), rank_in(ranks)
    if type(parent) is not ProcessGroup or parent._get_backend(_CPU).name() != "gloo":
        return None
    where, until = ("the first messages on a host", members), (group_timeout(parent), parent.group_name)
    kept, passed = list[int](), list[int]()  # descriptors: of the transport, and ends of pipes that others open
    try:
        own, entry, incoming = None, None, list[int]()
        with suppress(AttributeError, OSError):  # the system has no such files, or this process may open no more files
            if wanted:
                own, mark = _new_file(kept), uuid.uuid4().hex
                own.segments[0].memory[: len(mark)] = mark.encode()
                for _ in members:
                    incoming.append(_append(kept, passed, os.pipe()))
                entry = [host_name(), os.getpid(), mark, own.descriptor, passed]
        entries = [json.loads(text) for text in store_all_gather(*where, json.dumps(entry), *until)]
        opened = []
        if all(entries) and len({host for host, *_ in entries}) == 1:
            with suppress(OSError, ValueError):  # another container, or a process of another user
                for i, (_, process, mark, file, pipes) in enumerate(entries):
                    opened.append(_open(kept, own if i == rank else None, process, mark, file, pipes[rank]))
        answers = store_all_gather(*where, str(len(opened) == len(members)), *until)
        if any(answer != "True" for answer in answers):
            _close(kept)
            return None
        pipes = incoming, [pipe for _, pipe in opened]
        return SharedMemoryTransport(rank, members, [file for file, _ in opened], pipes, kept, until[0])
    except BaseException:
        _close(kept)
        raise
    finally:
        _close(passed)


def _append(kept: list[int], passed: list[int], pipe: tuple[int, int]) -> int:
    os.set_blocking(pipe[0], False)
    kept.append(pipe[0])
    passed.append(pipe[1])
    return pipe[0]


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _new_file(kept: list[int]) -> _File:
    """An anonymous file of one segment. Its descriptor is added to ``kept``."""
    descriptor = os.memfd_create("seqpar", os.MFD_CLOEXEC)
    kept.append(descriptor)
    os.ftruncate(descriptor, _FIRST_SEGMENT)
    file = _File(descriptor)
    file.segment(0, _FIRST_SEGMENT).used = _SMALLEST_BLOCK
    return file


def _open(kept: list[int], own: _File | None, process: int, mark: str, descriptor: int, pipe: int) -> tuple[_File, int]:
    """The file of a process, which begins with ``mark``, and the end of a pipe that is written to.

    Their descriptors are added to ``kept``. ``own`` is this process's file, if it is the file.

    Raises:
        OSError: this process may not open it.
        ValueError: another process has this number here.
    """
    file = own or _File(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
    if own is None:
        kept.append(file.descriptor)
    if file.segment(0, _FIRST_SEGMENT).memory[: len(mark)] != mark.encode():
        raise ValueError(f"process {process} has another file")
    kept.append(os.open(f"/proc/{process}/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    return file, kept[-1]
