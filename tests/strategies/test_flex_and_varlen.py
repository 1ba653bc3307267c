"""Models that call PyTorch's flex_attention or varlen_attn inside of ``replace_sdpa``, and ``seqpar.varlen_attn``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import AuxRequest as VarlenAuxRequest
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Mask

from ..pool import OwnPool, Pool, on_ranks, start
from ..reference import assert_close

TOKENS, BOUNDARIES = 131, [0, 7, 60, 61, 131]
DOCUMENT = torch.repeat_interleave(torch.arange(4), torch.tensor(BOUNDARIES).diff())
BLOCKS = 16, 8  # queries and keys of a block
Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# What a model means as a function of positions, and as a mask.
NONE_ON_RANK_1 = seqpar.Assigned(((range(TOKENS),), ()))
MODS: dict[str, tuple[Mod, Mask]] = {
    "causal": (lambda b, h, i, j: i >= j, Mask.causal()),
    "full": (lambda b, h, i, j: i >= 0, Mask.full()),
    "window": (lambda b, h, i, j: (i - j <= 9) & (j - i <= 4), Mask.sliding_window(9, 4)),
    "prefix": (lambda b, h, i, j: (i >= j) | (j < 40), Mask.prefix_lm(40)),
    "chunks": (lambda b, h, i, j: (i // 24 == j // 24) & (i >= j), Mask.chunked(24)),
    "tokens that all see": (
        lambda b, h, i, j: ((i - j <= 9) | (j < 5)) & (i >= j),
        (Mask.sliding_window(9) | Mask.global_tokens(5)) & Mask.causal(),
    ),
    "padding of each row": (
        lambda b, h, i, j: (i >= j) & (j >= 20 * b) & (i >= 20 * b),
        Mask.causal() & Mask.padding([0, 20]),
    ),
    "documents": (
        lambda b, h, i, j: (DOCUMENT[i] == DOCUMENT[j]) & (i >= j) & (i - j <= 50),
        Mask.documents(BOUNDARIES) & Mask.sliding_window(50),
    ),
}


def block_mask(mod: Mod, queries: int = TOKENS, keys: int | None = None, batch: int | None = None) -> BlockMask:
    return create_block_mask(mod, batch, None, queries, keys or queries, device="cpu", BLOCK_SIZE=BLOCKS)


def one_device(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of queries that see some key."""
    dense = mask.dense(TOKENS)
    dense = dense[:, None] if dense.dim() == 3 else dense
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~dense, -torch.inf)
    sees = dense.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~sees, 0), -1) * sees
    return weights @ v, scores.masked_fill(~sees, 0).logsumexp(-1) * sees[..., 0]


