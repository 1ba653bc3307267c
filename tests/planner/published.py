"""Published times of training steps and of attention, as settings of the planner.

A row is here if its source names the model, the GPUs, the lengths, the split of the ranks and the recomputation, so
that the planner can forecast it. Rows at even places calibrate ``planner/calibration.json``; rows at odd places are
held out. The order is the order of the sources. ``LEFT_OUT`` names the other published rows, and why they are not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from seqpar import Mask
from seqpar.planner.attention import SelfAttention
from seqpar.planner.forecast import Calibration, kind_of
from seqpar.planner.hardware import HARDWARE, AttentionRate
from seqpar.planner.mixes import document_mix
from seqpar.planner.model import MODELS
from seqpar.planner.setting import Setting
from seqpar.planner.shape import ModelShape
from seqpar.planner.split import Switches
from seqpar.planner.step import StepCost, attention_seconds, step

from ..settings import changed, decoder

LEFT_OUT = {
    "pipeline parallelism, which is not modelled": (
        "Llama 3 405B (table 4), TorchTitan 405B, NeMo and Megatron-Bridge rows with PP > 1, WLB-LLM, pith-train"
    ),
    "scores in memory instead of a fused kernel": "Korthikanti et al., tables 4 and 5",
    "the optimizer on the CPU takes much of the step": "ALST at 32K, Hugging Face's blog on Ulysses",
    "settings or the counting of FLOPs are not named": (
        "DeepSpeed-Ulysses figures 3 to 5, FPDT, UPipe, prime-rl #2418, USP's training tables, vllm-omni #7589"
    ),
    "no rate of the kernel for its head_dim or GPU": (
        "USP with head_dim 32 and on PCIe machines, MagiAttention PR #353 (GB300), Megatron-Bridge on GB300, MaxText, "
        "RingX"
    ),
    "a known defect": "TRL, Qwen3-4B before its fix of offloading",
}

ALONE = "attention alone"
CAUSAL = Mask.causal()
A100, H100, H200, B200 = (HARDWARE[name] for name in ("a100", "h100", "h200", "b200"))
# NVIDIA/nccl #1374: 200 GB/s in one direction, 215 GB/s bus bandwidth of an all-reduce.
H800 = replace(H100, name="h800", p2p=200e9, peer=200e9, all_to_all=200e9, all_gather=200e9)
H100_500W = replace(H100, name="h100-500w", memory_bytes=96e9, memory_bandwidth=2.4e12)  # TorchTitan's
GB200 = replace(
    B200, name="gb200", peak_flops=2500e12, gemm_flops=1822e12, attention={"cudnn": AttentionRate(1622e12, 1226e12)}
)
FP8 = {"h100": 1402.6e12, "h100-500w": 1402.6e12, "h200": 1453.4e12, "b200": 3432.5e12, "gb200": 3615.6e12}
LLAMA_7B = decoder("llama2-7b", 32, 4096, 32, 32, 128, 11008, 32000)
LLAMA_7B_GQA = replace(changed(LLAMA_7B, SelfAttention, kv_heads=8), name="llama-7b-gqa")
LLAMA_8B, LLAMA_70B, LLAMA_405B = (MODELS[f"llama3-{size}"] for size in ("8b", "70b", "405b"))


@dataclass(frozen=True)
class Row:
    """A published time.

    Attributes:
        source: where it is published.
        what: the run, in a few words.
        seconds: of a step, or of attention alone.
        setting: the run.
        switches: what the step recomputes and offloads; None for attention alone.
        passes: of attention alone: "forward", "backward" or "both".
        masks: if the time is the mean over several masks, these masks.
    """

    source: str
    what: str
    seconds: float
    setting: Setting
    switches: Switches | None = None
    passes: str = "both"
    masks: tuple[Mask, ...] = ()

    def forecast(self, calibration: Calibration) -> float:
        """The expected seconds."""
        masks = self.masks or (self.setting.mask,)
        settings = [replace(self.setting, mask=mask) for mask in masks]
        settings = [replace(s, hardware=calibration.hardware(s)) for s in settings]
        if self.switches is not None:
            return step(settings[0], self.switches, StepCost(settings[0])).seconds
        passes = ("forward", "backward") if self.passes == "both" else (self.passes,)
        return sum(attention_seconds(s, passes) for s in settings) / len(masks)

    @property
    def kind(self) -> str:
        """The kind of run: a key of ``KINDS``, or attention alone."""
        if self.switches is None and not self.setting.mask.is_local:
            return ALONE
        return kind_of(self.setting)


def step_row(
    source: str, what: str, setting: Setting, switches: Switches, *, seconds: float = 0, per_gpu: float = 0
) -> Row:
    """A row of a step, whose time is published in seconds or in tokens per second and GPU."""
    tokens = setting.seq_len * setting.batch * setting.replicas * setting.accumulation
    return Row(source, what, seconds or tokens / setting.ranks / per_gpu, setting, switches)


def fp8(setting: Setting) -> Setting:
    """The same with linear layers in FP8."""
    return replace(setting, hardware=replace(setting.hardware, gemm_flops=FP8[setting.hardware.name]))


def steps() -> Iterator[Row]:
    full = Switches("full")
    alst = Setting(H100, CAUSAL, 0, model=LLAMA_8B, kernel="flash2", state_bytes=6)
    for what, tokens, gpus, s, switches in (
        ("0.5M", 500_000, 1, 1010, Switches("full", True, True, True)),
        ("1.1M", 1_100_000, 8, 564, full),
        ("1.2M", 1_200_000, 8, 703, Switches("full", False, True, True)),
        ("2.4M", 2_400_000, 8, 2610, Switches("full", True)),
        ("3.8M", 3_800_000, 8, 6455, Switches("full", True, True, True)),
        ("15.5M", 15_500_000, 32, 26709, Switches("full", True, True, True)),
    ):
        where = replace(alst, seq_len=tokens, ulysses=gpus)
        yield step_row("ALST, arXiv 2506.13996", f"8B {what} on {gpus} H100", where, switches, seconds=s)
    yield step_row(
        "ALST, arXiv 2506.13996", "8B 160K on 8 H100, dp", replace(alst, seq_len=160_000, replicas=8), full, seconds=123
    )
    trl = Setting(H100, CAUSAL, 1 << 20, model=MODELS["qwen3-8b"], gather=True, layout="zigzag", kernel="cudnn")
    for name, tokens, gpus, s in (
        ("qwen3-0.6b", 1, 8, 137), ("qwen3-8b", 1, 8, 364), ("qwen3-30b-a3b", 1, 8, 483), ("qwen3-32b", 1, 8, 1295),
        ("qwen3-0.6b", 4, 8, 2135), ("qwen3-8b", 2, 16, 696), ("qwen3-8b", 4, 32, 1346),
    ):  # fmt: skip
        where = replace(trl, model=MODELS[name], seq_len=tokens << 20, ring=gpus)
        switches = Switches("full", True, True, name == "qwen3-32b")
        yield step_row("TRL #6845, #6846", f"{name} {tokens}M on {gpus} H100", where, switches, seconds=s)
    for tokens, gpus, ms in (
        (131072, 64, 32432.1), (131072, 128, 17052.5), (131072, 256, 9886.7), (65536, 64, 9676.8),
        (262144, 256, 33486.5),
    ):  # fmt: skip
        # Global batch 8. It names no degree: 32 ranks, as many as heads. It counts all pairs, and so do its kernels.
        where = Setting(
            A100,
            Mask.full(),
            tokens,
            model=MODELS["gpt-7b"],
            ulysses=32,
            replicas=gpus // 32,
            accumulation=8 * 32 // gpus,
        )
        source = "DeepSpeed-Ulysses, arXiv 2309.14509, tables 2 and 3"
        yield step_row(
            source, f"7B {tokens >> 10}K on {gpus} A100", where, Switches("full", chunked_loss=False), seconds=ms / 1e3
        )
    keep = Switches("keep_attention", chunked_loss=False)
    titan = Setting(H100_500W, CAUSAL, 8192, 2, model=LLAMA_8B, replicas=8, kernel="flash2")
    source = "TorchTitan, llama3_h100_202412"
    for gpus, rates in ((8, (5762, 6667, 8532)), (128, (5605, 6514, 8380))):
        for how, rate in zip(("eager", "compiled", "FP8"), rates, strict=True):
            where = replace(titan, replicas=gpus)
            where = fp8(where) if how == "FP8" else where
            yield step_row(source, f"8B 8K on {gpus} H100, {how}", where, keep, per_gpu=rate)
    for cp, rate in ((1, 3890), (2, 2540), (4, 1071), (8, 548)):
        where = replace(
            titan, seq_len=32768 * cp, batch=1, ring=cp, replicas=8 // cp, layout="zigzag" if cp > 1 else "contiguous"
        )
        yield step_row(
            source,
            f"8B {32 * cp}K on 8 H100, CP {cp}, FP8",
            fp8(where),
            Switches("full", chunked_loss=False),
            per_gpu=rate,
        )
    where = replace(titan, model=LLAMA_70B, batch=16, tensor=8, replicas=32)
    source = "TorchTitan, asyncTP_llama3_h100_2025-06"
    yield step_row(source, "70B 8K on 256 H100, TP 8", where, Switches("full", chunked_loss=False), per_gpu=652.4)
    where = replace(titan, batch=12, tensor=8, replicas=8)
    yield step_row(source, "8B 8K on 64 H100, TP 8", where, keep, per_gpu=4809)
    for gpus, rate in ((32, 10938), (64, 10753)):
        where = replace(titan, hardware=H200, replicas=gpus, kernel="cudnn")
        yield step_row(
            "TorchTitan, llama3-8b_h200_202506", f"8B 8K on {gpus} H200, FP8", fp8(where), keep, per_gpu=rate
        )
    none = Switches(chunked_loss=False)
    source = "Megatron-Bridge 25.11"
    for model, gpu, gpus, batch, total, rate in (
        (LLAMA_8B, H100, 8, 1, 128, 14451), (LLAMA_8B, B200, 8, 2, 128, 30624), (LLAMA_8B, GB200, 8, 2, 128, 31508),
        (LLAMA_70B, GB200, 64, 2, 256, 4312),
    ):  # fmt: skip
        kernel = "cudnn" if gpu is not B200 else None
        where = Setting(
            gpu, CAUSAL, 8192, batch, model=model, replicas=gpus, kernel=kernel, accumulation=total // gpus // batch
        )
        yield step_row(source, f"{model.name} 8K on {gpus} {gpu.name}, FP8", fp8(where), none, per_gpu=rate)
    nemo = Setting(B200, CAUSAL, 0, model=LLAMA_8B, layout="zigzag")
    for k, tensor, ring, replicas, rate in (
        (8, 1, 1, 2, 28854),
        (32, 1, 2, 4, 16817),
        (128, 2, 4, 4, 6322),
        (512, 4, 8, 4, 1862),
        (1024, 4, 16, 4, 949),
    ):
        where = replace(
            nemo, seq_len=k << 10, tensor=tensor, ring=ring, replicas=replicas, accumulation=4096 // k // replicas
        )
        yield step_row(
            "NeMo 25.04, long sequences", f"8B {k}K on {where.ranks} B200, FP8", fp8(where), none, per_gpu=rate
        )
    nemo = replace(nemo, model=LLAMA_7B, hardware=H100, kernel="flash2")
    for k, tensor, ring, replicas, rate in (
        (4, 1, 1, 4, 16665), (16, 2, 1, 8, 10090), (32, 2, 2, 8, 6690), (64, 4, 2, 8, 4022), (128, 4, 4, 8, 2258),
        (256, 4, 8, 8, 1215), (512, 8, 16, 4, 635), (1024, 8, 32, 4, 317),
    ):  # fmt: skip
        where = replace(
            nemo,
            seq_len=k << 10,
            tensor=tensor,
            ring=ring,
            replicas=replicas,
            accumulation=max(1, 4096 // k // replicas),
        )
        yield step_row(
            "NeMo 24.03, long sequences", f"7B {k}K on {where.ranks} H100, FP8", fp8(where), none, per_gpu=rate
        )
    loong = Setting(A100, CAUSAL, 131072, model=LLAMA_7B_GQA)
    shardings: tuple[tuple[str, dict[str, Any], float], ...] = (
        ("Ulysses 32", {"ulysses": 32}, 629.9), ("CP 32", {"ring": 32, "layout": "zigzag"}, 706.2),
        ("8 x 4", {"ulysses": 8, "ring": 4, "layout": "zigzag"}, 838.1),
    )  # fmt: skip
    for what, degrees, per_gpu in shardings:
        where = replace(loong, **degrees)
        yield step_row(
            "LoongTrain, arXiv 2406.18485",
            f"7B 128K on 32 A100, {what}",
            where,
            Switches("keep_attention"),
            per_gpu=per_gpu,
        )


def attention_shape(heads: int, kv_heads: int) -> ModelShape:
    return decoder("attention", 1, heads * 128, heads, kv_heads, 128, heads * 512, 64)


def attention_alone() -> Iterator[Row]:
    """Rows of attention alone; rates of several calls a second are of calls with the whole sequence."""
    source = "ring-flash-attention README"
    packings = ((8192,), (256, 7392, 544), (4096, 4096), (3104, 3200, 1600, 160, 128))  # each length times 8 ranks
    packed = tuple(Mask.documents([8 * x for x in accumulate(lengths, initial=0)]) for lengths in packings)
    for gpu, batch_rates, varlen_rates in (
        (H800, (38.5, 10.4, 63.0, 17.4, 55.0, 16.0), (52.4, 14.4, 74.8, 21.4, 60.8, 16.4)),
        (A100, (24.0, 6.2, 38.2, 10.6, 32.5, 9.75), (33.1, 8.7, 47.9, 13.4, 34.3, 9.7)),
    ):
        base = Setting(gpu, CAUSAL, 65536, model=attention_shape(32, 8), ring=8, kernel="flash2")
        for i, rate in enumerate(batch_rates):
            layout: Any = ("contiguous", "zigzag", "striped")[i // 2]
            passes = ("forward", "both")[i % 2]
            yield Row(
                source, f"ring {layout} on 8 {gpu.name}, {passes}", 1 / rate, replace(base, layout=layout), None, passes
            )
        for i, rate in enumerate(varlen_rates):
            options: dict[str, Any] = ({}, {"layout": "zigzag"}, {"gather": True})[i // 2]
            passes = ("forward", "both")[i % 2]
            where = replace(base, mask=packed[1], **options)
            yield Row(
                source,
                f"varlen {('ring', 'zigzag', 'all-gather')[i // 2]} on 8 {gpu.name}, {passes}",
                1 / rate,
                where,
                None,
                passes,
                packed,
            )
    for ulysses, layout, rate in (
        (8, "contiguous", 20.983), (4, "contiguous", 15.496), (4, "zigzag", 21.464), (4, "striped", 20.54),
        (2, "contiguous", 13.181), (2, "zigzag", 21.201), (2, "striped", 20.355), (1, "contiguous", 11.332),
        (1, "zigzag", 17.778), (1, "striped", 17.057),
    ):  # fmt: skip
        where = Setting(
            A100, CAUSAL, 131072, 2, model=attention_shape(8, 8), ring=8 // ulysses, ulysses=ulysses, layout=layout
        )
        yield Row(
            "USP, long-context-attention", f"Ulysses {ulysses}, {layout}, on 8 A100", 1 / rate, where, None, "forward"
        )
    ways: dict[str, dict[str, Any]] = {
        "Ulysses": {}, "all-gather": {"gather": True, "layout": "zigzag"}, "USP": {"layout": "zigzag"},
    }  # fmt: skip

    def magi(gpu: Any, gpus: int, how: str, mask: Mask, each: int) -> Setting:
        ulysses = {"Ulysses": gpus, "all-gather": 1, "USP": 8}[how]
        return Setting(
            gpu, mask, each * gpus, model=attention_shape(64, 8), ring=gpus // ulysses, ulysses=ulysses, **ways[how]
        )

    source = "MagiAttention, charts"
    for gpus in (8, 16, 32, 64):
        for how in ways:
            flops = 2.0 * (8192 * gpus) ** 2 * 64 * 128
            yield Row(
                source,
                f"{how} on {gpus} H100, causal",
                flops / gpus / 580e12,
                magi(H100, gpus, how, CAUSAL, 8192),
                None,
                "forward",
            )
    charts: tuple[tuple[Any, int, str, str, tuple[int, ...]], ...] = (
        (H100, 8192, "Ulysses", "forward", (278, 198, 186, 163)),
        (H100, 8192, "all-gather", "forward", (288, 292, 240, 180)),
        (H100, 8192, "USP", "forward", (260, 252, 254, 192)),
        (H100, 8192, "Ulysses", "backward", (332, 294, 277, 248)),
        (H100, 8192, "USP", "backward", (325, 309, 284, 194)),
        (B200, 16384, "all-gather", "forward", (717, 531, 395, 295)),
        (B200, 16384, "USP", "forward", (630, 461, 445, 266)),
        (B200, 16384, "Ulysses", "backward", (594, 430, 397, 402)),
    )
    for gpu, each, how, passes, rates in charts:
        for gpus, rate in zip((8, 16, 32, 64), rates, strict=True):
            mask = document_mix("magi", each * gpus, longest=each * gpus // 4)
            flops = (4.0 if passes == "forward" else 10.0) * visible(mask, each * gpus) * 64 * 128
            where = magi(gpu, gpus, how, mask, each)
            yield Row(
                source, f"{how} on {gpus} {gpu.name}, packed, {passes}", flops / gpus / rate / 1e12, where, None, passes
            )


def visible(mask: Mask, seq_len: int) -> int:
    """Visible pairs of causal documents."""
    (starts,) = mask.starts
    borders = [*starts, seq_len]
    return sum((b - a) * (b - a + 1) // 2 for a, b in pairwise(borders))


ROWS = (*steps(), *attention_alone())
CALIBRATING, HELD_OUT = ROWS[::2], ROWS[1::2]
