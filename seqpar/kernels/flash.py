"""Attention on the FlashAttention kernels in PyTorch (``flash``) or in an installed package.

The backward of the packages' public functions takes no ``lse``, so the private functions below them are called. These
change from version to version, so arguments are matched with the signatures of the installed version.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..base.settings import switch
from ..schedule.rows import KeyIntervals, united
from .bands import Abilities
from .base import head_dims
from .block_lists import interval_arguments, takes_block_sizes, too_long
from .library import LibraryBackend, Options, PreparedCall

_forward: Any = torch.ops.aten._flash_attention_forward.default
_backward: Any = torch.ops.aten._flash_attention_backward.default
# If this environment variable is on, kernels that are not installed are downloaded from the Hugging Face Hub.
HUB_VARIABLE = "SEQPAR_HUB_KERNELS"
# The arguments that FlashAttention-4's functions need for key intervals.
_INTERVAL_ARGUMENTS = {"mask_mod", "aux_tensors", "block_sparse_tensors"}


class TorchFlashBackend(LibraryBackend):
    """The FlashAttention-2 kernels in PyTorch's CUDA builds."""

    name = "flash"
    abilities = Abilities(gaps=True)

    def unavailable(self) -> str | None:
        return _no_cuda()

    def refused_head_dim(self, head_dim: int, v_head_dim: int, capability: tuple[int, int]) -> str | None:
        return super().refused_head_dim(head_dim, v_head_dim, capability) or _small_card(head_dim, capability)

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _forward(q, k, v, *_boundaries(options), 0.0, options.causal, False, **_window(options))
        return out, lse

    def call_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # the random state of dropout
        dq, dk, dv = _backward(
            dout, q, k, v, out, lse, *_boundaries(options), 0.0, options.causal, unused, unused, **_window(options)
        )
        return dq, dk, dv


def _boundaries(options: Options) -> tuple[Tensor | None, Tensor | None, int, int]:
    return options.cu_q, options.cu_k, options.max_q, options.max_k


def _window(options: Options) -> dict[str, Any]:
    window: dict[str, Any] = {"scale": options.softmax_scale}
    if not options.causal and options.left >= 0:
        window.update(window_size_left=options.left, window_size_right=options.right)
    return window


class Hub(NamedTuple):
    """A repository of the Hugging Face Hub with a module prebuilt. A version keeps its interface, and its newest build
    is loaded."""

    repository: str
    version: int
    needs: str  # what its builds run with


class PackageBackend(LibraryBackend):
    """The kernels of an installed package.

    Attributes:
        module, install: the module to import, and the command that installs it.
        hub: where the module is prebuilt, or None.
        required: for each function of the module, the arguments that it must have. "a.b" is ``b`` of its module ``a``.
    """

    module: str
    install: str
    hub: ClassVar[Hub | None]
    required: ClassVar[dict[str, tuple[str, ...]]]
    softcap = True
    optionally_deterministic = True

    def unavailable(self) -> str | None:
        if (why := _no_cuda()) is not None:
            return why
        loaded = _load(self.module, self.install, self.hub)
        if isinstance(loaded, str):
            return loaded
        for name, arguments in self.required.items():
            known = _parameters(_function(loaded, name))
            if missing := [argument for argument in arguments if argument not in known]:
                return f"the installed {self.module} is too old or too new: {name} has no {', '.join(missing)}"
        return None

    def call(self, function: str, *tensors: Tensor, **arguments: Any) -> Any:
        """Call a function of the module with the arguments that its signature has, and None where it has no default."""
        found = _function(_load(self.module, self.install, self.hub), function)
        known = _parameters(found)
        rest = {name: arguments.get(name) for name in list(known)[len(tensors) :] if name in arguments or known[name]}
        device = tensors[0].device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # some launch on the current device
            return found(*tensors, **rest)

    def arguments(self, options: Options) -> dict[str, Any]:
        """The arguments that the functions of some version take."""
        return {
            "softmax_scale": options.softmax_scale,
            "softcap": options.softcap,
            "causal": options.causal,
            "is_causal": options.causal,
            "window_size": (options.left, options.right),
            "window_size_left": options.left,
            "window_size_right": options.right,
            "cu_seqlens_q": options.cu_q,
            "cu_seqlens_k": options.cu_k,
            "max_seqlen_q": options.max_q,
            "max_seqlen_k": options.max_k,
            "dropout_p": 0.0,
            "alibi_slopes": None,
            "return_softmax": False,
            "deterministic": self.deterministic,
        }


