"""Messages between processes of one host, through memory that they share. Linux, and tensors on the CPU.

Over gloo, a message to a process of the same host is copied into a socket and out of it, by threads that take the cores
from attention. Here the sender writes it into memory that the receiver maps too, where the receiver reads it:

    sender      | write the message | say where it is |          ...           | use the memory again |
    receiver    |                         ...         | read it | say that it is read |

The memory is a pool of blocks, each an anonymous file (``memfd_create``) that vanishes with the processes that map it.
Two processes are connected by a local socket. It passes the files, says where messages are and which have been read,
and tells a process that the other one has ended.

Ranks may send before they receive: the pool grows. A rank that only sends, such as the first one of a causal ring in
forward, waits when a receiver is many messages behind.

Set the environment variable SEQPAR_SHARED_MEMORY to 0 to use gloo. If one rank of a group does, so do all.
"""

from __future__ import annotations

import enum
import errno
import json
import os
import select
import socket
import struct
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from ..mesh import Ranks, global_ranks, host_name, parent_group, rank_in, size_of
from ..rendezvous import group_timeout, is_simulated, meet, missing_message
from .communicator import MadeOnce, sends_nothing

VARIABLE = "SEQPAR_SHARED_MEMORY"
_SMALLEST_BLOCK = 1 << 16
# Blocks that nobody uses are kept for later messages: so many bytes, or twice as many as are in use.
_KEPT_BYTES = 64 << 20
# A rank waits before it sends a message to a peer that has not read so many: far more than one call of attention sends.
_MOST_UNREAD = 64
# A wait reads the group's timeout after so many seconds: most end sooner.
_SHORT_WAIT_S = 1.0
# How long until a record is sent again for which a socket had no room.
_RETRY_S = 0.001

How = Literal["copy", "add", "borrow"]


class _Kind(enum.IntEnum):
    SENT = 0  # "I have written a message there"
    READ = 1  # "I have read your message there"
    DROPPED = 2  # "I have freed this block"


class _Record(NamedTuple):
    """What the sockets carry: something about a message.

    Attributes:
        kind: what.
        block: the number of the block, of its owner.
        start: where the message begins in the block, in bytes.
        nbytes: its size.
    """

    kind: int
    block: int
    start: int = 0
    nbytes: int = 0


_RECORD = struct.Struct("=BQQQ")


class _Block:
    """Memory for one message.

    Attributes:
        known_to: the ranks that have received the file.
        unread: how many receivers have not read the message yet.
        used_by: the storage of the tensor that the message is written to.
    """

    def __init__(self, number: int, nbytes: int) -> None:
        self.number, self.nbytes = number, nbytes
        self.file = os.memfd_create("seqpar", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, nbytes)
        self.mapped = _mapped(self.file)
        self.address = torch.frombuffer(self.mapped, dtype=torch.uint8).data_ptr()
        self.known_to: set[int] = set()
        self.unread = 0
        self.used_by: StorageWeakRef | None = None

    @property
    def free(self) -> bool:
        return not self.unread and (self.used_by is None or self.used_by.expired())


def _mapped(file: int) -> Any:
    """The memory of a file, as an array of bytes. Unlike ``mmap``, it does not keep the file open: blocks are many."""
    path, nbytes = f"/proc/self/fd/{file}", os.fstat(file).st_size
    with _disable_current_modes():  # a mode of the caller's is for its own tensors
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8, device="cpu").numpy()


class Receiving:
    """A message that is being received."""

    def __init__(self, messages: HostMessages, peer: int, out: Tensor, how: How) -> None:
        self._messages, self._peer = messages, peer
        self.out, self.how = out, how
        self.done = False

    def wait(self) -> None:
        """Wait until the message is there, and read it."""
        while not self.done:  # a peer's messages are read in the order in which they were sent
            self._messages.receive_next(self._peer)


