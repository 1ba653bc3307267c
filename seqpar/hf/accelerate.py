"""``ParallelismConfig``: one object with which the Trainer, TRL and accelerate loops train on sharded sequences.

For accelerate and the Trainer, the ranks that share a sequence are data-parallel ranks with the same batch. Each of
them returns the loss of the full batch, because the model shards the batch itself. A sum over all processes counts each
sequence once for every rank that shares it. A mean over all processes is still correct, because its numerator and its
denominator contain the same factor.

accelerate has no registry for such backends. This file relies on undocumented behaviour of accelerate, the Trainer and
TRL, which ``tests/hf/test_accelerate.py`` tests.

* ``Accelerator.__init__`` calls the config's ``get_device_mesh`` and then its ``_validate_accelerator(accelerator)``,
  and keeps the config and the mesh in ``accelerator.state``.
* A Trainer makes its Accelerator in ``create_accelerator_and_postprocess``, which this file wraps.
* accelerate uses its own tensor or context parallelism if ``tp_enabled``, ``cp_enabled`` or ``sp_enabled`` is true.
* FSDP2 shards the weights over the mesh dimensions ``fsdp_dim_names``.
* The Trainer divides counts by its ``get_tp_size()`` and by the config's ``cp_size`` and ``sp_size``, and TRL divides
  them by the config's ``tp_size``. In the config that an Accelerator keeps, ``cp_size`` is the number of ranks that get
  the same batches. The other two are 1.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

import accelerate
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel, Trainer

from ..base.checks import check_choice, check_int
from ..memory import Memory
from ..patching.running import Running
from ..ranks.mesh import set_timeouts
from .patch import ParallelizeArguments, apply
from .shared_batches import prepare_models, share_sequences
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


class ParallelismConfig(accelerate.ParallelismConfig):
    """accelerate's ``ParallelismConfig`` for models that seqpar parallelizes: ``cp_size`` ranks share each sequence.

    Give it to ``TrainingArguments(parallelism_config=...)``, to a config of TRL, or to ``Accelerator``. No other code
    changes. ``accelerator.prepare``, which the Trainers call too, parallelizes the model. Ranks that share a sequence
    get the same batches. All other ranks are data-parallel, under DDP or with FSDP2 over all ranks. In TRL's
    preference and RL trainers, each rank has its own batches (``batches="per_rank"``).

    It also takes these arguments of ``parallelize``: strategy, layout, backend, softmax_scale, alibi_slopes,
    deterministic, gradients, loss_chunk, outputs, memory, share_prompts, split_towers and the strategy's options. Use
    ``outputs="full"`` if you evaluate with ``compute_metrics``, which needs the logits.

    Args:
        cp_size: the number of ranks that share a sequence. -1: all ranks. By default the value of
            ``parallelism_config_cp_size`` in the YAML file of ``accelerate launch``, or 1.
        sp_size: accelerate's name for the number of ranks of Ulysses. ``sp_size=8`` is ``cp_size=8,
            strategy="ulysses"``, and ``sp_size=4, cp_size=2`` is ``cp_size=8, strategy="hybrid", ulysses_size=4``: 4
            ranks of Ulysses in each of 2 places of a ring. By default the value of ``parallelism_config_sp_size`` in
            the YAML file, or 1.
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
        **arguments: Unpack[ParallelizeArguments],
    ) -> None:
        if cp_size is None:
            cp_size = int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1"))
        if sp_size is None:
            sp_size = int(os.environ.get("PARALLELISM_CONFIG_SP_SIZE", "1"))
        check_int("cp_size", cp_size)
        check_int("sp_size", sp_size)
        if sp_size != 1:
            strategy: Literal["ulysses", "hybrid"] = "ulysses" if cp_size == 1 else "hybrid"
            same = arguments.setdefault("strategy", strategy) == strategy
            if strategy == "hybrid":
                same = same and arguments.setdefault("ulysses_size", sp_size) == sp_size
            if not same or (sp_size < 1 and (sp_size != -1 or cp_size != 1)):
                raise ValueError(
                    f"sp_size={sp_size}, cp_size={cp_size}: sp_size is the number of ranks of Ulysses: alone "
                    "strategy='ulysses', and beside cp_size strategy='hybrid' over sp_size * cp_size ranks; leave "
                    "strategy and ulysses_size out. Or give cp_size alone, the number of ranks that share a sequence"
                )
            cp_size = sp_size if cp_size == 1 else -1 if cp_size == -1 else cp_size * sp_size
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
            share_sequences(accelerator, trainer, config.sequence_ranks)

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
        patch.loss_ranks = patch.sequence_group  # the Trainer counts the labels of the replicas
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
        share_sequences(self.accelerator, self, config.sequence_ranks)
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
    if patch.sequence_group is None or patch.ranks == 1:
        return world
    members = dist.get_process_group_ranks(patch.sequence_group)
    if members != list(range(members[0], members[0] + patch.ranks)):
        raise ValueError(f"group: its ranks {members} are not consecutive; give parallelize a mesh with a dp dimension")
    return world // patch.ranks
