"""Checks of arguments, shared by the whole package.

Every error message names the argument, its value, and what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from math import isfinite

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor

# Decorates functions that torch.compile must not trace, such as those that communicate. It is torch.compiler.disable,
# except that it keeps signatures and imports the compiler (half a second) at the first call only.
no_compile = _disable_dynamo

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """``value`` is one of the names."""
    names = list(choices)
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}: a name is needed, one of {', '.join(names)}")
    if value not in names:
        near = get_close_matches(value, names, n=1, cutoff=0.0)
        raise ValueError(f"{name}={value!r}: did you mean {near[0]!r}? Choose one of {', '.join(names)}")


def check_int(name: str, value: object, least: int) -> None:
    """``value`` is an int and at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: an int is needed, not {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}={value}: at least {least} is needed")


def has_length(seq_len: object) -> bool:
    """Whether the whole length is known. With a wrong one the ranks ask each other, so that all learn of it."""
    return isinstance(seq_len, int) and seq_len >= 0


def check_alike(name: str, by_rank: Sequence[object]) -> None:
    """Every rank brings the same; all of them see it and raise."""
    if len(set(by_rank)) > 1:
        shown = ", ".join(map(str, by_rank))
        raise ValueError(f"{name}: the ranks of the group differ: [{shown}]; pass the same on every rank")


def check_options(strategy: str, options: Iterable[str], allowed: Iterable[str]) -> None:
    """A strategy's options are ones it has."""
    names = list(allowed)
    for option in options:
        if option in names:
            continue
        near = get_close_matches(option, names, n=1, cutoff=0.0)
        hint = f"did you mean {near[0]!r}? It takes {', '.join(names)}" if names else "it takes none"
        raise TypeError(f"{option}: not an option of strategy {strategy!r}; {hint}")


def check_number(name: str, value: object) -> float:
    """``value`` as a finite float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: a number is needed, not {type(value).__name__}")
    if not isfinite(value):
        raise ValueError(f"{name}={value}: a finite number is needed")
    return float(value)


def check_dropout(value: object) -> float:
    p = check_number("dropout_p", value)
    if not 0 <= p < 1:
        raise ValueError(f"dropout_p={p}: a probability in [0, 1) is needed; 0 turns dropout off")
    return p


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Shapes, dtypes and devices of one rank's ``q, k, v``."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}={type(x).__name__}: a tensor [batch, seq, heads, head_dim] is needed")
        if x.dim() != 4:
            raise ValueError(
                f"{name}: shape {tuple(x.shape)} has {x.dim()} dimensions; [batch, seq, heads, head_dim] is needed"
            )
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: dtype {x.dtype}; convert to float32, bfloat16, float16 or float64")
        if x.device.type == "meta":
            raise ValueError(f"{name}: device meta holds no data; move the tensors to cpu or cuda")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: dtype {x.dtype} differs from q's {q.dtype}; convert them to the same")
        if x.device != q.device:
            raise ValueError(f"{name}: device {x.device} differs from q's {q.device}; move them to the same")
    if v.shape != k.shape:
        raise ValueError(f"v: shape {tuple(v.shape)} differs from k's {tuple(k.shape)}; they must be equal")
    for axis, name in ((0, "batch"), (1, "length"), (3, "head_dim")):
        if q.shape[axis] != k.shape[axis]:
            raise ValueError(
                f"{name}: q {tuple(q.shape)} has {q.shape[axis]} and k {tuple(k.shape)} has {k.shape[axis]}; "
                f"q, k and v need the same {name} (self-attention over one sequence, [batch, seq, heads, head_dim])"
            )
    heads, kv_heads, head_dim = q.shape[2], k.shape[2], q.shape[3]
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"heads={heads}, kv_heads={kv_heads}: the heads of q must be a multiple of those of k and v "
            "(grouped-query attention)"
        )
    if head_dim < 1:
        raise ValueError(f"head_dim={head_dim}: at least 1 is needed")


def check_hidden(x: Tensor, hidden_size: int, linear: nn.Module) -> None:
    """One rank's hidden states ``[batch, seq, hidden]``, which ``linear`` is to project."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x_local={type(x).__name__}: a tensor [batch, seq, {hidden_size}] is needed")
    if x.dim() != 3 or x.shape[2] != hidden_size:
        raise ValueError(f"x_local: shape {tuple(x.shape)}; [batch, seq, hidden_size={hidden_size}] is needed")
    if x.dtype not in DTYPES:
        raise TypeError(f"x_local: dtype {x.dtype}; convert to float32, bfloat16, float16 or float64")
    plain = isinstance(linear, nn.Linear) and not isinstance(linear.weight, DTensor) and linear.weight.dtype in DTYPES
    if not plain or torch.is_autocast_enabled(x.device.type):
        return  # autocast, and what stands in for it (FSDP, LoRA, quantised weights), may convert its input
    if x.dtype != linear.weight.dtype:
        raise TypeError(f"x_local: dtype {x.dtype}, but the weights have {linear.weight.dtype}; convert one of them")
    if x.device != linear.weight.device:
        raise ValueError(f"x_local: device {x.device}, but the weights are on {linear.weight.device}; move one of them")


def check_head_vector(name: str, x: Tensor | None, q: Tensor, batched: bool) -> None:
    """``sinks [heads]`` or ``alibi_slopes [heads] | [batch, heads]``."""
    if x is None:
        return
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name}={type(x).__name__}: a floating-point tensor [heads] is needed")
    shapes = [(q.shape[2],), (q.shape[0], q.shape[2])][: 1 + batched]
    if tuple(x.shape) not in shapes:
        raise ValueError(f"{name}: shape {tuple(x.shape)}; {' or '.join(map(str, shapes))} is needed")
    if x.device != q.device:
        raise ValueError(f"{name}: device {x.device} differs from q's {q.device}; move it there")
