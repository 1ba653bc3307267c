"""The sentence that says why a choice has its place in a plan."""

from __future__ import annotations

from .hardware import Hardware
from .setting import BETWEEN, LEVELS, WITHIN
from .step import Choice

AS_FAST = 0.005  # a choice whose throughput is within this share of the best one's counts as fast as the best
_HIDDEN = 0.005  # below this share of a step, waits for transfers count as hidden
_LEVEL_WORDS = {WITHIN: "inside hosts", BETWEEN: "between hosts"}
_MEMORY_WORDS = {
    "activations": "what autograd keeps",
    "states": "weights and optimizer",
    "working": "one layer's backward",
    "gathered": "gathered weights",
    "logits": "the logits",
}


def reason_of(choice: Choice, best: Choice, hardware: Hardware) -> str:
    """Why ``choice`` is the best, or why it is slower than ``best`` or does not fit."""
    if not choice.fits:
        return f"does not fit: {_missing_memory(choice, hardware)}"
    saved = f"; {choice.switches}" if str(choice.switches) else ""
    waits = choice.exposed_s / choice.seconds
    waits_words = f"waits {waits:.0%} of the step {_awaited(choice, hardware)}"
    if choice is best:
        return f"fastest that fits: {waits_words if waits >= _HIDDEN else 'all transfers are hidden'}{saved}"
    slower = best.tokens_per_s / choice.tokens_per_s
    if slower < 1 + AS_FAST:
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
    """Why the slowest rank of a choice computes longer than that of the best one."""
    if choice.switches.recompute != best.switches.recompute:
        return "it recomputes more"
    return "its kernels are smaller, or its ranks' work is less equal"
