"""Weights out of files: the list of their tensors, and their elements by number."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from zerotrain.errors import CheckpointError
from zerotrain.files.match import StoredTensor
from zerotrain.files.untrusted import only_regular

METADATA = ".metadata"
"""The file that makes a folder one of torch.distributed.checkpoint."""


class Weights(ABC):
    """A source of weights, open until `close`.

    Its methods raise CheckpointError, naming the file.
    """

    path: Path
    tensors: list[StoredTensor]
    fingerprint: str
    """Two ranks that see the same see the same checkpoint, or files of the same names, dtypes and shapes."""
    _opened: ExitStack

    def problems(self, tensors: Sequence[StoredTensor], part: int, num_parts: int) -> list[str]:
        """Further problems of the files, after opening them, in this share of them.

        Args:
            taken: the tensors that will be read.
        """
        return []

    @abstractmethod
    def read(self, tensor: StoredTensor, start: int, target: torch.Tensor) -> None:
        """Elements from `start` on, in the order of `tensor.stride`, into all of `target`, (n,)."""

    def close(self) -> None:
        self._opened.close()


# Reads ranges of a file of any author: neither it nor one of its tensors is ever held whole.


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
        """Read numbers of `dtype` from byte `start` on into all of `target`.

        Args:
            target: (n,), of any dtype and device.

        Raises:
            CheckpointError: the disk fails, or the file has become shorter.
        """
        step = CHUNK_NBYTES // dtype.itemsize
        for begin in range(0, target.numel(), step):
            part = target[begin : begin + step]
            data = self.bytes(start + begin * dtype.itemsize, part.numel() * dtype.itemsize)
            part.copy_(torch.frombuffer(data, dtype=dtype))

    def bytes(self, start: int, nbytes: int) -> bytearray:
        """As many bytes from `start` on.

        Raises:
            CheckpointError: the disk fails, or the file ends before.
        """
        data = bytearray(nbytes)
        num_read = 0
        while num_read < nbytes:
            try:
                count = os.preadv(self._descriptor, [memoryview(data)[num_read:]], start + num_read)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{self.path} is cut: it ends at byte {start + num_read}")
            num_read += count
        return data


class FileRange(NamedTuple):
    """The place of a tensor in a file: all its elements, contiguous."""

    file: OpenFile
    byte: int
    """Offset of its first element."""
