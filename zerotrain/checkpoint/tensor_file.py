"""The file of one rank in the safetensors format: an 8-byte length, a JSON header padded with spaces, the tensors.

Written by hand, since the library takes all tensors of a file at once, from the host's memory, and hashes nothing.
https://huggingface.co/docs/safetensors/index#format
"""

import ctypes
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch

from zerotrain.checkpoint.manifest import BLOCK_NBYTES, BlockWriter, Manifest, Piece, SavedTensor, hash_of
from zerotrain.device.device import lies_on_host
from zerotrain.errors import CheckpointError, listed
from zerotrain.files.untrusted import FileName, Natural, only_regular

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
    kept_shape: list[int] | None = None
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
        for key, values in ((entry.key, entry.values) for entry in self.entries):
            code = CODES.get(values.dtype)
            described.append((key, code or "U8", [values.nbytes if code is None else values.numel()], values.nbytes))
        self._head, self._places = plan_file(described, metadata)
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

    def described(self) -> dict[str, Any]:
        """For the manifest: name, size, hashes, and where each tensor lies in it, as `Described`."""
        pieces = [
            {
                "name": entry.name,
                "role": entry.role,
                "dtype": str(entry.values.dtype).removeprefix("torch."),
                "kept_shape": entry.kept_shape,
                "start": entry.start,
                "stop": entry.start + entry.values.numel(),
                "byte": len(self._head) + place,
            }
            for entry, place in zip(self.entries, self._places, strict=True)
        ]
        return {"name": self.name, "nbytes": self.nbytes, "hashes": self.hashes, "pieces": pieces}


class _Piece(TypedDict):
    name: str
    role: str
    dtype: str
    kept_shape: list[int] | None
    start: int
    stop: int
    byte: int


class Described(TypedDict):
    """A file, as `TensorFile.described` gives it. The manifest's own kinds see to the rest once it is read."""

    name: FileName
    nbytes: Natural
    hashes: list[str]
    pieces: list[_Piece]


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


# Verified reads: every byte out of a checkpoint's file lies in a block with a correct hash.


class Reader:
    """Reads ranges of the files of one checkpoint, a block at a time. A context: it keeps files open.

    Its methods raise CheckpointError, naming the file and the tensors, where a file is not what was written.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._open: dict[int, int] = {}
        self._last: dict[int, tuple[int, bytearray]] = {}
        """The last block read of each file: small tensors share one."""

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
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
            part = memoryview(self._block(piece.file, index))[start - offset : end - offset]
            if memory is not None:
                memory[start - begin : end - begin] = part
            else:
                values = torch.frombuffer(part, dtype=dtype)
                target[(start - begin) // dtype.itemsize :][: values.numel()].copy_(values)

    def check_block(self, file: int, index: int) -> None:
        """Read one block, for nothing but its hash."""
        self._block(file, index)

    def check_file(self, file: int) -> None:
        """Check for a file with as many bytes as were written."""
        self._descriptor(file)

    def _nbytes_of(self, file: int, index: int) -> int:
        """Size of a block; the last of a file may be shorter."""
        return min(BLOCK_NBYTES, self._manifest.files[file].nbytes - index * BLOCK_NBYTES)

    def _block(self, file: int, index: int) -> bytearray:
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
        start, num_read = index * BLOCK_NBYTES, 0
        while num_read < len(block):
            try:
                count = os.preadv(self._descriptor(file), [block[num_read:]], start + num_read)
            except OSError as error:
                reason = f"{error.strerror} ({self._at(file, index)})"
                raise CheckpointError(f"{self._path(file)} cannot be read: {reason}") from error
            if count == 0:
                raise CheckpointError(
                    f"{self._path(file)} is cut: it ends at byte {start + num_read} ({self._at(file, index)})"
                )
            num_read += count
        if (digest := hash_of(block)) != self._manifest.files[file].hashes[index]:
            owners = [entry.name for entry in self._manifest.files if digest in entry.hashes[index : index + 1]]
            swap = f"; they are those of {owners[0]}: were the two swapped?" if owners else ""
            raise CheckpointError(
                f"{self._path(file)} is not what was written: bytes {start} to {start + num_read} are others "
                f"({self._at(file, index)}){swap}"
            )

    def _descriptor(self, file: int) -> int:
        if file not in self._open:
            path, expected = self._path(file), self._manifest.files[file].nbytes
            try:
                descriptor = only_regular(path, os.O_RDONLY)
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing ({self._tensors_at(file, 0, expected)})") from None
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
            self._open[file] = descriptor
            if (nbytes := os.fstat(descriptor).st_size) != expected:
                what = "is cut" if nbytes < expected else "is longer than what was written"
                lost = self._tensors_at(file, min(nbytes, expected), max(nbytes, expected))
                raise CheckpointError(f"{path} {what}: {nbytes} bytes, and {expected} were written ({lost})")
        return self._open[file]

    def _path(self, file: int) -> Path:
        return self._folder / self._manifest.files[file].name

    def _at(self, file: int, index: int) -> str:
        return self._tensors_at(file, index * BLOCK_NBYTES, (index + 1) * BLOCK_NBYTES)

    def _tensors_at(self, file: int, start: int, stop: int) -> str:
        names = self._manifest.tensors_at(file, start, stop)
        return listed(names, conjunction="or") if names else "its header"
