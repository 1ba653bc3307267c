"""Checkpoints of a training run. A checkpoint is one file, which is written completely or not at all.

torch.distributed.checkpoint, which the state dicts of the layers support, is not used here for two reasons. It writes a
folder of files, which a crash may leave half written. And it reads into existing tensors, but only the checkpoint knows
the lengths of the losses and of the text. For a model that fits on one rank, torch.save is simpler.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

_FORMAT = 2


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` (tensors and plain values) to a temporary file, then rename it to ``path``."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save({"format": _FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())  # the content must be on disk before the file gets its name
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state saved at ``path``, its tensors on the CPU.

    Raises:
        ValueError: there is no file, or it is not a checkpoint of this version of the command.
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


def check_same_run(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Compare the options of a checkpoint with those of the run that resumes from it.

    Raises:
        ValueError: an option differs that must not change.
    """
    for name in sorted({*saved, *current}):
        if saved.get(name) != current.get(name):
            raise ValueError(
                f"--resume: the checkpoint has {name}={saved.get(name)!r}, this run has {current.get(name)!r}; "
                "use the same value, or start a new run with another --out"
            )
