"""The options of a training run, checked."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..checks import check_choice, check_int, check_number
from ..layers.factory import LAYERS
from .data import MaskChoice
from .model import ByteLlama, ModelShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
DEVICES = ("auto", "cpu", "cuda")

# What may differ between a run and the one that resumes it: how it is computed, not what.
_FREE = {"strategy", "layout", "comm", "ulysses_size", "backend", "device", "steps", "out", "save_every", "deadline",
         "resume", "deterministic", "plot", "title", "text"}  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """One training run; the names are the options' of ``seqpar train``."""

    strategy: str = "ring"
    layout: str = "zigzag"
    comm: str | None = None
    ulysses_size: int | None = None
    backend: str = "auto"
    device: str = "auto"
    text: str | None = None
    mask: str = "causal"
    seq_len: int = 2048
    batch: int = 1
    steps: int = 100
    lr: float = 1e-3
    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    tied: bool = True
    dtype: str = "float32"
    dropout: float = 0.0
    seed: int = 0
    deterministic: bool = False
    out: str = "seqpar-train"
    save_every: int = 0
    resume: bool = False
    deadline: float = 3600.0
    plot: bool = True
    title: str = ""

    @property
    def shape(self) -> ModelShape:
        return ModelShape(self.layers, self.hidden, self.heads, self.kv_heads, self.tied, self.dropout)

    @property
    def strategy_options(self) -> dict[str, Any]:
        given = {"comm": self.comm, "ulysses_size": self.ulysses_size}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def defining(self) -> dict[str, Any]:
        """The options that say what is trained; a resumed run must have the same."""
        return {name: value for name, value in asdict(self).items() if name not in _FREE}

    def check(self, ranks: int) -> None:
        """
        Raises:
            TypeError, ValueError: an option that is wrong by itself, or does not fit another.
        """
        check_choice("strategy", self.strategy, LAYERS)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("device", self.device, DEVICES)
        least = {"seq_len": 1, "batch": 1, "steps": 1, "layers": 1, "hidden": 1, "heads": 1, "kv_heads": 1, "seed": 0,
                 "save_every": 0}  # fmt: skip
        for name, smallest in least.items():
            check_int(name, getattr(self, name), smallest)
        for name in ("lr", "deadline"):
            if check_number(name, getattr(self, name)) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}: a positive number is needed")
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"heads={self.heads}: hidden={self.hidden} must be a multiple of twice that (head_dim is even)"
            )
        if self.strategy == "local" and ranks > 1:
            raise ValueError(f"strategy='local' with {ranks} ranks: it runs on one; choose another, or --nproc 1")
        if self.device == "cuda" and torch.cuda.device_count() < ranks:
            raise ValueError(f"device='cuda': {torch.cuda.device_count()} here, {ranks} ranks; use --device cpu")
        MaskChoice.parse(self.mask)
        ByteLlama(
            self.shape, self.strategy, layout=self.layout, backend=self.backend, device="meta", **self.strategy_options
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> TrainConfig:
        return TrainConfig(**json.loads(text))
