import os
import signal
import threading

import pytest

from zerotrain.training.stop import interrupt_on_sigterm


def test_sigterm_interrupts_as_ctrl_c_does_and_is_remembered():
    with interrupt_on_sigterm() as stop:
        assert not stop.received
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received


def test_afterwards_sigterm_means_what_it_meant_before():
    before = signal.getsignal(signal.SIGTERM)
    with interrupt_on_sigterm():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_outside_the_main_thread_nothing_changes():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def body():
        with interrupt_on_sigterm() as stop:
            seen.append((stop.received, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(False, before)]
