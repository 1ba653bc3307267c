"""One rank's training run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..comm.trace import trace
from ..layers import sync_gradients
from ..layers.sharded_weights import weight_shards
from ..mesh import init_mesh, rank_in, sequence_group, size_of
from ..sharding import shard
from ..strategies import STRATEGIES, resolve
from .checkpoint import check_same_run, save_checkpoint
from .config import DTYPES, TrainConfig
from .data import Corpus, MaskChoice, make_batch
from .errors import CommandError
from .launch import under_launcher
from .memory import PeakMemory
from .model import ByteLlama, loss_share

_WARMUP_STEPS = 10
_CLIP = 1.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class World:
    """Who takes part: the sequence group (None: this process alone) and this rank's device."""

    group: ProcessGroup | None
    device: torch.device

    @property
    def rank(self) -> int:
        return rank_in(self.group)

    @property
    def size(self) -> int:
        return size_of(self.group)

    @staticmethod
    def join(device: str, ranks: int) -> World:
        """Start the process group where a launcher started several ranks."""
        kind = device
        if device == "auto":
            kind = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
        group = sequence_group(init_mesh(ring=-1, device_type=kind)) if under_launcher() else None
        return World(group, torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu"))

    def sum(self, *values: float) -> list[float]:
        """Each value summed over the ranks."""
        if self.group is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.group)
        return [float(x) for x in total.tolist()]

    def share(self, make: Callable[[], _T]) -> _T:
        """What ``make`` gives on rank 0, on every rank."""
        if self.group is None:
            return make()
        box: list[Any] = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        value: _T = box[0]
        return value

    def leave(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)
            dist.destroy_process_group()


@dataclass(frozen=True)
class Step:
    """What one step did. ``loss`` is that of the whole batch; bytes are of all ranks together.

    ``attention_bytes`` moved inside forward and backward, ``gradient_bytes`` in summing the weights' gradients.
    """

    step: int
    loss: float
    gradient_norm: float
    seconds: float
    attention_bytes: int
    gradient_bytes: int


class Training:
    """Model, optimizer and data of one rank, and the steps done so far."""

    def __init__(self, config: TrainConfig, corpus: Corpus, world: World) -> None:
        self.config = config
        self.corpus = corpus
        self.world = world
        self.losses: list[float] = []
        self.choice = MaskChoice.parse(config.mask)
        if config.strategy in STRATEGIES:
            resolve(config.strategy, None, world.group, config.strategy_options)  # refuses sizes that do not fit
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        self.memory = PeakMemory(world.device)
        dtype = DTYPES[config.dtype]
        # Half types: float32 weights, and autocast.
        self.half = dtype.itemsize < 4
        self.model = ByteLlama(
            config.shape,
            config.strategy,
            group=world.group if world.size > 1 else None,
            layout=config.layout,
            backend=config.backend,
            dtype=torch.float32 if self.half else dtype,
            device=world.device,
            **config.strategy_options,
        )
        self.model.initialise(config.seed)
        self.shards = weight_shards(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1)
        torch.manual_seed(config.seed)  # attention draws its dropout's seeds from here, on rank 0

    @property
    def parameters(self) -> int:
        sizes = ((p, self.shards.get(p)) for p in self.model.parameters())
        return sum(p.numel() if s is None else prod(s.full_shape(p)) for p, s in sizes)

    @property
    def defining(self) -> dict[str, Any]:
        return {**self.config.defining, "text": self.corpus.digest}

    def run(self) -> Iterator[Step]:
        """The steps that remain.

        Raises:
            CommandError: the loss is no longer finite.
        """
        while len(self.losses) < self.config.steps:
            step = self._step()
            if not torch.isfinite(torch.tensor(step.loss)):
                raise CommandError(f"the loss of step {step.step} is {step.loss}; choose a lower --lr")
            self.losses.append(step.loss)
            yield step

    def _step(self) -> Step:
        config, world, number = self.config, self.world, len(self.losses)
        start = time.perf_counter()
        batch = make_batch(self.corpus, self.choice, config.batch, config.seq_len, config.seed, number)
        tokens, labels = (self._local(x) for x in (batch.tokens, batch.labels))
        for parameter_group in self.optimizer.param_groups:
            parameter_group["lr"] = config.lr * min(1.0, (number + 1) / _WARMUP_STEPS)
        self.optimizer.zero_grad()
        autocast = torch.autocast(world.device.type, DTYPES[config.dtype]) if self.half else nullcontext()
        with trace() as attention:
            with autocast:
                logits = self.model(tokens, batch.mask, config.seq_len)
            loss = loss_share(logits, labels, batch.count)
            loss.backward()
        with trace() as gradients:
            sync_gradients(self.model, group=world.group)
        norm = nn.utils.get_total_norm([self._whole(p, p.grad) for p in self.model.parameters() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(self.model.parameters(), _CLIP, norm)
        self.optimizer.step()
        total, attention_bytes, gradient_bytes = world.sum(loss.item(), attention.bytes_sent, gradients.bytes_sent)
        seconds = time.perf_counter() - start
        return Step(number, total, float(norm), seconds, int(attention_bytes), int(gradient_bytes))

    def _local(self, x: Tensor) -> Tensor:
        if self.world.group is not None:
            x = shard(x, dim=1, group=self.world.group, layout=self.config.layout)  # type: ignore[arg-type]
        return x.to(self.world.device)

    def save(self, path: Path) -> None:
        """Write a checkpoint of the whole weights and optimizer. All ranks call it, rank 0 writes."""
        named = dict(self.model.named_parameters())
        state = {
            "defining": self.defining,
            "corpus": {"name": self.corpus.name, "data": self.corpus.data, "starts": self.corpus.starts},
            "losses": self.losses,
            "model": {name: self._whole(p, p.detach()) for name, p in named.items()},
            "optimizer": {
                name: {key: self._whole(p, value) if value.shape == p.shape else value
                       for key, value in self.optimizer.state[p].items()}
                for name, p in named.items()
            },
            "rng": torch.get_rng_state(),
        }  # fmt: skip
        if self.world.rank == 0:
            save_checkpoint(path, state)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what ``save`` wrote, under any strategy and number of ranks.

        Raises:
            ValueError: the checkpoint is of another run, or all its steps are done.
        """
        check_same_run(state["defining"], self.defining)
        if len(state["losses"]) >= self.config.steps:
            raise ValueError(f"--resume: {len(state['losses'])} steps are done already; give a larger --steps")
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self._share(p, state["model"][name]))
                self.optimizer.state[p] = {
                    key: value.to(p.device) if key != "step" else value
                    for key, value in ((k, self._share(p, v)) for k, v in state["optimizer"][name].items())
                }
        self.losses = list(state["losses"])
        torch.set_rng_state(state["rng"])

    def _whole(self, parameter: Tensor, value: Tensor) -> Tensor:
        """A whole gradient or moment of a parameter that tensor parallelism shards; all ranks call it together."""
        shard = self.shards.get(parameter)
        return value if shard is None else shard.all_gather(value)

    def _share(self, parameter: Tensor, value: Tensor) -> Tensor:
        """This rank's part of what ``_whole`` gave."""
        shard = self.shards.get(parameter)
        return value if shard is None or value.dim() == 0 else shard.to_local(value).clone()
