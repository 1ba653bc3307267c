"""``RankTimeline``: records what one rank computes and sends for a layer, in the order of the runtime."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .simulate import Timeline
from .split import BETWEEN, ELEMENT_BYTES, LEVELS, WITHIN, Split, Switches

Sizes = Iterable[tuple[int, float]]  # of messages: the index of the other rank, and the bytes


class RankTimeline:
    """Records the kernels and the messages of one rank of the first replica.

    Args:
        split: the sequence with the mask of the layer, the cluster and the split of the ranks.
        ring: the index of the rank in its ring; by default the slowest rank's.
        ulysses, tensor: the index along the other dimensions. Rank 0 has at least as many heads as any other.
        switches: what is recomputed, and in how many groups of heads attention is computed.
        timeline: where it is recorded, by default a new one.
    """

    def __init__(
        self,
        split: Split,
        ring: int | None = None,
        ulysses: int = 0,
        tensor: int = 0,
        switches: Switches | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.split, self.ulysses, self.tensor = split, ulysses, tensor
        self.ring = split.slowest_ring_rank() if ring is None else ring
        self.switches, self.timeline = switches or Switches(), timeline or Timeline()
        rank = (self.ring * split.ulysses + ulysses) * split.tensor + tensor
        self.tokens = len(split.tokens._positions(rank, 1)) * split.batch

    @property
    def among_all(self) -> RankTimeline:
        """The rank in an all-to-all over all ranks of the sequence, on the same timeline."""
        s = self.split
        split = replace(s, ring=1, ulysses=s.ring * s.ulysses)
        return RankTimeline(split, 0, self.ring * s.ulysses + self.ulysses, 0, self.switches, self.timeline)

    # Kernels

    def compute(self, name: str, flops: float = 0.0, nbytes: float = 0.0) -> None:
        """Record matrix products of ``flops``, or reading and writing ``nbytes``, whichever takes longer."""
        hardware = self.split.hardware
        self.timeline.compute(name, max(flops / hardware.gemm_flops, nbytes / hardware.memory_bandwidth))

    def memory_bound(self, name: str, elements: float) -> None:
        """Record the reading and writing of ``elements`` of each token."""
        self.compute(name, nbytes=elements * self.tokens * ELEMENT_BYTES)

    def gemm_seconds(self, weights: float) -> float:
        """Seconds in which this rank multiplies the tokens of all tensor-parallel ranks by its shard of a weight.

        With t tensor-parallel ranks these are t times the rank's own tokens and 1 / t of the weight, so the FLOPs count
        its own tokens and all ``weights``.
        """
        return 2.0 * self.tokens * weights / self.split.hardware.gemm_flops

    def linear(self, name: str, hidden: int, gathered: float = 0.0, summed: float = 0.0) -> None:
        """Record the GEMMs of a linear layer, in which t tensor-parallel ranks compute t chunks of the tokens.

        ``gathered`` seconds need the tokens of all ranks, which are sent meanwhile; the last chunk arrives before it is
        multiplied. The partial outputs of ``summed`` seconds are reduce-scattered; the first chunk is computed before
        it is sent.
        """
        t, nbytes, peer = self.split.tensor, self.tokens * hidden * ELEMENT_BYTES, self.split.hardware.peer
        tokens = self.gather("tokens", "tensor", "tensor", nbytes, peer) if gathered else None
        self.timeline.compute(name, summed / t)
        sums = self.gather("partial outputs", "tensor", "tensor", nbytes, peer) if summed else None
        self.timeline.compute(name, (gathered + summed) * (t - 1) / t)
        self.timeline.wait(tokens)
        self.timeline.compute(name, gathered / t)
        self.timeline.wait(sums)

    # Messages

    def start(
        self,
        name: str,
        stream: str,
        along: str,
        sent: Sizes,
        received: Sizes,
        bandwidth_within: float | None = None,
        rounds: int = 1,
    ) -> int | None:
        """Record messages that this rank sends and receives in one exchange, and count the bytes that it sends.

        A link is used for as long as the larger direction of the exchange takes.

        Args:
            name: what is sent.
            stream: the communicator, whose exchanges run one after another.
            along: the dimension of the other ranks: "ring", "ulysses" or "tensor".
            sent, received: each message. A message of this rank to itself is left out.
            bandwidth_within: bytes/s inside the host, for a collective. By default the bandwidth of point-to-point
                messages to as many peers.
            rounds: how many of the messages are sent one after another, each with its latency.

        Returns:
            The number of the transfer for ``timeline.wait``; None if there is nothing to transfer.
        """
        hardware, links = self.split.hardware, {}
        directions = [self._by_level(along, sizes) for sizes in (sent, received)]
        for level, sizes in directions[0].items():
            self.timeline.sent[level] += int(sum(sizes))
        if size := max(sum(x[WITHIN]) for x in directions):
            peers = max(1, *(len(x[WITHIN]) for x in directions))
            links[WITHIN] = size / min(bandwidth_within or hardware.p2p, hardware.peer * peers)
        if size := max(sum(x[BETWEEN]) for x in directions):
            links[BETWEEN] = size / hardware.network
        return self.timeline.start(name, stream, links, rounds * hardware.latency)

    def gather(self, name: str, stream: str, along: str, nbytes: float, bandwidth_within: float) -> int | None:
        """Record an all-gather or a reduce-scatter, in which each rank sends ``nbytes`` to each other rank."""
        ranks = {"ulysses": self.split.ulysses, "tensor": self.split.tensor}[along]
        sizes = [(peer, nbytes) for peer in range(ranks)]
        return self.start(name, stream, along, sizes, sizes, bandwidth_within, ranks - 1)

    def _by_level(self, along: str, sizes: Sizes) -> dict[str, list[float]]:
        """The bytes of the messages by the level of their link."""
        own = {"ring": self.ring, "ulysses": self.ulysses, "tensor": self.tensor}
        found: dict[str, list[float]] = {level: [] for level in LEVELS}
        for peer, size in sizes:
            same_host = self.split.host(**own) == self.split.host(**{**own, along: peer})
            if peer != own[along]:
                found[WITHIN if same_host else BETWEEN].append(size)
        return found
