"""The hyperparameters of a group of parameters, and what the ranks compare of them."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from numbers import Real
from typing import Any, TypeGuard

import torch

from zerotrain.checkpoint.manifest import DTYPES
from zerotrain.device.device import lies_on_host
from zerotrain.errors import EngineStateError, argument

PLAIN_TYPES = frozenset({float, int, bool, str, type(None)})
_ON_THE_DEVICE = "on the device"
_MISSING = object()


class Hyperparameters(dict[str, Any]):
    """The settings of a parameter group's update, by name. Its parameters are not in it.

    "initial_lr" can be read, but is not stored: torch's schedulers store there the rate that they begin with, unless
    they find one, and whoever changes "lr" before means theirs to begin with that.

    Args:
        own: the names of the numbers that an optimizer's steps change in the group, such as a count of steps. They are
            the group's, and the same on all ranks: also where a rank holds nothing of the group, and where each of its
            buckets has an optimizer that counts.
        kind: the class of its optimizer.
        counting: an optimizer of one small tensor, whose own numbers the group follows; None: it has none.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        own: frozenset[str] = frozenset(),
        kind: str = "",
        counting: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__(settings)
        self.own, self.kind, self.counting = own, kind, counting
        self._built = dict(settings)
        self._numbers = {name for name, value in settings.items() if is_number(value)}
        self.first_lr = float(self.get("lr") or 0.0)

    def __missing__(self, name: str) -> float:
        if name == "initial_lr":
            return self.first_lr
        if name == "params":
            raise EngineStateError(
                "a group of engine.param_groups holds only hyperparameters, because the updated tensors are "
                "shards; parameters are in engine.module.parameters(), gradients are clipped by "
                f"{argument('max_grad_norm')}, and with precision=fp16 the engine scales the loss itself: leave out a "
                "GradScaler"
            )
        raise KeyError(name)

    def show(self, group: dict[str, Any]) -> None:
        """Give a group of an optimizer the settings as they are now. It may change its own numbers where they lie."""
        for name in self.own:
            group.pop(name, None)
        group.update(self)
        group.update({name: deepcopy(self[name]) for name in self.own if name in self})

    def count_step(self, *, trains: bool = True) -> None:
        """Bring the own numbers to what they are after a step.

        Args:
            trains: whether any parameter of the group has a gradient.
        """
        if self.counting is None:
            return
        (group,) = self.counting.param_groups
        (tensor,) = group["params"]
        tensor.grad = torch.ones_like(tensor) if trains else None
        self.show(group)
        self.counting.step()
        self.update({name: group[name] for name in self.own if name in group})

    def require_usable(self) -> None:
        """Refuse a group changed by hand so that no update can be computed with it.

        Raises:
            EngineStateError: it was renamed, has lost a setting, or a number in it is no number any more.
        """
        for name, built in self._built.items():
            value, problem = self.get(name, _MISSING), ""
            if value is _MISSING:
                problem = "was removed; set it to a value instead" if name not in self.own else ""
            elif name == "name" and value != built:
                problem = f"was changed to {value!r}; keep the name, by which checkpoints find the group"
            elif name in self._numbers and not is_number(value):
                problem = f"was set to {value!r}; it must be a number"
            if problem:
                raise EngineStateError(f"engine.param_groups: {name} of group {self._built['name']!r} {problem}")


def is_number(value: object) -> TypeGuard[float | torch.Tensor]:
    """Whether a setting is a number, and no flag; a tensor may be one."""
    return isinstance(value, Real | torch.Tensor) and not isinstance(value, bool)


def as_plain(value: Any, *, reads: bool = False) -> Any:
    """A hyperparameter as something with the same `repr` on ranks with the same one: of an object, such as a function,
    its class alone.

    Args:
        reads: whether a tensor on a device is read.
    """
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, list | tuple):
        return [as_plain(element, reads=reads) for element in value]
    if isinstance(value, torch.Tensor):
        return value.tolist() if reads or lies_on_host(value) else _ON_THE_DEVICE
    return float(value) if isinstance(value, Real) else type(value).__name__


