"""Calls in which each rank of a sequence brings a batch of its own: ``parallelize(..., batches="own")``.

The ranks all-gather their batches and run one sharded forward for each. An exchange then gives every rank the outputs
of its own batch, of all tokens in order, as if it had run the model alone. Its backward sends the gradients back to the
ranks that hold the tokens, so each rank's parameters get the gradients of all ranks' losses with respect to the tokens
that it holds. Their sum over the ranks is the sum of the gradients of all losses: what data parallelism adds up.

All forwards but the last are recomputed in backward, which keeps the activations of one sharded batch at a time.

Shapes: batch rows of seq tokens (the full sequence), seq_local of them on this rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ..checks import no_compile
from ..comm.collectives import all_gather
from ..comm.handshake import Fingerprint, all_gather_header, check_same, fingerprint
from ..comm.trace import count_sent
from .latent import hand_on_keys, hand_on_latents, hands_on_latents
from .multimodal import brings_more_than_text, merges
from .state import NAME, Patch, Whole
from .whole import PER_TOKEN, finish, generates, shard_call

# Scalars of which each rank computes its tokens' part.
_PARTIAL_SUMS = ("loss", "aux_loss")
_PLAIN = (bool, int, float, str)
# ``nn.Module.__call__`` looks it up in the module; it runs the hooks and the forward.
_CALL = "_call_impl"
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seq_lens", "cu_seqlens")


def take_over_calls(model: nn.Module) -> None:
    """Let calls of ``model`` run ``call``, outside of all its hooks, because they are run once for each batch."""
    vars(model)[_CALL] = MethodType(call, model)


def give_calls_back(model: nn.Module) -> None:
    """Undo ``take_over_calls``."""
    vars(model).pop(_CALL, None)


@contextmanager
def shared_calls(model: nn.Module, patch: Patch) -> Iterator[None]:
    """Within the block all ranks call ``model`` with the same batch, whatever they do otherwise."""
    batches, taken_over = patch.batches, _CALL in vars(model)
    if taken_over:
        give_calls_back(model)
    patch.batches = "shared"
    try:
        yield
    finally:
        patch.batches = batches
        if taken_over:
            take_over_calls(model)


@no_compile
def call(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The outputs of this rank's batch. All ranks of the sequence call the model, each with its own.

    A call that fills or uses a cache generates from this rank's prompts on this rank alone.

    Raises:
        TypeError, ValueError: the batch cannot be sent, or cannot be sharded; or the ranks' calls do not go together.
        RuntimeError: another rank raised on its batch, or did not call the model before the group's timeout.
    """
    patch: Patch = model._seqpar
    plain = type(model)._call_impl
    kwargs = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
    if generates(kwargs):
        with _one_device(patch):
            return plain(model, **kwargs)
    group = patch.group
    assert group is not None  # with one rank calls are not taken over
    recomputes = torch.is_grad_enabled()
    outputs, wholes = [], []
    for rank, (batch, seed) in enumerate(_all_gather_batches(model, kwargs, group)):
        try:
            local, whole = shard_call(model, batch, seed)
        except ValueError as error:
            raise ValueError(f"the batch of rank {rank} of the sequence: {error}") from error
        if recomputes and rank < patch.ranks - 1:
            # Early stopping would end the recomputation within a forward, whose messages must all be received.
            with set_checkpoint_early_stop(False):
                outputs.append(checkpoint(plain, model, use_reentrant=False, **local))
        else:
            outputs.append(plain(model, **local))
        wholes.append(whole)
    return _to_owners(outputs, wholes, model)


@contextmanager
def _one_device(patch: Patch) -> Iterator[None]:
    """Within the block the model attends on this rank alone."""
    patch.sharded = False
    latent = [module for module in patch.modules if hands_on_latents(module)]
    for layer in latent:
        hand_on_keys(layer)
    for original, ours, _ in patch.config_copies:
        implementation = original._attn_implementation
        ours._attn_implementation = "sdpa" if implementation == NAME else implementation
    try:
        yield
    finally:
        for _, ours, _ in patch.config_copies:
            ours._attn_implementation = NAME
        for layer in latent:
            hand_on_latents(layer)
        patch.sharded = True


