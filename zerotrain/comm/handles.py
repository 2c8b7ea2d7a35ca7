"""A collective as an object, used step after step: `prepare`, `issue`, `is_done`, `finish`.

Each way to send (the backend's own collective, an all-to-all, posted sends and receives) is a small subclass of
`Gather` or `Reduction`; its user does not know the way. Here is what all have in common: the order and the
bytes are noted, a failure is told with the collective's name, and `overlap=False` waits at once.
"""

import io
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch

from zerotrain.comm.ledger import Journal
from zerotrain.errors import EngineStateError

# Flat buffers for a part of a step. The next collective and the next step use them again.


@dataclass(eq=False)
class Scratch:
    """A flat tensor on loan."""

    storage: torch.Tensor
    """(numel,) as many elements as were asked for, or more."""
    cuts: dict[Any, Any] = field(default_factory=dict)
    """Views cut by borrowers, by their key: making 10,000 views costs more than filling them."""


T = TypeVar("T")
Zeros = Callable[..., torch.Tensor]
"""(numel, dtype=dtype) -> (numel,) zeros."""


class ScratchPool:
    """Lends buffers of one dtype and device; keeps as many as were ever lent at once.

    Args:
        zeros: makes them; None: torch does.
    """

    def __init__(self, *, dtype: torch.dtype, device: torch.device, zeros: Zeros | None = None) -> None:
        self.dtype = dtype
        self.device = device
        self._zeros = zeros or partial(torch.zeros, device=device)
        self.lent_nbytes = 0
        self._free: list[Scratch] = []

    @property
    def held_nbytes(self) -> int:
        """Bytes of all buffers, lent or not."""
        return self.lent_nbytes + sum(scratch.storage.nbytes for scratch in self._free)

    def take(self, numel: int, cut_for: Any = None) -> Scratch:
        """A buffer of at least `numel` elements, uninitialised: the smallest free one.

        Among equals it prefers one already cut for `cut_for`: all views are made within a few steps. If none fits, a
        new one replaces the largest free one: sizes settle after one step.
        """
        fitting = [scratch for scratch in self._free if scratch.storage.numel() >= numel]
        if fitting:
            scratch = min(fitting, key=lambda candidate: (candidate.storage.numel(), cut_for not in candidate.cuts))
            self._free.remove(scratch)
        else:
            if self._free:
                self._free.remove(max(self._free, key=lambda candidate: candidate.storage.numel()))
            # Zeros, not garbage: torch's fake process group, which benchmarks measure with, writes nothing into what is
            # to be received, and a step on garbage met inf.
            scratch = Scratch(self._zeros(numel, dtype=self.dtype))
        self.lent_nbytes += scratch.storage.nbytes
        return scratch

    def give_back(self, scratch: Scratch) -> None:
        """End a loan. Readers of the buffer must have been waited for."""
        self.hand_over(scratch)
        self._free.append(scratch)

    def hand_over(self, scratch: Scratch) -> None:
        """End a loan whose buffer the borrower keeps."""
        self.lent_nbytes -= scratch.storage.nbytes


class ScratchPools:
    """The pools of one device, one for each dtype in use. See `ScratchPool`."""

    def __init__(self, device: torch.device, zeros: Zeros | None = None) -> None:
        self.device, self._zeros = device, zeros
        self._pools: dict[torch.dtype, ScratchPool] = {}

    @property
    def memory(self) -> list[torch.Tensor]:
        """The storage of each buffer that is not on loan."""
        return [scratch.storage for pool in self._pools.values() for scratch in pool._free]

    def pool_of(self, dtype: torch.dtype) -> ScratchPool:
        """The pool of buffers of `dtype`."""
        return self._pools.setdefault(dtype, ScratchPool(dtype=dtype, device=self.device, zeros=self._zeros))

    @property
    def lent_nbytes(self) -> int:
        """Bytes of the buffers on loan."""
        return sum(pool.lent_nbytes for pool in self._pools.values())

    @property
    def held_nbytes(self) -> int:
        """Bytes of all buffers, lent or not."""
        return sum(pool.held_nbytes for pool in self._pools.values())

    def clear(self) -> None:
        """Give back the memory of all buffers; none may be on loan."""
        self._pools.clear()


