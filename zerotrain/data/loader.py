"""Reads the rows of a rank's next steps before they are needed.

Three ways to read, chosen by what the dataset allows; the rows are the same, to the bit:

    a thread            two steps ahead, of datasets that draw no random numbers (`zerotrain.data.fetch`)
    worker processes    two steps ahead, of all datasets, with `num_workers`
    between two steps   the others, since a thread that draws would change what the model draws beside it
"""

import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import cycle, islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils import worker as torchs_worker

from zerotrain.data import fetch
from zerotrain.data.batches import GlobalBatchSampler, RowsToRead
from zerotrain.device.device import DONE, Event
from zerotrain.device.kinds import device_of

# Micro-batches on their way to the device. A GPU computes while they are copied.


class Copied(NamedTuple):
    """Micro-batches on their way."""

    batches: list[Any]
    event: Event


class DeviceCopies:
    """Copies to one device. `start` may be called in another thread than `finish`.

    On a GPU the copies run on a stream of their own, out of pinned memory. Memory that belongs to that stream may be
    given away by it as soon as nobody refers to it, though the model's stream still reads it: wrong inputs without a
    word. So `finish` lets the stream of the copies wait for all that was done with the step before, and only then lets
    go of it. (torch's `record_stream` would do too, and keep the memory for as long as the host happens to run ahead.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._stream = self._device.stream()
        self._in_use: list[Any] = []

    def start(self, batches: list[Any]) -> Copied:
        """Issue the copies of some micro-batches in the host's memory."""
        device = self._device.device
        if self._device.is_host:
            return Copied([fetch.to_device(batch, device) for batch in batches], DONE)
        with self._stream.current():
            # torch keeps pinned memory that a copy was issued from until the copy is over.
            pinned = [fetch.with_tensors(batch, torch.Tensor.pin_memory) for batch in batches]
            return Copied([fetch.to_device(batch, device, non_blocking=True) for batch in pinned], self._device.event())

    def finish(self, copied: Copied) -> list[Any]:
        """The same micro-batches on the device, for the current stream. The ones before may be written over from now
        on."""
        if copied.event is not DONE:
            self._stream.wait(self._device.event())
            copied.event.wait()
        self._in_use = copied.batches
        return copied.batches


# Micro-batches read by processes, for datasets with slow items.
#
# A worker lives as long as the process that started it wants: it holds one end of a pipe, and ends itself when
# nobody holds the other, that is when the run is over, or its rank was killed, whatever the worker is just doing.
# Signals to stop it ignores: they come to all processes of a terminal, and of torchrun, and it is the rank that ends
# in order.
#
# A worker pickles a value itself before it sends the first byte, so that an error comes in the value's place. The
# rank waits for the value, for the end of the worker's process, and for no longer than a row may take (`RowPlace`).


_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)

_JOIN_S = 1.0
"""A worker that is not gone then, since it is stopped, or stuck in code that keeps Python from running, is killed. One
that is stuck in the kernel is not waited for any longer."""


