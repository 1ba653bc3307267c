"""Every rank makes the same messages in the same order, whatever its caches hold.

A rank that finds a result in a cache and therefore leaves out a collective makes the others wait forever. The caches of
two ranks differ as soon as one of them does something else in between, such as an evaluation on rank 0.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Mask, Sharding
from seqpar.base.cache import ByteCache
from seqpar.layers import rotary
from seqpar.ranks.rendezvous import store_all_gather

from ..pool import Pool, on_ranks
from ..strategy_cases import DISTINCT, DISTINCT_LAYERS, LAYER_STRATEGIES, STRATEGIES

SEQ_LEN, HIDDEN, VOCAB = 16, 32, 11
MASK = Mask.documents([0, 5, SEQ_LEN])
SENDS, RECEIVES = ("send",), ("recv", "recv_anysource")
COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "gather", "scatter"),
    *("allgather", "_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)


class Operation(NamedTuple):
    group: str
    name: str
    nbytes: int


@contextmanager
def recorded(record: list[Operation]) -> Iterator[None]:
    """Note every operation of every process group, and every wait through the store."""
    names = [name for name in (*SENDS, *RECEIVES, *COLLECTIVES) if name in vars(ProcessGroup)]
    before = {name: vars(ProcessGroup)[name] for name in names}

    def spy(name: str) -> Callable[..., Any]:
        def call(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            tensors = [x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, Tensor)]
            record.append(Operation(self.group_name, name, sum(x.nbytes for x in tensors)))
            return before[name].__get__(self)(*args, **kwargs)

        return call

    gather = store_all_gather

    def recorded_gather(purpose: str, ranks: Any, *args: Any) -> Any:
        record.append(Operation(str(tuple(ranks)), purpose, 0))
        return gather(purpose, ranks, *args)

    modules = [module for name, module in sys.modules.items() if name.startswith("seqpar.")]
    patches = [
        mock.patch.object(module, "store_all_gather", recorded_gather)
        for module in modules
        if hasattr(module, "store_all_gather")
    ]
    for name in before:
        setattr(ProcessGroup, name, spy(name))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
        for name, method in before.items():
            setattr(ProcessGroup, name, method)


def forget() -> None:
    """Empty every cache of the package. What a collective has set up (communicators, hosts) is no cache."""
    for name, module in list(sys.modules.items()):
        if name.startswith("seqpar"):
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
                elif isinstance(value, ByteCache):
                    value.clear()
    rotary._tables.clear()
    MASK.plans.clear()


def calls(group: ProcessGroup) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The name of each call, and the call."""
    sharding = Sharding(SEQ_LEN, "zigzag", group=group)
    of_tp = Sharding(SEQ_LEN, "zigzag", group=group, strategy="tp_sp")
    where: dict[str, Any] = {"group": group, "layout": "zigzag"}
    q = torch.randn(1, sharding.seq_local, 4, 8)  # [b, s, h, d]
    x = torch.randn(1, sharding.seq_local, HIDDEN)  # [b, s, hidden]
    ids = torch.arange(sharding.seq_local)[None] % VOCAB

    def backward(y: Any, *inputs: Any) -> None:
        y.sum().backward()

    def then_backward(call: Callable[..., Tensor]) -> None:
        backward(call())

    def attend(**options: Any) -> None:
        q_local = q.clone().requires_grad_()
        backward(seqpar.attention(q_local, q_local, q_local, mask=MASK, **options))

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        module.zero_grad()
        backward(module(x.clone().requires_grad_(), *args, **kwargs))
        seqpar.sync_gradients(module, group=group)
        seqpar.clip_grad_norm_(module, 1.0, group=group)

    rows = {**{name: STRATEGIES[name] for name in DISTINCT}, "auto": {"strategy": "auto"}}
    for name, row in rows.items():
        yield f"attention {name}, sharding", functools.partial(attend, sharding=sharding, **row)
        yield f"attention {name}, handshake", functools.partial(attend, **where, **row)
        yield f"attention {name}, seq_len", functools.partial(attend, seq_len=SEQ_LEN, **where, **row)
    yield "attention, dropout", functools.partial(attend, sharding=sharding, dropout_p=0.5)

    positions = sharding.positions() // 2
    dynamic = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4}
    rows = {name: LAYER_STRATEGIES[name] for name in DISTINCT_LAYERS}
    rows |= {"auto": {"strategy": "auto"}, "tp_sp, none": {"strategy": "tp_sp", "overlap": "none"}}
    for name, row in rows.items():
        of_layer = {"sharding": of_tp if row["strategy"] == "tp_sp" else sharding}
        layers = [
            seqpar.ParallelAttention(hidden_size=HIDDEN, num_heads=4, rope=rope, **where, **row)
            for rope in (seqpar.RotaryEmbedding(8), seqpar.RotaryEmbedding(8, scaling=dynamic))
        ]
        yield f"layer {name}, handshake", functools.partial(run, layers[0], MASK)
        yield f"layer {name}, positions", functools.partial(run, layers[0], MASK, positions=positions, **of_layer)
        yield f"layer {name}, dynamic", functools.partial(run, layers[1], MASK, positions=positions, **of_layer)

    mlp = seqpar.MegatronMLP(HIDDEN, 24, group=group)
    embedding = seqpar.VocabParallelEmbedding(VOCAB, HIDDEN, group=group)
    head = seqpar.VocabParallelHead(HIDDEN, VOCAB, group=group)
    logits = head(x).detach().requires_grad_()
    of_logits = functools.partial(seqpar.vocab_parallel_cross_entropy, logits, ids, VOCAB)
    given: list[tuple[str, dict[str, Any]]] = [("sharding", {"sharding": of_tp}), ("handshake", {})]
    for how, length in given:
        yield f"mlp, {how}", functools.partial(run, mlp, **length)
        named: dict[str, Callable[..., Tensor]] = {
            "embedding": functools.partial(embedding, ids, **length),
            "head": functools.partial(head, x, **length),
            "head with labels": functools.partial(head, x, ids, **length),
            "vocabulary loss": functools.partial(of_logits, **(length or {"group": group})),
        }
        for name, call in named.items():
            yield f"{name}, {how}", functools.partial(then_backward, call)

    def token_loss(**ranks: Any) -> None:
        losses = F.cross_entropy(torch.randn(1, ids.shape[1], VOCAB, requires_grad=True).mT, ids, reduction="none")
        seqpar.token_loss(losses, ids, **ranks).backward()

    def there_and_back(shard: Callable[..., Tensor], unshard: Callable[..., Tensor]) -> None:
        whole = torch.randn(1, SEQ_LEN, 3, requires_grad=True)
        backward(unshard(shard(whole)).square())

    yield "token_loss, sharding", functools.partial(token_loss, sharding=sharding)
    yield "token_loss, group", functools.partial(token_loss, group=group)
    yield "shard and unshard, sharding", functools.partial(there_and_back, sharding.shard, sharding.unshard)
    yield (
        "shard and unshard, group",
        functools.partial(
            there_and_back, functools.partial(seqpar.shard, **where), functools.partial(seqpar.unshard, **where)
        ),
    )


