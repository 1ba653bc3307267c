"""The backends that run kernels of libraries, with fake kernels: errors relative to float64, and which one runs."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections.abc import Sequence
from inspect import signature
from itertools import count, product
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Mask
from seqpar.kernels import (
    BACKENDS,
    ONLY_BY_NAME,
    BackendChoice,
    _fallback,
    _warn_of_reference,
    block_lists,
    flash,
    order,
)
from seqpar.kernels.bands import Abilities
from seqpar.kernels.base import Backend, Carry, Grads, OutputGrad, Score, empty_carry, finish, row_delta
from seqpar.kernels.cudnn_flex import mask_endpoints
from seqpar.kernels.elementwise import interpreted
from seqpar.kernels.library import LibraryBackend, Options, together
from seqpar.kernels.triton import TritonBackend
from seqpar.placement.layout import CPU, LAYOUTS, TokenLayout
from seqpar.schedule.plan import AttentionPlan, attention_plan
from seqpar.schedule.rows import KeyIntervals, united

from ..fake_cuda import fake_cuda
from ..pool import Pool, on_ranks
from ..problems import BATCH_RULES, RULES, Problem, random_problem, solve
from ..reference import Rule, assert_close, combined_mask, dense_gradients, rows_of, visible_pairs
from ..standins import LIBRARIES, SIGNATURES, backend_names, stand_ins, with_parameters
from ..strategies.test_no_synchronisation import HostToDevice, without_a_gpu


def test_the_libraries() -> None:
    assert set(backend_names()) == set(LIBRARIES)


def plain_problem(seed: int, **fixed: Any) -> Problem:
    """A random problem without the features that libraries lack."""
    plain = {"softcap": 0.0, "alibi": "", "dropout_p": 0.0, "lse_gradient": False, "sinks": False, "batch": 1}
    sizes = {"head_dim": 16, "v_head_dim": None, "dtype": torch.bfloat16}
    return random_problem(seed, **{**plain, **sizes, **fixed})


def ring_of(
    name: str, problem: Problem, ranks: int, layout: str, gather: bool = False, deterministic: bool = False
) -> dict[str, Tensor]:
    """The results of all ranks of a ring, one after another in this process.

    Returns:
        ``out, lse, dq, dk, dv``, and ``carry``, ``out`` before it is rounded. The gradients are not rounded.
    """
    tensors = problem.tensors()
    q, k, v, dout = (tensors[x] for x in ("q", "k", "v", "dout"))
    mask = problem.arguments()["mask"]
    score = Score(problem.softmax_scale or problem.head_dim**-0.5, problem.softcap, sinks=tensors.get("sinks"))
    backend = BackendChoice(name, q).backend(q, k, score) if name == "auto" else BACKENDS[name]
    assert backend.unavailable() is None
    assert backend.unsupported(q, k, score, lse_gradient=False, v_head_dim=v.shape[3]) is None
    if deterministic:
        backend = backend.made_deterministic()  # type: ignore[attr-defined]
    out, dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (dout, q, k, v))
    lse, unrounded = torch.zeros(*q.shape[:1], q.shape[2], q.shape[1]), torch.zeros_like(out)
    for rank in range(ranks):
        sharding = TokenLayout(problem.seq_len, layout, ring=ranks)
        plan = attention_plan(mask, sharding, rank, gather)
        own = sharding.ring_positions(rank).tensor(CPU)
        if not len(own):
            continue
        by_step = steps_of(plan)
        rank_q, rank_dout, carry = q[:, own], dout[:, own], None
        steps = [
            (x, at)
            for parts, at in by_step
            for x in (together(backend, parts, rank_q, k[:, at]) if len(parts) > 1 else parts)
        ]
        for number, (seen, at) in enumerate(steps):
            last = number == len(steps) - 1
            if last:
                kept: Carry | None = None if carry is None else (carry[0].clone(), carry[1].clone())
                unrounded[:, own] = backend.forward(rank_q, k[:, at], v[:, at], seen, score, kept, False)[0]
            carry = backend.forward(rank_q, k[:, at], v[:, at], seen, score, carry, last)
        rank_out, rank_lse = carry or finish(empty_carry(rank_q, v.shape[3]), score, q.dtype)
        assert rank_out.dtype == q.dtype and rank_lse.dtype == torch.float32
        rank_dq = torch.full_like(rank_q, torch.nan, dtype=torch.float32)
        for number, (seen, at) in enumerate(steps):
            grads = [torch.full_like(x[:, at], torch.nan, dtype=torch.float32) for x in (k, v)]
            output = OutputGrad(rank_dout, rank_out, rank_lse, None)
            step_dk, step_dv = grads
            targets = Grads(rank_dq, step_dk, step_dv, new_dq=number == 0, new_dkv=True)
            backend.backward(rank_q, k[:, at], v[:, at], output, seen, score, targets)
            dk[:, at] += step_dk
            dv[:, at] += step_dv
            if len(steps) == 1:
                made = Grads(None, None, None, new_dq=True, new_dkv=True)
                backend.backward(rank_q, k[:, at], v[:, at], output, seen, score, made)
                for x, y in zip(made.tensors, (rank_dq, step_dk, step_dv), strict=True):
                    torch.testing.assert_close(x.float(), y)
                launches = backend.launches(seen, rank_q, k[:, at]) if isinstance(backend, LibraryBackend) else None
                calls = [launch.call for launch in launches or ()]
                whole = [x.longest == (rank_q.shape[1], len(at)) and x.ends is None for x in calls]
                if whole == [True]:
                    assert made.dq.dtype == q.dtype  # as the library has made them, without a float32 copy
        out[:, own], lse[:, :, own] = rank_out.float(), rank_lse
        dq[:, own] = rank_dq if steps else 0.0
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "carry": unrounded}


def steps_of(plan: AttentionPlan) -> list[tuple[Sequence[KeyIntervals], Tensor]]:
    """For each step that has keys, which keys queries see in each part of the mask, and the positions of the keys."""
    return [
        (parts, step.keys.positions(CPU))
        for i, step in enumerate(plan)
        if step.keys is not None and len(step.keys) and (parts := plan.intervals(i, CPU))
    ]


def check(found: dict[str, Tensor], problem: Problem) -> None:
    expected, rounded = solve(problem), solve(problem, torch.float32)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert_close(found[name], expected[name], problem.dtype, f"{name} of {problem}", rounded[name])


@pytest.mark.thorough(name=["flash", "flash_attn_3", "cudnn"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_against_float64(name: str) -> None:
    """Every mask and layout, with one rank and with three, and sinks."""
    for number, rules in enumerate((*RULES, *BATCH_RULES)):
        layout, ranks = LAYOUTS[number % 3], 1 + 2 * (number % 2)
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        problem = plain_problem(
            number, seq_len=50, heads=4, kv_heads=(4, 2, 1)[number % 3], rules=rules, dtype=dtype,
            sinks=number % 4 == 0, batch=max(rows_of(rules), 1 + number % 2),
            v_head_dim=(None, 8, 24)[number % 3] if name.startswith("cudnn") or name == "flash_attn_4" else None,
        )  # fmt: skip
        newer = name in ("cudnn_flex", "flash_attn_4") and number % 2
        with stand_ins(capability=(10, 0) if newer else (9, 0)) as kernels:
            check(ring_of(name, problem, ranks, layout, gather=number % 5 == 4), problem)
            assert kernels.calls or name in ("cudnn", "cudnn_varlen")


MODULES = {name: getattr(BACKENDS[name], "module", "torch") for name in LIBRARIES}
# The functions lack boundaries of packed sequences and a softcap, or PyTorch does not call them.
TOO_OLD = [("flash_attn_3", "2.7.0"), ("cudnn_varlen", "2.11.0"), ("cudnn_varlen", "2.12.0")]


@pytest.mark.parametrize(
    ("name", "version"), [(name, version) for name, module in MODULES.items() for version in SIGNATURES[module]]
)
def test_recorded_versions(name: str, version: str) -> None:
    """Every recorded version of the libraries' functions is called with the right arguments, or is refused."""
    softcap = 1.5 if name.startswith("flash_attn") else 0.0
    with stand_ins(**{name: version}) as kernels:
        if (name, version) in TOO_OLD:
            assert "too old" in str(BACKENDS[name].unavailable())
            return
        assert BACKENDS[name].unavailable() is None
        for rule in (Rule("causal"), Rule("sliding_window", (7, 0)), Rule("documents", ((0, 20, 33, 50), True))):
            problem = plain_problem(2, seq_len=50, heads=4, kv_heads=2, rules=(rule,), softcap=softcap)
            check(ring_of(name, problem, 2, "zigzag"), problem)
        assert kernels.calls


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_3", "flash_attn_4"])
def test_softcap_and_determinism(name: str) -> None:
    problem = plain_problem(1, seq_len=50, heads=4, kv_heads=2, rules=(Rule("causal"),), softcap=1.5)
    with stand_ins() as kernels:
        check(ring_of(name, problem, 2, "zigzag"), problem)
        assert not kernels.calls["deterministic"]
        check(ring_of(name, problem, 2, "zigzag", deterministic=True), problem)
        assert kernels.calls["deterministic"] > 2
        q, k = (problem.tensors()[x] for x in "qk")
        assert BackendChoice(name, q, deterministic=True).backend(q, k, Score(1.0)).deterministic
        assert (
            BackendChoice("flash", q, deterministic=True).backend(q, k, Score(1.0)).name != "flash"
        )  # PyTorch's has no choice


