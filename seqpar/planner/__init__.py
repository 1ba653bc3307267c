"""Predicts which strategy is the best at which scale, and why, from the plans that the runtime executes.

``plan`` (``choose.py``) compares every ``Setting`` (``setting.py``): a model (``shape.py``; ``model.py`` finds one by
name, ``count.py`` counts it) on a cluster (``hardware.py``) with one split of the ranks (``splits.py``). For each,
``step.py`` predicts the time of a training step, ``forecast.py`` its range and ``memory.py`` its memory. The time comes
from a simulation (``simulate.py``) of one layer of each kind (``layer.py``) and its attention (``attention.py``,
``messages.py``, ``pairs.py``) or mixer (``mixer.py``, ``mixer_layer.py``).
``reasons.py`` says why a choice has its place, and ``code.py`` writes it as code.
"""

from .choose import Plan, plan
from .hardware import HARDWARE, Hardware
from .memory import Memory, Switches
from .mixer import Mixer
from .model import MODELS
from .shape import Kind, ModelShape
from .step import Choice

__all__ = [
    "HARDWARE",
    "MODELS",
    "Choice",
    "Hardware",
    "Kind",
    "Memory",
    "Mixer",
    "ModelShape",
    "Plan",
    "Switches",
    "plan",
]
