"""Context parallelism in torchtitan (0.3), also with packed documents."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed import DeviceMesh

from ..functional import attention
from ..masks.mask import Mask
from ..sharding.sharding import Sharding


def parallelize(model: nn.Module, cp_mesh: DeviceMesh, **options: Any) -> None:
    """Let every ``inner_attention`` of a torchtitan model attend over the tokens of all context-parallel ranks.

    Call it in place of ``apply_cp_to_forward``, before ``model.parallelize``. Inputs, labels and positions are sharded
    by torchtitan's ``prepare_context_parallel_input``, whose "headtail" is the layout "zigzag". With documents, pass
    the model the ``VarlenMetadata`` of the full batch as ``attention_masks``.

    Args:
        model: a model whose attention modules are torchtitan's. A language model is built with
            ``attn_backend="varlen"``.
        cp_mesh: the mesh of the context-parallel ranks, of one dimension.
        options: ``strategy`` ("ring" by default) and other keyword arguments of ``seqpar.attention``.

    Raises:
        ValueError: an ``inner_attention`` that is neither a ``VarlenAttention`` nor a ``ScaledDotProductAttention``, or
            a language model with a part that sees other tokens without an ``inner_attention``.
    """
    if isinstance(mask := options.get("mask"), Mask) and mask.head_groups:
        raise ValueError(
            f"mask={mask!r:.60}: a mask for each group of heads is not supported, because a tensor-parallel rank may "
            "hold some of the heads; call seqpar.attention in an attention module of your own"
        )
    from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention
    from torchtitan.models.common.decoder import Decoder

    if isinstance(model, Decoder):
        parts = {name: part for name, part in model.named_children() if name not in _BY_TOKEN | {"layers"}}
        parts |= {f"layers.{name}": layer for name, layer in model.layers.items() if not _attentions(layer)}
        for name, part in parts.items():
            raise ValueError(
                f"{name} ({type(part).__name__}): has no inner_attention, and would see this rank's tokens only; use a "
                "model whose layers all have one, without a vision encoder and without multi-token prediction"
            )
    found = _attentions(model)
    for name, module in found.items():
        inner = module.inner_attention
        if type(inner) not in (ScaledDotProductAttention, VarlenAttention):
            raise ValueError(
                f"{name}.inner_attention={type(inner).__name__}: expected VarlenAttention or "
                'ScaledDotProductAttention; build the model with attn_backend="varlen"'
            )
    shared: dict[Any, InnerAttention] = {}
    for module in found.values():
        window = getattr(module.inner_attention, "window_size", None)
        if window not in shared:
            shared[window] = InnerAttention(cp_mesh, window, options)
        module.inner_attention = shared[window]


# The parts of a torchtitan Decoder that compute each token by itself.
_BY_TOKEN = {"tok_embeddings", "norm", "lm_head"}


def _attentions(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "inner_attention")}


class InnerAttention(nn.Module):
    """torchtitan's inner attention, for all layers of a model with the same window. It has no parameters."""

    def __init__(self, cp_mesh: DeviceMesh, window: tuple[int, int] | None, options: dict[str, Any]) -> None:
        super().__init__()
        self.cp_mesh, self.options = cp_mesh, options
        self.window = None if window is None else Mask.sliding_window(*window)  # None: ``is_causal`` decides
        self.sharding: Sharding | None = None
        self._documents: tuple[Any, Mask] | None = None  # the last VarlenMetadata and its mask

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
        out_transform: Any = None,
    ) -> Tensor:
        """``[batch, seq_local, heads, v_head_dim]``. ``attention_masks``: a ``VarlenMetadata``, or None."""
        if out_transform is not None:
            raise ValueError("out_transform: not supported (attention sinks use it); leave it out")
        if self.sharding is None or self.sharding.seq_local != q.shape[1]:  # all ranks hold as many tokens
            self.sharding = Sharding(q.shape[1] * self.cp_mesh.size(), "zigzag", mesh=self.cp_mesh)
        mask = self.window
        if mask is None:
            mask = Mask.causal() if is_causal else Mask.full()
        if attention_masks is not None:
            mask &= self._mask(attention_masks, q.shape[0], self.sharding.seq_len)
        options = {"mask": mask, "sharding": self.sharding, "softmax_scale": scale, **self.options}
        out: Tensor = attention(q, k, v, **options)
        return out

    def _mask(self, metadata: Any, rows: int, seq_len: int) -> Mask:
        """The documents of ``rows`` rows. The metadata counts them in the concatenated rows."""
        if not hasattr(metadata, "cu_seq_q"):
            raise ValueError(f"attention_masks={type(metadata).__name__}: expected a VarlenMetadata, or None")
        if self._documents is None or self._documents[0] is not metadata:
            ends = metadata.cu_seq_q.tolist()
            if ends[-1] != rows * seq_len:
                raise ValueError(
                    f"attention_masks: made for {ends[-1]} tokens, but the batch has {rows} x {seq_len}; make it from "
                    "the positions of the full sequences, before they are sharded"
                )
            starts = [[x - row * seq_len for x in ends if 0 <= x - row * seq_len <= seq_len] for row in range(rows)]
            self._documents = metadata, Mask.documents(starts, causal=False)
        return self._documents[1]
