"""A loss of the config (`loss=cross_entropy`), for a model that returns outputs: the model then returns its loss."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from zerotrain.data import fetch
from zerotrain.engine.step import call_model, is_loss
from zerotrain.files.untrusted import printable
from zerotrain.training.metrics.metric import class_dim_of, logits_in

__all__ = ["BinaryCrossEntropy", "CrossEntropy"]

OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
OF_ELEMENTS = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)
"""Losses of torch between outputs and a target of the same shape."""


class CrossEntropy(nn.CrossEntropyLoss):
    """Torch's, with numbers for the weights of classes.

    Args:
        class_dim: the dimension of the outputs with the classes, 1 or -1 (the last). None: the shapes tell.
    """

    def __init__(
        self,
        *,
        weight: list[float] | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        class_dim: int | None = None,
    ) -> None:
        weights = None if weight is None else torch.tensor(weight)
        super().__init__(weights, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction)
        self.class_dim = class_dim


class BinaryCrossEntropy(nn.BCEWithLogitsLoss):
    """Torch's of logits, with numbers for the weights of positive targets."""

    def __init__(self, *, pos_weight: list[float] | None = None, reduction: str = "mean") -> None:
        super().__init__(reduction=reduction, pos_weight=None if pos_weight is None else torch.tensor(pos_weight))


class ConfigLoss:
    """The loss of a config, and what it and the model get of a batch.

    Args:
        function: a loss of torch, called as function(outputs, target), or anything called as function(outputs, batch).
        target: the part of a batch that the model does not get, a dotted path of names. None: `labels`, or the second
            part without names; a function has it only where the model's forward does not take it.
        forward: of the model, without the loss.
    """

    def __init__(self, function: Callable[..., Any], target: str | None, forward: Callable[..., Any]) -> None:
        self.function, self.target, self.name = function, target, type(function).__name__
        self.compares = isinstance(function, nn.modules.loss._Loss)
        """Whether it gets the target alone."""
        if not isinstance(function, nn.Module):
            self.name = getattr(getattr(function, "func", function), "__name__", self.name)
        self.signature = inspect.signature(forward)
        weight = getattr(function, "weight", None) if isinstance(function, OF_CLASSES) else None
        self._class_weights = None if weight is None else weight.double()  # it stays in the host's memory

    def inputs_of(self, batch: Any) -> Sequence[Any] | Mapping[str, Any]:
        """The arguments of the model: the target stays with the loss, and so do named parts that forward does not
        take."""
        inputs = fetch.as_inputs(batch)
        if isinstance(inputs, Mapping):
            parameters = self.signature.parameters
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            inputs = {name: part for name, part in inputs.items() if takes_any or name in parameters}
        if not self.compares and self.target is None:
            with suppress(TypeError):
                call_model(self.signature.bind, inputs)
                return inputs
        return fetch.without_targets(inputs, [self.target])

    def count(self, batch: Any) -> float:
        """The divisor of a batch's mean, for a loss of `OF_CLASSES` or `OF_ELEMENTS`."""
        target = fetch.target_of(batch, self.target)
        assert target is not None
        if not isinstance(self.function, OF_CLASSES) or target.is_floating_point():
            classes = target.shape[1] if isinstance(self.function, OF_CLASSES) and target.dim() > 1 else 1
            return target.numel() / classes
        labels = target[target != self.function.ignore_index].long()
        return len(labels) if self._class_weights is None else float(self._class_weights[labels].sum())

    def __call__(self, outputs: Any, batch: Any, model: Any) -> Any:
        """The loss of a batch with these outputs.

        Raises:
            ValueError: outputs and target have shapes that do not fit.
        """
        if isinstance(self.function, nn.Module):
            first = next((tensor for tensor in fetch.tensors_in(outputs)), None)
            if first is not None and any(buffer.device != first.device for buffer in self.function.buffers()):
                self.function.to(first.device)
        if not self.compares:
            return self.function(outputs, batch)
        outputs, target = logits_in(outputs), fetch.target_of(batch, self.target)
        assert target is not None
        if outputs.dtype in (torch.float16, torch.bfloat16):
            outputs = outputs.float()
        if isinstance(self.function, OF_ELEMENTS):
            if outputs.shape != target.shape:
                shapes = f"outputs of shape {tuple(outputs.shape)} with a target of shape {tuple(target.shape)}"
                advice = "" if target.is_floating_point() else "; loss=cross_entropy takes numbers of classes"
                raise ValueError(f"it compares {shapes}; both must have one shape{advice}")
            target = target.to(outputs.dtype)
        elif isinstance(self.function, OF_CLASSES) and target.is_floating_point():
            if target.shape != outputs.shape:
                kind = str(target.dtype).removeprefix("torch.")
                raise ValueError(f"its target is {kind}; give numbers of classes as integers, such as by .long()")
        elif isinstance(self.function, OF_CLASSES):
            target, class_dim = target.long(), getattr(self.function, "class_dim", None)
            class_dim = class_dim or (-1 if getattr(model, "next_token_labels", False) else None)
            if class_dim_of(outputs, target, class_dim) == outputs.dim() - 1:
                outputs, target = outputs.flatten(0, -2), target.flatten()
        if (weights := self._class_weights) is not None and len(weights) != outputs.shape[min(1, outputs.dim() - 1)]:
            shape = f"outputs of shape {tuple(outputs.shape)}"
            raise ValueError(f"loss.weight has {len(weights)} numbers for {shape}; give one for each class")
        return self.function(outputs, target)

    def has_target(self, batch: Any) -> bool:
        """Whether the loss of a batch can be computed, as far as can be told."""
        return (not self.compares and self.target is None) or fetch.target_of(batch, self.target) is not None

    def require_target(self, model: Any, batch: Any, where: str) -> None:
        """Check that a batch has what the loss of a config and its model get; a ValueError says what is missing.

        Args:
            where: the dataset that `batch` is of.
        """
        names = ", ".join(fetch.names_of_tensors(batch)) or f"{len(fetch.as_inputs(batch))} parts without names"
        if not self.has_target(batch):
            raise ValueError(
                f"loss.target: {self.name} compares outputs with {self.target or fetch.LABELS}, and a batch of {where} "
                f"has {names}; give loss.target=NAME one of its parts"
            )
        try:
            call_model(self.signature.bind, self.inputs_of(batch))
        except TypeError as error:
            kind = type(model).__name__
            raise ValueError(f"a batch of {where} has {names}, and {kind}.forward: {error}") from error

    def require_scalar(self, model: Any, batch: Any, *, sure: bool) -> None:
        """Check that the loss of a config can be computed; a ValueError says why not.

        Args:
            model: on the device of `batch`. One that cannot compute here says nothing of the loss.
            sure: whether any error of a loss of one's own would come in the run too.
        """
        outputs = None
        with suppress(Exception), torch.no_grad():
            outputs = model.outputs_of(batch)
        if outputs is None:
            return
        try:
            with torch.no_grad():
                value = self(outputs, batch, model)
        except Exception as error:  # whatever a user's function raises
            if "meta" in str(error) or not (sure or self.compares or isinstance(error, (TypeError, LookupError))):
                return  # it needs values, or another device
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ValueError(f"{self.name}: {kind}{printable(str(error), keep='')}") from error
        if not is_loss(value):
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise ValueError(
                f"{self.name} returns a {type(value).__name__}{shape} for a batch; it must return one number, such "
                "as a mean"
            )


