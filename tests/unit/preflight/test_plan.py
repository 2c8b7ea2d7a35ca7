"""What is printed of a plan."""

import io
from dataclasses import asdict, fields, replace

import pytest
from rich.console import Console

from zerotrain.config.schema import Config, ModelSwitches
from zerotrain.preflight.plan import Memory, RunPlan, print_plan
from zerotrain.preflight.rehearsal import StagePlan
from zerotrain.settings import PrecisionGroup

MB = 1_000_000


def stage_plan(parameters: int, gradients: int, optimizer: int, peak: int | None) -> StagePlan:
    """A plan in MB; None: the peak is unknown."""
    nothing = dict.fromkeys((each.name for each in fields(StagePlan)), 0)
    known = {"parameters": parameters * MB, "gradients": gradients * MB, "optimizer": optimizer * MB}
    if peak is None:
        others = {"activations": None, "peak": None, "sent": None, "unknown_because": "aten.nonzero"}
    else:
        activations = (peak - parameters - gradients - optimizer) * MB
        others = {"activations": activations, "peak": peak * MB, "sent": MB, "unknown_because": None}
    phase = None if peak is None else "backward"
    return StagePlan(**nothing | known | others | {"peak_phase": phase, "largest_unit": MB, "recomputes": False})


def printed(memory_mb: int, *stages: StagePlan, encoding: str = "utf-8", precision: str = "fp32") -> list[str]:
    """The lines of a plan whose stage 0 is asked for, of a process that takes 100 MB itself."""
    memory = Memory(device=memory_mb * MB, host=0, on_host=True, process=90 * MB, cache=10 * MB)
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_plan(
        Console(file=file, width=80),
        RunPlan(stage=0, num_ranks=2, memory=memory, stages=dict(enumerate(stages))),
        Config(model=asdict(ModelSwitches()), precision=PrecisionGroup(name=precision)),
    )
    file.seek(0)
    return file.read().splitlines()


@pytest.mark.parametrize(("encoding", "marks"), [("utf-8", "█▓▒░"), ("ascii", "#=-.")])
def test_bars_show_the_parts_of_each_stage_and_where_the_memory_ends(encoding: str, marks: str):
    whole, part = stage_plan(10, 10, 20, 60), stage_plan(10, 5, 10, 30)

    lines = printed(145, whole, part, encoding=encoding)

    a, b, c, d = marks
    bars = [line for line in lines if line.startswith("stage ") and d in line]
    assert bars == [
        f"stage 0  {a * 10}{b * 10}{c * 20}{d * 5}|{d * 15}",
        f"stage 1  {a * 10}{b * 5}{c * 10}{d * 5}{' ' * 15}|",
    ]
    assert (
        "stage 0 does not fit: a rank holds 160 MB in its backward with 100 MB of the process itself, of 145 MB"
        in lines
    )
    assert any(line.startswith("next: zero.stage=1 fits") for line in lines)


def test_what_is_unknown_is_told_and_the_rest_is_shown():
    lines = printed(1000, stage_plan(10, 10, 20, None))

    assert "warning: activations are unknown: aten.nonzero cannot be followed without values" in lines
    assert any(line.startswith("stage 0 fits: a rank holds at least 140 MB") for line in lines)
    [row] = [line for line in lines if line.split()[:2] == ["0", "10"]]
    assert row.split() == ["0", "10", "0", "10", "20", "0", "?", "?", "?", "yes"]


def test_what_takes_less_memory_is_told_unless_the_run_has_it():
    whole = stage_plan(10, 10, 20, 60)
    least = replace(whole, recomputes=True)
    head = "next: no stage fits; less memory take: a smaller train.micro_batch_size"

    [told] = [line for line in printed(1, whole) if line.startswith("next")]
    [rest] = [line for line in printed(1, least, precision="bf16") if line.startswith("next")]

    assert told == f"{head}, model.activation_checkpointing=true, precision=bf16"
    assert rest == head
