"""A checkpoint that is being read stays, while the run that it is of goes on and removes its older ones."""

import functools
import shutil
import threading
from pathlib import Path

import pytest
import torch

import zerotrain
from zerotrain.checkpoint.folder import CHECKPOINTS, hold_newest, remove_old, step_name
from zerotrain.checkpoint.verification import open_checkpoint
from zerotrain.errors import CheckpointError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    zerotrain.build_engine(torch.nn.Linear(64, 64), optimizer=optimizer).save(path)
    return path


def publish(saved: Path, folder: Path, step: int) -> Path:
    """As a save does: under its name at once."""
    partial = folder / f".new-{step}"
    shutil.copytree(saved, partial)
    return partial.rename(folder / step_name(step))


def test_the_next_removal_takes_what_was_read_and_not_what_is(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / CHECKPOINTS
    folder.mkdir()
    first = publish(saved, folder, 1)
    with open_checkpoint(tmp_path) as one, hold_newest(first) as other:
        assert one.path == other == first
        second = publish(saved, folder, 2)
        assert remove_old(folder, keep=1, keep_every=None) == []
        assert one.read("weight").shape == (64, 64)
        third = publish(saved, folder, 3)
        assert remove_old(folder, keep=1, keep_every=None) == [second]
    assert remove_old(folder, keep=1, keep_every=None) == [first]
    assert list(folder.iterdir()) == [third]
    with pytest.raises(CheckpointError, match="is not there"), open_checkpoint(first):
        pass


def test_beside_a_run_that_saves_all_the_time_each_reading_is_whole(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / CHECKPOINTS
    folder.mkdir()
    publish(saved, folder, 0)
    over = threading.Event()
    last = 0

    def train() -> None:
        nonlocal last
        while not over.is_set():
            last += 1
            publish(saved, folder, last)
            remove_old(folder, keep=1, keep_every=None)

    training = threading.Thread(target=train)
    training.start()
    seen = []
    try:
        while last < 50 or len(seen) < 50:
            with open_checkpoint(tmp_path) as one:
                seen.append(one.path)
                for name in one.names:
                    one.read(name)
                with open_checkpoint(one.path) as again:  # as the ranks of an evaluation do, by its name
                    assert again.path == one.path
    finally:
        over.set()
        training.join()
    assert len(set(seen)) > 5
    assert len(list(folder.iterdir())) <= 3