class _WithLoss:
    """A second class of a model: its forward returns the loss, or its outputs for a batch without target."""

    config_loss: ConfigLoss

    def forward(self, *parts: Any, with_outputs: bool = False, **named: Any) -> Any:
        batch, loss = named or parts, self.config_loss
        if (parts and named) or not loss.has_target(batch):
            return super().forward(*parts, **named)  # type: ignore[misc]
        outputs = self.outputs_of(batch)
        value = loss(outputs, batch, self)
        return (value, fetch.with_tensors(outputs, torch.Tensor.detach)) if with_outputs else value

    def outputs_of(self, batch: Any) -> Any:
        """The outputs that the loss compares with the target."""
        return call_model(super().forward, self.config_loss.inputs_of(batch))  # type: ignore[misc]


def add_loss(model: nn.Module, function: Callable[..., Any], target: str | None) -> None:
    """Let a model that returns outputs return a loss of these. It keeps its names, and the name of its class.

    Raises:
        ValueError: the loss cannot be one, since it has parameters or is of more than outputs and a target.
    """
    kind, loss = type(model), ConfigLoss(function, target, model.forward)
    if not callable(function):
        raise ValueError(f"{loss.name} cannot be called; it must be a function, or a class whose objects can be called")
    if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
        raise ValueError(f"{loss.name} has parameters, which nothing would train; make it a part of the model")
    if loss.compares:
        try:
            inspect.signature(getattr(function, "forward")).bind(None, None)  # noqa: B009
        except TypeError as error:
            instead = "give a function of your own, called as loss(outputs, batch)"
            raise ValueError(f"{loss.name} takes more than outputs and a target; {instead}") from error
    reduction, count = getattr(function, "reduction", "mean"), None
    is_known = reduction == "mean" and isinstance(function, (*OF_CLASSES, *OF_ELEMENTS))
    if is_known or callable(getattr(function, fetch.LOSS_COUNT, None)):
        count = _count
    says = {fetch.LOSS_OVER: fetch.SUM if reduction == "sum" else fetch.MODEL if count else fetch.AUTO}
    body = {"__module__": kind.__module__, "__doc__": kind.__doc__, fetch.LOSS_COUNT: count}
    model.__class__ = type(kind.__name__, (_WithLoss, kind), body | says)
    vars(model)["config_loss"] = loss  # no module of the model: its names stay


def _count(self: Any, *parts: Any, **named: Any) -> Any:
    loss = self.config_loss
    return getattr(loss.function, fetch.LOSS_COUNT, loss.count)(named or parts)
