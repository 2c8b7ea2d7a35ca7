"""A wire to ranks that are not there: nothing is sent, and what real handles borrow on the way is borrowed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zerotrain.comm.handles import Exchange, ExchangeSpec, Gather, GatherSpec, Reduction, ReductionSpec
from zerotrain.comm.means import CHUNK_NUMEL
from zerotrain.comm.process_groups import MAX_RANKS_OF_EXCHANGE
from zerotrain.comm.scratch import Scratch, ScratchPool, Zeros
from zerotrain.comm.wire import Wire
from zerotrain.comm.wires.backend_handles import ring_nbytes


@dataclass(frozen=True)
class Links:
    """The ways in which the ranks of a run send: which handles of `process_groups` they would have."""

    num_ranks: int
    num_local: int
    """Ranks of this machine; the others have as many."""
    on_host: bool
    ordered: bool
    """Reductions are added by one tree."""
    shared_memory: bool
    """Ranks of one host may read each other's memory."""

    @property
    def reads_memory(self) -> bool:
        """Whether ranks of one host read each other's memory."""
        num_hosts, rest = divmod(self.num_ranks, self.num_local)
        is_tree = not rest and self.num_local > 1 and not self.num_local & (self.num_local - 1)
        one_host = num_hosts == 1 and not rest
        return self.on_host and self.shared_memory and (one_host or (is_tree and num_hosts <= MAX_RANKS_OF_EXCHANGE))

    def received(self, wire_itemsize: int, out_itemsize: int) -> tuple[int, bool]:
        """(bytes that a reduction receives into, for each element of a rank's part; whether its receives are posted
        ahead)."""
        if not self.ordered:
            return (0 if wire_itemsize == out_itemsize else wire_itemsize), False
        if self.reads_memory:
            num_hosts = self.num_ranks // self.num_local
            roots = 0 if num_hosts == 1 else num_hosts * 4
            return (roots if wire_itemsize == 4 else 2 * roots), True
        if self.on_host and self.num_ranks <= MAX_RANKS_OF_EXCHANGE:
            return (self.num_ranks - 1) * wire_itemsize, True
        return self.num_ranks * wire_itemsize, False

    def added_nbytes(self, numel: int) -> int:
        """Bytes that one mean over `numel` elements of each rank is added in."""
        pairs = ((self.num_local if self.reads_memory else self.num_ranks) + 1) // 2
        return 4 * pairs * (min(numel, max(1, CHUNK_NUMEL // pairs)) if self.on_host else numel)

    def wire(self, zeros: Zeros, name: Callable[[torch.Tensor], torch.Tensor]) -> Wire:
        """The wire of a rank.

        Args:
            zeros: makes memory.
            name: counts memory as scratch.
        """

        shared: set[int] = set()

        def made(numel: int, dtype: torch.dtype) -> torch.Tensor:
            memory = name(zeros(numel, dtype))
            shared.add(memory.untyped_storage()._cdata)
            return memory

        staging = ScratchPool(dtype=torch.uint8, device=zeros(1, torch.uint8).device, zeros=made)

        def stage(shard: torch.Tensor) -> Scratch | None:
            """A copy that others can read, of a shard that was offloaded."""
            reads = self.reads_memory and self.num_ranks > 1
            return staging.take(shard.nbytes) if reads and shard.untyped_storage()._cdata not in shared else None

        def alike(values: torch.Tensor, _: str) -> torch.Tensor:
            """Zeros of each rank, which are known: what ranks compare is alike."""
            return torch.zeros(self.num_ranks, values.numel(), dtype=values.dtype)

        return Wire(
            gather=lambda spec: _Gather(spec, self, stage, staging.give_back),
            reduction=lambda spec: _Reduction(spec, self),
            exchange=_Exchange,
            gather_small=alike,
            broadcast=lambda _values, _source: None,
            store=dist.HashStore,
            zeros=made,
        )


class _Gather(Gather):
    def __init__(
        self,
        spec: GatherSpec,
        links: Links,
        stage: Callable[[torch.Tensor], Scratch | None],
        unstage: Callable[[Scratch], None],
    ) -> None:
        super().__init__(spec)
        self.sent_nbytes = ring_nbytes(spec.full, links.num_ranks)
        self._stage, self._unstage = stage, unstage
        self._staged: Scratch | None = None

    def _issue(self) -> None:
        self._staged = self._stage(self.shard)

    def _wait(self) -> None:
        if self._staged is not None:
            self._unstage(self._staged)
            self._staged = None

    def _done(self) -> bool:
        return True


class _Reduction(Reduction):
    """It is done when it must be, since the others may be late: what it holds it holds as long as it may."""

    def __init__(self, spec: ReductionSpec, links: Links) -> None:
        super().__init__(spec)
        self._links = links
        num_sent = 2 if links.on_host and not links.ordered else 1  # of gloo's own, each byte is sent twice
        self.sent_nbytes = num_sent * self._part_nbytes * (links.num_ranks - 1)

    def _prepare(self) -> None:
        per_element, is_ahead = self._links.received(self._pool.dtype.itemsize, self.out.itemsize)
        if is_ahead and per_element and self._received is None:
            self._borrow(-(-per_element // self._pool.dtype.itemsize))

    def _issue(self) -> None:
        per_element, _ = self._links.received(self._pool.dtype.itemsize, self.out.itemsize)
        if per_element and self._received is None:
            self._borrow(-(-per_element // self._pool.dtype.itemsize))

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
