"""The loss and gradients of one process, in models with linear attention, state-space layers, short convolutions, or
attention to keys that an indexer chooses."""

from __future__ import annotations

import gc
import importlib.util
import re
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers.modeling_layers import GradientCheckpointingLayer

import seqpar
import seqpar.hf
from seqpar.hf.calls.forward import _say_documents_are_apart
from seqpar.hf.mechanisms import mixers
from seqpar.placement.layout import LayoutName, TokenLayout
from seqpar.strategies import eager_operators
from seqpar.strategies.auto import sends_states

from ..pool import OwnPool, Pool, mesh_of, on_ranks
from ..reference import assert_error, nudge
from .families import Family, make_batch, one_process, tiny

MODELS = {
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5, image-text": "Qwen3_5ForConditionalGeneration",
    "qwen3_next": "Qwen3NextForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "jamba": "JambaForCausalLM",
    "bamba": "BambaForCausalLM",
    "zamba": "ZambaForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "lara_mini": "LaraMiniForCausalLM",
    "bailing_hybrid": "BailingHybridForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "axk2": "AXK2ForCausalLM",
    "dots3_note": "Dots3NoteForCausalLM",
    "hy_v4": "HYV4ForCausalLM",
    "hy_v4_vl, image-text": "HYV4VLForConditionalGeneration",
    "mistral_large4, image-text": "MistralLarge4ForConditionalGeneration",
}
# One of each kind of mixer: the delta rule, Mamba-2 with groups, the Kimi delta rule, a convolution, Mamba, lightning
# attention; indexers, with a layer that reuses the indices of another.
UNPACKED = ("deepseek_v4",)  # which mix the documents of a row in one process too, and are refused
KINDS = ("qwen3_5", "nemotron_h", "kimi_linear", "lfm2", "jamba", "minimax", "glm_moe_dsa")


@dataclass(frozen=True)
class Case:
    """One model, one batch, and how the model is parallelized."""

    model: str
    batch: str
    strategy: str = "ring"
    layout: str = "zigzag"
    how: str = ""

    @property
    def family(self) -> Family:
        kind = "image-text" if "image" in self.model else "causal"
        return Family(kind, self.model, MODELS[self.model])


