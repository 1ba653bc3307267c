"""Context parallelism in megatron-core (0.16), without TransformerEngine."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..functional import attention
from ..masks.mask import Mask
from ..sharding.sharding import Sharding

_MASKS = {"causal": Mask.causal(), "no_mask": Mask.full()}


class CoreAttention(nn.Module):
    """The ``core_attention`` of a layer spec: attention over the tokens of all context-parallel ranks.

    Megatron-core makes and calls it. ``cp_comm_type`` has TransformerEngine's values, "all_gather" by default. The
    tokens are sharded as ``megatron.core.utils.get_batch_on_this_cp_rank`` does, which is the layout "zigzag".

    Args:
        config: the ``TransformerConfig``.
        layer_number: counted from 1.
        attn_mask_type: ``AttnMaskType.causal`` or ``no_mask``.
        attention_type: not used.
        cp_comm_type: how the context-parallel ranks exchange keys and values: ``comm`` of "context_parallel".
        softmax_scale: a factor on the scores, ``head_dim ** -0.5`` by default.
        pg_collection: its ``cp`` are the context-parallel ranks.

    Raises:
        ValueError: a feature of ``config`` or a mask that it does not compute.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        for name, plain in (("softmax_type", "vanilla"), ("apply_query_key_layer_scaling", False)):
            if getattr(config, name) != plain:
                raise ValueError(f"{name}={getattr(config, name)!r}: expected {plain!r}; nothing else is supported")
        self.group: ProcessGroup = pg_collection.cp
        self.sharding: Sharding | None = None
        self.mask = _mask(attn_mask_type)
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.mask &= Mask.sliding_window(*config.window_size)
        self.dropout_p = float(config.attention_dropout)
        self.options: dict[str, Any] = {"softmax_scale": softmax_scale, "comm": cp_comm_type}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attention of ``query [seq_local, batch, heads, head_dim]``: ``[seq_local, batch, heads * head_dim]``.

        The layer's ``attn_mask_type`` and window are the mask, so ``attention_mask`` is None.
        """
        if attention_mask is not None:
            raise ValueError(
                "attention_mask: a tensor is not supported, because the layer's attn_mask_type is the mask; pass None "
                "(create_attention_mask=False in GPTDatasetConfig)"
            )
        for name, given in (("attention_bias", attention_bias), ("packed_seq_params", packed_seq_params)):
            if given is not None:
                raise ValueError(f"{name}: not supported; leave it out")
        if attn_mask_type is not None:
            _mask(attn_mask_type)
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))  # [b, s, h, d]
        if self.sharding is None or self.sharding.seq_local != q.shape[1]:  # all ranks hold as many tokens
            self.sharding = Sharding(q.shape[1] * self.group.size(), "zigzag", group=self.group)
        dropout_p = self.dropout_p if self.training else 0.0
        options = {**self.options, "mask": self.mask, "sharding": self.sharding, "dropout_p": dropout_p}
        out: Tensor = attention(q, k, v, strategy="context_parallel", **options)
        return out.transpose(0, 1).flatten(2)


def _mask(attn_mask_type: Any) -> Mask:
    if attn_mask_type.name not in _MASKS:
        raise ValueError(f"attn_mask_type={attn_mask_type.name}: expected {' or '.join(_MASKS)}")
    return _MASKS[attn_mask_type.name]
