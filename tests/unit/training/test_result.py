import json
import math
import os
import re
import signal
from pathlib import Path

import pytest
from msgspec.structs import fields

from zerotrain.training import RunResult
from zerotrain.training.result import NUMBERS, MetricsFile, in_evaluation, keep_lines, read_result, value_in

# Which value of a result.json a name stands for.


RESULT = RunResult(
    world_size=2,
    steps=7,
    final_val_loss=2.5,
    val_loss_by_source={"docs": 2.0, "a/b": 3.0},
    val_metrics={"val_accuracy": 0.5, "val_accuracy/docs": 0.25, "val_nan": math.nan},
    comm_bytes_per_step={"sent": 300},
    memory_bytes={"peak": 10**400, "theory": {"parameters": 100}},
).body()


@pytest.mark.parametrize(
    ("name", "value", "evaluated"),
    [
        ("final_val_loss", 2.5, "val_loss"),
        ("val_loss", 2.5, "val_loss"),
        ("val_loss/docs", 2.0, "val_loss/docs"),
        ("val_accuracy", 0.5, "val_accuracy"),
        ("val_accuracy/docs", 0.25, "val_accuracy/docs"),
        ("val_nan", None, "val_nan"),
        ("steps", 7.0, None),
        ("tokens_per_s", None, None),
        ("comm_bytes_per_step.sent", 300.0, None),
        ("memory_bytes.peak", None, None),
    ],
)
def test_a_name_stands_for_a_number_or_a_metric(name, value, evaluated):
    assert value_in(RESULT, name) == value
    assert in_evaluation(name) == evaluated
    assert (name in NUMBERS) == (evaluated is None or name == "final_val_loss")


@pytest.mark.parametrize("name", ["val_acc", "val_loss/code", "comm_bytes_per_step", "status", "memory_bytes.theory"])
def test_a_name_that_stands_for_nothing_is_told_with_those_that_do(name):
    with pytest.raises(
        LookupError, match=f"got {name}, which this job has not measured; it has val_loss, val_loss/docs, .*, steps, "
    ):
        value_in(RESULT, name)


def test_what_no_run_can_measure_is_known_beforehand():
    wrong = ["status", "loss", "val_metrics", "val_loss_by_source", "stages.0", "comm.sent", "Val_loss", "memory_bytes"]
    assert [name for name in ["", *wrong] if name in NUMBERS or in_evaluation(name) is not None] == []


def test_result_json_has_all_its_keys_whatever_happened(tmp_path):
    RunResult(world_size=2).write(tmp_path)
    assert list(json.loads((tmp_path / "result.json").read_text())) == [each.name for each in fields(RunResult)]


def test_a_loss_that_is_no_number_is_null_so_that_any_json_reader_can_read_it(tmp_path):
    RunResult(world_size=1, final_train_loss=math.nan, memory_bytes={"theory": {"peak": math.inf}}).write(tmp_path)
    text = (tmp_path / "result.json").read_text()
    assert not re.search("NaN|Infinity", text)
    body = json.loads(text)
    assert (body["final_train_loss"], body["memory_bytes"]) == (None, {"theory": {"peak": None}})


def test_whatever_a_run_writes_is_read_again(tmp_path):
    numbers = {each.name: math.nan for each in fields(RunResult) if each.type == float | None}
    metrics = {
        "val_loss_by_source": {"a": math.nan},
        "val_metrics": {"b": math.inf},
        "comm_bytes_per_step": {"sent": 1},
    }
    for name in (None, *signal.Signals.__members__, "control.yaml", "sweep.pruner", "callbacks.early_stopping"):
        given = RunResult(
            world_size=2, overrides=["data.path=\udcff"], stages=[{"a": [math.nan]}], **numbers, **metrics
        )
        given.end(name, 9, None, 143)
        given.write(tmp_path)
        assert read_result(tmp_path / "result.json") == given.body()


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


def test_a_fifo_is_neither_waited_for_nor_written_to(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    for append in (False, True):
        with pytest.raises(OSError, match="it is a FIFO, and must be a regular file"):
            MetricsFile(tmp_path / "metrics.jsonl", append=append)
    with pytest.raises(OSError, match="it is a FIFO, and must be a regular file"):
        keep_lines(tmp_path / "metrics.jsonl", tmp_path / "kept.jsonl", until=3)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
