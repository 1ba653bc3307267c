"""The Triton kernels in Triton's interpreter, compared with dense attention in float64.

Triton reads TRITON_INTERPRET when it is imported. These tests therefore need a process of their own:
``TRITON_INTERPRET=1 python -m pytest tests/kernels/test_triton_interpreter.py``. ``test_triton_kernels.py`` starts it.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_triton_kernels.py in a process with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import seqpar.triton_kernels
import seqpar.triton_kernels.backward as backward_module
import seqpar.triton_kernels.forward as forward_module
from seqpar.kernels import base
from seqpar.kernels.base import Grads, Score
from seqpar.kernels.triton import TritonBackend
from seqpar.layers import rotary as rotary_module
from seqpar.placement.layout import shard_positions
from seqpar.schedule.rows import KeyIntervals
from seqpar.triton_kernels import Config, apply_rotary, attention_backward, attention_forward, delta, merge_
from seqpar.triton_kernels.preprocess import padded_bounds, query_ranges

from ..interpreter import make_faster
from ..reference import (
    Rule,
    Rules,
    assert_close,
    combined_mask,
    dense_gradients,
    dropout_keep,
    visible_pairs,
)
from ..standins import stand_ins

torch.set_num_threads(1)
make_faster()
LENGTH = 48  # two tiles, the second of them not full
TILES = Config(32, 32)
BOTH = True, False  # deterministic or not
MASKS: dict[str, Rules] = {
    "full": (Rule("full"),),
    "causal": (Rule("causal"),),
    "documents": (Rule("documents", (((0, 9, 9, 38, 42), (0, 29, 48)), True)),),
    "window": (Rule("sliding_window", (19, 3)),),
    "chunked": (Rule("chunked", (28, True)),),
    "prefix": (Rule("prefix_lm", (36,)),),
}


@dataclass
class Problem:
    """Random inputs for queries and keys at given global positions, and their attention by the oracle.

    Shapes: b batch, q queries, k keys, h heads, n kv_heads, d head_dim of q and k, e head_dim of v.
    """

    q_positions: Tensor
    k_positions: Tensor
    rules: Rules = MASKS["causal"]
    batch: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    v_head_dim: int | None = None
    dtype: torch.dtype = torch.float32
    score: Score = field(default_factory=lambda: Score(0.2))

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(len(self.q_positions) + self.head_dim)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        self.q = normal(self.batch, len(self.q_positions), self.heads, self.head_dim)  # [b, q, h, d]
        self.k = normal(self.batch, len(self.k_positions), self.kv_heads, self.head_dim)  # [b, k, n, d]
        v_head_dim = self.v_head_dim or self.head_dim
        self.v = normal(self.batch, len(self.k_positions), self.kv_heads, v_head_dim)  # [b, k, n, e]
        self.dout = normal(*self.q.shape[:3], v_head_dim)  # [b, q, h, e]
        self.dlse = normal(self.batch, self.heads, len(self.q_positions)).float()  # [b, h, q]

    def intervals(self, keys: Tensor | None = None) -> KeyIntervals:
        """The intervals of the queries among the keys at these indices (all by default)."""
        k_positions = self.k_positions if keys is None else self.k_positions[keys]
        lo, hi = (torch.searchsorted(k_positions, x.reshape(-1, len(self.q_positions)).contiguous()).int()
                  for x in combined_mask(self.rules).intervals(self.q_positions))  # fmt: skip
        return KeyIntervals(lo, torch.maximum(lo, hi), self.q_positions.int(), k_positions.int())

    def dense(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """out, lse and the gradients of q, k, v for ``dout`` and ``dlse``, in float64 or another dtype."""
        score, keep = self.score, None
        seq_len = int(max(self.q_positions.max(), self.k_positions.max())) + 1
        visible = visible_pairs(self.rules, seq_len)[:, self.q_positions][:, :, self.k_positions]
        if score.dropout_p:
            heads = range(score.head_offset, score.head_offset + self.heads)
            keep = dropout_keep(
                score.dropout_seed, score.dropout_p, self.batch, heads, self.q_positions, self.k_positions
            )
        return dense_gradients(
            self.q, self.k, self.v, visible, self.dout, self.dlse, sinks=score.sinks,
            softmax_scale=score.softmax_scale, softcap=score.softcap, alibi_slopes=score.alibi_slopes,
            dropout_p=score.dropout_p, keep=keep, q_positions=self.q_positions, k_positions=self.k_positions,
            dtype=dtype,
        )  # fmt: skip

    def forward(self, **options: Any) -> tuple[Tensor, Tensor]:
        """The kernel's forward over all keys."""
        return attention_forward(self.q, self.k, self.v, self.intervals(), self.score, **options)

    def backward(self, lse: Tensor, row_delta: Tensor, *gradients: Tensor) -> None:
        """The kernel's backward over all keys."""
        attention_backward(self.dout, self.q, self.k, self.v, lse, row_delta, self.intervals(), self.score, *gradients)

    def check(self, steps: int = 1, config: Config = TILES, deterministic: tuple[bool, ...] = (False,)) -> None:
        """Forward and backward over the keys in ``steps`` steps, against the oracle."""
        # Steps of unequal length; the keys of one step need not be neighbours.
        parts = [torch.arange(step, len(self.k_positions), steps) for step in range(steps)]
        carry: tuple[Tensor, Tensor] | None = None
        for step, keys in enumerate(parts):
            last = step == steps - 1
            carry = attention_forward(
                self.q, self.k[:, keys], self.v[:, keys], self.intervals(keys), self.score, carry=carry, last=last,
                config=config,
            )  # fmt: skip
            if not last:
                assert carry[0].dtype == torch.float32
        assert carry is not None
        out, lse = carry
        expected, rounded = self.dense(), self.dense(torch.float32)
        assert out.dtype == self.dtype and lse.dtype == torch.float32
        assert torch.equal(lse == -torch.inf, expected["lse"] == -torch.inf)
        found = {"out": out, "lse": lse.masked_fill(lse == -torch.inf, 0)}
        for dense in (expected, rounded):
            dense["lse"] = dense["lse"].masked_fill(dense["lse"] == -torch.inf, 0)
        row_delta = delta(out, self.dout, self.dlse)
        self.compare(found, expected, rounded)
        for exact in deterministic:
            # The first step writes what the buffers hold; all others add to it.
            dq, dk, dv = (torch.full_like(x, torch.nan, dtype=torch.float32) for x in (self.q, self.k, self.v))
            for step, keys in enumerate(parts):
                dkeys, dvalues = dk[:, keys], dv[:, keys]
                attention_backward(
                    self.dout, self.q, self.k[:, keys], self.v[:, keys], lse, row_delta, self.intervals(keys),
                    self.score, dq, dkeys, dvalues, new_dq=step == 0, new_dkv=True, deterministic=exact, config=config,
                    dq_config=config,
                )  # fmt: skip
                dk[:, keys], dv[:, keys] = dkeys, dvalues
            self.compare({"dq": dq, "dk": dk, "dv": dv}, expected, rounded)
            if len(parts) == 1:  # in the model's dtype: rounded once
                final = [torch.full_like(x, torch.nan) for x in (self.q, self.k, self.v)]
                attention_backward(
                    self.dout, self.q, self.k, self.v, lse, row_delta, self.intervals(), self.score, *final,
                    new_dq=True, new_dkv=True, deterministic=exact, config=config, dq_config=config,
                )  # fmt: skip
                for x, sums in zip(final, (dq, dk, dv), strict=True):
                    assert torch.equal(x, sums.to(x.dtype))

    def compare(self, found: dict[str, Tensor], expected: dict[str, Tensor], rounded: dict[str, Tensor]) -> None:
        for name in found:
            assert_close(found[name], expected[name], self.dtype, name, rounded[name])


