"""A collective as an object that is used step after step: `prepare`, `issue`, `done`, `finish`.

Each way to send (the backend's own collective, an all-to-all, posted sends and receives) is a small subclass of
`Gather` or `Reduction`; whoever holds one does not know which. Here is what all have in common: the order and the
bytes are noted, a failure is told with the collective's name, and `overlap=False` waits at once.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NoReturn, TypeAlias

import torch

from zerotrain.comm.journal import Journal
from zerotrain.comm.scratch import Scratch, ScratchPool

CHUNK_NUMEL = 2**18
"""Elements averaged at a time on a CPU, where what is added and the sum (1 MiB each in fp32) stay in the cache:
measured in bf16, 3.2 million elements of two ranks took 14 ms at once and 2 ms in chunks."""

BLOCK_NUMEL = 64
"""Pieces of a mean begin on multiples of this many elements."""
Watch: TypeAlias = Callable[[int, torch.Tensor], None]
"""Is told (first element, values) of each piece of a result, maybe on another thread."""


class Handle(ABC):
    """One collective, again and again. Between `issue` and `finish` what is sent and received is its own.

    Args:
        name: of what is sent, the same on every rank; errors and the order of collectives know it by this.
        journal: where each use is noted.
    """

    kind: ClassVar[str]
    """What an error calls it."""
    ledger_kind: ClassVar[str]
    """What the ledger calls it."""
    is_local: ClassVar[bool] = False
    """Whether nothing is ever sent, so that the ledger does not count it."""
    sent_nbytes: int
    """Bytes this rank sends each time."""
    is_used_again = True
    """Whether memory that it needs on the way may stay for its next use."""

    def __init__(self, name: str, journal: Journal) -> None:
        self.name = name
        self.is_prepared = False
        """Whether `prepare` was called, and `issue` not yet."""
        self.is_under_way = False
        """Whether `issue` was called, and `finish` not yet."""
        self._journal = journal
        self._waited = True

    def prepare(self) -> None:
        """Be ready for what other ranks send, which may come before this rank issues. May be left out.

        From here on what is received into may change; of a gather, all but this rank's own part.
        """
        if self.is_prepared:
            return
        started_s = time.monotonic()
        try:
            self._prepare()
        except RuntimeError as error:
            self._fail(error, started_s)
        self.is_prepared = True

    def _issue_noted(self) -> None:
        self._journal.note(self.kind, self.name)
        if not self.is_local:
            self._journal.ledger.record(self.ledger_kind, self.sent_nbytes)
        started_s = time.monotonic()
        try:
            self._issue()
        except RuntimeError as error:
            self._fail(error, started_s)
        self.is_prepared, self.is_under_way, self._waited = False, True, False
        if not self._journal.overlap:
            self.wait()

    def done(self) -> bool:
        """Whether `finish` would not have to wait for other ranks (on CUDA: whether the device has finished).

        False also where that is not known: gloo's sends and receives do not tell before they were waited for.
        """
        return self._waited or self._done()

    def finish(self) -> None:
        """Wait, and leave the result where it belongs."""
        if not self.is_under_way:
            return
        self.wait()
        self._complete()
        self.is_under_way = False

    def withdraw(self) -> None:
        """End what was prepared and is not to be issued, on all ranks alike: nothing of it is of use."""
        if self.is_prepared:
            self._withdraw()
            self.is_prepared = False

    def wait(self) -> None:
        """Wait for the other ranks (on the CPU the host does, on CUDA the current stream), the first part of `finish`.

        Raises:
            CommError: they did not come, or are gone.
        """
        if self._waited:
            return
        started_s = time.monotonic()
        try:
            self._wait()
        except RuntimeError as error:
            self._fail(error, started_s)
        self._waited = True

    def _fail(self, error: RuntimeError, started_s: float) -> NoReturn:
        self._journal.fail(self.kind, self.name, error, time.monotonic() - started_s)

    # ---- what a way to send is made of

    def _prepare(self) -> None:  # noqa: B027 -- most ways have nothing to prepare
        """Take buffers, post receives."""

    @abstractmethod
    def _issue(self) -> None:
        """Start to send."""

    @abstractmethod
    def _wait(self) -> None:
        """Wait for all that is under way."""

    @abstractmethod
    def _done(self) -> bool:
        """Whether `_wait` would return at once."""

    def _complete(self) -> None:  # noqa: B027 -- a gather is complete when it has arrived
        """All is there: compute what the caller wants of it, and give buffers back."""

    def _withdraw(self) -> None:  # noqa: B027 -- where nothing was posted nothing waits
        """Nothing will be issued: end what was posted, and give buffers back."""


class Gather(Handle):
    """An all-gather: every rank's `shard` (numel / ranks) into `full` (numel).

    Args:
        full: as long as the handle lives; its memory may be given back between uses.
        shard: this rank's part. It may lie inside `full`, at this rank's place.
    """

    kind = "gather"
    ledger_kind = "gather"

    def __init__(self, name: str, journal: Journal, full: torch.Tensor, shard: torch.Tensor) -> None:
        super().__init__(name, journal)
        self.full, self.shard = full, shard

    def issue(self) -> None:
        """Start. `shard` holds this rank's part, `full` has memory."""
        self._issue_noted()


