"""Checks of arguments, shared by the whole package.

Every error message names the argument, its value, what is expected, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from math import isfinite

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from .sharded import is_dtensor

# Decorates functions that torch.compile must not trace, such as those that communicate. Unlike torch.compiler.disable,
# it keeps signatures, and it imports the compiler (which takes half a second) only at the first call.
no_compile = _disable_dynamo

# No model has more heads. Tensors [batch, heads, seq, head_dim] have as many "heads" as tokens.
_MOST_HEADS = 1024
TRANSPOSE = "if q, k and v are [batch, heads, seq, head_dim], transpose them to [batch, seq, heads, head_dim]"

# Sizes and positions are smaller than 2**61, so that sums of a few do not overflow int64.
_SIZE_BITS = 61

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    names = list(choices)
    if not isinstance(value, str):
        raise TypeError(
            f"{name}={value!r}: expected a str, got {type(value).__name__}; choose one of {', '.join(names)}"
        )
    if value not in names:
        nearest = get_close_matches(value, names, n=1, cutoff=0.0)
        raise ValueError(f"{name}={value!r}: did you mean {nearest[0]!r}? Choose one of {', '.join(names)}")


def check_int(name: str, value: object, least: int | None = None, bits: int = _SIZE_BITS) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        todo = "; convert it with int()" if hasattr(value, "__index__") and not isinstance(value, bool) else ""
        raise TypeError(f"{name}={value!r}: expected an int, got {type(value).__name__}{todo}")
    if least is not None and value < least:
        raise ValueError(f"{name}={value}: expected at least {least}")
    if value >= 2**bits:
        raise ValueError(f"{name}={value}: expected less than 2**{bits}")
    if value <= -(2**bits):
        raise ValueError(f"{name}={value}: expected more than -2**{bits}")


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected True or False, got {type(value).__name__}")


def check_module(name: str, value: object) -> None:
    if not isinstance(value, nn.Module):
        raise TypeError(
            f"{name}: expected an nn.Module, got {type(value).__name__}; pass the model, not its parameters: how its "
            "weights are sharded is looked up in it"
        )


def check_dtype(dtype: object) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"dtype={dtype!r}: expected one of {', '.join(map(str, DTYPES))}, or None")


def has_length(seq_len: object) -> bool:
    """Whether the global length is known without a handshake, which reports a bad value to every rank."""
    return isinstance(seq_len, int) and seq_len >= 0


def check_alike(name: str, by_rank: Sequence[object]) -> None:
    """Raise unless all ranks hold the same value. Every rank passes the same ``by_rank``, so all of them raise."""
    if len(set(by_rank)) > 1:
        shown = ", ".join(map(str, by_rank))
        raise ValueError(f"{name}: the ranks of the group differ: [{shown}]; pass the same on every rank")


def check_number(name: str, value: object) -> float:
    """``value`` as a float. Raises unless it is a finite int or float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: expected a number, got {type(value).__name__}")
    if not isfinite(value):
        raise ValueError(f"{name}={value}: expected a finite number")
    return float(value)


