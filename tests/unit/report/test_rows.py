"""A row for each job: what differs, how it ended, and the numbers that its files tell."""

import json
import math
import shlex
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.report.folders import journal, refused, write_job
from zerotrain.report import rows as curves
from zerotrain.report.plots import explained
from zerotrain.report.rows import equal_weights, points_over, read_curves, read_report, run_dirs_in, spreads
from zerotrain.report.values import short_names


def test_settings_that_differ_are_told_by_their_dotted_names_those_of_command_lines_first(tmp_path: Path):
    write_job(tmp_path / "0", ["optimizer.lr=0.1"])
    path = write_job(tmp_path / "1", ["optimizer.lr=0.2"]) / "config.yaml"
    changed = path.read_text().replace("stage: 2", "stage: 3").replace("num_layers: 4", "num_layers: 4\n  dropout: 0.5")
    path.write_text(changed)
    told = read_report(tmp_path)
    assert told.settings == ["optimizer.lr", "model.dropout", "zero.stage"]
    assert [row.settings for row in told.rows] == [
        {"optimizer.lr": 0.1, "zero.stage": 2},
        {"optimizer.lr": 0.2, "zero.stage": 3, "model.dropout": 0.5},
    ]


def test_a_job_without_a_config_is_told_by_its_command_line(tmp_path: Path):
    write_job(tmp_path / "0", ["zero.stage=1"])
    write_job(tmp_path / "1", ["zero.stage=2"])
    refused(tmp_path / "2", ["zero.stage=5"], "zero.stage: got 5; it must be 0, 1, 2 or 3")
    told = read_report(tmp_path)
    assert [row.settings for row in told.rows] == [{"zero.stage": 1}, {"zero.stage": 2}, {"zero.stage": 5}]
    assert (told.rows[2].status, told.rows[2]["ranks"]) == ("failed", None)


def test_a_setting_has_one_value_however_a_command_line_writes_it(tmp_path: Path):
    overrides = ["checkpoint.save_at_end=True", "checkpoint.best=NULL"]
    path = write_job(tmp_path / "0", overrides) / "config.yaml"
    path.write_text("checkpoint: {save_at_end: true, best: null}\nseed: 0\n")
    refused(tmp_path / "1", [*overrides, "seed=-1"], "seed: got -1")
    assert read_report(tmp_path).settings == ["seed"]


def test_going_on_tells_no_job_from_another_and_is_in_no_command(tmp_path: Path):
    write_job(tmp_path / "0", ["seed=0"])
    write_job(tmp_path / "1", ["seed=1", "checkpoint.resume=auto"])
    told = read_report(tmp_path)
    assert told.settings == ["seed"]
    assert told.rows[1].command == "python -m zerotrain seed=1"


def test_the_command_of_a_job_is_one_for_a_shell(tmp_path: Path):
    overrides = ["data.path=a b", "model.name='$(reboot)'"]
    refused(tmp_path / "0", overrides, "x")
    [row] = read_report(tmp_path).rows
    assert shlex.split(row.command) == ["python", "-m", "zerotrain", *overrides]


@pytest.mark.parametrize(
    ("fields", "losses", "status"),
    [
        ({}, [5.0, 4.0], "completed"),
        ({"final_val_loss": None}, [], "completed"),  # nothing was evaluated
        ({"final_val_loss": None}, [5.0, None], "diverged"),
        ({"final_train_loss": None}, [], "diverged"),
        ({"status": "failed", "error": "TrainingError: the gradient was not finite; lower"}, [5.0], "diverged"),
        ({"status": "failed", "error": "the disk is full"}, [5.0, None], "failed"),
        ({"status": "stopped", "final_val_loss": None}, [5.0, None], "stopped"),
        ({"status": "stopped", "stopped_by": "sweep.pruner"}, [5.0], "pruned"),
    ],
)
def test_a_loss_that_is_no_number_is_told_as_diverged(tmp_path: Path, fields, losses, status):
    write_job(tmp_path / "0", losses=losses, **fields)
    assert read_report(tmp_path).rows[0].status == status


def test_a_diverged_job_is_not_the_best(tmp_path: Path):
    write_job(tmp_path / "0", final_val_loss=2.0, final_train_loss=None)
    write_job(tmp_path / "1", final_val_loss=4.0)
    write_job(tmp_path / "2", final_val_loss=3.0)
    assert [row.job for row in read_report(tmp_path).ranked] == ["2", "1"]


