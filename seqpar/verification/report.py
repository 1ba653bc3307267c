"""What a comparison with one device has found, and what ``print`` shows of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

SHOWN = 8

_KINDS = ("batch", "path", "weights", "layer", "input", "forward", "loss", "backward", "gradient")


@dataclass(frozen=True)
class Difference:
    """One difference between a sharded model and the same model on one device."""

    # "batch", "path" or "weights": the ranks' batches, models or weights differ from one another. "layer": a layer does
    # not attend over the sharded sequence. "input": the tokens, positions or labels that the model received. "forward"
    # and "backward": the first tensor of the forward that differs, and the first gradient of such a tensor in backward.
    # "loss", and "gradient": the gradient of a parameter.
    kind: str
    quantity: str  # the name of the tensor or parameter
    layer: str = ""  # the name of the attention layer; empty for the model itself
    tokens: tuple[int, ...] = ()  # the global positions of the tokens that differ
    ranks: tuple[int, ...] = ()  # of the sequence, on which the quantity differs
    error: float = 0.0  # the norm of the difference, relative to the norm of what one device computes
    tolerance: float = 0.0  # the largest error that counts as equal
    explanation: str = ""  # a probable cause
    stops: bool = False  # whether nothing after this difference can be compared
    at: int = 0  # its place in the order of the training step, among the differences of its kind
    ratio: float = 0.0  # of a gradient that is one device's times a number on every rank: the number

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return self.quantity

    @property
    def order(self) -> tuple[int, int]:
        """A sort key: differences in the order of a training step."""
        return _KINDS.index(self.kind), self.at

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
    """What ``verify`` returns, the same on every rank.

    Attributes:
        differences: the differences from one device, in the order of a training step.
        loss: the loss of the sharded model, the mean over the ranks; NaN if it was not computed.
        expected_loss: the loss on one device; NaN if it was not computed.
        compared: the number of trainable parameters, whose gradients were compared.
        ranks: the number of ranks; in ``seqpar.hf``, of the ranks that the sequence is sharded over.
        cause: what the differences have in common, and the probable cause; empty if none is known.
        layers: in ``seqpar.hf``, the number of attention layers that were compared.
        seq_len: in ``seqpar.hf``, the number of tokens of the full sequence.
        strategy, layout: in ``seqpar.hf``, as given to ``parallelize``.
    """

    differences: tuple[Difference, ...]
    loss: float
    expected_loss: float
    compared: int
    ranks: int
    cause: str = ""
    layers: int = 0
    seq_len: int = 0
    strategy: str = ""
    layout: str = ""

    @property
    def ok(self) -> bool:
        """Whether there are no differences."""
        return not self.differences

    @property
    def gradients(self) -> tuple[Difference, ...]:
        """The differences of the gradients of parameters."""
        return tuple(d for d in self.differences if d.kind == "gradient")

    def __str__(self) -> str:
        name, what = "seqpar.verify", f"{self.ranks} rank(s)"
        if self.seq_len:
            how = f"strategy={self.strategy!r}, layout={self.layout!r}, {self.layers} attention layers"
            name, what = "seqpar.hf.verify", f"{self.seq_len} tokens on {what}, {how}"
        if not math.isnan(self.expected_loss):
            what += f", loss {self.loss:.6f} (one device {self.expected_loss:.6f})"
        if self.ok:
            return f"{name}: equal to one device: {what}, {self.compared} gradients"
        others, gradients = [d for d in self.differences if d.kind != "gradient"], self.gradients
        lines = [*others, *([self.cause] if self.cause else []), *gradients[:SHOWN]]
        if gradients:
            lines.append(f"the gradients of {len(gradients)} of {self.compared} parameters differ")
        return "\n".join([f"{name}: not what one device computes: {what}", *map(str, lines)])


class VerificationError(AssertionError):
    """A sharded model does not compute what one device would.

    Attributes:
        report: what ``verify`` would have returned.
    """

    def __init__(self, report: VerificationReport) -> None:
        super().__init__(str(report))
        self.report = report