def problem(length: int = LENGTH, **options: Any) -> Problem:
    positions = torch.arange(length)
    return Problem(positions, positions, **options)


# Each mask has one feature, and every feature is in one of the problems.
FEATURES = {
    "softcap": Score(0.3, softcap=2.0),
    "alibi": Score(0.2, alibi_slopes=torch.tensor([0.5, 0.01])),
    "alibi by batch row": Score(0.2, alibi_slopes=torch.tensor([[0.5, 0.25], [0.1, 0.0]])),
    "sinks": Score(0.2, sinks=torch.tensor([0.5, -torch.inf])),
    "dropout": Score(0.2, dropout_p=0.3, dropout_seed=2**62 + 12345, head_offset=5),
    "all": Score(0.2, 5.0, torch.tensor([0.1, 0.4]), torch.zeros(2), 0.6, 1, 2),
}


@pytest.mark.thorough(feature=["alibi by batch row", "sinks"])
@pytest.mark.parametrize(("mask", "feature"), [*zip(MASKS, FEATURES, strict=True)])
def test_masks_and_features(mask: str, feature: str) -> None:
    """In one step, and sinks in two."""
    batch = 2 if feature in ("alibi by batch row", "all") else 1
    steps = 2 if FEATURES[feature].sinks is not None else 1
    problem(rules=MASKS[mask], batch=batch, score=FEATURES[feature]).check(steps, deterministic=BOTH)


