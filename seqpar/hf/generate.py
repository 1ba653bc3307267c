"""Generation: the prompt is cut over the ranks, and its keys stay where they were made.

``model.generate`` runs on every rank with the same whole prompt. The first forward is sharded as in training; each
later one carries the new token on every rank, whose keys one rank keeps (position modulo ranks), and attends as in
``decode``.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.handshake import Fingerprint, all_gather_header
from ..layout import shard_positions
from ..sharding import unshard
from .batch import BatchShard
from .cache import shard_cache
from .decode import DecodeShard
from .masks import batch_mask, token_ranges

if TYPE_CHECKING:
    from .patch import Patch


@dataclass
class Prefill:
    """A forward that generates. ``sharded``: its output is this rank's tokens'; else it is whole on every rank."""

    sharded: bool
    last: int  # 0: all tokens' logits are asked for; else the last so many
    owner: int  # rank that holds the last token


def prepare(model: nn.Module, patch: Patch, kwargs: dict[str, Any]) -> Prefill:
    """Turn the arguments of a forward on whole tokens, the same on every rank, into this rank's, in place.

    Raises:
        ValueError: labels, or a call that neither trains on a shard nor fills a cache; padding on the right; ranks
            that do not continue the same tokens. RuntimeError: another rank's call was refused.
    """
    cache = kwargs.get("past_key_values")
    if kwargs.get("labels") is not None or (cache is None and not kwargs.get("use_cache")):
        raise ValueError(
            "model: called without 'seqpar', which tells how the sequence is cut; call "
            "model(**seqpar.hf.shard_batch(batch, ...)), or model.generate(...) with the whole prompt and its cache"
        )
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    if cache is None:
        from transformers import DynamicCache

        cache = kwargs["past_key_values"] = DynamicCache(config=config)
    shard_cache(cache, config.num_hidden_layers)
    tokens = kwargs["inputs_embeds"] if kwargs.get("input_ids") is None else kwargs["input_ids"]
    new, past = tokens.shape[1], cache.get_seq_length()
    attention_mask = kwargs.pop("attention_mask", None)
    if isinstance(attention_mask, dict):
        attention_mask = None
    ids = kwargs.get("position_ids")
    if ids is None:
        ids = torch.arange(past, past + new, device=tokens.device)[None]
    total = past + new
    _check(tokens, attention_mask, past, patch)
    if past == 0 and new >= patch.ranks:
        return _prefill(cache, patch, kwargs, ids, attention_mask, total)
    kept = torch.arange(past, total)
    mine = (kept % patch.ranks == patch.rank).nonzero().flatten()
    for layer in cache.layers:
        layer.expect(kept[mine], mine, total)
    kwargs["position_ids"] = ids
    kwargs["seqpar"] = DecodeShard(cache, past, _first(attention_mask))
    return Prefill(sharded=False, last=0, owner=0)


class _StepHeader(NamedTuple):
    """One step of generation: the tokens in the cache, and the new ones."""

    past: int
    tokens: Fingerprint


def _check(tokens: Tensor, attention_mask: Tensor | None, past: int, patch: Patch) -> None:
    """One exchange between the ranks: unlike tokens would end in nonsense, or in ranks that wait for ever."""

    def header() -> _StepHeader:
        # Each later step adds one token, never padding.
        if attention_mask is not None and (past == 0 or tokens.shape[1] > 1):
            kept = attention_mask != 0
            if attention_mask.dim() == 2 and bool((kept[:, :-1] & ~kept[:, 1:]).any()):
                raise ValueError("attention_mask: padding after tokens; put a prompt's padding on the left")
        data = tokens.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _StepHeader(past, Fingerprint(zlib.crc32(data)))

    if len(set(all_gather_header(header, patch.group))) > 1:
        raise ValueError(
            "input_ids: the ranks of the sequence group bring different ones; give all the same prompt, and seed them "
            "alike (torch.manual_seed) before sampling"
        )


def _prefill(
    cache: Any, patch: Patch, kwargs: dict[str, Any], ids: Tensor, attention_mask: Tensor | None, total: int
) -> Prefill:
    positions = shard_positions(total, patch.ranks, patch.rank, patch.layout)
    for name in ("input_ids", "inputs_embeds"):
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name].index_select(1, positions.to(kwargs[name].device))
    kwargs["position_ids"] = ids.index_select(-1, positions.to(ids.device))
    ranges = None if attention_mask is None else token_ranges(attention_mask)
    kwargs["seqpar"] = BatchShard(total, int(ids.max()), patch.ranks, patch.layout, batch_mask(None, ranges))
    for layer in cache.layers:
        layer.expect(positions, None, total)
    last = kwargs.get("logits_to_keep", 0)
    if isinstance(last, Tensor):
        raise ValueError("logits_to_keep: a tensor of indices; while the prompt is sharded, give a number")
    kwargs["logits_to_keep"] = 1 if last == 1 else 0
    if last == 0:
        kwargs.pop("logits_to_keep")
    held = [shard_positions(total, patch.ranks, rank, patch.layout) for rank in range(patch.ranks)]
    owner = next(rank for rank, p in enumerate(held) if int(p[-1]) == total - 1)
    return Prefill(sharded=True, last=last, owner=owner)


def _first(attention_mask: Tensor | None) -> Tensor | None:
    """The first token of each row that is no padding."""
    if attention_mask is None or attention_mask.dim() != 2:
        return None
    return (attention_mask != 0).int().argmax(1)


def finish(output: Any, prefill: Prefill, patch: Patch) -> Any:
    """Make what a sharded prefill gave whole again: the last token's logits from its owner, or all of them."""
    if not prefill.sharded or patch.group is None or patch.ranks == 1:
        return output
    if isinstance(output, tuple):
        raise ValueError("return_dict=False: a sharded prompt's output is put together by name; leave return_dict out")
    for name in ("logits", "last_hidden_state"):
        x = getattr(output, name, None)
        if not isinstance(x, Tensor):
            continue
        if prefill.last == 1 and name == "logits":
            x = x[:, -1:].contiguous()
            dist.broadcast(x, group=patch.group, group_src=prefill.owner)
        else:
            x = unshard(x, 1, group=patch.group, layout=patch.layout)  # type: ignore[arg-type]
            x = x[:, -prefill.last :] if prefill.last else x
        setattr(output, name, x)
        output[name] = x
    return output
