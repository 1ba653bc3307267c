"""Models with linear attention, state-space layers and short convolutions: the loss and gradients of one process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import seqpar
import seqpar.hf

from ..pool import OwnPool, Pool, mesh_of, on_ranks
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
}
# One of each kind of mixer: the delta rule, Mamba-2 with groups, the Kimi delta rule, a convolution, Mamba.
KINDS = ("qwen3_5", "nemotron_h", "kimi_linear", "lfm2", "jamba")
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Case:
    """One model, one batch, and how the model is parallelized."""

    model: str
    batch: str
    strategy: str
    layout: str
    how: str = ""

    @property
    def family(self) -> Family:
        kind = "image-text" if "image" in self.model else "causal"
        return Family(kind, self.model, MODELS[self.model])


def gradients(model: nn.Module) -> Tensor:
    """All gradients in one vector, in float64."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([g.detach().flatten().double() for g in grads])


@on_ranks
def errors(group: ProcessGroup, case: Case, mesh: Any = None) -> tuple[float, float]:
    """The relative error of the loss, and of all gradients together."""
    reference, ours = tiny(case.family), tiny(case.family)
    batch = make_batch(case.batch, True, reference)
    expected = one_process(reference, batch, True)
    if case.how == "checkpoint":
        ours.gradient_checkpointing_enable()
    ranks: Any = {"group": group} if mesh is None else {"mesh": mesh}
    seqpar.hf.parallelize(ours, **ranks, strategy=case.strategy, layout=case.layout)
    loss = ours(**batch).loss
    loss.backward()
    seqpar.sync_gradients(ours, **ranks)
    mine, theirs = gradients(ours), gradients(reference)
    return abs(float(loss.detach()) - expected) / abs(expected), float((mine - theirs).norm() / theirs.norm())


def check(pool: Pool, world: int, cases: list[Case]) -> None:
    for case in cases:
        for loss, grads in pool.run(world, errors, case):
            assert loss < TOLERANCE and grads < TOLERANCE, (case, world, loss, grads)


@pytest.mark.parametrize("model", KINDS)
def test_kinds_of_mixers(pool: Pool, model: str) -> None:
    check(pool, 2, [Case(model, "packed", "ring", "zigzag")])


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_model(pool: Pool, model: str) -> None:
    """Each batch, layout and strategy at least once; on 3 ranks heads are divided unevenly."""
    if not hasattr(transformers, MODELS[model]):
        pytest.skip(f"transformers {transformers.__version__} has no {MODELS[model]}")
    check(pool, 2, [Case(model, "plain", "ulysses", "contiguous"), Case(model, "left", "ring", "striped")])
    check(pool, 3, [Case(model, "packed", "ring", "zigzag"), Case(model, "packed", "ulysses", "striped")])


@pytest.mark.parametrize("model", ["qwen3_5", "jamba"])
def test_documents_on_one_rank(pool: Pool, model: str) -> None:
    """Transformers itself lets documents of a packed row see one another in these layers; seqpar does not."""
    check(pool, 1, [Case(model, "packed", "ring", "zigzag")])


@pytest.mark.parametrize("model", ["qwen3_5", "lfm2", "jamba"])
def test_activation_checkpointing(pool: Pool, model: str) -> None:
    check(pool, 2, [Case(model, "packed", "ring", "zigzag", how="checkpoint")])


@on_ranks
def mesh_errors(group: ProcessGroup, case: Case) -> tuple[float, float]:
    """``errors`` with a ring across hosts and an all-to-all inside."""
    return errors(group, case, mesh_of(1, 2, 2, 1))


def test_mesh(own: OwnPool) -> None:
    for loss, grads in own.pool.run(4, mesh_errors, Case("nemotron_h", "packed", "hybrid", "zigzag")):
        assert loss < TOLERANCE and grads < TOLERANCE


@on_ranks
def verify_and_generate(group: ProcessGroup, case: Case) -> tuple[bool, str, bool]:
    """Whether ``verify`` finds no difference, the error of a generation, and whether ``restore`` undoes everything."""
    model, reference = tiny(case.family), tiny(case.family)
    batch = make_batch(case.batch, True, model)
    seqpar.hf.parallelize(model, group=group, strategy=case.strategy, layout=case.layout)
    report = seqpar.hf.verify(model, batch, raise_on_error=False)
    with pytest.raises(ValueError, match="recurrent states") as error:
        model.eval().generate(batch["input_ids"][:1], max_new_tokens=1)
    seqpar.hf.restore(model)
    logits = [m(batch["input_ids"], use_cache=False).logits for m in (model.train(), reference)]
    code = vars(sys.modules[type(model).__module__]).values()
    ours = [x for x in code if str(getattr(x, "__module__", "")).startswith("seqpar")]
    return report.ok, str(error.value), torch.equal(*logits) and not ours


@pytest.mark.parametrize("model", ["qwen3_5", "jamba"])
def test_verify_generate_and_restore(pool: Pool, model: str) -> None:
    for ok, error, same in pool.run(2, verify_and_generate, Case(model, "packed", "ring", "zigzag")):
        assert ok and same and "cache: " in error


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
        "MiniMaxForCausalLM": "layer 1 is of type 'linear_attention'",
        "GlmMoeDsaForCausalLM": "layer 0 is of type 'indexed_attention'",
        "RecurrentGemmaForCausalLM": "layer 0 is of type 'linear_attention'",
        "MambaForCausalLM": "its forward takes no position_ids",
        "Lfm2ForCausalLM": "use_kernels=True",
    }
    for name, reason in reasons.items():
        assert reason in pool.run(1, refused, name)[0]
