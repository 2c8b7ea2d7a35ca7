"""N ranks as threads of one process, and a wire between them, as nasty as a real one may be.

    def on_a_rank(world: World) -> str:
        engine = zerotrain.build_engine(model(), optimizer=..., world=world)
        ...
    results, boards = run_threads(on_a_rank, 3)

No sockets, no process groups: a case takes milliseconds, and this wire does always what a real one does now and then.
Buffers hold NaN until they are waited for and once they are given back, those that must not change are compared, no
collective is done before it is waited for, and all ranks must keep one joint order of collectives.

torch has one random number generator for a process, so ranks take turns to draw: `run_threads(..., in_turns=True)`.
"""

import gc
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tests.ranks.processes import HANG_S
from zerotrain.comm import ledger, wires
from zerotrain.comm.handles import Exchange, Gather, Handle, HandleSpec, Reduction, ReductionSpec, Wire
from zerotrain.comm.world import Shards, World

T = TypeVar("T")
TIMEOUT_S = HANG_S / 10
"""Until ranks learn that they wait for each other."""


class Turns:
    """Lets one thread run at a time, until it waits for another. Each begins with the next random numbers of
    the process, and goes on with its own."""

    def __init__(self) -> None:
        self._running = threading.Lock()
        self._first_state = torch.get_rng_state()

    @contextmanager
    def take_turn(self) -> Iterator[None]:
        """Code in here takes a turn."""
        with self._running:
            torch.set_rng_state(self._first_state)
            yield
            torch.set_rng_state(self._first_state)

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """In here others have their turns."""
        state = torch.get_rng_state()
        self._running.release()
        try:
            yield
        finally:
            self._running.acquire()
            torch.set_rng_state(state)


class Board:
    """A board for the messages of one run's ranks. A rank gives up its turn while it waits."""

    def __init__(self, size: int, turns: Turns | None = None, orders: list[list[str]] | None = None) -> None:
        self.size, self.turns = size, turns
        self.orders = [[] for _ in range(size)] if orders is None else orders
        """By rank: "kind name" of each collective, in the order they were issued."""
        self._axes: dict[Sequence[int], Board] = {}
        self._parts: dict[Any, dict[int, Any]] = defaultdict(dict)
        self._changed = threading.Condition()
        self.store = dist.HashStore()
        self.store.set_timeout(timedelta(seconds=TIMEOUT_S))

    def axis(self, ranks: Sequence[int]) -> "Board":
        """The board of some of the ranks, on which their collectives are noted in one order with those of all."""
        with self._changed:
            orders = [self.orders[rank] for rank in ranks]
            return self._axes.setdefault(ranks, Board(len(ranks), self.turns, orders))

    def leave(self, key: Any, rank: int, part: Any) -> None:
        """Give the other ranks what this one sends in the collective `key`."""
        with self._changed:
            self._parts[key][rank] = part
            if self._are_all_there(key):
                self._changed.notify_all()

    def waiting(self) -> AbstractContextManager[None]:
        """A rank waits in here."""
        return nullcontext() if self.turns is None else self.turns.given_up()

    def parts(self, key: Any) -> list[Any]:
        """The parts of all ranks, in rank order, waited for; DistError if a rank did not come."""
        if not self._are_all_there(key):  # or this rank goes on: a turn that changes hands costs more than a collective
            with self.waiting(), self._changed:
                if not self._changed.wait_for(lambda: self._are_all_there(key), TIMEOUT_S):
                    raise dist.DistError(f"{key}: only ranks {sorted(self._parts[key])} have come")
        return [self._parts[key][rank] for rank in range(self.size)]

    def _are_all_there(self, key: Any) -> bool:
        return len(self._parts.get(key, ())) == self.size


