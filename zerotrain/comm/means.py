"""The mean over leaves, added by one tree whatever the ranks: the bits that everything else is measured against."""

from collections.abc import Sequence

import torch

from zerotrain.device.device import lies_on_host

CHUNK_NUMEL = 2**18
"""Elements averaged at a time on a CPU, where what is added and the sum (1 MiB each in fp32) stay in the cache:
measured in bf16, 3.2 million elements of two ranks took 14 ms at once and 2 ms in chunks."""


def mean_by_tree(parts: Sequence[torch.Tensor] | torch.Tensor, out: torch.Tensor, num_leaves: int) -> None:
    """Leave the mean of `num_leaves` leaves in `out` (n), of which `parts`, (ranks, n) or one tensor for each rank, are
    sums of equally many each.

    Neighbours are added in pairs in fp32, then the sums in pairs, and so on; the last of an odd number goes up as it
    is. The sum is divided by the number of leaves, then rounded to the dtype of `out`, which may be one of the parts.
    """
    pairs = (len(parts) + 1) // 2
    step = max(1, CHUNK_NUMEL // pairs) if lies_on_host(out) else out.numel()
    sums = torch.empty(pairs, min(step, out.numel()), dtype=torch.float32, device=out.device)
    for start in range(0, out.numel(), step):
        where = slice(start, start + step)
        mean = out[where]
        into = sums[:, : mean.numel()]
        if isinstance(parts, torch.Tensor):
            total = _sum_of_rows(parts[:, where], into)
        else:
            # The last sum may go where the mean does: that may be one of the parts, but no other sum needs it.
            total = _sum([part[where] for part in parts], into, mean if mean.dtype == into.dtype else into[0])
        _divide(total, num_leaves)
        if total is not mean:
            mean.copy_(total)


def _divide(total: torch.Tensor, by: int) -> None:
    if by & (by - 1) == 0:
        total.mul_(1 / by)  # the same bits, since 1 / by is exact, in a third of the time
    else:
        total.div_(by)


def _sum(parts: Sequence[torch.Tensor], into: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """(n,) fp32 in `last`: the tree's sum of some parts, added in `into`, (pairs, n)."""
    if len(parts) == 1:
        return last.copy_(parts[0])
    while len(parts) > 2:
        paired = [_add(a, b, total) for a, b, total in zip(parts[::2], parts[1::2], into, strict=False)]
        parts = [*paired, parts[-1]] if len(parts) % 2 else paired
    return _add(parts[0], parts[1], last)


def _sum_of_rows(rows: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """The same of (ranks, n), without a call for each of a thousand ranks."""
    num_pairs = len(rows) // 2
    _add(rows[: 2 * num_pairs : 2], rows[1 : 2 * num_pairs : 2], into[:num_pairs])
    into[num_pairs:].copy_(rows[2 * num_pairs :])  # of an odd number the last
    while (num_pairs := len(into) // 2) > 0:
        into[: 2 * num_pairs : 2].add_(into[1 : 2 * num_pairs : 2])
        into = into[::2]
    return into[0]


def _add(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """In fp32. `torch.add` of two tensors of 16 bits adds in 16 bits, whatever it is to leave the sum in."""
    if a.dtype == b.dtype != total.dtype:
        return total.copy_(a).add_(b)
    return torch.add(a, b, out=total)
