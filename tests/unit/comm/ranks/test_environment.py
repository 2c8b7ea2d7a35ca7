"""Which rank a process is, from the variables it was started with."""

import os

import pytest

from zerotrain.comm.environment import RankEnvironment
from zerotrain.errors import ConfigError

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


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """As torchrun has left it."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ZEROTRAIN_STORE", raising=False)


def test_a_process_started_by_torchrun_knows_its_rank():
    assert RankEnvironment.read() == RankEnvironment(
        rank=3, world_size=4, local_rank=1, local_world_size=2, address="localhost", port=1
    )


def test_a_process_started_by_hand_is_no_rank(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name)
    assert RankEnvironment.read() is None


def test_a_process_that_leaves_passes_none_of_it_on(monkeypatch):
    monkeypatch.setenv("ZEROTRAIN_STORE", "store")
    RankEnvironment.leave()
    assert RankEnvironment.read() is None
    assert not {"ZEROTRAIN_STORE", *VARIABLES} & os.environ.keys()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"RANK": "abc"}, "RANK: got 'abc'; it must be a whole number of at least 0"),
        ({"RANK": "-1"}, "RANK: got '-1'; it must be a whole number of at least 0"),
        ({"RANK": "4"}, "RANK: got 4; it must be below WORLD_SIZE=4"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE: got ''; it must be a whole number of at least 0"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: got 0; it must be at least 1"),
        ({"WORLD_SIZE": "2.5"}, "WORLD_SIZE: got '2.5'; it must be a whole number of at least 0"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK: got 2; it must be below LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_RANK": "1", "RANK": "0"}, "LOCAL_RANK: got 1; it must be RANK=0 or less"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE: got 5; it must be between 1 and WORLD_SIZE=4"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT: got 0; it must be between 1 and 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT: got 65536; it must be between 1 and 65535"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT: got 'http'; it must be a whole number of at least 0"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR: got '': "),
        ({"MASTER_ADDR": "no host"}, "MASTER_ADDR: got 'no host': "),
        ({"RANK": None}, "RANK: not set, though the environment has LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, MASTER_ADDR="),
        ({"LOCAL_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE: not set, though"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "MASTER_ADDR, MASTER_PORT: not set, though the environment has "),
        (
            dict.fromkeys(VARIABLES) | {"WORLD_SIZE": "2"},
            "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, LOCAL_WORLD_SIZE: not set, though the environment has "
            "WORLD_SIZE=2; torchrun sets all of them for each of its ranks: start with torchrun, or unset those "
            "that another run left",
        ),
    ],
)
def test_variables_that_are_wrong_contradictory_or_alone_are_named_in_one_line(monkeypatch, changes, problem):
    for name, value in changes.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refused:
        RankEnvironment.read()
    [line] = refused.value.problems
    assert line.startswith(problem)
    assert "\n" not in line


def test_in_a_loop_of_ones_own_the_number_of_ranks_of_this_machine_is_not_needed(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    ranks = RankEnvironment.read(whole=False)
    assert ranks is not None
    assert (ranks.rank, ranks.local_rank) == (3, 1)
