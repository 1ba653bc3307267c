"""The vocabulary sharded over a tensor-parallel group: embedding, output head, and the loss without gathered logits.

Shoeybi et al., "Megatron-LM", 2019, section 3. Outside these modules the activations are sharded by tokens.

Shapes: b batch, s this rank's tokens, t the group's tokens, v this rank's part of the vocabulary, d hidden. ``lengths``
are the ranks' ``s``, and ``t`` is their sum. Tokens of the group are in the order of the ranks.
"""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

from ..checks import check_choice, check_hidden, check_int, no_compile
from ..comm.collectives import all_gather
from ..mesh import ParallelContext, size_of, tensor_group
from ..sharding import Sharding, check_sharding
from ..strategies.autograd import to_autocast_dtype, with_gradient
from ..strategies.sequence_chunks import OVERLAPS, Overlap, SequenceChunks
from ..strategies.tensor_operators import ChunkOptions, TracedChunks
from .sharded_vocab import (
    IGNORE_INDEX,
    CrossEntropy,
    Embedding,
    LinearCrossEntropy,
    VocabPart,
    check_ids,
    check_labels,
    check_logits,
    check_tokens,
)
from .sharded_weights import ShardedLinear, ShardedWeights
from .tensor_parallel import HiddenHeader, agreed_lengths, column_linear, tokens_in_rank_order
from .vocab_operators import cross_entropy_op, embedding_op, linear_cross_entropy_op

_CHUNK_BYTES = 128 << 20  # of the float32 logits that exist at a time, by default


