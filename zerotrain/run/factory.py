"""The one place where config becomes objects: one rank of a run, from joining the others to its result."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch.overrides import TorchFunctionMode

from zerotrain.checkpoint.manifest import Manifest
from zerotrain.comm.ledger import Tell, tell_log
from zerotrain.comm.world import World
from zerotrain.config.checks import SETS, makes, takes
from zerotrain.config.compose import checkpoint_settings, config_hash, first_paragraph
from zerotrain.config.schema import VALIDATION_FRACTION, Config, Rhythm, TrainConfig
from zerotrain.config.words import find_references, word, words_of_config
from zerotrain.data.fetch import fetch_rows, seeded
from zerotrain.engine import WHOLE, OptimizerFactory, ParamGroups, ZeroEngine, assemble_engine
from zerotrain.engine.state.from_checkpoint import misfits
from zerotrain.errors import ConfigError, noting, raise_noted
from zerotrain.files.untrusted import Natural, printable, value_at
from zerotrain.settings import EngineConfig, OffloadConfig, problems_in, value_of
from zerotrain.sharding.units import ModelParameter, matching, model_parameters, no_match
from zerotrain.training import Callback, Metric, Trainer
from zerotrain.training.callback import require_callbacks
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy
from zerotrain.training.callbacks.ema import EMA
from zerotrain.training.clock import ModelFlops, count_flops, device_peak_flops
from zerotrain.training.sameness import choose_kernels

# The steps that so many epochs or tokens come to between two evaluations, lines of metrics or checkpoints.


RHYTHMS = ("train.eval_every", "train.log_every", "checkpoint.every")


def rhythms_in_steps(config: Config, train: Sized, num_ranks: int) -> dict[str, int | None]:
    """The steps that each of `RHYTHMS` comes to with this data and global batch, rounded, at least 1; 0 or None where
    it says so, and None of a time.

    Raises:
        ConfigError: the data does not tell, with a line for each.
    """
    steps: dict[str, int | None] = {}
    errors: list[ConfigError] = []
    for name in RHYTHMS:
        rhythm = value_of(config, name)
        with noting(errors):
            steps[name] = steps_of(f"{name}={rhythm}", rhythm, train, config, num_ranks)
    raise_noted(errors)
    return steps


def require_rhythms(config: Config, train: Sized, num_ranks: int) -> None:
    """Make sure that the data tells how many steps the rhythms of a run come to."""
    if not problems_in(config.train) and not problems_in(config.checkpoint):
        rhythms_in_steps(config, train, num_ranks)


def steps_of(setting: str, value: Any, train: Sized, config: Config, num_ranks: int) -> int | None:
    """The steps that so many steps, tokens or epochs come to; 0 or None where it says so, and None of a time.

    Args:
        setting: the setting and its value, for messages.

    Raises:
        ConfigError: the data does not tell; it begins with the setting.
    """
    rhythm = Rhythm.read(value)
    if rhythm is None or rhythm.unit == "seconds":
        return 0 if value == 0 else None
    if rhythm.unit == "steps":
        return int(rhythm.number)
    if rhythm.unit == "epochs":
        num_sequences = rhythm.number * len(train)
    else:
        num_sequences = rhythm.number / tokens_per_sequence(setting, train, "a number of epochs or of steps")
    return max(1, round(num_sequences / batch_size_of(config, num_ranks)))


def batch_size_of(config: Config, num_ranks: int) -> int:
    """Sequences of a step, of all ranks."""
    train = config.train
    return (train.virtual_ranks or num_ranks) * train.gradient_accumulation_steps * train.micro_batch_size


def tokens_per_sequence(setting: str, train: Sized, otherwise: str) -> int:
    """Tokens of each row; a ConfigError that begins with the setting where the data does not say."""
    num_tokens = getattr(train, "tokens_per_sequence", None)
    if not isinstance(num_tokens, int) or num_tokens < 1:
        problem = "the data does not tell how many tokens each of its rows has"
        raise ConfigError(f"{setting}: {problem}; give {otherwise}")
    return num_tokens


# The parameters that train, from which step on, and their options of the optimizer.


FREEZE, GROUPS = "model.freeze", "optimizer.groups"


def freeze(config: Config, model: torch.nn.Module) -> dict[str, Any]:
    """Let those parameters of a model not train which `model.freeze` freezes for good.

    Returns:
        All that it freezes, by first name: until when, as it was given; None: for good.

    Raises:
        ConfigError: with each entry that freezes nothing; or nothing is left to train in the first step.
    """
    parameters, until, problems = model_parameters(model), dict[str, Any](), list[str]()
    trained = [entry for entry in parameters if entry.parameter.requires_grad]
    for patterns, end in config.frozen:
        unmatched = [pattern for pattern in patterns if not matching(parameters, pattern)]
        unknown = [f"{FREEZE}: {no_match(parameters, pattern)}" for pattern in unmatched]
        names = {entry.names[0] for pattern in patterns for entry in matching(trained, pattern)} - until.keys()
        if not unknown and not names:
            problem = f"{FREEZE}: {', '.join(patterns)} has no effect, since all that it matches is frozen"
            unknown = [f"{problem} by the model itself or by an entry before; leave it out"]
        problems += unknown
        until |= dict.fromkeys(names, end)
    if not problems and trained and len(until) == len(trained):
        raise ConfigError(f"{FREEZE}: leaves no parameter that trains in the first step; freeze fewer")
    if problems:
        raise ConfigError(*problems)
    for entry in trained:
        if entry.names[0] in until and until[entry.names[0]] is None:
            entry.parameter.requires_grad_(False)
    return until


def frozen_steps(config: Config, until: Mapping[str, Any], train: Sized, num_ranks: int) -> dict[str, int | None]:
    """The steps for which each parameter of `freeze` does not train; None: all.

    Raises:
        ConfigError: the data does not tell, or an entry holds until the end of the run or later.
    """
    steps: dict[Any, int | None] = {None: None}
    errors: list[ConfigError] = []
    for end in dict.fromkeys(end for _, end in config.frozen if end is not None):
        with noting(errors):
            steps[end] = number = steps_of(f"{FREEZE} until {end}", end, train, config, num_ranks)
            if number is not None and config.train.max_steps is not None and number >= config.train.max_steps:
                raise ConfigError(
                    f"{FREEZE}: until {end} is step {number}, and the run has {config.train.max_steps}; give an "
                    "earlier one, or leave it out: what it freezes never trains"
                )
    raise_noted(errors)
    return {name: steps[end] for name, end in until.items()}


def require_groups(config: Config, parameters: Sequence[ModelParameter]) -> None:
    """Make sure that each group of a config has an effect on a model with these parameters. The engine
    refuses patterns without a match.

    Raises:
        ConfigError: with each group that has none.
    """
    owners: dict[ModelParameter, str] = {}
    problems = []
    for group in config.optimizer_groups or ():
        name = f"{GROUPS}.{group['name']}"
        matches = dict.fromkeys(entry for pattern in group["params"] for entry in matching(parameters, pattern))
        own = [entry for entry in matches if entry not in owners]
        earlier = ", ".join(dict.fromkeys(owners[entry] for entry in matches if entry in owners))
        owners |= dict.fromkeys(own, group["name"])
        if matches and not own:
            problems.append(f"{name}: has no effect, since all that it matches is in {earlier} before it; leave it out")
        elif matches and not any(entry.parameter.requires_grad for entry in own):
            problems.append(f"{name}: has no effect, since all that it matches is frozen; leave it out")
    if problems:
        raise ConfigError(*problems)


def require_optimizer(engine: ZeroEngine, device: torch.device | None, goes_on_from: Manifest | None) -> None:
    """Make sure that ranks can train with the optimizers of an engine without memory.

    Args:
        device: of the ranks; None: they try it themselves.
        goes_on_from: of the checkpoint that is tried first.

    Raises:
        ConfigError: they cannot, or the checkpoint is of other groups or optimizers.
    """
    if device is not None:
        engine.held.groups.probe_on(device)
    if goes_on_from is not None:
        _require_same(goes_on_from, engine.held.groups)
        if lines := misfits(goes_on_from, engine.held.holdings):
            raise ConfigError(*(f"checkpoint.resume: {line}" for line in lines))


def _require_same(manifest: Manifest, groups: ParamGroups) -> None:
    """Groups that a run's own code has added stay as they are in its checkpoint."""
    names = [group["name"].removeprefix(WHOLE) for group in groups.hyperparameters]
    saved = [str(group["hyperparameters"]["name"]).removeprefix(WHOLE) for group in manifest.content.get("groups", ())]
    settings = value_at(manifest.content.get("config"), "optimizer", "groups")
    of_settings = set(settings) if isinstance(settings, dict) else set[str]()
    for name, (trains, number, _) in groups.places.items():
        was = manifest.parameters[name].group if name in manifest.parameters else None
        if not trains or number is None or was is None or saved[was] == names[number]:
            continue
        if was >= len(names) and saved[was].removesuffix(" others") not in of_settings:
            continue
        raise ConfigError(
            f"{GROUPS}: {name} is in group {word(names[number])}, and in the checkpoint to go on from in "
            f"{word(saved[was])}; give the groups that it was saved with, or begin a new run with its weights "
            "(checkpoint.init_from)"
        )


