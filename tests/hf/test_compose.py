"""Parallelized models with DDP, FSDP2, checkpointing, LoRA, torch.compile, pipelines and tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")

import transformers
from packaging.version import Version
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import seqpar
import seqpar.hf

from ..pool import Pool, mesh_of, on_ranks
from .workers import (
    HYBRIDS,
    Result,
    Rows,
    check,
    check_gradients,
    check_loss,
    check_step,
    gradients,
    make_batch,
    mean_of,
    mean_over_labels,
    one_device,
    one_device_of,
    tiny,
    trained,
)

pytestmark = pytest.mark.slow
Batch = dict[str, Tensor]


@cache
def all_ranks() -> DeviceMesh:
    return dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))


def shard_fully(model: Any, **options: Any) -> None:
    mesh = all_ranks()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


@on_ranks
def wrapped(
    group: ProcessGroup, wrapper: str, kind: str, reentrant: bool | None, batches: list[Batch], expected: Result
) -> None:  # fmt: skip
    mesh = mesh_of(2, 1, 2, 1)
    model = tiny(kind)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if wrapper == "fsdp then parallelize":
        shard_fully(model)
    seqpar.hf.parallelize(model, mesh=mesh, strategy="hybrid")
    outer: Any = DistributedDataParallel(model) if wrapper == "ddp" else model
    if wrapper == "fsdp":
        shard_fully(model)
    if wrapper == "fsdp in float64":  # it casts the arguments of each layer
        shard_fully(model, mp_policy=MixedPrecisionPolicy(torch.float64))
    at = mesh["dp"].get_local_rank()
    loss = outer(**seqpar.hf.shard_batch(batches[at], mesh=mesh)).loss
    loss.backward()
    # The router's loss in it is the replica's.
    check(Result(expected.loss if "moe" in kind else loss.item(), gradients(outer)), expected)


@pytest.mark.thorough(kind=["qwen3_moe", "bert", "gemma2"])
@pytest.mark.thorough(wrapper=["ddp"], kind=["qwen3_5"])
@pytest.mark.thorough(wrapper=["fsdp then parallelize"])
@pytest.mark.parametrize(
    ("wrapper", "kind", "reentrant"),
    [
        ("ddp", "llama", None),
        ("ddp", "qwen3_moe", False),
        ("ddp", "bert", None),
        ("fsdp", "gemma2", None),
        ("fsdp", "llama", False),
        ("fsdp", "llama", True),
        ("fsdp in float64", "llama", True),
        ("fsdp then parallelize", "llama", None),
        ("fsdp", "qwen3_5", True),
        ("ddp", "qwen3_5", False),
    ],
)
def test_wrappers_over_all_ranks(four: Pool, wrapper: str, kind: str, reentrant: bool | None) -> None:
    """The wrapper reduces the gradients of two data-parallel ranks and two ranks of a sequence."""
    first = "plain" if kind in HYBRIDS else "packed"
    batches = [make_batch(first, seed=3), make_batch("packed" if "moe" in kind else "right", seed=4)]
    four.run(4, wrapped, wrapper, kind, reentrant, batches, mean_over_labels(kind, batches))


def fsdp1(model: nn.Module, use_orig_params: bool, *units: type[nn.Module]) -> Any:
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls=set(units)) if units else None
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(torch.float64) if use_orig_params else None,  # it casts the arguments
    )


def fsdp1_gradients(outer: Any, kind: str) -> dict[str, Tensor]:
    """The gradients, from the weights after a step of SGD: only one mode of FSDP1 gives access to gradients."""
    torch.optim.SGD(outer.parameters(), lr=100.0).step()
    before = dict(tiny(kind).named_parameters())
    with FullyShardedDataParallel.summon_full_params(outer, writeback=False):
        after = {n.replace("_fsdp_wrapped_module.", ""): p.detach() for n, p in outer.named_parameters()}
        return {name: (before[name].detach() - x) / 100.0 for name, x in after.items()}


@on_ranks
def wrapped_in_fsdp1(group: ProcessGroup, use_orig_params: bool, units: tuple[Any, ...], expected: Result) -> None:
    outer = fsdp1(seqpar.hf.parallelize(tiny("llama"), group=group), use_orig_params, *units)
    loss = outer(**seqpar.hf.shard_batch(make_batch("packed"), group=group)).loss
    loss.backward()
    check(Result(loss.item(), fsdp1_gradients(outer, "llama")), expected)


@pytest.mark.parametrize(
    ("use_orig_params", "units"),
    [(True, ()), (False, ()), (True, (LlamaDecoderLayer,)), (False, (LlamaDecoderLayer, nn.Linear))],
    ids=["parameters", "flat", "layers", "layers and head, flat"],
)
def test_fsdp1(two: Pool, use_orig_params: bool, units: tuple[Any, ...]) -> None:
    two.run(2, wrapped_in_fsdp1, use_orig_params, units, one_device_of("llama", "packed"))


class Around(nn.Module):
    """A module that contains a model and calls it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **kwargs: Any) -> Any:
        return self.module(**kwargs)


