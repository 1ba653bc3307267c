"""Messages between processes of one host, through memory that they share. Linux, and tensors on the CPU.

Over gloo, a message to a process of the same host is copied into a socket and out of it, by threads that take the cores
from attention. Here the sender's message lies in memory that the receiver maps too, and is copied once:

    sender      | write the message | tell the receiver where it is |            ...          | use the memory again |
    receiver    |                        ...                        | copy it | tell the sender that it is read |

The memory is a pool of blocks, each an anonymous file (``memfd_create``) that vanishes with the processes that map it.
Two processes are connected by a local socket. It passes the files, says where messages are and which have been read,
and tells a process that the other one has ended.

The pool grows: a message that has been sent never waits for its receiver, so that ranks may send before they receive.

Set the environment variable SEQPAR_SHARED_MEMORY to 0 on any rank, and all of them use gloo.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import struct
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..mesh import Ranks, global_ranks, host_name, parent_group, rank_in, size_of
from ..rendezvous import group_timeout, is_simulated, meet, missing_message
from .communicator import sends_nothing

How = Literal["copy", "add", "borrow"]

VARIABLE = "SEQPAR_SHARED_MEMORY"
_SMALLEST_BLOCK = 1 << 16
# Blocks that nobody uses are kept for later messages, up to so many bytes or twice those in use.
_KEPT_BYTES = 64 << 20


class _Record(NamedTuple):
    """What the sockets carry.

    Attributes:
        sent: whether it says that a message was sent, by the socket's other end; otherwise, that one was read.
        block: the number of the block of the sender of the message.
        start: where the message begins in the block.
        nbytes: its size.
    """

    sent: bool
    block: int
    start: int
    nbytes: int


_RECORD = struct.Struct("=?QQQ")


class _Block:
    """Memory for one message at a time.

    Attributes:
        number: unlike that of any other block of this process's pool.
        mapped: the memory.
        known_to: the ranks that have received the file.
        unread: how many receivers have not read it yet.
        used_by: the storage of the tensor that is in it.
    """

    def __init__(self, number: int, nbytes: int) -> None:
        self.number, self.nbytes = number, nbytes
        self.file = os.memfd_create("seqpar", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, nbytes)
        self.mapped = mmap.mmap(self.file, nbytes)
        self.address = torch.frombuffer(self.mapped, dtype=torch.uint8).data_ptr()
        self.known_to: set[int] = set()
        self.unread = 0
        self.used_by: StorageWeakRef | None = None

    @property
    def free(self) -> bool:
        return not self.unread and (self.used_by is None or self.used_by.expired())


class Receiving:
    """A message that this rank receives."""

    def __init__(self, messages: HostMessages, peer: int, out: Tensor, how: How) -> None:
        self._messages, self._peer = messages, peer
        self.out, self.how = out, how
        self.done = False

    def wait(self) -> None:
        """Wait for the message, and read it."""
        while not self.done:  # those that were to be received earlier come first
            self._messages._receive_next(self._peer)


class HostMessages:
    """Messages between the ranks of a group, all on one host. Used by one thread at a time, like a process group.

    Args:
        ranks: the ranks.
        sockets: by rank, the connection to it.
    """

    def __init__(self, ranks: Ranks, sockets: dict[int, socket.socket]) -> None:
        self._parent, self._global_ranks = parent_group(ranks), global_ranks(ranks)
        self._sockets = sockets
        self._poll = select.poll()
        self._peers: dict[int, int] = {}  # by file descriptor
        for peer, connection in sockets.items():
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)
            self._peers[connection.fileno()] = peer
        self._blocks: dict[int, _Block] = {}
        self._by_address: dict[int, _Block] = {}
        self._made = 0
        self._arrived: dict[int, deque[_Record]] = {peer: deque() for peer in sockets}
        self._expected: dict[int, deque[Receiving]] = {peer: deque() for peer in sockets}
        self._mapped: dict[int, dict[int, mmap.mmap]] = {peer: {} for peer in sockets}
        self._borrowed: list[tuple[StorageWeakRef, int, _Record]] = []
        self._ended: set[int] = set()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor for a message, which is then sent without a copy: not to be written any more after that."""
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        nbytes = numel * dtype.itemsize
        block = self._block(nbytes)
        tensor = torch.frombuffer(block.mapped, dtype=dtype, count=numel)
        block.used_by = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def send(self, peers: Sequence[int], x: Tensor) -> None:
        """Send ``x``, contiguous, to ``peers``. It may be changed at once, unless it is of ``empty``."""
        block = self._by_address.get(x.untyped_storage().data_ptr())
        if block is None:
            x = self.empty(x.numel(), x.dtype).copy_(x.reshape(-1))
            block = self._by_address[x.untyped_storage().data_ptr()]
        record = _Record(True, block.number, x.data_ptr() - block.address, x.nbytes)
        for peer in peers:
            files = [] if peer in block.known_to else [block.file]
            block.known_to.add(peer)
            block.unread += 1
            self._post(peer, record, files)

    def receive(self, peer: int, out: Tensor, how: How = "copy") -> Receiving:
        """Receive a message into ``out``, contiguous.

        Args:
            peer: the rank that sends it.
            out: where it goes.
            how: copy it to ``out``; or add it; or let ``out`` be the memory that the sender wrote. The sender does not
                use this memory again before all tensors in it are gone. Views of ``out`` must be made after the wait.
        """
        receiving = Receiving(self, peer, out, how)
        self._expected[peer].append(receiving)
        return receiving

    def shutdown(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        self._blocks.clear()
        self._by_address.clear()
        self._mapped.clear()

    def _block(self, nbytes: int) -> _Block:
        """A free block for a message."""
        size = max(_SMALLEST_BLOCK, 1 << (nbytes - 1).bit_length())
        self._progress(0)
        free = [block for block in self._blocks.values() if block.free]
        for block in free:
            if block.nbytes == size:
                return block
        used = size + sum(block.nbytes for block in self._blocks.values()) - sum(block.nbytes for block in free)
        kept = sum(block.nbytes for block in free)
        for block in free:
            if kept <= max(_KEPT_BYTES, 2 * used):
                break
            kept -= block.nbytes
            self._drop(block)
        block = _Block(self._made, size)
        self._made += 1
        self._blocks[block.number] = self._by_address[block.address] = block
        return block

    def _drop(self, block: _Block) -> None:
        """Free a block, here and where it is mapped."""
        del self._blocks[block.number], self._by_address[block.address]
        for peer in block.known_to - self._ended:
            self._post(peer, _Record(True, block.number, 0, 0))

    def _receive_next(self, peer: int) -> None:
        """Wait for the next message of ``peer``, and read it."""
        expected = self._expected[peer][0]
        arrived = self._arrived[peer]
        if not arrived:
            self._wait_for(peer)
        record = arrived.popleft()
        self._expected[peer].popleft()
        out = expected.out
        if record.nbytes != out.nbytes:
            raise RuntimeError(
                f"rank {self._global_ranks[peer]} sent {record.nbytes:,} bytes where this rank expects "
                f"{out.nbytes:,}: their calls differ"
            )
        mapped = self._mapped[peer][record.block]
        message = torch.frombuffer(mapped, dtype=out.dtype, count=out.numel(), offset=record.start).view(out.shape)
        expected.done = True
        if expected.how == "borrow":
            out.set_(message.untyped_storage(), message.storage_offset(), out.shape, out.stride())
            self._borrowed.append((StorageWeakRef(message.untyped_storage()), peer, record))
            return
        if expected.how == "add":
            out.add_(message)
        else:
            out.copy_(message)
        self._give_back(peer, record)

    def _give_back(self, peer: int, record: _Record) -> None:
        """Tell the sender of a message that it has been read."""
        if peer not in self._ended:
            self._post(peer, record._replace(sent=False))

    def _wait_for(self, peer: int) -> None:
        """Wait until a message of ``peer`` has arrived."""
        start = time.monotonic()
        limit = 1.0
        while not self._arrived[peer]:
            if peer in self._ended:
                raise RuntimeError(f"rank {self._global_ranks[peer]} has ended")
            if time.monotonic() - start > limit:
                timeout = group_timeout(self._parent)
                limit = timeout.total_seconds()
                if time.monotonic() - start > limit:
                    raise RuntimeError(missing_message([peer], "messages", timeout))
            self._progress(min(1.0, limit))

    def _post(self, peer: int, record: _Record, files: list[int] | None = None) -> None:
        """Send a record. While the socket is full, receive: the peer may be waiting for that."""
        end = time.monotonic() + 600
        while True:
            try:
                if files:
                    socket.send_fds(self._sockets[peer], [_RECORD.pack(*record)], files)
                else:
                    self._sockets[peer].send(_RECORD.pack(*record))
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                self._progress(0.001)
            except (BrokenPipeError, ConnectionResetError):
                self._ended.add(peer)
                return

    def _progress(self, seconds: float) -> None:
        """Take what the sockets have; wait for something, but not longer than ``seconds``."""
        if self._borrowed:
            ended = [x for x in self._borrowed if x[0].expired()]
            self._borrowed = [x for x in self._borrowed if not x[0].expired()]
            for _, peer, record in ended:
                self._give_back(peer, record)
        for descriptor, _ in self._poll.poll(seconds * 1000):
            self._drain(self._peers[descriptor])

    def _drain(self, peer: int) -> None:
        connection = self._sockets[peer]
        while True:
            try:
                data, files, _, _ = socket.recv_fds(connection, _RECORD.size, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:  # it ended before it read everything; what it sent is still there
                continue
            if not data:
                self._ended.add(peer)
                self._poll.unregister(connection)
                return
            record = _Record(*_RECORD.unpack(data))
            if not record.sent:
                self._blocks[record.block].unread -= 1
            elif not record.nbytes:
                self._mapped[peer].pop(record.block, None)
            else:
                if files:
                    self._mapped[peer][record.block] = mmap.mmap(files[0], os.fstat(files[0]).st_size)
                    os.close(files[0])
                self._arrived[peer].append(record)


_made: MutableMapping[dist.ProcessGroup, dict[tuple[int, ...], HostMessages | None]] = WeakKeyDictionary()


def host_messages(ranks: Ranks, device: torch.device) -> HostMessages | None:
    """How ``ranks`` exchange tensors on ``device`` through shared memory; None if they use a process group.

    The first call with these ranks is collective: all of them must make it, in the same order among such calls.
    """
    if device.type != "cpu" or not _wanted() or sends_nothing() or is_simulated():
        return None
    world = dist.group.WORLD
    assert world is not None
    if world not in _made:
        for ended in list(_made.values()):
            _shut_down(ended)
        made: dict[tuple[int, ...], HostMessages | None] = {}
        _made[world] = made
        weakref.finalize(world, _shut_down, made)
    members = global_ranks(ranks)
    if members not in _made[world]:
        _made[world][members] = _connect(ranks)
    return _made[world][members]


def _shut_down(made: dict[tuple[int, ...], HostMessages | None]) -> None:
    for messages in made.values():
        if messages is not None:
            messages.shutdown()
    made.clear()


def _connect(ranks: Ranks) -> HostMessages | None:
    parent, rank, size = parent_group(ranks), rank_in(ranks), size_of(ranks)
    if parent._get_backend(torch.device("cpu")).name() != "gloo":
        return None
    timeout = group_timeout(parent)
    end = time.monotonic() + timeout.total_seconds()
    with _listener(size) as listener:
        address = listener.getsockname()[1:].decode() if listener is not None else ""
        own = json.dumps([host_name(), _network(), address])
        values = meet("shared memory", global_ranks(ranks), own, timeout).values
        hosts, networks, addresses = zip(*map(json.loads, values), strict=True)
        if len(set(zip(hosts, networks, strict=True))) > 1 or not all(addresses):
            return None
        assert listener is not None
        sockets: dict[int, socket.socket] = {}
        for peer in range(rank):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(max(0.1, end - time.monotonic()))
            connection.connect("\0" + addresses[peer])
            connection.send(struct.pack("=Q", rank))
            sockets[peer] = connection
        for _ in range(rank + 1, size):
            listener.settimeout(max(0.1, end - time.monotonic()))
            connection, _ = listener.accept()
            connection.settimeout(max(0.1, end - time.monotonic()))
            (peer,) = struct.unpack("=Q", connection.recv(8))
            sockets[peer] = connection
    return HostMessages(ranks, sockets)


@contextmanager
def _listener(size: int) -> Iterator[socket.socket | None]:
    """A socket that ``size`` processes of this host can connect to; None if this process is not to share memory."""
    if not _wanted() or not sys.platform.startswith("linux"):
        yield None
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # Linux chooses a name
        listener.listen(size)
        yield listener


def _wanted() -> bool:
    return os.environ.get(VARIABLE, "1") not in ("", "0")


def _network() -> int:
    """The network namespace of this process: its sockets connect only inside."""
    return os.stat("/proc/self/ns/net").st_ino