class FlashAttention2Backend(PackageBackend):
    """FlashAttention-2, the package flash-attn from 2.7 on."""

    name = "flash_attn"
    module, install = "flash_attn.flash_attn_interface", "pip install 'seqpar[flash]'"
    hub = Hub("kernels-community/flash-attn2", 4, "PyTorch 2.10 or newer")
    required: ClassVar = {
        "_flash_attn_forward": ("window_size_left",),
        "_flash_attn_backward": ("softmax_lse",),
        "_flash_attn_varlen_forward": ("window_size_left",),
        "_flash_attn_varlen_backward": ("softmax_lse",),
    }
    abilities = Abilities(gaps=True)

    def refused_head_dim(self, head_dim: int, v_head_dim: int, capability: tuple[int, int]) -> str | None:
        return super().refused_head_dim(head_dim, v_head_dim, capability) or _small_card(head_dim, capability)

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        function = "_flash_attn_forward" if options.cu_q is None else "_flash_attn_varlen_forward"
        out, lse, *_ = self.call(function, q, k, v, **self.arguments(options))
        return out, lse

    def call_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        function = "_flash_attn_backward" if options.cu_q is None else "_flash_attn_varlen_backward"
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        self.call(function, dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, **self.arguments(options))
        return dq, dk, dv


class FlashAttention3Backend(PackageBackend):
    """FlashAttention-3: the folder hopper of the repository flash-attention."""

    name = "flash_attn_3"
    module = "flash_attn_interface"
    install = "build the folder hopper of github.com/Dao-AILab/flash-attention"
    hub = Hub("kernels-community/flash-attn3", 1, "PyTorch 2.9 or newer")
    required: ClassVar = {
        "_flash_attn_forward": ("cu_seqlens_q", "softcap", "num_splits"),
        "_flash_attn_backward": ("cu_seqlens_q", "softcap", "deterministic"),
    }
    capabilities = (9,)

    def refused_head_dim(self, head_dim: int, v_head_dim: int, capability: tuple[int, int]) -> str | None:
        if 128 < head_dim <= 192 and 96 < v_head_dim <= 128:
            return None
        if self.deterministic and head_dim > 192:
            return f"head_dim={head_dim} (at most 192 if deterministic)"
        return super().refused_head_dim(head_dim, v_head_dim, capability)

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.call("_flash_attn_forward", q, k, v, num_splits=1, **self.arguments(options))
        return out, lse

    def call_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        self.call("_flash_attn_backward", dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, **self.arguments(options))
        return dq, dk, dv


