"""The order of point-to-point messages in an exchange between all pairs of ranks."""

from __future__ import annotations

# The most peers in one group of messages.
_MAX_PEERS = 16


def p2p_rounds(ranks: int, rank: int) -> list[list[int]]:
    """The peers of ``rank`` in an exchange between all pairs of ranks, in groups of at most 16.

    The peers come from the rounds of a round-robin tournament (the circle method), which pairs every rank with one peer
    in each round. A group is a number of rounds, the same rounds on every rank. So whatever a rank sends or receives in
    its ``i``-th group, its peers receive or send in their ``i``-th group. NCCL divides a group with more operations
    than it can launch at once into parts, in an order that differs between ranks. Ranks that wait for one another's
    later parts would then deadlock. A group of 16 peers has at most 32 operations, which NCCL launches at once.
    """
    players = ranks + ranks % 2  # with an odd number of ranks, one of them has no peer in each round
    peers = []
    for turn in range(players - 1):
        if rank == players - 1:
            peer = turn * (players // 2) % (players - 1)  # 2 * peer = turn, modulo players - 1
        else:
            peer = (turn - rank) % (players - 1)
            peer = players - 1 if peer == rank else peer
        peers.append(peer)
    groups = [peers[i : i + _MAX_PEERS] for i in range(0, len(peers), _MAX_PEERS)]
    return [[peer for peer in group if peer < ranks] for group in groups]
