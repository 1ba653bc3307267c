"""Encoder-decoder models: the decoder's sequence is sharded, and the encoder's too if its layers allow it.

A cross-attention attends from this rank's tokens to the states of the encoder, which every rank has in full. The
model's own attention function computes it, without a message. In backward, the gradient of the encoder's states comes
from this rank's tokens, and the encoder's backward is linear in it. So the mean of the ranks' gradients of the
encoder's weights is one device's, as it is for all other weights.

A text encoder is parallelized as a model of its own, with the same ranks: it shards the batch that the model calls it
with, and all-gathers its states, once. In backward, one reduce-scatter sums their gradients. Any other encoder, such as
Whisper's with its convolutions, runs on its whole input on every rank. The ranks then draw the same random numbers
until the decoder starts: otherwise dropout would give each of them other states.

In generation a decoder gets every ``ranks``-th state of the encoder, and its cross-attentions cache only their keys.

Shapes: batch, s tokens of this rank, h query heads, n KV heads, d head_dim, e v_head_dim.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ...masks.mask import Mask
from ...masks.rules import Rule
from ...masks.runs import Runs
from ..batch import token_ranges
from ..state import NAME, DecodeShard, Forward, Settings

ATTENDS_ACROSS = "_seqpar_attends_across"  # an attribute of cross-attentions, the attention function that they had
STATES, STATES_MASK = "encoder_hidden_states", "encoder_attention_mask"  # arguments of a decoder


def has_encoder(model: Any) -> bool:
    """Whether ``model`` is an encoder-decoder model, and not its encoder or decoder, whose config may be the same."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return False
    return model.get_decoder() is not model or "decoder_input_ids" in inspect.signature(model.forward).parameters


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The decoder of an encoder-decoder model.

    Raises:
        ValueError: it has none that attends to the states of an encoder.
    """
    decoder: Any = cast(Any, model).get_decoder()
    if isinstance(decoder, PreTrainedModel) and has_encoder(decoder):
        decoder = cast(Any, decoder).get_decoder()  # of an encoder-decoder model beside a tower
    if not isinstance(decoder, PreTrainedModel) or STATES not in inspect.signature(decoder.forward).parameters:
        raise ValueError(
            f"model={type(model).__name__}: its config is of an encoder-decoder model, but it has no decoder that "
            f"takes {STATES}; give the whole encoder-decoder model, or a decoder or an encoder with a config of its own"
        )
    return cast(PreTrainedModel, decoder)


def check_settings(settings: Settings, name: str) -> None:
    """Raise an error if a model with an encoder, called ``name``, cannot have these settings."""
    reasons = {
        "batches": (settings.batches == "per_rank", "the encoder's input may have another length on each rank"),
        "softmax_scale": (settings.softmax_scale is not None, "the encoder and the cross-attentions do not have it"),
        "alibi_slopes": (settings.alibi_slopes is not None, "the encoder and the cross-attentions do not have them"),
        "split_towers": (settings.split_towers, "its encoder is no tower before a text model"),
        "deterministic": (
            settings.deterministic == "invariant",
            "the gradients of its states are summed over the ranks",
        ),
        "memory": (settings.memory is not None, "model.activation_checkpointing_enable() works"),
    }
    for argument, (given, why) in reasons.items():
        if given:
            raise ValueError(
                f"{argument}={getattr(settings, argument)!r}: it is not supported for {name}, which is an "
                f"encoder-decoder model ({why}); leave it out"
            )


def positional_embeddings(decoder: PreTrainedModel) -> list[nn.Module]:
    """The modules of ``decoder`` that embed ``position_ids``, if the decoder itself takes none."""
    if "position_ids" in inspect.signature(decoder.forward).parameters:
        return []
    return [m for m in decoder.modules() if m is not decoder and _embeds_positions(m)]


def _embeds_positions(module: nn.Module) -> bool:
    return not any(module.children()) and "position_ids" in inspect.signature(module.forward).parameters


def with_positions(forward: Callable[..., Any], args: Any, kwargs: dict[str, Any], ids: Tensor) -> dict[str, Any]:
    """The arguments of the ``forward`` of a positional embedding for the positions ``ids``, int64 ``[s]``."""
    given = inspect.signature(forward).bind_partial(*args, **kwargs).arguments
    if isinstance(shape := given.get("position_ids"), Tensor):  # the decoder's own positions, such as [s, 1]
        ids = ids.view(shape.shape) if shape.numel() == len(ids) else ids.expand(shape.shape)
    return {**given, "position_ids": ids}


def attends_across(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of ``module`` passes states for it to attend to, instead of its own tokens."""
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    return any(isinstance(given.get(name), Tensor) for name in (STATES, "key_value_states"))


