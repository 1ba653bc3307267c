"""Masks by the names that ``--mask`` takes. Document lengths are drawn from the histograms in ``mixes.json``."""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..base.checks import check_choice
from ..masks.mask import Mask
from .prompts import tree_of

# Histograms of document lengths by name.
MIXES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())["mixes"]


def document_mix(name: str, seq_len: int, seed: int = 0, longest: int | None = None) -> Mask:
    """A causal mask of packed documents whose lengths are drawn from a published histogram.

    The last document is cut at the end of the sequence.

    Args:
        name: "magi" or "wlb".
        seq_len: tokens of the full sequence.
        seed: the seed of the random lengths.
        longest: tokens at which longer documents are cut.

    Raises:
        ValueError: ``name`` is not a mix.
    """
    check_choice("mix", name, MIXES)
    borders, counts = MIXES[name]["borders"], MIXES[name]["counts"]
    generator = np.random.default_rng(seed)
    shares = np.array(counts) / sum(counts)
    lengths: list[int] = []
    total = 0
    while total < seq_len:
        bins = generator.choice(len(counts), size=256, p=shares)
        for i in bins:
            drawn = int(generator.integers(borders[i], borders[i + 1]))
            lengths.append(min(drawn, longest or drawn, seq_len - total))
            total += lengths[-1]
    return Mask.documents(sorted(set(accumulate(lengths, initial=0))))


def mask_of(text: str, seq_len: int) -> Mask:
    """The mask that an option of the command line names.

    Args:
        text: "causal"; "full"; "window:N", the last N keys of each query, itself included; "documents:N", causal
            documents of N tokens each; "answers:GxN", a prompt and G answers of N tokens that share it; or "mix:magi"
            or "mix:wlb", see ``document_mix``.
        seq_len: tokens of the full sequence.

    Raises:
        ValueError: ``text`` is something else.
    """
    kind, colon, value = text.partition(":")
    check_choice("mask", kind, ("causal", "full", "window", "documents", "answers", "mix"))
    if kind in ("causal", "full"):
        if colon:
            raise ValueError(f"mask={text!r}: expected {kind} alone, without a colon")
        return Mask.causal() if kind == "causal" else Mask.full()
    if kind == "mix":
        return document_mix(value, seq_len)
    if kind == "answers":
        return tree_of(*prompt_and_answers(text, seq_len))
    if not value.isdecimal() or not int(value):
        raise ValueError(f"mask={text!r}: expected a number of tokens after the colon, such as {kind}:4096")
    if kind == "window":
        return Mask.sliding_window(int(value) - 1)
    borders = [*range(0, seq_len, int(value)), seq_len]
    return Mask.documents([0, *(b for a, b in pairwise(borders) if b > a)])


def prompt_and_answers(text: str, seq_len: int) -> tuple[int, list[int]]:
    """The tokens of the prompt and of each answer that "answers:GxN" names, in a row of ``seq_len`` tokens."""
    numbers = text.partition(":")[2].split("x")
    if len(numbers) != 2 or not all(x.isdecimal() and int(x) for x in numbers):
        raise ValueError(f"mask={text!r}: expected answers and the tokens of each one, such as answers:16x4096")
    answers = [int(numbers[1])] * int(numbers[0])
    prompt = seq_len + 1 - sum(answer + 1 for answer in answers)  # an answer begins with a copy of its last token
    if prompt < 1:
        raise ValueError(f"mask={text!r}: a sequence of {seq_len} tokens leaves none for the prompt; give a longer one")
    return prompt, answers
