"""Runs the code that a plan prints. The fork server imports this module, so that no rank imports transformers again."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, ClassVar
from unittest import mock

import torch
import transformers  # noqa: F401 (the printed code imports it)
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import seqpar.hf
from seqpar.placement import balanced

from ..reference import nudge


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


def run_printed(texts: dict[str, str]) -> dict[str, float]:
    """Run each text on this rank as it is: the norm of the gradients of the first step."""
    found = {}
    for name, text in texts.items():
        with (
            mock.patch("torch.optim.AdamW", Recorded),
            mock.patch.object(balanced, "TILE", 4),
            mock.patch("torch.distributed.destroy_process_group"),  # the next text goes on in the same processes
        ):
            exec(compile(text, name, "exec"), {})
        found[name] = Recorded.norms[0]
        Recorded.norms.clear()
    torch.distributed.destroy_process_group()
    return found


def run_on_one_device(texts: dict[str, str]) -> list[dict[str, float]]:
    """The same norms of the model and the rows of each text, on one rank, with a loss of this test's own.

    Then the norms of the model whose weights ``nudge`` has changed: they differ by the rounding of one process.
    """
    seqpar.init_mesh()
    return [{name: _norm_on_one_device(text, nudged) for name, text in texts.items()} for nudged in (False, True)]


def _norm_on_one_device(text: str, nudged: bool) -> float:
    sizes = re.findall(r"(\w+)=(\d+)", text.split("seqpar.init_mesh(")[1].split(")")[0])
    replicas, parts = int(dict(sizes).get("dp", 1)), int(text.split("accumulation = ")[1].split("\n")[0])
    end = "seqpar.hf.parallelize(" if "hf.parallelize(" in text else "shards = mesh"
    alone = re.sub(r"seqpar.init_mesh\(.*?\)", "seqpar.init_mesh()", text.split(end)[0])
    names: dict[str, Any] = {}
    exec(compile(alone, "alone", "exec"), names)
    model, documents = names["model"], names.get("documents", [0, names["seq_len"]])
    if nudged:
        nudge(model.parameters())
    for replica in range(replicas):
        rows = names["batches"](replica)
        for _ in range(parts):
            tokens = next(rows)["input_ids"]
            if "ForMaskedLM" in text:  # each label is the token's own
                losses = cross_entropy(model(tokens).logits.transpose(1, 2), tokens, reduction="none")
                (losses.mean() / (replicas * parts)).backward()
                continue
            labels = tokens.roll(-1, 1)
            labels[:, [end - 1 for end in documents[1:]]] = -100
            if "hf.parallelize(" in text:
                positions = torch.cat([torch.arange(b - a) for a, b in pairwise(documents)])
                logits = model(tokens, position_ids=positions[None], use_cache=False).logits
                losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            else:
                losses = model(tokens, labels)
            (losses[labels != -100].mean() / (replicas * parts)).backward()
    return norm(model.parameters())
