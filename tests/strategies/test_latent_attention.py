"""Latent attention: ranks send latents and rotated keys, expand those they receive, and have one device's results."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import cycle, product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from seqpar.strategies import latent

from ..cases import Batch
from ..hosts import hosts_of
from ..pool import on_ranks
from ..problems import RULES
from ..reference import (
    Rule,
    Rules,
    assert_close,
    combined_mask,
    dense_attention,
    fitted,
    rank_positions,
    rows_of,
    rules_id,
    visible_pairs,
)
from ..strategy_cases import LAYOUTS, STRATEGIES, layout_of

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Latent attention of a whole sequence.

    Attributes:
        strategy: a row of ``STRATEGIES``.
        nope, rope, v_head_dim: elements of a key that come from the latent, of the rotated key, and of a value.
        width: of the latent.
        block_heads: whether the heads are expanded one at a time, instead of all at once.
        frozen: whether the weight requires no gradient.
    """

    strategy: str
    layout: str
    rules: Rules = (Rule("causal"),)
    seq_len: int = 50
    heads: int = 4
    nope: int = 6
    rope: int = 4
    v_head_dim: int = 5
    width: int = 12
    dtype: torch.dtype = torch.float32
    block_heads: bool = False
    sinks: bool = False
    frozen: bool = False
    per_host: int = 0
    seed: int = 0

    def __str__(self) -> str:
        words = [self.strategy, self.layout, rules_id(self.rules)]
        return " ".join(words + [f"{f.name}={getattr(self, f.name)}".replace("torch.", "") for f in fields(self)[3:]])

    def tensors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        batch = rows_of(self.rules)
        shapes = {
            "q": (batch, self.seq_len, self.heads, self.nope + self.rope),
            "latent": (batch, self.seq_len, 1, self.width),
            "k_rope": (batch, self.seq_len, 1, self.rope),
            "weight": (self.heads, self.nope + self.v_head_dim, self.width),
            "dout": (batch, self.seq_len, self.heads, self.v_head_dim),
        }
        if self.sinks:
            shapes["sinks"] = (self.heads,)
        scale = {"weight": self.width**-0.5}
        return {
            name: (torch.randn(shape, generator=generator, dtype=torch.float64) * scale.get(name, 1.0)).to(self.dtype)
            for name, shape in shapes.items()
        }

    def solve(self) -> Results:
        """Keys and values are expanded for all tokens, in float64, and rounded once, as by a model's projection."""
        tensors = {name: x.double().requires_grad_(name != "dout") for name, x in self.tensors().items()}
        q, compressed, k_rope, weight = (tensors[name] for name in ("q", "latent", "k_rope", "weight"))
        kv = torch.einsum("bsow,hnw->bshn", compressed, weight)
        kv = kv + (kv.to(self.dtype).double() - kv).detach()
        k = torch.cat([kv[..., : self.nope], k_rope.expand(-1, -1, self.heads, -1)], 3)
        v = kv[..., self.nope :]
        sinks = tensors.get("sinks")
        rules = fitted(self.rules, self.seq_len)
        out, lse = dense_attention(q, k, v, visible_pairs(rules, self.seq_len), sinks=sinks)
        out.backward(tensors["dout"])
        grads = {f"d{name}": x.grad for name, x in tensors.items() if x.grad is not None}
        return {"out": out.detach(), "lse": lse.detach(), **grads}


@on_ranks
def attend(group: ProcessGroup, case: Case) -> tuple[Results, tuple[int, int]]:
    """This rank's shard of the results, and the bytes that it sends in forward and in backward."""
    tensors = case.tensors()
    at = rank_positions(case.seq_len, group.size(), group.rank(), case.layout)
    leaves = {name: tensors[name][:, at].clone().requires_grad_() for name in ("q", "latent", "k_rope")}
    leaves["weight"] = tensors["weight"].clone().requires_grad_(not case.frozen)
    if "sinks" in tensors:
        leaves["sinks"] = tensors["sinks"].clone().requires_grad_()
    layout = layout_of(case.layout, case.seq_len, group.size())
    arguments: dict[str, Any] = {**STRATEGIES[case.strategy], "layout": layout, "group": group}
    with hosts_of(case.per_host), mock.patch.object(latent, "_BLOCK_BYTES", 1 if case.block_heads else 1 << 40):
        with seqpar.trace() as forward:
            out, lse = seqpar.attention(
                leaves["q"],
                leaves["latent"],
                leaves["k_rope"],
                latent_weight=leaves["weight"],
                sinks=leaves.get("sinks"),
                mask=combined_mask(fitted(case.rules, case.seq_len)),
                return_lse=True,
                **arguments,
            )
        with seqpar.trace() as backward:
            out.backward(tensors["dout"][:, at])
    grads = {f"d{name}": x.grad for name, x in leaves.items() if x.grad is not None}
    return {"out": out.detach(), "lse": lse.detach(), **grads}, (forward.bytes_sent, backward.bytes_sent)


