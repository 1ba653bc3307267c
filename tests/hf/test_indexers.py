"""Attention to keys that an indexer chooses, and to compressed keys: what is sent, every path, and what is refused.

``test_mixers.py`` compares every such model with one process.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import seqpar
import seqpar.hf
from seqpar import Mask
from seqpar.hf.mechanisms import indexers
from seqpar.hf.mechanisms.compressors import Compressed, merge_compressed
from seqpar.placement.layout import TokenLayout
from seqpar.planner.model import model_of as plan_model
from seqpar.planner.setting import Setting
from seqpar.planner.split import Switches
from seqpar.planner.step import step

from ..pool import Pool, on_ranks
from ..reference import assert_error
from ..settings import H100, sent_bytes
from .families import Family, make_batch, one_process, tiny
from .test_generate import Allocations
from .test_mixers import MODELS, Case, Expected, check, check_errors, gradients, one_process_of

GLM, DEEPSEEK, VL, V4 = "glm_moe_dsa", "deepseek_v32", "hy_v4_vl, image-text", "deepseek_v4"
INDEX, LATENT = 16, 16 + 8  # index_head_dim; kv_lora_rank and qk_rope_head_dim
LAYERS, INDEXERS = 3, 2  # of the tiny GLM: the second layer reuses the indices of the first


def model_of(name: str, **changes: Any) -> Any:
    return tiny(Family("causal", name, MODELS[name], {name: changes} if changes else {}))


def errors(model: Any, batch: dict[str, Tensor], group: ProcessGroup, expected: Expected) -> tuple[float, float]:
    """The relative errors of the loss, and of all gradients together."""
    loss = model(**batch).loss
    loss.backward()
    seqpar.sync_gradients(model, group=group)
    distance = float((gradients(model) - expected[1]).norm() / expected[1].norm())
    return abs(float(loss.detach()) - expected[0]) / expected[0], distance


def test_layouts(pool: Pool) -> None:
    """Balanced shards of packed documents, and padding on the right."""
    check(pool, 3, [Case(DEEPSEEK, "packed", layout="balanced"), Case(GLM, "right", "context_parallel")])


def test_one_rank(pool: Pool) -> None:
    check(pool, 1, [Case(GLM, "packed")])


@on_ranks
def ties(group: ProcessGroup, expected: Expected) -> tuple[float, float]:
    model = seqpar.hf.parallelize(model_of(DEEPSEEK, index_n_heads=1, index_topk=6), group=group)
    return errors(model, make_batch("packed", True, model), group, expected)


def test_equal_scores(pool: Pool) -> None:
    """With one head many scores are 0. Which of them are chosen depends on the number of keys and their order."""
    model = model_of(DEEPSEEK, index_n_heads=1, index_topk=6)
    expected = one_process(model, make_batch("packed", True, model), True)
    rounding = one_process_of(DEEPSEEK, "packed").rounding  # this model's own would change the choice
    for found in pool.run(2, ties, Expected(expected, gradients(model), rounding)):
        check_errors(*found, rounding)


@on_ranks
def largest_tensor(group: ProcessGroup, tokens: int) -> int:
    """The bytes of the largest tensor of a forward and backward of the layers."""
    model, elements = model_of(DEEPSEEK).model, indexers._ELEMENTS
    seqpar.hf.parallelize(model, group=group, outputs="local")
    ids = torch.arange(tokens)[None] * 7 % 80 + 10
    indexers._ELEMENTS = 1 << 16
    try:
        with Allocations() as made:
            model(ids).last_hidden_state.sum().backward()
    finally:
        indexers._ELEMENTS = elements
    return made.largest


def test_no_dense_mask(pool: Pool) -> None:
    tokens = 600
    for largest in pool.run(2, largest_tensor, tokens):
        assert largest < tokens // 2 * tokens * 4  # of the scores of one head


@on_ranks
def all_keys(group: ProcessGroup, topk: int) -> float:
    model = seqpar.hf.parallelize(model_of(DEEPSEEK, index_topk=topk, index_n_heads=16), group=group)
    return float(model(**make_batch("plain", True, model)).loss.detach())


def test_all_keys_chosen(pool: Pool) -> None:
    """A model whose ``index_topk`` is longer than its rows attends as a model without an indexer."""
    model = model_of(DEEPSEEK, index_topk=64, index_n_heads=16)
    for layer in model.model.layers:
        layer.self_attn.indexer = AllKeys()
    expected = one_process(model, make_batch("plain", True, model), True)
    for loss in pool.run(2, all_keys, 64):
        assert_error(abs(loss - expected) / expected, 0.0, "loss")


def images(config: Any) -> dict[str, Tensor]:
    """Two rows with an image of 6 tokens each, made from 4 x 4 patches."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 96, (2, 37), generator=g)
    ids[0, 5:11] = ids[1, 20:26] = config.image_token_id
    types = (ids == config.image_token_id).int()
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(types.bool(), -100),
        "mm_token_type_ids": types,
        "pixel_values": torch.randn(32, 3 * config.vision_config.patch_size**2, generator=g),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
    }


