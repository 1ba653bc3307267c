"""``seqpar doctor``: what it finds on several ranks, what it prints, and when it fails."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqpar.cli import doctor, libraries, measure
from seqpar.cli.doctor import Check, RankReport, compare
from seqpar.cli.measure import MeasuredLink, measure_links
from seqpar.comm import nccl
from seqpar.planner import HARDWARE

from ..pool import Pool, on_ranks
from ..problems import present_backends
from .command import exit_code

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
RIGHT = Check("ring", "causal", 1e-7, 1e-5)
REPORT = RankReport(
    2, 1, "gloo", "cpu", [MeasuredLink("p2p", 1024, 1e-5, 1e8), MeasuredLink("all-to-all", 1024, 2e-5, 5e7)], [RIGHT]
)


@on_ranks
def _compare(group: ProcessGroup, broken: bool) -> list[tuple[str, str, bool, str | None]]:
    right: Callable[..., Tensor] = vars(doctor)["attention"]

    def wrong(*args: Any, strategy: str, **options: Any) -> Tensor:
        out: Tensor = right(*args, strategy=strategy, **options)
        return out * 1.001 if strategy == "ulysses" else out

    patch = pytest.MonkeyPatch()
    if broken:
        patch.setattr(doctor, "attention", wrong)
    try:
        return [(c.what, c.mask, c.ok, c.problem) for c in compare(group, CPU)]
    finally:
        patch.undo()


@pytest.mark.slow
@pytest.mark.thorough(world=[2, 4])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_strategy_gives_the_numbers_of_one_device(pool: Pool, world: int) -> None:
    by_rank = pool.run(world, _compare, False)
    assert all(found == by_rank[0] for found in by_rank)
    assert all(ok for *_, ok, _ in by_rank[0]), by_rank[0]
    expected = {"ring", "ulysses", "context_parallel", "hybrid", "auto", "tp_sp"}
    expected |= {f"ring, {name}" for name in present_backends()}
    assert {what for what, *_ in by_rank[0]} == expected | ({"local"} if world == 1 else set())


def test_a_wrong_strategy_is_found(pool: Pool) -> None:
    found = pool.run(2, _compare, True)[0]
    wrong = [(what, mask, problem) for what, mask, ok, problem in found if not ok]
    assert {what for what, *_ in wrong} == {"ulysses"} and len(wrong) == 3
    assert all("out differs by 1.0e-03" in str(problem) for *_, problem in wrong)


@on_ranks
def _links(group: ProcessGroup) -> list[MeasuredLink]:
    patch = pytest.MonkeyPatch()
    patch.setattr(measure, "_SIZES", (8, 4096))
    try:
        return list(measure_links(group, CPU))
    finally:
        patch.undo()


def test_links_by_size(pool: Pool) -> None:
    for links in pool.run(2, _links):
        assert [(link.operation, link.nbytes) for link in links] == [
            (operation, size) for operation in ("p2p", "all-to-all", "all-gather") for size in (8, 4096)
        ]
        assert all(link.bytes_per_second == link.nbytes / link.seconds > 0 for link in links)


@pytest.mark.slow
def test_the_command_starts_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("doctor", "--no-measure", "--nproc", "2", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert {k["name"] for k in report["kernels"]} >= {"cpu", "triton"}
    assert report["ranks"]["ranks"] == 2 and report["ranks"]["links"] == []
    assert all(check["problem"] is None for check in report["ranks"]["checks"])


@pytest.mark.slow
@pytest.mark.thorough
def test_rates(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(measure, "_LONG_ENOUGH_S", 0.01)
    monkeypatch.setattr(doctor, "_start_ranks", lambda *_: REPORT)
    assert exit_code("doctor") == 0
    shown = capsys.readouterr().out
    torch.set_num_threads(1)
    for words in ("torch", "gloo yes", "reference", "GFLOP/s"):
        assert words in shown


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The brackets of an extra are printed, not taken for a style."""
    monkeypatch.setattr("seqpar.kernels.flash._no_cuda", lambda: None)
    monkeypatch.setenv("COLUMNS", "400")
    assert exit_code("doctor", "--no-measure", "--no-check") == 0
    assert "(pip install --pre 'seqpar[flash4]';" in capsys.readouterr().out


