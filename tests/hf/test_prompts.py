"""Rollouts that share prompts have the losses, log-probabilities and gradients that each of them has by itself."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.utils.rnn import pad_sequence

pytest.importorskip("transformers")

import seqpar
import seqpar.hf
from seqpar.hf import prompts as prompts_module
from seqpar.hf.prompts import SharedPrompts
from seqpar.masks.mask import layer_mask
from seqpar.planner.prompts import prompt_sharing, tree_of

from ..pool import Pool, on_ranks
from ..reference import assert_close
from .workers import PARALLELIZE, VOCAB, Result, check_gradients, check_step, gradients, rounded, tiny, trained

pytestmark = pytest.mark.slow
Tokens = list[list[int]]


def group_of(seed: int, prompt: int = 13, answers: int = 4) -> tuple[list[int], Tokens]:
    """A prompt and its answers. Two answers are equal, two begin alike, and one is the beginning of another one."""
    g = random.Random(seed)
    tokens = [[g.randrange(3, VOCAB) for _ in range(g.randrange(4, 11))] for _ in range(answers)]
    tokens[1] = [*tokens[0][:3], *tokens[1]]
    return [g.randrange(3, VOCAB) for _ in range(prompt)], [*tokens, tokens[0], tokens[1][:4]]


def rollouts_of() -> tuple[Tokens, list[Tokens]]:
    """Two prompts and their answers. The second prompt continues the first one."""
    (first, of_first), (second, of_second) = group_of(0), group_of(1, 6, 3)
    return [first, first + second], [of_first, [*of_second, [7]]]


def scores(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of each label, and the entropy, ``[..., seq]`` in the dtype of the logits."""
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)


