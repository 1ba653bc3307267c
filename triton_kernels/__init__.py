"""Triton kernels for attention on row intervals with a carried online softmax. Importing this needs Triton.

* :func:`forward`, :func:`backward`, :func:`delta`: attention of queries over the interval of keys that each row sees.
* :func:`merge_`: two partial results into one.
* :func:`rotary`, :func:`rotary_from_tables`: rotary embedding in one pass.

``python -m seqpar.triton_kernels.inspect`` compiles everything for GPUs that are not here and prints what it takes.

What has no kernel, because PyTorch already moves the least bytes there are, one read and one write an element:
zigzag and striped packing (``torch.cat`` of the ranges, ``index_select``) and their inverse, and the permutation around
the all-to-all (``out.view(chunk).copy_(x[:, :, heads])`` into the send buffer, ``index_copy_`` out of the received
one). A kernel could fuse them only into their neighbours.
"""

from .backward import backward
from .configs import Config
from .forward import forward
from .merge import merge_
from .preprocess import delta
from .rotary import rotary, rotary_from_tables

__all__ = ["Config", "backward", "delta", "forward", "merge_", "rotary", "rotary_from_tables"]
