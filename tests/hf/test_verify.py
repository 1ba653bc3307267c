"""``verify`` finds no difference in correct models, changes nothing, and reports ranks that run something else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")

import transformers

import seqpar
import seqpar.hf
from seqpar.hf import VerificationError
from seqpar.hf.calls import attention as hf_attention
from seqpar.hf.state import patch_of
from seqpar.hf.verification import run
from seqpar.hf.verification.recording import PinnedExperts
from seqpar.strategies.attend import attend

from ..engines.test_experts import Expert, Mixture
from ..pool import Pool, on_ranks
from .test_multimodal import make_batch as with_images
from .test_multimodal import tiny as tiny_wrapper
from .workers import BATCHES, MECHANISMS, gradients, make_batch, parallel, report_on, shard_function, tiny

pytestmark = pytest.mark.slow
RING: dict[str, Any] = {}
ULYSSES: dict[str, Any] = {"strategy": "ulysses", "layout": "contiguous"}
# By number of ranks and arguments of ``parallelize``: models and batches.
HEALTHY: list[tuple[int, dict[str, Any], list[tuple[str, str]]]] = [
    (1, RING, [("llama", "packed"), ("gpt_oss", "left")]),
    (
        2,
        RING,
        [
            *(("llama", how) for how in BATCHES),
            *zip(MECHANISMS[1:], BATCHES[1:] * 2, strict=False),
            ("llama4", "left"),
            ("mistral", "packed"),
        ],
    ),
    (4, RING, [("gpt2", "packed"), ("gemma3", "right")]),
    (4, ULYSSES, [("llama", "packed"), ("gpt_oss", "left"), ("deepseek_v3", "packed")]),
]


@on_ranks
def healthy(group: ProcessGroup, cases: list[tuple[str, str]], arguments: dict[str, Any]) -> None:
    before, model = "", None
    for kind, how in cases:
        if kind != before:  # other batches are of the same model
            before, model = kind, seqpar.hf.parallelize(tiny(kind), group=group, **arguments)
        assert seqpar.hf.verify(model, make_batch(how)).layers == 2, (kind, how)


@pytest.mark.thorough(world=[4])
@pytest.mark.parametrize(("world", "arguments", "cases"), HEALTHY, ids=["1", "ring on 2", "ring on 4", "ulysses on 4"])
def test_healthy_models(pool: Pool, world: int, arguments: dict[str, Any], cases: list[tuple[str, str]]) -> None:
    pool.run(world, healthy, cases, arguments)


@on_ranks
def healthy_in_wrappers(group: ProcessGroup) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    def with_ddp(model: Any) -> Any:
        return DistributedDataParallel(model, process_group=group)

    def with_fsdp2(model: Any) -> Any:
        mesh = init_device_mesh("cpu", (group.size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def with_fsdp1(model: Any) -> Any:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)

    for wrap in (with_ddp, with_fsdp2, with_fsdp1):
        seqpar.hf.verify(wrap(seqpar.hf.parallelize(tiny("gpt_oss"), group=group)), make_batch("packed"))


@on_ranks
def healthy_others(group: ProcessGroup) -> None:
    """Models with images, models without a prediction per token, and ranks that have batches of their own."""
    text = make_batch("right")
    text.pop("labels")
    rows = torch.arange(len(text["input_ids"]))
    cases: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (tiny_wrapper("gemma3"), with_images("gemma3", "images"), {}),
        (tiny_wrapper("qwen3_vl"), with_images("qwen3_vl", "left"), {}),
        (tiny_wrapper("gemma4"), with_images("gemma4", "images"), {"strategy": "context_parallel"}),
        (tiny("llama", auto=transformers.AutoModelForSequenceClassification), text, {}),
        (tiny("llama", auto=transformers.AutoModelForSequenceClassification), {**text, "labels": rows}, {}),
        (tiny("gemma2", auto=transformers.AutoModel), text, {}),
        (tiny("mistral"), make_batch("left"), {"batches": "per_rank"}),
    ]
    for model, batch, arguments in cases:
        seqpar.hf.parallelize(model, group=group, **arguments)
        assert seqpar.hf.verify(model, batch).layers >= 2
    assert patch_of(model).settings.batches == "per_rank" and "_call_impl" in vars(model)


@pytest.mark.thorough
def test_healthy_others(pool: Pool) -> None:
    pool.run(2, healthy_others)


def test_healthy_models_in_wrappers(two: Pool) -> None:
    two.run(2, healthy_in_wrappers)


@on_ranks
def around_model(group: ProcessGroup) -> tuple[list[bool], str]:
    """Reports on modules that contain the model: with a loss of whole outputs, with the model's loss, with neither."""

    class Around(nn.Module):
        def __init__(self, outputs: Callable[[Any, Tensor], Any]) -> None:
            super().__init__()
            self.lm, self.outputs = parallel(group, "mistral"), outputs

        def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Any:
            return self.outputs(partial(self.lm, input_ids, attention_mask), labels)

    modules = [
        Around(lambda lm, labels: (lm().logits[..., 0] - labels / 50).square().mean()),
        Around(lambda lm, labels: {"loss": 3 * lm(labels=labels).loss}),
        Around(lambda lm, labels: lm().logits.relu()),
    ]
    # The loss of the first module counts padding too, whose outputs depend on the attention implementation.
    ok = [report_on(module, how).ok for module, how in zip(modules, ("plain", "left", "left"), strict=True)]
    return ok, str(report_on(Around(lambda lm, labels: [lm().logits.mean().item()])))


