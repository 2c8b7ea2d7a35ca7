"""Files with tensors: the file of one rank, written and read with a hash of each block, and ranges of any other file.

A rank's file has the safetensors format: an 8-byte length, a JSON header padded with spaces, the tensors. Written by
hand, since the library takes all tensors of a file at once, from the host's memory, and hashes nothing.
https://huggingface.co/docs/safetensors/index#format
"""

import ctypes
import json
import os
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zerotrain.checkpoint.manifest import BLOCK_NBYTES, FORMAT, DescribedFile, Manifest, Piece, SavedTensor, hash_of
from zerotrain.device.device import lies_on_host
from zerotrain.errors import CheckpointError, listed
from zerotrain.files.match import StoredTensor, memory_order
from zerotrain.files.untrusted import FileName, Shape, only_regular

WRITE_BACK_NBYTES = 16 * 2**20


class BlockWriter:
    """Writes a new file and hashes it block by block.

    Args:
        path: of a file that is not there.
    """

    def __init__(self, path: Path) -> None:
        import xxhash

        self.path = path
        self.nbytes = 0
        self.hashes: list[str] = []
        """Hashes of the blocks written so far; the last block may be shorter."""
        self._block = xxhash.xxh3_64()
        """Hash of the bytes written of the current, unfinished block."""
        self._begun_nbytes = 0
        """Bytes up to which the write-back to the disk has begun."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, data: memoryview) -> None:
        """Append bytes, as they lie, without a copy: each part of a block is hashed, then written from the cache."""
        while len(data) > 0:
            part = data[: BLOCK_NBYTES - self.nbytes % BLOCK_NBYTES]
            data = data[len(part) :]
            self._block.update(part)
            self.nbytes += len(part)
            with self._naming_the_file():
                while len(part) > 0:
                    part = part[os.write(self._file, part) :]  # a disk that is nearly full takes a part
            if self.nbytes % BLOCK_NBYTES == 0:
                self._end_block()
            if self.nbytes - self._begun_nbytes >= WRITE_BACK_NBYTES:
                # The disk begins with these bytes while more come: otherwise most of it waits for `sync`, and a step of
                # the training for the disk. On Linux this advice begins to write, and forgets only bytes that are on
                # the disk already.
                if hasattr(os, "posix_fadvise"):
                    begun = self._begun_nbytes
                    os.posix_fadvise(self._file, begun, self.nbytes - begun, os.POSIX_FADV_DONTNEED)
                self._begun_nbytes = self.nbytes

    def sync(self) -> None:
        """Wait until all is on the disk."""
        if self.nbytes % BLOCK_NBYTES:
            self._end_block()
        with self._naming_the_file():
            os.fsync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _end_block(self) -> None:
        self.hashes.append(self._block.hexdigest())
        self._block.reset()

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        """Put the file's name into errors of calls that know the file by its number alone."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a new file, and wait until it is on the disk."""
    with closing(BlockWriter(path)) as writer:
        for part in parts:
            writer.write(memoryview(part))
            del part  # memory of a tensor, which would stay while the next one is read
        writer.sync()


CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The format's names of dtypes. Tensors of other dtypes are written as bytes; the manifest has the dtype."""
CHUNK_NBYTES = 4 * 2**20
"""Copied from a device at a time."""
ROUND_NBYTES = 64 * 2**20
"""Written between two looks at how the other ranks are doing."""
ALIGN_NBYTES = 64


@dataclass(eq=False)
class Entry:
    """One tensor of a file: some neighbouring elements of a tensor of the model, or of its optimizer state."""

    name: str
    """Name of the parameter or buffer."""
    role: str
    """weight, buffer, or what the optimizer calls it."""
    values: torch.Tensor
    """The memory itself: it is read when its turn to be written comes."""
    start: int
    """Number of its first element in the whole, in the order of the memory."""
    kept_shape: Shape | None = None
    """Shape of optimizer state for a tensor as a whole."""

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.role}/{self.name}"


