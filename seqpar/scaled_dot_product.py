"""PyTorch's scaled_dot_product_attention over a sharded sequence: as a function, and inside of existing models.

Shapes: b batch, s tokens of this rank, h query heads, n KV heads, d head_dim of q and k, e head_dim of v.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import ExitStack
from functools import cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    get_overridable_functions,
    handle_torch_function,
)
from torch.utils.checkpoint import CheckpointFunction

from .base.checks import check_dense, check_int, no_compile
from .comm.handshake import leave_calls
from .comm.waiting import call as messages_of
from .decoding import KeyValueCache, check_cache
from .flex_and_varlen import TorchCall, flex_call, varlen_call, varlen_mask
from .functional import attention
from .masks.mask import Mask
from .masks.rules import CausalBlocks, PrefixLM
from .patching.replaced import replaced_in
from .patching.running import Running
from .sharding.sharding import Sharding

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .kernels import BackendName
    from .placement.strategies import StrategyName, StrategyOptions
    from .sharding.spec import Deterministic

    class SdpaOptions(StrategyOptions, total=False):
        """The keyword arguments of ``attention`` that PyTorch's function does not have."""

        strategy: StrategyName
        softcap: float
        sinks: Tensor | None
        alibi_slopes: Tensor | None
        deterministic: Deterministic
        backend: BackendName
        dropout_seed: int | None


