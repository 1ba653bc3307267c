"""Greedy generation with a sharded cache gives the tokens of one device, and the cache remains sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache
from transformers import __version__ as transformers_version

import seqpar
import seqpar.hf
from seqpar import decoding
from seqpar.comm.trace import trace
from seqpar.hf.calls import generate
from seqpar.kernels import BackendName
from seqpar.placement.layout import Layout

from ..pool import Pool, on_ranks
from ..reference import assert_close
from .workers import VOCAB, check_loss, tiny

pytestmark = pytest.mark.slow
# The argument of models that takes the cache.
CACHE = "past_key_values" if transformers_version.startswith("5.23") else "cache"
GENERATIVE = ("llama", "mistral", "gemma2", "gpt_oss", "qwen3_moe", "llama4", "deepseek_v3")


def prompt(how: str) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (2, 23), generator=torch.Generator().manual_seed(3))
    if how == "short":  # fewer tokens than ranks
        ids = ids[:, :3]
    mask = torch.ones_like(ids)
    if how == "padded":
        mask[1, :6] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def model_of(kind: str) -> Any:
    changes: dict[str, Any] = {"output_router_logits": False} if kind == "qwen3_moe" else {}
    # With tied embeddings, random weights repeat one token.
    return tiny(kind, tie_word_embeddings=False, **changes).eval()


@on_ranks
def generated(group: ProcessGroup, kind: str, layout: Layout, calls: list[tuple[str, dict[str, Any]]]) -> list[Tensor]:
    model = seqpar.hf.parallelize(model_of(kind), group=group, layout=layout)
    return [model.generate(**prompt(how), do_sample=False, **options) for how, options in calls]


LONG: dict[str, Any] = {"max_new_tokens": 14, "eos_token_id": None}
SOME: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None}


@pytest.mark.thorough(kind=["mistral", "gemma2", "gpt_oss", "qwen3_moe", "llama4"])
@pytest.mark.parametrize("kind", GENERATIVE)
def test_tokens(pool: Pool, kind: str) -> None:
    calls = [("plain", LONG), ("padded", SOME), ("short", SOME), ("plain", {"max_new_tokens": 6, "num_beams": 3})]
    # two models with every kind of call, on 4 ranks too, and every layout
    on_four = {"llama": ("zigzag", "contiguous"), "mistral": ("striped",)}.get(kind, ())
    if kind == "deepseek_v3":  # latents of a rank without keys
        calls, on_four = [*calls[:2], ("short", SOME)], ("zigzag",)
    elif not on_four:
        calls = calls[:2]
    reference = model_of(kind)
    expected = [reference.generate(**prompt(how), do_sample=False, **options) for how, options in calls]
    assert len(set(expected[0][0, 23:].tolist())) > 3  # the model does not repeat one token
    for world, layout in [(2, "zigzag"), *((4, layout) for layout in on_four)]:
        some = calls[:2] if world == 2 else calls
        for tokens in pool.run(world, generated, kind, layout, some):
            assert all(map(torch.equal, tokens, expected)), (world, layout)


@on_ranks
def cached(group: ProcessGroup, kind: str) -> tuple[list[int], int, int, int]:
    """The number of this rank's keys in each layer, the length, and the bytes and backend calls of one more token."""
    model = seqpar.hf.parallelize(model_of(kind), group=group)
    cache = DynamicCache(config=model.config)
    model.generate(**prompt("plain"), do_sample=False, **{CACHE: cache}, **LONG)
    held = [layer.keys.shape[2] for layer in cache.layers]
    length = cache.get_seq_length()
    with torch.no_grad(), trace() as t:
        model(input_ids=torch.tensor([[5], [6]]), **{CACHE: cache})
    assert cache.get_seq_length() == length + 1
    return held, length, t.bytes_sent, t.backends["cpu"]


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_cache_stays_sharded(pool: Pool, kind: str) -> None:
    world = 4
    results = pool.run(world, cached, kind)
    for layer in range(2):
        held = [counts[layer] for counts, *_ in results]
        total = 8 if kind == "mistral" else 36  # a window of 9 needs 8 keys before the next token
        assert sum(held) == total and max(held) - min(held) <= 2
    rows, heads, head_dim = 2, 4, 8
    one_layer = rows * heads * (head_dim + 1) * 4 * (world - 1)
    for _, length, sent, kernels in results:
        assert length == 36 and sent == 2 * one_layer
        assert kernels <= 2  # one for each layer in which this rank caches visible keys
    assert sum(kernels for *_, kernels in results) >= 2


class Allocations(TorchDispatchMode):
    """Records the bytes of the tensors that operators return, except for views of their arguments."""

    largest = 0
    together = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def tensors(tree: Any) -> list[Tensor]:
            return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]

        given = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
        result = operation(*args, **(kwargs or {}))
        made = [x.nbytes for x in tensors(result) if x.untyped_storage().data_ptr() not in given]
        self.largest = max(self.largest, *made, 0)
        self.together += sum(made)
        return result


