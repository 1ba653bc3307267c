"""Gradients equal one device's under every wrapper, also of parts before ``shard`` and after ``unshard``."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Sharding

from ..pool import OwnPool, Pool, mesh_of, on_ranks

TOKENS, HIDDEN, VOCAB = 13, 8, 11


class Model(nn.Module):
    """A stem, a body with attention, and a head, in float64.

    Args:
        kind: which of them work on this rank's tokens.
            * "tokens": all of them. The loss is ``token_loss``.
            * "parts": the body. The loss is computed from the whole output.
            * "skip": the same, and the head also gets the output of the stem.
            * "twice": as "parts", with the body twice.
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
        strategy = "local" if sharding is None else "ring"
        attended = seqpar.attention(q, q, q, strategy=strategy, sharding=sharding).flatten(2)
        return sharding.unshard(attended) if self.kind == "attention" and sharding is not None else attended

    def layer(self, x: Tensor, sharding: Sharding | None) -> Tensor:
        x = x + self.attend(x, sharding, self.stem if self.kind == "tied" else self.body)
        return x + self.out(x).tanh()

    def forward(self, ids: Tensor, labels: Tensor, sharding: Sharding | None) -> Tensor:
        """The loss. ``ids`` and ``labels`` are int64 ``[b, s]``, of all tokens."""
        shard, unshard = (seqpar.shard, seqpar.unshard) if sharding is not None else (lambda x, sharding: x,) * 2
        kind = self.kind
        if kind in ("tokens", "mixed", "middle"):
            ids = shard(ids, sharding=sharding)
        x = stem = self.stem(self.embed(ids)).tanh()
        if kind in ("parts", "skip", "stem", "tied", "twice"):
            x = shard(x, sharding=sharding)
        for _ in range(2 if kind in ("attention", "twice") else 1):
            if self.checkpointed is None:
                x = self.layer(x, sharding)
            else:
                x = checkpoint(self.layer, x, sharding, use_reentrant=self.checkpointed)
        loss: Tensor = torch.zeros((), dtype=x.dtype)
        if kind == "middle":
            x = shard(self.middle(unshard(x, sharding=sharding).cumsum(1)), sharding=sharding)
        if kind in ("tokens", "mixed", "middle", "stem"):
            losses = F.cross_entropy(self.head(x).mT, shard(labels, sharding=sharding), reduction="none")
            if sharding is not None:
                loss = loss + seqpar.token_loss(losses, shard(labels, sharding=sharding), sharding=sharding)
            else:
                loss = loss + losses.sum() / (labels != -100).sum()
        if kind not in ("tokens", "middle", "stem"):
            whole = x if kind == "attention" else unshard(x, sharding=sharding)
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


