"""One run over several hosts, which are network namespaces: the bits of one host, and a cable that is pulled."""

import json
import re
import time
from itertools import groupby
from pathlib import Path

import pytest
from commands import TINY, Command, result_of

from tests.cluster.conftest import Undisturbed
from tests.cluster.hosts import Hosts
from tests.cluster.jobs import num_steps

RUN = (*TINY, "train.max_steps=150", "checkpoint.every=20", "hydra.run.dir=run")
TIMEOUT_S = 10
AT_ONCE_S = 60
"""Far above the ten seconds that all hosts take on a quiet machine, far below the quarter of an hour of TCP."""


def start_torchruns(hosts: Hosts, num_hosts: int, kind: str, *arguments: str, folder: Path) -> list[Command]:
    """Start torchrun on so many hosts, with a rank each; returns them by host."""
    common = (f"--nnodes={num_hosts}", "--nproc-per-node=1")
    options = [(*common, *meeting) for meeting in hosts.meeting(kind)]
    return [hosts.by_torchrun(host, options[host], *arguments, folder=folder) for host in range(num_hosts)]


def ended(commands: list[Command]) -> list[int]:
    return [command.wait() for command in commands]


def wait_for_step(step: int, folder: Path, commands: list[Command]) -> None:
    while num_steps(folder / "run") < step:
        assert all(command.process.poll() is None for command in commands), commands[0].stderr
        time.sleep(0.02)


SHORT = (*TINY, "hydra.run.dir=run")


@pytest.mark.parametrize(("stage", "num_hosts"), [(0, 2), (1, 3), (2, 2), (3, 3)])
def test_hosts_have_the_bits_of_one_at_every_stage(hosts, undisturbed, tmp_path, stage, num_hosts) -> None:
    """No variable names an interface; the names of these hosts stand for no address, so gloo takes the loopback."""
    run = (*SHORT, f"zero.stage={stage}")
    commands = hosts.start(num_hosts, 2, *run, folder=tmp_path)
    assert ended(commands) == [0] * 2 * num_hosts, commands[0].stderr
    assert result_of(tmp_path / "run")["weights_sha256"] == undisturbed(
        *SHORT, f"launch.nproc_per_node={2 * num_hosts}"
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["static", "c10d"])
def test_torchrun_starts_ranks_on_two_hosts_and_on_three_by_either_rendezvous(
    hosts: Hosts, undisturbed: Undisturbed, tmp_path: Path, kind: str, stage: int
) -> None:
    num_hosts = 2 + (stage + (kind == "c10d")) % 2
    commands = start_torchruns(hosts, num_hosts, kind, *SHORT, f"zero.stage={stage}", folder=tmp_path)
    assert ended(commands) == [0] * num_hosts, commands[0].stderr
    assert result_of(tmp_path / "run")["weights_sha256"] == undisturbed(*SHORT, f"launch.nproc_per_node={num_hosts}")


@pytest.mark.parametrize(
    ("setting", "variables", "remedy"),
    [
        ("launch.interface=lo", {}, "use launch.interface=e0"),
        ("launch.interface=null", {}, "use launch.interface=e0"),
        ("launch.interface=auto", {"GLOO_SOCKET_IFNAME": "lo"}, "unset GLOO_SOCKET_IFNAME"),
    ],
)
def test_ranks_that_would_listen_where_no_other_host_reaches_them_are_refused_in_one_line(
    hosts: Hosts, tmp_path: Path, setting: str, variables: dict[str, str], remedy: str
) -> None:
    commands = hosts.start(2, 1, *SHORT, setting, folder=tmp_path, **variables)
    assert ended(commands) == [2, 2]
    said = (
        " rank 0 on n0 would listen at 127.0.0.1, where no other host reaches it: e0 (10.78.0.1) reaches MASTER_ADDR; "
    )
    for command in commands:
        [line] = [each for each in command.stderr.splitlines() if "[c10d]" not in each]
        assert "rank 0 on n0 would listen at 127.0.0.1, " in line
        assert line.endswith(f"{said}{remedy}")


@pytest.mark.parametrize("axes", [(), ("zero.stage=3", "zero.shard_size=host")], ids=["flat", "mesh"])
def test_a_pulled_cable_ends_all_hosts_in_time_with_one_ending_and_the_run_goes_on_to_the_same_bits(
    hosts: Hosts, undisturbed: Undisturbed, tmp_path: Path, axes: tuple[str, ...]
) -> None:
    """The host without the store waited for it for a quarter of an hour, and wrote over the ending (2026-11-24)."""
    commands = hosts.start(2, 2, *RUN, *axes, f"launch.timeout_s={TIMEOUT_S}", folder=tmp_path)
    wait_for_step(20, tmp_path, commands)
    hosts.cut(1)
    cut_s = time.monotonic()
    try:
        assert ended(commands) == [1] * 4
        took_s = time.monotonic() - cut_s
    finally:
        hosts.mend(1)
    assert took_s < TIMEOUT_S + AT_ONCE_S
    error = result_of(tmp_path / "run")["error"]
    assert re.match(r"n[01] \(ranks \d, \d\) is gone: did not answer for \d+ s", error), error
    for of_host in (commands[:2], commands[2:]):
        assert error.splitlines()[0] in of_host[0].stderr + of_host[1].stderr
    again = hosts.start(2, 2, *RUN, "checkpoint.resume=auto", folder=tmp_path)
    assert ended(again) == [0] * 4
    assert result_of(tmp_path / "run")["weights_sha256"] == undisturbed(*RUN, "launch.nproc_per_node=4")


