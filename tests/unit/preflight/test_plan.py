"""What is printed of a plan."""

import io
import re
from dataclasses import asdict, fields, replace

import pytest
import torch
from rich.console import Console

from zerotrain.config.schema import Config, ModelSwitches, PlanConfig
from zerotrain.preflight.plan import NOT_COUNTED, Memory, RunPlan, print_plan
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


def printed(
    memory_mb: int, *stages: StagePlan, encoding: str = "utf-8", precision: str = "fp32", is_card: bool = False
) -> list[str]:
    """The lines of a plan whose stage 0 is asked for, of a process that takes 100 MB itself."""
    memory = Memory(device=memory_mb * MB, host=0, is_card=is_card, on_host=True, process=90 * MB, cache=10 * MB)
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
    [row] = [line for line in lines if line.split()[:2] == ["0", "10.00"]]
    assert row.split() == ["0", "10.00", "0", "10.00", "20.00", "0", "?", "?", "?", "yes"]


def test_a_column_has_as_many_digits_in_each_row():
    lines = printed(1000, stage_plan(13, 10, 2, 1344), stage_plan(1, 1, 2, 60), stage_plan(0, 0, 0, 3))
    rows = [line.split() for line in lines if re.match(r" *\d ", line)]
    assert [row[7] for row in rows] == ["1.344", "0.060", "0.003"]  # the peak, in GB
    assert [row[1] for row in rows] == ["0.0130", "0.0010", "0.0000"]
    assert {len(row) for row in rows} == {10}  # none is broken


@pytest.mark.parametrize(("card_mb", "word"), [(200, "yes"), (178, "yes"), (177, "tight"), (160, "tight"), (159, "no")])
def test_from_nine_tenths_of_a_card_on_a_stage_is_tight_and_what_is_not_counted_is_told(card_mb: int, word: str):
    lines = printed(card_mb, stage_plan(10, 10, 20, 60), is_card=True)
    [row] = [line.split() for line in lines if line.split()[:2] == ["0", "10.00"]]
    assert row[-1] == word
    assert any(line.startswith(f"not counted: {', '.join(NOT_COUNTED)}; from 90% of a card") for line in lines)
    words = {"yes": "fits", "tight": "is tight", "no": "does not fit"}
    assert any(line.startswith(f"stage 0 {words[word]}: a rank holds 160 MB") for line in lines)
    in_memory = printed(card_mb, stage_plan(10, 10, 20, 60))  # of this machine, where all of a process is counted
    assert not any("tight" in line for line in in_memory)


class Card:
    """A GPU of 80 GB."""

    is_host, own_nbytes, kernels_nbytes = False, 80 * 10**9, 10**6


@pytest.mark.parametrize("memory_gb", [None, 80.0], ids=["of the GPU", "typed"])
def test_a_typed_card_and_a_real_one_are_treated_alike(monkeypatch: pytest.MonkeyPatch, memory_gb: float | None):
    for module in ("plan", "room"):
        monkeypatch.setattr(f"zerotrain.preflight.{module}.device_of", lambda device: Card())
    memory = Memory.of_run(Config(plan=PlanConfig(memory_gb=memory_gb)), torch.device("meta"), 1)
    plans = [stage_plan(0, 0, 0, peak) for peak in (71_000, 73_000, 81_000)]
    assert [memory.fits(plan) for plan in plans] == [True, True, False]
    assert [memory.is_tight(plan) for plan in plans] == [False, True, False]
    assert [memory.for_choice().fits(plan) for plan in plans] == [True, False, False]  # auto takes none that is tight


def test_what_takes_less_memory_is_told_unless_the_run_has_it():
    whole = stage_plan(10, 10, 20, 60)
    least = replace(whole, recomputes=True)
    head = "next: no stage fits; less memory take: a smaller train.micro_batch_size"

    [told] = [line for line in printed(1, whole) if line.startswith("next")]
    [rest] = [line for line in printed(1, least, precision="bf16") if line.startswith("next")]

    assert told == f"{head}, model.activation_checkpointing=true, precision=bf16"
    assert rest == head
