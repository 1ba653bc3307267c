"""The time and the memory of one training step, put together from the timelines of one layer of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..placement.layout import Assigned, LayoutWord
from ..placement.strategies import Comm, compared_options
from .memory import MemoryUse, layer_activations, memory
from .rank import RankTimeline
from .setting import GRADIENT_BYTES, Setting, WeightSharding
from .simulate import Result, Task, Timeline
from .split import BETWEEN, ELEMENT_BYTES, FLOAT32_BYTES, LEVELS, WITHIN, Recompute, Switches


@dataclass(frozen=True)
class Choice:
    """One way to run the model, and what is predicted for one training step.

    A step is the forward and the backward of ``global_batch`` sequences, and the optimizer.

    Attributes:
        strategy: "local", "ring", "context_parallel", "ulysses", "hybrid" or "tp_sp", the names of
            ``seqpar.attention`` and ``seqpar.ParallelAttention``.
        context: the strategy of the attention itself. It differs from ``strategy`` under "tp_sp", where it is the
            strategy over the ring and Ulysses dimensions.
        comm: the option ``comm`` if ``context`` is "context_parallel", else None. With ``comm="p2p"`` the choice would
            be "ring".
        degrees: the number of ranks by dimension of ``init_mesh``: "dp", "ring", "ulysses", "tp".
        layout: which positions each rank holds; "balanced" is the layout of ``Sharding.balanced``.
        accumulation: how often each replica computes ``batch`` sequences in a step.
        tokens_per_step: tokens of all sequences of a step, the same for all choices of a plan.
        weights: how weights are sharded: "fsdp", "hsdp", "zero2" or "zero1".
        switches: what is recomputed, offloaded or computed some tokens at a time to save memory.
        needs: the switches of these that the package lacks. Such a choice is not recommended.
        fits: whether the GPU has ``memory_bytes``, and the host has the memory for offloaded activations.
        seconds: seconds of a step, as expected from the shares of published rates that real runs have reached.
        error: the share of its throughput by which a choice may be wrong, relative to the other choices.
        tokens_per_s: tokens per second of all replicas together.
        mfu: model FLOPs utilisation: the model's FLOPs in a step, without recomputation and of visible pairs only,
            divided by what all ranks could compute in that time at ``hardware.peak_flops``.
        compute_s: seconds of a step in which the slowest rank computes.
        exposed_s: seconds of a step in which the slowest rank waits for communication.
        parameters_s: seconds that the all-gathers of weights and the reduce-scatters of their gradients would take in a
            step without other communication. They overlap with the computation, so they are not added to ``seconds``.
        bytes_sent: bytes of activations that one rank sends in a step, by level of links: "within_host" and
            "between_hosts".
        parameter_bytes_sent: bytes of weights and gradients of weights that one rank sends in a step, by level of
            links.
        memory_bytes: the peak of memory on one rank, in bytes.
        memory: the parts of that peak.
        longest_seq_len: tokens of the longest sequence that fits into memory with the same degrees, under any of the
            switches that were allowed. 0 if none fits.
        reason: why the choice is the best, or why it is slower or does not fit.
        floor_s: seconds of the matrix products and of attention alone at the published rates.
        low_s, high_s: the seconds between which a step is expected to take, from the errors of published runs.
    """

    strategy: str
    context: str
    comm: Comm | None
    degrees: Mapping[str, int]
    layout: LayoutWord
    accumulation: int
    tokens_per_step: int
    weights: WeightSharding
    switches: Switches
    needs: tuple[str, ...]
    fits: bool
    seconds: float
    error: float
    tokens_per_s: float
    mfu: float
    compute_s: float
    exposed_s: float
    parameters_s: float
    bytes_sent: Mapping[str, int]
    parameter_bytes_sent: Mapping[str, int]
    memory_bytes: int
    memory: MemoryUse
    longest_seq_len: int
    reason: str
    floor_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0

    @property
    def possible(self) -> bool:
        """Whether it fits, and needs nothing that the package lacks."""
        return self.fits and not self.needs

    def as_dict(self) -> dict[str, Any]:
        """The choice as numbers, strings, lists and dicts, for JSON."""
        return asdict(self)


# The index of the row of layers; what is recomputed, None in forward; and the number of groups of heads.
_PassKey = tuple[int, Recompute | None, int]


def weight_transfer(setting: Setting, backward: bool) -> tuple[Task, Mapping[str, float]]:
    """The all-gather of a layer's weights in forward or in backward, and in backward the reduce-scatter of gradients.

    Each tensor-parallel rank gathers its own shard of the weights, from the ranks that have the same tensor-parallel
    index. Between hosts, a shard is sent once to each host, over the links of all its ranks with this index. A
    collective passes every rank once, so its latency grows with their number: 256 H100 reach 200 GB/s in an all-gather
    of 2 GB (NVIDIA/nccl #1218), which is 20 us for each of them in addition to the bytes. Inside a host it is half.

    Returns:
        The transfer, and the bytes that one rank sends by level of links.
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
    links = {WITHIN: sent[WITHIN] / hardware.all_gather, BETWEEN: sent[BETWEEN] / hardware.network}
    return Task("parameters", "parameters", links, hardware.latency * hops), sent


class StepCost:
    """The time of a training step on the slowest rank, for every combination of switches.

    Args:
        setting: the model, the mask, the cluster and the split of the ranks.
        recorded: what layers compute and send, without the transfers of weights, if another cost has recorded it.
    """

    def __init__(self, setting: Setting, recorded: dict[_PassKey, Timeline] | None = None) -> None:
        self.setting, self.layers = setting, [*setting.layers]
        self.recorded = {} if recorded is None else recorded
        self._passes: dict[_PassKey, Result] = {}

    def with_weights(self, weights: WeightSharding) -> StepCost:
        """The cost with weights that are sharded in another way. What layers compute and send is recorded once."""
        return StepCost(replace(self.setting, weights=weights), self.recorded)

    def parameters_seconds(self) -> float:
        """Seconds per layer of the transfers of weights and their gradients, if nothing else used the links."""
        tasks = [weight_transfer(self.setting, backward)[0] for backward in (False, True)]
        return sum(max(task.links.values()) + task.delay for task in tasks)

    def loss_seconds(self) -> float:
        """Seconds of the language model head's GEMMs and of the passes over the logits, in forward and backward."""
        s, m = self.setting, self.setting.model
        # Tensor-parallel ranks share the vocabulary and have the tokens of all of them, so each counts its own tokens.
        gemm = 6.0 * s.most_tokens * m.hidden * m.vocab / s.hardware.gemm_flops
        return gemm + 12.0 * s.most_tokens * m.vocab / s.hardware.memory_bandwidth

    def optimizer_seconds(self) -> float:
        """Seconds of AdamW on this rank's shard of the weights.

        AdamW reads the gradient, the float32 copy of the weight and the two moments. It writes the copy, the moments
        and the bfloat16 weight.
        """
        bytes_per_weight = 4 * FLOAT32_BYTES + 3 * FLOAT32_BYTES + ELEMENT_BYTES
        s = self.setting
        return bytes_per_weight * s.model.parameters / s.state_ranks / s.hardware.memory_bandwidth

    def passes(self, row: int, switches: Switches) -> tuple[Result, Result]:
        """The forward and the backward of a layer of a row.

        During forward the weights of the next layer are all-gathered; during the backward and the recomputation before
        it, they are all-gathered and the gradients of the last layer's weights are reduce-scattered.
        """
        groups = switches.head_groups
        return self._pass((row, None, groups)), self._pass((row, switches.recompute, groups))

    def _pass(self, key: _PassKey) -> Result:
        _, how, _ = key
        if key not in self._passes:
            recorded = self.recorded[key] = self.recorded.get(key) or self._record(*key)
            sharded = self.setting.ranks > self.setting.tensor  # otherwise every rank holds all of its weights
            weights = [weight_transfer(self.setting, how is not None)[0]] if sharded else []
            self._passes[key] = recorded.run(*weights)
        return self._passes[key]

    def _record(self, row: int, how: Recompute | None, groups: int) -> Timeline:
        """The forward for None, else the backward with the recomputation ``how``."""
        layer, split = self.layers[row]
        rank = RankTimeline(split, switches=Switches(how or "none", head_groups=groups))
        if how != "none":
            layer.forward(rank)
        if how is not None:
            layer.backward(rank)
        return rank.timeline

    def layer_seconds(self, row: int, switches: Switches) -> tuple[float, float]:
        """Seconds of the forward and backward of a layer; and the seconds of these in which the rank computes."""
        (layer, split), (forward, backward) = self.layers[row], self.passes(row, switches)
        total, compute = forward.seconds + backward.seconds, forward.compute + backward.compute
        if switches.tiled_mlp:  # backward computes the MLP's forward again
            rank = RankTimeline(split)
            again = sum(sum(part.product_seconds(rank)) for part in layer.parts if not part.mixes)
            total, compute = total + again, compute + again
        if switches.offload:  # to the host during forward, and back during backward
            copy = layer_activations(layer, split, replace(switches, head_groups=1))
            copy_seconds = copy / split.hardware.host_link
            total = max(forward.seconds, copy_seconds) + max(total - forward.seconds, copy_seconds)
        return total, compute


def step(setting: Setting, switches: Switches, cost: StepCost | None = None) -> Choice:
    """Predict one training step. ``longest_seq_len`` and ``reason`` of the choice are left empty.

    Args:
        setting: the model, the mask, the cluster and the split of the ranks.
        switches: what is recomputed, offloaded or computed some tokens at a time.
        cost: the ``StepCost`` of the setting, which simulates each row of layers once for all switches. By default a
            new one.
    """
    s, m, cost, times = setting, setting.model, cost or StepCost(setting), setting.accumulation
    layers = layers_compute = 0.0
    sent = dict.fromkeys(LEVELS, 0)
    for row, layer in enumerate(m.layers):
        seconds, compute = cost.layer_seconds(row, switches)
        layers, layers_compute = layers + layer.count * seconds, layers_compute + layer.count * compute
        for one_pass in cost.passes(row, switches):
            for level, size in one_pass.sent.items():
                sent[level] += layer.count * size
    outside_layers = times * cost.loss_seconds() + cost.optimizer_seconds()
    seconds = times * layers + outside_layers
    sequences = s.batch * s.replicas * times
    used = memory(s, switches)
    share = m.parameters / m.layer_parameters  # the embedding and the head are sent like layers
    weights = [weight_transfer(s, backward)[1] for backward in (False, True)]
    context = context_name(s)
    return Choice(
        strategy="tp_sp" if s.tensor > 1 else context,
        context=context,
        comm=compared_options(context).get("comm"),
        degrees={"dp": s.replicas, "ring": s.ring, "ulysses": s.ulysses, "tp": s.tensor},
        layout="balanced" if isinstance(s.layout, Assigned) else s.layout,
        accumulation=times,
        tokens_per_step=sequences * s.seq_len,
        weights=s.weights,
        switches=switches,
        needs=s.lacking(switches),
        fits=used.fits(s.hardware),
        seconds=seconds,
        error=0.0,
        tokens_per_s=sequences * s.seq_len / seconds,
        mfu=m.model_flops(sequences * s.seq_len, sequences * s.pairs) / (seconds * s.ranks * s.hardware.peak_flops),
        compute_s=times * layers_compute + outside_layers,
        exposed_s=max(0.0, round(times * (layers - layers_compute), 9)),
        parameters_s=times * m.depth * cost.parameters_seconds(),
        bytes_sent={level: times * size for level, size in sent.items()},
        parameter_bytes_sent={level: int(times * share * sum(x[level] for x in weights)) for level in LEVELS},
        memory_bytes=int(used.total),
        memory=used,
        longest_seq_len=0,
        reason="",
    )


def context_name(setting: Setting) -> str:
    """The strategy of attention over the ring and Ulysses dimensions of a setting."""
    if setting.ring > 1 and setting.ulysses > 1:
        return "hybrid"
    if setting.ring > 1:
        return "context_parallel" if setting.gather else "ring"
    return "ulysses" if setting.ulysses > 1 else "local"


def attention_seconds(setting: Setting, passes: Sequence[str] = ("forward", "backward")) -> float:
    """Seconds of the attention of one layer by itself, on the slowest rank."""
    seconds = 0.0
    for name in passes:
        rank = RankTimeline(setting)
        setting.model.attention.record(rank, name == "backward")
        seconds += rank.timeline.run().seconds
    return seconds
