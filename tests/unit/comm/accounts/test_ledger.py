"""What is counted of collectives, and their order as one number that ranks compare."""

import time

from zerotrain.comm.ledger import ORDER_BITS, Journal, Ledger
from zerotrain.comm.whereabouts import Whereabouts


def order_of(*noted: str) -> int:
    journal = Journal(Ledger(), Whereabouts(rank=0, size=1), overlap=True)
    for each in noted:
        journal.note(*each.split())
    return journal.order


def test_within_a_kind_names_order_and_number_tell_apart() -> None:
    orders = [(), ("g a",), ("g b",), ("g a", "g a"), ("g a", "g b"), ("g b", "g a"), ("r a",), ("r a", "r b", "r a")]
    assert len({order_of(*each) for each in orders if each != ("r a",)}) == len(orders) - 1
    assert order_of("g a", "g b") == order_of("g a", "g b")


def test_what_was_noted_last_and_did_not_come_about_can_be_taken_back() -> None:
    journal = Journal(Ledger(), Whereabouts(rank=0, size=1), overlap=True)
    orders = []
    for name in ("a", "b", "a" * 99):
        orders.append(journal.order)
        journal.note("g", name)
    for name, before in zip(("a" * 99, "b", "a"), reversed(orders), strict=True):
        journal.take_back("g", name)
        assert journal.order == before


def test_between_kinds_the_order_does_not_tell_apart() -> None:
    assert order_of("g a", "r x", "g b", "r y") == order_of("r x", "r y", "g a", "g b")
    assert order_of("g a", "r x", "g b", "r y") != order_of("g a", "r y", "g b", "r x")


def test_after_any_number_of_collectives_the_order_is_a_number_that_fp64_holds() -> None:
    for kinds in ("g", "gr", "grec"):
        order = order_of(*(f"{kind} {kind}{index}" for index in range(1000) for kind in kinds))
        assert 0 < order < 2**ORDER_BITS
        assert int(float(order)) == order
    order = order_of(*(f"g unit{index}" for index in range(1000)))
    assert order != order_of(*(f"g unit{index}" for index in (1, 0, *range(2, 1000))))


def test_a_step_counts_its_own_traffic_and_what_lies_outside_counts_apart() -> None:
    ledger = Ledger()
    ledger.record("broadcast", 100)
    ledger.in_step = True
    ledger.record("gather", 10)
    ledger.record("gather", 10)
    ledger.record("reduce", 5)
    ledger.close_step()
    assert ledger.last_step.calls == {"gather": 2, "reduce": 1}
    assert ledger.last_step.sent_nbytes == 25
    assert ledger.outside_steps.sent_nbytes == 100
    assert not ledger.in_step


def test_the_wait_of_an_update_is_none_of_its_own_time() -> None:
    ledger = Ledger()
    ledger.waited(100.0)
    ledger.in_step = True
    ledger.waited(0.25)
    with ledger.updating():
        started_s = time.monotonic()
        time.sleep(0.06)
        waited_s = time.monotonic() - started_s - 0.01
        ledger.waited(waited_s)
    ledger.close_step()
    assert ledger.last_step.waited_s == 0.25 + waited_s
    assert ledger.last_step.update_s >= 0.01
    assert ledger.last_step.update_s < time.monotonic() - started_s - waited_s + 0.001
    assert ledger.outside_steps.waited_s == 100.0


def test_a_step_that_was_given_up_counts_as_outside_and_leaves_nothing_to_the_next() -> None:
    ledger = Ledger()
    for given_up in (True, False):
        ledger.in_step = True
        ledger.record("reduce", 5)
        (ledger.drop_step if given_up else ledger.close_step)()
        assert not ledger.in_step
    assert (ledger.last_step.calls, ledger.last_step.nbytes) == ({"reduce": 1}, {"reduce": 5})
    assert (ledger.outside_steps.calls, ledger.outside_steps.nbytes) == ({"reduce": 1}, {"reduce": 5})
