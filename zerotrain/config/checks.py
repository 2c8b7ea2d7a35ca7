"""Finds all invalid values of a config at once, and settings without effect. A field's rule and the condition of its
effect stand at the field, in `zerotrain.config.schema` and `zerotrain.settings`.
"""

import importlib
import inspect
import math
import pkgutil
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig

from zerotrain.config.compose import to_config
from zerotrain.config.schema import LENGTHS, SWITCHES, Config, TrainConfig
from zerotrain.config.words import did_you_mean, walk_values, word
from zerotrain.settings import Rule, Setting, autos_of, settings_in

# Checks arguments of a class against its annotations, before the class fails on them.


_LISTS = (list, tuple, set, frozenset)
_KINDS: dict[Any, Rule] = {
    bool: Rule("true or false", lambda value: isinstance(value, bool)),
    int: Rule("a whole number", lambda value: _is_number(value) and value % 1 == 0),
    float: Rule("a number", lambda value: _is_number(value)),
    str: Rule("a text", lambda value: not isinstance(value, list | dict)),
    type(None): Rule("null", lambda value: value is None),
}


def kind_problems(
    target: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], arguments: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """(name, what the target takes instead) of each argument of another kind than its annotation or default says.

    It yields certain problems alone: an argument of a class of its own, or one without annotation and default, takes
    anything.
    """
    try:
        hints = typing.get_type_hints(target.__init__ if isinstance(target, type) else target)  # type: ignore[misc]
    except Exception:  # an annotation may be any expression, with names for a type checker alone
        hints = {}
    for name, value in arguments.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        default = parameter.default
        annotation = hints.get(name, Any)
        if name not in hints and isinstance(default, int | float):  # without an annotation, the default tells the kind
            annotation = bool if isinstance(default, bool) else float
        rule = _rule(annotation)
        # A default of None is often left out of the annotation.
        if not rule.holds(value) and (value is not None or default is not None):
            plain_default = list(default) if isinstance(default, tuple) else default
            otherwise = "" if default is parameter.empty else f"; its default is {word(plain_default)}"
            yield name, f"{rule.allowed}{otherwise}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rule(annotation: Any) -> Rule:
    """The values that an annotation allows, an object of any class among them."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    rules = [_member_rule(member) for member in (typing.get_args(annotation) if is_union else (annotation,))]
    words = dict.fromkeys(rule.allowed for rule in rules if rule.allowed)

    def holds(value: Any) -> bool:
        return (isinstance(value, dict) and "_target_" in value) or any(rule.holds(value) for rule in rules)

    return Rule(" or ".join(words), holds)


def _member_rule(member: Any) -> Rule:
    kind = type(None) if member is None else typing.get_origin(member) or member
    if isinstance(kind, type) and kind in _KINDS:
        return _KINDS[kind]
    if kind not in _LISTS:  # no yaml holds a tensor; anything else may be made of what it holds
        return Rule("", lambda value: getattr(kind, "__name__", "") != "Tensor")
    items = [_rule(item) for item in typing.get_args(member) if item is not Ellipsis]

    def holds(value: Any) -> bool:
        if not isinstance(value, list) or not items:
            return isinstance(value, list)
        rules = items if len(items) > 1 else items * len(value)
        return len(rules) == len(value) and all(rule.holds(item) for rule, item in zip(rules, value, strict=True))

    if not items or not items[0].allowed:
        return Rule("a list", holds)
    length = f" of {len(items)}" if len(items) > 1 else ""
    return Rule(f"a list{length}, each a {items[0].allowed.removeprefix('a ')}", holds)


# Checks for the class or function of a `_target_`, and for its arguments.


HYDRA_KEYS = frozenset({"_target_", "_partial_", "_recursive_", "_convert_", "_args_"})
"""Keys for Hydra's instantiate itself; every other key is an argument of the target."""


def target_problems(values: dict[str, Any], *, name: str) -> Iterator[str]:
    """One line for each reason why Hydra's instantiate could not call the target of `values`.

    Args:
        values: an open group, `{"_target_": "package.Class", argument: value, ...}`.
        name: its name in the config, for the messages.
    """
    path = values.get("_target_")
    if not isinstance(path, str) or ":" in path:  # a form that pkgutil knows, and Hydra does not
        yield f"{name}._target_: got {word(path)}; it must be the import path of a class or function: module.Class"
        return
    try:
        target = pkgutil.resolve_name(path)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        yield f"{name}._target_: got {path}; {_why_not_found(path, error)}"
        return
    if not callable(target):
        yield f"{name}._target_: got {path}, a {type(target).__name__}; it must be a class or function"
        return
    yield from _argument_problems(target, values, name)
    for nested_name, nested_target in _nested_targets(values, name):
        yield from target_problems(nested_target, name=nested_name)


