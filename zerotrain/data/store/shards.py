"""Files of tokens read by pread; one that was cut short, changed or removed since it was opened is named.

No memory map: cold, at random places, the kernel's read-ahead made each read 8 to 14 times slower than pread, and a
file that was cut short ended the process with SIGBUS and no word (2026-11-21).
"""

import os
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

MAX_OPEN_FILES = 256
"""Files kept open by a reader; of more, the one opened last is closed, and opened again when it is read again."""


@dataclass(frozen=True)
class Shard:
    """A file with a run of tokens in it."""

    path: Path
    tokens: int
    first_byte: int = 0
    """Offset of its first token; a header stands before it."""


class ShardReader:
    """Reads tokens of a row of shards.

    The size and the time of modification of each file are kept from the start, and compared after each read: what was
    read while a file was as it is at the start is given, anything else is an error.

    Args:
        shards: the files, in order.
        dtype: of a token.

    Raises:
        OSError: a file is not there.
    """

    def __init__(self, shards: Sequence[Shard], dtype: np.dtype) -> None:
        self.shards = tuple(shards)
        self.dtype = dtype
        self._starts = [0, *accumulate(shard.tokens for shard in self.shards)]
        self._states = [_state(os.stat(shard.path)) for shard in self.shards]
        self._files: dict[int, _OpenFile] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def place(self, position: int) -> tuple[int, int]:
        """The number of the shard of a token, and the token's number in it."""
        shard = bisect_right(self._starts, position, hi=len(self.shards)) - 1
        return shard, position - self._starts[shard]

    def read_parts(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The `lengths[i]` tokens from `starts[i]` on of each i, one behind the other, (lengths.sum(),).

        Raises:
            OSError: a file cannot be read, or is not as it was when the reader was made.
        """
        tokens = np.empty(int(lengths.sum()), dtype=self.dtype)
        read: dict[int, int] = {}
        filled = 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            shard, offset = self.place(start)
            end = filled + length
            while filled < end:
                count = min(end - filled, self.shards[shard].tokens - offset)
                if count:
                    self._fill(tokens[filled : filled + count], shard, offset)
                    read[shard] = offset
                filled, shard, offset = filled + count, shard + 1, 0
        for shard, offset in read.items():
            self._require_unchanged(shard, offset)
        return tokens

    def _fill(self, tokens: np.ndarray, shard: int, offset: int) -> None:
        """Read as many tokens as there is room for, from token `offset` of a shard on."""
        file, into = self._file(shard, offset), tokens.view(np.uint8).data
        position = self.shards[shard].first_byte + offset * self.dtype.itemsize
        filled = 0
        while filled < len(into):
            try:
                count = os.preadv(file.descriptor, [into[filled:]], position + filled)
            except OSError as error:
                raise OSError(
                    f"{self.shards[shard].path} cannot be read at token {offset} ({error.strerror}); "
                    "check its disk or network"
                ) from error
            if count == 0:
                self._require_unchanged(shard, offset)
                raise OSError(f"{self.shards[shard].path} has no bytes at token {offset}, although its size says so")
            filled += count

    def _file(self, shard: int, offset: int) -> "_OpenFile":
        file = self._files.get(shard)
        if file is None:
            path, then = self.shards[shard].path, self._states[shard]
            try:
                file = _OpenFile(path)
            except FileNotFoundError:
                raise OSError(
                    f"{path} is gone; it had {then[0]} bytes when it was opened, and the run needs its token "
                    f"{offset}: keep the files of a run where they are"
                ) from None
            while len(self._files) >= MAX_OPEN_FILES:
                with suppress(KeyError):  # another thread was faster
                    self._files.popitem()  # closed by the last thread that reads it
            self._files[shard] = file
        return file

    def _require_unchanged(self, shard: int, offset: int) -> None:
        """Check that a file is as it was. An OSError says its size, then and now, and the token that was to be read."""
        file = self._file(shard, offset)  # kept by name: another thread may put it away before fstat
        then, now = self._states[shard], _state(os.fstat(file.descriptor))
        if then == now:
            return
        what = "was changed" if now[0] == then[0] else "was cut short" if now[0] < then[0] else "has grown"
        raise OSError(
            f"{self.shards[shard].path} {what} since it was opened: it had {then[0]} bytes, last written "
            f"{_time(then[1])}, and has {now[0]} bytes, last written {_time(now[1])}; the run needs its token "
            f"{offset}. Do not change the files of a run: put it back, or give the new data another name"
        )


class _OpenFile:
    """A descriptor, closed when nobody has it any more: another thread may be reading what this one puts away."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def _state(status: os.stat_result) -> tuple[int, int]:
    """Size and time of modification in ns: a write changes them."""
    return status.st_size, status.st_mtime_ns


def _time(mtime_ns: int) -> str:
    seconds, nanoseconds = divmod(mtime_ns, 10**9)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(seconds))}.{nanoseconds // 10**6:03d}"
