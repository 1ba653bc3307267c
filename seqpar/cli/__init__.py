"""The command line: ``seqpar``, also ``python -m seqpar``. One file for each command."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from .launch import FAILED, INTERRUPTED, CommandError, exit_with

_NEEDED = ("matplotlib", "rich", "typer")  # the packages of the extra "cli"; the library itself does not need them


def main(argv: list[str] | None = None) -> None:
    """Run the command line with these arguments, by default the process's.

    The exit code is 0 on success, 1 on failure, 2 for bad options, 124 past the deadline, and 130 if interrupted.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        words = f"the seqpar command needs {', '.join(missing)}; install with: pip install 'seqpar[cli]'"
        exit_with(CommandError(words, FAILED))
    import typer

    from .bench import bench
    from .demo import demo
    from .doctor import doctor
    from .plan import plan

    app = typer.Typer(
        name="seqpar",
        help="Long-context, sequence-parallel attention for PyTorch.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for command in (doctor, plan, bench, demo):
        app.command()(command)
    try:
        app(argv)
    except CommandError as error:
        exit_with(error)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