ENGINE_SETTINGS = ("max_grad_norm", "on_nonfinite", "max_skipped_steps", "virtual_ranks")
"""The `train` settings that the engine gets."""
_OF_NEITHER = ("num_epochs", "max_tokens", "deterministic", "on_corruption")
LOOP_SETTINGS = tuple(entry.name for entry in fields(TrainConfig) if entry.name not in (*ENGINE_SETTINGS, *_OF_NEITHER))
"""Those that the Trainer gets."""
_OF_DATA = re.compile(r"(?<![\w.])data\.(?!validation_sets\.)")
"""How the names of the arguments of data begin in its messages."""
TOO_LARGE_A_TENSOR = "Storage size calculation overflowed"
"""Torch's message for a tensor whose number of bytes overflows."""


@dataclass(frozen=True)
class RunSpec:
    """A run, as each of its ranks receives it."""

    config: Config
    """Its values checked, which the process did that has started the ranks."""
    run_dir: Path
    """Absolute, and the same on all machines; it exists."""
    overrides: list[str]
    """The settings given on the command line."""
    data_checked: dict[str, Any] | None = None
    """Fingerprint of the data when it was checked; each rank compares its own with it."""
    resume_from: list[str] = field(default_factory=list)
    """Checkpoints to go on from, the best first; none to begin anew."""
    restarts: Natural = 0
    """How often its ranks were started again, after a failure."""
    stage: int | None = None
    """ZeRO stage of the engine at its start; None: the run's first."""
    trial: dict[str, Any] | None = None
    """The arguments of `early_stopping.Trial`, for a pruner; None: there is no pruner."""
    planned: dict[str, Any] | None = None
    """The `Memory.usage_of` of the run's plan; None: it was not planned."""

    def facts(self) -> dict[str, Any]:
        """Its fields of result.json."""
        stage = self.config.zero.stages[0] if self.stage is None else self.stage
        facts = {"stage": stage, "overrides": self.overrides, "config_hash": config_hash(self.config)}
        facts |= {"restarts": self.restarts}
        return facts if self.planned is None else facts | {"memory_bytes": {"planned": self.planned}}


