"""The log of a rank: its output goes to ranks/<rank>.log, that of rank 0 to the terminal as well."""

import io
import os
import re
import sys
from pathlib import Path
from typing import TextIO

from zerotrain.files.terminal import LastingStream, StandIn, escape_what_cannot_be_written
from zerotrain.files.untrusted import only_regular

_MOVES_THE_CURSOR = re.compile(r"\r|\x1b\[[\d;]*[A-K]|\x1b\[\?")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class TerminalAndFile(StandIn):
    """Writes to both. To those who ask, it is the terminal: a progress bar works as if there were no file.

    The file gets whole lines, without colours, and nothing of a line that is drawn again and again.
    """

    def __init__(self, terminal: TextIO | io.TextIOBase, file: TextIO) -> None:
        super().__init__(terminal)
        self._file = file
        self._unfinished_line = ""

    def write(self, text: str) -> int:
        """Write to both."""
        if _MOVES_THE_CURSOR.search(text):
            self._unfinished_line = ""
        else:
            lines, newline, self._unfinished_line = (self._unfinished_line + text).rpartition("\n")
            self._file.write(_COLOUR.sub("", lines + newline))
        written = self._stream.write(text)
        self._stream.flush()
        return written

    def flush(self) -> None:
        """Flush both."""
        self._file.flush()
        self._stream.flush()


def open_rank_log(ranks_dir: Path, rank: int, append: bool = False) -> TextIO:
    """Send this process's output to its log from here on; return the log. Rank 0 keeps its terminal too.

    Args:
        append: keep what is there, of the same rank before its run was started again.
    """
    ranks_dir.mkdir(parents=True, exist_ok=True)
    path = ranks_dir / f"{rank}.log"
    log = open(  # noqa: SIM115 - open until the process ends
        path, "a" if append else "w", 1, encoding="utf-8", errors="backslashreplace", opener=only_regular
    )
    for stream in (sys.stdout, sys.stderr):
        escape_what_cannot_be_written(stream)
    if rank == 0:
        sys.stdout = TerminalAndFile(LastingStream(sys.stdout), log)
        sys.stderr = TerminalAndFile(LastingStream(sys.stderr), log)
    else:
        # By descriptor, so that what C++ prints goes there as well.
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    return log
