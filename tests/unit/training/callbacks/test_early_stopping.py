"""Early stopping follows the validation loss, also over the end of a process."""

import io
import json
import math
from functools import partial
from pathlib import Path

import optuna
import pytest
from rich.console import Console

from tests.unit.training.callbacks.test_stages import sums, tied_model, trainer_of
from zerotrain.checkpoint.folder import checkpoints_in
from zerotrain.errors import ConfigError
from zerotrain.testing.fake_wire import run_threads
from zerotrain.training import constant
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy
from zerotrain.training.callbacks.early_stopping import EMA, EarlyStopping, Pruning, Trial, open_storage
from zerotrain.training.callbacks.evaluation import evaluate
from zerotrain.training.metrics import Metric


def test_early_stopping_ends_a_run_after_as_many_evaluations_that_are_not_better(make_trainer, tmp_path):
    stopping = EarlyStopping(patience=2, min_delta=100.0)
    make_trainer(max_steps=20, eval_every=2, callbacks={"early": stopping}).run()
    result = json.loads(
        (tmp_path / "result.json").read_text()
    )  # before the first step the best, after 2 and 4 none better
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


# A run keeps an average of its weights: what it evaluates, saves and says of it, and that it trains as without.


__all__ = ["sums", "tied_model"]  # the fixtures of the runs
STAGES = {0: 2, 5: 3, 7: 0}


def run(world, tied_model, folder: Path, **changes):
    """Twelve steps, an evaluation every four. Returns the trainer, what it said, and the hash of its weights."""
    screen = io.StringIO()
    trainer = trainer_of(
        world, tied_model, folder, kind="bf16, Muon", console=Console(file=screen, width=200), **changes
    )
    trainer.run()
    return trainer, screen.getvalue(), trainer.engine.weights_sha256()


def losses_of(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["val_loss"] for line in lines if line.get("val_loss") is not None}


def test_evaluations_are_of_the_average_and_the_training_is_that_without_it(tied_model, tmp_path):
    policy = CheckpointPolicy(every_steps=4, keep=None, best="val_loss")

    def on_a_rank(world):
        bare = run(world, tied_model, tmp_path / "bare", stages=STAGES)
        keeping = run(world, tied_model, tmp_path / "keeping", callbacks={"ema": EMA(evaluate=False)}, stages=STAGES)
        stopping = EarlyStopping(patience=99)
        callbacks = {"ema": EMA(decay=0.5, warmup=False), "stopping": stopping}
        evaluating = run(
            world, tied_model, tmp_path / "evaluating", callbacks=callbacks, checkpoint=policy, stages=STAGES
        )
        assert bare[2] == keeping[2] == evaluating[2]
        engine = evaluating[0].engine
        engine.load_weights(tmp_path / "evaluating/checkpoints/step-00000012", averaged=True)
        dataset = evaluating[0].dataset.validation
        loss = evaluate(engine=engine, world=world, dataset=dataset, num_sequences=8, micro_batch_size=2)
        return loss, stopping.state_dict()["best"], evaluating[1], keeping[1]

    [(loss, best, said, other_said), *_], _ = run_threads(on_a_rank, 2)
    bare, keeping, evaluating = (losses_of(tmp_path / name) for name in ("bare", "keeping", "evaluating"))
    assert bare == keeping
    assert bare[0] == evaluating[0]
    assert all(bare[step] != evaluating[step] for step in (4, 8, 12))
    assert evaluating[12] == loss
    assert best == min(evaluating.values())
    found = json.loads((tmp_path / "evaluating/checkpoints/step-00000012/manifest.json").read_text())
    assert found["extra"]["trainer"]["run"]["best"]["value"] == min(list(evaluating.values())[1:])
    assert "average of the weights: decay 0.5, evaluations use it\n" in said
    assert "average of the weights: decay 0.999 after a warm-up\n" in other_said


def test_a_run_that_goes_on_has_the_average_of_one_that_never_stopped(tied_model, tmp_path):
    def on_a_rank(world, folder, ema, **changes):
        callbacks = {"ema": EMA(decay=0.9)} if ema else {}
        how = {"schedule": constant, "callbacks": callbacks, "checkpoint": CheckpointPolicy(keep=None)}
        trainer, said, weights = run(world, tied_model, tmp_path / folder, **how | changes)
        if not ema:
            return said, weights, None
        with trainer.engine.averaged():
            return said, weights, trainer.engine.weights_sha256()

    def ranks(folder, *, ema=True, goes_on_from=None, **changes):
        if goes_on_from is not None:
            changes["checkpoint"] = CheckpointPolicy(resume=checkpoints_in(tmp_path / goes_on_from / "checkpoints"))
        return run_threads(partial(on_a_rank, folder=folder, ema=ema, **changes), 2)[0][0]

    _, weights, average = ranks("whole", stage=2)
    ranks("half", stage=3, max_steps=6)
    said, *found = ranks("rest", goes_on_from="half", stage=1)
    assert found == [weights, average]
    assert "average of the weights: decay 0.9 after a warm-up, 6 updates so far, evaluations use it\n" in said
    said, *found = ranks("without", ema=False, goes_on_from="half")
    assert found == [weights, None]
    path = tmp_path / "half/checkpoints/step-00000006"
    assert f"warning: {path} holds an average of weights, which is dropped; callbacks=ema would go on with it\n" in said
    said, weights, average = ranks("after", goes_on_from="without", max_steps=13)
    assert average == weights  # one update
    assert "after a warm-up, begins with the next step, since the checkpoint has none, evaluations use it\n" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"decay": 1}, "decay=1; it must be at least 0 and below 1, such as 0.999"),
        ({"decay": True}, "decay=True; it must be at least 0 and below 1, such as 0.999"),
        ({"every": 0}, "every=0; it must be a whole number of steps, at least 1"),
        ({"warmup": None}, "warmup=None; it must be true or false"),
        ({"evaluate": "no"}, "evaluate=no; it must be true or false"),
    ],
)
def test_a_value_that_it_cannot_have_is_refused(given, said):
    with pytest.raises(ValueError, match=f"^{said}$"):
        EMA(**given)


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


def test_a_study_is_made_where_there_is_none(tmp_path: Path):
    (tmp_path / "empty.db").touch()
    for name in ("new.db", "empty.db"):
        assert open_storage(f"sqlite:///{tmp_path}/{name}").get_all_study_summaries() == []
    assert json.dumps(sorted(path.name for path in tmp_path.iterdir())) == '["empty.db", "new.db"]'