def relative_error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("rules", ["causal", "full"])
def test_the_error_of_a_ring_is_that_of_one_device(rules: str) -> None:
    """bfloat16, with stand-ins that round inside like kernels.

    Before the last rounding a ring of 4 is as exact as one device. That rounding is one more than one device has.
    """
    problem = plain_problem(3, seq_len=256, heads=2, kv_heads=2, head_dim=64, rules=(Rule(rules),), softmax_scale=None)
    exact = solve(problem)
    with stand_ins(like_a_kernel=True):
        one, ring = (ring_of("flash", problem, ranks, "zigzag") for ranks in (1, 4))
    for name, unrounded in {"out": "carry", "dq": "dq", "dk": "dk", "dv": "dv"}.items():
        alone = relative_error(one[name], exact[name])
        assert relative_error(ring[unrounded], exact[name]) < 1.1 * alone, name
        rounded = relative_error(ring[name].to(problem.dtype), exact[name])
        assert rounded < 1.3 * alone, name


BRANCHING = (
    (Rule("tree", ((-1, 0, 0, 2, 2, 0, -1), (11, 9, 5, 6, 0, 13, 6))),),
    (Rule("any_of", ((Rule("sliding_window", (6, 2)),), (Rule("global_tokens", (3,)),))),),
    (Rule("any_of", ((Rule("documents", (((0, 9, 50), (0, 24, 50)), True)),), (Rule("global_tokens", (2,)),))),),
)


