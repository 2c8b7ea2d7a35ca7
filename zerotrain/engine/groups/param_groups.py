"""Parameter groups: the hyperparameters of each parameter's update, and whether it trains at all."""

import hashlib
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch

from zerotrain.device.kinds import device_of
from zerotrain.engine.groups import optimizers
from zerotrain.engine.groups.hyperparameters import Hyperparameters, as_plain, shown_groups
from zerotrain.engine.groups.probe import probe
from zerotrain.errors import CheckpointError, ConfigError, EngineStateError, argument, naming_entry, noting, raise_noted
from zerotrain.sharding.units import ManagedParameter, ModelParameter, Unit, matching, no_match

OF_THE_REST = ("matrices", "others")
"""The names of the groups of what no other has, where weight decay is for matrices alone."""
_CHANGING = ("_group", "_home", "_settings", "_generation", "_classified", "_whole", "_groups")


class ParamGroups:
    """The groups of a run and the parameters in them, frozen ones included.

    Names, here and in its methods, may be patterns such as "*.bias"; one that stands for nothing raises ConfigError.

    Args:
        parameters: of the model, in module order.
        units: of the model: an optimizer may choose by them what it updates whole.
        factory: makes an optimizer from groups.
        param_groups: as for `build_engine`; None: one group, "parameters". Parameters that are updated whole have
            groups of their own, whose names begin with "whole ".
        decay_all: False: weight decay is for parameters of two or more dimensions, unless a group sets it: a group NAME
            has those of fewer in "NAME others", whose weight decay is 0, and what no group names is in "matrices" and
            "others".
        state_dtype: of the optimizer's state between updates, where that has a number for each element.
        device: of the master weights, on which optimizers are probed; None: they are not.
        warns: whether a group without parameters is to be told of.

    Raises:
        ConfigError: a group names no parameter or hyperparameter that is there, or gives one a value that it cannot
            have; a parameter has no group or is named by itself in two; or the optimizer cannot work so.
    """

    hyperparameters: list[dict[str, Any]]
    """One dict for each group, "params" left out. Read at every step: changing a value changes the next update."""
    defaults: dict[str, Any]
    """The optimizer's own settings."""
    rates: dict[str, torch.Tensor] | None = None
    """0-dim fp32 on the device by the group's name, where steps may be graphs; None: rates are numbers."""
    is_recorded = False
    """Whether a graph of the update is being recorded."""

    def __init__(
        self,
        parameters: Sequence[ModelParameter],
        units: Sequence[Unit[ModelParameter]],
        factory: optimizers.OptimizerFactory,
        param_groups: Sequence[dict[str, Any]] | None,
        *,
        decay_all: bool = True,
        state_dtype: torch.dtype = torch.float32,
        device: torch.device | None,
        warns: bool = True,
    ) -> None:
        self.factory = factory
        self._device = device if device is not None and device_of(device).holds_values else None
        self._probed: dict[str, frozenset[str]] = {}
        """The results of `probe`, by hyperparameters as text."""
        self._groups: dict[str, Hyperparameters] = {}
        """Those of `hyperparameters`, the user's list, by name."""
        self.state_dtype = state_dtype
        self._sampled: dict[bool, list[tuple[torch.dtype, int]]] = {}
        """The (dtype, bytes) of each tensor that the optimizer has made for a sample."""
        self._all_whole = optimizers.updates_whole(factory) and not hasattr(factory, "needs_whole")
        self.hyperparameters = []
        self._units, self._decay_all, self._warns = units, decay_all, warns
        self._parameters = parameters
        self._names = {managed.parameter: managed.names for managed in parameters}
        self._group: dict[torch.nn.Parameter, int] = {}
        self._home: dict[torch.nn.Parameter, str] = {}
        """The name of the group of each, without "whole "."""
        self._settings: dict[str, dict[str, Any]] = {}
        """The options given for those groups, by the same names."""
        self._generation: dict[torch.nn.Parameter, int] = {}
        self._num_changes = 0
        self._classified: set[torch.nn.Parameter] = set()
        """The parameters that have been trained: only those are known to be updated whole or not."""
        self._whole: set[torch.nn.Parameter] = set()
        self._decays = not decay_all and "weight_decay" in self._sample(self._default_name("parameters")).defaults
        """Whether weight decay is for matrices alone."""
        self._classify(self.trainable)
        if param_groups is not None:
            errors: list[ConfigError] = []
            for group in param_groups if isinstance(param_groups, Iterable) else [param_groups]:
                with noting(errors):
                    self._add(group, num_failed=len(errors))
            raise_noted(errors)
        num_given = len(self.hyperparameters)
        rest = [parameter for parameter in self._names if parameter not in self._home]
        if param_groups is None or not decay_all:
            self._add_default_groups(rest)
            # First, since of the first group's learning rate is told as of the run's.
            groups = list(self._groups.items())
            self._groups = dict(groups[num_given:] + groups[:num_given])
            self.hyperparameters = list(self._groups.values())
            self._take_places(self._home)
        elif without := [parameter for parameter in rest if parameter.requires_grad]:
            raise ConfigError(
                f"{argument('param_groups')}: {self._listed(without)} in no group; name it in one, end with a group "
                'of {"params": ["*"]}, or freeze it with requires_grad_(False)'
            )

    def _classify(self, started: Sequence[torch.nn.Parameter]) -> None:
        """Ask the optimizer for those of these parameters, now training, to be updated whole."""
        if new := {parameter for parameter in started if parameter not in self._classified}:
            self._whole |= new & {managed.parameter for managed in optimizers.needing_whole(self.factory, self._units)}
            self._classified |= new

    def _add_default_groups(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """One group; or matrices, with weight decay, and the others."""
        kinds = ["parameters"] if self._decay_all else list(OF_THE_REST)
        for parameter in parameters:
            self._home[parameter] = kinds[0 if parameter.ndim >= 2 else -1]
        self._settings |= {kind: {} for kind in kinds} | ({"others": {"weight_decay": 0.0}} if self._decays else {})
        if self._whole or len(self._home) > len(parameters):
            kinds = sorted({self._full_name(parameter) for parameter in parameters if parameter.requires_grad})
        else:
            kinds = [self._default_name(kind) for kind in kinds]
        for name in kinds:
            self._append(name)
        self._take_places(parameters)

    def _add(self, group: dict[str, Any], num_failed: int = 0) -> None:
        """Append a group, in its parts; of the parameters it names it gets those that no group has."""
        params, settings = _params_of(group), {key: value for key, value in group.items() if key != "params"}
        name = settings.pop("name", f"group {len(self.hyperparameters) + num_failed}")
        with naming_entry("param_groups", name):
            setting = argument("param_groups")
            if {name, f"{name} others"} & self._settings.keys():
                raise ConfigError(f"{setting}: two groups are called {name!r}; give each a name of its own")
            if name.startswith(optimizers.WHOLE) or (not self._decay_all and name in OF_THE_REST):
                raise ConfigError(f"{setting}: a group is called {name!r}, a name of the engine's; give it another")
            members = self.find(params, setting)
            if duplicates := [
                param for param in params if isinstance(param, torch.nn.Parameter) and param in self._home
            ]:
                raise ConfigError(f"{setting}: {self._listed(duplicates)} in two groups; leave it in one")
            members = [parameter for parameter in members if parameter not in self._home]
            self._settings[name] = settings
            self._home |= dict.fromkeys(members, name)
            if self._decays and "weight_decay" not in settings:
                vectors = [parameter for parameter in members if parameter.ndim < 2]
                if len(vectors) == len(members):
                    self._settings[name] = settings | {"weight_decay": 0.0}
                elif vectors:
                    self._settings[f"{name} others"] = settings | {"weight_decay": 0.0}
                    self._home |= dict.fromkeys(vectors, f"{name} others")
            bare = self._default_name(name)
            self._require_known(set(map(self._full_name, members)) or {bare}, settings)
            trainable = (parameter for parameter in members if parameter.requires_grad)
            for part in dict.fromkeys(map(self._full_name, trainable)) or [bare]:
                self._append(part)
            self._take_places(members)
            if self._warns and not members:
                warnings.warn(f"{setting}: group {name!r} holds no parameter", stacklevel=2)

    def _append(self, name: str, saved: Mapping[str, Any] | None = None) -> None:
        """Append a group: its hyperparameters are those given for it or saved, and the optimizer's own.

        Raises:
            ConfigError: the optimizer cannot have a value, or cannot work here.
        """
        sample = self._sample(name)
        keys = sample.defaults.keys() | {"initial_lr"}
        options = {
            key: value for key, value in self._settings[name.removeprefix(optimizers.WHOLE)].items() if key in keys
        }
        optimizers.require_values(sample, options)
        optimizer = self._sample(name, options if saved is None else saved)
        settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        at_first = sample.param_groups[0].keys() | keys  # without numbers that steps have added before a save
        own = self._own_numbers({key: value for key, value in settings.items() if key in at_first})
        self.defaults = optimizer.defaults
        counting = None
        if own:
            counting = self._sample(name, settings, torch.ones(optimizers.SAMPLE_SHAPE, device=self._device))
        group = Hyperparameters(settings, own, type(optimizer).__name__, counting)
        self.hyperparameters.append(group)
        self._groups[name] = group

    def probe_on(self, device: torch.device) -> None:
        """Probe the optimizer of each group on a device. Raises as `probe`."""
        self._device = device
        for settings in self.hyperparameters:
            self._own_numbers(settings)

    def _own_numbers(self, settings: dict[str, Any]) -> frozenset[str]:
        """The names of the numbers that steps change in a group of these settings, once it is known to work here."""
        if self._device is None:
            return frozenset()
        tried = {key: as_plain(value) for key, value in settings.items() if key not in ("name", "lr", "initial_lr")}
        key = repr((settings["name"].startswith(optimizers.WHOLE), tried))
        if key not in self._probed:
            self._probed[key] = probe(self.factory, settings, self._device)
        return self._probed[key]

    def _sample(
        self, name: str, settings: Mapping[str, Any] | None = None, tensor: torch.Tensor | None = None
    ) -> torch.optim.Optimizer:
        """An optimizer of one small tensor, as a group of this name has it."""
        tensor = torch.zeros(optimizers.SAMPLE_SHAPE) if tensor is None else tensor
        return optimizers.build_optimizer(self.factory, [{"params": [tensor], "name": name, **(settings or {})}])

    def _require_known(self, names: Collection[str], settings: Mapping[str, Any]) -> None:
        """ConfigError for settings that no optimizer of these groups has."""
        samples = [self._sample(name) for name in sorted(names)]
        setting_names = {key for sample in samples for key in sample.defaults}
        if unknown := settings.keys() - setting_names - {"initial_lr"}:
            kinds = " and ".join(dict.fromkeys(type(sample).__name__ for sample in samples))
            raise ConfigError(
                f"{argument('param_groups')}: {kinds} has no {', '.join(sorted(unknown))}; it has "
                f"{', '.join(sorted(setting_names))}"
            )

    def _default_name(self, name: str) -> str:
        """The name of a group of parameters the optimizer has not chosen to update whole."""
        return f"{optimizers.WHOLE}{name}" if self._all_whole else name

    def _full_name(self, parameter: torch.nn.Parameter) -> str:
        name = self._home[parameter]
        return f"{optimizers.WHOLE}{name}" if parameter in self._whole else self._default_name(name)

    def _take_places(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Note the numbers of the groups of parameters, as far as there are such groups."""
        numbers = {group["name"]: number for number, group in enumerate(self.hyperparameters)}
        for parameter in parameters:
            if (number := numbers.get(self._full_name(parameter))) is not None:
                self._group[parameter] = number

    @property
    def kinds(self) -> list[str]:
        """For each group the class of its optimizer."""
        return [group.kind for group in self._groups.values()]

    @property
    def trainable(self) -> list[torch.nn.Parameter]:
        """The parameters that train, in module order."""
        return [parameter for parameter in self._names if parameter.requires_grad]

    def find(self, params: Any, setting: str) -> list[torch.nn.Parameter]:
        """The parameters behind names or parameters, in module order; an error begins with `setting`."""
        chosen: set[torch.nn.Parameter] = set()
        for param in _as_list(params):
            if isinstance(param, str):
                members = [managed.parameter for managed in matching(self._parameters, param)]
            elif isinstance(param, torch.Tensor):
                members = [parameter for parameter in self._names if parameter is param]
            else:
                raise ConfigError(
                    f"{setting}: takes names, patterns such as '*.bias' and parameters, no {type(param).__name__}"
                )
            if not members and isinstance(param, str):
                raise ConfigError(f"{setting}: {no_match(self._parameters, param)}")
            if not members:
                raise ConfigError(f"{setting}: a tensor of shape {tuple(param.shape)} is no parameter of the model")
            chosen.update(members)
        return [parameter for parameter in self._names if parameter in chosen]

    def classified(self, dtypes: Mapping[torch.nn.Parameter, torch.dtype]) -> list[Unit[ManagedParameter]]:
        """The units, with all that decides how each parameter is held, moved and updated.

        Args:
            dtypes: what each parameter is held in.
        """

        def managed(member: ModelParameter) -> ManagedParameter:
            return ManagedParameter(
                member.parameter,
                member.names,
                member.owners,
                dtype=dtypes[member.parameter],
                group=self._group.get(member.parameter, 0),
                generation=self._generation.get(member.parameter, 0),
                is_updated_whole=member.parameter in self._whole and member.parameter.requires_grad,
            )

        return [
            Unit(unit.name, unit.modules, list(map(managed, unit.parameters)), unit.is_root) for unit in self._units
        ]

    def optimizer_of(self, targets: Iterable[tuple[int, torch.Tensor]]) -> torch.optim.Optimizer | None:
        """The optimizer of tensors, each with the number of its group; None for no tensors."""
        members: dict[int, list[torch.Tensor]] = {}
        for group, target in targets:
            members.setdefault(group, []).append(target)
        described = [{"params": tensors, **self.hyperparameters[group]} for group, tensors in members.items()]
        return optimizers.build_optimizer(self.factory, described) if described else None

    def show_hyperparameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Give one of those optimizers the hyperparameters as they are now."""
        for group in optimizer.param_groups:
            self._groups[group["name"]].show(group)
            if self.rates is not None:
                group["lr"] = self.rates[group["name"]]
                if "capturable" in group:  # torch asks for it then, and tells of it otherwise
                    group["capturable"] = self.is_recorded

    def bring_rates(self, device: torch.device) -> None:
        """From now on optimizers get their rates as tensors, which are brought up to date here: a graph reads them anew
        in each replay, where a number would be the same for ever."""
        self.rates = self.rates or {}
        for name, group in self._groups.items():
            if name not in self.rates:
                self.rates[name] = torch.zeros((), dtype=torch.float32, device=device)
            rate = group["lr"]
            self.rates[name].copy_(rate) if isinstance(rate, torch.Tensor) else self.rates[name].fill_(rate)

    def require_usable(self) -> None:
        """Refuse `hyperparameters`, the user's to change, if they are the groups' no more.

        Raises:
            EngineStateError: a group was added, removed, moved or replaced, or see `Hyperparameters.require_usable`.
        """
        if list(map(id, self.hyperparameters)) != list(map(id, self._groups.values())):
            raise EngineStateError(
                f"engine.param_groups: the engine has {len(self._groups)} groups, and some were added, removed, moved "
                "or replaced by hand; change the values in a group, and call engine.add_param_group for another"
            )
        for group in self._groups.values():
            group.require_usable()

    def count_step(self) -> None:
        """Bring the numbers that the optimizer changes in its groups to what they are after a step, once it is made."""
        if any(group.counting for group in self._groups.values()):
            training = {self._group[parameter] for parameter in self.trainable}
            for index, group in enumerate(self._groups.values()):
                group.count_step(trains=index in training)

    def sampled_nbytes(self, numel: int, *, is_whole: bool) -> int:
        """Bytes that the optimizer keeps of so many elements, as measured on a sample."""
        if numel == 0:
            return 0
        state = self._sampled_state(is_whole=is_whole)
        return numel * sum(nbytes for _, nbytes in state) // math.prod(optimizers.SAMPLE_SHAPE)

    def held_dtype(self, dtype: torch.dtype, *, is_whole: bool) -> torch.dtype:
        """The dtype to hold state in that has a number for each element, and that a checkpoint has in `dtype`. State in
        bf16 is widened, unless the optimizer itself makes such."""
        if dtype not in optimizers.NARROWED or self.state_dtype != torch.float32:
            return self.state_dtype if dtype in optimizers.NARROWED else dtype
        makes_narrow = dtype in [made for made, _ in self._sampled_state(is_whole=is_whole)]
        return dtype if makes_narrow else torch.float32

    def require_narrowed(self) -> None:
        """Refuse bf16 for the optimizer's state if none of it could be in that.

        Raises:
            ConfigError: none could.
        """
        kinds = {group["name"].startswith(optimizers.WHOLE) for group in self.hyperparameters}
        made = [dtype for is_whole in kinds for dtype, _ in self._sampled_state(is_whole=is_whole)]
        if self.state_dtype not in made:
            raise ConfigError(
                f"{argument('precision.state', 'bf16')} has no effect with {' and '.join(dict.fromkeys(self.kinds))}, "
                "which keeps no number in fp32 for each element; it has one with AdamW, or SGD with momentum"
            )

    def _sampled_state(self, *, is_whole: bool) -> list[tuple[torch.dtype, int]]:
        if is_whole not in self._sampled:
            sample = torch.zeros(optimizers.SAMPLE_SHAPE)
            tensor = sample if is_whole else sample.view(-1)  # flat, as ranks hold what they update by elements
            optimizer = self._sample("whole matrices" if is_whole else "matrices", tensor=tensor)
            tensor.grad = torch.ones_like(tensor)
            with optimizers.widened_state(optimizer, [tensor], self.state_dtype):
                optimizer.step()
            self._sampled[is_whole] = [(state.dtype, state.nbytes) for state in optimizers.tensors_of_state(optimizer)]
        return self._sampled[is_whole]

    # ---- changes of what trains

    @contextmanager
    def undone_if_refused(self) -> Iterator[None]:
        """Restores all changes made in here if it ends with an exception."""
        trained, num_groups = set(self.trainable), len(self.hyperparameters)
        former: dict[str, Any] = {
            name: copy(vars(self)[name]) for name in (*_CHANGING, "_num_changes", "defaults") if name in vars(self)
        }
        try:
            yield
        except BaseException:
            vars(self).update(former)
            del self.hyperparameters[num_groups:]  # the list itself is the user's `engine.param_groups`
            for parameter in self._names:
                parameter.requires_grad_(parameter in trained)
            raise

    def change(self, change: Callable[[], bool]) -> tuple[bool, dict[str, object]]:
        """Make a change. Returns whether it changed anything, and of that what must be the same on all ranks."""
        former_places, num_groups = self.places, len(self.hyperparameters)
        is_change = change()
        changed = [name for name, place in self.places.items() if place != former_places[name]]
        values = shown_groups(self.hyperparameters)
        digest = hashlib.sha256(repr([self.places, values]).encode()).hexdigest()[:8]
        added = [item for group in self.hyperparameters[num_groups:] for item in group.items()]
        return is_change, {
            "what it changes": ", ".join(changed) or "nothing",
            "the new group": ", ".join(f"{name}={as_plain(value)}" for name, value in added),
            "what trains then": f"{len(self.trainable)} of {len(self._names)} parameters, hash {digest}",
        }

    def freeze(self, params: Any) -> bool:
        """Let parameters train no more, but not all; returns whether any did. They keep their group."""
        stopped = [parameter for parameter in self.find(params, "freeze") if parameter.requires_grad]
        if stopped and len(stopped) == len(self.trainable):
            raise ConfigError(f"freeze: {params} would leave no parameter that trains")
        for parameter in stopped:
            parameter.requires_grad_(False)
        return bool(stopped)

    def unfreeze(self, params: Any) -> bool:
        """Let frozen parameters train in the group they have, as new to the optimizer; returns whether any did not."""
        started = [parameter for parameter in self.find(params, "unfreeze") if not parameter.requires_grad]
        without = [parameter for parameter in started if parameter not in self._home]
        if without:
            raise ConfigError(f"unfreeze: {self._listed(without)} in no group; use engine.add_param_group instead")
        self._num_changes += 1
        for parameter in started:
            parameter.requires_grad_(True)
            self._generation[parameter] = self._num_changes
        self._classify(started)
        group_names = {group["name"] for group in self.hyperparameters}
        for name in dict.fromkeys(map(self._full_name, started)):
            if name not in group_names:
                self._append(name)
        self._take_places(started)
        return bool(started)

    def add(self, group: dict[str, Any]) -> bool:
        """Append a group of frozen parameters and let them train; returns whether there are any."""
        group = group | {"params": _params_of(group)}
        members = self.find(group["params"], "add_param_group")
        training = [parameter for parameter in members if parameter.requires_grad]
        if training:
            raise ConfigError(f"add_param_group: {self._listed(training)} in a group that trains; freeze it first")
        for parameter in members:
            self._group.pop(parameter, None)
            self._home.pop(parameter, None)
            parameter.requires_grad_(True)
        self._classify(members)
        self._add(group)
        for parameter in members:
            parameter.requires_grad_(False)
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
        yet. Returns True: what trains is to be cut anew.

        Raises:
            CheckpointError: the optimizer would update a parameter whole that is in no group of such, or the other way.
        """
        for settings in added:
            self._settings.setdefault(settings["name"].removeprefix(optimizers.WHOLE), {})
            self._append(settings["name"], settings)
        for parameter, names in self._names.items():
            trains, group, generation = places[names[0]]
            parameter.requires_grad_(trains)
            self._generation[parameter] = generation
            if group is not None:
                self._group[parameter] = group
                self._home[parameter] = self.hyperparameters[group]["name"].removeprefix(optimizers.WHOLE)
        self._classify(self.trainable)
        for parameter in self.trainable:
            if (name := self.hyperparameters[self._group[parameter]]["name"]) != self._full_name(parameter):
                raise CheckpointError(
                    f"the checkpoint does not fit the engine: {self._names[parameter][0]} is in its group {name!r}, "
                    f"and the engine's optimizer has it in {self._full_name(parameter)!r}"
                )
        self._num_changes = max([self._num_changes, *self._generation.values()])
        return True

    def _listed(self, parameters: Sequence[torch.nn.Parameter]) -> str:
        name = self._names[parameters[0]][0]
        return f"{name} is" if len(parameters) == 1 else f"{name} and {len(parameters) - 1} more are"


def _params_of(group: Any) -> list[Any]:
    if not isinstance(group, Mapping) or "params" not in group:
        problem = f'has no "params": {group}' if isinstance(group, Mapping) else f"is a {type(group).__name__}"
        raise ConfigError(
            f"{argument('param_groups')}: a group {problem}; it takes a list of dicts, each with names, patterns or "
            'parameters as "params", such as [{"params": ["*.bias"], "weight_decay": 0.0}, {"params": ["*"]}]'
        )
    return _as_list(group["params"])


def _as_list(params: Any) -> list[Any]:
    return list(params) if isinstance(params, Iterable) and not isinstance(params, str | torch.Tensor) else [params]
