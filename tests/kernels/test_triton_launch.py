"""Launches of the Triton kernels without a GPU: the kernels are compiled, and a stub receives their arguments."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not launched", allow_module_level=True)

import triton
from triton.tools.tensor_descriptor import TensorDescriptor

import seqpar.triton_kernels.backward as backward_module
import seqpar.triton_kernels.forward as forward_module
import seqpar.triton_kernels.launch as launch_module
import seqpar.triton_kernels.merge as merge
import seqpar.triton_kernels.preprocess as preprocess
import seqpar.triton_kernels.rotary as rotary
from seqpar.kernels.base import Score
from seqpar.schedule.rows import KeyIntervals
from seqpar.triton_kernels import Config, apply_rotary, attention_backward, attention_forward, delta, merge_
from tools.compiled import StubDriver

ROOT = Path(__file__).parents[2]
LENGTH, HEADS, KV_HEADS = 128, 2, 1
TILES, SCORE = Config(16, 32, 4, 1), Score(0.1)


class Launches:
    """What the stub was given, and how often Triton bound arguments by name."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.bound = 0

    def take(self) -> list[list[Any]]:
        """The launches since the last time, each as comparable values: grid, compiled kernel, arguments."""
        made, self.made = self.made, []
        return [[_value(x) for x in (*launch[:3], launch[4], *launch[9:])] for launch in made]


def _value(x: Any) -> Any:
    if isinstance(x, TensorDescriptor):
        return "descriptor", _value(x.base), x.shape, x.strides, x.block_shape
    return (x.data_ptr(), x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    seen = Launches()
    previous = triton.runtime.driver._active
    triton.runtime.driver.set_active(StubDriver("sm_90", lambda *arguments: seen.made.append(arguments)))
    kernels = (
        forward_module.forward_kernel, backward_module.backward_kernel, backward_module.dq_kernel,
        preprocess.delta_kernel, preprocess.statistics_kernel, merge.merge_kernel, rotary.rotary_kernel,
    )  # fmt: skip
    for kernel in kernels:
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))

        def run(*args: Any, _run: Any = kernel.run, **kwargs: Any) -> Any:
            seen.bound += 1
            return _run(*args, **kwargs)

        monkeypatch.setattr(kernel, "run", run)
    repeated = (
        forward_module._launches, backward_module._keys_launches, backward_module._dq_launches,
        preprocess._delta_launches, preprocess._statistics_launches, merge._launches, rotary._launches,
    )  # fmt: skip
    for one in repeated:
        monkeypatch.setattr(one, "_ready", {})
    yield seen
    triton.runtime.driver._active = previous


