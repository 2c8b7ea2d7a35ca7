"""Several machines, or ranks that were started one by one: who is missing, or was told something else, is named."""

import signal
import sys
from pathlib import Path

import psutil
import pytest
from commands import REPOSITORY, TINY, Command, free_port

REFUSED = "rank 0 refused the settings; its terminal says why"
DIFFERS = "rank 2: its command line differs from that of rank 0: it has {} and lacks {}; start every "


@pytest.mark.parametrize(
    ("of_nodes", "told"),
    [
        (
            ("zero.stage=9", "zero.stage=1"),
            (
                "zero.stage: got 9; it must be 0, 1, 2 or 3, or auto; the default is 2",
                REFUSED,
            ),
        ),
        (
            ("zero.stage=1", "zero.stage=9"),
            (DIFFERS.format("zero.stage=9", "zero.stage=1") + "machine with the same command line",) * 2,
        ),
        (("seed=1", "-m"), (DIFFERS.format("-m", "seed=1") + "machine with the same command line",) * 2),
    ],
    ids=["on the first", "on the second", "a sweep on the second"],
)
@pytest.mark.thinned(3)
@pytest.mark.waits
def test_a_typo_on_one_of_two_machines_is_one_line_on_each_and_both_end(
    torchrun, tmp_path: Path, of_nodes: tuple[str, str], told: tuple[str, str]
):
    """Typed on the first, the agent of the second took what its ranks did for a success, and waited for the first's."""
    at = ("--master-addr=127.0.0.1", f"--master-port={free_port()}")
    arguments = (*TINY, f"hydra.run.dir={tmp_path / 'run'}")
    commands = [
        torchrun(
            *arguments,
            setting,
            folder=tmp_path,
            options=("--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}", *at),
        )
        for node, setting in enumerate(of_nodes)
    ]
    assert [command.wait() for command in commands] == [1, 1]
    for command, line in zip(commands, told, strict=True):
        first, *agents = command.stderr.splitlines()
        assert first == line
        assert line not in agents
        assert "frame #" not in command.stderr
        assert sum("failed (exitcode: 2) local_rank: 0 " in each for each in agents) == 1
        assert command.wait_until_gone() == []


@pytest.mark.waits
def test_ranks_started_one_by_one_say_who_is_missing_until_their_time_is_up(launch, tmp_path: Path):
    port, nobodys = free_port(), free_port()
    alone = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    arguments = (*TINY, "launch.start_timeout_s=11", "hydra.run.dir=run")
    first = launch(*arguments, folder=tmp_path, RANK="0", MASTER_PORT=str(port), **alone)
    second = launch(*arguments, folder=tmp_path, RANK="1", MASTER_PORT=str(nobodys), **alone)
    wrong = launch(*arguments, folder=tmp_path, RANK="2", MASTER_PORT=str(port), **alone)
    assert wrong.wait() == 2
    [line] = wrong.stderr.splitlines()
    assert line.startswith("RANK: got 2; it must be below WORLD_SIZE=2; torchrun sets all of them")
    first.wait_for_text(first.error_path, "rank 0 waits for rank 1 (10 of 11 s)")
    assert listening(first) <= {"127.0.0.1", "::1"}
    assert (first.wait(), second.wait()) == (1, 1)
    assert first.stderr.splitlines() == [
        "rank 0 waits for rank 1 (10 of 11 s)",
        "rank 1 did not come within 11 s (launch.start_timeout_s); start all ranks, with the same WORLD_SIZE, "
        "MASTER_ADDR and MASTER_PORT",
    ]
    keeper = f"rank 0 at 127.0.0.1:{nobodys}"
    assert second.stderr.splitlines() == [
        f"rank 1 waits for {keeper} (10 of 11 s)",
        f"{keeper} did not come within 11 s (launch.start_timeout_s); start it, with the same MASTER_ADDR and "
        "MASTER_PORT",
    ]


def listening(command: Command) -> set[str]:
    """The addresses that its processes can be reached at."""
    sockets = [each for process in command.processes() for each in process.net_connections("tcp")]
    return {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}


def test_ranks_of_one_machine_cannot_be_reached_from_others_and_their_files_be_read_by_nobody_else(tmp_path: Path):
    launch = " ".join([str(REPOSITORY / "launch.py"), *TINY, "model._target_=misbehaving.MisbehavingMLP"])
    options = "+model.action=sleep train.profile=true launch.nproc_per_node=2 hydra.run.dir=run"
    command = Command(["sh", "-c", f'umask 077; exec "$0" {launch} {options}', sys.executable], tmp_path)
    command.wait_for_text(tmp_path / "run/ranks/1.log", "asleep")
    assert listening(command) <= {"127.0.0.1", "::1"}
    command.stop_at_once(signal.SIGINT)
    assert command.wait() == 130
    modes = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o077 for path in (tmp_path / "run").rglob("*")}
    assert {"run/result.json", "run/config.yaml", "run/.lock", "run/.hydra/config.yaml", "run/ranks/0.log"} <= set(
        modes
    )
    assert {path for path, mode in modes.items() if mode} == set()
    assert command.wait_until_gone() == []
