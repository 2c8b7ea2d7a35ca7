"""Finds what a GPU may do in another order than the code assumes, on a CPU, by vector clocks.

A GPU does what a stream was told in that order, and knows no order between streams but that of events; the host is
ahead of all. Here every operation that torch dispatches counts as a kernel of the stream it would run on, and is
carried out at once. Host threads and streams are actors. An actor's clock says how much of each has happened before:

- a kernel begins after all its stream was told, and after all its thread knows at the launch;
- an event takes its stream's clock, and whoever waits for it joins that clock to its own.

Two accesses to the same bytes, one of them a write, that no clock orders are a fault, also where one is the host's, in
pinned memory. So is memory that is freed, and so given back to the stream it was made on, while another stream uses it.
(Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System", 1978; Mattern, "Virtual Time", 1988.)
"""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.streams.recording import Recording, aliased, recompute

Clock = dict[str, int]
"""Actor -> so many of its accesses have happened before."""

_READS_OF_HOST = (torch.Tensor.tolist, torch.Tensor.numpy)
"""Bring values to Python without a kernel that is dispatched."""
_OF_HOST = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.frombuffer)
"""Make a tensor of numbers of the host."""
_HOST = "host"
_NO_KERNELS = ("empty", "new_empty", "detach", "alias", "_unsafe_view", "set_", "lift_fresh", "resize_", "is_set_to")


def join(clock: Clock, other: Clock) -> None:
    """All that `other` knows is known to `clock` too."""
    for actor, count in other.items():
        if clock.get(actor, 0) < count:
            clock[actor] = count


@dataclass
class Access:
    """The bytes from `start` to `stop` of a memory, read or written by an actor."""

    start: int
    stop: int
    actor: str
    count: int
    what: str

    def overlaps(self, start: int, stop: int) -> bool:
        return self.start < stop and start < self.stop

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.actor, 0) >= self.count


@dataclass
class Memory:
    """What was done to one storage since its memory was made."""

    made_on: str
    reference: StorageWeakRef
    on_host: bool = False
    writes: list[Access] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)
    """Streams of `record_stream`: they are waited for before anybody gets the memory."""


