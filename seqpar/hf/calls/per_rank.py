"""Calls in which each rank of a sequence has its own batch: ``parallelize(..., batches="per_rank")``.

Forward: the ranks all-gather their batches, and run one sharded forward for each batch. An all-to-all then sends every
rank the outputs of its own batch, for all tokens in order, as if the rank had run the model alone.

Backward: the all-to-all sends the gradients of these outputs back to the ranks that hold the tokens. On each rank, a
parameter's gradient is the part of the gradient of all ranks' losses that the tokens of this rank contribute. The mean
of these parts over the ranks is the gradient of the mean of all losses, as in data parallelism.

All forwards but the last are recomputed in backward, so that the activations of only one sharded batch are kept.

Shapes: batch rows of seq tokens (the full sequence), seq_local of them on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ...base.checks import no_compile
from ...comm.collectives import all_gather, start_all_to_all
from ...comm.handshake import Fingerprint, all_gather_header, check_same, fingerprint
from ...patching.replaced import replaced
from ..batch import BOUNDARY_NAMES, tokens_of
from ..inspection.support import parameters_of
from ..losses.logits import MissingLogits
from ..mechanisms.key_values import disable_latent_kv, enable_latent_kv, has_latent_kv
from ..prompts import PROMPTS
from ..state import NAME, FullCall, Patch
from .full_batch import PER_TOKEN, finish_call, generates, has_more_than_text, has_streams, merges, shard_call

# Scalar outputs. Each rank computes the part of its own tokens; the output is the sum of the ranks' parts.
_PARTIAL_SUMS = ("loss", "aux_loss")
_PLAIN = (bool, int, float, str)


@no_compile
def call_with_all_batches(model: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the model on the batches of all ranks, and return the output of this rank's batch.

    All ranks of the sequence call the model with their own batches. ``batch`` and ``seq`` may differ between the ranks.
    A call that reads or fills a cache runs on this rank alone, with this rank's prompts. On one rank, all other calls
    are as with ``batches="shared"``.
    """
    patch: Patch = model._seqpar
    if patch.settings.batches == "shared" and patch.ranks > 1:  # in ``verify``
        return original(*args, **kwargs)
    kwargs = {**dict(zip(parameters_of(model), args, strict=False)), **kwargs}
    if generates(kwargs) and kwargs.get("labels") is None:
        if (patch.settings.softmax_scale, patch.settings.alibi_slopes) != (None, None):
            raise ValueError(
                "softmax_scale, alibi_slopes: this model generates with its own attention, which has neither; leave "
                "them out, or pass use_cache=False"
            )
        with on_this_rank(patch):
            return original(**kwargs)
    group = patch.sequence_group
    if group is None or patch.ranks == 1:
        return original(**kwargs)
    recomputes = torch.is_grad_enabled()
    outputs, full_calls = [], []
    for rank, (batch, seed) in enumerate(_all_gather_batches(model, kwargs, group)):
        try:
            local, full_call = shard_call(model, batch, False, seed)
        except ValueError as error:
            raise ValueError(f"the batch of rank {rank} of the sequence: {error}") from error
        if recomputes and rank < patch.ranks - 1:
            # With early stopping, a rank could end its recomputation before it has sent and received all messages of
            # the forward, and other ranks would wait for it.
            with set_checkpoint_early_stop(False):
                outputs.append(checkpoint(original, use_reentrant=False, **local))
        else:
            outputs.append(original(**local))
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
            before = original._attn_implementation
            name = implementation or ("sdpa" if before == NAME else before)
            # set directly, because the property sets the sub-configs too
            stack.enter_context(replaced(ours, _attn_implementation_internal=name))
        yield


# Plain numbers that may differ between the ranks.
_NUMBERS = ("num_items_in_batch", "logits_to_keep")


class _CallHeader(NamedTuple):
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
    prepared: list[_RankArguments] = []

    def header() -> _CallHeader:
        if merges(model) and has_more_than_text(kwargs):
            raise ValueError("batch: it has images; with batches='per_rank' only batches of text are supported")
        prepared.append(_RankArguments(kwargs))
        ours = prepared[0]
        # The seed is not drawn, because drawing one would change the random numbers that the trainer draws next.
        seed = (torch.initial_seed() + patch.calls) % 2**62
        training = any(m.training for m in patch.modules)
        return _CallHeader(ours.fingerprint, torch.is_grad_enabled(), training, ours.rows, ours.seq_len, seed)

    headers = all_gather_header(header, group)
    patch.calls += 1
    check_same(headers, "arguments", "gradients", "training")
    ours = prepared[0]
    batches = [dict(ours.values) for _ in headers]
    for name, x in ours.tensors.items():
        shapes = [ours.shape(name, header) for header in headers]
        sizes = [shape.numel() for shape in shapes]
        received = all_gather(x.reshape(-1), sizes, 0, group).split(sizes)
        for batch, values, shape in zip(batches, received, shapes, strict=True):
            batch[name] = values.view(shape)
            if name == "logits_to_keep" and not shape:  # a number of tokens, not their indices
                batch[name] = int(values)
    return [(batch, header.seed) for batch, header in zip(batches, headers, strict=True)]


