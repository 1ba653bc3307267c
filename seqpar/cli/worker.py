"""One rank of ``seqpar train``: runs the training, shows it on rank 0, leaves the files behind."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from . import fail
from .checkpoint import load_checkpoint
from .config import TrainConfig
from .data import Corpus, read_corpus
from .errors import CommandError, bad_options
from .launch import follow_launcher, threads_per_rank
from .report import PLOT_NEEDS, can_plot, human_bytes, human_count, make_folder, plot_loss, write_csv, write_json
from .training import Step, Training, World


def run_training(config: TrainConfig) -> None:
    """Train as this process's rank: alone, or one of those a launcher started.

    Raises:
        CommandError: bad options, or a run that failed.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(threads_per_rank(local))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by --deterministic
    out = Path(config.out)
    with bad_options():
        config.check(int(os.environ.get("WORLD_SIZE", "1")))
        world = World.join(config.device, local)
        saved = load_checkpoint(out / "checkpoint.pt") if config.resume else None
        training = Training(config, world.share(lambda: _corpus(config, saved)), world)
        if saved is not None:
            training.restore(saved)
        if world.rank == 0:
            make_folder(out)
    done = len(training.losses)
    steps: list[Step] = []
    with _progress(training) as show:
        for step in training.run():
            steps.append(step)
            show(step)
            if config.save_every and (step.step + 1) % config.save_every == 0:
                training.save(out / "checkpoint.pt")
    training.save(out / "checkpoint.pt")
    peaks = world.sum(*(training.memory.bytes() if r == world.rank else 0 for r in range(world.size)))
    if world.rank == 0:
        _report(training, steps, done, [int(p) for p in peaks], out)
    world.leave()


def _corpus(config: TrainConfig, saved: dict[str, Any] | None) -> Corpus:
    """The text: of the file, or of the run that is resumed, since this package's sources may have changed since."""
    if config.text is None and saved is not None:
        return Corpus(**saved["corpus"])
    return read_corpus(config.text)


class _Show(Protocol):
    def __call__(self, step: Step) -> None: ...


@contextmanager
def _progress(training: Training) -> Iterator[_Show]:
    """Shows steps: a bar on a terminal, a line now and then elsewhere, nothing on ranks other than 0."""
    config = training.config
    if training.world.rank != 0:
        yield lambda step: None
        return
    console = Console()
    sent = 0

    def tokens_per_second(step: Step) -> str:
        return human_count(config.batch * config.seq_len / step.seconds)

    if not console.is_terminal:
        every = max(1, config.steps // 10)

        def print_line(step: Step) -> None:
            nonlocal sent
            sent += step.attention_bytes + step.gradient_bytes
            if step.step % every == 0 or step.step + 1 == config.steps:
                print(
                    f"{title_of(training)}: step {step.step + 1}/{config.steps}, loss {step.loss:.4f}, "
                    f"{tokens_per_second(step)} tokens/s, {human_bytes(sent)} sent",
                    flush=True,
                )

        yield print_line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("loss [bold]{task.fields[loss]}[/]  {task.fields[rate]} tokens/s  {task.fields[sent]} sent"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(
            title_of(training), total=config.steps, completed=len(training.losses), loss="-", rate="-", sent="0 B"
        )

        def advance(step: Step) -> None:
            nonlocal sent
            sent += step.attention_bytes + step.gradient_bytes
            bar.update(
                task,
                completed=step.step + 1,
                loss=f"{step.loss:.4f}",
                rate=tokens_per_second(step),
                sent=human_bytes(sent),
            )

        yield advance


def title_of(training: Training) -> str:
    """As "ring, zigzag, 4 ranks"."""
    config, size = training.config, training.world.size
    if config.title:
        return config.title
    if size == 1:
        return f"{config.strategy}, 1 rank"
    options = "".join(f" {value}" for value in config.strategy_options.values())
    return f"{config.strategy}{options}, {config.layout}, {size} ranks"


def _report(training: Training, steps: list[Step], done: int, peaks: list[int], out: Path) -> None:
    config = training.config
    tokens = config.batch * config.seq_len
    # The first step allocates and warms up; it is no measure unless it is the only one.
    seconds = statistics.median(s.seconds for s in steps[1:] or steps)
    timed = {s.step: s for s in steps}
    rows = []
    for number, loss in enumerate(training.losses):
        s = timed.get(number)
        rows.append(
            {
                "step": number + 1,
                "loss": loss,
                "gradient_norm": s.gradient_norm if s else "",
                "tokens_per_second": tokens / s.seconds if s else "",
                "attention_bytes": s.attention_bytes if s else "",
                "gradient_bytes": s.gradient_bytes if s else "",
            }
        )
    write_csv(out / "losses.csv", rows)
    summary = {
        "title": title_of(training),
        "ranks": training.world.size,
        "threads_per_rank": torch.get_num_threads(),
        "device": training.world.device.type,
        "parameters": training.parameters,
        "text": training.corpus.name,
        "text_bytes": len(training.corpus.data),
        "resumed_at": done,
        "final_loss": training.losses[-1],
        "tokens_per_second": tokens / seconds,
        "attention_bytes_per_token": sum(s.attention_bytes for s in steps) / (len(steps) * tokens),
        "gradient_bytes_per_step": steps[-1].gradient_bytes,
        "peak_memory_per_rank": peaks,
        "torch": torch.__version__,
    }
    write_json(out / "summary.json", summary)
    if config.plot and can_plot():
        plot_loss(out / "losses.png", training.losses, f"{title_of(training)}: {config.seq_len:,} tokens a sequence")
    elif config.plot:
        print(PLOT_NEEDS)


def main() -> None:
    """Entry of the ranks that ``seqpar train`` starts; the configuration is the only argument."""
    follow_launcher()
    try:
        run_training(TrainConfig.from_json(sys.argv[1]))
    except CommandError as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
