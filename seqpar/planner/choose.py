"""Predict every strategy and split of the ranks for a model, a sequence length and a cluster, and order them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from math import ceil, lcm
from pathlib import Path
from typing import Any, Literal

from ..base.checks import check_int, check_number
from ..masks.mask import Mask
from .attention import SelfAttention
from .code import code
from .forecast import expected_cost, forecast
from .hardware import Hardware, hardware_of
from .memory import MemoryUse, longest_sequence, memory
from .model import model_of
from .pairs import heaviest_first
from .reasons import human_tokens, reason
from .setting import STATE_BYTES, WEIGHTS, Setting
from .shape import ModelShape
from .split import INVARIANT, Switches
from .splits import LONGEST_RING, allowed_switches, settings, splits
from .step import Choice

_MOST_TOKENS = 2**31 - 1  # kernels count positions in 32-bit integers
_WAITS = 0.02  # if a step waits longer than this share of it, other ways to shard weights are compared
_HEADROOM = 0.9  # the share of a GPU's memory that a choice should need at most
_MOST_EXPERTS = 128  # expert parallelism is not modelled
_MOST_RANKS = 1 << 16  # up to which ``Plan.fewest_ranks`` searches


@dataclass(frozen=True)
class Plan:
    """What ``seqpar.plan`` predicts.

    Attributes:
        model: the shape of the model.
        hardware: the GPUs and the links.
        mask: which keys each query sees.
        seq_len: tokens of a sequence.
        ranks: GPUs of all replicas.
        batch: sequences that each replica computes at a time.
        global_batch: sequences of a step, the same for all choices.
        kernel: the attention kernel whose rates count.
        state_bytes: bytes per weight, for the weight, its gradient and the state of the optimizer.
        pairs: visible pairs of a query and a key in one sequence, the mean of all layers, also those without attention.
        choices: first the recommended choice. Then the other choices that fit, the most tokens per second first; the
            choices that need a switch that the package lacks; and the choices that do not fit.
        fewest_ranks: if nothing fits, the smallest number of GPUs with which something would, in whole hosts; 0 if
            there is none up to 65,536. None if something fits.
        longest_seq_len: tokens of the longest sequence that fits on these GPUs with what the package has.
        longest_with: the ranks and switches with which it fits.
    """

    model: ModelShape
    hardware: Hardware
    mask: Mask
    seq_len: int
    ranks: int
    batch: int
    global_batch: int
    kernel: str
    state_bytes: float
    pairs: int
    choices: tuple[Choice, ...]
    fewest_ranks: int | None = None
    longest_seq_len: int = 0
    longest_with: str = ""

    @property
    def best(self) -> Choice:
        """The recommended choice.

        Raises:
            ValueError: nothing fits with what the package has.
        """
        first = self.choices[0]
        if not first.possible:
            raise ValueError(f"nothing fits: {self.shortage}")
        return first

    @property
    def shortage(self) -> str:
        """If nothing fits: how many GPUs, or which length, would."""
        needs = f"needs at least {self.fewest_ranks:,} GPUs" if self.fewest_ranks else "no number of GPUs is enough"
        longest = self.longest_seq_len
        shorter = f"{longest:,} tokens ({human_tokens(longest)}) fit with {self.longest_with}"
        shorter = shorter if longest else "no length fits"
        words = f"{self.model.name} with {self.seq_len:,} tokens {needs}; on {self.ranks:,} GPUs {shorter}"
        return f"{words} (pipeline parallelism and an optimizer on the CPU are not modelled)"

    def code(self, choice: Choice | None = None) -> str:
        """A file that trains with a choice, and the command that measures its attention.

        The file has a small model and random tokens in place of yours, and runs as it is.

        Args:
            choice: one of ``choices``. By default the first one that ``seqpar.hf.parallelize`` can run, which is any
                without tensor parallelism; if there is none, the recommended one.

        Raises:
            ValueError: nothing fits, ``choice`` needs a switch that the package lacks, or the model is of diffusers.
        """
        if choice is None:
            choice = next((x for x in self.choices if x.possible and x.degrees["tp"] == 1), self.best)
        of_plan = Setting(self.hardware, self.mask, self.seq_len, self.batch, kernel=self.kernel, model=self.model)
        return code(choice, of_plan)

    def as_dict(self) -> dict[str, Any]:
        """The plan as numbers, strings, lists and dicts, for JSON."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("mask", "choices")}
        values |= {name: asdict(values[name]) for name in ("model", "hardware")}
        return {**values, "choices": [choice.as_dict() for choice in self.choices]}


