"""The manifest: what a checkpoint holds, where each element lies, and the hash of every block of every file."""

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct
from msgspec.structs import replace

from zerotrain.errors import CheckpointError
from zerotrain.files import untrusted
from zerotrain.files.match import StoredTensor, row_by_row
from zerotrain.files.untrusted import FileName, Name, Natural, Shape, UntrustedFileError, one_of, require_kind, shown
from zerotrain.version import __version__

# A file as blocks of 1 MiB, each with a hash: made while the file is written, compared while it is read.
#
# A rank reads whole blocks also for a part of a file, so all that it uses was verified, and nothing is read twice for
# it. The hash is XXH3 with 64 bits: on one core SHA-256 takes 0.6 s a GB, BLAKE2b 1.2 s and CRC-32 0.27 s, XXH3
# 0.02 s, where the disk takes a second (benchmarks/checkpoint.py measures it). It finds accidents, not attackers.


BLOCK_NBYTES = 2**20
HASH = "xxh3_64"


def hash_of(data: bytes | bytearray | memoryview) -> str:
    """16 hexadecimal digits."""
    import xxhash  # compiled for one version of Python: a machine without it can train, and save nothing

    return xxhash.xxh3_64_hexdigest(data)


# The rules for a manifest's content: its types, and its places in the files.
#
# A correct hash says only: somebody wrote the manifest so. All places and sizes in it are checked here before
# anything is read by them: afterwards no number of it leads out of a file, a tensor or the memory.


DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "bool", "int64", "int32",
        "int16", "int8", "uint64", "uint32", "uint16", "uint8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "float8_e8m0fnu",
    )
}  # fmt: skip
"""By what the manifest calls them."""
WEIGHT = "weight"
AVERAGE = "weight_average"
"""The role of a weight's moving average. Training parameters have it if the run keeps one."""
BUFFER = "buffer"
"""A role, as `WEIGHT` is; what an optimizer keeps has the optimizer's own names, such as exp_avg."""
EXTRA_STATE = "extra_state"
"""The entry of the manifest with what modules keep beside their tensors, and the role of the tensors among it."""


class Piece(Struct, frozen=True):
    """Neighbouring elements of one tensor, and where they lie."""

    file: Natural
    """Index in the manifest's files."""
    byte: Natural
    """From the start of the file."""
    start: Natural
    stop: Natural
    """Elements of the tensor, in the order of its memory."""


class SavedTensor(Struct, kw_only=True, omit_defaults=True):
    """A tensor of a parameter: its weight, an average, or what the optimizer keeps."""

    dtype: Annotated[str, one_of(*DTYPES)]
    pieces: list[Piece]
    shape: Shape | None = None
    """Shape of its own, where the optimizer updates the parameter whole; None: a number for each element."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


class SavedBuffer(SavedTensor, kw_only=True):
    """A buffer, or a tensor that a module keeps beside its own."""

    shape: Shape


class SavedParameter(Struct):
    """A parameter of the model, under its first name."""

    names: list[Name]
    """All of them, if it is tied."""
    shape: Shape
    stride: list[Natural]
    trains: bool
    group: int | None
    generation: Natural
    is_updated_whole: bool
    counts: dict[str, Any]
    """Values that the optimizer keeps once for all elements, by name."""
    tensors: dict[str, SavedTensor]
    """By role."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


class SavedFile(Struct):
    """A file of a rank."""

    name: FileName
    nbytes: Natural
    hashes: list[str]
    """Of its blocks."""


class DescribedFile(SavedFile):
    """The file of a rank, as that rank describes it to rank 0."""

    pieces: list[tuple[str, str, SavedTensor]]
    """(name, role, dtype, shape and place) of each tensor in it."""


class _Settings(Struct):
    name: Name
    lr: float | dict[str, Any] = 0.0


class _Group(Struct):
    optimizer: Name
    first_lr: float
    hyperparameters: _Settings


class _Scaler(Struct):
    scale: float
    num_clean_steps: Natural


class _Average(Struct):
    num_updates: Natural


class _Parts(Struct):
    parameters: dict[str, SavedParameter]
    buffers: dict[str, SavedBuffer]
    files: list[SavedFile]
    extra_state: dict[str, dict[str, Any]] = {}
    step: Natural = 0
    ranks: Natural = 0
    average: _Average | None = None


