"""The table of strategies: how each one groups the ranks of a sequence, where it was published, and what it sends.

All strategies share one loop. Attention communicates in at most two ways, and a strategy selects the ranks that take
part in each:

* inside ``ulysses``, an all-to-all turns shards of the sequence into shards of the heads and back (``ulysses.py``);
* inside ``ring``, keys and values are sent to the ranks whose queries see them (``ring.py``).

In a third way, Megatron's, the projections around attention communicate instead (``tensor_sequence.py``).
``gathered_activations.py`` uses its all-gather for context parallelism.
To add a strategy, add a row to ``STRATEGIES``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from inspect import signature
from typing import Any, Literal, TypedDict, get_args

from torch.distributed import DeviceMesh, ProcessGroup

from ..base.checks import check_choice, check_int
from ..ranks.mesh import ring_and_ulysses_ranks, sequence_group_of, size_of
from .placement import Placement

StrategyName = Literal["local", "ring", "ulysses", "context_parallel", "hybrid", "auto"]
Comm = Literal["all_gather", "p2p", "a2a", "a2a+p2p"]
COMMS: tuple[str, ...] = get_args(Comm)


# Arguments of other packages that a mask replaces here.
_REPLACED_BY_MASK = {
    "causal": "mask=seqpar.Mask.causal(), which is the default, or mask=seqpar.Mask.full()",
    "is_causal": "mask=seqpar.Mask.causal(), which is the default, or mask=seqpar.Mask.full()",
    "window_size": "such as mask=seqpar.Mask.causal() & seqpar.Mask.sliding_window(left)",
    "sliding_window": "such as mask=seqpar.Mask.causal() & seqpar.Mask.sliding_window(left)",
    "cu_seqlens": "such as mask=seqpar.Mask.documents(cu_seqlens), with the boundaries of the whole sequence",
    "attn_mask": "such as mask=seqpar.Mask.causal(): a dense mask is not taken",
    "attention_mask": "such as mask=seqpar.Mask.causal(): a dense mask is not taken",
}

# Arguments of F.scaled_dot_product_attention that have another name here, or none.
_NAMED_OTHERWISE = {
    "scale": "seqpar.attention calls it softmax_scale",
    "dropout": "it is called dropout_p",
    "enable_gqa": "leave it out: k and v may always have fewer heads than q",
}


class StrategyOptions(TypedDict, total=False):
    """The options of all strategies; ``Strategy.options`` names those that one of them takes."""

    comm: Comm | None
    """context_parallel: how ranks receive the keys they need. By default "all_gather" if all ranks of the ring share a
    host, "p2p" if they are on several hosts."""
    ulysses_size: int | None
    """hybrid and "a2a+p2p" on a plain group: the ranks of each all-to-all, a divisor of the group's size."""
    chunks: int | None
    """context_parallel with "all_gather": receive K/V in this many chunks of heads. With more chunks, less memory is
    needed and more of the transfers overlap with computation. By default the size of K/V decides."""


@dataclass(frozen=True)
class Strategy:
    """One row of the table.

    Attributes:
        place: says who takes part in a call, from ``(mesh, group, **options)``.
        options: the names of the options that the strategy takes.
        paper: where the strategy was published.
        bytes_sent: bytes that each rank sends in the forward pass under a full mask. N is tokens times batch, d is
            heads times head_dim, d_kv is kv_heads times head_dim, P is the number of ranks and e the bytes of an
            element. Under any other mask the ring and the all-gather send only the rows that the receiver's queries
            see.
        bytes_sent_backward: the same for the backward pass. 4 is the bytes of float32, in which partial gradients are
            sent (8 for float64).
    """

    place: Callable[..., Placement]
    paper: str
    bytes_sent: str
    bytes_sent_backward: str
    options: tuple[str, ...] = ()