@contextmanager
def read_in_workers(
    read: Callable[[Any], Any], requests: Iterator[Any], num_workers: int, num_ahead: int, *, timeout_s: float = 300.0
) -> Iterator[Iterator[Any]]:
    """`map(read, requests)` in the same order, computed by processes; at its end none of them is left.

    Args:
        requests: their texts, such as "data.train: row 3", are told where no row is at fault alone.
        num_ahead: values that are computed before they are asked for, at least one by each process.
        timeout_s: as of `RowPlace`.

    Raises:
        RowError: `read` has raised an exception, of which the message and, as the cause, the traceback come. Or a value
            cannot be sent, or a row takes too long.
        RuntimeError: a worker has died.
    """
    shared = torch.zeros(num_workers, 4, dtype=torch.float64).share_memory_()
    places = [fetch.RowPlace(timeout_s, values) for values in shared]
    pipes = [torch.multiprocessing.Pipe() for _ in places]
    ends = [end for pipe in pipes for end in pipe]
    workers: list[_Worker] = []
    try:
        for number, (place, (rank_end, worker_end)) in enumerate(zip(places, pipes, strict=True)):
            other_ends = [end for end in ends if end is not worker_end]
            process = torch.multiprocessing.Process(
                target=_run_worker, args=(read, place, worker_end, other_ends, number, num_workers), daemon=True
            )
            place.begin()
            process.start()
            workers.append(_Worker(process, rank_end, place))
        for _, worker_end in pipes:
            worker_end.close()
        yield _in_order(workers, requests, -(-num_ahead // num_workers) * num_workers)
    finally:
        for end in ends:
            end.close()
        for worker in workers:
            worker.process.join(_JOIN_S)
            worker.process.kill()
            worker.process.join(_JOIN_S)


class _Failure(NamedTuple):
    """A worker sends it in place of a value."""

    message: str
    traceback: str


class WorkerError(Exception):
    """Carries a worker's traceback to the caller."""


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection
    place: fetch.RowPlace

    def receive(self, request: Any) -> Any:
        """The value of a request, the oldest without an answer."""
        while not wait([self.pipe, self.process.sentinel], self.place.look_s):
            if reason := self.place.overdue():
                raise fetch.RowError(f"{self.place} cannot be read by a worker process: {reason}") from reason
        try:
            value = self.pipe.recv()
        except Exception as error:  # of a class that can be pickled but not made again, or since the process is gone
            self.process.join(_JOIN_S)
            if self.process.is_alive():
                cause = f"{type(error).__name__}: {error}"
                raise fetch.RowError(f"{request} cannot be taken from a worker process: {cause}") from error
            code = self.process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise RuntimeError(f"a worker process that reads the data {how}, at {self.place}") from error
        if isinstance(value, _Failure):
            raise fetch.RowError(value.message) from WorkerError(f"in a worker process\n{value.traceback}")
        return value


def _in_order(workers: Sequence[_Worker], requests: Iterator[Any], num_ahead: int) -> Iterator[Any]:
    """Send the requests to the workers in turn, so many ahead; the values, in the order of the requests."""
    turns, pending = zip(cycle(workers), requests, strict=False), deque[tuple[_Worker, Any]]()
    while True:
        for worker, request in islice(turns, num_ahead - len(pending)):
            with suppress(ConnectionError):  # it is gone, which is told in the place of its value
                worker.pipe.send(request)
            pending.append((worker, request))
        if not pending:
            return
        worker, request = pending.popleft()
        yield worker.receive(request)


def _run_worker(
    read: Any, place: fetch.RowPlace, pipe: Connection, other_ends: Sequence[Connection], number: int, num_workers: int
) -> None:
    """The life of a worker."""
    for signum in _IGNORED_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)  # the rank's: a byte written there would be taken for a signal to the rank
    for end in other_ends:
        end.close()
    torch.set_num_threads(1)
    fetch.seed_by("worker", number)
    # For torch.utils.data.get_worker_info(), which a dataset may ask.
    torchs_worker._worker_info = torchs_worker.WorkerInfo(
        id=number, num_workers=num_workers, seed=torch.initial_seed(), dataset=read
    )
    requests: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_take_requests, args=(pipe, requests), name="zerotrain-data-end", daemon=True).start()
    fetch.PLACE.set(place)
    with suppress(ConnectionError):  # the rank is gone
        while True:
            place.end()
            request = requests.get()
            place.begin()
            try:
                value = read(request)
                place.begin()
                packed = ForkingPickler.dumps(value)
            except Exception as error:
                message = f"{request} cannot be sent by a worker process: {type(error).__name__}: {error}"
                failure = _Failure(str(error) if isinstance(error, fetch.RowError) else message, traceback.format_exc())
                packed = ForkingPickler.dumps(failure)
            place.end()
            pipe.send_bytes(packed)


def _take_requests(pipe: Connection, requests: "SimpleQueue[Any]") -> None:
    """Take the requests to the worker, and end this process as soon as nobody holds the other end."""
    try:
        while True:
            requests.put(pipe.recv())
    finally:
        os._exit(0)


NUM_STEPS_AHEAD = 2


class LoadedStep(NamedTuple):
    """The micro-batches of a rank in one step."""

    micro_batches: list[Any]
    """On the device, as collate has made them; in the order in which the rank runs them."""
    weights: list[float]
    """The weight of each in the mean loss of the step."""
    num_labels: list[int]
    """In each of them: the number of labels in the loss."""


class ReadRequest(NamedTuple):
    """A micro-batch to read."""

    rows: RowsToRead
    step: int
    """Its number, from 1."""

    def __str__(self) -> str:
        return fetch.place_of("data.train", *self.rows, self.step)


