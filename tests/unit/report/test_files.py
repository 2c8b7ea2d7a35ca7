"""sweep.csv, sweep.json and report.html: the same rows, whole or not at all, in place of nobody's files."""

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.report.folders import refused, write_job, write_result
from zerotrain.errors import ConfigError
from zerotrain.report.files import HEADS, print_table, write_files
from zerotrain.report.rows import Report, read_report


def write_reports(folder: Path) -> Report:
    report = read_report(folder)
    write_files(report, folder)
    return report


def in_csv(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def test_csv_and_json_have_the_same_rows(tmp_path: Path):
    write_job(tmp_path / "0", ["zero.stage=1", "optimizer.lr=0.1"])
    write_job(
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


def test_a_further_job_moves_no_column(tmp_path: Path):
    def write(job: str, setting: str) -> list[str]:
        path = write_job(tmp_path / job, [f"optimizer.lr=0.{job}"]) / "config.yaml"
        path.write_text(path.read_text().replace("num_layers: 4", setting))
        write_reports(tmp_path)
        return (tmp_path / "sweep.csv").read_text().partition("\n")[0].split(",")

    write("1", "num_layers: 4")
    before = write("2", "hidden_size: 8")
    assert before[3:6] == ["optimizer.lr", "model.hidden_size", "model.num_layers"]
    assert write("0", "hidden_size: 8") == before


def test_nothing_in_the_csv_is_a_formula(tmp_path: Path):
    write_job(tmp_path / "=cmd|'calc'!A1", ["model.num_layers=+1+1"])
    write_job(tmp_path / "@x", ["model.num_layers='=2'"])
    write_reports(tmp_path)
    with (tmp_path / "sweep.csv").open(newline="") as file:
        cells = [cell for line in csv.reader(file) for cell in line]
    assert "'=cmd|'calc'!A1" in cells
    assert "'=2" in cells
    assert [cell for cell in cells if cell.startswith(("=", "+", "@"))] == []


def test_a_setting_with_the_name_of_a_column_forges_none_and_no_name_moves_the_cursor(tmp_path: Path):
    path = write_job(tmp_path / "0", status="failed", error="broken", final_val_loss=None) / "config.yaml"
    names = ("status", "job", "error", "final_val_loss", "=cmd", "\x1b[2J", "a\nb", "x" * 500)
    quoted = (name if name.isidentifier() else json.dumps(name) for name in names)
    path.write_text(path.read_text() + "".join(f"{name}: forged\n" for name in quoted))
    write_job(tmp_path / "1", ["\x1b[31m=1", "+status=forged"], given=["\x1b[31m=1", "+status=forged"])
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
    path = write_job(tmp_path / "\udcff\u202e") / "config.yaml"
    path.write_text(path.read_text().replace("lr: 0.003", "lr: .nan"))
    write_job(tmp_path / "1")
    write_reports(tmp_path)
    told = json.loads((tmp_path / "sweep.json").read_text(), parse_constant=pytest.fail)
    assert [row["job"] for row in told["jobs"]] == ["1", "\\udcff\\u202e"]
    assert told["jobs"][1]["settings"] == {"optimizer.lr": "nan"}


def test_reports_are_written_again_and_leave_nothing_else(tmp_path: Path):
    write_job(tmp_path / "0")
    write_reports(tmp_path)
    write_job(tmp_path / "1")
    assert len(write_reports(tmp_path).rows) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", *HEADS}
    for name, head in HEADS.items():
        assert (tmp_path / name).read_bytes().startswith(head)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("content", ["", "mine", None])
def test_a_file_of_somebody_else_stays_and_so_do_the_others(tmp_path: Path, name: str, content: str | None):
    write_job(tmp_path / "0")
    (tmp_path / name).mkdir() if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=rf"{name} is no report of zerotrain, and stays as it is"):
        write_reports(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"0", name}
    assert content is None or (tmp_path / name).read_text() == content


def test_what_has_changed_is_read_again(tmp_path: Path):
    path = write_job(tmp_path / "0") / "metrics.jsonl"
    before = write_reports(tmp_path).rows[0].curves["train_loss"]
    path.write_text(path.read_text() + '{"step": 99, "train_loss": 1.0}\n')
    after = write_reports(tmp_path).rows[0].curves["train_loss"]
    assert len(after.step) == len(before.step) + 1
    result = tmp_path / "0/result.json"
    result.write_text(result.read_text().replace('"final_val_loss": 3.0', '"final_val_loss": 2.0'))
    assert write_reports(tmp_path).rows[0]["final_val_loss"] == 2.0


# The table of jobs in a terminal, built from their folders.


def table_of(folder: Path, width: int = 80) -> str:
    stream = io.StringIO()
    print_table(read_report(folder), Console(file=stream, width=width))
    return stream.getvalue()


def test_each_job_has_its_row_told_by_what_differs_whatever_became_of_it(tmp_path: Path):
    write_result(tmp_path, 0)
    write_result(tmp_path, 1, world_size=0, status="failed", error="zero.stage: got 5", weights_sha256=None)
    write_result(tmp_path, 2, status="stopped", error="by a signal")
    write_result(tmp_path, 3, overrides=["launch.nproc_per_node=2", "zero.stage=3", "checkpoint.resume=auto"])
    table = table_of(tmp_path)
    assert table.split()[:3] == ["job", "overrides", "status"], "a job that never started is no other number of ranks"
    assert [line.split()[:3] for line in table.splitlines()[2:6]] == [
        ["0", "zero.stage=0", "completed"],
        ["1", "zero.stage=1", "failed"],
        ["2", "zero.stage=2", "stopped"],
        ["3", "zero.stage=3", "completed"],
    ]
    assert "launch.nproc_per_node" not in table
    assert "checkpoint.resume" not in table
    assert "job 1 failed: zero.stage: got 5\njob 2 stopped: by a signal\n" in table


def test_values_are_rounded_and_none_lies_on_two_lines_of_80_columns(tmp_path: Path):
    names = "optimizer.lr", "model.attention_dropout_probability", "optimizer.betas"
    values = "0.06774333298343773", "1.2345678901234567e-05", "[0.9123456789,0.95]"
    for job in range(2):
        overrides = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
        write_result(tmp_path, job, overrides=[*overrides, f"seed={123456789012 + job}", "data.path=/a/0.123456789"])
    write_result(tmp_path, 2)
    write_reports(tmp_path)
    table = table_of(tmp_path)
    assert max(map(len, table.splitlines()[:-1])) <= 80
    words = table.split()
    assert [words.count(word) for word in ("optimizer.lr=0.06774", "1.235e-05", "seed=123456789012")] == [2, 2, 1]
    assert words.count("betas=[0.9123,0.95]") == 2, "a short name, where the whole one does not fit"
    assert "/a/0.123456789" in "".join(words)  # a path is no number
    assert values[0] in (tmp_path / "sweep.csv").read_text()
    for width in range(70, 110, 3):
        words = table_of(tmp_path, width).split()
        assert sum(words.count(word) for word in ("optimizer.lr=0.06774", "lr=0.06774")) == 2, width


def test_the_table_of_one_job_has_its_overrides(tmp_path: Path):
    write_result(tmp_path, 0, status="stopped", overrides=["optimizer.lr=0.1", "zero.stage=1"])
    assert "optimizer.lr=0.1" in table_of(tmp_path)


def test_numbers_of_ranks_that_differ_are_a_column(tmp_path: Path):
    for job, ranks in enumerate((1, 2, 0)):
        overrides = [f"launch.nproc_per_node={ranks}", "zero.stage=3", f"seed={job}"]
        write_result(tmp_path, job, world_size=ranks, overrides=overrides)
    rows = [line.split() for line in table_of(tmp_path).splitlines()]
    assert rows[0][:4] == ["job", "overrides", "ranks", "status"]
    assert [row[:3] for row in rows[2:5]] == [["0", "seed=0", "1"], ["1", "seed=1", "2"], ["2", "seed=2", "-"]]


def test_weights_are_said_to_be_equal_in_full_or_are_counted(tmp_path: Path):
    write_result(tmp_path, 0)
    assert table_of(tmp_path).splitlines()[-1] == f"weights: sha256 {'a' * 64}"
    write_result(tmp_path, 2, weights_sha256=None)
    assert f"weights: sha256 {'a' * 64}, of the only job with a result" in table_of(tmp_path)
    write_result(tmp_path, 1)
    assert f"weights: 2 of 3 jobs have the same sha256 {'a' * 64}" in table_of(tmp_path)
    write_result(tmp_path, 3, weights_sha256="b" * 64)
    (tmp_path / "4").mkdir()
    (tmp_path / "4/result.json").write_text("[" * 5000)
    assert "job 4 failed: its result.json cannot be read: " in table_of(tmp_path)
    assert f"weights: 2 different sha256 in 5 jobs: {'a' * 12} x 2, {'b' * 12} x 1" in table_of(tmp_path)


def test_what_a_file_says_is_shown_as_it_is(tmp_path: Path):
    write_result(tmp_path, 0, overrides=["model.name=[/b]"], error="[/red] \x1b[2J", status="failed")
    write_result(tmp_path, 1, overrides=["m=[bold]\u202e"])
    table = table_of(tmp_path)
    assert "model.name=[/b]" in table
    assert "m=[bold]\\u202e" in table
    assert "job 0 failed: [/red] \\x1b[2J" in table
