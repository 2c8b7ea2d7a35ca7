"""What the command line of the benchmarks refuses, and the files a run leaves."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.engines import ENGINES, choose_engines
from benchmarks.time_limit import TimeLimit


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engines", "zero2,zer03"], "unknown engine 'zer03'; allowed: all, alone"),
        (["--engines", "ddp_bf16"], "none of these can be run: ddp_bf16 runs in bf16 only, not in fp32"),
        (["--engines", "alone", "--size", "tiny", "--time-limit", "0.001"], "no engine could be measured in time"),
        (["--engines", "deepspeed3", "--compile"], "deepspeed3 does not work with --compile"),
        (["--device", "cuda", "--ranks", str(torch.cuda.device_count() + 1)], "GPU"),
    ],
)
def test_what_cannot_run_here_is_refused_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_what_cannot_run_here_is_left_out_with_the_reason_where_others_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "deepspeed2", replace(ENGINES["deepspeed2"], package="a_package_nobody_has"))
    reason = "needs the package a_package_nobody_has, which is not installed (pip install -e '.[bench]')"
    left_out = {"deepspeed2": reason, "ddp_bf16": "runs in bf16 only, not in fp32"}
    assert choose_engines("zero2,deepspeed2,ddp_bf16", "fp32") == (["zero2"], left_out)
    assert "deepspeed2" not in choose_engines("all", "fp32")[0]
    monkeypatch.setitem(sys.modules, "benchmarks.engines.ours", None)  # without Hydra, say
    able, left_out = choose_engines("zero2,alone", "fp32")
    assert able == ["alone"]
    assert left_out["zero2"].startswith("needs the package benchmarks.engines.ours, which is not installed")


def test_a_run_leaves_its_numbers_its_table_and_what_the_time_limit_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TimeLimit, "has_room_for", lambda limit, name: name != "ddp")
    options = ["--size", "tiny", "--engines", "alone,zero2,ddp", "--rounds", "1", "--warmup", "1", "--steps", "2"]
    code = main([*options, "--time-limit", "900", "--out", str(tmp_path)])
    output = capsys.readouterr()
    assert code == 0, output.err
    measured = json.loads((tmp_path / "results.json").read_text())["measurements"]
    assert [each["engine"] for each in measured] == ["alone", "zero2"]
    report = (tmp_path / "report.md").read_text()
    assert report in output.out
    assert "ddp left out: 1 of 1 rounds, by the time limit of 900 s." in report


def test_a_run_that_would_outlast_the_limit_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    limit = TimeLimit(100)
    for name, duration_s in (("slow", 45), ("fast", 10)):
        assert limit.has_room_for(name)
        with limit.timed(name):
            now_s += duration_s
    assert limit.left_s == 45
    assert limit.has_room_for("fast")
    assert not limit.has_room_for("slow")
    assert not limit.has_room_for("unknown")
    assert TimeLimit(None).has_room_for("slow")
