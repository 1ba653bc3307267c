"""The attention function: check this rank's input, compare it with the other ranks' input, and compute.

Shapes: b batch, s tokens of this rank, h query heads, n KV heads, d head_dim of q and k.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial, update_wrapper
from inspect import cleandoc, signature
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypedDict, cast, overload

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from .base.checks import check_bool, check_head_vector, check_inputs, check_int, has_length, no_compile
from .comm.handshake import Fingerprint, all_gather_header, check_same, fingerprint, propagate_errors
from .kernels import BackendName
from .masks.mask import Mask, check_rows
from .placement.layout import Layout, check_lengths, least_length
from .placement.strategies import StrategyName
from .ranks.in_process import Crew
from .ranks.mesh import sequence_group_of, size_of
from .schedule.plan import plan_ahead
from .sharding.arguments import check_sharding, require_layout, sharding_of_one_rank
from .sharding.sharding import Sharding
from .sharding.spec import AttentionSpec, Deterministic, attention_spec
from .strategies.attend import attend
from .strategies.autograd import any_needs_gradient, gradient_state, to_autocast_dtype
from .strategies.max_logit import max_logit
from .strategies.replay import attend_in_process
from .strategies.seed import draw_seed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .placement.strategies import Comm, StrategyOptions

    class ValueArguments(TypedDict, total=False):
        """The keyword arguments of ``attention`` that do not say which ranks hold which tokens."""

        mask: Mask
        softmax_scale: float | None
        softcap: float
        sinks: Tensor | None
        alibi_slopes: Tensor | None
        dropout_p: float
        deterministic: Deterministic
        backend: BackendName
        dropout_seed: int | None
        latent_weight: Tensor | None

    class SharedArguments(ValueArguments, total=False):
        """The keyword arguments that ``attention`` has under every strategy, except ``return_lse``, which decides what
        it returns; ``attention`` documents them."""

        mesh: DeviceMesh | None
        group: ProcessGroup | None
        layout: Layout | None
        sharding: Sharding | None
        seq_len: int | None

    class FixedArguments(SharedArguments, StrategyOptions, total=False):
        """The keyword arguments of ``attention`` under one strategy, except ``return_lse``."""

    class AttentionArguments(FixedArguments, total=False):
        """The keyword arguments of ``attention`` except ``return_lse``."""

        strategy: StrategyName

    class WholeArguments(ValueArguments, StrategyOptions, total=False):
        """The keyword arguments that ``replay`` and ``replay_report`` have in common."""

        strategy: StrategyName

    class ReplayArguments(WholeArguments, total=False):
        """The keyword arguments of ``replay`` except ``ranks`` and ``return_lse``."""

        layout: Layout
        ranks_per_host: int | None
        shared_memory: bool


class _AttentionHeader(NamedTuple):
    """A rank's input, for the handshake. ``length`` is added up over the ranks, ``dropout_seed`` is taken from rank 0,
    ``gradient`` is the rank's ``gradient_state``, and the other fields must be the same on all ranks."""

    length: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    mask_or_options: Fingerprint
    dropout_seed: int
    gradient: int


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[AttentionArguments]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[AttentionArguments]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[AttentionArguments]
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_max_logit: Literal[True],
    return_lse: bool = False,
    **options: Unpack[AttentionArguments],
) -> tuple[Tensor, ...]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    strategy: StrategyName = "ring",
    mask: Mask = Mask.causal(),  # noqa: B008 (an immutable value)
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    layout: Layout | None = None,
    sharding: Sharding | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: Deterministic = False,
    backend: BackendName = "auto",
    return_lse: bool = False,
    return_max_logit: bool = False,
    seq_len: int | None = None,
    dropout_seed: int | None = None,
    latent_weight: Tensor | None = None,
    **strategy_options: Unpack[StrategyOptions],
) -> Tensor | tuple[Tensor, ...]:
    """Attention over one sequence whose tokens are sharded over a group of ranks.

    The result on each rank is what one device would compute for this rank's tokens, up to rounding, for every
    strategy, layout and mask; so are the gradients of ``q, k, v``. Differentiable once.

    Without ``sharding`` (or ``seq_len``) each call starts with a handshake, an all-gather of 128 bytes per rank, in
    which the ranks learn the length of the sequence and check that their inputs fit together. With it no rank waits for
    another before the payload, and it is up to the caller that all ranks pass the same arguments.

    If the inputs of any rank require gradients, all ranks take part in the backward. Without a handshake a rank does
    not know the other ranks' inputs, and takes part unless gradients are off: run frozen layers under
    ``torch.no_grad()``.

    Args:
        q: ``[batch, seq, heads, head_dim]``, this rank's tokens. float32, bfloat16, float16 or float64. Under autocast
            q, k and v are cast as by ``F.scaled_dot_product_attention``: to autocast's dtype, except float64.
        k: ``[batch, seq, kv_heads, head_dim]``, of the same tokens; ``heads`` is a multiple of ``kv_heads``.
        v: ``[batch, seq, kv_heads, v_head_dim]``, of the same tokens. ``v_head_dim`` may differ from ``head_dim``, as
            in latent attention (DeepSeek). Messages are not padded then.
        strategy: "local", "ring", "ulysses", "context_parallel", "hybrid" or "auto". "auto" takes the one that should
            be the fastest by a rule over the mask, the heads, the layout and the hosts (``seqpar.strategies.auto``).
        mask: which keys each query sees, in global positions.
        mesh: the ranks that the sequence is sharded over, as a mesh (see ``init_mesh``).
        group: the ranks that the sequence is sharded over, as a ProcessGroup. With neither, the default group.
        layout: how the tokens are sharded, as given to ``shard``: a name or a ``seqpar.Assigned``. Over several
            ranks either this or ``sharding`` must be given. A causal mask gives all ranks the same work under "zigzag"
            and "striped" only.
        sharding: the ``Sharding`` that the tokens were sharded with, instead of mesh, group, layout and ``seq_len``.
        softmax_scale: a factor on the scores, ``head_dim ** -0.5`` by default.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 turns it off (Gemma 2).
        sinks: ``[heads]``, one more logit per head in the denominator of the softmax (gpt-oss). Its gradient is this
            rank's part of a sum over the sequence group.
        alibi_slopes: ``[heads]`` or ``[batch, heads]``, without gradient. ``slope * |i - j|`` is subtracted from the
            scores, for global positions ``i`` and ``j`` (Press et al., 2021).
        dropout_p: the probability of dropping an attention weight. What is dropped depends on the seed, the batch
            row, the head and the two global positions, and not on the strategy or the number of ranks.
        deterministic: with True, use only kernels whose gradients have the same bits in every run. They are slower.
            With "invariant", the output and the gradients of ``q, k, v`` also have the same bits on any number of
            ranks, under every strategy and layout, and whatever is packed beside a document. Each strategy then gathers
            keys in forward, and keys and queries in backward (see docs/replay.md).
        backend: "auto" or one of ``seqpar.backends()``. If the named backend lacks a requested feature, the call falls
            back to the next one that has it (see ``seqpar.trace``).
        return_lse: also return the log-sum-exp of the scores, sinks included.
        return_max_logit: also return the largest score of each head. It takes a second pass over q and k, in plain
            PyTorch, and sends the keys once more.
        seq_len: the length of the full sequence, if no ``sharding`` is given. With it there is no handshake either.
        dropout_seed: the same on all ranks. By default rank 0 draws one from torch's CPU generator and sends it in a
            handshake. With a seed, there is no handshake for it.
        latent_weight: ``[heads, nope + v_head_dim, width]``, for multi-head latent attention (DeepSeek-V2). Then ``k
            [batch, seq, 1, width]`` holds latents and ``v [batch, seq, 1, rope]`` holds rotated keys, and these are
            sent. The key of a head is ``cat(latent_weight[head, :nope] @ latent, rotated key)``, its value is
            ``latent_weight[head, nope:] @ latent``, and ``nope`` is ``head_dim - rope``. The gradient of
            ``latent_weight`` is this rank's part of a sum over the sequence group.
        strategy_options: ``comm`` ("all_gather", "p2p", "a2a", "a2a+p2p") for context_parallel, by default "all_gather"
            on one host and "p2p" on several; ``chunks`` of heads for its all-gather; ``ulysses_size`` for hybrid and
            "a2a+p2p" on a plain group.

    Returns:
        ``out [batch, seq, heads, v_head_dim]`` in q's dtype (autocast's, if that is on); with ``return_lse`` also
        ``lse [batch, heads, seq]`` in float32 (float64 for float64). For a query that sees no key, ``out`` is 0 and
        ``lse`` is -inf, or with ``sinks`` the sink. With ``return_max_logit`` the last item is ``max_logit [heads]`` in
        lse's dtype, without gradient: the maximum, over all queries of the sequence on all ranks and the keys that they
        see, of the scores as the softmax takes them, scaled, capped and biased; -inf if no query sees a key.

    Raises:
        TypeError: an argument of the wrong type, before any payload is sent.
        ValueError: a wrong value, or ranks that disagree, before any payload is sent.
        RuntimeError: another rank raised an error on its own input.
    """
    if not isinstance(return_max_logit, bool):
        check_bool("return_max_logit", return_max_logit)
    constants = softmax_scale, softcap, dropout_p, deterministic, backend, return_lse
    tensors, where = (q, k, v, sinks, alibi_slopes, latent_weight), (mesh, group, layout, seq_len)
    needs_seed = bool(dropout_p) and dropout_seed is None
    joins_backward, is_compiling = True, torch.compiler.is_compiling()
    if not isinstance(sharding, Sharding) or where != _NOWHERE or (needs_seed and not is_compiling):
        make_spec = partial(attention_spec, strategy, strategy_options, *constants, attention)
        alone = strategy == "local" and mesh is None and group is None
        sharding, dropout_seed, joins_backward = _agree(
            tensors, make_spec, mask, sharding, dropout_seed, where, needs_seed, alone, return_max_logit
        )
    spec = attention_spec(strategy, strategy_options, *constants, attention)
    # In eager code ``attend`` checks the tensors of calls whose kind is new.
    q, k, v, sinks, alibi_slopes, latent_weight = _checked(mask, tensors, in_full=is_compiling)
    seed = None
    if dropout_seed is not None:
        _check_seed(dropout_seed)
        seed = torch.full((), dropout_seed, dtype=torch.int64, device="cpu") if spec.dropout_p else None
    # Without a seed, which is possible in compiled code only, the operator asks rank 0 for one.
    vectors: Any = {"sinks": sinks, "alibi_slopes": alibi_slopes, "seed": seed, "latent_weight": latent_weight}
    out, lse = attend(q, k, v, spec, mask, sharding, **vectors, joins_backward=joins_backward)
    if return_max_logit:
        largest = max_logit(q, k, v, spec, mask, sharding, alibi_slopes=alibi_slopes, latent_weight=latent_weight)
        return (out, lse, largest) if return_lse else (out, largest)
    return (out, lse) if return_lse else out


