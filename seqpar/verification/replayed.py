"""``replay_report``: where the bits of an attention call first differ from its replay in one process.

Every rank runs attention, and notes a checksum of the tensors that each kernel reads and of the tensors that it has
computed. Rank 0 replays all ranks from the same inputs, and compares the notes in the order of the steps. A replay's
messages are copies in one process. So the first note that differs says what is wrong: a message, if a kernel has read
something else; the kernel, if it has read the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.checks import no_compile
from ..comm.p2p import links_of
from ..functional import checked_call
from ..masks.mask import Mask
from ..placement.layout import Layout
from ..placement.placement import ANY_RANKS
from ..ranks.in_process import Crew
from ..ranks.mesh import ranks_by_host, ranks_per_host
from ..schedule.program import Step
from ..sharding.sharding import Sharding
from ..sharding.shards import local_shard
from ..sharding.spec import AttentionSpec
from ..strategies.auto import named
from ..strategies.call import AttentionCall
from ..strategies.operators import attention_gradients, compute
from ..strategies.prepare import new_call
from ..strategies.replay import attend_in_process, unknown_sums
from .gradients import all_gather_values

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..functional import WholeArguments

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CAUSES = {
    "input": "the kernel has read something else: the message that brought it is wrong, or the memory that holds it",
    "result": (
        "the kernel has read the same: its bits differ from call to call, or between the ranks' machines; pass "
        "deterministic=True, and compare torch.get_num_threads()"
    ),
    "returned": "all kernels computed the same: a message that returned it is wrong, or was added in another order",
}


@dataclass(frozen=True)
class BitDifference:
    """A tensor whose bits differ from the replay's.

    Attributes:
        rank: the rank of the sequence that holds it.
        direction: "forward" or "backward".
        step: the step of the schedule, with the keys of the step; "" for what is returned to the caller.
        quantity: the tensor: q, k, v, out, lse, dout, dq, dk or dv.
        role: "input" of a kernel, "result" of a kernel, or "returned" to the caller.
    """

    rank: int
    direction: str
    step: str
    quantity: str
    role: str

    def __str__(self) -> str:
        where = f", {self.step}" if self.step else ""
        return f"{self.direction}{where}, rank {self.rank}: {self.quantity}, {self.role}; {_CAUSES[self.role]}"


@dataclass(frozen=True)
class ReplayReport:
    """What ``replay_report`` returns, the same on every rank.

    Attributes:
        first: the first tensor in the order of the steps whose bits differ; None if none does.
        differing: for ``out, lse, dq, dk, dv`` and each rank, whether what the rank returns differs in a bit.
        errors: the norm of what the ranks return minus what one device computes, relative to the latter's norm.
        unit: one unit in the last place of their dtype, relative to 1.
        threads: ``torch.get_num_threads()`` of each rank.
        not_compared: why backward was not compared; "" if it was.
    """

    first: BitDifference | None
    differing: dict[str, tuple[int, ...]]
    errors: dict[str, float]
    unit: float
    threads: tuple[int, ...]
    not_compared: str = ""

    @property
    def ok(self) -> bool:
        """Whether all bits are equal."""
        return self.first is None

    def __str__(self) -> str:
        ranks, what = len(self.threads), "forward" if self.not_compared else "forward and backward"
        if self.first is None:
            lines = [f"seqpar.replay_report: every bit of {what} on {ranks} rank(s) is the replay's"]
        else:
            lines = [f"seqpar.replay_report: not the replay's bits on {ranks} rank(s)", f"first: {self.first}"]
            lines += [
                f"{name} differs on rank(s) {', '.join(map(str, on))}" for name, on in self.differing.items() if on
            ]
        if len(set(self.threads)) > 1:
            lines.append(f"the ranks have {list(self.threads)} threads, which decide the order of some sums on a CPU")
        if self.not_compared:
            lines.append(f"backward was not compared: {self.not_compared}")
        errors = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
        return "\n".join([*lines, f"relative to one device the errors are {errors}; a unit is {self.unit:.1e}"])


Note = tuple[str, str, str, str, int]  # direction, step, role, quantity, checksum


class _Notes:
    """The notes of one rank (see ``strategies.call.Record``)."""

    def __init__(self) -> None:
        self.found: list[Note] = []

    def __call__(self, direction: str, role: str, step: Step | None = None, **tensors: Tensor) -> None:
        where = ""
        if step is not None:
            owners = sorted({transfer.owner for transfer in step.intra_host.receives})
            keys = f"keys of ring rank(s) {', '.join(map(str, owners))}" if step.index else "own keys"
            where = f"step {step.index} ({keys})"
            if step.q_heads is not None:
                where += f" of query heads {step.q_heads.start} to {step.q_heads.stop - 1}"
        self.found += [(direction, where, role, name, _checksum(x)) for name, x in tensors.items()]


def _checksum(x: Tensor) -> int:
    """A checksum of the bits of ``x``, whatever the order of its sum."""
    bits = x.detach().contiguous().view(_INTEGERS[x.element_size()]).flatten().to(torch.int64)
    return int((bits * torch.arange(1, 2 * len(bits), 2, device=x.device)).sum())


@no_compile
def replay_report(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None = None,
    *,
    sharding: Sharding,
    **options: Unpack[WholeArguments],
) -> ReplayReport:
    """Run attention on the ranks and replay it on rank 0, and say where the bits first differ: rank, step and tensor.

    It answers whether two runs part in a message, in a kernel, or in neither. All ranks of the sequence call it, with
    the arguments that they pass to ``attention``. It gathers the whole q, k and v on every rank, and rank 0 computes
    the work of all ranks.

    Args:
        q: ``[batch, seq, heads, head_dim]``, this rank's tokens.
        k: ``[batch, seq, kv_heads, head_dim]``, this rank's tokens.
        v: ``[batch, seq, kv_heads, v_head_dim]``, this rank's tokens.
        dout: the gradient of the output, ``[batch, seq, heads, v_head_dim]``; None: random numbers.
        sharding: the ranks, and the tokens that each holds.
        options: the other arguments of ``attention`` except ``return_lse`` and ``return_max_logit``. With
            ``dropout_p``, pass a ``dropout_seed``.

    Returns:
        The report, the same on every rank: ``report.ok``, ``report.first``, and ``str(report)`` with a probable cause.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a wrong value.

    Examples:
        >>> q, k, v = (torch.randn(1, 32, 4, 8) for _ in range(3))
        >>> replay_report(q, k, v, sharding=Sharding(32)).ok
        True
    """
    if not isinstance(sharding, Sharding):
        raise TypeError(f"sharding={sharding!r}: expected a seqpar.Sharding, as Sharding(seq_len, layout) makes one")
    qkv, spec, mask, vectors = checked_call(q, k, v, replay_report, True, **options)
    q, k, v = (x.detach() for x in qkv)
    spec = named(spec, mask, q.shape[2], k.shape[2], sharding)
    vectors = {name: None if x is None else x.detach() for name, x in vectors.items()}
    notes, group = _Notes(), sharding.sequence_group
    with torch.no_grad():
        of_call = vectors["sinks"], vectors["alibi_slopes"], vectors["seed"], vectors["latent_weight"]
        call = replace(new_call(q, k, v, *of_call, spec, mask, sharding, ANY_RANKS), record=notes)
        why = unknown_sums(call, q.device)
        out, lse, saved = compute(call, q, k, v, vectors["latent_weight"])
        notes("forward", "returned", out=out, lse=lse)
        call = replace(call, record=None if why else notes)
        if dout is None:
            generator = torch.Generator(q.device).manual_seed(call.placement.rank)
            dout = torch.randn(out.shape, dtype=torch.float32, device=q.device, generator=generator)
        dout = dout.detach().to(out.dtype)
        shapes = q.shape, k.shape, v.shape
        gradients = attention_gradients(call, saved, dout, None, shapes, vectors["latent_weight"])[:3]
        if not why:
            notes("backward", "returned", None, **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
        whole = [sharding.unshard(x) for x in (q, k, v, dout)]
        got = dict(zip(("out", "dq", "dk", "dv"), map(sharding.unshard, (out, *gradients)), strict=True))
    notes_and_threads = all_gather_values([notes.found, torch.get_num_threads()], group)
    found: list[Any] = []
    if call.placement.rank == 0:
        theirs, of_one = _replay(call, spec, whole, mask, sharding, vectors, forward_only=bool(why))
        found = [*_compare([of_rank for of_rank, _ in notes_and_threads], theirs)]
        found.append({name: _error(got[name].double(), x.double()) for name, x in of_one.items()})
    first, differing, errors = all_gather_values(found, group)[0]
    return ReplayReport(
        first=None if first is None else BitDifference(*first),
        differing={name: tuple(on) for name, on in differing.items()},
        errors=errors,
        unit=torch.finfo(out.dtype).eps,
        threads=tuple(threads for _, threads in notes_and_threads),
        not_compared=why,
    )


def _replay(
    call: AttentionCall,
    spec: AttentionSpec,
    whole: list[Tensor],
    mask: Mask,
    sharding: Sharding,
    vectors: dict[str, Any],
    forward_only: bool,
) -> tuple[list[list[Note]], dict[str, Tensor]]:
    """The notes of every rank in a replay of ``call``, and the results of one device."""
    links, group = links_of(call.placement, whole[0].device), sharding.sequence_group
    in_memory = any(link is not None and link.reads_in_place for link in links)
    ranks, tokens, options = sharding.ranks, call.placement.tokens, dict(spec.strategy_options)
    if spec.strategy == "hybrid" or options.get("comm") == "a2a+p2p":
        options["ulysses_size"] = tokens.ulysses  # a mesh has said it
    notes = [_Notes() for _ in range(ranks)]

    def run(spec: AttentionSpec, layout: Layout, crew: Crew, records: list[_Notes]) -> dict[str, Tensor]:
        q, k, v = (x.clone().requires_grad_(not forward_only) for x in whole[:3])
        out, lse = attend_in_process(q, k, v, spec, mask, layout, crew, **vectors, records=records)
        assert lse is not None
        for rank, note in enumerate(records):
            of_rank = (local_shard(x, dim, sharding.tokens, rank) for x, dim in ((out, 1), (lse, 2)))
            note("forward", "returned", None, **dict(zip(("out", "lse"), of_rank, strict=True)))
        results = {"out": out.detach()}
        if forward_only:
            return results
        results |= zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), whole[3]), strict=True)
        for rank, note in enumerate(records):
            of_rank = (local_shard(results[name], 1, sharding.tokens, rank) for name in ("dq", "dk", "dv"))
            note("backward", "returned", None, **dict(zip(("dq", "dk", "dv"), of_rank, strict=True)))
        return results

    with torch.set_grad_enabled(not forward_only):
        crew = Crew(ranks, ranks if group is None else ranks_per_host(ranks_by_host(group)), in_memory)
        run(spec.having(strategy_options=tuple(options.items())), sharding.layout, crew, notes)
        of_one = run(spec.having(strategy="ring", strategy_options=()), "contiguous", Crew(1, 1, True), [])
    return [of_rank.found for of_rank in notes], of_one


def _error(x: Tensor, expected: Tensor) -> float:
    return float((x - expected).norm() / expected.norm().clamp(min=torch.finfo(torch.float64).tiny))


def _compare(ours: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]) -> tuple[Any, dict[str, list[int]]]:
    """The first difference, as arguments of ``BitDifference``, and the ranks on which each result differs."""
    different: list[tuple[bool, int, int, Any]] = []
    differing: dict[str, list[int]] = {}
    for rank, pairs in enumerate(zip(ours, theirs, strict=True)):
        for at, (mine, replayed) in enumerate(zip_longest(*pairs)):
            direction, _, role, name, _ = note = replayed or mine
            if role == "returned":
                differing.setdefault(name, [])
            if list(mine or ()) != list(replayed or ()):
                different.append((direction == "backward", at, rank, note))
                if role == "returned":
                    differing[name].append(rank)
    if not different:
        return None, differing
    _, _, rank, (direction, where, role, name, _) = min(different, key=lambda x: x[:3])
    return [rank, direction, where, name, role], differing
