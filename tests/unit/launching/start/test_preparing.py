"""Machines without a common folder: each prepares its data before the ranks meet, and all wait for it."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from zerotrain.comm.environment import RankEnvironment
from zerotrain.errors import CommError, ConfigError
from zerotrain.launching import torchrun as preparing
from zerotrain.launching.torchrun import prepare_everywhere

NUM_RANKS, RANKS_OF_A_MACHINE = 4, 2


def everywhere(folder: Path, prepare: Callable[[int], object], timeout_s: float = 30.0) -> list[BaseException | None]:
    """What came of it on each of four ranks of two machines."""
    came: list[BaseException | None] = [None] * NUM_RANKS

    def run(rank: int) -> None:
        store = dist.FileStore(str(folder / "store"), NUM_RANKS)
        ranks = RankEnvironment(rank, NUM_RANKS, rank % RANKS_OF_A_MACHINE, RANKS_OF_A_MACHINE)
        try:
            prepare_everywhere(store, ranks, lambda: prepare(rank), timeout_s)
        except BaseException as error:
            came[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return came


def test_one_rank_of_each_other_machine_prepares_and_all_wait_for_longer_than_a_collective_may(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(preparing, "REMINDER_S", 0.3)
    monkeypatch.setattr(preparing, "_BEAT_S", 0.05)
    prepared = []

    def prepare(rank: int) -> None:
        time.sleep(1.5)
        prepared.append(rank)

    assert everywhere(tmp_path, prepare, timeout_s=0.5) == [None] * NUM_RANKS
    assert prepared == [2]
    lines = capfd.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith("rank 0 waits for the machine of rank 2 to prepare its data (") for line in lines)


@pytest.mark.case("data: Text", "machines without a common folder")
def test_a_machine_that_cannot_is_told_on_all_ranks(tmp_path):
    def prepare(rank: int) -> None:
        raise ConfigError("data.cache_dir=x has no room", "and more")

    came = everywhere(tmp_path, prepare)
    assert [str(error) for error in came if error is not came[2]] == [
        "rank 2: data.cache_dir=x has no room\nrank 2: and more"
    ] * 3
    assert all(isinstance(error, ConfigError) for error in came)


@pytest.mark.case("data: Text", "machines without a common folder")
def test_a_machine_of_which_nothing_is_heard_any_more_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "_BEAT_S", 60.0)  # nothing after the first

    came = everywhere(tmp_path, lambda rank: time.sleep(2.0), timeout_s=0.5)
    for rank in (0, 1, 3):
        error = came[rank]
        assert isinstance(error, CommError)
        assert error.unheard == (2,)
        assert str(error).startswith("rank 2 prepares the data of its machine, and did not answer for ")


def test_on_one_machine_nobody_waits():
    def prepare() -> None:
        pytest.fail("rank 0 has done it")

    for rank in range(2):
        prepare_everywhere(dist.HashStore(), RankEnvironment(rank, 2, rank, 2), prepare, 0.0)
