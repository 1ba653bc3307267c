"""The table of what ``seqpar bench`` compares: a row for attention on one process, for each strategy, for each package.

The adapter of another package is a module of ``benchmarks/peers/``, which is installed as ``seqpar.peers``. It has a
``NAME`` and a function ``make(setting) -> BenchAttention``. It raises ``RefusalError`` with the reason if the package
cannot run here.

Shapes: ``b`` batch, ``s`` tokens of this rank, ``h`` heads, ``n`` KV heads, ``d`` head_dim of q and k, ``e`` head_dim
of v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention

from ..base.checks import check_choice
from ..comm.p2p import without_messages
from ..decoding import KeyValueCache
from ..functional import attention
from ..kernels import BACKENDS, ONLY_BY_NAME
from ..masks.mask import Mask
from ..mixers import by_heads
from ..placement.layout import LayoutName, shard_positions
from ..placement.strategies import STRATEGIES
from ..ranks.mesh import ranks_by_host
from ..sharding.sharding import Sharding
from .bench_cases import PRESETS, BenchCase, BenchConfig
from .bench_mixer import linear_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [b, s, h, d], k [b, s, n, d], v [b, s, n, e] -> [b, s, h, e]
KINDS = ("seqpar", "peer", "ideal")  # as in the table. An ideal is attention on one process, which rank 0 runs alone
_MAX_DENSE_TOKENS = 16384  # a longer mask would be too large as a square matrix


class RefusalError(Exception):
    """An attention cannot run here; the message says why."""


@dataclass(frozen=True)
class BenchSetting:
    """What is computed, and on which ranks. The ``need_`` methods raise a ``RefusalError``."""

    case: BenchCase
    device: torch.device
    group: ProcessGroup  # the ranks that the sequence is sharded over
    alone: ProcessGroup  # this rank only
    fake: ProcessGroup  # the ranks of ``group``; its messages take no time
    control: ProcessGroup  # the ranks of ``group``, over gloo, to coordinate the measurement
    world: int  # the number of ranks of the default group

    @property
    def mask(self) -> Mask:
        return self.case.make_mask()

    def positions(self, layout: LayoutName = "contiguous") -> Tensor:
        """Global positions of this rank's tokens, int64 ``[s]``."""
        return shard_positions(self.case.seq_len, self.group.size(), self.group.rank(), layout)

    def inputs(self, positions: Tensor) -> list[Tensor]:
        """q, k, v and dout at these positions of the sequence. q, k and v require gradients."""
        full = self.case.tensors(self.device)
        return [x.index_select(1, positions.to(x.device)).requires_grad_(i < 3) for i, x in enumerate(full)]

    def prompt(self, positions: Tensor) -> list[Tensor]:
        """k and v of tokens that are in a cache before decoding starts."""
        return [x.detach() for x in self.inputs(positions)[1:3]]

    def decoding(self, attend: Attend) -> BenchAttention:
        """``attend`` decodes the new tokens, which every rank has."""
        if not self.case.causal:
            raise RefusalError(f"no mask {self.case.mask}: decoding is causal")
        return BenchAttention(attend, self.case.queries(), no_backward="")

    def boundaries(self) -> list[int] | None:
        """The cu_seqlens of causal packed documents; None for another mask. A causal mask is one document."""
        if self.case.causal:
            return [0, self.case.seq_len]
        return list(self.mask.starts[0]) if self.case.mask.startswith(("documents:", "mix:")) else None

    def need_cuda(self) -> None:
        if self.device.type != "cuda":
            raise RefusalError("its kernels need CUDA")

    def need_half(self) -> None:
        if self.case.dtype == "float32":
            raise RefusalError(f"no {self.case.dtype}: bfloat16 and float16 only")

    def need_equal_head_dims(self) -> None:
        if self.case.head_dim != self.case.v_head_dim:
            raise RefusalError(
                f"no head_dim of v ({self.case.v_head_dim}) other than of q and k ({self.case.head_dim})"
            )

    def need_causal_or_full(self) -> bool:
        """Whether the mask is causal."""
        if self.case.causal is None:
            raise RefusalError(f"no mask {self.case.mask}: causal and full only")
        return self.case.causal

    def need_divisible(self, parts: int) -> None:
        if self.case.seq_len % parts:
            raise RefusalError(f"{self.case.seq_len:,} tokens do not divide by {parts}")

    def need_heads(self, ranks: int) -> None:
        """All-to-alls of whole heads need the same number of heads on every rank."""
        if self.case.heads % ranks or self.case.kv_heads % ranks:
            raise RefusalError(
                f"{self.case.heads} heads and {self.case.kv_heads} KV heads do not divide by {ranks} ranks"
            )


