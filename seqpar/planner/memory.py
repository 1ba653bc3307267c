"""Bytes of memory of one rank: weights and their states, activations that autograd keeps, and temporary tensors.

``layer_activations`` are what the layers of this package keep; the tests compare them with what autograd saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2

from .hardware import Hardware
from .part import LayerPart
from .setting import GRADIENT_BYTES, Setting
from .shape import Layer
from .split import ELEMENT_BYTES, Split, Switches

# Bytes per logit if all logits exist at once: 2 in the model's dtype, 4 in float32, and 2 + 4 for the gradients of
# both. (Hugging Face's blog on Ulysses measured 12.4: 1.89 MB per token for a vocabulary of 151,936.)
_LOGIT_BYTES = 12
# Bytes of a chunked loss: for one chunk, the logits in float32 and in the model's dtype, and their gradient.
_LOSS_CHUNK_BYTES = 3 * (128 << 20)
_LENGTH_UNIT = 1024  # tokens; ``longest_sequence`` is a multiple of it


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of memory on one rank.

    Attributes:
        states: weights, gradients and the state of the optimizer, sharded over all ranks.
        gathered: weights that are all-gathered at a time, with their gradients: of the layers being computed, of
            the embedding and of the language model head.
        activations: tensors of all layers that autograd keeps on the device.
        working: temporary tensors while one layer runs backward.
        logits: tensors of the loss.
        reserved: memory that CUDA, NCCL and the allocator take.
        host: activations of all layers in host memory, if they are offloaded.
    """

    states: float
    gathered: float
    activations: float
    working: float
    logits: float
    reserved: float
    host: float = 0.0

    def fits(self, hardware: Hardware) -> bool:
        """Whether the device has ``total`` bytes, and the host ``host`` bytes for each of its GPUs."""
        return self.total <= hardware.memory_bytes and self.host <= hardware.usable_host_memory

    @property
    def total(self) -> float:
        """The peak of device memory. The backward of a layer and the loss do not run at the same time."""
        return self.states + self.gathered + self.activations + max(self.working, self.logits) + self.reserved


def layer_activations(layer: Layer, split: Split, switches: Switches | None = None) -> float:
    """Bytes of tensors that autograd keeps for one layer on one rank."""
    switches = switches or Switches()
    if switches.recompute != "none":
        return sum(_checkpointed(layer, split, switches))
    norms = sum(_norm_bytes(block, split) for block in layer.blocks)
    return norms + sum(part.kept(split) for part in layer.parts if not part.pieces(split, switches))


def _norm_bytes(block: Sequence[LayerPart], split: Split) -> float:
    """The input and output of the norm of a block."""
    return 2 * ELEMENT_BYTES * block[0].hidden * split.most_tokens


def _checkpointed(layer: Layer, split: Split, switches: Switches) -> list[float]:
    """Bytes of each tensor that a layer keeps if it is recomputed, the layer's input first."""
    kept = [float(split.most_tokens * ELEMENT_BYTES * layer.streams * layer.parts[0].hidden)]
    if switches.recompute == "keep_attention":
        kept += [nbytes for part in layer.parts for nbytes in part.checkpointed(split)]
    return kept


def memory(setting: Setting, switches: Switches) -> MemoryUse:
    """The memory of the rank with the longest shard."""
    s, m = setting, setting.model
    tokens, kept, host = s.most_tokens, 0.0, 0.0
    for layer in m.layers:
        nbytes = layer_activations(layer, s, switches)
        if switches.offload:  # of the layer being copied and the next one; on the host, a power of two for each tensor
            kept = max(kept, 2 * nbytes)
            host += layer.count * sum(2 ** ceil(log2(x)) for x in _checkpointed(layer, s, switches))
        else:
            kept += layer.count * nbytes
    kept += 2 * ELEMENT_BYTES * m.hidden * tokens  # the output of the embedding and the input of the head
    logits = 0.0
    if m.vocab and switches.chunked_loss:
        logits = _LOSS_CHUNK_BYTES + ELEMENT_BYTES * m.hidden * tokens
    elif m.vocab:
        logits = _LOGIT_BYTES * tokens * m.vocab / s.tensor
    return MemoryUse(
        states=s.state_bytes * m.parameters / s.state_ranks,
        gathered=_gathered(s),
        activations=kept,
        working=max(_working(x, s, switches) for x in m.layers),
        logits=logits,
        reserved=s.hardware.reserved_bytes,
        host=host,
    )


def _gathered(setting: Setting) -> float:
    """Bytes of gathered weights and their gradients.

    With "fsdp" these are the weights of two layers, because the next layer's weights are all-gathered while a layer is
    computed, the gradients of one layer, and the language model head with its gradient.
    """
    m = setting.model
    if setting.ranks == setting.tensor:  # every rank holds all of its weights
        return 0.0
    if setting.weights == "zero1":
        return (ELEMENT_BYTES + GRADIENT_BYTES) * m.parameters / setting.tensor
    layers = (2 * ELEMENT_BYTES + GRADIENT_BYTES) * m.layer_parameters
    if setting.weights == "zero2":
        layers = ELEMENT_BYTES * m.depth * m.layer_parameters + GRADIENT_BYTES * m.layer_parameters
    head = (ELEMENT_BYTES + GRADIENT_BYTES) * (m.vocab * m.hidden)
    return (layers + head) / setting.tensor


def _working(layer: Layer, split: Split, switches: Switches) -> float:
    """Bytes of the temporary tensors of a layer's backward.

    The backwards of the parts run one after the other, so the largest one counts. The activations of a layer that
    backward recomputes exist from then on until their own backward. Of a part in pieces, one piece is recomputed.
    """
    recomputed = most = 0.0
    is_recomputed = switches.recompute != "none"
    for block in layer.blocks:
        recomputed += is_recomputed * _norm_bytes(block, split)
        for part in block:
            pieces = part.pieces(split, switches)
            if pieces:
                piece = part.kept(split, pieces)
            else:
                piece, recomputed = 0.0, recomputed + is_recomputed * part.kept(split)
            most = max(most, recomputed + piece + part.working(split, pieces or 1))
    return most


def longest_sequence(setting: Setting, switches: Switches) -> int:
    """Tokens of the longest sequence whose memory fits, a multiple of 1,024 and exact to 0.1 %; 0 if none fits."""

    def fits(units: int) -> bool:
        return memory(replace(setting, seq_len=_LENGTH_UNIT * units), switches).fits(setting.hardware)

    low, high = 0, 1
    while fits(high) and high < 1 << 30:
        low, high = high, 2 * high
    while high - low > max(1, low // 1024):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return _LENGTH_UNIT * low
