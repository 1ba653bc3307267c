"""Calls in which each rank of a sequence has a batch of its own: ``parallelize(..., batches="per_rank")``.

Forward: the ranks all-gather their batches, and run one sharded forward for each batch. An all-to-all then sends every
rank the outputs of its own batch, for all tokens in order, as if the rank had run the model alone.

Backward: the all-to-all sends the gradients of these outputs back to the ranks that hold the tokens. On each rank, a
parameter's gradient is the part of the gradient of all ranks' losses that the tokens of this rank contribute. The sum
of these parts over the ranks is the gradient of the sum of all losses, as in data parallelism.

All forwards but the last are recomputed in backward, so that the activations of only one sharded batch are kept.

Shapes: batch rows of seq tokens (the full sequence), seq_local of them on this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
from .batch import BOUNDARY_NAMES
from .full_batch import PER_TOKEN, finish, generates, has_more_than_text, merges, shard_call
from .latent import disable_latent_kv, enable_latent_kv, has_latent_kv
from .loss import MissingLogits
from .state import NAME, FullCall, Patch
from .support import parameters_of

TensorSpec = tuple[Sequence[int], torch.dtype]  # shape and dtype

# Scalar outputs. Each rank computes the part of its own tokens; the output is the sum of the ranks' parts.
_PARTIAL_SUMS = ("loss", "aux_loss")
_PLAIN = (bool, int, float, str)
# The method of ``nn.Module`` that runs the hooks and the forward. ``nn.Module.__call__`` looks it up in the instance.
_CALL = "_call_impl"


def wrap_call(model: nn.Module) -> None:
    """Make ``model(...)`` run ``call``.

    ``call`` runs the hooks and the forward of ``model`` once for each rank's batch. It could not do that from a hook.
    """
    vars(model)[_CALL] = MethodType(call, model)


def unwrap_call(model: nn.Module) -> None:
    """Undo ``wrap_call``."""
    vars(model).pop(_CALL, None)


@contextmanager
def shared_batches(model: nn.Module, patch: Patch) -> Iterator[None]:
    """In the block, ``model`` works as with ``batches="shared"``: all ranks call it with the same batch."""
    batches, is_wrapped = patch.batches, _CALL in vars(model)
    if is_wrapped:
        unwrap_call(model)
    patch.batches = "shared"
    try:
        yield
    finally:
        patch.batches = batches
        if is_wrapped:
            wrap_call(model)


@no_compile
def call(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the model on the batches of all ranks, and return the output of this rank's batch.

    All ranks of the sequence call the model, each with its own batch. A call that fills or uses a cache runs on this
    rank alone, with this rank's prompts.

    Args:
        model: the parallelized model.
        args, kwargs: the arguments of its forward: ``input_ids [batch, seq]`` or ``inputs_embeds [batch, seq,
            hidden]``, and tensors, numbers, bools and strings. ``batch`` and ``seq`` may differ between the ranks.

    Raises:
        TypeError: an argument is neither a tensor nor a plain value.
        ValueError: the batch cannot be sharded, or the ranks' arguments have different names, dtypes or plain values.
        RuntimeError: another rank raised on its batch, or did not call the model before the group's timeout.
    """
    patch: Patch = model._seqpar
    original_call = type(model)._call_impl
    kwargs = {**dict(zip(parameters_of(model), args, strict=False)), **kwargs}
    if generates(kwargs):
        with _one_device(patch):
            return original_call(model, **kwargs)
    group = patch.group
    assert group is not None  # ``parallelize`` does not take over the calls of a model on one rank
    recomputes = torch.is_grad_enabled()
    outputs, full_calls = [], []
    for rank, (batch, seed) in enumerate(_all_gather_batches(model, kwargs, group)):
        try:
            local, full_call = shard_call(model, batch, seed)
        except ValueError as error:
            raise ValueError(f"the batch of rank {rank} of the sequence: {error}") from error
        if recomputes and rank < patch.ranks - 1:
            # With early stopping, a rank could end its recomputation before it has sent and received all messages of
            # the forward, and other ranks would wait for it.
            with set_checkpoint_early_stop(False):
                outputs.append(checkpoint(original_call, model, use_reentrant=False, **local))
        else:
            outputs.append(original_call(model, **local))
        full_calls.append(full_call)
    return _outputs_of_own_batch(outputs, full_calls, model)


