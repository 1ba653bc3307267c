"""The reference of all tests: dense attention over the full sequence on one device, in float64.

It uses none of the package's arithmetic. Masks are evaluated from their definitions for each pair of query and key.
Layouts are computed by ``np.array_split``, dropout by Philox in numpy, and gradients by autograd.

Shapes: b batch, s sequence, i queries, j keys, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import pairwise
from operator import or_
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from seqpar import Mask

# Limits of errors.

# A result may be off by FACTOR times the rounding of one process in the same run, and by UNITS units in the last place.
# A result in half precision has been rounded, and in backward so has ``out``: HALF_UNITS more of its units.
FACTOR = 10.0
UNITS = 32.0
HALF_UNITS = 2.0


class Margins:
    """How near the comparisons of this process came to their limits; ``pytest --margins`` prints it for each test."""

    def __init__(self) -> None:
        self.nearest = 0.0, ""

    def add(self, share: float, what: str) -> None:
        """Note a comparison whose error is ``share`` of its limit."""
        self.nearest = max(self.nearest, (share, what))

    def take(self) -> tuple[float, str]:
        """The comparison that came nearest to its limit since the last call, or ``(0.0, "")``."""
        nearest, self.nearest = self.nearest, (0.0, "")
        return nearest


MARGINS = Margins()


def nudge(tensors: Iterable[Tensor]) -> None:
    """Change each value by one unit in the last place, up or down at random.

    The results of one process for these inputs or weights differ from the results before by the rounding that the
    problem has in this dtype, whatever the order of sums is. The random state of torch stays as it was.
    """
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in tensors:
            signs = 2 * torch.randint(2, x.shape, generator=chance, dtype=x.dtype) - 1
            x.mul_(1 + torch.finfo(x.dtype).eps * signs)


def assert_error(
    error: float, rounding: float, what: str = "result", *, size: float = 1.0, dtype: torch.dtype = torch.float32
) -> None:
    """Fail if ``error`` is above its limit, ``FACTOR * rounding`` and ``UNITS`` units in the last place of ``size``.

    Args:
        error: the error of the result.
        rounding: the error of one process in the same run, measured alike: in ``dtype`` against float64, or for
            inputs that ``nudge`` has changed.
        what: the name of the result.
        size: the size of the result.
        dtype: the dtype of the result. Results in half precision are computed in float32.
    """
    half = dtype.itemsize == 2
    units = UNITS * torch.finfo(torch.float32 if half else dtype).eps + half * HALF_UNITS * torch.finfo(dtype).eps
    limit = FACTOR * rounding + units * size + torch.finfo(dtype).tiny
    assert limit <= (0.25 if half else 0.05) * size, f"{what}: {limit:.1e} finds no fault (one process: {rounding:.1e})"
    MARGINS.add(error / limit, what)
    assert error <= limit, f"{what}: error {error:.1e}, allowed {limit:.1e} (rounding of one process {rounding:.1e})"


def full(x: Tensor) -> Tensor:
    """The whole tensor of a DTensor."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def errors(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """The root mean square of the difference of two float64 tensors, and the largest absolute difference."""
    error = actual - expected
    return float(error.norm()) / error.numel() ** 0.5, float(error.abs().max())


def assert_close(
    actual: Any,
    expected: Any,
    dtype: torch.dtype | None = None,
    what: str = "result",
    rounded: Any = None,
) -> None:
    """Fail if ``actual`` differs from ``expected`` by more than its limit.

    Both the root mean square of the difference and the largest difference are compared (``assert_error``), the latter
    with twice as many units. The size counts as at least 1, the size of the inputs: otherwise a small result that is a
    sum of terms which cancel would fail because of the rounding of its terms.

    Args:
        actual: a tensor or a number, or a sequence or dictionary of results.
        expected: the same in float64, or as one process computes it.
        dtype: the dtype in which ``actual`` was computed; by default its own, and float32 for numbers.
        what: the name of the result.
        rounded: ``expected`` as one process computes it in ``dtype``, or for inputs that ``nudge`` has changed. For a
            float64 result the rounding of a float32 one counts in the ratio of their units.
    """
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys(), f"{what}: {actual.keys() ^ expected.keys()}"
        for key, x in expected.items():
            assert_close(actual[key], x, dtype, f"{what} {key}", None if rounded is None else rounded[key])
        return
    if isinstance(expected, Sequence):
        assert len(actual) == len(expected), f"{what}: {len(actual)} results instead of {len(expected)}"
        for i, x in enumerate(expected):
            assert_close(actual[i], x, dtype, f"{what} {i}", None if rounded is None else rounded[i])
        return
    if dtype is None:
        dtype = actual.dtype if isinstance(actual, Tensor) else torch.float32
        assert getattr(expected, "dtype", dtype) == dtype, f"{what}: {dtype} instead of {expected.dtype}"
    finer = 2.0**-29 if dtype == torch.float64 and getattr(rounded, "dtype", dtype) == torch.float32 else 1.0
    actual, expected, rounded = (
        None if x is None else full(torch.as_tensor(x).detach()).double() for x in (actual, expected, rounded)
    )
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    odd = ~expected.isfinite()
    same = torch.allclose(actual[odd], expected[odd], 0, 0, equal_nan=True) and bool(actual[~odd].isfinite().all())
    assert same, f"{what}: {int((~actual.isfinite()).sum())} values are not finite instead of {int(odd.sum())}"
    if odd.all():
        return
    actual, expected = actual[~odd], expected[~odd]
    found, sizes = errors(actual, expected), errors(expected, torch.zeros_like(expected))
    rounding = (0.0, 0.0) if rounded is None else errors(rounded[~odd], expected)
    for i, name in enumerate((what, f"{what}, the worst value")):
        assert_error(found[i], finer * rounding[i], name, size=(i + 1) * max(sizes[i], 1.0), dtype=dtype)


# Masks and layouts.


@dataclass(frozen=True)
class Rule:
    """One mask, defined by a name and arguments.

    ``mask()`` makes the package's mask, and ``sees()`` is the definition to compare it with.
    """

    name: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.name in _OF_MASKS:
            return _OF_MASKS[self.name].join(map(rules_id, self.args))
        args = str(self.args).removesuffix(",)").removesuffix(")").removeprefix("(")
        return f"{self.name}({args})".replace(" ", "").removesuffix("()")

    def mask(self) -> Mask:
        """The package's mask."""
        if self.name == "any_of":
            return reduce(or_, map(combined_mask, self.args))
        if self.name == "by_heads":
            return Mask.by_heads([*map(combined_mask, self.args)])
        made = getattr(Mask, self.name)(*self.args)
        assert isinstance(made, Mask)
        return made

    def sees(self, i: Positions, j: Positions, row: int = 0) -> Any:
        """Whether the queries at positions ``i`` see the keys at positions ``j`` in batch row ``row``."""
        if self.name == "full":
            return (i >= 0) & (j >= 0)
        if self.name == "causal":
            window = self.args[1] if len(self.args) > 1 else i + 1
            return ((i - window < j) & (j <= i)) | _together(i, j, self._blocks(row))
        if self.name == "sliding_window":
            left, right = self.args
            return ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))
        if self.name == "documents":
            boundaries, causal, *_ = self.args
            if isinstance(boundaries[0], tuple):
                boundaries = boundaries[row]
            return _together(i, j, pairwise(boundaries)) & ((j <= i) | (not causal))
        if self.name == "prefix_lm":
            (prefix,) = self.args
            return (j <= i) | (j < (prefix[row] if isinstance(prefix, tuple) else prefix))
        if self.name == "padding":
            return _together(i, j, [[x[row] if isinstance(x, tuple) else x for x in self.args]])
        if self.name == "any_of":
            return np.logical_or.reduce([visible(rules, i, j, row) for rules in self.args])
        if self.name == "global_tokens":
            return (j < self.args[0]) & (i >= 0) & (j >= 0)
        if self.name == "tree":
            parents, lengths, *more = (
                (x[row] if self.rows > 1 else x) if isinstance(x, tuple) else x for x in self.args
            )
            edges, window = np.cumsum((0, *lengths)), more[1] if len(more) > 1 else i + 1
            found = (i < 0) & (j < 0)
            for segment in range(len(parents)):
                mine = (edges[segment] <= i) & (i < edges[segment + 1]) & (j <= i)
                seen, between = segment, 0  # the tokens of the segments between the key's and the query's
                while seen >= 0:
                    distance = i - j if seen == segment else i - edges[segment] + between + edges[seen + 1] - j
                    found = found | (mine & (edges[seen] <= j) & (j < edges[seen + 1]) & (distance < window))
                    between += lengths[seen] if seen != segment else 0
                    seen = parents[seen]
            return found
        if self.name == "ranges":
            found = (i < 0) & (j < 0)
            for (q0, q1), (k0, k1), kind in zip(*self.args, strict=True):
                inside = (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1)
                inside = inside & ((kind in ("full", "inv_causal")) | (j - k1 <= i - q1))
                found = found | (inside & ((kind in ("full", "causal")) | (j - k0 >= i - q0)))
            return found
        if self.name == "block_diffusion":
            clean_len, size = self.args
            q_block, k_block = i % clean_len // size, j % clean_len // size
            clean_key, noisy = (j < clean_len) & (i >= 0), i >= clean_len
            seen = (clean_key & (k_block + noisy <= q_block)) | (noisy & ~clean_key & (k_block == q_block))
            return seen & (i < 2 * clean_len) & (j < 2 * clean_len)
        assert self.name == "chunked"
        size, causal, *starts = self.args
        rows = starts[0] if starts else ()
        origins = sorted({0, *(rows[row] if rows and isinstance(rows[0], tuple) else rows)})
        bounds = [*origins, max(i.max(initial=0), j.max(initial=0)) + size]
        chunks = ((a, min(a + size, stop)) for start, stop in pairwise(bounds) for a in range(start, stop, size))
        return _together(i, j, chunks) & ((j <= i) | (not causal))

    def _blocks(self, row: int) -> Any:
        """The blocks of a causal rule for one batch row: pairs of the first token and one past the last."""
        blocks = self.args[0] if self.args else ()
        return blocks[row] if self.rows > 1 else blocks

    def fitted(self, seq_len: int) -> Rule:
        """The rule for a sequence of ``seq_len`` tokens.

        The boundaries of documents are changed so that the last document ends with the sequence, or before its end if
        padding is allowed. Blocks end with the sequence, and so does the last segment of a tree. Block
        diffusion has an even length; for another one the rule is a tree of one segment.
        """
        if self.name in _OF_MASKS:
            return replace(self, args=tuple(fitted(rules, seq_len) for rules in self.args))
        if self.name == "block_diffusion":
            size = self.args[1]
            if seq_len % 2 or not seq_len:
                return Rule("tree", ((-1,), (seq_len,)))
            return replace(self, args=(seq_len // 2, size))
        if self.name == "ranges":
            cut_pairs = (tuple((min(a, seq_len), min(b, seq_len)) for a, b in pairs) for pairs in self.args[:2])
            return replace(self, args=(*cut_pairs, self.args[2]))
        if self.name == "tree":
            parents, lengths, *padding = self.args

            def ends(row: tuple[int, ...]) -> tuple[int, ...]:
                edges = [min(edge, seq_len) for edge in np.cumsum((0, *row)).tolist()]
                if padding[:1] != [True]:
                    edges[-1] = seq_len
                return tuple(b - a for a, b in pairwise(edges))

            return replace(
                self, args=(parents, tuple(map(ends, lengths)) if self.rows > 1 else ends(lengths), *padding)
            )
        if self.name == "causal" and self.args:

            def cut(row: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
                return tuple((start, min(stop, seq_len)) for start, stop in row if start < seq_len)

            blocks, *window = self.args
            return replace(self, args=(tuple(map(cut, blocks)) if self.rows > 1 else cut(blocks), *window))
        if self.name != "documents":
            return self
        boundaries, causal, *padding = self.args
        padded = padding == [True]

        def fit(row: tuple[int, ...]) -> tuple[int, ...]:
            if padded:
                return tuple(min(boundary, seq_len) for boundary in row)
            return (*(boundary for boundary in row[:-1] if boundary < seq_len), seq_len) if seq_len else (0,)

        rows = tuple(map(fit, boundaries)) if isinstance(boundaries[0], tuple) else fit(boundaries)
        return replace(self, args=(rows, causal, *padding))

    @property
    def rows(self) -> int:
        """The number of batch rows for which the rule has its own arguments; 1 if all rows share them."""
        if self.name in _OF_MASKS:
            return max(map(rows_of, self.args))
        if self.name in ("prefix_lm", "padding"):
            return max((len(x) for x in self.args if isinstance(x, tuple)), default=1)
        if self.name == "causal":
            blocks = self.args[0] if self.args else ()
            return len(blocks) if any(not row or isinstance(row[0], tuple) for row in blocks) else 1
        nested: Any = {"documents": self.args[:1], "tree": self.args[:1], "chunked": self.args[2:]}.get(self.name, ())
        return len(nested[0]) if nested and nested[0] and isinstance(nested[0][0], tuple) else 1


_OF_MASKS = {"any_of": "|", "by_heads": "/"}  # rules whose arguments are rules, and what joins them in a test's id
Rules = tuple[Rule, ...]
Positions = np.ndarray[Any, Any]


def _together(i: Positions, j: Positions, blocks: Iterable[Sequence[int]]) -> Any:
    """Whether one of the blocks, each its first position and one past its last, has both positions."""
    found = (i < 0) & (j < 0)
    for start, stop in blocks:
        found = found | ((start <= i) & (i < stop) & (start <= j) & (j < stop))
    return found


def visible(rules: Rules, i: Positions, j: Positions, row: int) -> Any:
    """Whether the queries at positions ``i`` see the keys at positions ``j`` in batch row ``row`` under all rules."""
    return np.logical_and.reduce([rule.sees(i, j, row) for rule in rules])


def rules_id(rules: Rules) -> str:
    """A name for test ids."""
    return "&".join(map(str, rules))


def rows_of(rules: Rules) -> int:
    """The number of batch rows for which the rules have arguments."""
    return max((rule.rows for rule in rules), default=1)


def groups_of(rules: Rules) -> int:
    """The number of groups of heads with masks of their own; 1 if all heads share the mask."""
    return max((len(rule.args) for rule in rules if rule.name == "by_heads"), default=1)


def fitted(rules: Rules, seq_len: int) -> Rules:
    """The rules for a sequence of ``seq_len`` tokens."""
    return tuple(rule.fitted(seq_len) for rule in rules)


def combined_mask(rules: Rules) -> Mask:
    """The package's mask for the intersection of the rules."""
    mask = Mask.full()
    for rule in rules:
        mask = mask & rule.mask()
    return mask


@lru_cache(maxsize=512)
def visible_pairs(rules: Rules, seq_len: int) -> Tensor:
    """Whether each query sees each key under all of the rules: bool ``[rows, seq_len, seq_len]``.

    It is ``[rows, groups, seq_len, seq_len]`` if groups of heads have masks of their own.
    """
    for at, rule in enumerate(rules):
        if rule.name == "by_heads":
            by_group = [visible_pairs((*rules[:at], *x, *rules[at + 1 :]), seq_len) for x in rule.args]
            return torch.stack([x.expand(rows_of(rules), seq_len, seq_len) for x in by_group], 1)
    i, j = np.arange(seq_len)[:, None], np.arange(seq_len)[None]
    rows = [np.broadcast_to(visible(rules, i, j, row), (seq_len, seq_len)) for row in range(rows_of(rules))]
    return torch.from_numpy(np.stack(rows))


def rank_positions(seq_len: int, ranks: int, rank: int, layout: str) -> Tensor:
    """The global positions of ``rank``'s tokens, int64 ``[seq_local]``, increasing."""
    tokens = np.arange(seq_len)
    if layout == "contiguous":
        mine = np.array_split(tokens, ranks)[rank]
    elif layout == "zigzag":
        chunks = np.array_split(tokens, 2 * ranks)
        mine = np.concatenate([chunks[rank], chunks[2 * ranks - 1 - rank]])
    elif layout == "striped":
        mine = tokens[tokens % ranks == rank]
    else:  # each piece belongs to any rank, so that some hold no tokens; every third length is cut into single tokens
        assert layout == "assigned", f"layout={layout!r}: add its definition to rank_positions"
        chance = np.random.default_rng([seq_len, ranks])
        cuts = tokens if seq_len % 3 == 0 else chance.integers(0, seq_len + 1, 3 * ranks)
        piece = np.searchsorted(np.sort(cuts), tokens, side="right")
        mine = tokens[chance.integers(0, ranks, len(cuts) + 1)[piece] == rank]
    return torch.from_numpy(mine.copy())


# Dropout.


def philox(seed: int, counter: tuple[Any, Any, Any, Any]) -> np.ndarray[Any, Any]:
    """The four words of Philox4x32-10, uint64 ``[4, ...]`` (Salmon et al., 2011; as in the Random123 library)."""
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


def dropout_keep(
    seed: int, dropout_p: float, batch: int, heads: Sequence[int], q_positions: Tensor, k_positions: Tensor
) -> Tensor:
    """Which attention weights dropout keeps, bool ``[batch, heads, queries, keys]``.

    Args:
        seed: the dropout seed.
        dropout_p: probability of dropping a weight.
        batch: number of batch rows.
        heads: global indices of the query heads.
        q_positions: global positions of the queries, ``[queries]``.
        k_positions: global positions of the keys, ``[keys]``.
    """
    axes = (np.arange(batch), np.asarray(heads), q_positions.cpu().numpy(), k_positions.cpu().numpy())
    b, h, i, j = np.meshgrid(*axes, indexing="ij")
    keep = philox(seed, (j, i, h, b))[0] >= np.uint64(round(dropout_p * 2**32))
    return torch.from_numpy(keep).to(q_positions.device)


# Attention.


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    keep: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention of all queries over all keys at once, in float64 or another dtype, on any device.

    Args:
        q: ``[batch, queries, heads, head_dim]``.
        k: ``[batch, keys, kv_heads, head_dim]``.
        v: ``[batch, keys, kv_heads, v_head_dim]``.
        visible: True where the query sees the key, bool ``[queries, keys]``, ``[batch or 1, queries, keys]`` or
            ``[batch or 1, groups of heads, queries, keys]``.
        softmax_scale: factor of the scores; ``head_dim ** -0.5`` by default.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 for none.
        sinks: ``[heads]``, an additional logit in the denominator of each head's softmax.
        alibi_slopes: ``[heads]`` or ``[batch or 1, heads]``.
        dropout_p: the weights that are kept are divided by ``1 - dropout_p``.
        keep: the weights that dropout keeps, bool ``[batch, heads, queries, keys]``; see ``dropout_keep``.
        q_positions: the global positions of the queries for ALiBi, ``[queries]``; 0, 1, 2, ... by default.
        k_positions: the global positions of the keys for ALiBi, ``[keys]``; 0, 1, 2, ... by default.
        dtype: the dtype that everything is computed in.

    Returns:
        ``out [batch, queries, heads, v_head_dim]`` and ``lse [batch, heads, queries]``. A query that sees no key has
        0 in ``out``, and -inf in ``lse`` if there is no sink.
    """
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    q_per_kv = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(q_per_kv, dim=2), v.repeat_interleave(q_per_kv, dim=2)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        i = torch.arange(q.shape[1], device=q.device) if q_positions is None else q_positions
        j = torch.arange(k.shape[1], device=q.device) if k_positions is None else k_positions
        distance = (i[:, None] - j[None]).abs().to(dtype)  # [i, j]
        s = s - torch.atleast_2d(alibi_slopes.to(dtype))[:, :, None, None] * distance
    visible = visible if visible.dim() > 2 else visible[None]
    visible = visible if visible.dim() == 4 else visible[:, None]
    visible = visible.repeat_interleave(q.shape[2] // visible.shape[1], 1)
    s = s.masked_fill(~visible, -torch.inf)  # [b, h, i, j]
    if sinks is not None:
        s = torch.cat([s, sinks.to(dtype)[None, :, None, None].expand(*s.shape[:3], 1)], dim=-1)
    blind = (s == -torch.inf).all(-1, keepdim=True)  # [b, h, i, 1]
    lse = torch.logsumexp(s.masked_fill(blind, 0.0), dim=-1).masked_fill(blind[..., 0], -torch.inf)
    p = torch.softmax(s.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)[..., : k.shape[1]]
    if keep is not None:
        p = p * keep / (1 - dropout_p)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def dense_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> dict[str, Tensor]:
    """Forward and backward of ``dense_attention``.

    Args:
        q, k, v, visible, sinks, dtype, options: as in ``dense_attention``.
        dout: the gradient of ``out``.
        dlse: the gradient of ``lse``. It is ignored where ``lse`` is -inf.

    Returns:
        The tensors ``out, lse, dq, dk, dv`` in ``dtype`` and, with sinks, ``dsinks``.
    """
    inputs = {"q": q, "k": k, "v": v} if sinks is None else {"q": q, "k": k, "v": v, "sinks": sinks}
    inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
    out, lse = dense_attention(**inputs, visible=visible, dtype=dtype, **options)
    outputs, gradients = [out], [dout.to(dtype)]
    if dlse is not None:
        outputs.append(lse.masked_fill(lse == -torch.inf, 0.0))
        gradients.append(dlse.to(dtype))
    grads = torch.autograd.grad(outputs, list(inputs.values()), gradients, materialize_grads=True)
    results = {"out": out.detach(), "lse": lse.detach()}
    return results | {f"d{name}": grad for name, grad in zip(inputs, grads, strict=True)}
