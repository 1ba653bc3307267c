"""``seqpar.plan`` and ``seqpar plan``: the order of the choices, what is left out, bad input, and the command."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch._subclasses import FakeTensorMode

import seqpar
from seqpar import Mask
from seqpar.cli.launch import CommandError
from seqpar.cli.plan import draw_charts, read_batch, read_tokens, shown, table
from seqpar.cli.plan import plan as plan_command
from seqpar.placement.balanced import balanced_layout
from seqpar.placement.layout import Assigned
from seqpar.planner.attention import SelfAttention
from seqpar.planner.choose import is_equal
from seqpar.planner.mixes import document_mix, mask_of
from seqpar.planner.model import MODELS
from seqpar.planner.part import LayerPart, PartRow
from seqpar.planner.prompts import prompt_sharing
from seqpar.planner.setting import WEIGHTS, Setting
from seqpar.planner.split import BETWEEN, WITHIN, Split, Switches
from seqpar.planner.splits import allowed_switches, settings
from seqpar.planner.step import Choice, StepCost, step

from ..settings import H100, changed

NARROW = changed(MODELS["llama3-8b"], SelfAttention, kv_heads=2)
LATENT = changed(MODELS["llama3-8b"], SelfAttention, kv_heads=32, kv_rank=512, shared_dim=64)

planned = cache(seqpar.plan)


def test_a_plan_of_64_gpus_is_ordered() -> None:
    plan = planned("llama3-8b", 1 << 20, 64)
    assert plan.best.fits and not plan.best.switches.saving
    possible = [choice for choice in plan.choices if choice.possible]
    assert list(plan.choices[: len(possible)]) == possible
    rates = [choice.tokens_per_s for choice in possible[1:]]
    assert rates == sorted(rates, reverse=True)
    assert is_equal(plan.best, max(possible, key=lambda x: x.tokens_per_s))
    assert {choice.tokens_per_step for choice in plan.choices} == {plan.global_batch << 20}
    for choice in plan.choices:
        sizes = choice.degrees
        assert sizes["dp"] * sizes["ring"] * sizes["ulysses"] * sizes["tp"] == 64
        assert choice.seconds == pytest.approx(choice.compute_s + choice.exposed_s, rel=1e-6)
        assert choice.fits == (choice.longest_seq_len >= 1 << 20)
        assert choice.comm == ("all_gather" if choice.context == "context_parallel" else None)
    assert {"ring", "context_parallel", "ulysses", "hybrid", "tp_sp"} <= {c.strategy for c in plan.choices}
    json.dumps(plan.as_dict())


def test_the_price_of_invariant_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """With the same kernels, a step computes, sends and keeps more than a ring of as many ranks."""
    rates = {"base": "h200", "attention": {"triton": [5e14, 5e14], "invariant": [5e14, 5e14]}}
    options: dict[str, Any] = {"hardware": rates, "replicas": 1, "recompute": "none", "offload": False}
    options |= {"mask": Mask.full(), "global_batch": 1}
    usual = seqpar.plan("llama3-8b", 1 << 16, 8, **options)
    with FakeTensorMode():  # the numbers come from the values of tensors
        plan = seqpar.plan("llama3-8b", 1 << 16, 8, deterministic="invariant", **options)
    assert plan.kernel == "invariant"
    assert {(x.strategy, x.degrees["ulysses"]) for x in plan.choices} == {("ring", 1), ("tp_sp", 1)}
    ring = next(x for x in usual.choices if x.context == "ring" and x.degrees["ring"] == 8 and not x.switches.saving)
    price, shards = (
        next(x for x in plan.choices if x.strategy == name and not x.switches.saving) for name in ("ring", "tp_sp")
    )
    assert price.layout == ring.layout and price.switches == ring.switches
    assert price.compute_s > 1.05 * ring.compute_s and price.floor_s > 1.05 * ring.floor_s
    assert price.memory.working > ring.memory.working and price.memory.activations == ring.memory.activations
    # Of 32 layers: k and v twice; and their gradients in float32, or q, dout and two numbers of each of 32 heads.
    tokens, d, d_kv = 32 * 7 * (1 << 13), 4096, 2048
    assert sum(ring.bytes_sent.values()) == tokens * d_kv * (2 * 2 + 4)
    assert sum(price.bytes_sent.values()) == tokens * (d_kv * 2 * 2 + 2 * d * 2 + 32 * 8)
    code = plan.code()
    assert code.count('deterministic="invariant"') == 2 and plan.code(shards).count('deterministic="invariant"') == 1
    assert "seqpar bench" not in code and "backend" not in code
    plan_command("llama3-8b", "64K", 8, hardware="h200", deterministic="invariant")
    printed = " ".join(capsys.readouterr().out.split())
    assert "attention kernel invariant" in printed and "ring: like every other strategy with as many ranks" in printed


@pytest.mark.thorough
def test_equal_choices_are_ordered_by_what_is_easy_to_run() -> None:
    """The first choice offloads nothing and has a tenth of the memory left, although others are a little faster."""
    for model, tokens, gpus in (("llama3-8b", 1 << 20, 64), ("llama3-70b", 1 << 17, 64), ("qwen3-8b", 1 << 15, 8)):
        plan = planned(model, tokens, gpus)
        best, faster = plan.best, [x for x in plan.choices if x.tokens_per_s > plan.best.tokens_per_s]
        assert not best.needs and best.memory_bytes < 0.9 * H100.memory_bytes
        assert all(x.needs or is_equal(best, x) for x in faster)
        assert all("needs what the package lacks" in x.reason for x in plan.choices if x.needs and x.fits)


def test_the_first_row_says_why_it_is_first() -> None:
    for tokens, gpus, offload, why in (
        (1 << 17, 8, None, "offloads nothing, and at most 2% slower than the fastest"),
        (1 << 17, 8, False, "needs no tensor-parallel layers, and at most 2% slower than the fastest"),
        (1 << 15, 64, None, "shards weights over all ranks, and at most 3% slower than the fastest"),
    ):
        choices = seqpar.plan("llama3-8b", tokens, gpus, offload=offload).choices
        assert choices[0].reason.startswith(f"first because it {why}")
        assert not any("first because" in choice.reason for choice in choices[1:])
    assert any("slower than the first row: " in choice.reason for choice in choices)


def test_the_longest_sequence_is_the_same_in_rows_and_error() -> None:
    plan = seqpar.plan("llama3-8b", 100 << 20, 8)
    assert max(x.longest_seq_len for x in plan.choices) == plan.longest_seq_len == 4 << 20
    assert "4,194,304 tokens (4M) fit with dp 1, ring 8, ulysses 1, tp 1; recompute all, offload" in plan.shortage
    assert plan.shortage.count("4M") == 1 and table(plan, "causal", plan.choices[:1])[4].split()[-1] == "4M"


def test_offloading_is_recommended_where_nothing_else_fits() -> None:
    arguments: Any = ("llama3-8b", 1 << 21, 8)
    without = seqpar.plan(*arguments, offload=False)
    assert not without.choices[0].possible and without.fewest_ranks and without.fewest_ranks > 8
    with pytest.raises(ValueError, match=r"nothing fits: .* needs at least"):
        print(without.best)
    assert "pipeline parallelism" in without.shortage
    plan = seqpar.plan(*arguments)
    assert plan.best.switches.offload and not plan.best.needs
    assert all(x.switches.recompute != "none" for x in plan.choices if x.switches.offload)
    assert any(not x.switches.offload and not x.fits for x in shown(plan.choices))


def test_groups_of_heads_divide_the_kv_heads() -> None:
    """Also where nothing fits, so that every way to save memory is compared."""
    for kv_heads, groups in ((1, 1), (2, 2), (4, 4), (6, 3), (8, 4)):
        shape = changed(NARROW, SelfAttention, heads=24, kv_heads=kv_heads)
        assert max(x.head_groups for x in allowed_switches(shape, None, None, True, None, None)) == groups
        plan = seqpar.plan(shape, 1 << 22, 2, offload=False)
        assert not plan.choices[0].possible and plan.shortage
    assert max(x.head_groups for x in allowed_switches(LATENT, None, None, True, None, None)) == 1
    assert {x.switches.head_groups for x in seqpar.plan(NARROW, 1 << 16, 8, head_groups=2).choices} == {2}


@pytest.mark.thorough
def test_waits_for_weights_name_pipeline_parallelism() -> None:
    few, many = (seqpar.plan("llama3-405b", 8192, 128, global_batch=x).best for x in (16, 128))
    assert few.exposed_s > 0.3 * few.seconds and "pipeline parallelism" in few.reason
    assert "pipeline" not in many.reason


def test_what_the_package_lacks() -> None:
    base = Setting(H100, Mask.causal(), 131072, model=MODELS["llama3-8b"])
    every = Switches("full", True, True, True, 4)
    assert base.lacking(every) == replace(base, ulysses=8).lacking(every) == ()
    assert replace(base, tensor=8).lacking(every) == ("tiled_mlp", "head_groups")
    assert replace(base, ulysses=16).lacking(every) == ("head_groups",)  # 8 heads of a group for 16 ranks
    assert base.lacking(replace(every, head_groups=3)) == ("head_groups",)
    assert base.lacking(Switches(offload=True)) == ("offload",)


def test_all_choices_have_the_same_global_batch() -> None:
    plan = seqpar.plan("qwen3-8b", 8192, 16, global_batch=32)
    for choice in plan.choices:
        assert choice.accumulation * choice.degrees["dp"] == 32 and choice.tokens_per_step == 32 * 8192
    one, two = (seqpar.plan("qwen3-8b", 8192, 16, global_batch=n, replicas=4, offload=False).choices for n in (16, 32))

    def key(x: Choice) -> tuple[Any, ...]:
        return x.context, x.layout, *x.degrees.values(), x.switches, x.weights

    seconds = {key(x): x.seconds for x in one}
    for x in two:
        if x.weights == "fsdp":
            assert 1.9 < x.seconds / seconds[key(x)] < 2
    with pytest.raises(ValueError, match="global_batch=3: expected a multiple"):
        seqpar.plan("qwen3-8b", 8192, 16, global_batch=3, replicas=4)


def test_heads_limit_ulysses_and_links_limit_the_ring() -> None:
    shape = changed(MODELS["llama3-8b"], SelfAttention, heads=4, kv_heads=4, head_dim=1024)
    plan = seqpar.plan(shape, 65536, 16, replicas=1)
    assert all(c.degrees["ulysses"] * c.degrees["tp"] <= 4 for c in plan.choices)
    # Between hosts a ring sends fewer bytes than an all-to-all as long as the KV heads are few.
    slow = seqpar.plan("llama3-8b", 65536, 32, {"base": "h100", "network": 2e9}, replicas=1)
    ring, ulysses = (next(c for c in slow.choices if c.strategy == name) for name in ("ring", "ulysses"))
    assert ring.exposed_s > 0.3 * ring.seconds
    assert any("for weights and gradients" in choice.reason for choice in slow.choices)
    assert ulysses.exposed_s > ring.exposed_s


def test_packed_documents_are_compared_in_the_layout_that_balances_them() -> None:
    mask = mask_of("mix:magi", 1 << 17)
    base = Setting(H100, mask, 1 << 17, model=MODELS["llama3-8b"])
    found = list(settings(base, 32, 1))
    for s in found:
        zigzag = replace(s, layout="zigzag").imbalance()
        if s.ring > 1 and zigzag > 1.5:
            expected = balanced_layout(mask, 1 << 17, 32, s.ulysses * s.tensor, H100.gpus_per_host)
            assert s.layout == expected and isinstance(expected, Assigned)
            assert s.imbalance() < 1.02
        assert s.layout != "striped"
    assert sum(isinstance(s.layout, Assigned) for s in found) > 10
    # With fewer than four tiles for a rank there is no balanced layout.
    short = settings(Setting(H100, Mask.documents([0, 3000, 4096]), 4096, model=MODELS["llama3-8b"]), 32, 1)
    assert {s.layout for s in short if s.ring == 32} == {"striped"}


def test_rings_that_are_too_long_to_simulate_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def rings(replicas: int | None) -> list[int]:
        base = Setting(H100, Mask.full(), 4096, model=changed(MODELS["llama3-8b"], SelfAttention, heads=2, kv_heads=2))
        return sorted({s.ring for s in settings(base, 128, replicas)})

    every = [1, 2, 4, 8, 16, 32, 64, 128]
    assert rings(None) == every
    monkeypatch.setattr("seqpar.planner.splits.LONGEST_RING", 64)
    assert rings(None) == every[:-1]
    assert rings(1) == [64]  # and 2 heads


def test_rings_longer_than_memory_requires_are_left_out() -> None:
    short = seqpar.plan("qwen3-0.6b", 32768, 64).choices
    assert {x.degrees["ring"] for x in short} == {1, 2}  # two ranks need no recomputation
    assert {x.degrees["ring"] for x in seqpar.plan("qwen3-0.6b", 32768, 64, replicas=1).choices} == {4, 8, 16, 32, 64}
    scarce = Counter(x.degrees["ring"] for x in planned("llama3-8b", 1 << 20, 64).choices if x.strategy == "ring")
    assert set(scarce) == {2, 4, 8, 16, 32, 64}  # all of them recompute


def test_what_layers_compute_is_recorded_once_for_all_ways_to_shard_weights() -> None:
    base = Setting(
        H100, Mask.causal(), 4096, model=MODELS["llama3-8b"], ring=2, replicas=64, accumulation=4
    )  # it waits
    cost, switches = StepCost(base), Switches("full")
    for weights in WEIGHTS:
        other = replace(base, weights=weights)
        shared, own = cost.with_weights(weights), StepCost(other)
        assert step(other, switches, shared) == step(other, switches, own)
        assert shared.recorded is cost.recorded
        assert len(cost.recorded) == 2  # forward and backward


def test_switches_are_priced() -> None:
    base = Setting(H100, Mask.causal(), 131072, model=MODELS["llama3-8b"], ring=8, layout="zigzag")
    cost = StepCost(base)

    def of(**options: Any) -> tuple[float, float]:
        choice = step(base, Switches(**options), cost)
        return choice.seconds, choice.memory.activations + choice.memory.working + choice.memory.logits

    plain, kept_attention, full = (of(recompute=x) for x in ("none", "keep_attention", "full"))
    assert plain[0] < kept_attention[0] < full[0]
    assert plain[1] > kept_attention[1] > full[1]
    assert of(offload=True)[1] < plain[1] <= of(chunked_loss=False)[1]
    assert of(tiled_mlp=True)[0] > plain[0] and of(tiled_mlp=True)[1] < plain[1]
    extra = [of(recompute=x, head_groups=4)[0] - of(recompute=x)[0] for x in ("keep_attention", "full")]
    assert 0 < extra[0] < extra[1]  # the projections again, and attention unless its results are kept


@dataclass(frozen=True)
class Pointwise(LayerPart):
    """A kind of layer that the planner does not have: two matrices."""

    width: int

    @property
    def row(self) -> PartRow:
        return PartRow(self.hidden * self.width, self.width * self.hidden, takes_memory=False)

    def kept(self, split: Split, pieces: int = 1) -> float:
        return 2.0 * split.most_tokens * self.width


def test_a_new_kind_of_layer_is_one_class() -> None:
    """Its weights, FLOPs and memory count, and what the package lacks for it is not planned."""
    model, own = MODELS["qwen3-0.6b"], Pointwise(1024, 4096)
    (layer,) = model.layers
    wide = replace(model, layers=(replace(layer, parts=(*layer.parts, own)),))
    assert wide.parameters - model.parameters == 28 * 2 * 1024 * 4096
    assert wide.token_flops - model.token_flops == 2 * 28 * 2 * 1024 * 4096
    plain, more = (seqpar.plan(x, 1 << 15, 2, replicas=2, recompute="none", offload=False).best for x in (model, wide))
    kept = 28 * (2 * 4096 + 4 * 1024) * (1 << 15)  # with the norm's input and output
    assert more.memory.activations - plain.memory.activations == kept
    assert more.compute_s > plain.compute_s and more.mfu > plain.mfu
    assert {x.switches.saving for x in seqpar.plan(wide, 1 << 18, 2).choices} == {0}


def test_heads_with_windows_need_less_than_heads_without() -> None:
    """A layer with both lies between the two, and the order of the heads does not matter: with an all-to-all, the rank
    with the most work counts."""
    causal, window, seconds = Mask.causal(), Mask.sliding_window(4095), dict[Mask, dict[Any, float]]()
    orders = [Mask.by_heads([causal, window]), Mask.by_heads([window, causal])]
    for mask in (causal, window, *orders):
        plan = seqpar.plan("llama3-8b", 1 << 17, 8, mask=mask)
        assert plan.mask == mask
        seconds[mask] = {(x.strategy, *x.degrees.items()): x.seconds for x in plan.choices}
    rings = [key for key in seconds[causal] if key[0] == "ring" and all(key in x for x in seconds.values())]
    assert rings
    for key in rings:
        assert seconds[window][key] < seconds[orders[0]][key] < seconds[causal][key]
    assert seconds[orders[0]] == seconds[orders[1]]


def test_documents_need_less_than_one_sequence() -> None:
    one, many = (seqpar.plan("llama3-8b", 262144, 8, mask=mask) for mask in (None, mask_of("mix:magi", 262144)))
    assert many.best.tokens_per_s > 1.5 * one.best.tokens_per_s
    assert {x.layout for x in many.choices if x.degrees["ring"] > 2} == {"balanced"}
    assert {x["layout"] for x in json.loads(json.dumps(many.as_dict()))["choices"]} == {"contiguous", "balanced"}
    code = many.code(next(x for x in many.choices if x.layout == "balanced" and x.strategy == "ring" and x.possible))
    assert 'layout="balanced"' in code and "--layout balanced" in code and "with the --mask that" in code
    lengths = document_mix("wlb", 1 << 20).starts[0]
    assert len(lengths) > 100 and document_mix("wlb", 1 << 20) == document_mix("wlb", 1 << 20)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "deepseek-v3.2"}, "256 experts in a layer, .* at most 128"),
        ({"model": "llama3-9b"}, r"did you mean 'llama3-8b'.*, or pass the path of the model's config\.json"),
        (
            {"model": NARROW, "head_groups": 4},
            "head_groups=4: expected a divisor of the KV .* 2 KV heads",
        ),
        ({"model": LATENT, "head_groups": 2}, "head_groups=2: .* has no KV heads, but latents"),
        ({"hardware": "h1000"}, "did you mean 'h100'.*, or pass a YAML or JSON file with the rates of your GPUs"),
        ({"hardware": {"network": 1e9}}, "name a base"),
        ({"hardware": {"base": "h100", "netwrok": 1e9}}, "did you mean 'network'"),
        ({"hardware": {"base": "h100", "network": "fast"}}, "expected a number"),
        ({"hardware": {"base": "h100", "network": float("nan")}}, "network=nan: expected a positive"),
        ({"hardware": {"base": "h100", "network": float("inf")}}, "network=inf: expected a positive"),
        ({"hardware": {"base": "h100", "gpus_per_host": 2.5}}, "gpus_per_host=2.5: expected a whole number"),
        ({"hardware": {"base": "h100", "device": "tpu"}}, "device='tpu'"),
        ({"hardware": {"base": "h100", "attention": 5}}, "attention=5: expected a kernel and its rates"),
        ({"hardware": {"base": "h100", "attention": {}}}, "expected a kernel and its rates"),
        ({"hardware": {"base": "h100", "attention": {"a": "3e14"}}}, "a='3e14': expected FLOP/s forward and backward"),
        ({"hardware": {"base": "h100", "attention": {"a": [3e14]}}}, "expected FLOP/s forward and backward"),
        ({"hardware": {"base": "h100", "attention": {"a": [0, 3e14]}}}, "a=0: expected a positive"),
        ({"hardware": {"base": "h100", "attention": {"a": ["fast", 1]}}}, "a='fast': expected a number"),
        ({"seq_len": 0}, "seq_len=0: expected at least 1"),
        ({"seq_len": 1 << 40}, "seq_len=1099511627776: expected at most 2147483647"),
        ({"seq_len": 4}, "at least one token for each"),
        ({"ranks": 0}, "ranks=0: expected at least 1"),
        ({"ranks": 4099, "seq_len": 8192, "replicas": 1}, "ranks=4099: expected a product of heads"),
        ({"replicas": 3}, "expected a divisor of ranks=8"),
        ({"kernel": "flash9"}, "did you mean"),
        ({"recompute": "none", "offload": True}, "offloading needs recompute"),
        ({"recompute": "some"}, "Choose one of none, keep_attention, full"),
        ({"mask": Mask.documents([0, 8])}, "cu_seqlens"),
        ({"mask": Mask.by_heads([Mask.causal()] * 3)}, "by_heads of 3 groups, but attention has 32 query heads"),
        ({"mask": Mask.by_heads([Mask.causal()] * 2), "head_groups": 2}, "head_groups=2: not with Mask.by_heads"),
        ({"deterministic": True}, "deterministic=True: expected False or 'invariant'; with True the ranks send"),
        ({"deterministic": "invariant", "kernel": "flash3"}, "kernel='flash3': .* has kernels of its own"),
        ({"deterministic": "invariant", "hardware": "b200"}, "kernel='invariant' has not been measured on b200"),
        ({"deterministic": "invariant", "model": LATENT}, "deterministic='invariant': .* has latent attention"),
    ],
)
def test_bad_input(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        seqpar.plan(**{"model": "llama3-8b", "seq_len": 1024, "ranks": 8, **arguments})


@pytest.mark.parametrize("arguments", [{"hardware": None}, {"mask": "causal"}, {"seq_len": "1M"}])
def test_input_of_another_type(arguments: dict[str, Any]) -> None:
    ((name, value),) = arguments.items()
    with pytest.raises(TypeError, match=f"{name}={value!r}: expected"):
        seqpar.plan(**{"model": "llama3-8b", "seq_len": 1024, "ranks": 8, **arguments})


def test_tokens_in_words() -> None:
    assert [read_batch(x, 1 << 20) for x in ("64", "4M")] == [64, 4]
    assert [read_tokens(x) for x in ("131072", "128K", "1M", "1.5k", "1_000")] == [131072, 131072, 1 << 20, 1536, 1000]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seq_len": "1X"}, "expected a number of tokens"),
        ({"mask": "causl"}, "did you mean 'causal'"),
        ({"seq_len": "inf"}, "expected a number of tokens"),
        ({"seq_len": "nan"}, "expected a number of tokens"),
        ({"mask": "window:x"}, "after the colon"),
        ({"mask": "window:²"}, "after the colon"),
        ({"mask": "causal:77"}, "expected causal alone"),
        ({"hardware": "h10O"}, "did you mean .h100.*, or pass a YAML or JSON file with the rates of your GPUs"),
        ({"hardware": "missing.yaml"}, "No such file"),
        ({"hardware": "bad.yaml"}, "^hardware=bad.yaml: cannot be parsed: [^\n]+$"),
        ({"csv": Path("/proc/nowhere/x.csv")}, "can be written"),
        ({"charts": Path("/proc/nowhere")}, "--charts /proc/nowhere: .* can be written"),
        ({"gpus": 0}, "gpus=0: expected at least 1"),
        ({"dp": 3}, "dp=3: expected a divisor of gpus=2"),
        ({"top": 0}, "top=0: expected at least 1"),
        ({"row": 0}, "row=0: expected at least 1"),
        ({"row": 3, "top": 2}, "row=3: expected at most 2, the number of rows"),
        ({"model": "lama3-8b"}, r"did you mean 'llama3-8b'.* config\.json"),
        ({"global_batch": "12K"}, "expected a multiple of seq-len=8192"),
        ({"global_batch": "x"}, "expected a number of sequences"),
        ({"state_bytes": -1.0}, "state_bytes=-1.0: expected the bytes"),
        ({"deterministic": "yes"}, "deterministic='yes': expected False or 'invariant'"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("base: [h100")
    run: Callable[..., None] = plan_command
    with pytest.raises(CommandError, match=words) as error:
        run(**{"model": "llama3-8b", "seq_len": "8K", "gpus": 2, **options})
    assert error.value.code == 2


def test_the_sample_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    command, *lines = page.split("```\n$ ")[1].split("\n```")[0].splitlines()
    assert command == "seqpar plan --model llama3-8b --seq-len 1M --gpus 64 --hardware h100"
    plan_command("llama3-8b", "1M", 64)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == lines


def test_charts_and_files_are_of_the_rows_of_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned("llama3-8b", 1 << 16, 2)
    rows = shown(plan.choices)
    drawn: list[Any] = []
    monkeypatch.setattr("seqpar.cli.plan._save", lambda axes, path: drawn.append(axes))
    draw_charts(plan, rows, tmp_path)
    for axes in drawn:
        assert [x.get_text().split()[0] for x in axes.get_yticklabels()] == [str(i + 1) for i in range(len(rows))]
    (lines,) = (x for x in drawn[0].collections if len(x.get_segments()) == len(rows))
    for i, (row, segment) in enumerate(zip(rows, lines.get_segments(), strict=True)):
        assert list(segment[:, 0]) == pytest.approx([row.low_s, row.high_s])
        bars = [bar for bar in drawn[0].patches if round(bar.get_y() + 0.4) == i]
        assert sum(bar.get_width() for bar in bars) == pytest.approx(row.seconds)
    plan_command("llama3-8b", "64K", 2, row=2)
    assert capsys.readouterr().out == plan.code(rows[1])
    plan_command("llama3-8b", "64K", 2, code=True)
    assert capsys.readouterr().out == plan.code()


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_command("llama3-8b", "64K", 2, csv=tmp_path / "choices.csv", charts=tmp_path / "charts", as_json=True)
    printed = json.loads(capsys.readouterr().out)
    rows = (tmp_path / "choices.csv").read_text().splitlines()
    assert len(printed["choices"]) == len(rows) - 1
    assert printed["choices"][0]["bytes_sent"].keys() == {WITHIN, BETWEEN}
    assert sorted(path.name for path in (tmp_path / "charts").iterdir()) == ["memory.png", "seconds.png"]
    monkeypatch.setenv("COLUMNS", "40")
    plan_command("llama3-8b", "64K", 2, top=3)
    printed = capsys.readouterr().out
    assert "tokens/s" in printed and max(map(len, printed.splitlines())) <= 80
    plan_command("llama3-8b", "1M", 8, global_batch="1000000")  # steps of a million seconds
    rows = [line for line in capsys.readouterr().out.splitlines() if re.search(r"\d(\.\d|\d)[MG]-", line)]
    assert rows and {len(row) for row in rows} == {80}
    plan_command("llama3-70b", "128K", 16)
    assert len(capsys.readouterr().out.splitlines()) <= 25
    with pytest.raises(CommandError, match=r"nothing fits: .* at least 16 GPUs") as error:
        plan_command("llama3-70b", "128K", 8)
    assert error.value.code == 1


def test_sharing_a_prompt() -> None:
    """Tokens, pairs and received rows are those of the masks, counted one by one."""
    prompt, answers, ranks = 37, [5, 11, 5], 2
    found = prompt_sharing(prompt, answers, ranks=ranks, layout="contiguous", tile=1)
    tree = Mask.tree([-1, 0, 0, 0], [36, 6, 12, 6])
    rows = [tree, *(Mask.causal() for _ in answers)]
    lengths = [60, *(prompt + x for x in answers)]
    assert found.tokens == (60, sum(lengths[1:]))
    pairs, received = [[0, 0], [0, 0]], [[0, 0], [0, 0]]
    for mask, length in zip(rows, lengths, strict=True):
        seen, half = mask.dense(length), -(-length // 2)
        for rank, mine in enumerate((slice(0, half), slice(half, length))):
            pairs[mask != tree][rank] += int(seen[mine].sum())
            received[mask != tree][rank] += int(seen[mine].any(0).sum() - seen[mine, mine].any(0).sum())
    assert found.pairs == (max(pairs[0]), max(pairs[1]))
    assert found.rows_received == (max(received[0]), max(received[1]))
    assert found.pays and str(found).startswith("share_prompts pays: tokens 60 instead of 132, ")
    for lengths in ([100], [100] * 8):  # nothing to share, or tiles of which little is seen
        assert "does not pay" in str(prompt_sharing(2, lengths))
    for wrong, words in (((0, [1]), "prompt=0"), ((1, []), "answers=.*expected at least one"), ((1, [0]), "answers=0")):
        with pytest.raises(ValueError, match=words):
            prompt_sharing(*wrong)
    with pytest.raises(ValueError, match="rows of prompt and answer of at least 8 tokens"):
        prompt_sharing(3, [4], ranks=8)


def test_the_command_says_whether_sharing_pays(capsys: pytest.CaptureFixture[str]) -> None:
    assert mask_of("answers:2x4", 20) == Mask.tree([-1, 0, 0], [10, 5, 5])
    for text in ("answers", "answers:4", "answers:0x4", "answers:4x", "answers:4x5x6"):
        with pytest.raises(ValueError, match=f"mask='{text}': expected answers and the tokens of each one"):
            mask_of(text, 1000)
    with pytest.raises(ValueError, match="a sequence of 19 tokens leaves none for the prompt"):
        mask_of("answers:4x4", 19)
    plan_command("llama3-8b", "98319", 8, mask="answers:16x4096")
    assert "share_prompts pays: tokens 98,319 instead of 589,824" in " ".join(capsys.readouterr().out.split())
