"""Linear attention, state-space layers and short convolutions of transformers models over a sharded sequence.

These layers call functions by names in their model file, such as ``causal_conv1d_fn``. ``parallelize`` replaces the
names by functions that call the original ones inside of ``seqpar.mixers`` while a layer of a parallelized model runs on
a sharded sequence, and otherwise as before. They stay in the file: a copy of the model may need them after ``restore``.
Lightning attention, which calls no function, gets another forward.

Shapes: b batch, t tokens, h heads, n heads that several heads share, c channels, d and e elements of a head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ...base.checks import no_compile
from ...masks.mask import Mask
from ...mixers import by_heads, by_states, halo
from ...patching.forwards import replace_forward
from ...patching.replaced import replaced, replaced_in
from ...patching.running import Running
from ...sharding.sharding import Sharding
from ...strategies.auto import sends_halo, sends_states
from ...strategies.eager_operators import call_operator, is_constant
from ..batch import BatchShard, PlacedShard
from ..state import OWNER, Patch, forwards
from .lightning import (
    check_lightning,
    lightning_forward,
    lightning_layers,
    lightning_of_heads,
    lightning_token,
    recurrence,
)
from .mixer_operator import MixerFunction, mix_tokens

Original = Callable[..., Any]
_STATE_BYTES = 4  # of an element of a recurrent state, in float32


def _sends_states(sharding: Sharding, heads: int, token_bytes: int, state: int) -> bool:
    return sends_states(sharding.tokens, sharding.per_host, heads, token_bytes, _STATE_BYTES * state)


def _token_bytes(*tensors: Tensor) -> int:
    """The bytes of one token of one batch row."""
    return sum(x.shape[2:].numel() * x.element_size() for x in tensors)


def _convolution(
    original: Original,
    options: dict[str, Any],
    x: Tensor,
    weight: Tensor,
    bias: Any = None,
    activation: Any = None,
    **of_the_layer: Any,
) -> Tensor:
    """x ``[b, c, t]``, weight ``[c, W]``. Further arguments belong to the call of the layer."""
    sharding, width = options["sharding"], weight.shape[1] - 1
    if not sends_halo(sharding.tokens, width):

        def of_heads(heads: slice, y: Tensor) -> Tensor:
            own_bias = None if bias is None else bias[heads]
            out = original(y[..., 0].transpose(1, 2), weight[heads], own_bias, activation=activation)
            return out.transpose(1, 2)[..., None]  # type: ignore[no-any-return]

        out: Tensor = by_heads(of_heads, x.transpose(1, 2)[..., None], **options)
        return out[..., 0].transpose(1, 2)

    def of_rows(y: Tensor) -> Tensor:
        out = original(y.transpose(1, 2), weight, bias, activation=activation)
        return out[:, :, width:].transpose(1, 2)  # type: ignore[no-any-return]

    return halo(of_rows, x.transpose(1, 2), width, **options).transpose(1, 2)


def _delta_rule(
    original: Original,
    options: dict[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Any = None,
    output_final_state: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query, key ``[b, t, n, d]``, value ``[b, t, h, e]``, g ``[b, t, h]`` or ``[b, t, h, d]``, beta ``[b, t, h]``."""
    _check_no_state(initial_state, output_final_state)
    per_head, rule = g.dim() == 3, partial(original, chunk_size=chunk_size, **kwargs)

    def of_heads(heads: slice, v: Tensor, decay: Tensor, b: Tensor, q: Tensor, k: Tensor) -> Any:
        return rule(q, k, v, g=decay[..., 0] if per_head else decay, beta=b[..., 0])[0]

    def of_runs(state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, b: Tensor) -> Any:
        return rule(q, k, v, g=decay, beta=b, initial_state=state, output_final_state=True)

    def identity(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, b: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        (r, _, h), d = v.shape[:3], k.shape[3]
        state = torch.eye(d, dtype=torch.float32, device=v.device).expand(r, h, d, d).contiguous()
        return state, (q, k, v.new_zeros(*v.shape[:3], d), decay, b)

    (h, e), d = value.shape[2:], key.shape[3]
    moved = _token_bytes(query, key, value, g, beta, value)
    if _sends_states(options["sharding"], h, moved, h * d * (d + e)):
        return _through_states(of_runs, identity, torch.matmul, (query, key, value, g, beta), options), None
    x = value, g[..., None] if per_head else g, beta[..., None]
    out: Tensor = by_heads(of_heads, x, (query, key), **options)
    return out, None


def _through_states(
    run: Callable[..., tuple[Tensor, Tensor]],
    identity: Callable[..., tuple[Tensor, Sequence[Tensor]]],
    apply: Callable[[Tensor, Tensor], Tensor],
    x: Sequence[Tensor],
    options: dict[str, Any],
) -> Tensor:
    """A recurrence over runs ``[r, m, ...]`` of this rank's tokens, from the states of the tokens before them.

    A run changes a state S to ``apply(T, S) + S'``. S' is its final state from an empty one; T is its final state from
    ``identity``, without new values.

    Args:
        run: ``run(state, *x)`` returns outputs and the final state.
        identity: takes ``x``, and returns the state, and ``x`` without values, whose final state is T.
    """

    def scan(*y: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        state, without_values = identity(*y)
        return y, (run(state, *without_values)[1], run(None, *y)[1])

    def merge(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return apply(second[0], first[0]), apply(second[0], first[1]) + second[1]

    def correct(*of_run: Any) -> Tensor:
        *y, before = of_run
        return run(None if before is None else before[1], *y)[0]

    return by_states(scan, merge, correct, x, **options)


def _mamba2(
    original: Original,
    options: dict[str, Any],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Any = None,
    dt_bias: Any = None,
    initial_states: Any = None,
    dt_softplus: bool = False,
    dt_limit: Any = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Any = None,
    **kwargs: Any,
) -> Tensor:
    """x ``[b, t, h, d]``, dt ``[b, t, h]``, A, D and dt_bias ``[h]``, B and C ``[b, t, n, d]``."""
    _check_no_state(initial_states, return_final_states)
    if z is not None:
        raise ValueError("z: the scan of a sharded sequence takes no gate; apply the gate after the scan")
    scan = partial(original, chunk_size=chunk_size, dt_softplus=dt_softplus, dt_limit=dt_limit, **kwargs)

    def of_heads(heads: slice, y: Tensor, step: Tensor, *groups: Tensor) -> Any:
        weights = {name: w if w is None else w[heads] for name, w in (("D", D), ("dt_bias", dt_bias))}
        return scan(y, step[..., 0], A[heads], *groups, **weights)

    def of_runs(state: Tensor | None, y: Tensor, step: Tensor, *groups: Tensor) -> Any:
        return scan(y, step, A, *groups, D=D, dt_bias=dt_bias, initial_states=state, return_final_states=True)

    def identity(y: Tensor, step: Tensor, *groups: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        state = torch.ones(y.shape[0], *y.shape[2:], groups[0].shape[3], dtype=torch.float32, device=y.device)
        return state, (torch.zeros_like(y), step, *groups)

    (h, e), d = x.shape[2:], B.shape[3]
    if _sends_states(options["sharding"], h, _token_bytes(x, dt, B, C, x), 2 * h * d * e):
        return _through_states(of_runs, identity, torch.mul, (x, dt, B, C), options)
    out: Tensor = by_heads(of_heads, (x, dt[..., None]), (B, C), **options)
    return out


def _selective_scan(
    original: Original,
    options: dict[str, Any],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Tensor:
    """x, dt and z ``[b, c, t]``, A ``[c, d]``, B and C ``[b, d, t]``, D and delta_bias ``[c]``."""
    _check_no_state(None, return_last_state)
    channels = [y.transpose(1, 2)[..., None] for y in (x, dt, z) if y is not None]  # [b, t, c, 1]
    shared = [y.transpose(1, 2)[:, :, None] for y in (B, C)]  # [b, t, 1, d]

    def of_heads(heads: slice, *y: Tensor) -> Tensor:
        *own, b, c = y
        u, step, *gate = (each[..., 0].transpose(1, 2) for each in own)
        weights = {name: w if w is None else w[heads] for name, w in (("D", D), ("delta_bias", delta_bias))}
        groups = (each[:, :, 0].transpose(1, 2) for each in (b, c))
        out = original(
            u, step, A[heads], *groups, z=gate[0] if gate else None, delta_softplus=delta_softplus, **weights, **kwargs
        )
        return out.transpose(1, 2)[..., None]  # type: ignore[no-any-return]

    out: Tensor = by_heads(of_heads, channels, shared, **options)
    return out[..., 0].transpose(1, 2)


def _check_no_state(state: Any, returns_state: bool) -> None:
    if state is not None or returns_state:
        raise ValueError("cache: a sharded sequence has no recurrent states for a cache; pass use_cache=False")


def _unfused(original: Original, options: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """The layer then calls the other functions."""


class _Function(NamedTuple):
    """A function of a model file: over a sharded sequence, and one in which each token sees itself only."""

    sharded: Callable[..., Any]
    tokenwise: Callable[..., Any]


def _mean(x: Tensor) -> Tensor:
    """``[b, t, ...]`` to ``[b, t, 1, 1]``."""
    return x.flatten(2).mean(2)[..., None, None]


def _delta_token(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> Any:
    return (value + _mean(query) + _mean(key) + _mean(g) + _mean(beta)).to(query.dtype), None


def _scan_dtype(x: Tensor) -> torch.dtype:
    """Transformers' own scans may return float32 where kernels return the dtype of x."""
    return torch.promote_types(x.dtype, torch.float32)


def _mamba2_token(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return (x + _mean(dt) + _mean(B) + _mean(C)).to(_scan_dtype(x))


def _selective_token(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, z: Any = None, **kwargs: Any) -> Tensor:
    out: Tensor = x + dt + B.mean(1, keepdim=True) + C.mean(1, keepdim=True) + (0 if z is None else z)
    return out.to(_scan_dtype(x))


_DELTA, _FUSED = _Function(_delta_rule, _delta_token), _Function(_unfused, lambda *args, **kwargs: None)
_FUNCTIONS = {
    "causal_conv1d_fn": _Function(_convolution, lambda x, *args, **kwargs: x),
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": _Function(_mamba2, _mamba2_token),
    "mamba2_split_conv1d_scan_combined": _FUSED,
    "mamba_selective_scan": _Function(_selective_scan, _selective_token),
    "mamba_inner_fn": _FUSED,
}


_registered: dict[str, dict[str, _Function]] = {}  # by file, and by the name of a function in it


def register_mixer(
    file: ModuleType | str,
    name: str,
    sharded: Callable[..., Any] | None = None,
    tokenwise: Callable[..., Any] | None = None,
) -> None:
    """Say how a function that mixes tokens in a model's file runs over a sharded sequence.

    ``parallelize`` knows the functions in the files of transformers' models. For a file of your own, or one that comes
    with a model (``trust_remote_code``), call this before ``parallelize``. The layers must call the function by its
    name in the file. The first step of a training compares such a model with one process (``SEQPAR_VERIFY``).

    Args:
        file: the module that the model's classes are in, such as ``sys.modules[type(model).__module__]``, or its name.
        name: the name of the function in the file.
        sharded: ``sharded(original, options, *args, **kwargs)`` takes tensors of this rank's tokens, and returns what
            ``original(*args, **kwargs)`` returns for these tokens. It calls ``original`` inside of ``by_heads``,
            ``by_states`` or ``halo`` of ``seqpar.mixers`` with ``**options``, which are the sharding and the mask.
            None: as the function of this name in transformers' files.
        tokenwise: takes the same arguments as the function and returns outputs of the same shapes and dtypes, in which
            each token depends on itself only, and on each input. ``parallelize`` runs the model with it, and so sees
            whether anything else mixes tokens. A compiled layer takes the shapes and dtypes from it.

    Raises:
        ValueError: the file is not imported or has no such function, or only one of ``sharded`` and ``tokenwise`` is
            given, or none is and transformers' files have no function of this name.
    """
    module = sys.modules.get(file) if isinstance(file, str) else file
    if module is None:
        raise ValueError(f"file={file!r}: no module of this name is imported; import the model's file first")
    if not callable(getattr(module, name, None)):
        raise ValueError(f"name={name!r}: {module.__name__} has no such function")
    if (sharded is None) != (tokenwise is None):
        raise ValueError("sharded, tokenwise: pass both, or none for a function that transformers' files have too")
    if sharded is None and name not in _FUNCTIONS:
        raise ValueError(f"name={name!r}: pass sharded and tokenwise; they are known for {', '.join(_FUNCTIONS)} only")
    known = _FUNCTIONS[name] if sharded is None or tokenwise is None else _Function(sharded, tokenwise)
    _registered.setdefault(module.__name__, {})[name] = known


def _file_names(module: nn.Module) -> set[str]:
    files = {cls.__module__ for cls in type(module).__mro__}
    return {file for file in files if file.startswith("transformers.models.") or file in _registered}


def _files(model: nn.Module) -> dict[ModuleType, dict[str, _Function]]:
    """The files that classes in ``model`` are from, and such functions in them by name."""
    found = {}
    for file in {sys.modules[name] for module in model.modules() for name in _file_names(module)}:
        known = _FUNCTIONS if file.__name__.startswith("transformers.models.") else {}
        known = {**known, **_registered.get(file.__name__, {})}
        found[file] = {name: function for name, function in known.items() if callable(getattr(file, name, None))}
    return {file: functions for file, functions in found.items() if functions}


def of_mixer_files(model: nn.Module) -> set[str]:
    """The names of the modules whose class is from a file with such functions, and of their children."""
    files = {file.__name__ for file in _files(model)} | {type(layer).__module__ for layer in lightning_layers(model)}
    found = {name for name, module in model.named_modules() if files & _file_names(module)}
    return {name for name, _ in model.named_modules() if name in found or name.rpartition(".")[0] in found}


@contextmanager
def tokenwise_mixers(model: nn.Module, called: Callable[[], None]) -> Iterator[None]:
    """In the block each token sees itself only in the functions of ``model``'s files, which report that they run."""

    def reporting(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            called()
            return function(*args, **kwargs)

        return run

    def run_layer(layer: nn.Module, forward: Original, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        given = _of_lightning(*args, **kwargs)
        check_lightning(layer, given[0])
        return lightning_forward(reporting(lightning_token), layer, *given), None

    with ExitStack() as stack:
        for layer in lightning_layers(model):
            stack.callback(replace_forward(layer, OWNER, run_layer))
        for file, functions in _files(model).items():
            values = {name: reporting(function.tokenwise) for name, function in functions.items()}
            stack.enter_context(replaced(file, **values))
        yield


class _Alone(NamedTuple):
    """Of a model that runs on this rank alone, instead of a shard."""

    sharding: Sharding
    mask: Mask
    unmasked: bool = False


# Of the layers that are running: the shard; None in a model that runs on this rank alone.
_running: Running[PlacedShard | _Alone | None] = Running()

# The same for layers that torch.compile traces, which can trace a list, but not ``_running``. Each shard is an argument
# of the compiled code, and is here with its layer until the layer ends. Without a graph break nothing is seen of it.
_compiled: list[tuple[PlacedShard, nn.Module]] = []


def documents_apart(documents: Tensor) -> AbstractContextManager[None]:
    """In the block, a parallelized model that runs on this rank alone keeps ``documents`` apart.

    ``documents``, int ``[b, s]``, holds the index of each token's document.
    """
    length = documents.shape[1]
    edges = [[0, *((row[1:] != row[:-1]).nonzero().flatten() + 1).tolist(), length] for row in documents.cpu()]
    return _running(_Alone(Sharding(length, "contiguous", strategy="local"), Mask.documents(edges, causal=False)))


def replace_mixers(model: nn.Module, mixers: list[nn.Module], patch: Patch) -> None:
    """Replace the functions that ``mixers``, layers of ``model``, call, and let the layers say when they run."""
    if not mixers:
        return
    for module in model.modules():
        if module in mixers or isinstance(module, GradientCheckpointingLayer):
            before = module.register_forward_pre_hook(_before(patch), with_kwargs=True, prepend=True)
            patch.undo.callback(before.remove)
            # always_call, because a recomputation in backward ends a layer early.
            patch.undo.callback(module.register_forward_hook(_after, always_call=True).remove)
    for file, functions in _files(model).items():
        for name, function in functions.items():
            patch.undo.enter_context(replaced_in(file, name, partial(_stand_in, function)))
    for layer in lightning_layers(model):
        if "forward" in vars(layer):
            raise ValueError(
                f"layer={type(layer).__name__}: its forward was replaced; parallelize the model before that"
            )
        mix = _stand_in(_Function(lightning_of_heads, lightning_token), partial(recurrence, type(layer).forward))
        patch.undo.callback(replace_forward(layer, OWNER, partial(_run_lightning, mix)))
    patch.has_mixers = True


def _run_lightning(mix: Original, layer: nn.Module, forward: Original, *args: Any, **kwargs: Any) -> Any:
    if not (torch.compiler.is_compiling() and _compiled) and _runs_alone():
        return forward(*args, **kwargs)
    return lightning_forward(mix, layer, *_of_lightning(*args, **kwargs)), None


def _of_lightning(
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The hidden states and the padding among the arguments of a layer with lightning attention."""
    _check_no_state(cache if past_key_values is None else past_key_values, False)
    return hidden_states, attention_mask


@no_compile
def _runs_alone() -> bool:
    return _shard_now() is None


def _before(patch: Patch) -> Callable[..., None]:
    @no_compile
    def begin(module: nn.Module, kwargs: dict[str, Any]) -> None:
        shard = kwargs.get("seqpar")
        if shard is None and (forward := forwards.now) is not None and forward.patch is patch:
            shard = forward.batch_shard
        if shard is None:
            shard = _shard_now()
        if shard is None and patch.sharded:
            raise ValueError(
                f"layer={type(module).__name__}: it runs outside of a forward of the parallelized model, and does not "
                "get the argument seqpar, so that it is not known which tokens this rank holds; call the whole model, "
                "and recompute activations by model.activation_checkpointing_enable() only"
            )
        if isinstance(shard, BatchShard) and not isinstance(shard, PlacedShard):
            shard = patch.place(shard)  # as in a pipeline stage, whose forward runs without the hooks
        _running.push(shard, module)
        if "_gradient_checkpointing_func" in vars(module):
            _running.recomputed((module,), patch.undo)

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            shard = kwargs.get("seqpar")
            if _compiled and (shard is None or shard is _compiled[-1][0]):
                return  # a layer around it has said so; a checkpoint in compiled code may not change a list
            if isinstance(shard, PlacedShard):
                _compiled.append((shard, module))
                return
        begin(module, kwargs)

    return before


def _after(module: nn.Module, args: Any, output: Any) -> None:
    if _compiled and _compiled[-1][1] is module:
        _compiled.pop()
    elif not (_compiled and torch.compiler.is_compiling()):
        _end(module)


@no_compile
def _end(module: nn.Module) -> None:
    _running.pop(module)


def _shard_now() -> PlacedShard | _Alone | None:
    """The shard of the layer that is running in eager code, which may be inside of a compiled layer."""
    shard = _running.now
    if not _compiled:
        return shard
    if shard is not None and shard is not _compiled[-1][0]:
        raise ValueError(
            "layer: a compiled layer and a layer that runs eagerly inside of it or around it have different batches; "
            "compile the layers of both models, or of none"
        )
    forward = forwards.now  # of this thread, unlike ``_compiled``
    if shard is None and (forward is None or forward.batch_shard is not _compiled[-1][0]):
        raise ValueError(
            "layer: while a compiled layer with a graph break runs, it is not known whether this layer belongs to it "
            "or to another model, which may run in another thread; run one model at a time, or compile none of them"
        )
    return _compiled[-1][0]


def _stand_in(function: _Function, original: Original) -> Original:
    # A file that was imported while another one's function was replaced has the stand-in of that one.
    original = getattr(original, "_seqpar_original", original)
    mixer = MixerFunction(getattr(original, "__name__", "mixer"), partial(function.sharded, original))
    tokenwise = function.tokenwise

    @no_compile
    def run_eagerly(*args: Any, **kwargs: Any) -> Any:
        shard = _shard_now()
        if shard is None:
            return original(*args, **kwargs)
        kwargs = _arguments(kwargs)
        options = {"sharding": shard.sharding, "mask": None if shard.unmasked else shard.mask}
        return function.sharded(original, options, *args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and _compiled:
            shard, given = _compiled[-1][0], _arguments(kwargs)
            if all(isinstance(x, Tensor) or is_constant(x) for x in (*args, *given.values())):
                with torch.no_grad():
                    like = tokenwise(*args, **given)
                return call_operator(mix_tokens, like, args, given, mixer, shard.sharding, shard.mask)
        return run_eagerly(*args, **kwargs)

    run.__wrapped__ = run._seqpar_original = original  # type: ignore[attr-defined]
    return run


def _arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    for argument in ("cu_seqlens", "seq_idx"):
        if kwargs.get(argument) is not None:
            raise ValueError(
                f"{argument}: the documents of a sharded sequence are known from position_ids or cu_seq_lens of "
                "the whole batch; leave it out"
            )
    return {name: x for name, x in kwargs.items() if name not in ("cu_seqlens", "seq_idx", "seqpar")}
