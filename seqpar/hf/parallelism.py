"""``ParallelismConfig``: one object lets the Trainer, TRL and accelerate loops train on sharded sequences.

To accelerate and the Trainer, the ranks that share a sequence look like data-parallel ranks that happen to have the
same batch. Each returns the loss of the whole batch, because the model shards the batch itself. Sums over all processes
count each sequence once for every rank that shares it, in what is divided and in what it is divided by.

accelerate has no registry for such backends. It asks the config for sizes, and hands it the Accelerator. What this file
relies on beside documented methods, and ``tests/test_hf_parallelism.py`` holds in place:

* ``Accelerator.__init__`` calls the config's ``get_device_mesh`` and then its ``_validate_accelerator(accelerator)``,
  and keeps config and mesh in ``accelerator.state``.
* ``Accelerator.prepare`` calls its own ``prepare_model`` and ``prepare_data_loader``, and ``gather_for_metrics`` its
  own ``gather``, as attributes of the instance.
* accelerate takes its tensor and context parallel paths where ``tp_enabled``, ``cp_enabled`` or ``sp_enabled`` is true.
* FSDP2 shards over the mesh dimensions ``fsdp_dim_names``.
* The Trainer divides by ``tp_size``, ``cp_size`` and ``sp_size`` what it has summed over processes, and TRL by
  ``tp_size``: all are 1 in the config that an Accelerator keeps.
"""

from __future__ import annotations

import copy
import inspect
import os
from typing import TYPE_CHECKING, Any, Literal

import accelerate
import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType, gather, recursively_apply
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, RandomSampler
from transformers import PreTrainedModel, Trainer

from ..checks import check_choice, check_int, check_options
from ..kernels import BackendName, check_backend
from ..layout import LAYOUTS, Layout
from ..strategies import STRATEGIES, StrategyName, strategy_options
from .loss import GRADIENTS
from .patch import BATCHES, parallelize
from .state import Batches, Gradients, Outputs, Patch
from .whole import OUTPUTS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..strategies import StrategyOptions


