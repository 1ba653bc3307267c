"""``strategy="auto"``: the rule that names a strategy before anything runs.

The rule reads only what every rank knows alike, so the ranks take the same strategy without a message. It sums
up what the planner simulates (``step.attention_seconds``) for 2 to 32 H100s and 512 to 32,768 tokens on each.
``tests/planner/test_rules.py`` compares it with the simulation, ``seqpar bench`` with this machine.

* An all-to-all is exposed, and a ring overlaps with its kernels. But a ring has more messages and smaller kernels. So
  Ulysses is faster for short sequences, and both take the same time for long ones.
* Under windows and packed documents a ring sends only the few rows that the queries see. Ulysses sends all of them.
* In a balanced layout (``Sharding.balanced``) a rank has several runs of tokens, which need rows of many ranks. Ulysses
  inside each host joins the runs of its ranks.
* If each rank has one run, as in the contiguous layout, the last rank of a causal ring has almost twice the mean work.
  An all-to-all shares the tokens of its ranks evenly.
* Between hosts, a ring sends K/V once to each host, and an all-to-all sends queries and outputs too. These are no more
  bytes than K/V if there are as many KV heads as query heads, and many more with grouped heads.

All of these strategies need memory for a few shards of K/V at a time, so whichever is named, what fits under one fits
under the others. An all-gather, which holds K/V of all ranks, is never named.
"""

from __future__ import annotations

from operator import index

import torch

from ..comm.trace import count_choice
from ..masks.mask import Mask
from ..placement.layout import Grain, TokenLayout
from ..placement.strategies import StrategyName, StrategyOptions
from ..sharding.sharding import Sharding
from ..sharding.spec import AttentionSpec, constants


def named(spec: AttentionSpec, mask: Mask, heads: int, kv_heads: int, sharding: Sharding) -> AttentionSpec:
    """``spec`` with the strategy that the rule names in place of "auto"."""
    if spec.strategy != "auto":
        return spec
    is_local = mask.is_local or (spec.layer_mask is not None and any(spec.layer_mask[1:]))
    ranks = sharding.ranks
    strategy, options = fastest(is_local, heads, kv_heads, sharding.grain, ranks, sharding.per_host)
    if ranks > 1 and not torch.compiler.is_compiling():
        count_choice(strategy)
    return spec.having(strategy=strategy, strategy_options=constants(options))


def fastest(
    is_local: bool, heads: int, kv_heads: int, grain: Grain, ranks: int, per_host: int
) -> tuple[StrategyName, StrategyOptions]:
    """The strategy that should be the fastest, and its options on a plain group.

    Args:
        is_local: whether queries see few keys of other ranks (``Mask.is_local``).
        heads: query heads.
        kv_heads: KV heads.
        grain: how the tokens of a rank lie in the sequence.
        ranks: the number of ranks that the sequence is sharded over.
        per_host: how many consecutive ranks share a host.
    """
    # torch.compile may have turned them into variables, also the hosts, which the first attention may find out.
    heads, kv_heads, ranks, per_host = index(heads), index(kv_heads), index(ranks), index(per_host)
    if ranks == 1 or (is_local and grain in ("one run", "two runs")):
        return "ring", {}
    if ranks == 2 and grain != "one run":
        return "ring", {}  # one message, which overlaps with the rank's own keys
    costs = []
    for ulysses in range(1, min(ranks, heads) + 1):
        if ranks % ulysses:
            continue
        work = -(-heads // ulysses) * ulysses / heads  # of the rank with the most heads, over the mean
        if grain == "one run":
            work *= 2 - ulysses / ranks  # of the last rank of a causal ring, over the mean
        sends_more = kv_heads < heads or (is_local and grain == "several runs")  # than a ring between hosts
        between_hosts = ulysses > 1 and per_host % ulysses > 0 and sends_more
        costs.append((work, between_hosts, -ulysses))
    ulysses = -min(costs)[2]
    if ulysses in (1, ranks):
        return ("ring" if ulysses == 1 else "ulysses"), {}
    return "hybrid", {"ulysses_size": ulysses}


def sends_states(tokens: TokenLayout, per_host: int, heads: int, token_bytes: int, state_bytes: int) -> bool:
    """Whether a recurrence sends the states of runs, rather than all tokens of some heads. The same on every rank.

    States are computed in three passes over the tokens instead of one. They pay where ranks would have no heads, or
    where messages go between hosts, if they are fewer bytes.

    Args:
        tokens: which tokens each rank holds.
        per_host: how many consecutive ranks share a host.
        heads: the number of heads.
        token_bytes: of one token in the all-to-all to heads and back.
        state_bytes: of what one run of consecutive tokens does to the state.
    """
    if heads >= tokens.ranks == per_host:
        return False
    return tokens.runs * state_bytes < tokens.seq_len * token_bytes // tokens.ranks


def sends_halo(tokens: TokenLayout, width: int) -> bool:
    """Whether a convolution sends the ``width`` tokens before each run, rather than all tokens of some channels."""
    return tokens.runs * width < tokens.seq_len
