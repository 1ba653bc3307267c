"""Messages of CPU tensors between processes of one host through shared memory. It is available on Linux only.

gloo copies a message to a process of the same host into a socket and out of it. The threads that copy it use the same
CPU cores as attention. Here the sender writes the message into memory that the receiver has mapped too, and the
receiver reads it from there:

    sender      | write the message | send a record SENT |             ...              | reuse the memory |
    receiver    |                           ...          | read the message | send a record READ |

The shared memory is a pool of blocks. Each block is an anonymous file (``memfd_create``), which the operating system
deletes when no process maps it any more. Each pair of processes is connected by a local socket. The processes exchange
the files and the records through it, and each of them notices by it when the other one ends.

A rank may send several messages before it receives any, because the pool grows. A rank that only sends, such as the
first rank of a causal ring in forward, waits when a receiver has many unread messages.

Set the environment variable SEQPAR_SHARED_MEMORY to 0 to use gloo. If it is 0 on one rank of a group, all ranks of the
group use gloo.
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
# Free blocks are kept for later messages, up to so many bytes, or up to twice the bytes of the blocks in use.
_KEPT_BYTES = 64 << 20
# Before a rank sends a message to a peer with so many unread messages, it waits. A call of attention sends far fewer.
_MOST_UNREAD = 64
# A wait looks up the group's timeout only after so many seconds, because most waits are shorter.
_SHORT_WAIT_S = 1.0
# If a socket had no room for a record, the record is sent again after so many seconds.
_RETRY_S = 0.001

How = Literal["copy", "add", "borrow"]


class _Kind(enum.IntEnum):
    SENT = 0  # the sender of the record has written a message to its block
    READ = 1  # the sender of the record has read a message from the receiver's block
    DROPPED = 2  # the sender of the record has freed its block


class _Record(NamedTuple):
    """A record that is sent through a socket. It describes a message, or a block that has been freed.

    Attributes:
        kind: a ``_Kind``.
        block: the number of the block. Each rank numbers its own blocks.
        start: the offset of the message in the block, in bytes.
        nbytes: the size of the message in bytes.
    """

    kind: int
    block: int
    start: int = 0
    nbytes: int = 0


_RECORD = struct.Struct("=BQQQ")


class _Block:
    """Shared memory for one message.

    Attributes:
        number: the number by which records refer to the block.
        nbytes: the size of the block in bytes.
        file: the descriptor of the anonymous file.
        mapped: the memory, as an array of bytes.
        address: the address of the memory in this process.
        known_to: the ranks to which the file has been sent.
        unread: the number of receivers that have not read the message yet.
        used_by: the storage of the tensor that ``HostMessages.empty`` returned for this block, or None.
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
        """Whether the block can be used for another message."""
        return not self.unread and (self.used_by is None or self.used_by.expired())


def _mapped(file: int) -> Any:
    """The memory of a file, as an array of bytes.

    Python's ``mmap`` would keep a descriptor of each file open, and there may be many files.
    """
    path, nbytes = f"/proc/self/fd/{file}", os.fstat(file).st_size
    with _disable_current_modes():  # dispatch modes of the caller, such as FakeTensorMode, must not see this tensor
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8, device="cpu").numpy()


class Receiving:
    """A message that is being received.

    Attributes:
        out: the receive buffer.
        how: as in ``HostMessages.receive``.
        done: whether the message has been read.
    """

    def __init__(self, messages: HostMessages, peer: int, out: Tensor, how: How) -> None:
        self._messages, self._peer = messages, peer
        self.out, self.how = out, how
        self.done = False

    def wait(self) -> None:
        """Wait until the message has arrived, and read it."""
        while not self.done:  # earlier messages of the same peer are read first
            self._messages.receive_next(self._peer)


