"""``seqpar.sdpa`` and ``seqpar.replace_sdpa``: models that call PyTorch's attention compute one device's results."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointFunction, checkpoint

import seqpar
from seqpar import Mask

from ..pool import Pool, on_ranks
from ..reference import assert_close

TOKENS = 67
MASKS = {
    "full": (False, None),
    "causal": (True, None),
    "window": (False, Mask.sliding_window(9, 4)),
    "documents": (False, Mask.documents([0, 5, 40, 50, TOKENS])),
}


@on_ranks
def call(group: ProcessGroup, strategy: Any, layout: Any, seed: int) -> None:
    """Every mask with grouped heads and a scale: out, dq, dk and dv of PyTorch's function in float64."""
    for is_causal, mask in MASKS.values():
        generator = torch.Generator().manual_seed(seed)
        shapes = (2, 4, TOKENS, 8), (2, 2, TOKENS, 8), (2, 2, TOKENS, 6), (2, 4, TOKENS, 6)
        q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        sharding = seqpar.Sharding(TOKENS, layout, group=group)
        results = []
        for inputs, arguments in (
            ([q, k, v, dout], {}),
            ([sharding.shard(x, 2) for x in (q, k, v, dout)], {"sharding": sharding, "mask": mask}),
        ):
            x, y, z = (t.detach().requires_grad_() for t in inputs[:3])
            function: Any = seqpar.sdpa if arguments else F.scaled_dot_product_attention
            dense = mask.dense(TOKENS) if mask is not None and not arguments else None
            causal = is_causal and dense is None
            options = {"strategy": strategy} if arguments else {}
            out = function(x, y, z, dense, 0.0, causal, scale=0.3, enable_gqa=True, **arguments, **options)
            results.append([out.detach(), *torch.autograd.grad(out, (x, y, z), inputs[3])])
        for expected, result in zip(*results, strict=True):
            assert_close(result, sharding.shard(expected, 2), torch.float64)


@pytest.mark.parametrize(("world", "strategy", "layout"), [(2, "ring", "zigzag"), (3, "ulysses", "contiguous")])
def test_the_function(pool: Pool, world: int, strategy: str, layout: str) -> None:
    pool.run(world, call, strategy, layout, torch.seed() % 2**31)


class Attention(nn.Module):
    """nanoGPT's: heads from one projection."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(16, 48), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + y.transpose(1, 2).flatten(2)


class CrossAttention(nn.Module):
    """Attention over its own tokens, and over a text that every rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = Attention(causal=False), nn.Linear(16, 32)
        self.text = nn.Parameter(torch.randn(1, 7, 16))

    def forward(self, x: Tensor) -> Tensor:
        q = self.own(x).unflatten(2, (2, 8)).transpose(1, 2)
        k, v = self.other(self.text.expand(len(x), -1, -1)).unflatten(2, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool = False) -> None:
        super().__init__()
        self.layer, self.use_reentrant = Attention(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.layer, x, use_reentrant=self.use_reentrant)
        return y


def compiled() -> nn.Module:
    layer = Attention()
    layer.forward = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")  # type: ignore[method-assign]
    return layer


MODELS: dict[str, tuple[Callable[[], nn.Module], Mask | None]] = {
    "nanoGPT": (Attention, None),
    "nanoGPT, documents": (Attention, Mask.documents([0, 20, TOKENS], causal=False)),
    "cross-attention": (CrossAttention, None),
    "nn.TransformerEncoderLayer": (encoder, None),
    "checkpointed": (Checkpointed, None),
    "compiled": (compiled, None),
}