class _Head(Struct):
    """All the rest of a manifest."""

    hash_function: Annotated[str, one_of(HASH)]
    block_nbytes: Annotated[int, Meta(ge=BLOCK_NBYTES, le=BLOCK_NBYTES)]
    versions: dict[str, Name]
    step: Natural
    skipped_in_a_row: Natural
    loss_scaler: _Scaler | None
    stage: Annotated[int, Meta(ge=0, le=3)]
    ranks: Natural
    virtual_ranks: Natural
    precision: Name
    config_sha256: str | None
    config: Any
    extra: Any
    groups: list[_Group]
    own: list[Any] = []


def _is_setting(value: Any) -> bool:
    """Whether a value is a hyperparameter, or what an optimizer keeps once: a number, a text, null, a tensor of few
    numbers, a list of these, or the name of an object's class."""
    if type(value) is list:
        return all(map(_is_setting, value))
    if type(value) is dict:
        return type(value.get("object")) is str or _is_tensor(value)
    return value is None or type(value) in (bool, int, float, str)


def _is_tensor(value: Mapping[str, Any]) -> bool:
    if type(dtype := value.get("dtype")) is not str or dtype not in DTYPES:
        return False
    try:
        torch.tensor(value.get("value"), dtype=DTYPES[dtype])
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a text, lists of several lengths, 10**30
        return False
    return True


def require_whole(manifest: "Manifest") -> None:
    """Check the values and places of a manifest, whose parts are of their types.

    Raises:
        UntrustedFileError: they cannot be; the text names the place.
    """
    head: _Head = require_kind(manifest.content, _Head)
    for name in (*manifest.buffers, *manifest.extra_state):
        require_kind(name, Name)
    for group in head.groups:
        lr = group.hyperparameters.lr
        if isinstance(lr, dict) and not _is_tensor(lr):
            raise UntrustedFileError(f"lr: got {shown(lr)}; it must be a number")
    groups = [group["hyperparameters"] for group in manifest.content["groups"]]
    for settings in (*groups, *(parameter.counts for parameter in manifest.parameters.values())):
        if bad := [name for name, value in settings.items() if not _is_setting(value)]:
            raise UntrustedFileError(
                f"{shown(bad[0])}: got {shown(settings[bad[0]])}; it must be a number, a text, null, a tensor, a list "
                "of these, or an object's class"
            )
    for problem in (*_part_problems(manifest, len(groups)), *_place_problems(manifest)):
        raise UntrustedFileError(problem)