@pytest.mark.parametrize("name", ["cudnn_flex", "flash_attn_4", "flash_attn"])
def test_a_union_is_one_launch(name: str) -> None:
    """In each step, forward and backward, where the library takes several intervals of a query. Others take more."""
    for (number, rules), layout, ranks in product(enumerate(BRANCHING), LAYOUTS, (1, 2, 4)):
        problem = plain_problem(
            number, seq_len=50, heads=4, kv_heads=2, rules=rules, batch=max(rows_of(rules), 1 + number % 2)
        )
        plans = [
            attention_plan(combined_mask(rules), TokenLayout(50, layout, ring=ranks), rank) for rank in range(ranks)
        ]
        by_rank = [[len(parts) > 1 for parts, _ in steps_of(plan)] for plan in plans]  # whether a step has a union
        steps, unions = (sum(map(count, by_rank)) for count in (len, sum))
        assert unions
        # ``ring_of`` repeats the last forward of a rank, and a backward without others.
        repeated = sum(x[-1] for x in by_rank), sum(x == [True] for x in by_rank)
        with stand_ins() as kernels, seqpar.trace() as trace:
            check(ring_of(name, problem, ranks, layout), problem)
        assert not trace.backends["reference"]
        calls = kernels.calls
        if name == "cudnn_flex":
            assert calls["forward"] == steps + ranks and calls["plan"] == steps
            assert calls["backward"] == steps + sum(len(x) == 1 for x in by_rank)
        elif name == "flash_attn_4":
            assert calls["masked"] == 2 * unions + sum(repeated)
        else:
            assert calls["dense"] + calls["packed"] >= steps + unions + repeated[0]


@on_ranks
def _attend(group: ProcessGroup, problem: Problem, options: dict[str, Any], backend: str) -> tuple[Any, ...]:
    tensors = problem.tensors()
    sharding = seqpar.Sharding(problem.seq_len, "zigzag", group=group, strategy=options["strategy"])
    q, k, v, dout = (sharding.shard(tensors[x]) for x in ("q", "k", "v", "dout"))
    for x in (q, k, v):
        x.requires_grad_()
    arguments = {name: x for name, x in problem.arguments().items() if x is not None}
    with stand_ins() as kernels, seqpar.trace() as trace:
        out, _ = seqpar.attention(q, k, v, sharding=sharding, backend=backend, **options, **arguments)
        grads = torch.autograd.grad(out, (q, k, v), dout)
    whole = [sharding.unshard(x.detach()) for x in (out, *grads)]
    return whole, set(trace.backends), sum(kernels.calls.values())


@pytest.mark.parametrize("world", [2, 4])
def test_on_ranks(pool: Pool, world: int) -> None:
    documents = (Rule("documents", ((0, 20, 33, 64), True)),)
    runs = [
        ("flash", {"strategy": "ring"}, (Rule("causal"),)),
        ("flash_attn", {"strategy": "ring"}, documents),
        ("flash_attn_4", {"strategy": "context_parallel"}, documents),
        ("cudnn", {"strategy": "ulysses"}, (Rule("causal"),)),
        ("cudnn_varlen", {"strategy": "ulysses"}, documents),
        ("cudnn_flex", {"strategy": "ring"}, documents),
    ]
    # Each group of heads is a part of the tensors.
    groups = (Rule("by_heads", (documents, (Rule("sliding_window", (9, 2)),))),)
    runs += [(name, {"strategy": "ring"}, BRANCHING[0]) for name in ("cudnn_flex", "flash_attn_4")]
    runs += [(name, {"strategy": "ring"}, groups) for name in LIBRARIES if name not in ("cudnn", "cudnn_varlen")]
    for backend, options, rules in runs:
        problem = plain_problem(5, seq_len=64, heads=4, kv_heads=2, rules=rules)
        for whole, used, calls in pool.run(world, _attend, problem, options, backend):
            assert used == {backend} and calls >= 2
            for name, x in zip(("out", "dq", "dk", "dv"), whole, strict=True):
                assert_close(x, solve(problem)[name], problem.dtype, f"{name}, {backend}, {options}")


# cuDNN's kernels for key intervals