class _Header(NamedTuple):
    """What the other ranks must know about a rank's batch.

    Attributes:
        arguments: their names and dtypes, the dimensions that are neither rows nor seq, and plain values.
        gradients: whether the call is made for a backward.
        training: whether the model is in training mode.
        rows, seq_len: of the batch.
        seed: of the dropout of attention weights.
    """

    arguments: Fingerprint
    gradients: bool
    training: bool
    rows: int
    seq_len: int
    seed: int


def _all_gather_batches(model: Any, kwargs: dict[str, Any], group: ProcessGroup) -> list[tuple[dict[str, Any], int]]:
    """By rank: its call's arguments, and a seed."""
    patch: Patch = model._seqpar
    prepared: list[_Arguments] = []

    def header() -> _Header:
        if merges(model) and brings_more_than_text(kwargs):
            raise ValueError("batch: it has images; with batches='own' batches of text alone are supported")
        prepared.append(_Arguments(kwargs))
        ours = prepared[0]
        # Not a random number: drawing one would change what the trainer draws next.
        seed = (torch.initial_seed() + patch.calls) % 2**62
        training = any(m.training for m in patch.modules)
        return _Header(ours.fingerprint, torch.is_grad_enabled(), training, ours.rows, ours.seq_len, seed)

    headers = all_gather_header(header, group)
    patch.calls += 1
    check_same(headers, "arguments", "gradients", "training")
    ours = prepared[0]
    sizes = [ours.nbytes(header.rows, header.seq_len) for header in headers]
    gathered = all_gather(ours.packed(), sizes, 0, group).split(sizes)
    return [
        (ours.unpacked(x, header.rows, header.seq_len), header.seed)
        for x, header in zip(gathered, headers, strict=True)
    ]


