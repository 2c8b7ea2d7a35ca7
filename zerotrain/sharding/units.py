"""The parameters of a model, and the units they are gathered in, in the order the forward uses them.

A unit is one repeated block of the model. What lies in no unit is the root, in two parts: the *resident* one
(embeddings, and whatever is tied across units) is needed as soon as the model is called; the *late* one (a large output
layer behind the blocks, say) not before its own modules run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Generic, TypeVar

import torch
from torch import nn

from zerotrain.errors import ConfigError
from zerotrain.sharding.layout import contiguous_stride

RESIDENT, LATE = "root", "late root"
"""What the two parts of the root are called."""
CHOSEN_CHILDREN = ("experts", "local_experts")
"""ModuleLists of which a forward may call some children on one rank and others on another. A unit is gathered from all
ranks, so these are none: their parameters go with the module around them. (Seen: two ranks that had chosen different
experts at stage 3 waited for each other until the timeout.)"""


@dataclass(frozen=True, eq=False)
class ModelParameter:
    """One floating-point parameter and every place of the model that holds it (several if tied)."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    """(module, attribute name) of each place, in the order of `names`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ManagedParameter(ModelParameter):
    """A parameter with all that decides how it is held, moved and updated."""

    dtype: torch.dtype
    """What it is held in, computed with and sent in."""
    group: int = 0
    """Number of its parameter group."""
    generation: int = 0
    """Number of the change of what trains with which it began to train; 0: with the first step."""
    is_updated_whole: bool = False
    """Whether its optimizer needs it whole, on one rank."""

    @property
    def span(self) -> tuple[int, int]:
        """Parameters of one bucket that are alike in this are updated as one: they share hyperparameters and the
        number of steps the optimizer has counted."""
        return self.group, self.generation

    @property
    def stride(self) -> tuple[int, ...]:
        """The strides it keeps in its bucket: its own, if they leave no gaps and overlap nowhere; contiguous ones where
        it travels to be updated whole."""
        if self.is_updated_whole:
            return contiguous_stride(self.parameter.shape)
        # Of the shape and strides alone: a parameter that is not gathered refuses to be read, which `empty_like` does
        # (seen: stage 3, whoever asked between two steps where the elements of a `Piece` lie).
        shape, stride = self.parameter.shape, self.parameter.stride()
        return torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride()


P = TypeVar("P", bound=ModelParameter)


@dataclass(eq=False)
class Unit(Generic[P]):
    """Modules whose parameters are gathered together. `modules` is empty for the resident part of the root."""

    name: str
    modules: list[nn.Module]
    parameters: list[P] = field(default_factory=list)
    is_root: bool = False
    """Whether it is a part of the root: no block."""


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
    if name.rpartition(".")[2] in CHOSEN_CHILDREN:
        return {}
    children = {key: child for key, child in module.named_children() if _has_parameters(child)}
    if len(children) < 2 or len({type(child) for child in children.values()}) > 1:
        return {}
    return {f"{name}.{key}" if name else key: child for key, child in children.items()}


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def model_parameters(model: nn.Module) -> list[ModelParameter]:
    """All floating-point parameters in module order, tied ones once."""
    found: dict[nn.Parameter, ModelParameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is None or not parameter.is_floating_point():
                continue
            entry = found.setdefault(parameter, ModelParameter(parameter))
            entry.names.append(f"{prefix}.{attribute}" if prefix else attribute)
            entry.owners.append((module, attribute))
    return list(found.values())


def cut_units(
    model: nn.Module, parameters: Sequence[ModelParameter], patterns: Sequence[str] | None, max_numel: int
) -> list[Unit[ModelParameter]]:
    """Sort the parameters of `model` into units, in forward order: the resident root, the blocks, the late root.

    A parameter tied across units belongs to the resident root. There is a late one only if the root is larger than one
    bucket of `max_numel` elements: two small collectives cost more than one.
    """
    blocks = find_units(model, patterns)
    home = {id(module): name for name, block in blocks.items() for module in block.modules()}
    units: dict[str, Unit[ModelParameter]] = {name: Unit(name, [block]) for name, block in blocks.items()}
    resident: Unit[ModelParameter] = Unit(RESIDENT, [], is_root=True)
    late: Unit[ModelParameter] = Unit(LATE, [], is_root=True)
    root_numel = 0
    last_block = next(reversed(blocks), None)
    behind_blocks = _names_behind(model, last_block) if last_block is not None else frozenset()
    for each in parameters:
        homes = {home.get(id(module)) for module, _ in each.owners}
        only_home = homes.pop() if len(homes) == 1 else None
        if only_home is not None:
            units[only_home].parameters.append(each)
            continue
        root_numel += each.parameter.numel()
        (late if behind_blocks.issuperset(each.names) else resident).parameters.append(each)
    if root_numel <= max_numel:
        resident.parameters += late.parameters
        late.parameters = []
    for each in late.parameters:
        late.modules += [module for module, _ in each.owners if module not in late.modules]
    return [unit for unit in (resident, *units.values(), late) if unit.parameters or unit is resident]


def _names_behind(model: nn.Module, block: str) -> frozenset[str]:
    """Names of the parameters that modules registered after `block`, and not around it, own."""
    modules = list(model.named_modules())
    inside = max(index for index, (name, _) in enumerate(modules) if f"{name}.".startswith(f"{block}."))
    return frozenset(
        f"{name}.{attribute}" for name, module in modules[inside + 1 :] for attribute in module._parameters
    )
