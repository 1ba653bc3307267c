"""Shards a batch: each rank gets its tokens, their positions and shifted labels, and the mask of the full sequence.

Shapes: batch rows of seq tokens (the full sequence), seq_local of them on this rank.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.utils._pytree import register_pytree_node

from ..base.compile_types import hide_fields
from ..comm.handshake import Fingerprint, all_gather_header
from ..comm.waiting import waiting
from ..masks.mask import LayerMask, Mask, layer_mask, mask_of_rows
from ..masks.rules import document_boundaries
from ..placement.balanced import balanced_layout
from ..placement.layout import LAYOUT_WORDS, Assigned, LayoutWord, TokenLayout, check_layout, shard_length
from ..ranks.mesh import rank_in, sequence_group_of, size_of, ulysses_size
from ..ranks.processes import check_own_process
from ..sharding.arguments import check_sharding
from ..sharding.sharding import Sharding
from ..sharding.worker import WorkerSharding
from .prompts import PROMPTS, SharedPrompts, TokenTree

if TYPE_CHECKING:
    from typing_extensions import Self

IGNORE_INDEX = -100
# The names of document boundaries in the batches of various collate functions.
BOUNDARY_NAMES = ("cu_seq_lens_q", "cu_seq_lens", "cu_seqlens", "cu_seq_lens_k")
# The name of the entry in which ``PlanCollator`` returns the batch's mask together with the plans for it.
PLANNED = "seqpar_mask"
# Entries that collate functions return together with document boundaries, and that are removed from a batch. The
# longest documents' lengths follow from the boundaries; ``seq_idx`` is compared with them.
UNUSED_NAMES = ("max_length_q", "max_length_k", "seq_idx", PLANNED)

# The entries with the tokens of a decoder beside an encoder, and how the names of the decoder's entries begin. The
# labels are the decoder's too, and all other entries are the encoder's.
DECODER_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds")
_DECODER = "decoder_"
_LABELS = ("labels", "shift_labels")

Boundaries = list[tuple[int, ...]]  # for each row, the boundaries of its documents, starting with 0
TokenRanges = list[tuple[int, int]]  # for each row, the first token that is not padding, and one past the last
# A layout for batches: of any sequence, or "balanced", which is made for each batch from its documents.
BatchLayout: TypeAlias = LayoutWord | Assigned


@dataclass(frozen=True)
class BatchCut:
    """How batches are cut into the parts of the ranks. It holds no process groups, and can be pickled.

    Attributes:
        ranks: the number of ranks that a sequence is sharded over.
        layout: which tokens each rank holds.
        ulysses: as ``balanced_layout`` takes it.
        layers: the masks of the model's layers and their numbers; without a model, one causal layer.
        share_prompts: whether rows that begin with the same tokens share these tokens.
    """

    ranks: int
    layout: BatchLayout
    ulysses: int = 1
    layers: tuple[tuple[LayerMask, int], ...] = field(default=(((True, None, None), 1),), compare=False)
    share_prompts: bool = False

    def __post_init__(self) -> None:
        check_layout(self.layout, names=LAYOUT_WORDS)

    @staticmethod
    def over(mesh: DeviceMesh | None, group: ProcessGroup | None, layout: BatchLayout) -> BatchCut:
        """Over the ranks of a mesh or group, as ``parallelize`` takes them."""
        return BatchCut(size_of(sequence_group_of(mesh, group)), layout, ulysses_size(mesh))

    def tokens(self, seq_len: int, mask: Mask) -> TokenLayout:
        """Which tokens of a batch each rank holds. ``mask`` has the documents and the padding.

        Raises:
            ValueError: a rank would hold none.
        """
        layout = self.layout
        if layout == "balanced":
            if (made := mask.plans.get((seq_len, self))) is None:  # a mask that a worker has planned brings its layout
                masks = Counter[Mask]()
                for layer, count in self.layers:
                    masks[layer_mask(mask, *layer)] += count
                made = balanced_layout(masks, seq_len, self.ranks, self.ulysses)
                mask.plans[seq_len, self] = made
            layout = made
        if not all(shard_length(seq_len, self.ranks, rank, layout) for rank in range(self.ranks)):
            raise ValueError(
                f"batch: rows of {seq_len} tokens cannot be sharded over {self.ranks} ranks with layout={layout!r}; "
                f"use rows of at least {self.ranks} tokens, or fewer ranks"
            )
        return TokenLayout(seq_len, layout, ring=self.ranks)


@hide_fields
@dataclass(eq=False)
class BatchShard:
    """What attention layers and the loss need to know about the full batch: the entry ``seqpar`` of a rank's part.

    For ``torch.utils._pytree`` it is a container of ``rows``. So torch's pipeline schedules, which split each tensor of
    their arguments into micro-batches, split it too: each micro-batch gets the mask of its rows.
    """

    tokens: TokenLayout  # which tokens of the full sequence each rank holds
    max_position: int  # the largest of the full batch's ``position_ids``
    mask: Mask  # the documents and the padding, in global positions; each layer adds its causality and window
    num_items: int | None = None  # the number of labels in the full batch that are not ``IGNORE_INDEX``
    seed: int = 0  # of attention dropout, the same on all ranks of the sequence
    # bool [batch, seq_local], False for padding; None without padding. With shared prompts, for how many tokens of the
    # full batch each token stands, int64.
    valid: Tensor | None = None
    weights: Tensor | None = None  # ``valid``, if some token with a label stands for several tokens
    # With shared prompts: which token each token of the full batch is, int64 [batch, seq] on the CPU, -1 for padding.
    places: Tensor | None = None
    # For models that predict each token itself: this rank's unshifted labels [batch, seq_local], and their
    # ``num_items``. None without labels, or if the caller set ``shift_labels``.
    in_place: tuple[Tensor, int] | None = None
    # For models in which some tokens see one another in causal layers, such as the tokens of an image: ``mask`` with
    # causality, these blocks of tokens, and the layers' window. The keys are layer types, or "" for all types.
    block_masks: dict[str, Mask] = field(default_factory=dict)
    jump: str | None = None  # where ``position_ids`` neither go up by 1 nor restart, if there is no ``attention_mask``
    rows: Tensor | None = None  # int64 [batch] on the CPU, the rows of the full batch that this is about

    def __post_init__(self) -> None:
        self.unmasked = self.mask == Mask.full()  # whether the batch has neither padding nor several documents

    def having(self, **changes: Any) -> Self:
        """A copy with other values of some attributes."""
        shard = copy(self)
        vars(shard).update(changes)
        shard.__post_init__()
        return shard

    @property
    def seq_len(self) -> int:
        """The number of tokens of the full sequence."""
        return self.tokens.seq_len

    @property
    def positions(self) -> tuple[Tensor, ...]:
        """For each rank, the global positions of its tokens, int64 ``[seq_local]``. Do not write to them."""
        return tuple(map(self.tokens.rank_positions, range(self.tokens.ranks)))

    def of_rows(self, rows: Tensor) -> Self:
        """The same for some of the full batch's rows, int64 ``[batch]``. The loss still counts all rows' labels."""
        at = rows.tolist()
        return self.having(
            mask=mask_of_rows(self.mask, at),
            block_masks={name: mask_of_rows(mask, at) for name, mask in self.block_masks.items()},
            seed=(self.seed + at[0]) % 2**62 if at else self.seed,
            valid=None if self.valid is None else self.valid[at],
            weights=None if self.weights is None else self.weights[at],
            in_place=None if self.in_place is None else (self.in_place[0][at], self.in_place[1]),
            rows=rows,
        )

    def __repr__(self) -> str:  # without the mask, which may have thousands of boundaries
        return f"BatchShard(tokens={self.tokens}, num_items={self.num_items})"


class PlacedShard(BatchShard):
    """A ``BatchShard`` over the ranks of a parallelized model, for its layers. ``Patch.place`` makes it."""

    def __init__(self, shard: BatchShard, sharding: Sharding) -> None:
        vars(self).update(vars(shard))
        self.sharding = sharding
        self.__post_init__()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seed_on_host = torch.tensor(self.seed, dtype=torch.int64, device="cpu")  # int64 []


def _flatten(shard: BatchShard) -> tuple[list[Any], BatchShard]:
    return [shard.rows], shard


def _unflatten(leaves: Iterable[Any], shard: BatchShard) -> BatchShard:
    (rows,) = leaves
    if rows is shard.rows:
        return shard
    is_tensor = isinstance(rows, Tensor) and rows.device.type == "cpu"  # else a tree of what pytree puts in its place
    return shard.of_rows(rows) if is_tensor else shard.having(rows=rows)


for _shard_type in (BatchShard, PlacedShard):
    register_pytree_node(_shard_type, _flatten, _unflatten)


def shard_batch(
    batch: Mapping[str, Any] | None,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    layout: BatchLayout | None = None,
    sharding: Sharding | WorkerSharding | None = None,
    shift_labels: bool | None = None,
    check: bool = True,
) -> dict[str, Any]:
    """This rank's part of ``batch``, ready for ``model(**local)`` of a parallelized model.

    Args:
        batch: the full batch, the same on every rank of the sequence group. Alternatively, the full batch on the
            group's first rank, and None on the other ranks: the first rank then sends each rank its part. Entries:

            * ``input_ids [batch, seq]`` or ``inputs_embeds [batch, seq, hidden]``.
            * ``labels`` or ``shift_labels``, int64 ``[batch, seq]``, optional.
            * ``position_ids``, int64 ``[batch, seq]``, optional. A document starts wherever they restart: where an id
              is smaller than the one before it, or where the first id of the row is repeated. Jumps start none.
            * ``cu_seq_lens``, or ``cu_seq_lens_q`` as in transformers' ``DataCollatorWithFlattening``: the boundaries
              of the documents, optional.
            * ``attention_mask [batch, seq]``, optional: 0 for padding, at the start or the end of a row.
            * Other tensors ``[batch, seq, ...]`` are sharded too. All other entries are returned unchanged.
            * With ``decoder_input_ids`` or ``decoder_inputs_embeds``, for an encoder-decoder model, the labels and the
              entries whose names begin with ``decoder_`` are sharded, as above. All other entries are the encoder's,
              and are returned unchanged.
        mesh: the mesh that was given to ``parallelize``.
        group: the process group that was given to ``parallelize``.
        layout: the layout that was given to ``parallelize``; "zigzag" by default, "balanced" for packed documents.
        sharding: a ``Sharding`` of the batch's length, instead of mesh, group and layout.
        shift_labels: True: replace each token's label by the label of the next token. False: leave the labels as they
            are. None: shift them, and also keep the unshifted labels in ``seqpar``, for masked language models.
        check: whether the ranks exchange a few integers to check that their batches are the same. With False they
            communicate nothing, and every rank must have the batch.

    Returns:
        ``input_ids``, ``position_ids`` and ``labels``, each ``[batch, seq_local]``, and ``seqpar``, a ``BatchShard``
        with the mask. There is no ``attention_mask``, because the mask contains the padding. For an encoder-decoder
        model the same with ``decoder_`` in front, beside the encoder's entries.

    Raises:
        TypeError: the batch is not a mapping.
        ValueError: the batch cannot be sharded, or the ranks have different batches.
        RuntimeError: another rank raised on its batch.
    """
    if sharding is not None:
        given = None if layout == "balanced" else layout
        check_sharding(sharding, mesh=mesh, group=group, layout=given, or_worker=True)
        cut, length = BatchCut(sharding.ranks, sharding.layout), sharding.seq_len
        if isinstance(sharding, Sharding):
            return shard_over(sharding.sequence_group, cut, batch, shift_labels, check, length)
        sharding.check_process(check)
        return _parse(batch, cut, shift_labels, length).shard(sharding.rank)
    cut = BatchCut.over(mesh, group, "zigzag" if layout is None else layout)
    return shard_over(sequence_group_of(mesh, group), cut, batch, shift_labels, check)


def shard_over(
    group: ProcessGroup | None,
    cut: BatchCut,
    batch: Mapping[str, Any] | None,
    shift_labels: bool | None = None,
    check: bool = True,
    seq_len: int | None = None,
) -> dict[str, Any]:
    """``shard_batch`` over the ranks of ``group``, and as ``cut`` says; of rows of ``seq_len`` tokens, if given."""
    ranks = cut.ranks
    if not check:
        return _parse(batch, cut, shift_labels, seq_len).shard(rank_in(group))
    if ranks > 1:
        check_own_process("shard_batch compares the ranks' batches, unless check=False is passed")
    specs: list[BatchSpec] = []

    def header() -> _BatchHeader:
        if batch is None and ranks > 1:
            return _BatchHeader(False, Fingerprint(0), 0)
        specs.append(_parse(batch, cut, shift_labels, seq_len))
        # The seed is not drawn, because drawing one would change the random numbers that the training loop draws next.
        return _BatchHeader(True, Fingerprint(specs[0].checksum), torch.initial_seed() % 2**62)

    headers = all_gather_header(header, group)
    with_batch = [rank for rank, header in enumerate(headers) if header.has_batch]
    seed = (headers[0].seed + int(headers[0].batch)) % 2**62
    if with_batch == [0] and group is not None:
        return _scatter(specs[0] if specs else None, seed, group)
    if len(with_batch) < ranks:
        raise ValueError(
            f"batch: only ranks {with_batch} of the sequence group's {ranks} passed a batch; pass the same batch on "
            "every rank, or the batch on rank 0 and None on the others"
        )
    if len({header.batch for header in headers}) > 1:
        raise ValueError(
            "batch: the ranks of the sequence group passed different batches, but they share one sequence; give their "
            "samplers the same seed (only ranks along dp may have different ones), or use seqpar.hf.ShardedLoader; if "
            "each rank has samples of its own, call parallelize with batches='per_rank'"
        )
    return specs[0].shard(rank_in(group), seed)


def _parse(
    batch: Mapping[str, Any] | None, cut: BatchCut, shift_labels: bool | None, seq_len: int | None = None
) -> BatchSpec:
    spec = BatchSpec(batch, cut, shift_labels)
    if seq_len not in (None, spec.seq_len):
        raise ValueError(
            f"batch: its rows have {spec.seq_len} tokens, but the sharding is of seq_len={seq_len}; make "
            "a Sharding of the batch's length, or give mesh and layout"
        )
    return spec


def shard_for_rank(
    batch: Mapping[str, Any], cut: BatchCut, rank: int, shift_labels: bool | None = None, seed: int | None = None
) -> dict[str, Any]:
    """What ``shard_batch`` returns on rank ``rank``. ``seed`` defaults to a checksum."""
    return BatchSpec(batch, cut, shift_labels).shard(rank, seed)


def tokens_of(batch: Any, if_sharded: str) -> Tensor:
    """The tokens of a full batch, ``[batch, seq]`` or ``[batch, seq, hidden]``."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch={type(batch).__name__}: expected a dict of tensors, with 'input_ids'")
    if batch.get("seqpar") is not None:
        raise ValueError(f"batch: it is sharded already; {if_sharded}")
    tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch.get("inputs_embeds")
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        raise ValueError("batch: expected 'input_ids' [batch, seq] or 'inputs_embeds' [batch, seq, hidden]")
    if not tokens.shape[1]:
        raise ValueError(f"batch: shape {tuple(tokens.shape)}; expected rows of at least one token")
    return tokens