def gradients(model: nn.Module) -> Tensor:
    """All gradients in one vector, in float64."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([g.detach().flatten().double() for g in grads])


class Expected(NamedTuple):
    """The loss of one process, its gradients in one vector, and the rounding of the gradients.

    The rounding is the norm of the change with the last unit of the weights, relative to the norm of the gradients.
    """

    loss: float
    gradients: Tensor
    rounding: float


@cache
def one_process_of(model: str, batch: str) -> Expected:
    """A step without this package. Tests call it in the parent process."""
    reference = tiny(Case(model, batch).family)
    loss = one_process(reference, make_batch(batch, True, reference), True)
    first = gradients(reference)
    reference.zero_grad()
    nudge(reference.parameters())
    one_process(reference, make_batch(batch, True, reference), True)
    return Expected(loss, first, float((gradients(reference) - first).norm() / first.norm()))


@on_ranks
def errors(
    group: ProcessGroup, cases: list[tuple[Case, Expected]], degrees: tuple[int, ...] = ()
) -> list[tuple[float, float]]:
    """For each case the relative error of the loss, and of all gradients together. ``degrees`` are of a mesh."""
    ranks: Any = {"mesh": mesh_of(*degrees)} if degrees else {"group": group}
    found = []
    for case, (expected_loss, expected, _) in cases:
        model = tiny(case.family)
        if case.how == "checkpoint":
            model.activation_checkpointing_enable()
        seqpar.hf.parallelize(model, **ranks, strategy=case.strategy, layout=case.layout)
        with ExitStack() as stack:
            if case.how == "states":
                stack.enter_context(mock.patch.object(mixers, "sends_states", return_value=True))
            loss = model(**make_batch(case.batch, True, model)).loss
            loss.backward()
        seqpar.sync_gradients(model, **ranks)
        distance = float((gradients(model) - expected).norm() / expected.norm())
        found.append((abs(float(loss.detach()) - expected_loss) / abs(expected_loss), distance))
    return found


def check_errors(loss: float, grads: float, rounding: float, *what: object) -> None:
    """Check the relative errors of a loss and of all gradients together."""
    name = " ".join(map(str, what))
    assert_error(loss, 0.0, f"loss {name}")
    assert_error(grads, rounding, f"gradients {name}")


def check(pool: Pool, world: int, cases: list[Case], *degrees: int) -> None:
    with_expected = [(case, one_process_of(case.model, case.batch)) for case in cases]
    for by_case in pool.run(world, errors, with_expected, degrees):
        for (case, expected), (loss, grads) in zip(with_expected, by_case, strict=True):
            check_errors(loss, grads, expected.rounding, case, world)


QUICK = ("qwen3_5", "deepseek_v32")


@pytest.mark.slow
@pytest.mark.thorough(model=[model for model in MODELS if model not in QUICK])
@pytest.mark.parametrize("model", MODELS)
def test_every_model(pool: Pool, model: str) -> None:
    """Each batch, layout and strategy at least once, and for one of each kind each strategy with packed documents.

    On 3 ranks heads are divided unevenly.
    """
    if not hasattr(transformers, MODELS[model]):
        pytest.skip(f"transformers {transformers.__version__} has no {MODELS[model]}")
    two = [Case(model, "plain", "ulysses", "contiguous"), Case(model, "left", "ring", "striped")]
    three = [Case(model, "right" if model in UNPACKED else "packed", "ulysses", "zigzag")]
    if model in UNPACKED:
        two += [Case(model, "right", "context_parallel", how="checkpoint")]
    if model in KINDS:
        two += [Case(model, "packed", how="checkpoint")]
        three = [Case(model, "packed"), Case(model, "packed", "ulysses", "striped")]
    check(pool, 2, two)
    check(pool, 3, three)


@pytest.mark.parametrize("model", ["qwen3_5", "jamba"])
def test_documents_on_one_rank(pool: Pool, model: str) -> None:
    """Transformers itself lets documents of a packed row see one another in these layers; seqpar does not."""
    check(pool, 1, [Case(model, "packed")])


@pytest.mark.thorough(model=["kimi_linear"])
@pytest.mark.parametrize("model", ["qwen3_5", "nemotron_h", "kimi_linear"])
def test_states_instead_of_heads(pool: Pool, model: str) -> None:
    for world, cases in (
        (2, [("plain", "contiguous"), ("left", "zigzag")]),
        (3, [("packed", "zigzag"), ("packed", "contiguous")]),
    ):
        check(pool, world, [Case(model, batch, "ring", layout, "states") for batch, layout in cases])


@pytest.mark.parametrize(
    ("seq_len", "layout", "ranks", "per_host", "states"),
    [
        (1 << 20, "zigzag", 16, 8, True),  # messages between hosts
        (1 << 20, "zigzag", 16, 16, False),
        (1 << 22, "zigzag", 64, 64, True),  # more ranks than heads
        (1 << 20, "striped", 64, 8, False),
        (1 << 14, "zigzag", 64, 8, False),  # states would be more bytes
        (1 << 14, "contiguous", 1, 1, False),
    ],
)
def test_states_where_they_pay(seq_len: int, layout: LayoutName, ranks: int, per_host: int, states: bool) -> None:
    """For a layer of Qwen3.5 with 32 heads, 12 KB a token each way and 4 MB a state."""
    tokens = TokenLayout(seq_len, layout, ranks)
    assert sends_states(tokens, per_host, 32, 25_000, 4 * 32 * 128 * 256) is states


# Lengths and paddings that differ, of 2 rows; then documents, of 1 row. Each with the tokens that are left out.
COMPILED_BATCHES = [("plain", 0), ("left", 6), ("plain", 3), ("right", 1), ("packed", 0)]


def cropped(model: nn.Module, how: str, left_out: int) -> dict[str, Tensor]:
    return {name: x[:, : x.shape[1] - left_out] for name, x in make_batch(how, True, model).items()}


@cache
def one_process_on_batches(model: str) -> Expected:
    reference = tiny(Case(model, "plain").family)

    def step() -> tuple[float, Tensor]:
        reference.zero_grad()
        loss = sum(one_process(reference, cropped(reference, *batch), True) for batch in COMPILED_BATCHES)
        return loss, gradients(reference)

    loss, first = step()
    nudge(reference.parameters())
    return Expected(loss, first, float((step()[1] - first).norm() / first.norm()))


@on_ranks
def compiled_errors(
    group: ProcessGroup, name: str, backend: str, how: str, expected: Expected
) -> tuple[list[int], float, float]:
    """The number of graphs after each batch on the last rank, and the errors of the losses' sum and of all gradients.

    The other rank runs eagerly, and so sends the same messages.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = 0

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    model = tiny(Case(name, "plain").family)
    if how == "checkpoint":
        model.activation_checkpointing_enable()
    seqpar.hf.parallelize(model, group=group)
    if group.rank() == group.size() - 1:
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        inner = {child for layer in layers for child in layer.modules() if child is not layer}
        for layer in layers:
            if layer not in inner:
                layer.compile(backend=counted, fullgraph=True)
    found, losses = [], []
    states = mock.patch.object(mixers, "sends_states", return_value=True) if how == "states" else nullcontext()
    with states, torch._dynamo.config.patch(recompile_limit=16):  # nemotron_h has four kinds of layers of one class
        for batch in COMPILED_BATCHES:
            losses.append(model(**cropped(model, *batch)).loss)
            if how != "together":
                losses[-1].backward()
            found.append(graphs)
        if how == "together":  # every forward before the first backward
            sum(losses).backward()
    assert not torch._dynamo.utils.counters["graph_break"]
    assert not mixers._compiled
    gc.collect()
    assert not eager_operators._graphs  # what forward has kept for backward is gone
    seqpar.sync_gradients(model, group=group)
    distance = float((gradients(model) - expected.gradients).norm() / expected.gradients.norm())
    return found, abs(float(sum(losses)) - expected.loss) / abs(expected.loss), distance


