"""torch's fast path of `nn.TransformerEncoder`: it asks for the weights of the first layer before calling it.

In evaluation without gradients, given a mask of padding, the encoder packs its input without the padding, and gives
zeros in its place. It does not if a weight of its first layer is of another class than torch's own, as those are that
have not been gathered: seen at stage 3, and at stages 1 and 2 in the first forward after a step, where the padded
places held other numbers than in plain PyTorch. So the first layer is gathered when the encoder is called, which is at
once before its own call.
"""

import weakref
from typing import Any, Protocol

from torch import nn

from zerotrain.engine.model.module_hook import ModuleHook
from zerotrain.engine.schedule.schedule import Schedule
from zerotrain.sharding.units import WalkedModel


class HasSchedule(Protocol):
    """An engine, whose schedule is another one after each change of what trains."""

    schedule: Schedule


def complete_before_encoders(walked: WalkedModel, engine: HasSchedule) -> None:
    """Let the encoders of a model find their first layer complete, as long as the engine is there."""
    reference = weakref.ref(engine)

    def before_forward(encoder: nn.Module, *_: Any) -> None:
        live, first = reference(), next(encoder.get_submodule("layers").children())
        if live is not None and not first.training:
            live.schedule.complete_ahead(first)

    for module in walked.modules.values():
        if isinstance(module, nn.TransformerEncoder) and len(module.layers) > 0:
            module.register_forward_pre_hook(ModuleHook(before_forward))
