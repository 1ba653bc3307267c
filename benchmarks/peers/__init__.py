"""Other packages' distributed attention, for ``seqpar bench``: one adapter in each module.

Installed as ``seqpar.peers``. ``requirements.txt`` lists those that install everywhere; none is a dependency of seqpar.
``seqpar.cli.comparison.peers`` says what an adapter is given and what it returns. It may not compute anything besides
calling the package, and its results are compared with one device's before it is timed.
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