@pytest.mark.parametrize("layout", LAYOUTS)
def test_endpoints_decode_to_the_mask(layout: str) -> None:
    """Every mask, with 1 to 4 ranks, in a ring or gathered: cuDNN's endpoints of each step against the dense mask.

    A mask has two of these numbers of ranks, and the next mask the other two.
    """
    steps = 0
    for (number, rules), ranks in product(enumerate((*RULES, *BATCH_RULES)), (1, 2, 3, 4)):
        if (number + ranks + LAYOUTS.index(layout)) % 2:
            continue
        seen, batch = visible_pairs(rules, 50), max(2, rows_of(rules))
        seen = seen.expand(batch, -1, -1)
        sharding = TokenLayout(50, layout, ring=ranks)
        for rank in range(ranks):
            plan = attention_plan(combined_mask(rules), sharding, rank, number // 2 % 2 == 0)
            own = sharding.ring_positions(rank).tensor(CPU)
            found = torch.zeros(batch, len(own), 50, dtype=torch.bool)
            for parts, at in steps_of(plan) if len(own) else ():
                ends, keys = mask_endpoints(united(parts), batch)[0].view(-1, batch, len(own), 1), torch.arange(len(at))
                assert len(ends) == 1 + 2 * len(parts) and not ends[0].any() and ends.max() <= len(at)
                assert bool((ends.diff(dim=0) >= 0).all())
                for lo, hi in zip(ends[1::2], ends[2::2], strict=True):
                    found[..., at] |= (lo <= keys) & (keys < hi)
                steps += 1
            assert torch.equal(found, seen[:, own]), (rules, ranks, rank)
    assert steps > 200


def test_a_plan_of_cudnn_lives_as_long_as_its_intervals() -> None:
    """It serves forward and backward of every layer; another shape or dtype has another plan."""
    backend = BACKENDS["cudnn_flex"]
    q, k, v = (torch.randn(2, n, heads, 16).bfloat16() for n, heads in ((8, 4), (12, 2), (12, 2)))
    lo, hi = torch.zeros(1, 8, dtype=torch.int32), torch.arange(4, 12, dtype=torch.int32)[None]
    intervals = KeyIntervals(lo, hi, lo[0], torch.zeros(12, dtype=torch.int32))
    with stand_ins() as kernels:
        for _ in range(2):
            with torch.inference_mode():  # a plan does not remember it
                out, lse = backend.forward(q, k, v, intervals, Score(0.25), None, True)
            grads = Grads(None, None, None, new_dq=True, new_dkv=True)
            backend.backward(q, k, v, OutputGrad(out, out, lse, None), intervals, Score(0.25), grads)
        assert kernels.calls == {"plan": 1, "forward": 2, "backward": 2, "deterministic": 0}
        (plan,) = intervals.tiles.values()
        made = weakref.ref(plan)
        assert not plan.mask.is_inference()
        del plan
        backend.forward(q[:1], k[:1], v[:1], intervals, Score(0.25), None, True)
        backend.forward(q.half(), k.half(), v.half(), intervals, Score(0.25), None, True)
        assert kernels.calls["plan"] == 3
        deterministic = backend.made_deterministic()  # type: ignore[attr-defined]
        deterministic.backward(q, k, v, OutputGrad(out, out, lse, None), intervals, Score(0.25), grads)
        assert kernels.calls["plan"] == 3 and kernels.calls["deterministic"] == 1
        with mock.patch("seqpar.kernels.cudnn_flex.is_captured", return_value=True):
            backend.forward(q, k, v, intervals, Score(0.25), None, True)
            with pytest.raises(RuntimeError, match="cannot capture the first attention call"):
                backend.forward(q[:, :, :2], k, v, intervals, Score(0.25), None, True)
    del intervals
    assert made() is None


def test_cudnn_flex_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = BACKENDS["cudnn_flex"]

    def why(head_dim: int = 64, v_head_dim: int = 64, dtype: torch.dtype = torch.bfloat16, **score: Any) -> str | None:
        q = torch.empty(1, 8, 2, head_dim, dtype=dtype)
        return backend.unsupported(q, q, Score(0.1, **score), lse_gradient=False, v_head_dim=v_head_dim)

    for capability in ((9, 0), (10, 0), (10, 3)):
        with stand_ins(capability=capability):
            assert backend.unavailable() is None
            for dims in ((8, 8), (128, 40), (64, 128), (192, 128), (256, 256)):
                assert why(*dims) is None
            for dims in ((136, 128), (128, 192), (192, 192), (256, 128)):
                assert "(up to 128, 192 and 128, or 256)" in str(why(*dims))
            assert "float16 and bfloat16 only" in str(why(dtype=torch.float32))
            assert why(softcap=30.0) == "no softcap" and "no dropout" in str(why(dropout_p=0.1))
    for capability, reason in (
        ((8, 0), "9.x, 10.x only"),
        ((10, 1), "9.0, 10.0 and 10.3 only"),
        ((12, 0), "9.x, 10.x"),
    ):
        with stand_ins(capability=capability):
            assert reason in str(why())
    with stand_ins():
        q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16)
        assert BackendChoice("cudnn_flex", q).backend(q, q, Score(0.1)).name == "cudnn_flex"
        for backends in (["cudnn_flex", "cpu"], ["cpu", "cudnn_flex"]):  # "auto" waits for a GPU that measures it
            with mock.patch.dict(BACKENDS, {name: BACKENDS[name] for name in backends}, clear=True):
                assert BackendChoice("auto", q).backend(q, q, Score(0.1)).name == "cpu"
                assert BackendChoice("cpu", q).backend(q, q, Score(0.1), v_head_dim=40).name == "cpu"
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        assert "built with CUDA 12.8, and nvidia-cudnn-frontend needs CUDA 13" in str(backend.unavailable())
        monkeypatch.setattr(torch.version, "cuda", "13.2")
        for version in ("1.31.0", "1.9.0", "0.32"):
            monkeypatch.setattr(sys.modules["cudnn"], "__version__", version)
            assert f"nvidia-cudnn-frontend is {version}, and 1.32 or newer is needed" in str(backend.unavailable())
        for version in ("1.32.0", "1.33.1", "2.0"):
            monkeypatch.setattr(sys.modules["cudnn"], "__version__", version)
            assert backend.unavailable() is None
        del vars(sys.modules["cudnn.flex_attention"])["execution"]
        assert "too old or too new: execution._flex_attention_forward has no mask_plan" in str(backend.unavailable())


