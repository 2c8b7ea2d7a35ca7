"""A sweep whose jobs submitit queues in a real Slurm: one whose time is up, and then preempted, is saved at the signal
and goes on by itself."""

import os
import re
import sys
from pathlib import Path

import pytest
from commands import REPOSITORY, Command, result_of

from tests.cluster.jobs import Job, num_steps, preempt, until
from tests.sweep.conftest import CASES, SETTINGS
from tests.sweep.test_sweeps import journal_of, rows_of, said_of, state_of

WAITS = """model: {_target_: waiting.WaitingMLP}
train: {log_every: 1, eval_every: 0}
checkpoint: {every: null}"""
EIGHT = ("well0", "raises", "well1", "killed", "refused", "well2", "no_number", "waits")
SUBMITIT = (
    "hydra/launcher=submitit_slurm",
    "hydra.launcher.partition=low",
    "hydra.launcher.cpus_per_task=2",
    "hydra.launcher.array_parallelism=4",
    "hydra.launcher.timeout_min=3",
    "hydra.launcher.signal_delay_s=120",
    "hydra.launcher.max_num_timeout=1",
    "launch.requeue=true",
)
ENDED = {
    **dict.fromkeys(("well0", "well1", "well2"), "completed"),
    **dict.fromkeys(("raises", "killed"), "failed"),
    "no_number": "diverged",
}
"""What becomes of the others."""


@pytest.mark.usefixtures("in_slurm")
def test_eight_jobs_of_which_some_fail_and_one_is_preempted(tmp_path: Path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    (tmp_path / "conf/case").mkdir(parents=True)
    for name, settings in {**CASES, "waits": WAITS}.items():
        (tmp_path / f"conf/case/{name}.yaml").write_text(f"# @package _global_\n{settings}\n")

    def sweep(*arguments: str) -> Command:
        given = ("-m", "--config-dir=conf", *SETTINGS, "train.max_steps=100", *arguments)
        return Command(
            [sys.executable, str(REPOSITORY / "launch.py"), *given], tmp_path, {"PYTHONPATH": os.environ["PYTHONPATH"]}
        )

    command = sweep(f"+case={','.join(EIGHT)}", "hydra.sweep.dir=sweep", *SUBMITIT)
    waits = tmp_path / "sweep/7"
    command.wait_for_text(waits / "ranks/0.log", "step 1/", timeout_s=300)
    [number] = {path.name.partition("_")[0] for path in (tmp_path / "sweep/.submitit").glob("[0-9]*_*")}
    job = Job(tmp_path, f"{number}_7")

    def await_stops(*signals: str) -> None:
        until(lambda: len(stops_of(tmp_path)) == len(signals), job)
        assert [by for by, _ in stops_of(tmp_path)] == list(signals)

    await_stops("SIGUSR2")
    until(lambda: job.begin_at_once() or num_steps(waits) > stops_of(tmp_path)[0][1], job)
    preempt(3)
    await_stops("SIGUSR2", "SIGTERM")
    (tmp_path / "go_on").touch()
    until(lambda: job.begin_at_once() or command.process.poll() is not None, job)
    assert command.wait() == 1, command.stderr
    of_waiting = [(event["event"], event["status"]) for event in journal_of(tmp_path) if event["folder"] == "7"]
    begun, stopped = ("begun", None), ("ended", "stopped")
    assert of_waiting == [begun, stopped, begun, stopped, begun, ("ended", "completed")]
    assert rows_of(command, 8) == {**ENDED, "refused": "failed", "waits": "completed"}
    causes = [line for line in command.stderr.splitlines() if line.startswith("job ")]
    told = ("ValueError: the third batch is unlucky", "rank 1 was killed by SIGKILL", "zero.stage: got 9")
    assert all(any(cause in line for line in causes) for cause in told), causes
    result, steps = result_of(waits), [step for _, step in stops_of(tmp_path)]
    assert [int(path.name[5:]) for path in sorted((waits / "checkpoints").iterdir())] == steps  # and at no other time
    assert result["resumed_from"].endswith(f"step-{steps[-1]:08d}")
    done = ("well0", "well1", "well2", "waits")
    before = {case: state_of(tmp_path / f"sweep/{EIGHT.index(case)}") for case in done}
    seen = len(journal_of(tmp_path))
    again = sweep(f"+case={','.join(EIGHT)}", "hydra.sweep.dir=sweep", *SUBMITIT)
    assert again.wait() == 1, again.stderr
    events = journal_of(tmp_path)[seen:]
    assert said_of(events, "taken") == dict.fromkeys(done, "completed")
    assert said_of(events, "ended") == {"raises": "failed", "killed": "completed", "no_number": "diverged"}
    assert {case: state_of(tmp_path / f"sweep/{EIGHT.index(case)}") for case in done} == before
    undisturbed = sweep("+case=waits", "hydra.sweep.dir=another")
    assert undisturbed.wait() == 0, undisturbed.stderr
    assert result["weights_sha256"] == result_of(tmp_path / "another/0")["weights_sha256"]


def stops_of(folder: Path) -> list[tuple[str, int]]:
    """The signal and the step of each stop of a job, as the journal tells them."""
    errors = [event["error"] for event in journal_of(folder) if event["status"] == "stopped"]
    found = [re.fullmatch(r"stopped by (\w+) after step (\d+) of 100", error) for error in errors]
    return [(each[1], int(each[2])) for each in found if each is not None]
