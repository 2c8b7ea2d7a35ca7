"""What all collectives have in common, on one that only writes down what it is asked."""

import pytest
import torch

from tests.unit.engine.parts import CPU
from zerotrain.comm.handles import Handle, HandleSpec, ScratchPool
from zerotrain.comm.ledger import Journal, Ledger
from zerotrain.comm.whereabouts import Whereabouts
from zerotrain.errors import CommError


class Written(Handle):
    kind, ledger_kind = "gather", "gather"
    sent_nbytes = 10

    def __init__(self, journal: Journal, fails: str = "") -> None:
        super().__init__(HandleSpec("unit", journal))
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


@pytest.mark.parametrize("where", ["prepare", "issue", "wait"])
def test_a_failure_is_told_with_the_collective_and_what_the_backend_said(where):
    handle = Written(journal(), fails=where)

    def use() -> None:
        handle.prepare()
        handle.issue()
        handle.finish()

    with pytest.raises(CommError, match=r"gather of unit .* after 0\.\d s: connection closed"):
        use()


def test_the_smallest_buffer_that_fits_is_lent():
    buffers = pool()
    large, small = buffers.take(300), buffers.take(100)
    buffers.give_back(large)
    buffers.give_back(small)
    assert buffers.take(50) is small
