"""The one place where config becomes objects."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn

from zerotrain.comm.world import World, choose_device
from zerotrain.config.checks import value_problems
from zerotrain.config.schema import Config, PrecisionConfig, TrainConfig, ZeroConfig
from zerotrain.engine.build import require_trainable
from zerotrain.engine.deferred_init import InitialValues, deferred_init
from zerotrain.engine.engine import ZeroEngine
from zerotrain.engine.kept_fp32 import dtypes_of
from zerotrain.engine.loss_scale import LossScaler
from zerotrain.engine.optimizer_factory import SAMPLE_SHAPE, build_optimizer, needing_whole
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.precision import Precision, precision_named
from zerotrain.engine.unit_forward import replace_forwards
from zerotrain.errors import ConfigError
from zerotrain.sharding.plan import STAGES, Plan
from zerotrain.sharding.units import cut_units, model_parameters
from zerotrain.training import Trainer
from zerotrain.training.flops import ModelFlops, count_flops
from zerotrain.training.metrics import device_peak_flops

ENGINE_SETTINGS = ("max_grad_norm", "on_nonfinite", "max_skipped_steps")
"""Of the `train` settings, those that the engine gets and the Trainer does not."""


def build_engine(
    model: nn.Module | Callable[[], nn.Module],
    *,
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    zero: ZeroConfig | None = None,
    precision: str | PrecisionConfig = "fp32",
    max_grad_norm: float | None = None,
    max_skipped_steps: int = 20,
    decay_all: bool = False,
    param_groups: Sequence[dict[str, Any]] | None = None,
    compile: bool = False,
    activation_checkpointing: bool = False,
    world: World | None = None,
) -> ZeroEngine:
    """Wrap a model in the sharded engine.

    Args:
        model: any nn.Module, built alike on every rank; changed in place (see `ZeroEngine`). Or a function that builds
            it: at stage 3 no rank ever holds such a model whole (see `zerotrain.engine.deferred_init`).
        optimizer: makes an element-wise optimizer of groups, such as `functools.partial(torch.optim.AdamW, lr=3e-4)`,
            or one declared to update whole tensors, such as `zerotrain.MuonWithAdamW(lr=0.02, adamw_lr=3e-4)`.
        zero: how state is sharded and moved; default `ZeroConfig()`, stage 2.
        precision: fp32, bf16 or fp16; `PrecisionConfig` has more to set.
        max_grad_norm: clip the global L2 norm of the gradient to this; None for no clipping.
        max_skipped_steps: so many in a row, skipped since their gradient is not finite, raise `TrainingError`.
        decay_all: apply weight decay to every parameter, not to matrices alone.
        param_groups: dicts of "params" (names, patterns such as "*.bias", parameters) and what differs from the
            optimizer's own settings; default: matrices, and the others without weight decay. See docs/cases.md.
        compile: torch.compile each unit's forward.
        activation_checkpointing: keep a unit's inputs alone, and compute the rest again in its backward.
        world: default: the process group the caller has initialised, or one process, on the device of the model's
            first parameter, or on torch's default device where `model` is a function.

    Raises:
        ConfigError: a setting is out of range, or the model or optimizer cannot be trained so.
    """
    zero = ZeroConfig() if zero is None else zero
    _require_kinds(model, optimizer, zero, precision)
    numerics = PrecisionConfig(precision) if isinstance(precision, str) else precision
    train = TrainConfig(max_grad_norm=max_grad_norm, max_skipped_steps=max_skipped_steps)
    if problems := value_problems(Config(zero=zero, precision=numerics, train=train)):
        raise ConfigError(*problems)
    world = world or World.current(_device_of(model))
    options = _engine_options(zero, numerics, train, world)
    model, initial = _with_initial_values(model, world, options.plan)
    replace_forwards(model, units=_patterns(zero), compile=compile, activation_checkpointing=activation_checkpointing)
    return ZeroEngine(
        model,
        optimizer=optimizer,
        world=world,
        options=options,
        decay_all=decay_all,
        param_groups=param_groups,
        loss_scaler=_loss_scaler(numerics),
        initial=initial,
    )


def _require_kinds(model: Any, optimizer: Any, zero: Any, precision: Any) -> None:
    """Check that arguments of Python are of the kind they must be.

    Raises:
        ConfigError: with those that are not.
    """
    is_model = callable(model) and not isinstance(model, ZeroEngine)
    is_precision = isinstance(precision, str | PrecisionConfig)
    kinds = (
        ("model", model, is_model, "an nn.Module, or a function that makes one"),
        ("optimizer", optimizer, callable(optimizer), "functools.partial(torch.optim.AdamW, lr=3e-4) or the like"),
        ("zero", zero, isinstance(zero, ZeroConfig), "a zerotrain.ZeroConfig, such as ZeroConfig(stage=3)"),
        ("precision", precision, is_precision, "a name such as bf16, or a PrecisionConfig"),
    )
    wrong = [
        f"{name}: got an object of type {type(value).__name__}; it must be {allowed}"
        for name, value, is_right, allowed in kinds
        if not is_right
    ]
    if wrong:
        raise ConfigError(*wrong)


def _engine_options(zero: ZeroConfig, precision: PrecisionConfig, train: TrainConfig, world: World) -> EngineOptions:
    return EngineOptions(
        plan=STAGES[zero.stage],
        precision=_dtypes(precision),
        bucket_mb=zero.bucket_mb,
        overlap=zero.overlap,
        prefetch=zero.prefetch,
        ordered=zero.reduction == "ordered" or (zero.reduction == "auto" and world.device.type == "cpu"),
        units=_patterns(zero),
        reshard_after_forward=zero.reshard_after_forward,
        max_grad_norm=train.max_grad_norm,
        max_skipped_steps=train.max_skipped_steps,
    )


def _dtypes(precision: PrecisionConfig) -> Precision:
    return precision_named(precision.name, tuple(precision.keep_fp32))


def _loss_scaler(precision: PrecisionConfig) -> LossScaler | None:
    if not _dtypes(precision).needs_loss_scale:
        return None
    return LossScaler(initial_scale=precision.initial_scale, growth_interval=precision.growth_interval)


def _device_of(model: nn.Module | Callable[[], nn.Module]) -> torch.device:
    """Where a model's first parameter lies, or will lie."""
    if not isinstance(model, nn.Module):
        return torch.get_default_device()
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _with_initial_values(
    model: nn.Module | Callable[[], nn.Module], world: World, plan: Plan
) -> tuple[nn.Module, InitialValues]:
    """The model, built if it is a function; where parameters are sharded, without their memory."""
    if isinstance(model, nn.Module):
        return model, InitialValues()
    with world.device:
        return deferred_init(model) if plan.shards_parameters else (model(), InitialValues())


