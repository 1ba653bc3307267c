"""Checkpoints of a training run: written whole or not at all, resumed exactly."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

_FORMAT = 1


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` (tensors and plain values) beside ``path`` and put it in its place in one step."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save({"format": _FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state saved at ``path``, its tensors on the CPU.

    Raises:
        ValueError: no checkpoint there, or not one of this command.
    """
    if not path.exists():
        raise ValueError(f"--resume: {path} does not exist; leave --resume out, or name the --out of an earlier run")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"--resume: {path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise ValueError(f"--resume: {path} is not a checkpoint of this version of seqpar train")
    return state


def check_same_run(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: an option that says what is trained has changed.
    """
    for name in sorted({*saved, *now}):
        if saved.get(name) != now.get(name):
            raise ValueError(
                f"--resume: the checkpoint has {name}={saved.get(name)!r}, this run {now.get(name)!r}; "
                "give the same, or start anew in another --out"
            )
