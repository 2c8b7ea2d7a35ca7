"""The lines of a running sweep: one when a job begins, one when it ends, and the cause if it failed; in a terminal,
below them, how far the running jobs are."""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from math import isfinite
from pathlib import Path
from typing import Any, TextIO, TypedDict

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from zerotrain.config.checks import makes, target_problems
from zerotrain.config.schema import Config, SweepConfig
from zerotrain.config.words import did_you_mean, word
from zerotrain.errors import ConfigError, ZeroTrainError
from zerotrain.files import terminal, untrusted
from zerotrain.files.untrusted import printable
from zerotrain.launching import exits
from zerotrain.launching.sweep.sweep import MAX_JOBS, Sweep, has_study, settings_of, swept_in
from zerotrain.report import journal
from zerotrain.settings import settings_in

# The last line of a terminal while a sweep runs: the step and the loss of each running job.


_ERASED = "\r\x1b[K"
_NBYTES = 2**14
"""Read from the end of a metrics.jsonl; a line of ours has 500."""
_MAX_CONFIG_NBYTES = 10**5
_USUAL_COLUMNS = 80


class _ProgressLine(TypedDict):
    step: untrusted.Natural
    train_loss: float | None


class StatusLine:
    """One line, drawn again in its place.

    Args:
        stream: a terminal; anything else gets no line.
        folder: of the sweep.
    """

    def __init__(self, stream: TextIO, folder: Path) -> None:
        self._stream, self._folder = stream, folder
        self._has_place = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._shown = ""
        self._max_steps: dict[str, int | None] = {}
        """By the folder of the job."""

    def draw(self, events: list[journal.JobEvent]) -> None:
        """Show the running jobs.

        Args:
            last: the last event of each job.
        """
        if not self._has_place:
            return
        running = [event for event in events if event.event == journal.BEGUN and event.is_within]
        text = ", ".join(" ".join(self._of_job(event)) for event in running)
        with suppress(OSError):
            columns = os.get_terminal_size(self._stream.fileno()).columns
            text = text[: (columns or _USUAL_COLUMNS) - 1]  # longer, it would be two lines
        if text != self._shown:
            self._write(f"{_ERASED}{text}", text)

    def erase(self) -> None:
        """Make room for another line."""
        if self._shown:
            self._write(_ERASED, "")

    def _write(self, text: str, visible: str) -> None:
        self._shown = visible
        self._stream.write(text)
        self._stream.flush()

    def _of_job(self, event: journal.JobEvent) -> Iterator[str]:
        yield f"job {event.job}"
        run_dir = self._folder / event.folder
        if (progress := _last_measured(run_dir / "metrics.jsonl")) is None:
            yield "starts"
            return
        if self._max_steps.get(event.folder) is None:
            self._max_steps[event.folder] = _max_steps(run_dir / "config.yaml")
        max_steps = self._max_steps[event.folder]
        yield f"step {progress['step']}" if max_steps is None else f"step {progress['step']}/{max_steps}"
        yield "loss nan" if progress["train_loss"] is None else f"loss {progress['train_loss']:.3f}"


def _last_measured(path: Path) -> "dict[str, int | float | None] | None":
    """The last line with a loss of training in a metrics.jsonl; None if there is none."""
    with suppress(OSError), open(path, "rb", opener=untrusted.only_regular) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _NBYTES))
        for line in reversed(file.read(_NBYTES).split(b"\n")):
            with suppress(untrusted.UntrustedFileError):
                progress: dict[str, int | float | None] = untrusted.parse_json(line, _ProgressLine)
                return progress
    return None


def _max_steps(path: Path) -> int | None:
    """The steps of a run by its config.yaml; None if they are not there."""
    with suppress(OSError, untrusted.UntrustedFileError):
        content = untrusted.read_regular(path, max_nbytes=_MAX_CONFIG_NBYTES)
        steps = untrusted.value_at(untrusted.parse_yaml(content), "train", "max_steps")
        return steps if untrusted.is_kind(steps, untrusted.Natural) else None
    return None


_LOOK_EVERY_S = 0.2
_REPORT_EVERY_S, _REPORT_PART = 15.0, 0.02
"""The report is written so often while a job runs, and takes at most this part of the time: its page shows the curves
so far."""
_MAX_ERROR = 10_000
"""Characters."""


