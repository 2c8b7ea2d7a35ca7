"""Files of safetensors and of torch.save: the place of each tensor in one; and safetensors files written for others.

torch.load makes the objects on the meta device, without a number, and tells where in the file those lie; weights_only,
so no other object is made of the file, and no code of it runs. The numbers are read by `OpenFile`, not through the
maps of torch.load and safetensors: a file that is cut meanwhile, or a disk that fails, ends the process with SIGBUS.
"""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
from msgspec import Struct

from zerotrain.checkpoint.manifest import is_dense
from zerotrain.checkpoint.tensor_file import CHUNK_NBYTES, CODES, FileRange, OpenFile, chunks, plan_file, write_file
from zerotrain.errors import CheckpointError, listed
from zerotrain.files.match import StoredTensor, row_by_row
from zerotrain.files.untrusted import MAX_DEPTH, Natural, Shape, UntrustedFileError, parse_json, require_kind, shown

# The header of a safetensors file: its tensors and their places.
#
# Read by hand: the library reads headers through a map of the file alone, and waits for a FIFO in its place
# (safetensors 0.8, 2026-11-23). https://huggingface.co/docs/safetensors/index#format


DTYPES = {code: dtype for dtype, code in CODES.items()} | {
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
}  # fmt: skip
"""By their names in the format. Tensors of other dtypes cannot be read."""
MAX_HEADER_NBYTES = 100_000_000
"""As in the library."""


class _HeaderEntry(Struct):
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
    tensors = []
    for name, entry in header.items():
        code, shape = entry.dtype, tuple(entry.shape)
        place = FileRange(file, 8 + length + entry.data_offsets[0])
        tensors.append(StoredTensor([name], code, DTYPES.get(code), shape, row_by_row(shape), place))
    return tensors


def _require_places(path: Path, header: Mapping[str, _HeaderEntry], data_start: int, nbytes: int) -> None:
    """Check the places: the tensors must fill the file, one after the other, as the format has it."""
    place = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        dtype = DTYPES.get(entry.dtype)
        size = max(0, stop - start) if dtype is None else prod(entry.shape) * dtype.itemsize
        if start != place or stop - start != size:
            raise CheckpointError(f"{path} is damaged: its header gives {name} a place where it cannot be")
        place = stop
    if data_start + place != nbytes:
        what = "cut" if nbytes < data_start + place else "longer than its header says"
        raise CheckpointError(f"{path} is {what}: {nbytes} bytes, and its header says {data_start + place}")


# Safetensors files for others: in parts of a size, with an index as Hugging Face has it, one tensor in memory at a
# time.


@dataclass(frozen=True)
class OutTensor:
    """One tensor to write."""

    dtype: torch.dtype
    """As it is written."""
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    """Called when its turn comes; its values are converted to `dtype`."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_safetensors(folder: Path, tensors: Mapping[str, OutTensor], *, max_nbytes: int, stem: str = "model") -> int:
    """Write tensors into one file `STEM.safetensors`, or where they are larger than `max_nbytes` into several
    `STEM-00001-of-00002.safetensors` with `STEM.safetensors.index.json`; all of it is on the disk at the end.

    Returns:
        How many files.

    Raises:
        CheckpointError: the format does not have a dtype.
        OSError: a file cannot be written.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES:
            raise CheckpointError(f"{name} is of {tensor.dtype}, which safetensors files do not have")
    parts = _parts(tensors, max_nbytes)
    names = [f"{stem}.safetensors"]
    if len(parts) > 1:
        names = [f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    for file, part in zip(names, parts, strict=True):
        # Larger elements first, as the library has it: so each tensor is aligned.
        ordered = sorted(part, key=lambda name: -tensors[name].dtype.itemsize)
        write_file(folder / file, _content({name: tensors[name] for name in ordered}))
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {name: file for file, part in zip(names, parts, strict=True) for name in part},
        }
        text = json.dumps(index, indent=2) + "\n"
        write_file(folder / f"{stem}.safetensors.index.json", [text.encode()])
    return len(parts)


def _parts(tensors: Mapping[str, OutTensor], max_nbytes: int) -> list[list[str]]:
    """The names of each file, in order: as many as fit, at least one."""
    parts: list[list[str]] = [[]]
    nbytes = 0
    for name, tensor in tensors.items():
        if parts[-1] and nbytes + tensor.nbytes > max_nbytes:
            parts.append([])
            nbytes = 0
        parts[-1].append(name)
        nbytes += tensor.nbytes
    return parts


