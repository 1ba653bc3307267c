"""The training loop of one rank, and the state that a checkpoint saves.

Shapes: ``b`` batch, ``s`` this rank's tokens, ``v`` vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...comm.trace import trace
from ...layers import clip_grad_norm_, sync_gradients
from ...layers.sharded_weights import weight_shards
from ...sharding import Sharding
from ...strategies import STRATEGIES, resolve
from ..comparison.machine import PeakMemory
from ..launch import CommandError
from .checkpoint import check_same_run, save_checkpoint
from .config import DTYPES, TrainConfig
from .data import Corpus, MaskChoice, make_batch
from .model import ByteLlama, partial_loss
from .world import World

_WARMUP_STEPS = 10
_MAX_NORM = 1.0


@dataclass(frozen=True)
class StepResult:
    """The measurements of one step.

    Attributes:
        step: the number of the step, from 0.
        loss: the loss of the whole batch.
        gradient_norm: the norm of all gradients together, before they are clipped.
        seconds: seconds of the step.
        attention_bytes: bytes sent in forward and backward, summed over the ranks.
        gradient_bytes: bytes sent to sum the weights' gradients over the ranks, summed over the ranks.
    """

    step: int
    loss: float
    gradient_norm: float
    seconds: float
    attention_bytes: int
    gradient_bytes: int


class Training:
    """The model, the optimizer and the data of one rank, and the losses of the steps so far.

    Args:
        config: the options, already checked.
        corpus: the text.
        world: the ranks.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, world: World) -> None:
        self.config = config
        self.corpus = corpus
        self.world = world
        self.losses: list[float] = []
        self.mask = MaskChoice.parse(config.mask)
        self.sharding = Sharding(config.seq_len, config.layout, group=world.group)
        if config.strategy in STRATEGIES:
            resolve(
                config.strategy, None, world.group, config.strategy_options
            )  # raises an error if a size does not fit
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        self.memory = PeakMemory(world.device)
        dtype = DTYPES[config.dtype]
        # With a 16-bit dtype the model runs under autocast, and the weights are float32.
        self.autocast = dtype.itemsize < 4
        self.model = ByteLlama(
            config.shape,
            config.strategy,
            group=world.group if world.size > 1 else None,
            backend=config.backend,
            dtype=torch.float32 if self.autocast else dtype,
            device=world.device,
            **config.strategy_options,
        )
        self.model.reset_parameters(config.seed)
        self.shards = weight_shards(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1)
        torch.manual_seed(config.seed)  # rank 0 draws the seeds of dropout from this generator

    @property
    def parameters(self) -> int:
        """The number of weights of the full model, of all tensor-parallel ranks together."""
        sizes = ((p, self.shards.get(p)) for p in self.model.parameters())
        return sum(p.numel() if s is None else prod(s.full_shape(p)) for p, s in sizes)

    @property
    def fixed_options(self) -> dict[str, Any]:
        """The values that must not change when a run is resumed: options, and a checksum of the text."""
        return {**self.config.fixed_options, "text": self.corpus.digest}

    def run(self) -> Iterator[StepResult]:
        """Run the remaining steps, and yield the result of each.

        Raises:
            CommandError: the loss is not finite.
        """
        while len(self.losses) < self.config.steps:
            result = self._step()
            if not isfinite(result.loss):
                raise CommandError(f"the loss of step {result.step + 1} is {result.loss}; choose a lower --lr")
            self.losses.append(result.loss)
            yield result

    def _step(self) -> StepResult:
        """Run the next step."""
        config, world, number = self.config, self.world, len(self.losses)
        start = time.perf_counter()
        batch = make_batch(self.corpus, self.mask, config.batch, config.seq_len, config.seed, number)
        tokens, labels = (self.sharding.shard(x).to(world.device) for x in (batch.tokens, batch.labels))  # [b, s]
        for parameter_group in self.optimizer.param_groups:
            parameter_group["lr"] = config.lr * min(1.0, (number + 1) / _WARMUP_STEPS)
        self.optimizer.zero_grad()
        autocast = torch.autocast(world.device.type, DTYPES[config.dtype]) if self.autocast else nullcontext()
        with trace() as attention:
            with autocast:
                logits = self.model(tokens, batch.mask, self.sharding)  # [b, s, v]
            loss = partial_loss(logits, labels, batch.count)
            loss.backward()
        with trace() as gradients:
            sync_gradients(self.model, group=world.group)
        norm = clip_grad_norm_(self.model, _MAX_NORM, group=world.group)
        self.optimizer.step()
        total_loss, attention_bytes, gradient_bytes = world.all_reduce(
            loss.item(), attention.bytes_sent, gradients.bytes_sent
        )
        seconds = time.perf_counter() - start
        return StepResult(number, total_loss, float(norm), seconds, int(attention_bytes), int(gradient_bytes))

    def save(self, path: Path) -> None:
        """Write a checkpoint of the full weights and of the optimizer's state. All ranks call this; rank 0 writes."""
        # Under tp_sp the weights and the moments are gathered from all ranks, so all ranks must get here.
        weights = {
            name: weight.full_tensor() if isinstance(weight, DTensor) else weight
            for name, weight in self.model.state_dict().items()
        }
        moments = {
            name: {key: self._full(p, x) if x.shape == p.shape else x for key, x in self.optimizer.state[p].items()}
            for name, p in self.model.named_parameters()
        }
        if self.world.rank != 0:
            return
        corpus = {"name": self.corpus.name, "data": self.corpus.data, "starts": self.corpus.starts}
        state = {
            "fixed_options": self.fixed_options,
            "corpus": corpus,
            "losses": self.losses,
            "model": weights,
            "optimizer": moments,
            "rng": torch.get_rng_state(),
        }
        save_checkpoint(path, state)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that ``save`` has written under any strategy and number of ranks.

        Raises:
            ValueError: the checkpoint is of another run, or has all the steps of this run already.
        """
        check_same_run(state["fixed_options"], self.fixed_options)
        if len(state["losses"]) >= self.config.steps:
            raise ValueError(f"--resume: {len(state['losses'])} steps are done already; choose a larger --steps")
        self.model.load_state_dict(state["model"])
        for name, p in self.model.named_parameters():
            moments = {key: self._local(p, x) for key, x in state["optimizer"][name].items()}
            # AdamW keeps its step count on the CPU, and the moments beside the weight.
            self.optimizer.state[p] = {k: x if k == "step" else x.to(p.device) for k, x in moments.items()}
        self.losses = list(state["losses"])
        torch.set_rng_state(state["rng"])

    def _full(self, parameter: Tensor, local: Tensor) -> Tensor:
        """The full gradient or moment of a parameter, from each rank's slice. All ranks call it together."""
        shard = self.shards.get(parameter)
        return local if shard is None else shard.all_gather(local)

    def _local(self, parameter: Tensor, full: Tensor) -> Tensor:
        """This rank's slice of a full gradient or moment of a parameter."""
        shard = self.shards.get(parameter)
        return full if shard is None or full.dim() == 0 else shard.to_local(full).clone()
