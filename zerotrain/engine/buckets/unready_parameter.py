"""What a parameter is while its bucket is not complete: the same object, of another class.

A module whose hook did not announce it (its parent reads `self.head.weight` without calling `self.head`) would
otherwise read weights that have not arrived, or freed memory, and train on wrong numbers without a word: garbage and a
segmentation fault were both seen on the CPU. Changing the class of the object itself, as torch does with
`UninitializedParameter`, leaves its identity, attributes, hooks and place in anybody's lists as they are.
"""

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

LEFT_ITS_UNIT = (
    "a backward read parameters that were not gathered for it: a tensor left {} by another way than the unit's output; "
    "return it from the unit's forward, or set zero.reshard_after_forward=False"
)
_FREED_MEMORY_WAS_READ = ("storage of size 0", "data is not allocated yet")
"""What torch says of it where autograd reads what it saved, which no class of a parameter can notice."""


def reads_freed_memory(error: Exception) -> bool:
    """Whether `error` is torch's about a tensor whose memory was given back."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _FREED_MEMORY_WAS_READ)


class UnreadyParameter(nn.Parameter):
    """Tells its shape, dtype and device; arithmetic completes the bucket first, and then meets a plain parameter."""

    complete: ClassVar[Callable[[], None]]
    """Gathers the bucket and gives its parameters their own class back, or raises EngineStateError where that would
    leave ranks waiting for each other."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, UnreadyParameter):
                type(leaf).complete()
                if isinstance(leaf, UnreadyParameter):  # a copy, made by what copies objects with their class
                    leaf.__class__ = nn.Parameter  # type: ignore[assignment]
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        type(self).complete()
        return copy.deepcopy(self, memo)  # by its own class


def unready_class(complete: Callable[[], None]) -> type[UnreadyParameter]:
    """A class for the parameters of one bucket, which `complete` completes.

    One class a bucket, not an attribute a parameter: changing the class is one assignment, and a parameter that is
    pickled or copied has no attribute of ours.
    """

    class UnreadyInBucket(UnreadyParameter):
        pass

    UnreadyInBucket.complete = complete
    return UnreadyInBucket


_METHODS = (
    "size dim numel element_size stride is_floating_point is_complex __len__ __hash__ requires_grad_ "
    "register_hook register_post_accumulate_grad_hook"
)
_ATTRIBUTES = (
    "shape dtype device ndim layout nbytes itemsize is_leaf grad_fn is_cuda is_cpu is_meta is_sparse is_quantized "
    "_backward_hooks _post_accumulate_grad_hooks"
)
_METADATA = {
    *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()),
    *(getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "grad")),
    *(getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "grad")),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
"""What may be asked of a parameter that is not there, and set: a change of `requires_grad` that the engine was not told
of is answered in the next backward."""
