"""Gradients equal one device's under every wrapper, also of parts before ``shard`` and after ``unshard``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Sharding

from .pool import Pool, mesh_of, on_ranks

TOKENS, HIDDEN, VOCAB = 13, 8, 11


class Model(nn.Module):
    """A stem, a body with attention, and a head, in float64.

    Args:
        kind: which of them work on this rank's tokens.
            * "tokens": all of them. The loss is ``token_loss``.
            * "parts": the body. The loss is computed from the whole output.
            * "skip": the same, and the head also gets the output of the stem.
            * "attention": only attention, in two layers. Every other module works on whole tensors.
            * "mixed": stem and body, with a loss of their own from whole outputs beside ``token_loss``.
            * "middle": stem, body and head. A module between body and head works on whole tensors.
            * "stem": body and head.
            * "tied": as "parts", but the body uses the stem's weights again.
        checkpointed: None, or the ``use_reentrant`` of activation checkpointing.
    """

    def __init__(self, kind: str, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.kind, self.checkpointed = kind, checkpointed
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.stem, self.body, self.out, self.middle = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.head, self.pooled = nn.Linear(HIDDEN, VOCAB), nn.Linear(HIDDEN, 3)
        self.double()

    def attend(self, x: Tensor, sharding: Sharding | None, layer: nn.Linear) -> Tensor:
        q = layer(x).unflatten(-1, (2, HIDDEN // 2))  # [b, s, heads, head_dim]
        if self.kind == "attention" and sharding is not None:
            q = sharding.shard(q)
        attended = seqpar.attention(q, q, q, strategy="ring" if sharding else "local", sharding=sharding).flatten(2)
        return sharding.unshard(attended) if self.kind == "attention" and sharding is not None else attended

    def layer(self, x: Tensor, sharding: Sharding | None) -> Tensor:
        x = x + self.attend(x, sharding, self.stem if self.kind == "tied" else self.body)
        return x + self.out(x).tanh()

    def forward(self, ids: Tensor, labels: Tensor, sharding: Sharding | None, **options: Any) -> Tensor:
        """The loss. ``ids`` and ``labels`` are int64 ``[b, s]``, whole ones except with "tokens" and "mixed"."""
        shard: Callable[[Tensor], Tensor] = sharding.shard if sharding else lambda x: x
        unshard: Callable[[Tensor], Tensor] = sharding.unshard if sharding else lambda x: x
        kind = self.kind
        if kind in ("tokens", "mixed", "middle"):
            ids = shard(ids)
        x = stem = self.stem(self.embed(ids)).tanh()
        if kind in ("parts", "skip", "stem", "tied"):
            x = shard(x)
        for _ in range(2 if kind == "attention" else 1):
            if self.checkpointed is None:
                x = self.layer(x, sharding)
            else:
                x = checkpoint(self.layer, x, sharding, use_reentrant=self.checkpointed)
        loss: Tensor = torch.zeros((), dtype=x.dtype)
        if kind == "middle":
            x = shard(self.middle(unshard(x).cumsum(1)))
        if kind in ("tokens", "mixed", "middle", "stem"):
            losses = F.cross_entropy(self.head(x).mT, shard(labels), reduction="none")
            if sharding:
                loss = loss + seqpar.token_loss(losses, shard(labels), sharding=sharding, **options)
            else:
                loss = loss + losses.sum() / (labels != -100).sum()
        if kind not in ("tokens", "middle", "stem"):
            whole = x if kind == "attention" else unshard(x)
            if kind == "skip":
                whole = whole + stem
            loss = loss + self.pooled(whole[:, -1]).square().mean()
        return loss


def rows(dp: int) -> tuple[Tensor, Tensor]:
    """Random ids and labels, int64 ``[dp, TOKENS]`` each. Fewer labels count in the first row."""
    ids, labels = torch.randint(VOCAB, (2, dp, TOKENS)).unbind()
    labels[0, 2:9] = -100
    return ids, labels


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def wrap(model: Model, how: str, group: ProcessGroup) -> nn.Module:
    """``model`` inside a wrapper over ``group``."""
    if how.startswith("ddp"):
        return DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    if how == "fsdp1":
        return FullyShardedDataParallel(model, process_group=group, device_id=torch.device("cpu"), use_orig_params=True)
    if how == "fsdp2":
        mesh = DeviceMesh.from_group(group, "cpu")
        fully_shard(model.body, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def gradients(model: nn.Module, wrapped: nn.Module, how: str) -> dict[str, Tensor]:
    if how == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
            named = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in wrapped.named_parameters()}
            return {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(got: dict[str, Tensor], local: nn.Module) -> None:
    for name, p in local.named_parameters():
        if p.grad is None:
            assert name not in got or not got[name].any(), name
        else:
            torch.testing.assert_close(got[name], p.grad, rtol=1e-9, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks
def step(group: ProcessGroup, how: str, kind: str, checkpointed: bool | None = None) -> None:
    """Two steps of one model, each with other data, against the same on one device."""
    torch.manual_seed(int(torch.randint(1 << 30, ())))
    local, model = Model(kind), Model(kind, checkpointed)
    model.load_state_dict(local.state_dict())
    wrapped = wrap(model, how, group)
    if how == "ddp compiled":
        wrapped = torch.compile(wrapped)
    sharding = Sharding(TOKENS, "zigzag", group=group)
    for _ in range(2):
        ids, labels = rows(2)
        local.zero_grad()
        wrapped.zero_grad()
        local(ids, labels, None).backward()
        wrapped(ids, labels, sharding).backward()
        if how == "sync":
            seqpar.sync_gradients(model, group=group)
        else:
            with pytest.raises(ValueError, match="over the ranks of the sequence reduces its gradient; leave sync_gra"):
                seqpar.sync_gradients(model, group=group)
        assert_equal(gradients(model, wrapped, how), local)


KINDS = ("tokens", "parts", "skip", "attention", "mixed", "middle", "stem")


@pytest.mark.parametrize("how", ["sync", "ddp", "fsdp2", "fsdp1"])
def test_gradients_equal_one_device(pool: Pool, how: str) -> None:
    for kind in (*KINDS, *(["tied"] if how != "sync" else [])):
        pool.run(2, step, how, kind)
