"""A run at MLflow, as its own client reads it."""

import os
from unittest.mock import patch

import pytest

from zerotrain.training.loggers.mlflow import MLflow


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def runs_of(folder):
    mlflow = pytest.importorskip("mlflow")
    with patch.dict(os.environ, MLFLOW_ALLOW_FILE_STORE="true"):  # of this process, in which no run may have been
        client = mlflow.MlflowClient((folder / "mlflow").as_uri())
    return client, client.search_runs([each.experiment_id for each in client.search_experiments()])


def curves_at(client, run):
    names = [name for name in run.data.metrics if not name.startswith("result.")]
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in names}
    return {name: sorted((each.step, each.value) for each in history) for name, history in histories.items()}


def test_each_number_the_settings_and_the_end_are_there(make_trainer, tmp_path, curves_of):
    logger = MLflow(experiment="mine", name="first", tags={"team": "a"})
    settings = {"zero": {"stage": 2, "schedule": None}, "seed": 3, "long": "x" * 10_000}
    make_trainer(max_steps=3, eval_every=2, callbacks={"mlflow": logger}, settings=settings).run()
    client, [run] = runs_of(tmp_path)
    assert curves_at(client, run) == curves_of(tmp_path)
    assert run.data.params["zero.stage"] == "2"
    assert run.data.params["seed"] == "3"
    assert run.data.tags["team"] == "a"
    assert {"torch", "command", "host"} <= set(run.data.tags)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.metrics["result.steps"] == 3


def test_changes_that_no_commit_has_are_kept_there(make_trainer, changed_code, tmp_path):
    make_trainer(max_steps=1, callbacks={"mlflow": MLflow()}).run()
    [kept] = tmp_path.glob("mlflow/*/*/artifacts/git.diff")
    assert "-old = 1" in kept.read_text()


@pytest.mark.slow
def test_a_run_that_is_killed_twice_is_one_curve(killed_twice, require_one_curve):
    folder = killed_twice("logger=mlflow", MLFLOW_DISABLE_TELEMETRY="true")
    client, [run] = runs_of(folder)
    require_one_curve(folder, curves_at(client, run))
    assert run.info.status == "FINISHED"


def test_curves_of_sources_lie_beside_that_of_all(make_trainer, tmp_path):
    from zerotrain.training import Callback

    class Sources(Callback):
        def after_step(self, run, outcome):
            run.log({"val_loss": 1.0, "val_loss/code": 2.0, "val_loss/a*b": 3.0})

    make_trainer(max_steps=1, callbacks={"mlflow": MLflow(), "sources": Sources()}).run()
    _client, [run] = runs_of(tmp_path)
    assert {"val_loss.code", "val_loss.a.b", "val_loss"} <= set(run.data.metrics)


def test_a_server_that_is_not_there_only_warns(make_trainer, screen):
    logger = MLflow(tracking_uri="http://127.0.0.1:1")
    assert make_trainer(max_steps=1, callbacks={"mlflow": logger}).run()["status"] == "completed"
    assert "callbacks.mlflow: start after step 0" in " ".join(screen.getvalue().split())


def test_the_weights_are_those_of_a_run_without(make_trainer, model):
    start = {name: value.clone() for name, value in model.state_dict().items()}
    found = set()
    for callbacks in ({}, {"mlflow": MLflow()}):
        model.load_state_dict(start)
        found.add(make_trainer(max_steps=2, callbacks=callbacks).run()["weights_sha256"])
    assert len(found) == 1
