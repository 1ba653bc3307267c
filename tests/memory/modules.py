"""Small modules with an MLP, a mixture of experts and a transformer layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar


class MLP(nn.Module):
    """SwiGLU, without or with LoRA weights of rank 2 beside frozen ones."""

    def __init__(
        self, hidden: int = 16, width: int = 48, lora: bool = False, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, width, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(width, hidden, dtype=dtype)
        self.lora = nn.ModuleList(nn.Linear(*sizes, bias=False, dtype=dtype) for sizes in ((hidden, 2), (2, width)))
        self.has_lora = lora
        for p in (*self.gate.parameters(), *self.up.parameters(), *self.down.parameters()):
            p.requires_grad = not lora
        for p in self.lora.parameters():
            p.requires_grad = lora

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.has_lora:
            up = up + self.lora[1](self.lora[0](x))
        y: Tensor = self.down(F.silu(self.gate(x)) * up)
        return y


class Experts(nn.Module):
    """A mixture of experts, each token to two of them. Returns the router's logits ``[tokens, experts]`` too.

    The last expert is chosen by no token.
    """

    def __init__(self, hidden: int = 16, experts: int = 5, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, dtype=dtype)
        with torch.no_grad():
            self.router.bias[-1] = -1e4
        self.experts = nn.ModuleList(MLP(hidden, 8, dtype=dtype) for _ in range(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.flatten(0, -2)
        logits = self.router(rows)
        weights, chosen = logits.softmax(-1).topk(2)
        y = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            if len(tokens):
                y = y.index_add(0, tokens, expert(rows[tokens]) * weights[tokens, place, None])
        return y.view_as(x), logits


class Layer(nn.Module):
    """A transformer layer with attention of seqpar over one device's tokens."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, bias=False, dtype=dtype) for _ in range(2))
        self.self_attn = Attention(hidden, heads, kv_heads, dtype)
        self.mlp = MLP(hidden, width, dtype=dtype)
        del self.mlp.lora

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(hidden, n * self.head_dim, dtype=dtype) for n in (heads, kv_heads, kv_heads)
        )
        self.o_proj = nn.Linear(hidden, hidden, dtype=dtype)

    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q_proj, self.k_proj, self.v_proj

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in self.projections())
        y: Tensor = self.o_proj(seqpar.attention(q, k, v, strategy="local").flatten(2))
        return y


class Model(nn.Module):
    def __init__(self, layers: int = 3, **sizes: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(**sizes) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(module: nn.Module, x: Tensor, call: Callable[..., Any] | None = None) -> list[Tensor]:
    """The output of ``call``, by default of ``module``, and the gradients of the input and the trained weights."""
    for p in module.parameters():
        p.grad = None
    x = x.detach().requires_grad_()
    result = (module if call is None else call)(x)
    outputs = result if isinstance(result, tuple) else (result,)
    sum(y.sin().sum() for y in outputs).backward()
    trained = [p for p in module.parameters() if p.requires_grad and p.grad is not None]
    assert x.grad is not None
    return [*(y.detach() for y in outputs), x.grad, *(p.grad for p in trained)]
