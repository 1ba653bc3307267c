"""Attention layers: projections and rotary embeddings around the sequence-parallel attention function."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

from ..checks import (
    check_choice,
    check_dropout,
    check_hidden,
    check_int,
    check_number,
    check_options,
    has_length,
    no_compile,
)
from ..comm.handshake import Fingerprint, all_gather_header, check_same, fingerprint
from ..functional import attention
from ..kernels import BACKENDS
from ..layout import LAYOUTS, check_length, check_lengths, shard_positions
from ..mask import Mask
from ..mesh import ParallelContext, rank_in, size_of
from ..strategies import COMMS, resolve, strategy_options
from .rotary import RotaryEmbedding

_NORM_EPS = 1e-6  # Qwen 3's and Gemma 3's


class _LayerHeader(NamedTuple):
    """A rank's input of a layer: what all ranks must have alike, and what they add up."""

    length: int
    batch: int
    dtype: torch.dtype
    mask: Fingerprint
    max_position: int
    dropout_seed: int


class AttentionLayer(nn.Module):
    """Self-attention over a sequence whose tokens are sharded over ranks; each subclass fixes the strategy.

    Every rank holds all the weights, named and shaped as in Hugging Face's Llama: ``q_proj [heads * head_dim,
    hidden]``, ``k_proj`` and ``v_proj [kv_heads * head_dim, hidden]``, ``o_proj [hidden, heads * head_dim]``; with
    ``qk_norm`` also ``q_norm`` and ``k_norm [head_dim]``, with ``sinks`` also ``sinks [heads]``. A checkpoint of one
    strategy therefore loads under every other. After ``backward``, gradients of the weights are this rank's share:
    ``seqpar.sync_gradients`` sums them.

    Args:
        hidden_size: width of the hidden states.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of ``num_heads``; by default as many (multi-head attention).
        head_dim: by default ``hidden_size // num_heads``.
        mesh, group: the ranks the sequence is sharded over, as in ``seqpar.attention``.
        layout: how the tokens are sharded: "contiguous", "zigzag" or "striped".
        bias: whether the q, k and v projections have biases (Qwen 2); ``out_bias`` says it of ``o_proj``, and is
            ``bias`` by default.
        qk_norm: RMS-normalise each head of q and k before the rotation (Qwen 3, Gemma 3).
        rope: a ``seqpar.RotaryEmbedding``, or None for no rotation. Layers may share one.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 is none (Gemma 2).
        sinks: a learned logit for each head in the softmax's denominator, at first 0 (gpt-oss).
        dropout_p: probability of dropping an attention weight, in training mode only.
        backend: "auto" or one of ``seqpar.backends()``.
        device, dtype: of the weights.
        strategy_options: those of the strategy, named in the subclass.

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
        layout: str = "contiguous",
        bias: bool = False,
        out_bias: bool | None = None,
        qk_norm: bool = False,
        rope: RotaryEmbedding | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
        dropout_p: float = 0.0,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **strategy_options: Any,
    ) -> None:
        super().__init__()
        kv_heads, head_dim = _check_heads(hidden_size, num_heads, num_kv_heads, head_dim)
        check_choice("layout", layout, LAYOUTS)
        check_choice("backend", backend, ("auto", *BACKENDS))
        if check_number("softcap", softcap) < 0:
            raise ValueError(f"softcap={softcap}: a positive cap is needed, or 0 for none")
        _check_rope(rope, head_dim)
        self._check_options(strategy_options)
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = kv_heads
        self.head_dim = head_dim
        self.layout = layout
        self.softcap = float(softcap)
        self.dropout_p = check_dropout(dropout_p)
        self.backend = backend
        self.strategy_options = strategy_options
        self._parallel_context = ParallelContext(mesh, group)
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        self._build(bias, bias if out_bias is None else out_bias, sinks, kind)
        self.q_norm = nn.RMSNorm(head_dim, eps=_NORM_EPS, **kind) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, eps=_NORM_EPS, **kind) if qk_norm else None
        self.rope = rope
        self.reset_parameters()

    def _build(self, bias: bool, out_bias: bool, sinks: bool, kind: dict[str, Any]) -> None:
        """Make the projections and the sinks."""
        hidden, queries, keys = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, queries, bias=bias, **kind)
        self.k_proj = nn.Linear(hidden, keys, bias=bias, **kind)
        self.v_proj = nn.Linear(hidden, keys, bias=bias, **kind)
        self.o_proj = nn.Linear(queries, hidden, bias=out_bias, **kind)
        self.sinks = nn.Parameter(torch.empty(self.num_heads, **kind)) if sinks else None

    def reset_parameters(self) -> None:
        """Initialise the parameters that belong to no submodule (as FSDP asks of modules made on "meta")."""
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

    @no_compile
    def forward(
        self,
        x_local: Tensor,
        mask: Mask = Mask.causal(),  # noqa: B008 (an immutable value)
        positions: Tensor | None = None,
        seq_len: int | None = None,
    ) -> Tensor:
        """Attention over the whole sequence, for this rank's tokens.

        Args:
            x_local: ``[batch, seq, hidden]``, this rank's tokens in the layer's layout.
            mask: which tokens each token sees, in global positions. The same on every rank.
            positions: integers ``[seq]`` or ``[batch, seq]``, for the rotary embedding only; by default the tokens'
                global positions by the layout.
            seq_len: the whole sequence's length. With it the call saves the control exchange in which ranks learn
                it and check that their inputs fit together.

        Returns:
            ``y_local [batch, seq, hidden]``, of the same tokens.

        Raises:
            TypeError, ValueError: bad input, before any payload is sent. RuntimeError: another rank's input was bad.

        Under ``torch.compile`` of what is around it, the layer runs as it is: one graph break.
        """
        group = self._sequence_group()
        dropout_p = self.dropout_p if self.training else 0.0
        dynamic = self.rope is not None and self.rope.needs_length and positions is not None
        max_position, seed = seq_len, 0
        if dynamic or dropout_p or not has_length(seq_len):
            headers = all_gather_header(lambda: self._header(x_local, mask, positions, seq_len), group)
            check_same(headers, "batch", "dtype", "mask")
            seq_len = check_lengths([header.length for header in headers], self.layout, seq_len)
            max_position = max(header.max_position for header in headers) if dynamic else seq_len
            seed = headers[0].dropout_seed
        else:
            assert seq_len is not None
            self._header(x_local, mask, positions, seq_len)
            check_length(x_local.shape[1], seq_len, size_of(group), rank_in(group), self.layout)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in self._project(x_local, seq_len))
        if self.q_norm is not None and self.k_norm is not None:
            # Under autocast the weights are float32, and so is the norm.
            dtype = self.q_norm.weight.dtype
            q, k = self.q_norm(q.to(dtype)).to(v.dtype), self.k_norm(k.to(dtype)).to(v.dtype)
        if self.rope is not None:
            q, k = self.rope(q, k, self._rotary_positions(positions, seq_len), max_position)
        out = self._attend(q, k, v, mask, seq_len, dropout_p, seed)
        return self._output(out.flatten(2), seq_len)

    def _sequence_group(self) -> ProcessGroup | None:
        """The ranks that the sequence is sharded over."""
        return resolve(self.strategy, self.mesh, self.group, self.strategy_options).sequence

    def _project(self, x: Tensor, seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of the tokens this rank attends with, ``[batch, seq, heads * head_dim]``."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def _rotary_positions(self, positions: Tensor | None, seq_len: int) -> Tensor:
        """The positions of those tokens: as given, else by the layout."""
        if positions is not None:
            return positions
        group = self._sequence_group()
        return shard_positions(seq_len, size_of(group), rank_in(group), self.layout)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, seq_len: int, dropout_p: float, seed: int) -> Tensor:
        """Attention over the whole sequence, ``[batch, seq, heads, head_dim]``."""
        out = attention(
            q,
            k,
            v,
            strategy=self.strategy,
            mask=mask,
            mesh=self.mesh,
            group=self.group,
            layout=self.layout,
            softcap=self.softcap,
            sinks=self.sinks,
            dropout_p=dropout_p,
            backend=self.backend,
            seq_len=seq_len,
            dropout_seed=seed,
            **self.strategy_options,
        )
        assert isinstance(out, Tensor)
        return out

    def _output(self, out: Tensor, seq_len: int) -> Tensor:
        """The output projection, for this rank's tokens."""
        y: Tensor = self.o_proj(out)
        return y

    def _header(self, x: Tensor, mask: Mask, positions: Tensor | None, seq_len: int | None) -> _LayerHeader:
        """This rank's input, checked, as what the ranks must agree on and what they add up."""
        if seq_len is not None:
            check_int("seq_len", seq_len, 0)
        check_hidden(x, self.hidden_size, self.q_proj)
        if not isinstance(mask, Mask):
            raise TypeError(f"mask={type(mask).__name__}: a seqpar.Mask is needed, such as seqpar.Mask.causal()")
        if mask.batch not in (1, x.shape[0]):
            raise ValueError(f"mask: made for {mask.batch} batch rows, but x_local has {x.shape[0]}")
        max_position = 0
        if positions is not None:
            _check_positions(positions, x)
            if self.rope is not None and self.rope.needs_length and positions.numel():
                max_position = int(positions.max().item()) + 1
        seed = int(torch.randint(2**62, (), device="cpu").item()) if self.dropout_p and self.training else 0
        return _LayerHeader(x.shape[1], x.shape[0], x.dtype, fingerprint(mask), max_position, seed)

    def _check_options(self, options: dict[str, Any]) -> None:
        """Names and kinds. What depends on the group is checked with it, when it is used."""
        check_options(self.strategy, options, strategy_options(self.strategy))
        if "comm" in options:
            check_choice("comm", options["comm"], COMMS)
        if options.get("ulysses_size") is not None:
            check_int("ulysses_size", options["ulysses_size"], 1)

    def extra_repr(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.strategy_options.items())
        heads = f"heads={self.num_heads}, kv_heads={self.num_kv_heads}"
        return f"strategy={self.strategy!r}, {heads}, layout={self.layout!r}{options}"