def _part_problems(manifest: "Manifest", num_groups: int) -> Iterator[str]:
    files, num_ranks = manifest.files, manifest.num_ranks
    if len(files) != num_ranks or len({file.name for file in files}) != num_ranks or num_ranks == 0:
        yield f"it names {len(files)} files, and must name another for each of {num_ranks} ranks, 1 or more"
    for file in files:
        if len(file.hashes) != -(-file.nbytes // BLOCK_NBYTES):
            yield f"{file.name} has {file.nbytes} bytes in it, and the hashes of {len(file.hashes)} blocks"
    used_names: set[str] = set()
    updated_with: dict[tuple[int | None, int], str] = {}
    for name, parameter in manifest.parameters.items():
        names, group, shape, stride = parameter.names, parameter.group, parameter.shape, parameter.stride
        if names[:1] != [name] or len(set(names)) < len(names) or used_names & {*names}:
            yield f"parameters.{shown(name)} has the names {shown(names)}, another's or twice the same"
        used_names.update(names)
        if len(stride) != len(shape) or not is_dense(shape, stride):
            lengths = shown(list(shape))
            yield f"parameters.{shown(name)} has shape {lengths} and strides {shown(stride)}, which leave gaps"
        if group is not None and not 0 <= group < num_groups:
            yield f"parameters.{shown(name)} is of group {group}, and there are {num_groups}"
        if group is None and parameter.trains:
            yield f"parameters.{shown(name)} trains, and is of no group"
        for role in (WEIGHT, AVERAGE) if manifest.num_average_updates and parameter.trains else (WEIGHT,):
            tensor = parameter.tensors.get(role)
            if parameter.numel > 0 and (tensor is None or not tensor.torch_dtype.is_floating_point):
                yield f"parameters.{shown(name)} has no {role} of floating-point numbers"
        if parameter.trains and not parameter.is_updated_whole and parameter.numel > 0:
            other = updated_with.setdefault((group, parameter.generation), name)
            roles, other_roles = parameter.tensors.keys(), manifest.parameters[other].tensors.keys()
            if roles != other_roles:
                texts = shown(", ".join(roles)), shown(", ".join(other_roles))
                yield f"{shown(name)} has {texts[0]} in it, and {shown(other)}, which is updated with it, {texts[1]}"
        for role, tensor in parameter.tensors.items():
            require_kind(role, Name)
            own = tensor.shape is not None
            if own != (parameter.is_updated_whole and role not in (WEIGHT, AVERAGE)):
                yield f"{role} of {shown(name)} has {'a' if own else 'no'} shape of its own"


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements of a tensor with these strides fill as many places, without gaps."""
    numel = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: pair[1]):
        if size > 1 and step != numel:
            return False
        numel *= max(1, size)
    return True


def _place_problems(manifest: "Manifest") -> Iterator[str]:
    """Lines where pieces lie outside the files or over each other, or have not each element of a tensor once."""
    sizes, extents = [file.nbytes for file in manifest.files], []
    for name, role, tensor in manifest.tensors():
        label, is_of_each_rank = f"{role} of {shown(name)}", role == BUFFER and isinstance(tensor, SavedBuffer)
        numel = manifest.parameters[name].numel if tensor.shape is None else prod(tensor.shape)
        itemsize, num_placed = tensor.torch_dtype.itemsize, 0
        for piece in sorted(tensor.pieces, key=lambda item: item.start):
            file, byte, start, stop = piece.file, piece.byte, piece.start, piece.stop
            end = byte + (stop - start) * itemsize
            if start > stop or file >= len(sizes) or end > sizes[file]:
                yield f"{label} has elements {start} to {stop} at byte {byte} of file {file}, where they cannot lie"
                return
            extents.append((file, byte, end, label))
            if is_of_each_rank and (start, stop) != (0, numel):
                yield f"{label} has elements {start} to {stop} of {numel} on rank {file}, and must have all"
            if not is_of_each_rank and start != num_placed:
                yield f"{label} has element {min(start, num_placed)} in no file, or in two places"
            num_placed = stop
        if is_of_each_rank and tensor.pieces:
            files = [piece.file for piece in tensor.pieces]
            num_placed = numel if 0 in files and len(set(files)) == len(files) else -1
        if num_placed != numel:
            yield f"{label} must have {numel} elements, and {max(num_placed, 0)} are in the files"
    extents.sort()
    for (file, _, end, label), (other_file, byte, _, other) in pairwise(extents):
        if file == other_file and byte < end:
            yield f"{label} and {other} lie in the same bytes of file {file}"


MANIFEST = "manifest.json"
MAX_NBYTES = 2**30
"""Limit for a manifest: hashes of 40 TB."""
FORMAT, FORMAT_VERSION = "zerotrain checkpoint", 1


class Manifest:
    """The content of `manifest.json`.

    Args:
        content: as docs/reference/checkpoint_format.md has it, without its hash.

    Raises:
        UntrustedFileError: a part of it is not of its type; the text names the place.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        parts: _Parts = require_kind(content, _Parts)
        self.files, self.parameters, self.buffers = parts.files, parts.parameters, parts.buffers
        self.extra_state: dict[str, dict[str, Any] | SavedBuffer] = {}
        """By name {"value": ...}, or a tensor."""
        for name, state in parts.extra_state.items():
            self.extra_state[name] = state if "value" in state else require_kind(state, SavedBuffer)
        self.step, self.num_ranks = parts.step, parts.ranks
        self.num_average_updates = 0 if parts.average is None else parts.average.num_updates
        """Updates of its average of weights; 0: it holds none."""

    def tensors(self) -> Iterator[tuple[str, str, SavedTensor]]:
        """(name, role, tensor) of each saved tensor."""
        for name, parameter in self.parameters.items():
            for role, tensor in parameter.tensors.items():
                yield name, role, tensor
        for name, buffer in self.buffers.items():
            yield name, BUFFER, buffer
        for name, state in self.extra_state.items():
            if isinstance(state, SavedBuffer):
                yield name, EXTRA_STATE, state

    def stored_weights(self, *, averaged: bool = False) -> list[StoredTensor]:
        """Its parameters, by their weights.

        Args:
            averaged: take the averages of the weights, where there are any.
        """
        stored = []
        for parameter in self.parameters.values():
            tensors, form = parameter.tensors, (tuple(parameter.shape), tuple(parameter.stride))
            tensor = tensors.get(AVERAGE if averaged and AVERAGE in tensors else WEIGHT)
            kind, dtype = ("", None) if tensor is None else (tensor.dtype, tensor.torch_dtype)
            stored.append(StoredTensor(parameter.names, kind, dtype, *form, tensor))
        return stored

    def stored_buffers(self) -> list[StoredTensor]:
        """The buffers of rank 0."""
        stored = []
        for name, buffer in self.buffers.items():
            own = replace(buffer, pieces=[piece for piece in buffer.pieces if piece.file == 0])
            shape = tuple(buffer.shape)
            stored.append(StoredTensor([name], buffer.dtype, buffer.torch_dtype, shape, row_by_row(shape), own))
        return stored

    def text(self) -> str:
        """As it is written: a line for each of its parts, its own hash last."""
        parts = []
        for name, value in {**self.content, "hash": hash_of(_canonical(self.content))}.items():
            if isinstance(value, dict) and value:  # a line for each item: `indent` would take ten times as long
                items = ",\n ".join(f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items())
                parts.append(f"{json.dumps(name)}: {{\n {items}\n}}")
            else:
                parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
        return "{\n" + ",\n".join(parts) + "\n}\n"

    def tensors_at(self, file: int, start: int, stop: int) -> list[str]:
        """The tensors with bytes in a range of a file."""
        labels = []
        for name, role, tensor in self.tensors():
            for piece in tensor.pieces:
                end = piece.byte + (piece.stop - piece.start) * tensor.torch_dtype.itemsize
                if piece.file == file and piece.byte < stop and end > start:
                    labels.append(f"{role} of {name}")
        return labels


def _canonical(content: dict[str, Any]) -> bytes:
    """The same bytes for the same content, however its JSON is spaced or ordered."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def versions() -> dict[str, str]:
    """The versions of zerotrain, torch and Python, for a checkpoint."""
    return {"zerotrain": __version__, "torch": torch.__version__, "python": platform.python_version()}


def head() -> dict[str, Any]:
    """The first lines of a manifest, with what writes it."""
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "hash_function": HASH,
        "block_nbytes": BLOCK_NBYTES,
        "versions": versions(),
    }


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, verified by its own hash.

    Raises:
        CheckpointError: there is none, it is of an unknown format, or not what was written.
    """
    path = folder / MANIFEST
    try:
        text = untrusted.read_regular(path, max_nbytes=MAX_NBYTES).decode()
    except (FileNotFoundError, NotADirectoryError):
        what = f"has no {MANIFEST}" if folder.is_dir() else "is no folder"
        raise CheckpointError(f"{folder} is no checkpoint: it {what}") from None
    except (OSError, UnicodeDecodeError, UntrustedFileError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return parse_manifest(text, folder)


def parse_manifest(text: str, folder: Path) -> Manifest:
    """The same of the text of a checkpoint's manifest.

    Raises:
        CheckpointError: as above.
    """
    path = folder / MANIFEST
    try:
        content = untrusted.parse_json(text, Any)
    except UntrustedFileError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no manifest of a zerotrain checkpoint, or was edited")
    if content.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {shown(content.get('format_version'))}, and this zerotrain reads version "
            f"{FORMAT_VERSION}; read it with the version that wrote it ({shown(content.get('versions'))})"
        )
    if content.pop("hash", None) != hash_of(_canonical(content)):
        raise CheckpointError(f"{path} is not what was written: it was edited or damaged, its hash does not fit")
    try:
        manifest = Manifest(content)
        require_whole(manifest)
    except UntrustedFileError as error:
        raise CheckpointError(f"{path} was edited: {error}") from None
    return manifest
