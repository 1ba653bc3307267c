"""Objects that operators of ``torch.library`` take besides tensors and numbers.

A mask or a sharding changes from step to step. If torch.compile traced into such an object, it would recompile for each
new one. It does not trace into objects of a type that is registered here, but passes them to the operators at every
call. These objects must be made outside of the compiled function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from torch._library import opaque_object
from torch._library.opaque_object import MemberType

# The base class of a registered type, and how types are registered: torch 2.14 renamed both.
if TYPE_CHECKING or not hasattr(opaque_object, "register_custom_class"):
    from torch._opaque_base import OpaqueBase

    Opaque = OpaqueBase
    _register, _BY_REFERENCE, _BY_VALUE = opaque_object.register_opaque_type, "reference", "value"
else:
    from torch._custom_class_base import CustomClassBase

    Opaque = CustomClassBase
    _register, _BY_REFERENCE, _BY_VALUE = opaque_object.register_custom_class, "symbolic", "constant"

Type = TypeVar("Type", bound=type[Any])


def register_reference_type(
    guards: Callable[[Any], list[Any]] | None = None, reads: Iterable[str] = ()
) -> Callable[[Type], Type]:
    """Register a subclass of ``Opaque``.

    A dataclass does not show its fields afterwards (``hide_fields``).

    Args:
        guards: the values that a compiled function depends on. It is compiled again for an object with other values.
        reads: attributes that are read when a function is compiled. ``guards`` must include them.
    """

    def register(cls: Type) -> Type:
        members = dict.fromkeys(reads, MemberType.USE_REAL)
        _register(cls, typ=_BY_REFERENCE, guard_fn=guards, members=members)
        return hide_fields(cls)

    return register


def hide_fields(cls: Type) -> Type:
    """Decorates a class whose objects are arguments of modules: a dataclass does not show its fields afterwards.

    With mixed precision, FSDP looks for tensors in the fields of its module's arguments, and makes a new object from
    the fields. Fields that are computed do not allow that.
    """
    if "__dataclass_fields__" in vars(cls):
        del cls.__dataclass_fields__
    return cls


def register_constant_type(*fields: type[Any]) -> Callable[[Type], Type]:
    """Register a frozen dataclass of constants. A compiled function is compiled again for other values.

    Args:
        fields: the registered classes of its fields.
    """

    def register(cls: Type) -> Type:
        names = {used.__name__: used for used in (cls, *fields)}

        def fx_repr(self: Any) -> tuple[str, dict[str, Any]]:
            return repr(self), names

        cls.__fx_repr__ = fx_repr
        members = dict.fromkeys((name for name in (*cls.__annotations__, *vars(cls))), MemberType.USE_REAL)
        _register(cls, typ=_BY_VALUE, members=members)  # torch 2.11 refuses members that are not registered
        return cls

    return register


def unwrap(x: Any) -> Any:
    """The object itself. While torch.compile traces, an operator receives a wrapper around it."""
    return getattr(x, "real_obj", x)
