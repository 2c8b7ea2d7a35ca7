"""What was sent: every collective of the engine, by kind, with the bytes this rank put on the wire."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """The collectives of one span of time on one rank."""

    calls: Counter[str] = field(default_factory=Counter)
    """Number of collectives by kind: gather, reduce, exchange, norm."""
    nbytes: Counter[str] = field(default_factory=Counter)
    """Bytes this rank sent, by kind."""

    @property
    def sent_nbytes(self) -> int:
        """Bytes this rank sent, all kinds together."""
        return self.nbytes.total()


class Ledger:
    """Counts the traffic of optimizer steps apart from what happens outside them (evaluation, build, saving)."""

    def __init__(self) -> None:
        self.last_step = Traffic()
        """The last finished optimizer step: its forwards, backwards and update."""
        self.outside_steps = Traffic()
        """Everything that belongs to no optimizer step."""
        self.in_step = False
        """Whether what comes now belongs to an optimizer step."""
        self._this_step = Traffic()

    def record(self, kind: str, nbytes: int) -> None:
        """Add one collective that sent `nbytes` from this rank."""
        traffic = self._this_step if self.in_step else self.outside_steps
        traffic.calls[kind] += 1
        traffic.nbytes[kind] += nbytes

    def close_step(self) -> None:
        """An optimizer step ended: its traffic becomes `last_step`."""
        self.last_step, self._this_step = self._this_step, Traffic()
        self.in_step = False

    def drop_step(self) -> None:
        """The step under way was given up: its traffic belongs to none."""
        self.outside_steps.calls += self._this_step.calls
        self.outside_steps.nbytes += self._this_step.nbytes
        self._this_step = Traffic()
        self.in_step = False
