"""Curves at Trackio."""

import secrets
from typing import Any

from zerotrain.training.callback import Run
from zerotrain.training.loggers.curves import Written
from zerotrain.training.loggers.facts import facts_of
from zerotrain.training.loggers.tracker import Tracker


class Trackio(Tracker):
    """Sends a run to Trackio, on this machine or in a Space of Hugging Face.

    Args:
        project, group: of the run there.
        name: of the run there, before its id.
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
        self._project, self._name, self._group, self._space_id = project, name, group, space_id
        self._run: Any = None
        self._row: dict[str, Any] = {}
        """The numbers of a step that are to be sent."""
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
        self._row, self._step = {}, run.step
        return run_id, Written(until=self._run._next_step - 1)

    def _describe_run(self, run: Run) -> None:
        self._run.config |= {**(run.settings or {}), "environment": facts_of(run)}

    def _write(self, numbers: dict[str, float], step: int) -> None:
        """Send the numbers of a step at once: if a run is killed, all of them are there, or none."""
        if step != self._step:
            self._send_row()
        self._step = step
        self._row |= numbers

    def _close_run(self, result: dict[str, float], status: str | None) -> None:
        if status is not None:
            self._row |= {**result, "status": status}
        self._send_row()
        self._run.finish()

    def _send_row(self) -> None:
        if self._row:
            self._run.log(self._row, step=self._step)
        self._row = {}
