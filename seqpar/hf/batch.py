"""From a whole batch to one rank's part of it: tokens, positions, labels shifted before the cut, and the mask."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from ..checks import check_choice
from ..comm.handshake import Fingerprint, all_gather_header
from ..comm.p2p import exchange
from ..layout import LAYOUTS, shard_positions
from ..mask import Mask
from ..mesh import rank_in, sequence_group, size_of
from .masks import batch_mask, documents_at, documents_in, restarting, token_ranges

IGNORE = -100
# Names under which collators give document boundaries, and what goes with them and is not needed here.
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens", "cu_seqlens", "cu_seq_lens_k")
_BESIDE = ("max_length_q", "max_length_k", "seq_idx")


class BatchShard:
    """What the layers must know of the whole batch. It travels with the rank's part, as ``batch["seqpar"]``.

    Attributes:
        seq_len: length of the whole sequence.
        longest: the largest of its ``position_ids``.
        ranks, layout: how it was cut.
        mask: documents and padding, in global positions. Causality and windows are each layer's own.
        items: labels of the whole batch that count.
        seed: the same on all ranks of the sequence; dropout of attention weights is keyed by it.
        valid: bool ``[batch, seq]``, which of this rank's tokens are no padding; None: all.
        in_place: this rank's labels without the shift, for models that predict each token itself, and how many count
            in the whole batch; None: no labels, or the caller has decided.
    """

    __slots__ = ("in_place", "items", "layout", "longest", "mask", "ranks", "seed", "seq_len", "valid")

    def __init__(
        self,
        seq_len: int,
        longest: int,
        ranks: int,
        layout: str,
        mask: Mask,
        items: int | None = None,
        seed: int = 0,
        valid: Tensor | None = None,
        in_place: tuple[Tensor, int] | None = None,
    ) -> None:
        self.seq_len = seq_len
        self.longest = longest
        self.ranks = ranks
        self.layout = layout
        self.mask = mask
        self.items = items
        self.seed = seed
        self.valid = valid
        self.in_place = in_place

    def unshifted(self) -> BatchShard:
        """The same for a model whose labels are not shifted."""
        assert self.in_place is not None
        shard = copy.copy(self)
        shard.items = self.in_place[1]
        return shard

    def __repr__(self) -> str:
        return f"BatchShard(seq_len={self.seq_len}, ranks={self.ranks}, layout={self.layout!r}, items={self.items})"


def shard_batch(
    batch: Mapping[str, Any] | None,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    layout: str = "zigzag",
    shift_labels: bool | None = None,
    check: bool = True,
) -> dict[str, Any]:
    """This rank's part of ``batch``, ready for ``model(**local)`` of a parallelized model.

    Args:
        batch: the whole batch, the same on every rank of the sequence group; or on its first rank only and None on
            the others, which then receive their part and nothing else. ``input_ids`` (or ``inputs_embeds``)
            ``[batch, seq]``; optional ``labels`` or ``shift_labels``, ``position_ids`` (packed documents where they
            restart), ``attention_mask [batch, seq]`` (padding at the start or the end of a row), ``cu_seq_lens`` (or
            ``cu_seq_lens_q``, as of transformers' ``DataCollatorWithFlattening``). Other tensors ``[batch, seq, ...]``
            are cut likewise; whatever else there is passes.
        mesh, group: the ranks the sequence is sharded over, as given to ``parallelize``.
        layout: as given to ``parallelize``.
        shift_labels: let each token's label be the next token's, before the cut. By default ``labels`` are shifted
            and those in place travel in ``seqpar``, where a masked language model takes them from.
        check: exchange a few integers to see that all ranks bring the same batch. Without it, no communication,
            and every rank must bring the batch.

    Returns:
        ``input_ids``, ``position_ids``, ``labels [batch, seq_local]``, and ``seqpar``, a ``BatchShard`` with the
        mask. No ``attention_mask``: the mask has it.

    Raises:
        TypeError, ValueError: a batch that cannot be cut; ranks that bring different ones. RuntimeError: another
            rank's batch was refused.
    """
    group = sequence_group(mesh, group)
    check_choice("layout", layout, LAYOUTS)
    ranks = size_of(group)
    if not check or group is None or ranks == 1:
        return _Whole(batch, ranks, layout, shift_labels).part(rank_in(group))
    whole: list[_Whole] = []

    def header() -> _BatchHeader:
        if batch is None:
            return _BatchHeader(False, Fingerprint(0), 0)
        whole.append(_Whole(batch, ranks, layout, shift_labels))
        return _BatchHeader(True, Fingerprint(whole[0].digest), int(torch.randint(2**62, ()).item()))

    headers = all_gather_header(header, group)
    have = [rank for rank, header in enumerate(headers) if header.has_batch]
    seed = headers[0].seed
    if have == [0]:
        return _scatter(whole[0] if whole else None, seed, group)
    if len(have) < ranks:
        raise ValueError(
            f"batch: ranks {have} of the sequence group's {ranks} brought one; bring the same batch on every rank, "
            "or on rank 0 alone and None on the others"
        )
    if len({header.batch for header in headers}) > 1:
        raise ValueError(
            "batch: the ranks of the sequence group brought different batches; they share one sequence: seed their "
            "samplers alike (ranks along dp differ, ranks along the sequence do not), or use seqpar.hf.ShardedLoader"
        )
    return whole[0].part(group.rank(), seed)


def cut(
    batch: Mapping[str, Any], ranks: int, rank: int, layout: str, shift_labels: bool | None = None
) -> dict[str, Any]:
    """What ``shard_batch`` gives to ``rank`` of ``ranks``, without a process group."""
    return _Whole(batch, ranks, layout, shift_labels).part(rank)


class _BatchHeader(NamedTuple):
    """Whether a rank brings a batch, which one, and a seed."""

    has_batch: bool
    batch: Fingerprint
    seed: int


class _Whole:
    """A whole batch, understood: what is cut, what passes, what the layers must know."""

    def __init__(self, batch: Mapping[str, Any] | None, ranks: int, layout: str, shift_labels: bool | None) -> None:
        if not isinstance(batch, Mapping):
            raise TypeError(f"batch={type(batch).__name__}: a dict of tensors is needed, with 'input_ids'")
        if "seqpar" in batch:
            raise ValueError("batch: it is cut already; give shard_batch the whole one")
        rest = dict(batch)
        tokens = rest.get("input_ids", rest.get("inputs_embeds"))
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            raise ValueError("batch: 'input_ids' [batch, seq] (or 'inputs_embeds' [batch, seq, hidden]) is needed")
        self.rows, self.seq_len = tokens.shape[:2]
        self.ranks, self.layout = ranks, layout
        if self.seq_len < ranks:
            raise ValueError(
                f"batch: {self.seq_len} tokens in a row cannot be shared by {ranks} ranks; "
                "use longer rows or fewer ranks"
            )
        attention_mask = rest.pop("attention_mask", None)
        ranges = None if attention_mask is None else token_ranges(attention_mask)
        if attention_mask is not None and tuple(attention_mask.shape) != (self.rows, self.seq_len):
            raise ValueError(
                f"attention_mask: shape {tuple(attention_mask.shape)}; {self.rows, self.seq_len} is needed"
            )
        documents = self._positions(rest, tokens.device, ranges)
        self.mask = batch_mask(documents, ranges)
        self.valid = None if ranges is None else attention_mask != 0
        self._labels(rest, shift_labels)
        self.tensors = {name: x for name, x in rest.items() if self._is_cut(x)}
        self.others = {name: x for name, x in rest.items() if name not in self.tensors}

    def _is_cut(self, x: Any) -> bool:
        return isinstance(x, Tensor) and tuple(x.shape[:2]) == (self.rows, self.seq_len)

    def _positions(
        self, rest: dict[str, Any], device: torch.device, ranges: list[tuple[int, int]] | None
    ) -> list[tuple[int, ...]] | None:
        """Leave ``position_ids [batch, seq]`` in ``rest``, and return the documents' boundaries."""
        given = [rest.pop(name) for name in _BOUNDARIES if name in rest]
        for name in _BESIDE:
            rest.pop(name, None)
        documents: list[tuple[int, ...]] | None
        ids = rest.get("position_ids")
        if ids is not None:
            ids = ids[None] if ids.dim() == 1 else ids
            if ids.dim() != 2 or ids.shape[1] != self.seq_len or ids.shape[0] not in (1, self.rows):
                raise ValueError(
                    f"position_ids: shape {tuple(ids.shape)}; {self.rows, self.seq_len} is needed "
                    "(several ids a token, as for images, are not supported)"
                )
            ids = ids.expand(self.rows, -1)
        if given and given[0] is not None:
            documents = documents_at(given[0], self.rows, self.seq_len)
            if ids is None:
                ids = restarting(documents, self.seq_len).to(device)
        else:
            documents = documents_in(ids, ranges) if ids is not None else None
            if ids is None:
                ids = torch.arange(self.seq_len, device=device)[None]
        rest["position_ids"] = ids.expand(self.rows, -1)
        self.longest = int(ids.max())
        return documents

    def _labels(self, rest: dict[str, Any], shift_labels: bool | None) -> None:
        """Leave labels that need no shift any more, and count them."""
        shifted, labels = rest.pop("shift_labels", None), rest.pop("labels", None)
        self.in_place: Tensor | None = None
        if shifted is None and labels is not None:
            shifted = labels if shift_labels is False else F.pad(labels, (0, 1), value=IGNORE)[..., 1:]
            self.in_place = labels if shift_labels is None else None
        self.items: int | None = None
        if shifted is None:
            return
        if tuple(shifted.shape) != (self.rows, self.seq_len):
            raise ValueError(f"labels: shape {tuple(shifted.shape)}; one a token is needed: {self.rows, self.seq_len}")
        rest["labels"] = shifted
        self.items = int((shifted != IGNORE).sum())

    @property
    def digest(self) -> int:
        """The same for the same batch."""
        value = zlib.crc32(f"{self.mask!r} {sorted(self.tensors)} {self.layout}".encode())
        for name in sorted(self.tensors):
            x = self.tensors[name].detach().cpu().contiguous()
            value = zlib.crc32(x.view(-1).view(torch.uint8).numpy(), value)
        return value

    def part(self, rank: int, seed: int | None = None) -> dict[str, Any]:
        """What ``rank`` gets. Without a seed, one that follows from the tokens."""
        take = self._taker(rank)
        local: dict[str, Any] = {name: take(x) for name, x in self.tensors.items()}
        valid = None if self.valid is None else take(self.valid)
        seed = self.digest if seed is None else seed
        in_place = None if self.in_place is None else (take(self.in_place), int((self.in_place != IGNORE).sum()))
        how = self.ranks, self.layout, self.mask, self.items
        shard = BatchShard(self.seq_len, self.longest, *how, seed, valid, in_place)
        return {**local, **self.others, "seqpar": shard}

    def _taker(self, rank: int) -> Callable[[Tensor], Tensor]:
        positions = shard_positions(self.seq_len, self.ranks, rank, self.layout)
        return lambda x: x.index_select(1, positions.to(x.device)).contiguous()


def _scatter(whole: _Whole | None, seed: int, group: ProcessGroup) -> dict[str, Any]:
    """Rank 0 sends each rank its part."""
    parts = [] if whole is None else [whole.part(rank, seed) for rank in range(group.size())]
    plans: list[Any] = [[_without_data(part) for part in parts]]
    dist.broadcast_object_list(plans, group=group, group_src=0)
    plan: dict[str, Any] = plans[0][group.rank()]
    if parts:
        sends = [(peer, x) for peer in range(1, len(parts)) for x in _data(parts[peer])]
        exchange(sends, [], group).wait()
        return parts[0]
    for name, blank in plan.items():
        if isinstance(blank, _Blank):
            plan[name] = blank.make()
    shard = plan["seqpar"]
    if isinstance(shard.valid, _Blank):
        shard.valid = shard.valid.make()
    if shard.in_place is not None:
        shard.in_place = (shard.in_place[0].make(), shard.in_place[1])
    exchange([], [(0, x) for x in _data(plan)], group).wait()
    return plan


class _Blank:
    """A tensor's form without its data."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype, self.device = tuple(x.shape), x.dtype, x.device.type

    def make(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def _without_data(part: dict[str, Any]) -> dict[str, Any]:
    plan = {name: _Blank(x) if isinstance(x, Tensor) and x.dim() else x for name, x in part.items()}
    s: BatchShard = part["seqpar"]
    valid: Any = None if s.valid is None else _Blank(s.valid)
    in_place: Any = None if s.in_place is None else (_Blank(s.in_place[0]), s.in_place[1])
    plan["seqpar"] = blank = copy.copy(s)
    blank.valid, blank.in_place = valid, in_place
    return plan


def _data(part: dict[str, Any]) -> list[Tensor]:
    """The tensors of a part that are sent, as bytes, in an order both ends know."""
    tensors = [x for x in part.values() if isinstance(x, Tensor) and x.dim()]
    shard: BatchShard = part["seqpar"]
    tensors += [shard.valid] if shard.valid is not None else []
    tensors += [shard.in_place[0]] if shard.in_place is not None else []
    return [x.view(-1).view(torch.uint8) for x in tensors]
