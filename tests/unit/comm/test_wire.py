"""One rank's collectives: copies, or nothing at all."""

import pytest
import torch

from tests.unit.engine.parts import CPU, alone
from zerotrain.comm.collectives import Collectives
from zerotrain.comm.handles import ScratchPool
from zerotrain.comm.ledger import Ledger


@pytest.fixture
def mine() -> Collectives:
    return Collectives(alone(), ledger=Ledger(), ordered=True, overlap=True)


def test_a_gather_is_a_copy_unless_the_shard_is_the_whole(mine: Collectives) -> None:
    full, shard = torch.zeros(4), torch.ones(4)
    gather = mine.gather("unit", full, shard)
    gather.prepare()
    gather.issue()
    assert gather.done()
    gather.finish()
    assert torch.equal(full, torch.ones(4))
    mine.gather_now("unit", shard, shard)
    assert torch.equal(shard, torch.ones(4))


def test_a_reduction_is_a_copy_unless_it_goes_where_it_is(mine: Collectives) -> None:
    pool = ScratchPool(dtype=torch.float32, device=CPU)
    out, full = torch.zeros(4), torch.arange(4.0)
    for target in (out, full):
        reduction = mine.reduction("unit", target, pool)
        reduction.prepare()
        reduction.withdraw()
        reduction.issue(full)
        reduction.finish()
        assert torch.equal(target, torch.arange(4.0))
    assert pool.held_nbytes == 0


def test_small_collectives_are_what_this_rank_has_to_say(mine: Collectives) -> None:
    assert mine.gather_small(torch.tensor([1.0, 2.0]), name="norm").tolist() == [[1.0, 2.0]]
    value = object()  # which another rank could not be told
    assert mine.gather_objects(value, name="state") == [value]
    values = torch.ones(2)
    mine.broadcast(values, name="unit")
    assert values.tolist() == [1.0, 1.0]


def test_nothing_is_sent_so_nothing_is_counted(mine: Collectives) -> None:
    mine.gather_now("unit", torch.zeros(4), torch.ones(4))
    mine.gather_small(torch.zeros(1), name="norm")
    mine.broadcast(torch.zeros(1), name="unit")
    assert mine.ledger.outside_steps.calls == {}


def test_an_exchange_with_nobody_is_a_fault(mine: Collectives) -> None:
    with pytest.raises(ValueError, match="between one rank"):
        mine.exchange("unit", torch.zeros(0), torch.zeros(0), [0], [0])
