"""``ParallelismConfig``: one object with which the Trainer, TRL and accelerate loops train on sharded sequences.

For accelerate and the Trainer, the ranks that share a sequence are data-parallel ranks with the same batch. Each of
them returns the loss of the full batch, because the model shards the batch itself. A sum over all processes counts each
sequence once for every rank that shares it. A mean over all processes is still correct, because its numerator and its
denominator contain the same factor.

accelerate has no registry for such backends. This file relies on undocumented behaviour of accelerate, the Trainer and
TRL, which ``tests/hf/test_accelerate.py`` tests.

* ``Accelerator.__init__`` calls the config's ``get_device_mesh`` and then its ``_validate_accelerator(accelerator)``,
  and keeps the config and the mesh in ``accelerator.state``.
* ``Accelerator.prepare`` calls ``prepare_model`` and ``prepare_data_loader``, and ``gather_for_metrics`` calls
  ``gather``, as attributes of the Accelerator, so that an instance attribute replaces the method.
* A Trainer makes its Accelerator in ``create_accelerator_and_postprocess``, which this file wraps.
* accelerate uses its own tensor or context parallelism if ``tp_enabled``, ``cp_enabled`` or ``sp_enabled`` is true.
* FSDP2 shards the weights over the mesh dimensions ``fsdp_dim_names``.
* The Trainer divides counts by its ``get_tp_size()`` and by the config's ``cp_size`` and ``sp_size``, and TRL divides
  them by the config's ``tp_size``. In the config that an Accelerator keeps, ``cp_size`` is the number of ranks that get
  the same batches. The other two are 1.
* If ``average_tokens_across_devices`` is true, the Trainer's ``_get_num_items_in_batch`` returns a sum over processes,
  and its ``compute_loss`` multiplies losses by the number of processes (``count_sequences_once``).
* ``DataLoaderAdapter.__init__``, which the loaders of accelerate call, makes the attribute ``base_dataloader``, which
  they iterate over by ``base_dataloader.__iter__()``. ``skip_first_batches`` makes such a loader from the parts of
  another one, with its ``worker_init_fn``.
* ``gather_for_metrics`` gathers objects that are not tensors by joining the lists of all processes.
* The Trainer prepares a model that is evaluated before it is trained by ``prepare_model(model, evaluation_mode=True)``,
  which marks it as prepared, so that no wrapper is made when it is trained.
"""

from __future__ import annotations

import copy
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import accelerate
import torch.distributed as dist
from accelerate.data_loader import DataLoaderAdapter, prepare_data_loader
from accelerate.utils import DistributedType, gather, recursively_apply
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer

from ..base.checks import check_choice, check_int
from ..memory import Memory
from ..patching.replaced import replaced
from ..patching.running import Running
from ..ranks.mesh import set_timeouts
from .data import split_of
from .patch import Arguments, apply
from .randomness import SeedAlike, SharedRandom, share_random
from .state import Batches, Patch, Settings, patch_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


# Classes of TRL by their modules. The losses of the last three are no function of outputs.
_BASE = "trainer.base_trainer", "_BaseTrainer"
_SFT = "trainer.sft_trainer", "SFTTrainer"
_OUTSIDE = (
    ("trainer.distillation_trainer", "DistillationTrainer"),
    ("experimental.distillation.distillation_trainer", "DistillationTrainer"),
    ("experimental.async_distillation.async_distillation_trainer", "AsyncDistillationTrainer"),
)


_RANDOM = "random_states_of_loaders.pt"  # a file in checkpoints


