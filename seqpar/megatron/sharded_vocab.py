"""The operators of a sharded vocabulary: the embedding, and two forms of the cross-entropy.

Shoeybi et al., "Megatron-LM", 2019, section 3. Each rank of a tensor-parallel group holds a part of the vocabulary, and
some of the tokens. Each operator checks and all-gathers the ids or labels of this rank's tokens. It returns the
gathered ones too, for its backward.

Shapes: b batch, s this rank's tokens, t the group's tokens in the order of the ranks, v this rank's part of the
vocabulary, d hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ..base.checks import DTYPES, check_dense
from ..base.compile_types import Opaque, register_constant_type
from ..base.library import operator
from ..comm.collectives import all_gather, all_reduce
from ..comm.waiting import operation
from ..placement.layout import chunk_range
from ..placement.placement import ParallelContext
from ..ranks.mesh import rank_in, size_of, tensor_group
from ..sharding.sharding import Sharding
from ..strategies.gemm import add_weight_gradient, sum_dtype
from ..strategies.sequence_chunks import PartialSums, RowPiece, SequenceRows
from ..strategies.tensor_operators import ChunkOptions, chunks_of, lengths_of, new_tokens

# The label of tokens without loss, by default. No id has it.
IGNORE_INDEX = -100
_NAME = "losses of a sharded vocabulary"  # of their collectives, in errors


def check_float_tensor(name: str, x: Tensor, shape: str) -> None:
    """Raise unless ``x`` is a tensor of a dtype with gradients."""
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        got = f"dtype {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: expected a floating-point tensor {shape}, got {got}")
    check_dense(name, x)


def check_ids(name: str, ids: Tensor, num_embeddings: int, ignore_index: int | None = None) -> None:
    """Raise unless ``ids`` are ids of the vocabulary.

    Values on a GPU are checked by an assertion on the GPU, because reading them would make the host wait. While
    torch.compile traces, values are not checked: the operators check them when they run.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype != torch.int64:
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{name}: expected an int64 tensor [batch, seq], got {got}")
    check_dense(name, ids)
    if torch.compiler.is_compiling():
        return
    allowed = f"0 to {num_embeddings - 1}"
    outside = (ids < 0) | (ids >= num_embeddings)
    if ignore_index is not None:
        outside &= ids != ignore_index
        allowed += f", or ignore_index={ignore_index}"
    if ids.is_cuda:
        torch._assert_async(
            outside.any().logical_not(), f"{name}: a value lies outside the vocabulary; expected {allowed}"
        )
    elif bool(outside.any()):
        raise ValueError(f"{name}: {int(ids[outside][0])} lies outside the vocabulary; expected {allowed}")


def check_label_smoothing(label_smoothing: float) -> None:
    """Raise unless it is a share of the label, as ``F.cross_entropy`` takes."""
    if isinstance(label_smoothing, bool | Tensor) or not isinstance(label_smoothing, int | float | torch.SymFloat):
        raise TypeError(f"label_smoothing={label_smoothing!r}: expected a number, got {type(label_smoothing).__name__}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing}: expected a number from 0 to 1")


def check_labels(labels: Tensor, x: Tensor, num_embeddings: int, ignore_index: int) -> None:
    """Raise unless ``labels`` are ids of the vocabulary, one for each token of ``x [b, s, d]``."""
    check_ids("labels", labels, num_embeddings, ignore_index)
    if labels.shape != x.shape[:2]:
        raise ValueError(
            f"labels: shape {tuple(labels.shape)}; expected {tuple(x.shape[:2])}, one for each token of x_local"
        )


def check_logits(logits: Tensor, labels: Tensor, part: VocabPart) -> None:
    """Raise unless ``logits [b, t, v]`` fit this part of the vocabulary and the batch size of the labels."""
    if logits.dim() != 3 or logits.shape[2] != part.size:
        raise ValueError(
            f"logits: shape {tuple(logits.shape)}; expected [batch, tokens, {part.size}], this rank's part "
            f"of num_embeddings={part.total}; pass the logits that VocabParallelHead returns"
        )
    if logits.shape[0] != labels.shape[0]:
        raise ValueError(
            f"logits: {logits.shape[0]} batch rows, but labels have {labels.shape[0]}; pass the same number in both"
        )


