"""Cut units into buckets: the parameters that travel together, in the order the forward uses them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from zerotrain.sharding.units import ManagedParameter, Unit

MIN_BUCKETS = 8
"""Units share a bucket only while the model would still have this many: one large bucket overlaps with nothing."""
WORTHWHILE_NUMEL = 2**18
"""Below this (1 MiB of fp32) a bucket costs more than it lets overlap."""


@dataclass(eq=False)
class BucketSpec:
    """The parameters of one bucket, all of one dtype, and the units they belong to, in forward order."""

    units: list[Unit[ManagedParameter]]
    parameters: list[ManagedParameter]
    trainable: bool

    @property
    def dtype(self) -> torch.dtype:
        """What its parameters are held in."""
        return self.parameters[0].dtype

    @property
    def num_whole(self) -> int:
        """How many of its parameters are updated whole. They come first."""
        return sum(managed.is_updated_whole for managed in self.parameters)

    @cached_property
    def name(self) -> str:
        """Its unit, or the first and last of several; its first and last parameter where it is a part of a unit.
        No two buckets of a model have the same."""
        parts = {unit.name: list(_select(unit, self.trainable, self.dtype)) for unit in self.units}
        names = [name for name, members in parts.items() if members]
        if sum(map(len, parts.values())) > len(self.parameters):
            names = [managed.names[0] for managed in self.parameters]
        name = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
        if len({managed.dtype for unit in self.units for managed in unit.parameters}) > 1:
            name += f" ({str(self.dtype).removeprefix('torch.')})"
        return name if self.trainable else f"{name} (frozen)"


def cut_buckets(units: Sequence[Unit[ManagedParameter]], max_numel: int) -> list[BucketSpec]:
    """Cut units into buckets of at most `max_numel` elements, in forward order.

    Small neighbouring units share a bucket of at most an eighth of the model; the resident root shares with none, since
    it is needed all the time. A larger unit is split at parameter borders; a larger parameter is a bucket of its own.
    The last unit, which is gathered last and reduced first, is cut into buckets of half that size: a link has nothing
    to send from the last gather of the forward until the first bucket of the backward is full. Trainable and frozen
    parameters never share, nor do those of two dtypes. Within a bucket come first what is updated whole, then what is
    alike in `span`, so that each group of the optimizer is one range.
    """
    specs: list[BucketSpec] = []
    kinds = dict.fromkeys((each.parameter.requires_grad, each.dtype) for unit in units for each in unit.parameters)
    for trainable, dtype in kinds:
        members = {unit: list(_select(unit, trainable, dtype)) for unit in units}
        numels = {unit: sum(managed.parameter.numel() for managed in members[unit]) for unit in units}
        total = sum(numels.values())
        shared_numel = min(max_numel, max(2 * WORTHWHILE_NUMEL, total // MIN_BUCKETS))
        last_numel = min(max_numel, max(WORTHWHILE_NUMEL, total // (2 * MIN_BUCKETS)))
        last = next((unit for unit in reversed(units) if numels[unit]), units[-1])
        runs: list[list[Unit[ManagedParameter]]] = []
        run_numel = 0
        for unit in units:
            limit = last_numel if unit is last else shared_numel
            if runs and runs[-1][0].modules and run_numel + numels[unit] <= limit:
                runs[-1].append(unit)
                run_numel += numels[unit]
            else:
                runs.append([unit])
                run_numel = numels[unit]
        for run in runs:
            part_numel = last_numel if last in run and last.modules else max_numel
            for part in _split([managed for unit in run for managed in members[unit]], part_numel):
                part.sort(key=lambda managed: (not managed.is_updated_whole, managed.span))
                specs.append(BucketSpec([unit for unit in run if members[unit]], part, trainable))
    # By the first unit of each: the backward reaches that one last, and only then the bucket's gradient is complete.
    # Buckets are reduced in the reverse of this list, so none has to wait for one that is complete later.
    specs.sort(key=lambda spec: (not spec.trainable, units.index(spec.units[0])))
    return specs


def _select(unit: Unit[ManagedParameter], trainable: bool, dtype: torch.dtype) -> Iterator[ManagedParameter]:
    return (
        managed
        for managed in unit.parameters
        if managed.parameter.requires_grad is trainable and managed.dtype == dtype
    )


def _split(members: Sequence[ManagedParameter], max_numel: int) -> Iterator[list[ManagedParameter]]:
    part: list[ManagedParameter] = []
    numel = 0
    for managed in members:
        size = managed.parameter.numel()
        if part and numel + size > max_numel:
            yield part
            part, numel = [], 0
        part.append(managed)
        numel += size
    if part:
        yield part