def policy_loss(log_probs: Tensor, entropies: Tensor, counted: Tensor) -> Tensor:
    """A GRPO loss with an advantage for each rollout, and an entropy bonus."""
    advantages = torch.randn(len(log_probs), 1, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    ratio = (log_probs - log_probs.detach() * 0.9).exp()
    per_token = -torch.min(ratio * advantages, ratio.clamp(0.7, 1.3) * advantages) - 0.1 * entropies
    return (per_token * counted).sum() / counted.sum()


def one_by_one(model: Any, prompts: Tokens, answers: list[Tokens]) -> tuple[Tensor, Tensor, Tensor]:
    """Of each prompt and answer by itself: log-probabilities, entropies and which count, ``[rollouts, tokens]``."""
    found = []
    for prompt, of_prompt in zip(prompts, answers, strict=True):
        for answer in of_prompt:
            ids = torch.tensor([prompt + answer])
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            found.append(torch.stack([*scores(logits, ids[0, len(prompt) :]), torch.ones(len(answer))]))
    longest = max(x.shape[1] for x in found)
    log_probs, entropies, counted = torch.stack([F.pad(x, (0, longest - x.shape[1])) for x in found], 1)
    return log_probs, entropies, counted.bool()


def from_row(model: Any, rollouts: SharedPrompts) -> tuple[Tensor, Tensor]:
    row = {name: x for name, x in rollouts.batch.items() if name != "shift_labels"}
    both = torch.stack(scores(model(**row).logits, rollouts.labels), -1)
    log_probs, entropies = rollouts.unshare(both).unbind(-1)
    return log_probs, entropies


def every_branch() -> Any:
    """In the block, branches are made of any number of tokens that sequences have in common."""
    return mock.patch.object(prompts_module, "LEAST", 1)


Expected = tuple[Tensor, Tensor, Tensor, Result]


@on_ranks
def trained_on_rollouts(group: ProcessGroup, cases: list[tuple[str, str, Expected]]) -> None:
    prompts, answers = rollouts_of()
    for kind, arguments, (log_probs, entropies, counted, result) in cases:
        model = seqpar.hf.parallelize(tiny(kind), group=group, **PARALLELIZE[arguments])
        with every_branch():
            rollouts = seqpar.hf.share_prompts(prompts, answers, windows=kind not in ("llama", "deepseek_v3"))
        assert torch.equal(rollouts.counted, counted)
        ours = from_row(model, rollouts)
        assert_close(ours[0], log_probs)
        assert_close(ours[1], entropies)
        policy_loss(*ours, counted).backward()
        seqpar.sync_gradients(model, group=group)
        check_gradients(gradients(model), result, kind, arguments)
        alone = seqpar.hf.token_log_probs(model, rollouts)
        ours = seqpar.hf.token_log_probs(model, rollouts, entropy=True)
        assert torch.equal(alone, ours[0])
        assert_close(ours[0], log_probs)
        assert_close(ours[1], entropies)
        model.zero_grad()
        policy_loss(*ours, counted).backward()
        seqpar.sync_gradients(model, group=group)
        check_gradients(gradients(model), result, kind, arguments, "token_log_probs")


CASES = {
    1: [("llama", "ring-zigzag")],
    2: [("llama", "ulysses-contiguous"), ("mistral", "ring-zigzag"), ("gpt_oss", "all_gather-striped")],
    4: [("llama", "ring-zigzag"), ("gemma2", "hybrid-zigzag"), ("deepseek_v3", "all_gather-striped")],
}


def expected_of(kind: str) -> Expected:
    model = tiny(kind)
    log_probs, entropies, counted = one_by_one(model, *rollouts_of())

    def step() -> float:
        loss = policy_loss(*one_by_one(model, *rollouts_of()))
        loss.backward()
        return loss.item()

    return log_probs.detach(), entropies.detach(), counted, rounded(model, step)


@pytest.mark.thorough(world=[1, 4])
@pytest.mark.parametrize("world", CASES)
def test_rollouts(pool: Pool, world: int) -> None:
    pool.run(world, trained_on_rollouts, [(*case, expected_of(case[0])) for case in CASES[world]])


class Own(torch.nn.Module):
    """A language model of one's own, with a layer of attention, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = torch.nn.Embedding(VOCAB, 16), torch.nn.Embedding(64, 16)
        self.project, self.head = torch.nn.Linear(16, 48), torch.nn.Linear(16, VOCAB)
        self.double()

    def forward(self, ids: Tensor, positions: Tensor, **options: Any) -> Tensor:
        x = self.tokens(ids) + self.positions(positions)
        q, k, v = self.project(x).unflatten(-1, (3, 4, 4)).unbind(2)
        logits: Tensor = self.head(x + seqpar.attention(q, k, v, **options).flatten(2))
        return logits


@on_ranks
def own_model(group: ProcessGroup) -> None:
    """Float64, with the row sharded by the caller. A rank has the log-probabilities that its tokens predict."""
    prompts, answers = rollouts_of()
    alone, found = Own(), []
    pairs = [(prompt, answer) for prompt, of_prompt in zip(prompts, answers, strict=True) for answer in of_prompt]
    for prompt, answer in pairs:
        ids = torch.tensor([prompt + answer])
        logits = alone(ids, torch.arange(ids.shape[1])[None], strategy="local", mask=seqpar.Mask.causal())
        of_answer = slice(len(prompt) - 1, -1)
        found.append(torch.stack(scores(logits[0, of_answer], ids[0, len(prompt) :])))
    longest = max(x.shape[1] for x in found)
    log_probs, entropies = torch.stack([F.pad(x, (0, longest - x.shape[1])) for x in found], 1)
    with every_branch():
        rollouts = seqpar.hf.share_prompts(prompts, answers)
    policy_loss(log_probs, entropies, rollouts.counted).backward()
    for name in ("ring-zigzag", "ulysses-contiguous", "all_gather-striped"):
        layout, arguments = PARALLELIZE[name]["layout"], {k: x for k, x in PARALLELIZE[name].items() if k != "layout"}
        sharding = seqpar.Sharding(rollouts.input_ids.shape[1], layout, group=group)
        local = [sharding.shard(x) for x in (rollouts.input_ids, rollouts.position_ids, rollouts.labels)]
        model = Own()
        logits = model(local[0], local[1], sharding=sharding, mask=rollouts.mask, **arguments)
        ours = rollouts.unshare(sharding.unshard(torch.stack(scores(logits, local[2]), -1)))
        assert_close(ours[..., 0], log_probs)
        assert_close(ours[..., 1], entropies)
        policy_loss(ours[..., 0], ours[..., 1], rollouts.counted).backward()
        seqpar.sync_gradients(model, group=group)
        for (parameter, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert_close(p.grad, q.grad, what=f"{name} {parameter}")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_model_of_ones_own(pool: Pool, world: int) -> None:
    pool.run(world, own_model)


def padded(side: str, every_label: bool) -> dict[str, Tensor]:
    """The rollouts as a padded batch, in which the answers are labels, or all tokens but the first of each row."""
    prompts, answers = rollouts_of()
    rows = [(len(prompt), prompt + x) for prompt, some in zip(prompts, answers, strict=True) for x in some]
    longest = max(len(row) for _, row in rows)

    def pad(row: list[int], value: int) -> list[int]:
        more = [value] * (longest - len(row))
        return more + row if side == "left" else row + more

    labels = [[-100] * (1 if every_label else first) + row[1 if every_label else first :] for first, row in rows]
    return {
        "input_ids": torch.tensor([pad(row, 0) for _, row in rows]),
        "attention_mask": torch.tensor([pad([1] * len(row), 0) for _, row in rows]),
        "labels": torch.tensor([pad(row, -100) for row in labels]),
    }


def packed() -> dict[str, Tensor]:
    """Rows of two documents. Those of each half begin alike."""
    ids = torch.randint(3, VOCAB, (3, 40), generator=torch.Generator().manual_seed(2))
    ids[1:, :12], ids[2, 21:33] = ids[0, :12], ids[0, 21:33]
    labels = ids.clone()
    labels[:, [0, 21]] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.cat([torch.arange(21), torch.arange(19)])[None]}


BATCHES = {"left": padded("left", False), "right": padded("right", True), "packed": packed()}
SETTINGS = {
    1: [("llama", "ring-zigzag", "right")],
    2: [
        ("qwen3_moe", "ring-zigzag", "right"),
        ("mistral", "all_gather-striped", "left"),
        ("gpt2", "ulysses-contiguous", "left"),
    ],
    4: [("llama", "balanced", "packed"), ("gemma2", "hybrid-zigzag", "right"), ("gpt_oss", "ring-zigzag", "left")],
}


@on_ranks
def trained_on_rows(group: ProcessGroup, cases: list[tuple[str, str, str, Result, dict[str, Any]]]) -> None:
    for kind, name, how, result, outputs in cases:
        arguments: Any = PARALLELIZE.get(name, {"layout": name})
        model, batch = seqpar.hf.parallelize(tiny(kind), group=group, share_prompts=True, **arguments), BATCHES[how]
        check_step(group, model, batch, result, kind, name, how)
        model.zero_grad()
        with every_branch():
            check_step(group, model, batch, result, kind, name, how)
        assert model._seqpar.last_sharding.seq_len < 0.75 * batch["input_ids"].numel()
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        unlabelled = {x: y for x, y in batch.items() if x != "labels"}
        ours = model(**unlabelled, output_hidden_states=True)
        for key, theirs in outputs.items():
            if key in ours:
                mine = ours[key] if key == "logits" else ours[key][-1].view(*real.shape, -1)
                assert_close(mine[real], theirs[real], what=f"{kind} {key}")
        labels = batch["labels"][:, 1:]
        log_probs = seqpar.hf.token_log_probs(model, batch)
        assert_close(log_probs[labels != -100], outputs["log_probs"][labels != -100])
        assert not log_probs[labels == -100].any()
        assert seqpar.hf.verify(model, batch, raise_on_error=False).ok


def outputs_of(kind: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    unlabelled = {name: x for name, x in batch.items() if name != "labels"}
    with torch.no_grad():
        found = tiny(kind)(**unlabelled, output_hidden_states=True, use_cache=False)
    log_probs = scores(found.logits[:, :-1], batch["labels"][:, 1:])[0]
    outputs = {"logits": found.logits, "hidden_states": found.hidden_states[-1], "log_probs": log_probs}
    if (router_logits := found.get("router_logits")) is not None:
        outputs["router_logits"] = router_logits[-1].view(*batch["input_ids"].shape, -1)
    return outputs


@pytest.mark.thorough(world=[4])
@pytest.mark.parametrize("world", SETTINGS)
def test_rows(pool: Pool, world: int) -> None:
    """A model that shares prompts returns what it returns without."""
    cases = []
    for kind, name, how in SETTINGS[world]:
        result = trained(tiny(kind), BATCHES[how], use_cache=False)
        cases.append((kind, name, how, result, outputs_of(kind, BATCHES[how])))
    pool.run(world, trained_on_rows, cases)


@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=30), min_size=1, max_size=40),
    st.booleans(),
    st.integers(0, 25),
    st.sampled_from([1, 4, 12]),
)
def test_a_row_has_the_tokens_of_every_sequence(sequences: Tokens, windows: bool, deep: int, least: int) -> None:
    sequences = [*sequences, *([1] * n + [2] for n in range(deep))]  # each one branches off one token later
    with mock.patch.object(prompts_module, "LEAST", least):
        rollouts = seqpar.hf.share_prompts(sequences, windows=windows)
    (ids,), (positions,), n = rollouts.input_ids, rollouts.position_ids, rollouts.labels.shape[1]
    seen = layer_mask(rollouts.mask, True, 5 if windows else None, None)
    dense, last = seen.dense(n), rollouts.tree.places.max(1).values
    for row, tokens in enumerate(sequences):
        places = rollouts.tree.places[row, : len(tokens)]
        assert ids[places].tolist() == tokens and positions[places].tolist() == [*range(len(tokens))]
        assert rollouts.labels[0, places].tolist() == [*tokens[1:], -100]
        assert torch.equal(rollouts.places[row, : len(tokens) - 1], places[:-1])
        assert dense[places[-1]].nonzero().flatten().tolist() == places[-5 if windows else 0 :].tolist()
    assert int(rollouts.tree.copies.sum()) == sum(map(len, sequences)) and int(last.max()) == n - 1


def test_branches_that_do_not_pay() -> None:
    """Equal words at the beginning of answers are stored with each answer, and those of prompts with each prompt."""
    heads, answers = [[1, 2, *[n] * 150] for n in (3, 4)], [[5, 6, 7], [5, 6, 8], [9, 6, 7]]
    row = seqpar.hf.share_prompts(heads, [answers] * 2)
    assert row.mask == seqpar.Mask.tree([-1, 0, 0, 0, -1, 4, 4, 4], [151, 4, 4, 4] * 2)
    long = [[1] * 150 + [n] for n in range(2)]  # saves 150 tokens
    row = seqpar.hf.share_prompts(heads[:1], [[*long, [2]]])
    assert row.mask == seqpar.Mask.tree([-1, 0, 1, 1, 0], [151, 150, 2, 2, 2])
    assert seqpar.hf.share_prompts([[1, 2, 3], [1, 2, 4]]).mask == seqpar.Mask.tree([-1, 0, 0], [1, 2, 2])


def test_rollouts_that_share_everything_or_nothing() -> None:
    for prompt in (1, 5):  # what the planner counts: answers that begin with different tokens
        row = seqpar.hf.share_prompts([[3] * prompt], [[[7], [8, 8, 8], [9, 9]]])
        assert row.mask.dense(row.labels.shape[1]).equal(tree_of(prompt, [1, 3, 2]).dense(row.labels.shape[1]))
        assert prompt_sharing(prompt, [1, 3, 2]).tokens[0] == row.labels.shape[1]
    rollouts = seqpar.hf.share_prompts([[5, 6, 7]], [[[8, 9]] * 3])
    assert (rollouts.input_ids.tolist(), rollouts.tree.copies.tolist()) == ([[5, 6, 7, 8, 9]], [[3] * 5])
    assert rollouts.labels.tolist() == [[-100, -100, 8, 9, -100]]
    x = torch.arange(10.0).view(1, 5, 2).requires_grad_()
    rollouts.unshare(x).sum().backward()
    assert x.grad is not None and x.grad[0, :, 0].tolist() == [0, 0, 3, 3, 0]  # of three rollouts
    apart = seqpar.hf.share_prompts([[5, 6], torch.tensor([6])], [[[8]], [[8, 4], []]])
    assert apart.mask == seqpar.Mask.tree([-1, -1, -1], [3, 3, 1]) and apart.counted.sum(1).tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([],), r"sequences: lengths \[\]; give at least one"),
        (([[1], []],), r"sequences: lengths \[1, 0\]; give at least one, each of at least one token"),
        (([[1]], [[[2]], [[3]]]), "answers: for 2 prompts, but there are 1"),
        (([[1]], [[]]), "answers: there are none"),
        (([[0.5]],), r"sequences\[0\]: torch.float32 of shape \(1,\); expected the ids of its tokens"),
        (([[1]], [[[[2]]]]), r"answers\[0\]\[0\]: torch.int64 of shape \(1, 1\); expected the ids"),
    ],
)
def test_refused_sequences(arguments: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        seqpar.hf.share_prompts(*arguments)


@pytest.mark.parametrize(
    ("kind", "arguments", "batch", "words"),
    [
        ("qwen3_5", {}, {}, "share_prompts: Qwen3_5ForCausalLM: it has layers with recurrent states"),
        ("bert", {}, {}, "share_prompts: BertForMaskedLM: it has layers that are not causal"),
        ("llama4", {}, {}, "share_prompts: Llama4ForCausalLM: it has layers that attend in chunks"),
        ("llama", {"alibi_slopes": [0.5] * 4}, {}, "LlamaForCausalLM: alibi_slopes count all tokens"),
        ("llama", {"outputs": "local"}, {}, "outputs='local': with share_prompts=True a call returns the outputs"),
        ("llama", {}, {"labels": None, "logits_to_keep": 1}, "logits_to_keep=1: with share_prompts=True"),
        ("llama", {}, {"return_dict": False}, "return_dict=False: with share_prompts=True"),
        ("llama", {}, {"x": torch.zeros(12, 28)}, r"x: torch.float32 of shape \(12, 28\); with share_prompts=True"),
        (
            "llama",
            {},
            {"labels": torch.ones(12, 28, dtype=torch.int64)},
            "labels: in row 0, padding predicts the label of",
        ),
    ],
)
def test_refused(kind: str, arguments: dict[str, Any], batch: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        seqpar.hf.parallelize(tiny(kind), share_prompts=True, **arguments)(**{**BATCHES["left"], **batch})


def test_rollouts_are_refused_by_other_models() -> None:
    rollouts = seqpar.hf.share_prompts(*rollouts_of())
    with pytest.raises(ValueError, match="share_prompts: Qwen3_5ForCausalLM: it has layers with recurrent states"):
        seqpar.hf.token_log_probs(seqpar.hf.parallelize(tiny("qwen3_5")), rollouts)
    with pytest.raises(ValueError, match="a window of 9 tokens, and a sequence has 28; pass windows=True"):
        seqpar.hf.token_log_probs(seqpar.hf.parallelize(tiny("mistral")), rollouts)
    model = seqpar.hf.parallelize(tiny("llama"))
    with pytest.raises(ValueError, match="seqpar_prompts: verify compares whole rows"):
        seqpar.hf.verify(model, rollouts.batch)
    model.loss_function = lambda logits, labels, **kwargs: logits.sum()
    with pytest.raises(ValueError, match=r"a loss function of your own gets the unshifted labels; .*share_prompts"):
        model(**rollouts.batch)
    model = seqpar.hf.parallelize(tiny("llama"), outputs="local")
    with pytest.raises(ValueError, match="outputs='local': rollouts that share prompts"):
        seqpar.hf.token_log_probs(model, rollouts)
    with pytest.raises(ValueError, match="seqpar_prompts: a call with a cache needs each row by itself"):
        model(**rollouts.batch, use_cache=True)
    with pytest.raises(ValueError, match=r"seqpar_prompts: .*pass the unchanged batch of share_prompts"):
        model(**{**rollouts.batch, "input_ids": rollouts.input_ids[:, 1:], "position_ids": None, "shift_labels": None})


def test_many_answers_in_windows() -> None:
    """A prompt is stored again for each 16 of its answers, if a window ends in it."""
    prompt, answers = group_of(3, answers=18)
    with torch.no_grad():
        expected = one_by_one(tiny("mistral"), [prompt], [answers])[0]
        rollouts = seqpar.hf.share_prompts([prompt], [answers], windows=True)
        assert rollouts.tree.copies.max() == 16
        assert_close(seqpar.hf.token_log_probs(seqpar.hf.parallelize(tiny("mistral")), rollouts), expected)
        wide = seqpar.hf.parallelize(tiny("mistral", sliding_window=25), share_prompts=True)
        rows = pad_sequence([torch.tensor(prompt + answer) for answer in answers], batch_first=True)
        log_probs = seqpar.hf.token_log_probs(wide, {"input_ids": rows, "attention_mask": rows != 0})
        assert wide._seqpar.last_sharding.seq_len < rollouts.labels.shape[1]
        assert_close(
            log_probs[:, len(prompt) - 1 :], one_by_one(tiny("mistral", sliding_window=25), [prompt], [answers])[0]
        )


def test_plans_of_a_loader() -> None:
    model = seqpar.hf.parallelize(tiny("mistral"), share_prompts=True)
    batch = seqpar.hf.PlanCollator(model, lambda examples: BATCHES["right"])([])
    with torch.no_grad():
        assert model(**batch).loss == model(**BATCHES["right"]).loss
    assert layer_mask(batch["seqpar_mask"], True, 9, None).branches


@on_ranks
def generated(group: ProcessGroup, expected: Tensor) -> None:
    """A cache has the keys of each row, and rows do not share them."""
    batch = {name: x for name, x in BATCHES["left"].items() if name != "labels"}
    for batches in ("shared", "per_rank"):
        model: Any = seqpar.hf.parallelize(tiny("mistral"), group=group, batches=batches, share_prompts=True).eval()
        tokens = model.generate(**batch, do_sample=False, max_new_tokens=6, eos_token_id=None)
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize("world", [1, 2])
def test_generation(pool: Pool, world: int) -> None:
    batch = {name: x for name, x in BATCHES["left"].items() if name != "labels"}
    model = tiny("mistral").eval()
    pool.run(world, generated, model.generate(**batch, do_sample=False, max_new_tokens=6, eos_token_id=None))


def fused(kind: str) -> Any:
    """A model with TRL's fused head."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model := tiny(kind), temperature=0.7, outputs=("log_probs", "entropy"))
    return model


def fused_outputs(kind: str) -> tuple[dict[str, Tensor], Result]:
    model, fields = fused(kind), ("loss", "log_probs", "entropy", "label_mask", "aux_loss")

    def step() -> float:
        loss = model(**BATCHES["right"], fused_lm_head=True, output_router_logits=True).loss
        loss.backward()
        return float(loss)

    with torch.no_grad():
        output = model(**BATCHES["right"], fused_lm_head=True, output_router_logits=True)
    return {name: output[name] for name in fields}, rounded(model, step)


@on_ranks
def rollouts_of_each_rank(group: ProcessGroup) -> None:
    model = seqpar.hf.parallelize(tiny("llama"), group=group, batches="per_rank")
    with pytest.raises(ValueError, match="seqpar_prompts: not supported with batches='per_rank'; pass whole rows"):
        seqpar.hf.token_log_probs(model, seqpar.hf.share_prompts(*rollouts_of()))


def test_rollouts_of_each_rank_are_refused(pool: Pool) -> None:
    pool.run(2, rollouts_of_each_rank)


@on_ranks
def with_fused_head(group: ProcessGroup, outputs: dict[str, Tensor], result: Result) -> None:
    for batches in ("shared", "per_rank"):
        model: Any = fused("qwen3_moe")
        seqpar.hf.parallelize(model, group=group, batches=batches, share_prompts=True)
        ours = model(**BATCHES["right"], fused_lm_head=True, output_router_logits=True)
        for name, theirs in outputs.items():
            assert_close(ours[name].float(), theirs.float(), what=f"{batches} {name}")
        ours.loss.backward()
        seqpar.sync_gradients(model, group=group)
        check_gradients(gradients(model), result, batches)


def test_trls_fused_head(pool: Pool) -> None:
    if not hasattr(pytest.importorskip("trl.trainer.utils"), "add_fused_lm_head"):
        pytest.skip("TRL before 1.15 has no fused head")
    pool.run(2, with_fused_head, *fused_outputs("qwen3_moe"))