@register_constant_type()
@dataclass(frozen=True)
class VocabPart(Opaque):
    """This rank's part of a vocabulary of ``total`` entries: the ``size`` entries from ``start`` on."""

    total: int
    start: int
    size: int
    ignore_index: int = IGNORE_INDEX
    label_smoothing: float = 0.0

    @staticmethod
    def of_rank(
        total: int, group: ProcessGroup | None, ignore_index: int = IGNORE_INDEX, label_smoothing: float = 0.0
    ) -> VocabPart:
        """This rank's part of a vocabulary that is sharded over ``group``."""
        entries = chunk_range(total, size_of(group), rank_in(group))
        return VocabPart(total, entries.start, len(entries), ignore_index, label_smoothing)

    def index(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The indices of the labels in this rank's part, and whether they are in it, ``[..., 1]`` each."""
        entries = labels - self.start
        is_local = (entries >= 0) & (entries < self.size) & (labels != self.ignore_index)
        return entries.masked_fill(~is_local, 0)[..., None], is_local[..., None]

    def statistics(self, logits: Tensor, labels: Tensor) -> list[Tensor]:
        """Row maximum, sum of ``exp(logit - maximum)`` and target logit of this rank's logits ``[..., v]``.

        With label smoothing, the target logit is the mean of the logits, weighted by the smoothed label. ``logits`` are
        overwritten by ``exp(logit - maximum)``.
        """
        if not self.size:  # more ranks than entries
            zeros = logits.new_zeros(labels.shape)
            return [torch.full_like(zeros, -torch.inf), zeros, zeros]
        index, is_local = self.index(labels)
        row_max = logits.amax(-1)
        target = (logits.gather(-1, index) * is_local)[..., 0]
        if self.label_smoothing:
            target = (1 - self.label_smoothing) * target + self.label_smoothing / self.total * logits.sum(-1)
        return [row_max, logits.sub_(row_max[..., None]).exp_().sum(-1), target]

    @operation(_NAME)
    def losses(self, statistics: list[Tensor], labels: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """The losses and the log-sum-exp over the whole vocabulary, from the statistics of every rank's part."""
        row_max, row_sum, target = statistics
        full_max = all_reduce(row_max.clone(), group, dist.ReduceOp.MAX)
        row_sum, target = all_reduce(torch.stack([row_sum * (row_max - full_max).exp(), target]), group).unbind()
        lse = row_sum.log() + full_max
        return (lse - target).masked_fill(labels == self.ignore_index, 0), lse

    def subtract_targets(self, probs: Tensor, labels: Tensor) -> None:
        """Subtract the smoothed label of each row from its probabilities, in place."""
        if self.size:
            index, is_local = self.index(labels)
            probs.scatter_add_(-1, index, (self.label_smoothing - 1) * is_local.to(probs.dtype))
        if self.label_smoothing:
            probs.sub_(self.label_smoothing / self.total)


@operation("ids of a sharded vocabulary")
def _gather_ids(ids: Tensor, lengths: Sequence[int], group: ProcessGroup | None) -> Tensor:
    """All ranks' ids ``[b, t]``, a new tensor also where there is one rank."""
    return all_gather(ids, lengths, 1, group).clone(memory_format=torch.contiguous_format)


# The embedding


@operator(
    fake=lambda ids, weight, *_: (
        weight.new_empty(*ids.shape, weight.shape[1]),
        ids.new_empty(ids.shape[0], new_tokens()),
    ),
    autograd=lambda *args: _Embedding.apply(*args),
)
def vocab_embedding(
    ids: Tensor, weight: Tensor, part: VocabPart, sharding: Sharding, ranks: ParallelContext, options: ChunkOptions
) -> tuple[Tensor, Tensor]:
    """The embeddings ``[b, s, d]`` of ``ids [b, s]``, from ``weight [v, d]``; and the ids ``[b, t]`` of all tokens."""
    check_ids("ids", ids, part.total)
    chunks = chunks_of(ids.shape[1], sharding, ranks, options, ids.device)
    all_ids = _gather_ids(ids, chunks.rows.lengths, chunks.group)
    if part.size:
        index, is_local = part.index(all_ids)
        partial_sum = F.embedding(index[..., 0], weight) * is_local  # [b, t, d]
    else:  # more ranks than entries
        partial_sum = weight.new_zeros(*all_ids.shape, weight.shape[1])
    return chunks.reduce_scatter(partial_sum).contiguous(), all_ids


@operator(fake=lambda dout, all_ids, weight, *_: weight.new_empty(weight.shape))
def vocab_embedding_backward(
    dout: Tensor,
    all_ids: Tensor,
    weight: Tensor,
    part: VocabPart,
    sharding: Sharding,
    ranks: ParallelContext,
    options: ChunkOptions,
) -> Tensor:
    """The gradient of ``weight [v, d]``, from ``dout [b, s, d]``."""
    full = chunks_of(dout.shape[1], sharding, ranks, options, dout.device).all_gather(dout)  # [b, t, d]
    if not part.size:
        return torch.zeros_like(weight)
    index, is_local = part.index(all_ids)
    dweight: Tensor = torch.ops.aten.embedding_dense_backward(full * is_local, index[..., 0], part.size, -1, False)
    return dweight


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, *constants: Any) -> tuple[Tensor, Tensor]:
        out, all_ids = vocab_embedding(ids, weight, *constants)
        ctx.save_for_backward(all_ids, weight)
        ctx.set_materialize_grads(False)
        ctx.constants = constants
        return out, all_ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
        return None, vocab_embedding_backward(dout, *ctx.saved_tensors, *ctx.constants), None, None, None, None


# The cross-entropy of logits


@operator(
    fake=lambda logits, labels, *_: (
        logits.new_empty(logits.shape[:2], dtype=sum_dtype(logits)),
        logits.new_empty(logits.shape),
        labels.new_empty(logits.shape[:2]),
    ),
    autograd=lambda *args: _CrossEntropy.apply(*args),
)
def vocab_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    num_embeddings: int,
    ignore_index: int,
    label_smoothing: float,
    sharding: Sharding,
    options: ChunkOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """``log(sum(exp(logits))) - logits[label]``, with softmax statistics all-reduced over the vocabulary's parts.

    Returns:
        The losses ``[b, t]``, the softmax ``[b, t, v]`` of ``logits [b, t, v]`` in their dtype, and the labels
        ``[b, t]`` of all tokens.
    """
    check_ids("labels", labels, num_embeddings, ignore_index)
    group = tensor_group(sharding.mesh, sharding.group)
    part = VocabPart.of_rank(num_embeddings, group, ignore_index, label_smoothing)
    check_logits(logits, labels, part)
    lengths = lengths_of(labels.shape[1], sharding, group, options)
    if logits.shape[1] != sum(lengths):
        raise ValueError(
            f"logits: {logits.shape[1]} tokens, but the ranks' labels are {list(lengths)}, {sum(lengths)} together; "
            "pass VocabParallelHead's logits and this rank's labels"
        )
    all_labels = _gather_ids(labels, lengths, group)
    probs = logits.to(sum_dtype(logits), copy=True)  # [b, t, v]: the only copy in float32
    statistics = part.statistics(probs, all_labels)
    losses, lse = part.losses(statistics, all_labels, group)
    probs.mul_((statistics[0] - lse).exp_()[..., None])  # they are exp(logit - row maximum)
    return losses.contiguous(), probs.to(logits.dtype).contiguous(), all_labels


@operator(fake=lambda dlosses, probs, *_: probs.new_empty(probs.shape))
def vocab_cross_entropy_backward(
    dlosses: Tensor,
    probs: Tensor,
    all_labels: Tensor,
    num_embeddings: int,
    ignore_index: int,
    label_smoothing: float,
    sharding: Sharding,
) -> Tensor:
    """The gradient of the logits ``[b, t, v]``, from ``dlosses [b, t]`` of every rank."""
    group = tensor_group(sharding.mesh, sharding.group)
    part = VocabPart.of_rank(num_embeddings, group, ignore_index, label_smoothing)
    with operation(f"the backward of {_NAME}"):
        dlosses = all_reduce(dlosses.masked_fill(all_labels == ignore_index, 0), group)  # every rank holds the losses
    dlogits = probs.clone()
    part.subtract_targets(dlogits, all_labels)
    return dlogits.mul_(dlosses[..., None])


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, *constants: Any) -> tuple[Tensor, Tensor, Tensor]:
        losses, probs, all_labels = vocab_cross_entropy(logits, labels, *constants)
        ctx.save_for_backward(probs, all_labels)
        ctx.mark_non_differentiable(probs)
        ctx.set_materialize_grads(False)
        ctx.constants = constants[:4]
        return losses, probs, all_labels

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor, *_: Any) -> tuple[Any, ...]:
        return vocab_cross_entropy_backward(dlosses, *ctx.saved_tensors, *ctx.constants), *[None] * 6