def check(config: Config, num_local_ranks: int = 1) -> None:
    """Build what can be built without ranks: the model without memory, the dataset, the optimizer of one element.

    Called once, before any rank starts; it also fills the dataset's cache, so that the ranks find it there.

    Args:
        num_local_ranks: ranks this machine is to run.

    Raises:
        ConfigError: with every problem found.
    """
    problems: list[str] = []

    def attempt(group: str, build: Callable[[], object]) -> None:
        try:
            build()
        except ConfigError as error:
            problems.extend(error.problems)
        except (ValueError, TypeError, LookupError, OSError) as error:
            problems.append(_in_group(group, error, getattr(config, group)))

    attempt("launch", lambda: choose_device(config.launch.device, num_local_ranks - 1))
    built: dict[str, Any] = {}
    attempt("model", lambda: built.update(model=_try_model(config)))
    attempt("data", lambda: built.update(data=_build("data", config.data)))
    if len(built) == 2:
        attempt("data", lambda: _require_fit(**built))
    attempt("optimizer", lambda: _try_optimizer(config))
    attempt("scheduler", lambda: _build("scheduler", config.scheduler)(0, config.train.max_steps))
    if problems:
        raise ConfigError(*problems)


def run(config: Config, run_dir: Path, overrides: list[str], config_hash: str) -> dict[str, Any]:
    """Train as one rank of a run, from joining the others to result.json; return the body of that file.

    Args:
        run_dir: exists; rank 0 writes its files there.
        overrides, config_hash: repeated in result.json.
    """
    with World.from_environment(config.launch.device, config.launch.timeout_s) as world:
        torch.manual_seed(config.seed)
        engine = build_engine(
            lambda: _build("model", config.model_target),
            optimizer=_build("optimizer", config.optimizer),
            zero=config.zero,
            precision=config.precision,
            max_grad_norm=config.train.max_grad_norm,
            max_skipped_steps=1 if config.train.on_nonfinite == "stop" else config.train.max_skipped_steps,
            world=world,
            **config.model_switches,
        )
        # From here on each rank draws its own numbers (dropout); the weights were drawn alike.
        torch.manual_seed(config.seed + 1 + world.rank)
        dataset = _build("data", config.data)
        loop = {key: value for key, value in asdict(config.train).items() if key not in ENGINE_SETTINGS}
        return Trainer(
            engine=engine,
            world=world,
            dataset=dataset,
            schedule=_build("scheduler", config.scheduler),
            seed=config.seed,
            run_dir=run_dir,
            model_flops=_model_flops(config, world, dataset),
            run_facts={"stage": config.zero.stage, "overrides": overrides, "config_hash": config_hash},
            **loop,
        ).run()