class Clocks:
    """The actors of one rank, the memory they use, and what was wrong with it.

    Args:
        compute: the stream that computes.
    """

    def __init__(self, compute: str = "compute") -> None:
        self.compute = compute
        self.faults: list[str] = []
        """Each once, in words."""
        self.kernels: Counter[str] = Counter()
        """Kernels that the host has told, by the operation's name; a graph counts as one."""
        self.in_graphs: Counter[str] = Counter()
        """Those of graphs."""
        self.syncs: Counter[str] = Counter()
        """Waits of the host for the device, by what waited."""
        self.recording: Recording | None = None
        """The graph being recorded."""
        self.is_replaying = False
        self.graphs: dict[int, Recording] = {}
        """Those that were replayed."""
        self._clocks: dict[str, Clock] = {}
        self._memories: dict[int, Memory] = {}
        self._lock = threading.RLock()

    # ---- order

    def clock(self, actor: str) -> Clock:
        """That of a thread or stream."""
        with self._lock:
            return self._clocks.setdefault(actor, {})

    def known_by(self, actor: str) -> Clock:
        """A copy of its clock, as it is now."""
        with self._lock:
            return dict(self.clock(actor))

    def thread(self) -> str:
        """This thread's name as an actor."""
        return f"{_HOST} ({threading.current_thread().name})"

    def know(self, actor: str, clock: Clock) -> None:
        """All that `clock` says has happened before what `actor` does from here on."""
        with self._lock:
            self._find_freed()  # before the actor knows more than it knew when the memory was freed
            join(self.clock(actor), clock)

    def tell(self, stream: str, after: Sequence[Clock] = ()) -> tuple[str, int]:
        """This thread tells a stream a kernel; return its place."""
        with self._lock:
            clock = self.clock(stream)
            for each in (self.clock(self.thread()), *after):
                join(clock, each)
            clock[stream] = clock.get(stream, 0) + 1
            return stream, clock[stream]

    def sync(self, clock: Clock, what: str) -> None:
        """The host waits in this thread until all that `clock` says has happened."""
        if self.recording is not None:
            self.recording.refuse(f"the host waits ({what})")
        self.syncs[what] += 1
        self.know(self.thread(), clock)

    # ---- memory

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in memory of the host, as its maker said."""
        memory = self._memories.get(tensor.untyped_storage()._cdata)
        return memory is not None and memory.on_host

    def put_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """This is pinned memory of the host, that no stream has had."""
        memory = self.memory(tensor.untyped_storage())
        memory.on_host = True
        memory.writes.clear()
        return tensor

    def record_stream(self, tensor: torch.Tensor, stream: str) -> None:
        """See torch's."""
        self.memory(tensor.untyped_storage()).recorded.add(stream)

    def memory(self, storage: torch.UntypedStorage, made_on: str | None = None) -> Memory:
        """What is known of a storage.

        Args:
            made_on: the stream on which it is made now, if it is not known yet.
        """
        with self._lock:
            memory = self._memories.get(storage._cdata)
            if memory is None:
                memory = Memory(made_on or self.compute, StorageWeakRef(storage))
                self._memories[storage._cdata] = memory
                if made_on is not None:
                    # Who had the memory before may not be done with it: only its stream knows.
                    actor, count = self.tell(made_on)
                    memory.writes.append(Access(0, storage.nbytes(), actor, count, "the memory was made"))
            return memory

    def freed(self, storage: torch.UntypedStorage) -> None:
        """Its memory is given back now, and the storage may get other memory."""
        with self._lock:
            memory = self._memories.pop(storage._cdata, None)
            if memory is not None:
                self._require_unused(memory)

    def made(self, storage: torch.UntypedStorage, stream: str) -> None:
        """It has got memory."""
        with self._lock:
            self._memories.pop(storage._cdata, None)
            self.memory(storage, stream)

    def _find_freed(self) -> None:
        for key in [key for key, memory in self._memories.items() if memory.reference.expired()]:
            self._require_unused(self._memories.pop(key))

    def _require_unused(self, memory: Memory) -> None:
        """It goes back to the stream it was made on, whose next kernel may write to it.

        Which thread has let go of it is not seen, so what any thread has waited for counts as waited for.
        """
        if memory.on_host:  # torch itself waits for copies of pinned memory
            return
        known = self.known_by(memory.made_on)
        for actor, clock in self._clocks.items():
            if actor.startswith(_HOST):
                join(known, clock)
        for each in (*memory.writes, *memory.reads):
            if not each.is_before(known) and each.actor not in memory.recorded:
                self.say(f"memory of {memory.made_on} is freed while {each.actor} may use it in {each.what}")

    def access(self, tensor: torch.Tensor, place: tuple[str, int], what: str, *, writes: bool) -> None:
        """An actor reads or writes a tensor at a place of its own."""
        if tensor.numel() == 0:
            return
        actor, count = place
        with self._lock:
            memory = self.memory(tensor.untyped_storage())
            clock, itemsize = self.clock(actor), tensor.element_size()
            start = tensor.storage_offset() * itemsize
            extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            stop = start + extent * itemsize
            for each in memory.writes + memory.reads if writes else memory.writes:
                if each.overlaps(start, stop) and not each.is_before(clock):
                    did = "is written" if writes else "is read"
                    self.say(f"what {each.actor} does in {each.what} {did} by {actor} in {what}, in no order")
            mine = Access(start, stop, actor, count, what)
            if writes:
                memory.writes = [each for each in memory.writes if not (start <= each.start and each.stop <= stop)]
                memory.reads = [each for each in memory.reads if not (start <= each.start and each.stop <= stop)]
                memory.writes.append(mine)
            else:
                memory.reads = [
                    each
                    for each in memory.reads
                    if not (each.actor == actor and start <= each.start and each.stop <= stop)
                ]
                memory.reads.append(mine)

    def host_access(self, tensor: torch.Tensor, what: str, *, writes: bool) -> None:
        """This thread reads or writes memory of the host."""
        with self._lock:
            actor = self.thread()
            clock = self.clock(actor)
            clock[actor] = clock.get(actor, 0) + 1
            self.access(tensor, (actor, clock[actor]), what, writes=writes)

    def say(self, fault: str) -> None:
        """Note a fault."""
        if fault not in self.faults:
            self.faults.append(fault)

    def end(self) -> None:
        """Nothing comes any more: look at what was freed."""
        with self._lock:
            self._find_freed()