class TensorFile:
    """The file of one rank, planned as a whole before a byte of it is written.

    Larger elements come first, as the library has it too: so each tensor is aligned, and no block of 1 MiB cuts an
    element.

    Args:
        metadata: texts for the header.
    """

    def __init__(self, name: str, entries: Sequence[Entry], metadata: dict[str, str]) -> None:
        self.name = name
        self.entries = sorted(entries, key=lambda entry: -entry.values.itemsize)
        described = []
        for entry in self.entries:
            code, nbytes = CODES.get(entry.values.dtype), entry.values.nbytes
            described.append((entry.key, code or "U8", [nbytes if code is None else entry.values.numel()], nbytes))
        self._head, self._places = plan_file(described, {"format": FORMAT} | metadata)
        self.nbytes = len(self._head) + sum(entry.values.nbytes for entry in self.entries)
        self.hashes: list[str] = []

    def write(self, folder: Path, read: Callable[[Entry], Iterator[memoryview]]) -> Iterator[int]:
        """Write it and wait until it is on the disk.

        Args:
            read: gives the bytes of an entry, piece by piece.

        Returns:
            The bytes written so far, after each `ROUND_NBYTES`.
        """
        with closing(BlockWriter(folder / self.name)) as writer:
            writer.write(memoryview(self._head))
            reported_nbytes = 0
            for entry in self.entries:
                for chunk in read(entry):
                    writer.write(chunk)
                    if writer.nbytes - reported_nbytes >= ROUND_NBYTES:
                        reported_nbytes = writer.nbytes
                        yield reported_nbytes
            writer.sync()
            self.hashes = writer.hashes

    def described(self, number: int) -> DescribedFile:
        """Its description, as the manifest's file of this number."""
        pieces = []
        for entry, place in zip(self.entries, self._places, strict=True):
            start, dtype = entry.start, str(entry.values.dtype).removeprefix("torch.")
            piece = Piece(number, len(self._head) + place, start, start + entry.values.numel())
            pieces.append((entry.name, entry.role, SavedTensor(dtype=dtype, pieces=[piece], shape=entry.kept_shape)))
        return DescribedFile(FileName(self.name), self.nbytes, self.hashes, pieces)


def plan_file(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: dict[str, str]
) -> tuple[bytes, list[int]]:
    """The head of a file, a length and the header, padded so that the tensors begin aligned; and where each tensor lies
    behind it.

    Args:
        tensors: (key, code, shape, nbytes), in the order of the file.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    places, place = [], 0
    for key, code, shape, nbytes in tensors:
        header[key] = {"dtype": code, "shape": list(shape), "data_offsets": [place, place + nbytes]}
        places.append(place)
        place += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN_NBYTES)
    return len(text).to_bytes(8, "little") + text, places


def flat_bytes(values: torch.Tensor) -> torch.Tensor:
    """(nbytes,) uint8: the memory itself, if its elements lie without gaps."""
    return values.detach().contiguous().view(-1).view(torch.uint8)


def chunks(values: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, some MiB at a time, in the host's memory: of a tensor there without a copy."""
    flat = flat_bytes(values)
    for start in range(0, flat.numel(), CHUNK_NBYTES):
        yield flat[start : start + CHUNK_NBYTES].cpu().numpy().data


# Reads of ranges of a file of any author: neither it nor one of its tensors is ever held whole.
#
# By `preadv`, not through a map of the file: if a mapped file becomes shorter or its disk fails, SIGBUS ends the
# process (torch 2.13, safetensors 0.8, 2026-11-23).


_LFS_POINTER = b"version https://git-lfs"


