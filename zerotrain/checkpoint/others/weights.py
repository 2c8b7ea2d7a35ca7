"""Weights to start from, wherever they lie: a file of safetensors or of torch.save, a folder of Hugging Face or of
torch's DCP, the weights of a checkpoint.

`find_weights` opens them; names, dtypes and shapes are known from headers alone, and `read` gives elements by number.
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from msgspec import Struct

from zerotrain.checkpoint import folder
from zerotrain.checkpoint.manifest import MANIFEST, hash_of
from zerotrain.checkpoint.others.safetensors_and_torch import is_of_torch, safetensors_in, torch_tensors_in
from zerotrain.checkpoint.tensor_file import METADATA, OpenFile, Weights
from zerotrain.checkpoint.verification import CheckpointTensors
from zerotrain.errors import CheckpointError, listed
from zerotrain.files.match import StoredTensor
from zerotrain.files.untrusted import FileName, UntrustedFileError, read_json, shown

INDEX_END = ".index.json"
IN_FOLDERS = tuple(name + end for name in ("model.safetensors", "pytorch_model.bin") for end in ("", INDEX_END))
"""Files read in a folder of Hugging Face: the first of these that exists."""
OTHERS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""Ends of names of possible files with weights."""


class _Index(Struct):
    weight_map: dict[str, FileName]


MAX_INDEX_NBYTES = 100_000_000
ALLOWED = (
    f"give a file of safetensors or torch.save, a folder with {IN_FOLDERS[0]} or {IN_FOLDERS[2]} (or an index of "
    f"several), a folder of torch.distributed.checkpoint (it has {METADATA}), a checkpoint of zerotrain (it has "
    f"{MANIFEST}), or the folder of a run"
)


def resolve_weights(path: str | os.PathLike[str]) -> Path:
    """The absolute path of the weights at a user's path: itself, or the newest checkpoint of a run's folder.

    Raises:
        CheckpointError: there are no weights that can be read.
    """
    source = Path(os.path.abspath(path))
    if source.name == METADATA:
        return source.parent
    if any(os.path.isfile(source / name) for name in (*IN_FOLDERS, METADATA)):
        return source
    if os.path.lexists(source) and not os.path.isdir(source):
        return source
    try:
        return folder.candidates(source, allowed=ALLOWED)[0]
    except CheckpointError:
        if files := [entry for entry in folder.entries(source) if entry.suffix in OTHERS]:
            raise CheckpointError(
                f"{source} has no {IN_FOLDERS[0]}: name the file itself, such as {files[0]}"
            ) from None
        raise


def find_weights(path: str | os.PathLike[str], *, averaged: bool = False) -> Weights:
    """Open what `path` names; headers alone are read.

    Args:
        averaged: the averages of the weights, which only a checkpoint may have.

    Raises:
        CheckpointError: there are no weights that can be read, or a file is cut off, damaged or missing.
    """
    source = resolve_weights(path)
    if os.path.isfile(source / MANIFEST):
        return CheckpointTensors(source, averaged=averaged)
    if averaged:
        raise CheckpointError(f"{source} is no checkpoint of zerotrain, and only those hold an average of weights")
    if os.path.isfile(source / METADATA):
        from zerotrain.checkpoint.others.dcp import DcpWeights  # few runs need it

        return DcpWeights(source)
    file = next((source / name for name in IN_FOLDERS if os.path.isfile(source / name)), source)
    return FileWeights(source, _names_by_file(file) if file.name.endswith(INDEX_END) else {file: None})


def _names_by_file(index: Path) -> dict[Path, list[str]]:
    """The names of tensors in each file of an index."""
    files: dict[Path, list[str]] = {}
    try:
        content = read_json(index, _Index, max_nbytes=MAX_INDEX_NBYTES)
        for name, file in content.weight_map.items():
            files.setdefault(index.parent / file, []).append(name)
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error.strerror}") from error
    except UntrustedFileError as error:
        raise CheckpointError(f"{index} is no index of files with weights, or damaged: {error}") from None
    if absent := [file.name for file in files if not os.path.isfile(file)]:
        names = listed([shown(name) for name in absent])
        raise CheckpointError(f"{index.parent} lacks {names} of the {len(files)} files that {index.name} lists")
    return files


class FileWeights(Weights):
    """Weights in one or several files of safetensors or torch.save.

    Args:
        files: the names to read from each; None: all.
    """

    def __init__(self, path: Path, files: Mapping[Path, list[str] | None]) -> None:
        self.path, self.tensors = path, []
        with ExitStack() as opened:
            for file_path, names in files.items():
                file = OpenFile(file_path)
                opened.callback(file.close)
                tensors = torch_tensors_in(file) if is_of_torch(file) else safetensors_in(file)
                by_name = {tensor.names[0]: tensor for tensor in tensors}
                if absent := [name for name in names or () if name not in by_name]:
                    raise CheckpointError(f"{file_path} has no {shown(absent[0])}, which its index lists")
                self.tensors += tensors if names is None else [by_name[name] for name in names]
            self._opened = opened.pop_all()
        headers = [(tensor.part, tensor.names, tensor.kind, tensor.shape, tensor.stride) for tensor in self.tensors]
        self.fingerprint = hash_of(repr(headers).encode())

    def fill(self, tensor: StoredTensor, start: int, target: torch.Tensor) -> None:
        file, byte = tensor.place
        assert tensor.dtype is not None
        file.read(byte + start * tensor.dtype.itemsize, tensor.dtype, target)
