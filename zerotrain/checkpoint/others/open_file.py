"""A file of anybody's, of which ranges are read: neither it nor one of its tensors is ever held whole."""

import os
from pathlib import Path
from typing import NamedTuple

import torch

from zerotrain.errors import CheckpointError
from zerotrain.files.untrusted import only_regular

CHUNK_NBYTES = 4 * 2**20
"""Read at a time."""
_LFS_POINTER = b"version https://git-lfs"


class OpenFile:
    """Holds the file open until `close`.

    Raises:
        CheckpointError: it is not there, is no file, cannot be read, or is a pointer of git LFS.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not os.path.isfile(path):
            raise CheckpointError(f"{path} {'is no file' if os.path.lexists(path) else 'is not there'}")
        try:
            self._descriptor = only_regular(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        try:
            self.nbytes = os.fstat(self._descriptor).st_size
            self.begin = bytes(self.bytes(0, min(self.nbytes, 64)))
            if self.begin.startswith(_LFS_POINTER):
                raise CheckpointError(f"{path} is a pointer of git LFS, not the file itself: git lfs pull")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self, start: int, dtype: torch.dtype, target: torch.Tensor) -> None:
        """Numbers of `dtype` that lie from byte `start` on into all of `target`.

        Args:
            target: (n,), of any dtype and device.

        Raises:
            CheckpointError: the disk fails, or the file has become shorter.
        """
        step = CHUNK_NBYTES // dtype.itemsize
        for done in range(0, target.numel(), step):
            part = target[done : done + step]
            data = self.bytes(start + done * dtype.itemsize, part.numel() * dtype.itemsize)
            part.copy_(torch.frombuffer(data, dtype=dtype))

    def bytes(self, start: int, nbytes: int) -> bytearray:
        """As many bytes from `start` on.

        Raises:
            CheckpointError: the disk fails, or the file ends before.
        """
        data = bytearray(nbytes)
        done = 0
        while done < nbytes:
            try:
                count = os.preadv(self._descriptor, [memoryview(data)[done:]], start + done)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{self.path} is cut: it ends at byte {start + done}")
            done += count
        return data


class FileRange(NamedTuple):
    """The place of a tensor in a file: all its elements, contiguous."""

    file: OpenFile
    byte: int
    """Offset of its first element."""
