"""One run at a time in a folder, whatever lies in the place of its lock."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from zerotrain.errors import ConfigError
from zerotrain.files.lock import LOCK_NAME, is_held
from zerotrain.launching.job import holding_job, locked


def test_a_folder_is_locked_once_and_free_again(tmp_path: Path):
    with locked(tmp_path / "run"):
        said = rf"where a run is under way \(pid {os.getpid()} on .*, started 20"
        with pytest.raises(ConfigError, match=said), locked(tmp_path / "run"):
            raise AssertionError
        assert json.loads((tmp_path / "run" / LOCK_NAME).read_text())["pid"] == os.getpid()
    with locked(tmp_path / "run"):
        pass


def test_a_lock_says_which_job_of_a_sweep_has_the_folder(tmp_path: Path):
    assert holding_job(tmp_path) is None
    assert not is_held(tmp_path / LOCK_NAME)
    with locked(tmp_path, job="0123 launch.nproc_per_node=2"):
        assert holding_job(tmp_path) == "0123 launch.nproc_per_node=2"
        assert is_held(tmp_path / LOCK_NAME)
        with pytest.raises(ConfigError, match=f"pid {os.getpid()} on"), locked(tmp_path):
            raise AssertionError
    assert not is_held(tmp_path / LOCK_NAME)
    with locked(tmp_path):
        assert holding_job(tmp_path) is None


@pytest.mark.parametrize("content", ["", "x", "[]", '{"job": 1}', '{"jobs": "1"}', "[" * 5000])
def test_a_lock_of_anybody_says_nothing(tmp_path: Path, content: str):
    (tmp_path / LOCK_NAME).write_text(content)
    assert holding_job(tmp_path) is None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "it is a FIFO, and must be a regular file"),
        (Path.mkdir, "it is a folder, and must be a regular file"),
        (lambda path: path.symlink_to("../mine"), "Too many levels of symbolic links"),
        (lambda path: path.symlink_to("/dev/zero"), "Too many levels of symbolic links"),
    ],
    ids=["FIFO", "folder", "link", "device"],
)
def test_what_is_no_file_is_refused_in_one_line(tmp_path: Path, make: Callable[[Path], None], said: str):
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "run").mkdir()
    make(tmp_path / "run" / LOCK_NAME)
    with pytest.raises(ConfigError) as error, locked(tmp_path / "run"):
        raise AssertionError
    [line] = error.value.problems
    assert line.startswith(f"hydra.run.dir: got {tmp_path}/run, wh")
    assert said in line
    assert (tmp_path / "mine").read_text() == "kept"
