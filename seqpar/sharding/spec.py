"""``AttentionSpec``: what does not change from one attention call to the next, checked once, when it is made."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from ..base.cache import cached_tensors, upload
from ..base.checks import check_bool, check_dropout, check_number
from ..base.compile_types import Opaque, register_constant_type
from ..kernels import check_backend
from ..masks.mask import LayerMask
from ..placement.heads import Heads
from ..placement.strategies import STRATEGIES, check_options, check_strategy

REPLICATED = "replicated"
Deterministic = bool | Literal["invariant"]


@register_constant_type()
@dataclass(frozen=True)
class AttentionSpec(Opaque):
    """The constants of an attention call. ``attention_spec`` makes one from a user's arguments.

    Attributes:
        strategy: the strategy's name. Under tensor parallelism it is the strategy of the ranks with the same heads.
            ``REPLICATED`` is context parallelism whose k and v hold the tokens of all ranks, so that nothing is sent.
        strategy_options: (name, value) of each option of the strategy.
        softmax_scale: a factor on the scores; None: ``head_dim ** -0.5``.
        softcap, dropout_p, deterministic, backend, return_lse: see ``seqpar.attention``.
        tensor_parallel: whether q, k and v hold all tokens of the tensor-parallel ranks, and some heads of the model.
        first_head: the index in the model of the first query head.
        all_heads: query heads and KV heads of the model; None: of q and k.
        alibi_slopes: the slopes of all query heads of a model; None if the call has its own, or none.
        layer_mask: causality, window and chunk that a layer adds to the mask (see ``mask.layer_mask``).
        draws_seed: whether each rank has drawn a dropout seed of its own. All ranks then use rank 0's seed.
        returns_saved: whether the operator returns the tensors that its backward needs, as in compiled code. Otherwise
            it keeps them, except under a selective checkpoint.
    """

    strategy: str = "ring"
    strategy_options: tuple[tuple[str, Any], ...] = ()
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: Deterministic = False
    backend: str = "auto"
    return_lse: bool = False
    tensor_parallel: bool = False
    first_head: int = 0
    all_heads: tuple[int, int] | None = None
    alibi_slopes: tuple[float, ...] | None = None
    layer_mask: LayerMask | None = None
    draws_seed: bool = False
    returns_saved: bool = False

    def heads(self, q_shape: Sequence[int], k_shape: Sequence[int]) -> Heads:
        """The heads of tensors ``[b, s, h, d]`` and ``[b, s, n, d]``."""
        heads, kv_heads = self.model_heads(q_shape, k_shape)
        return Heads(range(self.first_head, self.first_head + int(q_shape[2])), heads // kv_heads)

    def model_heads(self, q_shape: Sequence[int], k_shape: Sequence[int]) -> tuple[int, int]:
        """The query heads and KV heads of the model, for tensors of these shapes."""
        return self.all_heads or (int(q_shape[2]), int(k_shape[2]))

    def slopes(self, heads: Heads, device: torch.device) -> Tensor | None:
        """The slopes of ``heads``, float32 ``[h]``; None if there are none."""
        if self.alibi_slopes is None:
            return None
        own = self.alibi_slopes[heads.queries.start : heads.queries.stop]
        if not self.tensor_parallel and len(heads.queries) != len(self.alibi_slopes):
            raise ValueError(
                f"alibi_slopes: {len(self.alibi_slopes)} slopes, but attention has {len(heads.queries)} query heads; "
                "pass one for each head of the model (Memory(head_groups=...), which attends with some of the heads at "
                "a time, cannot have slopes)"
            )

        def make() -> Tensor:
            return upload(torch.tensor(own, dtype=torch.float32, device="cpu"), device)

        return cached_tensors(("ALiBi slopes", *own), device, make)

    def having(self, **changes: Any) -> AttentionSpec:
        """A copy with other values of some attributes. torch.compile cannot trace ``dataclasses.replace``."""
        return AttentionSpec(**{**{name: getattr(self, name) for name in AttentionSpec.__annotations__}, **changes})


@lru_cache(maxsize=256)
def spec_checksum(spec: AttentionSpec) -> int:
    """A checksum of what the ranks of a call must agree on. The backends may differ from rank to rank."""
    agreed = spec.having(backend="auto", deterministic=spec.deterministic == "invariant", returns_saved=False)
    return zlib.crc32(repr(agreed).encode())


def check_deterministic(value: object) -> None:
    """Raise a TypeError unless it is True, False or "invariant"."""
    if not isinstance(value, bool) and value != "invariant":
        raise TypeError(f"deterministic={value!r}: expected True, False or 'invariant'")


def attention_spec(
    strategy: str,
    strategy_options: Mapping[str, Any],
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    deterministic: Deterministic = False,
    backend: str = "auto",
    return_lse: bool = False,
    *functions: Callable[..., Any],
) -> AttentionSpec:
    """The spec of checked arguments of ``seqpar.attention``.

    ``functions`` take ``strategy_options`` as keywords, among which may be mistyped arguments of theirs.

    Raises:
        TypeError, ValueError: an argument of the wrong type or with a wrong value.
    """
    options = constants(strategy_options) if strategy_options else ()
    numbers = softmax_scale, softcap, dropout_p
    if torch.compiler.is_compiling():  # torch.compile may have turned numbers into variables
        scale = None if softmax_scale is None else constant_float(softmax_scale)
        numbers = scale, constant_float(softcap), constant_float(dropout_p)
        return _checked(strategy, options, *numbers, deterministic, backend, return_lse, *functions)
    # True == 1, also in a cache.
    make = _checked if options and any(isinstance(x, bool) for _, x in options) else _cached
    try:
        return make(strategy, options, *numbers, deterministic, backend, return_lse, *functions)
    except TypeError:  # an argument that cannot be hashed, or is of another type: say which
        return _checked(strategy, options, *numbers, deterministic, backend, return_lse, *functions)


def _checked(
    strategy: str,
    options: tuple[tuple[str, Any], ...],
    softmax_scale: float | None,
    softcap: float,
    dropout_p: float,
    deterministic: Deterministic,
    backend: str,
    return_lse: bool,
    *functions: Callable[..., Any],
) -> AttentionSpec:
    check_strategy(strategy)
    check_options(strategy, dict(options), STRATEGIES[strategy].options, *functions)
    check_deterministic(deterministic)
    check_bool("return_lse", return_lse)
    if not torch.compiler.is_compiling():
        check_backend(backend)
        dropout_p, softcap = check_dropout(dropout_p), check_number("softcap", softcap)
        if softcap < 0:
            raise ValueError(f"softcap={softcap}: expected a positive cap, or 0 for none")
        if softmax_scale is not None:
            softmax_scale = check_number("softmax_scale", softmax_scale)
    return AttentionSpec(strategy, options, softmax_scale, softcap, dropout_p, deterministic, backend, return_lse)


_cached = lru_cache(maxsize=512, typed=True)(_checked)


def constants(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The options of a strategy as constants. torch.compile may have turned the ints among them into variables."""
    return tuple(
        (name, index(x) if isinstance(x, int) and not isinstance(x, bool) else x) for name, x in options.items()
    )


def constant_float(x: float) -> float:
    """``x`` as a constant. torch.compile may have turned it into a variable."""
    return float.fromhex(float(x).hex())