VISION = Case(VL, "images")


@on_ranks
def with_images(group: ProcessGroup, expected: Expected) -> tuple[float, float]:
    model = seqpar.hf.parallelize(tiny(VISION.family), group=group)
    return errors(model, images(model.config), group, expected)


@pytest.mark.skipif(not hasattr(transformers, MODELS[VL]), reason="a model of transformers 5.24")
@pytest.mark.thorough
def test_images(pool: Pool) -> None:
    model = tiny(VISION.family)
    expected = model(**images(model.config), use_cache=False).loss
    expected.backward()
    rounding = one_process_of(DEEPSEEK, "packed").rounding
    for found in pool.run(2, with_images, Expected(float(expected.detach()), gradients(model), rounding)):
        check_errors(*found, rounding)


EDGES = [[0, 5, 24, 45], [0, 31, 45]]  # of the documents of two rows


def two_rows(model: Any) -> dict[str, Tensor]:
    batch = {name: x.repeat(1, 2)[:, :45] for name, x in make_batch("plain", True, model).items()}
    batch["input_ids"][1] = batch["input_ids"][1].flip(0)
    ids = [torch.cat([torch.arange(b - a) for a, b in pairwise(edges)]) for edges in EDGES]
    return {**batch, "position_ids": torch.stack(ids)}


def expected_of_two_rows() -> Expected:
    """The loss and gradients of one process, each document by itself. No label is predicted across documents."""
    model = model_of(GLM)
    batch, total = two_rows(model), torch.zeros(())
    documents = [(row, a, b) for row, edges in enumerate(EDGES) for a, b in pairwise(edges)]
    labels = [batch["labels"][row : row + 1, a + 1 : b] for row, a, b in documents]
    count = sum(int((x != -100).sum()) for x in labels)
    for (row, a, b), target in zip(documents, labels, strict=True):
        logits = model(batch["input_ids"][row : row + 1, a:b]).logits[:, :-1]
        total = total + F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / count
    total.backward()
    return Expected(float(total.detach()), gradients(model), one_process_of(GLM, "packed").rounding)


@on_ranks
def few_rows(group: ProcessGroup, expected: Expected) -> tuple[float, float, bool]:
    """The errors of a copy with a few rows at a time, and whether ``restore`` undoes everything."""
    model, elements = model_of(GLM), indexers._ELEMENTS
    batch = two_rows(model)
    for row, edges in zip(batch["labels"], EDGES, strict=True):
        row[edges[:-1]] = -100
    seqpar.hf.parallelize(model, group=group, layout="striped")
    ours = copy.deepcopy(model)
    indexers._ELEMENTS = 2000
    try:
        found = errors(ours, batch, group, expected)
    finally:
        indexers._ELEMENTS = elements
    seqpar.hf.restore(model)
    restored = not any("forward" in vars(m) or m._forward_pre_hooks for m in model.model.layers.modules())
    return *found, restored


def test_few_rows_at_a_time(pool: Pool) -> None:
    """Two batch rows with different documents."""
    expected = expected_of_two_rows()
    for loss, grads, restored in pool.run(2, few_rows, expected):
        check_errors(loss, grads, expected.rounding)
        assert restored


