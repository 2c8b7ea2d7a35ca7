"""Curves at Trackio."""

import secrets
from typing import Any

from zerotrain.training.callback import Run
from zerotrain.training.loggers.curves import Written
from zerotrain.training.loggers.facts import facts_of
from zerotrain.training.loggers.tracker import Tracker, of_sweep


class Trackio(Tracker):
    """Sends a run to Trackio, on this machine or in a Space of Hugging Face.

    Args:
        project, group: of the run there; a sweep is a group.
        name: of the run there, before its id; None: in a sweep what differs.
        space_id: such as user/space; None: in this machine's TRACKIO_DIR.
    """

    package = "trackio"
    id_pattern = "[0-9a-f]{8}"

    def __init__(
        self,
        *,
        project: str = "zerotrain",
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
    ) -> None:
        super().__init__()
        self._project, self._name, self._group = project, name or of_sweep("name"), group or of_sweep("group")
        self._space_id = space_id
        self._run: Any = None
        self._step = 0

    def _open_run(self, run: Run, run_id: str | None) -> tuple[str, Written]:
        import trackio

        run_id = run_id or secrets.token_hex(4)
        self._run = trackio.init(
            project=self._project,
            name="-".join(filter(None, (self._name, run_id))),  # by which Trackio finds a run again
            group=self._group,
            space_id=self._space_id,
            resume="allow",
            embed=False,
        )
        self._step = run.step
        return run_id, self._there()

    def _describe_run(self, run: Run) -> None:
        self._run.config |= {**(run.settings or {}), "environment": facts_of(run)}

    def _write(self, numbers: dict[str, float], step: int) -> None:
        self._step = step
        self._run.log(dict(numbers), step=step)

    def _close_run(self, result: dict[str, float], status: str | None) -> None:
        if status is not None:
            self._run.log({**result, "status": status}, step=self._step)
        self._run.finish()

    def _there(self) -> Written:
        from trackio.sqlite_storage import SQLiteStorage

        if self._space_id is not None:  # which tells the last step of all curves alone
            return Written(until=self._run._next_step - 1)
        rows = SQLiteStorage.get_logs(self._project, self._run.name, run_id=self._run.id)
        return Written(by_name={name: row["step"] for row in sorted(rows, key=_step_of) for name in row})


def _step_of(row: dict[str, Any]) -> int:
    return int(row["step"])
