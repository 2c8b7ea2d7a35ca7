"""The collectives of one engine: handles on gathers and reductions, and a few small ones, waited for at once."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from zerotrain.comm.accounts.frames import OtherNamesError
from zerotrain.comm.accounts.journal import Journal
from zerotrain.comm.accounts.ledger import Ledger
from zerotrain.comm.accounts.notes import Notes
from zerotrain.comm.accounts.whereabouts import by_rank
from zerotrain.comm.handles import Exchange, ExchangeSpec, Gather, Reduction, ReductionSpec
from zerotrain.comm.process_groups import ProcessGroups
from zerotrain.comm.ranks.world import World
from zerotrain.comm.scratch import ScratchPool
from zerotrain.comm.wire import Alone, Wire
from zerotrain.errors import DisagreementError

T = TypeVar("T")


class Collectives:
    """What an engine sends over the shards of a `World`. Each collective has a `name`, the same on every rank.

    Handles are made in the same order on every rank.

    Args:
        ledger: counts calls and bytes.
        ordered: reduce by adding along one tree in fp32, whose bits do not depend on where a bucket's borders lie;
            otherwise by the backend's own reduce-scatter.
        overlap: False waits for each collective as soon as it is issued.
    """

    def __init__(self, world: World, *, ledger: Ledger, ordered: bool, overlap: bool) -> None:
        self.world = world
        self.shards = world.shards
        self.ledger = ledger
        self._journal = Journal(ledger, world.whereabouts, overlap=overlap)
        started_s = time.monotonic()
        try:
            self._wire = _wire_of(world, ordered)
        except RuntimeError as error:
            self._journal.fail("comparison", "where ranks are", error, time.monotonic() - started_s)

    @property
    def not_shared(self) -> str:
        """See `Wire.not_shared`."""
        return self._wire.not_shared

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,) zeros on this rank's device, from which gathers and reductions send without a copy."""
        return self._wire.zeros(numel, dtype, self.world.device)

    @property
    def order(self) -> int:
        """See `Journal.order`."""
        return self._journal.order

    def gather(self, name: str, full: torch.Tensor, shard: torch.Tensor) -> Gather:
        """A handle on the all-gather of every rank's `shard` into `full`."""
        return self._wire.gather(name, self._journal, full, shard)

    def gather_now(self, name: str, full: torch.Tensor, shard: torch.Tensor) -> None:
        """The same once, waited for."""
        gather = self.gather(name, full, shard)
        gather.is_used_again = False
        gather.issue()
        gather.finish()

    def reduction(self, name: str, out: torch.Tensor, pool: ScratchPool, *, leaves_per_rank: int = 1) -> Reduction:
        """A handle on the mean over all leaves, of which `out` gets this rank's part. What is sent is of the dtype of
        `pool`."""
        num_leaves = leaves_per_rank * self.shards.size
        spec = ReductionSpec(name=name, journal=self._journal, out=out, pool=pool, num_leaves=num_leaves)
        return self._wire.reduction(spec)

    def exchange(
        self,
        name: str,
        sent: torch.Tensor,
        received: torch.Tensor,
        sent_numels: list[int],
        received_numels: list[int],
    ) -> Exchange:
        """Issue an all-to-all: `sent` and `received` hold one part for each rank, of so many elements, none for this
        one."""
        spec = ExchangeSpec(
            name=name,
            journal=self._journal,
            sent=sent,
            received=received,
            sent_numels=sent_numels,
            received_numels=received_numels,
        )
        exchange = self._wire.exchange(spec)
        exchange.issue()
        return exchange

    def gather_small(self, values: torch.Tensor, *, name: str, in_order: bool = True) -> torch.Tensor:
        """(n,) on each rank -> (ranks, n) on every rank, waited for.

        Args:
            in_order: whether it has a place in the order of collectives, which a call that is refused must not have.

        Raises:
            DisagreementError: on every rank, which have come with different names. None of them has done anything.
        """
        self._record(name, values.nbytes * (self.shards.size - 1))
        return self._together("comparison", name, lambda: self._wire.gather_small(values, name), in_order)

    def gather_objects(self, value: Any, *, name: str, in_order: bool = True) -> list[Any]:
        """What each rank has to say, in rank order, on every rank: small values, outside of steps. Otherwise as
        `gather_small`."""
        return self._together("comparison", name, lambda: self._wire.gather_objects(value, name), in_order)

    def broadcast(self, values: torch.Tensor, *, name: str, source: int = 0) -> None:
        """One rank's values on every rank, waited for."""
        self._record("broadcast", values.nbytes if self.shards.rank == source else 0)
        self._together("broadcast", name, lambda: self._wire.broadcast(values, source))

    def notes(self, subject: str) -> Notes:
        """For what goes on beside the training, on other threads; not collective."""
        return Notes(self._wire.store(), subject)

    def _record(self, ledger_kind: str, sent_nbytes: int) -> None:
        if self.shards.size > 1:
            self.ledger.record(ledger_kind, sent_nbytes)

    def _together(self, kind: str, name: str, call: Callable[[], T], in_order: bool = True) -> T:
        if in_order:
            self._journal.note(kind, name)
        started_s = time.monotonic()
        try:
            return call()
        except OtherNamesError as error:
            if in_order:
                self._journal.take_back(kind, name)
            raise DisagreementError(
                f"rank {self.world.rank}, {self.world.whereabouts.describe()}: the ranks have come to different calls: "
                f"{by_rank(error.names)}; all ranks must make the same calls in the same order"
            ) from None
        except RuntimeError as error:
            self._journal.fail(kind, name, error, time.monotonic() - started_s)


def _wire_of(world: World, ordered: bool) -> Wire:
    """What carries the collectives: the world's process groups, or nothing for one rank."""
    if world.shards.make_wire is not None:
        return world.shards.make_wire(ordered)
    if world.shards.size == 1:
        return Alone()
    return ProcessGroups(world.shards, world.device, ordered=ordered)
