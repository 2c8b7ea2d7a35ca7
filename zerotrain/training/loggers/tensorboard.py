"""Curves for TensorBoard."""

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from zerotrain.files.regular import only_regular
from zerotrain.files.untrusted import UntrustedFileError, parse_json
from zerotrain.training.callback import Callback, Run
from zerotrain.training.figures.sinks import METRICS_NAME

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class TensorBoard(Callback):
    """Writes each number of metrics.jsonl to `tensorboard` in the run's folder; a run that went on is one curve."""

    ranks = "first"
    may_fail = True

    def __init__(self) -> None:
        if find_spec("tensorboard") is None:
            raise ImportError("there is no tensorboard here; pip install 'zerotrain[tensorboard]' brings it")
        self._writer: SummaryWriter | None = None

    def start(self, run: Run) -> None:
        """See `Callback.start`."""
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / FOLDER
        is_new = not folder.exists()
        # What an earlier sitting has written of later steps is hidden: the run comes to them again.
        self._writer = SummaryWriter(str(folder), purge_step=run.step + 1 if run.step else None)
        if is_new and run.step:  # it goes on with another folder's run, whose lines are here
            with open(run.folder / METRICS_NAME, "rb", opener=only_regular) as lines:
                for line in lines:
                    self._write_line(line)

    def log(self, run: Run, metrics: dict[str, Any]) -> None:
        """See `Callback.log`."""
        self._write(metrics, run.step)

    def end(self, run: Run) -> None:
        """See `Callback.end`."""
        if self._writer is not None:
            self._writer.close()

    def failure(self, run: Run, error: BaseException) -> None:
        """See `Callback.failure`."""
        self.end(run)

    def _write_line(self, line: bytes) -> None:
        try:
            metrics = parse_json(line, {"step": int})
        except UntrustedFileError:  # cut off
            return
        self._write({name: value for name, value in metrics.items() if name != "step"}, metrics["step"])

    def _write(self, metrics: dict[str, Any], step: int) -> None:
        for name, value in metrics.items():
            if self._writer is not None and isinstance(value, int | float) and math.isfinite(value):
                self._writer.add_scalar(name, value, step)
