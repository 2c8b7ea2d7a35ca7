"""What lies in a run's folder in place of what ranks have said: it is not believed, and nobody's terminal obeys it."""

import json
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from zerotrain.config.schema import Config
from zerotrain.errors import ConfigError
from zerotrain.launching.failures import Failure, first_failure
from zerotrain.launching.job import Job
from zerotrain.launching.presence import RankState, continue_stopped, read_states, seen_alive

DEEP = "[" * 9999
WRONG: list[Any] = [None, -1, 10**30, "\x1b[2J", [[]], {"a": 1}, 0.5]


def state_of(path: Path, said: str, step: str = "3") -> None:
    path.write_text(f"{step:16}{said}".ljust(1040))


@pytest.mark.parametrize("field", ["rank", "pid", "gone", "in_order"])
def test_a_state_of_another_kind_is_none(field: str, tmp_path: Path) -> None:
    said = asdict(RankState(0, "training", pid=1, host="h"))
    state_of(tmp_path / "0.state", json.dumps(said))
    [(state, _)] = read_states(tmp_path)
    assert (state.rank, state.step, state.phase) == (0, 3, "training")
    for wrong in WRONG:
        state_of(tmp_path / "0.state", json.dumps(said | {field: wrong}))
        assert read_states(tmp_path) == []
        assert seen_alive(tmp_path, 1) == {}
        assert first_failure(tmp_path) is None


@pytest.mark.parametrize("said", ["", "{", DEEP, "3", "{}", "\udcff"])
def test_what_is_no_state_and_no_failure_is_none(said: str, tmp_path: Path) -> None:
    (tmp_path / "0.state").write_bytes(b"3".ljust(16) + said.encode(errors="surrogateescape"))
    (tmp_path / "1.error.json").write_bytes(said.encode(errors="surrogateescape"))
    state_of(tmp_path / "2.state", json.dumps(asdict(RankState(2, "x"))), step="many")
    assert read_states(tmp_path) == []
    assert first_failure(tmp_path) is None


def test_a_process_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state_of(tmp_path / "0.state", json.dumps(asdict(RankState(0, "x", pid=1, host=socket.gethostname()))))
    monkeypatch.setattr("zerotrain.launching.presence._is_locked", lambda _: True)

    def kill(pid: int, signum: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.kill", kill)
    continue_stopped(tmp_path)


@pytest.mark.parametrize("field", ["rank", "cause", "problems", "time_s", "saw_alive", "unheard", "waited_s"])
def test_a_failure_of_another_kind_is_none(field: str, tmp_path: Path) -> None:
    Failure(rank=1, cause="failed: x").write(tmp_path)
    path = tmp_path / "1.error.json"
    said = json.loads(path.read_text())
    found = first_failure(tmp_path)
    assert found is not None
    assert found.cause == "failed: x"
    path.write_text(json.dumps(said | {field: [{"a": []}]}))
    assert first_failure(tmp_path) is None


def test_a_cause_out_of_a_file_is_told_without_what_a_terminal_obeys(tmp_path: Path) -> None:
    Failure(rank=1, cause="x").write(tmp_path)
    path = tmp_path / "1.error.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cause": "\x1b[2J\u202egnp"}))
    found = first_failure(tmp_path)
    assert found is not None
    assert all(line.isprintable() for line in str(found.as_error(tmp_path)).splitlines())


@pytest.mark.parametrize(
    "change",
    [{"run_dir": 3}, {"overrides": "x"}, {"config": None}, {"config": {"zero": 3}}, {"restarts": -1}, {"stage": "1"}],
)
def test_a_damaged_job_is_one_line(change: dict[str, Any], tmp_path: Path) -> None:
    said = Job(config=Config(), run_dir=tmp_path, overrides=[]).to_json()
    assert Job.from_json(said).run_dir == tmp_path
    for text in (json.dumps(json.loads(said) | change), said[:-1], DEEP, b"\xff"):
        with pytest.raises(
            ConfigError, match="the description of the job, as this rank received it, is damaged"
        ) as caught:
            Job.from_json(text)
        assert str(caught.value).isprintable()
