"""Attention layers: projections and rotary embeddings around sequence-parallel attention.

``AttentionLayer._compute`` is the layer. Tensor parallelism overrides how it projects, and ``gather="activations"``, in
which keys are projected from all ranks' hidden states, all of it.

Shapes: b batch, s tokens of this rank, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

from ..base.checks import (
    check_bool,
    check_choice,
    check_dropout,
    check_dtype,
    check_hidden,
    check_int,
    check_number,
    check_slopes,
    has_length,
    no_compile,
)
from ..base.sharded import is_dtensor
from ..comm.handshake import Fingerprint, all_gather_header, check_same, fingerprint, propagate_errors
from ..decoding import KeyValueCache, check_cache
from ..kernels import BACKENDS, BackendName, check_backend
from ..masks.mask import Mask, check_rows
from ..placement.layout import Layout, check_layout, check_lengths, least_length
from ..placement.placement import ParallelContext
from ..placement.strategies import COMMS, STRATEGIES, check_options
from ..ranks.mesh import size_of
from ..schedule.plan import plan_ahead
from ..sharding.arguments import check_sharding, layout_of, require_layout, sharding_of_one_rank
from ..sharding.sharding import Sharding, resolve_sequence_group
from ..sharding.spec import AttentionSpec, Deterministic, check_deterministic, constants
from ..strategies import operators
from ..strategies.attend import attend
from ..strategies.auto import named
from ..strategies.autograd import any_needs_gradient, gradient_state, with_gradient
from ..strategies.tensor_operators import ShardedTokens, all_gather_positions
from .arguments import check_heads, check_positions, check_rope
from .holders import refuse_shards
from .rotary import RotaryEmbedding, rotary_length

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..placement.strategies import StrategyName, StrategyOptions
    from ..strategies.gathered_activations import Gather
    from ..strategies.sequence_chunks import Overlap

    class LayerOptions(StrategyOptions, total=False):
        """The options of all layers."""

        gather: Gather
        """context_parallel with "all_gather": what ranks receive, "kv" or "activations"."""
        overlap: Overlap
        """tp_sp: how communication and GEMMs overlap, "auto", "ring" or "none"."""
        context: StrategyName | None
        """tp_sp: the strategy of attention over the mesh's ring and ulysses dimensions."""


NORM_EPS = 1e-6  # Qwen 3's and Gemma 3's


class _LayerHeader(NamedTuple):
    """A rank's input, for the handshake. ``length`` is added up over the ranks, ``gradient`` is the rank's
    ``gradient_state``, and the other fields must be the same on all ranks."""

    length: int
    batch: int
    dtype: torch.dtype
    mask_or_options: Fingerprint
    gradient: int


