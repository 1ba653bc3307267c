"""transformers' ``Trainer`` on a parallelized model: the same arguments, data and losses as one process.

Three things change: which rank gets which batch, each batch is sharded before the model sees it, and the Trainer's sums
over processes are divided by the number of processes that share a batch.
"""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from .batch import shard_batch
from .state import Patch, patch_of
from .wrappers import deepspeed_error

# The mixin's methods call the methods of the Trainer after it, which a type checker does not know.
_Mixin: Any = object


class SequenceParallelMixin(_Mixin):
    """Makes any Trainer work with a parallelized model: ``class Mine(SequenceParallelMixin, SFTTrainer)``.

    Ranks along dp get different batches, and ``compute_loss`` shards each of them. The wrapper that the Trainer makes
    (DDP or FSDP over all ranks) averages the gradients, which are the one-device gradients.

    Raises:
        ValueError: the model is not parallelized; or the arguments need the logits of the full sequence, have a world
            size that the ranks of the sequence do not divide, or use DeepSpeed with ``gradients="auto"``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        patch = self._patch
        if self.is_deepspeed_enabled and patch.gradients == "auto":
            raise deepspeed_error("the Trainer uses DeepSpeed")
        if self.args.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={self.args.label_smoothing_factor}: it needs the logits of all tokens; set it "
                "to 0"
            )
        if self.compute_loss_func is not None:
            raise ValueError(
                "compute_loss_func: it would get one rank's logits; leave it out (the model computes its loss)"
            )
        if self.compute_metrics is not None and not self.args.prediction_loss_only:
            raise ValueError("compute_metrics: it needs the logits of all tokens; set prediction_loss_only=True")
        if self.args.world_size > 1 and self.args.world_size % patch.ranks:
            raise ValueError(
                f"model: its sequence is sharded over {patch.ranks} ranks, but the Trainer has "
                f"{self.args.world_size}; start a multiple of {patch.ranks} ranks"
            )

    @property
    def _patch(self) -> Patch:
        return patch_of(self.model)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """All ranks that share a sequence count as one data-parallel rank."""
        accelerator = self.accelerator
        prepare = accelerator.prepare
        size, rank = _data_parallel(self._patch, self.args.world_size)

        def prepare_for_dp(loader: DataLoader[Any]) -> DataLoader[Any]:
            config = accelerator.dataloader_config
            prepared: DataLoader[Any] = prepare_data_loader(
                loader,
                accelerator.device,
                num_processes=size,
                process_index=rank,
                split_batches=config.split_batches,
                put_on_device=accelerator.device_placement,
                rng_types=accelerator.rng_types.copy() if accelerator.rng_types else None,
                dispatch_batches=False,
                even_batches=config.even_batches,
                use_seedable_sampler=config.use_seedable_sampler,
                data_seed=config.data_seed,
                non_blocking=config.non_blocking,
            )
            return prepared

        accelerator.prepare = prepare_for_dp
        try:
            loader: DataLoader[Any] = super()._get_dataloader(*args, **kwargs)
        finally:
            accelerator.prepare = prepare
        accelerator._dataloaders.append(loader)
        return loader

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Tensor | int | None:
        """The Trainer's sum over processes counts each sequence once for every rank that shares it."""
        items: Tensor | int | None = super()._get_num_items_in_batch(batch_samples, device)
        if items is not None and self.args.average_tokens_across_devices and self.args.world_size > 1:
            return cast(Tensor, items / self._patch.ranks)
        return items

    def _gather_each_sequence_once(self, x: Any) -> Any:
        """All-gather ``x [count]`` of one rank of each sequence; leave out the rows that fill up the last batch."""
        accelerator = self.accelerator
        size, _ = _data_parallel(self._patch, self.args.world_size)
        gathered = accelerator.gather(x).unflatten(0, (self.args.world_size, -1))
        gathered = gathered[:: self.args.world_size // size].flatten(0, 1)
        state = accelerator.gradient_state
        return gathered[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else gathered

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, which takes the mean over all ranks' losses."""
        if self.args.world_size > 1:
            self.gather_function = self._gather_each_sequence_once
        return super().evaluation_loop(*args, **kwargs)

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """The Trainer sums the tokens of all ranks, so that each sequence counts once for every rank that shares it."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        new = self.state.num_input_tokens_seen - before
        size, _ = _data_parallel(self._patch, self.args.world_size)
        self.state.num_input_tokens_seen = before + new * size // self.args.world_size

    def get_total_train_batch_size(self, args: Any) -> int:
        """Sequences in an optimizer step."""
        size, _ = _data_parallel(self._patch, args.world_size)
        count: int = self._train_batch_size * args.gradient_accumulation_steps * size
        return count

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of the full batch, computed from this rank's part."""
        patch = self._patch
        local = shard_batch(inputs, mesh=patch.mesh, group=patch.given_group, layout=patch.layout)
        # Trainer's own, not super()'s: a trainer in between would compute its loss from one rank's logits.
        result = Trainer.compute_loss(self, model, local, return_outputs, num_items_in_batch)
        loss, outputs = result if return_outputs else (result, None)
        if (
            self.args.average_tokens_across_devices
            and self.model_accepts_loss_kwargs
            and num_items_in_batch is not None
            and self.args.world_size > 1
        ):
            # The Trainer multiplied the loss by the number of processes, but a sequence's processes count once.
            loss = loss / patch.ranks
        return (loss, outputs) if return_outputs else loss


class SequenceParallelTrainer(SequenceParallelMixin, Trainer):
    """``transformers.Trainer`` for a model that ``seqpar.hf.parallelize`` has patched."""


def _data_parallel(patch: Patch, world: int) -> tuple[int, int]:
    """The data-parallel size and rank: of the ranks that get different batches."""
    if world == 1:
        return 1, 0
    names = (patch.mesh.mesh_dim_names or ()) if patch.mesh is not None else ()
    if patch.mesh is not None and "dp" in names:
        return patch.mesh["dp"].size(), patch.mesh["dp"].get_local_rank()
    if patch.group is None or patch.ranks == 1:
        return world, dist.get_rank()
    members = dist.get_process_group_ranks(patch.group)
    if members != list(range(members[0], members[0] + patch.ranks)):
        raise ValueError(f"group: its ranks {members} are not consecutive; give parallelize a mesh with a dp dimension")
    return world // patch.ranks, members[0] // patch.ranks
