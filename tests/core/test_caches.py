"""Nothing that is kept depends on the mode in which it was made.

``KEPT`` lists everything in the package that keeps a value. Each mode of PyTorch surrounds the first calls, which fill
the caches; then the same objects are used in training, and compared bit by bit with a training that filled them itself.
"""

from __future__ import annotations

import ast
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
from seqpar import Mask, Sharding
from seqpar.base import cache
from seqpar.base.cache import ByteCache
from seqpar.layers import rotary

from ..pool import Pool, on_ranks
from ..strategies.test_mixers import Case

N = 38
# The results of a case. The first argument: whether it runs backward. The second: what it does to what it calls.
Run = Callable[..., list[Tensor]]


class Kept(Tensor):
    """What a mode makes of new tensors. No cache may hold one."""


class FunctionMode(TorchFunctionMode):
    makers = torch.arange, torch.tensor, torch.from_numpy, torch.stack, torch.cat

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.as_subclass(Kept) if func in self.makers and type(result) is Tensor else result


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = func is torch.ops.aten.arange.start and type(result) is Tensor
        return result.as_subclass(Kept) if made else result


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "float64": partial(default_dtype, torch.float64),
    "bfloat16": partial(default_dtype, torch.bfloat16),
    "meta": partial(torch.device, "meta"),
    "function": FunctionMode,
    "dispatch": DispatchMode,
}


def clear_caches() -> None:
    """Empty every cache of the package that belongs to a module."""
    for name, module in list(sys.modules.items()):
        if name.startswith("seqpar."):
            for value in vars(module).values():
                if isinstance(value, ByteCache):
                    value.clear()
                elif callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()
    rotary._tables.clear()


def not_plain() -> list[str]:
    """The kept tensors that a later training could not use."""
    values = [value for of in (cache._tensors, cache._without_owner) for value, _ in of._values.values()]
    values += [table for by_key in rotary._tables.values() for _, table in by_key.values()]
    found, seen = [], set[int]()
    while values:
        x = values.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, Tensor):
            plain = type(x) is Tensor and x.device.type == "cpu" and not (x.is_inference() or x.requires_grad)
            found += (
                [] if plain and not torch._C._functorch.is_functorch_wrapped_tensor(x) else [f"{type(x)} {x.shape}"]
            )
        elif isinstance(x, tuple | list):
            values += x
        elif isinstance(x, dict):
            values += [*x.values()]
        elif type(x).__module__.startswith("seqpar."):
            values += [*getattr(x, "__dict__", {}).values()]
    return found


def attention_of(group: ProcessGroup, arguments: dict[str, Any]) -> Run:
    mask = Mask.documents([[0, 5, 31, N], [0, 20, N]]) & Mask.sliding_window(17, 3)
    sharding, slopes = Sharding(N, arguments.get("layout", "zigzag"), group=group), torch.linspace(0.1, 0.9, 6)
    options = {key: value for key, value in arguments.items() if key != "layout"}
    whole = [torch.randn(2, N, h, 4, generator=torch.Generator().manual_seed(h)) for h in (6, 2, 3)]

    def run(trains: bool, wrap: Any = lambda call: call) -> list[Tensor]:
        q, k, v = (sharding.shard(whole[i]).requires_grad_(trains) for i in (0, 1, 1))
        out = seqpar.attention(q, k, v, mask=mask, sharding=sharding, alibi_slopes=slopes, dropout_p=0.1,
                               dropout_seed=3, **options)  # fmt: skip
        return backward(out, q, k, v)

    return run


