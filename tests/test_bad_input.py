"""Bad input raises TypeError or ValueError, before anything is sent, with words that name the argument, the value and
what to do; and when one rank's input is bad, or ranks disagree, all of them raise and none waits for ever."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Mask

from .pool import Pool
from .test_attention import STRATEGIES


def tensor(*shape: int, **kwargs: Any) -> Tensor:
    return torch.zeros(*(shape or (2, 8, 4, 16)), **kwargs)


def attend(q: Any = None, k: Any = None, v: Any = None, **kwargs: Any) -> Any:
    """A good call but for what is given."""
    q = tensor() if q is None else q
    k = tensor() if k is None else k
    return seqpar.attention(q, k, k if v is None else v, **{"strategy": "local", **kwargs})


Bad = tuple[Callable[[], Any], type[Exception], list[str]]

BAD: dict[str, Bad] = {
    # what is called, what it raises, what the message has to contain
    "heads": (lambda: attend(k=tensor(2, 8, 3, 16)), ValueError, ["heads=4", "kv_heads=3", "multiple"]),
    "more kv heads": (lambda: attend(k=tensor(2, 8, 8, 16)), ValueError, ["heads=4", "kv_heads=8", "multiple"]),
    "no heads": (lambda: attend(tensor(2, 8, 0, 16), tensor(2, 8, 0, 16)), ValueError, ["heads=0", "kv_heads=0"]),
    "head_dim": (lambda: attend(k=tensor(2, 8, 4, 8)), ValueError, ["head_dim", "16", "(2, 8, 4, 8)", "same"]),
    "no head_dim": (lambda: attend(tensor(2, 8, 4, 0), tensor(2, 8, 4, 0)), ValueError, ["head_dim=0", "at least 1"]),
    "v unlike k": (lambda: attend(v=tensor(2, 8, 4, 8)), ValueError, ["v", "(2, 8, 4, 8)", "k", "equal"]),
    "length": (lambda: attend(k=tensor(2, 9, 4, 16)), ValueError, ["length", "8", "9", "same"]),
    "batch": (lambda: attend(k=tensor(3, 8, 4, 16)), ValueError, ["batch", "2", "3", "same"]),
    "three dimensions": (
        lambda: attend(tensor(8, 4, 16)),
        ValueError,
        ["q", "(8, 4, 16)", "[batch, seq, heads, head_dim]"],
    ),
    "no tensor": (lambda: attend(k=[1.0]), TypeError, ["k", "list", "tensor [batch, seq, heads, head_dim]"]),
    "integers": (lambda: attend(tensor(dtype=torch.int64)), TypeError, ["q", "torch.int64", "float32"]),
    "complex": (lambda: attend(tensor(dtype=torch.complex64)), TypeError, ["q", "torch.complex64", "float32"]),
    "mixed dtypes": (
        lambda: attend(k=tensor(dtype=torch.bfloat16)),
        TypeError,
        ["k", "torch.bfloat16", "torch.float32", "convert"],
    ),
    "meta": (lambda: attend(tensor(device="meta")), ValueError, ["q", "meta", "move"]),
    "mixed devices": (lambda: attend(v=tensor(device="meta")), ValueError, ["v", "meta", "move"]),
    "strategy": (lambda: attend(strategy="rign"), ValueError, ["strategy", "'rign'", "did you mean 'ring'"]),
    "strategy of another house": (
        lambda: attend(strategy="ulises"),
        ValueError,
        ["'ulises'", "did you mean 'ulysses'"],
    ),
    "strategy's type": (lambda: attend(strategy=None), TypeError, ["strategy", "None", "ring"]),
    "layout": (lambda: attend(layout="zig_zag"), ValueError, ["layout", "'zig_zag'", "did you mean 'zigzag'"]),
    "backend": (
        lambda: attend(backend="referense"),
        ValueError,
        ["backend", "'referense'", "did you mean 'reference'"],
    ),
    "option": (
        lambda: attend(strategy="context_parallel", com="p2p"),
        TypeError,
        ["com", "'context_parallel'", "did you mean 'comm'"],
    ),
    "option of another strategy": (lambda: attend(strategy="ring", comm="p2p"), TypeError, ["comm", "'ring'", "none"]),
    "comm": (
        lambda: attend(strategy="context_parallel", comm="allgather"),
        ValueError,
        ["comm", "'allgather'", "did you mean 'all_gather'"],
    ),
    "ulysses_size with p2p": (
        lambda: attend(strategy="context_parallel", comm="p2p", ulysses_size=1),
        TypeError,
        ["ulysses_size", "p2p"],
    ),
    "ulysses_size": (
        lambda: attend(strategy="hybrid", ulysses_size=3),
        ValueError,
        ["ulysses_size=3", "divisor", "1"],
    ),
    "ulysses_size's type": (
        lambda: attend(strategy="hybrid", ulysses_size="2"),
        TypeError,
        ["ulysses_size='2'", "int"],
    ),
    "mask": (lambda: attend(mask="causal"), TypeError, ["mask", "str", "seqpar.Mask.causal()"]),
    "mask class": (lambda: attend(mask=Mask), TypeError, ["mask", "seqpar.Mask.causal()"]),
    "mask's rows": (
        lambda: attend(mask=Mask.documents([[0, 8], [0, 3], [0, 4]])),
        ValueError,
        ["mask", "3 batch rows", "2"],
    ),
    "group": (lambda: attend(strategy="ring", group=4), TypeError, ["group=4", "ProcessGroup"]),
    "mesh": (lambda: attend(strategy="ring", mesh=4), TypeError, ["mesh=4", "DeviceMesh", "init_mesh"]),
    "dropout of 1": (lambda: attend(dropout_p=1.0), ValueError, ["dropout_p=1", "[0, 1)"]),
    "negative dropout": (lambda: attend(dropout_p=-0.1), ValueError, ["dropout_p=-0.1", "[0, 1)"]),
    "dropout nan": (lambda: attend(dropout_p=float("nan")), ValueError, ["dropout_p=nan", "finite"]),
    "dropout's type": (lambda: attend(dropout_p="0.1"), TypeError, ["dropout_p='0.1'", "number"]),
    "dropout_seed": (lambda: attend(dropout_p=0.1, dropout_seed=-1), ValueError, ["dropout_seed=-1", "0"]),
    "dropout_seed too large": (
        lambda: attend(dropout_p=0.1, dropout_seed=2**63),
        ValueError,
        ["dropout_seed=9223372036854775808", "[0, 2**63)"],
    ),
    "softcap": (lambda: attend(softcap=-2.0), ValueError, ["softcap=-2.0", "positive", "0 for none"]),
    "softmax_scale": (lambda: attend(softmax_scale=float("inf")), ValueError, ["softmax_scale=inf", "finite"]),
    "sinks": (lambda: attend(sinks=tensor(3)), ValueError, ["sinks", "(3,)", "(4,)"]),
    "sinks' type": (lambda: attend(sinks=1.0), TypeError, ["sinks", "float", "[heads]"]),
    "alibi_slopes": (lambda: attend(alibi_slopes=tensor(3, 4)), ValueError, ["alibi_slopes", "(3, 4)", "(2, 4)"]),
    "seq_len": (lambda: attend(seq_len=9), ValueError, ["seq_len=9", "8", "shard"]),
    "seq_len's type": (lambda: attend(seq_len=8.0), TypeError, ["seq_len=8.0", "int"]),
    # masks
    "boundaries fall": (
        lambda: Mask.documents([0, 5, 3]),
        ValueError,
        ["cu_seqlens=[0, 5, 3]", "3 follows 5", "cumulative"],
    ),
    "boundaries start late": (lambda: Mask.documents([2, 5]), ValueError, ["cu_seqlens=[2, 5]", "first", "0"]),
    "no boundaries": (lambda: Mask.documents([]), ValueError, ["cu_seqlens=[]", "first", "0"]),
    "one bad row": (lambda: Mask.documents([[0, 5], [0, 4, 2]]), ValueError, ["cu_seqlens=[0, 4, 2]", "2 follows 4"]),
    "float boundaries": (lambda: Mask.documents([0, 2.5]), TypeError, ["cu_seqlens", "2.5", "int"]),
    "float tensor": (
        lambda: Mask.documents(torch.tensor([0.0, 4.0])),
        TypeError,
        ["cu_seqlens", "torch.float32", "integer"],
    ),
    "a string": (lambda: Mask.documents("0 5"), TypeError, ["cu_seqlens", "int", "str"]),
    "left window": (lambda: Mask.sliding_window(-2), ValueError, ["left=-2", "-1 for unlimited"]),
    "right window": (lambda: Mask.sliding_window(3, -5), ValueError, ["right=-5", "-1 for unlimited"]),
    "window's type": (lambda: Mask.sliding_window(3.0), TypeError, ["left=3.0", "int"]),  # type: ignore[arg-type]
    "prefix": (lambda: Mask.prefix_lm(-1), ValueError, ["prefix_len=[-1]", ">= 0"]),
    "chunk": (lambda: Mask.chunked(0), ValueError, ["size=0", "at least 1"]),
    "and": (lambda: Mask.causal() & 3, TypeError, ["unsupported operand"]),  # type: ignore[operator]
    # sharding
    "dim": (lambda: seqpar.shard(tensor(), dim=4), ValueError, ["dim=4", "(2, 8, 4, 16)"]),
    "dim's type": (lambda: seqpar.shard(tensor(), dim="seq"), TypeError, ["dim='seq'", "int"]),  # type: ignore[arg-type]
    "shard's layout": (
        lambda: seqpar.shard(tensor(), layout="stripes"),  # type: ignore[arg-type]
        ValueError,
        ["layout", "did you mean 'striped'"],
    ),
    "shard's strategy": (
        lambda: seqpar.shard(tensor(), strategy="tp-sp"),
        ValueError,
        ["strategy='tp-sp'", "did you mean 'tp_sp'"],
    ),
    "shard's tensor": (lambda: seqpar.shard([1, 2]), TypeError, ["x", "list"]),  # type: ignore[arg-type]
    "positions": (lambda: seqpar.positions(-1), ValueError, ["seq_len=-1"]),
    # meshes (this process alone)
    "mesh size": (lambda: seqpar.init_mesh(ring=0), ValueError, ["ring=0", "at least 1"]),
    "mesh product": (lambda: seqpar.init_mesh(ring=3, ulysses=2), ValueError, ["ring=3", "ulysses=2", "1"]),
    "two open sizes": (lambda: seqpar.init_mesh(ring=-1, dp=-1), ValueError, ["dp", "ring", "-1", "one"]),
    "mesh size's type": (lambda: seqpar.init_mesh(ring="2"), TypeError, ["ring='2'", "int"]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", BAD)
def test_the_message_says_what_to_do(what: str) -> None:
    call, kind, words = BAD[what]
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    assert raised.type is kind, raised.value
    message = str(raised.value)
    missing = [word for word in words if not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", message)]
    assert not missing, f"{message!r} lacks {missing}"


# ------------------------------------------------------------------------------------------------ on several ranks


def bad_on(bad_rank: int, rank: int) -> dict[str, tuple[dict[str, Any], str]]:
    """Arguments that are bad on one rank only, and a word that it then says."""

    def here(good: Any, bad: Any) -> Any:
        return bad if rank == bad_rank else good

    return {
        "head_dim": ({"k": tensor(2, 8, 4, here(16, 8))}, "head_dim"),
        "dimensions": ({"q": here(tensor(), tensor(8, 4, 16))}, "dimensions"),
        "heads": ({"k": tensor(2, 8, here(4, 3), 16)}, "multiple"),
        "dtype": ({"k": tensor(dtype=here(torch.float32, torch.float64))}, "convert"),
        "meta": ({"q": tensor(device=here("cpu", "meta"))}, "meta"),
        "type": ({"q": here(tensor(), "q")}, "tensor"),
        "sinks": ({"sinks": tensor(here(4, 5))}, "sinks"),
        "mask": ({"mask": here(Mask.full(), Mask.documents([[0, 8]] * 3))}, "batch rows"),
        "mask's type": ({"mask": here(Mask.full(), "full")}, "seqpar.Mask"),
        "strategy": (here({}, {"strategy": "rign"}), "'ring'"),
        "option": (here({}, {"window": 4}), "window"),
        "layout": (here({}, {"layout": "zig"}), "'zigzag'"),
        "backend": (here({}, {"backend": "cuda"}), "backend='cuda'"),
        "dropout_p": ({"dropout_p": here(0.1, 1.5)}, "[0, 1)"),
        "softcap": ({"softcap": here(1.0, -1.0)}, "softcap=-1.0"),
        "softmax_scale": ({"softmax_scale": here(1.0, float("nan"))}, "finite"),
        "dropout_seed": ({"dropout_p": 0.1, "dropout_seed": here(3, -3)}, "dropout_seed=-3"),
        "seq_len": ({"seq_len": here(None, -32)}, "seq_len=-32"),
        "local": (here({}, {"strategy": "local"}), "'local'"),
    }


def one_bad_rank(group: ProcessGroup, strategy: str) -> dict[str, str]:
    """What this rank says to each bad call; after each, a good call has to work."""
    said = {}
    for what, (arguments, _) in bad_on(1, group.rank()).items():
        said[what] = "nothing"
        try:
            attend(group=group, **{**STRATEGIES[strategy], **arguments})
        except (TypeError, ValueError, RuntimeError) as error:
            said[what] = f"{type(error).__name__}: {error}"
        assert not attend(group=group, **STRATEGIES[strategy]).any()
    return said


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_bad_rank_makes_all_raise(pool: Pool, strategy: str) -> None:
    by_rank = pool.run(4, one_bad_rank, strategy, deadline_s=30)
    for what, (_, word) in bad_on(1, 1).items():
        assert word in by_rank[1][what], f"{what}: {by_rank[1][what]}"
        assert by_rank[1][what].startswith(("ValueError", "TypeError"))
        for rank in (0, 2, 3):
            assert by_rank[rank][what].startswith("RuntimeError"), f"{what}, rank {rank}: {by_rank[rank][what]}"
            assert "[1]" in by_rank[rank][what]


DISAGREEMENTS: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "batch": (lambda rank: dict.fromkeys("qk", tensor(2 + (rank == 2), 8, 4, 16)), "batch"),
    "heads": (lambda rank: {"q": tensor(2, 8, 8 if rank == 2 else 4, 16)}, "heads"),
    "kv_heads": (lambda rank: {"k": tensor(2, 8, 2 if rank == 2 else 4, 16)}, "kv_heads"),
    "head_dim": (lambda rank: dict.fromkeys("qk", tensor(2, 8, 4, 8 * (1 + (rank == 2)))), "head_dim"),
    "dtype": (
        lambda rank: dict.fromkeys("qk", tensor(dtype=torch.bfloat16 if rank == 2 else torch.float32)),
        "torch.bfloat16",
    ),
    "length": (lambda rank: dict.fromkeys("qk", tensor(2, 8 + 3 * (rank == 2), 4, 16)), "shard"),
    "mask": (lambda rank: {"mask": Mask.full() if rank == 2 else Mask.causal()}, "mask"),
    "layout": (lambda rank: {"layout": "zigzag" if rank == 2 else "striped"}, "options"),
    "scale": (lambda rank: {"softmax_scale": 0.5 + (rank == 2)}, "options"),
    "softcap": (lambda rank: {"softcap": 3.0 * (rank == 2)}, "options"),
    "dropout_p": (lambda rank: {"dropout_p": 0.1 + 0.1 * (rank == 2)}, "options"),
    "dropout_seed": (lambda rank: {"dropout_p": 0.1, "dropout_seed": rank}, "dropout_seed"),
    "return_lse": (lambda rank: {"return_lse": rank == 2}, "options"),
}


def odd_one_out(group: ProcessGroup) -> dict[str, list[str]]:
    """What this rank says where rank 1's input is bad, and where it only differs, beside the attention function."""
    odd = group.rank() == 1
    x, ids = torch.zeros(2, 4, 16), torch.zeros(2, 4, dtype=torch.int64)
    ring, tp_sp = (seqpar.ParallelAttention(s, 16, 4, group=group) for s in ("ring", "tp_sp"))
    mlp, head = seqpar.MegatronMLP(16, 32, group=group), seqpar.VocabParallelHead(16, 11, group=group)
    whole = [t.detach() for t in (head(x), head(x)[..., :-1], head(x)[:, :-1], head(x).double())]
    calls: dict[str, Callable[[], Any]] = {}
    for name, layer in (("ring", ring), ("tp_sp", tp_sp), ("mlp", mlp), ("head", head)):
        calls[f"bad: {name}, dtype"] = partial(layer, x.half() if odd else x)
        calls[f"bad: {name}, integers"] = partial(layer, x.int() if odd else x)
        calls[f"bad: {name}, width"] = partial(layer, x[..., 1:] if odd else x)
        calls[f"bad: {name}, type"] = partial(layer, None if odd else x)
    calls["bad: layer, seq_len"] = lambda: ring(x, seq_len=4.5 if odd else None)
    loss: Any = partial(seqpar.vocab_parallel_cross_entropy, num_embeddings=11, group=group)
    calls["bad: logits, width"] = lambda: loss(whole[odd], ids)
    calls["bad: logits, type"] = lambda: loss(None if odd else whole[0], ids)
    calls["bad: labels"] = lambda: loss(whole[0], ids + 50 * odd)
    calls["differ: logits, tokens"] = lambda: loss(whole[2 * odd], ids)
    calls["differ: logits, dtype"] = lambda: loss(whole[3 * odd], ids)
    unshard = partial(seqpar.unshard, group=group)
    calls["differ: unshard, layout"] = lambda: unshard(x, layout="zigzag" if odd else "striped")
    calls["differ: unshard, dim"] = lambda: unshard(x[:, :2], dim=int(odd))
    calls["differ: unshard, dtype"] = lambda: unshard(x.int() if odd else x)
    said: dict[str, list[str]] = {}
    for what, call in calls.items():
        said[what] = ["nothing", ""]
        try:
            call()
        except (TypeError, ValueError, RuntimeError) as error:
            said[what] = [type(error).__name__, str(error)]
        assert not attend(strategy="ring", group=group).any()
    return said


