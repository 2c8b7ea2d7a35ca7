"""An export that a signal ends leaves nothing, and what was there before."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.commands.export.test_export import exported
from tests.unit.commands.export.test_overwrite import contents, run, saved
from zerotrain.testing.ranks import HANG_S

__all__ = ["run", "saved"]

SLOW = """
import sys, time
from zerotrain.commands.export import command
from zerotrain.commands.export import main
from zerotrain.files.terminal import run_command
write = command.write_safetensors
def slow(folder, *given, **options):
    write(folder, *given, **options)
    print("written", flush=True)
    time.sleep(3600)
command.write_safetensors = slow
run_command(main)
"""


@pytest.mark.parametrize(
    ("signals", "code"),
    [((signal.SIGTERM,), 143), ((signal.SIGHUP,), 129), ((signal.SIGINT, signal.SIGINT, signal.SIGTERM), 130)],
    ids=["SIGTERM", "SIGHUP", "Ctrl-C, again and again"],
)
@pytest.mark.thinned(3, first=1)
def test_a_signal_leaves_nothing_and_what_was_there(
    signals: tuple[signal.Signals, ...], code: int, run: Path, tmp_path: Path
) -> None:
    out = exported(run, tmp_path / "out")
    before = contents(tmp_path)
    command = [sys.executable, "-c", SLOW, str(run), "--out", str(out), "--overwrite"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ, preexec_fn=heed_signals
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    for each in signals:
        process.send_signal(each)
        time.sleep(0.005)
    _, said = process.communicate(timeout=HANG_S)
    assert (process.returncode, "Traceback" in said, said.count("\n")) == (code, False, 1)
    assert "nothing is left" in said
    assert contents(tmp_path) == before


def heed_signals() -> None:
    """In the child: one that a shell has started in the background ignores Ctrl-C, and one behind nohup SIGHUP."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
