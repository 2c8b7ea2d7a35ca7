"""Memory that can be given back, since it is known by which operations it is filled again."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

MAX_STEPS = 16
"""A tensor that more operations than this have written stays in memory: computing it again would take too long."""


@dataclass(eq=False)
class RecordedCall:
    """One operation of the constructor, with what it needs to be repeated."""

    func: Any
    args: Any
    kwargs: Any
    generator: torch.Generator | None = None
    """Source of its random numbers, and that generator's state before it."""
    random_state: torch.Tensor | None = None

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def repeat(self) -> Any:
        if self.generator is None or self.random_state is None:
            return self.run()
        before = self.generator.get_state()
        self.generator.set_state(self.random_state)
        try:
            return self.run()
        finally:
            self.generator.set_state(before)

    def leaves(self) -> list[Any]:
        return pytree.tree_leaves((self.args, self.kwargs))


@dataclass(eq=False)
class Step:
    """A call that wrote a storage."""

    call: RecordedCall
    reads: list["RefillableStorage"]
    into: torch.Tensor | None = None
    """For a call that made a tensor: the tensor, to which result number `output` is copied."""
    output: int = 0

    def repeat(self) -> None:
        for storage in self.reads:
            storage.fill()
        result = self.call.repeat()
        if self.into is not None:
            self.into.copy_(pytree.tree_leaves(result)[self.output])


@dataclass(eq=False)
class RefillableStorage:
    """The memory behind some tensors, which can be given back and filled again."""

    memory: torch.UntypedStorage
    """Kept, so that no other storage gets its address."""
    nbytes: int
    live: set["RefillableStorage"]
    """All that have memory now and can be computed again."""
    steps: list[Step] = field(default_factory=list)
    readers: list["RefillableStorage"] = field(default_factory=list)
    """Those with a step that reads this one, or had such a step."""
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

    def add(self, step: Step | None) -> None:
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
