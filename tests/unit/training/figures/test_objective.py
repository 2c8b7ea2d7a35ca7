"""Which value of a result.json a name stands for."""

import math

import pytest

from zerotrain.training import RunResult
from zerotrain.training.result import NUMBERS, in_evaluation, value_in

RESULT = RunResult(
    world_size=2,
    steps=7,
    final_val_loss=2.5,
    val_loss_by_source={"docs": 2.0, "a/b": 3.0},
    val_metrics={"val_accuracy": 0.5, "val_accuracy/docs": 0.25, "val_nan": math.nan},
    comm_bytes_per_step={"sent": 300},
    memory_bytes={"peak": 10**400, "theory": {"parameters": 100}},
).body()


@pytest.mark.parametrize(
    ("name", "value", "evaluated"),
    [
        ("final_val_loss", 2.5, "val_loss"),
        ("val_loss", 2.5, "val_loss"),
        ("val_loss/docs", 2.0, "val_loss/docs"),
        ("val_loss/a/b", 3.0, "val_loss/a/b"),
        ("val_accuracy", 0.5, "val_accuracy"),
        ("val_accuracy/docs", 0.25, "val_accuracy/docs"),
        ("val_nan", None, "val_nan"),
        ("steps", 7.0, None),
        ("tokens_per_s", None, None),
        ("comm_bytes_per_step.sent", 300.0, None),
        ("memory_bytes.theory.parameters", 100.0, None),
        ("memory_bytes.peak", None, None),
    ],
)
def test_a_name_stands_for_a_number_or_a_metric(name, value, evaluated):
    assert value_in(RESULT, name) == value
    assert in_evaluation(name) == evaluated
    assert (name in NUMBERS) == (evaluated is None or name == "final_val_loss")


@pytest.mark.parametrize("name", ["val_acc", "val_loss/code", "comm_bytes_per_step", "status", "memory_bytes.theory"])
def test_a_name_that_stands_for_nothing_is_told_with_those_that_do(name):
    with pytest.raises(
        LookupError, match=f"got {name}, which this job has not measured; it has val_loss, val_loss/docs, .*, steps, "
    ):
        value_in(RESULT, name)


def test_what_no_run_can_measure_is_known_beforehand():
    wrong = (
        "",
        "status",
        "loss",
        "val_metrics",
        "val_loss_by_source",
        "stages.0",
        "comm.sent",
        "Val_loss",
        "memory_bytes",
    )
    assert [name for name in wrong if name in NUMBERS or in_evaluation(name) is not None] == []