class ParallelismConfig(accelerate.ParallelismConfig):
    """accelerate's ``ParallelismConfig``, with each sequence sharded over ``cp_size`` ranks by seqpar.

    Give it to ``TrainingArguments(parallelism_config=...)``, to a config of TRL, or to ``Accelerator``; nothing else
    changes. ``accelerator.prepare``, which the Trainers call too, parallelizes the model. The ranks of a sequence get
    the same batches, and the other ranks are data-parallel: under DDP, or with FSDP2 over all ranks. In TRL's
    preference and RL trainers, each rank keeps its own batches.

    Further keyword arguments are the strategy's options, as in ``parallelize``.

    Args:
        cp_size: ranks that share a sequence. -1: all ranks. By default what ``accelerate launch`` sets from
            ``parallelism_config_cp_size`` in its YAML file, or 1.
        strategy: as in ``parallelize``.
        layout: as in ``parallelize``.
        backend: as in ``parallelize``.
        gradients: as in ``parallelize``.
        loss_chunk: as in ``parallelize``.
        outputs: as in ``parallelize``. "whole" if you evaluate with ``compute_metrics``, which needs the logits.
        batches: "shared": the ranks of a sequence get the same batches. "own": every rank gets batches of its own, as
            without sequence parallelism (see ``parallelize``). "auto": "own" in the trainers of TRL other than
            SFTTrainer and those made from it, else "shared".
        dp_replicate_size: data-parallel replicas, and
        dp_shard_size: data-parallel ranks that FSDP2 shards the weights over, beside the ranks of the sequence. By
            default all remaining ranks are of the one kind or the other, depending on whether FSDP2 is used.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong value.

    Examples:
        >>> ParallelismConfig(cp_size=4, strategy="hybrid", ulysses_size=2).cp_size
        4
    """

    # False, so that accelerate and TRL do not take the ways of its own backends.
    cp_enabled = sp_enabled = tp_enabled = False

    def __init__(
        self,
        cp_size: int | None = None,
        *,
        strategy: StrategyName = "ring",
        layout: Layout = "zigzag",
        backend: BackendName = "auto",
        gradients: Gradients = "auto",
        loss_chunk: int | None = None,
        outputs: Outputs = "auto",
        batches: Batches | Literal["auto"] = "auto",
        dp_replicate_size: int | None = None,
        dp_shard_size: int | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        if cp_size is None:
            cp_size = int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1"))
        check_int("cp_size", cp_size)
        if cp_size < 1 and cp_size != -1:
            raise ValueError(f"cp_size={cp_size}: expected at least 1, or -1 for all ranks")
        check_choice("strategy", strategy, STRATEGIES)
        check_options(strategy, options, strategy_options(strategy))
        check_choice("layout", layout, LAYOUTS)
        check_backend(backend)
        check_choice("gradients", gradients, GRADIENTS)
        check_choice("outputs", outputs, OUTPUTS)
        check_choice("batches", batches, ("auto", *BATCHES))
        # accelerate checks what its own backend needs where its cp_size is greater than 1.
        super().__init__(dp_replicate_size=dp_replicate_size, dp_shard_size=dp_shard_size, tp_size=1, cp_size=1)
        self.cp_size = cp_size
        self.arguments: dict[str, Any] = {
            "strategy": strategy,
            "layout": layout,
            "backend": backend,
            "gradients": gradients,
            "loss_chunk": loss_chunk,
            "outputs": outputs,
            "batches": batches,
            **options,
        }
        self.sequence_ranks = 1  # in the config that an Accelerator keeps
        self._given = self  # that config is a copy, made from this one
        self._group: ProcessGroup | None = None

    def __repr__(self) -> str:
        return f"ParallelismConfig({', '.join(f'{name}={value!r}' for name, value in self.to_json().items())})"

    def to_json(self) -> dict[str, Any]:
        """The arguments, as the Trainer reports them."""
        sizes = {name: getattr(self, name) for name in ("cp_size", "dp_replicate_size", "dp_shard_size")}
        return {**sizes, **self.arguments}

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """The mesh of an Accelerator's config; None before an Accelerator has taken this config."""
        mesh: DeviceMesh | None = self.device_mesh
        return mesh

    def _validate_accelerator(self, accelerator: accelerate.Accelerator) -> None:
        """Called by an Accelerator at the end of its start: make it deal batches and prepare models for sequences."""
        batches = self._given.arguments["batches"]
        if batches == "auto":
            batches = "own" if _is_for_own_batches(_trainer_being_made()) else "shared"
        if self is not self._given and self.arguments["batches"] == batches:
            config = self  # a second Accelerator has the state of the first, with the config that was made for it
        else:
            config = self._given._of(accelerator, batches)
        accelerator.state.parallelism_config = config
        accelerator.state.device_mesh = config.device_mesh
        prepare_models(accelerator, config._parallelize)
        if batches == "shared":
            share_sequences(accelerator, config.sequence_ranks)

    def _of(self, accelerator: accelerate.Accelerator, batches: Batches) -> ParallelismConfig:
        """The config that the Accelerator keeps: with the mesh, and without sizes to divide by."""
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            raise ValueError(
                "parallelism_config: with DeepSpeed call seqpar.hf.parallelize(model, gradients='mean') and use "
                "seqpar.hf.SequenceParallelMixin instead of ParallelismConfig; or use FSDP2"
            )
        if self.tp_size > 1:
            raise ValueError(
                f"tp_size={self.tp_size}: with tensor parallelism call seqpar.hf.parallelize(model, mesh=...) and use "
                "seqpar.hf.SequenceParallelMixin instead of ParallelismConfig"
            )
        world = accelerator.num_processes
        given = self.dp_replicate_size * self.dp_shard_size
        cp_size = world // given if self.cp_size == -1 else self.cp_size
        if cp_size < 1 or world % (cp_size * given) or (given > 1 and world != cp_size * given):
            raise ValueError(
                f"cp_size={self.cp_size}, dp_replicate_size={self.dp_replicate_size}, "
                f"dp_shard_size={self.dp_shard_size}: their product must be the number of processes, {world}, or "
                "cp_size must divide it and the others be left out"
            )
        config = copy.copy(self)
        config.sequence_ranks, config.cp_size = cp_size, 1
        config.arguments = {**self.arguments, "batches": batches}
        if world == 1:
            return config
        if given == 1 and accelerator.is_fsdp2:
            config.dp_shard_size = world // cp_size
        elif given == 1:
            config.dp_replicate_size = world // cp_size
        sizes = config.dp_replicate_size, config.dp_shard_size, cp_size
        mesh = init_device_mesh(accelerator.device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard", "cp"))
        config._group = mesh["cp"].get_group()
        if batches == "own":  # accelerate reads from the mesh that cp's ranks get the same batch
            config.dp_shard_size *= cp_size
            dp = config.dp_replicate_size, config.dp_shard_size
            mesh = init_device_mesh(accelerator.device.type, dp, mesh_dim_names=("dp_replicate", "dp_shard"))
            mesh["dp_shard"]._flatten("dp_shard_cp")
        else:
            mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        config.device_mesh = mesh
        return config

    def _parallelize(self, model: nn.Module) -> None:
        """Parallelize a model that is prepared, unless it is already or holds no transformers model."""
        found = [getattr(m, "_seqpar", None) for m in model.modules()]
        patches = [patch for patch in found if isinstance(patch, Patch)]
        wanted = self.sequence_ranks, self.arguments["batches"]
        if patches and (patches[0].ranks, patches[0].batches if wanted[0] > 1 else wanted[1]) != wanted:
            raise ValueError(
                f"model: it is parallelized over {patches[0].ranks} ranks, but the ParallelismConfig has "
                f"cp_size={wanted[0]} (batches={patches[0].batches!r}, here {wanted[1]!r}); leave the call of "
                "parallelize out"
            )
        if not patches and any(isinstance(m, PreTrainedModel) for m in model.modules()):
            parallelize(model, group=self._group, **self.arguments)


def _trainer_being_made() -> Trainer | None:
    """The Trainer whose ``__init__`` makes the Accelerator; accelerate does not hand it to the config."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(trainer := frame.f_locals.get("self"), Trainer):
            return trainer
        frame = frame.f_back
    return None


def _is_for_own_batches(trainer: Trainer | None) -> bool:
    """Whether it is a trainer of TRL whose loss is not the mean over a batch's tokens.

    Generation, rewards and the statistics of the loss count every process's samples once.
    """
    names = {cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")}
    return bool(names) and "SFTTrainer" not in names


def prepare_models(accelerator: accelerate.Accelerator, prepare: Any) -> None:
    """Make ``accelerator`` call ``prepare`` with each model that it prepares."""
    plain_prepare, plain_prepare_model = accelerator.prepare, accelerator.prepare_model

    def prepare_all(*objects: Any, **kwargs: Any) -> Any:
        for x in objects:
            if isinstance(x, nn.Module):
                prepare(x)
        return plain_prepare(*objects, **kwargs)

    def prepare_model(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        prepare(model)
        return plain_prepare_model(model, *args, **kwargs)

    accelerator.prepare, accelerator.prepare_model = prepare_all, prepare_model


def share_sequences(accelerator: accelerate.Accelerator, shared: int) -> None:
    """Make ``accelerator`` deal the same batches to ``shared`` consecutive ranks.

    ``gather_for_metrics`` then returns the values of each batch once.
    """
    plain_gather_for_metrics = accelerator.gather_for_metrics

    def prepare_loader(loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None) -> Any:
        if not getattr(loader, "_is_accelerate_prepared", False):
            loader = _deal(accelerator, loader, shared, device_placement)
        if loader not in accelerator._dataloaders:
            accelerator._dataloaders.append(loader)
        return loader

    def gather_once(data: Any) -> Any:
        return recursively_apply(lambda x: _of_each_sequence(gather(x), shared), data)

    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        accelerator.gather = gather_once  # which the plain method calls
        try:
            return plain_gather_for_metrics(input_data, use_gather_object)
        finally:
            del accelerator.gather

    accelerator.prepare_data_loader, accelerator.gather_for_metrics = prepare_loader, gather_for_metrics


def share_sequences_of(accelerator: accelerate.Accelerator, shared: int) -> None:
    """The same for an Accelerator without a ParallelismConfig, whose models are parallelized already."""
    config = copy.copy(ParallelismConfig(batches="shared"))
    config.sequence_ranks, config.cp_size = shared, 1
    accelerator.state.parallelism_config = config
    share_sequences(accelerator, shared)


def _of_each_sequence(gathered: Tensor, shared: int) -> Tensor:
    """Of the rows of all ranks, those of the first rank of each sequence."""
    if shared == 1:
        return gathered
    by_rank: Tensor = gathered.unflatten(0, (dist.get_world_size(), -1))  # [ranks, rows, ...]
    return by_rank[::shared].flatten(0, 1)


def _deal(accelerator: accelerate.Accelerator, loader: DataLoader[Any], shared: int, device_placement: Any) -> Any:
    """accelerate's loader for this rank: the ranks of a sequence count as one process."""
    config = accelerator.dataloader_config
    if config.dispatch_batches:
        raise ValueError(
            "dispatch_batches=True: accelerate would deal different batches to the ranks of one sequence; leave it "
            "out, so that every rank reads its own"
        )
    _shuffle_alike(loader)
    return prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=accelerator.num_processes // shared,
        process_index=accelerator.process_index // shared,
        split_batches=config.split_batches,
        put_on_device=accelerator.device_placement if device_placement is None else device_placement,
        rng_types=accelerator.rng_types.copy() if accelerator.rng_types else None,
        dispatch_batches=False,
        even_batches=config.even_batches,
        use_seedable_sampler=config.use_seedable_sampler,
        data_seed=config.data_seed,
        non_blocking=config.non_blocking,
        use_stateful_dataloader=config.use_stateful_dataloader,
    )


def _shuffle_alike(loader: DataLoader[Any]) -> None:
    """Where the ranks are seeded differently, give a sampler that draws from their own random numbers a generator."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, RandomSampler) or sampler.generator is not None or not dist.is_initialized():
        return
    seeds = [torch.initial_seed() for _ in range(dist.get_world_size())]
    dist.all_gather_object(seeds, torch.initial_seed())
    if len(set(seeds)) > 1:
        sampler.generator = torch.Generator().manual_seed(seeds[0])
