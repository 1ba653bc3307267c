"""One call of a parallelized model: where its arguments are cut, and how its attention is computed.

Shapes: b batch, s tokens, h heads, d head_dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.overrides import _get_current_function_mode_stack

from ..base.checks import no_compile
from ..masks.mask import Mask
from ..patching.forwards import replaced_by
from ..patching.running import Running
from ..scaled_dot_product import SdpaCall, SdpaMode, sdpa
from ..sharding.sharding import Sharding
from .foreign import matching, modules_of, skips_scores
from .plans import Across, Cut, Plan
from .sites import KEYS, AttentionSite, attend_compiled
from .trial import FewTokens, PlanTrial, attend_to_own_token

_FULL = Mask.full()
_NATIVE = "call the model's set_attention_backend('native'), or set_default_attn_processor()"


class ModelCalls:
    """What the calls of a parallelized model share.

    Attributes:
        plan: where the model's tokens are.
        options: arguments of attention.
        shardings: of streams with given lengths.
        ranks: the number of ranks.
        running: the calls that are running.
    """

    def __init__(
        self, plan: Plan, mesh: DeviceMesh | None, group: ProcessGroup | None, options: Mapping[str, Any]
    ) -> None:
        self.plan, self.options = plan, options
        self.shardings = lru_cache(maxsize=32)(partial(Sharding.segments, mesh=mesh, group=group))
        self.ranks = self.shardings((0,)).ranks
        self.running: Running[CallMode] = Running()

    @property
    def sequence_group(self) -> ProcessGroup | None:
        """The ranks of the sequence."""
        return self.shardings((0,)).sequence_group

    def replaced(self, model: nn.Module) -> str | None:
        """What has replaced a forward of ``model``, or of one of its attention modules, after ``parallelize``."""
        modules = modules_of(model)
        for name in ("", *(name for pattern in self.plan.attention for name in matching(model, pattern))):
            if by := replaced_by(modules[name]):
                what = f"{name}: the forward" if name else "model: its forward"
                return f"{what} that seqpar.diffusers.parallelize has set was replaced by {by}"
        return None


class ModelCall:
    """One call of the model: its lengths, and how its attention is computed.

    Attributes:
        lengths: tokens of each stream.
        rows: the real tokens of the padded stream, in each batch row; None: all are real, or no argument tells.
        first: of patterns that end in ".0", the module that was called first.
        before_cuts: attention modules that have run on whole streams, such as a refiner of the text.
        attended: whether an attention module of the plan has run.
        gathered: the modules whose output has been gathered.
    """

    def __init__(self, shared: ModelCalls, model: nn.Module) -> None:
        self.shared, self.model = shared, model
        self.lengths: dict[str, int] = {}
        self.rows: list[int] | None = None
        self.first: dict[str, nn.Module] = {}
        self.before_cuts: set[str] = set()
        self.gathered: set[str] = set()
        self.attended = False

    def new_mode(self) -> CallMode:
        return CallMode(self)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The modules that run inside of the block belong to this call."""
        with self.new_mode() as mode, self.shared.running(mode):
            yield

    def length(self, stream: str) -> int:
        """Tokens of the stream, with masked ones if there are fewer than ranks: model code slices ``[:, -text:]``."""
        if stream not in self.lengths:
            raise RuntimeError(
                f"plan: attention needs the tokens of {stream!r}, but no argument with them has been cut; the model "
                "skipped the module that the plan cuts them at"
            )
        return max(self.lengths[stream], self.shared.ranks)

    def sharding(self, streams: tuple[str, ...]) -> Sharding:
        return self.shared.shardings(tuple(self.length(stream) for stream in streams))

    def whole(self, x: Tensor, stream: str, dim: int) -> Tensor:
        """All tokens of a stream, without masked ones."""
        return self.sharding((stream,)).unshard(x, dim).narrow(dim, 0, self.lengths[stream])

    def cut_arguments(self, pattern: str, signature: inspect.Signature, args: Any, kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = dict(bound.arguments)
        for name, cut in self.shared.plan.cuts[pattern].items():
            if name in bound.arguments:
                bound.arguments[name] = self._cut(given[name], cut, name)
        padding = self.shared.plan.padding
        if padding is not None and padding[0] == pattern and given.get(padding[1]) is not None:
            self.rows = self._real_tokens(given[padding[1]], padding[1])
        return bound.args, bound.kwargs

    def _cut(self, value: Any, cut: Cut | tuple[Cut, ...], what: str) -> Any:
        if value is None:
            return None
        if isinstance(cut, tuple):
            return tuple(self._cut(x, c, what) for x, c in zip(value, cut, strict=True))
        if isinstance(value, list | tuple):
            return type(value)(self._cut(x, cut, what) for x in value)
        streams = (cut.streams,) if isinstance(cut.streams, str) else cut.streams
        if isinstance(value, int):
            return int((self.sharding(streams).positions() < value).sum())
        if not isinstance(value, Tensor):
            raise TypeError(f"{what}: expected a tensor of {' and '.join(streams)} tokens, got {type(value).__name__}")
        if cut.dims is not None and (value.dim() != cut.dims or value.shape[cut.dim] == 1):
            return value
        lengths = [value.shape[cut.dim]] if len(streams) == 1 else [self.lengths[stream] for stream in streams]
        if sum(lengths) != value.shape[cut.dim]:
            raise ValueError(
                f"{what}: {value.shape[cut.dim]} entries along dim {cut.dim}, but {lengths} tokens of {streams}"
            )
        parts = value.split(lengths, cut.dim)
        return torch.cat([self._cut_stream(x, s, cut.dim, what) for x, s in zip(parts, streams, strict=True)], cut.dim)

    def _cut_stream(self, x: Tensor, stream: str, dim: int, what: str) -> Tensor:
        length, dim = x.shape[dim], dim % x.dim()
        if self.lengths.setdefault(stream, length) != length:
            raise ValueError(
                f"{what}: {length} entries along dim {dim}, but there are {self.lengths[stream]} {stream} tokens"
            )
        if stream == self.shared.plan.output_stream and length < self.shared.ranks:
            raise ValueError(f"{what}: {length} {stream} tokens over {self.shared.ranks} ranks; use fewer ranks")
        missing = self.length(stream) - length
        if missing:
            x = F.pad(x, (*[0, 0] * (x.dim() - 1 - dim), 0, missing))
        return self.sharding((stream,)).shard(x, dim)

    def _real_tokens(self, mask: Any, what: str) -> list[int]:
        """The number of real tokens of the padded stream in each row."""
        stream = self.shared.plan.padded_stream
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"{what}: expected a bool tensor, True for real tokens, got {kind}, which attention adds to the scores "
                f"instead of hiding padding; for ones and zeros pass {what}.bool(), to a pipeline "
                "prompt_attention_mask.bool() beside prompt_embeds, both from its encode_prompt"
            )
        mask = mask.reshape(mask.shape[0], -1)  # [b, tokens]
        length = self.lengths[stream]
        if mask.shape[1] != length:
            joint = [each for each in self.shared.plan.attention.values() if not isinstance(each, Across)]
            order = next(each for each in joint if stream in each)
            lengths = [self.lengths[each] for each in order]
            if sum(lengths) != mask.shape[1]:
                raise ValueError(
                    f"{what}: {mask.shape[1]} entries a row, but the streams {order} have {lengths} tokens"
                )
            parts = dict(zip(order, mask.split(lengths, 1), strict=True))
            mask = parts.pop(stream)
            if not all(bool(part.all()) for part in parts.values()):
                raise ValueError(f"{what}: tokens of {' and '.join(parts)} are padding; only {stream} may be padded")
        rows = mask.sum(1)  # [b]
        if not torch.equal(mask, torch.arange(length, device=mask.device) < rows[:, None]):
            raise ValueError(f"{what}: a row has padding before real tokens; put each row's padding at its end")
        found: list[int] = rows.tolist()
        return found

    def mask(self, streams: tuple[str, ...], masked: bool) -> tuple[Mask, tuple[str, ...]]:
        """The mask of an attention call, and the order of the streams that it is for: a padded one comes last."""
        rows = self.rows if masked else None
        real = {s: rows if rows and s == self.shared.plan.padded_stream else [self.lengths[s]] for s in streams}
        padded = [s for s in streams if any(n != self.length(s) for n in real[s])]
        if not padded:
            return _FULL, streams
        if len(padded) > 1:
            raise ValueError(
                f"model: of {', '.join(padded)} more than one stream has padding, or fewer tokens than the "
                f"{self.shared.ranks} ranks; use fewer ranks, or pad to {self.shared.ranks} tokens"
            )
        (last,) = padded
        order = (*(s for s in streams if s != last), last)
        before = sum(self.length(s) for s in order[:-1])
        stops = [before + n for n in real[last]]
        return Mask.padding(0, stops if len(set(stops)) > 1 else stops[0]), order


