"""Attacks that need processes of their own: what a rank shouts, and where and how a command is started."""

import sys
from pathlib import Path

import pytest
from commands import REPOSITORY, TINY, Command, result_of

SHOUTING = (*TINY, "model._target_=misbehaving.MisbehavingMLP", "+model.action=shout", "hydra.run.dir=run")


@pytest.mark.parametrize("starter", ["by hand", "by torchrun"])
def test_five_megabytes_that_cannot_be_printed_are_short_on_the_terminal_and_whole_in_the_log(
    torchrun, launch, tmp_path: Path, starter: str
):
    if starter == "by hand":
        command = launch(*SHOUTING, "launch.nproc_per_node=2", folder=tmp_path)
    else:
        command = torchrun(*SHOUTING, folder=tmp_path)
    assert command.wait() == 1
    assert command.stderr.startswith(r"rank 1 failed: ValueError: half \ud800, \x1b[2J\x07 and much much ")
    assert len(command.stderr) < 20_000
    assert not {"\x1b", "\x07"} & set(command.stderr)
    error = result_of(tmp_path / "run")["error"]
    assert error.startswith(r"rank 1 failed: ValueError: half \ud800, \x1b[2J\x07 and much much ")
    assert len(error) < 3000
    log = (tmp_path / "run/ranks/1.log").read_text()
    assert log.count("much ") >= 1_000_000
    assert command.wait_until_gone() == []


def test_a_run_needs_no_home_no_input_no_language_and_no_plain_path(tmp_path: Path):
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    environment = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONOPTIMIZE": "2", "PYTHONWARNINGS": "error"}
    unset = ("env", "-u", "HOME", "-u", "XDG_CACHE_HOME", "-u", "TERM")
    launch = (sys.executable, str(REPOSITORY / "launch.py"), *TINY, "launch.nproc_per_node=2", "zero.stage=3")
    run_dir = "hydra.run.dir='link/a b%s\\u00e9 é;\n$x'"
    closed = ("sh", "-c", 'exec "$@" <&-', "sh")
    command = Command([*closed, *unset, *launch, run_dir], tmp_path, environment | {"TMPDIR": str(tmp_path / "none")})
    assert command.wait() == 0, command.stderr
    assert command.stderr == ""
    [folder] = real.iterdir()
    assert folder.name == "a b%s\\u00e9 é;\n$x"
    assert result_of(folder)["status"] == "completed"


def test_a_folder_that_is_gone_is_said(tmp_path: Path):
    gone = ("sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "sh")
    command = Command([*gone, sys.executable, str(REPOSITORY / "launch.py"), *TINY], tmp_path)
    assert command.wait() == 2
    assert command.stderr == "the working directory no longer exists; change to one that does\n"


def test_too_few_open_files_are_no_traceback(tmp_path: Path):
    few = ("sh", "-c", 'ulimit -n 8; exec "$@"', "sh")
    command = Command([*few, sys.executable, str(REPOSITORY / "launch.py"), *TINY, "hydra.run.dir=run"], tmp_path)
    assert command.wait() != 0
    assert "Traceback" not in command.stderr
    assert len(command.stderr.splitlines()) == 1
    assert result_of(tmp_path / "run")["error"] == command.stderr.strip()