@contextmanager
def _one_device(patch: Patch) -> Iterator[None]:
    """In the block, the model attends on this rank alone, with a transformers attention function."""
    patch.sharded = False
    latent_layers = [module for module in patch.modules if has_latent_kv(module)]
    for layer in latent_layers:
        disable_latent_kv(layer)
    before = [(ours, ours._attn_implementation) for _, ours, _ in patch.config_copies]
    for original, ours, _ in patch.config_copies:
        implementation = original._attn_implementation
        ours._attn_implementation = "sdpa" if implementation == NAME else implementation
    try:
        yield
    finally:
        for ours, implementation in before:
            ours._attn_implementation = implementation
        for layer in latent_layers:
            enable_latent_kv(layer)
        patch.sharded = True


class _Header(NamedTuple):
    """What the other ranks must know about a rank's batch.

    Attributes:
        arguments: a fingerprint of the arguments: the names and dtypes of the tensors, the sizes of their dimensions
            other than rows and seq, and the plain values.
        gradients: whether gradients are enabled.
        training: whether the model is in training mode.
        rows: the number of rows of the batch.
        seq_len: the number of tokens of each row.
        seed: the seed of attention dropout.
    """

    arguments: Fingerprint
    gradients: bool
    training: bool
    rows: int
    seq_len: int
    seed: int


def _all_gather_batches(model: Any, kwargs: dict[str, Any], group: ProcessGroup) -> list[tuple[dict[str, Any], int]]:
    """For each rank, by rank: the arguments of its call, and the seed of attention dropout for its batch."""
    patch: Patch = model._seqpar
    prepared: list[_Arguments] = []

    def header() -> _Header:
        if merges(model) and has_more_than_text(kwargs):
            raise ValueError("batch: it has images; with batches='per_rank' only batches of text are supported")
        prepared.append(_Arguments(kwargs))
        ours = prepared[0]
        # The seed is not drawn, because drawing one would change the random numbers that the trainer draws next.
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
    """The arguments of one rank's call, in a form that can be all-gathered.

    The ranks' tensors have the same names, dtypes and dimensions, except that rows and seq may differ. A rank can
    therefore compute the shapes of another rank's tensors from that rank's rows and seq.

    Attributes:
        rows, seq_len, device: those of the tokens.
        tensors: the tensor arguments by name, on ``device``.
        values: the plain arguments by name.
        shapes: for each tensor, its dimensions: "rows", "seq", or a size that is the same on every rank.
    """

    def __init__(self, kwargs: dict[str, Any]) -> None:
        if kwargs.get("seqpar") is not None:
            raise ValueError("batch: it is sharded already; with batches='per_rank' call the model with the full batch")
        if kwargs.get("return_dict") is False:
            raise ValueError("return_dict=False: with batches='per_rank' outputs are exchanged by name; leave this out")
        given = {name: x for name, x in kwargs.items() if x is not None}
        tokens = given.get("input_ids", given.get("inputs_embeds"))
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            raise ValueError("batch: expected 'input_ids' [batch, seq] or 'inputs_embeds' [batch, seq, hidden]")
        if tokens.requires_grad:
            raise ValueError(
                "inputs_embeds: they require gradients, which batches='per_rank' does not support; give input_ids, or "
                "inputs_embeds.detach()"
            )
        self.rows, self.seq_len = tokens.shape[:2]
        self.device = tokens.device
        self.tensors: dict[str, Tensor] = {}
        self.values: dict[str, Any] = {}
        for name, x in sorted(given.items()):
            if name in BOUNDARY_NAMES:
                raise ValueError(
                    f"{name}: not supported with batches='per_rank'; give position_ids that restart at each document instead"
                )
            if name == "num_items_in_batch":
                x = torch.as_tensor(x)  # plain values must be the same on every rank, but this number may differ
            if name == "position_ids" and isinstance(x, Tensor) and x.dim() <= 2:
                x = x.expand(self.rows, -1)
            if isinstance(x, Tensor):
                self.tensors[name] = x.to(self.device)
            elif isinstance(x, _PLAIN):
                self.values[name] = x
            else:
                raise TypeError(
                    f"{name}={type(x).__name__}: with batches='per_rank' the arguments are sent to the other ranks; "
                    "expected a tensor, a number, a bool or a string"
                )
        self.shapes = {name: tuple(self._dimensions(x)) for name, x in self.tensors.items()}

    def _dimensions(self, x: Tensor) -> Iterator[str | int]:
        for i, size in enumerate(x.shape):
            yield "rows" if (i, size) == (0, self.rows) else "seq" if (i, size) == (1, self.seq_len) else size

    @property
    def fingerprint(self) -> Fingerprint:
        """A fingerprint of everything that must be the same on every rank."""
        dtypes = tuple((name, str(x.dtype)) for name, x in self.tensors.items())
        return fingerprint(dtypes, tuple(self.shapes.items()), tuple(self.values.items()))

    def _shape(self, name: str, rows: int, seq_len: int) -> list[int]:
        known = {"rows": rows, "seq": seq_len}
        return [known[d] if isinstance(d, str) else d for d in self.shapes[name]]

    def nbytes(self, rows: int, seq_len: int) -> int:
        """The number of bytes of ``packed`` on a rank whose batch has ``rows`` rows of ``seq_len`` tokens."""
        shapes = {name: torch.Size(self._shape(name, rows, seq_len)) for name in self.tensors}
        return sum(shapes[name].numel() * x.element_size() for name, x in self.tensors.items())

    def packed(self) -> Tensor:
        """The tensors as bytes, uint8 ``[nbytes]``."""
        return _pack(self.tensors.values(), self.device)

    def unpacked(self, packed: Tensor, rows: int, seq_len: int) -> dict[str, Any]:
        """The arguments of another rank, from what its ``packed`` returned and the size of its batch."""
        specs = [(self._shape(name, rows, seq_len), x.dtype) for name, x in self.tensors.items()]
        return {**self.values, **dict(zip(self.tensors, _unpack(packed, specs), strict=True))}


