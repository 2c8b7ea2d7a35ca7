"""`zerotrain report FOLDER...`: the files of any runs, and one line for what is none."""

import json
from pathlib import Path

import pytest

from tests.unit.report.folders import write_job
from zerotrain.commands.report import main
from zerotrain.report.files import HEADS


def test_a_sweep_is_told_and_where_the_files_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_job(tmp_path / "0", ["zero.stage=1"])
    write_job(tmp_path / "1", ["zero.stage=2"])
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["job", "overrides", "status"]
    assert lines[-1] == f"in {tmp_path}: report.html, sweep.csv, sweep.json"
    assert HEADS.keys() <= {path.name for path in tmp_path.iterdir()}


def test_runs_of_several_folders_are_told_apart(tmp_path: Path):
    for name in ("a/0", "a/1", "b/0"):
        write_job(tmp_path / name)
    given = [str(tmp_path / name) for name in ("a", "b/0")]
    assert main([*given, "--out", str(tmp_path / "new/out")]) == 0
    told = json.loads((tmp_path / "new/out/sweep.json").read_text())
    assert [row["job"] for row in told["jobs"]] == ["a/0", "a/1", "b/0"]
    assert not (tmp_path / "a/report.html").exists()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["none"], "FOLDER: got none, which is no folder; give one in which result.json or metrics.jsonl lies"),
        (["empty"], "FOLDER: got empty, which has no run; give one in which result.json or metrics.jsonl lies"),
        (["run/result.json"], "FOLDER: got run/result.json, which is no folder; give one"),
        (["run", "empty"], "--out: is not given, and there are 2 folders; say where the report is to lie"),
        (["run", "--out", "file"], "--out: got file, which cannot be written: File exists; give another folder"),
        (["mine"], "mine/report.html is no report of zerotrain, and stays as it is; rename it, or give --out"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, monkeypatch, capsys, given: list[str], line: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    write_job(tmp_path / "run")
    write_job(tmp_path / "mine")
    (tmp_path / "mine/report.html").write_text("notes")
    before = sorted(tmp_path.rglob("*"))
    assert main(given) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
