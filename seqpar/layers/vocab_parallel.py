"""The vocabulary sharded over a tensor-parallel group: embedding, output head, and the loss without gathering logits.

Shoeybi et al., "Megatron-LM", 2019, section 3, with the activations outside sharded by tokens.
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
from ..comm.collectives import all_gather
from ..comm.handshake import all_gather_header, check_same, propagate_errors
from ..comm.trace import count_sent
from ..layout import part
from ..mesh import rank_in, size_of, tensor_group
from ..strategies.tensor_sequence import OVERLAPS, SequenceChunks
from .attention import ParallelContext
from .sharded_weights import WeightShard, make_spans, shard_weights
from .tensor_parallel import column_linear, rows_in_order, shard_linear, tokens_in_rank_order


class VocabParallelEmbedding(nn.Module):
    """Token ids ``[batch, seq]`` of this rank's tokens to embeddings ``[batch, seq, hidden]`` of the same tokens.

    Each rank holds the embeddings of a part of the vocabulary, which need not divide. The ids are gathered over the
    group (8 bytes a token), each rank looks up those it holds, and the sum is reduce-scattered.

    Args:
        num_embeddings: size of the whole vocabulary.
        embedding_dim: hidden width.
        mesh, group: the ranks the vocabulary and the tokens are sharded over.
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
        shard = WeightShard(tp, 0, make_spans(tp, partial(part, num_embeddings, size_of(tp))), num_embeddings)
        whole = nn.Embedding(num_embeddings, embedding_dim, device=device, dtype=dtype).weight.detach()
        self.weight = nn.Parameter(shard.take(whole).clone())
        self._start, self._stop = shard.span
        shard_weights(self, {"weight": shard})

    @no_compile
    def forward(self, ids: Tensor) -> Tensor:
        """``ids`` int64 ``[batch, seq]``. Raises ValueError for ids outside the vocabulary."""
        tp = self._parallel_context.tensor
        lengths = [header.length for header in _check_ids("ids", ids, self.num_embeddings, tp)]
        everyone = all_gather(ids, lengths, 1, tp)
        local = everyone - self._start
        mine = (local >= 0) & (local < self._stop - self._start)
        if self._stop == self._start:  # more ranks than vocabulary
            partial_sum = everyone.new_zeros(*everyone.shape, self.embedding_dim, dtype=self.weight.dtype)
            partial_sum = partial_sum + self.weight.sum()
        else:
            partial_sum = F.embedding(local.masked_fill(~mine, 0), self.weight) * mine.unsqueeze(-1)
        if tp is None or tp.size() == 1:
            return partial_sum
        out: Tensor = _ScatterSum.apply(partial_sum, SequenceChunks(tp, rows_in_order(lengths), True, "none"))
        return out


