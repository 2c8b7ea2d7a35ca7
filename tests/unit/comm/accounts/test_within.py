"""A call has an end, though it has none of its own."""

import threading

import pytest

from zerotrain.comm.whereabouts import within


def test_what_a_call_returns_and_raises_is_its_callers() -> None:
    assert within(60.0, lambda: None) is None
    assert within(60.0, lambda: threading.current_thread().daemon)

    def fail() -> None:
        raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own"):
        within(60.0, fail)


def test_a_call_that_does_not_return_is_given_up_after_the_limit() -> None:
    over = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        within(0.1, over.wait)
    over.set()