def _build(group: str, values: dict[str, Any]) -> Any:
    """What `_target_` names, made from the other values.

    Raises:
        ConfigError: it cannot be found or refuses its arguments.
    """
    try:
        return instantiate(values, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        if not isinstance(cause, (ValueError, TypeError, LookupError, OSError, ImportError, InstantiationException)):
            raise cause from None
        raise ConfigError(_in_group(group, cause, values)) from cause


def _in_group(group: str, error: Exception, values: Any) -> str:
    """The first line of an error, saying which group of settings it is about; and their values, where it does not."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, TypeError | LookupError) and isinstance(values, dict):
        given = ", ".join(f"{name}={value}" for name, value in values.items() if not name.startswith("_"))
        line += f"; one of these may be of another type than it takes: {given}"
    return line if line.startswith(f"{group}.") else f"{group}: {line}"


def _patterns(zero: ZeroConfig) -> list[str] | None:
    return None if zero.units == "auto" else list(zero.units)


def _require_fit(model: nn.Module | None, data: Any) -> None:
    """Check that the model knows all tokens and positions of the data, where both tell how many there are.

    Raises:
        ConfigError: with those it does not know.
    """
    problems, kind = [], type(model).__name__
    known, given = getattr(model, "vocab_size", None), getattr(data, "vocab_size", None)
    if isinstance(known, int) and isinstance(given, int) and given > known:
        problems.append(
            f"data.vocab_size={given}, but {kind} knows {known} tokens; choose data in the model's own tokens, such as "
            "data=tokenized, or a model with as many"
        )
    known = getattr(model, "max_seq_len", None)
    if isinstance(known, int) and (given := len(data.train[0][0])) > known:
        problems.append(
            f"data.seq_len={given}, but {kind} knows {known} positions; choose data.seq_len={known} or less or a "
            f"model with more (model.max_seq_len={given}; transformers: +model.config.max_position_embeddings={given})"
        )
    if problems:
        raise ConfigError(*problems)


def _try_model(config: Config) -> nn.Module | None:
    """Run the model's constructor without memory, and look whether its switches and patterns can be followed."""
    model = _build_on_meta(config)
    if model is not None:
        parameters = model_parameters(model)
        require_trainable(model, parameters)
        dtypes_of(parameters, _dtypes(config.precision))
        replace_forwards(model, units=_patterns(config.zero), **config.model_switches)
    return model


def _try_optimizer(config: Config) -> None:
    """Let the optimizer choose what it needs whole of the model without memory, and build it for one tensor of each."""
    factory = _build("optimizer", config.optimizer)
    try:
        model = _build_on_meta(config)
    except Exception:  # which is told as the model's problem
        model = None
    units = [] if model is None else cut_units(model, model_parameters(model), _patterns(config.zero), max_numel=1)
    names = {"whole matrices"} if model is not None and needing_whole(factory, units) else set()
    for name in names | {"matrices"} if hasattr(factory, "needs_whole") else names or {"matrices"}:
        build_optimizer(factory, [{"params": [torch.zeros(SAMPLE_SHAPE)], "name": name}])


def _build_on_meta(config: Config) -> nn.Module | None:
    """The model without memory; None where its constructor computes with values, which meta tensors do not have."""
    try:
        with torch.device("meta"):
            model: nn.Module = _build("model", config.model_target)
            return model
    except RuntimeError:
        return None


def _model_flops(config: Config, world: World, dataset: Any) -> ModelFlops | None:
    """What MFU is computed from; None where the device's peak or the model's operations are not known."""
    peak = device_peak_flops(world.device, _dtypes(config.precision).compute)
    model = None if peak is None else _build_on_meta(config)
    per_sequence = None if model is None else count_flops(model, dataset.train[0])
    if peak is None or per_sequence is None:
        return None
    return ModelFlops(per_sequence=per_sequence, peak_per_s=peak * world.size)