def compare(sharding: seqpar.Sharding, mask: Mask, seed: int, dim: int, call: Any, lse: bool) -> None:
    """``call(q, k, v)`` of shards, and its gradients, against one device."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, 4, TOKENS, 8), (2, 2, TOKENS, 8), (2, 2, TOKENS, 6), (2, 4, TOKENS, 6), (2, 4, TOKENS)
    q, k, v, dout, dlse = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    if dim == 0:  # [tokens, heads, head_dim]
        q, k, v, dout, dlse = (x[:1] for x in (q, k, v, dout, dlse))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    expected = one_device(q, k, v, mask, 0.3)
    loss = (expected[0] * dout).sum() + ((expected[1] * dlse).sum() if lse else 0)
    right = [expected[0].detach(), *torch.autograd.grad(loss, inputs, retain_graph=True)]
    inputs = [sharding.shard(x.detach(), 2).requires_grad_() for x in inputs]
    out, its_lse = call(*inputs)
    loss = (out * sharding.shard(dout, 2)).sum()
    if lse:
        sees = ~its_lse.isneginf()
        its_lse = its_lse.where(sees, 0.0)
        loss = loss + (its_lse * sharding.shard(dlse, 2)).sum()
        assert_close(its_lse.detach(), sharding.shard(expected[1].detach(), 2), torch.float64)
    results = [out.detach(), *torch.autograd.grad(loss, inputs)]
    for result, whole in zip(results, right, strict=True):
        assert_close(result, sharding.shard(whole, 2), torch.float64)


def packed(function: Any, *arguments: Any, **options: Any) -> Any:
    """A function of [tokens, heads, head_dim] as one of [batch, heads, tokens, head_dim]."""

    def call(*tensors: Tensor) -> tuple[Tensor, None]:
        out = function(*(x[0].transpose(0, 1) for x in tensors), *arguments, **options)
        return out.transpose(0, 1)[None], None

    return call


@on_ranks
def answer(group: ProcessGroup, layout: Any, strategy: Any, names: list[str], seed: int) -> None:
    sharding = seqpar.Sharding(TOKENS, layout, group=group)
    tokens = sharding.lengths[group.rank()]
    for name in names:
        mod, mask = MODS[name]
        batch = 2 if name.startswith("padding") else None
        blocks = [block_mask(mod, batch=batch)]
        blocks += [block_mask(mod, tokens, batch=batch)] if name != "documents" and all(sharding.lengths) else []
        for block in blocks:

            def flex(q: Tensor, k: Tensor, v: Tensor, block: Any = block) -> tuple[Tensor, Tensor]:
                options: Any = {"return_aux": AuxRequest(lse=True), "kernel_options": {"BLOCK_M": 64}}
                out, aux = flex_attention(q, k, v, None, block, 0.3, True, **options)
                return out, aux.lse

            with seqpar.replace_sdpa(sharding, mask, strategy=strategy):
                compare(sharding, mask, seed, 2, flex, lse=True)
    cu, longest = torch.tensor(BOUNDARIES, dtype=torch.int32), 70
    for window in ((-1, -1), (-1, 0), (5, 0), (3, 4))[-len(names) :]:
        mask = Mask.sliding_window(*window) & Mask.documents(BOUNDARIES, causal=False)
        options: Any = {"scale": 0.3, "window_size": window, "enable_gqa": True}
        with seqpar.replace_sdpa(sharding, mask, strategy=strategy):
            compare(sharding, mask, seed, 0, packed(varlen_attn, cu, cu.clone(), longest, longest, **options), False)
        options |= {"sharding": sharding, "strategy": strategy}
        compare(sharding, mask, seed, 0, packed(seqpar.varlen_attn, cu, cu, longest, longest, **options), False)


@pytest.mark.parametrize(
    ("world", "layout", "strategy", "names"),
    [
        (1, "zigzag", "ring", ["documents"]),
        (2, "zigzag", "ring", [*MODS]),
        (4, "striped", "ulysses", ["tokens that all see", "padding of each row", "documents"]),
        (2, NONE_ON_RANK_1, "ring", ["padding of each row", "documents"]),
    ],
)
def test_one_device_s_results(pool: Pool, world: int, layout: str, strategy: str, names: list[str]) -> None:
    pool.run(world, answer, layout, strategy, names, torch.seed() % 2**31)


def sliced(whole: BlockMask) -> BlockMask:
    return whole[:, :, :]


def without_blocks(mod: Mod) -> BlockMask:
    """A block mask whose list of blocks hides what ``mod`` shows."""
    mask = block_mask(mod)
    mask.kv_num_blocks = mask.kv_num_blocks - (mask.kv_num_blocks > 1).int()
    return mask


def full_blocks(mod: Mod) -> BlockMask:
    """A block mask whose first blocks are full, whatever ``mod`` hides."""
    mask = block_mask(mod)
    counts, indices = mask.kv_num_blocks, mask.kv_indices
    return BlockMask.from_kv_blocks(torch.zeros_like(counts), indices, counts, indices, BLOCKS, mod, (TOKENS, TOKENS))


def blocks_twice(mod: Mod) -> BlockMask:
    """A block mask that lists all blocks among the full ones and among the others."""
    indices = torch.arange(-(-TOKENS // BLOCKS[1]), dtype=torch.int32).expand(1, 1, -(-TOKENS // BLOCKS[0]), -1)
    counts = torch.full(indices.shape[:3], indices.shape[3], dtype=torch.int32)
    return BlockMask.from_kv_blocks(counts, indices, counts, indices, BLOCKS, mod, (TOKENS, TOKENS))


CAUSAL = MODS["causal"][0]


def window_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j < 60)


# What makes the block mask of a rank with so many tokens, the mask of the block, and the error.
REFUSED: dict[str, tuple[Callable[[int], BlockMask], Mask | None, str]] = {
    "no mask": (lambda n: block_mask(CAUSAL), None, r"sees other keys than under the mask, Mask.full\(\); pass"),
    "a window": (
        lambda n: block_mask(window_mod),
        Mask.causal(),
        r"position \d+ of the full sequence sees",
    ),
    "a rank's window": (lambda n: block_mask(window_mod, n), Mask.causal(), "sees other keys"),
    "strictly causal": (lambda n: block_mask(lambda b, h, i, j: i > j, n), Mask.causal(), "sees other keys"),
    "one head": (lambda n: block_mask(lambda b, h, i, j: (i >= j) & ((h != 1) | (i - j < 2))), Mask.causal(), "other"),
    "one row": (lambda n: block_mask(lambda b, h, i, j: (i >= j) & ((b != 1) | (i - j < 2))), Mask.causal(), "other"),
    "blocks": (lambda n: without_blocks(CAUSAL), Mask.causal(), "sees other keys"),
    "full blocks": (lambda n: full_blocks(CAUSAL), Mask.causal(), "sees other keys"),
    "blocks twice": (lambda n: blocks_twice(MODS["full"][0]), Mask.full(), "sees other keys"),
    "a rank's documents": (
        lambda n: block_mask(lambda b, h, i, j: (DOCUMENT[:n][i] == DOCUMENT[:n][j]) & (i >= j), n),
        Mask.documents(BOUNDARIES),
        r"mask_mod raised IndexError at positions of the full sequence \(index \d+ is out of bounds for a dim",
    ),
    "a length": (lambda n: block_mask(CAUSAL, 17), Mask.causal(), r"made for 17 queries and 17 keys; expected 131 of"),
    "keys of all ranks": (lambda n: block_mask(CAUSAL, n, TOKENS), Mask.causal(), "and 131 keys; expected 131 of both"),
    "rows": (lambda n: block_mask(CAUSAL, batch=3), Mask.causal(), "made for 3 batch rows"),
    "sliced": (lambda n: sliced(block_mask(CAUSAL)), Mask.causal(), "mask_mod raised RuntimeError"),
}


UNION = (Mask.sliding_window(9) | Mask.global_tokens(5)) & Mask.causal()


@on_ranks
def refuse(group: ProcessGroup) -> None:
    sharding = seqpar.Sharding(TOKENS, "striped", group=group)
    tokens = sharding.lengths[group.rank()]
    x = torch.randn(2, 2, tokens, 8)
    for make, mask, message in REFUSED.values():
        with pytest.raises(ValueError, match=message), seqpar.replace_sdpa(sharding, mask):
            flex_attention(x, x, x, block_mask=make(tokens))
    x = torch.randn(tokens, 2, 8)
    cu, own = (torch.tensor(y, dtype=torch.int32) for y in ([0, TOKENS], [0, tokens]))
    calls: Any = {
        "cu_seq_q: ends at": (own, own, tokens, tokens),
        "cu_seq_k: expected the boundaries of cu_seq_q": (cu, own, TOKENS, TOKENS),
        "max_q=3: a document of cu_seq_q has 131": (cu, cu, 3, TOKENS),
        r"token \d+ sees other tokens than under the mask": (cu, cu, TOKENS, TOKENS),  # not causal
    }
    for message, arguments in calls.items():
        with pytest.raises(ValueError, match=message), seqpar.replace_sdpa(sharding, Mask.causal()):
            varlen_attn(x, x, x, *arguments)
        with pytest.raises(ValueError, match=message), seqpar.replace_sdpa(sharding, UNION):
            varlen_attn(x, x, x, *arguments)
        if "other tokens" not in message:
            with pytest.raises(ValueError, match=message):
                seqpar.varlen_attn(x, x, x, *arguments, sharding=sharding)


def test_a_call_with_another_mask_is_refused(pool: Pool) -> None:
    pool.run(2, refuse)


@on_ranks
def differ_on_one_rank(group: ProcessGroup, port: int) -> str:
    start(port, "one mask differs", group.rank(), group.size())
    sharding = seqpar.Sharding(TOKENS, "striped", mesh=seqpar.init_mesh(ring=-1, device_type="cpu"))
    x = torch.randn(1, 2, sharding.seq_local, 8)
    own = block_mask(window_mod if group.rank() == 1 else CAUSAL)
    with pytest.raises((ValueError, RuntimeError)) as error, seqpar.replace_sdpa(sharding, Mask.causal()):
        flex_attention(x, x, x, block_mask=own)
    return str(error.value)


def test_no_rank_waits_for_one_whose_mask_differs(own: OwnPool) -> None:
    first, differs, last = own.pool.run(3, differ_on_one_rank, own.port)
    assert "block_mask: the query at position" in differs
    for message in (first, last):
        assert "rank(s) [1] of the job left this call by an error" in message


SHARDING = seqpar.Sharding(TOKENS)
X = torch.randn(1, 2, TOKENS, 8)
CU = torch.tensor([0, TOKENS], dtype=torch.int32)
PACKED = X[0].transpose(0, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flex_attention(X, X, X, lambda s, b, h, i, j: s), "score_mod: a function of the scores"),
        (lambda: flex_attention(X, X, X, return_aux=AuxRequest(max_scores=True)), "max_scores is not computed"),
        (lambda: flex_attention(X, X, X, return_lse=True, return_aux=AuxRequest()), "expected one of them"),
        (lambda: flex_attention(X[0], X, X), r"query: expected a tensor \[batch, heads, seq, head_dim\], got shape"),
        (lambda: flex_attention(X, X[:, :1], X[:, :1]), "pass enable_gqa=True"),
        (lambda: flex_attention(X, X[:, :, :5], X[:, :, :5], return_lse=True), "5 keys that are whole"),
        (lambda: flex_attention(X, X[:, :, :4], X[:, :, :4]), r"pass replace_sdpa whole_keys=\[4\]"),
        (
            lambda: varlen_attn(PACKED, PACKED, PACKED, CU, CU, 131, 131, return_aux=VarlenAuxRequest(lse=True)),
            "return_aux: lse is not returned",
        ),
        (lambda: varlen_attn(X, PACKED, PACKED, CU, CU, 131, 131), r"query: expected a tensor \[tokens, heads"),
        (lambda: varlen_attn(PACKED, PACKED, PACKED, CU, CU, 131, 131, num_splits=1), "num_splits: not supported"),
    ],
)
def test_refused_arguments(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), seqpar.replace_sdpa(SHARDING, whole_keys=[5]):
        call()


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.kind, self.block = nn.Linear(16, 48), kind, block_mask(CAUSAL)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        if self.kind == "flex":
            y = flex_attention(q, k, v, block_mask=self.block)
        elif self.kind == "compiled flex":
            y = COMPILED(q, k, v, block_mask=self.block)
        else:
            q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
            out: Any = varlen_attn(q, k, v, CU, CU, TOKENS, TOKENS, window_size=(-1, 0))
            y = out.transpose(0, 1)[None]
        return x + y.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.attend, x, use_reentrant=False)
        return y


COMPILED: Any = torch.compile(flex_attention, backend="eager")  # made before any block


@pytest.mark.thorough(kind=["compiled flex"])
@pytest.mark.parametrize("kind", ["flex", "compiled flex", "varlen"])
def test_models_that_are_compiled_or_computed_again_in_backward(kind: str) -> None:
    model = Model(kind).double()
    x = torch.randn(1, TOKENS, 16, dtype=torch.float64)
    q, k, v = model.qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    y = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    expected = [y.detach(), *torch.autograd.grad(y.square().sum(), [*model.parameters()])]
    calls: list[Any] = [model, *([torch.compile(model.attend, backend="eager")] if kind != "compiled flex" else [])]
    for call in calls:
        model.zero_grad()
        with seqpar.replace_sdpa(SHARDING, Mask.causal()):
            y = call(x)
            y.square().sum().backward()
        for result, right in zip([y.detach(), *(p.grad for p in model.parameters())], expected, strict=True):
            assert_close(result, right, torch.float64)


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = flex_attention(x, x, x)
        return y


def test_compiled_code_without_graph_breaks_is_refused() -> None:
    code = torch.compile(Own(), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="_needs_fullgraph_false"), seqpar.replace_sdpa(SHARDING, Mask.causal()):
        code(X)


def in_a_thread(results: list[Any]) -> None:
    def call() -> None:
        try:
            results.append(flex_attention(X, X, X))
        except ValueError as error:
            results.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_the_function_of_pytorch() -> None:
    """It is back after the block, and it computes a module that attends by itself, and whole keys.

    Another thread has it too, if the block says which modules attend over the sequence.
    """
    code, own, shared = flex_attention.__code__, Own(), Own()
    right, results = flex_attention(X, X, X), []
    with seqpar.replace_sdpa(SHARDING, Mask.causal(), modules={own: None, shared: "sequence"}):
        assert flex_attention.__code__ is not code
        assert not torch.allclose(shared(X), right)
        results.append(own(X))
        in_a_thread(results)
    with seqpar.replace_sdpa(SHARDING, Mask.causal(), whole_keys=[5]):
        key = X[:, :, :5]
        assert_close(flex_attention(X, key, key), F.scaled_dot_product_attention(X, key, key))
        flex_attention(X, X, X)
        in_a_thread(results)
    assert "flex_attention: called in a thread outside" in str(results.pop())
    assert flex_attention.__code__ is code
    for result in results:
        assert_close(result, right)
