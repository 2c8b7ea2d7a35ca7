"""A row for each job: what differs, how it ended, and the numbers that its files tell."""

import shlex
from pathlib import Path

import pytest

from tests.unit.report.folders import job, journal, refused
from zerotrain.report.rows import read_report, run_dirs_in, short_names


def test_settings_that_differ_are_told_by_their_dotted_names_those_of_command_lines_first(tmp_path: Path):
    job(tmp_path / "0", ["optimizer.lr=0.1"])
    path = job(tmp_path / "1", ["optimizer.lr=0.2"]) / "config.yaml"
    path.write_text(path.read_text().replace("stage: 2", "stage: 3"))
    told = read_report(tmp_path)
    assert told.settings == ["optimizer.lr", "zero.stage"]
    assert [row.settings for row in told.rows] == [
        {"optimizer.lr": 0.1, "zero.stage": 2},
        {"optimizer.lr": 0.2, "zero.stage": 3},
    ]


def test_a_job_without_a_config_is_told_by_its_command_line(tmp_path: Path):
    job(tmp_path / "0", ["zero.stage=1"])
    job(tmp_path / "1", ["zero.stage=2"])
    refused(tmp_path / "2", ["zero.stage=5"], "zero.stage: got 5; it must be 0, 1, 2 or 3")
    told = read_report(tmp_path)
    assert [row.settings for row in told.rows] == [{"zero.stage": 1}, {"zero.stage": 2}, {"zero.stage": 5}]
    assert (told.rows[2].status, told.rows[2]["ranks"]) == ("failed", None)


def test_a_setting_that_only_some_jobs_have_differs(tmp_path: Path):
    job(tmp_path / "0")
    path = job(tmp_path / "1") / "config.yaml"
    path.write_text(path.read_text().replace("num_layers: 4", "num_layers: 4\n  dropout: 0.5"))
    told = read_report(tmp_path)
    assert told.settings == ["model.dropout"]
    assert [row.settings for row in told.rows] == [{}, {"model.dropout": 0.5}]


def test_going_on_tells_no_job_from_another_and_is_in_no_command(tmp_path: Path):
    job(tmp_path / "0", ["seed=0"])
    job(tmp_path / "1", ["seed=1", "checkpoint.resume=auto"])
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
    job(tmp_path / "0", losses=losses, **fields)
    assert read_report(tmp_path).rows[0].status == status


def test_a_diverged_job_is_not_the_best(tmp_path: Path):
    job(tmp_path / "0", final_val_loss=2.0, final_train_loss=None)
    job(tmp_path / "1", final_val_loss=4.0)
    job(tmp_path / "2", final_val_loss=3.0)
    assert [row.job for row in read_report(tmp_path).ranked] == ["2", "1"]


def test_jobs_without_an_evaluation_are_compared_by_their_training_loss(tmp_path: Path):
    for place, loss in enumerate((4.0, 2.0)):
        job(tmp_path / str(place), losses=[], final_val_loss=None, final_train_loss=loss)
    told = read_report(tmp_path)
    assert (told.loss, told.ranked[0].job) == ("final_train_loss", "1")


def test_numbers_that_nothing_has_are_not_known(tmp_path: Path):
    memory = {"parameters": -1, "gradients": "many", "optimizer": 10**30, "peak": True, "theory": [1]}
    job(tmp_path / "0", memory_bytes=memory, comm_bytes_per_step=7)
    [row] = read_report(tmp_path).rows
    names = ("parameters_nbytes", "gradients_nbytes", "optimizer_nbytes", "peak_nbytes", "sent_nbytes")
    assert [row[name] for name in names] == [None] * 5


def test_of_an_error_the_first_line_is_told(tmp_path: Path):
    job(tmp_path / "0", status="failed", error="\n\n  rank 1 failed\x1b[2J\nTraceback ...")
    assert read_report(tmp_path).rows[0].error == "rank 1 failed\\x1b[2J"


def test_a_label_has_what_tells_the_completed_jobs_apart(tmp_path: Path):
    job(tmp_path / "0", ["optimizer.lr=0.1", "zero.stage=2"])
    job(tmp_path / "1", ["optimizer.lr=0.2", "zero.stage=2"])
    job(tmp_path / "2", ["optimizer.lr=0.2", "zero.stage=3"], status="failed", error="x")
    told = read_report(tmp_path)
    assert [told.label(row) for row in told.rows] == ["lr=0.1", "lr=0.2", "lr=0.2 stage=3"]
    assert told.label(*told.rows[:2]) == ""


def test_names_are_as_short_as_they_tell_settings_apart():
    names = ["optimizer.lr", "model._target_", "zero.stage", "a.b.size", "c.b.size", "size"]
    assert list(short_names(names).values()) == ["lr", "model", "stage", "a.b.size", "c.b.size", "size"]


# ---- folders and the journal


