"""``seqpar doctor``: what it finds on several ranks, what it prints, and when it fails."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from seqpar.cli import doctor, measure
from seqpar.cli.doctor import Check, RankReport, compare
from seqpar.cli.measure import MeasuredLink, measure_links
from seqpar.comm import nccl

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
@pytest.mark.thorough(world=[1, 4])
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
