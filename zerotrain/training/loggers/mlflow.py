"""Curves at MLflow."""

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.engine.options import dotted
from zerotrain.training.callback import Run
from zerotrain.training.loggers.curves import Written
from zerotrain.training.loggers.facts import facts_of
from zerotrain.training.loggers.tracker import Tracker, of_sweep

if TYPE_CHECKING:
    from mlflow import MlflowClient

FOLDER = "mlflow"
STATUSES = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MAX_PARAMS = 100
"""Settings in one request."""
MAX_PARAM_LENGTH = 500
"""Characters of a setting that any server takes."""
ENVIRONMENT = {
    # The other ranks wait while rank 0 waits for a server that does not answer: many minutes if nobody says less.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # which it does not recommend, but needs no database
}
"""Settings of MLflow that hold where the user's environment has none."""


class MLflow(Tracker):
    """Sends a run to MLflow.

    Args:
        experiment: made where there is none of this name.
        name: of the run there; None: as MLflow chooses, in a sweep what differs.
        tags: of the run there; `sweep` is the sweep that it belongs to.
        tracking_uri: a server, a database or a folder; None: the environment's MLFLOW_TRACKING_URI, else the folder
            `mlflow` in the run's.
    """

    package = "mlflow"
    id_pattern = "[0-9a-f]{32}"

    def __init__(
        self,
        *,
        experiment: str = "zerotrain",
        name: str | None = None,
        tags: dict[str, Any] | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        super().__init__()
        self._experiment, self._name, self._tracking_uri = experiment, name or of_sweep("name"), tracking_uri
        group = of_sweep("group")
        self._tags = ({} if group is None else {"sweep": group}) | (tags or {})
        self._client: MlflowClient | None = None
        self._run_id, self._is_new, self._step = "", False, 0

    def _open_run(self, run: Run, run_id: str | None) -> tuple[str, Written]:
        os.environ.update(ENVIRONMENT | os.environ)
        from mlflow import MlflowClient

        folder = (run.folder / FOLDER).absolute().as_uri()
        self._client = MlflowClient(self._tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or folder)
        self._step = run.step
        last_steps = None if run_id is None else self._last_steps(run_id)
        self._is_new = last_steps is None
        self._run_id = self._new_run() if last_steps is None or run_id is None else run_id
        return self._run_id, Written(by_name=last_steps or {})

    def _describe_run(self, run: Run) -> None:
        from mlflow.entities import Param, RunTag

        assert self._client is not None
        self._client.update_run(self._run_id, status="RUNNING")
        tags = [RunTag(_name(name), str(value)) for name, value in (facts_of(run) | self._tags).items()]
        self._client.log_batch(self._run_id, tags=tags)
        settings = dotted(run.settings or {}) if self._is_new else {}  # MLflow lets none change
        params = [Param(_name(name), str(value)[:MAX_PARAM_LENGTH]) for name, value in settings.items()]
        for first in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + MAX_PARAMS])

    def _write(self, numbers: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        assert self._client is not None
        self._step, time_ms = step, int(1e3 * numbers.get("wall_time_s", time.time()))
        metrics = [Metric(name, float(value), time_ms, step) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def _keep_file(self, path: Path) -> None:
        assert self._client is not None
        self._client.log_artifact(self._run_id, str(path))

    def _close_run(self, result: dict[str, float], status: str | None) -> None:
        if self._client is not None and status is not None:
            self._write({_name(name): value for name, value in result.items()}, self._step)
            self._client.set_terminated(self._run_id, STATUSES[status])

    def _named(self, name: str) -> str:
        return _name(name)

    def _new_run(self) -> str:
        from mlflow.exceptions import MlflowException

        assert self._client is not None
        with suppress(MlflowException):  # there is one, which another run has made; or the next call says what is wrong
            self._client.create_experiment(self._experiment)
        experiment = self._client.get_experiment_by_name(self._experiment)
        assert experiment is not None
        made = self._client.create_run(experiment.experiment_id, run_name=self._name)
        return str(made.info.run_id)

    def _last_steps(self, run_id: str) -> dict[str, int] | None:
        """The last step of each curve of a run; None where there is no such run, as in the store of another folder."""
        from mlflow.exceptions import MlflowException

        assert self._client is not None
        try:
            found = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        histories = {name: self._client.get_metric_history(run_id, name) for name in found.data.metrics}
        return {name: max(each.step for each in history) for name, history in histories.items()}


def _name(name: str) -> str:
    """A name as MLflow has it: a / would be a folder beside the file of val_loss."""
    return re.sub(r"[^\w.: -]", ".", name)
