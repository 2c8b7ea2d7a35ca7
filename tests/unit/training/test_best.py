"""The checkpoint of the best evaluation stays and is named, whatever ends the run."""

import json
import math
import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zerotrain
from zerotrain.checkpoint import checkpoints_in, verify
from zerotrain.checkpoint.folder import best_in, step_name, step_of
from zerotrain.errors import CheckpointError, ConfigError
from zerotrain.models import GPT
from zerotrain.training.callbacks.checkpoints import BestCheckpoint, CheckpointPolicy

NUM_STEPS = 12
WORSE_FROM = 7


def until_worse(step: int, max_steps: int) -> float:
    """A schedule with which the loss falls at first, and then rises."""
    return 1.0 if step < WORSE_FROM else 300.0


@pytest.fixture
def start_run(make_trainer, tmp_path: Path):
    """Makes a Trainer in the folder of a name, whose best evaluation is neither the first nor the last."""

    def make(name: str, **changes: Any) -> Any:
        torch.manual_seed(0)
        (tmp_path / name).mkdir(exist_ok=True)
        model = GPT(vocab_size=32, max_seq_len=16, num_layers=1, num_heads=2, hidden_size=16)
        engine = zerotrain.build_engine(model, optimizer=partial(torch.optim.AdamW, lr=1e-2))
        settings = {"engine": engine, "max_steps": NUM_STEPS, "eval_every": 2, "schedule": until_worse}
        return make_trainer(**settings | {"run_dir": tmp_path / name} | changes)

    return make


def policy(**changes: Any) -> CheckpointPolicy:
    return CheckpointPolicy(**{"best": "val_loss", "keep": 1} | changes)


def folder_of(trainer: Any) -> Path:
    return trainer.run_dir / "checkpoints"


def names_beside_the_best(trainer: Any) -> list[str]:
    return sorted(path.name for path in folder_of(trainer).iterdir())


