"""One rank of ``seqpar train``: run the training, show the progress on rank 0 and write the files of the run."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..launch import bad_options, launch, threads_per_rank
from ..tables import human_bytes, human_count, make_folder, plot_loss, write_csv, write_json
from .checkpoint import load_checkpoint
from .config import TrainConfig
from .data import Corpus, read_corpus
from .memory import check_memory
from .training import StepResult, Training
from .world import World


def launch_training(config: TrainConfig, ranks: int) -> None:
    """Train in new processes on this machine.

    Raises:
        CommandError: an option is not allowed, or the run failed.
    """
    launch(run_training, ranks, config, deadline_s=config.deadline)


def run_training(config: TrainConfig) -> None:
    """Train in this process, either alone or as one of the ranks that a launcher has started.

    Raises:
        CommandError: an option is not allowed, or the run failed.
    """
    torch.set_num_threads(threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # needed by cuBLAS to be deterministic
    out = Path(config.out)
    checkpoint = out / "checkpoint.pt"
    with bad_options():
        world = World.init(config)
        world.on_all_ranks("memory", lambda: check_memory(config, world))
        # Only rank 0's machine needs the text and the checkpoint.
        files = world.from_rank_0("files", lambda: _read(config, checkpoint))
        training = Training(config, Corpus(**files["corpus"]), world)
        if files["saved"] is not None:
            training.restore(files["saved"])
        world.on_all_ranks("folder", lambda: make_folder(out) if world.rank == 0 else None)
    resumed_at = len(training.losses)
    results: list[StepResult] = []
    with _progress(training) as show:
        for result in training.run():
            results.append(result)
            show(result)
            if config.save_every and (result.step + 1) % config.save_every == 0:
                training.save(checkpoint)
    training.save(checkpoint)
    # The sum over the ranks collects the peak of every rank, because each rank has zeros in the places of the others.
    peaks = world.all_reduce(*(training.memory.bytes() if r == world.rank else 0 for r in range(world.size)))
    if world.rank == 0:
        _report(training, results, resumed_at, [int(p) for p in peaks], out)
    world.destroy()


def _read(config: TrainConfig, checkpoint: Path) -> dict[str, Any]:
    """The text, and the checkpoint if the run resumes.

    If no text is named, a resumed run uses the text in the checkpoint, because the default text, the sources of this
    package, may have changed since.
    """
    saved = load_checkpoint(checkpoint) if config.resume else None
    corpus = saved["corpus"] if saved is not None and config.text is None else vars(read_corpus(config.text))
    return {"saved": saved, "corpus": corpus}


@contextmanager
def _progress(training: Training) -> Iterator[Callable[[StepResult], None]]:
    """A function that shows a step on rank 0: as a progress bar on a terminal, otherwise as one of about ten lines."""
    config = training.config
    if training.world.rank != 0:
        yield lambda result: None
        return
    console = Console()
    sent = 0

    def tokens_per_second(result: StepResult) -> str:
        return human_count(config.batch * config.seq_len / result.seconds)

    if not console.is_terminal:
        every = max(1, config.steps // 10)

        def print_line(result: StepResult) -> None:
            nonlocal sent
            sent += result.attention_bytes + result.gradient_bytes
            if result.step % every == 0 or result.step + 1 == config.steps:
                print(
                    f"{title_of(training)}: step {result.step + 1}/{config.steps}, loss {result.loss:.4f}, "
                    f"{tokens_per_second(result)} tokens/s, {human_bytes(sent)} sent",
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

        def advance(result: StepResult) -> None:
            nonlocal sent
            sent += result.attention_bytes + result.gradient_bytes
            bar.update(
                task,
                completed=result.step + 1,
                loss=f"{result.loss:.4f}",
                rate=tokens_per_second(result),
                sent=human_bytes(sent),
            )

        yield advance


def title_of(training: Training) -> str:
    """The title of a run, such as "ring, zigzag, 4 ranks"."""
    config, size = training.config, training.world.size
    if config.title:
        return config.title
    if size == 1:
        return f"{config.strategy}, 1 rank"
    options = "".join(f" {value}" for value in config.strategy_options.values())
    return f"{config.strategy}{options}, {config.layout}, {size} ranks"


def _report(training: Training, results: list[StepResult], resumed_at: int, peaks: list[int], out: Path) -> None:
    """Write losses.csv, summary.json and losses.png."""
    config = training.config
    tokens = config.batch * config.seq_len
    # The median leaves out the first step, which is slower because it allocates memory, unless it is the only one.
    seconds = statistics.median(r.seconds for r in results[1:] or results)
    by_step = {r.step: r for r in results}
    rows = []
    for step, loss in enumerate(training.losses):
        r = by_step.get(step)  # None for steps before the run was resumed
        rows.append(
            {
                "step": step + 1,
                "loss": loss,
                "gradient_norm": r.gradient_norm if r else "",
                "tokens_per_second": tokens / r.seconds if r else "",
                "attention_bytes": r.attention_bytes if r else "",
                "gradient_bytes": r.gradient_bytes if r else "",
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
        "resumed_at": resumed_at,
        "final_loss": training.losses[-1],
        "tokens_per_second": tokens / seconds,
        "attention_bytes_per_token": sum(r.attention_bytes for r in results) / (len(results) * tokens),
        "gradient_bytes_per_step": results[-1].gradient_bytes,
        "peak_memory_per_rank": peaks,
        "torch": torch.__version__,
    }
    write_json(out / "summary.json", summary)
    if config.plot:
        plot_loss(out / "losses.png", training.losses, f"{title_of(training)}: {config.seq_len:,} tokens per sequence")
