"""The wire of the fast tests is as nasty as it says: otherwise these would find nothing."""

from typing import Any

import pytest
import torch

from tests.unit.engine.parts import on_ranks
from zerotrain.comm.collectives import Collectives
from zerotrain.comm.handles import Exchange, Gather, ScratchPool
from zerotrain.comm.ledger import Ledger
from zerotrain.comm.world import World
from zerotrain.errors import CommError
from zerotrain.testing import fake_wire
from zerotrain.testing.fake_wire import run_threads

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


def test_a_reduction_is_the_mean_in_rank_order_and_leaves_nan_in_the_buffer():
    def on_a_rank(world: World) -> tuple[list[float], bool]:
        out, full = torch.zeros(1), torch.full((3,), (1e8, -1e8, 3.0)[world.rank])
        reduction = collectives(world).reduction("unit", out, POOL)
        reduction.issue(full)
        reduction.finish()
        return out.tolist(), bool(full.isnan().all())

    assert run_threads(on_a_rank, 3)[0] == [([1.0], True)] * 3


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


def test_an_exchange_brings_to_each_rank_what_each_has_for_it():
    def on_a_rank(world: World) -> list[float]:
        sent = torch.tensor([[], [10.0, 10.0], [20.0]][world.rank])
        numels = [[0, 0, 0], [2, 0, 0], [0, 1, 0]]
        received = torch.zeros(sum(row[world.rank] for row in numels))
        exchange = collectives(world).exchange(
            "unit", sent, received, numels[world.rank], [row[world.rank] for row in numels]
        )
        assert received.isnan().all()
        exchange.finish()
        assert sent.isnan().all()
        return received.tolist()

    assert run_threads(on_a_rank, 3)[0] == [[10.0, 10.0], [20.0], []]


def test_the_board_knows_the_joint_order_of_all_collectives_of_each_rank():
    def on_a_rank(world: World) -> None:
        mine = collectives(world)
        gather = mine.gather("a", torch.zeros(2), torch.zeros(1))
        reduction = mine.reduction("b", torch.zeros(1), POOL)
        for _ in range(2):
            gather.issue()
            reduction.issue(torch.zeros(2))
            reduction.finish()
            gather.finish()

    _, board = run_threads(on_a_rank, 2)
    assert board.orders == [["gather a", "reduction b", "gather a", "reduction b"]] * 2


def test_ranks_whose_collectives_differ_are_told_so(monkeypatch):
    monkeypatch.setattr(fake_wire, "TIMEOUT_S", 0.05)

    def on_a_rank(world: World) -> None:
        collectives(world).gather_now(f"unit {world.rank}", torch.zeros(2), torch.zeros(1))

    with pytest.raises(CommError, match="have come"):
        run_threads(on_a_rank, 2)


def test_the_first_cause_is_raised_and_not_what_it_did_to_the_others(monkeypatch):
    monkeypatch.setattr(fake_wire, "TIMEOUT_S", 0.05)

    def on_a_rank(world: World) -> None:
        if world.rank == 2:
            fake_wire.time.sleep(0.1)
            raise ZeroDivisionError
        collectives(world).gather_now("unit", torch.zeros(3), torch.zeros(1))

    with pytest.raises(ZeroDivisionError):
        run_threads(on_a_rank, 3)


@pytest.mark.parametrize("done_rank", [None, 0])
def test_done_is_said_on_the_rank_that_is_told_to_alone(done_rank):
    def on_a_rank(world: World) -> Any:
        gather = collectives(world).gather("unit", torch.zeros(2), torch.zeros(1))
        gather.issue()
        answer = gather.is_done()
        gather.finish()
        return answer, gather.is_done()

    assert run_threads(on_a_rank, 2, done_rank=done_rank)[0] == [(done_rank == 0, True), (False, True)]


def test_ranks_that_take_turns_draw_from_a_generator_each_and_leave_that_of_the_process_as_it_was():
    def draws(world: World) -> list[list[float]]:
        drawn = [torch.rand(3).tolist()]
        for _ in range(4):
            collectives(world).gather_now("unit", torch.zeros(world.shards.size), torch.zeros(1))  # others draw now
            drawn.append(torch.rand(3).tolist())
        return drawn

    torch.manual_seed(7)
    before = torch.get_rng_state()
    results, _ = run_threads(draws, 3, late_rank=1, in_turns=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert results == [[torch.rand(3).tolist() for _ in range(5)]] * 3
