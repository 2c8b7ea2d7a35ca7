"""`zerotrain alive RUN`: a sign of life that is young enough."""

import os
import time
from pathlib import Path

import pytest

from zerotrain.commands.alive import main


def test_a_run_is_alive_within_the_time_and_not_after_it(tmp_path: Path, capsys):
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{tmp_path}: no sign of life: alive: No such file or directory\n"
    (tmp_path / "alive").touch()
    os.utime(tmp_path / "alive", times=(0, time.time() - 200))
    assert main([str(tmp_path)]) == main([str(tmp_path), "--within", "4m"]) == 0
    assert main([str(tmp_path), "--within", "190s"]) == 1
    assert capsys.readouterr().out.count(f"{tmp_path}: the last sign of life was 3 min ago\n") == 3


@pytest.mark.parametrize("within", ["300", "soon", "5tokens", "-3s"])
def test_what_is_no_time_is_one_line(tmp_path: Path, capsys, within: str):
    assert main([str(tmp_path), f"--within={within}"]) == 2
    assert capsys.readouterr().err == f"--within: got {within}; it must be a time such as 300s, 15m or 2h\n"
