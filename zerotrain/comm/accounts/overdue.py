"""A thread that tells of a collective which does not end, where the host does not wait for collectives.

On a GPU `wait` returns at once and never raises: NCCL's watchdog ends the process some time after `timeout_s`, without
Python, and its text knows no bucket. So this thread tells some seconds before it does.
"""

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from zerotrain.comm.accounts.whereabouts import Whereabouts
from zerotrain.device.device import Event
from zerotrain.errors import CommError

MARGIN_S = 10.0
"""So long before the watchdog, or a quarter of what that waits."""
POLL_S = 1.0

Tell: TypeAlias = Callable[[CommError | None], None]
"""Is told of a collective that is overdue, and by None that it has ended after all; on the thread that watches."""


def tell_log(error: CommError | None) -> None:
    """Say it on stderr."""
    print("zerotrain: the collective has ended after all" if error is None else f"zerotrain: {error}", file=sys.stderr)


@dataclass(frozen=True)
class _Watched:
    where: str
    issued_s: float
    is_done: Callable[[], bool]


class Overdue:
    """Watches collectives from their issue to their end on the device.

    Args:
        timeout_s: after which the backend ends this process.
        now: the clock, in seconds.
    """

    def __init__(
        self,
        whereabouts: Whereabouts,
        timeout_s: float,
        tell: Tell = tell_log,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._whereabouts, self._tell, self._now = whereabouts, tell, now
        self._margin_s = min(MARGIN_S, timeout_s / 4)
        self._limit_s = timeout_s - self._margin_s
        self._watched: deque[_Watched] = deque()
        self._changing = threading.Lock()
        self._told: _Watched | None = None
        self._thread: threading.Thread | None = None

    def watch(self, collective: str, is_done: Callable[[], bool]) -> None:
        """A collective, such as "gather of blocks.0", was issued. Its memory is let go of when it has ended."""
        where = f"{collective} ({self._whereabouts.describe()})"
        with self._changing:
            self._drop_done()
            self._watched.append(_Watched(where, self._now(), is_done))
            if self._thread is None:
                # It does not keep this alive, and ends with it.
                self._thread = threading.Thread(
                    target=_look_at, args=(weakref.ref(self),), name="zerotrain-overdue", daemon=True
                )
                self._thread.start()

    @contextmanager
    def watching(self, collective: str, event: Callable[[], Event]) -> Iterator[None]:
        """In here the host issues a collective, and may wait for it.

        Args:
            event: gives one that is done when all is done that the device has been told.
        """
        ends: list[Event] = []
        self.watch(collective, lambda: bool(ends) and ends[0].is_done())
        try:
            yield
        finally:
            ends.append(event())

    def look(self) -> None:
        """Tell of the oldest collective if it is overdue, once; and if it has ended after that."""
        with self._changing:
            self._drop_done()
            oldest = self._watched[0] if self._watched else None
        if self._told is not None and self._told is not oldest:
            self._told = None
            self._whereabouts.take_back()
            self._tell(None)
        if oldest is None or self._told is oldest or (waited_s := self._now() - oldest.issued_s) < self._limit_s:
            return
        self._told = oldest
        self._tell(self._whereabouts.overdue(oldest.where, waited_s, grace_s=self._margin_s / 2))

    def _drop_done(self) -> None:
        while self._watched and _is_over(self._watched[0]):
            self._watched.popleft()


def _is_over(watched: _Watched) -> bool:
    try:
        return watched.is_done()
    except RuntimeError:  # of the device, which tells it to whoever calls next
        return True


def _look_at(reference: "weakref.ref[Overdue]") -> None:
    while (overdue := reference()) is not None:
        overdue.look()
        del overdue
        time.sleep(POLL_S)
