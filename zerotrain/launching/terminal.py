"""Output that nobody reads any more, as after `| head -1`: a run goes on without it."""

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

_NOBODY_READS = (errno.EPIPE, errno.EIO)
"""Of a pipe, and of a terminal that was closed."""


class LastingStream(io.TextIOBase):
    """Passes on what is written, until nobody reads it. Rank 0 failed in its next line then, and the run was said to
    have lost rank 1 (2026-11-21)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or do nothing."""
        self._last(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, or do nothing."""
        self._last(self._stream.flush)

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The stream's."""
        return self._stream.fileno()

    def writable(self) -> bool:
        """Always."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's."""
        return self._stream.encoding

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _last(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            if error.errno not in _NOBODY_READS:
                raise
            # By descriptor: what is still in the stream's buffer, and what C++ and the ranks print, goes there as well.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def outlast_readers() -> None:
    """Let this process go on when nobody reads its output, or where it was started without any."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # by `>&-`; the next file to be opened would get what is printed
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere == descriptor:
                os.set_inheritable(descriptor, True)  # by the ranks
            else:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            stream = os.fdopen(descriptor, "w", closefd=False)
        escape_what_cannot_be_written(stream)
        setattr(sys, name, LastingStream(stream))


def escape_what_cannot_be_written(stream: TextIO) -> None:
    """Let no text end the process: a terminal of another language, or half a character in a sample of text."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
