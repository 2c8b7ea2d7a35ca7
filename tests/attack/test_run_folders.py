"""A run folder belongs to one run: a second one at once, or into what a completed one has left, is refused."""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from commands import TINY, TWO_RANKS, result_of
from omegaconf import OmegaConf

from zerotrain.config.compose import from_values

RUN = (*TINY, "hydra.run.dir=run")
ASLEEP = ("model._target_=misbehaving.MisbehavingMLP", "+model.action=sleep")


def files_in(folder: Path) -> dict[Path, bytes]:
    """All files but the lock, with what they hold."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_a_second_run_in_the_folder_of_a_running_one_is_refused_and_changes_nothing(launch, tmp_path: Path):
    first = launch(*RUN, *ASLEEP, TWO_RANKS, folder=tmp_path)
    first.wait_for_text(tmp_path / "run/ranks/1.log", "asleep")
    first.wait_for_text(tmp_path / "run/ranks/0.state", f"{'2':<16}{{")  # steps done: rank 0 writes nothing more
    before = files_in(tmp_path / "run")
    # a wrong setting and leave to overwrite make no difference
    seconds = [
        launch(*RUN, more, TWO_RANKS, folder=tmp_path) for more in ("seed=7", "zero.stage=9", "launch.overwrite=true")
    ]
    assert [second.wait() for second in seconds] == [2, 2, 2]
    for second in seconds:
        [line] = second.stderr.splitlines()
        of_first = rf"pid {first.process.pid} on .*, started \d{{4}}-.*"
        assert re.search(rf"^hydra.run.dir: got .*, where a run is under way \({of_first}\); ", line)
    assert files_in(tmp_path / "run") == before
    first.stop_at_once(signal.SIGTERM)
    first.wait()
    assert first.wait_until_gone() == []
    assert result_of(tmp_path / "run")["status"] == "stopped"
    assert from_values(OmegaConf.load(tmp_path / "run/config.yaml")).seed == 0


def test_two_runs_started_at_once_in_one_folder_are_one_run(launch, tmp_path: Path):
    commands = [launch(*RUN, f"seed={seed}", TWO_RANKS, folder=tmp_path) for seed in (1, 2)]
    assert sorted(command.wait() for command in commands) == [0, 2], [command.stderr for command in commands]
    [seed] = [seed for seed, command in zip((1, 2), commands, strict=True) if command.process.returncode == 0]
    assert f"seed={seed}" in result_of(tmp_path / "run")["overrides"]
    assert from_values(OmegaConf.load(tmp_path / "run/config.yaml")).seed == seed


@pytest.fixture(scope="module")
def completed(launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a completed run lies, in `run`."""
    folder = tmp_path_factory.mktemp("completed")
    assert launch(*RUN, folder=folder).wait() == 0
    return folder


def test_a_completed_run_is_not_overwritten(launch, completed: Path):
    before = files_in(completed / "run")
    second = launch(*RUN, "seed=7", folder=completed)
    assert second.wait() == 2
    [line] = second.stderr.splitlines()
    holds = f"launch.overwrite: got false, but {completed / 'run'} holds a completed run"
    assert line.startswith(f"{holds}; launch.overwrite=true erases it; ")
    assert files_in(completed / "run") == before


def test_a_refused_config_leaves_the_result_of_an_earlier_run_as_it_was(launch, completed: Path):
    before = files_in(completed / "run")
    for more in ("zero.stage=9", "launch.overwrite=true"):
        second = launch(*RUN, "zero.stage=9", more, folder=completed)
        assert second.wait() == 2
        assert "zero.stage: got 9" in second.stderr
        assert files_in(completed / "run") == before


def test_a_completed_run_is_overwritten_by_one_that_is_told_to(launch, tmp_path: Path, completed: Path):
    os.symlink(completed / "run", tmp_path / "run")
    second = launch(*RUN, "seed=7", "launch.overwrite=true", folder=tmp_path)
    assert second.wait() == 0, second.stderr
    assert from_values(OmegaConf.load(tmp_path / "run/config.yaml")).seed == 7


@pytest.mark.parametrize("start", ["launch", "torchrun"])
def test_a_run_whose_folder_is_deleted_says_so_and_ends(request, tmp_path: Path, start: str):
    ranks = (TWO_RANKS,) if start == "launch" else ()
    endless = (*TINY, "hydra.run.dir=run$1", "train.max_steps=10000000", "train.log_every=10", "train.eval_every=0")
    command = request.getfixturevalue(start)(*endless, *ranks, folder=tmp_path)
    command.wait_for_text(tmp_path / "run$1/ranks/0.log", "step ")
    (tmp_path / "run$1").rename(tmp_path / "gone")  # at once, as nothing else that is deleted
    shutil.rmtree(tmp_path / "gone")
    assert command.wait() == 1
    gone = f"{tmp_path / 'run$1'}: the run's folder was deleted or moved during the run; start the run again"
    lines = command.stderr.splitlines()
    assert lines.count(gone) == 1
    if start == "launch":  # torchrun has a report of its own
        assert lines == [gone]
    assert command.wait_until_gone() == []