def in_ddp(model: Any, group: ProcessGroup) -> Any:
    return DistributedDataParallel(model, process_group=group)


def in_ddp_of_one(model: Any, group: ProcessGroup) -> Any:
    return in_ddp(model, [dist.new_group([rank]) for rank in range(group.size())][group.rank()])


def in_ddp_by_parts(model: Any, group: ProcessGroup) -> Any:
    model.model, model.lm_head = DistributedDataParallel(model.model), DistributedDataParallel(model.lm_head)
    return model


def in_fsdp(model: Any, group: ProcessGroup) -> Any:
    shard_fully(model)
    return model


def around_in_fsdp(model: Any, group: ProcessGroup) -> Any:
    outer = Around(model)
    fully_shard(outer, mesh=all_ranks())
    return outer


def in_dropped_ddp(model: Any, group: ProcessGroup) -> Any:
    DistributedDataParallel(model)
    return model


WRAPPERS: dict[str, Callable[[Any, ProcessGroup], Any]] = {
    "none": lambda model, group: model,
    "ddp": in_ddp,
    "ddp over dp": in_ddp_of_one,
    "ddp of the layers, ddp of the head": in_ddp_by_parts,
    "dropped ddp": in_dropped_ddp,
    "replicate": lambda model, group: replicate(model) or model,
    "fsdp1": lambda model, group: fsdp1(model, True),
    "fsdp": in_fsdp,
    "fsdp around": around_in_fsdp,
}


@on_ranks
def loss_outside_the_forward(group: ProcessGroup, wrapper: str, expected: Result) -> None:
    model = seqpar.hf.parallelize(tiny("llama"), group=group)
    local = seqpar.hf.shard_batch(make_batch("packed"), group=group)
    labels = local.pop("labels")
    outer = WRAPPERS[wrapper](model, group)
    loss = model.loss_function(outer(**local).logits, labels, seqpar=local["seqpar"])
    loss.backward()
    if wrapper in ("none", "dropped ddp", "ddp over dp"):
        seqpar.sync_gradients(model, group=group)
    grads = fsdp1_gradients(outer, "llama") if wrapper == "fsdp1" else gradients(outer)
    check(Result(loss.item(), grads), expected)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_loss_outside_the_forward(two: Pool, wrapper: str) -> None:
    """The model returns logits, and the caller computes the loss, as in the last stage of a pipeline."""
    two.run(2, loss_outside_the_forward, wrapper, one_device_of("llama", "packed"))


@on_ranks
def averaged_by_hand(group: ProcessGroup, expected: Result) -> None:
    """The ranks' gradients are averaged or summed by hand."""
    for option in ("mean", "sum"):
        options: Any = {"gradients": option}
        model = seqpar.hf.parallelize(tiny("llama"), group=group, **options)
        model(**seqpar.hf.shard_batch(make_batch("plain"), group=group)).loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= group.size() if option == "mean" else 1
        check_gradients(gradients(model), expected, option)


def test_option_gradients(pool: Pool) -> None:
    pool.run(2, averaged_by_hand, one_device_of("llama", "plain"))


@on_ranks
def data_parallel_alone(group: ProcessGroup, batches: list[Batch], expected: Result) -> None:
    mesh = mesh_of(2, 1, 2, 1)
    model = seqpar.hf.parallelize(tiny("llama"), mesh=mesh, strategy="hybrid")
    outer = in_ddp(model, mesh["dp"].get_group())
    at = mesh["dp"].get_local_rank()
    local = seqpar.hf.shard_batch(batches[at], mesh=mesh)
    with outer.no_sync():
        (outer(**local).loss / 2).backward()
    loss = outer(**local).loss
    (loss / 2).backward()
    seqpar.sync_gradients(model, mesh=mesh)
    check(Result(loss.item(), gradients(outer)), expected)


def test_ddp_over_data_parallel_ranks(four: Pool) -> None:
    """DDP over dp averages over the replicas only, with two micro-batches; ``sync_gradients`` over all ranks."""
    batches = [make_batch("plain", seed=3), make_batch("left", seed=4)]
    four.run(4, data_parallel_alone, batches, mean_over_labels("llama", batches))


