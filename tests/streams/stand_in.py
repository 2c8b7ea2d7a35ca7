"""Ranks that are threads, each with a GPU that does not exist: `device.cuda.Cuda` over stand-ins for torch.cuda's
streams and events, and NCCL's collectives on streams of their own. What goes wrong on it is in the rank's `Clocks`.

    ranks = run_on_streams(lambda world: train(build(world)), size=2)
    assert ranks.faults == []

The tensors are the CPU's. Memory of the host is what `host_bytes` gave; all other is the GPU's.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.ranks.fake_wire import Board
from tests.streams.clocks import Clock, Clocks, HostReads, Kernels, join
from tests.streams.recording import Recording, values_of_the_generator
from zerotrain.comm import wires as backend_handles
from zerotrain.comm.handles import Wire
from zerotrain.comm.wires import AllToAll, NativeGather, NativeReduction, OrderedReduction
from zerotrain.comm.world import Shards, World
from zerotrain.device import kinds
from zerotrain.device.device import lies_on_host
from zerotrain.device.kinds import Cuda
from zerotrain.engine.buckets.weights import BucketWeights

CPU = torch.device("cpu")


class OnThread(threading.local):
    """A rank's clocks, and the stream that this thread tells."""

    clocks: Clocks | None = None
    stream: "SimulatedStream | None" = None


here = OnThread()


def clocks() -> Clocks:
    """Those of this thread's rank."""
    assert here.clocks is not None
    return here.clocks


class SimulatedStream:
    """In place of torch.cuda.Stream."""

    _number: ClassVar[int] = 0

    def __init__(self, device: Any = None, name: str | None = None) -> None:
        SimulatedStream._number += 1
        self.name, self.device = name or f"stream {SimulatedStream._number}", CPU

    def wait_event(self, event: "SimulatedEvent") -> None:
        tell_or_record("wait", lambda: clocks().know(self.name, event.clock))

    def synchronize(self) -> None:
        clocks().sync(clocks().clock(self.name), "stream")


def tell_or_record(what: str, call: Callable[[], None]) -> None:
    """Do something to streams, or keep it for the graph that is recorded."""
    if (recording := clocks().recording) is None:
        call()
    else:
        recording.add(what, call)


POLLED = 5
"""Who asks an event so often waits for it."""


class SimulatedGraph(Recording):
    """In place of torch.cuda.CUDAGraph."""

    def replay(self) -> None:
        known = clocks()
        assert known.recording is None
        known.graphs[id(self)] = self
        known.kernels["a graph"] += 1
        known.is_replaying = True
        try:
            for entry in self.entries:
                entry.again()
        finally:
            known.is_replaying = False


@contextmanager
def recording(graph: SimulatedGraph, pool: Any, stream: SimulatedStream, capture_error_mode: str) -> Iterator[None]:
    """In place of torch.cuda.graph, which waits for the device first."""
    known = clocks()
    assert capture_error_mode == "thread_local"
    for actor in list(known._clocks):
        known.know(known.thread(), known.clock(actor))
    with told_in(stream), values_of_the_generator():
        known.recording = graph
        try:
            yield
        finally:
            known.recording = None
            with unseen():
                graph.end()


class SimulatedEvent:
    """In place of torch.cuda.Event."""

    def __init__(self) -> None:
        self.clock: Clock = {}
        self._num_queries = 0

    def record(self, stream: SimulatedStream) -> None:
        def at_once() -> None:
            clocks().tell(stream.name)
            self.clock = clocks().known_by(stream.name)

        tell_or_record("event", at_once)

    def synchronize(self) -> None:
        clocks().sync(self.clock, "event")

    def query(self) -> bool:
        if (recording := clocks().recording) is not None:
            recording.refuse("an event is asked")
        self._num_queries += 1
        if self._num_queries < POLLED:
            return False  # the host is ahead
        clocks().know(clocks().thread(), self.clock)
        return True


def current_stream(_device: Any = None) -> SimulatedStream:
    if here.stream is None:
        here.stream = SimulatedStream(name=clocks().compute)
    return here.stream