_FULL, _CAUSAL = Mask.full(), Mask.causal()
original_sdpa = F.scaled_dot_product_attention
# PyTorch's functions that call it: attention, and a backward in which activation checkpointing computes it again.
_CALLERS = (F.multi_head_attention_forward, Tensor.backward, torch.autograd.backward, torch.autograd.grad)
# Operators of PyTorch, and operators that packages register with PyTorch, have one of these words in their names if
# they compute attention.
_ATTENTION = "attention", "attn"
# Whether a call is in the forward of reentrant checkpointing. Its backward calls attention again, perhaps after the
# block, and then with this rank's tokens alone. Other checkpointing notices that.
_reentrant: Running[bool] = Running()
# A thread-local value that PyTorch also sets in the threads that run the backward which this thread has called.
_MODE = "seqpar_mode"
# The open blocks that do not say which modules attend over the sequence, in any thread.
_without_modules: list[replace_sdpa] = []
_BUILTIN = frozenset(value for name, value in vars(torch).items() if "attention" in name and callable(value))


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sharding: Sharding,
    mask: Mask | None = None,
    cache: KeyValueCache | None = None,
    layer: Hashable = None,
    **options: Unpack[SdpaOptions],
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` of this rank's tokens over the tokens of all ranks.

    It has PyTorch's arguments, order of dimensions and defaults, so without ``mask`` and ``is_causal`` every token sees
    every token. ``seqpar.attention`` computes it, and documents gradients and dropout.

    Args:
        q: ``[batch, heads, seq, head_dim]``, this rank's tokens.
        k: ``[batch, kv_heads, seq, head_dim]``, of the same tokens.
        v: ``[batch, kv_heads, seq, v_head_dim]``, of the same tokens.
        attn_mask: only None: a matrix over this rank's tokens cannot say what they see of the other ranks' tokens.
        dropout_p: the probability of dropping an attention weight.
        is_causal: whether ``mask`` is ``Mask.causal()``.
        scale: a factor on the scores, ``head_dim ** -0.5`` by default.
        enable_gqa: whether ``kv_heads`` may be smaller than ``heads``.
        sharding: how the tokens are sharded.
        mask: which keys each query sees, in positions of the full sequence; instead of ``is_causal``.
        cache: for generation: ``cache.attention`` computes the call, which may then have new tokens. Made with the
            same sharding.
        layer: what the layer is called in the cache, such as its index.
        options: ``strategy`` ("ring" by default) and its options, and other keyword arguments of ``seqpar.attention``.

    Returns:
        ``[batch, heads, seq, v_head_dim]`` in q's dtype.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an ``attn_mask``, or both ``mask`` and ``is_causal``; or an argument that ``seqpar.attention``
            refuses.
    """
    call = SdpaCall(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return _attended(call, False, sharding, mask, cache, layer, options)[0]


def _attended(
    call: SdpaCall,
    return_lse: bool,
    sharding: Sharding,
    mask: Mask | None,
    cache: KeyValueCache | None,
    layer: Hashable,
    options: Any,
) -> tuple[Tensor, Tensor | None]:
    """``out [b, h, s, e]`` and with ``return_lse`` also ``lse [b, h, s]``: ``sdpa`` documents the rest."""
    q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa = call
    if not isinstance(sharding, Sharding):
        raise TypeError(f"sharding={sharding!r}: expected the seqpar.Sharding that the tokens were sharded with")
    if isinstance(attn_mask, Tensor) and attn_mask.is_floating_point():
        raise ValueError(
            "attn_mask: a tensor that is added to the scores (a bias) is not supported. If it only hides keys, with 0 "
            "and -inf, leave it out and pass mask=, a seqpar.Mask; slopes of ALiBi are seqpar.attention's alibi_slopes="
        )
    if attn_mask is not None:
        raise ValueError(
            "attn_mask: a matrix over this rank's tokens cannot say which tokens of other ranks they see; leave it "
            "out, and pass mask=, a seqpar.Mask in positions of the full sequence, such as Mask.causal(), "
            "Mask.sliding_window(left), Mask.documents(cu_seqlens) or Mask.padding(left, right)"
        )
    if is_causal and mask is not None:
        raise ValueError("is_causal=True and mask: expected one of them; pass mask & Mask.causal(), without is_causal")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, Tensor):
            check_dense(name, x)
        if not isinstance(x, Tensor) or x.dim() != 4:
            shape = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name}: expected a tensor [batch, heads, seq, head_dim], got {shape}")
    if not enable_gqa and q.shape[1] != k.shape[1]:
        raise ValueError(f"q: {q.shape[1]} heads, but k has {k.shape[1]}; pass enable_gqa=True for grouped heads")
    if k.shape[2] != q.shape[2] or v.shape[2] != q.shape[2]:
        raise ValueError(
            f"{q.shape[2]} queries, {k.shape[2]} keys, {v.shape[2]} values: expected this rank's tokens of all three; "
            "call F.scaled_dot_product_attention for keys that every rank holds in full, as in a cross-attention"
        )
    if mask is None:
        mask = _CAUSAL if is_causal else _FULL
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, h, d], [b, s, n, d], [b, s, n, e]
    if cache is not None:
        check_cache(cache, sharding, dropout_p)
        if return_lse:
            raise ValueError("the log-sum-exp of the scores is not returned with a cache; call attention without it")
        return cache.attention(layer, q, k, v, mask=mask, softmax_scale=scale, **options).transpose(1, 2), None
    given: Any = {"mask": mask, "sharding": sharding, "softmax_scale": scale, "dropout_p": dropout_p, **options}
    if not return_lse:
        return attention(q, k, v, **given).transpose(1, 2), None
    out, lse = attention(q, k, v, return_lse=True, **given)
    return out.transpose(1, 2), lse


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    sharding: Sharding,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    **options: Unpack[SdpaOptions],
) -> Tensor:
    """``torch.nn.attention.varlen.varlen_attn`` of this rank's tokens over the tokens of all ranks.

    It has PyTorch's arguments and defaults. ``cu_seq_q`` has the boundaries of the full sequence, not of a shard. Each
    call copies ``cu_seq_q`` to the host; ``seqpar.attention`` with a mask that is made once does not copy.

    Args:
        query: ``[tokens, heads, head_dim]``, this rank's tokens.
        key: ``[tokens, kv_heads, head_dim]``, of the same tokens.
        value: ``[tokens, kv_heads, v_head_dim]``, of the same tokens.
        cu_seq_q: int ``[docs + 1]``, the documents' boundaries in positions of the full sequence.
        cu_seq_k: the same boundaries.
        max_q: at least the length of the longest document.
        max_k: the same for the keys.
        sharding: how the tokens are sharded.
        return_aux: None, or a request of nothing: ``seqpar.attention`` returns the log-sum-exp.
        scale: a factor on the scores, ``head_dim ** -0.5`` by default.
        window_size: (left, right) as in ``Mask.sliding_window``, inside of each document: (-1, -1) is full attention,
            and (-1, 0) is causal.
        enable_gqa: whether ``kv_heads`` may be smaller than ``heads``.
        options: ``strategy`` ("ring" by default) and its options, and other keyword arguments of ``seqpar.attention``.

    Returns:
        ``[tokens, heads, v_head_dim]`` in query's dtype.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: boundaries of something else than the full sequence, or that differ between queries and keys; or an
            argument that ``seqpar.attention`` refuses.
    """
    if not isinstance(sharding, Sharding):
        raise TypeError(f"sharding={sharding!r}: expected the seqpar.Sharding that the tokens were sharded with")
    settings: Any = {"return_aux": return_aux, "scale": scale, "window_size": window_size, "enable_gqa": enable_gqa}
    call = varlen_call(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **settings)
    mask = varlen_mask(cu_seq_q, cu_seq_k, max_q, max_k, window_size, sharding.seq_len)
    out = sdpa(*call[:3], scale=scale, enable_gqa=enable_gqa, sharding=sharding, mask=mask, **options)
    return out[0].transpose(0, 1)


def _with_causal(mask: Mask) -> Mask | None:
    """``mask`` for a call with ``is_causal``; None if it would take away keys that the mask adds."""
    if mask.head_groups:
        groups = [group for group in map(_with_causal, mask.head_groups) if group is not None]
        return Mask.by_heads(groups) if len(groups) == len(mask.head_groups) else None
    if mask.branches or any(isinstance(rule, PrefixLM | CausalBlocks) for rule in mask.rules):
        return None
    return _CAUSAL if mask is _FULL else mask & _CAUSAL


class SdpaCall(NamedTuple):
    """The arguments of a call of ``F.scaled_dot_product_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def original(self) -> Tensor:
        """What PyTorch computes."""
        tensors = self.query, self.key, self.value
        return original_sdpa(
            *tensors, self.attn_mask, self.dropout_p, self.is_causal, scale=self.scale, enable_gqa=self.enable_gqa
        )


class SdpaMode(TorchFunctionMode):
    """Inside the block, ``F.scaled_dot_product_attention`` is ``attend``. Other attention operators raise an error."""

    advice: ClassVar[str]  # what else to do about another operator

    def __init__(self) -> None:
        super().__init__()
        self._undo = ExitStack()

    def attend(self, call: SdpaCall) -> Tensor:
        """What the block computes instead of ``F.scaled_dot_product_attention``."""
        raise NotImplementedError

    def is_sharded(self) -> bool:
        """Whether a call of attention now is over sharded tokens, so that other operators cannot compute it."""
        raise NotImplementedError

    def attend_instead(self, function: _PythonFunction, args: Any, kwargs: Any) -> Any:
        """What the block computes instead of another function of PyTorch."""
        if self.is_sharded():
            self._refuse(function)
        return function.original(*args, **kwargs)

    def _refuse(self, func: object) -> NoReturn:
        raise ValueError(
            f"{func}: this operator computes attention over this rank's tokens only; call "
            f"F.scaled_dot_product_attention, or seqpar.attention with a seqpar.Mask; {self.advice}"
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is original_sdpa:
            return self.attend(SdpaCall(*args, **kwargs))
        if isinstance(func, _PythonFunction):
            return self.attend_instead(func, args, kwargs)
        if func is Tensor.unflatten:  # torch.compile cannot trace the function itself here
            return args[0].unflatten(*args[1:], **kwargs)
        if func not in _CALLERS:
            if _is_attention(func) and self.is_sharded():
                self._refuse(func)
            return func(*args, **kwargs)
        needs_weights = func is F.multi_head_attention_forward and kwargs.get("need_weights", True)
        if needs_weights and self.is_sharded():
            raise ValueError(
                "need_weights=True: nn.MultiheadAttention computes the weights of this rank's tokens only; call it "
                "with need_weights=False"
            )
        return self._needs_fullgraph_false(func, args, kwargs)

    @no_compile  # compiled code would hold one of PyTorch's functions as a whole, with its own attention
    def _needs_fullgraph_false(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``func(*args, **kwargs)``, in which the mode is off, with this thread's attention replaced by ``attend``."""
        before = _stashed_mode()
        _stash(self)
        try:
            return func(*args, **kwargs)
        finally:
            _stash(before)

    def __enter__(self) -> Any:
        # PyTorch keeps a list of the functions that modes see, from the first trace on: with its own function.
        get_overridable_functions()
        self._undo.enter_context(replaced_in(F, "scaled_dot_product_attention", _by_thread))
        for cls in (torch.jit.ScriptModule, torch.jit.TopLevelTracedModule):
            self._undo.enter_context(replaced_in(cls, "forward", _CheckedForward))
        for function in _python_functions():
            self._undo.enter_context(replaced_in(function.function, "__code__", function.code))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._undo.close()


class replace_sdpa(SdpaMode):  # noqa: N801 (a context manager)
    """Inside the block, ``F.scaled_dot_product_attention`` is ``seqpar.sdpa``: models that call it need no change.

    This covers every way to call the function in Python, such as ``nn.MultiheadAttention``, and also compiled models,
    which may be compiled in the block. ``nn.MultiheadAttention`` is not compiled then: ``fullgraph=True`` raises.

    PyTorch's ``flex_attention`` and ``varlen_attn`` are attention over the sequence too. Their ``block_mask`` (of the
    full sequence, or of this rank's tokens with a ``mask_mod`` of positions alone) or ``cu_seq_q`` (in the full
    sequence) must mean ``mask`` for this rank's tokens. These calls are not compiled, and have no ``score_mod``.

    Other attention raises an error: operators that a package registers with PyTorch, modules of TorchScript, and calls
    in another thread (with ``modules``, other threads are left alone).

    The block does not see functions of TorchScript, functions that are not registered with PyTorch, and scores that a
    model multiplies by itself. It raises an error only if no call at all was replaced. With ``modules``, it raises an
    error for each of these modules that computes attention in such a way.

    The model must take positions from ``sharding.positions()``, and what else mixes tokens (convolutions, pooling)
    must not run inside the block.

    Other keyword arguments, such as ``strategy``, are passed to ``seqpar.sdpa``.

    Call ``backward`` inside the block as well if the model uses activation checkpointing, which calls attention again.

    Args:
        sharding: how the tokens are sharded.
        mask: which keys each query sees, for all calls. By default, a call says ``is_causal`` or sees all tokens. With
            a mask, ``is_causal=True`` restricts it to causal pairs, which is refused for prefix_lm, blocks and masks
            with several intervals of keys for a query.
        whole_keys: the lengths of keys that every rank holds in full, such as the text of a cross-attention. PyTorch
            computes attention over these keys on each rank.
        modules: what the calls inside of each attention module are. "sequence": attention over the sequence, under
            ``mask`` and ``is_causal``. A mask: the same under this mask instead. None: PyTorch's own attention of this
            rank's tensors, such as attention inside of each image. By default, every call is attention over the
            sequence. With ``modules``, calls outside of these modules raise an error. If one of the modules is inside
            of another, the inner one counts.
        cache: for generation: a cache made with the same sharding. The model is called with this rank's tokens of the
            prompt in the first block, and with new tokens, the same on every rank, in each later block. The calls of a
            block are the layers, so each block calls the model once.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a length in ``whole_keys`` is also the number of tokens of a rank; or inside the block, a call that
            ``seqpar.sdpa`` refuses, a call with keys of another length than this rank's tokens, and a call of another
            attention operator.
        RuntimeError: at the end of the block, if no attention over the sharded tokens was called in it, or one of
            ``modules`` was not called; after a call of one of ``modules``, if no attention was replaced in it.

    Examples:
        >>> sharding = Sharding(8)
        >>> with replace_sdpa(sharding):
        ...     y = F.scaled_dot_product_attention(*torch.ones(3, 1, 2, 8, 4), is_causal=True)

        A video model, whose attention inside of each frame may have as many tokens as a rank:

        >>> modules = {block.spatial: None, block.temporal: "sequence"}  # doctest: +SKIP
        >>> with replace_sdpa(sharding, modules=modules):  # doctest: +SKIP
        ...     y = block(x)
    """

    advice = "if its keys are not sharded, pass replace_sdpa modules={module: None}, with the module that calls it"

    def __init__(
        self,
        sharding: Sharding,
        mask: Mask | None = None,
        *,
        whole_keys: Collection[int] = (),
        modules: Mapping[nn.Module, Mask | Literal["sequence"] | None] | None = None,
        cache: KeyValueCache | None = None,
        **options: Unpack[SdpaOptions],
    ) -> None:
        super().__init__()
        if not isinstance(sharding, Sharding):
            raise TypeError(f"sharding={sharding!r}: expected the seqpar.Sharding that the tokens were sharded with")
        if mask is not None and not isinstance(mask, Mask):
            raise TypeError(f"mask={type(mask).__name__}: expected a seqpar.Mask, such as seqpar.Mask.causal()")
        if not isinstance(whole_keys, Collection):
            raise TypeError(f"whole_keys={whole_keys!r}: expected a list of lengths, such as [77]")
        for length in whole_keys:
            check_int("whole_keys", length, 1)
        if shared := {*whole_keys} & {*sharding.lengths}:
            raise ValueError(
                f"whole_keys={sorted(shared)}: a rank holds as many tokens of the sequence, so keys of this length "
                "could be either; pad the sequence or the other keys to another length"
            )
        if cache is not None:
            check_cache(cache, sharding, 0.0)
        mask = _FULL if mask is None else mask
        self.sharding, self.options, self.whole_keys, self.cache = sharding, options, tuple(whole_keys), cache
        self.masks = mask, _with_causal(mask)  # without and with is_causal
        self.modules = None if modules is None else _Modules(modules, self.masks)
        self.calls = 0

    def __enter__(self) -> replace_sdpa:
        self.calls = 0
        self._undo.enter_context(replaced_in(CheckpointFunction, "forward", _noted))
        if self.modules is not None:
            self.modules.watch(lambda: self.calls)
        else:
            _without_modules.append(self)
            self._undo.callback(_without_modules.remove, self)
        super().__enter__()
        return self

    def __exit__(self, error: Any, *args: Any) -> None:
        super().__exit__(error, *args)
        if self.modules is not None:
            self.modules.hooks.close()
        leave_calls(self.sharding.sequence_group, args[0])
        if self.modules is not None and error is None:
            self.modules.check_all_called()
        if error is None and not self.calls:
            raise RuntimeError(
                "replace_sdpa: no F.scaled_dot_product_attention over the sharded tokens was called in the block, so "
                "no token has seen another rank's tokens; the model computes attention in another way: select "
                "its sdpa or 'native' attention, or call seqpar.attention in it"
            )

    def is_sharded(self) -> bool:
        return self._masks() is not None

    def _masks(self) -> tuple[Mask, Mask | None] | None:
        """The masks of a call, without and with ``is_causal``; None if it is PyTorch's own attention."""
        return self.masks if self.modules is None else self.modules.masks_now()

    def attend(self, call: SdpaCall) -> Tensor:
        return self._attend(call)[0]

    def attend_instead(self, function: _PythonFunction, args: Any, kwargs: Any) -> Any:
        if not self.is_sharded():
            return function.original(*args, **kwargs)
        call = function.read(*args, **kwargs)
        arguments = SdpaCall(*call[:3], scale=call.scale, enable_gqa=call.enable_gqa)
        return call.returned(*self._attend(arguments, call))

    def _attend(self, call: SdpaCall, of: TorchCall | None = None) -> tuple[Tensor, Tensor | None]:
        """The output and, if the call ``of`` another function needs it, the log-sum-exp."""
        masks = self._masks()
        if masks is None:
            return call.original(), None
        queries, keys = call.query.shape[-2], call.key.shape[-2]
        if keys in self.whole_keys:
            if call.is_causal and queries != keys:
                raise ValueError(
                    f"is_causal=True: PyTorch would compare positions of {queries} sharded queries with "
                    f"{keys} keys that are whole"
                )
            if of is not None and (of.check is not None or of.needs_lse):
                raise ValueError(
                    f"{keys} keys that are whole: expected a call without block_mask, cu_seq_q and log-sum-exp; call "
                    "F.scaled_dot_product_attention"
                )
            return call.original(), None
        if queries != keys:
            raise ValueError(
                f"{queries} queries and {keys} keys: expected this rank's tokens of both; if every "
                f"rank holds all of these keys, as in a cross-attention, pass replace_sdpa whole_keys=[{keys}]"
            )
        if not torch.compiler.is_compiling() and _reentrant.now:
            raise ValueError("use_reentrant=True: inside replace_sdpa, pass torch.utils.checkpoint use_reentrant=False")
        mask = masks[1] if call.is_causal else masks[0]  # torch.compile of torch 2.11 takes no bool as an index
        if mask is None:
            raise ValueError(
                "is_causal=True: it would take away later keys that the mask of replace_sdpa (prefix_lm, blocks, a "
                "union) may let tokens see; let the model call its attention without is_causal"
            )
        if of is not None and of.check is not None:
            if self.cache is not None:
                raise ValueError("block_mask, cu_seq_q: a call with a cache takes the mask of replace_sdpa alone")
            with messages_of(self.sharding.sequence_group, "the check of a mask"):  # other ranks may find no difference
                of.check(mask, self.sharding)
        self.calls += 1
        needs_lse = of is not None and of.needs_lse
        call = call._replace(is_causal=False)
        return _attended(call, needs_lse, self.sharding, mask, self.cache, self.calls, self.options)


class _Modules:
    """What the calls of attention inside of each module are, and hooks that tell which of the modules is running.

    Attributes:
        masks: the masks of each module's calls without and with ``is_causal``; None for PyTorch's own attention.
        called: the modules that have been called in the block.
        hooks: removes the hooks when it is closed.
    """

    def __init__(self, modules: object, masks: tuple[Mask, Mask | None]) -> None:
        if not isinstance(modules, Mapping):
            raise TypeError(
                f"modules={type(modules).__name__}: expected a dict of attention modules, such as {{m: None}}"
            )
        self.masks: dict[nn.Module, tuple[Mask, Mask | None] | None] = {}
        for module, kind in modules.items():
            if not isinstance(module, nn.Module):
                raise TypeError(
                    f"modules: the key {module!r} is no nn.Module; pass the module itself, such as "
                    "dict(model.named_modules())[name]"
                )
            if isinstance(kind, Mask):
                self.masks[module] = kind, _with_causal(kind)
            elif kind is None or kind == "sequence":
                self.masks[module] = masks if kind else None
            else:
                raise TypeError(f"modules: {kind!r} for {_name(module)}; expected 'sequence', a seqpar.Mask or None")
        self.called: set[nn.Module] = set()
        self.hooks = ExitStack()
        # The given modules that are running, each with the number of calls before it.
        self._running: Running[tuple[nn.Module, int]] = Running()

    def watch(self, calls: Callable[[], int]) -> None:
        """Register the hooks. ``calls`` returns the number of calls that were replaced so far."""
        self.called.clear()

        def before(module: nn.Module, args: Any) -> None:
            self.called.add(module)
            self._running.push((module, calls()), module)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            ended = self._running.pop(module)
            if self.masks[module] is not None and output is not None and ended is not None and calls() == ended[1]:
                raise RuntimeError(
                    f"modules: {_name(module)} called no F.scaled_dot_product_attention that replace_sdpa could "
                    "replace, so that no token has seen another rank's tokens in it; it computes attention in another "
                    "thread, in TorchScript or with another function: call F.scaled_dot_product_attention in the "
                    "thread of the block; leave the module out if it calls seqpar.attention itself; or pass None for "
                    "it if its keys are not sharded"
                )

        for module in self.masks:
            # The hook after a module also runs after an error, such as the one that ends a recomputation.
            self.hooks.enter_context(module.register_forward_pre_hook(before, prepend=True))
            self.hooks.enter_context(module.register_forward_hook(after, always_call=True))

    def masks_now(self) -> tuple[Mask, Mask | None] | None:
        """The masks of a call of attention, from the module that is running."""
        running = self._running.now
        if running is None:
            raise ValueError(
                "modules: attention was called outside of the given modules; pass the module that calls it too. If it "
                "is one of them, it was not called as module(...) or is compiled code: compile the model without it "
                "(torch.compiler.disable)"
            )
        return self.masks[running[0]]

    def check_all_called(self) -> None:
        missed = [_name(module) for module in self.masks if module not in self.called]
        if missed:
            raise RuntimeError(
                f"modules: {len(missed)} of {len(self.masks)} modules were not called in the block, the first of them "
                f"{missed[0]}; TorchScript and compiled code do not call a model's modules: leave these modules out "
                "if the model does not use them"
            )


def _name(module: nn.Module) -> str:
    return repr(module).split("\n")[0].removesuffix("(")


def _is_attention(func: Any) -> bool:
    """Whether ``func`` is an operator that computes attention by itself. seqpar's own are not."""
    if not isinstance(func, OpOverload | OpOverloadPacket | HigherOrderOperator):
        return func in _BUILTIN
    name = str(func)
    return any(word in name for word in _ATTENTION) and not name.startswith("seqpar.")


def _stashed_mode() -> Any:
    """The block in which this thread runs one of ``_CALLERS``."""
    return torch._C._get_obj_in_tls(_MODE) if torch._C._is_key_in_tls(_MODE) else None


def _steals_references() -> bool:
    """Whether PyTorch releases a reference to a thread-local value that it has not taken, as torch 2.11 does."""
    probe = object()
    count = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("seqpar_probe", probe)
    steals = sys.getrefcount(probe) == count
    if steals:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return steals


_STEALS = _steals_references()


def _stash(mode: Any) -> None:
    """Set what ``_stashed_mode`` returns."""
    torch._C._stash_obj_in_tls(_MODE, mode)
    if _STEALS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mode))


def _mode_of_thread() -> SdpaMode | None:
    """The innermost block that this thread is in."""
    return next((m for m in reversed(_get_current_function_mode_stack()) if isinstance(m, SdpaMode)), None)


def _check_thread(function: str) -> None:
    """Raise if this thread, which is in no block, calls ``function`` while a block is open in another thread."""
    if _without_modules and _mode_of_thread() is None:
        raise ValueError(
            f"{function}: called in a thread outside of a replace_sdpa block, while the block is open in another "
            "thread; if it attends over this rank's tokens only, pass replace_sdpa modules= with the modules that "
            "attend over the sequence, otherwise call it in the thread of the block"
        )


class _PythonFunction:
    """A function of PyTorch that is written in Python, called so that modes see it, as they see functions in C.

    Attributes:
        function: the function, whose code a block replaces, because packages have imported the function itself.
        original: the same function with its own code.
        read: what a call of it computes, from its arguments.
    """

    def __init__(self, function: Any, read: Callable[..., TorchCall], code: Any) -> None:
        self.function, self.read = function, read
        self._code: CodeType = code.__code__
        self.original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
        self.original.__kwdefaults__ = function.__kwdefaults__

    def code(self, original: object) -> CodeType:
        """The code inside of a block."""
        return self._code

    def __str__(self) -> str:
        return self.original.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._is_torch_function_mode_enabled():
            return handle_torch_function(cast(Any, self), (), *args, **kwargs)
        mode = _stashed_mode()
        if mode is not None:
            return mode.attend_instead(self, args, kwargs)
        _check_thread(str(self))
        return self.original(*args, **kwargs)


@no_compile  # the mask of a call is compared with the block's, and compiled code does not know its values
def _needs_fullgraph_false(name: str, args: Any, kwargs: Any) -> Any:
    function = next(x for x in _python_functions() if str(x) == name)
    return function(*args, **kwargs)


def _flex_attention(*args: Any, **kwargs: Any) -> Any:
    from seqpar.scaled_dot_product import _needs_fullgraph_false  # the code runs with the names of PyTorch's module

    return _needs_fullgraph_false("flex_attention", args, kwargs)


def _varlen_attn(*args: Any, **kwargs: Any) -> Any:
    from seqpar.scaled_dot_product import _needs_fullgraph_false

    return _needs_fullgraph_false("varlen_attn", args, kwargs)


def _python_functions() -> list[_PythonFunction]:
    # Importing varlen takes seconds. If nothing has imported it, nothing can call it.
    return [_flex(), _varlen()] if "torch.nn.attention.varlen" in sys.modules else [_flex()]


@cache
def _flex() -> _PythonFunction:
    from torch.nn.attention.flex_attention import flex_attention

    return _PythonFunction(flex_attention, flex_call, _flex_attention)


@cache
def _varlen() -> _PythonFunction:
    return _PythonFunction(sys.modules["torch.nn.attention.varlen"].varlen_attn, varlen_call, _varlen_attn)


def _by_thread(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """PyTorch's function, but in a thread that is in one of ``_CALLERS`` inside a block, the block's ``attend``."""

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        mode = _stashed_mode()
        if mode is not None:
            result: Tensor = mode.attend(SdpaCall(*args, **kwargs))
            return result
        _check_thread("F.scaled_dot_product_attention")
        return original(*args, **kwargs)

    return scaled_dot_product_attention


def _attends(script: Any) -> bool:
    """Whether the code of a TorchScript module calls PyTorch's function."""
    graph = script._get_method("forward").inlined_graph if script._has_method("forward") else None
    return graph is not None and graph.findNode("aten::scaled_dot_product_attention") is not None


class _CheckedForward:
    """The ``forward`` of TorchScript's modules, but an error inside a block if it computes attention."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __get__(self, module: Any, cls: type) -> Any:
        mode = None if module is None else _mode_of_thread()
        if mode is not None and _attends(module._c) and mode.is_sharded():
            raise ValueError(
                f"{_name(module)}: a module of TorchScript, which computes attention over this rank's tokens only; use "
                f"the module that it was made from, or seqpar.attention; {mode.advice}"
            )
        return self.original.__get__(module, cls)


def _noted(forward: staticmethod[..., Any]) -> Any:
    """``forward``, the static method of ``CheckpointFunction``, which is running in ``_reentrant`` meanwhile."""

    def noted(*args: Any) -> Any:
        with _reentrant(True):
            return forward(*args)

    return staticmethod(noted)
