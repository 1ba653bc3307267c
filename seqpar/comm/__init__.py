"""Communication: what moves between ranks, how it is started and waited for, and how it is counted."""

from .agree import agree, global_length, refusing
from .exchange import Pending, exchange, make_ready
from .gather import all_gather
from .heads import Arriving, HeadExchange, HeadPart
from .trace import Trace, trace
from .untraced import untraced

__all__ = [
    "Arriving",
    "HeadExchange",
    "HeadPart",
    "Pending",
    "Trace",
    "agree",
    "all_gather",
    "exchange",
    "global_length",
    "make_ready",
    "refusing",
    "trace",
    "untraced",
]