def test_jobs_without_an_evaluation_are_compared_by_their_training_loss(tmp_path: Path):
    for place, loss in enumerate((4.0, 2.0)):
        write_job(tmp_path / str(place), losses=[], final_val_loss=None, final_train_loss=loss)
    told = read_report(tmp_path)
    assert (told.loss, told.ranked[0].job) == ("final_train_loss", "1")


def test_numbers_that_nothing_has_are_not_known(tmp_path: Path):
    memory = {"parameters": -1, "gradients": "many", "optimizer": 10**30, "peak": True, "theory": [1]}
    write_job(tmp_path / "0", memory_bytes=memory, comm_bytes_per_step=7)
    [row] = read_report(tmp_path).rows
    names = ("parameters_nbytes", "gradients_nbytes", "optimizer_nbytes", "peak_nbytes", "sent_nbytes")
    assert [row[name] for name in names] == [None] * 5


def test_of_an_error_the_first_line_is_told(tmp_path: Path):
    write_job(tmp_path / "0", status="failed", error="\n\n  rank 1 failed\x1b[2J\nTraceback ...")
    assert read_report(tmp_path).rows[0].error == "rank 1 failed\\x1b[2J"


def test_a_label_has_what_tells_the_completed_jobs_apart(tmp_path: Path):
    write_job(tmp_path / "0", ["optimizer.lr=0.1", "zero.stage=2"])
    write_job(tmp_path / "1", ["optimizer.lr=0.2", "zero.stage=2"])
    write_job(tmp_path / "2", ["optimizer.lr=0.2", "zero.stage=3"], status="failed", error="x")
    told = read_report(tmp_path)
    assert [told.label(row) for row in told.rows] == ["lr=0.1", "lr=0.2", "lr=0.2 stage=3"]
    assert told.label(*told.rows[:2]) == ""


def test_names_are_as_short_as_they_tell_settings_apart():
    names = ["optimizer.lr", "model._target_", "zero.stage", "a.b.size", "c.b.size", "size"]
    assert list(short_names(names).values()) == ["lr", "model", "stage", "a.b.size", "c.b.size", "size"]


# ---- folders and the journal


def test_runs_are_found_by_their_files_in_the_order_of_their_names(tmp_path: Path):
    for name in ("10", "2", "a/b/c", "1/checkpoints/step-1"):
        write_job(tmp_path / name)
    write_job(tmp_path / "deep" / "/".join("x" * 7))
    write_job(tmp_path / "1/own", ["seed=1"])
    (tmp_path / "1/result.json").write_text("{}")
    (tmp_path / "linked").symlink_to(tmp_path / "2")
    assert [str(path.relative_to(tmp_path)) for path in run_dirs_in(tmp_path)] == ["1", "2", "10", "a/b/c"]


def test_a_run_is_a_report_of_one_row(tmp_path: Path):
    told = read_report(write_job(tmp_path / "run"))
    assert [(row.job, row.settings) for row in told.rows] == [("run", {})]


@pytest.mark.parametrize(
    ("event", "status"),
    [(None, "unfinished"), ("begun", "failed"), ("ended", "stopped"), ("taken", "stopped"), ("refused", "stopped")],
)
def test_a_job_without_a_result_is_as_the_journal_says(tmp_path: Path, event: str | None, status: str):
    (write_job(tmp_path / "0") / "result.json").unlink()
    if event:
        said = None if event == "begun" else "stopped"
        told = {"event": event, "job": 0, "folder": "0", "status": said, "overrides": ["seed=3"], "error": "why"}
        journal(tmp_path, told)
    rows = read_report(tmp_path).rows
    assert [(row.job, row.status) for row in rows] == [("0", status)]


def test_a_result_wins_over_the_journal(tmp_path: Path):
    write_job(tmp_path / "0")
    journal(tmp_path, {"event": "ended", "job": 0, "folder": "0", "status": "failed", "error": "x"})
    assert [(row.status, row.error) for row in read_report(tmp_path).rows] == [("completed", None)]


