"""The record of an engine's collectives: counts, bytes, order, and the message of a failure."""

import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import NoReturn

from zerotrain.comm.accounts.blame import is_of_others
from zerotrain.comm.accounts.overdue import Overdue
from zerotrain.comm.accounts.whereabouts import Whereabouts

ORDER_BITS = 52
"""Bits of the hash of the order of collectives: fp64 holds such an integer exactly."""
_INVERSE = pow(1_000_003, -1, 2**ORDER_BITS)


@dataclass
class Traffic:
    """The collectives of one span of time on one rank. Two are equal if they sent the same, however long they took."""

    calls: Counter[str] = field(default_factory=Counter)
    """Number of collectives by kind: gather, reduce, exchange, norm."""
    nbytes: Counter[str] = field(default_factory=Counter)
    """Bytes this rank sent, by kind."""
    waited_s: float = field(default=0.0, compare=False)
    """Seconds in which the host waited for other ranks. On a GPU it goes on while the GPU waits."""
    update_s: float = field(default=0.0, compare=False)
    """Seconds of the host for the optimizer's update, without that wait."""

    @property
    def sent_nbytes(self) -> int:
        """Bytes this rank sent, all kinds together."""
        return self.nbytes.total()


class Ledger:
    """Counts the traffic of optimizer steps apart from what happens outside them (evaluation, build, saving)."""

    def __init__(self) -> None:
        self.last_step = Traffic()
        """The last finished optimizer step: its forwards, backwards and update."""
        self.outside_steps = Traffic()
        """Everything that belongs to no optimizer step."""
        self.in_step = False
        """Whether what comes now belongs to an optimizer step."""
        self._this_step = Traffic()

    def record(self, kind: str, nbytes: int) -> None:
        """Add one collective that sent `nbytes` from this rank."""
        traffic = self._this_step if self.in_step else self.outside_steps
        traffic.calls[kind] += 1
        traffic.nbytes[kind] += nbytes

    def waited(self, seconds: float) -> None:
        """The host has waited so long for other ranks."""
        (self._this_step if self.in_step else self.outside_steps).waited_s += seconds

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The update of the step under way is made in here."""
        traffic = self._this_step
        begun_s = time.monotonic() - traffic.waited_s
        yield
        traffic.update_s = time.monotonic() - traffic.waited_s - begun_s

    def close_step(self) -> None:
        """An optimizer step ended: its traffic becomes `last_step`."""
        self.last_step, self._this_step = self._this_step, Traffic()
        self.in_step = False

    def drop_step(self) -> None:
        """The step under way was given up: its traffic belongs to none."""
        self.outside_steps.calls += self._this_step.calls
        self.outside_steps.nbytes += self._this_step.nbytes
        self._this_step = Traffic()
        self.in_step = False


class Journal:
    """Every collective of an engine is noted here when it is issued.

    Args:
        overlap: False lets each collective be waited for as soon as it is issued.
        overdue: watches them; None where the host waits for each.
    """

    def __init__(
        self, ledger: Ledger, whereabouts: Whereabouts, *, overlap: bool, overdue: Overdue | None = None
    ) -> None:
        self.ledger = ledger
        self.overlap = overlap
        self.overdue = overdue
        self._whereabouts = whereabouts
        self._orders: Counter[str] = Counter()

    @property
    def order(self) -> int:
        """A hash of the names of all collectives so far, in the order of each kind; equal where that is equal.

        Each kind is hashed apart: a rank that skips a unit has the same gathers and reductions as the others, but may
        issue a reduction behind a gather where the others do it before. That works, and is not to be refused.
        """
        order = 0
        for each in self._orders.values():
            order ^= each
        return order

    def note(self, kind: str, name: str) -> None:
        """A collective is issued: let its place in the order count."""
        self._orders[kind] = (self._orders[kind] * 1_000_003 + _code(name) + 1) % 2**ORDER_BITS

    def take_back(self, kind: str, name: str) -> None:
        """A collective that was noted last has not come about, on no rank."""
        self._orders[kind] = (self._orders[kind] - _code(name) - 1) * _INVERSE % 2**ORDER_BITS

    def fail(self, kind: str, name: str, error: RuntimeError, waited_s: float) -> NoReturn:
        """A collective has raised an error, after so many seconds.

        Raises:
            CommError: other ranks are gone, or did not come.
            RuntimeError: the error itself, of which no other rank is to blame: no memory, a fault of the device.
        """
        if not is_of_others(error):
            raise error
        raise self._whereabouts.lost_others(error, f"{kind} of {name}", waited_s) from error


@cache
def _code(name: str) -> int:
    return zlib.crc32(name.encode())
