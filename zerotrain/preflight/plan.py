"""The plan of a run at each stage: the bytes it holds and sends, whether they fit, and a table of them."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from zerotrain.config.schema import Config
from zerotrain.data.items import first_batches
from zerotrain.device.kinds import device_of
from zerotrain.device.memory import KEPT_NBYTES, own_nbytes
from zerotrain.device.processes import compute_in_child, num_cores, one_thread
from zerotrain.files.lock import whole
from zerotrain.preflight.rehearsal import Links, Rehearsals, StagePlan
from zerotrain.preflight.room import Ranks, Room
from zerotrain.run.factory import build_collate, build_data, build_optimizer_factory
from zerotrain.sharding.plan import STAGES
from zerotrain.training.report import in_unit, unit_of

PLAN_NAME = "plan.json"
OF_A_CARD = 0.9
"""From this part of a card's memory on a stage is tight: the rest is for what no plan counts."""
NOT_COUNTED = ("CUDA context", "NCCL buffers", "allocator fragmentation")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory for a rank, in bytes."""

    device: float
    host: float
    is_card: bool
    """Whether `device` is that of a card: of this machine's GPU, or as `plan.memory_gb` says."""
    on_host: bool
    """Whether both are the same memory."""
    process: int
    """Taken by a rank beside its tensors: on the CPU what its process has made of its imports, without their files
    (ranks share them, and the system may drop them); on a GPU what kernels keep."""
    cache: int
    """Beside both on the CPU, see `KEPT_NBYTES`; none on a GPU, whose allocator is not counted."""

    @classmethod
    def of_run(cls, config: Config, device: torch.device, num_local: int) -> "Memory":
        """As `plan.memory_gb` says; else of this machine."""
        room, memory_gb, is_host = Room.of_machine(device, num_local), config.plan.memory_gb, device_of(device).is_host
        available = room.host if is_host else room.gpu
        return cls(
            device=available if memory_gb is None else memory_gb * 1e9,
            host=room.host,
            is_card=memory_gb is not None or not is_host,
            on_host=is_host,
            process=own_nbytes() if is_host else device_of(device).kernels_nbytes,
            cache=KEPT_NBYTES if is_host else 0,
        )

    def for_choice(self) -> "Memory":
        """That of a run which chooses for itself: no stage that is tight on a GPU. On the CPU the process is counted,
        and nothing more is left free."""
        return self if self.on_host else replace(self, device=OF_A_CARD * self.device, is_card=False)

    @property
    def overhead(self) -> int:
        """Bytes of no tensor."""
        return self.process + self.cache

    def nbytes_of(self, plan: StagePlan) -> int:
        """Bytes a plan takes of the memory a rank computes in."""
        return plan.at_least + self.overhead + (plan.host if self.on_host else 0)

    def usage_of(
        self, plan: StagePlan, stage: int, *, budget: int | None = None, alternatives: Mapping[int, int] | None = None
    ) -> dict[str, Any]:
        """A plan as result.json has it, in bytes of the rank that holds most: {stage, parameters, gradients, optimizer,
        offloaded, scratch}; {sent} to other ranks in a step, and the part of it from one replica of sharded parameters
        to another {across}; {peak}, with the process itself; {memory} and {alternatives}. None: not known.

        Args:
            budget: bytes that a rank may hold, where the stage was chosen by it.
            alternatives: the peak that was planned for each other stage, the best first, where the stage was chosen.
        """
        names = ("parameters", "gradients", "optimizer", "scratch", "sent", "across")
        return {name: getattr(plan, name) for name in names} | {
            "stage": stage,
            "offloaded": plan.host + plan.disk,
            "peak": None if plan.peak is None else self.nbytes_of(plan),
            "memory": budget,
            "alternatives": {str(other): nbytes for other, nbytes in (alternatives or {}).items()},
        }

    def fits(self, plan: StagePlan) -> bool:
        """Whether a rank has memory for a plan, as far as its bytes are known."""
        return self.nbytes_of(plan) <= self.device and (self.on_host or plan.host <= self.host)

    def is_tight(self, plan: StagePlan) -> bool:
        """Whether a plan that fits leaves less of a card than what is not counted may take."""
        return self.is_card and self.fits(plan) and self.nbytes_of(plan) >= OF_A_CARD * self.device


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of each stage, of one run."""

    stage: int
    """The stage of the config, or the chosen one."""
    num_ranks: int
    memory: Memory
    stages: dict[int, StagePlan]

    @property
    def fits(self) -> bool:
        """Whether the plan of its stage fits."""
        return self.memory.fits(self.stages[self.stage])

    @property
    def fitting(self) -> list[int]:
        """The stages with a plan that fits."""
        return [stage for stage, plan in sorted(self.stages.items()) if self.memory.fits(plan)]

    @property
    def nbytes(self) -> int:
        """Bytes of a rank at its stage."""
        return self.memory.nbytes_of(self.stages[self.stage])

    def write(self, run_dir: Path, **choice: Any) -> None:
        """Write plan.json.

        Args:
            choice: what of a `Choice` is written too.
        """
        memory = self.memory
        body = {
            "stage": self.stage,
            "num_ranks": self.num_ranks,
            "memory": round(memory.device),
            "process": memory.process,
            "kept": memory.cache,
            "not_counted": NOT_COUNTED if memory.is_card or not memory.on_host else (),
            "stages": {
                stage: asdict(plan) | {"fits": memory.fits(plan), "tight": memory.is_tight(plan)}
                for stage, plan in sorted(self.stages.items())
            },
        }
        with whole(run_dir / PLAN_NAME) as file:
            file.write(json.dumps(body | choice, indent=2).encode() + b"\n")


class Planner:
    """Plans runs of one config, and of others with the same data, optimizer and launch.

    Args:
        config: checked.
        memory: looked at in a process like those of the ranks.
        run_dir: see `Rehearsals`.
    """

    def __init__(self, config: Config, ranks: Ranks, memory: Memory, run_dir: Path) -> None:
        self.ranks, self.memory, self.on_host = ranks, memory, memory.on_host
        optimizer = build_optimizer_factory(config)
        with one_thread():  # `stages` forks, and a long row is copied by several
            train, collate = build_data(config).train, build_collate(config)
            row = first_batches(train, "data.train", seed=config.seed, collate=collate)[0]
            self._of_config = Rehearsals.of_run(config, self._links(config, ranks.num_ranks), row, optimizer, run_dir)

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
        with ExitStack() as children:
            readers = []
            for start in range(1, num):
                work = partial(_plan_stages, rehearsals, stages[start::num])
                readers.append(children.enter_context(compute_in_child(work)))
            plans = _plan_stages(rehearsals, stages[::num]) + [plan for read in readers for plan in read()]
        by_stage = {stage: StagePlan(**plan) for stage, plan in plans}
        return {stage: by_stage[stage] for stage in stages}

    def run(self, config: Config) -> RunPlan:
        """The plans of all stages."""
        stages = self.stages(config, range(len(STAGES)))
        return RunPlan(stage=config.zero.stages[0], num_ranks=self.ranks.num_ranks, memory=self.memory, stages=stages)

    def _rehearsals(self, config: Config, num_ranks: int | None = None) -> Rehearsals:
        links = self._links(config, num_ranks or self.ranks.num_ranks)
        return replace(self._of_config, config=config, links=links)

    def _links(self, config: Config, num_ranks: int) -> Links:
        return Links.of_run(config, num_ranks, on_host=self.on_host, num_local=self.ranks.num_local)


def _plan_stages(rehearsals: Rehearsals, stages: Sequence[int]) -> list[tuple[int, dict[str, Any]]]:
    """(stage, its plan)."""
    return [(stage, asdict(rehearsals.plan(stage))) for stage in stages]


# A plan, printed.


COLUMNS = ("parameters", "gathered", "gradients", "optimizer", "scratch", "activations", "peak", "sent")
HEADS = {"parameters": "para-\nmeters", "gathered": "gath-\nered", "gradients": "gra-\ndients"}
HEADS |= {"optimizer": "opti-\nmizer", "activations": "activ-\nations", "sent": "sent/\nstep"}

PARTS, MARKS = ("parameters", "gradients", "optimizer", "all else at the peak"), ("█▓▒░", "#=-.")
BAR_WIDTH = 60
"""Characters of the longest bar."""


def print_plan(console: Console, plan: RunPlan, config: Config) -> None:
    """Print a row for each stage, readable at 80 columns, and the answer in a line.

    Args:
        config: of the plan.
    """
    most = max(max(getattr(stage_plan, name) or 0 for name in COLUMNS) for stage_plan in plan.stages.values())
    unit, unit_nbytes = unit_of(most)
    ranks = f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}"
    table = Table(title=f"{unit} of a rank, {ranks}", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("stage", justify="right")
    for name in COLUMNS:
        table.add_column(HEADS.get(name, name), justify="right")
    table.add_column("fits", justify="right")
    stages = sorted(plan.stages.items())
    columns = []
    for name in COLUMNS:
        amounts = [None if (n := getattr(stage_plan, name)) is None else n / unit_nbytes for _, stage_plan in stages]
        largest = max((amount for amount in amounts if amount), default=0.0)
        # Four digits of the largest, and as many behind the point in each row: 80 columns have room for 6 characters.
        num_digits = min(4, max(0, 3 - math.floor(math.log10(largest)))) if largest else 0
        columns.append(["?" if amount is None else f"{amount:.{num_digits}f}" for amount in amounts])
    for (stage, stage_plan), *cells in zip(stages, *columns, strict=True):
        is_tight, fits = plan.memory.is_tight(stage_plan), plan.memory.fits(stage_plan)
        table.add_row(str(stage), *cells, "tight" if is_tight else "yes" if fits else "no")
    console.print(table)
    for line in (*_bars(plan, MARKS[-1 if console.options.ascii_only else 0]), *_lines(plan, config)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _bars(plan: RunPlan, marks: str) -> Iterator[str]:
    """A bar for each stage: the state and all else at the peak, without the process itself. A `|` is the end of the
    memory left for them."""
    process = plan.memory.overhead
    room, longest = plan.memory.device - process, max(map(plan.memory.nbytes_of, plan.stages.values())) - process
    for stage, stage_plan in sorted(plan.stages.items()):
        state = (stage_plan.parameters, stage_plan.gradients, stage_plan.optimizer)
        bar, held = "", 0
        for mark, nbytes in zip(marks, (*state, plan.memory.nbytes_of(stage_plan) - process - sum(state)), strict=True):
            held += nbytes
            bar += mark * (round(BAR_WIDTH * held / longest) - len(bar))
        limit = max(0, round(BAR_WIDTH * room / longest))
        if limit < BAR_WIDTH:
            bar = f"{bar.ljust(limit)[:limit]}|{bar[limit:]}"
        yield f"stage {stage}  {bar}"
    yield "  ".join(f"{mark} {name}" for mark, name in zip(marks, PARTS, strict=True)) + "\n"


def _lines(plan: RunPlan, config: Config) -> Iterator[str]:
    stage_plan, memory = plan.stages[plan.stage], plan.memory
    if stage_plan.host or stage_plan.disk:
        tiers = [
            f"{in_unit(nbytes)} in {where}"
            for where, nbytes in (("host memory", stage_plan.host), ("files", stage_plan.disk))
            if nbytes
        ]
        yield (
            f"offloaded of a rank: {', '.join(tiers)}; a step fetches {in_unit(stage_plan.fetched)} and stores "
            f"{in_unit(stage_plan.stored)}"
        )
    if stage_plan.sums:
        yield f"scratch holds {in_unit(stage_plan.sums)} of sums of micro-batches and virtual ranks"
    if stage_plan.across:
        yield f"a step sends {in_unit(stage_plan.across)} of its bytes from one replica of the parameters to another"
    yield f"largest unit: {in_unit(stage_plan.largest_unit)}"
    if stage_plan.unknown_because is not None:
        yield f"warning: activations are unknown: {stage_plan.unknown_because} cannot be followed without values"
    if config.switches("model")["compile"]:
        yield "model.compile=true: planned uncompiled, and compiled units save the same or less"
    owner = "of the process itself" if memory.on_host else "of cuBLAS"
    overhead = memory.overhead
    process = f" with {in_unit(overhead)} {owner}" if overhead else ""
    where = "" if stage_plan.peak_phase is None else f" in its {stage_plan.peak_phase}"
    least = "at least " if stage_plan.peak is None else ""
    if memory.is_card or not memory.on_host:
        yield f"not counted: {', '.join(NOT_COUNTED)}; from {OF_A_CARD:.0%} of a card a stage is tight"
    is_tight = memory.is_tight(stage_plan)
    yield (
        f"stage {plan.stage} {'is tight' if is_tight else 'fits' if plan.fits else 'does not fit'}: a rank holds "
        f"{least}{in_unit(plan.nbytes)}{where}{process}, of {in_unit(memory.device)}"
    )
    if not plan.fits:
        savings = ["train.micro_batch_size"]
        if not stage_plan.recomputes:
            savings.append("model.activation_checkpointing=true")
        if config.precision.name == "fp32":
            savings.append("precision=bf16")
        if not memory.on_host and config.offload.optimizer == "device":
            savings.append("offload.optimizer=cpu")
        answer = f"zero.stage={plan.fitting[0]} fits" if plan.fitting else "no stage fits"
        yield f"next: {answer}; less memory take: a smaller {', '.join(savings)}"
