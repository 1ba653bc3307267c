"""What every test measures against: attention over the whole sequence on one device, dense, in float64.

Nothing of the package's arithmetic is used here: masks are built from their definitions pair by pair, layouts by
dealing tokens out, dropout from Philox in numpy, gradients by autograd.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar import Mask

# ------------------------------------------------------------------------------------------------ tolerances


@dataclass(frozen=True)
class Tolerance:
    """``norm``: of the difference, over the norm expected. ``worst``: largest difference, over the largest expected.

    What is expected counts as no smaller than 1 an element, the size of the inputs: a result that is small or 0 because
    terms cancel has their rounding error all the same.
    """

    norm: float
    worst: float


TOLERANCE = {
    torch.float64: Tolerance(norm=1e-12, worst=1e-11),
    torch.float32: Tolerance(norm=2e-6, worst=2e-5),
    # Half types: their inputs are exact, so what is left is one rounding of the result (and of ``out`` in backward).
    torch.float16: Tolerance(norm=5e-4, worst=2e-3),
    torch.bfloat16: Tolerance(norm=4e-3, worst=1.2e-2),
}


def difference(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> str | None:
    """How ``actual`` differs from the float64 ``expected`` beyond the tolerance of ``dtype``; None if it does not."""
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    actual, expected = actual.double(), expected.double()
    infinite = expected.isinf()
    if not torch.equal(actual.isinf(), infinite) or not torch.equal(actual[infinite], expected[infinite]):
        return f"infinite at {int(actual.isinf().sum())} places instead of {int(infinite.sum())}, or of another sign"
    error, scale = (actual - expected)[~infinite], expected[~infinite]
    if not error.numel():
        return None
    if bool(error.isnan().any()):
        return f"NaN at {int(error.isnan().sum())} of {error.numel()} places"
    allowed = TOLERANCE[dtype]
    norm = float(error.norm()) / max(float(scale.norm()), error.numel() ** 0.5)
    worst = float(error.abs().max()) / max(float(scale.abs().max()), 1.0)
    if norm <= allowed.norm and worst <= allowed.worst:
        return None
    return f"error {norm:.1e} of the norm (allowed {allowed.norm:.0e}), at worst {worst:.1e} ({allowed.worst:.0e})"


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str = "result") -> None:
    """Fail if ``actual`` is further from ``expected`` than results of ``dtype`` may be."""
    if (found := difference(actual, expected, dtype)) is not None:
        raise AssertionError(f"{what}: {found}")


# ------------------------------------------------------------------------------------------------ masks, layouts


@dataclass(frozen=True)
class Rule:
    """One mask by name and arguments, known twice: to the package as ``mask()``, and here by ``sees``."""

    name: str
    args: tuple[Any, ...] = ()

    def mask(self) -> Mask:
        make = getattr(Mask, self.name)
        made = make(*self.args)
        assert isinstance(made, Mask)
        return made

    def sees(self, i: int, j: int, row: int = 0) -> bool:
        """Whether, in that batch row, the query at position ``i`` sees the key at position ``j``."""
        if self.name == "full":
            return True
        if self.name == "causal":
            return j <= i
        if self.name == "sliding_window":
            left, right = self.args
            return (left < 0 or j >= i - left) and (right < 0 or j <= i + right)
        if self.name == "documents":
            boundaries, causal = self.args
            if isinstance(boundaries[0], tuple):
                boundaries = boundaries[row]
            together = any(a <= i < b and a <= j < b for a, b in pairwise(boundaries))
            return together and (j <= i or not causal)
        if self.name == "prefix_lm":
            (prefix,) = self.args
            return j <= i or j < (prefix[row] if isinstance(prefix, tuple) else prefix)
        if self.name == "padding":
            start, stop = (x[row] if isinstance(x, tuple) else x for x in self.args)
            return all(start <= position < stop for position in (i, j))
        assert self.name == "chunked"
        size, causal, *starts = self.args
        rows = starts[0] if starts else ()
        origins = {0, *(rows[row] if rows and isinstance(rows[0], tuple) else rows)}
        chunk = [(start := max(o for o in origins if o <= position), (position - start) // size) for position in (i, j)]
        return chunk[0] == chunk[1] and (j <= i or not causal)

    @property
    def rows(self) -> int:
        """Batch rows told apart."""
        if self.name in ("prefix_lm", "padding"):
            return max((len(x) for x in self.args if isinstance(x, tuple)), default=1)
        nested: Any = {"documents": self.args[:1], "chunked": self.args[2:]}.get(self.name, ())
        return len(nested[0]) if nested and nested[0] and isinstance(nested[0][0], tuple) else 1


Rules = tuple[Rule, ...]


def combined(rules: Rules) -> Mask:
    """All of the rules together, as the package's mask."""
    mask = Mask.full()
    for rule in rules:
        mask = mask & rule.mask()
    return mask


