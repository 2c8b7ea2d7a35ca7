"""The report of a sweep while it runs: written again after each job that has ended."""

import time
from contextlib import suppress

from zerotrain.errors import ConfigError
from zerotrain.launching.sweep.sweep import Sweep
from zerotrain.report.journal import BEGUN

_PAGE_EVERY_S = 5.0
"""csv and json of 200 jobs cost 0.04 s of CPU, the page 0.1 s more."""


class KeptReport:
    """Keeps sweep.csv, sweep.json and report.html up to date. A file that cannot be written is told of at the
    sweep's end."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._num_told = self._num_on_page = 0
        """Jobs that had ended when the files, and the page, were written."""
        self._page_s = float("-inf")

    def look(self) -> None:
        """Write what is no longer up to date; the page only so often."""
        num = sum(event.event != BEGUN for event in self._sweep.events())
        is_page_due = num > self._num_on_page and time.monotonic() - self._page_s > _PAGE_EVERY_S
        if num == self._num_told and not is_page_due:
            return
        from zerotrain.report.files import CSV_NAME, HEADS, JSON_NAME, write_files  # imports torch, as the jobs do
        from zerotrain.report.rows import read_report

        with suppress(ConfigError, OSError):
            write_files(
                read_report(self._sweep.folder), self._sweep.folder, HEADS if is_page_due else (CSV_NAME, JSON_NAME)
            )
        self._num_told = num
        if is_page_due:
            self._num_on_page, self._page_s = num, time.monotonic()
