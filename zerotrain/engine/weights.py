"""The weights of one bucket: the model weight the forward reads and the master weight the optimizer updates."""

from collections.abc import Callable

import torch

from zerotrain.comm.collectives import Collectives, Pending
from zerotrain.comm.exchange import Exchange
from zerotrain.engine.deferred_init import InitialValues
from zerotrain.engine.lazy_parameter import LazyParameter
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.precision import Precision
from zerotrain.engine.ranges import named_range
from zerotrain.engine.states import WEIGHT_TRANSITIONS, Life, WeightState
from zerotrain.sharding.bucketing import BucketSpec
from zerotrain.sharding.flat_buffer import FlatBuffer
from zerotrain.sharding.layout import BucketLayout


class BucketWeights:
    """Owns the storage behind a bucket's parameters.

    Until the bucket is full, its parameters are replaced in their modules by `LazyParameter`s.
    """

    model_weight: FlatBuffer
    """(padded_numel,) compute dtype; the parameters are views of it. Sharded parameters: memory only while in use."""
    weight_shard: torch.Tensor
    """(shard_numel,) compute dtype, this rank's range. Within model_weight where that is always held."""
    master_weight: torch.Tensor
    """Master dtype, over `optimizer_range`. The same storage as the model weight where the dtypes are equal."""
    optimizer_range: slice
    """The elements of the bucket that this rank's optimizer updates: its own shard, or all."""

    def __init__(
        self,
        spec: BucketSpec,
        layout: BucketLayout,
        tag: int,
        *,
        options: EngineOptions,
        collectives: Collectives,
        initial: InitialValues,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.plan = options.plan
        self.collectives = collectives
        self._tag = tag
        self._expected: Exchange | None = None
        self.life = Life(f"weights of {spec.parameters[0].names[0]}", WeightState.FULL, WEIGHT_TRANSITIONS)
        self._pending: Pending | None = None
        self._places: list[tuple[dict, str, torch.Tensor, LazyParameter]] = []
        self._take_over(options.precision.of_bucket(spec.dtype), initial)

    def _take_over(self, precision: Precision, initial: InitialValues) -> None:
        """Move the parameters' values, as rank 0 has them, into flat storage and make the parameters views of it."""
        world = self.collectives.world
        master = FlatBuffer(self.layout, dtype=precision.master, device=world.device)
        self.model_weight = master
        if world.rank == 0:
            for view, managed in zip(master.views(), self.spec.parameters, strict=True):
                with initial.of(managed.parameter) as value:
                    view.copy_(value)
        self.collectives.broadcast(master.tensor, name=self.spec.name)
        if precision.separate_master:
            self.model_weight = FlatBuffer(self.layout, dtype=precision.compute, device=world.device)
            self.model_weight.tensor.copy_(master.tensor)
        for view, managed in zip(self.model_weight.views(), self.spec.parameters, strict=True):
            managed.parameter.data = view
            managed.parameter.grad = None

        own = self.layout.shard(world.rank)
        shards_parameters = self.plan.shards_parameters
        self.weight_shard = self.model_weight.tensor[own]
        if shards_parameters:
            self.weight_shard = self.weight_shard.clone()
        self.optimizer_range = own if self.plan.shards_optimizer else slice(0, self.layout.padded_numel)
        if not self.spec.trainable:
            self.master_weight = self.weight_shard if shards_parameters else self.model_weight.tensor
        elif precision.separate_master:
            self.master_weight = master.tensor[self.optimizer_range].clone()
        else:
            self.master_weight = self.weight_shard if shards_parameters else master.tensor[self.optimizer_range]
        if shards_parameters:
            # At once, not when all buckets are there: a large model must never be whole.
            self.life.become(WeightState.SHARD)
            self.model_weight.release()
            initial.freed(self.model_weight.tensor.nbytes)

    def connect(self, complete: Callable[[], None]) -> None:
        """Give the stand-ins their way to complete the bucket, and let them take their places where it is not full."""
        for managed in self.spec.parameters:
            lazy = LazyParameter.around(managed.parameter, complete)
            self._places += [(owner._parameters, name, managed.parameter, lazy) for owner, name in managed.owners]
        if not self.is_full:
            self._hide()

    @property
    def is_full(self) -> bool:
        return self.life.state is WeightState.FULL

    @property
    def held_nbytes(self) -> int:
        """Bytes of the model weight held now."""
        return self.model_weight.held_nbytes + (self.weight_shard.nbytes if self.plan.shards_parameters else 0)

    @property
    def separate_master_nbytes(self) -> int:
        """Bytes of the master weight, 0 where it shares the model weight's storage."""
        shared = self.master_weight.dtype == self.weight_shard.dtype
        return 0 if shared else self.master_weight.nbytes

    def expect_gather(self) -> None:
        """Be ready for the other ranks' parts: the model no longer reads them, and a gather comes."""
        # A unit that was not called since the last step has not waited for the gather of that one.
        self.finish_gather()
        if self._expected is None:  # else the last update failed, and its receives are still posted
            self._expected = self.collectives.expect_gather(self.model_weight.tensor, self._tag, name=self.spec.name)

    def finish_expected(self) -> None:
        """Wait for the gather under way or expected: only what is sent to it ends a receive that is posted."""
        if self._expected is not None:
            self.reshard()
            self.start_gather()
        self.finish_gather()

    def start_gather(self) -> None:
        """Issue the all-gather of the model weight unless it is there or under way."""
        if self.life.state is not WeightState.SHARD:
            return
        self.life.become(WeightState.GATHERING)
        self.model_weight.allocate()
        with named_range("gather", self.spec.name):
            self._pending = self.collectives.gather(
                self.model_weight.tensor, self.weight_shard, self._tag, name=self.spec.name, expected=self._expected
            )
        self._expected = None

    def finish_gather(self) -> None:
        """Wait for the gather under way, if any, and show the parameters to the model."""
        if self._pending is None:
            return
        with named_range("wait for gather", self.spec.name):
            self._pending.wait()
        self._pending = None
        self.life.become(WeightState.FULL)
        for parameters, name, parameter, _ in self._places:
            parameters[name] = parameter

    def reshard(self) -> None:
        """Keep this rank's shard only: hide the parameters, and give sharded parameters' memory back."""
        if self.life.state is not WeightState.FULL:
            return
        self.life.become(WeightState.SHARD)
        self._hide()
        if self.plan.shards_parameters:
            self.model_weight.release()

    def _hide(self) -> None:
        for parameters, name, _, lazy in self._places:
            parameters[name] = lazy

    def uncover(self) -> None:
        """Put the parameters back into their modules, complete or not, and let go of the stand-ins."""
        self.finish_gather()
        for parameters, name, parameter, _ in self._places:
            parameters[name] = parameter
        self._places.clear()  # they know the schedule, and would keep it and all its memory alive

    def refresh(self) -> None:
        """The master weight changed: bring this rank's model weight up to date."""
        if self.separate_master_nbytes:
            target = self.weight_shard if self.plan.shards_optimizer else self.model_weight.tensor
            target.copy_(self.master_weight)
        if self.plan.shards_optimizer:
            self.reshard()

    def full_master(self) -> torch.Tensor:
        """(padded_numel,) the master weight of all ranks, gathered where it is sharded. Collective."""
        return self.gathered(self.master_weight)

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """(padded_numel,) from a tensor over each rank's `optimizer_range`. Collective."""
        if part.numel() == self.layout.padded_numel:
            return part
        full = part.new_empty(self.layout.padded_numel)
        self.collectives.gather(full, part, self._tag, name=f"master weights of {self.spec.name}").wait()
        return full
