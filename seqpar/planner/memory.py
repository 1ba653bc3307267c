"""Bytes of device memory of one rank: weights and their states, what autograd keeps, and what exists for a while.

``paper_activations`` are the formulas of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", 2022, for their GPT. ``layer_activations`` is what this package's layers keep, which its tests measure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

from ..heads import Heads
from .hardware import Hardware
from .layer import Setting
from .model import ModelShape

Recompute = Literal["none", "keep_attention", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)

_E = 2  # bytes of an element of the model's dtype
# Bytes a logit, if all exist at once: 2 in the model's dtype, 4 in float32, 4 + 2 for the gradients of both (Hugging
# Face's Ulysses blog measured 1.89 MB a token for a vocabulary of 151,936: 12.4).
_LOGIT_BYTES = 12
_LOSS_CHUNK = 3 * (128 << 20)  # float32 logits of one chunk, in the model's dtype, and their gradient


@dataclass(frozen=True)
class Switches:
    """What a model gives up to save activations.

    Attributes:
        recompute: what backward computes again: nothing ("none"), a layer but not its attention ("keep_attention"), or
            all of it ("full").
        offload: keep what a layer saves in the host's memory until backward.
        chunked_loss: compute logits some tokens at a time.
        tiled_mlp: compute the MLP some tokens at a time, and again in backward.
    """

    recompute: Recompute = "none"
    offload: bool = False
    chunked_loss: bool = True
    tiled_mlp: bool = False

    def __str__(self) -> str:
        words = {"none": [], "keep_attention": ["recompute all but attention"], "full": ["recompute all"]}
        return ", ".join(
            words[self.recompute]
            + ["offload activations"] * self.offload
            + ["tiled MLP"] * self.tiled_mlp
            + ["whole logits"] * (not self.chunked_loss)
        )


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    Attributes:
        states: weights, gradients and optimizer, sharded over all ranks.
        gathered: weights of the layers at work, with their gradients, and of the embedding and the head.
        activations: what autograd keeps of all layers.
        working: what exists while one layer runs backward.
        logits: of the loss.
        reserved: by CUDA, NCCL and the allocator.
        host: in the host's memory, of activations that are offloaded.
    """

    states: float
    gathered: float
    activations: float
    working: float
    logits: float
    reserved: float
    host: float = 0.0

    def fits(self, hardware: Hardware) -> bool:
        """Whether the device and its share of the host have room."""
        return self.total <= hardware.memory_bytes and self.host <= hardware.host_memory

    @property
    def total(self) -> float:
        """The peak. A layer's backward and the loss do not run at the same time."""
        return self.states + self.gathered + self.activations + max(self.working, self.logits) + self.reserved


