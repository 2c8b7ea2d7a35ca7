"""A wire to ranks that are not there: nothing is sent, and what real handles borrow on the way is borrowed."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from zerotrain.comm.collectives import MAX_RANKS_OF_EXCHANGE
from zerotrain.comm.handles import Exchange, ExchangeSpec, Gather, GatherSpec, Reduction, ReductionSpec, Wire, Zeros
from zerotrain.comm.wires import CHUNK_NUMEL, ring_nbytes


@dataclass(frozen=True)
class Links:
    """The ways in which the ranks of a run send: which handles of `process_groups` they would have."""

    num_ranks: int
    on_host: bool
    ordered: bool
    """Reductions are added by one tree."""

    @property
    def posts_receives(self) -> bool:
        """Whether the receives of a reduction are posted ahead."""
        return self.on_host and self.ordered and self.num_ranks <= MAX_RANKS_OF_EXCHANGE

    def num_received(self, *, widens: bool) -> int:
        """The number of ranks' parts that a reduction receives into a buffer.

        Args:
            widens: the result is of another dtype than what is sent.
        """
        if not self.ordered:
            return int(widens)
        return self.num_ranks - self.posts_receives

    def added_nbytes(self, numel: int) -> int:
        """Bytes that one mean over `numel` elements of each rank is added in."""
        pairs = (self.num_ranks + 1) // 2
        return 4 * pairs * (min(numel, max(1, CHUNK_NUMEL // pairs)) if self.on_host else numel)

    def wire(self, zeros: Zeros) -> Wire:
        """The wire of a rank.

        Args:
            zeros: makes the buffers of a step.
        """

        def alike(values: torch.Tensor, _: str) -> torch.Tensor:
            """Zeros of each rank, which are known: what ranks compare is alike."""
            return torch.zeros(self.num_ranks, values.numel(), dtype=values.dtype)

        return Wire(
            gather=lambda spec: _Gather(spec, self.num_ranks),
            reduction=lambda spec: _Reduction(spec, self),
            exchange=_Exchange,
            gather_small=alike,
            broadcast=lambda _values, _source: None,
            store=dist.HashStore,
            zeros=zeros,
        )


class _Gather(Gather):
    def __init__(self, spec: GatherSpec, num_ranks: int) -> None:
        super().__init__(spec)
        self.sent_nbytes = ring_nbytes(spec.full, num_ranks)

    def _issue(self) -> None:
        pass

    def _wait(self) -> None:
        pass

    def _done(self) -> bool:
        return True


class _Reduction(Reduction):
    """It is done when it must be, since the others may be late: what it holds it holds as long as it may."""

    def __init__(self, spec: ReductionSpec, links: Links) -> None:
        super().__init__(spec)
        self._links = links
        self._num_received = links.num_received(widens=self._pool.dtype.itemsize != self.out.itemsize)
        num_sent = 2 if links.on_host and not links.ordered else 1  # of gloo's own, each byte is sent twice
        self.sent_nbytes = num_sent * self._part_nbytes * (links.num_ranks - 1)

    def _prepare(self) -> None:
        if self._links.posts_receives:
            self._receive()

    def _issue(self) -> None:
        self._receive()

    def _receive(self) -> None:
        if self._num_received and self._received is None:
            self._borrow(self._num_received)

    def _wait(self) -> None:
        pass

    def _done(self) -> bool:
        return self._links.num_ranks == 1

    def _complete(self) -> None:
        if self._links.ordered and self.num_leaves > 1:
            torch.empty(self._links.added_nbytes(self.out.numel()), dtype=torch.uint8, device=self.out.device)
        self._withdraw()
        super()._complete()

    def _withdraw(self) -> None:
        if self._received is not None:
            self._give_back()


class _Exchange(Exchange):
    def __init__(self, spec: ExchangeSpec) -> None:
        super().__init__(spec.name, spec.journal)
        self.sent_nbytes = spec.sent.nbytes

    def _issue(self) -> None:
        pass

    def _wait(self) -> None:
        pass

    def _done(self) -> bool:
        return True
