"""A job of a sweep is found by its settings, and gets a folder in which nothing of another job lies."""

import multiprocessing
import os
import threading
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from zerotrain.config.compose import config_hash, save_config
from zerotrain.config.schema import Config, LaunchConfig
from zerotrain.errors import ConfigError
from zerotrain.launching.job import locked
from zerotrain.launching.sweep import member as slots
from zerotrain.launching.sweep.member import SLOTS, JobPlace, WantedPlace, devices_of_own, take_place
from zerotrain.launching.sweep.sweep import Sweep
from zerotrain.report.journal import JobEvent, SweepJournal
from zerotrain.training.result import RunResult


def config_of(seed: int, **launch) -> Config:
    return Config(seed=seed, launch=LaunchConfig(**launch))


def leave(folder: Path, name: str, seed: int, status: str | None = "completed", event: str = "ended", **fields) -> Path:
    """What a job has left."""
    run_dir = folder / name
    run_dir.mkdir()
    config = config_of(seed)
    said = JobEvent(
        event=event, job=0, folder=name, hash=config_hash(config), overrides=[f"seed={seed}"], status=status
    )
    SweepJournal(folder).append(said)
    if event != "refused":
        save_config(config, run_dir / "config.yaml")
    if status is not None:
        losses = {"final_train_loss": 2.0, "final_val_loss": 2.1} | fields
        RunResult(world_size=1, status=status, config_hash=config_hash(config), **losses).write(run_dir)
    return run_dir


def place_of(
    folder: Path, seed: int, number: int = 0, *, may_move=True, earlier=True, again="failed", **launch
) -> JobPlace:
    """The place that a job gets in a sweep that has just begun."""
    config, name = config_of(seed, **launch), folder / str(number)
    sweep = Sweep(folder=folder, start=SweepJournal(folder).nbytes if earlier else 0, again=again)
    name.mkdir(exist_ok=True)
    identity = sweep.identity(config_hash(config), [f"seed={seed}"])
    wanted = WantedPlace(sweep=sweep, identity=identity, config=config, hydra_dir=name, may_move=may_move)
    with ExitStack() as stack, sweep.journal.held() as book:
        return take_place(wanted, book, stack)


def test_a_completed_job_is_taken_whatever_number_it_had(tmp_path: Path):
    leave(tmp_path, "0", seed=1)
    place = place_of(tmp_path, seed=1, number=5)
    assert place.run_dir == tmp_path / "0"
    assert place.result is not None
    assert place.result["final_val_loss"] == 2.1


def test_a_new_job_whose_number_is_taken_gets_a_free_folder(tmp_path: Path):
    for name, seed, status in (("0", 1, "completed"), ("0_2", 2, "failed")):
        leave(tmp_path, name, seed, status)
    assert place_of(tmp_path, seed=3) == JobPlace(run_dir=tmp_path / "0_3")
    assert place_of(tmp_path, seed=4, number=1) == JobPlace(run_dir=tmp_path / "1")


@pytest.mark.parametrize("what", ["nothing", "what another job has left", "its own"])
def test_of_the_folder_that_hydra_has_made_an_empty_one_is_left_behind_for_nobody(tmp_path: Path, what: str):
    leave(tmp_path, "0", seed=1)
    if what != "nothing":
        leave(tmp_path, "5", seed=1 if what == "its own" else 2)
    place = place_of(tmp_path, seed=1, number=5)
    assert place.run_dir == tmp_path / ("5" if what == "its own" else "0")
    assert (tmp_path / "5").exists() == (what != "nothing")


@pytest.mark.parametrize("what", ["nothing", "half a config", "a config"])
def test_a_job_that_another_process_has_just_begun_is_left_to_it(tmp_path: Path, what: str):
    """With half a config.yaml there it was begun once more, in another folder (2026-11-24)."""
    run_dir = leave(tmp_path, "0", seed=1, status=None, event="begun")
    if what != "a config":
        (run_dir / "config.yaml").unlink()
    if what == "half a config":
        (run_dir / "config.yaml").write_text("seed: 1\nzero: {stage")
    with locked(run_dir, job=config_hash(config_of(1))):
        assert place_of(tmp_path, seed=1) == JobPlace(run_dir=run_dir, runs_elsewhere=True)