class OpenFile:
    """Holds the file open until `close`.

    Raises:
        CheckpointError: it is not there, is no regular file, cannot be read, or is a pointer of git LFS.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = only_regular(path, os.O_RDONLY)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is not there") from None
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
        self.fill(start, memoryview(data))
        return data

    def fill(self, start: int, target: memoryview) -> None:
        """Read bytes from `start` on into all of `target`; raises as `bytes` does."""
        num_read = 0
        while num_read < len(target):
            try:
                count = os.preadv(self._descriptor, [target[num_read:]], start + num_read)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{self.path} is cut: it ends at byte {start + num_read}")
            num_read += count


class FileRange(NamedTuple):
    """The place of a tensor in a file: all its elements, contiguous."""

    file: OpenFile
    byte: int
    """Offset of its first element."""


# Weights out of files: the list of their tensors, and their elements by number.


METADATA = ".metadata"
"""The file that makes a folder one of torch.distributed.checkpoint."""
CHUNK_NUMEL = 2**17
"""Held at a time, a few times over, where elements lie in another order in a file."""


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
            tensors: those to be read.
        """
        return []

    @abstractmethod
    def fill(self, tensor: StoredTensor, start: int, target: torch.Tensor) -> None:
        """Read elements from `start` on, in the order of `tensor.stride`, into all of `target`, (n,)."""

    def close(self) -> None:
        self._opened.close()


def read_box(
    read: Callable[[int, torch.Tensor], object],
    box: StoredTensor,
    stride: Sequence[int],
    begin: int,
    target: torch.Tensor,
) -> None:
    """Read the elements of a box that belong into a part of a tensor.

    A box in the order of the tensor is read from the first of these elements to the last, and one in another order
    whole; some elements at a time, unless they are neighbours in both.

    Args:
        read: fills a tensor with elements of the box from a number on, in the order of its memory in the file.
        box: its dtype, shape and strides in the file.
        stride: that of the tensor, of whose elements it is a box.
        begin: place of the box' first element in `target`, below 0 if it lies before it.
        target: (n,), of any dtype and device: neighbours in the tensor.
    """
    order, first, stop = memory_order(box.shape, box.stride), 0, prod(box.shape)

    def place(number: Any) -> Any:
        """The place in `target` of an element of the box, or of several."""
        total = begin
        for dim in reversed(order):
            total = total + number % box.shape[dim] * stride[dim]
            number = number // box.shape[dim]
        return total

    if order == memory_order(box.shape, stride):  # places ascend with numbers
        first = bisect_left(range(stop), 0, key=place)
        stop = bisect_left(range(stop), target.numel(), key=place)
        if first < stop and place(stop - 1) - place(first) == stop - 1 - first:
            read(first, target[place(first) : place(stop - 1) + 1])
            return
    for start in range(first, stop, CHUNK_NUMEL):
        values = torch.empty(min(CHUNK_NUMEL, stop - start), dtype=box.dtype)
        read(start, values)
        places = place(torch.arange(start, start + values.numel()))
        is_inside = (places >= 0) & (places < target.numel())
        target[places[is_inside].to(target.device)] = values[is_inside].to(target)


# Verified reads: every byte out of a checkpoint's file lies in a block with a correct hash.


