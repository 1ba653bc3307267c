"""What ``verify`` returns: the differences of a parallelized model from the same model on one device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

_KINDS = ("batch", "path", "weights", "layer", "input", "forward", "loss", "backward", "gradient")


@dataclass(frozen=True)
class Difference:
    """One difference between a parallelized model and the same model on one device.

    Attributes:
        kind: what differs. "batch", "path" or "weights": the ranks' batches, models or weights differ from one another.
            "layer": a layer does not attend over the sharded sequence. "input": the tokens, positions or labels that
            the model received. "forward": a tensor of the forward, the first one that differs. "loss": the loss.
            "backward": the gradient of a tensor of the forward, the first one in backward that differs. "gradient": the
            gradient of a parameter.
        quantity: the name of the tensor or parameter.
        layer: the name of the attention layer; empty for the model itself.
        tokens: the global positions of the tokens that differ.
        ranks: the ranks of the sequence on which the quantity differs.
        error: the norm of the difference, relative to the norm of what one device computes.
        tolerance: the largest error that counts as equal.
        explanation: a probable cause.
        stops: whether nothing after this difference can be compared.
        at: its position in the order of the training step, among the differences of its kind.
    """

    kind: str
    quantity: str
    layer: str = ""
    tokens: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    error: float = 0.0
    tolerance: float = 0.0
    explanation: str = ""
    stops: bool = False
    at: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """A sort key: differences in the order of a training step."""
        return _KINDS.index(self.kind), self.at

    def values(self) -> tuple[Any, ...]:
        """The attributes, in the order of the arguments of ``Difference``."""
        return astuple(self)

    def __str__(self) -> str:
        where = f"layer {self.layer!r}, {self.quantity}" if self.layer else self.quantity
        parts = [f"{self.kind}: {where}"]
        if self.ranks:
            parts.append(f"on rank(s) {', '.join(map(str, self.ranks))}")
        if self.tokens:
            parts.append(f"tokens {_token_list(self.tokens)}")
        if self.tolerance:
            parts.append(f"error {self.error:.2g} (tolerance {self.tolerance:.0e})")
        return "; ".join([*parts, *([self.explanation] if self.explanation else [])])


def _token_list(tokens: Iterable[int]) -> str:
    """The increasing positions ``tokens`` as text, such as "0-3, 7". At most eight ranges are shown."""
    ranges: list[list[int]] = []
    for token in tokens:
        if ranges and token == ranges[-1][1] + 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in ranges[:8]]
    return ", ".join(shown + ["..."] * (len(ranges) > 8))


@dataclass(frozen=True)
class VerificationReport:
    """The result of ``verify``, the same on every rank of the sequence.

    Attributes:
        differences: the differences from one device, in the order of a training step: the path, the inputs, the first
            layer, the loss, the first gradient. Empty if there are none.
        loss: the loss of the parallelized model; NaN if it was not computed.
        expected_loss: the loss of the model on one device; NaN if it was not computed.
        layers: the number of attention layers that were compared.
        seq_len: the number of tokens of the full sequence.
        ranks: the number of ranks that the sequence is sharded over.
        strategy, layout: as given to ``parallelize``.
    """

    differences: tuple[Difference, ...]
    loss: float
    expected_loss: float
    layers: int
    seq_len: int
    ranks: int
    strategy: str
    layout: str

    @property
    def ok(self) -> bool:
        """Whether the model computes what one device would."""
        return not self.differences

    def __str__(self) -> str:
        what = f"{self.seq_len} tokens on {self.ranks} rank(s), strategy={self.strategy!r}, layout={self.layout!r}"
        if self.ok:
            return (
                f"seqpar.hf.verify: equal to one device: {what}, {self.layers} attention layers, loss {self.loss:.6f} "
                f"(one device {self.expected_loss:.6f}), all gradients"
            )
        return "\n".join([f"seqpar.hf.verify: not what one device computes: {what}", *map(str, self.differences)])


class VerificationError(AssertionError):
    """A parallelized model does not compute what one device would.

    Attributes:
        report: the ``VerificationReport``.
    """

    def __init__(self, report: VerificationReport) -> None:
        super().__init__(str(report))
        self.report = report
