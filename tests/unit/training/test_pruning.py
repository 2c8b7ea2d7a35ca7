"""A job tells a study its evaluations, and ends where the pruner says so."""

import json
import math
from pathlib import Path

import optuna
import pytest

from zerotrain.errors import ConfigError
from zerotrain.training.callbacks.early_stopping import Pruning, Trial, open_storage

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


def test_a_study_is_made_where_there_is_none(tmp_path: Path):
    (tmp_path / "empty.db").touch()
    for name in ("new.db", "empty.db"):
        assert open_storage(f"sqlite:///{tmp_path}/{name}").get_all_study_summaries() == []
    assert json.dumps(sorted(path.name for path in tmp_path.iterdir())) == '["empty.db", "new.db"]'
