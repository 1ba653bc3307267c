"""Tests, in the trial run, how the indexers of a model choose keys, and how its compressors pool them, before they run
on a sharded sequence.

A sharded indexer is right if the score of a key depends on nothing but the token, the key and whether the token sees
the key, and if the result is the indices of the highest scores. Both are tested with random keys, on the input and the
result of ``torch.topk``.

A sharded compressor is right if a row depends on nothing but the tokens of its window, or also of the window before
it, and if a token sees every row whose window ends before it, or with an indexer the chosen ones of these rows. The
compressor runs on a few windows of random tokens, and again on the last window alone.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..mechanisms.compressors import Call, has_compressor, indexer_of
from ..mechanisms.indexers import IndexedMask, has_indexer, hidden_states_of, run_indexer


class UnsupportedIndexerError(ValueError):
    pass


class _Choices(TorchFunctionMode):
    """Keeps the input and the indices of each ``torch.topk``."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            self.found.append((args[0], result[1]))
        return result


def _scores(indexer: nn.Module, call: Any, tokens: slice, keys: Tensor, mask: Tensor) -> Tensor:
    """The scores of ``keys [1, t, d]`` for some tokens of row 0, ``[1, c, t]``."""
    with _Choices() as choices:
        indices = run_indexer(indexer, call, 0, tokens, keys, mask)
    ((scores, highest),) = choices.found
    assert isinstance(scores, Tensor)
    if scores.shape != mask.shape or not torch.equal(indices, highest.to(indices.dtype)):
        raise ValueError("its result is not the indices of the highest scores")
    return scores


def _check_scores(indexer: nn.Module, call: Any, tokens: int, channels: int) -> None:
    """Raise an error if a score depends on more than a token, a key, and whether the token sees the key."""
    seen, length, some = 2 * tokens, 3 * tokens, slice(1, tokens - 1)
    numbers = torch.Generator("cpu").manual_seed(0)
    keys = torch.randn(1, length, channels, generator=numbers, dtype=torch.float32, device="cpu")
    i, j = torch.arange(tokens, device="cpu")[:, None], torch.arange(length, device="cpu")
    mask = ((i + j) % 3 > 0) & (j < seen)[None]  # [tokens, length]
    ours = _scores(indexer, call, slice(0, tokens), keys, mask[None])[0]
    theirs = _scores(indexer, call, some, keys[:, :seen].flip(1), mask[None, some, :seen].flip(2))[0].flip(1)
    visible = mask[some, :seen]
    if not torch.allclose(ours[some, :seen][visible], theirs[visible], rtol=1e-4, atol=1e-5):
        raise ValueError("a score changed with other tokens or other keys")
    if ours[~mask].max() >= ours[mask].min():
        raise ValueError("a key that a token does not see had a higher score than one that it sees")


def choose_own_tokens(root: nn.Module, check: Callable[[Tensor, nn.Module], None]) -> None:
    """Make each indexer in ``root`` check how it chooses, and then choose each token for the token itself.

    ``check(keys, indexer)`` is called with the keys of all tokens, ``[b, s, d]``.
    """

    def choose(indexer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        call = args, kwargs
        batch, tokens = hidden_states_of(call).shape[:2]
        try:
            keys = torch.cat([run_indexer(indexer, call, i, slice(0, tokens)) for i in range(batch)])
            _check_scores(indexer, call, tokens, keys.shape[2])
        except Exception as error:
            raise UnsupportedIndexerError(
                "does not choose the keys with the highest scores, where a score is of one token and one key, but in "
                "another way, such as by keys pooled over runs of tokens; such an indexer cannot be sharded"
            ) from error
        check(keys, indexer)
        return own_token_indices(batch, tokens)

    for layer in filter(has_indexer, root.modules()):
        vars(layer.indexer)["forward"] = MethodType(choose, layer.indexer)
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "attention_mask": IndexedMask()}), with_kwargs=True
        )


def own_token_indices(batch: int, tokens: int) -> Tensor:
    """What an indexer returns that chooses each token for itself: int32 ``[b, s, 1]``."""
    return torch.arange(tokens, dtype=torch.int32, device="cpu")[None, :, None].expand(batch, -1, -1)


def check_indices(layer: nn.Module, indices: Tensor | None, tokens: int) -> None:
    """Raise an error if ``layer`` does not attend to the keys that ``choose_own_tokens`` has chosen."""
    if indices is None:
        if has_indexer(layer):
            raise UnsupportedIndexerError(
                "has an indexer, but does not pass the chosen keys to its attention as indices"
            )
    elif not torch.equal(indices.cpu(), own_token_indices(indices.shape[0], tokens)):
        raise UnsupportedIndexerError("attends to other keys than those that an indexer has chosen")


def compress_no_tokens(root: nn.Module) -> None:
    """Make each compressor in ``root`` check how it pools windows of tokens, and then give its layer no rows."""
    checked: set[nn.Module] = set()

    def compress(compressor: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        call = Call(compressor, args, kwargs)
        if compressor not in checked:
            try:
                _check_windows(call)
            except Exception as error:
                raise UnsupportedIndexerError(
                    "does not pool each window of tokens, with the window before it or without, to one row that all "
                    "later tokens see or an indexer chooses, but in another way; such a compressor cannot be sharded"
                ) from error
            checked.add(compressor)
        return call.no_rows(), None

    for layer in filter(has_compressor, root.modules()):
        vars(layer.compressor)["forward"] = MethodType(compress, layer.compressor)


def _check_windows(call: Call) -> None:
    size, count = call.size, 3
    numbers = torch.Generator("cpu").manual_seed(0)
    tokens = count * size + 1

    def random(like: Tensor) -> Tensor:
        return torch.randn(1, tokens, *like.shape[2:], generator=numbers, dtype=torch.float32, device="cpu")

    given = {name: random(x) if isinstance(x, Tensor) else x for name, x in call.arguments.items()}
    given |= {"position_ids": torch.ones(1, tokens, dtype=torch.int64, device="cpu").cumsum(1) - 1, call.cache: None}
    rows, bias = type(call.module).forward(call.module, **given)
    call = Call(call.module, (), given)

    def last(kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = count - call.row_windows(kv)
        at = slice(first * size, count * size)
        return kv[:, at], gate[:, at], torch.tensor([first * size], device="cpu")

    if not torch.allclose(call.run(last)[:, -1], rows[:, 0, -1], rtol=1e-4, atol=1e-5):
        raise ValueError("a row changed with tokens before its window")
    seen = torch.arange(count, device="cpu") < (given["position_ids"] + 1)[..., None] // size  # [1, tokens, count]
    if (module := indexer_of(call.module)) is not None:
        indexer = Call(module, (), given)

        def every(kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
            return kv[:, : count * size], gate[:, : count * size], 0

        chosen = indexer.run(rows=indexer.run(every))  # [1, tokens, k]
        index = torch.arange(count, device="cpu")
        seen &= (chosen[..., None] == index).any(2)
    if not torch.equal(bias[:, 0] == 0, seen):
        raise ValueError("a token does not see exactly the rows whose windows end before it")
