"""What an engine's collectives count and compare, on ranks that are threads."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from tests.ranks import fake_wire, run_ranks
from tests.ranks.fake_wire import run_threads
from zerotrain.comm import collectives as comm, collectives as process_groups
from zerotrain.comm.collectives import Collectives
from zerotrain.comm.handles import ScratchPool
from zerotrain.comm.ledger import Ledger
from zerotrain.comm.world import World
from zerotrain.device.device import Event
from zerotrain.errors import CommError, DisagreementError, EngineStateError


def collectives(world: World) -> Collectives:
    return Collectives(world, ledger=Ledger(), ordered=True, overlap=True)


def test_bytes_are_those_this_rank_sends():
    """To each other rank what it has to say; of a broadcast rank 0 sends the values once."""

    def on_a_rank(world: World) -> dict[str, int]:
        mine = collectives(world)
        mine.gather_small(torch.zeros(5, dtype=torch.float64), name="norm")
        mine.broadcast(torch.zeros(3), name="unit")
        return dict(mine.ledger.outside_steps.nbytes)

    results, _ = run_threads(on_a_rank, 3)
    assert results == [{"norm": 80, "broadcast": 12 * (rank == 0)} for rank in range(3)]


def test_a_small_one_that_fails_is_told_with_its_name(monkeypatch):
    monkeypatch.setattr(fake_wire, "TIMEOUT_S", 0.05)

    def on_a_rank(world: World) -> None:
        if world.rank == 0:
            collectives(world).gather_small(torch.zeros(1), name="norm")

    with pytest.raises(CommError, match=r"rank 0 failed in comparison of norm .* only ranks \[0\] have come"):
        run_threads(on_a_rank, 2)


@pytest.mark.parametrize("call", ["broadcast", "gather_now"])
def test_outside_of_steps_every_rank_waits_for_its_device_once_a_bucket(call, monkeypatch):
    """On NCCL a collective's time counts from its issue: no rank may issue those that others are not near to."""
    settled: list[str] = []

    class OfDevice(Event):
        def settle(self, timeout_s: float | None = None) -> bool:
            settled.append(call)
            return True

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


# The collectives of real ranks: each way to send, on two to four processes that are started once.


CPU = torch.device("cpu")
NUMEL = 6
"""Elements of a shard."""
WAYS = {"posted": (8, True), "native gather, all-to-all": (1, True), "native": (1, False)}
"""(up to how many ranks sends and receives are posted, whether reductions are ordered)"""


class OnARank:
    """Collectives of one way to send, what they count, and what lends buffers."""

    def __init__(self, way: str, world: World, *, overlap: bool = True) -> None:
        process_groups.MAX_RANKS_OF_EXCHANGE, ordered = WAYS[way]
        self.way, self.rank, self.size, self.ledger = way, world.rank, world.size, Ledger()
        self.pool = ScratchPool(dtype=torch.float32, device=CPU)
        self.collectives = Collectives(world, ledger=self.ledger, ordered=ordered, overlap=overlap)

    def shard_of(self, rank: int, use: int) -> torch.Tensor:
        return torch.arange(float(NUMEL)) + 100 * rank + 1000 * use

    def whole(self, use: int) -> torch.Tensor:
        return torch.cat([self.shard_of(rank, use) for rank in range(self.size)])

    def reduced(self, use: int) -> torch.Tensor:
        """This rank's part of the mean of every rank's `whole(use) + rank`."""
        return self.shard_of(self.rank, use) + sum(range(self.size)) / self.size

    def begin_late(self) -> None:
        """Rank 1 comes when the others have long been waiting."""
        if self.rank == 1:
            for _ in range(20):
                torch.randn(300, 300) @ torch.randn(300, 300)


def gathers(mine: OnARank) -> None:
    for in_place in (False, True):
        full = torch.full((NUMEL * mine.size,), float("nan"))
        shard = full.view(mine.size, -1)[mine.rank] if in_place else torch.empty(NUMEL)
        gather = mine.collectives.gather(f"unit {in_place}", full, shard)
        for use, prepares in enumerate((False, True, True)):
            shard.copy_(mine.shard_of(mine.rank, use))
            mine.begin_late()
            if prepares:
                gather.prepare()
                gather.prepare()
            gather.issue()
            gather.finish()
            assert torch.equal(full, mine.whole(use)), (full, mine.whole(use))


