"""One training step of any model, sharded and on one device, and what a difference means.

``verify`` (``step.py``) and ``seqpar.hf.verify`` have the same report (``report.py``), and the same comparison of
gradients (``gradients.py``).
"""

from .report import VerificationError, VerificationReport
from .step import verify

__all__ = ["VerificationError", "VerificationReport", "verify"]
