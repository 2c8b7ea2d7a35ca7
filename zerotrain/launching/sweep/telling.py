"""The lines that a running sweep prints: one when a job begins, one when it ends, and the cause if it failed; in a
terminal, below them, how far the running jobs are."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from zerotrain.config.schema import SweepConfig
from zerotrain.files.terminal import LastingStream
from zerotrain.files.untrusted import duration, printable
from zerotrain.launching.sweep.kept_report import KeptReport
from zerotrain.launching.sweep.status_line import StatusLine
from zerotrain.launching.sweep.sweep import Sweep
from zerotrain.report.journal import (
    BEGUN,
    COMPLETED,
    ENDED,
    FAILED,
    PRUNED,
    REFUSED,
    RUNNING,
    STOPPED,
    TAKEN,
    JobEvent,
)

_LOOK_EVERY_S = 0.2
_MAX_ERROR = 10_000
"""Characters."""


class Teller:
    """Reads the journal, tells of each event once, and keeps the report. It prints to the driver's own output, wherever
    jobs print.

    A thread looks, and after each event of a job that the driver runs itself, so does that. With such jobs the thread
    begins with the first: before, a fork server is forked from this process, which must have no other.
    """

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._out, self._err = (_copy_of(descriptor) for descriptor in (1, 2))
        self._last: dict[tuple[int, str], JobEvent] = {}
        """The last line of each job."""
        self._num_run = self._num_told = 0
        events = sweep.events_to_count()
        for event in events[: len(events) - len(sweep.events())]:  # of a study, before it went on
            self._last[event.job, event.folder] = event
        self._lock = threading.Lock()
        self._report, self._status = KeptReport(sweep), StatusLine(self._out, sweep.folder)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sweep-teller", daemon=True)
        if not sweep.in_driver:
            self._thread.start()

    def close(self) -> None:
        """Tell the rest; the sweep is over."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.look()
        self._status.erase()

    def look(self) -> None:
        """Tell what is new."""
        with self._lock:
            if self._thread.ident is None and not self._is_over.is_set():
                self._thread.start()
            events = self._sweep.events()
            for event in events[self._num_told :]:
                self._num_told += 1
                self._last[event.job, event.folder] = event
                self._num_run += event.event == ENDED
                if event.error and event.event in (ENDED, REFUSED) and event.status not in (STOPPED, PRUNED):
                    self._print(self._err, f"job {event.job}: {printable(event.error, _MAX_ERROR)}")
                self._print(self._out, " ".join(self._line(event)))
                if event.status == FAILED and self._sweep.gives_up_after(events[: self._num_told]):
                    self._print(
                        self._err,
                        f"{self._sweep.max_failures_in_a_row} jobs have failed one after the other, so the sweep ends; "
                        "mend their cause and give the same command with the same hydra.sweep.dir; "
                        "sweep.max_failures_in_a_row=0 goes on whatever fails",
                    )

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_EVERY_S):
            self.look()
            self._report.look()
            if not self._sweep.shows_all:
                with self._lock:
                    self._status.draw(list(self._last.values()))

    def _line(self, event: JobEvent) -> Iterator[str]:
        given = self._sweep.varied(event.overrides)
        yield f"job {event.job}"
        if event.event == BEGUN:
            yield f"begins in {printable(event.folder, keep='')}:"
            yield printable(" ".join(given or event.overrides), keep="")
            return
        if event.status == RUNNING:
            yield f"is run by pid {event.pid} on {printable(event.host, keep='')}"
        elif event.event == TAKEN:
            yield f"is taken as it lies in {printable(event.folder, keep='')}: {event.status}"
        else:
            yield "refused" if event.event == REFUSED else str(event.status)
        name = self._sweep.objectives[0]
        if (value := self._sweep.value_of(event)) is not None:
            yield f"with {'loss' if name == SweepConfig.objective else printable(name, keep='')} {_figures(value)}"
        yield f"({', '.join(self._sums())})"

    def _sums(self) -> Iterator[str]:
        done = [event for event in self._last.values() if event.event != BEGUN]
        total = self._sweep.total
        yield f"{len(done)}/{total}" if total else f"{len(done)} done"
        if num_failed := sum(event.status == FAILED for event in done):
            yield f"{num_failed} failed"
        if num_pruned := sum(event.status == PRUNED for event in done):
            yield f"{num_pruned} pruned"
        sign = -1 if self._sweep.directions[0] == "maximize" else 1
        compared = [event for event in done if event.status == COMPLETED]
        values = [(sign * value, event.job) for event in compared if (value := self._sweep.value_of(event)) is not None]
        if values:
            value, job = min(values)
            yield f"best {_figures(sign * value)} job {job}"
        if total and total > len(done) and self._num_run:
            left_s = (time.time() - self._sweep.begun_s) / self._num_run * (total - len(done))
            yield f"{duration(left_s)} left"

    def _print(self, stream: TextIO, line: str) -> None:
        sys.stdout.flush()
        self._status.erase()
        stream.write(f"{line}\n")
        stream.flush()


def _figures(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"


def _copy_of(descriptor: int) -> TextIO:
    """A stream that goes where this descriptor of the process goes now."""
    stream = os.fdopen(os.dup(descriptor), "w", encoding="utf-8", errors="backslashreplace")
    return LastingStream(stream)  # type: ignore[return-value]
