"""The fused loss of parallelized models, without a model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seqpar.hf.loss import fused_cross_entropy

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("items", [37, 1_000_003])
def test_gradients_are_scaled_in_float32(dtype: torch.dtype, items: int) -> None:
    """If the factor 1 / items were rounded to bfloat16, all gradients would have its rounding error."""
    torch.manual_seed(0)
    hidden = torch.randn(200, 32).to(dtype).requires_grad_()
    head = nn.Linear(32, 501, dtype=dtype)
    labels = torch.randint(501, (200,))
    (fused_cross_entropy(hidden, head, labels) / items).backward()

    exact = [x.detach().double().requires_grad_() for x in (hidden, head.weight, head.bias)]
    loss = F.cross_entropy(F.linear(*exact), labels, reduction="sum") / items
    expected = torch.autograd.grad(loss, exact)
    for x, reference in zip((hidden, head.weight, head.bias), expected, strict=True):
        assert x.grad is not None
        # The least-squares factor between the two: roundings of single elements average out.
        factor = (x.grad.double() * reference).sum() / reference.square().sum()
        assert abs(factor - 1) < (1e-3 if dtype == torch.bfloat16 else 1e-6)  # 1.8e-3 with the factor in bfloat16