@on_ranks
def sent(group: ProcessGroup, strategy: str) -> tuple[int, int]:
    """Bytes that this rank sends in the forward and in the backward of a base model."""
    model = model_of(GLM).model
    seqpar.hf.parallelize(model, group=group, strategy=strategy, outputs="local")
    ids = torch.arange(10, 10 + 2 * 46).view(2, 46) % 80 + 10
    with seqpar.trace() as forward:
        out = model(ids).last_hidden_state
    with seqpar.trace() as backward:
        out.sum().backward()
    return forward.bytes_sent, backward.bytes_sent


@pytest.mark.thorough(strategy=["ulysses"])
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_bytes(pool: Pool, strategy: str) -> None:
    """Index keys once a full layer, latents once a layer, and in backward latents in float32."""
    rows, peers = 2 * 16, 2  # zigzag over 3 ranks: 15 or 16 of 46 tokens; all send as many as the longest shard
    forward = (INDEXERS * INDEX + LAYERS * LATENT) * rows * peers * 4
    backward = LAYERS * LATENT * rows * peers * 4
    for found in pool.run(3, sent, strategy):
        assert found == (forward, backward)
    degrees = {"ulysses": 3} if strategy == "ulysses" else {"ring": 3}
    setting = Setting(H100, Mask.causal(), 46, 2, model=plan_model(model_of(GLM).config), layout="zigzag", **degrees)
    planned = step(replace(setting, dtype=torch.float32), Switches()).bytes_sent
    assert sum(planned.values()) == forward + backward


@on_ranks
def each_rank_alone(group: ProcessGroup) -> tuple[float, bool]:
    """With a batch of its own on each rank: the error of this rank's loss, and whether it generates the same tokens."""
    model, reference = model_of(GLM), model_of(GLM)
    batch = make_batch("plain", True, model)
    batch = {name: x[group.rank() : group.rank() + 1] for name, x in batch.items()}
    expected = one_process(reference, batch, True)
    seqpar.hf.parallelize(model, group=group, batches="per_rank")
    loss = float(model(**batch).loss.detach())
    ids = batch["input_ids"]
    ours, theirs = (m.eval().generate(ids, max_new_tokens=4, do_sample=False) for m in (model, reference))
    return abs(loss - expected) / expected, torch.equal(ours, theirs)


def test_each_rank_alone(pool: Pool) -> None:
    for error, same in pool.run(2, each_rank_alone):
        assert_error(error, 0.0, "loss")
        assert same


@on_ranks
def verified(group: ProcessGroup, name: str, fault: bool) -> str:
    """What ``verify`` says, if the indices are right or count the tokens of a rank."""
    model = model_of(name)
    batch = make_batch("packed" if name == GLM else "left", True, model)
    seqpar.hf.parallelize(model, group=group)
    choose = indexers._choose_globally
    try:
        if fault:
            indexers._choose_globally = lambda *args: choose(*args) // group.size()
        report = seqpar.hf.verify(model, batch, raise_on_error=False)
    finally:
        indexers._choose_globally = choose
    return "" if report.ok else str(report)


def test_verify(pool: Pool) -> None:
    assert pool.run(2, verified, GLM, False) == ["", ""] == pool.run(2, verified, V4, False)
    assert all("layers.0.self_attn" in text and "attention" in text for text in pool.run(2, verified, GLM, True))


class AllKeys(nn.Module):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.arange(x.shape[1], dtype=torch.int32).expand(*x.shape[:2], -1)


class Pools(nn.Module):
    """An indexer that scores the mean of each two keys."""

    def __init__(self, indexer: Any) -> None:
        super().__init__()
        self.inner = indexer

    def forward(
        self, hidden_states: Any, q_resid: Any, positions: Any, attention_mask: Any, ids: Any, cache: Any
    ) -> Any:
        class Mean:
            def update_indexer(self, keys: Any, layer: int) -> Any:
                keys = cache.update_indexer(keys, layer)
                return (keys + keys.roll(1, 1)) / 2

        return self.inner(hidden_states, q_resid, positions, attention_mask, ids, cache=Mean())


