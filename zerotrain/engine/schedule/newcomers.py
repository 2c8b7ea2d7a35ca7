"""Parameters that come into a model after its engine was built. No bucket holds them, so nothing would train them."""

import weakref
from collections.abc import Callable, Iterable

from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from zerotrain.errors import EngineStateError

Placed = nn.Module | nn.Parameter


class Newcomers:
    """What is put into the modules of a model: noted when it is (PyTorch tells), and looked at by the next forward.

    Args:
        known: the parameters that the engine has.
    """

    def __init__(self, model: nn.Module, known: Iterable[nn.Parameter]) -> None:
        self._known = {id(parameter) for parameter in known}
        self._names = weakref.WeakKeyDictionary({module: name for name, module in model.named_modules()})
        self._placed: list[tuple[weakref.ref[nn.Module], str, weakref.ref[Placed]]] = []

    def watch(self) -> list[RemovableHandle]:
        """Be told from now on, until the handles are removed."""
        note = _noting(weakref.WeakMethod(self._note))
        return [
            torch_module.register_module_parameter_registration_hook(note),
            torch_module.register_module_module_registration_hook(note),
        ]

    def _note(self, module: nn.Module, name: str, placed: Placed) -> None:
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


def _noting(note: "weakref.WeakMethod[Callable[..., None]]") -> Callable[..., None]:
    def hook(module: nn.Module, name: str, placed: Placed | None) -> None:
        if placed is not None and (live := note()) is not None:
            live(module, name, placed)

    return hook