class LocalAttention(AttentionLayer):
    """The whole sequence on one rank: nothing is sent. No options. See ``AttentionLayer`` for the arguments."""

    strategy = "local"


class RingAttention(AttentionLayer):
    """Keys and values visit every rank, hop by hop. No options. Causal masks balance under "zigzag" and "striped".

    See ``AttentionLayer`` for the arguments.
    """

    strategy = "ring"


class UlyssesAttention(AttentionLayer):
    """All-to-all from sequence shards to head shards and back. No options. More ranks than heads leave ranks idle.

    See ``AttentionLayer`` for the arguments.
    """

    strategy = "ulysses"


class ContextParallelAttention(AttentionLayer):
    """Context parallelism as TransformerEngine names it. See ``AttentionLayer`` for the other arguments.

    Args:
        comm: "all_gather" (default: all keys and values at once), "p2p" (the ring), "a2a" (Ulysses) or "a2a+p2p"
            (the hybrid).
        ulysses_size: with "a2a+p2p" on a plain group, the size of the all-to-all's subgroups.
    """

    strategy = "context_parallel"


class HybridAttention(AttentionLayer):
    """All-to-all in subgroups, ring across them. See ``AttentionLayer`` for the other arguments.

    Args:
        ulysses_size: on a plain group, the size of the subgroups, a divisor of the group's size (by default the
            largest up to its square root); a mesh's ring and ulysses dimensions say it themselves.
    """

    strategy = "hybrid"


def _check_heads(hidden_size: int, heads: int, kv_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """``(kv_heads, head_dim)`` with their defaults."""
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
        raise TypeError(f"rope={rope!r}: a seqpar.RotaryEmbedding is needed, or None")
    if rope.head_dim != head_dim:
        raise ValueError(f"rope: made for head_dim={rope.head_dim}, but the layer has {head_dim}; make them equal")


def _check_positions(positions: Tensor, x: Tensor) -> None:
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions={type(positions).__name__}: an integer tensor [seq] or [batch, seq] is needed")
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(f"positions: dtype {positions.dtype}; integers are needed")
    batch, length, _ = x.shape
    if tuple(positions.shape) not in ((length,), (1, length), (batch, length)):
        raise ValueError(f"positions: shape {tuple(positions.shape)}; {(length,)} or {(batch, length)} is needed")
