"""CUDA graphs that do not exist: what is told while one is recorded is kept, and told again by each replay.

As on a GPU nothing of what is recorded happens: memory from before the recording has its values again behind it, no
collective is sent, no random number is drawn. Each replay does what was recorded to the same memory, and is watched
like any other work (`Clocks`). What CUDA refuses meanwhile is refused here: a wait of the host, a look at an event,
pinned memory, a tensor made of the host's numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

REFUSED = "operation not permitted when stream is capturing"
Description = tuple[Any, ...]


@dataclass
class Entry:
    """One operation."""

    name: str
    again: Callable[[], object]
    tensors: list[Description] = field(default_factory=list)
    """Of each tensor: its memory (the address of what was there before, or the entry that has made it), offset, shape
    and dtype."""


class Recording:
    """In place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._made: dict[int, int] = {}
        """The entries that have made memory, by storage."""
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """The memory from before that was written to, and its values."""

    def refuse(self, what: str) -> None:
        """Raise what CUDA raises."""
        raise RuntimeError(f"CUDA error: {REFUSED}: {what}")

    def add(self, name: str, again: Callable[[], object], *tensors: torch.Tensor) -> None:
        """Keep one operation."""
        self.entries.append(Entry(name, again, [self._described(tensor) for tensor in tensors]))

    def note_made(self, tensors: list[torch.Tensor]) -> None:
        """The next entry makes these."""
        for tensor in tensors:
            self._made.setdefault(tensor.untyped_storage()._cdata, len(self.entries))

    def keep_values(self, tensors: list[torch.Tensor]) -> None:
        """These are about to be written to."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made and storage._cdata not in self._before:
                self._before[storage._cdata] = storage, storage.clone()

    def end(self) -> None:
        """Nothing of it has happened."""
        for storage, values in self._before.values():
            if storage.nbytes() == values.nbytes():
                storage.copy_(values)
        self._before.clear()

    def _described(self, tensor: torch.Tensor) -> Description:
        storage = tensor.untyped_storage()
        made_by = self._made.get(storage._cdata)
        memory = ("memory", storage._cdata) if made_by is None else ("made by", made_by)
        return (*memory, tensor.storage_offset(), tuple(tensor.shape), tensor.dtype)

    def listed(self) -> list[Description]:
        """All operations, each with its tensors."""
        return [(entry.name, *entry.tensors) for entry in self.entries]


def aliased(tree: Any) -> Any:
    """The same with tensors of the same memory, whatever becomes of those that were given."""
    with torch._C.DisableTorchFunctionSubclass():
        return tree_map_only(torch.Tensor, lambda tensor: torch.Tensor.detach(tensor), tree)


def recompute(func: Any, args: Any, kwargs: Any, made: list[torch.Tensor]) -> None:
    """Call an operation again and leave what it makes in the memory of `made`."""
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        result = func(*args, **kwargs)
        given = [tensor for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        new = [
            tensor
            for tensor in tree_iter(result)
            if isinstance(tensor, torch.Tensor) and not any(tensor is other for other in given)
        ]
        for old, tensor in zip(made, new, strict=True):
            old.copy_(tensor)


@contextmanager
def values_of_the_generator() -> Iterator[None]:
    """Recording draws no random number."""
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