def wrap(model: Model, how: str, mesh: DeviceMesh) -> nn.Module:
    """``model`` inside a wrapper over a mesh of one or two dimensions."""
    if how == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    if how == "fsdp1":
        return FullyShardedDataParallel(model, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True)
    if how == "fsdp2":
        fully_shard(model.body, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def gradients(model: nn.Module, wrapped: nn.Module) -> dict[str, Tensor]:
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
            named = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in wrapped.named_parameters()}
            return {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(got: dict[str, Tensor], local: nn.Module) -> None:
    for name, p in local.named_parameters():
        if p.grad is None:
            assert name not in got or not got[name].any(), name
        else:
            torch.testing.assert_close(got[name], p.grad, rtol=1e-9, atol=1e-13, msg=f"{name}: {{}}".format)


def two_models(kind: str, checkpointed: bool | None = None) -> tuple[Model, Model]:
    """The same model twice, without the parts that ``kind`` does not use: DDP would wait for their gradients."""
    local, model = Model(kind), Model(kind, checkpointed)
    model.load_state_dict(local.state_dict())
    local(*rows(1), None).backward()
    for p, q in zip(local.parameters(), model.parameters(), strict=True):
        p.requires_grad_(p.grad is not None)
        q.requires_grad_(p.grad is not None)
        p.grad = None
    return local, model


@on_ranks
def step(
    group: ProcessGroup, seed: int, how: str, kind: str, checkpointed: bool | None = None, compiled: bool = False
) -> None:
    """Two steps of one model, each with other data, against the same on one device."""
    torch.manual_seed(seed)
    local, model = two_models(kind, checkpointed)
    wrapped = wrap(model, how, DeviceMesh.from_group(group, "cpu"))
    run = torch.compile(wrapped, backend="aot_eager") if compiled else wrapped
    sharding = Sharding(TOKENS, "zigzag", group=group)
    for _ in range(2):
        ids, labels = rows(2)
        local.zero_grad()
        wrapped.zero_grad()
        local(ids, labels, None).backward()
        run(ids, labels, sharding).backward()
        if how == "sync":
            seqpar.sync_gradients(model, group=group)
        else:
            with pytest.raises(ValueError, match="over the ranks of the sequence reduces its gradient; leave sync_gra"):
                seqpar.sync_gradients(model, group=group)
        assert_equal(gradients(model, wrapped), local)


def fresh_seed() -> int:
    return int(torch.randint(1 << 30, ()))


KINDS = ("tokens", "parts", "skip", "twice", "attention", "mixed", "middle", "stem")


@pytest.mark.parametrize("how", ["sync", "ddp", "fsdp2", "fsdp1"])
def test_gradients_equal_one_device(pool: Pool, how: str) -> None:
    for kind in (*KINDS, *(["tied"] if how != "sync" else [])):
        pool.run(2, step, fresh_seed(), how, kind)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(pool: Pool, use_reentrant: bool) -> None:
    for how in ("sync", "ddp", "fsdp2"):
        pool.run(2, step, fresh_seed(), how, "mixed", use_reentrant)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sync", "ddp", "fsdp2"])
def test_compiled_models(pool: Pool, how: str) -> None:
    pool.run(2, step, fresh_seed(), how, "tokens", compiled=True)


@pytest.mark.slow
@on_ranks
def compile_before_wrapping(group: ProcessGroup, seed: int) -> None:
    """One compiled function, first without a wrapper, then of the same model inside DDP."""
    torch.manual_seed(seed)
    local, model = two_models("tokens")
    ids, labels = rows(2)
    local(ids, labels, None).backward()
    sharding = Sharding(TOKENS, "zigzag", group=group)
    local_ids, local_labels = (seqpar.shard(x, sharding=sharding) for x in (ids, labels))
    hidden = model.embed(local_ids).detach()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss() -> Tensor:
        logits = model.head(hidden)
        losses = F.cross_entropy(logits.mT, local_labels, reduction="none")
        return seqpar.token_loss(losses, local_labels, sharding=sharding)

    (partial,) = torch.autograd.grad(loss(), model.head.weight)
    wrapper = DistributedDataParallel(model, process_group=group)
    (scaled,) = torch.autograd.grad(loss(), model.head.weight)
    torch.testing.assert_close(scaled, partial * group.size())
    del wrapper
    gc.collect()
    (again,) = torch.autograd.grad(loss(), model.head.weight)
    torch.testing.assert_close(again, partial)


def test_compiled_code_looks_for_wrappers_when_it_runs(pool: Pool) -> None:
    pool.run(2, compile_before_wrapping, fresh_seed())


@on_ranks
def step_with_dp(group: ProcessGroup, seed: int, how: str, over: str, kind: str) -> None:
    """A row for each dp rank, with unlike numbers of labels, against all rows on one device."""
    torch.manual_seed(seed)
    mesh = mesh_of(dp=2, ring=2, ulysses=1, tp=1)
    local, model = two_models(kind)
    flat = mesh["dp", "ring"]._flatten("dp_ring")
    wrapped = wrap(model, how, {"dp": mesh["dp"], "both": flat, "hybrid": mesh["dp", "ring"], "": flat}[over])
    sharding = Sharding(TOKENS, "zigzag", mesh=mesh)
    for _ in range(2):
        ids, labels = rows(2)
        local.zero_grad()
        wrapped.zero_grad()
        own = slice(mesh["dp"].get_local_rank(), mesh["dp"].get_local_rank() + 1)
        loss = wrapped(ids[own], labels[own], sharding)
        torch.testing.assert_close(loss, local(ids[own], labels[own], None))  # the loss of this sequence alone
        loss.backward()
        local(ids, labels, None).backward()
        if over == "dp":
            seqpar.sync_gradients(model, mesh=mesh)
        assert_equal(gradients(model, wrapped), local)
        if how != "fsdp1":
            seqpar.clip_grad_norm_(model, 1e-3, mesh=mesh)  # writes to gradients that have been summed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "over"),
    [("ddp", "dp"), ("fsdp2", "dp"), ("fsdp1", "dp"), ("ddp", "both"), ("fsdp2", "both"), ("fsdp2", "hybrid")],
)
def test_dp_ranks_with_unlike_numbers_of_labels(own: OwnPool, how: str, over: str) -> None:
    for kind in ("tokens", "mixed") if how != "fsdp1" else ("tokens",):
        own.pool.run(4, step_with_dp, fresh_seed(), how, over, kind)


