"""A parameter while an engine has it: the same object, of another class.

Changing the class of the object itself, as torch does with `UninitializedParameter`, leaves its identity, attributes,
hooks and place in anybody's lists as they are. There are two such classes:

`UnreadyParameter`, while its bucket is not complete. A module whose hook did not announce it (its parent reads
`self.head.weight` without calling `self.head`) would otherwise read weights that have not arrived, or freed memory, and
train on wrong numbers without a word: garbage and a segmentation fault were both seen on the CPU.

`LiveParameter`, while it is. It answers what PyTorch does behind everybody's back: `p.data` writes that no version
counts, `p.data = ...` that takes the parameter out of its bucket, `p.grad` that is in the bucket already.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from zerotrain.errors import EngineStateError, argument

ENGINE_IS_GONE = (
    "a parameter was read after its engine was deleted: keep the engine as long as its model is used, or load "
    "engine.full_state_dict() into a new model"
)
_GRADIENT_IS_IN_THE_ENGINE = (
    "the gradient of {} is in the engine, which reduces it over the ranks while the backward runs: clip it with "
    "{}, whose norm engine.step() returns, forget it with engine.zero_grad(), and look at this rank's own with "
    "parameter.register_hook(...)"
)
_FREED_MEMORY_WAS_READ = ("storage of size 0", "data is not allocated yet")
"""Torch's messages if autograd reads freed memory that it saved: a class of a parameter cannot notice that."""

_DATA: Any = torch._C.TensorBase.data
_GRAD: Any = torch._C.TensorBase.grad
get_data, set_data = _DATA.__get__, _DATA.__set__
get_grad, set_grad = _GRAD.__get__, _GRAD.__set__
"""Accessors of the attributes `data` and `grad` for the engine itself."""


def left_its_unit(unit: str) -> str:
    """The sentence about a backward that read parameters of a unit not gathered for it."""
    return (
        f"a backward read parameters that were not gathered for it: a tensor left {unit} other than by the unit's "
        f"output; return it from the unit's forward, or set {argument('zero.reshard_after_forward', False)}"
    )


def reads_freed_memory(error: BaseException) -> bool:
    """Whether `error` is torch's about a tensor whose memory was given back."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _FREED_MEMORY_WAS_READ)


class Owner(Protocol):
    """Answers for a parameter while an engine has it."""

    def complete(self) -> None:
        """Gather the bucket and give its parameters the class they have then, or raise EngineStateError where that
        would leave ranks waiting for each other."""

    def data_was_read(self) -> None:
        """Somebody got hold of a parameter's memory and may write to it uncounted."""

    def holds_gradient(self) -> bool:
        """Whether gradients of this step have been moved out of the parameters."""

    def name_of(self, parameter: torch.nn.Parameter) -> str:
        """The model's name of it."""


_OWNERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""torch.nn.Parameter -> weak reference to its `Owner`. No attribute: nothing of ours is pickled or copied."""
_LAST_HOOKS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""torch.nn.Parameter -> the key of the hook of ours that must run behind all others."""


def settle(parameters: Iterable[torch.nn.Parameter], owner: Owner | None) -> None:
    """From now on `owner` answers for these; None: nobody yet, and until then nobody can read them."""
    reference = (lambda: None) if owner is None else weakref.ref(owner)
    for parameter in parameters:
        _OWNERS[parameter] = reference


def _owner(parameter: torch.nn.Parameter) -> Owner | None:
    reference = _OWNERS.get(parameter)
    owner: Owner | None = None if reference is None else reference()
    return owner


