"""From a model and options to live buckets, units and a schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from zerotrain.comm.collectives import Collectives
from zerotrain.device.memory import give_back_freed
from zerotrain.engine.agreement import require_same
from zerotrain.engine.buckets.bucket import Bucket, TrainedBucket
from zerotrain.engine.buckets.compiled_update import require_compilable
from zerotrain.engine.buckets.gradient import BucketGradient
from zerotrain.engine.buckets.home import EngineParts
from zerotrain.engine.buckets.update import BucketUpdate, update_range
from zerotrain.engine.buckets.weights import BucketWeights
from zerotrain.engine.groups.hyperparameters import shown_groups
from zerotrain.engine.model.checks import model_error
from zerotrain.engine.model.deferred import InitialValues
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.schedule.live_unit import LiveUnit
from zerotrain.engine.schedule.schedule import Schedule
from zerotrain.engine.state.fill import GivenUpMemory, Source, fill, fill_state
from zerotrain.engine.state.from_buckets import OtherBuckets, described_state
from zerotrain.engine.state.together import wait_for_others
from zerotrain.errors import ConfigError
from zerotrain.sharding.bucketing import BucketSpec, cut_buckets
from zerotrain.sharding.layout import BucketLayout, FlatBuffer, assign_owners
from zerotrain.sharding.units import WalkedModel

PlacedUnit = tuple[str, list[torch.nn.Module], list[int]]
"""A unit's name, its modules and the places of its buckets."""