# Choosing


def test_backends_that_cannot_run_say_what_to_do() -> None:
    q = torch.zeros(1, 8, 2, 16)
    with pytest.raises(ValueError, match=r"backend='flash_attn_4' cannot run here: .*CUDA"):
        seqpar.attention(q, q, q, strategy="local", backend="flash_attn_4")
    with pytest.raises(ValueError, match="backend='flash_attn_5': did you mean 'flash_attn_4'"):
        seqpar.attention(q, q, q, strategy="local", backend="flash_attn_5")
    reasons = {status.name: status.reason for status in seqpar.backends()}
    assert set(reasons) == set(BACKENDS) > {*LIBRARIES}


def test_cudnn_packs_squares_and_rectangles() -> None:
    """Of packed documents, causal squares are one launch, and so are full rectangles."""
    ends, window = (0, 12, 24, 56, 64), Rule("sliding_window", (5, 0))
    twice = {"packed": 2, "packed backward": 2}  # ``ring_of`` computes a last step twice, and gradients of one step too
    for rules, ranks, expected in (
        ((Rule("documents", (ends, True)),), 1, twice),
        ((Rule("documents", (ends, False)),), 1, twice),
        # Queries of rank 1 see keys of rank 0 in the same document: a rectangle.
        ((Rule("documents", (ends, True)),), 2, {"packed": 3, "packed backward": 3, "forward": 2, "backward": 1}),
        ((Rule("documents", (ends, True)), window), 1, {}),  # computed by Triton, or here by the reference
    ):
        problem = plain_problem(5, seq_len=64, heads=4, kv_heads=2, rules=rules, v_head_dim=24)
        with stand_ins() as kernels:
            check(ring_of("cudnn_varlen", problem, ranks, "contiguous"), problem)
        assert kernels.calls == expected


def test_missing_libraries_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_no_cuda", lambda: None)
    monkeypatch.delenv(flash.HUB_VARIABLE, raising=False)
    flash._load.cache_clear()
    try:
        expected = {
            "flash_attn": r"not installed \(pip install 'seqpar\[flash\]'; or pip install 'seqpar\[hub\]' and set",
            "flash_attn_3": "not installed .*build the folder hopper",
            "flash_attn_4": r"not installed \(pip install --pre 'seqpar\[flash4\]'; or pip install 'seqpar\[hub\]'",
            "cudnn_flex": r"cudnn.flex_attention: not installed \(pip install 'seqpar\[cudnn\]'\)$",
        }
        for name, reason in expected.items():
            found = BACKENDS[name].unavailable()
            assert found is not None
            assert re.search(reason, found), found
        monkeypatch.setenv(flash.HUB_VARIABLE, "1")
        flash._load.cache_clear()
        assert "the package kernels is not installed" in str(BACKENDS["flash_attn"].unavailable())
    finally:
        flash._load.cache_clear()


def test_kernels_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_ins():
        module = sys.modules.pop("flash_attn_interface")
        asked = []

        def get_kernel(repository: str, version: int) -> Any:
            asked.append((repository, version))
            return SimpleNamespace(flash_attn_interface=module)

        sys.modules["kernels"] = cast(Any, SimpleNamespace(get_kernel=get_kernel, __spec__=object()))
        monkeypatch.setenv(flash.HUB_VARIABLE, "1")
        assert BACKENDS["flash_attn_3"].unavailable() is None
        assert asked == [("kernels-community/flash-attn3", 1)]

        def no_build(repository: str, version: int) -> None:
            raise FileNotFoundError("Cannot find a build variant for this system")

        flash._load.cache_clear()
        vars(sys.modules["kernels"])["get_kernel"] = no_build
        why = str(BACKENDS["flash_attn_3"].unavailable())
        for words in (
            "version 1 of kernels-community/flash-attn3", f"with PyTorch {torch.__version__}", "Cannot find a build",
            "it needs PyTorch 2.9 or newer, and the package kernels 0.16 or newer",
        ):  # fmt: skip
            assert words in why
    # A version keeps its interface.
    packages = {name: backend for name, backend in BACKENDS.items() if isinstance(backend, flash.PackageBackend)}
    assert {name: backend.hub and (*backend.hub,)[:2] for name, backend in packages.items()} == {
        "flash_attn": ("kernels-community/flash-attn2", 4),
        "flash_attn_3": ("kernels-community/flash-attn3", 1),
        "flash_attn_4": ("kernels-community/flash-attn4", 0),
        "cudnn_flex": None,
    }


def test_libraries_of_another_version_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_ins():

        def older(q: Tensor, k: Tensor, v: Tensor, window_size: tuple[int, int]) -> None:
            pass

        monkeypatch.setattr(sys.modules["flash_attn.flash_attn_interface"], "_flash_attn_forward", older)
        assert "_flash_attn_forward has no window_size_left" in str(BACKENDS["flash_attn"].unavailable())
        monkeypatch.delattr(sys.modules["flash_attn.cute.interface"], "_flash_attn_bwd")
        assert "_flash_attn_bwd has no lse" in str(BACKENDS["flash_attn_4"].unavailable())


