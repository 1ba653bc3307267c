"""The vocabulary sharded over a tensor-parallel group: embedding, output head, and the loss without gathered logits.

Shoeybi et al., "Megatron-LM", 2019, section 3. Outside these modules the activations are sharded by tokens.

Shapes: b batch, s this rank's tokens, t the group's tokens, v this rank's part of the vocabulary, d hidden. ``lengths``
are the ranks' ``s``, and ``t`` is their sum. Tokens of the group are in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

from ..checks import DTYPES, check_choice, check_hidden, check_int, no_compile
from ..comm.collectives import all_gather, all_reduce
from ..comm.p2p import make_ready
from ..layout import split_range
from ..mesh import ParallelContext, rank_in, size_of, tensor_group
from ..sharding import Sharding, check_sharding
from ..strategies.autograd import to_autocast_dtype, with_gradient
from ..strategies.tensor_sequence import (
    OVERLAPS,
    Overlap,
    PartialSums,
    Piece,
    Rows,
    SequenceChunks,
    add_weight_gradient,
    sum_dtype,
)
from .sharded_weights import WeightShard, make_spans, register_weight_shards
from .tensor_parallel import HiddenHeader, agreed_lengths, column_linear, shard_linear, tokens_in_rank_order

_CHUNK_BYTES = 128 << 20  # of the float32 logits that exist at a time, by default


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
    def forward(self, ids: Tensor, sharding: Sharding | None = None) -> Tensor:
        """Embed this rank's tokens.

        Args:
            ids: int64 ``[batch, seq]``.
            sharding: the ``Sharding`` of the tokens, made with ``strategy="tp_sp"``. Without it, the ranks exchange
                their lengths in a handshake.

        Returns:
            ``[batch, seq, hidden]`` in the dtype of the weight.

        Raises:
            TypeError: ``ids`` is not an int64 tensor of two dimensions.
            ValueError: an id outside the vocabulary, or ranks that differ in batch.
            RuntimeError: another rank raised an error on its own ids.
        """
        tp = self._parallel_context.tensor

        def header() -> _IdsHeader:
            _check_ids("ids", ids, self.num_embeddings)
            return _IdsHeader(ids.shape[1], ids.shape[0])

        lengths = agreed_lengths(header, tp, sharding, "batch")
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
    ``vocab_parallel_cross_entropy`` takes them. Given labels, it returns the loss instead, and never holds the logits
    of more than some tokens.

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
        self._num_embeddings, self._vocab_start = num_embeddings, shard.span[0]

    @no_compile
    def forward(
        self,
        x_local: Tensor,
        labels: Tensor | None = None,
        sharding: Sharding | None = None,
        *,
        ignore_index: int = -100,
        chunk_tokens: int | None = None,
    ) -> Tensor:
        """The logits, or the loss if there are labels.

        ``head(x_local, labels)`` is ``vocab_parallel_cross_entropy(head(x_local), labels, ...)`` in little memory: the
        logits of ``chunk_tokens`` tokens exist at a time, in forward and, computed again, in backward.

        Args:
            x_local: ``[batch, seq, hidden]``, of this rank's tokens.
            labels: int64 ``[batch, seq]`` of this rank's tokens, already shifted.
            sharding: the ``Sharding`` of the tokens, made with ``strategy="tp_sp"``. Without it, the ranks exchange
                their lengths in a handshake.
            ignore_index: the label of tokens without loss.
            chunk_tokens: with labels, how many tokens at a time; by default as many as have 128 MiB of float32 logits.

        Returns:
            The logits, ``[batch, tokens, vocab_local]``. With labels, the loss of each of the group's tokens as
            ``vocab_parallel_cross_entropy`` returns it: ``[batch, tokens]``, float32 (float64 for float64).

        Raises:
            TypeError: an argument has another type.
            ValueError: shapes that do not fit together, or a label outside the vocabulary.
            RuntimeError: another rank raised an error on its own input.
        """
        tp = self._parallel_context.tensor
        if sharding is not None:  # the ranks do not tell each other whether they need a gradient
            x_local = with_gradient(x_local)
        if labels is None:
            chunks = tokens_in_rank_order(x_local, tp, self.overlap, self.in_features, self, sharding)
            (logits,) = column_linear(x_local, (self,), chunks)
            return logits

        def header() -> HiddenHeader:
            check_hidden(x_local, self.in_features, self)
            _check_ids("labels", labels, self._num_embeddings, ignore_index)
            if labels.shape != x_local.shape[:2]:
                raise ValueError(
                    f"labels: shape {tuple(labels.shape)}; expected {tuple(x_local.shape[:2])}, one for each token of "
                    "x_local"
                )
            if chunk_tokens is not None:
                check_int("chunk_tokens", chunk_tokens, 1)
            requires_gradient = x_local.requires_grad and torch.is_grad_enabled()
            return HiddenHeader(x_local.shape[1], x_local.shape[0], x_local.dtype, requires_gradient)

        lengths = agreed_lengths(header, tp, sharding, "batch", "dtype", "requires_gradient")
        chunks = SequenceChunks.in_rank_order(tp, lengths, "ring", x_local.device)
        x, weight = to_autocast_dtype(x_local, self.weight)
        loss: Tensor = _ChunkedCrossEntropy.apply(
            x,
            weight,
            self.bias,
            all_gather(labels, lengths, 1, tp),
            chunks,
            _VocabPart(self._vocab_start, len(weight), ignore_index),
            chunk_tokens or max(1, _CHUNK_BYTES // (4 * max(1, len(weight)))),
        )
        return loss


@no_compile
def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    num_embeddings: int,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    sharding: Sharding | None = None,
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
        sharding: the ``Sharding`` of the tokens, made with ``strategy="tp_sp"``, instead of mesh and group. Without it,
            the ranks exchange their lengths in a handshake.
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
    if sharding is not None:
        check_sharding(sharding)
        sharding.check_arguments(mesh=mesh, group=group)
        mesh, group = sharding.mesh, sharding.group
    tp = tensor_group(mesh, group)
    vocab_range = split_range(num_embeddings, size_of(tp), rank_in(tp))

    def header() -> _LogitsHeader:
        if not isinstance(logits, Tensor) or logits.dtype not in DTYPES:
            got = f"dtype {logits.dtype}" if isinstance(logits, Tensor) else type(logits).__name__
            raise TypeError(f"logits: expected a floating-point tensor [batch, tokens, {len(vocab_range)}], got {got}")
        if logits.dim() != 3 or logits.shape[2] != len(vocab_range):
            raise ValueError(
                f"logits: shape {tuple(logits.shape)}; expected [batch, tokens, {len(vocab_range)}], this rank's part "
                f"of num_embeddings={num_embeddings}; pass the logits that VocabParallelHead returns"
            )
        _check_ids("labels", labels, num_embeddings, ignore_index)
        if logits.shape[0] != labels.shape[0]:
            raise ValueError(
                f"logits: {logits.shape[0]} batch rows, but labels have {labels.shape[0]}; pass the same number in both"
            )
        return _LogitsHeader(labels.shape[1], logits.shape[1], labels.shape[0], logits.dtype)

    lengths = agreed_lengths(header, tp, sharding, "tokens_of_logits", "batch", "dtype_of_logits")
    if logits.shape[1] != sum(lengths):
        raise ValueError(
            f"logits: {logits.shape[1]} tokens, but the ranks' labels are {list(lengths)}, {sum(lengths)} together; "
            "pass VocabParallelHead's logits and this rank's labels"
        )
    all_labels = all_gather(labels, lengths, 1, tp)  # [b, t]
    loss: Tensor = _CrossEntropy.apply(
        logits, all_labels, _VocabPart(vocab_range.start, len(vocab_range), ignore_index), tp
    )
    return loss


def _vocab_shard(num_embeddings: int, tp: ProcessGroup | None) -> WeightShard:
    """The rows of a weight ``[num_embeddings, hidden]``, split over the ranks."""
    return WeightShard(tp, 0, make_spans(tp, partial(split_range, num_embeddings, size_of(tp))), num_embeddings)


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


def _check_ids(name: str, ids: Tensor, num_embeddings: int, ignore_index: int | None = None) -> None:
    """Raise unless ``ids`` are ids of the vocabulary.

    On a GPU their values are checked there, as ``nn.Embedding`` does, because reading them would make the host wait.
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


