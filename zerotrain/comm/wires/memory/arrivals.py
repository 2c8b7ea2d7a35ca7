"""A thread that waits for what comes from other hosts: gloo tells of it to who waits, and the other ranks of a host are
to read it while the main thread computes."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerotrain.comm.wires.memory.errand import MovingThread

_LINGER_S = 2.0
"""Until a rank that ends leaves the thread to what it waits for."""
_Arrival = tuple[Sequence["Passage"], tuple[torch.Tensor, torch.Tensor] | None, Callable[[bytes], None], bytes]


class Passage(NamedTuple):
    """A part on its way from or to a rank of another host."""

    part: torch.Tensor
    """Which gloo writes or reads meanwhile."""
    rank: int
    work: dist.Work


class Arrivals:
    """Waits in the order in which it is asked to, which is the same on every rank.

    Args:
        fail: called with the reason when something has not come; nothing is waited for any more.
    """

    def __init__(self, fail: Callable[[str], None]) -> None:
        self._asked: queue.SimpleQueue[_Arrival | None] = queue.SimpleQueue()
        self._thread = MovingThread(target=_run, args=(self._asked, fail), name="zerotrain arrivals", daemon=True)
        self._thread.start()

    def tell(
        self,
        passages: Sequence[Passage],
        copied: tuple[torch.Tensor, torch.Tensor] | None,
        tell: Callable[[bytes], None],
        message: bytes,
    ) -> None:
        """When all is there, copy, then tell.

        Args:
            copied: (target, source)
        """
        self._asked.put((passages, copied, tell, message))

    def leave(self) -> None:
        """End the thread when all has come that it was asked to wait for."""
        self._asked.put(None)
        if not isinstance(threading.current_thread(), MovingThread):
            self._thread.join(_LINGER_S)


def wait_for(passages: Sequence[Passage]) -> None:
    """Wait for sends and receives.

    Raises:
        RuntimeError: with the rank that did not come, or is gone.
    """
    for passage in passages:
        try:
            passage.work.wait()
        except RuntimeError as error:
            reason = str(error).split("\n")[0]
            raise RuntimeError(f"{reason} (rank {passage.rank}, on another host)") from error


def _run(asked: "queue.SimpleQueue[_Arrival | None]", fail: Callable[[str], None]) -> None:
    with torch.no_grad():
        while (arrival := asked.get()) is not None:
            passages, copied, tell, message = arrival
            try:
                wait_for(passages)
                if copied is not None:
                    copied[0].copy_(copied[1])
            except Exception as error:
                fail(str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}")
                return
            # No name here holds a tensor when the others are told, and the main thread goes on.
            del arrival, passages, copied
            tell(message)
