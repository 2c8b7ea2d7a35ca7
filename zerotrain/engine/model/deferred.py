"""Build a model without its parameters' memory, and compute the same initial values later, one parameter at a time.

[Note: deferred initialisation]
The bits of a parameter depend on where the random number generator stood when it was drawn, and constructors draw in
an order of their own: layer by layer, then perhaps all again (`self.apply(init)`). So the constructor runs as it is,
on real memory, and what each operation did is noted with the generator's state before it. As soon as an operation
turns to other tensors, the memory of the last ones is given back: their values can be computed again from the notes.
A value is computed again if the constructor reads it: the constructor may do anything.
"""

import gc
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zerotrain.device.kinds import device_of
from zerotrain.device.memory import give_back_freed

# Memory to give back, and to fill again by known operations.


MAX_STEPS = 16
"""A tensor with more writes than this stays in memory: computing it again would take too long."""


@dataclass(eq=False)
class RecordedCall:
    """One operation of the constructor, with what it needs to be repeated."""

    func: Any
    args: Any
    kwargs: Any
    generator: torch.Generator | None = None
    """Source of its random numbers, and that generator's state before it."""
    random_state: torch.Tensor | None = None
    reads: Sequence["RefillableStorage"] = ()
    """Storages whose values it needs, if it is a step of a storage."""
    into: torch.Tensor | None = None
    """For a call that made a tensor: the tensor, to which result number `output` is copied."""
    output: int = 0

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def repeat(self) -> None:
        for storage in self.reads:
            storage.fill()
        if self.generator is None or self.random_state is None:
            result = self.run()
        else:
            state = self.generator.get_state()
            self.generator.set_state(self.random_state)
            try:
                result = self.run()
            finally:
                self.generator.set_state(state)
        if self.into is not None:
            self.into.copy_(pytree.tree_leaves(result)[self.output])

    def leaves(self) -> list[Any]:
        return pytree.tree_leaves((self.args, self.kwargs))

    def targets(self) -> list[torch.Tensor]:
        """The tensor arguments it writes, by its schema."""
        written = []
        for index, argument in enumerate(self.func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(self.args[index] if index < len(self.args) else self.kwargs.get(argument.name))
        return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, torch.Tensor)]


@dataclass(eq=False)
class RefillableStorage:
    """The memory behind some tensors, to give back and fill again."""

    memory: torch.UntypedStorage
    """Kept: no other storage gets its address."""
    nbytes: int
    live: set["RefillableStorage"]
    """All storages with memory now, of values to compute again."""
    steps: list[RecordedCall] = field(default_factory=list)
    readers: list["RefillableStorage"] = field(default_factory=list)
    """Those with a step that reads this one, now or before."""
    held: bool = False
    """For good: it cannot, or shall not, be computed again."""

    def fill(self) -> None:
        """Have memory and values."""
        if self.memory.nbytes() == 0:
            self.memory.resize_(self.nbytes)
            self.live.add(self)
            for step in self.steps:
                step.repeat()

    def hold(self) -> None:
        """Have memory and values from now on."""
        self.fill()
        self.held = True
        self.live.discard(self)
        self.steps = []

    def add(self, step: RecordedCall | None) -> None:
        """Note what wrote it; None: nobody knows."""
        if step is None or len(self.steps) == MAX_STEPS:
            self.hold()
        elif not self.held:
            self.steps.append(step)
            for read in step.reads:
                read.readers.append(self)

    def before_write(self) -> None:
        """Its values are about to change: what is computed from them is computed now."""
        readers, self.readers = self.readers, []
        for reader in readers:
            if any(self in step.reads for step in reader.steps):
                reader.hold()


MIN_NBYTES = 2**16
"""Smaller tensors stay in memory: the state of the CPU's random number generator alone takes 5 KiB."""
TRIM_NBYTES = 2**24
"""After so much was given back to malloc it is asked to give it back to the system."""

