"""Curves at MLflow, one store for all runs: pip install mlflow-skinny, this file in the folder that you start in, and

python launch.py '+callbacks.mlflow={_target_: mlflow_logger.MLflowLogger}'
"""

import os
import time

from zerotrain.training import Callback

os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # needs no database
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the other ranks wait for a server as long as rank 0
STATUS = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflowLogger(Callback):
    ranks = "first"
    may_fail = True

    def __init__(self, experiment: str = "zerotrain", tracking_uri: str | None = None) -> None:
        self.experiment, self.tracking_uri, self.run_id = experiment, tracking_uri, None

    def start(self, run) -> None:
        from mlflow import MlflowClient, set_experiment, set_tracking_uri

        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "mlruns")
        set_tracking_uri(uri)
        self.client, experiment, self.last_step = MlflowClient(uri), set_experiment(self.experiment), -1
        if self.run_id is None:
            made = self.client.create_run(experiment.experiment_id, run_name="/".join(run.folder.parts[-2:]))
            self.run_id = made.info.run_id
            for group, settings in (run.settings or {}).items():
                for name, value in settings.items() if isinstance(settings, dict) else [("value", settings)]:
                    self.client.log_param(self.run_id, f"{group}.{name}", str(value)[:500])
        else:  # the run comes to the same numbers again, which are there
            self.client.update_run(self.run_id, status="RUNNING")
            history = self.client.get_metric_history(self.run_id, "train_loss")
            self.last_step = max((each.step for each in history), default=-1)

    def log(self, run, metrics) -> None:
        from mlflow.entities import Metric

        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        points = [
            Metric(name.replace("/", "."), value, int(1e3 * time.time()), run.step) for name, value in numbers.items()
        ]
        if run.step > self.last_step:
            self.client.log_batch(self.run_id, metrics=points)

    def completed(self, run) -> None:
        self.client.set_terminated(self.run_id, STATUS[run.result.status])

    def end(self, run) -> None:
        if run.stopped_by:
            self.client.set_terminated(self.run_id, "KILLED")

    def failure(self, run, error) -> None:
        self.client.set_terminated(self.run_id, "FAILED")

    def state_dict(self) -> dict:
        return {"run_id": self.run_id}

    def load_state_dict(self, state) -> None:
        self.run_id = str(state["run_id"])
