"""The parameters of a model, and the units they are gathered in, in the order the forward uses them.

A unit is one repeated block of the model. Parameters in no unit are the root, in two parts: the *resident* one
(embeddings, and whatever is tied across units) is needed as soon as the model is called; the *late* one (a large output
layer behind the blocks, say) not before its own modules run.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Generic, TypeVar

import torch

from zerotrain.errors import ConfigError
from zerotrain.sharding.layout import contiguous_stride

RESIDENT, LATE = "root", "late root"
"""Names of the two parts of the root."""
CHOSEN_CHILDREN = ("experts", "local_experts")
"""ModuleLists of which a forward may call some children on one rank and others on another. A unit is gathered from all
ranks, so these are none, and nothing in them: their parameters go with the module around them. (Seen: two ranks
that had chosen different experts at stage 3 waited for each other until the timeout.)"""


@dataclass(frozen=True, eq=False)
class ModelParameter:
    """One parameter and every place of the model that holds it (several if tied)."""

    parameter: torch.nn.Parameter
    names: list[str] = field(default_factory=list)
    owners: list[tuple[torch.nn.Module, str]] = field(default_factory=list)
    """(module, attribute name) of each place, in the order of `names`."""


@dataclass(frozen=True, eq=False)
class WalkedModel:
    """A model's modules, parameters and buffers, as one walk has found them. See `walk`."""

    model: torch.nn.Module
    places: Sequence[tuple[str, torch.nn.Module]]
    """(name, module) in module order: a module that has several names comes as often."""
    modules: Mapping[str, torch.nn.Module]
    """Each once, by its first name, in module order."""
    parameters: Sequence[ModelParameter]
    """All of them, in module order, tied ones once."""
    managed: Sequence[ModelParameter]
    """The floating-point ones: buckets hold them."""
    unmanaged: Mapping[str, torch.Tensor]
    """Tensors in no bucket, by their first name: buffers, and parameters that are no floating-point numbers."""
    buffers: Mapping[str, torch.Tensor]
    """Each once, by its first name."""

    @cached_property
    def inside(self) -> Mapping[str, Sequence[tuple[str, ModelParameter]]]:
        """The parameters in each module that has any, itself and all below it, by its name: (name, parameter)."""
        inside: dict[str, list[tuple[str, ModelParameter]]] = {}
        for parameter in self.parameters:
            for name in parameter.names:
                inside.setdefault("", []).append((name, parameter))
                parts = name.split(".")[:-1]
                for length in range(1, len(parts) + 1):
                    inside.setdefault(".".join(parts[:length]), []).append((name, parameter))
        return inside


def walk(model: torch.nn.Module) -> WalkedModel:
    """Find all modules, parameters and buffers of a model, with all their names."""
    places = list(model.named_modules(remove_duplicate=False))
    modules: dict[torch.nn.Module, str] = {}
    parameters: dict[torch.Tensor, ModelParameter] = {}
    buffers: dict[torch.Tensor, str] = {}
    for prefix, module in places:
        modules.setdefault(module, prefix)
        begin = f"{prefix}." if prefix else ""
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                entry = parameters.setdefault(parameter, ModelParameter(parameter))
                entry.names.append(begin + attribute)
                entry.owners.append((module, attribute))
        for attribute, buffer in module._buffers.items():
            if buffer is not None:
                buffers.setdefault(buffer, begin + attribute)
    entries = list(parameters.values())
    managed = [entry for entry in entries if entry.parameter.is_floating_point()]
    named_buffers = {name: buffer for buffer, name in buffers.items()}
    other_tensors = {entry.names[0]: entry.parameter for entry in entries if not entry.parameter.is_floating_point()}
    by_name = {name: module for module, name in modules.items()}
    return WalkedModel(model, places, by_name, entries, managed, {**named_buffers, **other_tensors}, named_buffers)


@dataclass(frozen=True, eq=False, kw_only=True)
class ManagedParameter(ModelParameter):
    """A parameter with all facts about its holding, moving and updating."""

    dtype: torch.dtype
    """Dtype in which it is held, computed with and sent."""
    group: int = 0
    """Number of its parameter group."""
    generation: int = 0
    """Number of the change of what trains with which it began to train; 0: with the first step."""
    is_updated_whole: bool = False
    """Whether its optimizer needs it whole, on one rank."""

    @cached_property
    def span(self) -> tuple[int, int]:
        """Parameters of one bucket that are alike in this are updated as one: they share hyperparameters and the
        number of steps the optimizer has counted."""
        return self.group, self.generation

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """The strides it keeps in its bucket: its own, if they leave no gaps and overlap nowhere; contiguous ones where
        it travels to be updated whole."""
        contiguous = contiguous_stride(self.parameter.shape)
        # If it is: on the meta device `empty_like` imports torch's symbolic shapes, 0.4 s of CPU and 40 MB of a rank.
        if self.is_updated_whole or self.parameter.stride() == contiguous:
            return contiguous
        # From the shape and strides alone: `empty_like` reads its argument, and a parameter refuses that while it is
        # not gathered (seen at stage 3, between two steps, when somebody asked where the elements of a `Piece` lie).
        shape, stride = self.parameter.shape, self.parameter.stride()
        return torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride()


P = TypeVar("P", bound=ModelParameter)