def compare(case: Case, by_rank: list[tuple[Results, tuple[int, int]]]) -> None:
    expected = case.solve()
    world = len(by_rank)
    assert ("dweight" in by_rank[0][0]) is not case.frozen
    for rank, (actual, _) in enumerate(by_rank):
        at = rank_positions(case.seq_len, world, rank, case.layout)
        for name, x in actual.items():
            if name in ("dweight", "dsinks"):
                continue
            want = expected[name][:, :, at] if name == "lse" else expected[name][:, at]
            assert_close(x, want, case.dtype, f"{name} of rank {rank}")
    for name in ("dweight", "dsinks"):  # partial gradients
        if name in by_rank[0][0]:
            total = sum(actual[name].double() for actual, _ in by_rank)
            assert_close(total, expected[name], case.dtype, name)


@pytest.mark.slow
@pytest.mark.thorough(world=[4])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_results_of_one_device(batch: Batch, world: int) -> None:
    rules, layouts = cycle(RULES), cycle(LAYOUTS[:3])
    cases = [
        Case(name, layout, next(rules), seed=i) for i, (name, layout) in enumerate(product(STRATEGIES, LAYOUTS[:3]))
    ]
    for i, (name, dtype) in enumerate(product(STRATEGIES, (torch.float64, torch.bfloat16))):
        sizes = {"heads": (8, 5, 3)[i % 3], "nope": (6, 0, 3)[i % 3], "v_head_dim": (5, 11)[i % 2]}
        some = {"block_heads": i % 2 == 0, "sinks": i % 3 == 0, "frozen": i % 4 == 1, "seq_len": (50, 7, 31)[i % 3]}
        cases.append(Case(name, next(layouts), next(rules), dtype=dtype, seed=100 + i, **sizes, **some))
    cases += [Case(name, "assigned", next(rules), seed=200 + i) for i, name in enumerate(STRATEGIES)]
    if world == 4:
        cases += [Case(name, "zigzag", per_host=2, block_heads=True) for name in ("ring", "all_gather")]
    batch.check(world, attend, cases, compare)


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_are_those_of_the_latents(batch: Batch, world: int) -> None:
    """A token's latent and rotated key, and in backward these again, and their gradients in float32."""
    names = ("ring", "all_gather", "all_gather in chunks", "p2p")
    cases = [
        Case(name, "contiguous", (Rule("full"),), seq_len=48, dtype=dtype)
        for name in names
        for dtype in (torch.float32, torch.bfloat16)
    ]

    def verify(case: Case, by_rank: list[tuple[Results, tuple[int, int]]]) -> None:
        elements = case.seq_len * (world - 1) // world * (case.width + case.rope)
        forward = elements * case.dtype.itemsize
        assert [sent for _, sent in by_rank] == [(forward, forward + 4 * elements)] * world

    batch.check(world, attend, cases, verify)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "two heads": ({"k": torch.zeros(1, 4, 2, 12)}, ValueError, "k: shape"),
    "other tokens": ({"v": torch.zeros(1, 3, 1, 4)}, ValueError, "v: shape"),
    "dtype": ({"latent_weight": torch.zeros(2, 9, 12, dtype=torch.float64)}, TypeError, "latent_weight: torch.float64"),
    "heads": ({"latent_weight": torch.zeros(3, 9, 12)}, ValueError, "latent_weight: shape"),
    "width": ({"latent_weight": torch.zeros(2, 9, 13)}, ValueError, "latent_weight: shape"),
    "no values": ({"latent_weight": torch.zeros(2, 6, 12)}, ValueError, "second dimension"),
    "rope is wider than q": ({"v": torch.zeros(1, 4, 1, 11)}, ValueError, "second dimension"),
    "no tensor": ({"latent_weight": 3}, TypeError, "latent_weight: expected a tensor"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    changed, error, message = BAD[name]
    arguments = {
        "q": torch.zeros(1, 4, 2, 10),
        "k": torch.zeros(1, 4, 1, 12),
        "v": torch.zeros(1, 4, 1, 4),
        "latent_weight": torch.zeros(2, 9, 12),
        **changed,
    }
    with pytest.raises(error, match=message):
        seqpar.attention(**arguments, strategy="local")
