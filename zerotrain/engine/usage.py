"""What an engine holds and sends on this rank, beside what ZeRO's formulas give."""

from dataclasses import dataclass
from typing import Any

from zerotrain.comm.scratch import ScratchPools
from zerotrain.engine.buckets.places.homes import Homes
from zerotrain.engine.groups.optimizer_factory import SAMPLE_SHAPE, OptimizerFactory, sampled_nbytes
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.schedule.schedule import Schedule
from zerotrain.sharding.plan import Plan, Volume


def volume_of(schedule: Schedule, num_shards: int) -> Volume:
    """The bytes of all parameters, each in the dtype it is held in, and of gradients in that they are reduced in."""
    nbytes = {True: 0, False: 0}
    for bucket in schedule.buckets:
        nbytes[bucket.spec.trainable] += bucket.layout.numel * bucket.spec.dtype.itemsize
    return Volume(
        trainable_nbytes=nbytes[True],
        frozen_nbytes=nbytes[False],
        num_shards=num_shards,
        reduced_nbytes=sum(bucket.layout.numel * bucket.gradient.wire_itemsize for bucket in schedule.trained),
    )


def memory_bytes(
    schedule: Schedule, factory: OptimizerFactory, pools: ScratchPools, homes: Homes, num_shards: int
) -> dict[str, Any]:
    """See `ZeroEngine.memory_bytes`."""
    trained = schedule.trained
    theory = volume_of(schedule, num_shards).memory_nbytes(schedule.plan, _optimizer_nbytes(schedule, factory))
    return {
        "parameters": sum(bucket.weights.held_nbytes for bucket in schedule.buckets),
        "gradients": sum(bucket.gradient.held_nbytes for bucket in trained),
        "optimizer": sum(bucket.update.held_nbytes for bucket in trained),
        "offloaded": homes.placed_nbytes,
        "scratch": pools.held_nbytes
        + homes.windows_nbytes
        + sum(bucket.gradient.accumulator_nbytes for bucket in trained),
        "theory": _split(theory, schedule),
    }


def _split(theory: dict[str, int], schedule: Schedule) -> dict[str, int]:
    """Bytes by kind, with those that lie off the device as a kind of their own."""
    trained = schedule.trained
    numel = sum(bucket.layout.numel for bucket in trained)
    moved = sum(bucket.layout.numel for bucket in trained if bucket.update.home.nbytes)
    offloaded = {
        "parameters": theory["parameters"] if any(each.weights.home.nbytes for each in schedule.buckets) else 0,
        "optimizer": theory["optimizer"] * moved // max(numel, 1),
    }
    on_device = {kind: nbytes - offloaded.get(kind, 0) for kind, nbytes in theory.items()}
    return on_device | {"offloaded": sum(offloaded.values())}


@dataclass(frozen=True)
class Offloaded:
    """What a rank has on one tier, and what it costs a step."""

    where: str
    """In words."""
    nbytes: int
    fetched_nbytes: int
    """In a step."""
    stored_nbytes: int
    fetched_per_s: float
    """Bytes a second of this rank, measured when the engine was built, on all ranks at once."""
    stored_per_s: float
    has_activations: bool
    """Whether what forwards save goes there too, which the bytes do not count."""

    @property
    def step_s(self) -> float:
        """What a step takes for it, beside which it computes."""
        return self.fetched_nbytes / self.fetched_per_s + self.stored_nbytes / self.stored_per_s


def offloaded(schedule: Schedule, options: EngineOptions, homes: Homes, num_micro_batches: int) -> list[Offloaded]:
    """See `ZeroEngine.offloaded`."""
    found = []
    for tier, rates in homes.rates.items():
        fetched, stored = _moved_nbytes(schedule, options, num_micro_batches, tier.name)
        activations = homes.has_activations(tier)
        found.append(
            Offloaded(tier.where, tier.placed_nbytes, fetched, stored, rates.fetched, rates.stored, activations)
        )
    return found


