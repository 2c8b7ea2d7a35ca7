"""A few windows, used in turn: one is read into, one computed with, one written from."""

import torch

from zerotrain.device.device import Event
from zerotrain.offload.tier import Tier, Window


class Windows:
    """Lends windows on a tier: as many as `num_windows`, or as were ever lent at once.

    Args:
        num_windows: that are made before one is lent again whose last copy may be under way.
    """

    def __init__(self, tier: Tier, num_windows: int = 3) -> None:
        self.tier, self._num_windows = tier, num_windows
        self._resting: list[tuple[Window, Event]] = []
        """Those not lent, each with the last that was begun with it; the oldest first."""
        self._num_lent = 0

    @property
    def memories(self) -> list[torch.Tensor]:
        """The memory of the windows that are not lent."""
        return [window.memory for window, _ in self._resting]

    def take(self, nbytes: int) -> Window:
        """A window of at least so many bytes, whole pages: see `Window.unused`. All become as large as the largest ever
        asked for.

        Raises:
            OffloadError: what was written from it did not arrive.
        """
        self._num_lent += 1
        if self._num_lent + len(self._resting) > self._num_windows and self._resting:
            window, last = self._resting.pop(0)
            if window.memory.nbytes >= nbytes:
                window.unused = self.tier.settled(last)
                return window
            last.settle()
            del window  # its memory may serve the larger one
        return self.tier.window(nbytes)

    def give_back(self, window: Window, last: Event) -> None:
        """End a loan; `last` was begun with the window."""
        self._num_lent -= 1
        self._resting.append((window, last))

    def settle(self) -> None:
        """Wait for all that is under way with windows that are not lent."""
        for _, last in self._resting:
            last.settle()

    @property
    def device(self) -> torch.device:
        """The device whose memory windows are."""
        return self.tier.device