class AttentionLayer(nn.Module):
    """Self-attention over a sequence whose tokens are sharded over ranks; each subclass fixes the strategy.

    Every rank holds all the weights, named and shaped as in Hugging Face's Llama: ``q_proj [heads * head_dim,
    hidden]``, ``k_proj`` and ``v_proj [kv_heads * head_dim, hidden]``, ``o_proj [hidden, heads * head_dim]``; with
    ``qk_norm`` also ``q_norm`` and ``k_norm [head_dim]``, with ``sinks`` also ``sinks [heads]``. A checkpoint of one
    strategy therefore loads under every other. ``seqpar.sync_gradients`` averages the gradients of the weights after
    ``backward``.

    The constants of attention are in ``spec``, an ``AttentionSpec``. The subclasses document the options of their
    strategies: ``comm``, ``gather`` and ``chunks`` (context_parallel), ``ulysses_size`` (context_parallel and hybrid),
    ``overlap`` and ``context`` (tp_sp).

    Args:
        hidden_size: width of the hidden states.
        num_heads: query heads.
        num_kv_heads: KV heads, a divisor of ``num_heads``; by default ``num_heads`` (multi-head attention).
        head_dim: by default ``hidden_size // num_heads``.
        mesh: the ranks that the sequence is sharded over, as a mesh (see ``init_mesh``).
        group: the ranks that the sequence is sharded over, as a ProcessGroup. With neither, the ranks of the
            ``sharding`` that the layer is called with, or the default group. "tp_sp" does not take the sharding's
            ranks, because its weights are sharded when the layer is made.
        layout: how the tokens are sharded: "contiguous", "zigzag", "striped" or a ``seqpar.Assigned``. By default the
            layout of the ``sharding`` that the layer is called with. Over several ranks one of the two must be given,
            except for "tp_sp" over the tensor-parallel ranks alone, whose layout is then "contiguous".
        bias: whether the q, k and v projections have biases (Qwen 2).
        out_bias: whether the output projection has a bias; the same as ``bias`` by default.
        qk_norm: RMS-normalise each head of q and k before the rotary embedding (Qwen 3, Gemma 3).
        rope: a ``seqpar.RotaryEmbedding``, or None. Layers may share one.
        softmax_scale: a factor on the scores, ``head_dim ** -0.5`` by default.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 is none (Gemma 2).
        sinks: whether each head has a learned logit in the denominator of the softmax, initially 0 (gpt-oss).
        alibi_slopes: ``[num_heads]``, a tensor or numbers. ``slope * |i - j|`` is subtracted from the scores, for
            global positions ``i`` and ``j`` (Press et al., 2021). They are constants, which checkpoints do not hold.
        dropout_p: the probability of dropping an attention weight, in training mode only.
        deterministic: as in ``seqpar.attention``: True, False or "invariant".
        backend: "auto" or one of ``seqpar.backends()``.
        device: the device of the weights.
        dtype: the dtype of the weights.
    """

    strategy: ClassVar[str]

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        layout: Layout | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        qk_norm: bool = False,
        rope: RotaryEmbedding | None = None,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
        alibi_slopes: Tensor | Sequence[float] | None = None,
        dropout_p: float = 0.0,
        deterministic: Deterministic = False,
        backend: BackendName = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **strategy_options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        kv_heads, head_dim = check_heads(hidden_size, num_heads, num_kv_heads, head_dim)
        if layout is not None:
            check_layout(layout)
        check_choice("backend", backend, ("auto", *BACKENDS))
        if check_number("softcap", softcap) < 0:
            raise ValueError(f"softcap={softcap}: expected a positive cap, or 0 for none")
        flags = {"bias": bias, "qk_norm": qk_norm, "sinks": sinks}
        for name, flag in (flags if out_bias is None else {**flags, "out_bias": out_bias}).items():
            check_bool(name, flag)
        check_deterministic(deterministic)
        check_dtype(dtype)
        check_rope(rope, head_dim)
        self._check_options(dict(strategy_options))
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = kv_heads
        self.head_dim = head_dim
        self.layout: Layout | None = layout
        self.strategy_options: StrategyOptions = strategy_options
        self.spec = AttentionSpec(
            strategy=self.strategy,
            strategy_options=constants(strategy_options),
            softmax_scale=None if softmax_scale is None else check_number("softmax_scale", softmax_scale),
            softcap=float(softcap),
            dropout_p=check_dropout(dropout_p),
            deterministic=deterministic,
            backend=backend,
            all_heads=(num_heads, kv_heads),
            alibi_slopes=check_slopes(alibi_slopes, num_heads),
        )
        self._parallel_context = ParallelContext(mesh, group)
        self.rope = rope
        out_bias = bias if out_bias is None else out_bias
        self._build(bias, out_bias, qk_norm, sinks, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def _build(self, bias: bool, out_bias: bool, qk_norm: bool, sinks: bool, factory_kwargs: dict[str, Any]) -> None:
        hidden, queries, keys = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, queries, bias=bias, **factory_kwargs)
        self.k_proj = nn.Linear(hidden, keys, bias=bias, **factory_kwargs)
        self.v_proj = nn.Linear(hidden, keys, bias=bias, **factory_kwargs)
        self.o_proj = nn.Linear(queries, hidden, bias=out_bias, **factory_kwargs)
        self.sinks = nn.Parameter(torch.empty(self.num_heads, **factory_kwargs)) if sinks else None
        norm = partial(nn.RMSNorm, self.head_dim, eps=NORM_EPS, **factory_kwargs)
        self.q_norm, self.k_norm = (norm() if qk_norm else None for _ in range(2))

    def reset_parameters(self) -> None:
        """Initialise the parameters that belong to no submodule, as FSDP requires of modules made on "meta"."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh it was made with."""
        return self._parallel_context.mesh

    @property
    def group(self) -> ProcessGroup | None:
        """The group it was made with."""
        return self._parallel_context.group

    def forward(
        self,
        x_local: Tensor,
        mask: Mask = Mask.causal(),  # noqa: B008 (an immutable value)
        sharding: Sharding | None = None,
        positions: Tensor | None = None,
        seq_len: int | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Attention over the full sequence, for this rank's tokens.

        Args:
            x_local: ``[batch, seq, hidden]``, this rank's tokens.
            mask: which tokens each token sees, in global positions. The same on every rank.
            sharding: the ``Sharding`` that the tokens were sharded with. The layer need not be made with ranks and a
                layout then; if it is, the sharding must have the same. There is no handshake (see
                ``seqpar.attention``), except for the seed of dropout in training mode, and for "dynamic" rotary
                embeddings with ``positions``.
            positions: integers ``[seq]`` or ``[batch, seq]``, for the rotary embedding only; by default the global
                positions that the layout gives this rank. Under "tp_sp" and ``gather="activations"`` every layer
                all-gathers them and computes a rotary table of its own, which by default the layers share.
            seq_len: the length of the full sequence, if no ``sharding`` is given. With it there is no handshake
                either.
            cache: for generation, without gradients. In the first call with a ``KeyValueCache``, ``x_local`` are this
                rank's tokens of the prompt, sharded as ``cache.sharding``. In every later call they are the new tokens
                ``[batch, new, hidden]``, the same on every rank, and so is the result; ``positions`` are then
                ``[new]`` or ``[batch, new]``. ``mask`` is in positions of the full sequence, which grows.

        Returns:
            ``y_local [batch, seq, hidden]``, of the same tokens.

        Raises:
            TypeError: an argument of the wrong type, before any payload is sent.
            ValueError: a wrong value, or ranks that disagree, before any payload is sent.
            RuntimeError: another rank raised an error on its own input.

        ``torch.compile`` traces the layer, with attention as one operator, if it is given a ``sharding``. Otherwise the
        layer is one graph break in the code around it.
        """
        if cache is not None:
            return self._compute_cached(x_local, mask, sharding, positions, seq_len, cache)
        if isinstance(sharding, Sharding) and seq_len is None and self.layout in (None, sharding.layout_name):
            return self._compute(x_local, mask, sharding, positions)
        return self._agree_and_compute(x_local, mask, sharding, positions, seq_len)

    @no_compile
    def _agree_and_compute(
        self, x: Tensor, mask: Mask, sharding: Sharding | None, positions: Tensor | None, seq_len: int | None
    ) -> Tensor:
        """``forward`` that makes a sharding, or compares the given one with the layout and ``seq_len``.

        If the length is not known, the ranks tell each other in a handshake, and compare their arguments.
        """
        check_sharding(sharding, seq_len=seq_len)
        if sharding is not None:
            if self.layout not in (None, sharding.layout):
                raise ValueError(
                    f"sharding: its layout is {sharding.layout!r}, but the layer was made with layout={self.layout!r}; "
                    "leave the layer's layout out, or make both alike"
                )
            return self._compute(x, mask, sharding, positions)
        where: dict[str, Any] = {"mesh": self.mesh, "group": self.group, "strategy": self.strategy}
        group = resolve_sequence_group(**where)
        if (
            size_of(group) == 1 and isinstance(x, Tensor) and not x.is_nested and x.dim() == 3
        ):  # the rest is checked below
            layout = layout_of(self.layout, **where) if self.strategy == "tp_sp" else require_layout(self.layout, group)
            sharding = sharding_of_one_rank(x.shape[1] if seq_len is None else seq_len, layout, group, **where)
            return self._compute(x, mask, sharding, positions)
        needs_handshake = not has_length(seq_len)
        with propagate_errors(group if needs_handshake else None):
            if seq_len is not None:
                check_int("seq_len", seq_len, 0)
            check_backend(self.spec.backend)
            self._check_input(x, mask, positions)
            layout = layout_of(self.layout, **where) if self.strategy == "tp_sp" else require_layout(self.layout, group)
            of_few_tokens = Sharding(least_length(layout), layout, **where)
            of_few_tokens.place(self.spec, self._parallel_context)  # raises if the options do not fit
        joins_backward = True
        if needs_handshake:
            numbers = self.spec.softmax_scale, self.spec.softcap, self.spec.dropout_p * self.training
            is_invariant = self.spec.deterministic == "invariant"
            options = self.extra_repr(), layout, *numbers, self.spec.alibi_slopes, is_invariant
            gradient = gradient_state(x, *self.parameters())
            header = _LayerHeader(x.shape[1], x.shape[0], x.dtype, fingerprint(mask, *options), gradient)
            headers = all_gather_header(lambda: header, group)
            check_same(headers, "batch", "dtype", "mask_or_options")
            seq_len = check_lengths([header.length for header in headers], layout)
            joins_backward = any_needs_gradient([header.gradient for header in headers])
        assert seq_len is not None
        return self._compute(x, mask, Sharding(seq_len, layout, **where), positions, joins_backward)

    @no_compile
    def _compute_cached(
        self,
        x: Tensor,
        mask: Mask,
        sharding: Sharding | None,
        positions: Tensor | None,
        seq_len: int | None,
        cache: KeyValueCache,
    ) -> Tensor:
        check_cache(cache, sharding, self.spec.dropout_p * self.training)
        if seq_len is not None:
            raise ValueError(f"seq_len={seq_len}: a call with a cache takes cache.sharding; leave seq_len out")
        cache.check_no_grad()
        if self.rope is not None and self.rope.needs_length:
            raise ValueError(
                "rope_type='dynamic': its angles change with the length, but cached keys keep their angles; generate "
                "with another scaling, such as 'ntk' or 'yarn', or without a cache"
            )
        if not cache.holds(self):
            return self._compute(x, mask, cache.sharding, positions, False, cache)
        self._check_input(x, mask, positions)
        cache.check_new(x)
        spec = self._call_spec(mask, cache.sharding)
        q, k, v = self._heads_of(x, None)
        if self.rope is not None:
            q, k = self.rope(q, k, cache.new_positions(self, x.shape[1]) if positions is None else positions)
        group = cache.sharding.place(spec, self._parallel_context).sequence_group
        out = cache.attend(self, q, k, v, self.local_weight("sinks"), None, spec, mask, group)
        return self._output(out.flatten(2), None)

    def _compute(
        self,
        x: Tensor,
        mask: Mask,
        sharding: Sharding,
        positions: Tensor | None,
        joins_backward: bool = True,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """``forward`` with a sharding, in eager and in compiled code.

        ``joins_backward`` is False if no rank's inputs require gradients. An empty ``cache`` stores keys and values.
        """
        self._check_input(x, mask, positions, sharding)
        ranks, spec = self._parallel_context, self._call_spec(mask, sharding)
        length = self._rotary_length(x, positions, sharding)
        tokens = self._gathered_tokens(x, sharding, spec)
        if tokens is not None:  # the projections communicate
            x = with_gradient(x) if joins_backward else x
            if positions is not None and self.rope is not None:
                positions = all_gather_positions(positions, *tokens[1:])
        q, k, v = self._heads_of(x, tokens)
        if self.rope is not None:
            positions = operators.global_positions(q, sharding, ranks, spec) if positions is None else positions
            q, k = self.rope(q, k, positions, length)
        if cache is not None:
            cache.fill(self, k, v, operators.global_positions(k, sharding, ranks, spec))
        out = self._attend(q, k, v, mask, sharding, spec, joins_backward)
        return self._output(out, tokens)

    def _heads_of(self, x: Tensor, tokens: ShardedTokens | None) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[b, s, h, d]``, k and v ``[b, s, n, d]``, before the rotary embedding."""
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self._project(x, tokens))
        return normalized(q, self.q_norm), normalized(k, self.k_norm), v

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        sharding: Sharding,
        spec: AttentionSpec,
        joins_backward: bool,
    ) -> Tensor:
        """Attention of ``q [b, s, h, d]``, ``k [b, s, n, d]`` and ``v [b, s, n, d]``: ``[b, s, h * d]``."""
        ranks, sinks = self._parallel_context, self.local_weight("sinks")
        out, _ = attend(q, k, v, spec, mask, sharding, ranks, sinks=sinks, joins_backward=joins_backward)
        return out.flatten(2)

    def _rotary_length(self, x: Tensor, positions: Tensor | None, sharding: Sharding) -> Tensor | None:
        """The ``length`` of the rotary embedding, int64 ``[]`` on the host; None if it does not need it."""
        if self.rope is None or not self.rope.needs_length:
            return None
        length: Tensor = rotary_length(x, positions, sharding)
        return length

    def _call_spec(self, mask: Mask, sharding: Sharding) -> AttentionSpec:
        """``spec`` in the current mode, training or evaluation, and with the name of a strategy in place of "auto"."""
        spec = self.spec
        if spec.dropout_p and not self.training:
            spec = spec.having(dropout_p=0.0)
        return named(spec, mask, self.num_heads, self.num_kv_heads, sharding)

    def mask_planner(self, sharding: Sharding) -> Callable[..., Mask]:
        """A function that plans this layer's attention under a mask ahead of time (see ``seqpar.mask_planner``)."""
        check_sharding(sharding)
        spec = self._without_cache(self.spec)
        return partial(plan_ahead, sharding.place(spec, self._parallel_context).plan_arguments)

    def _without_cache(self, spec: AttentionSpec) -> AttentionSpec:
        return spec

    # Tensor parallelism overrides the methods below, and ``_build``.

    def local_weight(self, name: str) -> Any:
        """The part of parameter ``name`` that this rank computes with; None if there is no such parameter."""
        return getattr(self, name)

    def _gathered_tokens(self, x: Tensor, sharding: Sharding, spec: AttentionSpec) -> ShardedTokens | None:
        """The tokens that are all-gathered before the projections; None if the layer does not all-gather."""
        return None

    # Without ``tokens``, nothing is all-gathered: x has all tokens that this rank attends with.

    def _project(self, x: Tensor, tokens: ShardedTokens | None) -> Sequence[Tensor]:
        """q ``[b, s, h * d]``, k and v ``[b, s, n * d]`` of the tokens that this rank attends with."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def _output(self, out: Tensor, tokens: ShardedTokens | None) -> Tensor:
        """The output projection ``[b, s, h * d]`` to ``[b, s, hidden]``, for this rank's tokens."""
        y: Tensor = self.o_proj(out)
        return y

    def _check_input(self, x: Tensor, mask: Mask, positions: Tensor | None, sharding: Sharding | None = None) -> None:
        check_hidden(x, self.hidden_size, self.q_proj)
        if not isinstance(mask, Mask):
            raise TypeError(f"mask={type(mask).__name__}: expected a seqpar.Mask, such as seqpar.Mask.causal()")
        if positions is not None:
            check_positions(positions, x)
        if torch.compiler.is_compiling():  # the operators check the length and the mask when they run
            return
        check_rows(mask, "x_local", x)
        if mask.head_groups:
            mask.check_heads(self.num_heads, self.num_kv_heads)
        if sharding is not None:
            linears = self.q_proj, self.k_proj, self.v_proj, self.o_proj
            if self.strategy != "tp_sp" and any(is_dtensor(x.weight) for x in linears):
                refuse_shards(self, sharding.sequence_group)
            sharding.check_local(x.shape[1])
            mask.check_length(sharding.seq_len)

    def _check_options(self, options: dict[str, Any]) -> None:
        """Check names and types. Values that depend on the group are checked in ``forward``."""
        check_options(self.strategy, options, STRATEGIES[self.strategy].options, type(self), AttentionLayer)
        if options.get("comm") is not None:
            check_choice("comm", options["comm"], COMMS)
        for name in ("ulysses_size", "chunks"):
            if options.get(name) is not None:
                check_int(name, options[name], 1)

    def extra_repr(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.strategy_options.items())
        heads = f"heads={self.num_heads}, kv_heads={self.num_kv_heads}"
        layout = "" if self.layout is None else f", layout={self.layout!r}"
        return f"strategy={self.strategy!r}, {heads}{layout}{options}"


def normalized(x: Tensor, norm: nn.RMSNorm | None) -> Tensor:
    """``norm(x)`` in the dtype of ``x [b, s, h, d]``. Under autocast the norm is computed in float32."""
    return x if norm is None else norm(x.to(norm.weight.dtype)).to(x.dtype)
