"""A row for each job: what the terminal, the csv, the json and the page show are the same rows."""

import hashlib
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from zerotrain.files.untrusted import printable
from zerotrain.report.curves import Curve
from zerotrain.report.journal import JobEvent
from zerotrain.report.reading import MAX_NAME, JobFiles, label_of, read_jobs
from zerotrain.report.values import at, cell, first_line, number, numbers_at, shortened
from zerotrain.training.result import value_in

KINDS = ("parameters", "gradients", "optimizer", "offloaded")
"""Kinds of bytes that a rank holds at rest."""
OF_A_RESUMED_RUN = "checkpoint.resume"
"""The setting that lets a job go on, and tells no job from another."""
MAX_LABEL = 60
COLUMN = {"val_loss": "final_val_loss"}
"""Columns of objectives that have another name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One job. None is what is not known."""

    job: str
    folder: Path
    status: str
    """completed, pruned, diverged, failed, stopped or running; unfinished where nothing says more."""
    settings: dict[str, Any]
    """Those that differ between the jobs, by their dotted names."""
    overrides: list[str]
    """As given on its command line."""
    command: str
    """Runs this job alone."""
    error: str | None
    """The first line of the error."""
    figures: dict[str, float | None]
    """Numbers of result.json by the name of their column, see `_figures`."""
    weights_sha256: str | None
    config_hash: str | None
    but_for_seed: str | None
    """Equal where all settings but the seed are."""
    train: Curve
    val: Curve

    def __getitem__(self, name: str) -> float | None:
        return self.figures[name]


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """All that is told of some jobs."""

    title: str
    rows: list[Row]
    settings: list[str]
    """The names of the settings that differ, those of command lines first."""
    objective: str | None = None
    """The column that `sweep.objective` names; None where jobs have different ones."""
    rises: bool = False
    """Whether the most of it is the best."""

    @cached_property
    def loss(self) -> str:
        """The column that jobs are compared by: the objective, or a loss."""
        if self.objective is not None and any(row[self.objective] is not None for row in self.rows):
            return self.objective
        has_val = any(row["final_val_loss"] is not None for row in self.rows)
        return "final_val_loss" if has_val else "final_train_loss"

    @property
    def loss_name(self) -> str:
        """It as people call it."""
        return {"final_val_loss": "validation loss", "final_train_loss": "training loss"}.get(self.loss, self.loss)

    @cached_property
    def ranked(self) -> list[Row]:
        """The completed jobs with a loss, the best first."""
        known = [row for row in self.rows if row.status == "completed" and row[self.loss] is not None]
        return sorted(known, key=lambda row: row[self.loss] or 0.0, reverse=self.rises and self.loss == self.objective)

    @cached_property
    def telling(self) -> list[str]:
        """The settings that tell the completed jobs from each other; of fewer than two, all that differ."""
        known = [{name: repr(row.settings.get(name)) for name in self.settings} for row in self.ranked]
        return [name for name in self.settings if len(known) < 2 or len({each[name] for each in known}) > 1]

    def only(self, folder: Path, events: Sequence[JobEvent]) -> "Report":
        """The report of those jobs alone that some events are about, with the numbers that these give them.

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

    def label(self, *rows: Row) -> str:
        """The telling settings that jobs have in common, in short, such as `lr=0.003 stage=2`; empty for none. A job
        that did not complete may differ in others too."""
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


def read_report(folder: Path) -> Report:
    """The report of a sweep's folder, or of a run's."""
    return report_of(read_jobs(folder), title="/".join(folder.absolute().parts[-2:]))


def report_of(jobs: Sequence[JobFiles], title: str) -> Report:
    """The report of jobs that were read."""
    names = _differing(jobs)
    objective, rises = _objective(jobs)
    rows = [_row(job, names, objective) for job in jobs]
    return Report(
        title=printable(title, keep=""),
        rows=rows,
        settings=names,
        objective=objective and COLUMN.get(objective, objective),
        rises=rises,
    )


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Each dotted name with its last part, or as many as tell it from the others; a class is called by its group."""
    names = list(names)
    plain = {name: name.removesuffix("._target_").split(".") for name in names}
    found = {}
    for name, parts in plain.items():
        others = [other for each, other in plain.items() if each != name]
        num = next((num for num in range(1, len(parts)) if all(o[-num:] != parts[-num:] for o in others)), len(parts))
        found[name] = shortened(".".join(parts[-num:]), MAX_LABEL)
    return found


def value_text(name: str, value: Any) -> str:
    """The value of a setting, in short: of a class its name alone."""
    text = cell(value)
    return text.rpartition(".")[2] or text if name.endswith("_target_") else text