def inputs(length: int = LENGTH, offset: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, each ``offset`` elements behind an aligned address."""

    def make(heads: int) -> Tensor:
        x = torch.randn(length * heads * 16 + offset).bfloat16()
        return x[offset:].view(1, length, heads, 16)

    return make(HEADS), make(KV_HEADS), make(KV_HEADS)


def causal(length: int = LENGTH) -> KeyIntervals:
    positions = torch.arange(length, dtype=torch.int32)
    return KeyIntervals(torch.zeros(1, length, dtype=torch.int32), positions[None] + 1, positions, positions)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("tma", [False, True])
def test_repeated_launches_are_not_bound_again(launches: Launches, tma: bool) -> None:
    config, mask, ready = Config(16, 32, 4, 1, tma), causal(), forward_module._launches._ready

    def bound(
        tensors: tuple[Tensor, Tensor, Tensor], score: Score = SCORE, mask: KeyIntervals = mask, offset: int = 0
    ) -> int:
        """How many launches Triton bound. Whichever way a launch went, the GPU is given what Triton's way gives it."""
        q, k, v = tensors
        acc = torch.zeros(q.numel() + offset)[offset:].view(q.shape)
        carry = acc, torch.zeros(1, HEADS, q.shape[1])
        counts, given, kept = [], [], {}
        for known in (True, False):
            if not known:  # by Triton's way
                kept = dict(ready)
                ready.clear()
            before = launches.bound
            attention_forward(q, k, v, mask, score, carry=carry, last=False, config=config)
            counts.append(launches.bound - before)
            given.append(launches.take())
        ready.update(kept)
        assert given[0] == given[1] and len(given[0]) == 1
        assert counts[1] == 1
        return counts[0]

    assert bound(inputs()) == 1
    assert bound(inputs()) == 0
    # Another variant of the kernel where a tensor does not start at a multiple of 16 bytes, and back.
    assert bound(inputs(offset=1)) == 1
    assert bound(inputs(offset=1)) == 0
    assert bound(inputs(offset=8)) == 0
    assert bound(inputs(), offset=1) == 1
    assert bound(inputs(), offset=2) == 1
    assert bound(inputs()) == 0
    # Other lengths and strides are other arguments, and a repeated mask may be another tensor.
    assert bound(inputs(LENGTH // 2), mask=causal(LENGTH // 2)) == 1
    q, k, v = inputs(2 * LENGTH)
    assert bound((q[:, ::2], k[:, ::2], v[:, ::2])) == 1
    assert bound(inputs(), mask=causal()) == 0
    assert bound(inputs(), Score(0.2)) == 1
    # A seed changes from call to call; one that needs 64 bits is another type.
    dropped = [Score(0.1, dropout_p=0.1, dropout_seed=seed) for seed in (1, 2, 2**40, 2**41)]
    assert [bound(inputs(), score) for score in dropped] == [1, 0, 1, 0]


def test_repeated_launches_keep_no_tensor(launches: Launches) -> None:
    q, k, v = inputs()
    mask = causal()
    for _ in range(2):
        attention_forward(q, k, v, mask, Score(0.1), config=Config(16, 32, 4, 1, True))
    launches.take()
    assert len(forward_module._launches._ready) == 1
    held = [x for x in gc.get_referrers(k) if isinstance(x, (list, dict)) and "k" not in x]
    assert held == []


def test_hooks_see_every_launch(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, mask = inputs(), causal()
    for known in (True, False):
        monkeypatch.setattr(launch_module, "_KNOWN", known)
        metadata = []
        for hooked in (False, False, True):
            with monkeypatch.context() as patch:
                if hooked:
                    patch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [lambda data: None])
                attention_forward(*tensors, mask, SCORE, config=TILES)
            (launch,) = launches.made
            metadata.append((launch[6], launch[7]))  # and the hook
            launches.take()
        assert metadata[2][0].get()["name"] == "forward_kernel"
        assert metadata[2][1] is triton.knobs.runtime.launch_enter_hook
        assert metadata[1] == (None, None) or not known


def test_hooks_before_a_launch_see_every_launch(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    hooks: list[Any] = []
    monkeypatch.setattr(forward_module.forward_kernel, "pre_run_hooks", hooks)
    tensors, mask = inputs(), causal()
    for hooked in (False, False, True, True):
        hooks[:] = [lambda *_, **__: seen.append(1)] if hooked else []
        attention_forward(*tensors, mask, SCORE, config=TILES)
    assert len(seen) == 2
    assert len(launches.take()) == 4


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_steps_of_a_backward_share_statistics(launches: Launches, deterministic: bool) -> None:
    (q, k, v), mask, score = inputs(), causal(), Score(0.1)
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    lse = torch.zeros(1, HEADS, LENGTH)
    row_delta = delta(q, q)
    kernels = 2 if deterministic else 1
    counts, binds = [], []
    for _ in range(3):
        launches.take()
        before = launches.bound
        # As the steps of a ring do, with views of their own.
        attention_backward(
            q, q, k, v, lse[:, :], row_delta[:, :], mask, score, dq, dk, dv, deterministic=deterministic, config=TILES,
            dq_config=TILES,
        )  # fmt: skip
        counts.append(len(launches.take()))
        binds.append(launches.bound - before)
    assert counts == [kernels + 1, kernels, kernels]  # the statistics only in the first
    assert binds == [kernels + 1, 0, 0]
    lse.add_(1)
    attention_backward(q, q, k, v, lse, row_delta, mask, score, dq, dk, dv, deterministic=deterministic, config=TILES,
                       dq_config=TILES)  # fmt: skip
    assert len(launches.take()) == kernels + 1  # of another lse


@pytest.mark.slow
@pytest.mark.thorough
def test_repeated_launches_of_heads_in_two_tiles(launches: Launches) -> None:
    config, mask = Config(16, 16, 4, 1, True), causal(32)
    given = []
    for _ in range(3):
        q, k = (torch.zeros(1, 32, heads, 520).bfloat16() for heads in (HEADS, KV_HEADS))
        v, dout = k[..., :16].contiguous(), q[..., :16].contiguous()
        out, lse = attention_forward(q, k, v, mask, SCORE, config=config)
        gradients = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        attention_backward(
            dout, q, k, v, lse, delta(out, dout), mask, SCORE, *gradients, config=config, dq_config=config
        )
        made = launches.take()
        tensors = [_value(x) for x in (q, k)]
        columns = [
            x[4][3]
            for launch in made
            for x in launch
            if isinstance(x, tuple) and x[:1] == ("descriptor",) and x[1] in tensors
        ]
        given.append((launches.bound, [len(launch) for launch in made], columns))
    first, second, third = given
    assert first[0] == second[0] == third[0] == 5  # forward, delta, statistics, dk and dv, dq
    assert first[1:] == second[1:] == third[1:]
    assert first[2] == [512, 16] * 3  # K, Q, K


def test_elementwise_launches_are_not_bound_again(launches: Launches) -> None:
    acc, out, lse = torch.zeros(1, 64, 2, 16), torch.zeros(1, 64, 2, 16).bfloat16(), torch.zeros(1, 2, 64)
    table = torch.ones(1, 64, 8)
    for work in (
        lambda: merge_(acc, lse, out, lse),
        lambda: apply_rotary(out, table, table),
        lambda: delta(out, out, lse),
        lambda: delta(out, out),
    ):
        before = launches.bound
        for _ in range(3):
            work()
        first, second, third = launches.take()
        assert launches.bound - before == 1
        assert second[:4] == third[:4] == first[:4] and len(second) == len(first)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_a_driver_gets_the_arguments(tmp_path: Path) -> None:
    """Triton's own launcher, with a driver that records: every parameter and descriptor of every shape of call."""
    source, include = (
        Path(__file__).with_name("recording_driver.c"),
        Path(triton.__file__).parent / "backends/nvidia/include",
    )
    options = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", f"-I{include}"]
    subprocess.run(["gcc", *options, "-o", tmp_path / "libcuda.so.1", source], check=True, timeout=60)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "TRITON_LIBCUDA_PATH": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.real_launcher"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deterministic: 3 launches" in done.stdout and "hopper, strided: 1 launches" in done.stdout


def test_remembered_results_die_with_their_tensors() -> None:
    preprocess._remembered.clear()
    first, second, made = torch.zeros(4), torch.zeros(4), []

    def remember(wanted: str = "sum") -> Tensor:
        def make() -> Tensor:
            made.append(wanted)
            return first + second

        return preprocess.remembered(first[:2], second, wanted, make)

    assert remember() is remember()
    remember("difference")
    second += 1
    remember()
    assert made == ["sum", "difference", "sum"]
    second = torch.zeros(4)
    remember()
    assert len(made) == 4
    assert len(preprocess._remembered) == 1
    first = torch.zeros(4)
    gc.collect()
    assert len(preprocess._remembered) == 0
