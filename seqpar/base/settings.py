"""The environment variables of the package: what each may be, and what it does. docs/settings.md has the same table."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

_OFF, _ON = ("0", "off", "no", "false"), ("1", "on", "yes", "true")


@dataclass(frozen=True)
class EnvironmentVariable:
    """An environment variable.

    Attributes:
        kind: a "switch" is on or off, and a "number" is an integer.
        does: what it does, as the documentation says it.
        default: what it is if it is not set.
        least, most: of a number. Where ``least`` is 0, the words for off are 0 too.
    """

    kind: Literal["switch", "number", "text"]
    does: str
    default: str
    least: int = 0
    most: int | None = None

    @property
    def allowed(self) -> str:
        """What it may be, in words."""
        if self.kind == "text":
            return "any text"
        if self.kind == "switch":
            return "1, on, yes or true; or 0, off, no or false"
        number = f"a number from {self.least} to {self.most}" if self.most else f"a number, at least {self.least}"
        return number if self.least else f"{number}; off, no or false is 0"


SETTINGS = {
    "SEQPAR_CACHE_DIR": EnvironmentVariable("text", "the folder of the results of autotuning", "~/.cache/seqpar"),
    "SEQPAR_CHECK": EnvironmentVariable(
        "number",
        "with N, the ranks compare what they shard in every N-th call, with 0 never. In processes that a rank has "
        "started, such as workers of a loader, nothing is compared",
        "models compare their batches in the first calls, `shard` compares nothing",
    ),
    "SEQPAR_HOST": EnvironmentVariable(
        "text", "a name for this host. Ranks with the same name share a host", "the host's name and its boot id"
    ),
    "SEQPAR_HUB_KERNELS": EnvironmentVariable(
        "switch", "FlashAttention's kernels are downloaded from the Hugging Face Hub if they are not installed", "off"
    ),
    "SEQPAR_NCCL_MAX_CTAS": EnvironmentVariable(
        "number", "the most SMs that NCCL uses for attention's messages, the same on every rank", "16", 1, 64
    ),
    "SEQPAR_NCCL_MIN_CTAS": EnvironmentVariable("number", "the fewest, the same on every rank", "NCCL's choice", 1, 64),
    "SEQPAR_SHARED_MEMORY": EnvironmentVariable(
        "switch",
        "ranks of one host on a CPU send attention's messages through shared memory. If it is off on one rank of a "
        "group, the group uses gloo",
        "on",
    ),
    "SEQPAR_TRITON_AUTOTUNE": EnvironmentVariable(
        "switch", "configurations of the Triton kernels are measured, and the fastest is stored", "off"
    ),
    "SEQPAR_VERIFY": EnvironmentVariable(
        "number",
        "with N, a Trainer compares every N-th step with one device, with 0 never",
        "once, on a few tokens, if the model has code that is not of transformers",
    ),
    "SEQPAR_VERIFY_TOKENS": EnvironmentVariable(
        "number", "how many tokens of the batch are compared", "1024 with `SEQPAR_VERIFY`, otherwise 128", 1
    ),
}


def text(name: str) -> str | None:
    """The value of the environment variable; None if it is not set or empty."""
    assert name in SETTINGS
    return os.environ.get(name) or None


def switch(name: str) -> bool:
    """Whether the switch is on.

    Raises:
        ValueError: its value is not allowed.
    """
    value = (text(name) or SETTINGS[name].default).lower()
    if value not in (*_OFF, *_ON):
        raise _error(name)
    return value in _ON


def number(name: str) -> int | None:
    """The number; None if the variable is not set.

    Raises:
        ValueError: its value is not allowed.
    """
    setting, value = SETTINGS[name], text(name)
    if value is None:
        return None
    if setting.least == 0 and value.lower() in _OFF:
        return 0
    if not (value.isdecimal() and setting.least <= int(value) <= (setting.most or int(value))):
        raise _error(name)
    return int(value)


def check_settings() -> None:
    """Raise a ValueError if a variable has a value that is not allowed, before the ranks communicate."""
    for name, setting in SETTINGS.items():
        if setting.kind == "switch":
            switch(name)
        elif setting.kind == "number":
            number(name)


def _error(name: str) -> ValueError:
    setting = SETTINGS[name]
    return ValueError(f"{name}={os.environ[name]}: expected {setting.allowed} ({setting.does}); or leave it unset")
