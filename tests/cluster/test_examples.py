"""The commands of examples/, on two hosts, with the variables and the names that their systems give them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from commands import REPOSITORY, TINY, result_of

from tests.cluster.conftest import Undisturbed
from tests.cluster.hosts import Hosts
from tests.cluster.jobs import num_steps
from tests.ranks.processes import HANG_S

RUN = (*TINY, "train.max_steps=150", "checkpoint.every=null")
NAMES = """\
127.0.0.1 localhost
10.78.0.1 n0 zerotrain-0 zerotrain-0.zerotrain zerotrain-node-0-0.zerotrain
10.78.0.2 n1 zerotrain-1 zerotrain-1.zerotrain zerotrain-node-0-1.zerotrain
"""
"""As a headless service gives them."""
WITH_NAMES = 'mount --bind "$1" /etc/hosts && exec sh -c "$0"'


def script_of(name: str) -> str:
    document = list(yaml.safe_load_all((REPOSITORY / "examples" / name).read_text()))[-1]
    match name:
        case "indexed-job.yaml":
            [container] = document["spec"]["template"]["spec"]["containers"]
            script = container["args"][0]
        case "trainjob.yaml":
            script = document["spec"]["trainer"]["args"][0]
        case _:
            script = document["run"]
    return str(script)


def variables_of(name: str, number: int) -> dict[str, str]:
    """What the system sets on a host: of Kubeflow's trainer, as its runtime torch-distributed does."""
    indexed = {"JOB_COMPLETION_INDEX": str(number)}
    first = "zerotrain-node-0-0.zerotrain"
    torch = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(number), "PET_MASTER_ADDR": first}
    sky = {"NUM_NODES": "2", "NODE_RANK": str(number), "NUM_GPUS_PER_NODE": "1", "NODE_IPS": "10.78.0.1\n10.78.0.2"}
    return {
        "indexed-job.yaml": indexed,
        "trainjob.yaml": indexed | torch | {"PET_MASTER_PORT": "29400"},
        "skypilot.yaml": {f"SKYPILOT_{key}": value for key, value in sky.items()},
    }[name]


def started(hosts: Hosts, name: str, folder: Path) -> list[subprocess.Popen[bytes]]:
    """The shells of both hosts, each of which is what its system sends a signal to."""
    (folder / "names").write_text(NAMES)
    (folder / "runs").mkdir(exist_ok=True)
    changes = {"/runs": str(folder / "runs"), "--nproc-per-node 8": "--nproc-per-node 1"}
    script = script_of(name).replace("zero.stage=3", " ".join(["zero.stage=3", *RUN]))
    for written, here in changes.items():
        script = script.replace(written, here)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return [
        subprocess.Popen(
            [*host.command_prefix, "unshare", "--mount", "sh", "-c", WITH_NAMES, script, folder / "names"],
            cwd=REPOSITORY,
            env=os.environ | {"PATH": path, "PYTHONPATH": str(REPOSITORY)} | variables_of(name, number),
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"{number}.err").open("ab"),
        )
        for number, host in enumerate(hosts.hosts[:2])
    ]


def codes(shells: list[subprocess.Popen[bytes]]) -> list[int]:
    return [shell.wait(HANG_S) for shell in shells]


@pytest.mark.parametrize("name", ["indexed-job.yaml", "trainjob.yaml", "skypilot.yaml"])
def test_the_commands_of_an_example_stop_in_order_go_on_and_end_with_the_bits_of_one_host(
    hosts: Hosts, undisturbed: Undisturbed, name: str, tmp_path: Path
) -> None:
    if name != "skypilot.yaml":  # which takes its machines away without a signal
        shells = started(hosts, name, tmp_path)
        while num_steps(tmp_path / "runs/first") < 5:
            assert all(shell.poll() is None for shell in shells), (tmp_path / "0.err").read_text()
            time.sleep(0.02)
        shells[1].send_signal(signal.SIGTERM)  # of one pod alone
        assert codes(shells) == [85, 85], (tmp_path / "0.err").read_text()
        assert result_of(tmp_path / "runs/first")["status"] == "stopped"
    assert codes(started(hosts, name, tmp_path)) == [0, 0], (tmp_path / "0.err").read_text()
    result = result_of(tmp_path / "runs/first")
    assert (result["status"], result["steps"]) == ("completed", 150)
    assert result["weights_sha256"] == undisturbed(*RUN, "hydra.run.dir=run", "launch.nproc_per_node=2")
