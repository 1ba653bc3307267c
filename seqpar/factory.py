"""``ParallelAttention``: the layer of a strategy, by its name."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any, Concatenate, Literal, Protocol, overload

from .base.checks import check_choice
from .layers.attention import AttentionLayer
from .layers.context_parallel import ContextParallelAttention
from .layers.named import AutoAttention, HybridAttention, LocalAttention, RingAttention, UlyssesAttention
from .placement.strategies import StrategyName

LayerName = StrategyName | Literal["tp_sp"]

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    P = ParamSpec("P")

    class LayerFactory(Protocol[P]):
        """A function with the arguments ``P`` of a layer after the name of the strategy."""

        @overload
        def __call__(self, strategy: LayerName, /, *args: P.args, **arguments: P.kwargs) -> AttentionLayer: ...
        @overload
        def __call__(self, *, strategy: LayerName, **arguments: Any) -> AttentionLayer: ...


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


def _arguments_of(init: Callable[Concatenate[Any, P], None]) -> Callable[[Callable[..., Any]], LayerFactory[P]]:
    """A decorator: the function takes the arguments of ``init``, with ``strategy`` in place of ``self``."""

    def decorate(function: Any) -> Any:
        strategy, *_ = signature(function).parameters.values()
        _, *others = signature(init).parameters.values()
        function.__signature__ = Signature([strategy, *others], return_annotation="AttentionLayer")
        return function

    return decorate


@_arguments_of(AttentionLayer.__init__)
def ParallelAttention(strategy: LayerName, *args: Any, **arguments: Any) -> AttentionLayer:  # noqa: N802 (as a class)
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
        layout: how the tokens are sharded: "contiguous", "zigzag" or "striped". By default the layout of the
            ``sharding`` that the layer is called with. Over several ranks one of the two must be given, except for
            "tp_sp" over the tensor-parallel ranks alone, whose layout is then "contiguous".
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
    return layer_class(*args, **arguments)