class VocabParallelEmbedding(ShardedWeights):
    """Maps ids ``[batch, seq]`` of this rank's tokens to embeddings ``[batch, seq, hidden]`` of the same tokens.

    Each rank holds the embeddings of a part of the vocabulary, whose size need not divide by the number of ranks. The
    ranks all-gather the ids (8 bytes per token), each rank looks up the ids in its part, and a reduce-scatter sums the
    results.

    Args:
        num_embeddings: the size of the full vocabulary.
        embedding_dim: the hidden size.
        mesh: the vocabulary and the tokens are sharded over its tp dimension.
        group: the ranks they are sharded over, instead of a mesh. With neither, the default group.
        device: the device of the weight.
        dtype: the dtype of the weight.

    Raises:
        TypeError: a size is not an int, or mesh or group have another type.
        ValueError: a size below 1, or a mesh without a tp dimension.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("num_embeddings", num_embeddings, 1)
        check_int("embedding_dim", embedding_dim, 1)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self._parallel_context = ParallelContext(mesh, group)
        self._part = VocabPart.of_rank(num_embeddings, self._parallel_context.tensor)
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()
        self.distribute(self._parallel_context, weight=0)  # [v, d] on this rank

    def reset_parameters(self) -> None:
        """Draw the weight. Every rank draws the full one, so that one seed gives the same for any number of ranks."""
        where: dict[str, Any] = {"device": self.weight.device, "dtype": self.weight.dtype}
        self.copy_parameters(nn.Embedding(self.num_embeddings, self.embedding_dim, **where))

    def forward(self, ids: Tensor, sharding: Sharding | None = None) -> Tensor:
        """Embed this rank's tokens.

        Args:
            ids: int64 ``[batch, seq]``.
            sharding: the ``Sharding`` of the tokens, made with ``strategy="tp_sp"``. Without it, the ranks exchange
                their lengths in a handshake, which is a graph break under ``torch.compile``.

        Returns:
            ``[batch, seq, hidden]`` in the dtype of the weight.

        Raises:
            TypeError: ``ids`` is not an int64 tensor of two dimensions.
            ValueError: an id outside the vocabulary, or ranks that differ in batch.
            RuntimeError: another rank raised an error on its own ids.
        """
        if not torch.compiler.is_compiling() or not isinstance(sharding, Sharding):
            return self._eager(ids, sharding)
        traced: Any = sharding
        weight = self.local_weight("weight")
        out: Tensor = embedding_op(ids, weight, self.num_embeddings, self._part, traced, self._parallel_context)[0]
        return out

    @no_compile
    def _eager(self, ids: Tensor, sharding: Sharding | None) -> Tensor:
        """``forward`` outside of torch.compile."""
        tp = self._parallel_context.tensor

        def header() -> _IdsHeader:
            check_ids("ids", ids, self.num_embeddings)
            return _IdsHeader(ids.shape[1], ids.shape[0])

        lengths = agreed_lengths(header, tp, sharding, "batch")
        chunks = SequenceChunks.in_rank_order(tp, lengths, "none", ids.device)
        out: Tensor = Embedding.apply(all_gather(ids, lengths, 1, tp), self.local_weight("weight"), self._part, chunks)
        return out


class VocabParallelHead(ShardedLinear):
    """Maps hidden states of this rank's tokens to logits of the group's tokens over this rank's part of the vocabulary.

    The input is ``[batch, seq, hidden]``. The output is ``[batch, tokens, vocab_local]``, with the tokens in the order
    of the ranks, as ``vocab_parallel_cross_entropy`` takes them. Given labels, the head returns the loss instead, and
    never holds the logits of all tokens.

    Args:
        hidden_size: the hidden size.
        num_embeddings: the size of the full vocabulary.
        mesh: the vocabulary and the tokens are sharded over its tp dimension.
        group: the ranks they are sharded over, instead of a mesh. With neither, the default group.
        bias: whether the logits have a bias.
        overlap: "auto", "ring", "symm_mem" or "none": how the all-gather overlaps with the GEMM.
        device: the device of the weights.
        dtype: the dtype of the weights.

    Raises:
        TypeError: an argument has another type.
        ValueError: a size below 1, an unknown ``overlap``, or a mesh without a tp dimension.
    """

    def __init__(
        self,
        hidden_size: int,
        num_embeddings: int,
        *,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        bias: bool = False,
        overlap: Overlap = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_int("hidden_size", hidden_size, 1)
        check_int("num_embeddings", num_embeddings, 1)
        check_choice("overlap", overlap, OVERLAPS)
        ranks = ParallelContext(mesh, group)
        super().__init__(hidden_size, num_embeddings, bias, ranks, 0, {"device": device, "dtype": dtype})
        self.overlap: Overlap = overlap
        self._parallel_context = ranks
        self._num_embeddings = num_embeddings
        self._part = VocabPart.of_rank(num_embeddings, ranks.tensor)  # weight [v, d] on this rank
        self._tensor_ranks = size_of(self._parallel_context.tensor)

    def forward(
        self,
        x_local: Tensor,
        labels: Tensor | None = None,
        sharding: Sharding | None = None,
        *,
        ignore_index: int = IGNORE_INDEX,
        chunk_tokens: int | None = None,
    ) -> Tensor:
        """The logits, or the loss if there are labels.

        ``head(x_local, labels)`` equals ``vocab_parallel_cross_entropy(head(x_local), labels, ...)`` but needs less
        memory: the logits of ``chunk_tokens`` tokens exist at a time. Backward computes them again.

        Args:
            x_local: ``[batch, seq, hidden]``, of this rank's tokens.
            labels: int64 ``[batch, seq]`` of this rank's tokens, already shifted.
            sharding: the ``Sharding`` of the tokens, made with ``strategy="tp_sp"``. Without it, the ranks exchange
                their lengths in a handshake, which is a graph break under ``torch.compile``.
            ignore_index: the label of tokens without loss.
            chunk_tokens: with labels, how many tokens have logits at a time; by default as many as fit into 128 MiB in
                float32.

        Returns:
            The logits, ``[batch, tokens, vocab_local]``. With labels, the loss of each of the group's tokens as
            ``vocab_parallel_cross_entropy`` returns it: ``[batch, tokens]``, float32 (float64 for float64).

        Raises:
            TypeError: an argument has another type.
            ValueError: shapes that do not fit together, or a label outside the vocabulary.
            RuntimeError: another rank raised an error on its own input.
        """
        if torch.compiler.is_compiling() and isinstance(sharding, Sharding):
            return self._traced(x_local, labels, sharding, ignore_index, chunk_tokens)
        return self._eager(x_local, labels, sharding, ignore_index, chunk_tokens)

    def _traced(
        self, x: Tensor, labels: Tensor | None, sharding: Any, ignore_index: int, chunk_tokens: int | None
    ) -> Tensor:
        """``forward`` while torch.compile traces it."""
        check_hidden(x, self.in_features, self)
        ranks = self._parallel_context
        if labels is None:
            chunks = TracedChunks(x.shape[1], sharding, ranks, ChunkOptions(self.overlap))
            (logits,) = column_linear(x, (self,), chunks if self._tensor_ranks > 1 else None)
            return logits
        x, weight = to_autocast_dtype(x, self.local_weight("weight"))
        # torch.compile may have made ignore_index a variable.
        part = VocabPart(self._part.start, self._part.size, index(ignore_index))
        tokens = self._tokens_at_a_time(chunk_tokens)
        loss: Tensor = linear_cross_entropy_op(
            x, weight, self.local_weight("bias"), labels, self._num_embeddings, part, tokens, sharding, ranks
        )[0]
        return loss

    def _tokens_at_a_time(self, chunk_tokens: int | None) -> int:
        """``chunk_tokens`` with its default filled in."""
        if chunk_tokens is None:
            return max(1, _CHUNK_BYTES // (4 * max(1, self._part.size)))
        check_int("chunk_tokens", chunk_tokens, 1)
        return chunk_tokens

    @no_compile
    def _eager(
        self,
        x_local: Tensor,
        labels: Tensor | None,
        sharding: Sharding | None,
        ignore_index: int,
        chunk_tokens: int | None,
    ) -> Tensor:
        """``forward`` outside of torch.compile."""
        tp = self._parallel_context.tensor
        if sharding is not None:  # without a handshake, no rank knows whether another rank needs a gradient
            x_local = with_gradient(x_local)
        if labels is None:
            chunks = tokens_in_rank_order(x_local, tp, self.overlap, self.in_features, self, sharding)
            (logits,) = column_linear(x_local, (self,), chunks)
            return logits

        def header() -> HiddenHeader:
            check_hidden(x_local, self.in_features, self)
            check_labels(labels, x_local, self._num_embeddings, ignore_index)
            self._tokens_at_a_time(chunk_tokens)
            requires_gradient = x_local.requires_grad and torch.is_grad_enabled()
            return HiddenHeader(x_local.shape[1], x_local.shape[0], x_local.dtype, requires_gradient)

        lengths = agreed_lengths(header, tp, sharding, "batch", "dtype", "requires_gradient")
        chunks = SequenceChunks.in_rank_order(tp, lengths, "ring", x_local.device)
        x, weight = to_autocast_dtype(x_local, self.local_weight("weight"))
        all_labels = all_gather(labels, lengths, 1, tp)
        part = VocabPart(self._part.start, self._part.size, ignore_index)
        tokens = self._tokens_at_a_time(chunk_tokens)
        loss: Tensor = LinearCrossEntropy.apply(x, weight, self.local_weight("bias"), all_labels, part, tokens, chunks)
        return loss


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    num_embeddings: int,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    sharding: Sharding | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Cross-entropy of logits that are sharded over the vocabulary.

    The ranks all-reduce three float32 numbers per token (row maximum, sum of exponentials, target logit) instead of
    gathering the logits.

    Args:
        logits: ``[batch, tokens, vocab_local]`` of all of the group's tokens, as ``VocabParallelHead`` returns them.
        labels: int64 ``[batch, seq]`` of *this rank's* tokens, already shifted. They are all-gathered here.
        num_embeddings: the size of the full vocabulary.
        mesh: as given to ``VocabParallelHead``.
        group: as given to ``VocabParallelHead``.
        sharding: the ``Sharding`` of the tokens, made with ``strategy="tp_sp"``, instead of mesh and group. Without it,
            the ranks exchange their lengths in a handshake, which is a graph break under ``torch.compile``.
        ignore_index: the label of tokens without loss.

    Returns:
        The loss of each of the group's tokens, ``[batch, tokens]``, float32 (float64 for float64 logits), the same on
        every rank of the group; 0 where the label is ``ignore_index``. Every rank of the group must run backward from
        the same scalar.

    Raises:
        TypeError: ``logits`` or ``labels`` are not tensors of these dtypes.
        ValueError: shapes that do not fit together, or a label outside the vocabulary.
        RuntimeError: another rank raised an error on its own input.
    """
    alone = mesh is None and group is None
    if torch.compiler.is_compiling() and isinstance(sharding, Sharding) and alone:
        traced: Any = sharding
        loss: Tensor = cross_entropy_op(logits, labels, num_embeddings, ignore_index, traced)[0]
        return loss
    return _eager_cross_entropy(logits, labels, num_embeddings, mesh, group, sharding, ignore_index)


