"""Why a choice has its place, in words."""

from __future__ import annotations

from .hardware import Hardware
from .split import BETWEEN, LEVELS, WITHIN
from .step import Choice

_HIDDEN = 0.005  # below this share of a step, waits for transfers count as hidden
_LEVEL_WORDS = {WITHIN: "inside hosts", BETWEEN: "between hosts"}
_MEMORY_WORDS = {
    "activations": "what autograd keeps",
    "states": "weights and optimizer",
    "working": "one layer's backward",
    "gathered": "gathered weights",
    "logits": "the logits",
}


def reason(
    choice: Choice, best: Choice, hardware: Hardware, labels: list[str], is_equal: bool, preferred: str = ""
) -> str:
    """Why ``choice`` is the best, or why it is slower than ``best``, is not possible yet, or does not fit.

    Args:
        choice: the choice.
        best: the first choice of the plan.
        hardware: the GPUs and the links.
        labels: words such as "fastest".
        is_equal: whether ``choice`` is as fast as the fastest choice, within the model's error.
        preferred: why ``best`` comes before the fastest choice; empty if it is the fastest.
    """
    if not choice.fits:
        return f"does not fit: {missing_memory(choice, hardware)}"
    words = [*labels]
    if choice.needs:
        words.append(f"needs what the package lacks: {', '.join(choice.needs)}")
    waits = choice.exposed_s / choice.seconds
    waits_words = f"waits {waits:.0%} of the step {_awaited(choice, hardware)}" if waits >= _HIDDEN else ""
    slower = best.tokens_per_s / choice.tokens_per_s
    if choice is best:
        words += [x for x in (preferred, waits_words or "all transfers are hidden") if x]
    elif is_equal:
        words.append("equal within the model's error")
    elif slower < 1:
        words.append(f"{1 / slower - 1:.0%} faster than the first row")
    else:
        more_waits = choice.exposed_s / choice.tokens_per_step - best.exposed_s / best.tokens_per_step
        more_compute = choice.compute_s / choice.tokens_per_step - best.compute_s / best.tokens_per_step
        cause = waits_words if waits_words and more_waits > more_compute else _more_compute(choice, best)
        words.append(f"{slower - 1:.0%} slower than the first row: {cause}")
    words += [x for x in (str(choice.switches), choice.weights if choice.weights != "fsdp" else "") if x]
    return "; ".join(words)


def human_tokens(n: int) -> str:
    """A number of tokens with a unit, such as "1.4M". K is 1,024 and M is 1,024²."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if n >= size:
            return f"{n / size:.1f}{unit}".replace(".0", "")
    return str(n)


def missing_memory(choice: Choice, hardware: Hardware) -> str:
    """Which memory is too small, and what needs most of it."""
    if choice.memory.host > hardware.usable_host_memory:
        return f"offloads {choice.memory.host / 1e9:.0f} of {hardware.usable_host_memory / 1e9:.0f} GB of the host"
    needed, available = choice.memory_bytes / 1e9, hardware.memory_bytes / 1e9
    largest = max(_MEMORY_WORDS, key=lambda part: getattr(choice.memory, part))
    return f"needs {needed:.0f} of {available:.0f} GB, most of it for {_MEMORY_WORDS[largest]}"


def _awaited(choice: Choice, hardware: Hardware) -> str:
    if choice.parameters_s > choice.compute_s:
        return (
            "for weights and gradients, whose transfers take longer than the computation (pipeline parallelism, which "
            "is not modelled, keeps them in place)"
        )
    bandwidth = {WITHIN: hardware.p2p, BETWEEN: hardware.network}
    busiest = max(LEVELS, key=lambda level: choice.bytes_sent[level] / bandwidth[level])
    return f"for transfers {_LEVEL_WORDS[busiest]}"


def _more_compute(choice: Choice, best: Choice) -> str:
    if choice.switches.recompute != best.switches.recompute:
        return "it recomputes more"
    return "its kernels are smaller, or its ranks' work is less equal"
