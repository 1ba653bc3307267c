"""The attention function and the mask function that transformers' ``AttentionInterface`` and mask interface call.

Shapes follow transformers: query ``[batch, heads, seq, head_dim]``, key ``[batch, kv_heads, seq, head_dim]``,
value ``[batch, kv_heads, seq, v_head_dim]``; the result is ``[batch, seq, heads, v_head_dim]``. In latent attention,
key and value are latents and rotated keys (see ``latent.py``).

A transformers model describes each of its masks by a function ``(row, head, query, key) -> bool``, on tensors of
indices. This function decides what a token sees. A layer's ``is_causal`` decides it only where transformers makes no
mask: in SDPA, if no token is padding and no window ends inside the row, and in FlashAttention.

``parallelize`` compares the functions that the model asks for in the trial run with what the layers claim
(``compare_masks``). In a call with images, the function is evaluated for the tokens of the batch
(``mask_of_function``). A function that was not seen in the trial run and that cannot be evaluated raises an error
(``no_mask``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    or_masks,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
)

from ...base.checks import check_inputs, no_compile
from ...masks.mask import LayerMask, Mask, layer_mask
from ...sharding.spec import REPLICATED, AttentionSpec, constant_float, constants
from ...strategies.attend import attend
from ..batch import BatchShard, PlacedShard
from ..inspection.support import text_model
from ..mechanisms.compressors import Compressed, merge_compressed
from ..mechanisms.encoders import ATTENDS_ACROSS, has_encoder, mask_of_states
from ..mechanisms.indexers import IndexedMask, attend_to_chosen, check_unset
from ..mechanisms.key_values import attend_to_shared_keys, expand, gathers_shared_keys, has_latent_kv, latent_weight
from ..state import DecodeShard, Forward, Patch, Settings, forwards, shards_text_model
from .generate import decode

MaskFunction = Callable[..., Any]
WITHOUT_HOOKS = (
    "the forward ran without the hooks of parallelize; call the model that was given to parallelize, as model(...), "
    "not its decoder or another part of it"
)
# The code of the functions that transformers combines into a mask.
_AND, _OR = and_masks().__code__, or_masks().__code__
_PACKED = packed_sequence_mask_function(torch.empty(0, device="cpu")).__code__
_REMAP = remap_positions_for_packed_sequence(None, None).__code__
_COMPLETE: LayerMask = (False, None, None)  # of a mask to which the layer adds nothing
_RANDOM_KEYS = 4  # for each query, how many keys are compared besides the ends of its interval


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    seqpar: BatchShard | DecodeShard | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: attention of one layer over the sharded sequence.

    ``query``, ``key`` and ``value`` hold this rank's tokens. In a compiled layer this is one operator, or a graph break
    during generation. The second result, the attention weights, is always None.

    Raises:
        ValueError: the layer's model is not parallelized, no shard came with the batch, or the layer asks for
            something that this attention does not support.
    """
    patch = getattr(module, "_seqpar", None)
    name = f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
    if not isinstance(patch, Patch):
        raise ValueError(f"{name}: attn_implementation 'seqpar' is set by seqpar.hf.parallelize(model); call that")
    if seqpar is None and (forward := forwards.now) is not None:  # the layer does not pass its **kwargs on
        seqpar = forward.shard
    across = getattr(module, ATTENDS_ACROSS, None)
    if across is not None and not isinstance(seqpar, DecodeShard):
        given: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
        given |= {"s_aux": s_aux, "is_causal": is_causal, "position_bias": position_bias, **kwargs}
        given["position_ids"] = None  # transformers would look for packed documents in this rank's positions
        given = {option: x for option, x in given.items() if x is not None}
        return across(module, query, key, value, attention_mask, dropout=dropout, **given)[0], None
    for argument, x in (("attention_mask", attention_mask), ("position_bias", position_bias)):
        if x is not None and not isinstance(x, IndexedMask | Compressed):
            raise ValueError(
                f"{name}: {argument} of shape {tuple(x.shape)} is given; dense score terms are not supported"
            )
    if seqpar is None:
        raise ValueError(
            f"{name}: no 'seqpar' came with the batch: {WITHOUT_HOOKS}, or call the part with what "
            "seqpar.hf.shard_batch returns. A model whose layers do not pass **kwargs on cannot recompute them "
            "(activation checkpointing)"
        )
    if isinstance(seqpar, BatchShard) and not isinstance(seqpar, PlacedShard):
        seqpar = patch.place(seqpar)  # the forward runs without the hooks, as in a pipeline stage
    mask, in_layer = (
        (Mask.full(), _COMPLETE) if across else mask_in_layer(module, seqpar, patch, is_causal, sliding_window)
    )
    scaling = scale_of(patch.settings, scaling, name)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    weight, shared_key = None, key
    if indices is not None:
        options = {"dropout": dropout, "softcap": softcap, "sliding_window": sliding_window}
        check_unset(module, options, patch.settings)
        q, latents, rotated = _same_dtype(query, key, value)
        of_layer = mask, in_layer
        return attend_to_chosen(module, q, latents, rotated, indices, s_aux, of_layer, seqpar, scale), None
    if has_latent_kv(module):
        if isinstance(seqpar, BatchShard) and patch.ranks > 1 and patch.settings.deterministic != "invariant":
            weight = latent_weight(module, query.shape[1], key, patch.ulysses)
        if weight is None:
            key, value = expand(module, key, value)
    query, key, value = _same_dtype(query, key, value)
    weight = None if weight is None else weight.to(query.dtype)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # [b, s, h, d], [b, s, n, d] and [b, s, n, e]
    settings, compiling = patch.settings, torch.compiler.is_compiling()
    number = constant_float if compiling else float
    spec = (AttentionSpec if compiling else _spec)(
        strategy=settings.strategy,
        strategy_options=constants(settings.options),
        softmax_scale=number(scale),
        softcap=number(softcap or 0.0),
        dropout_p=number(dropout),
        deterministic=settings.deterministic,
        backend=settings.backend,
        alibi_slopes=settings.alibi_slopes,
        layer_mask=in_layer,
    )
    if isinstance(seqpar, DecodeShard):
        return decode(module, q, k, v, s_aux, seqpar, patch, spec, name, across is not None), None
    sharding, seed = seqpar.sharding, None
    if dropout:
        # The odd multiplier spreads the layers' indices over 32 bits.
        seed = (seqpar.seed_on_host + (getattr(module, "layer_idx", None) or 0) * 0x9E3779B1) % 2**62
    if not torch.compiler.is_compiling() and gathers_shared_keys(module, patch, layer_mask(mask, *in_layer)):
        spec = spec.having(strategy=REPLICATED)
        return attend_to_shared_keys(q, k, v, shared_key, s_aux, mask, sharding, spec, seed), None
    check_inputs(q, k, v, weight)
    if isinstance(attention_mask, Compressed):
        check_unset(module, {"dropout": dropout, "softcap": softcap}, settings)
        out, lse = attend(q, k, v, spec.having(return_lse=True), mask, sharding, sinks=s_aux)
        return merge_compressed(q, out, lse, attention_mask, scale), None
    return attend(q, k, v, spec, mask, sharding, sinks=s_aux, seed=seed, latent_weight=weight)[0], None


