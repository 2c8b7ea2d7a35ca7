"""Cut units into buckets: groups of parameters on one journey, in the order of the forward."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from zerotrain.sharding.layout import BucketLayout
from zerotrain.sharding.units import ManagedParameter, Unit

MIN_BUCKETS = 8
"""Units share a bucket only while the model would still have this many: one large bucket overlaps with nothing."""
WORTHWHILE_NUMEL = 2**18
"""Below this (1 MiB of fp32) a bucket costs more than it lets overlap."""

Members = dict[Unit[ManagedParameter], list[ManagedParameter]]
"""The parameters of one kind in each unit with any, in forward order."""


@dataclass(eq=False)
class BucketSpec:
    """The parameters of one bucket, all of one dtype, and the units they belong to, in forward order."""

    name: str
    """Its unit, or the first and last of several; its first and last parameter where it is a part of a unit. No two
    buckets of a model have the same."""
    units: list[Unit[ManagedParameter]]
    parameters: list[ManagedParameter]
    """Parameters that are updated whole come first; of the others those with one `span` are neighbours."""
    trainable: bool
    tensors: list[torch.nn.Parameter] = field(init=False)
    """The parameters themselves, in the same order."""
    runs: list[tuple[int, tuple[int, int] | None]] = field(init=False)
    """Neighbours that are updated as one: (the first one's index, their `span`), or None of those updated whole."""

    def __post_init__(self) -> None:
        self.tensors = [managed.parameter for managed in self.parameters]
        spans = [None if managed.is_updated_whole else managed.span for managed in self.parameters]
        self.runs = [(i, span) for i, span in enumerate(spans) if i == 0 or span != spans[i - 1]]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its parameters."""
        return self.parameters[0].dtype

    @property
    def num_whole(self) -> int:
        """How many of its parameters are updated whole. They come first."""
        return sum(managed.is_updated_whole for managed in self.parameters)

    def layout(self, num_shards: int, shard_size: int | None = None) -> BucketLayout:
        """The place of each parameter."""
        shapes = [managed.parameter.shape for managed in self.parameters]
        strides = [managed.stride for managed in self.parameters]
        return BucketLayout.pack(shapes, num_shards, strides, shard_size=shard_size)

    def described(self) -> list[str]:
        """Texts, one for each parameter. They differ if anything about the bucket does."""
        return [
            f"{' = '.join(managed.names)} {tuple(managed.parameter.shape)}, stride {managed.stride}, "
            f"updated {'whole' if managed.is_updated_whole else f'by {managed.span}'}"
            for managed in self.parameters
        ]


def cut_buckets(units: Sequence[Unit[ManagedParameter]], max_numel: int) -> list[BucketSpec]:
    """Cut units into buckets of at most `max_numel` elements, in forward order.

    Small neighbouring units share a bucket of at most an eighth of the model; the resident root shares with none, since
    it is needed all the time. A larger unit is split at parameter borders; a larger parameter is a bucket of its own,
    and a small rest, such as the weights of two norms, goes with its neighbour.
    The last unit, which is gathered last and reduced first, is cut into buckets of half that size: a link has nothing
    to send from the last gather of the forward until the first bucket of the backward is full. Trainable and frozen
    parameters never share, nor do those of two dtypes. Within a bucket come first what is updated whole, then what is
    alike in `span`, so that each group of the optimizer is one range.
    """
    kinds: dict[tuple[bool, torch.dtype], Members] = {}
    dtypes: dict[Unit[ManagedParameter], set[torch.dtype]] = {unit: set() for unit in units}
    for unit in units:
        for managed in unit.parameters:
            members = kinds.setdefault((managed.parameter.requires_grad, managed.dtype), {})
            members.setdefault(unit, []).append(managed)
            dtypes[unit].add(managed.dtype)
    specs = []
    for (trainable, dtype), members in kinds.items():
        for run, part in _parts(members, max_numel):
            is_split = len(part) < sum(len(members[unit]) for unit in run)
            names = [managed.names[0] for managed in part] if is_split else [unit.name for unit in run]
            name = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
            if len(set().union(*(dtypes[unit] for unit in run))) > 1:
                name += f" ({str(dtype).removeprefix('torch.')})"
            specs.append(BucketSpec(name if trainable else f"{name} (frozen)", run, part, trainable))
    # By the first unit of each: the backward reaches that one last, and only then the bucket's gradient is complete.
    # Buckets are reduced in the reverse of this list, so none has to wait for one that is complete later.
    specs.sort(key=lambda spec: (not spec.trainable, units.index(spec.units[0])))
    return specs


def _parts(members: Members, max_numel: int) -> Iterator[tuple[list[Unit[ManagedParameter]], list[ManagedParameter]]]:
    """The parameters of each bucket, and the units they belong to."""
    numels = {unit: sum(managed.parameter.numel() for managed in held) for unit, held in members.items()}
    total, last_unit = sum(numels.values()), next(reversed(members))
    shared_numel = min(max_numel, max(2 * WORTHWHILE_NUMEL, total // MIN_BUCKETS))
    last_numel = min(max_numel, max(WORTHWHILE_NUMEL, total // (2 * MIN_BUCKETS)))
    runs: list[list[Unit[ManagedParameter]]] = []
    run_numel = 0
    for unit, numel in numels.items():
        limit = last_numel if unit is last_unit else shared_numel
        if runs and runs[-1][0].modules and run_numel + numel <= limit:
            runs[-1].append(unit)
            run_numel += numel
        else:
            runs.append([unit])
            run_numel = numel
    for run in runs:
        part_numel = last_numel if last_unit in run and last_unit.modules else max_numel
        for part in _split([managed for unit in run for managed in members[unit]], part_numel):
            part.sort(key=lambda managed: (not managed.is_updated_whole, managed.span))
            yield run, part


def _split(members: Sequence[ManagedParameter], max_numel: int) -> list[list[ManagedParameter]]:
    rest_numel = min(WORTHWHILE_NUMEL, max_numel // 16)
    parts: list[list[ManagedParameter]] = []
    numels: list[int] = []
    for part, numel in _filled(members, max_numel):
        if parts and min(numel, numels[-1]) < rest_numel:
            parts[-1] += part
            numels[-1] += numel
        else:
            parts.append(part)
            numels.append(numel)
    return parts


def _filled(members: Sequence[ManagedParameter], max_numel: int) -> Iterator[tuple[list[ManagedParameter], int]]:
    """(parameters, their elements) of each part, as many as fit."""
    part: list[ManagedParameter] = []
    numel = 0
    for managed in members:
        size = managed.parameter.numel()
        if part and numel + size > max_numel:
            yield part, numel
            part, numel = [], 0
        part.append(managed)
        numel += size
    if part:
        yield part, numel
