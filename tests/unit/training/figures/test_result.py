import json
import math
import resource
import signal
from contextlib import contextmanager
from dataclasses import fields

import pytest

from zerotrain.training import RunResult
from zerotrain.training.result import read_result

KEYS = [
    "status",
    "error",
    "stopped_by",
    "exit_code",
    "restarts",
    "resumed_from",
    "checkpoint",
    "train_s",
    "save_pause_ms",
    "save_step_ratio",
    "stage",
    "stages",
    "world_size",
    "final_train_loss",
    "final_val_loss",
    "val_loss_by_source",
    "val_metrics",
    "steps",
    "skipped_steps",
    "tokens_per_s",
    "labels_per_s",
    "samples_per_s",
    "step_ms_median",
    "data_wait_ms",
    "comm_wait_ms",
    "update_ms",
    "mfu",
    "weights_sha256",
    "comm_bytes_per_step",
    "memory_bytes",
    "overrides",
    "config_hash",
]


def test_result_json_has_all_its_keys_whatever_happened(tmp_path):
    RunResult(world_size=2).write(tmp_path)
    assert sorted(json.loads((tmp_path / "result.json").read_text())) == sorted(KEYS)


def test_a_loss_that_is_no_number_is_null_so_that_any_json_reader_can_read_it(tmp_path):
    RunResult(world_size=1, final_train_loss=math.nan, memory_bytes={"theory": {"peak": math.inf}}).write(tmp_path)
    text = (tmp_path / "result.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text)["final_train_loss"] is None
    assert json.loads(text)["memory_bytes"] == {"theory": {"peak": None}}


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


def test_a_result_replaces_an_older_one_and_leaves_no_other_file(tmp_path):
    RunResult(world_size=1, status="failed").write(tmp_path)
    RunResult(world_size=1, status="completed").write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "completed"


def test_a_disk_that_is_full_leaves_the_older_result_whole(tmp_path):
    RunResult(world_size=1, status="failed").write(tmp_path)
    with files_of_at_most(nbytes=100), pytest.raises(OSError, match="File too large"):
        RunResult(world_size=1, status="completed").write(tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "failed"


@contextmanager
def files_of_at_most(nbytes):
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))


def test_the_body_returned_is_the_body_written(tmp_path):
    result = RunResult(world_size=4, stage=3, final_val_loss=2.5, overrides=["zero.stage=3"])
    result.write(tmp_path)
    assert json.loads((tmp_path / "result.json").read_text()) == result.body()
