"""The one writer of state: all values come into the buckets of an engine from a `Source`, through `fill`.

It goes bucket by bucket and role by role, so a rank needs room for one more bucket, or for some MiB where ranges are
read, as out of files.
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

# The noun for state on its way into an engine: names, shapes and dtypes in a source, and how `fill` gets elements.


class KeptTensor(NamedTuple):
    """A tensor of the optimizer's state, without its numbers."""

    shape: tuple[int, ...] | None
    """A shape of its own, if the parameter is updated whole; None: a number for each element."""
    dtype: torch.dtype


class KeptOnce(NamedTuple):
    """A value of the optimizer for all elements, such as the number of its steps."""

    value: Any
    on_device: bool


Keeps = Mapping[str, KeptTensor | KeptOnce]
"""The optimizer's state of a parameter, by name."""


class Source(ABC):
    """State by name and element. `fill` alone writes it into buckets; a source only reads."""

    doing = ""
    """The call in words, such as "loading PATH", for errors of one rank alone."""
    is_collective = False
    """Whether the ranks read together, so that none can fail alone."""
    has_state = False
    """Whether it has the optimizer's state. If not, weights alone are replaced."""

    has_average = False
    """Whether it has an average of the weights too. A source with state and no average leaves none."""

    def begin(self, bucket: Bucket, role: str) -> None:
        """Get ready to read of one bucket in one role. A collective source sends here, and nowhere else."""
        return

    @abstractmethod
    def read(self, piece: NamedPiece) -> None:
        """Read the elements of a piece into its memory; leave those as they are that the source does not have."""

    def keeps(self, managed: ManagedParameter) -> Keeps:
        """The optimizer's state of a parameter; the same on all ranks."""
        return {}

    def hand_over(self, bucket: Bucket, role: str, where: slice | int) -> torch.Tensor | None:
        """Memory of the source to keep instead of a copy; None: there is none, and `read` is called.

        Args:
            where: elements of the bucket, or the slot of a parameter with state of its own shape.
        """
        return None

    def fill_rest(self) -> None:
        """Fill all beside the buckets: buffers, and the extra state of modules."""
        return


HALF = "the engine holds a part of it: load one that can be read before you continue training"


def fill(source: Source, buckets: Sequence[Bucket], collectives: Collectives) -> None:
    """Replace the weights of buckets by those of a source, and the optimizer's state if the source has any.
    Collective, between steps. Names and shapes are checked where the source is made.

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
    """Replace the optimizer's state of one bucket, and the average of its weights: a change of the stage leaves the
    weights themselves where they are."""
    if not isinstance(bucket, TrainedBucket) or not source.has_state:
        return
    states = []
    for state in kept_states(bucket):
        # Nothing is saved of a parameter without elements, so one with elements tells for all.
        member = next((managed for managed in state.members if managed.parameter.numel() > 0), state.members[0])
        states.append((state, source.keeps(member)))
    for state, keeps in states:
        state.values.clear()
        if not keeps:
            state.values.update(bucket.update.state_at_first(state.members[0].group, state.target))
        for name, value in keeps.items():
            if isinstance(value, KeptOnce):
                # A copy for each span: if two shared one, every step would count twice.
                device = bucket.update.device
                state.values[name] = value.value.to(device, copy=True) if value.on_device else deepcopy(value.value)
    everything = [item for managed in bucket.spec.parameters for item in source.keeps(managed).items()]
    for role in sorted({name for name, value in everything if isinstance(value, KeptTensor)}):
        source.begin(bucket, role)
        for state, keeps in states:
            if isinstance(tensor := keeps.get(role), KeptTensor):
                values = _values(source, bucket, role, state, tensor)
                if values.shape == state.target.shape:
                    is_whole = isinstance(state.where, int)
                    values = values.to(bucket.update.groups.held_dtype(values.dtype, is_whole=is_whole))
                state.values[role] = values
        bucket.update.home.put_away()
    bucket.update.average = None
    if source.has_average:
        source.begin(bucket, AVERAGE)
        state = KeptState([], bucket.update.where, bucket.update.master_weight, {})
        average = _values(source, bucket, AVERAGE, state, KeptTensor(None, state.target.dtype))
        bucket.update.average = average
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


# Memory of parameters from before a change of the stage, and who keeps it.


class GivenUpMemory:
    """The memory of whole weights before the plan of their buckets changes.

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
        """Warn of such memory that somebody keeps. The old buckets are gone."""
        if any(not memory.expired() for memory in self._given_up.values()):
            gc.collect()
        if held := [name for name, memory in self._given_up.items() if not memory.expired()]:
            warnings.warn(
                f"engine.set_stage: the old memory of parameters of {', '.join(held)} is still in use by a tensor "
                "taken from them before (p.data, p.detach(), a state dict, the graph of a loss): it keeps the present "
                "values, and its memory is not freed; take such a tensor again, or delete it before",
                stacklevel=2,
            )
