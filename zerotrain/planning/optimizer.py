"""An optimizer whose step is rehearsed: on small tensors it is seen what it keeps of an element, and takes for it."""

from dataclasses import dataclass
from typing import Any

import torch

from zerotrain.engine.groups.optimizers import OptimizerFactory, build_optimizer, updates_whole
from zerotrain.planning.live import LiveMemory

SAMPLE_NUMEL = 2**14


@dataclass(frozen=True)
class Seen:
    """Bytes and state of an optimizer that works on elements."""

    states: dict[str, torch.dtype]
    """State of the shape of what is updated, by name."""
    counters: dict[str, torch.dtype]
    """State that is one number."""
    taken: float
    """Bytes alive for a moment in a step, for each element of a tensor."""
    at_once: bool
    """Whether they are of all tensors at once, and not of one after the other."""


def look_at(factory: OptimizerFactory, *, on_host: bool) -> Seen | None:
    """Make two steps on the CPU; None of an optimizer that updates all its tensors whole.

    Args:
        on_host: False: to be seen as on a GPU; where torch takes many tensors at once there, it does here.
    """
    if updates_whole(factory) and not hasattr(factory, "needs_whole"):
        return None
    taken = [_taken(factory, num, on_host=on_host) for num in (1, 2)]
    kept = {name: value for name, value in taken[0][1].items() if isinstance(value, torch.Tensor)}
    states = {name: value.dtype for name, value in kept.items() if value.shape == (SAMPLE_NUMEL,)}
    counters = {name: value.dtype for name, value in kept.items() if value.ndim == 0}
    return Seen(states, counters, taken[0][0] / SAMPLE_NUMEL, at_once=taken[1][0] > 1.5 * taken[0][0])


def _taken(factory: OptimizerFactory, num: int, *, on_host: bool) -> tuple[int, dict[str, Any]]:
    params = [torch.zeros(SAMPLE_NUMEL) for _ in range(num)]
    optimizer = build_optimizer(factory, [{"params": params, "name": "matrices"}])
    for group in optimizer.param_groups:
        if not on_host and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    for each in params:
        each.grad = torch.zeros_like(each)
    optimizer.step()
    with LiveMemory() as live:
        for each in params:
            live.name("kept", each, *(() if each.grad is None else (each.grad,)))
        for value in (value for state in optimizer.state.values() for value in state.values()):
            if isinstance(value, torch.Tensor):
                live.name("kept", value)
        before = live.nbytes
        optimizer.step()
    return live.peak_nbytes - before, next(iter(optimizer.state.values()), {})


class RehearsedFactory:
    """Makes the optimizers of a rehearsal. Those of tensors with values are made as ever.

    Args:
        factory: makes the optimizers of the run.
        seen: see `look_at`.
    """

    def __init__(self, factory: OptimizerFactory, seen: Seen | None) -> None:
        self._factory, self._seen = factory, seen
        self._made: dict[str, torch.optim.Optimizer] = {}
        """On one number for each group, by the groups' settings: buckets are many and alike."""

    def __getattr__(self, name: str) -> Any:
        """The factory's other attributes, such as `needs_whole`."""
        return getattr(self._factory, name)

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """See `OptimizerFactory`."""
        is_real = not all(each.is_meta for group in groups for each in group["params"])
        if is_real or self._seen is None or str(groups[0].get("name")).startswith("whole "):
            return self._factory(groups)
        key = repr([group | {"params": None} for group in groups])
        if key not in self._made:
            self._made[key] = self._factory([group | {"params": [torch.zeros(1)]} for group in groups])
        made = self._made[key]
        given = [{**group, "params": named["params"]} for group, named in zip(made.param_groups, groups, strict=True)]
        return RehearsedOptimizer(given, made.defaults, self._seen)


class RehearsedOptimizer(torch.optim.Optimizer):
    """Has the state and takes the memory that the real one would."""

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], seen: Seen) -> None:
        self._seen = seen
        super().__init__(groups, defaults)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update nothing."""
        updated = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        for each in updated:
            for name, dtype in self._seen.states.items():
                if name not in self.state[each]:
                    self.state[each][name] = torch.empty_like(each, dtype=dtype)
            for name, dtype in self._seen.counters.items():
                if name not in self.state[each]:
                    self.state[each][name] = torch.empty((), dtype=dtype, device=each.device)
        numels = [each.numel() for each in updated]
        for numel in [sum(numels)] if self._seen.at_once else numels:
            torch.empty(int(numel * self._seen.taken), dtype=torch.uint8, device="meta")