def check_slopes(value: object, heads: int | None = None) -> tuple[float, ...] | None:
    """The ALiBi slopes of a model's query heads, a tensor ``[heads]`` or a sequence of numbers, as constants."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.requires_grad or value.device.type == "meta" or value.dim() != 1:
            raise ValueError(
                f"alibi_slopes: shape {tuple(value.shape)}, requires_grad={value.requires_grad}, {value.device}; "
                "expected one constant for each of the model's heads, [num_heads]; pass a detached tensor that holds "
                "data (seqpar.attention also takes slopes of each batch row)"
            )
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise TypeError(f"alibi_slopes={value!r}: expected a tensor or a sequence of numbers, [num_heads]")
    slopes = tuple(check_number("alibi_slopes", slope) for slope in value)
    if heads is not None and len(slopes) != heads:
        raise ValueError(f"alibi_slopes: {len(slopes)} slopes; expected one for each of {heads} query heads")
    return slopes


def check_dropout(value: object) -> float:
    """``value`` as a probability in [0, 1)."""
    p = check_number("dropout_p", value)
    if not 0 <= p < 1:
        raise ValueError(f"dropout_p={p}: expected a probability in [0, 1); 0 turns dropout off")
    return p


def check_dense(name: str, x: Tensor) -> None:
    """Raise unless ``x`` holds one rank's dense numbers, outside of torch.func's transforms."""
    if is_dtensor(x):
        raise TypeError(
            f"{name}: a DTensor; expected a plain tensor: pass {name}.to_local() if it has the tokens and the heads "
            f"that this rank computes, otherwise shard {name}.full_tensor()"
        )
    if x.is_nested:
        raise TypeError(
            f"{name}: a nested tensor; pack the sequences into one row and pass "
            "mask=seqpar.Mask.documents(cu_seqlens), or pad them and pass mask=seqpar.Mask.padding(starts, stops)"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"{name}: layout {x.layout}; expected a dense tensor, such as {name}.to_dense()")
    if x.device.type == "meta":
        raise ValueError(f"{name}: device meta holds no data; move it to cpu or cuda")
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise TypeError(
            f"{name}: inside a transform of torch.func (vmap, grad, vjp, jvp), which cannot transform messages between "
            "ranks; pass a batch as the batch dimension, and take gradients with backward or torch.autograd.grad"
        )


def check_inputs(q: Tensor, k: Tensor, v: Tensor, latent_weight: Tensor | None) -> None:
    """Raise unless one rank's tensors fit together; with a ``latent_weight``, k and v are latents and rotated keys."""
    transformed = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor [batch, seq, heads, head_dim], got {type(x).__name__}")
        if transformed or is_dtensor(x) or x.is_nested or x.layout is not torch.strided or x.is_meta:
            check_dense(name, x)  # says why it is refused
        if x.dim() != 4:
            raise ValueError(
                f"{name}: shape {tuple(x.shape)} has {x.dim()} dimensions; expected [batch, seq, heads, head_dim]"
            )
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: dtype {x.dtype}; convert to float32, bfloat16, float16 or float64")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: dtype {x.dtype} differs from q's {q.dtype}; convert them to the same")
        if x.device != q.device:
            raise ValueError(f"{name}: device {x.device} differs from q's {q.device}; move them to the same")
    if latent_weight is not None:
        _check_latents(q, k, v, latent_weight)
        return
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v: shape {tuple(v.shape)} does not fit k's {tuple(k.shape)}; they may differ in the last dimension only "
            "([batch, seq, kv_heads, head_dim] and [batch, seq, kv_heads, v_head_dim])"
        )
    for axis, name in ((0, "batch"), (1, "length"), (3, "head_dim")):
        if q.shape[axis] != k.shape[axis]:
            swapped = f"; {TRANSPOSE}" if name == "length" and q.shape[2] == k.shape[2] else ""
            raise ValueError(
                f"{name}: q {tuple(q.shape)} has {q.shape[axis]} and k {tuple(k.shape)} has {k.shape[axis]}; "
                f"they need the same {name} (self-attention over one sequence, [batch, seq, heads, head_dim]){swapped}"
            )
    if q.shape[2] > max(_MOST_HEADS, q.shape[1]):
        raise ValueError(f"q: shape {tuple(q.shape)} has {q.shape[2]} heads of {q.shape[1]} tokens; {TRANSPOSE}")
    heads, kv_heads, head_dim = q.shape[2], k.shape[2], q.shape[3]
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"heads={heads}, kv_heads={kv_heads}: the number of heads of q must be a multiple of the number of heads "
            "of k and v (grouped-query attention)"
        )
    for name, size in (("head_dim", head_dim), ("v_head_dim", v.shape[3])):
        if size < 1:
            raise ValueError(f"{name}={size}: expected at least 1")