class _RankArguments:
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
            if name == PROMPTS:
                raise ValueError(
                    f"{PROMPTS}: not supported with batches='per_rank'; pass whole rows, and share_prompts=True to "
                    "parallelize"
                )
            if name in BOUNDARY_NAMES:
                raise ValueError(
                    f"{name}: not supported with batches='per_rank'; give position_ids that restart at each document "
                    "instead"
                )
            if name in _NUMBERS:
                x = torch.as_tensor(x)  # plain values must be the same on every rank, but these numbers may differ
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
        dtypes = tuple((name, str(x.dtype)) for name, x in self.tensors.items())
        # of everything that must be the same on every rank
        self.fingerprint = fingerprint(dtypes, tuple(self.shapes.items()), tuple(self.values.items()))

    def _dimensions(self, x: Tensor) -> Iterator[str | int]:
        for i, size in enumerate(x.shape):
            yield "rows" if (i, size) == (0, self.rows) else "seq" if (i, size) == (1, self.seq_len) else size

    def shape(self, name: str, header: _CallHeader) -> torch.Size:
        sizes = {"rows": header.rows, "seq": header.seq_len}
        return torch.Size(sizes[d] if isinstance(d, str) else d for d in self.shapes[name])


def _exchange_outputs(outputs: list[Any], full_calls: list[FullCall], model: Any) -> Any:
    """The output of this rank's batch for all tokens.

    ``outputs[i]`` is the output for this rank's tokens of rank i's batch, and ``full_calls[i]`` describes that call.
    """
    patch: Patch = model._seqpar
    ranks, local_output, local_call = patch.ranks, outputs[patch.rank], full_calls[patch.rank]
    keys = list(_tensor_keys(local_output))
    parts: list[Tensor] = []  # for each key, of each rank's batch
    streams: list[bool] = []  # for each part, whether it was [streams, batch, seq, ...]
    shapes: list[Sequence[int]] = []  # for each key, of each rank's part of this rank's output
    for name, i in keys:
        for output, full_call in zip(outputs, full_calls, strict=True):
            x: Tensor = output[name] if i is None else output[name][i]
            places = _places(name, full_call)
            streams.append(places is not None and has_streams(x, full_call.rows, len(places[patch.rank])))
            # models return router logits as [batch * seq_local, experts]
            x = x.unflatten(0, (full_call.rows, -1)) if name == "router_logits" else x
            parts.append(x.movedim(0, 2) if streams[-1] else x)
        x = parts[patch.rank - ranks]
        places = _places(name, local_call)
        shapes += [x.shape] * ranks if places is None else [(len(x), len(p), *x.shape[2:]) for p in places]
    received = _ExchangeOutputs.apply(shapes, patch.sequence_group, *parts)
    named = {name: list(x) if isinstance(x, tuple | list) else x for name, x in local_output.items()}
    for k, (name, i) in enumerate(keys):
        pieces, places = received[k * ranks : (k + 1) * ranks], _places(name, local_call)
        if places is None:
            y = torch.stack(pieces).sum(0)
        else:
            order = torch.cat(places).argsort().to(pieces[0].device)
            y = torch.cat(pieces, 1).index_select(1, order)  # [batch, seq, ...]
        y = y.flatten(0, 1) if name == "router_logits" else y
        y = y.movedim(2, 0) if streams[k * ranks + patch.rank] else y
        if i is None:
            named[name] = y
        else:
            named[name][i] = y
    named = {name: tuple(x) if isinstance(x, list) else x for name, x in named.items()}
    return type(local_output)(**finish_call(named, local_call, model))


def _places(name: str, full_call: FullCall) -> tuple[Tensor, ...] | None:
    """For each rank, the indices of its tokens in a full output; None for an output whose parts are summed."""
    if name in _PARTIAL_SUMS:
        return None
    return full_call.logits if name == "logits" else full_call.tokens


def _tensor_keys(output: Any) -> Iterator[tuple[str, int | None]]:
    """The name of each output to exchange, and an index if the output is a tuple."""
    for name, x in output.items():
        if name in PER_TOKEN or name in _PARTIAL_SUMS:
            if isinstance(x, Tensor) and not isinstance(x, MissingLogits):
                yield name, None
            elif isinstance(x, tuple | list):
                yield from ((name, i) for i, y in enumerate(x) if isinstance(y, Tensor))


class _ExchangeOutputs(torch.autograd.Function):
    """Sends every rank this rank's parts of the outputs of that rank's batch. Backward returns their gradients.

    ``parts`` are ``[batch, seq_local, ...]``, or ``[]`` for a sum: for each output, the part of each rank's batch. The
    result has the ``shapes``: for each output of this rank's batch, the part of each rank.
    """

    @staticmethod
    def forward(ctx: Any, shapes: list[Sequence[int]], group: ProcessGroup, *parts: Tensor) -> tuple[Tensor, ...]:
        ranks = group.size()
        ctx.group, ctx.shapes, ctx.starts = group, [x.shape for x in parts], []
        received: list[Tensor] = []
        constant: list[Tensor] = []
        for i in range(0, len(parts), ranks):
            received += _all_to_all(parts[i : i + ranks], shapes[i : i + ranks], group)
            # All ranks must agree on which outputs are differentiable, because they send gradients to one another.
            if any(ctx.needs_input_grad[2 + i : 2 + i + ranks]):
                ctx.starts.append(i)
            else:
                constant += received[i:]
        ctx.mark_non_differentiable(*constant)
        return tuple(received)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        d_parts: list[Any] = [None] * len(grads)
        for i in ctx.starts:
            span = slice(i, i + ctx.group.size())
            d_parts[span] = _all_to_all(grads[span], ctx.shapes[span], ctx.group)
        return None, None, *d_parts


def _all_to_all(parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: ProcessGroup) -> list[Tensor]:
    """Send ``parts[peer]`` to each rank, and return what each rank sends, in the ``shapes``. All have one dtype."""
    packed = torch.cat([x.reshape(-1) for x in parts])
    sends, receives = [x.numel() for x in parts], [torch.Size(shape).numel() for shape in shapes]
    received, pending = start_all_to_all(packed, sends, receives, group)
    pending.wait()
    return [x.view(tuple(shape)) for x, shape in zip(received, shapes, strict=True)]
