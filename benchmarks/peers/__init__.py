"""Adapters for the distributed attention of other packages, for ``seqpar bench``: one adapter in each module.

This folder is installed as ``seqpar.peers``. ``requirements.txt`` lists the packages that can be installed on every
machine; none of them is a dependency of seqpar. ``seqpar.cli.bench_runners`` documents the argument and the result of
an adapter. An adapter only calls its package and computes nothing else. Its results are compared with one device's
before it is timed.
"""

PEERS = (
    "deepspeed_ulysses",
    "ring_attention_lucidrains",
    "ring_flash",
    "usp",
    "transformer_engine_p2p",
    "magi",
    "torch_context_parallel",
    "gather_sdpa",
)
