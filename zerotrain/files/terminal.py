"""The terminal: output that nobody reads any more or that a full disk refuses, and the words for a missing extra."""

import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TextIO

from zerotrain.files.untrusted import only_regular

_NOBODY_READS = (errno.EPIPE, errno.EIO)
"""Errors of a closed pipe, and of a closed terminal."""


_errors: list[int] = []
"""Descriptors on which the user reads errors while a file takes what is printed."""


class StandIn:
    """Stands in the place of a stream, and answers questions as the stream does."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write it."""
        return int(self._stream.write(text))

    def writelines(self, lines: Iterable[str]) -> None:
        """Write some."""
        for line in lines:
            self.write(line)

    def close(self) -> None:
        """Nothing: the stream is another's. Python calls this at the end, and tells of its errors since 3.13."""


class LastingStream(StandIn):
    """Passes on what is written, until that fails. Rank 0 failed in its next line when nobody read any more, and the
    run was said to have lost rank 1 (2026-11-21).

    Args:
        ends_with_reader: whether the process ends then, as by SIGPIPE.
    """

    problem: str | None = None
    """Why what was written went nowhere, though somebody may have waited for it."""

    def __init__(self, stream: TextIO, *, ends_with_reader: bool = False) -> None:
        super().__init__(stream)
        self._ends_with_reader = ends_with_reader

    def write(self, text: str) -> int:
        """Write, or do nothing."""
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, or do nothing."""
        self._attempt(self._stream.flush)

    def _attempt(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            if error.errno not in _NOBODY_READS:
                self.problem = self.problem or error.strerror
            elif self._ends_with_reader:
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGPIPE)
            # By descriptor: what is still in the stream's buffer, and what C++ and the ranks print, goes there as well.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class StampedLines(StandIn):
    """Passes lines on, each behind the time at which it begins: in UTC, so that the logs of several hosts compare. A
    line that comes in pieces, or is drawn again behind a carriage return, has one."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._begins_line = True

    def write(self, text: str) -> int:
        """Write with a stamp before each new line."""
        lines = text
        if text and (self._begins_line or "\n" in text[:-1]):
            stamp = f"{datetime.now(UTC).isoformat(timespec='milliseconds').removesuffix('+00:00')}Z "
            lines = (stamp if self._begins_line else "") + text[:-1].replace("\n", f"\n{stamp}") + text[-1]
        self._begins_line = text.endswith("\n") if text else self._begins_line
        self._stream.write(lines)
        return len(text)


def run_command(main: Callable[[], int], *, only_prints: bool = False) -> NoReturn:
    """Run a command as this process, and exit with its code.

    Args:
        only_prints: whether there is nothing to do when nobody reads its output any more.
    """
    outlast_readers(end=only_prints)
    try:
        code = main()
    except SystemExit as ending:
        code = code_of(ending)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.exit(with_output_written(code))


def code_of(ending: SystemExit) -> int:
    """As Python itself reads it: a text is printed, and means failure."""
    if isinstance(ending.code, str):
        print(ending.code, file=sys.stderr)
        return 1
    return ending.code or 0


def with_output_written(code: int) -> int:
    """The exit code of this process at its end: a failure where its standard output could not be written."""
    sys.stdout.flush()
    problem = getattr(sys.stdout, "problem", None)
    if problem is None:
        return code
    print(f"standard output cannot be written: {problem}", file=sys.stderr)
    return code or 1


def outlast_readers(*, end: bool = False) -> None:
    """Let this process go on when its output cannot be written, or where it was started without any.

    Args:
        end: whether it ends when nobody reads its standard output any more.
    """
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
        setattr(sys, name, LastingStream(stream, ends_with_reader=end and name == "stdout"))


def escape_what_cannot_be_written(stream: TextIO) -> None:
    """Let no text end the process: a terminal of another language, or half a character in a sample of text."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


@contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """Inside, the output of this process and of its children is added to a file, and only `say_at_once` prints to the
    terminal.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "ab", opener=only_regular) as file:
        descriptors = [os.dup(descriptor) for descriptor in (1, 2)]
        _print_by(file.fileno(), file.fileno())
    _errors.append(descriptors[1])
    try:
        yield
    finally:
        _errors.pop()
        _print_by(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def say_at_once(text: str) -> None:
    """Print a line of errors from a signal handler. It may have interrupted a print."""
    os.write(_errors[-1] if _errors else 2, text.encode())


def _print_by(*descriptors: int) -> None:
    for stream, number, descriptor in zip((sys.stdout, sys.stderr), (1, 2), descriptors, strict=True):
        stream.flush()
        os.dup2(descriptor, number)


# Packages of extras. Not every user has installed them.


def package(name: str, *, extra: str, needed_by: str) -> Any:
    """Import a package, or a module of one, when it is needed.

    Args:
        extra: of zerotrain, which it comes with.
        needed_by: what needs it, for the message.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{needed_by} needs {name.partition('.')[0]}, which is not installed; pip install 'zerotrain[{extra}]'"
        ) from error
