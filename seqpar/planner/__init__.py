"""Predicts which strategy is the best at which scale, and why, from the plans that the runtime executes.

``plan`` (``choose.py``) compares every ``Setting`` (``setting.py``): a model (``shape.py``; ``model.py`` finds one by
name, ``count.py`` counts it) on a cluster (``hardware.py``) with one split of the ranks (``split.py``, ``splits.py``).
A model is rows of layers, and a layer is parts: each kind of part is a class of one file with its sizes, its memory and
its time (``part.py``, ``attention.py``, ``chosen_keys.py``, ``compressed_keys.py``, ``mixer.py``, ``mlp.py``).
For each setting, ``step.py`` predicts the time of a training step from a simulation (``simulate.py``) of one layer of
each row, ``forecast.py`` its range and ``memory.py`` its memory. ``reasons.py`` says why a choice has its place, and
``code.py`` writes it as code.
"""

from .attention import SelfAttention
from .choose import Plan, plan
from .chosen_keys import ChosenKeys
from .compressed_keys import CompressedKeys, Streams
from .hardware import HARDWARE, Hardware
from .memory import MemoryUse
from .mixer import Mixer
from .mlp import CrossAttention, Mlp
from .model import MODELS
from .prompts import PromptSharing, prompt_sharing
from .shape import Layer, ModelShape
from .split import Switches
from .step import Choice

__all__ = [
    "HARDWARE",
    "MODELS",
    "Choice",
    "ChosenKeys",
    "CompressedKeys",
    "CrossAttention",
    "Hardware",
    "Layer",
    "MemoryUse",
    "Mixer",
    "Mlp",
    "ModelShape",
    "Plan",
    "PromptSharing",
    "SelfAttention",
    "Streams",
    "Switches",
    "plan",
    "prompt_sharing",
]