@dataclass(frozen=True)
class HandleSpec:
    """Describes a collective, independent of the wire."""

    name: str
    """The same on every rank; errors and the order of collectives know it by this name."""
    journal: Journal
    """The record of each use."""


class Handle(ABC):
    """One collective, again and again. Between `issue` and `finish` what is sent and received is its own."""

    kind: ClassVar[str]
    """Its name in errors."""
    ledger_kind: str
    """Its name in the ledger."""
    sent_nbytes: int
    """Bytes this rank sends each time, if each goes once to each rank that needs it."""
    is_local: ClassVar[bool] = False
    """Whether it sends nothing itself: the ledger does not count it, and nothing of its own is waited for."""

    def __init__(self, spec: HandleSpec) -> None:
        self.name, self._journal = spec.name, spec.journal
        self.is_prepared = False
        """Whether `prepare` was called, and `issue` not yet."""
        self.is_under_way = False
        """Whether `issue` was called, and `finish` not yet."""
        self._described = f"{self.kind} of {spec.name}"
        self._waited = True

    def prepare(self) -> None:
        """Be ready for what other ranks send: it may come before this rank issues. May be left out.

        From here on what is received into may change; of a gather, all but this rank's own part.
        """
        if self.is_prepared:
            return
        self._call(self._prepare)
        self.is_prepared = True

    def _issue_noted(self) -> None:
        self._journal.note(self.kind, self.name)
        if not self.is_local:
            self._journal.ledger.record(self.ledger_kind, self.sent_nbytes)
        self._call(self._issue)
        if (overdue := self._journal.overdue) is not None and not self.is_local and self._journal.recorded is None:
            overdue.watch(self._described, self._is_over())
        self.is_prepared, self.is_under_way, self._waited = False, True, self.is_local
        if not self._journal.overlap:
            self.wait()

    def is_done(self) -> bool:
        """Whether `finish` would not have to wait for other ranks (on CUDA: whether the device has finished).

        False also where nobody knows: gloo's sends and receives do not tell before they were waited for, and what is
        recorded for a graph is not done yet.
        """
        if self._waited:
            return True
        return self._journal.recorded is None and self._call(self._is_done)

    def finish(self) -> None:
        """Wait, and leave the result where it belongs."""
        if not self.is_under_way:
            return
        if not self._waited:
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
        self._call(self._wait)
        self._journal.ledger.waited(time.monotonic() - started_s)
        self._waited = True

    def _call(self, call: Callable[[], T]) -> T:
        """`Whereabouts.blame_others` of one of many calls in a step: a `with` would take five calls more."""
        started_s = time.monotonic()
        try:
            return call()
        except RuntimeError as error:
            self._journal.whereabouts.blame(error, self._described, time.monotonic() - started_s)

    # ---- what a way to send is made of

    def _prepare(self) -> None:  # noqa: B027 -- most ways have nothing to prepare
        """Take buffers, post receives."""

    @abstractmethod
    def _issue(self) -> None:
        """Start to send."""

    def _wait(self) -> None:
        """Wait for all sends and receives under way. Each way to send has this and `_is_done`."""
        raise NotImplementedError

    def _is_done(self) -> bool:
        """Whether `_wait` would return at once."""
        raise NotImplementedError

    def _is_over(self) -> Callable[[], bool]:
        """Tells whether what was just issued has ended, also when others were issued since; on any thread."""
        return lambda: True

    def _complete(self) -> None:  # noqa: B027 -- a gather is complete when it has arrived
        """All is there: compute what the caller wants of it, and give buffers back."""

    def _withdraw(self) -> None:  # noqa: B027 -- where nothing was posted nothing waits
        """Nothing will be issued: end what was posted, and give buffers back."""


