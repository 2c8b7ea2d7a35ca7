from zerotrain.comm.accounts.ledger import Ledger


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


def test_a_step_that_was_given_up_counts_as_outside_and_leaves_nothing_to_the_next() -> None:
    ledger = Ledger()
    for given_up in (True, False):
        ledger.in_step = True
        ledger.record("reduce", 5)
        (ledger.drop_step if given_up else ledger.close_step)()
        assert not ledger.in_step
    assert (ledger.last_step.calls, ledger.last_step.nbytes) == ({"reduce": 1}, {"reduce": 5})
    assert (ledger.outside_steps.calls, ledger.outside_steps.nbytes) == ({"reduce": 1}, {"reduce": 5})