def _moved_nbytes(schedule: Schedule, options: EngineOptions, num_micro_batches: int, tier: str) -> tuple[int, int]:
    """(fetched, stored) in a step, of what lies on a tier: the optimizer's, for the update and back; shards, for each
    gather and behind the update."""
    offload, trained = options.offload, schedule.trained
    state = sum(bucket.update.home.nbytes for bucket in trained) if offload.optimizer == tier else 0
    if offload.parameters != tier:
        return state, state
    num_gathers = 2 * num_micro_batches if options.zero.reshard_after_forward else 1
    gathered = sum(bucket.weights.home.nbytes for bucket in schedule.buckets)
    masters = sum(bucket.weights.home.nbytes for bucket in trained if not bucket.update.has_copy)
    updated = sum(bucket.weights.home.nbytes for bucket in trained)
    return state + num_gathers * gathered + masters, state + updated


def _optimizer_nbytes(schedule: Schedule, factory: OptimizerFactory) -> int:
    """Of all ranks together, without padding: optimizer state, and master weights where they are copies."""
    trained = schedule.trained
    numel = sum(bucket.layout.numel for bucket in trained)
    num_whole = sum(slot.numel for bucket in trained for slot in bucket.layout.slots[: bucket.spec.num_whole])
    # By elements, as measured on what this rank updates; of whole tensors, of which it may own none, on a sample.
    updated = sum(span.target.numel() for bucket in trained for span in bucket.update.spans)
    held = sum(bucket.update.element_state_nbytes() for bucket in trained)
    state = (numel - num_whole) * (held // updated if updated else 0)
    if num_whole:
        state += num_whole * sampled_nbytes(factory, is_whole=True) // (SAMPLE_SHAPE[0] * SAMPLE_SHAPE[1])
    copies = [bucket for bucket in trained if bucket.update.separate_master_nbytes]
    return state + sum(bucket.layout.numel * bucket.update.master_weight.itemsize for bucket in copies)


def planned_nbytes(schedule: Schedule, factory: OptimizerFactory, num_shards: int) -> dict[str, int]:
    """See `ZeroEngine.planned_nbytes`."""
    trained = schedule.trained
    num_whole = sum(slot.numel for bucket in trained for slot in bucket.layout.slots[: bucket.spec.num_whole])
    num_by_elements = sum(bucket.layout.numel for bucket in trained) - num_whole
    copies = sum(bucket.layout.numel * 4 for bucket in trained if bucket.update.separate_master_nbytes)
    state = 0
    for is_whole, numel in ((True, num_whole), (False, num_by_elements)):
        if numel:
            state += numel * sampled_nbytes(factory, is_whole=is_whole) // (SAMPLE_SHAPE[0] * SAMPLE_SHAPE[1])
    return _split(volume_of(schedule, num_shards).memory_nbytes(schedule.plan, state + copies), schedule)


def switch_nbytes(schedule: Schedule, factory: OptimizerFactory, num_shards: int, plan: Plan) -> int:
    """Bytes a rank sends so that everything lies as a plan has it: its share of what was sharded, and is held whole."""
    volume, old = volume_of(schedule, num_shards), schedule.plan
    gathered = 0
    if old.shards_parameters and not plan.shards_parameters:
        gathered += volume.trainable_nbytes + volume.frozen_nbytes
    if old.shards_optimizer and not plan.shards_optimizer:
        gathered += _optimizer_nbytes(schedule, factory)
    return gathered * (num_shards - 1) // num_shards


def sums_nbytes(schedule: Schedule, options: EngineOptions, num_micro_batches: int) -> int:
    """See `ZeroEngine.sums_nbytes`."""
    leaves = of_micro_batches = shards = 0
    for bucket in schedule.trained:
        numel, precision = bucket.layout.padded_numel, bucket.gradient.precision
        leaves += numel * precision.master.itemsize * (options.leaves_per_rank.bit_length() - 1)
        if precision.separate_master or options.plan.shards_gradients:
            of_micro_batches += numel * precision.master.itemsize
        if precision.separate_master:
            shards += bucket.layout.shard_numel * precision.master.itemsize
    if num_micro_batches == 1:
        return leaves
    return leaves + (shards if options.reduces_each else of_micro_batches)