def _pack(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The tensors as bytes, one after another: uint8 ``[nbytes]``."""
    parts = [x.contiguous().reshape(-1).view(torch.uint8) for x in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def _unpack(packed: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """The tensors of the given shapes and dtypes from which ``_pack`` made ``packed``."""
    tensors, start = [], 0
    for shape, dtype in specs:
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        tensors.append(packed[start:stop].clone().view(dtype).view(tuple(shape)))  # a copy is aligned for any dtype
        start = stop
    return tensors


def _outputs_of_own_batch(outputs: list[Any], full_calls: list[FullCall], model: Any) -> Any:
    """The output of this rank's batch for all tokens, from the parts that all ranks have computed.

    Args:
        outputs: item ``i`` is the output of the model on this rank's tokens of rank ``i``'s batch.
        full_calls: item ``i`` describes the forward on rank ``i``'s batch.
        model: the parallelized model.
    """
    patch: Patch = model._seqpar
    own_output = outputs[patch.rank]
    keys = list(_tensor_keys(own_output))
    parts = [
        _split_rows(name, _tensor_of(output, name, i), full_call)
        for output, full_call in zip(outputs, full_calls, strict=True)
        for name, i in keys
    ]
    places = [
        [None if name in _PARTIAL_SUMS else _places(name, full_call) for name, _ in keys] for full_call in full_calls
    ]
    received = _ExchangeOutputs.apply(places, patch.rank, patch.group, *parts)
    named = {name: list(x) if isinstance(x, tuple | list) else x for name, x in own_output.items()}
    for (name, i), y in zip(keys, received, strict=True):
        y = y.flatten(0, 1) if name == "router_logits" else y
        if i is None:
            named[name] = y
        else:
            named[name][i] = y
    named = {name: tuple(x) if isinstance(x, list) else x for name, x in named.items()}
    return type(own_output)(**finish(named, full_calls[patch.rank], model))


def _tensor_keys(output: Any) -> Iterator[tuple[str, int | None]]:
    """For each tensor to exchange: the name of the output, and the tensor's index if the output is a tuple."""
    for name, x in output.items():
        if name in PER_TOKEN or name in _PARTIAL_SUMS:
            if isinstance(x, Tensor) and not isinstance(x, MissingLogits):
                yield name, None
            elif isinstance(x, tuple | list):
                yield from ((name, i) for i, y in enumerate(x) if isinstance(y, Tensor))


def _tensor_of(output: Any, name: str, i: int | None) -> Tensor:
    x: Tensor = output[name] if i is None else output[name][i]
    return x


def _split_rows(name: str, x: Tensor, full_call: FullCall) -> Tensor:
    """``x`` as ``[batch, seq_local, ...]``. Models return router logits as ``[batch * seq_local, experts]``."""
    return x.unflatten(0, (full_call.rows, -1)) if name == "router_logits" else x


def _places(name: str, full_call: FullCall) -> tuple[Tensor, ...]:
    """For each rank, the indices of its tokens along the sequence dimension of the full output, int64."""
    return full_call.logits if name == "logits" else full_call.tokens


class _ExchangeOutputs(torch.autograd.Function):
    """The all-to-all that sends every rank the outputs of its own batch. Backward returns their gradients."""

    @staticmethod
    def forward(
        ctx: Any, places: list[list[tuple[Tensor, ...] | None]], rank: int, group: ProcessGroup, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        """The outputs of this rank's batch, each ``[batch, seq, ...]``, or ``[]`` for a partial sum.

        Args:
            ctx: autograd's context.
            places: ``places[batch][output][peer]`` are the indices, along the sequence dimension of an output of rank
                ``batch``'s batch, of the tokens that rank ``peer`` holds. ``places[batch][output]`` is None if the
                ranks' parts of this output are summed.
            rank: this rank.
            group: the ranks of the sequence.
            parts: this rank's parts ``[batch, seq_local, ...]`` of all outputs of rank 0's batch, then of those of rank
                1's batch, and so on.
        """
        ranks, count = len(places), len(places[0])
        by_batch = [parts[i * count : (i + 1) * count] for i in range(ranks)]
        own = list(zip(by_batch[rank], places[rank], strict=True))
        specs = [[(_part_shape(x, where, peer), x.dtype) for x, where in own] for peer in range(ranks)]
        by_peer = _all_to_all(by_batch, specs, group)
        ctx.places, ctx.rank, ctx.group = places, rank, group
        ctx.specs = [[(tuple(x.shape), x.dtype) for x in batch] for batch in by_batch]
        outputs = []
        for i, (x, where) in enumerate(own):
            pieces = [peer[i] for peer in by_peer]
            if where is None:
                outputs.append(torch.stack(pieces).sum(0))
            else:
                order = torch.cat(where).argsort().to(x.device)
                outputs.append(torch.cat(pieces, 1).index_select(1, order))  # [batch, seq, ...]
        # All ranks must agree on which outputs are differentiable, because each of them sends gradients to the others.
        ctx.differentiable = [i for i in range(count) if any(ctx.needs_input_grad[3 + i :: count])]
        ctx.mark_non_differentiable(*(y for i, y in enumerate(outputs) if i not in ctx.differentiable))
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ranks, differentiable = len(ctx.places), ctx.differentiable
        sends: list[list[Tensor]] = [[] for _ in range(ranks)]
        for i in differentiable:
            where = ctx.places[ctx.rank][i]
            for peer, to_peer in enumerate(sends):
                grad = grads[i].to(ctx.specs[ctx.rank][i][1])
                to_peer.append(grad if where is None else grad.index_select(1, where[peer].to(grad.device)))
        received = _all_to_all(sends, [[specs[i] for i in differentiable] for specs in ctx.specs], ctx.group)
        d_parts: list[Any] = [None] * (ranks * len(ctx.places[0]))  # in the order of ``parts``
        for batch, from_peer in enumerate(received):
            for i, grad in zip(differentiable, from_peer, strict=True):
                d_parts[batch * len(ctx.places[0]) + i] = grad
        return None, None, None, *d_parts


def _part_shape(x: Tensor, places: tuple[Tensor, ...] | None, peer: int) -> tuple[int, ...]:
    """The shape of rank ``peer``'s part of an output of this rank's batch, of which ``x`` is this rank's part."""
    return tuple(x.shape) if places is None else (x.shape[0], len(places[peer]), *x.shape[2:])


def _all_to_all(
    sends: Sequence[Sequence[Tensor]], specs: Sequence[Sequence[TensorSpec]], group: ProcessGroup
) -> list[list[Tensor]]:
    """Send the tensors ``sends[peer]`` to each rank ``peer``, in one message per rank.

    Args:
        sends: the tensors for each rank. Those for this rank itself are returned as they are.
        specs: the shapes and dtypes of the tensors that each rank sends to this rank.
        group: the ranks that exchange tensors.

    Returns:
        The tensors that each rank has sent to this rank.
    """
    rank = group.rank()
    device = next((x.device for tensors in sends for x in tensors), torch.device("cpu"))
    packed = [_pack(() if peer == rank else tensors, device) for peer, tensors in enumerate(sends)]
    sizes = [
        0 if peer == rank else sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in from_peer)
        for peer, from_peer in enumerate(specs)
    ]
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, torch.cat(packed), sizes, [len(x) for x in packed], group=group)
    for peer, x in enumerate(packed):
        if peer != rank:
            count_sent(len(x), group, peer)
    return [
        list(sends[rank]) if peer == rank else _unpack(x, specs[peer]) for peer, x in enumerate(received.split(sizes))
    ]
