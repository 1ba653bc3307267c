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
        model: a model whose attention modules are torchtitan's.
        cp_mesh: the mesh of the context-parallel ranks, of one dimension.
        options: ``strategy`` ("ring" by default) and other keyword arguments of ``seqpar.attention``.
    """
    shared: dict[Any, InnerAttention] = {}
    for module in list(model.modules()):
        if hasattr(module, "inner_attention"):
            window = getattr(module.inner_attention, "window_size", (-1, 0))
            module.inner_attention = shared.setdefault(window, InnerAttention(cp_mesh, window, options))


class InnerAttention(nn.Module):
    """torchtitan's inner attention, for all layers of a model with the same window. It has no parameters."""

    def __init__(self, cp_mesh: DeviceMesh, window: tuple[int, int], options: dict[str, Any]) -> None:
        super().__init__()
        self.cp_mesh, self.window, self.options = cp_mesh, Mask.sliding_window(*window), options
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
    ) -> Tensor:
        """``[batch, seq_local, heads, v_head_dim]``. ``attention_masks``: a ``VarlenMetadata``, or None."""
        if self.sharding is None or self.sharding.seq_local != q.shape[1]:  # all ranks hold as many tokens
            self.sharding = Sharding(q.shape[1] * self.cp_mesh.size(), "zigzag", mesh=self.cp_mesh)
        mask = self.window if is_causal else Mask.full()
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
