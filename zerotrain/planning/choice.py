"""Chooses what is `auto` in a config: the first way that fits by its plan, in the order of what a step costs.

The cost model. Each stage computes the same. Of the stages that fit, one sends least; of those that send as much, one
whose ranks share the update is faster than one where each rank updates all; of those, the lowest moves least within a
rank. Times of all stages on one host and over a link are in docs/results/summary.md. Ways that take more time at any
stage come after all stages without them.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerotrain.config.schema import Config
from zerotrain.config.words import word
from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import Optional, UntrustedFileError, read_json
from zerotrain.planning.auto import STAGE, VALUES, asked_hash, autos_in, stages_in, ways_beside_stages, with_values
from zerotrain.planning.plan import PLAN_NAME, Planner, RunPlan
from zerotrain.sharding.plan import STAGES
from zerotrain.training.figures.report import in_unit

CHOSEN = "chosen"
ASKED = "asked"
_SCHEMA = {"num_ranks": int, ASKED: Optional((str, None)), CHOSEN: Optional((dict, None))}
_MAX_NBYTES = 2**20
MORE_RANKS = (2, 4, 8, 16)
"""Times the ranks of the run, that may let it fit."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The values that a run gets for `auto`."""

    values: dict[str, Any]
    """By setting; where nothing fits, those that take least."""
    plan: RunPlan
    """The plan with these values."""
    why: str
    """A sentence."""

    def write(self, run_dir: Path, asked: Config) -> None:
        """Write plan.json, from which `as_chosen` takes the choice; what does not fit is chosen for no run."""
        self.plan.write(run_dir, **{ASKED: asked_hash(asked), CHOSEN: self.values if self.plan.fits else None})


def choose(asked: Config, config: Config, planner: Planner) -> Choice:
    """Choose the values of all that is `auto`.

    Args:
        asked: the config with its `auto`.
        config: the same, checked, with any values in their place.

    Raises:
        ConfigError: nobody can tell what fits, since the activations are unknown.
    """
    names, stages = autos_in(asked), stages_in(asked)
    for way in ways_beside_stages(asked):
        plan = planner.run(with_values(config, way))
        if unknown := next((plan.stages[each].unknown_because for each in stages), None):
            raise ConfigError(
                f"{', '.join(names)}: got auto, but {unknown} cannot be followed without values, so that activations "
                "are unknown; give a value"
            )
        fitting = [each for each in stages if plan.memory.fits(plan.stages[each])]
        taken = {each: plan.memory.taken(plan.stages[each]) for each in stages}
        stage = min(fitting, key=lambda each: _cost(plan, each)) if fitting else min(taken, key=taken.__getitem__)
        values = {name: stage if name == STAGE else way[name] for name in names}
        plan = replace(plan, stage=stage)
        if fitting:
            break
    if fitting:
        return Choice(values=values, plan=plan, why=f"auto: {chosen_named(values)}: {_why(plan, stages, fitting)}")
    why = (
        f"{', '.join(names)}: got auto, but nothing fits: with {chosen_named(values)} a rank would hold "
        f"{in_unit(taken[stage])}, of {in_unit(plan.memory.device)}; {_advice(with_values(config, values), planner)}"
    )
    return Choice(values=values, plan=plan, why=why)


def as_chosen(config: Config, run_dir: Path, num_ranks: int | None = None) -> Config:
    """The config with the values that plan.json of a run's folder has for its `auto`; as it is where there are none, or
    where they were chosen for other settings.

    Args:
        num_ranks: those that they must have been chosen for; null: any.
    """
    autos = autos_in(config)
    if not autos:
        return config
    try:
        said = read_json(run_dir / PLAN_NAME, _SCHEMA, max_nbytes=_MAX_NBYTES)
    except (OSError, UntrustedFileError):
        return config
    values: Any = said.get(CHOSEN)
    if said.get(ASKED) != asked_hash(config) or num_ranks not in (None, said["num_ranks"]):
        return config
    chosen = {name: _one_of(VALUES[name], (values or {}).get(name)) for name in autos}
    return config if None in chosen.values() else with_values(config, chosen)


def chosen_named(values: dict[str, Any]) -> str:
    """Such as zero.stage=1, model.activation_checkpointing=true."""
    return ", ".join(f"{name}={word(value)}" for name, value in values.items())


def _one_of(allowed: tuple[Any, ...], said: Any) -> Any:
    """The allowed value that a file has said; None: it is none of them. True is not 1."""
    return next((each for each in allowed if type(each) is type(said) and each == said), None)


def _cost(plan: RunPlan, stage: int) -> tuple[int, bool, int]:
    """See the module's cost model."""
    return plan.stages[stage].sent or 0, plan.num_ranks > 1 and not STAGES[stage].shards_optimizer, stage


def _why(plan: RunPlan, stages: tuple[int, ...], fitting: list[int]) -> str:
    sent = in_unit(plan.stages[plan.stage].sent or 0)
    if len(stages) == 1:
        return "of the ways that are auto, the fastest first, the first that fits"
    if plan.num_ranks == 1:
        return "one rank sends nothing and shares nothing, so that the lowest stage that fits is as good as any"
    if len(fitting) == 1:
        return f"no other stage fits; it sends {sent} a step"
    stages_fit = f"stages {', '.join(map(str, fitting))} fit"
    return (
        f"{stages_fit}; of these it sends least ({sent} a step), its ranks share the update, and no lower one does both"
    )


def _advice(config: Config, planner: Planner) -> str:
    """The smallest change that lets a run fit."""
    for told, changed, num_ranks in _changes(config, planner):
        with suppress(ConfigError):
            if planner.memory.fits(planner.stage(changed, config.zero.stages[0], num_ranks)):
                return f"{told} fits"
    return "neither activation checkpointing nor offloading nor 16 times the ranks fit; choose a smaller model or batch"


def _changes(config: Config, planner: Planner) -> Iterator[tuple[str, Config, int]]:
    num_ranks = planner.ranks.num_ranks
    recompute = {"model.activation_checkpointing": True}
    offload = {"offload.optimizer": "disk" if planner.on_host else "cpu"}
    for values in (recompute, offload, recompute | offload):
        yield chosen_named(values), with_values(config, values), num_ranks
    for times in MORE_RANKS:
        yield f"{times * num_ranks} ranks, each with as much memory,", config, times * num_ranks
