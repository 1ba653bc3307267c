"""torch.compile: a layer is one graph, new documents and lengths do not recompile it, and the operators are checked.

Mostly only the last rank compiles: the other ranks run eagerly, and must send the same.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Mask, Sharding
from seqpar.layers.rotary import rotary_length, rotary_table
from seqpar.megatron.sharded_vocab import VocabPart, vocab_cross_entropy, vocab_embedding, vocab_linear_cross_entropy
from seqpar.placement.placement import ANY_RANKS, ParallelContext
from seqpar.sharding.spec import AttentionSpec
from seqpar.strategies.operators import attention
from seqpar.strategies.tensor_operators import ChunkOptions, all_gather_linear, linear_reduce_scatter

from ..models import HEAD_DIM, HIDDEN, MLP, attention_layer, full, randomize
from ..pool import Pool, on_ranks
from ..reference import assert_close, nudge
from ..strategy_cases import LAYER_STRATEGIES, ONE_PER_CLASS, STRATEGIES

pytestmark = pytest.mark.slow
Run = Callable[..., Tensor]


class Block(torch.nn.Module):
    """An attention layer, an MLP (with "tp_sp", where it is tensor-parallel) and the mean over all ranks' tokens."""

    def __init__(self, options: dict[str, Any], rope: seqpar.RotaryEmbedding, has_mlp: bool, **where: Any) -> None:
        super().__init__()
        self.mlp: torch.nn.Module | None = None
        if has_mlp:
            self.mlp = (
                seqpar.MegatronMLP(HIDDEN, 30, bias=True, dtype=torch.float64, **where) if where else MLP("swiglu")
            )
        constants: dict[str, Any] = {"softmax_scale": 0.7, "alibi_slopes": [0.5, 0.02, 0.3, 0.0, 1.0, 0.1]}
        self.attention = attention_layer((6, 2), rope=rope, **constants, **options, **where)

    def forward(self, x: Tensor, mask: Mask, sharding: Sharding | None, positions: Tensor | None) -> Tensor:
        y: Tensor = self.attention(x, mask=mask, sharding=sharding, positions=positions)
        if self.mlp is not None:
            y = y + (self.mlp(y) if sharding is None else self.mlp(y, sharding))
        losses = y.square().sum(2)  # [b, s]
        if sharding is None:
            return losses[losses > 1].mean()
        return seqpar.token_loss(losses, (losses > 1).long() - 1, sharding=sharding, ignore_index=-1)


def documents(seq_len: int, step: int) -> Mask:
    """Other documents at each step, and another number of them; at one step some tokens that all queries see, and at
    the last one a window for half of the heads."""
    starts = sorted({0, *((7 * step + 11 * i) % seq_len for i in range(1 + step % 4))})
    packed = Mask.documents([*starts, seq_len])
    if step == 2:
        return Mask.by_heads([packed & Mask.sliding_window(6), packed])
    return packed | Mask.global_tokens(5) if step == 1 else packed


SMOOTHING = 0.1


class LanguageModel(torch.nn.Module):
    """An embedding and a head of a sharded vocabulary. Its output is a scalar of the losses, computed in two ways."""

    def __init__(self, vocabulary: int, group: ProcessGroup) -> None:
        super().__init__()
        where: dict[str, Any] = {"group": group, "dtype": torch.float64}
        self.vocabulary = vocabulary
        self.embedding = seqpar.VocabParallelEmbedding(vocabulary, HIDDEN, **where)
        self.head = seqpar.VocabParallelHead(HIDDEN, vocabulary, bias=True, **where)

    def forward(self, ids: Tensor, labels: Tensor, sharding: Sharding) -> Tensor:
        x = self.embedding(ids, sharding).sin()  # [b, s, hidden]
        logits = self.head(x, None, sharding)
        of_logits = seqpar.vocab_parallel_cross_entropy(
            logits, labels, self.vocabulary, sharding=sharding, label_smoothing=SMOOTHING
        )
        in_chunks = self.head(x, labels, sharding, chunk_tokens=5, label_smoothing=SMOOTHING)
        return of_logits.add(1).square().sum() + in_chunks.sin().sum()


def losses_on_one_device(ids_and_labels: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """What ``LanguageModel`` returns, and the gradients of the embedding's weight, the head's and its bias."""
    ids, labels = ids_and_labels
    embedding, weight, bias = leaves = [w.clone().requires_grad_() for w in weights]
    logits = F.linear(F.embedding(ids, embedding).sin(), weight, bias)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=SMOOTHING)
    value = losses.add(1).square().sum() + losses.sin().sum()
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def is_last(group: ProcessGroup) -> bool:
    return group.rank() == group.size() - 1


