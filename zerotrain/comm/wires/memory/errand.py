"""A courier's task: one use of a handle."""

import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable

MESSAGE = struct.Struct("=BIQQQ")
"""(kind, hash of the name, number of the handle, offset in the sender's memory, bytes)"""
THERE, READ = 1, 2


class Errand(ABC):
    """One use of a handle, on one rank.

    Args:
        code: a hash of the handle's name, to find ranks that do not do the same.
        nbytes: that each peer says are there.
    """

    def __init__(self, number: int, code: int, nbytes: int, peers: Iterable[int]) -> None:
        self.number, self.code, self.nbytes = number, code, nbytes
        self.not_there, self.not_read = set(peers), set(peers)
        """The peers that have not said where theirs lies, and those that have not read this rank's."""
        self.sent: object = None
        """Keeps alive the memory that the peers read, while they may."""
        self.is_done = False
        self.ended = threading.Lock()
        """Held until the errand is done, or will never be."""
        self.ended.acquire()

    def message(self, kind: int, offset: int = 0) -> bytes:
        """The message about this errand from one courier to another."""
        return MESSAGE.pack(kind, self.code, self.number, offset, self.nbytes)

    @abstractmethod
    def there(self, peer: int, file: int, offset: int) -> Iterable[int]:
        """A peer's part is there: do what can be done with it; give the peers whose parts are read."""

    def all_read(self) -> None:  # noqa: B027 -- most are done with it
        """All parts are read, and are what was sent."""


class MovingThread(threading.Thread):
    """One that collectives need to end: it waits for none."""
