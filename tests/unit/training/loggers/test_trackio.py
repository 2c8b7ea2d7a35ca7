"""A run at Trackio, as its own commands have the store."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("trackio")
NAMED = ("logger=trackio", "callbacks.trackio.project=mine", "callbacks.trackio.name=first")


def queried(store, sql):
    """The rows that an SQL query gives."""
    command = [sys.executable, "-m", "trackio.cli", "query", "project", "--project", "mine", "--sql", sql, "--json"]
    env = {**os.environ, "TRACKIO_DIR": str(store)}
    told = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    return json.loads(told)["rows"]


def curves_at(store):
    found = {}
    for row in queried(store, "SELECT step, metrics FROM metrics ORDER BY id"):
        for name, value in json.loads(row["metrics"]).items():
            if not name.startswith("result/") and name != "status":
                found.setdefault(name, []).append((row["step"], value))
    return found


def test_each_number_the_settings_and_the_end_are_there(zygote, tmp_path, tiny, curves_of):
    ended = zygote.run([*tiny, *NAMED, "train.max_steps=3"], tmp_path, {"TRACKIO_DIR": str(tmp_path / "store")})
    assert ended.code == 0, ended
    assert curves_at(tmp_path / "store") == curves_of(tmp_path / "run")
    [row] = queried(tmp_path / "store", "SELECT run_name, config FROM configs")
    config, run_id = json.loads(row["config"]), json.loads((tmp_path / "run/trackio.json").read_text())["id"]
    assert row["run_name"] == f"first-{run_id}"
    assert (config["train"]["max_steps"], config["zero"]["stage"]) == (3, 2)
    assert {"torch", "command", "host"} <= set(config["environment"])
    *_, last = queried(tmp_path / "store", "SELECT metrics FROM metrics ORDER BY id")
    said = json.loads(last["metrics"])
    assert (said["status"], said["result/steps"]) == ("completed", 3)


def test_a_run_that_is_killed_twice_is_one_curve(killed_twice, require_one_curve, tmp_path):
    store = tmp_path / "store"
    folder = killed_twice(*NAMED, TRACKIO_DIR=str(store))
    require_one_curve(folder, curves_at(store))
    assert len({row["run_name"] for row in queried(store, "SELECT run_name FROM metrics")}) == 1