def reductions(mine: OnARank) -> None:
    for in_place in (False, True):
        full = torch.empty(NUMEL * mine.size)
        out = full.view(mine.size, -1)[mine.rank] if in_place else torch.empty(NUMEL)
        reduction = mine.collectives.reduction(f"unit {in_place}", out, mine.pool)
        for use, prepares in enumerate((False, True, True)):
            mine.begin_late()
            if prepares:
                reduction.prepare()
            full.copy_(mine.whole(use) + mine.rank)
            reduction.issue(full)
            reduction.finish()
            assert torch.equal(out, mine.reduced(use)), (out, mine.reduced(use))
            assert mine.pool.lent_nbytes == 0


def held_by_nobody(mine: OnARank) -> None:
    """A change of the stage ended with a bucket too much (2026-11-22). The threads of gloo's own gather hold it for a
    moment longer."""
    if mine.way != "posted":
        return
    memories = []
    for number in range(3):
        full = torch.zeros(NUMEL * mine.size)
        gather = mine.collectives.gather(f"unit {number}", full, mine.shard_of(mine.rank, number))
        gather.issue()
        gather.finish()
        memories.append(StorageWeakRef(full.untyped_storage()))
        del full, gather
    assert all(memory.expired() for memory in memories)


def means_in_rank_order(mine: OnARank) -> None:
    """In fp32 (1e8 + -1e8) + (3 + 1) is 4, and in another order less."""
    if mine.size < 3 or mine.way == "native":
        return
    out = torch.empty(NUMEL)
    reduction = mine.collectives.reduction("unit", out, mine.pool)
    reduction.issue(torch.full((mine.size * NUMEL,), (1e8, -1e8, 3.0, 1.0)[mine.rank]))
    reduction.finish()
    assert out.tolist() == [1.0] * NUMEL


def under_way_together(mine: OnARank) -> None:
    """Two of a kind, of other sizes, issued and finished in another order than they were prepared in."""
    outs = [torch.empty(NUMEL), torch.empty(2 * NUMEL)]
    two = [mine.collectives.reduction(f"unit {index}", out, mine.pool) for index, out in enumerate(outs)]
    for each in two:
        each.prepare()
    for factor in (1, 0):
        two[factor].issue(torch.full((outs[factor].numel() * mine.size,), float(10**factor)))
    for each in two:
        each.finish()
    assert [out.unique().tolist() for out in outs] == [[1.0], [10.0]]


def withdrawn(mine: OnARank) -> None:
    """What was prepared and will not come ends, also on a rank that is late, and what comes next is right."""
    full, out = torch.empty(NUMEL * mine.size), torch.empty(NUMEL)
    gather = mine.collectives.gather("unit", full, mine.shard_of(mine.rank, 1))
    reduction = mine.collectives.reduction("unit", out, mine.pool)
    for _ in range(2):
        gather.prepare()
        reduction.prepare()
        mine.begin_late()
        gather.withdraw()
        reduction.withdraw()
        assert mine.pool.lent_nbytes == 0
    gather.issue()
    reduction.issue(mine.whole(2) + mine.rank)
    gather.finish()
    reduction.finish()
    assert torch.equal(full, mine.whole(1))
    assert torch.equal(out, mine.reduced(2))


def exchanged(mine: OnARank) -> None:
    """Rank r sends r + 1 numbers to each other one, and none to itself."""
    sent_numels = [(mine.rank + 1) * (peer != mine.rank) for peer in range(mine.size)]
    received_numels = [(peer + 1) * (peer != mine.rank) for peer in range(mine.size)]
    sent = torch.cat([torch.full((number,), float(mine.rank)) for number in sent_numels])
    received = torch.empty(sum(received_numels))
    mine.collectives.exchange("unit", sent, received, sent_numels, received_numels).finish()
    assert received.tolist() == [float(peer) for peer, number in enumerate(received_numels) for _ in range(number)]


def small_ones(mine: OnARank) -> None:
    values = torch.tensor([mine.rank, 7], dtype=torch.int64)
    assert mine.collectives.gather_small(values, name="norm").tolist() == [[r, 7] for r in range(mine.size)]
    assert mine.collectives.gather_objects(str(mine.rank), name="state") == [str(r) for r in range(mine.size)]
    mine.collectives.broadcast(values, name="unit")
    assert values.tolist() == [0, 7]


