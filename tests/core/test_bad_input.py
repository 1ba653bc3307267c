"""Bad input raises a TypeError or ValueError before anything is sent, and the message says what to do.

A message names the argument, its value and what is expected. If the input of one rank is bad, or the ranks have
different input, every rank raises an error and none hangs.
"""

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

from ..cases import Batch
from ..observe import message_of
from ..pool import Pool, mesh_of, on_ranks
from ..strategy_cases import DISTINCT, STRATEGIES


def tensor(*shape: int, **kwargs: Any) -> Tensor:
    return torch.zeros(*(shape or (2, 8, 4, 16)), **kwargs)


def attend(q: Any = None, k: Any = None, v: Any = None, **kwargs: Any) -> Any:
    """A valid call, except for the given arguments."""
    q = tensor() if q is None else q
    k = tensor() if k is None else k
    return seqpar.attention(q, k, k if v is None else v, **{"strategy": "local", "layout": "contiguous", **kwargs})


TOO_LARGE = 2**70


def nested(*lengths: int) -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(length, 4, 16) for length in lengths], layout=torch.jagged)


Bad = tuple[Callable[[], Any], type[Exception], list[str]]

# Name -> the call, the exception, and words that its message contains.
BAD: dict[str, Bad] = {
    "heads": (lambda: attend(k=tensor(2, 8, 3, 16)), ValueError, ["heads=4", "kv_heads=3", "multiple"]),
    "more kv heads": (lambda: attend(k=tensor(2, 8, 8, 16)), ValueError, ["heads=4", "kv_heads=8", "multiple"]),
    "no heads": (lambda: attend(tensor(2, 8, 0, 16), tensor(2, 8, 0, 16)), ValueError, ["heads=0", "kv_heads=0"]),
    "head_dim": (lambda: attend(k=tensor(2, 8, 4, 8)), ValueError, ["head_dim", "16", "(2, 8, 4, 8)", "same"]),
    "no head_dim": (lambda: attend(tensor(2, 8, 4, 0), tensor(2, 8, 4, 0)), ValueError, ["head_dim=0", "at least 1"]),
    "v unlike k": (lambda: attend(v=tensor(2, 8, 2, 16)), ValueError, ["v", "(2, 8, 2, 16)", "k's", "last dimension"]),
    "no v_head_dim": (lambda: attend(v=tensor(2, 8, 4, 0)), ValueError, ["v_head_dim=0", "at least 1"]),
    "length": (lambda: attend(k=tensor(2, 9, 4, 16)), ValueError, ["length", "8", "9", "same"]),
    "heads first": (lambda: attend(tensor(2, 4, 8, 16), tensor(2, 2, 8, 16)), ValueError, ["length", "transpose"]),
    "heads first, a sharding": (
        lambda: attend(
            strategy="ring", sharding=seqpar.Sharding(8, "contiguous"), q=tensor(2, 4, 8, 16), k=tensor(2, 4, 8, 16)
        ),
        ValueError,
        ["4 tokens", "8", "transpose"],
    ),
    "heads first, a length": (
        lambda: attend(tensor(2, 4, 8, 16), tensor(2, 4, 8, 16), seq_len=8),
        ValueError,
        ["8", "transpose"],
    ),
    "heads first, many": (lambda: attend(*[tensor(1, 4, 2048, 2)] * 2), ValueError, ["2048 heads", "transpose"]),
    "tp_sp": (lambda: attend(strategy="tp_sp"), ValueError, ["'tp_sp'", "layer", "seqpar.ParallelAttention"]),
    "scale": (lambda: attend(strategy="ring", scale=0.1), TypeError, ["scale", "softmax_scale"]),
    "enable_gqa": (lambda: attend(enable_gqa=True), TypeError, ["enable_gqa", "leave it out"]),
    "dropout": (lambda: attend(dropout=0.1), TypeError, ["dropout", "dropout_p"]),
    "flattened losses": (
        lambda: seqpar.token_loss(tensor(8), torch.zeros(8, dtype=torch.int64)),
        ValueError,
        ["(8,)", "logits.mT"],
    ),
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
    "strategy, misspelled": (
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
    "option of another strategy": (
        lambda: attend(strategy="ring", comm="p2p"),
        TypeError,
        ["comm", "'ring'", "the strategy has no options"],
    ),
    **{
        f"{name} for {meant}": (partial(function, *args, **{name: 0.1}), TypeError, [name, f"did you mean {meant!r}"])
        for function, args, name, meant in (
            (seqpar.ring_attention, [tensor()] * 3, "softmax_scal", "softmax_scale"),
            (seqpar.hybrid_attention, [tensor()] * 3, "sink", "sinks"),
            (seqpar.hybrid_attention, [tensor()] * 3, "ulyses_size", "ulysses_size"),
            (seqpar.RingAttention, [8, 2], "softcp", "softcap"),
            (seqpar.ParallelAttention, ["ulysses", 8, 2], "head_dims", "head_dim"),
            (seqpar.ParallelAttention, ["context_parallel", 8, 2], "gathr", "gather"),
            (seqpar.ParallelAttention, ["context_parallel", 8, 2], "backends", "backend"),
            (seqpar.ParallelAttention, ["tp_sp", 8, 2], "overlp", "overlap"),
        )
    },
    "comm": (
        lambda: attend(strategy="context_parallel", comm="allgather"),
        ValueError,
        ["comm", "'allgather'", "did you mean 'all_gather'"],
    ),
    "chunks": (lambda: attend(strategy="context_parallel", chunks=0), ValueError, ["chunks=0", "1"]),
    "chunks with p2p": (
        lambda: attend(strategy="context_parallel", comm="p2p", chunks=2),
        TypeError,
        ["chunks=2", "p2p"],
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
    "blocks beyond the sequence": (
        lambda: attend(mask=Mask.causal([(0, 2), (5, 9)])),
        ValueError,
        ["causal blocks", "(5, 9)", "8 tokens"],
    ),
    "blocks of a row beyond the sequence": (
        lambda: attend(mask=Mask.causal([[(0, 2)], [(5, 9)]])),
        ValueError,
        ["batch row 1", "(5, 9)", "8 tokens"],
    ),
    "learned slopes": (
        lambda: attend(alibi_slopes=tensor(4, requires_grad=True)),
        ValueError,
        ["alibi_slopes", "gradient", "detach()"],
    ),
    "NaN sinks": (lambda: attend(sinks=tensor(4).fill_(torch.nan)), ValueError, ["sinks", "nan", "-inf"]),
    "infinite sinks": (lambda: attend(sinks=tensor(4).fill_(torch.inf)), ValueError, ["sinks", "inf", "finite"]),
    "NaN slopes": (lambda: attend(alibi_slopes=tensor(4).fill_(torch.nan)), ValueError, ["alibi_slopes", "nan"]),
    "infinite slopes": (
        lambda: attend(alibi_slopes=tensor(4).fill_(-torch.inf)),
        ValueError,
        ["alibi_slopes", "-inf", "finite"],
    ),
    "too small": (
        lambda: seqpar.token_loss(tensor(2, 8), torch.zeros(2, 8, dtype=torch.int64), ignore_index=-(2**70)),
        ValueError,
        [f"ignore_index={-(2**70)}", "more than -2**61"],
    ),
    "a long timeout": (
        lambda: seqpar.init_mesh(timeout=2.0**70),
        ValueError,
        ["timeout=1.1805916207174113e+21", f"at most {2**31} seconds"],
    ),
    "label smoothing": (
        lambda: seqpar.vocab_parallel_cross_entropy(
            tensor(1, 2, 8), torch.zeros(1, 2, dtype=torch.int64), 8, label_smoothing=1.1
        ),
        ValueError,
        ["label_smoothing=1.1", "from 0 to 1"],
    ),
    "label smoothing of the head": (
        lambda: seqpar.VocabParallelHead(8, 8)(
            tensor(1, 2, 8), torch.zeros(1, 2, dtype=torch.int64), label_smoothing="0.1"
        ),
        TypeError,
        ["label_smoothing='0.1'", "a number, got str"],
    ),
    **{
        f"too large, {i}": (call, ValueError, [f"{TOO_LARGE}", "less than 2**61"])
        for i, call in enumerate(
            [
                lambda: seqpar.Sharding(TOO_LARGE),
                lambda: attend(seq_len=TOO_LARGE),
                lambda: seqpar.positions(TOO_LARGE),
                lambda: Mask.sliding_window(TOO_LARGE),
                lambda: Mask.causal(window=TOO_LARGE),
                lambda: Mask.prefix_lm(TOO_LARGE),
                lambda: Mask.chunked(TOO_LARGE),
                lambda: Mask.padding(TOO_LARGE),
                lambda: Mask.documents([0, TOO_LARGE]),
                lambda: Mask.causal([(0, TOO_LARGE)]),
                lambda: seqpar.MegatronMLP(8, TOO_LARGE),
                lambda: seqpar.ParallelAttention("ring", TOO_LARGE, 2),
            ]
        )
    },
    "nested": (lambda: attend(*[nested(8, 6)] * 2), TypeError, ["q", "nested tensor", "Mask.documents(cu_seqlens)"]),
    "sparse": (lambda: attend(tensor().to_sparse()), TypeError, ["q", "torch.sparse_coo", "q.to_dense()"]),
    "sparse keys": (lambda: attend(k=tensor().to_sparse()), TypeError, ["k", "k.to_dense()"]),
    "a nested shard": (lambda: seqpar.shard(nested(8, 6)), TypeError, ["x", "nested tensor"]),
    "sparse hidden states": (
        lambda: seqpar.RingAttention(8, 2)(tensor(1, 4, 8).to_sparse()),
        TypeError,
        ["x_local", "x_local.to_dense()"],
    ),
    "vmap": (lambda: torch.vmap(attend)(tensor(3, 2, 8, 4, 16)), TypeError, ["q", "torch.func", "backward"]),
    "torch.func.grad": (
        lambda: torch.func.grad(lambda q: attend(q).sum())(tensor()),
        TypeError,
        ["q", "torch.func", "backward"],
    ),
    "vmap of a layer": (
        lambda: torch.vmap(seqpar.RingAttention(8, 2))(tensor(3, 1, 4, 8)),
        TypeError,
        ["x_local", "torch.func"],
    ),
    "vmap of a shard": (lambda: torch.vmap(seqpar.shard)(tensor(3, 1, 4)), TypeError, ["x", "torch.func"]),
    "sdpa with other keys": (
        lambda: seqpar.sdpa(tensor(1, 2, 8, 4), *[tensor(1, 2, 5, 4)] * 2, sharding=seqpar.Sharding(8)),
        ValueError,
        ["8 queries", "5 keys", "F.scaled_dot_product_attention", "cross-attention"],
    ),
    "whole_keys": (
        lambda: seqpar.replace_sdpa(seqpar.Sharding(8), whole_keys=77),
        TypeError,
        ["whole_keys=77", "[77]"],
    ),
    "mask's rows": (
        lambda: attend(mask=Mask.documents([[0, 8], [0, 3], [0, 4]])),
        ValueError,
        ["mask", "3 batch rows", "2", "micro-batch of a pipeline"],
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
        ["dropout_seed=9223372036854775808", "less than 2**63"],
    ),
    "deterministic": (
        lambda: attend(deterministic="always"),
        TypeError,
        ["deterministic='always'", "True, False or 'invariant'"],
    ),
    "return_lse": (lambda: attend(return_lse=1), TypeError, ["return_lse=1", "True or False"]),
    "an argument of another package": (
        lambda: attend(causal=True),
        TypeError,
        ["causal", "mask=seqpar.Mask.causal()", "mask=seqpar.Mask.full()"],
    ),
    "a mask to plan": (
        lambda: seqpar.mask_planner(seqpar.Sharding(8), "local")("causal"),
        TypeError,
        ["mask=str", "seqpar.Mask"],
    ),
    "softcap": (lambda: attend(softcap=-2.0), ValueError, ["softcap=-2.0", "positive", "0 for none"]),
    "softmax_scale": (lambda: attend(softmax_scale=float("inf")), ValueError, ["softmax_scale=inf", "finite"]),
    "sinks": (lambda: attend(sinks=tensor(3)), ValueError, ["sinks", "(3,)", "(4,)"]),
    "sinks' type": (lambda: attend(sinks=1.0), TypeError, ["sinks", "float", "[heads]"]),
    "alibi_slopes": (lambda: attend(alibi_slopes=tensor(3, 4)), ValueError, ["alibi_slopes", "(3, 4)", "(2, 4)"]),
    "seq_len": (lambda: attend(seq_len=9), ValueError, ["seq_len=9", "8", "shard"]),
    "seq_len's type": (lambda: attend(seq_len=8.0), TypeError, ["seq_len=8.0", "int"]),
    # Masks.
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
    "window's type": (lambda: Mask.sliding_window(3.0), TypeError, ["left=3.0", "int"]),
    "prefix": (lambda: Mask.prefix_lm(-1), ValueError, ["prefix_len=[-1]", ">= 0"]),
    "chunk": (lambda: Mask.chunked(0), ValueError, ["size=0", "at least 1"]),
    "and": (lambda: Mask.causal() & 3, TypeError, ["unsupported operand"]),  # type: ignore[operator]
    # Sharding.
    "dim": (lambda: seqpar.shard(tensor(), dim=4), ValueError, ["dim=4", "(2, 8, 4, 16)"]),
    "dim's type": (lambda: seqpar.shard(tensor(), dim="seq"), TypeError, ["dim='seq'", "int"]),
    "shard's layout": (
        lambda: seqpar.shard(tensor(), layout="stripes"),
        ValueError,
        ["layout", "did you mean 'striped'"],
    ),
    "shard's strategy": (
        lambda: seqpar.shard(tensor(), strategy="tp-sp"),
        ValueError,
        ["strategy='tp-sp'", "did you mean 'tp_sp'"],
    ),
    "shard's tensor": (lambda: seqpar.shard([1, 2]), TypeError, ["x", "list"]),
    "positions": (lambda: seqpar.positions(-1), ValueError, ["seq_len=-1"]),
    # Meshes, in this process alone.
    "mesh size": (lambda: seqpar.init_mesh(ring=0), ValueError, ["ring=0", "at least 1"]),
    "mesh product": (lambda: seqpar.init_mesh(ring=3, ulysses=2), ValueError, ["ring=3", "ulysses=2", "1"]),
    "two open sizes": (lambda: seqpar.init_mesh(ring=-1, dp=-1), ValueError, ["dp", "ring", "-1", "one"]),
    "mesh size's type": (lambda: seqpar.init_mesh(ring="2"), TypeError, ["ring='2'", "int"]),
}


@pytest.mark.parametrize("name", BAD)
def test_the_message_says_what_to_do(name: str) -> None:
    call, error, words = BAD[name]
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    assert raised.type is error, raised.value
    message = str(raised.value)
    missing = [word for word in words if not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", message)]
    assert not missing, f"{message!r} lacks {missing}"


def bad_on(bad_rank: int, rank: int) -> dict[str, tuple[dict[str, Any], str]]:
    """Name -> arguments that are bad on ``bad_rank`` only, and a word that its message contains."""

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


@on_ranks
def attend_with_one_bad_rank(group: ProcessGroup, name: str, strategy: str) -> str:
    """The error of this rank when the input of rank 1 is bad. After it, a valid call works."""
    arguments, _ = bad_on(1, group.rank())[name]
    message = message_of(lambda: attend(group=group, **{**STRATEGIES[strategy], **arguments}))
    assert not attend(group=group, **STRATEGIES[strategy]).any()
    return message


def verify_one_bad_rank(name: str, messages: list[str]) -> None:
    _, word = bad_on(1, 1)[name]
    for rank, message in enumerate(messages):
        if rank == 1:
            assert message.startswith(("ValueError", "TypeError")) and word in message
        else:
            assert message.startswith("RuntimeError") and "[1]" in message, f"rank {rank}"


@pytest.mark.parametrize("strategy", DISTINCT)
def test_one_bad_rank_makes_all_raise(batch: Batch, strategy: str) -> None:
    batch.check(4, attend_with_one_bad_rank, [*bad_on(1, 1)], verify_one_bad_rank, strategy)


# Name -> arguments by rank, and a word of the message on every rank.
DISAGREEMENTS: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "batch": (lambda rank: dict.fromkeys("qk", tensor(2 + (rank == 2), 8, 4, 16)), "batch"),
    "heads": (lambda rank: {"q": tensor(2, 8, 8 if rank == 2 else 4, 16)}, "heads"),
    "kv_heads": (lambda rank: {"k": tensor(2, 8, 2 if rank == 2 else 4, 16)}, "kv_heads"),
    "head_dim": (lambda rank: dict.fromkeys("qk", tensor(2, 8, 4, 8 * (1 + (rank == 2)))), "head_dim"),
    "v_head_dim": (lambda rank: {"v": tensor(2, 8, 4, 8 * (1 + (rank == 2)))}, "v_head_dim"),
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


@on_ranks
def attend_in_disagreement(group: ProcessGroup, name: str, strategy: str) -> str:
    """The error of this rank when the ranks' arguments are valid but differ. After it, a valid call works."""
    arguments = DISAGREEMENTS[name][0](group.rank())
    message = message_of(lambda: attend(group=group, **{**STRATEGIES[strategy], **arguments}))
    assert not attend(group=group, **STRATEGIES[strategy]).any()
    return message


def verify_disagreement(name: str, messages: list[str]) -> None:
    assert all(message.startswith("ValueError") and DISAGREEMENTS[name][1] in message for message in messages)


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "hybrid"])
def test_ranks_that_disagree_all_raise(batch: Batch, strategy: str) -> None:
    batch.check(4, attend_in_disagreement, [*DISAGREEMENTS], verify_disagreement, strategy)


@on_ranks
def layers_and_losses_in_error(group: ProcessGroup) -> dict[str, str]:
    """The errors of this rank outside the attention function.

    In "bad" calls the input of rank 1 is bad, in "differ" calls it is valid but differs from the other ranks' input.
    """
    odd = group.rank() == 1
    x, ids = torch.zeros(2, 4, 16), torch.zeros(2, 4, dtype=torch.int64)
    ring, tp_sp = (seqpar.ParallelAttention(s, 16, 4, group=group, layout="contiguous") for s in ("ring", "tp_sp"))
    mlp, head = seqpar.MegatronMLP(16, 32, group=group), seqpar.VocabParallelHead(16, 11, group=group)
    logits = head(x).detach()
    narrow, short, double = logits[..., :-1], logits[:, :-1], logits.double()
    calls: dict[str, Callable[[], Any]] = {}
    for name, layer in (("ring", ring), ("tp_sp", tp_sp), ("mlp", mlp), ("head", head)):
        calls[f"bad: {name}, dtype"] = partial(layer, x.half() if odd else x)
        calls[f"bad: {name}, integers"] = partial(layer, x.int() if odd else x)
        calls[f"bad: {name}, width"] = partial(layer, x[..., 1:] if odd else x)
        calls[f"bad: {name}, type"] = partial(layer, None if odd else x)
    calls["bad: layer, seq_len"] = lambda: ring(x, seq_len=4.5 if odd else None)
    loss: Any = partial(seqpar.vocab_parallel_cross_entropy, num_embeddings=11, group=group)
    calls["bad: logits, width"] = lambda: loss(narrow if odd else logits, ids)
    calls["bad: logits, type"] = lambda: loss(None if odd else logits, ids)
    calls["bad: labels"] = lambda: loss(logits, ids + 50 * odd)
    calls["bad: head, labels"] = lambda: head(x, ids + 50 * odd)
    calls["bad: head, shape of labels"] = lambda: head(x, ids[:, odd:])
    calls["bad: head, chunk_tokens"] = lambda: head(x, ids, chunk_tokens=0 if odd else 3)
    calls["differ: head, batch"] = lambda: head(x[: 1 + odd], ids[: 1 + odd])
    calls["differ: logits, tokens"] = lambda: loss(short if odd else logits, ids)
    calls["differ: logits, dtype"] = lambda: loss(double if odd else logits, ids)
    unshard = partial(seqpar.unshard, group=group, layout="contiguous")
    calls["differ: unshard, layout"] = lambda: unshard(x, layout="zigzag" if odd else "striped")
    calls["differ: unshard, dim"] = lambda: unshard(x[:, :2], dim=int(odd))
    calls["differ: unshard, dtype"] = lambda: unshard(x.int() if odd else x)
    messages = {}
    for name, call in calls.items():
        messages[name] = message_of(call)
        assert not attend(strategy="ring", group=group).any()  # a valid call works after it
    return messages


def test_layers_and_losses_raise_on_all_ranks(pool: Pool) -> None:
    for rank, messages in enumerate(pool.run(3, layers_and_losses_in_error)):
        for name, message in messages.items():
            if name.startswith("bad") and rank != 1:
                assert message.startswith("RuntimeError") and "[1]" in message, f"{name}, rank {rank}: {message}"
            else:
                assert message.startswith(("ValueError", "TypeError")), f"{name}, rank {rank}: {message}"


# Name -> words of the message.
GROUP_ERRORS = {
    "local": ["'local'", "8 ranks", "ring"],
    "both": ["mesh and group", "one of them"],
    "names": ["('a', 'b')", "'ring'", "'ulysses'"],
    "divide": ["ulysses_size=3", "8 ranks", "1, 2, 4, 8"],
    "product": ["ring=3", "ulysses=2", "8"],
    "open": ["ring=3", "dp=-1", "8"],
}


@on_ranks
def unsuitable_groups(group: ProcessGroup) -> dict[str, str]:
    """The errors about the groups themselves: each rank raises without communication."""
    mesh = mesh_of(1, 2, 4, 1)
    unnamed = torch.distributed.init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
    calls: dict[str, Callable[[], Any]] = {
        "local": lambda: attend(group=group),
        "both": lambda: attend(strategy="ring", group=group, mesh=mesh),
        "names": lambda: attend(strategy="ring", mesh=unnamed),
        "divide": lambda: attend(strategy="hybrid", group=group, ulysses_size=3),
        "product": lambda: seqpar.init_mesh(ring=3, ulysses=2),
        "open": lambda: seqpar.init_mesh(ring=3, dp=-1),
    }
    return {name: message_of(call) for name, call in calls.items()}


def test_unsuitable_groups(pool: Pool) -> None:
    for messages in pool.run(8, unsuitable_groups):
        for name, words in GROUP_ERRORS.items():
            assert messages[name].startswith("ValueError"), messages[name]
            assert all(word in messages[name] for word in words), f"{name}: {messages[name]}"
