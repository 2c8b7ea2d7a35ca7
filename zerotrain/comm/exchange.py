"""An exchange of parts between all ranks, made of sends and receives."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Exchange:
    """One part from every rank to every other. The receives are posted at once, the sends when they are asked for.

    gloo sends a part once its receiver has said that it waits for it, and that word travels behind whatever the
    receiver is sending itself. Posted ahead, no word is late, and both directions of a link are busy at once: on a link
    of 1 Gbit/s an exchange whose receives come behind its sends takes twice the time.

    Args:
        tag: keeps apart the exchanges that are under way at the same time; the same on every rank.
        parts: (ranks, n) or one tensor for each rank: where to put what comes from it. This rank's own is not touched.
    """

    def __init__(self, group: dist.ProcessGroup, *, tag: int, parts: Sequence[torch.Tensor] | torch.Tensor) -> None:
        self._group = group
        self._tag = tag
        self._rank, self._size = group.rank(), group.size()
        self._works = [_work(dist.irecv(parts[peer], group=group, tag=tag, group_src=peer)) for peer in self._peers()]

    def _peers(self) -> list[int]:
        """The other ranks, beginning behind this one, so that not all begin with the same."""
        return [(self._rank + distance) % self._size for distance in range(1, self._size)]

    def send(self, parts: Sequence[torch.Tensor] | torch.Tensor) -> list[dist.Work]:
        """Send part r of `parts` to rank r; return what is to be waited for, the receives among it."""
        for peer in self._peers():
            self._works.append(_work(dist.isend(parts[peer], group=self._group, tag=self._tag, group_dst=peer)))
        return self._works


def _work(work: dist.Work | None) -> dist.Work:
    # None is for processes outside the group.
    assert work is not None
    return work
