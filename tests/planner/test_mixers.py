"""The planner's mixers and indexers: weights, FLOPs, bytes and memory of transformers' layers and of the runtime."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import seqpar
from seqpar import Mask, Sharding
from seqpar.comm.collectives import start_all_to_all
from seqpar.comm.waiting import Pending
from seqpar.hf.mechanisms.mixers import _FUNCTIONS
from seqpar.placement.layout import LAYOUTS
from seqpar.planner.chosen_keys import ChosenKeys
from seqpar.planner.compressed_keys import CompressedKeys
from seqpar.planner.memory import layer_activations
from seqpar.planner.mixer import Mixer
from seqpar.planner.mlp import Mlp
from seqpar.planner.model import MODELS, model_of
from seqpar.planner.rank import RankTimeline
from seqpar.planner.setting import Setting
from seqpar.planner.shape import Layer, ModelShape
from seqpar.planner.split import WITHIN, Switches
from seqpar.planner.step import StepCost, step

from ..core.test_hosts import simulated
from ..settings import H100, changed, sent_bytes
from ..strategies.test_activation_memory import saved_bytes

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "head_dim": 16, "pad_token_id": None,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
}  # fmt: skip
MAMBA_2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8, "moe_intermediate_size": 32,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_next": {**DELTA, **EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "olmo_hybrid": {**DELTA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "kimi_linear": {
        **LATENT, "q_lora_rank": None, "num_experts": 4, "num_experts_per_token": 2, "linear_head_dim": 16,
        "linear_num_heads": 6, "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 8,
        "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48, "n_shared_experts": 1,
    },
    "granitemoehybrid": {
        **MAMBA_2, "layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 4,
        "num_experts_per_tok": 2, "shared_intermediate_size": 48,
    },
    "bamba": {**MAMBA_2, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**MAMBA_2, "mamba_d_ssm": 128},
    "jamba": {"mamba_dt_rank": 6, "attn_layer_period": 4, "attn_layer_offset": 2, **EXPERTS},
    "lfm2": {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 16},
    "lfm2_moe": {
        "conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 2, **EXPERTS, "moe_intermediate_size": 32,
        "num_dense_layers": 1,
    },
    "deepseek_v32": {
        **LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v4": {
        "layer_types": [
            "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32}, "o_groups": 4,
        "o_lora_rank": 8, "q_lora_rank": 24, "num_key_value_heads": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8, "sliding_window": 8,
    },
    "glm_moe_dsa": {**LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "index_topk_freq": 2},
}  # fmt: skip


def shape_of(kind: str) -> ModelShape:
    return model_of({"model_type": kind, **SIZES, **CONFIGS[kind]})


def mixer_layer(shape: ModelShape) -> Layer:
    """The first layer with a mixer."""
    return next(layer for layer in shape.layers if any(isinstance(part, Mixer) for part in layer.parts))


def mixer_of(shape: ModelShape) -> Mixer:
    return next(part for part in mixer_layer(shape).parts if isinstance(part, Mixer))


def transformers_config(kind: str) -> Any:
    auto = pytest.importorskip("transformers").AutoConfig
    return auto.for_model(kind, **{**SIZES, **CONFIGS[kind]})


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_are_those_of_transformers(kind: str) -> None:
    """All weights, and the weights of matrices without routers; the same from the config object and its entries, whose
    reading does not depend on the kind: of every third one."""
    config = transformers_config(kind)
    with torch.device("meta"):
        model = sys.modules["transformers"].AutoModelForCausalLM.from_config(config)
    words = "gate.weight", "router", "A_log", "position_bias", "hc_head.hc_fn"
    others = sum(
        p.numel() for name, p in model.named_parameters()
        if p.dim() == 1 or any(word in name for word in words)
    )  # fmt: skip
    before = config._attn_implementation
    shape = model_of(config)
    assert config._attn_implementation == before  # the caller may train with this configuration
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.other_weights == others
    if [*CONFIGS].index(kind) % 3 == 0:
        assert model_of(config.to_diff_dict()) == shape


def module_of(kind: str) -> tuple[nn.Module, Any]:
    """A mixer of transformers, and its file."""
    config = transformers_config(kind)
    config._attn_implementation = "eager"
    model = sys.modules["transformers"].AutoModel.from_config(config, dtype=torch.bfloat16)
    names = ("linear_attn", "mamba", "conv", "mixer", "self_attn")
    mixer = next(m for name in names for n, m in model.named_modules() if n.endswith(f"0.{name}"))
    return mixer, sys.modules[type(mixer).__module__]


class Kernel(torch.autograd.Function):
    """Stands in for a kernel: a result that depends on the first tensor, and what the kernel keeps."""

    @staticmethod
    def forward(ctx: Any, kept: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors, torch.empty(kept, dtype=torch.uint8))
        return tensors[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise NotImplementedError


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
    of_chunks = 2 if g.dim() == 4 else 1  # products of a chunk's 64 tokens with one another
    return Kernel.apply(of_chunks * 2 * v[..., 0].numel() * 64, v, q, k, g, beta), None


def scan_2(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **_: Any) -> Tensor:
    return Kernel.apply(4 * dt.numel() + x.nbytes, x, dt, B, C)


def scan_1(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, z: Any = None, **_: Any) -> Tensor:
    return Kernel.apply(x.nbytes, x, dt, B, C, z)


KERNELS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": lambda x, weight, bias=None, **_: Kernel.apply(0, x),
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": scan_2,
    "mamba2_split_conv1d_scan_combined": lambda *_, **__: None,
    "mamba_selective_scan": scan_1,
}


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "kimi_linear", "bamba", "nemotron_h", "jamba", "lfm2"])
def test_a_mixer_keeps_what_autograd_keeps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of transformers' layers on two ranks, within 5 %, with functions that keep what the kernels do."""
    mixer, file = module_of(kind)
    shape = model_of(transformers_config(kind))
    with simulated(2, 0, 2, monkeypatch) as group:
        options = {"sharding": Sharding(128, "contiguous", group=group), "mask": None}
        for name, kernel in KERNELS.items():
            monkeypatch.setattr(file, name, partial(_FUNCTIONS[name].sharded, kernel, options), raising=False)
        x = torch.randn(2, 64, 64, dtype=torch.bfloat16, requires_grad=True)
        kept = saved_bytes(mixer, x)
    setting = Setting(H100, Mask.causal(), 128, 2, model=shape, ulysses=2)
    output_of_norm = x.nbytes  # which the mixer reads
    assert mixer_of(shape).kept(setting) + output_of_norm == pytest.approx(kept, rel=0.05)


