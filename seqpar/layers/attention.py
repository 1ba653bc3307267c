"""Attention layers: projections and rotary embeddings around sequence-parallel attention.

``AttentionLayer.forward`` checks its input and calls ``_project``, the rotary embedding, ``_attend`` and ``_output`` in
this order. Subclasses in other files override the methods that differ for their strategy.

Shapes: b batch, s tokens of this rank, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

from ..checks import (
    check_bool,
    check_choice,
    check_dropout,
    check_dtype,
    check_hidden,
    check_int,
    check_number,
    check_options,
    has_length,
    no_compile,
)
from ..comm.handshake import Fingerprint, all_gather_header, check_same, fingerprint, propagate_errors
from ..heads import Heads
from ..kernels import BACKENDS, BackendName, check_backend
from ..layout import LAYOUTS, Layout, check_length, check_lengths
from ..mask import Mask
from ..mesh import ParallelContext, known_per_host, rank_in, sequence_group, size_of
from ..placement import Placement
from ..planner.rules import named
from ..schedule.plan import MaskPlanner
from ..sharding import Sharding, check_sharding, require_layout
from ..spec import AttentionSpec, constant_float, constants
from ..strategies import COMMS, resolve, strategy_options
from ..strategies.autograd import any_needs_gradient, gradient_state, with_gradient
from ..strategies.operators import (
    attend,
    draw_seed,
    global_positions,
    traced_seed,
)
from ..strategies.tensor_operators import ShardedTokens, all_gather_positions
from .rotary import RotaryEmbedding, largest_length, rotary_length

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..strategies import StrategyOptions

NORM_EPS = 1e-6  # Qwen 3's and Gemma 3's


class _LayerHeader(NamedTuple):
    """A rank's input, for the handshake. ``length`` is added up over the ranks, ``dropout_seed`` is taken from rank 0,
    ``gradient`` is the rank's ``gradient_state``, and the other fields must be the same on all ranks."""

    length: int
    batch: int
    dtype: torch.dtype
    mask_or_options: Fingerprint
    dropout_seed: int
    gradient: int


class LayerCall(NamedTuple):
    """The checked arguments of one ``AttentionLayer.forward`` outside of torch.compile, and what follows from them.

    ``rotary_length`` is the ``length`` of ``RotaryEmbedding.forward``.
    """

    spec: AttentionSpec
    mask: Mask
    sharding: Sharding
    placement: Placement
    positions: Tensor | None
    rotary_length: int
    seed: int
    joins_backward: bool


