"""Bytes on their way between a disk and a window, as an event that is waited for."""

from collections.abc import Sequence
from concurrent.futures import Future

from zerotrain.device.device import Event


class OnThreads(Event):
    """Pieces that threads read or write. To wait for them raises OffloadError, where one cannot be."""

    def __init__(self, parts: Sequence["Future[None]"]) -> None:
        self._parts = parts

    def wait(self) -> None:
        # All of them, also behind one that has failed: nobody may write into a window that is used again.
        errors = [error for part in self._parts if (error := part.exception()) is not None]
        self._parts = ()
        if errors:
            raise errors[0]


class OnThreadAndStream(Event):
    """Pieces that threads read, and that a stream of a GPU copies behind them; waited for as `OnThreads`."""

    def __init__(self, copied: "Future[Event]") -> None:
        self._copied = copied

    def wait(self) -> None:
        self._copied.result().wait()

    def settle(self) -> None:
        self._copied.result().settle()