_NOWHERE = None, None, None, None
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def _checked(mask: Mask, tensors: Inputs, in_full: bool = True) -> Inputs:
    """The tensors of a call in autocast's dtype, after checking that they fit together.

    Without ``in_full`` it checks what may change between calls with tensors of the same shapes and dtypes.
    """
    q, k, v, sinks, alibi_slopes, latent_weight = tensors
    if not isinstance(mask, Mask):
        raise TypeError(f"mask={type(mask).__name__}: expected a seqpar.Mask, such as seqpar.Mask.causal()")
    if isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor):
        q, k, v = to_autocast_dtype(q, k, v)
        if isinstance(latent_weight, Tensor):
            (latent_weight,) = to_autocast_dtype(latent_weight)
    else:
        in_full = True
    if in_full or not isinstance(latent_weight, Tensor | None):
        check_inputs(q, k, v, latent_weight)
    if sinks is not None:
        check_head_vector("sinks", sinks, q, batched=False)
    if alibi_slopes is not None:
        check_head_vector("alibi_slopes", alibi_slopes, q, batched=True)
    return q, k, v, sinks, alibi_slopes, latent_weight


def _check_seed(dropout_seed: object) -> None:
    if torch.compiler.is_compiling():
        return
    check_int("dropout_seed", dropout_seed, 0, bits=63)


