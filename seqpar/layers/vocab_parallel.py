"""The vocabulary sharded over a tensor-parallel group: embedding, output head, and the loss without gathered logits.

Shoeybi et al., "Megatron-LM", 2019, section 3. Outside these modules the activations are sharded by tokens.

Shapes: b batch, s this rank's tokens, t the group's tokens, v this rank's part of the vocabulary, d hidden. ``lengths``
are the ranks' ``s``, and ``t`` is their sum. Tokens of the group are in the order of the ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

from ..checks import DTYPES, check_choice, check_int, no_compile
from ..comm.collectives import all_gather, all_reduce
from ..comm.handshake import all_gather_header, check_same, propagate_errors
from ..layout import split_range
from ..mesh import ParallelContext, rank_in, size_of, tensor_group
from ..strategies.tensor_sequence import OVERLAPS, Overlap, SequenceChunks
from .sharded_weights import WeightShard, make_spans, register_weight_shards
from .tensor_parallel import column_linear, shard_linear, tokens_in_rank_order


class VocabParallelEmbedding(nn.Module):
    """Token ids ``[batch, seq]`` of this rank's tokens to embeddings ``[batch, seq, hidden]`` of the same tokens.

    Each rank holds the embeddings of a part of the vocabulary, which need not divide by the number of ranks. The ranks
    all-gather the ids (8 bytes a token), each looks up those in its part, and a reduce-scatter sums the results.

    Args:
        num_embeddings: the size of the full vocabulary.
        embedding_dim: the hidden size.
        mesh: the vocabulary and the tokens are sharded over its tp dimension.
        group: the ranks they are sharded over, instead of a mesh. With neither, the default group.
        device: of the weight.
        dtype: of the weight.

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
        tp = self._parallel_context.tensor
        shard = _vocab_shard(num_embeddings, tp)
        # Every rank draws the full weight, so that one seed gives the same weights for every number of ranks.
        full = nn.Embedding(num_embeddings, embedding_dim, device=device, dtype=dtype).weight.detach()
        self.weight = nn.Parameter(shard.to_local(full).clone())  # [v, d]
        self._start, self._stop = shard.span
        register_weight_shards(self, {"weight": shard})

    @no_compile
    def forward(self, ids: Tensor) -> Tensor:
        """Embed this rank's tokens.

        Args:
            ids: int64 ``[batch, seq]``.

        Returns:
            ``[batch, seq, hidden]`` in the dtype of the weight.

        Raises:
            TypeError: ``ids`` is not an int64 tensor of two dimensions.
            ValueError: an id outside the vocabulary, or ranks that differ in batch.
            RuntimeError: another rank raised an error on its own ids.
        """
        tp = self._parallel_context.tensor
        lengths = [header.length for header in _check_ids("ids", ids, self.num_embeddings, tp)]
        all_ids = all_gather(ids, lengths, 1, tp)  # [b, t]
        local_ids = all_ids - self._start
        owned = (local_ids >= 0) & (local_ids < self._stop - self._start)
        if self._stop == self._start:
            # More ranks than entries: zeros, and the sum of the empty weight gives it a gradient.
            partial_sum = all_ids.new_zeros(*all_ids.shape, self.embedding_dim, dtype=self.weight.dtype)
            partial_sum = partial_sum + self.weight.sum()
        else:
            partial_sum = F.embedding(local_ids.masked_fill(~owned, 0), self.weight) * owned.unsqueeze(-1)  # [b, t, d]
        if tp is None or tp.size() == 1:
            return partial_sum
        out: Tensor = _ReduceScatter.apply(partial_sum, SequenceChunks.in_rank_order(tp, lengths, "none", ids.device))
        return out  # [b, s, d]