def batch_checksum(batch: Mapping[str, Any], value: int = 0) -> int:
    """A CRC-32 of the names, shapes and values of the tensors in ``batch``, which continues from ``value``."""
    for name in sorted(name for name, x in batch.items() if isinstance(x, Tensor)):
        data: Any = batch[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        value = zlib.crc32(data, zlib.crc32(f"{name} {tuple(batch[name].shape)}".encode(), value))
    return value


class _BatchHeader(NamedTuple):
    has_batch: bool
    batch: Fingerprint
    seed: int  # of the rank's random number generator


class BatchSpec:
    """A full batch, parsed: its documents and padding as a ``mask``, its labels shifted and counted.

    ``tensors`` are the entries ``[batch, seq, ...]``, which are sharded, and ``others`` all other entries. ``valid`` is
    bool ``[batch, seq]``, False for padding, or None.
    """

    def __init__(self, batch: Mapping[str, Any] | None, cut: BatchCut, shift_labels: bool | None = None) -> None:
        entries, encoder = _split_encoder(batch)
        tokens = tokens_of(entries, "give shard_batch the full batch")
        self.rows, self.seq_len = tokens.shape[:2]
        planned = entries.pop(PLANNED, None)
        attention_mask = entries.pop("attention_mask", None)
        ranges = None if attention_mask is None else token_ranges(attention_mask)
        if attention_mask is not None and tuple(attention_mask.shape) != (self.rows, self.seq_len):
            raise ValueError(f"attention_mask: shape {tuple(attention_mask.shape)}; expected {self.rows, self.seq_len}")
        self.jump: str | None = None
        self.copied = False  # whether some token with a label stands for several tokens
        prompts = entries.pop(PROMPTS, None)
        documents = self._parse_positions(entries, tokens.device, ranges, attention_mask is not None)
        if documents is not None and encoder is not None:
            raise ValueError(
                "decoder_position_ids, cu_seq_lens: a row has several documents, but its cross-attentions would see "
                "the whole input of the encoder; pack no documents, give them rows of their own"
            )
        self.mask = batch_mask(documents, ranges, self.seq_len)
        self.valid = None if ranges is None else attention_mask != 0
        self._parse_labels(entries, shift_labels)
        shape = self.rows, self.seq_len
        self.tensors = {n: x for n, x in entries.items() if isinstance(x, Tensor) and tuple(x.shape[:2]) == shape}
        self.others = {name: x for name, x in entries.items() if name not in self.tensors}
        self.places: Tensor | None = None
        window = min((layer[1] for layer, _ in cut.layers if layer[1] is not None), default=None)
        if prompts is not None:
            self._share(_tree_of(prompts, shape, window))
        elif cut.share_prompts:
            tree = self._tree(documents, ranges, window)
            _check_predicted(self.tensors.get("labels"), tree.places)
            self.tensors = {name: tree.store(x) for name, x in self.tensors.items()}
            self.rows, self.seq_len, self.places = 1, len(tree.stored), tree.places
            self._share(tree)
        if planned == self.mask:  # otherwise the batch was changed after it was planned
            self.mask = planned
        self.tokens = cut.tokens(self.seq_len, self.mask)
        if encoder is not None:
            self.tensors, self.others = map(_of_decoder, (self.tensors, self.others))
            self.others.update(encoder)

    def _parse_positions(
        self, entries: dict[str, Any], device: torch.device, ranges: TokenRanges | None, masked: bool
    ) -> Boundaries | None:
        """Return the documents' boundaries, and write ``position_ids [batch, seq]`` to ``entries``."""
        given = {name: entries.pop(name) for name in BOUNDARY_NAMES if name in entries}
        boundaries = {name: document_boundaries(x) for name, x in given.items() if x is not None}
        seq_idx = entries.get("seq_idx")
        for name in UNUSED_NAMES:
            entries.pop(name, None)
        documents: Boundaries | None = None
        ids = entries.get("position_ids")
        if ids is not None:
            ids = ids[None] if ids.dim() == 1 else ids
            if ids.dim() != 2 or ids.shape[1] != self.seq_len or ids.shape[0] not in (1, self.rows):
                raise ValueError(
                    f"position_ids: shape {tuple(ids.shape)}; expected {self.rows, self.seq_len} "
                    "(several ids per token, which image models have, are not supported)"
                )
            ids = ids.expand(self.rows, -1)
        if boundaries:
            first, *others = boundaries
            for other in others:
                if boundaries[other] != boundaries[first]:
                    raise ValueError(
                        f"{other}: its documents are not {first}'s; attention over one sequence has the same documents "
                        "of queries and of keys"
                    )
            documents = documents_from_boundaries(boundaries[first], self.rows, self.seq_len)
            if ids is None:
                ids = restarting_positions(documents, self.seq_len).to(device)
        elif ids is not None:
            documents = documents_from_positions(ids, ranges)
            self.jump = None if masked else _jump(ids)
        else:
            ids = torch.arange(self.seq_len, device=device)[None]
        if seq_idx is not None:
            _check_seq_idx(seq_idx, documents, ranges, self.rows, self.seq_len)
        entries["position_ids"] = ids.expand(self.rows, -1)
        self.max_position = int(ids.max())
        return documents

    def _parse_labels(self, entries: dict[str, Any], shift_labels: bool | None) -> None:
        """Count the labels, and write the shifted ``labels [batch, seq]`` to ``entries``."""
        targets, labels = entries.pop("shift_labels", None), entries.pop("labels", None)
        self.in_place: Tensor | None = None
        if targets is None and labels is not None:
            targets = labels if shift_labels is False else F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
            self.in_place = labels if shift_labels is None else None
        self.num_items: int | None = None
        if targets is None:
            return
        if tuple(targets.shape) != (self.rows, self.seq_len):
            raise ValueError(
                f"labels: shape {tuple(targets.shape)}; expected one label per token: {self.rows, self.seq_len}"
            )
        entries["labels"] = targets
        self.num_items = int((targets != IGNORE_INDEX).sum())

    def _share(self, tree: TokenTree) -> None:
        """Make this the batch of the tokens of ``tree``."""
        self.mask, self.jump, self.in_place = tree.mask, None, None
        self.valid = tree.copies.to(self.tensors["position_ids"].device)
        if (labels := self.tensors.get("labels")) is not None:
            counted = tree.copies[labels.cpu() != IGNORE_INDEX]
            self.num_items, self.copied = int(counted.sum()), bool((counted > 1).any())

    def _tree(self, documents: Boundaries | None, ranges: TokenRanges | None, window: int | None) -> TokenTree:
        """The tree of the documents in all rows. ``window`` is the smallest one of the model's layers."""
        for name, x in self.tensors.items():
            if x.dim() > 2 or x.is_floating_point():
                raise ValueError(
                    f"{name}: {x.dtype} of shape {tuple(x.shape)}; with share_prompts=True rows share the tokens that "
                    "have equal integers in all entries [batch, seq]; give input_ids, and leave this entry out"
                )
        spans, length = [], self.seq_len
        for row in range(self.rows):
            edges = (0, length) if documents is None else documents[row % len(documents)]
            if edges[-1] < length:
                raise ValueError(
                    f"cu_seq_lens: the last boundary is {edges[-1]}, but the rows have {length} tokens; with "
                    "share_prompts=True mark padding in the attention_mask"
                )
            start, stop = (0, length) if ranges is None else ranges[row]
            spans += [(row * length + max(a, start), row * length + min(b, stop)) for a, b in pairwise(edges)]
        windows = window is not None and any(stop - start > window for start, stop in spans)
        return TokenTree.of(torch.stack([x.cpu().long() for x in self.tensors.values()], -1), spans, windows)

    @property
    def checksum(self) -> int:
        arrays = {name: x for name, x in self.others.items() if isinstance(x, Tensor) and x.dim()}  # images
        if self.places is not None:
            arrays["places"] = self.places
        return batch_checksum({**self.tensors, **arrays}, zlib.crc32(f"{self.mask!r} {self.tokens.layout}".encode()))

    def shard(self, rank: int, seed: int | None = None) -> dict[str, Any]:
        positions = self.tokens.rank_positions(rank)  # [seq_local]

        def select_tokens(x: Tensor) -> Tensor:
            return x.index_select(1, positions.to(x.device)).contiguous()

        local: dict[str, Any] = {name: select_tokens(x) for name, x in self.tensors.items()}
        in_place, valid = None, None if self.valid is None else select_tokens(self.valid)
        if self.in_place is not None:
            in_place = select_tokens(self.in_place), int((self.in_place != IGNORE_INDEX).sum())
        local["seqpar"] = BatchShard(
            self.tokens,
            self.max_position,
            self.mask,
            self.num_items,
            seed=self.checksum if seed is None else seed,
            valid=valid,
            weights=valid if self.copied else None,
            places=self.places,
            in_place=in_place,
            jump=self.jump,
            rows=torch.arange(self.rows, device="cpu"),
        )
        return {**self.others, **local}


def _check_predicted(labels: Tensor | None, places: Tensor) -> None:
    """Raise an error if padding, which is not in the tree, would predict some of the shifted ``labels [rows, seq]``."""
    lost = [] if labels is None else ((labels.cpu() != IGNORE_INDEX) & (places < 0)).nonzero().tolist()
    if lost:
        raise ValueError(
            f"labels: in row {lost[0][0]}, padding predicts the label of token {lost[0][1] + 1}; share_prompts=True "
            "stores no padding, so set the labels of padding and of the first token behind it to -100"
        )


def _tree_of(prompts: Any, shape: tuple[int, int], window: int | None) -> TokenTree:
    """The tree of the entry ``PROMPTS`` of a batch of the ``shape``."""
    if not isinstance(prompts, SharedPrompts) or shape != tuple(prompts.labels.shape):
        got = tuple(prompts.labels.shape) if isinstance(prompts, SharedPrompts) else type(prompts).__name__
        raise ValueError(
            f"{PROMPTS}: {got}, but the tokens have the shape {shape}; pass the unchanged batch of share_prompts(...)"
        )
    if window is not None and not prompts.tree.windows and window <= (longest := int(prompts.position_ids.max())):
        raise ValueError(
            f"{PROMPTS}: the model has layers with a window of {window} tokens, and a sequence has {longest + 1}; pass "
            "windows=True to share_prompts"
        )
    return prompts.tree


def _split_encoder(batch: Any) -> tuple[Any, dict[str, Any] | None]:
    """The entries of a batch that are sharded, or may be, as of a model with one sequence; and an encoder's entries."""
    if not isinstance(batch, Mapping) or all(batch.get(name) is None for name in DECODER_TOKENS):
        return (dict(batch) if isinstance(batch, Mapping) else batch), None
    names = [name for name in batch if name.startswith(_DECODER) or name in (*_LABELS, PLANNED, "seqpar")]
    encoder = {name: x for name, x in batch.items() if name not in names}
    for name in (*BOUNDARY_NAMES, PROMPTS):
        if encoder.get(name) is not None:
            raise ValueError(f"{name}: rows of an encoder-decoder model cannot hold several documents; leave it out")
    return {name.removeprefix(_DECODER): batch[name] for name in names}, encoder


def _of_decoder(entries: dict[str, Any]) -> dict[str, Any]:
    return {name if name in _LABELS else _DECODER + name: x for name, x in entries.items()}


def _scatter(spec: BatchSpec | None, seed: int, group: ProcessGroup) -> dict[str, Any]:
    """Send each rank its part of the batch, which only rank 0 has."""

    def moved(part: dict[str, Any], device: str) -> dict[str, Any]:
        shard: BatchShard = part["seqpar"]
        valid, weights = (None if x is None else x.to(device) for x in (shard.valid, shard.weights))
        in_place = None if shard.in_place is None else (shard.in_place[0].to(device), shard.in_place[1])
        tensors = {name: x.to(device) for name, x in part.items() if isinstance(x, Tensor)}
        return {**part, **tensors, "seqpar": shard.having(valid=valid, weights=weights, in_place=in_place)}

    parts: list[Any] = [None] * group.size()
    if spec is not None:  # a pickled tensor of cuda:0 would arrive on cuda:0 of every host
        device = next(x for name, x in spec.tensors.items() if name.endswith("position_ids")).device.type
        parts = [(device, moved(spec.shard(rank, seed), "cpu")) for rank in range(group.size())]
    received: list[Any] = [None]
    with waiting("shard_batch", group):
        dist.scatter_object_list(received, parts, group=group, group_src=0)
    device, part = received[0]
    return moved(part, device)


def token_ranges(attention_mask: Tensor) -> TokenRanges | None:
    """For each row of ``attention_mask [batch, seq]``, the first token that is not padding, and one past the last.

    None if there is no padding.
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        is_tensor = isinstance(attention_mask, Tensor)
        got = f"shape {tuple(attention_mask.shape)}" if is_tensor else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask: {got}; expected ones and zeros [batch, seq] "
            "(causality, windows and documents need no dense mask here)"
        )
    mask = attention_mask.detach().cpu()
    if mask.dtype != torch.bool:
        if bool(((mask != 0) & (mask != 1)).any()):
            raise ValueError(
                f"attention_mask: values up to {mask.max().item()}; expected ones and zeros (for packed documents give "
                "position_ids that restart, or cu_seq_lens)"
            )
        mask = mask != 0
    if bool(mask.all()):
        return None
    count = mask.sum(1)  # [batch]
    start = mask.int().argmax(1)
    stop = torch.where(count > 0, mask.shape[1] - mask.flip(1).int().argmax(1), start)
    if bool((stop - start != count).any()):
        row = int((stop - start != count).nonzero()[0])
        raise ValueError(
            f"attention_mask: row {row} has zeros between ones; padding is allowed at the start and at the end of a row"
        )
    return list(zip(start.tolist(), stop.tolist(), strict=True))


def documents_from_positions(position_ids: Tensor, ranges: TokenRanges | None) -> Boundaries | None:
    """The documents in ``position_ids [batch, seq]``. One starts wherever the ids restart (see ``restarts``).

    The ids of padding, outside of ``ranges``, are ignored. None if every row is one document.
    """
    ids = position_ids.detach().cpu()
    length = ids.shape[1]
    rows = []
    for row, (start, stop) in zip(ids, ranges or [(0, length)] * len(ids), strict=True):
        inner = restarts(row[start:stop]).nonzero().flatten() + start
        rows.append((0, *inner.tolist(), length))
    return rows if any(len(row) > 2 for row in rows) else None


def restarts(ids: Tensor) -> Tensor:
    """Where the position ids of a row restart, bool ``[seq]``: wherever an id is smaller than the id before it.

    A repeated smallest id restarts too, because a document may have one token, unless the row also repeats other ids.
    """
    step = F.pad(ids.diff(), (1, 0), value=1)[: len(ids)]
    falls, repeats = step < 0, step == 0
    one_token = bool(repeats.any()) and bool((ids[repeats] == ids.min()).all())
    return falls | repeats if one_token else falls


def _jump(position_ids: Tensor) -> str | None:
    for r, row in enumerate(position_ids.detach().cpu()):
        step = F.pad(row.diff(), (1, 0), value=1)
        jumps = ((step != 1) & ~restarts(row)).nonzero().flatten().tolist()
        if jumps:
            return f"in row {r} token {jumps[0]} has id {int(row[jumps[0]])} after id {int(row[jumps[0] - 1])}"
    return None


def _check_seq_idx(
    seq_idx: Tensor, documents: Boundaries | None, ranges: TokenRanges | None, rows: int, length: int
) -> None:
    """Raise an error if ``seq_idx [rows, length]``, the index of each token's document, has other ``documents``.

    Padding, outside of ``ranges`` and after the last document, has any index.
    """
    seq_idx = torch.as_tensor(seq_idx)
    if seq_idx.dim() != 2 or seq_idx.shape[1] != length or len(seq_idx) not in (1, rows):
        raise ValueError(f"seq_idx: shape {tuple(seq_idx.shape)}; expected {rows, length}")
    changes = F.pad(seq_idx.detach().cpu().diff() != 0, (1, 0)).expand(rows, -1)  # bool [rows, length]
    documents = documents or [(0, length)]
    for r, row in enumerate(changes):
        edges = documents[r % len(documents)]
        start, stop = (0, length) if ranges is None else ranges[r]
        stop = min(stop, edges[-1])
        theirs = set((row[start + 1 : stop].nonzero().flatten() + start + 1).tolist())
        if different := theirs ^ {edge for edge in edges if start < edge < stop}:
            raise ValueError(
                f"seq_idx: in row {r} it {'starts' if min(different) in theirs else 'continues'} a document at token "
                f"{min(different)}, but position_ids and cu_seq_lens do not; layers with recurrent states would keep "
                "other documents apart than attention. Give position_ids that restart at each document, or cu_seq_lens "
                "(DataCollatorWithFlattening returns position_ids)"
            )


def documents_from_boundaries(rows: Sequence[tuple[int, ...]], batch: int, length: int) -> Boundaries:
    """The documents with the boundaries ``rows``, for one row or for each row of the batch."""
    if len(rows) not in (1, batch):
        raise ValueError(f"cu_seq_lens: boundaries for {len(rows)} rows, but the batch has {batch}")
    for row in rows:
        if row[-1] > length:
            raise ValueError(f"cu_seq_lens: the last boundary is {row[-1]}, but the rows have {length} tokens")
    return list(rows)


def restarting_positions(documents: Boundaries, length: int) -> Tensor:
    """Position ids ``[len(documents), length]`` that restart at 0 at each boundary."""
    index = torch.arange(length, device="cpu")
    ids = index.repeat(len(documents), 1)
    for row, edges in zip(ids, documents, strict=True):
        starts = torch.tensor([edge for edge in edges if edge < length], device="cpu")
        row -= starts[torch.searchsorted(starts, index, right=True) - 1]
    return ids


def batch_mask(documents: Boundaries | None, ranges: TokenRanges | None, length: int) -> Mask:
    """The mask of documents and padding. It has one batch row if all rows have the same documents and padding."""
    mask = Mask.full()
    if documents is not None:
        rows = documents[:1] if len(set(documents)) == 1 else documents
        padding = any(boundaries[-1] < length for boundaries in rows)
        mask = mask & Mask.documents(rows, causal=False, padding=padding)
    if ranges is not None:
        starts, stops = zip(*(ranges[:1] if len(set(ranges)) == 1 else ranges), strict=True)
        mask = mask & Mask.padding(starts, stops)
    return mask