_spec = lru_cache(maxsize=256, typed=True)(AttentionSpec)


def scale_of(settings: Settings, scaling: float | None, layer: str) -> float | None:
    """The factor on the scores of a layer that passes ``scaling`` to its attention; None is the default."""
    scale = settings.softmax_scale
    if scale is not None and scaling not in (None, scale):
        raise ValueError(
            f"softmax_scale={scale}: {layer} itself passes scaling={scaling} to its attention, which one device uses; "
            "leave softmax_scale out, or change the scaling of the model's layers"
        )
    return scaling if scale is None else scale


def _same_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast all tensors to autocast's dtype, or to the dtype of the values: rotations and norms may return float32."""
    device_type = tensors[0].device.type
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocast else tensors[-1].dtype
    return tuple(x if x.dtype == dtype else x.to(dtype) for x in tensors)


class ModelMask(NamedTuple):
    function: MaskFunction
    optional: bool  # whether SDPA may leave the mask out and read ``is_causal``


def model_mask(mask_function: MaskFunction | None = None, **kwargs: Any) -> ModelMask:
    optional = kwargs.get("allow_is_causal_skip", True) or kwargs.get("allow_is_bidirectional_skip", False)
    return ModelMask(mask_function or masking_utils.causal_mask_function, bool(optional))