def counting(graphs: list[str], backend: str) -> Callable[..., Any]:
    """The compiler ``backend``, which adds each graph's code to ``graphs``."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph.code)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    return compile_graph


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}


@on_ranks
def compare_over_steps(
    group: ProcessGroup, options: dict[str, Any], scaling: dict[str, Any] | None, with_positions: bool
) -> int:
    """Compare a block with the block on one device, on new documents of new lengths, and what compiled code sends with
    what eager code sends; returns the number of graphs."""
    torch._dynamo.reset()
    torch.manual_seed(7)
    strategy = options["strategy"]
    rope = seqpar.RotaryEmbedding(HEAD_DIM, scaling=scaling)
    one_device = Block({}, rope, strategy == "tp_sp")
    randomize(one_device)
    nudged = copy.deepcopy(one_device)
    nudge(nudged.parameters())
    block = Block(options, rope, strategy == "tp_sp", group=group)
    block.load_state_dict(one_device.state_dict())
    graphs: list[str] = []
    compiled: Any = torch.compile(block, backend=counting(graphs, "aot_eager"), fullgraph=True)
    for step in range(3):
        seq_len = 33 + 7 * step
        mask, sharding = documents(seq_len, step), Sharding(seq_len, "zigzag", group=group, strategy=strategy)
        torch.manual_seed(step)
        tokens = torch.randn(2, seq_len, HIDDEN, dtype=torch.float64, requires_grad=True)
        positions = torch.randint(40 + 9 * step, (2, seq_len)) if with_positions else None
        results = []
        for one in (one_device, nudged):
            one.zero_grad()
            tokens.grad = None
            out = one(tokens, mask, None, positions)
            out.backward()
            results.append([out.detach(), tokens.grad, *(p.grad for p in one.parameters())])
        block.zero_grad()
        x = sharding.shard(tokens.detach()).requires_grad_()
        own_positions = None if positions is None else sharding.shard(positions)
        for local in (x, own_positions):
            if local is not None:
                torch._dynamo.mark_dynamic(local, 1)
        with seqpar.trace() as sent:
            y = (compiled if is_last(group) else block)(x, mask, sharding, own_positions)
        with seqpar.trace() as eagerly_sent:
            block(x, mask, sharding, own_positions)
        assert with_positions or sent.bytes_sent == eagerly_sent.bytes_sent
        y.backward()
        seqpar.sync_gradients(block, group=group)
        assert x.grad is not None
        found = [y.detach(), sharding.unshard(x.grad / group.size()), *(p.grad for p in block.parameters())]
        assert_close(found, results[0], rounded=results[1])
    return len(graphs)


# A strategy's graph has one operator for attention, whatever the number of ranks. A hybrid needs four of them.
# With dynamic angles, all ranks' positions together say how long the sequence is.
LAYERS = [
    ("tp_sp", 1, None, False),
    ("ulysses", 2, None, False),
    ("hybrid", 4, None, False),
    ("auto", 4, None, False),
    ("ring", 2, DYNAMIC, True),
    ("tp_sp", 2, DYNAMIC, True),
    ("activations", 2, DYNAMIC, True),
    ("all_gather", 2, DYNAMIC, False),
]


@pytest.mark.thorough(strategy=["tp_sp", "ulysses", "hybrid", "auto", "activations", "all_gather"])
@pytest.mark.parametrize(
    ("strategy", "ranks", "scaling", "with_positions"),
    LAYERS,
    ids=lambda x: x["rope_type"] if isinstance(x, dict) else str(x),
)
def test_a_layer_is_one_graph_over_steps(
    pool: Pool, strategy: str, ranks: int, scaling: dict[str, Any] | None, with_positions: bool
) -> None:
    options = LAYER_STRATEGIES.get(strategy, {"strategy": strategy})
    graphs = pool.run(ranks, compare_over_steps, options, scaling, with_positions)
    assert graphs == [0] * (ranks - 1) + [1]


def test_every_layer_class_is_compiled() -> None:
    assert {strategy for strategy, *_ in LAYERS} == {*ONE_PER_CLASS, "activations", "auto"}


@on_ranks
def compare_language_models(group: ProcessGroup, vocabulary: int, steps: int) -> int:
    """Compare a compiled model with one device on sequences of new lengths; returns the number of graphs."""
    torch._dynamo.reset()
    torch.manual_seed(7)
    shapes = (vocabulary, HIDDEN), (vocabulary, HIDDEN), (vocabulary,)
    weights = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    model = LanguageModel(vocabulary, group)
    names = "embedding.weight", "head.weight", "head.bias"
    model.load_state_dict(dict(zip(names, weights, strict=True)))
    graphs: list[str] = []
    compiled: Any = torch.compile(model, backend=counting(graphs, "aot_eager"), fullgraph=True)
    for step in range(steps):
        seq_len = 31 + 3 * step
        sharding = Sharding(seq_len, "zigzag", group=group, strategy="tp_sp")
        tokens = torch.randint(vocabulary, (2, 2, seq_len))
        tokens[1, :, 3:6] = -100
        ids, labels = (sharding.shard(x) for x in tokens)
        for x in (ids, labels):
            torch._dynamo.mark_dynamic(x, 1)
        model.zero_grad()
        value = (compiled if is_last(group) else model)(ids, labels, sharding)
        value.backward()
        found = [value.detach(), *(model.get_parameter(name).grad for name in names)]
        for actual, want in zip(found, losses_on_one_device(tokens, weights), strict=True):
            assert actual is not None
            assert_close(full(actual), want)
    return len(graphs)


# Uneven parts of the vocabulary, and more ranks than entries.
@pytest.mark.thorough(ranks=[2, 4])
@pytest.mark.parametrize(("ranks", "vocabulary"), [(1, 37), (2, 37), (4, 3)])
def test_a_sharded_vocabulary_is_one_graph_over_steps(pool: Pool, ranks: int, vocabulary: int) -> None:
    assert pool.run(ranks, compare_language_models, vocabulary, 4) == [0] * (ranks - 1) + [1]


@on_ranks
def compare_functions(group: ProcessGroup, strategy: str) -> None:
    """Every argument of the function, under ``dynamic=True``."""
    options = STRATEGIES[strategy]
    torch._dynamo.reset()
    torch.manual_seed(1)
    sinks = torch.randn(6, dtype=torch.float64, requires_grad=True)
    slopes = torch.rand(2, 6, dtype=torch.float64)

    def loss(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sharding: Sharding, seed: int) -> Tensor:
        out, lse = seqpar.attention(
            q * 2, k, v, mask=mask, sharding=sharding, sinks=sinks, alibi_slopes=slopes, softcap=3.0,
            softmax_scale=0.7, return_lse=True, dropout_p=0.25, dropout_seed=seed, **options,
        )  # fmt: skip
        plain = seqpar.attention(q, k, v, mask=mask, sharding=sharding, **options)
        return out.sin().sum() + lse.cos().sum() + plain.square().sum()

    compiled: Any = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    for step in range(4):
        seq_len = 33 + 5 * step
        sharding, mask = Sharding(seq_len, "striped", group=group), documents(seq_len, step)
        full = [torch.randn(2, seq_len, *shape, dtype=torch.float64) for shape in ((6, 4), (2, 4), (2, 6))]
        results = []
        for run in (loss, compiled if is_last(group) else loss):
            q, k, v = (sharding.shard(x).requires_grad_() for x in full)
            sinks.grad = None
            with torch._dynamo.config.patch(error_on_recompile=True):
                value = run(q, k, v, mask, sharding, 5 + step)
            value.backward()
            results.append([value.detach(), q.grad, k.grad, v.grad, sinks.grad])
        for expected, actual in zip(*results, strict=True):
            assert_close(actual, expected)


@pytest.mark.thorough(rows=[1])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_slopes_of_other_numbers_of_heads(dynamic: bool | None, rows: int) -> None:
    """One function is called with modules that have other numbers of heads, as the layers of one model may have."""
    torch._dynamo.reset()
    sharding = Sharding(12)

    def attend(module: torch.nn.Module, q: Tensor) -> Tensor:
        return seqpar.ring_attention(q, q, q, alibi_slopes=module.get_buffer("slopes"), sharding=sharding)

    compiled = torch.compile(attend, backend="eager", fullgraph=True, dynamic=dynamic)
    for heads in (4, 8, 6):
        module = torch.nn.Module()
        module.register_buffer("slopes", torch.rand(heads) if rows == 1 else torch.rand(rows, heads))
        q = torch.randn(rows, 12, heads, 8)
        assert torch.equal(compiled(module, q), attend(module, q))


def test_the_function_is_one_graph(pool: Pool) -> None:
    pool.run(2, compare_functions, "all_gather in chunks")


RECOMPUTED: dict[str, dict[str, Any]] = {
    "checkpoint": {"use_reentrant": False},
    "keep_attention": {"use_reentrant": False, "context_fn": seqpar.keep_attention},
}


@on_ranks
def compare_dropout(group: ProcessGroup, strategy: str, how: str) -> None:
    """Compare a layer with a compiled one, which draws the same seeds. Each rank's generator has another state."""
    torch._dynamo.reset()
    torch.manual_seed(7)
    options = LAYER_STRATEGIES[strategy]
    layer = seqpar.ParallelAttention(
        hidden_size=8, num_heads=2, dropout_p=0.25, group=group, dtype=torch.float64, **options
    )

    def recomputed(*args: Any) -> Any:
        return checkpoint(layer, *args, **RECOMPUTED[how])

    other: Any = recomputed if how in RECOMPUTED else layer
    if is_last(group):
        other = torch.compile(other, backend="aot_eager", fullgraph=True, dynamic=True)
    if how == "checkpoint around it":
        other = partial(checkpoint, other, use_reentrant=False)
    for step in range(2):
        seq_len = 35 + 7 * step
        sharding = Sharding(seq_len, "zigzag", group=group, strategy="tp_sp" if strategy == "tp_sp" else None)
        full = torch.randn(2, seq_len, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        results = []
        for run in (layer, other):
            x = sharding.shard(full).requires_grad_()
            layer.zero_grad()
            torch.manual_seed(10 * step + group.rank())
            y = run(x, documents(seq_len, step), sharding)
            y.sin().sum().backward()
            results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
        for expected, actual in zip(*results, strict=True):
            assert expected is not None and actual is not None
            assert_close(actual, expected)


DROPOUT = [("ring", 2, how) for how in (*RECOMPUTED, "checkpoint around it")]
DROPOUT += [("tp_sp", 2, "plain"), ("activations", 2, "checkpoint")]


@pytest.mark.thorough(strategy=["tp_sp", "activations"])
@pytest.mark.thorough(how=["checkpoint around it", "keep_attention"])
@pytest.mark.parametrize(("strategy", "ranks", "how"), DROPOUT)
def test_compiled_dropout_draws_one_seed(pool: Pool, strategy: str, ranks: int, how: str) -> None:
    """The mask is eager code's, in forward and in backward, also where backward computes the graph again."""
    pool.run(ranks, compare_dropout, strategy, how)


@on_ranks
def check_linearity(group: ProcessGroup) -> None:
    """Attention is linear in v under one mask: <out, dout> = <v, dv>. Inductor has random numbers of its own."""
    torch._dynamo.reset()
    torch.manual_seed(2)

    def attend(q: Tensor, v: Tensor, sharding: Sharding) -> Tensor:
        out = seqpar.attention(q, q, v, sharding=sharding, strategy="local", dropout_p=0.5)
        assert isinstance(out, Tensor)
        return out

    def twice(q: Tensor, v: list[Tensor], sharding: Sharding) -> tuple[Tensor, Tensor]:
        return attend(q, v[0], sharding), checkpoint(attend, q, v[1], sharding, use_reentrant=False)

    q, *values = (torch.randn(1, 20, 2, 4, dtype=torch.float64) for _ in range(3))
    v, dout = [x.requires_grad_() for x in values], torch.randn(2, 1, 20, 2, 4, dtype=torch.float64).unbind()
    # The graph needs one C++ kernel, for the random numbers. Without vector instructions, inductor compiles no others.
    options = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False, "compile_threads": 1}
    compiled: Any = torch.compile(twice, fullgraph=True, options=options)
    first, second = (compiled(q, v, Sharding(20, group=group)) for _ in range(2))
    for x, dx, out, again, grad in zip(v, torch.autograd.grad(first, v, dout), first, second, dout, strict=True):
        assert_close((x * dx).sum(), (out * grad).sum())
        assert not torch.equal(out, again)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.thorough
