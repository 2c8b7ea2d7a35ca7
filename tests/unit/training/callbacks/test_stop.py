import os
import signal
import threading

import pytest

from zerotrain.training.callbacks import stop
from zerotrain.training.callbacks.stop import STOP_SIGNALS, stop_requests


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", STOP_SIGNALS, ids=lambda signum: signum.name)
def test_a_signal_to_stop_is_told_and_kept_and_interrupts_nothing(signum):
    told = []
    with stop_requests(told.append) as request:
        assert request.signum == 0
        send(signum)
        assert (request.signum, request.at_once, told) == (signum, False, [signum])


def test_one_so_soon_after_the_first_is_the_same_request_and_the_first_counts():
    with stop_requests() as request:
        send(signal.SIGINT)
        send(signal.SIGTERM)
        assert (request.signum, request.at_once) == (signal.SIGINT, False)


def test_a_later_one_interrupts_and_is_remembered_and_the_end_is_not_interrupted_again(monkeypatch):
    monkeypatch.setattr(stop, "SAME_REQUEST_S", 0.0)
    with stop_requests() as request:
        send(signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt, match="at once by SIGTERM"):
            send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert (request.signum, request.at_once) == (signal.SIGUSR1, True)


def test_where_no_step_can_end_any_more_the_first_interrupts():
    with stop_requests() as request:
        request.give_up()
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)


def test_afterwards_signals_mean_what_they_meant_before():
    before = [signal.getsignal(signum) for signum in STOP_SIGNALS]
    with stop_requests() as request:
        assert {signal.getsignal(signum) for signum in STOP_SIGNALS} == {request.on_signal}
    assert [signal.getsignal(signum) for signum in STOP_SIGNALS] == before


def test_outside_the_main_thread_nothing_changes():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def body():
        with stop_requests() as request:
            seen.append((request.signum, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(0, before)]