class Teller:
    """Reads the journal, tells of each event once, and keeps the report. It prints to the driver's own output, wherever
    jobs print.

    A thread looks. The driver looks too, after each event of a job in its own process. With such jobs the thread begins
    with the first: before it a fork server is forked from this process, and this needs a single thread.
    """

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        # Streams that go where the output of this process goes now.
        streams: Any = [
            terminal.LastingStream(os.fdopen(os.dup(descriptor), "w", encoding="utf-8", errors="backslashreplace"))
            for descriptor in (1, 2)
        ]
        self._out, self._err = streams
        self._last: dict[tuple[int, str], journal.JobEvent] = {}
        """The last line of each job."""
        self._num_run = self._num_told = 0
        events = sweep.events_to_count()
        for event in events[: len(events) - len(sweep.events())]:  # of a study, before it went on
            self._last[event.job, event.folder] = event
        self._lock = threading.Lock()
        self._num_reported = 0
        """Events at the last writing of the report, without begins."""
        self._report_due_s = time.monotonic() + _REPORT_EVERY_S
        self._status = StatusLine(self._out, sweep.folder)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sweep-teller", daemon=True)
        if not sweep.in_driver:
            self._thread.start()

    def close(self) -> None:
        """Tell the rest; the sweep is over."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.look()
        self._status.erase()

    def look(self) -> None:
        """Tell what is new."""
        with self._lock:
            if self._thread.ident is None and not self._is_over.is_set():
                self._thread.start()
            events = self._sweep.events()
            for event in events[self._num_told :]:
                self._num_told += 1
                self._last[event.job, event.folder] = event
                self._num_run += event.event == journal.ENDED
                is_over = event.event in (journal.ENDED, journal.REFUSED)
                if event.error and is_over and event.status not in (journal.STOPPED, journal.PRUNED):
                    self._print(self._err, f"job {event.job}: {printable(event.error, _MAX_ERROR)}")
                self._print(self._out, " ".join(self._line(event)))
                if event.status == journal.FAILED and self._sweep.gives_up_after(events[: self._num_told]):
                    num_failed = self._sweep.settings.max_failures_in_a_row
                    problem = (
                        f"{num_failed} jobs have failed one after the other, so the sweep ends; mend their cause and "
                        "give the same command with the same hydra.sweep.dir; sweep.max_failures_in_a_row=0 goes on "
                        "whatever fails"
                    )
                    self._print(self._err, problem)

    def keep_report(self) -> None:
        """Write sweep.csv, sweep.json and report.html where they are no longer up to date, and from time to time while
        a job runs: of 200 jobs in 0.7 s of CPU. A failure to write a file is told at the sweep's end."""
        num = sum(event.event != journal.BEGUN for event in self._sweep.events())
        if num == self._num_reported and time.monotonic() < self._report_due_s:
            return
        from zerotrain.report import files, rows  # import torch, as the jobs do

        start_s = time.monotonic()
        with suppress(ConfigError, OSError):
            files.write_files(replace(rows.read_report(self._sweep.folder), is_live=True), self._sweep.folder)
        taken_s = time.monotonic() - start_s
        self._num_reported, self._report_due_s = num, start_s + max(_REPORT_EVERY_S, taken_s / _REPORT_PART)

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_EVERY_S):
            self.look()
            self.keep_report()
            if not self._sweep.shows_all:
                with self._lock:
                    self._status.draw(list(self._last.values()))

    def _line(self, event: journal.JobEvent) -> Iterator[str]:
        settings = self._sweep.varied(event.overrides)
        yield f"job {event.job}"
        if event.event == journal.BEGUN:
            begun = [
                old for old in self._sweep.journal.events() if (old.event, old.folder) == (event.event, event.folder)
            ]
            again = "" if begun[0] is event else " again"
            yield f"begins{again} in {printable(event.folder, keep='')}:"
            yield printable(" ".join(settings or event.overrides), keep="")
            return
        if event.status == journal.RUNNING:
            yield f"is run by pid {event.pid} on {printable(event.host, keep='')}"
        elif event.event == journal.TAKEN:
            yield f"is taken as it lies in {printable(event.folder, keep='')}: {event.status}"
        else:
            yield "refused" if event.event == journal.REFUSED else str(event.status)
        name = self._sweep.settings.objectives[0]
        if (value := self._sweep.value_of(event)) is not None:
            yield f"with {'loss' if name == SweepConfig.objective else printable(name, keep='')} {_figures(value)}"
        yield f"({', '.join(self._sums())})"

    def _sums(self) -> Iterator[str]:
        ended = [event for event in self._last.values() if event.event != journal.BEGUN]
        total = self._sweep.total
        yield f"{len(ended)}/{total}" if total else f"{len(ended)} done"
        if num_failed := sum(event.status == journal.FAILED for event in ended):
            yield f"{num_failed} failed"
        if num_pruned := sum(event.status == journal.PRUNED for event in ended):
            yield f"{num_pruned} pruned"
        sign = -1 if self._sweep.settings.directions[0] == "maximize" else 1
        compared = [event for event in ended if event.status == journal.COMPLETED]
        values = [(sign * value, event.job) for event in compared if (value := self._sweep.value_of(event)) is not None]
        if values:
            value, job = min(values)
            yield f"best {_figures(sign * value)} job {job}"
        if total and total > len(ended) and self._num_run:
            left_s = (time.time() - self._sweep.begun_s) / self._num_run * (total - len(ended))
            yield f"{untrusted.duration(left_s)} left"

    def _print(self, stream: TextIO, line: str) -> None:
        sys.stdout.flush()
        self._status.erase()
        stream.write(f"{line}\n")
        stream.flush()


