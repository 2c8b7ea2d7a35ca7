"""Which contents the state of a run may have that a checkpoint brings back."""

from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from zerotrain.errors import CheckpointError
from zerotrain.files.untrusted import Natural, UntrustedFileError, require_kind
from zerotrain.training.metrics.states import are_told

_Object = dict[str, Any]


class _SavedResult(TypedDict, total=False):
    skipped_steps: Natural
    final_train_loss: float | None
    final_val_loss: float | None
    val_loss_by_source: _Object | None
    val_metrics: _Object | None
    stages: list[_Object]


class _Clock(TypedDict):
    train_s: float
    steps: float
    seconds: float
    tokens: float
    waits_s: float
    labels: NotRequired[float]


AskedStages = dict[Annotated[int, Meta(ge=0, lt=10**18)], Annotated[int, Meta(ge=0, le=3)]]
"""The stages that operators asked for: steps done, as a text, and the stage from there on."""


class _Best(TypedDict):
    metric: str
    value: float
    step: Natural


class _SavedState(TypedDict):
    data: _Object
    skipped_steps: Natural
    evaluated_at: int | None
    result: _SavedResult
    clock: _Clock
    sinks: list[_Object | None]
    asked_stages: AskedStages
    callbacks: NotRequired[dict[str, _Object]]
    frozen: NotRequired[list[str]]
    best: NotRequired[_Best]
    training_metrics: NotRequired[Any]


class _Extra(TypedDict):
    built_groups: list[_Object]
    run: _SavedState


def require_run_state(path: Path, state: Any) -> None:
    """Make sure that a run can go on from what a checkpoint has for it, or raise CheckpointError."""
    try:
        run = require_kind(state, _Extra)["run"]
    except UntrustedFileError as error:
        raise CheckpointError(f"{path} does not hold the state of its run: {error}") from None
    if "training_metrics" in run and not are_told(run["training_metrics"]):
        raise CheckpointError(f"{path} does not hold the state of its run: run.training_metrics: no numbers of metrics")
