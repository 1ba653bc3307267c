"""Bytes of memory of one rank: weights and their states, activations that autograd keeps, and temporary tensors.

``layer_activations`` are what the layers of this package keep; the tests compare them with what autograd saves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, log2
from typing import Literal, get_args

from ..placement.heads import Heads
from .hardware import Hardware
from .setting import ELEMENT_BYTES, FLOAT32_BYTES, GRADIENT_BYTES, Setting
from .shape import ModelShape

Recompute = Literal["none", "keep_attention", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)

# Bytes per logit if all logits exist at once: 2 in the model's dtype, 4 in float32, and 2 + 4 for the gradients of
# both. (Hugging Face's blog on Ulysses measured 12.4: 1.89 MB per token for a vocabulary of 151,936.)
_LOGIT_BYTES = 12
# Bytes of a chunked loss: for one chunk, the logits in float32 and in the model's dtype, and their gradient.
_LOSS_CHUNK_BYTES = 3 * (128 << 20)
# Of attention to chosen keys, 2^25 elements at a time: the latents, their gradients, and these in float32.
_INDEXED_BYTES = (2 + 2 + 4) * (1 << 25)
_ALL_GATHER_CHUNKS = 4.0  # an all-gather of K/V receives the KV heads in at most this many chunks
TILE_TOKENS = 32_768  # of a tiled MLP, at most
_LENGTH_UNIT = 1024  # tokens; ``longest_sequence`` is a multiple of it


@dataclass(frozen=True)
class Switches:
    """What a training step recomputes, offloads or computes some tokens at a time, to need less device memory.

    Attributes:
        recompute: what backward recomputes: nothing ("none"), a layer without its attention ("keep_attention"), or a
            whole layer ("full").
        offload: whether saved activations are copied to host memory until backward.
        chunked_loss: whether logits are computed for some tokens at a time.
        tiled_mlp: whether the MLP is computed for some tokens at a time, and recomputed in backward.
        head_groups: in how many groups of heads the projections to q, k and v and attention are computed, one group
            after another.
    """

    recompute: Recompute = "none"
    offload: bool = False
    chunked_loss: bool = True
    tiled_mlp: bool = False
    head_groups: int = 1

    def lacking(self, setting: Setting) -> tuple[str, ...]:
        """The switches in use that ``seqpar.Memory`` lacks for a setting.

        It tiles MLPs and groups heads in layers without tensor parallelism. A group has whole KV heads, of an attention
        without latents, and a head for every Ulysses rank.
        """
        m, groups = setting.model, self.head_groups
        grouped = not m.kv_rank and m.kv_heads % groups == 0 and setting.ulysses * groups <= m.heads
        lacks = {
            "offload": self.offload and self.recompute == "none",
            "tiled_mlp": self.tiled_mlp and setting.tensor > 1,
            "head_groups": groups > 1 and (setting.tensor > 1 or not grouped),
        }
        return tuple(name for name, is_lacking in lacks.items() if is_lacking)

    @property
    def saving(self) -> int:
        """How many of ``offload``, ``tiled_mlp`` and ``head_groups`` are in use."""
        return self.offload + self.tiled_mlp + (self.head_groups > 1)

    def __str__(self) -> str:
        words = {"none": [], "keep_attention": ["recompute all but attention"], "full": ["recompute all"]}
        return ", ".join(
            words[self.recompute]
            + ["offload"] * self.offload
            + ["tiled MLP"] * self.tiled_mlp
            + [f"heads in {self.head_groups} groups"] * (self.head_groups > 1)
            + ["whole logits"] * (not self.chunked_loss)
        )


@dataclass(frozen=True)
class Memory:
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


def layer_activations(
    setting: Setting, recompute: Recompute = "none", tiled_mlp: bool = False, head_groups: int = 1
) -> float:
    """Bytes of tensors that autograd keeps for one layer on one rank."""
    m, tokens, kind = setting.model, setting.most_tokens, setting.kind
    if recompute != "none":
        return sum(_checkpointed(setting, recompute))
    norms = (kind.attention or kind.mixer) + kind.mlp
    nbytes: float = 2 * ELEMENT_BYTES * m.hidden * tokens * norms  # their inputs and outputs
    if m.cross_tokens:  # the norm's input and output, q and out
        nbytes += ELEMENT_BYTES * (2 * m.hidden + 2 * m.d) * tokens
    if head_groups == 1:  # groups are recomputed
        nbytes += _attention_activations(setting)
    return nbytes + (ELEMENT_BYTES * _mlp_elements(m) * tokens if kind.mlp and not tiled_mlp else 0)


def _checkpointed(setting: Setting, recompute: Recompute) -> list[float]:
    """Bytes of each tensor that a layer keeps if it is recomputed."""
    m = setting.model
    elements: list[float] = [m.hidden]  # the layer's input
    lse_bytes = 0.0
    if recompute == "keep_attention" and setting.kind.attention and not setting.kind.indexed:
        elements.append(m.d_out)
        lse_bytes = FLOAT32_BYTES * m.heads
        if setting.ulysses > 1:  # the head shards of q and out, and of k and v unless they are exchanged again
            elements += [m.d, m.d_out, *([] if _shares_kv(setting) else [m.sent_kv / 2] * 2)]
    return [
        float(setting.most_tokens * nbytes) for nbytes in (*(ELEMENT_BYTES * x for x in elements), lse_bytes) if nbytes
    ]


def _attention_activations(setting: Setting, head_groups: int = 1) -> float:
    """Bytes that autograd keeps for attention and the mixer of one layer, of one of ``head_groups`` groups of heads."""
    m, kind = setting.model, setting.kind
    elements = lse = 0.0
    if kind.attention:
        # q, k, v and out; with an all-to-all, out also as a head shard; with a gate, the gate before and after its
        # sigmoid, and its product with out.
        of_heads = m.d + m.sent_kv + (2 if setting.ulysses > 1 else 1) * m.d_out + 3 * m.gated_attention * m.d_out
        elements, lse = m.q_rank + of_heads / head_groups, m.heads / head_groups
    if kind.indexed:  # the latents of all ranks instead of this rank's, and the indices; no log-sum-exp
        elements, lse = elements + (setting.sequence_ranks - 1) * m.sent_kv, m.index_keys
    if kind.mixer and m.mixer:
        elements += m.mixer.kept + m.mixer.channels + _mixer_elements(setting)
    return float(setting.most_tokens * (ELEMENT_BYTES * elements + FLOAT32_BYTES * lse))


def _mixer_elements(setting: Setting) -> float:
    """Elements per token that the recurrence of a mixer reads. A rank has a head of each tensor at least."""
    mixer, ranks = setting.model.mixer, setting.sequence_ranks
    if mixer is None or not mixer.heads:
        return 0.0
    return max(mixer.heads, ranks) * mixer.of_head + max(mixer.groups, ranks) * mixer.of_group


def _mlp_elements(m: ModelShape) -> float:
    """Elements per token that an MLP keeps besides its input.

    With a gate: the outputs of gate and up, silu(gate), and its product with up. Without: the input and output of GeLU.
    With experts: also each expert's copy of its tokens, and its outputs, which the weights of the router multiply.
    """
    return (4 if m.gated else 2) * m.mlp_width + 2 * m.copies * m.hidden


def _shares_kv(setting: Setting) -> bool:
    """Whether two Ulysses ranks read the same KV head, in which case k and v are not kept but exchanged again."""
    m = setting.model
    by_rank = Heads.of_model(m.heads, m.sent_kv_heads).split(setting.tensor)[0].split(setting.ulysses)
    return any(a.kv and b.kv and a.kv.stop > b.kv.start for a, b in pairwise(by_rank))


def memory(setting: Setting, switches: Switches) -> Memory:
    """The memory of the rank with the longest shard."""
    s, m = setting, setting.model
    tokens, kinds = s.most_tokens, [replace(s, kind=kind) for kind in m.all_kinds]
    kept = 0.0
    for x in kinds:
        layer = layer_activations(x, switches.recompute, switches.tiled_mlp, switches.head_groups)
        # Offloaded: of the layer being copied and the next one.
        kept = max(kept, 2 * layer) if switches.offload else kept + x.kind.layers * layer
    kept += 2 * ELEMENT_BYTES * m.hidden * tokens  # the output of the embedding and the input of the head
    logits = 0.0
    if m.vocab and switches.chunked_loss:
        logits = _LOSS_CHUNK_BYTES + ELEMENT_BYTES * m.hidden * tokens
    elif m.vocab:
        logits = _LOGIT_BYTES * tokens * m.vocab / s.tensor
    return Memory(
        states=s.state_bytes * m.parameters / s.state_ranks,
        gathered=_gathered(s),
        activations=kept,
        working=max(_working(x, switches) for x in kinds),
        logits=logits,
        reserved=s.hardware.reserved_bytes,
        host=sum(_host(x, switches.recompute) for x in kinds) if switches.offload else 0.0,
    )


def _host(setting: Setting, recompute: Recompute) -> float:
    """Bytes of host memory for what all layers of a kind keep: each tensor takes a power of two."""
    return float(setting.kind.layers * sum(2 ** ceil(log2(nbytes)) for nbytes in _checkpointed(setting, recompute)))


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
        layers = ELEMENT_BYTES * m.layers * m.layer_parameters + GRADIENT_BYTES * m.layer_parameters
    head = (ELEMENT_BYTES + GRADIENT_BYTES) * (m.vocab * m.hidden)
    return (layers + head) / setting.tensor


def _working(setting: Setting, switches: Switches) -> float:
    """Bytes of the temporary tensors of a layer's backward.

    The MLP's and attention's backwards run one after the other, so the larger one counts. The activations of the layer
    that backward recomputes exist from then on until their own backward.
    """
    during_attention = during_mlp = 0.0
    groups = switches.head_groups
    if switches.recompute != "none":
        during_attention = 2 * ELEMENT_BYTES * setting.model.hidden * setting.most_tokens  # the norm's input and output
        during_mlp = layer_activations(setting, "none", switches.tiled_mlp, groups)
    if switches.recompute != "none" or groups > 1:
        during_attention += _attention_activations(setting, groups)
    return max(
        during_attention + _mixing_working(setting) / switches.head_groups,
        during_mlp + (_mlp_working(setting, switches.tiled_mlp) if setting.kind.mlp else 0.0),
    )


def _mixing_working(setting: Setting) -> float:
    """Bytes of the temporary tensors of the backward of attention and the mixer, whichever needs more."""
    kind, mixer = setting.kind, setting.model.mixer
    mixing = 0.0
    if kind.mixer and mixer:  # the gradients of what it keeps and reads, and of its result; the messages of these
        read = _mixer_elements(setting)
        elements = mixer.channels + read + mixer.heads * mixer.result
        mixing = ELEMENT_BYTES * setting.most_tokens * (elements + (elements if setting.sequence_ranks > 1 else 0))
    return max(mixing, _attention_working(setting) if kind.attention else 0.0)


def _attention_working(setting: Setting) -> float:
    """Bytes of the temporary tensors of attention's backward: gradients, and K/V and their gradients in transfer."""
    s, m, tokens = setting, setting.model, setting.most_tokens
    if s.kind.indexed:  # dq and dout; all latents, their gradients in float32, and what is computed at a time
        latents = s.sequence_ranks * m.sent_kv * (ELEMENT_BYTES + FLOAT32_BYTES)
        return tokens * (ELEMENT_BYTES * (m.d + m.d_out) + latents) + _INDEXED_BYTES
    head_ranks = s.ulysses * s.tensor  # ranks that share the heads
    kv_heads = max(1.0, m.sent_kv_heads / head_ranks)
    # Elements of k and v of one ring rank: all tokens of the ranks that share the heads, and the heads of one of them.
    kv = tokens * head_ranks * kv_heads * m.sent_kv / m.sent_kv_heads
    # dq in float32 and rounded, and dout; dk and dv in float32 and rounded.
    nbytes: float = tokens * ((ELEMENT_BYTES + FLOAT32_BYTES) * m.d + ELEMENT_BYTES * m.d_out)
    nbytes += kv * (FLOAT32_BYTES + ELEMENT_BYTES)
    if s.ring > 1 and s.gather:  # two chunks of the K/V of the other ranks, and of their gradients
        chunks = min(_ALL_GATHER_CHUNKS, kv_heads)
        nbytes += (s.ring - 1) * kv * (2 * ELEMENT_BYTES + 2 * FLOAT32_BYTES) / chunks
    elif s.ring > 1:  # the K/V of three steps, and the gradients of two
        nbytes += kv * (3 * ELEMENT_BYTES + 2 * FLOAT32_BYTES)
    if s.ulysses > 1:  # the messages of an all-to-all
        nbytes += tokens * ELEMENT_BYTES * (m.d + kv / tokens)
    return nbytes


def _mlp_working(setting: Setting, tiled_mlp: bool) -> float:
    """Bytes of the temporary tensors of the MLP's backward: gradients of its activations, of one tile if it is
    tiled, and the gradients of its input and output."""
    m, tokens = setting.model, setting.most_tokens
    tile_tokens = tokens / -(-tokens // TILE_TOKENS) if tiled_mlp else tokens
    activations = _mlp_elements(m)
    nbytes: float = ELEMENT_BYTES * tile_tokens * (activations / 2 if m.gated else activations)
    nbytes += 2 * ELEMENT_BYTES * tokens * m.hidden
    if tiled_mlp:  # the recomputed activations of the tile
        nbytes += ELEMENT_BYTES * tile_tokens * activations
    if setting.tensor > 1:  # the input of two tensor-parallel ranks
        nbytes += 2 * ELEMENT_BYTES * tokens * m.hidden
    return nbytes


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