def layer_of(group: ProcessGroup, strategy: str, **options: Any) -> Run:
    torch.manual_seed(3)
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}
    layer = seqpar.ParallelAttention(
        strategy, 24, 6, 2, group=group, rope=seqpar.RotaryEmbedding(4, scaling=scaling), device="cpu", **options
    )
    mask, sharding = Mask.documents([0, 5, 31, N]), Sharding(N, "zigzag", group=group)
    x, labels = torch.randn(2, N, 24), torch.arange(2 * N).view(2, N)

    def run(trains: bool, wrap: Any = lambda call: call) -> list[Tensor]:
        x_local = sharding.shard(x).requires_grad_(trains)
        y = wrap(layer)(x_local, mask=mask, sharding=sharding)
        loss = seqpar.token_loss(y.float().square().mean(-1), sharding.shard(labels), sharding=sharding)
        return [loss.detach(), sharding.unshard(y.detach()), *backward(y, x_local)]

    return run


def mixer_of(group: ProcessGroup, mixer: str) -> Run:
    case = Case(mixer, "zigzag", N, documents=((5, 31),), heads=(6, 3), dtype=torch.float32)
    sharding, mask = Sharding(N, "zigzag", group=group), case.mask
    given = {"mask": mask}

    class Fixed(Case):
        @property
        def mask(self) -> Mask:
            return given["mask"]

    fixed = Fixed(mixer, "zigzag", N, documents=((5, 31),), heads=(6, 3), dtype=torch.float32)
    tensors = [x.detach().float() for x in case.tensors()]

    def run(trains: bool, wrap: Any = lambda call: call) -> list[Tensor]:
        leaves = [sharding.shard(x).requires_grad_(trains) for x in tensors[:-1]]
        weight = tensors[-1].clone().requires_grad_(trains)
        return backward(wrap(fixed.compute)(sharding, *leaves, weight), *leaves, weight)

    return run


def decoding_of(group: ProcessGroup) -> Run:
    torch.manual_seed(3)
    layer = seqpar.ParallelAttention("ring", 24, 6, 2, group=group, rope=seqpar.RotaryEmbedding(4), device="cpu")
    mask, sharding, x = Mask.sliding_window(6), Sharding(N - 2, "zigzag", group=group), torch.randn(1, N, 24)

    @torch.no_grad()
    def run(trains: bool, wrap: Any = lambda call: call) -> list[Tensor]:
        cache = seqpar.KeyValueCache(sharding)
        prompt = layer(sharding.shard(x[:, : N - 2]), mask, cache=cache)
        return [prompt, *(layer(x[:, i : i + 1], mask, cache=cache) for i in (N - 2, N - 1))]

    return run


def vocabulary_of(group: ProcessGroup) -> Run:
    torch.manual_seed(3)
    embedding = seqpar.VocabParallelEmbedding(37, 24, group=group, device="cpu")
    head = seqpar.VocabParallelHead(24, 37, group=group, device="cpu")
    mask = Mask.documents([0, 5, 31, N])
    sharding = Sharding.balanced(mask, N, group=group, strategy="tp_sp")
    ids = torch.randint(37, (2, N), generator=torch.Generator().manual_seed(1))

    def run(trains: bool, wrap: Any = lambda call: call) -> list[Tensor]:
        local = sharding.shard(ids)
        hidden = embedding(local, sharding) + sharding.positions()[:, None].float() / N
        losses = head(hidden, local, sharding)
        loss = seqpar.token_loss(losses, local, sharding=sharding)
        return backward(loss, *([hidden] if trains else []))

    return run