def other_comparisons(mine: OnARank) -> None:
    """gloo ended the process of a rank that got more than it expected (2026-11-23)."""
    order = mine.collectives.journal.order
    for number in (3, 300):
        name, numel = ("norm", 11) if mine.rank else ("engine.freeze", number)
        with pytest.raises(DisagreementError, match=r"engine.freeze on rank 0, norm on ranks? 1") as error:
            mine.collectives.gather_small(torch.zeros(numel, dtype=torch.float64), name=name)
        assert f"rank {mine.rank}, " in str(error.value)
        assert mine.collectives.journal.order == order
    with pytest.raises(DisagreementError, match=r"norm, 44 bytes, on rank 0, norm, 48 bytes, on ranks? 1"):
        mine.collectives.gather_small(torch.zeros(11 + min(mine.rank, 1)), name="norm")  # others by the same name
    with pytest.raises(DisagreementError, match=r"state on rank 0, files on ranks? 1"):
        mine.collectives.gather_objects(mine.rank, name="files" if mine.rank else "state")
    assert mine.collectives.journal.order == order
    large = torch.arange(100.0) + mine.rank
    assert mine.collectives.gather_small(large, name="large").tolist() == [
        (torch.arange(100.0) + rank).tolist() for rank in range(mine.size)
    ]


class RunsCode:
    """As a process that only pretends to be a rank might send."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.putenv, ("ZEROTRAIN_WAS_HERE", "1")


def what_runs_code(mine: OnARank) -> None:
    for value in ({"step": torch.tensor(3.0), "of": (torch.float32, 1.5, "a")}, [mine.rank] * 1000 * mine.rank):
        said = mine.collectives.gather_objects(value, name="state")
        assert len(said) == mine.size
        assert said[mine.rank] == value
    with pytest.raises(EngineStateError, match="can only exchange numbers, texts, tensors and collections of these"):
        mine.collectives.gather_objects(RunsCode() if mine.rank else 1, name="state")


def counted(mine: OnARank) -> None:
    """Each byte once to each other rank; twice in gloo's own reduce-scatter, which is an all-reduce."""
    share = 4 * NUMEL * (mine.size - 1)
    full, out = torch.zeros(NUMEL * mine.size), torch.zeros(NUMEL)
    mine.ledger.in_step = True
    mine.collectives.gather_now("unit", full, out)
    reduction = mine.collectives.reduction("unit", out, mine.pool)
    reduction.issue(full)
    reduction.finish()
    mine.ledger.close_step()
    twice = 2 if mine.way == "native" else 1
    assert mine.ledger.last_step.nbytes == {"gather": share, "reduce": share * twice}
    assert mine.ledger.last_step.calls == {"gather": 1, "reduce": 1}
    reduction.prepare()
    reduction.withdraw()  # of what is posted, something must be sent to end it
    assert mine.ledger.outside_steps.nbytes == ({"reduce": share} if mine.way == "posted" else {})


def without_overlap(mine: OnARank) -> None:
    waiting = OnARank(mine.way, World.current(CPU), overlap=False)
    full = torch.empty(NUMEL * mine.size)
    gather = waiting.collectives.gather("unit", full, mine.shard_of(mine.rank, 0))
    gather.issue()
    assert gather.is_done()
    assert torch.equal(full, mine.whole(0))
    gather.finish()


CHECKS: list[Callable[[OnARank], None]] = [
    gathers,
    reductions,
    held_by_nobody,
    means_in_rank_order,
    under_way_together,
    withdrawn,
    exchanged,
    small_ones,
    other_comparisons,
    what_runs_code,
    counted,
    without_overlap,
]


def all_checks(way: str) -> list[str]:
    """On each rank: the checks that failed, and how."""
    world = World.current(CPU)
    failed = []
    for check in CHECKS:
        try:
            check(OnARank(way, world))
        except AssertionError as error:
            failed.append(f"{check.__name__}: {error!r}")
        dist.barrier()
    return failed


@pytest.mark.parametrize(("way", "size"), [("posted", 2), ("posted", 4), *((way, 3) for way in WAYS)])
def test_every_way_to_send_gives_sums_in_order_counts_its_bytes_and_ends_what_it_began(way, size):
    assert run_ranks(all_checks, size, way) == [[]] * size