class ParallelismConfig(accelerate.ParallelismConfig):
    """accelerate's ``ParallelismConfig`` for models that seqpar parallelizes: ``cp_size`` ranks share each sequence.

    Give it to ``TrainingArguments(parallelism_config=...)``, to a config of TRL, or to ``Accelerator``. No other code
    changes. ``accelerator.prepare``, which the Trainers call too, parallelizes the model. Ranks that share a sequence
    get the same batches. All other ranks are data-parallel, under DDP or with FSDP2 over all ranks. In TRL's
    preference and RL trainers, each rank has its own batches (``batches="per_rank"``).

    It also takes these arguments of ``parallelize``: strategy, layout, backend, softmax_scale, alibi_slopes,
    deterministic, gradients, loss_chunk, outputs, memory and the strategy's options. Use ``outputs="full"`` if you
    evaluate with ``compute_metrics``, which needs the logits.

    Args:
        cp_size: the number of ranks that share a sequence. -1: all ranks. By default the value of
            ``parallelism_config_cp_size`` in the YAML file of ``accelerate launch``, or 1.
        sp_size: accelerate's name for the number of ranks of Ulysses. ``sp_size=8`` is ``cp_size=8,
            strategy="ulysses"``. By default the value of ``parallelism_config_sp_size`` in the YAML file, or 1.
        batches: "shared": the ranks of a sequence get the same batches. "per_rank": every rank gets its own batches, as
            without sequence parallelism (see ``parallelize``). "auto": "per_rank" in all trainers of TRL except
            SFTTrainer and its subclasses, otherwise "shared".
        dp_replicate_size: the number of data-parallel replicas.
        dp_shard_size: the number of data-parallel ranks over which FSDP2 shards the weights, in addition to the ranks
            of the sequence. If you give neither size, ``ranks / cp_size`` ranks are data-parallel: FSDP2 shards the
            weights over them if it is used, otherwise they are replicas.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong value.

    Examples:
        >>> ParallelismConfig(cp_size=4, strategy="hybrid", ulysses_size=2).cp_size
        4
    """

    # False, so that accelerate and TRL do not start accelerate's own tensor, context or sequence parallelism.
    cp_enabled = sp_enabled = tp_enabled = False

    def __init__(
        self,
        cp_size: int | None = None,
        *,
        sp_size: int | None = None,
        batches: Batches | Literal["auto"] = "auto",
        dp_replicate_size: int | None = None,
        dp_shard_size: int | None = None,
        **arguments: Unpack[Arguments],
    ) -> None:
        if cp_size is None:
            cp_size = int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1"))
        if sp_size is None:
            sp_size = int(os.environ.get("PARALLELISM_CONFIG_SP_SIZE", "1"))
        check_int("cp_size", cp_size)
        check_int("sp_size", sp_size)
        if sp_size != 1:
            if cp_size != 1 or arguments.setdefault("strategy", "ulysses") != "ulysses":
                raise ValueError(
                    f"sp_size={sp_size}: it is the number of ranks of strategy='ulysses'; leave cp_size and strategy "
                    "out. Or give cp_size, the number of all ranks that share a sequence, with another strategy, such "
                    f"as strategy='hybrid', ulysses_size={sp_size}"
                )
            cp_size = sp_size
        if cp_size < 1 and cp_size != -1:
            raise ValueError(f"cp_size={cp_size}: expected at least 1, or -1 for all ranks")
        check_choice("batches", batches, ("auto", "shared", "per_rank"))
        self.batches: Batches | Literal["auto"] = batches
        self.settings = Settings.of(**arguments, batches="shared" if batches == "auto" else batches)
        # With a cp_size greater than 1, the parent class would check the requirements of accelerate's own backend.
        super().__init__(dp_replicate_size=dp_replicate_size, dp_shard_size=dp_shard_size, cp_size=1, sp_size=1)
        self.cp_size = cp_size
        # An Accelerator keeps a copy of this config, made by ``_for_accelerator``. Only the copy has the next values.
        self.sequence_ranks = 1  # the number of ranks that share a sequence
        self._original = self  # the config that the copy was made from
        self._group: ProcessGroup | None = None  # the ranks that share this rank's sequence

    def __repr__(self) -> str:
        return f"ParallelismConfig({', '.join(f'{name}={value!r}' for name, value in self.to_json().items())})"

    def to_json(self) -> dict[str, Any]:
        """The arguments by name, for the Trainer's reports."""
        sizes = {name: getattr(self, name) for name in ("cp_size", "dp_replicate_size", "dp_shard_size")}
        arguments = {**vars(self.settings), **self.settings.options, "batches": self.batches}
        del arguments["options"]
        return {**sizes, **{k: str(v) if isinstance(v, Memory) else v for k, v in arguments.items()}}

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """The mesh of the config that an Accelerator keeps. None for a config that no Accelerator has copied yet."""
        mesh: DeviceMesh | None = self.device_mesh
        return mesh

    def _validate_accelerator(self, accelerator: accelerate.Accelerator) -> None:
        """Replace the config of ``accelerator``, and its methods that prepare models and data loaders."""
        batches, trainer = self._original.batches, _maker.now
        if batches == "auto":
            batches = "per_rank" if _needs_per_rank_batches(trainer) else "shared"
        if self is not self._original and self.settings.batches == batches:
            config = self  # all Accelerators share one state: this is the config that the first one keeps
        else:
            config = self._original._for_accelerator(accelerator, batches)
        _check_trainer(trainer, config.sequence_ranks)
        accelerator.state.parallelism_config = config
        accelerator.state.device_mesh = config.device_mesh
        prepare_models(accelerator, partial(config._parallelize, trainer=trainer))
        if batches == "shared":
            _share_sequences(accelerator, trainer, config.sequence_ranks)

    def _for_accelerator(self, accelerator: accelerate.Accelerator, batches: Batches) -> ParallelismConfig:
        """The config that ``accelerator`` keeps: a copy with its mesh and sizes."""
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            raise ValueError(
                "parallelism_config: with DeepSpeed call seqpar.hf.parallelize(model) and use "
                "seqpar.hf.SequenceParallelMixin instead of ParallelismConfig; or use FSDP2"
            )
        if self.tp_size > 1:
            raise ValueError(
                f"tp_size={self.tp_size}: with tensor parallelism call seqpar.hf.parallelize(model, mesh=...) and use "
                "seqpar.hf.SequenceParallelMixin instead of ParallelismConfig"
            )
        world = accelerator.num_processes
        dp_size = self.dp_replicate_size * self.dp_shard_size  # 1 if both are left out
        cp_size = world // dp_size if self.cp_size == -1 else self.cp_size
        if cp_size < 1 or world % (cp_size * dp_size) or (dp_size > 1 and world != cp_size * dp_size):
            raise ValueError(
                f"cp_size={self.cp_size}, dp_replicate_size={self.dp_replicate_size}, "
                f"dp_shard_size={self.dp_shard_size}: expected a product equal to the number of processes, {world}; or "
                "leave the two dp sizes out and give a cp_size that divides the number of processes"
            )
        config = copy.copy(self)
        config.sequence_ranks = cp_size
        config.cp_size = cp_size if batches == "shared" else 1  # the ranks that the Trainer's sums count several times
        config.settings = replace(self.settings, batches=batches)
        if world == 1:
            return config
        if dp_size == 1 and accelerator.is_fsdp2:
            config.dp_shard_size = world // cp_size
        elif dp_size == 1:
            config.dp_replicate_size = world // cp_size
        sizes = config.dp_replicate_size, config.dp_shard_size, cp_size
        mesh = init_device_mesh(accelerator.device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard", "cp"))
        set_timeouts(mesh)
        config._group = mesh["cp"].get_group()
        if batches == "per_rank":
            # accelerate would give the same batch to all ranks of a mesh dimension "cp", so that the mesh has none.
            config.dp_shard_size *= cp_size
            dp = config.dp_replicate_size, config.dp_shard_size
            mesh = init_device_mesh(accelerator.device.type, dp, mesh_dim_names=("dp_replicate", "dp_shard"))
            set_timeouts(mesh, mesh["dp_shard"]._flatten("dp_shard_cp"))
        else:
            set_timeouts(mesh["dp_shard", "cp"]._flatten("dp_shard_cp"))
        config.device_mesh = mesh
        return config

    def _parallelize(self, model: nn.Module, trainer: Trainer | None = None) -> None:
        """Parallelize ``model``, unless it is parallelized already or contains no transformers model."""
        ranks, batches = self.sequence_ranks, self.settings.batches
        if batches == "shared":
            _check_loss_modules(trainer, ranks)
        patch = next((p for m in model.modules() if isinstance(p := getattr(m, "_seqpar", None), Patch)), None)
        if patch is None:
            if any(isinstance(m, PreTrainedModel) for m in model.modules()):
                apply(self.settings, model, None, self._group)
                patch_of(model).needs_wrapper = ranks > 1
        elif patch.ranks != ranks or (ranks > 1 and patch.settings.batches != batches):
            raise ValueError(
                f"model: it is parallelized over {patch.ranks} ranks with batches={patch.settings.batches!r}, but the "
                f"ParallelismConfig has cp_size={ranks} and batches={batches!r}; leave the call of parallelize out"
            )


_maker: Running[Trainer] = Running()  # that is making its Accelerator


def _note_maker(create: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
    """``create``, the method in which a Trainer makes its Accelerator, with ``_maker`` set meanwhile."""

    @wraps(create)
    def create_accelerator_and_postprocess(self: Trainer) -> None:
        with _maker(self):
            create(self)

    return create_accelerator_and_postprocess


def _sharing(make: Callable[..., None]) -> Callable[..., None]:
    """``make``, which initializes a loader of accelerate, also of one that was made from another loader's parts."""

    @wraps(make)
    def init(self: DataLoaderAdapter, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        share_random(self.base_dataloader)

    return init


DataLoaderAdapter.__init__ = _sharing(DataLoaderAdapter.__init__)


# accelerate gives a config the Accelerator, but not the Trainer that the Accelerator is made for.
Trainer.create_accelerator_and_postprocess = _note_maker(Trainer.create_accelerator_and_postprocess)


def _check_trainer(trainer: Trainer | None, ranks: int) -> None:
    if ranks > 1 and _is_of_trl(trainer, *_OUTSIDE):
        raise ValueError(
            f"{type(trainer).__name__}: it computes its loss from parts of the model, outside of the model's forward, "
            "where each rank has its own tokens only; train with cp_size=1, or use TRL's GKDTrainer"
        )


def _check_loss_modules(trainer: Trainer | None, ranks: int) -> None:
    """Raise an error if a loss of sentence-transformers gathers rows of all processes, and takes them for others."""
    losses = getattr(trainer, "loss", None)
    for loss in losses.values() if isinstance(losses, dict) else (losses,):
        for module in loss.modules() if isinstance(loss, nn.Module) else ():
            if ranks > 1 and getattr(module, "gather_across_devices", False):
                raise ValueError(
                    f"gather_across_devices=True: {type(module).__name__} would count the rows of a batch {ranks} "
                    f"times, because {ranks} processes share them; leave it out, or let each process have rows of its "
                    "own by ParallelismConfig(batches='per_rank')"
                )


def _is_of_trl(trainer: Trainer | None, *classes: tuple[str, str]) -> bool:
    """Whether ``trainer`` is of one of TRL's ``classes``, of which some may not be imported."""
    modules = [(sys.modules.get(f"trl.{module}"), name) for module, name in classes]
    return isinstance(trainer, tuple(getattr(module, name) for module, name in modules if hasattr(module, name)))


def _needs_per_rank_batches(trainer: Trainer | None) -> bool:
    """Whether ``trainer`` is a TRL trainer other than SFTTrainer and its subclasses.

    These trainers compute rewards and statistics for the samples of each process, and would count equal samples twice.
    """
    if not _is_of_trl(trainer, _BASE) or _is_of_trl(trainer, _SFT):
        return False
    if tuple(map(int, (installed := version("trl")).split(".")[:2])) < (1, 9):
        raise ImportError(
            f"{type(trainer).__name__} requires TRL 1.9 or later with sequence parallelism, but {installed} is "
            "installed: KTO's loss and GRPO's KL divergence would not be one device's; pip install --upgrade trl"
        )
    return True


def count_sequences_once(trainer: Trainer, sequence_ranks: int, shared: SharedRandom) -> None:
    """Make ``trainer`` count the sequence of several ranks once, in its losses, tokens and operations.

    With ``average_tokens_across_devices``, a Trainer divides a loss by the number of labels of all processes, and
    multiplies it by the number of processes. A term that is not divided by the labels, such as a router's loss, would
    be too large, and so would any term be too small if a subclass's ``compute_loss`` does not multiply. Instead, losses
    are divided by the mean number of labels of a process, and multiplied by nothing.

    The states of the ``shared`` random number generators become part of the trainer's checkpoints.
    """
    cls, across_devices = type(trainer), trainer.args.average_tokens_across_devices

    def mean_num_items(batch_samples: Any, device: Any) -> Any:
        with replaced(trainer.args, average_tokens_across_devices=False):
            items = cls._get_num_items_in_batch(trainer, batch_samples, device)  # divided by the ranks with this batch
        if items is None:
            return None
        items = items * (trainer.get_tp_size() * trainer.get_cp_size())
        return trainer.accelerator.gather(items).mean() if across_devices else items

    def without_factor(name: str) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            with replaced(trainer.args, average_tokens_across_devices=False):
                return getattr(cls, name)(trainer, *args, **kwargs)

        return step

    def track_num_input_tokens(inputs: Any) -> None:
        before = trainer.state.num_input_tokens_seen
        cls._track_num_input_tokens(trainer, inputs)
        trainer.state.num_input_tokens_seen = before + (trainer.state.num_input_tokens_seen - before) // sequence_ranks

    def floating_point_ops(inputs: Any) -> Any:
        return cls.floating_point_ops(trainer, inputs) / sequence_ranks

    def get_train_sampler(*args: Any) -> Any:
        sampler = cls._get_train_sampler(trainer, *args)
        if hasattr(sampler, "dp_size"):  # transformers' BatchRebalanceSampler, which deals rows to all processes
            given = "lengths", "effective_batch_size", "dp_size", "grad_accum", "shuffle", "seed", "rank", "drop_last"
            options = {name: getattr(sampler, name) for name in given}
            for name in ("effective_batch_size", "dp_size", "rank"):
                options[name] //= sequence_ranks
            sampler = type(sampler)(**options)
        return sampler

    def save_rng_state(folder: str) -> None:
        cls._save_rng_state(trainer, folder)
        _save_random(trainer.accelerator, shared, folder)

    def load_rng_state(checkpoint: str | None) -> None:
        cls._load_rng_state(trainer, checkpoint)
        if checkpoint is not None:
            shared.load(Path(checkpoint, _RANDOM))

    methods: dict[str, Any] = {
        "_get_num_items_in_batch": mean_num_items,
        "_track_num_input_tokens": track_num_input_tokens,
        "floating_point_ops": floating_point_ops,
        "_get_train_sampler": get_train_sampler,
        "_save_rng_state": save_rng_state,
        "_load_rng_state": load_rng_state,
    }
    if across_devices:
        methods |= {name: without_factor(name) for name in ("training_step", "prediction_step")}
    vars(trainer).update(methods)


def _save_random(accelerator: accelerate.Accelerator, shared: SharedRandom, folder: str) -> None:
    if accelerator.is_main_process:
        shared.save(Path(folder, _RANDOM))


def prepare_models(accelerator: accelerate.Accelerator, prepare: Any) -> None:
    """Make ``accelerator`` call ``prepare`` with each model first, and prepare evaluated models for training too."""
    original_prepare, original_prepare_model = accelerator.prepare, accelerator.prepare_model
    evaluated: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def prepare_all(*objects: Any, **kwargs: Any) -> Any:
        modules = [x for x in objects if isinstance(x, nn.Module)]
        for x in modules:
            prepare(x)
        prepared = original_prepare(*objects, **kwargs)
        for x in modules:
            _note_wrapper(x)
        return prepared

    def prepare_model(model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        prepare(model)
        if evaluation_mode:
            evaluated.add(model)
        elif model in evaluated:
            evaluated.remove(model)
            accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # the forward without mixed precision
            accelerator._models = [m for m in accelerator._models if m is not model]
            vars(model).pop("_is_accelerate_prepared", None)
        prepared = original_prepare_model(model, device_placement, evaluation_mode)
        if not evaluation_mode:
            _note_wrapper(model)
        return prepared

    accelerator.prepare, accelerator.prepare_model = prepare_all, prepare_model


def _note_wrapper(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(patch := getattr(module, "_seqpar", None), Patch):
            patch.needs_wrapper = False


def _share_sequences(accelerator: accelerate.Accelerator, trainer: Trainer | None, sequence_ranks: int) -> None:
    """Let ``sequence_ranks`` consecutive ranks share each sequence, for ``accelerator`` and its ``trainer``.

    Data loaders give these ranks the same batches, and ``gather_for_metrics`` returns the values of each batch once.
    """
    if sequence_ranks == 1:
        return
    original_gather_for_metrics = accelerator.gather_for_metrics
    # Samplers draw the same order on all ranks, also of other sequences, and then each sequence takes its rows.
    shared = SharedRandom(dist.group.WORLD)
    keeps_random: list[Any] = []  # the hooks with which the accelerator saves and loads the states of ``shared``
    is_first = accelerator.process_index % sequence_ranks == 0

    def prepare_loader(loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None) -> Any:
        if not keeps_random:  # now, because the Accelerator is complete
            save, load = accelerator.register_save_state_pre_hook, accelerator.register_load_state_pre_hook
            keeps_random.append(save(lambda models, weights, folder: _save_random(accelerator, shared, folder)))
            keeps_random.append(load(lambda models, folder: shared.load(Path(folder, _RANDOM))))
        if not getattr(loader, "_is_accelerate_prepared", False):
            loader = _prepare_loader(accelerator, loader, sequence_ranks, shared, device_placement)
        if loader not in accelerator._dataloaders:
            accelerator._dataloaders.append(loader)
        return loader

    def rows_of_first_ranks(x: Tensor) -> Any:
        gathered = gather(x)  # [ranks * rows, ...]
        return gathered.unflatten(0, (dist.get_world_size(), -1))[::sequence_ranks].flatten(0, 1)

    def gather_once(data: Any) -> Any:
        return recursively_apply(rows_of_first_ranks, data)

    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object or not _is_of_tensors(input_data):
            # the lists of all processes are joined
            return original_gather_for_metrics(input_data if is_first else [], use_gather_object=True)
        with replaced(accelerator, gather=gather_once):  # ``original_gather_for_metrics`` calls it
            return original_gather_for_metrics(input_data)

    accelerator.prepare_data_loader, accelerator.gather_for_metrics = prepare_loader, gather_for_metrics
    if trainer is not None:
        count_sequences_once(trainer, sequence_ranks, shared)


def _is_of_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda x: x, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _prepare_loader(
    accelerator: accelerate.Accelerator, loader: DataLoader[Any], sequence_ranks: int, shared: SharedRandom,
    device_placement: bool | None,
) -> Any:  # fmt: skip
    """The data loader of this rank that accelerate would make if the ranks of a sequence were one process."""
    if accelerator.dataloader_config.dispatch_batches:
        raise ValueError(
            "dispatch_batches=True: accelerate would send different batches to the ranks of one sequence; leave it "
            "out, so that every rank loads its batches itself"
        )
    split = split_of(loader)
    if split is not None and split.size > 1:
        raise ValueError(
            f"loader: its {split.owner} has {split.name}={split.size}, but accelerate splits the rows itself, so that "
            f"they would be split twice; leave the {split.owner} out"
        )
    replica = accelerator.process_index // sequence_ranks
    seeds = SharedRandom(shared.group)  # samplers take seeds here
    seeds.share()
    with seeds, replaced(loader, worker_init_fn=SeedAlike(loader.worker_init_fn, replica, shared)):
        return _prepare_for(accelerator, loader, sequence_ranks, replica, device_placement)


def _prepare_for(
    accelerator: accelerate.Accelerator, loader: DataLoader[Any], sequence_ranks: int, replica: int, placement: Any
) -> Any:
    config = accelerator.dataloader_config
    return prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=accelerator.num_processes // sequence_ranks,
        process_index=replica,
        split_batches=config.split_batches,
        put_on_device=accelerator.device_placement if placement is None else placement,
        rng_types=accelerator.rng_types.copy() if accelerator.rng_types else None,
        dispatch_batches=False,
        even_batches=config.even_batches,
        use_seedable_sampler=config.use_seedable_sampler,
        data_seed=config.data_seed,
        non_blocking=config.non_blocking,
        use_stateful_dataloader=config.use_stateful_dataloader,
    )


# The mixin's methods call methods of the Trainer that follows it in the bases, which a type checker does not know.
_Mixin: Any = object


class SequenceParallelMixin(_Mixin):
    """Makes any Trainer work with a parallelized model: ``class Mine(SequenceParallelMixin, SFTTrainer)``.

    Ranks along dp get different batches. The ranks of a sequence get the same batches, which the model shards. The
    wrapper that the Trainer makes (DDP or FSDP over all ranks) averages the gradients. Use the mixin instead of
    ``ParallelismConfig`` for a model that you have parallelized yourself: over a mesh with tensor parallelism, or for
    DeepSpeed.

    Raises:
        ValueError: the model is not parallelized; the number of ranks is not a multiple of the number of ranks of a
            sequence; or ``compute_metrics`` needs logits that the model does not return.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        patch = self._patch
        patch.loss_ranks = patch.group  # the Trainer counts the labels of the replicas
        if self.compute_metrics is not None and not self.args.prediction_loss_only and patch.settings.outputs != "full":
            raise ValueError(
                "compute_metrics: it needs the logits of all tokens; call parallelize with outputs='full', or set "
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
        config = ParallelismConfig(cp_size=1, batches="shared")
        config.sequence_ranks = self.args.world_size // _data_parallel(patch, self.args.world_size)
        config.cp_size = config.sequence_ranks // self.get_tp_size()
        _check_trainer(self, config.sequence_ranks)
        prepare_models(self.accelerator, lambda model: _check_loss_modules(self, config.sequence_ranks))
        self.accelerator.state.parallelism_config = config
        _share_sequences(self.accelerator, self, config.sequence_ranks)
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )


class SequenceParallelTrainer(SequenceParallelMixin, Trainer):
    """``transformers.Trainer`` for a model that ``seqpar.hf.parallelize`` has patched."""


def _data_parallel(patch: Patch, world: int) -> int:
    """The number of groups of ranks that get different batches, among ``world`` ranks."""
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
