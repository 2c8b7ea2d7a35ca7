"""The micro-batches of one virtual rank. See [Note: leaves] in `buckets/parts/subtrees.py`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from zerotrain.device.device import lies_on_host
from zerotrain.errors import ConfigError, EngineStateError

MicroBatch = Sequence[Any] | Mapping[str, Any]
"""The model's inputs, or named ones; it returns the loss."""
Weight = float | torch.Tensor
BeforeEach = Callable[[int, int], object]
"""Called with the number of a virtual rank, and that of a micro-batch in it."""
AfterEach = Callable[[int, int, torch.Tensor, Any], object]
"""Called with the same numbers, the loss of the micro-batch, and the outputs that the model gives beside it."""


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
        require_micro_batch(each)
    if weights is not None and len(weights) != len(micro_batches):
        raise EngineStateError(
            f"train_step got {len(weights)} weights for {len(micro_batches)} micro-batches; give one for each"
        )


def require_micro_batch(given: object) -> None:
    """Make sure that something can be a micro-batch.

    Raises:
        EngineStateError: it is a tensor, or nothing that can be iterated over.
    """
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
        kind = "tensor" if isinstance(given, torch.Tensor) else type(given).__name__
        raise EngineStateError(f"train_step got a {kind} for a micro-batch; give it as a sequence: (tensor,)")


def equal_weights(num_micro_batches: int) -> list[Weight]:
    """Those of a mean over the micro-batches of a virtual rank."""
    return [1.0 / max(1, num_micro_batches)] * num_micro_batches


def call_model(model: Callable[..., Any], inputs: MicroBatch, **switches: bool) -> Any:
    """The model's output for a micro-batch."""
    return model(**inputs, **switches) if isinstance(inputs, Mapping) else model(*inputs, **switches)


def is_loss(output: Any) -> bool:
    """Whether what a model returns can be its loss."""
    return isinstance(output, torch.Tensor) and output.is_floating_point() and output.numel() == 1


def require_loss(output: Any, model: str) -> None:
    """Make sure that a model returns its loss to an evaluation; ConfigError if not."""
    if not is_loss(output):
        shape = f" of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else ""
        raise ConfigError(
            f"model: {model}.forward returns a {type(output).__name__}{shape} for a batch in evaluation mode; let it "
            "return the mean loss alone, a tensor of one number"
        )


def loss_and_outputs(model: Callable[..., Any], inputs: MicroBatch) -> tuple[torch.Tensor, Any]:
    """The model's loss for a micro-batch, and its outputs in the same forward.

    Raises:
        EngineStateError: the model gives something else than these two.
    """
    given = call_model(model, inputs, with_outputs=True)
    if not isinstance(given, tuple) or len(given) != 2:
        kind = type(given).__name__
        raise EngineStateError(
            f"a model that is called with with_outputs=True must return (loss, outputs), not a {kind}"
        )
    return given
