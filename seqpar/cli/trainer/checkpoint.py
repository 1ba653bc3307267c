"""Checkpoints of a training run: one file, written completely or not at all, from which a run resumes exactly.

Why not torch.distributed.checkpoint, which the layers' state dicts support: it writes a folder of files, which a crash
may leave half written; it reads into tensors that exist already, but the losses and the text have a length that only
the checkpoint knows; and AdamW's moments of a weight sharded by tp_sp are plain tensors, which would have to be made
full or into DTensors first, as they are here. For a model that one rank can hold, torch.save is less code.
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
            os.fsync(file.fileno())  # the data is on disk before the name is
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state saved at ``path``, its tensors on the CPU.

    Raises:
        ValueError: there is no checkpoint, or the file is not one of this command's.
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
    """
    Raises:
        ValueError: an option that a resumed run must leave as it was has changed.
    """
    for name in sorted({*saved, *current}):
        if saved.get(name) != current.get(name):
            raise ValueError(
                f"--resume: the checkpoint has {name}={saved.get(name)!r}, this run {current.get(name)!r}; "
                "give the same, or start a new run with another --out"
            )
