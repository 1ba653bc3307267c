"""The Hopper forward without a GPU: its own source in an emulator of Gluon, beside float64, and with faults planted."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Gluon has no interpreter", allow_module_level=True)

import seqpar.triton_kernels.hopper_forward as hopper
from seqpar.kernels import BACKENDS, BackendChoice
from seqpar.kernels import hopper as backend_module
from seqpar.kernels.base import Score
from seqpar.kernels.elementwise import targeted
from seqpar.kernels.reference import ReferenceBackend
from seqpar.schedule.rows import KeyIntervals

from ..fake_cuda import fake_cuda
from ..reference import Rule, Rules, assert_close, combined_mask, dense_attention, rows_of, visible_pairs
from .gluon_emulator import Program, functions, run

LENGTH = 300  # 3 tiles of queries and of keys, the last ones of 44
FUNCTIONS = functions(hopper)
# Masks with tiles that are skipped, masked and inner, and queries that see no key.
MASKS: dict[str, Rules] = {
    "causal": (Rule("causal"),),
    "full": (Rule("full"),),
    "window": (Rule("sliding_window", (150, 0)),),
    "narrow window": (Rule("sliding_window", (20, 30)),),
    "documents": (Rule("documents", ((0, 9, 9, 130, 241), True, True)),),
    "documents, two batch rows": (Rule("documents", (((0, 4, 300), (0, 131, 145)), True, True)),),
    "padding": (Rule("padding", ((0, 140), (300, 200))), Rule("causal")),
}


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """``hopper.hopper_forward`` runs in the emulator. Returns the programs that have run."""
    programs: list[Program] = []

    def launch(inputs: object, values: object, make: Any) -> None:
        programs.extend(run(make(), FUNCTIONS, seed=int(torch.randint(1 << 30, ()))))

    monkeypatch.setattr(hopper, "_launches", launch)
    return programs


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def intervals(rules: Rules, queries: slice, keys: slice) -> KeyIntervals:
    """Which of the keys each of the queries sees."""
    positions = torch.arange(LENGTH, dtype=torch.int32)
    lo, hi = (x.reshape(-1, LENGTH)[:, queries] for x in combined_mask(rules).intervals(positions.long()))
    first, last = (x.clamp(keys.start, keys.stop).int() - keys.start for x in (lo, hi))
    return KeyIntervals(first, torch.maximum(first, last), positions[queries], positions[keys])


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_beside_float64(mask: str, forward: list[Program]) -> None:
    """In one step, and in four with a carry, with sinks and groups, in both dtypes, for both head_dims."""
    rules = MASKS[mask]
    visible, batch, number = visible_pairs(rules, LENGTH), rows_of(rules), list(MASKS).index(mask)
    # (head_dim, dtype, heads, KV heads, first key of each step, sinks)
    cases: list[tuple[int, torch.dtype, int, int, list[int], bool]] = [
        ((64, 128)[number % 2], torch.bfloat16, 2, 1, [0], True),
        ((128, 64)[number % 2], torch.float16, 1, 1, [0, 0, 129, 200], number % 3 == 0),
    ]
    for head_dim, dtype, heads, kv_heads, starts, sunk in cases:
        q = normal(batch, LENGTH, heads, head_dim, dtype=dtype)
        k, v = (normal(batch, LENGTH, kv_heads, head_dim, dtype=dtype) for _ in range(2))
        score = Score(head_dim**-0.5, sinks=torch.randn(heads) if sunk else None)
        carry, stops = None, [*starts[1:], LENGTH]
        for start, stop in zip(starts, stops, strict=True):  # the first step of several has no keys
            keys = slice(start, stop)
            seen = intervals(rules, slice(0, LENGTH), keys)
            carry = hopper.hopper_forward(q, k[:, keys], v[:, keys], seen, score, carry=carry, last=stop == LENGTH)
        assert carry is not None
        out, lse = carry
        assert out.dtype == dtype and lse.dtype == torch.float32
        expected, expected_lse = dense_attention(q, k, v, visible, sinks=score.sinks)
        assert_close(out, expected, dtype, "out")
        assert_close(lse, expected_lse, torch.float32, "lse")
        if not sunk:
            hidden = ~visible.any(-1).expand(batch, LENGTH)
            assert (out[hidden] == 0).all() and (lse.transpose(1, 2)[hidden] == -torch.inf).all()


def test_tiles_without_a_visible_key_are_skipped(forward: list[Program]) -> None:
    """Keys that no query of a tile sees are never loaded: they are NaN here. A carry that sees none keeps its bits."""
    q, k, v = (normal(1, LENGTH, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    score, rows = Score(0.125), torch.arange(LENGTH, dtype=torch.int32)
    # Queries of the first tile see no key, the others the keys of the third tile.
    lo, hi = (torch.where(rows < 128, 0, x).int()[None] for x in (256, 290))
    seen, keys, values = KeyIntervals(lo, hi, rows, rows), k.clone(), v.clone()
    keys[:, :256] = values[:, :256] = torch.nan
    out, lse = hopper.hopper_forward(q, keys, values, seen, score)
    assert (out[:, :128] == 0).all() and (lse[..., :128] == -torch.inf).all()
    visible = (rows[None] >= lo[0][:, None]) & (rows[None] < hi[0][:, None])
    expected, _ = dense_attention(q, k, v, visible)
    assert_close(out, expected, torch.bfloat16)
    started = [len(program.started) for program in forward]
    assert started == [4] * 3  # one tile of keys: two products of two consumers

    carry = torch.randn(1, LENGTH, 1, 64), torch.randn(1, 1, LENGTH)
    before = [x.clone() for x in carry]
    found = hopper.hopper_forward(q, keys, values, seen, score, carry=carry, last=False)
    assert found[0] is carry[0] and found[1] is carry[1]
    assert torch.equal(found[0][:, :128], before[0][:, :128]) and torch.equal(found[1][..., :128], before[1][..., :128])
    assert not torch.equal(found[0][:, 128:], before[0][:, 128:])


def test_strides(forward: list[Program]) -> None:
    """Views of tensors full of NaN: what is around them, also past the last row of a batch row, is not read."""
    views: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
        "every third token": ((2, 3 * LENGTH, 2, 64), lambda x: x[:, 1::3]),
        "heads first": ((2, 2, LENGTH + 2, 72), lambda x: x[:, :, 1:-1, 8:].transpose(1, 2)),
        "heads apart": ((2, LENGTH, 6, 64), lambda x: x[:, :, 1::3]),
        "copied: an odd address": ((2, LENGTH, 2, 68), lambda x: x[..., 4:]),
        "copied: columns apart": ((2, LENGTH, 2, 128), lambda x: x[..., ::2]),
        "copied: one batch row twice": ((1, LENGTH, 2, 64), lambda x: x.expand(2, -1, -1, -1)),
    }
    every = slice(0, LENGTH)
    seen, visible = intervals(MASKS["causal"], every, every), visible_pairs(MASKS["causal"], LENGTH)
    for name, (shape, view) in views.items():
        q, k, v = (view(torch.full(shape, torch.nan, dtype=torch.bfloat16)) for _ in range(3))
        for x in (q, k, v):
            for row in x if x.stride(0) else x[:1]:
                row.copy_(torch.randn(row.shape))
            assert (hopper.readable(x) is x) != name.startswith("copied"), name
        out, lse = hopper.hopper_forward(q, k, v, seen, Score(0.125))
        expected, expected_lse = dense_attention(q, k, v, visible)
        assert_close(out, expected, torch.bfloat16, name)
        assert_close(lse, expected_lse, torch.float32, name)


def test_offsets_have_64_bits() -> None:
    """A second batch row 2**31 elements behind the first one. The memory between is not touched."""
    seen = intervals(MASKS["causal"], slice(0, 64), slice(0, 64))
    q, k, v = (normal(2, 64, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    memory = torch.empty(2**31 + 64 * 64, dtype=torch.bfloat16)
    out, lse = memory.as_strided((2, 64, 1, 64), (2**31, 64, 64, 1)), torch.empty(2, 1, 64)
    launch = hopper.hopper_launch(q, k, v, seen, Score(0.125), acc=None, lse_in=None, out=out, lse=lse)
    run(launch, FUNCTIONS)
    assert_close(out, dense_attention(q, k, v, visible_pairs(MASKS["causal"], 64))[0], torch.bfloat16)
    narrow = functions(hopper, [("batch.to(gl.int64) * stride_ob", "batch * stride_ob.to(gl.int32)")])
    with pytest.raises((AssertionError, RuntimeError)):
        run(launch, narrow)


# Lines of the kernel, and what they wait for.
KEYS_LOADED = "mbarrier.wait(keys.ready.index(j % C.STAGES), j // C.STAGES & 1)"
KEYS_READ = "    s = warpgroup_mma_wait(0 if FIRST else 1, [s])\n"
KEYS_EMPTY = "    mbarrier.arrive(keys.empty.index(j % C.STAGES), count=1)\n"
KEYS_EMPTIED = "mbarrier.wait(keys.empty.index(slot), phase ^ 1)"
VALUES_LOADED = "mbarrier.wait(values.ready.index(j % C.STAGES), j // C.STAGES & 1)"
VALUES_READ = "        acc, p = warpgroup_mma_wait(0, [acc, p])\n"
VALUES_EMPTY = "        mbarrier.arrive(values.empty.index((j - 1) % C.STAGES), count=1)\n"
VALUES_EMPTIED = "mbarrier.wait(values.empty.index(slot), phase ^ 1)"
# What is replaced in the kernel, by what, and what the emulator then says.
FAULTS: dict[str, tuple[str, str, str]] = {
    "one consumer empties a slot": ("_barriers(2, C.STAGES)", "_barriers(1, C.STAGES)", "rewritten|more arrivals"),
    "keys go into a full slot": (KEYS_EMPTIED, "pass", "rewritten|two copies"),
    "values go into a full slot": (VALUES_EMPTIED, "pass", "rewritten|two copies"),
    "a load waits for the other phase": (KEYS_EMPTIED, KEYS_EMPTIED.replace(" ^ 1", ""), "deadlock"),
    "keys count as read too early": (KEYS_READ + KEYS_EMPTY, KEYS_EMPTY + KEYS_READ, "rewritten"),
    "values count as read too early": (VALUES_READ + VALUES_EMPTY, VALUES_EMPTY + VALUES_READ, "rewritten"),
    "scores are used too early": (KEYS_READ, KEYS_READ.replace("else 1", "else 2"), "used before its product"),
    "acc is used too early": (VALUES_READ, VALUES_READ.replace("(0", "(1"), "used before its product"),
    "half of q is waited for": ("2 * Q.block_type.nbytes", "Q.block_type.nbytes", "before its copy|deadlock"),
    "keys are not waited for": (KEYS_LOADED, "pass", "before its copy"),
    "keys are waited for once": (
        KEYS_LOADED,
        KEYS_LOADED.replace("j // C.STAGES & 1", "0"),
        "before its copy|deadlock",
    ),
    "values are not waited for": (VALUES_LOADED, "pass", "before its copy"),
    "a turn is not passed on": ("mbarrier.arrive(turn.index(1 - SELF), count=1)", "pass", "deadlock"),
    "a tile too many is loaded": ("range(0, edges.count", "range(0, 1 + edges.count", "before its copies|deadlock"),
}


def five_tiles() -> tuple[Any, Tensor]:
    """The launch of one program with five tiles of keys, for two slots, and its result in float64."""
    keys = 5 * 128
    q = normal(1, 64, 1, 128, dtype=torch.bfloat16)
    k, v = (normal(1, keys, 1, 128, dtype=torch.bfloat16) for _ in range(2))
    lo, rows = torch.zeros(1, 64, dtype=torch.int32), torch.arange(keys, dtype=torch.int32)
    launch = hopper.hopper_launch(
        q, k, v, KeyIntervals(lo, lo + keys, rows[:64], rows), Score(0.1),
        acc=None, lse_in=None, out=torch.empty_like(q), lse=torch.empty(1, 1, 64),
    )  # fmt: skip
    return launch, dense_attention(q, k, v, torch.ones(1, 64, keys, dtype=torch.bool), softmax_scale=0.1)[0]


def test_whatever_comes_first_the_result_is_right() -> None:
    """And consumers start their products of scores in turn. Without a wait for the turn they would not."""
    launch, expected = five_tiles()
    hasty, orders = (
        functions(hopper, [("mbarrier.wait(turn.index(SELF), (j + SELF & 1) ^ 1)", "pass")]),
        list[list[int]](),
    )
    for known in (FUNCTIONS, hasty):
        orders.clear()
        for seed in range(30):
            (program,) = run(launch, known, seed)
            orders.append([role for role, adds in program.started if not adds])
            assert_close(launch.arguments["OUT"], expected, torch.bfloat16)
        assert all(order == [0, 1] * 5 for order in orders) == (known is FUNCTIONS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_protocol_is_noticed(fault: str) -> None:
    old, new, message = FAULTS[fault]
    known, said = functions(hopper, [(old, new)]), set()
    launch, _ = five_tiles()
    for seed in range(30):
        try:
            run(launch, known, seed)
        except AssertionError as error:
            said.add(str(error))
            if re.search(message, str(error)):
                return
    pytest.fail(f"not noticed: {said}")


def test_the_checks_for_a_gpu(forward: list[Program], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The checks of ``benchmarks/gpu.py`` pass with the kernel in the emulator, and fail with a wrong one."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    checks, report = (importlib.import_module(name) for name in ("gpu_checks", "gpu_report"))
    backend: Any = BACKENDS["hopper"]
    monkeypatch.setattr(type(backend), "unsupported", lambda self, *_, **__: None)
    monkeypatch.setattr(type(backend), "backward", staticmethod(ReferenceBackend().backward))
    rows = report.Rows(tmp_path / "rows.jsonl")
    checks.check_contact(rows, True, "carry", "hopper", "float16", 64, 1, 4, 2)
    monkeypatch.setattr(hopper, "hopper_forward", lambda q, k, v, *_, **__: hopper.allocate(q, v, None, True)[2:])
    checks.check_contact(rows, True, "forward", "hopper", "bfloat16", 128, 1, 2, 2)
    found = [json.loads(line) for line in rows.path.read_text().splitlines()]
    assert [row["passed"] for row in found if row["kind"] == "check"] == [True, False], found


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_the_backend_runs_by_name_only(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for cached in (targeted, backend_module._why_not):
        cached.cache_clear()
    backend, plain = BACKENDS["hopper"], Score(1.0)
    try:
        assert backend.unavailable() == (None if capability == (9, 0) else "no GPU of compute capability 9.0")
        with fake_cuda():
            q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16, device="cuda")
            chosen = {name: BackendChoice(name, q).backend(q, q, plain).name for name in ("auto", "hopper")}
            assert chosen["hopper"] == ("hopper" if capability == (9, 0) else chosen["auto"])
            assert chosen["auto"] != "hopper"
            repeatable = BackendChoice("hopper", q, deterministic=True).backend(q, q, plain)
            assert repeatable.deterministic
            refused = {
                "softcap": (q, Score(1.0, softcap=3.0)),
                "ALiBi": (q, Score(1.0, alibi_slopes=torch.ones(2))),
                "dropout": (q, Score(1.0, dropout_p=0.1)),
                "positive only": (q, Score(0.0)),
                "float16 and bfloat16 only": (q.float(), plain),
                "64 or 128": (torch.empty(1, 8, 2, 96, dtype=torch.bfloat16, device="cuda"), plain),
                "the tensors are on cpu": (torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16, device="cpu"), plain),
            }
            if capability != (9, 0):
                refused["9.0 only"] = q, plain
            for why, (x, score) in refused.items():
                assert why in str(backend.unsupported(x, x, score, lse_gradient=False))
            assert "128 of v" in str(backend.unsupported(q, q, plain, lse_gradient=False, v_head_dim=128))
            if capability == (9, 0):
                assert backend.unsupported(q, q, plain, lse_gradient=True, v_head_dim=64) is None
        backend_module._why_not.cache_clear()
        monkeypatch.setattr("triton.__version__", "3.10.0")
        assert "3.6 to 3.9 only" in str(backend.unavailable())
    finally:
        for cached in (targeted, backend_module._why_not):
            cached.cache_clear()
