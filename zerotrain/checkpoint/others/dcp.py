"""Reads ranges of the weights in a folder of torch.distributed.checkpoint, as FSDP2 saves them.

torch's own reader unpickles .metadata, and loads each piece whole also for a part of it.
"""

import io
import pickle
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zerotrain.checkpoint.manifest import DTYPES, hash_of
from zerotrain.checkpoint.others.safetensors_and_torch import is_readable, loaded_without_numbers, place_of
from zerotrain.checkpoint.tensor_file import METADATA, FileRange, OpenFile, Weights, read_box
from zerotrain.errors import CheckpointError
from zerotrain.files.match import StoredTensor, row_by_row
from zerotrain.files.untrusted import FileName, Natural, Shape, require_kind

# The tensors in a folder of torch.distributed.checkpoint, by its file .metadata.
#
# The file is a pickle, and torch itself reads it with pickle.load: its author may have any code run. Here it is read
# into records of our own, tuples, texts, dicts and dtypes, and any other object in it is refused.


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor."""


class DcpPiece(NamedTuple):
    """A box of a tensor, as one rank has saved it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    byte: int
    nbytes: int
    """Bytes that torch.save has written for it into the file."""


def read_metadata(file: OpenFile) -> list[StoredTensor]:
    """The tensors of a folder; the place of each is a list of `DcpPiece`.

    Raises:
        CheckpointError: it is no .metadata of DCP, is damaged, or holds other objects than one does.
    """
    unpickler = _Unpickler(io.BytesIO(file.bytes(0, file.nbytes)))
    try:
        return list(_tensors(file.path.parent, unpickler.load()))
    except CheckpointError:
        raise
    except Exception:  # a damaged pickle raises errors of any kind
        if unpickler.refused:
            raise CheckpointError(
                f"{file.path} holds {unpickler.refused}, which no {METADATA} of torch.distributed.checkpoint does, and "
                "making such an object may run any code"
            ) from None
        raise CheckpointError(f"{file.path} is no {METADATA} of torch.distributed.checkpoint, or damaged") from None


def _tensors(folder: Path, content: Any) -> Iterator[StoredTensor]:
    stored = {
        (index.fqn, tuple(getattr(index, "offset", None) or ())): info for index, info in content.storage_data.items()
    }
    keys_of = content.planner_data or {}
    for name, metadata in content.state_dict_metadata.items():
        if not hasattr(metadata, "chunks"):
            continue  # a number, a text and the like, as bytes
        dtype, shape = metadata.properties.state[0], _numbers(metadata.size, Shape)
        boxes = [(_numbers(box.offsets, list[Natural]), _numbers(box.sizes, Shape)) for box in metadata.chunks]
        boxes = [box for box in boxes if prod(box[1]) > 0]
        if not isinstance(dtype, torch.dtype) or not _fills(shape, boxes):
            raise ValueError
        pieces = [_piece(folder, stored[name, box[0]], *box) for box in boxes]
        *part, key = map(str, keys_of.get(name, (name,)))  # from the outside to it, such as ("model", "0.weight")
        kind, stride = str(dtype).removeprefix("torch."), row_by_row(shape)
        yield StoredTensor([key], kind, dtype, shape, stride, pieces, ".".join(part))


def _fills(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether each element of a tensor lies in just one of the boxes: (offsets, sizes)."""
    near: list[Box] = []
    for box in sorted(boxes):
        if any(start + size > length for start, size, length in zip(*box, shape, strict=True)):
            return False
        near = [other for other in near if not shape or other[0][0] + other[1][0] > box[0][0]]
        for other in near:
            if all(a < b + m and b < a + n for a, n, b, m in zip(*box, *other, strict=True)):
                return False
        near.append(box)
    return sum(prod(sizes) for _, sizes in boxes) == prod(shape)


def _piece(folder: Path, info: Any, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> DcpPiece:
    if how := getattr(info, "transform_descriptors", None):
        raise CheckpointError(
            f"{folder} was compressed or changed by {', '.join(map(str, how))}, and cannot be read: write it without"
        )
    byte, nbytes = info.offset, info.length
    require_kind([byte, nbytes], list[Natural])
    return DcpPiece(offsets, sizes, require_kind(info.relative_path, FileName), byte, nbytes)


def _numbers(values: Any, kind: Any) -> tuple[int, ...]:
    return tuple(require_kind(list(values), kind))


class _Record:
    """Stands for an object of any of the classes of DCP."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


_RECORDS = {
    "torch.serialization": ["_get_layout"],
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch.distributed.checkpoint.metadata": [
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ],
    "pathlib": ["PosixPath", "WindowsPath"],
    "pathlib._local": ["PosixPath", "WindowsPath"],
}  # fmt: skip
"""The classes in the file whose objects are made as records, by their modules; there are no others but tuples, dicts
and dtypes."""
_PLAIN: dict[tuple[str, str], Any] = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}