def test_libraries_refuse_inputs() -> None:
    def why(name: str, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16, **score: Any) -> str:
        q = torch.empty(1, 8, 2, head_dim, dtype=dtype)
        return str(BACKENDS[name].unsupported(q, q, Score(0.1, **score), lse_gradient=False))

    with stand_ins(capability=(8, 9)):
        assert "float16 and bfloat16 only" in why("flash", dtype=torch.float32)
        assert "head_dim=20 (multiples of 8 only)" in why("flash", 20)
        assert "head_dim=264 (at most 256)" in why("flash_attn", 264)
        assert "head_dim=256 (up to 128;" in why("cudnn", 256)
        assert "head_dim=200 (not 193 to 224 on compute capability 8.9)" in why("flash_attn", 200)
        assert "compute capability 8.9 (9.x only)" in why("flash_attn_3")
        assert why("flash", softcap=30.0) == "no softcap" and why("flash_attn", softcap=30.0) == "None"
        assert "no dropout" in why("flash_attn", dropout_p=0.1)
        assert "no ALiBi" in why("flash_attn", alibi_slopes=torch.ones(2))
    with stand_ins(capability=(10, 0)):
        assert "head_dim=192 (up to 128, 192 and 128, or 256," in why("flash_attn_4", 192)


def test_head_dims_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(head_dim: int, v_head_dim: int, version: int) -> str | None:
        q = torch.empty(1, 8, 2, head_dim, dtype=torch.bfloat16)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
        return BACKENDS["cudnn"].unsupported(q, q, Score(0.1), lse_gradient=False, v_head_dim=v_head_dim)

    with stand_ins(capability=(9, 0)):
        assert why(256, 256, 91900) is None and why(192, 128, 91000) is None
        assert "up to 256 with cuDNN 9.10 on compute capability 9.0" in str(why(256, 256, 90900))
    with stand_ins(capability=(10, 0)):
        assert why(192, 128, 91100) is None and "head_dim=256 (up to 128;" in str(why(256, 256, 91900))


def test_cudnn_is_refused_with_packed_rows_and_with_an_older_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert BACKENDS["cudnn"].unavailable() is None
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    assert "unset it" in str(BACKENDS["cudnn"].unavailable())
    monkeypatch.delenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE")
    calls = count()

    def version() -> int:
        """PyTorch raises in the first call only."""
        if not next(calls):
            raise RuntimeError("cuDNN version incompatibility: compiled against (9, 19, 0), found (9, 1, 0)")
        return 90100

    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    assert all("found (9, 1, 0)" in str(BACKENDS["cudnn"].unavailable()) for _ in range(2))
    q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16)
    assert BackendChoice("auto", q).backend(q, q, Score(0.1)).name == "cpu"