def plain_values(groups: Iterable[Mapping[str, Any]]) -> tuple[str, list[torch.Tensor]]:
    """The values of all groups in their order: as text, and the tensors of a device, unread."""
    values = [value for group in groups for value in group.values()]
    text = repr([value if type(value) in PLAIN_TYPES else as_plain(value) for value in values])
    if _ON_THE_DEVICE not in text:
        return text, []
    nested = [element for value in values for element in (value if isinstance(value, list | tuple) else [value])]
    return text, [element for element in nested if isinstance(element, torch.Tensor) and not lies_on_host(element)]


def mixed(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one device -> 0-dim fp64 there: a whole number below 2**47, different where they are, without reading
    them."""
    bits = torch.cat([tensor.detach().reshape(-1).to(torch.float64) for tensor in numbers]).view(torch.int64)
    odd = torch.arange(1, 2 * bits.numel(), 2, dtype=torch.int64, device=bits.device)
    return ((bits * odd).sum() >> 17).to(torch.float64)


def shown_groups(groups: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Each value as text, under a name such as "lr of group 'matrices'"; a tensor on a device is read."""
    texts = {}
    for index, group in enumerate(groups):
        for name, value in group.items():
            texts[f"{name} of group {group.get('name', index)!r}"] = str(as_plain(value, reads=True))
    return texts


# ---- out to a checkpoint, and back

OF_THIS_MACHINE = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""How an update is computed, not what: they stay what the engine was built with."""


def saved_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group for JSON; of an object, such as a function, the name of its class alone."""
    return {name: _saved(value) for name, value in group.items()}


def restore_group(group: Hyperparameters, saved: Mapping[str, Any], first_lr: float) -> None:
    """Give a group the values that `saved_group` gave of another. Tensors are filled where they lie; objects stay."""
    group.first_lr = first_lr
    for name in group.own - saved.keys():  # saved before the first step
        group.pop(name, None)
    for name, value in without_objects(saved).items():
        if name not in OF_THIS_MACHINE:
            group[name] = restored(value, group.get(name))


def without_objects(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The restorable entries of a saved group."""
    return {name: value for name, value in saved.items() if not (isinstance(value, dict) and "object" in value)}


def misfits(group: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """The names of saved values without a form like the group's own ones, for `restored`."""
    values = without_objects(saved)
    common = (name for name in values if name in group and name not in OF_THIS_MACHINE)
    return [name for name in common if not _fits(values[name], group[name])]


def _fits(saved: Any, own: Any) -> bool:
    if saved is None or own is None:
        return True
    if isinstance(own, list | tuple):
        return isinstance(saved, list) and all(map(_fits, saved, own))
    shape = torch.tensor(saved["value"]).shape if isinstance(saved, dict) else torch.Size()
    is_number = isinstance(saved, dict | Real)
    if isinstance(own, torch.Tensor):
        return is_number and shape in (own.shape, torch.Size())
    return is_number and not shape if isinstance(own, Real) else isinstance(saved, str) or not isinstance(own, str)


def _saved(value: Any) -> Any:
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, list | tuple):
        return [_saved(element) for element in value]
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "value": value.tolist()}
    return float(value) if isinstance(value, Real) else {"object": type(value).__name__}


def restored(saved: Any, own: Any) -> Any:
    """A saved value in the form that `own`, the value it replaces, has."""
    if isinstance(saved, dict):
        saved = torch.tensor(saved["value"], dtype=DTYPES[saved["dtype"]])
        return own.copy_(saved) if isinstance(own, torch.Tensor) else saved
    if isinstance(own, torch.Tensor):
        return own.fill_(saved)
    if isinstance(saved, list):
        owned = list(own) if isinstance(own, list | tuple) and len(own) == len(saved) else [None] * len(saved)
        values = [restored(element, own_element) for element, own_element in zip(saved, owned, strict=True)]
        return values if isinstance(own, list) else tuple(values)
    return saved