def backward(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    if not y.requires_grad:
        return [y.detach()]
    gradients = torch.autograd.grad(y.float().square().mean(), inputs, allow_unused=True)
    return [y.detach(), *(x for x in gradients if x is not None)]


CASES: dict[str, Callable[[ProcessGroup], Run]] = {
    **{
        name: partial(attention_of, arguments=arguments)
        for name, arguments in {
            "ring": {"strategy": "ring"},
            "ring, striped": {"strategy": "ring", "layout": "striped"},
            "ulysses": {"strategy": "ulysses"},
            "all_gather": {"strategy": "context_parallel", "layout": "striped", "backend": "reference"},
            "hybrid": {"strategy": "hybrid", "ulysses_size": 2},
        }.items()
    },
    "layer": partial(layer_of, strategy="ring"),
    "invariant": partial(layer_of, strategy="ring", deterministic="invariant"),
    "activations": partial(layer_of, strategy="context_parallel", gather="activations"),
    "tp_sp": partial(layer_of, strategy="tp_sp"),
    "decoding": decoding_of,
    "vocabulary": vocabulary_of,
    **{name: partial(mixer_of, mixer=name) for name in ("halo", "by_heads", "by_states")},
}


# Modes that surround a call together, so that there are fewer calls.
TOGETHER = "inference", "no_grad autocast bfloat16", "float64 function", "meta dispatch"
COMPILED = "layer", "halo"


@on_ranks
def trained_after(group: ProcessGroup, names: list[str]) -> list[str]:
    """What differs, in a training after a first call in each mode."""
    found = []
    for name in names:
        make = CASES[name]
        clear_caches()
        expected = make(group)(True)
        for mode in [*TOGETHER, *["compile"] * (name in COMPILED)]:
            clear_caches()
            run = make(group)
            try:
                if mode == "compile":
                    # Only the last rank compiles.
                    is_last = group.rank() == group.size() - 1
                    run(True, *[partial(torch.compile, backend="aot_eager")] * is_last)
                else:
                    with ExitStack() as stack:
                        for each in mode.split():
                            stack.enter_context(MODES[each]())
                        run(torch.is_grad_enabled())
                found += [f"{name} after {mode}: kept {x}" for x in not_plain()]
                actual = run(True)
            except (RuntimeError, TypeError, ValueError) as error:
                found.append(f"{name} after {mode}: {error}")
                continue
            if not all(map(torch.equal, actual, expected)):
                found.append(f"{name} after {mode}: another result")
    return found


def test_training_after_a_first_call_in_each_mode(pool: Pool) -> None:
    assert {*" ".join(TOGETHER).split()} == {*MODES}
    for world, names in ((2, [name for name in CASES if name != "hybrid"]), (4, ["hybrid"])):
        for found in pool.run(world, trained_after, names):
            assert not found, "\n".join(found)


def test_a_value_is_made_outside_of_every_mode() -> None:
    """Also where the package refuses attention: in transforms of torch.func, and for angles and positions in them."""
    sharding, rope, x = Sharding(8), seqpar.RotaryEmbedding(4), torch.randn(1, 8, 2, 4)
    numbers, eight = torch.arange(5), torch.arange(8)

    def fill(y: Tensor) -> Tensor:
        cache.cached_tensors("a key", torch.device("cpu"), lambda: (torch.arange(3, device="cpu"), numbers + 1))
        rotated, _ = rope(y, y, eight)
        return rotated.sum() * sharding.positions().sum()

    expected = fill(x)
    transforms = {"grad": torch.func.grad, "vmap": lambda f: lambda y: torch.func.vmap(f)(y[None])}
    for name in (*MODES, *transforms):
        clear_caches()
        if name in transforms:
            transforms[name](fill)(x)
        else:
            with MODES[name]():
                fill(x)
        assert not not_plain() and torch.equal(fill(x), expected), name
    with torch.inference_mode():  # a write is noticed, also one in inference mode
        eight += 1
    assert not torch.equal(fill(x), expected)


def kept_values() -> dict[str, str]:
    """By module: what keeps values there, in the order of the file."""
    found: dict[str, str] = {}
    for module in pkgutil.walk_packages(seqpar.__path__, "seqpar."):
        if module.name.startswith(("seqpar.peers", "seqpar.examples")):
            continue
        spec: Any = module.module_finder.find_spec(module.name, None)
        names = [*keepers(ast.parse(Path(spec.origin).read_text()))]
        if names:
            found[module.name.removeprefix("seqpar.")] = " ".join(names)
    return found


KEEPERS = (
    "lru_cache", "cache", "cached_property", "ByteCache", "cached_tensors", "WeakKeyDictionary", "WeakIdKeyDictionary",
    "WeakTensorKeyDictionary",
    "WeakValueDictionary", "ContextVar", "local", "Running",
)  # fmt: skip


def keepers(tree: ast.AST, owner: str = "") -> Iterator[str]:
    """The names of the functions and variables that keep values."""
    for node in ast.iter_child_nodes(tree):
        name = owner
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{owner}.{node.name}".lstrip(".")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not owner:
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            value = node.value
            if isinstance(value, ast.List | ast.Dict | ast.Set) and not name.strip("_").isupper() and name != "__all__":
                yield name
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict) and not node.value.keys:
            target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            if target.startswith("self."):
                yield f"{owner.removesuffix('.__init__')}.{target[5:]}"
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in KEEPERS or (called == "field" and any(ast.unparse(x.value) == "dict" for x in node.keywords)):
                yield owner
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Name | ast.Attribute) and ast.unparse(decorator).split(".")[-1] in KEEPERS:
                    yield name
        yield from keepers(node, name)