@dataclass(frozen=True)
class GatherSpec(HandleSpec):
    """Describes a gather."""

    full: torch.Tensor
    """(numel,) as long as the handle lives; its memory may be given back between uses."""
    shard: torch.Tensor
    """(numel / ranks,) this rank's part. It may lie inside `full`, at this rank's place."""


class Gather(Handle):
    """An all-gather: every rank's `shard` into `full`."""

    kind = "gather"
    ledger_kind = "gather"

    def __init__(self, spec: GatherSpec) -> None:
        super().__init__(spec)
        self.full, self.shard, self.sent_nbytes = spec.full, spec.shard, spec.full.nbytes - spec.shard.nbytes

    issue = Handle._issue_noted
    """Start. `shard` holds this rank's part, `full` has memory."""


@dataclass(frozen=True)
class ReductionSpec(HandleSpec):
    """Describes a reduction."""

    out: torch.Tensor
    """(numel / ranks,) the result, as long as the handle lives. It may lie inside what is reduced, at this rank's
    place, and be of another dtype."""
    pool: ScratchPool
    """Lends buffers of the dtype of what is reduced, for what is received on the way."""
    num_ranks: int
    num_leaves: int
    """Leaves on all ranks together."""


class Reduction(Handle):
    """A reduce-scatter: the mean over all leaves into `out` (numel / ranks), this rank's part. Each rank's `full`
    (numel) is a sum of equally many leaves."""

    kind = "reduction"
    ledger_kind = "reduce"

    def __init__(self, spec: ReductionSpec) -> None:
        super().__init__(spec)
        self.out, self.num_leaves = spec.out, spec.num_leaves
        self.sent_nbytes = spec.out.numel() * spec.pool.dtype.itemsize * (spec.num_ranks - 1)
        self._full: torch.Tensor | None = None
        self._pool = spec.pool
        self._received: Scratch | None = None

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

    def issue(self, full: torch.Tensor) -> None:
        """Start. `full`, this rank's part of the mean, is the handle's own until finished."""
        self._full = full
        self._issue_noted()

    def _complete(self) -> None:
        self._full = None


class Relayed(Handle):
    """A collective along two axes of a mesh: two handles, the second of which sends what the first has brought.

    The host issues the second, and waits for the first before. All ranks must do so in one order: by `pass_on`, at a
    place that they all come to, or by a wait there.
    """

    is_local = True
    _first: Any
    _second: Any
    _sent: tuple[torch.Tensor, ...] = ()
    """The arguments of the first's `issue`."""
    _passed_on: tuple[torch.Tensor, ...] = ()
    """The arguments of the second's `issue`."""

    def prepare(self) -> None:
        """See `Handle.prepare`."""
        self._first.prepare()
        self._second.prepare()

    def _issue(self) -> None:
        self._first.issue(*self._sent)

    def pass_on(self) -> None:
        """Wait for the first, if it is under way, and issue the second."""
        if self._first.is_under_way:
            self._first.finish()
            self._second.issue(*self._passed_on)

    def is_done(self) -> bool:
        """See `Handle.is_done`."""
        return bool(self._second.is_under_way and self._second.is_done())

    def wait(self) -> None:
        """See `Handle.wait`."""
        self.pass_on()
        self._second.wait()

    def finish(self) -> None:
        """See `Handle.finish`."""
        self.wait()
        self._second.finish()
        self.is_under_way = False

    def withdraw(self) -> None:
        """See `Handle.withdraw`."""
        self._first.withdraw()
        self._second.withdraw()


class RelayedGather(Relayed, Gather):
    """A gather across into this rank's part of `full`, then one inside of the parts."""

    def __init__(self, spec: GatherSpec, first: Gather, second: Gather) -> None:
        super().__init__(spec)
        self._first, self._second = first, second


