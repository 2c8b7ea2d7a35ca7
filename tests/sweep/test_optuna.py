"""Sweeps whose jobs Optuna chooses: a study has its trials once, whatever cuts it off and however many drivers it has;
and a job that is worse than others ends before its time."""

import functools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
import yaml
from commands import TINY, Command, by_hand, result_of

from tests.sweep.test_sweeps import journal_of, rows_of
from tests.zygote.client import Zygote

SETTINGS = (*TINY, "train.max_steps=4", "launch.nproc_per_node=1", "hydra/sweeper=optuna")
MISBEHAVING = "model: {_target_: misbehaving.MisbehavingMLP, action: ACTION, rank: 0, at: 3}"
STOPPING = "{_target_: zerotrain.training.callbacks.early_stopping.EarlyStopping, patience: 1, min_delta: 100.0}"
CASES = {
    **{f"well{number}": f"seed: {10 + number}" for number in range(5)},
    "raises": MISBEHAVING.replace("ACTION", "raise"),
    "no_number": MISBEHAVING.replace("ACTION", "poison"),
    "refused": "zero: {stage: 9}",
    "pauses": f"{MISBEHAVING.replace('ACTION', 'pause')}\ncheckpoint: {{every: 1, asynchronous: false}}",
    "worse": "optimizer: {lr: 30}",
    "stops": f"train: {{eval_every: 1}}\ncallbacks: {{stop: {STOPPING}}}",
}
TWELVE = [
    "well0", "raises", "well1", "no_number", "well2", "pauses", "well0", "refused", "well3", "well4", "stops", "worse",
]  # fmt: skip
ENDS_WORSE = "sweep.pruner={_target_:optuna.pruners.ThresholdPruner,upper:6.5}"


@pytest.fixture
def search(zygote: Zygote, tmp_path: Path) -> Callable[..., Command]:
    """Starts a sweep over all the cases, in `sweep` of the test's folder."""
    (tmp_path / "conf/case").mkdir(parents=True)
    for name, settings in CASES.items():
        (tmp_path / f"conf/case/{name}.yaml").write_text(f"# @package _global_\n{settings}\n")
    given = ("-m", "--config-dir=conf", *SETTINGS, "hydra.sweep.dir=sweep", f"+case=choice({','.join(CASES)})")
    return functools.partial(functools.partial(by_hand, folder=tmp_path, zygote=zygote), *given)


def study_in(folder: Path) -> optuna.Study:
    return optuna.load_study(study_name="sweep", storage=f"sqlite:///{folder}/sweep/study.db")


def queue(folder: Path, *cases: str) -> None:
    """Let the study of a sweep that is yet to begin choose these cases, in this order."""
    (folder / "sweep").mkdir()
    study = optuna.create_study(study_name="sweep", storage=f"sqlite:///{folder}/sweep/study.db")
    for case in cases:
        study.enqueue_trial({"+case": case})


def trials_of(study: optuna.Study) -> dict[int, tuple[str, str]]:
    """The case and the state of each trial."""
    return {each.number: (each.params["+case"], each.state.name) for each in study.trials}


