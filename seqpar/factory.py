"""``ParallelAttention``: the layer of a strategy, by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from .base.checks import check_choice
from .kernels import BackendName
from .layers.attention import AttentionLayer
from .layers.context_parallel import ContextParallelAttention
from .layers.named import AutoAttention, HybridAttention, LocalAttention, RingAttention, UlyssesAttention
from .layers.rotary import RotaryEmbedding
from .placement.layout import Layout
from .placement.strategies import StrategyName, StrategyOptions
from .strategies.gathered_activations import Gather
from .strategies.sequence_chunks import Overlap

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class LayerOptions(StrategyOptions, total=False):
        """The options of all layers."""

        gather: Gather
        """context_parallel with "all_gather": what ranks receive, "kv" or "activations"."""
        overlap: Overlap
        """tp_sp: how communication and GEMMs overlap, "auto", "ring", "symm_mem" or "none"."""
        context: StrategyName | None
        """tp_sp: the strategy of attention over the mesh's ring and ulysses dimensions."""


# To add a layer, add its class here. That of "tp_sp" is imported when one is made.
LAYERS: dict[str, Callable[..., AttentionLayer]] = {
    layer.strategy: layer
    for layer in (
        LocalAttention,
        RingAttention,
        UlyssesAttention,
        ContextParallelAttention,
        HybridAttention,
        AutoAttention,
    )
}


def ParallelAttention(  # noqa: N802 (reads as the class whose instances it makes)
    strategy: StrategyName | Literal["tp_sp"],
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    layout: Layout | None = None,
    bias: bool = False,
    out_bias: bool | None = None,
    qk_norm: bool = False,
    rope: RotaryEmbedding | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: bool = False,
    alibi_slopes: Tensor | Sequence[float] | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    backend: BackendName = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **strategy_options: Unpack[LayerOptions],
) -> AttentionLayer:
    """An attention layer whose sequence is sharded by ``strategy``.

    ``layer(x_local, mask=seqpar.Mask.causal(), sharding=sharding)`` maps ``x_local [batch, seq, hidden]`` to the same
    shape.

    Args:
        strategy: "local", "ring", "ulysses", "context_parallel", "hybrid", "tp_sp" or "auto". "auto" takes in each
            call the strategy that should be the fastest; it never takes "tp_sp", which shards the weights.
        hidden_size: width of the hidden states.
        num_heads: query heads.
        num_kv_heads: KV heads, a divisor of ``num_heads``; by default ``num_heads`` (multi-head attention).
        head_dim: by default ``hidden_size // num_heads``.
        mesh: the ranks that the sequence is sharded over, as a mesh (see ``init_mesh``).
        group: the ranks that the sequence is sharded over, as a ProcessGroup. With neither, the ranks of the
            ``sharding`` that the layer is called with, or the default group. "tp_sp" does not take the sharding's
            ranks, because its weights are sharded when the layer is made.
        layout: how the tokens are sharded: "contiguous", "zigzag", "striped" or a ``seqpar.Assigned``. By default the
            layout of the ``sharding`` that the layer is called with. Over several ranks one of the two must be given,
            except for "tp_sp" over the tensor-parallel ranks alone, whose layout is then "contiguous".
        bias: whether the q, k and v projections have biases (Qwen 2).
        out_bias: whether the output projection has a bias; the same as ``bias`` by default.
        qk_norm: RMS-normalise each head of q and k before the rotary embedding (Qwen 3, Gemma 3).
        rope: a ``seqpar.RotaryEmbedding``, or None. Layers may share one.
        softmax_scale: a factor on the scores, ``head_dim ** -0.5`` by default.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 is none (Gemma 2).
        sinks: whether each head has a learned logit in the denominator of the softmax, initially 0 (gpt-oss).
        alibi_slopes: ``[num_heads]``, a tensor or numbers. ``slope * |i - j|`` is subtracted from the scores, for
            global positions ``i`` and ``j`` (Press et al., 2021). They are constants, which checkpoints do not hold.
        dropout_p: the probability of dropping an attention weight, in training mode only.
        deterministic: use only kernels whose gradients have the same bits in every run. They are slower.
        backend: "auto" or one of ``seqpar.backends()``.
        device: the device of the weights.
        dtype: the dtype of the weights.
        strategy_options: ``comm``, ``gather`` and ``chunks`` (context_parallel), ``ulysses_size`` (context_parallel and
            hybrid), ``overlap`` and ``context`` (tp_sp). The classes of the layers document them.

    Returns:
        One of LocalAttention, RingAttention, UlyssesAttention, ContextParallelAttention, HybridAttention,
        AutoAttention, MegatronAttention.

    Raises:
        ValueError: an unknown strategy (with the nearest name), or arguments that do not fit.
        TypeError: arguments of another type, or an option that the strategy does not have.
    """
    check_choice("strategy", strategy, (*LAYERS, "tp_sp"))
    layer_class: Callable[..., AttentionLayer]
    if strategy == "tp_sp":
        from .megatron import MegatronAttention as layer_class  # noqa: N813
    else:
        layer_class = LAYERS[strategy]
    return layer_class(
        hidden_size,
        num_heads,
        num_kv_heads,
        head_dim,
        mesh=mesh,
        group=group,
        layout=layout,
        bias=bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        rope=rope,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        deterministic=deterministic,
        backend=backend,
        device=device,
        dtype=dtype,
        **strategy_options,
    )
