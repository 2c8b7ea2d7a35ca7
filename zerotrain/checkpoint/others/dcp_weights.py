"""The weights in a folder of torch.distributed.checkpoint, as FSDP2 saves them, of which ranges are read.

torch's own reader unpickles .metadata, and loads each piece whole of which a part is wanted.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path

import torch

from zerotrain.checkpoint.blocks import hash_of
from zerotrain.checkpoint.others.dcp_metadata import METADATA, DcpPiece, DcpTensor, read_metadata
from zerotrain.checkpoint.others.open_file import FileRange, OpenFile
from zerotrain.checkpoint.others.stored_weights import StoredTensor, Weights, row_by_row
from zerotrain.checkpoint.others.torch_file import is_readable, loaded_without_numbers, place_of
from zerotrain.errors import CheckpointError

CHUNK_NUMEL = 2**17
"""Held at a time, a few times over, where a piece has a part of each row."""


class DcpWeights(Weights):
    """Weights in one folder. A tensor is assembled from the pieces that ranks have saved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, OpenFile] = {}
        self._places: dict[DcpPiece, tuple[FileRange, torch.Tensor]] = {}
        self._turned: tuple[DcpPiece, torch.Tensor] | None = None
        """The last piece that had to be read whole, row by row."""
        with ExitStack() as opened:
            metadata = OpenFile(path / METADATA)
            opened.callback(metadata.close)
            tensors = read_metadata(metadata)
            self.fingerprint = hash_of(metadata.bytes(0, metadata.nbytes))
            for piece in (piece for tensor in tensors for piece in tensor.pieces):
                if piece.file not in self._files:
                    self._files[piece.file] = OpenFile(path / piece.file)
                    opened.callback(self._files[piece.file].close)
                nbytes, told = self._files[piece.file].nbytes, piece.byte + piece.nbytes
                if told > nbytes:
                    raise CheckpointError(f"{path / piece.file} is cut: {nbytes} bytes, and {METADATA} says {told}")
            self._opened = opened.pop_all()
        self.tensors = [_given(tensor) for tensor in tensors]

    def problems(self, taken: Sequence[StoredTensor], part: int, num_parts: int) -> list[str]:
        pieces = [(tensor.place, piece) for tensor in taken for piece in tensor.place.pieces]
        try:
            for tensor, piece in pieces[part::num_parts]:
                self._place(tensor, piece)
        except CheckpointError as error:
            return [str(error)]
        return []

    def read(self, tensor: StoredTensor, start: int, target: torch.Tensor) -> None:
        for piece in tensor.place.pieces:
            self._read_piece(tensor.place, piece, start, target)

    def _read_piece(self, tensor: DcpTensor, piece: DcpPiece, start: int, target: torch.Tensor) -> None:
        """Read the requested elements that lie in a piece: runs of neighbours, a single run if rows were not cut."""
        runs, numel = _runs(tensor.shape, piece)
        stop = start + target.numel()
        first = int(torch.searchsorted(runs + numel, start, right=True))
        last = int(torch.searchsorted(runs, stop))
        step = max(1, CHUNK_NUMEL // numel)
        for run in range(first, last, step):
            begins = runs[run : min(run + step, last)]
            if len(begins) == 1:
                begin = int(begins[0])
                low, high = max(start, begin), min(stop, begin + numel)
                self._read_box(tensor, piece, run * numel + low - begin, target[low - start : high - start])
                continue
            values = torch.empty(len(begins) * numel, dtype=tensor.dtype)
            self._read_box(tensor, piece, run * numel, values)
            place = (begins[:, None] + torch.arange(numel) - start).view(-1)
            here = (place >= 0) & (place < target.numel())
            target[place[here].to(target.device)] = values[here].to(target)

    def _read_box(self, tensor: DcpTensor, piece: DcpPiece, first: int, target: torch.Tensor) -> None:
        """Elements of a piece, by their number in it row by row."""
        (file, byte), saved = self._place(tensor, piece)
        if saved.is_contiguous():
            file.read(byte + first * tensor.dtype.itemsize, tensor.dtype, target)
            return
        if self._turned is None or self._turned[0] != piece:
            self._turned = None
            values = torch.empty(prod(piece.sizes), dtype=tensor.dtype)
            file.read(byte, tensor.dtype, values)
            self._turned = piece, values.as_strided(piece.sizes, saved.stride()).contiguous().view(-1)
        target.copy_(self._turned[1][first : first + target.numel()])

    def _place(self, tensor: DcpTensor, piece: DcpPiece) -> tuple[FileRange, torch.Tensor]:
        """(place of a piece's first element, the piece as a tensor without numbers)."""
        if piece not in self._places:
            file = self._files[piece.file]
            found = loaded_without_numbers(file, piece.byte, piece.nbytes)
            is_it = isinstance(found, torch.Tensor) and (tuple(found.shape), found.dtype) == (piece.sizes, tensor.dtype)
            if not is_it or not is_readable(found):
                raise CheckpointError(f"{file.path} does not hold the tensor that {METADATA} says: {tensor.keys[-1]}")
            self._places[piece] = place_of(file, piece.byte, found), found
        return self._places[piece]


def _given(tensor: DcpTensor) -> StoredTensor:
    *part, name = tensor.keys
    kind = str(tensor.dtype).removeprefix("torch.")
    return StoredTensor([name], kind, tensor.dtype, tensor.shape, row_by_row(tensor.shape), tensor, ".".join(part))


def _runs(shape: tuple[int, ...], piece: DcpPiece) -> tuple[torch.Tensor, int]:
    """The first element of each run, by its number in the tensor, and how many elements each has."""
    cut = max((dim for dim, size in enumerate(piece.sizes) if size < shape[dim]), default=0)
    stride = row_by_row(shape)
    begins = torch.tensor([sum(at * step for at, step in zip(piece.offsets, stride, strict=True))])
    for dim in range(cut):
        begins = (begins[:, None] + torch.arange(piece.sizes[dim]) * stride[dim]).view(-1)
    return begins, prod(piece.sizes[cut:])