def test_communicators_on_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("SEQPAR_NCCL_MAX_CTAS", "8")
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    monkeypatch.setattr(nccl, "nccl_version", lambda: (2, 25, 1))
    monkeypatch.setattr(doctor, "nccl_version", nccl.nccl_version)
    monkeypatch.setattr(doctor, "_devices", lambda: [{"name": name, "what": ""} for name in ("CPU", "cuda:0")])
    assert exit_code("doctor", "--no-measure", "--no-check") == 0
    shown = capsys.readouterr().out
    for words in ("2.25.1", "init_mesh sets it to 1", "10 minutes", "at most 8", "NCCL_DEBUG", "older than 2.26"):
        assert words in shown
    monkeypatch.setattr(doctor, "_devices", lambda: [{"name": "CPU", "what": ""}])
    assert exit_code("doctor", "--no-measure", "--no-check") == 0
    assert "CTAs" not in capsys.readouterr().out


def test_the_cudnn_that_is_loaded_beside_the_one_of_pip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cuDNN of the system, which other packages have taken in silence."""
    maps, pip, system = tmp_path / "maps", tmp_path / "pip", tmp_path / "system"
    for folder, names in ((pip, ("libcudnn.so.9", "libcublas.so.13")), (system, ("libcudnn.so.9", "libcuda.so.1"))):
        folder.mkdir()
        for name in names:
            (folder / name).touch()
    (system / "libcublas.so.13").symlink_to(pip / "libcublas.so.13")  # the same file
    maps.write_text(
        f"7f00-7f01 r-xp 0 08:01 2  {system}/libcudnn_graph.so.9\n7f02-7f03 r-xp 0 08:01 1  {pip}/other.so\n"
    )
    with maps.open("a") as file:
        file.write(f"7f04-7f05 r--p 0 08:01 3                          {system}/libcudnn.so.9\n" * 2)
    installed = {"nvidia-cudnn-cu13": "9.19.0.56"}

    def version(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError
        return installed[package]

    files = [PurePosixPath(name) for name in ("libcudnn.so.9", "libcublas.so.13", "cudnn.h")]
    packages = [
        SimpleNamespace(metadata={"Name": "nvidia-cudnn-cu13"}, files=files, locate_file=lambda file: pip / file),
        SimpleNamespace(metadata={"Name": "nvidia-nothing"}, files=None),
        SimpleNamespace(metadata={"Name": "other"}, files=[PurePosixPath("libcuda.so.1")]),
    ]
    monkeypatch.setattr(libraries, "_MAPS", maps)
    monkeypatch.setattr(libraries, "version", version)
    monkeypatch.setattr(libraries, "distributions", lambda: packages)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}/none::{pip}")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    right = libraries.cudnn()
    assert not right.problems and not right.shadows and right.files[0] == f"{system}/libcudnn.so.9"
    assert len(right.files) == 2 and str(right) == "9.19.0; from pip: nvidia-cudnn-cu13 9.19.0.56"
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{system}:{pip}")
    assert libraries.cudnn().shadows == {f"{system}/libcudnn.so.9": "nvidia-cudnn-cu13"}

    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(doctor, "cudnn", libraries.cudnn)
    monkeypatch.setenv("COLUMNS", "400")
    assert exit_code("doctor", "--no-measure", "--no-check") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "9.10.2; from pip: nvidia-cudnn-cu13 9.19.0.56",
        f"cuDNN 9.10.2 is loaded from {system}/libcudnn.so.9, and nvidia-cudnn-cu13 9.19.0.56 is installed",
        f"LD_LIBRARY_PATH: {system}/libcudnn.so.9 may be loaded instead of the library of nvidia-cudnn-cu13",
    ):
        assert words in shown
    assert exit_code("doctor", "--no-measure", "--no-check", "--json") == 0
    assert json.loads(capsys.readouterr().out)["cudnn"]["loaded"] == "9.10.2"

    def refused() -> int:
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", refused)
    assert "cuDNN: cuDNN version incompatibility" in libraries.cudnn().problems
    installed["nvidia-cudnn-cu12"] = installed.pop("nvidia-cudnn-cu13")  # of another CUDA than PyTorch's
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert len(libraries.cudnn().problems) == 1
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(libraries, "_MAPS", tmp_path / "none")
    found = libraries.cudnn()
    assert found.loaded == "none" and found.files == []
    assert [libraries.version_text(x) for x in (8902, 90100, 91900, 92603)] == ["8.9.2", "9.1.0", "9.19.0", "9.26.3"]


def test_what_scaled_dot_product_attention_runs() -> None:
    def event(name: str, us: float = 1.0, kind: DeviceType = DeviceType.CUDA) -> Any:
        return SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(elapsed_us=lambda: us))

    operators = [event(f"aten::{x}", 9.0, DeviceType.CPU) for x in ("empty", "_scaled_dot_product_cudnn_attention")]
    kernels = [event("Memset", 2.0), event("cudnn_generated_sdpa_sm90_flash_fprop", 8.0), event("elementwise", 3.0)]
    assert measure.ran_by_sdpa([*operators, *kernels]) == "cudnn_attention: cudnn_generated_sdpa_sm90_flash_fprop"
    assert measure.ran_by_sdpa(operators) == "cudnn_attention"
    assert measure.ran_by_sdpa([]) == "an unknown operator"
    assert measure.sdpa_backend(CPU) == "flash_attention_for_cpu"
    with sdpa_kernel(SDPBackend.MATH):
        assert "math" in measure.sdpa_backend(CPU) and "flash" not in measure.sdpa_backend(CPU)


def test_rates_beside_the_rates_of_the_table() -> None:
    kernels = {"flash": "flash2", "flash_attn": "flash2", "flash_attn_3": "flash3", "flash_attn_4": "flash4"}
    shown = 0
    for name, gpu in (("h200", "NVIDIA H200"), ("h100", "NVIDIA H100 80GB HBM3"), ("a100", "NVIDIA A100-SXM4-80GB")):
        for backend in ("triton", "cudnn", "cpu", "reference", *kernels):
            rate = HARDWARE[name].attention.get(kernels.get(backend, backend))
            text = doctor.in_table(backend, gpu)
            assert bool(text) == (rate is not None)
            if rate is not None:
                forward, both = (float(x) for x in re.findall(r"([\d.]+) TFLOP/s", text))
                assert name.upper() in text and forward == pytest.approx(rate.forward / 1e12, abs=0.01)
                seconds = 1 / rate.forward + 2.5 / rate.backward  # of one operation forward, and 2.5 backward
                assert both == pytest.approx(3.5 / seconds / 1e12, abs=0.01)
                shown += 1
    assert shown > 5
    for other in ("NVIDIA GH200 480GB", "NVIDIA GeForce RTX 4090", "AMD EPYC 9654 96-Core Processor"):
        assert doctor.in_table("cudnn", other) == ""


def test_a_failed_self_check_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(doctor, "_start_ranks", lambda *_: REPORT)
    monkeypatch.setattr(doctor, "_rates", lambda: {"device": "a CPU", "dtype": "float32", "operations": {"copy": "1"}})
    assert exit_code("doctor") == 0
    shown = capsys.readouterr().out
    for words in ("10 µs, 0.10 GB/s", "1.0e-07", "Measured now: a CPU, float32"):
        assert words in shown
    wrong = replace(RIGHT, error=0.1, problem="out differs by 1.0e-01")
    monkeypatch.setattr(doctor, "_start_ranks", lambda *_: replace(REPORT, checks=[RIGHT, wrong]))
    assert exit_code("doctor") == 1
    captured = capsys.readouterr()
    assert "out differs by 1.0e-01" in captured.out and "the self-check failed: ring" in captured.err
    monkeypatch.setattr(doctor, "_start_ranks", lambda *_: "rank(s) [1] were still running after 120 s")
    assert exit_code("doctor", "--json") == 1
    assert "still running" in json.loads(capsys.readouterr().out)["ranks"]


@pytest.mark.parametrize(
    ("name", "version", "advice"),
    [
        ("torch", "2.10.1", "older than 2.11"),
        ("torch", "2.16.0+cu130", "newer than 2.15"),
        ("torch", "2.12", ""),
        ("transformers", None, "pip install 'seqpar[hf]'"),
    ],
)
def test_versions_beside_the_tested_ones(
    name: str, version: str | None, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(_: str) -> str:
        if version is None:
            raise PackageNotFoundError
        return version

    monkeypatch.setattr("importlib.metadata.version", installed)
    found = doctor._version(name, *doctor.TESTED[name])
    assert found["version"] == (version or "not installed")
    assert advice in found["advice"] and bool(advice) == bool(found["advice"])


def test_tested_versions_are_in_continuous_integration() -> None:
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    found = {
        "Python": set(re.findall(r"\"(3\.\d+)\"", workflow)),
        "torch": set(re.findall(r"torch==(\d+\.\d+)", workflow)),
    }
    for name, versions in found.items():
        assert {*doctor.TESTED[name][:2]} <= versions, name
    assert set(re.findall(r"Python :: (3\.\d+)", project)) == found["Python"]
    assert f"triton=={doctor.TESTED['triton'][0]}." in workflow


def test_bad_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("doctor", "--nproc", "0") == 2
    assert "nproc=0: expected at least 1" in capsys.readouterr().err
