"""``parallelize`` and ``restore``: hooks on a model, and the methods ``forward`` of it and of its attention modules.

Shapes: b batch, s tokens, h heads, d head_dim.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..base.checks import no_compile
from ..comm.collectives import all_reduce
from ..layers.gradients import refuse_shards
from ..masks.mask import Mask
from ..placement.strategies import StrategyName
from ..ranks.mesh import size_of
from ..scaled_dot_product import SdpaMode, original_sdpa, sdpa
from ..sharding.same_rows import compare, compares_now
from ..sharding.sharding import Sharding
from ..sharding.spec import attention_spec
from .foreign import (
    Wrapped,
    check_hooks,
    checkpoint_functions,
    matching,
    models_in,
    modules_of,
    replaced_by,
    skips_scores,
)
from .plans import Across, Cut, Plan, has_plan, plan_of
from .trial import FewTokens, Trial, attend_to_own_token

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..kernels import BackendName
    from ..placement.strategies import StrategyOptions

Model = TypeVar("Model")
_FULL = Mask.full()
_OWN = "_seqpar_diffusers"
_SAME_INPUTS = (
    "give all of them the same inputs: draw noise, timesteps and dropped captions from generators whose seed depends "
    "on the dp rank, not on the rank"
)
_NATIVE = "call the model's set_attention_backend('native'), or set_default_attn_processor()"


def parallelize(
    model: Model,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    strategy: StrategyName = "ring",
    plan: Plan | None = None,
    backend: BackendName = "auto",
    deterministic: bool = False,
    **options: Unpack[StrategyOptions],
) -> Model:
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
        if isinstance(patch := next((vars(m)[_OWN] for m in each.modules() if _OWN in vars(m)), None), Patch):
            todo = "call seqpar.diffusers.restore first" if patch.model is each else "restore the model, then copy it"
            raise ValueError(f"{name}: it is parallelized already{', as a copy' * (patch.model is not each)}; {todo}")
        for pattern in (*plan.cuts, *plan.attention) if plan is not None else ():
            if not matching(each, pattern):
                children = ", ".join(child for child, _ in each.named_children())
                raise ValueError(f"plan: {pattern!r} names no module of {type(each).__name__}, which has {children}")
        refuse_shards(each, no_tokens.sequence_group)
    plans = [plan or plan_of(each) for _, each in models]
    for (_, each), its_plan in zip(models, plans, strict=True):
        Patch(each, its_plan, mesh, group, arguments, trusted=plan is None)
    return model


def restore(model: Model) -> Model:
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
    if not isinstance(patch, Patch):
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


class Patch:
    """A parallelized model.

    Attributes:
        model: the transformer.
        plan: where its tokens are.
        outputs: the modules whose outputs are gathered, with the stream of each.
        shardings: of streams with given lengths.
        ranks: the number of ranks.
        options: arguments of attention.
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
        self.model, self.plan, self.options = model, plan, options
        self.outputs = {plan.output: plan.output_stream, **plan.other_outputs}
        self.shardings = lru_cache(maxsize=32)(partial(Sharding.segments, mesh=mesh, group=group))
        self.ranks = self.shardings((0,)).ranks
        self.is_checked = trusted or self.ranks == 1
        self.modes = _Modes()
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
                self._wrap(module, partial(self._attention, name, streams, inspect.signature(module.forward)))
        for pattern, stream in self.outputs.items():
            outputs = matching(model, pattern)
            if not outputs:
                raise ValueError(f"plan: output={pattern!r} names no module of {type(model).__name__}")
            for output in outputs.values():
                self._undo.callback(output.register_forward_hook(partial(self._gather, pattern, stream)).remove)
        self._wrap(model, self._forward)
        setattr(model, _OWN, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        return self  # a copy of the model works with the same ranks

    def now(self, what: str) -> _Attention:
        """The innermost call of the model that is running, for the module ``what``."""
        if self.modes.running:
            return self.modes.running[-1]
        if torch._C._current_graph_task_id() != -1:  # a backward is running
            cause = (
                "it was called in backward, outside of a call of the parallelized model, as by torch.utils.checkpoint; "
                "use the model's enable_gradient_checkpointing() or PyTorch's checkpoint_wrapper"
            )
        elif replaced := self.replaced(self.model):
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
        if found := self.replaced(self.model):
            raise ValueError(f"{found}; undo that first")
        self._undo.close()
        delattr(self.model, _OWN)

    def replaced(self, model: nn.Module) -> str | None:
        """What has replaced a forward of ``model``, or of one of its attention modules, after ``parallelize``."""
        modules = modules_of(model)
        for name in ("", *(name for pattern in self.plan.attention for name in matching(model, pattern))):
            if by := replaced_by(modules[name]):
                what = f"{name}: the forward" if name else "model: its forward"
                return f"{what} that seqpar.diffusers.parallelize has set was replaced by {by}"
        return None

    def _wrap(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._undo.callback(Wrapped(module, forward).undo)

    @no_compile
    def _forward(self, model: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of the model or of a copy of it."""
        if getattr(model, "_parallel_config", None) is not None:
            raise ValueError(
                "model: enable_parallelism was called; a model has either diffusers' parallelism or seqpar's"
            )
        check_hooks(model)
        refuse_shards(model, self.shardings((0,)).sequence_group)
        unchecked = None if self.is_checked else self._check(model, original, args, kwargs)
        args, kwargs = self._inputs(args, kwargs)
        call = _Call(self, model)
        with call.running(), call.checkpoints():
            output = call.run(original, args, kwargs)
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

    def _check(self, model: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Exception | None:
        """Raise an error if a module mixes tokens outside of attention. Returns an error that ended the check."""
        if any(isinstance(m, FullyShardedDataParallel) for m in model.modules()) or any(
            hasattr(p, "_fsdp_flattened") for p in model.parameters()
        ):
            raise ValueError(
                "plan: inside of FullyShardedDataParallel it cannot be checked whether modules mix tokens outside of "
                "attention; shard the weights with fully_shard instead"
            )
        trial = Trial(self.plan, model, self.owns)

        def run(number: int | None) -> None:
            call = _TrialCall(self, model, trial, number)
            with call.running():
                call.run(original, args, kwargs)

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
        group = self.shardings((0,)).sequence_group
        if compares_now(group):
            for x in tensors.values():
                compare(x, lambda: None, group, _SAME_INPUTS)
        chosen = [i for i, x in tensors.items() if x.requires_grad]
        if chosen and torch.is_grad_enabled() and self.ranks > 1:
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
    def _attention(
        self,
        name: str,
        streams: tuple[str, ...] | Across,
        signature: inspect.Signature,
        module: nn.Module,
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The forward of an attention module."""
        mode, keys = self.now(name), "encoder_hidden_states"
        if not mode.call.lengths:
            mode.call.before_cuts.add(name)
        elif (
            not streams
            and name not in mode.call.before_cuts
            and keys in signature.parameters
            and signature.bind(*args, **kwargs).arguments.get(keys) is None
        ):
            raise ValueError(
                f"{name}: without {keys} its keys are this rank's tokens, but the plan says that every rank holds all "
                "of them"
            )
        with mode.inside(name, module, streams):
            return original(*args, **kwargs)

    @no_compile
    def _gather(self, pattern: str, stream: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        call = self.now(pattern).call
        if pattern in call.gathered:
            raise RuntimeError(f"plan: the model called two modules of output={pattern!r}")
        call.gathered.add(pattern)
        return call.whole(output, stream, dim=1)


def _signature(name: str, module: nn.Module, arguments: tuple[str, ...]) -> inspect.Signature:
    signature = inspect.signature(module.forward)
    if missing := [argument for argument in arguments if argument not in signature.parameters]:
        raise ValueError(
            f"plan: {name or 'the model'} ({type(module).__name__}) takes no {missing[0]}, but "
            + ", ".join(signature.parameters)
        )
    return signature


class _Modes(threading.local):
    """The calls of the model that are running in this thread, the inner one last."""

    def __init__(self) -> None:
        self.running: list[_Attention] = []


class _Call:
    """One call of the model: its lengths, and how its attention is computed.

    Attributes:
        lengths: tokens of each stream.
        rows: the real tokens of the padded stream, in each batch row; None: all are real, or no argument tells.
        first: of patterns that end in ".0", the module that was called first.
        before_cuts: attention modules that have run on whole streams, such as a refiner of the text.
        attended: whether an attention module of the plan has run.
        gathered: the modules whose output has been gathered.
    """

    def __init__(self, patch: Patch, model: nn.Module) -> None:
        self.patch, self.model = patch, model
        self.lengths: dict[str, int] = {}
        self.rows: list[int] | None = None
        self.first: dict[str, nn.Module] = {}
        self.before_cuts: set[str] = set()
        self.gathered: set[str] = set()
        self.attended = False

    def new_mode(self) -> _Attention:
        return _Attention(self)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The modules that run inside of the block belong to this call."""
        modes = self.patch.modes.running
        with self.new_mode() as mode:
            modes.append(mode)
            try:
                yield
            finally:
                modes.pop()

    @contextmanager
    def checkpoints(self) -> Iterator[None]:
        """Blocks that the model's gradient checkpointing computes again in backward belong to this call too."""
        originals = [(vars(module), name, vars(module)[name]) for module, name in checkpoint_functions(self.model)]

        def checkpoint(original: Callable[..., Any], block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def again(*args: Any, **kwargs: Any) -> Any:
                modes = self.patch.modes.running
                with nullcontext() if modes and modes[-1].call is self else self.running():
                    return block(*args, **kwargs)

            return original(again, *args, **kwargs)

        for attributes, name, original in originals:
            attributes[name] = partial(checkpoint, original)
        try:
            yield
        finally:
            for attributes, name, original in originals:
                attributes[name] = original

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if "" in self.patch.plan.cuts:
            args, kwargs = self.cut_arguments("", self.patch.root_signature, args, kwargs)
        return forward(*args, **kwargs)

    def length(self, stream: str) -> int:
        """Tokens of the stream, with masked ones if there are fewer than ranks: model code slices ``[:, -text:]``."""
        if stream not in self.lengths:
            raise RuntimeError(
                f"plan: attention needs the tokens of {stream!r}, but no argument with them has been cut; the model "
                "skipped the module that the plan cuts them at"
            )
        return max(self.lengths[stream], self.patch.ranks)

    def sharding(self, streams: tuple[str, ...]) -> Sharding:
        return self.patch.shardings(tuple(self.length(stream) for stream in streams))

    def whole(self, x: Tensor, stream: str, dim: int) -> Tensor:
        """All tokens of a stream, without masked ones."""
        return self.sharding((stream,)).unshard(x, dim).narrow(dim, 0, self.lengths[stream])

    def cut_arguments(self, pattern: str, signature: inspect.Signature, args: Any, kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = dict(bound.arguments)
        for name, cut in self.patch.plan.cuts[pattern].items():
            if name in bound.arguments:
                bound.arguments[name] = self._cut(given[name], cut, name)
        padding = self.patch.plan.padding
        if padding is not None and padding[0] == pattern and given.get(padding[1]) is not None:
            self.rows = self._real_tokens(given[padding[1]], padding[1])
        return bound.args, bound.kwargs

    def _cut(self, value: Any, cut: Cut | tuple[Cut, ...], what: str) -> Any:
        if value is None:
            return None
        if isinstance(cut, tuple):
            return tuple(self._cut(x, c, what) for x, c in zip(value, cut, strict=True))
        if isinstance(value, list | tuple):
            return type(value)(self._cut(x, cut, what) for x in value)
        streams = (cut.streams,) if isinstance(cut.streams, str) else cut.streams
        if isinstance(value, int):
            return int((self.sharding(streams).positions() < value).sum())
        if not isinstance(value, Tensor):
            raise TypeError(f"{what}: expected a tensor of {' and '.join(streams)} tokens, got {type(value).__name__}")
        if cut.dims is not None and (value.dim() != cut.dims or value.shape[cut.dim] == 1):
            return value
        lengths = [value.shape[cut.dim]] if len(streams) == 1 else [self.lengths[stream] for stream in streams]
        if sum(lengths) != value.shape[cut.dim]:
            raise ValueError(
                f"{what}: {value.shape[cut.dim]} entries along dim {cut.dim}, but {lengths} tokens of {streams}"
            )
        parts = value.split(lengths, cut.dim)
        return torch.cat([self._cut_stream(x, s, cut.dim, what) for x, s in zip(parts, streams, strict=True)], cut.dim)

    def _cut_stream(self, x: Tensor, stream: str, dim: int, what: str) -> Tensor:
        length, dim = x.shape[dim], dim % x.dim()
        if self.lengths.setdefault(stream, length) != length:
            raise ValueError(
                f"{what}: {length} entries along dim {dim}, but there are {self.lengths[stream]} {stream} tokens"
            )
        if stream == self.patch.plan.output_stream and length < self.patch.ranks:
            raise ValueError(f"{what}: {length} {stream} tokens over {self.patch.ranks} ranks; use fewer ranks")
        missing = self.length(stream) - length
        if missing:
            x = F.pad(x, (*[0, 0] * (x.dim() - 1 - dim), 0, missing))
        return self.sharding((stream,)).shard(x, dim)

    def _real_tokens(self, mask: Any, what: str) -> list[int]:
        """The number of real tokens of the padded stream in each row."""
        stream = self.patch.plan.padded_stream
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"{what}: expected a bool tensor, True for real tokens, got {kind}, which attention adds to the scores "
                f"instead of hiding padding; for ones and zeros pass {what}.bool(), to a pipeline "
                "prompt_attention_mask.bool() beside prompt_embeds, both from its encode_prompt"
            )
        mask = mask.reshape(mask.shape[0], -1)  # [b, tokens]
        length = self.lengths[stream]
        if mask.shape[1] != length:
            joint = [each for each in self.patch.plan.attention.values() if not isinstance(each, Across)]
            order = next(each for each in joint if stream in each)
            lengths = [self.lengths[each] for each in order]
            if sum(lengths) != mask.shape[1]:
                raise ValueError(
                    f"{what}: {mask.shape[1]} entries a row, but the streams {order} have {lengths} tokens"
                )
            parts = dict(zip(order, mask.split(lengths, 1), strict=True))
            mask = parts.pop(stream)
            if not all(bool(part.all()) for part in parts.values()):
                raise ValueError(f"{what}: tokens of {' and '.join(parts)} are padding; only {stream} may be padded")
        rows = mask.sum(1)  # [b]
        if not torch.equal(mask, torch.arange(length, device=mask.device) < rows[:, None]):
            raise ValueError(f"{what}: a row has padding before real tokens; put each row's padding at its end")
        found: list[int] = rows.tolist()
        return found

    def mask(self, streams: tuple[str, ...], masked: bool) -> tuple[Mask, tuple[str, ...]]:
        """The mask of an attention call, and the order of the streams that it is for: a padded one comes last."""
        rows = self.rows if masked else None
        real = {s: rows if rows and s == self.patch.plan.padded_stream else [self.lengths[s]] for s in streams}
        padded = [s for s in streams if any(n != self.length(s) for n in real[s])]
        if not padded:
            return _FULL, streams
        if len(padded) > 1:
            raise ValueError(
                f"model: of {', '.join(padded)} more than one stream has padding, or fewer tokens than the "
                f"{self.patch.ranks} ranks; use fewer ranks, or pad to {self.patch.ranks} tokens"
            )
        (last,) = padded
        order = (*(s for s in streams if s != last), last)
        before = sum(self.length(s) for s in order[:-1])
        stops = [before + n for n in real[last]]
        return Mask.padding(0, stops if len(set(stops)) > 1 else stops[0]), order


class _Attention(SdpaMode):
    """Attention inside of a call of the model."""

    advice = _NATIVE

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.call = call
        # The attention modules that are running, the inner one last.
        self.modules: list[tuple[str, nn.Module, tuple[str, ...] | Across]] = []
        self.calls = 0

    @contextmanager
    def inside(self, name: str, module: Any, streams: tuple[str, ...] | Across) -> Iterator[None]:
        """In the block, the attention module is running."""
        before, self.calls = self.calls, 0
        self.modules.append((name, module, streams))
        try:
            yield
            calls = self.calls
        finally:
            self.modules.pop()
            self.calls = before
        if streams and calls != 1 and not skips_scores(module):
            processor = getattr(module, "processor", None)
            backend = getattr(processor, "_attention_backend", None)
            raise RuntimeError(
                f"{name}: {calls} calls of F.scaled_dot_product_attention over the sharded tokens instead of one; its "
                f"processor is {type(processor).__name__}"
                + (f" with the attention backend {backend!r}" if backend is not None else "")
                + f"; {_NATIVE}"
            )
        self.call.attended |= bool(streams)

    def is_sharded(self) -> bool:
        if not self.modules:
            if replaced := self.call.patch.replaced(self.call.model):
                raise ValueError(f"{replaced}; undo that, or restore the model and parallelize it afterwards")
            raise ValueError(
                "model: attention was called outside of the attention modules of the plan "
                f"({', '.join(self.call.patch.plan.attention)}); add the module to the plan"
            )
        return bool(self.modules[-1][2])

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not self.is_sharded():
            return original_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        name, module, streams = self.modules[-1]
        if skips_scores(module) and query.shape[2] == value.shape[2]:
            return value
        call = self.call
        if isinstance(streams, Across):
            lengths = tuple(call.sharding((stream,)).seq_local for stream in (streams.queries, streams.keys))
            if (query.shape[2], key.shape[2]) != lengths or attn_mask is not None or is_causal:
                raise ValueError(
                    f"{name}: {query.shape[2]} queries and {key.shape[2]} keys, but this rank holds {lengths} tokens "
                    f"of {streams.queries} and {streams.keys}, whose attention may have no mask"
                )
            self.calls += 1
            key, value = (call.whole(x, streams.keys, dim=2) for x in (key, value))  # [b, h, s, d]
            return original_sdpa(query, key, value, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa)
        if not {query.shape[2], key.shape[2]} == {call.sharding(streams).seq_local}:
            raise ValueError(
                f"{name}: {query.shape[2]} queries and {key.shape[2]} keys, but this rank holds "
                f"{call.sharding(streams).seq_local} tokens of {' and '.join(streams)}; adapters that add attention, "
                "such as IP-Adapter, are not supported"
            )
        if is_causal:
            raise ValueError(f"{name}: is_causal=True; joint attention of several streams has no order")
        self.calls += 1
        masked = attn_mask is not None and call.rows is not None
        mask, order = call.mask(streams, masked)
        if order != streams:
            query, key, value = (_reorder(x, streams, order, call) for x in (query, key, value))  # [b, h, s, d]
        out = sdpa(
            query,
            key,
            value,
            None if masked else attn_mask,
            dropout_p,
            scale=scale,
            enable_gqa=enable_gqa,
            sharding=call.sharding(order),
            mask=mask,
            **call.patch.options,
        )
        return out if order == streams else _reorder(out, order, streams, call)


class _TrialCall(_Call):
    """A call on a few tokens, in which attention sees nothing of other tokens."""

    def __init__(self, patch: Patch, model: nn.Module, trial: Trial, number: int | None) -> None:
        super().__init__(patch, model)
        self.trial, self.number = trial, number

    def new_mode(self) -> _Attention:
        return _TrialAttention(self)

    def sharding(self, streams: tuple[str, ...]) -> Any:
        for stream in streams:
            self.length(stream)  # raises if it has not been cut
        return FewTokens(self.trial.changed(streams, self.number))

    def whole(self, x: Tensor, stream: str, dim: int) -> Tensor:
        dim %= x.dim()
        return x.new_zeros(*x.shape[:dim], self.lengths[stream], *x.shape[dim + 1 :])


class _TrialAttention(_Attention):
    call: _TrialCall

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not self.is_sharded():
            return super().attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        self.calls += 1
        self.call.trial.see([x.transpose(1, 2) for x in (query, key, value)], self.modules[-1][1])
        return attend_to_own_token(query, key, value)


def _reorder(x: Tensor, order: tuple[str, ...], new: tuple[str, ...], call: _Call) -> Tensor:
    """This rank's tokens of the streams in another order."""
    parts = dict(zip(order, x.split([call.sharding((s,)).seq_local for s in order], 2), strict=True))
    return torch.cat([parts[s] for s in new], 2)


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
