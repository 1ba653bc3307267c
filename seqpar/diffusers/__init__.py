"""Diffusers' video and image transformers with their tokens sharded over ranks: whole inputs in, the whole output out.

``parallelize`` a transformer or a pipeline, call it as before, and average the gradients with
``seqpar.sync_gradients``, DDP or FSDP2.
"""

from .patch import gather, parallelize, restore
from .plans import Across, Cut, Plan

__all__ = ["Across", "Cut", "Plan", "gather", "parallelize", "restore"]