class LiveParameter(torch.nn.Parameter):
    """Otherwise as any parameter. See `live_class`."""

    plain_class: ClassVar[type] = torch.nn.Parameter
    """The class it has without an engine."""

    def _get_data(self) -> torch.Tensor:
        if (owner := _owner(self)) is not None:
            owner.data_was_read()
        return get_data(self)

    def _set_data(self, value: torch.Tensor) -> None:
        owner = _owner(self)
        if owner is None:
            set_data(self, value)
            return
        own = self._get_data()
        own_kind, new_kind = ((t.dtype, tuple(t.shape), t.device) for t in (own, value))
        if own_kind != new_kind:
            own_text, new_text = (", ".join(map(str, kind)) for kind in (own_kind, new_kind))
            raise EngineStateError(
                f"{owner.name_of(self)} lies in memory of the engine, as {own_text}: a tensor of {new_text} cannot "
                "take its place; change dtype, shape or device of a model before build_engine"
            )
        if not value.is_set_to(own):  # as `model.to(device)` does
            own.copy_(value.detach())

    data = property(_get_data, _set_data)

    @property
    def grad(self) -> torch.Tensor | None:
        value: torch.Tensor | None = get_grad(self)
        if value is None:
            self._require_no_gradient()
        return value

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._require_no_gradient()
        if value is not None and (owner := _owner(self)) is not None:
            raise EngineStateError(
                f"the gradient of {owner.name_of(self)} was set by hand, which no step would use: gradients come from "
                "engine.backward(loss); to change them on their way, use parameter.register_hook(...)"
            )
        set_grad(self, value)

    def _require_no_gradient(self) -> None:
        owner = _owner(self)
        if owner is not None and owner.holds_gradient():
            raise EngineStateError(
                _GRADIENT_IS_IN_THE_ENGINE.format(owner.name_of(self), argument("build_engine(max_grad_norm)"))
            )

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """As torch's. It runs before the engine moves the gradient out of the parameter."""
        handle: RemovableHandle = super().register_post_accumulate_grad_hook(hook)
        hooks = self._post_accumulate_grad_hooks
        if (key := _LAST_HOOKS.get(self)) in hooks:
            hooks[key] = hooks.pop(key)
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with self._as_plain():
            return copy.deepcopy(self, memo)

    def __repr__(self) -> str:  # type: ignore[override]
        with self._as_plain():
            return repr(self)

    @contextmanager
    def _as_plain(self) -> Iterator[None]:
        live_class = type(self)
        self.__class__ = self.plain_class
        try:
            yield
        finally:
            self.__class__ = live_class


def register_last_hook(parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call `hook` when the gradient of `parameter` is there, behind all hooks of others. One for each."""
    handle: RemovableHandle = torch.Tensor.register_post_accumulate_grad_hook(parameter, hook)
    _LAST_HOOKS[parameter] = handle.id
    return handle


_LIVE_CLASSES: dict[type, type[LiveParameter]] = {torch.nn.Parameter: LiveParameter}


def live_class(plain_class: type) -> type[LiveParameter]:
    """The class of complete parameters that are of `plain_class` without an engine. One for all: torch.compile compiles
    anew for another."""
    if issubclass(plain_class, LiveParameter):
        return live_class(plain_class.plain_class)
    if plain_class not in _LIVE_CLASSES:
        attributes = {"plain_class": plain_class}
        _LIVE_CLASSES[plain_class] = type(plain_class.__name__, (LiveParameter, plain_class), attributes)
    return _LIVE_CLASSES[plain_class]


INSTEAD_OF_A_COPY = "For a moving average of the weights call engine.keep_average(), in place of AveragedModel"


class UnreadyParameter(LiveParameter):
    """Tells its shape, dtype and device; arithmetic completes the bucket first, and then meets a live parameter."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, UnreadyParameter):
                leaf._complete()
        return func(*args, **kwargs)

    def _complete(self) -> None:
        reference = _OWNERS.get(self)
        if reference is None:  # a copy, made by what copies objects with their class
            self.__class__ = torch.nn.Parameter  # type: ignore[assignment]
        elif (owner := reference()) is None:
            raise EngineStateError(ENGINE_IS_GONE)
        else:
            owner.complete()

    def _get_data(self) -> torch.Tensor:
        self._complete()
        return self.data

    def _set_data(self, value: torch.Tensor) -> None:
        self._complete()
        self.data = value

    data = property(_get_data, _set_data)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        try:
            self._complete()
        except EngineStateError as error:
            raise EngineStateError(f"{error}. {INSTEAD_OF_A_COPY}") from None
        return copy.deepcopy(self, memo)  # by its own class

    def __repr__(self) -> str:  # type: ignore[override]
        self._complete()
        return repr(self)


_METHODS = (
    "size dim numel element_size stride is_floating_point is_complex __len__ __hash__ requires_grad_ "
    "register_hook register_post_accumulate_grad_hook"
)
_ATTRIBUTES = (
    "shape dtype device ndim layout nbytes itemsize is_leaf grad_fn is_cuda is_cpu is_meta is_sparse is_quantized "
    "_backward_hooks _post_accumulate_grad_hooks _version"
)
_METADATA = {
    *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()),
    *(getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "grad", "_post_accumulate_grad_hooks")),
    *(getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "grad")),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
"""Functions that may be called on an `UnreadyParameter` without gathering it. If a user sets `requires_grad` without
telling the engine, the next backward handles that."""
