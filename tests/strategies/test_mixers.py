"""``seqpar.mixers``: outputs and gradients of one process in float64, under every layout, and the bytes sent."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass
from itertools import chain, cycle, pairwise, product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Mask, Sharding
from seqpar.mixers import by_heads, by_states, halo
from seqpar.placement.layout import LAYOUTS, Layout, shard_positions

from ..cases import Batch
from ..pool import Pool, mesh_of, on_ranks
from ..reference import assert_error
from .test_bytes import Sent, watch

CHANNELS, WIDTH = 3, 3


def scan_run(v: Tensor, log_decay: Tensor, k: Tensor, q: Tensor, state: Any = 0.0) -> tuple[Tensor, Tensor]:
    """Linear attention, ``state = exp(log_decay) * state + k v``, token by token: outputs ``q state`` and the state.

    v [b, t, h, e], log_decay [b, t, h, 1], k and q [b, t, n, d].
    """
    k, q = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (k, q))
    outs = []
    for i in range(v.shape[1]):
        state = log_decay[:, i, :, :, None].exp() * state + k[:, i, :, :, None] * v[:, i, :, None, :]
        outs.append((q[:, i, :, :, None] * state).sum(2))
    return torch.stack(outs, 1), state


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """A causal convolution of each channel without padding: x [b, W - 1 + m, c], weight [c, 1, W], to [b, m, c]."""
    return F.conv1d(x.transpose(1, 2), weight, groups=x.shape[2]).transpose(1, 2)


def linear_scan(*x: Tensor) -> tuple[Any, Any]:
    out, state = scan_run(*x)
    v, log_decay, _, q = x
    decay = log_decay.cumsum(1)  # [r, m, h, 1]
    return (out, decay, q.repeat_interleave(v.shape[2] // q.shape[2], 2)), (decay[:, -1], state)


def linear_merge(first: Any, second: Any) -> Any:
    return first[0] + second[0], second[0][..., None].exp() * first[1] + second[1]


def linear_correct(out: Tensor, decay: Tensor, q: Tensor, before: Any) -> Tensor:
    if before is None:
        return out
    return out + decay.exp() * (q[..., None] * before[1][:, None]).sum(3)


@dataclass(frozen=True)
class Case:
    """A mixer over a sequence.

    Attributes:
        documents: the first positions of each batch row's documents.
        heads: the numbers of v and of k.
    """

    mixer: str
    layout: Layout
    seq_len: int = 19
    documents: tuple[tuple[int, ...], ...] = ((),)
    heads: tuple[int, int] = (4, 2)
    dtype: torch.dtype = torch.float64
    how: str = ""

    def __str__(self) -> str:
        return f"{self.mixer} {self.layout} {self.seq_len} {self.documents} {self.heads} {self.dtype} {self.how}"

    @property
    def mask(self) -> Mask:
        edges = [[0, *row, self.seq_len] for row in self.documents]
        return Mask.documents(edges[0] if len(edges) == 1 else edges)

    def tensors(self) -> list[Tensor]:
        """The inputs of the whole sequence, then the weight; requiring gradients."""
        g = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))
        h, n = self.heads
        shapes = [(h, CHANNELS), (h, 1), (n, 2), (n, 2)]
        tensors = [torch.randn(2, self.seq_len, *shape, generator=g, dtype=torch.float64) for shape in shapes]
        tensors[1] = -F.softplus(tensors[1])
        tensors.append(torch.randn(h * CHANNELS, 1, WIDTH + 1, generator=g, dtype=torch.float64))
        return [x.to(self.dtype).double().requires_grad_() for x in tensors]

    def reference(self, v: Tensor, log_decay: Tensor, k: Tensor, q: Tensor, weight: Tensor) -> Tensor:
        """[b, t, h * e], document by document."""
        rows = []
        for row in range(2):
            edges = [0, *self.documents[row % len(self.documents)], self.seq_len]
            for a, b in pairwise(edges):
                part = [x[row : row + 1, a:b] for x in (v, log_decay, k, q)]
                if self.mixer == "halo":
                    rows.append(convolve(F.pad(part[0].flatten(2), (0, 0, WIDTH, 0)), weight)[0])
                else:
                    scaled = weight.view(self.heads[0], -1).sum(1)[:, None]
                    rows.append((scan_run(*part)[0] * (scaled if self.mixer == "by_heads" else 1))[0].flatten(1))
        return torch.cat(rows).view(2, self.seq_len, -1)

    def compute(self, sharding: Sharding, v: Tensor, log_decay: Tensor, k: Tensor, q: Tensor, weight: Tensor) -> Tensor:
        options: Any = {"sharding": sharding, "mask": self.mask if any(self.documents) else None}
        if self.mixer == "halo":
            return halo(lambda x: convolve(x, weight), v.flatten(2), WIDTH, **options)
        if self.mixer == "by_states":
            tensors = [v, log_decay, k, q]
            return by_states(linear_scan, linear_merge, linear_correct, tensors, **options).flatten(2)
        scale = weight.view(self.heads[0], -1).sum(1)[:, None]
        fn = lambda heads, *x: scan_run(*x)[0] * scale[heads]  # noqa: E731
        out: Tensor = by_heads(fn, (v, log_decay), (k, q), **options)
        return out.flatten(2)


def result(case: Case, out: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    dout = torch.randn(out.shape, generator=g, dtype=torch.float64)
    out.backward(dout)
    return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in tensors)]


@on_ranks
def check_case(group: ProcessGroup, case: Case) -> list[tuple[float, float]]:
    """The largest differences of the output and of each gradient to one process, relative to the largest value.

    The second of each pair is the difference of one process in the dtype of the case.
    """
    tensors = case.tensors()
    expected = result(case, case.reference(*tensors), tensors)
    one = [x.detach().to(case.dtype).requires_grad_() for x in tensors]
    alone = result(case, case.reference(*one).double(), one)
    if case.how in ("tp", "tp_sp"):  # tokens are sharded over the ring, or over the ring and tp
        strategy = "tp_sp" if case.how == "tp_sp" else None
        sharding = Sharding(case.seq_len, case.layout, mesh=mesh_of(1, 2, 1, group.size() // 2), strategy=strategy)
    else:
        sharding = Sharding(case.seq_len, case.layout, group=group)
    local = [x.detach().to(case.dtype).requires_grad_() for x in tensors]

    def run(*x: Tensor) -> Tensor:
        return case.compute(sharding, *x)

    sharded = [*(sharding.shard(x) for x in local[:-1]), local[-1]]
    if case.how == "frozen" and group.rank() == 0:  # this rank's inputs require no gradient
        sharded = [x.detach() for x in sharded]
    if case.how == "checkpoint":
        out = checkpoint(run, *sharded, use_reentrant=False)
    elif case.how == "compile" and group.rank() == 0:  # the other rank runs eagerly, and must send the same
        out = torch.compile(run, backend="aot_eager")(*sharded)
    else:
        out = run(*sharded)
    full = sharding.unshard(out)
    ours = result(case, full.double(), local)
    # Every rank has the gradient of all tokens and ranks: sum over the ranks, which all compute the same loss.
    ours[1:] = [x / group.size() for x in ours[1:]]
    for x in ours[1:]:
        torch.distributed.all_reduce(x, group=group)
    if case.how == "frozen":
        ours[1:], expected[1:] = [], []

    def errors(found: list[Tensor]) -> list[float]:
        pairs = zip(found, expected, strict=False)
        return [float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in pairs]

    return list(zip(errors(ours), errors(alone), strict=True))


MIXERS = ("by_heads", "halo", "by_states")
DOCUMENTS = (((),), ((1, 2, 9),), ((5,), (4, 10)))


def agree(case: Case, by_rank: list[list[tuple[float, float]]]) -> None:
    for error, rounding in chain.from_iterable(by_rank):
        assert_error(error, rounding, str(case), dtype=case.dtype)


@pytest.mark.thorough(world=[2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_equal_to_one_process(batch: Batch, world: int) -> None:
    cases = [Case(x, layout, 13, documents=docs) for x, layout, docs in product(MIXERS, LAYOUTS, DOCUMENTS)]
    # Fewer tokens than ranks, and runs that are shorter than the halo.
    cases += [Case(x, layout, n) for (x, layout), n in zip(product(MIXERS, LAYOUTS), cycle((1, 2, 7, 2)), strict=False)]
    # Uneven heads, heads of k that are shared or read unevenly, fewer heads than ranks.
    cases += [Case("by_heads", "zigzag", heads=heads) for heads in ((5, 5), (6, 2), (3, 1), (10, 5), (1, 1), (2, 2))]
    batch.check(world, check_case, cases, agree)


def test_tokens_that_are_sharded_over_tp(batch: Batch) -> None:
    """With ``strategy="tp_sp"`` a mixer uses the ranks of the ring and of tp; without it, the ranks of the ring."""
    cases = [Case(mixer, "zigzag", 21, ((5,), (8, 16)), how=how) for mixer, how in product(MIXERS, ("tp", "tp_sp"))]
    batch.check(8, check_case, [*cases, Case("halo", "striped", 21, how="tp_sp")], agree)


def test_equal_through_shared_memory(batch: Batch) -> None:
    cases = [Case(mixer, "zigzag", documents=((5,), (8, 16))) for mixer in MIXERS]
    cases += [Case("by_heads", "striped", heads=heads) for heads in ((5, 5), (2, 1), (1, 1))]
    batch.check(3, check_case, cases, agree, shared_memory=True)


@pytest.mark.thorough(how=["compile"])
@pytest.mark.parametrize("how", ["checkpoint", "frozen", pytest.param("compile", marks=pytest.mark.slow)])
def test_other_ways_to_run(batch: Batch, how: str) -> None:
    """Under activation checkpointing and torch.compile, and if the inputs of one rank require no gradient."""
    cases = [Case(mixer, "zigzag", 5, documents=((3,),), how=how) for mixer in MIXERS]
    batch.check(2, check_case, cases, agree)


def test_half_precision(batch: Batch) -> None:
    """In bfloat16 the errors are rounding errors of bfloat16, in any number of ranks."""
    cases = [Case(mixer, "zigzag", documents=((5,),), dtype=torch.bfloat16) for mixer in MIXERS]
    batch.check(2, check_case, cases, agree)


@on_ranks
def check_bits(group: ProcessGroup, transport: str) -> None:
    """Tensors of several dtypes travel in one message and are not rounded, and neither are their gradients."""
    sharding = Sharding(9, "striped", group=group)
    g = torch.Generator().manual_seed(0)
    dtypes = torch.bfloat16, torch.float32, torch.float64
    x = [torch.randn(2, 9, 5, 3, generator=g, dtype=torch.float64).to(dtype) for dtype in dtypes]
    local = [sharding.shard(y).requires_grad_() for y in x]
    messages = []

    def fn(heads: slice, *shards: Tensor) -> tuple[Tensor, ...]:
        messages.append(heads)
        for shard, full in zip(shards, x, strict=True):
            assert shard.dtype == full.dtype and torch.equal(shard, full[:, :, heads])
        return tuple(shard * 1 for shard in shards)

    with seqpar.trace() as trace:
        outs = by_heads(fn, local, sharding=sharding)
    for out, y in zip(outs, local, strict=True):
        assert out.dtype == y.dtype and torch.equal(out, y)
    assert len(messages) == 1 and trace.messages == 2 * (group.size() - 1)  # to heads and back
    assert trace.transports == {transport}
    grads = torch.autograd.grad(outs, local, [y.detach() for y in local])
    assert all(torch.equal(d, y) for d, y in zip(grads, local, strict=True))


@on_ranks
def without_rows_or_gradients(group: ProcessGroup) -> None:
    """A batch of no rows, and integers, of which none needs a gradient."""
    sharding = Sharding(9, "zigzag", group=group)
    empty, full = torch.zeros(0, sharding.seq_local, 4, 2), torch.arange(72).view(1, 9, 4, 2)
    assert halo(lambda y: y[:, 1:], empty.requires_grad_(), 1, sharding=sharding).shape == empty.shape
    assert by_heads(lambda _, y: y.cumsum(1), empty, sharding=sharding).shape == empty.shape
    with pytest.raises(ValueError, match="no batch rows"):
        by_states(linear_scan, linear_merge, linear_correct, (empty,) * 4, sharding=sharding)
    local = sharding.shard(full.sin())
    largest = by_heads(lambda _, y: y.argmax(-1, keepdim=True), local, sharding=sharding)  # int64
    assert torch.equal(largest, local.argmax(-1, keepdim=True))


def test_dtypes_of_one_message(pool: Pool) -> None:
    pool.run(3, without_rows_or_gradients)
    pool.run(2, check_bits, "gloo")
    pool.run(2, check_bits, "shared memory", shared_memory=True)


class Row(NamedTuple):
    """What is counted for one call."""

    mixer: str
    layout: Layout
    documents: tuple[int, ...] = ()
    heads: tuple[int, int] = (6, 6)
    dtype: torch.dtype = torch.float32


TOKENS, BATCH = 48, 2


@on_ranks
def count_bytes(group: ProcessGroup, row: Row) -> Sent:
    sharding = Sharding(TOKENS, row.layout, group=group)
    mask = Mask.documents([0, *row.documents, TOKENS])
    h, n = row.heads
    shape = BATCH, sharding.seq_local
    x = [torch.randn(*shape, *of, dtype=row.dtype).requires_grad_() for of in ((h, 4), (n, 5))]
    out: Any = None

    def forward() -> None:
        nonlocal out
        if row.mixer == "halo":
            out = halo(lambda y: y[:, WIDTH:] + y[:, :-WIDTH], x[0], WIDTH, sharding=sharding, mask=mask)
        elif row.mixer == "by_heads":
            out = by_heads(lambda heads, y, z: y * z.sum(), x[:1], x[1:], sharding=sharding)
        else:
            scan = lambda y: (y.cumsum(1), (y.float().sum(1),))  # noqa: E731
            correct = lambda y, before: y if before is None else y + before[0][:, None].to(y.dtype)  # noqa: E731
            merge = lambda a, b: (a[0] + b[0],)  # noqa: E731
            out = by_states(scan, merge, correct, x[0], sharding=sharding, mask=mask)

    return watch(forward, lambda: out.sum().backward())


def messages(row: Row, world: int) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
    """By definition, for each pair of ranks (from, to): how many rows of x and how many summaries are sent."""
    rank_of = [0] * TOKENS
    for rank in range(world):
        for i in shard_positions(TOKENS, world, rank, row.layout).tolist():
            rank_of[i] = rank
    edges = [0, *row.documents, TOKENS]
    rows, summaries = set(), set()
    for a, b in pairwise(edges):
        firsts = [i for i in range(a, b) if i == a or rank_of[i] != rank_of[i - 1]]  # of each run
        rows |= {(j, rank_of[i]) for i in range(a, b) for j in range(max(a, i - WIDTH), i)}
        summaries |= {(j, rank_of[i]) for i in firsts for j in firsts if j < i}
    return tuple(Counter((rank_of[j], to) for j, to in kind if rank_of[j] != to) for kind in (rows, summaries))  # type: ignore[return-value]


@pytest.mark.parametrize("world", [2, 3])
def test_bytes(batch: Batch, world: int) -> None:
    """The formulas of the docstrings, counted by the trace and by torch.distributed."""
    documents = ((), (7, 20, 21, 40))
    rows = [
        Row(mixer, layout, docs, dtype=dtype)
        for (mixer, dtype), layout, docs in product(
            (("halo", torch.bfloat16), ("by_states", torch.float32)), LAYOUTS, documents
        )
    ]
    rows += [Row("by_heads", layout, heads=(6, 6), dtype=torch.bfloat16) for layout in LAYOUTS]
    rows += [Row("by_heads", "zigzag", heads=(6, 1), dtype=torch.bfloat16)]

    def verify(row: Row, by_rank: list[Sent]) -> None:
        width = BATCH * row.heads[0] * 4
        for rank, sent in enumerate(by_rank):
            if row.mixer == "by_heads":
                own = BATCH * TOKENS * (world - 1) * row.heads[0] * (4 + 4) * 2 // world**2
                kv = BATCH * TOKENS * (world - 1) * 5 // world
                of_kv = (kv * 2, kv * 4) if row.heads[1] == 1 else (kv * row.heads[1] // world * 2,) * 2
                expected = own + of_kv[0], own + of_kv[1]
            else:
                counts = messages(row, world)[row.mixer == "by_states"]
                forward, backward = (sum(counts[x] for x in counts if x[i] == rank) for i in (0, 1))
                expected = forward * width * row.dtype.itemsize, backward * width * 4
            assert sent.traced == sent.handed_over == expected, (row, rank)

    batch.check(world, count_bytes, rows, verify)


_TREE = Mask.tree([-1, 0, 0], [2, 1, 1])
BAD: tuple[tuple[str, Any], ...] = (
    ("x: 3 batch rows beside 2 of x", lambda s, x: by_states(None, None, None, [x, x.new_zeros(3, 4, 1)], sharding=s)),
    (r"kv: x has \[6\] heads and kv has \[4\]", lambda s, x: by_heads(None, x, x[:, :, :4], sharding=s)),
    (r"x: shape \(2, 4, 18\); expected \[batch, tokens, heads, any\]",
     lambda s, x: by_heads(None, x.flatten(2), sharding=s)),
    ("length: this rank holds 3 tokens", lambda s, x: halo(None, x[:, :3], 2, sharding=s)),
    ("width=-1", lambda s, x: halo(None, x, -1, sharding=s)),
    ("cu_seqlens: the last boundary is 5", lambda s, x: halo(None, x, 2, sharding=s, mask=Mask.documents([0, 5]))),
    ("its tokens are no sequences", lambda s, x: halo(None, x, 2, sharding=s, mask=_TREE)),
    ("its tokens are no sequences", lambda s, x: by_heads(None, x, sharding=s, mask=_TREE)),
    ("its tokens are no sequences", lambda s, x: by_states(None, None, None, x, sharding=s, mask=_TREE)),
    ("x: expected floating-point tensors, got torch.int64", lambda s, x: halo(None, x.long(), 2, sharding=s)),
    ("fn: it returned", lambda s, x: halo(lambda y: y, x, 2, sharding=s)),
    ("fn: it returned NoneType", lambda s, x: by_heads(lambda heads, y: None, x, sharding=s)),
    ("fn: its result has the shape", lambda s, x: by_heads(lambda heads, y: y[0], x, sharding=s)),
    ("sharding=None: expected a seqpar.Sharding", lambda s, x: by_heads(None, x, sharding=None)),
)  # fmt: skip


@pytest.mark.parametrize(("text", "call"), BAD)
def test_bad_input(text: str, call: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        call(Sharding(4, "contiguous"), torch.zeros(2, 4, 6, 3))
