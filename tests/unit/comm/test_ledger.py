from zerotrain.comm.ledger import Ledger


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


def test_a_step_that_was_given_up_leaves_its_traffic_to_none() -> None:
    ledger = Ledger()
    ledger.in_step = True
    ledger.record("reduce", 5)
    ledger.drop_step()
    assert ledger.outside_steps.calls == {"reduce": 1}
    ledger.in_step = True
    ledger.record("reduce", 7)
    ledger.close_step()
    assert ledger.last_step.calls == {"reduce": 1}
    assert (ledger.last_step.sent_nbytes, ledger.outside_steps.sent_nbytes) == (7, 5)
