"""The vocabulary sharded over a tensor-parallel group: embedding, output head, and the loss without gathered logits.

Shoeybi et al., "Megatron-LM", 2019, section 3. Outside these modules the activations are sharded by tokens. The
operators are in ``sharded_vocab.py``.
"""

from __future__ import annotations

from functools import partial
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

from ..base.checks import check_choice, check_hidden, check_int
from ..placement.placement import ANY_RANKS, ParallelContext
from ..ranks.mesh import size_of
from ..sharding.arguments import check_sharding
from ..sharding.sharding import Sharding
from ..strategies.autograd import to_autocast_dtype, with_gradient
from ..strategies.sequence_chunks import OVERLAPS, Overlap
from ..strategies.tensor_operators import ChunkOptions, ShardedTokens
from .sharded_vocab import (
    IGNORE_INDEX,
    VocabPart,
    check_float_tensor,
    check_ids,
    check_label_smoothing,
    check_labels,
    check_logits,
    vocab_cross_entropy,
    vocab_embedding,
    vocab_linear_cross_entropy,
)
from .sharded_weights import ShardedLinear, ShardedWeights
from .tensor_parallel import HiddenHeader, column_linear, with_sharding

_CHUNK_BYTES = 128 << 20  # of the float32 logits that exist at a time, by default


