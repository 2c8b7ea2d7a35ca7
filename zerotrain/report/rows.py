"""A row for each job: what the terminal, the csv, the json and the page show are the same rows."""

import math
import os
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np

from zerotrain.files import untrusted
from zerotrain.files.lock import LOCK_NAME, is_held
from zerotrain.files.untrusted import UntrustedFileError, only_regular, parse_json, parse_yaml, printable, read_regular
from zerotrain.report.journal import DIVERGED, FAILED, REFUSED, RUNNING, JobEvent, SweepJournal, outcome
from zerotrain.report.values import cell, first_line, in_bytes, in_order, number, short_names, shortened, value_text
from zerotrain.training.result import METRICS_NAME, RESULT_NAME, RunResult, read_result, value_in

# The curves of a run over its steps, out of metrics.jsonl: some hundred points each, however long the file is.


MAX_POINTS = 200
"""Points of a curve."""
NUM_WINDOWS, WINDOW_NBYTES = 128, 2**14
"""So many windows of a long file are read, at equal distances."""
AXES = {"step": "steps", "tokens": "tokens", "train_s": "seconds of training"}


MAX_CURVES = 60
"""Curves of a run: those that are written first."""
Curve: TypeAlias = "np.recarray[Any, Any]"
"""A metric over the steps of a run: `step`, `tokens`, `train_s` and `value` of each point. nan stands for an unknown
number, and for a value that is none."""
_POINT = [(name, float) for name in (*AXES, "value")]
NO_CURVE: Curve = np.empty(0, _POINT).view(np.recarray)


def points_over(curve: Curve, axis: str, max_points: int) -> list[tuple[float, float]]:
    """(x, value) of the points, or of as many at equal distances, over one of `AXES`."""
    pairs = zip(curve[axis].tolist(), curve.value.tolist(), strict=True)
    return thinned([pair for pair in pairs if math.isfinite(pair[0])], max_points)


def read_curves(path: Path) -> dict[str, Curve]:
    """The curve of each metric in a metrics.jsonl; none where it cannot be read."""
    kinds: dict[bytes, list[bytes]] = {b'"train_loss"': [], b'"val_loss"': [], b"": []}  # each thinned by itself
    with suppress(OSError):
        for line in _lines(path):
            kinds[next(kind for kind in kinds if kind in line)].append(line)
    points: dict[str, list[tuple[float, ...]]] = {}
    for lines in kinds.values():
        for name, point in _points(thinned(lines, MAX_POINTS)):
            if name in points or len(points) < MAX_CURVES:
                points.setdefault(name, []).append(point)
    curves = {name: np.array(rows, _POINT).view(np.recarray) for name, rows in points.items()}
    if (train := curves.get("train_loss")) is not None:
        for curve in curves.values():  # an evaluation notes no tokens: it has those of the training at its step
            for axis in ("tokens", "train_s"):
                if np.isnan(curve[axis]).all():
                    curve[axis] = np.interp(curve.step, [0.0, *train.step], [0.0, *train[axis]])
    return curves


