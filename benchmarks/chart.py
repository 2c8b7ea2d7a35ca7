"""The bar chart of one comparison."""

from pathlib import Path

from benchmarks.engines import ENGINES
from benchmarks.results import Comparison
from benchmarks.standing import Standing

OURS, PEER, LIMIT = "#1f6fb4", "#b8b8b8", "#ffb000"
BAR_WIDTH = 0.8


def draw(comparison: Comparison, path: Path) -> None:
    """Write a PNG: a bar for each engine, the rounds' spread on it, the floor as a line through all, and on a
    link the limit of each engine of ours.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    standing = Standing(comparison)
    names = [name for name in ENGINES if name in standing.medians]
    times_ms = [standing.medians[name].step_ms for name in names]
    rounds_ms = [[each.step_ms for each in comparison.rounds_of(name)] for name in names]
    spread = [
        [time - min(rounds) for time, rounds in zip(times_ms, rounds_ms, strict=True)],
        [max(rounds) - time for time, rounds in zip(times_ms, rounds_ms, strict=True)],
    ]
    figure = Figure(figsize=(9, 1.5 + 0.38 * len(names)), layout="constrained")
    axes = figure.subplots()
    colors = [OURS if ENGINES[name].is_ours else PEER for name in names]
    bars = axes.barh([ENGINES[name].label for name in names], times_ms, color=colors, xerr=spread)
    axes.bar_label(bars, fmt="%.0f", padding=6)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.axvline(standing.floor_ms, color="black", linestyle="--", label="compute alone")
    if comparison.link_bit_per_s is not None:
        ours = [place for place, name in enumerate(names) if ENGINES[name].is_ours]
        limits_ms = [standing.limit_ms(names[place]) for place in ours]
        ends = [place - BAR_WIDTH / 2 for place in ours], [place + BAR_WIDTH / 2 for place in ours]
        axes.vlines(limits_ms, *ends, color=LIMIT, linewidth=3, label="its bytes at the link's rate")
    workload = comparison.workload
    place = "one host" if comparison.link_bit_per_s is None else f"{comparison.link_bit_per_s / 1e9:g} Gbit/s link"
    axes.set_title(f"GPT {workload.size}, {workload.precision}, {workload.num_ranks} ranks, {place}")
    axes.set_xlabel("ms per step (median of the rounds; line: fastest to slowest round)")
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)
