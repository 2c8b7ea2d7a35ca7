"""All faults by name."""

from tests.mutants.fault import Fault
from tests.mutants.faults import (
    checkpoints,
    comm,
    datasets,
    ends,
    export,
    feeds,
    gradient,
    habits,
    launching,
    offload,
    optimizers,
    reading,
    refusals,
    rows,
    runs,
    saved,
    saves,
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
        saves,
        ends,
        feeds,
    )
    for name, fault in room.FAULTS.items()
}
