"""The largest score of each head over all ranks: attention's program, run with another kernel."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.library import operator
from ..comm.collectives import all_reduce
from ..masks.mask import Mask
from ..sharding.sharding import Sharding
from ..sharding.spec import AttentionSpec
from .attend import attend


def max_logit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    mask: Mask,
    sharding: Sharding,
    *,
    alibi_slopes: Tensor | None = None,
    latent_weight: Tensor | None = None,
) -> Tensor:
    """The largest score of each head, ``[h]``, in float32 (float64 for float64); the arguments are ``attend``'s."""
    spec = spec.having(backend="max_logit", deterministic=False, dropout_p=0.0, return_lse=True)
    values = v if latent_weight is not None else v[..., :1]  # are not read, but sent
    with torch.no_grad():
        _, largest = attend(
            q, k, values, spec, mask, sharding,
            alibi_slopes=alibi_slopes, latent_weight=latent_weight, joins_backward=False,
        )  # fmt: skip
        result: Tensor = max_over_tokens(largest, sharding)
    return result


@operator(fake=lambda largest, *_: largest.new_empty(largest.shape[1]))
def max_over_tokens(largest: Tensor, sharding: Sharding) -> Tensor:
    """The maximum of ``largest [b, h, s]`` over all tokens: ``[h]``."""
    found = largest.new_full(largest.shape[1:2], -torch.inf)
    if largest.numel():
        found = largest.amax((0, 2))
    return all_reduce(found, sharding.sequence_group, dist.ReduceOp.MAX)
