"""The hooks to tell the schedule where the model is. Each is one call."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd import profiler
from torch.utils.hooks import RemovableHandle

from zerotrain.engine.buckets.gradient import Gradients
from zerotrain.engine.model.forward import ModuleHook, named_range
from zerotrain.engine.model.live_parameter import get_grad, register_last_hook
from zerotrain.engine.model.precision import tensors_in
from zerotrain.engine.schedule.live_unit import LiveUnit, UnitCall
from zerotrain.engine.schedule.schedule import Schedule
from zerotrain.errors import EngineStateError
from zerotrain.sharding.units import WalkedModel

next_node = torch.autograd._get_sequence_nr
"""() -> the number of the next node of a graph in this thread; numbers grow. See [Note: positions in a
backward] in `live_unit`."""

_HOOKED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""The modules with an engine on them."""


def require_no_engine(walked: WalkedModel) -> None:
    """Refuse a model with a part of another engine: that one would update weights for no reader.

    Raises:
        EngineStateError: one is.
    """
    if any(module in _HOOKED for module in walked.modules.values()):
        raise EngineStateError(
            f"model {type(walked.model).__name__} has an engine already, or a part of it has; use that one, delete it "
            "first (del engine), or build another model"
        )


def require_graph(loss: torch.Tensor, first_node: int) -> None:
    """Refuse a loss without a backward, or without a use for one.

    Raises:
        EngineStateError: it is not one number, has no graph, or one from before `first_node`, the first since the
            weights were updated or cut anew.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise EngineStateError(f"backward got {got}; give it the loss, a tensor of one number, such as a mean()")
    if not loss.requires_grad:
        raise EngineStateError("backward got a loss without a graph: was it computed under torch.no_grad()?")
    if loss.grad_fn is not None and loss.grad_fn._sequence_nr() < first_node:
        raise EngineStateError(
            "backward got a loss that was computed before the last step, or before a change of what trains or of the "
            "stage; call all backwards of a step before engine.step(), and engine.freeze, engine.set_stage and the "
            "like between a step and a forward"
        )


class LastGradientHook:
    """Calls once a backward, with the gradients of some parameters when all are there. One Python call, however many.

    It hangs on one parameter. If that one's gradient comes before another's, the hook moves to the other, within the
    same backward; so it ends up on the one that comes last, and follows when the model's graph changes. If a
    parameter gets no gradient at all, it waits in vain, and the end of the backward does its work.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], arrived: Callable[[Gradients], None]) -> None:
        self._parameters = parameters
        self._arrived = arrived
        self._handle = register_last_hook(parameters[0], self._fired)

    def _fired(self, _: torch.Tensor) -> None:
        gradients: Gradients = list(map(get_grad, self._parameters))
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is None:
                if parameter.requires_grad:  # otherwise the end of the backward says what is wrong
                    self.remove()
                    self._handle = register_last_hook(parameter, self._fired)
                return
        self._arrived(gradients)

    def remove(self) -> None:
        self._handle.remove()


def connect(engine: object, schedule: Schedule) -> weakref.finalize:
    """Hook the modules of all units and the parameters of all trained buckets, until the engine is deleted.

    The hooks hold the schedule, and the schedule holds the model. So they are taken off when the engine goes: otherwise
    a model in further use would keep its engine's memory.

    Returns:
        A finalizer; calling it disconnects them earlier.
    """
    modules = [module for unit in schedule.units for module in unit.modules]
    for bucket in schedule.buckets:  # those of the resident root have no hooks
        modules += [owner for managed in bucket.spec.parameters for owner, _ in managed.owners]
    _HOOKED.update(modules)
    hooks: list[RemovableHandle | LastGradientHook] = []
    for unit in schedule.units:
        hooks += _hook_unit(unit, schedule)
    for trained in schedule.trained:
        for segment in trained.gradient.segments:
            hooks.append(LastGradientHook(segment.parameters, partial(schedule.segment_arrived, trained, segment)))
    finalizer = weakref.finalize(engine, _disconnect, schedule, modules, hooks)
    finalizer.atexit = False
    return finalizer


