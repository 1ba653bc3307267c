"""Finds the layers of a transformers model in which a token's output depends on other tokens, by a trial run.

In the trial run, the attention function that transformers' ``AttentionInterface`` returns is replaced by one in which
each token attends to itself only. The rows of the batch differ in one token. If the outputs of another token differ
too, a layer mixes tokens without using the interface, whatever its class is called.

The last row has the same tokens with the same ``position_ids``, some tokens further to the right. If the output of a
token differs there, a layer counts the tokens in its input. It may do so in long rows only: Llama 4 scales queries from
token 8,192 on. Therefore ``torch.arange`` counts up to 16 M in another run, instead of the few tokens of the row. If a
layer counts tokens there, a search finds the longest rows in which it does not.

Two more runs of this row, with padding, with and without ``position_ids`` of 0, 1, 2, ..., tell whether the model takes
these by itself. In them each token attends to the token before it, so that rotary embeddings may start at any position.
A third run with more tokens tells whether an output depends on how many tokens follow. A last run of this row, with
labels, records how the model's forward computes a loss.

Of an encoder-decoder model the decoder runs, with the same encoder's states in all rows. An attention layer whose
forward gets states to attend to, and whose keys are of these states, is a cross-attention. A mask of these states tells
the calls of the mask interface that are for cross-attentions. The decoder gets the positions of the tokens, or the
modules in it that embed ``position_ids`` do.

The weights are not read, so that they may be on a GPU, on the meta device, quantized or sharded (``cheap.py``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import AttentionInterface

from ...patching.forwards import function_of
from ...patching.replaced import replaced
from ...patching.substitutes import own_token, tensors_of
from ..batch import IGNORE_INDEX
from ..mechanisms.encoders import (
    STATES,
    STATES_MASK,
    attends_across,
    decoder_of,
    from_labels,
    has_encoder,
    positional_embeddings,
    with_positions,
)
from ..mechanisms.key_values import expand, has_latent_kv
from ..mechanisms.mixers import tokenwise_mixers
from ..state import NAME
from .cheap import TokenwiseFunctions, configs, run_one_of_each_kind, substitutes
from .indexer_trial import check_indices, choose_own_tokens, compress_no_tokens

_CHANGED = (0, 4, 10)  # batch row i + 1 equals row 0, except for the token _CHANGED[i]; further rows equal row 0
_SHIFT = 3  # by how many tokens the last row is shifted
# The dimensions of rows and of tokens are recognized by their sizes. These are the first numbers that are neither the
# size of a parameter's dimension nor a number in a config.
_ROWS = (5, 6, 7, 9, 10)
_LENGTHS = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
_STATES = (53, 59, 61, 67, 71, 73, 79, 83)  # of an encoder
_LONGEST = 1 << 24  # tokens of a row; float32 counts no further
_TOLERANCE = 1e-4  # the largest change of a value, relative to the largest value, that counts as rounding error
_CHANNELS = 1024  # the number of channels of a tensor that are compared, evenly spaced
_SMALL = 1 << 16  # a linear layer with fewer features is no output embedding


@dataclass(frozen=True)
class Loss:
    """How the forward of a model computes a loss from labels."""

    forward: Any  # the function that was called, without decorators
    calls_loss_function: bool = False
    # If the loss is the mean cross-entropy of all logits: 0 or 1, how many tokens the labels are shifted to the left.
    # None for any other loss.
    shift: int | None = None
    in_place: bool = False  # whether the loss function gets the labels as labels that are shifted already


@dataclass
class _States(BaseModelOutput):
    """What an encoder returns. Encoders of sound also return a mask."""

    attention_mask: Tensor | None = None


class Trial:
    """The results of a trial run of ``root``, and its hooks, which write the results."""

    def __init__(self, root: PreTrainedModel) -> None:
        self.attention_modules: list[nn.Module] = []  # that called the attention function
        self.attention_calls: list[tuple[nn.Module, bool | None, int | None]] = []  # is_causal, sliding_window
        self.mixers: list[nn.Module] = []  # that called a function of ``mixers``
        self.functions: list[Any] = []  # the attention functions that the layers would have called
        self.across: dict[nn.Module, Any] = {}  # the cross-attentions, and the attention functions that they would call
        self.from_labels: Any = None  # the function by which the model makes decoder_input_ids from labels, if known
        self.bias: tuple[str, str] | None = None  # name and class of an attention layer with a bias of its scores
        self.scalings: dict[str, float | None] = {}  # by the layer's name, what it passes to the attention function
        self.mask_calls: list[dict[str, Any]] = []  # the arguments of the calls of the mask interface
        # Name and class of the innermost module whose output for a token depends on other tokens, and of the innermost
        # module that returns one vector per sequence.
        self.mixer: tuple[str, str] | None = None
        self.pooler: tuple[str, str] | None = None
        # The innermost linear layer with a forward of its own that scales a token by the values of the others.
        self.scaler: tuple[str, str] | None = None
        # The innermost module whose output for a token depends on the index of the token in the input.
        self.counter: tuple[str, str] | None = None
        self.measures = False  # whether the outputs of tokens depend on the number of tokens after them
        self.own_positions = False  # whether the positions of the model are not 0, 1, 2, ... without position_ids
        self.longest: int | None = None  # the longest rows in which no output depends on the index; None: any rows
        self.records = True  # False in the last four runs
        self.counts_only = False  # whether a run looks only for modules that count tokens
        self.loss = Loss(function_of(root.forward))
        self.error: Exception | None = None  # what ended the trial run
        self.ran: set[nn.Module] = set()  # the modules whose forward was called
        sizes = {n for p in (*root.parameters(), *root.buffers()) for n in p.shape}
        sizes |= {n for config in configs(root) for n in vars(config).values() if isinstance(n, int)}
        self.rows, self.length = (next((n for n in of if n not in sizes), of[0]) for of in (_ROWS, _LENGTHS))
        self.longer = next(n for n in _LENGTHS if n > self.length and n not in sizes)
        self.decoder = decoder_of(root) if has_encoder(root) else None
        self.text = self.decoder or root
        self.positions: Tensor | None = None  # of the tokens, int64 [rows, length], if ``_embeddings`` embed them
        self._embeddings: list[nn.Module] = []
        self.decoder_tokens: Any = None  # that the decoder got last
        self._states_length = next((n for n in _STATES if n not in sizes), _STATES[0])
        self._states_mask: Tensor | None = None  # of the encoder's states, as the decoder got it last
        self._attend_across: set[nn.Module] = set()  # the modules that got states to attend to
        self._root = root
        self._names = {module: name for name, module in root.named_modules()}
        self._running: list[nn.Module] = []  # the modules whose forward has started and not ended, innermost last
        self._pooled: list[tuple[Tensor, nn.Module]] = []  # tensors of one vector per row, and the modules they are of

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # The module whose forward calls this one may have mixed the arguments.
        self.check((*args, *kwargs.values()), self._running[-1] if self._running else self._root)
        if self.decoder is not None and attends_across(module, args, kwargs):
            self._attend_across.add(module)
        self.ran.add(module)
        self._running.append(module)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
        if self.records and self.scaler is None and _scales_together(module, args, output):
            self.scaler = self._names.get(module, ""), type(module).__name__
        # The last one is the outermost module that returns the tensor alone, or the innermost that returns it at all.
        at = len(self._pooled) if isinstance(output, Tensor) else 0
        self._pooled[at:at] = [(x, module) for x in tensors_of(output) if x.dim() == 2 and len(x) == self.rows]
        self.check(output, module)

    def mixes(self) -> None:
        self.mixers.append(self._running[-1])

    def call(self, **arguments: Any) -> Any:
        """Call the model with ``arguments`` for the tokens of its sequence, which may be a decoder's."""
        if self.decoder is not None or self._embeddings:
            self.positions = arguments.pop("position_ids", None)
        if self.decoder is None:
            return self._root(**arguments)
        configs = (m.config for m in (cast(Any, self._root).get_encoder(), self.decoder))
        hidden = next(n for config in configs if (n := getattr(config, "hidden_size", None)) is not None)
        rows = len(arguments["input_ids" if "input_ids" in arguments else "labels"])
        states = torch.sin(torch.arange(self._states_length * hidden, device="cpu") * 0.7).view(1, -1, hidden)
        names = {name: f"decoder_{name}" for name in ("input_ids", "attention_mask")}
        arguments = {names.get(name, name): x for name, x in arguments.items()}
        return self._root(encoder_outputs=_States(last_hidden_state=states.repeat(rows, 1, 1)), **arguments)

    def before_decoder(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        parameters = inspect.signature(decoder.forward).parameters
        kwargs = {**dict(zip(parameters, args, strict=False)), **kwargs}
        self.decoder_tokens = kwargs.get("input_ids")
        if not isinstance(states := kwargs.get(STATES), Tensor):
            raise ValueError(f"it was called without {STATES}, although the encoder's outputs were given")
        if STATES_MASK in parameters:
            self._states_mask = torch.ones(states.shape[:2], dtype=torch.bool, device="cpu")
            kwargs[STATES_MASK] = self._states_mask
        if "position_ids" in parameters and self.positions is not None:
            kwargs["position_ids"] = self.positions
        return (), kwargs

    def replace_embeddings(self) -> None:
        self._embeddings = positional_embeddings(self.text)
        for module in self._embeddings:
            vars(module)["forward"] = partial(self.embed_positions, module.forward)

    def embed_positions(self, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Embed the positions of each row by ``forward``, which may take one row of them."""
        if self.positions is None:
            return forward(*args, **kwargs)
        rows = [forward(**with_positions(forward, args, kwargs, ids)) for ids in self.positions]
        return torch.cat([x.reshape(-1, self.positions.shape[1], x.shape[-1])[:1] for x in rows])

    def is_of_states(self, mask_call: dict[str, Any]) -> bool:
        """Whether a call of the mask interface is for a cross-attention. Its mask is another tensor in each run."""
        return mask_call.get("attention_mask") is not None and mask_call["attention_mask"] is self._states_mask

    def attend(
        self, function: Any, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if module in self._attend_across:
            return self._attend_to_states(function, module, q, k, v, **kwargs)
        if kwargs.get("position_bias") is not None:
            self.bias = self.bias or (self._names[module], type(module).__name__)
        check_indices(module, kwargs.get("indices"), q.shape[2])
        if not self.records:
            return _attend_to_token_before(module, q, k, v)
        if not self.counts_only:
            self.attention_modules.append(module)
            self.attention_calls.append((module, kwargs.get("is_causal"), kwargs.get("sliding_window")))
            self.scalings[self._names[module]] = kwargs.get("scaling")
        self.check([x.transpose(1, 2) for x in (q, k, v)], module)
        return attend_to_own_token(module, q, k, v)

    def _attend_to_states(
        self, function: Any, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if k.shape[2] != self._states_length:
            raise ValueError(f"it attends to {k.shape[2]} keys; expected the encoder's states, and no other key")
        is_causal = kwargs.get("is_causal")
        if getattr(module, "is_causal", True) if is_causal is None else is_causal:
            raise ValueError("it attends to the encoder's states causally")
        if self.records and not self.counts_only:
            self.across[module] = function
        self.check(q.transpose(1, 2), module)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous(), None

    @property
    def failed(self) -> tuple[str, str]:
        """Name and class of the innermost module in which the trial run ended with an error."""
        module = self._running[-1] if self._running else self._root
        return self._names.get(module, ""), type(module).__name__

    def check_output(self, output: Any) -> None:
        self.check(output, self._root)
        for x in tensors_of(output):
            module = next((module for y, module in reversed(self._pooled) if y is x), None)
            if module is not None and self.pooler is None:
                self.pooler = self._names[module], type(module).__name__
        if not any(bool(x.isfinite().all()) for x in tensors_of(output)):
            raise ValueError("its outputs are not finite")

    def find_longest(self, counts: Callable[[int], bool]) -> None:
        """Set ``longest``. ``counts(tokens)``: whether an output depends on the index in rows of so many tokens."""
        fine, too_long = self.length, _LONGEST
        if not counts(too_long):
            return
        counter = self.counter
        while too_long - fine > 1:
            middle = (fine + too_long) // 2
            if counts(middle):
                too_long = middle
            else:
                fine = middle
        self.longest, self.counter = fine, counter

    def check_positions(self, output: Any, without_ids: Any) -> None:
        """Compare the outputs of one row, except for its padding, with ``position_ids`` of 0, 1, 2, ... and without."""
        for x, y in zip(tensors_of(output), tensors_of(without_ids), strict=True):
            ours, theirs = (_by_token(z, 1, self.length) for z in (x, y))
            if ours is not None and theirs is not None:
                change = (ours[:, _SHIFT + 1 :] - theirs[:, _SHIFT + 1 :]).abs().max()
                self.own_positions |= float(change) > _tolerance(ours)

    def check_length(self, output: Any, longer: Any) -> None:
        """Compare the outputs of one row, except for its padding, with the outputs of the row with more tokens."""
        for x, y in zip(tensors_of(output), tensors_of(longer), strict=True):
            short, long = _by_token(x, 1, self.length), _by_token(y, 1, self.longer)
            if short is not None and long is not None:
                change = (short - long[:, : self.length])[:, _SHIFT + 1 :].abs().max()
                self.measures |= float(change) > _tolerance(short)

    def check(self, values: Any, module: nn.Module) -> None:
        if not self.records:
            return
        name = self._names.get(module, ""), type(module).__name__
        with torch._C.DisableTorchFunction():  # ``TokenwiseFunctions`` would be called for every operation
            tensors = [x for x in (_by_token(x, self.rows, self.length) for x in tensors_of(values)) if x is not None]
            if self.mixer is None and any(map(_depends_on_others, tensors)):
                self.mixer = name
            if self.counter is None and any(map(_depends_on_index, tensors)):
                self.counter = name


def _scales_together(linear: nn.Module, args: Any, output: Any) -> bool:
    """Whether ``linear`` is a linear layer with a forward of its own in which large values of one token change another.

    Scales of a whole tensor do so.
    """
    if not isinstance(linear, nn.Linear) or type(linear).forward is nn.Linear.forward:
        return False
    if len(args) != 1 or not isinstance(output, Tensor):
        return False
    x = args[0]  # [tokens, channels] or [rows, tokens, ..., channels], whose first token is not changed
    if x.shape[:-1].numel() < 2 or output.shape[:-1] != x.shape[:-1]:
        return False
    large, first = 1e3 * x + 1e3, (0,) * min(2, x.dim() - 1)
    large[first] = x[first]
    ours, theirs = linear.forward(x)[first], linear.forward(large)[first]
    return float((ours - theirs).abs().max()) > _tolerance(ours)


def attend_to_own_token(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """An attention function for transformers in which each token attends to itself only.

    The result depends on the token's query, key and value, so that any mixing in one of these is visible in it.
    """
    if has_latent_kv(module):
        k, v = expand(module, k, v)
    return own_token(q, k, v).transpose(1, 2).contiguous().to(v.dtype), None


def _attend_to_token_before(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
    if has_latent_kv(module):
        k, v = expand(module, k, v)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    score = (q * k.roll(1, 2)).mean(-1, keepdim=True)  # [batch, heads, seq, 1]
    return (v + score).transpose(1, 2).contiguous().to(v.dtype), None


def run_trial(root: PreTrainedModel) -> Trial:
    """Run ``root`` on a few tokens, and find the modules that mix tokens. ``root`` is unchanged afterwards."""
    trial = _run(root, {})
    if trial.error is not None and "labels" in inspect.signature(root.forward).parameters:
        with_labels = _run(root, {"labels"})  # a forward of the user's may need them
        return trial if with_labels.error is not None else with_labels
    return trial


@torch.no_grad()
def _run(root: PreTrainedModel, also: Collection[str]) -> Trial:
    """The trial run with the arguments ``also``, which get the ids of the tokens."""
    trial = Trial(root)
    implementation = trial.text.config.get_text_config()._attn_implementation

    def attend(name: str, function: Any, look_up: Callable[[str], Any]) -> Any:
        trial.functions.append(look_up(implementation))
        return partial(trial.attend, look_up("sdpa" if implementation == NAME else implementation))

    with ExitStack() as stack:
        try:
            stack.enter_context(substitutes(root, trial.mask_calls))
            stack.enter_context(torch.random.fork_rng([]))
            # With so few tokens, several threads would be slower than one.
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            ids = _token_ids(root, trial.rows, trial.length)
            if trial.decoder is not None:
                stack.callback(trial.decoder.register_forward_pre_hook(trial.before_decoder, with_kwargs=True).remove)
            trial.replace_embeddings()
            for module in root.modules():
                stack.callback(module.register_forward_pre_hook(trial.before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(trial.after).remove)
            choose_own_tokens(root, trial.check)
            compress_no_tokens(root)
            same_kind, results = run_one_of_each_kind(root)
            stack.enter_context(replaced_interface(attend))
            stack.enter_context(tokenwise_mixers(root, trial.mixes))
            functions = TokenwiseFunctions(max(root.config.get_text_config().vocab_size, _SMALL), trial.length)
            stack.enter_context(functions)
            parameters = inspect.signature(root.forward).parameters
            arguments: dict[str, Any] = {
                **dict.fromkeys(("input_ids", *also), ids),
                **({"use_cache": False} if "use_cache" in parameters else {}),
            }
            positions = torch.arange(trial.length, device="cpu").repeat(trial.rows, 1)
            positions[:-1] += _SHIFT
            output = trial.call(position_ids=positions, **arguments)
            masks = len(trial.mask_calls)
            trial.mask_calls[:] = [call for call in trial.mask_calls if not trial.is_of_states(call)]
            for layer, first in same_kind:
                pairs = zip(layer.modules(), first.modules(), strict=True)
                trial.across |= {m: trial.across[first_m] for m, first_m in pairs if first_m in trial.across}
            for called in (trial.attention_modules, trial.mixers):
                callers = set(called)
                for layer, first in same_kind:
                    pairs = zip(layer.modules(), first.modules(), strict=True)
                    called += [m for m, first_m in pairs if first_m in callers and m not in callers]
            for layer, first in same_kind:
                pairs = zip(layer.modules(), first.modules(), strict=True)
                trial.ran |= {m for m, first_m in pairs if first_m in trial.ran}
            trial.check_output(output)
            masks = len(trial.mask_calls)

            def run_again(**given: Any) -> Any:
                for result in results:
                    result.clear()
                return trial.call(**given)

            def counts(longest: int) -> bool:
                trial.counter, functions.last_index = None, longest - 1
                run_again(position_ids=positions, **arguments)
                return trial.counter is not None

            if trial.counter is None:
                trial.counts_only = True
                trial.find_longest(counts)
                functions.last_index = None
            trial.records = False
            arguments |= dict.fromkeys(("input_ids", *also), ids[-1:])
            if "attention_mask" in parameters:
                arguments["attention_mask"] = (torch.arange(trial.length) >= _SHIFT).long()[None]
            output = run_again(**arguments, position_ids=positions[-1:])
            trial.check_positions(output, run_again(**arguments))
            trial.check_length(output, run_again(**_lengthened(arguments, positions[-1:], trial.longer)))
            if "labels" in parameters and trial.decoder is not None:
                trial.from_labels = _find_from_labels(root, trial, run_again, arguments)
            if "labels" in parameters:
                trial.loss = _find_loss(root, run_again, arguments, functions)
            del trial.mask_calls[masks:]
        except Exception as error:
            trial.error = error
    return trial


def _lengthened(arguments: dict[str, Any], positions: Tensor, length: int) -> dict[str, Any]:
    """The ``arguments`` of one row with its first tokens once more behind it, and their ``position_ids``."""
    more = length - positions.shape[1]
    found = {name: torch.cat([x, x[:, :more]], 1) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    if "attention_mask" in found:
        found["attention_mask"][:, -more:] = 1
    return {**found, "position_ids": torch.arange(length, device="cpu")[None] + positions[:, :1]}


def _find_loss(
    root: PreTrainedModel, run: Callable[..., Any], arguments: dict[str, Any], functions: TokenwiseFunctions
) -> Loss:
    calls: list[Any] = []  # whether each call gets the labels as shifted ones

    def loss_function(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs.get("shift_labels") is not None)
        return torch.zeros((), device="cpu")

    for module in root.modules():
        if isinstance(module, PreTrainedModel):
            vars(module)["_loss_function"] = loss_function
    forward, labels = function_of(root.forward), arguments["input_ids"].flip(1)
    if "skip_logits" in inspect.signature(root.forward).parameters:
        arguments = {**arguments, "skip_logits": False}  # as in calls of the parallelized model
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    functions.cross_entropies = found
    try:
        output = run(**{**arguments, "labels": labels})
        loss, logits = (output if isinstance(output, tuple) else output.to_tuple())[:2]
    except Exception:  # a loss that these labels do not fit
        return Loss(forward, bool(calls), in_place=any(calls))
    per_token = isinstance(logits, Tensor) and logits.dim() == 3
    if per_token and not calls and len(found) == 1 and found[0][0] is loss:
        for shift in (0, 1):
            inputs = logits[:, : logits.shape[1] - shift].flatten(0, 1), labels[:, shift:].flatten()
            if all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(inputs, found[0][1:], strict=True)):
                return Loss(forward, shift=shift)
    return Loss(forward, bool(calls), in_place=any(calls))


def _find_from_labels(root: PreTrainedModel, trial: Trial, run: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The function of ``from_labels`` that makes the same tokens from labels as the model's forward."""
    labels = arguments["input_ids"].clone()
    labels[:, 1::4] = IGNORE_INDEX
    others = {name: x for name, x in arguments.items() if name not in ("input_ids", "attention_mask")}
    trial.decoder_tokens = None
    with suppress(Exception):  # the decoder's tokens are known, whatever the model computes from them
        run(**others, labels=labels)
    for function in from_labels(root):
        with suppress(Exception):
            if isinstance(trial.decoder_tokens, Tensor) and torch.equal(function(labels), trial.decoder_tokens):
                return function
    return None


def _token_ids(root: PreTrainedModel, rows: int, length: int) -> Tensor:
    """int64 ``[rows, length]``. Each of rows 1 to 3 differs from row 0 in one token, and none has special tokens.

    The last row is row 0, shifted to the right.
    """
    config = root.config.get_text_config()
    special: set[int | None] = set()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        ids = getattr(config, name, None)
        special.update(ids if isinstance(ids, list) else [ids])
    ordinary = [i for i in range(min(config.vocab_size, 1000)) if i not in special][3 : length + 4]
    tokens = torch.tensor([ordinary[i % (len(ordinary) - 1)] for i in range(length)], device="cpu")
    tokens = tokens.repeat(rows, 1)
    for row, token in enumerate(_CHANGED, start=1):
        tokens[row, token] = ordinary[-1]
    tokens[-1] = tokens[0].roll(_SHIFT)
    return tokens


def _by_token(x: Tensor, rows: int, length: int) -> Tensor | None:
    """``x [rows, ..., length, ...]`` as ``[rows, length, channels]``, of which some are left out.

    None for any other shape, such as the inputs of experts: it is not known which values belong to which token.
    """
    if x.dim() < 2 or x.shape[0] != rows or list(x.shape[1:]).count(length) != 1:
        return None
    x = x.movedim(x.shape[1:].index(length) + 1, 1).reshape(rows, length, -1)
    return x[:, :, :: -(-x.shape[2] // _CHANNELS)] if x.shape[2] else None


def _tolerance(x: Tensor) -> float:
    return _TOLERANCE * max(float(x.abs().max()), 1e-6)


def _depends_on_others(x: Tensor) -> bool:
    """Whether changing one token of the input has changed another token in ``x [rows, length, channels]``."""
    change = (x[1 : len(_CHANGED) + 1] - x[:1]).abs().amax(2)  # [changed tokens, length]
    change[range(len(_CHANGED)), _CHANGED] = 0.0
    return float(change.max()) > _tolerance(x[0])


def _depends_on_index(x: Tensor) -> bool:
    """Whether shifting the tokens of row 0 has changed them in ``x [rows, length, channels]``."""
    return float((x[-1, _SHIFT:] - x[0, :-_SHIFT]).abs().max()) > _tolerance(x[0])


@contextmanager
def replaced_interface(replace: Callable[..., Any]) -> Iterator[None]:
    """In the block, transformers models get ``replace(implementation, function, look_up)`` as their attention function.

    ``look_up`` returns the function of the same layer by the name of any other implementation.
    """
    original = AttentionInterface.get_interface

    def look_up(self: AttentionInterface, attn_implementation: str, default: Any = None) -> Any:
        function = original(self, attn_implementation, default)
        return replace(attn_implementation, function, lambda name: self.get(name, default))

    # The method of the class is replaced, because some model files have an interface object of their own.
    with replaced(AttentionInterface, get_interface=look_up):
        yield
