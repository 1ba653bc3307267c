"""``model_of``: the ``ModelShape`` of a model, by name or from a configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.checks import check_choice
from .attention import SelfAttention
from .chosen_keys import ChosenKeys
from .diffusion import shape_of
from .hardware import read_mapping
from .mixer import Mixer
from .mlp import Mlp
from .part import LayerPart
from .shape import Layer, ModelShape


def model_of(value: str | Path | Mapping[str, Any] | ModelShape | Any) -> ModelShape:
    """The ``ModelShape`` of a model. Nothing is read from the network.

    Args:
        value: a name of ``MODELS``, the path of a ``config.json`` of transformers or diffusers or of its folder, a
            config object, a mapping with the entries of a ``config.json``, or a ``ModelShape``, which is returned as
            it is.

    Raises:
        TypeError: ``value`` has another type.
        ValueError: the name or the file does not exist, transformers is needed and not installed, or the configuration
            contradicts itself, lacks a size or has layers that are not modelled.
    """
    if isinstance(value, ModelShape):
        return value
    if isinstance(value, str | Path):
        path = Path(value)
        if path.is_dir() and (path / "config.json").exists():
            path = path / "config.json"
        if path.suffix == ".json" or path.is_file():
            name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
            return _of_config(read_mapping("model", path), name)
        try:
            check_choice("model", str(value).lower(), MODELS)
        except ValueError as error:
            raise ValueError(f"{error}, or pass the path of the model's config.json") from None
        return MODELS[str(value).lower()]
    if isinstance(value, Mapping):
        return _of_config(value, str(value.get("model_type", value.get("_class_name", "model"))))
    if callable(getattr(value, "to_dict", None)):
        return _of_config(value, str(getattr(value, "model_type", "model")))
    raise TypeError(f"model={value!r}: expected a name, the path of a config.json, a config object or a dict")


def _of_config(config: Any, name: str) -> ModelShape:
    if isinstance(config, Mapping) and "_class_name" in config:
        return shape_of(config, name)
    from .count import counted_shape

    return counted_shape(config, name)


# By the names of ``models.json``.
_PARTS: dict[str, type[LayerPart]] = {"attention": SelfAttention, "chosen keys": ChosenKeys, "mixer": Mixer, "mlp": Mlp}


def _named(name: str, config: dict[str, Any], shape: dict[str, Any] | None = None) -> ModelShape:
    """The shape of an entry of ``models.json``: of transformers as ``counted_shape`` has counted it."""
    if shape is None:
        return _of_config(config, name)
    hidden, rows = shape.pop("hidden"), shape.pop("layers")
    layers = (Layer(n, tuple(_PARTS[kind](hidden, **sizes) for kind, sizes in parts.items())) for n, parts in rows)
    return ModelShape(name, tuple(layers), **shape)


def _table() -> dict[str, ModelShape]:
    table = json.loads(Path(__file__).with_name("models.json").read_text())["models"]
    return {name: _named(name, *entry[1:]) for name, entry in table.items()}


MODELS = _table()
