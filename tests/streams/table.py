"""`python -m tests.streams.table`: the kernels of a step on a GPU by stage, buckets, ranks and reduction, and how often
the host waits. Those of the bare model's forward and backward are left out. Five minutes on 2 cores."""

from collections.abc import Iterator
from functools import cache
from itertools import product

from tests.streams.stand_in import clocks, run_on_streams
from tests.streams.test_budget import one_step
from tests.streams.trainings import net, rows
from zerotrain.comm.world import World

PLACES = ((25, 1), (25, 8), (171, 1), (171, 2))
"""(buckets, ranks): 171 buckets of 8 ranks, which are threads, would take an hour."""
SMALL, LARGE = 64, 2048
"""Widths: blocks of 4 thousand elements, and of 4 million."""


def counted(stage: int, num_blocks: int, num_ranks: int, reduction: str, width: int = SMALL) -> tuple[int, int]:
    """(kernels, waits of the host) of a step, where each block of the model is a bucket."""

    num_buckets, kernels, waits = one_step(
        stage, width=width, num_blocks=num_blocks, num_ranks=num_ranks, reduction=reduction
    )
    assert num_buckets == num_blocks
    return kernels.total() - of_model(num_blocks, width), waits.total()


@cache
def of_model(num_blocks: int, width: int) -> int:
    """Kernels of the forward and backward of the bare model."""

    def on_a_rank(_: World) -> int:
        model, batch, before = net(width, num_blocks), rows(0, 0, 0, width), clocks().kernels.total()
        model(batch).backward()
        return clocks().kernels.total() - before

    found: int = run_on_streams(on_a_rank, 1).results[0]
    return found


def lines() -> Iterator[str]:
    """The table."""
    yield "| buckets | ranks | stage | native: kernels | ordered: kernels | waits |\n|---|---|---|---|---|---|"
    for (num_blocks, num_ranks), stage in product(PLACES, range(4)):
        native, ordered = (counted(stage, num_blocks, num_ranks, each) for each in ("native", "ordered"))
        yield f"| {num_blocks} | {num_ranks} | {stage} | {native[0]:,} | {ordered[0]:,} | {native[1]}, {ordered[1]} |"
    for reduction in ("native", "ordered"):
        small, large = (counted(2, 2, 1, reduction, width)[0] for width in (SMALL, LARGE))
        yield f"\n{reduction}, 2 buckets of 4 thousand elements: {small}; of 4 million: {large}"


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