def test_runs_are_found_by_their_files_in_the_order_of_their_names(tmp_path: Path):
    for name in ("10", "2", "a/b/c", "1/checkpoints/step-1"):
        job(tmp_path / name)
    job(tmp_path / "deep" / "/".join("x" * 7))
    job(tmp_path / "1/own", ["seed=1"])
    (tmp_path / "1/result.json").write_text("{}")
    (tmp_path / "linked").symlink_to(tmp_path / "2")
    assert [str(path.relative_to(tmp_path)) for path in run_dirs_in(tmp_path)] == ["1", "2", "10", "a/b/c"]


def test_a_run_is_a_report_of_one_row(tmp_path: Path):
    told = read_report(job(tmp_path / "run"))
    assert [(row.job, row.settings) for row in told.rows] == [("run", {})]


@pytest.mark.parametrize(
    ("event", "status"),
    [(None, "unfinished"), ("begun", "failed"), ("ended", "stopped"), ("taken", "stopped"), ("refused", "stopped")],
)
def test_a_job_without_a_result_is_as_the_journal_says(tmp_path: Path, event: str | None, status: str):
    (job(tmp_path / "0") / "result.json").unlink()
    if event:
        said = None if event == "begun" else "stopped"
        told = {"event": event, "job": 0, "folder": "0", "status": said, "overrides": ["seed=3"], "error": "why"}
        journal(tmp_path, told)
    rows = read_report(tmp_path).rows
    assert [(row.job, row.status) for row in rows] == [("0", status)]


def test_a_result_wins_over_the_journal(tmp_path: Path):
    job(tmp_path / "0")
    journal(tmp_path, {"event": "ended", "job": 0, "folder": "0", "status": "failed", "error": "x"})
    assert [(row.status, row.error) for row in read_report(tmp_path).rows] == [("completed", None)]


def test_a_job_that_was_refused_another_s_folder_has_a_row(tmp_path: Path):
    job(tmp_path / "same", ["seed=0"])
    told = {"event": "refused", "job": 1, "folder": "same", "overrides": ["seed=1"], "error": "got same"}
    journal(
        tmp_path, {"event": "begun", "job": 0, "folder": "same", "overrides": ["seed=0"]}, told | {"status": "failed"}
    )
    rows = read_report(tmp_path).rows
    assert [(row.job, row.status, row.error) for row in rows] == [
        ("0 in same", "completed", None),
        ("1 in same", "failed", "got same"),
    ]


def test_a_job_that_was_refused_with_a_result_of_its_own_has_one_row(tmp_path: Path):
    refused(tmp_path / "0", ["zero.stage=5"], "zero.stage: got 5")
    journal(tmp_path, {"event": "refused", "job": 0, "folder": "0", "overrides": ["zero.stage=5"], "error": "other"})
    assert [row.error for row in read_report(tmp_path).rows] == ["zero.stage: got 5"]


def test_of_folders_outside_nothing_is_read_and_lines_of_somebody_else_are_passed_over(tmp_path: Path):
    job(tmp_path / "sweep/0")
    job(tmp_path / "other")
    for folder in ("/etc", "../other", "0/../..", "", "a\0b", str(tmp_path / "other")):
        journal(tmp_path / "sweep", {"event": "ended", "job": 5, "folder": folder, "status": "failed", "error": "x"})
        with (tmp_path / "sweep/sweep.jsonl").open("a") as file:
            file.write('{"event": 1}\n[[[\n\xff\n{"event": "begun", "job"')
        rows = read_report(tmp_path / "sweep").rows
        assert [(row.status, row.error, row.weights_sha256) for row in rows] == [
            ("completed", None, "a" * 64),
            ("failed", "x", None),
        ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[" * 9000,
        b"seed: &a 1\nzero: *a\n",
        b"a:\n b: [1\n",
        b"- 1\n",
        b"seed: !!python/object:os.system 1\n",
    ],
)
def test_a_config_that_cannot_be_read_is_none(tmp_path: Path, content: bytes):
    (job(tmp_path / "0") / "config.yaml").write_bytes(content)
    assert read_report(tmp_path).rows[0].status == "completed"


def compared_by(folder: Path, objective: str, direction: str = "minimize") -> None:
    """Let a job's config say what its sweep compares."""
    with (folder / "config.yaml").open("a") as file:
        file.write(f"sweep:\n  objective: {objective}\n  direction: {direction}\n")


def test_the_objective_of_the_sweep_tells_the_best_job(tmp_path: Path):
    for place, (accuracy, sent) in enumerate([(0.5, 30), (0.7, 20), (None, 10)]):
        metrics = {"val_accuracy": accuracy} if accuracy else None
        job(tmp_path / str(place), val_metrics=metrics, comm_bytes_per_step={"sent": sent}, final_val_loss=1.0 + place)
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
        compared_by(job(tmp_path / str(place)), objective, "maximize")
    assert read_report(tmp_path).loss == "final_val_loss"
