"""``seqpar bench``: its options, what it computes from recorded seconds, its adapters, and one small comparison."""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.distributed import ProcessGroup
from torch.utils.flop_counter import FlopCounterMode

import seqpar
from seqpar import Mask
from seqpar.cli import bench_runners
from seqpar.cli.bench import _WIDTH, draw_charts, report, rows_of, table_of
from seqpar.cli.bench_cases import PRESETS, BenchCase, BenchConfig
from seqpar.cli.bench_mixer import linear_attention
from seqpar.cli.bench_run import BOTH, FORWARD, CaseMeasurement, CaseResult, Sample, run_once
from seqpar.cli.bench_runners import (
    BenchAttention,
    BenchSetting,
    RefusalError,
    adapters,
    of_peer,
    of_seqpar,
    reference,
    runners,
)
from seqpar.cli.launch import CommandError
from seqpar.patching.replaced import replaced
from seqpar.planner.hardware import AttentionRate
from seqpar.planner.setting import Setting
from seqpar.planner.step import attention_seconds

from ..pool import Pool, on_ranks
from ..reference import assert_close, assert_error
from ..settings import H100, attention_shape
from .command import exit_code

CPU = torch.device("cpu")
LINEAR = BenchCase("linear", "documents:180", 300, 2, 2, 3, 3, 16, 8, "float32")
DECODE = BenchCase("decode", "causal", 61, 2, 2, 4, 2, 16, 8, "float32")
CASE = BenchCase("causal", "causal", 64, 2, 1, 4, 4, 16, 16, "float32")