class _Arguments:
    """A call's arguments: tensors, whose shapes follow from the batch's rows and seq, and plain values."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        if kwargs.get("seqpar") is not None:
            raise ValueError("batch: it is sharded already; with batches='own' call the model with the full batch")
        if kwargs.get("return_dict") is False:
            raise ValueError("return_dict=False: with batches='own' outputs are exchanged by name; leave it out")
        given = {name: x for name, x in kwargs.items() if x is not None}
        tokens = given.get("input_ids", given.get("inputs_embeds"))
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            raise ValueError("batch: expected 'input_ids' [batch, seq] or 'inputs_embeds' [batch, seq, hidden]")
        if tokens.requires_grad:
            raise ValueError(
                "inputs_embeds: gradients with respect to them are not supported with batches='own'; give input_ids, "
                "or inputs_embeds.detach()"
            )
        self.rows, self.seq_len = tokens.shape[:2]
        self.device = tokens.device
        self.tensors: dict[str, Tensor] = {}
        self.values: dict[str, Any] = {}
        for name, x in sorted(given.items()):
            if name in _BOUNDARIES:
                raise ValueError(f"{name}: not supported with batches='own'; give position_ids that restart instead")
            if name == "num_items_in_batch":
                x = torch.as_tensor(x)  # ranks may differ
            if name == "position_ids" and isinstance(x, Tensor) and x.dim() <= 2:
                x = x.expand(self.rows, -1)
            if isinstance(x, Tensor):
                self.tensors[name] = x.to(self.device)
            elif isinstance(x, _PLAIN):
                self.values[name] = x
            else:
                raise TypeError(
                    f"{name}={type(x).__name__}: with batches='own' the other ranks get the arguments; expected a "
                    "tensor, a number, a bool or a string"
                )
        # What stands for each dimension: "rows", "seq", or its size.
        self.shapes = {name: tuple(self._dimensions(x)) for name, x in self.tensors.items()}

    def _dimensions(self, x: Tensor) -> Iterator[str | int]:
        for i, size in enumerate(x.shape):
            yield "rows" if (i, size) == (0, self.rows) else "seq" if (i, size) == (1, self.seq_len) else size

    @property
    def fingerprint(self) -> Fingerprint:
        dtypes = tuple((name, str(x.dtype)) for name, x in self.tensors.items())
        return fingerprint(dtypes, tuple(self.shapes.items()), tuple(self.values.items()))

    def _shape(self, name: str, rows: int, seq_len: int) -> list[int]:
        known = {"rows": rows, "seq": seq_len}
        return [known[d] if isinstance(d, str) else d for d in self.shapes[name]]

    def nbytes(self, rows: int, seq_len: int) -> int:
        """The bytes of the tensors of a batch of another size."""
        shapes = {name: torch.Size(self._shape(name, rows, seq_len)) for name in self.tensors}
        return sum(shapes[name].numel() * x.element_size() for name, x in self.tensors.items())

    def packed(self) -> Tensor:
        """The tensors as bytes, uint8 ``[nbytes]``."""
        return _bytes(self.tensors.values(), self.device)

    def unpacked(self, packed: Tensor, rows: int, seq_len: int) -> dict[str, Any]:
        """The arguments of a rank, from its tensors as bytes."""
        shapes = [(self._shape(name, rows, seq_len), x.dtype) for name, x in self.tensors.items()]
        return {**self.values, **dict(zip(self.tensors, _tensors(packed, shapes), strict=True))}


def _bytes(tensors: Any, device: torch.device) -> Tensor:
    """uint8 ``[nbytes]``."""
    parts = [x.contiguous().reshape(-1).view(torch.uint8) for x in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def _tensors(packed: Tensor, shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
    """The tensors of the given shapes and dtypes whose ``_bytes`` are ``packed``."""
    found, start = [], 0
    for shape, dtype in shapes:
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        found.append(packed[start:stop].clone().view(dtype).view(tuple(shape)))  # a copy is aligned for any dtype
        start = stop
    return found


def _to_owners(outputs: list[Any], wholes: list[Whole], model: Any) -> Any:
    """The output of this rank's batch, from all ranks' parts of it.

    Args:
        outputs: by rank whose batch it is: the output of the forward on this rank's part of that batch.
        wholes: by the same rank.
        model: the model.
    """
    patch: Patch = model._seqpar
    own = outputs[patch.rank]
    keys = list(_keys(own))
    parts = [
        _by_rows(name, _at(output, name, i), whole)
        for output, whole in zip(outputs, wholes, strict=True)
        for name, i in keys
    ]
    tokens = [[None if name in _PARTIAL_SUMS else _tokens(name, whole) for name, _ in keys] for whole in wholes]
    received = _ToOwners.apply(tokens, patch.rank, patch.group, *parts)
    named = {name: list(x) if isinstance(x, tuple | list) else x for name, x in own.items()}
    for (name, i), y in zip(keys, received, strict=True):
        y = y.flatten(0, 1) if name == "router_logits" else y
        if i is None:
            named[name] = y
        else:
            named[name][i] = y
    named = {name: tuple(x) if isinstance(x, list) else x for name, x in named.items()}
    return type(own)(**finish(named, wholes[patch.rank], model))


def _keys(output: Any) -> Iterator[tuple[str, int | None]]:
    """The tensors to exchange: the output's name, and the place in it if it holds several."""
    for name, x in output.items():
        if name in PER_TOKEN or name in _PARTIAL_SUMS:
            if isinstance(x, Tensor):
                yield name, None
            elif isinstance(x, tuple | list):
                yield from ((name, i) for i, y in enumerate(x) if isinstance(y, Tensor))


def _at(output: Any, name: str, i: int | None) -> Tensor:
    x: Tensor = output[name] if i is None else output[name][i]
    return x


def _by_rows(name: str, x: Tensor, whole: Whole) -> Tensor:
    """``x [batch, seq_local, ...]``; router logits are ``[batch * seq_local, experts]``."""
    return x.unflatten(0, (whole.rows, -1)) if name == "router_logits" else x


def _tokens(name: str, whole: Whole) -> tuple[Tensor, ...]:
    """By rank: the places of its tokens in an output."""
    return whole.logits if name == "logits" else whole.tokens


