"""Runs the code that a plan prints. The fork server imports this module, so that no rank imports transformers again."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise, repeat
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import seqpar.hf  # (the printed code imports it)
from seqpar.placement import balanced

from .sizes import BATCH, DOCUMENTS, SIZES, TOKENS


def transformer() -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


def batch_of(is_shifted: bool, is_packed: bool) -> dict[str, torch.Tensor]:
    """The same batch in every part of a step and on every rank. transformers shifts the labels itself."""
    ids = torch.randint(0, 61, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:] if is_shifted else ids[:, :-1]}
    if is_packed:
        batch["position_ids"] = torch.cat([torch.arange(b - a) for a, b in pairwise(DOCUMENTS)])[None]
    return batch


def norm(parameters: Iterable[torch.nn.Parameter]) -> float:
    """The norm of all gradients, of the shards of all ranks together."""
    grads = [p.grad for p in parameters if p.grad is not None]
    whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in grads]
    return float(torch.stack([x.float().norm() for x in whole]).norm())


class Recorded(torch.optim.AdamW):
    """AdamW that takes no step, and records the norm of the gradients."""

    norms: ClassVar[list[float]] = []

    def step(self, closure: Any = None) -> Any:
        self.norms.append(norm(p for group in self.param_groups for p in group["params"]))


def run_printed(texts: dict[str, str]) -> dict[str, tuple[float, float]]:
    """Run each text on this rank: the loss of the step, and the norm of the gradients."""
    found = {}
    for name, text in texts.items():
        uses_hf = "seqpar.hf" in text
        names: dict[str, Any] = {"batches": repeat(batch_of(not uses_hf, "packed" in name))}
        if "packed" in name:
            names["mask"] = seqpar.Mask.documents(DOCUMENTS)
        if uses_hf:
            names["model"] = transformer()
        torch.manual_seed(0)
        with mock.patch("torch.optim.AdamW", Recorded), mock.patch.object(balanced, "TILE", 4):
            exec(compile(text, name, "exec"), names)
        found[name] = float(names["loss"].detach()) * names["accumulation"], Recorded.norms.pop()
    torch.distributed.destroy_process_group()
    return found