_aten = torch.ops.aten
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_IN_PLACE = "copy_ fill_ zero_ uniform_ normal_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_"
_OVERWRITES = {getattr(_aten, name) for name in _IN_PLACE.split()}
"""Operations without a use for the first argument's old values."""
_UNFILLED = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_ALIASES = {_aten.detach, _aten.alias}
"""Views that need no memory. Torch refuses others of a tensor without memory: it checks that they lie within."""
_MOVES_STORAGE = {_aten.set_, _aten.resize_, _aten.resize_as_}
_READERS = "__array__ __deepcopy__ __dlpack__ __reduce_ex__ data_ptr numpy share_memory_ storage tolist untyped_storage"
_READS_MEMORY = {getattr(torch.Tensor, name) for name in _READERS.split()}
"""Ways to a tensor's memory beside operations: nothing can be noted of them."""


class InitialValues:
    """The initial values of a model of `deferred_init`: its large parameters have no memory.

    For a model built in the ordinary way it has no records, and takes the values of the parameters.
    """

    def __init__(self) -> None:
        self._storages: dict[int, RefillableStorage] = {}
        self._live: set[RefillableStorage] = set()
        self._freed_nbytes = 0

    @contextmanager
    def values_of(self, parameter: torch.nn.Parameter) -> Iterator[torch.Tensor]:
        """The values of a parameter, while the context lasts."""
        storage = self._find(parameter)
        if storage is not None:
            storage.fill()
        yield parameter.detach()
        self.release()

    def release(self, *, but: Collection[RefillableStorage] = ()) -> None:
        """Give back all memory of values to compute again."""
        for storage in [storage for storage in self._live if storage not in but]:
            storage.memory.resize_(0)
            self._live.discard(storage)
            self.freed(storage.nbytes)

    def freed(self, nbytes: int) -> None:
        """So much was given back to malloc; now and then, let malloc give it back to the system."""
        self._freed_nbytes += nbytes
        if self._freed_nbytes > TRIM_NBYTES:
            self._freed_nbytes = 0
            give_back_freed()

    def hold(self, tensor: torch.Tensor) -> None:
        """Somebody reads a tensor beyond our sight: let it have memory from now on."""
        storage = self._find(tensor)
        if storage is not None:
            storage.hold()

    def hold_all_but(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Let all have memory that is in somebody's hands and none of `parameters`: buffers, attributes, aliases."""
        gc.collect()
        steps = [step for storage in self._storages.values() for step in storage.steps]
        ours = {id(leaf) for step in steps for leaf in (*step.leaves(), step.into)}
        ours |= {id(parameter) for parameter in parameters.values()}
        objects = gc.get_objects() if self._storages else []
        for tensor in [thing for thing in objects if type(thing) in _PLAIN and id(thing) not in ours]:
            try:
                storage = self._find(tensor)
            except RuntimeError:
                continue  # garbage that the collector of another thread has cleared
            if storage is not None:
                storage.hold()
        self.release()
        storages = {name: self._find(parameter) for name, parameter in parameters.items()}
        whole = [name for name, storage in storages.items() if storage is not None and storage.held]
        if whole:
            warnings.warn(
                f"the initial values of {', '.join(whole)} cannot be computed again after the model's constructor; "
                "every rank holds all of them until they are sharded",
                stacklevel=3,
            )

    def _find(self, tensor: torch.Tensor) -> RefillableStorage | None:
        return self._storages.get(tensor.untyped_storage()._cdata) if _is_plain(tensor) else None

    # ---- notes

    def note(self, call: RecordedCall) -> Any:
        """Run an operation of the constructor, and note how to repeat what it wrote."""
        packet = call.func.overloadpacket
        if packet in _ALIASES:
            return call.run()
        tensors = [leaf for leaf in call.leaves() if isinstance(leaf, torch.Tensor)]
        used = [storage for storage in map(self._find, tensors) if storage is not None]
        if packet in _MOVES_STORAGE:
            for storage in used:
                storage.hold()
            return call.run()
        targets = [storage for storage in map(self._find, call.targets()) if storage is not None]
        for storage in targets:
            storage.before_write()
        is_whole = packet in _OVERWRITES and len(targets) == 1 and tensors[0].nbytes == targets[0].nbytes
        if is_whole and tensors[0].is_contiguous() and used.count(targets[0]) == 1:
            targets[0].steps = []
        for storage in used:
            storage.fill()
        call.generator = _generator_of(call, tensors)
        call.random_state = None if call.generator is None else call.generator.get_state()
        result = call.run()
        for storage in targets:
            storage.add(self._step(call, storage))
        new_storages = self._note_made(call, result)
        if used or new_storages:
            self.release(but={*used, *new_storages})
        return result

    def _note_made(self, call: RecordedCall, result: Any) -> list[RefillableStorage]:
        """Note how the new tensors among the results were made."""
        new_storages = []
        argument_ids = {leaf.untyped_storage()._cdata for leaf in call.leaves() if _is_plain(leaf)}
        for output, tensor in enumerate(pytree.tree_leaves(result)):
            if not _is_plain(tensor):
                continue
            memory = tensor.untyped_storage()
            if memory._cdata in argument_ids or memory.nbytes() < MIN_NBYTES or not memory.resizable():
                continue
            storage = self._storages[memory._cdata] = RefillableStorage(memory, memory.nbytes(), self._live)
            self._live.add(storage)
            new_storages.append(storage)
            if call.func.overloadpacket in _UNFILLED:
                continue
            step = self._step(call, storage)
            if step is not None:
                step.into, step.output = tensor.detach(), output
            storage.add(step)
        return new_storages

    def _step(self, call: RecordedCall, target: RefillableStorage) -> RecordedCall | None:
        """The note of a call that wrote `target`; None where it used a large tensor that nothing is noted of."""
        reads: list[RefillableStorage] = []
        is_complete = True

        def keep(leaf: Any) -> Any:
            nonlocal is_complete
            if not isinstance(leaf, torch.Tensor):
                return leaf
            storage = self._find(leaf)
            if storage is None:
                is_complete &= leaf.nbytes < MIN_NBYTES
                return leaf.detach().clone() if is_complete else None
            if storage is not target:
                reads.append(storage)
            return leaf.detach()

        args, kwargs = pytree.tree_map(keep, (call.args, call.kwargs))
        return replace(call, args=args, kwargs=kwargs, reads=reads) if is_complete else None


class _NoteOperations(TorchDispatchMode):
    def __init__(self, values: InitialValues) -> None:
        super().__init__()
        self._values = values

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, only to keep it out of here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Otherwise the modes would see what is looked up here, and take it for a read by the constructor.
        with torch._C.DisableTorchFunction():
            return self._values.note(RecordedCall(func, args, kwargs or {}))


class _HoldReadMemory(TorchFunctionMode):
    def __init__(self, values: InitialValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS_MEMORY:
            self._values.hold(args[0])
        return func(*args, **(kwargs or {}))


def deferred_init(make_model: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, InitialValues]:
    """Build a model without memory for its large parameters, and note how to compute their initial values.

    The values have the bits that `make_model()` alone would have given them, and the random number generators are
    left where it would have left them. While it runs, memory is held for the tensors of one operation, for those
    smaller than `MIN_NBYTES`, and for what cannot be computed again, which a warning names.

    Args:
        make_model: called once. Tensors that it makes in other threads are not noted, and stay in memory; threads may
            not use what this one has made.

    Returns:
        The model, and its initial values. Until an engine has taken the model over, nobody may read its parameters.
    """
    values = InitialValues()
    with _HoldReadMemory(values), _NoteOperations(values):
        model = make_model()
    give_back_freed()
    values.hold_all_but({name: value for name, value in model.named_parameters() if value.is_floating_point()})
    return model, values


def _is_plain(tensor: Any) -> bool:
    """Whether it is a tensor with memory of the usual kind."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta


def _generator_of(call: RecordedCall, tensors: list[torch.Tensor]) -> torch.Generator | None:
    """The random number generator of an operation."""
    if torch.Tag.nondeterministic_seeded not in call.func.tags:
        return None
    for leaf in call.leaves():
        if isinstance(leaf, torch.Generator):
            return leaf
    device = tensors[0].device if tensors else torch.device(call.kwargs.get("device") or "cpu")
    return device_of(device).generator