# "checkpoint": activations are recomputed. "together": every forward is before the first backward.
COMPILED = [("qwen3_5", "eager", "checkpoint"), ("jamba", "aot_eager", "together"), ("qwen3_5", "aot_eager", "states")]
COMPILED += [(model, "aot_eager", "checkpoint") for model in KINDS if model != "glm_moe_dsa"]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(("model", "backend", "how"), COMPILED)
def test_a_compiled_layer_is_one_graph(pool: Pool, model: str, backend: str, how: str) -> None:
    """Other lengths, paddings and documents compile nothing, except that a batch of one row is a graph of its own."""
    if backend == "eager" and how == "checkpoint" and torch.__version__.startswith("2.11."):
        pytest.skip("the backend eager of torch 2.11 recomputes nothing, so the compiled rank sends no messages again")
    expected = one_process_on_batches(model)
    eager, compiled = pool.run(2, compiled_errors, model, backend, how, expected)
    for _, loss, distance in (eager, compiled):
        check_errors(loss, distance, expected.rounding, model, backend, how)
    first, *others = compiled[0]  # for each kind of layer
    assert others == [2 * first] * 3 + [3 * first]


def test_mesh(own: OwnPool) -> None:
    """A ring across hosts and an all-to-all inside."""
    check(own.pool, 4, [Case("nemotron_h", "packed", "hybrid")], 1, 2, 2, 1)


@on_ranks
def verify_and_generate(group: ProcessGroup, case: Case) -> tuple[bool, str, bool]:
    """Whether ``verify`` finds no difference, the error of a generation, and whether ``restore`` undoes everything."""
    model, reference = tiny(case.family), tiny(case.family)
    batch = make_batch(case.batch, True, model)
    gc.collect()  # the models of other tests
    code = sys.modules[type(model).__module__]
    before = dict(vars(code))
    seqpar.hf.parallelize(model, group=group, strategy=case.strategy, layout=case.layout)
    report = seqpar.hf.verify(model, batch, raise_on_error=False)
    with pytest.raises(ValueError, match="recurrent states") as error:
        model.eval().generate(batch["input_ids"][:1], max_new_tokens=1)
    seqpar.hf.restore(model)
    logits = [m(batch["input_ids"], use_cache=False).logits for m in (model.train(), reference)]
    return report.ok, str(error.value), torch.equal(*logits) and vars(code) == before


@pytest.mark.parametrize("model", ["qwen3_5", "jamba", "minimax"])
def test_verify_generate_and_restore(pool: Pool, model: str) -> None:
    for ok, error, same in pool.run(2, verify_and_generate, Case(model, "packed")):
        assert ok and same and "cache: " in error


@pytest.mark.parametrize("model", ["qwen3_5", "jamba", "minimax"])
def test_on_one_rank(model: str, caplog: pytest.LogCaptureFixture) -> None:
    """It generates as without seqpar. The log says that one process without seqpar has another loss."""
    _say_documents_are_apart.cache_clear()  # other tests may have had a model of the same name
    family = Case(model, "packed").family
    ours, reference = seqpar.hf.parallelize(tiny(family).eval()), tiny(family).eval()
    ids = make_batch("plain", True, reference)["input_ids"]
    tokens = [m.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (ours, reference)]
    assert torch.equal(*tokens)
    said = "packed documents are kept apart in its convolutions"
    for batch in ("plain", "packed", "packed"):
        assert said not in caplog.text or batch == "packed"
        ours(**make_batch(batch, True, reference))
    assert caplog.text.count(said) == 1


@on_ranks
def refused(group: ProcessGroup, name: str) -> str:
    model = tiny(Family("causal", name, name))
    if name == "Lfm2ForCausalLM":
        model._use_kernels = True
    with pytest.raises(ValueError, match=f"model={name}: ") as error:
        seqpar.hf.parallelize(model, group=group)
    return str(error.value)


