"""`python -m benchmarks.targets RESULTS.json ...`: what our engine is to reach beside what it does; a column a file."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engines import ENGINES
from benchmarks.report import markdown
from benchmarks.results import Comparison
from benchmarks.standing import Standing


@dataclass(frozen=True)
class Target:
    """One line: a figure of some of our stages that must not exceed a limit."""

    name: str
    figure: Callable[[Standing, str], float]
    """(standing, engine) -> what is limited; nan where it was not measured."""
    engines: tuple[str, ...]
    loopback: float | None = None
    """Limit on one host; None: none."""
    link: float | None = None
    """Limit between two hosts."""
    loopback_bf16: float | None = None
    """Limit on one host in bf16, where it is another."""
    sizes: tuple[str, ...] = ("13.9m",)

    def limit(self, comparison: Comparison) -> float | None:
        """The limit that holds for what was run; None: none."""
        if comparison.workload.size not in self.sizes:
            return None
        if comparison.link_bit_per_s is not None:
            return self.link
        if comparison.workload.precision == "bf16" and self.loopback_bf16 is not None:
            return self.loopback_bf16
        return self.loopback


def _time_over(other_ms: Callable[[Standing, str], float]) -> Callable[[Standing, str], float]:
    return lambda standing, engine: standing.medians[engine].step_ms / other_ms(standing, engine)


def _counted_over_theory(standing: Standing, engine: str) -> float:
    median = standing.medians[engine]
    return _ratio(median.counted_nbytes, median.theory_nbytes)


def _sent_over_counted(standing: Standing, engine: str) -> float:
    median = standing.medians[engine]
    return _ratio(median.sent_nbytes, median.counted_nbytes)


def _ratio(value: float | None, of: float | None) -> float:
    """nan where one was not measured."""
    return math.nan if value is None or not of else value / of


def _peak_over_peer(standing: Standing, engine: str) -> float:
    return standing.medians[engine].peak_nbytes / standing.lowest_peer_nbytes(engine)


def _own_peak_over_peer(standing: Standing, engine: str) -> float:
    peer_nbytes = standing.lowest_peer_nbytes(engine, above_interpreter=True)
    return standing.medians[engine].own_peak_nbytes / peer_nbytes


_over_ddp = _time_over(lambda standing, _: standing.ddp_ms)
_over_peer = _time_over(Standing.best_peer_ms)
_over_limit = _time_over(Standing.limit_ms)

_ALL = ("zero0", "zero1", "zero2", "zero3")

TARGETS = (
    Target("time against DDP", _over_ddp, ("zero0",), loopback=0.95, link=0.95),
    Target("time against the best peer of the stage", _over_peer, ("zero1",), 0.75, 0.45, loopback_bf16=0.90),
    Target("time against the best peer of the stage", _over_peer, ("zero2",), 0.65, 0.45),
    Target("time against DDP", _over_ddp, ("zero1", "zero2"), loopback=0.88, link=0.72),
    Target("time against the best peer of the stage", _over_peer, ("zero3",), 0.65, 0.60),
    Target("time over max(compute alone, bytes / rate)", _over_limit, ("zero1", "zero2", "zero3"), link=1.20),
    Target("bytes that are counted over the theory's", _counted_over_theory, _ALL, loopback=1.02, link=1.02),
    Target("bytes on the interface over those counted", _sent_over_counted, _ALL, loopback=0.02, link=1.02),
    Target(
        "peak resident memory against the best peer of the stage",
        _peak_over_peer,
        _ALL,
        loopback=1.0,
        sizes=("13.9m", "100m"),
    ),
    Target(
        "peak above the interpreter's own against the best peer of the stage",
        _own_peak_over_peer,
        ("zero3",),
        loopback=0.65,
        sizes=("100m",),
    ),
)


def verdicts(comparisons: list[Comparison]) -> str:
    """A Markdown table: a line for each target and stage, a column for each comparison."""
    standings = [Standing(comparison) for comparison in comparisons]
    rows = [["target", "engine", *(_title(comparison) for comparison in comparisons)]]
    for target in TARGETS:
        for engine in target.engines:
            cells = [_verdict(target, engine, standing) for standing in standings]
            if any(cells):
                rows.append([target.name, ENGINES[engine].label, *cells])
    return markdown(rows)


def _title(comparison: Comparison) -> str:
    workload = comparison.workload
    rate = comparison.link_bit_per_s
    return f"{workload.size} {workload.precision}, {'loopback' if rate is None else f'{rate / 1e9:g} Gbit/s link'}"


def _verdict(target: Target, engine: str, standing: Standing) -> str:
    limit = target.limit(standing.comparison)
    if limit is None:
        return ""
    figure = target.figure(standing, engine) if engine in standing.medians else math.nan
    if math.isnan(figure):
        return f"<= {limit:.2f}: not measured"
    return f"{figure:.3f} <= {limit:.2f}: met" if figure <= limit else f"**{figure:.3f} > {limit:.2f}: missed**"


def main() -> None:
    """Print the verdicts on the results named on the command line."""
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    print(verdicts([Comparison.load(Path(name)) for name in sys.argv[1:]]))


if __name__ == "__main__":
    main()
