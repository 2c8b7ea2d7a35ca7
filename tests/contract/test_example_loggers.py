"""examples/*_logger.py: a tracker is a callback of a few lines, whose curves are those of metrics.jsonl."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.zygote.client import Zygote

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SETTINGS = (
    "data=synthetic", "data.seq_len=16", "data.num_sequences=64", "model=mlp", "model.hidden_size=8",
    "train.max_steps=4", "train.micro_batch_size=2", "train.log_every=1", "train.eval_every=2", "train.eval_batches=1",
    "train.sample_tokens=0", "launch.device=cpu", "launch.nproc_per_node=2", "launch.threads_per_rank=1",
)  # fmt: skip
KILLING = "+callbacks.killing={_target_: killing.Killing, steps: [3]}"
SAVING = ("checkpoint.every=2", "checkpoint.asynchronous=false", "launch.max_restarts=1")


def losses_in(folder: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["train_loss"]) for line in lines if "train_loss" in line]


@pytest.mark.slow
def test_all_jobs_of_a_sweep_lie_in_one_store_of_mlflow_and_one_that_is_killed_is_one_curve(
    zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(EXAMPLES / "mlflow_logger.py", tmp_path)
    logger = "+callbacks.mlflow={_target_: mlflow_logger.MLflowLogger, experiment: mine}"
    more = ("-m", "seed=0,1", logger, KILLING, *SAVING, "hydra.sweep.dir=sweep")
    ended = zygote.run([*SETTINGS, *more], tmp_path, {"MLFLOW_DISABLE_TELEMETRY": "true"})
    assert ended.code == 0, ended
    with patch.dict(os.environ, MLFLOW_ALLOW_FILE_STORE="true", MLFLOW_DISABLE_TELEMETRY="true"):
        client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
        experiment = client.get_experiment_by_name("mine")
        runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
        assert runs.keys() == {"sweep/0", "sweep/1"}
        for name, run in runs.items():
            points = client.get_metric_history(run.info.run_id, "train_loss")
            assert sorted((each.step, each.value) for each in points) == losses_in(tmp_path / name)
            assert run.info.status == "FINISHED"
            assert (run.data.params["zero.stage"], run.data.params["train.max_steps"]) == ("2", "4")


def test_a_run_that_is_killed_is_one_curve_at_trackio(zygote: Zygote, tmp_path: Path):
    pytest.importorskip("trackio")
    shutil.copy(EXAMPLES / "trackio_logger.py", tmp_path)
    logger = "+callbacks.trackio={_target_: trackio_logger.TrackioLogger, project: mine}"
    environment = {"TRACKIO_DIR": str(tmp_path / "store")}
    ended = zygote.run([*SETTINGS, logger, KILLING, *SAVING, "hydra.run.dir=day/run"], tmp_path, environment)
    assert ended.code == 0, ended
    sql = "SELECT run_name, step, metrics FROM metrics ORDER BY id"
    command = [sys.executable, "-m", "trackio.cli", "query", "project", "--project", "mine", "--sql", sql, "--json"]
    told = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment).stdout
    rows = [(row["run_name"], row["step"], json.loads(row["metrics"])) for row in json.loads(told)["rows"]]
    assert {name.rpartition("-")[0] for name, _, _ in rows} == {"day-run"}
    points = [(step, metrics["train_loss"]) for _, step, metrics in rows if "train_loss" in metrics]
    assert points == losses_in(tmp_path / "day/run")