def _local_ranks(mesh: DeviceMesh | None, group: ProcessGroup | None) -> Placement:
    """This rank alone. Raises an error for several ranks, which would not see one another's tokens."""
    if mesh is not None or group is not None:
        ranks = size_of(sequence_group_of(mesh, group))
        if ranks > 1:
            raise ValueError(
                f"strategy='local' with a sequence group of {ranks} ranks: it attends within one rank; "
                "choose ring, ulysses, context_parallel or hybrid, or leave group and mesh out"
            )
    return Placement()


def _ring_ranks(mesh: DeviceMesh | None, group: ProcessGroup | None) -> Placement:
    group = sequence_group_of(mesh, group)
    return Placement(sequence_group=group, ring=group)


def _ulysses_ranks(mesh: DeviceMesh | None, group: ProcessGroup | None) -> Placement:
    group = sequence_group_of(mesh, group)
    return Placement(sequence_group=group, ulysses=group)


def _hybrid_ranks(mesh: DeviceMesh | None, group: ProcessGroup | None, ulysses_size: int | None = None) -> Placement:
    """The mesh's ring and ulysses dimensions. A plain group is divided into subgroups of ``ulysses_size`` ranks, by
    default the largest divisor of its size up to the square root."""
    ring, ulysses = ring_and_ulysses_ranks(mesh, group, ulysses_size)
    return Placement(sequence_group=sequence_group_of(mesh, group), ring=ring, ulysses=ulysses)


def _context_parallel_ranks(
    mesh: DeviceMesh | None,
    group: ProcessGroup | None,
    comm: str | None = None,
    ulysses_size: int | None = None,
    chunks: int | None = None,
) -> Placement:
    """The ranks for ``comm``. ``ulysses_size`` is an option of "a2a+p2p" only. ``chunks`` is an option of "all_gather"
    only, and implies it. With neither ``comm`` nor ``chunks``, the number of hosts decides."""
    if comm is not None:
        check_choice("comm", comm, COMMS)
    if chunks is not None:
        check_int("chunks", chunks, 1)
        if comm not in (None, "all_gather"):
            raise TypeError(f"chunks={chunks}: an option of comm='all_gather'; leave it out with comm={comm!r}")
        comm = "all_gather"
    if comm == "a2a+p2p":
        return _hybrid_ranks(mesh, group, ulysses_size)
    if ulysses_size is not None:
        raise TypeError(
            f"ulysses_size={ulysses_size}: not an option of strategy 'context_parallel' with comm={comm!r}; "
            "leave it out, or use comm='a2a+p2p'"
        )
    if comm == "a2a":
        return _ulysses_ranks(mesh, group)
    gather = None if comm is None else comm == "all_gather"
    return replace(_ring_ranks(mesh, group), gather=gather, chunks=chunks)


STRATEGIES: dict[str, Strategy] = {
    "local": Strategy(_local_ranks, paper="one device", bytes_sent="0", bytes_sent_backward="0"),
    "ring": Strategy(
        _ring_ranks,
        paper="Liu et al., Ring Attention with Blockwise Transformers for Near-Infinite Context, 2023",
        bytes_sent="(P-1)/P * N * 2 d_kv * e",
        bytes_sent_backward="(P-1)/P * N * 2 d_kv * (e + 4)",
    ),
    "ulysses": Strategy(
        _ulysses_ranks,
        paper="Jacobs et al., DeepSpeed Ulysses, 2023",
        bytes_sent="(P-1)/P^2 * N * (2 d + 2 r d_kv) * e, each KV head being read by r ranks",
        bytes_sent_backward="(P-1)/P^2 * N * (2 d + 2 d_kv) * e for r = 1, "
        "(P-1)/P^2 * N * (2 d * e + 2 r d_kv * (e + 4)) for r > 1",
    ),
    "context_parallel": Strategy(
        _context_parallel_ranks,
        paper="Grattafiori et al., The Llama 3 Herd of Models, 2024, section 3.3.2 (all_gather); "
        "NVIDIA TransformerEngine (the names of comm)",
        bytes_sent="(P-1)/P * N * 2 d_kv * e for all_gather and p2p; a2a as ulysses, a2a+p2p as hybrid",
        bytes_sent_backward="(P-1)/P * N * 2 d_kv * (e + 4) for all_gather and p2p; the others likewise",
        options=("comm", "ulysses_size", "chunks"),
    ),
    "hybrid": Strategy(
        _hybrid_ranks,
        paper="Fang and Zhao, USP, 2024; Gu et al., LoongTrain, 2024",
        bytes_sent="(U-1)/(U*P) * N * (2 d + 2 d_kv) * e + (R-1)/P * N * 2 d_kv * e for P = R * U ranks",
        bytes_sent_backward="(U-1)/(U*P) * N * (2 d + 2 d_kv) * e + (R-1)/P * N * 2 d_kv * (e + 4)",
        options=("ulysses_size",),
    ),
    # The ranks of the sequence. ``strategies/auto.py`` names the strategy of each call, whose ranks replace these.
    "auto": Strategy(
        _ring_ranks,
        paper="the strategy that should be the fastest",
        bytes_sent="as the strategy that the rule names",
        bytes_sent_backward="as the strategy that the rule names",
    ),
}

