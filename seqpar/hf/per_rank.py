"""Calls in which each rank of a sequence has its own batch: ``parallelize(..., batches="per_rank")``.

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
from contextlib import ExitStack, contextmanager
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
from ..reductions import factor_at, mark
from .batch import BOUNDARY_NAMES, tokens_of
from .full_batch import PER_TOKEN, finish, generates, has_more_than_text, merges, shard_call
from .key_values import disable_latent_kv, enable_latent_kv, has_latent_kv
from .logits import MissingLogits
from .state import NAME, FullCall, Patch
from .support import parameters_of

TensorSpec = tuple[Sequence[int], torch.dtype]  # shape and dtype
Places = tuple[Tensor, ...] | None  # for each rank, the indices of its tokens in a full output; None: parts are summed

# Scalar outputs. Each rank computes the part of its own tokens; the output is the sum of the ranks' parts.
_PARTIAL_SUMS = ("loss", "aux_loss")
_PLAIN = (bool, int, float, str)
# The method of ``nn.Module`` that runs the hooks and the forward. ``nn.Module.__call__`` looks it up in the instance.
_CALL = "_call_impl"
_IMPLEMENTATION = "_attn_implementation_internal"  # set directly, because the property sets the sub-configs too


def wrap_call(model: nn.Module) -> None:
    """Make ``model(...)`` run ``call``, which runs the hooks and the forward once for each rank's batch."""
    vars(model)[_CALL] = MethodType(call, model)


def unwrap_call(model: nn.Module) -> None:
    vars(model).pop(_CALL, None)