@no_compile
def _agree(
    tensors: Inputs,
    make_spec: Callable[[], AttentionSpec],
    mask: Mask,
    sharding: Sharding | None,
    dropout_seed: int | None,
    where: tuple[DeviceMesh | None, ProcessGroup | None, Layout | None, int | None],
    needs_seed: bool,
    alone: bool,
    return_max_logit: bool,
) -> tuple[Sharding, int | None, bool]:
    """Make a sharding, or check the given one against ``where``: mesh, group, layout and seq_len.

    If the length or the dropout seed is not known, the ranks tell each other in a handshake, and compare their
    arguments. ``alone`` says that this rank attends by itself, whatever the default group.

    Returns:
        The sharding, the dropout seed, and whether a backward may run.
    """
    mesh, group, layout, seq_len = where
    needs_handshake = needs_seed or (sharding is None and not has_length(seq_len))
    if isinstance(sharding, Sharding):
        sequence_group = sharding.sequence_group
    else:
        # Ranks that give the same group learn of an error in this rank's mesh.
        with propagate_errors(group if needs_handshake and isinstance(group, ProcessGroup) else None):
            sequence_group = None if alone else sequence_group_of(mesh, group)
    q = tensors[0]
    if needs_handshake and size_of(sequence_group) == 1 and isinstance(q, Tensor) and not q.is_nested and q.dim() == 4:
        needs_handshake, seq_len = False, q.shape[1] if sharding is None and seq_len is None else seq_len
        dropout_seed = int(draw_seed().item()) if needs_seed else dropout_seed
    with propagate_errors(sequence_group if needs_handshake else None):
        spec = make_spec()
        if sharding is not None:
            check_sharding(sharding, mesh=mesh, group=group, layout=layout, seq_len=seq_len)
            seq_len = sharding.seq_len
        else:  # of few tokens, as long as their number is not known
            make_sharding = partial(Sharding, mesh=mesh, group=group, strategy="local" if alone else None)
            layout = require_layout(layout, sequence_group)
            if size_of(sequence_group) == 1:
                make_sharding = partial(sharding_of_one_rank, sequence_group=sequence_group, **make_sharding.keywords)
            sharding = make_sharding(least_length(layout) if seq_len is None else seq_len, layout)
        if not needs_handshake:  # ``attend`` checks the rest
            return sharding, dropout_seed, True
        placement = sharding.place(spec)
        if dropout_seed is not None:
            _check_seed(dropout_seed)
        q, k, v, sinks, _, latent_weight = _checked(mask, tensors)
        check_rows(mask, "q", q)
        mask.check_heads(q.shape[2], k.shape[2])
    tokens = placement.tokens
    how = spec.strategy, placement.algorithm, placement.gather, placement.chunks
    degrees = tokens.ring, tokens.ulysses, tokens.layout
    numbers = spec.softmax_scale, spec.softcap, spec.dropout_p, spec.return_lse, return_max_logit
    expanded = None if latent_weight is None else tuple(latent_weight.shape)
    header = _AttentionHeader(
        length=q.shape[1],
        batch=q.shape[0],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        v_head_dim=v.shape[3],
        dtype=q.dtype,
        mask_or_options=fingerprint(mask, how, degrees, *numbers, expanded),
        dropout_seed=int(draw_seed().item()) if needs_seed else dropout_seed or 0,
        gradient=gradient_state(q, k, v, sinks, latent_weight),
    )
    headers = all_gather_header(lambda: header, sequence_group)
    check_same(headers, "batch", "heads", "kv_heads", "head_dim", "v_head_dim", "dtype", "mask_or_options")
    if not needs_seed:
        check_same(headers, "dropout_seed")
    total = check_lengths([header.length for header in headers], tokens.layout, seq_len)
    if seq_len is None:
        sharding = make_sharding(total, tokens.layout)
    dropout_seed = headers[0].dropout_seed
    joins_backward = any_needs_gradient([header.gradient for header in headers])
    return sharding, dropout_seed, joins_backward