def losses_of(trainer: Any) -> dict[int, float]:
    """The validation loss by steps done, without that of before the first step."""
    lines = map(json.loads, (trainer.run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["val_loss"] for line in lines if "val_loss" in line and line["step"]}


def best_step(trainer: Any) -> int:
    losses = losses_of(trainer)
    return min(losses, key=losses.__getitem__)


def named(trainer: Any) -> str:
    return os.readlink(folder_of(trainer) / "best")


@pytest.mark.case(
    "checkpoints",
    "`checkpoint.best`: the best evaluation is neither the first nor the last, saves wait or not",
    "its checkpoint stays beside the newest; the link names it, and every command takes the link",
)
@pytest.mark.parametrize("every", [None, 1, 5])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_best_stays_beside_the_newest_and_the_link_names_it(start_run, screen, every, asynchronous):
    trainer = start_run("run", checkpoint=policy(every_steps=every, asynchronous=asynchronous))
    trainer.run()
    best = best_step(trainer)
    assert 2 < best < NUM_STEPS
    assert named(trainer) == step_name(best)
    assert names_beside_the_best(trainer) == sorted(["best", step_name(best), step_name(NUM_STEPS)])
    assert step_of(best_in(folder_of(trainer))) == verify(folder_of(trainer) / "best").step == best
    assert f"checkpoints/best is {step_name(best)}, of val_loss {losses_of(trainer)[best]:.4f}" in screen.getvalue()


def test_the_last_evaluation_may_be_the_best_also_where_the_end_is_not_saved(start_run):
    trainer = start_run("run", checkpoint=policy(at_end=False), max_steps=4)
    trainer.run()
    assert names_beside_the_best(trainer) == ["best", "step-00000004"]


def test_without_the_setting_nothing_more_is_saved_or_noted(start_run):
    trainer = start_run("run", checkpoint=CheckpointPolicy(every_steps=5, keep=None))
    trainer.run()
    assert names_beside_the_best(trainer) == [step_name(step) for step in (5, 10, 12)]
    assert "best" not in verify(folder_of(trainer) / step_name(10)).content["extra"]["trainer"]["run"]


class KilledError(Exception):
    pass


@pytest.mark.case(
    "checkpoints",
    "the run dies before any step, or stops before an evaluation that was due",
    "who goes on ends with the same best checkpoint as a run that never stopped",
    under="`checkpoint.best`: the best evaluation is neither the first nor the last, saves wait or not",
)
@pytest.mark.parametrize("step", range(3, NUM_STEPS + 1))
@pytest.mark.thinned(3)
def test_a_run_that_dies_goes_on_with_what_was_the_best(start_run, step):
    whole = start_run("whole", checkpoint=policy(every_steps=1))
    whole.run()

    def die(number: int) -> None:
        if number == step:
            raise KilledError

    first = start_run("run", checkpoint=policy(every_steps=1, asynchronous=False), begin=die)
    with pytest.raises(KilledError):
        first.run()
    to_try = checkpoints_in(folder_of(first))[::-1]
    again = start_run("run", checkpoint=policy(every_steps=1, resume=to_try))
    again.run()
    assert losses_of(again) == losses_of(whole)
    assert (named(again), names_beside_the_best(again)) == (named(whole), names_beside_the_best(whole))


@pytest.mark.parametrize("left", [None, "step-00000002", "step-00000099"])
def test_the_link_of_a_run_that_was_killed_before_it_was_made_is_made_by_who_goes_on(start_run, left):
    first = start_run("run", checkpoint=policy(keep=None, at_end=False))
    first.run()
    link, best = folder_of(first) / "best", named(first)
    link.unlink()
    if left is not None:
        link.symlink_to(left)
    link.with_name(f"best.{'0' * 16}.tmp").symlink_to(best)  # as one leaves that is killed between the two
    again = start_run("run", checkpoint=policy(keep=None, resume=[folder_of(first) / best]))
    again.run()
    assert named(again) == best
    assert not [name for name in names_beside_the_best(again) if name.endswith(".tmp")]


@pytest.mark.case(
    "checkpoints",
    "the run dies before any step, or stops before an evaluation that was due",
    under="`checkpoint.best`: the best evaluation is neither the first nor the last, saves wait or not",
)
@pytest.mark.parametrize("step", [4, 6])
def test_an_evaluation_that_a_stop_left_to_who_goes_on_counts(start_run, step):
    whole = start_run("whole", checkpoint=policy(), max_steps=6)
    whole.run()
    first = start_run("run", checkpoint=policy(), max_steps=6 if step < 6 else 7)
    first.begin = lambda number: number == step and os.kill(os.getpid(), signal.SIGTERM)
    first.run()
    again = start_run("run", checkpoint=policy(resume=[folder_of(first) / step_name(step)]), max_steps=6)
    again.run()
    assert losses_of(again) == losses_of(whole)
    assert (named(again), names_beside_the_best(again)) == (named(whole), names_beside_the_best(whole))


def test_of_another_folder_no_best_is_taken_over_and_of_another_metric_none(start_run):
    first = start_run("run", checkpoint=policy(keep=None, every_steps=5))
    first.run()
    path = folder_of(first) / step_name(10)
    other = start_run("other", checkpoint=policy(resume=[path]))
    other.run()
    assert named(other) == step_name(NUM_STEPS)
    best = BestCheckpoint("val_loss/a", folder_of(first), first.engine, first.world, first.console)
    best.resumed_from = path
    state = {"best": {"metric": "val_loss", "value": 0.0, "step": 10}}
    best.load_state_dict(state)
    assert best.state_dict() == {}


def test_a_later_best_that_is_set_aside_is_no_longer_named(start_run):
    first = start_run("run", checkpoint=policy(keep=None))
    first.run()
    best = named(first)
    again = start_run("run", checkpoint=policy(keep=None, resume=[folder_of(first) / "step-00000002"]), max_steps=3)
    again.run()
    assert named(again) == "step-00000002" != best


def best_of(start: Any, name: str = "alone") -> BestCheckpoint:
    trainer = start_run(name)
    return BestCheckpoint("val_loss", folder_of(trainer), trainer.engine, trainer.world, trainer.console)


@pytest.mark.case(
    "checkpoints",
    "a loss of nan, a save that fails",
    "never the best; the best is that of before",
    under="`checkpoint.best`: the best evaluation is neither the first nor the last, saves wait or not",
)
@pytest.mark.parametrize(
    ("losses", "due"),
    [
        ([9, 3, 2, 2.5, 1], [1, 2, 4]),
        ([9, 3, 3, 3], [1]),
        ([9, math.nan, 3, math.nan, 2], [2, 4]),
        ([0, math.inf, 5, -math.inf, 4], [2, 4]),
    ],
)
def test_lower_is_better_and_nan_and_infinity_never_are(start_run, losses, due):
    """The first evaluation is before the first step."""
    best = best_of(start_run)
    for step, loss in enumerate(losses):
        best.after_evaluation(
            SimpleNamespace(step=step, badness=lambda metric, value: value), {"val_loss": float(loss)}
        )
    assert [step for step in range(len(losses)) if best.is_due(step)] == due


@pytest.mark.case(
    "checkpoints",
    "a loss of nan, a save that fails",
    under="`checkpoint.best`: the best evaluation is neither the first nor the last, saves wait or not",
)
def test_where_its_save_fails_the_best_is_that_of_before(start_run):
    best = best_of(start_run)
    for step, loss in ((2, 3.0), (4, 2.0)):
        best.after_evaluation(SimpleNamespace(step=step, badness=lambda metric, value: value), {"val_loss": loss})
    best.failed(Path(step_name(4)))
    assert best.state_dict()["best"] == {"metric": "val_loss", "value": 3.0, "step": 2}
    best.after_evaluation(SimpleNamespace(step=6, badness=lambda metric, value: value), {"val_loss": 2.5})
    assert best.is_due(6)


def test_a_run_whose_saves_fail_has_no_best(start_run):
    trainer = start_run("run", checkpoint=policy())
    folder_of(trainer).write_text("no folder")
    with pytest.raises(CheckpointError, match="step-00000002 was not saved"):
        trainer.run()
    assert best_in(folder_of(trainer)) is None


def test_what_is_no_link_of_ours_is_not_replaced(start_run, screen):
    trainer = start_run("run", checkpoint=policy())
    (folder_of(trainer) / "best").mkdir(parents=True)
    trainer.run()
    assert (folder_of(trainer) / "best").is_dir()
    assert "best is there, and is no link to a checkpoint beside it; move it away" in " ".join(
        screen.getvalue().split()
    )


def test_a_metric_that_no_evaluation_has_is_refused(start_run):
    with pytest.raises(ConfigError, match=r"checkpoint\.best: got val_loss/a; an evaluation has val_loss"):
        start_run("run", checkpoint=policy(best="val_loss/a")).run()