class Reduction(Handle):
    """A reduce-scatter: the mean over all leaves, of which each rank's `full` (numel) is a sum of equally many, into
    `out` (numel / ranks), this rank's part.

    Args:
        out: as long as the handle lives. It may lie inside `full`, at this rank's place, and be of another dtype.
        pool: lends buffers of the dtype of `full`, for what is received on the way.
        num_leaves: of all ranks.
    """

    kind = "reduction"
    ledger_kind = "reduce"

    def __init__(self, name: str, journal: Journal, out: torch.Tensor, pool: ScratchPool, num_leaves: int) -> None:
        super().__init__(name, journal)
        self.out, self.num_leaves = out, num_leaves
        self._full: torch.Tensor | None = None
        self._watch: Watch | None = None
        self._pool = pool
        self._received: Scratch | None = None

    @property
    def _part_nbytes(self) -> int:
        """Bytes of one rank's part on the wire."""
        return self.out.numel() * self._pool.dtype.itemsize

    def _borrow(self, num_parts: int) -> torch.Tensor:
        """(num_parts, numel / ranks) to receive into, until `_give_back`."""
        self._received = self._pool.take(num_parts * self.out.numel())
        return self._received_parts(num_parts)

    def _received_parts(self, num_parts: int) -> torch.Tensor:
        assert self._received is not None
        return self._received.storage[: num_parts * self.out.numel()].view(num_parts, -1)

    def _give_back(self) -> None:
        assert self._received is not None
        self._pool.give_back(self._received)
        self._received = None

    def issue(self, full: torch.Tensor, watch: Watch | None = None) -> None:
        """Start. `full`, this rank's part of the mean, is the handle's own until finished.

        Args:
            watch: is told the pieces of `out` until finished, while they are in the cache if that can be.
        """
        self._full, self._watch = full, watch
        self._issue_noted()

    def _complete(self) -> None:
        if self._watch is not None:
            self._watch(0, self.out)
        self._full = self._watch = None


class Exchange(Handle):
    """An all-to-all of parts that need not be equal, made once."""

    kind = "exchange"
    ledger_kind = "exchange"

    def issue(self) -> None:
        """Start."""
        self._issue_noted()


def mean_by_tree(
    parts: Sequence[torch.Tensor] | torch.Tensor,
    out: torch.Tensor,
    num_leaves: int,
    *,
    sums: torch.Tensor | None = None,
) -> None:
    """Leave the mean of `num_leaves` leaves in `out` (n), of which `parts`, (ranks, n) or one tensor for each rank, are
    sums of equally many each.

    Neighbours are added in pairs in fp32, then the sums in pairs, and so on; the last of an odd number goes up as it
    is. The sum is divided by the number of leaves, then rounded to the dtype of `out`, which may be one of the parts.

    Args:
        sums: (ranks / 2 rounded up, as many as are added at a time, or n) fp32 to add in; None: it is made here.
    """
    pairs = (len(parts) + 1) // 2
    step = max(1, CHUNK_NUMEL // pairs) if out.is_cpu else out.numel()
    if sums is None:
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
