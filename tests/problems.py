"""Attention problems over a full sequence, given or drawn at random, and their solutions on one device in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from seqpar.kernels import BACKENDS

from .reference import (
    Rule,
    Rules,
    combined_mask,
    dense_gradients,
    dropout_keep,
    fitted,
    groups_of,
    rows_of,
    rules_id,
    visible_pairs,
)


@dataclass(frozen=True)
class Problem:
    """An attention problem over a full sequence. Its data are the same on every rank and in every process.

    Attributes:
        seq_len, batch, heads, kv_heads, head_dim: the sizes of q, k and v.
        v_head_dim: the head_dim of v and of the output; by default the head_dim of q and k.
        rules: the mask, for any length; ``fitted_rules`` is the mask for ``seq_len``.
        dtype: the dtype of q, k and v.
        softmax_scale, softcap, dropout_p: as in ``seqpar.attention``.
        sinks: whether there are attention sinks.
        alibi: the shape of the ALiBi slopes: "heads" (``[heads]``), "batch" (``[batch, heads]``), or "" for no ALiBi.
        lse_gradient: whether the loss depends on ``lse`` as well as on ``out``.
        seed: the seed of the data.
    """

    seq_len: int = 50
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    v_head_dim: int | None = None
    rules: Rules = (Rule("causal"),)
    dtype: torch.dtype = torch.float32
    softmax_scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    alibi: str = ""
    dropout_p: float = 0.0
    lse_gradient: bool = False
    seed: int = 0

    @property
    def fitted_rules(self) -> Rules:
        """The mask for ``seq_len`` tokens."""
        return fitted(self.rules, self.seq_len)

    def __str__(self) -> str:
        """The id of a test case: the mask, and the fields that differ from their defaults."""
        words = [rules_id(self.fitted_rules)]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "rules" and value != f.default:
                words.append(f.name if value is True else f"{f.name}={str(value).removeprefix('torch.')}")
        return " ".join(words)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the problem by name.

        q, k, v and dout have the problem's dtype. If they are used, alibi_slopes are float32, and dlse and sinks are
        float32, or float64 for a float64 problem.
        """
        generator = torch.Generator().manual_seed(self.seed)
        statistics = torch.float64 if self.dtype == torch.float64 else torch.float32

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        v_head_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        heads = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads, "dout": self.heads}
        dims = {"q": self.head_dim, "k": self.head_dim, "v": v_head_dim, "dout": v_head_dim}
        tensors = {name: normal(self.batch, self.seq_len, heads[name], dims[name]) for name in heads}
        if self.lse_gradient:
            tensors["dlse"] = normal(self.batch, self.heads, self.seq_len, dtype=statistics)
        if self.sinks:
            tensors["sinks"] = normal(self.heads, dtype=statistics)
        if self.alibi:
            shape_of = {"heads": (self.heads,), "batch": (self.batch, self.heads)}
            tensors["alibi_slopes"] = normal(*shape_of[self.alibi], dtype=torch.float32).abs() * 0.2
        return tensors

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``seqpar.attention`` that are the same for every strategy, except for tensors."""
        arguments: dict[str, Any] = {"mask": combined_mask(self.fitted_rules), "return_lse": True}
        if self.softmax_scale is not None:
            arguments["softmax_scale"] = self.softmax_scale
        if self.softcap:
            arguments["softcap"] = self.softcap
        if self.dropout_p:
            arguments.update(dropout_p=self.dropout_p, dropout_seed=self.seed + 2**40)
        return arguments


@lru_cache(maxsize=1024)
def solve(problem: Problem, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The solution on one device in float64 or another dtype: out, lse, dq, dk, dv and, with sinks, dsinks."""
    keep = None
    if problem.dropout_p:
        at = torch.arange(problem.seq_len)
        seed = problem.arguments()["dropout_seed"]
        keep = dropout_keep(seed, problem.dropout_p, problem.batch, range(problem.heads), at, at)
    return dense_gradients(
        **problem.tensors(),
        visible=visible_pairs(problem.fitted_rules, problem.seq_len),
        softmax_scale=problem.softmax_scale,
        softcap=problem.softcap,
        dropout_p=problem.dropout_p,
        keep=keep,
        dtype=dtype,
    )


def present_backends() -> list[str]:
    """The names of the registered backends that can run on this machine, in the order of ``BACKENDS``."""
    return [name for name, backend in BACKENDS.items() if backend.unavailable() is None]


