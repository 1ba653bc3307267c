"""Context parallelism under the names TransformerEngine's users know.

``comm="all_gather"`` fetches all the keys and values that this rank's queries see in one step, behind the attention
over its own (Llama 3's way, Grattafiori et al., 2024, section 3.3.2), and again in backward rather than keeping
them; ``"p2p"`` is the ring, ``"a2a"`` is Ulysses, ``"a2a+p2p"`` is the hybrid.
"""

from __future__ import annotations

from dataclasses import replace

from torch.distributed import DeviceMesh, ProcessGroup

from ..check import check_choice, check_options
from ..mesh import Groups
from .hybrid import hybrid
from .ring import ring
from .ulysses import ulysses

COMMS = ("all_gather", "p2p", "a2a", "a2a+p2p")


def context_parallel(
    mesh: DeviceMesh | None,
    group: ProcessGroup | None,
    comm: str = "all_gather",
    ulysses_size: int | None = None,
) -> Groups:
    """The groups of the strategy that ``comm`` names; ``ulysses_size`` goes with "a2a+p2p"."""
    check_choice("comm", comm, COMMS)
    if comm == "a2a+p2p":
        return hybrid(mesh, group, ulysses_size)
    if ulysses_size is not None:
        check_options(f"context_parallel with comm={comm!r}", ["ulysses_size"], ["comm"])
    if comm == "a2a":
        return ulysses(mesh, group)
    return replace(ring(mesh, group), gather=comm == "all_gather")
