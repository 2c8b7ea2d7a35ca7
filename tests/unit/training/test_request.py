"""Wishes travel as one number of each rank, and all ranks read the same out of them."""

import itertools
import os
import signal

import pytest

from zerotrain.engine.step import MAX_SIGNAL
from zerotrain.training import request as requests
from zerotrain.training.request import STOP_SIGNALS, Request, decoded, stop_requests

NAMES = ("control.yaml", "callbacks.patience", "callbacks.alarm")


@pytest.mark.parametrize("number", [0, *STOP_SIGNALS])
@pytest.mark.parametrize("save", [False, True])
def test_what_is_encoded_is_decoded(save, number):
    for stage, stop in itertools.product((None, 0, 1, 2, 3), (False, *NAMES)):
        request = Request(save=save, stage=stage, stop=stop, signal=number)
        assert request.encoded(NAMES) <= MAX_SIGNAL
        assert decoded([request.encoded(NAMES)], NAMES) == request
        assert decoded([0, request.encoded(NAMES), 0], NAMES) == request


def test_the_signal_of_a_run_is_named_and_ctrl_c_counts_first():
    assert Request().encoded() == 0
    assert decoded([0, 0, 0]) == Request()
    assert decoded([0, 0]).stopped_by is None
    assert decoded([0, signal.SIGUSR1]).stopped_by == "SIGUSR1"
    assert decoded([signal.SIGTERM, signal.SIGINT, 0]).stopped_by == "SIGINT"


def test_of_several_wishes_the_lowest_rank_is_followed_and_a_signal_names_the_end():
    first, second = Request(stage=3, stop=NAMES[1]), Request(stage=1, stop=NAMES[2], save=True, signal=15)
    asked = decoded([0, first.encoded(NAMES), second.encoded(NAMES)], NAMES)
    assert asked == Request(stage=3, stop=NAMES[1], save=True, signal=15)
    assert asked.stopped_by == "SIGTERM"
    assert (first | second) == Request(stage=3, stop=NAMES[1], save=True, signal=15)
    assert first.stopped_by == "callbacks.patience"


@pytest.mark.parametrize("stage", [-1, 4, True, "3", 2.0])
def test_a_stage_that_there_is_not_is_refused_where_it_is_asked_for(stage):
    with pytest.raises(ValueError, match="it must be 0, 1, 2, 3 or None"):
        Request(stage=stage)


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
    monkeypatch.setattr(requests, "SAME_REQUEST_S", 0.0)
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
