"""Batches in the layout "balanced", and in an ``Assigned`` one: losses and gradients are one device's."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from operator import itemgetter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader

pytest.importorskip("transformers")

import seqpar
import seqpar.hf
from seqpar.hf import batch as hf_batch
from seqpar.placement.balanced import balanced_layout
from seqpar.schedule import plan

from ..observe import message_of
from ..pool import Pool, on_ranks
from ..strategy_cases import layout_of
from .workers import VOCAB, Result, check_loss, check_step, one_device, parallel, report_on, tiny

pytestmark = pytest.mark.slow
LENGTH = 1100  # at least four tiles of 128 tokens for each of two ranks


def packed(seed: int, length: int = LENGTH) -> dict[str, Tensor]:
    """One row of packed documents, the longest first."""
    g = torch.Generator().manual_seed(seed)
    cuts = torch.randint(length // 2, length, (6,), generator=g).sort().values.tolist()
    ids = torch.randint(3, VOCAB, (1, length), generator=g)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise([0, *cuts, length])])[None]
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


@on_ranks
def train(group: ProcessGroup, batch: dict[str, Tensor], expected: Result, strategy: str) -> str:
    """Full batches, and batches that the ranks have cut before."""
    assigned = layout_of("assigned", LENGTH, group.size())
    for layout in ("balanced", assigned):
        model = parallel(group, layout=layout, strategy=strategy)
        check_step(group, model, batch, expected)
        model.zero_grad()
        check_step(group, model, seqpar.hf.shard_batch(batch, group=group, layout=layout), expected)
    sharding = seqpar.Sharding(LENGTH, assigned, group=group)
    check_step(group, parallel(group), seqpar.hf.shard_batch(batch, sharding=sharding), expected)
    return repr(seqpar.hf.shard_batch(batch, group=group, layout="balanced")["seqpar"].tokens)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_a_step_is_one_device(pool: Pool, strategy: str) -> None:
    batch = packed(1)
    made = pool.run(2, train, batch, one_device("llama", batch), strategy)
    assert len(set(made)) == 1 and "Assigned" in made[0]


@on_ranks
def windows(group: ProcessGroup, batch: dict[str, Tensor]) -> list[tuple[dict[int, int], float]]:
    """The visible pairs of each mask that the layout is made for with its number of layers, and the loss."""
    model, found = parallel(group, "gemma2", layout="balanced"), []
    for collate in (dict, lambda batch: seqpar.hf.PlanCollator(model, itemgetter(0))([batch])):
        with mock.patch.object(hf_batch, "balanced_layout", wraps=balanced_layout) as made:
            full = collate(batch)
            # A loader, which does not know the layers, takes the layout of the plans.
            local = seqpar.hf.shard_batch(full, group=group, layout="balanced") if "seqpar_mask" in full else full
            loss = model(**local).loss.item()
        ((masks, *_), _), *more = made.call_args_list
        assert not more
        found.append(({int(mask.dense(LENGTH).sum()): layers for mask, layers in masks.items()}, loss))
    return found


def test_a_model_with_windows(pool: Pool) -> None:
    batch = packed(1)
    depths = batch["position_ids"][0] + 1  # what each query of a full layer sees
    masks = {int(depths.sum()): 1, int(depths.clamp(max=7).sum()): 1}
    expected = tiny("gemma2")(**batch, use_cache=False).loss.item()
    for found in pool.run(2, windows, batch):
        assert [made for made, _ in found] == [masks] * 2
        for _, loss in found:
            check_loss(loss, expected)


@on_ranks
def losses(group: ProcessGroup, batches: list[dict[str, Tensor]], how: str) -> list[float]:
    """The losses of fine-tuning on packed rows, each with a layout of its own."""
    model = parallel(group, layout="balanced")
    if how == "planned":  # the plans of a batch are for the layout that the batch gets
        collator = seqpar.hf.ShardCollator(seqpar.hf.PlanCollator(model, itemgetter(0)), group=group, layout="balanced")
        loader: Any = DataLoader(batches, collate_fn=collator)
    else:
        loader = seqpar.hf.ShardedLoader(
            DataLoader(batches, collate_fn=itemgetter(0)),
            group=group,
            layout="balanced",
            scatter=how == "scatter",
        )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        seqpar.sync_gradients(model, group=group)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@cache
def of_one_process() -> tuple[list[dict[str, Tensor]], list[float]]:
    """Packed rows, and the losses of fine-tuning on them."""
    batches = [packed(seed, length) for seed, length in ((2, LENGTH), (3, LENGTH + 31), (4, 600))]
    model = tiny("llama")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = []
    for batch in batches:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    return batches, expected


@pytest.mark.thorough(how=["planned"])
@pytest.mark.parametrize("how", ["loaded", "scatter", "planned"])
def test_fine_tuning_has_the_losses_of_one_process(pool: Pool, how: str) -> None:
    batches, expected = of_one_process()
    for got in pool.run(2, losses, batches, how):
        assert len(got) == len(expected)
        for loss, one in zip(got, expected, strict=True):
            check_loss(loss, one)


@on_ranks
def plans_made(group: ProcessGroup, batch: dict[str, Tensor]) -> list[int]:
    """How many plans a step makes, without and with ``PlanCollator``."""
    model, counts = parallel(group, layout="balanced"), []
    planned = seqpar.hf.PlanCollator(model, itemgetter(0))
    for collate in (itemgetter(0), planned):
        local = seqpar.hf.ShardCollator(collate, group=group, layout="balanced")([batch])
        with mock.patch.object(plan, "AttentionPlan", wraps=plan.AttentionPlan) as made:
            model(**local)
        counts.append(made.call_count)
    return counts


def test_a_planned_batch_is_not_planned_again(pool: Pool) -> None:
    assert pool.run(2, plans_made, packed(5)) == [[1, 0]] * 2


@on_ranks
def verified(group: ProcessGroup, batch: dict[str, Tensor]) -> str:
    return "; ".join(
        str(report_on(parallel(group, layout=x), batch)) for x in ("balanced", layout_of("assigned", LENGTH, 2))
    )


def test_verify(pool: Pool) -> None:
    for report in pool.run(2, verified, packed(6)):
        assert report.count("layout=") == 2 and "differ" not in report.replace("no differences", ""), report


@on_ranks
def refused(group: ProcessGroup) -> list[str]:
    batch, other = packed(7, 40), layout_of("assigned", 41, 2)
    empty = seqpar.Assigned([[range(40)], []])
    return [
        message_of(lambda: seqpar.hf.shard_batch(batch, group=group, layout=other, check=False)),
        message_of(lambda: seqpar.hf.shard_batch(batch, group=group, layout=empty, check=False)),
        message_of(lambda: seqpar.hf.parallelize(tiny("llama"), group=group, layout="balance")),
    ]


def test_layouts_that_do_not_fit(pool: Pool) -> None:
    for length, none, name in pool.run(2, refused):
        assert "the sequence has 40 tokens; make a layout for this length" in length
        assert "rows of 40 tokens cannot be sharded over 2 ranks with layout=Assigned" in none
        assert "layout='balance': did you mean 'balanced'" in name
