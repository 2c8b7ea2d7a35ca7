import json
import math
import os
from pathlib import Path

import pytest

from zerotrain.training.result import MetricsFile, keep_lines


def test_each_line_can_be_read_while_the_run_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for step in range(3):
        metrics.log({"train_loss": math.nan}, step)
        assert json.loads(path.read_text().splitlines()[-1]) == {"step": step, "train_loss": None}
    metrics.close()


def test_a_file_already_there_is_written_anew_or_gone_on_with(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step, append in enumerate((False, False, True)):
        metrics = MetricsFile(path, append=append)
        metrics.log({}, step)
        metrics.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_file_that_was_deleted_is_not_written_to_in_silence(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"Deleted while it was written: '{path}'"):
        metrics.log({}, 1)
    metrics.close()


def test_lines_of_later_steps_and_one_that_was_cut_off_do_not_stay(tmp_path: Path):
    source, target = tmp_path / "then.jsonl", tmp_path / "now.jsonl"
    kept = '{"step": 0, "val_loss": 3.0}\n{"step": 2}\n{"step": 2, "val_loss": 1}\n'
    source.write_text(kept + '{"step": 3}\n{"step": 2, "va')
    keep_lines(source, target, until=2)
    assert target.read_text() == kept
    keep_lines(target, target, until=0)
    assert target.read_text() == '{"step": 0, "val_loss": 3.0}\n'
    keep_lines(tmp_path / "none", target, until=0)
    assert target.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["now.jsonl", "then.jsonl"]


def test_a_fifo_is_neither_waited_for_nor_written_to(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "metrics.jsonl")
    for append in (False, True):
        with pytest.raises(OSError, match="it is a FIFO, and must be a regular file"):
            MetricsFile(tmp_path / "metrics.jsonl", append=append)
    with pytest.raises(OSError, match="it is a FIFO, and must be a regular file"):
        keep_lines(tmp_path / "metrics.jsonl", tmp_path / "kept.jsonl", until=3)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    (tmp_path / "was.jsonl").write_text('{"step": 1}\n{"step": 9}\n')
    monkeypatch.setattr("secrets.token_hex", lambda _: "0")
    os.mkfifo(tmp_path / "now.jsonl.0.tmp")
    keep_lines(tmp_path / "was.jsonl", tmp_path / "now.jsonl", until=3)
    assert (tmp_path / "now.jsonl").read_text() == '{"step": 1}\n'
