"""What ``seqpar bench`` measures: its options, its presets, and the sizes and inputs of each case.

Shapes: ``b`` batch, ``s`` tokens of the full sequence, ``h`` heads, ``n`` KV heads, ``d`` head_dim of q and k, ``e``
head_dim of v.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...checks import check_choice, check_int, check_number
from ...kernels import BACKENDS
from ...layout import LAYOUTS, Layout
from ...mask import Mask
from ...planner.mixes import mask_of
from ...strategies import COMMS, STRATEGIES

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