def test_steps_of_documents() -> None:
    problem(rules=MASKS["documents"]).check(3)


@pytest.mark.parametrize("heads", [(3, 1), (6, 2), (3, 3)])
def test_heads(heads: tuple[int, int]) -> None:
    problem(heads=heads[0], kv_heads=heads[1], batch=1).check(1)


@pytest.mark.thorough(dims=[(1, 1), (40, 40), (24, 16)])
@pytest.mark.parametrize("dims", [(1, 1), (40, 40), (96, 96), (256, 256), (24, 16), (16, 40), (512, 512)])
def test_head_dims(dims: tuple[int, int]) -> None:
    """Of queries and keys, and of values; most are no powers of two, and 512 is computed in two parts."""
    p = problem(40, batch=1, heads=2, kv_heads=1, head_dim=dims[0], v_head_dim=dims[1], score=Score(dims[0] ** -0.5))
    p.check(1, deterministic=BOTH)


@pytest.mark.parametrize(
    ("head_dim", "rules", "config"),
    [
        (530, (Rule("documents", (((0, 13, 20), (0, 9, 24)), True)),), Config(32, 16)),
        (576, (Rule("sliding_window", (7, 3)),), Config(16, 32, tma=True)),
    ],
    ids=["documents", "window and tma"],
)
def test_queries_and_keys_of_two_tiles(head_dim: int, rules: Rules, config: Config) -> None:
    """More than 512 columns beside 512 of v, as in multi-head latent attention over the compressed keys."""
    problem(24, rules=rules, heads=3, kv_heads=1, head_dim=head_dim, v_head_dim=512, score=Score(head_dim**-0.5)).check(
        2, config
    )


@pytest.mark.parametrize(("mask", "steps"), [("causal", 2), ("documents", 1)])
def test_float16(mask: str, steps: int) -> None:
    problem(rules=MASKS[mask], batch=2 if mask == "documents" else 1, dtype=torch.float16).check(steps)


def test_values_of_bfloat16() -> None:
    # The interpreter multiplies bfloat16 wrongly, so values that bfloat16 can hold are tested in float32.
    p = problem(batch=1)
    p.q, p.k, p.v, p.dout = (x.bfloat16().float() for x in (p.q, p.k, p.v, p.dout))
    p.check(2)


@pytest.mark.parametrize("lengths", [(1, 1), (33, 7), (7, 65), (64, 64)])
def test_lengths_of_queries_and_keys(lengths: tuple[int, int]) -> None:
    q_positions = torch.arange(lengths[0]) * 3 + 2
    Problem(q_positions, torch.arange(lengths[1]), batch=1).check(1, deterministic=BOTH)


