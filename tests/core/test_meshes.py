"""Meshes that ``init_mesh`` did not make, with ranks and dimensions in any order: attention is right, or refused."""

from __future__ import annotations

import re
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

import seqpar
from seqpar.ranks.rendezvous import group_timeout

from ..observe import message_of
from ..pool import OwnPool, on_ranks, start
from ..reference import assert_close

# Names of dimensions, ranks, and for some strategies whether the mesh is right for them. Otherwise it must be refused.
MESHES: list[tuple[tuple[str, ...], list[Any], dict[str, bool]]] = [
    (("ring", "ulysses"), [[0, 1], [2, 3]], {"hybrid": True, "ring": True}),
    (("ulysses", "ring"), [[0, 2], [1, 3]], {"hybrid": True, "ulysses": True}),  # the same groups
    (("ring", "ulysses"), [[0, 2], [1, 3]], {"hybrid": False, "ring": False}),
    (("ring", "ulysses"), [[1, 0], [3, 2]], {"hybrid": False}),
    (("ulysses", "ring"), [[0, 1], [2, 3]], {"hybrid": False}),
    (("ring", "tp"), [[0, 1], [2, 3]], {"tp_sp": True, "ring": True}),
    (("tp", "ring"), [[0, 2], [1, 3]], {"tp_sp": True}),
    (("ring", "tp"), [[0, 2], [1, 3]], {"tp_sp": False, "ring": True}),  # without tp, each ring is in order
    (("tp", "ring"), [[0, 1, 2, 3]], {"tp_sp": True}),
    (("dp", "ring"), [[2, 3], [0, 1]], {"ring": True}),
    (("dp", "ring"), [[0, 2], [3, 1]], {"ring": False}),  # on all ranks, though the first ring is in order
    (("ring",), [0, 3, 1, 2], {"ring": False, "tp_sp": False}),
]


def whole(strategy: str) -> tuple[torch.nn.Module | None, list[Tensor]]:
    """For tp_sp a layer and its input, otherwise q, k and v."""
    torch.manual_seed(4)
    layer = seqpar.ParallelAttention("local", 16, 4, dtype=torch.float64) if strategy == "tp_sp" else None
    shapes = [(1, 22, 16)] if layer else [(1, 22, heads, 4) for heads in (4, 2, 2)]
    return layer, [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@on_ranks
def attend(group: ProcessGroup, port: int, number: int) -> dict[str, str]:
    """For each strategy the error of making the ``Sharding``; without an error, attention must equal one device's."""
    start(port, f"mesh {number}", group.rank(), group.size())
    names, ranks, strategies = MESHES[number]
    mesh, messages = DeviceMesh("cpu", ranks, mesh_dim_names=names), {}
    for strategy in strategies:
        arguments: dict[str, Any] = {"mesh": mesh, "strategy": "tp_sp" if strategy == "tp_sp" else None}
        messages[strategy] = message_of(partial(seqpar.Sharding, 22, "zigzag", **arguments))
        if messages[strategy] != "nothing":
            continue
        sharding = seqpar.Sharding(22, "zigzag", **arguments)
        layer, tensors = whole(strategy)
        local = [sharding.shard(x) for x in tensors]
        if layer is None:
            out = seqpar.attention(*local, strategy=strategy, sharding=sharding)
            expected = seqpar.attention(*tensors, strategy="local")
        else:
            sharded = seqpar.ParallelAttention("tp_sp", 16, 4, mesh=mesh, dtype=torch.float64)
            sharded.load_state_dict(layer.state_dict())
            out, expected = sharded(local[0], sharding=sharding), layer(tensors[0])
        assert_close(sharding.unshard(out.detach()), expected.detach(), torch.float64, strategy)
    return messages


@pytest.mark.parametrize("number", range(len(MESHES)), ids=lambda i: f"{MESHES[i][0]} {MESHES[i][1]}")
def test_ranks_in_any_order(own: OwnPool, number: int) -> None:
    refused = r"ValueError: mesh: its ranks along .* are \[\d, .*\]; expected increasing numbers, .*init_mesh"
    for messages in own.pool.run(4, attend, own.port, number):
        for strategy, is_right in MESHES[number][2].items():
            assert re.match("nothing" if is_right else refused, messages[strategy]), messages


def test_every_order_of_four_ranks() -> None:
    for order in permutations(range(4)):
        dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
        try:
            for names, shape in ((("ring", "ulysses"), (2, 2)), (("ring",), (4,)), (("dp", "ring"), (1, 4))):
                mesh = DeviceMesh("cpu", torch.tensor(order).view(shape), mesh_dim_names=names)
                message = message_of(partial(seqpar.Sharding, 8, "zigzag", mesh=mesh))
                assert (message == "nothing") == (list(order) == sorted(order)), message
        finally:
            dist.destroy_process_group()


@on_ranks
def timeouts(group: ProcessGroup, port: int) -> list[float]:
    """The timeouts, in seconds, of the groups of ``init_mesh`` and of a mesh whose dimensions are flattened later."""
    start(port, "timeouts", group.rank(), group.size(), 7.0)
    mesh = seqpar.init_mesh(dp=-1, ulysses=2, device_type="cpu")
    other = dist.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "ring", "ulysses"))
    groups = [seqpar.Sharding(8, mesh=x, strategy=s).sequence_group for x in (mesh, other) for s in ("ring", "tp_sp")]
    return [group_timeout(x).total_seconds() for x in (*mesh.get_all_groups(), *groups) if x is not None]


def test_groups_have_the_timeout_of_the_caller(own: OwnPool) -> None:
    for seconds in own.pool.run(4, timeouts, own.port):
        assert seconds == [7.0] * 8


@on_ranks
def meshes_again(group: ProcessGroup, port: int) -> list[str]:
    """What is wrong with meshes that are made again."""
    wrong = list[str]()
    for world in range(2):  # the second default group has meshes of its own
        start(port, f"again {world}", group.rank(), group.size())
        ring = seqpar.init_mesh(ring=-1, device_type="cpu")
        pair = seqpar.init_mesh(dp=2, ring=2, device_type="cpu")
        groups = dist.get_pg_count()
        for mesh, sizes in ((ring, {"ring": -1}), (pair, {"dp": 2, "ring": 2}), (ring, {"ring": 4, "tp": 1})):
            if seqpar.init_mesh(**sizes, device_type="cpu") is not mesh:
                wrong.append(f"{sizes} of world {world}: another mesh")
        if dist.get_pg_count() != groups:
            wrong.append(f"{groups} groups became {dist.get_pg_count()}")
        different = message_of(lambda: seqpar.init_mesh(ring=2, dp=2) if group.rank() else seqpar.init_mesh(ring=-1))
        if "the ranks ask for different meshes" not in different:
            wrong.append(different)
        dist.destroy_process_group(pair.get_group("ring"))
        if seqpar.init_mesh(dp=2, ring=2, device_type="cpu") is pair:
            wrong.append("a mesh whose group has been destroyed")
        sharding = seqpar.Sharding(22, mesh=seqpar.init_mesh(ring=-1, device_type="cpu"))
        x = sharding.shard(torch.randn(1, 22, 2, 4))
        seqpar.attention(x, x, x, sharding=sharding)
    return wrong


def test_the_same_sizes_are_the_same_mesh(own: OwnPool) -> None:
    assert own.pool.run(4, meshes_again, own.port) == [[]] * 4