@on_ranks
def dp_without_a_wrapper(group: ProcessGroup, seed: int) -> None:
    """The loss and the gradients over all ranks: the loss is that of all rows, and the sum over all ranks is right."""
    torch.manual_seed(seed)
    mesh = mesh_of(dp=2, ring=2, ulysses=1, tp=1)
    local, model = two_models("tokens")
    ids, labels = rows(2)
    expected = local(ids, labels, None)
    expected.backward()
    sharding = Sharding(TOKENS, "zigzag", mesh=mesh)
    own = slice(mesh["dp"].get_local_rank(), mesh["dp"].get_local_rank() + 1)
    x = model.stem(model.embed(sharding.shard(ids[own]))).tanh()
    labels_local = sharding.shard(labels[own])
    losses = F.cross_entropy(model.head(model.layer(x, sharding)).mT, labels_local, reduction="none")
    loss = seqpar.token_loss(losses, labels_local, group=group)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    seqpar.sync_gradients(model, group=group)
    assert_equal(gradients(model, model), local)


def test_dp_without_a_wrapper(own: OwnPool) -> None:
    own.pool.run(4, dp_without_a_wrapper, fresh_seed())


@on_ranks
def parts_of_a_model(group: ProcessGroup, seed: int) -> None:
    """Gradients that ``sync_gradients`` has to tell apart."""
    torch.manual_seed(seed)
    x = torch.randn(1, 12, HIDDEN, dtype=torch.float64)
    sharding = Sharding(12, "contiguous", group=group)
    body, head = nn.Linear(HIDDEN, HIDDEN).double(), nn.Linear(HIDDEN, 2).double()
    wanted = torch.autograd.grad(head(body(x)).sum(), [body.bias, head.weight, head.bias])

    # Every rank has the same partial gradient of body.bias, because all have 6 tokens.
    head(sharding.unshard(body(sharding.shard(x)))).sum().backward()
    seqpar.sync_gradients(body, group=group)
    seqpar.sync_gradients(head, group=group)  # two calls, one for each part
    for p, expected in zip((body.bias, head.weight, head.bias), wanted, strict=True):
        torch.testing.assert_close(p.grad, expected)

    # The same with a frozen body: then unshard has no backward.
    body.requires_grad_(False)
    head.zero_grad()
    head(sharding.unshard(body(sharding.shard(x)))).sum().backward()
    seqpar.sync_gradients(nn.Sequential(body, head), group=group)
    torch.testing.assert_close(head.weight.grad, wanted[1])

    # Beside a whole loss, a loss of this rank's tokens: its gradients are partial, and the same on every rank.
    body.requires_grad_(True)
    body.zero_grad()
    head.zero_grad()
    hidden = body(sharding.shard(x))
    labels = torch.ones(1, 6, dtype=torch.int64)
    loss = sharding.unshard(hidden).sum() + seqpar.token_loss(head(hidden).sum(-1), labels, sharding=sharding)
    loss.backward()
    seqpar.sync_gradients(nn.Sequential(body, head), group=group)
    torch.testing.assert_close(head.bias.grad, torch.ones(2, dtype=torch.float64))