@on_ranks
def train(group: ProcessGroup, name: str, seed: int) -> None:
    """Output and weight gradients of a model are one device's, twice, so that compiled code sees a second block."""
    make, mask = MODELS[name]
    torch.manual_seed(seed)
    model = make().double()
    for _ in range(2):
        x, dout = torch.randn(2, 2, TOKENS, 16, dtype=torch.float64)
        sharding, gradients, outputs = seqpar.Sharding(TOKENS, "zigzag", group=group), [], []
        for sharded in (False, True):
            model.zero_grad()
            where = sharding if sharded else seqpar.Sharding(TOKENS, strategy="local")
            whole_keys = [7] if name == "cross-attention" else []
            block: Any = nullcontext()
            if sharded or mask is not None:
                strategy: Any = "ring" if sharded else "local"
                block = seqpar.replace_sdpa(where, mask, whole_keys=whole_keys, strategy=strategy)
            with block:
                y = model(sharding.shard(x) if sharded else x)
                y.backward(sharding.shard(dout) if sharded else dout)
            outputs.append(y.detach() if sharded else sharding.shard(y.detach()))
            if sharded:
                seqpar.sync_gradients(model, group=group, reduce="sum")
            gradients.append([p.grad for p in model.parameters()])
        assert_close(outputs[1], outputs[0], torch.float64)
        for result, expected in zip(gradients[1], gradients[0], strict=True):
            assert_close(result, expected, torch.float64)


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow if x == "compiled" else ()) for x in MODELS])
def test_models_without_a_changed_line(pool: Pool, name: str) -> None:
    pool.run(2, train, name, torch.seed() % 2**31)


# What each module's calls are


class Video(nn.Module):
    """Attention inside of each frame, whose length is the number of tokens of a rank, and over the sequence."""

    def __init__(self, tokens: int, checkpointed: bool) -> None:
        super().__init__()
        self.spatial, self.temporal = Attention(), Attention()
        self.last = nn.MultiheadAttention(16, 2, batch_first=True)
        self.tokens, self.checkpointed = tokens, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        frames = x.unflatten(1, (-1, self.tokens))
        x = self.spatial(frames.flatten(0, 1)).view_as(x)
        x = checkpoint(self.temporal, x, use_reentrant=False) if self.checkpointed else self.temporal(x)
        y: Tensor = self.last(x, x, x, need_weights=False)[0]
        return y


@on_ranks
def train_by_module(group: ProcessGroup, checkpointed: bool, seed: int) -> None:
    """One module has PyTorch's own attention, one a mask of its own, and one the mask of the block."""
    torch.manual_seed(seed)
    length = 24
    tokens = length // group.size()
    model = Video(tokens, checkpointed).double()
    x, dout = torch.randn(2, 2, length, 16, dtype=torch.float64)
    results = []
    for sharding in (seqpar.Sharding(length, strategy="local"), seqpar.Sharding(length, "contiguous", group=group)):
        window: Mask = Mask.sliding_window(5)
        modules: Any = {model.spatial: None, model.temporal: window, model.last: "sequence"}
        strategy: Any = "local" if sharding.sequence_group is None else "ring"
        model.zero_grad()
        with seqpar.replace_sdpa(sharding, Mask.prefix_lm(7), modules=modules, strategy=strategy):
            y = model(sharding.shard(x))
            y.backward(sharding.shard(dout))
        if sharding.sequence_group is not None:
            seqpar.sync_gradients(model, group=group, reduce="sum")
            y = sharding.unshard(y)
        results.append([y.detach(), *(p.grad for p in model.parameters())])
    for expected, result in zip(*results, strict=True):
        assert_close(result, expected, torch.float64)
    # The masks are where they should be.
    frames = model.spatial(x.view(-1, tokens, 16)).view_as(x)
    q, k, v = model.temporal.qkv(frames).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, (window & Mask.causal()).dense(length))
    y = frames + y.transpose(1, 2).flatten(2)
    y = model.last(y, y, y, need_weights=False, attn_mask=~Mask.prefix_lm(7).dense(length))[0]
    assert_close(results[0][0], y.detach(), torch.float64)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_the_calls_of_a_module_are(pool: Pool, checkpointed: bool) -> None:
    pool.run(3, train_by_module, checkpointed, torch.seed() % 2**31)