def without_arguments(group: str) -> str:
    """The advice for the removal of a null argument: Hydra's ~ removes only arguments with a value."""
    alternative = f"{group}=own, which starts without arguments, or " if group == "data" else ""
    return f"give {alternative}a {group} yaml without it"


def makes(path: Any, kind: type) -> bool:
    """Whether `path` names a class of a kind. True where there is no such class: `target_problems` says so."""
    target = _named_by(path)
    return target is None or (isinstance(target, type) and issubclass(target, kind))


def _named_by(path: Any) -> Any:
    """The object of an import path; None where there is none: `target_problems` says why."""
    try:
        return pkgutil.resolve_name(path)
    except (Exception, SystemExit):
        return None


def takes(path: Any, argument: str) -> bool:
    """Whether `path` names a class or function with an argument of this name."""
    try:
        return argument in inspect.signature(pkgutil.resolve_name(path)).parameters
    except (Exception, SystemExit):  # `target_problems` says why
        return False


def _argument_problems(target: Callable[..., Any], values: dict[str, Any], name: str) -> Iterator[str]:
    try:
        signature = inspect.signature(target)
    except ValueError:  # some classes written in C have none to show
        return
    path, parameters = values["_target_"], signature.parameters
    arguments = {key: value for key, value in values.items() if key not in HYDRA_KEYS}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [] if takes_any else [key for key in arguments if key not in parameters]
    for key in unknown:
        # Hydra leaves out only what has a value.
        otherwise = f"leave it out with ~{name}.{key}" if arguments[key] is not None else without_arguments(name)
        hint = did_you_mean(key, parameters) or f"; {otherwise}"
        yield f"{name}.{key}: {path} takes no such argument{hint}"
    accepted = {key: value for key, value in arguments.items() if key not in unknown}
    bind = signature.bind_partial if values.get("_partial_") else signature.bind
    for key, takes in kind_problems(target, parameters, accepted):
        yield f"{name}.{key}: got {word(accepted[key])}; {path} takes {takes}"
    try:
        bind(*values.get("_args_", ()), **accepted)
    except TypeError as error:
        yield f"{name}: {path}: {error}"


def _why_not_found(path: str, error: BaseException) -> str:
    """The reason why an import path cannot be imported, in one line."""
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        return "it must have the form module.Class"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        return f"there is no module {missing.name}; it is looked for where you are, beside launch.py and in PYTHONPATH"
    except (Exception, SystemExit) as failed:
        return f"importing {module_name} failed: {type(failed).__name__}: {failed}".split("\n")[0]
    if hasattr(module, attribute):
        return str(error).split("\n")[0]
    return f"{module_name} has no {attribute}{did_you_mean(attribute, dir(module))}"


