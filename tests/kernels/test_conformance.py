"""Every backend that can run here computes every mask: each step of forward and backward, against float64.

A backend takes part because it is registered in ``BACKENDS``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from seqpar.kernels import BACKENDS
from seqpar.kernels.base import Backend, Carry, Grads, OutputGrad, Score, accumulator, row_delta
from seqpar.schedule.rows import KeyIntervals

from ..problems import BATCH_RULES, RULES, Problem, present_backends
from ..reference import (
    Rules,
    assert_close,
    combined_mask,
    dense_attention,
    dense_gradients,
    rows_of,
    rules_id,
    visible_pairs,
)

SEQ_LEN, HEAD_DIMS = 50, (16, 64)  # a backend is tested with the first one that it supports
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
DTYPES = torch.float32, torch.float64, torch.bfloat16
HEADS = {"MHA": (4, 4), "GQA": (4, 2)}


def steps_of(rules: Rules, cuts: list[int], device: str) -> list[tuple[slice, KeyIntervals]]:
    """The keys of each step, and which of them each query sees. Each part of the mask has steps of its own."""
    positions = torch.arange(SEQ_LEN, dtype=torch.int32)
    steps = []
    for (start, stop), ends in product(pairwise(cuts), combined_mask(rules).interval_sets(positions.long())):
        lo, hi = (x.reshape(-1, SEQ_LEN) for x in ends)
        first, last = (x.clamp(start, stop).int() - start for x in (lo, hi))
        intervals = KeyIntervals(first, torch.maximum(first, last), positions, positions[start:stop])
        steps.append((slice(start, stop), intervals.to(torch.device(device))))
    return steps


def supported(backend: Backend, heads: tuple[int, int]) -> tuple[int, list[tuple[str, torch.dtype]]]:
    """A head_dim, and the devices and dtypes of the calls that the backend supports with it."""
    for head_dim in HEAD_DIMS:
        found = []
        for device, dtype in product(DEVICES, DTYPES):
            q, k = (torch.empty(1, SEQ_LEN, n, head_dim, dtype=dtype, device=device) for n in heads)
            if backend.unsupported(q, k, Score(1.0), lse_gradient=False) is None:
                found.append((device, dtype))
        if found:
            break
    return head_dim, found


@pytest.mark.parametrize("rules", [*RULES, *BATCH_RULES], ids=rules_id)
@pytest.mark.parametrize("name", present_backends())
def test_every_step_of_every_mask(name: str, rules: Rules) -> None:
    """With equal heads and with groups; all keys in one step, or in two with a carry; with the last step or without.

    Every other mask has equal heads in one step, and the others have groups.
    """
    backend = BACKENDS[name]
    swapped = [*RULES, *BATCH_RULES].index(rules) % 2
    for heads, cuts in zip([*HEADS.values()][:: 1 - 2 * swapped], ([0, SEQ_LEN], [0, 21, SEQ_LEN]), strict=True):
        head_dim, calls = supported(backend, heads)
        assert calls, f"{name} supports none of {DTYPES}"
        for device, dtype in calls:
            check(backend, rules, heads, head_dim, cuts, device, dtype)


def check(
    backend: Backend,
    rules: Rules,
    heads: tuple[int, int],
    head_dim: int,
    cuts: list[int],
    device: str,
    dtype: torch.dtype,
) -> None:
    problem = Problem(
        SEQ_LEN, rows_of(rules), *heads, head_dim, rules=rules, dtype=dtype, sinks=True, lse_gradient=True,
        seed=int(torch.randint(1 << 30, ())),
    )  # fmt: skip
    tensors = {x: tensor.to(device) for x, tensor in problem.tensors().items()}
    q, k, v, dout, dlse, sinks = (tensors[x] for x in ("q", "k", "v", "dout", "dlse", "sinks"))
    visible, score = visible_pairs(rules, SEQ_LEN).to(device), Score(head_dim**-0.5, sinks=sinks)
    if backend.unsupported(q, k, score, lse_gradient=False) is not None:
        score = replace(score, sinks=None)
    gradient_of_lse = dlse if backend.unsupported(q, k, score, lse_gradient=True) is None else None
    steps = steps_of(rules, cuts, device)

    def forward(last: bool) -> tuple[Tensor, Tensor]:
        carry: Carry | None = None
        for number, (keys, intervals) in enumerate(steps, 1):
            ends = last and number == len(steps)
            carry = backend.forward(q, k[:, keys], v[:, keys], intervals, score, carry, ends)
        assert carry is not None
        return carry

    acc, lse = forward(last=False)
    without_sinks, lse_without_sinks = dense_attention(q, k, v, visible)
    assert_close(acc, without_sinks, dtype, "carry")
    assert_close(lse, lse_without_sinks, dtype, "lse of the carry")

    out, lse = forward(last=True)
    assert out.dtype == dtype and lse.dtype == accumulator(dtype)
    dq = torch.full_like(q, torch.nan, dtype=accumulator(dtype))
    dk, dv = (torch.ones_like(x, dtype=accumulator(dtype)) for x in (k, v))
    output = OutputGrad(dout, out, lse, row_delta(out, dout, gradient_of_lse))
    for number, (keys, intervals) in enumerate(steps):
        grads = Grads(dq, dk[:, keys].clone(), dv[:, keys].clone(), new_dq=number == 0, new_dkv=number == 0)
        backend.backward(q, k[:, keys], v[:, keys], output, intervals, score, grads)
        added_to_ones = number > 0 and keys != steps[number - 1][0]
        dk[:, keys], dv[:, keys] = (x - float(added_to_ones) for x in (grads.dk, grads.dv))
    expected = dense_gradients(q, k, v, visible, dout, gradient_of_lse, sinks=score.sinks)
    for name, x in {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}.items():
        assert_close(x, expected[name], dtype, name)
    if len(steps) == 1:  # the backend makes the gradients
        made = [Grads(None, None, None, new_dq=True, new_dkv=True, final=final) for final in (False, True)]
        for grads in made:
            backend.backward(q, k, v, output, steps[0][1], score, grads)
            for name, x, like in zip(("dq", "dk", "dv"), grads.tensors, (q, k, v), strict=True):
                assert x.shape == like.shape and x.is_floating_point()
                assert_close(x, expected[name], dtype, f"{name} of a single step")
        for part, final in zip(made[0].tensors[1:], made[1].tensors[1:], strict=True):
            assert torch.equal(part.to(dtype), final.to(dtype)), "sums are rounded once"
            assert backend.name != "triton" or (part.dtype, final.dtype) == (accumulator(dtype), dtype)
