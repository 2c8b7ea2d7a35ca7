"""What an engine holds and sends on this rank, beside what ZeRO's formulas give."""

from typing import Any

import torch

from zerotrain.comm.scratch import ScratchPools
from zerotrain.engine.buckets.update import tensors_of_state
from zerotrain.engine.groups.optimizer_factory import SAMPLE_SHAPE, OptimizerFactory, build_optimizer
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


def memory_bytes(schedule: Schedule, factory: OptimizerFactory, pools: ScratchPools, num_shards: int) -> dict[str, Any]:
    """See `ZeroEngine.memory_bytes`."""
    trained = schedule.trained
    state = sum(tensor.nbytes for bucket in trained for tensor in bucket.update.state_tensors())
    return {
        "parameters": sum(bucket.weights.held_nbytes for bucket in schedule.buckets),
        "gradients": sum(bucket.gradient.held_nbytes for bucket in trained),
        "optimizer": state + sum(bucket.update.separate_master_nbytes for bucket in trained),
        "scratch": pools.held_nbytes + sum(bucket.gradient.accumulator_nbytes for bucket in trained),
        "theory": volume_of(schedule, num_shards).memory_nbytes(schedule.plan, _optimizer_nbytes(schedule, factory)),
    }


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
        state += num_whole * _sampled_nbytes(factory) // (SAMPLE_SHAPE[0] * SAMPLE_SHAPE[1])
    copies = [bucket for bucket in trained if bucket.update.separate_master_nbytes]
    return state + sum(bucket.layout.numel * bucket.update.master_weight.itemsize for bucket in copies)


def planned_nbytes(schedule: Schedule, factory: OptimizerFactory, num_shards: int) -> dict[str, int]:
    """See `ZeroEngine.planned_nbytes`."""
    trained = schedule.trained
    num_whole = sum(slot.numel for bucket in trained for slot in bucket.layout.slots[: bucket.spec.num_whole])
    num_by_elements = sum(bucket.layout.numel for bucket in trained) - num_whole
    copies = sum(bucket.layout.numel * 4 for bucket in trained if bucket.update.separate_master_nbytes)
    state = 0
    for name, numel in (("whole matrices", num_whole), ("matrices", num_by_elements)):
        if numel:
            state += numel * _sampled_nbytes(factory, name) // (SAMPLE_SHAPE[0] * SAMPLE_SHAPE[1])
    return volume_of(schedule, num_shards).memory_nbytes(schedule.plan, state + copies)


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


def _sampled_nbytes(factory: OptimizerFactory, name: str = "whole matrices") -> int:
    """What the optimizer keeps of one tensor of `SAMPLE_SHAPE`, by default one that it updates whole."""
    sample = torch.zeros(SAMPLE_SHAPE)
    optimizer = build_optimizer(factory, [{"params": [sample], "name": name}])
    sample.grad = torch.ones_like(sample)
    optimizer.step()
    return sum(tensor.nbytes for tensor in tensors_of_state(optimizer))
