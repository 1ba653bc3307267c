"""Predict every strategy and split of the ranks for a model, a sequence length and a cluster, and order them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from ..checks import check_choice, check_int, check_number
from ..layout import LAYOUTS, Layout
from ..mask import Mask
from .hardware import Hardware, hardware_of
from .memory import RECOMPUTE, Switches, longest_sequence, memory, paper_activations
from .model import ModelShape, model_of
from .pairs import all_pairs
from .setting import BETWEEN, LEVELS, STATE_BYTES, WITHIN, Setting
from .step import Choice, StepCost, step

_MOST_TOKENS = 2**31 - 1  # kernels count positions in 32-bit integers
# The longest ring that is simulated, in ranks, for plans of up to as many ranks. It is shorter for more ranks, see
# ``_without_long_rings``.
_LONGEST_RING = 4096
# The slowest rank's share of the work, relative to the mean.
_BALANCED = 1.01  # a layout with less imbalance needs no comparison with the layouts after it
_WORTH_COMPARING = 1.3  # a layout with more than this times the least imbalance is left out
_AS_FAST = 0.005  # a choice whose throughput is within this share of the best one's counts as fast as the best
_HIDDEN = 0.005  # below this share of a step, waits for transfers count as hidden
_LEVEL_WORDS = {WITHIN: "inside hosts", BETWEEN: "between hosts"}
_MEMORY_WORDS = {
    "activations": "what autograd keeps",
    "states": "weights and optimizer",
    "working": "one layer's backward",
    "gathered": "gathered weights",
    "logits": "the logits",
}


@dataclass(frozen=True)
class Plan:
    """What ``seqpar.plan`` predicts.

    Attributes:
        model: the shape of the model.
        hardware: the GPUs and the links.
        seq_len: tokens of a sequence.
        ranks: GPUs of all replicas.
        batch: sequences that each replica computes at a time.
        pairs: visible pairs of a query and a key in one sequence, the mean of the layers.
        choices: the choices that fit, the most tokens per second first; then those that do not, the least memory
            first.
        paper_activation_bytes: bytes of activations of one layer on one device by the formulas of Korthikanti et al.,
            for "none", "selective" and "full" recomputation.
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
        """The plan as numbers, strings, lists and dicts, for JSON."""
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

    Nothing is run and nothing is downloaded. The transfers come from the plans that attention executes, and a small
    simulation finds which of them overlap with computation. Weights, gradients and the state of the optimizer are
    sharded over all ranks (ZeRO-3).

    Args:
        model: a name such as "llama3-8b", the path of a Hugging Face ``config.json``, a config object, a dict or a
            ``ModelShape``.
        seq_len: tokens of a sequence.
        ranks: GPUs of all replicas.
        hardware: a name ("a100", "h100", "h200", "b200", "mi300x"), a YAML or JSON file, a dict or a ``Hardware``.
        mask: which keys each query sees; by default ``Mask.causal()``.
        batch: sequences that each data-parallel replica computes at a time.
        replicas: data-parallel replicas. By default every possible number is compared.
        kernel: the attention kernel, a name of ``hardware.attention``; by default the first one.
        recompute: what backward recomputes: "none", "keep_attention" (a layer without its attention) or "full" (a
            whole layer). By default each choice takes the fastest with which it fits.
        offload: whether saved activations are kept in host memory until backward. By default where it is the fastest.
        chunked_loss: whether logits are computed for some tokens at a time.
        tiled_mlp: whether the MLP is computed for some tokens at a time. By default only where it is needed.
        state_bytes: bytes per weight, for the weight, its gradient and the state of the optimizer. It is 18 for AdamW
            with float32 copies of bfloat16 weights, and 8 for AdamW all in bfloat16.

    Raises:
        TypeError: an argument has another type.
        ValueError: a name is unknown, a number is out of range, or ``mask`` is for another length.

    Examples:
        >>> plan = seqpar.plan("llama3-8b", seq_len=1 << 20, ranks=64, hardware="h100")
        >>> plan.best.strategy, plan.best.degrees, plan.best.reason
    """
    shape, gpus = model_of(model), hardware_of(hardware)
    mask = Mask.causal() if mask is None else mask
    _check(gpus, seq_len, ranks, mask, batch, replicas, kernel, recompute, state_bytes)
    base = Setting(shape, gpus, mask, seq_len, batch, kernel=kernel, state_bytes=state_bytes)
    everything = base.sharding.ring_positions(0)  # not sharded: all positions
    kinds = shape.masks(mask, seq_len)
    pairs = sum(count * all_pairs(layer_mask, seq_len, everything) for count, layer_mask in kinds) // shape.layers
    switches = list(_switches(recompute, offload, chunked_loss, tiled_mlp))
    ordered = _fastest_first(_best_of_each_split(base, ranks, replicas, switches, pairs))
    best = ordered[0][0]
    choices = tuple(
        replace(choice, reason=_reason(choice, best, gpus), longest_seq_len=_longest(setting, switches))
        for choice, setting in ordered
    )
    paper = {name: paper_activations(shape, seq_len, batch, recompute=name) for name in ("none", "selective", "full")}
    return Plan(shape, gpus, seq_len, ranks, batch, pairs, choices, paper)


def _check(
    hardware: Hardware,
    seq_len: int,
    ranks: int,
    mask: Mask,
    batch: int,
    replicas: int | None,
    kernel: str | None,
    recompute: str | None,
    state_bytes: float,
) -> None:
    """Raise unless the arguments of ``plan`` are valid."""
    for name, value in (("seq_len", seq_len), ("ranks", ranks), ("batch", batch)):
        check_int(name, value, 1)
    if replicas is not None:
        check_int("replicas", replicas, 1)
        if ranks % replicas:
            raise ValueError(f"replicas={replicas}: expected a divisor of ranks={ranks}")
    hardware.rate(kernel)
    if recompute is not None:
        check_choice("recompute", recompute, RECOMPUTE)
    if check_number("state_bytes", state_bytes) < 0:
        raise ValueError(f"state_bytes={state_bytes}: expected the bytes per weight, at least 0")
    if not isinstance(mask, Mask):
        raise TypeError(f"mask={mask!r}: expected a seqpar.Mask, such as seqpar.Mask.causal()")
    mask.check_length(seq_len)
    if seq_len > _MOST_TOKENS:
        raise ValueError(
            f"seq_len={seq_len}: expected at most {_MOST_TOKENS}, because positions are 32-bit integers in kernels"
        )
    if seq_len < ranks:
        raise ValueError(f"seq_len={seq_len}: expected at least one token for each of ranks={ranks}")


# The settings that are compared


def _best_of_each_split(
    base: Setting, ranks: int, replicas: int | None, switches: Sequence[Switches], pairs: int
) -> list[tuple[Choice, Setting]]:
    """For every split of the ranks and strategy, the best layout and switches."""
    found: dict[tuple[int, int, int, int, bool], tuple[Choice, Setting]] = {}
    for setting in _settings(base, ranks, replicas, switches):
        choice = _best_switches(setting, switches, pairs)
        key = setting.ring, setting.ulysses, setting.tensor, setting.replicas, setting.gather
        if key not in found or _order(choice) < _order(found[key][0]):
            found[key] = choice, setting
    return list(found.values())


def _settings(base: Setting, ranks: int, replicas: int | None, switches: Sequence[Switches]) -> Iterator[Setting]:
    """The splits of ``ranks`` that are compared, with the layouts worth comparing.

    Args:
        base: the model, the mask and the cluster.
        ranks: GPUs of all replicas.
        replicas: their number; None compares every possible one.
        switches: the switches that are allowed.
    """
    for split in _without_long_rings(list(_splits(base, ranks, replicas)), switches):
        for layout in _layouts(split):
            yield replace(split, layout=layout)
            if split.ring > 1 and split.ulysses == 1:
                yield replace(split, layout=layout, gather=True)


def _splits(base: Setting, ranks: int, replicas: int | None) -> Iterator[Setting]:
    """Every split of ``ranks`` into tensor-parallel, Ulysses and ring ranks and replicas that is worth comparing."""
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    for tensor, ulysses, ring in product(divisors, repeat=3):
        sequence_ranks = tensor * ulysses * ring
        if ranks % sequence_ranks or replicas not in (None, ranks // sequence_ranks):
            continue
        if tensor * ulysses > base.model.heads:
            continue  # some ranks would have no heads
        if tensor > base.hardware.gpus_per_host:
            continue  # tensor parallelism between hosts: every layer would wait for it
        yield replace(base, ring=ring, ulysses=ulysses, tensor=tensor, replicas=ranks // sequence_ranks)


def _without_long_rings(splits: list[Setting], switches: Sequence[Switches]) -> list[Setting]:
    """The splits without those whose rings are too long to simulate.

    The time of a simulation is proportional to the length of the ring, and with more ranks there are more and longer
    rings. So that a plan for more ranks takes no longer, the limit is ``_LONGEST_RING`` for up to as many ranks, and
    inversely proportional to the number of ranks beyond.

    A longer ring is not expected to be the fastest if a shorter one fits into memory: each rank receives nearly all
    K/V, however long the ring is, but has fewer queries to compute in the meantime. If only rings beyond the limit fit,
    the shortest of these is kept. If none fits, the shortest of all is kept.
    """
    ranks = max((split.ranks for split in splits), default=1)
    limit = min(_LONGEST_RING, _LONGEST_RING**2 // ranks)
    if all(split.ring <= limit for split in splits):
        return splits
    fitting = [s.ring for s in splits if any(memory(s, x).fits(s.hardware) for x in switches)]
    shortest = min(fitting or [split.ring for split in splits])
    return [split for split in splits if split.ring <= limit or split.ring == shortest]


def _layouts(setting: Setting) -> list[Layout]:
    """The layouts worth comparing. Without a ring there is one, since a layout changes only the order of tokens."""
    if setting.ring == 1:
        return ["contiguous"]
    imbalance: dict[Layout, float] = {}
    # Contiguous ranks see the fewest keys of other ranks, then zigzag ranks. A later layout must be better balanced.
    for layout in LAYOUTS:
        imbalance[layout] = replace(setting, layout=layout).imbalance()
        if imbalance[layout] < _BALANCED:
            break
    least = min(imbalance.values())
    return [layout for layout, value in imbalance.items() if value < _WORTH_COMPARING * least]


# What is recomputed, offloaded or computed some tokens at a time


def _switches(
    recompute: str | None, offload: bool | None, chunked_loss: bool, tiled_mlp: bool | None
) -> Iterator[Switches]:
    """Every combination of switches that the arguments of ``plan`` allow, the least recomputation first."""
    both = (False, True)
    for how in RECOMPUTE:
        if recompute in (None, how):
            for tiled in both if tiled_mlp is None else (tiled_mlp,):
                for offloaded in both if offload is None else (offload,):
                    yield Switches(how, offloaded, chunked_loss, tiled)


def _best_switches(setting: Setting, switches: Sequence[Switches], pairs: int) -> Choice:
    """The choice with the fastest switches that fit; if none fit, with those that need the least device memory."""
    used = {x: memory(setting, x) for x in switches}
    fitting = [x for x in switches if used[x].fits(setting.hardware)]
    cost = StepCost(setting)
    if not fitting:
        host_fits = [x for x in switches if used[x].host <= setting.hardware.host_memory] or list(switches)
        return step(setting, min(host_fits, key=lambda x: used[x].total), pairs, cost)
    # Less recomputation is faster, and so is an MLP that is not tiled. Whether offloading costs time depends on how
    # long a layer computes.
    best: Choice | None = None
    for how in RECOMPUTE:
        allowed = [x for x in fitting if x.recompute == how]
        plain = [x for x in allowed if not x.offload and not x.tiled_mlp]
        for x in plain or allowed:
            choice = step(setting, x, pairs, cost)
            if best is None or choice.seconds < best.seconds:
                best = choice
        if plain:
            break
    assert best is not None
    return best


def _longest(setting: Setting, switches: Sequence[Switches]) -> int:
    """Tokens of the longest sequence that fits with any of the switches; the last recomputation saves the most."""
    return max(longest_sequence(setting, x) for x in switches if x.recompute == switches[-1].recompute)


# The order of the choices


def _fastest_first(found: list[tuple[Choice, Setting]]) -> list[tuple[Choice, Setting]]:
    """The choices in order. Of those that are as fast as the fastest, the simplest comes first, then the one that needs
    the least memory."""
    ordered = sorted(found, key=lambda x: _order(x[0]))
    fastest = ordered[0][0]
    if fastest.fits:
        as_fast = [x for x in ordered if x[0].fits and x[0].tokens_per_s > (1 - _AS_FAST) * fastest.tokens_per_s]
        first = min(as_fast, key=lambda x: (_dimensions(x[0]), x[0].memory_bytes))
        ordered.remove(first)
        ordered.insert(0, first)
    return ordered


def _order(choice: Choice) -> tuple[bool, float, float, int]:
    """Sorts the better choice first; of equal ones, the one with the fewest ranks per sequence."""
    if not choice.fits:
        return True, choice.memory_bytes, 0.0, 0
    return False, -choice.tokens_per_s, choice.memory_bytes, -choice.degrees["dp"]


def _dimensions(choice: Choice) -> int:
    """The number of dimensions that a sequence is sharded over."""
    return sum(choice.degrees[name] > 1 for name in ("ring", "ulysses", "tp"))


# Why a choice has its place


def _reason(choice: Choice, best: Choice, hardware: Hardware) -> str:
    """Why ``choice`` is the best, or why it is slower than ``best`` or does not fit."""
    if not choice.fits:
        return f"does not fit: {_missing_memory(choice, hardware)}"
    saved = f"; {choice.switches}" if str(choice.switches) else ""
    waits = choice.exposed_s / choice.seconds
    waits_words = f"waits {waits:.0%} of the step {_awaited(choice, hardware)}"
    if choice is best:
        return f"fastest that fits: {waits_words if waits >= _HIDDEN else 'all transfers are hidden'}{saved}"
    slower = best.tokens_per_s / choice.tokens_per_s
    if slower < 1 + _AS_FAST:
        return f"as fast as the best{saved}"
    more_waits = choice.exposed_s / choice.tokens_per_step - best.exposed_s / best.tokens_per_step
    more_compute = choice.compute_s / choice.tokens_per_step - best.compute_s / best.tokens_per_step
    cause = waits_words if more_waits > more_compute else _more_compute(choice, best)
    return f"{slower - 1:.0%} slower: {cause}{saved}"


def _missing_memory(choice: Choice, hardware: Hardware) -> str:
    """Which memory is too small, and what needs most of it."""
    if choice.memory.host > hardware.host_memory:
        return f"offloads {choice.memory.host / 1e9:.0f} of {hardware.host_memory / 1e9:.0f} GB of the host"
    needed, available = choice.memory_bytes / 1e9, hardware.memory_bytes / 1e9
    largest = max(_MEMORY_WORDS, key=lambda part: getattr(choice.memory, part))
    return f"needs {needed:.0f} of {available:.0f} GB, most of it for {_MEMORY_WORDS[largest]}"


def _awaited(choice: Choice, hardware: Hardware) -> str:
    """Which transfers a rank waits for."""
    if choice.parameters_s > choice.compute_s:
        return "for weights and gradients, whose transfers take longer than the computation"
    bandwidth = {WITHIN: hardware.p2p, BETWEEN: hardware.network}
    busiest = max(LEVELS, key=lambda level: choice.bytes_sent[level] / bandwidth[level])
    return f"for transfers {_LEVEL_WORDS[busiest]}"


def _more_compute(choice: Choice, best: Choice) -> str:
    """Why the slowest rank of a choice computes longer than the best choice's."""
    if choice.switches.recompute != best.switches.recompute:
        return "it recomputes more"
    return "its kernels are smaller, or its ranks' work is less equal"
