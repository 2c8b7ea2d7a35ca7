"""Which rank a process is, from the variables it was started with."""

import os

from zerotrain.launching.environment import RankEnvironment

VARIABLES = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "x",
    "GROUP_RANK": "1",
}


def test_a_process_started_by_torchrun_knows_its_rank(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert RankEnvironment.read() == RankEnvironment(rank=3, world_size=4, local_rank=1, local_world_size=2)


def test_a_process_started_by_hand_is_no_rank(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    assert RankEnvironment.read() is None


def test_a_process_that_leaves_passes_none_of_it_on(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    RankEnvironment.leave()
    assert RankEnvironment.read() is None
    assert not VARIABLES.keys() & os.environ.keys()
