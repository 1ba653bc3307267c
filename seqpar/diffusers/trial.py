"""Finds modules in which tokens see other tokens outside of attention, by runs of a model on a few tokens.

Where a plan cuts an argument, the runs take a few of its tokens, and in attention each token sees itself only. In every
run but the first, some of these tokens have other values. If the values of another token differ then, a module mixes
tokens, and would see this rank's tokens only.

The model computes with small weights, none of which is zero, and without hooks: neither the real weights, which may be
sharded, quantized or offloaded, nor the caller's hooks take part. Nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations, count
from math import comb
from typing import Any

import torch
from torch import Tensor, nn

from ..patching.substitutes import own_token, substitute, substituted, tensors_of
from .foreign import modules_of
from .plans import Across, Plan

# How many tokens of each stream take part: the first of these numbers that are no size of a weight. A dimension with as
# many entries has the tokens.
_NUMBERS = (29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
_TOLERANCE = 1e-3  # the largest change of a value, relative to the largest value, that counts as rounding error


class FewTokens:
    """Takes the place of a ``Sharding``: some tokens of streams.

    Args:
        changed: which of the tokens have other values in this run, bool ``[tokens]``.
    """

    def __init__(self, changed: Tensor) -> None:
        self.changed, self.seq_local = changed, len(changed)

    def positions(self) -> Tensor:
        return torch.arange(self.seq_local)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """The first tokens of ``x``, again and again if it has fewer."""
        few = x.index_select(dim, torch.arange(self.seq_local, device=x.device) % x.shape[dim])
        if not (few.is_floating_point() or few.is_complex()):
            return few
        return torch.where(self.changed.to(x.device).view(-1, *[1] * (few.dim() - 1 - dim)), 1 - few, few)


def attend_to_own_token(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention ``[b, h, s, d]`` in which a token sees itself only. It depends on the token's query, key and value."""
    if query.shape[2] != key.shape[2]:  # from one stream to another
        return query.mean(-1, keepdim=True).expand(*query.shape[:3], value.shape[3])
    return own_token(query, key, value)


class PlanTrial:
    """Runs of a parallelized model on a few tokens.

    Args:
        plan: the model's plan.
        model: the model.
        keeps: whether a hook takes part in the runs.

    Attributes:
        numbers: of tokens, for each stream.
        runs: how many runs change tokens.
    """

    def __init__(self, plan: Plan, model: nn.Module, keeps: Callable[[Any], bool]) -> None:
        self.model, self._keeps = model, keeps
        sizes = {n for p in (*model.parameters(), *model.buffers()) for n in p.shape}
        self.numbers = dict(zip(plan.streams, [n for n in _NUMBERS if n not in sizes], strict=False))
        total = sum(self.numbers.values())
        self.runs = next(n for n in count(2) if comb(n, n // 2) >= total)
        # Each token changes in half of the runs, and no two tokens in the same ones. So for any two tokens, there is a
        # run in which the first one changes and the second one does not.
        codes = iter(combinations(range(self.runs), self.runs // 2))
        self._codes = {stream: [next(codes) for _ in range(n)] for stream, n in self.numbers.items()}
        joined = [streams for streams in plan.attention.values() if streams and not isinstance(streams, Across)]
        # By their number of tokens, the streams whose tokens a value may have.
        self._orders: dict[int, list[tuple[str, ...]]] = {}
        for order in dict.fromkeys([*((stream,) for stream in plan.streams), *joined]):
            self._orders.setdefault(sum(self.numbers[stream] for stream in order), []).append(order)
        self._names = {module: name for name, module in modules_of(model).items()}
        self._running = [model]
        # In the order of the calls: a module, and three numbers for each token of one of its values.
        self._seen: list[tuple[nn.Module, Tensor]] = []

    def changed(self, streams: tuple[str, ...], run: int | None) -> Tensor:
        """Which tokens have other values in a run, bool ``[tokens]``; in the first run, None, none have."""
        return torch.tensor([run in code for stream in streams for code in self._codes[stream]])

    def find_mixer(self, call: Callable[[int | None], Any], device: torch.device) -> str | None:
        """The innermost module that mixes tokens outside of attention, by name and class; None if none does.

        ``call(run)`` calls the model's forward.
        """
        with self._small_weights(device):
            expected = self._values(call, None, device)
            for run in range(self.runs):
                module = self._mixer(expected, self._values(call, run, device), run)
                if module is not None:
                    return f"{self._names.get(module, '') or 'the model'} ({type(module).__name__})"
        return None

    def see(self, values: Any, module: nn.Module | None = None) -> None:
        """Note values of ``module``, by default of the module that is running."""
        with torch._C.DisableTorchFunction():  # the mode of the call would see every operation
            for x in tensors_of(values):
                dims = [dim for dim, n in enumerate(x.shape) if n in self._orders]
                if len(dims) == 1:
                    x = x.movedim(dims[0], 0).flatten(1).float()
                    of_token = torch.stack([x.mean(1), x.square().mean(1), x.abs().amax(1)], 1)
                    self._seen.append((module or self._running[-1], of_token))

    def _values(
        self, call: Callable[[int | None], Any], run: int | None, device: torch.device
    ) -> list[tuple[nn.Module, Tensor]]:
        self._seen = []
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # every run draws the same dropout
            call(run)
        return self._seen

    def _mixer(
        self, expected: list[tuple[nn.Module, Tensor]], found: list[tuple[nn.Module, Tensor]], run: int
    ) -> nn.Module | None:
        """The first module in which other tokens than the changed ones differ."""
        same = [x is y and len(a) == len(b) for (x, a), (y, b) in zip(expected, found, strict=False)]
        first = same.index(False) if False in same else len(same)  # another module ran, because of a value
        mixers = [first] if first < len(same) else []
        for n, orders in self._orders.items():
            indices = [i for i in range(first) if len(expected[i][1]) == n]
            if indices:
                before, after = (torch.stack([x[i][1] for i in indices]) for x in (expected, found))
                limit = _TOLERANCE * before.abs().amax(1, keepdim=True)
                differs = ((before - after).abs() > limit).any(2).cpu()  # [values, tokens]
                # Of several orders of streams with as many tokens, each value has one.
                mixed = [differs[:, ~self.changed(order, run)].any(1) for order in orders]
                mixers += [
                    i for i, is_mixed in zip(indices, torch.stack(mixed).all(0).tolist(), strict=True) if is_mixed
                ]
        return expected[min(mixers)][0] if mixers else None

    @contextmanager
    def _small_weights(self, device: torch.device) -> Iterator[None]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.see((args, kwargs))
            self._running.append(module)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._running.pop()
            self.see(output, module)

        def of(x: Tensor, is_parameter: bool) -> Tensor:
            return substitute(x, device, x.dtype) if is_parameter else x.clone().to(device)

        with substituted(self.model, of, self._keeps), torch.compiler.set_stance("force_eager"):
            for module in self.model.modules():
                vars(module)["_compiled_call_impl"] = None
                module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
                module.register_forward_hook(after, prepend=True)
            yield