def test_everything_that_is_kept_is_listed() -> None:
    assert kept_values() == KEPT


# By module: the functions and attributes that keep what they return, and the variables that keep something else.
# Tensors are kept by ByteCache and cached_tensors, by ``_tables`` of layers.rotary, and in ``tiles`` of KeyIntervals;
# they are all made in ``outside_modes``. The others keep numbers, names, slices, plans, groups, streams, functions, and
# what a running call uses. A new line belongs to one of the two: fill it in ``CASES`` if it keeps tensors.
KEPT: dict[str, str] = {
    "base.cache": "ByteCache.__init__ _tensors _without_owner _captured",
    "patching.replaced": "_shared",
    "comm.handshake": "_told _side_stream",
    "comm.nccl": "_warn_of_problems",
    "comm.shared_memory": "_File.segments SharedMemoryTransport._blocks SharedMemoryTransport._of_size",
    "comm.streams": "ReadyEvents._events _posting _stream_of",
    "comm.trace": "open_traces",
    "comm.waiting": "_name _idle",
    "decoding": "KeyValueCache._layers KeyValueCache._shared",
    "diffusers.call": "ModelCalls.__init__ ModelCalls.__init__ ModelCall.lengths ModelCall.first",
    "diffusers.plans": "Plan",
    "diffusers.trial": "PlanTrial._orders",
    "hf.accelerate": "_maker",
    "hf.batch": "BatchShard",
    "hf.calls.attention": "_spec",
    "hf.calls.forward": "_say_documents_are_apart",
    "hf.inspection.support": "_parameters",
    "hf.mechanisms.compressors": "_running",
    "hf.mechanisms.indexers": "indexers _intervals",
    "hf.mechanisms.mixers": "_registered _running _compiled",
    "hf.calls.per_rank": "_RankArguments.tensors _RankArguments.values",
    "hf.state": "Patch DecodeShard forwards shards_text_model",
    "hf.inspection.trial": "Trial.across Trial.scalings",
    "hf.verification.recording": "Recording.inputs Recording.tensors Recording.gradients Recording.options",
    "kernels": "BackendChoice._supports _warn_of_reference",
    "kernels.bands": "KernelCall.longest KernelCall.has_gaps",
    "kernels.block_lists": "interval_arguments _interval_mask",
    "kernels.cudnn": "_ask",
    "kernels.elementwise": "targeted _no_interpreter _installed",
    "kernels.flash": "_takes_intervals _load _parameters",
    "kernels.hopper": "_why_not",
    "kernels.library": "_capability",
    "layers.gradients": "_sums",
    "layers.rotary": "_tables",
    "masks.mask": "Mask Mask Mask.checksum Mask.head_groups Mask.batch",
    "masks.runs": "Runs.rows Runs.starts",
    "memory.layers": "_modes",
    "memory.offload": "Kept._device Kept._host _copy_stream",
    "mixers": "Exchange.slice Exchange.repeated",
    "placement.heads": "Heads.kv kv_index",
    "placement.layout": (
        "segments_layout Positions._offsets _positions_of shard_positions TokenLayout.rank_positions "
        "TokenLayout.tensor_rows _runs _ulysses_pieces"
    ),
    "placement.levelling": "Level._known",
    "placement.placement": (
        "Placement Placement.rank Placement.ring_rank Placement.sends Placement.length Placement.gathers "
        "Placement.per_host Placement.plan_arguments Placement.within Placement.across "
        "ParallelContext.tensor_meshes ParallelContext.tensor"
    ),
    "planner.attention": "AttentionTimeline._pairs_by_step _pairs_by_owner",
    "planner.compressed_keys": "_window_rows",
    "planner.forecast": "calibration",
    "planner.messages": "_counted_tiles",
    "planner.mixer": "_halo_rows _state_rows",
    "planner.setting": "_mean_pairs",
    "planner.shape": "ModelShape.layer_parameters",
    "planner.split": "_work_by_ring_rank",
    "planner.splits": "_balanced_layout",
    "planner.step": "StepCost._passes",
    "ranks.calls": "Calls.connections Calls.works Calls.greeted current _calls",
    "ranks.in_process": "Crew._messages Crew._wanted",
    "ranks.mesh": "_mesh_groups _meshes _hosts",
    "ranks.processes": "_inherited",
    "ranks.rendezvous": "waits_in_vain",
    "scaled_dot_product": "_reentrant _without_modules _Modules.masks _Modules.__init__ _flex _varlen",
    "schedule.plan": (
        "AttentionPlan._steps AttentionPlan._inter_host_hops AttentionPlan._ranges AttentionPlan._host_ranges "
        "AttentionPlan._programs AttentionPlan.checksum AttentionPlan.longest AttentionPlan.dense "
        "AttentionPlan.intervals AttentionPlan._global_intervals AttentionPlan._exact AttentionPlan._has_queries "
        "PlanByHeads.checksum PlanByHeads.dense _plans"
    ),
    "schedule.program": "ByPeer.rows Hop.received Hop.sent Program.backward_steps",
    "schedule.rows": "KeyIntervals united RowSpans.index GatheredRows.rows_of GatheredRows._pieces",
    "sharding.same_rows": "_calls",
    "sharding.sharding": (
        "Sharding._placements Sharding.calls Sharding.calls Sharding.calls_by_id Sharding.chunks Sharding.tokens "
        "Sharding.grain Sharding.sequence_ranks Sharding.lengths Sharding.checksum Sharding.seq_local"
    ),
    "sharding.spec": "AttentionSpec.slopes spec_checksum _cached",
    "strategies.attend": "_HEADS",
    "strategies.call": "AttentionCall AttentionCall.has_all_keys",
    "sharding.arguments": "_of_one_rank",
    "kernels.base": "Score.needs_positions",
    "kernels.expansion": "RepeatedHeads.__init__",
    "strategies.eager_operators": "_graphs",
    "strategies.head_exchange": (
        "HeadChunk.heads HeadChunk.query_slices HeadChunk.kv_slices HeadExchange.rank HeadExchange.lengths "
        "HeadExchange.tokens HeadExchange.pieces HeadExchange.shares_kv HeadExchange.full_chunk "
        "HeadExchange.chunks"
    ),
    "strategies.invariant": "RankTiles.of",
    "strategies.row_exchange": "_cached window_plan",
    "strategies.sequence_chunks": (
        "ChunkRows.lengths rows_of_sharding rows_in_rank_order SequenceChunks.size SequenceChunks.rank "
        "SequenceChunks.total"
    ),
    "strategies.transfers": "Transfers._local GradientReduce._parts",
    "strategies.transport": "_form",
}
