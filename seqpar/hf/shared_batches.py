"""Ranks that share a sequence get the same batches from accelerate's loaders, and a Trainer counts each sequence once.

This file relies on undocumented behaviour of accelerate and the Trainer, which ``tests/hf/test_accelerate.py`` tests.

* ``Accelerator.prepare`` calls ``prepare_model`` and ``prepare_data_loader``, and ``gather_for_metrics`` calls
  ``gather``, as attributes of the Accelerator, so that an instance attribute replaces the method.
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

import weakref
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import accelerate
import torch.distributed as dist
from accelerate.data_loader import DataLoaderAdapter, prepare_data_loader
from accelerate.utils import gather, recursively_apply
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from ..patching.replaced import replaced
from .data import split_of
from .randomness import SeedAlike, SharedRandom, share_random
from .state import Patch

_RANDOM = "random_states_of_loaders.pt"  # a file in checkpoints


def _sharing(make: Callable[..., None]) -> Callable[..., None]:
    """``make``, which initializes a loader of accelerate, also of one that was made from another loader's parts."""

    @wraps(make)
    def init(self: DataLoaderAdapter, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        share_random(self.base_dataloader)

    return init


DataLoaderAdapter.__init__ = _sharing(DataLoaderAdapter.__init__)


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


def share_sequences(accelerator: accelerate.Accelerator, trainer: Trainer | None, sequence_ranks: int) -> None:
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
