"""What stands in a module for a parameter whose bucket is not complete.

A module whose hook did not announce it (its parent reads `self.head.weight` without calling `self.head`) would
otherwise read weights that have not arrived, or freed memory, and train on wrong numbers without a word.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

LEFT_ITS_UNIT = (
    "a backward read parameters that were not gathered for it: a tensor left {} by another way than the unit's output; "
    "return it from the unit's forward, or set zero.reshard_after_forward=false"
)
_FREED_MEMORY_WAS_READ = ("storage of size 0", "data is not allocated yet")
"""What torch says of it, where it does not make a stand-in of the parameter."""


def reads_freed_memory(error: Exception) -> bool:
    """Whether `error` is torch's about a tensor whose memory was given back."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _FREED_MEMORY_WAS_READ)


class LazyParameter(nn.Parameter):
    """Has the shape, dtype and device of `original`; arithmetic completes the bucket first, then uses `original`."""

    original: nn.Parameter
    complete: Callable[[], None]
    """Gathers the bucket, or raises EngineStateError where that would leave ranks waiting for each other."""

    @staticmethod
    def around(original: nn.Parameter, complete: Callable[[], None]) -> "LazyParameter":
        # One element seen from everywhere: no memory, and if it is ever read past this class, NaN.
        value = torch.full((), float("nan"), dtype=original.dtype, device=original.device).expand(original.shape)
        lazy = torch.Tensor._make_subclass(LazyParameter, value, original.requires_grad)
        lazy.original = original
        lazy.complete = complete
        return lazy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _SWITCHES:
            func(args[0].original, *args[1:], **(kwargs or {}))
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

        def complete(leaf: Any) -> Any:
            if not isinstance(leaf, LazyParameter):
                return leaf
            leaf.complete()
            return leaf.original

        args, kwargs = pytree.tree_map(complete, (args, kwargs or {}))
        return func(*args, **kwargs)


_METHODS = "size dim numel element_size stride is_floating_point is_complex __len__ __hash__"
_ATTRIBUTES = (
    "shape dtype device ndim layout nbytes itemsize requires_grad is_leaf grad grad_fn "
    "is_cuda is_cpu is_meta is_sparse is_quantized _backward_hooks"
)
_METADATA = {
    *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
"""What may be asked of a parameter that is not there."""
_SWITCHES = {torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
"""What may be set of it. The engine answers a change that it was not told of in the next backward."""