def test_parts_that_are_synced(pool: Pool) -> None:
    pool.run(2, parts_of_a_model, fresh_seed())


@on_ranks
def inputs_of_a_wrapped_model(group: ProcessGroup, seed: int) -> None:
    """The gradient of a tensor before ``shard`` is the whole gradient, also where the loss is multiplied."""
    torch.manual_seed(seed)
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(VOCAB, (1, TOKENS))
    head = nn.Linear(HIDDEN, VOCAB).double()
    (expected,) = torch.autograd.grad(F.cross_entropy(head(x).mT, labels), x)
    sharding = Sharding(TOKENS, "zigzag", group=group)
    wrapped = DistributedDataParallel(head, process_group=group)
    for by_hand in (False, True):
        losses = F.cross_entropy(wrapped(sharding.shard(x)).mT, sharding.shard(labels), reduction="none")
        options = {"gradients": "mean"} if by_hand else {}
        loss = seqpar.token_loss(losses, sharding.shard(labels), sharding=sharding, **options)
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], expected)


def test_inputs_of_a_wrapped_model(pool: Pool) -> None:
    pool.run(2, inputs_of_a_wrapped_model, fresh_seed())


@on_ranks
def divide_by_hand(group: ProcessGroup, seed: int) -> None:
    """``fully_shard`` that sums, as torchtitan sets it."""
    torch.manual_seed(seed)
    local, model = two_models("mixed")
    wrapped = wrap(model, "fsdp2", DeviceMesh.from_group(group, "cpu"))
    for module in wrapped.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    ids, labels = rows(2)
    logits = local.head(local.embed(ids))
    F.cross_entropy(logits.mT, labels).backward()
    sharding = Sharding(TOKENS, "zigzag", group=group)

    def losses() -> Tensor:
        logits = model.head(model.embed(sharding.shard(ids)))
        return F.cross_entropy(logits.mT, sharding.shard(labels), reduction="none")

    vars(model)["forward"] = losses
    seqpar.token_loss(wrapped(), sharding.shard(labels), sharding=sharding).backward()
    for layer in ("head", "embed"):
        torch.testing.assert_close(whole(getattr(model, layer).weight.grad), getattr(local, layer).weight.grad)


def test_a_divisor_that_was_set_by_hand(pool: Pool) -> None:
    pool.run(2, divide_by_hand, fresh_seed())


class DeepSpeedEngine(nn.Module):
    """Has the name of DeepSpeed's engine."""

    __module__, __qualname__ = "deepspeed.runtime.engine", "DeepSpeedEngine"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


class Attempt:
    """A model, a module outside of it, and tokens of 8 ranks, for a step that must be refused."""

    def __init__(self, group: ProcessGroup) -> None:
        torch.manual_seed(group.rank())
        self.group, self.mesh = group, mesh_of(dp=2, ring=2, ulysses=2, tp=1)
        self.sharding = Sharding(TOKENS, "zigzag", group=group)
        self.model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Dropout(), nn.Linear(HIDDEN, 1))
        self.outside = nn.Linear(1, 1)
        self.x = torch.ones(1, TOKENS, HIDDEN)
        self.synced: nn.Module = nn.Sequential(self.model, self.outside)

    @property
    def x_local(self) -> Tensor:
        return self.sharding.shard(self.x)

    def loss(self, losses: Tensor) -> Tensor:
        labels = self.sharding.shard(torch.ones(1, TOKENS, dtype=torch.int64))
        return seqpar.token_loss(losses[..., 0], labels, sharding=self.sharding)

    def ddp(self, group: ProcessGroup | None = None) -> nn.Module:
        self.wrapper: nn.Module = DistributedDataParallel(self.model, process_group=group or self.group)
        return self.wrapper


