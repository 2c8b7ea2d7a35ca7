"""The parameters of a model while its constructor still makes them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


class LiveParameters:
    """Counts the elements of the parameters that modules have been given."""

    def __init__(self) -> None:
        self._made: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
        self.numel = 0
        """At least those that live: a parameter that was made and dropped counts until `recount`."""

    def add(self, parameter: nn.Parameter) -> None:
        if id(parameter) not in self._made:
            self._made[id(parameter)] = parameter
            self.numel += parameter.numel()

    def recount(self) -> int:
        """Count those that live; return their elements."""
        self.numel = sum(each.numel() for each in self._made.values())
        return self.numel


@contextmanager
def watching_parameters(look: Callable[[LiveParameters], None]) -> Iterator[None]:
    """Inside, `look` is called whenever a module gets a parameter, and may raise to end a constructor that would make
    millions of them."""
    live = LiveParameters()

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            live.add(parameter)
            look(live)

    hook = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()