class RelayedReduction(Relayed, Reduction):
    """A reduction inside to the sum of this rank's part, then one across of these sums to the mean.

    Args:
        spec: with a pool of the dtype that sums are sent in. Where that is the dtype of what is reduced, the sum lies
            in it at this rank's part.
        part: of what is reduced.
    """

    def __init__(self, spec: ReductionSpec, first: Reduction, second: Reduction, part: slice) -> None:
        super().__init__(spec)
        self._first, self._second, self._part = first, second, part

    def issue(self, full: torch.Tensor) -> None:
        """See `Reduction.issue`."""
        own = full[self._part]
        if own.dtype != self._pool.dtype:
            self._received = self._pool.take(own.numel())
            own = self._received.storage[: own.numel()]
        self._first.out = own
        self._sent, self._passed_on = (full,), (own,)
        self._issue_noted()

    def finish(self) -> None:
        """See `Handle.finish`."""
        super().finish()
        self._sent = self._passed_on = ()
        if self._received is not None:
            self._pool.give_back(self._received)
            self._received = None


@dataclass(frozen=True)
class ExchangeSpec(HandleSpec):
    """Describes an exchange. `sent` and `received` hold one part for each rank."""

    sent: torch.Tensor
    received: torch.Tensor
    sent_numels: list[int]
    """Elements of each part; 0 is allowed."""
    received_numels: list[int]


class Exchange(Handle):
    """An all-to-all of parts of any size, made once."""

    kind = "exchange"
    ledger_kind = "exchange"

    def __init__(self, spec: ExchangeSpec) -> None:
        super().__init__(spec)
        self._spec, self.sent_nbytes = spec, spec.sent.nbytes

    issue = Handle._issue_noted
    """Start."""


# The transport of collectives between the ranks of some shards: a table of functions, for `Collectives`.


_NOT_TELLABLE = "ranks can only exchange numbers, texts, tensors and collections of these"


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How the ranks of one engine send to each other: makers of its handles, and small collectives, waited for at once.
    Another way to send is another `Gather` and another `Reduction`, put in the place of these."""

    gather: Callable[[GatherSpec], Gather]
    reduction: Callable[[ReductionSpec], Reduction]
    """It sends in the dtype of `pool`, and receives into buffers of `pool`."""
    exchange: Callable[[ExchangeSpec], Exchange]
    gather_small: Callable[[torch.Tensor, str], torch.Tensor]
    """(n,) on each rank, and its name -> (ranks, n) on every rank. Raises OtherNamesError on all ranks if they have
    come with different names, where the wire can tell."""
    broadcast: Callable[[torch.Tensor, int], object]
    """Leaves the values of one rank on every rank."""
    store: Callable[[], torch.distributed.Store]
    """Keeps small texts from rank to rank, see `Notes`."""
    zeros: Zeros | None = None
    """Makes the buffers of a step. None: torch does; a plan of memory counts them."""


def gather_objects(
    gather_small: Callable[[torch.Tensor, str], torch.Tensor], device: torch.device, value: Any, name: str
) -> list[Any]:
    """The values of all ranks, in rank order, on every rank: numbers, texts, dtypes, tensors, collections."""
    packed = torch.frombuffer(bytearray(_packed(value)), dtype=torch.uint8).to(device)
    numels = gather_small(torch.tensor([packed.numel()], device=device), name).flatten().tolist()
    everyone = gather_small(torch.cat([packed, packed.new_zeros(max(numels) - packed.numel())]), "").cpu()
    try:
        # Not torch's all_gather_object: there another process says what code is run here.
        return [_unpacked(row[:numel].numpy().tobytes()) for row, numel in zip(everyone, numels, strict=True)]
    except pickle.UnpicklingError as error:
        raise EngineStateError(f"{_NOT_TELLABLE}: {error}") from error


def require_tellable(value: Any) -> None:
    """Refuse a value that ranks cannot tell each other.

    Raises:
        EngineStateError: it holds more than numbers, texts, tensors and collections of these.
    """
    try:
        _unpacked(_packed(value))
    except Exception as error:
        raise EngineStateError(f"{_NOT_TELLABLE}: {str(error).splitlines()[0]}") from error


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=True)