class Kernels(TorchDispatchMode):
    """In here each operation of this thread is a kernel.

    Args:
        stream: gives the stream that this thread tells.
    """

    def __init__(self, clocks: Clocks, stream: Any) -> None:
        super().__init__()
        self._clocks, self._stream = clocks, stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._clocks.recording is not None and func.namespace == "aten":
            return self._record(self._clocks.recording, func, args, kwargs)
        result = func(*args, **kwargs)
        if func.namespace != "aten":  # a range for the profiler
            return result
        name, clocks = func._schema.name.removeprefix("aten::"), self._clocks
        if any(each.is_meta for each in _tensors((args, kwargs, result))):
            return result
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        given, written = list(_tensors((args, kwargs))), list(_written(func._schema, args, kwargs))
        for tensor in given:  # of a tensor of the host's numbers its first kernel is seen before itself
            clocks.memory(tensor.untyped_storage(), self._stream() if name == "lift_fresh" else None)
        made = [each for each in _tensors(result) if not is_view and not any(each is other for other in given)]
        on_host = [clocks.is_on_host(tensor) for tensor in given]
        if given and all(on_host) and not is_view:
            for tensor in given:
                clocks.host_access(tensor, name, writes=any(tensor is each for each in written))
            for tensor in made:
                clocks.put_on_host(tensor)
            return result
        for tensor in made:
            clocks.memory(tensor.untyped_storage(), self._stream())
        if is_view or name.startswith(_NO_KERNELS):
            return result
        clocks.kernels[name] += 1
        place = clocks.tell(self._stream())
        self._note(name, place, given, written, made)
        is_read = isinstance(result, bool | int | float)
        if is_read or (any(on_host) and not (name == "copy_" and _is_non_blocking(args, kwargs))):
            clocks.sync(clocks.clock(self._stream()), name)
        return result

    def _note(self, name: str, place: Any, given: Any, written: Any, made: Any) -> None:
        for tensor in given:
            self._clocks.access(tensor, place, name, writes=any(tensor is each for each in written))
        for tensor in made:
            self._clocks.access(tensor, place, name, writes=True)

    def _record(self, recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
        """Keep a kernel for replays. It is carried out for what it makes; what it writes to is given back later."""
        name, clocks, stream = func._schema.name.removeprefix("aten::"), self._clocks, self._stream()
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        given, written = list(_tensors((args, kwargs))), list(_written(func._schema, args, kwargs))
        recording.keep_values(given if name == "native_batch_norm" else written)  # whose schema tells nothing
        result = func(*args, **kwargs)
        if isinstance(result, bool | int | float) and not name.startswith(_NO_KERNELS):
            recording.refuse(name)
        if is_view:
            return result
        made = [each for each in _tensors(result) if not any(each is other for other in given)]
        recording.note_made(made)
        if name.startswith(_NO_KERNELS):
            return result
        kept_args, kept_kwargs, kept = aliased(args), aliased(kwargs), aliased(made)
        kept_given, kept_written = (
            list(_tensors((kept_args, kept_kwargs))),
            list(_written(func._schema, kept_args, kept_kwargs)),
        )

        def again() -> None:
            recompute(func, kept_args, kept_kwargs, kept)
            clocks.in_graphs[name] += 1
            self._note(name, clocks.tell(stream), kept_given, kept_written, kept)

        recording.add(name, again, *kept_given, *kept)
        return result


def _is_non_blocking(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (each for each in tree_iter(tree) if isinstance(each, torch.Tensor))


def _written(schema: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for index, each in enumerate(schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            yield from _tensors(args[index] if index < len(args) else kwargs.get(each.name))


class HostReads(TorchFunctionMode):
    """In here whatever brings values to Python waits for the stream, and is counted."""

    def __init__(self, clocks: Clocks, stream: Any) -> None:
        super().__init__()
        self._clocks, self._stream = clocks, stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_HOST and self._clocks.recording is not None:
            self._clocks.recording.refuse(f"{func.__name__} copies from the host's memory")
        if func in _READS_OF_HOST:
            clocks = self._clocks
            if clocks.is_on_host(args[0]):
                clocks.host_access(args[0], func.__name__, writes=False)
            else:
                clocks.access(args[0], clocks.tell(self._stream()), func.__name__, writes=False)
                clocks.sync(clocks.clock(self._stream()), func.__name__)
        return func(*args, **kwargs)