def test_a_job_that_was_refused_another_s_folder_has_a_row(tmp_path: Path):
    write_job(tmp_path / "same", ["seed=0"])
    told = {"event": "refused", "job": 1, "folder": "same", "overrides": ["seed=1"], "error": "got same"}
    journal(
        tmp_path, {"event": "begun", "job": 0, "folder": "same", "overrides": ["seed=0"]}, told | {"status": "failed"}
    )
    rows = read_report(tmp_path).rows
    assert [(row.job, row.status, row.error) for row in rows] == [
        ("0 in same", "completed", None),
        ("1 in same", "failed", "got same"),
    ]


def test_of_folders_outside_nothing_is_read_and_lines_of_somebody_else_are_passed_over(tmp_path: Path):
    write_job(tmp_path / "sweep/0")
    write_job(tmp_path / "other")
    for folder in ("/etc", "../other", "0/../..", "", "a\0b", str(tmp_path / "other")):
        journal(tmp_path / "sweep", {"event": "ended", "job": 5, "folder": folder, "status": "failed", "error": "x"})
        with (tmp_path / "sweep/sweep.jsonl").open("a") as file:
            file.write('{"event": 1}\n[[[\n\xff\n{"event": "begun", "job"')
        rows = read_report(tmp_path / "sweep").rows
        assert [(row.status, row.error, row.weights_sha256) for row in rows] == [
            ("completed", None, "a" * 64),
            ("failed", "x", None),
        ]


def compared_by(folder: Path, objective: str, direction: str = "minimize") -> None:
    """Let a job's config say what its sweep compares."""
    with (folder / "config.yaml").open("a") as file:
        file.write(f"sweep:\n  objective: {objective}\n  direction: {direction}\n")


def test_the_objective_of_the_sweep_tells_the_best_job(tmp_path: Path):
    for place, (accuracy, sent) in enumerate([(0.5, 30), (0.7, 20), (None, 10)]):
        metrics = {"val_accuracy": accuracy} if accuracy else None
        write_job(
            tmp_path / str(place), val_metrics=metrics, comm_bytes_per_step={"sent": sent}, final_val_loss=1.0 + place
        )
    for objective, direction, best, value in [
        ("val_accuracy", "maximize", ["1", "0"], 0.7),
        ("[val_accuracy, steps]", "[maximize, minimize]", ["1", "0"], 0.7),
        ("comm_bytes_per_step.sent", "minimize", ["2", "1", "0"], 10),
        ("val_loss", "maximize", ["2", "1", "0"], 3.0),
        ("final_val_loss", "minimize", ["0", "1", "2"], 1.0),
        ("val_unknown", "maximize", ["0", "1", "2"], 1.0),
    ]:
        for place in range(3):
            config = tmp_path / f"{place}/config.yaml"
            config.write_text(config.read_text().partition("sweep:")[0])
            compared_by(tmp_path / str(place), objective, direction)
        told = read_report(tmp_path)
        assert [row.job for row in told.ranked] == best, objective
        assert told.ranked[0][told.loss] == value
        assert "sweep.objective" not in told.settings


def test_jobs_of_different_objectives_are_compared_by_their_loss(tmp_path: Path):
    for place, objective in enumerate(("tokens_per_s", "steps")):
        compared_by(write_job(tmp_path / str(place)), objective, "maximize")
    assert read_report(tmp_path).loss == "final_val_loss"


# Curves out of metrics.jsonl: some hundred points of any file, at the steps, tokens and seconds where they belong.


def written(folder: Path, *lines: dict) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_an_evaluation_lies_at_the_tokens_and_seconds_of_its_step(tmp_path: Path):
    trained = [{"step": step, "train_loss": 1.0, "tokens": 100 * step, "train_s": float(step)} for step in (10, 20)]
    evaluated = [{"step": step, "val_loss": 2.0} for step in (0, 15, 20, 25)]
    val = read_curves(written(tmp_path, *trained, *evaluated))["val_loss"]
    assert list(val.step) == [0, 15, 20, 25]
    assert list(val.tokens) == [0, 1500, 2000, 2000]
    assert list(val.train_s) == [0, 15, 20, 20]


