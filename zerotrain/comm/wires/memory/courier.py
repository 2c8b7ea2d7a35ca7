"""Moves data between the ranks of a host: a thread of each rank reads the others' memory where they tell it to.

Two kinds of messages pass between two ranks, both with the number of a handle. "There": what the handle sends lies at
this place of my memory. "Read": you may change what you sent. A rank whose own part is under way reads what others have
said is there, in whatever order it comes; so no rank waits for the main thread of another, but for its data.
"""

import os
import signal
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping

import torch

from zerotrain.comm.wires.memory.connections import Connections, closed_by
from zerotrain.comm.wires.memory.errand import MESSAGE, READ, THERE, Errand, MovingThread
from zerotrain.comm.wires.memory.local_peers import LocalPeer

_LINGER_S = 2.0
"""Until a rank that ends gives up on what is under way."""


class Courier:
    """The thread, and what the main thread tells it. It keeps no handle alive, but while it is used.

    Args:
        peers: by rank; closed in the end.
    """

    def __init__(self, peers: Mapping[int, LocalPeer]) -> None:
        self.connections = Connections(peers)
        self._errands: dict[int, Errand] = {}
        """Under way, by number."""
        self._said: dict[int, dict[int, deque[tuple[int, int, int]]]] = defaultdict(lambda: defaultdict(deque))
        """(code, offset, bytes) that peers have said are there, by number and peer, in their order."""
        self._issued: deque[int] = deque()
        """Numbers for the thread to look at, since peers were there before."""
        self._failure: str | None = None
        self._is_over = False
        self._thread = MovingThread(target=self._run, name="zerotrain courier", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system gives no thread
            self.connections.close()
            raise
        _OF_THIS_PROCESS.add(self)

    # ---- the main thread

    def begin(self, errand: Errand) -> None:
        """Begin an errand; `tell` the peers where this rank's part lies once it may be read.

        Raises:
            RuntimeError: a peer is gone, or something has failed before.
        """
        # First: the thread looks at the errands behind setting what is looked at here, so one of both sees the other.
        self._errands[errand.number] = errand
        if self._is_over or self.connections.gone:
            self._errands.pop(errand.number, None)
            self.close(closed_by(self.connections.gone))  # the others may wait for this rank, and not for who is gone
            raise RuntimeError(self._failure)
        if errand.number in self._said:
            self._issued.append(errand.number)
            self.connections.wake_up()

    def tell(self, message: bytes) -> None:
        """Send all peers the message of an errand that was begun; from any thread."""
        self.connections.send(self.connections.peers, message)

    def wait(self, errand: Errand, timeout_s: float) -> None:
        """Until an errand is done.

        Raises:
            RuntimeError: it will not be.
        """
        if isinstance(threading.current_thread(), MovingThread):  # in which Python happened to collect an engine
            raise RuntimeError("the thread that is to end this collective does not wait for it")
        if errand.ended.acquire(timeout=timeout_s):
            errand.ended.release()  # who waits again, such as what cleans up after an error, is told the same
        else:
            missing = sorted(errand.not_there | errand.not_read)
            self.close(f"Timed out waiting {timeout_s:g} s for rank {', '.join(map(str, missing))}")
        if not errand.is_done:
            raise RuntimeError(self._failure)

    def leave(self) -> None:
        """End the thread when nothing is under way any more, or a moment later: who exits may be ahead of the others,
        which still want what it has sent."""
        until_s = time.monotonic() + _LINGER_S
        cannot_wait = self._is_over or isinstance(threading.current_thread(), MovingThread)
        for errand in [] if cannot_wait else list(self._errands.values()):
            if errand.ended.acquire(timeout=max(0.0, until_s - time.monotonic())):
                errand.ended.release()
        self.close("the engine of this collective is gone")

    def close(self, failure: str) -> None:
        """End the thread, which reads and writes nothing any more when this returns; the peers see it."""
        self._failure = self._failure or failure
        self.connections.wake_up()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def require_going_on(self) -> None:
        """In the thread: stop here if it is to end.

        Raises:
            RuntimeError: it is.
        """
        if self._failure is not None:
            raise RuntimeError(self._failure)

    # ---- the thread

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
        try:
            with torch.no_grad():
                while self._failure is None:
                    self._go_on()
        except (RuntimeError, ConnectionError) as error:
            self._failure = self._failure or str(error)
        except Exception as error:
            self._failure = self._failure or f"{type(error).__name__}: {error}"
        self._end()

    def _go_on(self) -> None:
        for peer, message in self.connections.messages():
            if self._failure is not None:
                return
            if not message:
                self._lose(peer)
                continue
            kind, code, number, offset, nbytes = MESSAGE.unpack(message)
            if kind == THERE:
                self._said[number][peer].append((code, offset, nbytes))
                self._look_at(number)
            else:
                self._errands[number].not_read.discard(peer)
                self._end_if_done(number)
        while self._issued:
            self._look_at(self._issued.popleft())

    def _look_at(self, number: int) -> None:
        """Read what is there of an errand, if it is under way here."""
        if number in self._errands and number in self._said:
            self._read_what_is_there(self._errands[number], self._said[number])
            if not self._said[number]:
                del self._said[number]
            self._end_if_done(number)

    def _read_what_is_there(self, errand: Errand, said: dict[int, deque[tuple[int, int, int]]]) -> None:
        for peer in [each for each in said if each in errand.not_there]:
            code, offset, nbytes = said[peer].popleft()
            if not said[peer]:
                del said[peer]
            if (code, nbytes) != (errand.code, errand.nbytes):
                raise RuntimeError(
                    f"peer rank {peer} sends another collective of {nbytes} bytes where this rank expects one of "
                    f"{errand.nbytes}"
                )
            errand.not_there.discard(peer)
            read = tuple(errand.there(peer, self.connections.peers[peer].file.fileno(), offset))
            self.connections.require_here(read)
            self.connections.send(read, errand.message(READ))
            if not errand.not_there:
                errand.all_read()

    def _end_if_done(self, number: int) -> None:
        if not (self._errands[number].not_there or self._errands[number].not_read):
            # No name here holds the errand when the main thread goes on: a bucket stayed for a moment (2026-11-22).
            self._errands[number].is_done = True
            self._errands.pop(number).ended.release()

    def _lose(self, peer: int) -> None:
        for errand in list(self._errands.values()):
            if peer in errand.not_read or (peer in errand.not_there and not self._said[errand.number][peer]):
                raise ConnectionError(closed_by({peer}))

    def _end(self) -> None:
        self.connections.finish_sending()
        self._is_over = True
        self.connections.close()  # before anybody is told: the peers are to see the end before memory is given back
        while self._errands:
            self._errands.popitem()[1].ended.release()

    def leave_in_child(self) -> None:
        """In a forked process, which has no thread: end nothing but its own use."""
        if not self._is_over:
            self._failure, self._is_over = "this process was forked from a rank, and is none", True
            self.connections.close_in_child()


_OF_THIS_PROCESS: "weakref.WeakSet[Courier]" = weakref.WeakSet()


def _leave_in_child() -> None:
    for courier in list(_OF_THIS_PROCESS):
        courier.leave_in_child()


os.register_at_fork(after_in_child=_leave_in_child)
