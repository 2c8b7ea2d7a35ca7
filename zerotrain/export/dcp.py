"""A folder of torch.distributed.checkpoint, which users of FSDP2 load: {"model": ..., "optim": ...} as of
`torch.distributed.checkpoint.state_dict.get_state_dict`."""

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from zerotrain.checkpoint.whole import SavedTensors
from zerotrain.export.optimizer import counts_of, param_groups, roles_of, trained


class _OneByOne(DefaultSavePlanner):
    """Is given tensors without memory, and reads each when it is to be written.

    The writer keeps all tensors of a file until it closes that: 582 MiB for one of 577 (torch 2.13, 2026-11-22).
    So a tensor's memory is given back as the next one is asked for. The one before is on its way to the disk by then,
    while the writer copies nothing ahead.
    """

    def __init__(self, sources: Mapping[str, Any]) -> None:
        super().__init__()
        self._sources = sources
        self._written: torch.Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Any:
        source = self._sources.get(write_item.index.fqn)
        if write_item.type == WriteItemType.BYTE_IO or source is None:
            return super().resolve_data(write_item)
        if self._written is not None:
            self._written.untyped_storage().resize_(0)
        self._written = source()
        return self._written


def write_dcp(folder: Path, saved: SavedTensors) -> None:
    """Write weights and buffers, tied ones under each of their names, and the optimizer's state."""
    sources: dict[str, Any] = {}
    model: dict[str, Any] = {}
    known = saved.names
    for name, (dtype, shape) in known.items():
        names = saved.manifest.parameters[name]["names"] if name in saved.manifest.parameters else [name]
        for each in names:
            model[each] = torch.empty(shape, dtype=dtype, device="meta")
            sources[f"model.{each}"] = partial(saved.read, name)
    state: dict[str, Any] = {}
    for name, parameter in trained(saved):
        kept = counts_of(parameter)
        for role, dtype, kept_shape in roles_of(parameter):
            kept[role] = torch.empty(kept_shape, dtype=dtype, device="meta")
            sources[f"optim.state.{name}.{role}"] = partial(saved.of_role, name, role)
        if kept:
            state[name] = kept
    content = {"model": model, "optim": {"state": state, "param_groups": param_groups(saved)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "assuming a single process", as it is
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        try:
            dcp.save(content, storage_writer=writer, planner=_OneByOne(sources), no_dist=True)
        except CheckpointException as error:
            raise error.failures[0][0] from None  # of the one rank that there is