def hf_calls(group: ProcessGroup) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Steps of a Hugging Face model, and its generation."""
    import seqpar.hf

    from ..hf.workers import make_batch, tiny

    for strategy in ("ring", "ulysses"):
        for how in ("packed", "left"):
            model = tiny("llama")
            seqpar.hf.parallelize(model, group=group, strategy=strategy)
            batch = make_batch(how, length=44)

            def step(model: Any = model, batch: Any = batch) -> None:
                model.zero_grad()
                model(**batch).loss.backward()
                seqpar.sync_gradients(model, group=group)

            yield f"{strategy}, {how}", step
    prompt = {name: batch[name] for name in ("input_ids", "attention_mask")}
    yield "generate", lambda: model.eval().generate(**prompt, max_new_tokens=2, do_sample=False)


@on_ranks
def with_other_caches(group: ProcessGroup, hf: bool = False) -> dict[str, list[Operation]]:
    """The operations of each call, made a second time, after rank 0 has emptied its caches."""
    torch.manual_seed(0)
    found: dict[str, list[Operation]] = {}
    for name, call in hf_calls(group) if hf else calls(group):
        call()
        if group.rank() == 0:
            forget()
        record: list[Operation] = []
        with recorded(record):
            call()
        found[name] = record
    return found


def compare(by_rank: list[dict[str, list[Operation]]]) -> None:
    """The two ranks make the same collectives, and each receives what the other one sends."""
    first, second = by_rank
    assert first.keys() == second.keys()
    for name, operations in first.items():
        shared, others = ([x for x in each if x.name not in SENDS + RECEIVES] for each in (operations, second[name]))
        assert shared == others, name
        for here, there in ((operations, second[name]), (second[name], operations)):
            sent = [(x.group, x.nbytes) for x in here if x.name in SENDS]
            assert sent == [(x.group, x.nbytes) for x in there if x.name in RECEIVES], name


@pytest.mark.thorough
@pytest.mark.slow
def test_messages_do_not_depend_on_caches(pool: Pool) -> None:
    compare(pool.run(2, with_other_caches))


@pytest.mark.slow
def test_messages_of_hugging_face_models_do_not_depend_on_caches(pool: Pool) -> None:
    pytest.importorskip("transformers")
    compare(pool.run(2, with_other_caches, hf=True))
