"""The last line of a terminal while a sweep runs: the step and the loss of each running job."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO, TypedDict

from zerotrain.files.untrusted import (
    Natural,
    UntrustedFileError,
    only_regular,
    parse_json,
    parse_yaml,
    read_regular,
    require_kind,
)
from zerotrain.report.journal import BEGUN, JobEvent

_ERASED = "\r\x1b[K"
_NBYTES = 2**14
"""Read from the end of a metrics.jsonl; a line of ours has 500."""
_MAX_CONFIG_NBYTES = 10**5
_USUAL_COLUMNS = 80


class _ProgressLine(TypedDict):
    step: Natural
    train_loss: float | None


class _Train(TypedDict):
    max_steps: Natural


class _Config(TypedDict):
    train: _Train


class StatusLine:
    """One line, which is drawn again in its place.

    Args:
        stream: a terminal, or anything else, which gets none.
        folder: of the sweep.
    """

    def __init__(self, stream: TextIO, folder: Path) -> None:
        self._stream, self._folder = stream, folder
        self._has_place = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._shown = ""
        self._max_steps: dict[str, int | None] = {}
        """By the folder of the job."""

    def draw(self, last: list[JobEvent]) -> None:
        """Show the jobs that run.

        Args:
            last: the last event of each job.
        """
        if not self._has_place:
            return
        running = [event for event in last if event.event == BEGUN and event.is_within]
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

    def _write(self, text: str, shown: str) -> None:
        self._shown = shown
        self._stream.write(text)
        self._stream.flush()

    def _of_job(self, event: JobEvent) -> Iterator[str]:
        yield f"job {event.job}"
        run_dir = self._folder / event.folder
        if (said := _last_measured(run_dir / "metrics.jsonl")) is None:
            yield "starts"
            return
        if self._max_steps.get(event.folder) is None:
            self._max_steps[event.folder] = _max_steps(run_dir / "config.yaml")
        max_steps = self._max_steps[event.folder]
        yield f"step {said['step']}" if max_steps is None else f"step {said['step']}/{max_steps}"
        yield "loss nan" if said["train_loss"] is None else f"loss {said['train_loss']:.3f}"


def _last_measured(path: Path) -> "dict[str, int | float | None] | None":
    """The last line of a metrics.jsonl that has a loss of training; None where there is none."""
    with suppress(OSError), open(path, "rb", opener=only_regular) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _NBYTES))
        for line in reversed(file.read(_NBYTES).split(b"\n")):
            with suppress(UntrustedFileError):
                said: dict[str, int | float | None] = parse_json(line, _ProgressLine)
                return said
    return None


def _max_steps(path: Path) -> int | None:
    """The steps of a run by its config.yaml; None where that does not say."""
    with suppress(OSError, UntrustedFileError):
        config = require_kind(parse_yaml(read_regular(path, max_nbytes=_MAX_CONFIG_NBYTES)), _Config)
        return int(config["train"]["max_steps"])
    return None
