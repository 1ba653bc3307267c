"""Document lengths of packed training data: published histograms, and a sequence packed from one."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np

from ..checks import check_choice
from ..mask import Mask

# Histograms by name: the borders of the bins in tokens, and the number of documents in each bin.
MIXES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    # MagiAttention's benchmark of distributed attention, 13.5 million documents: SandAI-org/MagiAttention,
    # exps/dist_attn/benchmark/datasets/default/doc_length_distribution.csv.
    "magi": (
        (1, 11, 51, 101, 201, 501, 1025, 2049, 4097, 8193, 16385, 32769, 65537, 131073, 196609),
        (30254, 391188, 699596, 1377757, 3794735, 3316785, 2106566, 988525, 410002, 173574, 115007, 18428, 22513,
         18284),
    ),
    # WLB-LLM's production data in bins of 6,250 tokens (arXiv 2503.17924), as redistributed by hao-ai-lab/DistCA,
    # distca/simulator/data/dist_wlbllm.json.
    "wlb": (
        tuple(range(1, 125002, 6250)),
        (96764, 1220, 350, 170, 110, 100, 80, 70, 60, 50, 40, 70, 60, 30, 80, 70, 40, 20, 10, 125),
    ),
}  # fmt: skip


def document_mix(name: str, seq_len: int, seed: int = 0) -> Mask:
    """A causal mask of packed documents whose lengths are drawn from a published histogram.

    The last document is cut at the end of the sequence.

    Args:
        name: "magi" or "wlb".
        seq_len: tokens of the full sequence.
        seed: the seed of the random lengths.

    Raises:
        ValueError: ``name`` is not a mix.
    """
    check_choice("mix", name, MIXES)
    borders, counts = MIXES[name]
    generator = np.random.default_rng(seed)
    shares = np.array(counts) / sum(counts)
    lengths: list[int] = []
    total = 0
    while total < seq_len:
        bins = generator.choice(len(counts), size=256, p=shares)
        for i in bins:
            length = min(int(generator.integers(borders[i], borders[i + 1])), seq_len - total)
            if length:
                lengths.append(length)
            total += length
    return Mask.documents(list(accumulate(lengths, initial=0)))


def mask_of(text: str, seq_len: int) -> Mask:
    """The mask that an option of the command line names.

    Args:
        text: "causal"; "full"; "window:N", the last N keys of each query, itself included; "documents:N", causal
            documents of N tokens each; or "mix:magi" or "mix:wlb", see ``document_mix``.
        seq_len: tokens of the full sequence.

    Raises:
        ValueError: ``text`` is something else.
    """
    kind, colon, value = text.partition(":")
    check_choice("mask", kind, ("causal", "full", "window", "documents", "mix"))
    if kind in ("causal", "full"):
        if colon:
            raise ValueError(f"mask={text!r}: expected {kind} alone, without a colon")
        return Mask.causal() if kind == "causal" else Mask.full()
    if kind == "mix":
        return document_mix(value, seq_len)
    if not value.isdecimal() or not int(value):
        raise ValueError(f"mask={text!r}: expected a number of tokens after the colon, such as {kind}:4096")
    if kind == "window":
        return Mask.sliding_window(int(value) - 1)
    borders = [*range(0, seq_len, int(value)), seq_len]
    return Mask.documents([0, *(b for a, b in pairwise(borders) if b > a)])
