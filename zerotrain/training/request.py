"""Requests to all ranks: to stop, to save or to change the stage, which ride as one number on the norm's exchange."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from zerotrain.files.untrusted import is_kind

SAVE = 1 << 8
"""Added to the number of a signal, or to 0."""
ONE_STAGE = SAVE << 1
"""Times the stage, and one more."""
STOP = SAVE << 4
"""Times the place of the asker for a stop among the names, from 1 on."""
ASKED = "control.yaml"
"""The first of the names."""
PRUNER = "sweep.pruner"
"""The second."""
CALLBACK = "callbacks."
"""The others begin so."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A wish of one rank, or what came of the wishes of all."""

    save: bool = False
    """After this step, beside the training."""
    stage: int | None = None
    """To train at from the next step on, until `zero.schedule` says otherwise."""
    stop: bool | str = False
    """After this step, saved. A text is the name of the asker; True stands for the callback with this request."""
    signal: int = 0
    """A signal to stop."""

    def __post_init__(self) -> None:
        if not is_kind(self.stage, Annotated[int, Meta(ge=0, le=3)] | None):
            raise ValueError(f"Request(stage={self.stage!r}): it must be 0, 1, 2, 3 or None")

    def __or__(self, other: "Request") -> "Request":
        """Both wishes; of two stages, stops or signals the first one."""
        return Request(
            save=self.save or other.save,
            stage=next((number for number in (self.stage, other.stage) if number is not None), None),
            stop=self.stop or other.stop,
            signal=self.signal or other.signal,
        )

    @property
    def stopped_by(self) -> str | None:
        """The name of the signal, or of the one who has asked for the stop; None: the run goes on."""
        return signal.Signals(self.signal).name if self.signal else str(self.stop) if self.stop else None

    def encoded(self, names: Sequence[str] = (ASKED, PRUNER)) -> int:
        """The number that tells this to the other ranks.

        Args:
            names: of all who may ask for a stop, the same on all ranks.
        """
        number = self.stage
        of_stage = 0 if number is None else (number + 1) * ONE_STAGE
        of_stop = (names.index(str(self.stop)) + 1) * STOP if self.stop else 0
        return self.signal + SAVE * bool(self.save) + of_stage + of_stop


def is_over(stopped_by: str | None) -> bool:
    """Whether a run that was stopped by this is done, as EarlyStopping or a pruner wants it. A run that a signal or
    control.yaml has stopped is to go on."""
    return stopped_by is not None and stopped_by.startswith((CALLBACK, PRUNER))


def decoded(numbers: Sequence[int], names: Sequence[str] = (ASKED, PRUNER)) -> Request:
    """The joint request of all ranks: each has sent its number with a step. The lowest rank with a wish for a stage or
    a stop is followed. SIGINT counts if signals differ, as when Ctrl-C comes to a run that a scheduler stops: the run
    is to exit as by it.
    """
    wishes = Request()
    for number in numbers:
        stage, stop = number % STOP // ONE_STAGE, number // STOP
        wishes |= Request(
            save=bool(number & SAVE),
            stage=stage - 1 if stage else None,
            stop=names[stop - 1] if stop else False,
            signal=signal.SIGINT if number % SAVE == signal.SIGINT else 0,
        )
    return wishes | Request(signal=next((number % SAVE for number in numbers if number % SAVE), 0))
