"""Rows of a map-style dataset, read and put together to a batch: the same bits in any rank, worker process or thread,
at any time. The random numbers of a row (a crop, a mask, dropped words) are a function of seed, epoch and row: torch's,
Python's and numpy's global generators are seeded so before each `dataset[row]`, and before `collate` by all its rows;
afterwards they are as they were. Two datasets whose rows were read by 1 rank and by 2 gave losses of 5.5496 and 5.5502
in the first step, with random masks from torch's generator (2026-11-22).

These generators belong to the whole process. A thread that seeded them would change the dropout of the model that
computes beside it, so:

* A thread may read a dataset that draws nothing: one that has `rows(indices)`, a list, a `TensorDataset`, and one
  that says so with `draws = False`. `may_be_read_beside` tells.
* All others are read where nothing else draws: in the main thread between two steps, or in processes of their own
  (`data.num_workers`). A dataset may always draw, unless it says that it does not.
* A generator of the dataset's own, such as `self.generator = torch.Generator()` or numpy's `default_rng()`, nobody can
  seed here: the dataset makes one in `__getitem__`, with a seed drawn there from torch's.
"""

import hashlib
import math
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import TensorDataset, default_collate

from zerotrain.data.reading.inputs import unknown_token
from zerotrain.files.suspension import suspended_s

Collate = Callable[[list[Any]], Any]
"""Makes a batch of items."""
_NUM_ROWS_SHOWN = 8
_MARGIN_S = 10.0
"""A row is given up so long before other ranks give up this one, or a quarter of what they wait: its name is the cause,
and not that a rank did not answer."""
_STOP_GRACE_S = 10.0
"""A row may take so long, and so long after the run was told to stop: what runs it may end it soon."""
LOOK_S = 1.0
"""So often whoever waits for a reader looks where it is."""


class RowError(RuntimeError):
    """Rows that could not be read; the exception that was raised is its cause.

    Args:
        message: one line that names the dataset, the rows, their epochs and the step.
    """


class StopTimeoutError(TimeoutError):
    """Cause of a `RowError`: the row was given up since the run is to stop."""


class RowPlace:
    """The row that a reader is at. Another thread or process, which waits for it, sees whether it gets on.

    Args:
        timeout_s: how long the other ranks wait for this one; a row must take less.
        values: memory for 4 numbers of float64, which is shared with another process; None: memory of this one.
    """

    stop_s: ClassVar[float] = math.inf
    """When this process was told to stop, by `time.monotonic()`."""

    def __init__(self, timeout_s: float, values: torch.Tensor | None = None) -> None:
        self._timeout_s, self._limit_s = timeout_s, timeout_s - min(_MARGIN_S, timeout_s / 4)
        self.look_s = min(LOOK_S, self._limit_s / 4)
        self._values = torch.zeros(4, dtype=torch.float64) if values is None else values

    def begin(self, row: int = -1, epoch: int = -1, step: int = 0) -> None:
        """A row, or something else for the micro-batch, begins."""
        self._values.numpy()[:] = time.monotonic(), row, epoch, step

    def end(self) -> None:
        """The reader has nothing to do."""
        self._values[0] = 0.0

    def overdue(self) -> TimeoutError | None:
        """The reason why the reader is not waited for any longer; None where it gets on."""
        since_s, now_s = float(self._values[0]), time.monotonic()
        if not since_s:
            return None
        busy_s = now_s - since_s - suspended_s(since_s)
        said = f"it did not end within {busy_s:.0f} s"
        if busy_s >= self._limit_s:
            more = "give launch.timeout_s=... more if it may take that long"
            return TimeoutError(f"{said}, where ranks wait {self._timeout_s:g} s for each other; {more}")
        if min(busy_s, now_s - self.stop_s) >= _STOP_GRACE_S:
            return StopTimeoutError(f"{said}, and the run was told to stop")
        return None

    def __str__(self) -> str:
        row, epoch, step = map(int, self._values[1:])
        if row >= 0:
            return place_of("data.train", [row], [epoch], step)
        return f"data.train: the rows of step {step}" if step else "data.train: the first rows of a process"


PLACE: ContextVar[RowPlace | None] = ContextVar("place", default=None)
"""Where `fetch_rows` notes what it reads; each thread has its own."""


@contextmanager
def in_time(timeout_s: float) -> Iterator[None]:
    """In here this thread reads rows itself, and gives up one that takes too long: a `RowError` whose cause is a
    TimeoutError. A signal interrupts it, so this holds for the main thread alone, and for code that a signal can
    interrupt.

    Args:
        timeout_s: as of `RowPlace`.
    """
    place, over, thread = RowPlace(timeout_s), threading.Event(), threading.current_thread()
    if thread is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if reason := place.overdue():
            place.end()
            raise reason
        if callable(before):
            before(signum, frame)

    def watch() -> None:
        while not over.wait(place.look_s):
            if place.overdue():
                signal.pthread_kill(thread.ident or 0, signal.SIGALRM)

    before, token = signal.signal(signal.SIGALRM, interrupt), PLACE.set(place)
    watching = threading.Thread(target=watch, name="zerotrain-data-watch", daemon=True)
    watching.start()
    try:
        yield
    finally:
        PLACE.reset(token)
        over.set()
        watching.join()
        if signal.getsignal(signal.SIGALRM) is interrupt:  # and not one that the dataset has set meanwhile
            signal.signal(signal.SIGALRM, before)


