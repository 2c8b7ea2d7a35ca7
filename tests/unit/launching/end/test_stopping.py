"""A rank that is told to stop, as a process of its own: what it does at each signal, and how it ends."""

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from zerotrain.launching import failures as stopping
from zerotrain.training.callbacks import stop
from zerotrain.training.callbacks.stop import stop_requests


@pytest.fixture
def ends_with() -> Iterator[Callable[[Callable[[Callable[..., None]], None]], tuple[int, list[str]]]]:
    """(what to do, which is given a function to say something with) -> the exit code of a process that does it, and
    what it has said."""
    pids = []

    def run(body: Callable[[Callable[..., None]], None]) -> tuple[int, list[str]]:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:

            def say(*said: object) -> None:
                os.write(writer, (" ".join(map(str, said)) + "\n").encode())

            signal.alarm(20)
            try:
                body(say)
                os._exit(0)
            finally:
                os._exit(99)
        pids.append(pid)
        os.close(writer)
        with os.fdopen(reader) as file:
            said = file.read().splitlines()
        return os.waitstatus_to_exitcode(os.waitpid(pids.pop(), 0)[1]), said

    yield run
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)
    time.sleep(0.2)  # for the thread that notes it


def test_in_the_training_the_first_signal_ends_nothing_and_one_after_a_rank_is_gone_interrupts(ends_with) -> None:
    def body(say: Callable[..., None]) -> None:
        all_there = True

        def note(signum: int, in_order: bool) -> bool:
            say("noted", signum, in_order)
            return in_order and all_there

        stopping.stop_in_order(note, lambda: say("settled"))
        with stop_requests() as request:
            send(signal.SIGUSR1)
            send(signal.SIGTERM)  # the same request
            say(request.signum, request.at_once)
            all_there = False
            try:
                send(signal.SIGTERM)
                time.sleep(3600)
            except KeyboardInterrupt:
                say("interrupted")

    code, said = ends_with(body)
    assert code == 0
    noted = [f"noted {signum} True" for signum in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM)]
    assert said == [*noted[:2], f"{int(signal.SIGUSR1)} False", noted[2], "interrupted"]


def test_a_second_request_ends_a_rank_that_hangs_after_the_grace(ends_with, monkeypatch) -> None:
    monkeypatch.setattr(stopping, "STOP_GRACE_S", 0.1)
    monkeypatch.setattr(stopping, "SAME_REQUEST_S", 0.0)
    monkeypatch.setattr(stop, "SAME_REQUEST_S", 0.0)

    def body(say: Callable[..., None]) -> None:
        stopping.stop_in_order(lambda signum, in_order: say("noted", in_order) or in_order, lambda: say("settled"))
        with stop_requests():
            send(signal.SIGTERM)
            while True:  # what is interrupted goes on, as a collective does that waits
                try:
                    send(signal.SIGTERM)
                except KeyboardInterrupt:
                    say("interrupted")
                    time.sleep(3600)

    code, said = ends_with(body)
    assert code == 128 + signal.SIGTERM
    assert said[0] == "noted True"
    assert sorted(said[1:]) == ["interrupted", "noted False", "settled"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2], ids=lambda signum: signum.name)
def test_before_the_training_a_signal_ends_the_rank_at_once(ends_with, signum: int) -> None:
    def body(say: Callable[..., None]) -> None:
        stopping.stop_in_order(lambda signum, in_order: say("noted", in_order) or in_order, lambda: say("settled"))
        send(signum)
        time.sleep(3600)

    assert ends_with(body) == (128 + signum, ["noted False", "settled"])
