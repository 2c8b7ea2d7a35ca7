"""The sum over ranks in a fixed order: rank 0's part first, in fp32, one rounding at the end."""

from collections.abc import Sequence

import torch

NUM_ROWS_WIDENED = 64
"""Ranks' parts of 16 bits that are in fp32 at a time."""


def sum_in_rank_order(
    parts: Sequence[torch.Tensor] | torch.Tensor, out: torch.Tensor, scratch: torch.Tensor | None = None
) -> None:
    """Leave the sum of `parts`, (ranks, n) or one tensor for each rank, in `out` (n), added in rank order in fp32.

    Args:
        out: may be one of the parts.
        scratch: memory that may be overwritten on the way, also where its first n elements are one of the first two
            parts; None: a buffer of fp32 is made where one is needed.
    """
    if isinstance(parts, torch.Tensor):
        out.copy_(_sum_of_rows(parts))
        return
    total = parts[0].to(torch.float32)
    # Intermediate sums overwrite what was received, and not `out`, which may be one of the parts still to be added.
    in_place = scratch is not None and scratch.dtype == torch.float32
    on_the_way = scratch[: out.numel()] if in_place and scratch is not None else total
    for part in parts[1:-1]:
        total = torch.add(total, part, out=on_the_way)
    if out.dtype == torch.float32:
        torch.add(total, parts[-1], out=out)
    else:
        out.copy_(torch.add(total, parts[-1], out=on_the_way))


def _sum_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """(ranks, n) -> (n,) fp32: added row by row, within torch. A loop over 1,024 rows takes three times as long, and
    `sum` adds in an order of its own."""
    if not rows.is_cpu:
        total = rows[0].to(torch.float32, copy=True)
        for row in rows[1:]:
            total.add_(row)
        return total
    total = rows[:1].to(torch.float32, copy=True)
    for some in rows[1:].split(NUM_ROWS_WIDENED):
        total.index_add_(0, torch.zeros(len(some), dtype=torch.int64), some.to(torch.float32))
    return total[0]