@lru_cache(maxsize=512)
def seen_by_definition(rules: Rules, seq_len: int) -> Tensor:
    """bool ``[rows, seq_len, seq_len]``, pair by pair."""
    rows = max((rule.rows for rule in rules), default=1)
    return torch.tensor(
        [
            [[all(rule.sees(i, j, row) for rule in rules) for j in range(seq_len)] for i in range(seq_len)]
            for row in range(rows)
        ],
        dtype=torch.bool,
    ).reshape(rows, seq_len, seq_len)


def dealt(seq_len: int, ranks: int, rank: int, layout: str) -> Tensor:
    """The global positions of ``rank``'s tokens, dealt out token by token."""
    tokens = np.arange(seq_len)
    if layout == "contiguous":
        mine = np.array_split(tokens, ranks)[rank]
    elif layout == "zigzag":
        pieces = np.array_split(tokens, 2 * ranks)
        mine = np.concatenate([pieces[rank], pieces[2 * ranks - 1 - rank]])
    else:
        mine = tokens[tokens % ranks == rank]
    return torch.from_numpy(mine.copy())


# ------------------------------------------------------------------------------------------------ dropout


def philox(seed: int, counter: tuple[Any, Any, Any, Any]) -> np.ndarray[Any, Any]:
    """All four words of Philox4x32-10, uint64 ``[4, ...]`` (Salmon et al., 2011; as in the Random123 library)."""
    word = np.uint64(0xFFFFFFFF)
    c = [np.asarray(x, dtype=np.uint64) for x in np.broadcast_arrays(*counter)]
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32 & 0xFFFFFFFF)]
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ key[0],
            second & word,
            (first >> np.uint64(32)) ^ c[3] ^ key[1],
            first & word,
        ]
        key = [(key[0] + np.uint64(0x9E3779B9)) & word, (key[1] + np.uint64(0xBB67AE85)) & word]
    return np.stack(c)


def kept(seed: int, dropout_p: float, batch: int, heads: int, seq_len: int) -> Tensor:
    """Which attention weights dropout keeps, bool ``[batch, heads, seq_len, seq_len]``."""
    b, h, i, j = np.meshgrid(*(np.arange(n) for n in (batch, heads, seq_len, seq_len)), indexing="ij")
    return torch.from_numpy(philox(seed, (j, i, h, b))[0] >= np.uint64(round(dropout_p * 2**32)))


# ------------------------------------------------------------------------------------------------ attention


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention of the whole sequence, all pairs at once.

    Args:
        q: ``[batch, seq, heads, head_dim]``. k, v: ``[batch, seq, kv_heads, head_dim]``. Computed in float64.
        seen: bool ``[seq, seq]`` or ``[batch or 1, seq, seq]``, True where the query sees the key (``Mask.dense``).
        keep: bool ``[batch, heads, seq, seq]``: what dropout with ``dropout_p`` keeps.

    Returns:
        ``out [batch, seq, heads, head_dim]`` and ``lse [batch, heads, seq]``. A query that sees nothing has 0, -inf.
    """
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        at = torch.arange(q.shape[1])
        distance = (at[:, None] - at[None]).abs().double()
        s = s - torch.atleast_2d(alibi_slopes.double())[:, :, None, None] * distance
    seen = seen if seen.dim() == 3 else seen[None]
    s = s.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[None, :, None, None].expand(*s.shape[:3], 1)], dim=-1)
    blind = (s == -torch.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(s.masked_fill(blind, 0.0), dim=-1).masked_fill(blind[..., 0], -torch.inf)
    p = torch.softmax(s.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)[..., : k.shape[1]]
    if keep is not None:
        p = p * keep / (1 - dropout_p)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


# ------------------------------------------------------------------------------------------------ problems


@dataclass(frozen=True)
class Problem:
    """One attention problem over a whole sequence, with its data: the same on every rank and in every process."""

    seq_len: int = 50
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    rules: Rules = (Rule("causal"),)
    dtype: torch.dtype = torch.float32
    softmax_scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    alibi: str = ""  # "heads" or "batch": the slopes' shape
    dropout_p: float = 0.0
    lse_gradient: bool = False
    seed: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """q, k, v, dout in ``dtype``; dlse, sinks, alibi_slopes (where used) in float32 (float64)."""
        made = torch.Generator().manual_seed(self.seed)
        statistics = torch.float64 if self.dtype == torch.float64 else torch.float32

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype)

        shape, kv_shape = ((self.batch, self.seq_len, n, self.head_dim) for n in (self.heads, self.kv_heads))
        tensors = {"q": normal(*shape), "k": normal(*kv_shape), "v": normal(*kv_shape), "dout": normal(*shape)}
        if self.lse_gradient:
            tensors["dlse"] = normal(self.batch, self.heads, self.seq_len, dtype=statistics)
        if self.sinks:
            tensors["sinks"] = normal(self.heads, dtype=statistics)
        if self.alibi:
            shape_of = {"heads": (self.heads,), "batch": (self.batch, self.heads)}
            tensors["alibi_slopes"] = normal(*shape_of[self.alibi], dtype=torch.float32).abs() * 0.2
        return tensors

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``seqpar.attention`` that are the same for every strategy, tensors left out."""
        arguments: dict[str, Any] = {"mask": combined(self.rules), "return_lse": True}
        if self.softmax_scale is not None:
            arguments["softmax_scale"] = self.softmax_scale
        if self.softcap:
            arguments["softcap"] = self.softcap
        if self.dropout_p:
            arguments.update(dropout_p=self.dropout_p, dropout_seed=self.seed + 2**40)
        return arguments


