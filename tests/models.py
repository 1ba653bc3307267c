"""A small transformer for every strategy, and the same transformer on one device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar import Mask
from seqpar.megatron.sharded_weights import shard_like

HIDDEN, HEAD_DIM, INTERMEDIATE, VOCAB = 24, 4, 30, 37
# Documents and a window, for any length up to 95 tokens. The tokens from 60 on are padding: they see no tokens.
MASK = Mask.chunked(64, starts=[5, 31]) & Mask.padding(0, 60) & Mask.sliding_window(20)


def attention_layer(heads: tuple[int, int], strategy: str = "local", **options: Any) -> seqpar.AttentionLayer:
    """A float64 layer with every kind of parameter. Layers with equal ``heads`` have equal weights.

    Args:
        heads: the numbers of query heads and KV heads.
        strategy: a strategy of ``seqpar.ParallelAttention``.
        options: further arguments of ``seqpar.ParallelAttention``.
    """
    torch.manual_seed(11)
    options = {"rope": seqpar.RotaryEmbedding(HEAD_DIM), **options}
    return seqpar.ParallelAttention(
        strategy, HIDDEN, *heads, HEAD_DIM, bias=True, qk_norm=True, sinks=True, dtype=torch.float64, **options
    )


def full(x: Tensor) -> Tensor:
    """A DTensor as a plain tensor; all ranks of its mesh call this together. Any other tensor itself."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def randomize(module: nn.Module) -> None:
    """Set all parameters to random values, including those that are initialized to 0 or 1. With equal seeds the full
    weights are equal under every strategy."""
    for p in module.parameters():
        with torch.no_grad():
            p.copy_(shard_like(torch.randn(p.shape, dtype=p.dtype) * 0.3, p))


class MLP(nn.Module):
    """``seqpar.MegatronMLP`` on one device."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        factory_kwargs: dict[str, Any] = {"dtype": torch.float64}
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, **factory_kwargs) if activation == "swiglu" else None
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, **factory_kwargs)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, **factory_kwargs)

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = self.up_proj(x)
        hidden = F.gelu(up) if self.gate_proj is None else F.silu(self.gate_proj(x)) * up
        y: Tensor = self.down_proj(hidden)
        return y


class Transformer(nn.Module):
    """An embedding, one block, a vocabulary head and the sum of the tokens' losses, in float64.

    With "tp_sp" every layer is tensor-parallel. With any other strategy only the attention layer is parallel. The names
    and full shapes of the parameters are the same for every strategy.

    Args:
        strategy: a strategy of ``seqpar.ParallelAttention``.
        activation: "swiglu" or "gelu".
        overlap: the argument ``overlap`` of the tensor-parallel layers.
        options: further arguments of the attention layer.
        where: ``group`` or ``mesh``; nothing for "local".
    """

    def __init__(
        self,
        strategy: str = "local",
        activation: str = "swiglu",
        overlap: str = "ring",
        options: dict[str, Any] | None = None,
        **where: Any,
    ) -> None:
        super().__init__()
        factory_kwargs: dict[str, Any] = {"dtype": torch.float64}
        options = dict(options or {})
        self.tensor_parallel = strategy == "tp_sp"
        self.where = where
        if self.tensor_parallel:
            self.embed: nn.Module = seqpar.VocabParallelEmbedding(VOCAB, HIDDEN, **where, **factory_kwargs)
            self.mlp: nn.Module = seqpar.MegatronMLP(
                HIDDEN, INTERMEDIATE, activation, bias=True, overlap=overlap, **where, **factory_kwargs
            )
            self.head: nn.Module = seqpar.VocabParallelHead(HIDDEN, VOCAB, overlap=overlap, **where, **factory_kwargs)
            options["overlap"] = overlap
        else:
            self.embed = nn.Embedding(VOCAB, HIDDEN, **factory_kwargs)
            self.mlp = MLP(activation)
            self.head = nn.Linear(HIDDEN, VOCAB, bias=False, **factory_kwargs)
        self.norm1 = nn.RMSNorm(HIDDEN, eps=1e-6, **factory_kwargs)
        self.norm2 = nn.LayerNorm(HIDDEN, **factory_kwargs)
        self.attention = attention_layer((6, 2), strategy, layout="contiguous", **options, **where)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The sum of the losses of this rank's tokens. ``ids`` and ``labels`` are int64 ``[batch, seq]``."""
        x = self.embed(ids)  # [b, s, hidden]
        x = x + self.attention(self.norm1(x), mask=MASK)
        x = x + self.mlp(self.norm2(x))
        logits = self.head(x)  # [b, s, vocab]; with tp_sp all tokens and this rank's part of the vocabulary
        if self.tensor_parallel:
            return seqpar.vocab_parallel_cross_entropy(logits, labels, VOCAB, **self.where).sum()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def random_tokens(seq_len: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Random ids and labels, each int64 ``[batch, seq_len]``. Some labels are -100."""
    ids, labels = torch.randint(VOCAB, (2, batch, seq_len)).unbind()
    labels[:, 7:9] = -100
    return ids, labels


def sum_gradients(wrapper: DistributedDataParallel, group: ProcessGroup) -> None:
    """Make DDP sum the gradients instead of averaging them."""

    def hook(group: ProcessGroup, bucket: Any) -> Any:
        work: Any = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    # DDP compares the annotations themselves, not their names.
    hook.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]})
    wrapper.register_comm_hook(group, hook)