def tied(a: Attempt) -> Tensor:
    return a.loss(a.outside(a.sharding.shard(a.outside(a.x[..., :1]))))


def used_before_unshard_and_after(a: Attempt) -> Tensor:
    x_local = a.x_local
    full = a.sharding.unshard(a.outside(x_local[..., :1]))
    return F.linear(full, a.outside.weight).square().sum() + x_local.sum()


def tied_under_a_loss_of_ones_own(a: Attempt) -> Tensor:
    x = a.x[..., :1] + torch.arange(TOKENS)[:, None]
    return a.outside(a.sharding.shard(a.outside(x))).square().sum()


def dropout_before_shard(a: Attempt) -> Tensor:
    return a.sharding.unshard(a.sharding.shard(a.model(a.x))).square().sum()


def module_beside_a_wrapper(a: Attempt) -> Tensor:
    a.synced = a.outside
    return a.loss(a.outside(a.ddp()(a.x_local)))


def reentrant_checkpoint(a: Attempt) -> Tensor:
    return a.loss(checkpoint(a.ddp(), a.x_local.requires_grad_(), use_reentrant=True))


def wrapper_over_some_ranks(a: Attempt) -> Tensor:
    a.sharding = Sharding(TOKENS, "zigzag", mesh=a.mesh)
    return a.loss(a.ddp(a.mesh["ring"].get_group())(a.x_local))


def shard_over_other_ranks(a: Attempt) -> Tensor:
    half = Sharding(TOKENS, "zigzag", mesh=a.mesh)
    return half.unshard(half.shard(a.outside(a.x[..., :1]))).sum()


def deepspeed(a: Attempt) -> Tensor:
    a.wrapper = DeepSpeedEngine(a.model)
    return a.loss(a.wrapper(a.x_local))


REFUSED: dict[Callable[[Attempt], Tensor], str] = {
    tied: "used before shard, where its gradient is whole, and between shard and unshard",
    used_before_unshard_and_after: "1.weight: used before unshard, where its gradient is a part of a sum, and after",
    tied_under_a_loss_of_ones_own: "so that every rank should have the same gradient, but the ranks' gradients",
    dropout_before_shard: "every rank should have the same gradient, but the ranks' gradients differ",
    module_beside_a_wrapper: "but DistributedDataParallel does not hold it; wrap the model as a whole",
    reentrant_checkpoint: "reentrant activation checkpointing hides the parameters",
    wrapper_over_some_ranks: "which are some but not all of the ranks of the sequence, [0, 1, 2, 3]",
    shard_over_other_ranks: "pass sync_gradients the same mesh or group",
    deepspeed: "DeepSpeed's configuration decides what it divides by; pass token_loss gradients='mean'",
}


@on_ranks
def refused(group: ProcessGroup, loss_of: Callable[[Attempt], Tensor]) -> str:
    """The error of the backward or of ``sync_gradients``."""
    gc.collect()  # the wrappers of earlier tests
    attempt = Attempt(group)
    try:
        loss_of(attempt).backward()
        seqpar.sync_gradients(attempt.synced, group=group)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("loss_of", REFUSED)
def test_refused(pool: Pool, loss_of: Callable[[Attempt], Tensor]) -> None:
    messages = pool.run(8, refused, loss_of)
    for message in messages[: 4 if loss_of is wrapper_over_some_ranks else 8]:
        assert REFUSED[loss_of] in message