@dataclass(frozen=True)
class BenchAttention:
    """An attention on this rank, ready to be called."""

    attend: Attend
    positions: Tensor  # int64 [s], global positions of this rank's tokens, in the order that ``attend`` expects
    no_backward: str | None = None  # why there is no backward; empty if none is to be expected
    any_group: bool = False  # whether another package sends all messages in setting.group: see ``silent``
    block: Callable[[], AbstractContextManager[Any]] = nullcontext  # the context of forward and backward
    silent: BenchAttention | None = None  # the same, whose messages take no time; None if they cannot be left out


class BenchRunner(NamedTuple):
    """A row of the table."""

    name: str
    kind: str  # one of KINDS
    make: Callable[[BenchSetting], BenchAttention]
    layout: str = ""
    backend: str = ""


def runners(config: BenchConfig, case: BenchCase) -> Iterator[BenchRunner]:
    """The rows for a case, with every strategy, layout and backend of the options.

    By default, an all-to-all has contiguous shards, and each other strategy has the layouts of the preset. Linear
    attention and decoding have one strategy each, and no other package has them.
    """
    preset = PRESETS[case.preset]
    if preset.mixer:
        yield BenchRunner("linear attention", "ideal", of_seqpar)
        for layout in config.layout or ("contiguous",):
            make = partial(of_seqpar, strategy="by_heads", layout=layout)
            yield BenchRunner(f"by_heads {layout}", "seqpar", make, layout, "auto")
        return
    yield BenchRunner("SDPA", "ideal", decoding_by_sdpa if preset.new_tokens else by_sdpa)
    for backend, status in BACKENDS.items():
        if backend not in ("reference", *ONLY_BY_NAME) and status.unavailable() is None:
            yield BenchRunner(f"local {backend}", "ideal", partial(of_seqpar, backend=backend), backend=backend)
    default = ("ring", "ulysses", "all_gather", *(["hybrid"] if case.ranks >= 4 else []), "auto")
    defaults: dict[str, tuple[str, ...]] = {"ulysses": ("contiguous",), "a2a": ("contiguous",)}
    for strategy in ("cache",) if preset.new_tokens else config.strategy or default:
        for backend in config.backend or ("auto",):
            for layout in config.layout or defaults.get(strategy, preset.layouts):
                name = f"{strategy} {layout}" + (f" {backend}" if backend != "auto" else "")
                make = partial(of_seqpar, strategy=strategy, layout=layout, backend=backend)
                yield BenchRunner(name, "seqpar", make, layout, backend)
    for module in () if preset.new_tokens else adapters(config):
        yield BenchRunner(module.NAME, "peer", partial(of_peer, module=module))


def adapters(config: BenchConfig) -> list[Any]:
    """The adapter modules of the packages to measure."""
    try:
        available: tuple[str, ...] = import_module("seqpar.peers").PEERS
    except ImportError:  # this installation has no adapters
        available = ()
    for name in config.peer or ():
        check_choice("peer", name, available)
    names = (config.peer or available) if config.peers else ()
    return [import_module(f"seqpar.peers.{name}") for name in names]


def of_peer(setting: BenchSetting, module: Any) -> BenchAttention:
    """Attention by another package, whose adapter is ``module``."""
    try:
        made: BenchAttention = module.make(setting)
        if made.any_group and setting.group.size() > 1:
            made = replace(made, silent=module.make(replace(setting, group=setting.fake)))
    except ImportError as error:
        missing = (error.name or str(error)).partition(".")[0]
        raise RefusalError(f"{missing} is not installed") from error
    return made