# Options


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BenchConfig(preset=["casual"]), "preset='casual'.*causal"),
        (BenchConfig(strategy=["ulyses"]), "strategy='ulyses'.*ulysses"),
        (BenchConfig(layout=["zig"]), "layout='zig'"),
        (BenchConfig(backend=["cuda"]), "backend='cuda'"),
        (BenchConfig(dtype="int8"), "dtype='int8'"),
        (BenchConfig(mask=["window:0"]), "window:0"),
        (BenchConfig(rounds=0), "rounds=0"),
        (BenchConfig(budget=-1.0), "budget=-1.0: expected seconds"),
        (BenchConfig(seq_len=["1"]), "seq_len=1: expected at least 2"),
        (BenchConfig(ranks=[4]), "ranks=4: expected 1 to 2"),
        (BenchConfig(heads=0), "heads=0: expected at least 1"),
        (BenchConfig(kv_heads=0), "kv_heads=0: expected at least 1"),
        (BenchConfig(head_dim=-4), "head_dim=-4: expected at least 1"),
        (BenchConfig(heads=8, kv_heads=3), "kv_heads=3: expected a divisor of heads=8"),
    ],
)
def test_a_wrong_option_is_named(config: BenchConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.check(2)


def test_linear_attention_refuses_other_masks() -> None:
    with pytest.raises(RefusalError, match="no mask window:8: causal and documents only"):
        reference(setting(preset="linear", mask="window:8"))


def test_an_unknown_peer_is_named() -> None:
    with pytest.raises(ValueError, match=r"peer='deepspeed'.*deepspeed_ulysses"):
        adapters(BenchConfig(peer=["deepspeed"]))


def test_cases_are_every_combination() -> None:
    config = BenchConfig(preset=list(PRESETS), seq_len=["2K", "1024"], ranks=[1, 2], heads=8)
    cases = config.cases(2, cuda=False)
    assert len(cases) == len(set(cases)) == len(PRESETS) * 2 * 2
    assert [case.seq_len for case in cases[:2]] == [1024, 2048]
    shapes = {case.preset: (case.mask, case.kv_heads, case.head_dim, case.v_head_dim) for case in cases}
    assert shapes["gqa"] == ("causal", 2, 64, 64)
    assert shapes["mla"] == ("causal", 8, 96, 64)
    assert shapes["packed"][0] == "mix:magi" and shapes["video"][0] == "full"
    assert [case.seq_len for case in BenchConfig(preset=["image", "video"]).cases(1, cuda=True)] == [4608, 76112]
    for case in cases:
        assert case.make_mask().batch >= 1


def test_each_strategy_has_the_layout_that_balances_it() -> None:
    def names(preset: str, ranks: int, **options: list[str]) -> list[str]:
        rows = runners(BenchConfig(**options, peers=False), replace(CASE, preset=preset, ranks=ranks))
        return [row.name for row in rows if row.kind == "seqpar"]

    assert names("causal", 4) == [
        "ring zigzag", "ulysses contiguous", "all_gather zigzag", "hybrid zigzag", "auto zigzag"
    ]  # fmt: skip
    assert names("linear", 2) == ["by_heads contiguous"]
    assert names("decode", 2) == ["cache contiguous"]
    packed = names("packed", 2, strategy=["ring", "ulysses"])
    assert packed == ["ring zigzag", "ring balanced", "ulysses contiguous"]
    every = names("packed", 2, strategy=["ring"], layout=["striped", "zigzag"], backend=["auto", "cpu"])
    assert every == ["ring striped", "ring zigzag", "ring striped cpu", "ring zigzag cpu"]


@pytest.mark.parametrize(("mask", "pairs"), [("causal", 10), ("full", 16), ("window:2", 7), ("documents:2", 6)])
def test_operations_are_counted_from_the_mask(mask: str, pairs: int) -> None:
    case = BenchCase("causal", mask, 4, 1, 2, 3, 3, 8, 4, "float32")
    assert case.visible_pairs() == 2 * pairs
    assert case.operations(backward=False) == 2 * (2 * pairs) * 3 * (8 + 4)
    assert case.operations(backward=True) == 2 * (2 * pairs) * 3 * ((8 + 4) + (3 * 8 + 2 * 4))


def test_decoding_counts_the_new_tokens() -> None:
    case = replace(DECODE, batch=1)
    assert case.queries().tolist() == list(range(31, 61))
    assert case.visible_pairs() == sum(range(32, 62))
    assert replace(case, seq_len=1000).new_tokens == 32
    sample = Sample("SDPA", "ideal", seconds={FORWARD: [0.5], BOTH: []}, cpu=[0.5])
    (row,) = rows_of(CaseResult(case, [sample], {}, 1))
    assert row["tokens_per_s"] == 30 / 0.5


def test_linear_attention_is_its_definition() -> None:
    """Of two of four heads, which share a KV head, over several chunks; and its operations."""
    q, k, v = (torch.randn(1, 300, n, d, dtype=torch.float64) for n, d in ((2, 4), (1, 4), (1, 6)))
    i = torch.arange(300)
    rates = 1 - 2.0 ** (-5.0 - torch.arange(2, 4, dtype=torch.float64))
    decay = torch.where(i[:, None] >= i, rates[:, None, None] ** (i[:, None] - i), 0.0)  # [h, t, t]
    expected = (torch.einsum("bihd,bjhd->bhij", q / 2, k.expand_as(q)) * decay) @ v.transpose(1, 2)
    assert_close(linear_attention(slice(2, 4), q, k, v).float(), expected.transpose(1, 2).float())
    with FlopCounterMode(display=False) as counter:
        linear_attention(slice(0, 2), *(torch.randn(1, 256, 2, 8) for _ in range(3)))
    case = replace(LINEAR, seq_len=256, batch=1, heads=2, head_dim=8)
    assert case.operations(False) == counter.get_total_flops() == case.operations(True) / 3


# From recorded seconds to the table


def recorded(divisor: int = 1) -> CaseResult:
    sdpa = Sample("SDPA", "ideal", seconds={FORWARD: [1.0, 1.2, 1.0], BOTH: [3.0, 3.6, 3.0]}, cpu=[6.0, 6.0, 6.0])
    local = Sample("local cpu", "ideal", seconds={FORWARD: [2.0, 2.0, 2.0], BOTH: [4.0, 4.0, 4.0]}, cpu=[8.0] * 3)
    ring = Sample(
        "ring zigzag",
        "seqpar",
        layout="zigzag",
        seconds={FORWARD: [2.0, 1.2, 1.0], BOTH: [6.0, 4.0, 4.0]},
        silent={FORWARD: [1.5, 1.0, 1.0], BOTH: [5.0, 3.5, 3.75]},
        cpu=[7.0, 8.0, 9.0],
        bytes_sent=2048,
        bytes_between_hosts=1024,
        peak_memory=1 << 20,
    )
    peer = Sample("a peer", "peer", seconds={FORWARD: [4.0, 4.0, 5.0], BOTH: []}, cpu=[4.0] * 3, bytes_sent=512)
    return CaseResult(CASE, [sdpa, local, ring, peer], {"another": "no"}, divisor)


def test_rows_from_recorded_seconds() -> None:
    rows = {(row["what"], row["run"]): row for row in rows_of(recorded())}
    assert rows["SDPA", FORWARD]["share_of_ideal"] == 1.0
    assert rows["local cpu", BOTH]["share_of_ideal"] == pytest.approx(0.75)
    ring = rows["ring zigzag", BOTH]
    assert ring["median_s"] == 4.0
    assert (ring["fastest_s"], ring["slowest_s"]) == (4.0, 6.0)
    # The median of 3 / 6, 3.6 / 4 and 3 / 4, round by round.
    assert ring["share_of_ideal"] == pytest.approx(0.75)
    assert ring["exposed_s"] == pytest.approx(0.5)
    assert ring["tokens_per_s"] == 64 / 4.0
    assert ring["tflops"] == pytest.approx(7 * 2 * (64 * 65 / 2) * 4 * 16 / 4.0 / 1e12)
    assert (ring["bytes_sent"], ring["bytes_between_hosts"], ring["peak_memory"]) == (2048, 1024, 1 << 20)
    assert rows["ring zigzag", FORWARD]["exposed_s"] == pytest.approx(0.2)
    assert rows["ring zigzag", FORWARD]["bytes_sent"] is None
    # A peer without a backward has one row, with what its run sends.
    assert rows["a peer", FORWARD]["bytes_sent"] == 512
    assert ("a peer", BOTH) not in rows
    assert rows["a peer", FORWARD]["exposed_s"] is None


def test_the_ideal_is_divided_by_the_devices() -> None:
    rows = {(row["what"], row["run"]): row for row in rows_of(recorded(divisor=2))}
    assert rows["ring zigzag", BOTH]["share_of_ideal"] == pytest.approx(0.375)
    assert rows["SDPA", BOTH]["share_of_ideal"] == 1.0


def test_the_table_has_the_best_ideal_first() -> None:
    table = table_of(recorded(), BOTH, 160)
    assert list(table.columns[0].cells) == ["SDPA, one process", "ring zigzag", "local cpu, one process"]
    assert list(table.columns[3].cells) == ["1.00", "0.75", "0.75"]
    assert list(table.columns[6].cells) == ["", "500.0 ms", ""]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_a_narrow_terminal_has_fewer_columns(width: int) -> None:
    result = recorded()
    result.samples.append(
        replace(result.samples[2], name="ring zigzag backend=reference", seconds={FORWARD: [], BOTH: [1234.5] * 3})
    )
    console = Console(width=width, file=io.StringIO())
    table = table_of(result, BOTH, width)
    console.print(table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "\u2026" not in "".join(lines) and max(map(len, lines)) <= width
    headings = [str(column.header).replace("\n", " ") for column in table.columns]
    assert headings[:3] == ["", "seconds", "share of the ideal" if width < 160 else "range"]
    assert len(headings) == {60: 3, 80: 5, 100: 6, 160: 10}[width]
    forward = table_of(result, FORWARD, width)
    assert all({*column.cells} - {"", "0 B"} for column in forward.columns)


def test_tables_in_a_file_have_100_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report([recorded()], {"device": "a machine"}, tmp_path, Console(width=_WIDTH), charts=False)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


@pytest.mark.slow
@pytest.mark.thorough
def test_charts_of_recorded_seconds(tmp_path: Path) -> None:
    charts = draw_charts([recorded()], tmp_path, "a machine")
    assert {chart.name for chart in charts} == {"length.png", "ideal.png", "memory.png"}
    assert all(chart.stat().st_size > 10_000 for chart in charts)


# Adapters


def setting(group: Any = None, **changes: Any) -> BenchSetting:
    """A setting on two ranks. Without a group it is for what runs on no rank."""
    group = group or SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    return BenchSetting(replace(CASE, **changes), CPU, group, alone=group, fake=group, control=group, world=2)


def make_peer(name: str, setting: BenchSetting) -> BenchAttention:
    (module,) = adapters(BenchConfig(peer=[name]))
    return of_peer(setting, module)


REFUSALS = {
    "ring_flash": "CUDA|not installed",
    "transformer_engine_p2p": "CUDA|not installed",
    "magi": "CUDA|not installed",
    "torch_context_parallel": "no attention on CPUs",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_needs_cuda_says_so(name: str) -> None:
    with pytest.raises(RefusalError, match=REFUSALS[name]):
        make_peer(name, setting())


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("deepspeed_ulysses", "deepspeed"),
        ("ring_attention_lucidrains", "ring_attention_pytorch"),
        ("ring_flash", "ring_flash_attn"),
        ("usp", "yunchang"),
        ("transformer_engine_p2p", "transformer_engine"),
        ("magi", "magi_attention"),
    ],
)
def test_a_package_that_is_missing_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RefusalError, match=f"{package} is not installed"):
        make_peer(name, setting())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": "window:8"}, "no mask window:8"),
        ({"v_head_dim": 8}, r"no head_dim of v \(8\)"),
        ({"seq_len": 63}, "63 tokens do not divide by 2"),
    ],
)
def test_what_a_package_cannot_do_is_named(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = SimpleNamespace(ring_flash_attn=None)
    monkeypatch.setitem(sys.modules, "ring_attention_pytorch", SimpleNamespace(ring_flash_attention=function))
    monkeypatch.setitem(sys.modules, "ring_attention_pytorch.ring_flash_attention", function)
    with pytest.raises(RefusalError, match=message):
        make_peer("ring_attention_lucidrains", setting(**changes))


def test_shards_of_different_lengths_are_refused_by_all_peers() -> None:
    """Otherwise a collective of unequal messages ends the process, and the whole comparison with it."""
    for module in adapters(BenchConfig()):
        with pytest.raises(RefusalError):
            of_peer(setting(seq_len=63), module)


@on_ranks
def _measure_worker(group: ProcessGroup) -> dict[str, Any]:
    """One small case with an adapter that is right and two that are wrong, without a command around it."""
    config = BenchConfig(strategy=["ring"], rounds=3, charts=False)
    (right,) = adapters(BenchConfig(peer=["gather_sdpa"]))

    def wrong(setting: BenchSetting) -> BenchAttention:
        return BenchAttention(lambda q, k, v: q + k + v, setting.positions())

    def half_right(setting: BenchSetting) -> BenchAttention:
        attend = right.make(setting).attend  # but for dv
        return BenchAttention(lambda q, k, v: attend(q, k, v + 0 * k) + (v - v.detach()), setting.positions())

    others = [SimpleNamespace(NAME=name, make=make) for name, make in (("wrong", wrong), ("half", half_right))]
    place = setting(group)
    with replaced(bench_runners, adapters=lambda config: [right, *others]):
        measurement = CaseMeasurement(place, config, lambda text: None)
        measurement.prepare()
        measurement.rounds(until=0.0)
        linear = CaseMeasurement(replace(place, case=LINEAR), config, lambda text: None)
        linear.prepare()
        linear.rounds(until=0.0)
        decode = CaseMeasurement(replace(place, case=DECODE), config, lambda text: None)
        decode.prepare()
        decode.rounds(until=0.0)
        windows = CaseMeasurement(replace(place, case=replace(DECODE, mask="window:8")), config, lambda text: None)
        windows.prepare()
    ring = of_seqpar(place, "ring", "zigzag")
    assert ring.silent is not None
    inputs = place.inputs(ring.positions)
    with seqpar.trace() as sent:
        run_once(ring, inputs)
    _, silent = run_once(ring.silent, inputs)
    wide = of_seqpar(setting(group, head_dim=24), "ring", "zigzag")  # as in the preset mla
    _, latent = run_once(wide, setting(group, head_dim=24).inputs(wide.positions))
    packed = setting(group, mask="documents:768", seq_len=1024)
    balanced = CaseMeasurement(packed, replace(config, layout=["balanced"], peers=False), lambda text: None)
    balanced.prepare()
    with pytest.raises(CommandError, match="the reference cannot be computed: no mask window:8"):
        CaseMeasurement(setting(group, preset="linear", mask="window:8"), config, lambda text: None).prepare()
    torch.set_num_threads(1)
    return {
        "refused": measurement.result.refused,
        "samples": {sample.name: sample for sample in measurement.result.samples},
        "sent": sent.bytes_sent,
        "silent": [tuple(x.shape) for x in silent],
        "latent": [x.shape[3] for x in latent],
        "positions": of_seqpar(packed, "ring", "balanced").positions.tolist(),
        "balanced": {sample.name: sample for sample in balanced.result.samples},
        "linear": {sample.name: sample for sample in linear.result.samples},
        "decode": {sample.name: sample for sample in decode.result.samples},
        "refused to decode": decode.result.refused,
        "windows": windows.result.refused,
    }


@pytest.mark.thorough
@pytest.mark.slow
def test_what_is_wrong_is_not_timed(pool: Pool) -> None:
    answers = pool.run(2, _measure_worker)
    for answer in answers:
        assert set(answer["refused"]) == {"wrong", "half, backward,"}
        assert answer["refused"]["wrong"].startswith("WRONG: differs from the result of one device: out by ")
        assert answer["refused"]["half, backward,"].startswith("WRONG: differs from the result of one device: dv by ")
        samples = answer["samples"]
        half = samples.pop("half")
        assert len(half.seconds[FORWARD]) == 3
        assert not half.seconds[BOTH]
        assert {"SDPA", "local cpu", "ring zigzag", "all-gather + SDPA"} == set(samples)
        for sample in samples.values():
            assert len(sample.seconds[FORWARD]) == len(sample.seconds[BOTH]) == 3
            assert_error(sample.error, 0.0)
        assert len(samples["ring zigzag"].silent[BOTH]) == 3
        # Messages of a peer are counted by torch's operators: k and v, and their gradients, once to the other rank.
        shard = CASE.seq_len // 2 * CASE.kv_heads * CASE.head_dim * 4
        assert samples["all-gather + SDPA"].bytes_sent == 4 * shard
        assert samples["ring zigzag"].bytes_sent == max(a["sent"] for a in answers) > 0
        assert answer["silent"] == [(1, 32, 4, 16)] * 4
        assert answer["latent"] == [16, 24, 24, 16]
        assert set(answer["linear"]) == {"linear attention", "by_heads contiguous"}
        assert [len(x.silent[BOTH]) for x in answer["linear"].values()] == [0, 3]
        assert "ring balanced" in answer["balanced"]
        assert set(answer["decode"]) == {"SDPA", "local cpu", "cache contiguous"}
        assert not answer["refused to decode"]
        assert set(answer["windows"]) == set(answer["decode"]) and "decoding is causal" in answer["windows"]["SDPA"]
        assert [len(x.silent[FORWARD]) for x in answer["decode"].values()] == [0, 0, 3]
        assert not any(x.seconds[BOTH] for x in answer["decode"].values())
        # For each new token, the output and the log-sum-exp of each head, in float32.
        assert answer["decode"]["cache contiguous"].bytes_sent == 30 * 2 * 4 * (8 + 1) * 4
        for x in (*answer["linear"].values(), *answer["balanced"].values(), *answer["decode"].values()):
            assert_error(x.error, 0.0)
        assert answer["linear"]["by_heads contiguous"].bytes_sent > 0
    made = seqpar.Sharding.balanced(Mask.documents([0, 768, 1024]), 1024, ranks=2, rank=1)
    assert isinstance(made.layout, seqpar.Assigned) and answers[1]["positions"] == made.positions().tolist()


# The order of magnitude of a core's rates, and of messages in shared memory.
ONE_CORE = replace(
    H100, attention={"cpu": AttentionRate(45e9, 40e9)}, p2p=1.5e9, peer=1.5e9, all_to_all=1.5e9, all_gather=1.5e9,
    latency=100e-6, kernel=50e-6, gpus_per_host=2, device="cpu",
)  # fmt: skip


def test_the_planner_knows_which_ring_is_slower() -> None:
    """A contiguous ring on two ranks is a third slower than the others, as `seqpar bench` measures on two cores."""
    seconds = {}
    for layout, (name, ulysses) in product(("contiguous", "zigzag"), (("ring", 1), ("ulysses", 2), ("all_gather", 1))):
        setting = Setting(
            ONE_CORE, Mask.causal(), 2048, model=attention_shape(4, 4, 64), ring=2 // ulysses, ulysses=ulysses,
            layout=layout, gather=name == "all_gather", dtype=torch.float32,
        )  # fmt: skip
        seconds[name, layout] = attention_seconds(setting)
    slow = [seconds.pop((name, "contiguous")) for name in ("ring", "all_gather")]
    assert min(slow) > 1.15 * max(seconds.values()), (slow, seconds)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_small_comparison(tmp_path: Path) -> None:
    arguments = (
        "bench --nproc 2 --ranks 1 --ranks 2 --seq-len 64 --heads 2 --head-dim 16 --strategy ulysses --strategy p2p "
        f"--peer gather_sdpa --peer torch_context_parallel --rounds 3 --budget 5 --device cpu --trace --out {tmp_path}"
    )
    assert exit_code(*arguments.split()) == 0
    rows = list(csv.DictReader((tmp_path / "bench.csv").open()))
    assert {row["ranks"] for row in rows if row["kind"] == "seqpar"} == {"1", "2"}
    assert {row["what"] for row in rows} >= {"SDPA", "ulysses contiguous", "p2p zigzag", "all-gather + SDPA"}
    assert all(int(row["rounds"]) == 3 and float(row["median_s"]) > 0 for row in rows)
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert len(saved["cases"]) == 2 and len(saved["rows"]) == len(rows)
    assert "no attention on CPUs" in saved["cases"][-1]["refused"]["PyTorch context_parallel"]
    charts = {path.name for path in tmp_path.glob("*.png")}
    assert charts == {"length.png", "ideal.png", "memory.png", "ranks.png"}
    traces = list(tmp_path.glob("causal-64-ulysses-contiguous-rank*.json"))
    assert len(traces) == 2
    assert "traceEvents" in json.loads(traces[0].read_text())


def test_micro_benchmarks_are_compared_with_the_stored_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    ratios = import_module("micro.conftest").ratios
    lines = ratios(
        {
            "plan": {"min": 3e-3, "median": 5e-3},
            "shard": {"min": 1e-6, "median": 9e-6},
            "mask": {"min": 1, "median": 1},
        },
        {"plan": {"min": 2e-3, "median": 4e-3}, "shard": {"min": 1e-6, "median": 3e-6}},
    )
    assert [line.split() for line in lines] == [
        ["plan", "3,000.0", "us", "5,000.0", "us", "1.50", "x", "1.25", "x", "SLOWER"],
        ["shard", "1.0", "us", "9.0", "us", "1.00", "x", "3.00", "x"],  # other programs: the fastest has not changed
        ["mask", "1,000,000.0", "us", "1,000,000.0", "us", "new"],
    ]
