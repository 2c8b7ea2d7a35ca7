"""The record of a run's steps, as a replay reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import Natural, UntrustedFileError, dotted, parse_json, read_regular
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
    attention: str
    cudnn: int | None
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


OF_ENVIRONMENT = [name for name in _RecordStart.__annotations__ if name not in ("settings", "data")]
"""The names of whatever a step's bits depend on beside settings and data."""
OF_BITS = ("seed", "model", "loss", "data", "optimizer", "scheduler", "precision", "train")
"""The groups of settings they depend on."""


@dataclass(frozen=True)
class Record:
    """The lines of a steps.jsonl."""

    steps: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """By step."""
    starts: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """The environment and settings in which the steps after so many were computed."""

    def start_of(self, step: int) -> Mapping[str, Any]:
        """The start of the steps with this one among them; empty where none was recorded."""
        earlier = [start for start in self.starts if start < step]
        return self.starts[max(earlier)] if earlier else {}

    @property
    def last_step(self) -> int:
        """The last recorded step."""
        return max(self.steps, default=0)

    @property
    def worst(self) -> int:
        """The first step without finite numbers; without one the largest spike; without one the largest gradient."""
        norms = {step: line.get("grad_norm") for step, line in sorted(self.steps.items())}
        if bad := [step for step, norm in norms.items() if norm is None]:
            return bad[0]
        spikes = Spikes()
        scores = {step: spike.score for step in norms if (spike := spikes.find_in(self.steps[step])) is not None}
        return max(norms, key=lambda step: (scores.get(step, 0.0), float(norms[step] or 0.0)))

    def difference(self, step: int, outcome: Any) -> str | None:
        """How a step computed again differs from the record of the run; None: it does not, or there is no record."""
        line, values = self.steps.get(step), without_non_finite(recorded(outcome))
        if line is None:
            return None
        differences = []
        for name, value in values.items():
            if line.get(name) != value:
                differences.append(f"{name}: recorded {line.get(name)!r}, now {value!r}")
        return f"step {step} differs: {'; '.join(differences)}" if differences else None

    def causes(self, step: int, environment: Mapping[str, Any], settings: Mapping[str, Any] | None) -> list[str]:
        """A line for each condition of a step's bits that was different when the run made it.

        Args:
            environment: see `environment`, here.
            settings: those of the replay.
        """
        start = self.start_of(step)
        pairs = [(name, start[name], environment[name]) for name in OF_ENVIRONMENT if name in start]
        if start.get("settings") and settings:
            old, new = (
                dotted({name: values.get(name) for name in OF_BITS}) for values in (start["settings"], settings)
            )
            pairs += [(name, old.get(name), new.get(name)) for name in sorted(old.keys() | new.keys())]
        return [f"{name}: {old} in the run, {new} here" for name, old, new in pairs if old != new]


def read_record(folder: Path) -> Record:
    """The record of a run; an empty one where it has none. A last line that was cut off counts for nothing.

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
            entry = parse_json(line, _StepLine)
        except UntrustedFileError as error:
            if number == len(lines):
                break
            raise ConfigError(f"{path}: line {number} is none of a run: {error}; is the file damaged?") from None
        if "start" in entry:
            starts[entry["step"]] = entry["start"]
        else:
            steps[entry["step"]] = entry
    return Record(steps, starts)