def plan(
    model: str | Path | Mapping[str, Any] | ModelShape | Any,
    seq_len: int,
    ranks: int,
    hardware: str | Path | Mapping[str, Any] | Hardware = "h100",
    mask: Mask | None = None,
    *,
    global_batch: int | None = None,
    batch: int = 1,
    replicas: int | None = None,
    kernel: str | None = None,
    recompute: str | None = None,
    offload: bool | None = None,
    chunked_loss: bool = True,
    tiled_mlp: bool | None = None,
    head_groups: int | None = None,
    deterministic: Literal[False, "invariant"] = False,
    state_bytes: float = STATE_BYTES,
) -> Plan:
    """Predict the training step of a model under every strategy and split of the ranks.

    Nothing is run and nothing is downloaded. The transfers come from the plans that attention executes, and a small
    simulation finds which of them overlap with computation. Weights, gradients and the state of the optimizer are
    sharded over all ranks (ZeRO-3). All choices compute the same number of sequences in a step.

    Args:
        model: a name such as "llama3-8b", the path of a ``config.json`` of transformers or diffusers, a config object,
            a dict or a ``ModelShape``.
        seq_len: tokens of a sequence. For a model of diffusers, the tokens of the image or video, and the text tokens
            if both are in one attention.
        ranks: GPUs of all replicas.
        hardware: a name ("a100", "h100", "h200", "b200", "mi300x"), a YAML or JSON file, a dict or a ``Hardware``.
        mask: which keys each query sees; by default ``Mask.causal()``, and ``Mask.full()`` for models whose attention
            is not causal, such as BERT and models of diffusers.
        global_batch: sequences of a step. Replicas that compute fewer at a time accumulate gradients. By default the
            smallest number that every choice that fits can compute.
        batch: sequences that each data-parallel replica computes at a time.
        replicas: data-parallel replicas. By default every possible number is compared.
        kernel: the attention kernel, a name of ``hardware.attention``; by default the first one.
        recompute: what backward recomputes: "none", "keep_attention" (a layer without its attention) or "full" (a
            whole layer). By default as little as fits.
        offload: whether saved activations are kept in host memory until backward. By default only where it is needed.
        chunked_loss: whether logits are computed for some tokens at a time.
        tiled_mlp: whether the MLP is computed for some tokens at a time. By default only where it is needed.
        head_groups: in how many groups of heads the projections and attention are computed, a divisor of the KV heads.
            By default in one, or up to four where it is needed.
        deterministic: with "invariant", attention has the same bits on any number of ranks, see ``seqpar.attention``.
            All strategies then send and compute the same, so "ring" stands for all of them. Its kernels have rates
            of their own, "invariant" in ``hardware.attention``.
        state_bytes: bytes per weight, for the weight, its gradient and the state of the optimizer. It is 16 for AdamW
            with float32 weights that are gathered in bfloat16 (FSDP2 with a mixed-precision policy), 18 with bfloat16
            copies besides (DeepSpeed), and 8 for AdamW all in bfloat16.

    Raises:
        TypeError: an argument has another type.
        ValueError: a name is unknown, a number is out of range, or ``mask`` is for another length.

    Examples:
        >>> plan = seqpar.plan("llama3-8b", seq_len=1 << 20, ranks=64, hardware="h100")
        >>> plan.best.strategy, plan.best.degrees, plan.best.reason
    """
    shape, gpus = model_of(model), hardware_of(hardware)
    mask = (Mask.causal() if shape.causal else Mask.full()) if mask is None else mask
    numbers = {"seq_len": seq_len, "ranks": ranks, "batch": batch}
    optional = {"global_batch": global_batch, "replicas": replicas, "head_groups": head_groups}
    for name, value in {**numbers, **{k: x for k, x in optional.items() if x is not None}}.items():
        check_int(name, value, 1)
    if replicas is not None and ranks % replicas:
        raise ValueError(f"replicas={replicas}: expected a divisor of ranks={ranks}")
    experts = shape.mlp.experts if shape.mlp else 0
    if experts > _MOST_EXPERTS:
        raise ValueError(
            f"model: {shape.name} has {experts} experts in a layer, and the planner shards weights as FSDP does, "
            f"which gathers all experts: expected at most {_MOST_EXPERTS}; use a framework with expert parallelism"
        )
    if deterministic:
        kernel = _invariant_kernel(deterministic, kernel, shape)
    gpus.rate(kernel)
    if check_number("state_bytes", state_bytes) < 0:
        raise ValueError(f"state_bytes={state_bytes}: expected the bytes per weight, at least 0")
    if not isinstance(mask, Mask):
        raise TypeError(f"mask={mask!r}: expected a seqpar.Mask, such as seqpar.Mask.causal()")
    mask.check_length(seq_len)
    if mask.head_groups:
        mask.check_heads(shape.attention.heads, shape.attention.sent_kv_heads)
        if head_groups not in (None, 1):
            raise ValueError(f"head_groups={head_groups}: not with Mask.by_heads; leave it out")
        head_groups = 1
    if seq_len > _MOST_TOKENS:
        raise ValueError(
            f"seq_len={seq_len}: expected at most {_MOST_TOKENS}, because positions are 32-bit integers in kernels"
        )
    if seq_len < ranks:
        raise ValueError(f"seq_len={seq_len}: expected at least one token for each of ranks={ranks}")
    base = Setting(
        gpus, heaviest_first(mask, seq_len), seq_len, batch, kernel=kernel, model=shape, state_bytes=state_bytes
    )
    switches = allowed_switches(shape, recompute, offload, chunked_loss, tiled_mlp, head_groups)
    compared = list(settings(base, ranks, replicas))
    if not compared:
        raise ValueError(
            f"ranks={ranks}: expected a product of heads, replicas and a ring of at most {LONGEST_RING} ranks"
        )
    global_batch = global_batch or _common_batch(compared, switches)
    compared = [x for x in compared if global_batch % (x.replicas * batch) == 0]
    if not compared:
        raise ValueError(f"global_batch={global_batch}: expected a multiple of batch={batch} times a divisor of ranks")
    compared = _without_needless_rings(compared, switches[0])
    choices = _ordered(_best_of_each_split(compared, switches, global_batch), switches)
    fewest = None if choices[0].possible else _fewest_ranks(base, ranks, switches)
    every = product(splits(base, ranks, replicas), [x for x in switches if x.recompute == switches[-1].recompute])
    lengths = [(longest_sequence(x, y), x, y) for x, y in every if not x.lacking(y)]
    longest, split, saving = max(lengths, key=lambda x: x[0], default=(0, base, switches[0]))
    degrees = f"dp {split.replicas}, ring {split.ring}, ulysses {split.ulysses}, tp {split.tensor}"
    of_batch = shape, gpus, mask, seq_len, ranks, batch, global_batch
    name, how = gpus.kernel_name(kernel), f"{degrees}; {saving}" if str(saving) else degrees
    return Plan(*of_batch, name, state_bytes, base.pairs, choices, fewest, longest, how)


