"""A run that is killed and started again ends as the one that was not: eleven kills here, 200 by `make chaos`."""

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from commands import REPOSITORY

from tests.chaos import cases
from tests.chaos.places import PLACES
from tests.chaos.plan import CHANGE, STAGES, VICTIMS, Case, plan, schedule_from
from zerotrain.checkpoint.folder import CHECKPOINTS, step_name


@pytest.mark.case(
    "checkpoints",
    "a run killed by SIGKILL in a step, in each part of a save, removal and load: a rank, the "
    "launcher, or all; started again, also at another stage and on fewer ranks",
    "same weights and metrics as the run nobody has killed; nothing left behind",
)
@pytest.mark.case(
    "checkpoints",
    "and a rank, the launcher or all are killed before, between or behind the buckets of a "
    "change, with one on its way, or in the saves around it",
    "same weights; each change has one line",
    under="`zero.schedule` changes the stage in mid-run",
)
def test_eleven_kills_change_nothing(tmp_path: Path):
    command = [sys.executable, "-m", "tests.chaos", "--quick", "--jobs=1", f"--out={tmp_path / 'out'}"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [outcome["problems"] for outcome in report] == [[], [], [], []]
    assert [outcome["num_struck"] for outcome in report] == [4, 4, 2, 1], done.stdout
    assert sum(sum(outcome["restarts"].values()) for outcome in report) == 10, (
        done.stdout
    )  # the launcher itself was killed in one


def test_two_hundred_kills_have_each_place_at_each_stage_and_most_by_each_victim():
    planned = plan(200, seed=0)
    strikes = [each for case in planned for each in case.strikes]
    assert len(strikes) >= 200
    assert {(each.place, each.stage) for each in strikes} == {
        (place.name, stage) for place in PLACES for stage in STAGES
    }
    by_victim = Counter(place for place, _ in {(each.place, each.victim) for each in strikes})
    assert sum(number >= 3 for number in by_victim.values()) > len(PLACES) / 2
    assert planned == plan(200, seed=0) != plan(200, seed=1)


def test_forty_kills_of_runs_that_change_their_stage_have_each_place_in_a_change_in_each_of_its_rounds():
    planned = plan(40, seed=0, changing=True)
    strikes = [each for case in planned for each in case.strikes]
    in_a_change = {(each.place, each.stage) for each in strikes if each.place.startswith("switch: ")}
    assert in_a_change == {(place.name, stage) for place in PLACES if place.kind == CHANGE for stage in STAGES}
    assert all(case.changes_stage for case in planned)
    assert sum(each.place.startswith("save: ") for each in strikes) >= 10
    assert {each.victim for each in strikes} == set(VICTIMS)
    for stage in STAGES:
        stages = list(schedule_from(stage).values())
        assert stages[0] == stage
        assert all(one != other for one, other in pairwise(stages))


def test_what_differs_from_the_undisturbed_run_and_what_a_run_leaves_behind_is_seen(tmp_path: Path):
    metrics = [{"step": 1, "train_loss": 3.0}, {"step": 2, "train_loss": 2.0}]
    for step in (5, 6):
        (tmp_path / "run" / CHECKPOINTS / step_name(step)).mkdir(parents=True)
    lines = [json.dumps(line) + "\n" for line in metrics]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    result = {"status": "completed", "steps": 6, "weights_sha256": "abc", "error": None}
    (tmp_path / "run" / "result.json").write_text(json.dumps(result))
    assert cases.problems_of_run(tmp_path, cases.Undisturbed("abc", metrics)) == []
    [other_weights] = cases.problems_of_run(tmp_path, cases.Undisturbed("abd", metrics))
    assert other_weights == "weights_sha256 is abc, and abd undisturbed"
    (tmp_path / "run" / "metrics.jsonl").write_text("".join([*lines, lines[1]]))
    [twice] = cases.problems_of_run(tmp_path, cases.Undisturbed("abc", metrics))
    assert twice.startswith("metrics.jsonl has the steps [1, 2, 2]")
    hidden = tmp_path / "run" / CHECKPOINTS / f".{step_name(7)}.partial-{'0' * 16}"
    hidden.mkdir()
    (tmp_path / "run" / "metrics.jsonl.17.tmp").touch()
    problems = cases.problems_of_folder(tmp_path, Case(0, 2, (), 2, 2, by_restart=False))
    without_manifest = f"left in checkpoints/: ['{hidden.name}', '{step_name(5)}', '{step_name(6)}']"
    assert without_manifest in problems
    assert "0 checkpoints are there, and checkpoint.keep is 2" in problems
    assert "left in the run's folder: ['metrics.jsonl.17.tmp']" in problems