def _content(tensors: Mapping[str, OutTensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a file, some MiB at a time."""
    described = [(name, CODES[tensor.dtype], tensor.shape, tensor.nbytes) for name, tensor in tensors.items()]
    yield plan_file(described, {"format": "pt"})[0]
    for tensor in tensors.values():
        if tensor.nbytes:
            yield from _chunks(tensor)


def _chunks(tensor: OutTensor) -> Iterator[memoryview]:
    # A function of its own: its last part is memory of the tensor, and would keep it while the next one is read.
    for part in tensor.read().reshape(-1).split(CHUNK_NBYTES):
        yield from chunks(part.to(tensor.dtype))


_ZIPPED = b"PK\x03\x04"
_PICKLED = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of torch.save's files before torch 1.6, and of any pickle."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
MAX_TENSORS = 1_000_000
_ALONE = "write only the weights, with torch.save(model.state_dict(), PATH)"


def is_of_torch(file: OpenFile) -> bool:
    """Whether torch.save may have written a file."""
    return file.begin.startswith(_ZIPPED) or _is_pickle(file)


def torch_tensors_in(file: OpenFile) -> list[StoredTensor]:
    """The tensors in dicts of a file, by their keys.

    Raises:
        CheckpointError: torch.save has not written it, it holds other objects than weights, or it is damaged.
    """
    content = loaded_without_numbers(file, 0, file.nbytes)
    tensors = []
    for keys, tensor in _tensors(file.path, content):
        if not keys:
            continue
        *parts, name = keys
        shape, part = tuple(tensor.shape), ".".join(parts)
        if is_readable(tensor):
            kind, place = str(tensor.dtype).removeprefix("torch."), place_of(file, 0, tensor)
            tensors.append(StoredTensor([name], kind, tensor.dtype, shape, tensor.stride(), place, part))
        else:
            kind = "a view, sparse or the like" if type(tensor) in _PLAIN else f"a {type(tensor).__name__}"
            tensors.append(StoredTensor([name], kind, None, shape, row_by_row(shape), None, part))
    if not tensors:
        raise CheckpointError(f"{file.path} holds a {type(content).__name__} without tensors that have names; {_ALONE}")
    return tensors


def loaded_without_numbers(file: OpenFile, start: int, nbytes: int) -> Any:
    """The objects that torch.save has written into this part of a file. `place_of` tells where the numbers of a tensor
    are.

    Raises:
        CheckpointError: as above.
    """
    stream = _Part(file, start, nbytes)
    if _is_pickle(file):
        raise CheckpointError(
            f"{file.path} is a pickle, as torch.save wrote it before torch 1.6, and cannot be read in parts: write it "
            "again, with torch.save(torch.load(OLD, weights_only=True), NEW)"
        )
    records = _records(stream)
    stream.seek(0)
    try:
        content = torch.load(cast(IO[bytes], stream), map_location="meta", weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError:
        raise CheckpointError(_objects_in(stream)) from None
    except Exception as error:  # a damaged file, or one with other kinds of tensors, raises errors of any kind
        detail = f" ({shown(str(error))})" if isinstance(error, RuntimeError) else ""
        raise CheckpointError(
            f"{file.path} is damaged, or holds tensors that cannot be read in parts{detail}; {_ALONE}"
        ) from None
    for _, tensor in _tensors(file.path, content):
        if (place := tensor.untyped_storage()._checkpoint_offset if _is_plain(tensor) else None) is not None:
            storage_nbytes = tensor.untyped_storage().nbytes()
            if storage_nbytes and records.get(place) != storage_nbytes:
                raise CheckpointError(f"{file.path} is damaged: a tensor lies at byte {start + place}, where none can")
    return content


def place_of(file: OpenFile, start: int, tensor: torch.Tensor) -> FileRange:
    """The place of its first element. The others follow contiguously, in the order of its strides.

    Args:
        start: of the part of the file that it was found in.
    """
    offset = tensor.untyped_storage()._checkpoint_offset
    return FileRange(file, start + (offset or 0) + int(tensor.storage_offset()) * tensor.itemsize)


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether its elements lie one after the other in the file, as they are."""
    if not _is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
        return False
    has_place = tensor.numel() == 0 or tensor.untyped_storage()._checkpoint_offset is not None
    return has_place and is_dense(tensor.shape, tensor.stride())


def _is_pickle(file: OpenFile) -> bool:
    # A safetensors file with a header of 640 bytes begins so too, and was refused as a pickle (2026-11-22).
    return file.begin.startswith(_PICKLED) and file.begin[8:9] != b"{"


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def _tensors(path: Path, content: Any) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    """(keys from the outside to it, tensor) of each tensor.

    Raises:
        CheckpointError: there are more than any model has: a few lists that hold each other are endless.
    """
    tensors = list(islice(_walk(content, (), set()), MAX_TENSORS + 1))
    if len(tensors) > MAX_TENSORS:
        raise CheckpointError(
            f"{path} holds more than {MAX_TENSORS:,} tensors, or lists that contain themselves; {_ALONE}"
        )
    return tensors


def _walk(content: Any, parts: tuple[str, ...], bare: set[int]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """As above, of what is not nested too deeply.

    Args:
        bare: gets the ids of containers without a tensor, which are not looked through again.
    """
    if isinstance(content, torch.Tensor):
        yield parts, content
    elif isinstance(content, Mapping | list | tuple) and id(content) not in bare and len(parts) < MAX_DEPTH:
        is_bare = True
        for key, value in content.items() if isinstance(content, Mapping) else enumerate(content):
            for pair in _walk(value, (*parts, str(key) if isinstance(key, str | int) else type(key).__name__), bare):
                is_bare = False
                yield pair
        if is_bare:
            bare.add(id(content))


def _records(stream: "_Part") -> dict[int, int]:
    """{offset of each record in the archive: its size in bytes}."""
    path, records = stream.file.path, {}
    try:
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            names = {member.filename.partition("/")[2] for member in members}
            if "data.pkl" not in names or "constants.pkl" in names:
                raise CheckpointError(f"{path} is a zip archive, but none of torch.save; {_ALONE}")
            for member in members:
                if member.compress_type != zipfile.ZIP_STORED:
                    raise CheckpointError(f"{path} was packed again, and cannot be read in parts; {_ALONE}")
                # torch turns such numbers round on the meta device too, and the process ends with SIGSEGV (2026-11-22).
                if member.filename.endswith("byteorder") and archive.read(member) != b"little":
                    raise CheckpointError(f"{path} was written on a machine that orders bytes the other way round")
                head = stream.part(member.header_offset, 30)
                lengths = (int.from_bytes(head[26:28], "little"), int.from_bytes(head[28:30], "little"))
                records[member.header_offset + 30 + sum(lengths)] = member.file_size
    except CheckpointError:
        raise
    except Exception:  # zipfile raises errors of many kinds for a damaged file
        raise CheckpointError(
            f"{path} is cut or damaged: it begins like a file of torch.save, but does not end like one"
        ) from None
    return records


def _objects_in(stream: "_Part") -> str:
    """The message about objects refused by torch.load."""
    path = stream.file.path
    try:
        stream.seek(0)
        unsafe_names = torch.serialization.get_unsafe_globals_in_checkpoint(cast(IO[bytes], stream))
    except Exception:  # a damaged file raises errors of any kind
        unsafe_names = []
    if not unsafe_names:
        return f"{path} is damaged: its content cannot be read"
    names = listed(sorted(unsafe_names))
    return f"{path} holds more than weights ({names}), and making such objects may run any code; {_ALONE}"


class _Part(io.RawIOBase):
    """A part of a file, as a file of its own."""

    def __init__(self, file: OpenFile, start: int, nbytes: int) -> None:
        self.file, self._start, self._nbytes, self._place = file, start, nbytes, 0

    def part(self, start: int, nbytes: int) -> bytearray:
        if not 0 <= start <= start + nbytes <= self._nbytes:
            raise CheckpointError(f"{self.file.path} is damaged: it refers to bytes outside the file")
        return self.file.bytes(self._start + start, nbytes)

    def read(self, size: int = -1, /) -> bytes:
        rest = max(0, self._nbytes - self._place)  # without room for more: a number in the file may ask for any
        return super().read(rest if size < 0 else min(size, rest)) or b""

    def readinto(self, target: Any) -> int:
        count = max(0, min(len(target), self._nbytes - self._place))
        target[:count] = self.part(self._place, count)
        self._place += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._nbytes}[whence]
        return self._place
