"""``verify`` in training loops: every N-th step with SEQPAR_VERIFY=N, and once for models with code of their own."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import ProcessGroup

pytest.importorskip("transformers")

import transformers

import seqpar
import seqpar.hf
from seqpar.hf import VerificationError, VerificationReport
from seqpar.hf.calls import attention as hf_attention
from seqpar.hf.state import patch_of
from seqpar.hf.verification.monitoring import foreign_code

from ..pool import Pool, on_ranks
from .workers import make_batch, parallel, tiny

pytestmark = pytest.mark.slow


@on_ranks
def while_training(group: ProcessGroup, fault: bool) -> tuple[int, str]:
    with mock.patch.dict(os.environ, {"SEQPAR_VERIFY": "2", "SEQPAR_VERIFY_TOKENS": "24"}):
        model = parallel(group, "mistral")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    from seqpar.hf.verification import monitoring

    reports: list[VerificationReport] = []

    def count(*args: Any, **kwargs: Any) -> VerificationReport:
        reports.append(seqpar.hf.verify(*args, **kwargs))
        return reports[-1]

    try:
        with mock.patch.object(monitoring, "verify", count):
            for step in range(4):
                local = seqpar.hf.shard_batch(make_batch("left" if step else "packed"), group=group)
                model(**local).loss.backward()
                if not fault or step < 2:
                    seqpar.sync_gradients(model, group=group)
                optimizer.step()
                optimizer.zero_grad()
    except VerificationError as error:
        return len(reports), str(error)
    finally:
        seqpar.hf.restore(model)
    assert all(report.seq_len == 24 for report in reports)
    return len(reports), ""


def test_every_n_steps(pool: Pool) -> None:
    assert pool.run(2, while_training, False) == [(2, "")] * 2
    for checked, said in pool.run(2, while_training, True):
        assert checked == 1 and "were not averaged" in said


class OwnForCausalLM(transformers.MistralForCausalLM):  # type: ignore[misc]
    """A class that is not of transformers."""


@on_ranks
def by_itself(group: ProcessGroup, setting: str, own: bool, fault: bool) -> tuple[list[str], str]:
    """What is logged in two steps of training, and the error."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("seqpar")
    logger.addHandler(handler)
    model = tiny("mistral")
    if own:
        model.__class__ = OwnForCausalLM
    with ExitStack() as stack:
        stack.callback(logger.removeHandler, handler)
        stack.enter_context(mock.patch.dict(os.environ, {"SEQPAR_VERIFY": setting}))
        seqpar.hf.parallelize(model, group=group)
        stack.callback(seqpar.hf.restore, model)
        if fault:
            stack.enter_context(mock.patch.object(hf_attention, "window_and_chunk", return_value=(None, None)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        try:
            for _ in range(2):
                model(**make_batch("left", length=160)).loss.backward()
                seqpar.sync_gradients(model, group=group)
                optimizer.step()
                optimizer.zero_grad()
        except VerificationError as error:
            return said, str(error)
    return said, ""


def test_own_code_is_verified_once(pool: Pool) -> None:
    rank0, rank1 = pool.run(2, by_itself, "", own=True, fault=False)
    assert len(rank0[0]) == 1 and rank0[1] == "" and rank1 == ([], "")
    assert "OwnForCausalLM" in rank0[0][0] and "on 128 tokens" in rank0[0][0] and "SEQPAR_VERIFY=0" in rank0[0][0]
    for said, error in pool.run(2, by_itself, "", own=True, fault=True):
        assert not said and "model.layers.0.self_attn" in error and "without its sliding window" in error
    for setting, own in (("0", True), ("", False)):
        assert pool.run(2, by_itself, setting, own=own, fault=True) == [([], "")] * 2


def test_code_of_known_libraries() -> None:
    patch = patch_of(seqpar.hf.parallelize(tiny("llama"), strategy="local"))
    model = tiny("llama")
    assert foreign_code(model, patch) == ""
    model.model.layers[1].mlp.forward = lambda x: x
    assert "model.layers.1.mlp (LlamaMLP)" in foreign_code(model, patch)
    vars(patch.loss_functions[0])["_loss_function"].user_loss = lambda *args, **kwargs: None
    assert "the loss_function of LlamaForCausalLM" in foreign_code(model, patch)


def test_refused_environment() -> None:
    for name, value in (("SEQPAR_VERIFY", "often"), ("SEQPAR_VERIFY_TOKENS", "0")):
        with mock.patch.dict(os.environ, {name: value}), pytest.raises(ValueError, match=f"{name}="):
            seqpar.hf.parallelize(tiny("llama"), strategy="local")
