"""What all collectives have in common, on one that only writes down what it is asked."""

import pytest
import torch

from tests.unit.engine.parts import CPU, alone
from zerotrain.comm.collectives import Collectives
from zerotrain.comm.handles import Gather, Handle, Reduction, ReductionSpec, ScratchPool
from zerotrain.comm.ledger import Journal, Ledger
from zerotrain.comm.whereabouts import Whereabouts
from zerotrain.errors import CommError


class Written(Handle):
    kind, ledger_kind, sent_nbytes = "gather", "gather", 10

    def __init__(self, journal: Journal, fails: str = "") -> None:
        super().__init__("unit", journal)
        self.told: list[str] = []
        self.fails, self.has_arrived = fails, False

    def _tell(self, word: str) -> None:
        self.told.append(word)
        if word == self.fails:
            raise RuntimeError("connection closed")

    def issue(self) -> None:
        self._issue_noted()

    def _prepare(self) -> None:
        self._tell("prepare")

    def _issue(self) -> None:
        self._tell("issue")

    def _wait(self) -> None:
        self._tell("wait")

    def _is_done(self) -> bool:
        return self.has_arrived

    def _complete(self) -> None:
        self._tell("complete")

    def _withdraw(self) -> None:
        self._tell("withdraw")


def pool() -> ScratchPool:
    return ScratchPool(dtype=torch.float32, device=CPU)


def journal(*, overlap: bool = True) -> Journal:
    return Journal(Ledger(), Whereabouts(rank=0, size=1), overlap=overlap)


def test_a_collective_is_prepared_once_issued_and_waited_for_once_and_then_complete():
    handle = Written(journal())
    for _ in range(2):
        assert handle.is_done()  # nothing to wait for
        handle.prepare()
        handle.prepare()
        assert (handle.is_prepared, handle.is_under_way) == (True, False)
        handle.issue()
        assert (handle.is_prepared, handle.is_under_way) == (False, True)
        assert not handle.is_done()
        handle.wait()
        assert handle.is_done()
        handle.wait()
        handle.finish()
        assert not handle.is_under_way
        handle.finish()
    assert handle.told == ["prepare", "issue", "wait", "complete"] * 2


def test_it_is_done_when_it_says_so_and_must_be_finished_all_the_same():
    handle = Written(journal())
    handle.issue()
    handle.has_arrived = True
    assert handle.is_done()
    assert handle.is_under_way
    handle.finish()
    assert handle.told == ["issue", "wait", "complete"]


def test_withdrawn_is_only_what_was_prepared():
    handle = Written(journal())
    handle.withdraw()
    handle.prepare()
    handle.withdraw()
    handle.withdraw()
    assert handle.told == ["prepare", "withdraw"]
    handle.issue()
    handle.withdraw()  # it is under way
    assert handle.told == ["prepare", "withdraw", "issue"]
    assert handle.is_under_way


def test_without_overlap_it_is_waited_for_at_once_but_complete_only_when_finished():
    handle = Written(journal(overlap=False))
    handle.issue()
    assert handle.told == ["issue", "wait"]
    assert handle.is_done()
    assert handle.is_under_way
    handle.finish()
    assert handle.told == ["issue", "wait", "complete"]


def test_each_use_is_noted_once_with_its_bytes_whatever_else_is_called():
    mine = journal()
    handle = Written(mine)
    orders = [mine.order]
    for _ in range(2):
        handle.prepare()
        assert mine.order == orders[-1]
        handle.issue()
        orders.append(mine.order)
        handle.wait()
        handle.finish()
        assert mine.order == orders[-1]
    assert len(set(orders)) == 3
    assert mine.ledger.outside_steps.calls == {"gather": 2}
    assert mine.ledger.outside_steps.nbytes == {"gather": 20}


def test_what_is_sent_to_nobody_has_its_place_in_the_order_and_is_not_counted():
    class Local(Written):
        is_local = True

    mine = journal()
    Local(mine).issue()
    assert mine.order != journal().order
    assert mine.ledger.outside_steps.calls == {}