class Convolves(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + x.roll(1, 1)


@on_ranks
def errors_of(group: ProcessGroup) -> dict[str, str]:
    """The message of everything that is refused."""
    found: dict[str, str] = {}

    def error(name: str, call: Any) -> None:
        with pytest.raises(ValueError, match=": ") as caught:
            call()
        found[name] = str(caught.value)

    named_cache = hasattr(transformers, MODELS[VL])  # transformers 5.23 calls the argument of ``Pools`` otherwise
    for change in (Pools, Convolves) if named_cache else (Convolves,):
        model = model_of(DEEPSEEK)
        attention = model.model.layers[0].self_attn
        if change is Pools:
            attention.indexer = Pools(attention.indexer)
        else:
            attention.indexer.k_norm = nn.Sequential(attention.indexer.k_norm, Convolves())
        error(change.__name__, lambda model=model: seqpar.hf.parallelize(model, group=group))
    model = model_of(DEEPSEEK)
    batch = make_batch("plain", True, model)
    seqpar.hf.parallelize(model, group=group)
    error("generate", lambda: model.eval().generate(batch["input_ids"], max_new_tokens=1))
    ours = model.generate(batch["input_ids"], max_new_tokens=1, use_cache=False)
    assert torch.equal(ours, model_of(DEEPSEEK).eval().generate(batch["input_ids"], max_new_tokens=1, use_cache=False))
    error("half", lambda: seqpar.hf.verify(copy.deepcopy(model).bfloat16(), batch))
    model.model.layers[0].self_attn.kv_b_proj.__class__ = type("Lora", (nn.Linear,), {})
    error("lora", lambda: model(**batch))
    for options in ({"deterministic": True}, {"alibi_slopes": [0.5] * 4}):
        model = seqpar.hf.parallelize(model_of(DEEPSEEK), group=group, **options)
        error(next(iter(options)), lambda model=model: model(**batch))
    model = seqpar.hf.parallelize(model_of(DEEPSEEK, attention_dropout=0.5), group=group)
    error("dropout", lambda: model.train()(**batch))
    return found


def test_generation_on_one_rank() -> None:
    ours, reference = seqpar.hf.parallelize(model_of(DEEPSEEK).eval()), model_of(DEEPSEEK).eval()
    ids = make_batch("plain", True, reference)["input_ids"]
    assert torch.equal(*(m.generate(ids, max_new_tokens=4, do_sample=False) for m in (ours, reference)))


def test_refused(pool: Pool) -> None:
    found = pool.run(2, errors_of)[0]
    reasons = {
        "Pools": "self_attn.indexer.inner' (DeepseekV32Indexer) does not choose the keys",
        "Convolves": "self_attn.indexer' (DeepseekV32Indexer) mixes tokens",
        "generate": "DeepseekV32ForCausalLM has indexers with keys of their own",
        "half": "verify it in float32",
        "lora": "layer 0 (DeepseekV32Attention): it attends to chosen keys",
        "deterministic": "deterministic=True: layer 0 (DeepseekV32Attention)",
        "alibi_slopes": "alibi_slopes=",
        "dropout": "dropout=0.5: layer 0",
    }
    assert len(found) >= len(reasons) - 1
    for name in found:
        assert reasons[name] in found[name], found[name]


@on_ranks
def refused(group: ProcessGroup, kind: str, name: str) -> str:
    with pytest.raises(ValueError, match=f"model={name}: ") as error:
        seqpar.hf.parallelize(tiny(Family(kind, name, name)), group=group)
    return str(error.value)


def test_refused_models(pool: Pool) -> None:
    """Indexers that pool keys over runs of tokens."""
    reasons = {
        ("causal", "Qwen4ExpForCausalLM"): "layer 1 is of type 'indexed_attention', and its indexer does not",
        ("image-text", "Glm5NextForConditionalGeneration"): "(Glm5NextTextIndexer) does not choose",
    }
    for family, reason in reasons.items():
        assert reason in pool.run(1, refused, *family)[0]


def test_scores_are_float32() -> None:
    """In bfloat16 the output and the gradients of chosen keys have half the error that rounded scores would give."""
    tokens, heads, keys, rank, rope, nope, width = 64, 16, 256, 64, 32, 32, 32
    q, kv = torch.randn(1, tokens, heads, nope + rope) * 2, torch.randn(1, tokens, keys, rank + rope)
    weight = torch.randn(heads, nope + width, rank) / rank**0.5
    visible, grad = torch.ones(1, tokens, 1, keys, dtype=torch.bool), torch.randn(1, tokens, heads, width)

    def results(dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.bfloat16().to(dtype).requires_grad_() for x in (q, kv, weight)]
        out = indexers._attend_rows(inputs[0], inputs[1], inputs[2], None, visible, (nope + rope) ** -0.5)[0]
        return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype))]

    for ours, exact in zip(results(torch.bfloat16), results(torch.float64), strict=True):
        assert (ours - exact).norm() / exact.norm() < 0.0055  # 0.007 to 0.008 with scores in bfloat16


