"""The record of an engine's collectives: counts, bytes, order, and the message of a failure."""

import json
import sys
import threading
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from zerotrain.comm.whereabouts import Whereabouts
from zerotrain.device.device import Event
from zerotrain.errors import CommError

# Small comparisons in frames of one size, each with its name. Ranks in different comparisons learn of it by the names.
#
# gloo ends a process, in words of C++, if it receives more bytes than it expects. Seen where one rank called
# `engine.freeze` and another `engine.step`.


NAME_NBYTES = 56
FRAME_NBYTES = 256
_NUMBER_NBYTES = 8
_ROOM_NBYTES = FRAME_NBYTES - NAME_NBYTES - _NUMBER_NBYTES


class OtherNamesError(Exception):
    """Ranks have come to different comparisons.

    Args:
        names: what each rank compares, in rank order.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names


def gather_framed(gather: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor, name: str) -> torch.Tensor:
    """(n,) on each rank -> (ranks, n) on every rank. Values too long for a frame follow in a second gather.

    Args:
        gather: does so with tensors of the same n on all ranks.

    Raises:
        OtherNamesError: on every rank; with the number of each one's bytes if all names are the same.
    """
    payload = values.contiguous().view(torch.uint8)
    fits = payload.numel() <= _ROOM_NBYTES
    frame = torch.zeros(FRAME_NBYTES, dtype=torch.uint8)
    frame[: NAME_NBYTES + _NUMBER_NBYTES] = _head(name, payload.numel())
    if fits:
        frame[NAME_NBYTES + _NUMBER_NBYTES :][: payload.numel()] = payload
    frames = gather(frame)
    heads = frames[:, : NAME_NBYTES + _NUMBER_NBYTES]
    if (heads != heads[0]).any():
        rows = [bytes(head.tolist()) for head in heads]
        names = [row[:NAME_NBYTES].decode("utf-8", "replace").strip() for row in rows]
        if len(set(names)) == 1:
            names = [f"{names[0]}, {int.from_bytes(row[NAME_NBYTES:])} bytes," for row in rows]
        raise OtherNamesError(names)
    everyone = frames[:, NAME_NBYTES + _NUMBER_NBYTES :][:, : payload.numel()] if fits else gather(payload)
    return everyone.contiguous().view(values.dtype)


@cache
def _head(name: str, nbytes: int) -> torch.Tensor:
    text = name.encode("utf-8", "replace")[:NAME_NBYTES].ljust(NAME_NBYTES)
    return torch.frombuffer(bytearray(text + nbytes.to_bytes(_NUMBER_NBYTES)), dtype=torch.uint8)


# A thread tells of an endless collective if the host does not wait for collectives.
#
# On a GPU `wait` returns at once and never raises: NCCL's watchdog ends the process some time after `timeout_s`,
# without Python, and its text knows no bucket. So this thread tells some seconds before it does.


MARGIN_S = 10.0
"""So long before the watchdog, or a quarter of the watchdog's time."""
POLL_S = 1.0

Tell: TypeAlias = Callable[[CommError | None], None]
"""Is told of an overdue collective, and by None of its end after all; on the watching thread."""


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
        clock: gives seconds.
    """

    def __init__(
        self, whereabouts: Whereabouts, timeout_s: float, tell: Tell, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._whereabouts, self._tell, self._clock = whereabouts, tell, clock
        self._margin_s = min(MARGIN_S, timeout_s / 4)
        self._limit_s = timeout_s - self._margin_s
        self._watched: deque[_Watched] = deque()
        self._changing = threading.Lock()
        self._reported: _Watched | None = None
        self._thread: threading.Thread | None = None

    def watch(self, collective: str, is_done: Callable[[], bool]) -> None:
        """A collective, such as "gather of blocks.0", was issued. Its memory is let go of when it has ended."""
        where = f"{collective} ({self._whereabouts.describe()})"
        with self._changing:
            self._drop_done()
            self._watched.append(_Watched(where, self._clock(), is_done))
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
        """Tell of the oldest collective if it is overdue, once; and then of its end."""
        with self._changing:
            self._drop_done()
            oldest = self._watched[0] if self._watched else None
        if self._reported is not None and self._reported is not oldest:
            self._reported = None
            self._whereabouts.take_back()
            self._tell(None)
        if oldest is None or self._reported is oldest or (waited_s := self._clock() - oldest.issued_s) < self._limit_s:
            return
        self._reported = oldest
        self._tell(self._whereabouts.overdue(oldest.where, waited_s, grace_s=self._margin_s / 2))

    def _drop_done(self) -> None:
        while self._watched:
            try:
                if not self._watched[0].is_done():
                    return
            except RuntimeError:  # of the device, which tells it to whoever calls next
                pass
            self._watched.popleft()


def _look_at(reference: "weakref.ref[Overdue]") -> None:
    while (overdue := reference()) is not None:
        overdue.look()
        del overdue
        time.sleep(POLL_S)


ACROSS = " across"
"""Behind the names and kinds of collectives along the second axis of a mesh."""
ORDER_BITS = 52
"""Bits of the hash of the order of collectives: fp64 holds such an integer exactly."""
_FACTOR = 1_000_003


@dataclass
class Traffic:
    """The collectives of one span of time on one rank. Two are equal if they sent the same, however long they took."""

    calls: Counter[str] = field(default_factory=Counter)
    """Number of collectives by kind: gather, reduce, exchange, norm."""
    nbytes: Counter[str] = field(default_factory=Counter)
    """Bytes this rank sent, by kind."""
    waited_s: float = field(default=0.0, compare=False)
    """Seconds of the host's waiting for other ranks. On a GPU it goes on while the GPU waits."""
    update_s: float = field(default=0.0, compare=False)
    """Seconds of the host for the optimizer's update, without its waiting."""

    @property
    def sent_nbytes(self) -> int:
        """Bytes this rank sent, all kinds together."""
        return self.nbytes.total()

    @property
    def across_nbytes(self) -> int:
        """Those of them along the second axis of a mesh, but for small comparisons."""
        return sum(nbytes for kind, nbytes in self.nbytes.items() if kind.endswith(ACROSS))


