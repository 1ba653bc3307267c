"""An error of the user on one rank ends the model's call on all ranks, wherever it is raised."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

pytest.importorskip("transformers")

import transformers

import seqpar
import seqpar.hf

from ..observe import message_of
from ..pool import OwnPool, on_ranks, start
from .workers import VOCAB, tiny

pytestmark = pytest.mark.slow

IDS = torch.arange(3, 43).view(2, 20) % VOCAB


class Fails(transformers.LogitsProcessor):  # type: ignore[misc]
    """Raises for the second token."""

    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores if self.calls == 1 else fail()


def fail(*_: Any) -> Any:
    raise RuntimeError("the user's")


def failing(model: Any) -> Any:
    model.model.layers[1].register_forward_pre_hook(fail)
    return model


def generate(model: Any, **options: Any) -> Any:
    return model.generate(IDS, **{"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **options})


def forward(model: Any) -> Any:
    return model(IDS)


# The other ranks are told in a handshake, or find that rank 1 has left its calls.
LEFT = r"\(s\) \[1\] of the (group raised|job)"
# What ranks call, what rank 1 calls instead, its error, and the error of the other ranks.
CASES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str, str]] = {
    "fewer tokens": (generate, lambda m: generate(m, max_new_tokens=2), r"\(s\) \[1\] .* have ended", "have ended"),
    "an unknown option": (generate, lambda m: generate(m, nonsense=1), "nonsense", LEFT),
    "a processor": (
        generate, lambda m: generate(m, logits_processor=[Fails()]), "user's", LEFT
    ),
    "a hook in generate": (generate, lambda m: generate(failing(m)), "user's", LEFT),
    "a hook": (forward, lambda m: forward(failing(m)), "user's", LEFT),
}  # fmt: skip


@on_ranks
def errors(group: ProcessGroup, port: int) -> list[str]:
    group, found = start(port, "errors", group.rank(), group.size(), 300.0), []
    for usual, other, *_ in CASES.values():
        model, again = (seqpar.hf.parallelize(tiny("llama").eval(), group=group) for _ in range(2))
        own = other if group.rank() == 1 else usual
        found.append(message_of(lambda own=own, model=model: own(model)))  # type: ignore[misc]
        seqpar.init_mesh(ring=-1, device_type="cpu")
        usual(again)
    return found


def test_an_error_of_one_rank_ends_the_call_on_all(own: OwnPool) -> None:
    """Not after the timeout, which is longer than any test."""
    for rank, found in enumerate(own.pool.run(2, errors, own.port)):
        for message, (case, (*_, of_rank_1, of_others)) in zip(found, CASES.items(), strict=True):
            assert re.search(of_rank_1 if rank == 1 else of_others, message), (rank, case, message)
