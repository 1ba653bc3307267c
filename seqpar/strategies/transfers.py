"""When a ring receives K/V and returns their gradients: messages are posted ahead, in the order of the program.

Shapes: b batch, k keys of a step, n KV heads, d head_dim of q and k, e head_dim of v.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from ..comm.streams import ReadyEvents, TransferStream
from ..comm.trace import count_step, open_traces
from ..schedule.program import Step
from .transport import KV, KeyValues, Message, Transport, Wait

_NO_STREAM = nullcontext()


class Transfers:
    """The K/V of each step. Messages are posted ahead, in the program's order (``Step.posts``).

    Args:
        steps: the steps of the program.
        transport: sends the messages.
        k, v: this rank's keys and values.
        ready: when they can be sent; None: they are sent from the stream of the kernels.
        frees_first: whether messages posted before a step may use the memory of the step before, after its kernel.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        transport: Transport,
        k: Tensor,
        v: Tensor,
        ready: ReadyEvents | None,
        frees_first: bool,
    ) -> None:
        self._steps, self._transport, self._kv, self._frees_first = steps, transport, (k, v), frees_first
        on_stream = ready is not None and len(steps) > 1 and not k.is_cpu
        self._stream = TransferStream((k, v), ready) if on_stream else None
        self._local: dict[int, KeyValues] = {}  # this rank's rows, by chunk of heads
        self._intra_host: deque[Callable[[], KV]] = deque()
        self._inter_host: deque[Callable[[], Any]] = deque()
        self._host_kv: Any = None  # what the last inter-host hop has brought
        self._counted: set[tuple[int, int]] = set()  # the steps, apart from their chunks of heads

    def __enter__(self) -> Transfers:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        if self._stream is not None:
            self._stream.release()
            if error_type is not None:  # messages may still be packed from k and v, which the caller frees
                self._stream.join()

    def wait(self, step: Step) -> KV:
        """Post the messages that are due before this step's kernel, then wait for the step's K/V.

        In a step without keys for this rank, the K/V are this rank's own.
        """
        if (stream := self._stream) is not None and self._frees_first:
            stream.release()
        if step.posts:
            with _NO_STREAM if stream is None else stream.posting():
                for level, number in step.posts:
                    self._post(level, self._steps[number])
        if stream is not None:
            stream.release()
        if step.index:
            return self._intra_host.popleft()()
        return self._kv if step.kv_heads is None else take_kv(self._kv, step)

    def _post(self, level: str, step: Step) -> None:
        chunk = step.chunks.start
        if (local := self._local.get(chunk)) is None:
            local = self._local[chunk] = KeyValues(take_kv(self._kv, step))
        if level == "inter_host":
            self._inter_host.append(self._transport.send_inter_host(step, local))
            return
        if step.starts_inter_host:
            self._host_kv = self._inter_host.popleft()()
        if open_traces and step.intra_host.receives and (step.group, step.index) not in self._counted:
            self._counted.add((step.group, step.index))
            count_step()
        self._intra_host.append(self._transport.send_intra_host(step, local, self._host_kv))


class GradientReduce:
    """Sends the gradients of received K/V to the owners of the K/V while the gradients of the next step are computed.

    A rank that received rows from another host adds up the gradients that the ranks of its host have computed for these
    rows, and sends the sum to the owner once.

    Args:
        transport: sends the messages.
        dk, dv: the gradients of this rank's K/V, to which received gradients are added; None if none are received.
        gather: whether the plan is an all-gather. Its gradients are copied before they are sent. dk and dv are then two
            messages, so that dk is freed before dv is copied.
    """

    def __init__(self, transport: Transport, dk: Any, dv: Any, gather: bool) -> None:
        self._transport, self._dkv, self._gather = transport, (dk, dv), gather
        self._parts: dict[int, list[Sequence[Tensor]]] = {}  # what is one message, by chunk of heads
        self._partial_dkv: list[Message] = []  # the gradients of the step that is computed now
        self._sent: Step | None = None
        self._intra_host: list[Wait] = []  # wait for the messages of the last step, and add them
        self._inter_host: list[Wait] = []
        self._sums: tuple[dict[int, Any], ...] = ({}, {})  # by owner, for each message: sums over this host's ranks

    def __enter__(self) -> GradientReduce:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        if error_type is None and self._sent is not None:
            self._finish_step()
            _finish(self._inter_host)

    def buffers(self, step: Step) -> KV:
        """Where backward puts the dk and dv of a step: this rank's own dk and dv for its own keys, else a message."""
        if step.index == 0 or step.keys is None:
            return take_kv(self._dkv, step)
        if self._gather:
            self._partial_dkv = messages = [Message(part, len(step.keys)) for part in self._parts_of(step)]
            return messages[0].tensors[0], messages[1].tensors[0]
        message = Message(self._parts_of(step)[0], len(step.keys), to=self._transport.link)
        self._partial_dkv = [message]
        return message.kv

    def send(self, step: Step) -> None:
        """Wait for the gradients of the previous step, then send the gradients of this step."""
        if step.index == 0:
            return
        self._finish_step()
        self._sent = step
        for dkv, sums in zip(self._parts_of(step), self._sums, strict=False):
            message = self._partial_dkv.pop(0) if self._partial_dkv else None
            self._intra_host.append(self._transport.return_intra_host(step, message, dkv, sums))
            del message  # so that the next message can use its memory

    def _parts_of(self, step: Step) -> list[Sequence[Tensor]]:
        if (parts := self._parts.get(step.chunks.start)) is None:
            dk, dv = take_kv(self._dkv, step)
            parts = self._parts[step.chunks.start] = [[dk], [dv]] if self._gather else [(dk, dv)]
        return parts

    def _finish_step(self) -> None:
        _finish(self._intra_host)
        step, self._sent = self._sent, None
        if step is not None and step.ends_inter_host:
            _finish(self._inter_host)
            for dkv, sums in zip(self._parts_of(step), self._sums, strict=False):
                self._inter_host.append(self._transport.return_inter_host(step, sums, dkv))
                sums.clear()


def _finish(waits: list[Wait]) -> None:
    while waits:
        waits.pop(0)()


def take_heads(x: Tensor, heads: range | None) -> Tensor:
    """Some of the heads of ``x [..., heads, head_dim]``; None is all."""
    return x if heads is None else x[..., heads.start : heads.stop, :]


def take_kv(kv: KV, step: Step) -> KV:
    """The KV heads of a step."""
    return kv if step.kv_heads is None else (take_heads(kv[0], step.kv_heads), take_heads(kv[1], step.kv_heads))
