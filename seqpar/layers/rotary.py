"""Rotary position embeddings at arbitrary global positions, with the common scalings for longer contexts.

Su et al., "RoFormer", 2021. Dimension ``i`` of the first half of a head is paired with dimension ``i`` of its second
half (``rotate_half``), as in Hugging Face's Llama, whose weights this fits.

Shapes: b batch, s local sequence, h heads, d head_dim. A head has d / 2 pairs, each with its own inverse frequency
``inv_freq``; at position ``p`` a pair is rotated by the angle ``p * inv_freq``.

[Note: precision] Frequencies and angles are float64. A float32 angle at position 2 ** 24 has an error of up to half a
radian, and float32 cannot represent the next position. Only the cosine and the sine are rounded to float32.

[Note: one table] All layers of a model rotate by the same angles. The table of cosines and sines is therefore made once
for a tensor of positions and a device, and shared by the layers, forward and backward. The tensor of positions is
recognised by its identity and by PyTorch's count of the writes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, MutableMapping
from functools import partial
from inspect import Parameter, signature
from math import ceil, floor, log, pi
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from ..base.cache import context_of, outside_modes, upload
from ..base.checks import check_choice, check_int, check_number
from ..base.compile_types import Opaque, register_reference_type, unwrap
from ..base.library import operator
from ..comm.handshake import Fingerprint, all_gather_header
from ..kernels.elementwise import elementwise_kernels
from ..sharding.same_rows import check_layouts
from ..sharding.sharding import Sharding

# inv_freq, float64 [d / 2], and attention_scaling, a factor on cos and sin.
Frequencies = tuple[Tensor, float]
Table = tuple[Tensor, Tensor]  # cos and sin, each [1 or b, s, 1, d / 2]

_TABLE_BYTES = 512 << 20  # of all cached tables; where a new one exceeds it, the others are removed
_FLOAT64_ELEMENTS = 1 << 22  # how many angles exist in float64 at a time


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their tokens' positions.

    Frequencies and angles are float64, cosines and sines float32 (float64 for float64 inputs), whatever the dtype of
    the module, and the result is rounded once. Angles are accurate to 1e-6 radians at any position below 2 ** 30.

    The table of cosines and sines is computed once for a tensor of positions and shared by all layers that are passed
    this tensor. Pass the same tensor to all layers of a model, or none: the default positions are one tensor too.

    The module has neither parameters nor buffers, so one module can serve all layers.

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
        self._in_operators = _OpaqueRotary(self)
        self.rope_type, parameters = _parse_scaling(scaling)
        base = parameters.pop("rope_theta", base)
        self.base = check_number("base", base)
        if self.base <= 0:
            raise ValueError(f"base={base}: expected a positive number; 10000.0 is usual")
        self.scaling = parameters
        if not self.needs_length:
            self._frequencies(None)  # raises here, not at the first forward

    @property
    def needs_length(self) -> bool:
        """Whether the angles depend on the length of the sequence ("dynamic")."""
        return self.rope_type == "dynamic"

    def forward(
        self, q: Tensor, k: Tensor, positions: Tensor, length: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys of the same tokens.

        Args:
            q: ``[batch, seq, heads, head_dim]``.
            k: ``[batch, seq, kv_heads, head_dim]``.
            positions: integers, ``[seq]`` or ``[batch, seq]``, the tokens' global positions in any order.
            length: for "dynamic", the largest position of the whole sequence plus one, as an int or as an int64 tensor
                ``[]`` on the host. The default takes the largest of ``positions``, which on a shard of the sequence may
                be too small.

        Returns:
            ``q`` and ``k`` rotated, in their own shapes and dtypes.
        """
        if (
            torch.compiler.is_compiling()
        ):  # backward takes the table from the cache again; otherwise every layer keeps one
            rotated: tuple[Tensor, Tensor] = checkpoint(
                self._rotate, q, k, positions, length, use_reentrant=False, preserve_rng_state=False
            )
            return rotated
        return self._rotate(q, k, positions, length)

    def _rotate(self, q: Tensor, k: Tensor, positions: Tensor, length: int | Tensor | None) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos_sin(positions, torch.promote_types(q.dtype, torch.float32), q.device, length)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def cos_sin(
        self, positions: Tensor, dtype: torch.dtype, device: torch.device, length: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles, ``[1 or batch, seq, 1, head_dim / 2]``. Shared: do not write to them."""
        if not self.needs_length:
            length = None
        if torch.compiler.is_compiling():
            if length is not None and not isinstance(length, Tensor):
                length = torch.full((), length, dtype=torch.int64, device="cpu")
            table: Table = rotary_table(positions, self._in_operators, dtype, device, length)
            return table
        tokens = None
        if self.needs_length:
            tokens = _own_length(positions) if length is None else int(length)
        make = partial(_make_table, positions, partial(self._frequencies, tokens), dtype, device)
        parameters = self.rope_type, self.head_dim, self.base, *sorted(self.scaling.items())
        key = (*parameters, tokens, dtype, *context_of(device))
        return _cached_table(positions, key, make)

    def _frequencies(self, length: int | None) -> Frequencies:
        compute = _ROPE_INIT_FUNCTIONS[self.rope_type]
        if self.needs_length:
            compute = partial(compute, length=length)
        return compute(self.head_dim, self.base, **self.scaling)

    def extra_repr(self) -> str:
        scaling = f", {self.rope_type}, {self.scaling}" if self.rope_type != "default" else ""
        return f"head_dim={self.head_dim}, base={self.base:g}{scaling}"


def _own_length(positions: Tensor) -> int:
    return int(positions.max().item()) + 1 if positions.numel() else 1


class _LengthHeader(NamedTuple):
    """The largest position of a rank's tokens plus one, and how the sequence is sharded."""

    length: int
    layout: Fingerprint


@operator(fake=lambda x, positions, sharding: torch.empty((), dtype=torch.int64, device="cpu"))
def rotary_length(x: Tensor, positions: Tensor | None, sharding: Sharding) -> Tensor:
    """The ``length`` of ``RotaryEmbedding.forward`` for this rank's tokens ``x [b, s, ...]``: int64 ``[]`` on the host.

    Without ``positions [s]`` or ``[b, s]``, the sharding gives the tokens their positions. Otherwise the ranks tell one
    another their largest position in a handshake.
    """
    if positions is None:
        return torch.tensor(sharding.seq_len, device="cpu")

    def header() -> _LengthHeader:
        sharding.check_local(x.shape[1])
        return _LengthHeader(_own_length(positions), sharding.checksum)

    headers = all_gather_header(header, sharding.sequence_group)
    check_layouts(headers)
    return torch.tensor(max(header.length for header in headers), device="cpu")


@register_reference_type()
class _OpaqueRotary(Opaque):
    """The rotary embedding that an operator computes the table of."""

    def __init__(self, embedding: RotaryEmbedding) -> None:
        self.embedding = embedding


def _fake_table(positions: Tensor, rotary: _OpaqueRotary, dtype: torch.dtype, device: torch.device, _: Any) -> Table:
    batch = positions.shape[0] if positions.dim() == 2 else 1
    shape = batch, positions.shape[-1], 1, unwrap(rotary).embedding.head_dim // 2
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)


