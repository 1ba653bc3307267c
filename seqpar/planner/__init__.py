"""Which strategy, at what scale, and why: predictions from the plans that the runtime executes."""

from .choose import Choice, Plan, plan
from .hardware import HARDWARE, Hardware
from .memory import Memory, Switches
from .model import MODELS, ModelShape

__all__ = ["HARDWARE", "MODELS", "Choice", "Hardware", "Memory", "ModelShape", "Plan", "Switches", "plan"]