def test_a_study_goes_on_after_a_kill_and_has_its_trials_once(search: Callable[..., Command], tmp_path: Path):
    queue(tmp_path, *TWELVE)
    first = search("hydra.sweeper.n_trials=12")
    first.wait_for_text(tmp_path / "sweep/5/ranks/0.log", "pausing")
    first.kill()
    first.wait()
    assert first.wait_until_gone() == []
    seen = len(journal_of(tmp_path))

    again = search("hydra.sweeper.n_trials=12")
    assert again.wait() == 1, again.stderr
    trials = trials_of(study_in(tmp_path))
    failed = {"raises", "no_number", "refused"}
    assert trials == {number: (case, "FAIL" if case in failed else "COMPLETE") for number, case in enumerate(TWELVE)}
    events = journal_of(tmp_path)
    assert Counter(event["job"] for event in events if event["event"] == "begun") == Counter([*range(12), 5]) - Counter(
        [6, 7]
    )
    assert {event["folder"] for event in events if event["job"] == 6} == {"0"}
    assert [event["job"] for event in events[seen:] if event["event"] == "taken"] == [4, 6]
    assert result_of(tmp_path / "sweep/5")["resumed_from"] is not None
    values = [each.value for each in study_in(tmp_path).trials]
    assert values[0] == values[6] == result_of(tmp_path / "sweep/0")["final_val_loss"]
    told = yaml.safe_load((tmp_path / "sweep/optimization_results.yaml").read_text())
    assert told["best_value"] == min(value for value in values if value is not None)
    rows = rows_of(again, 12)
    assert Counter(rows.values()) == Counter(completed=8, failed=2, diverged=1)  # two of well0; a callback ended one
    assert "(12/12, 2 failed, best " in again.stdout
    assert "Traceback" not in again.stderr

    more = search("hydra.sweeper.n_trials=12")
    assert more.wait() == 1
    assert journal_of(tmp_path) == events
    assert rows_of(more, 12) == rows


def test_two_drivers_of_a_study_share_its_trials(search: Callable[..., Command], tmp_path: Path):
    of_both = ("hydra.sweeper.n_trials=5", "metrics=accuracy", "+case=pauses", "seed=choice(1,2,3)")
    drivers = [search(*of_both, "sweep.objective=val_accuracy", "sweep.direction=maximize") for _ in range(2)]
    assert [driver.wait() for driver in drivers] == [0, 0], [driver.stderr for driver in drivers]
    trials = study_in(tmp_path).trials
    assert [each.state.name for each in trials] == ["COMPLETE"] * 5
    events = journal_of(tmp_path)
    assert sorted(event["job"] for event in events if event["event"] in ("ended", "taken")) == [0, 1, 2, 3, 4]
    begun = [event["hash"] for event in events if event["event"] == "begun"]
    assert len(set(begun)) == len(begun) == len({each.params["seed"] for each in trials})
    assert len({event["pid"] for event in events if event["event"] != "begun"}) == 2
    best = max(each.value for each in trials)
    values = [result_of(path.parent)["val_metrics"]["val_accuracy"] for path in tmp_path.glob("sweep/*/result.json")]
    told = yaml.safe_load((tmp_path / "sweep/optimization_results.yaml").read_text())
    assert best == max(values) == told["best_value"]
    report = json.loads((tmp_path / "sweep/sweep.json").read_text())
    [row] = [row for row in report["jobs"] if row["job"] == report["best"]]
    assert (report["loss"], row["val_accuracy"]) == ("val_accuracy", best)


def test_a_job_that_is_worse_is_pruned_and_keeps_its_checkpoint(search: Callable[..., Command], tmp_path: Path):
    queue(tmp_path, "well0", "worse", "worse")
    side_by_side = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    command = search("hydra.sweeper.n_trials=3", "train.eval_every=1", ENDS_WORSE, *side_by_side)
    assert command.wait() == 0, command.stderr
    study = study_in(tmp_path)
    assert trials_of(study) == {0: ("well0", "COMPLETE"), 1: ("worse", "PRUNED"), 2: ("worse", "PRUNED")}
    assert rows_of(command, 3) == {"well0": "completed", "worse": "pruned"}
    result = result_of(tmp_path / "sweep/1")
    assert (result["status"], result["stopped_by"]) == ("stopped", "sweep.pruner")
    assert 0 < result["steps"] < 4
    assert result["checkpoint"].endswith(f"step-{result['steps']:08}")
    assert list(study.trials[0].intermediate_values) == [1, 2, 3, 4]
    assert study.trials[0].intermediate_values[4] == study.trials[0].value
    assert max(study.trials[1].intermediate_values) == result["steps"] - 1
    assert [event["status"] for event in journal_of(tmp_path) if event["job"] == 2] == ["pruned"]  # the same as job 1
    assert "job 1 pruned with loss " in command.stdout
    assert "(3/3, 2 pruned, best " in command.stdout
    assert json.loads((tmp_path / "sweep/sweep.json").read_text())["counts"] == {"completed": 1, "pruned": 1}
