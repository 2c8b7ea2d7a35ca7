"""Counts the bytes of all tensors that are alive, operation by operation, and what they were when there were most."""

from functools import partial
from types import TracebackType
from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from zerotrain.engine.engine import ZeroEngine
from zerotrain.offload.tier import Crossing, Tier

OTHERS = "activations"
"""The kind of all memory that nobody has named: what a forward saves, and what is alive for a moment."""
SCRATCH = "scratch"


class LiveMemory(TorchDispatchMode):
    """Counts the memory behind each tensor that an operation gives or gets within it, once, until it is freed.

    Bytes are those that tensors asked for. An allocator rounds them up and keeps what is freed, and a kernel takes
    memory of its own, which no tensor tells of.

    Memory that an engine has offloaded does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._engine: ZeroEngine | None = None
        self._off_device: list[tuple[str, Tier | Crossing]] = []
        """All that holds memory off the device."""
        self.peak_phase = ""
        """The part of a step in which there were most."""
        self._most = 0
        """Most bytes alive at once since `begin`, of those that come and go."""
        self._at_most: dict[str, int] = {}
        """Bytes alive then, by kind."""
        self._by_kind: dict[str, int] = {OTHERS: 0}
        self._known: dict[int, tuple[ref[torch.UntypedStorage], str, int]] = {}
        """(storage, kind, bytes) by the id of the storage, which is one object as long as its memory lives."""
        self._resize: Any = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's question to a mode: within this one nothing is compiled, and each operation is spared the care that
        it needs where something is."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes alive now."""
        return sum(self._by_kind.values()) - sum(each.placed_nbytes for _, each in self._off_device)

    def begin(self, engine: ZeroEngine) -> None:
        """Look for the most from now on, in the steps of an engine."""
        self._engine, self._off_device = engine, engine.held.homes.off_device
        self._most = 0
        self._look()

    @property
    def peak_nbytes(self) -> int:
        """Most bytes alive at once since `begin`. Scratch is kept from step to step: it counts with all that there is
        of it by now, as in each step after the first."""
        return self._most + self._by_kind.get(SCRATCH, 0)

    @property
    def at_peak(self) -> dict[str, int]:
        """The same by kind, without the memory elsewhere."""
        return self._at_most | {SCRATCH: self._by_kind.get(SCRATCH, 0)}

    def name(self, kind: str, *tensors: torch.Tensor) -> None:
        """Count the memory of these tensors as of a kind, now and once it is given back and comes again."""
        for tensor in tensors:
            self._note(tensor)
            found = self._known.get(id(tensor.untyped_storage()))
            if found is not None:
                storage, before, nbytes = found
                self._by_kind[before] -= nbytes
                self._by_kind[kind] = self._by_kind.get(kind, 0) + nbytes
                self._known[id(tensor.untyped_storage())] = (storage, kind, nbytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = func(*args, **(kwargs or {}))
        for each in tree_iter((args, given)):
            if isinstance(each, torch.Tensor):
                self._note(each)
        return given

    def __enter__(self) -> "LiveMemory":
        """Memory that is given back and comes again under the same tensor is no operation: it is heard of here."""
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            resized: torch.UntypedStorage = self._resize(storage, nbytes)
            self._resized(storage)
            return resized

        setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010 -- a method of torch, for a while
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        setattr(torch.UntypedStorage, "resize_", self._resize)  # noqa: B010

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if (key := id(storage)) in self._known:
            return
        nbytes = storage.nbytes()
        self._known[key] = (ref(storage, partial(self._freed, key)), OTHERS, nbytes)
        if nbytes:
            self._by_kind[OTHERS] += nbytes
            self._look()

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if (found := self._known.get(id(storage))) is not None:
            reference, kind, before = found
            self._known[id(storage)] = (reference, kind, storage.nbytes())
            self._by_kind[kind] += storage.nbytes() - before
            self._look()

    def _freed(self, key: int, _: Any) -> None:
        _, kind, nbytes = self._known.pop(key)
        self._by_kind[kind] -= nbytes

    def _look(self) -> None:
        nbytes = self.nbytes - self._by_kind.get(SCRATCH, 0)
        if nbytes > self._most:
            self._most, self._at_most = nbytes, dict(self._by_kind)
            self.peak_phase = "" if self._engine is None else self._engine.schedule.phase.value
