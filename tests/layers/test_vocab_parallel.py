"""The loss of a sharded vocabulary, computed for a few tokens at a time, compared with one device in float64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup

import seqpar
from seqpar.comm.handshake import all_gather_header
from seqpar.megatron import tensor_parallel
from seqpar.megatron.sharded_vocab import check_ids
from seqpar.placement.layout import LAYOUTS, Layout

from ..live_bytes import LiveBytes
from ..models import full
from ..pool import Pool, on_ranks
from ..reference import assert_close, assert_error

HIDDEN = 12


def tensors(vocab: int, length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """x ``[2, length, hidden]``, labels and the losses' gradients ``[2, length]``, weight and bias of the head."""
    torch.manual_seed(5)
    labels = torch.randint(vocab, (2, length))
    labels[:, 3:6] = -100
    x, weight = torch.randn(2, length, HIDDEN) * 2, torch.randn(vocab, HIDDEN)
    floats = (x, weight, torch.randn(vocab), torch.randn(2, length))
    x, weight, bias, grad = (tensor.to(dtype) for tensor in floats)
    return x, labels, grad, weight, bias


def one_device(
    vocab: int, length: int, dtype: torch.dtype = torch.float64, label_smoothing: float = 0.0
) -> list[Tensor]:
    """The losses ``[2, length]`` and the gradients of x, weight and bias, in float64."""
    x, labels, grad, weight, bias = (t.double() if t.is_floating_point() else t for t in tensors(vocab, length, dtype))
    for leaf in (x, weight, bias):
        leaf.requires_grad_()
    logits = F.linear(x, weight, bias)
    options: Any = {"reduction": "none", "label_smoothing": label_smoothing}
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options).view(2, length)
    losses.backward(grad)
    return [losses.detach(), *(leaf.grad for leaf in (x, weight, bias) if leaf.grad is not None)]


def make_head(group: ProcessGroup, vocab: int, weight: Tensor, bias: Tensor) -> seqpar.VocabParallelHead:
    head = seqpar.VocabParallelHead(HIDDEN, vocab, bias=True, group=group, dtype=weight.dtype)
    head.load_state_dict({"weight": weight, "bias": bias})
    return head


@on_ranks
def loss_in_chunks(
    group: ProcessGroup,
    vocab: int,
    length: int,
    chunk_tokens: int | None,
    dtype: torch.dtype,
    label_smoothing: float = 0.0,
) -> list[Tensor]:
    """The losses of all tokens, and the gradients of this rank's tokens and of the full weights.

    Also the losses of logits, and their gradient.
    """
    x, labels, grad, weight, bias = tensors(vocab, length, dtype)
    head = make_head(group, vocab, weight, bias)
    x_local = seqpar.shard(x, group=group, layout="contiguous").requires_grad_()
    labels = seqpar.shard(labels, group=group, layout="contiguous")
    options: Any = {"label_smoothing": label_smoothing}
    of_logits = seqpar.vocab_parallel_cross_entropy(head(x_local), labels, vocab, group=group, **options)
    (dx_of_logits,) = torch.autograd.grad(of_logits, x_local, grad.to(of_logits.dtype))
    losses = head(x_local, labels, chunk_tokens=chunk_tokens, **options)
    losses.backward(grad.to(losses.dtype))
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    assert x_local.grad is not None and head.weight.grad is not None and head.bias.grad is not None
    of_logits, dx_of_logits = of_logits.detach(), dx_of_logits / group.size()
    weights = full(head.weight.grad), full(head.bias.grad)
    return [losses.detach(), x_local.grad / group.size(), *weights, of_logits, dx_of_logits]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("vocab", "length", "chunk_tokens", "label_smoothing"),
    [(37, 23, 3, 0.0), (37, 23, None, 0.1), (16, 8, 1, 1.0), (3, 16, 7, 0.3), (37, 3, 2, 0.0)],
)
def test_loss_in_chunks_equals_one_device(
    pool: Pool, world: int, vocab: int, length: int, chunk_tokens: int | None, label_smoothing: float
) -> None:
    """Uneven vocabularies, ranks without entries or without tokens, chunks that do not divide."""
    losses, dx, dweight, dbias = one_device(vocab, length, torch.float64, label_smoothing)
    by_rank = pool.run(world, loss_in_chunks, vocab, length, chunk_tokens, torch.float64, label_smoothing)
    for i in (1, 5):
        assert_close(torch.cat([found[i] for found in by_rank], 1), dx, torch.float64, "gradient of x")
    for found in by_rank:
        for i, expected in ((0, losses), (2, dweight), (3, dbias), (4, losses)):
            assert_close(found[i], expected, torch.float64, f"result {i}")


@pytest.mark.parametrize("world", [1, 4])
def test_loss_in_chunks_in_half_precision(pool: Pool, world: int) -> None:
    """The loss is float32 from the logits on, and each gradient is rounded once."""
    losses, dx, dweight, dbias = one_device(37, 24, torch.bfloat16, 0.1)
    by_rank = pool.run(world, loss_in_chunks, 37, 24, 5, torch.bfloat16, 0.1)
    # The logits come out of the GEMM in bfloat16.
    assert_close(by_rank[0][0], losses, torch.bfloat16)
    gradients = torch.cat([found[1] for found in by_rank], 1), *by_rank[0][2:4]
    for gradient, expected in zip(gradients, (dx, dweight, dbias), strict=True):
        assert_error(float((gradient.double() - expected).norm() / expected.norm()), 0.0, dtype=torch.bfloat16)