@overload
def replay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ranks: int,
    return_lse: Literal[False] = False,
    **options: Unpack[ReplayArguments],
) -> Tensor: ...
@overload
def replay(
    q: Tensor, k: Tensor, v: Tensor, *, ranks: int, return_lse: Literal[True], **options: Unpack[ReplayArguments]
) -> tuple[Tensor, Tensor]: ...
@overload
def replay(
    q: Tensor, k: Tensor, v: Tensor, *, ranks: int, return_lse: bool, **options: Unpack[ReplayArguments]
) -> Tensor | tuple[Tensor, Tensor]: ...
@no_compile
def replay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ranks: int,
    layout: Layout = "zigzag",
    ranks_per_host: int | None = None,
    shared_memory: bool = True,
    return_lse: bool = False,
    **options: Unpack[WholeArguments],
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` of all ranks in this process: the bits that ``ranks`` processes compute, joined.

    Each rank's own program runs, step by step, with the backend that ``attention`` takes on a rank, and a copy for each
    message. So the result does not differ in a single bit from the results of real ranks of the same version, on the
    same kind of device and with the same number of threads, if their kernels give the same bits in every run (see
    ``deterministic``). A difference comes from the inputs, the layout, the messages or the machine. No process group is
    needed, and none is used.

    Differentiable once. It takes as long as all ranks one after another, and the memory of all of them.

    Args:
        q: ``[batch, seq, heads, head_dim]``, all tokens.
        k: ``[batch, seq, kv_heads, head_dim]``, all tokens.
        v: ``[batch, seq, kv_heads, v_head_dim]``, all tokens.
        ranks: the number of ranks that the sequence is sharded over.
        layout: which tokens each rank holds: a name, or the ``layout`` of a ``Sharding``, such as
            ``Sharding.balanced(mask, seq_len, ranks=4, rank=0).layout``.
        ranks_per_host: how many consecutive ranks share a host; by default, all ranks do.
        shared_memory: whether CPU ranks of a host send messages through shared memory. They do by default;
            ``seqpar.trace().transports`` says it. It decides the order of some sums.
        return_lse: also return the log-sum-exp of the scores, sinks included.
        options: the other arguments of ``attention`` except ``return_max_logit``, with the same defaults. For a mesh,
            pass ``strategy="hybrid"`` with ``ulysses_size``. With ``dropout_p``, pass the ``dropout_seed`` that the
            ranks used. The gradients of ``sinks`` and ``latent_weight`` are the sums of the ranks' gradients, in the
            order of the ranks.

    Returns:
        ``out [batch, seq, heads, v_head_dim]``, and with ``return_lse`` also ``lse [batch, heads, seq]``, of all tokens
        in the order of the sequence.

    Raises:
        TypeError: an argument of the wrong type, or one that says where real ranks are (mesh, group, sharding).
        ValueError: a wrong value; or the order of a sum is not known: of the gradients of an all-gather between more
            than three ranks that do not share memory (NCCL and gloo decide it).
    """
    for name in ("mesh", "group", "sharding", "seq_len"):
        if name in options:
            raise TypeError(f"{name}: replay has all ranks in one process; pass ranks= and layout= instead")
    check_int("ranks", ranks, 1)
    if ranks_per_host is not None:
        check_int("ranks_per_host", ranks_per_host, 1)
    check_bool("shared_memory", shared_memory)
    qkv, spec, mask, vectors = checked_call(q, k, v, replay, return_lse, **options)
    crew = Crew(ranks, ranks_per_host or ranks, shared_memory)
    out, lse = attend_in_process(*qkv, spec, mask, layout, crew, **vectors)
    return out if lse is None else (out, lse)


def checked_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    function: Callable[..., Any],
    return_lse: bool,
    *,
    strategy: StrategyName = "ring",
    mask: Mask = Mask.causal(),  # noqa: B008 (an immutable value)
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: Deterministic = False,
    backend: BackendName = "auto",
    dropout_seed: int | None = None,
    latent_weight: Tensor | None = None,
    **strategy_options: Unpack[StrategyOptions],
) -> tuple[tuple[Tensor, Tensor, Tensor], AttentionSpec, Mask, dict[str, Any]]:
    """The arguments of ``replay`` or ``replay_report``, which is ``function``, checked: q, k and v in autocast's dtype,
    constants, the mask, and "sinks", "alibi_slopes", "seed" (int64 ``[]`` on the host) and "latent_weight"."""
    constants = softmax_scale, softcap, dropout_p, deterministic, backend, return_lse
    spec = attention_spec(strategy, strategy_options, *constants, function, checked_call)
    q, k, v, sinks, alibi_slopes, latent_weight = _checked(mask, (q, k, v, sinks, alibi_slopes, latent_weight))
    seed = None
    if spec.dropout_p:
        if dropout_seed is None:
            raise ValueError(f"dropout_p={dropout_p} without dropout_seed: pass the seed of the ranks")
        _check_seed(dropout_seed)
        seed = torch.full((), dropout_seed, dtype=torch.int64, device="cpu")
    vectors = {"sinks": sinks, "alibi_slopes": alibi_slopes, "seed": seed, "latent_weight": latent_weight}
    return (q, k, v), spec, mask, vectors


def mask_planner(
    sharding: Sharding, strategy: StrategyName = "ring", **strategy_options: Unpack[StrategyOptions]
) -> Callable[..., Mask]:
    """A function that plans attention under a mask ahead of time, such as in the workers of a data loader.

    A plan says which rows a rank sends and receives at which step, and is computed from the mask. If every training
    step has new documents, its first layer computes the plan, which takes milliseconds of the host's time. A planner
    computes the plan elsewhere.

    Args:
        sharding: the sharding of the sequence.
        strategy: as given to ``attention``. For a layer, use ``layer.mask_planner(sharding)``.
        strategy_options: as given to ``attention``.

    Returns:
        ``planner(mask)`` stores the plan in the mask and returns it; ``planner(mask, seq_len)`` for a sequence of
        another length. The planner and the planned mask can be pickled.

    Examples:
        >>> planner = mask_planner(Sharding(1024), "ring")
        >>> mask = planner(Mask.documents([0, 300, 1024]))
    """
    check_sharding(sharding)
    if strategy == "auto":
        raise ValueError("strategy='auto': it depends on the mask; name the strategy to plan for")
    return partial(plan_ahead, sharding.place(attention_spec(strategy, strategy_options)).plan_arguments)


class FixedAttention(Protocol):
    """``attention`` with a fixed strategy. The options are the other arguments of ``attention``."""

    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[FixedArguments]
    ) -> Tensor: ...
    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[FixedArguments]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_max_logit: Literal[True],
        return_lse: bool = False,
        **options: Unpack[FixedArguments],
    ) -> tuple[Tensor, ...]: ...


def _fixed(strategy: StrategyName) -> Callable[[Callable[..., Any]], FixedAttention]:
    """Decorates a function without a body, which becomes ``attention`` under one strategy.

    Its signature and docstring have the strategy's options, and are completed from ``attention``.
    """

    def decorate(named: Callable[..., Any]) -> FixedAttention:
        def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
            return attention(q, k, v, strategy=strategy, **options)

        update_wrapper(call, named, assigned=("__module__", "__name__", "__qualname__"))
        summary, _, options = cleandoc(named.__doc__ or "").partition("\n\nArgs:\n")
        _, _, shared = cleandoc(attention.__doc__ or "").partition("\n\n")
        about_strategy = re.compile(r"^    strategy(_options)?:.*\n(        .*\n)*", re.MULTILINE)
        shared = about_strategy.sub(lambda item: f"{options}\n" if item[1] and options else "", shared)
        call.__doc__ = f"{summary}\n\n{shared}"
        parameters = [p for name, p in signature(attention).parameters.items() if not name.startswith("strategy")]
        parameters += [p for p in signature(named).parameters.values() if p.kind is p.KEYWORD_ONLY]
        vars(call)["__signature__"] = signature(attention).replace(parameters=parameters)
        return cast(FixedAttention, call)

    return decorate


@_fixed("ring")
def ring_attention(q: Tensor, k: Tensor, v: Tensor, **arguments: Unpack[SharedArguments]) -> Any:
    """``attention`` with ``strategy="ring"``: K/V rows are sent from rank to rank, step by step."""


@_fixed("ulysses")
def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, **arguments: Unpack[SharedArguments]) -> Any:
    """``attention`` with ``strategy="ulysses"``: all-to-all between sequence shards and head shards."""


@_fixed("context_parallel")
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    comm: Comm | None = None,
    chunks: int | None = None,
    ulysses_size: int | None = None,
    **arguments: Unpack[SharedArguments],
) -> Any:
    """``attention`` with ``strategy="context_parallel"``: ``comm`` selects how ranks receive the keys they need.

    Args:
        comm: "all_gather", "p2p", "a2a" or "a2a+p2p"; by default "all_gather" on one host and "p2p" on several.
        chunks: with "all_gather", in how many chunks of heads K/V are received; by default their size decides.
        ulysses_size: with "a2a+p2p" on a plain group, the ranks of each all-to-all, a divisor of the group's size.
    """


@_fixed("hybrid")
def hybrid_attention(
    q: Tensor, k: Tensor, v: Tensor, *, ulysses_size: int | None = None, **arguments: Unpack[SharedArguments]
) -> Any:
    """``attention`` with ``strategy="hybrid"``: all-to-all in subgroups, ring across them.

    Args:
        ulysses_size: on a plain group, the ranks of each all-to-all, a divisor of the group's size; by default the
            largest one up to its square root.
    """
