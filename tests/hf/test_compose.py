"""Parallelized models with DDP, FSDP2, checkpointing, LoRA, torch.compile, pipelines and tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")

import transformers
from packaging.version import Version
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import seqpar
import seqpar.hf
from seqpar.hf.state import Gradients

from ..pool import Pool, mesh_of, on_ranks
from .workers import gradients, make_batch, one_device, tiny, worst

pytestmark = pytest.mark.slow
LOSS, GRADIENT = 2e-5, 1e-3


@pytest.fixture(scope="module")
def pool_of_two() -> Iterator[Pool]:
    """Two workers. Wrappers without a group average over both, which are the ranks of the sequence."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pool_of_four() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.close()


def reference(kind: str, batches: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    """The one-device loss of each batch, and the gradients of the mean of these losses."""
    each = [one_device(kind, batch) for batch in batches]
    mean = {name: torch.stack([grads[name] for _, grads in each]).mean(0) for name in each[0][1]}
    return [loss for loss, _ in each], mean


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("module."): (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


@on_ranks
def wrapped(group: ProcessGroup, wrapper: str, kind: str, checkpoint: bool | None) -> tuple[float, float]:
    """Errors of the gradients that the wrapper reduces. Two data-parallel ranks, four ranks of a sequence."""
    mesh = mesh_of(2, 2, 2, 1)
    batches = [make_batch("packed", seed=3), make_batch("right", seed=4)]
    losses, grads = reference(kind, batches)
    model = tiny(kind)
    if checkpoint is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint})
    if wrapper == "fsdp then parallelize":
        shard_fully(model)
    seqpar.hf.parallelize(model, mesh=mesh, strategy="hybrid")
    outer: Any = model
    if wrapper == "ddp":
        outer = DistributedDataParallel(model)
    elif wrapper == "fsdp":
        shard_fully(model)
    mine = mesh["dp"].get_local_rank()
    local = seqpar.hf.shard_batch(batches[mine], mesh=mesh)
    loss = outer(**local).loss
    loss.backward()
    return abs(loss.item() - losses[mine]), worst(full_gradients(outer), grads)


@cache
def all_ranks() -> DeviceMesh:
    return dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))


def shard_fully(model: Any) -> None:
    mesh = all_ranks()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.parametrize(
    ("wrapper", "kind", "checkpoint"),
    [
        ("ddp", "llama", None),
        ("ddp", "qwen3_moe", False),
        ("ddp", "bert", None),
        ("fsdp", "gemma2", None),
        ("fsdp", "llama", False),
        ("fsdp", "llama", True),
        ("fsdp then parallelize", "llama", None),
    ],
)
def test_wrappers_that_average(pool: Pool, wrapper: str, kind: str, checkpoint: bool | None) -> None:
    for loss, gradient in pool.run(8, wrapped, wrapper, kind, checkpoint):
        assert loss < LOSS and gradient < GRADIENT


def fsdp1(model: nn.Module, use_orig_params: bool, *units: type[nn.Module]) -> Any:
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls=set(units)) if units else None
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )


def fsdp1_gradients(outer: Any, kind: str) -> dict[str, Tensor]:
    """The gradients, from the weights after a step of SGD: only one mode of FSDP1 gives access to gradients."""
    torch.optim.SGD(outer.parameters(), lr=100.0).step()
    before = dict(tiny(kind).named_parameters())
    with FullyShardedDataParallel.summon_full_params(outer, writeback=False):
        after = {n.replace("_fsdp_wrapped_module.", ""): p.detach() for n, p in outer.named_parameters()}
        return {name: (before[name].detach() - x) / 100.0 for name, x in after.items()}


@on_ranks
def wrapped_in_fsdp1(group: ProcessGroup, use_orig_params: bool, inner: str) -> tuple[float, float]:
    batch = make_batch("packed")
    losses, grads = reference("llama", [batch])
    model = seqpar.hf.parallelize(tiny("llama"), group=group)
    units = {"nothing": (), "layers": (LlamaDecoderLayer,), "layers, head": (LlamaDecoderLayer, nn.Linear)}[inner]
    outer = fsdp1(model, use_orig_params, *units)
    loss = outer(**seqpar.hf.shard_batch(batch, group=group)).loss
    loss.backward()
    return abs(loss.item() - losses[0]), worst(fsdp1_gradients(outer, "llama"), grads)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("inner", ["nothing", "layers", "layers, head"])
def test_fsdp1(pool_of_two: Pool, use_orig_params: bool, inner: str) -> None:
    for loss, gradient in pool_of_two.run(2, wrapped_in_fsdp1, use_orig_params, inner):
        assert loss < LOSS and gradient < GRADIENT


