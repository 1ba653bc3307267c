"""A small Llama-shaped language model over bytes, made of the layers of this package.

Shapes: ``b`` batch, ``s`` this rank's tokens, ``h`` hidden, ``v`` vocabulary (the 256 bytes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...kernels import BackendName
from ...layers import MegatronMLP, RotaryEmbedding
from ...layers.factory import ParallelAttention
from ...layers.sharded_weights import shard_like
from ...mask import Mask
from ...sharding import Sharding
from ...strategies import StrategyName, StrategyOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

LayerStrategy = Literal[StrategyName, "tp_sp"]

VOCABULARY = 256
IGNORE_INDEX = -100  # marks tokens without a label


@dataclass(frozen=True)
class ModelShape:
    """The sizes of the model, which are the same under every strategy.

    Attributes:
        layers: transformer layers.
        hidden: the hidden size.
        heads: query heads.
        kv_heads: KV heads.
        tied: whether the language model head shares the weight of the embedding.
        dropout: the probability of dropping an attention weight.
    """

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
    """Llama's MLP. Each token's output depends on that token alone, so it needs no communication."""

    def __init__(self, hidden: int, intermediate: int, **factory_kwargs: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, **factory_kwargs)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, **factory_kwargs)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, **factory_kwargs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class _Block(nn.Module):
    """RMSNorm and attention, RMSNorm and MLP, each pair with a residual connection around it."""

    def __init__(self, shape: ModelShape, attention: nn.Module, mlp: nn.Module, **factory_kwargs: Any) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=1e-5, **factory_kwargs)
        self.self_attn = attention
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=1e-5, **factory_kwargs)
        self.mlp = mlp

    def forward(self, x: Tensor, mask: Mask, sharding: Sharding) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask=mask, sharding=sharding)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class ByteLlama(nn.Module):
    """Next-byte prediction on a sequence sharded over ranks.

    Only attention communicates. With strategy "tp_sp" the MLP does too.

    Args:
        shape: the sizes of the model.
        strategy: the strategy, as in ``seqpar.ParallelAttention``.
        group: the ranks that a sequence is sharded over; None is this process alone.
        backend: the attention backend.
        device: the device of the weights.
        dtype: the dtype of the weights.
        strategy_options: options of the strategy, as in ``seqpar.ParallelAttention``.
    """

    def __init__(
        self,
        shape: ModelShape,
        strategy: LayerStrategy,
        *,
        group: ProcessGroup | None = None,
        backend: BackendName = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **strategy_options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__()
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}

        def attention() -> nn.Module:
            return ParallelAttention(
                strategy,
                shape.hidden,
                shape.heads,
                shape.kv_heads,
                group=group,
                rope=rope,
                dropout_p=shape.dropout,
                backend=backend,
                **factory_kwargs,
                **strategy_options,
            )

        def mlp() -> nn.Module:
            if strategy == "tp_sp":
                return MegatronMLP(shape.hidden, shape.intermediate, group=group, **factory_kwargs)
            return _SwiGLU(shape.hidden, shape.intermediate, **factory_kwargs)

        rope = RotaryEmbedding(shape.hidden // max(shape.heads, 1))
        self.embed_tokens = nn.Embedding(VOCABULARY, shape.hidden, **factory_kwargs)
        self.layers = nn.ModuleList(_Block(shape, attention(), mlp(), **factory_kwargs) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5, **factory_kwargs)
        self.lm_head = nn.Linear(shape.hidden, VOCABULARY, bias=False, **factory_kwargs)
        if shape.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def reset_parameters(self, seed: int) -> None:
        """Draw the weights from ``seed``: the same under every strategy, number of ranks and device."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() < 2:  # a norm's weight stays 1
                continue
            # As in GPT-2, projections whose output is added to the residual stream start smaller the more there are.
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 * ((2 * len(self.layers)) ** -0.5 if residual else 1.0)
            # Every rank draws the full weight. Under tp_sp it keeps only its slice.
            full = torch.empty(p.shape).normal_(0, std, generator=generator)
            with torch.no_grad():
                p.copy_(shard_like(full, p))

    def forward(self, tokens: Tensor, mask: Mask, sharding: Sharding) -> Tensor:
        """Logits of this rank's tokens.

        Args:
            tokens: int64 ``[b, s]``.
            mask: the mask of the full sequence.
            sharding: the sharding of the tokens.

        Returns:
            ``[b, s, v]``.
        """
        x = self.embed_tokens(tokens)  # [b, s, h]
        for layer in self.layers:
            x = layer(x, mask, sharding)
        logits: Tensor = self.lm_head(self.norm(x))  # [b, s, v]
        return logits


def partial_loss(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    """This rank's part of the mean cross-entropy. The sum over the ranks is the loss of the whole batch.

    Args:
        logits: ``[b, s, v]`` of this rank's tokens.
        labels: int64 ``[b, s]``.
        count: the number of labels in the whole batch that are not ``IGNORE_INDEX``.

    Returns:
        A scalar, in float32 or wider.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return total / max(count, 1)
