"""Which contents the state of a run may have that a checkpoint brings back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.errors import CheckpointError
from zerotrain.files.untrusted import Check, Each, Natural, Optional, UntrustedFileError, require_schema
from zerotrain.training.figures.metrics import EARLIER
from zerotrain.training.metrics.states import are_told

_LOSS = Optional((float, None))


@dataclass(frozen=True)
class AskedStages:
    """The stages that operators asked for: steps done, as a text, and the stage from there on."""

    def problem(self, value: Any) -> str | None:
        is_one = isinstance(value, dict) and all(map(_is_stage_from, value.items()))
        return None if is_one else "an object of steps and stages"


def _is_stage_from(pair: tuple[str, Any]) -> bool:
    step, stage = pair
    return step.isascii() and step.isdecimal() and len(step) < 20 and Natural(3).problem(stage) is None


_RESULT = {
    "skipped_steps": Optional(Natural()), "final_train_loss": _LOSS, "final_val_loss": _LOSS,
    "val_loss_by_source": Optional((dict, None)), "val_metrics": Optional((dict, None)), "stages": Optional([dict]),
}  # fmt: skip
_CLOCK = dict.fromkeys(EARLIER[:-1], float) | {EARLIER[-1]: Optional(float)}
_STATE = {
    "data": dict, "skipped_steps": Natural(), "evaluated_at": (int, None), "result": _RESULT,
    "clock": _CLOCK, "sinks": [(dict, None)], "asked_stages": AskedStages(),
    "callbacks": Optional(Each(dict)), "frozen": Optional([str]),
    "best": Optional({"metric": str, "value": float, "step": Natural()}),
    "training_metrics": Optional(Check(are_told, "numbers that metrics have kept")),
}  # fmt: skip


def require_run_state(path: Path, state: Any) -> None:
    """Make sure that a run can go on from what a checkpoint has for it, or raise CheckpointError."""
    try:
        require_schema(state, {"built_groups": [dict], "run": _STATE})
    except UntrustedFileError as error:
        raise CheckpointError(f"{path} does not hold the state of its run: {error}") from None