@pytest.mark.parametrize("is_cut", [0, 1])
@pytest.mark.parametrize("kind", ["static", "c10d"])
def test_a_pulled_cable_ends_each_torchrun_in_time_and_the_run_goes_on_to_the_same_bits(
    hosts: Hosts, undisturbed: Undisturbed, tmp_path: Path, kind: str, is_cut: int
) -> None:
    """Of c10d, the torchrun without the store waited for it for a quarter of an hour (torch 2.13, 2026-11-24)."""
    commands = start_torchruns(hosts, 2, kind, *RUN, f"launch.timeout_s={TIMEOUT_S}", folder=tmp_path)
    wait_for_step(20, tmp_path, commands)
    hosts.cut(is_cut)
    cut_s = time.monotonic()
    try:
        codes = ended(commands)
        took_s = time.monotonic() - cut_s
    finally:
        hosts.mend(is_cut)
    assert took_s < TIMEOUT_S + AT_ONCE_S
    assert codes[0] == 1
    assert codes[1] == (-9 if kind == "c10d" else 1)
    assert ("does not answer, as its ranks have ended: it is killed" in commands[1].stderr) == (kind == "c10d")
    error = result_of(tmp_path / "run")["error"].splitlines()[0]
    assert re.match(r"n[01] \(rank \d\) is gone: did not answer for \d+ s", error), error
    assert all(error in command.stderr for command in commands)
    again = start_torchruns(hosts, 2, kind, *RUN, "checkpoint.resume=auto", folder=tmp_path)
    assert ended(again) == [0, 0], again[0].stderr
    assert result_of(tmp_path / "run")["weights_sha256"] == undisturbed(*RUN, "launch.nproc_per_node=2")


SHARED = (*RUN, "train.max_steps=400", "train.virtual_ranks=4", "checkpoint.keep=null")
SLOW = ("model._target_=misbehaving.PacedMLP", "+model.seconds=0.05")


def test_hosts_that_go_and_come_change_the_number_of_ranks_and_no_bit(hosts, undisturbed, tmp_path) -> None:
    """Two hosts, one, and two again. Torch's default lets no host join a rank 0 that is there (torch 2.13)."""
    elastic = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5")
    options = [(*elastic, *meeting) for meeting in hosts.meeting("c10d")]

    def start(host: int) -> Command:
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return hosts.by_torchrun(
            host, options[host], *SHARED, *SLOW, "checkpoint.resume=auto", folder=tmp_path, **variables
        )

    first, second = start(0), start(1)
    wait_for_step(30, tmp_path, [first, second])
    for process in second.processes():
        process.kill()
    alone = num_steps(tmp_path / "run")
    wait_for_step(alone + 25, tmp_path, [first])
    again = start(1)
    assert ended([first, again]) == [0, 0], first.stderr + again.stderr
    assert "warning" not in first.stderr
    result = result_of(tmp_path / "run")
    assert result["world_size"] == 2
    manifests = sorted((tmp_path / "run/checkpoints").glob("step-*/manifest.json"))
    saved_by = [json.loads(path.read_text())["ranks"] for path in manifests]
    assert [ranks for ranks, _ in groupby(saved_by)] == [2, 1, 2]  # each attempt has left some
    assert result["weights_sha256"] == undisturbed(*SHARED, "launch.nproc_per_node=2")


@pytest.mark.slow
@pytest.mark.case(
    "hosts: Ranks that compute wrongly",
    "`train.on_corruption=drop` on two hosts of two ranks, one of which computes wrongly",
    "its host leaves the run, and the other goes on to the weights of an undisturbed run",
)
def test_a_host_that_computes_wrongly_is_dropped_and_the_others_come_to_the_undisturbed_bits(
    hosts: Hosts, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    elastic = ("--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3")
    options = [(*elastic, *meeting) for meeting in hosts.meeting("c10d")]
    run = (*RUN, "train.virtual_ranks=4", "train.verify_every=7", "checkpoint.every=5")
    run = (*run, "model._target_=misbehaving.MiscomputingMLP", "+model.where='n1 0'", "+model.at=40")
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    drops = (*run, "train.on_corruption=drop", "checkpoint.resume=auto")
    commands = [hosts.by_torchrun(host, options[host], *drops, folder=tmp_path, **variables) for host in range(2)]
    codes = ended(commands)
    assert codes[0] == 0, commands[0].stderr
    assert codes[1] != 0
    assert "train.on_corruption=drop: this host leaves the run" in commands[1].stderr
    assert re.search(r"rank [0-3] on n1 \(CPU\) computes or remembers wrongly", commands[1].stderr)
    result = result_of(tmp_path / "run")
    assert (result["world_size"], result["status"]) == (2, "completed")
    assert result["weights_sha256"] == undisturbed(*run, "launch.nproc_per_node=2")
