"""Parameter groups: which parameters are updated with which hyperparameters, and which train at all."""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from zerotrain.engine.groups.hyperparameters import Hyperparameters, shown_groups, told
from zerotrain.engine.groups.optimizer_factory import (
    SAMPLE_SHAPE,
    OptimizerFactory,
    build_optimizer,
    needing_whole,
    sampled_nbytes,
    updates_whole,
)
from zerotrain.engine.groups.trial import Trials
from zerotrain.errors import ConfigError
from zerotrain.sharding.layout import round_up
from zerotrain.sharding.units import ManagedParameter, ModelParameter, Unit

_CPU = torch.device("cpu")


class ParamGroups:
    """The groups of a run and the parameters in them, frozen ones included.

    Names, here and in its methods, may be patterns such as "*.bias"; one that stands for nothing raises ConfigError.

    Args:
        parameters: of the model, in module order.
        factory: makes an optimizer from groups.
        given: as for `build_engine`; None: one group, "parameters", and with a name that begins with "whole " one of
            what is updated whole.
        decay_all: False: of None make two groups, "matrices" (two or more dimensions) and "others", whose weight decay
            is 0.
        device: of the master weights, on which optimizers are tried.
        warns: whether a group without parameters is to be told of.

    Raises:
        ConfigError: a group names no parameter or hyperparameter that is there, a parameter has no group or is named by
            itself in two, or the optimizer cannot work so.
    """

    hyperparameters: list[dict[str, Any]]
    """One dict for each group, "params" left out. Read at every step: changing a value changes the next update."""
    kinds: list[str]
    """For each group the class of its optimizer."""
    defaults: dict[str, Any]
    """The optimizer's own settings."""

    def __init__(
        self,
        parameters: Sequence[ModelParameter],
        factory: OptimizerFactory,
        given: Sequence[dict[str, Any]] | None,
        *,
        decay_all: bool = True,
        device: torch.device = _CPU,
        warns: bool = True,
    ) -> None:
        self.factory = factory
        self._trials = Trials(factory, device)
        self.hyperparameters, self.kinds = [], []
        self._warns = warns
        self._names = {each.parameter: each.names for each in parameters}
        self._group: dict[nn.Parameter, int] = {}
        self._generation: dict[nn.Parameter, int] = {}
        self._num_changes = 0
        self._decay_all = decay_all
        self._updates_whole = False
        self._sampled_nbytes: dict[bool, int] = {}
        if given is None:
            return  # `classified` makes the groups: which parameters are updated whole depends on the units
        if updates_whole(factory):
            raise ConfigError(
                "param_groups: the optimizer updates whole tensors and has groups of its own; leave param_groups out"
            )
        if not decay_all:
            raise ConfigError("decay_all=False: has no effect with param_groups, which set weight_decay; leave it out")
        for group in given:
            self._add(group)
        without = [parameter for parameter in self.trainable if parameter not in self._group]
        if without:
            raise ConfigError(
                f"param_groups: {self._listed(without)} in no group; name it in one, end with a group of "
                '{"params": ["*"]}, or freeze it with requires_grad_(False)'
            )

    def _add_default_groups(self, parameters: Sequence[nn.Parameter], whole: set[nn.Parameter]) -> None:
        """One group; or matrices, with weight decay, and the others; those updated whole in groups of their own."""

        def kind(parameter: nn.Parameter) -> str:
            if self._decay_all:
                return "parameters"
            return "matrices" if parameter.ndim >= 2 else "others"

        names_of = {each: ("whole " if each in whole else "") + kind(each) for each in parameters}
        names = ["parameters"] if self._decay_all else ["matrices", "others"]
        if self._updates_whole:
            names = sorted({names_of[parameter] for parameter in parameters if parameter.requires_grad})
        for name in names:
            self._append({"name": name})
            if name.endswith("others") and "weight_decay" in self.hyperparameters[-1]:
                self.hyperparameters[-1]["weight_decay"] = 0.0
        self._group = {each: names.index(name) for each, name in names_of.items() if name in names}

    def _add(self, group: dict[str, Any]) -> None:
        """Append a group; of the parameters it names it gets those that no group has."""
        named, index = _named_in(group), len(self.hyperparameters)
        settings = {"name": f"group {index}"} | {key: value for key, value in group.items() if key != "params"}
        if settings["name"] in [other["name"] for other in self.hyperparameters]:
            raise ConfigError(f"param_groups: two groups are called {settings['name']!r}; give each a name of its own")
        members = self.find(named, "param_groups")
        taken = [each for each in named if isinstance(each, nn.Parameter) and each in self._group]
        if taken:
            raise ConfigError(f"param_groups: {self._listed(taken)} in two groups; leave it in one")
        self._append(settings)
        self._group = dict.fromkeys(members, index) | self._group
        if self._warns and not any(self._group[parameter] == index for parameter in members):
            warnings.warn(f"param_groups: group {settings['name']!r} holds no parameter", stacklevel=2)

    def _append(self, settings: dict[str, Any]) -> None:
        """Append the hyperparameters of a group, those not set from the optimizer's own; tried on small tensors."""
        optimizer = build_optimizer(self.factory, [{"params": [torch.zeros(SAMPLE_SHAPE)], **settings}])
        unknown = set(settings) - set(optimizer.defaults) - {"name", "initial_lr"}
        if unknown:
            raise ConfigError(
                f"param_groups: {type(optimizer).__name__} has no {', '.join(sorted(unknown))}; it has "
                f"{', '.join(sorted(optimizer.defaults))}"
            )
        completed = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        self._trials.require_fit(completed)
        self.defaults = optimizer.defaults
        self.hyperparameters.append(Hyperparameters(completed))
        self.kinds.append(type(optimizer).__name__)

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters that train, in module order."""
        return [parameter for parameter in self._names if parameter.requires_grad]

    def find(self, named: Any, setting: str) -> list[nn.Parameter]:
        """The parameters that names or parameters stand for, in module order; an error begins with `setting`."""
        found: set[nn.Parameter] = set()
        for each in _as_list(named):
            if isinstance(each, str):
                matching = [p for p, names in self._names.items() if any(fnmatchcase(name, each) for name in names)]
            elif isinstance(each, torch.Tensor):
                matching = [parameter for parameter in self._names if parameter is each]
            else:
                raise ConfigError(
                    f"{setting}: takes names, patterns such as '*.bias' and parameters, no {type(each).__name__}"
                )
            if not matching:
                what = repr(each) if isinstance(each, str) else f"a tensor of shape {tuple(each.shape)}"
                some = ", ".join(names[0] for names in list(self._names.values())[:3])
                raise ConfigError(f"{setting}: {what} is no floating-point parameter of the model; it has {some}, ...")
            found.update(matching)
        return [parameter for parameter in self._names if parameter in found]

    def classified(
        self, units: Sequence[Unit[ModelParameter]], dtypes: Mapping[nn.Parameter, torch.dtype]
    ) -> list[Unit[ManagedParameter]]:
        """The units, with all that decides how each parameter is held, moved and updated. The default groups are made
        at the first call.

        Args:
            dtypes: what each parameter is held in.
        """
        whole = {each.parameter for each in needing_whole(self.factory, units)}
        self._updates_whole = self._updates_whole or bool(whole)
        if not self.hyperparameters:
            self._add_default_groups([each.parameter for unit in units for each in unit.parameters], whole)

        def managed(each: ModelParameter) -> ManagedParameter:
            return ManagedParameter(
                each.parameter,
                each.names,
                each.owners,
                dtype=dtypes[each.parameter],
                group=self._group.get(each.parameter, 0),
                generation=self._generation.get(each.parameter, 0),
                is_updated_whole=each.parameter in whole,
            )

        return [Unit(unit.name, unit.modules, list(map(managed, unit.parameters)), unit.is_root) for unit in units]

    def optimizer_of(self, targets: Iterable[tuple[int, torch.Tensor]]) -> torch.optim.Optimizer | None:
        """The optimizer of tensors, each with the number of its group; None for no tensors."""
        members: dict[int, list[torch.Tensor]] = {}
        for group, target in targets:
            members.setdefault(group, []).append(target)
        described = [{"params": tensors, **self.hyperparameters[group]} for group, tensors in members.items()]
        return build_optimizer(self.factory, described) if described else None

    def show_hyperparameters(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """Give one of those optimizers the hyperparameters as they are now; returns those of each of its groups."""
        by_name = {group["name"]: group for group in self.hyperparameters}
        shown = [by_name[group["name"]] for group in optimizer.param_groups]
        for group, settings in zip(optimizer.param_groups, shown, strict=True):
            group.update(settings)
        return shown

    def state_nbytes(self, numels: Sequence[int], *, is_whole: bool) -> int:
        """Bytes that the optimizer will keep of tensors of so many elements, each on a border of 256 bytes."""
        if numels and is_whole not in self._sampled_nbytes:
            self._sampled_nbytes[is_whole] = sampled_nbytes(self.factory, is_whole=is_whole)
        sample_numel = SAMPLE_SHAPE[0] * SAMPLE_SHAPE[1]
        return sum(round_up(numel * self._sampled_nbytes[is_whole] // sample_numel, 256) + 256 for numel in numels)

    # ---- changes of what trains

    @contextmanager
    def undone_if_refused(self) -> Iterator[None]:
        """Restores all changes made in here if it ends with an exception."""
        trained, num_groups = set(self.trainable), len(self.hyperparameters)
        kept: dict[str, Any] = {
            name: copy(vars(self)[name])
            for name in ("_group", "_generation", "_num_changes", "_updates_whole", "kinds", "defaults")
            if name in vars(self)
        }
        try:
            yield
        except BaseException:
            vars(self).update(kept)
            del self.hyperparameters[num_groups:]  # the list itself is the user's `engine.param_groups`
            for parameter in self._names:
                parameter.requires_grad_(parameter in trained)
            raise

    def change(self, change: Callable[[], bool]) -> tuple[bool, dict[str, object]]:
        """Make a change. Returns whether it changed anything, and of that what must be the same on all ranks."""
        before, num_groups = self.places, len(self.hyperparameters)
        is_change = change()
        changed = [name for name, place in self.places.items() if place != before[name]]
        shown = shown_groups(self.hyperparameters)
        digest = hashlib.sha256(repr([self.places, shown]).encode()).hexdigest()[:8]
        return is_change, {
            "what it changes": ", ".join(changed) or "nothing",
            "the new group": ", ".join(
                f"{name}={told(value)}" for group in self.hyperparameters[num_groups:] for name, value in group.items()
            ),
            "what trains then": f"{len(self.trainable)} of {len(self._names)} parameters, hash {digest}",
        }

    def freeze(self, named: Any) -> bool:
        """Let parameters train no more, but not all; returns whether any did. They keep their group."""
        self._require_elements("freeze")
        stopped = [parameter for parameter in self.find(named, "freeze") if parameter.requires_grad]
        if stopped and len(stopped) == len(self.trainable):
            raise ConfigError(f"freeze: {named} would leave no parameter that trains")
        for parameter in stopped:
            parameter.requires_grad_(False)
        return bool(stopped)

    def unfreeze(self, named: Any) -> bool:
        """Let frozen parameters train in the group they have, as new to the optimizer; returns whether any did not."""
        self._require_elements("unfreeze")
        started = [parameter for parameter in self.find(named, "unfreeze") if not parameter.requires_grad]
        without = [parameter for parameter in started if parameter not in self._group]
        if without:
            raise ConfigError(f"unfreeze: {self._listed(without)} in no group; use engine.add_param_group instead")
        self._num_changes += 1
        for parameter in started:
            parameter.requires_grad_(True)
            self._generation[parameter] = self._num_changes
        return bool(started)

    def add(self, group: dict[str, Any]) -> bool:
        """Append a group of frozen parameters and let them train; returns whether there are any."""
        self._require_elements("add_param_group")
        group = group | {"params": _named_in(group)}
        members = self.find(group["params"], "add_param_group")
        training = [parameter for parameter in members if parameter.requires_grad]
        if training:
            raise ConfigError(f"add_param_group: {self._listed(training)} in a group that trains; freeze it first")
        before = dict(self._group)
        for parameter in members:
            self._group.pop(parameter, None)
        try:
            self._add(group)
        except ConfigError:
            self._group = before
            raise
        return bool(members) and self.unfreeze(members)

    # ---- as another engine of the same model had it

    @property
    def places(self) -> dict[str, list[Any]]:
        """[whether it trains, number of its group or None, its generation] of each parameter, by its first name."""
        return {
            names[0]: [parameter.requires_grad, self._group.get(parameter), self._generation.get(parameter, 0)]
            for parameter, names in self._names.items()
        }

    def adopt(self, places: Mapping[str, Sequence[Any]], added: Sequence[dict[str, Any]]) -> bool:
        """Let train what trains in `places`, in the groups it says; `added` are the settings of those that are not here
        yet. Returns True: what trains is to be cut anew."""
        self._require_elements("load")
        for settings in added:
            self._append(settings)
        for parameter, names in self._names.items():
            trains, group, generation = places[names[0]]
            parameter.requires_grad_(trains)
            self._generation[parameter] = generation
            if group is not None:
                self._group[parameter] = group
        self._num_changes = max([self._num_changes, *self._generation.values()])
        return True

    def _require_elements(self, call: str) -> None:
        if self._updates_whole:
            raise ConfigError(
                f"{call}: the optimizer updates whole tensors, whose owners cannot change in mid-run; call "
                "requires_grad_(False) before build_engine instead"
            )

    def _listed(self, parameters: Sequence[nn.Parameter]) -> str:
        first = self._names[parameters[0]][0]
        return f"{first} is" if len(parameters) == 1 else f"{first} and {len(parameters) - 1} more are"


def _named_in(group: dict[str, Any]) -> list[Any]:
    if "params" not in group:
        raise ConfigError(f'param_groups: a group has no "params": {group}; give it names, patterns or parameters')
    return _as_list(group["params"])


def _as_list(named: Any) -> list[Any]:
    return [named] if isinstance(named, str | torch.Tensor) else list(named)