def test_layers_and_losses_raise_on_all_ranks(pool: Pool) -> None:
    by_rank = pool.run(3, odd_one_out, deadline_s=30)
    for rank, said in enumerate(by_rank):
        for what, (kind, words) in said.items():
            if what.startswith("bad") and rank != 1:
                assert kind == "RuntimeError" and "[1]" in words, f"{what}, rank {rank}: {kind}: {words}"
            else:
                assert kind in ("ValueError", "TypeError"), f"{what}, rank {rank}: {kind}: {words}"


def disagree(group: ProcessGroup, strategy: str) -> dict[str, str]:
    said = {}
    for what, (make, _) in DISAGREEMENTS.items():
        said[what] = "nothing"
        try:
            attend(group=group, **{**STRATEGIES[strategy], **make(group.rank())})
        except ValueError as error:
            said[what] = str(error)
        assert not attend(group=group, **STRATEGIES[strategy]).any()
    return said


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "hybrid"])
def test_ranks_that_disagree_all_raise(pool: Pool, strategy: str) -> None:
    for rank, said in enumerate(pool.run(4, disagree, strategy, deadline_s=30)):
        for what, (_, word) in DISAGREEMENTS.items():
            assert word in said[what], f"{what}, rank {rank}: {said[what]}"


def on_groups(group: ProcessGroup) -> dict[str, str]:
    """What concerns groups themselves: every rank raises by itself, without a word to the others."""
    mesh = seqpar.init_mesh(ring=2, ulysses=4, device_type="cpu")
    plain = torch.distributed.init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
    calls: dict[str, Callable[[], Any]] = {
        "local": lambda: attend(group=group),
        "both": lambda: attend(strategy="ring", group=group, mesh=mesh),
        "names": lambda: attend(strategy="ring", mesh=plain),
        "divide": lambda: attend(strategy="hybrid", group=group, ulysses_size=3),
        "product": lambda: seqpar.init_mesh(ring=3, ulysses=2),
        "open": lambda: seqpar.init_mesh(ring=3, dp=-1),
    }
    said = {}
    for what, call in calls.items():
        said[what] = "nothing"
        try:
            call()
        except ValueError as error:
            said[what] = str(error)
    return said


def test_groups_that_do_not_fit(pool: Pool) -> None:
    words = {
        "local": ["'local'", "8 ranks", "ring"],
        "both": ["mesh and group", "one of them"],
        "names": ["('a', 'b')", "'ring'", "'ulysses'"],
        "divide": ["ulysses_size=3", "8 ranks", "1, 2, 4, 8"],
        "product": ["ring=3", "ulysses=2", "8"],
        "open": ["ring=3", "dp=-1", "8"],
    }
    for said in pool.run(8, on_groups):
        for what, needed in words.items():
            assert all(word in said[what] for word in needed), f"{what}: {said[what]}"
