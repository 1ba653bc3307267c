"""One task of ``gpu.py`` in its own process: imports everything, waits for the task on stdin, and writes its rows.

It runs from a checkout: seqpar need not be installed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path


def main(path: str) -> None:
    """Run the task that stdin describes: ``{"name": ..., "function": ..., "arguments": [...], "skip": [...]}``."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    import checkout

    assert find_spec("seqpar.triton_kernels") is not None, checkout.ROOT
    from gpu_checks import synchronize
    from gpu_report import Rows, causes

    modules = [importlib.import_module(name) for name in ("gpu_checks", "gpu_speed", "gpu_transfers")]
    line = sys.stdin.readline()
    if not line:
        return  # no task is left
    request = json.loads(line)
    rows = Rows(Path(path), frozenset(request["skip"]), synchronize)
    rows.add("begin", request["name"])
    function = next(getattr(module, request["function"]) for module in modules if hasattr(module, request["function"]))
    try:
        function(rows, *request["arguments"])
        synchronize()
    except Exception as error:
        rows.add("failure", request["name"], error=causes(error))


if __name__ == "__main__":
    main(sys.argv[1])
