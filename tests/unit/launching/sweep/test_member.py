"""A job of a sweep is found by its settings, and gets a folder in which nothing of another job lies."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from zerotrain.config.compose import config_hash, save_config
from zerotrain.config.schema import Config, LaunchConfig, SweepConfig
from zerotrain.errors import ConfigError
from zerotrain.launching.job import locked
from zerotrain.launching.sweep import member
from zerotrain.launching.sweep.member import SLOTS, JobPlace, Member, devices_of_own
from zerotrain.launching.sweep.sweep import Sweep
from zerotrain.report.journal import JobEvent, SweepJournal
from zerotrain.training.result import RunResult


def config_of(seed: int, **launch: Any) -> Config:
    return Config(seed=seed, launch=LaunchConfig(**launch))


def leave(
    folder: Path, name: str = "0", seed: int = 1, status: str | None = "completed", event: str = "ended", **fields: Any
) -> Path:
    """What a job has left."""
    run_dir, config = folder / name, config_of(seed)
    run_dir.mkdir()
    line = JobEvent(
        event=event, job=0, folder=name, hash=config_hash(config), overrides=[f"seed={seed}"], status=status
    )
    SweepJournal(folder).append(line)
    if event != "refused":
        save_config(config, run_dir / "config.yaml")
    if status is not None:
        losses = {"final_train_loss": 2.0, "final_val_loss": 2.1} | fields
        RunResult(world_size=1, status=status, config_hash=config_hash(config), **losses).write(run_dir)
    return run_dir


@contextmanager
def placed(folder: Path, name: str, seed: int) -> Iterator[None]:
    """Inside, another process has placed a job there."""
    with locked(folder / name):
        line = JobEvent(
            event="placed", job=9, folder=name, hash=config_hash(config_of(seed)), overrides=[f"seed={seed}"]
        )
        SweepJournal(folder).append(line)
        yield


def place_of(
    folder: Path,
    seed: int = 1,
    number: int = 0,
    *,
    may_move: bool = True,
    is_new_sweep: bool = True,
    again: str = "failed",
    **launch: Any,
) -> JobPlace:
    """The place that a job gets in a sweep, which has just begun or has left all that lies there."""
    config, name = config_of(seed, **launch), folder / str(number)
    start = SweepJournal(folder).nbytes if is_new_sweep else 0
    sweep = Sweep(folder=folder, start=start, settings=SweepConfig(again=again))
    name.mkdir(exist_ok=True)
    with ExitStack() as stack:
        return Member(sweep, number, [f"seed={seed}"], config).take_place(name, may_move, stack)


COMPLETED: dict[str, Any] = {}
FAILED, STOPPED = {"status": "failed"}, {"status": "stopped"}
EARLY = STOPPED | {"stopped_by": "callbacks.early_stopping"}
NAN = {"final_train_loss": None, "final_val_loss": None}
NOT_FINITE = FAILED | {"error": "rank 0 failed: TrainingError: the gradient was not finite"}


@pytest.mark.parametrize(
    ("left", "job", "folder", "is_taken"),
    [
        ([COMPLETED], {}, "0", True),
        ([COMPLETED], {"number": 5}, "0", True),  # whatever number it had
        ([COMPLETED], {"timeout_s": 7.0}, "0", True),  # a setting of one start
        ([COMPLETED], {"may_move": False}, "0", True),
        ([COMPLETED], {"again": "none"}, "0", True),
        ([COMPLETED], {"again": "all"}, "0_2", False),
        ([COMPLETED, FAILED | {"name": "0_2", "seed": 2}], {"seed": 3}, "0_3", False),
        ([COMPLETED], {"seed": 4, "number": 1}, "1", False),
        ([COMPLETED], {"seed": 2, "may_move": False}, "0", False),  # which its checks refuse
        ([COMPLETED], {"seed": 2, "overwrite": True}, "0", False),
        ([FAILED], {}, "0", False),
        ([FAILED], {"again": "none"}, "0", True),
        ([FAILED], {"again": "all"}, "0_2", False),
        ([STOPPED], {"again": "none"}, "0", False),
        ([STOPPED], {"again": "all", "is_new_sweep": False}, "0", False),  # queued again in the same sweep
        ([EARLY], {}, "0", True),
        ([EARLY | {"stopped_by": "control.yaml"}], {}, "0", False),
        ([NAN], {}, "0_2", False),
        ([NAN], {"again": "none"}, "0", True),
        ([NOT_FINITE], {}, "0", False),
        ([NOT_FINITE], {"again": "none"}, "0", True),
        ([FAILED | {"event": "refused"}], {"seed": 2}, "0", False),  # makes room for one that is mended
    ],
)
def test_the_folder_of_a_job_and_whether_it_is_taken_as_it_lies(tmp_path, left, job, folder, is_taken):
    for fields in left:
        leave(tmp_path, **fields)
    place = place_of(tmp_path, **job)
    assert (place.run_dir.name, place.result is not None, place.goes_on) == (folder, is_taken, False)
    assert place.result is None or place.result["final_val_loss"] in (2.1, None)


@pytest.mark.parametrize("status", ["failed", "stopped", None])
def test_a_job_with_a_checkpoint_goes_on_where_it_lies(tmp_path: Path, status: str | None):
    run_dir = leave(tmp_path, status=status)
    (run_dir / "checkpoints/step-00000002").mkdir(parents=True)
    assert place_of(tmp_path, number=3) == JobPlace(run_dir=run_dir, goes_on=True)


@pytest.mark.parametrize("content", ["nothing", "what another job has left", "its own"])
def test_of_the_folder_that_hydra_has_made_an_empty_one_is_left_behind_for_nobody(tmp_path: Path, content: str):
    leave(tmp_path, "0")
    if content != "nothing":
        leave(tmp_path, "5", seed=1 if content == "its own" else 2)
    place = place_of(tmp_path, number=5)
    assert place.run_dir == tmp_path / ("5" if content == "its own" else "0")
    assert (tmp_path / "5").exists() == (content != "nothing")


@pytest.mark.parametrize("config", ["", "seed: 1\nzero: {stage", None])
def test_a_job_that_another_process_has_just_begun_is_left_to_it(tmp_path: Path, config: str | None):
    """With half a config.yaml there it was begun once more, in another folder (2026-11-24)."""
    run_dir = leave(tmp_path, status=None, event="begun")
    if config is not None:
        (run_dir / "config.yaml").write_text(config)
    with locked(run_dir):
        for number in (0, 4):
            assert place_of(tmp_path, number=number) == JobPlace(run_dir=run_dir, runs_elsewhere=True)


def test_a_job_that_is_about_to_begin_elsewhere_is_left_to_it_and_another_one_moves(tmp_path: Path):
    """Two trials of the same values, of two drivers, both trained (2026-11-24)."""
    with placed(tmp_path, "2", seed=1):
        for number in (2, 3):
            assert place_of(tmp_path, number=number) == JobPlace(run_dir=tmp_path / "2", runs_elsewhere=True)
        assert place_of(tmp_path, seed=2, number=3) == JobPlace(run_dir=tmp_path / "3")
        assert place_of(tmp_path, seed=2, number=2) == JobPlace(run_dir=tmp_path / "2_2")


def test_a_folder_that_another_job_now_runs_in_is_not_taken_for_the_own(tmp_path: Path):
    leave(tmp_path, "2", status=None, event="refused")
    with placed(tmp_path, "2", seed=2):
        save_config(config_of(2), tmp_path / "2/config.yaml")
        assert place_of(tmp_path, number=3) == JobPlace(run_dir=tmp_path / "3")


def test_a_folder_of_another_config_than_the_journal_says_is_not_taken(tmp_path: Path):
    """A job was trained on by hand, by the command that its end had printed."""
    leave(tmp_path)
    save_config(config_of(9), tmp_path / "0/config.yaml")
    RunResult(world_size=1, status="completed", config_hash="another").write(tmp_path / "0")
    assert place_of(tmp_path) == JobPlace(run_dir=tmp_path / "0_2")


def test_a_folder_that_the_user_has_named_is_for_one_job(tmp_path: Path):
    leave(tmp_path)
    for job in ({"may_move": False}, {"overwrite": True}):
        with pytest.raises(ConfigError, match=r"hydra.sweep.subdir: got 0, which job 0 uses too"):
            place_of(tmp_path, seed=2, is_new_sweep=False, **job)
    with locked(tmp_path / "0"), pytest.raises(ConfigError, match="where a run is under way"):
        place_of(tmp_path, seed=2, may_move=False)


def test_jobs_of_one_hash_are_told_apart_by_what_the_sweep_varies(tmp_path: Path):
    sweep = Sweep(folder=tmp_path, start=0, swept=("launch.nproc_per_node", "seed"))
    one, two = (sweep.identity("a", [f"launch.nproc_per_node={num}", "launch.device=cpu"]) for num in (1, 2))
    assert one != two
    assert sweep.identity("a", ["launch.nproc_per_node=1", "launch.device=auto", "seed=3"]) == one
    assert sweep.identity(None, []) is None


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
    monkeypatch.setattr(member, "visible_gpus", lambda: ["4", "GPU-5/0", "6"])
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


def test_a_job_that_is_alone_has_all_and_locks_nothing_and_one_among_many_gives_its_core_back(tmp_path: Path):
    before = os.sched_getaffinity(0)
    with devices_of_own(Sweep(folder=tmp_path, start=0), Config()):
        assert os.sched_getaffinity(0) == before
    assert not (tmp_path / SLOTS).exists()
    with devices_of_own(Sweep(folder=tmp_path, start=0, num_at_once=1000), Config()):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before
