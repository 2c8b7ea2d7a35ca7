"""The folders of jobs, as they were left: each is read within limits, and what cannot be read is said in its place."""

import os
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from zerotrain.files.lock import LOCK_NAME, is_held
from zerotrain.files.untrusted import UntrustedFileError, parse_yaml, read_regular
from zerotrain.report.curves import NO_CURVE, Curve, read_curves
from zerotrain.report.journal import DIVERGED, FAILED, REFUSED, RUNNING, JobEvent, SweepJournal, outcome
from zerotrain.report.values import in_order, shortened
from zerotrain.training.result import METRICS_NAME, RESULT_NAME, RunResult, read_result

CONFIG_NAME = "config.yaml"
FILES_OF_RUNS = (RESULT_NAME, METRICS_NAME)
"""Each of them makes a folder that of a run. A folder with a config.yaml alone may be an export, or anything."""
MAX_DEPTH = 6
"""Folders within each other in which a run is looked for."""
MAX_CONFIG_NBYTES = 10**5
"""Largest yaml that is read: a longer one may take minutes. Ours have 2 kB."""
MAX_NAME = 200
"""Characters of the name of a setting, or of a group of them, that are shown."""
UNFINISHED = "unfinished"
GONE = "its process is gone; the same command again goes on with it"
MAX_ENTRIES = 200_000
"""Folders that are looked through."""
_SECTION = re.compile(rb"^(?=[A-Za-z_])", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class JobFiles:
    """The files in the folder of a job."""

    name: str
    """As people call the job: its number in the sweep, and its folder where that has another name."""
    folder: Path
    status: str = UNFINISHED
    """completed, diverged, failed, stopped or running; unfinished where nothing says more."""
    result: dict[str, Any] = field(default_factory=RunResult(world_size=0).body)
    """The body of result.json; where there is none, what the journal of the sweep says in its form."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Those of config.yaml by their dotted names; none where it cannot be read."""
    train: Curve = NO_CURVE
    val: Curve = NO_CURVE


def run_dirs_in(folder: Path) -> list[Path]:
    """The folders of the runs in a folder, which may be one itself, in the order of their names. No link is followed,
    and nothing is looked for within a run."""
    found, waiting, num_seen = [], [(folder, 0)], 0
    while waiting and num_seen < MAX_ENTRIES:
        path, depth = waiting.pop()
        num_seen += 1
        if any(os.path.lexists(path / name) for name in FILES_OF_RUNS):
            found.append(path)
        elif depth < MAX_DEPTH:
            waiting += [(each, depth + 1) for each in _folders_in(path)]
    return sorted(found, key=lambda path: in_order(str(path)))


def read_jobs(folder: Path) -> list[JobFiles]:
    """The jobs of a sweep's folder, or the run that a folder is, in the order of their names. A job that has left no
    folder of its own is there as the journal tells of it."""
    events = SweepJournal(folder).events()
    ran = {each.folder: each for each in events if each.event != REFUSED}
    refused = {each.folder: each for each in events if each.event == REFUSED}
    there = [path.relative_to(folder).as_posix() for path in run_dirs_in(folder)]
    jobs = [_read_job(folder, name, ran.get(name, refused.get(name))) for name in dict.fromkeys([*there, *ran])]
    told = {(each.folder, tuple(each.result["overrides"] or ())) for each in jobs}
    for event in {each.job: each for each in events}.values():  # the last one of each job
        if event.event == REFUSED and (folder / event.folder, tuple(event.overrides)) not in told:
            jobs.append(_as_told(folder, event))
    return sorted(jobs, key=lambda job: in_order(job.name))


def label_of(number: int, name: str) -> str:
    """A job as people call it: by its number, and its folder where that has another name."""
    return name if name == str(number) else f"{number} in {name}"


def _read_job(folder: Path, name: str, event: JobEvent | None) -> JobFiles:
    """The job in a folder within that of the sweep. Its result.json wins over the journal's last event."""
    if event is not None and not event.is_within:  # no other folder is looked into
        return _as_told(folder, event)
    run_dir = folder / name
    train, val = _curves(run_dir / METRICS_NAME, *_written(run_dir / METRICS_NAME))
    try:
        result = _result(run_dir / RESULT_NAME, *_written(run_dir / RESULT_NAME))
        said = DIVERGED if val.loss else None if event is None else event.status
        found = JobFiles(name="", folder=run_dir, status=outcome(result, said), result=result)
    except (OSError, UntrustedFileError) as error:
        found = JobFiles(name="", folder=run_dir) if event is None else _as_told(folder, event)
        if not isinstance(error, FileNotFoundError):
            problem = f"its {RESULT_NAME} cannot be read: {error}"
            found = replace(found, status=FAILED, result=found.result | {"error": problem})
        elif is_held(run_dir / LOCK_NAME):
            found = replace(found, status=RUNNING, result=found.result | {"error": None})
    own_name = name if name != "." else folder.absolute().name
    called = own_name if event is None else label_of(event.job, event.folder)
    return replace(found, name=called, settings=_settings(run_dir / CONFIG_NAME), train=train, val=val)


def _as_told(folder: Path, event: JobEvent) -> JobFiles:
    """A job as the journal tells of it."""
    is_gone = event.status in (None, RUNNING)  # unless it runs
    result = RunResult(world_size=0, overrides=event.overrides, config_hash=event.hash)
    result.error = GONE if is_gone else event.error
    status = FAILED if is_gone else str(event.status)
    return JobFiles(
        name=label_of(event.job, event.folder), folder=folder / event.folder, status=status, result=result.body()
    )


def _folders_in(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _written(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except (OSError, ValueError):
        return 0, 0
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=1024)
def _curves(path: Path, mtime_ns: int, size: int) -> tuple[Curve, Curve]:
    """The curves of a file; it is read again once it has changed: a sweep writes its report after each job."""
    return read_curves(path)


@lru_cache(maxsize=1024)
def _result(path: Path, mtime_ns: int, size: int) -> dict[str, Any]:
    """The body of a result.json; it is read again once it has changed."""
    return read_result(path)


def _settings(path: Path) -> dict[str, Any]:
    try:
        content = read_regular(path, max_nbytes=MAX_CONFIG_NBYTES)
    except (OSError, UntrustedFileError):
        return {}
    found: dict[str, Any] = {}
    for section in _SECTION.split(content):
        found |= _section(section)
    return found


@lru_cache(maxsize=1024)
def _section(content: bytes) -> dict[str, Any]:
    """The settings of a group, as it stands in a config.yaml: jobs of a sweep have most of them in common."""
    try:
        return _flat(parse_yaml(content))
    except UntrustedFileError:
        return {}


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items() if isinstance(values, dict) else ():
        path = prefix + shortened(str(name), MAX_NAME)
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{path}.")
        else:
            found[path] = value
    return found
