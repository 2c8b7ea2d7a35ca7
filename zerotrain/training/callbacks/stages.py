"""The stage of a run, and its frozen parameters: both may change between two steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from zerotrain.checkpoint.folder import step_name
from zerotrain.checkpoint.manifest import Manifest
from zerotrain.comm.world import World
from zerotrain.engine.engine import ZeroEngine
from zerotrain.engine.results import StageSwitch, TrainStepResult
from zerotrain.files.lock import whole
from zerotrain.files.untrusted import UntrustedFileError, is_kind, parse_yaml, printable, read_regular, shown, value_at
from zerotrain.training.callback import Callback, Run
from zerotrain.training.callbacks.checkpoints import OF_TRAINER, AskedStages
from zerotrain.training.report import gather_usages, in_unit, say
from zerotrain.training.request import ASKED, Request

COMPARED_AFTER = 3
"""Steps before a run with a chosen stage compares the memory of its ranks with their budget."""


def stages_named(stages: Mapping[int, int], step: int = 0) -> str:
    """The stages from a step on, such as "stage 2, 3 after step 500"."""
    later = [f"{stages[start]} after step {start}" for start in sorted(stages) if start > step]
    return ", ".join([f"stage {stage_at(stages, step)}", *later])


def stage_at(stages: Mapping[int, int], step: int) -> int:
    """The stage after so many steps."""
    return stages[max(start for start in stages if start <= step)]


def stages_from(manifest: Manifest | None, schedule: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """The stages of a run, with what operators have asked for until it was saved, and the step that it goes on at.

    Args:
        manifest: of the checkpoint to go on from; None: the run begins anew.
        schedule: steps done, and the stage from there on, 0 among them.
    """
    if manifest is None:
        return dict(schedule), 0
    # The extra of another loop than ours may be anything; the ranks say that it is none to go on from.
    stages = value_at(manifest.content["extra"], OF_TRAINER, "run", "asked_stages")
    return _with_asked(schedule, stages if is_kind(stages, AskedStages) else {}), manifest.step


def _with_asked(schedule: Mapping[int, int], requests: Mapping[str, int]) -> dict[int, int]:
    return dict(schedule) | {int(step): stage for step, stage in requests.items()}


class RunStages(Callback):
    """Lets an engine be at the stage that is due, and notes in the result what each stage came to. All ranks have one,
    and call the same.

    Args:
        schedule: steps done, and the stage from there on; before its first entry the engine's own.
        gradient_accumulation_steps: micro-batches of a virtual rank.
    """

    def __init__(self, schedule: Mapping[int, int], gradient_accumulation_steps: int) -> None:
        self._schedule = dict(schedule)
        self._num_micro_batches = gradient_accumulation_steps
        self.asked: dict[str, int] = {}
        """The stages that operators asked for: steps done, as texts, and the stage from there on, until a later entry
        of the schedule."""

    def start(self, run: Run) -> None:
        """Be at the stage of this step, from whatever stage the engine was built at."""
        current = run.engine.options.zero.stage
        self._schedule = {0: current} | self._schedule
        due = stage_at(self._due, run.step)
        if due != current:
            self._change(run, due)
        self._enter(run, due, {"sent_nbytes": None, "theory_sent_nbytes": None})

    def describe(self, step: int) -> str:
        """The stage of this step, and what comes later, such as "stage 2, 3 after step 500"."""
        return stages_named(self._due, step)

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {"asked_stages": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        self.asked = state["asked_stages"]

    @property
    def _due(self) -> dict[int, int]:
        return _with_asked(self._schedule, self.asked)

    def after_step(self, run: Run, outcome: TrainStepResult) -> None:
        """Be at the stage that is due after this step, or wished for now; log a change."""
        if run.is_last:
            return
        wish = run.asked.stage
        wish = self._instead(run) if wish is None else wish
        if wish is not None:
            self.asked[str(run.step)] = wish
        current, due = run.engine.options.zero.stage, stage_at(self._due, run.step)
        if due == current:
            return
        self.note_usage(run)
        switch = self._change(run, due)
        sent = {"sent_nbytes": switch.sent_nbytes, "theory_sent_nbytes": switch.theory_sent_nbytes}
        self._enter(run, due, sent)
        run.log({"stage": due, **{f"stage_{name}": value for name, value in sent.items()}})
        run.callbacks.call("after_stage_change", run, switch)

    def _instead(self, run: Run) -> int | None:
        """The stage to go on at, where `zero.stage=auto` chose one at which a rank turns out to hold more than it may;
        None: this one. Collective where it was chosen."""
        planned = (run.result.memory_bytes or {}).get("planned") or {}
        if run.step != COMPARED_AFTER or not (peaks := planned.get("alternatives")):
            return None
        budget, peak = planned["memory"], max(usage["peak_nbytes"] for usage in self.note_usage(run))
        if peak <= budget or str(run.result.stage) in peaks:
            return None
        fitting = [stage for stage, nbytes in peaks.items() if nbytes + peak - planned["peak"] <= budget]
        best = fitting[0] if fitting else min(peaks, key=peaks.__getitem__)
        finding = (
            f"zero.stage=auto: a rank held {in_unit(peak)} by step {run.step}, of {in_unit(budget)}; planned were "
            f"{in_unit(planned['peak'])}"
        )
        if peaks[best] >= planned["peak"]:
            say(run.console, f"warning: {finding}, and no other stage holds less")
            return None
        less = in_unit(planned["peak"] - peaks[best])
        say(run.console, f"{finding}, and stage {best} holds {less} less")
        return int(best)

    def _change(self, run: Run, due: int) -> StageSwitch:
        stage, switch = run.engine.options.zero.stage, run.engine.set_stage(due)
        held = run.engine.memory_bytes()
        amounts = ", ".join(f"{in_unit(held[name])} {name}" for name in ("parameters", "gradients", "optimizer"))
        say(
            run.console,
            f"stage {stage} -> {due} after step {run.step}: sent {in_unit(switch.sent_nbytes)} (theory "
            f"{in_unit(switch.theory_sent_nbytes)}), holds {amounts}",
        )
        return switch

    def _enter(self, run: Run, due: int, sent: Mapping[str, int | None]) -> None:
        """Note a stage begun, or gone on with. A stage without a trained step is dropped."""
        stages, run.result.stage = run.result.stages, due
        if stages and stages[-1]["from_step"] == run.step and stages[-1]["stage"] != due:
            stages.pop()
        if not stages or stages[-1]["stage"] != due:
            stages.append({"stage": due, "from_step": run.step, **sent, "ranks": None})

    def note_usage(self, run: Run) -> list[dict[str, int]]:
        """Note what the stage came to: the usage of all ranks. Collective."""
        usages = gather_usages(run.engine, self._num_micro_batches)
        run.result.stages[-1]["ranks"] = usages
        return usages


class RunFreezing(Callback):
    """Lets parameters train from the step in the settings on. All ranks have one, and call the same.

    A parameter that does not train yet is frozen in the engine: it has no gradient and no optimizer state. It leaves
    alone the parameters that others, or the model itself, freeze or unfreeze.

    Args:
        until: by first name the steps for which a parameter does not train; None: all.
    """

    def __init__(self, engine: ZeroEngine, console: Console, until: Mapping[str, int | None]) -> None:
        self._engine, self._console, self._until = engine, console, until
        self._changes = {steps for steps in until.values() if steps is not None}
        self._frozen: list[str] = []
        """Names frozen by the settings; in a resumed run, by those of the run that saved."""

    def start(self, run: Run) -> None:
        """Let train what is to train after this step, whatever the settings were before."""
        self.be_at(run.step)

    def after_step(self, run: Run, outcome: TrainStepResult) -> None:
        """See `Callback.after_step`."""
        if run.step in self._changes and not run.is_last:
            self.be_at(run.step)

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {"frozen": self._frozen} if self._frozen else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        self._frozen = state.get("frozen", [])

    def be_at(self, step: int) -> None:
        """Let train what is to train after so many steps. Collective."""
        due = [name for name, steps in self._until.items() if steps is None or step < steps]
        parameters = dict(self._engine.module.named_parameters(remove_duplicate=False))
        started = [parameters[name] for name in self._frozen if name in parameters and name not in due]
        started = [parameter for parameter in started if not parameter.requires_grad]
        stopped = [parameters[name] for name in due if parameters[name].requires_grad]
        if started:
            self._engine.unfreeze(*started)
        if stopped:
            self._engine.freeze(*stopped)
        self._frozen = due
        if started:
            numel = sum(parameter.numel() for parameter in started)
            say(self._console, f"{len(started)} more parameters train after step {step}: {numel:,} elements")


# control.yaml in the run's folder: an operator's requests to a run under way.
#
#     stage: 3      # from the next step on, until zero.schedule says otherwise
#     save: now
#     stop: true    # after this step, saved
#
# Rank 0 looks whether the file has changed, once a step, and tells the others with the number that each step
# exchanges. An answer (what was done, or why not) replaces the request: `answer: ...`. So nothing is done twice.
# The run neither waits nor ends, with any content of the file and while somebody writes it.


REQUESTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "stage": ("0, 1, 2 or 3", (0, 1, 2, 3)),
    "save": ("now", ("now", True)),
    "stop": ("true", (True,)),
}
"""Allowed values of each request, in words and as values."""
ALLOWED = "stage: 0 to 3, save: now, stop: true"
MAX_NBYTES = 2**16
MAX_PROBLEMS = 10
"""Problems told of one file."""


class Control(Callback):
    """One run's file. All ranks have one, and call the same; rank 0 alone reads and writes."""

    def __init__(self, path: Path, world: World, console: Console) -> None:
        self._path, self._world, self._console = path, world, console
        self._seen: tuple[int, ...] | None = None
        """The file's time, size and inode at the last look: a change shows in them."""
        self._asked: dict[str, Any] = {}
        self._problems: list[str] = []

    def ask(self, run: Run) -> Request:
        """The requests in the file, on rank 0. A look costs some microseconds."""
        if self._world.rank > 0 or (state := self._state()) is None or state == self._seen:
            return Request()
        requests, problems = _requests(self._path)
        if self._state() != state:  # it is being written, or it is gone: the next look sees it whole
            return Request()
        self._seen, self._asked, self._problems = state, requests, problems
        return Request(stage=requests.get("stage"), save="save" in requests, stop="stop" in requests and ASKED)

    def after_step(self, run: Run, outcome: TrainStepResult) -> None:
        """The requests of this step are done: say so, in the log and in the file."""
        if not self._asked and not self._problems:
            return
        answers = {
            "stage": f"stage: {self._asked.get('stage')} after step {run.step}",
            "save": f"save: {step_name(run.step)} is written beside the training",
            "stop": f"stop: after step {run.step}, saved",
        }
        parts = [answers[name] for name in self._asked] + self._problems
        self._asked, self._problems = {}, []
        say(self._console, f"{ASKED}: {'; '.join(parts)}")
        quoted = [part.replace("'", "''") for part in parts]
        lines = [f"# {ALLOWED}\n", "answer:\n", *(f"  - '{part}'\n" for part in quoted)]
        if self._state() != self._seen:  # something else is asked for by now, and is not to be lost
            return
        try:
            with whole(self._path) as file:
                file.write("".join(lines).encode())
        except OSError as error:  # a full disk, or a folder; the log has said it
            say(self._console, f"warning: the answer cannot be written to {self._path}: {error.strerror}")
        self._seen = self._state()

    def _state(self) -> tuple[int, ...] | None:
        try:
            status = self._path.stat() if self._path.exists() else self._path.lstat()  # of a link that leads nowhere
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _requests(path: Path) -> tuple[dict[str, Any], list[str]]:
    """(what is asked for, what is wrong with the rest)."""
    try:
        content = parse_yaml(read_regular(path, max_nbytes=MAX_NBYTES))
    except (OSError, UntrustedFileError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return {}, [f"it cannot be read: {printable(str(reason), 500)}; write {ALLOWED}"]
    if not isinstance(content, dict):
        return {}, [] if content is None else [f"it has no key and value; write {ALLOWED}"]
    requests: dict[str, Any] = {}
    problems = []
    for name, value in content.items():
        if name in REQUESTS and any(type(value) is type(allowed) and value == allowed for allowed in REQUESTS[name][1]):
            requests[name] = value
        elif name in REQUESTS:
            problems.append(f"{name}: got {shown(repr(value))}; it must be {REQUESTS[name][0]}")
        elif name != "answer":
            problems.append(f"{shown(name)}: there is no such request; there are {ALLOWED}")
    if len(problems) > MAX_PROBLEMS:
        problems[MAX_PROBLEMS:] = [f"and {len(problems) - MAX_PROBLEMS} more that are wrong"]
    return requests, problems
