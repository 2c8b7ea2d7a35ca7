"""All faults by name."""

from tests.mutants.fault import Fault
from tests.mutants.faults import (
    checkpoints,
    comm,
    datasets,
    export,
    gradient,
    habits,
    launching,
    offload,
    optimizers,
    parameters,
    reading,
    refusals,
    rows,
    runs,
    saved,
    schedule,
    shared,
    starts,
    state,
    step,
    texts,
    tokens,
    trust,
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
        launching,
        optimizers,
        parameters,
        tokens,
        checkpoints,
        datasets,
        export,
        starts,
        runs,
        saved,
        reading,
        offload,
        texts,
        refusals,
        trust,
        rows,
    )
    for name, fault in room.FAULTS.items()
}