def start_decoder(decoder: nn.Module, arguments: dict[str, Any], forward: Forward) -> dict[str, Any]:
    """The arguments of ``decoder`` on this rank's tokens."""
    states, positions, shard = arguments.get(STATES), forward.decoder_positions, forward.batch_shard
    if not isinstance(states, Tensor):
        raise ValueError(f"{type(decoder).__name__}: expected {STATES}, got {type(states).__name__}")
    parameters = inspect.signature(decoder.forward).parameters
    if isinstance(forward.shard, DecodeShard):
        return _start_decoding(arguments, states, forward, forward.shard, STATES_MASK in parameters)
    assert positions is not None and shard is not None
    if "position_ids" in parameters:
        arguments["position_ids"] = positions
    if shard.valid is not None:  # the padding is part of the shard's mask; without a mask, some decoders look for more
        arguments["attention_mask"] = torch.ones_like(positions)
    mask = arguments.get(STATES_MASK)
    if STATES_MASK in parameters:
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            raise ValueError(f"{STATES_MASK}: expected ones and zeros [batch, seq] of the encoder's states")
        forward.unmasked_states = mask is None
        ones = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        forward.states_mask = ones if mask is None else mask.to(states.device, torch.bool)
        arguments[STATES_MASK] = forward.states_mask
    return arguments


def _start_decoding(
    arguments: dict[str, Any], states: Tensor, forward: Forward, shard: DecodeShard, takes_mask: bool
) -> dict[str, Any]:
    """The arguments of a decoder on new tokens, with this rank's part of the encoder's ``states`` [b, s, hidden]."""
    rank, ranks = forward.patch.rank, forward.patch.ranks
    padded = None if (mask := arguments.get(STATES_MASK)) is None else token_ranges(mask)
    seen = Mask.full() if padded is None else Mask((_VisibleStates(*zip(*padded, strict=True)),))
    of_rank = torch.arange(rank, states.shape[1], ranks, device="cpu")
    forward.shard = DecodeShard(shard.cache, shard.start, shard.mask, (seen, of_rank))
    arguments[STATES] = states = states[:, rank::ranks]
    if takes_mask:  # ``mask_of_states`` knows it
        forward.states_mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        arguments[STATES_MASK] = forward.states_mask
    return arguments


@dataclass(frozen=True)
class _VisibleStates(Rule):
    """Every query sees the states ``begin <= j < end`` of its batch row."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def batch(self) -> int:
        return len(self.begin)

    @property
    def is_local(self) -> bool:
        return False

    @property
    def constructor(self) -> str:
        return f"visible_states({self.begin}, {self.end})"

    @property
    def shown(self) -> int:
        return max(self.end)

    def runs(self, row: int, seq_len: int) -> Runs:
        return Runs.of([0], self.begin[row], 0, self.end[row], 0)


def mask_of_states(forward: Forward, arguments: dict[str, Any]) -> Any:
    """The mask of a cross-attention, from the function that the model's mask interface had, and its ``arguments``."""
    if isinstance(forward.shard, DecodeShard):
        return None
    name = forward.patch.attention
    if forward.unmasked_states:
        arguments["attention_mask"] = None
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa" if name == NAME else name](**arguments)


def from_labels(model: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    """Functions of ``model`` and of its files that may be the one by which its forward makes decoder_input_ids."""
    if (prepare := getattr(model, "prepare_decoder_input_ids_from_labels", None)) is not None:
        yield lambda labels: prepare(labels=labels)
    modules = dict.fromkeys(cls.__module__ for cls in type(model).__mro__)
    shifts = [getattr(sys.modules.get(module), "shift_tokens_right", None) for module in modules]
    for shift, of_text in product(filter(None, shifts), (False, True)):
        yield partial(_shift, shift, model, of_text)


def _shift(shift: Callable[..., Tensor], model: Any, of_text: bool, labels: Tensor) -> Tensor:
    config = model.config.get_text_config(decoder=True) if of_text else model.config
    return shift(labels, pad_token_id=config.pad_token_id, decoder_start_token_id=config.decoder_start_token_id)
