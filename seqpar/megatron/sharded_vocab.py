"""A rank's computation for a sharded vocabulary: embeddings and loss, their gradients, and their autograd functions.

Under torch.compile, the operators of ``vocab_operators.py`` replace the autograd functions.

Shapes: b batch, s this rank's tokens, t the group's tokens, v this rank's part of the vocabulary, d hidden. Tokens of
the group are in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ..checks import DTYPES
from ..comm.collectives import all_reduce
from ..comm.p2p import make_ready
from ..layout import chunk_range
from ..mesh import rank_in, size_of
from ..opaque import Opaque, constant
from ..strategies.sequence_chunks import PartialSums, Piece, Rows, SequenceChunks, sum_dtype
from ..strategies.tensor_sequence import add_weight_gradient

# The label of tokens without loss, by default. No id has it.
IGNORE_INDEX = -100


def check_ids(name: str, ids: Tensor, num_embeddings: int, ignore_index: int | None = None) -> None:
    """Raise unless ``ids`` are ids of the vocabulary.

    Values on a GPU are checked by an assertion on the GPU, because reading them would make the host wait.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype != torch.int64:
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{name}: expected an int64 tensor [batch, seq], got {got}")
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


@constant()
@dataclass(frozen=True)
class VocabPart(Opaque):
    """This rank's part of the vocabulary, the ``size`` entries from ``start`` on, and computations on its logits."""

    start: int
    size: int
    ignore_index: int = IGNORE_INDEX

    @staticmethod
    def of_rank(num_embeddings: int, group: ProcessGroup | None, ignore_index: int = IGNORE_INDEX) -> VocabPart:
        """This rank's part of the vocabulary, which is sharded over ``group``."""
        entries = chunk_range(num_embeddings, size_of(group), rank_in(group))
        return VocabPart(entries.start, len(entries), ignore_index)

    def index(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The indices of the labels in this rank's part, and whether they are in it, ``[..., 1]`` each."""
        local = labels - self.start
        owned = (local >= 0) & (local < self.size) & (labels != self.ignore_index)
        return local.masked_fill(~owned, 0)[..., None], owned[..., None]

    def statistics(self, logits: Tensor, labels: Tensor) -> list[Tensor]:
        """Row maximum, sum of ``exp(logit - maximum)`` and target logit of this rank's logits ``[..., v]``.

        ``logits`` are overwritten by ``exp(logit - maximum)``.
        """
        if not self.size:  # more ranks than entries
            none = logits.new_zeros(labels.shape)
            return [torch.full_like(none, -torch.inf), none, none]
        index, owned = self.index(labels)
        row_max = logits.amax(-1)
        target = (logits.gather(-1, index) * owned)[..., 0]
        return [row_max, logits.sub_(row_max[..., None]).exp_().sum(-1), target]

    def losses(self, statistics: list[Tensor], labels: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """The losses and the log-sum-exp over the whole vocabulary, from the statistics of every rank's part."""
        row_max, row_sum, target = statistics
        top = all_reduce(row_max.clone(), group, dist.ReduceOp.MAX)
        row_sum, target = all_reduce(torch.stack([row_sum * (row_max - top).exp(), target]), group).unbind()
        lse = row_sum.log() + top
        return (lse - target).masked_fill(labels == self.ignore_index, 0), lse

    def subtract_targets(self, probs: Tensor, labels: Tensor) -> None:
        """Subtract 1 from the probability of each row's label, in place."""
        if self.size:
            index, owned = self.index(labels)
            probs.scatter_add_(-1, index, -owned.to(probs.dtype))


def check_labels(labels: Tensor, x: Tensor, num_embeddings: int, ignore_index: int) -> None:
    """Raise unless ``labels`` are ids of the vocabulary, one for each token of ``x [b, s, d]``."""
    check_ids("labels", labels, num_embeddings, ignore_index)
    if labels.shape != x.shape[:2]:
        raise ValueError(
            f"labels: shape {tuple(labels.shape)}; expected {tuple(x.shape[:2])}, one for each token of x_local"
        )


def check_logits(logits: Tensor, labels: Tensor, num_embeddings: int, part: VocabPart) -> None:
    """Raise unless ``logits [b, t, v]`` fit this part of the vocabulary and the batch size of the labels."""
    if not isinstance(logits, Tensor) or logits.dtype not in DTYPES:
        got = f"dtype {logits.dtype}" if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"logits: expected a floating-point tensor [batch, tokens, {part.size}], got {got}")
    if logits.dim() != 3 or logits.shape[2] != part.size:
        raise ValueError(
            f"logits: shape {tuple(logits.shape)}; expected [batch, tokens, {part.size}], this rank's part "
            f"of num_embeddings={num_embeddings}; pass the logits that VocabParallelHead returns"
        )
    if logits.shape[0] != labels.shape[0]:
        raise ValueError(
            f"logits: {logits.shape[0]} batch rows, but labels have {labels.shape[0]}; pass the same number in both"
        )


def check_tokens(logits: Tensor, lengths: Sequence[int]) -> None:
    """Raise unless ``logits [b, t, v]`` have the tokens of all ranks, which hold ``lengths`` tokens."""
    if logits.shape[1] != sum(lengths):
        raise ValueError(
            f"logits: {logits.shape[1]} tokens, but the ranks' labels are {list(lengths)}, {sum(lengths)} together; "
            "pass VocabParallelHead's logits and this rank's labels"
        )


def embedding_forward(ids: Tensor, weight: Tensor, part: VocabPart, chunks: SequenceChunks) -> Tensor:
    """The embeddings ``[b, s, d]`` of this rank's tokens.

    Args:
        ids: int64 ``[b, t]``, of the group's tokens.
        weight: ``[v, d]``.
        part: the part of the vocabulary that ``weight`` holds.
        chunks: which tokens each rank holds.
    """
    if part.size:
        index, owned = part.index(ids)
        partial_sum = F.embedding(index[..., 0], weight) * owned  # [b, t, d]
    else:  # more ranks than entries
        partial_sum = weight.new_zeros(*ids.shape, weight.shape[1])
    return chunks.reduce_scatter(partial_sum)


def embedding_backward(dout: Tensor, ids: Tensor, weight: Tensor, part: VocabPart, chunks: SequenceChunks) -> Tensor:
    """The gradient of ``weight``, from that of the embeddings, ``dout [b, s, d]``."""
    if not part.size:
        chunks.all_gather(dout)  # collective: the other ranks need it
        return torch.zeros_like(weight)
    index, owned = part.index(ids)
    grad = chunks.all_gather(dout) * owned  # [b, t, d]
    dweight: Tensor = torch.ops.aten.embedding_dense_backward(grad, index[..., 0], part.size, -1, False)
    return dweight


class Embedding(torch.autograd.Function):
    """``embedding_forward``."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, part: VocabPart, chunks: SequenceChunks) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.part, ctx.chunks = part, chunks
        return embedding_forward(ids, weight, part, chunks)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        ids, weight = ctx.saved_tensors
        return None, embedding_backward(dout, ids, weight, ctx.part, ctx.chunks), None, None


def cross_entropy_forward(
    logits: Tensor, labels: Tensor, part: VocabPart, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """``log(sum(exp(logits))) - logits[label]``, with softmax statistics all-reduced over the vocabulary's shards.

    Args:
        logits: ``[b, t, v]``.
        labels: ``[b, t]``.
        part: the part of the vocabulary that ``logits`` are of.
        group: the ranks that hold the other parts.

    Returns:
        The losses ``[b, t]``, and the softmax ``[b, t, v]`` in the dtype of the logits.
    """
    probs = logits.to(sum_dtype(logits), copy=True)  # [b, t, v]: the only copy in float32
    statistics = part.statistics(probs, labels)
    losses, lse = part.losses(statistics, labels, group)
    probs.mul_((statistics[0] - lse).exp_()[..., None])  # they are exp(logit - row maximum)
    return losses, probs.to(logits.dtype)


def cross_entropy_backward(grad: Tensor, probs: Tensor, labels: Tensor, part: VocabPart) -> Tensor:
    """The gradient of the logits, from that of the losses, ``grad [b, t]``."""
    dlogits = probs.clone()
    part.subtract_targets(dlogits, labels)
    return dlogits.mul_(grad.masked_fill(labels == part.ignore_index, 0)[..., None])


class CrossEntropy(torch.autograd.Function):
    """``cross_entropy_forward``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, part: VocabPart, group: ProcessGroup | None) -> Tensor:
        losses, probs = cross_entropy_forward(logits, labels, part, group)
        ctx.save_for_backward(probs, labels)
        ctx.part = part
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probs, labels = ctx.saved_tensors
        return cross_entropy_backward(grad, probs, labels, ctx.part), None, None, None