class Around(nn.Module):
    """A module that contains a model and calls it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **kwargs: Any) -> Any:
        return self.module(**kwargs)


@on_ranks
def loss_outside_the_forward(group: ProcessGroup, wrapper: str) -> tuple[float, float]:
    """The model returns logits, and the caller computes the loss, as in the last stage of a pipeline."""
    batch = make_batch("packed")
    losses, grads = reference("llama", [batch])
    model = seqpar.hf.parallelize(tiny("llama"), group=group)
    local = seqpar.hf.shard_batch(batch, group=group)
    labels = local.pop("labels")
    outer: Any = model
    if wrapper in ("ddp", "ddp over dp"):
        alone = [dist.new_group([rank]) for rank in range(group.size())]
        outer = DistributedDataParallel(model, process_group=group if wrapper == "ddp" else alone[group.rank()])
    elif wrapper == "ddp of the layers, ddp of the head":
        model.model = DistributedDataParallel(model.model)
        model.lm_head = DistributedDataParallel(model.lm_head)
    elif wrapper == "replicate":
        replicate(model)
    elif wrapper == "fsdp1":
        outer = fsdp1(model, True)
    elif wrapper == "fsdp":
        shard_fully(model)
    elif wrapper == "fsdp around":
        outer = Around(model)
        fully_shard(outer, mesh=all_ranks())
    elif wrapper == "dropped ddp":
        DistributedDataParallel(model)
    logits = outer(**local).logits
    loss = model.loss_function(logits, labels, seqpar=local["seqpar"])
    loss.backward()
    if wrapper in ("none", "dropped ddp", "ddp over dp"):
        seqpar.sync_gradients(model, group=group)
    if wrapper == "fsdp1":
        return abs(loss.item() - losses[0]), worst(fsdp1_gradients(outer, "llama"), grads)
    ours = {n.replace("module.", ""): g for n, g in full_gradients(outer).items()}
    return abs(loss.item() - losses[0]), worst(ours, grads)


@pytest.mark.parametrize(
    "wrapper",
    [
        "none", "ddp", "ddp over dp", "ddp of the layers, ddp of the head", "dropped ddp", "replicate",
        "fsdp1", "fsdp", "fsdp around",
    ],
)  # fmt: skip
def test_a_loss_outside_the_forward(pool_of_two: Pool, wrapper: str) -> None:
    for loss, gradient in pool_of_two.run(2, loss_outside_the_forward, wrapper):
        assert loss < LOSS and gradient < GRADIENT


# DeepSpeed's engines have these names, by which they are recognized.
DeepSpeedEngine = type("DeepSpeedEngine", (Around,), {"__module__": "deepspeed.runtime.engine"})
PipelineEngine = type("PipelineEngine", (DeepSpeedEngine,), {})


@on_ranks
def in_deepspeed(group: ProcessGroup, gradients_are: Gradients) -> str:
    batch = make_batch("plain")
    model = seqpar.hf.parallelize(tiny("llama"), group=group, gradients=gradients_are)
    engine = PipelineEngine(model)
    local = seqpar.hf.shard_batch(batch, group=group)
    try:
        engine(**local).loss.backward()
    except ValueError as error:
        return str(error)
    return ""


def test_deepspeed_is_refused_unless_the_caller_chooses(pool_of_two: Pool) -> None:
    for said in pool_of_two.run(2, in_deepspeed, "auto"):
        assert "the model is inside a PipelineEngine" in said and "gradients='mean'" in said
    assert pool_of_two.run(2, in_deepspeed, "mean") == ["", ""]


@on_ranks
def averaged_over_some(group: ProcessGroup) -> str:
    """The error with DDP over two of the four ranks of the sequence."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    model = seqpar.hf.parallelize(tiny("llama"), group=group)
    outer = DistributedDataParallel(model, process_group=pairs[group.rank() // 2])
    try:
        outer(**seqpar.hf.shard_batch(make_batch("plain"), group=group))
    except ValueError as error:
        return str(error)
    return ""


def test_a_wrapper_over_part_of_the_sequence_is_refused(pool_of_four: Pool) -> None:
    for said in pool_of_four.run(4, averaged_over_some):
        assert "DistributedDataParallel averages over ranks" in said and "ranks of the sequence, [0, 1, 2, 3]" in said


@on_ranks
def averaged_by_hand(group: ProcessGroup, gradients_are: Gradients) -> float:
    """The ranks' gradients are averaged or summed by a wrapper that parallelize cannot detect."""
    batch = make_batch("plain")
    _, grads = reference("llama", [batch])
    model = seqpar.hf.parallelize(tiny("llama"), group=group, gradients=gradients_are)
    model(**seqpar.hf.shard_batch(batch, group=group)).loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= group.size() if gradients_are == "mean" else 1
    return worst(gradients(model), grads)


@pytest.mark.parametrize("gradients_are", ["mean", "partial"])
def test_gradients_as_asked_for(pool: Pool, gradients_are: Gradients) -> None:
    assert max(pool.run(4, averaged_by_hand, gradients_are)) < GRADIENT


@on_ranks
def data_parallel_alone(group: ProcessGroup) -> tuple[float, float]:
    """DDP over dp only averages over the replicas. ``sync_gradients`` sums over the ranks of the sequence."""
    mesh = mesh_of(2, 2, 2, 1)
    batches = [make_batch("plain", seed=3), make_batch("left", seed=4)]
    losses, grads = reference("llama", batches)
    model = seqpar.hf.parallelize(tiny("llama"), mesh=mesh, strategy="hybrid")
    outer = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    mine = mesh["dp"].get_local_rank()
    # Two micro-batches without a sum in between, as in gradient accumulation.
    local = seqpar.hf.shard_batch(batches[mine], mesh=mesh)
    with outer.no_sync():
        (outer(**local).loss / 2).backward()
    loss = outer(**local).loss
    (loss / 2).backward()
    seqpar.sync_gradients(model, mesh=mesh)
    return abs(loss.item() - losses[mine]), worst(full_gradients(outer), grads)


def test_ddp_over_data_parallel_ranks(pool: Pool) -> None:
    for loss, gradient in pool.run(8, data_parallel_alone):
        assert loss < LOSS and gradient < GRADIENT


@on_ranks
def checkpointed(group: ProcessGroup, kind: str, reentrant: bool) -> tuple[float, float]:
    """Two forwards run before their backwards. Each recomputation must use the mask of its own batch."""
    batches = [make_batch("packed", seed=5), make_batch("left", 38, seed=6)]
    losses, grads = reference(kind, batches)
    model = seqpar.hf.parallelize(tiny(kind), group=group)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ours = [model(**seqpar.hf.shard_batch(batch, group=group)).loss for batch in batches]
    for loss in ours:
        (loss / 2).backward()
    seqpar.sync_gradients(model, group=group)
    error = max(abs(a.item() - b) for a, b in zip(ours, losses, strict=True))
    return error, worst(gradients(model), grads)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_activation_checkpointing(pool: Pool, kind: str, reentrant: bool) -> None:
    for loss, gradient in pool.run(2, checkpointed, kind, reentrant):
        assert loss < LOSS and gradient < GRADIENT


@on_ranks
def with_lora(group: ProcessGroup, targets: list[str], before: bool) -> tuple[float, float]:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)

    def adapted(parallel: bool) -> Any:
        model = tiny("qwen3")
        if parallel and before:
            seqpar.hf.parallelize(model, group=group, strategy="ulysses")
        torch.manual_seed(7)
        model = get_peft_model(model, config)
        if parallel and not before:
            seqpar.hf.parallelize(model, group=group, strategy="ulysses")
        return model

    batch = make_batch("packed")
    alone, model = adapted(False), adapted(True)
    expected = alone(**batch, use_cache=False).loss
    expected.backward()
    loss = model(**seqpar.hf.shard_batch(batch, group=group)).loss
    loss.backward()
    seqpar.sync_gradients(model, group=group)
    return abs(loss.item() - expected.item()), worst(gradients(model), gradients(alone))


@pytest.mark.parametrize(
    ("targets", "before"), [(["q_proj", "v_proj"], False), (["q_proj", "v_proj"], True), (["o_proj", "lm_head"], True)]
)
def test_lora(pool: Pool, targets: list[str], before: bool) -> None:
    pytest.importorskip("peft")
    for loss, gradient in pool.run(2, with_lora, targets, before):
        assert loss < LOSS and gradient < GRADIENT


@on_ranks
def compiled(group: ProcessGroup, what: str, strategy: str) -> tuple[float, float, int, int]:
    """Compile each decoder layer or the decoder, as one graph each, or the whole model."""
    torch._dynamo.reset()
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    batches = [make_batch("packed", seed=seed) for seed in range(3, 9)]
    losses, grads = reference("llama", batches)
    model = seqpar.hf.parallelize(tiny("llama"), group=group, strategy=strategy)
    for module in {"layers": [*model.model.layers], "decoder": [model.model], "model": [model]}[what]:
        module.compile(backend=backend, fullgraph=what != "model")
    first = 0
    error = 0.0
    for batch, expected in zip(batches, losses, strict=True):
        loss = model(**seqpar.hf.shard_batch(batch, group=group)).loss
        (loss / len(batches)).backward()
        error = max(error, abs(loss.item() - expected))
        first = first or graphs
    seqpar.sync_gradients(model, group=group)
    return error, worst({n.replace("_orig_mod.", ""): g for n, g in gradients(model).items()}, grads), first, graphs


COMPILED = [(1, "model", "ring"), (2, "decoder", "ring"), (2, "model", "ring"), (4, "layers", "auto")]


@pytest.mark.parametrize(("ranks", "what", "strategy"), COMPILED)
def test_compiled_models(pool: Pool, ranks: int, what: str, strategy: str) -> None:
    """If the whole model is compiled, the hooks and the loss run outside of its graphs."""
    for loss, gradient, first, graphs in pool.run(ranks, compiled, what, strategy):
        assert loss < LOSS and gradient < GRADIENT
        assert first <= 2  # two layers, which may share one; the decoder is one, and the model has two
        assert graphs == first  # new documents compile nothing


class Stage(nn.Module):
    """Half of a Llama. The first stage embeds the tokens, the last one computes the logits."""

    def __init__(self, model: Any, first: bool) -> None:
        super().__init__()
        half = len(model.model.layers) // 2
        self.embed = model.model.embed_tokens if first else None
        self.layers = model.model.layers[:half] if first else model.model.layers[half:]
        self.rotary = model.model.rotary_emb
        self.norm = None if first else model.model.norm
        self.head = None if first else model.lm_head

    def forward(self, x: Tensor, position_ids: Tensor, seqpar: Any) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        rotation = self.rotary(x, position_ids=position_ids)
        for layer in self.layers:
            x = layer(x, position_embeddings=rotation, attention_mask=None, seqpar=seqpar)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


@on_ranks
def pipelined(group: ProcessGroup) -> tuple[float, float]:
    """2 data-parallel replicas x 2 stages x 2 sequence ranks."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "ring"))
    sequence, stages = mesh["ring"].get_group(), mesh["pp"].get_group()
    batch = make_batch("plain", 46, rows=4)
    losses, grads = reference("llama", [batch])
    model = seqpar.hf.parallelize(tiny("llama"), group=sequence)
    first = stages.rank() == 0
    part = Stage(model, first)
    local = seqpar.hf.shard_batch(batch, group=sequence)
    shard, labels = local["seqpar"], local["labels"]

    def loss_of(logits: Tensor, target: Tensor) -> Tensor:
        return model.loss_function(logits, target, seqpar=shard)

    stage = PipelineStage(part, stages.rank(), 2, torch.device("cpu"), group=stages)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of, scale_grads=False)
    arguments = {"position_ids": local["position_ids"], "seqpar": shard}
    found: list[Tensor] = []
    if first:
        schedule.step(local["input_ids"], **arguments)
    else:
        schedule.step(target=labels, losses=found, **arguments)
    seqpar.sync_gradients(part, group=sequence)
    mine = set(map(id, part.parameters()))
    ours = {name: p.grad for name, p in model.named_parameters() if id(p) in mine and p.grad is not None}
    error = 0.0 if first else abs(sum(x.item() for x in found) - losses[0])
    return error, worst(ours, {name: grads[name] for name in ours})


def test_pipeline_stages(pool: Pool) -> None:
    for loss, gradient in pool.run(8, pipelined):
        assert loss < LOSS and gradient < GRADIENT


@on_ranks
def with_tensor_parallel(group: ProcessGroup, path: str, kind: str) -> tuple[float, float]:
    """transformers' own ``tp_plan`` and FSDP2 (2 x 4 ranks) under a hybrid of 2 x 2 sequence ranks."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    mesh = mesh_of(1, 2, 2, 2)
    batch = make_batch("packed")
    losses, grads = reference(kind, [batch])
    # The ranks of a tensor-parallel group are consecutive in both meshes.
    split = DistributedConfig(tp_size=2, fsdp_size=4)
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=split, attn_implementation="eager").train()
    assert model.model.layers[0].self_attn.q_proj.weight.to_local().numel() == 32 * 32 // 8
    seqpar.hf.parallelize(model, mesh=mesh, strategy="hybrid")
    loss = model(**seqpar.hf.shard_batch(batch, mesh=mesh)).loss
    loss.backward()
    return abs(loss.item() - losses[0]), worst(full_gradients(model), grads)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="its tp_plan with FSDP2")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_tensor_parallel_plan(pool: Pool, tmp_path: Path, kind: str) -> None:
    tiny(kind).save_pretrained(tmp_path)
    for loss, gradient in pool.run(8, with_tensor_parallel, str(tmp_path), kind):
        assert loss < LOSS and gradient < GRADIENT