def run(
    spec: RunSpec,
    enter: Callable[[str], None] = lambda phase: None,
    begin: Callable[[int], None] = lambda step: None,
    tell: Tell = tell_log,
) -> dict[str, Any]:
    """Train as one rank of a run, from joining the others to result.json; return the body of that file.

    Args:
        enter: told what is done from then on, such as "training".
        begin: told the number of each step, from 1, as it begins.
        tell: see `World.from_environment`.
    """
    config, parts = spec.config, dict[str, Any](begin=begin, run_facts=spec.facts())
    with joined_ranks(config, enter, tell) as world:
        if spec.trial is not None and world.rank == 0:  # rank 0 alone has the pruner
            from zerotrain.training.callbacks.early_stopping import Pruning, Trial

            job = Trial(**spec.trial)
            parts["pruning"] = Pruning(job, build("sweep.pruner", job.pruner))
        if config.checkpoint.mirror is not None and world.rank == 0:
            from zerotrain.training.callbacks.mirror import Mirror, RunMirror

            parts["mirror"] = RunMirror(Mirror(config.checkpoint.mirror), config.checkpoint.mirror_keep)
        trainer = build_trainer(spec, world, **parts)
        enter(f"training {config.model.get('_target_')}")
        return trainer.run()


@contextmanager
def joined_ranks(
    config: Config, enter: Callable[[str], None] = lambda phase: None, tell: Tell = tell_log
) -> Iterator[World]:
    """Inside, this process is a rank among the others, about to build the model, with the kernels and in the words of
    the config. Arguments are those of `run`; raises as `World.from_environment`."""
    launch = config.launch
    choose_kernels(deterministic=config.train.deterministic, tf32=config.precision.tf32)
    enter("joining the other ranks")
    options: dict[str, Any] = {"start_timeout_s": launch.start_timeout_s, "interface": launch.interface, "tell": tell}
    with words_of_config(), World.from_environment(launch.device, launch.timeout_s, **options) as world:
        enter(f"building {config.model.get('_target_')}")
        yield world


