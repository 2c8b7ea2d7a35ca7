"""A disk that fails is named with what it was to do; the last checkpoint is as it was, and leads to the same bits."""

import os
import re
from pathlib import Path

import pytest
from commands import REPOSITORY, TINY, Command, by_hand, result_of

RUN = (
    *TINY,
    "launch.nproc_per_node=2",
    "zero.stage=3",
    "zero.bucket_mb=0.004",
    "precision=bf16",
    "train.max_steps=6",
    "train.log_every=1",
    "checkpoint.every=2",
    "hydra.run.dir=run",
)
TO_DISK = ("offload.optimizer=disk", "offload.parameters=disk")
LOST = "its part of the training state is lost; resume from the last checkpoint, with offload.path on a disk that works"
AT = r"at bytes \d+ to \d+"
ENDS = {
    "EIO in a read": rf"cannot be read {AT} \(Input/output error\): {LOST}",
    "EIO in a write": rf"cannot be written {AT} \(Input/output error\): {LOST}",
    "EIO for a save": rf"cannot be read {AT} \(Input/output error\): {LOST}",
    "ENOSPC in a write": rf"cannot be written {AT} \(No space left on device\): {LOST}",
    "end of file": rf"cannot be read {AT} \(the file ends there\): {LOST}",
}


def run(folder: Path, *settings: str, fails: str) -> Command:
    """On a disk that fails rank 1 as soon as the checkpoint of step 2 is there."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "tests/attack/failing_disk"), str(REPOSITORY)]),
        "OPENBLAS_NUM_THREADS": "2",  # a thread: ranks are new Pythons then, which import what fails
        "ZEROTRAIN_FAILING_DISK": f"{fails}|1|{folder / 'run/checkpoints/step-00000002'}",
    }
    command = by_hand(*RUN, *settings, folder=folder, **environment)
    command.wait()
    return command


@pytest.fixture(scope="module")
def wanted(launch, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights after a run without offloading."""
    folder = tmp_path_factory.mktemp("wanted")
    assert launch(*RUN, folder=folder).wait() == 0
    return str(result_of(folder / "run")["weights_sha256"])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.case(
    "offload: Offload",
    "the disk gives EIO or ENOSPC, or its file ends; a rank is killed in a write",
    "named with the folder and the bytes; nothing is left there; the last checkpoint leads to the same bits",
)
@pytest.mark.parametrize("fails", [*ENDS, "kill in a write"])
@pytest.mark.thinned(3)
def test_the_failure_is_named_and_the_run_goes_on_from_its_last_checkpoint(
    fails: str, wanted: str, launch, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    command = run(tmp_path, *TO_DISK, f"offload.path={disk}", fails=fails)
    assert command.process.returncode == 1, command.stdout
    said = command.stderr.splitlines()
    if fails == "kill in a write":
        assert said[0].startswith("rank 1 was killed by SIGKILL")
    else:
        assert re.search(rf"offload\.path: the file of rank 1 in {re.escape(str(disk))} {ENDS[fails]}", command.stderr)
        assert re.match(r"rank \d failed: ", said[0])
    assert "Traceback" not in command.stderr
    assert command.wait_until_gone() == []
    assert list(disk.iterdir()) == []
    saved = tmp_path / "run/checkpoints/step-00000002"
    before = contents(saved)
    again = launch(*RUN, "offload.optimizer=cpu", "checkpoint.resume=auto", folder=tmp_path)
    assert again.wait() == 0, again.stderr
    assert result_of(tmp_path / "run")["weights_sha256"] == wanted
    assert not saved.exists() or contents(saved) == before


@pytest.mark.case("offload: Offload", "a read or write ends early", "continued")
def test_calls_that_end_early_change_nothing(wanted: str, tmp_path: Path) -> None:
    command = run(tmp_path, *TO_DISK, f"offload.path={tmp_path / 'disk'}", fails="short")
    assert (command.process.returncode, command.stderr) == (0, "")
    assert result_of(tmp_path / "run")["weights_sha256"] == wanted
