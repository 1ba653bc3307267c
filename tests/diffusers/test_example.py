"""``examples/video.py``: ranks that share a video have the losses of one process, with all weights and with LoRA."""

from __future__ import annotations

import pytest
from torch.distributed import ProcessGroup

pytest.importorskip("diffusers")
pytest.importorskip("peft")

from ..pool import OwnPool, on_ranks, start
from ..reference import assert_close

pytestmark = pytest.mark.slow


@on_ranks
def losses_of_rank(group: ProcessGroup, port: int, run: str, argv: list[str]) -> list[float]:
    from examples import video

    start(port, run, group.rank(), group.size())
    return video.main(argv)


def test_the_losses_of_one_process(own: OwnPool) -> None:
    def train(ranks: int, *argv: str) -> list[list[float]]:
        run = " ".join((str(ranks), *argv))
        return own.pool.run(ranks, losses_of_rank, own.port, run, ["--steps=2", *argv])

    for argv in ((), ("--lora=4", "--strategy=ulysses")):
        (expected,) = train(1, *argv)
        assert len(expected) == 2
        for losses in train(2, *argv):
            assert_close(losses, expected)
    by_rank = train(4, "--dp=2")  # rank 0 and 1 share a video
    assert by_rank[0] == by_rank[1] and by_rank[2] == by_rank[3] and by_rank[0] != by_rank[2]