def test_inductor_has_one_mask_in_forward_and_backward(pool: Pool) -> None:
    pool.run(1, check_linearity)


def test_dropout_raises_where_nothing_is_kept_for_backward() -> None:
    torch._dynamo.reset()
    layer = seqpar.LocalAttention(8, 2, dropout_p=0.5)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with (
        torch._functorch.config.patch(activation_memory_budget=0.0),
        pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="activation memory budget of 0"),
    ):
        compiled(torch.randn(1, 4, 8), sharding=Sharding(4))


@on_ranks
def check_operator(group: ProcessGroup, strategy: str) -> None:
    options = dict(STRATEGIES[strategy])
    call = AttentionSpec(options.pop("strategy"), tuple(options.items()), return_lse=True, returns_saved=True)
    sharding = Sharding(22, "zigzag", group=group)
    where = Mask.causal(), sharding, ANY_RANKS
    torch.manual_seed(group.rank())
    shapes = (6, 4), (2, 4), (2, 3)
    q, k, v = (torch.randn(1, sharding.seq_local, *shape, requires_grad=True) for shape in shapes)
    sinks = torch.randn(6, requires_grad=True)
    if strategy == "ring":
        torch.library.opcheck(attention, (q, k, v, sinks, None, None, None, call, *where))
    else:
        dropout, seed = replace(call, dropout_p=0.25, draws_seed=True), torch.tensor(group.rank())
        torch.library.opcheck(attention, (q, k, v, sinks, None, seed, None, dropout, *where))
    # Latent attention: 5 numbers, a rotated key of 2, and a weight that makes 2 and 3 numbers for each head of them.
    latents, rotated = (torch.randn(1, sharding.seq_local, 1, n, requires_grad=True) for n in (5, 2))
    weight = torch.randn(6, 2 + 3, 5, requires_grad=True)
    tensors = q, latents, rotated, sinks, None, None, weight
    torch.library.opcheck(attention, (*tensors, call, *where))


