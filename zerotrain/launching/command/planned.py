"""`plan.only=true`: a plan in place of a run; and what is `auto`, chosen from plans before it."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import Console

from zerotrain.comm.environment import RankEnvironment
from zerotrain.comm.world import choose_device
from zerotrain.config.schema import Config
from zerotrain.device.processes import beside
from zerotrain.errors import ConfigError
from zerotrain.launching.end import exits
from zerotrain.preflight.choice import Choice, as_chosen, choose, chosen_named, values_in, with_values
from zerotrain.preflight.plan import PLAN_NAME, Memory, Planner, print_plan
from zerotrain.preflight.rehearsal import StagePlan
from zerotrain.preflight.room import Ranks
from zerotrain.settings import autos_of
from zerotrain.training.report import PlannedUsage


def require_alone(config: Config | None) -> None:
    """Make sure that one process plans, once, if any does.

    Args:
        config: None: it could not be read.

    Raises:
        ConfigError: it is a job of a sweep, or a rank of torchrun.
    """
    if config is None or not config.plan.only:
        return
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ConfigError("plan.only: got true in a sweep; a plan is of one run and shows all stages: leave out -m")
    if (ranks := RankEnvironment.read()) is not None:
        raise ConfigError(f"plan.only: got true under {ranks.starter}; a plan starts no rank: use python launch.py")


def planned(asked: Config, config: Config, ranks: Ranks, run_dir: Path, shown: Path) -> int:
    """Plan the run of a config that is checked, and print the plan; returns the exit code.

    Args:
        asked: the config with its `auto`.
        config: the same, checked, with any values in their place.
        shown: the folder as it is shown.
    """
    planner = Planner(config, ranks, _memory(config, ranks), run_dir)
    choice = choose(asked, config, planner) if autos_of(asked) else None
    plan = planner.run(config) if choice is None else choice.plan
    print_plan(Console(), plan, config)
    if choice is None:
        plan.write(run_dir)
    else:
        print(choice.why)
        choice.write(run_dir, asked)
    print(f"plan: {shown / PLAN_NAME}", flush=True)
    return exits.COMPLETED if plan.fits else exits.DOES_NOT_FIT


def chosen(asked: Config, config: Config, ranks: Ranks, run_dir: Path) -> tuple[Config, dict[str, Any] | None]:
    """The config that a run has, and its `PlannedUsage`; None: nobody has asked for a plan. Each `auto` becomes what an
    earlier run in the folder had; without one it is chosen: the plans and the choice are printed and written there.

    Args:
        asked: the config with its `auto`.
        config: the same, checked, with any values in their place, or those of the earlier run.

    Raises:
        ConfigError: nothing fits.
    """
    names = autos_of(asked)
    if not names and not config.plan.compare:
        return config, None
    memory = _memory(config, ranks)
    if autos_of(as_chosen(asked, run_dir, ranks.num_ranks)):
        return _chosen_now(asked, config, ranks, memory, run_dir)
    if names:
        print(f"auto: {chosen_named(values_in(config, names))}, as {PLAN_NAME} of the run's folder has it", flush=True)
    stage = config.zero.stages[0]
    plan = _in_a_child(lambda: asdict(Planner(config, ranks, memory, run_dir).stage(config, stage)))
    return config, asdict(_usage(StagePlan(**plan), stage, memory))


def _chosen_now(
    asked: Config, config: Config, ranks: Ranks, memory: Memory, run_dir: Path
) -> tuple[Config, dict[str, Any]]:
    """`chosen`, where no earlier run in the folder has chosen."""
    found = _in_a_child(lambda: asdict(choose(asked, config, Planner(config, ranks, memory, run_dir))))
    choice = Choice.of(found)
    if not choice.plan.fits:
        raise ConfigError(choice.why)
    print_plan(Console(), choice.plan, config)
    print(choice.why, flush=True)
    choice.write(run_dir, asked)
    config, plan = with_values(config, choice.values), choice.plan.stages[choice.plan.stage]
    others = {str(stage): nbytes for stage, nbytes in choice.alternatives.items()}
    of_choice = {"memory": round(memory.device), "alternatives": others}
    return config, asdict(_usage(plan, config.zero.stages[0], memory)) | of_choice


def _in_a_child(compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Compute it in a child: plans leave some 90 MB behind in a process, and this one may be a rank of torchrun."""
    with beside(compute) as computed:
        return computed()


def _memory(config: Config, ranks: Ranks) -> Memory:
    return Memory.of(config, choose_device(config.launch.device, 0), ranks.num_local)


def _usage(plan: StagePlan, stage: int, memory: Memory) -> PlannedUsage:
    """A plan as the report of a run has it."""
    return PlannedUsage(
        stage=stage,
        parameters=plan.parameters,
        gradients=plan.gradients,
        optimizer=plan.optimizer,
        offloaded=plan.host + plan.disk,
        scratch=plan.scratch,
        sent=plan.sent,
        peak=None if plan.peak is None else memory.taken(plan),
    )