def paper_activations(
    model: ModelShape,
    seq_len: int,
    batch: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Bytes a layer of the paper's GPT keeps on one rank, 16-bit activations (its equations 1, 2, 4 and table 2).

    Args:
        model: heads and hidden size count.
        seq_len, batch: tokens and sequences.
        tensor: tensor-parallel ranks.
        sequence_parallel: whether the tokens are sharded outside the linear layers too.
        recompute: "none", "selective" (attention) or "full".
    """
    sbh = float(seq_len) * batch * model.hidden
    if recompute == "full":
        return 2 * sbh
    scores = 0.0 if recompute == "selective" else 5.0 * model.heads * seq_len / model.hidden / tensor
    outside = 10.0 / tensor if sequence_parallel else 10.0
    return sbh * (outside + 24.0 / tensor + scores)


def layer_activations(setting: Setting, recompute: Recompute = "none", tiled_mlp: bool = False) -> float:
    """Bytes that autograd keeps of one layer on one rank."""
    m, tokens = setting.model, setting.tokens
    if recompute == "full":
        return float(_E * m.hidden * tokens)
    lse = 4 * m.heads
    if recompute == "keep_attention":
        # The layer's input, and the results of the operator: out and lse; with an all-to-all the head shards too.
        elements: float = m.hidden + m.d_out
        if setting.ulysses > 1:
            elements += m.d + m.d_out + (0 if _shares_kv(setting) else m.d_kv + m.d_v)
        return float(tokens * (_E * elements + lse))
    # Two norms and their inputs; q, k, v and out, with an all-to-all as head shard and as sequence shard.
    elements = 4 * m.hidden + m.d + (2 if setting.ulysses > 1 else 1) * m.d_out + m.d_kv + m.d_v
    if not tiled_mlp:
        elements += _mlp_width(m)
    return float(tokens * (_E * elements + lse))


def _mlp_width(m: ModelShape) -> float:
    """Elements per token that an MLP keeps besides its input: gate, up, silu(gate), product; GeLU input, output."""
    return (4 if m.gated else 2) * m.mlp_width


def _shares_kv(setting: Setting) -> bool:
    m = setting.model
    by_rank = Heads.of_model(m.heads, m.kv_heads).split(setting.tensor)[0].split(setting.ulysses)
    return any(a.kv and b.kv and a.kv.stop > b.kv.start for a, b in pairwise(by_rank))


def memory(setting: Setting, switches: Switches) -> Memory:
    """The bytes of one rank."""
    s, m = setting, setting.model
    tokens = s.tokens
    layer = layer_activations(s, switches.recompute, switches.tiled_mlp)
    kept = 2 * layer if switches.offload else m.layers * layer
    kept += _E * m.hidden * tokens * 2  # the embedding's output, the head's input
    return Memory(
        states=s.state_bytes * m.parameters / s.ranks,
        gathered=_gathered(s),
        activations=kept,
        working=_working(s, switches),
        logits=_LOSS_CHUNK + _E * m.hidden * tokens
        if switches.chunked_loss
        else _LOGIT_BYTES * tokens * m.vocab / s.tensor,
        reserved=s.hardware.reserved_bytes,
        host=m.layers * layer if switches.offload else 0.0,
    )


def _gathered(s: Setting) -> float:
    """Two layers' weights, since the next layer's are gathered behind this one, and one layer's gradients."""
    m = s.model
    if s.ranks == s.tensor:
        return 0.0
    head = m.vocab * m.hidden
    return ((2 * _E + 4) * m.layer_parameters + (_E + 4) * head) / s.tensor


def _working(s: Setting, switches: Switches) -> float:
    """The larger half of a layer's backward, with what was recomputed for it."""
    m, tokens = s.model, s.tokens
    recomputed = layer_activations(s, "none", switches.tiled_mlp) if switches.recompute != "none" else 0.0
    # Attention: dout, dq in float32 and rounded, dk and dv likewise; and the K/V on the way.
    ranks = s.ulysses * s.tensor
    kv_heads = max(1.0, m.kv_heads / ranks)
    kv = tokens * ranks * kv_heads * (m.d_kv + m.d_v) / m.kv_heads  # elements of k and v of one rank of the ring
    attention = tokens * ((_E + 4) * m.d + _E * m.d_out) + kv * (4 + _E)
    if s.ring > 1 and s.gather:
        parts = min(4.0, kv_heads)
        attention += (s.ring - 1) * kv * (2 * _E + 2 * 4) / parts
    elif s.ring > 1:
        attention += kv * (3 * _E + 2 * 4)
    if s.ulysses > 1:
        attention += tokens * _E * (m.d + kv / tokens)
    # The MLP: the gradients of its activations, of some tokens at a time if tiled.
    at_once = min(tokens, m.hidden) if switches.tiled_mlp else tokens
    width = _mlp_width(m)
    mlp = _E * at_once * (width * 3 / 4 if m.gated else width) + 2 * _E * tokens * m.hidden
    if switches.tiled_mlp:
        mlp += _E * at_once * width
    if s.tensor > 1:  # two ranks' shards of the input
        mlp += 2 * _E * tokens * m.hidden
    return recomputed + max(attention, mlp)


def longest(setting: Setting, switches: Switches) -> int:
    """The longest sequence whose memory fits, a multiple of 1,024 tokens; 0 if none does."""

    def fits(units: int) -> bool:
        return memory(replace(setting, seq_len=1024 * units), switches).fits(setting.hardware)

    low, high = 0, 1
    while fits(high) and high < 1 << 30:
        low, high = high, 2 * high
    while high - low > max(1, low // 1024):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return 1024 * low