def test_compressed_keys(pool: Pool) -> None:
    check(pool, 2, [Case(V4, "plain"), Case(V4, "left", "ulysses", "contiguous")])


@pytest.mark.thorough
def test_compressed_keys_on_more_ranks(pool: Pool) -> None:
    check(pool, 1, [Case(V4, "right")])
    check(pool, 4, [Case(V4, "left", layout="balanced"), Case(V4, "plain", "context_parallel", "contiguous")])


@on_ranks
def short_rows(group: ProcessGroup, lengths: list[int]) -> list[tuple[float, float]]:
    """The errors with rows of few tokens, some of which have no window, or windows of a few ranks only."""
    model, reference, found = model_of(V4), model_of(V4), []
    seqpar.hf.parallelize(model, group=group)
    for length in lengths:
        batch = {name: x[:, :length] for name, x in make_batch("plain", True, reference).items()}
        model.zero_grad()
        reference.zero_grad()
        loss = one_process(reference, batch, True)
        found.append(errors(model, batch, group, Expected(loss, gradients(reference), 0.0)))
    return found


def test_short_rows_of_compressed_keys(pool: Pool) -> None:
    rounding = one_process_of(V4, "plain").rounding
    for found in pool.run(3, short_rows, [3, 4, 8, 13]):
        for loss, grads in found:
            check_errors(loss, grads, rounding)


COMPRESSED = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


@on_ranks
def sent_with_compressed_keys(group: ProcessGroup, layout: str) -> list[tuple[int, int]]:
    """For a model of one layer of each type, the bytes that this rank sends in forward and in backward."""
    found = []
    for layer in COMPRESSED:
        model = model_of(V4, layer_types=[layer], mlp_layer_types=["moe"], num_hidden_layers=1, **V4_SIZES).model
        seqpar.hf.parallelize(model, group=group, outputs="local", layout=layout)
        ids = torch.arange(10, 10 + 2 * 46).view(2, 46) % 80 + 10
        with seqpar.trace() as forward:
            out = model(ids).last_hidden_state
        with seqpar.trace() as backward:
            out.sum().backward()
        found.append((forward.bytes_sent, backward.bytes_sent))
    return found


