"""A safetensors file of anybody's, of which ranges are read: neither it nor one of its tensors is ever held whole.

Read by hand, since the library is needed for nothing else and gives no elements of a tensor by their number.
https://huggingface.co/docs/safetensors/index#format
"""

import json
import os
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zerotrain.checkpoint.blocks import hash_of
from zerotrain.errors import CheckpointError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
"""By what the format calls them. A file may have tensors of others, which cannot be read."""
CHUNK_NBYTES = 4 * 2**20
"""Read at a time."""
MAX_HEADER_NBYTES = 100_000_000
"""As in the library."""

_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""What a file of torch.save begins with: a zip archive, or in former times a pickle."""
_LFS_POINTER = b"version https://git-lfs"


class Stored(NamedTuple):
    """Where a tensor lies."""

    code: str
    shape: tuple[int, ...]
    start: int
    stop: int
    """Bytes, from the start of the file."""


class SafetensorsFile:
    """Holds the file open until `close`.

    Raises:
        CheckpointError: it is not there, is no safetensors file, or was cut off or damaged where its header lies.
    """

    tensors: dict[str, Stored]
    """By name, in the order of the header."""
    fingerprint: str
    """Of the header alone: the same names, dtypes, shapes and places."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not os.path.isfile(path):
            raise CheckpointError(f"{path} {'is no file' if os.path.lexists(path) else 'is not there'}")
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        try:
            self._nbytes = os.fstat(self._descriptor).st_size
            self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self, name: str, start: int, target: torch.Tensor) -> None:
        """Elements of a tensor from `start` on, in the order of the file (row by row), into all of `target`.

        Args:
            target: (n,), of any dtype and device.

        Raises:
            CheckpointError: the disk fails, or the file has become shorter.
        """
        stored = self.tensors[name]
        dtype = DTYPES[stored.code]
        step = CHUNK_NBYTES // dtype.itemsize
        for done in range(0, target.numel(), step):
            part = target[done : done + step]
            data = self._bytes(stored.start + (start + done) * dtype.itemsize, part.numel() * dtype.itemsize)
            part.copy_(torch.frombuffer(data, dtype=dtype))

    def _bytes(self, start: int, nbytes: int) -> bytearray:
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

    def _read_header(self) -> None:
        begin = bytes(self._bytes(0, min(self._nbytes, 64)))
        if begin.startswith(_PICKLES):
            raise CheckpointError(
                f"{self.path} is a pickle, as torch.save writes it, and loading one may run any code; write it with "
                "safetensors.torch.save_file"
            )
        if begin.startswith(_LFS_POINTER):
            raise CheckpointError(f"{self.path} is a pointer of git LFS, not the file itself: git lfs pull")
        length = int.from_bytes(begin[:8], "little")
        if len(begin) < 8 or not 2 <= length <= MAX_HEADER_NBYTES or begin[8:9] not in (b"{", b""):
            raise CheckpointError(f"{self.path} is no safetensors file ({self._nbytes} bytes): it has no such header")
        if 8 + length > self._nbytes:
            raise CheckpointError(f"{self.path} is cut: {self._nbytes} bytes, and its header alone has {8 + length}")
        text = bytes(self._bytes(8, length))
        self.fingerprint = hash_of(text)
        try:
            header = json.loads(text)
            header.pop("__metadata__", None)
            self.tensors = {name: _stored(entry, 8 + length) for name, entry in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise CheckpointError(f"{self.path} is no safetensors file, or damaged in its header") from None
        self._require_places(8 + length)

    def _require_places(self, data_start: int) -> None:
        """Make sure that the tensors fill the file, one after the other, as the format has it."""
        place = data_start
        for name, stored in sorted(self.tensors.items(), key=lambda each: (each[1].start, each[1].stop)):
            dtype = DTYPES.get(stored.code)
            told = stored.stop - stored.start
            if stored.start != place or (dtype is not None and told != prod(stored.shape) * dtype.itemsize):
                raise CheckpointError(f"{self.path} is damaged: by its header {name} lies where it cannot lie")
            place = stored.stop
        if place != self._nbytes:
            what = "cut" if self._nbytes < place else "longer than what its header tells"
            raise CheckpointError(f"{self.path} is {what}: {self._nbytes} bytes, and its header tells of {place}")


def _stored(entry: Any, data_start: int) -> Stored:
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (start, stop, *shape)):
        raise ValueError
    return Stored(str(entry["dtype"]), shape, data_start + start, data_start + stop)
