"""The linear layers of one transformer layer on one rank as a timeline, with tensor and sequence parallelism.

A column-parallel layer all-gathers the tokens of the tensor-parallel ranks chunk by chunk, and multiplies each chunk
while the next one is being sent. A row-parallel layer computes the partial outputs of one chunk after another, and
sends each to the rank that sums them (reduce-scatter). ``strategies/sequence_chunks.py`` is what is simulated.
"""

from __future__ import annotations

from ..strategies.sequence_chunks import pieces_of_chunk
from .messages import RankPlace
from .setting import ELEMENT_BYTES
from .simulate import Timeline

Transfers = list[int | None]  # numbers of a timeline's transfers, to wait for


class LinearTimeline:
    """Records the linear layers of one rank on a ``Timeline``.

    Args:
        place: the rank, and how the ranks are split.
        tokens: tokens of this rank, before the all-gather.
    """

    def __init__(self, place: RankPlace, tokens: int) -> None:
        self._place, self._tokens = place, tokens
        self._setting = place.setting
        self._pieces = pieces_of_chunk(self._setting.tensor)

    def gemm_seconds(self, inputs: float, outputs: float) -> float:
        """Seconds in which this rank multiplies the tokens of all tensor-parallel ranks by its shard of a weight.

        With t tensor-parallel ranks these are t times the rank's own tokens and 1 / t of the weight ``[outputs,
        inputs]``, so the FLOPs count its own tokens and the full weight.
        """
        return 2.0 * self._tokens * inputs * outputs / self._setting.hardware.gemm_flops

    def columns_forward(self, timeline: Timeline, name: str, seconds: float) -> None:
        """The forward of a column-parallel layer, whose GEMM takes ``seconds``."""
        if self._setting.tensor == 1:
            timeline.compute(name, seconds)
        else:
            self._gather_and_multiply(timeline, name, seconds)

    def columns_backward(self, timeline: Timeline, name: str, seconds: float) -> None:
        """The backward of a column-parallel layer: the input's gradient is reduce-scattered, the weight's gradient
        needs the input of all ranks, which is all-gathered again. Each of the two GEMMs takes ``seconds``."""
        if self._setting.tensor == 1:
            timeline.compute(name, 2 * seconds)
        else:
            self._gather_and_multiply(timeline, name, seconds, reduced_seconds=seconds)

    def rows_forward(self, timeline: Timeline, name: str, seconds: float) -> None:
        """The forward of a row-parallel layer, whose GEMM takes ``seconds``."""
        tensor = self._setting.tensor
        if tensor == 1:
            timeline.compute(name, seconds)
            return
        sends: Transfers = []
        for distance in (*range(1, tensor), 0):  # this rank's own chunk last, while the others are being sent
            sends = self._multiply_and_send(timeline, name, distance, seconds / tensor, sends)
        timeline.wait(*sends)

    def rows_backward(self, timeline: Timeline, name: str, seconds: float) -> None:
        """The backward of a row-parallel layer: both GEMMs, of ``seconds`` each, need the output's gradient of all
        ranks, which is all-gathered."""
        if self._setting.tensor == 1:
            timeline.compute(name, 2 * seconds)
        else:
            self._gather_and_multiply(timeline, name, 2 * seconds)

    def _gather_and_multiply(self, timeline: Timeline, name: str, seconds: float, reduced_seconds: float = 0.0) -> None:
        """All-gather the tokens, and multiply each chunk while the next chunk is being sent.

        Args:
            timeline: the timeline that records it.
            name: the linear layer.
            seconds: of the GEMMs that use the gathered tokens.
            reduced_seconds: of a GEMM, chunk by chunk before the others, whose partial outputs are reduce-scattered;
                0 if there is none.
        """
        tensor = self._setting.tensor
        partial_sends: Transfers = []
        next_chunk: Transfers = []
        for distance in range(1, tensor + 1):
            chunk = next_chunk or [None]  # this rank's own chunk comes first
            next_chunk = self._send_chunk(timeline, distance) if distance < tensor else []
            if reduced_seconds:
                partial_sends = self._multiply_and_send(
                    timeline, name, distance % tensor, reduced_seconds / tensor, partial_sends
                )
            for piece in chunk:
                timeline.wait(piece)
                timeline.compute(name, seconds / tensor / len(chunk))
        timeline.wait(*partial_sends)

    def _send_chunk(self, timeline: Timeline, distance: int) -> Transfers:
        """Send this rank's tokens to the rank ``distance`` after it, piece by piece."""
        return [self._exchange(timeline, "tokens", distance) for _ in range(self._pieces)]

    def _multiply_and_send(
        self, timeline: Timeline, name: str, distance: int, seconds: float, earlier: Transfers
    ) -> Transfers:
        """Compute the partial outputs for the tokens of the rank ``distance`` after this one, and send them there.

        Returns:
            The transfers that are still to be waited for. If ``distance`` is 0, nothing is sent and these are
            ``earlier``; otherwise ``earlier`` has been waited for.
        """
        if distance == 0:
            timeline.compute(name, seconds)
            return earlier
        sends: Transfers = []
        for _ in range(self._pieces):
            timeline.compute(name, seconds / self._pieces)
            sends.append(self._exchange(timeline, "partial outputs", distance))
        timeline.wait(*earlier)
        return sends

    def _exchange(self, timeline: Timeline, name: str, distance: int) -> int | None:
        """Send one piece of a chunk to the rank ``distance`` after this one, and receive one from the rank before."""
        place, tensor = self._place, self._setting.tensor
        size = self._tokens * self._setting.model.hidden * ELEMENT_BYTES / self._pieces
        target, source = (place.level_to(tensor=(place.tensor + x) % tensor) for x in (distance, -distance))
        return place.start(timeline, name, "tensor", [(target, size)], [(source, size)])
