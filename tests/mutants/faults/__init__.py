"""All faults by name."""

from tests.mutants.fault import Fault
from tests.mutants.faults import (
    checkpoints,
    comm,
    datasets,
    export,
    gradient,
    habits,
    optimizers,
    schedule,
    state,
    step,
    tokens,
    weights,
)

FAULTS: dict[str, Fault] = {
    name: fault
    for room in (
        comm,
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
    )
    for name, fault in room.FAULTS.items()
}