def test_cudnn_gets_dense_outputs() -> None:
    """A compiled backward depends on the layouts of out and dout, and PyTorch looks up the layouts of q, k and v."""
    q, k, v = (torch.randn(2, 8, 2, 16).bfloat16() for _ in range(3))
    first, end, positions = torch.zeros(1, 8).int(), torch.full((1, 8), 8).int(), torch.arange(8).int()
    seen = KeyIntervals(first, end, positions, positions)
    found = []
    with stand_ins():
        out, lse = BACKENDS["cudnn"].forward(q, k, v, seen, Score(0.25), None, True)
        dout = torch.randn_like(out)
        for wide in (False, True):
            of_more = [torch.cat((x, x), dim=2)[:, :, :2] if wide else x for x in (dout, out)]  # of some of the heads
            dq, dk, dv = (torch.empty_like(x, dtype=torch.float32) for x in (q, k, v))
            output = OutputGrad(of_more[0], of_more[1], lse, None)
            BACKENDS["cudnn"].backward(q, k, v, output, seen, Score(0.25), Grads(dq, dk, dv, True, True))
            found.append(torch.stack((dq, dk, dv)))
    assert torch.equal(*found)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_the_order_on_a_gpu(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with fake_cuda():
        q = torch.empty(1, 8, 2, 64, device="cuda", dtype=torch.bfloat16)
        names = list(order(q))
    assert sorted([*names, *ONLY_BY_NAME]) == sorted(BACKENDS) and names[-2:] == ["cpu", "reference"]
    assert names[0] == {8: "flash_attn", 9: "flash_attn_4", 10: "flash_attn_4", 12: "flash_attn"}[capability[0]]


@pytest.mark.parametrize("rules", ["causal", "sliding_window"])
def test_auto_merges_the_steps_of_a_library(rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN computes the steps of a ring that are rectangles or causal squares. Triton computes the others."""
    rule = Rule(rules) if rules == "causal" else Rule(rules, (40, 0))
    problem = plain_problem(6, seq_len=64, heads=2, kv_heads=2, rules=(rule,))
    monkeypatch.setattr("seqpar.kernels.order", lambda q: ["cudnn", "cpu"])
    with stand_ins() as kernels, seqpar.trace() as traced:
        check(ring_of("auto", problem, 4, "zigzag"), problem)
        q, k = (problem.tensors()[x] for x in "qk")
        assert BackendChoice("auto", q, deterministic=True).backend(q, k, Score(1.0)).name == "cpu"
    assert kernels.calls["forward"] and traced.backends["cudnn"]
    assert ("reference" in traced.backends) == (rules != "causal")  # in the place of triton on a CPU


def test_unknown_masks_run_on_another_backend() -> None:
    """Striped keys gathered from 3 ranks move by 2 from query to query, and cuDNN has no windows."""
    window = (Rule("sliding_window", (7, 0)),)
    for name, rules, gather in (("flash", (Rule("causal"),), True), ("cudnn", window, False)):
        problem = plain_problem(7, seq_len=60, heads=2, kv_heads=2, rules=rules)
        with stand_ins(), seqpar.trace() as trace:
            check(ring_of(name, problem, 3, "striped", gather=gather), problem)
        assert trace.backends["reference"] > 0
        with stand_ins() as kernels:  # one call, with lists of blocks
            check(ring_of("flash_attn_4", problem, 3, "striped", gather=gather), problem)
            assert (kernels.calls["masked"] > 0) == gather
        with stand_ins() as kernels, mock.patch.object(block_lists, "_MOST_BYTES", 0):
            check(ring_of("flash_attn_4", problem, 3, "striped", gather=gather), problem)
            assert not kernels.calls["masked"]
    with stand_ins() as kernels, seqpar.trace() as trace:  # an older version takes blocks of one size only
        sparse: Any = sys.modules["flash_attn.cute.block_sparsity"]
        sparse.BlockSparseTensorsTorch = SimpleNamespace(_fields=("mask_block_cnt", "mask_block_idx"))
        check(ring_of("flash_attn_4", problem, 3, "striped", gather=True), problem)
        assert not kernels.calls["masked"] and trace.backends["reference"] > 0


class Launches(LibraryBackend):
    """Counts calls of a library that computes nothing."""

    name = "launches"
    abilities = Abilities(gaps=True)
    calls = backward_calls = 0

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, *args: Any, **options: Any) -> str | None:
        return None

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        type(self).calls += 1
        packed = options.cu_q is not None
        shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
        assert options.cu_q is None or options.cu_q.device == q.device
        return torch.empty_like(q), q.new_empty(shape, dtype=torch.float32)

    def call_backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        type(self).backward_calls += 1
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_no_read_back_and_no_copy(strategy: str) -> None:
    """On fake CUDA tensors: the calls follow from the plan, and their boundaries are sent to the GPU once."""

    def none(*args: Any) -> Any:
        raise AssertionError("this mask takes few calls")

    with without_a_gpu(8), mock.patch.dict(BACKENDS, {"launches": Launches(none)}, clear=True):
        mesh = seqpar.init_mesh(*((1, 8, 1, 1) if strategy == "ring" else (1, 1, 8, 1)), device_type="cpu")
        sharding = seqpar.Sharding(1027, "zigzag", mesh=mesh, strategy=strategy)
        with fake_cuda(), torch.no_grad():
            q = torch.empty(1, sharding.seq_local, 8, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for mask in (Mask.causal(), Mask.documents([*range(0, 1027, 50), 1027])):
                before = Launches.calls, Launches.backward_calls
                for _ in range(2):
                    with HostToDevice() as second:
                        seqpar.attention(q, q, q, strategy=strategy, mask=mask, sharding=sharding)
                assert not second.copies
                assert Launches.calls > before[0] and Launches.backward_calls > before[1]


@pytest.mark.parametrize("name", ["flash", "flash_attn"])
def test_sequences_of_one_query_beside_keys_without_queries(name: str) -> None:
    """A maximum of one query means to flash-attn that there are as many queries as sequences."""
    lo, hi = torch.tensor([[0, 2]], dtype=torch.int32), torch.tensor([[1, 3]], dtype=torch.int32)
    made = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, n, heads, 16, generator=made).bfloat16() for n, heads in ((2, 4), (3, 1)))
    with stand_ins() as kernels:
        out, _ = BACKENDS[name].forward(q, k, k, KeyIntervals(lo, hi, lo, lo), Score(0.1), None, True)
        assert sum(kernels.calls.values()) == 1
    assert torch.equal(out, k[:, [0, 2]].expand(-1, -1, 4, -1))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_the_operators_of_this_pytorch_take_the_arguments(name: str, packed: bool) -> None:
    """On tensors without values: what the stand-ins stand for has these arguments and these results."""
    backend = BACKENDS[name]
    assert isinstance(backend, LibraryBackend)
    if packed and not backend.abilities.packs:
        return
    q, k = (torch.empty(2, 32, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    q, k = (x.flatten(0, 1) if packed else x for x in (q, k))
    cu = torch.empty(3, dtype=torch.int32, device="meta") if packed else None
    for left, right in ((-1, -1), (-1, 0), (5, 0))[: 3 if backend.abilities.windows else 2]:
        options = Options(0.1, 0.0, left, right, cu, cu, 32, 32, None)
        out, lse = backend.call_forward(q, k, k, options)
        assert out.shape == q.shape and lse.shape == ((4, 64) if packed else (2, 4, 32)) and lse.dtype == torch.float32
        dq, dk, dv = backend.call_backward(out, q, k, k, out, lse, options)
        assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, k.shape)


@pytest.mark.parametrize("module", SIGNATURES)
def test_the_installed_version_is_recorded(module: str) -> None:
    """Otherwise ``tools/signatures.py`` has to record it."""
    package, versions = pytest.importorskip(module), list(SIGNATURES[module].values())
    for name in versions[-1]:
        if module == "torch":
            found: Any = str(getattr(torch.ops.aten, name).default._schema)
            recorded: list[Any] = [str(torch._C.parse_schema(version[name])) for version in versions]
        else:
            found = [(x.name, x.default) for x in signature(attrgetter(name)(package)).parameters.values()]
            recorded = [
                [(x.name, x.default) for x in signature(with_parameters(version[name])).parameters.values()]
                for version in versions
            ]
        assert found in recorded, name


@pytest.mark.parametrize("name", ["reference", "cudnn", "cudnn_flex", "flash_attn_3", "flash_attn_4"])
def test_values_of_another_head_dim(name: str) -> None:
    """Queries and keys of 192 and values of 128, as in multi-head latent attention: two steps, nothing is padded."""
    made, rules = torch.Generator().manual_seed(0), (Rule("causal"),)
    q, k, v, dout = (
        torch.randn(1, 24, heads, dim, generator=made).bfloat16()
        for heads, dim in ((4, 192), (2, 192), (2, 128), (4, 128))
    )
    exact = dense_gradients(q, k, v, visible_pairs(rules, 24), dout, softmax_scale=0.07)
    score, mask = Score(0.07), Mask.causal()
    with stand_ins(), mock.patch.object(torch.backends.cudnn, "version", return_value=91100):
        backend = BACKENDS[name]
        assert backend.unsupported(q, k, score, lse_gradient=False, v_head_dim=128) is None
        assert BackendChoice(name, q).backend(q, k, score, v_head_dim=128).name == name
        found = {}
        plan = attention_plan(mask, TokenLayout(24, "contiguous", ring=2), 1)
        (first,), (second,) = plan.intervals(0, CPU), plan.intervals(1, CPU)
        rows, carry = slice(12, 24), None
        for keys, seen in ((rows, first), (slice(0, 12), second)):
            carry = backend.forward(q[:, rows], k[:, keys], v[:, keys], seen, score, carry, seen is second)
        assert carry is not None
        out, lse = carry
        delta = row_delta(out, dout[:, rows], None)
        output = OutputGrad(dout[:, rows].contiguous(), out, lse, delta)
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        for keys, seen in ((rows, first), (slice(0, 12), second)):
            grads = Grads(dq[:, rows], dk[:, keys], dv[:, keys])
            backend.backward(q[:, rows], k[:, keys], v[:, keys], output, seen, score, grads)
        found = {"out": out, "lse": lse, "dq": dq[:, rows]}
    for which, x in found.items():
        expected = exact[which][:, :, rows] if which == "lse" else exact[which][:, rows]
        assert_close(x, expected, torch.bfloat16, which)
    assert (dk.shape, dv.shape) == (k.shape, v.shape)
    for other in ("triton", "flash", "flash_attn"):
        why = str(BACKENDS[other].unsupported(q, k, score, lse_gradient=False, v_head_dim=128))
        assert "of q and k, 128 of v" in why or "the tensors are on" in why


def test_the_intervals_on_the_host_come_from_the_plan() -> None:
    """Without them, or without the plan, a step runs on another backend instead of reading those on the GPU."""
    plan = AttentionPlan(Mask.causal(), TokenLayout(20, "zigzag", ring=2), 1)
    with fake_cuda():
        (seen,) = plan.intervals(1, torch.device("cuda"))
        assert seen.lo.device.type == "cuda"
        moved = KeyIntervals(*([torch.zeros(1, 2, dtype=torch.int32)] * 4)).to(torch.device("cuda"))
        bare = KeyIntervals(*([torch.zeros(1, 2, dtype=torch.int32, device="cuda")] * 4))
    assert moved.on_host() is not None and bare.on_host() is None
    (expected,), found = plan.intervals(1, CPU), seen.on_host()
    assert found is not None
    assert torch.equal(found.lo, expected.lo) and torch.equal(found.hi, expected.hi)
    del plan
    gc.collect()
    assert seen.on_host() is None
    asked: list[Tensor] = []

    def ask(q: Tensor, k: Tensor, v: Tensor, score: Score) -> Backend:
        asked.append(q)
        return BACKENDS["reference"]

    backend = Launches(ask)
    q = torch.zeros(1, 2, 1, 8)
    host = KeyIntervals(*([torch.zeros(1, 2, dtype=torch.int32)] * 4))
    with mock.patch.object(KeyIntervals, "on_host", return_value=None):
        backend.forward(q, q, q, host, Score(1.0), None, True)
    assert len(asked) == 1


@pytest.mark.skipif(interpreted(), reason="the interpreter runs no GPU tensors")
def test_a_step_on_a_gpu_that_is_left_with_the_reference_warns() -> None:
    _warn_of_reference.cache_clear()
    with fake_cuda():
        q = torch.empty(1, 8, 2, 64, device="cuda", dtype=torch.bfloat16)
        with pytest.warns(RuntimeWarning, match="the library has no kernel for this mask; triton: "):
            backend = _fallback(q, q, q, Score(1.0))
    assert backend.name == "reference"
    _warn_of_reference.cache_clear()


def test_a_deterministic_library_falls_back_to_deterministic_kernels() -> None:
    q = torch.zeros(1, 4, 2, 8)
    library = flash.FlashAttention2Backend(lambda *_: TritonBackend())
    for backend in (library, library.made_deterministic()):
        assert isinstance(backend, flash.FlashAttention2Backend)
        assert backend._other(q, q, q, Score(1.0)).deterministic == backend.deterministic
