"""``seqpar train``: train a small Llama-shaped model on a text file with any strategy."""

from __future__ import annotations

import inspect
import os
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from .launch import BAD_OPTION, CommandError, bad_options, under_launcher
from .trainer.config import TrainConfig
from .trainer.data import read_corpus
from .trainer.worker import launch_training, run_training


def train(
    nproc: Annotated[
        int | None,
        typer.Option(
            help="Ranks to start on this machine (default 1). Leave it out under torchrun.", rich_help_panel="Strategy"
        ),
    ] = None,
    **options: Any,
) -> None:
    """Train a small Llama-shaped model on the bytes of a text. Its sequences are sharded over the ranks.

    The loss curve is the same for every strategy, layout and number of ranks, up to rounding.

    `--nproc N` starts N ranks on this machine. Under torchrun, on one or more machines, each process is one rank. Only
    the machine of rank 0 needs the text and, to resume a run, the checkpoint.
    """
    config = TrainConfig(**options)
    ranks = _ranks(nproc)
    if under_launcher() or ranks == 1:
        run_training(config)
    else:
        with bad_options():
            config.check(ranks, ranks)
            read_corpus(config.text)
        launch_training(config, ranks)
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"checkpoint, loss curve, CSV and summary are in {config.out}")


def _ranks(nproc: int | None) -> int:
    """The number of ranks of the run.

    Raises:
        CommandError: ``--nproc`` is below 1, or differs from the number of ranks that torchrun has started.
    """
    if nproc is not None and nproc < 1:
        raise CommandError(f"nproc={nproc}: expected at least 1", BAD_OPTION)
    if not under_launcher():
        return nproc or 1
    world = int(os.environ["WORLD_SIZE"])
    if nproc not in (None, world):
        raise CommandError(f"nproc={nproc}: torchrun started {world} ranks; leave --nproc out", BAD_OPTION)
    return world


def _add_options(command: Any) -> None:
    """Replace ``**options`` in the signature of ``command``, which typer reads, by the options of TrainConfig."""
    signature = inspect.signature(command, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name, (annotation, option) in TrainConfig.options().items():
        annotation, choices = _without_literal(annotation)
        words = f"{option.help} One of {', '.join(choices)}." if choices else option.help
        info = typer.Option(*option.flags, help=words, rich_help_panel=option.panel)
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(TrainConfig, name),
                annotation=Annotated[annotation, info],
            )
        )
    command.__signature__ = signature.replace(parameters=parameters)


def _without_literal(annotation: Any) -> tuple[Any, tuple[str, ...]]:
    """The type with str instead of a Literal, and the choices of the Literal.

    With a Literal, typer itself would check the value. ``TrainConfig.check`` checks it instead, because its error
    suggests the nearest choice.
    """
    members = get_args(annotation)
    literal = next((a for a in (annotation, *members) if get_origin(a) is Literal), None)
    if literal is None:
        return annotation, ()
    return str | None if NoneType in members else str, get_args(literal)


_add_options(train)