def _parts(function: MaskFunction) -> list[MaskFunction]:
    values = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return [x for value in values for x in (value if isinstance(value, tuple | list) else (value,)) if callable(x)]


def _code(function: MaskFunction) -> Any:
    return getattr(function, "__code__", type(function))


def structure(function: MaskFunction) -> Any:
    """The code of a mask function and of the functions that it combines, without the values in their closures."""

    def code(f: MaskFunction) -> Any:
        return _code(f), tuple(map(code, _parts(f)))

    return code(_unpacked(function))


def _unpacked(function: MaskFunction) -> MaskFunction:
    """``function`` without what transformers adds if it finds packed documents, which a shard seems to have.

    transformers then passes positions to the function, instead of the indices of this rank's tokens.
    """
    code, parts = _code(function), _parts(function)
    if code == _REMAP:
        return _unpacked(parts[0])
    if code == _AND:
        others = [part for part in parts if _code(part) != _PACKED]
        if len(others) == 1 and _REMAP in map(_code, (*others, *_parts(others[0]))):
            return _unpacked(others[0])
    combine = {_AND: and_masks, _OR: or_masks}.get(code)
    return combine(*map(_unpacked, parts)) if combine else function


def compare_masks(
    masks: list[ModelMask], layers: Iterable[tuple[str, LayerMask]], tokens: int, model: str
) -> dict[LayerMask, bool]:
    """Compare the masks that ``model`` asks for with the claims of its named layers, on rows of ``tokens`` tokens.

    Returns the claims whose causality differs from the mask, each with ``ModelMask.optional``. A window or chunks that
    no mask has raise an error.
    """
    names: dict[LayerMask, str] = {}
    for name, claim in layers:
        names.setdefault(claim, name)
    conflicts: dict[LayerMask, bool] = {}
    for claim, name in names.items() if masks else ():
        if any(_is_layer_mask(mask.function, claim, tokens) for mask in masks):
            continue
        other = (not claim[0], *claim[1:])
        matching = next((mask for mask in masks if _is_layer_mask(mask.function, other, tokens)), None)
        if matching is None:
            raise ValueError(
                f"model={model}: layer {name!r} attends {_description(claim)}, but none of the masks that the model "
                "asks transformers for is that mask; seqpar can shard causal or full attention, with a sliding window "
                "or chunks, where the layer and a mask agree on the window and the chunks"
            )
        conflicts[claim] = matching.optional
    return conflicts


def _description(claim: LayerMask) -> str:
    causal, window, chunk = claim
    parts = ["causally" if causal else "to all tokens"]
    parts += [f"with a window of {window}"] if window is not None else []
    return " ".join(parts + ([f"in chunks of {chunk}"] if chunk else []))


def _is_layer_mask(function: MaskFunction, layer: LayerMask, tokens: int) -> bool:
    """Whether ``function`` is ``layer_mask`` for rows without padding and documents."""
    mask = layer_mask(Mask.full(), *layer)
    size = layer[1] or layer[2] or 0
    near = torch.cat([torch.arange(max(0, x - 3), x + 4, device="cpu") for x in (size, 2 * size)])
    length, all_tokens = max(tokens, 3 * size), torch.arange(tokens, device="cpu")
    try:
        return _agrees(function, mask, torch.cat([all_tokens, near[near < length]]), length)
    except IndexError:  # the function refers to a tensor with a value for each token of the trial run
        return _agrees(function, mask, all_tokens, tokens)


