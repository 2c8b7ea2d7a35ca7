"""The options of torchrun are those of the command line that started it."""

import pytest

from zerotrain.comm.environment import RankEnvironment
from zerotrain.launching import resuming as started
from zerotrain.launching.resuming import doubtful_start, elastic_hosts, options_in, start_problems

PYTHON, PROGRAM = "/usr/bin/python", "launch.py"


@pytest.mark.parametrize(
    "start", [[PYTHON, "/usr/bin/torchrun"], [PYTHON, "-m", "torch.distributed.run"], ["torchrun"]], ids=" ".join
)
def test_the_options_stand_between_torchrun_and_the_program(start: list[str]) -> None:
    options = ["--nnodes", "2", "--rdzv-endpoint=n0:29500"]
    assert options_in([*start, *options, PROGRAM, "zero.stage=3", PROGRAM], PROGRAM) == options


@pytest.mark.parametrize("command", [[], [PYTHON, PROGRAM], ["torchrun", "-m", "mine"], [PROGRAM, "torchrun"]])
def test_another_command_has_none(command: list[str]) -> None:
    assert options_in(command, PROGRAM) is None


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        (["--nproc-per-node=2", "--nnodes=1:4"], "1:4"),
        (["--nnodes", "1:4", "--max-restarts=5"], "1:4"),
        (["--nnodes=2"], None),
        (["--nnodes=2:2"], None),
        (["--nnodes"], None),
        (["--nproc-per-node=2"], None),
        (None, None),
    ],
)
def test_a_range_of_hosts_is_elastic(options: list[str] | None, hosts: str | None) -> None:
    assert elastic_hosts(options) == hosts


RANKS = RankEnvironment(0, 2, 0, 1)


@pytest.fixture
def as_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun has started this process, on one host or two."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setattr("sys.argv", [PROGRAM])
    monkeypatch.setattr(started, "_command_of", lambda _: ["torchrun", "--nnodes=1:2", PROGRAM])


@pytest.mark.usefixtures("as_torchrun")
def test_on_hosts_that_come_and_go_a_run_goes_on_by_itself_and_hosts_can_join(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_problems("auto", RANKS) == []
    [problem] = start_problems(None, RANKS)
    assert problem.startswith(
        "checkpoint.resume: got null; under torchrun --nnodes=1:2 it must be auto, with a hydra.run"
    )
    [warning] = doubtful_start(0, RANKS)
    assert warning.startswith("--nnodes=1:2 without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: by torch's default a host")
    monkeypatch.setenv(started.OPENS_A_STORE, "1")
    assert doubtful_start(0, RANKS) == []
    assert doubtful_start(2, RANKS) == ["launch.max_restarts has no effect under torchrun; give it --max-restarts"]


def test_a_start_by_hand_or_by_srun_is_neither_refused_nor_doubted() -> None:
    for ranks in (None, RankEnvironment(0, 2, 0, 1, starter="srun")):
        assert (start_problems(None, ranks), doubtful_start(0, ranks)) == ([], [])
