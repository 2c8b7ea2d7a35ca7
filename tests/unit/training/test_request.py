"""Wishes travel as one number of each rank, and all ranks read the same out of them."""

import itertools
import signal

import pytest

from zerotrain.engine.step import MAX_SIGNAL
from zerotrain.training.callbacks.stop import STOP_SIGNALS
from zerotrain.training.request import Request, decoded

NAMES = ("control.yaml", "callbacks.patience", "callbacks.alarm")


@pytest.mark.parametrize("number", [0, *STOP_SIGNALS])
@pytest.mark.parametrize("save", [False, True])
def test_what_is_encoded_is_decoded(save, number):
    for stage, stop in itertools.product((None, 0, 1, 2, 3), (False, *NAMES)):
        request = Request(save=save, stage=stage, stop=stop, signal=number)
        assert request.encoded(NAMES) <= MAX_SIGNAL
        assert decoded([request.encoded(NAMES)], NAMES) == request
        assert decoded([0, request.encoded(NAMES), 0], NAMES) == request


def test_nothing_is_encoded_as_nothing():
    assert Request().encoded() == 0
    assert decoded([0, 0, 0]) == Request()
    assert Request().stopped_by is None


def test_the_signal_of_a_run_is_named_and_ctrl_c_counts_first():
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
