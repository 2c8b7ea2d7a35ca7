"""The tensors in a folder of torch.distributed.checkpoint, by its file .metadata.

That file is a pickle, which torch itself reads with pickle.load: whoever wrote it may have any code run. Here it is
read into records of our own, tuples, texts, dicts and dtypes, and whatever else it names is refused.
"""

import io
import pickle
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zerotrain.checkpoint.manifest_schema import DTYPES
from zerotrain.checkpoint.others.open_file import OpenFile
from zerotrain.errors import CheckpointError
from zerotrain.files.untrusted import FileName, Natural, Shape, require_kind

METADATA = ".metadata"
"""The file that makes a folder one of DCP."""


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor."""


class DcpPiece(NamedTuple):
    """A box of a tensor, as one rank has saved it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    byte: int
    nbytes: int
    """Bytes in the file that torch.save has written for it."""


class DcpTensor(NamedTuple):
    """A tensor of a folder."""

    keys: tuple[str, ...]
    """From the outside to it, such as ("model", "blocks.0.weight")."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[DcpPiece]


def read_metadata(file: OpenFile) -> list[DcpTensor]:
    """The tensors of a folder.

    Raises:
        CheckpointError: it is no .metadata of DCP, is damaged, or holds other objects than one does.
    """
    unpickler = _Unpickler(io.BytesIO(file.bytes(0, file.nbytes)))
    try:
        return list(_tensors(file.path.parent, unpickler.load()))
    except CheckpointError:
        raise
    except Exception:  # whatever a damaged pickle comes to
        if unpickler.refused:
            raise CheckpointError(
                f"{file.path} holds {unpickler.refused}, which no {METADATA} of torch.distributed.checkpoint does, and "
                "making such an object may run any code"
            ) from None
        raise CheckpointError(f"{file.path} is no {METADATA} of torch.distributed.checkpoint, or damaged") from None


def _tensors(folder: Path, content: Any) -> Iterator[DcpTensor]:
    stored = {
        (index.fqn, tuple(getattr(index, "offset", None) or ())): each for index, each in content.storage_data.items()
    }
    keys_of = content.planner_data or {}
    for name, each in content.state_dict_metadata.items():
        if not hasattr(each, "chunks"):
            continue  # a number, a text and the like, as bytes
        dtype, shape = each.properties.state[0], _numbers(each.size, Shape)
        boxes = [(_numbers(box.offsets, list[Natural]), _numbers(box.sizes, Shape)) for box in each.chunks]
        boxes = [box for box in boxes if prod(box[1]) > 0]
        if not isinstance(dtype, torch.dtype) or not _fills(shape, boxes):
            raise ValueError
        pieces = [_piece(folder, stored[name, box[0]], *box) for box in boxes]
        yield DcpTensor(tuple(map(str, keys_of.get(name, (name,)))), dtype, shape, pieces)


def _fills(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether each element of a tensor lies in just one of the boxes: (offsets, sizes)."""
    near: list[Box] = []
    for box in sorted(boxes):
        if any(start + size > length for start, size, length in zip(*box, shape, strict=True)):
            return False
        near = [other for other in near if not shape or other[0][0] + other[1][0] > box[0][0]]
        if any(_overlap(box, other) for other in near):
            return False
        near.append(box)
    return sum(prod(sizes) for _, sizes in boxes) == prod(shape)


def _overlap(box: Box, other: Box) -> bool:
    return all(a < b + m and b < a + n for a, n, b, m in zip(*box, *other, strict=True))


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


_MADE: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _Record,
    ("collections", "OrderedDict"): dict,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
} | dict.fromkeys(
    (
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
    _Record,
) | dict.fromkeys(
    ((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")), _Record
)  # fmt: skip
"""The objects made for names in the file: beside dtypes no others."""


class _Unpickler(pickle._Unpickler):
    """The one that is written in Python: that in C takes as many bytes as a number in the file says (LONG_BINPUT)."""

    refused = ""
    """The first name that is none of those."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) not in _MADE:
            self.refused = self.refused or f"{module}.{name}"
            raise pickle.UnpicklingError
        return _MADE[module, name]
