"""The options of a training run. The field of an option has its type, default, help text and constraints."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import torch

from ...checks import check_choice, check_int, check_number
from ...kernels import BackendName, check_backend
from ...layers.factory import LAYERS
from ...layout import LAYOUTS, Layout
from ...strategies import Comm, StrategyOptions
from .data import MASKS, MaskChoice
from .model import ByteLlama, LayerStrategy, ModelShape

DeviceName = Literal["auto", "cpu", "cuda"]
DTypeName = Literal["float32", "bfloat16", "float64"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Option:
    """An option of ``seqpar train``, without its type and default.

    Attributes:
        panel: the section of ``seqpar train --help`` that lists the option.
        help: the help text of the option.
        flags: the names of the option on the command line; by default one made from the name of the field.
        least: the smallest int that is allowed; None for no limit.
        may_change: whether a resumed run may have another value. It may if the losses stay the same apart from
            rounding.
    """

    panel: Literal["Strategy", "Training", "Model", "Run"]
    help: str
    flags: tuple[str, ...] = ()
    least: int | None = None
    may_change: bool = False


def _strategy(help: str) -> Option:
    return Option("Strategy", help, may_change=True)


def _run(help: str, *flags: str, least: int | None = None) -> Option:
    return Option("Run", help, flags, least, may_change=True)


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Each field with an ``Option`` is an option of ``seqpar train``."""

    strategy: Annotated[LayerStrategy, _strategy("How a sequence is sharded over the ranks.")] = "ring"
    layout: Annotated[Layout, _strategy("Which tokens each rank holds.")] = "zigzag"
    comm: Annotated[Comm | None, _strategy("How context_parallel communicates.")] = None
    ulysses_size: Annotated[int | None, _strategy("Ranks in each all-to-all of hybrid or a2a+p2p.")] = None
    backend: Annotated[BackendName, _strategy("Attention backend; `seqpar doctor` lists those that run here.")] = "auto"

    text: Annotated[
        str | None, Option("Training", "Text file. By default the source files of this package.", may_change=True)
    ] = None
    mask: Annotated[str, Option("Training", f"{MASKS}.")] = "causal"
    seq_len: Annotated[int, Option("Training", "Tokens (bytes) of a full sequence.", least=1)] = 2048
    batch: Annotated[int, Option("Training", "Sequences in each step.", least=1)] = 1
    steps: Annotated[
        int, Option("Training", "Total number of steps, including those before --resume.", least=1, may_change=True)
    ] = 100
    lr: Annotated[float, Option("Training", "Learning rate, after a short warm-up.")] = 1e-3
    seed: Annotated[int, Option("Training", "Seed of weights, data and dropout.", least=0)] = 0

    layers: Annotated[int, Option("Model", "Transformer layers.", least=1)] = 4
    hidden: Annotated[int, Option("Model", "Width of the hidden states.", least=1)] = 256
    heads: Annotated[int, Option("Model", "Query heads.", least=1)] = 8
    kv_heads: Annotated[int, Option("Model", "KV heads, a divisor of the query heads.", least=1)] = 4
    tied: Annotated[
        bool, Option("Model", "Share one weight between the embedding and the head.", ("--tied/--untied",))
    ] = True
    dropout: Annotated[float, Option("Model", "Probability of dropping an attention weight.")] = 0.0
    dtype: Annotated[DTypeName, Option("Model", "Precision. bfloat16 means autocast with float32 weights.")] = "float32"

    out: Annotated[str, _run("Folder for checkpoint, loss curve, CSV and summary.")] = "seqpar-train"
    save_every: Annotated[int, _run("Steps between checkpoints; with 0, one at the end only.", least=0)] = 0
    resume: Annotated[
        bool, _run("Continue from OUT/checkpoint.pt, under any strategy and number of ranks.", "--resume")
    ] = False
    device: Annotated[DeviceName, _run("Where to compute. auto is cuda if each rank has a GPU.")] = "auto"
    deterministic: Annotated[bool, _run("Use deterministic algorithms only.", "--deterministic")] = False
    deadline: Annotated[float, _run("Seconds after which the ranks started here are stopped.")] = 3600.0
    plot: Annotated[bool, _run("Draw the loss curve.")] = True
    title: str = ""  # the title of the progress display and of the plot, which ``seqpar demo`` sets

    @classmethod
    @cache
    def options(cls) -> dict[str, tuple[Any, Option]]:
        """For each option, by the name of its field: its type and its ``Option``."""
        hints = get_type_hints(cls, include_extras=True).items()
        return {name: get_args(hint) for name, hint in hints if get_origin(hint) is Annotated}

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model."""
        return ModelShape(self.layers, self.hidden, self.heads, self.kv_heads, self.tied, self.dropout)

    @property
    def strategy_options(self) -> StrategyOptions:
        """The options of the strategy, as ``seqpar.ParallelAttention`` takes them."""
        options: StrategyOptions = {}
        if self.comm is not None:
            options["comm"] = self.comm
        if self.ulysses_size is not None:
            options["ulysses_size"] = self.ulysses_size
        return options

    @property
    def fixed_options(self) -> dict[str, Any]:
        """The options whose values must not change when a run is resumed."""
        return {name: getattr(self, name) for name, (_, option) in self.options().items() if not option.may_change}

    def check(self, ranks: int, local_ranks: int) -> None:
        """Check every option by itself and together with the others.

        Args:
            ranks: the number of ranks of the run.
            local_ranks: the number of ranks on this machine.

        Raises:
            TypeError: an option has the wrong type.
            ValueError: the value of an option is not allowed, or does not fit the other options.
        """
        check_choice("strategy", self.strategy, LAYERS)
        check_choice("layout", self.layout, LAYOUTS)
        check_choice("dtype", self.dtype, DTYPES)
        check_backend(self.backend)
        check_choice("device", self.device, get_args(DeviceName))
        for name, (_, option) in self.options().items():
            if option.least is not None:
                check_int(name, getattr(self, name), option.least)
        for name in ("lr", "deadline"):
            if check_number(name, getattr(self, name)) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected a positive number")
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"heads={self.heads}: hidden={self.hidden} must be a multiple of 2 * heads (head_dim is even)"
            )
        if self.strategy == "local" and ranks > 1:
            raise ValueError(
                f"strategy='local' with {ranks} ranks: it runs on one rank; choose another strategy, or --nproc 1"
            )
        if self.device == "cuda" and (gpus := torch.cuda.device_count()) < local_ranks:
            raise ValueError(
                f"device='cuda': {gpus} GPUs on {socket.gethostname()} for its {local_ranks} ranks; start fewer ranks "
                "there, or use --device cpu"
            )
        MaskChoice.parse(self.mask)
        # The model checks the remaining options. On the meta device its weights take no memory.
        ByteLlama(self.shape, self.strategy, backend=self.backend, device="meta", **self.strategy_options)
