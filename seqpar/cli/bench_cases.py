"""What ``seqpar bench`` measures: its options, its presets, and the sizes and inputs of each case.

Shapes: ``b`` batch, ``s`` tokens of the full sequence, ``h`` heads, ``n`` KV heads, ``d`` head_dim of q and k, ``e``
head_dim of v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention

from ..checks import check_choice, check_int, check_number
from ..kernels import BACKENDS
from ..layout import LAYOUTS, Layout, shard_positions
from ..mask import Mask
from ..planner.mixes import mask_of
from ..strategies import COMMS, STRATEGIES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Preset:
    """A typical attention.

    Attributes:
        mask: the mask, as ``--mask`` takes it.
        about: what the preset represents, and the source of its numbers.
        kv_share: query heads per KV head.
        qk_to_v: the head_dim of q and k, divided by that of v.
    """

    mask: str
    about: str
    kv_share: int = 1
    qk_to_v: float = 1.0


PRESETS: dict[str, Preset] = {
    "causal": Preset("causal", "one document, as many KV heads as query heads"),
    "packed": Preset(
        "mix:magi",
        "packed documents with the lengths in MagiAttention's distributed benchmark: most of 13.5 million documents "
        "have 200 to 2,000 tokens, but the longest, of up to 196,608 tokens, have most of the work",
    ),
    "window": Preset("window:1024", "each token sees the last 1,024 tokens"),
    "gqa": Preset("causal", "4 query heads per KV head, as in Llama 3 8B", kv_share=4),
    "mla": Preset(
        "causal", "q and k one and a half times as wide as v, as in DeepSeek-V3 (192 and 128)", qk_to_v=1.5
    ),
}  # fmt: skip


@dataclass(frozen=True)
class BenchConfig:
    """The options of ``seqpar bench``. An empty tuple or None leaves the choice to the preset or the device."""

    presets: tuple[str, ...] = ("causal",)
    strategies: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = ()
    masks: tuple[str, ...] = ()
    seq_lens: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    backends: tuple[str, ...] = ("auto",)
    peers: tuple[str, ...] | None = None
    batch: int = 1
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    device: str = "auto"
    rounds: int = 7
    budget: float = 150.0
    charts: bool = True
    trace: bool = False
    out: str = "bench"

    def check(self, world: int) -> None:
        """Check every option.

        Args:
            world: the number of ranks that were started.

        Raises:
            TypeError: an option has another type.
            ValueError: the value of an option is not allowed, or does not fit ``world`` ranks.
        """
        for name, values, known in (
            ("preset", self.presets, PRESETS),
            ("strategy", self.strategies, strategy_names()),
            ("layout", self.layouts, LAYOUTS),
            ("backend", self.backends, ("auto", *BACKENDS)),
        ):
            for value in values:
                check_choice(name, value, known)
        check_choice("device", self.device, DEVICES)
        if self.dtype is not None:
            check_choice("dtype", self.dtype, DTYPES)
        for name, number in (("batch", self.batch), ("rounds", self.rounds)):
            check_int(name, number, 1)
        for name, size in (("heads", self.heads), ("kv_heads", self.kv_heads), ("head_dim", self.head_dim)):
            if size is not None:
                check_int(name, size, 1)
        for seq_len in self.seq_lens:
            check_int("seq_len", seq_len, max(self.ranks, default=world))  # at least one token per rank
        if check_number("budget", self.budget) < 0:
            raise ValueError(f"budget={self.budget}: expected seconds, at least 0")
        for n in self.ranks:
            if not 1 <= n <= world:
                raise ValueError(
                    f"ranks={n}: expected 1 to {world}, the number of ranks that were started; raise --nproc"
                )
        for mask in self.masks:
            mask_of(mask, 4096)
        heads, kv_heads = self.heads or 8, self.kv_heads
        if kv_heads is not None and heads % kv_heads:
            raise ValueError(f"kv_heads={kv_heads}: expected a divisor of heads={heads}")

    def cases(self, world: int, device: torch.device) -> list[Case]:
        """The combinations of preset, mask, ranks and length, short sequences first.

        Args:
            world: the number of ranks that were started.
            device: the device of this rank, on which the default sizes depend.
        """
        cuda = device.type == "cuda"
        seq_lens = self.seq_lens or ((8192, 16384, 32768) if cuda else (1024, 2048, 4096))
        heads = self.heads or (32 if cuda else 8)
        head_dim = self.head_dim or (128 if cuda else 64)
        cases = []
        for name, ranks, seq_len in product(self.presets, self.ranks or (world,), sorted(seq_lens)):
            preset = PRESETS[name]
            for mask in self.masks or (preset.mask,):
                cases.append(
                    Case(
                        preset=name,
                        mask=mask,
                        seq_len=seq_len,
                        ranks=ranks,
                        batch=self.batch,
                        heads=heads,
                        kv_heads=self.kv_heads or max(1, heads // preset.kv_share),
                        head_dim=round(head_dim * preset.qk_to_v),
                        v_head_dim=head_dim,
                        dtype=self.dtype or ("bfloat16" if cuda else "float32"),
                    )
                )
        return cases

    def contenders(self, ranks: int) -> list[Contender]:
        """The strategies of seqpar that are compared on ``ranks`` ranks, with every layout and backend of the options.

        By default, each strategy has the layout in which ranks have equal work under a causal mask.
        """
        several = ("hybrid",) if ranks >= 4 else ()
        strategies = self.strategies or ("ring", "ulysses", "all_gather", *several, "auto")
        found = []
        for strategy, backend in product(strategies, self.backends):
            balanced: Layout = "contiguous" if strategy in ("ulysses", "a2a") else "zigzag"
            found += [Contender(strategy, layout, backend) for layout in self.layouts or (balanced,)]
        return found


def strategy_names() -> tuple[str, ...]:
    """The values of ``--strategy``: the strategies for several ranks, with context_parallel named by its ``comm``."""
    return (*(name for name in STRATEGIES if name not in ("local", "context_parallel")), *COMMS)


@dataclass(frozen=True)
class Contender:
    """A strategy of seqpar with a layout and a backend.

    Attributes:
        strategy: one of ``strategy_names()``.
        layout: which positions each rank holds.
        backend: the attention backend.
    """

    strategy: str
    layout: Layout
    backend: str = "auto"

    @property
    def name(self) -> str:
        return f"{self.strategy} {self.layout}" + (f" {self.backend}" if self.backend != "auto" else "")

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``seqpar.attention`` that name the strategy."""
        if self.strategy in STRATEGIES:
            return {"strategy": self.strategy, "backend": self.backend}
        return {"strategy": "context_parallel", "comm": self.strategy, "backend": self.backend}


