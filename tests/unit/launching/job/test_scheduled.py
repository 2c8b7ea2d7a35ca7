"""What a run does in a job of a scheduler: its exit code, where it goes on, and how it is queued again."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from zerotrain.checkpoint.folder import CHECKPOINTS
from zerotrain.config.compose import register_schema, slurm_job
from zerotrain.config.schema import Config
from zerotrain.launching import resuming as scheduled
from zerotrain.launching.resuming import go_on_if_queued_again, queue_again, set_code_when_stopped
from zerotrain.training.result import code_of_stop

JOB = {"SLURM_JOB_ID": "12"}
ARRAY = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    ("environment", "given", "code"),
    [
        ({}, None, None),
        (JOB, None, 85),
        ({"JOB_COMPLETION_INDEX": "0"}, None, 85),
        ({"SLURM_JOB_ID": ""}, None, None),
        (JOB, 0, 0),
        ({}, 99, 99),
    ],
)
def test_the_code_of_a_stop_is_85_in_a_job_of_a_scheduler_unless_another_is_given(environment, given, code):
    config = Config()
    config.launch.exit_code_when_stopped = given
    set_code_when_stopped(config, environment)
    assert config.launch.exit_code_when_stopped == code


@pytest.mark.parametrize(
    ("by", "given", "code"),
    [
        ("SIGTERM", None, 0),
        ("SIGUSR1", None, 0),
        ("SIGINT", None, 130),
        ("SIGINT", 85, 85),
        ("SIGUSR2", 85, 85),
        ("control.yaml", 85, 0),
        ("callbacks.early_stopping", 85, 0),
        ("sweep.pruner", 85, 0),
    ],
)
def test_only_a_signal_asks_others_to_try_again(by: str, given: int | None, code: int):
    assert code_of_stop(by, given) == code


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, None),
        (JOB, "12"),
        (ARRAY, "12_3"),
        ({"SLURM_JOB_ID": "../../etc"}, None),
        ({"SLURM_JOB_ID": "١٢"}, None),
        ({**ARRAY, "SLURM_ARRAY_TASK_ID": "3/.."}, None),
    ],
)
def test_a_job_has_the_name_that_scontrol_knows(environment: dict[str, str], job: str | None):
    assert slurm_job(environment) == job


def test_a_folder_is_named_by_the_job_and_else_by_the_time(monkeypatch: pytest.MonkeyPatch):
    register_schema()
    names = {}
    for name, environment in (("alone", {}), ("job", JOB), ("array", ARRAY)):
        for each in ARRAY:
            monkeypatch.delenv(each, raising=False)
        for each, value in environment.items():
            monkeypatch.setenv(each, value)
        names[name] = OmegaConf.create({"dir": "outputs/${slurm_job:${time}/x}", "time": "10-00"}).dir
    assert names == {"alone": "outputs/10-00/x", "job": "outputs/slurm-12", "array": "outputs/slurm-12_3"}


@pytest.mark.parametrize(
    ("restarts", "resume", "saved", "after"),
    [
        ("0", None, True, (None, True)),
        (None, None, True, (None, True)),
        ("-1", None, True, (None, True)),
        ("1", None, False, ("auto", False)),
        ("2", None, True, ("auto", False)),
        ("1", "elsewhere", True, ("auto", False)),
        ("1", "elsewhere", False, ("elsewhere", False)),
        ("1", "auto", True, ("auto", False)),
    ],
)
def test_a_job_that_is_queued_again_goes_on_in_its_folder_and_erases_nothing(
    tmp_path: Path, restarts: str | None, resume: str | None, saved: bool, after: tuple[str | None, bool]
):
    config = Config()
    config.checkpoint.resume, config.launch.overwrite = resume, True
    if saved:
        folder = tmp_path / CHECKPOINTS / "step-00000003"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    line = go_on_if_queued_again(config, tmp_path, {} if restarts is None else {"SLURM_RESTART_COUNT": restarts})
    assert (config.checkpoint.resume, config.launch.overwrite) == after
    assert (line is None) == after[1]


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A scontrol that notes what it is asked for, shows the file `shown`, and fails where `refuses` lies there."""
    program = tmp_path / "bin/scontrol"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\ncd {tmp_path}\n[ "$1" = show ] && exec cat shown\n'
        'echo "$@" >> asked\n[ ! -e refuses ] || { echo no >&2; exit 1; }\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(scheduled, "_HEAD_START_S", 0.0)
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


def asking() -> Config:
    config = Config()
    config.launch.requeue, config.launch.exit_code_when_stopped = True, 85
    return config


@pytest.mark.parametrize(("environment", "job"), [(JOB, "12"), (ARRAY, "12_3")])
@pytest.mark.parametrize("by", ["SIGUSR1", "SIGUSR2"])
def test_a_job_that_a_signal_ahead_of_its_end_has_stopped_is_queued_again(scontrol, environment, job: str, by: str):
    assert queue_again(asking(), by, environment) is None
    assert (scontrol / "asked").read_text() == f"requeue {job}\n"


@pytest.mark.parametrize(
    ("shown", "again"),
    [
        (
            "JobId=12 JobState=RUNNING Reason=None\n PreemptEligibleTime=2026 PreemptTime=2026-11-24",
            True,
        ),
        ("JobId=12 JobState=RUNNING Reason=None PreemptEligibleTime=2026 PreemptTime=None", False),
        ("JobId=12 JobState=COMPLETING Reason=None PreemptTime=2026-11-24", False),
        ("JobId=12 JobState=COMPLETING Reason=TimeLimit PreemptTime=None", True),
        ("JobId=12 JobState=CANCELLED Reason=None", False),
    ],
)
def test_a_job_that_sigterm_has_come_to_is_where_slurm_has_a_reason_and_will_not_itself(scontrol, shown, again: bool):
    (scontrol / "shown").write_text(shown)
    assert queue_again(asking(), "SIGTERM", JOB) is None
    assert (scontrol / "asked").exists() == again


@pytest.mark.parametrize("by", ["SIGINT", "control.yaml"])
def test_a_job_that_was_stopped_by_hand_is_not(scontrol, by: str):
    assert queue_again(asking(), by, JOB) is None
    assert queue_again(Config(), "SIGUSR1", JOB) is None
    assert not (scontrol / "asked").exists()


def test_why_a_job_is_not_queued_again_is_a_sentence(scontrol, monkeypatch: pytest.MonkeyPatch):
    others = "exit code 85 leaves it to others to start the run again"
    (scontrol / "refuses").touch()
    assert queue_again(asking(), "SIGUSR1", JOB) == f"launch.requeue: scontrol requeue 12: no; {others}"
    line = queue_again(asking(), "SIGUSR1", {})
    assert line == f"launch.requeue: this is no job of Slurm (SLURM_JOB_ID is not set); {others}"
    monkeypatch.setenv("PATH", str(scontrol))
    line = queue_again(asking(), "SIGUSR1", JOB)
    assert line == f"launch.requeue: job 12 is not queued again, since there is no scontrol here; {others}"