@dataclass(frozen=True)
class _VocabPart:
    """The ``size`` vocabulary entries from ``start`` on, whose logits this rank holds, and what it computes of them."""

    start: int
    size: int
    ignore_index: int

    def index(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Where the labels' logits are among this rank's, and whether they are there, ``[..., 1]`` each."""
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


class _CrossEntropy(torch.autograd.Function):
    """``log(sum(exp(logits))) - logits[label]``, with softmax statistics all-reduced over the vocabulary's shards."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, part: _VocabPart, group: ProcessGroup | None) -> Tensor:
        probs = logits.to(sum_dtype(logits), copy=True)  # [b, t, v]: the only copy in float32
        statistics = part.statistics(probs, labels)
        losses, lse = part.losses(statistics, labels, group)
        probs.mul_((statistics[0] - lse).exp_()[..., None])  # they are exp(logit - row maximum)
        ctx.save_for_backward(probs.to(logits.dtype), labels)
        ctx.part = part
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probs, labels = ctx.saved_tensors
        dlogits = probs.clone()
        ctx.part.subtract_targets(dlogits, labels)
        return dlogits.mul_(grad.masked_fill(labels == ctx.part.ignore_index, 0)[..., None]), None, None, None


class _ChunkedCrossEntropy(torch.autograd.Function):
    """``_CrossEntropy`` of ``F.linear(x, weight, bias)``, whose logits exist for some tokens at a time.

    The hidden states are received chunk by chunk behind the GEMMs, in forward and again in backward, where the partial
    gradients of x are sent home meanwhile. The statistics of all tokens are all-reduced together.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunks: SequenceChunks,
        part: _VocabPart,
        chunk_tokens: int,
    ) -> Tensor:
        make_ready(chunks.group, x.device)
        x = x.contiguous()
        batch, total = labels.shape
        statistics = x.new_empty(3 * batch, total, dtype=sum_dtype(x))  # [3 * b, t]
        for rows, piece in chain.from_iterable(chunks.receive_chunks(x)):
            found = [
                torch.stack(part.statistics(_logits(hidden, weight, bias), labels_part))
                for hidden, labels_part in _parts(chunk_tokens, piece, rows.take(labels))
            ]
            if found:
                rows.put(statistics, torch.cat(found, 1).view(3 * batch, len(rows)))
        losses, lse = part.losses(list(statistics.view(3, batch, total)), labels, chunks.group)
        ctx.save_for_backward(x, weight, bias, labels, lse)
        ctx.chunks, ctx.part, ctx.chunk_tokens = chunks, part, chunk_tokens
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, bias, labels, lse = ctx.saved_tensors
        chunks: SequenceChunks = ctx.chunks
        part: _VocabPart = ctx.part
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad = grad.masked_fill(labels == part.ignore_index, 0)  # [b, t]
        # Sums over the chunks, therefore in float32.
        dweight = torch.zeros_like(weight, dtype=sum_dtype(weight)) if need_weight else None
        dbias = torch.zeros_like(bias, dtype=sum_dtype(bias)) if need_bias else None

        def gradients(rows: Rows, piece: Tensor) -> Tensor:
            """This rank's part of the gradient of ``piece [b, n, d]``; those of the weights are added up."""
            of_rows = (rows.take(tensor) for tensor in (labels, lse, grad))
            dpiece = torch.empty_like(piece) if need_x else piece.new_empty(0)
            outs = dpiece.view(-1, piece.shape[2]).split(ctx.chunk_tokens)
            for i, (hidden, labels_part, lse_part, grad_part) in enumerate(_parts(ctx.chunk_tokens, piece, *of_rows)):
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
            if need_x:  # the gradient of the chunk that was received at this step returns to the rank it came from
                partial_dx.add(-step % chunks.size, partial(next_gradients, pieces))
            else:
                for rows, piece in pieces:
                    gradients(rows, piece)
        return (
            partial_dx.result() if need_x else None,
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(bias.dtype),
            *[None] * 4,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` in float32 (float64 for float64), a tensor that may be written to."""
    logits = F.linear(hidden, weight)
    logits = logits.to(sum_dtype(logits))
    return logits if bias is None else logits.add_(bias)


def _parts(tokens: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors ``[b, n, ...]`` in parts of some tokens, ``[tokens, ...]``; none of an empty one."""
    if tensors[0].numel():
        yield from zip(*(x.flatten(0, 1).split(tokens) for x in tensors), strict=True)
