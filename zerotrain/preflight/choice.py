"""Chooses values for `auto` in a config: the first way to fit by its plan, in a stated order.

The order of ways: see `ways_beside_stages`. A way fits if any stage does.

The order of stages. Each stage computes the same. The fitting stage that sends least is taken. Among equal ones a step
is faster if the ranks share the update than if each rank updates all; then the lowest stage moves least within a rank.
Times of all stages on one host and over a link are in docs/results/summary.md, and of all ways in auto.md.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import isqrt
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from zerotrain.config.compose import checkpoint_settings, digest
from zerotrain.config.schema import Config
from zerotrain.config.words import word
from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import UntrustedFileError, read_json
from zerotrain.preflight.plan import PLAN_NAME, Planner, RunPlan
from zerotrain.preflight.rehearsal import StagePlan
from zerotrain.settings import AUTO, autos_of, value_of
from zerotrain.sharding.plan import STAGES
from zerotrain.training.report import in_unit

# Settings that may be `auto`: the values to choose from, and a config with the chosen ones.


STAGE, MICRO_BATCH = "zero.stage", "train.micro_batch_size"
TIERS = ("offload.optimizer", "offload.parameters", "offload.activations")
_ACCUMULATION = "train.gradient_accumulation_steps"
_VALUES: Mapping[str, tuple[Any, ...]] = {
    STAGE: (0, 1, 2, 3),
    "model.activation_checkpointing": (False, True),
    **dict.fromkeys(TIERS, ("device", "cpu", "disk")),
}
_ORDER = (*reversed(TIERS), "model.activation_checkpointing", MICRO_BATCH)
"""Settings: the last is the first to give way."""
_OF_A_PLAN = ("zero", "precision", "offload", "model", "loss", "data", "optimizer")
_OF_A_STEP = ("micro_batch_size", "gradient_accumulation_steps", "virtual_ranks")


def unchosen_problems(config: Config) -> list[str]:
    """A line for each `auto` where there is no run that it could be chosen for."""
    return [f"{name}: got auto, which is chosen as a run starts; it must be a value here" for name in autos_of(config)]


def allowed(config: Config, name: str) -> tuple[Any, ...]:
    """The values a run may get for `auto`: first those of less time and more memory, but for stages (their plans tell
    it). Micro-batches are of equal size, and the global batch stays."""
    if name != MICRO_BATCH:
        return _VALUES[name]
    rows = _rows_of_a_step(config)
    small = [size for size in range(1, isqrt(rows) + 1) if not rows % size]
    return tuple(sorted({*small, *(rows // size for size in small)}, reverse=True))


def _rows_of_a_step(config: Config) -> int:
    """Sequences of a virtual rank in a step."""
    size, num = config.train.micro_batch_size, max(1, config.train.gradient_accumulation_steps)
    return num if size == AUTO else num * int(size)


def values_in(config: Config, names: Iterable[str]) -> dict[str, Any]:
    """The values of some settings in a config."""
    return {name: value_of(config, name) for name in names}


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The same config with other values of some settings; `config` stays as it is, and so does the global batch."""
    values = dict(values)
    if size := values.get(MICRO_BATCH):
        values[_ACCUMULATION] = _rows_of_a_step(config) // size
    for name, value in values.items():
        group, _, field = name.partition(".")
        held: Any = getattr(config, group)
        changed: Any = held | {field: value} if isinstance(held, dict) else replace(held, **{field: value})
        config = replace(config, **{group: changed})
    return config


def with_least_memory(config: Config) -> Config:
    """The same config with the last value for each `auto`: it takes least, and is checked first."""
    return with_values(config, {name: allowed(config, name)[-1] for name in autos_of(config)})


def ways_beside_stages(config: Config, *, on_host: bool) -> list[dict[str, Any]]:
    """Values for each `auto` but the stage, in the order of trying. First a micro-batch becomes smaller, then units are
    computed again, then state leaves the device: to host memory, at last to a disk.

    Args:
        on_host: a rank computes in the host's memory: offloading to that frees nothing.
    """
    names = sorted((name for name in autos_of(config) if name != STAGE), key=_ORDER.index)
    values = {name: allowed(config, name) for name in names}
    for name in values.keys() & {*TIERS} if on_host else ():
        values[name] = ("device", "disk")
    ways = [dict(zip(names, way, strict=True)) for way in product(*values.values())]
    tiers = _VALUES[TIERS[0]]
    return sorted(ways, key=lambda way: max((tiers.index(way[name]) for name in names if name in TIERS), default=0))


