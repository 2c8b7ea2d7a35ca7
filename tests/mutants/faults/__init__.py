"""All faults by name."""

from tests.mutants.fault import Fault
from tests.mutants.faults import (
    checkpoints,
    comm,
    datasets,
    export,
    gradient,
    habits,
    offload,
    optimizers,
    saved,
    schedule,
    shared,
    starts,
    state,
    step,
    tokens,
    weights,
)

FAULTS: dict[str, Fault] = {
    name: fault
    for room in (
        comm,
        shared,
        gradient,
        weights,
        schedule,
        state,
        step,
        habits,
        optimizers,
        tokens,
        checkpoints,
        datasets,
        export,
        starts,
        saved,
        offload,
    )
    for name, fault in room.FAULTS.items()
}
