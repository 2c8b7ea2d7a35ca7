"""The one writer of state: whatever comes into the buckets of an engine comes from a `Source`, through `fill`.

It goes bucket by bucket and role by role, so a rank needs a bucket beside what it holds, and where ranges are read, as
out of files, some MiB.
"""

import gc
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zerotrain.checkpoint.manifest import AVERAGE, WEIGHT
from zerotrain.comm.collectives import Collectives
from zerotrain.engine.buckets.bucket import Bucket, TrainedBucket
from zerotrain.engine.buckets.weights import BucketWeights
from zerotrain.engine.state.named import KeptState, NamedPiece, cut_pieces, kept_states, replaced_weights
from zerotrain.engine.state.together import on_all
from zerotrain.sharding.layout import FlatBuffer
from zerotrain.sharding.plan import Plan
from zerotrain.sharding.units import ManagedParameter

# The noun for state that comes into an engine: what a source has by name, and how `fill` gets elements of it.


class KeptTensor(NamedTuple):
    """A tensor that the optimizer keeps, without its numbers."""

    shape: tuple[int, ...] | None
    """The shape that is kept of a tensor that is updated whole; None: a number for each element."""
    dtype: torch.dtype


class KeptOnce(NamedTuple):
    """A value that the optimizer keeps once for all elements, such as the number of its steps."""

    value: Any
    on_device: bool

    def placed(self, device: torch.device) -> Any:
        """A copy for one span: of one that two shared every step would count twice."""
        return self.value.to(device, copy=True) if self.on_device else deepcopy(self.value)


Keeps = Mapping[str, KeptTensor | KeptOnce]
"""All that an optimizer keeps of a parameter, by name."""


class Source(ABC):
    """State by name and element. `fill` alone writes it into buckets; a source only reads."""

    doing = ""
    """The call in words, such as "loading PATH", for errors that one rank meets alone."""
    is_collective = False
    """True where the ranks read together, so that none can fail alone."""
    has_state = False
    """True where it has what the optimizer keeps. Otherwise that stays, and weights alone are replaced."""

    has_average = False
    """True where it has an average of the weights too. One that has state and no average leaves none."""

    def begin(self, bucket: Bucket, role: str) -> None:
        """Get ready to read of one bucket in one role. A collective source sends here, and nowhere else."""
        return

    @abstractmethod
    def read(self, piece: NamedPiece) -> None:
        """Read the elements of a piece into its memory; leave them as they are where the source does not have them."""

    def keeps(self, managed: ManagedParameter) -> Keeps:
        """Tell what the optimizer is to keep of a parameter; the same on all ranks."""
        return {}

    def hand_over(self, bucket: Bucket, role: str, where: slice | int) -> torch.Tensor | None:
        """Memory of the source that can be kept instead of a copy; None: there is none, and `read` is called.

        Args:
            where: elements of the bucket, or the slot of a tensor that is updated whole.
        """
        return None

    def fill_rest(self) -> None:
        """Fill what lies in no bucket: buffers, and what modules keep beside their tensors."""
        return


HALF = "the engine holds a part of it: load one that can be read before you continue training"


def fill(source: Source, buckets: Sequence[Bucket], collectives: Collectives) -> None:
    """Replace the weights of buckets by those of a source, and what the optimizer keeps if the source has that.
    Collective, between steps. Names and shapes fit: who makes a source has checked them.

    Raises:
        CheckpointError: on every rank; one of them could not read, and the engine holds a part.
    """
    for bucket in buckets:
        bucket.weights.begin_refill()  # waits for gathers: not where one rank alone may fail

    def read() -> None:
        for bucket in buckets:
            source.begin(bucket, WEIGHT)
            for piece in replaced_weights(bucket):
                source.read(piece)
            fill_state(source, bucket)
            bucket.forget()
        source.fill_rest()

    if source.is_collective:
        read()
    else:
        on_all(collectives, read, doing=source.doing, outcome=HALF)
    for bucket in buckets:
        if isinstance(bucket, TrainedBucket):
            bucket.update.refilled()
        bucket.weights.end_refill()
        bucket.forget()