def fetch_rows(
    dataset: Any,
    rows: Sequence[int],
    *,
    seed: int,
    epochs: Sequence[int],
    step: int,
    collate: Collate | None = None,
    name: str = "data.train",
    vocab_size: int | None = None,
) -> Any:
    """Read one micro-batch.

    One call makes one micro-batch, not a step's: a collate function that pads does so no further than it must, and a
    batch of any structure need never be cut.

    Args:
        dataset: map-style. If it has `rows(indices) -> batch` and there is no `collate`, that is called once, with
            `rows`, and returns the batch. Else `dataset[row]` for each.
        rows: which items, at least one; the batch has them in this order.
        seed: of the run, at least 0.
        epochs: of each row: an item is read again in each epoch, and draws other random numbers. 0 in validation.
        step: number of the global batch, from 1; for messages alone.
        collate: makes a batch of a list of items; None: torch's `default_collate`.
        name: of the dataset, for messages.
        vocab_size: tokens that a language model knows, which is to be given the batch; None: nothing is looked for.

    Returns:
        The batch: in whatever structure, tensors with a first dimension of len(rows).

    Raises:
        RowError: the dataset or collate raised an exception, which is its cause; or a token is not known.
    """
    if collate is None and hasattr(dataset, "rows"):
        with _named(name, rows, epochs, step, "cannot be read"):
            batch = dataset.rows(list(rows))
    else:
        with _generators_put_back(draws(dataset, collate)) as seed_by:
            items = []
            for row, epoch in zip(rows, epochs, strict=True):
                with _named(name, [row], [epoch], step, "cannot be read"):
                    seed_by("row", seed, epoch, row)
                    items.append(dataset[row])
            with _named(name, rows, epochs, step, "cannot be collated into a batch"):
                seed_by("batch", seed, *epochs, *rows)
                batch = (collate or default_collate)(items)
    if vocab_size is not None and (unknown := unknown_token(batch, vocab_size)) is not None:
        item, token = unknown
        at = slice(item, item + 1) if item < len(rows) else slice(None)
        with _named(name, rows[at], epochs[at], step, "cannot be trained on"):
            raise ValueError(f"the token {token} is not among the model's, 0 to {vocab_size - 1}")
    if (place := PLACE.get()) is not None:
        place.end()
    return batch


def draws(dataset: Any, collate: Collate | None = None) -> bool:
    """Whether random numbers may be drawn while rows are read; what does not say `draws = False` may."""
    reads_whole = collate is None and hasattr(dataset, "rows")
    plain = isinstance(dataset, list | tuple | TensorDataset)
    of_items = not reads_whole and bool(getattr(dataset, "draws", not plain))
    return of_items or (collate is not None and bool(getattr(collate, "draws", True)))


def may_be_read_beside(dataset: Any, collate: Collate | None = None) -> bool:
    """Whether a thread may read rows while the main thread computes, with the same bits for both."""
    return not draws(dataset, collate)


@contextmanager
def seeded(*place: object) -> Iterator[None]:
    """Inside, the global generators draw what follows from a place; afterwards they are as they were."""
    with _generators_put_back(True) as seed_by:
        seed_by(*place)
        yield


@contextmanager
def _named(name: str, rows: Sequence[int], epochs: Sequence[int], step: int, what: str) -> Iterator[None]:
    if (place := PLACE.get()) is not None:
        place.begin(*(rows[0], epochs[0]) if len(rows) == 1 else (-1, -1), step)
    try:
        yield
    except (Exception, SystemExit) as error:  # whatever a user's class raises
        said = f"{type(error).__name__}: {error}"
        raise RowError(f"{place_of(name, rows, epochs, step)} {what}: {said}") from error


def place_of(name: str, rows: Sequence[int], epochs: Sequence[int], step: int) -> str:
    """Some rows in words: "data.train: row 3 (epoch 0, step 7)"."""
    which = f"row {rows[0]}" if len(rows) == 1 else f"rows {_listed(rows)}"
    when = f"epoch {epochs[0]}" if len(set(epochs)) == 1 else f"epochs {_listed(epochs)}"
    return f"{name}: {which} ({when}, step {step})"


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:_NUM_ROWS_SHOWN])
    return shown + (f" and {len(numbers) - _NUM_ROWS_SHOWN} more" if len(numbers) > _NUM_ROWS_SHOWN else "")


@contextmanager
def _generators_put_back(are_used: bool) -> Iterator[Callable[..., None]]:
    """Inside, what is yielded seeds the global generators by its arguments; afterwards they are as they were."""
    if not are_used:
        yield lambda *_: None
        return
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield seed_by
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def seed_by(*place: object) -> None:
    """Seed the global generators by some numbers and words."""
    digest = hashlib.sha256(" ".join(map(str, place)).encode()).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8]))  # torch.manual_seed also seeds GPUs
    random.seed(digest[8:16])
    np.random.seed(np.frombuffer(digest[16:24], dtype=np.uint32))