def asked_hash(config: Config) -> str:
    """16 hex digits of all that a choice depends on but the ranks: two configs share them if they ask for the same."""
    values = checkpoint_settings(config)
    settings = {group: values[group] for group in _OF_A_PLAN} | {"callbacks": config.callbacks}
    settings |= {"train": {name: values["train"][name] for name in _OF_A_STEP}, "memory_gb": config.plan.memory_gb}
    return digest(settings)


class _PlanFile(TypedDict):
    """The part of plan.json that a later run in the folder reads."""

    num_ranks: int
    stages: dict[int, StagePlan]
    asked: NotRequired[str]
    """Hash of the settings with `auto`, see `asked_hash`."""
    chosen: NotRequired[dict[str, Any] | None]
    """The values for `auto`, by setting; None: nothing fits."""


_MAX_NBYTES = 2**20
MORE_RANKS = (2, 4, 8, 16)
"""Times the ranks of the run, to try whether it fits then."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Values for each `auto` of a run."""

    values: dict[str, Any]
    """By setting; if nothing fits, those of the least memory."""
    plan: RunPlan
    """The plan with these values."""
    why: str
    """A sentence; before it a line for each planned way, if more than the stage was chosen."""
    tried: list[str]
    """Those lines of ways."""
    alternatives: dict[int, int]
    """The bytes of a rank at each other stage, the best first; none unless the stage was chosen."""

    def usage(self) -> dict[str, Any]:
        """See `Memory.usage_of`."""
        plan, memory = self.plan, self.plan.memory
        budget, alternatives = round(memory.device), self.alternatives
        return memory.usage_of(plan.stages[plan.stage], plan.stage, budget=budget, alternatives=alternatives)

    def write(self, run_dir: Path, auto_config: Config) -> None:
        """Write plan.json for `as_chosen`. It has no choice if nothing fits."""
        chosen = self.values if self.plan.fits else None
        self.plan.write(run_dir, asked=asked_hash(auto_config), chosen=chosen, ways=self.tried)


def choose(auto_config: Config, config: Config, planner: Planner) -> Choice:
    """Choose a value for each `auto`.

    Args:
        auto_config: the config with its `auto`.
        config: the same, checked, with any values in their place.

    Raises:
        ConfigError: nobody can tell what fits, since the activations are unknown.
    """
    names = autos_of(auto_config)
    stages = _VALUES[STAGE] if auto_config.zero.stage == AUTO else (auto_config.zero.stages[0],)
    ways = ways_beside_stages(auto_config, on_host=planner.on_host)
    tried: list[tuple[dict[str, Any], RunPlan]] = []
    lines = []
    for way in ways:
        plan = _plan_way(with_values(config, way), planner, stages, names)
        tried.append((way, plan))
        if len(ways) > 1:
            fits = "fits" if plan.fits else "does not fit"
            lines.append(f"  {chosen_named(way)}, stage {plan.stage}: {fits}: a rank holds {in_unit(plan.nbytes)}")
        if plan.fits:
            break
    best_way, best = tried[-1] if tried[-1][1].fits else min(tried, key=lambda planned: planned[1].nbytes)
    values = {name: best.stage if name == STAGE else best_way[name] for name in names}
    chosen = with_values(config, values)
    others = planner.stages(chosen, [stage for stage in range(len(STAGES)) if stage not in best.stages])
    plan = replace(best, stages=best.stages | others)
    other_stages = sorted({*stages} - {best.stage}, key=lambda stage: _cost(plan.stages[stage], stage, plan.num_ranks))
    alternatives = {stage: plan.memory.nbytes_of(plan.stages[stage]) for stage in other_stages}
    if best.fits:
        reasons = ["the first of the ways that fits"] if len(ways) > 1 else []
        reasons += [_reason(plan, best.fitting)] if STAGE in names else []
        why = "\n".join([*lines, f"auto: {chosen_named(values)}: {'; '.join(reasons)}"])
    else:
        why = (
            f"{', '.join(names)}: got auto, but nothing fits: with {chosen_named(values)} a rank would hold "
            f"{in_unit(best.nbytes)}, of {in_unit(plan.memory.device)}; {_advice(chosen, planner)}"
        )
    return Choice(values=values, plan=plan, why=why, tried=lines, alternatives=alternatives)


