"""Predict every strategy and split of the ranks for a model, a length and a cluster, and say which is best and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..checks import check_choice, check_int, check_number
from ..layout import LAYOUTS, Layout
from ..mask import Mask
from ..strategies import Comm, compared_options
from .hardware import Hardware, hardware_of
from .layer import BETWEEN, LEVELS, STATE_BYTES, WITHIN, RankTimeline, Setting, parameter_links
from .memory import RECOMPUTE, Memory, Switches, layer_activations, longest, memory, paper_activations
from .model import ModelShape, model_of
from .pairs import all_pairs
from .simulate import Result, Timeline

_E, _E_GRADIENT = 2, 4
_MOST_TOKENS = 2**31 - 1  # as the kernels count positions
_LONGEST_RING = 4096  # ranks; a longer one, slow to simulate, is left out where a shorter one is possible
_AS_FAST = 0.005  # choices within this of each other are as fast
_LEVEL_WORDS = {WITHIN: "inside hosts", BETWEEN: "between hosts"}


@dataclass(frozen=True)
class Choice:
    """One way to run the model, and what it is predicted to take.

    Attributes:
        strategy: "local", "ring", "context_parallel", "ulysses", "hybrid" or "tp_sp", as elsewhere in the package.
        context: the strategy of attention; under "tp_sp" that over the ring and ulysses dimensions.
        comm: what ``comm`` is where that strategy is "context_parallel"; its "p2p" is "ring".
        degrees: ranks by dimension of ``init_mesh``: "dp", "ring", "ulysses", "tp".
        layout: which positions each rank holds.
        switches: what is given up to save activations.
        fits: whether ``memory_bytes`` is at most the device's.
        seconds: of a step: each replica computes its sequences forward and backward, then the optimizer runs.
        tokens_per_s: of all ranks together.
        mfu: the model's FLOPs without recomputation, of visible pairs only, divided by the ranks' peak.
        compute_s: seconds of a step in which the slowest rank computes.
        exposed_s: seconds of a step in which it waits.
        parameters_s: seconds of a step in which weights and gradients are on the way, alone on their links.
        bytes_sent: bytes of activations that one rank sends in a step, by level.
        parameter_bytes_sent: bytes of weights and their gradients that one rank sends in a step.
        memory_bytes: the peak on one rank.
        memory: its parts.
        longest_seq_len: the longest sequence that fits with the same degrees, whatever is given up for it.
        reason: why it has its place among the choices.
    """

    strategy: str
    context: str
    comm: Comm | None
    degrees: Mapping[str, int]
    layout: Layout
    switches: Switches
    fits: bool
    seconds: float
    tokens_per_s: float
    mfu: float
    compute_s: float
    exposed_s: float
    parameters_s: float
    bytes_sent: Mapping[str, int]
    parameter_bytes_sent: int
    memory_bytes: int
    memory: Memory
    longest_seq_len: int
    reason: str

    @property
    def tokens_per_step(self) -> float:
        """Tokens of all sequences of a step."""
        return self.tokens_per_s * self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """What ``plan`` predicts.

    Attributes:
        model, hardware, seq_len, ranks, batch: what it was asked for.
        pairs: visible pairs of a query and a key in a sequence, the mean of the layers.
        choices: best first: those that fit by tokens a second, then the others by memory.
        paper_activation_bytes: of a layer on one device, by the formulas of Korthikanti et al., by what is recomputed.
    """

    model: ModelShape
    hardware: Hardware
    seq_len: int
    ranks: int
    batch: int
    pairs: int
    choices: tuple[Choice, ...]
    paper_activation_bytes: Mapping[str, float]

    @property
    def best(self) -> Choice:
        """The first choice."""
        return self.choices[0]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "choices": [choice.as_dict() for choice in self.choices]}


def plan(
    model: str | Path | Mapping[str, Any] | ModelShape | Any,
    seq_len: int,
    ranks: int,
    hardware: str | Path | Mapping[str, Any] | Hardware = "h100",
    mask: Mask | None = None,
    *,
    batch: int = 1,
    replicas: int | None = None,
    kernel: str | None = None,
    recompute: str | None = None,
    offload: bool | None = None,
    chunked_loss: bool = True,
    tiled_mlp: bool | None = None,
    state_bytes: float = STATE_BYTES,
) -> Plan:
    """Predict the training step of a model under every strategy and split of the ranks.

    Nothing is run and nothing is downloaded. The transfers are those of the plans that attention executes; a small
    simulation says which of them the computation hides. Weights and optimizer are sharded over all ranks (ZeRO-3).

    Args:
        model: a name such as "llama3-8b", the path of a Hugging Face ``config.json``, a config, a dict or a ModelShape.
        seq_len: tokens of a sequence.
        ranks: GPUs.
        hardware: a name ("a100", "h100", "h200", "b200", "mi300x"), a YAML or JSON file, a dict or a ``Hardware``.
        mask: which keys each query sees, by default ``Mask.causal()``.
        batch: sequences that each data-parallel replica computes at a time.
        replicas: data-parallel replicas; None compares every number of them.
        kernel: the attention kernel, a name of ``hardware.attention``; by default its first.
        recompute: "none", "keep_attention" or "full". None: the cheapest with which the choice fits.
        offload: whether saved activations wait in host memory; None as above.
        chunked_loss: whether logits are computed some tokens at a time.
        tiled_mlp: whether the MLP is; None as above.
        state_bytes: bytes a weight of the weights, their gradients and the optimizer. 18 is AdamW with float32 copies
            of bfloat16 weights, 8 AdamW all in bfloat16.

    Raises:
        ValueError: unknown names, or sizes that do not fit.

    Examples:
        >>> plan = seqpar.plan("llama3-8b", seq_len=1 << 20, ranks=64, hardware="h100")
        >>> plan.best.strategy, plan.best.degrees, plan.best.reason
    """
    shape, gpus = model_of(model), hardware_of(hardware)
    for name, value in (("seq_len", seq_len), ("ranks", ranks), ("batch", batch)):
        check_int(name, value, 1)
    if replicas is not None:
        check_int("replicas", replicas, 1)
        if ranks % replicas:
            raise ValueError(f"replicas={replicas}: expected a divisor of ranks={ranks}")
    gpus.rate(kernel)
    if recompute is not None:
        check_choice("recompute", recompute, RECOMPUTE)
    if check_number("state_bytes", state_bytes) < 0:
        raise ValueError(f"state_bytes={state_bytes}: expected the bytes a weight, at least 0")
    mask = Mask.causal() if mask is None else mask
    if not isinstance(mask, Mask):
        raise TypeError(f"mask={mask!r}: expected a seqpar.Mask, such as seqpar.Mask.causal()")
    mask.check_length(seq_len)
    if seq_len > _MOST_TOKENS:
        raise ValueError(f"seq_len={seq_len}: expected at most {_MOST_TOKENS}, whose positions are 32-bit integers")
    if seq_len < ranks:
        raise ValueError(f"seq_len={seq_len}: expected at least one token for each of ranks={ranks}")
    base = Setting(shape, gpus, mask, seq_len, batch, kernel=kernel, state_bytes=state_bytes)
    whole = base.sharding.ring_positions(0)
    kinds = shape.masks(mask, seq_len)
    pairs = sum(count * all_pairs(seen, seq_len, whole) for count, seen in kinds) // shape.layers
    switches = list(_switches(recompute, offload, chunked_loss, tiled_mlp))
    found: dict[tuple[int, ...], tuple[Choice, Setting]] = {}
    for setting in _settings(base, ranks, replicas):
        choice = _best_switches(setting, switches, pairs)
        key = setting.ring, setting.ulysses, setting.tensor, setting.replicas, setting.gather
        if key not in found or _order(choice) < _order(found[key][0]):
            found[key] = choice, setting
    ordered = sorted(found.values(), key=lambda x: _order(x[0]))
    best = ordered[0][0]
    if best.fits:  # of those that are as fast, the simplest, then the one with the most room
        close = [x for x in ordered if x[0].fits and x[0].tokens_per_s > (1 - _AS_FAST) * best.tokens_per_s]
        first = min(close, key=lambda x: (_dimensions(x[0]), x[0].memory_bytes))
        ordered.remove(first)
        ordered.insert(0, first)
    best = ordered[0][0]
    choices = [
        replace(choice, reason=_reason(choice, best, gpus), longest_seq_len=_longest(setting, switches))
        for choice, setting in ordered
    ]
    paper = {name: paper_activations(shape, seq_len, batch, recompute=name) for name in ("none", "selective", "full")}
    return Plan(shape, gpus, seq_len, ranks, batch, pairs, tuple(choices), paper)


def _order(choice: Choice) -> tuple[bool, float, float, int]:
    """Sorts the better choice first; among equals the one with the fewest ranks to a sequence."""
    if not choice.fits:
        return True, choice.memory_bytes, 0.0, 0
    return False, -choice.tokens_per_s, choice.memory_bytes, -choice.degrees["dp"]


def _dimensions(choice: Choice) -> int:
    """How many dimensions a sequence is sharded over."""
    return sum(choice.degrees[name] > 1 for name in ("ring", "ulysses", "tp"))


def _switches(
    recompute: str | None, offload: bool | None, chunked_loss: bool, tiled_mlp: bool | None
) -> Iterator[Switches]:
    both = (False, True)
    for how in RECOMPUTE:
        if recompute in (None, how):
            for tiled in both if tiled_mlp is None else (tiled_mlp,):
                for off in both if offload is None else (offload,):
                    yield Switches(how, off, chunked_loss, tiled)


def _settings(base: Setting, ranks: int, replicas: int | None) -> Iterator[Setting]:
    """Every split of the ranks that a mesh can have, with the layouts worth comparing."""
    model, splits = base.model, []
    for tensor, ulysses, ring in _splits(ranks):
        if tensor * ulysses > model.heads or tensor > base.hardware.gpus_per_host:
            continue  # ranks without heads; tensor parallelism between hosts waits for every layer
        split = replace(base, ring=ring, ulysses=ulysses, tensor=tensor, replicas=ranks // (ring * ulysses * tensor))
        if replicas in (None, split.replicas):
            splits.append(split)
    longest = max(_LONGEST_RING, min((split.ring for split in splits), default=0))
    for split in splits:
        if split.ring > longest:
            continue
        for layout in _layouts(split):
            yield replace(split, layout=layout)
            if split.ring > 1 and split.ulysses == 1:
                yield replace(split, layout=layout, gather=True)


def _layouts(setting: Setting) -> list[Layout]:
    """The layouts worth comparing. Without a ring, the layout changes only the order of the tokens."""
    if setting.ring == 1:
        return ["contiguous"]
    balance: dict[Layout, float] = {}
    for layout in LAYOUTS:  # contiguous first: its ranks see the fewest keys of others, then zigzag's
        balance[layout] = replace(setting, layout=layout).imbalance()
        if balance[layout] < 1.01:
            break
    least = min(balance.values())
    return [layout for layout in balance if balance[layout] < 1.3 * least]


def _splits(ranks: int) -> Iterator[tuple[int, int, int]]:
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    for tensor in divisors:
        for ulysses in divisors:
            for ring in divisors:
                if ranks % (tensor * ulysses * ring) == 0:
                    yield tensor, ulysses, ring


class StepCost:
    """The time of a training step, put together from the timelines of one layer of each kind."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        kinds = setting.model.masks(setting.mask, setting.seq_len)
        self.layers = [_LayerCost(replace(setting, mask=mask), count) for count, mask in kinds]

    def parameters_seconds(self) -> float:
        """The gathers and the reduce-scatter of a layer's weights, alone on their links."""
        return max(parameter_links(self.setting, (2 * _E + _E_GRADIENT) * _weights_of(self.setting)).values())

    def loss_seconds(self) -> float:
        """The head's GEMMs and the passes over the logits, forward and backward."""
        s, m = self.setting, self.setting.model
        gemm = 6.0 * s.tokens * m.hidden * m.vocab / s.hardware.gemm_flops  # vocabulary sharded over tensor ranks
        return gemm + 12.0 * s.tokens * m.vocab / s.hardware.memory_bandwidth

    def optimizer_seconds(self) -> float:
        """AdamW reads the gradient, the float32 copy and two moments, and writes the latter three and the weight."""
        return (4 * 4 + 3 * 4 + 2) * self.setting.model.parameters / self.setting.ranks / self._bandwidth

    @property
    def _bandwidth(self) -> float:
        return self.setting.hardware.memory_bandwidth