# The cross-entropy of hidden states, whose logits exist for some tokens at a time


def _fake_linear_cross_entropy(x: Tensor, weight: Tensor, bias: Any, labels: Tensor, *_: Any) -> tuple[Tensor, ...]:
    shape = x.shape[0], new_tokens()
    losses, lse = (x.new_empty(shape, dtype=sum_dtype(x)) for _ in range(2))
    return losses, lse, labels.new_empty(shape)


@operator(fake=_fake_linear_cross_entropy, autograd=lambda *args: _LinearCrossEntropy.apply(*args))
def vocab_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    chunk_tokens: int,
    label_smoothing: float,
    part: VocabPart,
    sharding: Sharding,
    ranks: ParallelContext,
    options: ChunkOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """The cross-entropy of ``F.linear(x, weight, bias)`` where ``chunk_tokens`` tokens have logits at a time.

    The hidden states are received chunk by chunk during the GEMMs, in forward and again in backward. In backward, the
    partial gradients of x are sent at the same time to the ranks that hold the tokens. The statistics of all tokens are
    all-reduced together.

    Args:
        x: ``[b, s, d]``.
        weight: ``[v, d]``.
        bias: ``[v]``.
        labels: ``[b, s]``.

    Returns:
        The losses, the log-sum-exp of the logits and the labels of all tokens, ``[b, t]`` each.
    """
    check_labels(labels, x, part.total, part.ignore_index)
    part = replace(part, label_smoothing=label_smoothing)
    chunks = chunks_of(x.shape[1], sharding, ranks, options, x.device)
    all_labels = _gather_ids(labels, chunks.rows.lengths, chunks.group)
    batch, total = all_labels.shape
    statistics = x.new_empty(3 * batch, total, dtype=sum_dtype(x))  # [3 * b, t]
    with chunks.call("vocab_linear_cross_entropy", x):
        for rows, piece in chain.from_iterable(chunks.receive_chunks(x.contiguous())):
            statistics_of_piece = [
                torch.stack(part.statistics(_logits(hidden, weight, bias), labels_part))
                for hidden, labels_part in _split(chunk_tokens, piece, rows.take(all_labels))
            ]
            if statistics_of_piece:
                rows.put(statistics, torch.cat(statistics_of_piece, 1).view(3 * batch, rows.length))
    losses, lse = part.losses(list(statistics.view(3, batch, total)), all_labels, chunks.group)
    return losses.contiguous(), lse.contiguous(), all_labels


