"""Files of torch.save: the place of each tensor in a file, or in a part of one.

torch.load makes the objects on the meta device, without a number, and tells where in the file those lie; weights_only,
so no other object is made of the file, and no code of it runs. Its mmap=True is not for us: a file that becomes shorter
meanwhile ends the process with SIGBUS (torch 2.13, 2026-11-23).
"""

import io
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import torch

from zerotrain.checkpoint.manifest_schema import is_dense
from zerotrain.checkpoint.others.open_file import FileRange, OpenFile
from zerotrain.checkpoint.others.stored_weights import StoredTensor, row_by_row
from zerotrain.errors import CheckpointError, listed
from zerotrain.files.untrusted import MAX_DEPTH, shown

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
    """The tensors of a file that lie in dicts of it, by their keys.

    Raises:
        CheckpointError: torch.save has not written it, it holds other objects than weights, or it is damaged.
    """
    content = loaded_without_numbers(file, 0, file.nbytes)
    found = [_given(file, parts, tensor) for parts, tensor in _tensors(file.path, content) if parts]
    if not found:
        raise CheckpointError(f"{file.path} holds a {type(content).__name__} without tensors that have names; {_ALONE}")
    return found


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
    except Exception as error:  # whatever a damaged one, or one of other kinds of tensors, comes to
        said = f" ({shown(str(error))})" if isinstance(error, RuntimeError) else ""
        raise CheckpointError(
            f"{file.path} is damaged, or holds tensors that cannot be read in parts{said}; {_ALONE}"
        ) from None
    for _, tensor in _tensors(file.path, content):
        if (place := tensor.untyped_storage()._checkpoint_offset if _is_plain(tensor) else None) is not None:
            told = tensor.untyped_storage().nbytes()
            if told and records.get(place) != told:
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
    # A safetensors file whose header has 640 bytes begins so too, and was refused as a pickle (2026-11-22).
    return file.begin.startswith(_PICKLED) and file.begin[8:9] != b"{"


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def _given(file: OpenFile, parts: tuple[str, ...], tensor: torch.Tensor) -> StoredTensor:
    *part, name = parts
    kind, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if not is_readable(tensor):
        kind = "a view, sparse or the like" if type(tensor) in _PLAIN else f"a {type(tensor).__name__}"
        return StoredTensor([name], kind, None, shape, row_by_row(shape), None, ".".join(part))
    return StoredTensor([name], kind, tensor.dtype, shape, tensor.stride(), place_of(file, 0, tensor), ".".join(part))


def _tensors(path: Path, content: Any) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    """(keys from the outside to it, tensor) of each tensor.

    Raises:
        CheckpointError: there are more than any model has: a few lists that hold each other are endless.
    """
    found = list(islice(_walk(content, (), set()), MAX_TENSORS + 1))
    if len(found) > MAX_TENSORS:
        raise CheckpointError(
            f"{path} holds more than {MAX_TENSORS:,} tensors, or lists that contain themselves; {_ALONE}"
        )
    return found


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
            for found in _walk(value, (*parts, str(key) if isinstance(key, str | int) else type(key).__name__), bare):
                is_bare = False
                yield found
        if is_bare:
            bare.add(id(content))


def _records(stream: "_Part") -> dict[int, int]:
    """{offset of each record in the archive: its size in bytes}."""
    path, records = stream.file.path, {}
    try:
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            names = {each.filename.partition("/")[2] for each in members}
            if "data.pkl" not in names or "constants.pkl" in names:
                raise CheckpointError(f"{path} is a zip archive, but none of torch.save; {_ALONE}")
            if any(each.compress_type != zipfile.ZIP_STORED for each in members):
                raise CheckpointError(f"{path} was packed again, and cannot be read in parts; {_ALONE}")
            orders = [each for each in members if each.filename.endswith("byteorder")]
            # torch turns such numbers round on the meta device too, and the process ends with SIGSEGV (2026-11-22).
            if any(archive.read(each) != b"little" for each in orders):
                raise CheckpointError(f"{path} was written on a machine that orders bytes the other way round")
            for each in members:
                head = stream.part(each.header_offset, 30)
                lengths = (int.from_bytes(head[26:28], "little"), int.from_bytes(head[28:30], "little"))
                records[each.header_offset + 30 + sum(lengths)] = each.file_size
    except CheckpointError:
        raise
    except Exception:  # whatever a damaged one comes to: zipfile raises errors of many kinds
        raise CheckpointError(
            f"{path} is cut or damaged: it begins like a file of torch.save, but does not end like one"
        ) from None
    return records


def _objects_in(stream: "_Part") -> str:
    """The message about a file of which torch.load has refused something."""
    path = stream.file.path
    try:
        stream.seek(0)
        found = torch.serialization.get_unsafe_globals_in_checkpoint(cast(IO[bytes], stream))
    except Exception:  # damaged, and so whatever reading it comes to
        found = []
    if not found:
        return f"{path} is damaged: its content cannot be read"
    return (
        f"{path} holds more than weights ({listed(sorted(found))}), and making such objects may run any code; {_ALONE}"
    )


class _Part(io.RawIOBase):
    """A part of a file, as a file that is read from its begin."""

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

    def tell(self) -> int:
        return self._place

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
