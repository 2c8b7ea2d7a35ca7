"""The folders of jobs, as they were left: each is read within limits, and what cannot be read is said in its place."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from zerotrain.files.plain_yaml import parse_yaml
from zerotrain.files.untrusted import Optional, UntrustedFileError, parse_json, read_regular
from zerotrain.report.curves import NO_CURVE, Curve, read_curves
from zerotrain.report.values import in_order
from zerotrain.training.figures.result import RESULT_NAME, RunResult, read_result
from zerotrain.training.figures.sinks import METRICS_NAME

CONFIG_NAME, JOURNAL_NAME = "config.yaml", "sweep.jsonl"
FILES_OF_RUNS = (RESULT_NAME, METRICS_NAME)
"""Each of them makes a folder that of a run. A folder with a config.yaml alone may be an export, or anything."""
MAX_DEPTH = 6
"""Folders within each other in which a run is looked for."""
MAX_CONFIG_NBYTES, MAX_JOURNAL_NBYTES = 10**5, 2**24
"""Largest files that are read: a longer yaml may take minutes. Ours have 2 kB, and 400 bytes an event."""
MAX_ENTRIES = 200_000
"""Folders that are looked through."""
_SECTION = re.compile(rb"^(?=[A-Za-z_])", re.MULTILINE)
_TEXT = Optional((str, None))
_EVENT = {
    "event": str, "job": int, "folder": str, "overrides": Optional([str]), "hash": _TEXT, "status": _TEXT,
    "error": _TEXT,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class JobFiles:
    """The files in the folder of a job."""

    name: str
    """As people call the job: its folder within that of the sweep."""
    folder: Path
    result: dict[str, Any]
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


def read_jobs(folder: Path, run_dirs: Sequence[Path] | None = None) -> list[JobFiles]:
    """The jobs of a sweep's folder, or the run that a folder is, in the order of their names. A job that has left no
    folder of its own is there as the journal tells of it.

    Args:
        run_dirs: the folders that count; None: all that are there.
    """
    paths = run_dirs_in(folder) if run_dirs is None else run_dirs
    events = list(_journal(folder))
    said = {each["folder"]: each for each in events}
    jobs = []
    for path in paths:
        name = str(path.relative_to(folder)) if path != folder else path.absolute().name
        jobs.append(read_job(path, name, said.get(name)))
    told = {(each.name, tuple(each.result["overrides"] or ())) for each in jobs}
    for event in {each["job"]: each for each in events}.values():  # the last one of each job
        name = event["folder"]
        if event["event"] == "refused" and (name, tuple(event.get("overrides") or ())) not in told:
            name = f"{name} (job {event['job']})" if any(name == each.name for each in jobs) else name
            jobs.append(JobFiles(name=name, folder=folder / event["folder"], result=_as_result(event)))
    return sorted(jobs, key=lambda job: in_order(job.name))


def read_job(folder: Path, name: str, event: dict[str, Any] | None = None) -> JobFiles:
    """One job. A result.json wins over the event of the journal."""
    try:
        result = read_result(folder / RESULT_NAME)
    except FileNotFoundError:
        result = _as_result(event)
    except (OSError, UntrustedFileError) as error:
        result = RunResult(world_size=0, error=f"its {RESULT_NAME} cannot be read: {error}").body()
    train, val = _curves(folder / METRICS_NAME, *_written(folder / METRICS_NAME))
    settings = _settings(folder / CONFIG_NAME)
    return JobFiles(name=name, folder=folder, result=result, settings=settings, train=train, val=val)


def _as_result(event: dict[str, Any] | None) -> dict[str, Any]:
    """The result of a job that has left none: it runs, it was killed, or it never began."""
    if event is None:
        return RunResult(world_size=0, status="unfinished").body()
    began = event["event"] == "begun"
    status = "running" if began else event.get("status") or "failed"
    told = RunResult(world_size=0, overrides=event.get("overrides"), status=status, error=event.get("error"))
    told.config_hash = event.get("hash")
    return told.body()


def _journal(folder: Path) -> Iterator[dict[str, Any]]:
    """The events that the journal of a sweep tells, in their order; none that names a folder outside."""
    try:
        content = read_regular(folder / JOURNAL_NAME, max_nbytes=MAX_JOURNAL_NBYTES)
    except (OSError, UntrustedFileError):
        return
    for line in content.splitlines():
        try:
            event: dict[str, Any] = parse_json(line, _EVENT)
        except UntrustedFileError:
            continue
        parts = Path(event["folder"]).parts
        if parts and ".." not in parts and not os.path.isabs(event["folder"]) and "\0" not in event["folder"]:
            yield event


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
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