def _disconnect(
    schedule: Schedule, modules: Sequence[torch.nn.Module], hooks: Sequence[RemovableHandle | LastGradientHook]
) -> None:
    """Take an engine's hooks off its model, and wait for what is still being sent and received.

    Seen without the wait: gloo, left with a receive whose buffer was gone, hung in a collective of the next engine.
    """
    for hook in hooks:
        hook.remove()
    _HOOKED.difference_update(modules)
    with suppress(Exception):  # other ranks may be gone; an error raised here would reach nobody
        schedule.drain()


def _hook_unit(unit: LiveUnit, schedule: Schedule) -> list[RemovableHandle]:
    """Announce to the schedule when a unit's modules start and end their forward and start their backward."""

    def before_forward(module: torch.nn.Module, *_: Any) -> None:
        first_node = next_node()
        schedule.before_forward(unit, module)
        traced = named_range("forward", unit.name) if profiler._is_profiler_enabled else nullcontext()
        traced.__enter__()
        schedule.calls.append((module, first_node, traced))

    def after_forward(module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        called = None
        while called is not module:  # others behind it were ended by an exception that it has caught
            called, first_node, traced = schedule.calls.pop()
            traced.__exit__(None, None, None)
        if schedule.plan.shards_parameters and torch.is_grad_enabled():
            _announce_backward(unit, schedule, output, first_node)
        schedule.after_forward(unit, module)

    handles = []
    for module in unit.modules:
        handles.append(module.register_forward_pre_hook(ModuleHook(before_forward)))
        handles.append(module.register_forward_hook(ModuleHook(after_forward)))
    return handles


def _announce_backward(unit: LiveUnit, schedule: Schedule, output: Any, first_node: int) -> None:
    """Announce the backward of a forward with the nodes from `first_node` on.

    Autograd runs the nodes of a graph in the reverse of the order they were made in. So the hook on the last node
    runs before all others of the unit, also before those of a tensor that leaves it by another way (a loss kept in an
    attribute), if that node made an output. If it made none, or an output is a parameter itself, the unit is kept.
    """
    call = UnitCall(first_node)
    last_node = first_node - 1
    for tensor in tensors_in(output):
        if not tensor.requires_grad:
            continue
        if tensor.grad_fn is None:
            schedule.keep(unit)
        elif (node := tensor.grad_fn._sequence_nr()) >= first_node:  # otherwise it is an input, passed through
            tensor.register_hook(partial(schedule.before_backward, unit, call, node))
            last_node = max(last_node, node)
    if last_node + 1 < next_node():
        schedule.keep(unit)
    if first_node < next_node():
        # Within torch.func the hooks are on tensors of the transform's own graph, which is gone before the backward.
        is_held = last_node >= first_node and torch._C._functorch.peek_interpreter_stack() is None
        unit.add_call(call, is_held=is_held)


class HasSchedule(Protocol):
    """An engine: its schedule is another one after each change of what trains."""

    schedule: Schedule


def complete_before_encoders(walked: WalkedModel, engine: HasSchedule) -> None:
    """Let the encoders of a model (`nn.TransformerEncoder`) find their first layer complete, as long as the engine is
    there: torch's fast path asks for that layer's weights before calling it.

    In evaluation without gradients, given a mask of padding, the encoder packs its input without the padding, and gives
    zeros in its place. It does not if a weight of its first layer is of another class than torch's own, as those are
    that have not been gathered: seen at stage 3, and at stages 1 and 2 in the first forward after a step, where the
    padded places held other numbers than in plain PyTorch. So the first layer is gathered when the encoder is called,
    which is at once before its own call.
    """
    reference = weakref.ref(engine)

    def before_forward(encoder: torch.nn.Module, *_: Any) -> None:
        live, layer = reference(), next(encoder.get_submodule("layers").children())
        if live is not None and not layer.training:
            live.schedule.complete_ahead(layer)

    for module in walked.modules.values():
        if isinstance(module, torch.nn.TransformerEncoder) and len(module.layers) > 0:
            module.register_forward_pre_hook(ModuleHook(before_forward))