def thinned(items: list[Any], most: int) -> list[Any]:
    """So many of the items at most, at equal distances, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file; of a long one the whole ones in each window."""
    with open(path, "rb", opener=only_regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= NUM_WINDOWS * WINDOW_NBYTES:
            yield from file.read(NUM_WINDOWS * WINDOW_NBYTES).split(b"\n")
            return
        for window in range(NUM_WINDOWS):
            file.seek(round(window * (size - WINDOW_NBYTES) / (NUM_WINDOWS - 1)))
            yield from file.read(WINDOW_NBYTES).split(b"\n")[1 if window else 0 : -1]


def _points(lines: list[bytes]) -> Iterator[tuple[str, tuple[float, ...]]]:
    """(name, (step, tokens, seconds, value)) of each number of each line, in the order of steps: a resumed run has
    come back to some."""
    last_step = -math.inf
    for line in lines:
        try:
            entry = parse_json(line, dict[str, Any])
        except UntrustedFileError:  # it is cut off, or of somebody else
            continue
        numbers = {name: math.nan if value is None else number(value) for name, value in entry.items()}
        axes = [math.nan if (value := numbers.get(axis)) is None else float(value) for axis in AXES]
        if axes[0] >= last_step:
            last_step = axes[0]
            for name, value in numbers.items():
                if value is not None and name != "step":
                    yield name, (*axes, float(value))


# The folders of jobs, as they were left: each is read within limits, and what cannot be read is said in its place.


CONFIG_NAME = "config.yaml"
FILES_OF_RUNS = (RESULT_NAME, METRICS_NAME)
"""A folder with one of them is that of a run. One with a config.yaml alone may be an export, or anything."""
MAX_DEPTH = 6
"""A run is looked for in so many folders within each other."""
MAX_CONFIG_NBYTES = 10**5
"""Largest yaml to read: a longer one may take minutes. Ours have 2 kB."""
MAX_NAME = 200
"""Characters to show of the name of a setting, or of a group of them."""
UNFINISHED = "unfinished"
GONE = "its process is gone; the same command again goes on with it"
MAX_ENTRIES = 200_000
"""Folders to look through."""
_SECTION = re.compile(rb"^(?=[A-Za-z_])", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class JobFiles:
    """The files in the folder of a job."""

    name: str
    """As people call the job: its number in the sweep, and its folder if it has another name."""
    folder: Path
    status: str = UNFINISHED
    """completed, diverged, failed, stopped or running; unfinished where nothing says more."""
    result: dict[str, Any] = field(default_factory=RunResult(world_size=0).body)
    """The body of result.json; where there is none, what the journal of the sweep says in its form."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Those of config.yaml by their dotted names; none where it cannot be read."""
    curves: dict[str, Curve] = field(default_factory=dict)


def run_dirs_in(folder: Path) -> list[Path]:
    """The folders of the runs in a folder, or itself if it is one, in the order of their names. No link is followed,
    and nothing is looked for within a run."""
    run_dirs = []
    for path, folders, files in islice(os.walk(folder), MAX_ENTRIES):
        is_run = any(name in files or name in folders for name in FILES_OF_RUNS)
        if is_run:
            run_dirs.append(Path(path))
        if is_run or len(Path(path).relative_to(folder).parts) == MAX_DEPTH:
            folders.clear()
    return sorted(run_dirs, key=lambda path: in_order(str(path)))


def read_jobs(folder: Path) -> list[JobFiles]:
    """The jobs in a sweep's folder, or the run in a folder, in the order of their names. A job without a folder of its
    own is as the journal tells."""
    events = SweepJournal(folder).events()
    ran = {event.folder: event for event in events if event.event != REFUSED}
    refused = {event.folder: event for event in events if event.event == REFUSED}
    names = [path.relative_to(folder).as_posix() for path in run_dirs_in(folder)]
    jobs = [_read_job(folder, name, ran.get(name, refused.get(name))) for name in dict.fromkeys([*names, *ran])]
    job_keys = {(job.folder, tuple(job.result["overrides"] or ())) for job in jobs}
    for event in {event.job: event for event in events}.values():  # the last one of each job
        if event.event == REFUSED and (folder / event.folder, tuple(event.overrides)) not in job_keys:
            jobs.append(_job_of_event(folder, event))
    return sorted(jobs, key=lambda job: in_order(job.name))


def label_of(number: int, name: str) -> str:
    """A job as people call it: by its number, and its folder if it has another name."""
    return name if name == str(number) else f"{number} in {name}"


def _read_job(folder: Path, name: str, event: JobEvent | None) -> JobFiles:
    """The job in a folder of the sweep. Its result.json wins over the journal's last event."""
    if event is not None and not event.is_within:  # no other folder is looked into
        return _job_of_event(folder, event)
    run_dir = folder / name
    own_name = name if name != "." else folder.absolute().name
    job = JobFiles(name=own_name, folder=run_dir) if event is None else _job_of_event(folder, event)
    curves = _read_if_changed(read_curves, run_dir / METRICS_NAME)
    job = replace(job, settings=_settings(run_dir / CONFIG_NAME), curves=curves)
    try:
        result = _read_if_changed(read_result, run_dir / RESULT_NAME)
    except FileNotFoundError:
        if not is_held(run_dir / LOCK_NAME):
            return job
        return replace(job, status=RUNNING, result=job.result | {"error": None})
    except (OSError, UntrustedFileError) as error:
        problem = f"its {RESULT_NAME} cannot be read: {error}"
        return replace(job, status=FAILED, result=job.result | {"error": problem})
    has_diverged = event is not None and event.status == DIVERGED
    return replace(job, status=outcome(result, was_evaluated=has_diverged or "val_loss" in curves), result=result)


def _job_of_event(folder: Path, event: JobEvent) -> JobFiles:
    """A job as the journal tells of it."""
    is_gone = event.status in (None, RUNNING)  # unless it runs
    result = RunResult(world_size=0, overrides=event.overrides, config_hash=event.hash)
    result.error = GONE if is_gone else event.error
    status = FAILED if is_gone else str(event.status)
    own_folder = folder / event.folder if event.is_within else folder  # a page links to no other folder
    return JobFiles(name=label_of(event.job, event.folder), folder=own_folder, status=status, result=result.body())


def _read_if_changed(read: Callable[[Path], Any], path: Path) -> Any:
    """Read a file, again once it has changed: a sweep writes its report after each job."""
    try:
        status = path.stat()
        version = status.st_mtime_ns, status.st_size
    except (OSError, ValueError):
        version = 0, 0
    return _read_version(read, path, version)


@lru_cache(maxsize=2048)
def _read_version(read: Callable[[Path], Any], path: Path, version: tuple[int, int]) -> Any:
    return read(path)


def _settings(path: Path) -> dict[str, Any]:
    try:
        content = read_regular(path, max_nbytes=MAX_CONFIG_NBYTES)
    except (OSError, UntrustedFileError):
        return {}
    return {name: value for section in _SECTION.split(content) for name, value in _section(section).items()}


@lru_cache(maxsize=1024)
def _section(content: bytes) -> dict[str, Any]:
    """The settings of a group, as it stands in a config.yaml: jobs of a sweep have most of them in common."""
    try:
        values = parse_yaml(content)
    except UntrustedFileError:
        return {}
    settings = untrusted.dotted(values, with_empty=True) if isinstance(values, dict) else {}
    return {shortened(name, MAX_NAME): value for name, value in settings.items()}


KINDS = ("parameters", "gradients", "optimizer", "offloaded")
"""Kinds of bytes held by a rank at rest."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number of each job: a column of sweep.csv, and of the page's table where it has a head."""

    keys: tuple[str, ...] = ()
    """Its place in result.json; none: it is computed."""
    head: str = ""
    form: Callable[[float], str] = "{:,.0f}".format
    better: int = 0
    """-1: the least is the best; 1: the most is; 0: none is."""
    headline: str = ""
    """Words for the best one at the top of the page."""


_LOSS: Callable[[float], str] = "{:.4f}".format
FIGURES = {
    "ranks": Figure(keys=("world_size",)),
    "stage": Figure(keys=("stage",)),
    "steps": Figure(keys=("steps",)),
    "final_val_loss": Figure(keys=("final_val_loss",), head="val loss", form=_LOSS, better=-1),
    "final_train_loss": Figure(keys=("final_train_loss",), head="train loss", form=_LOSS),
    "tokens_per_s": Figure(keys=("tokens_per_s",), head="tokens/s", better=1, headline="Most tokens/s"),
    "samples_per_s": Figure(keys=("samples_per_s",), head="samples/s", better=1),
    "step_ms_median": Figure(keys=("step_ms_median",), head="ms/step", form="{:,.1f}".format, better=-1),
    **{
        name: Figure(keys=(name,))
        for name in ("data_wait_ms", "comm_wait_ms", "update_ms", "save_pause_ms", "train_s", "mfu")
    },
    "held_nbytes": Figure(head="memory", form=in_bytes, better=-1, headline="Least memory held"),
    "peak_nbytes": Figure(keys=("memory_bytes", "peak"), head="peak", form=in_bytes),
    **{f"{kind}_nbytes": Figure(keys=("memory_bytes", kind)) for kind in KINDS},
    **{f"theory_{kind}_nbytes": Figure(keys=("memory_bytes", "theory", kind)) for kind in KINDS},
    "sent_nbytes": Figure(
        keys=("comm_bytes_per_step", "sent"),
        head="sent/step",
        form=in_bytes,
        better=-1,
        headline="Least sent per step",
    ),
    "theory_sent_nbytes": Figure(keys=("comm_bytes_per_step", "theory")),
}
"""The columns by name: losses in nats, times in ms and s, bytes of rank 0."""
OF_A_RESUMED_RUN = "checkpoint.resume"
"""The setting to let a job go on: it tells no job from another."""
MAX_LABEL = 60
COLUMN = {"val_loss": "final_val_loss"}
"""Columns with another name than their objective."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One job. None is what is not known."""

    job: str
    folder: Path
    status: str
    """completed, pruned, diverged, failed, stopped or running; unfinished where nothing says more."""
    settings: dict[str, Any]
    """The settings different between the jobs, by their dotted names."""
    overrides: list[str]
    """As given on its command line."""
    command: str
    """Runs this job alone."""
    error: str | None
    """The first line of the error."""
    figures: dict[str, float | None]
    """Numbers by the name of their column, see `FIGURES`."""
    weights_sha256: str | None
    config_hash: str | None
    but_for_seed: str | None
    """Equal where all settings but the seed are."""
    curves: dict[str, Curve]

    def __getitem__(self, name: str) -> float | None:
        return self.figures[name]


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """The rows of some jobs, and how they are compared."""

    title: str
    rows: list[Row]
    settings: list[str]
    """The names of the different settings, those of command lines first."""
    objective: str | None = None
    """The column of `sweep.objective`; None where jobs have different ones."""
    rises: bool = False
    """Whether the most of it is the best."""
    place: Path | None = None
    """The folder of its files, from where the page links to the folders of jobs; None: it links to none."""
    is_live: bool = False
    """Whether it is written again while its jobs run."""

    @cached_property
    def loss(self) -> str:
        """Jobs are compared by this column: the objective, or a loss."""
        if self.objective is not None and any(row[self.objective] is not None for row in self.rows):
            return self.objective
        return "final_val_loss" if any(row["final_val_loss"] is not None for row in self.rows) else "final_train_loss"

    @property
    def loss_name(self) -> str:
        """It as people call it."""
        return {"final_val_loss": "validation loss", "final_train_loss": "training loss"}.get(self.loss, self.loss)

    @cached_property
    def ranked(self) -> list[Row]:
        """The completed jobs with a loss, the best first."""
        rows = [row for row in self.rows if row.status == "completed" and row[self.loss] is not None]
        return sorted(rows, key=self.loss_of, reverse=self.rises and self.loss == self.objective)

    def loss_of(self, row: Row) -> float:
        """The number of a ranked job to compare it by."""
        return row[self.loss] or 0.0

    @cached_property
    def telling(self) -> list[str]:
        """The settings different between the completed jobs; of fewer than two jobs, all of `settings`."""
        if len(self.ranked) < 2:
            return self.settings
        return [name for name in self.settings if len({repr(row.settings.get(name)) for row in self.ranked}) > 1]

    def only(self, folder: Path, events: Sequence[JobEvent]) -> "Report":
        """The report of the jobs of some events alone, with the numbers of the events.

        Args:
            folder: of the sweep.
        """
        by_name = {(row.folder, row.job): row for row in self.rows}
        by_folder = {row.folder: row for row in reversed(self.rows)}
        rows = []
        for job, name in sorted({(event.job, event.folder) for event in events}):
            label, place = printable(label_of(job, name), keep=""), folder / name
            row = by_name.get((place, label)) or by_folder.get(place)  # another sweep may have met it since
            rows += [] if row is None else [replace(row, job=label)]
        return replace(self, rows=rows)

    def link_to(self, row: Row) -> str:
        """The folder of a job from the page's on, as a link; empty for none."""
        if self.place is None or not row.folder.is_dir():
            return ""
        return f"./{quote(os.fsencode(os.path.relpath(row.folder, self.place)))}/"

    def label(self, *rows: Row) -> str:
        """The telling settings that jobs have in common, in short, such as `lr=0.003 stage=2`; empty for none. A job
        that did not complete may have more of them."""
        usual = {name: repr(self.ranked[0].settings.get(name)) for name in self.settings if self.ranked}
        odd = {name for name, value in usual.items() if repr(rows[0].settings.get(name)) != value}
        names = [name for name in self.settings if name in self.telling or name in odd]
        common = [name for name in names if len({repr(row.settings.get(name)) for row in rows}) == 1]
        short, settings = short_names(self.settings), rows[0].settings
        words = [f"{short[name]}={value_text(name, settings[name])}" for name in common if name in settings]
        return shortened(" ".join(words), MAX_LABEL)

    @property
    def counts(self) -> dict[str, int]:
        """How many jobs have each status, the most frequent first."""
        return dict(Counter(row.status for row in self.rows).most_common())


NUM_NAMED = 12
"""So many jobs of a list are named one by one."""


def jobs_named(rows: Sequence[Row]) -> str:
    """Such as job 2, or jobs 0-3, 7."""
    return f"{'jobs' if len(rows) > 1 else 'job'} {names_of(rows)}"


def names_of(rows: Sequence[Row]) -> str:
    """Jobs in few words: 0-3, 7; of many the first ones and how many more."""
    pieces = [shortened(row.job, 40) for row in rows]
    if all(name.isascii() and name.isdigit() and len(name) < 10 for name in pieces):
        numbers = sorted(map(int, pieces))
        starts = [number for number in numbers if number - 1 not in numbers]
        ends = [number for number in numbers if number + 1 not in numbers]
        runs = zip(starts, ends, strict=True)
        pieces = [str(start) if start == end else f"{start}\N{EN DASH}{end}" for start, end in runs]
    num_hidden = len(pieces) - NUM_NAMED
    return ", ".join(pieces[:NUM_NAMED]) + (f" and {num_hidden} more" if num_hidden > 0 else "")


def read_report(folder: Path) -> Report:
    """The report of a sweep's folder, or of a run's."""
    return report_of(read_jobs(folder), title="/".join(folder.absolute().parts[-2:]), place=folder)


def report_of(jobs: Sequence[JobFiles], title: str, place: Path | None = None) -> Report:
    """The report of some jobs; see `Report.place`."""
    names = _differing(jobs)
    objective, rises = _objective(jobs)
    rows = [_row(job, names, objective) for job in jobs]
    return Report(
        title=printable(title, keep=""),
        rows=rows,
        settings=names,
        objective=objective,
        rises=rises,
        place=place,
    )


def _objective(jobs: Sequence[JobFiles]) -> tuple[str | None, bool]:
    """The column of the sweep's first objective, and whether the most of it is the best."""
    objectives = set()
    for settings in (job.settings for job in jobs if job.settings.get("sweep.objective")):
        names, directions = settings["sweep.objective"], settings.get("sweep.direction")
        first = [value[0] if isinstance(value, list) and value else value for value in (names, directions)]
        objectives.add((str(first[0]), first[1] == "maximize"))
    if len(objectives) != 1:
        return None, False
    [(name, rises)] = objectives
    is_shown = name == printable(name, keep="") and len(name) <= MAX_LABEL
    return (COLUMN.get(name, name), rises) if is_shown else (None, False)


def _row(job: JobFiles, names: Sequence[str], objective: str | None) -> Row:
    result = job.result
    values = job.settings or _settings_of_command(result["overrides"])
    settings = {name: values[name] for name in names if name in values}
    for name, value in settings.items():
        if not (value is None or isinstance(value, bool) or number(value) is not None):
            settings[name] = cell(value)
    overrides = [override for override in result["overrides"] or [] if not override.startswith(f"{OF_A_RESUMED_RUN}=")]
    but_for_seed = None
    if "seed" in job.settings:
        left_out = ("seed", OF_A_RESUMED_RUN)
        but_for_seed = repr(sorted((name, repr(value)) for name, value in job.settings.items() if name not in left_out))
    return Row(
        job=printable(job.name, keep=""),
        folder=job.folder,
        status=job.status,
        settings=settings,
        overrides=[printable(override, keep="") for override in overrides],
        command=printable(shlex.join(["python", "-m", "zerotrain", *overrides]), keep=""),
        error=first_line(result["error"]),
        figures=_figures(result, objective),
        weights_sha256=None if result["weights_sha256"] is None else shortened(result["weights_sha256"], 64),
        config_hash=None if result["config_hash"] is None else shortened(result["config_hash"], 64),
        but_for_seed=but_for_seed,
        curves=job.curves,
    )


def _figures(result: dict[str, Any], objective: str | None) -> dict[str, float | None]:
    """The numbers of `FIGURES`, and the objective."""
    figures = {name: number(untrusted.value_at(result, *figure.keys)) for name, figure in FIGURES.items()}
    for name, value in figures.items():
        if name.endswith("nbytes") and value is not None and value < 0:
            figures[name] = None
    figures["ranks"] = figures["ranks"] or None
    held = [nbytes for kind in KINDS if (nbytes := figures[f"{kind}_nbytes"]) is not None]
    figures["held_nbytes"] = sum(held) if held else None
    if objective is not None and objective not in figures:
        figures[objective] = None
        with suppress(LookupError):
            figures[objective] = number(value_in(result, objective))
    return figures


def _differing(jobs: Sequence[JobFiles]) -> list[str]:
    """The names of the different settings, those given on command lines first. The others are sorted: the next jobs of
    a sweep move no column."""
    values: dict[str, set[str]] = {}
    counts: Counter[str] = Counter()
    from_commands: list[str] = []
    for job in jobs:
        settings_of_command = _settings_of_command(job.result["overrides"])
        from_commands += settings_of_command
        for name, value in (job.settings or settings_of_command).items():
            values.setdefault(name, set()).add(repr(value))
            counts[name] += bool(job.settings)
    num_known = sum(bool(job.settings) for job in jobs)
    differing = {name for name, texts in values.items() if len(texts) > 1 or 0 < counts[name] < num_known}
    differing.discard(OF_A_RESUMED_RUN)
    return [name for name in dict.fromkeys([*from_commands, *sorted(differing)]) if name in differing]


def _settings_of_command(overrides: Sequence[str] | None) -> dict[str, Any]:
    """The settings of a command line, as values or as texts."""
    settings: dict[str, Any] = {}
    for override in overrides or ():
        name, is_setting, value = override.lstrip("+~").partition("=")
        if is_setting:
            value = value.lower() if value.lower() in ("true", "false", "null") else value  # as Hydra reads True
            settings[shortened(name, MAX_NAME)] = value
            with suppress(UntrustedFileError):
                settings[shortened(name, MAX_NAME)] = parse_json(value, Any)
    return settings


# Groups of jobs that have something in common: equal weights, and settings that differ in the seed alone.


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The losses of jobs with equal settings but for `seed`."""

    rows: list[Row]
    mean: float
    deviation: float
    """The standard deviation of the sample."""
    least: float
    most: float


def equal_weights(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The jobs by the sha256 of their weights, the largest group first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.weights_sha256:
            groups.setdefault(row.weights_sha256, []).append(row)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def spreads(report: Report) -> list[Spread]:
    """The spread over seeds, of each group of two jobs or more, the best mean first."""
    groups: dict[str, list[Row]] = {}
    for row in report.ranked:
        if row.but_for_seed is not None:
            groups.setdefault(row.but_for_seed, []).append(row)
    results = []
    for rows in groups.values():
        losses = [report.loss_of(row) for row in rows]
        if len({row.settings.get("seed") for row in rows}) > 1:
            mean, deviation = statistics.fmean(losses), statistics.stdev(losses)
            results.append(Spread(rows=rows, mean=mean, deviation=deviation, least=min(losses), most=max(losses)))
    return sorted(results, key=lambda spread: spread.mean)