def _check_latents(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor) -> None:
    """Raise unless the tensors of one rank's latent attention fit together.

    Shapes: ``q [batch, seq, heads, nope + rope]``, ``latent [batch, seq, 1, width]``, ``k_rope [batch, seq, 1, rope]``.
    """
    for name, x in (("k", latent), ("v", k_rope)):
        if x.shape[:3] != (*q.shape[:2], 1):
            raise ValueError(
                f"{name}: shape {tuple(x.shape)}; with latent_weight expected one head for q's tokens, "
                f"[{q.shape[0]}, {q.shape[1]}, 1, ...]"
            )
    if not isinstance(weight, Tensor):
        raise TypeError(
            f"latent_weight: expected a tensor [heads, nope + v_head_dim, width], got {type(weight).__name__}"
        )
    check_dense("latent_weight", weight)
    if weight.dtype != q.dtype or weight.device != q.device:
        raise TypeError(
            f"latent_weight: {weight.dtype} on {weight.device}, but q is {q.dtype} on {q.device}; convert them to the "
            "same"
        )
    heads, nope = q.shape[2], q.shape[3] - k_rope.shape[3]
    if weight.dim() != 3 or weight.shape[0] != heads or weight.shape[2] != latent.shape[3]:
        raise ValueError(
            f"latent_weight: shape {tuple(weight.shape)}; expected [{heads}, nope + v_head_dim, {latent.shape[3]}] for "
            f"q's heads and the width of k, the latents"
        )
    if nope < 0 or weight.shape[1] <= nope:
        raise ValueError(
            f"latent_weight: shape {tuple(weight.shape)}; q's head_dim is {q.shape[3]} and v, the rotated keys, has "
            f"{k_rope.shape[3]} elements, so the second dimension must be larger than {nope}"
        )


def check_hidden(x: Tensor, hidden_size: int, linear: nn.Module) -> None:
    """Raise unless ``linear`` can project one rank's hidden states ``x [batch, seq, hidden]``."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x_local: expected a tensor [batch, seq, {hidden_size}], got {type(x).__name__}")
    check_dense("x_local", x)
    if x.dim() != 3 or x.shape[2] != hidden_size:
        raise ValueError(f"x_local: shape {tuple(x.shape)}; expected [batch, seq, hidden_size={hidden_size}]")
    if x.dtype not in DTYPES:
        raise TypeError(f"x_local: dtype {x.dtype}; convert to float32, bfloat16, float16 or float64")
    plain = isinstance(linear, nn.Linear) and linear.weight.dtype in DTYPES
    if plain and is_dtensor(linear.weight):
        plain = hasattr(linear, "local_weight")  # a tensor-parallel layer, otherwise FSDP
    if not plain or torch.is_autocast_enabled(x.device.type):
        # Autocast converts the input itself, and so may modules that replace nn.Linear (FSDP, LoRA, quantised weights).
        return
    if x.dtype != linear.weight.dtype:
        raise TypeError(f"x_local: dtype {x.dtype}, but the weights have {linear.weight.dtype}; convert one of them")
    if x.device != linear.weight.device:
        raise ValueError(f"x_local: device {x.device}, but the weights are on {linear.weight.device}; move one of them")


def check_head_vector(name: str, x: Tensor | None, q: Tensor, batched: bool) -> None:
    """Raise unless ``x`` is None or has one value for each head of ``q [batch, seq, heads, head_dim]``.

    Shapes: ``sinks [heads]``; ``alibi_slopes [heads]`` or, with ``batched``, ``[batch, heads]``.
    """
    if x is None:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a floating-point tensor [heads], got {type(x).__name__}")
    check_dense(name, x)
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor [heads], got dtype {x.dtype}")
    (rows, _, heads), shape = q.shape[:3], x.shape  # ints, or variables of torch.compile
    by_row = batched and len(shape) == 2 and shape[0] == rows
    if not (len(shape) == 1 or by_row) or shape[-1] != heads:
        expected = f"{(heads,)}" + f" or {(rows, heads)}" * batched
        raise ValueError(f"{name}: shape {tuple(shape)}; expected {expected}")
    if x.device != q.device:
        raise ValueError(f"{name}: device {x.device} differs from q's {q.device}; move it there")
    if name == "alibi_slopes" and x.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes: it requires a gradient, but slopes have none; pass alibi_slopes.detach()")
    if torch.compiler.is_compiling() or x.device.type != "cpu" or type(x) not in (Tensor, nn.Parameter):
        return  # it has no values yet, or the host would have to wait for a GPU
    values = x.detach()
    if (~values.isfinite() if batched else ~(values < torch.inf)).any():
        allowed = "finite" if batched else "finite, or -inf for a head without a sink"
        raise ValueError(f"{name}: {values.tolist()}; expected one number for each head, {allowed}")
