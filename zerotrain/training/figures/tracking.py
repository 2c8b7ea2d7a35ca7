"""Sinks that go on where they were, as in the same run of a tracking service."""

from collections.abc import Sequence
from typing import Any, Protocol

from zerotrain.training.figures.sinks import MetricSink


class ResumableSink(MetricSink, Protocol):
    """One that goes on where it was, such as in the same run of a tracking service: checkpoints keep its state."""

    def state_dict(self) -> dict[str, Any]:
        """What JSON can hold, such as the id of the service's run."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called before anything is logged, where a run goes on."""


def states_of(sinks: Sequence[MetricSink]) -> list[dict[str, Any] | None]:
    """The state of each sink that has one, for `restore_states`."""
    return [sink.state_dict() if hasattr(sink, "state_dict") else None for sink in sinks]


def restore_states(sinks: Sequence[MetricSink], states: Sequence[dict[str, Any] | None]) -> None:
    """Give sinks the states that as many gave in the same order."""
    for sink, state in zip(sinks, states, strict=False):
        if state is not None and hasattr(sink, "load_state_dict"):
            sink.load_state_dict(state)
