"""What ``seqpar bench`` measures: its options, its presets, and the sizes and inputs of each case.

Shapes: ``b`` batch, ``s`` tokens of the full sequence, ``h`` heads, ``n`` KV heads, ``d`` head_dim of q and k, ``e``
head_dim of v.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.checks import check_choice, check_int, check_number
from ..kernels import BACKENDS
from ..masks.mask import Mask
from ..placement.layout import LAYOUT_WORDS, LayoutWord
from ..placement.strategies import COMMS, STRATEGIES
from ..planner.mixes import mask_of
from .bench_mixer import operations

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("auto", "cpu", "cuda")


class Preset(NamedTuple):
    """A typical attention."""

    mask: str  # as --mask takes it
    about: str
    heads_per_kv: int = 1
    qk_to_v: float = 1.0  # head_dim of q and k / head_dim of v
    layouts: tuple[LayoutWord, ...] = ("zigzag",)  # compared for strategies that send K/V
    seq_lens: tuple[int, ...] = (8192, 16384, 32768)  # on CUDA
    mixer: bool = False  # linear attention by heads instead of attention


PRESETS: dict[str, Preset] = {
    "causal": Preset("causal", "one document, as many KV heads as query heads"),
    "packed": Preset(
        "mix:magi",
        "packed documents with the lengths in MagiAttention's distributed benchmark: most of 13.5 million documents "
        "have 200 to 2,000 tokens, but the longest, of up to 196,608 tokens, have most of the work",
        layouts=("zigzag", "balanced"),
    ),
    "window": Preset("window:1024", "each token sees the last 1,024 tokens"),
    "gqa": Preset("causal", "4 query heads per KV head, as in Llama 3 8B", heads_per_kv=4),
    "mla": Preset(
        "causal", "q and k one and a half times as wide as v, as in DeepSeek-V3 (192 and 128)", qk_to_v=1.5
    ),
    "video": Preset(
        "full",
        "all tokens see each other; on CUDA 75,600 tokens of video (81 frames of 720p in Wan 2.1) and 512 of text",
        layouts=("contiguous",),
        seq_lens=(76112,),
    ),
    "image": Preset(
        "full",
        "all tokens see each other; on CUDA 4,096 tokens of an image (1024 x 1024 in Flux) and 512 of text",
        layouts=("contiguous",),
        seq_lens=(4608,),
    ),
    "linear": Preset(
        "causal", "linear attention with a decay, by seqpar.mixers.by_heads; beside the preset causal", mixer=True
    ),
}  # fmt: skip


def strategy_names() -> tuple[str, ...]:
    """The values of ``--strategy``: the strategies for several ranks, with context_parallel named by its ``comm``."""
    return (*(name for name in STRATEGIES if name not in ("local", "context_parallel")), *COMMS)


@dataclass(frozen=True)
class BenchStrategy:
    """A strategy of seqpar, by one of ``strategy_names()``, with a layout and a backend."""

    strategy: str
    layout: LayoutWord
    backend: str = "auto"

    @property
    def name(self) -> str:
        return f"{self.strategy} {self.layout}" + (f" {self.backend}" if self.backend != "auto" else "")

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``seqpar.attention``."""
        if self.strategy in STRATEGIES:
            return {"strategy": self.strategy, "backend": self.backend}
        return {"strategy": "context_parallel", "comm": self.strategy, "backend": self.backend}


@dataclass(frozen=True)
class BenchCase:
    """The sizes of one comparison. All runners of a case have the same inputs, mask and ranks."""

    preset: str
    mask: str  # as --mask takes it
    seq_len: int  # of the full sequence
    ranks: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int  # of q and k
    v_head_dim: int
    dtype: str

    def shapes(self) -> list[tuple[int, int, int, int]]:
        """q ``[b, s, h, d]``, k ``[b, s, n, d]``, v ``[b, s, n, e]`` and out ``[b, s, h, e]`` of the full sequence."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        head_dims = (self.head_dim, self.head_dim, self.v_head_dim, self.v_head_dim)
        return [(self.batch, self.seq_len, n, d) for n, d in zip(heads, head_dims, strict=True)]

    def tensors(self, device: torch.device) -> list[Tensor]:
        """Random q, k, v and dout, the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=generator).to(device, DTYPES[self.dtype]) for shape in self.shapes()]

    def make_mask(self) -> Mask:
        return mask_of(self.mask, self.seq_len)

    @property
    def mixer(self) -> bool:
        """Whether it is linear attention."""
        return PRESETS[self.preset].mixer

    @property
    def causal(self) -> bool | None:
        """True for a causal mask, False for a full mask, None for any other mask."""
        return {"causal": True, "full": False}.get(self.mask)

    def visible_pairs(self) -> int:
        """The number of visible pairs of a query and a key, in all rows of the batch."""
        lo, hi = self.make_mask().intervals(torch.arange(self.seq_len))
        return self.batch * int((hi.clamp_max(self.seq_len) - lo.clamp_min(0)).clamp_min(0).sum())

    def operations(self, backward: bool) -> float:
        """Floating-point operations over the visible pairs: 2 matrix products in forward, 5 in backward. Linear
        attention computes no pairs."""
        d, e = self.head_dim, self.v_head_dim
        if self.mixer:
            return operations(self.batch * self.seq_len, self.heads, d, e, backward)
        return 2.0 * self.visible_pairs() * self.heads * ((3 * d + 2 * e) if backward else (d + e))

    def __str__(self) -> str:
        return f"{self.preset}, {self.seq_len:,} tokens, {self.ranks} rank(s), mask {self.mask}"


