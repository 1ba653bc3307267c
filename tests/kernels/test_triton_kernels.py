"""The Triton kernels without a GPU: compared with float64 in the interpreter, compiled, chosen and tuned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.tools.tensor_descriptor import TensorDescriptor

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.thorough(which=["thorough"])
@pytest.mark.parametrize("which", ["not thorough", "thorough"])
def test_kernels_in_the_interpreter(which: str) -> None:
    """In a process of its own, because Triton reads TRITON_INTERPRET when it is imported."""
    files = "tests/kernels/test_triton_interpreter.py", "tests/strategies/test_triton_strategies.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", which, *files]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout


@pytest.mark.slow
@pytest.mark.thorough(kernel=["hopper"])
@pytest.mark.parametrize(("kernel", "head_dim"), [("forward", 64), ("delta", 128), ("hopper", 128)])
def test_kernels_compile(kernel: str, head_dim: int) -> None:
    """Without spills and with the newest matrix instructions. `make gate` compiles all kernels for all targets."""
    from tools.gate import inspect, small_cases, table_cases

    cases = (case for of in (table_cases, small_cases) for case in of(["sm_90"]))
    case = next(c for c in cases if (c.kernel, c.head_dim, c.dtype) == (kernel, head_dim, torch.bfloat16))
    (row,) = inspect(iter([case]))
    assert not row["wrong"] and row["matrix"] == ("" if kernel == "delta" else "wgmma"), row


def test_the_gate_refuses_a_slow_hopper_kernel() -> None:
    from tools.compiled import Resources
    from tools.gate import loops_key, recorded_loops, table_cases, verdict

    case = next(c for c in table_cases(["sm_90"]) if (c.kernel, c.head_dim) == ("hopper", 128))
    recorded = recorded_loops().get(loops_key(case), "6/3/1 6/3/0 6/3/1 6/3/0")
    loops = tuple(tuple(map(int, loop.split("/"))) for loop in recorded.split())
    boxes = [{"elem_size": 2, "block_size": [1, 1, rows, 64], "swizzle": 3} for rows in (64, 128, 128)]
    good = Resources(168, 48, 164 << 10, "wgmma", products=12, loops=loops)
    assert verdict(case, good, boxes) == ""
    for bad, why in (
        ({"loops": (*loops[:3], (*loops[3][:2], 1))}, "spills in the inner loops"),
        ({"loops": loops[:2]}, "spills in the inner loops"),
        ({"spilled_bytes": 400}, "spills 400 bytes"),
        ({"serialized": "C7510"}, "ptxas C7510: products wait for one another"),
        ({"synchronous": 2}, "2 products are waited for at once"),
        ({"products": 10}, "10 products instead of 12"),
        ({"matrix": "mma"}, "mma instead of wgmma"),
        ({"reloaded": 1}, "1 tiles go through registers"),
    ):
        assert why in verdict(case, replace(good, **bad), boxes)


def test_what_an_iteration_waits_for() -> None:
    """Disassembled code of two loops, and behind the end of the kernel a wait that jumps back into the second one."""
    from tools.compiled import _loops

    lines = [
        "STL [R1], R4",
        "HGMMA.64x128x16.F32 R24, gdesc[UR16], R24", "SYNCS.PHASECHK.TRANS64.TRYWAIT P4, [UR8], R18", "@!P4 BRA 0x0230",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0", "BAR.SYNC.DEFER_BLOCKING 0x0", "@P4 BRA 0x0010",
        "HMMA.16816.F32.BF16 R4, R8, R12, R4", *["FADD R4, R4, R4"] * 20, "HMMA.16816.F32.BF16 R4, R8, R12, R4",
        "LDL R4, [R1]", "BAR.SYNC 0x0", "@P1 BRA 0x0070",
        "BAR.SYNC 0x0", "BRA 0x0210", "EXIT          &req={0}      ?trans5 ",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P4, [UR8], R18", "@!P4 BRA 0x0230", "BRA 0x01b0",
    ]  # fmt: skip
    code = "\n".join(f"        /*{16 * i:04x}*/   {line};   /* 0x0200000cffff49a7 */" for i, line in enumerate(lines))
    assert _loops(code) == ((2, 1, 0), (0, 1, 1))


def test_descriptors_that_cuda_accepts() -> None:
    from seqpar.triton_kernels.configs import Config
    from seqpar.triton_kernels.launch import describable, descriptors
    from tools.compiled import tma_errors

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def errors(x: torch.Tensor) -> list[str]:
        described, tma = descriptors(Config(64, 64, tma=True), {"K": (x, 64)})
        assert tma == describable(x)
        box = [1, 1, 64, 64 if x.shape[-1] > 32 else 32]  # Triton splits wider rows
        params = [SimpleNamespace(name=name) for name in ("K", "K_TAIL")]
        launch: Any = SimpleNamespace(arguments=described, kernel=SimpleNamespace(params=params))
        chosen = {"elem_size": 2, "block_size": box, "swizzle": 3}
        return tma_errors(launch, [chosen] * sum(isinstance(x, TensorDescriptor) for x in described.values()))

    long = empty(1, 2**31 // (64 * 128) + 512, 64, 128)
    accepted = {
        "head_dim 40": empty(2, 100, 4, 40),
        "one head of three": empty(1, 100, 3, 64)[:, :, 1:2],
        "one token": empty(3, 1, 2, 64),
        "more than 2^31 elements": long,
        "some of the heads": long[:, :, 8:16],
        "every second token": empty(2, 100, 4, 64)[:, ::2],
        "heads first": empty(2, 4, 100, 64).transpose(1, 2),
        "part of a wider head": empty(2, 100, 4, 72)[..., :64],
        "two tiles": empty(1, 100, 2, 576),
    }
    assert {name: errors(x) for name, x in accepted.items()} == {name: [] for name in accepted}
    assert not describable(empty(2, 100, 4, 68)[..., :64])  # heads 136 bytes apart
    rejected = TensorDescriptor(empty(2, 100, 4, 64), [2, 4, 100, 64], [2**40, 64, 256, 1], [1, 1, 64, 64])
    launch: Any = SimpleNamespace(arguments={"K": rejected}, kernel=SimpleNamespace(params=[SimpleNamespace(name="K")]))
    found = tma_errors(launch, [{"elem_size": 2, "block_size": [1, 1, 512, 128], "swizzle": 3}])
    assert found == [
        "the descriptor of K has strides [1099511627776, 64, 256, 1]",
        "the descriptor of K has a box of [1, 1, 512, 128]",
        "the descriptor of K has a row of 256 bytes",
    ]


def test_choosing_a_configuration() -> None:
    from seqpar.triton_kernels.configs import candidates, choose, table_config

    assert table_config("sm_90", "forward", 96, torch.float16) == table_config("sm_90", "forward", 128, torch.bfloat16)
    assert table_config("sm_100", "dq", 64, torch.float32) == table_config("sm_80", "dq", 64, torch.float32)
    assert table_config("sm_90", "dq", 192, torch.float16, v_head_dim=128) == table_config(
        "sm_90", "dq", 130, torch.float16, v_head_dim=64
    )
    assert table_config("sm_90", "dq", 64, torch.float16, v_head_dim=192) == table_config(
        "sm_90", "dq", 256, torch.float16
    )
    assert table_config("sm_80", "dq", 520, torch.float16, v_head_dim=16) == table_config(
        "sm_80", "dq", 576, torch.bfloat16, v_head_dim=512
    )
    for head_dim, v_head_dim, dtype, most in (
        (577, 512, torch.float16, "576, 512 of v"), (576, 576, torch.float16, "576, 512 of v"),
        (64, 300, torch.float32, "256, 256 of v"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"head_dim={head_dim}, {v_head_dim} of v: expected at most {most}"):
            table_config("sm_80", "dq", head_dim, dtype, v_head_dim=v_head_dim)
    cpu = torch.device("cpu")
    assert candidates("forward", cpu, 64, torch.float16)[0] == choose("forward", cpu, 64, torch.float16)


def test_the_architecture_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from seqpar.triton_kernels import configs

    names = {
        (8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_86", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100",
        (11, 0): "sm_86", (12, 0): "sm_86",
    }  # fmt: skip
    for index, (capability, name) in enumerate(names.items()):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert configs.architecture(torch.device("cuda", 100 + index)) == name
    monkeypatch.setattr(configs, "architecture", lambda device: "sm_90")
    chosen = [configs.choose("dq", torch.device("cuda"), 64, torch.bfloat16, tma=tma) for tma in (True, False)]
    assert [None if c is None else c.tma for c in chosen] == [True, False]  # no TMA: no tiles that are made for it
    assert configs.choose("backward", torch.device("cuda"), 64, torch.float32) is None


def test_float32_products_on_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    from seqpar.triton_kernels import launch

    assert launch.precision(torch.float32, None, hip=False) == "tf32x3"
    for name, expected in (("gfx942:sramecc+", "tf32"), ("gfx950", "ieee"), ("gfx90a", "ieee"), ("", "ieee")):
        monkeypatch.setattr(launch, "_rocm_name", lambda name=name: name)
        assert launch.precision(torch.float32, True, hip=True) == expected
        assert launch.precision(torch.float32, False, hip=True) == "ieee"


def test_tuning_keeps_the_fastest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    import seqpar.triton_kernels.tune as tune

    monkeypatch.setenv("SEQPAR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tune, "_best", {})
    tune.cache_file().write_text("not json")
    q = torch.empty(1, 64, 2, 64)
    made = []

    def make(config: Any) -> Any:
        made.append(config)
        return config

    def time(config: Any) -> float:
        if config.num_warps == 8:
            raise OutOfResources(1, 1, "shared memory")
        return float(config.block_m + config.block_n + config.num_stages)

    best = tune.tuned("forward", q, q, "", make, time)
    assert best == min((c for c in made if c.num_warps != 8), key=lambda c: c.block_m + c.block_n + c.num_stages)
    monkeypatch.setattr(tune, "_best", {})
    assert tune.tuned("forward", q, q, "", pytest.fail, time) == best  # from disk
    assert not tune.wanted(q)
    # A folder that cannot be made: the result is not kept, and nothing raises.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SEQPAR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tune, "_best", {})
    assert tune.tuned("forward", q, q, "", make, time) == best


@pytest.mark.parametrize(
    "damage",
    [
        {"block_m": 4096},
        {"block_m": "64"},
        {"block_m": None},
        {"block_m": 32.0},
        {"num_warps": 3},
        {"tma": [1]},
        {"block_n": 0},
        {"more": 1},
    ],
    ids=str,
)
def test_tuning_again_where_the_cache_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: dict[str, Any]
) -> None:
    import seqpar.triton_kernels.tune as tune

    monkeypatch.setenv("SEQPAR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tune, "_best", {})
    q = torch.empty(1, 64, 2, 64)

    def make(config: Any) -> Any:
        return config

    def time(config: Any) -> float:
        return float(config.block_m + config.block_n)

    best = tune.tuned("forward", q, q, "", make, time)
    stored = json.loads(tune.cache_file().read_text())
    tune.cache_file().write_text(json.dumps({key: {**fields, **damage} for key, fields in stored.items()}))
    monkeypatch.setattr(tune, "_best", {})
    assert repr(tune.tuned("forward", q, q, "", make, time)) == repr(best)
    assert json.loads(tune.cache_file().read_text()) == stored
    assert [path.name for path in tmp_path.iterdir()] == [tune.cache_file().name]


def test_tuning_skips_configurations_that_do_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import PTXASError

    import seqpar.triton_kernels.tune as tune
    from seqpar.triton_kernels.configs import candidates

    monkeypatch.setenv("SEQPAR_CACHE_DIR", str(tmp_path))
    q = torch.empty(1, 64, 2, 64)
    table, *others = candidates("forward", q.device, 64, q.dtype)
    errors = [PTXASError("ptxas"), RuntimeError("PassManager::run failed"), AssertionError(), KeyError("option")]
    raised = dict(zip(others, errors, strict=False))

    def time(config: Any) -> float:
        if config in raised:
            raise raised[config]
        return 2.0 if config == table else 1.0

    monkeypatch.setattr(tune, "_best", {})
    assert tune.tuned("forward", q, q, "", lambda config: config, time) == others[len(errors)]

    def fails(config: Any) -> float:
        raise error

    error: Exception = PTXASError("ptxas")
    assert tune.tuned("forward", q, q, "other", lambda config: config, fails) == table
    error = torch.AcceleratorError("an illegal memory access was encountered")  # no candidate can be measured any more
    with pytest.raises(torch.AcceleratorError):
        tune.tuned("forward", q, q, "third", lambda config: config, fails)


def test_ranks_agree_on_the_first_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    import seqpar.triton_kernels.tune as tune
    from seqpar.triton_kernels.configs import candidates

    store, q = dist.HashStore(), torch.empty(1, 64, 2, 64)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    first, second = candidates("forward", q.device, 64, q.dtype)[1:3]
    timed = []

    def on_rank(rank: int, fastest: Any) -> Any:
        """What a rank with a home of its own finds, where ``fastest`` is."""

        def time(config: Any) -> float:
            timed.append(rank)
            return 1.0 if config == fastest else 2.0

        monkeypatch.setenv("SEQPAR_CACHE_DIR", str(tmp_path / str(rank)))
        monkeypatch.setattr(tune, "_best", {})
        return tune.tuned("forward", q, q, "", lambda config: config, time)

    assert on_rank(0, first) == first
    assert on_rank(1, second) == first
    assert set(timed) == {0}  # the other one has nothing to measure
    store = dist.HashStore()  # the next job, whose ranks begin with what is in their files
    assert on_rank(1, second) == first and set(timed) == {0}
    # A rank that measured at the same time as another, and published later.
    store = dist.HashStore()
    (key,) = json.loads(tune.cache_file().read_text())
    store.set(f"seqpar/tuning/{key}", json.dumps(vars(second)))
    assert on_rank(0, first) == second


def test_tuning_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    import seqpar.triton_kernels.tune as tune

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SEQPAR_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tune, "_best", {})
    q = torch.empty(1, 64, 2, 64)
    assert tune.tuned("forward", q, q, "", lambda config: config, lambda config: 1.0)


def test_available_only_with_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from seqpar.kernels import elementwise as module
    from seqpar.kernels.triton import TritonBackend

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backend = TritonBackend()
    assert "no CUDA or ROCm GPU" in str(backend.unavailable())
    monkeypatch.setattr(module, "_installed", lambda: False)
    assert "not installed" in str(backend.unavailable())


def test_the_interpreter_of_triton_3_6_is_refused_with_a_new_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy

    from seqpar.kernels.elementwise import _no_interpreter

    for triton_version, numpy_version, refused in (("3.6.0", "2.5.2", True), ("3.6.0", "2.3.9", False),
                                                   ("3.7.0+git1", "2.5.0", False)):  # fmt: skip
        monkeypatch.setattr(triton, "__version__", triton_version)
        monkeypatch.setattr(numpy, "__version__", numpy_version)
        _no_interpreter.cache_clear()
        assert ("does not work with numpy 2.5.2" in str(_no_interpreter())) is refused
    _no_interpreter.cache_clear()