# Every kind of mask, and combinations, for about 50 tokens. ``Rule.fitted`` adapts the documents to another length.
RULES: tuple[Rules, ...] = (
    (Rule("causal"),),
    (Rule("full"),),
    (Rule("sliding_window", (7, 0)),),
    (Rule("sliding_window", (5, 9)),),
    (Rule("sliding_window", (-1, 3)),),
    (Rule("documents", ((0, 9, 9, 30, 41), True, True)),),  # an empty document, and padding at the end
    (Rule("documents", ((0, 20, 50), False)),),
    (Rule("documents", (((0, 4, 50), (0, 12, 31, 50)), True)),),  # two batch rows
    (Rule("documents", (((0, 4, 50), (0, 31)), True, True)),),  # two batch rows, padding at the end of one
    (Rule("prefix_lm", (13,)),),
    (Rule("prefix_lm", ((3, 22),)),),  # two batch rows
    (Rule("chunked", (16, True)),),
    (Rule("chunked", (11, False)),),
    (Rule("documents", ((0, 17, 44), True, True)), Rule("sliding_window", (6, 0))),
    (Rule("causal"), Rule("chunked", (20, False)), Rule("prefix_lm", (8,))),
    # Several intervals of keys for a query.
    (Rule("tree", ((-1, 0, 0, 2, 2, 0, -1), (11, 9, 5, 6, 0, 13, 6))),),
    (Rule("tree", ((-1, 0, 1, 0, 3, 3, 0, -1), (15, 3, 4, 8, 4, 3, 6, 7), False, 7)),),
    (Rule("block_diffusion", (25, 7)),),
    (Rule("any_of", ((Rule("sliding_window", (6, 2)),), (Rule("global_tokens", (3,)),))),),
    (Rule("any_of", ((Rule("documents", ((0, 20, 50), True)),), (Rule("padding", (4, 31)),))), Rule("causal")),
    (Rule("any_of", ((Rule("documents", (((0, 9, 50), (0, 24, 50)), True)),), (Rule("global_tokens", (2,)),))),),
)

# Masks that depend on the data of a batch: chunks that start at documents, padding, and blocks of images.
BATCH_RULES: tuple[Rules, ...] = (
    (Rule("chunked", (8, True, (5, 30))),),
    (Rule("chunked", (9, False, ((4,), (20, 26)))),),  # two batch rows
    (Rule("padding", (3, 40)),),
    (Rule("padding", ((0, 7), (50, 31))), Rule("causal")),
    (Rule("causal", (((3, 9), (9, 14), (30, 60)),)), Rule("sliding_window", (12, -1))),
    (Rule("causal", ((((5, 21),), ()),)),),  # two batch rows, one without blocks
    (Rule("causal", (((0, 13), (20, 26)), 8)),),  # a window that does not end inside blocks
    (
        Rule(
            "ranges",
            (
                ((0, 20), (20, 30), (25, 50), (30, 50), (33, 50)),
                ((0, 20), (5, 30), (3, 9), (20, 44), (0, 2)),
                ("causal", "bi_causal", "full", "inv_causal", "causal"),
            ),
        ),
    ),
    (Rule("tree", (((-1, 0, 0), (-1, -1, 1)), ((20, 9, 21), (7, 12, 15)), True)), Rule("sliding_window", (24, 0))),
)

# Groups of heads with masks of their own.
HEAD_RULES: tuple[Rules, ...] = (
    (Rule("by_heads", ((Rule("sliding_window", (7, 0)),), (Rule("causal"),))),),
    (Rule("by_heads", ((Rule("chunked", (16, False)),), (Rule("chunked", (16, False, (8,))),))),),  # LongLoRA
    (
        Rule(
            "by_heads",
            (
                (Rule("full"),),
                (Rule("any_of", ((Rule("sliding_window", (6, 2)),), (Rule("global_tokens", (3,)),))),),
                (Rule("documents", (((0, 9, 50), (0, 24, 31)), True, True)), Rule("sliding_window", (9, 0))),
            ),
        ),
    ),
    (Rule("by_heads", ((Rule("chunked", (11, True)),), (Rule("prefix_lm", ((3, 22),)),))), Rule("padding", (2, 44))),
    (
        Rule(
            "by_heads",
            (
                (Rule("tree", ((-1, 0, 0, 2, 2, 0, -1), (11, 9, 5, 6, 0, 13, 6))),),
                (Rule("documents", ((0,), True, True)),),  # these heads see nothing
                (Rule("sliding_window", (3, 0)),),
            ),
        ),
    ),
)

# (heads, kv_heads): equal numbers, groups, one KV head, fewer KV heads than ranks, and numbers that no number of ranks
# divides.
HEADS = ((8, 8), (8, 2), (4, 1), (6, 3), (5, 5), (3, 1), (7, 7), (10, 5))


# The same for masks of two and of three groups of heads.
GROUPED_HEADS = {2: ((8, 8), (8, 2), (2, 2), (12, 4), (10, 10)), 3: ((6, 3), (3, 3), (9, 9), (12, 6))}


def heads_for(rules: Rules, number: int) -> tuple[int, int]:
    """Some heads and KV heads for a mask; other ones for the next number."""
    choices = GROUPED_HEADS.get(groups_of(rules), HEADS)
    return choices[number % len(choices)]


def random_problem(seed: int, **fixed: Any) -> Problem:
    """A problem with random values for all fields except the ``fixed`` ones. The seed determines it."""
    chance = random.Random(seed)
    rules = chance.choice(HEAD_RULES if seed % 4 == 3 else RULES)
    heads, kv_heads = heads_for(rules, chance.randrange(60))
    problem = Problem(
        seq_len=chance.choice((1, 2, 5, 13, 31, 50, 64)),
        batch=rows_of(rules),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=chance.choice((1, 8, 12, 16)),
        rules=rules,
        softmax_scale=chance.choice((None, None, 0.3)),
        softcap=chance.choice((0.0, 0.0, 1.5)),
        sinks=chance.random() < 0.3,
        alibi=chance.choice(("", "", "heads", "batch")),
        dropout_p=chance.choice((0.0, 0.0, 0.25)),
        lse_gradient=chance.random() < 0.3,
        v_head_dim=chance.choice((None, 4, 10, 24)),
        seed=seed,
    )
    return replace(problem, **fixed)