def test_modules_around_the_model(pool: Pool) -> None:
    for ok, unsupported in pool.run(2, around_model):
        assert all(ok)
        assert "model=Around: its output has no loss" in unsupported


@on_ranks
def with_half_precision(group: ProcessGroup) -> tuple[bool, bool]:
    """Whether the reports are right, with and without pinned experts, on a model whose routing rounding changes."""
    ok = []
    for pinned in (PinnedExperts, lambda pins, **arguments: PinnedExperts(False, **arguments)):
        model = seqpar.hf.parallelize(tiny("qwen3_moe", seed=3).to(torch.bfloat16), group=group)
        with mock.patch.object(run, "PinnedExperts", pinned):
            batch = make_batch("plain", length=120, seed=3)
            ok.append(seqpar.hf.verify(model, batch, False, tolerance=0.15).ok)
    return ok[0], ok[1]


def test_experts_are_pinned(pool: Pool) -> None:
    assert pool.run(2, with_half_precision) == [(True, False)] * 2


@on_ranks
def with_experts_of_ones_own(group: ProcessGroup) -> list[str]:
    """Reports on a model in which each rank holds one expert: right, without ``ignore``, and with wrong gradients."""
    model = tiny("llama")
    experts = [Expert(32) for _ in range(group.size())]  # from the same seed on every rank
    own = {group.rank(): experts[group.rank()]}
    model.model.layers[0].mlp = mixture = Mixture(own, group.size(), group, hidden=32)
    seqpar.hf.parallelize(model, group=group)
    ignore = [mixture.experts]

    def doubled(model: Any) -> None:
        seqpar.sync_gradients(model, group=group, ignore=ignore)
        for p in mixture.experts.parameters():
            assert p.grad is not None
            p.grad *= 2

    syncs = None, partial(seqpar.sync_gradients, group=group), doubled
    without, *reports = report_on(model, "left"), *(report_on(model, "left", ignore=ignore, sync=x) for x in syncs)
    return [str(x) for x in (without, *reports)]


def test_experts_that_one_rank_holds(pool: Pool) -> None:
    words = (
        "experts.0.0.weight torch.float32 trained",
        "equal to one device",
        "pass the parameters that a rank holds alone as ignore=",
        "gradient: model.layers.0.mlp.experts",
    )
    for reports in pool.run(2, with_experts_of_ones_own):
        for said, expected in zip(reports, words, strict=True):
            assert expected in said, said


@on_ranks
def in_another_collective(group: ProcessGroup) -> str:
    """Rank 1 leaves out the messages of the second layer, for which rank 0 waits."""
    model = parallel(group)

    def without_exchange(q: Tensor, *arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if group.rank() == 1 and len(calls) == 2:
            return (q.clone(),)
        return attend(q, *arguments, **options)

    calls: list[int] = []
    with (
        mock.patch.object(hf_attention, "attend", without_exchange),
        pytest.raises(VerificationError) as caught,
    ):
        seqpar.hf.verify(model, make_batch("plain"), deadline_s=3.0)
    return str(caught.value)


def test_report_of_a_missing_rank() -> None:
    pool = Pool(2)
    try:
        for said in pool.run(2, in_another_collective):
            assert "path: run" in said, said
    finally:
        pool.close()


@on_ranks
def state_before_and_after(group: ProcessGroup, kind: str) -> list[str]:
    model = parallel(group, kind)
    model.train()
    model.model.layers[0].eval()
    local = seqpar.hf.shard_batch(make_batch("plain"), group=group)
    model(**local).loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.add_(1.0)

    def state() -> dict[str, Any]:
        hooks = {n: [*m._forward_hooks, *m._forward_pre_hooks] for n, m in model.named_modules()}
        return {
            "gradients": gradients(model),
            "identity": [id(p.grad) for p in model.parameters()],
            "random": torch.get_rng_state(),
            "modes": [m.training for m in model.modules()],
            "buffers": {n: b.clone() for n, b in model.named_buffers()},
            "hooks": hooks,
            "config": model.config.to_dict(),
            "loss": model(**local).loss.detach(),
            "expansions": [vars(m).get("expand_kv") for m in model.modules()],
            "calls": patch_of(model).calls,
        }

    before = state()
    seqpar.hf.verify(model, make_batch("packed"))
    after = state()
    return [name for name, x in before.items() if not _same(x, after[name])]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return bool(a == b)


@on_ranks
def in_loops(group: ProcessGroup) -> None:
    """Reports on a loop that shards batches itself, without labels, and on a model that returns this rank's outputs."""
    model = parallel(group)
    assert seqpar.hf.verify(model, make_batch("left"), shard=shard_function(group)).ok
    batch = make_batch("left")
    del batch["labels"]
    assert seqpar.hf.verify(model, batch, shard=shard_function(group)).ok
    assert seqpar.hf.verify(model, {**batch, "use_cache": True}).ok
    assert seqpar.hf.verify(parallel(group, outputs="local"), batch).ok


def test_ways_to_shard(pool: Pool) -> None:
    pool.run(2, in_loops)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3"])
def test_verify_changes_nothing(pool: Pool, kind: str) -> None:
    for changed in pool.run(2, state_before_and_after, kind):
        assert not changed
