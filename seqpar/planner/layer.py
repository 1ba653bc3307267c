"""One transformer layer on one rank as a timeline: what the runtime computes and sends, in the order it issues it.

``attention.py`` records attention. The operations besides attention and the linear layers only read and write device
memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from .attention import AttentionTimeline
from .hardware import Hardware
from .messages import RankPlace
from .mixer_layer import IndexedTimeline, MixerTimeline
from .setting import BETWEEN, ELEMENT_BYTES, GRADIENT_BYTES, WITHIN, Setting
from .simulate import Timeline


class RankTimeline:
    """Records the layers of one rank on a ``Timeline``.

    Args:
        setting: the model, the mask, the cluster and the split of the ranks.
        ring_rank: the index of the rank in its ring; by default the slowest rank's.
        ulysses_rank, tensor_rank: the index along the other dimensions. Rank 0 has at least as many heads as any other.
        head_groups: in how many groups of heads attention is computed, each with messages of its own.
    """

    def __init__(
        self,
        setting: Setting,
        ring_rank: int | None = None,
        ulysses_rank: int = 0,
        tensor_rank: int = 0,
        head_groups: int = 1,
    ) -> None:
        self.setting, self._head_groups = setting, head_groups
        ring_rank = setting.slowest_ring_rank() if ring_rank is None else ring_rank
        place = RankPlace(setting, ring_rank, ulysses_rank, tensor_rank)
        rank = (ring_rank * setting.ulysses + ulysses_rank) * setting.tensor + tensor_rank
        self._tokens = len(setting.tokens._positions(rank, 1)) * setting.batch
        m = setting.model
        group = replace(m, heads=m.heads // head_groups, kv_heads=m.kv_heads // head_groups)
        self._place, kind = place, setting.kind
        self._attention: AttentionTimeline | IndexedTimeline | None = None
        if kind.attention:
            grouped = replace(place, setting=replace(setting, model=group))
            self._attention = IndexedTimeline(place) if kind.indexed else AttentionTimeline(grouped)
        self._mixer = MixerTimeline(place, m.mixer, self._tokens // setting.batch) if kind.mixer and m.mixer else None

    def attention(self, timeline: Timeline, backward: bool = False) -> None:
        """Record the forward of attention, or its backward, with all messages."""
        if self._attention is not None:
            for _ in range(self._head_groups):
                self._attention.record(timeline, backward)

    def forward(self, timeline: Timeline, attention: bool = True) -> None:
        """Record the forward of a layer; with ``attention=False``, everything but attention."""
        m, kind, (qkv, output) = self.setting.model, self.setting.kind, self._projection_seconds()
        if kind.attention or kind.mixer:
            self._memory_bound(timeline, "norm", 2 * m.hidden)
        if kind.attention:
            self._linear(timeline, "q, k, v", gathered=qkv)
            self._memory_bound(timeline, "rotary", 2 * (m.d + m.d_kv))
            if attention or kind.indexed:  # what an indexer chose is computed again
                self.attention(timeline)
            self._linear(timeline, "output projection", summed=output)
            timeline.compute("cross-attention", self._cross_seconds())
        if self._mixer and m.mixer:
            timeline.compute("to the mixer", self._gemm_seconds(m.mixer.weights_in))
            self._mixer.forward(timeline)
            timeline.compute("output projection", self._gemm_seconds(m.mixer.weights_out))
        if kind.attention or kind.mixer:
            self._memory_bound(timeline, "residual", 3 * m.hidden)
        if kind.mlp:
            self._mlp_forward(timeline)

    def _mlp_forward(self, timeline: Timeline) -> None:
        m, (up, down) = self.setting.model, self._mlp_seconds()
        self._memory_bound(timeline, "norm", 2 * m.hidden)
        self._memory_bound(timeline, "copies to experts", 4 * m.copies * m.hidden)
        self._linear(timeline, "MLP", gathered=up)
        self._memory_bound(timeline, "activation", (3 if m.gated else 2) * m.mlp_width)
        self._linear(timeline, "MLP", summed=down)
        self._memory_bound(timeline, "residual", 3 * m.hidden)

    def backward(self, timeline: Timeline, keeps_attention: bool = False) -> None:
        """Record the backward of a layer. A linear layer has two GEMMs: the gradients of its input and its weight.

        Groups of heads compute their forward again, without their attention if ``keeps_attention``.
        """
        m, kind = self.setting.model, self.setting.kind
        if kind.mlp:
            self._mlp_backward(timeline)
        if self._mixer and m.mixer:
            timeline.compute("output projection", 2 * self._gemm_seconds(m.mixer.weights_out))
            self._mixer.backward(timeline)
            timeline.compute("to the mixer", 2 * self._gemm_seconds(m.mixer.weights_in))
        if kind.attention:
            self._attention_backward(timeline, keeps_attention)
        if kind.attention or kind.mixer:
            self._memory_bound(timeline, "residual, norm", 5 * m.hidden)

    def _mlp_backward(self, timeline: Timeline) -> None:
        m, (up, down) = self.setting.model, self._mlp_seconds()
        self._linear(timeline, "MLP", gathered=2 * down)
        self._memory_bound(timeline, "activation", (5 if m.gated else 3) * m.mlp_width)
        self._memory_bound(timeline, "copies to experts", 8 * m.copies * m.hidden)
        self._linear(timeline, "MLP", gathered=up, summed=up)
        self._memory_bound(timeline, "residual, norm", 8 * m.hidden)

    def _attention_backward(self, timeline: Timeline, keeps_attention: bool) -> None:
        m, (qkv, output) = self.setting.model, self._projection_seconds()
        timeline.compute("cross-attention", 2 * self._cross_seconds())
        self._linear(timeline, "output projection", gathered=2 * output)
        if self._head_groups > 1:
            timeline.compute("q, k, v, output projection", qkv + output)
            if not keeps_attention:
                self.attention(timeline)
        self.attention(timeline, True)
        self._memory_bound(timeline, "rotary", 2 * (m.d + m.d_kv))
        self._linear(timeline, "q, k, v", gathered=qkv, summed=qkv)

    def mlp_seconds(self) -> float:
        """Seconds of the GEMMs of the MLP in forward."""
        return sum(self._mlp_seconds())

    def _projection_seconds(self) -> tuple[float, float]:
        m = self.setting.model
        return self._gemm_seconds(m.qkv_parameters - m.expanding_parameters), self._gemm_seconds(m.d_out * m.hidden)

    def _mlp_seconds(self) -> tuple[float, float]:
        """Seconds of the MLP's GEMMs in forward: up (with a gate, gate and up), and down.

        With experts, at least the time in which the weights of all experts are read.
        """
        s, m = self.setting, self.setting.model
        one_matrix = self._gemm_seconds(m.hidden * m.mlp_width)
        if m.experts:
            read = ELEMENT_BYTES * m.mlp_parameters / (3 if m.gated else 2) / s.tensor
            one_matrix = max(one_matrix, read / s.hardware.memory_bandwidth)
        return one_matrix * (2 if m.gated else 1), one_matrix

    def _cross_seconds(self) -> float:
        """Seconds of cross-attention in forward: two projections, and two products with the keys and values."""
        m = self.setting.model
        return self._gemm_seconds(m.cross_parameters + 2 * m.d * m.cross_tokens)

    def _gemm_seconds(self, weights: float) -> float:
        """Seconds in which this rank multiplies the tokens of all tensor-parallel ranks by its shard of a weight.

        With t tensor-parallel ranks these are t times the rank's own tokens and 1 / t of the weight, so the FLOPs count
        its own tokens and all ``weights``.
        """
        return 2.0 * self._tokens * weights / self.setting.hardware.gemm_flops

    def _linear(self, timeline: Timeline, name: str, gathered: float = 0.0, summed: float = 0.0) -> None:
        """Record the GEMMs of a linear layer, in which t tensor-parallel ranks compute t chunks of the tokens.

        ``gathered`` seconds need the tokens of all ranks, which are sent meanwhile; the last chunk arrives before it is
        multiplied. The partial outputs of ``summed`` seconds are reduce-scattered; the first chunk is computed before
        it is sent.
        """
        t = self.setting.tensor
        tokens = self._exchange(timeline, "tokens") if gathered else None
        timeline.compute(name, summed / t)
        sums = self._exchange(timeline, "partial outputs") if summed else None
        timeline.compute(name, (gathered + summed) * (t - 1) / t)
        timeline.wait(tokens)
        timeline.compute(name, gathered / t)
        timeline.wait(sums)

    def _exchange(self, timeline: Timeline, name: str) -> int | None:
        place, size = self._place, float(self._tokens * self.setting.model.hidden * ELEMENT_BYTES)
        messages = [(place.level_to(tensor=i), size) for i in range(self.setting.tensor) if i != place.tensor]
        return place.start(timeline, name, "tensor", messages, messages, self.setting.hardware.peer, len(messages))

    def _memory_bound(self, timeline: Timeline, name: str, elements: float) -> None:
        timeline.compute(name, elements * self._tokens * ELEMENT_BYTES / self.setting.hardware.memory_bandwidth)


def attention_seconds(setting: Setting, passes: Sequence[str] = ("forward", "backward")) -> float:
    """Seconds of the attention of one layer by itself, on the slowest rank."""
    rank, seconds = RankTimeline(setting), 0.0
    for name in passes:
        timeline = Timeline()
        rank.attention(timeline, name == "backward")
        seconds += timeline.run().seconds
    return seconds


class WeightTransfer(NamedTuple):
    """What one rank sends of the weights and gradients of a layer: bytes by level of links, and the latency."""

    sent: Mapping[str, float]
    latency: float

    def links(self, hardware: Hardware) -> Mapping[str, float]:
        """Seconds for which each level of links is used."""
        return {WITHIN: self.sent[WITHIN] / hardware.all_gather, BETWEEN: self.sent[BETWEEN] / hardware.network}


def weight_transfer(setting: Setting, backward: bool) -> WeightTransfer:
    """The all-gather of a layer's weights in forward or in backward, and in backward the reduce-scatter of gradients.

    Each tensor-parallel rank gathers its own shard of the weights, from the ranks that have the same tensor-parallel
    index. Between hosts, a shard is sent once to each host, over the links of all its ranks with this index. A
    collective passes every rank once, so its latency grows with their number: 256 H100 reach 200 GB/s in an all-gather
    of 2 GB (NVIDIA/nccl #1218), which is 20 us for each of them in addition to the bytes. Inside a host it is half.
    """
    s, hardware = setting, setting.hardware
    per_host = max(1, min(s.ranks, hardware.gpus_per_host) // s.tensor)  # ranks that share a shard
    hosts = 1 if s.weights == "hsdp" else s.hosts
    once_a_step = 1 / s.accumulation if s.weights == "zero1" else 1.0
    gathers = 0.0 if backward and s.weights in ("zero1", "zero2") else once_a_step
    reductions = once_a_step if backward else 0.0
    weights = s.model.layer_parameters / s.tensor
    nbytes = (ELEMENT_BYTES * gathers + GRADIENT_BYTES * reductions) * weights
    sent = {WITHIN: nbytes * (per_host - 1) / per_host, BETWEEN: nbytes * (hosts - 1) / hosts / per_host}
    hops = (gathers + reductions) * (1 + hosts - 1 + hosts * (per_host - 1) / 2)
    if s.weights == "hsdp" and backward:  # an all-reduce of the shard's gradients over the hosts
        sent[BETWEEN] += 2 * GRADIENT_BYTES * weights / per_host * (s.hosts - 1) / s.hosts
        hops += 2 * (s.hosts - 1)
    return WeightTransfer(sent, hardware.latency * hops)