def _objective(jobs: Sequence[JobFiles]) -> tuple[str | None, bool]:
    """The first objective of the sweep, and whether the most of it is the best."""
    given = {
        (str(_first(job.settings.get("sweep.objective"))), _first(job.settings.get("sweep.direction")) == "maximize")
        for job in jobs
        if job.settings.get("sweep.objective")
    }
    if len(given) != 1:
        return None, False
    [(name, rises)] = given
    return (name, rises) if name == printable(name, keep="") and len(name) <= MAX_LABEL else (None, False)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _row(job: JobFiles, names: Sequence[str], objective: str | None) -> Row:
    result = job.result
    known = job.settings or _given(result["overrides"])
    settings = {name: _plain(known[name]) for name in names if name in known}
    overrides = [each for each in result["overrides"] or [] if not each.startswith(f"{OF_A_RESUMED_RUN}=")]
    return Row(
        job=printable(job.name, keep=""),
        folder=job.folder,
        status=job.status,
        settings=settings,
        overrides=[printable(each, keep="") for each in overrides],
        command=printable(shlex.join(["python", "-m", "zerotrain", *overrides]), keep=""),
        error=first_line(result["error"]),
        figures=_figures(result, objective),
        weights_sha256=None if result["weights_sha256"] is None else shortened(result["weights_sha256"], 64),
        config_hash=None if result["config_hash"] is None else shortened(result["config_hash"], 64),
        but_for_seed=_but_for_seed(job.settings),
        train=job.train,
        val=job.val,
    )


def _figures(result: dict[str, Any], objective: str | None) -> dict[str, float | None]:
    """The columns of numbers: losses in nats, times in ms and s, bytes of rank 0, and the objective."""
    memory, theory = numbers_at(result, "memory_bytes"), numbers_at(result, "memory_bytes", "theory")
    found: dict[str, Any] = {
        "ranks": result["world_size"] or None,
        **{name: number(result[name]) for name in ("stage", "steps", "final_train_loss", "final_val_loss")},
        **{name: number(result[name]) for name in ("tokens_per_s", "samples_per_s", "step_ms_median")},
        **{name: number(result[name]) for name in ("data_wait_ms", "comm_wait_ms", "update_ms")},
        **{name: number(result[name]) for name in ("save_pause_ms", "train_s", "mfu")},
        "sent_nbytes": number(at(result, "comm_bytes_per_step", "sent")),
        "theory_sent_nbytes": number(at(result, "comm_bytes_per_step", "theory")),
        **{f"{kind}_nbytes": memory.get(kind) for kind in KINDS},
        **{f"theory_{kind}_nbytes": theory.get(kind) for kind in KINDS},
        "peak_nbytes": memory.get("peak"),
    }
    if objective is not None and COLUMN.get(objective, objective) not in found:
        with suppress(LookupError):
            found[objective] = None
            found[objective] = number(value_in(result, objective))
    return {name: None if name.endswith("nbytes") and value and value < 0 else value for name, value in found.items()}


def _differing(jobs: Sequence[JobFiles]) -> list[str]:
    """The names of the settings that differ, those that were given on command lines first."""
    values: dict[str, set[str]] = {}
    counts: Counter[str] = Counter()
    for job in jobs:
        for name, value in (job.settings or _given(job.result["overrides"])).items():
            values.setdefault(name, set()).add(repr(value))
            counts[name] += bool(job.settings)
    num_known = sum(bool(job.settings) for job in jobs)
    differing = [name for name, each in values.items() if len(each) > 1 or 0 < counts[name] < num_known]
    given = [name for job in jobs for name in _given(job.result["overrides"])]
    first = [name for name in dict.fromkeys(given) if name in differing]
    return [name for name in dict.fromkeys([*first, *differing]) if name != OF_A_RESUMED_RUN]


def _given(overrides: Sequence[str] | None) -> dict[str, Any]:
    """The settings of a command line, as texts or as the numbers that they are."""
    pairs = (each.lstrip("+~").partition("=") for each in overrides or [])
    return {shortened(name, MAX_NAME): _read(value) for name, is_one, value in pairs if is_one}


def _read(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text) if len(text) < MAX_LABEL else text
        except ValueError:
            continue
    return {"true": True, "false": False, "null": None}.get(text, text)


def _plain(value: Any) -> Any:
    is_plain = value is None or isinstance(value, bool) or number(value) is not None
    return value if is_plain else cell(value)


def _but_for_seed(settings: dict[str, Any]) -> str | None:
    if "seed" not in settings:
        return None
    others = sorted((name, repr(value)) for name, value in settings.items() if name not in ("seed", OF_A_RESUMED_RUN))
    return hashlib.sha256(repr(others).encode()).hexdigest()
