"""How far a long piece of work has come, on stderr: one line that changes on a terminal, else one each ten seconds."""

import sys
import time

from zerotrain.files.untrusted import duration

QUIET_S = 2.0
"""Work that is done by then says nothing."""
LINE_S = 10.0
_REDRAW_S = 0.5


class Progress:
    """Tells of the preparing of text: part done, MB/s, time left.

    Args:
        nbytes: to read in all.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._begun_at, self._started_s = nbytes, 0, time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._next_s = self._started_s + (QUIET_S if self._is_terminal else LINE_S)
        self._last = ""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._last and self._is_terminal:
            print(file=sys.stderr)
        elif self._last and kind is None:
            self._print(self._last)

    def start(self, reached: int) -> None:
        """Some of the bytes were read before."""
        self._begun_at = reached
        if reached:
            self._print(f"preparing: goes on at {_mb(reached)} of {_mb(self._nbytes)} MB")

    def reached(self, nbytes: int, tokens: int) -> None:
        """So many bytes are read, and so many tokens made."""
        now = time.monotonic()
        took_s = max(1e-3, now - self._started_s)
        if took_s >= QUIET_S:
            rate = (nbytes - self._begun_at) / took_s
            left_s = max(0, self._nbytes - nbytes) / max(rate, 1.0)
            self._last = (
                f"preparing: {_mb(nbytes)} of {_mb(self._nbytes)} MB, {tokens:,} tokens, {rate / 1e6:.1f} MB/s, "
                f"{duration(left_s)} left"
            )
            if now >= self._next_s:
                self._next_s = now + (_REDRAW_S if self._is_terminal else LINE_S)
                self._print(self._last)

    def _print(self, line: str) -> None:
        if self._is_terminal:
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f}" if nbytes < 1e8 else f"{nbytes / 1e6:,.0f}"