@dataclass(frozen=True)
class Case:
    """The sizes of the attention that is measured. All attempts have the same inputs, mask and ranks.

    Attributes:
        preset: the name of the preset.
        mask: the mask, as ``--mask`` takes it.
        seq_len: tokens of the full sequence.
        ranks: the number of ranks that the sequence is sharded over.
        batch: sequences.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: the head_dim of q and k.
        v_head_dim: the head_dim of v.
        dtype: a name of ``DTYPES``.
    """

    preset: str
    mask: str
    seq_len: int
    ranks: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str

    def tensors(self, device: torch.device) -> list[Tensor]:
        """q ``[b, s, h, d]``, k ``[b, s, n, d]``, v ``[b, s, n, e]``, dout ``[b, s, h, e]``, the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        widths = (self.head_dim, self.head_dim, self.v_head_dim, self.v_head_dim)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, self.seq_len, n, d) for n, d in zip(heads, widths, strict=True)]
        return [torch.randn(shape, generator=generator).to(device, DTYPES[self.dtype]) for shape in shapes]

    def make_mask(self) -> Mask:
        return mask_of(self.mask, self.seq_len)

    @property
    def causal(self) -> bool | None:
        """True for a causal mask, False for a full mask, None for any other mask."""
        return {"causal": True, "full": False}.get(self.mask)

    def visible_pairs(self) -> int:
        """The number of visible pairs of a query and a key, in all rows of the batch."""
        lo, hi = self.make_mask().intervals(torch.arange(self.seq_len))
        pairs = int((hi.clamp_max(self.seq_len) - lo.clamp_min(0)).clamp_min(0).sum())
        return pairs * self.batch

    def operations(self, backward: bool) -> float:
        """Floating-point operations over the visible pairs: 2 matrix products in forward, 5 in backward."""
        d, e = self.head_dim, self.v_head_dim
        widths = (3 * d + 2 * e) if backward else (d + e)
        return 2.0 * self.visible_pairs() * self.heads * widths

    def __str__(self) -> str:
        return f"{self.preset}, {self.seq_len:,} tokens, {self.ranks} rank(s), mask {self.mask}"


_LONGEST_DENSE = 16384  # tokens; a longer mask would be too large as a square matrix


class RefusalError(Exception):
    """A package cannot run here; the message says why."""


@dataclass(frozen=True)
class Setting:
    """What an attempt has to compute, and on which ranks.

    Attributes:
        case: the lengths, the heads, the mask and the dtype.
        group: the ranks that the sequence is sharded over.
        alone: a group with this rank only.
        world: the number of ranks of the default group.
        device: the device of this rank.
    """

    case: Case
    group: ProcessGroup
    alone: ProcessGroup
    world: int
    device: torch.device

    @property
    def mask(self) -> Mask:
        return self.case.make_mask()

    def positions(self, layout: Layout = "contiguous") -> Tensor:
        """Global positions of this rank's tokens, int64 ``[s]``."""
        return shard_positions(self.case.seq_len, self.group.size(), self.group.rank(), layout)

    def boundaries(self) -> list[int] | None:
        """The cu_seqlens of causal packed documents; None for another mask. A causal mask is one document."""
        kind = self.case.mask.partition(":")[0]
        if kind not in ("causal", "documents", "mix"):
            return None
        return [0, self.case.seq_len] if kind == "causal" else list(self.mask.starts[0])

    # Requirements that several packages share. Each raises a RefusalError if the case does not meet it.

    def need_cuda(self) -> None:
        if self.device.type != "cuda":
            raise RefusalError("its kernels need CUDA")

    def need_half(self) -> None:
        if DTYPES[self.case.dtype] not in (torch.bfloat16, torch.float16):
            raise RefusalError(f"no {self.case.dtype}: bfloat16 and float16 only")

    def need_equal_head_dims(self) -> None:
        if self.case.head_dim != self.case.v_head_dim:
            raise RefusalError(
                f"no head_dim of v ({self.case.v_head_dim}) other than of q and k ({self.case.head_dim})"
            )

    def need_causal_or_full(self) -> bool:
        """Whether the mask is causal; any mask but causal and full is refused."""
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
class Peer:
    """The attention of another package, ready to be called.

    Attributes:
        attention: returns out ``[b, s, h, e]`` of this rank's q ``[b, s, h, d]``, k ``[b, s, n, d]`` and v ``[b, s, n,
            e]``.
        positions: global positions of this rank's tokens, int64 ``[s]``, in the order that the package expects.
        no_backward: why the package has no backward; None if it has one.
        any_group: whether all messages are sent in ``setting.group``, so that they can be left out.
        block: returns the context in which forward and backward run.
    """

    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    positions: Tensor
    no_backward: str | None = None
    any_group: bool = False
    block: Callable[[], AbstractContextManager[Any]] = nullcontext