def test_flops_of_a_delta_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix products of transformers' own function, with whole chunks."""
    file = module_of("qwen3_next")[1]
    mixer = mixer_of(shape_of("qwen3_next"))
    monkeypatch.setattr(file, "is_torchdynamo_exporting", lambda: True)  # with products instead of a solver
    d, e, tokens = mixer.of_group // 2, mixer.result, 128
    q, v = (torch.randn(1, tokens, mixer.heads, n) for n in (d, e))
    rates = torch.rand(1, tokens, mixer.heads)
    with FlopCounterMode(display=False) as counter:
        file.torch_chunk_gated_delta_rule(q, q, v, g=-rates, beta=rates)
    assert counter.get_total_flops() == mixer.flops * mixer.heads * tokens


def test_flops_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of Qwen3.5's four layers, which PyTorch counts; its attention computes all pairs."""
    config = transformers_config("qwen3_5_text")
    model = sys.modules["transformers"].AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    monkeypatch.setattr(sys.modules[type(model).__module__], "is_torchdynamo_exporting", lambda: True)
    tokens = 512
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
    planned = model_of(config).model_flops(tokens, tokens**2 / 4) / 3  # one layer of four has attention
    assert counter.get_total_flops() == pytest.approx(planned, rel=0.002)


# Bytes

