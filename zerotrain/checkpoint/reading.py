"""Verified reads: whatever comes out of a file of a checkpoint lies in blocks whose hashes fit."""

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zerotrain.checkpoint.blocks import BLOCK_NBYTES, hash_of
from zerotrain.checkpoint.manifest import Manifest, Piece, dtype_of, pieces_of
from zerotrain.device.device import lies_on_host
from zerotrain.errors import CheckpointError, listed
from zerotrain.files.untrusted import only_regular


def _memory_of(target: torch.Tensor) -> memoryview:
    """The bytes of a flat tensor of the CPU, to read into while it lives. numpy's would forbid to give them back."""
    return memoryview((ctypes.c_char * target.nbytes).from_address(target.data_ptr())).cast("B")


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

    def read(self, tensor: Mapping[str, Any], start: int, target: torch.Tensor) -> None:
        """Elements of a saved tensor from `start` on, from whichever pieces they lie in, into all of `target`.

        Args:
            tensor: as the manifest has it.
            target: dense, of any shape, dtype and device.
        """
        flat, dtype = target.detach().view(-1), dtype_of(tensor)
        done, stop = start, start + flat.numel()
        for piece in sorted(pieces_of(tensor), key=lambda each: each.start):
            last = min(piece.stop, stop)
            if piece.start <= done < last:
                self._read_piece(piece, dtype, done, flat[done - start : last - start])
                done = last
        if done < stop:
            raise CheckpointError(f"{self._folder}: elements {done} to {stop} of a tensor are in none of its files")

    def _read_piece(self, piece: Piece, dtype: torch.dtype, start: int, target: torch.Tensor) -> None:
        """Neighbouring elements, all of which lie in this piece."""
        first = piece.byte + (start - piece.start) * dtype.itemsize
        stop = first + target.numel() * dtype.itemsize
        memory = _memory_of(target) if target.dtype == dtype and lies_on_host(target) else None
        for index in range(first // BLOCK_NBYTES, -(-stop // BLOCK_NBYTES)):
            offset = index * BLOCK_NBYTES
            end = offset + self._nbytes_of(piece.file, index)
            if memory is not None and first <= offset and end <= stop:
                self._read_block(piece.file, index, memory[offset - first : end - first])
                continue
            start, end = max(first, offset), min(stop, end)
            part = memoryview(self._block(piece.file, index))[start - offset : end - offset]
            if memory is not None:
                memory[start - first : end - first] = part
            else:
                values = torch.frombuffer(part, dtype=dtype)
                target[(start - first) // dtype.itemsize :][: values.numel()].copy_(values)

    def check_block(self, file: int, index: int) -> None:
        """Read one block, for nothing but its hash."""
        self._block(file, index)

    def check_file(self, file: int) -> None:
        """Make sure that a file is there, with as many bytes as were written."""
        self._descriptor(file)

    def _nbytes_of(self, file: int, index: int) -> int:
        """Size of a block; the last of a file may be shorter."""
        return min(BLOCK_NBYTES, int(self._manifest.files[file]["nbytes"]) - index * BLOCK_NBYTES)

    def _block(self, file: int, index: int) -> bytearray:
        """A block of which a part is wanted, or its hash alone."""
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
        start, done = index * BLOCK_NBYTES, 0
        while done < len(block):
            try:
                count = os.preadv(self._descriptor(file), [block[done:]], start + done)
            except OSError as error:
                said = f"{error.strerror} ({self._at(file, index)})"
                raise CheckpointError(f"{self._path(file)} cannot be read: {said}") from error
            if count == 0:
                raise CheckpointError(
                    f"{self._path(file)} is cut: it ends at byte {start + done} ({self._at(file, index)})"
                )
            done += count
        hashes = self._manifest.files[file]["hashes"]
        if (found := hash_of(block)) != hashes[index]:
            raise CheckpointError(
                f"{self._path(file)} is not what was written: bytes {start} to {start + done} are others "
                f"({self._at(file, index)}){self._belongs(found, index)}"
            )

    def _descriptor(self, file: int) -> int:
        if file not in self._open:
            path, told = self._path(file), self._manifest.files[file]["nbytes"]
            try:
                descriptor = only_regular(path, os.O_RDONLY)
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing ({self._named(file, 0, told)})") from None
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
            self._open[file] = descriptor
            if (nbytes := os.fstat(descriptor).st_size) != told:
                what = "is cut" if nbytes < told else "is longer than what was written"
                lost = self._named(file, min(nbytes, told), max(nbytes, told))
                raise CheckpointError(f"{path} {what}: {nbytes} bytes, and {told} were written ({lost})")
        return self._open[file]

    def _path(self, file: int) -> Path:
        return self._folder / str(self._manifest.files[file]["name"])

    def _at(self, file: int, index: int) -> str:
        return self._named(file, index * BLOCK_NBYTES, (index + 1) * BLOCK_NBYTES)

    def _named(self, file: int, start: int, stop: int) -> str:
        names = self._manifest.tensors_at(file, start, stop)
        return listed(names, last="or") if names else "its header"

    def _belongs(self, found: str, index: int) -> str:
        """Names the file in which a block with this hash would be right; empty if there is none."""
        for other in self._manifest.files:
            if index < len(other["hashes"]) and other["hashes"][index] == found:
                return f"; they are those of {other['name']}: were the two swapped?"
        return ""