class Reader:
    """Reads ranges of the files of one checkpoint, a block at a time. A context: it keeps files open.

    Its methods raise CheckpointError, naming the file and the tensors, where a file is not what was written.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._open: dict[int, OpenFile] = {}
        self._last: dict[int, tuple[int, bytearray]] = {}
        """The last block read of each file: small tensors share one."""

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()
        self._last.clear()

    def read(self, tensor: SavedTensor, start: int, target: torch.Tensor) -> None:
        """Elements of a saved tensor from `start` on, from whichever pieces they lie in, into all of `target`.

        Args:
            target: dense, of any shape, dtype and device.
        """
        flat, dtype = target.detach().view(-1), tensor.torch_dtype
        position, stop = start, start + flat.numel()
        for piece in sorted(tensor.pieces, key=lambda item: item.start):
            end = min(piece.stop, stop)
            if piece.start <= position < end:
                self._read_piece(piece, dtype, position, flat[position - start : end - start])
                position = end
        if position < stop:
            raise CheckpointError(f"{self._folder}: elements {position} to {stop} of a tensor are in none of its files")

    def _read_piece(self, piece: Piece, dtype: torch.dtype, start: int, target: torch.Tensor) -> None:
        """Read neighbouring elements, all of them in this piece."""
        begin = piece.byte + (start - piece.start) * dtype.itemsize
        stop = begin + target.numel() * dtype.itemsize
        memory = None
        if target.dtype == dtype and lies_on_host(target):
            # The tensor's own bytes, read into while it lives. numpy's view would forbid to give them back.
            memory = memoryview((ctypes.c_char * target.nbytes).from_address(target.data_ptr())).cast("B")
        for index in range(begin // BLOCK_NBYTES, -(-stop // BLOCK_NBYTES)):
            offset = index * BLOCK_NBYTES
            end = offset + self._nbytes_of(piece.file, index)
            if memory is not None and begin <= offset and end <= stop:
                self._read_block(piece.file, index, memory[offset - begin : end - begin])
                continue
            start, end = max(begin, offset), min(stop, end)
            part = memoryview(self.block(piece.file, index))[start - offset : end - offset]
            if memory is not None:
                memory[start - begin : end - begin] = part
            else:
                values = torch.frombuffer(part, dtype=dtype)
                target[(start - begin) // dtype.itemsize :][: values.numel()].copy_(values)

    def _nbytes_of(self, file: int, index: int) -> int:
        """Size of a block; the last of a file may be shorter."""
        return min(BLOCK_NBYTES, self._manifest.files[file].nbytes - index * BLOCK_NBYTES)

    def block(self, file: int, index: int) -> bytearray:
        """A block, for a part of it, or for its hash alone."""
        held, block = self._last.get(file, (-1, bytearray()))
        if held == index:
            return block
        self._last.pop(file, None)
        if len(block) != (nbytes := self._nbytes_of(file, index)):
            block = bytearray(nbytes)
        self._read_block(file, index, memoryview(block))
        self._last[file] = (index, block)
        return block

    def _read_block(self, file: int, index: int, block: memoryview) -> None:
        """Read a whole block to where it belongs, and compare its hash."""
        start, opened = index * BLOCK_NBYTES, self.opened(file)
        try:
            opened.fill(start, block)
        except CheckpointError as error:
            raise CheckpointError(f"{error} ({self._tensors_at(file, start, start + BLOCK_NBYTES)})") from error
        if (digest := hash_of(block)) != self._manifest.files[file].hashes[index]:
            owners = [entry.name for entry in self._manifest.files if digest in entry.hashes[index : index + 1]]
            swap = f"; they are those of {owners[0]}: were the two swapped?" if owners else ""
            raise CheckpointError(
                f"{opened.path} is not what was written: bytes {start} to {start + len(block)} are others "
                f"({self._tensors_at(file, start, start + BLOCK_NBYTES)}){swap}"
            )

    def opened(self, file: int) -> OpenFile:
        """A file, opened once, which has as many bytes as were written."""
        if file not in self._open:
            path, expected = self._folder / self._manifest.files[file].name, self._manifest.files[file].nbytes
            if not os.path.exists(path):
                raise CheckpointError(f"{path} is missing ({self._tensors_at(file, 0, expected)})")
            self._open[file] = OpenFile(path)
            if (nbytes := self._open[file].nbytes) != expected:
                what = "is cut" if nbytes < expected else "is longer than what was written"
                lost = self._tensors_at(file, min(nbytes, expected), max(nbytes, expected))
                raise CheckpointError(f"{path} {what}: {nbytes} bytes, and {expected} were written ({lost})")
        return self._open[file]

    def _tensors_at(self, file: int, start: int, stop: int) -> str:
        names = self._manifest.tensors_at(file, start, stop)
        return listed(names, conjunction="or") if names else "its header"