def of_seqpar(
    setting: BenchSetting, strategy: str = "local", layout: Any = "contiguous", backend: Any = "auto"
) -> BenchAttention:
    """Attention by "local" or one of ``strategy_names()``. A case may have linear attention or decoding instead."""
    case, mask, group = setting.case, setting.mask, setting.group
    length = case.seq_len - case.new_tokens
    if strategy == "local":
        sharding = Sharding(length, strategy="local")
    elif layout == "balanced":
        per_host = max(map(len, ranks_by_host(group)))
        sharding = Sharding.balanced(mask, length, group=group, ranks_per_host=per_host)
    else:
        sharding = Sharding(length, layout, group=group)
    attend: Attend
    if case.new_tokens:
        attend = partial(_decode, sharding, setting.prompt(sharding.positions()), backend)
    elif not case.mixer:
        comm = {} if strategy in STRATEGIES else {"comm": strategy}
        name: Any = "context_parallel" if comm else strategy
        attend = partial(attention, strategy=name, mask=mask, sharding=sharding, backend=backend, **comm)
    elif setting.boundaries() is None:
        raise RefusalError(f"no mask {case.mask}: causal and documents only")
    else:
        attend = partial(_linear_attention, sharding, mask)
    made = setting.decoding(attend) if case.new_tokens else BenchAttention(attend, sharding.positions())
    several = strategy != "local" and group.size() > 1
    return replace(made, silent=replace(made, block=without_messages)) if several else made


def _linear_attention(sharding: Sharding, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = by_heads(linear_attention, q, (k, v), sharding=sharding, mask=mask)
    return out


def _decode(sharding: Sharding, prompt: Sequence[Tensor], backend: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of new tokens, one after another. ``prompt``: k and v of the tokens before them, of this rank."""
    cache = KeyValueCache(sharding)
    k_prompt, v_prompt = prompt
    cache.fill(0, k_prompt, v_prompt, sharding.positions())
    tokens = zip(*(x.split(1, dim=1) for x in (q, k, v)), strict=True)
    return torch.cat([cache.attention(0, *token, backend=backend) for token in tokens], dim=1)


def decoding_by_sdpa(setting: BenchSetting) -> BenchAttention:
    """Decoding by PyTorch's attention, with a cache that has memory for all tokens."""
    k_cache, v_cache = (x.transpose(1, 2) for x in setting.prompt(torch.arange(setting.case.seq_len)))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for i, at in enumerate(setting.case.queries().tolist()):
            k_cache[:, :, at], v_cache[:, :, at] = k[:, i], v[:, i]
            seen = k_cache[:, :, : at + 1], v_cache[:, :, : at + 1]
            outs.append(scaled_dot_product_attention(q[:, i, :, None], *seen, enable_gqa=q.shape[2] != k.shape[2]))
        return torch.cat(outs, dim=2).transpose(1, 2)

    return setting.decoding(attend)


def by_sdpa(setting: BenchSetting) -> BenchAttention:
    """PyTorch's attention on one process."""
    return BenchAttention(sdpa(setting), torch.arange(setting.case.seq_len))


def sdpa(setting: BenchSetting, rows: Tensor | None = None) -> Attend:
    """PyTorch's attention over all keys: of the queries at the positions ``rows``, or of all queries in order."""
    case = setting.case
    dense = None
    if case.causal is None or (case.causal and rows is not None):
        if case.seq_len > _MAX_DENSE_TOKENS:
            raise RefusalError(f"needs the mask as a matrix of {case.seq_len:,} x {case.seq_len:,}, which is too large")
        dense = setting.mask.dense(case.seq_len).to(setting.device)
        dense = dense if rows is None else dense.index_select(-2, rows.to(setting.device))
        dense = dense[:, None] if dense.ndim == 3 else dense
    is_causal = bool(case.causal) and dense is None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(q, k, v, attn_mask=dense, is_causal=is_causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return attend


def reference(setting: BenchSetting) -> BenchAttention:
    """PyTorch's attention on one process, or seqpar's where the mask would be too large as a square matrix."""
    case = setting.case
    if case.mixer or (case.causal is None and case.seq_len > _MAX_DENSE_TOKENS):
        return of_seqpar(setting)
    return by_sdpa(setting)
