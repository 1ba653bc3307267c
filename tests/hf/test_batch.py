"""Sharding batches: labels, positions, padding and documents; loaders, collators, and the errors they raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, DistributedSampler

pytest.importorskip("transformers")

import seqpar
import seqpar.hf
from seqpar.hf.batch import BatchCut, documents_from_positions, shard_for_rank, token_ranges
from seqpar.placement.layout import Layout, shard_positions

from ..pool import Pool, on_ranks
from .workers import make_batch

pytestmark = pytest.mark.slow


def unsharded(name: str, batch: dict[str, Any], ranks: int, layout: Layout, **options: Any) -> Tensor:
    """One tensor of the full batch, unsharded from the parts of all ranks."""
    parts = [shard_for_rank(batch, BatchCut(ranks, layout), rank, **options)[name] for rank in range(ranks)]
    order = torch.cat([shard_positions(batch["input_ids"].shape[1], ranks, r, layout) for r in range(ranks)])
    return torch.cat(parts, 1)[:, order.argsort()]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_parts_of_a_batch(ranks: int, layout: Layout) -> None:
    batch = make_batch("plain", 23)
    batch["token_type_ids"] = torch.arange(46).view(2, 23)
    batch["extra"] = torch.ones(3)
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    assert torch.equal(unsharded("input_ids", batch, ranks, layout), batch["input_ids"])
    assert torch.equal(unsharded("token_type_ids", batch, ranks, layout), batch["token_type_ids"])
    assert torch.equal(unsharded("labels", batch, ranks, layout), shifted)
    assert torch.equal(unsharded("labels", batch, ranks, layout, shift_labels=False), batch["labels"])
    assert torch.equal(unsharded("position_ids", batch, ranks, layout), torch.arange(23).expand(2, -1))
    local = shard_for_rank(batch, BatchCut(ranks, layout), 0)
    assert torch.equal(local["extra"], batch["extra"])
    assert local["seqpar"].num_items == int((shifted != -100).sum())
    given = {"input_ids": batch["input_ids"], "shift_labels": batch["labels"]}
    assert torch.equal(unsharded("labels", given, ranks, layout), batch["labels"])


def test_documents_from_positions_and_boundaries() -> None:
    batch = make_batch("packed", 40)
    from_positions = shard_for_rank(batch, BatchCut(1, "zigzag"), 0)
    assert from_positions["seqpar"].mask == seqpar.Mask.documents([0, 11, 12, 31, 40], causal=False)
    edges = torch.tensor([0, 11, 12, 31, 40], dtype=torch.int32)
    flash = {
        "input_ids": batch["input_ids"],
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": 19,
        "max_length_k": 19,
        "seq_idx": torch.bucketize(torch.arange(40), edges[1:-1], right=True)[None],
    }
    from_boundaries = shard_for_rank(flash, BatchCut(1, "zigzag"), 0)
    assert from_boundaries["seqpar"].mask == from_positions["seqpar"].mask
    assert torch.equal(from_boundaries["position_ids"], batch["position_ids"])
    assert set(from_boundaries) == {"input_ids", "position_ids", "seqpar"}
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seq_lens"):
        alone = shard_for_rank(
            {"input_ids": batch["input_ids"], name: edges, "cu_seqlens": None}, BatchCut(1, "zigzag"), 0
        )
        assert alone["seqpar"].mask == from_positions["seqpar"].mask
    open_end = shard_for_rank({"input_ids": batch["input_ids"], "cu_seqlens": [0, 11, 31]}, BatchCut(1, "zigzag"), 0)
    lo, hi = open_end["seqpar"].mask.intervals(torch.arange(40))
    assert torch.equal(hi[31:], lo[31:])  # past the last boundary there is padding
    for shard in (from_positions, from_boundaries, open_end):
        shard["seqpar"].mask.check_length(40)


IDX = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2]])
RESTARTS = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seq_idx": IDX}, "seq_idx: in row 0 it starts a document at token 3, but"),
        ({"seq_idx": IDX, "position_ids": RESTARTS}, None),
        ({"seq_idx": IDX, "cu_seq_lens_q": [0, 3, 4, 8]}, None),
        ({"seq_idx": IDX[:, [0] * 3 + [3] * 5], "position_ids": RESTARTS}, "it continues a document at token 4"),
        ({"seq_idx": IDX, "cu_seq_lens": [0, 3, 4]}, None),
        ({"seq_idx": 0 * IDX}, None),
        ({"seq_idx": IDX, "attention_mask": (IDX == 2).long()}, None),  # the changes are padding
        ({"seq_idx": IDX[:, 1:]}, r"seq_idx: shape \(1, 7\); expected \(2, 8\)"),
        (
            {"cu_seq_lens_q": [0, 3, 8], "cu_seq_lens_k": [0, 4, 8]},
            "cu_seq_lens_k: its documents are not cu_seq_lens_q's",
        ),
    ],
)
def test_arguments_that_carry_documents(given: dict[str, Any], message: str | None) -> None:
    given = {name: x.expand(2, -1) if name == "attention_mask" else x for name, x in given.items()}
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.int64), **given}
    if message is None:
        local = shard_for_rank(batch, BatchCut(1, "zigzag"), 0)
        assert set(local) == {"input_ids", "position_ids", "seqpar"}
    else:
        with pytest.raises(ValueError, match=message):
            shard_for_rank(batch, BatchCut(1, "zigzag"), 0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str) -> None:
    batch = make_batch(side, 30)
    real = batch["attention_mask"].bool()
    mask = (shard_for_rank(batch, BatchCut(1, "zigzag"), 0)["seqpar"].mask & seqpar.Mask.causal()).dense(30)
    causal = torch.ones(30, 30, dtype=torch.bool).tril()
    assert torch.equal(mask, real[:, :, None] & real[:, None, :] & causal)
    windowed = (shard_for_rank(batch, BatchCut(1, "zigzag"), 0)["seqpar"].mask & seqpar.Mask.sliding_window(4)).dense(
        30
    )
    assert torch.equal(windowed, mask & causal.triu(-4))
    parts = [shard_for_rank(batch, BatchCut(4, "striped"), rank) for rank in range(4)]
    valid = torch.stack([part["seqpar"].valid[:, :7] for part in parts], 2).flatten(1)
    assert torch.equal(valid, real[:, :28])


def test_padded_documents() -> None:
    ids = torch.tensor(
        [[0, 0, 0, 1, 2, 0, 1, 1], [0, 1, 0, 1, 2, 3, 0, 0]]
    )  # with the ids that transformers gives padding
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 0, 0]])
    assert documents_from_positions(ids, token_ranges(mask)) == [(0, 5, 8), (0, 2, 8)]
    batch = {"input_ids": ids, "position_ids": ids, "attention_mask": mask}
    dense = shard_for_rank(batch, BatchCut(1, "zigzag"), 0)["seqpar"].mask.dense(8)
    expected = torch.zeros(2, 8, 8, dtype=torch.bool)
    for row, a, b in ((0, 2, 5), (0, 5, 7), (1, 0, 2), (1, 2, 6)):
        expected[row, a:b, a:b] = True
    assert torch.equal(dense, expected)


@pytest.mark.parametrize(
    ("ids", "boundaries"),
    [
        ([0, 1, 2, 0, 0, 1, 0, 1, 2], (0, 3, 4, 6, 9)),  # a document of one token
        ([1, 2, 1, 1, 2, 3, 4, 5, 6], (0, 2, 3, 9)),  # counted from 1
        ([5, 6, 7, 5, 6, 3, 4, 5, 6], (0, 3, 5, 9)),
        ([0, 1, 2, 50, 51, 52, 90, 91, 92], None),  # jumps (PoSE)
        ([0, 1, 2, 50, 51, 0, 30, 31, 32], (0, 5, 9)),
        ([0, 0, 0, 1, 1, 1, 2, 2, 2], None),  # repeats (self-extend)
        ([0, 1, 2, 3, 4, 4, 5, 5, 6], None),
    ],
)
def test_documents_start_where_ids_restart(ids: list[int], boundaries: tuple[int, ...] | None) -> None:
    found = documents_from_positions(torch.tensor([ids]), None)
    assert found == (None if boundaries is None else [boundaries])


def test_mask_of_equal_rows() -> None:
    batch = {"input_ids": torch.ones(4, 12, dtype=torch.long), "attention_mask": torch.ones(4, 12)}
    batch["attention_mask"][:, 9:] = 0
    assert shard_for_rank(batch, BatchCut(1, "zigzag"), 0)["seqpar"].mask.batch == 1
    batch["attention_mask"][1, 7:] = 0
    assert shard_for_rank(batch, BatchCut(1, "zigzag"), 0)["seqpar"].mask.batch == 4
    assert (
        shard_for_rank({"input_ids": batch["input_ids"]}, BatchCut(1, "zigzag"), 0)["seqpar"].mask == seqpar.Mask.full()
    )


@on_ranks
def scattered(group: ProcessGroup, layout: Layout) -> None:
    for how in ("left", "packed"):
        batch = make_batch(how, 33)
        ours: Any = batch if group.rank() == 0 else None
        got = seqpar.hf.shard_batch(ours, group=group, layout=layout)
        expected = seqpar.hf.shard_batch(batch, group=group, layout=layout)
        assert got.keys() == expected.keys()
        a, b = got.pop("seqpar"), expected.pop("seqpar")
        for name in got:
            assert torch.equal(got[name], expected[name])
        assert (a.tokens, a.mask, a.num_items) == (b.tokens, b.mask, b.num_items)
        assert (a.valid is None and b.valid is None) or torch.equal(a.valid, b.valid)
        assert torch.equal(a.in_place[0], b.in_place[0]) and a.in_place[1] == b.in_place[1]


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_scatter_from_the_first_rank(pool: Pool, layout: str) -> None:
    pool.run(3, scattered, layout)


def examples(count: int) -> Any:
    return [{"input_ids": torch.arange(8) + 100 * i, "labels": torch.arange(8) + 100 * i} for i in range(count)]


@on_ranks
def loaded(group: ProcessGroup, scatter: bool) -> list[int]:
    """The first number of each example that this rank received."""
    mesh = seqpar.init_mesh(2, 2, 2, 1, device_type="cpu")
    data, dp_rank = examples(9), mesh["dp"].get_local_rank()
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=dp_rank, shuffle=False, drop_last=True)
    sharded = seqpar.hf.ShardedLoader(DataLoader(data, batch_size=1, sampler=sampler), mesh=mesh, scatter=scatter)
    assert len(sharded) == 4
    return [int(batch["input_ids"][0, 0]) // 100 for batch in sharded]


@pytest.mark.parametrize("scatter", [False, True])
def test_loader(pool: Pool, scatter: bool) -> None:
    assert pool.run(8, loaded, scatter) == [[0, 2, 4, 6]] * 4 + [[1, 3, 5, 7]] * 4


def test_loader_in_one_process() -> None:
    loader = seqpar.hf.ShardedLoader(DataLoader(examples(3), batch_size=2))
    assert [tuple(batch["input_ids"].shape) for batch in loader] == [(2, 8), (1, 8)]
    assert len(loader) == 2


@on_ranks
def collated(group: ProcessGroup, workers: int) -> list[Tensor]:
    collator = seqpar.hf.ShardCollator(group=group, layout="striped")
    loader = DataLoader(examples(4), batch_size=2, collate_fn=collator, num_workers=workers)
    return [batch["input_ids"] for batch in loader]


def test_collator(pool: Pool) -> None:
    first, second = pool.run(2, collated, 0)
    assert torch.equal(torch.stack([first[1], second[1]], 2).flatten(1)[0], torch.arange(8) + 200)


def test_collator_in_a_worker_process() -> None:
    collator = seqpar.hf.ShardCollator()
    loader = DataLoader(examples(4), batch_size=2, collate_fn=collator, num_workers=1, multiprocessing_context="fork")
    assert [batch["seqpar"].num_items for batch in loader] == [14, 14]


@on_ranks
def shard_with_a_sharding(group: ProcessGroup) -> str:
    """This rank's part for a given sharding, and the error that a sharding of another length raises."""
    batch = make_batch("packed", 33)
    sharding = seqpar.Sharding(33, "striped", group=group)
    got = seqpar.hf.shard_batch(batch, sharding=sharding)
    expected = seqpar.hf.shard_batch(batch, group=group, layout="striped")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got if name != "seqpar")
    assert got["seqpar"].tokens.layout == "striped" and got["seqpar"].seq_len == 33
    with pytest.raises(ValueError, match="layout='zigzag': the sharding has layout='striped'"):
        seqpar.hf.shard_batch(batch, sharding=sharding, layout="zigzag")
    other = make_batch("packed", 34) if group.rank() == 1 else batch
    try:
        seqpar.hf.shard_batch(other, sharding=sharding)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_shard_batch_with_a_sharding(pool: Pool) -> None:
    messages = pool.run(3, shard_with_a_sharding)
    assert messages[1].startswith("ValueError: batch: its rows have 34 tokens, but the sharding is of seq_len=33")
    assert all(messages[rank].startswith("RuntimeError: rank(s) [1]") for rank in (0, 2))


