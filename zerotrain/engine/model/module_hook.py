"""A hook on a module of the model that stays behind when the module is copied, pickled or compiled."""

from collections.abc import Callable
from typing import Any

from zerotrain.engine.model.engine_call import outside_graphs


class ModuleHook:
    """Calls `call` with what PyTorch gives to a hook.

    A copy of the module has a hook that does nothing: with a copy of this one it would tell the engine's schedule of
    its own forwards (seen: `deepcopy` of a model copied buckets and process groups, or failed at them). torch.compile
    of the whole model calls it between its graphs.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    @outside_graphs
    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> Any:
        return _give_no_hook, ()


def no_hook(*_: Any) -> None:
    """Stands in a copy of a module for the `ModuleHook` of the original."""


def _give_no_hook() -> Callable[..., None]:
    return no_hook
