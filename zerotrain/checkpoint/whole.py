"""Whole tensors out of a checkpoint, one in memory at a time; whatever is read was verified."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from mmap import mmap
from pathlib import Path
from typing import Any

import torch

from zerotrain.checkpoint.kept import held
from zerotrain.checkpoint.manifest import Manifest, dtype_of, of_rank_0, read_manifest
from zerotrain.checkpoint.reading import Reader


@dataclass(frozen=True)
class CheckpointTensors:
    """An open checkpoint. Its methods raise CheckpointError, with file and tensor, where it is not what was written."""

    path: Path
    manifest: Manifest
    reader: Reader
    averaged: bool = False
    """Whether weights are their averages, where there are any."""

    @cached_property
    def names(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each parameter, under its first name if tied, and of each buffer."""
        found = {}
        for name, parameter in self.manifest.parameters.items():
            weight = parameter["tensors"].get(self.manifest.weight_role(name, averaged=self.averaged))
            found[name] = torch.float32 if weight is None else dtype_of(weight), tuple(parameter["shape"])
        return found | {name: (dtype_of(each), tuple(each["shape"])) for name, each in self.manifest.buffers.items()}

    def read(self, name: str, room: mmap | None = None) -> torch.Tensor:
        """A parameter, or rank 0's buffer: contiguous, in the model's shape, in the dtype it was saved in.

        Args:
            room: memory for it, which the next one may use again; None: its own.
        """
        if name in self.manifest.buffers:
            buffer = self.manifest.buffers[name]
            return self._flat(of_rank_0(buffer), prod(buffer["shape"]), room).view(buffer["shape"])
        return self.of_role(name, self.manifest.weight_role(name, averaged=self.averaged), room)

    def of_role(self, name: str, role: str, room: mmap | None = None) -> torch.Tensor:
        """A parameter's tensor in a role, such as exp_avg: contiguous, in the parameter's shape; if the optimizer
        updates the tensor whole, in the shape of that state."""
        parameter = self.manifest.parameters[name]
        tensor = parameter["tensors"].get(role)
        if tensor is None:  # of a parameter without elements nothing was written
            return torch.empty(parameter["shape"])
        if "shape" in tensor:
            return self._flat(tensor, prod(tensor["shape"]), room).view(tensor["shape"])
        flat = self._flat(tensor, prod(parameter["shape"]), room)
        return flat.as_strided(parameter["shape"], parameter["stride"]).contiguous()

    def _flat(self, tensor: Mapping[str, Any], numel: int, room: mmap | None) -> torch.Tensor:
        dtype = dtype_of(tensor)
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        if room is None:
            # Not from malloc, which may keep what is freed for what is no larger: tensors of mixed sizes grew by 90 MB.
            room = mmap(-1, numel * dtype.itemsize)
        flat = torch.frombuffer(room, dtype=dtype, count=numel)
        self.reader.read(tensor, 0, flat)
        return flat


@contextmanager
def opened(path: Path, *, averaged: bool = False) -> Iterator[CheckpointTensors]:
    """Opens the newest checkpoint that a user's path names. It is not removed while it is open, see `held`.

    Args:
        averaged: see `CheckpointTensors`.

    Raises:
        CheckpointError: there is none, its manifest is not what was written, or it has no average.
    """
    with held(path) as folder:
        manifest = read_manifest(folder)
        if averaged:
            manifest.require_average(folder)
        with Reader(folder, manifest) as reader:
            yield CheckpointTensors(folder, manifest, reader, averaged)