class VocabParallelEmbedding(ShardedWeights):
    """Maps ids ``[batch, seq]`` of this rank's tokens to embeddings ``[batch, seq, hidden]`` of the same tokens.

    Each rank holds the embeddings of a part of the vocabulary, whose size need not divide by the number of ranks. The
    ranks all-gather the ids (8 bytes per token), each rank looks up the ids in its part, and a reduce-scatter sums the
    results. See ``MegatronMLP`` for the other arguments.

    Args:
        num_embeddings: the size of the full vocabulary.
        embedding_dim: the hidden size.
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
        """Draw the weight. Every rank draws all of it, so that one seed gives the same for any number of ranks."""
        factory_kwargs: dict[str, Any] = {"device": self.weight.device, "dtype": self.weight.dtype}
        self.copy_parameters(nn.Embedding(self.num_embeddings, self.embedding_dim, **factory_kwargs))

    def forward(self, ids: Tensor, sharding: Sharding | None = None) -> Tensor:
        """The embeddings of this rank's tokens, ``[batch, seq, hidden]``.

        Args:
            ids: int64 ``[batch, seq]``, of this rank's tokens.
            sharding: how the tokens are sharded; without it, the ranks first tell each other their lengths.
        """

        def header() -> _IdsHeader:
            check_ids("ids", ids, self.num_embeddings)
            return _IdsHeader(ids.shape[1], ids.shape[0])

        return with_sharding(partial(self._embed, ids), sharding, header, self._parallel_context)

    def _embed(self, ids: Tensor, sharding: Sharding, lengths: tuple[int, ...] | None) -> Tensor:
        weight, options = self.local_weight("weight"), ChunkOptions("none", lengths=lengths)
        out: Tensor = vocab_embedding(ids, weight, self._part, sharding, self._parallel_context, options)[0]
        return out


class VocabParallelHead(ShardedLinear):
    """Maps hidden states of this rank's tokens to logits of the group's tokens over this rank's part of the vocabulary.

    The input is ``[batch, seq, hidden]``. The output is ``[batch, tokens, vocab_local]``, with the tokens in the order
    of the ranks, as ``vocab_parallel_cross_entropy`` takes them. Given labels, the head returns the loss instead, and
    never holds the logits of all tokens. See ``MegatronMLP`` for the other arguments.

    Args:
        num_embeddings: the size of the full vocabulary.
        bias: whether the logits have a bias.
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
        label_smoothing: float = 0.0,
        chunk_tokens: int | None = None,
    ) -> Tensor:
        """The logits, or the loss if there are labels.

        ``head(x_local, labels)`` equals ``vocab_parallel_cross_entropy(head(x_local), labels, ...)`` but needs less
        memory: the logits of ``chunk_tokens`` tokens exist at a time. Backward computes them again.

        Args:
            x_local: ``[batch, seq, hidden]``, of this rank's tokens.
            labels: int64 ``[batch, seq]`` of this rank's tokens, already shifted.
            sharding: how the tokens are sharded; without it, the ranks first tell each other their lengths.
            ignore_index: the label of tokens without loss.
            label_smoothing: as in ``F.cross_entropy``; it has no effect without labels.
            chunk_tokens: with labels, how many tokens have logits at a time; by default as many as fit into 128 MiB in
                float32.

        Returns:
            The logits, ``[batch, tokens, vocab_local]``. With labels, the loss of each of the group's tokens as
            ``vocab_parallel_cross_entropy`` returns it: ``[batch, tokens]``, float32 (float64 for float64).
        """

        def header() -> HiddenHeader:
            check_hidden(x_local, self.in_features, self)
            if labels is not None:
                check_labels(labels, x_local, self._part.total, ignore_index)
                check_label_smoothing(label_smoothing)
                self._tokens_at_a_time(chunk_tokens)
            return HiddenHeader.of(x_local)

        compute = partial(self._compute, x_local, labels, ignore_index, label_smoothing, chunk_tokens)
        return with_sharding(compute, sharding, header, self._parallel_context)

    def _compute(
        self,
        x: Tensor,
        labels: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        chunk_tokens: int | None,
        sharding: Sharding,
        lengths: tuple[int, ...] | None,
    ) -> Tensor:
        x = x if lengths else with_gradient(x)
        ranks = self._parallel_context
        if labels is None:
            tokens = ShardedTokens(x.shape[1], sharding, ranks, ChunkOptions(self.overlap, lengths=lengths))
            (logits,) = column_linear(x, (self,), tokens if self._tensor_ranks > 1 else None)
            return logits
        x, weight = to_autocast_dtype(x, self.local_weight("weight"))
        # torch.compile may have made ignore_index a variable.
        part = VocabPart(self._part.total, self._part.start, self._part.size, index(ignore_index))
        smoothed = self._tokens_at_a_time(chunk_tokens), float(label_smoothing)
        constants = *smoothed, part, sharding, ranks, ChunkOptions("ring", lengths=lengths)
        loss: Tensor = vocab_linear_cross_entropy(x, weight, self.local_weight("bias"), labels, *constants)[0]
        return loss

    def _tokens_at_a_time(self, chunk_tokens: int | None) -> int:
        if chunk_tokens is None:
            return max(1, _CHUNK_BYTES // (4 * max(1, self._part.size)))
        check_int("chunk_tokens", chunk_tokens, 1)
        return chunk_tokens


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    num_embeddings: int,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    sharding: Sharding | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy of logits that are sharded over the vocabulary.

    The ranks all-reduce three float32 numbers per token (row maximum, sum of exponentials, target logit) instead of
    gathering the logits.

    Args:
        logits: ``[batch, tokens, vocab_local]`` of all of the group's tokens, as ``VocabParallelHead`` returns them.
        labels: int64 ``[batch, seq]`` of *this rank's* tokens, already shifted. They are all-gathered here.
        num_embeddings: the size of the full vocabulary.
        mesh: the mesh that ``VocabParallelHead`` was made with.
        group: the group that ``VocabParallelHead`` was made with.
        sharding: the ``Sharding`` of the tokens, made with ``strategy="tp_sp"``, instead of mesh and group. Without it
            there is a handshake.
        ignore_index: the label of tokens without loss.
        label_smoothing: as in ``F.cross_entropy``.

    Returns:
        The loss of each of the group's tokens, ``[batch, tokens]``, float32 (float64 for float64 logits), the same on
        every rank of the group; 0 where the label is ``ignore_index``. Every rank of the group must run backward.
        ``token_loss(losses, labels, sharding=sharding)`` is their mean over all ranks.

    Raises:
        TypeError: ``logits`` or ``labels`` are not tensors of these dtypes.
        ValueError: shapes that do not fit together, or a label outside the vocabulary.
        RuntimeError: another rank raised an error on its own input.
    """
    if sharding is not None and (mesh is not None or group is not None):
        check_sharding(sharding, mesh=mesh, group=group)
    ranks = ParallelContext(mesh, group) if sharding is None else ANY_RANKS

    def header() -> _LogitsHeader:
        check_float_tensor("logits", logits, "[batch, tokens, vocab_local]")
        check_ids("labels", labels, num_embeddings, ignore_index)
        check_label_smoothing(label_smoothing)
        if sharding is None:  # otherwise the operator checks it, which knows the ranks
            check_logits(logits, labels, VocabPart.of_rank(num_embeddings, ranks.tensor, ignore_index))
        return _LogitsHeader(labels.shape[1], logits.shape[1], labels.shape[0], logits.dtype)

    def compute(sharding: Sharding, lengths: tuple[int, ...] | None) -> Tensor:
        options = ChunkOptions("none", lengths=lengths)
        smoothing = float(label_smoothing)
        loss: Tensor = vocab_cross_entropy(logits, labels, num_embeddings, ignore_index, smoothing, sharding, options)[
            0
        ]
        return loss

    return with_sharding(compute, sharding, header, ranks)


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