def _nested_targets(value: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The outermost targets among the arguments."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, dict) and "_target_" in item:
            yield f"{name}.{key}", item
        else:
            yield from _nested_targets(item, f"{name}.{key}")


OPEN_GROUPS = ("model", "loss", "data", "optimizer", "scheduler")
CALLBACKS = "callbacks"
COLLATE_FN = "data.collate_fn"
SETS = "data.validation_sets"
PARTIAL_GROUPS = ("optimizer", "scheduler", COLLATE_FN)
"""These get more arguments later: the parameters, the step, the items."""
MAX_MICRO_BATCHES = 2**20
"""Limit for one step on all ranks: a larger number has too many noughts."""


def checked_config(composed: DictConfig) -> tuple[Config, list[str]]:
    """Type what Hydra composed and check names, values, and the classes named by `_target_` with their arguments.

    Returns:
        The config, and one line for each problem: the setting, what it got, what is allowed, what to do.

    Raises:
        ConfigError: an interpolation leads nowhere, so that there is no config to check.
    """
    config, problems = to_config(composed)
    problems += value_problems(config) + length_problems(config)
    if config.train.num_epochs is not None or config.train.max_tokens is not None:
        config.train.max_steps = None  # until the data has told it, see `zerotrain.preflight.check`
    named = {line.partition(":")[0] for line in problems}
    return config, problems + [line for line in class_problems(config) if line.partition(":")[0] not in named]


def class_problems(config: Config) -> list[str]:
    """One line for each reason why a class named in a config could not be built."""
    problems: list[str] = []
    for group in OPEN_GROUPS:
        values = config.target(group)
        if group == "model" and values.get("vocab_size", 0) is None:
            values = values | {"vocab_size": 1}  # until the data has said how many tokens it has
        if group == "loss" and not values:  # the model returns its loss
            continue
        problems += _open_group_problems(values, group)
    collate = config.switches("data")["collate_fn"]
    if isinstance(collate, dict) and "_target_" in collate:
        problems += _open_group_problems(collate, COLLATE_FN)
    for name, values in config.validation_set_targets.items():
        problems += _open_group_problems(values, f"{SETS}.{name}")
    for name, values in config.callback_targets.items():
        key = f"{CALLBACKS}.{name}"
        if not isinstance(values, dict):
            problems.append(f"{key}: got {word(values)}; it must be a class with its arguments, or null")
        elif values.get("_partial_"):
            problems.append(f"{key}._partial_: got {word(values['_partial_'])}; leave it out")
        else:
            problems += _open_group_problems(values, key)
    return problems


def value_problems(config: Config) -> list[str]:
    """One line for each value that breaks its rule, or a rule across settings."""
    settings = _settings_of(config)
    problems = [setting.must_be(name, value, word) for name, setting, value in settings if not setting.allows(value)]
    if config.precision.name == "fp16" and config.train.on_nonfinite == "stop":
        problems.append(
            "train.on_nonfinite: got stop; it must be skip with precision=fp16, which finds its loss scale by overflows"
        )
    train = config.train
    if train.gradient_accumulation_steps * (train.virtual_ranks or 1) > MAX_MICRO_BATCHES:
        got = f"train.gradient_accumulation_steps: got {train.gradient_accumulation_steps}"
        if train.virtual_ranks is not None:
            got = f"train.virtual_ranks: got {train.virtual_ranks} with {got.replace(': got ', '=')}"
        problems.append(f"{got}; a step must have {MAX_MICRO_BATCHES} micro-batches or fewer")
    if config.zero.schedule is not None:
        problems += [
            f"{name}: got auto with zero.schedule={word(config.zero.schedule)}; it must be a value with a schedule; "
            "leave one of them out"
            for name in autos_of(config)
        ]
    if all(getattr(config.train, name) is None for name in LENGTHS):
        problems.append(
            "train.max_steps: got null; it must be a number of steps without train.num_epochs or max_tokens"
        )
    return problems


def length_problems(config: Config) -> list[str]:
    """A line where a run as it was given has two lengths. The default of `train.max_steps` counts as none."""
    lengths = [
        f"{name}={word(value)}"
        for name, setting, value in _settings_of(config)
        if name.removeprefix("train.") in LENGTHS and value is not None and setting.allows(value)
    ]
    if config.train.max_steps == TrainConfig().max_steps:
        lengths.remove(f"train.max_steps={config.train.max_steps}")
    if len(lengths) < 2:
        return []
    return [f"{', '.join(lengths)}: a run has one length; leave out the others, or give them null"]


def must_be(name: str, got: Any) -> str | None:
    """The line about a setting that got a wrong value; None where there is no rule for it."""
    settings = {name: setting for name, setting, _ in _settings_of(Config())}
    return settings[name].must_be(name, got, word) if name in settings else None


def without_effect(config: Config, world_size: int) -> list[str]:
    """One line for each setting with another value than its default, but without effect in this run."""
    lines = []
    for name, setting, value in _settings_of(config):
        lacking = [effect for effect in setting.effects if not effect.holds(config, world_size)]
        if lacking and value != setting.default:
            why = lacking[0].otherwise.format_map(vars(config))
            lines.append(f"{name}={word(value)} has no effect {why}")
    return lines


def doubtful(config: Config) -> list[str]:
    """One line for each pair of settings with an effect that is hardly wanted."""
    lines = []
    pretrained, last_change = config.model.get("name_or_path"), max(config.zero.stages)
    if pretrained is not None and config.data.get("tokenizer", "") is None:
        unseen = f"which model.name_or_path={pretrained} has never seen"
        lines.append(f"data.tokenizer=null reads bytes, {unseen}; use data=tokenized")
    if config.train.max_steps is not None and last_change >= config.train.max_steps:
        lines.append(f"zero.schedule: step {last_change} is not reached with train.max_steps={config.train.max_steps}")
    return lines


def _settings_of(config: Config) -> Iterator[tuple[str, Setting, Any]]:
    """(dotted name, setting, value) of all settings but the arguments of the open groups."""
    yield from settings_in(config)
    for group, switches in SWITCHES.items():
        yield from settings_in(switches(**config.switches(group)), f"{group}.")


def _open_group_problems(values: dict[str, Any], group: str) -> Iterator[str]:
    for name, value in walk_values(values, group):
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name}: got {value}; it must be a finite number"
    target = _named_by(values.get("_target_"))
    # A class whose objects can be called takes what comes later, without `_partial_`.
    is_callable = isinstance(target, type) and any("__call__" in vars(base) for base in target.__mro__)
    if group == "loss" and isinstance(target, type) and not is_callable:
        yield f"loss._target_: got {values['_target_']}, whose objects cannot be called; give a loss, or a function"
    if group == "loss" and not isinstance(target, type):
        values = values | {"_partial_": True}
    if group in PARTIAL_GROUPS and not is_callable and values.get("_partial_") is not True:
        yield f"{group}._partial_: got {word(values.get('_partial_'))}; it must be true"
        values = values | {"_partial_": True}  # what comes later is not missing now
    yield from target_problems(values, name=group)
