"""The folder that ranks meet in goes with the process that made it."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerotrain.launching.spawn import ranks_folder

MADE = (
    "import sys, tempfile; from pathlib import Path; from zerotrain.launching.spawn import ranks_folder\n"
    "with ranks_folder() as folder:\n"
    "    (Path(folder) / 'job.json').touch(); print(folder, flush=True); sys.stdin.read()\n"
)


def test_it_is_there_for_its_owner_alone_and_gone_behind() -> None:
    with ranks_folder() as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        (Path(folder) / "job.json").touch()
    assert not Path(folder).exists()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_it_goes_with_a_process_that_was_killed(tmp_path: Path, signum: signal.Signals) -> None:
    command = [sys.executable, "-c", MADE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert folder.parent == tmp_path
        process.send_signal(signum)
        process.wait()
    deadline = time.monotonic() + 20
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_a_process_to_be_had_it_goes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*arguments: object, **options: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", none_left)
    with ranks_folder() as folder:
        pass
    assert not Path(folder).exists()
