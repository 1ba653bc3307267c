"""The frequencies of rotary embeddings, computed one by one from the formulas in the papers."""

from __future__ import annotations

import math
from typing import Any


def inverse_frequencies(
    dim: int, base: float, scaling: dict[str, Any] | None, length: int
) -> tuple[list[float], float]:
    """The frequency of each pair of channels, computed one by one from the formulas in the papers.

    Args:
        dim: the head_dim.
        base: the base of the frequencies, unless ``scaling`` has ``rope_theta``.
        scaling: a dict with the keys of Hugging Face's ``rope_parameters``.
        length: the largest position plus one, which matters to the type "dynamic".

    Returns:
        The ``dim // 2`` frequencies, and the factor by which cos and sin are multiplied.
    """
    s = dict(scaling or {})
    rope_type = s.get("rope_type") or s.get("type") or "default"
    base = s.get("rope_theta", base)
    trained, factor = s.get("original_max_position_embeddings", 0), s.get("factor", 1.0)
    if rope_type == "ntk":
        base *= factor ** (dim / (dim - 2))
    if rope_type == "dynamic" and length > trained:
        base *= (factor * length / trained - (factor - 1)) ** (dim / (dim - 2))
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    if rope_type == "linear":
        return [f / factor for f in plain], 1.0
    if rope_type == "llama3":
        low, high = trained / s["low_freq_factor"], trained / s["high_freq_factor"]
        scaled = []
        for f in plain:
            wavelength = 2 * math.pi / f
            if wavelength < high:
                scaled.append(f)
            elif wavelength > low:
                scaled.append(f / factor)
            else:
                smooth = (trained / wavelength - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
                scaled.append((1 - smooth) * f / factor + smooth * f)
        return scaled, 1.0
    if rope_type == "yarn":
        # The pair whose wavelength fits ``turns`` times into the trained length: base ** (2 i / dim) * 2 pi * turns.
        edges = [
            dim / 2 * math.log(trained / (turns * 2 * math.pi), base)
            for turns in (s.get("beta_fast", 32), s.get("beta_slow", 1))
        ]
        if s.get("truncate", True):
            edges = [math.floor(edges[0]), math.ceil(edges[1])]
        first, last = max(edges[0], 0), min(edges[1], dim - 1)
        scaled = []
        for i, f in enumerate(plain):
            ramp = min(max((i - first) / (last - first), 0.0), 1.0)  # 0: not scaled; 1: divided by ``factor``
            scaled.append(f * (1 - ramp) + f / factor * ramp)
        temperature = 0.1 * math.log(factor) + 1
        if "mscale" in s:
            temperature = (0.1 * s["mscale"] * math.log(factor) + 1) / (
                0.1 * s["mscale_all_dim"] * math.log(factor) + 1
            )
        return scaled, s.get("attention_factor", temperature)
    return plain, 1.0
