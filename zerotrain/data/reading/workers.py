"""Micro-batches read by processes, for datasets that take long over an item.

A worker lives as long as the process that started it wants: it holds one end of a pipe, and ends itself when nobody
holds the other, that is when the run is over, or its rank was killed, whatever the worker is just doing. Signals to
stop it ignores: they come to all processes of a terminal, and of torchrun, and it is the rank that ends in order.

A worker pickles a value itself before it sends the first byte, so that an error comes in the value's place. The rank
waits for the value, for the end of the worker's process, and for no longer than a row may take (`RowPlace`).
"""

import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import multiprocessing
from torch.utils.data._utils import worker as torchs_worker

from zerotrain.data.reading.fetch import PLACE, RowError, RowPlace, seed_by

_IGNORED_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT,
)  # fmt: skip

_JOIN_S = 1.0
"""A worker that is not gone then, since it is stopped, or stuck in code that keeps Python from running, is killed. One
that is stuck in the kernel is not waited for any longer."""


@contextmanager
def read_in_workers(
    read: Callable[[Any], Any],
    wanted: Iterator[Any],
    num_workers: int,
    num_ahead: int,
    *,
    describe: Callable[[Any], str] = str,
    timeout_s: float = 300.0,
) -> Iterator[Iterator[Any]]:
    """`map(read, wanted)` in the same order, computed by processes; at its end none of them is left.

    Args:
        num_ahead: values that are computed before they are asked for, at least one by each process.
        describe: the words for what is wanted, such as "data.train: row 3", where no row is at fault alone.
        timeout_s: as of `RowPlace`.

    Raises:
        RowError: `read` has raised an exception, of which the message and, as the cause, the traceback come. Or a value
            cannot be sent, or a row takes too long.
        RuntimeError: a worker has died.
    """
    shared = torch.zeros(num_workers, 4, dtype=torch.float64).share_memory_()
    places = [RowPlace(timeout_s, values) for values in shared]
    pipes = [multiprocessing.Pipe() for _ in places]
    ends = [end for pipe in pipes for end in pipe]
    workers: list[_Worker] = []
    try:
        for number, (place, (mine, its)) in enumerate(zip(places, pipes, strict=True)):
            others = [end for end in ends if end is not its]
            process = multiprocessing.Process(
                target=_work, args=(read, describe, place, its, others, number, num_workers), daemon=True
            )
            place.begin()
            process.start()
            workers.append(_Worker(process, mine, place))
        for _, its in pipes:
            its.close()
        yield _in_order(workers, wanted, -(-num_ahead // num_workers) * num_workers, describe)
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
    place: RowPlace

    def receive(self, described: str) -> Any:
        """The value that it was asked for first, of those which it was not yet taken from."""
        while not wait([self.pipe, self.process.sentinel], self.place.look_s):
            if reason := self.place.overdue():
                raise RowError(f"{self.place} cannot be read by a worker process: {reason}") from reason
        try:
            value = self.pipe.recv()
        except Exception as error:  # of a class that can be pickled but not made again, or since the process is gone
            self.process.join(_JOIN_S)
            if self.process.is_alive():
                said = f"{type(error).__name__}: {error}"
                raise RowError(f"{described} cannot be taken from a worker process: {said}") from error
            code = self.process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise RuntimeError(f"a worker process that reads the data {how}, at {self.place}") from error
        if isinstance(value, _Failure):
            raise RowError(value.message) from WorkerError(f"in a worker process\n{value.traceback}")
        return value


def _in_order(
    workers: Sequence[_Worker], wanted: Iterator[Any], num_ahead: int, describe: Callable[[Any], str]
) -> Iterator[Any]:
    """Ask the workers in turn for what is wanted, so many ahead; what they have read, in that order."""
    turns, asked = zip(cycle(workers), wanted, strict=False), deque[tuple[_Worker, Any]]()
    while True:
        for worker, each in islice(turns, num_ahead - len(asked)):
            with suppress(ConnectionError):  # it is gone, which is told in the place of its value
                worker.pipe.send(each)
            asked.append((worker, each))
        if not asked:
            return
        worker, each = asked.popleft()
        yield worker.receive(describe(each))


def _work(
    read: Any,
    describe: Callable[[Any], str],
    place: RowPlace,
    pipe: Connection,
    others: Sequence[Connection],
    number: int,
    num_workers: int,
) -> None:
    """The life of a worker."""
    for signum in _IGNORED_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)  # the rank's: what is written there would be taken for a signal to the rank
    for end in others:
        end.close()
    torch.set_num_threads(1)
    seed_by("worker", number)
    # For torch.utils.data.get_worker_info(), which a dataset may ask.
    torchs_worker._worker_info = torchs_worker.WorkerInfo(
        id=number, num_workers=num_workers, seed=torch.initial_seed(), dataset=read
    )
    asked: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_take, args=(pipe, asked), name="zerotrain-data-end", daemon=True).start()
    PLACE.set(place)
    with suppress(ConnectionError):  # the rank is gone
        while True:
            place.end()
            wanted = asked.get()
            place.begin()
            try:
                value = read(wanted)
                place.begin()
                packed = ForkingPickler.dumps(value)
            except Exception as error:
                said = f"{describe(wanted)} cannot be sent by a worker process: {type(error).__name__}: {error}"
                failure = _Failure(str(error) if isinstance(error, RowError) else said, traceback.format_exc())
                packed = ForkingPickler.dumps(failure)
            place.end()
            pipe.send_bytes(packed)


def _take(pipe: Connection, asked: "SimpleQueue[Any]") -> None:
    """Take what the worker is asked for, and end this process as soon as nobody holds the other end."""
    try:
        while True:
            asked.put(pipe.recv())
    finally:
        os._exit(0)