@operator(fake=_fake_table)
def rotary_table(
    positions: Tensor, rotary: _OpaqueRotary, dtype: torch.dtype, device: torch.device, length: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``RotaryEmbedding.cos_sin`` for compiled code."""
    cos, sin = rotary.embedding.cos_sin(positions, dtype, device, length)
    return cos.clone(), sin.clone()  # the compiler may write to the result of an operator once it needs it no longer


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x * cos + rotate_half(x) * sin`` for ``x [b, s, h, d]``, computed in the dtype of ``cos [1 or b, s, 1, d / 2]``
    and ``sin``, and rounded to the dtype of ``x``."""
    if cos.dtype == torch.float32 and (kernels := elementwise_kernels(x)) is not None:
        return kernels.apply_rotary(x, cos, sin)
    first, second = x.to(cos.dtype).chunk(2, dim=-1)  # [b, s, h, d / 2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _make_table(
    positions: Tensor, frequencies: Callable[[], Frequencies], dtype: torch.dtype, device: torch.device
) -> Table:
    """The cosines and sines of the angles at ``positions [s]`` or ``[b, s]``."""
    compute_on = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
    with torch.no_grad():
        inv_freq, attention_scaling = frequencies()
        inv_freq = upload(inv_freq, compute_on)
        batched = upload(torch.atleast_2d(positions), compute_on)  # [1 or b, s]
        cos, sin = (
            torch.empty(*batched.shape, 1, len(inv_freq), dtype=dtype, device=compute_on) for _ in range(2)
        )  # [1 or b, s, 1, d / 2]
        rows = max(1, _FLOAT64_ELEMENTS // max(1, batched.shape[0] * len(inv_freq)))
        for start in range(0, batched.shape[1], rows):
            part = slice(start, start + rows)
            angles = batched[:, part, None, None].double() * inv_freq  # [1 or b, rows, 1, d / 2]
            cos[:, part] = angles.cos().mul_(attention_scaling)
            sin[:, part] = angles.sin_().mul_(attention_scaling)
        return cos.to(device), sin.to(device)


# By tensor of positions, and then by what else a table depends on: the version of the positions (every write to them
# raises it) and the table that was made for it. The tables are removed with the positions.
_tables: MutableMapping[Tensor, dict[Hashable, tuple[int, Table]]] = WeakIdKeyDictionary()


def _cached_table(positions: Tensor, key: Hashable, make: Callable[[], Table]) -> Table:
    """The table of the current values of ``positions``, made by ``make()`` if there is none."""
    if type(positions) not in (Tensor, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(positions):
        return make()
    has_version = not positions.is_inference()
    if has_version:
        version, kept = _tables.get(positions, {}).get(key, (-1, None))
        if kept is not None and version == positions._version:
            return kept
    with outside_modes():
        table = make()
    if has_version:
        tables = [table, *(other for by_key in list(_tables.values()) for _, other in by_key.values())]
        if sum(x.nbytes for pair in tables for x in pair) > _TABLE_BYTES:
            _tables.clear()
        _tables.setdefault(positions, {})[key] = positions._version, table
    return table


def _default(head_dim: int, base: float) -> Frequencies:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").double() / head_dim  # [d / 2]
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
    # Up to the length that the model was trained with, the factor given to _ntk is 1.
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
    # The number of rotations of each pair of channels over the context that the model was trained with. A frequency
    # with more than high_freq_factor rotations is unchanged. One with fewer than low_freq_factor rotations is divided
    # by factor. Between the two, the frequency is interpolated linearly.
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
        """The (fractional) index of the pair of channels with ``rotations`` over the context of the training."""
        return head_dim * log(original_max_position_embeddings / (rotations * 2 * pi)) / (2 * log(base))

    low, high = correction_dim(beta_fast or 32.0), correction_dim(beta_slow or 1.0)
    if truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp below divides by high - low
    inv_freq, _ = _default(head_dim, base)
    # Pairs up to low keep their frequency. The frequencies of pairs from high on are divided by factor. In between, the
    # frequency is interpolated linearly.
    unscaled = 1 - ((torch.arange(head_dim // 2, device="cpu").double() - low) / (high - low)).clamp(0, 1)  # [d / 2]
    if attention_factor is None:
        has_both = mscale and mscale_all_dim
        attention_factor = _yarn_mscale(factor, mscale if has_both else None)
        attention_factor /= _yarn_mscale(factor, mscale_all_dim) if has_both else 1.0
    return inv_freq * (unscaled + (1 - unscaled) / factor), attention_factor


def _yarn_mscale(factor: float, mscale: float | None) -> float:
    """The factor on queries and keys, Peng et al., equation 22."""
    return 0.1 * (mscale or 1.0) * log(factor) + 1.0 if factor > 1 else 1.0


# By rope_type. The keyword arguments are the keys of the scaling; those without a default are required.
_ROPE_INIT_FUNCTIONS: dict[str, Callable[..., Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _parse_scaling(scaling: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """The ``rope_type`` of a scaling configuration, and its other keys."""
    if scaling is None:
        return "default", {}
    if not isinstance(scaling, Mapping):
        raise TypeError(
            f"scaling={scaling!r}: expected None or a mapping such as {{'rope_type': 'linear', 'factor': 4.0}}, "
            f"got {type(scaling).__name__}"
        )
    # Configuration files may have the keys of all types, with null for those that the given type does not have.
    parameters = {name: value for name, value in scaling.items() if value is not None}
    old_name = parameters.pop("type", "")
    rope_type = parameters.pop("rope_type", old_name)
    check_choice("scaling rope_type", rope_type, _ROPE_INIT_FUNCTIONS)
    options = signature(_ROPE_INIT_FUNCTIONS[rope_type]).parameters.values()
    defaults = {x.name: x.default for x in options if x.kind is x.KEYWORD_ONLY and x.name != "length"}
    required = [name for name, default in defaults.items() if default is Parameter.empty]
    if missing := [name for name in required if name not in parameters]:
        raise ValueError(f"scaling: {missing[0]} is missing; rope_type {rope_type!r} requires {', '.join(required)}")
    for name, value in parameters.items():
        if name not in (*defaults, "rope_theta"):
            keys = ", ".join(defaults) or "none"
            raise ValueError(f"scaling: {name}={value!r} is not a key of rope_type {rope_type!r}; its keys are: {keys}")
        if name != "truncate" and check_number(f"scaling {name}", value) <= 0:
            raise ValueError(f"scaling: {name}={value}: expected a positive number")
    return rope_type, parameters
