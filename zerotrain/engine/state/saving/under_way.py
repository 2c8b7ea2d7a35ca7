"""The caller's handle on a save that goes on beside the training."""

import atexit
import threading
import warnings
import weakref
from pathlib import Path

from zerotrain.engine.state.saving.writing import Writing, ended
from zerotrain.engine.state.together import told
from zerotrain.errors import ZeroTrainError

END_S = 5.0
"""How long a process that ends waits for its thread to clean up."""


class SaveUnderWay:
    """The handle that `engine.begin_save` returns: a thread writes, and ends alike on all ranks."""

    path: Path
    """The folder, absolute. It is there when the save is done."""
    pause_s: float
    """How long `begin_save` held the training on this rank."""

    def __init__(self, writing: Writing) -> None:
        self.path = writing.path
        self.pause_s = 0.0
        self._snapshot, self._process_ends = writing.snapshot, writing.process_ends
        self._error: ZeroTrainError | None = None
        self._is_error_read = False
        # The thread alone has `writing`: of the engine's memory nothing is kept when it is done.
        self._thread = threading.Thread(target=self._run, args=(writing,), name="zerotrain save", daemon=True)
        _all.add(self)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not. Does not wait."""
        return not self._thread.is_alive()

    @property
    def error(self) -> ZeroTrainError | None:
        """Why it has failed, once it is done."""
        if not self.is_done:
            return None
        self._is_error_read = True
        return self._error

    @property
    def held_s(self) -> float:
        """How long the training was held since, by copies and by waiting for room for them."""
        return self._snapshot.held_s

    @property
    def copied_nbytes(self) -> int:
        """Bytes that were copied since, in front of updates."""
        return self._snapshot.copied_nbytes

    def wait(self) -> Path:
        """Wait until the checkpoint is there, on the disk.

        Returns:
            Its folder, absolute.

        Raises:
            CheckpointError: the same on every rank; it could not be written. Nothing is left of it.
        """
        self.wait_until_ended()
        if (error := self.error) is not None:
            raise error
        return self.path

    def wait_until_ended(self) -> None:
        """Wait until it has ended, well or not, and keeps nothing of the engine's memory any more."""
        self._thread.join()

    def wait_until_read(self) -> None:
        """Wait until nothing is read of the engine's state any more."""
        self._snapshot.wait_until_read()

    def settle(self) -> None:
        """Wait for its end; raise an error that nobody has read yet."""
        self.wait_until_ended()
        if not self._is_error_read:
            self.wait()

    def _run(self, writing: Writing) -> None:
        try:
            failed, cause = writing.run()
        except BaseException as error:  # a fault of zerotrain itself
            failed, cause = told(error), error
        if failed is not None:
            self._error = failed.error()
            self._error.__cause__ = cause

    def end_with_process(self) -> None:
        """The process ends: leave no half folder, and a word."""
        if self.is_done:
            return
        self._process_ends.set()
        self._snapshot.stop(ended())
        self._thread.join(END_S)
        if self._error is not None:
            warnings.warn(str(self._error), RuntimeWarning, stacklevel=2)


_all: weakref.WeakSet[SaveUnderWay] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for each in list(_all):
        each.end_with_process()