def _agrees(
    function: MaskFunction, mask: Mask, queries: Tensor, length: int, valid: Tensor | None = None, rows: int = 1
) -> bool:
    """Whether ``function`` agrees with ``mask`` at the ends of each query's interval and at some other keys.

    ``queries`` is int64 [n]. Padding, False in ``valid`` [rows, length], is not compared.
    """
    device = torch.device("cpu") if valid is None else valid.device
    lo, hi = (torch.atleast_2d(x).expand(rows, -1)[..., None] for x in mask.intervals(queries))  # [rows, n, 1]
    step = torch.arange(1, _RANDOM_KEYS + 1, device="cpu") * 2654435761
    some = ((queries[:, None] + 1) * step % length).expand(rows, -1, -1)
    keys = torch.cat([lo - 1, lo, hi - 1, hi, some], -1)  # [rows, n, keys]
    expected = (keys >= lo) & (keys < hi)
    compared = ((keys >= 0) & (keys < length)).to(device)
    inside, query = keys.clamp(0, length - 1).to(device), queries.to(device)
    row = torch.arange(rows, device=device)[:, None, None]
    if valid is not None:
        compared &= valid[row, inside] & valid[row, query[None, :, None]]
    with device:  # the function may make tensors on PyTorch's default device
        visible = torch.as_tensor(function(row, row.new_zeros(()), query[None, :, None], inside)).expand(inside.shape)
    return bool((~compared | (visible == expected.to(device))).all())


def mask_of_function(function: MaskFunction, valid: Tensor, windows: Iterable[int | None]) -> Mask:
    """A mask that equals ``function`` for the tokens of a batch: causal, with blocks of tokens that see one another.

    A block is a number of consecutive tokens each of which sees the next one, such as the tokens of an image, or the
    prefix of a prefix language model. A window may end inside a block, or may not. Any other mask is a ValueError.
    ``valid`` is bool ``[rows, length]``, False for padding; ``windows`` are of the model's layers, as in ``LayerMask``.
    """
    rows, length = valid.shape
    blocks = _blocks(function, rows, length, valid.device)
    queries = torch.arange(length, device="cpu")
    for window in dict.fromkeys(windows):
        if window is None:
            candidates = [Mask.causal(blocks)]
        else:
            candidates = [Mask.causal(blocks) & Mask.sliding_window(window - 1, -1), Mask.causal(blocks, window)]
        for mask in candidates:
            if _agrees(function, mask, queries, length, valid, rows):
                return mask
    raise ValueError(
        "attention_mask: the mask that the model asks for is not causal with blocks of tokens that see one another "
        "(the tokens of an image, a prefix); such a mask cannot be sharded"
    )


def _blocks(function: MaskFunction, rows: int, length: int, device: torch.device) -> list[Any]:
    """For each row, or once for all rows, the first token of each block, and one past the last."""
    row, query = torch.arange(rows, device=device)[:, None], torch.arange(length - 1, device=device)[None]
    with device:
        visible = torch.as_tensor(function(row, row.new_zeros(()), query, query + 1)).expand(rows, length - 1)
    change = F.pad(visible.int(), (1, 1)).diff(dim=1).cpu()  # [rows, length]: blocks start and stop
    blocks: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
    for (r, start), (_, stop) in zip((change == 1).nonzero().tolist(), (change == -1).nonzero().tolist(), strict=True):
        blocks[r].append((start, stop + 1))
    return blocks[:1] if all(x == blocks[0] for x in blocks) else blocks


def no_mask(
    batch_size: int = 1,
    q_length: int = 0,
    kv_length: int | None = None,
    attention_mask: Tensor | None = None,
    mask_function: MaskFunction | None = None,
    device: torch.device | None = None,
    **kwargs: Any,
) -> Any:
    """The mask function of the interface. It makes no dense mask: ``seqpar.Mask`` holds the padding and documents.

    In a model that merges images into its text, it returns the mask of the batch for ``before_text_model``. The masks
    of cross-attentions to an encoder's states are transformers' own.
    """
    if attention_mask is not None and not torch.compiler.is_compiling():
        forward = forwards.now
        if forward is not None and attention_mask is forward.states_mask:
            sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "device": device}
            arguments = {"attention_mask": attention_mask, "mask_function": mask_function, **sizes, **kwargs}
            return mask_of_states(forward, arguments)
    if shards_text_model[0]:
        return _mask_of_call(mask_function, batch_size, q_length, attention_mask, device)
    if attention_mask is not None and not bool(attention_mask.all()):
        if kv_length is not None and kv_length > attention_mask.shape[-1]:
            raise ValueError(
                "cache: a static cache cannot be sharded; leave cache_implementation out, or pass DynamicCache()"
            )
        why = WITHOUT_HOOKS
        if forwards.now is not None and has_encoder(forwards.now.model):
            why = (
                "the decoder takes pad tokens for padding, or is compiled; pass decoder_attention_mask, and compile "
                "its layers or the whole model"
            )
        raise ValueError(f"attention_mask: it has padding, but {why}")
    if not torch.compiler.is_compiling():
        _check_known(mask_function, batch_size, q_length, device)
    return None


