"""What ``seqpar bench`` measures: its options, its presets, and the sizes and inputs of each case.

Shapes: ``b`` batch, ``s`` tokens of the full sequence, ``h`` heads, ``n`` KV heads, ``d`` head_dim of q and k, ``e``
head_dim of v.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from typer import Option

from ..base.checks import check_choice, check_int, check_number
from ..kernels import BACKENDS
from ..masks.mask import Mask
from ..placement.layout import LAYOUT_WORDS, LayoutWord
from ..placement.strategies import COMMS, STRATEGIES
from ..planner.mixes import MIXES, mask_of
from .bench_mixer import CHUNK
from .plan import read_tokens

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
    new_tokens: int = 0  # the last tokens, decoded one after another with a cache; 0: attention of all tokens


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
    "decode": Preset(
        "causal",
        "the last 32 tokens, one after another, with the keys and values of all tokens before them in a "
        "seqpar.KeyValueCache; 4 query heads per KV head",
        heads_per_kv=4,
        layouts=("contiguous",),
        new_tokens=32,
    ),
}  # fmt: skip


def strategy_names() -> tuple[str, ...]:
    """The values of ``--strategy``: the strategies for several ranks, with context_parallel named by its ``comm``."""
    return (*(name for name in STRATEGIES if name not in ("local", "context_parallel")), *COMMS)


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

    @property
    def new_tokens(self) -> int:
        """The number of last tokens that are decoded; 0 if attention of all tokens is computed."""
        return min(PRESETS[self.preset].new_tokens, self.seq_len // 2)

    def queries(self) -> Tensor:
        """Global positions of the tokens whose attention is computed, int64."""
        return torch.arange(self.seq_len - self.new_tokens if self.new_tokens else 0, self.seq_len)

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
        lo, hi = self.make_mask().intervals(self.queries())
        return self.batch * int((hi.clamp_max(self.seq_len) - lo.clamp_min(0)).clamp_min(0).sum())

    def operations(self, backward: bool) -> float:
        """Floating-point operations over the visible pairs: 2 matrix products in forward, 5 more with ``backward``.

        Linear attention computes whole chunks instead: two products in a chunk, and two with the state.
        """
        d, e, tokens = self.head_dim, self.v_head_dim, self.batch * self.seq_len
        if self.mixer:
            return (3 if backward else 1) * 2.0 * tokens * self.heads * (CHUNK * (d + e) + 2 * d * e)
        return 2.0 * self.visible_pairs() * self.heads * ((4 * d + 3 * e) if backward else (d + e))

    def __str__(self) -> str:
        return f"{self.preset}, {self.seq_len:,} tokens, {self.ranks} rank(s), mask {self.mask}"


Words = list[str] | None  # the type of an option of words that can be repeated


@dataclass(frozen=True)
class BenchConfig:
    """The options of ``seqpar bench``. None leaves the choice to the preset or the device."""

    preset: Annotated[
        Words, Option(help=f"One of {', '.join(PRESETS)}. Can be repeated, like all options down to --peer.")
    ] = None
    strategy: Annotated[
        Words,
        Option(
            help=f"One of {', '.join(strategy_names())}; the last four are values of comm for context_parallel.",
            show_default="ring, ulysses, all_gather, auto; with 4 ranks or more also hybrid",
        ),
    ] = None
    layout: Annotated[
        Words,
        Option(
            help=f"One of {', '.join(LAYOUT_WORDS)}; the last one is made for the mask.",
            show_default="contiguous for Ulysses, else zigzag; for the preset packed also balanced",
        ),
    ] = None
    mask: Annotated[
        Words,
        Option(
            help=f"causal, full, window:N, documents:N (N tokens each), or {', '.join(map('mix:{}'.format, MIXES))}.",
            show_default="the preset's",
        ),
    ] = None
    seq_len: Annotated[
        Words,
        Option(help="Tokens of the full sequence, such as 4096 or 128K.", show_default="depends on the device"),
    ] = None
    ranks: Annotated[
        list[int] | None, Option(help="Number of ranks that compute, of those started.", show_default="all")
    ] = None
    backend: Annotated[Words, Option(help="auto, or a backend that seqpar doctor lists.")] = None
    peer: Annotated[Words, Option(help="Another package, by its file in benchmarks/peers.", show_default="all")] = None
    peers: Annotated[bool, Option(help="Measure other packages as well.")] = True
    nproc: Annotated[int, Option(help="Ranks to start on this machine. Ignored under torchrun.")] = 2
    batch: Annotated[int, Option(help="Sequences in a batch.")] = 1
    heads: Annotated[int | None, Option(help="Query heads.", show_default="depends on the device")] = None
    kv_heads: Annotated[int | None, Option(help="KV heads.", show_default="the preset's")] = None
    head_dim: Annotated[int | None, Option(help="head_dim of v.", show_default="depends on the device")] = None
    dtype: Annotated[
        str | None, Option(help=f"One of {', '.join(DTYPES)}.", show_default="bfloat16 on CUDA, else float32")
    ] = None
    device: Annotated[str, Option(help=f"One of {', '.join(DEVICES)}.")] = "auto"
    rounds: Annotated[int, Option(help="Rounds of each case. In a round, every attention runs once.")] = 7
    budget: Annotated[float, Option(help="Seconds after which rounds are left out. Each case has at least three.")] = (
        150
    )
    charts: Annotated[bool, Option(help="Draw PNG charts.")] = True
    trace: Annotated[bool, Option("--trace", help="Write a Chrome trace for every rank and case.")] = False
    out: Annotated[str, Option(help="Folder for the CSV, the JSON, the charts and the traces.")] = "bench"

    @property
    def presets(self) -> list[str]:
        return self.preset or ["causal"]

    def check(self, world: int) -> None:
        """Raise a TypeError or ValueError for a wrong option, for ``world`` ranks that were started."""
        for option, choices in (
            ("preset", PRESETS),
            ("strategy", strategy_names()),
            ("layout", LAYOUT_WORDS),
            ("backend", ("auto", *BACKENDS)),
            ("device", DEVICES),
            ("dtype", DTYPES),
        ):
            value = getattr(self, option)
            for word in [value] if isinstance(value, str) else value or ():
                check_choice(option, word, choices)
        for option in ("batch", "rounds", "heads", "kv_heads", "head_dim"):
            if (size := getattr(self, option)) is not None:
                check_int(option, size, 1)
        for n in self.ranks or ():
            if not 1 <= n <= world:
                raise ValueError(
                    f"ranks={n}: expected 1 to {world}, the number of ranks that were started; raise --nproc"
                )
        for seq_len in map(read_tokens, self.seq_len or ()):
            check_int("seq_len", seq_len, max(self.ranks or [world]))  # at least one token per rank
        if check_number("budget", self.budget) < 0:
            raise ValueError(f"budget={self.budget}: expected seconds, at least 0")
        for mask in self.mask or ():
            mask_of(mask, 4096)
        heads = self.heads or 8
        if self.kv_heads is not None and heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads}: expected a divisor of heads={heads}")

    def cases(self, world: int, cuda: bool) -> list[BenchCase]:
        """The combinations of preset, ranks, length and mask, short sequences first, for ``world`` started ranks."""
        small = [*map(read_tokens, self.seq_len or ())] or ([] if cuda else [1024, 2048, 4096])
        heads = self.heads or (32 if cuda else 8)
        v_head_dim = self.head_dim or (128 if cuda else 64)
        dtype = self.dtype or ("bfloat16" if cuda else "float32")
        cases = []
        for name, ranks in product(self.presets, self.ranks or [world]):
            preset = PRESETS[name]
            kv_heads = self.kv_heads or max(1, heads // preset.heads_per_kv)
            head_dim = round(v_head_dim * preset.qk_to_v)
            for seq_len, mask in product(sorted(small or preset.seq_lens), self.mask or [preset.mask]):
                cases.append(
                    BenchCase(name, mask, seq_len, ranks, self.batch, heads, kv_heads, head_dim, v_head_dim, dtype)
                )
        return cases