class HostMessages:
    """Messages between ranks of one host. Like a process group, it is used by one thread at a time.

    Args:
        ranks: the ranks.
        sockets: by rank, the connection to it.
    """

    def __init__(self, ranks: Ranks, sockets: dict[int, socket.socket]) -> None:
        # Not the group itself: what has been made for the default group must not keep it alive.
        self._parent, self._global_ranks = weakref.ref(parent_group(ranks)), global_ranks(ranks)
        self._sockets = sockets
        self._poll = select.poll()
        self._peers: dict[int, int] = {}  # by file descriptor
        for peer, connection in sockets.items():
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)
            self._peers[connection.fileno()] = peer
        self._ended: set[int] = set()
        # This rank's blocks, by number and by address.
        self._blocks: dict[int, _Block] = {}
        self._at_address: dict[int, _Block] = {}
        self._next_number = 0
        # By peer: its messages that are there, those that are expected, and its blocks.
        self._arrived: dict[int, deque[_Record]] = {peer: deque() for peer in sockets}
        self._expected: dict[int, deque[Receiving]] = {peer: deque() for peer in sockets}
        self._mapped: dict[int, dict[int, Any]] = {peer: {} for peer in sockets}
        # By peer: records that wait for room in its socket, with their files.
        self._unsent: dict[int, deque[tuple[_Record, list[int]]]] = {peer: deque() for peer in sockets}
        # By peer: how many messages it has not read.
        self._unread = dict.fromkeys(sockets, 0)
        # Messages of peers that tensors of this rank still lie in.
        self._borrowed: list[tuple[StorageWeakRef, int, _Record]] = []

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor ``[numel]`` that is sent without a copy, and must not be written after that."""
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        block = self._free_block(numel * dtype.itemsize)
        tensor = torch.frombuffer(block.mapped, dtype=dtype, count=numel)
        block.used_by = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def send(self, peers: Sequence[int], x: Tensor) -> None:
        """Send ``x``, contiguous and not empty, to ``peers``. It may be written at once, unless it is of ``empty``."""
        block = self._at_address.get(x.untyped_storage().data_ptr())
        if block is None:
            x = self.empty(x.numel(), x.dtype).copy_(x.reshape(-1))
            block = self._at_address[x.untyped_storage().data_ptr()]
        record = _Record(_Kind.SENT, block.number, x.data_ptr() - block.address, x.nbytes)
        for peer in peers:
            if self._unread[peer] >= _MOST_UNREAD:
                self._wait(peer, lambda peer: self._unread[peer] < _MOST_UNREAD)
            files = [] if peer in block.known_to else [block.file]
            block.known_to.add(peer)
            block.unread += 1
            self._unread[peer] += 1
            self._post(peer, record, files)
            self._wait(peer, lambda peer: not self._unsent[peer])

    def receive(self, peer: int, out: Tensor, how: How = "copy") -> Receiving:
        """Start to receive a message of ``peer``.

        Args:
            peer: the rank that sends it.
            out: contiguous, of the message's size and dtype.
            how: copy the message to ``out``; or add it to ``out``; or let ``out`` lie where the sender wrote it. The
                sender does not use this memory again while a tensor lies there. Views of ``out`` that were made before
                the wait do not see the message then.
        """
        receiving = Receiving(self, peer, out, how)
        self._expected[peer].append(receiving)
        return receiving

    def receive_next(self, peer: int) -> None:
        """Wait for the next message of ``peer``, and read it."""
        if not self._arrived[peer]:
            self._wait(peer, lambda peer: bool(self._arrived[peer]))
        record, expected = self._arrived[peer].popleft(), self._expected[peer].popleft()
        out, expected.done = expected.out, True
        if record.nbytes != out.nbytes:
            raise RuntimeError(
                f"rank {self._global_ranks[peer]} has sent {record.nbytes:,} bytes where this rank expects "
                f"{out.nbytes:,}: their calls differ"
            )
        mapped = self._mapped[peer][record.block]
        message = torch.frombuffer(mapped, dtype=out.dtype, count=out.numel(), offset=record.start).view(out.shape)
        if expected.how == "borrow":
            storage = message.untyped_storage()
            out.set_(storage, message.storage_offset(), message.shape, message.stride())
            self._borrowed.append((StorageWeakRef(storage), peer, record))
            return
        if expected.how == "add":
            out.add_(message)
        else:
            out.copy_(message)
        self._give_back(peer, record)

    def shutdown(self) -> None:
        """End the connections. The other ranks are told; tensors that lie in shared memory stay."""
        for connection in self._sockets.values():
            connection.close()
        self._blocks.clear()
        self._at_address.clear()
        self._mapped.clear()

    # Memory

    def _free_block(self, nbytes: int) -> _Block:
        """A block that nobody uses, of at least ``nbytes``."""
        size = max(_SMALLEST_BLOCK, 1 << (nbytes - 1).bit_length())
        self._progress(0)
        free = [block for block in self._blocks.values() if block.free]
        for block in free:
            if block.nbytes == size:
                return block
        kept = sum(block.nbytes for block in free)
        used = sum(block.nbytes for block in self._blocks.values()) - kept + size
        for block in free:
            if kept <= max(_KEPT_BYTES, 2 * used):
                break
            kept -= block.nbytes
            del self._blocks[block.number], self._at_address[block.address]
            for peer in block.known_to:
                self._post(peer, _Record(_Kind.DROPPED, block.number))
        block = _Block(self._next_number, size)
        self._next_number += 1
        self._blocks[block.number] = self._at_address[block.address] = block
        return block

    def _give_back(self, peer: int, record: _Record) -> None:
        """Tell the sender of a message that it has been read."""
        self._post(peer, record._replace(kind=_Kind.READ))

    # Sockets

    @property
    def _timeout(self) -> timedelta:
        group = self._parent() or dist.group.WORLD
        assert group is not None
        return group_timeout(group)

    def _wait(self, peer: int, ready: Callable[[int], bool]) -> None:
        """Wait until what ``peer`` sends has made ``ready(peer)`` true."""
        start, limit = time.monotonic(), _SHORT_WAIT_S
        while not ready(peer):
            if peer in self._ended:
                raise RuntimeError(f"rank {self._global_ranks[peer]} has ended")
            waited = time.monotonic() - start
            if waited >= limit:
                timeout = self._timeout
                limit = timeout.total_seconds()
                if waited >= limit:
                    raise RuntimeError(missing_message([peer], "messages", timeout))
            self._progress(limit - waited)

    def _post(self, peer: int, record: _Record, files: Sequence[int] = ()) -> None:
        """Send a record, now or as soon as the socket has room: never wait for a peer that waits for this rank."""
        self._unsent[peer].append((record, list(files)))
        self._flush(peer)

    def _flush(self, peer: int) -> None:
        """Send the records for ``peer``, unless it has ended: then whoever waits for it says so."""
        unsent = self._unsent[peer]
        while unsent:
            record, files = unsent[0]
            try:
                if files:
                    socket.send_fds(self._sockets[peer], [_RECORD.pack(*record)], files)
                else:
                    self._sockets[peer].send(_RECORD.pack(*record))
            except (BrokenPipeError, ConnectionResetError):
                unsent.clear()
                self._take(peer)  # what it sent before is still there
                return
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS):  # full; or too many files are under way
                    return
                raise
            unsent.popleft()

    def _progress(self, seconds: float) -> None:
        """Take what the sockets have. If they have nothing, wait for it, at most so long."""
        if any(storage.expired() for storage, *_ in self._borrowed):
            read = [entry for entry in self._borrowed if entry[0].expired()]
            self._borrowed = [entry for entry in self._borrowed if entry not in read]
            for _, peer, record in read:
                self._give_back(peer, record)
        for peer in self._unsent:
            self._flush(peer)
        if any(self._unsent.values()):
            seconds = min(seconds, _RETRY_S)
        for descriptor, _ in self._poll.poll(seconds * 1000):
            self._take(self._peers[descriptor])

    def _take(self, peer: int) -> None:
        """Take what the socket of ``peer`` has."""
        connection = self._sockets[peer]
        while peer not in self._ended:
            try:
                data, files, flags, _ = socket.recv_fds(connection, _RECORD.size, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:  # it has ended before it took everything; what it sent is still there
                continue
            if not data:
                self._ended.add(peer)
                self._poll.unregister(connection)
                return
            if flags & socket.MSG_CTRUNC:
                raise RuntimeError("this process cannot open more files: raise its limit (ulimit -n)")
            record = _Record(*_RECORD.unpack(data))
            for file in files:
                self._mapped[peer][record.block] = _mapped(file)
                os.close(file)
            if record.kind == _Kind.SENT:
                self._arrived[peer].append(record)
            elif record.kind == _Kind.READ:
                self._blocks[record.block].unread -= 1
                self._unread[peer] -= 1
            else:
                del self._mapped[peer][record.block]


class _NoMessages(HostMessages):
    """Messages that take no time and bring nothing (see ``communicator.without_messages``)."""

    def __init__(self) -> None:
        pass

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")

    def send(self, peers: Sequence[int], x: Tensor) -> None:
        pass

    def receive(self, peer: int, out: Tensor, how: How = "copy") -> Receiving:
        receiving = Receiving(self, peer, out, how)
        receiving.done = True
        return receiving


def _shut_down(messages: HostMessages | None) -> None:
    if messages is not None:
        messages.shutdown()


_made: MadeOnce[tuple[tuple[int, ...], bool], HostMessages | None] = MadeOnce(_shut_down)
if hasattr(os, "register_at_fork"):
    # A child that keeps the sockets open would hide that this process has ended.
    os.register_at_fork(after_in_child=_made.end)


def host_messages(ranks: Ranks, device: torch.device) -> HostMessages | None:
    """How ``ranks`` exchange tensors on ``device`` through shared memory; None if they use a process group.

    The first call with these ranks is collective: all of them must make it, in the same order among such calls.
    """
    if device.type != "cpu" or is_simulated():
        return None
    made, wanted = _made.now(), os.environ.get(VARIABLE, "1") not in ("", "0")
    key = global_ranks(ranks), wanted
    if key not in made:
        made[key] = _connect(ranks, wanted)
    messages = made[key]
    return _NoMessages() if sends_nothing() and messages is not None else messages


def _connect(ranks: Ranks, wanted: bool) -> HostMessages | None:
    parent, rank, size = parent_group(ranks), rank_in(ranks), size_of(ranks)
    if type(parent) is not ProcessGroup or parent._get_backend(torch.device("cpu")).name() != "gloo":
        return None
    timeout = group_timeout(parent)
    with _listener(size) as listener:
        address = listener.getsockname()[1:].decode() if wanted and listener is not None else ""
        own = json.dumps([_place(), address])
        values = meet("the first messages on a host", global_ranks(ranks), own, timeout).values
        places, addresses = zip(*map(json.loads, values), strict=True)
        if listener is None or any(place != places[0] for place in places) or not all(addresses):
            return None
        return HostMessages(ranks, _connections(listener, rank, addresses, timeout))


def _connections(
    listener: socket.socket, rank: int, addresses: Sequence[str], timeout: timedelta
) -> dict[int, socket.socket]:
    """By rank, a socket that is connected with it. Each rank connects to those before it."""
    sockets: dict[int, socket.socket] = {}
    try:
        for peer in range(rank):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(timeout.total_seconds())
            connection.connect("\0" + addresses[peer])
            connection.send(_RECORD.pack(_Kind.SENT, rank, 0, 0))
            sockets[peer] = connection
        listener.settimeout(timeout.total_seconds())
        while len(sockets) < len(addresses) - 1:
            connection, _ = listener.accept()
            _, user, _ = struct.unpack("=3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.getuid():  # everybody on this host may connect
                connection.close()
                continue
            connection.settimeout(timeout.total_seconds())
            _, peer, _, _ = _RECORD.unpack(connection.recv(_RECORD.size))
            sockets[peer] = connection
    except (TimeoutError, ConnectionError) as error:
        missing = [peer for peer in range(len(addresses)) if peer not in (rank, *sockets)]
        raise RuntimeError(missing_message(missing, "the first messages on a host", timeout)) from error
    return sockets


@contextmanager
def _listener(size: int) -> Iterator[socket.socket | None]:
    """A socket that ``size`` processes of this host can connect to; None if this process cannot share memory."""
    if not sys.platform.startswith("linux") or not _can_make_files():
        yield None
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # Linux chooses a name, which vanishes with the socket
        listener.listen(size)
        yield listener


def _can_make_files() -> bool:
    try:
        _Block(0, _SMALLEST_BLOCK)
    except (AttributeError, OSError, RuntimeError):  # an old C library; forbidden in this container
        return False
    return True


def _place() -> list[str | int]:
    """The same for processes that can connect with one another and pass files: host, user and namespaces."""
    place: list[str | int] = [host_name(), os.getuid() if hasattr(os, "getuid") else 0]
    for namespace in ("net", "user"):
        try:
            place.append(os.stat(f"/proc/self/ns/{namespace}").st_ino)
        except OSError:
            place.append(0)
    return place
