"""Sweeps that people act on: what fails is told at once and runs again, what is done is taken as it is, and nothing is
lost when a sweep is cut off."""

import json
import os
import pty
import re
import select
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import REPOSITORY, Command, result_of

from tests.sweep.conftest import SETTINGS

EIGHT = "well0,raises,well1,killed,refused,well2,no_number,well3"
NOT_WELL = {"raises", "killed", "refused", "no_number"}
LAUNCHERS = {
    "basic": (),
    "joblib": ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
    "submitit": ("hydra/launcher=submitit_local",),
}


def launcher(name: str) -> tuple[str, ...]:
    if name != "basic":
        pytest.importorskip(f"hydra_plugins.hydra_{name}_launcher")
    return LAUNCHERS[name]


def journal_of(folder: Path) -> list[dict[str, Any]]:
    """Its events, but for the places of jobs that are yet to begin."""
    events = [json.loads(line) for line in (folder / "sweep/sweep.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] != "placed"]


def case_of(event: dict[str, Any]) -> str:
    [case] = [each.removeprefix("+case=") for each in event["overrides"] if each.startswith("+case=")]
    return str(case)


def said_of(events: list[dict[str, Any]], *kinds: str) -> dict[str, str | None]:
    """The status of each case in the events of some kinds; each has one."""
    found = [(case_of(event), event["status"]) for event in events if event["event"] in kinds]
    assert len(found) == len(dict(found)), found
    return dict(found)


def rows_of(command: Command, num: int) -> dict[str, str]:
    """The status of each case in the table."""
    lines = command.stdout.splitlines()
    [first] = [place for place, line in enumerate(lines) if line.split()[:2] == ["job", "overrides"]]
    words = [line.split() for line in lines[first + 2 : first + 2 + num]]
    of_case = [row[3:5] if row[1] == "in" else row[1:3] for row in words]
    return {case.removeprefix("+case="): status for case, status in of_case}


def state_of(folder: Path) -> dict[Path, tuple[bytes, int]]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.thinned(3)
def test_eight_jobs_of_which_four_do_not_do_well(sweep: Callable[..., Command], tmp_path: Path, name: str):
    settings = launcher(name)
    first = sweep(EIGHT, *settings)
    assert first.wait() == 1, first.stderr
    events = journal_of(tmp_path)
    well = {f"well{number}": "completed" for number in range(4)}
    expected = {**well, "raises": "failed", "killed": "failed", "no_number": "diverged"}
    assert said_of(events, "ended") == expected
    assert said_of(events, "refused") == {"refused": "failed"}
    assert rows_of(first, 8) == {**expected, "refused": "failed"}
    of_causes = [line.split(": ", 1)[1] for line in first.stderr.splitlines() if line.startswith("job ")]
    causes = [
        "rank 1 failed: ValueError: the third batch is unlucky",
        "rank 1 was killed by SIGKILL",
        "zero.stage: got 9",
    ]
    assert len(of_causes) == 3
    assert all(any(cause in line for line in of_causes) for cause in causes)
    assert "Error executing job" not in first.stderr
    assert "(8/8, 3 failed, best " in first.stdout
    assert "step 4/4" not in first.stdout
    folders = {case_of(event): tmp_path / "sweep" / event["folder"] for event in events}
    assert "step 4/4" in (folders["well0"] / "job.log").read_text()
    for event in (each for each in events if each["status"] == "completed"):
        assert event["final_val_loss"] == result_of(folders[case_of(event)])["final_val_loss"]
    before = {case: state_of(folders[case]) for case in (*well, "no_number")}

    again = sweep(EIGHT, *settings)
    assert again.wait() == 1, again.stderr
    events = journal_of(tmp_path)[len(events) :]
    assert said_of(events, "taken") == well
    assert said_of(events, "begun") == dict.fromkeys(["raises", "killed", "no_number"])
    assert said_of(events, "ended") == {"raises": "failed", "killed": "completed", "no_number": "diverged"}
    assert said_of(events, "refused") == {"refused": "failed"}
    assert {case: state_of(folders[case]) for case in before} == before
    assert rows_of(again, 8)["killed"] == "completed"
    result = result_of(folders["killed"])
    assert result["resumed_from"].endswith("step-00000002")
    never_killed = sweep("killed", "hydra.sweep.dir=another", "checkpoint.every=null")
    assert never_killed.wait() == 0, never_killed.stderr
    assert result["weights_sha256"] == result_of(tmp_path / "another/0")["weights_sha256"]

    seen = len(journal_of(tmp_path))
    third = sweep(EIGHT.replace("raises", "one_more,raises"), *settings, "sweep.again=none")
    assert third.wait() == 1, third.stderr
    events = journal_of(tmp_path)[seen:]
    assert said_of(events, "begun") == {"one_more": None}
    assert len(said_of(events, "taken")) == 8
    [folder] = [event["folder"] for event in events if event["event"] == "begun"]
    assert folder == "1_2"
    assert third.wait_until_gone() == []


def test_a_tracker_is_told_the_sweep_and_the_journal_the_run(sweep, tmp_path, monkeypatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    command = sweep("well0,refused", "logger=wandb", "callbacks.wandb.mode=offline", "launch.nproc_per_node=1")
    assert command.wait() == 1, command.stderr
    [file] = (tmp_path / "sweep/0/wandb").glob("offline-run-*/*.wandb")
    content, run_id = file.read_bytes(), json.loads((tmp_path / "sweep/0/wandb.json").read_text())["id"]
    assert b"+case=well0" in content
    assert f"{tmp_path.name}/sweep".encode() in content
    ids = {case_of(event): event["trackers"] for event in journal_of(tmp_path) if event["event"] != "begun"}
    assert ids == {"well0": {"wandb": run_id}, "refused": {}}


def test_a_job_that_submitit_is_to_queue_again_is_saved_before_and_goes_on(sweep, tmp_path) -> None:
    command = sweep("pauses", "checkpoint.every=null", *launcher("submitit"))
    command.wait_for_text(tmp_path / "sweep/0/ranks/1.log", "pausing")
    [begun] = journal_of(tmp_path)
    os.kill(begun["pid"], signal.SIGUSR2)
    assert command.wait() == 0, command.stderr
    said = [(event["event"], event["status"]) for event in journal_of(tmp_path)]
    assert said == [("begun", None), ("ended", "stopped"), ("begun", None), ("ended", "completed")]
    assert result_of(tmp_path / "sweep/0")["resumed_from"] is not None


@pytest.mark.parametrize("end", ["Ctrl-C", "kill -9"])
def test_a_sweep_that_is_cut_off_goes_on_with_its_job(sweep: Callable[..., Command], tmp_path: Path, end: str):
    cases = "well0,pauses,refused,well1"
    first = sweep(cases)
    first.wait_for_text(tmp_path / "sweep/1/ranks/1.log", "pausing")
    if end == "Ctrl-C":
        first.send_signal_as_terminal(signal.SIGINT)
        assert first.wait() == 130
        assert rows_of(first, 2) == {"well0": "completed", "pauses": "stopped"}
        assert "to go on: the same command with hydra.sweep.dir=sweep, " in first.stdout
    else:
        first.kill()
        first.wait()
    assert first.wait_until_gone() == []
    events = journal_of(tmp_path)
    ended = {"well0": "completed"} | ({"pauses": "stopped"} if end == "Ctrl-C" else {})
    assert said_of(events, "ended") == ended
    again = sweep(cases)
    assert again.wait() == 1, again.stderr
    events = journal_of(tmp_path)[len(events) :]
    assert said_of(events, "taken") == {"well0": "completed"}
    assert said_of(events, "ended") == {"pauses": "completed", "well1": "completed"}
    assert result_of(tmp_path / "sweep/1")["resumed_from"] is not None
    assert rows_of(again, 4) == {**said_of(events, "taken", "ended"), "refused": "failed"}


def test_while_it_runs_a_terminal_shows_its_progress_and_the_report_is_kept(zygote, sweep, tmp_path) -> None:
    ours, theirs = pty.openpty()
    given = ["-m", "--config-dir=conf", *SETTINGS, "hydra.sweep.dir=sweep", "sweep.output=summary"]
    command = zygote.start(
        [sys.executable, str(REPOSITORY / "launch.py"), *given, "+case=refused,pauses,one_more"],
        cwd=tmp_path,
        env={**zygote.environment, "TERM": "xterm"},
        stdout=os.ttyname(theirs),
        stderr=str(tmp_path / "err"),
    )
    shown, report = "", ""
    while command.poll() is None:
        while select.select([ours], [], [], 0.05)[0]:
            shown += os.read(ours, 65536).decode()
        if not report and "job 1 step " in shown:
            report = (tmp_path / "sweep/sweep.csv").read_text()
    os.close(ours)
    os.close(theirs)
    assert command.returncode == 1, (tmp_path / "err").read_text()
    assert re.match(r"0,[^,]*,failed,", report.splitlines()[1])
    assert re.search(r"\r\x1b\[Kjob 1 step \d/4 loss \d\.\d{3}", shown)
    assert re.search(r"\r\x1b\[Kjob 1 completed with loss ", shown)


def test_two_drivers_of_one_folder_run_each_job_once(sweep: Callable[..., Command], tmp_path: Path):
    cases = "well0,well1,well2,well3,one_more,pauses"
    drivers = [sweep(cases, "launch.nproc_per_node=1") for _ in range(2)]
    assert [driver.wait() for driver in drivers] == [0, 0], [driver.stderr for driver in drivers]
    events = journal_of(tmp_path)
    assert Counter(map(case_of, (event for event in events if event["event"] == "begun"))) == Counter(cases.split(","))
    assert said_of(events, "ended") == dict.fromkeys(cases.split(","), "completed")
    assert len({event["pid"] for event in events if event["event"] != "begun"}) == 2
    lines = (tmp_path / "sweep/sweep.csv").read_text().splitlines()
    assert len(lines) == 7
    assert not list((tmp_path / "sweep").glob("*.tmp"))
    for driver in drivers:
        assert rows_of(driver, 6).keys() == set(cases.split(","))
        assert set(rows_of(driver, 6).values()) <= {"completed", "running"}
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir() if path.is_dir()) == list("012345")


def test_a_machine_on_which_all_fails_ends_the_sweep(sweep: Callable[..., Command], tmp_path: Path):
    command = sweep(
        "raises", "seed=0,1,2,3", "launch.nproc_per_node=1", "+model.rank=0", "sweep.max_failures_in_a_row=2"
    )
    assert command.wait() == 1
    assert "2 jobs have failed one after the other, so the sweep ends" in command.stderr
    assert len(said := journal_of(tmp_path)) == 4
    assert [event["status"] for event in said if event["event"] == "ended"] == ["failed", "failed"]
    assert not (tmp_path / "sweep/2").exists()


def test_the_latest_sweep_goes_on_by_that_name(sweep: Callable[..., Command], tmp_path: Path):
    none = sweep("refused", "hydra.sweep.dir=latest")
    assert none.wait() == 2
    assert none.stderr == "hydra.sweep.dir: got latest, but there is no sweep in multirun/ yet; leave it out\n"
    for name in ("2026-01-01/10-00-00", "2026-01-02/09-00-00"):
        (tmp_path / "multirun" / name).mkdir(parents=True)
        (tmp_path / "multirun" / name / "sweep.jsonl").touch()
    command = sweep("refused", "hydra.sweep.dir=latest")
    assert command.wait() == 1
    assert (tmp_path / "multirun/2026-01-02/09-00-00/sweep.jsonl").stat().st_size
    assert not (tmp_path / "multirun/2026-01-01/10-00-00/sweep.jsonl").stat().st_size