class BoardEnd:
    """One rank's end of a board.

    Args:
        delay_s: this rank sleeps so long before it issues anything.
        device: where its tensors are.
        is_done: what `Handle.is_done` answers before a collective was waited for.
    """

    def __init__(self, board: Board, rank: int, *, device: str, delay_s: float, is_done: bool) -> None:
        self.board, self.rank, self.delay_s, self.is_done = board, rank, delay_s, is_done
        self.device = torch.device(device)
        self._uses: dict[str, int] = defaultdict(int)

    def shards(self) -> Shards:
        """The ranks of the board."""

        def axis(ranks: Sequence[int]) -> Shards:
            end = BoardEnd(
                self.board.axis(ranks),
                ranks.index(self.rank),
                device=str(self.device),
                delay_s=self.delay_s,
                is_done=self.is_done,
            )
            return end.shards()

        return Shards(self.rank, self.board.size, make_wire=lambda _ordered: self.wire(), make_axis=axis)

    def wire(self) -> Wire:
        """The wire of this rank's engines."""
        return Wire(
            gather=partial(_FakeGather, self),
            reduction=partial(_FakeReduction, self),
            exchange=partial(_FakeExchange, self),
            gather_small=self.gather_small,
            broadcast=lambda values, source: values.copy_(self.gather_small(values, "broadcast")[source]),
            store=lambda: self.board.store,
        )

    def next_key(self, what: str) -> tuple[str, int]:
        """Key of the next use of a collective, the same on every rank."""
        self._uses[what] += 1
        return what, self._uses[what]

    def issued(self, what: str, part: Any) -> tuple[str, int]:
        """Note a collective and send this rank's part."""
        if self.delay_s:
            with self.board.waiting():
                time.sleep(self.delay_s)
        key = self.next_key(what)
        self.board.orders[self.rank].append(what)
        self.board.leave(key, self.rank, part)
        return key

    def gather_small(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """See `Wire.gather_small`."""
        key = self.next_key("comparison")
        self.board.leave(key, self.rank, (name, values.clone()))
        parts = self.board.parts(key)
        names = [name for name, _ in parts]
        if len(set(names)) > 1:
            raise ledger.OtherNamesError(names)
        return torch.stack([part for _, part in parts])


class _Fake(Handle):
    """A collective. It is over when it was waited for, and not before."""

    def __init__(self, end: BoardEnd, spec: HandleSpec) -> None:
        super().__init__(spec)
        self._end = end
        self._key: Any = None
        self._arrived: list[Any] = []

    def _send(self, part: Any) -> None:
        assert not self.is_under_way, f"{self.name} is issued while it is on the wire"
        self._key = self._end.issued(f"{self.kind} {self.name}", part)

    def _wait(self) -> None:
        self._arrived = self._end.board.parts(self._key)

    def _is_done(self) -> bool:
        return self._end.is_done


def _are_same(values: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same bytes: a NaN in padding is no change."""
    return torch.equal(values.contiguous().view(torch.uint8), copy.contiguous().view(torch.uint8))


class _FakeGather(_Fake, Gather):
    def _issue(self) -> None:
        self._sent = self.shard.clone()
        self._send(self._sent)
        self.full.fill_(float("nan"))  # what has not arrived is garbage
        self.full.view(self._end.board.size, -1)[self._end.rank] = self._sent

    def _complete(self) -> None:
        assert _are_same(self.shard, self._sent), f"{self.name} was changed while it was on the wire"
        parts = self.full.view(self._end.board.size, -1)
        arriving = torch.cat([parts[: self._end.rank], parts[self._end.rank + 1 :]])
        assert arriving.isnan().all(), f"what {self.name} receives into was written to while it was on the wire"
        torch.cat(self._arrived, out=self.full)


class _FakeReduction(_Fake, Reduction):
    def __init__(self, end: BoardEnd, spec: ReductionSpec) -> None:
        super().__init__(end, spec)
        self._first_out = spec.out

    def _issue(self) -> None:
        assert self._full is not None
        assert not self._full.isnan().any(), f"{self.name} is reduced with values that were never filled"
        self._sent = self._full.clone()
        self._send(self._sent)

    def _complete(self) -> None:
        assert self._full is not None
        assert _are_same(self._full, self._sent), f"{self.name} was changed while it was on the wire"
        is_last = self.out is self._first_out  # not so of the first along two axes
        if is_last and self._full.untyped_storage().data_ptr() != self.out.untyped_storage().data_ptr():
            self._full.fill_(float("nan"))  # a buffer that is given back now
        start = self._end.rank * self.out.numel()
        parts = torch.stack([part[start : start + self.out.numel()] for part in self._arrived])
        wires.mean_by_tree(parts, self.out, self.num_leaves)
        super()._complete()


class _FakeExchange(_Fake, Exchange):
    def _issue(self) -> None:
        self._spec.received.fill_(float("nan"))
        self._sent = self._spec.sent.clone()
        self._send(self._sent.split(self._spec.sent_numels))

    def _complete(self) -> None:
        sent, received = self._spec.sent, self._spec.received
        assert _are_same(sent, self._sent), f"{self.name} was changed while it was on the wire"
        assert received.isnan().all(), f"what {self.name} receives into was written to while it was on the wire"
        sent.fill_(float("nan"))  # a buffer that is given back now
        torch.cat([parts[self._end.rank] for parts in self._arrived], out=received)


def run_threads(
    fn: Callable[[World], T],
    size: int,
    *,
    late_rank: int | None = None,
    done_rank: int | None = None,
    in_turns: bool = False,
    device: str = "cpu",
) -> tuple[list[T], Board]:
    """Call `fn(world)` on `size` threads as ranks; return their results, and their board.

    Args:
        late_rank: sleeps a moment before each collective.
        done_rank: finds each collective done as soon as it asks.
        in_turns: a rank runs until it waits for another, with a random number generator of its own.
        device: which all of them use. On a GPU the backward of a rank, which torch gives to one thread of the device,
            runs on the rank's own: the hooks of ranks wait for each other.

    Raises:
        Exception: the first that a rank raised which is no mere loss of another rank, if any.
    """
    board = Board(size, Turns() if in_turns else None)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        late_s = 0.001 if rank == late_rank else 0.0
        end = BoardEnd(board, rank, device=device, delay_s=late_s, is_done=rank == done_rank)
        torch.set_num_threads(1)
        world = World(rank, size, rank, torch.device(device), shards=end.shards())
        try:
            turn = nullcontext() if board.turns is None else board.turns.take_turn()
            with turn, torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(world)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    # A finished rank leaves its engine to the garbage collector. If the thread of another rank collected that engine,
    # it would wait for a collective of its own future.
    was_on = gc.isenabled()
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        if was_on:
            gc.enable()
    if errors:
        raise next((error for error in errors if "have come" not in str(error)), errors[0])
    return results, board