@operator(
    fake=lambda dlosses, x, weight, bias, all_labels, lse, needed, *_: [
        like.new_empty(like.shape) for like, need in zip((x, weight, bias), needed, strict=True) if need
    ]
)
def vocab_linear_cross_entropy_backward(
    dlosses: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    all_labels: Tensor,
    lse: Tensor,
    needed: Sequence[bool],
    chunk_tokens: int,
    label_smoothing: float,
    part: VocabPart,
    sharding: Sharding,
    ranks: ParallelContext,
    options: ChunkOptions,
) -> list[Tensor]:
    """The gradients of ``x``, ``weight`` and ``bias`` that are ``needed``, from ``dlosses [b, t]`` of every rank."""
    part = replace(part, label_smoothing=label_smoothing)
    chunks = chunks_of(x.shape[1], sharding, ranks, options, x.device)
    need_x, need_weight, need_bias = needed
    with operation(f"the backward of {_NAME}"):  # every rank holds the losses
        dlosses = all_reduce(dlosses.masked_fill(all_labels == part.ignore_index, 0), chunks.group)
    # Summed over the chunks, so in float32.
    dweight = torch.zeros_like(weight, dtype=sum_dtype(weight)) if need_weight else None
    dbias = torch.zeros_like(bias, dtype=sum_dtype(bias)) if bias is not None and need_bias else None

    def gradients(rows: SequenceRows, piece: Tensor) -> Tensor:
        """This rank's partial gradient of ``piece [b, n, d]``. Adds the gradients of the weights to their sums."""
        of_rows = (rows.take(tensor) for tensor in (all_labels, lse, dlosses))
        dpiece = torch.empty_like(piece) if need_x else piece.new_empty(0)
        outs = dpiece.view(-1, piece.shape[2]).split(chunk_tokens)
        for i, (hidden, labels, lse_part, dlosses_part) in enumerate(_split(chunk_tokens, piece, *of_rows)):
            dlogits = _logits(hidden, weight, bias).sub_(lse_part[:, None]).exp_()  # [tokens, v]
            part.subtract_targets(dlogits, labels)
            dlogits.mul_(dlosses_part[:, None])
            if dbias is not None:
                dbias.add_(dlogits.sum(0))
            dlogits = dlogits.to(weight.dtype)
            if need_x:
                torch.mm(dlogits, weight, out=outs[i])
            if dweight is not None:
                add_weight_gradient(dweight, dlogits[None], hidden[None])
        return dpiece

    def next_gradients(pieces: Iterator[RowPiece], rows: SequenceRows) -> Tensor:
        return gradients(*next(pieces))

    with chunks.call("vocab_linear_cross_entropy_backward", x):
        partial_dx = PartialSums(chunks, x, x.shape[2])
        for step, pieces in enumerate(chunks.receive_chunks(x.contiguous())):
            if need_x:  # the gradient of a chunk is sent back to the rank that sent the chunk
                partial_dx.add(-step % chunks.size, partial(next_gradients, pieces))
            else:
                for rows, piece in pieces:
                    gradients(rows, piece)
        results = [partial_dx.result().contiguous()] if need_x else []
    sums = (weight, dweight), (bias, dbias)
    return results + [total.to(like.dtype) for like, total in sums if like is not None and total is not None]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *constants: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses, lse, all_labels = vocab_linear_cross_entropy(x, weight, bias, labels, *constants)
        ctx.save_for_backward(x, weight, bias, all_labels, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.constants = constants
        return losses, lse, all_labels

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor, *_: Any) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[:3]
        results = iter(vocab_linear_cross_entropy_backward(dlosses, *ctx.saved_tensors, needed, *ctx.constants))
        return *(next(results) if need else None for need in needed), *[None] * 7


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` in float32 (float64 for float64), a tensor that may be written to."""
    logits = F.linear(hidden, weight)
    logits = logits.to(sum_dtype(logits))
    return logits if bias is None else logits.add_(bias)


def _split(tokens: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields the tensors ``[b, n, ...]`` in parts ``[tokens, ...]``; nothing if they are empty."""
    if tensors[0].numel():
        yield from zip(*(x.flatten(0, 1).split(tokens) for x in tensors), strict=True)
