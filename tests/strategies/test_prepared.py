"""Calls of one kind share what was prepared for the first of them, and nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

import seqpar
from seqpar import Mask, Sharding, functional
from seqpar.kernels import BACKENDS
from seqpar.schedule import plan as plans
from seqpar.strategies import attend as entrance

from ..pool import Pool

N, HEADS, KV_HEADS, DIM = 38, 6, 3, 8
STRATEGIES = ("ring", "ulysses", "context_parallel")


def documents() -> Mask:
    return Mask.documents([0, 5, 17, N]) & Mask.sliding_window(20, 3)


def whole(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def switched_off() -> AbstractContextManager[Any]:
    return mock.patch.object(type(BACKENDS["cpu"]), "unavailable", return_value="switched off")


# What may differ between two calls with one mask and one sharding: the mode, tensors, and arguments of ``attention``.
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "deterministic": deterministic,
    "a backend switched off": switched_off,
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "lse": {"return_lse": True},
    "scale": {"softmax_scale": 0.7},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": whole(HEADS, seed=5)},
    "other sinks": {"sinks": whole(HEADS, seed=6)},
    "slopes": {"alibi_slopes": whole(HEADS, seed=7).abs()},
    "slopes of batch rows": {"alibi_slopes": whole(2, HEADS, seed=8).abs()},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 1},
    "another seed": {"dropout_p": 0.3, "dropout_seed": 2},
    "reference": {"backend": "reference"},
}
TENSORS: dict[str, dict[str, Any]] = {
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
    "one batch row": {"batch": 1},
    "as many KV heads": {"kv_heads": HEADS},
    "v_head_dim": {"v_dim": DIM + 3},
    "other strides": {"heads_first": True},
    "no gradient": {"requires_grad": False},
    "other values": {"seed": 11},
}


def call(
    mask: Mask,
    sharding: Sharding,
    strategy: Any,
    *,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    kv_heads: int = KV_HEADS,
    v_dim: int = DIM,
    heads_first: bool = False,
    requires_grad: bool = True,
    seed: int = 0,
    **arguments: Any,
) -> list[Tensor]:
    """The results of attention, and the gradients if there are any."""
    tensors = []
    for number, (heads, dim) in enumerate(((HEADS, DIM), (kv_heads, DIM), (kv_heads, v_dim))):
        x = sharding.shard(whole(batch, N, heads, dim, seed=seed + number, dtype=dtype))
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else x
        tensors.append(x.requires_grad_(requires_grad))
    results = seqpar.attention(*tensors, strategy=strategy, mask=mask, sharding=sharding, **arguments)
    results = results if isinstance(results, tuple) else (results,)
    gradients: tuple[Tensor, ...] = ()
    if results[0].requires_grad and requires_grad:
        gradients = torch.autograd.grad(sum(x.double().sin().sum() for x in results), tensors)
    return [x.detach() for x in (*results, *gradients)]


def different(group: ProcessGroup | None, strategy: str) -> list[str]:
    """The calls that differ from calls for which nothing was prepared, in one bit."""
    kept, wrong = (documents(), Sharding(N, "zigzag", group=group)), []
    cases: list[tuple[str, Callable[[], AbstractContextManager[Any]], dict[str, Any]]]
    cases = [(name, mode, {}) for name, mode in MODES.items()]
    cases += [(name, nullcontext, arguments) for name, arguments in {**ARGUMENTS, **TENSORS}.items()]
    for name, mode, arguments in [*cases, *cases[::-1]]:  # at first each of them makes what the others find
        with mode():
            found = call(*kept, strategy, **arguments)
            made = call(documents(), Sharding(N, "zigzag", group=group), strategy, **arguments)
        if len(found) != len(made) or not all(map(torch.equal, found, made)):
            wrong.append(name)
    return wrong


@pytest.mark.thorough(strategy=["ulysses"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_of_another_call_is_left(pool: Pool, strategy: str) -> None:
    assert different(None, strategy) == []
    assert pool.run(2, different, strategy) == [[], []]


def test_a_backend_that_is_switched_off_and_on() -> None:
    mask, sharding = documents(), Sharding(N, "zigzag")
    used = []
    for mode in (nullcontext, switched_off, nullcontext):
        with mode(), seqpar.trace() as trace:
            call(mask, sharding, "ring")
        used.append(dict(trace.backends))
    assert used == [{"cpu": 2}, {"reference": 2}, {"cpu": 2}]


def test_boundaries_that_are_changed_in_place() -> None:
    """A mask holds copies. What was prepared for it is not used for a mask of other boundaries."""
    boundaries, sharding = torch.tensor([0, 5, N]), Sharding(N, "zigzag")
    mask = Mask.documents(boundaries)
    before = call(mask, sharding, "ring")
    boundaries[1] = 20
    assert all(map(torch.equal, call(mask, sharding, "ring"), before))
    after = call(Mask.documents(boundaries), sharding, "ring")
    assert all(map(torch.equal, after, call(Mask.documents([0, 20, N]), Sharding(N), "ring")))
    assert not torch.equal(after[0], before[0])


def test_wrong_tensors_are_refused_after_right_ones() -> None:
    mask, sharding = documents(), Sharding(N, "zigzag")
    q, k = whole(1, N, HEADS, DIM), whole(1, N, KV_HEADS, DIM)
    for _ in range(2):
        seqpar.attention(q, k, k, mask=mask, sharding=sharding)
        for bad, message in (
            ((q, k, k.double()), "v: dtype"),
            ((q, k[:, 1:], k[:, 1:]), "length: q"),
            ((q, k.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1)), "batch: q"),
            ((q[:, :-1], k[:, :-1], k[:, :-1]), "38"),
            ((q.to_sparse(), k, k), "q: "),
            ((q[:, :, :4], k, k), "heads=4, kv_heads=3"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                seqpar.attention(*bad, mask=mask, sharding=sharding)
        with pytest.raises(TypeError, match="transform of torch"):
            torch.func.vmap(lambda x: seqpar.attention(x, k, k, mask=mask, sharding=sharding))(q[None])
        with pytest.raises(ValueError, match="sinks"):
            seqpar.attention(q, k, k, mask=mask, sharding=sharding, sinks=torch.full((HEADS,), torch.nan))


def test_it_is_freed_with_the_mask_and_with_the_sharding() -> None:
    mask, sharding = Mask.documents([0, 7, N]), Sharding(N, "zigzag")
    call(mask, sharding, "ring")
    (prepared,) = [ref(x) for x in sharding.calls[mask].values()]
    plan = ref(prepared().plan)  # type: ignore[union-attr]
    assert plan() is not None
    del mask
    plans._plans.clear()  # the plans of the last masks, by mask
    gc.collect()
    assert prepared() is None and not len(sharding.calls)
    mask = Mask.documents([0, 8, N])
    call(mask, sharding, "ring")
    (prepared,) = [ref(x) for x in sharding.calls[mask].values()]
    del sharding
    gc.collect()
    assert prepared() is None


def test_the_number_of_kinds_is_bounded() -> None:
    mask, sharding = Mask.causal(), Sharding(4)
    for batch in range(1, 100):
        x = torch.zeros(batch, 4, 1, 2)
        seqpar.attention(x, x, x, mask=mask, sharding=sharding)
    assert len(sharding.calls[mask]) <= 64


def test_a_group_that_was_destroyed_is_not_used_again() -> None:
    """A call without a sharding finds what was prepared for its length, in the same group only."""
    x = whole(1, N, 2, 4)
    results, shardings = [], []
    for _ in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        try:
            for made_with in ({}, {"mesh": seqpar.init_mesh(ring=1, device_type="cpu")}):
                results.append(seqpar.attention(x, x, x, layout="zigzag", **made_with))
                with mock.patch.object(functional, "attend", wraps=entrance.attend) as attend:
                    seqpar.attention(x, x, x, layout="zigzag", **made_with)
                shardings.append(attend.call_args.args[5])
                assert shardings[-1].sequence_group is not None
                dist.get_rank(shardings[-1].sequence_group)  # raises for a group that was destroyed
        finally:
            dist.destroy_process_group()
    assert all(torch.equal(result, results[0]) for result in results)
    assert len({id(sharding.sequence_group) for sharding in shardings}) >= 2
