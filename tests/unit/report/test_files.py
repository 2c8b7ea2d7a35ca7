"""sweep.csv, sweep.json and report.html: the same rows, whole or not at all, in place of nobody's files."""

import csv
import json
from pathlib import Path

import pytest

from tests.unit.report.folders import job, refused
from zerotrain.errors import ConfigError
from zerotrain.report.files import HEADS, write_reports


def in_csv(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def test_csv_and_json_have_the_same_rows(tmp_path: Path):
    job(tmp_path / "0", ["zero.stage=1", "optimizer.lr=0.1"])
    job(
        tmp_path / "1",
        ["zero.stage=2", "optimizer.lr=0.2"],
        status="failed",
        error='broken, "quoted"',
        final_val_loss=None,
    )
    refused(tmp_path / "2", ["zero.stage=5"], "zero.stage: got 5")
    write_reports(tmp_path)
    told = json.loads((tmp_path / "sweep.json").read_text())
    with (tmp_path / "sweep.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(told["jobs"]) == 3
    for line, row in zip(lines, told["jobs"], strict=True):
        flat = {**row, **row.pop("settings")}
        assert line == {name: in_csv(value) for name, value in flat.items() if name != "settings"}
    assert (told["best"], told["loss"], told["counts"]) == ("0", "final_val_loss", {"failed": 2, "completed": 1})
    assert lines[0]["final_val_loss"] == "3.0"


def test_nothing_in_the_csv_is_a_formula(tmp_path: Path):
    job(tmp_path / "=cmd|'calc'!A1", ["model.num_layers=+1+1"])
    job(tmp_path / "@x", ["model.num_layers='=2'"])
    write_reports(tmp_path)
    with (tmp_path / "sweep.csv").open(newline="") as file:
        cells = [cell for line in csv.reader(file) for cell in line]
    assert "'=cmd|'calc'!A1" in cells
    assert "'=2" in cells
    assert [cell for cell in cells if cell.startswith(("=", "+", "@"))] == []


def test_a_setting_with_the_name_of_a_column_forges_none_and_no_name_moves_the_cursor(tmp_path: Path):
    path = job(tmp_path / "0", status="failed", error="broken", final_val_loss=None) / "config.yaml"
    names = ("status", "job", "error", "final_val_loss", "=cmd", "\x1b[2J", "a\nb", "x" * 500)
    quoted = (name if name.isidentifier() else json.dumps(name) for name in names)
    path.write_text(path.read_text() + "".join(f"{name}: forged\n" for name in quoted))
    job(tmp_path / "1", ["\x1b[31m=1", "+status=forged"], given=["\x1b[31m=1", "+status=forged"])
    report = write_reports(tmp_path)
    with (tmp_path / "sweep.csv").open(newline="") as file:
        head, first, _ = csv.reader(file)
    assert len(set(head)) == len(head)
    row = dict(zip(head, first, strict=True))
    assert [row[name] for name in ("job", "status", "error", "final_val_loss")] == ["0", "failed", "broken", ""]
    assert (row["folder"], row["config.status"]) == (str(tmp_path / "0"), "forged")
    assert first.count("forged") == len(names)
    for name in (*head, *report.settings):
        assert name.isprintable()
        assert len(name) <= 201
    assert [name for name in head if name.startswith("=")] == []


def test_json_has_no_nan_and_any_name_is_written(tmp_path: Path):
    path = job(tmp_path / "\udcff\u202e") / "config.yaml"
    path.write_text(path.read_text().replace("lr: 0.003", "lr: .nan"))
    job(tmp_path / "1")
    write_reports(tmp_path)
    told = json.loads((tmp_path / "sweep.json").read_text(), parse_constant=pytest.fail)
    assert [row["job"] for row in told["jobs"]] == ["1", "\\udcff\\u202e"]
    assert told["jobs"][1]["settings"] == {"optimizer.lr": "nan"}


def test_reports_are_written_again_and_leave_nothing_else(tmp_path: Path):
    job(tmp_path / "0")
    write_reports(tmp_path)
    job(tmp_path / "1")
    assert len(write_reports(tmp_path).rows) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", *HEADS}
    for name, head in HEADS.items():
        assert (tmp_path / name).read_bytes().startswith(head)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("content", ["", "mine", None])
def test_a_file_of_somebody_else_stays_and_so_do_the_others(tmp_path: Path, name: str, content: str | None):
    job(tmp_path / "0")
    (tmp_path / name).mkdir() if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=rf"{name} is no report of zerotrain, and stays as it is"):
        write_reports(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"0", name}
    assert content is None or (tmp_path / name).read_text() == content


def test_what_has_changed_is_read_again(tmp_path: Path):
    path = job(tmp_path / "0") / "metrics.jsonl"
    before = write_reports(tmp_path).rows[0].train
    path.write_text(path.read_text() + '{"step": 99, "train_loss": 1.0}\n')
    after = write_reports(tmp_path).rows[0].train
    assert len(after.step) == len(before.step) + 1
    result = tmp_path / "0/result.json"
    result.write_text(result.read_text().replace('"final_val_loss": 3.0', '"final_val_loss": 2.0'))
    assert write_reports(tmp_path).rows[0]["final_val_loss"] == 2.0
