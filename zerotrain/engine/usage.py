"""What an engine holds and sends on this rank, beside what ZeRO's formulas give."""

from typing import Any

from zerotrain.engine.optimizer import ShardedOptimizer
from zerotrain.engine.schedule import Schedule
from zerotrain.engine.scratch import ScratchPools
from zerotrain.sharding.plan import Volume


def volume_of(schedule: Schedule, world_size: int) -> Volume:
    """The bytes of all parameters, each in the dtype it is held in."""
    nbytes = {True: 0, False: 0}
    for bucket in schedule.buckets:
        spec = bucket.weights.spec
        nbytes[spec.trainable] += bucket.weights.layout.numel * spec.dtype.itemsize
    return Volume(trainable_nbytes=nbytes[True], frozen_nbytes=nbytes[False], world_size=world_size)


def memory_bytes(
    schedule: Schedule, optimizer: ShardedOptimizer, pools: ScratchPools, world_size: int
) -> dict[str, Any]:
    """See `ZeroEngine.memory_bytes`."""
    trained = schedule.trained
    return {
        "parameters": sum(bucket.weights.held_nbytes for bucket in schedule.buckets),
        "gradients": sum(gradient.held_nbytes for _, gradient in trained),
        "optimizer": sum(tensor.nbytes for tensor in optimizer.state_tensors())
        + sum(weights.separate_master_nbytes for weights, _ in trained),
        "scratch": pools.held_nbytes + sum(gradient.accumulator_nbytes for _, gradient in trained),
        "theory": volume_of(schedule, world_size).memory_nbytes(schedule.plan, _optimizer_nbytes(schedule, optimizer)),
    }


def _optimizer_nbytes(schedule: Schedule, optimizer: ShardedOptimizer) -> int:
    """Of all ranks together, without padding: optimizer state, and master weights where they are copies."""
    trained = [weights for weights, _ in schedule.trained]
    whole = sum(slot.numel for weights in trained for slot in weights.layout.slots[: weights.spec.num_whole])
    state = optimizer.state_nbytes(sum(weights.layout.numel for weights in trained), whole)
    copies = [weights for weights in trained if weights.separate_master_nbytes]
    return state + sum(weights.layout.numel * weights.master_weight.itemsize for weights in copies)
