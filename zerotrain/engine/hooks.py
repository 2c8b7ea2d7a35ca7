"""The hooks that tell the schedule where the model is. Each is one call."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zerotrain.engine.ranges import named_range, profiler_runs
from zerotrain.engine.schedule import LiveUnit, Schedule
from zerotrain.engine.structures import tensors_in


class LastGradientHook:
    """Calls once a backward, when all of some parameters have their gradient. One Python call, however many they are.

    It hangs on one parameter. If that one's gradient comes before another's, the hook moves to the other, within the
    same backward; so it ends up on the one that comes last, and follows when the model's graph changes. If a
    parameter gets no gradient at all, it waits in vain, and the end of the backward does its work.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], arrived: Callable[[], None]) -> None:
        self._parameters = parameters
        self._arrived = arrived
        self._handle: RemovableHandle | None = None
        self._hang_on(parameters[0])

    def _hang_on(self, parameter: nn.Parameter) -> None:
        self.remove()
        self._handle = parameter.register_post_accumulate_grad_hook(self._fired)

    def _fired(self, _: torch.Tensor) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                if parameter.requires_grad:  # otherwise the end of the backward says what is wrong
                    self._hang_on(parameter)
                return
        self._arrived()

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()


def connect(schedule: Schedule) -> Callable[[], None]:
    """Hook all units and gradients of a schedule; what is returned takes the hooks away."""
    removers = [handle.remove for unit in schedule.units for handle in hook_unit(unit, schedule)]
    removers += [hook.remove for hook in hook_gradients(schedule)]

    def disconnect() -> None:
        for remove in removers:
            remove()

    return disconnect


def hook_unit(unit: LiveUnit, schedule: Schedule) -> list[RemovableHandle]:
    """Announce to the schedule when a unit's modules start and end their forward and start their backward."""

    ranges: list[AbstractContextManager[object]] = []

    def before_forward(*_: Any) -> None:
        schedule.before_forward(unit)
        if profiler_runs():
            ranges.append(named_range("forward", unit.name))
            ranges[-1].__enter__()

    def after_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if ranges:
            ranges.pop().__exit__(None, None, None)
        if torch.is_grad_enabled():
            before_backward = partial(_before_backward, unit, schedule)
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(before_backward)
        schedule.after_forward(unit)

    handles = []
    for module in unit.modules:
        handles.append(module.register_forward_pre_hook(before_forward))
        handles.append(module.register_forward_hook(after_forward))
    return handles


def _before_backward(unit: LiveUnit, schedule: Schedule, _: torch.Tensor) -> None:
    schedule.before_backward(unit)


def hook_gradients(schedule: Schedule) -> list[LastGradientHook]:
    """Tell the schedule of each segment whose gradients have all arrived."""
    return [
        LastGradientHook(segment.parameters, partial(schedule.segment_arrived, weights, gradient, segment))
        for weights, gradient in schedule.trained
        for segment in gradient.segments
    ]
