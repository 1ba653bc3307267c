"""Predicts which strategy is the best at which scale, and why, from the plans that the runtime executes."""

from .choose import Plan, plan
from .hardware import HARDWARE, Hardware
from .memory import Memory, Switches
from .model import MODELS, ModelShape
from .step import Choice

__all__ = ["HARDWARE", "MODELS", "Choice", "Hardware", "Memory", "ModelShape", "Plan", "Switches", "plan"]