class VocabParallelHead(nn.Linear):
    """Hidden states of this rank's tokens to logits of the group's tokens over this rank's part of the vocabulary.

    ``[batch, seq, hidden]`` to ``[batch, tokens, vocab_local]``, with the tokens in the order of the ranks, as
    ``vocab_parallel_cross_entropy`` takes them.

    Args:
        hidden_size: the hidden size.
        num_embeddings: the size of the full vocabulary.
        mesh: the vocabulary and the tokens are sharded over its tp dimension.
        group: the ranks they are sharded over, instead of a mesh. With neither, the default group.
        bias: whether the logits have a bias.
        overlap: "auto", "ring", "symm_mem" or "none": how the all-gather overlaps with the GEMM.
        device: of the weights.
        dtype: of the weights.

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
        super().__init__(hidden_size, num_embeddings, bias=bias, device=device, dtype=dtype)
        self.overlap: Overlap = overlap
        self._parallel_context = ParallelContext(mesh, group)
        shard = _vocab_shard(num_embeddings, self._parallel_context.tensor)
        shard_linear(self, {"weight": shard, "bias": shard})  # weight [v, d]

    @no_compile
    def forward(self, x_local: Tensor) -> Tensor:
        """``[batch, seq, hidden]`` to ``[batch, tokens, vocab_local]``."""
        chunks = tokens_in_rank_order(x_local, self._parallel_context.tensor, self.overlap, self.in_features, self)
        (logits,) = column_linear(x_local, (self,), chunks)
        return logits


@no_compile
def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    num_embeddings: int,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Cross-entropy of logits that are sharded over the vocabulary.

    The ranks all-reduce three float32 numbers a token (row maximum, sum of exponentials, target logit) instead of
    gathering the logits.

    Args:
        logits: ``[batch, tokens, vocab_local]`` of all of the group's tokens, as ``VocabParallelHead`` returns them.
        labels: int64 ``[batch, seq]`` of *this rank's* tokens, already shifted. They are all-gathered here.
        num_embeddings: the size of the full vocabulary.
        mesh: as given to ``VocabParallelHead``.
        group: as given to ``VocabParallelHead``.
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
    tp = tensor_group(mesh, group)
    vocab_range = split_range(num_embeddings, size_of(tp), rank_in(tp))
    with propagate_errors(tp):
        if not isinstance(logits, Tensor) or logits.dtype not in DTYPES:
            got = f"dtype {logits.dtype}" if isinstance(logits, Tensor) else type(logits).__name__
            raise TypeError(f"logits: expected a floating-point tensor [batch, tokens, {len(vocab_range)}], got {got}")
        if logits.dim() != 3 or logits.shape[2] != len(vocab_range):
            raise ValueError(
                f"logits: shape {tuple(logits.shape)}; expected [batch, tokens, {len(vocab_range)}], this rank's part "
                f"of num_embeddings={num_embeddings}; pass the logits that VocabParallelHead returns"
            )
    headers = _check_ids("labels", labels, num_embeddings, tp, ignore_index, logits)
    lengths, tokens = [header.length for header in headers], [header.tokens for header in headers]
    if any(n != sum(lengths) for n in tokens):
        raise ValueError(
            f"logits: of {tokens} tokens, by rank, but the ranks' labels are {lengths}, {sum(lengths)} together; "
            "pass VocabParallelHead's logits and this rank's labels"
        )
    all_labels = all_gather(labels, lengths, 1, tp)  # [b, t]
    loss: Tensor = _CrossEntropy.apply(logits, all_labels, vocab_range.start, tp, ignore_index)
    return loss


def _vocab_shard(num_embeddings: int, tp: ProcessGroup | None) -> WeightShard:
    """The rows of a weight ``[num_embeddings, hidden]``, split over the ranks."""
    return WeightShard(tp, 0, make_spans(tp, partial(split_range, num_embeddings, size_of(tp))), num_embeddings)


class _IdsHeader(NamedTuple):
    """A rank's ids or labels ``[batch, length]``, and its logits ``[batch, tokens, v]`` if it has any."""

    length: int
    tokens: int
    batch: int
    dtype_of_logits: torch.dtype


def _check_ids(
    name: str,
    ids: Tensor,
    num_embeddings: int,
    group: ProcessGroup | None,
    ignore_index: int | None = None,
    logits: Tensor | None = None,
) -> list[_IdsHeader]:
    """The header of each rank, after checking every rank's input."""

    def header() -> _IdsHeader:
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype != torch.int64:
            got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(f"{name}: expected an int64 tensor [batch, seq], got {got}")
        outside = (ids < 0) | (ids >= num_embeddings)
        if ignore_index is not None:
            outside &= ids != ignore_index
        if bool(outside.any()):
            allowed = f"0 to {num_embeddings - 1}"
            allowed += f", or ignore_index={ignore_index}" if ignore_index is not None else ""
            raise ValueError(f"{name}: {int(ids[outside][0])} lies outside the vocabulary; expected {allowed}")
        if logits is None:
            return _IdsHeader(ids.shape[1], 0, ids.shape[0], torch.float32)
        if logits.shape[0] != ids.shape[0]:
            raise ValueError(
                f"logits: {logits.shape[0]} batch rows, but {name} has {ids.shape[0]}; pass the same number in both"
            )
        return _IdsHeader(ids.shape[1], logits.shape[1], ids.shape[0], logits.dtype)

    headers = all_gather_header(header, group)
    check_same(headers, "batch", "dtype_of_logits")
    return headers


class _ReduceScatter(torch.autograd.Function):
    """Forward sums ``[b, t, d]`` over the ranks and keeps this rank's ``[b, s, d]``; backward all-gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: SequenceChunks) -> Tensor:
        ctx.chunks = chunks
        return chunks.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        chunks: SequenceChunks = ctx.chunks
        return chunks.all_gather(grad), None


class _CrossEntropy(torch.autograd.Function):
    """``log(sum(exp(logits))) - logits[label]``, with softmax statistics all-reduced over the vocabulary's shards."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_start: int, group: ProcessGroup | None, ignore_index: int
    ) -> Tensor:
        logits_fp32 = logits.to(torch.promote_types(logits.dtype, torch.float32))  # [b, t, v], float64 stays float64
        vocab_local = logits_fp32.shape[-1]  # 0 on ranks beyond the vocabulary
        row_max = logits_fp32.amax(-1) if vocab_local else logits_fp32.new_full(labels.shape, -torch.inf)  # [b, t]
        all_reduce(row_max, group, dist.ReduceOp.MAX)
        probs = torch.exp(logits_fp32 - row_max[..., None])  # [b, t, v], divided by the row sums below

        local_labels = labels - vocab_start
        owned = (local_labels >= 0) & (local_labels < vocab_local) & (labels != ignore_index)
        index = local_labels.masked_fill(~owned, 0)[..., None]  # [b, t, 1]
        target = logits_fp32.gather(-1, index)[..., 0] * owned if vocab_local else torch.zeros_like(row_max)

        row_sum, target = all_reduce(torch.stack([probs.sum(-1), target]), group).unbind()  # [b, t] each
        probs /= row_sum[..., None]
        counted = labels != ignore_index
        ctx.save_for_backward(probs.to(logits.dtype), index, owned, counted)
        return (row_sum.log() + row_max - target) * counted

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probs, index, owned, counted = ctx.saved_tensors
        dlogits = probs.clone()
        if probs.shape[-1]:
            dlogits.scatter_add_(-1, index, -owned[..., None].to(probs.dtype))
        return (dlogits * (grad * counted)[..., None]).to(probs.dtype), None, None, None, None