class FlashAttention4Backend(PackageBackend):
    """FlashAttention-4, the package flash-attn-4. It takes key intervals: of unions, and of steps with many bands."""

    name = "flash_attn_4"
    module, install = "flash_attn.cute.interface", "pip install --pre 'seqpar[flash4]'"
    hub = Hub("kernels-community/flash-attn4", 0, "PyTorch built with CUDA 12.8 or newer, and nvidia-cutlass-dsl")
    required: ClassVar = {
        "_flash_attn_fwd": ("softmax_scale", "window_size_left", "return_lse", "cu_seqlens_q"),
        "_flash_attn_bwd": ("lse", "softmax_scale", "window_size_left", "cu_seqlens_q", "deterministic"),
    }
    capabilities = (9, 10, 11)

    def able(self, q: Tensor) -> Abilities:
        # The sizes of blocks are right for head_dims up to 128. The deterministic backward would also need the order in
        # which blocks are added to dq.
        taken = q.shape[-1] <= 128 and not self.deterministic
        kernels = _load(self.module, self.install, self.hub)
        return replace(self.abilities, intervals=taken and _takes_intervals(kernels))

    def refused_head_dim(self, head_dim: int, v_head_dim: int, capability: tuple[int, int]) -> str | None:
        largest = 256 if capability[0] == 9 else 128
        if max(head_dim, v_head_dim) <= largest or (head_dim, v_head_dim) in ((192, 128), (256, 256)):
            return None
        known = f"up to {largest}, 192 and 128, or 256, on compute capability {capability[0]}.x"
        return f"{head_dims(head_dim, v_head_dim)} ({known})"

    def arguments(self, options: Options) -> dict[str, Any]:
        sides = {"window_size_left": options.left, "window_size_right": options.right}
        arguments = super().arguments(options)
        arguments |= {name: None if options.causal or side < 0 else side for name, side in sides.items()}
        if options.cu_q is None:
            arguments |= {"max_seqlen_q": None, "max_seqlen_k": None}
        return arguments

    def unites(self, parts: Sequence[KeyIntervals], q: Tensor, k: Tensor) -> bool:
        return super().unites(parts, q, k) and self.launches(united(parts), q, k) is not None

    def launches(self, intervals: KeyIntervals, q: Tensor, k: Tensor) -> list[PreparedCall] | None:
        found = super().launches(intervals, q, k)
        return None if found and found[0].call.masked and too_long(intervals, q, k) else found

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        arguments = self.arguments(options) | interval_arguments(options.intervals, q, k, backward=False)
        out, lse, *_ = self.call("_flash_attn_fwd", q, k, v, return_lse=True, **arguments)
        return out, lse

    def call_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        arguments = self.arguments(options) | interval_arguments(options.intervals, q, k, backward=True)
        dq, dk, dv, *_ = self.call("_flash_attn_bwd", q, k, v, out, dout, lse, **arguments)
        return dq, dk, dv


@lru_cache(maxsize=4)
def _takes_intervals(loaded: ModuleType | str) -> bool:
    functions = (getattr(loaded, name, None) for name in FlashAttention4Backend.required)
    known = all(set(_parameters(function)) >= _INTERVAL_ARGUMENTS for function in functions)
    return known and takes_block_sizes()


def _no_cuda() -> str | None:
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    return None if torch.cuda.is_available() else "no CUDA GPU"


def _small_card(head_dim: int, capability: tuple[int, int]) -> str | None:
    """Why FlashAttention-2's backward cannot run: for some head_dims it needs more shared memory than graphics GPUs
    have. None if it can."""
    if capability[0] in (8, 12) and capability != (8, 0) and 192 < head_dim <= 224:
        return f"head_dim={head_dim} (not 193 to 224 on compute capability {capability[0]}.{capability[1]})"
    return None


def _function(module: ModuleType | str, name: str) -> Any:
    """A function of a module, or of a module in it; None if there is none."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


@lru_cache(maxsize=16)
def _load(module: str, install: str, hub: Hub | None) -> ModuleType | str:
    """The module, or why there is none. Cached: a failed import is not repeated."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package built for another PyTorch raises more than ImportErrors
        top = module.split(".")[0]
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").startswith(top)
        why = "not installed" if missing else f"its import failed: {type(error).__name__}: {error}"
    if hub is None:
        return f"{module}: {why} ({install})"
    if not switch(HUB_VARIABLE):
        prebuilt = f"or pip install 'seqpar[hub]' and set {HUB_VARIABLE}=1 for prebuilt kernels of {hub.repository}"
        return f"{module}: {why} ({install}; {prebuilt})"
    return _load_from_hub(module.split(".")[-1], hub)


def _load_from_hub(module: str, hub: Hub) -> ModuleType | str:
    if find_spec("kernels") is None:
        return f"{HUB_VARIABLE}=1, but the package kernels is not installed (pip install 'seqpar[hub]')"
    try:
        from kernels import get_kernel

        found: ModuleType = getattr(get_kernel(hub.repository, version=hub.version), module)
    except Exception as error:  # no network, no kernel for this PyTorch, ...
        return (
            f"version {hub.version} of {hub.repository} could not be loaded with PyTorch {torch.__version__}: it needs "
            f"{hub.needs}, and the package kernels 0.16 or newer ({type(error).__name__}: {error})"
        )
    return found


@lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any] | None) -> dict[str, bool]:
    """The names of a function's arguments, and whether each has no default; none without a function."""
    if function is None:
        return {}
    signature = inspect.signature(getattr(function, "_init_fn", function))  # of a torch custom operator
    return {name: parameter.default is parameter.empty for name, parameter in signature.parameters.items()}
