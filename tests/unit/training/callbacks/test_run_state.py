"""What a checkpoint says of where a run was: it is gone on from as it was written, or refused in one line."""

from pathlib import Path
from typing import Any

import pytest

from zerotrain.checkpoint.manifest import Manifest
from zerotrain.errors import CheckpointError
from zerotrain.training.callbacks.checkpoints import require_run_state
from zerotrain.training.callbacks.stages import stages_from
from zerotrain.training.clock import EARLIER
from zerotrain.training.result import RunResult

STATE: dict[str, Any] = {
    "data": {"rows_consumed": 3}, "skipped_steps": 0, "evaluated_at": None, "result": RunResult(1).state_dict(),
    "clock": dict.fromkeys(EARLIER, 0.0), "sinks": [None, {"id": "x"}], "asked_stages": {"5": 3},
}  # fmt: skip


def of_trainer(**changes: Any) -> dict[str, Any]:
    return {"built_groups": [{"lr": 0.1}], "run": STATE | changes}


def test_what_a_run_has_written_is_gone_on_from() -> None:
    require_run_state(Path("step"), of_trainer())
    require_run_state(Path("step"), of_trainer(evaluated_at=3, sinks=[]))
    require_run_state(Path("step"), of_trainer(best={"metric": "val_loss", "value": 2.5, "step": 3}))


WRONG: dict[str, Any] = {
    "data": 3, "skipped_steps": "3", "evaluated_at": 0.5, "result": {"stages": 3}, "clock": {"train_s": 1.0},
    "sinks": {"0": None}, "asked_stages": {"five": 3}, "best": {"metric": "val_loss", "value": 2.5, "step": -1},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_anything_else_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^step does not hold the state of its run: run\.{name}") as caught:
        require_run_state(Path("step"), of_trainer(**{name: WRONG[name]}))
    assert str(caught.value).isprintable()
    with pytest.raises(CheckpointError, match="built_groups is missing"):
        require_run_state(Path("step"), {"run": STATE})


@pytest.mark.parametrize("asked", [{"x": 1}, {"5": 9}, {"5": "3"}, [5, 3], 3, {"\u0665": 3}, {"9" * 5000: 3}])
def test_stages_that_nobody_can_have_asked_for_are_not_those_of_a_run(asked: Any) -> None:
    content = {"files": [], "parameters": {}, "buffers": {}, "step": 7}
    extra = {"trainer": {"run": {"asked_stages": asked}}}
    assert stages_from(Manifest({**content, "extra": extra}), {0: 2}) == ({0: 2}, 7)


def test_a_result_takes_up_nothing_but_what_a_run_has_kept() -> None:
    result = RunResult(world_size=2)
    result.load_state_dict({"final_val_loss": 2.5, "world_size": 9, "write": None})
    assert (result.final_val_loss, result.world_size) == (2.5, 2)
    assert callable(result.write)
