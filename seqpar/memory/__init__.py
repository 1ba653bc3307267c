"""Layers that need less memory: tiled MLPs and losses, attention by groups of heads, checkpointing and offloading."""

from .loss import tiled_loss
from .switches import Memory, restore

__all__ = ["Memory", "restore", "tiled_loss"]