@on_ranks
def without_rows(group: ProcessGroup) -> None:
    """A batch of no rows has losses of no rows, and gradients of zeros. Labels that are not int64 are refused."""
    head = seqpar.VocabParallelHead(HIDDEN, 37, group=group)
    embedding = seqpar.VocabParallelEmbedding(37, HIDDEN, group=group)
    labels = torch.zeros(0, 5, dtype=torch.int64)
    for sharding in (None, seqpar.Sharding(5 * group.size(), "contiguous", group=group, strategy="tp_sp")):
        where = {"group": group} if sharding is None else {}
        x = embedding(labels, sharding)
        losses = head(x, labels, sharding, label_smoothing=0.1)
        of_logits = seqpar.vocab_parallel_cross_entropy(head(x, None, sharding), labels, 37, sharding=sharding, **where)
        assert losses.shape == of_logits.shape == (0, 5 * group.size())
        (losses.sum() + of_logits.sum()).backward()
    assert head.weight.grad is not None and not full(head.weight.grad).any()
    x, one = torch.zeros(1, 5, HIDDEN), torch.zeros(1, 5)
    for dtype in (torch.int32, torch.uint8, torch.uint16, torch.float32, torch.bool):
        with pytest.raises(TypeError, match=f"labels: expected an int64 tensor .*, got {dtype}"):
            head(x, one.to(dtype))
        with pytest.raises(TypeError, match=f"labels: expected an int64 tensor .*, got {dtype}"):
            seqpar.vocab_parallel_cross_entropy(head(x), one.to(dtype), 37, group=group)


@pytest.mark.parametrize("world", [1, 2])
def test_no_rows_and_other_dtypes(pool: Pool, world: int) -> None:
    pool.run(world, without_rows)


@on_ranks
def peak_of_the_loss(group: ProcessGroup, vocab: int, length: int, chunk_tokens: int | None) -> tuple[int, int]:
    """Peak bytes of forward and backward, with logits of all tokens (``chunk_tokens=None``) or of some."""
    torch.manual_seed(0)
    head = seqpar.VocabParallelHead(HIDDEN, vocab, group=group, dtype=torch.bfloat16)
    x = torch.randn(1, length, HIDDEN).bfloat16().requires_grad_()
    labels = torch.randint(vocab, (1, length))
    with LiveBytes() as forward:
        if chunk_tokens is None:
            losses = seqpar.vocab_parallel_cross_entropy(head(x), labels, vocab, group=group)
        else:
            losses = head(x, labels, chunk_tokens=chunk_tokens)
    with LiveBytes() as backward:
        losses.sum().backward()
    return forward.peak, backward.peak


@pytest.mark.parametrize("world", [1, 2])
def test_loss_in_chunks_holds_the_logits_of_some_tokens(pool: Pool, world: int) -> None:
    vocab, length, chunk = 1024, 256, 16
    chunk_bytes = 4 * chunk * vocab // world  # of the float32 logits of a chunk, on a rank
    weights = 4 * HIDDEN * vocab  # gradients of the weights, in float32 and rounded
    tokens = 40 * length * world * HIDDEN  # what is as large as the hidden states
    for peak in pool.run(world, peak_of_the_loss, vocab, length // world, chunk):
        assert peak[0] < 3 * chunk_bytes + tokens, f"{peak[0]} bytes in forward"
        assert peak[1] < 3 * chunk_bytes + 2 * weights + tokens, f"{peak[1]} bytes in backward"


@pytest.mark.parametrize("world", [1, 2])
def test_loss_of_logits_makes_one_copy_in_float32(pool: Pool, world: int) -> None:
    vocab, length = 1024, 256
    logits = 2 * length * vocab // world  # bytes in bfloat16
    for forward, backward in pool.run(world, peak_of_the_loss, vocab, length // world, None):
        assert forward < 4.2 * logits  # the logits, their copy in float32, and the softmax that is kept
        assert backward < 1.5 * logits  # the gradient of the logits


def test_ids_on_a_gpu_are_checked_there() -> None:
    """A fake tensor raises where its value is read."""
    with FakeTensorMode():
        check_ids("labels", torch.empty(2, 4, dtype=torch.int64, device="cuda"), 10, ignore_index=-100)


@on_ranks
def with_and_without_a_sharding(group: ProcessGroup, layout: Layout) -> int:
    """Run the layers with a Sharding and without; return the handshakes that the former took."""
    torch.manual_seed(6)
    sharding = seqpar.Sharding(29, layout, group=group, strategy="tp_sp")
    ids, labels = (sharding.shard(x) for x in torch.randint(37, (2, 2, 29)).unbind())
    embedding = seqpar.VocabParallelEmbedding(37, HIDDEN, group=group)
    mlp = seqpar.MegatronMLP(HIDDEN, 30, group=group)
    head = seqpar.VocabParallelHead(HIDDEN, 37, group=group)

    def losses(sharding: seqpar.Sharding | None) -> list[Tensor]:
        where = {"group": group} if sharding is None else {}
        x = mlp(embedding(ids, sharding), sharding)
        of_logits = seqpar.vocab_parallel_cross_entropy(head(x, None, sharding), labels, 37, sharding=sharding, **where)
        of_chunks = head(x, labels, sharding, chunk_tokens=4)
        (of_logits + of_chunks).sum().backward()
        return [of_logits, of_chunks]

    expected = losses(None)
    spy = mock.Mock(wraps=all_gather_header)
    with mock.patch.object(tensor_parallel, "all_gather_header", spy):
        for found, want in zip(losses(sharding), expected, strict=True):
            assert_close(found, want)
    with pytest.raises(ValueError, match="length"):
        embedding(ids[:, 1:], sharding)
    return int(spy.call_count)


@pytest.mark.parametrize(("world", "layout"), [*zip([1, 2, 4], LAYOUTS, strict=True)])
def test_a_sharding_takes_no_handshake(pool: Pool, world: int, layout: str) -> None:
    assert pool.run(world, with_and_without_a_sharding, layout) == [0] * world
