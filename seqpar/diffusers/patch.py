"""``parallelize`` and ``restore``: hooks on a model, and the methods ``forward`` of it and of its attention modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..base.checks import no_compile
from ..comm.collectives import all_reduce
from ..comm.handshake import leave_calls
from ..layers.holders import refuse_shards
from ..patching.forwards import find_in_class, replace_forward
from ..placement.strategies import StrategyName
from ..ranks.mesh import size_of
from ..sharding.same_rows import compare, compares_now
from ..sharding.sharding import Sharding
from ..sharding.spec import Deterministic, attention_spec
from .call import CallMode, ModelCall, ModelCalls, TrialCall, mode_of_thread
from .foreign import check_hooks, matching, models_in, modules_of
from .plans import Plan, has_plan, plan_of
from .sites import AttentionSite, lacks_keys
from .trial import PlanTrial

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..kernels import BackendName
    from ..placement.strategies import StrategyOptions

ModelOrPipeline = TypeVar("ModelOrPipeline")
_OWN = "_seqpar_diffusers"
_SITE = "_seqpar_attention"
_SAME_INPUTS = (
    "give all of them the same inputs: draw noise, timesteps and dropped captions from generators whose seed depends "
    "on the dp rank, not on the rank"
)


def parallelize(
    model: ModelOrPipeline,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    strategy: StrategyName = "ring",
    plan: Plan | None = None,
    backend: BackendName = "auto",
    deterministic: Deterministic = False,
    **options: Unpack[StrategyOptions],
) -> ModelOrPipeline:
    """Shard the tokens of a diffusers transformer over ranks, from its first block to its last. Changes it in place.

    Call it as before, with the same whole inputs on every rank of a sequence: also the noise, the timesteps and the
    rows whose caption is dropped. With the environment variable ``SEQPAR_CHECK=1`` the ranks compare their inputs.
    Every rank gets the whole output. Images, videos and texts may have any length, and attention any number of heads.

    Gradients follow the package's convention: each rank has a loss, such as the one-device loss of the whole output,
    and the mean of the ranks' gradients (``seqpar.sync_gradients``, DDP, FSDP2) is one device's gradient. The
    gradients of inputs are this mean already.

    Dropout, also LoRA's, is drawn by each rank for its tokens.

    Args:
        model: a transformer, or what holds some: a wrapper (peft, DDP, FSDP, ``torch.compile``) or a pipeline.
        mesh: the sequence is sharded over its ring and ulysses dimensions.
        group: the ranks the sequence is sharded over, instead of a mesh. With neither, the default group.
        strategy: as in ``seqpar.attention``.
        plan: where the model's tokens are, for models that have no plan in this package.
        backend: as in ``seqpar.attention``.
        deterministic: as in ``seqpar.attention``.
        options: the strategy's options, as in ``seqpar.attention``.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is neither a module nor a pipeline, or an option has the wrong type.
        ValueError: the model has no plan, or is parallelized already, or the plan names a module or an argument that
            it does not have. Later, in a call: inputs that do not fit the plan, fewer image tokens than ranks, padding
            before real tokens, or a hook of diffusers, such as a cache, that would decide on each rank from its own
            tokens.
        ValueError: in the first call, with ``plan`` and several ranks, if a module mixes tokens outside of attention.
        RuntimeError: in a call, if an attention module computes attention in another way than by one call of
            ``F.scaled_dot_product_attention``.
    """
    no_tokens = Sharding.segments([0], mesh=mesh, group=group)
    no_tokens.place(attention_spec(strategy, options, backend=backend, deterministic=deterministic))  # raises
    arguments = {"strategy": strategy, "backend": backend, "deterministic": deterministic, **options}
    models = _transformers(model, plan)
    if plan is not None and len(models) > 1:
        raise ValueError(f"plan: the model has {len(models)} transformers; parallelize each with a plan of its own")
    for name, each in models:
        if isinstance(patch := next((vars(m)[_OWN] for m in each.modules() if _OWN in vars(m)), None), ParallelModel):
            todo = "call seqpar.diffusers.restore first" if patch.model is each else "restore the model, then copy it"
            raise ValueError(f"{name}: it is parallelized already{', as a copy' * (patch.model is not each)}; {todo}")
        for pattern in (*plan.cuts, *plan.attention) if plan is not None else ():
            if not matching(each, pattern):
                children = ", ".join(child for child, _ in each.named_children())
                raise ValueError(f"plan: {pattern!r} names no module of {type(each).__name__}, which has {children}")
        refuse_shards(each, no_tokens.sequence_group)
    plans = [plan or plan_of(each) for _, each in models]
    for (_, each), its_plan in zip(models, plans, strict=True):
        ParallelModel(each, its_plan, mesh, group, arguments, trusted=plan is None)
    return model


def restore(model: ModelOrPipeline) -> ModelOrPipeline:
    """Undo ``parallelize``: the model computes what it computed before, bit for bit.

    Raises:
        ValueError: the model is not parallelized, or something has replaced a ``forward`` since.
    """
    for name, each in _transformers(model):
        patch = vars(each).get(_OWN)
        if patch is None or patch.model is not each:
            raise ValueError(f"{name}: it is not parallelized, or it is a copy of a model that is; restore that one")
        patch.undo()
    return model


def gather(model: nn.Module, x: Tensor, streams: str | tuple[str, ...] = "image", *, dim: int = 1) -> Tensor:
    """All tokens of a tensor that a forward hook got inside of a parallelized model, in the order of one device.

    From the first block to the last, a module gets and returns this rank's tokens only. A loss of such values, as in
    feature distillation, needs the tokens of all ranks: call this in the hook, on every rank. The gradients are then
    one device's, by the convention of all gradients.

    Args:
        model: the parallelized model, or a wrapper around it.
        x: this rank's tokens, ``[batch, tokens, ...]`` unless ``dim`` says otherwise.
        streams: which tokens, as the model's plan calls them: "image", "text", or the joined streams in their order,
            such as ``("text", "image")``.
        dim: the dimension of the tokens.

    Returns:
        ``x`` with the tokens of all ranks.

    Raises:
        ValueError: the model is not parallelized, its plan has no such stream, or ``x`` has another number of tokens
            than this rank.
        RuntimeError: no call of the model is running, or its tokens have not been cut yet.

    Examples:
        >>> features = []
        >>> def hook(module, args, output):
        ...     features.append(gather(transformer, output, "image"))
        >>> handle = transformer.blocks[8].register_forward_hook(hook)  # doctest: +SKIP
    """
    patch = next((vars(m)[_OWN] for m in model.modules() if _OWN in vars(m)), None)
    if not isinstance(patch, ParallelModel):
        raise ValueError(
            f"model={type(model).__name__}: it is not parallelized; call seqpar.diffusers.parallelize first"
        )
    return patch.gather(x, (streams,) if isinstance(streams, str) else tuple(streams), dim)


def _transformers(model: Any, plan: Plan | None = None) -> list[tuple[str, nn.Module]]:
    """The transformers that ``model`` is or holds, each with what errors call it."""
    if isinstance(model, nn.Module):
        return [("model", each) for each in _inside(model, plan)]
    components = getattr(model, "components", None)
    if not isinstance(components, Mapping):
        raise TypeError(f"model={type(model).__name__}: expected a diffusers transformer or pipeline")
    # The names of diffusers' pipelines, which have no other way to tell their denoisers.
    found = {name: components[name] for name in ("transformer", "transformer_2") if components.get(name) is not None}
    if not found:
        raise ValueError(f"model: {type(model).__name__} has no transformer, only {', '.join(components)}")
    inside = {each: name for name, component in found.items() for each in _inside(component, plan)}  # each once
    return [(name, each) for each, name in inside.items()]


def _inside(model: nn.Module, plan: Plan | None) -> list[nn.Module]:
    """The parallelized models in ``model``, or the models to parallelize: the outermost ones that have a plan."""
    if found := [module for module in model.modules() if _OWN in vars(module)]:
        return found
    if plan is not None:
        names = (*plan.attention, *plan.cuts, plan.output)
        fitting = (m for m in model.modules() if all(name == "" or matching(m, name) for name in names))
        return [modules_of(next(fitting, model))[""]]  # inside of wrappers that add nothing to names
    models = [*dict.fromkeys(models_in(model))]
    return [x for x in models if has_plan(x)] or models or [model]


class ParallelModel:
    """A parallelized model.

    Attributes:
        model: the transformer.
        plan: where its tokens are.
        calls: what its calls share.
        outputs: the modules whose outputs are gathered, with the stream of each.
        is_checked: whether no module mixes tokens outside of attention. The tests check the package's own plans.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: DeviceMesh | None,
        group: ProcessGroup | None,
        options: Mapping[str, Any],
        trusted: bool,
    ) -> None:
        self.model, self.plan, self.calls = model, plan, ModelCalls(plan, mesh, group, options)
        self.outputs = {plan.output: plan.output_stream, **plan.other_outputs}
        self.is_checked = trusted or self.calls.ranks == 1
        self.root_signature: inspect.Signature | None = None  # if arguments of the model itself are cut
        with ExitStack() as self._undo:
            self._patch()
            self._undo = self._undo.pop_all()  # no error: keep it

    def _patch(self) -> None:
        model, plan = self.model, self.plan
        for pattern, cuts in plan.cuts.items():
            padding = plan.padding[1:] if plan.padding is not None and plan.padding[0] == pattern else ()
            signatures = {m: _signature(n, m, (*cuts, *padding)) for n, m in matching(model, pattern).items()}
            if pattern.endswith(".0"):  # a model may leave out its first block
                for module in matching(model, pattern.removesuffix("0") + "*").values():
                    if (signature := inspect.signature(module.forward)).parameters.keys() >= {*cuts, *padding}:
                        signatures[module] = signature
            for module, signature in signatures.items():
                if module is model:
                    self.root_signature = signature
                else:
                    hook = module.register_forward_pre_hook(partial(self._before, pattern, signature), with_kwargs=True)
                    self._undo.callback(hook.remove)
        for pattern, streams in plan.attention.items():
            for name, module in matching(model, pattern).items():
                vars(module)[_SITE] = AttentionSite(name, module, streams, self.now)
                self._undo.callback(vars(module).pop, _SITE, None)
                self._undo.callback(find_in_class(module))
                self._undo.callback(replace_forward(module, "seqpar.diffusers", _attention))
        for pattern, stream in self.outputs.items():
            outputs = matching(model, pattern)
            if not outputs:
                raise ValueError(f"plan: output={pattern!r} names no module of {type(model).__name__}")
            for output in outputs.values():
                self._undo.callback(output.register_forward_hook(partial(self._gather, pattern, stream)).remove)
        self._undo.callback(replace_forward(model, "seqpar.diffusers", self._forward))
        setattr(model, _OWN, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModel:
        return self  # a copy of the model works with the same ranks

    def now(self, what: str) -> CallMode:
        """The innermost call of the model that is running, for the module ``what``."""
        if running := self.calls.running.now:
            return running
        if torch._C._current_graph_task_id() != -1:  # a backward is running
            cause = (
                "it was called in backward, outside of a call of the parallelized model, as by torch.utils.checkpoint; "
                "use the model's enable_gradient_checkpointing() or PyTorch's checkpoint_wrapper"
            )
        elif replaced := self.calls.replaced(self.model):
            cause = f"{replaced}; undo that, or restore the model and parallelize it afterwards"
        else:
            cause = "it was called outside of a call of the parallelized model; call the model, or restore it first"
        raise RuntimeError(f"{what}: {cause}")

    @no_compile
    def gather(self, x: Tensor, streams: tuple[str, ...], dim: int) -> Tensor:
        call = self.now("gather").call
        if unknown := [stream for stream in streams if stream not in self.plan.streams]:
            raise ValueError(f"streams={streams}: the plan has no {unknown[0]!r}, only {', '.join(self.plan.streams)}")
        if uncut := [stream for stream in streams if stream not in call.lengths]:
            raise RuntimeError(f"gather: the {uncut[0]} tokens have not been cut yet, so every rank holds all of them")
        lengths = [call.sharding((stream,)).seq_local for stream in streams]
        if x.shape[dim] != sum(lengths):
            raise ValueError(
                f"x: {x.shape[dim]} tokens along dim {dim}, but this rank holds {lengths} tokens of {streams}; name "
                "the streams of x in their order, or leave out gather where every rank holds all tokens"
            )
        parts = zip(x.split(lengths, dim), streams, strict=True)
        return torch.cat([call.whole(part, stream, dim) for part, stream in parts], dim)

    def undo(self) -> None:
        if found := self.calls.replaced(self.model):
            raise ValueError(f"{found}; undo that first")
        self._undo.close()
        delattr(self.model, _OWN)

    @no_compile
    def _forward(self, model: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return self._call(model, original, args, kwargs)
        except Exception as error:
            leave_calls(self.calls.sequence_group, error)
            raise

    def _call(self, model: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if getattr(model, "_parallel_config", None) is not None:
            raise ValueError(
                "model: enable_parallelism was called; a model has either diffusers' parallelism or seqpar's"
            )
        check_hooks(model)
        refuse_shards(model, self.calls.sequence_group)
        unchecked = None if self.is_checked else self._check(model, original, args, kwargs)
        args, kwargs = self._inputs(args, kwargs)
        call = ModelCall(self.calls, model)
        self.calls.running.recomputed(model.modules(), self._undo, _again)
        for module in model.modules():
            if _SITE in vars(module):
                find_in_class(module)
        with call.running():
            output = self._run(call, original, args, kwargs)
        missing = ["attention module"] * (not call.attended) + [x for x in self.outputs if x not in call.gathered]
        if missing:
            what = missing[0]
            raise RuntimeError(f"model: it called no {what} of the plan, so tokens of other ranks had no effect on it")
        if unchecked is not None:
            raise ValueError(
                "plan: it could not be checked whether the model's modules mix tokens outside of attention, because a "
                f"run on a few tokens ended with {type(unchecked).__name__}: {unchecked}; a rank may hold any number "
                "of tokens"
            ) from unchecked
        return output

    def _run(self, call: ModelCall, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.root_signature is not None:
            args, kwargs = call.cut_arguments("", self.root_signature, args, kwargs)
        return original(*args, **kwargs)

    def _check(self, model: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Exception | None:
        """Raise an error if a module mixes tokens outside of attention. Returns an error that ended the check."""
        if any(isinstance(m, FullyShardedDataParallel) for m in model.modules()) or any(
            hasattr(p, "_fsdp_flattened") for p in model.parameters()
        ):
            raise ValueError(
                "plan: inside of FullyShardedDataParallel it cannot be checked whether modules mix tokens outside of "
                "attention; shard the weights with fully_shard instead"
            )
        trial = PlanTrial(self.plan, model, self.owns)

        def run(number: int | None) -> None:
            call = TrialCall(self.calls, model, trial, number)
            with call.running():
                self._run(call, original, args, kwargs)

        device = next((x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), torch.device("cpu"))
        try:
            with torch.no_grad():
                mixer = trial.find_mixer(run, device)
        except Exception as error:
            return error
        if mixer is not None:
            raise ValueError(
                f"plan: in {mixer} a token sees other tokens outside of attention, and a rank holds only some of them; "
                "the model cannot be parallelized, unless the plan cuts after this module or gathers before it"
            )
        self.is_checked = True
        return None

    def owns(self, hook: Any) -> bool:
        """Whether ``parallelize`` has registered the hook."""
        return getattr(getattr(hook, "func", None), "__self__", None) is self

    def _inputs(self, args: Any, kwargs: Any) -> Any:
        """The inputs; their gradients are averaged over the ranks, since each rank computes from its tokens only."""
        values, structure = tree_flatten((args, kwargs))
        tensors = {i: x for i, x in enumerate(values) if isinstance(x, Tensor)}
        group = self.calls.sequence_group
        if compares_now(group):
            for x in tensors.values():
                compare(x, lambda: None, group, _SAME_INPUTS)
        chosen = [i for i, x in tensors.items() if x.requires_grad]
        if chosen and torch.is_grad_enabled() and self.calls.ranks > 1:
            for i, x in zip(chosen, _AverageGradients.apply(group, *(values[i] for i in chosen)), strict=True):
                values[i] = x
        return tree_unflatten(values, structure)

    @no_compile
    def _before(self, pattern: str, signature: inspect.Signature, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = self.now(type(module).__name__).call
        if pattern.endswith(".0") and call.first.setdefault(pattern, module) is not module:
            return args, kwargs
        return call.cut_arguments(pattern, signature, args, kwargs)

    @no_compile
    def _gather(self, pattern: str, stream: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        call = self.now(pattern).call
        if pattern in call.gathered:
            raise RuntimeError(f"plan: the model called two modules of output={pattern!r}")
        call.gathered.add(pattern)
        return call.whole(output, stream, dim=1)


def _attention(module: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the forward of an attention module. Blocks share compiled code, because this is one function for all."""
    site = getattr(module, _SITE)
    mode = mode_of_thread() if torch.compiler.is_compiling() else None
    if mode is None:
        mode = needs_a_call_of_the_model(site)
    return mode.run(site, lacks_keys(site, args, kwargs), original, args, kwargs)


@no_compile  # with fullgraph=True, torch.compile's error says the name of the function
def needs_a_call_of_the_model(site: AttentionSite) -> CallMode:
    mode: CallMode = site.now(site.name)
    return mode


def _again(mode: CallMode | None) -> AbstractContextManager[None]:
    """A block that backward computes again belongs to the call of its forward."""
    return nullcontext() if mode is None else mode.call.running()


def _signature(name: str, module: nn.Module, arguments: tuple[str, ...]) -> inspect.Signature:
    signature = inspect.signature(module.forward)
    if missing := [argument for argument in arguments if argument not in signature.parameters]:
        raise ValueError(
            f"plan: {name or 'the model'} ({type(module).__name__}) takes no {missing[0]}, but "
            + ", ".join(signature.parameters)
        )
    return signature


class _AverageGradients(torch.autograd.Function):
    """The tensors themselves; in backward, the mean of their gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(_mean(grad, ctx.group) for grad in grads)


def _mean(grad: Tensor, group: ProcessGroup) -> Tensor:
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True).contiguous()
    return (all_reduce(wide, group) / size_of(group)).to(grad.dtype)