def _invariant_kernel(deterministic: object, kernel: str | None, model: ModelShape) -> str:
    """The name of the kernels of ``deterministic="invariant"``."""
    if deterministic != INVARIANT:
        raise ValueError(
            f"deterministic={deterministic!r}: expected False or 'invariant'; with True the ranks send the same "
            "messages as with False, and the rates of its kernels are not known"
        )
    if kernel not in (None, INVARIANT):
        raise ValueError(f"kernel={kernel!r}: deterministic='invariant' has kernels of its own; leave kernel out")
    for part in (x for layer in model.layers for x in layer.parts if isinstance(x, SelfAttention)):
        if type(part) is not SelfAttention or part.kv_rank:
            raise ValueError(
                f"deterministic='invariant': {model.name} has latent attention, or attention to chosen or compressed "
                "keys, for which it is not modelled; plan with deterministic=False"
            )
    return INVARIANT


# The work of a step, and the switches


def _common_batch(compared: Sequence[Setting], switches: Sequence[Switches]) -> int:
    fitting = [x for x in compared if any(_is_possible(x, y) for y in switches)]
    return lcm(*(x.replicas * x.batch for x in fitting or [max(compared, key=lambda x: x.sequence_ranks)]))


def _without_needless_rings(compared: Sequence[Setting], switches: Switches) -> list[Setting]:
    """The settings, which have increasing rings, without the rings that are longer than memory requires.

    A longer ring with fewer replicas only saves memory: its kernels are smaller, and it sends more. So for each number
    of Ulysses and tensor-parallel ranks, the last ring is the shortest one that leaves a tenth of the memory free with
    ``switches``, which recompute the least.
    """
    enough: dict[tuple[Any, ...], int] = {}
    found = []
    for s in compared:
        split = s.tensor, s.ulysses, s.gather, s.ring > 1
        if s.ring <= enough.get(split, s.ring):
            found.append(s)
            if has_headroom(memory(s, switches), s.hardware):
                enough[split] = s.ring
    return found


