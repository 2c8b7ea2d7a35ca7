"""The optimizer state of a bucket, for its home: the tensors, and the objects that hold them."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from zerotrain.engine.buckets.parts.spans import Span
from zerotrain.engine.buckets.parts.whole_tensors import WholeTensors
from zerotrain.engine.groups.optimizers import tensors_of_state


@dataclass(eq=False)
class Kept:
    """Apart from the bucket's update, which has the home: or each would keep the other in memory."""

    master_weight: torch.Tensor
    has_copy: bool
    """Whether that is kept apart from the model's weight."""
    spans: Sequence[Span]
    whole: WholeTensors | None
    by_elements: torch.optim.Optimizer | None
    of_whole: torch.optim.Optimizer | None
    average: torch.Tensor | None = None
    """Moving average of the master weight, over the same elements; None before its first update."""

    def tensors(self) -> Iterator[tuple[Hashable, torch.Tensor]]:
        """The tensors that belong at home."""
        if self.has_copy:
            yield "master weight", self.master_weight
        if self.average is not None:
            yield "average", self.average
        for number, optimizer in enumerate((self.by_elements, self.of_whole)):
            for place, state in enumerate(optimizer.state.values() if optimizer is not None else ()):
                for name, value in state.items():
                    if type(value) is torch.Tensor and value.ndim > 0:
                        yield (number, place, name), value

    @property
    def separate_master_nbytes(self) -> int:
        """Bytes of the master weight, 0 where it shares the model weight's storage."""
        return self.master_weight.nbytes if self.has_copy else 0

    def element_state_nbytes(self) -> int:
        """Bytes of state this rank keeps of what it updates by elements (0-dim counters left out)."""
        return sum(tensor.nbytes for tensor in tensors_of_state(self.by_elements))

    def state_tensors(self) -> list[torch.Tensor]:
        """All state of this rank (0-dim counters left out)."""
        return [*tensors_of_state(self.by_elements), *tensors_of_state(self.of_whole)]

    def update_average(self, share: float) -> None:
        """Bring the average nearer to the master weight, which was updated: by this share of what lies between. At
        first it is the weight itself."""
        if self.average is None:
            self.average = self.master_weight.detach().clone()
        else:
            self.average.lerp_(self.master_weight.detach(), share)

    def follow_master(self) -> None:
        """The master weight has other memory under it: so have the parts of it that are updated."""
        for span in self.spans:
            span.target.data = self.master_weight[span.where]
        if self.whole is not None:
            self.whole.follow_master()
