"""Which parameters of a run's model train, from which step on, and with which options of the optimizer."""

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import torch
from torch import nn

from zerotrain.checkpoint.manifest import Manifest
from zerotrain.config.schema import Config
from zerotrain.config.words import in_words_of_config, word
from zerotrain.device.kinds import device_of
from zerotrain.engine.groups.optimizers import WHOLE, OptimizerFactory
from zerotrain.engine.groups.param_groups import ParamGroups
from zerotrain.errors import ConfigError
from zerotrain.run.rhythms import steps_of
from zerotrain.sharding.units import ModelParameter, WalkedModel, cut_units, matching, model_parameters, no_match

FREEZE, GROUPS = "model.freeze", "optimizer.groups"


def freeze(config: Config, model: nn.Module) -> dict[str, Any]:
    """Let those parameters of a model not train which `model.freeze` freezes for good.

    Returns:
        All that it freezes, by first name: until when, as it was given; None: for good.

    Raises:
        ConfigError: with each entry that freezes nothing; or nothing is left to train in the first step.
    """
    parameters, until, problems = model_parameters(model), dict[str, Any](), list[str]()
    trained = [each for each in parameters if each.parameter.requires_grad]
    for patterns, given in config.frozen:
        unknown = [f"{FREEZE}: {no_match(parameters, each)}" for each in patterns if not matching(parameters, each)]
        found = {each.names[0] for pattern in patterns for each in matching(trained, pattern)} - until.keys()
        if not unknown and not found:
            told = f"{FREEZE}: {_listed(patterns)} has no effect, since all that it matches is frozen"
            unknown = [f"{told} by the model itself or by an entry before; leave it out"]
        problems += unknown
        until |= dict.fromkeys(found, given)
    if not problems and trained and len(until) == len(trained):
        raise ConfigError(f"{FREEZE}: leaves no parameter that trains in the first step; freeze fewer")
    if problems:
        raise ConfigError(*problems)
    for each in trained:
        if each.names[0] in until and until[each.names[0]] is None:
            each.parameter.requires_grad_(False)
    return until


def frozen_steps(config: Config, until: Mapping[str, Any], train: Sized, num_ranks: int) -> dict[str, int | None]:
    """The steps for which each parameter of `freeze` does not train; None: all.

    Raises:
        ConfigError: the data does not tell, or an entry holds until the end of the run or later.
    """
    steps: dict[Any, int | None] = {None: None}
    problems: list[str] = []
    for given in dict.fromkeys(each for _, each in config.frozen if each is not None):
        try:
            steps[given] = number = steps_of(f"{FREEZE} until {given}", given, train, config, num_ranks)
        except ConfigError as error:
            problems += error.problems
            continue
        if number is not None and config.train.max_steps is not None and number >= config.train.max_steps:
            problems.append(
                f"{FREEZE}: until {given} is step {number}, and the run has {config.train.max_steps}; give an earlier "
                "one, or leave it out: what it freezes never trains"
            )
    if problems:
        raise ConfigError(*problems)
    return {name: steps[given] for name, given in until.items()}


def require_groups(
    config: Config,
    walked: WalkedModel,
    factory: OptimizerFactory,
    device: torch.device | None,
    goes_on_from: Manifest | None,
) -> None:
    """Make sure that the groups of a config can be made of a model without memory, and that each has an effect.

    Args:
        device: of the ranks; on a GPU they try optimizers themselves.
        goes_on_from: of the checkpoint that is tried first.

    Raises:
        ConfigError: they cannot, or a parameter is in another group in the checkpoint.
    """
    tried = device if device is not None and device_of(device).is_host else None
    units = cut_units(walked, config.zero.unit_patterns, max_numel=1)
    given, problems = config.optimizer_groups, list[str]()

    def made(groups: Sequence[dict[str, Any]] | None) -> ParamGroups:
        return ParamGroups(walked.managed, units, factory, groups, decay_all=False, device=tried, warns=False)

    taken: dict[ModelParameter, str] = {}
    for group in given or ():
        problems += _without_effect(group, walked.managed, taken) or _refused(group, lambda group=group: made([group]))
    if problems:
        raise ConfigError(*problems)
    if goes_on_from is not None:
        _require_same(goes_on_from, made(given))


def _without_effect(
    group: dict[str, Any], parameters: Sequence[ModelParameter], taken: dict[ModelParameter, str]
) -> list[str]:
    """A line for each pattern of a group that matches nothing, or one for a group that gets nothing; notes what it
    gets."""
    name, patterns = f"{GROUPS}.{group['name']}", group["params"]
    unknown = [f"{name}: {no_match(parameters, each)}" for each in patterns if not matching(parameters, each)]
    found = dict.fromkeys(each for pattern in patterns for each in matching(parameters, pattern))
    own = [each for each in found if each not in taken]
    earlier = dict.fromkeys(taken[each] for each in found if each in taken)
    taken |= dict.fromkeys(own, group["name"])
    if unknown:
        return unknown
    if not own:
        return [f"{name}: has no effect, since all that it matches is in {_listed(earlier)} before it; leave it out"]
    if not any(each.parameter.requires_grad for each in own):
        return [f"{name}: has no effect, since all that it matches is frozen; leave it out"]
    return []


def _refused(group: dict[str, Any], make: Any) -> list[str]:
    try:
        make()
    except ConfigError as error:
        said = [in_words_of_config(each).removeprefix(f"{GROUPS}: ") for each in error.problems]
        return [f"{GROUPS}.{group['name']}: {each}" for each in said]
    return []


def _require_same(manifest: Manifest, groups: ParamGroups) -> None:
    """Groups that a run's own code has added stay as they are in its checkpoint."""
    names = [group["name"].removeprefix(WHOLE) for group in groups.hyperparameters]
    saved = [str(group["hyperparameters"]["name"]).removeprefix(WHOLE) for group in manifest.content.get("groups", ())]
    found: Any = manifest.content.get("config")
    for key in ("optimizer", "groups"):
        found = found.get(key) if isinstance(found, dict) else None
    of_settings = set(found) if isinstance(found, dict) else set[str]()
    for name, (trains, number, _) in groups.places.items():
        was = manifest.parameters.get(name, {}).get("group")
        if not trains or number is None or was is None or saved[was] == names[number]:
            continue
        if was >= len(names) and saved[was].removesuffix(" others") not in of_settings:
            continue
        raise ConfigError(
            f"{GROUPS}: {name} is in group {word(names[number])}, and in the checkpoint to go on from in "
            f"{word(saved[was])}; give the groups that it was saved with, or begin a new run with its weights "
            "(checkpoint.init_from)"
        )


def _listed(names: Any) -> str:
    return ", ".join(map(str, names))
