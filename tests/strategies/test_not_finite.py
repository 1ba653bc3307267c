"""NaN and infinite values reach exactly the rows that see them, in forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Mask

from ..pool import Pool, on_ranks
from ..reference import assert_close, dense_gradients

TOKENS = 150
MASKS = (
    Mask.causal(),
    Mask.padding([0, 40], [100, TOKENS]) & Mask.causal(),
    Mask.documents([0, 30, 30, 70, 140], padding=True),
    Mask.documents([0, 81, TOKENS], causal=False),
    Mask.sliding_window(20, 9),
)
# Strategy, layout and options.
CALLS: list[tuple[str, Any, dict[str, Any]]] = [
    ("ring", "zigzag", {}),
    ("ulysses", "contiguous", {}),
    ("context_parallel", "striped", {"dropout_p": 0.2, "dropout_seed": 3}),  # on the reference
]


def reached(bad: dict[str, Tensor], visible: Tensor) -> dict[str, Tensor]:
    """Which rows of each result bad rows of the inputs reach, bool ``[batch, seq]``, for ``visible [batch, q, k]``."""

    def seen(rows: Tensor) -> Tensor:
        return (visible & rows[:, None]).any(-1)

    sees = visible.any(-1)
    scores = sees & (bad["q"] | seen(bad["k"]))
    out = scores | seen(bad["v"])
    dq = out | (sees & bad["dout"])
    by_key = visible.mT
    dv = (by_key & (scores | bad["dout"])[:, None]).any(-1)
    # The gradient of a key is computed from the gradients of its scores and from the queries.
    dk = (by_key & dq[:, None]).any(-1)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


@on_ranks
def spread(group: ProcessGroup, dtype: torch.dtype, backend: Any, seed: int) -> None:
    """Every mask, and by turns every strategy, NaN and inf, in two rows of some inputs and in all padding."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": 4, "k": 2, "v": 2, "dout": 4}
    for turn, mask in enumerate(MASKS, seed % 6):
        visible = mask.dense(TOKENS).expand(2, -1, -1)
        clean = {x: torch.randn(2, TOKENS, n, 8, generator=generator, dtype=dtype) for x, n in shapes.items()}
        expected = dense_gradients(**clean, visible=visible)
        bad = {x: ~visible.any(-1) & ~visible.any(-2) for x in shapes}  # [batch, seq]
        for rows in bad.values():
            if torch.rand((), generator=generator) < 0.5:
                rows[torch.arange(2), torch.randint(TOKENS, (2,), generator=generator)] = True
        value = torch.inf if turn % 2 else torch.nan
        inputs = {x: clean[x].masked_fill(bad[x][..., None, None], value) for x in shapes}
        strategy, layout, options = CALLS[turn % 3]
        sharding = seqpar.Sharding(TOKENS, layout, group=group)
        q, k, v = (sharding.shard(inputs[x]).requires_grad_() for x in "qkv")
        call: Any = {"strategy": strategy, "sharding": sharding, "mask": mask, "backend": backend, **options}
        out = seqpar.attention(q, k, v, **call)
        gradients = torch.autograd.grad(out, (q, k, v), sharding.shard(inputs["dout"]))
        results = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
        for name, rows in reached(bad, visible).items():
            found, where = sharding.unshard(results[name]), f"{name}, {strategy}, {mask}, {value}"
            assert found[~rows].isfinite().all(), where
            if not options:
                assert_close(found[~rows], expected[name][~rows], dtype)
            if value is torch.nan:
                assert not found[rows].isfinite().flatten(1).all(-1).any(), where


@pytest.mark.thorough(dtype=[torch.float32], backend=["auto"])
@pytest.mark.thorough(backend=["reference"], world=[2, 3])
@pytest.mark.thorough(dtype=[torch.float64], world=[3])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "backend"), [(torch.float32, "auto"), (torch.float32, "reference"), (torch.float64, "auto")]
)
def test_values_reach_the_rows_that_see_them(pool: Pool, dtype: torch.dtype, backend: str, world: int) -> None:
    pool.run(world, spread, dtype, backend, torch.seed() % 2**31)


def test_an_infinite_query_reaches_no_hidden_key() -> None:
    """The kernel may return finite results for such a query, and write nan to the gradients of keys that it hides."""
    for seed in range(40):
        q, k, v, dout = torch.randn(4, 1, 5, 4, 16, generator=torch.Generator().manual_seed(seed))
        q[0, 0, 0, 0] = torch.inf
        k.requires_grad_()
        out = seqpar.attention(q, k, v, strategy="local")
        (dk,) = torch.autograd.grad(out, k, dout)
        assert dk[:, 1:].isfinite().all(), seed