def _figures(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"


# The driver of a sweep, and the processes of its jobs. Imports no torch.


LATEST = "hydra.sweep.dir=latest"
_driven: list[tuple[Sweep, Teller]] = []
"""The sweeps driven by this process, the present one last."""
os.register_at_fork(after_in_child=_driven.clear)
_joined: list[Sweep] = []
"""The sweep of the job in this process."""


class SweepFolder(Callback):
    """Begins a sweep. Hydra passes this object on to the process of each job. Its hook for the end of a sweep is not
    called if the sweep was cut off."""

    def __init__(self) -> None:
        self.sweep: Sweep | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """The first job is about to start."""
        try:
            sweep = Sweep.from_config(config)
        except (OmegaConfBaseException, ValueError, AttributeError):
            return  # a ${...} without a target, a range without a step, no launcher: Hydra is about to say so
        self.sweep = _with_study(sweep, config)
        _driven.append((self.sweep, Teller(self.sweep)))

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """A job is about to start, in this process."""
        if self.sweep is not None:
            _joined[:] = [self.sweep]


def _with_study(sweep: Sweep, config: DictConfig) -> Sweep:
    """The sweep with its study, where Optuna chooses its jobs. Ends the process if this fails: Hydra would make a
    warning of another exception."""
    try:
        if problems := list(_problems(config, sweep.total)):
            raise ConfigError(*problems)
        if not has_study(config):
            return sweep
        from zerotrain.launching.sweep.study import Study

        return replace(sweep, study=Study.begin(config, sweep))
    except (ZeroTrainError, ImportError) as error:
        problem = str(error)
    except Exception as error:  # of a class of the user's
        problem = f"hydra/sweeper=optuna: the study cannot be used: {type(error).__name__}: {error}".partition("\n")[0]
    print(printable(problem), file=sys.stderr)
    raise SystemExit(exits.CONFIG_PROBLEM)


def _problems(config: DictConfig, total: int | None) -> Iterator[str]:
    """A line for each fault of a sweep, as far as it can be seen without training.

    Args:
        total: of its jobs, if it is known.
    """
    sweep_config, swept = settings_of(config), swept_in(config) or []
    settings = settings_in(sweep_config, "sweep.")
    if refused := [
        setting.must_be(name, value, word) for name, setting, value in settings if not setting.allows(value)
    ]:
        yield from refused
        return
    for override in swept:
        bounds = [getattr(override.value(), name, None) for name in ("start", "end", "stop", "step")]
        if any(isinstance(bound, float) and not isfinite(bound) for bound in bounds):
            yield f"{override.input_line}: its bounds must be finite numbers"
    if total is not None and total > MAX_JOBS and not has_study(config):
        yield f"-m: got {total:,} jobs or more; a sweep has {MAX_JOBS:,} at most; give fewer values"
    names, directions, pruner = sweep_config.objectives, sweep_config.directions, sweep_config.pruner
    if len(names) != len(directions):
        yield f"sweep.direction: got {len(directions)} for {len(names)} objectives; give one for each, or one for all"
    if len(names) > 1 and not has_study(config):
        yield f"sweep.objective: got {len(names)}; several need hydra/sweeper=optuna; give one"
    if names != [SweepConfig.objective] or pruner is not None:
        keys = [override.get_key_element().lstrip("+") for override in swept]
        yield from _objective_problems(config, sweep_config, keys)
    if pruner is None:
        return
    if not has_study(config):
        yield "sweep.pruner: needs hydra/sweeper=optuna; leave it out, or give that"
    elif len(names) > 1:
        yield f"sweep.pruner: got one for {len(names)} objectives; Optuna prunes by one; leave it out"
    elif problems := list(target_problems(pruner, name="sweep.pruner")):
        yield from problems
    else:
        from zerotrain.run.factory import build  # imports torch

        if not hasattr(built := build("sweep.pruner", pruner), "prune"):
            kind = type(built).__name__
            yield f"sweep.pruner._target_: got {pruner['_target_']}, which makes a {kind}; it must be a pruner"


def _objective_problems(config: DictConfig, sweep_config: SweepConfig, swept: list[str]) -> Iterator[str]:
    """Those of the objectives' names. The metrics are known where no job has others of its own."""
    from zerotrain.training.metrics import Metric
    from zerotrain.training.result import NUMBERS, in_evaluation  # imports torch

    fixed = {field.name for field in fields(Config)} - {"callbacks", "data"}
    metrics: list[str] | None = None
    if {name.partition(".")[0] for name in swept} <= fixed:
        callbacks: Any = OmegaConf.to_container(config.get("callbacks") or OmegaConf.create(), resolve=False)
        targets = {name: callback.get("_target_") for name, callback in callbacks.items() if isinstance(callback, dict)}
        metrics = [name for name, target in targets.items() if isinstance(target, str) and makes(target, Metric)]
    measured = [f"val_{name}" for name in ("loss", *(metrics or ()))]
    for name in sweep_config.objectives:
        evaluated = in_evaluation(name)
        is_there = evaluated is not None and (metrics is None or evaluated.partition("/")[0] in measured)
        if name not in NUMBERS and not is_there:
            choices = [*measured, *NUMBERS]
            hint = ", and val_NAME of a metric" if metrics is None else ""
            yield (
                f"sweep.objective: got {name}; there is no such value{did_you_mean(name, choices)}; there are "
                f"{', '.join(choices)}{hint}"
            )
        elif evaluated is None and sweep_config.pruner is not None and len(sweep_config.objectives) == 1:
            yield (
                f"sweep.objective: got {name}, which no evaluation measures, with sweep.pruner; give val_loss or "
                "another metric, or leave the pruner out"
            )


def join_sweep(folder: Path) -> Sweep:
    """The sweep of the job in this process."""
    if not _joined:  # the user has left the callback out
        _joined.append(Sweep(folder=folder, start=journal.SweepJournal(folder).nbytes))
        _driven.append((_joined[-1], Teller(_joined[-1])))
    return _joined[-1]


def settle_folders(arguments: list[str]) -> None:
    """Let hydra.sweep.dir=latest be the newest folder of a sweep in multirun/, and refuse a folder without a name.

    Args:
        arguments: of the command line, changed in place.

    Raises:
        ConfigError: there is none, or the name of a folder is empty, which Hydra takes for the working folder.
    """
    for setting in ("hydra.run.dir", "hydra.sweep.dir"):
        if f"{setting}=" in arguments:
            raise ConfigError(
                f"{setting}: got nothing, as of a variable that is not set; name a folder, or leave it out"
            )
    if LATEST not in arguments:
        return
    sweeps = sorted(
        path.parent for name in ("multirun.yaml", journal.JOURNAL_NAME) for path in Path("multirun").glob(f"*/*/{name}")
    )
    if not sweeps:
        raise ConfigError("hydra.sweep.dir: got latest, but there is no sweep in multirun/ yet; leave it out")
    arguments[arguments.index(LATEST)] = f"hydra.sweep.dir={sweeps[-1]}"


def driven_sweep() -> "tuple[Sweep, Teller] | None":
    """The sweep driven by this process, and its teller."""
    return _driven[-1] if _driven else None


# The end of a sweep: its table, its report and its exit code.


def report(code: int) -> int:
    """Write the report of the sweep driven by this process, and print the table of its jobs; nothing if there is none.

    Returns:
        The exit code: `code`, or the one of a failure if a job has failed.
    """
    current = driven_sweep()
    if current is None:
        return code
    sweep, teller = current
    teller.close()
    events = sweep.events_to_count()
    if not events:
        if code == exits.COMPLETED:
            print("-m: there is no job to run; a range(...) or glob(...) among the settings is empty", file=sys.stderr)
        return code or exits.CONFIG_PROBLEM
    from zerotrain.report import files, rows  # import torch, as the jobs have by now

    all_in_folder = rows.read_report(sweep.folder)
    own = all_in_folder.only(sweep.folder, events)
    files.print_table(own, Console())
    try:
        files.write_files(all_in_folder, sweep.folder)
        print(f"report: {sweep.folder / files.PAGE_NAME}")
    except (ConfigError, OSError) as error:
        print(f"warning: the report of the sweep cannot be written: {printable(str(error))}", file=sys.stderr)
    counts = Counter(own.counts)
    num_done = counts[journal.COMPLETED] + counts[journal.PRUNED]
    if sweep.study is not None:  # which runs no failed trial again
        num_done = len(own.rows) - counts[journal.STOPPED] - counts[journal.RUNNING]
    if num_done < max(len(own.rows), sweep.total or 0):
        folder = sweep.folder.relative_to(Path.cwd()) if sweep.folder.is_relative_to(Path.cwd()) else sweep.folder
        print(f"to go on: the same command with hydra.sweep.dir={folder}, which takes completed jobs as they are")
    has_failed = counts[journal.FAILED] or (counts[journal.DIVERGED] and sweep.settings.diverged == "fail")
    return exits.FAILED if has_failed and code == exits.COMPLETED else code
