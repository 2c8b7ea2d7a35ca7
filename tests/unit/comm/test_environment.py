"""Which rank a task of a Slurm step is: the variables are those that Slurm 22.05 has set for `srun` and `sbatch`."""

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from zerotrain.comm.environment import RankEnvironment, variables_of_step
from zerotrain.errors import ConfigError

# Which rank a process is, from the variables it was started with.


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
        ({"MASTER_PORT": "65536"}, "MASTER_PORT: got 65536; it must be between 1 and 65535"),
        ({"MASTER_ADDR": "no host"}, "MASTER_ADDR: got 'no host': "),
        ({"RANK": None}, "RANK: not set, though the environment has LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, MASTER_ADDR="),
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


STEP = {
    "SLURM_JOB_ID": "19999",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "n[08-09],other",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
"""Of the second task on the second of three nodes."""


def test_a_task_of_a_step_of_several_is_the_rank_of_its_number():
    assert variables_of_step(STEP) == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "n08",
        "MASTER_PORT": "39999",
    }
    last = {"SLURM_PROCID": "4", "SLURM_NODEID": "2", "SLURM_LOCALID": "0", "SLURM_RESTART_COUNT": "1"}
    of_last = variables_of_step(STEP | last)
    assert of_last["LOCAL_WORLD_SIZE"] == "1"
    assert of_last["MASTER_PORT"] == "20000"  # another one after a requeue


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("gpu-a.x,gpu-b.x", "gpu-a.x"),
        ("n[3,7-9]", "n3"),
        ("rack[1-2]-n,z", "rack1-n"),
        ("a1,b[1-2]", "a1"),
    ],
)
def test_the_ranks_meet_on_the_first_node_of_the_step(nodes, first):
    assert variables_of_step(STEP | {"SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


def test_what_an_emulated_step_leaves_out_follows_from_the_rest():
    left_out = {"SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID"}
    told = {name: value for name, value in STEP.items() if name not in left_out}
    alike = told | {"SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    assert variables_of_step(alike) == variables_of_step(STEP) | {"WORLD_SIZE": "4"}
    with pytest.raises(ConfigError, match="SLURM_NODEID: not set, though this is a task of a Slurm step of several"):
        variables_of_step(told | {"SLURM_NTASKS": "5"})


def test_a_batch_script_a_step_of_one_task_and_a_process_without_slurm_are_no_ranks():
    batch = {name: value for name, value in STEP.items() if "STEP" not in name} | {"SLURM_NTASKS": "5"}
    for environment in ({}, batch, STEP | {"SLURM_STEP_NUM_TASKS": "1"}):
        assert variables_of_step(environment) == {}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"SLURM_PROCID": "5"}, "SLURM_PROCID: got '5'; it must be a whole number from 0 to 4; in a Slurm step"),
        ({"SLURM_PROCID": None}, "SLURM_PROCID: not set, though this is a task of a Slurm step of several; in a"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID: got '2'; it must be a whole number from 0 to 1; "),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID: got '3'; it must be a whole number from 0 to 2; "),
        ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS: got 'many'; it must be a whole number from 1 to "),
        ({"SLURM_STEP_NUM_TASKS": "6"}, "SLURM_STEP_TASKS_PER_NODE: got '2(x2),1'; it must be counts of tasks such as"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x99999999)"}, "SLURM_STEP_TASKS_PER_NODE: got "),
        (
            {"SLURM_STEP_NODELIST": "[1-3"},
            "SLURM_STEP_NODELIST: got '[1-3'; it must be names of nodes such as n[01-03]",
        ),
        ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID: got 'x'; it must be a whole number"),
    ],
)
def test_variables_that_contradict_each_other_are_named_in_one_line(changes, problem):
    environment = {name: value for name, value in (STEP | changes).items() if value is not None}
    with pytest.raises(ConfigError) as refused:
        variables_of_step(environment)
    [line] = refused.value.problems
    assert line.startswith(problem)


@pytest.fixture
def environment_kept() -> Iterator[dict[str, str]]:
    """That of the task, of this process until the end of the test: what `read` sets goes with it."""
    with patch.dict(os.environ, STEP | {"SLURM_STEP_NODELIST": "localhost"}):
        RankEnvironment.leave()
        os.environ.update(STEP | {"SLURM_STEP_NODELIST": "localhost"})
        yield os.environ


def test_what_is_set_of_torchruns_variables_comes_first_and_the_others_are_set(environment_kept):
    ranks = RankEnvironment.read()
    assert ranks == RankEnvironment(3, 5, 1, 2, address="localhost", port=39999, starter="srun")
    assert (environment_kept["RANK"], environment_kept["LOCAL_RANK"]) == ("3", "1")
    assert RankEnvironment.read() == ranks
    del environment_kept["RANK"]
    environment_kept |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    ranks = RankEnvironment.read()
    assert ranks is not None
    assert (ranks.rank, ranks.address, ranks.port) == (3, "127.0.0.1", 29500)
    environment_kept |= {"RANK": "4", "TORCHELASTIC_RUN_ID": "none"}  # srun has started torchrun, and that a rank
    assert RankEnvironment.read() == RankEnvironment(4, 5, 1, 2, address="127.0.0.1", port=29500)


def test_a_world_size_of_another_run_is_refused_and_a_process_that_leaves_is_no_rank(environment_kept):
    environment_kept["WORLD_SIZE"] = "2"
    with pytest.raises(ConfigError, match=r"RANK: got 3; it must be below WORLD_SIZE=2; in a Slurm step srun tells"):
        RankEnvironment.read()
    RankEnvironment.leave()
    assert RankEnvironment.read() is None