@on_ranks
def checkpointed(
    group: ProcessGroup, kind: str, reentrant: bool, batches: list[Batch], losses: list[float], expected: Result
) -> None:
    model = seqpar.hf.parallelize(tiny(kind), group=group)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ours = [model(**seqpar.hf.shard_batch(batch, group=group)).loss for batch in batches]
    for loss, of_one in zip(ours, losses, strict=True):
        check_loss(loss.item(), of_one)
        (loss / 2).backward()
    seqpar.sync_gradients(model, group=group)
    check_gradients(gradients(model), expected)


@pytest.mark.parametrize(
    ("kind", "reentrant"), [("mistral", True), ("mistral", False), ("gemma3", True), ("deepseek_v3", False)]
)
def test_activation_checkpointing(pool: Pool, kind: str, reentrant: bool) -> None:
    """Two forwards run before their backwards. Each recomputation must use the mask of its own batch."""
    batches = [make_batch("packed", seed=5), make_batch("left", 38, seed=6)]
    pool.run(2, checkpointed, kind, reentrant, batches, *mean_of(kind, batches))


def adapted(kind: str, targets: list[str], group: ProcessGroup | None = None, before: bool = False) -> Any:
    """A model with LoRA, which is parallelized ``before`` or after it gets its adapters."""
    peft, model = pytest.importorskip("peft"), tiny(kind)
    if group is not None and before:
        seqpar.hf.parallelize(model, group=group, strategy="ulysses")
    torch.manual_seed(7)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    return model if group is None or before else seqpar.hf.parallelize(model, group=group, strategy="ulysses")


@on_ranks
def with_lora(group: ProcessGroup, kind: str, targets: list[str], before: bool, batch: Batch, expected: Result) -> None:
    local = seqpar.hf.shard_batch(batch, group=group)
    check_step(group, adapted(kind, targets, group, before), local, expected)


@pytest.mark.thorough(kind=["qwen3_5"], before=[True])
@pytest.mark.parametrize(
    ("kind", "targets", "before"),
    [
        ("qwen3", ["q_proj", "v_proj"], False),
        ("qwen3", ["q_proj", "v_proj"], True),
        ("qwen3", ["o_proj", "lm_head"], True),
        ("qwen3_5", ["in_proj_qkv", "out_proj", "q_proj"], False),
        ("qwen3_5", ["in_proj_qkv", "out_proj", "q_proj"], True),
    ],
)
def test_lora(pool: Pool, kind: str, targets: list[str], before: bool) -> None:
    batch = make_batch("plain" if kind in HYBRIDS else "packed")
    pool.run(2, with_lora, kind, targets, before, batch, trained(adapted(kind, targets), batch, use_cache=False))


@on_ranks
def compiled(
    group: ProcessGroup, what: str, strategy: Any, batches: list[Batch], losses: list[float], expected: Result
) -> tuple[int, int]:
    """Compile each decoder layer or the decoder, as one graph each, or the whole model, which then shards one batch.

    Returns the numbers of graphs after the first step and after all steps.
    """
    torch._dynamo.reset()
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    model = seqpar.hf.parallelize(tiny("llama"), group=group, strategy=strategy)
    modules = {"layers": [*model.model.layers], "decoder": [model.model], "model": [model]}[what]
    for module in modules if group.rank() == 1 else []:  # rank 0 sends the same in eager code
        module.compile(backend=backend, fullgraph=what != "model")
    first = 0
    for number, (batch, of_one) in enumerate(zip(batches, losses, strict=True)):
        in_full = what == "model" and number == 1
        loss = model(**(batch if in_full else seqpar.hf.shard_batch(batch, group=group))).loss
        (loss / len(batches)).backward()
        check_loss(loss.item(), of_one)
        first = first or graphs
    seqpar.sync_gradients(model, group=group)
    check_gradients(gradients(model), expected)
    return first, graphs


@pytest.mark.thorough
@pytest.mark.parametrize(("what", "strategy"), [("decoder", "ring"), ("model", "ring"), ("layers", "auto")])
def test_compiled_models(pool: Pool, what: str, strategy: str) -> None:
    """If the whole model is compiled, the hooks and the loss run outside of its graphs."""
    batches = [make_batch("packed", seed=seed) for seed in range(3, 6)]
    _, (first, graphs) = pool.run(2, compiled, what, strategy, batches, *mean_of("llama", batches))
    assert 1 <= first <= 2  # two layers, which may share one; the decoder is one, and the model has two
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


def rows_of_documents(count: int, length: int) -> Batch:
    """Rows of packed documents, each with boundaries of its own."""
    batch = make_batch("plain", length, rows=count)
    batch["position_ids"] = torch.arange(length).repeat(count, 1)
    for row in range(count):
        for start in (5 + 3 * row, 30 - 2 * row):
            batch["position_ids"][row, start:] = torch.arange(length - start)
            batch["labels"][row, start] = -100
    return batch