@pytest.mark.thorough(v_head_dim=[None])
@pytest.mark.parametrize(
    ("config", "v_head_dim"),
    [(Config(16, 64), None), (Config(64, 16), 32), (Config(32, 32, tma=True), None), (Config(32, 32, tma=True), 64)],
    ids=["16x64", "64x16", "tma", "tma and wide values"],
)
def test_configurations(monkeypatch: pytest.MonkeyPatch, config: Config, v_head_dim: int | None) -> None:
    def reduce(self: Any, kind: Any, descriptor: Any, value: Any, indices: Any) -> Any:
        policies = len(signature(self.create_descriptor_load).parameters) - 2  # one in Triton 3.9, two before
        old = self.create_descriptor_load(descriptor, indices, *[None] * policies)
        return self.create_descriptor_store(descriptor, TensorHandle(old.data + value.data, old.dtype), indices)

    monkeypatch.setattr(InterpreterBuilder, "create_descriptor_reduce", reduce, raising=False)  # it has none
    rules = (Rule("sliding_window", (18, 0)),)
    problem(rules=rules, batch=1, v_head_dim=v_head_dim, score=FEATURES["dropout"]).check(1, config, BOTH)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_the_steps_of_a_ring(layout: str) -> None:
    ranks, backend = 2, TritonBackend()
    positions = [shard_positions(LENGTH, ranks, rank, layout) for rank in range(ranks)]
    full = problem(batch=1, score=Score(0.2, sinks=torch.tensor([1.0, -1.0])))
    expected = full.dense()
    dk, dv = (torch.zeros_like(x) for x in (full.k, full.v))
    for rank in range(ranks):
        own = positions[rank]
        local = Problem(own, full.k_positions, batch=1, score=full.score)
        q, dout = full.q[:, own], full.dout[:, own]
        steps = [positions[(rank - step) % ranks] for step in range(ranks)]
        carry = None
        for step, keys in enumerate(steps):
            k, v = full.k[:, keys], full.v[:, keys]
            carry = backend.forward(q, k, v, local.intervals(keys), full.score, carry, step == ranks - 1)
        assert carry is not None
        out, lse = carry
        assert_close(out, expected["out"][:, own], torch.float32)
        assert_close(lse, expected["lse"][:, :, own], torch.float32)
        dq = torch.zeros_like(q)
        output = base.OutputGrad(dout, out, lse, delta(out, dout, full.dlse[:, :, own]))
        for keys in steps:
            grads = torch.zeros_like(full.k[:, keys]), torch.zeros_like(full.v[:, keys])
            k, v = full.k[:, keys], full.v[:, keys]
            backend.backward(q, k, v, output, local.intervals(keys), full.score, Grads(dq, *grads))
            dk[:, keys] += grads[0]
            dv[:, keys] += grads[1]
        assert_close(dq, expected["dq"][:, own], torch.float32)
    assert_close(dk, expected["dk"], torch.float32)
    assert_close(dv, expected["dv"], torch.float32)


def test_layouts_of_memory() -> None:
    """Batch, sequence and heads may have any strides; a head_dim that is not dense is copied."""
    p = problem(batch=2)
    p.q = p.q.transpose(1, 2).contiguous().transpose(1, 2)
    p.k = p.k.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    p.v = torch.stack((p.v, p.v), 2)[:, :, 0]
    p.dout = p.dout[:, :1].expand_as(p.dout)
    p.check(1)


def test_gradient_buffers_of_any_layout() -> None:
    p = problem(40)
    out, lse = p.forward()
    results = []
    for permuted in (False, True):
        buffers = [torch.zeros_like(x) for x in (p.q, p.k, p.v)]
        if permuted:
            buffers = [x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for x in buffers]
        p.backward(lse, delta(out, p.dout), *buffers)
        results.append(buffers)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def nothing_visible(p: Problem, queries: int, keys: int) -> KeyIntervals:
    """Empty intervals of the first ``queries`` queries among the first ``keys`` keys."""
    empty = torch.zeros(1, queries, dtype=torch.int32)
    return KeyIntervals(empty, empty, p.q_positions[:queries].int(), p.k_positions[:keys].int())


def test_empty_keys_and_queries() -> None:
    p, score = problem(20), Score(1.0)
    out, lse = attention_forward(p.q, p.k[:, :0], p.v[:, :0], nothing_visible(p, 20, 0), score)
    assert torch.equal(out, torch.zeros_like(p.q)) and bool((lse == -torch.inf).all())
    sinks = torch.tensor([1.0, 2.0])
    out, lse = attention_forward(p.q, p.k, p.v, nothing_visible(p, 20, 20), Score(1.0, sinks=sinks))
    assert torch.equal(out, torch.zeros_like(p.q))
    assert_close(lse, sinks[None, :, None].expand_as(lse))
    out, lse = attention_forward(p.q[:, :0], p.k, p.v, nothing_visible(p, 0, 20), score)
    assert out.shape == (2, 0, 2, 16) and lse.shape == (2, 2, 0)
    grads = [torch.ones_like(x) for x in (p.q, p.k, p.v)]
    minus = torch.full((2, 2, 20), -torch.inf)
    zeros = torch.zeros_like(minus)
    attention_backward(p.dout, p.q, p.k, p.v, minus, zeros, nothing_visible(p, 20, 20), score, *grads)
    assert all(torch.equal(g, torch.ones_like(g)) for g in grads)


