"""The record of a run's steps, as a replay reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from zerotrain.engine.options import dotted
from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import Natural, UntrustedFileError, parse_json, read_regular
from zerotrain.training.callbacks.record import Spikes, recorded
from zerotrain.training.result import STEPS_NAME, without_non_finite

MAX_NBYTES = 2**30
"""A steps.jsonl of some 8 million steps."""


class _RecordStart(TypedDict, total=False):
    torch: str
    zerotrain: str
    device: str
    machine: str
    kernels: str
    threads: int
    settings: dict[str, Any] | None
    data: dict[str, Any]


class _StepLine(TypedDict):
    step: Natural
    start: NotRequired[_RecordStart]
    loss: NotRequired[float | None]
    grad_norm: NotRequired[float | None]
    update: NotRequired[str]
    skipped: NotRequired[bool]


COMPARED = ("loss", "grad_norm", "update", "skipped")
OF_ENVIRONMENT = ("torch", "zerotrain", "device", "machine", "kernels", "threads")
"""The names of all that a step's bits depend on beside settings and data."""
OF_BITS = ("seed", "model", "data", "optimizer", "scheduler", "precision", "train")
"""The groups of settings that it depends on."""


@dataclass(frozen=True)
class Record:
    """The lines of a steps.jsonl."""

    steps: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """By step."""
    starts: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """The environment and settings in which the steps after so many were computed."""

    def start_of(self, step: int) -> Mapping[str, Any]:
        """That of the steps among which this one is; empty where nobody has written one."""
        before = [each for each in self.starts if each < step]
        return self.starts[max(before)] if before else {}

    @property
    def last(self) -> int:
        """The last step that is recorded."""
        return max(self.steps, default=0)

    @property
    def worst(self) -> int:
        """The first step that was not finite; without one the largest spike; without one the largest gradient."""
        norms = {step: each.get("grad_norm") for step, each in sorted(self.steps.items())}
        if bad := [step for step, norm in norms.items() if norm is None]:
            return bad[0]
        spikes = Spikes()
        found = {step: spike.score for step in norms if (spike := spikes.find_in(self.steps[step])) is not None}
        return max(norms, key=lambda step: (found.get(step, 0.0), float(norms[step] or 0.0)))

    def difference(self, step: int, outcome: Any) -> str | None:
        """How a step that was computed again differs from what the run has recorded; None: not, or nothing is."""
        was, now = self.steps.get(step), without_non_finite(recorded(outcome))
        if was is None:
            return None
        told = [
            f"{name}: recorded {was.get(name)!r}, now {now[name]!r}" for name in COMPARED if was.get(name) != now[name]
        ]
        return f"step {step} differs: {'; '.join(told)}" if told else None

    def causes(self, step: int, now: Mapping[str, Any], settings: Mapping[str, Any] | None) -> list[str]:
        """A line for all that the bits of a step depend on and that was different when the run made it.

        Args:
            now: see `environment`.
            settings: those of the replay.
        """
        start = self.start_of(step)
        pairs = [(name, start[name], now[name]) for name in OF_ENVIRONMENT if name in start]
        if start.get("settings") and settings:
            was, here = (dotted({name: of.get(name) for name in OF_BITS}) for of in (start["settings"], settings))
            pairs += [(name, was.get(name), here.get(name)) for name in sorted(was.keys() | here.keys())]
        return [f"{name}: {then} in the run, {now} here" for name, then, now in pairs if then != now]


def read_record(folder: Path) -> Record:
    """The record of a run; an empty one where it has none. A line that is cut off, the last, counts for nothing.

    Raises:
        ConfigError: it is no record of a run.
    """
    path = folder / STEPS_NAME
    try:
        lines = read_regular(path, max_nbytes=MAX_NBYTES).splitlines()
    except FileNotFoundError:
        return Record()
    except (OSError, UntrustedFileError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    steps: dict[int, Any] = {}
    starts: dict[int, Any] = {}
    for number, line in enumerate(lines, 1):
        try:
            said = parse_json(line, _StepLine)
        except UntrustedFileError as error:
            if number == len(lines):
                break
            raise ConfigError(f"{path}: line {number} is none of a run: {error}; is the file damaged?") from None
        if "start" in said:
            starts[said["step"]] = said["start"]
        else:
            steps[said["step"]] = said
    return Record(steps, starts)