def test_micro_batches_of_a_pipeline() -> None:
    """torch's schedules split the shard with the tensors. Each micro-batch has the mask and labels of its rows."""
    local = shard_for_rank(make_batch("right", 30, rows=4), BatchCut(2, "zigzag"), 1)
    shard = local["seqpar"]
    parts = split_args_kwargs_into_chunks((), {"seqpar": shard, "position_ids": local["position_ids"]}, 2)[1]
    for i, part in enumerate(kwargs["seqpar"] for kwargs in parts):
        rows = slice(2 * i, 2 * i + 2)
        assert torch.equal(part.mask.dense(30), shard.mask.dense(30)[rows]) and part.mask.batch == 2
        assert torch.equal(part.valid, shard.valid[rows])
        assert torch.equal(part.in_place[0], shard.in_place[0][rows])
        assert (part.num_items, part.in_place[1]) == (shard.num_items, shard.in_place[1])
    assert tree_map(lambda x: x, shard) is shard


# For each fault: this rank's batch, and what the error says on every rank.
FAULTS: dict[str, tuple[Callable[[int], Any], str]] = {
    "different": (lambda rank: make_batch("plain", 12, seed=rank), "passed different batches"),
    "one lacks": (
        lambda rank: None if rank == 1 else make_batch("plain", 12),
        r"ranks \[0, 2\] of the sequence group's 3 passed a batch",
    ),
    "one bad": (
        lambda rank: {} if rank == 2 else make_batch("plain", 12),
        r"rank\(s\) \[2\] of the group raised an error on their own input|expected 'input_ids'",
    ),
}


@on_ranks
def with_faults(group: ProcessGroup) -> None:
    for batch, words in FAULTS.values():
        with pytest.raises((ValueError, RuntimeError), match=words):
            seqpar.hf.shard_batch(batch(group.rank()), group=group)


def test_refused_batches_that_differ(pool: Pool) -> None:
    pool.run(3, with_faults)
