"""Dropout as a pure function of (seed, batch row, head, global query, global key).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), written with integer tensor
operations. It returns the same bits as ``tl.philox`` in a Triton kernel, on any device and for any sharding.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low words of a 32 x 32 bit product. int64 holds all 64 bits; the mask undoes the sign extension."""
    product = x * factor
    return (product >> 32) & _WORD, product & _WORD


def philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> Tensor:
    """The first word of Philox4x32-10.

    Args:
        seed: 64 bits, the key.
        c0: first word of the counter, int64 in [0, 2**32); the four words broadcast against each other.
        c1: second word.
        c2: third word.
        c3: fourth word.

    Returns:
        int64 in [0, 2**32), in the broadcast shape.
    """
    key0, key1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        high_b, low_b = _multiply(c2, _MULTIPLIER_B)
        high_a, low_a = _multiply(c0, _MULTIPLIER_A)
        c0, c1, c2, c3 = high_b ^ c1 ^ key0, low_b, high_a ^ c3 ^ key1, low_a
        key0, key1 = (key0 + _WEYL_A) & _WORD, (key1 + _WEYL_B) & _WORD
    return c0


def keep_mask(
    seed: int, dropout_p: float, batch: int, heads: range, q_positions: Tensor, k_positions: Tensor
) -> Tensor:
    """Which attention weights dropout keeps.

    Args:
        seed: the dropout seed, the same on every rank.
        dropout_p: the probability of dropping an attention weight.
        batch: the number of batch rows.
        heads: global indices of the heads.
        q_positions: global positions of the queries, integers ``[q_len]``.
        k_positions: global positions of the keys, integers ``[k_len]``.

    Returns:
        bool ``[batch, heads, q_len, k_len]``.
    """
    device = q_positions.device
    words = philox(
        seed,
        k_positions.long().view(1, 1, 1, -1),
        q_positions.long().view(1, 1, -1, 1),
        torch.arange(heads.start, heads.stop, device=device).view(1, -1, 1, 1),
        torch.arange(batch, device=device).view(-1, 1, 1, 1),
    )
    return words >= round(dropout_p * 2**32)
