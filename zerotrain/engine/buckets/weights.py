"""The weights of one bucket: what the model reads, whole or as this rank's shard."""

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from zerotrain.comm.collectives import Collectives
from zerotrain.engine.buckets.life import WEIGHT_TRANSITIONS, Life, WeightState
from zerotrain.engine.buckets.unready_parameter import UnreadyParameter, unready_class
from zerotrain.engine.ranges import named_range
from zerotrain.errors import EngineStateError
from zerotrain.sharding.bucketing import BucketSpec
from zerotrain.sharding.flat_buffer import FlatBuffer
from zerotrain.sharding.layout import BucketLayout
from zerotrain.sharding.plan import Plan

ENGINE_IS_GONE = (
    "a parameter was read whose engine is gone: keep the engine as long as its model is used, or load what "
    "engine.full_state_dict() gives into a new model"
)


class BucketWeights:
    """Owns the storage behind a bucket's parameters. Until it is full they are `UnreadyParameter`s.

    Args:
        values: (padded_numel,) the initial weights in the master dtype. Where that is the compute dtype too, its
            storage becomes the model's.
    """

    when_read: Callable[[], None] | None = None
    """Called when a parameter is read that is not ready: completes the bucket, or raises EngineStateError. It must not
    keep the engine alive."""
    own: slice
    """This rank's range of the bucket."""

    model_weight: FlatBuffer
    """(padded_numel,) compute dtype; the parameters are views of it. Sharded parameters: memory only while in use."""
    shard: torch.Tensor
    """(shard_numel,) compute dtype, this rank's range. Within model_weight where that is always held."""

    def __init__(
        self,
        spec: BucketSpec,
        layout: BucketLayout,
        values: FlatBuffer,
        *,
        plan: Plan,
        collectives: Collectives,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.plan = plan
        self.life = Life(f"weights of {spec.name}", WeightState.FULL, WEIGHT_TRANSITIONS)
        self.model_weight = values
        if values.tensor.dtype != spec.dtype:
            self.model_weight = FlatBuffer(layout, dtype=spec.dtype, device=values.tensor.device)
            self.model_weight.tensor.copy_(values.tensor)
        self._classes: list[tuple[nn.Parameter, type]] = []
        for view, managed in zip(self.model_weight.views(), spec.parameters, strict=True):
            managed.parameter.data = view
            managed.parameter.grad = None
            self._classes.append((managed.parameter, type(managed.parameter)))
        self._unready: type[UnreadyParameter] = unready_class(partial(_complete, weakref.ref(self)))
        self.own = layout.shard(collectives.shards.rank)
        self.shard = self.model_weight.tensor[self.own]
        if plan.shards_parameters:
            self.shard = self.shard.clone()
        self._gather = collectives.gather(spec.name, self.model_weight.tensor, self.shard)

    @property
    def is_full(self) -> bool:
        return self.life.state is WeightState.FULL

    @property
    def held(self) -> torch.Tensor:
        """Compute dtype, what this rank always holds: its shard, or (padded_numel,) all."""
        return self.shard if self.plan.shards_parameters else self.model_weight.tensor

    @property
    def held_nbytes(self) -> int:
        """Bytes of the model weight held now."""
        return self.model_weight.held_nbytes + (self.shard.nbytes if self.plan.shards_parameters else 0)

    def prepare_gather(self) -> None:
        """Be ready for the other ranks' parts: the model no longer reads them, and a gather comes."""
        # A unit that was not called since the last step has not waited for the gather of that one.
        self.finish_gather()
        self._gather.prepare()

    def start_gather(self) -> None:
        """Issue the all-gather of the model weight unless it is there or under way."""
        if self.life.state is not WeightState.SHARD:
            return
        self.life.become(WeightState.GATHERING)
        self.model_weight.allocate()
        with named_range("gather", self.spec.name):
            self._gather.issue()

    def finish_gather(self) -> None:
        """Wait for the gather under way, if any, and give the parameters their class back."""
        if self.life.state is not WeightState.GATHERING:
            return
        with named_range("wait for gather", self.spec.name):
            self._gather.finish()
        self.life.become(WeightState.FULL)
        for parameter, kind in self._classes:
            parameter.__class__ = kind

    def reshard(self) -> None:
        """Keep this rank's shard only: the parameters are not ready, and where they are sharded, have no memory."""
        if self.life.state is not WeightState.FULL:
            return
        self.life.become(WeightState.SHARD)
        for parameter, _ in self._classes:
            parameter.__class__ = self._unready
        if self.plan.shards_parameters:
            self.model_weight.release()

    def drain(self) -> None:
        """Wait for the gather that is under way, or was prepared in an update that failed, on all ranks alike."""
        if self._gather.is_prepared:
            self.reshard()
            self.start_gather()
        self.finish_gather()

    def let_go(self) -> None:
        """Other buckets take the parameters over: give them their class back, complete or not."""
        self.finish_gather()
        for parameter, kind in self._classes:
            parameter.__class__ = kind


def _complete(reference: "weakref.ref[BucketWeights]") -> None:
    """A parameter that is not ready was read: have its bucket completed."""
    weights = reference()
    if weights is None or weights.when_read is None:
        raise EngineStateError(ENGINE_IS_GONE)
    weights.when_read()
