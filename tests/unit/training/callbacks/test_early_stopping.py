"""Early stopping follows the validation loss, also over the end of a process."""

import json
import math
from pathlib import Path

import optuna
import pytest

from tests.unit.training.runs import result_in
from zerotrain.errors import ConfigError
from zerotrain.training.callbacks.early_stopping import EarlyStopping, Pruning, Trial, open_storage
from zerotrain.training.metrics import Metric


def test_early_stopping_ends_a_run_after_as_many_evaluations_that_are_not_better(make_trainer, tmp_path):
    stopping = EarlyStopping(patience=2, min_delta=100.0)
    make_trainer(max_steps=20, eval_every=2, callbacks={"early": stopping}).run()
    result = result_in(tmp_path)  # before the first step the best, after 2 and 4 none better
    assert (result["stopped_by"], result["steps"]) == ("callbacks.early", 5)


class FallingRun:
    """A run as early stopping sees it: lower is better of all metrics."""

    def badness(self, metric, value):
        return value


def test_early_stopping_by_a_metric_of_which_higher_is_better(make_trainer):
    class Counting(Metric):
        """3, 2, 1, 0: worse and worse."""

        needs_outputs, number = False, 4

        def value(self, loss, kept):
            self.number -= 1
            return self.number

    for metric, steps in (("val_count", 5), ("val_loss", 8)):
        stopping = EarlyStopping(patience=2, metric=metric)
        callbacks = {"count": Counting(), "early": stopping}
        assert make_trainer(max_steps=8, eval_every=2, callbacks=callbacks).run()["steps"] == steps


@pytest.mark.parametrize(
    ("losses", "asked"),
    [([3, 2, 1, 0.5], []), ([3, 3, 3], [2]), ([3, math.nan, 2.5, 2.45, math.nan], [4]), ([math.inf] * 2, [1])],
)
def test_early_stopping_counts_evaluations_in_a_row(losses, asked):
    stopping = EarlyStopping(patience=2, min_delta=0.1)
    found = []
    for number, loss in enumerate(losses):
        stopping.after_evaluation(FallingRun(), {"val_loss": loss})
        again = EarlyStopping(patience=2, min_delta=0.1)
        again.load_state_dict(json.loads(json.dumps(stopping.state_dict())))
        assert again.state_dict() == stopping.state_dict()
        found += [number] if again.ask(None) else []
        stopping = again
    assert found == asked


def test_early_stopping_refuses_what_it_cannot_follow():
    with pytest.raises(ValueError, match="at least 1"):
        EarlyStopping(patience=0)
    with pytest.raises(LookupError, match="metric=accuracy: an evaluation has val_loss"):
        EarlyStopping(patience=1, metric="accuracy").after_evaluation(FallingRun(), {"val_loss": 1.0})


# A job tells a study its evaluations, and ends where the pruner says so.


optuna.logging.set_verbosity(optuna.logging.WARNING)


class After(optuna.pruners.BasePruner):
    """Wants an end from so many evaluations on."""

    def __init__(self, num: int) -> None:
        self.num = num

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return len(trial.intermediate_values) >= self.num


@pytest.fixture
def study(tmp_path: Path) -> optuna.Study:
    url = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(study_name="of", storage=url)
    study.ask()
    study.ask()
    return optuna.load_study(study_name="of", storage=url)  # which has not asked, and so reads what is told


def pruning(tmp_path: Path, pruner: optuna.pruners.BasePruner, metric: str = "val_loss") -> Pruning:
    url = f"sqlite:///{tmp_path}/study.db"
    return Pruning(Trial(url=url, study="of", number=1, metric=metric, pruner={}), pruner)


def test_a_pruned_run_ends_in_order_after_the_evaluation_and_goes_on_without_telling_twice(
    make_trainer, tmp_path: Path, study: optuna.Study, recwarn: pytest.WarningsRecorder
):
    given = {"max_steps": 8, "eval_every": 2}
    result = make_trainer(**given, pruning=pruning(tmp_path, After(2))).run()
    assert (result["status"], result["stopped_by"], result["steps"]) == ("stopped", "sweep.pruner", 5)
    assert result["error"] == "stopped by sweep.pruner after step 5 of 8"
    told = study.trials[1].intermediate_values
    assert list(told) == [2, 4]
    assert study.trials[0].intermediate_values == {}
    assert told[4] == result["final_val_loss"]
    make_trainer(**given, pruning=pruning(tmp_path, After(5))).run()
    assert study.trials[1].intermediate_values == told | {6: pytest.approx(told[4], abs=1), 8: pytest.approx(0, abs=9)}
    assert not [each for each in recwarn if "already reported" in str(each.message)]


def test_a_run_that_is_done_is_not_pruned(make_trainer, tmp_path: Path, study: optuna.Study):
    result = make_trainer(max_steps=4, eval_every=0, pruning=pruning(tmp_path, After(1))).run()
    assert (result["status"], list(study.trials[1].intermediate_values)) == ("completed", [4])


def test_a_value_that_is_no_number_is_not_told(tmp_path: Path, study: optuna.Study):
    class Run:
        step = 3

    callback = pruning(tmp_path, After(0))
    for value in (math.nan, math.inf):
        callback.after_evaluation(Run(), {"val_loss": value})
    assert study.trials[1].intermediate_values == {}
    assert callback.ask(None) is None


@pytest.mark.parametrize("wrong", ["metric", "file"])
def test_a_study_that_cannot_be_told_leaves_the_run_unpruned_and_says_so_once(
    make_trainer, tmp_path: Path, study: optuna.Study, screen, wrong: str
):
    callback = pruning(tmp_path, After(1), "val_acc" if wrong == "metric" else "val_loss")
    if wrong == "file":
        (tmp_path / "study.db").write_text("gone")
    assert make_trainer(max_steps=4, eval_every=1, pruning=callback).run()["status"] == "completed"
    [line] = [line for line in screen.getvalue().splitlines() if "sweep.pruner" in line]
    assert line.startswith("warning: sweep.pruner: ")


def test_an_address_without_a_database_is_one_line(tmp_path: Path):
    for url in ("nonsense", f"sqlite:///{tmp_path}/no/such/folder/study.db", "mysql://me:secret@nowhere/a"):
        with pytest.raises(
            ConfigError, match=r"hydra\.sweeper\.storage: got .*, which Optuna cannot open: "
        ) as refused:
            open_storage(url)
        assert len(str(refused.value).splitlines()) == 1
        assert "secret" not in str(refused.value)
