"""A small Llama-shaped language model over bytes, on the package's own layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from ..layers import MegatronMLP, RotaryEmbedding
from ..layers.factory import ParallelAttention
from ..layers.sharded_weights import weight_shards
from ..mask import Mask

VOCABULARY = 256
IGNORED = -100


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model; the same under every strategy."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    tied: bool = True
    dropout: float = 0.0

    @property
    def intermediate(self) -> int:
        """Width of the SwiGLU: 8/3 of the hidden size, rounded up to a multiple of 32."""
        return -(-8 * self.hidden // (3 * 32)) * 32


class _SwiGLU(nn.Module):
    """Llama's MLP. It works on each token by itself: sharding the sequence changes nothing."""

    def __init__(self, hidden: int, intermediate: int, **kind: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, **kind)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, **kind)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, **kind)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class _Block(nn.Module):
    """RMSNorm, attention, RMSNorm, MLP, each pair with its residual."""

    def __init__(self, shape: ModelShape, attention: nn.Module, mlp: nn.Module, **kind: Any) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=1e-5, **kind)
        self.self_attn = attention
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=1e-5, **kind)
        self.mlp = mlp

    def forward(self, x: Tensor, mask: Mask, seq_len: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask=mask, seq_len=seq_len)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class ByteLlama(nn.Module):
    """Next-byte prediction on a sequence sharded over ranks. Only attention, and the MLP of "tp_sp", know of it."""

    def __init__(
        self,
        shape: ModelShape,
        strategy: str,
        *,
        group: ProcessGroup | None = None,
        layout: str = "contiguous",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **strategy_options: Any,
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = {"device": device, "dtype": dtype}

        def attention() -> nn.Module:
            return cast(Any, ParallelAttention)(
                strategy,
                shape.hidden,
                shape.heads,
                shape.kv_heads,
                group=group,
                layout=layout,
                rope=rope,
                dropout_p=shape.dropout,
                backend=backend,
                **kind,
                **strategy_options,
            )

        def mlp() -> nn.Module:
            if strategy == "tp_sp":
                return MegatronMLP(shape.hidden, shape.intermediate, group=group, **kind)
            return _SwiGLU(shape.hidden, shape.intermediate, **kind)

        rope = RotaryEmbedding(shape.hidden // max(shape.heads, 1))
        self.embed_tokens = nn.Embedding(VOCABULARY, shape.hidden, **kind)
        self.layers = nn.ModuleList(_Block(shape, attention(), mlp(), **kind) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5, **kind)
        self.lm_head = nn.Linear(shape.hidden, VOCABULARY, bias=False, **kind)
        if shape.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def initialise(self, seed: int) -> None:
        """The same weights on every rank and device, by ``seed``."""
        generator = torch.Generator().manual_seed(seed)
        shards = weight_shards(self)
        for name, p in self.named_parameters():
            if p.dim() < 2:
                continue
            # Projections back into the residual stream start smaller by its depth (GPT-2).
            deep = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 * ((2 * len(self.layers)) ** -0.5 if deep else 1.0)
            shard = shards.get(p)
            whole = p.shape if shard is None else shard.full_shape(p)
            weight = torch.empty(whole).normal_(0, std, generator=generator)
            with torch.no_grad():
                p.copy_(weight if shard is None else shard.to_local(weight))

    def forward(self, tokens: Tensor, mask: Mask, seq_len: int) -> Tensor:
        """Logits ``[batch, seq, 256]`` of this rank's ``tokens`` int64 ``[batch, seq]``; ``seq_len`` is global."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, mask, seq_len)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def loss_share(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    """This rank's share of the mean loss over the ``count`` labels of the whole batch; the shares add up to it."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    ) / max(count, 1)