@on_ranks
def pipelined(group: ProcessGroup, kind: str, batch: Batch, expected: Result) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "ring"))
    sequence, stages = mesh["ring"].get_group(), mesh["pp"].get_group()
    model = seqpar.hf.parallelize(tiny(kind), group=sequence)
    first = stages.rank() == 0
    part = Stage(model, first)
    local = seqpar.hf.shard_batch(batch, group=sequence)
    shard = local["seqpar"]

    def loss_of(logits: Tensor, target: Tensor) -> Tensor:
        return model.loss_function(logits, target, seqpar=shard)

    stage = PipelineStage(part, stages.rank(), 2, torch.device("cpu"), group=stages)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of, scale_grads=False)
    arguments = {"position_ids": local["position_ids"], "seqpar": shard}
    losses: list[Tensor] = []
    if first:
        schedule.step(local["input_ids"], **arguments)
    else:
        schedule.step(target=local["labels"], losses=losses, **arguments)
        check_loss(sum(x.item() for x in losses), expected.loss)
    seqpar.sync_gradients(part, group=sequence)
    here = set(map(id, part.parameters()))
    ours = {name: p.grad for name, p in model.named_parameters() if id(p) in here and p.grad is not None}
    check_gradients(ours, expected._replace(gradients={name: expected.gradients[name] for name in ours}))


@pytest.mark.thorough(kind=["llama"], how=["plain", "right"])
@pytest.mark.parametrize(
    ("how", "kind"), [("plain", "llama"), ("right", "llama"), ("documents", "llama"), ("plain", "qwen3_5")]
)
def test_pipeline_stages(pool: Pool, how: str, kind: str) -> None:
    """2 data-parallel replicas x 2 stages x 2 sequence ranks. Each micro-batch has its own documents or padding."""
    batch = rows_of_documents(4, 46) if how == "documents" else make_batch(how, 46, rows=4)
    pool.run(8, pipelined, kind, batch, one_device(kind, batch))


@on_ranks
def with_tensor_parallel(group: ProcessGroup, path: str, expected: Result) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    mesh = mesh_of(1, 2, 1, 2)
    # The ranks of a tensor-parallel group are consecutive in both meshes.
    split = DistributedConfig(tp_size=2, fsdp_size=2)
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=split, attn_implementation="eager").train()
    assert model.model.layers[0].self_attn.q_proj.weight.to_local().numel() == 32 * 32 // 4
    seqpar.hf.parallelize(model, mesh=mesh, loss_chunk=5)
    with Rows() as rows:
        check_step(group, model, seqpar.hf.shard_batch(make_batch("packed"), mesh=mesh), expected, sync=False)
    assert rows.most == 5


@pytest.mark.thorough
@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="its tp_plan with FSDP2")
@pytest.mark.thorough(kind=["qwen3"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_tensor_parallel_plan(four: Pool, tmp_path: Path, kind: str) -> None:
    """transformers' own ``tp_plan`` and FSDP2 (2 x 2 ranks) around a sequence over 2 ranks."""
    tiny(kind).save_pretrained(tmp_path)
    four.run(4, with_tensor_parallel, str(tmp_path), one_device_of(kind, "packed"))


@on_ranks
def tensor_parallel_over_the_sequence(group: ProcessGroup, when: str) -> str:
    """tp over the ranks of the sequence, before or after ``parallelize``; ``fully_shard`` over them is right."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model = tiny("llama")
    plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    batch = make_batch("plain")
    if when == "fully_shard":
        fully_shard(model.model.layers[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
        seqpar.hf.parallelize(model, mesh=mesh)
        model(**batch).loss.backward()
        return "right"
    try:
        if when == "after":
            seqpar.hf.parallelize(model, mesh=mesh)
            model(**batch).loss.backward()
        parallelize_module(model.model.layers[1], mesh, plan)
        if when == "before":
            seqpar.hf.parallelize(model, mesh=mesh)
    except ValueError as error:
        return str(error)
    try:
        model(**batch)
    except ValueError as error:
        return f"forward: {error}"
    return "wrong"


@pytest.mark.parametrize(
    ("when", "words"), [("before", "model."), ("after", "forward: model."), ("fully_shard", "right")]
)
def test_tensor_parallelism_over_the_sequence(pool: Pool, when: str, words: str) -> None:
    for said in pool.run(2, tensor_parallel_over_the_sequence, when):
        assert said.startswith(words)
        fits = "layers.1.mlp.gate_proj.weight: it is sharded over ranks [0, 1], which share a sequence"
        assert when == "fully_shard" or (fits in said and "seqpar.init_mesh(ring=2, tp=2) on 4 ranks" in said)