@no_compile
def _mask_of_call(
    function: MaskFunction | None, rows: int, length: int, attention_mask: Tensor | None, device: torch.device | None
) -> Mask | None:
    if (forward := forwards.now) is None or forward.positions is None:  # the text model runs, on its part
        return None
    if function is None or _is_known(function, forward) or length < 2:
        return None
    if attention_mask is not None and tuple(attention_mask.shape) == (rows, length):
        valid = attention_mask.bool()
    else:
        valid = torch.ones(rows, length, dtype=torch.bool, device=device)
    return mask_of_function(function, valid, [window for _, window, _ in forward.patch.layer_masks])


def _is_known(function: MaskFunction, forward: Forward) -> bool:
    structures = forward.patch.known_masks
    return not structures or structure(function) in structures


def _check_known(function: MaskFunction | None, rows: int, length: int, device: torch.device | None) -> None:
    """Raise an error if the mask depends on the call's arguments, unless it only adds blocks and there are none."""
    forward = forwards.now
    if function is None or forward is None or _is_known(function, forward):
        return
    if text_model(cast(Any, forward.model)) is not forward.model and not has_encoder(forward.model):
        tokens = torch.device(device or "cpu")
        if length < 2 or not any(_blocks(_unpacked(function), rows, length, tokens)):
            return
    raise ValueError(
        "attention mask: the model asks for a mask that depends on this call's arguments (such as token_type_ids or "
        "sequence_id), which cannot be sharded; leave them out, or pass the full batch with images to the model itself"
    )


def mask_in_layer(
    module: nn.Module, shard: BatchShard | DecodeShard, patch: Patch, is_causal: bool | None, window: int | None
) -> tuple[Mask, LayerMask]:
    """The mask of the batch for a layer, and what the layer adds to it."""
    claim = layer_mask_of(module, is_causal, window)
    if isinstance(shard, BatchShard) and shard.block_masks:
        mask = shard.block_masks.get(_layer_type(module) or "", shard.block_masks.get(""))
        if mask is not None:
            return mask, _COMPLETE
    if claim in patch.causality_conflicts and _is_masked(claim, shard, patch):
        claim = (not claim[0], *claim[1:])
    return shard.mask, claim


def full_mask_in_layer(module: nn.Module, shard: BatchShard, patch: Patch) -> Mask:
    mask, in_layer = mask_in_layer(module, shard, patch, None, None)
    return layer_mask(mask, *in_layer)


def _is_masked(claim: LayerMask, shard: BatchShard | DecodeShard, patch: Patch) -> bool:
    """Whether transformers' attention of the model would get a mask, instead of reading the layer's ``is_causal``."""
    if patch.implementation == "flash":
        return False
    if patch.implementation != "sdpa" or not patch.causality_conflicts[claim]:
        return True
    if isinstance(shard, DecodeShard):
        return shard.start > 0 or shard.mask != Mask.full()
    size = claim[1] or claim[2]
    return not shard.unmasked or (size is not None and shard.seq_len >= size)


def _layer_type(module: nn.Module) -> str | None:
    types = getattr(getattr(module, "config", None), "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    return types[layer] if types is not None and layer is not None and layer < len(types) else None


def layer_mask_of(module: nn.Module, is_causal: bool | None, sliding_window: int | None) -> LayerMask:
    """Causality, window and chunk of a layer, from its arguments and its config."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    return causal, *window_and_chunk(module, sliding_window)


def window_and_chunk(module: nn.Module, sliding_window: int | None) -> tuple[int | None, int | None]:
    """The layer's window (``|i - j| < window``) and chunk size, from the config if the layer relies on a dense mask."""
    config = getattr(module, "config", None)
    layer_type = _layer_type(module)
    if layer_type == "sliding_attention" and sliding_window is None:
        sliding_window = getattr(module, "sliding_window", None) or getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None) if layer_type == "chunked_attention" else None
    return sliding_window, chunk
