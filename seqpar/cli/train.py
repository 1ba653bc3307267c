"""``seqpar train``: a small Llama-shaped model on a text file, with any strategy."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ..layers.factory import LAYERS
from .config import DEVICES, DTYPES, TrainConfig
from .data import MASKS, read_corpus
from .errors import BAD_OPTION, CommandError, bad_options
from .launch import launch, under_launcher
from .worker import run_training

_DEFAULT = TrainConfig()
_STRATEGY, _MODEL, _DATA, _RUN = "Strategy", "Model", "Training", "Run"


def train(
    strategy: Annotated[str, typer.Option(help=f"{', '.join(LAYERS)}.", rich_help_panel=_STRATEGY)] = _DEFAULT.strategy,
    nproc: Annotated[
        int | None,
        typer.Option(help="Ranks to start here (default 1). Under torchrun: leave out.", rich_help_panel=_STRATEGY),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="contiguous, zigzag or striped.", rich_help_panel=_STRATEGY)
    ] = _DEFAULT.layout,
    comm: Annotated[
        str | None,
        typer.Option(help="context_parallel: all_gather, p2p, a2a or a2a+p2p.", rich_help_panel=_STRATEGY),
    ] = None,
    ulysses_size: Annotated[
        int | None, typer.Option(help="hybrid and a2a+p2p: ranks of a subgroup.", rich_help_panel=_STRATEGY)
    ] = None,
    backend: Annotated[
        str, typer.Option(help="auto, or one that `seqpar doctor` shows.", rich_help_panel=_STRATEGY)
    ] = _DEFAULT.backend,
    text: Annotated[
        str | None, typer.Option(help="Text file (default: this package's own sources).", rich_help_panel=_DATA)
    ] = None,
    mask: Annotated[str, typer.Option(help=f"{MASKS}.", rich_help_panel=_DATA)] = _DEFAULT.mask,
    seq_len: Annotated[
        int, typer.Option(help="Tokens (bytes) of a sequence, over all ranks.", rich_help_panel=_DATA)
    ] = _DEFAULT.seq_len,
    batch: Annotated[int, typer.Option(help="Sequences a step.", rich_help_panel=_DATA)] = _DEFAULT.batch,
    steps: Annotated[int, typer.Option(help="Steps in all.", rich_help_panel=_DATA)] = _DEFAULT.steps,
    lr: Annotated[
        float, typer.Option(help="Learning rate, after a short warm-up.", rich_help_panel=_DATA)
    ] = _DEFAULT.lr,
    seed: Annotated[int, typer.Option(help="Of weights, data and dropout.", rich_help_panel=_DATA)] = _DEFAULT.seed,
    layers: Annotated[int, typer.Option(help="Layers.", rich_help_panel=_MODEL)] = _DEFAULT.layers,
    hidden: Annotated[int, typer.Option(help="Width of the hidden states.", rich_help_panel=_MODEL)] = _DEFAULT.hidden,
    heads: Annotated[int, typer.Option(help="Query heads.", rich_help_panel=_MODEL)] = _DEFAULT.heads,
    kv_heads: Annotated[
        int, typer.Option(help="Key/value heads, a divisor of the query heads.", rich_help_panel=_MODEL)
    ] = _DEFAULT.kv_heads,
    tied: Annotated[
        bool, typer.Option("--tied/--untied", help="One matrix for input and output bytes.", rich_help_panel=_MODEL)
    ] = _DEFAULT.tied,
    dropout: Annotated[
        float, typer.Option(help="Probability of dropping an attention weight.", rich_help_panel=_MODEL)
    ] = _DEFAULT.dropout,
    dtype: Annotated[
        str, typer.Option(help=f"{', '.join(DTYPES)}; bfloat16 is autocast over float32.", rich_help_panel=_MODEL)
    ] = _DEFAULT.dtype,
    out: Annotated[
        str, typer.Option(help="Folder for checkpoint, loss curve, CSV and summary.", rich_help_panel=_RUN)
    ] = _DEFAULT.out,
    save_every: Annotated[
        int, typer.Option(help="Steps between checkpoints; 0: one at the end.", rich_help_panel=_RUN)
    ] = _DEFAULT.save_every,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from OUT/checkpoint.pt; any strategy, any ranks.", rich_help_panel=_RUN),
    ] = False,
    device: Annotated[str, typer.Option(help=f"{', '.join(DEVICES)}.", rich_help_panel=_RUN)] = _DEFAULT.device,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Only deterministic algorithms.", rich_help_panel=_RUN)
    ] = False,
    deadline: Annotated[
        float, typer.Option(help="Seconds after which ranks started here are ended.", rich_help_panel=_RUN)
    ] = _DEFAULT.deadline,
    plot: Annotated[bool, typer.Option(help="Draw the loss curve.", rich_help_panel=_RUN)] = True,
) -> None:
    """Train a small Llama-shaped model on the bytes of a text, its sequences sharded over ranks.

    The loss curve is the same for every strategy, layout and number of ranks, up to rounding.

    `--nproc N` starts N ranks on this machine; under torchrun each process is one rank.
    """
    config = TrainConfig(
        strategy=strategy, layout=layout, comm=comm, ulysses_size=ulysses_size, backend=backend, device=device,
        text=text, mask=mask, seq_len=seq_len, batch=batch, steps=steps, lr=lr, layers=layers, hidden=hidden,
        heads=heads, kv_heads=kv_heads, tied=tied, dtype=dtype, dropout=dropout, seed=seed,
        deterministic=deterministic, out=out, save_every=save_every, resume=resume, deadline=deadline, plot=plot,
    )  # fmt: skip
    ranks = _ranks(nproc)
    if under_launcher() or ranks == 1:
        run_training(config)
    else:
        with bad_options():
            config.check(ranks)
            read_corpus(config.text)
        launch(["-m", "seqpar.cli.worker", config.to_json()], ranks, deadline)
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"checkpoint, loss curve, CSV and summary are in {out}")


def _ranks(nproc: int | None) -> int:
    """How many ranks run."""
    if nproc is not None and nproc < 1:
        raise CommandError(f"nproc={nproc}: at least 1 is needed", BAD_OPTION)
    if not under_launcher():
        return nproc or 1
    world = int(os.environ["WORLD_SIZE"])
    if nproc not in (None, world):
        raise CommandError(f"nproc={nproc}: torchrun started {world} ranks; leave --nproc out", BAD_OPTION)
    return world
