"""The head of a language model and its loss, for some tokens at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ..base.checks import check_int, check_module, no_compile
from ..comm.handshake import propagate_errors
from ..layers.loss import token_loss
from ..patching.replaced import replaced
from ..sharding.sharding import Sharding
from .weights import SummedWeights

if TYPE_CHECKING:
    from ..layers.loss import Gradients


@no_compile
def tiled_loss(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    *,
    tokens: int = 4096,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    sharding: Sharding | None = None,
    ignore_index: int = -100,
    gradients: Gradients = "mean",
) -> Tensor:
    """``token_loss(F.cross_entropy(head(hidden)), labels)``, with the logits of ``tokens`` tokens at a time.

    The logits of a tile are computed again in backward, so that no more than one tile's logits exist at a time: with a
    vocabulary of 128k, 32k tokens have 17 GB of float32 logits, and 4,096 have 2 GB. The gradients of the head's
    weights are summed over the tiles in float32.

    Args:
        head: takes ``[..., hidden]`` and returns logits ``[..., vocabulary]``, each token's from this token alone. It
            may be wrapped in DDP, FSDP or ``fully_shard``, which gathers its weights once.
        hidden: ``[b, s, hidden]``, of this rank's tokens.
        labels: integers ``[b, s]``, shifted; ``seqpar.shift`` shifts the labels of a shard.
        tokens: of a tile.
        mesh: the ranks over which the mean is taken, with their dp dimension, as for ``seqpar.token_loss``.
        group: these ranks as a ProcessGroup. With neither, the default group.
        sharding: the ``Sharding`` of the tokens, instead of mesh and group.
        ignore_index: the label of tokens that are left out of the mean.
        gradients: "sum" if something sums the gradients over these ranks instead of averaging them.

    Returns:
        The mean cross-entropy over all ranks' labels but ``ignore_index``: a float32 scalar (float64 for float64), the
        same on every rank.

    Raises:
        TypeError: ``head`` is not a module, or ``hidden`` or ``labels`` not a tensor.
        ValueError: ``hidden`` and ``labels`` do not fit together, or an argument does not fit ``seqpar.token_loss``.
        RuntimeError: another rank raised an error, and there is no ``sharding``.

    Example:
        >>> loss = seqpar.tiled_loss(model.lm_head, hidden, labels, mesh=mesh)
    """
    where: Any = {"mesh": mesh, "group": group}
    # The ranks that a handshake of ``token_loss`` would wait for this rank.
    waiting = None if sharding is not None else Sharding(0, "contiguous", **where).all_ranks
    with propagate_errors(waiting):
        losses = _losses(head, hidden, labels, tokens, ignore_index)
    return token_loss(losses, labels, **where, sharding=sharding, ignore_index=ignore_index, gradients=gradients)


def _losses(head: nn.Module, hidden: Tensor, labels: Tensor, tokens: int, ignore_index: int) -> Tensor:
    """The cross-entropy of each of this rank's tokens, ``[b, s]``."""
    check_module("head", head)
    check_int("tokens", tokens, 1)
    for name, x in (("hidden", hidden), ("labels", labels)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}={type(x).__name__}: expected a tensor")
    if hidden.dim() != 3 or hidden.shape[:2] != labels.shape:
        raise ValueError(
            f"hidden: shape {tuple(hidden.shape)}, but labels have {tuple(labels.shape)}; expected [batch, seq_local, "
            "hidden] and [batch, seq_local]"
        )
    core: nn.Module = head
    while isinstance(core, FullyShardedDataParallel | DistributedDataParallel):
        core = core.module
    forward, results = core.forward, list[Tensor]()

    def run(rows: Tensor) -> Tensor:  # in place of the head's forward, inside of its hooks
        weights = SummedWeights(core)

        def score(tile: Tensor, wanted: Tensor) -> Tensor:
            logits: Tensor = weights.call(forward, tile[None])[0]  # [n, vocabulary]
            logits = logits if logits.dtype.itemsize > 4 else logits.float()
            return F.cross_entropy(logits, wanted, ignore_index=ignore_index, reduction="none")

        tiles = zip(rows.flatten(0, 1).split(tokens), labels.flatten().long().split(tokens), strict=True)
        results.append(torch.cat([checkpoint(score, *tile, use_reentrant=False) for tile in tiles]).view(labels.shape))
        return results[0]

    with replaced(core, forward=run):
        losses: Tensor = head(hidden)
    # ``fully_shard`` may cast the output to a lower precision.
    return losses if losses.dtype == results[0].dtype else results[0]
