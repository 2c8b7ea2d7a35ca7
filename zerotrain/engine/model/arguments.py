"""Floating-point arguments of a model in 16 bits: they keep their bits wherever PyTorch computes with both."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from zerotrain.engine.model.structures import cast_floating, tensors_in

WIDENING = ("_loss", "cross_entropy", "cross_entropy_with_logits", "kl_div", "cdist", "grid_sample")
"""So end the names of torch's functions that compare with labels, or read places."""


class WideArguments(TorchFunctionMode):
    """While it is entered, values in the compute dtype and those in other floating-point dtypes go together.

    In sums and the like PyTorch computes with both and gives the wider dtype. It refuses them in other operations, such
    as a product with a weight: such an operation is called again, with the others rounded to the compute dtype. A loss
    gets all of them in the wider dtype. Most would promote them, some refuse them, and one does so in its backward.
    """

    def __init__(self, compute: torch.dtype) -> None:
        super().__init__()
        self._compute = compute
        self._seen = False
        self._overflow: torch.Tensor | None = None
        """0-dim bool, on the device."""

    def around_forward(self, inputs: Any) -> AbstractContextManager[object]:
        """The context to call a model in: this one if it computes in 16 bits and `inputs` have other floats."""
        if self._compute == torch.float32 or not _floats(inputs) - {self._compute}:
            return nullcontext()
        self._seen = True
        return self

    def around_backward(self) -> AbstractContextManager[object]:
        """The context for a backward, which may compute a part of a forward again."""
        return self if self._seen else nullcontext()

    def rounded(self, value: Any) -> Any:
        """`value` with every floating-point tensor inside it in the compute dtype."""
        # What torch.func transforms cannot be looked at outside of it.
        for tensor in tensors_in(value) if torch._C._functorch.peek_interpreter_stack() is None else ():
            # bf16 reaches as far as fp32.
            if tensor.is_floating_point() and torch.finfo(tensor.dtype).max > 2 * torch.finfo(self._compute).max:
                overflow = (tensor.isfinite() & (tensor.abs() > torch.finfo(self._compute).max)).any()
                self._overflow = overflow if self._overflow is None else overflow | self._overflow
        return cast_floating(value, self._compute)

    def widened(self, value: Any) -> Any:
        """`value` with every floating-point tensor inside it in the dtype that PyTorch promotes them all to."""
        floats = _floats(value)
        return cast_floating(value, functools.reduce(torch.promote_types, floats)) if len(floats) > 1 else value

    def take_overflow(self) -> bool:
        """Whether a finite value was rounded to inf since the last call. Waits for the device if one could be."""
        overflow, self._overflow = self._overflow, None
        return overflow is not None and bool(overflow)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if name.endswith(WIDENING):
            args, kwargs = self.widened((args, kwargs))
        try:
            return func(*args, **kwargs)
        except RuntimeError as refusal:
            written = kwargs.get("out", args[:1] if name.endswith("_") and not name.endswith("__") else ())
            is_mixed = len(floats := _floats((args, kwargs))) > 1 and self._compute in floats
            if not is_mixed or not refuses_dtypes(refusal) or _floats(written) - {self._compute}:
                raise
            args, kwargs = self.rounded((args, kwargs))
            try:
                return func(*args, **kwargs)
            except RuntimeError:
                raise refusal from None


def refuses_dtypes(error: BaseException) -> bool:
    """Whether `error` is PyTorch's about dtypes that it does not compute with together."""
    return isinstance(error, RuntimeError) and "type" in str(error).lower()


def one_dtype_at_entry(forward: Callable[..., Any], change: Callable[[WideArguments, Any], Any]) -> Callable[..., Any]:
    """A forward whose arguments are brought to one dtype, and which runs without the mode: one that is compiled, or
    that compares dtypes or looks for modes itself.

    Args:
        change: `WideArguments.rounded` or `WideArguments.widened`.
    """

    def run(*inputs: Any, **named: Any) -> Any:
        mode = _get_current_function_mode()
        if not isinstance(mode, WideArguments):
            return forward(*inputs, **named)
        inputs, named = change(mode, (inputs, named))
        with _pop_mode_temporarily():
            return forward(*inputs, **named)

    return run


def _floats(value: Any) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors_in(value) if tensor.is_floating_point()}