@dataclass(frozen=True)
class BenchConfig:
    """The options of ``seqpar bench``. An empty tuple or None leaves the choice to the preset or the device."""

    preset: tuple[str, ...] = ("causal",)
    strategy: tuple[str, ...] = ()
    layout: tuple[LayoutWord, ...] = ()
    mask: tuple[str, ...] = ()
    seq_len: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    backend: tuple[str, ...] = ("auto",)
    peer: tuple[str, ...] | None = None  # None: all
    peers: bool = True
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

    @property
    def peer_names(self) -> tuple[str, ...] | None:
        return self.peer if self.peers else ()

    def check(self, world: int) -> None:
        """Raise a TypeError or ValueError for a wrong option, for ``world`` ranks that were started."""
        for option, values, choices in (
            ("preset", self.preset, PRESETS),
            ("strategy", self.strategy, strategy_names()),
            ("layout", self.layout, LAYOUT_WORDS),
            ("backend", self.backend, ("auto", *BACKENDS)),
            ("device", (self.device,), DEVICES),
            ("dtype", (self.dtype,) if self.dtype is not None else (), DTYPES),
        ):
            for value in values:
                check_choice(option, value, choices)
        for option in ("batch", "rounds", "heads", "kv_heads", "head_dim"):
            if (size := getattr(self, option)) is not None:
                check_int(option, size, 1)
        for seq_len in self.seq_len:
            check_int("seq_len", seq_len, max(self.ranks, default=world))  # at least one token per rank
        if check_number("budget", self.budget) < 0:
            raise ValueError(f"budget={self.budget}: expected seconds, at least 0")
        for n in self.ranks:
            if not 1 <= n <= world:
                raise ValueError(
                    f"ranks={n}: expected 1 to {world}, the number of ranks that were started; raise --nproc"
                )
        for mask in self.mask:
            mask_of(mask, 4096)
        heads = self.heads or 8
        if self.kv_heads is not None and heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads}: expected a divisor of heads={heads}")

    def cases(self, world: int, cuda: bool) -> list[BenchCase]:
        """The combinations of preset, mask, ranks and length, short sequences first, for ``world`` started ranks."""
        small = self.seq_len or (() if cuda else (1024, 2048, 4096))
        heads = self.heads or (32 if cuda else 8)
        head_dim = self.head_dim or (128 if cuda else 64)
        return [
            BenchCase(
                preset=preset,
                mask=mask,
                seq_len=seq_len,
                ranks=ranks,
                batch=self.batch,
                heads=heads,
                kv_heads=self.kv_heads or max(1, heads // PRESETS[preset].heads_per_kv),
                head_dim=round(head_dim * PRESETS[preset].qk_to_v),
                v_head_dim=head_dim,
                dtype=self.dtype or ("bfloat16" if cuda else "float32"),
            )
            for preset, ranks in product(self.preset, self.ranks or (world,))
            for seq_len in sorted(small or PRESETS[preset].seq_lens)
            for mask in self.mask or (PRESETS[preset].mask,)
        ]

    def strategies(self, preset: str, ranks: int) -> list[BenchStrategy]:
        """The strategies to compare on ``ranks`` ranks, with every layout and backend of the options.

        By default, an all-to-all has contiguous shards, and each other strategy has the layouts of the preset. Linear
        attention has one strategy.
        """
        if PRESETS[preset].mixer:
            return [BenchStrategy("by_heads", layout) for layout in self.layout or ("contiguous",)]
        default = ("ring", "ulysses", "all_gather", *(["hybrid"] if ranks >= 4 else []), "auto")
        defaults: dict[str, tuple[LayoutWord, ...]] = {"ulysses": ("contiguous",), "a2a": ("contiguous",)}
        return [
            BenchStrategy(strategy, layout, backend)
            for strategy, backend in product(self.strategy or default, self.backend)
            for layout in self.layout or defaults.get(strategy, PRESETS[preset].layouts)
        ]