class Builder:
    """Makes the buckets of one model, at first and each time what trains has changed.

    Args:
        dtypes: what each parameter is held in.
    """

    def __init__(
        self, model: torch.nn.Module, dtypes: Mapping[torch.nn.Parameter, torch.dtype], parts: EngineParts
    ) -> None:
        self._model, self._dtypes, self._parts = model, dtypes, parts

    def schedule(self, initial: InitialValues, source: Source | None = None) -> Schedule:
        """Cut the model into buckets, move its parameters into them and order them.

        Args:
            initial: the values of parameters that have no memory yet.
            source: has the state of the buckets; None: the parameters have values, and the optimizer is new.

        Raises:
            ConfigError: ranks with different models, or no trainable parameter.
        """
        if self._parts.options.zero.compiled_update:
            require_compilable(self._parts.groups, on_host=self._parts.homes.update_on_host)
        if self._parts.options.precision.state != torch.float32:
            self._parts.groups.require_narrowed()
        units = self._parts.groups.classified(self._dtypes)
        specs = cut_buckets(units, self._parts.options.bucket_numel_for(units))
        if not any(spec.trainable for spec in specs):
            kind = type(self._model).__name__
            raise ConfigError(f"model {kind} has no trainable floating-point parameter; nothing to train")
        num_ranks, shard_size = self._parts.collectives.shards.size, self._parts.collectives.inside.size
        layouts = [spec.layout(num_ranks, shard_size) for spec in specs]
        num_parameters, numel = sum(len(spec.tensors) for spec in specs), sum(layout.numel for layout in layouts)
        described = [f"{len(specs)} buckets, {num_parameters} parameters, {numel} elements"]
        for spec in specs:
            described += [f"bucket {spec.name}", *spec.described()]
        facts = {
            "the model (buckets and their parameters)": described,
            "the optimizer (its parameter groups)": [
                f"{name} {value}" for name, value in shown_groups(self._parts.groups.hyperparameters).items()
            ],
        }
        require_same(self._parts.collectives, facts)
        whole = [
            [slot.shape for slot in layout.slots[: spec.num_whole]] for spec, layout in zip(specs, layouts, strict=True)
        ]
        owners = assign_owners(whole, self._parts.collectives.shards.size)
        trained = {s.name: layout.padded_numel for s, layout in zip(specs, layouts, strict=True) if s.trainable}
        self._parts.homes.keep(trained, has_whole=any(whole))
        buckets = []
        for spec, layout, owning in zip(specs, layouts, owners, strict=True):
            if source is None:
                buckets.append(self._bucket(spec, layout, owning, initial))
            else:
                buckets.append(self._filled(spec, layout, owning, source))
        places = []
        for unit in units:
            places.append((unit.name, unit.modules, [place for place, spec in enumerate(specs) if unit in spec.units]))
        return self._ordered(places, buckets)

    def under(self, options: EngineOptions, units: Sequence[PlacedUnit], buckets: list[Bucket]) -> Schedule:
        """Move the buckets of a schedule, one after the other, to where other options have them. The schedule must be
        gone, or its buckets stay in memory. All ranks take part.

        Args:
            units: of the schedule.
            buckets: of the schedule; each is replaced here by the one that it becomes.

        Returns:
            Their new schedule.
        """
        self._parts = replace(self._parts, options=options)
        source = OtherBuckets(buckets, described_state(buckets), options.plan, self._parts.collectives)
        given_up = GivenUpMemory(options.plan)
        for place in range(len(buckets)):
            buckets[place] = self.moved(buckets[place], source, given_up)
            give_back_freed()
        given_up.tell_of_held()
        return self._ordered(units, buckets)

    def _ordered(self, units: Sequence[PlacedUnit], buckets: Sequence[Bucket]) -> Schedule:
        """A schedule of units and buckets."""
        live_units = [LiveUnit(name, modules, [buckets[place] for place in places]) for name, modules, places in units]
        return Schedule(live_units, buckets, self._parts.options)

    def _bucket(self, spec: BucketSpec, layout: BucketLayout, owners: Sequence[int], initial: InitialValues) -> Bucket:
        """A bucket with rank 0's initial values. Collective."""
        dtype = self._parts.options.precision.of_bucket(spec.dtype).master
        values = FlatBuffer.zeros(layout, dtype, self._parts.collectives.world.device)
        if self._parts.collectives.shards.rank == 0:
            for target, parameter in zip(values.views(), spec.tensors, strict=True):
                with initial.values_of(parameter) as value:
                    target.copy_(value)
        wait_for_others(self._parts.collectives, spec.name)
        self._parts.collectives.broadcast(values.tensor, name=spec.name)
        master = None
        if self._has_master(spec):
            master = values.tensor[
                update_range(layout, self._parts.options.plan, self._parts.collectives.shards.rank)
            ].clone()
        bucket = self._around(spec, layout, owners, values, master)
        initial.freed(bucket.weights.model_weight.tensor.nbytes)  # by the parameters, or by the bucket's whole values
        return bucket

    def _filled(self, spec: BucketSpec, layout: BucketLayout, owners: Sequence[int], source: Source) -> Bucket:
        """A bucket with the state of a source. Collective."""
        plan, collectives = self._parts.options.plan, self._parts.collectives
        master = None
        if self._has_master(spec):
            where = update_range(layout, plan, collectives.shards.rank)
            dtype = self._parts.options.precision.of_bucket(spec.dtype).master
            master = torch.zeros(where.stop - where.start, dtype=dtype, device=collectives.world.device)
        values = FlatBuffer.zeros(layout, spec.dtype, collectives.world.device)
        bucket = self._around(spec, layout, owners, values, master)
        fill(source, [bucket], collectives)
        return bucket

    def _has_master(self, spec: BucketSpec) -> bool:
        """Whether a bucket keeps a master weight apart from the model's."""
        separate = self._parts.options.precision.of_bucket(spec.dtype).separate_master
        return spec.trainable and (separate or self._parts.homes.update_on_host)

    def moved(self, old: Bucket, source: OtherBuckets, given_up: GivenUpMemory) -> Bucket:
        """A bucket as it lies under the options of now; the old one is used no more. Collective."""
        weights, owners = old.weights, old.update.owners if isinstance(old, TrainedBucket) else ()
        master = source.master_of(old)
        weights.take_writes()
        weights.start_gather()
        weights.let_go()
        new = self._around(old.spec, old.layout, owners, given_up.memory_for(weights), master)
        fill_state(source, new)
        source.let_go(old)
        old.leave()
        return new

    def _around(
        self,
        spec: BucketSpec,
        layout: BucketLayout,
        owners: Sequence[int],
        values: FlatBuffer,
        master: torch.Tensor | None,
    ) -> Bucket:
        """A bucket around its weights, the same on all ranks.

        Args:
            values: of the master dtype, or what the model reads.
            master: see `BucketUpdate`.
        """
        weights = BucketWeights(spec, layout, values, self._parts)
        bucket = Bucket(weights)
        if spec.trainable:
            gradient = BucketGradient(spec, layout, self._parts)
            update = BucketUpdate(weights, gradient, master, owners, self._parts)
            bucket = TrainedBucket(weights, gradient=gradient, update=update)
        if self._parts.options.plan.shards_parameters:
            # Now, not when all buckets are there: a large model must never be whole.
            weights.reshard()
        return bucket


def share_unmanaged(walked: WalkedModel, collectives: Collectives) -> None:
    """Bring what lies in no bucket to this rank's device with rank 0's values: buffers, and parameters that are no
    floating-point numbers.

    Raises:
        ConfigError: one of these parameters is to be trained, or the ranks have different ones.
    """
    tensors = walked.unmanaged
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
            raise model_error(
                f"{name} is {tensor.dtype} and requires a gradient, which no bucket holds: make it two real "
                "parameters (torch.view_as_real), or freeze it with requires_grad_(False)"
            )
    shapes = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()]
    require_same(collectives, {"the model (buffers, and parameters that are no floating-point numbers)": shapes})
    for tensor in tensors.values():
        tensor.data = tensor.data.to(collectives.world.device).contiguous()
    wait_for_others(collectives, "buffers")
    for tensor in tensors.values():
        if tensor.numel() > 0:
            # As bytes: backends do not send every dtype.
            collectives.broadcast(tensor.data.view(-1).view(torch.uint8), name="buffers")