@no_compile
def _eager_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    num_embeddings: int,
    mesh: DeviceMesh | None,
    group: ProcessGroup | None,
    sharding: Sharding | None,
    ignore_index: int,
) -> Tensor:
    """``vocab_parallel_cross_entropy`` outside of torch.compile."""
    if sharding is not None:
        check_sharding(sharding)
        sharding.check_arguments(mesh=mesh, group=group)
        mesh, group = sharding.mesh, sharding.group
    tp = tensor_group(mesh, group)
    part = VocabPart.of_rank(num_embeddings, tp, ignore_index)

    def header() -> _LogitsHeader:
        check_ids("labels", labels, num_embeddings, ignore_index)
        check_logits(logits, labels, num_embeddings, part)
        return _LogitsHeader(labels.shape[1], logits.shape[1], labels.shape[0], logits.dtype)

    lengths = agreed_lengths(header, tp, sharding, "tokens_of_logits", "batch", "dtype_of_logits")
    check_tokens(logits, lengths)
    loss: Tensor = CrossEntropy.apply(logits, all_gather(labels, lengths, 1, tp), part, tp)
    return loss


class _IdsHeader(NamedTuple):
    """A rank's ids ``[batch, length]``."""

    length: int
    batch: int


class _LogitsHeader(NamedTuple):
    """A rank's labels ``[batch, length]`` and logits ``[batch, tokens, v]``."""

    length: int
    tokens_of_logits: int
    batch: int
    dtype_of_logits: torch.dtype
