"""The manifest: what a checkpoint holds, where each element lies, and the hash of every block of every file."""

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from zerotrain.checkpoint.blocks import BLOCK_NBYTES, HASH, hash_of
from zerotrain.checkpoint.manifest_schema import AVERAGE as AVERAGE
from zerotrain.checkpoint.manifest_schema import DTYPES, PLACES, require_whole
from zerotrain.checkpoint.manifest_schema import WEIGHT as WEIGHT
from zerotrain.errors import CheckpointError
from zerotrain.files.untrusted import UntrustedFileError, parse_json, read_regular, shown

MANIFEST = "manifest.json"
MAX_NBYTES = 2**30
"""Largest manifest that is read: it has hashes of 40 TB."""
BUFFER = "buffer"
"""A role, as `WEIGHT` is; what an optimizer keeps has the optimizer's own names, such as exp_avg."""
EXTRA_STATE = "extra_state"
"""In the manifest what modules keep beside their tensors, and the role of what of it is a tensor."""
FORMAT, FORMAT_VERSION = "zerotrain checkpoint", 1


@dataclass(frozen=True)
class Piece:
    """Neighbouring elements of one tensor, and where they lie."""

    file: int
    """Index in the manifest's files."""
    byte: int
    """From the start of the file."""
    start: int
    stop: int
    """Elements of the tensor, in the order of its memory."""


class Manifest:
    """The content of `manifest.json`.

    Args:
        content: as docs/reference/checkpoint_format.md has it, without its hash.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self.files: list[dict[str, Any]] = content["files"]
        self.parameters: dict[str, dict[str, Any]] = content["parameters"]
        self.buffers: dict[str, dict[str, Any]] = content["buffers"]

    @property
    def step(self) -> int:
        return int(self.content["step"])

    @property
    def num_average_updates(self) -> int:
        """Updates of the average of weights that it holds; 0: it holds none."""
        return int((self.content.get("average") or {"num_updates": 0})["num_updates"])

    @property
    def num_ranks(self) -> int:
        return int(self.content["ranks"])

    def tensors(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(name, role, {dtype, pieces, ...}) of everything that is saved as a tensor."""
        for name, parameter in self.parameters.items():
            for role, tensor in parameter["tensors"].items():
                yield name, role, tensor
        for name, buffer in self.buffers.items():
            yield name, BUFFER, buffer
        for name, state in self.content.get(EXTRA_STATE, {}).items():
            if "pieces" in state:
                yield name, EXTRA_STATE, state

    def weight_role(self, name: str, *, averaged: bool) -> str:
        """The role of a parameter's weight; or of its average, if that is asked for and there is one."""
        return AVERAGE if averaged and AVERAGE in self.parameters[name]["tensors"] else WEIGHT

    def require_average(self, folder: Path) -> None:
        """Make sure that there is an average of weights.

        Raises:
            CheckpointError: there is none.
        """
        if self.num_average_updates == 0:
            raise CheckpointError(
                f"{folder} holds no average of weights, which a run keeps with callbacks=ema; take its trained weights"
            )

    def text(self) -> str:
        """As it is written: a line for each of its parts, its own hash last."""
        hashed = {**self.content, "hash": hash_of(_canonical(self.content))}
        return "{\n" + ",\n".join(f"{json.dumps(name)}: {_lines(value)}" for name, value in hashed.items()) + "\n}\n"

    def tensors_at(self, file: int, start: int, stop: int) -> list[str]:
        """The tensors of which bytes lie in a range of a file."""
        return [label for first, end, label in self._places[file] if first < stop and end > start]

    @cached_property
    def _places(self) -> list[list[tuple[int, int, str]]]:
        places: list[list[tuple[int, int, str]]] = [[] for _ in self.files]
        for name, role, tensor in self.tensors():
            for piece in pieces_of(tensor):
                end = piece.byte + (piece.stop - piece.start) * dtype_of(tensor).itemsize
                places[piece.file].append((piece.byte, end, f"{role} of {name}"))
        return places


def _lines(value: Any) -> str:
    """JSON with a line for each item of a dict: `indent` would take ten times as long."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return "{\n " + ",\n ".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in value.items()) + "\n}"


def _canonical(content: dict[str, Any]) -> bytes:
    """The same bytes for the same content, however its JSON is spaced or ordered."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def dtype_of(tensor: Mapping[str, Any]) -> torch.dtype:
    """The dtype of a tensor in the manifest."""
    return DTYPES[tensor["dtype"]]


def pieces_of(tensor: Mapping[str, Any]) -> list[Piece]:
    """The pieces of a tensor in the manifest."""
    return [Piece(*(piece[name] for name in PLACES)) for piece in tensor["pieces"]]


def of_rank_0(buffer: Mapping[str, Any]) -> dict[str, Any]:
    """A buffer in the manifest, with the pieces of rank 0 alone: each rank saves one of its own."""
    return {**buffer, "pieces": [piece for piece in buffer["pieces"] if piece["file"] == 0]}


def versions() -> dict[str, str]:
    """The versions of what writes a checkpoint."""
    try:
        ours = version("zerotrain")
    except PackageNotFoundError:  # run from a clone
        ours = "not installed"
    return {"zerotrain": ours, "torch": torch.__version__, "python": platform.python_version()}


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
        text = read_regular(path, max_nbytes=MAX_NBYTES).decode()
    except (FileNotFoundError, NotADirectoryError):
        what = f"has no {MANIFEST}" if folder.is_dir() else "is no folder"
        raise CheckpointError(f"{folder} is no checkpoint: it {what}") from None
    except (OSError, UnicodeDecodeError, UntrustedFileError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return parse_manifest(text, path)


def parse_manifest(text: str, path: Path) -> Manifest:
    """The same of the text of a manifest; `path` is what errors name.

    Raises:
        CheckpointError: as above.
    """
    try:
        content = parse_json(text, Any)
    except UntrustedFileError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no manifest of a zerotrain checkpoint, or was edited")
    if content.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {shown(content.get('format_version'))}, and this zerotrain reads version "
            f"{FORMAT_VERSION}; read it with the version that wrote it ({shown(content.get('versions'))})"
        )
    told = content.pop("hash", None)
    if told != hash_of(_canonical(content)):
        raise CheckpointError(f"{path} is not what was written: it was edited or damaged, its hash does not fit")
    try:
        require_whole(content)
    except UntrustedFileError as error:
        raise CheckpointError(f"{path} was edited: {error}") from None
    return Manifest(content)