def build_trainer(spec: RunSpec, world: World, **arguments: Any) -> Trainer:
    """The trainer of a run around its engine and data. Collective. Raises as `build_engine_of`, and as `build`.

    Args:
        arguments: for the trainer, beside those that the config says.
    """
    config, frozen = spec.config, dict[str, Any]()
    torch.manual_seed(config.seed)
    engine = build_engine_of(config, world, spec.stage, spec.run_dir, frozen)
    # From here on each rank draws its own numbers (dropout); the weights were drawn alike.
    torch.manual_seed(config.seed + 1 + world.rank)
    dataset = build_data(config)
    steps = rhythms_in_steps(config, dataset.train, world.size)
    loop = {name: steps.get(f"train.{name}", getattr(config.train, name)) for name in LOOP_SETTINGS}
    # Checkpoints note all settings, and the values chosen for null if the bits depend on them.
    settings: dict[str, Any] = json.loads(json.dumps(checkpoint_settings(config)))  # steps become texts
    settings["train"]["virtual_ranks"] = world.size * len(engine.virtual_ranks)
    settings["launch"]["threads_per_rank"] = torch.get_num_threads()
    schedule: Any = build("scheduler", config.scheduler)
    if isinstance(schedule, partial):  # without Hydra's check of each call; `try_schedule` has made it once
        schedule = partial(schedule.func, *schedule.args, **schedule.keywords)
    return Trainer(
        engine=engine,
        world=world,
        dataset=dataset,
        validation_sets=build_validation_sets(config),
        schedule=schedule,
        stages=config.zero.stages,
        frozen=frozen_steps(config, frozen, dataset.train, world.size),
        seed=config.seed,
        run_dir=spec.run_dir,
        data_checked=spec.data_checked,
        model_flops=_model_flops(config, engine, dataset),
        num_workers=config.switches("data")["num_workers"],
        collate_fn=build_collate(config),
        settings=settings,
        callbacks=build_callbacks(config),
        checkpoint=_policy(spec, steps["checkpoint.every"]),
        exit_code_when_stopped=config.launch.exit_code_when_stopped,
        **arguments,
        **loop,
    )


def build_engine_of(
    config: Config,
    world: World,
    stage: int | None = None,
    run_dir: Path | None = None,
    frozen: dict[str, Any] | None = None,
    *,
    model: torch.nn.Module | None = None,
    optimizer: OptimizerFactory | None = None,
) -> ZeroEngine:
    """The engine of a run around its model, with the model's first weights. Collective.

    Args:
        stage: None: the run's first.
        run_dir: None: of no run that trains; nothing is offloaded.
        frozen: gets what `zerotrain.run.factory.freeze` returns.
        model, optimizer: in place of those that the config names, for a rehearsal; the model is frozen in part.

    Raises:
        ConfigError: a class cannot be found or refuses its arguments, or the model cannot be trained so.
    """
    train, switches = config.train, config.switches("model")
    offload: OffloadConfig = config.offload
    if run_dir is None:
        offload = OffloadConfig()
    elif offload.path is None:
        offload = replace(offload, path=str(run_dir))
    engine_config = EngineConfig(
        zero=config.zero.of_engine(stage),
        precision=config.precision,
        offload=offload,
        max_grad_norm=train.max_grad_norm,
        max_skipped_steps=1 if train.on_nonfinite == "stop" else train.max_skipped_steps,
        virtual_ranks=train.virtual_ranks,
        graphs=config.launch.graphs,
    )

    def build_model() -> torch.nn.Module:
        built: torch.nn.Module = build("model", config.target("model"))
        add_config_loss(config, built)
        until = freeze(config, built)
        if frozen is not None:
            frozen.update(until)
        return built

    return assemble_engine(
        build_model if model is None else model,
        engine_config,
        optimizer=optimizer or build_optimizer_factory(config),
        world=world,
        decay_all=False,
        param_groups=config.optimizer_groups,
        compile=switches["compile"],
        activation_checkpointing=switches["activation_checkpointing"],
    )


