"""Triton kernels for attention on row intervals with a carried online softmax. Importing this package needs Triton.

* :func:`attention_forward`, :func:`attention_backward`, :func:`delta`: attention in which each query has an interval
  of keys.
* :func:`merge_`: merge two partial results into one.
* :func:`apply_rotary`: rotary embedding in one pass.

``hopper_forward.py`` has another forward, for Hopper GPUs. It is imported by itself, because it imports Gluon.

Read ``tiles.py`` first (names, softmax in base 2), then ``forward.py`` (the carry), then ``backward_kernels.py``. A
``Launch`` (``launch.py``) is a kernel with its arguments. ``configs.py`` has the tile sizes, and ``tune.py`` measures others.
``python tools/gate.py`` compiles everything ahead of time, for GPUs that this machine does not have,
and prints registers, spills, shared memory and matrix instructions.

Zigzag and striped packing (``torch.cat`` of the ranges, ``index_select``), their inverse, and the permutations around
the all-to-all have no kernel here: PyTorch already reads and writes each element once. A kernel could only fuse them
with the operations before or after them.

The package imports nothing from the rest of ``seqpar``. Its folder is at the top level of the repository and is
installed as ``seqpar.triton_kernels``.
"""

from .backward import attention_backward
from .configs import Config
from .forward import attention_forward
from .merge import merge_
from .preprocess import delta
from .rotary import apply_rotary

__all__ = ["Config", "apply_rotary", "attention_backward", "attention_forward", "delta", "merge_"]
