"""Parameters that come into a model after its engine was built. No bucket holds them, so nothing would train them."""

import threading
import weakref
from collections.abc import Iterable

from torch import nn
from torch.nn.modules import module as torch_module

from zerotrain.errors import EngineStateError
from zerotrain.sharding.units import WalkedModel

Placed = nn.Module | nn.Parameter


class Newcomers:
    """Parameters and modules added to a model: noted when they are (PyTorch tells), and checked by the next forward.

    Args:
        walked: as it is now.
        known: the engine's parameters.
    """

    def __init__(self, walked: WalkedModel, known: Iterable[nn.Parameter]) -> None:
        self._known = set(map(id, known))
        self._names = weakref.WeakKeyDictionary({module: name for name, module in walked.modules.items()})
        self._placed: list[tuple[weakref.ref[nn.Module], str, weakref.ref[Placed]]] = []

    def watch(self) -> "list[Watch]":
        """Be told from now on, until what this gives is removed."""
        return [Watch(self)]

    def note(self, module: nn.Module, name: str, placed: Placed) -> None:
        """Something was put into a module, of whichever model."""
        if module in self._names:
            self._placed.append((weakref.ref(module), name, weakref.ref(placed)))

    def require_none(self) -> None:
        """Make sure that the model has no parameter that should train and is not the engine's.

        Raises:
            EngineStateError: it has.
        """
        for to_module, name, to_placed in self._placed:
            module, placed = to_module(), to_placed()
            if module is None or placed is None:
                continue
            is_there = any(each is placed for each in (module._parameters.get(name), module._modules.get(name)))
            if is_there and not all(id(each) in self._known for each in _trained(placed)):
                full_name = f"{self._names[module]}.{name}".lstrip(".")
                raise EngineStateError(
                    f"{full_name}, a {type(placed).__name__}, came into the model after build_engine, and nothing "
                    "would train it: change a model before build_engine, and its weights with "
                    "engine.load_state_dict(...)"
                )
        self._placed.clear()


def _trained(placed: Placed) -> list[nn.Parameter]:
    parameters = [placed] if isinstance(placed, nn.Parameter) else list(placed.parameters())
    return [parameter for parameter in parameters if parameter.requires_grad]


class Watch:
    """Tells a `Newcomers` of registrations, as long as it lives.

    [Note: one hook for all engines]
    PyTorch calls hooks on all modules of the process from a dict, and one that is taken out meanwhile ends the making
    of some module with "OrderedDict mutated during iteration": seen where an engine was collected in one thread while
    another built a model, and the same may happen in one thread, since the collector runs at any place. So there is one
    hook, for good, and the engines stand in a tuple, which is replaced and never changed.
    """

    _all: "tuple[Watch, ...]" = ()
    _changing = threading.RLock()

    def __init__(self, newcomers: Newcomers) -> None:
        self._newcomers = weakref.ref(newcomers)
        with Watch._changing:
            Watch._all = (*Watch._all, self)

    def remove(self) -> None:
        """Tell it no more."""
        with Watch._changing:
            Watch._all = tuple(each for each in Watch._all if each is not self)

    @staticmethod
    def tell(module: nn.Module, name: str, placed: Placed | None) -> None:
        """Something was put into a module."""
        for watch in Watch._all:
            newcomers = watch._newcomers()
            if placed is not None and newcomers is not None:
                newcomers.note(module, name, placed)


torch_module.register_module_parameter_registration_hook(Watch.tell)
torch_module.register_module_module_registration_hook(Watch.tell)