def linear_cross_entropy_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    part: VocabPart,
    chunk_tokens: int,
    chunks: SequenceChunks,
) -> tuple[Tensor, Tensor]:
    """The cross-entropy of ``F.linear(x, weight, bias)``, without the logits of all tokens in memory.

    The hidden states are received chunk by chunk during the GEMMs, in forward and again in backward. In backward, the
    partial gradients of x are sent at the same time to the ranks that hold the tokens. The statistics of all tokens are
    all-reduced together.

    Args:
        x: ``[b, s, d]``, contiguous.
        weight: ``[v, d]``.
        bias: ``[v]``.
        labels: ``[b, t]``.
        part: the part of the vocabulary that ``weight`` holds.
        chunk_tokens: how many tokens have logits at a time.
        chunks: which tokens each rank holds.

    Returns:
        The losses and the log-sum-exp of the logits, ``[b, t]`` each.
    """
    make_ready(chunks.group, x.device)
    batch, total = labels.shape
    statistics = x.new_empty(3 * batch, total, dtype=sum_dtype(x))  # [3 * b, t]
    for rows, piece in chain.from_iterable(chunks.receive_chunks(x)):
        found = [
            torch.stack(part.statistics(_logits(hidden, weight, bias), labels_part))
            for hidden, labels_part in _parts(chunk_tokens, piece, rows.take(labels))
        ]
        if found:
            rows.put(statistics, torch.cat(found, 1).view(3 * batch, len(rows)))
    return part.losses(list(statistics.view(3, batch, total)), labels, chunks.group)