class Elsewhere(nn.Module):
    """Attention in another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor) -> Tensor:
        results: list[Tensor] = []
        thread = threading.Thread(target=lambda: results.append(self.inner(x)))
        thread.start()
        thread.join()
        return results[0]


class Traced(nn.Module):
    """Attention in TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.trace(Attention(), torch.randn(1, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


TRACED = Traced()


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = compiled()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


class Twice(nn.Module):
    """A module whose attention is replaced, and another one."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = Attention(), other

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.other(self.one(x))
        return y


def modules_of(other: nn.Module, named: Callable[[nn.Module], dict[nn.Module, Any]]) -> None:
    model = Twice(other)
    with seqpar.replace_sdpa(SHARDING, modules={model.one: "sequence"} | named(other)):
        model(torch.randn(1, 8, 16))


@pytest.mark.parametrize(
    ("make", "named", "message"),
    [
        (Elsewhere, lambda m: {m: "sequence"}, r"Elsewhere\(? called no .* could replace"),
        (Traced, lambda m: {m: "sequence"}, "Attention.*: a module of TorchScript, which computes attention"),
        (Traced, lambda m: {}, "outside of the given modules"),
        (Attention, lambda m: {}, "outside of the given modules"),
        (Attention, lambda m: {m.qkv: "sequence"}, "Linear.* called no|outside of the given modules"),
        (nn.Identity, lambda m: {m: None, Attention(): "sequence"}, "1 of 3 modules were not called .* Attention"),
        (Attention, lambda m: {"one": "sequence"}, "key 'one' is no nn.Module"),
        (Attention, lambda m: {m: "local"}, "'local' for Attention"),
    ],
)
def test_attention_that_is_not_replaced_is_noticed(make: Any, named: Any, message: str) -> None:
    with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
        modules_of(make(), named)


def test_the_hooks_end_with_the_block() -> None:
    model = Attention()
    with pytest.raises(TypeError), seqpar.replace_sdpa(SHARDING, modules={model: "sequence"}):
        model("no tensor")
    assert not model._forward_hooks and not model._forward_pre_hooks
    model(torch.randn(1, 5, 16))


def test_a_new_block_compiles_nothing_again() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    code = torch.compile(Attention(), backend=backend, fullgraph=True)
    for _ in range(3):
        with seqpar.replace_sdpa(SHARDING):
            code(torch.randn(1, 8, 16))
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("before", [False, True], ids=["new", "compiled before"])
def test_modules_in_compiled_code(before: bool) -> None:
    """Compiled code is right, or refused."""
    model, x = Twice(Attention()), torch.randn(1, 8, 16)
    torch._dynamo.reset()
    code: Any = torch.compile(model, backend="aot_eager")
    if before:
        code(x)
    for kind in ("sequence", Mask.causal(), Mask.sliding_window(0)):
        results = []
        for call in (model, code):
            refusals = [ValueError, RuntimeError] if call is code else []
            modules: Any = {model.one: kind, model.other: "sequence"}
            with suppress(*refusals), seqpar.replace_sdpa(SHARDING, modules=modules):
                results.append(call(x))
        for result in results:
            assert_close(result, results[0])


# Refused

SHARDING = seqpar.Sharding(8)
X = torch.randn(1, 2, 8, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attn_mask": torch.ones(8, 8, dtype=torch.bool)}, "attn_mask: a matrix .* Mask.documents"),
        ({"is_causal": True, "mask": Mask.full()}, "expected one of them"),
        ({"sharding": None}, "sharding=None: expected"),
        ({"k": X[:, :1], "v": X[:, :1]}, "pass enable_gqa=True"),
        ({"q": X[0]}, r"q: expected a tensor \[batch, heads, seq, head_dim\], got shape \(2, 8, 4\)"),
        ({"q": X[:, :, :4], "k": X[:, :, :4], "v": X[:, :, :4]}, "4 tokens"),
    ],
)
def test_refused_calls(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        seqpar.sdpa(**{"q": X, "k": X, "v": X, "sharding": SHARDING, **arguments})


def cross_attention() -> None:
    F.scaled_dot_product_attention(X, X[:, :, :3], X[:, :, :3])


def causal_over_whole_keys() -> None:
    F.scaled_dot_product_attention(X, X[:, :, :5], X[:, :, :5], is_causal=True)


def weights() -> None:
    nn.MultiheadAttention(8, 2)(*[torch.randn(8, 1, 8)] * 3)


def no_attention() -> None:
    torch.softmax(X, -1)


def fused() -> None:
    F.scaled_dot_product_attention(X, X, X)
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(X, X, X)


def fused_by_torch() -> None:
    F.scaled_dot_product_attention(X, X, X)
    torch._scaled_dot_product_attention_math(X, X, X)


def reentrant_checkpoint() -> None:
    Checkpointed(use_reentrant=True)(torch.randn(1, 8, 16, requires_grad=True))


def test_blocks_of_two_threads_end_in_any_order() -> None:
    """The block that began last still refuses reentrant checkpointing, and the original is back after it."""
    before, began, ended = vars(CheckpointFunction)["forward"], threading.Event(), threading.Event()

    def first() -> None:
        with suppress(ValueError, RuntimeError), seqpar.replace_sdpa(seqpar.Sharding(8)):
            began.set()
            ended.wait()

    thread = threading.Thread(target=first)
    thread.start()
    began.wait()
    with seqpar.replace_sdpa(seqpar.Sharding(8)):
        ended.set()
        thread.join()
        with pytest.raises(ValueError, match="use_reentrant=False"):
            reentrant_checkpoint()
        Attention()(torch.randn(1, 8, 16))
    assert vars(CheckpointFunction)["forward"] is before


def test_attention_of_another_thread_meanwhile_is_its_own() -> None:
    """With ``modules``, even while the block's backward computes a layer again."""
    results: list[Tensor] = []

    def elsewhere(*args: Any) -> None:
        thread = threading.Thread(target=lambda: results.append(F.scaled_dot_product_attention(X[:, :, :3], X, X)))
        thread.start()
        thread.join()

    model = Checkpointed()
    model.layer.register_forward_pre_hook(elsewhere)
    before = F.scaled_dot_product_attention
    with seqpar.replace_sdpa(seqpar.Sharding(8), modules={model.layer: "sequence"}):
        model(torch.randn(1, 8, 16)).sum().backward()
    assert F.scaled_dot_product_attention is before
    assert len(results) == 2
    for y in results:
        assert_close(y, F.scaled_dot_product_attention(X[:, :, :3], X, X))


def in_another_thread() -> None:
    """Beside attention in the thread of the block."""
    errors: list[BaseException] = []

    def call() -> None:
        try:
            F.scaled_dot_product_attention(X, X, X)
        except ValueError as error:
            errors.append(error)

    F.scaled_dot_product_attention(X, X, X)
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    for error in errors:
        raise error


def traced() -> None:
    """Beside attention that is not traced."""
    F.scaled_dot_product_attention(X, X, X)
    TRACED(torch.randn(1, 8, 16))


def reentrant_with_gradients() -> None:
    checkpoint(torch.enable_grad()(Attention()), torch.randn(1, 8, 16, requires_grad=True), use_reentrant=True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (cross_attention, r"8 queries and 3 keys: .* whole_keys=\[3\]"),
        (causal_over_whole_keys, "8 sharded queries with 5 keys"),
        (weights, "need_weights=False"),
        (fused, r"_scaled_dot_product_flash_attention_for_cpu: .* seqpar\.attention with a seqpar\.Mask; .* modules="),
        (fused_by_torch, "_scaled_dot_product_attention_math.*: .* seqpar.attention"),
        (in_another_thread, "called in a thread outside of a replace_sdpa block"),
        (traced, "Attention.*: a module of TorchScript, which computes attention over this rank's tokens only"),
        (no_attention, "no token has seen another rank's tokens"),
        (reentrant_checkpoint, "use_reentrant=False"),
        (reentrant_with_gradients, "use_reentrant=False"),
    ],
)
def test_refused_models(body: Callable[[], None], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message), seqpar.replace_sdpa(SHARDING, whole_keys=[5]):
        body()


def test_whole_keys_of_a_shard_s_length() -> None:
    with pytest.raises(ValueError, match="keys of this length could be either"):
        seqpar.replace_sdpa(SHARDING, whole_keys=[8])


def test_a_backward_after_the_block_is_noticed() -> None:
    """The recomputation would see this rank's tokens only."""
    model, x = Checkpointed(), torch.randn(1, 8, 16)
    with seqpar.replace_sdpa(SHARDING):
        y = model(x)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        y.sum().backward()


def test_the_block_ends() -> None:
    with seqpar.replace_sdpa(SHARDING):
        F.scaled_dot_product_attention(X, X, X)
    F.scaled_dot_product_attention(X, X[:, :, :3], X[:, :, :3])
    Checkpointed(use_reentrant=True)(torch.randn(1, 8, 16, requires_grad=True))


def test_a_block_in_a_checkpointed_function() -> None:
    """The backward of reentrant checkpointing runs the block again."""
    layer, x = Attention(), torch.randn(1, 8, 16, requires_grad=True)

    def in_block(x: Tensor) -> Tensor:
        with seqpar.replace_sdpa(SHARDING):
            y: Tensor = layer(x)
        return y

    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    checkpoint(in_block, x, use_reentrant=True).square().sum().backward()
    assert x.grad is not None
    assert_close(x.grad, expected)


def test_is_causal_does_not_take_away_a_prefix() -> None:
    sharding = seqpar.Sharding(8, "contiguous")
    q = torch.randn(1, 2, 8, 4)
    with seqpar.replace_sdpa(sharding, Mask.prefix_lm(6)):
        y = F.scaled_dot_product_attention(q, q, q)
        with pytest.raises(ValueError, match="is_causal=True: it would take away later keys"):
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with seqpar.replace_sdpa(sharding, Mask.documents([0, 8], causal=False) | Mask.global_tokens(2)):
        F.scaled_dot_product_attention(q, q, q)
        with pytest.raises(ValueError, match="is_causal=True: it would take away later keys"):
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with seqpar.replace_sdpa(sharding, Mask.by_heads([Mask.full(), Mask.sliding_window(2, 1)])):
        by_heads = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    dense = torch.stack([Mask.causal().dense(8), Mask.sliding_window(2).dense(8)])
    torch.testing.assert_close(by_heads, F.scaled_dot_product_attention(q, q, q, dense))
    with seqpar.replace_sdpa(sharding, Mask.by_heads([Mask.full(), Mask.prefix_lm(3)])):
        F.scaled_dot_product_attention(q, q, q)
        with pytest.raises(ValueError, match="is_causal=True: it would take away later keys"):
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
    dense = Mask.prefix_lm(6).dense(8)
    torch.testing.assert_close(y, F.scaled_dot_product_attention(q, q, q, dense))
    with pytest.raises(ValueError, match=r"added to the scores \(a bias\) is not supported"):
        seqpar.sdpa(q, q, q, torch.zeros(8, 8), sharding=sharding)


class OwnAttention(nn.Module):
    """nn.MultiheadAttention, which PyTorch puts into compiled code as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


def first_compiled_in_a_block() -> None:
    """Run in a new process: PyTorch makes its list of functions that modes see at the first trace, in the block."""
    assert "torch._dynamo" not in sys.modules
    sharding, mask = seqpar.Sharding(TOKENS), Mask.documents([0, 20, TOKENS], causal=False)
    x = torch.randn(2, TOKENS, 16)
    makes: list[Any] = [partial(Attention, False), OwnAttention]
    kernels = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH  # an operator, and products
    for (i, make), fullgraph in product(enumerate(makes), (False, True)):
        model = make()
        code: Any = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
        weights = [*model.parameters()]
        with seqpar.replace_sdpa(sharding, mask), sdpa_kernel(kernels[(i + fullgraph) % 2]):
            expected = model(x)
            if fullgraph and isinstance(model, OwnAttention):
                with pytest.raises(RuntimeError, match="_needs_fullgraph_false"):
                    code(x)
                continue
            result = code(x)
            assert_close(result, expected, torch.float32)
            gradients = (torch.autograd.grad(y.square().sum(), weights) for y in (result, expected))
            for actual, right in zip(*gradients, strict=True):
                assert_close(actual, right, torch.float32)
        assert not torch.allclose(model(x), expected)  # the mask counts
        torch._dynamo.reset()


@pytest.mark.thorough
def test_the_first_compilation_may_be_in_a_block() -> None:
    run = f"from {__name__} import first_compiled_in_a_block as run; run()"
    subprocess.run([sys.executable, "-c", run], check=True, cwd=Path(__file__).parents[2])
