"""Bytes on their way between a place of rest and a window, as an object that is waited for."""

from collections.abc import Sequence
from concurrent.futures import Future

import torch


class Transfer:
    """One copy that was begun. This one is done as soon as it is made."""

    def wait(self) -> None:
        """What this thread computes from here on, on the device, finds the bytes where they were to go.

        Raises:
            OffloadError: they cannot be brought there.
        """

    def settle(self) -> None:
        """The same for the host, and for whoever uses the source again."""
        self.wait()


DONE = Transfer()


class OnThreads(Transfer):
    """What threads read or write."""

    def __init__(self, parts: Sequence["Future[None]"]) -> None:
        self._parts = parts

    def wait(self) -> None:
        # All of them, also behind one that has failed: nobody may write into a window that is used again.
        errors = [error for part in self._parts if (error := part.exception()) is not None]
        self._parts = ()
        if errors:
            raise errors[0]


class OnStream(Transfer):
    """What a stream of a GPU copies."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def settle(self) -> None:
        self._event.synchronize()


class OnThreadAndStream(Transfer):
    """What threads read, and a stream of a GPU copies behind them."""

    def __init__(self, copied: "Future[OnStream]") -> None:
        self._copied = copied

    def wait(self) -> None:
        self._copied.result().wait()

    def settle(self) -> None:
        self._copied.result().settle()