def reader_of(
    dataset: Any, seed: int, collate: fetch.Collate | None, vocab_size: int | None = None
) -> Callable[[tuple[RowsToRead, int]], tuple[Any, int]]:
    """Reads micro-batches of a dataset: (batch, its number of rows) of a `ReadRequest` or the like, with arguments of
    `fetch_rows`; can be pickled if the dataset can."""
    return partial(_read_rows, partial(fetch.fetch_rows, dataset, seed=seed, collate=collate, vocab_size=vocab_size))


def _read_rows(read: Callable[..., Any], request: tuple[RowsToRead, int]) -> tuple[Any, int]:
    (rows, epochs), step = request
    with torch.profiler.record_function("zerotrain data: read rows"):
        batch = read(rows, epochs=epochs, step=step)
        return batch, len(rows)


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
        further: the virtual ranks of others whose micro-batches come behind this rank's own, by step, from 1.
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
        collate: fetch.Collate | None = None,
        num_steps_ahead: int = NUM_STEPS_AHEAD,
        vocab_size: int | None = None,
        timeout_s: float = 300.0,
        weigh: fetch.Weigh = fetch.num_labels,
        further: Callable[[int], Sequence[int]] = lambda step: (),
    ) -> None:
        self.wait_s = 0.0
        """How long the last step was waited for."""
        self.reads_ahead = num_steps_ahead > 0 and (num_workers > 0 or not fetch.draws(dataset, collate))
        self._copies, self._weigh = DeviceCopies(device), weigh
        self._open = ExitStack()
        reader = reader_of(dataset, sampler.seed, collate, vocab_size)
        size, start = sampler.global_batch_size, sampler.rows_consumed
        self._sampler, self._further = sampler, further
        steps = range(first_step + 1, first_step + num_steps + 1)
        requests = (
            ReadRequest(rows, step)
            for place, step in enumerate(steps)
            for rows in sampler.micro_batches(start + place * size, self._virtual_ranks(step))
        )
        if num_workers > 0:
            num_ahead = max(num_steps_ahead, 1) * sampler.num_micro_batches * sampler.leaves_per_rank
            read = self._open.enter_context(
                read_in_workers(reader, requests, num_workers, num_ahead, timeout_s=timeout_s)
            )
        else:
            read = map(reader, requests)
        self._steps = self._copy_steps(read, steps)
        self._in_time = nullcontext if self.reads_ahead or num_workers > 0 else partial(fetch.in_time, timeout_s)
        if self.reads_ahead:
            self._steps = self._open.enter_context(ReadAhead(self._steps, num_steps_ahead, timeout_s))

    def _virtual_ranks(self, step: int) -> list[int]:
        return [*self._sampler.virtual_ranks, *self._further(step)]

    def _copy_steps(
        self, read: Iterator[tuple[Any, int]], numbers: Iterable[int]
    ) -> Iterator[tuple[Copied, list[float], list[int]]]:
        for number in numbers:
            step = list(islice(read, self._sampler.num_micro_batches * len(self._virtual_ranks(number))))
            counts = [self._weigh(*pair) for pair in step], [fetch.num_labels(*pair) for pair in step]
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
    """An iterator whose values a thread reads before they are asked for, so many at most. An exception comes in
    the place of its value.

    Args:
        timeout_s: as of `RowPlace`, for rows that the thread reads itself.
    """

    def __init__(self, values: Iterator[Any], num_ahead: int, timeout_s: float = 300.0) -> None:
        self._values, self._place = values, fetch.RowPlace(timeout_s)
        self._ready: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        """(value, error raised in its place); StopIteration behind the last value."""
        self._room, self._closed = threading.Semaphore(num_ahead), False
        self._thread = threading.Thread(target=self._run, name="zerotrain-data", daemon=True)
        self._thread.start()

    def __next__(self) -> Any:
        while True:
            try:  # signals are handled while this waits: the main thread may be told to stop
                value, error = self._ready.get(timeout=self._place.look_s)
                break
            except Empty:
                if reason := self._place.overdue():
                    raise fetch.RowError(f"{self._place} cannot be read: {reason}") from reason
        if error is not None:
            self._ready.put((None, error))  # again, whenever a value is asked for
            raise error
        self._room.release()
        return value

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        """Stop reading. It waits for the read under way, unless that takes long."""
        self._closed = True
        self._room.release()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        fetch.PLACE.set(self._place)
        while True:
            self._room.acquire()
            if self._closed:
                return
            try:
                self._ready.put((next(self._values), None))
            except BaseException as error:  # raised where the value is asked for
                self._ready.put((None, error))
                return
