"""Curves for TensorBoard."""

from typing import TYPE_CHECKING

from zerotrain.training.callback import Run
from zerotrain.training.loggers.curves import Curves, Written

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class TensorBoard(Curves):
    """Writes each number of metrics.jsonl to `tensorboard` in the run's folder; a run that went on is one curve."""

    package = "tensorboard"

    def __init__(self) -> None:
        super().__init__()
        self._writer: SummaryWriter | None = None

    def start(self, run: Run) -> None:
        """See `Callback.start`."""
        super().start(run)
        self._written = Written()  # what comes now is new

    def end(self, run: Run) -> None:
        """See `Callback.end`."""
        if self._writer is not None:
            self._writer.close()

    def failure(self, run: Run, error: BaseException) -> None:
        """See `Callback.failure`."""
        self.end(run)

    def _open(self, run: Run) -> Written:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / FOLDER
        is_new = not folder.exists()
        # What an earlier sitting has written of later steps is hidden: the run comes to them again.
        self._writer = SummaryWriter(str(folder), purge_step=run.step + 1 if run.step else 0)
        return Written() if is_new else Written(until=run.step)

    def _write(self, numbers: dict[str, float], step: int) -> None:
        if self._writer is not None:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)