@no_compile
def call(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the model on the batches of all ranks, and return the output of this rank's batch.

    All ranks of the sequence call the model with their own batches. ``batch`` and ``seq`` may differ between the ranks.
    A call that reads or fills a cache runs on this rank alone, with this rank's prompts.
    """
    patch: Patch = model._seqpar
    original_call = type(model)._call_impl
    if patch.batches == "shared":  # in ``verify``
        return original_call(model, *args, **kwargs)
    kwargs = {**dict(zip(parameters_of(model), args, strict=False)), **kwargs}
    if generates(kwargs):
        with on_this_rank(patch):
            return original_call(model, **kwargs)
    group = patch.group
    assert group is not None  # ``parallelize`` does not wrap the calls of a model on one rank
    recomputes = torch.is_grad_enabled()
    outputs, full_calls = [], []
    for rank, (batch, seed) in enumerate(_all_gather_batches(model, kwargs, group)):
        try:
            local, full_call, _ = shard_call(model, batch, False, seed)
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
    return _exchange_outputs(outputs, full_calls, model)


@contextmanager
def on_this_rank(patch: Patch, implementation: str | None = None) -> Iterator[None]:
    """In the block, the model runs on this rank alone, as without ``parallelize``.

    ``implementation`` is the name of its attention function, by default the one that it had before ``parallelize``.
    """
    with ExitStack() as stack:
        patch.sharded = False
        stack.callback(setattr, patch, "sharded", True)
        for layer in filter(has_latent_kv, patch.modules):
            disable_latent_kv(layer)
            stack.callback(enable_latent_kv, layer)
        for original, ours in patch.config_copies:
            stack.callback(setattr, ours, _IMPLEMENTATION, getattr(ours, _IMPLEMENTATION))
            before = original._attn_implementation
            setattr(ours, _IMPLEMENTATION, implementation or ("sdpa" if before == NAME else before))
        yield


class _Header(NamedTuple):
    """A rank's batch, ``rows`` rows of ``seq_len`` tokens."""

    arguments: Fingerprint
    gradients: bool  # whether gradients are enabled
    training: bool  # whether the model is in training mode
    rows: int
    seq_len: int
    seed: int  # of attention dropout


def _all_gather_batches(model: Any, kwargs: dict[str, Any], group: ProcessGroup) -> list[tuple[dict[str, Any], int]]:
    """For each rank the arguments of its call, and the seed of attention dropout for its batch."""
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
    specs = [ours.specs(header.rows, header.seq_len) for header in headers]
    sizes = [_nbytes(x) for x in specs]
    packed = _pack(ours.tensors.values(), ours.device)
    received = all_gather(packed, sizes, 0, group).split(sizes)
    return [
        ({**ours.values, **dict(zip(ours.tensors, _unpack(x, spec), strict=True))}, header.seed)
        for x, spec, header in zip(received, specs, headers, strict=True)
    ]


class _Arguments:
    """The arguments of one rank's call: ``tensors`` and plain ``values``, by name.

    The ranks' tensors have the same names and dtypes, and the same shapes except for rows and seq. A rank can therefore
    compute the shapes of another rank's tensors from that rank's rows and seq.
    """

    def __init__(self, kwargs: dict[str, Any]) -> None:
        tokens = tokens_of(kwargs, "with batches='per_rank' call the model with the full batch")
        if kwargs.get("return_dict") is False:
            raise ValueError("return_dict=False: with batches='per_rank' outputs are exchanged by name; leave this out")
        if tokens.requires_grad:
            raise ValueError(
                "inputs_embeds: they require gradients, which batches='per_rank' does not support; give input_ids, or "
                "inputs_embeds.detach()"
            )
        self.rows, self.seq_len = tokens.shape[:2]
        self.device = tokens.device
        self.tensors: dict[str, Tensor] = {}
        self.values: dict[str, Any] = {}
        for name in sorted(name for name, x in kwargs.items() if x is not None):
            x = kwargs[name]
            if name in BOUNDARY_NAMES:
                raise ValueError(
                    f"{name}: not supported with batches='per_rank'; give position_ids that restart at each document "
                    "instead"
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
        # For each tensor its dimensions: "rows", "seq", or a size that is the same on every rank.
        self.shapes = {name: tuple(self._dimensions(x)) for name, x in self.tensors.items()}

    def _dimensions(self, x: Tensor) -> Iterator[str | int]:
        for i, size in enumerate(x.shape):
            yield "rows" if (i, size) == (0, self.rows) else "seq" if (i, size) == (1, self.seq_len) else size

    @property
    def fingerprint(self) -> Fingerprint:
        """Of everything that must be the same on every rank."""
        dtypes = tuple((name, str(x.dtype)) for name, x in self.tensors.items())
        return fingerprint(dtypes, tuple(self.shapes.items()), tuple(self.values.items()))

    def specs(self, rows: int, seq_len: int) -> list[TensorSpec]:
        """Of the tensors of a rank whose batch has ``rows`` rows of ``seq_len`` tokens."""
        sizes = {"rows": rows, "seq": seq_len}
        return [
            ([sizes[d] if isinstance(d, str) else d for d in self.shapes[name]], x.dtype)
            for name, x in self.tensors.items()
        ]


def _nbytes(specs: Sequence[TensorSpec]) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in specs)


def _pack(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The tensors as bytes, one after another: uint8 ``[nbytes]``."""
    parts = [x.contiguous().reshape(-1).view(torch.uint8) for x in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def _unpack(packed: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    parts = packed.split([_nbytes([spec]) for spec in specs])
    # a copy is aligned for any dtype
    return [x.clone().view(dtype).view(tuple(shape)) for x, (shape, dtype) in zip(parts, specs, strict=True)]


def _exchange_outputs(outputs: list[Any], full_calls: list[FullCall], model: Any) -> Any:
    """The output of this rank's batch for all tokens.

    ``outputs[i]`` is the output for this rank's tokens of rank i's batch, and ``full_calls[i]`` describes that call.
    """
    patch: Patch = model._seqpar
    local_output = outputs[patch.rank]
    keys = list(_tensor_keys(local_output))
    parts: list[Tensor] = []
    places: list[list[Places]] = [[] for _ in outputs]
    for output, full_call, where in zip(outputs, full_calls, places, strict=True):
        for name, i in keys:
            x: Tensor = output[name] if i is None else output[name][i]
            # models return router logits as [batch * seq_local, experts]
            parts.append(x.unflatten(0, (full_call.rows, -1)) if name == "router_logits" else x)
            indices = full_call.logits if name == "logits" else full_call.tokens
            where.append(None if name in _PARTIAL_SUMS else indices)
    received = _ExchangeOutputs.apply(places, patch.rank, patch.group, *parts)
    named = {name: list(x) if isinstance(x, tuple | list) else x for name, x in local_output.items()}
    for (name, i), y in zip(keys, received, strict=True):
        y = y.flatten(0, 1) if name == "router_logits" else y
        if i is None:
            named[name] = y
        else:
            named[name][i] = y
    named = {name: tuple(x) if isinstance(x, list) else x for name, x in named.items()}
    return type(local_output)(**finish(named, full_calls[patch.rank], model))


def _tensor_keys(output: Any) -> Iterator[tuple[str, int | None]]:
    """The name of each output to exchange, and an index if the output is a tuple."""
    for name, x in output.items():
        if name in PER_TOKEN or name in _PARTIAL_SUMS:
            if isinstance(x, Tensor) and not isinstance(x, MissingLogits):
                yield name, None
            elif isinstance(x, tuple | list):
                yield from ((name, i) for i, y in enumerate(x) if isinstance(y, Tensor))


class _ExchangeOutputs(torch.autograd.Function):
    """The all-to-all that sends every rank the outputs of its own batch. Backward returns their gradients."""

    @staticmethod
    def forward(
        ctx: Any, places: list[list[Places]], rank: int, group: ProcessGroup, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        """The outputs of this rank's batch, each ``[batch, seq, ...]``, or ``[]`` for a sum.

        ``parts`` are this rank's parts ``[batch, seq_local, ...]`` of all outputs of rank 0's batch, then of rank 1's
        batch, and so on. ``places[batch][output]`` are the ``Places`` of an output of that rank's batch.
        """
        ranks, count = len(places), len(places[0])
        by_batch = [parts[i * count : (i + 1) * count] for i in range(ranks)]
        local = list(zip(by_batch[rank], places[rank], strict=True))
        specs: list[list[TensorSpec]] = [
            [(x.shape if where is None else (len(x), len(where[peer]), *x.shape[2:]), x.dtype) for x, where in local]
            for peer in range(ranks)
        ]
        by_peer = _all_to_all(by_batch, specs, group)
        mark(ctx, group, "partial")
        ctx.places, ctx.rank, ctx.group = places, rank, group
        ctx.specs = [[(tuple(x.shape), x.dtype) for x in batch] for batch in by_batch]
        outputs = []
        for i, (x, where) in enumerate(local):
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
        factor_at(ctx, "sum")  # notes that the model's gradients are partial
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


def _all_to_all(
    sends: Sequence[Sequence[Tensor]], specs: Sequence[Sequence[TensorSpec]], group: ProcessGroup
) -> list[list[Tensor]]:
    """Send the tensors ``sends[peer]`` to each rank, in one message, and return the tensors of each rank.

    ``specs[peer]`` describes the tensors that ``peer`` sends. This rank's own tensors are not copied.
    """
    rank = group.rank()
    device = next((x.device for tensors in sends for x in tensors), torch.device("cpu"))
    packed = [_pack(() if peer == rank else tensors, device) for peer, tensors in enumerate(sends)]
    sizes = [0 if peer == rank else _nbytes(from_peer) for peer, from_peer in enumerate(specs)]
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, torch.cat(packed), sizes, [len(x) for x in packed], group=group)
    for peer, x in enumerate(packed):
        if peer != rank:
            count_sent(len(x), group, peer)
    return [
        list(sends[rank]) if peer == rank else _unpack(x, specs[peer]) for peer, x in enumerate(received.split(sizes))
    ]
