"""The file of one rank in the safetensors format: an 8-byte length, a JSON header padded with spaces, the tensors.

Written by hand, since the library takes all tensors of a file at once, from the host's memory, and hashes nothing.
https://huggingface.co/docs/safetensors/index#format
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch

from zerotrain.checkpoint.blocks import BlockWriter
from zerotrain.files.untrusted import FileName, Natural

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
    """One tensor of a file: some neighbouring elements of a tensor of the model, or of what is kept of it."""

    name: str
    """Name of the parameter or buffer."""
    role: str
    """weight, buffer, or what the optimizer calls it."""
    values: torch.Tensor
    """The memory itself: it is read when its turn to be written comes."""
    start: int
    """Which element of the whole is the first, in the order of its memory."""
    kept_shape: list[int] | None = None
    """Shape of optimizer state that is kept for a tensor as a whole."""

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
        self._head, self._places = planned(described, metadata)
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
            told = 0
            for entry in self.entries:
                for chunk in read(entry):
                    writer.write(chunk)
                    if writer.nbytes - told >= ROUND_NBYTES:
                        told = writer.nbytes
                        yield told
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
    name: FileName
    nbytes: Natural
    hashes: list[str]
    pieces: list[_Piece]


"""The manifest's own kinds see to the rest once it is read."""


def planned(
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