class _Unpickler(pickle._Unpickler):
    """The unpickler written in Python: the one in C allocates any number of bytes that a file says (LONG_BINPUT)."""

    refused = ""
    """The first name of anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if name in _RECORDS.get(module, ()):
            return _Record
        if (module, name) not in _PLAIN:
            self.refused = self.refused or f"{module}.{name}"
            raise pickle.UnpicklingError
        return _PLAIN[module, name]


class DcpWeights(Weights):
    """Weights in one folder. A tensor is assembled from the pieces of all ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, OpenFile] = {}
        self._places: dict[DcpPiece, tuple[FileRange, torch.Tensor]] = {}
        self._turned: tuple[DcpPiece, torch.Tensor] | None = None
        """The last piece read whole, turned row by row."""
        with ExitStack() as opened:
            metadata = OpenFile(path / METADATA)
            opened.callback(metadata.close)
            self.tensors = read_metadata(metadata)
            self.fingerprint = hash_of(metadata.bytes(0, metadata.nbytes))
            for piece in (piece for tensor in self.tensors for piece in tensor.place):
                if piece.file not in self._files:
                    self._files[piece.file] = OpenFile(path / piece.file)
                    opened.callback(self._files[piece.file].close)
                nbytes, end = self._files[piece.file].nbytes, piece.byte + piece.nbytes
                if end > nbytes:
                    raise CheckpointError(f"{path / piece.file} is cut: {nbytes} bytes, and {METADATA} says {end}")
            self._opened = opened.pop_all()

    def problems(self, tensors: Sequence[StoredTensor], part: int, num_parts: int) -> list[str]:
        pieces = [(tensor, piece) for tensor in tensors for piece in tensor.place]
        try:
            for tensor, piece in pieces[part::num_parts]:
                self._place(tensor, piece)
        except CheckpointError as error:
            return [str(error)]
        return []

    def fill(self, tensor: StoredTensor, start: int, target: torch.Tensor) -> None:
        for piece in tensor.place:
            begin = last = -start
            for offset, size, step in zip(piece.offsets, piece.sizes, tensor.stride, strict=True):
                begin += offset * step
                last += (offset + size - 1) * step
            if begin < target.numel() and last >= 0:
                box = replace(tensor, shape=piece.sizes, stride=row_by_row(piece.sizes))
                read_box(partial(self._read_piece, tensor, piece), box, tensor.stride, begin, target)

    def _read_piece(self, tensor: StoredTensor, piece: DcpPiece, begin: int, target: torch.Tensor) -> None:
        """Elements of a piece, by their number in it row by row."""
        (file, byte), saved = self._place(tensor, piece)
        if saved.is_contiguous():
            file.read(byte + begin * saved.itemsize, saved.dtype, target)
            return
        if self._turned is None or self._turned[0] != piece:
            self._turned = None
            values = torch.empty(prod(piece.sizes), dtype=saved.dtype)
            file.read(byte, saved.dtype, values)
            self._turned = piece, values.as_strided(piece.sizes, saved.stride()).contiguous().view(-1)
        target.copy_(self._turned[1][begin : begin + target.numel()])

    def _place(self, tensor: StoredTensor, piece: DcpPiece) -> tuple[FileRange, torch.Tensor]:
        """(place of a piece's first element, the piece as a tensor without numbers)."""
        if piece not in self._places:
            file = self._files[piece.file]
            stored = loaded_without_numbers(file, piece.byte, piece.nbytes)
            form = (tuple(stored.shape), stored.dtype) if isinstance(stored, torch.Tensor) else None
            if form != (piece.sizes, tensor.dtype) or not is_readable(stored):
                raise CheckpointError(f"{file.path} does not hold the tensor that {METADATA} says: {tensor.names[0]}")
            self._places[piece] = place_of(file, piece.byte, stored), stored
        return self._places[piece]
