"""Requests: by signals, to the processes of a run; and to all ranks, to stop, to save or to change the stage, which
ride as one number on the norm's exchange."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Annotated

from msgspec import Meta

from zerotrain.files.untrusted import is_kind

SAVE = 1 << 8
"""Added to the number of a signal, or to 0."""
ONE_STAGE = SAVE << 1
"""Times the stage, and one more."""
STOP = SAVE << 4
"""Times the place of the asker for a stop among the names, from 1 on."""
ASKED = "control.yaml"
"""The first of the names."""
PRUNER = "sweep.pruner"
"""The second."""
CALLBACK = "callbacks."
"""The others begin so."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A wish of one rank, or what came of the wishes of all."""

    save: bool = False
    """After this step, beside the training."""
    stage: int | None = None
    """To train at from the next step on, until `zero.schedule` says otherwise."""
    stop: bool | str = False
    """After this step, saved. A text is the name of the asker; True stands for the callback with this request."""
    signal: int = 0
    """A signal to stop."""

    def __post_init__(self) -> None:
        if not is_kind(self.stage, Annotated[int, Meta(ge=0, le=3)] | None):
            raise ValueError(f"Request(stage={self.stage!r}): it must be 0, 1, 2, 3 or None")

    def __or__(self, other: "Request") -> "Request":
        """Both wishes; of two stages, stops or signals the first one."""
        return Request(
            save=self.save or other.save,
            stage=next((number for number in (self.stage, other.stage) if number is not None), None),
            stop=self.stop or other.stop,
            signal=self.signal or other.signal,
        )

    @property
    def stopped_by(self) -> str | None:
        """The name of the signal, or of the one who has asked for the stop; None: the run goes on."""
        return signal.Signals(self.signal).name if self.signal else str(self.stop) if self.stop else None

    def encoded(self, names: Sequence[str] = (ASKED, PRUNER)) -> int:
        """The number that tells this to the other ranks.

        Args:
            names: of all who may ask for a stop, the same on all ranks.
        """
        number = self.stage
        of_stage = 0 if number is None else (number + 1) * ONE_STAGE
        of_stop = (names.index(str(self.stop)) + 1) * STOP if self.stop else 0
        return self.signal + SAVE * bool(self.save) + of_stage + of_stop


def is_over(stopped_by: str | None) -> bool:
    """Whether a run that was stopped by this is done, as EarlyStopping or a pruner wants it. A run that a signal or
    control.yaml has stopped is to go on."""
    return stopped_by is not None and stopped_by.startswith((CALLBACK, PRUNER))


def decoded(numbers: Sequence[int], names: Sequence[str] = (ASKED, PRUNER)) -> Request:
    """The joint request of all ranks: each has sent its number with a step. The lowest rank with a wish for a stage or
    a stop is followed. SIGINT counts if signals differ, as when Ctrl-C comes to a run that a scheduler stops: the run
    is to exit as by it.
    """
    wishes = Request()
    for number in numbers:
        stage, stop = number % STOP // ONE_STAGE, number // STOP
        wishes |= Request(
            save=bool(number & SAVE),
            stage=stage - 1 if stage else None,
            stop=names[stop - 1] if stop else False,
            signal=signal.SIGINT if number % SAVE == signal.SIGINT else 0,
        )
    return wishes | Request(signal=next((number % SAVE for number in numbers if number % SAVE), 0))


# A signal to stop, in one process.

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Those that let a run stop in order. Slurm sends SIGTERM, or another so long before a job's time is up; submitit asks
it for SIGUSR2."""
SAME_REQUEST_S = 1.0
"""Signals so soon after the first are the same request: Ctrl-C comes from the terminal, and from the launcher too."""


class StopRequest:
    """The first signal to stop is kept, and whoever is to know is told; a later one ends the running step at once."""

    def __init__(self, tell: Callable[[int], object] = lambda signum: None) -> None:
        self.signum = 0
        """The first signal that came; 0 for none."""
        self.at_once = False
        """Whether the running step was interrupted. Kept, since the interrupt may surface as another error: a broken
        collective, say."""
        self._tell, self._first_s, self._hopeless = tell, 0.0, False

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler."""
        now_s = time.monotonic()
        if not self.signum:
            self.signum, self._first_s = signum, now_s
            self._hopeless |= self._tell(signum) is False
        is_another = now_s - self._first_s > SAME_REQUEST_S
        if not self.at_once and (is_another or self._hopeless):
            self.at_once = True
            raise KeyboardInterrupt(f"stopped at once by {signal.Signals(signum).name}")

    def give_up(self) -> None:
        """The next signal ends the running step, however soon it comes: no step can be ended in order any more."""
        self._hopeless = True


@contextmanager
def stop_requests(
    tell: Callable[[int], object] = lambda signum: None, others: Sequence[signal.Signals] = ()
) -> Iterator[StopRequest]:
    """Inside, a signal to stop ends nothing by itself: a loop looks at the request when a step is done.

    Only the main thread can be told; in any other one nothing changes.

    Args:
        tell: told the number of the first signal, when it comes. If it returns False, nothing can be ended in order,
            and the signal interrupts as a second one does.
        others: further signals, beside `STOP_SIGNALS`. One that this process ignores, as under nohup, stays ignored.
    """
    request = StopRequest(tell)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    heeded = [*STOP_SIGNALS, *(signum for signum in others if signal.getsignal(signum) != signal.SIG_IGN)]
    previous = {signum: signal.signal(signum, request.on_signal) for signum in heeded}
    try:
        yield request
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