@dataclass(eq=False)
class Unit(Generic[P]):
    """Modules whose parameters are gathered together. `modules` is empty for the resident part of the root."""

    name: str
    modules: list[torch.nn.Module]
    parameters: list[P] = field(default_factory=list)
    is_root: bool = False
    """Whether it is a part of the root: no block."""


def find_units(walked: WalkedModel, patterns: Sequence[str] | None) -> dict[str, torch.nn.Module]:
    """The repeated blocks of a model by name, in module order, none inside another.

    Args:
        patterns: module name patterns such as "blocks.*"; None finds them: the children with parameters of every
            ModuleList, or ModuleDict with numbers for keys, in which a class comes twice, and of every Sequential where
            all are of one class. One of two lists has the name it has in the first.

    Raises:
        ConfigError: a pattern that matches no module with parameters.
    """
    blocks: dict[str, torch.nn.Module] = {}
    for name, module in walked.modules.items():
        if any(f"{name}.".startswith(f"{outer}.") for outer in blocks):
            continue
        if patterns is None:
            like = _like_children(name, module, walked)
            blocks.update({key: child for key, child in like.items() if child not in blocks.values()})
        elif name and any(fnmatchcase(name, pattern) for pattern in patterns) and name in walked.inside:
            blocks[name] = module
    holding = [name for name in walked.modules if name and name in walked.inside]
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in holding):
            children = ", ".join(name for name, _ in walked.model.named_children())
            raise ConfigError(
                f"zero.units: no module with parameters matches {pattern!r}; the model's children are: {children}"
            )
    return blocks


def _like_children(name: str, module: torch.nn.Module, walked: WalkedModel) -> dict[str, torch.nn.Module]:
    is_numbered = isinstance(module, torch.nn.ModuleDict) and all(map(str.isdigit, module))  # as torchtitan has layers
    if not (is_numbered or isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)):
        return {}
    if any(part in CHOSEN_CHILDREN for part in name.split(".")):
        return {}
    children = {f"{name}.{key}" if name else key: child for key, child in module.named_children()}
    children = {child_name: child for child_name, child in children.items() if child_name in walked.inside}
    num_classes = len({type(child) for child in children.values()})
    # Blocks of two kinds may come in turn, such as attention and state space. A Sequential is mostly one block.
    is_mixed = num_classes > 1 and isinstance(module, torch.nn.Sequential)
    return {} if is_mixed or num_classes == len(children) else children


def matching(parameters: Sequence[ModelParameter], pattern: str) -> list[ModelParameter]:
    """The parameters with a name of a pattern such as "*.bias"."""
    return [parameter for parameter in parameters if any(fnmatchcase(name, pattern) for name in parameter.names)]


def no_match(parameters: Sequence[ModelParameter], pattern: str) -> str:
    """The sentence on a pattern that matches no parameter: with one that does and is near, or with some names."""
    names = [name for parameter in parameters for name in parameter.names]
    parts = {part for name in names for part in name.split(".")}

    def nearest(part: str) -> str:
        return next(iter(difflib.get_close_matches(part, parts, n=1)), part)

    mended = ".".join(part if part in parts or set(part) & set("*?[") else nearest(part) for part in pattern.split("."))
    guesses = (mended, f"*.{pattern}", pattern.removeprefix("*."))  # a model may lie in another, or no more in it
    near = next((guess for guess in guesses if matching(parameters, guess)), None)
    some = f"it has {', '.join(names[:3])}, ..."
    return f"{pattern!r} is no floating-point parameter of the model; {f'did you mean {near}?' if near else some}"


def model_parameters(model: torch.nn.Module) -> list[ModelParameter]:
    """All floating-point parameters in module order, tied ones once."""
    return list(walk(model).managed)


def cut_units(walked: WalkedModel, patterns: Sequence[str] | None, max_numel: int) -> list[Unit[ModelParameter]]:
    """Sort a model's floating-point parameters into units, in forward order: the resident root, the blocks, the late
    root.

    A parameter tied across units belongs to the resident root. There is a late one only if the root is larger than one
    bucket of `max_numel` elements: two small collectives cost more than one.
    """
    blocks = find_units(walked, patterns)
    home = {id(module): name for name, block in blocks.items() for module in block.modules()}
    units: dict[str, Unit[ModelParameter]] = {name: Unit(name, [block]) for name, block in blocks.items()}
    resident: Unit[ModelParameter] = Unit(RESIDENT, [], is_root=True)
    late: Unit[ModelParameter] = Unit(LATE, [], is_root=True)
    root_numel = 0
    behind_blocks: set[str] = set()  # names of the parameters of modules registered behind all blocks
    modules = list(walked.modules.items())
    last = max((index for index, (_, module) in enumerate(modules) if id(module) in home), default=len(modules))
    for name, module in modules[last + 1 :]:
        behind_blocks |= {f"{name}.{attribute}" for attribute in module._parameters}
    for parameter in walked.managed:
        homes = {home.get(id(module)) for module, _ in parameter.owners}
        only_home = homes.pop() if len(homes) == 1 else None
        if only_home is not None:
            units[only_home].parameters.append(parameter)
            continue
        root_numel += parameter.parameter.numel()
        (late if behind_blocks.issuperset(parameter.names) else resident).parameters.append(parameter)
    if root_numel <= max_numel:
        resident.parameters += late.parameters
        late.parameters = []
    for parameter in late.parameters:
        late.modules += [module for module, _ in parameter.owners if module not in late.modules]
    return [unit for unit in (resident, *units.values(), late) if unit.parameters or unit is resident]