def test_a_job_of_another_number_that_is_about_to_begin_is_left_to_its_process(tmp_path: Path):
    """Two trials of the same values, of two drivers of a study, both trained (2026-11-24)."""
    with locked(tmp_path / "2", job=config_hash(config_of(1))):
        assert place_of(tmp_path, seed=1, number=3) == JobPlace(run_dir=tmp_path / "2", runs_elsewhere=True)
        assert place_of(tmp_path, seed=2, number=3) == JobPlace(run_dir=tmp_path / "3")
        assert place_of(tmp_path, seed=2, number=2) == JobPlace(run_dir=tmp_path / "2_2")


def test_a_folder_that_another_job_now_runs_in_is_not_taken_for_the_own(tmp_path: Path):
    leave(tmp_path, "2", seed=1, status=None, event="refused")
    with locked(tmp_path / "2", job=config_hash(config_of(2))):
        save_config(config_of(2), tmp_path / "2/config.yaml")
        assert place_of(tmp_path, seed=1, number=3) == JobPlace(run_dir=tmp_path / "3")


def test_a_folder_of_another_config_than_the_journal_says_is_not_taken(tmp_path: Path):
    leave(tmp_path, "0", seed=1)
    save_config(config_of(9), tmp_path / "0/config.yaml")
    RunResult(world_size=1, status="completed", config_hash="another").write(tmp_path / "0")
    assert place_of(tmp_path, seed=1, number=0) == JobPlace(run_dir=tmp_path / "0_2")


@pytest.mark.parametrize("status", ["failed", "stopped", None])
@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_what_did_not_complete_goes_on_where_it_lies(tmp_path: Path, status: str | None, has_checkpoint: bool):
    run_dir = leave(tmp_path, "0", seed=1, status=status)
    if has_checkpoint:
        (run_dir / "checkpoints/step-00000002").mkdir(parents=True)
    assert place_of(tmp_path, seed=1, number=3) == JobPlace(run_dir=run_dir, goes_on=has_checkpoint)


EARLY = {"status": "stopped", "stopped_by": "callbacks.early_stopping"}
NAN = {"final_train_loss": None, "final_val_loss": None}
NOT_FINITE = {"status": "failed", "error": "rank 0 failed: TrainingError: the gradient was not finite"}


@pytest.mark.parametrize(
    ("left", "again", "folder", "is_taken"),
    [
        ({}, "none", "0", True),
        ({}, "all", "0_2", False),
        ({"status": "failed"}, "none", "0", True),
        ({"status": "failed"}, "all", "0_2", False),
        ({"status": "stopped"}, "none", "0", False),
        (EARLY, "failed", "0", True),
        (EARLY | {"stopped_by": "control.yaml"}, "failed", "0", False),
        (NAN, "failed", "0_2", False),
        (NAN, "none", "0", True),
        (NOT_FINITE, "failed", "0", False),
        (NOT_FINITE, "none", "0", True),
    ],
)
def test_what_runs_again(tmp_path: Path, left: dict, again: str, folder: str, is_taken: bool):
    leave(tmp_path, "0", seed=1, **left)
    place = place_of(tmp_path, seed=1, again=again)
    assert (place.run_dir.name, place.result is not None) == (folder, is_taken)


def test_a_job_that_is_requeued_goes_on_though_all_run_again(tmp_path: Path):
    leave(tmp_path, "0", seed=1, status="stopped")
    assert place_of(tmp_path, seed=1, again="all", earlier=False).run_dir == tmp_path / "0"


def test_a_refused_job_makes_room_for_one_that_is_mended(tmp_path: Path):
    leave(tmp_path, "0", seed=1, status="failed", event="refused")
    assert place_of(tmp_path, seed=2) == JobPlace(run_dir=tmp_path / "0")


def test_a_job_that_another_process_runs_is_left_to_it(tmp_path: Path):
    run_dir = leave(tmp_path, "0", seed=1, status=None)
    with locked(run_dir, job="anything"):
        assert place_of(tmp_path, seed=1, number=4) == JobPlace(run_dir=run_dir, runs_elsewhere=True)


def test_a_job_that_is_about_to_begin_elsewhere_is_left_to_it_and_another_one_moves(tmp_path: Path):
    """Nothing is in the journal yet."""
    with locked(tmp_path / "0", job=config_hash(config_of(1))):
        assert place_of(tmp_path, seed=1) == JobPlace(run_dir=tmp_path / "0", runs_elsewhere=True)
        assert place_of(tmp_path, seed=2) == JobPlace(run_dir=tmp_path / "0_2")


