"""A rank that is forked from a process that has imported torch is as one that is a new Python."""

import json
import os
import signal
import stat
import time
from pathlib import Path
from typing import Any

import commands
import psutil
import pytest

from tests.zygote.client import Zygote
from zerotrain.launching.spawn import ranks_folder


def _start(folder: Path, *arguments: str, zygote: Zygote | None = None, **environment: str) -> commands.Command:
    tiny = [*commands.TINY, "hydra.run.dir=run", "launch.nproc_per_node=2"]
    return commands.by_hand(*tiny, *arguments, folder=folder, zygote=zygote, **environment)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the two ranks say of themselves, by how they were started."""
    told: dict[str, list[dict[str, Any]]] = {}
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    inherited = os.open(tmp_path_factory.mktemp("files") / "inherited", os.O_RDWR | os.O_CREAT)
    os.set_inheritable(inherited, True)
    try:
        for how, threads in (("forked", {}), ("new", {"OPENBLAS_NUM_THREADS": "2"})):
            folder = tmp_path_factory.mktemp(how)
            command = _start(
                folder, "model._target_=facts_of_rank.Probe", FACTS=str(folder), HYDRA_FULL_ERROR="0", **threads
            )
            assert command.wait() == 0, command.stderr
            told[how] = [json.loads((folder / str(rank)).read_text()) for rank in range(2)]
            for each in told[how]:
                text = json.dumps(each["same"]).replace(str(folder), "FOLDER")
                each["same"] = json.loads(text)
                each["same"]["environment"].pop("OPENBLAS_NUM_THREADS", None)
    finally:
        signal.signal(signal.SIGHUP, before)
        os.close(inherited)
    return told


def test_a_forked_rank_has_what_a_new_python_has_and_draws_numbers_of_its_own(facts):
    """A thread forbids the fork: the ranks are new Pythons then."""
    assert {each["program"] for each in facts["forked"]} == {str(commands.REPOSITORY / "launch.py")}
    assert {each["program"] for each in facts["new"]} == {"-m"}
    for forked, new in zip(facts["forked"], facts["new"], strict=True):
        assert forked["same"] == new["same"]
        assert forked["same"]["handlers"]["SIGHUP"] == str(signal.SIG_IGN)
        assert (forked["same"]["files of the launcher"], forked["same"]["threads"]) == ([], 1)
    drawn = [number for each in facts["forked"] for number in each["drawn"]]
    assert len(set(drawn)) == len(drawn) == 4


def _at_work(command: commands.Command, folder: Path) -> psutil.Process:
    """The fork server, once both ranks train."""
    for rank in range(2):
        command.wait_for_text(folder / f"run/ranks/{rank}.log", "")
    command.wait_for_text(folder / "run/metrics.jsonl", "loss")
    rank = psutil.Process(command.pid_of_rank(folder / "run", 1))
    server = rank.parent()
    assert server is not None
    assert server.ppid() == command.process.pid
    return server


def test_a_fork_server_that_is_killed_takes_its_ranks_along_and_is_done_without(tmp_path: Path, zygote: Zygote) -> None:
    long = ("train.max_steps=100000", "checkpoint.every=5")
    command = _start(tmp_path, *long, "launch.max_restarts=1", zygote=zygote)
    _at_work(command, tmp_path).kill()
    command.wait_for_text(command.error_path, "restart 1 of 1")
    assert "was killed by SIGKILL" in command.stderr
    command.wait_for_text(tmp_path / "run/ranks/0.log", "step")
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:  # the ranks of the second attempt are new Pythons
        programs = [
            process.cmdline()[1:3] for process in command.processes() if "rank_process" in str(process.cmdline())
        ]
        if len(programs) == 2:
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"no new ranks: {command.stderr}")
    command.kill()
    assert command.wait_until_gone() == []


def test_a_launcher_that_is_killed_takes_the_fork_server_and_the_ranks_along(tmp_path: Path, zygote: Zygote) -> None:
    command = _start(tmp_path, "train.max_steps=100000", zygote=zygote)
    _at_work(command, tmp_path)
    command.kill()
    assert command.wait_until_gone() == []


# The folder that ranks meet in goes with the process that made it.


def test_it_is_there_for_its_owner_alone_and_gone_behind() -> None:
    with ranks_folder() as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        (Path(folder) / "job.json").touch()
    assert not Path(folder).exists()
