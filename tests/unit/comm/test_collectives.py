"""What an engine's collectives count and compare, on ranks that are threads."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerotrain.comm import collectives as comm
from zerotrain.comm.collectives import Collectives
from zerotrain.comm.ledger import Ledger
from zerotrain.comm.world import World
from zerotrain.device.device import Event
from zerotrain.errors import CommError
from zerotrain.testing import fake_wire
from zerotrain.testing.fake_wire import run_threads


def collectives(world: World) -> Collectives:
    return Collectives(world, ledger=Ledger(), ordered=True, overlap=True)


def test_small_ones_give_every_rank_the_same_in_rank_order() -> None:
    def on_a_rank(world: World) -> list[Any]:
        mine, values = collectives(world), torch.tensor([float(world.rank)] * 2)
        rows = mine.gather_small(values, name="norm").tolist()
        said = mine.gather_objects(f"rank {world.rank}", name="state")
        mine.broadcast(values, name="unit")
        return [rows, said, values.tolist()]

    expected = [[[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]], ["rank 0", "rank 1", "rank 2"], [0.0, 0.0]]
    assert run_threads(on_a_rank, 3, late_rank=1)[0] == [expected] * 3


def test_bytes_are_those_this_rank_sends() -> None:
    """To each other rank what it has to say; of a broadcast rank 0 sends the values once."""

    def on_a_rank(world: World) -> dict[str, int]:
        mine = collectives(world)
        mine.gather_small(torch.zeros(5, dtype=torch.float64), name="norm")
        mine.broadcast(torch.zeros(3), name="unit")
        return dict(mine.ledger.outside_steps.nbytes)

    results, _ = run_threads(on_a_rank, 3)
    assert results == [{"norm": 80, "broadcast": 12 * (rank == 0)} for rank in range(3)]


def test_small_ones_have_their_place_in_the_order() -> None:
    def on_a_rank(world: World) -> int:
        mine = collectives(world)
        mine.gather_small(torch.zeros(1), name="norm")
        return mine.order

    assert 0 not in run_threads(on_a_rank, 2)[0]


def test_a_small_one_that_fails_is_told_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_wire, "TIMEOUT_S", 0.05)

    def on_a_rank(world: World) -> None:
        if world.rank == 0:
            collectives(world).gather_small(torch.zeros(1), name="norm")

    with pytest.raises(CommError, match=r"rank 0 failed in comparison of norm .* only ranks \[0\] have come"):
        run_threads(on_a_rank, 2)


@pytest.mark.parametrize("call", ["broadcast", "gather_now"])
def test_outside_of_steps_every_rank_waits_for_its_device_once_a_bucket(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NCCL a collective's time counts from its issue: no rank may issue those that others are not near to."""
    settled: list[str] = []

    class OfDevice(Event):
        def settle(self) -> None:
            settled.append(call)

    monkeypatch.setattr(comm, "device_of", lambda _: SimpleNamespace(event=OfDevice))

    def on_a_rank(world: World) -> None:
        mine = collectives(world)
        for name in ("unit", "blocks.0"):
            if call == "broadcast":
                mine.broadcast(torch.zeros(2), name=name)
            else:
                mine.gather_now(name, torch.zeros(2), torch.zeros(1))

    run_threads(on_a_rank, 2)
    assert len(settled) == 4
