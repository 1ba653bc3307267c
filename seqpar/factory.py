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
        args: ``hidden_size``, ``num_heads``, ``num_kv_heads`` and ``head_dim`` of ``AttentionLayer``.
        arguments: the other arguments of ``AttentionLayer``, which documents all of them.

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
