"""The plan of a run at each stage: what it holds and sends, and whether that fits."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zerotrain.config.schema import Config
from zerotrain.data.items import first_batches
from zerotrain.device.kinds import device_of
from zerotrain.device.memory import KEPT_NBYTES, own_nbytes
from zerotrain.device.processes import beside, num_cores, one_thread
from zerotrain.files.lock import whole
from zerotrain.planning.optimizer import look_at
from zerotrain.planning.rehearsal import Rehearsals, StagePlan
from zerotrain.planning.wire import Links
from zerotrain.run.factory import build_collate, build_data, build_optimizer_factory
from zerotrain.run.preflight.memory_room import Room
from zerotrain.run.preflight.room import Ranks
from zerotrain.sharding.plan import STAGES

PLAN_NAME = "plan.json"
OF_A_GPU = 0.9
"""So much of a GPU's memory is for tensors; the rest is for its context, communicators, and what allocators keep."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a rank can have."""

    device: float
    host: float
    on_host: bool
    """Whether both are the same memory."""
    process: int
    """Beside its tensors a rank takes these: on the CPU what its process has made of its imports, without their files,
    which ranks share and the system may drop; on a GPU what kernels keep."""
    kept: int
    """Beside both on the CPU, see `KEPT_NBYTES`; none on a GPU, where `OF_A_GPU` leaves its allocator room."""

    @classmethod
    def of(cls, config: Config, device: torch.device, num_local: int) -> "Memory":
        """As `plan.memory_gb` says; else of this machine."""
        room, given, on_host = Room.of_machine(device, num_local), config.plan.memory_gb, device_of(device).is_host
        there = room.host if on_host else room.gpu * OF_A_GPU
        return cls(
            device=there if given is None else given * 1e9,
            host=room.host,
            on_host=on_host,
            process=own_nbytes() if on_host else device_of(device).kernels_nbytes,
            kept=KEPT_NBYTES if on_host else 0,
        )

    @property
    def beside(self) -> int:
        """Bytes that are no tensors."""
        return self.process + self.kept

    def taken(self, plan: StagePlan) -> int:
        """Bytes of the memory that a rank computes in."""
        return plan.at_least + self.beside + (plan.host if self.on_host else 0)

    def fits(self, plan: StagePlan) -> bool:
        """Whether a rank can have all that it holds, as far as it is known."""
        return self.taken(plan) <= self.device and (self.on_host or plan.host <= self.host)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of each stage, of one run."""

    stage: int
    """The one that is asked for, or was chosen."""
    num_ranks: int
    memory: Memory
    stages: Mapping[int, StagePlan]

    @property
    def fits(self) -> bool:
        """Whether that stage does."""
        return self.memory.fits(self.stages[self.stage])

    def write(self, run_dir: Path, **more: Any) -> None:
        """Write plan.json.

        Args:
            more: further entries.
        """
        stages = {
            str(stage): asdict(plan) | {"fits": self.memory.fits(plan)} for stage, plan in sorted(self.stages.items())
        }
        body: dict[str, Any] = {
            "stage": self.stage,
            "num_ranks": self.num_ranks,
            "memory": round(self.memory.device),
            "process": self.memory.process,
            "kept": self.memory.kept,
            "stages": stages,
        }
        with whole(run_dir / PLAN_NAME) as file:
            file.write((json.dumps(body | more, indent=2) + "\n").encode())


class Planner:
    """Plans runs of one config, and of others with the same data, optimizer and launch.

    Args:
        config: checked.
        memory: looked at in a process like those of the ranks.
        run_dir: see `Rehearsals`.
    """

    def __init__(self, config: Config, ranks: Ranks, memory: Memory, run_dir: Path) -> None:
        self.ranks, self.memory, self.on_host, self._run_dir = ranks, memory, memory.on_host, run_dir
        self._optimizer = build_optimizer_factory(config)
        with one_thread():  # `stages` forks, and a long row is copied by several
            train, collate = build_data(config).train, build_collate(config)
            self._row = first_batches(train, "data.train", seed=config.seed, collate=collate)[0]
            self._seen = look_at(self._optimizer, on_host=self.on_host)

    def stage(self, config: Config, stage: int, num_ranks: int | None = None) -> StagePlan:
        """The plan of a stage, as `Rehearsals` makes it.

        Args:
            num_ranks: null: those of the run; more: on further machines.

        Raises:
            ConfigError: the model cannot be built without memory, or not be trained so.
        """
        return self._rehearsals(config, num_ranks).plan(stage)

    def stages(self, config: Config, stages: Sequence[int]) -> dict[int, StagePlan]:
        """The plans of several stages, made on several cores, in children of this process. Raises as `stage`."""
        num, rehearsals = max(1, min(num_cores(), len(stages))), self._rehearsals(config)
        some = partial(_planned, rehearsals)
        with ExitStack() as children:
            others = [children.enter_context(beside(partial(some, stages[first::num]))) for first in range(1, num)]
            plans = some(stages[::num]) + [plan for told in others for plan in told()]
        by_stage = {stage: StagePlan(**plan) for stage, plan in plans}
        return {stage: by_stage[stage] for stage in stages}

    def run(self, config: Config) -> RunPlan:
        """The plans of all stages."""
        stages = self.stages(config, range(len(STAGES)))
        return RunPlan(stage=config.zero.stages[0], num_ranks=self.ranks.num_ranks, memory=self.memory, stages=stages)

    def _rehearsals(self, config: Config, num_ranks: int | None = None) -> Rehearsals:
        reduction, on_host = config.zero.reduction, self.on_host
        ordered = reduction in ("ordered", "fp32") or (reduction == "auto" and on_host)
        num = self.ranks.num_ranks if num_ranks is None else num_ranks
        links = Links(num, on_host, ordered)
        return Rehearsals.of(config, links, self._row, self._optimizer, self._seen, self._run_dir)


def _planned(rehearsals: Rehearsals, stages: Sequence[int]) -> list[tuple[int, dict[str, Any]]]:
    """(stage, its plan)."""
    return [(stage, asdict(rehearsals.plan(stage))) for stage in stages]
