"""One attention call with everything resolved, and its run: the program of this rank with all that carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..base.cache import is_captured
from ..comm.p2p import call, links_of
from ..comm.streams import ReadyEvents
from ..kernels import BackendChoice
from ..kernels.base import Carry, Grads, OutputGrad, Score, accumulator
from ..kernels.expansion import Expansion, RepeatedHeads
from ..placement.heads import Heads, kv_index
from ..placement.placement import Placement
from ..schedule.plan import AttentionPlan
from ..schedule.program import Program, Step
from ..sharding.spec import AttentionSpec, spec_checksum
from .latent import LatentKeys
from .local import Kernel
from .transfers import GradientReduce, Transfers, take_heads
from .transport import Collectives, PeerToPeer, Transport

# K/V are sent in chunks of heads of at least this many bytes, by device type. A transfer of this size takes much longer
# than it takes to start a transfer and to split a kernel.
_MIN_CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 8 << 20}
# The most chunks of a step. A ring has fewer, because the transfer of one step overlaps with the previous step.
_MAX_CHUNKS = 4
# While one step (or one chunk of heads of a step) is computed, the K/V of this many more are being received.
_PREFETCH_STEPS = 2
# The same with ``chunks=``, which asks for less memory; and in an all-gather over several hosts, in which the rows of a
# chunk can be shared inside the host only after they have arrived there.
_MIN_PREFETCH_STEPS = 1


_NOTHING = nullcontext()


class Record(Protocol):
    """Notes tensors of this rank: what a kernel reads ("input"), and what it has computed ("result")."""

    def __call__(self, direction: str, role: str, step: Step | None = None, **tensors: Tensor) -> None: ...


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What ``ring.py`` and ``ulysses.py`` need to know besides the tensors: found once, see ``prepare.py``.

    Attributes:
        placement: who takes part in it, and which positions these ranks hold.
        plan: which K/V rows are sent when, and which keys each query sees.
        spec: its constants.
        heads: the heads of q, k and v. Under tensor parallelism these are some of the model's heads.
        score: how scores are computed, for all of ``heads``.
        cuts: with ``deterministic="invariant"``, the positions that divide the sequence into documents: for each group
            of heads with a mask of its own, ``Mask.cuts``.
        latent: in latent attention, expands k and v, which then hold latents and rotated keys.
        kv_ready: the point on the GPU's stream from which k and v could be sent, noted in forward and used in backward.
            None: messages are sent from the stream of the kernels.
        errors: the errors of kernels, where this rank sends messages (see ``raise_error``). None: a kernel raises them.
        record: notes the tensors before and after each kernel, to compare two runs; None in all other calls.
        kept: what later calls of the same kind use again: programs, and the choice of a backend.
    """

    placement: Placement
    plan: AttentionPlan
    spec: AttentionSpec
    heads: Heads
    score: Score
    cuts: tuple[tuple[tuple[int, ...], ...], ...] = ()
    latent: LatentKeys | None = None
    kv_ready: ReadyEvents | None = field(default_factory=ReadyEvents, repr=False)
    errors: list[Exception] | None = field(default=None, repr=False)
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)
    record: Record | None = field(default=None, repr=False)

    @cached_property
    def has_all_keys(self) -> bool:
        """Whether this rank has all keys that its queries see, and one kernel attends to them with all heads."""
        return self.plan.num_steps == 1 == len(self.plan) and self.record is None

    def with_values(
        self, sinks: Tensor | None, alibi_slopes: Tensor | None, dropout_seed: int, like: Tensor
    ) -> AttentionCall:
        """A call of this kind with these values, for kernels on the device of ``like``: ``sinks [h]``,
        ``alibi_slopes [h]`` or ``[b, h]``."""
        spec = self.spec
        changes: dict[str, Any] = {}
        if self.placement.sends:
            changes = {"errors": [], "kv_ready": ReadyEvents()}
        if spec.alibi_slopes is not None:
            alibi_slopes = spec.slopes(self.heads, like.device)
        if spec.dropout_p and is_captured():
            raise RuntimeError(
                f"dropout_p={spec.dropout_p}: a CUDA graph cannot capture attention dropout, because every replay "
                "would drop the same pairs; capture with dropout_p=0, or leave attention out of the graph"
            )
        if sinks is not None or alibi_slopes is not None or spec.dropout_p:
            changes["score"] = replace(
                self.score,
                alibi_slopes=None if alibi_slopes is None else alibi_slopes.detach().float(),
                sinks=None if sinks is None else sinks.detach(),
                dropout_seed=dropout_seed,
            )
        if not changes:
            return self
        made = object.__new__(AttentionCall)
        made.__dict__.update(self.__dict__, **changes)
        return made

    def with_latent(self, latent: LatentKeys) -> AttentionCall:
        """This call in latent attention."""
        return replace(self, latent=latent)

    def raise_error(self) -> None:
        """Raise the first error of a kernel.

        A rank whose kernel raises goes on to send and to receive until the end of the call, with results of NaN. So its
        messages stay in step with the messages of ranks whose kernels raise at another step, or do not raise.
        """
        assert self.errors
        error = self.errors[0]
        self.errors.clear()
        raise error

    def on_ranks(
        self, direction: str, shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> AbstractContextManager[None]:
        """In the block, the ranks of the call exchange its messages. ``shapes`` are the shapes of q, k and v."""
        if not self.placement.sends:
            return _NOTHING
        (batch, _, heads, dim), (_, _, kv_heads, _), (_, _, _, v_dim) = shapes
        what = batch, heads, dim, kv_heads, v_dim, dtype.itemsize, self.plan.checksum, spec_checksum(self.spec)
        has = self.score.sinks is not None, self.score.alibi_slopes is not None
        return call(self.placement.sequence_group, direction, *what, *has)

    def kernel(
        self, q: Tensor, k: Tensor, v: Tensor, heads: Heads | None = None, *, lse_gradient: bool = False
    ) -> Kernel:
        """The kernel for ``q [b, q, h, d]``, ``k [b, k, n, d]`` and ``v [b, k, n, e]``.

        ``heads`` are the heads of these tensors, all or some of the call's. ``lse_gradient``: whether backward has a
        gradient of the log-sum-exp.
        """
        if heads is self.heads:
            heads = None
        if (key := (heads, lse_gradient)) not in self.kept:
            choice = BackendChoice(self.spec.backend, q, bool(self.spec.deterministic))
            self.kept[key] = choice, kv_index(heads or self.heads)
        choice, index = self.kept[key]
        score, latent = self.score, self.latent
        if heads is not None:
            at = heads.q_range(within=self.heads)
            score = score.heads(at.start, at.stop)
            latent = None if latent is None else latent.of(at)
        expansion: Expansion | None = latent
        if latent is None and index is not None:
            expansion = RepeatedHeads(index, q.device)
        v_head_dim = v.shape[3] if latent is None else latent.v_head_dim
        return Kernel(choice, score, q, k, v_head_dim, expansion, lse_gradient=lse_gradient, errors=self.errors)

    def v_head_dim(self, v_shape: Sequence[int]) -> int:
        """The head_dim of the output, for ``v [b, k, n, e]`` as it is sent."""
        return v_shape[3] if self.latent is None else self.latent.v_head_dim

    def program(
        self, heads: Heads, k: Tensor, v: Tensor, *, attends: bool = True, shares_memory: bool = False
    ) -> Program:
        """The program of the plan for heads whose KV are ``k [b, k, n, d]`` and ``v [b, k, n, e]``.

        The number of chunks is the same on all ranks, whatever the lengths of their shards.
        """
        key = None if heads is self.heads else heads, attends, shares_memory
        if key in self.kept:
            program: Program = self.kept[key]
            return program
        plan, chunks = self.plan, self.placement.chunks
        saves_memory = chunks is not None or (plan.gather and plan.per_host < plan.tokens.ring)
        if chunks is None and (shares_memory or plan.num_steps == 1):
            chunks = 1
        elif chunks is None:
            nbytes = k.shape[0] * plan.longest * k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
            most = -(-_MAX_CHUNKS // (plan.num_steps - 1))
            chunks = min(most, nbytes // _MIN_CHUNK_BYTES.get(k.device.type, 8 << 20))
        program = self.kept[key] = plan.program(
            heads,
            max(1, chunks),
            attends=attends,
            prefetch=_MIN_PREFETCH_STEPS if saves_memory else _PREFETCH_STEPS,
            split_own=not shares_memory and self.latent is None,
        )
        return program


class Run:
    """The program of this rank for some heads of a call, with the kernel and the transport that carry it out.

    All ranks of the ring must make it, because the first one connects them.

    Args:
        call: the call.
        heads: the heads of ``q, k, v``, all or some of ``call.heads``.
        q, k, v: ``[b, q, h, d]``, ``[b, k, n, d]`` and ``[b, k, n, e]``, contiguous.
        lse_gradient: whether backward has a gradient of the log-sum-exp.
        is_part: whether gradients of other runs or ranks are added to this run's dk and dv.
    """

    is_part = False

    def __init__(
        self,
        call: AttentionCall,
        heads: Heads,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        lse_gradient: bool = False,
        is_part: bool = False,
    ) -> None:
        plan, self.record = call.plan, call.record
        links = links_of(call.placement, q.device)
        shares_memory = plan.num_steps > 1 and links.share_memory
        self.kv_ready, self.plan, self.heads, self.is_part = call.kv_ready, plan, heads, is_part
        self.program = call.program(heads, k, v, attends=q.numel() > 0, shares_memory=shares_memory)
        self.steps, self.plans = self.program.steps, self.program.plans or (plan,)  # of forward, own keys first
        # Ranks that share memory read one another's messages in place. An all-gather would copy them.
        collective = plan.num_steps > 1 and plan.dense and not shares_memory
        self.transport: Transport = (Collectives if collective else PeerToPeer)(plan, links)
        self.kernel = call.kernel(q, k, v, heads, lse_gradient=lse_gradient)

    @property
    def backward_steps(self) -> tuple[Step, ...]:
        """The steps of backward: where messages are sent, own keys are divided into a first and a last step."""
        return self.program.backward_steps

    def transfers(self, k: Tensor, v: Tensor) -> Transfers:
        """The K/V of each step."""
        return Transfers(self.steps, self.transport, k, v, self.kv_ready, self.plan.gather)

    def returns(self, dk: Any, dv: Any) -> GradientReduce:
        """The way of the gradients back to the owners of the K/V."""
        return GradientReduce(self.transport, dk, dv, self.plan.gather)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step, carries: Carries | None) -> Carries:
        """Continue the online softmax of the step's heads over the step's keys."""
        carries = carries or [None] * len(self.program.chunks)
        if step.attends:
            carry = carries[step.chunks.start]
            seen = partial(self.plans[step.group].intervals, step.index, q.device, self.kernel.needs_positions)
            if self.record is not None:
                self.record("forward", "input", step, q=q, k=k, v=v)
            carry = self.kernel.forward(q, k, v, seen, carry, step.is_last, step.q_heads)
            if self.record is not None:
                self.record("forward", "result", step, out=carry[0], lse=carry[1])
        elif step.is_last:  # no query sees any key
            carry = self.kernel.finish(self.kernel.empty(take_heads(q, step.q_heads)), q.dtype, step.q_heads)
        else:
            return carries
        if len(step.chunks) == 1 or step.is_last:
            carries[step.chunks.start] = carry
            return carries
        first = step.q_heads.start if step.q_heads else 0
        for i in step.chunks:
            x = self.program.chunks[i].q_range(within=self.heads)
            at = slice(x.start - first, x.stop - first)
            carries[i] = carry[0][:, :, at].contiguous(), carry[1][:, at].contiguous()
        return carries

    def finish(self, carries: Carries | None) -> Carry:
        """``out [b, q, h, e]`` in q's dtype and ``lse [b, h, q]`` of all heads."""
        results = [carry for carry in carries or () if carry is not None]
        if len(results) == 1:
            return results[0]
        return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 1)

    def new_gradients(self, q: Tensor, k: Tensor, v: Tensor) -> list[Any]:
        """Memory for dq and for the dk and dv of this rank's K/V, in float32 (float64 for float64).

        It is zero for the heads to which ``backward`` adds before it has written them. Gradients of a single step are
        None: the kernel makes them, in any floating dtype.
        """
        steps = self.program.backward_steps
        if len(steps) == 1:
            return [None, None, None]
        dq, dk, dv = (torch.empty_like(x, dtype=accumulator(q.dtype)) for x in (q, k, v))
        for step in steps:
            if step.index == 0 and not step.new_dq:
                take_heads(dq, step.q_heads).zero_()
                for x in (dk, dv):
                    take_heads(x, step.kv_heads).zero_()
        return [dq, dk, dv]

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, output: OutputGrad, step: Step, grads: list[Any], dk: Any, dv: Any
    ) -> None:
        """Add the gradients of a step to ``grads[0]``, ``dk`` and ``dv``, or write them where these are new."""
        dq = take_heads(grads[0], step.q_heads)
        of_step = Grads(dq, dk, dv, step.new_dq, step.new_dkv, final=dq is None and not self.is_part)
        if step.attends:
            seen = partial(self.plans[step.group].intervals, step.index, q.device, self.kernel.needs_positions)
            if self.record is not None:
                self.record("backward", "input", step, q=q, k=k, v=v, dout=output.dout, out=output.out, lse=output.lse)
            self.kernel.backward(q, k, v, output, seen, of_step, step.q_heads)
            if self.record is not None:
                self.record("backward", "result", step, dq=of_step.dq, dk=of_step.dk, dv=of_step.dv)
        else:
            of_step.make(q, k, v)
            of_step.zero_new_()
        if grads[0] is None:
            grads[:] = of_step.dq, of_step.dk, of_step.dv


Carries = list[Carry | None]  # one for each chunk of heads
