"""A disk that is full is said with its path, on stderr, though nothing can be written."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ON_TWO_RANKS, REPOSITORY, TINY, Command

RUN = (*TINY, "train.max_steps=300", "train.log_every=1", "hydra.run.dir=disk/run")
"""Its metrics.jsonl grows beyond the disk."""


def on_a_small_disk(*command: str, folder: Path, filled: str, disk: str = "disk") -> Command:
    """A command in a file system of its own of 64 KiB, `disk`, of which so much is taken."""
    isolated = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*isolated, "true"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace of its own")
    (folder / "disk").mkdir()
    mount = f'mount -t tmpfs -o size=64k tmpfs {disk} && head -c {filled} /dev/zero > {disk}/filled; exec "$@"'
    return Command([*isolated, "sh", "-c", mount, "sh", *command], folder)


@pytest.mark.parametrize("filled", ["0", "32k", "56k", "60k", "64k"])
@pytest.mark.thinned(2)
def test_a_full_disk_is_told_with_its_path_however_early_it_is_full(tmp_path: Path, filled: str):
    launch = (sys.executable, str(REPOSITORY / "launch.py"), *RUN, "launch.nproc_per_node=2")
    command = on_a_small_disk(*launch, folder=tmp_path, filled=filled)
    assert command.wait() == 1
    assert f"No space left on device: '{tmp_path / 'disk/run'}" in command.stderr
    assert "Traceback" not in command.stderr
    assert command.wait_until_gone() == []


def test_under_torchrun_too(tmp_path: Path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", *ON_TWO_RANKS, str(REPOSITORY / "launch.py"))
    command = on_a_small_disk(*torchrun, *RUN, folder=tmp_path, filled="0")
    assert command.wait() == 1
    assert f"rank 0 failed: OSError: [Errno 28] No space left on device: '{tmp_path / 'disk/run'}'" in command.stderr
    assert command.wait_until_gone() == []


@pytest.mark.parametrize("filled", ["0", "64k"])
def test_shared_memory_that_is_full_is_told_and_not_the_folder_of_the_run(tmp_path: Path, filled: str):
    """Seen: OSError [Errno 28] with the run's folder; or, where the worker had begun, no end at all."""
    launch = (sys.executable, str(REPOSITORY / "launch.py"), *TINY, "hydra.run.dir=run", "launch.nproc_per_node=2")
    large = ("data.num_workers=1", "data.seq_len=4096", "train.max_steps=2", "launch.timeout_s=30")
    command = on_a_small_disk(*launch, *large, folder=tmp_path, filled=filled, disk="/dev/shm")
    assert command.wait(120) == 1
    assert "shared memory(shm)" in command.stderr
    assert "/dev/shm is full; enlarge it (docker run --shm-size=8g), or set data.num_workers=0" in command.stderr
    assert command.wait_until_gone() == []
