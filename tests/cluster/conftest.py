"""A Slurm of three nodes, and hosts with networks of their own, on this machine, for the tests that need one."""

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from commands import REPOSITORY, USER_CODE, by_hand, result_of

from benchmarks.errors import BenchmarkError
from tests.cluster.hosts import Hosts, joined_hosts
from tests.cluster.jobs import LAUNCH, RUN
from tests.zygote.client import Zygote

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "slurm.sh"
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
NUM_HOSTS = 3
Undisturbed = Callable[..., str]


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three hosts; tests that need two leave the last one alone."""
    try:
        with joined_hosts(NUM_HOSTS, tmp_path_factory.mktemp("hosts")) as hosts:
            yield hosts
    except BenchmarkError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def slurm() -> Iterator[str]:
    """The path of its slurm.conf."""
    if os.geteuid() != 0:
        pytest.skip("slurmd starts tasks as their users: run as root")
    if missing := [name for name in PROGRAMS if shutil.which(name, path="/usr/sbin:/usr/bin") is None]:
        pytest.skip(f"not installed: {', '.join(missing)}; apt-get install slurm-wlm munge")
    for node in ("n0", "n1", "n2"):
        try:
            socket.getaddrinfo(node, None)
        except OSError:
            pytest.skip(f"{node} is no name here, where tasks are to meet; add `127.0.0.1 {node}` to /etc/hosts")
    folder = Path("/tmp") / f"zerotrain_slurm_{os.getpid()}"  # no folder that is for its owner alone
    subprocess.run([SCRIPT, "start", folder], check=True, stdin=subprocess.DEVNULL)
    yield str(folder / "slurm.conf")
    subprocess.run([SCRIPT, "stop", folder], check=True)
    shutil.rmtree(folder, ignore_errors=True)  # slurmctld may still write into it


@pytest.fixture(scope="session")
def in_slurm(slurm: str) -> None:
    """Commands of this process find the Slurm, zerotrain, the model that waits and those that misbehave."""
    search = os.pathsep.join(map(str, (REPOSITORY, USER_CODE, HERE)))
    os.environ |= {"SLURM_CONF": slurm, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def undisturbed_job(in_slurm: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sha256 of the weights of the run that nobody stops."""
    folder = tmp_path_factory.mktemp("undisturbed_job")
    (folder / "go_on").touch()
    command = [*LAUNCH.split(), *RUN, "hydra.run.dir=run", "launch.nproc_per_node=2"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return str(result_of(folder / "run")["weights_sha256"])


@pytest.fixture(scope="session")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The weights of a run on one host, by its settings."""

    @cache
    def weights(*arguments: str) -> str:
        folder = tmp_path_factory.mktemp("undisturbed")
        assert by_hand(*arguments, folder=folder, zygote=zygote).wait() == 0
        return str(result_of(folder / "run")["weights_sha256"])

    return weights