def adapters(names: Sequence[str] | None) -> dict[str, Any]:
    """The modules of some adapters, by their file names.

    Args:
        names: the file names; None for all adapters.

    Raises:
        ValueError: there is no adapter of this name.
    """
    try:
        known: tuple[str, ...] = import_module("seqpar.peers").PEERS
    except ImportError:  # this installation has no adapters
        known = ()
    for name in names or ():
        check_choice("peer", name, known)
    return {name: import_module(f"seqpar.peers.{name}") for name in (known if names is None else names)}


def make_peer(module: Any, setting: Setting) -> Peer:
    """The attention of the package whose adapter is ``module``.

    Raises:
        RefusalError: the package is not installed, or cannot compute this setting here.
    """
    try:
        peer: Peer = module.make(setting)
    except ImportError as error:
        missing = (error.name or str(error)).partition(".")[0]
        raise RefusalError(f"{missing} is not installed") from error
    return peer


def sdpa(setting: Setting, rows: Tensor | None = None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """PyTorch's attention of some or all queries over all keys.

    Args:
        setting: the case and the device.
        rows: global positions of the queries; None for all in order.

    Returns:
        A function of q, k and v, tensors ``[b, s, h, d]``, that returns out.

    Raises:
        RefusalError: the mask would be too large as a square matrix.
    """
    case = setting.case
    dense = None
    if case.causal is None or (case.causal and rows is not None):
        if case.seq_len > _LONGEST_DENSE:
            raise RefusalError(f"needs the mask as a matrix of {case.seq_len:,} x {case.seq_len:,}, which is too large")
        dense = setting.mask.dense(case.seq_len).to(setting.device)
        dense = dense if rows is None else dense.index_select(-2, rows.to(setting.device))
        dense = dense[:, None] if dense.ndim == 3 else dense
    is_causal = bool(case.causal) and dense is None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(q, k, v, attn_mask=dense, is_causal=is_causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return attention
