"""Which module made the first value that is not finite, in the forward or in the backward.

Modules without children are watched, in the order in which they run: a module whose inputs are finite and whose output
is not has made it. In the backward the same holds of the gradient of its output and that of its input.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zerotrain.data.fetch import with_tensors


class FirstNonFinite:
    """Watches a model; use as a context manager around one forward and backward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[Any] = []
        self._found: str | None = None

    def __enter__(self) -> "FirstNonFinite":
        for name, module in self._model.named_modules():
            if next(module.children(), None) is None:
                hook = module.register_forward_hook(self._hook(name, module), with_kwargs=True)
                self._hooks.append(hook)
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._hooks:
            each.remove()

    def told(self, parameter: str, loss_scale: float) -> str:
        """The sentence.

        Args:
            parameter: the first in the backward whose gradient was not finite.
        """
        scaled = f", with a loss scale of {loss_scale:g}" if loss_scale != 1.0 else ""
        if self._found is not None:
            return self._found + scaled
        return (
            f"no module, but what lies between them: the first in the backward is the gradient of {parameter}{scaled}"
        )

    def _hook(self, name: str, module: nn.Module) -> Any:
        called = f"{name} ({type(module).__name__})"

        def hook(_: nn.Module, inputs: Any, named: Any, outputs: Any) -> None:
            for own, values in module.named_parameters(recurse=False):  # at stage 3 they are whole in here alone
                if not _finite(values):
                    self._note(f"{name}.{own}, which was not finite before the step; replay an earlier one")
            given, made = list(_floats((inputs, named))), list(_floats(outputs))
            if not all(_finite(each) for each in given):
                self._note(f"the input of {called} in the forward, from outside it: {_listed(given)}")
            elif not all(_finite(each) for each in made):
                self._note(f"{called} in the forward, from the input {_listed(given) or 'of tokens'}")
            for each in made:
                if each.requires_grad:
                    each.register_hook(self._came(called, is_output=True))
            for each in given:
                if each.requires_grad and all(each is not other for other in made):
                    each.register_hook(self._came(called, is_output=False))

        return hook

    def _came(self, called: str, *, is_output: bool) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            if not _finite(gradient):
                what = f"what comes behind {called}" if is_output else called
                self._note(f"{what} in the backward; the gradient of its {'output' if is_output else 'input'}: "
                           f"{_listed([gradient])}")  # fmt: skip

        return hook

    def _note(self, found: str) -> None:
        if self._found is None:
            self._found = found


def _finite(values: torch.Tensor) -> bool:
    return bool(values.isfinite().all())


def _floats(values: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors in any structure."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    with_tensors(values, note)
    yield from (each for each in found if each.is_floating_point())


def _listed(tensors: list[torch.Tensor]) -> str:
    return ", ".join(map(outlined, tensors))


def outlined(tensor: torch.Tensor) -> str:
    """A tensor in a few words, such as "float32 (2, 3) from -1 to 2, 1 of 6 not finite"."""
    shape = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    finite = tensor.detach()[tensor.isfinite()]
    told = f"{shape} from {finite.min().item():.4g} to {finite.max().item():.4g}" if finite.numel() else shape
    num_bad = tensor.numel() - finite.numel()
    return f"{told}, {num_bad} of {tensor.numel()} not finite" if num_bad else told
