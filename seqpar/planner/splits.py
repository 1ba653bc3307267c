"""Which splits of the ranks, layouts and switches the planner compares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

from ..base.checks import check_choice
from ..placement.balanced import balanced_layout
from ..placement.layout import Assigned, Layout
from .setting import Setting
from .shape import ModelShape
from .split import RECOMPUTE, Switches

LONGEST_RING = 1024  # ranks; the time of a simulation is proportional to the length of the ring
# The slowest rank's share of the work, relative to the mean.
_BALANCED = 1.01  # a layout with less imbalance needs no comparison with the layouts after it
_WORTH_COMPARING = 1.3  # a layout with more than this times the least imbalance is left out


def settings(base: Setting, ranks: int, replicas: int | None) -> Iterator[Setting]:
    """The splits of ``ranks`` that are compared, with the layouts worth comparing.

    Args:
        base: the model, the mask and the cluster.
        ranks: GPUs of all replicas.
        replicas: their number; None compares every possible one.
    """
    for split in splits(base, ranks, replicas):
        for layout in _layouts(split):
            yield replace(split, layout=layout)
            plain = split.ulysses == split.tensor == 1 and not split.is_invariant  # layers with tp have no all-gather
            if split.ring > 1 and plain:
                yield replace(split, layout=layout, gather=True)


def splits(base: Setting, ranks: int, replicas: int | None) -> Iterator[Setting]:
    """Every split of ``ranks`` into tensor-parallel, Ulysses and ring ranks and replicas that is worth comparing."""
    divisors, m = [d for d in range(1, ranks + 1) if ranks % d == 0], base.model
    for tensor, ulysses, ring in product(divisors, repeat=3):
        sequence_ranks = tensor * ulysses * ring
        if ranks % sequence_ranks or replicas not in (None, ranks // sequence_ranks):
            continue
        if tensor * ulysses > m.attention.heads or ring > LONGEST_RING:
            continue  # some ranks would have no heads, or each would have little to compute between transfers
        if base.is_invariant and (ulysses > 1 or m.attention.kv_heads % tensor):
            continue  # every strategy sends and computes what a ring does; tp_sp needs KV heads that divide by tp
        if tensor > base.hardware.gpus_per_host:
            continue  # tensor parallelism between hosts: every layer would wait for it
        if tensor > 1 and not m.tensor_parallel:
            continue  # the package has no tensor-parallel layers for this model
        yield replace(base, ring=ring, ulysses=ulysses, tensor=tensor, replicas=ranks // sequence_ranks)


def _layouts(setting: Setting) -> list[Layout]:
    """The layouts worth comparing. Without a ring there is one, since a layout changes only the order of tokens."""
    if setting.ring == 1:
        return ["contiguous"]
    imbalance: dict[Layout, float] = {}
    for layout in _from_fewest_keys(setting):  # a later layout must be better balanced
        imbalance[layout] = replace(setting, layout=layout).imbalance()
        if imbalance[layout] < _BALANCED:
            break
    least = min(imbalance.values())
    return [layout for layout, value in imbalance.items() if value < _WORTH_COMPARING * least]


def _from_fewest_keys(setting: Setting) -> Iterator[Layout]:
    """The layouts, first the one whose ranks see the fewest keys of other ranks. Striped ranks see nearly all keys."""
    yield "contiguous"
    yield "zigzag"
    together, per_host = setting.ulysses * setting.tensor, setting.hardware.gpus_per_host
    made = _balanced_layout(setting.mask, setting.seq_len, setting.sequence_ranks, together, per_host)
    yield made if isinstance(made, Assigned) else "striped"


_balanced_layout = lru_cache(maxsize=256)(balanced_layout)  # splits that differ in replicas have the same layout


def allowed_switches(
    model: ModelShape,
    recompute: str | None,
    offload: bool | None,
    chunked_loss: bool,
    tiled_mlp: bool | None,
    head_groups: int | None,
) -> list[Switches]:
    """Every combination of switches that the arguments of ``plan`` allow, the least recomputation first.

    Projections by groups of heads save little unless whole layers are recomputed and the MLP is tiled. If ``Memory``
    does not change a model's layers, the model or ``seqpar.diffusers`` checkpoints its blocks.

    Raises:
        ValueError: ``recompute`` is none of ``RECOMPUTE``, ``head_groups`` does not divide the KV heads, or no
            combination is left.
    """
    if recompute is not None:
        check_choice("recompute", recompute, RECOMPUTE)
    if (head_groups or 1) > 1 and not model.attention.has_groups(head_groups or 1):
        heads = "no KV heads, but latents" if model.attention.kv_rank else f"{model.attention.kv_heads} KV heads"
        raise ValueError(f"head_groups={head_groups}: expected a divisor of the KV heads, and {model.name} has {heads}")
    most = max(n for n in range(1, HEAD_GROUPS + 1) if n == 1 or model.attention.has_groups(n))
    found = []
    for how in RECOMPUTE:
        if recompute not in (None, how):
            continue
        for tiled, offloaded in product(_values(tiled_mlp), _values(offload)):
            if offloaded and how == "none":
                continue  # a layer keeps more than can be copied while it is computed
            found.append(Switches(how, offloaded, chunked_loss, tiled, head_groups or 1))
            if head_groups is None and most > 1 and tiled and how == RECOMPUTE[-1]:
                found.append(Switches(how, offloaded, chunked_loss, tiled, most))
    if not model.takes_memory:
        found = [x for x in found if x.recompute in ("none", "full") and not x.saving]
        if not found:
            raise ValueError(f"model: {model.name} has recompute='none' or 'full' only, and no other switch")
    if not found:
        raise ValueError("offload=True, recompute='none': offloading needs recompute='keep_attention' or 'full'")
    return found


HEAD_GROUPS = 4  # the most groups that are compared with all heads at once


def _values(given: bool | None) -> tuple[bool, ...]:
    return (False, True) if given is None else (given,)
