"""One rank of ``seqpar bench``, which the command starts. The only argument is the configuration."""

from __future__ import annotations

import sys

from ..launch import CommandError, exit_with


def main() -> None:
    from ..bench import run_bench
    from .cases import BenchConfig

    try:
        run_bench(BenchConfig.from_json(sys.argv[1]))
    except CommandError as error:
        exit_with(error)


if __name__ == "__main__":
    main()
