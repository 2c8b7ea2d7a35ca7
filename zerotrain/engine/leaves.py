"""What one virtual rank computes in a step. See [Note: leaves] in `buckets/subtrees.py`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.device.device import lies_on_host
from zerotrain.errors import EngineStateError

if TYPE_CHECKING:
    from zerotrain.engine.engine import ZeroEngine

MicroBatch = Sequence[Any] | Mapping[str, Any]
"""The model's inputs, or named ones; it returns the loss."""
Weight = float | torch.Tensor
BeforeEach = Callable[[int, int], object]
"""Called with the number of a virtual rank, and that of a micro-batch in it."""


def weighs_nothing(weight: Weight) -> bool:
    """Whether a loss of this weight counts for nothing, as far as the host can know without waiting for the device."""
    is_known = not isinstance(weight, torch.Tensor) or lies_on_host(weight)
    return is_known and bool(weight == 0)


def require_micro_batches(micro_batches: Sequence[MicroBatch], weights: Sequence[Weight] | None) -> None:
    """Make sure, before anything is computed, that each micro-batch is one, and has a weight.

    Raises:
        EngineStateError: it is not so.
    """
    for each in micro_batches if type(micro_batches) in (list, tuple) else ():  # others may load as they are asked
        if isinstance(each, torch.Tensor) or not isinstance(each, Iterable):
            raise _no_micro_batch(each)
    if weights is not None and len(weights) != len(micro_batches):
        raise EngineStateError(
            f"train_step got {len(weights)} weights for {len(micro_batches)} micro-batches; give one for each"
        )


def _no_micro_batch(given: object) -> EngineStateError:
    kind = "tensor" if isinstance(given, torch.Tensor) else type(given).__name__
    return EngineStateError(f"train_step got a {kind} for a micro-batch; give it as a sequence: (tensor,)")


def equal_weights(num_micro_batches: int) -> list[Weight]:
    """Those of a mean over the micro-batches of a virtual rank."""
    return [1.0 / max(1, num_micro_batches)] * num_micro_batches


def call_model(engine: "ZeroEngine", inputs: MicroBatch) -> Any:
    """What the model returns for a micro-batch."""
    return engine(**inputs) if isinstance(inputs, Mapping) else engine(*inputs)


def run_leaf(
    engine: "ZeroEngine", number: int, weighted: Sequence[tuple[MicroBatch, Weight]], before_each: BeforeEach
) -> torch.Tensor:
    """Forward and backward of each micro-batch of virtual rank `number`: the weighted sum of their losses, 0-dim."""
    total = torch.zeros((), dtype=torch.float32, device=engine.world.device)
    for index, (inputs, weight) in enumerate(weighted):
        before_each(number, index)
        if isinstance(inputs, torch.Tensor):
            raise _no_micro_batch(inputs)
        loss = call_model(engine, inputs)
        with nullcontext() if index == len(weighted) - 1 else engine.no_sync():
            engine.backward(loss, weight=weight)
        if not weighs_nothing(weight):  # a loss that is nan would spoil the sum
            total += weight * loss.detach().float()
        del loss
    return total
