"""A folder of torch.distributed.checkpoint, which users of FSDP2 load: {"model": ..., "optim": ...} as of
`torch.distributed.checkpoint.state_dict.get_state_dict`. Its imports take a second."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from zerotrain.checkpoint.verification import CheckpointTensors
from zerotrain.commands.export_formats import counts_of, param_groups, roles_of, trained


class _OneByOne(DefaultSavePlanner):
    """Is given tensors without memory, and reads each when it is to be written.

    The writer keeps all tensors of a file until it closes that: 582 MiB for one of 577 (torch 2.13, 2026-11-22). So
    all have the same memory, one after the other: while the writer copies nothing ahead, the one before is on its way
    to the disk when the next is asked for. Given back instead, the memory of one was not used for the next, since
    something small had come to lie in it: 2.4 GB for a file of 4.3.

    Args:
        sources: what reads a tensor, into memory that it is given.
        nbytes: of the largest.
    """

    def __init__(self, sources: Mapping[str, Callable[[mmap], torch.Tensor]], nbytes: int) -> None:
        super().__init__()
        self._sources = sources
        self._room = mmap(-1, max(nbytes, 1))

    def resolve_data(self, write_item: WriteItem) -> Any:
        source = self._sources.get(write_item.index.fqn)
        if write_item.type == WriteItemType.BYTE_IO or source is None:
            return super().resolve_data(write_item)
        return source(self._room)


def write_dcp(folder: Path, saved: CheckpointTensors) -> None:
    """Write weights and buffers, tied ones under each of their names, and the optimizer's state."""
    sources: dict[str, Any] = {}
    model: dict[str, Any] = {}
    layouts, largest = saved.names, 0
    for name, (dtype, shape) in layouts.items():
        names = saved.manifest.parameters[name].names if name in saved.manifest.parameters else [name]
        for alias in names:
            model[alias] = torch.empty(shape, dtype=dtype, device="meta")
            sources[f"model.{alias}"] = partial(saved.read, name)
            largest = max(largest, model[alias].nbytes)
    state: dict[str, Any] = {}
    for name, parameter in trained(saved):
        tensors = counts_of(parameter)
        for role, dtype, kept_shape in roles_of(parameter):
            tensors[role] = torch.empty(kept_shape, dtype=dtype, device="meta")
            sources[f"optim.state.{name}.{role}"] = partial(saved.of_role, name, role)
            largest = max(largest, tensors[role].nbytes)
        if tensors:
            state[name] = tensors
    content = {"model": model, "optim": {"state": state, "param_groups": param_groups(saved)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "assuming a single process", as it is
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        try:
            dcp.save(content, storage_writer=writer, planner=_OneByOne(sources, largest), no_dist=True)
        except CheckpointException as error:
            raise error.failures[0][0] from None  # of the one rank that there is