BATCH, PER_HOST = 2, 4
FUNCTIONS = {
    "qwen3_next": "torch_chunk_gated_delta_rule",
    "kimi_linear": "chunk_kimi_delta_attention",
    "bamba": "mamba2_chunk_scan",
    "jamba": "mamba_selective_scan",
}


def inputs_of(kind: str, mixer: Mixer, tokens: int) -> list[Tensor]:
    """What the layer passes to its recurrence, in the dtypes of a model in bfloat16."""
    h, n, e = mixer.heads, mixer.groups, mixer.result
    shared = [(n, mixer.of_group // 2)] * 2

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(BATCH, tokens, *shape, dtype=dtype, requires_grad=True)

    if kind == "jamba":  # [b, c, t]
        x, dt, z, *of_groups = (tensor(c).transpose(1, 2) for c in (h, h, h, *(d for _, d in shared)))
        return [x, dt, torch.zeros(h, 4), *of_groups, torch.zeros(h), z]
    of_groups = [tensor(*shape) for shape in shared]
    if kind == "bamba":
        return [tensor(h, e), tensor(h), torch.zeros(h), *of_groups, torch.tensor(64)]
    decay = (h, e) if kind == "kimi_linear" else (h,)
    return [*of_groups, tensor(h, e), tensor(*decay, dtype=torch.float32), tensor(h)]


def all_to_all(message: Tensor, sends: Any, receives: Any, link: Any) -> Any:
    """As the runtime's, which a group of simulated ranks refuses for a rank that sends nothing."""
    if message.numel():
        return start_all_to_all(message, sends, receives, link)
    return [message.new_zeros(n) for n in receives], Pending()


def runtime(kind: str, mixer: Mixer, sharding: Sharding, mask: Mask) -> list[tuple[int, int]]:
    """What this rank sends inside its host and to others, in forward and in backward."""
    options = {"sharding": sharding, "mask": mask}
    x = torch.zeros(BATCH, mixer.channels, sharding.seq_local, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(mixer.channels, mixer.width)
    with seqpar.trace() as forward:
        out = _FUNCTIONS["causal_conv1d_fn"].sharded(lambda x, *_, **__: x, options, x, weight).sum()
        if kind in FUNCTIONS:
            function = _FUNCTIONS[FUNCTIONS[kind]]

            def recurrence(*args: Any, **kwargs: Any) -> Any:
                result = function.tokenwise(*args, **kwargs)
                out = (result[0] if isinstance(result, tuple) else result).bfloat16()
                if kwargs.get("output_final_state"):
                    return out, 0 * out.float().sum() + torch.zeros(
                        len(out), out.shape[2], args[1].shape[3], out.shape[3]
                    )
                if kwargs.get("return_final_states"):
                    return out, 0 * out.float().sum() + torch.zeros(len(out), *out.shape[2:], args[3].shape[3])
                return (out, None) if isinstance(result, tuple) else out

            result = function.sharded(recurrence, options, *inputs_of(kind, mixer, sharding.seq_local))
            out = out + (result[0] if isinstance(result, tuple) else result).sum()
    with seqpar.trace() as backward:
        out.backward()
    return [(t.bytes_sent - t.bytes_between_hosts, t.bytes_between_hosts) for t in (forward, backward)]


@pytest.mark.parametrize(
    ("kind", "states"), [*((kind, False) for kind in (*FUNCTIONS, "lfm2")), ("qwen3_next", True), ("bamba", True)]
)
@pytest.mark.parametrize("world", [6, 12])
def test_bytes_are_those_that_the_runtime_counts(
    world: int, kind: str, states: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ranks with heads of their own, with shared groups, and without heads, in splits over a ring too."""
    for file in ("hf.mechanisms.mixers", "planner.mixer"):
        monkeypatch.setattr(f"seqpar.{file}.sends_states", lambda *_: states)
    for module in ("row_exchange", "head_exchange"):
        monkeypatch.setattr(f"seqpar.strategies.{module}.start_all_to_all", all_to_all)
    tokens = 8 * world
    mask = Mask.documents([0, world, world + 3, 5 * world // 2, tokens])
    shape = shape_of(kind)
    mixer = mixer_of(shape)
    for layout, rank in product(LAYOUTS, (0, world - 1)):
        with simulated(world, rank, PER_HOST, monkeypatch) as group:
            sharding = Sharding(tokens, layout, group=group)
            expected = runtime(kind, mixer, sharding, mask)
        gpus = replace(H100, gpus_per_host=PER_HOST)
        for ring in (1, 2):
            ulysses = world // ring
            setting = Setting(gpus, mask, tokens, BATCH, model=shape, ring=ring, ulysses=ulysses, layout=layout)
            assert sent_bytes(setting, rank, mixer) == expected, (layout, rank, ring)


# Steps and plans


def hybrid(**changes: Any) -> ModelShape:
    mixers, attention = MODELS["qwen3.5-27b"].layers
    return replace(MODELS["qwen3.5-27b"], layers=(replace(mixers, count=3), replace(attention, count=1)), **changes)


def test_a_step_has_the_layers_of_each_kind() -> None:
    """The time, bytes and memory of three layers with a mixer and one with attention are their sums."""
    setting = Setting(H100, Mask.causal(), 1 << 15, model=hybrid(), ulysses=4)
    both = step(setting, Switches())
    alone = []
    cost = StepCost(setting)
    for row, layer in enumerate(setting.model.layers):
        sent = sum(x.sent[WITHIN] for x in cost.passes(row, Switches()))
        each = cost.layer_seconds(row, Switches())[0], sent, layer_activations(layer, setting)
        alone.append([layer.count * x for x in each])
    seconds, sent, kept = (sum(x) for x in zip(*alone, strict=True))
    assert both.bytes_sent[WITHIN] == sent
    outside = cost.loss_seconds() + cost.optimizer_seconds()
    assert both.seconds == pytest.approx(seconds + outside)
    assert both.memory.activations == pytest.approx(kept + 4 * 5120 * setting.most_tokens)


def test_ranks_without_heads_save_no_time() -> None:
    """48 heads: 96 ranks take as long as 48 for the recurrence, and 24 ranks longer."""

    def recurrence(ulysses: int) -> float:
        setting = Setting(H100, Mask.causal(), 96 << 10, model=hybrid(), ring=2, ulysses=ulysses // 2)
        rank = RankTimeline(setting)
        mixer_layer(hybrid()).forward(rank)
        return next(sum(x.links.values()) for x in rank.timeline.tasks if x.name == "recurrence") - H100.kernel

    assert recurrence(96) == recurrence(48) < recurrence(24)


@pytest.mark.parametrize(
    ("name", "weights", "active"),
    [
        ("qwen3.5-27b", 27e9, 25.6e9),
        ("nemotron-h-8b", 8_100_852_736, 7.56e9),
        ("nemotron-3-nano-30b-a3b", 31.6e9, 3.2e9),
        ("lfm2-1.2b", 1.17e9, 1.17e9),
        ("kimi-linear-48b-a3b", 48e9, 3e9),
        ("deepseek-v3.2", 671e9, 37e9),
    ],
)
def test_weights_of_named_models_are_the_published_ones(name: str, weights: float, active: float) -> None:
    """All, and those that multiply a token."""
    assert MODELS[name].parameters == pytest.approx(weights, rel=0.03)
    assert MODELS[name].multiplied_parameters == pytest.approx(active, rel=0.04)


@pytest.mark.parametrize("name", ["qwen3.5-27b", "nemotron-3-nano-30b-a3b", "lfm2-1.2b"])
def test_plans(name: str) -> None:
    plan = seqpar.plan(name, 1 << 17, 32)
    assert plan.best.degrees["dp"] < 32 and {x.context for x in plan.choices} > {"ring", "ulysses"}
    for choice in plan.choices:
        assert choice.degrees["tp"] == 1 and not choice.needs
        assert choice.switches.recompute != "keep_attention" and not choice.switches.saving
    assert plan.best.mfu * plan.best.seconds * 32 * plan.hardware.peak_flops == pytest.approx(
        plan.model.model_flops(plan.best.tokens_per_step, plan.global_batch * plan.pairs)
    )
    assert plan.pairs < (1 << 34) / 3  # of the layers with attention, as a mean of all
    with pytest.raises(ValueError, match="recompute='none' or 'full' only, and no other switch"):
        seqpar.plan(name, 1 << 17, 32, head_groups=2)
    recomputed = next(x for x in seqpar.plan(name, 1 << 17, 32, recompute="full").choices)
    assert "model.activation_checkpointing_enable()" in plan.code(recomputed)
    assert "Memory(" not in plan.code(recomputed)


def test_compressed_keys_are_pairs() -> None:
    """Of a layer with all rows before a query, and of one whose indexer chooses a few; and layers keep all streams."""
    shape, tokens = shape_of("deepseek_v4"), 300
    for layer in shape.layers:
        part = layer.attention
        assert isinstance(part, CompressedKeys) and part.q_rank == 24
        rows = [(i + 1) // part.size if part.size else 0 for i in range(tokens)]
        assert part.more_pairs(tokens) == sum(min(n, part.keys or n) for n in rows)
        setting = Setting(H100, Mask.causal(), tokens, model=shape, ring=2)
        assert layer_activations(layer, setting, Switches("full")) == 4 * 64 * 150 * 2
    assert {x.attention.size for x in shape.layers if isinstance(x.attention, CompressedKeys)} == {0, 4, 32}
    assert seqpar.plan(shape, 1 << 14, 4).pairs > seqpar.plan(changed(shape, CompressedKeys, size=0), 1 << 14, 4).pairs
    with pytest.raises(ValueError, match="the model compresses 4 tokens to a key"):
        seqpar.plan(shape, 1 << 14, 4, mask=Mask.documents([0, 100, 1 << 14]))


def test_an_indexer_limits_the_pairs_of_attention() -> None:
    shape = changed(MODELS["deepseek-v3.2"], Mlp, experts=0, active_experts=0)
    long = changed(shape, ChosenKeys, keys=1 << 16)
    chosen, every = (seqpar.plan(x, 1 << 16, 64) for x in (shape, long))
    assert chosen.pairs == 2048 * 2049 // 2 + (65536 - 2048) * 2048
    assert every.pairs == 65536 * 65537 // 2
    assert {x.degrees["tp"] for x in chosen.choices} == {1}
    setting = Setting(H100, Mask.causal(), 1 << 16, model=shape, ring=64, layout="zigzag")
    reusing = changed(shape, ChosenKeys, index_heads=0, index_dim=0)
    own, reused = (StepCost(replace(setting, model=x)) for x in (shape, reusing))
    assert own.layer_seconds(0, Switches()) > reused.layer_seconds(0, Switches())


@pytest.mark.parametrize(
    ("kind", "others", "message"),
    [
        (
            "minimax",
            {"layer_types": ["linear_attention", "full_attention"] * 2, **EXPERTS, "num_local_experts": 4},
            "layer 'model.layers.0' .MiniMaxDecoderLayer. has matrices of .* besides attention, which no MLP has",
        ),
        ("albert", {"embedding_size": 64}, "layers that share their weights"),
        ("nemotron_h", {**CONFIGS["nemotron_h"], "moe_latent_size": 8}, "besides attention, which no MLP has"),
        ("qwen3_next", {**DELTA, "linear_key_head_dim": None}, "linear_key_head_dim"),
        ("gemma4_text", {"global_head_dim": 32}, "layers that differ in their attention|besides attention"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(kind: str, others: dict[str, Any], message: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=message):
        model_of({"model_type": kind, **SIZES, **others})
