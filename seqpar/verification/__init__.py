"""Comparisons, and what a difference means: a training step with one device's, and attention with its replay.

``verify`` (``step.py``) and ``seqpar.hf.verify`` have the same report (``report.py``), and the same comparison of
gradients (``gradients.py``). ``replay_report`` (``replayed.py``) compares the bits of one attention call.
"""

from .replayed import ReplayReport, replay_report
from .report import VerificationError, VerificationReport
from .step import verify

__all__ = ["ReplayReport", "VerificationError", "VerificationReport", "replay_report", "verify"]