class AttentionLayer(nn.Module):
    """Self-attention over a sequence whose tokens are sharded over ranks; each subclass fixes the strategy.

    Every rank holds all the weights, named and shaped as in Hugging Face's Llama: ``q_proj [heads * head_dim,
    hidden]``, ``k_proj`` and ``v_proj [kv_heads * head_dim, hidden]``, ``o_proj [hidden, heads * head_dim]``; with
    ``qk_norm`` also ``q_norm`` and ``k_norm [head_dim]``, with ``sinks`` also ``sinks [heads]``. A checkpoint of one
    strategy therefore loads under every other. After ``backward``, each rank has the partial gradient of the weights
    from its own tokens; ``seqpar.sync_gradients`` sums the partial gradients.

    The options of a strategy are documented in its subclass.

    Args:
        hidden_size: width of the hidden states.
        num_heads: query heads.
        num_kv_heads: KV heads, a divisor of ``num_heads``; by default ``num_heads`` (multi-head attention).
        head_dim: by default ``hidden_size // num_heads``.
        mesh: the ranks that the sequence is sharded over, as a mesh (see ``init_mesh``).
        group: the ranks that the sequence is sharded over, as a ProcessGroup. With neither, those of the ``sharding``
            that ``forward`` is given, or the default group.
        layout: how the tokens are sharded: "contiguous", "zigzag" or "striped". By default the layout of the
            ``sharding`` that ``forward`` is given. Over several ranks one of the two must be given.
        bias: whether the q, k and v projections have biases (Qwen 2).
        out_bias: whether ``o_proj`` has a bias; the same as ``bias`` by default.
        qk_norm: RMS-normalise each head of q and k before the rotation (Qwen 3, Gemma 3).
        rope: a ``seqpar.RotaryEmbedding``, or None for no rotation. Layers may share one.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 is none (Gemma 2).
        sinks: whether each head has a learned logit in the denominator of the softmax, initially 0 (gpt-oss).
        dropout_p: probability of dropping an attention weight, in training mode only.
        backend: "auto" or one of ``seqpar.backends()``.
        device: the device of the weights.
        dtype: the dtype of the weights.

    Raises:
        TypeError, ValueError: arguments that do not fit, with the value and what is allowed.
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
        softcap: float = 0.0,
        sinks: bool = False,
        dropout_p: float = 0.0,
        backend: BackendName = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **strategy_options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__()
        kv_heads, head_dim = _check_heads(hidden_size, num_heads, num_kv_heads, head_dim)
        if layout is not None:
            check_choice("layout", layout, LAYOUTS)
        check_choice("backend", backend, ("auto", *BACKENDS))
        if check_number("softcap", softcap) < 0:
            raise ValueError(f"softcap={softcap}: expected a positive cap, or 0 for none")
        for name, flag in (("bias", bias), ("out_bias", out_bias), ("qk_norm", qk_norm), ("sinks", sinks)):
            if name != "out_bias" or flag is not None:
                check_bool(name, flag)
        check_dtype(dtype)
        _check_rope(rope, head_dim)
        self._check_options(dict(strategy_options))
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = kv_heads
        self.head_dim = head_dim
        self.layout: Layout | None = layout
        self.softcap = float(softcap)
        self.dropout_p = check_dropout(dropout_p)
        self.backend: BackendName = backend
        self.strategy_options: StrategyOptions = strategy_options
        self._parallel_context = ParallelContext(mesh, group)
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self._build(bias, bias if out_bias is None else out_bias, sinks, factory_kwargs)
        self.q_norm = self._norm(factory_kwargs) if qk_norm else None
        self.k_norm = self._norm(factory_kwargs) if qk_norm else None
        self.rope = rope
        self.reset_parameters()

    def _build(self, bias: bool, out_bias: bool, sinks: bool, factory_kwargs: dict[str, Any]) -> None:
        """Make the projections and the sinks."""
        hidden, queries, keys = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, queries, bias=bias, **factory_kwargs)
        self.k_proj = nn.Linear(hidden, keys, bias=bias, **factory_kwargs)
        self.v_proj = nn.Linear(hidden, keys, bias=bias, **factory_kwargs)
        self.o_proj = nn.Linear(queries, hidden, bias=out_bias, **factory_kwargs)
        self.sinks = nn.Parameter(torch.empty(self.num_heads, **factory_kwargs)) if sinks else None

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
    ) -> Tensor:
        """Attention over the full sequence, for this rank's tokens.

        Args:
            x_local: ``[batch, seq, hidden]``, this rank's tokens.
            mask: which tokens each token sees, in global positions. The same on every rank.
            sharding: the ``Sharding`` that the tokens were sharded with. The layer need not be made with ranks and a
                layout then; if it is, they must be those of the sharding. There is no handshake (see
                ``seqpar.attention``), except for the seed of dropout in training mode, and for "dynamic" rotary
                embeddings with ``positions``.
            positions: integers ``[seq]`` or ``[batch, seq]``, for the rotary embedding only; by default the global
                positions that the layout gives this rank. Under "tp_sp" and ``gather="activations"`` every layer
                all-gathers them and computes a rotary table of its own, which by default the layers share.
            seq_len: the length of the full sequence, if no ``sharding`` is given. With it there is no handshake
                either.

        Returns:
            ``y_local [batch, seq, hidden]``, of the same tokens.

        Raises:
            TypeError: an argument of the wrong type, before any payload is sent.
            ValueError: a wrong value, or ranks that disagree, before any payload is sent.
            RuntimeError: another rank raised an error on its own input.

        ``torch.compile`` traces the layer, with attention as one operator, if it is given a ``sharding``. Otherwise the
        layer is one graph break in the code around it.
        """
        if torch.compiler.is_compiling() and self._is_traceable(sharding, positions, seq_len):
            return self._traced(x_local, mask, sharding, positions)
        return self._eager(x_local, mask, sharding, positions, seq_len)

    def _is_traceable(self, sharding: Sharding | None, positions: Tensor | None, seq_len: int | None) -> bool:
        """Whether torch.compile can trace the layer: only operators communicate, and the traced code does not depend on
        the mask or on lengths."""
        if not isinstance(sharding, Sharding) or seq_len is not None:
            return False
        return self.layout in (None, sharding.layout)

    def _traced(self, x: Tensor, mask: Mask, sharding: Any, positions: Tensor | None) -> Tensor:
        """``forward`` while torch.compile traces it."""
        check_hidden(x, self.hidden_size, self.q_proj)
        if positions is not None:
            _check_positions(positions, x)
        ranks = self._parallel_context
        spec = self._named(self._traced_spec(), mask, sharding.layout, sharding.ranks, sharding.per_host, x)
        length = self._traced_length(x, positions, sharding)
        chunks = self._tokens(x.shape[1], sharding)
        if positions is not None and chunks is not None:
            positions = all_gather_positions(positions, *chunks[1:])
        q, k, v = self._heads_of(self._project(x, chunks))
        if self.rope is not None:
            if positions is None:
                positions = global_positions(q, sharding, ranks, spec)
            q, k = self.rope(q, k, positions, length)
        out = self._traced_attention(q, k, v, mask, sharding, spec)
        return self._output(out.flatten(2), chunks)

    def _traced_length(self, x: Tensor, positions: Tensor | None, sharding: Any) -> Tensor | None:
        """The ``length`` of the rotary embedding, int64 ``[]`` on the host; None if it does not need it."""
        if self.rope is None or not self.rope.needs_length:
            return None
        length: Tensor = rotary_length(x, positions, sharding)
        return length

    def _traced_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, sharding: Any, spec: AttentionSpec
    ) -> Tensor:
        """``_attend`` while torch.compile traces it."""
        seed = traced_seed() if self._dropout_p else None
        tensors = q, k, v, self._local_sinks, None, seed, None
        return attend(*tensors, spec, mask, sharding, self._parallel_context)[0]

    @no_compile
    def _eager(
        self,
        x_local: Tensor,
        mask: Mask,
        sharding: Sharding | None,
        positions: Tensor | None,
        seq_len: int | None,
    ) -> Tensor:
        """``forward`` outside of torch.compile."""
        # A sharding of another type raises in the check below, on all ranks if there is a handshake.
        known = sharding if isinstance(sharding, Sharding) else None
        dropout_p, ranks = self._dropout_p, self._parallel_context
        needs_handshake = bool(dropout_p or (sharding is None and not has_length(seq_len)))
        rope_positions = positions if self.rope is not None and self.rope.needs_length else None
        sequence = self._sequence_group(known)
        with propagate_errors(sequence if needs_handshake or rope_positions is not None else None):
            placement = self._placement(known)
            self._check_sharding(sharding, sequence, seq_len)
            self._check_input(x_local, mask, positions, seq_len)
            layout = known.layout if known is not None else self._layout(sequence)
            spec = self._spec(dropout_p)
            if spec.strategy == "auto":
                spec = self._named(spec, mask, layout, size_of(sequence), known_per_host(sequence), x_local)
        total = known.seq_len if known is not None else seq_len  # tokens of the full sequence
        seed, joins_backward = 0, torch.is_grad_enabled()
        if needs_handshake:
            same = self._constants(placement, layout, dropout_p)
            headers = all_gather_header(lambda: self._header(x_local, mask, same), sequence)
            check_same(headers, "batch", "dtype", "mask_or_options")
            total = check_lengths([header.length for header in headers], layout, total)
            seed = headers[0].dropout_seed
            joins_backward = any_needs_gradient([header.gradient for header in headers])
        else:
            assert total is not None
            with propagate_errors(None if rope_positions is None else sequence):
                check_length(x_local.shape[1], total, size_of(sequence), rank_in(sequence), layout)
        mask.check_length(total)
        length = total
        if rope_positions is not None:  # the same handshake as in compiled code
            length = largest_length(rope_positions, sequence if known is None else known.sequence_group)
        if known is None:
            strategy: Any = self.strategy if self.strategy in ("tp_sp", "local") else None
            known = Sharding(total, layout, mesh=self.mesh, group=self.group, strategy=strategy)
        call = LayerCall(spec, mask, known, known.place(spec, ranks), positions, length, seed, joins_backward)
        return self._compute(x_local, call)

    def _compute(self, x: Tensor, call: LayerCall) -> Tensor:
        """``forward`` of a checked ``x [b, s, hidden]``."""
        positions = call.positions
        chunks = self._tokens(x.shape[1], call.sharding)
        if call.joins_backward and chunks is not None:  # the projections communicate
            x = with_gradient(x)
        q, k, v = self._heads_of(self._project(x, chunks))
        if self.rope is not None:
            if positions is None:
                positions = call.placement.tokens.rank_positions(call.placement.rank, x.device)
            elif chunks is not None:
                positions = all_gather_positions(positions, *chunks[1:])
            q, k = self.rope(q, k, positions, call.rotary_length)
        return self._output(self._attend(q, k, v, call).flatten(2), chunks)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: LayerCall) -> Tensor:
        """Attention of ``q [b, s, h, d]``, ``k [b, s, n, d]`` and ``v [b, s, n, d]``: ``[b, s, h, d]``."""
        seed = torch.tensor(call.seed, device="cpu") if call.spec.dropout_p else None
        tensors = q, k, v, self._local_sinks, None, seed, None
        where = call.spec, call.mask, call.sharding, self._parallel_context
        out, _ = attend(*tensors, *where, joins_backward=call.joins_backward)
        return out

    def _named(
        self, spec: AttentionSpec, mask: Mask, layout: Layout, ranks: int, per_host: int, x: Tensor
    ) -> AttentionSpec:
        """``spec`` with the name of a strategy in place of "auto"."""
        return named(spec, mask, self.num_heads, self.num_kv_heads, layout, ranks, per_host, x.device.type)

    def mask_planner(self, sharding: Sharding) -> MaskPlanner:
        """A function that plans this layer's attention under a mask ahead of time (see ``seqpar.mask_planner``)."""
        check_sharding(sharding)
        return MaskPlanner(*sharding.place(self._spec(0.0), self._parallel_context).of_plan)

    def _heads_of(self, qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The projections ``[b, s, h * d]`` split into heads, ``[b, s, h, d]``, with q and k normalised."""
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in qkv)
        if self.q_norm is not None and self.k_norm is not None:
            # Under autocast the weights are float32, and so is the norm.
            dtype = self.q_norm.weight.dtype
            q, k = self.q_norm(q.to(dtype)).to(v.dtype), self.k_norm(k.to(dtype)).to(v.dtype)
        return q, k, v

    @property
    def _dropout_p(self) -> float:
        """The probability of dropping an attention weight in the current mode, training or evaluation."""
        return self.dropout_p if self.training else 0.0

    def _traced_spec(self) -> AttentionSpec:
        """``_spec`` while torch.compile traces the layer."""
        dropout_p = constant_float(self._dropout_p)
        return self._spec(dropout_p, draws_seed=dropout_p > 0)

    def _spec(self, dropout_p: float, draws_seed: bool = False) -> AttentionSpec:
        """The constants of the layer's attention; ``draws_seed`` as in ``AttentionSpec``."""
        return AttentionSpec(
            strategy=self._attention_strategy,
            strategy_options=constants(self.strategy_options),
            tensor_parallel=self.strategy == "tp_sp",
            first_head=index(self._heads.queries.start),
            q_per_kv=index(self._heads.q_per_kv),
            softcap=constant_float(self.softcap),
            dropout_p=constant_float(dropout_p),
            backend=self.backend,
            draws_seed=draws_seed,
        )

    # Tensor parallelism overrides the methods below.

    def _norm(self, factory_kwargs: dict[str, Any]) -> nn.RMSNorm:
        return nn.RMSNorm(self.head_dim, eps=NORM_EPS, **factory_kwargs)

    @property
    def _local_sinks(self) -> Tensor | None:
        """The sinks of this rank's heads."""
        return self.sinks

    @property
    def _heads(self) -> Heads:
        """The heads of this rank's projections."""
        return Heads.of_model(self.num_heads, self.num_kv_heads)

    @property
    def _attention_strategy(self) -> str:
        """The strategy of the attention between the projections."""
        return self.strategy

    def _ranks(self, sharding: Sharding | None) -> AttentionLayer | Sharding:
        """The object whose mesh or group is used: the layer, or the sharding if the layer was made without them."""
        own = self.mesh is not None or self.group is not None
        return self if own or sharding is None else sharding

    def _placement(self, sharding: Sharding | None = None) -> Placement:
        """The ranks that take part in the attention between the projections: the layer's own, or the sharding's."""
        ranks = self._ranks(sharding)
        return resolve(self.strategy, ranks.mesh, ranks.group, self.strategy_options)

    def _sequence_group(self, sharding: Sharding | None) -> ProcessGroup | None:
        """The ranks that the sequence is sharded over outside the layer."""
        ranks = self._ranks(sharding)
        return None if self.strategy == "local" else sequence_group(ranks.mesh, ranks.group)

    def _layout(self, sequence: ProcessGroup | None) -> Layout:
        """How the tokens are sharded, if ``forward`` is given no sharding."""
        return require_layout(self.layout, sequence)

    def _constants(self, placement: Placement, layout: Layout, dropout_p: float) -> tuple[Any, ...]:
        """The values that must be the same on all ranks, besides their inputs."""
        degrees = size_of(placement.ring), size_of(placement.ulysses), placement.gather, placement.chunks
        return (self.strategy, *degrees, layout, self.softcap, dropout_p)

    def _tokens(self, tokens: int, sharding: Any) -> ShardedTokens | None:
        """The tokens that are all-gathered before the projections; None if the layer does not all-gather."""
        return None

    def _project(self, x: Tensor, tokens: ShardedTokens | None) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[b, s, h * d]``, k and v ``[b, s, n * d]`` of the tokens that this rank attends with."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def _output(self, out: Tensor, tokens: ShardedTokens | None) -> Tensor:
        """The output projection ``[b, s, h * d]`` to ``[b, s, hidden]``, for this rank's tokens."""
        y: Tensor = self.o_proj(out)
        return y

    def _check_sharding(self, sharding: Sharding | None, sequence: ProcessGroup | None, seq_len: int | None) -> None:
        """Raise if the sharding does not fit the layer or ``seq_len``."""
        check_sharding(sharding)
        if sharding is None:
            return
        if self.layout not in (None, sharding.layout):
            raise ValueError(
                f"sharding: its layout is {sharding.layout!r}, but the layer was made with layout={self.layout!r}; "
                "leave the layer's layout out, or make both alike"
            )
        sharding.check_arguments(seq_len=seq_len)
        sharding.check_ranks(sequence)

    def _check_input(self, x: Tensor, mask: Mask, positions: Tensor | None, seq_len: int | None) -> None:
        """Check this rank's input."""
        if seq_len is not None:
            check_int("seq_len", seq_len, 0)
        check_backend(self.backend)
        check_hidden(x, self.hidden_size, self.q_proj)
        if not isinstance(mask, Mask):
            raise TypeError(f"mask={type(mask).__name__}: expected a seqpar.Mask, such as seqpar.Mask.causal()")
        if mask.batch not in (1, x.shape[0]):
            raise ValueError(f"mask: made for {mask.batch} batch rows, but x_local has {x.shape[0]}")
        if positions is not None:
            _check_positions(positions, x)

    def _header(self, x: Tensor, mask: Mask, same: tuple[Any, ...]) -> _LayerHeader:
        """The header of this rank's input, which has been checked."""
        seed = int(draw_seed().item()) if self._dropout_p else 0
        gradient = gradient_state(x, *self.parameters())
        agreed = fingerprint(mask, *same)
        return _LayerHeader(x.shape[1], x.shape[0], x.dtype, agreed, seed, gradient)

    def _check_options(self, options: dict[str, Any]) -> None:
        """Check names and types. Values that depend on the group are checked in ``forward``."""
        check_options(self.strategy, options, strategy_options(self.strategy))
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


class LocalAttention(AttentionLayer):
    """Attention on one rank, which holds the full sequence. No options. See ``AttentionLayer`` for the arguments."""

    strategy = "local"


class RingAttention(AttentionLayer):
    """Ring attention: K/V rows are sent from rank to rank, step by step. No options.

    Under a causal mask, use the layout "zigzag" or "striped", with which all ranks have the same work. See
    ``AttentionLayer`` for the arguments.
    """

    strategy = "ring"


class UlyssesAttention(AttentionLayer):
    """Ulysses: all-to-all from sequence shards to head shards and back. No options.

    With more ranks than heads, some ranks have no work. See ``AttentionLayer`` for the arguments.
    """

    strategy = "ulysses"


class HybridAttention(AttentionLayer):
    """A hybrid: all-to-all in subgroups, ring across them. See ``AttentionLayer`` for the other arguments.

    Args:
        ulysses_size: on a plain group, the size of the subgroups, a divisor of the group's size; by default the largest
            one up to its square root. On a mesh, the sizes of its ring and ulysses dimensions are used.
    """

    strategy = "hybrid"


class AutoAttention(AttentionLayer):
    """Takes in each call the strategy that should be the fastest, see ``seqpar.attention``. No options.

    See ``AttentionLayer`` for the arguments.
    """

    strategy = "auto"

    def mask_planner(self, sharding: Sharding) -> MaskPlanner:
        raise ValueError("strategy='auto': it depends on the mask; name the strategy to plan for")


def _check_heads(hidden_size: int, heads: int, kv_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """``(kv_heads, head_dim)``, with defaults filled in."""
    check_int("hidden_size", hidden_size, 1)
    check_int("num_heads", heads, 1)
    kv_heads = heads if kv_heads is None else kv_heads
    check_int("num_kv_heads", kv_heads, 1)
    if heads % kv_heads:
        divisors = ", ".join(str(d) for d in range(1, heads + 1) if heads % d == 0)
        raise ValueError(f"num_kv_heads={kv_heads}: it must divide num_heads={heads}: one of {divisors}")
    if head_dim is None:
        if hidden_size % heads:
            raise ValueError(
                f"num_heads={heads}: it does not divide hidden_size={hidden_size}; pass head_dim, or other heads"
            )
        head_dim = hidden_size // heads
    check_int("head_dim", head_dim, 1)
    return kv_heads, head_dim


def _check_rope(rope: RotaryEmbedding | None, head_dim: int) -> None:
    if rope is None:
        return
    if not isinstance(rope, RotaryEmbedding):
        raise TypeError(f"rope={rope!r}: expected a seqpar.RotaryEmbedding, or None")
    if rope.head_dim != head_dim:
        raise ValueError(f"rope: made for head_dim={rope.head_dim}, but the layer has {head_dim}; make them equal")


def _check_positions(positions: Tensor, x: Tensor) -> None:
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions={type(positions).__name__}: expected an integer tensor [seq] or [batch, seq]")
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(f"positions: dtype {positions.dtype}; expected integers")
    batch, length, _ = x.shape
    if tuple(positions.shape) not in ((length,), (1, length), (batch, length)):
        raise ValueError(f"positions: shape {tuple(positions.shape)}; expected {(length,)} or {(batch, length)}")