def linear_cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    needed: Sequence[bool],
    part: VocabPart,
    chunk_tokens: int,
    chunks: SequenceChunks,
) -> list[Tensor | None]:
    """The gradients of ``x``, ``weight`` and ``bias`` that are ``needed``, from the gradient of the losses."""
    need_x, need_weight, need_bias = needed
    grad = grad.masked_fill(labels == part.ignore_index, 0)  # [b, t]
    # These are summed over the chunks, so they are in float32.
    dweight = torch.zeros_like(weight, dtype=sum_dtype(weight)) if need_weight else None
    dbias = torch.zeros_like(bias, dtype=sum_dtype(bias)) if bias is not None and need_bias else None

    def gradients(rows: Rows, piece: Tensor) -> Tensor:
        """This rank's partial gradient of ``piece [b, n, d]``. Adds the gradients of the weights to their sums."""
        of_rows = (rows.take(tensor) for tensor in (labels, lse, grad))
        dpiece = torch.empty_like(piece) if need_x else piece.new_empty(0)
        outs = dpiece.view(-1, piece.shape[2]).split(chunk_tokens)
        for i, (hidden, labels_part, lse_part, grad_part) in enumerate(_parts(chunk_tokens, piece, *of_rows)):
            dlogits = _logits(hidden, weight, bias).sub_(lse_part[:, None]).exp_()  # [tokens, v]
            part.subtract_targets(dlogits, labels_part)
            dlogits.mul_(grad_part[:, None])
            if dbias is not None:
                dbias.add_(dlogits.sum(0))
            dlogits = dlogits.to(weight.dtype)
            if need_x:
                torch.mm(dlogits, weight, out=outs[i])
            if dweight is not None:
                add_weight_gradient(dweight, dlogits[None], hidden[None])
        return dpiece

    def next_gradients(pieces: Iterator[Piece], rows: Rows) -> Tensor:
        return gradients(*next(pieces))

    partial_dx = PartialSums(chunks)
    for step, pieces in enumerate(chunks.receive_chunks(x)):
        if need_x:  # the gradient of a chunk is sent back to the rank that sent the chunk
            partial_dx.add(-step % chunks.size, partial(next_gradients, pieces))
        else:
            for rows, piece in pieces:
                gradients(rows, piece)
    return [
        partial_dx.result() if need_x else None,
        None if dweight is None else dweight.to(weight.dtype),
        None if bias is None or dbias is None else dbias.to(bias.dtype),
    ]


class LinearCrossEntropy(torch.autograd.Function):
    """``linear_cross_entropy_forward``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        part: VocabPart,
        chunk_tokens: int,
        chunks: SequenceChunks,
    ) -> Tensor:
        x = x.contiguous()
        losses, lse = linear_cross_entropy_forward(x, weight, bias, labels, part, chunk_tokens, chunks)
        ctx.save_for_backward(x, weight, bias, labels, lse)
        ctx.call = part, chunk_tokens, chunks
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, bias, labels, lse = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        gradients = linear_cross_entropy_backward(grad, x, weight, bias, labels, lse, needed, *ctx.call)
        return *gradients, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` in float32 (float64 for float64), a tensor that may be written to."""
    logits = F.linear(hidden, weight)
    logits = logits.to(sum_dtype(logits))
    return logits if bias is None else logits.add_(bias)


def _parts(tokens: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields the tensors ``[b, n, ...]`` in parts ``[tokens, ...]``; nothing if they are empty."""
    if tensors[0].numel():
        yield from zip(*(x.flatten(0, 1).split(tokens) for x in tensors), strict=True)
