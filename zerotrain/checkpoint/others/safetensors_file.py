"""The header of a safetensors file of anybody's: which tensors lie where.

Read by hand, since the library is needed for nothing else and gives no elements of a tensor by their number.
https://huggingface.co/docs/safetensors/index#format
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zerotrain.checkpoint.others.given import GivenTensor, row_by_row
from zerotrain.checkpoint.others.open_file import FileRange, OpenFile
from zerotrain.errors import CheckpointError
from zerotrain.files.untrusted import Each, Natural, Shape, UntrustedFileError, parse_json, require_schema

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
"""By what the format calls them. A file may have tensors of others, which cannot be read."""
MAX_HEADER_NBYTES = 100_000_000
"""As in the library."""


@dataclass(frozen=True)
class _Range:
    """Two bytes, the second not before the first."""

    def problem(self, value: Any) -> str | None:
        is_pair = type(value) is list and len(value) == 2 and not any(map(Natural().problem, value))
        return None if is_pair and value[0] <= value[1] else "two whole numbers, rising"


_HEADER = Each({"dtype": str, "shape": Shape(), "data_offsets": _Range()})


class Stored(NamedTuple):
    """Where a tensor lies."""

    code: str
    shape: tuple[int, ...]
    start: int
    stop: int
    """Bytes, from the start of the file."""


def safetensors_in(file: OpenFile) -> list[GivenTensor]:
    """The tensors of a file, in the order of its header.

    Raises:
        CheckpointError: it is no safetensors file, or was cut off or damaged where its header lies.
    """
    begin, nbytes = file.begin, file.nbytes
    length = int.from_bytes(begin[:8], "little")
    if len(begin) < 8 or not 2 <= length <= MAX_HEADER_NBYTES or begin[8:9] not in (b"{", b""):
        raise CheckpointError(
            f"{file.path} is no safetensors file and none of torch.save ({nbytes} bytes): it has no such header"
        )
    if 8 + length > nbytes:
        raise CheckpointError(f"{file.path} is cut: {nbytes} bytes, and its header alone has {8 + length}")
    try:
        header = parse_json(bytes(file.bytes(8, length)), {})
        header.pop("__metadata__", None)
        require_schema(header, _HEADER)
    except UntrustedFileError as error:
        raise CheckpointError(f"{file.path} is no safetensors file, or damaged in its header: {error}") from None
    tensors = {name: _stored(entry, 8 + length) for name, entry in header.items()}
    _require_places(file.path, tensors, 8 + length, nbytes)
    return [
        GivenTensor(
            [name], each.code, DTYPES.get(each.code), each.shape, row_by_row(each.shape), FileRange(file, each.start)
        )
        for name, each in tensors.items()
    ]


def _require_places(path: Path, tensors: Mapping[str, Stored], data_start: int, nbytes: int) -> None:
    """Make sure that the tensors fill the file, one after the other, as the format has it."""
    place = data_start
    for name, stored in sorted(tensors.items(), key=lambda each: (each[1].start, each[1].stop)):
        dtype = DTYPES.get(stored.code)
        told = stored.stop - stored.start
        if stored.start != place or (dtype is not None and told != prod(stored.shape) * dtype.itemsize):
            raise CheckpointError(f"{path} is damaged: by its header {name} lies where it cannot lie")
        place = stored.stop
    if place != nbytes:
        what = "cut" if nbytes < place else "longer than what its header tells"
        raise CheckpointError(f"{path} is {what}: {nbytes} bytes, and its header tells of {place}")


def _stored(entry: Mapping[str, Any], data_start: int) -> Stored:
    start, stop = entry["data_offsets"]
    return Stored(entry["dtype"], tuple(entry["shape"]), data_start + start, data_start + stop)