def test_refused_models(pool: Pool) -> None:
    reasons = {
        "RecurrentGemmaForCausalLM": "layer 0 is of type 'linear_attention'",
        "MambaForCausalLM": "its forward takes no position_ids",
        "Lfm2ForCausalLM": "use_kernels=True",
    }
    for name, reason in reasons.items():
        assert reason in pool.run(1, refused, name)[0]


def test_another_forward_of_lightning_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of another version of transformers: it would be replaced by a forward that computes something else."""
    model = tiny(Case("minimax", "plain").family)
    layer: Any = model.model.layers[0].self_attn
    forward = type(layer).forward
    with monkeypatch.context() as patch:
        patch.setattr(
            type(layer), "forward", lambda self, x, *args, **kwargs: forward(self, x + x[:, :1], *args, **kwargs)
        )
        with pytest.raises(ValueError, match=r"0\.self_attn.*does not compute what the lightning attention"):
            seqpar.hf.parallelize(model)
    layer.forward = layer.forward
    with pytest.raises(ValueError, match="MiniMaxLightningAttention: its forward was replaced"):
        seqpar.hf.parallelize(model)
    del layer.forward
    seqpar.hf.restore(seqpar.hf.parallelize(model))


def remote_file(name: str) -> ModuleType:
    """A copy of LFM2's model file outside of transformers, whose convolution has another name."""
    spec = importlib.util.find_spec("transformers.models.lfm2.modeling_lfm2")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    source = source.replace("from ...", "from transformers.").replace(
        "from .conf", "from transformers.models.lfm2.conf"
    )
    file = ModuleType(name)
    file.__file__ = spec.origin
    sys.modules[name] = file
    exec(compile(re.sub(r"(?<!\")causal_conv1d_fn", "short_conv", source), spec.origin, "exec"), vars(file))
    return file


def _short_conv(original: Any, options: dict[str, Any], x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """x ``[b, c, t]``."""
    width = weight.shape[1] - 1

    def of_rows(y: Tensor) -> Tensor:
        out: Tensor = original(y.transpose(1, 2), weight, *args, **kwargs)
        return out[:, :, width:].transpose(1, 2)

    return seqpar.mixers.halo(of_rows, x.transpose(1, 2), width, **options).transpose(1, 2)


@on_ranks
def train_remote_code(group: ProcessGroup, expected: Expected) -> tuple[str, float, float]:
    """The error before ``register_mixer``; then the errors of the loss and the gradients."""
    file = remote_file("modeling_remote")
    model = tiny(Case("lfm2", "packed").family)
    remote = file.Lfm2ForCausalLM(model.config)
    remote.load_state_dict(model.state_dict())
    remote.set_attn_implementation("sdpa")
    try:
        seqpar.hf.parallelize(remote, group=group)
        refused = ""
    except ValueError as error:
        refused = str(error)
    seqpar.hf.register_mixer(file, "short_conv", _short_conv, lambda x, *args, **kwargs: x)
    seqpar.hf.parallelize(remote, group=group)
    loss = remote(**make_batch("packed", True, remote)).loss
    loss.backward()
    seqpar.sync_gradients(remote, group=group)
    distance = float((gradients(remote) - expected.gradients).norm() / expected.gradients.norm())
    return refused, abs(float(loss.detach()) - expected.loss) / abs(expected.loss), distance


def test_register_mixer(own: OwnPool) -> None:
    expected = one_process_of("lfm2", "packed")
    for refused, loss, distance in own.pool.run(2, train_remote_code, expected):
        assert "layer 0 is of type 'conv'" in refused and "seqpar.hf.register_mixer" in refused, refused
        check_errors(loss, distance, expected.rounding, "remote code")


def test_errors_of_register_mixer() -> None:
    register: Any = seqpar.hf.register_mixer
    for arguments, message in (
        (("modeling_absent", "f"), "file='modeling_absent': no module of this name is imported"),
        (("re", "scan"), "name='scan': re has no such function"),
        (("re", "match", len), "pass both, or none"),
        (("re", "match"), "name='match': pass sharded and tokenwise; they are known for causal_conv1d_fn, "),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            register(*arguments)


def test_a_model_beside_a_compiled_layer_does_not_take_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model that is not parallelized, in another thread, while a compiled layer with a graph break runs."""
    assert mixers._shard_now() is None
    monkeypatch.setattr(mixers, "_compiled", [(object(), nn.Linear(1, 1))])
    with pytest.raises(ValueError, match="another model"):
        mixers._shard_now()
