"""transformers' ``Trainer`` on a model that is parallelized already: arguments, data and losses of one process.

Where ``ParallelismConfig`` parallelizes the model when it is prepared, these are for a model that you have parallelized
yourself: over a mesh with tensor parallelism, or for DeepSpeed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from transformers import Trainer

from .parallelism import share_sequences_of
from .state import Patch, patch_of
from .wrappers import deepspeed_error

# The mixin's methods call the methods of the Trainer after it, which a type checker does not know.
_Mixin: Any = object


class SequenceParallelMixin(_Mixin):
    """Makes any Trainer work with a parallelized model: ``class Mine(SequenceParallelMixin, SFTTrainer)``.

    Ranks along dp get different batches, the ranks of a sequence the same ones, and the model shards them. The wrapper
    that the Trainer makes (DDP or FSDP over all ranks) averages the gradients, which are the one-device gradients.

    Raises:
        ValueError: the model is not parallelized; or the arguments have a world size that the ranks of the sequence do
            not divide, evaluate on logits that the model does not return, or use DeepSpeed with ``gradients="auto"``.
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
        """The Trainer's, whose Accelerator then counts all ranks that share a sequence as one data-parallel rank."""
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
        """The Trainer sums the tokens of all ranks, so that each sequence counts once for every rank that shares it."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        new = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + new // self.accelerator.parallelism_config.sequence_ranks

    def get_total_train_batch_size(self, args: Any) -> int:
        """Sequences in an optimizer step."""
        count: int = super().get_total_train_batch_size(args) // self.accelerator.parallelism_config.sequence_ranks
        return count


class SequenceParallelTrainer(SequenceParallelMixin, Trainer):
    """``transformers.Trainer`` for a model that ``seqpar.hf.parallelize`` has patched."""


def _data_parallel(patch: Patch, world: int) -> int:
    """The number of ranks that get different batches: each is a block of consecutive ranks.

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
