"""The functions of ``sharded_vocab.py`` as operators that torch.compile does not trace (see ``operators.py``).

Each operator also checks and all-gathers this rank's ids or labels.

Shapes: b batch, s this rank's tokens, t the group's tokens, v this rank's part of the vocabulary, d hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import all_gather
from ..mesh import ParallelContext, tensor_group
from ..sharding import Sharding
from ..strategies.sequence_chunks import sum_dtype
from ..strategies.tensor_operators import LEAST_TOKENS, ChunkOptions, chunks_of
from .sharded_vocab import (
    VocabPart,
    check_ids,
    check_labels,
    check_logits,
    check_tokens,
    cross_entropy_backward,
    cross_entropy_forward,
    embedding_backward,
    embedding_forward,
    linear_cross_entropy_backward,
    linear_cross_entropy_forward,
)

_EMBEDDING = ChunkOptions("none")
_LOSS = ChunkOptions("ring")


@torch.library.custom_op("seqpar::vocab_embedding", mutates_args=())
def embedding_op(
    ids: Tensor, weight: Tensor, num_embeddings: int, part: VocabPart, sharding: Sharding, ranks: ParallelContext
) -> list[Tensor]:
    """``embedding_forward`` of ``ids [b, s]``: the embeddings ``[b, s, d]`` and the ids ``[b, t]`` of all tokens."""
    check_ids("ids", ids, num_embeddings)
    chunks = chunks_of(ids.shape[1], sharding, ranks, _EMBEDDING, ids.device)
    all_ids = all_gather(ids, chunks.rows.lengths, 1, chunks.group).clone(memory_format=torch.contiguous_format)
    return [embedding_forward(all_ids, weight, part, chunks).contiguous(), all_ids]


@embedding_op.register_fake
def _(
    ids: Tensor, weight: Tensor, num_embeddings: int, part: VocabPart, sharding: Sharding, ranks: ParallelContext
) -> list[Tensor]:
    tokens = torch.library.get_ctx().new_dynamic_size(min=LEAST_TOKENS)
    return [weight.new_empty(*ids.shape, weight.shape[1]), ids.new_empty(ids.shape[0], tokens)]


@torch.library.custom_op("seqpar::vocab_embedding_backward", mutates_args=())
def _embedding_backward(
    dout: Tensor, ids: Tensor, weight: Tensor, part: VocabPart, sharding: Sharding, ranks: ParallelContext
) -> Tensor:
    """The gradient of ``weight``; ``ids`` are those of all tokens."""
    chunks = chunks_of(dout.shape[1], sharding, ranks, _EMBEDDING, dout.device)
    return embedding_backward(dout, ids, weight, part, chunks)


@_embedding_backward.register_fake
def _(dout: Tensor, ids: Tensor, weight: Tensor, part: VocabPart, sharding: Sharding, ranks: ParallelContext) -> Tensor:
    return weight.new_empty(weight.shape)


def _save_embedding(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, weight, _, *ctx.call = inputs
    ctx.save_for_backward(output[1], weight)


def _backward_embedding(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    return None, _embedding_backward(grads[0], *ctx.saved_tensors, *ctx.call), None, None, None, None


embedding_op.register_autograd(_backward_embedding, setup_context=_save_embedding)


@torch.library.custom_op("seqpar::vocab_cross_entropy", mutates_args=())
def cross_entropy_op(
    logits: Tensor, labels: Tensor, num_embeddings: int, ignore_index: int, sharding: Sharding
) -> list[Tensor]:
    """``cross_entropy_forward`` of ``logits [b, t, v]`` and ``labels [b, s]``.

    Returns:
        The losses ``[b, t]``, the softmax ``[b, t, v]`` and the labels ``[b, t]`` of all tokens.

    Raises:
        ValueError: the logits are of another part of the vocabulary, or of another number of tokens.
    """
    check_ids("labels", labels, num_embeddings, ignore_index)
    group = tensor_group(sharding.mesh, sharding.group)
    part = VocabPart.of_rank(num_embeddings, group, ignore_index)
    check_logits(logits, labels, num_embeddings, part)
    sharding.check_local(labels.shape[1])
    lengths = sharding.lengths_in(group)
    check_tokens(logits, lengths)
    all_labels = all_gather(labels, lengths, 1, group).clone(memory_format=torch.contiguous_format)
    losses, probs = cross_entropy_forward(logits, all_labels, part, group)
    return [losses.contiguous(), probs.contiguous(), all_labels]


@cross_entropy_op.register_fake
def _(logits: Tensor, labels: Tensor, num_embeddings: int, ignore_index: int, sharding: Sharding) -> list[Tensor]:
    tokens = logits.shape[:2]
    losses = logits.new_empty(tokens, dtype=sum_dtype(logits))
    return [losses, logits.new_empty(logits.shape), labels.new_empty(tokens)]


@torch.library.custom_op("seqpar::vocab_cross_entropy_backward", mutates_args=())
def _cross_entropy_backward(
    grad: Tensor, probs: Tensor, labels: Tensor, num_embeddings: int, ignore_index: int, sharding: Sharding
) -> Tensor:
    """The gradient of the logits; ``labels`` are those of all tokens."""
    part = VocabPart.of_rank(num_embeddings, tensor_group(sharding.mesh, sharding.group), ignore_index)
    return cross_entropy_backward(grad, probs, labels, part)


@_cross_entropy_backward.register_fake
def _(
    grad: Tensor, probs: Tensor, labels: Tensor, num_embeddings: int, ignore_index: int, sharding: Sharding
) -> Tensor:
    return probs.new_empty(probs.shape)


def _save_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, _, *ctx.call = inputs
    ctx.save_for_backward(*output[1:])


def _backward_cross_entropy(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    return _cross_entropy_backward(grads[0], *ctx.saved_tensors, *ctx.call), *[None] * 4


cross_entropy_op.register_autograd(_backward_cross_entropy, setup_context=_save_cross_entropy)


@torch.library.custom_op("seqpar::vocab_linear_cross_entropy", mutates_args=())
def linear_cross_entropy_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    num_embeddings: int,
    part: VocabPart,
    chunk_tokens: int,
    sharding: Sharding,
    ranks: ParallelContext,
) -> list[Tensor]:
    """``linear_cross_entropy_forward`` of ``x [b, s, d]`` and ``labels [b, s]``.

    Returns:
        The losses, the log-sum-exp and the labels of all tokens, ``[b, t]`` each.
    """
    check_labels(labels, x, num_embeddings, part.ignore_index)
    chunks = chunks_of(x.shape[1], sharding, ranks, _LOSS, x.device)
    all_labels = all_gather(labels, chunks.rows.lengths, 1, chunks.group).clone(memory_format=torch.contiguous_format)
    losses, lse = linear_cross_entropy_forward(x.contiguous(), weight, bias, all_labels, part, chunk_tokens, chunks)
    return [losses.contiguous(), lse.contiguous(), all_labels]


@linear_cross_entropy_op.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    num_embeddings: int,
    part: VocabPart,
    chunk_tokens: int,
    sharding: Sharding,
    ranks: ParallelContext,
) -> list[Tensor]:
    shape = x.shape[0], torch.library.get_ctx().new_dynamic_size(min=LEAST_TOKENS)
    losses, lse = (x.new_empty(shape, dtype=sum_dtype(x)) for _ in range(2))
    return [losses, lse, labels.new_empty(shape)]


@torch.library.custom_op("seqpar::vocab_linear_cross_entropy_backward", mutates_args=())
def _linear_cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    needed: Sequence[bool],
    part: VocabPart,
    chunk_tokens: int,
    sharding: Sharding,
    ranks: ParallelContext,
) -> list[Tensor]:
    """The gradients of ``x``, ``weight`` and ``bias`` that are needed; ``labels`` are those of all tokens."""
    chunks = chunks_of(x.shape[1], sharding, ranks, _LOSS, x.device)
    tensors = grad, x.contiguous(), weight, bias, labels, lse
    gradients = linear_cross_entropy_backward(*tensors, needed, part, chunk_tokens, chunks)
    return [d.contiguous() for d in gradients if d is not None]


@_linear_cross_entropy_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    needed: Sequence[bool],
    part: VocabPart,
    chunk_tokens: int,
    sharding: Sharding,
    ranks: ParallelContext,
) -> list[Tensor]:
    gradients = zip((x, weight, bias), needed, strict=True)
    return [like.new_empty(like.shape) for like, need in gradients if like is not None and need]


def _save_linear_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, bias, _, _, *ctx.call = inputs
    _, lse, labels = output
    ctx.save_for_backward(x, weight, bias, labels, lse)


def _backward_linear_cross_entropy(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    needed = list(ctx.needs_input_grad[:3])
    gradients = iter(_linear_cross_entropy_backward(grads[0], *ctx.saved_tensors, needed, *ctx.call))
    return *(next(gradients) if need else None for need in needed), *[None] * 6


linear_cross_entropy_op.register_autograd(_backward_linear_cross_entropy, setup_context=_save_linear_cross_entropy)
