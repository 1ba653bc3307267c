"""``mixer_of``: the sizes of a ``Mixer`` from the entries of a model's ``config.json``.

The rows of ``_ROWS`` count what such a layer of transformers multiplies, sends and keeps. A mixer computes in chunks of
c tokens. In its recurrence, a head with keys of d elements and values of e elements multiplies for each token

* 2 (3 c d + 2 c e + 3 d e) with the delta rule: in a chunk the keys with each other and with the queries, the inverse
  of the first product with keys and values, and the second product with the values; and the state with the queries and
  twice with the keys (Yang et al., arXiv 2412.06464; transformers' function for a CPU has the same products);
* 2 (c d n / h + c e + 2 d e) in Mamba-2 with n groups of h heads: the products in a chunk, the state and what is read
  of it (Dao and Gu, arXiv 2405.21060, section 6);
* 9 d for each channel in Mamba-1, without chunks (as the authors count it, state-spaces/mamba #110).

Kept are the tensors that autograd keeps of the layers of transformers on several ranks, with the kernels of
flash-linear-attention, mamba-ssm and causal-conv1d.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..base.checks import check_int
from .mixer import Mixer

_DELTA_CHUNK = 64  # tokens, in flash-linear-attention and transformers


Size = Callable[..., int]  # an entry of the configuration by its names, with a default


def _delta_rule(name: str, weights_in: int, kept: int, heads: int, groups: int, d: int, e: int, decay: int, width: int,
                hidden: int) -> Mixer:  # fmt: skip
    """``decay``: elements of the decay of a head, which are float32.

    Kept besides ``kept`` of the result: as float32, with its norm, and times its gate; the gate as float32 and after
    its activation. Of each head, what the decay is computed from and the norm.
    """
    channels = 2 * groups * d + heads * e
    c = _DELTA_CHUNK
    return Mixer(
        hidden,
        name,
        channels,
        width,
        weights_in + channels * width,
        heads * e * hidden,
        kept + 9 * heads * e + 6 * heads,
        heads,
        groups,
        of_head=e + 2 * decay + 1,  # v, decay and beta
        of_group=2 * d,  # q and k
        result=e,
        flops=2.0 * (3 * c * d + 2 * c * e + 3 * d * e),
        state=d * (d + e),
    )


def _gated_delta_net(size: Size, hidden: int) -> Mixer:
    h, n = size("linear_num_value_heads"), size("linear_num_key_heads")
    d, e, width = size("linear_key_head_dim"), size("linear_value_head_dim"), size("linear_conv_kernel_dim", default=4)
    weights = hidden * (2 * n * d + 2 * h * e + 2 * h)  # q, k, v, gate, and two numbers for each head
    return _delta_rule("Gated DeltaNet", weights, h * _DELTA_CHUNK, h, n, d, e, 1, width, hidden)


def _kimi_delta_attention(size: Size, hidden: int) -> Mixer:
    h, d, width = size("linear_num_heads"), size("linear_head_dim"), size("linear_conv_kernel_dim", default=4)
    weights = hidden * (3 * h * d + h) + 2 * (hidden * d + d * h * d)  # q, k, v, beta; decay and gate of rank d
    # Two products of a chunk; of each element of the decay three float32 and a bool.
    kept = 2 * h * _DELTA_CHUNK + 13 * h * d // 2
    return _delta_rule("Kimi Delta Attention", weights, kept, h, h, d, d, d, width, hidden)


def _mamba_2(size: Size, hidden: int) -> Mixer:
    h, n = size("mamba_n_heads", "mamba_num_heads"), size("mamba_n_groups", "n_groups")
    inner = size("mamba_d_ssm", default=0) or size("mamba_expand", default=2) * hidden
    e, d = size("mamba_head_dim", default=inner // h), size("mamba_d_state", "ssm_state_size")
    width, c = size("mamba_d_conv", "conv_kernel", default=4), size("mamba_chunk_size", "chunk_size", default=256)
    channels = h * e + 2 * n * d
    return Mixer(
        hidden,
        "Mamba-2",
        channels,
        width,
        hidden * (h * e + channels + h) + channels * width,  # gate, x, B and C, dt
        h * e * hidden,
        11 * h * e + 2 * h,  # the result, with its gate and in float32, and its norm; the decays in float32
        h,
        n,
        of_head=e + 1,  # x and dt
        of_group=2 * d,  # B and C
        result=e,
        flops=2.0 * (c * d * n / h + c * e + 2 * d * e),
        state=2 * d * e,
    )


def _mamba_1(size: Size, hidden: int) -> Mixer:
    c, d = size("mamba_expand", default=2) * hidden, size("mamba_d_state", default=16)
    rank, width = size("mamba_dt_rank"), size("mamba_d_conv", default=4)
    return Mixer(
        hidden,
        "Mamba-1",
        c,
        width,
        hidden * 2 * c + c * (rank + 2 * d) + rank * c + c * width,  # x and gate; dt's input, B, C; dt
        c * hidden,
        3 * c + 4 * rank + 6 * d,  # the convolution's output, the result of this rank's channels, and of its tokens
        c,
        of_head=3,  # x, dt and the gate
        of_group=2 * d,  # B and C
        result=1,
        flops=9.0 * d,
    )


def _short_convolution(size: Size, hidden: int) -> Mixer:
    width = size("conv_L_cache")
    # Kept: the three projections, and the output of the convolution before and after its gate.
    return Mixer(hidden, "short convolution", hidden, width, hidden * (3 * hidden + width), hidden**2, 5 * hidden)


# By an entry of ``config.json`` that only this kind of mixer has.
_ROWS: dict[str, Callable[[Size, int], Mixer]] = {
    "linear_num_value_heads": _gated_delta_net,
    "linear_num_heads": _kimi_delta_attention,
    "mamba_dt_rank": _mamba_1,
    "mamba_n_heads": _mamba_2,
    "mamba_num_heads": _mamba_2,
    "conv_L_cache": _short_convolution,
}


def mixer_of(entries: Mapping[str, Any], hidden: int) -> Mixer | None:
    """The mixer of a configuration with these entries; None if it has none of these.

    Raises:
        ValueError: the configuration lacks a size.
    """

    def size(*names: str, default: int | None = None) -> int:
        """The first of the entries ``names`` that the configuration has. Model types name their sizes differently."""
        for name in names:
            if entries.get(name) is not None:
                check_int(f"model: {name}", entries[name], 1)
                return int(entries[name])
        if default is None:
            raise ValueError(f"model: the configuration has no {names[0]}; add it")
        return default

    return next((make(size, hidden) for entry, make in _ROWS.items() if entries.get(entry) is not None), None)
