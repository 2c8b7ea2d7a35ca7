"""Curves for TensorBoard."""

import json
from typing import TYPE_CHECKING

from zerotrain.training.callback import Run
from zerotrain.training.loggers.curves import Curves, Written
from zerotrain.training.loggers.facts import facts_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class TensorBoard(Curves):
    """Writes each number of metrics.jsonl to `tensorboard` in the run's folder, and as texts the settings, the
    environment and the status; a run that went on is one curve."""

    package = "tensorboard"

    def __init__(self) -> None:
        super().__init__()
        self._writer: SummaryWriter
        self._step = 0

    def start(self, run: Run) -> None:
        """See `Callback.start`."""
        super().start(run)
        self._written = Written()  # what comes now is new

    def _open(self, run: Run) -> Written:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / FOLDER
        is_new = not folder.exists()
        # What an earlier sitting has written of later steps is hidden: the run comes to them again.
        self._writer = SummaryWriter(str(folder), purge_step=run.step + 1 if run.step else 0)
        self._step = run.step
        return Written() if is_new else Written(until=run.step)

    def _describe_run(self, run: Run) -> None:
        for name, said in (("settings", run.settings or {}), ("environment", facts_of(run))):
            self._write_text(name, json.dumps(said, indent=2))

    def _write(self, numbers: dict[str, float], step: int) -> None:
        self._step = step
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def _close_run(self, result: dict[str, float], status: str | None) -> None:
        self._write(result, self._step)
        self._write_text("status", str(status))
        self._writer.close()

    def _write_text(self, name: str, text: str) -> None:
        indented = text.replace("\n", "\n    ")  # TensorBoard reads Markdown, which leaves such lines as they are
        self._writer.add_text(name, f"    {indented}", self._step)