class _ToOwners(torch.autograd.Function):
    """Every rank gets the outputs of its own batch from the ranks that hold its tokens."""

    @staticmethod
    def forward(
        ctx: Any, tokens: list[list[tuple[Tensor, ...] | None]], rank: int, group: ProcessGroup, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        """This rank's outputs.

        Args:
            ctx: autograd's.
            tokens: by rank whose batch it is, and by output: by rank that holds them, the places of its tokens. None:
                the ranks' parts are summed.
            rank: this rank.
            group: the ranks of the sequence.
            parts: by rank whose batch it is, and then by output, this rank's part ``[batch, seq_local, ...]``.
        """
        ranks, count = len(tokens), len(tokens[0])
        by_batch = [parts[i * count : (i + 1) * count] for i in range(ranks)]
        own = list(zip(by_batch[rank], tokens[rank], strict=True))
        shapes = [[(_part_shape(x, where, peer), x.dtype) for x, where in own] for peer in range(ranks)]
        by_peer = _all_to_all(by_batch, shapes, group)
        ctx.tokens, ctx.rank, ctx.group = tokens, rank, group
        ctx.shapes = [[(tuple(x.shape), x.dtype) for x in batch] for batch in by_batch]
        outputs = []
        for i, (x, where) in enumerate(own):
            pieces = [peer[i] for peer in by_peer]
            if where is None:
                outputs.append(torch.stack(pieces).sum(0))
            else:
                order = torch.cat(where).argsort().to(x.device)
                outputs.append(torch.cat(pieces, 1).index_select(1, order))  # [batch, seq, ...]
        # The same outputs on every rank: they have gradients where the model's do.
        ctx.differentiable = [i for i in range(count) if any(ctx.needs_input_grad[3 + i :: count])]
        ctx.mark_non_differentiable(*(y for i, y in enumerate(outputs) if i not in ctx.differentiable))
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ranks, which = len(ctx.tokens), ctx.differentiable
        sends: list[list[Tensor]] = [[] for _ in range(ranks)]
        for i in which:
            where = ctx.tokens[ctx.rank][i]
            for peer, to_peer in enumerate(sends):
                grad = grads[i].to(ctx.shapes[ctx.rank][i][1])
                to_peer.append(grad if where is None else grad.index_select(1, where[peer].to(grad.device)))
        received = _all_to_all(sends, [[shapes[i] for i in which] for shapes in ctx.shapes], ctx.group)
        by_batch: list[Any] = [None] * (ranks * len(ctx.tokens[0]))
        for batch, theirs in enumerate(received):
            for i, grad in zip(which, theirs, strict=True):
                by_batch[batch * len(ctx.tokens[0]) + i] = grad
        return None, None, None, *by_batch


def _part_shape(x: Tensor, tokens: tuple[Tensor, ...] | None, peer: int) -> tuple[int, ...]:
    """The shape of ``peer``'s part of the output of which this rank's part is ``x``."""
    return tuple(x.shape) if tokens is None else (x.shape[0], len(tokens[peer]), *x.shape[2:])


def _all_to_all(
    sends: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[Sequence[int], torch.dtype]]],
    group: ProcessGroup,
) -> list[list[Tensor]]:
    """Send the tensors ``sends[peer]`` to each peer, in one message.

    Args:
        sends: by peer. This rank's own are returned without a message.
        shapes: by peer: the shapes and dtypes of what it sends.
        group: the ranks.

    Returns:
        By peer: what it has sent.
    """
    rank = group.rank()
    device = next((x.device for tensors in sends for x in tensors), torch.device("cpu"))
    packed = [_bytes(() if peer == rank else tensors, device) for peer, tensors in enumerate(sends)]
    sizes = [
        0 if peer == rank else sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in theirs)
        for peer, theirs in enumerate(shapes)
    ]
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, torch.cat(packed), sizes, [len(x) for x in packed], group=group)
    for peer, x in enumerate(packed):
        if peer != rank:
            count_sent(len(x), group, peer)
    return [
        list(sends[rank]) if peer == rank else _tensors(x, shapes[peer]) for peer, x in enumerate(received.split(sizes))
    ]