def test_a_loss_that_is_no_number_is_nan_and_in_its_place(tmp_path: Path):
    lines = [{"step": 1, "train_loss": 3.0}, {"step": 2, "train_loss": None}]
    train = read_curves(written(tmp_path, *lines))["train_loss"]
    assert train.value[0] == 3.0
    assert math.isnan(train.value[-1])
    assert points_over(train, "tokens", 9) == []
    assert [step for step, _ in points_over(train, "step", 9)] == [1, 2]


def test_steps_that_come_a_second_time_are_left_out(tmp_path: Path):
    lines = [{"step": step, "train_loss": float(step)} for step in (1, 2, 3, 2, 3, 4)]
    train = read_curves(written(tmp_path, *lines))["train_loss"]
    assert list(train.step) == [1, 2, 3, 3, 4]


@pytest.mark.parametrize("content", ["{", '{"train_loss": 1}', f'{{"step": 1, "train_loss": {10**400}}}'])
def test_lines_that_are_none_of_ours_are_passed_over(tmp_path: Path, content: str):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{content}\n{{"step": 3, "train_loss": 2.0}}\n{content}')
    curves_read = read_curves(path)
    assert [*curves_read] == ["train_loss"]
    assert (list(curves_read["train_loss"].step), list(curves_read["train_loss"].value)) == ([3], [2.0])


def test_of_a_long_file_a_part_is_read_from_its_first_line_to_its_last(tmp_path: Path):
    path, num = tmp_path / "metrics.jsonl", 200_000
    line = '{"step": %9d, "train_loss": 2.0, "tokens": %12d}\n'
    with path.open("w") as file:
        for start in range(0, num, 1000):
            file.write("".join(line % (step, 100 * step) for step in range(start, start + 1000)))
    train = read_curves(path)["train_loss"]
    assert len(train.step) == curves.MAX_POINTS
    assert (train.step[0], train.step[-1]) == (0, num - 1)
    assert max(b - a for a, b in zip(train.step, train.step[1:])) < 2 * num / curves.NUM_WINDOWS  # noqa: B905


# What jobs have in common: weights, all settings but the seed, and what a setting explains of the loss.


def test_jobs_that_differ_in_the_seed_alone_have_a_mean_and_a_spread(tmp_path: Path):
    losses = {("0.1", 0): 3.0, ("0.1", 1): 3.5, ("0.1", 2): 4.0, ("0.2", 0): 2.0, ("0.2", 1): 2.2, ("0.3", 0): 9.0}
    for place, ((lr, seed), loss) in enumerate(losses.items()):
        write_job(tmp_path / str(place), [f"optimizer.lr={lr}", f"seed={seed}"], final_val_loss=loss)
    write_job(tmp_path / "6", ["optimizer.lr=0.1", "seed=3"], status="failed", error="x")
    for job in "78":
        write_job(tmp_path / job, ["optimizer.lr=0.4"])
    best, other = spreads(read_report(tmp_path))
    assert [[row.job for row in each.rows] for each in (best, other)] == [["3", "4"], ["0", "1", "2"]]
    assert (other.mean, other.least, other.most) == (3.5, 3.0, 4.0)
    assert other.deviation == pytest.approx(statistics.stdev([3.0, 3.5, 4.0]))


def test_groups_of_equal_weights_come_the_largest_first(tmp_path: Path):
    for place, sha256 in enumerate("abbcb"):
        write_job(tmp_path / str(place), weights_sha256=sha256 * 64)
    write_job(tmp_path / "5", weights_sha256=None)
    groups = equal_weights(read_report(tmp_path).rows)
    assert [[row.job for row in rows] for rows in groups.values()] == [["1", "2", "4"], ["0"], ["3"]]


def test_a_setting_explains_the_loss_that_follows_from_it_and_another_does_not(tmp_path: Path):
    for place in range(24):
        overrides = [f"zero.stage={place % 3}", f"optimizer.lr={place}", f"model.num_layers={place // 3 % 2}"]
        write_job(tmp_path / str(place), overrides, losses=[], final_val_loss=float(place % 3) + 0.001 * (place % 2))
    told = read_report(tmp_path)
    assert explained(told, "zero.stage") > 0.99
    assert explained(told, "model.num_layers") < 0.1
    assert 0 <= explained(told, "optimizer.lr") < 0.2
    of_each_another = replace(told, rows=told.rows[:3])  # a setting with a value for each job explains nothing
    assert explained(of_each_another, "zero.stage") is None
