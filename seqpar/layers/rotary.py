"""Rotary position embeddings at arbitrary global positions, with the usual ways of stretching the context.

Su et al., "RoFormer", 2021, with the first half of a head paired with its second half (``rotate_half``), as in
Hugging Face's Llama, whose weights this fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import ceil, floor, log, pi
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_choice, check_int, check_number
from ..kernels.elementwise import elementwise_kernels

# Inverse frequencies, float32 [head_dim / 2], and a factor on cos and sin.
Frequencies = tuple[Tensor, float]


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their tokens' positions.

    Angles, cosines and sines are float32 (float64 for float64 inputs) whatever the dtype of the module, and the
    result is rounded once. The module has neither parameters nor buffers: one may serve all layers.

    Args:
        head_dim: even.
        base: the angle of pair ``i`` at position ``p`` is ``p * base ** (-2 * i / head_dim)``.
        scaling: None, or a mapping with the keys of Hugging Face's ``rope_parameters`` (``rope_scaling`` of older
            configurations). ``rope_type`` (or ``type``) is one of

            * "default";
            * "linear": positions divided by ``factor`` (position interpolation, Chen et al., 2023);
            * "ntk": ``base * factor ** (head_dim / (head_dim - 2))``;
            * "dynamic": the same with a factor that grows with the sequence past
              ``original_max_position_embeddings``;
            * "llama3": Llama 3.1's, by ``factor``, ``low_freq_factor``, ``high_freq_factor`` and
              ``original_max_position_embeddings``;
            * "yarn": Peng et al., 2023, by ``factor``, ``original_max_position_embeddings`` and, optional,
              ``attention_factor``, ``beta_fast``, ``beta_slow``, ``mscale``, ``mscale_all_dim``, ``truncate``.

            A ``rope_theta`` among them takes the place of ``base``.

    Raises:
        TypeError, ValueError: an odd ``head_dim``, an unknown type, a key that the type lacks or does not have.
    """

    def __init__(self, head_dim: int, base: float = 10000.0, scaling: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        check_int("head_dim", head_dim, 2)
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim}: rotary embeddings pair the dimensions; an even number is needed")
        self.head_dim = head_dim
        self.kind, parameters = _parse(scaling)
        base = parameters.pop("rope_theta", base)
        self.base = check_number("base", base)
        if self.base <= 0:
            raise ValueError(f"base={base}: a positive base is needed; 10000.0 is usual")
        self.scaling = parameters
        self._by_device: dict[torch.device, Frequencies] = {}
        if not self.needs_length:
            self._frequencies(None, torch.device("cpu"))  # raises here, not at the first forward

    @property
    def needs_length(self) -> bool:
        """Whether the angles depend on how long the sequence is ("dynamic")."""
        return self.kind == "dynamic"

    def forward(self, q: Tensor, k: Tensor, positions: Tensor, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys of the same tokens.

        Args:
            q, k: ``[batch, seq, heads, head_dim]``, each with its own number of heads.
            positions: integers, ``[seq]`` or ``[batch, seq]``, the tokens' global positions in any order.
            length: for "dynamic", one past the largest position of the whole sequence; by default that of
                ``positions``, which is wrong on a shard.

        Returns:
            ``q`` and ``k`` rotated, in their own dtypes.
        """
        cos, sin = self.cos_sin(positions, torch.promote_types(q.dtype, torch.float32), q.device, length)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def cos_sin(
        self, positions: Tensor, dtype: torch.dtype, device: torch.device, length: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles, ``[1 or batch, seq, 1, head_dim / 2]``."""
        if self.needs_length and length is None:
            length = int(positions.max().item()) + 1 if positions.numel() else 1
        inverse, factor = self._frequencies(length, device)
        by_row = (positions if positions.dim() == 2 else positions[None]).to(device, dtype)
        angles = by_row[:, :, None, None] * inverse.to(dtype)
        return angles.cos() * factor, angles.sin() * factor

    def _frequencies(self, length: int | None, device: torch.device) -> Frequencies:
        make = partial(_KINDS[self.kind], self.head_dim, self.base, **self.scaling)
        if self.needs_length:
            inverse, factor = make(length=length)
            return inverse.to(device), factor
        if device not in self._by_device:
            inverse, factor = make()
            self._by_device[device] = inverse.to(device), factor
        return self._by_device[device]

    def extra_repr(self) -> str:
        scaling = f", {self.kind}, {self.scaling}" if self.kind != "default" else ""
        return f"head_dim={self.head_dim}, base={self.base:g}{scaling}"


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x [batch, seq, heads, head_dim]``; computed in the dtype of ``cos`` and ``sin``, rounded to x's."""
    if cos.dtype == torch.float32 and (kernels := elementwise_kernels(x)) is not None:
        return kernels.apply_rotary(x, cos, sin)
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _default(head_dim: int, base: float) -> Frequencies:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    return 1.0 / base**exponents, 1.0


def _linear(head_dim: int, base: float, *, factor: float) -> Frequencies:
    inverse, _ = _default(head_dim, base)
    return inverse / factor, 1.0


def _ntk(head_dim: int, base: float, *, factor: float) -> Frequencies:
    if head_dim < 4:
        raise ValueError(f"head_dim={head_dim}: at least 4 is needed for rope scaling 'ntk' and 'dynamic'")
    return _default(head_dim, base * factor ** (head_dim / (head_dim - 2)))


def _dynamic(
    head_dim: int, base: float, *, factor: float, original_max_position_embeddings: float, length: int
) -> Frequencies:
    # As far as the model was trained the factor is 1.
    length = max(length, int(original_max_position_embeddings))
    return _ntk(head_dim, base, factor=factor * length / original_max_position_embeddings - (factor - 1))


def _llama3(
    head_dim: int,
    base: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Frequencies:
    if high_freq_factor <= low_freq_factor:
        raise ValueError(
            f"scaling: high_freq_factor={high_freq_factor} must be above low_freq_factor={low_freq_factor} "
            "(Llama 3.1 has 4 and 1)"
        )
    inverse, _ = _default(head_dim, base)
    # Turns that a pair makes over the trained context: many keep their frequency, few are interpolated.
    turns = original_max_position_embeddings * inverse / (2 * pi)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return inverse * (kept + (1 - kept) / factor), 1.0


def _yarn(
    head_dim: int,
    base: float,
    *,
    factor: float,
    original_max_position_embeddings: float,
    attention_factor: float | None = None,
    beta_fast: float | None = None,
    beta_slow: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
) -> Frequencies:
    def pair_with(turns: float) -> float:
        """The (fractional) pair that makes so many turns over the trained context."""
        return head_dim * log(original_max_position_embeddings / (turns * 2 * pi)) / (2 * log(base))

    low, high = pair_with(beta_fast or 32.0), pair_with(beta_slow or 1.0)
    if truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    inverse, _ = _default(head_dim, base)
    kept = 1 - ((torch.arange(head_dim // 2, device="cpu").float() - low) / (high - low)).clamp(0, 1)
    if attention_factor is None:
        over_all = mscale and mscale_all_dim
        attention_factor = _yarn_scale(factor, mscale if over_all else None)
        attention_factor /= _yarn_scale(factor, mscale_all_dim) if over_all else 1.0
    return inverse * (kept + (1 - kept) / factor), attention_factor


def _yarn_scale(factor: float, mscale: float | None) -> float:
    """Peng et al., equation 22: queries and keys grow by this."""
    return 0.1 * (mscale or 1.0) * log(factor) + 1.0 if factor > 1 else 1.0


_KINDS: dict[str, Callable[..., Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {"yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")}


def _parse(scaling: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """The type and its parameters, checked."""
    if scaling is None:
        return "default", {}
    if not isinstance(scaling, Mapping):
        raise TypeError(f"scaling={scaling!r}: None or a mapping such as {{'rope_type': 'linear', 'factor': 4.0}}")
    given = dict(scaling)
    old, new = given.pop("type", None), given.pop("rope_type", None)
    kind = new if new is not None else old
    check_choice("rope scaling type", kind if kind is not None else "", _KINDS)
    needed, optional = _NEEDED[kind], _OPTIONAL.get(kind, ())
    if missing := [name for name in needed if given.get(name) is None]:
        raise ValueError(f"scaling: {missing[0]} is missing; type {kind!r} needs {', '.join(needed)}")
    # Configuration files write every key that any type has, as null.
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in (*needed, *optional, "rope_theta"):
            takes = ", ".join((*needed, *optional)) or "no keys"
            raise ValueError(f"scaling: {name}={value!r} is not a key of type {kind!r}, which takes {takes}")
        if name == "truncate":
            continue
        if check_number(f"scaling {name}", value) <= 0:
            raise ValueError(f"scaling: {name}={value}: a positive number is needed")
    return kind, given
