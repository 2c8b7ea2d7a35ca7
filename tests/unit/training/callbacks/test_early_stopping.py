"""Early stopping follows the validation loss, also over the end of a process."""

import json
import math

import pytest

from zerotrain.training.callbacks.early_stopping import EarlyStopping
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