class Ledger:
    """Counts the traffic of optimizer steps apart from what happens outside them (evaluation, build, saving)."""

    def __init__(self) -> None:
        self.last_step = Traffic()
        """The last finished optimizer step: its forwards, backwards and update."""
        self.outside_steps = Traffic()
        """Everything outside of optimizer steps."""
        self.in_step = False
        """Whether what comes now belongs to an optimizer step."""
        self._this_step = Traffic()

    def record(self, kind: str, nbytes: int) -> None:
        """Add one collective with `nbytes` sent from this rank."""
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

    @contextmanager
    def recording(self) -> Iterator[Traffic]:
        """In here collectives are recorded, and not made: their traffic is what is yielded, and of no step."""
        former, self._this_step = self._this_step, Traffic()
        try:
            yield self._this_step
        finally:
            self._this_step = former

    def repeat(self, recorded: Traffic) -> None:
        """Count recorded traffic once more, in the step under way."""
        self._this_step.calls += recorded.calls
        self._this_step.nbytes += recorded.nbytes

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
        self.whereabouts = whereabouts
        self.recorded: Recorded | None = None
        """Gets what is issued, while a graph of it is recorded. Nobody may ask then whether it has ended."""
        self._orders: Counter[str] = Counter()

    @property
    def order(self) -> int:
        """A hash of the names of all collectives so far, in the order of each kind. Equal orders have equal hashes.

        Each kind is hashed apart: a rank that skips a unit has the same gathers and reductions as the others, but may
        issue a reduction behind a gather where the others do it before. This works, and is not to be refused.
        """
        order = 0
        for hash_of_kind in self._orders.values():
            order ^= hash_of_kind
        return order

    def note(self, kind: str, name: str) -> None:
        """A collective is issued: let its place in the order count."""
        into = self._orders if self.recorded is None else self.recorded.orders
        into[kind] = (into[kind] * _FACTOR + zlib.crc32(name.encode()) + 1) % 2**ORDER_BITS
        if self.recorded is not None:
            self.recorded.numbers[kind] += 1

    @contextmanager
    def recording(self) -> Iterator["Recorded"]:
        """In here collectives are issued for a graph of the device, to be made by `repeat` alone."""
        with self.ledger.recording() as traffic:
            self.recorded = Recorded(traffic)
            try:
                yield self.recorded
            finally:
                self.recorded = None

    def repeat(self, recorded: "Recorded") -> None:
        """A graph is replayed: note its collectives as if each were issued."""
        self.ledger.repeat(recorded.traffic)
        for kind, number in recorded.numbers.items():
            moved = self._orders[kind] * pow(_FACTOR, number, 2**ORDER_BITS)
            self._orders[kind] = (moved + recorded.orders[kind]) % 2**ORDER_BITS


@dataclass
class Recorded:
    """The collectives of a graph: what each replay adds to the ledger and to the order."""

    traffic: Traffic
    orders: Counter[str] = field(default_factory=Counter)
    """By kind, the hash of the names of its collectives as if none had come before."""
    numbers: Counter[str] = field(default_factory=Counter)
    """By kind, how many they are."""


# Small texts from rank to rank in the store, apart from the collectives of the training.


class Notes:
    """Notes of one subject, by name. No call waits for another rank, so any thread may make it.

    A note is read whole or not at all; if it is left again, the newer one. Others find it once the store has answered
    the writer's next call, and maybe a moment before.

    Args:
        store: see `Wire.store`.
        subject: of these notes alone, the same on every rank.

    Its methods raise CommError where the store is gone with the rank that kept it.
    """

    def __init__(self, store: dist.Store, subject: str) -> None:
        self._store = dist.PrefixStore(f"zerotrain/{subject}", store)
        self.timeout_s = store.timeout.total_seconds()  # type: ignore[attr-defined]  # as torch has it
        """For how long the ranks wait for each other in their collectives."""

    def leave(self, name: str, value: Any) -> None:
        """Leave a note for all ranks: what JSON can hold."""
        with _name_lost_store():
            self._store.set(name, json.dumps(value))

    def read(self, name: str) -> Any:
        """The note of this name; None as long as nobody has left it."""
        with _name_lost_store():
            return json.loads(self._store.get(name)) if self._store.check([name]) else None

    def count(self, name: str, added: int = 0) -> int:
        """The sum of what all ranks have added under a name so far, this call included."""
        with _name_lost_store():
            return int(self._store.add(name, added))


@contextmanager
def _name_lost_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise CommError(f"the store in which the ranks met is gone, with the rank that kept it: {reason}") from error
