"""Jobs that run side by side have devices of their own, which a killed one gives back."""

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from zerotrain.config.schema import Config, LaunchConfig
from zerotrain.launching.sweep import member as slots
from zerotrain.launching.sweep.member import SLOTS, devices_of_own
from zerotrain.launching.sweep.sweep import Sweep

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