def _plan_way(config: Config, planner: Planner, stages: tuple[int, ...], names: list[str]) -> RunPlan:
    """The plan of a way at the best stage it fits at; if it fits at none, at the one of least memory."""
    plans, memory, num_ranks = planner.stages(config, stages), planner.memory, planner.ranks.num_ranks
    if unknown := next((plan.unknown_because for plan in plans.values()), None):
        raise ConfigError(
            f"{', '.join(names)}: got auto, but {unknown} cannot be followed without values, so that activations "
            "are unknown; give a value"
        )
    least = min(stages, key=lambda stage: memory.nbytes_of(plans[stage]))
    plan = RunPlan(stage=least, num_ranks=num_ranks, memory=memory, stages=plans)
    if not plan.fitting:
        return plan
    return replace(plan, stage=min(plan.fitting, key=lambda stage: _cost(plans[stage], stage, num_ranks)))


def as_chosen(config: Config, run_dir: Path, num_ranks: int | None = None) -> Config:
    """The config with the values for its `auto` from plan.json of a run's folder; as it is if there are none, or if
    they were chosen for other settings.

    Args:
        num_ranks: they must have been chosen for this number; None: any.
    """
    autos = autos_of(config)
    if not autos:
        return config
    try:
        plan_file: _PlanFile = read_json(run_dir / PLAN_NAME, _PlanFile, max_nbytes=_MAX_NBYTES)
    except (OSError, UntrustedFileError):
        return config
    if plan_file.get("asked") != asked_hash(config) or num_ranks not in (None, plan_file["num_ranks"]):
        return config
    values = plan_file.get("chosen") or {}
    for name in autos:
        choices = [(type(choice), choice) for choice in allowed(config, name)]
        if (type(values.get(name)), values.get(name)) not in choices:  # True is not 1
            return config
    return with_values(config, {name: values[name] for name in autos})


def chosen_named(values: dict[str, Any]) -> str:
    """Such as zero.stage=1, model.activation_checkpointing=true."""
    return ", ".join(f"{name}={word(value)}" for name, value in values.items())


def _cost(plan: StagePlan, stage: int, num_ranks: int) -> tuple[int, bool, int]:
    """See the order of stages above."""
    return plan.sent or 0, num_ranks > 1 and not STAGES[stage].shards_optimizer, stage


def _reason(plan: RunPlan, fitting: list[int]) -> str:
    """Why its stage is the best of the fitting ones."""
    sent = in_unit(plan.stages[plan.stage].sent or 0)
    if plan.num_ranks == 1:
        return "one rank sends nothing and shares nothing, so that the lowest stage that fits is as good as any"
    if len(fitting) == 1:
        return f"no other stage fits; it sends {sent} a step"
    stages_fit = f"stages {', '.join(map(str, fitting))} fit"
    return (
        f"{stages_fit}; of these it sends least ({sent} a step), its ranks share the update, and no lower one does both"
    )


def _advice(config: Config, planner: Planner) -> str:
    """The smallest change to let a run fit."""
    num_ranks = planner.ranks.num_ranks
    recompute = {"model.activation_checkpointing": True}
    offload = {"offload.optimizer": "disk" if planner.on_host else "cpu"}
    savings: list[dict[str, Any]] = [recompute, offload, recompute | offload]
    changes = [
        (chosen_named(values), with_values(config, values), num_ranks)
        for values in savings
        if not values.items() <= values_in(config, values).items()
    ]
    changes += [
        (f"{times * num_ranks} ranks, each with as much memory,", config, times * num_ranks) for times in MORE_RANKS
    ]
    for change, changed, num in changes:
        with suppress(ConfigError):
            if planner.memory.fits(planner.stage(changed, config.zero.stages[0], num)):
                return f"{change} fits"
    return "neither activation checkpointing nor offloading nor 16 times the ranks fit; choose a smaller model or batch"