@pytest.mark.thorough(strategy=["ulysses"])
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_opcheck(pool: Pool, strategy: str) -> None:
    pool.run(2, check_operator, strategy)


@on_ranks
def check_tensor_parallel_operators(group: ProcessGroup) -> None:
    sharding = Sharding(22, "zigzag", group=group, strategy="tp_sp")
    ranks = ParallelContext(None, group)
    call = ChunkOptions("ring", AttentionSpec("local", tensor_parallel=True))
    x = torch.randn(1, sharding.seq_local, 8, requires_grad=True)
    weights = [torch.randn(n, 8, requires_grad=True) for n in (4, 6)]
    torch.library.opcheck(all_gather_linear, (x, weights, sharding, ranks, call))
    full, weight = torch.randn(1, 22, 4, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    torch.library.opcheck(linear_reduce_scatter, (full, weight, sharding.seq_local, sharding, ranks, call))


def test_opcheck_of_tensor_parallel_operators(pool: Pool) -> None:
    pool.run(2, check_tensor_parallel_operators)


@on_ranks
def check_vocabulary_operators(group: ProcessGroup) -> None:
    sharding, ranks = Sharding(22, "zigzag", group=group, strategy="tp_sp"), ParallelContext(None, group)
    part = VocabPart.of_rank(11, group)
    ids = sharding.shard(torch.arange(22)[None] % 11)
    weight, bias = torch.randn(part.size, 8, requires_grad=True), torch.randn(part.size, requires_grad=True)
    options = ChunkOptions("ring")
    torch.library.opcheck(vocab_embedding, (ids, weight, part, sharding, ranks, options))
    x, logits = (torch.randn(1, *shape, requires_grad=True) for shape in ((sharding.seq_local, 8), (22, part.size)))
    torch.library.opcheck(vocab_cross_entropy, (logits, ids, 11, -100, 0.1, sharding, options))
    for given in (bias, None):
        constants = 4, 0.1, part, sharding, ranks, options
        torch.library.opcheck(vocab_linear_cross_entropy, (x, weight, given, ids, *constants))


def test_opcheck_of_vocabulary_operators(pool: Pool) -> None:
    pool.run(2, check_vocabulary_operators)


@on_ranks
def check_rotary_operators(group: ProcessGroup) -> None:
    sharding, rope = Sharding(22, "zigzag", group=group), seqpar.RotaryEmbedding(4, scaling=DYNAMIC)
    x, positions = torch.randn(1, sharding.seq_local, 8), sharding.positions()
    for given in (positions, None):
        torch.library.opcheck(rotary_length, (x, given, sharding))
    for length in (torch.tensor(22), None):
        torch.library.opcheck(rotary_table, (positions, rope._in_operators, torch.float64, x.device, length))


def test_opcheck_of_rotary_operators(pool: Pool) -> None:
    pool.run(2, check_rotary_operators)


@on_ranks
def saved_tables(group: ProcessGroup, scaling: dict[str, Any] | None) -> tuple[int, int]:
    """How many cosines and sines two layers save for backward: in eager code, and in compiled code (last rank)."""
    torch._dynamo.reset()
    sharding, rope = Sharding(22, "zigzag", group=group), seqpar.RotaryEmbedding(HEAD_DIM, scaling=scaling)
    layers = torch.nn.ModuleList(
        seqpar.RingAttention(HIDDEN, 2, head_dim=HEAD_DIM, group=group, rope=rope) for _ in range(2)
    )
    positions, x = sharding.positions(), torch.randn(1, sharding.seq_local, HIDDEN, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = x + layer(x, sharding=sharding, positions=positions)
        return x

    def count(each: Run) -> tuple[int, Tensor]:
        saved: list[Tensor] = []

        def save(t: Tensor) -> Tensor:
            saved.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
            y = each(x)
        tables = {t.data_ptr() for t in saved if t.shape == (1, sharding.seq_local, 1, HEAD_DIM // 2)}
        return len(tables), torch.autograd.grad(y.square().sum(), x)[0]

    compiled = run
    if is_last(group):
        compiled = torch.compile(run, backend="aot_eager_decomp_partition", fullgraph=True)
    (in_eager, gradient), (in_compiled, same) = count(run), count(compiled)
    assert_close(gradient, same)
    return in_eager, in_compiled


@pytest.mark.thorough(scaling=[DYNAMIC])
@pytest.mark.parametrize("scaling", [None, DYNAMIC], ids=["default", "dynamic"])
def test_layers_do_not_save_their_rotary_tables(pool: Pool, scaling: dict[str, Any] | None) -> None:
    assert pool.run(2, saved_tables, scaling) == [(2, 2), (2, 0)]


@on_ranks
def graphs_around(group: ProcessGroup) -> int:
    """The number of graphs around a layer without a sharding."""
    torch._dynamo.reset()
    layer = seqpar.RingAttention(16, 2, group=group, layout="contiguous")
    graphs: list[str] = []
    run = torch.compile(lambda x: layer(x * 2) * 2, backend=counting(graphs, "eager"))
    x = torch.randn(1, 8, 16)
    assert_close(run(x), layer(x * 2) * 2)
    return len(graphs)


def test_a_handshake_breaks_the_graph(pool: Pool) -> None:
    assert pool.run(2, graphs_around) == [2, 2]


class Broken(nn.Module):
    """A layer after a graph break, in the same frame."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, sharding: seqpar.Sharding) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        y: Tensor = self.layer(x, sharding=sharding)
        return y.cos()


@on_ranks
def compiled_as_by_default(group: ProcessGroup, strategy: str) -> None:
    """Two models with other numbers of heads in one process. After the break, no operator's own code is traced."""
    torch._dynamo.reset()
    for heads in (4, 2):
        torch.manual_seed(3)
        where: Any = {"group": group, "dtype": torch.float64}
        if strategy == "mlp":
            layer: nn.Module = seqpar.MegatronMLP(16, 8 * heads, **where)
        else:
            layer = seqpar.ParallelAttention(strategy, 16, heads, **where)
        name: Any = "tp_sp" if strategy in ("tp_sp", "mlp") else None
        sharding = seqpar.Sharding(22, "zigzag", group=group, strategy=name)
        model, x = Broken(layer), torch.randn(1, 22, 16, dtype=torch.float64)
        results = []
        for run in (model, torch.compile(model, backend="eager") if is_last(group) else model):
            x_local = sharding.shard(x).requires_grad_()
            y = run(x_local, sharding)
            y.sum().backward()
            results.append((y.detach(), x_local.grad))
        assert_close(results[1], results[0])


@pytest.mark.thorough(strategy=["ulysses", "tp_sp", "mlp"])
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "hybrid", "context_parallel", "tp_sp", "mlp", "auto"])
def test_compiled_with_a_graph_break(pool: Pool, strategy: str) -> None:
    pool.run(2, compiled_as_by_default, strategy)


def test_operators_stay_out_of_cuda_graphs() -> None:
    """``mode="reduce-overhead"`` puts nothing that waits for messages into a CUDA graph."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("seqpar::")]
    assert "seqpar::attention" in names
    for name in names:
        tags = getattr(torch.ops.seqpar, name.removeprefix("seqpar::")).default.tags
        assert torch.Tag.cudagraph_unsafe in tags, name