class HostMessages:
    """Sends and receives messages between ranks of one host. Like a process group, it is used by one thread at a time.

    Args:
        ranks: the ranks that exchange messages.
        sockets: a connected socket for each other rank.
    """

    def __init__(self, ranks: Ranks, sockets: dict[int, socket.socket]) -> None:
        # A weak reference, because this object exists until the default group is destroyed and must not prevent that.
        self._parent, self._global_ranks = weakref.ref(parent_group(ranks)), global_ranks(ranks)
        self._sockets = sockets
        self._poll = select.poll()
        self._peers: dict[int, int] = {}  # by the file descriptor of the socket
        for peer, connection in sockets.items():
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)
            self._peers[connection.fileno()] = peer
        self._ended: set[int] = set()
        # This rank's blocks, by number and by address.
        self._blocks: dict[int, _Block] = {}
        self._at_address: dict[int, _Block] = {}
        self._next_number = 0
        # For each peer: messages that have arrived and are unread, receives that are not done, and mapped blocks.
        self._arrived: dict[int, deque[_Record]] = {peer: deque() for peer in sockets}
        self._expected: dict[int, deque[Receiving]] = {peer: deque() for peer in sockets}
        self._mapped: dict[int, dict[int, Any]] = {peer: {} for peer in sockets}
        # For each peer: records, with files, that are sent as soon as its socket has room.
        self._unsent: dict[int, deque[tuple[_Record, list[int]]]] = {peer: deque() for peer in sockets}
        # For each peer: the number of this rank's messages that it has not read.
        self._unread = dict.fromkeys(sockets, 0)
        # Messages in whose memory tensors of this rank are, with weak references to the storages of these tensors.
        self._borrowed: list[tuple[StorageWeakRef, int, _Record]] = []

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor ``[numel]`` in shared memory.

        ``send`` sends it without a copy. It must not be written to after it has been sent.
        """
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        block = self._free_block(numel * dtype.itemsize)
        tensor = torch.frombuffer(block.mapped, dtype=dtype, count=numel)
        block.used_by = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def send(self, peers: Sequence[int], x: Tensor) -> None:
        """Send ``x`` to ``peers``.

        Args:
            peers: the ranks that receive it.
            x: contiguous and not empty. It may be written to as soon as this method returns, unless ``empty`` made it.
        """
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
        """Start to receive the next message of ``peer``.

        Args:
            peer: the rank that sends the message.
            out: the receive buffer: contiguous, with the size and dtype of the message.
            how: "copy": copy the message to ``out``. "add": add the message to ``out``. "borrow": replace the memory of
                ``out`` by the memory to which the sender wrote the message. The sender does not reuse this memory as
                long as a tensor of this rank is in it. Views of ``out`` that were made before the wait keep the
                memory that ``out`` had then.
        """
        receiving = Receiving(self, peer, out, how)
        self._expected[peer].append(receiving)
        return receiving

    def receive_next(self, peer: int) -> None:
        """Wait for the next message of ``peer``, and read it.

        Raises:
            RuntimeError: the message has another size than the receive buffer, or ``peer`` has ended or sent no message
                before the group's timeout.
        """
        if not self._arrived[peer]:
            self._wait(peer, lambda peer: bool(self._arrived[peer]))
        record, expected = self._arrived[peer].popleft(), self._expected[peer].popleft()
        out, expected.done = expected.out, True
        if record.nbytes != out.nbytes:
            raise RuntimeError(
                f"rank {self._global_ranks[peer]} has sent {record.nbytes:,} bytes, but this rank expects "
                f"{out.nbytes:,}; make the same calls on all ranks"
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
        self._post_read(peer, record)

    def shutdown(self) -> None:
        """Close the connections, which the other ranks notice. Tensors in shared memory remain valid."""
        for connection in self._sockets.values():
            connection.close()
        self._blocks.clear()
        self._at_address.clear()
        self._mapped.clear()

    # Memory

    def _free_block(self, nbytes: int) -> _Block:
        """A free block of at least ``nbytes`` bytes."""
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

    def _post_read(self, peer: int, record: _Record) -> None:
        """Tell ``peer`` that its message, which ``record`` describes, has been read."""
        self._post(peer, record._replace(kind=_Kind.READ))

    # Sockets

    @property
    def _timeout(self) -> timedelta:
        group = self._parent() or dist.group.WORLD
        assert group is not None
        return group_timeout(group)

    def _wait(self, peer: int, ready: Callable[[int], bool]) -> None:
        """Process incoming records until ``ready(peer)`` is true.

        Raises:
            RuntimeError: ``peer`` has ended, or ``ready(peer)`` is not true before the group's timeout.
        """
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
        """Send a record, now or as soon as the socket has room.

        This method does not wait for room, because ``peer`` may be waiting for this rank.
        """
        self._unsent[peer].append((record, list(files)))
        self._flush(peer)

    def _flush(self, peer: int) -> None:
        """Send the unsent records for ``peer``. If ``peer`` has ended, discard them: the next wait for it raises."""
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
                self._read_records(peer)  # the records that it sent before it ended can still be read
                return
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS):  # the socket is full, or holds too many files
                    return
                raise
            unsent.popleft()

    def _progress(self, seconds: float) -> None:
        """Send and read all records that can be sent and read. If there are none to read, wait at most ``seconds``."""
        if any(storage.expired() for storage, *_ in self._borrowed):
            unused = [entry for entry in self._borrowed if entry[0].expired()]
            self._borrowed = [entry for entry in self._borrowed if entry not in unused]
            for _, peer, record in unused:
                self._post_read(peer, record)
        for peer in self._unsent:
            self._flush(peer)
        if any(self._unsent.values()):
            seconds = min(seconds, _RETRY_S)
        for descriptor, _ in self._poll.poll(seconds * 1000):
            self._read_records(self._peers[descriptor])

    def _read_records(self, peer: int) -> None:
        """Read and process all records that have arrived from ``peer``."""
        connection = self._sockets[peer]
        while peer not in self._ended:
            try:
                data, files, flags, _ = socket.recv_fds(connection, _RECORD.size, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:  # the peer has ended with unread records, but its own can still be read
                continue
            if not data:
                self._ended.add(peer)
                self._poll.unregister(connection)
                return
            if flags & socket.MSG_CTRUNC:
                raise RuntimeError("this process cannot open more files; raise its limit (ulimit -n)")
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
    """Sends and receives nothing, for ``communicator.without_messages``."""

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
    # A forked process must close the sockets: if they stayed open there, peers would not notice that this process ends.
    os.register_at_fork(after_in_child=_made.end)


def host_messages(ranks: Ranks, device: torch.device) -> HostMessages | None:
    """The object by which ``ranks`` exchange tensors on ``device`` through shared memory.

    The first call with these ranks is collective: all of them must make it, in the same order among such calls.

    Returns:
        None if the ranks exchange tensors through a process group: for GPU tensors, over several hosts, with a backend
        other than gloo, or if SEQPAR_SHARED_MEMORY is 0.
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
    """Connect ``ranks``; None if they cannot share memory, or if ``wanted`` is False on one of them."""
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
    """A connected socket for each other rank. Each rank connects to the ranks before it."""
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
            if user != os.getuid():  # any user of this host may connect to the socket
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
        listener.bind("")  # Linux chooses an unused name, which needs no file
        listener.listen(size)
        yield listener


def _can_make_files() -> bool:
    """Whether this process can create shared memory. An old C library or a container's policy may prevent it."""
    try:
        _Block(0, _SMALLEST_BLOCK)
    except (AttributeError, OSError, RuntimeError):
        return False
    return True


def _place() -> list[str | int]:
    """The host, user and namespaces of this process. Processes with equal values can share memory."""
    place: list[str | int] = [host_name(), os.getuid() if hasattr(os, "getuid") else 0]
    for namespace in ("net", "user"):
        try:
            place.append(os.stat(f"/proc/self/ns/{namespace}").st_ino)
        except OSError:
            place.append(0)
    return place