class _LayerCost:
    """The time of a layer on the slowest rank.

    Args:
        setting: with the mask of the layer.
        count: how many layers there are of the kind.
    """

    def __init__(self, setting: Setting, count: int) -> None:
        self.setting, self.count = setting, count
        self._backward: dict[str, tuple[Result, Mapping[str, int]]] = {}

    @cached_property
    def rank(self) -> RankTimeline:
        return RankTimeline(self.setting)

    def _layer(self, build: Callable[[Timeline], None], gathers: float) -> tuple[Result, Mapping[str, int]]:
        """Simulate a layer, with ``gathers`` bytes of the next layer's weights on the way behind it."""
        timeline, s = Timeline(), self.setting
        number = None
        if s.ranks > s.tensor:
            links = parameter_links(s, gathers)
            number = timeline.start("parameters", "parameters", links, s.hardware.latency)
        build(timeline)
        timeline.wait(number)
        return timeline.run(), dict(timeline.sent)

    @cached_property
    def forward(self) -> tuple[Result, Mapping[str, int]]:
        return self._layer(self.rank.forward, _E * _weights_of(self.setting))

    def backward(self, recompute: str) -> tuple[Result, Mapping[str, int]]:
        """The backward of a layer, after what it recomputes."""

        def build(timeline: Timeline) -> None:
            if recompute != "none":
                self.rank.forward(timeline, attention=recompute == "full")
            self.rank.backward(timeline)

        if recompute not in self._backward:
            self._backward[recompute] = self._layer(build, (_E + _E_GRADIENT) * _weights_of(self.setting))
        return self._backward[recompute]

    def seconds(self, switches: Switches) -> tuple[float, float]:
        """Of forward and backward, and those of them in which the rank computes."""
        (forward, _), (backward, _) = self.forward, self.backward(switches.recompute)
        layer, compute = forward.seconds + backward.seconds, forward.compute + backward.compute
        if switches.tiled_mlp:
            again = self.rank.mlp_seconds()
            layer, compute = layer + again, compute + again
        if switches.offload:  # both ways behind the layer
            moved = memory_of_layer(self.setting, switches) / self.setting.hardware.host_link
            layer = max(forward.seconds, moved) + max(layer - forward.seconds, moved)
        return layer, compute


