"""transformers' ``Trainer`` for a model that is parallelized already.

``ParallelismConfig`` parallelizes a model when the Trainer prepares it. The classes in this file are for a model that
you have parallelized yourself: over a mesh with tensor parallelism, or for DeepSpeed. Arguments, data and losses are
those of one process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from transformers import Trainer

from ..layers.wrappers import deepspeed_error
from .parallelism import divides_by_tp_size, share_sequences_of
from .state import Patch, patch_of

# The mixin's methods call methods of the Trainer that follows it in the bases, which a type checker does not know.
_Mixin: Any = object


class SequenceParallelMixin(_Mixin):
    """Makes any Trainer work with a parallelized model: ``class Mine(SequenceParallelMixin, SFTTrainer)``.

    Ranks along dp get different batches. The ranks of a sequence get the same batches, which the model shards. The
    wrapper that the Trainer makes (DDP or FSDP over all ranks) averages the gradients. The result is the one-device
    gradients.

    Raises:
        ValueError: the model is not parallelized; the number of ranks is not a multiple of the number of ranks of a
            sequence; ``compute_metrics`` needs logits that the model does not return; or DeepSpeed is used with
            ``gradients="auto"``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        patch = self._patch
        if self.is_deepspeed_enabled and patch.gradients == "auto":
            raise deepspeed_error("the Trainer uses DeepSpeed")
        if self.compute_metrics is not None and not self.args.prediction_loss_only and patch.outputs != "whole":
            raise ValueError(
                "compute_metrics: it needs the logits of all tokens; call parallelize with outputs='whole', or set "
                "prediction_loss_only=True"
            )

    @property
    def _patch(self) -> Patch:
        return patch_of(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator, which then treats all ranks that share a sequence as one data-parallel rank."""
        super().create_accelerator_and_postprocess()
        patch = self._patch
        if self.args.world_size > 1 and self.args.world_size % patch.ranks:
            raise ValueError(
                f"model: its sequence is sharded over {patch.ranks} ranks, but the Trainer has "
                f"{self.args.world_size}; start a multiple of {patch.ranks} ranks"
            )
        share_sequences_of(self.accelerator, self.args.world_size // _data_parallel(patch, self.args.world_size))
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Correct the number of tokens: the Trainer counts each sequence once for every rank that shares it."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        new = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + new // self.accelerator.parallelism_config.sequence_ranks

    def get_total_train_batch_size(self, args: Any) -> int:
        """The number of sequences in an optimizer step."""
        count: int = super().get_total_train_batch_size(args) * self.get_tp_size()
        count //= self.accelerator.parallelism_config.sequence_ranks
        return count

    def get_tp_size(self) -> int:
        """The number of ranks with the same batch, by which the Trainer divides counts and the factor of losses."""
        return self.accelerator.parallelism_config.sequence_ranks if divides_by_tp_size(self) else 1


class SequenceParallelTrainer(SequenceParallelMixin, Trainer):
    """``transformers.Trainer`` for a model that ``seqpar.hf.parallelize`` has patched."""


def _data_parallel(patch: Patch, world: int) -> int:
    """The number of data-parallel ranks: groups of ranks that get different batches.

    Args:
        patch: the model's ``Patch``.
        world: the number of ranks.

    Raises:
        ValueError: the ranks that share a sequence are not consecutive.
    """
    if world == 1:
        return 1
    if patch.mesh is not None and "dp" in (patch.mesh.mesh_dim_names or ()):
        size = patch.mesh["dp"].size()
        if patch.mesh["dp"].get_local_rank() != dist.get_rank() // (world // size):
            raise ValueError("mesh: dp must be its first dimension, so that the ranks of a sequence are consecutive")
        return size
    if patch.group is None or patch.ranks == 1:
        return world
    members = dist.get_process_group_ranks(patch.group)
    if members != list(range(members[0], members[0] + patch.ranks)):
        raise ValueError(f"group: its ranks {members} are not consecutive; give parallelize a mesh with a dp dimension")
    return world // patch.ranks
