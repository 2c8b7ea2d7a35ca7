"""The next step of a run with one thing changed, beside the step as it was: both from the same weights."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from zerotrain.errors import ConfigError
from zerotrain.replay.steps import ReplayedSteps
from zerotrain.training.sameness.seeds import seed_leaf

MAX_ROWS_NAMED = 20


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change to a step."""

    without_rows: frozenset[int] = frozenset()
    """Numbers of rows in the dataset, whose labels do not count."""
    lr: float | None = None
    """The largest learning rate of all groups; the others stay in proportion. None: the run's."""
    clip: float | None = None
    """The largest norm of the gradient. None: the run's."""

    def __str__(self) -> str:
        rows = ",".join(map(str, sorted(self.without_rows)))
        given = {"--without-rows": rows, "--lr": self.lr, "--clip": self.clip}
        return " ".join(f"{name} {value}" for name, value in given.items() if value not in (None, ""))


@dataclass(frozen=True, kw_only=True)
class Came:
    """The outcome of a step."""

    lr: float
    """The largest learning rate of all groups."""
    loss: float
    """Mean over the labels that count."""
    grad_norm: float
    clip_coefficient: float
    skipped: bool
    loss_after: float
    """With the weights after the step, mean over the rows that the changed step has."""
    update: str
    """See `StepResult.update_hash`."""


def side_by_side(steps: ReplayedSteps, change: Change, folder: Path) -> dict[str, Any]:
    """Compute the next step as it was, and with a change; returns both outcomes, for JSON. The run is as before then.

    Args:
        folder: for a checkpoint of this moment.

    Raises:
        ConfigError: the step has not these rows or no others, or no learning rate that could be another.
    """
    _require_rows(steps, change.without_rows)
    saved = steps.engine.save(folder / "before")
    left = steps.feed.without(change.without_rows)
    came = []
    for each in (Change(), change):
        came.append(_came(steps, each, left))
        steps.engine.load(saved)
    as_it_was, changed = map(asdict, came)
    return {"change": str(change), "as_it_was": as_it_was, "changed": changed}


def _require_rows(steps: ReplayedSteps, rows: frozenset[int]) -> None:
    sampler = steps.feed.sampler
    micro_batches = sampler.micro_batches(sampler.rows_consumed, range(sampler.num_virtual_ranks))
    of_step = {row for each in micro_batches for row in each.rows}
    if missing := rows - of_step:
        shown = sorted(of_step)
        named = ", ".join(map(str, shown[:MAX_ROWS_NAMED])) + ", ..." * (len(shown) > MAX_ROWS_NAMED)
        raise ConfigError(f"--without-rows: got {min(missing)}; the rows of step {steps.done + 1} are {named}")
    if rows == of_step:
        raise ConfigError(f"--without-rows: got all {len(rows)} rows of step {steps.done + 1}; leave one")


def _came(steps: ReplayedSteps, change: Change, left: tuple[list[Any], Sequence[Any] | None]) -> Came:
    """Make the next step, and then another one to have the loss after it."""
    engine = steps.engine
    factor, update = steps.rate_factor(), engine.steps.optimizer_step
    steps.set_rates(factor)
    lr, clip = max(float(group["lr"]) for group in engine.param_groups), update.max_grad_norm
    if change.lr is not None:
        if not lr:
            raise ConfigError(f"--lr: got {change.lr:g}, but every learning rate of step {steps.done + 1} is 0")
        steps.set_rates(factor * change.lr / lr)
    update.max_grad_norm = clip if change.clip is None else change.clip
    try:
        inputs, weights = left if change.without_rows else steps.feed.without(frozenset())
        seed_each = partial(seed_leaf, steps.seed, steps.done)
        outcome = engine.train_step(inputs, weights=weights, before_each=seed_each)
        after = engine.train_step(left[0], weights=left[1], before_each=seed_each)
    finally:
        update.max_grad_norm = clip
    return Came(
        lr=lr if change.lr is None else change.lr,
        loss=outcome.mean_loss,
        grad_norm=outcome.grad_norm,
        clip_coefficient=outcome.clip_coefficient,
        skipped=outcome.skipped,
        loss_after=after.mean_loss,
        update=outcome.update_hash,
    )
