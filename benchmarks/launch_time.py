"""The time that the host spends to launch the attention kernels, measured without a GPU.

The kernels are compiled for an H100, and a stub receives the launches instead of the GPU's driver. So the times include
everything before the driver: the Python code of one step of a ring, with tensors of 1,024 tokens on the CPU.

    python benchmarks/launch_time.py

Prints the CPU time of the calling thread in microseconds, as the median and the fastest of ``--rounds`` rounds.
``repeated`` is a step whose launches repeat an earlier step's. ``first`` is a step whose launches Triton has to
dispatch; its kernels are already compiled. ``of it a launch`` is the time of one launch in ``repeated``, without the
allocation of outputs and everything else around the launches.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import triton
import typer
from rich.console import Console
from rich.table import Table

import seqpar.triton_kernels.backward as backward
import seqpar.triton_kernels.forward as forward
from seqpar.kernels.base import Score
from seqpar.schedule.rows import KeyIntervals
from seqpar.triton_kernels import attention_backward, attention_forward, delta
from seqpar.triton_kernels.configs import table_config
from seqpar.triton_kernels.launch import Repeated

sys.path.append(str(Path(__file__).parents[1]))

from tools.compiled import StubDriver

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 1024, 8, 2, 128


def microseconds(step: Callable[[], Any], rounds: int, calls: int) -> str:
    """CPU time of one call: the median round, and the fastest in parentheses."""
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(calls):
            step()
        times.append(1e6 * (time.thread_time() - start) / calls)
    return f"{statistics.median(times):.1f} ({min(times):.1f})"


def ignore(*arguments: Any) -> None:
    """Used instead of the driver's launch function."""


def main(
    rounds: Annotated[int, typer.Option(help="Rounds of each measurement.")] = 9,
    calls: Annotated[int, typer.Option(help="Calls of a round.")] = 500,
) -> None:
    """Measure the host time of the attention kernels' launches."""
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(StubDriver("sm_90", ignore))
    q, k, v = (torch.zeros(1, LENGTH, heads, HEAD_DIM, dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    positions = torch.arange(LENGTH, dtype=torch.int32)
    mask, score = KeyIntervals(torch.zeros_like(positions)[None], positions[None] + 1, positions, positions), Score(0.1)
    carry = torch.zeros_like(dq), torch.zeros(1, HEADS, LENGTH)
    row_delta = delta(q, q)
    tiles = {name: table_config("sm_90", name, HEAD_DIM, q.dtype) for name in ("forward", "backward", "dkdv", "dq")}

    def forward_step() -> None:
        attention_forward(q, k, v, mask, score, carry=carry, last=False, config=tiles["forward"])

    def backward_step(deterministic: bool) -> None:
        attention_backward(
            q, q, k, v, carry[1], row_delta, mask, score, dq, dk, dv, deterministic=deterministic,
            config=tiles["dkdv" if deterministic else "backward"], dq_config=tiles["dq"],
        )  # fmt: skip

    steps: dict[str, tuple[Callable[[], None], tuple[Repeated, ...]]] = {
        "forward, 1 launch": (forward_step, (forward._launches,)),
        "backward, 1 launch": (lambda: backward_step(False), (backward._keys_launches,)),
        "deterministic backward, 2 launches": (
            lambda: backward_step(True),
            (backward._keys_launches, backward._dq_launches),
        ),
    }
    table = Table("microseconds of a step", "repeated", "of it a launch", "first", title=f"Triton {triton.__version__}")
    for name, (step, launches) in steps.items():
        step()
        repeated = microseconds(step, rounds, calls)
        made: list[tuple[Any, ...]] = []
        with_arguments(launches[0], made.append, step)
        launch = microseconds(lambda made=made, one=launches[0]: one(*made[0]), rounds, calls)  # type: ignore[misc]

        def first(step: Callable[[], None] = step, launches: tuple[Repeated, ...] = launches) -> None:
            for one in launches:
                one.forget()
            backward._choices.clear()
            step()

        table.add_row(name, repeated, launch, microseconds(first, rounds, max(calls // 10, 1)))
    Console(width=100).print(table)


def with_arguments(launches: Repeated, take: Callable[[tuple[Any, ...]], None], step: Callable[[], None]) -> None:
    """Run ``step``, and call ``take`` with the arguments of every call of ``launches`` in it."""
    call = Repeated.__call__

    def spy(self: Repeated, *arguments: Any) -> None:
        if self is launches:
            take(arguments)
        call(self, *arguments)

    with patch.object(Repeated, "__call__", spy):
        step()


if __name__ == "__main__":
    typer.run(main)
