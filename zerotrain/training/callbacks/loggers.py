"""Curves of a run in TensorBoard and at Weights & Biases. examples/ has loggers for MLflow and Trackio."""

import json
import math
import os
import platform
import secrets
import shlex
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta, Struct, to_builtins

from zerotrain.checkpoint.manifest import versions
from zerotrain.device.kinds import device_of
from zerotrain.files.lock import read_note, whole
from zerotrain.files.untrusted import dotted, parse_json, require_kind
from zerotrain.training.callback import Callback, Closing, Run
from zerotrain.training.result import METRICS_NAME, MetricsFile, MetricSink, lines_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


# The code and the machine of a run.


GIT_S = 10.0
"""Seconds git may take."""
MAX_CHANGES = 2**20
"""Characters kept of a diff."""


def facts_of(run: Run) -> dict[str, str]:
    """The command, versions, device, host and git revision of a run, each a text."""
    overrides = run.result.overrides
    command = sys.argv if overrides is None else ["zerotrain", *overrides]
    facts = {
        "command": shlex.join(command),
        "folder": str(run.folder),
        "config_hash": run.result.config_hash,
        "git_revision": _git("rev-parse", "HEAD").strip() or None,
        "host": platform.node(),
        "device": device_of(run.world.device).name,
        "ranks": run.world.size,
        **versions(),
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def _git(*arguments: str) -> str:
    """The answer of git about the folder in which the run was started; empty where it has none."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", *arguments]
        process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_S)
        return process.stdout.decode(errors="replace") if process.returncode == 0 else ""
    return ""


CHANGES_NAME = "git.diff"
"""File in the run's folder with the uncommitted changes to the code: the diff from the git revision to the
tracked files as they are, without binary ones."""


NO_POINTS = -1
"""The last step of a place without points."""


class Curves(Callback):
    """Writes each number of metrics.jsonl to another place, at its step, and each point once; before them what the run
    is, and at its end its result.

    The lines of metrics.jsonl from before a run went on are written too where they are missing: the run may be in
    another folder now, or has had no such logger.
    """

    ranks = "first"
    may_fail = True
    package: ClassVar[str] = ""
    """The extra with it has the same name."""

    def __init__(self) -> None:
        if find_spec(self.package) is None:
            raise ImportError(f"there is no {self.package} here; pip install 'zerotrain[{self.package}]' brings it")
        self._written_until: int | None = None
        """The last step whose points the place has, and those of all before; None: it is not open."""

    @abstractmethod
    def _open(self, run: Run) -> int:
        """Open the place, and return its last step, or `NO_POINTS`."""

    @abstractmethod
    def _describe_run(self, run: Run) -> None:
        """Send what the run is: it begins, or goes on; with `CHANGES_NAME`, where the place keeps files."""

    @abstractmethod
    def _write(self, numbers: dict[str, float], step: int) -> None:
        """Write points of one step."""

    @abstractmethod
    def _close_run(self, result: dict[str, float], status: str | None) -> None:
        """Send the result of a run, which is completed, stopped or failed; None: leave it as it was found."""

    def start(self, run: Run) -> None:
        """See `Callback.start`."""
        self._written_until = self._open(run)
        if changes := _git("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color"):
            (run.folder / CHANGES_NAME).write_text(changes[:MAX_CHANGES])
        self._describe_run(run)
        for _, metrics in lines_of(run.folder / METRICS_NAME):
            self._write_new(metrics, metrics.pop("step"))

    def log(self, run: Run, metrics: dict[str, Any]) -> None:
        """See `Callback.log`."""
        self._write_new(metrics, run.step)

    def completed(self, run: Run) -> None:
        """See `Callback.completed`."""
        self._finish(run, run.result.status)

    def end(self, run: Run) -> None:
        """See `Callback.end`."""
        if run.stopped_by:  # else `completed` comes, which knows more
            self._finish(run, "stopped")

    def failure(self, run: Run, error: BaseException) -> None:
        """See `Callback.failure`."""
        self._finish(run, run.result.status)

    def _finish(self, run: Run, status: str) -> None:
        if self._written_until is not None:
            self._written_until = None
            numbers = numbers_of(dotted(run.result.body()))
            self._close_run({f"result/{name}": value for name, value in numbers.items()}, status)

    def _write_new(self, metrics: dict[str, Any], step: int) -> None:
        until, numbers = self._written_until, numbers_of(metrics)
        if until is not None and step > until and numbers:
            self._write({tag_of(name): value for name, value in numbers.items()}, step)


_OF_TRAINING = "lr grad_norm grad_norm_clipped skipped_steps loss_scale epoch samples tokens"
_OF_SPEED = (
    "tokens_per_s labels_per_s samples_per_s step_ms_median mfu data_wait_ms comm_wait_ms update_ms sent_nbytes "
    "peak_nbytes train_s wall_time_s"
)
_GROUPS = dict.fromkeys(_OF_TRAINING.split(), "train") | dict.fromkeys(_OF_SPEED.split(), "perf")


def tag_of(name: str) -> str:
    """A metric as trackers name it, in its group: train/loss for train_loss, val/loss/docs, train/lr, perf/mfu. Those
    of callbacks have their own names."""
    if group := _GROUPS.get(name.partition("/")[0]):
        return f"{group}/{name}"
    group, _, rest = name.partition("_")
    return f"{group}/{rest}" if group in ("train", "val") and rest else name


def numbers_of(metrics: dict[str, Any]) -> dict[str, float]:
    """The finite numbers among the values."""
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


# metrics.jsonl and the sinks of a loop of one's own, as a callback.


class Sinks(Closing):
    """Sends metrics to metrics.jsonl and to each sink, and closes them however the run ends."""

    ranks = "first"

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._given, self._open = sinks, list(sinks)

    def start(self, run: Run) -> None:
        """See `Callback.start`."""
        self._open.insert(0, MetricsFile(run.folder / METRICS_NAME, append=run.step > 0))

    def log(self, run: Run, metrics: dict[str, Any]) -> None:
        """See `Callback.log`."""
        for sink in self._open:
            sink.log(metrics, run.step)

    def end(self, run: Run) -> None:
        """See `Callback.end`."""
        with ExitStack() as stack:
            while self._open:
                stack.callback(self._open.pop(0).close)

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {"sinks": [sink.state_dict() if hasattr(sink, "state_dict") else None for sink in self._given]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        for sink, sink_state in zip(self._given, state["sinks"], strict=False):
            if sink_state is not None and hasattr(sink, "load_state_dict"):
                sink.load_state_dict(sink_state)


# Curves for TensorBoard.


_FINAL = ("final_", "val_", "tokens_per_s", "samples_per_s", "step_ms_median", "train_s", "mfu", "memory_bytes.peak")
"""How the numbers of a result begin that stand beside the settings."""


class TensorBoard(Curves):
    """Writes each number of metrics.jsonl to `tensorboard` in the run's folder, and as texts the settings, the
    environment and the status; at its end the settings and the result as hparams. A run that went on is one curve."""

    package = "tensorboard"

    def __init__(self) -> None:
        super().__init__()
        self._writer: SummaryWriter
        self._step = 0
        self._hparams: dict[str, int | float | str] = {}

    def start(self, run: Run) -> None:
        """See `Callback.start`."""
        super().start(run)
        self._written_until = NO_POINTS  # what comes now is new

    def _open(self, run: Run) -> int:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        is_new = not folder.exists()
        # Points of later steps from an earlier sitting are hidden: the run comes to them again.
        self._writer = SummaryWriter(str(folder), purge_step=run.step + 1 if run.step else 0)
        self._step = run.step
        return NO_POINTS if is_new else run.step

    def _describe_run(self, run: Run) -> None:
        # The page shows the first five at once: those that the command line has come before the others.
        of_command = [override.partition("=")[0].lstrip("+") for override in run.result.overrides or ()]
        for name, value in sorted(dotted(run.settings or {}).items(), key=lambda setting: setting[0] not in of_command):
            is_plain = isinstance(value, int | float | str) and not isinstance(value, bool)
            self._hparams[name] = value if is_plain else json.dumps(value)
        self._write_text("settings", json.dumps(run.settings or {}, indent=2))
        self._write_text("environment", json.dumps(facts_of(run), indent=2))

    def _write(self, numbers: dict[str, float], step: int) -> None:
        self._step = step
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def _close_run(self, result: dict[str, float], status: str | None) -> None:
        final = {name: value for name, value in result.items() if name.removeprefix("result/").startswith(_FINAL)}
        self._write({name: value for name, value in result.items() if name not in final}, self._step)
        self._writer.add_hparams(self._hparams, final, run_name=".", global_step=self._step)  # in the same run
        self._write_text("status", str(status))
        self._writer.close()

    def _write_text(self, name: str, text: str) -> None:
        indented = text.replace("\n", "\n    ")  # TensorBoard reads Markdown, which leaves such lines as they are
        self._writer.add_text(name, f"    {indented}", self._step)


# Curves at Weights & Biases.


MODES = ("online", "offline", "disabled")
FINISH_S = 60.0
"""Seconds the end of a run may wait for the network. `wandb sync` sends what is left."""
SWEEP_VARIABLE = "ZEROTRAIN_SWEEP_JOB"
"""Variable of the environment in which the ranks of a sweep's job find its group and its name, as JSON."""


class _SweepJob(Struct):
    group: str = ""
    name: str = ""


class TrackerNote(Struct):
    """A run at a tracker: wandb.json in the run's folder, and in its checkpoints."""

    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{8}\Z")]
    config_hash: str | None
    """Of the settings: others compute another run."""


class _TrackerState(Struct):
    note: TrackerNote | None


def ids_in(folder: Path) -> dict[str, str]:
    """The ids of a run at its trackers, by their names, as its folder has them."""
    note = read_note(folder / f"{WandB.package}.json", TrackerNote)
    return {} if note is None else {WandB.package: note.id}


class WandB(Curves):
    """Sends a run to Weights & Biases, or writes it to `wandb` in the run's folder, from where `wandb sync` sends it.

    A run is one there, with one id, however often it is killed, stopped or restarted here: its checkpoints keep the id,
    and so does a note in its folder. It comes to the same numbers again, so that points which are there stay. A run of
    other settings comes to others: if the tracker has points that it has not come to, it is a new one there.

    Args:
        project, name, entity, group, tags: of the run there; None: as wandb chooses, in a sweep as that is called.
        mode: online, offline or disabled; None: as the environment's WANDB_MODE has it, else online.
    """

    package = "wandb"

    def __init__(
        self,
        *,
        project: str = "zerotrain",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        mode: str | None = None,
    ) -> None:
        super().__init__()
        if mode not in (*MODES, None):
            raise ValueError(f"mode={mode}; it must be {', '.join(MODES)} or null")
        job = parse_json(os.environ.get(SWEEP_VARIABLE, "{}"), _SweepJob)
        self._mode = mode
        self._given: dict[str, Any] = {"project": project, "entity": entity, "tags": tags}
        self._given |= {"name": name or job.name or None, "group": group or job.group or None}
        self._note: TrackerNote | None = None
        self._run: Any = None

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {"note": to_builtins(self._note)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        self._note = require_kind(state, _TrackerState).note

    def _open(self, run: Run) -> int:
        path, config_hash = run.folder / f"{self.package}.json", run.result.config_hash
        notes = [note for note in (self._note, read_note(path, TrackerNote)) if note is not None]
        match = next((note for note in notes if note.config_hash == config_hash), None)
        run_id = match.id if match else notes[0].id if notes and run.step else None
        run_id, written_until = self._open_run(run, run_id)
        if not match and written_until > run.step:
            self._close_run({}, None)
            run_id, written_until = self._open_run(run, None)
        self._note = TrackerNote(run_id, config_hash)
        with whole(path) as file:
            file.write((json.dumps(to_builtins(self._note)) + "\n").encode())
        return written_until

    def _open_run(self, run: Run, run_id: str | None) -> tuple[str, int]:
        """Open the run of an id, or a new one for None; return its id and its last step."""
        import wandb

        mode: Any = self._mode or os.environ.get("WANDB_MODE", "online")
        run_id = run_id or secrets.token_hex(4)
        if mode == "offline":
            # Files of earlier sittings do not know of each other. The next one gets all lines of the run, so that one
            # file is one curve.
            folder = run.folder / "wandb"
            for path in folder.glob(f"offline-run-*-{run_id}"):
                (folder / "earlier").mkdir(exist_ok=True)
                path.rename(folder / "earlier" / f"{path.name}-{secrets.token_hex(4)}")
        self._run = wandb.init(
            **self._given,
            id=run_id,
            mode=mode,
            dir=str(run.folder),
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(console="off", finish_timeout=FINISH_S),  # a rank's output is in its log
        )
        return run_id, self._run.step - 1

    def _describe_run(self, run: Run) -> None:
        config = {**(run.settings or {}), "environment": facts_of(run)}
        self._run.config.update(config, allow_val_change=True)
        if (path := run.folder / CHANGES_NAME).exists():
            self._run.save(str(path), base_path=str(run.folder), policy="now", glob=False)

    def _write(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def _close_run(self, result: dict[str, float], status: str | None) -> None:
        if status is not None:
            self._run.summary.update({**result, "status": status})
        self._run.finish(exit_code=int(status == "failed"))
