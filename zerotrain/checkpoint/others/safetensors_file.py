"""The header of a safetensors file of anybody's: which tensors lie where.

Read by hand. The library gives no elements of a tensor by their number, and it maps the file: one that becomes shorter
meanwhile ends the process with SIGBUS, and a FIFO in its place is waited for (safetensors 0.8, 2026-11-23).
https://huggingface.co/docs/safetensors/index#format
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, TypedDict

import torch

from zerotrain.checkpoint.others.open_file import FileRange, OpenFile
from zerotrain.checkpoint.others.stored_weights import StoredTensor, row_by_row
from zerotrain.errors import CheckpointError
from zerotrain.files.untrusted import Natural, Shape, UntrustedFileError, parse_json, require_kind

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
"""By what the format calls them. A file may have tensors of others, which cannot be read."""
MAX_HEADER_NBYTES = 100_000_000
"""As in the library."""


class _HeaderEntry(TypedDict):
    dtype: str
    shape: Shape
    data_offsets: tuple[Natural, Natural]


def safetensors_in(file: OpenFile) -> list[StoredTensor]:
    """The tensors of a file, in the order of its header.

    Raises:
        CheckpointError: it is no safetensors file, or was cut off or damaged where its header lies.
    """
    begin, nbytes = file.begin, file.nbytes
    length = int.from_bytes(begin[:8], "little")
    if len(begin) < 8 or not 2 <= length <= MAX_HEADER_NBYTES or begin[8:9] not in (b"{", b""):
        raise CheckpointError(
            f"{file.path} is neither a file of safetensors nor of torch.save ({nbytes} bytes): it has no such header"
        )
    if 8 + length > nbytes:
        raise CheckpointError(
            f"{file.path} is cut: {nbytes} bytes, and its header says that it has {8 + length} itself"
        )
    try:
        header = parse_json(bytes(file.bytes(8, length)), dict[str, Any])
        header.pop("__metadata__", None)
        header = require_kind(header, dict[str, _HeaderEntry])
    except UntrustedFileError as error:
        raise CheckpointError(f"{file.path} is no safetensors file, or damaged in its header: {error}") from None
    _require_places(file.path, header, 8 + length, nbytes)
    return [_given(file, name, entry, 8 + length) for name, entry in header.items()]


def _require_places(path: Path, header: Mapping[str, Any], data_start: int, nbytes: int) -> None:
    """Make sure that the tensors fill the file, one after the other, as the format has it."""
    place = 0
    for name, entry in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        dtype = DTYPES.get(entry["dtype"])
        size = max(0, stop - start) if dtype is None else prod(entry["shape"]) * dtype.itemsize
        if start != place or stop - start != size:
            raise CheckpointError(f"{path} is damaged: its header gives {name} a place where it cannot be")
        place = stop
    if data_start + place != nbytes:
        what = "cut" if nbytes < data_start + place else "longer than its header says"
        raise CheckpointError(f"{path} is {what}: {nbytes} bytes, and its header says {data_start + place}")


def _given(file: OpenFile, name: str, entry: Mapping[str, Any], data_start: int) -> StoredTensor:
    code, shape, place = entry["dtype"], tuple(entry["shape"]), FileRange(file, data_start + entry["data_offsets"][0])
    return StoredTensor([name], code, DTYPES.get(code), shape, row_by_row(shape), place)