# The strategies that take each option.
_TAKE = {name: [s for s, row in STRATEGIES.items() if name in row.options] for name in StrategyOptions.__annotations__}


def compared_options(strategy: str) -> StrategyOptions:
    """Options for comparing strategies, with which each one differs from all others: context_parallel all-gathers."""
    return {"comm": "all_gather"} if strategy == "context_parallel" else {}


def check_strategy(strategy: object) -> None:
    """Raise unless it is the name of a strategy of the attention function."""
    if strategy == "tp_sp":
        raise ValueError(
            "strategy='tp_sp': it shards the weights of the projections, so it is a layer, "
            f"seqpar.ParallelAttention('tp_sp', ...); choose one of {', '.join(STRATEGIES)}, or use the layer"
        )
    check_choice("strategy", strategy, STRATEGIES)


def check_options(
    strategy: str, options: Iterable[str], allowed: Iterable[str], *functions: Callable[..., Any]
) -> None:
    """Raise unless the names of ``options`` are ``allowed``.

    What else was passed as a keyword may be a mistyped argument of ``functions``, which take the options.
    """
    names = list(allowed)
    for option in options:
        if option in names:
            continue
        if option == "gather":
            raise TypeError(
                f"gather: not an option of strategy {strategy!r}, but of the layer seqpar.ContextParallelAttention, "
                "which projects hidden states to keys and values itself; leave it out"
            )
        if option in _REPLACED_BY_MASK:
            raise TypeError(f"{option}: not an option; pass a mask, {_REPLACED_BY_MASK[option]}")
        if option in _NAMED_OTHERWISE:
            raise TypeError(f"{option}: not an option; {_NAMED_OTHERWISE[option]}")
        parameters = [p for function in functions for p in signature(function).parameters.values()]
        arguments = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        nearest = [option] if option in _TAKE else get_close_matches(option, [*names, *arguments, *_TAKE], n=1)
        strategys = f"did you mean {nearest[0]!r}? The strategy" if nearest else "the strategy"
        if nearest and nearest[0] in {*_TAKE} - {*names}:
            strategys = f"{nearest[0]} is an option of {' and '.join(_TAKE[nearest[0]])}; the strategy"
        has = f"'s options are {', '.join(names)}" if names else " has no options"
        raise TypeError(f"{option}: not an option of strategy {strategy!r}; {strategys}{has}")


def resolve(
    strategy: str, mesh: DeviceMesh | None, group: ProcessGroup | None, options: StrategyOptions | dict[str, Any]
) -> Placement:
    """Who takes part in attention with a strategy. ``Sharding.place`` adds the tokens that each rank holds.

    Raises:
        TypeError, ValueError: unknown strategy or option (with the nearest valid name), or ranks that do not fit.
    """
    check_strategy(strategy)
    check_options(strategy, options, STRATEGIES[strategy].options)
    return STRATEGIES[strategy].place(mesh, group, **options)