@pytest.mark.thorough(dtype=[torch.bfloat16])
@pytest.mark.parametrize(
    # The CPU's backend converts all half-precision keys to float32; the reference does it 1,024 keys at a time.
    ("dtype", "backend"),
    [(torch.float32, "auto"), (torch.bfloat16, "reference"), (torch.float16, "reference")],
)
def test_decode_does_not_copy_the_cache(dtype: torch.dtype, backend: BackendName) -> None:
    model = seqpar.hf.parallelize(model_of("llama").to(dtype), strategy="local", backend=backend)
    cache = DynamicCache(config=model.config)
    ids = torch.randint(3, VOCAB, (1, 5000), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(input_ids=ids, **{CACHE: cache}, logits_to_keep=1)
        model(input_ids=ids[:, :1], **{CACHE: cache})  # allocates the cache's spare capacity
        with Allocations() as made:
            model(input_ids=ids[:, :1], **{CACHE: cache})
    keys = cache.layers[0].keys
    assert keys.dtype == dtype and keys.shape[2] == 5002
    assert 0 < made.largest < keys.nbytes // 2


@pytest.mark.parametrize("window", [None, 9])
def test_decode_memory_is_independent_of_cache_length(window: int | None) -> None:
    """The cached keys and positions are not copied for each token: this would be quadratic in the number of tokens."""
    together = []
    for cached in (1000, 50_000):
        layer = generate.ShardedCacheLayer(window)
        for start, stop in ((0, cached), (cached, cached + 1), (cached + 1, cached + 2)):
            positions, new = torch.arange(start, stop), torch.ones(1, 2, stop - start, 8)
            with Allocations() as made:
                layer.expect(positions, slice(None), stop, {})
                keys, _ = layer.update(new, new)
        together.append(made.together)
        assert layer.positions.tolist() == list(range(0 if window is None else cached + 3 - window, cached + 2))
        assert keys.shape[2] == len(layer.attended)
    assert together[0] == together[1]


def test_layers_share_positions_until_one_is_cropped() -> None:
    first, second = layers = [generate.ShardedCacheLayer(None) for _ in range(2)]

    def fill(tokens: list[int], layers: list[generate.ShardedCacheLayer]) -> None:
        joined: dict[int, torch.Tensor] = {}
        positions, new = torch.tensor(tokens), torch.ones(1, 1, len(tokens), 2)
        for layer in layers:
            layer.expect(positions, slice(None), tokens[-1] + 1, joined)
            layer.update(new, new)

    fill([0, 2, 4], layers)
    fill([6], layers)
    assert first.positions is second.positions
    first.crop(-1)
    fill([7], [first])
    fill([8], layers)
    assert first.positions.tolist() == [0, 2, 4, 7, 8] and second.positions.tolist() == [0, 2, 4, 6, 8]


@on_ranks
def continued(group: ProcessGroup, gathered_bytes: int) -> tuple[int, int, int]:
    """Results for a second prompt of 300 tokens: its largest tensor, attention calls and messages."""
    before, decoding._GATHERED_BYTES = decoding._GATHERED_BYTES, gathered_bytes
    reference, model = model_of("llama"), seqpar.hf.parallelize(model_of("llama"), group=group)
    tokens = torch.randint(3, VOCAB, (1, 1500), generator=torch.Generator().manual_seed(1))
    cache = DynamicCache(config=model.config)
    try:
        with torch.no_grad():
            model(input_ids=tokens[:, :1200], **{CACHE: cache}, logits_to_keep=1)
            with trace() as t, Allocations() as made:
                logits = model(input_ids=tokens[:, 1200:], **{CACHE: cache}).logits
            expected = reference(input_ids=tokens).logits[:, 1200:]
    finally:
        decoding._GATHERED_BYTES = before
    assert_close(logits, expected)
    return made.largest, t.backends["cpu"], t.messages


def test_second_turn_is_blockwise(pool: Pool) -> None:
    layers, heads, head_dim, new, ranks = 2, 4, 8, 300, 2
    gathered = ranks * new * heads * (head_dim + 1) * 4
    scores = heads * new * (1500 // ranks) * 4  # of one layer on one rank, if they all existed at once
    for bound, spans in ((1 << 28, 1), (gathered // 3, 3)):
        for largest, calls, messages in pool.run(ranks, continued, bound):
            assert largest < scores // 4
            assert calls == layers * spans and messages == layers * spans


def test_cache_after_inference_mode() -> None:
    """Tensors that were made in inference mode can be written to in inference mode only."""
    model, reference = seqpar.hf.parallelize(model_of("llama"), strategy="local"), model_of("llama")
    ids = prompt("plain")["input_ids"]
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        for part in ids[:, :20], ids[:, 20:21], ids[:, 21:22]:
            model(input_ids=part, **{CACHE: cache})
    with torch.no_grad():
        logits = model(input_ids=ids[:, 22:], **{CACHE: cache}).logits
        expected = reference(input_ids=ids).logits[:, 22:]
    assert_close(logits, expected)


@on_ranks
def forwards(group: ProcessGroup) -> None:
    """Compare logits (of a prompt, of several new tokens, of tokens after a crop, of the last 4 tokens) and hidden
    states of a prompt."""
    reference, model = model_of("gemma2"), seqpar.hf.parallelize(model_of("gemma2"), group=group)
    tokens = prompt("plain")["input_ids"]
    with torch.no_grad():
        expected = reference(input_ids=tokens).logits
        cache = DynamicCache()
        first = model(input_ids=tokens[:, :17], **{CACHE: cache}, use_cache=True).logits
        assert_close(first, expected[:, :17])
        assert_close(model(input_ids=tokens[:, 17:], **{CACHE: cache}).logits, expected[:, 17:])
        cache.crop(-3)
        again = model(input_ids=tokens[:, 20:], **{CACHE: cache}).logits
        assert_close(again, expected[:, 20:])
        made = model(input_ids=tokens, use_cache=True, logits_to_keep=4)
        assert_close(made.logits, expected[:, -4:])
        ours, theirs = (m(input_ids=tokens, use_cache=True, output_hidden_states=True) for m in (model, reference))
        assert_close(ours.hidden_states, theirs.hidden_states)


def test_forwards_with_a_cache(pool: Pool) -> None:
    pool.run(3, forwards)


@on_ranks
def adapted(group: ProcessGroup) -> bool:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    reference = get_peft_model(model_of("llama"), config)
    torch.manual_seed(1)
    model = seqpar.hf.parallelize(get_peft_model(model_of("llama"), config), group=group)
    ours, theirs = (m.generate(**prompt("plain"), do_sample=False, **LONG) for m in (model, reference))
    return bool(torch.equal(ours, theirs))


def test_adapted_model(pool: Pool) -> None:
    pytest.importorskip("peft")
    assert all(pool.run(2, adapted))


@on_ranks
def assisted(group: ProcessGroup, kind: str) -> list[bool]:
    """Assisted generation that rejects most candidates, so that the cache is cropped."""
    ids = torch.cat([prompt("plain")["input_ids"][:1]] * 2, dim=1)
    same = []
    for draft in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": tiny(kind, seed=5).eval()}):
        models = model_of(kind), seqpar.hf.parallelize(model_of(kind), group=group)
        theirs, ours = (m.generate(ids, do_sample=False, **LONG, **draft) for m in models)
        same.append(torch.equal(theirs, ours))
    return same


@pytest.mark.thorough(kind=["mistral"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_assisted_generation(pool: Pool, kind: str) -> None:
    assert all(all(same) for same in pool.run(2, assisted, kind))


# For each fault: a change of a rank's prompt, and words of the error on every rank.
FAULTS: dict[str, tuple[Callable[[dict[str, Tensor], int], Any], str]] = {
    "prompt": (lambda given, rank: given["input_ids"][0, 3].add_(rank), "passed different tokens"),
    "sampled": (lambda given, rank: None, "set the same seed"),
    "padding": (lambda given, rank: given["attention_mask"][0, -2:].zero_(), "padding on the left"),
}


@on_ranks
def with_faults(group: ProcessGroup) -> None:
    model = seqpar.hf.parallelize(model_of("llama"), group=group)
    for fault, (change, words) in FAULTS.items():
        arguments = prompt("plain")
        change(arguments, group.rank())
        torch.manual_seed(group.rank())
        with pytest.raises(ValueError, match=words):
            model.generate(**arguments, do_sample=fault == "sampled", temperature=9.0, max_new_tokens=20)


def test_refused_prompts(pool: Pool) -> None:
    pool.run(2, with_faults)


def test_training_after_generating() -> None:
    model = seqpar.hf.parallelize(tiny("llama"), strategy="local")
    model.generate(**prompt("plain"), max_new_tokens=2)
    batch = {**prompt("plain"), "labels": prompt("plain")["input_ids"]}
    loss = model(**seqpar.hf.shard_batch(batch)).loss
    check_loss(loss.item(), tiny("llama")(**batch).loss.item())


def test_refused_caches() -> None:
    model = seqpar.hf.parallelize(model_of("llama"), strategy="local")
    ids = prompt("plain")["input_ids"]
    with pytest.raises(ValueError, match="layers are of type StaticLayer"):
        model(input_ids=ids, past_key_values=StaticCache(model.config, max_cache_len=40))
    filled = DynamicCache()
    for layer in range(2):
        filled.update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8), layer)
    with pytest.raises(ValueError, match="filled before the model was parallelized"):
        model(input_ids=ids, past_key_values=filled)
    with pytest.raises(TypeError, match="cache=tuple"):
        model(input_ids=ids, past_key_values=())