def add_config_loss(config: Config, model: torch.nn.Module) -> None:
    """Let a model return the loss of the config, where it has one. Raises as `build`, and as `add_loss`."""
    if values := config.target("loss"):
        from zerotrain.training.losses import add_loss  # few runs need it

        of_class = makes(values.get("_target_"), object)
        with torch.device("cpu"):
            function = build("loss", values if of_class else values | {"_partial_": True})
        add_loss(model, function, config.switches("loss")["target"])


def _policy(spec: RunSpec, every_steps: int | None) -> CheckpointPolicy:
    """When a run saves; every so many steps, where that is not given as a time."""
    settings, every = spec.config.checkpoint, Rhythm.read(spec.config.checkpoint.every)
    return CheckpointPolicy(
        every_steps=every_steps,
        every_s=float(every.number) if every is not None and every.unit == "seconds" else None,
        keep=settings.keep,
        keep_every=settings.keep_every,
        best=settings.best,
        asynchronous=settings.asynchronous,
        strict=settings.strict,
        at_end=settings.save_at_end is not False,
        resume=[Path(path) for path in spec.resume_from],
        init_from=None if settings.init_from is None else Path(settings.init_from),
    )


def build_collate(config: Config) -> Callable[[list[Any]], Any] | None:
    """The user's function that makes a batch of items; None for torch's. Raises as `build`."""
    values = config.switches("data")["collate_fn"]
    return None if values is None else build("data.collate_fn", values)


def build_data(config: Config) -> Any:
    """The dataset. Random numbers drawn while it is made follow from the seed: they are the same on all ranks. Raises
    as `build`."""
    with seeded("data", config.seed):
        return build("data", config.target("data"))


def build_validation_sets(config: Config) -> dict[str, Any]:
    """The data of `data.validation_sets`, by name. Raises as `build`, with the settings of the set at fault."""
    sets = {}
    for name, values in config.validation_set_targets.items():
        called = f"{SETS}.{name}"
        if takes(values.get("_target_"), VALIDATION_FRACTION):
            values = {VALIDATION_FRACTION: 0} | values
        try:
            with seeded(called, config.seed):
                sets[name] = build(called, values)
        except ConfigError as error:
            lines = (_OF_DATA.sub(f"{called}.", problem.removeprefix(f"{called}: ")) for problem in error.problems)
            raise ConfigError(*(line if line.startswith(called) else f"{called}: {line}" for line in lines)) from error
    return sets


def build_callbacks(config: Config) -> dict[str, Callback]:
    """The user's callbacks by name. Raises as `build`, and where one is none."""
    built = {name: build(f"callbacks.{name}", values) for name, values in config.callback_targets.items()}
    require_callbacks(built)
    for metric in built.values():
        if isinstance(metric, Metric) and metric.target is None:
            metric.target = config.switches("loss")["target"]
    if len(averages := [name for name, callback in built.items() if isinstance(callback, EMA)]) > 1:
        names = " and ".join(f"callbacks.{name}" for name in averages)
        raise ConfigError(f"{names}: a run keeps one average of weights; leave out all but one")
    return built


def averages_in(config: Config) -> list[dict[str, Any]]:
    """The settings of callbacks that keep an average of weights: one or none, where they were checked."""
    targets = (target for target in config.callback_targets.values() if isinstance(target, dict))
    return [target for target in targets if target.get("_target_") == f"{EMA.__module__}.{EMA.__name__}"]