@pytest.mark.parametrize("where", ["prepare", "issue", "wait"])
def test_a_failure_is_told_with_the_collective_and_what_the_backend_said(where):
    handle = Written(journal(), fails=where)

    def use() -> None:
        handle.prepare()
        handle.issue()
        handle.finish()

    with pytest.raises(CommError, match=r"gather of unit .* after 0\.\d s: connection closed"):
        use()


def test_a_reduction_that_is_finished_holds_its_input_no_longer():
    class Kept(Reduction):
        sent_nbytes = 0

        def _issue(self) -> None:
            pass

        def _wait(self) -> None:
            pass

        def _is_done(self) -> bool:
            return True

    spec = ReductionSpec("unit", journal(), torch.zeros(2), pool(), num_leaves=2)
    reduction = Kept(spec)
    full = torch.zeros(4)
    reduction.issue(full)
    assert reduction._full is full
    reduction.finish()
    assert reduction._full is None
    assert (Gather.kind, Reduction.kind) == ("gather", "reduction")


def test_of_equal_buffers_the_one_that_was_cut_before_is_lent_again():
    buffers = pool()
    first, second = buffers.take(100), buffers.take(100)
    second.cuts["layout"] = "views"
    buffers.give_back(first)
    buffers.give_back(second)
    assert buffers.take(100, "layout") is second


def test_steps_that_repeat_hold_as_many_buffers_as_were_lent_at_once():
    buffers = pool()
    for _ in range(3):
        for numel in (100, 300, 200):
            pair = [buffers.take(numel), buffers.take(numel)]
            for scratch in pair:
                buffers.give_back(scratch)
    assert buffers.held_nbytes == 2 * 300 * 4
    assert buffers.lent_nbytes == 0


def test_the_smallest_buffer_that_fits_is_lent():
    buffers = pool()
    large, small = buffers.take(300), buffers.take(100)
    buffers.give_back(large)
    buffers.give_back(small)
    assert buffers.take(50) is small


# One rank's collectives: copies, or nothing at all.


@pytest.fixture
def mine() -> Collectives:
    return Collectives(alone(), ledger=Ledger(), ordered=True, overlap=True)


def test_a_gather_is_a_copy_unless_the_shard_is_the_whole(mine):
    full, shard = torch.zeros(4), torch.ones(4)
    gather = mine.gather("unit", full, shard)
    gather.prepare()
    gather.issue()
    assert gather.is_done()
    gather.finish()
    assert torch.equal(full, torch.ones(4))
    mine.gather_now("unit", shard, shard)
    assert torch.equal(shard, torch.ones(4))


def test_a_reduction_is_a_copy_unless_it_goes_where_it_is(mine):
    scratch = pool()
    out, full = torch.zeros(4), torch.arange(4.0)
    for target in (out, full):
        reduction = mine.reduction("unit", target, scratch)
        reduction.prepare()
        reduction.withdraw()
        reduction.issue(full)
        reduction.finish()
        assert torch.equal(target, torch.arange(4.0))
    assert scratch.held_nbytes == 0


def test_small_collectives_are_what_this_rank_has_to_say(mine):
    assert mine.gather_small(torch.tensor([1.0, 2.0]), name="norm").tolist() == [[1.0, 2.0]]
    value = object()  # which another rank could not be told
    assert mine.gather_objects(value, name="state") == [value]
    values = torch.ones(2)
    mine.broadcast(values, name="unit")
    assert values.tolist() == [1.0, 1.0]


def test_nothing_is_sent_so_nothing_is_counted(mine):
    mine.gather_now("unit", torch.zeros(4), torch.ones(4))
    mine.gather_small(torch.zeros(1), name="norm")
    mine.broadcast(torch.zeros(1), name="unit")
    assert mine.ledger.outside_steps.calls == {}


def test_an_exchange_with_nobody_is_a_fault(mine):
    with pytest.raises(ValueError, match="between one rank"):
        mine.exchange("unit", torch.zeros(0), torch.zeros(0), [0], [0])