@lru_cache(maxsize=1024)
def solve(problem: Problem) -> dict[str, Tensor]:
    """What one device would compute: out, lse, dq, dk, dv and, with sinks, dsinks; float64."""
    given = {name: x.double() for name, x in problem.tensors().items()}
    inputs = {name: given[name].requires_grad_() for name in ("q", "k", "v", "sinks") if name in given}
    keep = None
    if problem.dropout_p:
        seed = problem.arguments()["dropout_seed"]
        keep = kept(seed, problem.dropout_p, problem.batch, problem.heads, problem.seq_len)
    out, lse = dense_attention(
        **inputs,
        seen=seen_by_definition(problem.rules, problem.seq_len),
        softmax_scale=problem.softmax_scale,
        softcap=problem.softcap,
        alibi_slopes=given.get("alibi_slopes"),
        keep=keep,
        dropout_p=problem.dropout_p,
    )
    outputs, gradients = [out], [given["dout"]]
    if problem.lse_gradient:
        outputs.append(lse.masked_fill(lse == -torch.inf, 0.0))
        gradients.append(given["dlse"])
    torch.autograd.backward(outputs, gradients)
    solved = {"out": out.detach(), "lse": lse.detach()}
    for name, x in inputs.items():
        solved[f"d{name}"] = torch.zeros_like(x) if x.grad is None else x.grad
    return solved


# Every kind of mask, and combinations; boundaries for sequences of about 50 tokens, past whose end they may lie.
RULES: tuple[Rules, ...] = (
    (Rule("causal"),),
    (Rule("full"),),
    (Rule("sliding_window", (7, 0)),),
    (Rule("sliding_window", (5, 9)),),
    (Rule("sliding_window", (-1, 3)),),
    (Rule("documents", ((0, 9, 9, 30, 41), True)),),  # an empty document, and padding at the end
    (Rule("documents", ((0, 20, 50), False)),),
    (Rule("documents", (((0, 4, 50), (0, 31)), True)),),  # two batch rows
    (Rule("prefix_lm", (13,)),),
    (Rule("prefix_lm", ((3, 22),)),),
    (Rule("chunked", (16, True)),),
    (Rule("chunked", (11, False)),),
    (Rule("documents", ((0, 17, 44), True)), Rule("sliding_window", (6, 0))),
    (Rule("causal"), Rule("chunked", (20, False)), Rule("prefix_lm", (8,))),
)

# The masks of a batch: chunks that start with documents, and padding.
BATCH_RULES: tuple[Rules, ...] = (
    (Rule("chunked", (8, True, (5, 30))),),
    (Rule("chunked", (9, False, ((4,), (20, 26)))),),  # two batch rows
    (Rule("padding", (3, 40)),),
    (Rule("padding", ((0, 7), (50, 31))), Rule("causal")),
)

# (heads, kv_heads): equal, grouped, one key/value head, fewer than ranks, and numbers that divide by nothing.
HEADS = ((8, 8), (8, 2), (4, 1), (6, 3), (5, 5), (3, 1), (7, 7), (10, 5))


def random_problem(seed: int, **fixed: Any) -> Problem:
    """A problem drawn from everything the package takes; ``fixed`` fields are as given."""
    chance = random.Random(seed)
    heads, kv_heads = chance.choice(HEADS)
    rules = chance.choice(RULES)
    problem = Problem(
        seq_len=chance.choice((1, 2, 5, 13, 31, 50, 64)),
        batch=max(rule.rows for rule in rules),
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
        seed=seed,
    )
    return replace(problem, **fixed)