def fill_state(source: Source, bucket: Bucket) -> None:
    """Replace what the optimizer keeps of one bucket, and the average of its weights: a change of the stage leaves the
    weights themselves where they are."""
    if not isinstance(bucket, TrainedBucket) or not source.has_state:
        return
    states = []
    for state in kept_states(bucket):
        # Nothing is saved of a parameter without elements, so one that has some tells for all.
        member = next((managed for managed in state.members if managed.parameter.numel() > 0), state.members[0])
        states.append((state, source.keeps(member)))
    for state, keeps in states:
        state.values.clear()
        if not keeps:
            state.values.update(bucket.update.state_at_first(state.members[0].group, state.target))
        for name, value in keeps.items():
            if isinstance(value, KeptOnce):
                state.values[name] = value.placed(bucket.update.device)
    everything = [item for managed in bucket.spec.parameters for item in source.keeps(managed).items()]
    for role in sorted({name for name, value in everything if isinstance(value, KeptTensor)}):
        source.begin(bucket, role)
        for state, keeps in states:
            if isinstance(tensor := keeps.get(role), KeptTensor):
                state.values[role] = _values(source, bucket, role, state, tensor)
        bucket.update.home.put_away()
    bucket.update.state.average = None
    if source.has_average:
        source.begin(bucket, AVERAGE)
        state = KeptState([], bucket.update.where, bucket.update.master_weight, {})
        average = _values(source, bucket, AVERAGE, state, KeptTensor(None, state.target.dtype))
        bucket.update.state.average = average
    bucket.update.home.put_away()
    bucket.update.home.forget()


def _values(source: Source, bucket: TrainedBucket, role: str, state: KeptState, tensor: KeptTensor) -> torch.Tensor:
    values = source.hand_over(bucket, role, state.where)
    if values is None and isinstance(state.where, slice):
        values = torch.zeros_like(state.target, dtype=tensor.dtype)
        for piece in cut_pieces(bucket, role, values, state.where):
            source.read(piece)
    elif values is None:
        assert tensor.shape is not None
        values = torch.zeros(tensor.shape, dtype=tensor.dtype, device=bucket.update.master_weight.device)
        source.read(NamedPiece(state.members[0], role, values, None, None))
    return values


# Memory that parameters had before their stage changed, and who keeps it.


class GivenUpMemory:
    """The memory that whole weights leave when the plan of their buckets changes.

    Args:
        plan: as the buckets are to lie.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._given_up: dict[str, StorageWeakRef] = {}
        """By the name of the bucket."""

    def memory_for(self, weights: BucketWeights) -> FlatBuffer:
        """The whole weights of a bucket where the model is to read them. Sharded parameters get memory of their own:
        theirs is given back between uses, and who read a `p.data` from before died of SIGSEGV (2026-11-22); nor does
        torch give back what numpy has seen, as it has what was saved or loaded on a CPU."""
        if not self._plan.shards_parameters:
            return weights.model_weight
        self._given_up[weights.spec.name] = StorageWeakRef(weights.model_weight.tensor.untyped_storage())
        return weights.model_weight.copy()

    def tell_of_held(self) -> None:
        """Warn of memory that parameters had and somebody keeps. The old buckets are gone."""
        if any(not memory.expired() for memory in self._given_up.values()):
            gc.collect()
        if held := [name for name, memory in self._given_up.items() if not memory.expired()]:
            warnings.warn(
                f"engine.set_stage: the old memory of parameters of {', '.join(held)} is still in use by a tensor "
                "taken from them before (p.data, p.detach(), a state dict, the graph of a loss): it keeps the present "
                "values, and its memory is not freed; take such a tensor again, or delete it before",
                stacklevel=2,
            )
