"""Weights to start from, wherever they lie: a safetensors file, a folder of Hugging Face, the weights of a checkpoint.

`find_weights` opens them; names, dtypes and shapes are known from headers alone, and `read` gives elements by number.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from zerotrain.checkpoint.blocks import hash_of
from zerotrain.checkpoint.kept import candidates, entries
from zerotrain.checkpoint.manifest import MANIFEST, dtype_of, read_manifest
from zerotrain.checkpoint.reading import Reader
from zerotrain.checkpoint.safetensors_file import DTYPES, SafetensorsFile
from zerotrain.checkpoint.verify import problems_in
from zerotrain.errors import CheckpointError

WHOLE, INDEX, INDEX_END = "model.safetensors", "model.safetensors.index.json", ".safetensors.index.json"
WEIGHT, BUFFER = "weight", "buffer"
_PICKLED, _PICKLED_INDEX = (".bin", ".pt", ".pth", ".ckpt"), ".bin.index.json"
MAX_NAMES_SHOWN = 3
ALLOWED = (
    f"give a safetensors file, a folder with {WHOLE} or {INDEX}, a checkpoint of zerotrain (a folder with {MANIFEST}), "
    "or the folder of a run"
)


@dataclass(frozen=True, eq=False)
class GivenTensor:
    """One tensor that can be read."""

    names: Sequence[str]
    """Several of a tied one; any is enough."""
    kind: str
    """Its dtype, as the format calls it."""
    dtype: torch.dtype | None
    """None for one that torch has not, and for a tensor without elements of which nothing was written."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Tells the order in which its elements lie there."""
    place: Any
    """Whose it is."""


class Weights(ABC):
    """Where weights lie, open until `close`.

    Its methods raise CheckpointError, naming the file.
    """

    path: Path
    tensors: list[GivenTensor]
    fingerprint: str
    """Two ranks that see the same see the same checkpoint, or files of the same names, dtypes and shapes."""
    _opened: ExitStack

    @abstractmethod
    def problems(self, part: int, num_parts: int) -> list[str]:
        """What is wrong with the files, as far as it can be known; of all bytes look only at this share."""

    @abstractmethod
    def read(self, tensor: GivenTensor, start: int, target: torch.Tensor) -> None:
        """Elements from `start` on, in the order of `tensor.stride`, into all of `target`, (n,)."""

    def close(self) -> None:
        self._opened.close()


def resolved(path: str | os.PathLike[str]) -> Path:
    """What of a named path is read, absolute: itself, or of a run's folder its newest checkpoint.

    Raises:
        CheckpointError: there are no weights that can be read.
    """
    named = Path(os.path.abspath(path))
    if any(os.path.isfile(named / name) for name in (WHOLE, INDEX)):
        return named
    if os.path.lexists(named) and not os.path.isdir(named):
        if named.name.endswith(_PICKLED_INDEX):
            raise _pickled(named)
        return named
    try:
        return candidates(named, allowed=ALLOWED)[0]
    except CheckpointError:
        if pickled := [each for each in entries(named) if each.name.endswith((*_PICKLED, _PICKLED_INDEX))]:
            raise _pickled(pickled[0]) from None
        raise


def find_weights(path: str | os.PathLike[str]) -> Weights:
    """Open what `path` names; headers alone are read.

    Raises:
        CheckpointError: there are no weights that can be read, or a file is cut off, damaged or missing.
    """
    source = resolved(path)
    if os.path.isfile(source / MANIFEST):
        return CheckpointWeights(source)
    if not os.path.isdir(source) and not source.name.endswith(INDEX_END):
        return SafetensorsWeights(source, {source: None})
    index = source if not os.path.isdir(source) else source / INDEX
    if os.path.isfile(index):
        return SafetensorsWeights(source, _files_of(index))
    return SafetensorsWeights(source, {source / WHOLE: None})


def _pickled(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is pickled, and loading a pickle may run any code: {ALLOWED}")


def _files_of(index: Path) -> dict[Path, list[str] | None]:
    """The names that lie in each file that an index tells of."""
    files: dict[Path, list[str] | None] = {}
    try:
        places = json.loads(index.read_bytes())["weight_map"]
        for name, file in places.items():
            if os.path.basename(file) != file:
                raise ValueError
            names = files.setdefault(index.parent / file, [])
            assert names is not None
            names.append(name)
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"{index} is no index of safetensors files, or damaged") from None
    if absent := [file.name for file in files if not os.path.isfile(file)]:
        more = f" and {len(absent) - MAX_NAMES_SHOWN} more" if len(absent) > MAX_NAMES_SHOWN else ""
        named = ", ".join(absent[:MAX_NAMES_SHOWN]) + more
        raise CheckpointError(f"{index.parent} lacks {named} of the {len(files)} files that {index.name} tells of")
    return files


class SafetensorsWeights(Weights):
    """Of one file or several.

    Args:
        files: the names that are read of each; None: all.
    """

    def __init__(self, path: Path, files: dict[Path, list[str] | None]) -> None:
        self.path, self.tensors = path, []
        with ExitStack() as opened:
            fingerprints = []
            for file, names in files.items():
                each = SafetensorsFile(file)
                opened.callback(each.close)
                fingerprints.append(each.fingerprint)
                for name in each.tensors if names is None else names:
                    if name not in each.tensors:
                        raise CheckpointError(f"{file} has no {name}, which its index tells of")
                    stored = each.tensors[name]
                    stride = torch.empty(stored.shape, device="meta").stride()
                    dtype = DTYPES.get(stored.code)
                    self.tensors.append(GivenTensor([name], stored.code, dtype, stored.shape, stride, each))
            self._opened = opened.pop_all()
        self.fingerprint = hash_of("".join(fingerprints).encode())

    def problems(self, part: int, num_parts: int) -> list[str]:
        return []  # all that the format lets one know is known since they were opened

    def read(self, tensor: GivenTensor, start: int, target: torch.Tensor) -> None:
        tensor.place.read(tensor.names[0], start, target)


class CheckpointWeights(Weights):
    """Of a checkpoint of ours: master weights, and the buffers of rank 0."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest = read_manifest(path)
        self._opened = ExitStack()
        self._reader = self._opened.enter_context(Reader(path, self._manifest))
        self.fingerprint = hash_of(self._manifest.text().encode())
        self.tensors = []
        for parameter in self._manifest.parameters.values():
            tensor = parameter["tensors"].get(WEIGHT)
            self._add(parameter["names"], tensor, parameter["shape"], parameter["stride"])
        for name, buffer in self._manifest.buffers.items():
            of_rank_0 = {**buffer, "pieces": [piece for piece in buffer["pieces"] if piece["file"] == 0]}
            self._add([name], of_rank_0, buffer["shape"], torch.empty(buffer["shape"], device="meta").stride())

    def _add(self, names: list[str], tensor: Any, shape: Sequence[int], stride: Sequence[int]) -> None:
        assert tensor is not None or prod(shape) == 0
        dtype = None if tensor is None else dtype_of(tensor)
        kind = "" if tensor is None else tensor["dtype"]
        self.tensors.append(GivenTensor(names, kind, dtype, tuple(shape), tuple(stride), tensor))

    def problems(self, part: int, num_parts: int) -> list[str]:
        return problems_in(self.path, self._manifest, part, num_parts, roles=(WEIGHT, BUFFER))

    def read(self, tensor: GivenTensor, start: int, target: torch.Tensor) -> None:
        if target.numel() > 0:
            self._reader.read(tensor.place, start, target)
