"""Carrying out one case: start, be killed, start again, until the run completes; then look at what it has become."""

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import starts
from tests.chaos.places import BY_NAME
from tests.chaos.plan import MAX_STEPS, Case, schedule_from
from tests.chaos.strike import forget_processes, plan_strikes, struck_in
from zerotrain.checkpoint import verify
from zerotrain.checkpoint.folder import CHECKPOINTS, checkpoints_in
from zerotrain.errors import CheckpointError

KEEP = 2
SETTINGS = (
    "hydra.run.dir=run",
    "launch.device=cpu",
    "launch.threads_per_rank=1",
    "launch.timeout_s=60",
    "data=synthetic",
    "data.num_sequences=64",
    "data.seq_len=16",
    "model=mlp",
    "model.hidden_size=32",
    "zero.bucket_mb=0.01",
    "train.micro_batch_size=2",
    "train.gradient_accumulation_steps=2",
    "train.eval_every=2",
    "train.eval_batches=1",
    "train.log_every=1",
    "train.sample_tokens=0",
    "checkpoint.every=1",
    f"checkpoint.keep={KEEP}",
    "checkpoint.resume=auto",
)
"""A run of a second: several buckets, micro-batches, evaluations, and a save beside each step."""
COMPARED = ("step", "train_loss", "val_loss", "grad_norm", "lr", "epoch", "tokens", "skipped_steps")
"""Of a line of metrics.jsonl: all that is no time."""
IN_A_RUN = {
    ".hydra",
    ".lock",
    "alive",
    "checkpoints",
    "config.yaml",
    "metrics.jsonl",
    "ranks",
    "result.json",
    "steps.jsonl",
}


@dataclass
class Outcome:
    """What came of a case."""

    case: Case
    num_struck: int = 0
    """The first so many of its kills have struck; the others never did, since their places were not passed."""
    restarts: dict[int, int] = field(default_factory=dict)
    """By the number of the kill that made them necessary, those of the launcher included."""
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Undisturbed:
    """What the run is that nobody has killed."""

    weights_sha256: str
    metrics: list[dict[str, Any]]

    @classmethod
    def run(cls, folder: Path, virtual_ranks: int) -> "Undisturbed":
        """At stage 2, with as many ranks as virtual ones."""
        _prepare(folder)
        arguments = _arguments(virtual_ranks, 2, virtual_ranks, "checkpoint.every=null", "checkpoint.save_at_end=false")
        code = starts.start(arguments, folder, out=folder / "start")
        assert code == 0, (folder / "start.err").read_text()
        return cls(_result(folder)["weights_sha256"], _metrics(folder))


def carry_out(case: Case, folder: Path, undisturbed: Undisturbed) -> Outcome:
    """Carry out a case in a folder of its own."""
    outcome = Outcome(case)
    _prepare(folder)
    plan_strikes(folder, list(case.strikes))
    try:
        stage = _run_until_completed(case, folder, outcome)
        outcome.problems += problems_of_run(folder, undisturbed)
        outcome.problems += problems_of_stages(folder, schedule_from(stage) if case.changes_stage else {0: stage})
        if _has_left_overs(folder):  # which are the business of the next save
            code = starts.start(_of_last(case, MAX_STEPS + 1), folder, out=folder / "one-more")
            outcome.problems += [] if code == 0 else [f"one step more: exit code {code}: {_said(folder / 'one-more')}"]
        outcome.problems += problems_of_folder(folder, case)
    except (AssertionError, OSError, ValueError) as error:
        outcome.problems.append(str(error))
    outcome.num_struck = len(struck_in(folder))
    return outcome


