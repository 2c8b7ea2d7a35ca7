"""Whether the files of a checkpoint are what was written."""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from math import prod
from mmap import mmap
from pathlib import Path

import torch

from zerotrain.checkpoint.folder import hold_newest
from zerotrain.checkpoint.manifest import BLOCK_NBYTES, Manifest, SavedTensor, hash_of, read_manifest
from zerotrain.checkpoint.tensor_file import Reader, Weights
from zerotrain.errors import CheckpointError
from zerotrain.files.match import StoredTensor, row_by_row

MAX_PROBLEMS_SHOWN = 10


def verify(path: str | os.PathLike[str]) -> Manifest:
    """Read a checkpoint whole and compare every block with its hash. One process, no other rank.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: it is not what was written; a line for each file or block, which names file and tensors.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    if problems := problems_in(folder, manifest):
        raise CheckpointError("\n".join(problems))
    return manifest


def problems_in(
    folder: Path, manifest: Manifest, part: int = 0, num_parts: int = 1, tensors: Collection[SavedTensor] | None = None
) -> list[str]:
    """The problems of the files, at most `MAX_PROBLEMS_SHOWN` lines.

    Args:
        part, num_parts: of all blocks look only at this share.
        tensors: look only at blocks with elements of these; None: at all.
    """
    problems: list[str] = []
    blocks = {(file, index) for file, entry in enumerate(manifest.files) for index in range(len(entry.hashes))}
    if tensors is not None:
        blocks = set()
        for tensor in tensors:
            for piece in tensor.pieces:
                end = piece.byte + (piece.stop - piece.start) * tensor.torch_dtype.itemsize
                blocks |= {(piece.file, index) for index in range(piece.byte // BLOCK_NBYTES, -(-end // BLOCK_NBYTES))}
    share = sorted(blocks)[len(blocks) * part // num_parts : len(blocks) * (part + 1) // num_parts]
    broken: set[int] = set()
    with Reader(folder, manifest) as reader:
        for file in range(len(manifest.files)):
            try:
                reader.opened(file)
            except CheckpointError as error:
                problems.append(str(error))
                broken.add(file)
        for file, index in share:
            if file in broken:
                continue
            try:
                reader.block(file, index)
            except CheckpointError as error:
                problems.append(str(error))
                if len(problems) >= MAX_PROBLEMS_SHOWN:
                    break
    return problems


# Two checkpoints side by side, however each was cut: the differences of their tensors.


CHUNK_NUMEL = 2**20


def differences(one: tuple[Path, Manifest], other: tuple[Path, Manifest]) -> Iterator[str]:
    """A line for each tensor that is not the same in both, such as "exp_avg of blocks.0.weight: 3 of 9 elements, by up
    to 0.1", in the order of the model. Some MiB are held at a time.

    Raises:
        CheckpointError: a file is not what was written.
    """
    saved = {(name, role): tensor for name, role, tensor in one[1].tensors()}
    other_saved = {(name, role): tensor for name, role, tensor in other[1].tensors()}
    with Reader(*one) as reader, Reader(*other) as other_reader:
        for name, role in {**saved, **other_saved}:
            label = f"{role} of {name}"
            tensor, other_tensor = saved.get((name, role)), other_saved.get((name, role))
            if tensor is None or other_tensor is None:
                yield f"{label}: only in {(other if tensor is None else one)[0]}"
                continue
            kind, other_kind = (f"{item.dtype}, {_numel(item)} elements" for item in (tensor, other_tensor))
            if kind != other_kind:
                yield f"{label}: {kind} against {other_kind}"
            elif changes := _value_changes(tensor, reader, other_tensor, other_reader):
                yield f"{label}: {changes}"


def _value_changes(tensor: SavedTensor, reader: Reader, other: SavedTensor, other_reader: Reader) -> str | None:
    numel, num_different, largest = _numel(tensor), 0, 0.0
    for start in range(0, numel, CHUNK_NUMEL):
        ours = torch.empty(min(CHUNK_NUMEL, numel - start), dtype=tensor.torch_dtype)
        theirs = torch.empty_like(ours)
        reader.read(tensor, start, ours)
        other_reader.read(other, start, theirs)
        changed = (_bits(ours) != _bits(theirs)).any(dim=1)
        if changed.any():
            num_different += int(changed.sum())
            wide = torch.complex128 if ours.is_complex() else torch.float64
            gap = float((ours[changed].to(wide) - theirs[changed].to(wide)).abs().max())
            largest = max(largest, gap) if gap == gap else gap
    return f"{num_different} of {numel} elements, by up to {largest:.3g}" if num_different else None


def _numel(tensor: SavedTensor) -> int:
    return max((piece.stop for piece in tensor.pieces), default=0)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """(numel, itemsize) bytes, in which a nan is equal to itself."""
    return values.view(torch.uint8).view(-1, values.itemsize)


# The tensors of a checkpoint: ranges of weights, or whole tensors, one in memory at a time; all of them verified.


class CheckpointTensors(Weights):
    """An open checkpoint of zerotrain. Its weights are master weights, and the buffers of rank 0.

    Args:
        averaged: whether weights are their averages, where there are any.

    Raises:
        CheckpointError: its manifest is not what was written, or it has no average.
    """

    def __init__(self, path: Path, *, averaged: bool = False) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        if averaged and self.manifest.num_average_updates == 0:
            raise CheckpointError(
                f"{path} holds no average of weights, which a run keeps with callbacks=ema; take its trained weights"
            )
        self.fingerprint = hash_of(self.manifest.text().encode())
        self.tensors = [*self.manifest.stored_weights(averaged=averaged), *self.manifest.stored_buffers()]
        self._by_name = {tensor.names[0]: tensor for tensor in self.tensors}
        self.names = {name: (tensor.dtype or torch.float32, tensor.shape) for name, tensor in self._by_name.items()}
        """Dtype and shape of each parameter, under its first name if tied, and of each buffer."""
        self._opened = ExitStack()
        self._reader = self._opened.enter_context(Reader(path, self.manifest))

    def problems(self, tensors: Sequence[StoredTensor], part: int, num_parts: int) -> list[str]:
        places = [tensor.place for tensor in tensors if tensor.place is not None]
        return problems_in(self.path, self.manifest, part, num_parts, places)

    def fill(self, tensor: StoredTensor, start: int, target: torch.Tensor) -> None:
        if target.numel() > 0:
            self._reader.read(tensor.place, start, target)

    def read(self, name: str, room: mmap | None = None) -> torch.Tensor:
        """A parameter, or rank 0's buffer: contiguous, in the model's shape, in the dtype it was saved in.

        Args:
            room: memory for it, which the next one may use again; None: its own.
        """
        tensor = self._by_name[name]
        return self._dense(tensor.place, tensor.shape, tensor.stride, room)

    def of_role(self, name: str, role: str, room: mmap | None = None) -> torch.Tensor:
        """A parameter's tensor in a role, such as exp_avg: contiguous, in the parameter's shape; if the optimizer
        updates the tensor whole, in the shape of that state."""
        parameter = self.manifest.parameters[name]
        tensor = parameter.tensors.get(role)
        if tensor is not None and tensor.shape is not None:
            return self._dense(tensor, tensor.shape, row_by_row(tensor.shape), room)
        return self._dense(tensor, parameter.shape, parameter.stride, room)

    def _dense(
        self, tensor: SavedTensor | None, shape: Sequence[int], stride: Sequence[int], room: mmap | None
    ) -> torch.Tensor:
        dtype, numel = torch.float32 if tensor is None else tensor.torch_dtype, prod(shape)
        if tensor is None or numel == 0:  # of a parameter without elements nothing was written
            return torch.empty(tuple(shape), dtype=dtype)
        if room is None:
            # Not from malloc, which may keep freed memory for tensors of at most its size: mixed sizes grew by 90 MB.
            room = mmap(-1, numel * dtype.itemsize)
        flat = torch.frombuffer(room, dtype=dtype, count=numel)
        self._reader.read(tensor, 0, flat)
        return flat.as_strided(shape, stride).contiguous()


@contextmanager
def open_checkpoint(path: Path, *, averaged: bool = False) -> Iterator[CheckpointTensors]:
    """Opens the newest checkpoint of a user's path. It is not removed while it is open, see `hold_newest`.

    Args:
        averaged: see `CheckpointTensors`.

    Raises:
        CheckpointError: there is none, its manifest is not what was written, or it has no average.
    """
    with hold_newest(path) as folder, closing(CheckpointTensors(folder, averaged=averaged)) as tensors:
        yield tensors
