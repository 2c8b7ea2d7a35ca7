"""Cut a model's parameters into units and buckets, in the order the forward uses them.

A unit is one repeated block of the model. What lies in no unit is the root: its `head` is needed as soon as the
model is called, its `tail` (a large output layer behind the units, say) not before its own modules run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import nn

from zerotrain.errors import ConfigError
from zerotrain.sharding.layout import contiguous_stride

MIN_BUCKETS = 8
"""Units share a bucket only while the model would still have this many: one large bucket overlaps with nothing."""
WORTHWHILE_NUMEL = 2**18
"""Below this (1 MiB of fp32) a bucket costs more than it lets overlap."""


@dataclass(eq=False)
class ManagedParameter:
    """One floating-point parameter and every place of the model that holds it (several if tied)."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    """(module, attribute name) of each place, in the order of `names`."""
    is_updated_whole: bool = False
    """Whether its optimizer needs it whole, on one rank."""
    dtype: torch.dtype = torch.float32
    """What it is held in, computed with and sent in; set by the precision."""
    group: int = 0
    """Number of its parameter group."""
    born: int = 0
    """Number of the change of what trains with which it began to train; 0: with the first step."""

    @property
    def group_name(self) -> str:
        """The parameter group it is in where the user gives none; weight decay is for matrices."""
        kind = "matrices" if self.parameter.ndim >= 2 else "others"
        return f"whole {kind}" if self.is_updated_whole else kind

    @property
    def span(self) -> tuple[int, int]:
        """Parameters of one bucket that are alike in this are updated as one: they share hyperparameters and the
        number of steps the optimizer has counted."""
        return self.group, self.born

    @property
    def stride(self) -> tuple[int, ...]:
        """The strides it keeps in its bucket: its own, if they leave no gaps and overlap nowhere; contiguous ones where
        it travels to be updated whole."""
        if self.is_updated_whole:
            return contiguous_stride(self.parameter.shape)
        return torch.empty_like(self.parameter, device="meta").stride()


@dataclass(eq=False)
class Unit:
    """Modules whose parameters are gathered together. `modules` is empty for the head of the root."""

    name: str
    modules: list[nn.Module]
    parameters: list[ManagedParameter] = field(default_factory=list)
    is_root: bool = False
    """Whether it is the head or the tail: no block."""


@dataclass(eq=False)
class BucketSpec:
    """The parameters of one bucket, all of one dtype, and the units they belong to, in forward order."""

    units: list[Unit]
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


def find_units(model: nn.Module, patterns: Sequence[str] | None) -> dict[str, nn.Module]:
    """The repeated blocks of `model` by name, in module order, none inside another.

    Args:
        patterns: module name patterns such as "blocks.*"; None finds them: the children of every ModuleList or
            Sequential whose children with parameters are at least two and of one class.

    Raises:
        ConfigError: a pattern that matches no module with parameters.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(f"{outer}.") for outer in found):
            continue
        if patterns is None:
            found.update(_like_children(name, module))
        elif name and any(fnmatchcase(name, pattern) for pattern in patterns) and _has_parameters(module):
            found[name] = module
    holding = [name for name, module in model.named_modules() if name and _has_parameters(module)]
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in holding):
            known = ", ".join(name for name, _ in model.named_children())
            raise ConfigError(
                f"zero.units: no module with parameters matches {pattern!r}; the model's children are: {known}"
            )
    return found


def _like_children(name: str, module: nn.Module) -> dict[str, nn.Module]:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return {}
    children = {key: child for key, child in module.named_children() if _has_parameters(child)}
    if len(children) < 2 or len({type(child) for child in children.values()}) > 1:
        return {}
    return {f"{name}.{key}" if name else key: child for key, child in children.items()}


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def managed_parameters(model: nn.Module) -> list[ManagedParameter]:
    """All floating-point parameters in module order, tied ones once."""
    managed: dict[nn.Parameter, ManagedParameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is None or not parameter.is_floating_point():
                continue
            entry = managed.setdefault(parameter, ManagedParameter(parameter))
            entry.names.append(f"{prefix}.{attribute}" if prefix else attribute)
            entry.owners.append((module, attribute))
    return list(managed.values())


def cut_units(model: nn.Module, patterns: Sequence[str] | None, max_numel: int) -> list[Unit]:
    """Sort the parameters of `model` into units, in forward order: head, the repeated blocks, tail.

    A parameter tied across units belongs to the head. The root has a tail only if it is larger than one bucket of
    `max_numel` elements: two small collectives cost more than one.
    """
    blocks = find_units(model, patterns)
    home = {id(module): name for name, block in blocks.items() for module in block.modules()}
    units = {name: Unit(name, [block]) for name, block in blocks.items()}
    head, tail = Unit("head", [], is_root=True), Unit("tail", [], is_root=True)
    root_numel = 0
    last_block = next(reversed(blocks), None)
    behind_blocks = _names_behind(model, last_block) if last_block is not None else frozenset()
    for managed in managed_parameters(model):
        homes = {home.get(id(module)) for module, _ in managed.owners}
        only_home = homes.pop() if len(homes) == 1 else None
        if only_home is not None:
            units[only_home].parameters.append(managed)
            continue
        root_numel += managed.parameter.numel()
        (tail if behind_blocks.issuperset(managed.names) else head).parameters.append(managed)
    if root_numel <= max_numel:
        head.parameters += tail.parameters
        tail.parameters = []
    for managed in tail.parameters:
        tail.modules += [module for module, _ in managed.owners if module not in tail.modules]
    return [unit for unit in (head, *units.values(), tail) if unit.parameters or unit is head]


def _names_behind(model: nn.Module, block: str) -> frozenset[str]:
    """Names of the parameters that modules registered after `block`, and not around it, own."""
    modules = list(model.named_modules())
    inside = max(index for index, (name, _) in enumerate(modules) if f"{name}.".startswith(f"{block}."))
    return frozenset(
        f"{name}.{attribute}" for name, module in modules[inside + 1 :] for attribute in module._parameters
    )


def cut_buckets(units: Sequence[Unit], max_numel: int) -> list[BucketSpec]:
    """Cut units into buckets of at most `max_numel` elements, in forward order.

    Small neighbouring units share a bucket of at most an eighth of the model; the head shares with none, since it is
    needed all the time. A larger unit is split at parameter borders; a larger parameter is a bucket of its own. The
    last unit, which is gathered last and reduced first, is cut into buckets of half that size: until its first one
    is full a link has nothing to do. Trainable and frozen parameters never share, nor do those of two dtypes. Within a
    bucket come first what is updated whole, then what is alike in `span`, so that each group of the optimizer is one
    range.
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
        runs: list[list[Unit]] = []
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
    # By first unit: its gradient is the last of a bucket, and a bucket is reduced only after those behind it.
    specs.sort(key=lambda spec: (not spec.trainable, units.index(spec.units[0])))
    return specs


def _select(unit: Unit, trainable: bool, dtype: torch.dtype) -> Iterator[ManagedParameter]:
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