def _is_possible(setting: Setting, switches: Switches) -> bool:
    return not setting.lacking(switches) and memory(setting, switches).fits(setting.hardware)


def _best_of_each_split(
    compared: Sequence[Setting], switches: Sequence[Switches], global_batch: int
) -> list[tuple[Choice, Setting]]:
    """For every split of the ranks, strategy and kind of switches, the choice with the best layout."""
    found: dict[tuple[Any, ...], tuple[Choice, Setting]] = {}
    for each in compared:
        setting = replace(each, accumulation=global_batch // (each.replicas * each.batch))
        split = setting.ring, setting.ulysses, setting.tensor, setting.replicas, setting.gather
        for choice in _forecasts(setting, switches):
            key = *split, choice.switches
            if key not in found or choice.tokens_per_s > found[key][0].tokens_per_s:
                found[key] = choice, replace(setting, weights=choice.weights)
    return list(found.values())


def _forecasts(setting: Setting, switches: Sequence[Switches]) -> Iterator[Choice]:
    """The choices of one setting: weights sharded over all ranks, and otherwise where that makes the step wait."""
    cost = expected_cost(setting)
    for weights in WEIGHTS:
        s = replace(setting, weights=weights)
        if (weights == "hsdp" and s.hosts == 1) or (weights == "zero1" and s.accumulation == 1):
            continue
        cost = cost.with_weights(weights)
        made = [forecast(s, x, cost) for x in _candidates(s, switches)]
        yield from (x for x in made if weights == "fsdp" or x.fits)
        if weights == "fsdp" and not any(
            x.fits and x.exposed_s > _WAITS * x.seconds and x.parameters_s > _WAITS * x.seconds for x in made
        ):
            return


def _candidates(setting: Setting, switches: Sequence[Switches]) -> list[Switches]:
    """The switches that are worth comparing for a split.

    Less recomputation is faster. So of the switches that are alike in everything else, these are the least
    recomputation that fits, and the next one if less than a tenth of the memory would be free. If nothing fits, these
    are the switches that need the least memory.
    """
    used = {x: memory(setting, x) for x in switches}
    found = []
    for kind in dict.fromkeys(replace(x, recompute="none") for x in switches):
        for x in (x for x in switches if replace(x, recompute="none") == kind and used[x].fits(setting.hardware)):
            found.append(x)
            if has_headroom(used[x], setting.hardware):
                break
    plain = [x for x in found if not x.saving]
    if any(has_headroom(used[x], setting.hardware) for x in plain):  # a tiled MLP would only cost time
        found = [x for x in found if x.saving <= 1 and not x.tiled_mlp and x.head_groups == 1]
    host_fits = [x for x in switches if used[x].host <= setting.hardware.usable_host_memory] or list(switches)
    found = found or [min(host_fits, key=lambda x: used[x].total)]
    on_device = [x for x in switches if not x.offload]
    if on_device and all(x.offload for x in found):  # to be seen beside them
        found.append(min(on_device, key=lambda x: used[x].total))
    return found


def has_headroom(used: MemoryUse, hardware: Hardware) -> bool:
    """Whether a tenth of a GPU's memory stays free."""
    return used.total <= _HEADROOM * hardware.memory_bytes


# The order of the choices


def _ordered(found: list[tuple[Choice, Setting]], switches: Sequence[Switches]) -> tuple[Choice, ...]:
    """The choices in order, with their reasons and the longest sequences that fit."""
    ordered = [x for x, _ in sorted(found, key=lambda x: _order(x[0]))]
    setting_of = {id(choice): setting for choice, setting in found}
    gpus = found[0][1].hardware
    possible = [x for x in ordered if x.possible]
    fastest = possible[0] if possible else ordered[0]
    equal = [x for x in possible if is_equal(x, fastest)]
    first = min(equal, key=lambda x: (*_simplicity(x, gpus).values(), -x.tokens_per_s), default=ordered[0])
    safest = min(equal, key=lambda x: x.memory_bytes, default=None)
    preferred = ""
    if possible and first is not fastest:
        ours, theirs = (_simplicity(x, gpus) for x in (first, fastest))
        why = next(words for words, value in ours.items() if value != theirs[words])
        slower = ceil(100 * (fastest.tokens_per_s / first.tokens_per_s - 1))
        preferred = f"first because it {why}, and at most {slower}% slower than the fastest"
    ordered.remove(first)
    choices = []
    for choice in (first, *ordered):
        labels = ["fastest"] * (possible != [] and choice is fastest) + ["safest"] * (choice is safest)
        why = reason(choice, first, gpus, labels, any(choice is x for x in equal), preferred)
        may_offload = choice.switches.offload or not possible
        longest = _longest(setting_of[id(choice)], choice, switches, may_offload)
        choices.append(replace(choice, reason=why, longest_seq_len=longest))
    return tuple(choices)


def _longest(setting: Setting, choice: Choice, switches: Sequence[Switches], may_offload: bool) -> int:
    """Tokens of the longest sequence that fits with any of the switches that the package has, or that ``choice`` needs,
    and without offloading unless ``may_offload``; the last recomputation saves the most."""
    having = [x for x in switches if not set(setting.lacking(x)) - set(choice.needs) and x.offload <= may_offload]
    return max(longest_sequence(setting, x) for x in having if x.recompute == having[-1].recompute)


def is_equal(choice: Choice, fastest: Choice) -> bool:
    """Whether a choice is as fast as the fastest one, within the model's error."""
    return fastest.tokens_per_s <= (1 + max(choice.error, fastest.error)) * choice.tokens_per_s


def _order(choice: Choice) -> tuple[int, float, float]:
    if not choice.fits:
        return 2, choice.memory_bytes, 0.0
    return (1 if choice.needs else 0), -choice.tokens_per_s, choice.memory_bytes


def _simplicity(choice: Choice, gpus: Hardware) -> dict[str, Any]:
    """Sorts the choice first that is the easiest to run, of choices that are equally fast. The keys say why it is."""
    degrees = choice.degrees
    collectives = degrees["tp"] * (degrees["ring"] if choice.comm == "all_gather" else degrees["ulysses"])
    crosses_hosts = collectives > gpus.gpus_per_host or gpus.gpus_per_host % collectives > 0
    hosts = (
        degrees["ring"] * degrees["ulysses"] * degrees["tp"] // gpus.gpus_per_host
    )  # that one sequence is sharded over
    dimensions = sum(degrees[name] > 1 for name in ("ring", "ulysses", "tp"))
    return {
        "offloads nothing": choice.switches.offload,
        "needs no other way to save memory": choice.switches.saving,
        "leaves a tenth of the memory free": not has_headroom(choice.memory, gpus),
        "shards weights over all ranks": choice.weights != "fsdp",
        "keeps all-to-alls and all-gathers inside hosts": crosses_hosts,
        "has one rank of each ring on a host": hosts > 1 and degrees["ring"] > hosts,  # collectives are inside
        "shards the sequence over fewer dimensions": dimensions,
        "needs no tensor-parallel layers": degrees["tp"] > 1,
    }


def _fewest_ranks(base: Setting, ranks: int, switches: Sequence[Switches]) -> int:
    """The smallest number of GPUs, in whole hosts, with which something fits without what the package lacks; 0 if there
    is none up to ``_MOST_RANKS``."""
    size = base.hardware.gpus_per_host

    def fits(hosts: int) -> bool:
        return any(_is_possible(x, y) for x in splits(base, hosts * size, None) for y in switches)

    low, high = ranks // size, max(1, ranks // size)
    while not fits(high):
        low, high = high, 2 * high
        if high * size > min(_MOST_RANKS, base.seq_len):
            return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * size
