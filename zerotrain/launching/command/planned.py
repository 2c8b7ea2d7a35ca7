"""`plan.only=true`: a plan in place of a run."""

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import Console

from zerotrain.comm.ranks.environment import RankEnvironment
from zerotrain.comm.ranks.world import choose_device
from zerotrain.config.schema import Config
from zerotrain.errors import ConfigError
from zerotrain.launching.end import exits
from zerotrain.planning.plan import PLAN_NAME, plan_run
from zerotrain.planning.table import print_plan
from zerotrain.run.preflight.room import Ranks


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


def planned(config: Config, ranks: Ranks, run_dir: Path, shown: Path) -> int:
    """Plan the run of a config that is checked, and print the plan; returns the exit code.

    Args:
        shown: the folder as it is shown.
    """
    plan = plan_run(config, ranks, choose_device(config.launch.device, 0), run_dir)
    plan.write(run_dir)
    print_plan(Console(), plan, compiles=config.model_switches["compile"])
    print(f"plan: {shown / PLAN_NAME}", flush=True)
    return exits.COMPLETED if plan.fits else exits.DOES_NOT_FIT
