"""`zerotrain ended RUN`: the exit code of a run, also where torchrun has hidden it."""

import json
from pathlib import Path

import pytest

from zerotrain.commands.ended import main
from zerotrain.launching.job import CONFIG_NAME, RANKS, write_refusal
from zerotrain.training.result import RunResult


def ended(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main([str(run)])
    return code, capsys.readouterr().out.removeprefix(f"{run}: ").rstrip("\n")


@pytest.mark.parametrize(
    ("stopped_by", "failure", "given", "told"),
    [
        (None, None, 85, (0, "completed; exit code 0")),
        ("SIGUSR1", None, 85, (85, "stopped by SIGUSR1 after step 7 of 9; exit code 85")),
        ("SIGINT", None, None, (130, "stopped by SIGINT after step 7 of 9; exit code 130")),
        ("control.yaml", None, 85, (0, "stopped by control.yaml after step 7 of 9; exit code 0")),
        ("SIGUSR1", OSError("full"), 85, (1, "OSError: full; exit code 1")),
    ],
)
def test_a_run_that_has_ended_in_order(tmp_path: Path, capsys, stopped_by, failure, given, told):
    result = RunResult(world_size=2, steps=7)
    result.end(stopped_by, 9, failure, given)
    result.write(tmp_path)
    assert ended(tmp_path, capsys) == told


def test_a_run_without_a_result_or_with_another_file_in_its_place_is_to_be_tried_again(tmp_path: Path, capsys):
    assert ended(tmp_path / "nowhere", capsys)[0] == 1
    (tmp_path / "result.json").write_text('{"status": "\x1b[31m"}')
    code, line = ended(tmp_path, capsys)
    assert (code, "\x1b" in line) == (1, False)


@pytest.mark.parametrize(
    "forged",
    [
        {"exit_code": 256},
        {"exit_code": 0},
        {"exit_code": None, "status": "stopped", "stopped_by": "nobody"},
        {"steps": 10**400},
    ],
    ids=str,
)
def test_a_failed_run_has_no_result_by_which_it_is_well(tmp_path: Path, capsys, forged):
    body = RunResult(world_size=2, status="failed", exit_code=1).body()
    (tmp_path / "result.json").write_text(json.dumps(body | forged))
    code, line = ended(tmp_path, capsys)
    assert (code, line[:30]) == (1, "its result.json cannot be read")


def test_a_refusal_counts_until_the_run_has_completed(tmp_path: Path, capsys):
    write_refusal(tmp_path, [], "seed: got -1", 2)
    assert ended(tmp_path, capsys) == (2, "seed: got -1; exit code 2")
    result = RunResult(world_size=2, steps=7)
    result.end("SIGTERM", 9, None, 85)
    result.write(tmp_path)
    (tmp_path / CONFIG_NAME).touch()
    (tmp_path / RANKS).mkdir()
    write_refusal(tmp_path, [], "by hand", 2)
    write_refusal(tmp_path, [], "no room", 1, is_hidden=True)
    assert ended(tmp_path, capsys)[0] == 85
    write_refusal(tmp_path, [], "seed: got -2", 2, is_hidden=True)
    assert ended(tmp_path, capsys) == (2, "refused: seed: got -2; exit code 2")
    completed = RunResult(world_size=2, steps=9)
    completed.end(None, 9, None)
    completed.write(tmp_path)
    assert ended(tmp_path, capsys) == (0, "completed; exit code 0")


@pytest.mark.parametrize(("fields", "code"), [({"status": "completed"}, 0), ({"status": "failed"}, 1)])
def test_a_result_without_an_exit_code_tells_that_of_its_status(fields, code, tmp_path: Path, capsys):
    body = RunResult(world_size=2, **fields).body()
    assert body["exit_code"] is None
    (tmp_path / "result.json").write_text(json.dumps(body))
    assert ended(tmp_path, capsys)[0] == code
