"""What was measured: one measurement for each engine and round, their medians, and the file that holds them."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.rank import RankResult
from benchmarks.split import Split
from benchmarks.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Measurement(Split):
    """One engine in one round, over all ranks; for several rounds, the medians. Fields without a docstring are as in
    `RankResult`, of rank 0 or, for memory, of the highest rank. What is of `Split` is the mean over ranks."""

    engine: str
    step_ms: float
    """Median over the timed steps, each the mean over ranks."""
    loss: float
    """Of the last step, the mean over ranks."""
    start_nbytes: int
    peak_nbytes: int
    sent_nbytes: float | None
    """Sent in a step, read off the interfaces."""
    counted_nbytes: int | None
    theory_nbytes: int | None
    full_speed_ms: float | None
    host_ms: float | None
    device_peak_nbytes: int | None
    other_load: float
    """Share of the machine's cores that something else than the benchmark used meanwhile."""

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation by PaLM's convention (arXiv 2204.02311, app. B), where the device's peak is known."""
        return None if self.full_speed_ms is None else self.full_speed_ms / self.step_ms

    @property
    def own_peak_nbytes(self) -> int:
        """Peak resident memory above the interpreter's own."""
        return self.peak_nbytes - self.start_nbytes


def over_ranks(
    engine: str, ranks: list[RankResult], *, num_interfaces: int, num_steps: int, other_load: float
) -> Measurement:
    """One round's measurement. Memory is the highest rank's; each of `num_interfaces` hosts holds as many neighbouring
    ranks, whose first reads their interface."""
    readers = [ranks[host * len(ranks) // num_interfaces] for host in range(num_interfaces)]
    sent = [rank.sent_nbytes for rank in readers if rank.sent_nbytes is not None]
    first = ranks[0]
    return Measurement(
        **{each.name: _mean(getattr(rank, each.name) for rank in ranks) for each in fields(Split)},
        engine=engine,
        step_ms=statistics.median(statistics.mean(step) for step in zip(*(r.step_ms for r in ranks), strict=True)),
        loss=statistics.mean(rank.loss for rank in ranks),
        start_nbytes=max(rank.start_nbytes for rank in ranks),
        peak_nbytes=max(rank.peak_nbytes for rank in ranks),
        sent_nbytes=sum(sent) / len(ranks) / num_steps if sent else None,
        counted_nbytes=first.counted_nbytes,
        theory_nbytes=first.theory_nbytes,
        full_speed_ms=first.full_speed_ms,
        host_ms=first.host_ms,
        device_peak_nbytes=first.device_peak_nbytes,
        other_load=other_load,
    )


@dataclass(frozen=True)
class Comparison:
    """All that one command measured."""

    command: str
    date: str
    machine: str
    workload: Workload
    link_bit_per_s: int | None
    """Rate of the link between hosts; None on one machine."""
    measurements: list[Measurement]
    failures: dict[str, str] = field(default_factory=dict)
    """By engine: why it could not be measured."""
    left_out: dict[str, str] = field(default_factory=dict)
    """By engine: why it was not measured, or not in every round."""

    @property
    def engines(self) -> list[str]:
        """Names, in the order of the first round."""
        return list(dict.fromkeys(measurement.engine for measurement in self.measurements))

    def rounds_of(self, engine: str) -> list[Measurement]:
        """The measurements of one engine."""
        return [measurement for measurement in self.measurements if measurement.engine == engine]

    def medians(self) -> dict[str, Measurement]:
        """By engine: each number's median over the rounds."""
        return {engine: _median_of(self.rounds_of(engine)) for engine in self.engines}

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Comparison":
        """Read what `save` wrote."""
        values = json.loads(path.read_text())
        values["workload"] = Workload(**values["workload"])
        values["measurements"] = [Measurement(**each) for each in values["measurements"]]
        return cls(**values)


def _median_of(rounds: list[Measurement]) -> Measurement:
    columns: dict[str, Any] = {"engine": rounds[0].engine}
    for name in asdict(rounds[0]):
        if name != "engine":
            values = [value for each in rounds if (value := getattr(each, name)) is not None]
            columns[name] = statistics.median(values) if values else None
    return Measurement(**columns)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def missed_rounds(
    engines: list[str], measured: list[Measurement], failures: Mapping[str, str], num_rounds: int, limit_s: float
) -> dict[str, str]:
    """By engine that has not failed: how many rounds the time limit has left out, where there are any."""
    num_missed = {name: num_rounds - sum(each.engine == name for each in measured) for name in engines}
    return {
        name: f"{number} of {num_rounds} rounds, by the time limit of {limit_s:.0f} s"
        for name, number in num_missed.items()
        if number and name not in failures
    }


def lowest(values: Iterable[float]) -> float:
    """The smallest, or nan where there is none."""
    return min(values, default=math.nan)