def test_a_folder_that_the_user_has_named_is_for_one_job(tmp_path: Path):
    leave(tmp_path, "0", seed=1)
    with pytest.raises(ConfigError, match=r"hydra.sweep.subdir: got 0, which job 0 uses too"):
        place_of(tmp_path, seed=2, may_move=False, earlier=False)
    assert place_of(tmp_path, seed=1, may_move=False).result is not None
    assert place_of(tmp_path, seed=2, may_move=False) == JobPlace(run_dir=tmp_path / "0")  # which its checks refuse
    with locked(tmp_path / "0"), pytest.raises(ConfigError, match="where a run is under way"):
        place_of(tmp_path, seed=2, may_move=False)


def test_leave_to_erase_is_for_the_folder_of_the_number(tmp_path: Path):
    leave(tmp_path, "0", seed=1)
    assert place_of(tmp_path, seed=2, overwrite=True) == JobPlace(run_dir=tmp_path / "0")
    with pytest.raises(ConfigError, match="which job 0 uses too"):
        place_of(tmp_path, seed=2, overwrite=True, earlier=False)


def test_settings_of_one_start_find_the_same_job(tmp_path: Path):
    leave(tmp_path, "0", seed=1)
    assert place_of(tmp_path, seed=1, timeout_s=7.0).result is not None
    other = replace(config_of(1), seed=2)
    assert config_hash(other) != config_hash(config_of(1))


# Jobs that run side by side have devices of their own, which a killed one gives back.


NUM_CORES = len(os.sched_getaffinity(0))


def hold(folder: Path, num: int, ends: Connection) -> None:
    """A job that has its devices until it is told to end."""
    with devices_of_own(Sweep(folder=folder, start=0, num_at_once=num), Config()):
        ends.send(os.sched_getaffinity(0))
        ends.recv()


def start(folder: Path, num: int) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=hold, args=(folder, num, theirs), daemon=True)
    process.start()
    return process, ours


def test_jobs_at_once_have_cores_of_their_own_and_a_killed_one_gives_them_back(tmp_path: Path):
    first, second = start(tmp_path, 2), start(tmp_path, 2)
    cores = [first[1].recv(), second[1].recv()]
    assert all(len(each) == max(1, NUM_CORES // 2) for each in cores)
    assert NUM_CORES == 1 or not cores[0] & cores[1]
    third = start(tmp_path, 2)
    assert not third[1].poll(0.5)
    first[0].kill()
    assert third[1].recv() == cores[0]
    for process, ours in (second, third):
        ours.send("end")
        process.join()


def test_jobs_at_once_have_gpus_of_their_own(tmp_path: Path, monkeypatch):
    """As many as they have ranks; more jobs wait."""
    monkeypatch.setattr(slots, "visible_gpus", lambda: ["4", "GPU-5/0", "6"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5/0,6")
    sweep, seen = Sweep(folder=tmp_path, start=0, num_at_once=3), []

    def run(num_ranks: int | None) -> None:
        with devices_of_own(sweep, Config(launch=LaunchConfig(nproc_per_node=num_ranks))):
            seen.append(os.environ["CUDA_VISIBLE_DEVICES"])

    with devices_of_own(sweep, Config(launch=LaunchConfig(nproc_per_node=2))):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,GPU-5/0"
        run(None)
        waiting = threading.Thread(target=run, args=(2,))
        waiting.start()
        waiting.join(0.5)
        assert seen == ["6"]
    waiting.join()
    assert seen == ["6", "4,GPU-5/0"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,GPU-5/0,6"
    with devices_of_own(sweep, Config(launch=LaunchConfig(nproc_per_node=4))):  # on the CPU then
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,GPU-5/0,6"


def test_a_job_that_is_alone_has_all_and_locks_nothing(tmp_path: Path):
    before = os.sched_getaffinity(0)
    with devices_of_own(Sweep(folder=tmp_path, start=0), Config()):
        assert os.sched_getaffinity(0) == before
    assert not (tmp_path / SLOTS).exists()


def test_cores_are_given_back(tmp_path: Path):
    before = os.sched_getaffinity(0)
    sweep = Sweep(folder=tmp_path, start=0, num_at_once=1000)
    with devices_of_own(sweep, Config()):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before