class CallMode(SdpaMode):
    """Attention inside of a call of the model."""

    advice = _NATIVE

    def __init__(self, call: ModelCall) -> None:
        super().__init__()
        self.call = call
        # The attention modules that are running, the inner one last, and whether each lacks the tokens of its keys.
        self.sites: list[tuple[AttentionSite, bool]] = []
        self.calls = 0  # of F.scaled_dot_product_attention, in the inner module

    def run(self, site: AttentionSite, lacks: bool, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the forward of an attention module, also while torch.compile traces a block."""
        before, self.calls = self.calls, 0
        self.sites.append((site, lacks))
        try:
            output = forward(*args, **kwargs)
            calls = self.calls
        finally:
            self.sites.pop()
            self.calls = before
        if calls != 1 if site.is_sharded else lacks and not calls:
            self.needs_one_sdpa_call(site, lacks, calls)
        return output

    @no_compile
    def needs_one_sdpa_call(self, site: AttentionSite, lacks: bool, calls: int) -> None:
        """Raise if a module's attention was not computed by the ``calls`` of F.scaled_dot_product_attention."""
        self.check_keys(site, lacks)
        if not site.streams or skips_scores(site.module):
            return
        processor = getattr(site.module, "processor", None)
        backend = getattr(processor, "_attention_backend", None)
        raise RuntimeError(
            f"{site.name}: {calls} calls of F.scaled_dot_product_attention over the sharded tokens instead of one; its "
            f"processor is {type(processor).__name__}"
            + (f" with the attention backend {backend!r}" if backend is not None else "")
            + f"; {_NATIVE}"
        )

    def check_keys(self, site: AttentionSite, lacks: bool) -> None:
        """Raise if the keys of a module are this rank's tokens, and every rank should hold all of them."""
        if not self.call.lengths:
            self.call.before_cuts.add(site.name)
        elif not site.streams and lacks and site.name not in self.call.before_cuts:
            raise ValueError(
                f"{site.name}: without {KEYS} its keys are this rank's tokens, but the plan says that every rank holds "
                "all of them"
            )

    @no_compile
    def needs_a_module_of_the_plan(self) -> None:
        if replaced := self.call.shared.replaced(self.call.model):
            raise ValueError(f"{replaced}; undo that, or restore the model and parallelize it afterwards")
        raise ValueError(
            "model: attention was called outside of the attention modules of the plan "
            f"({', '.join(self.call.shared.plan.attention)}); add the module to the plan"
        )

    def is_sharded(self) -> bool:
        if not self.sites:
            self.needs_a_module_of_the_plan()
        return self.sites[-1][0].is_sharded

    def attend(self, sdpa_call: SdpaCall) -> Tensor:
        if not self.sites:
            self.needs_a_module_of_the_plan()
        self.calls += 1
        run = attend_compiled if torch.compiler.is_compiling() else self.attend_at
        return run(*self.sites[-1], sdpa_call)

    def attend_at(self, site: AttentionSite, lacks: bool, sdpa_call: SdpaCall) -> Tensor:
        """The attention of a module."""
        self.check_keys(site, lacks)
        if not site.streams:
            return sdpa_call.original()
        self.call.attended = True
        query, key, value, attn_mask, _, is_causal, *_ = sdpa_call
        name, streams = site.name, site.streams
        if skips_scores(site.module) and query.shape[2] == value.shape[2]:
            return value
        call = self.call
        if isinstance(streams, Across):
            lengths = tuple(call.sharding((stream,)).seq_local for stream in (streams.queries, streams.keys))
            if (query.shape[2], key.shape[2]) != lengths or attn_mask is not None or is_causal:
                raise ValueError(
                    f"{name}: {query.shape[2]} queries and {key.shape[2]} keys, but this rank holds {lengths} tokens "
                    f"of {streams.queries} and {streams.keys}, whose attention may have no mask"
                )
            key, value = (call.whole(x, streams.keys, dim=2) for x in (key, value))  # [b, h, s, d]
            return sdpa_call._replace(key=key, value=value).original()
        if not {query.shape[2], key.shape[2]} == {call.sharding(streams).seq_local}:
            raise ValueError(
                f"{name}: {query.shape[2]} queries and {key.shape[2]} keys, but this rank holds "
                f"{call.sharding(streams).seq_local} tokens of {' and '.join(streams)}; adapters that add attention, "
                "such as IP-Adapter, are not supported"
            )
        if is_causal:
            raise ValueError(f"{name}: is_causal=True; joint attention of several streams has no order")
        masked = attn_mask is not None and call.rows is not None
        mask, order = call.mask(streams, masked)
        if order != streams:
            query, key, value = (_reorder(x, streams, order, call) for x in (query, key, value))  # [b, h, s, d]
        here = sdpa_call._replace(query=query, key=key, value=value, attn_mask=None if masked else attn_mask)
        out = sdpa(*here, sharding=call.sharding(order), mask=mask, **call.shared.options)
        return out if order == streams else _reorder(out, order, streams, call)


def mode_of_thread() -> CallMode | None:
    """The innermost call of a model, in this thread. torch.compile can trace this."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, CallMode):
            return mode
    return None


class TrialCall(ModelCall):
    """A call on a few tokens, in which attention sees nothing of other tokens."""

    def __init__(self, shared: ModelCalls, model: nn.Module, trial: PlanTrial, number: int | None) -> None:
        super().__init__(shared, model)
        self.trial, self.number = trial, number

    def new_mode(self) -> CallMode:
        return _TrialMode(self)

    def sharding(self, streams: tuple[str, ...]) -> Any:
        for stream in streams:
            self.length(stream)  # raises if it has not been cut
        return FewTokens(self.trial.changed(streams, self.number))

    def whole(self, x: Tensor, stream: str, dim: int) -> Tensor:
        dim %= x.dim()
        return x.new_zeros(*x.shape[:dim], self.lengths[stream], *x.shape[dim + 1 :])


class _TrialMode(CallMode):
    call: TrialCall

    def attend_at(self, site: AttentionSite, lacks: bool, sdpa_call: SdpaCall) -> Tensor:
        self.check_keys(site, lacks)
        if not site.streams:
            return sdpa_call.original()
        self.call.attended = True
        qkv = sdpa_call[:3]
        self.call.trial.see([x.transpose(1, 2) for x in qkv], site.module)
        return attend_to_own_token(*qkv)


def _reorder(x: Tensor, order: tuple[str, ...], new: tuple[str, ...], call: ModelCall) -> Tensor:
    """This rank's tokens of the streams in another order."""
    parts = dict(zip(order, x.split([call.sharding((s,)).seq_local for s in order], 2), strict=True))
    return torch.cat([parts[s] for s in new], 2)
