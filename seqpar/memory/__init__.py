"""Layers that need less memory: tiled MLPs, attention by groups of heads, checkpointing and offloading."""

from .switches import Memory, restore

__all__ = ["Memory", "restore"]
