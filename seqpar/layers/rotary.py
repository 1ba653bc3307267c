"""Rotary position embeddings at arbitrary global positions, with the usual scalings for longer contexts.

Su et al., "RoFormer", 2021. Dimension ``i`` of the first half of a head is paired with dimension ``i`` of its second
half (``rotate_half``), as in Hugging Face's Llama, whose weights this fits.

Shapes: b batch, s local sequence, h heads, d head_dim. A head has d / 2 pairs, each with its own inverse frequency
``inv_freq``; at position ``p`` a pair is rotated by the angle ``p * inv_freq``.
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

# inv_freq, float32 [d / 2], and attention_scaling, a factor on cos and sin.
Frequencies = tuple[Tensor, float]


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their tokens' positions.

    Angles, cosines and sines are float32 (float64 for float64 inputs) whatever the dtype of the module, and the
    result is rounded once. The module has neither parameters nor buffers, so one module can serve all layers.

    Args:
        head_dim: the size of a head, even.
        base: the inverse frequency of pair ``i`` is ``base ** (-2 * i / head_dim)``.
        scaling: None, or a mapping with the keys of Hugging Face's ``rope_parameters`` (``rope_scaling`` of older
            configurations). ``rope_type`` (or ``type``) is one of

            * "default";
            * "linear": positions divided by ``factor`` (position interpolation, Chen et al., 2023);
            * "ntk": ``base * factor ** (head_dim / (head_dim - 2))``;
            * "dynamic": as "ntk", with a factor that grows with the sequence beyond
              ``original_max_position_embeddings``;
            * "llama3": Llama 3.1's, by ``factor``, ``low_freq_factor``, ``high_freq_factor`` and
              ``original_max_position_embeddings``;
            * "yarn": Peng et al., 2023, by ``factor``, ``original_max_position_embeddings`` and, optional,
              ``attention_factor``, ``beta_fast``, ``beta_slow``, ``mscale``, ``mscale_all_dim``, ``truncate``.

            If the mapping has a ``rope_theta``, it replaces ``base``.

    Raises:
        TypeError: an argument has another type.
        ValueError: an odd ``head_dim``, an unknown ``rope_type``, or a key that the type requires or does not have.
    """

    def __init__(self, head_dim: int, base: float = 10000.0, scaling: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        check_int("head_dim", head_dim, 2)
        if head_dim % 2:
            raise ValueError(
                f"head_dim={head_dim}: expected an even number; rotary embeddings rotate pairs of dimensions"
            )
        self.head_dim = head_dim
        self.rope_type, parameters = _parse_scaling(scaling)
        base = parameters.pop("rope_theta", base)
        self.base = check_number("base", base)
        if self.base <= 0:
            raise ValueError(f"base={base}: expected a positive number; 10000.0 is usual")
        self.scaling = parameters
        self._cache: dict[torch.device, Frequencies] = {}
        if not self.needs_length:
            self._frequencies(None, torch.device("cpu"))  # raises here, not at the first forward

    @property
    def needs_length(self) -> bool:
        """Whether the angles depend on the length of the sequence ("dynamic")."""
        return self.rope_type == "dynamic"

    def forward(self, q: Tensor, k: Tensor, positions: Tensor, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys of the same tokens.

        Args:
            q: ``[batch, seq, heads, head_dim]``.
            k: ``[batch, seq, kv_heads, head_dim]``.
            positions: integers, ``[seq]`` or ``[batch, seq]``, the tokens' global positions in any order.
            length: for "dynamic", the largest position of the whole sequence plus one. The default takes the largest
                of ``positions``, which on a shard of the sequence may be too small.

        Returns:
            ``q`` and ``k`` rotated, in their own shapes and dtypes.
        """
        cos, sin = self.cos_sin(positions, torch.promote_types(q.dtype, torch.float32), q.device, length)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def cos_sin(
        self, positions: Tensor, dtype: torch.dtype, device: torch.device, length: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles, ``[1 or batch, seq, 1, head_dim / 2]``."""
        if self.needs_length and length is None:
            length = int(positions.max().item()) + 1 if positions.numel() else 1
        inv_freq, attention_scaling = self._frequencies(length, device)
        batched = (positions if positions.dim() == 2 else positions[None]).to(device, dtype)  # [1 or b, s]
        angles = batched[:, :, None, None] * inv_freq.to(dtype)  # [1 or b, s, 1, d / 2]
        return angles.cos() * attention_scaling, angles.sin() * attention_scaling

    def _frequencies(self, length: int | None, device: torch.device) -> Frequencies:
        """``inv_freq`` on ``device`` and ``attention_scaling``, cached unless they depend on the length."""
        compute = partial(_ROPE_INIT_FUNCTIONS[self.rope_type], self.head_dim, self.base, **self.scaling)
        if self.needs_length:
            inv_freq, attention_scaling = compute(length=length)
            return inv_freq.to(device), attention_scaling
        if device not in self._cache:
            inv_freq, attention_scaling = compute()
            self._cache[device] = inv_freq.to(device), attention_scaling
        return self._cache[device]

    def extra_repr(self) -> str:
        scaling = f", {self.rope_type}, {self.scaling}" if self.rope_type != "default" else ""
        return f"head_dim={self.head_dim}, base={self.base:g}{scaling}"


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of every head, as ``x * cos + rotate_half(x) * sin``.

    Args:
        x: ``[batch, seq, heads, head_dim]``.
        cos: ``[1 or batch, seq, 1, head_dim / 2]``.
        sin: as ``cos``.

    Returns:
        ``[batch, seq, heads, head_dim]``, computed in the dtype of ``cos`` and ``sin`` and rounded to that of ``x``.
    """
    if cos.dtype == torch.float32 and (kernels := elementwise_kernels(x)) is not None:
        return kernels.apply_rotary(x, cos, sin)
    first, second = x.to(cos.dtype).chunk(2, dim=-1)  # [b, s, h, d / 2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _default(head_dim: int, base: float) -> Frequencies:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim  # [d / 2]
    return 1.0 / base**exponents, 1.0


def _linear(head_dim: int, base: float, *, factor: float) -> Frequencies:
    inv_freq, _ = _default(head_dim, base)
    return inv_freq / factor, 1.0


def _ntk(head_dim: int, base: float, *, factor: float) -> Frequencies:
    if head_dim < 4:
        raise ValueError(f"head_dim={head_dim}: expected at least 4 for rope scaling 'ntk' and 'dynamic'")
    return _default(head_dim, base * factor ** (head_dim / (head_dim - 2)))


def _dynamic(
    head_dim: int, base: float, *, factor: float, original_max_position_embeddings: float, length: int
) -> Frequencies:
    # Up to the length that the model was trained with, this is _ntk with a factor of 1.
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
    inv_freq, _ = _default(head_dim, base)
    # Rotations of each pair over the context the model was trained with. Above high_freq_factor of them, a frequency is
    # left as it is; below low_freq_factor, it is divided by factor; between the two, interpolated linearly.
    rotations = original_max_position_embeddings * inv_freq / (2 * pi)  # [d / 2]
    unscaled = ((rotations - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return inv_freq * (unscaled + (1 - unscaled) / factor), 1.0


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
    def correction_dim(rotations: float) -> float:
        """The (fractional) pair that makes ``rotations`` over the context the model was trained with."""
        return head_dim * log(original_max_position_embeddings / (rotations * 2 * pi)) / (2 * log(base))

    low, high = correction_dim(beta_fast or 32.0), correction_dim(beta_slow or 1.0)
    if truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp below divides by high - low
    inv_freq, _ = _default(head_dim, base)
    # Pairs up to low keep their frequency, pairs from high on are divided by factor, with a linear ramp between.
    unscaled = 1 - ((torch.arange(head_dim // 2, device="cpu").float() - low) / (high - low)).clamp(0, 1)  # [d / 2]
    if attention_factor is None:
        has_both = mscale and mscale_all_dim
        attention_factor = _yarn_mscale(factor, mscale if has_both else None)
        attention_factor /= _yarn_mscale(factor, mscale_all_dim) if has_both else 1.0
    return inv_freq * (unscaled + (1 - unscaled) / factor), attention_factor


def _yarn_mscale(factor: float, mscale: float | None) -> float:
    """The factor on queries and keys, Peng et al., equation 22."""
    return 0.1 * (mscale or 1.0) * log(factor) + 1.0 if factor > 1 else 1.0


_ROPE_INIT_FUNCTIONS: dict[str, Callable[..., Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
_REQUIRED_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL_KEYS = {"yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")}


def _parse_scaling(scaling: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """``rope_type`` and its parameters, checked."""
    if scaling is None:
        return "default", {}
    if not isinstance(scaling, Mapping):
        raise TypeError(
            f"scaling={scaling!r}: expected None or a mapping such as {{'rope_type': 'linear', 'factor': 4.0}}, "
            f"got {type(scaling).__name__}"
        )
    given = dict(scaling)
    old_name, new_name = given.pop("type", None), given.pop("rope_type", None)
    rope_type = new_name if new_name is not None else old_name
    check_choice("scaling rope_type", rope_type if rope_type is not None else "", _ROPE_INIT_FUNCTIONS)
    required, optional = _REQUIRED_KEYS[rope_type], _OPTIONAL_KEYS.get(rope_type, ())
    if missing := [name for name in required if given.get(name) is None]:
        raise ValueError(f"scaling: {missing[0]} is missing; rope_type {rope_type!r} requires {', '.join(required)}")
    # Configuration files write the keys of all types, with null for those that the type does not have.
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in (*required, *optional, "rope_theta"):
            keys = ", ".join((*required, *optional)) or "none"
            raise ValueError(f"scaling: {name}={value!r} is not a key of rope_type {rope_type!r}; its keys are: {keys}")
        if name == "truncate":
            continue
        if check_number(f"scaling {name}", value) <= 0:
            raise ValueError(f"scaling: {name}={value}: expected a positive number")
    return rope_type, given