V4_SIZES: dict[str, Any] = {  # of ``families.OVERRIDES``
    "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 8}, "head_dim": 32,
    "index_head_dim": 16, "index_n_heads": 16, "index_topk": 6, "o_groups": 4,
}  # fmt: skip


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_bytes_of_compressed_keys(pool: Pool, layout: Any) -> None:
    """Beside the window: the projected rows of windows across borders, and all compressed rows. As the planner says."""
    rows, tokens, ranks = 2, 46, 3
    shape = plan_model(model_of(V4).config)
    setting = Setting(H100, Mask.causal(), tokens, rows, model=shape, ring=ranks, layout=layout, dtype=torch.float32)
    held = [TokenLayout(tokens, layout, ranks).rank_positions(rank).tolist() for rank in range(ranks)]
    for rank, (window, *found) in enumerate(pool.run(ranks, sent_with_compressed_keys, layout)):
        planned = [sent_bytes(split, rank, layer.attention) for layer, split in setting.layers]
        assert [tuple(map(sum, of_layer)) for of_layer in planned] == [window, *found]
        for (size, before, width, index), (forward, backward) in zip(
            ((3, 1, 32, 16), (8, 0, 32, 0)), found, strict=True
        ):
            ends = [[i // size for i in own if i % size == size - 1] for own in held]  # the windows of each rank
            spans = [[range(max(0, i - before) * size, (i + 1) * size) for i in of_rank] for of_rank in ends]
            needed = [{i for span in of_rank for i in span} for of_rank in spans]
            borders = rows * sum(len(needed[peer] & {*held[rank]}) for peer in range(ranks) if peer != rank)
            fetched = rows * len(needed[rank] - {*held[rank]})
            most = rows * max(map(len, ends)) * (ranks - 1)
            of_row = 2 * (before + 1)  # a token has a key and a gate in each of so many windows
            assert forward - window[0] == 4 * (borders * of_row * (width + index) + most * (width + index))
            assert backward - window[1] == 4 * (fetched * of_row * width + most * width)


@on_ranks
def errors_of_compressed_keys(group: ProcessGroup) -> list[str]:
    model, found = model_of(V4), []

    def error(call: Any) -> None:
        with seqpar.trace() as sent, pytest.raises(ValueError, match=": ") as caught:
            call()
        assert not sent.bytes_sent
        found.append(str(caught.value))

    batch = make_batch("packed", True, model)
    error(lambda: seqpar.hf.parallelize(model, group=group, share_prompts=True))
    seqpar.hf.parallelize(model, group=group)
    error(lambda: model(**batch))
    error(lambda: model.eval().generate(batch["input_ids"], max_new_tokens=1))
    seqpar.hf.restore(model)
    assert not any("forward" in vars(m) for m in model.modules())
    pools = model.model.layers[1].self_attn.compressor
    pools.kv_norm = nn.Sequential(pools.kv_norm, Convolves())
    error(lambda: seqpar.hf.parallelize(model, group=group))
    return found


def test_refused_compressed_keys(pool: Pool) -> None:
    prompts, packed, generated, pools = pool.run(2, errors_of_compressed_keys)[0]
    assert "it compresses windows of tokens" in prompts
    assert "pack no documents" in packed
    assert "indexers with keys of their own" in generated
    assert "self_attn.compressor' (DeepseekV4CSACompressor) does not pool each window" in pools


def test_merge_with_compressed_keys() -> None:
    """Attention to tokens merged with attention to rows is one softmax. A query that sees no key gets 0."""
    q, k, rows = torch.randn(2, 6, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 4, 8)
    before = torch.tensor([[0, 0, 1, 2, 4, 4]])
    one_rank: Any = SimpleNamespace(unshard=lambda x: x, tokens=None, sequence_group=None)
    seen = torch.rand(2, 6, 5) < 0.5
    seen[:, 0] = False  # the first query sees neither a token nor a row
    seen_rows = (torch.arange(4) < before[..., None]).expand(2, -1, -1)

    def attend(q: Tensor, keys: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("bshd,bkd->bshk", q, keys).masked_fill(~seen[:, :, None], -torch.inf)
        lse = scores.logsumexp(-1)  # [b, s, h]
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
        return torch.einsum("bshk,bkd->bshd", weights, keys), lse

    every, seen_of_every = torch.cat([k, rows], 1), torch.cat([seen, seen_rows], 2)
    expected, _ = attend(q.double(), every.double(), seen_of_every)

    def error(x: Tensor) -> float:
        return float((x - expected).norm() / expected.norm())

    out, lse = attend(q, k, seen)
    leaves = [x.requires_grad_() for x in (q.clone(), rows.clone(), out, lse.mT.clone())]
    given = Compressed(one_rank, leaves[1], one_rank, None, before)
    found = merge_compressed(leaves[0], leaves[2], leaves[3], given, 1.0)
    assert_error(error(found.detach()), error(attend(q, every, seen_of_every)[0]))
    assert not found[:, 0].any()
    assert all(x.isfinite().all() for x in torch.autograd.grad(found.sum(), leaves))
