"""A model cut into buckets, with the optimizer over them: when an engine is built, and when what trains has changed."""

from typing import NamedTuple

from torch import nn

from zerotrain.comm.collectives import Collectives
from zerotrain.engine.build import EngineOptions, build_schedule
from zerotrain.engine.deferred_init import InitialValues
from zerotrain.engine.optimizer import ShardedOptimizer
from zerotrain.engine.param_groups import ParamGroups
from zerotrain.engine.precision import Precision
from zerotrain.engine.schedule import Schedule
from zerotrain.engine.scratch import ScratchPool, ScratchPools
from zerotrain.engine.transfer import Transfer
from zerotrain.engine.update import Updater
from zerotrain.sharding.plan import Plan


class CutModel(NamedTuple):
    """What a model is cut into."""

    schedule: Schedule
    optimizer: ShardedOptimizer
    updater: Updater
    pools: tuple[ScratchPools, ScratchPool]
    """Of buffers on the wire, and of the master dtype."""


def cut_model(
    model: nn.Module,
    *,
    plan: Plan,
    options: EngineOptions,
    precision: Precision,
    groups: ParamGroups,
    collectives: Collectives,
    exact_norm: bool,
    initial: InitialValues,
    transfer: Transfer | None,
) -> CutModel:
    """Make buckets of a model.

    Args:
        initial: of a model that `deferred_init` has built.
        transfer: brings weights and optimizer state from earlier buckets.
    """
    device = collectives.world.device
    wire_pools, master_pool = ScratchPools(device), ScratchPool(dtype=precision.master, device=device)
    schedule = build_schedule(
        model,
        plan=plan,
        options=options,
        precision=precision,
        groups=groups,
        collectives=collectives,
        pools=wire_pools,
        exact_norm=exact_norm,
        initial=initial,
        fill=None if transfer is None else transfer.fill,
    )
    weights = [each for each, _ in schedule.trained]
    optimizer = ShardedOptimizer(groups, weights, collectives=collectives, pool=master_pool)
    if transfer is not None:
        transfer.restore_state(optimizer, schedule)
    return CutModel(schedule, optimizer, Updater(schedule, optimizer, pool=master_pool), (wire_pools, master_pool))