def _prepare(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tmp").mkdir(parents=True)
    plan_strikes(folder, [])


def _of_case(case: Case, stage: int, num_ranks: int, *more: str, max_steps: int = MAX_STEPS) -> list[str]:
    if case.changes_stage:
        given = ",".join(f"{step}:{stage}" for step, stage in schedule_from(stage).items())
        more = (*more, f"zero.schedule={{{given}}}")
    return _arguments(case.virtual_ranks, stage, num_ranks, *more, max_steps=max_steps)


def _arguments(virtual_ranks: int, stage: int, num_ranks: int, *more: str, max_steps: int = MAX_STEPS) -> list[str]:
    own = (
        f"train.virtual_ranks={virtual_ranks}",
        f"train.max_steps={max_steps}",
        f"zero.stage={stage}",
        f"launch.nproc_per_node={num_ranks}",
    )
    given = {each.partition("=")[0] for each in more}
    return [*(each for each in SETTINGS if each.partition("=")[0] not in given), *own, *more]


def _of_last(case: Case, max_steps: int) -> list[str]:
    return _of_case(case, case.last_stage, case.last_num_ranks, max_steps=max_steps)


def _run_until_completed(case: Case, folder: Path, outcome: Outcome) -> int:
    """The stage of the start that has completed."""
    struck_at = case.last_stage
    for number in range(len(case.strikes) + 2):
        num_struck = len(struck_in(folder))
        stage, arguments = case.last_stage, _of_last(case, MAX_STEPS)
        if num_struck < len(case.strikes):
            strike = case.strikes[num_struck]
            stage = strike.stage
            more = [f"launch.max_restarts={len(case.strikes)}"] if case.by_restart else []
            arguments = _of_case(case, strike.stage, strike.num_ranks, *more)
            if BY_NAME[strike.place].kind == "aside":
                _damage_newest(folder)
        forget_processes(folder)
        out, before = folder / f"start-{number}", _temporary(folder)
        code = starts.start(arguments, folder, out=out)
        # A launcher that was killed could not remove its own.
        left = [*_in_shared_memory(folder), *(sorted(_temporary(folder) - before) if code >= 0 else ())]
        outcome.problems += [f"left by start {number}, in /dev/shm or $TMPDIR: {left}"] if left else []
        newly_struck = len(struck_in(folder)) - num_struck
        by_launcher = _said(out).count("; restart ")
        for index in range(by_launcher):
            outcome.restarts[num_struck + index] = 1
        if code == 0:
            return stage
        if newly_struck == 0 and number > 0 and "holds a completed run with other settings" in _said(out):
            return struck_at  # killed behind its result: a run that has completed is never trained again
        struck_at = stage
        assert newly_struck > 0, f"start {number} ended with exit code {code}, and nobody had killed it: {_said(out)}"
        outcome.restarts[num_struck + newly_struck - 1] = 1
    raise AssertionError(f"has not completed: {_said(out)}")


def _damage_newest(folder: Path) -> None:
    """As a power cut may have it."""
    found = checkpoints_in(folder / "run" / CHECKPOINTS)
    if len(found) > 1:
        path = found[-1] / "rank-00000.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def problems_of_run(folder: Path, undisturbed: Undisturbed) -> list[str]:
    """Wherein a run that has completed is another than the undisturbed one."""
    problems = []
    result = _result(folder)
    if (result["status"], result["steps"]) != ("completed", MAX_STEPS):
        problems.append(f"result.json says {result['status']} after {result['steps']} steps: {result['error']}")
    if result["weights_sha256"] != undisturbed.weights_sha256:
        problems.append(f"weights_sha256 is {result['weights_sha256']}, and {undisturbed.weights_sha256} undisturbed")
    if (metrics := _metrics(folder)) != undisturbed.metrics:
        different = [str(line) for line in metrics if line not in undisturbed.metrics]
        steps = [line["step"] for line in metrics]
        problems.append(f"metrics.jsonl has the steps {steps}, and others than undisturbed: {different}")
    return problems


def problems_of_stages(folder: Path, stages: dict[int, int]) -> list[str]:
    """Whether a run has told each change of its stage once, and is at the last.

    Args:
        stages: steps done, and the stage from there on.
    """
    told = [line["step"] for line in _lines(folder) if "stage" in line]
    problems = [] if told == list(stages)[1:] else [f"metrics.jsonl tells changes of the stage after the steps {told}"]
    if (stage := _result(folder)["stage"]) != list(stages.values())[-1]:
        problems.append(f"result.json says stage {stage}, and the schedule {stages}")
    return problems


def _has_left_overs(folder: Path) -> bool:
    checkpoints = folder / "run" / CHECKPOINTS
    return any(name.startswith(".") for name in os.listdir(checkpoints)) or len(checkpoints_in(checkpoints)) > KEEP


def problems_of_folder(folder: Path, case: Case) -> list[str]:
    """What it has left that it should not have."""
    problems = []
    run, checkpoints = folder / "run", checkpoints_in(folder / "run" / CHECKPOINTS)
    names = set(os.listdir(run / CHECKPOINTS)) - {path.name for path in checkpoints}
    aside = {name for name in names if ".aside-" in name}
    if names - aside:
        problems.append(f"left in checkpoints/: {sorted(names - aside)}")
    if aside and not any(BY_NAME[each.place].kind == "aside" for each in case.strikes):
        problems.append(f"set aside, though nothing was damaged: {sorted(aside)}")
    if len(checkpoints) > KEEP or not checkpoints:
        problems.append(f"{len(checkpoints)} checkpoints are there, and checkpoint.keep is {KEEP}")
    if strange := set(os.listdir(run)) - IN_A_RUN:
        problems.append(f"left in the run's folder: {sorted(strange)}")
    for path in checkpoints:
        try:
            verify(path)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def _temporary(folder: Path) -> set[str]:
    """What is there of ours. Torch makes its compiler's cache there too, for good."""
    return {name for name in os.listdir(folder / "tmp") if name.startswith("zerotrain")}


def _in_shared_memory(folder: Path) -> list[str]:
    """What the processes of the last start have left there: torch names it by their numbers."""
    processes = {path.read_text() for path in folder.glob("process-*")}
    return [name for name in os.listdir("/dev/shm") if processes & set(name.split("_"))]


def _said(out: Path) -> str:
    """On stderr."""
    return Path(f"{out}.err").read_text(errors="replace").strip()


def _result(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "run" / "result.json").read_text())
    return result


def _metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (line for line in _lines(folder) if "stage" not in line)
    return [{name: line[name] for name in COMPARED if name in line} for line in lines]


def _lines(folder: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = list(map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines()))
    return lines