@contextmanager
def told_in(stream: SimulatedStream) -> Iterator[None]:
    before, here.stream = current_stream(), stream
    try:
        yield
    finally:
        here.stream = before


class SimulatedGpu(Cuda):
    """A GPU whose memory is this process's."""

    name = "a GPU that does not exist"
    own_nbytes = 80 * 2**30
    generator = torch.default_generator

    def peak_nbytes(self) -> int:
        return 0

    def use(self) -> None:
        pass

    @contextmanager
    def noting_waits(self) -> Iterator[list[str]]:
        before, waits = clocks().syncs.copy(), list[str]()
        yield waits
        waits += [f"in {what}" for what in clocks().syncs - before]

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        if (recording := clocks().recording) is not None:
            recording.refuse("pinned memory is made")
        return clocks().put_on_host(torch.empty(nbytes, dtype=torch.uint8))

    def keep_generators(self) -> Any:
        return torch.random.fork_rng([])


# ---- NCCL


class Group:
    """One communicator of one rank, with a stream of its own. Its collectives are carried out when they are issued;
    clocks say that they may be late."""

    def __init__(self, board: Board, rank: int, name: str) -> None:
        self._board, self._rank, self._name = board, rank, name
        self.stream = f"NCCL's stream of {name}"
        self._number = 0

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._board.size

    def exchanged(self, part: Any) -> list[Any]:
        """The parts of all ranks, in rank order."""
        self._number += 1
        self._board.leave((self._name, self._number), self._rank, (clocks().is_replaying, part))
        of_graphs, parts = zip(*self._board.parts((self._name, self._number)), strict=True)
        if len(set(of_graphs)) > 1:
            clocks().say(f"a collective of {self._name} is in a graph on some ranks, and on others not")
        return list(parts)

    def collective(
        self, what: str, sent: torch.Tensor, received: torch.Tensor, fill: Callable[[list[Any]], None]
    ) -> "Work":
        """Issue one on NCCL's stream, behind what this thread's stream was told."""
        work, stream = Work({}), current_stream().name
        issue = functools.partial(self._issue, what, sent, received, fill, work, stream)
        if (recording := clocks().recording) is not None:
            recording.add(what, issue, sent, received)
        else:
            issue()
        return work

    def _issue(
        self, what: str, sent: torch.Tensor, received: torch.Tensor, fill: Any, work: "Work", stream: str
    ) -> None:
        known = clocks()
        place = known.tell(self.stream, after=[known.clock(stream)])
        (known.in_graphs if known.is_replaying else known.kernels)[what] += 1
        known.access(sent, place, what, writes=False)
        known.access(received, place, what, writes=True)
        with unseen():
            fill(self.exchanged(sent.clone()))
        work.clock = known.known_by(self.stream)


@contextmanager
def unseen() -> Iterator[None]:
    """What torch does in here is no kernel."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


@dataclass
class Work:
    """In place of torch's."""

    clock: Clock

    def wait(self) -> None:
        stream = current_stream().name
        tell_or_record("wait", lambda: clocks().know(stream, self.clock))

    def is_completed(self) -> bool:
        if (recording := clocks().recording) is not None:
            recording.refuse("a collective is asked")
        return False


def all_gather(full: torch.Tensor, shard: torch.Tensor, *, group: Group, async_op: bool) -> Work:
    return group.collective("all_gather", shard, full, lambda parts: _put(full, torch.cat(parts)))


def reduce_scatter(out: torch.Tensor, full: torch.Tensor, *, op: Any, group: Group, async_op: bool) -> Work:
    own = group.rank()

    def fill(parts: list[torch.Tensor]) -> None:
        mean = torch.stack([part.view(group.size(), -1)[own].float() for part in parts]).mean(0)
        _put(out, mean)

    return group.collective("reduce_scatter", full, out, fill)


