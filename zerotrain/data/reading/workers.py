"""Micro-batches read by processes, for datasets that take long over an item.

A worker lives as long as the process that started it wants: it holds one end of a pipe, and ends itself when nobody
holds the other, that is when the run is over, or its rank was killed, whatever the worker is just doing. Signals to
stop it ignores: they come to all processes of a terminal, and of torchrun, and it is the rank that ends in order.
"""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import multiprocessing
from torch.utils.data import DataLoader, Dataset

from zerotrain.data.reading.fetch import RowError

_IGNORED_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT,
)  # fmt: skip

_JOIN_S = 1.0
"""A worker that is not gone then, since it is stuck in the kernel or in code that keeps Python from running, is not
waited for."""


@contextmanager
def read_in_workers(
    read: Callable[[Any], Any], wanted: Iterator[Any], num_workers: int, num_ahead: int
) -> Iterator[Iterator[Any]]:
    """`map(read, wanted)` in the same order, computed by processes; at its end none of them is left.

    Enter it in the main thread: there torch notices that a worker was killed.

    Args:
        num_ahead: values that are computed before they are asked for, at least one by each process.

    Raises:
        RowError: `read` has raised an exception, of which the message and, as the cause, the traceback come.
        RuntimeError: a worker has died.
    """
    lives, ends = multiprocessing.Pipe(duplex=False)
    loader: DataLoader[Any] = DataLoader(
        _Read(read),
        sampler=wanted,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=num_workers,
        prefetch_factor=-(-num_ahead // num_workers),
        worker_init_fn=partial(_begin_worker, lives, ends),
        generator=torch.Generator(),  # of its own: it draws a seed
    )
    others = set(multiprocessing.active_children())
    values = iter(loader)
    workers = set(multiprocessing.active_children()) - others
    lives.close()
    try:
        yield map(_unpacked, _received(values))
    finally:
        ends.close()
        for worker in workers:
            worker.join(_JOIN_S)


class _Failure(NamedTuple):
    """A worker sends it in place of a value."""

    message: str
    traceback: str


class WorkerError(Exception):
    """Carries a worker's traceback to the caller."""


class _Read(Dataset[Any]):
    """Computes each requested value, in a worker."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def __getitem__(self, wanted: Any) -> Any:
        try:
            return self._read(wanted)
        except Exception as error:
            said = str(error) if isinstance(error, RowError) else f"{type(error).__name__}: {error}"
            return _Failure(said, traceback.format_exc())


def _received(values: Iterator[Any]) -> Iterator[Any]:
    """The same; that a worker is gone, which has sent a value whose memory is still its own, torch does not notice."""
    try:
        yield from values
    except (ConnectionError, EOFError, FileNotFoundError) as error:
        raise RuntimeError(f"a worker process that reads the data exited unexpectedly: {error!r}") from error


def _unpacked(value: Any) -> Any:
    if isinstance(value, _Failure):
        raise RowError(value.message) from WorkerError(f"in a worker process\n{value.traceback}")
    return value


def _as_it_is(value: Any) -> Any:
    return value


def _begin_worker(lives: Connection, ends: Connection, number: int) -> None:
    """Called first in each worker."""
    for signum in _IGNORED_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)  # the rank's: what is written there would be taken for a signal to the rank
    ends.close()
    threading.Thread(target=_end_with, args=(lives,), name="zerotrain-data-end", daemon=True).start()


def _end_with(lives: Connection) -> None:
    """End this process as soon as nobody holds the other end."""
    try:
        lives.recv_bytes()
    finally:
        os._exit(0)
