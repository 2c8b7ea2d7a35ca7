"""Reads the rows of a rank's next steps before they are needed.

Three ways to read, chosen by what the dataset allows; the rows are the same, to the bit:

    a thread            two steps ahead, of datasets that draw no random numbers (`zerotrain.data.reading.fetch`)
    worker processes    two steps ahead, of all datasets, with `num_workers`
    between two steps   the others, since a thread that draws would change what the model draws beside it
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch

from zerotrain.data.reading.batches import GlobalBatchSampler, RowsToRead
from zerotrain.data.reading.device_copies import Copied, DeviceCopies
from zerotrain.data.reading.fetch import (
    PLACE,
    Collate,
    RowError,
    RowPlace,
    fetch_rows,
    in_time,
    may_be_read_beside,
    place_of,
)
from zerotrain.data.reading.inputs import Weigh, num_labels
from zerotrain.data.reading.workers import read_in_workers

NUM_STEPS_AHEAD = 2
_JOIN_S = 1.0
"""How long an ending run waits for a row that is just being read."""


class LoadedStep(NamedTuple):
    """The micro-batches of a rank in one step."""

    micro_batches: list[Any]
    """On the device, as collate has made them; in the order in which the rank runs them."""
    weights: list[float]
    """Of each of them, in the mean loss of the step."""
    num_labels: list[int]
    """In each of them, those that count."""


Read = Callable[[tuple[RowsToRead, int]], tuple[Any, int]]
"""(a micro-batch, its number of rows) of (rows, number of the step from 1)."""


def reader_of(dataset: Any, seed: int, collate: Collate | None, vocab_size: int | None = None) -> Read:
    """Reads micro-batches of a dataset, with arguments of `fetch_rows`; can be pickled if the dataset can."""
    return partial(_read, partial(fetch_rows, dataset, seed=seed, collate=collate, vocab_size=vocab_size))


def _read(fetch: Callable[..., Any], wanted: tuple[RowsToRead, int]) -> tuple[Any, int]:
    (rows, epochs), step = wanted
    with torch.profiler.record_function("zerotrain data: read rows"):
        batch = fetch(rows, epochs=epochs, step=step)
        return batch, len(rows)


def _described(wanted: tuple[RowsToRead, int]) -> str:
    (rows, epochs), step = wanted
    return place_of("data.train", rows, epochs, step)


class StepLoader:
    """Gives a rank the micro-batches of one step after the other. Use as a context manager: at its end nothing is left
    of the thread and the processes.

    Args:
        dataset: map-style.
        sampler: says which rows; the first step is the one at its `rows_consumed`.
        device: where the micro-batches are to lie.
        num_steps: how many there are to read.
        first_step: number of the step before the first, for messages.
        num_workers: processes that read; 0 for none.
        collate: makes a batch of items; None: torch's `default_collate`.
        num_steps_ahead: 0 reads each step when it is asked for.
        vocab_size: tokens that the model knows, see `fetch_rows`.
        timeout_s: seconds that the other ranks wait for this one; a row must take less.
        weigh: of a micro-batch in the host's memory.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: GlobalBatchSampler,
        *,
        device: torch.device,
        num_steps: int,
        first_step: int = 0,
        num_workers: int = 0,
        collate: Collate | None = None,
        num_steps_ahead: int = NUM_STEPS_AHEAD,
        vocab_size: int | None = None,
        timeout_s: float = 300.0,
        weigh: Weigh = num_labels,
    ) -> None:
        self.wait_s = 0.0
        """How long the last step was waited for."""
        self.reads_ahead = num_steps_ahead > 0 and (num_workers > 0 or may_be_read_beside(dataset, collate))
        self._copies, self._weigh = DeviceCopies(device), weigh
        self._open = ExitStack()
        self._num_micro_batches = sampler.num_micro_batches * sampler.leaves_per_rank
        reader = reader_of(dataset, sampler.seed, collate, vocab_size)
        size, start = sampler.global_batch_size, sampler.rows_consumed
        wanted = (
            (rows, first_step + step + 1)
            for step in range(num_steps)
            for rows in sampler.micro_batches(start + step * size)
        )
        if num_workers > 0:
            num_ahead = max(num_steps_ahead, 1) * self._num_micro_batches
            read = self._open.enter_context(
                read_in_workers(reader, wanted, num_workers, num_ahead, describe=_described, timeout_s=timeout_s)
            )
        else:
            read = map(reader, wanted)
        self._steps = self._copied_steps(read)
        self._in_time = nullcontext if self.reads_ahead or num_workers > 0 else partial(in_time, timeout_s)
        if self.reads_ahead:
            self._steps = self._open.enter_context(ReadAhead(self._steps, num_steps_ahead, timeout_s))

    def _copied_steps(self, read: Iterator[tuple[Any, int]]) -> Iterator[tuple[Copied, list[float], list[int]]]:
        while step := list(islice(read, self._num_micro_batches)):
            counts = [self._weigh(*each) for each in step], [num_labels(*each) for each in step]
            yield self._copies.start([batch for batch, _ in step]), *counts

    def next_step(self) -> LoadedStep:
        """The micro-batches of the next step. Those of the one before must no longer be used.

        Raises:
            RowError: a row could not be read, or not in time.
            StopIteration: there was none left.
            RuntimeError: a worker process has died.
        """
        started_s = time.perf_counter()
        with self._in_time():
            copied, weights, numbers = next(self._steps)
        micro_batches = self._copies.finish(copied)
        self.wait_s = time.perf_counter() - started_s
        return LoadedStep(micro_batches, weights, numbers)

    def __enter__(self) -> "StepLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


class ReadAhead(Iterator[Any]):
    """An iterator that a thread runs ahead of who asks for its values, by so many at most. An exception comes where
    its value would have.

    Args:
        timeout_s: as of `RowPlace`, for rows that the thread reads itself.
    """

    def __init__(self, values: Iterator[Any], num_ahead: int, timeout_s: float = 300.0) -> None:
        self._values, self._num_ahead, self._place = values, num_ahead, RowPlace(timeout_s)
        self._ready: deque[Any] = deque()
        self._error: BaseException | None = None
        """The error raised in place of a value; StopIteration behind the last."""
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="zerotrain-data", daemon=True)
        self._thread.start()

    def __next__(self) -> Any:
        with self._changed:
            # Signals are handled while this waits: the main thread may be told to stop.
            while not self._changed.wait_for(lambda: self._ready or self._error, self._place.look_s):
                if reason := self._place.overdue():
                    raise RowError(f"{self._place} cannot be read: {reason}") from reason
            if not self._ready and self._error is not None:
                raise self._error
            value = self._ready.popleft()
            self._changed.notify_all()
            return value

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        """Stop reading. It waits for the read under way, unless that takes long."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        PLACE.set(self._place)
        while self._wait_for_room():
            try:
                value = next(self._values)
            except BaseException as error:  # whatever it is, who asks for the value is to see it
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready.append(value)
                self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        """False where no more is to be read."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._num_ahead)
            return not self._closed