def all_to_all(
    received: torch.Tensor,
    sent: torch.Tensor,
    received_numels: Any = None,
    sent_numels: Any = None,
    *,
    group: Group,
    async_op: bool,
) -> Work:
    numels = sent_numels or [sent.numel() // group.size()] * group.size()

    def fill(_: list[torch.Tensor]) -> None:
        parts = group.exchanged(list(sent.clone().split(numels)))
        _put(received, torch.cat([each[group.rank()] for each in parts]))

    return group.collective("all_to_all", sent, received, fill)


def _put(into: torch.Tensor, values: torch.Tensor) -> None:
    into.view(-1).copy_(values.view(-1).to(into.dtype))


def wire(board: Board, rank: int, ordered: bool) -> Wire:
    """As `comm.process_groups` makes it on NCCL."""
    gathers, reductions, small = (Group(board, rank, name) for name in ("gathers", "reductions", "small ones"))
    reduction = OrderedReduction if ordered else NativeReduction

    def gather_small(values: torch.Tensor, _name: str) -> torch.Tensor:
        everyone = values.new_empty(board.size, values.numel())
        small.collective("all_gather", values, everyone, lambda parts: _put(everyone, torch.stack(parts))).wait()
        return everyone

    def broadcast(values: torch.Tensor, source: int) -> None:
        small.collective("broadcast", values, values, lambda parts: _put(values, parts[source])).wait()

    of_group: dict[str, Any] = {"group": gathers, "is_gloo": False}
    return Wire(
        gather=functools.partial(NativeGather, **of_group),
        reduction=functools.partial(reduction, **of_group | {"group": reductions}),
        exchange=functools.partial(AllToAll, **of_group | {"group": reductions}),
        gather_small=gather_small,
        broadcast=broadcast,
        store=lambda: board.store,
    )


# ---- a run


@dataclass
class Ranks:
    """What a run on stand-ins has come to."""

    results: list[Any]
    clocks: list[Clocks] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """Of all ranks, each once."""
        return list(dict.fromkeys(fault for each in self.clocks for fault in each.faults))


def run_on_streams(fn: Callable[[World], Any], size: int = 2) -> Ranks:
    """Call `fn(world)` on threads that are ranks, each with a GPU of its own. Raises what a rank raises."""
    board, ranks = Board(size), Ranks([None] * size, [Clocks() for _ in range(size)])
    errors: list[BaseException] = []

    def on_a_rank(rank: int) -> None:
        here.clocks, here.stream = ranks.clocks[rank], None
        torch.set_num_threads(1)
        try:
            shards = Shards(rank, size, make_wire=functools.partial(wire, board, rank))
            with watched():
                ranks.results[rank] = fn(World(rank, size, rank, CPU, shards=shards))
            clocks().end()
        except BaseException as error:
            errors.append(error)

    with stand_ins():
        threads = [threading.Thread(target=on_a_rank, args=(rank,), name="trains") for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise next((error for error in errors if "have come" not in str(error)), errors[0])
    return ranks


@contextmanager
def watched() -> Iterator[None]:
    """In here this thread's operations are kernels."""
    known = clocks()
    stream = lambda: current_stream().name  # noqa: E731
    with HostReads(known, stream), Kernels(known, stream):
        yield


@contextmanager
def stand_ins() -> Iterator[None]:
    """In here torch.cuda's streams are stand-ins, and each device a GPU."""
    kinds.device_of.cache_clear()
    with ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(owner, name, value))

        put(torch.cuda, "Stream", SimulatedStream)
        put(torch.cuda, "Event", SimulatedEvent)
        put(torch.cuda, "CUDAGraph", SimulatedGraph)
        put(torch.cuda, "graph", recording)
        put(torch.cuda, "graph_pool_handle", object)
        put(torch.cuda, "current_stream", current_stream)
        put(torch.cuda, "stream", told_in)
        put(kinds, "Device", SimulatedGpu)
        put(backend_handles, "all_gather", all_gather)
        put(backend_handles, "reduce_scatter", reduce_scatter)
        put(dist, "all_to_all_single", all_to_all)
        put(torch.Tensor, "record_stream", lambda tensor, stream: clocks().record_stream(tensor, stream.name))
        put(torch.UntypedStorage, "resize_", _resizing(torch.UntypedStorage.resize_))
        put(threading.Thread, "start", _starting(threading.Thread.start))
        put(threading.Thread, "join", _joining(threading.Thread.join))
        put(threading, "Condition", KnowingCondition)
        stack.enter_context(patch.object(BucketWeights, "before_change", KnowingAttribute(), create=True))
        put(Future, "set_result", _telling(Future.set_result))
        put(Future, "result", _learning(Future.result))
        for module in [each for each in sys.modules.values() if getattr(each, "lies_on_host", None) is lies_on_host]:
            put(module, "lies_on_host", _lies_on_host)
        try:
            yield
        finally:
            kinds.device_of.cache_clear()


def _lies_on_host(tensor: torch.Tensor) -> bool:
    return here.clocks is None or here.clocks.is_on_host(tensor)


def _resizing(resize: Any) -> Any:
    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if here.clocks is None:
            return resize(storage, nbytes)
        if here.clocks.recording is not None:
            here.clocks.recording.add(f"resize to {nbytes}", lambda: resized(storage, nbytes))
            return resize(storage, nbytes)
        if nbytes == 0:
            here.clocks.freed(storage)
        result = resize(storage, nbytes)
        if nbytes:
            here.clocks.made(storage, current_stream().name)
        return result

    return resized


# ---- the order that threads of one rank make among themselves


def _starting(start: Any) -> Any:
    def started(thread: threading.Thread) -> None:
        known, run = here.clocks, thread.run
        if known is None:
            start(thread)
            return
        begins = known.known_by(known.thread())

        def watched_run() -> None:
            here.clocks = known
            known.know(known.thread(), begins)
            with watched():
                run()
            thread.ends = known.known_by(known.thread())  # type: ignore[attr-defined]

        thread.run = watched_run  # type: ignore[method-assign]
        start(thread)

    return started


def _joining(join: Any) -> Any:
    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if here.clocks is not None and not thread.is_alive():
            here.clocks.know(here.clocks.thread(), getattr(thread, "ends", {}))

    return joined


class KnowingCondition(threading.Condition):
    """Who enters knows all that those knew who left."""

    def __init__(self, lock: Any = None) -> None:
        super().__init__(lock)
        self._known: Clock = {}

    def _learn(self) -> None:
        if here.clocks is not None:
            here.clocks.know(here.clocks.thread(), self._known)

    def _teach(self) -> None:
        if here.clocks is not None:
            known = here.clocks.known_by(here.clocks.thread())
            join(known, self._known)
            self._known = known

    def __enter__(self) -> bool:
        entered = super().__enter__()
        self._learn()
        return entered

    def __exit__(self, *args: Any) -> None:
        self._teach()
        super().__exit__(*args)

    def wait(self, timeout: float | None = None) -> bool:
        self._teach()
        is_notified = super().wait(timeout)
        self._learn()
        return is_notified


class KnowingAttribute:
    """Of an object. Who reads it knows all that the thread knew which has set it; None at first."""

    def __set__(self, owner: Any, value: Any) -> None:
        known = {} if here.clocks is None else here.clocks.known_by(here.clocks.thread())
        owner.__dict__["known"] = value, known

    def __get__(self, owner: Any, _: Any = None) -> Any:
        value, known = owner.__dict__.get("known", (None, {}))
        if here.clocks is not None:
            here.clocks.know(here.clocks.thread(), known)
        return value


def _telling(set_result: Any) -> Any:
    def told(future: Any, result: Any) -> None:
        if here.clocks is not None:
            future.known = here.clocks.known_by(here.clocks.thread())
        set_result(future, result)

    return told


def _learning(result: Any) -> Any:
    def learnt(future: Any, timeout: float | None = None) -> Any:
        value = result(future, timeout)
        if here.clocks is not None:
            here.clocks.know(here.clocks.thread(), getattr(future, "known", {}))
        return value

    return learnt
