"""The command line: ``seqpar``, also ``python -m seqpar``. One file for each command."""

from __future__ import annotations

import os
import sys

from .errors import CommandError


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 failed, 2 bad options, 124 past its deadline, 130 interrupted."""
    try:
        import typer
    except ModuleNotFoundError as error:  # pragma: no cover (the package requires it)
        sys.exit(f"error: {error.name} is not installed; pip install typer rich")

    from .demo import demo
    from .doctor import doctor
    from .train import train

    app = typer.Typer(
        name="seqpar",
        help="Long-context, sequence-parallel attention for PyTorch.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for command in (doctor, train, demo):
        app.command()(command)
    try:
        app()
    except CommandError as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)


def fail(error: CommandError) -> None:
    """Print the error on stderr, with the rank where there are several, and exit."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    rank = f" (rank {os.environ['RANK']})" if several and "RANK" in os.environ else ""
    print(f"error{rank}: {error}", file=sys.stderr, flush=True)
    sys.exit(error.code)
