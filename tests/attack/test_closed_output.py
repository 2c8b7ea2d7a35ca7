"""A run whose output nobody reads any more goes on to its end."""

import sys
from pathlib import Path

import pytest
from commands import REPOSITORY, TINY, Command, result_of

HAND = (sys.executable, str(REPOSITORY / "launch.py"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(REPOSITORY / "launch.py"))


def in_shell(line: str, *command: str, folder: Path) -> Command:
    """A command as "$@" of a line of the shell."""
    return Command(["sh", "-c", line, "sh", *command], folder)


@pytest.mark.parametrize("line", ['{ "$@"; echo $? > code; } | head -1', '"$@" >&- 2>&-; echo $? > code'])
def test_a_run_goes_on_when_its_output_is_closed(tmp_path: Path, line: str):
    run = (*TINY, "train.max_steps=30", "hydra.run.dir=run", "launch.nproc_per_node=2")
    command = in_shell(line, *HAND, *run, folder=tmp_path)
    command.wait()
    assert (tmp_path / "code").read_text() == "0\n", command.stderr
    assert (command.stdout.count("\n"), command.stderr) == ("head" in line, "")
    assert result_of(tmp_path / "run")["status"] == "completed"
    assert "step 30/30" in (tmp_path / "run/ranks/0.log").read_text()


def test_a_sweep_goes_on_when_its_output_is_closed(tmp_path: Path):
    sweep = ("-m", *TINY, "zero.stage=1,2", "hydra.sweep.dir=sweep")
    command = in_shell('{ "$@"; echo $? > code; } 2>&1 | head -1', *HAND, *sweep, folder=tmp_path)
    command.wait()
    assert (tmp_path / "code").read_text() == "0\n", command.stdout
    assert [result_of(tmp_path / "sweep" / job)["status"] for job in ("0", "1")] == ["completed", "completed"]


def test_under_torchrun_too(tmp_path: Path):
    command = in_shell('{ "$@"; echo $? > code; } | head -1', *TORCHRUN, *TINY, "hydra.run.dir=run", folder=tmp_path)
    command.wait()
    assert (tmp_path / "code").read_text() == "0\n", command.stderr
    assert "Traceback" not in command.stderr
    assert result_of(tmp_path / "run")["status"] == "completed"