def _weights_of(setting: Setting) -> float:
    """Elements of a layer's weights on one tensor-parallel rank."""
    return setting.model.layer_parameters / setting.tensor


def step(setting: Setting, switches: Switches, pairs: int, cost: StepCost | None = None) -> Choice:
    """Predict one step.

    Args:
        setting: the split of the ranks.
        switches: what is given up to save activations.
        pairs: visible pairs of a sequence, the mean of the layers.
        cost: that of the setting, if it has been made.
    """
    s, m = setting, setting.model
    cost = cost or StepCost(s)
    layers = compute = 0.0
    sent = dict.fromkeys(LEVELS, 0)
    for layer in cost.layers:
        one, computed = layer.seconds(switches)
        layers, compute = layers + layer.count * one, compute + layer.count * computed
        for _, counted in (layer.forward, layer.backward(switches.recompute)):
            for level, n in counted.items():
                sent[level] += layer.count * n
    rest = cost.loss_seconds() + cost.optimizer_seconds()
    seconds = layers + rest
    sequences = s.batch * s.replicas
    used = memory(s, switches)
    each = max(1, s.ranks // s.tensor)
    parameter_bytes = (2 * _E + _E_GRADIENT) * m.parameters / s.tensor * (each - 1) / each
    return Choice(
        strategy="tp_sp" if s.tensor > 1 else context_name(s),
        context=context_name(s),
        comm=compared_options(context_name(s)).get("comm"),
        degrees={"dp": s.replicas, "ring": s.ring, "ulysses": s.ulysses, "tp": s.tensor},
        layout=s.layout,
        switches=switches,
        fits=used.fits(s.hardware),
        seconds=seconds,
        tokens_per_s=sequences * s.seq_len / seconds,
        mfu=m.model_flops(sequences * s.seq_len, sequences * pairs) / (seconds * s.ranks * s.hardware.peak_flops),
        compute_s=compute + rest,
        exposed_s=max(0.0, round(layers - compute, 9)),
        parameters_s=m.layers * cost.parameters_seconds(),
        bytes_sent=sent,
        parameter_bytes_sent=int(parameter_bytes),
        memory_bytes=int(used.total),
        memory=used,
        longest_seq_len=0,
        reason="",
    )


def memory_of_layer(setting: Setting, switches: Switches) -> float:
    """Bytes that are kept of one layer until its backward."""
    return layer_activations(setting, switches.recompute, switches.tiled_mlp)


def context_name(s: Setting) -> str:
    """The strategy of attention with the degrees of a setting."""
    if s.ring > 1 and s.ulysses > 1:
        return "hybrid"
    if s.ring > 1:
        return "context_parallel" if s.gather else "ring"
    return "ulysses" if s.ulysses > 1 else "local"


def _longest(setting: Setting, switches: Sequence[Switches]) -> int:
    """The longest sequence that fits with any of the switches. The last way to recompute keeps least."""
    return max(longest(setting, x) for x in switches if x.recompute == switches[-1].recompute)


def _best_switches(setting: Setting, switches: Sequence[Switches], pairs: int) -> Choice:
    """The fastest switches that fit, or those that need the least memory."""
    used = {x: memory(setting, x) for x in switches}
    fitting = [x for x in switches if used[x].fits(setting.hardware)]
    cost = StepCost(setting)
    if not fitting:
        on_device = [x for x in switches if used[x].host <= setting.hardware.host_memory] or list(switches)
        return step(setting, min(on_device, key=lambda x: used[x].total), pairs, cost)
    # Less recomputation is faster, and so is less tiling. Offloading is free or not, depending on the layer.
    best: Choice | None = None
    for how in RECOMPUTE:
        tried = [x for x in fitting if x.recompute == how]
        kept = [x for x in tried if not x.offload and not x.tiled_mlp] or tried
        for x in kept:
            choice = step(setting, x, pairs, cost)
            if best is None or choice.seconds < best.seconds:
                best = choice
        if kept and any(not x.offload and not x.tiled_mlp for x in kept):
            break
    assert best is not None
    return best


def _reason(choice: Choice, best: Choice, hardware: Hardware) -> str:
    """Why a choice has its place among the others."""
    if not choice.fits and choice.memory.host > hardware.host_memory:
        return (
            f"does not fit: offloads {choice.memory.host / 1e9:.0f} of {hardware.host_memory / 1e9:.0f} GB of the host"
        )
    if not choice.fits:
        need, have = choice.memory_bytes / 1e9, hardware.memory_bytes / 1e9
        part = max(("activations", "states", "working", "gathered", "logits"), key=lambda x: getattr(choice.memory, x))
        words = {
            "activations": "what autograd keeps",
            "states": "weights and optimizer",
            "working": "one layer's backward",
            "gathered": "gathered weights",
            "logits": "the logits",
        }
        return f"does not fit: needs {need:.0f} of {have:.0f} GB, most of it for {words[part]}"
    waits = choice.exposed_s / choice.seconds
    busiest = max(LEVELS, key=lambda x: choice.bytes_sent[x] / _speed(hardware, x))
    what = f"for transfers {_LEVEL_WORDS[busiest]}"
    if choice.parameters_s > choice.compute_s:
        what = "for weights and gradients, whose transfers take longer than the computation"
    saved = f"; {choice.switches}" if str(choice.switches) else ""
    if choice is best:
        wait = f"waits {waits:.0%} of the step {what}" if waits >= 0.005 else "all transfers are hidden"
        return f"fastest that fits: {wait}{saved}"
    slower = best.tokens_per_s / choice.tokens_per_s
    if slower < 1 + _AS_FAST:
        return f"as fast as the best{saved}"
    more = (choice.exposed_s / choice.tokens_per_step - best.exposed_s / best.tokens_per_step) > (
        choice.compute_s / choice.tokens_per_step - best.compute_s / best.tokens_per_step
    )
    cause = f"waits {waits:.0%} of the step {what}" if more else _more_work(choice, best)
    return f"{slower - 1:.0%} slower: {cause}{saved}"


def _more_work(choice: Choice, best: Choice) -> str:
    """Why a choice computes longer than the best."""
    if choice.switches.recompute != best.switches.recompute:
        return "it recomputes more"
    return "its kernels are smaller, or its ranks' work is less equal"


def _speed(hardware: Hardware, level: str) -> float:
    return hardware.network if level == BETWEEN else hardware.p2p
