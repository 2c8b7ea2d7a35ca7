"""A Slurm of three nodes on this machine, for the tests that need one."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent / "slurm.sh"
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")


@pytest.fixture(scope="session")
def slurm() -> Iterator[str]:
    """The path of its slurm.conf."""
    if os.geteuid() != 0:
        pytest.skip("slurmd starts tasks as their users: run as root")
    if missing := [name for name in PROGRAMS if shutil.which(name, path="/usr/sbin:/usr/bin") is None]:
        pytest.skip(f"not installed: {', '.join(missing)}; apt-get install slurm-wlm munge")
    folder = Path("/tmp") / f"zerotrain_slurm_{os.getpid()}"  # no folder that is for its owner alone
    subprocess.run([SCRIPT, "start", folder], check=True, stdin=subprocess.DEVNULL)
    yield str(folder / "slurm.conf")
    subprocess.run([SCRIPT, "stop", folder], check=True)
    shutil.rmtree(folder)
