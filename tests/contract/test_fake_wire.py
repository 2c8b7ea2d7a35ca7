"""The wire of the fast tests is as nasty as it says: otherwise these would find nothing."""

import pytest
import torch

from tests.ranks import fake_wire
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import on_ranks
from zerotrain.comm.collectives import Collectives
from zerotrain.comm.handles import Exchange, Gather, ScratchPool
from zerotrain.comm.ledger import Ledger
from zerotrain.comm.world import World

POOL = ScratchPool(dtype=torch.float32, device=torch.device("cpu"))


def collectives(world: World) -> Collectives:
    return Collectives(world, ledger=Ledger(), ordered=True, overlap=True)


@pytest.mark.parametrize("in_place", [False, True])
@on_ranks(3)
def test_what_was_gathered_is_garbage_until_it_was_waited_for_but_for_the_own_part(world, in_place):
    full = torch.zeros(6)
    shard = full.view(3, 2)[world.rank] if in_place else torch.zeros(2)
    shard.fill_(world.rank)
    gather = collectives(world).gather("unit", full, shard)
    gather.issue()
    assert full.isnan().tolist() == [rank != world.rank for rank in (0, 0, 1, 1, 2, 2)]
    gather.wait()
    assert full.isnan().any()  # it was waited for, and is not finished
    gather.finish()
    assert full.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_shard_that_was_changed_while_it_was_on_the_wire_is_found():
    def on_a_rank(world: World) -> None:
        shard = torch.zeros(1)
        gather = collectives(world).gather("unit", torch.zeros(2), shard)
        gather.issue()
        shard.fill_(world.rank)
        gather.finish()

    with pytest.raises(AssertionError, match="unit was changed while it was on the wire"):
        run_threads(on_a_rank, 2)


@pytest.mark.parametrize("name", ["gathered", "exchanged"])
def test_what_is_received_into_may_not_be_written_to_meanwhile(name):
    def on_a_rank(world: World) -> None:
        mine, received = collectives(world), torch.zeros(2)
        if name == "gathered":
            handle: Gather | Exchange = mine.gather(name, received, torch.zeros(1))
            handle.issue()
        else:
            numels = [2 * (rank != world.rank) for rank in range(2)]
            handle = mine.exchange(name, torch.zeros(2), received, numels, numels)
        received.fill_(0)
        handle.finish()

    with pytest.raises(AssertionError, match=f"what {name} receives into was written to"):
        run_threads(on_a_rank, 2)


def reduced(world: World, *, before: float = 0.0, after: float = 0.0) -> None:
    reduction = collectives(world).reduction("unit", torch.zeros(1), POOL)
    full = torch.full((2,), before)
    reduction.issue(full)
    full.add_(after)
    reduction.finish()


def test_what_was_never_filled_and_what_was_changed_on_the_wire_is_found():
    with pytest.raises(AssertionError, match="unit is reduced with values that were never filled"):
        run_threads(lambda world: reduced(world, before=float("nan")), 2)
    with pytest.raises(AssertionError, match="unit was changed while it was on the wire"):
        run_threads(lambda world: reduced(world, after=1.0 * (world.rank == 1)), 2)


def test_the_first_cause_is_raised_and_not_what_it_did_to_the_others(monkeypatch):
    monkeypatch.setattr(fake_wire, "TIMEOUT_S", 0.05)

    def on_a_rank(world: World) -> None:
        if world.rank == 2:
            fake_wire.time.sleep(0.1)
            raise ZeroDivisionError
        collectives(world).gather_now("unit", torch.zeros(3), torch.zeros(1))

    with pytest.raises(ZeroDivisionError):
        run_threads(on_a_rank, 3)