def build(group: str, values: dict[str, Any]) -> Any:
    """Build the object that `_target_` names from the other values.

    Raises:
        ConfigError: it cannot be found or refuses its arguments.
    """
    for name, text in find_references(values, group):  # which Hydra would resolve, though somebody else has written it
        raise ConfigError(f"{name}: got {text}; an argument of a class must not contain ${{")
    try:
        return instantiate(values, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        if not isinstance(cause, (ValueError, TypeError, LookupError, OSError, ImportError, InstantiationException)):
            raise cause from None
        raise ConfigError(in_group(group, cause, values)) from cause
    except SystemExit as ending:
        raise ConfigError(ended_in(group, ending, values)) from ending


def build_optimizer_factory(config: Config) -> OptimizerFactory:
    """The maker of the run's optimizers, which says what the config says of it."""
    factory: Any = build("optimizer", config.target("optimizer"))
    if config.switches("optimizer")["whole_tensor"] and callable(factory):
        factory = partial(factory)
        factory.whole_tensor = True
    return factory


def try_optimizer(config: Config, device: torch.device | None) -> OptimizerFactory:
    """The maker of the run's optimizers, which has made one of a small tensor.

    Args:
        device: on which some steps are tried; None: on none.

    Raises:
        ConfigError: it makes something else, or ranks cannot train with it.
    """
    factory = build_optimizer_factory(config)
    with suppress(ValueError):  # for which the engine has a sentence
        optimizer = factory([{"params": [torch.zeros(64, 64)], "name": "matrices"}])
        require_kind("optimizer", config.optimizer, optimizer, torch.optim.Optimizer)
    ParamGroups((), (), factory, None, device=device)
    return factory


def try_schedule(config: Config) -> None:
    """Ask the schedule for a factor; ConfigError where it gives something else."""
    factor = build("scheduler", config.scheduler)(0, config.train.max_steps or 1)
    if not isinstance(factor, int | float):
        raise ConfigError(
            f"scheduler._target_: got {config.scheduler.get('_target_')}, which returns a {type(factor).__name__} "
            "for (0, max_steps); it must return a number, the factor of the learning rate"
        )


def require_kind(group: str, values: dict[str, Any], instance: object, kind: type) -> None:
    """Make sure that a class of the config makes what its group is for; ConfigError otherwise."""
    if not isinstance(instance, kind):
        called = "torch.nn.Module" if kind is torch.nn.Module else "torch.optim.Optimizer"
        path, got = values.get("_target_"), type(instance).__name__
        raise ConfigError(f"{group}._target_: got {path}, which makes a {got}; it must make a {called}")


def in_group(group: str, error: Exception, values: Any) -> str:
    """The first line of an error, saying which group of settings it is about."""
    text = str(error)
    for value in values.values() if isinstance(values, dict) else ():
        if isinstance(value, str) and "\n" in value:  # of what the user gave, all is shown
            text = text.replace(value, printable(value, keep=""))
    line = (text.splitlines() or [type(error).__name__])[0]
    if isinstance(error, InstantiationException):  # which Hydra breaks anywhere
        line = first_paragraph(error)
    if isinstance(error, KeyError):
        line = f"KeyError: {line}"
    return line if line.startswith(f"{group}.") else f"{group}: {line}"


def ended_in(group: str, ending: SystemExit, values: dict[str, Any]) -> str:
    """The problem of a class that ends its process."""
    return (
        f"{group}._target_: got {values.get('_target_')}, which ended the process with exit code "
        f"{ending.code or 0} during a test call; it must return or raise an exception"
    )


def build_on_meta(config: Config) -> torch.nn.Module | None:
    """The model without memory; None where its constructor computes with values, which meta tensors do not have.

    Raises:
        ConfigError: it cannot be built, or is no model.
        RuntimeError: `TOO_LARGE_A_TENSOR`.
    """
    try:
        with torch.device("meta"), _NothingDrawn():
            model: torch.nn.Module = build("model", config.target("model"))
    except RuntimeError as error:
        if TOO_LARGE_A_TENSOR in str(error):
            raise
        return None
    require_kind("model", config.model, model, torch.nn.Module)
    return model


class _NothingDrawn(TorchFunctionMode):
    """Inside, a meta tensor that is to be filled with random numbers is left as it is: it has no values. Torch computes
    that in Python, half of the time of many layers, and imports its compiler to do so, which took a second of each
    start (2026-11-21)."""

    _DRAWS = (torch.Tensor.normal_, torch.nn.init.normal_, torch.Tensor.uniform_, torch.nn.init.uniform_)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._DRAWS and (filled := (*args, *kwargs.values())[0]).is_meta:
            return filled
        return func(*args, **kwargs)


def _model_flops(config: Config, engine: ZeroEngine, dataset: Any) -> ModelFlops | None:
    """The numbers for MFU; None if the device's peak or the model's operations are unknown."""
    peak = device_peak_flops(engine.world.device, engine.precision.compute)
    if peak is None or (model := build_on_meta(config)) is None:
        return None
    add_config_loss(config, model)
    batch = fetch_rows(dataset.train, [0], seed=config.seed, epochs=[0], step=1, collate=build_collate(config))
    per_sequence = count_flops(model, batch)
    return None if per_sequence is None else ModelFlops(per_sequence, peak * engine.world.size)