def test_steps_without_visible_keys_keep_the_carry() -> None:
    p = problem(40)
    acc, lse = torch.randn(p.q.shape), torch.randn(2, 2, 40)
    before = acc.clone(), lse.clone()
    for last in (False, True):
        found = attention_forward(p.q, p.k, p.v, nothing_visible(p, 40, 40), Score(1.0), carry=(acc, lse), last=last)
        assert_close(found[0], before[0])
        assert_close(found[1], before[1])


def test_large_scores_stay_finite() -> None:
    p = problem(50, score=Score(300.0))
    out, lse = p.forward()
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())
    grads = [torch.zeros_like(x) for x in (p.q, p.k, p.v)]
    p.backward(lse, delta(out, p.dout), *grads)
    assert all(bool(g.isfinite().all()) for g in grads)


def test_rows_past_the_last_key_do_not_reach_dq() -> None:
    """exp(0 - lse) overflows where every score is very negative."""
    p = problem(50, rules=MASKS["full"], score=Score(0.2))
    p.q, p.k = 4 + 0.1 * p.q, -4 + 0.1 * p.k  # scores of about -100
    p.check(1)


@pytest.mark.thorough(group=[1])
@pytest.mark.parametrize("group", [1, 3])
def test_programs_that_share_the_query_heads_of_a_kv_head(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    p = problem(40, batch=1, heads=6, kv_heads=6 // group, rules=MASKS["window"])
    used = []
    keys_launch = backward_module.keys_launch

    def launch(*args: Any, **kwargs: Any) -> Any:
        used.append(kwargs["split"])
        return keys_launch(*args, **kwargs)

    monkeypatch.setattr(backward_module, "processors", lambda device: 8)
    monkeypatch.setattr(backward_module, "_choices", {})
    monkeypatch.setattr(backward_module, "keys_launch", launch)
    p.check(1, deterministic=BOTH)
    assert used == [1, 1, group, group]  # deterministic or not, in float32 and in the model's dtype


@pytest.mark.thorough(batch=[2])
@pytest.mark.parametrize(("batch", "heads"), [(2, 2), (1, 6)])
def test_the_order_of_programs_on_gpus_of_several_dies(monkeypatch: pytest.MonkeyPatch, batch: int, heads: int) -> None:
    for module in (forward_module, backward_module):
        monkeypatch.setattr(module, "dies", lambda hip: 8)
    problem(40, rules=MASKS["window"], batch=batch, heads=heads).check(1, deterministic=BOTH)


def test_deterministic_algorithms_take_the_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    p, used = problem(8, batch=1), []
    keys_launch = backward_module.keys_launch

    def launch(*args: Any, **kwargs: Any) -> Any:
        used.append(kwargs["with_dq"])
        return keys_launch(*args, **kwargs)

    monkeypatch.setattr(backward_module, "keys_launch", launch)
    out, lse = p.forward()
    output = base.OutputGrad(p.dout, out, lse, delta(out, p.dout))
    for backend, wanted in (
        (TritonBackend(), False),
        (TritonBackend(), True),
        (TritonBackend(deterministic=True), False),
    ):
        torch.use_deterministic_algorithms(wanted)
        try:
            grads = [torch.zeros_like(x) for x in (p.q, p.k, p.v)]
            backend.backward(p.q, p.k, p.v, output, p.intervals(), p.score, Grads(*grads))
        finally:
            torch.use_deterministic_algorithms(False)
    assert used == [True, False, False]


def test_query_ranges_hold_exactly_the_queries_that_see_a_tile() -> None:
    block, length = 16, LENGTH
    for rules in MASKS.values():
        intervals = problem(rules=rules).intervals()
        ranges = query_ranges(padded_bounds(intervals.lo, intervals.hi, length, 128).view(2, -1, 128), length, block)
        tiles = ranges.shape[-1] // 2
        keys = torch.arange(length)
        visible = (keys >= intervals.lo[..., None]) & (keys < intervals.hi[..., None])  # [row sets, q, k]
        for row_set in range(intervals.lo.shape[0]):
            for tile in range(tiles):
                part = visible[row_set, :, tile * block : (tile + 1) * block]
                some, every = part.any(1).nonzero().flatten(), part.all(1).nonzero().flatten()
                begin, inner_begin = ranges[0, row_set, tile].item(), ranges[0, row_set, tiles + tile].item()
                inner_end, end = ranges[1, row_set, tile].item(), ranges[1, row_set, tiles + tile].item()
                assert set(some.tolist()) <= set(range(begin, end))
                assert every.tolist() == list(range(inner_begin, inner_end))


def test_a_scale_that_is_not_positive_raises() -> None:
    p = problem(8, score=Score(0.0))
    with pytest.raises(ValueError, match=r"softmax_scale=0\.0: .*positive"):
        p.forward()
    reason = TritonBackend().unsupported(p.q, p.k, Score(-1.0), lse_gradient=False)
    assert reason is not None and "softmax_scale" in reason


def test_backend_refuses_inputs() -> None:
    backend, q = TritonBackend(), torch.zeros(1, 2, 1, 16)
    assert backend.unavailable() is None
    assert backend.unsupported(q, q, Score(1.0), lse_gradient=True) is None
    for dtype, word in ((torch.bfloat16, "bfloat16"), (torch.float64, "float64")):
        x = q.to(dtype)
        assert word in str(backend.unsupported(x, x, Score(1.0), lse_gradient=False))
    wide = torch.zeros(1, 2, 1, 257)
    assert "head_dim=257" in str(backend.unsupported(wide, wide, Score(1.0), lse_gradient=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge(dtype: torch.dtype) -> None:
    acc, out = torch.randn(2, 37, 3, 40), torch.randn(2, 37, 3, 40).to(dtype)
    lse, out_lse = torch.randn(2, 3, 37) * 50, torch.randn(2, 3, 37) * 50
    lse[0, 0, :5], out_lse[0, 0, 3:8] = -torch.inf, -torch.inf

    def merged(as_type: torch.dtype) -> tuple[Tensor, Tensor]:
        both = torch.logaddexp(lse.to(as_type), out_lse.to(as_type))
        weights = [torch.exp(x.to(as_type) - both).nan_to_num(0).transpose(1, 2)[..., None] for x in (lse, out_lse)]
        return acc.to(as_type) * weights[0] + out.to(as_type) * weights[1], both

    expected, rounded = merged(torch.float64), merged(torch.float32)
    # Views into longer tensors, as a block of queries is.
    acc, lse = (F.pad(x, (0,) * (2 * (x.dim() - 1 - d)) + (2, 3)).narrow(d, 2, 37) for x, d in ((acc, 1), (lse, 2)))
    merge_(acc, lse, out, out_lse)
    assert_close((acc, lse), expected, torch.float32, rounded=rounded)


def test_merge_raises_if_it_cannot_write_in_place() -> None:
    acc, lse = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2).transpose(1, 2)
    with pytest.raises(ValueError, match=r"lse has strides .*in place"):
        merge_(acc, lse, acc, lse)


@pytest.mark.parametrize("head_dim", [2, 40, 64, 96])
@pytest.mark.parametrize("by_batch", [False, True])
def test_rotary(head_dim: int, by_batch: bool) -> None:
    x = torch.randn(2, 70, 3, head_dim, requires_grad=True)
    positions = torch.randint(0, 3000, (2, 70) if by_batch else (70,))
    frequencies = 1.0 / 10000 ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angles = (positions.reshape(-1, 70, 1).float() * frequencies)[:, :, None]
    cos, sin = angles.double().cos() * 1.2, angles.double().sin() * 1.2
    first, second = x.double().chunk(2, -1)
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    weight = torch.randn_like(x)
    (want,) = torch.autograd.grad((expected * weight.double()).sum(), x)
    for tables in ((cos.float(), sin.float()), (cos.float().squeeze(2), sin.float().squeeze(2))):
        found = apply_rotary(x, *tables)
        assert_close(found, expected, torch.float32)
        (got,) = torch.autograd.grad((found * weight).sum(), x)
        assert_close(got, want, torch.float32)


def test_elementwise_work_is_the_same_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    out, dout = torch.randn(2, 2, 37, 3, 40).unbind()
    lse, dlse = torch.randn(2, 2, 3, 37).unbind()
    partial, angles = torch.randn(2, 37, 3, 40), torch.randn(1, 37, 1, 20)

    def elementwise_work() -> list[Tensor]:
        carry, x = (out.clone(), lse.clone()), dout.clone().requires_grad_()
        base.merge_(*carry, partial, dlse)
        rotated = rotary_module.rotate(x, angles.cos(), angles.sin())
        (dx,) = torch.autograd.grad(rotated, x, partial)
        return [*carry, base.row_delta(out, dout, None), base.row_delta(out, dout, dlse), rotated.detach(), dx]

    expected = elementwise_work()
    used: list[Tensor] = []

    def kernels(x: Tensor) -> Any:
        used.append(x)
        return seqpar.triton_kernels

    for module in (base, rotary_module):
        monkeypatch.setattr(module, "elementwise_kernels", kernels)
    for found, want in zip(elementwise_work(), expected, strict=True):
        assert_close(found, want)
    assert len(used) == 4


def test_rotary_at_long_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer's rotation through the kernel, where float32 angles are off by half a radian."""
    monkeypatch.setattr(rotary_module, "elementwise_kernels", lambda x: seqpar.triton_kernels)
    positions = torch.arange(2**24 - 2, 2**24 + 5)
    q, k = torch.randn(1, 7, 2, 64), torch.randn(1, 7, 1, 64)
    angles = positions.double()[:, None, None] * 5e5 ** (-torch.arange(0, 64, 2).double() / 64)  # [s, 1, d / 2]
    for x, found in zip((q, k), seqpar.RotaryEmbedding(64, 5e5)(q, k, positions), strict=True):
        first, second = x.double().chunk(2, -1)
        expected = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
        assert_close(found, torch.cat(expected, -1), torch.float32)


def test_rotary_refuses_tables() -> None:
    x, table = torch.zeros(2, 5, 1, 8), torch.zeros(1, 5, 1, 4)
    with pytest.raises(ValueError, match=r"cos=\(1, 5, 1, 3\): expected \[1 or 2, 5, 1, 4\]"):
        apply_rotary(x, table[..., :3], table)
    with pytest.raises(ValueError, match=r"sin=\(1, 4, 1, 4\): expected"):
        apply_rotary(x, table, table[:, :4])
    with pytest.raises(ValueError, match=r"sin=.*shape of cos"):
        apply_rotary(x, table, table.expand(2, -1, -1, -1))
    with pytest.raises(ValueError, match="head_dim=7"):
        apply_rotary(x[..., :7], table, table)


def test_compiling_raises_in_the_interpreter() -> None:
    from tools.gate import inspect, small_cases

    with pytest.raises(RuntimeError, match="unset it to compile"):
        next(inspect(small_cases(["sm_90"])))


@pytest.mark.slow
@pytest.mark.thorough
def test_the_gpu_benchmark_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every function, in this process. ``test_gpu_benchmark.py`` tests the processes."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    gpu, *modules = (importlib.import_module(name) for name in ("gpu", "gpu_checks", "gpu_speed", "gpu_transfers"))
    path, report = tmp_path / "rows.jsonl", gpu.Report({"gpu": "a CPU"})
    with stand_ins():
        for task in gpu.tasks(True, ["triton", "cudnn"]):
            functions = [getattr(module, task.function) for module in modules if hasattr(module, task.function)]
            functions[0](importlib.import_module("gpu_report").Rows(path), *task.arguments)
    report.rows = [{"task": "", **json.loads(line)} for line in path.read_text().splitlines()]
    assert not report.failed(), report.failed()
    assert {row["why"] for row in report.of("skipped")} == {"no softcap"}
    kinds = {"begin", "check", "skipped", "ceiling", "speed", "hops", "ranks", "carry", "tiles", "elementwise"}
    assert {row["kind"] for row in report.rows} == kinds
    ran = {row["strategy"]: row["ran"] for row in report.of("hops")}
    assert ran["ring"] == {"triton": {"triton": 2}, "cudnn": {"cudnn": 2}}
    assert ran["ulysses"] == {"triton": {"triton": 1}, "cudnn": {"cudnn": 1}}
    checked = {row["what"]: row["ran"] for row in report.of("check")}
    assert checked["cudnn, float16, head_dim 32, causal, 3 steps, softcap 0.0"] == {"cudnn": 6}
    assert checked["cudnn, float16, head_dim 32, window, 1 steps, softcap 0.0"] == {"reference": 2}  # no such kernel
    tables = gpu.markdown(report)
    assert "| ring | 64 | 32 | backward | cudnn | cudnn 2 |" in tables
    assert "| 64 | 1 | 64 | 2/1 | causal |" in tables