class VocabParallelHead(nn.Linear):
    """Hidden states of this rank's tokens to logits of the group's tokens over this rank's part of the vocabulary.

    ``[batch, seq, hidden]`` to ``[batch, tokens, vocab_local]``, the tokens in the order of the ranks:
    ``vocab_parallel_cross_entropy`` takes them as they are.
    """

    def __init__(
        self,
        hidden_size: int,
        num_embeddings: int,
        *,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        bias: bool = False,
        overlap: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_int("hidden_size", hidden_size, 1)
        check_int("num_embeddings", num_embeddings, 1)
        check_choice("overlap", overlap, OVERLAPS)
        super().__init__(hidden_size, num_embeddings, bias=bias, device=device, dtype=dtype)
        self.overlap = overlap
        self._parallel_context = ParallelContext(mesh, group)
        tp = self._parallel_context.tensor
        spans = make_spans(tp, partial(part, num_embeddings, size_of(tp)))
        shard = WeightShard(tp, 0, spans, num_embeddings)
        shard_linear(self, {"weight": shard, "bias": shard})

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
    """Cross-entropy of logits that are sharded over the vocabulary; three numbers a token travel, not the logits.

    Args:
        logits: ``[batch, tokens, vocab_local]``, as of ``VocabParallelHead``: all of the group's tokens.
        labels: int64 ``[batch, seq]``, of *this rank's* tokens, already shifted; they are gathered here.
        num_embeddings: size of the whole vocabulary.
        ignore_index: the label of tokens without loss.

    Returns:
        The loss of each of the group's tokens, ``[batch, tokens]``, float32 (float64), the same on every rank of the
        group; 0 where the label is ``ignore_index``. Every rank of the group must use the same scalar of it.
    """
    tp = tensor_group(mesh, group)
    held = part(num_embeddings, size_of(tp), rank_in(tp))
    with propagate_errors(tp):
        if not isinstance(logits, Tensor) or logits.dtype not in DTYPES:
            what = f"{logits.dtype}" if isinstance(logits, Tensor) else type(logits).__name__
            raise TypeError(f"logits={what}: a floating-point tensor [batch, tokens, {len(held)}] is needed")
        if logits.dim() != 3 or logits.shape[2] != len(held):
            raise ValueError(
                f"logits: shape {tuple(logits.shape)}; [batch, tokens, {len(held)}] is needed, this rank's part of "
                f"{num_embeddings}: pass what VocabParallelHead gives"
            )
    headers = _check_ids("labels", labels, num_embeddings, tp, ignore_index, logits)
    lengths, tokens = [header.length for header in headers], [header.tokens for header in headers]
    if any(n != sum(lengths) for n in tokens):
        raise ValueError(
            f"logits: of {tokens} tokens, by rank, but the group's labels are {sum(lengths)} together ({lengths}); "
            "pass VocabParallelHead's logits and this rank's labels"
        )
    everyone = all_gather(labels, lengths, 1, tp)
    loss: Tensor = _CrossEntropy.apply(logits, everyone, held.start, tp, ignore_index)
    return loss


class _IdsHeader(NamedTuple):
    """A rank's ids or labels, and the logits that belong to them."""

    length: int
    tokens: int
    batch: int
    dtype_of_logits: torch.dtype


def _check_ids(
    name: str,
    ids: Tensor,
    vocabulary: int,
    group: ProcessGroup | None,
    ignored: int | None = None,
    logits: Tensor | None = None,
) -> list[_IdsHeader]:
    """By rank, its number of ids and of tokens it has logits of, after checking every rank's input."""

    def header() -> _IdsHeader:
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype != torch.int64:
            what = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(f"{name}={what}: an int64 tensor [batch, seq] is needed")
        outside = (ids < 0) | (ids >= vocabulary)
        if ignored is not None:
            outside &= ids != ignored
        if bool(outside.any()):
            raise ValueError(f"{name}: {int(ids[outside][0])} lies outside the vocabulary of {vocabulary}")
        if logits is None:
            return _IdsHeader(ids.shape[1], 0, ids.shape[0], torch.float32)
        if logits.shape[0] != ids.shape[0]:
            raise ValueError(f"logits: {logits.shape[0]} batch rows, but {name} has {ids.shape[0]}")
        return _IdsHeader(ids.shape[1], logits.shape[1], ids.shape[0], logits.dtype)

    headers = all_gather_header(header, group)
    check_same(headers, "batch", "dtype_of_logits")
    return headers


class _ScatterSum(torch.autograd.Function):
    """The sum over the ranks, of which each keeps its tokens; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: SequenceChunks) -> Tensor:
        ctx.chunks = chunks
        return chunks.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.chunks.all_gather(grad), None


def _reduce(x: Tensor, op: dist.ReduceOp.RedOpType, group: ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
        count_sent(2 * x.numel() * x.element_size() * (group.size() - 1) // group.size(), 2 * (group.size() - 1))
    return x


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, start: int, group: ProcessGroup | None, ignored: int
    ) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        width = wide.shape[-1]
        top = wide.amax(-1) if width else wide.new_full(labels.shape, -torch.inf)
        top = _reduce(top, dist.ReduceOp.MAX, group)
        p = torch.exp(wide - top[..., None])
        local = labels - start
        mine = (local >= 0) & (local < width) & (labels != ignored)
        index = local.masked_fill(~mine, 0)[..., None]
        target = wide.gather(-1, index)[..., 0] * mine if width else torch.zeros_like(top)
        sums = _reduce(torch.stack([p.sum(-1), target]), dist.ReduceOp.SUM, group)
        p /= sums[0][..., None]
        counted = labels != ignored
        ctx.save_for_backward(p.to(logits.dtype), index, mine, counted)
        return (sums[0].log() + top - sums[1]) * counted

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        p, index, mine, counted = ctx.saved_tensors
        dlogits = p.clone()
        if p.shape[-1]:
            dlogits.scatter_add_(-1, index, -mine[..., None].to(p.dtype))
        return (dlogits * (grad * counted)[..., None]).to(p.dtype), None, None, None, None
